"""Operations along dimensions that the mesh may split: each is brought together for its turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LaidOut
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.redistribution import Apply, Holds, Move, Plan, Step, Task
from mesh_tensorflow.meshes.redistribution import plan_along as plan_of
from mesh_tensorflow.operations.redistribute import move
from mesh_tensorflow.program.dimensions import Shape


def holds_of(impl: MeshImpl, shape: Shape) -> Holds:
  """For each dimension the mesh axes that split it: none, or one of more than one processor.

  Args:
    impl: a `MeshImpl`.
    shape: a `Shape`.
  """
  axes = [impl.tensor_dimension_to_mesh_axis(d) for d in shape]
  return tuple((m,) if m is not None and impl.shape[m].size > 1 else () for m in axes)


def plan_along(
  impl: MeshImpl,
  before: Shape,
  after: Shape,
  along: Sequence[int],
  *,
  sizes_before: Sequence[int] | None = None,
  sizes_after: Sequence[int] | None = None,
  first: int | None = None,
  last: int | None = None,
  weight_before: int = 1,
  weight_after: int = 1,
) -> Plan:
  """Plans the cheapest redistributions for an operation along some dimensions, one by one.

  Args:
    impl: a `MeshImpl`.
    before: the shape of the input, which says its layout.
    after: the shape of the output.
    along: numbers of the dimensions.
    sizes_before: padded sizes before the operation; by default those of `before`.
    sizes_after: padded sizes after it; by default those of `after`.
    first: number of the dimension that must come first, or None.
    last: number of the dimension that must come last, or None.
    weight_before: bytes of an element before the operation along `first` or `last`.
    weight_after: bytes of an element after it; of all, if neither is given.
  """
  return plan_of(
    Task(
      before=tuple(before.to_integer_list if sizes_before is None else sizes_before),
      after=tuple(after.to_integer_list if sizes_after is None else sizes_after),
      mesh=tuple(impl.shape.to_integer_list),
      source=holds_of(impl, before),
      target=holds_of(impl, after),
      along=tuple(along),
      first=first,
      last=last,
      weight_before=weight_before,
      weight_after=weight_after,
    )
  )


def run_plan(
  lowering: LoweringInProgress,
  impl: MeshImpl,
  slices: LaidOut,
  steps: Sequence[Step],
  apply: Callable[[tf.Tensor, int], tf.Tensor],
  what: str,
) -> Any:
  """Runs the steps of a plan.

  Args:
    lowering: gets counters of what is moved.
    impl: the `MeshImpl`.
    slices: a laid-out tensor.
    steps: steps of a `Plan`.
    apply: the operation along a tensor axis, of a slice.
    what: for the counters.

  Returns:
    A laid-out tensor.
  """
  slices = slices.to_laid_out_tensor()
  for step in steps:
    if isinstance(step, Apply):
      slices = impl.slicewise(lambda t, axis=step.axis: apply(t, axis), slices)
    elif isinstance(step, Move):
      slices = move(lowering, impl, step, slices, what)
  return slices


def along_last(fn: Callable[[tf.Tensor], tf.Tensor], t: tf.Tensor, axis: int) -> tf.Tensor:
  """A function along the last axis, run along any axis.

  Args:
    fn: keeps the number of axes, and all sizes but that of the last.
    t: a slice.
    axis: number of the axis.
  """
  rank = t.shape.rank
  if axis == rank - 1:
    return fn(t)
  order = [i for i in range(rank) if i != axis] + [axis]
  return tf.transpose(fn(tf.transpose(t, order)), [order.index(i) for i in range(rank)])
