"""Saves and restores the variables of stores, and keeps a folder of checkpoints in order."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import os
import random
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gin
import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.arguments.declared import ABOVE_ZERO, COUNT, affects, takes
from mesh_tensorflow.checkpoint import (
  files,
  keeping,
  meeting,
  reader,
  restoring,
  shared_folder,
  snapshot,
  writer,
)
from mesh_tensorflow.checkpoint.attachments import check_name, own_name
from mesh_tensorflow.checkpoint.keeping import Keeping
from mesh_tensorflow.checkpoint.restoring import EXTRA, GLOBAL_STEP, Restored
from mesh_tensorflow.checkpoint.snapshot import Piece, Spool, pieces_of, whole_piece
from mesh_tensorflow.checkpoint.writer import Job
from mesh_tensorflow.errors import CheckpointError, StorageError, WorkerLostError
from mesh_tensorflow.meshes.store import StoredVariable, VariableStore
from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.running.lowering import RUN_COUNTER
from mesh_tensorflow.workers import launcher_reports

_LOG = logging.getLogger("mesh_tensorflow")

# A slice that this worker writes: name, variable, offset, and what has the value.
_Owned = tuple[str, StoredVariable, tuple[int, ...], tf.Variable]


class Copies:
  """Takes the values of saves; keeps the temporary file, which they share.

  Args:
    directory: folder of the checkpoints.
    in_memory: keep the values in memory, not in a file.
    snapshot_directory: of the temporary file; None for the folder of the checkpoints, or the
      system's for such files if the checkpoints are in a remote store.
  """

  def __init__(self, directory: str, in_memory: bool, snapshot_directory: str | None):
    self._directory = directory
    self._in_memory = in_memory
    self._snapshot_directory = snapshot_directory
    self.spool: Spool | None = None

  def take(
    self,
    variables: Mapping[str, StoredVariable],
    step: int,
    extra: Mapping[str, Any],
    in_background: bool,
  ) -> tuple[list[Piece], bool]:
    """Takes a snapshot of the slices that this worker writes.

    Args:
      variables: all, by name.
      step: the number of steps done.
      extra: what else goes into the checkpoint, by name; the chief writes it.
      in_background: whether the variables shall be free to change.

    Returns:
      The pieces, and whether the variables may change while they are written: `in_background`, or
      False where there is no room for a copy.

    Raises:
      CheckpointError: the variable `global_step` says another step.
    """
    owned = _owned(variables, step)
    size = sum(v.shape.num_elements() * v.dtype.size for *_, v in owned)
    # A copy that one write would take into memory at once anyway needs no file.
    if not in_background or self._in_memory or size <= snapshot.TRANSFER_BUFFER:
      pieces = _pieces(owned, in_background, None)
    else:
      try:
        self.spool = self.spool or self._new_spool(size, keeping.needed_bytes(variables.values()))
        self.spool.begin(size)
        pieces = _pieces(owned, in_background, self.spool)
      except (OSError, StorageError) as e:
        _LOG.warning(
          "no copy of the values of step %d can be made in %s: %s; the training waits until its "
          "checkpoint is written",
          step,
          self._folder(),
          writer.reason(e),
        )
        self.close()
        in_background = False
        pieces = _pieces(owned, in_background, None)
    if workers.current().is_chief:
      with tf.device(reader.host_device()):
        pieces.append(whole_piece(GLOBAL_STEP, tf.constant(step, tf.int64)))
        for name, value in extra.items():
          value = tf.constant(value.numpy() if tf.is_tensor(value) else value)
          pieces.append(whole_piece(EXTRA + name, value))
    return pieces, in_background

  def _new_spool(self, size: int, needed: int) -> Spool:
    """A temporary file that leaves enough room for the checkpoint.

    Args:
      size: bytes that it is to hold.
      needed: bytes of the checkpoint.

    Raises:
      StorageError: there is no room for both.
    """
    place = self._folder()
    free = keeping.free_bytes(place)
    if free is not None and "://" not in self._directory:
      is_beside = os.stat(place).st_dev == os.stat(self._directory).st_dev
      if is_beside and free < size + needed:
        raise StorageError("there is no room for it beside the checkpoint")
    return Spool(place)

  def close(self) -> None:
    """Removes the temporary file, if there is one."""
    if self.spool is not None:
      self.spool.close()
      self.spool = None

  def _folder(self) -> str:
    """Directory of the temporary file that holds a snapshot."""
    if self._snapshot_directory:
      return self._snapshot_directory
    return tempfile.gettempdir() if "://" in self._directory else self._directory


def _owned(variables: Mapping[str, StoredVariable], step: int) -> list[_Owned]:
  """The slices that this worker writes."""
  owned: list[_Owned] = []
  for name, stored in variables.items():
    if name != GLOBAL_STEP:
      owned += [(name, stored, begin, v) for begin, v in stored.owned(workers.current().index)]
      continue
    now = int(stored.slices[0].numpy()) if stored.slices else step
    if now != step:
      raise CheckpointError(f"save(step={step}): the variable global_step is {now}")
  return owned


def _pieces(owned: Sequence[_Owned], in_background: bool, spool: Spool | None) -> list[Piece]:
  """Pieces to write of this worker's slices; copied, or in the spool, if `in_background`."""
  pieces = []
  for name, stored, begin, variable in owned:
    # On CPUs it shares the buffer; a later update of the variable works on a copy.
    value = variable.read_value()
    if stored.extent(begin) != list(stored.slice_shape):  # Without its padding.
      value = kernels.cut(value, [0] * len(begin), stored.extent(begin))
    if in_background and spool is None:
      with tf.device(reader.host_device()):
        value = tf.identity(value)
    pieces += pieces_of(name, stored, begin, value, spool)
  return pieces


class _InBackground:
  """A checkpoint that another thread writes."""

  def __init__(self, future: concurrent.futures.Future[None]):
    self._future = future

  def join(self) -> None:
    """Waits until it is written, or could not be."""
    concurrent.futures.wait([self._future])


@gin.configurable(
  module="mesh_tensorflow.checkpoint",
  allowlist=[
    "keep_every_n_hours",
    "asynchronous",
    "snapshot_in_memory",
    "snapshot_directory",
    "worker_timeout_seconds",
  ],
)
@affects("report")
@takes(max_to_keep=COUNT, keep_every_n_hours=ABOVE_ZERO, worker_timeout_seconds=ABOVE_ZERO)
class Checkpointer:
  """Saves and restores the variables of one or several stores.

  The counter of the programs that drew random numbers, which a store keeps unless a seed is
  given, is saved and restored too: a resumed run draws what an uninterrupted one would.

  Args:
    directory: folder of the checkpoints; made by the first `save`. One run writes to it.
    stores: a `VariableStore`, or several, whose variable names must differ.
    max_to_keep: older checkpoints than the newest so many are deleted; None keeps all. Only those
      that the folder's state file lists are counted and deleted.
    keep_every_n_hours: of those to delete, keep one per this number of hours.
    asynchronous: write in the background. A save then costs the caller a copy of the values, into
      a temporary file (if there is no room for it, that save is not in the background).
    snapshot_in_memory: keep the values in memory instead. On CPUs that costs the caller nothing,
      but each value that changes before it is written is copied then; elsewhere it is a copy to
      the host's memory.
    snapshot_directory: of the temporary files; a local folder. The folder of the checkpoints by
      default, or the system's for such files if the checkpoints are in a remote store.
    worker_timeout_seconds: a save fails if another worker shows no sign for so long.
  """

  def __init__(
    self,
    directory: str,
    stores: VariableStore | Iterable[VariableStore],
    *,
    max_to_keep: int | None = None,
    keep_every_n_hours: float | None = None,
    asynchronous: bool = True,
    snapshot_in_memory: bool = False,
    snapshot_directory: str | None = None,
    worker_timeout_seconds: float = 90.0,
  ):
    if max_to_keep is not None and max_to_keep < 1:
      raise CheckpointError(f"max_to_keep (={max_to_keep}) must be at least 1, or None for all")
    self._directory = os.fspath(directory) or "."
    self._stores: list[VariableStore]
    self._stores = [stores] if isinstance(stores, VariableStore) else list(stores)
    every = None if keep_every_n_hours is None else keep_every_n_hours * 3600
    self._keeping = Keeping(max_to_keep, every, time.time())
    self._asynchronous = asynchronous
    self._thread: _InBackground | None = None
    # One thread for all checkpoints: each new one could have a pool of memory of its own, which
    # stays with the process.
    self._executor = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
    self._copies = Copies(self._directory, snapshot_in_memory, snapshot_directory)
    # The last save's error, if it failed; and error messages that no `wait` has raised yet.
    self._failure: tuple[Exception, Job] | None = None
    self._unheard: list[str] = []
    weakref.finalize(self, _log_unheard, self._unheard)
    self._worker_timeout = worker_timeout_seconds
    self._abandoned = threading.Event()
    # Tells the saves of this run from what a killed one left; the same in all workers.
    self._token = ""
    self._is_shared = False
    self._saves = 0
    self._whole_step: int | None = None

  @property
  def directory(self) -> str:
    """The folder of the checkpoints."""
    return self._directory

  @property
  def whole_step(self) -> int | None:
    """The step of the last checkpoint that this object has written whole; None before the first.

    Of several workers, another than the first one may learn of it a moment later.
    """
    return self._whole_step

  @property
  def has_failed(self) -> bool:
    """True if the last background save failed; does not wait. `wait` raises its error."""
    return self._failure is not None

  def __enter__(self) -> Checkpointer:
    return self

  def __exit__(self, kind: type[BaseException] | None, *exc_info: Any) -> None:
    try:
      if kind is not None and issubclass(kind, WorkerLostError):
        self.abandon()
      else:
        self.wait()
    finally:
      self._copies.close()

  # --------------------------------------------------------------------- saving

  def save(
    self,
    step: int,
    extra: Mapping[str, Any] | None = None,
    *,
    asynchronous: bool | None = None,
    attachments: Mapping[str, Callable[[str], None]] | None = None,
    best: keeping.Best | None = None,
  ) -> str:
    """Writes the checkpoint `model.ckpt-<step>`.

    It becomes visible when it is whole; until then, and if writing fails, the earlier ones stay
    as they are. A checkpoint of the same step is replaced. Each worker writes slices of its own.

    Args:
      step: number of training steps done; becomes `global_step`.
      extra: additional scalars or arrays by name, which `restore` returns; worker 0's are saved.
      asynchronous: overrides the setting of the constructor for this call.
      attachments: functions by name that write files of their own, each called at once with a
        path with which the names of its files must begin. They become part of the checkpoint:
        visible when it is whole, checked and deleted with it; each worker's its own. Their path
        is `attachment(path, name)`. A name is part of a file's name: it has no "/".
      best: a checkpoint that stays beside the newest `max_to_keep`.

    Returns:
      The path the checkpoint will have, without suffix.

    Raises:
      StorageError: the disk has no room for it, also when the checkpoints that would go after it
        are gone; or this save (synchronous), or the one before (asynchronous), could not be
        written, in any worker.
      CheckpointError: another worker failed; or the store is empty, or the name of an attachment
        is none that a file can have.
    """
    self.wait()
    step = int(step)
    for name in attachments or {}:
      check_name(name)
    self._begin(step)
    self._make_room(step, best)
    self._saves += 1
    asynchronous = self._asynchronous if asynchronous is None else asynchronous
    pieces, in_background = self._copies.take(self._variables(), step, extra or {}, asynchronous)
    job = Job(
      self._directory,
      step,
      pieces,
      functools.partial(self._published, step, best),
      mark=f".{self._token}.{self._saves}",
      timeout_seconds=self._worker_timeout,
      abandoned=self._abandoned,
      advice=keeping.advice(self._keeping.max_to_keep),
    )
    for name, write in (attachments or {}).items():
      job.attach(own_name(name), write)
    if in_background:
      # A program that ends finishes its last checkpoint first.
      self._thread = _InBackground(self._executor.submit(self._run, job, True))
    else:
      self._run(job, asynchronous)
      if not asynchronous:  # Else others may write in the background, and hear of an error later.
        self.wait()
    return os.path.join(self._directory, f"{files.NAME}{step}")

  def wait(self) -> None:
    """Waits until the last checkpoint is written.

    Raises:
      CheckpointError: writing it failed, in any worker.
    """
    if self._thread is not None:
      self._thread.join()
      self._thread = None
    failure, self._failure = self._failure, None
    self._unheard.clear()
    if failure is not None:
      raise writer.told_to_all(*failure)

  def abandon(self) -> None:
    """Gives up a checkpoint for which other workers would have to write their parts.

    To be called when one of them is lost; a program that ends would wait for them otherwise.
    """
    self._abandoned.set()
    if self._thread is not None:
      self._thread.join()
      self._thread = None
    self._failure = None  # That it was given up is no news.
    self._unheard.clear()

  def check_folder(self) -> None:
    """Checks that all workers see the folder and can write there, as the first `save` does.

    For the start of a run that will save, so that it does not fail at its first checkpoint. All
    workers call it at the same place of their programs. Does nothing for one worker.

    Raises:
      CheckpointError: in all workers: some do not see the folder, or cannot write there.
    """
    if not self._is_shared:
      shared_folder.check(self._directory)
      self._is_shared = True

  def _run(self, job: Job, in_background: bool) -> None:
    try:
      job.run()
      self._whole_step = job.step
    except Exception as e:  # noqa: BLE001 - raised in the caller's thread, by wait().
      if in_background:  # Nobody may be left to call wait().
        self._unheard.append(str(e))
      self._failure = e, job

  def _published(self, step: int, best: keeping.Best | None, path: str) -> None:
    """Callback of the chief once a checkpoint is published: reports it, and deletes old ones."""
    self._whole_step = step
    launcher_reports.tell(launcher_reports.SAVED, step)
    self._keeping.publish(self._directory, path, best)

  def _begin(self, step: int) -> None:
    """Prepares the first save: workers agree on a token; the chief removes a killed run's files."""
    if self._token:
      return
    self.check_folder()
    error = None
    token = meeting.of_chief(f"{random.SystemRandom().getrandbits(32):08x}")
    if workers.current().is_chief:
      try:
        tf.io.gfile.makedirs(self._directory)
        files.remove_remains(self._directory)
      except (tf.errors.OpError, OSError, StorageError) as e:
        problem = writer.reason(e)
        error = writer.not_written(self._directory, step, problem)
    meeting.raise_together(f"cannot write in {self._directory}", error)
    self._token = token

  def _make_room(self, step: int, best: keeping.Best | None) -> None:
    """Checks the disk space for a checkpoint; deletes old checkpoints if there is not enough."""
    error = None
    if workers.current().is_chief:
      path = os.path.join(self._directory, f"{files.NAME}{step}")
      try:
        needed = keeping.needed_bytes(self._variables().values())
        problem = keeping.make_room(
          self._directory, path, needed, self._keeping, self._copies.close, best
        )
      except (tf.errors.OpError, OSError) as e:
        problem = writer.reason(e)
      if problem:
        advice = keeping.advice(self._keeping.max_to_keep)
        error = writer.not_written(self._directory, step, f"{problem}; {advice}")
    meeting.raise_together(f"save step {step} in {self._directory}", error)

  # ------------------------------------------------------------------- restoring

  def restore(
    self,
    path: str | None = None,
    *,
    ignore_missing: bool = False,
    ignore_unexpected: bool = False,
    name_in_checkpoint: Callable[[str], str] | None = None,
    should_restore: Callable[[str], bool] | None = None,
    ignore_mismatched: bool = False,
    check_content: bool = True,
  ) -> Restored:
    """Sets the variables of the stores, which must exist.

    `Function.create_variables` makes those of an `mtf.function`, the first lowering those of other
    programs.

    Each device reads its own slice. Values are cast from the dtype in the checkpoint. Before, all
    files are read and compared with what was written (several workers share that). If the newest
    checkpoint of a folder is damaged, that is logged, and the newest good one is taken.

    Args:
      path: a checkpoint, or a folder for its newest one; the newest of this checkpointer's folder
        by default.
      ignore_missing: leave variables that the checkpoint does not have as they are.
      ignore_unexpected: allow the checkpoint to have other variables (when evaluating: those of the
        optimizer).
      name_in_checkpoint: function from the name of a variable to its name in the checkpoint.
      should_restore: function from the name of a variable to whether it is restored.
      ignore_mismatched: leave variables that have another shape there as they are.
      check_content: whether to compare the files with what was written; else damage is noticed
        only in what is restored.

    Returns:
      A `Restored`, which also tells what was restored and what was not.

    Raises:
      DamagedCheckpointError: the checkpoint that was asked for, or each of the folder, is damaged.
      CheckpointError: there is no checkpoint; or it is of another model: one message has the names
        of all missing, unexpected, and differently shaped variables. Then nothing was restored.
    """
    found = self._restore(
      path,
      ignore_missing=ignore_missing,
      ignore_unexpected=ignore_unexpected,
      name_in_checkpoint=name_in_checkpoint,
      should_restore=should_restore,
      ignore_mismatched=ignore_mismatched,
      check_content=check_content,
    )
    if found is None:
      raise CheckpointError(f"there is no checkpoint in {path or self._directory}")
    return found

  def restore_or_none(self, **options: Any) -> Restored | None:
    """Restores the folder's newest checkpoint, if there is one, so that a program continues.

    Args:
      **options: keyword arguments of `restore`, but for the path.

    Returns:
      A `Restored`; None if the folder has no checkpoint, or is not there: the variables keep their
      initial values. Several workers get the same answer.

    Raises:
      DamagedCheckpointError: there are checkpoints, and all are damaged.
      CheckpointError: the checkpoint is of another model, as `restore` says it.
    """
    return self._restore(None, **options)

  def _restore(
    self,
    path: str | None,
    *,
    name_in_checkpoint: Callable[[str], str] | None = None,
    should_restore: Callable[[str], bool] | None = None,
    **options: bool,
  ) -> Restored | None:
    self.wait()
    wanted = {}
    resumes = should_restore is None and name_in_checkpoint is None
    for name, stored in self._variables().items():
      if name.startswith(RUN_COUNTER) and not resumes:
        continue  # It belongs to a run, and these are weights for another one.
      if should_restore is None or should_restore(name):
        wanted[name] = (name_in_checkpoint(name) if name_in_checkpoint else name, stored)
    if not wanted:
      raise CheckpointError(
        f"restore {path or self._directory}: there is no variable to restore; call "
        "create_variables() of the mtf.function, or lower the program, before restoring"
      )
    return restoring.restore(
      self._directory if path is None else os.fspath(path),
      wanted,
      set(self._variables()),
      is_folder=path is None,
      **options,
    )

  def latest(self) -> str | None:
    """The newest good checkpoint of this folder, as `latest_checkpoint` finds it.

    Several workers share the reading, and get the same answer.

    Raises:
      CheckpointError: writing the last one failed; or all are damaged.
    """
    self.wait()
    return restoring.newest_good(self._directory)

  def _variables(self) -> dict[str, StoredVariable]:
    """The variables of all stores by name; each store's run counter has its own name."""
    result: dict[str, StoredVariable] = {}
    for i, store in enumerate(self._stores):
      for stored in store:
        name = stored.name
        if name == RUN_COUNTER and len(self._stores) > 1:
          name = f"{name}_{i}"
        if name in result:
          raise CheckpointError(
            f"variable {name} is in two of the stores; give them separate checkpointers"
          )
        result[name] = stored
    if not result:
      raise CheckpointError(
        "the variable store is empty: call create_variables() of the mtf.function, or lower the "
        "program, before saving or restoring"
      )
    return result


def _log_unheard(errors: list[str]) -> None:
  """Logs the errors of background saves that nobody waited for, when a checkpointer ends."""
  for text in errors:
    _LOG.error("%s", text)
