"""Starts several worker processes of the trainer on this machine, as a cluster would.

  python -m mesh_tensorflow.transformer.launch --workers=2 -- --model_dir=... --gin_file=...

What stands after `--` goes to every worker's `mesh_tensorflow.transformer.main`. The devices of the
mesh are shared by the workers: a mesh of 4 processors and 2 workers means 2 virtual CPU devices (or
GPUs) each. The output of worker 0 is shown as it is, that of the others with their numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from mesh_tensorflow.workers import EXIT_WORKER_LOST

# How long workers may take to notice that another one is gone, and to end.
_GRACE_SECONDS = 90.0


def launch(command: Sequence[str], workers: int, restarts: int = 0) -> int:
  """Runs a command in several processes that find each other by TF_CONFIG.

  SIGTERM and SIGINT are passed on to all of them. When one fails, the others get time to end by
  themselves.

  Args:
    command: program and arguments.
    workers: how many processes.
    restarts: how often all of them are started again after one failed.

  Returns:
    0, or the exit code of the worker that failed first by itself; 128 + n for signal n.
  """
  for attempt in range(restarts + 1):
    with _Workers(command, workers) as group:
      code = group.wait()
    if code == 0 or group.was_stopped or attempt == restarts:
      return code
    print(
      f"launch: a worker failed with exit code {code}; all are started again "
      f"({attempt + 1} of {restarts})",
      file=sys.stderr,
      flush=True,
    )
  return code


class _Workers:
  """The processes of one attempt."""

  def __init__(self, command: Sequence[str], count: int):
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(count)]
    self.was_stopped = False
    self._processes: list[subprocess.Popen] = []
    self._readers: list[threading.Thread] = []
    for i in range(count):
      environ = dict(os.environ)
      if count > 1:
        task = {"type": "worker", "index": i}
        environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
      output: dict[str, Any] = {}
      if i:
        output = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
      # In a session of its own: Ctrl-C reaches the launcher alone, which passes it on once.
      process = subprocess.Popen(list(command), env=environ, start_new_session=True, **output)
      self._processes.append(process)
      if i:
        reader = threading.Thread(target=_copy, args=(process, f"[worker {i}] "), daemon=True)
        reader.start()
        self._readers.append(reader)

  def __enter__(self) -> _Workers:
    return self

  def __exit__(self, *exc_info: Any) -> None:
    for p in self._processes:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(p.pid, signal.SIGKILL)
      p.wait()
    for r in self._readers:
      r.join(5.0)

  def wait(self) -> int:
    """Waits for all; the exit code of `launch`."""
    codes: dict[int, int] = {}
    deadline = None
    with self._signals_passed_on():
      while len(codes) < len(self._processes):
        for i, p in enumerate(self._processes):
          if i not in codes and p.poll() is not None:
            codes[i] = p.returncode
            if p.returncode and deadline is None:
              deadline = time.monotonic() + _GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
          left = [i for i in range(len(self._processes)) if i not in codes]
          print(f"launch: workers {left} do not end and are killed", file=sys.stderr, flush=True)
          break
        time.sleep(0.05)
    failed = [c for c in codes.values() if c]
    # Those that only lost another worker are not to blame.
    own = [c for c in failed if c != EXIT_WORKER_LOST]
    code = (own or failed or [0])[0]
    return 128 - code if code < 0 else code

  @contextlib.contextmanager
  def _signals_passed_on(self) -> Iterator[None]:
    def pass_on(number, frame):
      del frame
      self.was_stopped = True
      for p in self._processes:
        if p.poll() is None:
          p.send_signal(number)

    if threading.current_thread() is not threading.main_thread():
      yield
      return
    before = {s: signal.signal(s, pass_on) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
      yield
    finally:
      for s, handler in before.items():
        signal.signal(s, handler)


def _copy(process: subprocess.Popen, prefix: str) -> None:
  for line in process.stdout:
    sys.stderr.write(prefix + line)
    sys.stderr.flush()


def _free_ports(count: int) -> list[int]:
  with contextlib.ExitStack() as stack:
    sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
    for s in sockets:
      s.bind(("127.0.0.1", 0))
    return [s.getsockname()[1] for s in sockets]


def main(arguments: Sequence[str] | None = None) -> int:
  """Parses the command line and launches."""
  parser = argparse.ArgumentParser(
    prog="mesh-transformer-launch",
    description="Starts several workers of the Transformer trainer on this machine.",
    epilog="Example: %(prog)s --workers=2 -- --model_dir=/tmp/m --gin_file=problems/demo.gin "
    "--gin_param=\"run.mesh_shape='batch:2,model:2'\"",
  )
  parser.add_argument("--workers", type=int, required=True, help="number of worker processes")
  parser.add_argument(
    "--restarts", type=int, default=0, help="start all again so often when one fails"
  )
  parser.add_argument("trainer", nargs="*", help="arguments of every worker's trainer, after --")
  args = parser.parse_args(arguments)
  if args.workers < 1:
    parser.error(f"--workers={args.workers}: at least one worker is needed")
  if args.restarts < 0:
    parser.error(f"--restarts={args.restarts} is negative")
  command = [sys.executable, "-m", "mesh_tensorflow.transformer.main", *args.trainer]
  return launch(command, args.workers, args.restarts)


if __name__ == "__main__":
  sys.exit(main())
