"""The redistribution of slices that a reshape needs.

A mesh axis that splits a tensor axis stands at a *place*: the product of the sizes
before that axis (`cumprod`). The mesh coordinate is one digit of the element number, and
the place says which. As long as every mesh axis keeps its place, a local reshape of the
slices is all there is to do. Otherwise `redistribution.plan` says which collectives move
the fewest bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow.meshes.exchange import Exchange
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LaidOut, LazyAllreduceSum
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.redistribution import Move, Places, Plan, is_layout, plan
from mesh_tensorflow.numerics import constants
from mesh_tensorflow.program.dimensions import Shape, list_product


def plan_reshape(impl: MeshImpl, old: Shape, new: Shape) -> Plan:
  """The collectives that a reshape from `old` to `new` runs on a mesh.

  Args:
    impl: a `MeshImpl`.
    old: the shape before.
    new: a shape of the same number of elements.

  Returns:
    A `redistribution.Plan`. Without steps, nothing is needed but a reshape of the slices.
  """
  return plan(old.size, _mesh(impl), _places(impl, old), _places(impl, new))


def _mesh(impl: MeshImpl) -> tuple[int, ...]:
  return tuple(impl.shape.to_integer_list)


def _places(impl: MeshImpl, shape: Shape) -> Places:
  """The place of every mesh axis; None for an axis of size 1, which moves nothing."""
  places = impl.mesh_axis_to_cumprod(shape)
  return tuple(p if n > 1 else None for p, n in zip(places, _mesh(impl)))


def redistribute(
  lowering: LoweringInProgress,
  impl: MeshImpl,
  slices: LaidOut,
  old: Shape,
  new: Shape,
  used_elsewhere: Callable[[], bool] = lambda: True,
) -> Any:
  """Redistributes a tensor from the layout of `old` to that of `new`.

  Args:
    lowering: gets counters of what is moved.
    impl: the `MeshImpl`.
    slices: a laid-out tensor.
    old: its shape.
    new: a shape of the same number of elements.
    used_elsewhere: whether something else needs `slices`. If not, and they are a pending sum of
      which each processor needs a part, only this part is summed.

  Returns:
    A laid-out tensor (or a pending sum, if only a local reshape is needed).
  """
  shape = impl.slice_shape(new)
  mesh, source, target = _mesh(impl), _places(impl, old), _places(impl, new)
  if source != target and old.size:
    if isinstance(slices, LazyAllreduceSum) and not slices.is_reduced:
      scattered = _where_to_scatter(slices, old.size, mesh, source, target)
      if scattered != source and not used_elsewhere():
        slices = _scatter_sum(impl, slices, old.size, source, scattered)
        source = scattered
    for step in plan(old.size, mesh, source, target).steps:
      if isinstance(step, Exchange):
        slices = _exchange(lowering, impl, step, slices)
      elif isinstance(step, Move):
        slices = move(lowering, impl, step, slices)
  if slices.slice_shape == shape:
    return slices
  return impl.slicewise_delay_allreduce(lambda t: tf.reshape(t, constants.sizes(shape)), slices)


def _where_to_scatter(
  pending: LazyAllreduceSum, total: int, mesh: tuple[int, ...], source: Places, target: Places
) -> Places:
  """Chooses the places of the mesh axes after a pending sum, if it is reduce-scattered.

  An allreduce over n processors moves 2 (n - 1) / n of the slice, a reduce-scatter half of it.
  """
  # `reduce_scatter` takes numbers only.
  if pending.laid_out_input.one_slice.dtype == tf.bool:
    return source
  summed = [m for m in pending.mesh_axes if mesh[m] > 1]
  places = {1}
  for layout in (source, target):
    places |= {c for p, n in zip(layout, mesh) if p is not None for c in (p, p * n)}
  choices = [
    [p, *sorted(places)] if m in summed and p is None and target[m] is not None else [p]
    for m, p in enumerate(source)
  ]
  size = list_product(pending.slice_shape)

  def cost(start: Places) -> tuple[float, int]:
    scattered = [m for m in summed if start[m] is not None]
    parts = list_product(mesh[m] for m in scattered)
    others = list_product(mesh[m] for m in summed) // parts
    # A reduce-scatter along axes that get a place, then an allreduce of the part along the rest.
    received = size - size // parts + 2 * (size // parts) * (others - 1) / others
    following = plan(total, mesh, start, target)
    return received + following.received, len(scattered) + following.collectives

  return min((s for s in itertools.product(*choices) if is_layout(total, mesh, s)), key=cost)


def _scatter_sum(
  impl: MeshImpl, pending: LazyAllreduceSum, total: int, source: Places, target: Places
) -> Any:
  """Sums along the mesh axes that get a place; each processor gets its part."""
  slices = pending.laid_out_input
  axes = [m for m, p in enumerate(source) if p != target[m]]
  for m in axes:
    after = (*source[:m], target[m], *source[m + 1 :])
    # One mesh axis gets a place, and nothing else moves.
    (step,) = plan(total, _mesh(impl), source, after).steps
    assert isinstance(step, Move)
    if step.view is not None:
      slices = _viewed(impl, slices, step.view)
    slices = impl.reduce_scatter(slices, m, step.split_axes[0])
    source = after
  others = [m for m in pending.mesh_axes if m not in axes]
  if others:
    return LazyAllreduceSum(impl, slices, others, add_counter_fn=pending.add_counter_fn)
  if pending.add_counter_fn:
    pending.add_counter_fn()
  return slices


def _viewed(impl: MeshImpl, slices: LaidOut, shape: Sequence[int]) -> Any:
  """Reshapes the slices; executes a pending sum first."""
  shape = list(shape)
  slices = slices.to_laid_out_tensor()
  if slices.slice_shape == shape:
    return slices
  return impl.slicewise(lambda t: tf.reshape(t, constants.sizes(shape)), slices)


def _count(
  lowering: LoweringInProgress,
  impl: MeshImpl,
  kind: str,
  mesh_axes: Sequence[int],
  slices: LaidOut,
  what: str = "reshape_op",
) -> None:
  axes = mesh_axes[0] if len(mesh_axes) == 1 else list(mesh_axes)
  size = list_product(slices.slice_shape) * impl.size
  lowering.add_counter(f"{kind}/{axes}/{what}", size)


def move(
  lowering: LoweringInProgress,
  impl: MeshImpl,
  step: Move,
  slices: LaidOut,
  what: str = "reshape_op",
) -> Any:
  """Runs one step of a plan.

  Args:
    lowering: gets a counter of what is moved.
    impl: the `MeshImpl`.
    step: the step.
    slices: a laid-out tensor.
    what: for the counter.

  Returns:
    A laid-out tensor.
  """
  if step.view is not None:
    slices = _viewed(impl, slices, step.view)
  axes = step.mesh_axes
  if step.kind == "allsplit":
    return impl.allsplit(slices, axes[0], step.split_axes[0])
  if step.kind == "allconcat":
    slices = impl.allconcat(slices, axes[0], step.concat_axes[0])
  elif len(step.split_axes) == 1:
    over = axes[0] if len(axes) == 1 else axes
    slices = impl.alltoall(slices, over, step.split_axes[0], step.concat_axes[0])
  else:
    slices = _joint_alltoall(impl, step, step.view or (), slices)
  _count(lowering, impl, step.kind, axes, slices, what)
  return slices


def _joint_alltoall(impl: MeshImpl, step: Move, view: tuple[int, ...], slices: LaidOut) -> Any:
  """An alltoall in the product of mesh axes: their digits pass through the first tensor axis."""
  sizes = [impl.shape[m].size for m in step.mesh_axes]
  rest = [i for i in range(len(view)) if i not in step.split_axes]
  parts = [*step.split_axes, *rest]
  here = [view[i] for i in rest]
  slices = impl.slicewise(
    lambda t: tf.reshape(_transpose(t, view, parts), [list_product(sizes), *here]), slices
  )
  slices = impl.alltoall(slices, step.mesh_axes, 0, 0)
  # The received parts come in the order of their senders' coordinates. Their digits have width 1
  # in the view, and now get their own.
  joined = [*sizes, *here]
  joined_axes = [*step.concat_axes, *rest]
  places = [
    [k for k, axis in enumerate(joined_axes) if axis == i and (k < len(sizes) or joined[k] > 1)]
    for i in range(len(view))
  ]
  return impl.slicewise(lambda t: _transpose(t, joined, [k for ks in places for k in ks]), slices)


def _exchange(lowering: LoweringInProgress, impl: MeshImpl, step: Exchange, slices: LaidOut) -> Any:
  """Rounds of permutations of units of the slices."""
  rest = [i for i in range(len(step.view)) if i not in step.unit_axes]
  # The units become rows: a round sends one row, or several.
  units_first = [*step.unit_axes, *rest]
  here = [step.view[i] for i in rest]
  n_held = list_product(step.view[i] for i in step.unit_axes)
  n_wanted = list_product(step.new_view[i] for i in step.unit_axes)
  if n_held > 1:
    slices = impl.slicewise(
      lambda t: tf.reshape(_transpose(t, step.view, units_first), [n_held, *here]),
      slices,
    )
  elif n_wanted > 1:
    slices = _viewed(impl, slices, [1, *here])
  axes = step.mesh_axes
  brought = []
  for r in step.all_rounds:
    units = slices
    if n_held > 1:
      units = impl.slicewise(_take, slices, impl.laid_out_entry(axes, r.pick))
    if not r.is_local:
      units = impl.receive(units, axes[0] if len(axes) == 1 else axes, r.source)
      _count(lowering, impl, "permute", axes, units)
    brought.append(units)
  if n_wanted == 1:
    return brought[0]
  new_view = [step.new_view[i] for i in units_first]
  back = np.argsort(units_first).tolist()

  def join(order: Sequence[int] | tf.Tensor, *parts: tf.Tensor) -> tf.Tensor:
    t = parts[0] if len(parts) == 1 else tf.concat(parts, 0)
    return _transpose(_take(t, order), new_view, back)

  return impl.slicewise(join, impl.laid_out_entry(axes, step.order), *brought)


def _take(t: tf.Tensor, rows: Sequence[int] | tf.Tensor) -> tf.Tensor:
  """Rows of t; a slice if they are consecutive."""
  if not tf.is_tensor(rows):
    first, n = rows[0], len(rows)
    if rows == list(range(first, first + n)):
      return t if n == t.shape[0] else t[first : first + n]
  return tf.gather(t, rows)


def _transpose(t: tf.Tensor, shape: Sequence[int], permutation: Sequence[int]) -> tf.Tensor:
  """`t`, seen as `shape`, with its axes in another order; axes of size 1 are left out."""
  wide = [i for i, n in enumerate(shape) if n > 1]
  order = [wide.index(i) for i in permutation if i in wide]
  if order == sorted(order):
    return t
  return tf.transpose(tf.reshape(t, [shape[i] for i in wide]), order)
