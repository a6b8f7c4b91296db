"""The real program: modes, files it writes, and its answers to wrong input."""

from __future__ import annotations

import os
import pathlib

import gin
import pytest
import tensorflow as tf

from mesh_tensorflow import errors
from mesh_tensorflow.transformer import gin_config, utils
from mesh_tensorflow.transformer.commands import command_line

SMALL = [
  "num_layers = 1",
  "d_model = 32",
  "d_ff = 64",
  "num_heads = 2",
  "d_kv = 16",
  "run.sequence_length = {'inputs': 32, 'targets': 32}",
  "Unitransformer.max_length = 32",
  "run.batch_size = ('sequences_per_batch', 4)",
  "run.iterations_per_loop = 10",
  "run.report_every = 10",
]
LINES = "To be, or not to be, that is the question.\nWhether 'tis nobler in the mind\n" * 60


@pytest.fixture
def text_file(tmp_path: pathlib.Path) -> str:
  path = tmp_path / "text.txt"
  path.write_text(LINES)
  return str(path)


def run(model_dir, text, *bindings, files=("problems/tinyshakespeare.gin",)):
  """`utils.run` with gin files and bindings, in this process."""
  gin.clear_config()
  gin_config.parse_gin(list(files), [f"text_file = '{text}'", *SMALL, *bindings])
  return utils.run(None, None, None, None, str(model_dir))


def test_train_evaluate_infer_as_a_program(tmp_path, text_file, run_subprocess, run_forked):
  """The command line of the README, on a 2x2 mesh."""
  model_dir = str(tmp_path / "model")
  common = ["-m", "mesh_tensorflow.transformer.main", f"--model_dir={model_dir}"]
  common += ["--gin_file=problems/tinyshakespeare.gin", "--gin_file=layouts/cpu_2x2.gin"]
  common += [f"--gin_param={b}" for b in [f"text_file = '{text_file}'", *SMALL]]
  trained = run_subprocess([*common, "--gin_param=run.train_steps = 20"], timeout=280)
  assert "d_ff         split over model" in trained.stdout
  assert "step      20/20  loss" in trained.stdout and "tokens/s" in trained.stdout
  assert "oneDNN" not in trained.stderr and "Traceback" not in trained.stderr
  names = os.listdir(model_dir)
  assert {"checkpoint", "model.ckpt-20.index", "operative_config.gin", "command"} <= set(names)
  assert any(n.startswith("events.out.tfevents") for n in names)

  prompts = tmp_path / "prompts.txt"
  prompts.write_text("To be\nWhether\n")
  inferred = run_forked(
    [
      *common,
      "--gin_param=run.mode = 'infer'",
      f"--gin_param=decode_from_file.input_filename = '{prompts}'",
      f"--gin_param=decode_from_file.output_filename = '{tmp_path}/samples'",
    ],
    timeout=280,
  )
  assert "restored" in inferred.stdout
  lines = (tmp_path / "samples-20").read_text().splitlines()
  assert len(lines) == 2 and lines[0].startswith("To be") and lines[1].startswith("Whether")


def test_wrong_binding_is_one_line_and_exit_code_2(tmp_path, text_file, run_forked):
  result = run_forked(
    [
      "-m", "mesh_tensorflow.transformer.main", f"--model_dir={tmp_path}/model",
      "--gin_file=problems/tinyshakespeare.gin", "--gin_param=run.train_stepz = 20",
    ],
    timeout=120, check=False,
  )  # fmt: skip
  assert result.returncode == 2
  assert result.stderr.strip().splitlines()[-1].startswith("ConfigError: gin: ")
  assert "train_stepz" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.slow
def test_training_evaluation_and_summaries(tmp_path, text_file):
  losses = run(tmp_path / "m", text_file, "run.train_steps = 30")
  assert len(losses) == 30 and losses[-1] < losses[0]
  metrics = run(tmp_path / "m", text_file, "run.mode = 'eval'", "run.dataset_split = 'validation'")
  assert 0 < metrics["validation"]["loss"] < losses[0]
  events = tf.io.gfile.glob(str(tmp_path / "m" / "validation_eval" / "events*"))
  # The names stand in the records as they are; no event parser is needed to find them.
  records = b"".join(r.numpy() for f in events for r in tf.data.TFRecordDataset(f))
  assert b"eval/validation/loss" in records


@pytest.mark.slow
def test_training_twice_goes_on_where_it_stopped(tmp_path, text_file, capsys):
  run(tmp_path, text_file, "run.train_steps = 10")
  run(tmp_path, text_file, "run.train_steps = 20")
  assert "restored" in capsys.readouterr().out
  assert run(tmp_path, text_file, "run.train_steps = 20") == []


@pytest.mark.parametrize(
  ("bindings", "error", "text"),
  [
    (["run.train_stepz = 3"], errors.ConfigError, "no parameter 'train_stepz'"),
    (["rum.train_steps = 3"], errors.ConfigError, "did you mean.*run"),
    (["run.mode = 'trian'"], errors.ConfigError, "run.mode = 'trian'.*'train'.*did you mean train"),
    (["run.model_type = 'gpt'"], errors.ConfigError, "run.model_type = 'gpt'.*'bitransformer'"),
    (["text_file = 'nowhere.txt'"], errors.DataError, "nowhere.txt"),
    (["text_file = '{empty}'"], errors.DataError, "empty"),
    (["text_file = '{short}'"], errors.DataError, "sho|few|less|window"),
    (["run.sequence_length = 64"], errors.ShapeError, "length=64.*max_length=32"),
    (["run.mesh_shape = 'batch:3'", "run.layout_rules = 'batch:batch'"], errors.LayoutError,
     "batch:4.*batch:3.*3 does not divide 4"),
    (["run.mesh_shape = 'model:4'", "run.layout_rules = 'hedas:model'"], errors.LayoutError,
     "hedas.*did you mean heads"),
    (["run.mesh_shape = 'model:2'", "run.layout_rules = 'heads:modle'"], errors.LayoutError,
     "modle.*did you mean model"),
    (["run.mesh_shape = 'model:2'", "run.layout_rules = 'd_model:model,d_ff:model'"],
     errors.LayoutError, "both split over mesh axis model:2"),
    (["run.mesh_shape = 'batch:4,model:4'"], errors.MeshShapeError, "needs 16 devices"),
    (["run.batch_size = ('tokens_per_batch', 50)"], errors.ConfigError, "50 tokens"),
    (["run.learning_rate_schedule = 1e30"], errors.NonFiniteError, "at step"),
    (["run.vocabulary = None"], errors.ConfigError, "run.vocabulary is not bound"),
    (["run.train_dataset_fn = None"], errors.ConfigError, "run.train_dataset_fn is not bound"),
  ],
)  # fmt: skip
def test_wrong_input_is_one_clear_error(tmp_path, text_file, bindings, error, text):
  (tmp_path / "empty.txt").write_text("")
  (tmp_path / "short.txt").write_text("abc")
  names = {"{empty}": str(tmp_path / "empty.txt"), "{short}": str(tmp_path / "short.txt")}
  for old, new in names.items():
    bindings = [b.replace(old, new) for b in bindings]
  with pytest.raises(error, match=f"(?s){text}"):
    run(tmp_path / "m", text_file, "run.train_steps = 20", *bindings)


def test_a_folder_that_was_moved_with_its_file_is_told(tmp_path, monkeypatch):
  old, new = tmp_path / "old", tmp_path / "new"
  (old / "model").mkdir(parents=True)
  for name in ("train.gin", "model/checkpoint"):
    (old / name).touch()
  command_line.check_not_moved(str(old / "model"), [str(old / "train.gin")])
  old.rename(new)
  with pytest.raises(errors.ConfigError, match="was moved, add --model_dir=new/model, or"):
    monkeypatch.chdir(tmp_path)
    command_line.check_not_moved(
      str(old / "model"), ["problems/tinyshakespeare.gin", "new/train.gin"]
    )
  command_line.check_not_moved(str(old / "other"), ["new/train.gin"])
  (new / "model/checkpoint").unlink()
  command_line.check_not_moved(str(old / "model"), ["new/train.gin"])


def test_missing_gin_file_suggests_one(tmp_path, text_file):
  with pytest.raises(errors.ConfigError, match="did you mean.*problems/tinyshakespeare.gin"):
    run(tmp_path, text_file, files=["problems/tinyshakespear.gin"])


def test_too_long_text_is_an_error_when_asked(tmp_path, text_file):
  bindings = [
    "dataset.text_lm_dataset.mode = 'documents'",
    "dataset.text_lm_dataset.document_unit = 'line'",
    "dataset.text_lm_dataset.too_long = 'error'",
  ]
  with pytest.raises(errors.DataError, match="32"):
    run(tmp_path, text_file, "run.train_steps = 5", *bindings)


_GENERATOR = """
import gin
import tensorflow as tf


@gin.configurable
def endless(sequence_length, vocabulary, dataset_split):
  def rows():
    while True:
      yield {"targets": [1, 2, 3]}

  spec = {"targets": tf.TensorSpec([None], tf.int32)}
  return tf.data.Dataset.from_generator(rows, output_signature=spec)
"""


@pytest.mark.long
@pytest.mark.subprocess
def test_an_error_ends_a_program_whose_data_calls_python(tmp_path, run_forked):
  """Python waits for the threads of such data sets when it ends, and they may wait for Python."""
  (tmp_path / "mymod.py").write_text(_GENERATOR)
  bindings = ["run.train_dataset_fn = @endless", "run.mesh_shape = ''", "run.layout_rules = ''"]
  sizes = ["d_model = 8", "num_layers = 1", "run.train_steps = 5"]
  done = run_forked(
    ["-m", "mesh_tensorflow.transformer.main", "--model_dir=m", "--module_import=mymod",
     "--gin_file=problems/stdlib_lm.gin", *(f"--gin_param={b}" for b in [*bindings, *sizes])],
    cwd=tmp_path, check=False, timeout=120,
  )  # fmt: skip
  assert done.returncode == 2, done.stderr
  assert done.stderr.splitlines()[-1].startswith("DataError: examples of the training data")
