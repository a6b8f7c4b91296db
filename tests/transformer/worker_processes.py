"""The trainer's real program as one process or several workers, for tests of workers and faults."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf
from tensorflow.core.util import event_pb2

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


def command(workers: int, arguments: Sequence[str], *options: str) -> list[str]:
  """The command line: of the trainer alone, or of the launcher of several."""
  module = "mesh_tensorflow.transformer."
  if workers == 1 and not options:
    return [sys.executable, "-m", f"{module}main", *arguments]
  return [
    sys.executable, "-m", f"{module}launch", f"--workers={workers}", *options, "--", *arguments
  ]  # fmt: skip


def run(
  workers: int, arguments: Sequence[str], *options: str, code: int = 0, timeout: float = 240
) -> str:
  """Runs to the end; returns stdout and stderr."""
  done = subprocess.run(
    command(workers, arguments, *options), capture_output=True, text=True, timeout=timeout
  )
  text = done.stdout + done.stderr
  assert done.returncode == code, text
  return text


class Processes:
  """Workers, each a process of its own whose output goes to a file.

  Args:
    folder: for the files.
    workers: how many.
    arguments: of all.
    more: of the last worker.
  """

  def __init__(
    self, folder: pathlib.Path, workers: int, arguments: Sequence[str], more: Sequence[str] = ()
  ):
    with contextlib.ExitStack() as stack:
      sockets = [stack.enter_context(socket.socket()) for _ in range(workers)]
      for s in sockets:
        s.bind(("127.0.0.1", 0))
      addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    self.outputs = [folder / f"worker-{i}.txt" for i in range(workers)]
    self.all = []
    for i, output in enumerate(self.outputs):
      task = {"type": "worker", "index": i}
      config = {"cluster": {"worker": addresses}, "task": task}
      environ = dict(os.environ, TF_CONFIG=json.dumps(config) if workers > 1 else "")
      own = [*arguments, *(more if i == workers - 1 else ())]
      with output.open("w") as f:
        self.all.append(
          subprocess.Popen(command(1, own), env=environ, stdout=f, stderr=subprocess.STDOUT)
        )

  def text(self, worker: int) -> str:
    return self.outputs[worker].read_text(errors="replace")

  def wait_for(
    self, condition: Callable[[], bool], timeout: float = 180, *, may_end: bool = False
  ) -> None:
    """Waits until something is so, while all processes run, or some."""
    end = time.monotonic() + timeout
    while not condition():
      everything = "\n".join(self.text(i) for i in range(len(self.all)))
      assert time.monotonic() < end, everything
      running = [p.poll() is None for p in self.all]
      assert any(running) if may_end else all(running), everything
      time.sleep(0.05)

  def wait_of(self, worker: int, timeout: float) -> int:
    """The exit code of one."""
    return self.all[worker].wait(timeout)

  def wait(self, timeout: float = 240) -> list[int]:
    """Exit codes of all."""
    end = time.monotonic() + timeout
    return [p.wait(max(0.1, end - time.monotonic())) for p in self.all]


@contextlib.contextmanager
def processes(
  folder: pathlib.Path, workers: int, arguments: Sequence[str], more: Sequence[str] = ()
) -> Iterator[Processes]:
  """Starts workers, and ends them with the block."""
  group = Processes(folder, workers, arguments, more)
  try:
    yield group
  finally:
    for p in group.all:
      if p.poll() is None:
        p.send_signal(signal.SIGKILL)
      p.wait()


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
