"""One training at a time in a folder."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import time
from collections.abc import Iterator

from mesh_tensorflow.errors import LockedError, StorageError

try:
  import fcntl
except ImportError:  # Not on Windows.
  fcntl = None  # type: ignore[assignment]

_LOG = logging.getLogger("mesh_tensorflow")
NAME = "training.lock"


@contextlib.contextmanager
def training_lock(model_dir: str | None) -> Iterator[None]:
  """Holds the folder for one training process.

  The lock is the operating system's: it goes with the process, however that ends; clocks have no
  part in it. It is on the folder itself, which holds when somebody deletes the file that says who
  has it, and on that file, since network file systems lock files only. Folders that are not in the
  file system (gs://...) are not locked; on a file system without locks a warning says so.

  Args:
    model_dir: the folder; None, or one that is not local: nothing is done.

  Raises:
    LockedError: another process trains in that folder.
    StorageError: the file of the lock cannot be made; or its name is one of several of a file, or
      a link, and what is written into it would be written elsewhere.
  """
  if not model_dir or "://" in model_dir or fcntl is None:
    yield
    return
  with _folder_lock(model_dir), _file_lock(model_dir):
    yield


@contextlib.contextmanager
def _folder_lock(model_dir: str) -> Iterator[None]:
  """Holds the folder, where its file system can."""
  try:
    folder = os.open(model_dir, os.O_RDONLY | os.O_DIRECTORY)
  except OSError:  # There is none, or it cannot be read: the lock's file says what is wrong.
    yield
    return
  try:
    try:
      fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
      raise _locked(model_dir, _holder(os.path.join(model_dir, NAME))) from e
    except OSError:  # A network file system, on which files can be locked all the same, or nothing.
      pass
    yield
  finally:
    os.close(folder)


def _holder(path: str) -> str:
  """Reads the text in a lock file, which describes the process that holds the lock."""
  try:
    lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
  except OSError:
    return f"its file, {NAME}, was deleted"
  try:
    return os.read(lock, 200).decode(errors="replace").strip() or "it has just started"
  finally:
    os.close(lock)


def _locked(model_dir: str, holder: str) -> LockedError:
  return LockedError(
    f"another training uses {model_dir} ({holder}): two would overwrite each other's checkpoints. "
    "Give another --model_dir, or end that one first"
  )


@contextlib.contextmanager
def _file_lock(model_dir: str) -> Iterator[None]:
  """Holds the file of the folder's lock, and writes into it who has it."""
  path = os.path.join(model_dir, NAME)
  if os.path.islink(path):
    raise _not_a_lock(path, f"is a link to {os.readlink(path)!r}")
  try:
    # Not truncated: it holds who has the lock. A named pipe in its place must not block, nor a link
    # made since be followed.
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
  except OSError as e:
    raise StorageError(
      f"cannot write in the folder {model_dir} ({e.strerror}): give another --model_dir, or the "
      "right to write there"
    ) from e
  try:
    found = os.fstat(lock)
    # A second name may be that of a file elsewhere, which would be overwritten.
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
      raise _not_a_lock(path, "is no file of its own")
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as e:  # The latter on some network file systems.
      raise _locked(model_dir, _holder(path)) from e
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


def _not_a_lock(path: str, what: str) -> StorageError:
  return StorageError(
    f"{path} {what}: the lock of a training would be written elsewhere. Delete it, if no training "
    "uses that folder"
  )
