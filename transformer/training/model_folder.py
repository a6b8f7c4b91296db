"""A model and the folder of its checkpoints: listing and restoring them."""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np

import mesh_tensorflow as mtf
from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow import checkpoint as checkpoint_lib
from mesh_tensorflow.checkpoint.by_chief import by_chief
from mesh_tensorflow.errors import CheckpointError, VariableError
from mesh_tensorflow.training import averages
from mesh_tensorflow.transformer.gin_config import model_config
from mesh_tensorflow.transformer.programs.model_steps import ModelSteps
from mesh_tensorflow.transformer.training import init_checkpoint


class ModelFolder:
  """Base class of `Estimator`: a model's variables and the checkpoints they are restored from.

  Args:
    steps: the programs of the model.
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    model_dir: folder of checkpoints, or None.
    settings: `keep_checkpoint_max`, `allow_config_change` and `use_ema` are about the folder.
    quiet: writes no lines.

  Attributes:
    steps: the programs of the model.
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    model_dir: folder of checkpoints, or None.
    checkpointer: writes and reads the checkpoints; None without a folder.
    global_step: the step of the variables.
  """

  def __init__(
    self,
    steps: ModelSteps,
    vocabulary: Any,
    model_dir: str | None,
    *,
    settings: TrainerSettings,
    quiet: bool = False,
  ):
    self.steps = steps
    self.vocabulary = vocabulary
    self.model_dir = model_dir
    self.global_step = 0
    self.checkpointer: checkpoint_lib.Checkpointer | None = None
    if model_dir:
      self.checkpointer = checkpoint_lib.Checkpointer(
        model_dir, self.mesh_impl.variable_store, max_to_keep=settings.keep_checkpoint_max
      )
    self._data_seed = self.mesh_impl.variable_store.seed
    self._quiet = quiet
    self._allow_config_change = settings.allow_config_change
    self._use_ema = settings.use_ema
    self._compared: set[str] = set()  # Checkpoints whose configurations were looked at.
    self._restored: str | None = None  # The checkpoint that the variables hold.

  def use_seeds(self, *, noise: int, data: int) -> None:
    """Sets the seeds of noise and data; call it before a program is traced.

    Args:
      noise: seed of random operations, such as dropout.
      data: seed of the order of training data.
    """
    self.mesh_impl.variable_store.noise_seed = noise
    self._data_seed = data

  @property
  def mesh_impl(self) -> mtf.MeshImpl:
    """The mesh that the programs are for."""
    return self.steps.mesh_impl

  def latest_checkpoint(self) -> str | None:
    """The newest good checkpoint of `model_dir`; None if there is none.

    One that is being written is waited for. Several workers must all call it, and get the same.

    Raises:
      DamagedCheckpointError: there are checkpoints, and all are damaged.
    """
    return self.checkpointer.latest() if self.checkpointer is not None else None

  def get_variable_names(self) -> list[str]:
    """The names of all variables in the newest checkpoint; without one, of the program."""
    return self._variable_names(self.latest_checkpoint())

  def get_variable_value(self, name: str) -> np.ndarray:
    """A variable in the newest checkpoint; without one, in the program.

    Args:
      name: its full name.

    Raises:
      VariableError: there is no such variable.
    """
    path = self.latest_checkpoint()
    names = self._variable_names(path)
    if name not in names:
      raise VariableError(f"there is no variable {name!r}; there are {', '.join(names[:20])} ...")
    if path is not None:
      return checkpoint_lib.Values(path)[name]
    return np.asarray(self.mesh_impl.variable_store[name].numpy())

  def _variable_names(self, path: str | None) -> list[str]:
    """The names in a checkpoint; without one, of the program."""
    return sorted(checkpoint_lib.describe(path) if path else self.mesh_impl.variable_store.names)

  def restore_if_any(self, path: str | None = None, for_training: bool = False) -> int:
    """Restores a checkpoint (the newest good one by default); 0 if there is none.

    Args:
      path: a checkpoint, or a folder for its newest good one; None: that of `model_dir`.
      for_training: whether it must have exactly the model's variables; else it may have more
        (those of the optimizer).

    Returns:
      The step of the checkpoint.
    """
    path = path or self.latest_checkpoint()
    if path is None:
      return 0
    self._check_config(path)
    checkpointer = self.checkpointer or checkpoint_lib.Checkpointer(
      os.path.dirname(path), self.mesh_impl.variable_store
    )
    self._restored = None  # A checkpoint that fails to be read may have changed some variables.
    # Without training there are no variables for the optimizer's state in the checkpoint.
    averaged = self._use_ema and not for_training
    restored = checkpointer.restore(
      path,
      ignore_unexpected=not for_training,
      name_in_checkpoint=averages.names_in(path) if averaged else None,
    )
    self._restored = restored.path
    self._say(f"restored {restored.path}{' (averages of weights)' if averaged else ''}")
    try:
      return checkpoint_lib.get_step_from_path(restored.path)
    except CheckpointError:  # It has another name.
      return restored.step or 0

  @functools.cached_property
  def _model_config(self) -> model_config.ModelConfig:
    """Captures the configuration of the model; call it right after building the program."""
    return model_config.capture(self.steps.model_type, self.vocabulary, self.steps.variable_dtype)

  def _check_config(self, path: str) -> None:
    """Raises or reports, once, if a checkpoint is of another model than this one."""
    if path in self._compared:
      return

    def compare() -> list[str]:
      resolved = checkpoint_lib.resolve(path)
      return model_config.compare(
        resolved,
        self._model_config,
        self._allow_config_change,
        fits=lambda: init_checkpoint.has_variables(resolved, self.mesh_impl.variable_store),
      )

    for line in by_chief(compare):
      self._say(line)
    self._compared.add(path)

  def _say(self, text: str) -> None:
    if not self._quiet:
      print(text, flush=True)
