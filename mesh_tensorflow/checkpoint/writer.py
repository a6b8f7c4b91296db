"""Writes one checkpoint: the slices in parts, which then become one checkpoint, in one step.

Each worker writes the slices it owns, group by group, so that the memory of each group is free as
soon as it is on the disk. The chief merges the parts (only their indices are rewritten), adds the
manifest, and moves all to their place, the index last.
"""

from __future__ import annotations

import dataclasses
import os
import re
import threading
from collections.abc import Callable, Sequence

import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.checkpoint import (
  files,
  folder,
  keeping,
  meeting,
  reader,
  snapshot,
  verification,
)
from mesh_tensorflow.checkpoint.files import ATTACHED, INDEX, NAME
from mesh_tensorflow.checkpoint.meeting import Meeting
from mesh_tensorflow.checkpoint.snapshot import Piece
from mesh_tensorflow.checkpoint.verification import FileRecord
from mesh_tensorflow.errors import CheckpointError, StorageError, WorkerLostError
from mesh_tensorflow.workers import texts

# Errors of the disk, and refusals because a link leads to another folder.
_OF_STORAGE = (tf.errors.OpError, OSError, StorageError)


class Job:
  """One save.

  Args:
    directory: folder of the checkpoints.
    step: step of the checkpoint.
    pieces: what this worker writes; they are released one after the other.
    on_published: called in the chief with the path of the checkpoint when it is whole.
    mark: tells this save from all others that may have left a folder; the same in all workers.
    timeout_seconds: how long to wait for another worker without a sign of it.
    abandoned: is set to wait for other workers no more.
    advice: what to do where the disk is full; see `keeping.advice`.

  Attributes:
    step: step of the checkpoint.
    own_problem: what made `run` fail, if it was in this worker; begins with its name.
  """

  def __init__(
    self,
    directory: str,
    step: int,
    pieces: list[Piece],
    on_published: Callable[[str], None],
    *,
    mark: str,
    timeout_seconds: float,
    abandoned: threading.Event,
    advice: str = "",
  ):
    self._directory = directory
    self._advice = advice
    self.step = step
    self._pieces = pieces
    self._on_published = on_published
    self._cluster = workers.current()
    self.folder = files.temporary_folder(directory, step, mark)
    self._meeting = Meeting(self.folder, self._cluster, timeout_seconds, abandoned)
    self._attached: list[str] = []
    self._attach_error: Exception | None = None
    self.own_problem: str | None = None

  def attach(self, name: str, write: Callable[[str], None]) -> None:
    """Lets a function write files of its own, which become part of the checkpoint.

    Args:
      name: tells them from others, of other workers, too.
      write: called with a path; it writes files whose names begin with it. A disk error in it
        makes the save fail.
    """
    prefix = os.path.join(self.folder, f"{NAME}{self.step}{ATTACHED}{name}")
    try:
      folder.make(self._directory, self.folder)
      write(prefix)
      self._attached += _files(prefix)
    except _OF_STORAGE as e:
      self._attach_error = e  # Told by `run`, to all workers.

  def run(self) -> None:
    """Writes the checkpoint.

    Raises:
      CheckpointError: in every worker, if any of them could not write its part.
    """
    try:
      if self._cluster.size == 1:
        self._run_alone()
      elif self._cluster.is_chief:
        self._run_as_chief()
      else:
        self._run_as_other()
    finally:
      self._pieces.clear()

  def _run_alone(self) -> None:
    try:
      self._publish(self._write_parts())
    except _OF_STORAGE as e:
      self._clean()
      raise self.not_written(self._reason(e)) from e

  def _run_as_chief(self) -> None:
    problem: str | None = None
    cause: Exception | None = None
    of_storage = True
    try:
      parts = self._write_parts()
      for _, found in sorted(self._meeting.wait_for_parts().items()):
        parts += [FileRecord(*record) for record in found]
      self._publish(parts)
    except CheckpointError as e:
      problem, cause, of_storage = str(e), e, isinstance(e, StorageError)
    except Exception as e:  # noqa: BLE001 - it is raised, but the others must not wait.
      problem, cause = f"{self._cluster.name(0)}: {self._reason(e)}", e
      of_storage = isinstance(e, _OF_STORAGE)
      self.own_problem = problem
    if problem:
      # In its own folder the others still meet; `announce` removes it.
      self._clean(keep=self.folder)
    self._meeting.announce(problem, of_storage)
    if isinstance(cause, WorkerLostError):
      raise cause
    if problem:
      raise self.not_written(problem, of_storage) from cause

  def _run_as_other(self) -> None:
    cause: Exception | None = None
    try:
      self._meeting.report([dataclasses.astuple(r) for r in self._write_parts()])
    except Exception as e:  # noqa: BLE001 - it is raised, but the others must not wait.
      cause = e
      self.own_problem = f"{self._cluster.name(self._cluster.index)}: {self._reason(e)}"
      for file in _files(os.path.join(self.folder, self._part(""))):
        folder.remove_if_possible(self.folder, file)  # So that there is space to tell of it.
      try:
        self._meeting.report_error(self._reason(e))
      except _OF_STORAGE:
        pass  # The chief will miss the part.
    told = self._meeting.wait_for_outcome()
    if self.own_problem:
      raise self.not_written(self.own_problem, isinstance(cause, _OF_STORAGE)) from cause
    if told is not None:
      raise self.not_written(str(told), isinstance(told, StorageError))

  def not_written(self, problem: str, of_storage: bool = True) -> CheckpointError:
    """The error for this checkpoint."""
    return not_written(self._directory, self.step, problem, of_storage)

  def _reason(self, error: Exception) -> str:
    """Formats a storage error, with advice if the disk is full."""
    advice = f"; {self._advice}" if self._advice and keeping.is_full(error) else ""
    return reason(error) + advice

  # --------------------------------------------------------------------- the writing

  def _part(self, group: int | str) -> str:
    """Path prefix to which this worker writes a group, relative to the folder."""
    text = group if isinstance(group, str) else f"{group:05}"
    return f"part-{self._cluster.index:05}-{text}"

  def _write_parts(self) -> list[FileRecord]:
    """Writes the pieces of this worker; the records have whole names in place of suffixes."""
    error = self._attach_error
    if error:
      raise error
    # To the file system first, which frees the values, and to the disk then, which takes longer.
    names = [os.path.basename(f) for f in self._attached]
    folder.make(self._directory, self.folder)
    for i, group in enumerate(snapshot.groups(self._pieces)):
      part = self._part(i)
      with tf.device(reader.host_device()):
        tf.raw_ops.SaveV2(
          prefix=os.path.join(self.folder, part),
          tensor_names=[p.name for p in group],
          shape_and_slices=[p.spec for p in group],
          tensors=[p.value() for p in group],
        )
      for piece in group:
        piece.release()
      names.append(f"{part}.data-00000-of-00001")
    records = []
    for name in names:
      records.append(self._measured(name))
      self._meeting.show_progress(len(records))
    return records

  def _measured(self, name: str) -> FileRecord:
    path = os.path.join(self.folder, name)
    folder.sync(path)
    return verification.measure(path, name)

  def _publish(self, written: Sequence[FileRecord]) -> None:
    """Makes one checkpoint of the parts of all workers, and puts it in its place."""
    name = f"{NAME}{self.step}"
    prefix = os.path.join(self.folder, name)
    attached = [r for r in written if r.suffix.startswith(name)]
    parts = [r for r in written if not r.suffix.startswith(name)]
    records = [dataclasses.replace(r, suffix=r.suffix[len(name) :]) for r in attached]
    with tf.device(reader.host_device()):
      # It renames the data files in the order in which they are given.
      tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=[
          os.path.join(self.folder, r.suffix.removesuffix(".data-00000-of-00001")) for r in parts
        ],
        destination_prefix=prefix,
        # It would delete the folder of the parts, which is that of the result.
        delete_old_dirs=False,
      )
    for i, part in enumerate(parts):
      suffix = f".data-{i:05}-of-{len(parts):05}"
      if tf.io.gfile.stat(prefix + suffix).length != part.size:
        raise OSError(f"{prefix}{suffix} changed while the parts were merged")
      records.append(dataclasses.replace(part, suffix=suffix))
    folder.sync(prefix + INDEX)
    records.append(verification.measure(prefix + INDEX, INDEX))
    verification.write_manifest(prefix, records)
    path = files.publish(self.folder, self._directory, self.step)
    if self._cluster.size == 1:
      folder.remove_tree(self._directory, self.folder)
    self._on_published(path)

  def _clean(self, keep: str | None = None) -> None:
    try:
      files.remove_remains(self._directory, keep)
    except _OF_STORAGE:
      pass  # The folder or its disk is gone; what matters is the first error.


def told_to_all(error: Exception, job: Job) -> Exception:
  """Exchanges the error of a save, so that each worker can raise it and exit; returns it."""
  if workers.current().size == 1 or isinstance(error, WorkerLostError):
    return error
  said = texts.last_words(job.own_problem or "")
  if not said:
    return error
  problem = next(filter(None, said), None)
  if problem and not job.own_problem:
    # A disk may have let nobody say more than that.
    error = job.not_written(problem)
  return meeting.told_to_all(error)


def not_written(
  directory: str, step: int, problem: str, of_storage: bool = True
) -> CheckpointError:
  """The error for a checkpoint that could not be written.

  Args:
    directory: folder of the checkpoints.
    step: step of the checkpoint.
    problem: why.
    of_storage: whether it is a `StorageError`: what failed is the disk, not another worker.
  """
  kind = StorageError if of_storage else CheckpointError
  return kind(
    f"cannot write checkpoint {NAME}{step} in {directory}: {problem}; earlier checkpoints are "
    "untouched"
  )


def reason(error: Exception) -> str:
  """Formats a storage error, without TensorFlow's names of operations and temporary files."""
  if isinstance(error, StorageError):
    return str(error)
  text = error.message if isinstance(error, tf.errors.OpError) else str(error)
  # TensorFlow's name of an operation, before and behind; and the name of what was not yet there.
  text = re.sub(r"^\{\{\w+ \S+\}\} | \[Op:\w+\].*$", "", text)
  text = re.sub(rf"^\S*/{re.escape(folder.TEMPORARY)}[^\s;]*; ", "", text)
  return f"{text} ({type(error).__name__})"


def _files(start: str) -> list[str]:
  """The files whose paths begin with a text, whatever characters are in it."""
  parent, name = os.path.split(start)
  try:
    return [os.path.join(parent, n) for n in tf.io.gfile.listdir(parent) if n.startswith(name)]
  except tf.errors.OpError:
    return []
