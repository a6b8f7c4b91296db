"""Exit codes of programs: one table, for the trainer, its launcher and the docs.

A scheduler may go by it: 74 and 75 are worth the same command again, 2 to 6 are not.
"""

from __future__ import annotations

import dataclasses
import signal

from mesh_tensorflow.errors import (
  CollectiveError,
  DamagedCheckpointError,
  LockedError,
  MeshError,
  NonFiniteError,
  StoppedError,
  StorageError,
  WorkerLostError,
)

DONE = 0
OTHER = 1
CONFIGURATION = 2
NUMBERS = 3
STORAGE = 4
DAMAGE = 5
LOCK = 6
STOPPED = 74
WORKER_LOST = 75
INTERRUPTED = 130


@dataclasses.dataclass(frozen=True)
class ExitCode:
  """One exit code.

  Attributes:
    code: the number.
    meaning: description of what happened.
    restart_cures: whether the same command, started again, may do better.
    why: the reason that it may, or may not.
  """

  code: int
  meaning: str
  restart_cures: bool
  why: str


TABLE = (
  ExitCode(DONE, "done", False, "there is nothing left to do"),
  ExitCode(
    OTHER,
    "an error that the package does not know: of a program of one's own, or of TensorFlow",
    False,
    "the same program would meet it again",
  ),
  ExitCode(
    CONFIGURATION,
    "settings, layout, model, data or memory do not fit: flags and gin settings can cure it",
    False,
    "the same settings would fail again",
  ),
  ExitCode(
    NUMBERS,
    "the loss, a gradient or a variable became NaN or infinite",
    False,
    "the same steps would be done again",
  ),
  ExitCode(
    STORAGE,
    "a file cannot be written or read: a full disk, a missing right, a file system that fails",
    False,
    "what is wrong with the storage must be repaired first",
  ),
  ExitCode(
    DAMAGE,
    "a checkpoint that was asked for is damaged",
    False,
    "the files would still be damaged",
  ),
  ExitCode(
    LOCK,
    "another process trains in the same model_dir",
    False,
    "the other training must end first",
  ),
  ExitCode(
    STOPPED,
    "SIGTERM or Ctrl-C stopped the training, and every step done is saved",
    False,
    "it was asked to stop; the same command goes on from there",
  ),
  ExitCode(
    WORKER_LOST,
    "another worker was lost, or did not come",
    True,
    "training goes on from the last checkpoint",
  ),
)

_BY_CODE = {row.code: row for row in TABLE}

# The first class that an error belongs to decides.
_OF_ERRORS: tuple[tuple[type[BaseException], int], ...] = (
  (StoppedError, STOPPED),
  (WorkerLostError, WORKER_LOST),
  (CollectiveError, OTHER),
  (LockedError, LOCK),
  (DamagedCheckpointError, DAMAGE),
  (StorageError, STORAGE),
  (NonFiniteError, NUMBERS),
  (MeshError, CONFIGURATION),
  (KeyboardInterrupt, INTERRUPTED),
)


def of_error(error: BaseException) -> int:
  """The exit code of a program that ends with an error."""
  return next((code for kind, code in _OF_ERRORS if isinstance(error, kind)), OTHER)


def of_signal(number: int) -> int:
  """The exit code of a program that a signal ended, as shells count: 143 for SIGTERM."""
  return 128 + number


def why_not_again(code: int) -> str | None:
  """Why the same command, started again, would not do better; None if it may.

  Args:
    code: an exit code; 128 + n for signal n.
  """
  if code > 128:
    # A crash, or the system took the memory; but these two were sent by somebody.
    asked = code - 128 in (signal.SIGTERM, signal.SIGINT)
    return "it was asked to stop" if asked else None
  row = _BY_CODE.get(code, _BY_CODE[OTHER])
  return None if row.restart_cures else row.why
