"""Waiting for the other workers at the start, within bounds.

TensorFlow waits inside a call that holds Python's lock: no thread of the process could say for
whom, or end it. So the workers meet before, each listening at its own port; and while TensorFlow
joins them a process of its own watches.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from mesh_tensorflow.environment import quiet
from mesh_tensorflow.errors import ConfigError, WorkerLostError
from mesh_tensorflow.workers.cluster import Cluster, listens

_POLL_SECONDS = 0.5
_SECONDS_BETWEEN_LINES = 15.0

# Time limit for a worker's port to be closed again: for a moment when TensorFlow takes it over,
# and longer when its process is restarted.
_AWAY_SECONDS = 20.0

# Time limit for TensorFlow to join the workers once all are there.
_JOIN_SECONDS = 60.0


def meet(cluster: Cluster, timeout_seconds: float) -> None:
  """Waits until all other workers are there.

  Args:
    cluster: the cluster.
    timeout_seconds: how long to wait.

  Raises:
    WorkerLostError: one did not come, or was there and is gone.
    ConfigError: another process of this machine has the port of this worker.
  """
  others = [i for i in range(cluster.size) if i != cluster.index]
  started = told = time.monotonic()
  last_seen: dict[int, float] = {}
  with _listening(cluster), concurrent.futures.ThreadPoolExecutor(min(32, len(others))) as pool:
    while True:
      there = list(pool.map(lambda i: listens(cluster, i), others))
      now = time.monotonic()
      last_seen |= {i: now for i, t in zip(others, there) if t}
      gone = [i for i, seen in last_seen.items() if now - seen > _AWAY_SECONDS]
      if gone:
        raise WorkerLostError(
          f"lost {cluster.names(gone)} while the workers joined: its log says why"
        )
      missing = [i for i in others if i not in last_seen]
      if not missing:
        return
      if now - started >= timeout_seconds:
        raise WorkerLostError(
          f"{cluster.name(cluster.index)} waited {timeout_seconds:g} s in vain for "
          f"{cluster.names(missing)}: look at its log, and whether its address is right"
        )
      if now - told > _SECONDS_BETWEEN_LINES:
        told = now
        print(
          f"{cluster.name(cluster.index)} waits for {cluster.names(missing)}",
          file=sys.stderr,
          flush=True,
        )
      time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def _listening(cluster: Cluster) -> Iterator[None]:
  """Listens at the port of this worker, as TensorFlow will."""
  host, port = cluster.address(cluster.index)
  done = threading.Event()

  def accept() -> None:
    while not done.is_set():
      with contextlib.suppress(OSError):
        server.accept()[0].close()

  with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
    # A port whose last user ended a moment ago is free.
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      server.bind(("", port))
      server.listen(128)
    except OSError as e:
      raise ConfigError(
        f"{cluster.name(cluster.index)} cannot listen ({e.strerror}). If another process of this "
        "machine has that port: is it a worker of an earlier run that has not ended, or was this "
        "worker started twice?"
      ) from e
    server.settimeout(0.1)
    thread = threading.Thread(target=accept, daemon=True, name="mtf-meet")
    thread.start()
    try:
      yield
    finally:
      done.set()
      thread.join()


@contextlib.contextmanager
def watched(cluster: Cluster) -> Iterator[None]:
  """Watchdog: kills this process if cluster start-up inside the block times out."""
  others = [i for i in range(cluster.size) if i != cluster.index]
  task = {
    "me": cluster.name(cluster.index),
    "others": {cluster.name(i): cluster.address(i) for i in others},
    "timeout": _JOIN_SECONDS,
    "away": _AWAY_SECONDS,
  }
  script = pathlib.Path(__file__).with_name("joining_watch.py")
  with quiet.held_back_notices() as stderr:
    with subprocess.Popen(
      [sys.executable, "-S", "-E", str(script), json.dumps(task), str(os.getpid())],
      stdin=subprocess.PIPE,
      stdout=subprocess.DEVNULL,
      stderr=stderr,
    ) as watch:
      try:
        with _interruptible():
          yield
      finally:
        watch.kill()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
  """Restores the default action of signals in the block, as Python handles none meanwhile."""
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  usual = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
  handled = {s: handler for s, handler in usual.items() if callable(handler)}
  for s in handled:
    signal.signal(s, signal.SIG_DFL)
  try:
    yield
  finally:
    for s, handler in handled.items():
      signal.signal(s, handler)
