"""All modes of the trainer, one after the other, in one process or as one of several workers.

  python -m tests.transformer.modes_program FOLDER NAME

What a mode writes goes to FOLDER/NAME; the model and its vocabulary are in FOLDER/model.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import sys
import threading
import time

import gin
import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.environment import virtual_devices
from mesh_tensorflow.transformer import (
  gin_config,
  utils,
)
from mesh_tensorflow.transformer.data import eval_datasets
from tests.transformer.modes import test_modes

STEPS = 6
MODES = (
  "perplexity_eval", "eval", "score_eval", "infer", "score_from_strings", "score_from_dataset",
)  # fmt: skip


def bindings(folder: pathlib.Path, *more: str) -> list[str]:
  """Bindings, each name once: the last counts; first what is imported for them."""
  lines = test_modes.bindings(
    folder,
    "run.mesh_shape = 'batch:2'",
    "run.layout_rules = 'batch:batch'",
    "run.mesh_implementation = 'simd'",
    f"run.train_steps = {STEPS}",
    "run.iterations_per_loop = 3",
    "run.save_checkpoints_steps = 3",
    "import mesh_tensorflow.transformer.subword_vocabulary",
    "run.vocabulary = @vocabulary.get_subword_vocabulary()",
    f"vocabulary.get_subword_vocabulary.filename = '{folder}/vocabulary/model'",
    f"vocabulary.get_subword_vocabulary.train_files = '{folder}/pairs.tsv'",
    "vocabulary.get_subword_vocabulary.model_type = 'bpe'",
    "vocabulary.get_subword_vocabulary.vocab_size = 40",
    *more,
  )
  lines = list({line.split(" = ")[0]: line for line in lines}.values())
  return sorted(lines, key=lambda line: not line.startswith("import "))


@gin.configurable(module="modes_program")
def same(targets, predictions):
  return {"same": sum(t == p for t, p in zip(targets, predictions))}


@gin.configurable(module="modes_program")
def total(targets, scores):
  return {"total": sum(scores)}


@gin.configurable(module="modes_program")
def shuffled(**kwargs):
  """The pairs in an order that no seed of their own says."""

  def shuffle(d):
    return d._replace(dataset_fn=lambda **given: d.dataset_fn(**given).shuffle(10))

  return [shuffle(d) for d in eval_datasets.parallel_text_eval_datasets(**kwargs)]


def run(folder: pathlib.Path, *more: str):
  gin.clear_config()
  gin_config.parse_gin([], bindings(folder, *more))
  return utils.run(None, None, None, None, str(folder / "model"))


def run_mode(folder: pathlib.Path, name: str, mode: str):
  """Runs one that evaluates, scores or decodes; its files go to `folder / name`."""
  out = folder / name
  out.mkdir(exist_ok=True)
  metric = "total" if mode == "score_eval" else "same"
  return run(
    folder,
    f"run.mode = '{mode}'",
    "run.eval_dataset_fn = @modes_program.shuffled",
    "score_from_dataset.score_dataset_fn = @modes_program.shuffled",
    "run.dataset_split = 'validation'",
    f"run.eval_summary_dir = '{out}/{mode}'",
    f"dataset.parallel_text_eval_datasets.metric_fns = [@modes_program.{metric}]",
    "Bitransformer.decode.beam_size = 1",
    f"Bitransformer.decode.temperature = {0.7 if mode == 'infer' else 0.0}",
    f"decode_from_file.input_filename = '{folder}/inputs.txt'",
    f"decode_from_file.output_filename = '{out}/decoded'",
    f"score_from_strings.inputs = '{folder}/inputs.txt'",
    f"score_from_strings.targets = '{folder}/targets.txt'",
    f"save_scores.scores_filename = '{out}/{mode}'",
    "score_from_dataset.score_with_estimator_fn = @score_with_estimator_lazy",
    "score_from_dataset.score_postprocess_fn = @save_scores_to_tfrecords",
    f"save_scores_to_tfrecords.scores_filename = '{out}/shard'",
  )


def run_modes(folder: pathlib.Path, name: str) -> list[str]:
  """What each returned, as text."""
  return [f"{mode}: {run_mode(folder, name, mode)!r}" for mode in MODES]


def watch(folder: pathlib.Path) -> None:
  """Evaluates what there is, and a checkpoint that comes while it waits."""

  def publish():
    time.sleep(3)
    for file in sorted((folder / "model").glob(f"model.ckpt-{STEPS}.*"), reverse=True):
      new = file.name.replace(f"-{STEPS}.", f"-{STEPS + 2}.", 1)
      shutil.copy(file, folder / "model" / f"new-{new}")
      os.rename(folder / "model" / f"new-{new}", folder / "model" / new)
    (folder / "model" / "checkpoint").unlink()

  if workers.current().is_chief:
    threading.Thread(target=publish).start()
  run(
    folder, "run.mode = 'perplexity_eval'", "run.dataset_split = 'validation'",
    "run.eval_checkpoint_step = 'new'", f"get_checkpoint_iterator.stop_after = {STEPS + 2}",
  )  # fmt: skip


def forbid_writing() -> None:
  """For workers that are not the chief: they write nothing but their parts of checkpoints."""
  open_file = tf.io.gfile.GFile

  def read_or_fail(name, mode="r"):
    assert "w" not in mode or ".unfinished-" in str(name), f"a worker writes {name}"
    return open_file(name, mode)

  def fail(*args, **kwargs):
    raise AssertionError(f"a worker writes {args}")

  tf.io.gfile.GFile = read_or_fail
  tf.io.TFRecordWriter = tf.summary.create_file_writer = fail


def main(folder: pathlib.Path, name: str) -> None:
  cluster = workers.cluster_from_environment()
  if cluster.size == 1:
    virtual_devices.virtual_cpu_devices(2)
  if not cluster.is_chief:
    forbid_writing()
  losses = run(folder)
  assert len(losses) == STEPS
  for line in run_modes(folder, name):
    print(f"worker {cluster.index}: {line}", flush=True)
  watch(folder)


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]), sys.argv[2])
  workers.leave(sys.stdout.flush)
