"""One training at a time in a folder."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator

from mesh_tensorflow.errors import ConfigError

try:
  import fcntl
except ImportError:  # Not on Windows.
  fcntl = None

NAME = "training.lock"


@contextlib.contextmanager
def training_lock(model_dir: str | None) -> Iterator[None]:
  """Holds the folder for one training process.

  The lock is the operating system's: it goes with the process, however that ends; clocks have no
  part in it. Folders that are not in the file system (gs://...) are not locked.

  Args:
    model_dir: the folder; None, or one that is not local: nothing is done.

  Raises:
    ConfigError: another process trains in that folder.
  """
  if not model_dir or "://" in model_dir or fcntl is None:
    yield
    return
  path = os.path.join(model_dir, NAME)
  try:
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
  except OSError as e:
    raise ConfigError(
      f"cannot write in the folder {model_dir} ({e.strerror}): give another --model_dir, or the "
      "right to write there"
    ) from e
  try:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
      holder = os.read(lock, 200).decode(errors="replace").strip()
      raise ConfigError(
        f"another training uses {model_dir} ({holder or 'it has just started'}): two would "
        "overwrite each other's checkpoints. Give another --model_dir, or end that one first"
      ) from e
    except OSError:
      pass  # A file system without locks.
    else:
      os.ftruncate(lock, 0)
      now = time.strftime("%Y-%m-%d %H:%M:%S")
      os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()} since {now}".encode(), 0)
    yield
  finally:
    os.close(lock)
