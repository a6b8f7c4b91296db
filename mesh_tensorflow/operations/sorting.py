"""Sorting along a dimension, whole or split."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LaidOut
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.redistribution import Plan, Step
from mesh_tensorflow.operations.whole_dimensions import along_last, plan_along, run_plan
from mesh_tensorflow.program.argument_kinds import RealTensor
from mesh_tensorflow.program.dimensions import (
  Dimension,
  DimensionLike,
  convert_to_dimension,
  no_such_dimension,
)
from mesh_tensorflow.program.graph import Operation, Tensor

__all__ = ["argsort", "sort"]


class _AlongOperation(Operation):
  """Base class: a function along one dimension, which comes together where it is split."""

  # Its plan may use mesh axes that split none of it.
  exchanges_over_whole_mesh = True

  _dim: Dimension
  _axis: int

  def _set_dim(self, x: Tensor, dim: DimensionLike) -> None:
    self._dim = convert_to_dimension(dim)
    if self._dim not in x.shape:
      raise no_such_dimension(self.name, self._dim, x)
    self._axis = x.shape.dims.index(self._dim)

  def _plan(self, impl: MeshImpl, y: Tensor, bytes_before: int, bytes_after: int) -> Plan:
    """Plans how the dimension is gathered and split again; the layout is that of y."""
    return plan_along(
      impl,
      y.shape,
      y.shape,
      [self._axis],
      first=self._axis,
      weight_before=bytes_before,
      weight_after=bytes_after,
    )

  def _lower_along(
    self, lowering: LoweringInProgress, fn: Callable[[tf.Tensor], tf.Tensor], x: Tensor, y: Tensor
  ) -> None:
    """Lowers a function of x along the last axis of its slices."""
    impl = lowering.mesh_impl(self)
    steps = self._plan(impl, y, x.dtype.size, y.dtype.size).steps
    apply = functools.partial(along_last, fn)
    slices = run_plan(lowering, impl, lowering.tensors[x], steps, apply, "sort_op")
    lowering.set_tensor_lowering(y, slices)

  def _ways(
    self, impl: MeshImpl, y: Tensor, bytes_before: int, bytes_after: int
  ) -> tuple[Sequence[Step], Sequence[Step]]:
    """Steps that gather the dimension, and those that split the result again."""
    steps = self._plan(impl, y, bytes_before, bytes_after).steps
    (apply,) = (i for i, step in enumerate(steps) if step.kind == "apply")
    return steps[:apply], steps[apply + 1 :]

  def _run(self, lowering: LoweringInProgress, slices: LaidOut, steps: Sequence[Step]) -> Any:
    impl = lowering.mesh_impl(self)
    return run_plan(lowering, impl, slices, steps, lambda t, axis: t, "sort_op")


class ArgsortOperation(_AlongOperation):
  """Positions in the order of their values; see `argsort`."""

  def __init__(
    self, x: RealTensor, dim: DimensionLike, descending: bool = False, name: str | None = None
  ):
    super().__init__([x], name=name or "argsort")
    self._set_dim(x, dim)
    self._direction = "DESCENDING" if descending else "ASCENDING"
    self._outputs = [Tensor(self, x.shape, tf.int32)]
    self._outputs[0].index_bound = self._dim.size
    self._initialize_all_dimensions_as_splittable()

  def lower(self, lowering: LoweringInProgress) -> None:
    x, y = self._inputs[0], self._outputs[0]

    def positions(t: tf.Tensor) -> tf.Tensor:
      return tf.argsort(t, axis=-1, direction=self._direction, stable=True)

    self._lower_along(lowering, positions, x, y)


class SortOperation(_AlongOperation):
  """The values in order along a dimension; see `sort`."""

  def __init__(
    self, x: RealTensor, dim: DimensionLike, descending: bool = False, name: str | None = None
  ):
    super().__init__([x], name=name or "sort")
    self._set_dim(x, dim)
    self._descending = descending
    self._outputs = [Tensor(self, x.shape, x.dtype)]
    self._initialize_all_dimensions_as_splittable()

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    # Where the values came from is computed here, not there: a sort without a gradient, the usual
    # one, sends only values.
    order = ArgsortOperation(self._inputs[0], self._dim, self._descending).outputs[0]
    return PermuteOperation(grad_ys[0], order, self._dim, inverse=True).outputs

  def lower(self, lowering: LoweringInProgress) -> None:
    x, y = self._inputs[0], self._outputs[0]
    direction = "DESCENDING" if self._descending else "ASCENDING"

    def sort(t: tf.Tensor) -> tf.Tensor:
      return tf.sort(t, axis=-1, direction=direction)

    self._lower_along(lowering, sort, x, y)


class PermuteOperation(_AlongOperation):
  """y[i] = x[order[i]] along a dimension, or y[order[i]] = x[i].

  Args:
    x: a `Tensor`.
    order: int32 of its shape: a permutation along the dimension.
    dim: the dimension.
    inverse: whether elements are put at the positions, not taken from them.
    name: of the operation.
  """

  def __init__(
    self,
    x: Tensor,
    order: Tensor,
    dim: DimensionLike,
    inverse: bool = False,
    name: str | None = None,
  ):
    super().__init__([x, order], name=name or "permute")
    self._set_dim(x, dim)
    self._inverse = inverse
    self._outputs = [Tensor(self, x.shape, x.dtype)]
    self._initialize_all_dimensions_as_splittable()

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    dx = PermuteOperation(grad_ys[0], self._inputs[1], self._dim, not self._inverse)
    return [dx.outputs[0], None]

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    (x, order), y = self._inputs, self._outputs[0]
    rank = x.shape.ndims
    last = [i for i in range(rank) if i != self._axis] + [self._axis]

    def permute(t: tf.Tensor, at: tf.Tensor) -> tf.Tensor:
      t, at = tf.transpose(t, last), tf.transpose(at, last)
      if self._inverse:
        # The positions of a permutation in order are its inverse.
        at = tf.argsort(at, axis=-1)
      moved = tf.gather(t, at, axis=-1, batch_dims=rank - 1)
      return tf.transpose(moved, [last.index(i) for i in range(rank)])

    there, back = self._ways(impl, y, x.dtype.size + order.dtype.size, y.dtype.size)
    together = [self._run(lowering, lowering.tensors[v], there) for v in self._inputs]
    slices = impl.slicewise(permute, *together)
    lowering.set_tensor_lowering(y, self._run(lowering, slices, back))


def argsort(
  x: RealTensor, dim: DimensionLike, descending: bool = False, name: str = "argsort"
) -> Tensor:
  """The positions along a dimension in the order of their values, as `tf.argsort`; no gradient.

  Equal values keep their order. A split dimension comes together for it: by an exchange for another
  dimension where there is one to split, else by gathering.

  Args:
    x: a real `Tensor`.
    dim: a dimension of it.
    descending: the largest first.
    name: of the operation.

  Returns:
    An int32 `Tensor` of the shape of x.

  Raises:
    DimensionError: x has no such dimension.
  """
  return ArgsortOperation(x, dim, descending, name).outputs[0]


def sort(x: RealTensor, dim: DimensionLike, descending: bool = False, name: str = "sort") -> Tensor:
  """The values in order along a dimension, as `tf.sort`.

  The gradient goes back to where each value came from. As in TensorFlow, NaN is in no order with
  numbers, so a tensor with one comes out in none. Arguments as `argsort`.
  """
  return SortOperation(x, dim, descending, name).outputs[0]
