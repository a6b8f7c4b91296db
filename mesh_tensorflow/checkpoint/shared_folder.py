"""Checks, before a run relies on it, that all workers see one folder and can write there."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.checkpoint import files, folder, writer
from mesh_tensorflow.checkpoint.meeting import of_chief, told_to_all
from mesh_tensorflow.errors import CheckpointError, StorageError
from mesh_tensorflow.workers.texts import gather_texts

# Network file systems may answer from what they remember of a folder for so long.
_PATIENCE_SECONDS = 5.0
_POLL_SECONDS = 0.05

# Report of a worker that does not see another's file; other texts are errors of its own.
_UNSEEN = "unseen"


def check(directory: str) -> None:
  """Checks that all workers see the same folder and can write there; creates it if needed.

  All call it at the same place of their programs. Worker 0 writes a file, which the others must
  see; each of them answers with one of its own. Does nothing for one worker.

  Args:
    directory: the folder.

  Raises:
    StorageError: in all workers, naming those that cannot write there.
    CheckpointError: in all workers, naming those that do not see it.
  """
  cluster = workers.current()
  if cluster.size == 1:
    return
  token = of_chief(f"{random.SystemRandom().getrandbits(64):016x}")
  paths = [files.token_file(directory, f"{token}-{i}") for i in range(cluster.size)]
  own = paths[cluster.index]
  try:
    if cluster.is_chief:
      _agree(directory, _problem_of(lambda: _write(directory, own)))
      _agree(directory, "")
      _agree(directory, _problem_of(lambda: _wait_for(paths)))
    else:
      _agree(directory, "")
      _agree(directory, _problem_of(lambda: _wait_for(paths[:1]) or _write(directory, own)))
      _agree(directory, "")
  finally:
    folder.remove_if_possible(directory, own)


def _write(directory: str, path: str) -> str:
  """Writes a file that the others look for; returns "" (no problem), or raises."""
  folder.write(directory, path, b"A worker looks whether others see this file.")
  return ""


def _wait_for(paths: list[str]) -> str:
  """Waits until files exist; returns "", or `_UNSEEN` after a time limit."""
  end = time.monotonic() + _PATIENCE_SECONDS
  while not all(map(tf.io.gfile.exists, paths)):
    if time.monotonic() > end:
      return _UNSEEN
    time.sleep(_POLL_SECONDS)
  return ""


def _problem_of(attempt: Callable[[], str]) -> str:
  try:
    return attempt()
  except (tf.errors.OpError, OSError, StorageError) as e:
    return writer.reason(e)


def _agree(directory: str, problem: str) -> None:
  """Raises an error in all workers if one has a problem."""
  cluster = workers.current()
  said = gather_texts(problem)
  unseeing = [i for i, text in enumerate(said) if text == _UNSEEN]
  others = [
    f"{cluster.name(i)}: {text}" for i, text in enumerate(said) if text not in ("", _UNSEEN)
  ]
  if not unseeing and not others:
    return
  workers.all_have_heard()
  if others:
    raise told_to_all(StorageError(f"cannot write checkpoints in {directory}: {others[0]}"))
  missed = "the others write" if unseeing == [0] else f"{cluster.name(0)} writes"
  raise told_to_all(
    CheckpointError(
      f"the workers do not share the folder {directory}: {cluster.names(unseeing)} cannot see what "
      f"{missed} there (looked for {_PATIENCE_SECONDS:g} s). Each worker writes its part of a "
      "checkpoint, so give a folder that all machines have under this name: of a network file "
      "system that is mounted on all of them, or of a store such as gs://"
    )
  )
