"""Reshape, and the redistribution of slices that it needs.

A tensor axis split over a mesh axis is a *position*: the product of the sizes
before it (`cumprod`). The mesh coordinate is one digit of the element number, and
the position says which. As long as a mesh axis keeps its position, a local reshape
of the slices is all there is to do. A mesh axis that gets a position needs a local
split, one that loses it an allconcat, and one that moves an alltoall.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from mesh_tensorflow.dimensions import (
  Dimension,
  Shape,
  ShapeLike,
  anonymous_shape,
  convert_to_dimension,
  convert_to_shape,
)
from mesh_tensorflow.errors import DimensionError, ShapeError
from mesh_tensorflow.graph import Operation, Tensor


class ReshapeOperation(Operation):
  """Row-major reinterpretation of a tensor; its layout changes with its names."""

  def __init__(self, x: Tensor, new_shape: Shape, name: str | None = None):
    super().__init__([x], name=name or "reshape")
    if x.shape.size != new_shape.size:
      raise ShapeError(
        f"{self.name}: {x} has {x.shape.size} elements, the new shape {new_shape} has "
        f"{new_shape.size}"
      )
    self._outputs = [Tensor(self, new_shape, x.dtype)]
    self._initialize_all_dimensions_as_splittable()

  def gradient(self, grad_ys):
    return [reshape(grad_ys[0], self.inputs[0].shape)]

  def lower(self, lowering):
    impl = lowering.mesh_impl(self)
    x, out = self.inputs[0], self.outputs[0]
    lowering.set_tensor_lowering(
      out, redistribute(lowering, impl, lowering.tensors[x], x.shape, out.shape)
    )


def redistribute(lowering: Any, impl: Any, slices: Any, old: Shape, new: Shape) -> Any:
  """Slices of the same elements, laid out as `old`, turned into those laid out as `new`.

  Args:
    lowering: gets counters of what is moved.
    impl: the `MeshImpl`.
    slices: a laid-out tensor.
    old: its shape.
    new: a shape of the same number of elements.

  Returns:
    A laid-out tensor (or a pending sum, if only a local reshape is needed).
  """
  return _Redistribution(lowering, impl, slices, old, new).run()


class _Redistribution:
  """Moves mesh axes one at a time from their old positions to the new ones.

  `self.sizes` are axes into which the whole tensor is cut: those of the old shape,
  refined by the cuts of the new one where they fit together, so that a move can name
  the axes it splits and joins. `self.at[m]` is the axis that mesh axis m splits.
  """

  def __init__(self, lowering, impl, slices, old, new):
    self.lowering, self.impl, self.slices = lowering, impl, slices
    self.old, self.new = old, new
    sizes = impl.shape.to_integer_list
    self.n = sizes
    # A mesh axis of size 1 moves nothing.
    self.source = [p if n > 1 else None for p, n in zip(impl.mesh_axis_to_cumprod(old), sizes)]
    self.target = [p if n > 1 else None for p, n in zip(impl.mesh_axis_to_cumprod(new), sizes)]

  def run(self):
    if self.source == self.target:
      return self._reshape_only()
    self.slices = self.slices.to_laid_out_tensor()
    self.cuts = _common_cuts(self.old, self.new)
    if self.cuts is not None and self._cuts_are_split_alone():
      return self._move_on_common_axes()
    return self._gather_and_split()

  def _cuts_are_split_alone(self):
    """Whether no mesh axis splits a dimension across a cut of the other shape."""
    width = dict(zip(self.cuts, (b // a for a, b in zip(self.cuts, self.cuts[1:]))))
    return all(
      width[p] % n == 0
      for places in (self.source, self.target)
      for p, n in zip(places, self.n)
      if p is not None
    )

  def _reshape_only(self):
    shape = self.impl.slice_shape(self.new)
    if self.slices.slice_shape == shape:
      return self.slices
    return self.impl.slicewise_delay_allreduce(lambda t: tf.reshape(t, shape), self.slices)

  def _move_on_common_axes(self):
    """All cuts of both shapes are axes: every move is one collective."""
    axis_of = {p: i for i, p in enumerate(self.cuts[:-1])}
    widths = [b // a for a, b in zip(self.cuts, self.cuts[1:])]
    current = list(self.source)
    local = self._local(widths, axis_of, current)
    self._to(local)
    while current != self.target:
      m, kind = self._next_move(current, widths, axis_of)
      here, there = current[m], self.target[m]
      if kind == "split":
        self.slices = self.impl.allsplit(self.slices, m, axis_of[there])
        current[m] = there
      elif kind == "alltoall":
        self._count("alltoall", m)
        self.slices = self.impl.alltoall(self.slices, m, axis_of[there], axis_of[here])
        current[m] = there
      else:
        self.slices = self.impl.allconcat(self.slices, m, axis_of[here])
        self._count("allconcat", m)
        current[m] = None
    self._to(self.impl.slice_shape(self.new))
    return self.slices

  def _next_move(self, current, widths, axis_of) -> tuple[int, str]:
    """The next collective: what shrinks the slices first, what grows them last."""
    free = lambda p: p not in current  # noqa: E731
    divides = lambda m, p: widths[axis_of[p]] % self.n[m] == 0  # noqa: E731
    moves = [m for m in range(len(current)) if current[m] != self.target[m]]
    for m in moves:
      if current[m] is None and free(self.target[m]) and divides(m, self.target[m]):
        return m, "split"
    for m in moves:
      there = self.target[m]
      if None not in (current[m], there) and free(there) and divides(m, there):
        return m, "alltoall"
    for m in moves:
      if current[m] is not None and self.target[m] is None:
        return m, "concat"
    # Only moves whose place is taken are left (mesh axes that trade places).
    return next(m for m in moves if current[m] is not None), "concat"

  def _local(self, widths, axis_of, current) -> list[int]:
    local = list(widths)
    for m, p in enumerate(current):
      if p is not None:
        local[axis_of[p]] //= self.n[m]
    return local

  def _gather_and_split(self):
    """The cuts do not fit together: gathers on the old axes, splits on the new ones."""
    current = list(self.source)
    for m, p in enumerate(self.source):
      if p is not None and p != self.target[m]:
        self.slices = self.impl.allconcat(self.slices, m, self.old.cumprod_to_tensor_axis(p))
        self._count("allconcat", m)
        current[m] = None
    local = self.new.to_integer_list
    for m, p in enumerate(current):
      if p is not None:
        local[self.new.cumprod_to_tensor_axis(p)] //= self.n[m]
    self._to(local)
    for m, p in enumerate(self.target):
      if p is not None and current[m] is None:
        self.slices = self.impl.allsplit(self.slices, m, self.new.cumprod_to_tensor_axis(p))
    return self.slices

  def _to(self, shape: list[int]) -> None:
    if self.slices.slice_shape != list(shape):
      self.slices = self.impl.slicewise(lambda t: tf.reshape(t, shape), self.slices)

  def _count(self, kind: str, mesh_axis: int) -> None:
    size = 1
    for s in self.slices.slice_shape:
      size *= s
    self.lowering.add_counter(f"{kind}/{mesh_axis}/reshape_op", size * self.impl.size)


def _common_cuts(old: Shape, new: Shape) -> list[int] | None:
  """The positions of both shapes in order, with the total size; None if they cross."""
  cuts = sorted(set(old.cumprod) | set(new.cumprod) | {1, old.size})
  if any(b % a for a, b in zip(cuts, cuts[1:])):
    return None
  return cuts


def reshape(x: Tensor, new_shape: ShapeLike, name: str = "reshape") -> Tensor:
  """Row-major reinterpretation of x; changes the layout if the names say so.

  Args:
    x: a `Tensor`.
    new_shape: a shape of the same number of elements.
    name: of the operation.

  Raises:
    ShapeError: the number of elements differs.
  """
  return ReshapeOperation(x, convert_to_shape(new_shape), name=name).outputs[0]


def rename_dimension(x: Tensor, old_name: str, new_name: str) -> Tensor:
  """X with a dimension renamed, and laid out as the new name says."""
  return reshape(x, x.shape.rename_dimension(old_name, new_name))


def replace_dimensions(
  tensor_or_shape: Tensor | Shape,
  old_dim_or_dims: Dimension | list[Dimension],
  new_dim_or_dims: Dimension | list[Dimension],
) -> Tensor | Shape:
  """Replaces consecutive dimensions by others of the same product.

  Args:
    tensor_or_shape: a `Tensor` (which is reshaped) or a `Shape`.
    old_dim_or_dims: a dimension, or a list of consecutive ones.
    new_dim_or_dims: a dimension, or a list of them.

  Raises:
    DimensionError: the old dimensions do not stand one after the other in the shape.
  """
  if isinstance(tensor_or_shape, Tensor):
    return reshape(
      tensor_or_shape, replace_dimensions(tensor_or_shape.shape, old_dim_or_dims, new_dim_or_dims)
    )
  if not isinstance(tensor_or_shape, Shape):
    raise DimensionError(
      f"replace_dimensions takes a Tensor or a Shape, got {type(tensor_or_shape).__name__}"
    )
  old, new = _dims(old_dim_or_dims), _dims(new_dim_or_dims)
  dims = tensor_or_shape.dims
  if not old or not new:
    raise DimensionError("replace_dimensions needs at least one old and one new dimension")
  if old[0] not in dims or dims[dims.index(old[0]) :][: len(old)] != old:
    raise DimensionError(f"replace_dimensions: {old} do not stand together in {tensor_or_shape}")
  i = dims.index(old[0])
  return Shape(dims[:i] + new + dims[i + len(old) :])


def _dims(x: Any) -> list[Dimension]:
  if isinstance(x, Dimension):
    return [x]
  if isinstance(x, (list, tuple)) and all(not isinstance(d, (str, int)) for d in x):
    return [convert_to_dimension(d) for d in x]
  return [convert_to_dimension(x)]


def anonymize(x: Tensor) -> Tensor:
  """X with anonymous dimensions, so that no layout splits it."""
  return reshape(x, anonymous_shape(x.shape))
