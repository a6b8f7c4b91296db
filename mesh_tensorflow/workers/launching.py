"""Starts several worker processes on this machine, as a cluster would.

Only what ends them belongs to it: what they run is a command of whoever calls.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mesh_tensorflow import exit_codes
from mesh_tensorflow.workers import launcher_reports, own_network, parent_watch

# Time limit for workers to notice that another one is gone, and to exit.
_GRACE_SECONDS = 60.0

_OPEN_PORTS = (
  "whoever reaches their ports can read and write files as you; see SECURITY.md; let a firewall "
  "close all ports that are not meant to be open"
)

# Pauses before a new start: longer each time, while starts fail soon.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0


def launch(
  command: Sequence[str], workers: int, restarts: int = 0, *, share_network: bool = False
) -> int:
  """Runs a command in several processes that find each other by TF_CONFIG.

  SIGTERM and SIGINT are passed on to all of them. When one ends, the others get time to end by
  themselves. When this process ends, however that may be, they are asked to stop.

  Several workers get a network of their own where the system allows it (see `own_network`), since
  whoever reaches a worker's port can act as its user; where it does not, a warning says so.

  Args:
    command: program and arguments.
    workers: number of processes.
    restarts: how often in a row all of them are started again after one failed, after a pause; not
      where that cures nothing, see `exit_codes.TABLE`. A checkpoint of a newer step than all before
      is progress, after which the count begins anew.
    share_network: whether workers use this machine's network instead, and their ports are open: for
      files and data that come over the network. An argument with "://" asks for it, too.

  Returns:
    0, or the exit code of the worker that failed first by itself; 128 + n for signal n. A worker
    that hangs, and is killed here, counts as lost (75).
  """
  pause, again, newest = _FIRST_PAUSE_SECONDS, 0, -1
  with _Signals() as signals, _network(command, workers, share_network) as network:
    while True:
      started = time.monotonic()
      with _Workers(command, workers, signals, network) as group:
        code = group.wait()
      if group.saved > newest:
        again, newest = 0, group.saved
      if code == exit_codes.DONE or signals.stopped.is_set() or again == restarts:
        return code
      why_not = exit_codes.why_not_again(code)
      if why_not is not None:
        _say(f"no worker is started again after exit code {code}: {why_not}")
        return code
      # An attempt that failed early is likely to fail again.
      soon = time.monotonic() - started < 2 * _LONGEST_PAUSE_SECONDS
      pause = min(2 * pause, _LONGEST_PAUSE_SECONDS) if soon and again else _FIRST_PAUSE_SECONDS
      again += 1
      since = f" since step {newest} was saved" if newest >= 0 else ""
      _say(
        f"all workers are started again in {pause:g} s ({again} of {restarts}{since}), since one "
        f"failed with exit code {code}"
      )
      if signals.stopped.wait(pause):
        return exit_codes.of_signal(signals.number)


@contextlib.contextmanager
def _network(
  command: Sequence[str], workers: int, share_network: bool
) -> Iterator[own_network.OwnNetwork | None]:
  """Context manager: yields the workers' private network, or None if they use this machine's."""
  if workers < 2:  # Which listens on no port.
    yield None
    return
  remote = next((a for a in command if "://" in a), None)
  if share_network or remote:
    asked = "as --share_network asks" if share_network else f"since {remote} is not on this machine"
    _say(f"workers use this machine's network, {asked}: {_OPEN_PORTS}")
    yield None
    return
  with own_network.own_network() as (made, why_not):
    if made:
      _say(
        "workers have a network of their own: they reach each other, nobody reaches them, and they "
        "reach nothing else (--share_network gives them this machine's)"
      )
    else:
      _say(f"workers get no network of their own ({why_not}): {_OPEN_PORTS}")
    yield made


def _say(text: str) -> None:
  # What the output went to may be gone.
  with contextlib.suppress(OSError):
    print(f"launch: {text}", file=sys.stderr, flush=True)


class _Signals:
  """Handler of SIGTERM and SIGINT: records them, and forwards them to present and later workers."""

  def __init__(self) -> None:
    self.stopped = threading.Event()
    self.number = 0
    self.processes: list[subprocess.Popen[str]] = []
    self._before: dict[signal.Signals, Any] = {}

  def __enter__(self) -> _Signals:
    if threading.current_thread() is threading.main_thread():
      # What a shell has set to be ignored (programs in the background) stays so.
      wanted = [
        s for s in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(s) is not signal.SIG_IGN
      ]
      self._before = {s: signal.signal(s, self._pass_on) for s in wanted}
    return self

  def __exit__(self, *exc_info: Any) -> None:
    for s, handler in self._before.items():
      signal.signal(s, handler)

  def _pass_on(self, number: int, frame: types.FrameType | None) -> None:
    del frame
    self.number = number
    self.stopped.set()
    for p in self.processes:
      if p.poll() is None:
        p.send_signal(number)

  def add(self, process: subprocess.Popen[str]) -> None:
    """Adds a process; sends it the signal at once if one has arrived."""
    self.processes.append(process)
    if self.stopped.is_set():
      process.send_signal(self.number)


class _Workers:
  """The processes of one attempt."""

  def __init__(
    self,
    command: Sequence[str],
    count: int,
    signals: _Signals,
    network: own_network.OwnNetwork | None = None,
  ):
    self._addresses = [f"127.0.0.1:{port}" for port in _free_ports(count)]
    self._command = network.command(command) if network else list(command)
    self._network_files = list(network.files) if network else []
    self._signals = signals
    self._processes: list[subprocess.Popen[str]] = []
    self._readers: list[threading.Thread] = []
    # The workers see the end of this pipe when this process is gone.
    self._pipe = os.pipe()
    self._reports = launcher_reports.Reports()
    self._in_vain: set[int] = set()

  @property
  def saved(self) -> int:
    """The newest step of which a worker has saved a checkpoint; -1 if there is none."""
    return self._reports.saved

  def __enter__(self) -> _Workers:
    self._signals.processes = []
    try:
      for i in range(len(self._addresses)):
        self._start(i)
    except BaseException:
      self.__exit__()
      raise
    return self

  def _start(self, index: int) -> None:
    environ = {
      **os.environ,
      **parent_watch.pipe_for_worker(self._pipe[0]),
      **self._reports.for_worker(index),
    }
    # One that the launcher was given names other workers than these.
    environ.pop("TF_CONFIG", None)
    if len(self._addresses) > 1:
      task = {"type": "worker", "index": index}
      environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": self._addresses}, "task": task})
    output: dict[str, Any] = {}
    if index:
      output = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    # In a session of its own: Ctrl-C reaches the launcher alone, which passes it on once.
    passed = [self._pipe[0], self._reports.file, *self._network_files]
    process = subprocess.Popen(
      self._command, env=environ, start_new_session=True, pass_fds=passed, **output
    )
    self._processes.append(process)
    self._signals.add(process)
    if index:
      reader = threading.Thread(target=_copy, args=(process, f"[worker {index}] "), daemon=True)
      reader.start()
      self._readers.append(reader)

  def __exit__(self, *exc_info: Any) -> None:
    for p in self._processes:
      # The group, which is the worker's own: what it has started ends with it.
      with contextlib.suppress(ProcessLookupError):
        os.killpg(p.pid, signal.SIGKILL)
      p.wait()
    for r in self._readers:
      r.join(5.0)
    for end in self._pipe:
      os.close(end)
    self._reports.close()

  def wait(self) -> int:
    """Waits for all workers; returns the exit code of `launch`."""
    codes: dict[int, int] = {}
    deadline = None
    while len(codes) < len(self._processes):
      for i, p in enumerate(self._processes):
        if i not in codes and p.poll() is not None:
          # One that is ended because another has not come is not to blame.
          codes[i] = exit_codes.WORKER_LOST if i in self._in_vain else p.returncode
          deadline = deadline or time.monotonic() + _GRACE_SECONDS
          if p.returncode and len(self._processes) > 1 and i not in self._in_vain:
            _say(f"worker {i} {_ending(p.returncode)}")
      self._reports.read()
      self._end_who_waits_in_vain(codes)
      if deadline is not None and time.monotonic() > deadline:
        left = [i for i in range(len(self._processes)) if i not in codes]
        _say(f"worker {', '.join(map(str, left))} does not end, and is killed")
        codes |= dict.fromkeys(left, exit_codes.WORKER_LOST)
      time.sleep(0.05)
    self._reports.read()
    failed = [c for c in codes.values() if c]
    # Those that only lost another worker are not to blame.
    own = [c for c in failed if c != exit_codes.WORKER_LOST]
    code = (own or failed or [exit_codes.DONE])[0]
    return exit_codes.of_signal(-code) if code < 0 else code

  def _end_who_waits_in_vain(self, ended: Iterable[int]) -> None:
    """Terminates workers that wait for one to join that has already exited."""
    at = self._reports.at
    missing = [i for i in ended if at.get(i) != launcher_reports.JOINED and i not in self._in_vain]
    for i, p in enumerate(self._processes):
      waits = at.get(i) == launcher_reports.JOINING and i not in self._in_vain
      if missing and waits and p.poll() is None:
        self._in_vain.add(i)
        _say(
          f"worker {i} is ended: it waits for worker {', '.join(map(str, missing))} to join, which "
          "ended before"
        )
        p.terminate()


def _ending(code: int) -> str:
  if code >= 0:
    return f"ended with exit code {code}"
  try:
    return f"was ended by {signal.Signals(-code).name}"
  except ValueError:
    return f"was ended by signal {-code}"


def _copy(process: subprocess.Popen[str], prefix: str) -> None:
  for line in process.stdout or ():
    # A closed stderr must not block the worker, whose lines have to be read on.
    with contextlib.suppress(OSError, ValueError):
      sys.stderr.write(prefix + line)
      sys.stderr.flush()


def _free_ports(count: int) -> list[int]:
  with contextlib.ExitStack() as stack:
    sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
    for s in sockets:
      # Port 0: the system chooses a free one. All are held until the last is chosen, so that no
      # two are the same.
      s.bind(("127.0.0.1", 0))
    return [s.getsockname()[1] for s in sockets]
