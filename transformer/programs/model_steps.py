"""The programs of the trainer, under one name: what each is, is in the file of that name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.training.reported import ReportedValues
from mesh_tensorflow.transformer.programs import evaluation, train_step
from mesh_tensorflow.transformer.programs.forward import Forward
from mesh_tensorflow.transformer.programs.updates import Updates


class ModelSteps(Forward):
  """The programs of one model on one mesh, built from the same Python code.

  Args:
    model: a `Unitransformer`, `Bitransformer` or `StudentTeacher`.
    mesh_impl: the mesh.
    model_type: see `build_model`.
    batch_size: sequences in a batch.
    sequence_length: dict from feature to number of tokens.
    outer_batch_size: size of an additional dimension `outer_batch`, which divides the batch.
    variable_filter: which variables are trained: None for all, a regular expression, or a
      function of the `mtf.Variable`.
    ensemble_inputs: the members of an ensemble that see data of their own while they train;
      None: all see the same.
    updates: how weights are updated, whatever the optimizer; None: as `Updates()` says.
  """

  def __init__(
    self,
    model: Any,
    mesh_impl: mtf.MeshImpl,
    model_type: str,
    batch_size: int,
    sequence_length: dict[str, int],
    outer_batch_size: int = 1,
    variable_filter: Any = None,
    *,
    ensemble_inputs: int | None = None,
    updates: Updates | None = None,
  ):
    super().__init__(
      model,
      mesh_impl,
      model_type,
      batch_size,
      sequence_length,
      outer_batch_size,
      ensemble_inputs,
    )
    self._variable_filter = variable_filter
    self.updates = updates or Updates()

  def train_step(
    self,
    feature_names: Sequence[str],
    optimizer: Callable[..., Any],
    *,
    skip_nonfinite: bool = False,
    look: Callable[[mtf.Graph], None] | None = None,
    reported: ReportedValues | None = None,
  ) -> mtf.Function:
    """One step of training; see `train_step.train_step`."""
    return train_step.train_step(
      self,
      feature_names,
      optimizer,
      is_trained=self._is_trained,
      skip_nonfinite=skip_nonfinite,
      look=look,
      reported=reported,
      updates=self.updates,
    )

  def watch_step(self, feature_names: Sequence[str]) -> tuple[list[str], mtf.Function]:
    """A training step that only looks for NaN and infinity; see `train_step.watch_step`."""
    return train_step.watch_step(self, feature_names, self.updates)

  def eval_step(self, feature_names: Sequence[str]) -> mtf.Function:
    """Sums over one batch, teacher-forced; see `evaluation.eval_step`."""
    return evaluation.eval_step(self, feature_names)

  def _is_trained(self, variable: mtf.Variable) -> bool:
    chosen = self._variable_filter
    if chosen is None:
      return True
    if isinstance(chosen, str):
      return re.search(chosen, variable.full_name) is not None
    if callable(chosen):
      return bool(chosen(variable))
    raise ConfigError(
      f"variable_filter must be None, a regular expression or a function, got {chosen!r}"
    )
