"""Reshape, and its uses: renaming, replacing and anonymous dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import tensorflow as tf

from mesh_tensorflow.errors import DimensionError, ShapeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LaidOut
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.numerics import kernels, padding
from mesh_tensorflow.operations.constants import import_tf_tensor
from mesh_tensorflow.operations.redistribute import redistribute
from mesh_tensorflow.program.dimensions import (
  Dimension,
  DimensionLike,
  Shape,
  ShapeLike,
  anonymous_shape,
  convert_to_dimension,
  convert_to_shape,
  no_such_dimension,
)
from mesh_tensorflow.program.graph import Mesh, Operation, Tensor

__all__ = [
  "ReshapeOperation",
  "anonymize",
  "import_fully_replicated",
  "rename_dimension",
  "replace_dimensions",
  "reshape",
]


class ReshapeOperation(Operation):
  """Row-major reinterpretation of a tensor; its layout changes with its names.

  Args:
    x: a `Tensor`.
    new_shape: a `Shape` of the size of x.
    name: of the operation.
  """

  def __init__(self, x: Tensor, new_shape: Shape, name: str | None = None):
    super().__init__([x], name=name or "reshape")
    if x.shape.size != new_shape.size:
      raise ShapeError(
        f"{self.name}: {x} has {x.shape.size} elements, the new shape {new_shape} has "
        f"{new_shape.size}"
      )
    self._outputs = [Tensor(self, new_shape, x.dtype)]
    self._initialize_all_dimensions_as_splittable()

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    return [reshape(grad_ys[0], self.inputs[0].shape)]

  def suits_uneven_slices(self, mesh_impl: MeshImpl) -> bool:
    return padded_shapes(mesh_impl, self._inputs[0].shape, self._outputs[0].shape) is not None

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    x, out = self.inputs[0], self.outputs[0]
    slices = lowering.tensors[x]
    old, new = padded_shapes(impl, x.shape, out.shape) or (x.shape, out.shape)
    slices = _resized(impl, slices, impl.slice_shape(old))

    # Asked for only where it matters: it goes through the whole graph.
    def used_elsewhere() -> bool:
      operations = lowering.graph.operations
      return any(y is x for op in operations if op is not self for y in op.inputs)

    laid_out = redistribute(lowering, impl, slices, old, new, used_elsewhere)
    lowering.set_tensor_lowering(out, _resized(impl, laid_out, impl.slice_shape(out.shape)))


def padded_shapes(impl: MeshImpl, old: Shape, new: Shape) -> tuple[Shape, Shape] | None:
  """The shapes of a reshape whose uneven dimensions are made larger, so that all splits are even.

  That is right where a dimension that is split unevenly before or after the reshape is one
  dimension both before and after it.

  Args:
    impl: a `MeshImpl`.
    old: the shape before.
    new: the shape after.

  Returns:
    The shapes; None if it is not so.
  """
  sizes = [shape.to_integer_list for shape in (old, new)]
  for number, (own, other) in enumerate(((old, new), (new, old))):
    for i in impl.uneven_axes(own):
      alike = [
        j
        for j, d in enumerate(other)
        if d.size == own[i].size and other.cumprod[j] == own.cumprod[i]
      ]
      alike.sort(key=lambda j: other[j].name != own[i].name)  # There are several of size 1.
      if not alike:
        return None
      j = alike[0]
      axis = impl.tensor_dimension_to_mesh_axis(own[i])
      assert axis is not None
      if impl.tensor_dimension_to_mesh_axis(other[j]) not in (None, axis):
        return None
      padded = impl.slice_shape([own[i]])[0] * impl.shape[axis].size
      sizes[number][i] = sizes[1 - number][j] = padded
  resized = [
    [Dimension(d.name, n) for d, n in zip(shape, of_shape)]
    for shape, of_shape in zip((old, new), sizes)
  ]
  if any(len(set(dims)) != len(dims) for dims in resized):
    return None
  return Shape(resized[0]), Shape(resized[1])


def _resized(impl: MeshImpl, slices: LaidOut, sizes: Sequence[int]) -> LaidOut:
  """Slices with padding behind them, or cut."""
  if slices.slice_shape == list(sizes):
    return slices

  def resize(t: tf.Tensor) -> tf.Tensor:
    for axis, n in enumerate(sizes):
      if t.shape[axis] < n:
        t = padding.padded(t, axis, n)
      elif t.shape[axis] > n:
        t = kernels.cut_axis(t, axis, 0, n)
    return t

  resized: LaidOut = impl.slicewise_delay_allreduce(resize, slices)
  return resized


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
  """A tensor with a dimension renamed, laid out as the new name says.

  Args:
    x: a `Tensor`.
    old_name: name of a dimension of x.
    new_name: its new name.

  Raises:
    DimensionError: x has no dimension of the old name.
  """
  if old_name not in x.shape.dimension_names:
    raise no_such_dimension("rename_dimension", old_name, x)
  return reshape(x, x.shape.rename_dimension(old_name, new_name))


@overload
def replace_dimensions(
  tensor_or_shape: Tensor,
  old_dim_or_dims: DimensionLike | Sequence[DimensionLike],
  new_dim_or_dims: DimensionLike | Sequence[DimensionLike],
) -> Tensor: ...
@overload
def replace_dimensions(
  tensor_or_shape: Shape,
  old_dim_or_dims: DimensionLike | Sequence[DimensionLike],
  new_dim_or_dims: DimensionLike | Sequence[DimensionLike],
) -> Shape: ...


def replace_dimensions(
  tensor_or_shape: Tensor | Shape,
  old_dim_or_dims: DimensionLike | Sequence[DimensionLike],
  new_dim_or_dims: DimensionLike | Sequence[DimensionLike],
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
    dims = tensor_or_shape.shape.dims
  elif isinstance(tensor_or_shape, Shape):
    dims = tensor_or_shape.dims
  else:
    raise DimensionError(
      f"replace_dimensions takes a Tensor or a Shape, got {type(tensor_or_shape).__name__}"
    )
  old, new = _dims(old_dim_or_dims), _dims(new_dim_or_dims)
  if not old or not new:
    raise DimensionError(
      f"replace_dimensions of {tensor_or_shape} needs at least one old and one new dimension, got "
      f"{old} and {new}"
    )
  for d in old:
    if d not in dims:
      raise no_such_dimension("replace_dimensions", d, tensor_or_shape)
  i = dims.index(old[0])
  if dims[i : i + len(old)] != old:
    raise DimensionError(
      f"replace_dimensions: {Shape(old)} do not stand together, in this order, in "
      f"{tensor_or_shape}; transpose it first (mtf.transpose)"
    )
  replaced = Shape(dims[:i] + new + dims[i + len(old) :])
  return reshape(tensor_or_shape, replaced) if isinstance(tensor_or_shape, Tensor) else replaced


def _dims(x: Any) -> list[Dimension]:
  """The dimensions of a list of them, or of one; a pair (name, size) is one."""
  several = isinstance(x, (list, tuple)) and all(not isinstance(d, (str, int)) for d in x)
  given: Sequence[DimensionLike] = x if several else [x]
  return [convert_to_dimension(d) for d in given]


def anonymize(x: Tensor) -> Tensor:
  """A tensor of anonymous dimensions, so that no layout splits it.

  Args:
    x: a `Tensor`.
  """
  return reshape(x, anonymous_shape(x.shape))


def import_fully_replicated(
  mesh: Mesh, tf_tensor: object, shape: ShapeLike, name: str | None = None
) -> Tensor:
  """Brings in a tf.Tensor that every processor has whole; slices are cut locally.

  Args:
    mesh: a `Mesh`.
    tf_tensor: a tf.Tensor or array.
    shape: its dimensions.
    name: of the operation.
  """
  shape = convert_to_shape(shape)
  whole = import_tf_tensor(mesh, tf_tensor, anonymous_shape(shape), name=name)
  return reshape(whole, shape)
