"""Checkpoints of variable stores, slice by slice.

Files are TensorFlow's own V2 format: each variable is one tensor under its mtf name, with the
master dtype, written as the slices that the devices hold. So no whole variable is ever put
together, any layout restores what any other wrote, and `tf.train.load_checkpoint` reads it whole.
Next to the variables there is `global_step`, an int64 scalar.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import tensorflow as tf

from mesh_tensorflow import checkpoint_files, checkpoint_reader
from mesh_tensorflow.checkpoint_files import (
  all_checkpoints,
  get_step_from_path,
  latest_checkpoint,
)
from mesh_tensorflow.checkpoint_reader import describe, resolve
from mesh_tensorflow.errors import CheckpointError
from mesh_tensorflow.lowering import RUN_COUNTER
from mesh_tensorflow.store import StoredVariable, VariableStore

_LOG = logging.getLogger("mesh_tensorflow")

GLOBAL_STEP = "global_step"
# Names of additional values in a checkpoint; no variable scope begins so.
_EXTRA = "_extra/"


@dataclasses.dataclass(frozen=True)
class Restored:
  """What `Checkpointer.restore` found besides the variables.

  Attributes:
    path: the checkpoint.
    step: its `global_step`; None if it has none.
    extra: the additional values, as numpy arrays by name.
  """

  path: str
  step: int | None
  extra: dict[str, Any]


class Checkpointer:
  """Saves and restores the variables of one or several stores.

  The counter of the programs that drew random numbers, which a store keeps unless a seed is
  given, is saved and restored too: a resumed run draws what an uninterrupted one would.

  Args:
    directory: folder of the checkpoints; made by the first `save`. One process writes to it.
    stores: a `VariableStore`, or several, whose variable names must differ.
    max_to_keep: older checkpoints than the newest so many are deleted; None keeps all. Only those
      that the folder's state file lists are counted and deleted.
    keep_every_n_hours: of those to delete, keep one for each so many hours.
    asynchronous: write in the background. A save then costs the caller a reference to the values
      (on CPUs; elsewhere a copy to the host): values that change meanwhile are copied.
  """

  def __init__(
    self,
    directory: str,
    stores: VariableStore | Iterable[VariableStore],
    *,
    max_to_keep: int | None = None,
    keep_every_n_hours: float | None = None,
    asynchronous: bool = True,
  ):
    if max_to_keep is not None and max_to_keep < 1:
      raise CheckpointError(f"max_to_keep (={max_to_keep}) must be at least 1, or None for all")
    self._directory = os.fspath(directory)
    self._stores = [stores] if isinstance(stores, VariableStore) else list(stores)
    self._max_to_keep = max_to_keep
    self._keep_every = None if keep_every_n_hours is None else keep_every_n_hours * 3600
    self._asynchronous = asynchronous
    self._started = time.time()
    self._thread: threading.Thread | None = None
    self._error: Exception | None = None
    self._is_clean = False

  @property
  def directory(self) -> str:
    """The folder of the checkpoints."""
    return self._directory

  def __enter__(self) -> Checkpointer:
    return self

  def __exit__(self, *exc_info: Any) -> None:
    self.wait()

  # --------------------------------------------------------------------- saving

  def save(
    self, step: int, extra: Mapping[str, Any] | None = None, *, asynchronous: bool | None = None
  ) -> str:
    """Writes the checkpoint `model.ckpt-<step>`.

    It becomes visible when it is whole; until then, and if writing fails, the earlier ones stay
    as they are. A checkpoint of the same step is replaced.

    Args:
      step: number of training steps done; becomes `global_step`.
      extra: additional scalars or arrays by name, which `restore` returns.
      asynchronous: overrides the setting of the constructor for this call.

    Returns:
      The path the checkpoint will have, without suffix.

    Raises:
      CheckpointError: this save failed (synchronous), or the one before (asynchronous); or the
        store is empty.
    """
    self.wait()
    step = int(step)
    names, specs, tensors, dtypes = self._snapshot(step, extra or {})
    write = lambda: self._write(step, names, specs, tensors, dtypes)  # noqa: E731
    if self._asynchronous if asynchronous is None else asynchronous:
      # Not a daemon: a program that ends finishes its last checkpoint first.
      self._thread = threading.Thread(
        target=self._run, args=(write,), name=f"checkpoint-{step}", daemon=False
      )
      self._thread.start()
    else:
      write()
    return os.path.join(self._directory, f"{checkpoint_files.NAME}{step}")

  def wait(self) -> None:
    """Waits until the last checkpoint is written.

    Raises:
      CheckpointError: writing it failed.
    """
    if self._thread is not None:
      self._thread.join()
      self._thread = None
    error, self._error = self._error, None
    if error is not None:
      raise error

  def _run(self, write: Callable[[], None]) -> None:
    try:
      write()
    except Exception as e:  # noqa: BLE001 - raised in the caller's thread, by wait().
      # Also logged: nobody may be left to call wait().
      _LOG.error("%s", e)
      self._error = e

  def _snapshot(self, step: int, extra: Mapping[str, Any]) -> tuple[list[Any], ...]:
    """Names, slice specs, values now (on the host), and the dtypes to write them in."""
    names, specs, tensors, dtypes = [], [], [], []

    def add(name, spec, tensor, dtype):
      names.append(name)
      specs.append(spec)
      tensors.append(tensor)
      dtypes.append(dtype)

    with tf.device("CPU:0"):
      for name, stored in self._variables().items():
        if name == GLOBAL_STEP:
          now = int(stored.slices[0].numpy())
          if now != step:
            raise CheckpointError(f"save(step={step}): the variable global_step is {now}")
          continue
        for begin, v in stored.distinct():
          # A read shares the buffer; a later update of the variable works on a copy.
          now = tf.identity(v.read_value())
          add(name, checkpoint_reader.slice_spec(stored, begin), now, stored.master_dtype)
      add(GLOBAL_STEP, "", tf.constant(step, tf.int64), tf.int64)
      for name, value in extra.items():
        value = tf.constant(value.numpy() if tf.is_tensor(value) else value)
        add(_EXTRA + name, "", value, value.dtype)
    return names, specs, tensors, dtypes

  def _write(
    self,
    step: int,
    names: list[str],
    specs: list[str],
    tensors: list[tf.Tensor],
    dtypes: list[tf.DType],
  ) -> None:
    folder = checkpoint_files.temporary_folder(self._directory, step)
    try:
      tf.io.gfile.makedirs(self._directory)
      if not self._is_clean:
        checkpoint_files.remove_remains(self._directory)
        self._is_clean = True
      with tf.device("CPU:0"):
        tf.raw_ops.SaveV2(
          prefix=os.path.join(folder, f"{checkpoint_files.NAME}{step}"),
          tensor_names=names,
          shape_and_slices=specs,
          tensors=[t if t.dtype == d else tf.cast(t, d) for t, d in zip(tensors, dtypes)],
        )
      path = checkpoint_files.publish(folder, self._directory, step)
      self._update_state(path)
    except (tf.errors.OpError, OSError) as e:
      try:
        checkpoint_files.remove_remains(self._directory)
      except (tf.errors.OpError, OSError):
        pass  # The folder or its disk is gone; what matters is the first error.
      reason = e.message if isinstance(e, tf.errors.OpError) else str(e)
      raise CheckpointError(
        f"cannot write checkpoint {checkpoint_files.NAME}{step} in {self._directory}: {reason} "
        f"({type(e).__name__}); earlier checkpoints are untouched"
      ) from e

  def _update_state(self, path: str) -> None:
    """Puts a new checkpoint at the end of the state file, and deletes those that are too old."""
    state = checkpoint_files.read_state(self._directory)
    if state is None:
      state = checkpoint_files.State([], [], self._started)
    if not state.last_preserved:
      state.last_preserved = self._started
    there = [tf.io.gfile.exists(p + ".index") for p in state.paths]  # Users delete, too.
    state.paths = [p for p, t in zip(state.paths, there) if t] + [path]
    state.times = [s for s, t in zip(state.times, there) if t] + [time.time()]
    too_old = []
    while self._max_to_keep is not None and len(state.paths) > self._max_to_keep:
      old, written = state.paths.pop(0), state.times.pop(0)
      if self._keep_every is not None and written - state.last_preserved >= self._keep_every:
        state.last_preserved = written
      else:
        too_old.append(old)
    # In this order: the state file never lists a checkpoint that is not there.
    checkpoint_files.write_state(self._directory, state)
    for old in too_old:
      checkpoint_files.remove_checkpoint(old)

  # ------------------------------------------------------------------- restoring

  def restore(
    self,
    path: str | None = None,
    *,
    ignore_missing: bool = False,
    ignore_unexpected: bool = False,
    name_in_checkpoint: Callable[[str], str] | None = None,
    should_restore: Callable[[str], bool] | None = None,
  ) -> Restored:
    """Sets the variables of the stores, which must exist: lower the program first.

    Each device reads its own slice. Values are cast from the dtype in the checkpoint.

    Args:
      path: a checkpoint, or a folder for its newest one; the newest of this checkpointer's folder
        by default.
      ignore_missing: leave variables that the checkpoint does not have as they are.
      ignore_unexpected: allow the checkpoint to have other variables (when evaluating: those of the
        optimizer).
      name_in_checkpoint: function from the name of a variable to its name in the checkpoint.
      should_restore: function from the name of a variable to whether it is restored.

    Returns:
      A `Restored`.

    Raises:
      CheckpointError: there is no checkpoint; or it is damaged; or it is of another model: one
        message has the names of all missing, unexpected, and differently shaped variables. In the
        last case nothing has been restored.
    """
    self.wait()
    if path is None:
      path = latest_checkpoint(self._directory)
      if path is None:
        raise CheckpointError(f"there is no checkpoint in {self._directory}")
    path = resolve(path)
    found = describe(path)
    wanted = {}
    resumes = should_restore is None and name_in_checkpoint is None
    for name, stored in self._variables().items():
      if name.startswith(RUN_COUNTER) and not resumes:
        continue  # It belongs to a run, and these are weights for another one.
      if should_restore is None or should_restore(name):
        wanted[name] = (name_in_checkpoint(name) if name_in_checkpoint else name, stored)
    if not wanted:
      raise CheckpointError(
        f"restore {path}: there is no variable to restore; lower the program (which creates its "
        "variables) before restoring"
      )
    self._check(path, found, wanted, ignore_missing, ignore_unexpected)
    requests = []
    for name, stored in wanted.values():
      if name in found:
        by_begin: dict[tuple[int, ...], list[tf.Variable]] = {}
        for begin, v in zip(stored.begins, stored.slices):
          by_begin.setdefault(begin, []).append(v)
        for begin, variables in by_begin.items():
          spec = checkpoint_reader.slice_spec(stored, begin)
          requests.append((name, spec, found[name].dtype, variables))
    checkpoint_reader.read_slices(path, requests)
    extra = {}
    step = None
    reader = tf.train.load_checkpoint(path)
    for name in found:
      if name.startswith(_EXTRA):
        extra[name[len(_EXTRA) :]] = reader.get_tensor(name)
      elif name == GLOBAL_STEP:
        step = int(reader.get_tensor(name))
    return Restored(path, step, extra)

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
        "the variable store is empty: lower the program (which creates its variables) before "
        "saving or restoring"
      )
    return result

  def _check(
    self,
    path: str,
    found: Mapping[str, tf.TensorSpec],
    wanted: Mapping[str, tuple[str, StoredVariable]],
    ignore_missing: bool,
    ignore_unexpected: bool,
  ) -> None:
    """Raises one error with everything that does not fit."""
    missing, mismatched = [], []
    for name, (there, stored) in wanted.items():
      label = name if name == there else f"{name} (as {there})"
      if there not in found:
        # Programs that were given a seed, and other libraries, have no run counter.
        if not ignore_missing and not name.startswith(RUN_COUNTER):
          missing.append(f"{label} {stored.shape.to_integer_list}")
      elif found[there].shape != stored.shape.to_integer_list:
        dims = ", ".join(f"{d.name}:{d.size}" for d in stored.shape)
        mismatched.append(f"{label}: {found[there].shape} in the checkpoint, [{dims}] in the model")
      elif found[there].dtype == tf.string:
        mismatched.append(f"{label}: string in the checkpoint, {stored.master_dtype.name} here")
    unexpected = []
    if not ignore_unexpected:
      known = {there for there, _ in wanted.values()} | {GLOBAL_STEP} | set(self._variables())
      unexpected = [
        f"{n} {s.shape}"
        for n, s in sorted(found.items())
        if n not in known and not n.startswith((_EXTRA, RUN_COUNTER))
      ]
    if not (missing or unexpected or mismatched):
      return
    lines = [f"checkpoint {path} is not of this model:"]
    for title, names in (
      ("missing in the checkpoint", missing),
      ("in the checkpoint but not in the model", unexpected),
      ("of another shape or kind", mismatched),
    ):
      if names:
        lines.append(f"  {title} ({len(names)}):")
        lines += [f"    {n}" for n in names]
    raise CheckpointError("\n".join(lines))


__all__ = [
  "Checkpointer",
  "Restored",
  "all_checkpoints",
  "describe",
  "get_step_from_path",
  "latest_checkpoint",
  "resolve",
]
