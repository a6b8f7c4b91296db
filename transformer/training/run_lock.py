"""One training at a time in a folder."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator

from mesh_tensorflow.errors import ConfigError

try:
  import fcntl
except ImportError:  # Not on Windows.
  fcntl = None

_LOG = logging.getLogger("mesh_tensorflow")
NAME = "training.lock"


@contextlib.contextmanager
def training_lock(model_dir: str | None) -> Iterator[None]:
  """Holds the folder for one training process.

  The lock is the operating system's: it goes with the process, however that ends; clocks have no
  part in it. Folders that are not in the file system (gs://...) are not locked; on a file system
  without locks a warning says so.

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
    except (BlockingIOError, PermissionError) as e:  # The latter on some network file systems.
      holder = os.read(lock, 200).decode(errors="replace").strip()
      raise ConfigError(
        f"another training uses {model_dir} ({holder or 'it has just started'}): two would "
        "overwrite each other's checkpoints. Give another --model_dir, or end that one first"
      ) from e
    except OSError as e:
      last = os.read(lock, 200).decode(errors="replace").strip()
      _LOG.warning(
        "%s cannot be locked (%s): its file system has no locks. Take care that no other training "
        "uses that folder, two would overwrite each other's checkpoints; the last one was %s",
        path, e.strerror, last or "none",
      )  # fmt: skip
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    with contextlib.suppress(OSError):  # For messages only; the disk may be full.
      os.ftruncate(lock, 0)
      os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()} since {now}".encode(), 0)
    yield
  finally:
    os.close(lock)
