"""A variable of the store as one lowering sees it: its slices as laid-out tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from mesh_tensorflow.meshes.contract import MeshContract
from mesh_tensorflow.meshes.laid_out import LaidOut, LaidOutTensor
from mesh_tensorflow.meshes.store import StoredVariable
from mesh_tensorflow.program.graph import Operation


class LaidOutVariable:
  """A stored variable as one lowering sees it.

  Args:
    mesh_impl: the `MeshImpl`.
    stored: the `StoredVariable`.
    variable: the mtf `Variable` operation; None of one that no graph has (the run counter).
  """

  def __init__(self, mesh_impl: MeshContract, stored: StoredVariable, variable: Operation | None):
    self._mesh_impl = mesh_impl
    self._variable = variable
    self.stored = stored

  @property
  def slices(self) -> list[tf.Variable]:
    """The tf.Variables of the processors that this program runs."""
    return self._mesh_impl.program_slices(self.stored)

  @property
  def laid_out_tensor(self) -> LaidOutTensor:
    """The current values (slice dtype)."""
    values: LaidOutTensor = self._mesh_impl.slicewise(
      lambda v: v.read_value(), self._mesh_impl.LaidOutTensor(self.slices)
    )
    return values

  def assign_to_slices(self, assign_fn: Callable[..., Any], values: LaidOut) -> list[Any]:
    """Runs `assign_fn(mtf_variable, slice_tf_variable, tf_value)` on every slice.

    Args:
      assign_fn: as `mtf.assign_slice`.
      values: a laid-out tensor.

    Returns:
      A list of what `assign_fn` returned.
    """
    results: list[Any] = []
    self._is_changed()

    def run(v: tf.Variable, value: tf.Tensor) -> tf.Tensor:
      results.append(assign_fn(self._variable, v, value))
      return value

    self._mesh_impl.slicewise(run, self._mesh_impl.LaidOutTensor(self.slices), values)
    return results

  def update(self, fn: Callable[..., Any], *values: Any) -> None:
    """Runs `fn(slice_tf_variable, *slices)` for its effect on every processor."""
    self._is_changed()

    def run(v: tf.Variable, *slices: tf.Tensor) -> int:
      fn(v, *slices)
      # `slicewise` wants a result of each slice.
      return 0

    self._mesh_impl.slicewise(run, self._mesh_impl.LaidOutTensor(self.slices), *values)

  def _is_changed(self) -> None:
    life = self._mesh_impl.variable_store.life
    if life is not None:
      life.changed(self.stored)
