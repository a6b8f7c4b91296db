"""Ports for servers that tests start, which nothing else takes before they listen."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator

# Below those that Linux gives to connections and to whoever asks for any port (32768 and more): one
# of them could be given away again between the look for it and the start of the server.
_FIRST, _LAST = 20_000, 32_000


def _numbers() -> Iterator[int]:
  """The ports of this process, again and again; those of other processes of the run are others."""
  worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
  count = max(worker + 1, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
  size = (_LAST - _FIRST) // count
  start = os.getpid() * 61 % size  # Another run on this machine hardly begins at the same one.
  return (_FIRST + worker * size + (start + i) % size for i in itertools.count())


_NUMBERS = _numbers()


def free(count: int) -> list[int]:
  """Ports of 127.0.0.1 on which nobody listens; no two calls give the same one."""
  found: list[int] = []
  while len(found) < count:
    port = next(_NUMBERS)
    with socket.socket() as s:
      try:
        s.bind(("127.0.0.1", port))
      except OSError:
        continue
    found.append(port)
  return found
