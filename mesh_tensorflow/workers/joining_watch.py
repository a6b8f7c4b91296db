"""The program that watches a worker while TensorFlow joins it: see `joining`.

It runs without TensorFlow. Arguments: what to watch, as JSON; the worker's process number. It ends
with its stdin, which the worker holds.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any


def main(task: dict[str, Any], process: int) -> None:
  """Kills the worker when another one is gone, or the time is over."""
  started = time.monotonic()
  last_seen = dict.fromkeys(task["others"], started)
  while not select.select([sys.stdin], [], [], 2.0)[0]:
    for name, address in task["others"].items():
      if _listens(address):
        last_seen[name] = time.monotonic()
    now = time.monotonic()
    gone = [name for name, seen in last_seen.items() if now - seen > task["away"]]
    problem = None
    if gone:
      problem = f"lost {', '.join(gone)} while the workers joined: its log says why"
    elif now - started > task["timeout"]:
      names = ", ".join(last_seen)
      problem = f"could not join the others in {task['timeout']:g} s: one hangs, of {names}"
    if problem:
      sys.stderr.write(f"{task['me']} {problem}\n")
      sys.stderr.flush()
      # Else the worker is gone, and its number may be another process's.
      if os.getppid() == process:
        os.kill(process, signal.SIGKILL)
      return


def _listens(address: Sequence[Any]) -> bool:
  host, port = address
  try:
    with socket.create_connection((host, port), 2.0):
      return True
  except OSError:
    return False


if __name__ == "__main__":
  main(json.loads(sys.argv[1]), int(sys.argv[2]))
