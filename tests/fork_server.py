"""Python programs without the start of Python and TensorFlow: forks of a process that has them.

`fork_server.start(...)` is as `subprocess.Popen([sys.executable, ...])`, but the process is a fork
of one that has imported TensorFlow and the trainer, and done nothing with them: five seconds of
work less for each. The program runs as `__main__` with its arguments, environment and folder, and
ends as Python ends. What a program sets before it imports TensorFlow has no effect here: what is
tested of that, and of the start itself, is tested with real processes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import pathlib
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# What may differ from the environment that the server started with: it is read at run time.
_READ_LATE = ("TF_CONFIG", "PYTHONPATH", "MTF_", "PYTEST_")

ROOT = pathlib.Path(__file__).resolve().parents[1]
_TRAINER = (
  "mesh_tensorflow.transformer.commands.launch",
  "mesh_tensorflow.transformer.commands.trainer",
)


class Process:
  """A program that was started; the names are those of `subprocess.Popen`.

  Args:
    arguments: those after `python`.
    status: reading end of a pipe, through which come its number and its exit code, each a line.
  """

  def __init__(self, arguments: Sequence[str], status: int):
    self.args = list(arguments)
    self.returncode: int | None = None
    self._status = os.fdopen(status, "rb", buffering=0)
    self.pid = int(self._status.readline() or 0)
    if not self.pid:
      raise RuntimeError("the fork server has ended; what it printed says why")

  def poll(self) -> int | None:
    with contextlib.suppress(subprocess.TimeoutExpired):
      self.wait(0)
    return self.returncode

  def wait(self, timeout: float | None = None) -> int:
    if self.returncode is None:
      if not select.select([self._status], [], [], timeout)[0]:
        raise subprocess.TimeoutExpired(self.args, timeout or 0)
      self.returncode = int(self._status.readline())
      self._status.close()
    return self.returncode

  def send_signal(self, number: int) -> None:
    if self.poll() is None:
      os.kill(self.pid, number)

  def kill(self) -> None:
    self.send_signal(signal.SIGKILL)


class Server:
  """A process that forks for each program that it is given; it ends with this process.

  Args:
    modules: are imported in it.
    python: the interpreter.
    root: the checkout whose packages programs find; the folder it runs in.
  """

  def __init__(
    self,
    modules: Sequence[str],
    python: str | os.PathLike[str] = sys.executable,
    root: pathlib.Path = ROOT,
  ):
    self._socket, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    self._env = {n: v for n, v in os.environ.items() if not n.startswith(_READ_LATE)}
    with its:
      subprocess.Popen(
        [os.fspath(python), __file__, str(its.fileno()), *modules], pass_fds=[its.fileno()],
        stdin=subprocess.DEVNULL, env=self._env, cwd=root, start_new_session=True,
      )  # fmt: skip

  def start(
    self,
    arguments: Sequence[str],
    stdout: Any,
    stderr: Any,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    stdin: Any = subprocess.DEVNULL,
  ) -> Process:
    """Starts a program; see the function `start`."""
    env = dict(os.environ if env is None else env)
    differ = {name for name in {*env, *self._env} if env.get(name) != self._env.get(name)}
    early = sorted(name for name in differ if not name.startswith(_READ_LATE))
    if early:
      raise ValueError(f"{', '.join(early)}: is read when Python or TensorFlow starts")
    request = {"arguments": list(arguments), "env": env, "cwd": os.fspath(cwd or os.getcwd())}
    reading, writing = os.pipe()
    try:
      files = [stdout.fileno(), stderr.fileno(), writing]
      files += [] if stdin == subprocess.DEVNULL else [stdin.fileno()]
      socket.send_fds(self._socket, [json.dumps(request).encode()], files)
    finally:
      os.close(writing)
    return Process(arguments, reading)


def start(
  arguments: Sequence[str],
  stdout: Any,
  stderr: Any,
  env: Mapping[str, str] | None = None,
  cwd: str | os.PathLike[str] | None = None,
) -> Process:
  """Starts a program of this checkout, in a session of its own.

  Args:
    arguments: those after `python`: "-m" and a module, "-c" and a text, or a file; and its own.
    stdout: an open file.
    stderr: an open file.
    env: its environment; that of this process if not given.
    cwd: the folder it starts in; that of this process if not given.

  Returns:
    The process.
  """
  return of_tests().start(arguments, stdout, stderr, env, cwd)


@functools.cache
def of_tests() -> Server:
  """The server of this process's tests."""
  return Server(_TRAINER)


# ------------------------------------------------------------------- in the server


def _serve(connection: socket.socket) -> dict[str, Any]:
  """Forks for each request; returns in the forks, with the request."""
  running: dict[int, int] = {}
  woken, wakes = os.pipe()
  os.set_blocking(wakes, False)
  signal.set_wakeup_fd(wakes)
  signal.signal(signal.SIGCHLD, lambda *_: None)
  while True:
    ready = select.select([connection, woken], [], [])[0]
    if woken in ready:
      os.read(woken, 4096)
    for pid in list(running):
      done, status = os.waitpid(pid, os.WNOHANG)
      if done:
        _tell(running.pop(pid), os.waitstatus_to_exitcode(status), last=True)
    if connection not in ready:
      continue
    message, files, _, _ = socket.recv_fds(connection, 1 << 20, 4)
    if not message:
      sys.exit(0)
    pid = os.fork()
    if not pid:
      signal.set_wakeup_fd(-1)
      signal.signal(signal.SIGCHLD, signal.SIG_DFL)
      os.setsid()
      os.dup2(files[0], 1)
      os.dup2(files[1], 2)
      for stdin in files[3:]:
        os.dup2(stdin, 0)
      connection.close()
      for file in (*files, *running.values(), woken, wakes):
        os.close(file)
      return json.loads(message)
    for file in (*files[:2], *files[3:]):
      os.close(file)
    running[pid] = files[2]
    _tell(files[2], pid)


def _tell(pipe: int, number: int, *, last: bool = False) -> None:
  with contextlib.suppress(BrokenPipeError):  # Who asked is no longer interested.
    os.write(pipe, b"%d\n" % number)
  if last:
    os.close(pipe)


def _run(request: dict[str, Any]) -> None:
  """As Python does it that was started with these arguments."""
  kind, *rest = request["arguments"]
  os.environ.clear()
  os.environ.update(request["env"])
  os.chdir(request["cwd"])
  further = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
  if kind == "-m":
    sys.argv = rest
    sys.path[:1] = [request["cwd"], *further]
    runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
  elif kind == "-c":
    sys.argv = ["-c", *rest[1:]]
    sys.path[:1] = ["", *further]
    exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
  else:
    sys.argv = [kind, *rest]
    sys.path[:1] = [str(pathlib.Path(kind).resolve().parent), *further]
    runpy.run_path(kind, run_name="__main__")


def main() -> None:
  sys.path[0] = os.getcwd()  # The packages of this checkout; the folder of this file is none.
  for module in sys.argv[2:]:
    importlib.import_module(module)
  gc.collect()
  gc.freeze()  # Pages that the forks share.
  _run(_serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
  main()
