"""A cluster of worker processes on this machine, as forks of `tests/fork_server.py`."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

from tests import fork_server, ports


class Group:
  """Workers, each a process of its own whose output goes to a file; see `fork_server`.

  Args:
    folder: for the files.
    workers: how many.
    arguments: of all, those after `python`.
    more: of the last worker.
  """

  def __init__(
    self, folder: pathlib.Path, workers: int, arguments: Sequence[str], more: Sequence[str] = ()
  ):
    addresses = [f"127.0.0.1:{port}" for port in ports.free(workers)]
    self.outputs = [folder / f"worker-{i}.txt" for i in range(workers)]
    self.all = []
    for i, output in enumerate(self.outputs):
      task = {"type": "worker", "index": i}
      config = {"cluster": {"worker": addresses}, "task": task}
      environ = dict(os.environ, TF_CONFIG=json.dumps(config) if workers > 1 else "")
      own = [*arguments, *(more if i == workers - 1 else ())]
      with output.open("w") as f:
        self.all.append(fork_server.start(own, f, f, environ))

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
def running(
  folder: pathlib.Path, workers: int, arguments: Sequence[str], more: Sequence[str] = ()
) -> Iterator[Group]:
  """Starts workers, and ends them with the block."""
  group = Group(folder, workers, arguments, more)
  try:
    yield group
  finally:
    for p in group.all:
      if p.poll() is None:
        p.send_signal(signal.SIGKILL)
      p.wait()


def run(
  workers: int, arguments: Sequence[str], timeout: float = 240
) -> tuple[list[int], list[str]]:
  """Runs to the end; the exit codes and what was printed, of each."""
  with tempfile.TemporaryDirectory() as folder:
    with running(pathlib.Path(folder), workers, arguments) as group:
      codes = group.wait(timeout)
      return codes, [group.text(i) for i in range(workers)]
