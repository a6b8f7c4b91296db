"""The trainer's real program as one process or several workers, for tests of workers and faults."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence

import tensorflow as tf
from tensorflow.core.util import event_pb2

from tests import worker_group

TEXT = "To be, or not to be, that is the question.\nWhether 'tis nobler in the mind\n" * 60

# A model of one layer with dropout, in float32.
SMALL = [
  "num_layers = 1",
  "d_model = 32",
  "d_ff = 64",
  "num_heads = 4",
  "d_kv = 8",
  "dropout_rate = 0.1",
  "Unitransformer.max_length = 16",
  "Unitransformer.vocab_divisor = 64",
  "run.sequence_length = {'inputs': 16, 'targets': 16}",
  "run.batch_size = 12",
  "run.learning_rate_schedule = 0.01",
  "run.iterations_per_loop = 2",
  "run.report_every = 2",
  "run.save_checkpoints_steps = 4",
  "run.train_steps = 8",
]


def trainer_arguments(model_dir: os.PathLike[str], *bindings: str) -> list[str]:
  """Arguments of the trainer's main, for a training of the small model on a text of its own."""
  text = pathlib.Path(model_dir).parent / "text.txt"
  if not text.exists():
    text.write_text(TEXT)
  bindings = [f"text_file = '{text}'", *SMALL, *bindings]
  files = ["--gin_file=problems/tinyshakespeare.gin"]
  return [f"--model_dir={model_dir}", *files, *[f"--gin_param={b}" for b in bindings]]


def on_mesh(mesh_shape: str, layout: str) -> list[str]:
  """Bindings."""
  return [f"run.mesh_shape = '{mesh_shape}'", f"run.layout_rules = '{layout}'"]


def launcher(workers: int, arguments: Sequence[str], *options: str) -> list[str]:
  """The command line of the launcher of several."""
  module = "mesh_tensorflow.transformer.launch"
  return [sys.executable, "-m", module, f"--workers={workers}", *options, "--", *arguments]


def run(workers: int, arguments: Sequence[str], code: int = 0, timeout: float = 240) -> str:
  """Runs to the end; returns stdout and stderr, of one worker after the other."""
  command = ["-m", "mesh_tensorflow.transformer.main", *arguments]
  found, texts = worker_group.run(workers, command, timeout)
  assert found == [code] * workers, "\n".join(texts)
  return "".join(texts)


@contextlib.contextmanager
def processes(
  folder: pathlib.Path, workers: int, arguments: Sequence[str], more: Sequence[str] = ()
) -> Iterator[worker_group.Group]:
  """Starts workers, each with these arguments and the last with more; ends them with the block."""
  command = ["-m", "mesh_tensorflow.transformer.main", *arguments]
  with worker_group.running(folder, workers, command, more) as group:
    yield group


def losses(model_dir: os.PathLike[str]) -> dict[int, float]:
  """The loss of each step, from the event files; of a step done twice, the last."""
  result = {}
  for file in sorted(pathlib.Path(model_dir).glob("events*")):
    for record in tf.data.TFRecordDataset(str(file)).as_numpy_iterator():
      event = event_pb2.Event.FromString(record)
      for value in event.summary.value:
        if value.tag == "loss":
          result[event.step] = float(tf.make_ndarray(value.tensor))
  return dict(sorted(result.items()))


def checkpoint_values(model_dir: os.PathLike[str], step: int) -> dict[str, bytes]:
  """All tensors of a checkpoint, with dtypes and shapes, to be compared bit for bit."""
  reader = tf.train.load_checkpoint(str(pathlib.Path(model_dir) / f"model.ckpt-{step}"))
  values = {}
  for name in reader.get_variable_to_shape_map():
    x = reader.get_tensor(name)
    values[name] = str((x.dtype, x.shape)).encode() + x.tobytes()
  return values
