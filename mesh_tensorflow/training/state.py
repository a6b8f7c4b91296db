"""The state of a model: its variables, and the folder of checkpoints they are restored from."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow import checkpoint as checkpoint_lib
from mesh_tensorflow import optimize
from mesh_tensorflow.checkpoint.by_chief import by_chief
from mesh_tensorflow.errors import CheckpointError, VariableError
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.store import VariableStore
from mesh_tensorflow.running.lowering import OF_A_RUN
from mesh_tensorflow.training.program import ModelRecord
from mesh_tensorflow.training.seeds import Seeds


def names_of_averages(path: str) -> Callable[[str], str]:
  """Maps variables to names in a checkpoint: the moving average, or the variable if it has none.

  Args:
    path: a checkpoint, or a folder with checkpoints.

  Returns:
    A function from the name of a variable to the name under which to read it.

  Raises:
    CheckpointError: the checkpoint has no averages.
  """
  names: list[str] = by_chief(lambda: sorted(checkpoint_lib.describe(path)))
  there = set(names)
  if not any(optimize.averaged_name(n) in there for n in names):
    raise CheckpointError(
      f"run.use_ema is True, but {path} has no averages of weights: they are kept if run.ema_decay "
      "is bound while the model is trained"
    )

  def name_in_checkpoint(name: str) -> str:
    average = optimize.averaged_name(name)
    return average if average in there else name

  return name_in_checkpoint


@contextlib.contextmanager
def averages_in_place(store: VariableStore) -> Iterator[None]:
  """Context manager that swaps in the weights' moving averages, and restores the weights.

  Args:
    store: the variables. Those that have no average stay as they are.
  """
  weights: list[tuple[tf.Variable, tf.Tensor]] = []
  try:
    for name in store.names:
      if optimize.averaged_name(name) not in store:
        continue
      # Slice by slice, each on its device.
      averages = store[optimize.averaged_name(name)].different_slices
      for weight, average in zip(store[name].different_slices, averages):
        with tf.device(weight.device):
          weights.append((weight, tf.identity(weight)))
          weight.assign(tf.cast(average, weight.dtype))
    yield
  finally:
    for weight, value in weights:
      with tf.device(weight.device):
        weight.assign(value)


class FewCheckpointsError(CheckpointError):
  """A folder has fewer checkpoints, up to a step, than are to be averaged."""


def checkpoints_up_to(path: str, count: int) -> list[str]:
  """A checkpoint and those before it in its folder, `count` of them, the oldest first.

  Raises:
    FewCheckpointsError: there are fewer.
  """
  step, folder = checkpoint_lib.get_step_from_path(path), os.path.dirname(path)
  steps = {checkpoint_lib.get_step_from_path(p): p for p in checkpoint_lib.all_checkpoints(folder)}
  found = [p for s, p in sorted(steps.items()) if s <= step]
  if len(found) < count:
    there, most = (
      (f"are {len(found)} checkpoints", f"average {len(found)} at most")
      if len(found) > 1
      else ("is 1 checkpoint", "average nothing (run.average_checkpoints = 1)")
    )
    raise FewCheckpointsError(
      f"run.average_checkpoints (--last of the command average) is {count}, and up to step {step} "
      f"there {there} in {folder}; {most}, or keep more when training (run.keep_checkpoint_max, "
      "run.save_checkpoints_steps)"
    )
  return found[-count:]


class ModelState:
  """Variables of a model on a mesh, their step, and their checkpoints.

  Args:
    mesh_impl: the mesh, whose variable store has the variables.
    model_dir: folder of checkpoints, or None.
    keep_checkpoint_max: number of checkpoints to keep; None: all.
    checkpoint_options: further arguments of the `Checkpointer`.
    use_ema: takes, but for training, the moving averages of weights from checkpoints.
    average_checkpoints: takes, but for training, the means of weights of so many checkpoints.
    quiet: writes no lines.
    make_record: captures what decides the model, right after its program was built; see
      `ModelRecord`.

  Attributes:
    mesh_impl: the mesh.
    model_dir: folder of checkpoints, or None.
    checkpointer: writes and reads the checkpoints; None without a folder.
    step: the step of the variables.
    restored: the checkpoint that the variables hold; None if they were changed since, or before.
    data_seed: seed of the order of training data.
  """

  def __init__(
    self,
    mesh_impl: MeshImpl,
    model_dir: str | None,
    *,
    keep_checkpoint_max: int | None = None,
    checkpoint_options: Mapping[str, Any] | None = None,
    use_ema: bool = False,
    average_checkpoints: int = 1,
    quiet: bool = False,
    make_record: Callable[[], ModelRecord | None] = lambda: None,
  ):
    self.mesh_impl = mesh_impl
    self.model_dir = model_dir
    self.step = 0
    self.restored: str | None = None
    self.data_seed = self.store.seed
    self.checkpointer: checkpoint_lib.Checkpointer | None = None
    if model_dir:
      self.checkpointer = checkpoint_lib.Checkpointer(
        model_dir, self.store, max_to_keep=keep_checkpoint_max, **(checkpoint_options or {})
      )
    self._use_ema = use_ema
    self._average_checkpoints = average_checkpoints
    self._quiet = quiet
    self._make_record = make_record
    self._compared: set[str] = set()  # Checkpoints whose records were looked at.

  @property
  def store(self) -> VariableStore:
    """The variables."""
    return self.mesh_impl.variable_store

  @functools.cached_property
  def record(self) -> ModelRecord | None:
    """Settings that decide the model; to be asked for first right after its program was built."""
    return self._make_record()

  def use_seeds(self, *, noise: int, data: int) -> None:
    """Sets the seeds of noise and data; call it before a program is traced.

    Args:
      noise: seed of random operations, such as dropout.
      data: seed of the order of training data.
    """
    self.store.noise_seed = noise
    self.data_seed = data

  def use_seeds_of(self, settings: TrainerSettings) -> None:
    """Sets the seeds of a training, that of weights only where there are none yet.

    Args:
      settings: whose `seed` and `seeds` count.
    """
    seeds = Seeds.of_run(settings.seed, settings.seeds)
    if not self.store.names:
      self.store.seed = seeds.weights
    self.use_seeds(noise=seeds.dropout, data=seeds.data)

  def latest_checkpoint(self) -> str | None:
    """The newest good checkpoint of `model_dir`; None if there is none.

    One that is being written is waited for. Several workers must all call it, and get the same.

    Raises:
      DamagedCheckpointError: there are checkpoints, and all are damaged.
    """
    return self.checkpointer.latest() if self.checkpointer is not None else None

  def variable_names(self, path: str | None = None) -> list[str]:
    """The names in a checkpoint; None: in the newest; without one, of the program."""
    path = path or self.latest_checkpoint()
    return sorted(checkpoint_lib.describe(path) if path else self.store.names)

  def variable_value(self, name: str) -> np.ndarray:
    """A variable in the newest checkpoint; without one, in the program.

    Args:
      name: its full name.

    Raises:
      VariableError: there is no such variable.
    """
    path = self.latest_checkpoint()
    names = self.variable_names(path)
    if name not in names:
      raise VariableError(f"there is no variable {name!r}; there are {', '.join(names[:20])} ...")
    if path is not None:
      return checkpoint_lib.Values(path)[name]
    return np.asarray(self.store[name].numpy())

  def restore(self, path: str | None = None, for_training: bool = False) -> None:
    """Restores a checkpoint and its step; without one, the step is 0 and the rest stays as it is.

    But for training it may be the mean of several; the step is then that of the last one.

    Args:
      path: a checkpoint, or a folder for its newest good one; None: that of `model_dir`.
      for_training: whether it must have exactly the model's variables; else it may have more
        (those of the optimizer).

    Raises:
      CheckpointError: a checkpoint is not of this model.
      FewCheckpointsError: there are not as many before it as are to be averaged.
    """
    path = path or self.latest_checkpoint()
    if path is None:
      self.step = 0
      return
    if for_training or self._average_checkpoints == 1:
      self._restore(path, for_training)
      return
    path = checkpoint_lib.resolve(path)
    paths = by_chief(lambda: checkpoints_up_to(path, self._average_checkpoints))
    means: list[Any] = []
    for one in paths:
      self._restore(one, for_training=False)
      means = self._added(means, 1 / len(paths))
    slices = self._averaged_slices()
    for variable, mean in zip(slices, means):
      with tf.device(variable.device):
        variable.assign(tf.cast(mean, variable.dtype))
    steps = ", ".join(str(checkpoint_lib.get_step_from_path(p)) for p in paths)
    self.say(f"averaged the weights of {len(paths)} checkpoints: steps {steps}")

  def _averaged_slices(self) -> list[Any]:
    return [s for v in self.store for s in v.different_slices if s.dtype.is_floating]

  def _added(self, sums: Sequence[Any], factor: float) -> list[Any]:
    """Sums of floating slices, in float32 at least, plus the present values times a factor."""
    added = []
    for i, variable in enumerate(self._averaged_slices()):
      with tf.device(variable.device):
        dtype = variable.dtype if variable.dtype.size > 4 else tf.float32
        value = tf.cast(variable, dtype) * factor
        added.append(value + sums[i] if sums else value)
    return added

  def _restore(self, path: str, for_training: bool) -> None:
    self.check_record(path)
    checkpointer = self.checkpointer or checkpoint_lib.Checkpointer(
      os.path.dirname(path), self.store
    )
    self.restored = None  # A checkpoint that fails to be read may have changed some variables.
    # Without training there are no variables for the optimizer's state in the checkpoint.
    averaged = self._use_ema and not for_training
    restored = checkpointer.restore(
      path,
      ignore_unexpected=not for_training,
      name_in_checkpoint=names_of_averages(path) if averaged else None,
    )
    self.restored = restored.path
    self.say(f"restored {restored.path}{' (averages of weights)' if averaged else ''}")
    try:
      self.step = checkpoint_lib.get_step_from_path(restored.path)
    except CheckpointError:  # It has another name.
      self.step = restored.step or 0

  def check_record(self, path: str) -> None:
    """Raises or reports, once, if a checkpoint is of another model than this one."""
    if path in self._compared:
      return
    if self.record is not None:
      for line in by_chief(lambda: self._differences(path)):
        self.say(line)
    self._compared.add(path)

  def _differences(self, path: str) -> list[str]:
    resolved = checkpoint_lib.resolve(path)
    assert self.record is not None
    return self.record.compare(resolved, fits=lambda: self.has_variables_of(resolved))

  def has_variables_of(self, path: str) -> bool:
    """True if a checkpoint has all variables of the model, with the same shapes."""
    found = checkpoint_lib.describe(path)
    return all(
      stored.name in found and found[stored.name].shape == stored.shape.to_integer_list
      for stored in self.store
      if not stored.name.startswith(OF_A_RUN)
    )

  def on_mesh(self, mesh_impl: MeshImpl) -> ModelState:
    """State of the same model on another mesh, without a folder."""
    again = copy.copy(self)
    again.mesh_impl, again.checkpointer = mesh_impl, None
    return again

  def say(self, text: str) -> None:
    """Prints a line, but for a quiet model."""
    if not self._quiet:
      print(text, flush=True)
