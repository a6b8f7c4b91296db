"""The recipe of docs/from_t5.md: fine-tuning a checkpoint of T5's on TSV files."""

from __future__ import annotations

import importlib
import re
import sys

import gin
import pytest
import tensorflow as tf

from mesh_tensorflow import checkpoint
from mesh_tensorflow.transformer import gin_config, utils
from tests.transformer.modes.test_eval_scalars import parse_events_files

CONFIG = """
import mesh_tensorflow.optimize
import mesh_tensorflow.transformer.vocabulary
run.vocabulary = @vocabulary.get_byte_vocabulary()
run.model_type = 'bitransformer'
run.optimizer = @optimize.AdafactorOptimizer
run.sequence_length = {'inputs': 8, 'targets': 8}
run.batch_size = 8
run.iterations_per_loop = 2
run.learning_rate_schedule = 0.001
run.mesh_shape = ''
run.layout_rules = ''
Unitransformer.max_length = 8
num_layers = 1
d_model = 16
d_ff = 16
num_heads = 2
d_kv = 8
get_variable_dtype.master_dtype = 'float32'
get_variable_dtype.activation_dtype = 'float32'
"""
STEP = 1_000_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory, repository):
  """The module of the page, ten TSV files of 5 pairs each, and a configuration."""
  path = tmp_path_factory.mktemp("from_t5")
  page = (repository / "docs" / "from_t5.md").read_text()
  (module,) = re.findall(r"^```python no-run\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
  (path / "my_task.py").write_text(module)
  for i in range(10):
    (path / f"train-{i}.tsv").write_text("".join(f"{i}{j}\tb{j}\n" for j in range(5)))
  (path / "validation.tsv").write_text("a1\tb1\na2\tb2\na3\tb3\n")
  (path / "config.gin").write_text(CONFIG)
  sys.path.insert(0, str(path))
  importlib.import_module("my_task")
  yield path
  sys.path.remove(str(path))
  gin.clear_config()


def bindings(folder, *more):
  return [
    "utils.run.train_dataset_fn = @my_task.tsv_dataset_fn",
    f"my_task.tsv_dataset_fn.filename = '{folder}/train-*.tsv'",
    "utils.run.eval_dataset_fn = @my_task.tsv_eval_dataset_fn",
    f"my_task.tsv_eval_dataset_fn.filename = '{folder}/validation.tsv'",
    *more,
  ]


def run(folder, model_dir, *more):
  gin.clear_config()
  gin_config.parse_gin([str(folder / "config.gin")], bindings(folder, *more))
  return utils.run(None, None, None, None, str(folder / model_dir))


@pytest.fixture(scope="module")
def pretrained(folder):
  """A folder with model.ckpt-1000000 as TensorFlow 1 leaves it: no more than its variables."""
  run(folder, "first", "utils.run.train_steps = 1")
  reader = tf.train.load_checkpoint(str(folder / "first"))
  names = [n for n in reader.get_variable_to_shape_map() if n[0] != "_" and n != "global_step"]
  (folder / "pretrained").mkdir()
  path = str(folder / "pretrained" / f"model.ckpt-{STEP}")
  tf.raw_ops.SaveV2(
    prefix=path,
    tensor_names=[*names, "global_step"],
    shape_and_slices=[""] * (len(names) + 1),
    tensors=[*(tf.constant(reader.get_tensor(n)) for n in names), tf.constant(STEP, tf.int64)],
  )
  state = f'model_checkpoint_path: "model.ckpt-{STEP}"\n'
  (folder / "pretrained" / "checkpoint").write_text(state)
  return "pretrained"


@pytest.mark.long
@pytest.mark.subprocess
def test_the_recipe(folder, pretrained, run_forked, tmp_path):
  """The real command trains on; evaluation and inference follow in this process."""
  steps = f"utils.run.train_steps = {STEP + 10}"
  arguments = [f"--gin_param={b}" for b in bindings(folder, steps)]
  done = run_forked(
    ["-m", "mesh_tensorflow.transformer.main", "--module_import=my_task",
     f"--model_dir={folder / pretrained}", f"--gin_file={folder / 'config.gin'}", *arguments],
    cwd=folder, timeout=200,
  )  # fmt: skip
  assert "written by another program: the training data begins with its first" in done.stdout
  assert "an epoch of 50 examples begins anew" in done.stdout
  assert done.stdout.count("begins anew") == 1 and "are read" not in done.stdout
  assert f"step {STEP + 10}/{STEP + 10}" in done.stdout
  # It goes on behind the ten batches seen, and knows an epoch's size.
  assert len(run(folder, pretrained, f"utils.run.train_steps = {STEP + 12}")) == 2

  found = run(
    folder, pretrained, "utils.run.mode = 'eval'", "utils.run.dataset_split = 'validation'"
  )
  assert list(found["my_task"]) == ["accuracy"]
  out = folder / pretrained / "validation_eval"
  assert (out / "my_task_targets").read_text() == "b1\nb2\nb3\n"
  predictions = (out / f"my_task_{STEP + 12}_predictions").read_text()
  assert parse_events_files(out) == {
    "eval/my_task/accuracy": [(STEP + 12, pytest.approx(found["my_task"]["accuracy"]))]
  }
  run(
    folder, pretrained, "utils.run.mode = 'infer'", "infer_model.decode_fn = @decode_from_dataset",
    "decode_from_dataset.infer_dataset_fn = @my_task.tsv_eval_dataset_fn",
    f"decode_from_dataset.decode_output_dir = '{tmp_path}'",
  )  # fmt: skip
  assert (tmp_path / f"my_task_{STEP + 12}_predictions").read_text() == predictions


@pytest.mark.long
def test_a_new_folder_with_init_checkpoint(folder, pretrained, capsys):
  path = folder / pretrained / f"model.ckpt-{STEP}"
  init = f"utils.run.init_checkpoint = '{path}'"
  assert len(run(folder, "new", init, f"utils.run.train_steps = {STEP + 2}")) == 2
  assert len(run(folder, "new", init, f"utils.run.train_steps = {STEP + 4}")) == 2
  newest = checkpoint.latest_checkpoint(str(folder / "new"))
  assert checkpoint.get_step_from_path(newest) == STEP + 4
