"""Watchdog for lost workers: ends this process some time after another worker is lost."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable

from mesh_tensorflow.errors import WorkerLostError
from mesh_tensorflow.exit_codes import WORKER_LOST

_POLL_SECONDS = 2.0

# How long the program may take to end by itself, with an error of its own.
_GRACE_SECONDS = 20.0


def start(check: Callable[[], None], prefix: str) -> None:
  """Starts a watchdog thread that ends this process some time after another worker was lost.

  A program that runs collectives gets an error from them, and ends. This is for the one that does
  something else: reads data, writes files, or waits for files of others. Its workers must end with
  `workers.leave`: one that ends sooner than others is lost to them.

  Args:
    check: raises `WorkerLostError` when a worker is lost: `workers.check`.
    prefix: prefix of the message.
  """
  stop = threading.Event()

  def watch() -> None:
    while not stop.wait(_POLL_SECONDS):
      try:
        check()
      except WorkerLostError as e:
        if not stop.wait(_GRACE_SECONDS):
          os.write(2, f"{prefix}WorkerLostError: {e}\n".encode())
          os._exit(WORKER_LOST)
      except Exception:  # noqa: BLE001 - what else there may be the program itself meets.
        continue

  thread = threading.Thread(target=watch, daemon=True, name="mtf-loss-watch")
  thread.start()

  def end() -> None:
    # TensorFlow must not be called while the interpreter shuts down.
    stop.set()
    thread.join(5.0)

  atexit.register(end)
