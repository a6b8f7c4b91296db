"""Retention of the checkpoints in a folder, and disk space for the next one."""

from __future__ import annotations

import copy
import dataclasses
import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable

import tensorflow as tf

from mesh_tensorflow.checkpoint import files, verification
from mesh_tensorflow.checkpoint import folder as folder_lib
from mesh_tensorflow.errors import CheckpointError
from mesh_tensorflow.meshes.store import StoredVariable

_LOG = logging.getLogger("mesh_tensorflow")

# Bytes of an index for a slice, beside its name; and of small files, which take a block each.
_INDEX_BYTES, _SMALL_FILES_BYTES = 64, 4 * 4096


@dataclasses.dataclass(frozen=True)
class Best:
  """A checkpoint that stays beside the newest ones, however many come after it.

  Attributes:
    step: step of the checkpoint; it is there, or it is the one that is being saved.
    counts: whether it is one of those of which the newest `max_to_keep` stay. One that was saved
      only because it is the best is not: the others would go sooner because of it.
    before: the step of the best one before it, which does not stay any longer; None: there is none,
      or it is the same.
    before_counts: whether the previous best counts. If not, it is deleted once this one is there.
  """

  step: int
  counts: bool = True
  before: int | None = None
  before_counts: bool = True

  def is_it(self, path: str) -> bool:
    """True if `path` is the best checkpoint."""
    return os.path.basename(path) == f"{files.NAME}{self.step}"

  def was_it(self, path: str) -> bool:
    """True if `path` is the previous best checkpoint."""
    return os.path.basename(path) == f"{files.NAME}{self.before}"


@dataclasses.dataclass
class Keeping:
  """Retention policy of the checkpoints in a folder.

  Attributes:
    max_to_keep: number of newest checkpoints that are kept; None: all.
    every: seconds; of the older checkpoints, one per this interval is kept forever; None: none.
    since: when the first interval of `every` began, in seconds since the epoch.
    told: whether a warning said that the disk has no room for one more than are kept.
  """

  max_to_keep: int | None
  every: float | None
  since: float
  told: bool = False

  def add(
    self, state: files.State | None, path: str, best: Best | None = None
  ) -> tuple[files.State, list[str]]:
    """Computes a folder's state after a new checkpoint, and which checkpoints to delete.

    Args:
      state: the state before, which is not modified; None: the folder has none.
      path: the new checkpoint.
      best: the best checkpoint, which is kept whatever its age; None: there is none.

    Returns:
      The new state, in which `path` is last; and the paths to delete, the oldest first.
    """
    state = files.State([], [], self.since) if state is None else copy.deepcopy(state)
    now = time.time()
    # A clock that was set back must not stop the keeping for as long.
    state.last_preserved = min(state.last_preserved or self.since, now)
    # Users delete, too; and the new one may be there already.
    there = [p != path and tf.io.gfile.exists(p + files.INDEX) for p in state.paths]
    state.paths = [p for p, t in zip(state.paths, there) if t] + [path]
    state.times = [s for s, t in zip(state.times, there) if t] + [now]
    written = dict(zip(state.paths, state.times))
    counted, stays, too_old = list(state.paths), [], []
    if best is not None:
      too_old = [p for p in counted[:-1] if best.was_it(p) and not best.before_counts]
      stays = [p for p in counted if best.is_it(p)]
      counted = [p for p in counted if p not in too_old and (best.counts or p not in stays)]
    unlisted = set(too_old)
    for old in counted[: -self.max_to_keep] if self.max_to_keep is not None else []:
      if old in stays:
        continue
      unlisted.add(old)
      if self.every is not None and written[old] - state.last_preserved >= self.every:
        state.last_preserved = written[old]
      else:
        too_old.append(old)
    state.paths = [p for p in state.paths if p not in unlisted]
    state.times = [written[p] for p in state.paths]
    return state, too_old

  def publish(self, directory: str, path: str, best: Best | None = None) -> None:
    """Puts a new checkpoint at the end of the state file, and deletes those that are too old.

    Args:
      directory: folder of the checkpoints.
      path: the new one.
      best: one that stays.
    """
    state, too_old = self.add(files.read_state(directory), path, best)
    surplus = [p for p in too_old if best is None or not best.was_it(p)]
    if len(surplus) > 1:
      _LOG.warning(
        "%d checkpoints in %s are deleted, %s to %s: the newest %s stay (run.keep_checkpoint_max, "
        "Checkpointer's max_to_keep; None keeps all)",
        *(len(surplus), directory, os.path.basename(surplus[0]), os.path.basename(surplus[-1])),
        self.max_to_keep,
      )
    # In this order: the state file never lists a checkpoint that is not there.
    files.write_state(directory, state)
    for old in too_old:
      try:
        files.remove_checkpoint(directory, old)
      except (tf.errors.OpError, OSError) as e:  # The new one is there, and counts.
        _LOG.warning("the old checkpoint %s cannot be deleted: %s", old, e)


# ----------------------------------------------------------------------------- room


def needed_bytes(variables: Iterable[StoredVariable]) -> int:
  """Estimates the size in bytes of a checkpoint of some variables, without attachments.

  Args:
    variables: all of them, also what other workers write.
  """
  total = _SMALL_FILES_BYTES
  for v in variables:
    total += v.shape.size * v.master_dtype.size
    total += len(set(v.begins)) * (len(v.name) + _INDEX_BYTES)
  return total


def _attached_bytes(directory: str) -> int:
  """The size of the files that programs added to the newest checkpoint: likely that of the next."""
  newest = next(reversed(files.all_checkpoints(directory)), None)
  return sum(files.attached_sizes(newest)) if newest else 0


def free_bytes(directory: str) -> int | None:
  """Free bytes on the disk of a local folder, which need not exist yet; None if unknown."""
  path = folder_lib.local_path(os.path.abspath(directory) if "://" not in directory else directory)
  while path and not os.path.isdir(path) and os.path.dirname(path) != path:
    path = os.path.dirname(path)
  try:
    usage = shutil.disk_usage(path) if path else None
  except OSError:
    return None
  return usage.free if usage and usage.total else None


def make_room(
  directory: str,
  path: str,
  needed: int,
  keeping: Keeping,
  release: Callable[[], None],
  best: Best | None = None,
) -> str | None:
  """Makes room for a checkpoint, if there is not enough, by deleting early those due after it.

  The last good one stays, whatever `keeping` says.

  Args:
    directory: the folder.
    path: the checkpoint that will be written.
    needed: its size in bytes, without attachments: these are taken for as large as the newest's.
    keeping: which checkpoints are kept.
    release: called first: gives up disk space that the program can do without.
    best: one that stays, and so does the best one before it until `path` is there.

  Returns:
    What is wrong if there is still not enough room; None if there is.
  """
  if free_bytes(directory) is None:
    return None
  needed += _attached_bytes(directory)
  if _fits(directory, needed):
    return None
  release()
  state = files.read_state(directory)
  too_old = keeping.add(state, path, best)[1] if state else []
  if best is not None:
    # The write may fail, and then the previous best is still the best.
    too_old = [p for p in too_old if not best.was_it(p)]
  left = [] if state is None else list(state.paths)
  for old in too_old:
    if _fits(directory, needed):
      break
    left.remove(old)
    # The newest first: each is read whole, and that is the one to go on from.
    if not any(map(_is_good, left[::-1])):
      break
    _LOG.log(
      logging.INFO if keeping.told else logging.WARNING,
      "%s is deleted before %s is saved, not after: the disk has no room for both",
      old, os.path.basename(path),
    )  # fmt: skip
    keeping.told = True
    files.remove_checkpoint(directory, old)
  if _fits(directory, needed):
    return None
  free = in_words(free_bytes(directory) or 0)
  return f"it needs {in_words(needed)}, and the disk has {free} free"


def _fits(directory: str, needed: int) -> bool:
  free = free_bytes(directory)
  return free is None or free >= needed


def _is_good(path: str) -> bool:
  try:
    return not verification.verify(path)
  except CheckpointError:
    return False


def is_full(error: BaseException) -> bool:
  """True if an error means that a disk is full, or a quota is used up."""
  if isinstance(error, tf.errors.ResourceExhaustedError):
    return True
  return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def advice(max_to_keep: int | None) -> str:
  """Advice, for an error message, on what to do about a full disk."""
  kept = "all" if max_to_keep is None else max_to_keep
  return (
    f"free some space, keep fewer checkpoints (run.keep_checkpoint_max, Checkpointer's "
    f"max_to_keep: now {kept}), or use a folder on another disk"
  )


def in_words(num_bytes: int) -> str:
  """Formats a size in bytes for people: "1.5 MB"."""
  size = float(num_bytes)
  for unit in ("bytes", "kB", "MB", "GB"):
    if size < 999.5:
      return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
    size /= 1000
  return f"{size:.1f} TB"
