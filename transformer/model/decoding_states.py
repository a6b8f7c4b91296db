"""Operations on the states that layers keep while decoding one position at a time."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.slices import align, transpose_to
from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.program.dimensions import list_product
from mesh_tensorflow.program.graph import Operation


def overwrite(old: mtf.Tensor, new: mtf.Tensor, here: mtf.Tensor) -> mtf.Tensor:
  """`old`, with `new` where `here` is true.

  Args:
    old: a tensor.
    new: some of its dims.
    here: bool, some of its dims.

  Returns:
    A tensor of the dims of `old`.
  """
  dims, new_dims, here_dims = old.shape.dims, new.shape.dims, here.shape.dims

  def select(old: tf.Tensor, new: tf.Tensor, here: tf.Tensor) -> tf.Tensor:
    return kernels.where(align(here, here_dims, dims), align(new, new_dims, dims), old)

  result: mtf.Tensor = mtf.slicewise(
    select, [old, new, here], splittable_dims=dims, grad_function=0, name="replace"
  )
  return result


class WriteAtOperation(Operation):
  """One position of a state, overwritten; see `write_at`."""

  lowers_uneven_slices = True

  def __init__(self, old: mtf.Tensor, new: mtf.Tensor, position: mtf.Tensor, dim: mtf.Dimension):
    super().__init__([old, new, position], name="write_at")
    if dim not in old.shape or set(new.shape) != set(old.shape - dim):
      raise errors.ShapeError(
        f"{self.name}: {new} must have the dimensions of {old} without {dim.name}={dim.size}"
      )
    for d in position.shape:
      if d not in new.shape:
        raise errors.ShapeError(
          f"{self.name}: dimension {d.name}={d.size} of the position {position} is not among "
          f"those of {new}"
        )
    self._dim = dim
    self._outputs = [mtf.Tensor(self, old.shape, old.dtype)]
    self._initialize_all_dimensions_as_splittable()

  @property
  def has_gradient(self) -> bool:
    return False

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    old, new, position = self._inputs
    dims = old.shape.dims
    axis = dims.index(self._dim)
    # Rows of these dims have a position of their own.
    rows = dims[:axis] + [d for d in dims[axis + 1 :] if d in position.shape]
    columns = [d for d in dims[axis + 1 :] if d not in rows]
    order = [*rows, self._dim, *columns]
    size = impl.slice_shape(mtf.Shape([self._dim]))[0]
    row_sizes = impl.slice_shape(mtf.Shape(rows))
    count = list_product(row_sizes)

    def write(
      old_slice: tf.Tensor, new_slice: tf.Tensor, at: tf.Tensor, begin: int | tf.Tensor
    ) -> tf.Tensor:
      matrix = transpose_to(old_slice, dims, order)
      shape = matrix.shape
      # The positions of row i of the states begin at row i * size of the matrix.
      matrix = tf.reshape(matrix, [count * size, -1])
      values = tf.reshape(transpose_to(new_slice, new.shape.dims, rows + columns), [count, -1])
      if not isinstance(begin, int) or begin:
        at -= begin
      # Not found here (another processor has it, or it is beyond the end): the old values stay.
      here = tf.clip_by_value(at, 0, size - 1)
      found = align(tf.equal(here, at), position.shape.dims, rows)
      found = tf.reshape(kernels.broadcast_to(found, row_sizes), [count])
      first = tf.reshape(tf.range(count) * size, row_sizes)
      here = align(here, position.shape.dims, rows)
      index = tf.reshape(kernels.elementwise(tf.add, first, here), [count])
      matrix = kernels.overwrite_rows(matrix, index, values, found, impl.is_compiled_by_xla)
      return transpose_to(tf.reshape(matrix, shape), order, dims)

    begin = impl.laid_out_slice_begin(mtf.Shape([self._dim]))[0]
    inputs = [lowering.tensors[x] for x in self._inputs]
    lowering.set_tensor_lowering(self._outputs[0], impl.slicewise(write, *inputs, begin))


def write_at(
  old: mtf.Tensor, new: mtf.Tensor, position: mtf.Tensor, dim: mtf.Dimension
) -> mtf.Tensor:
  """`old`, with `new` at a position along a dimension; only that position is touched.

  Args:
    old: a tensor.
    new: its dims without `dim`, in any order.
    position: int32, some dims of `new`: each of their rows has its own position. Nothing is
      written where it is out of range.
    dim: a dimension of `old`.

  Returns:
    A tensor of the shape of `old`.

  Raises:
    ShapeError: the dims are others.
  """
  return WriteAtOperation(old, new, position, dim).outputs[0]


def in_reading_order(state: Any) -> Any:
  """Keys and values in the order in which attention reads them: as they are, once for each token.

  That of a tensor is `[..., memory_length, d_kv]`. Keys beside values, which no step changes, are
  `[..., d_kv, memory_length]`: batches of products with one query are faster so on CPUs.

  Args:
    state: what a layer keeps: a tensor, or a tuple of keys, values and other things.

  Returns:
    The same; in tensors the dimension `memory_length`, with that of beams that share a cache, is
    moved to the last place but one, or of the keys of a tuple to the last.
  """
  if isinstance(state, tuple):
    # Keys that are values too stay one tensor.
    ordered = {id(x): in_reading_order(x) for x in state if isinstance(x, mtf.Tensor)}
    parts: list[Any] = [ordered.get(id(x), x) for x in state]
    if len(ordered) > 1:
      *dims, memory, last = parts[0].shape.dims
      parts[0] = mtf.transpose(parts[0], mtf.Shape([*dims, last, memory]))
    return tuple(parts)
  if not isinstance(state, mtf.Tensor):
    return state
  *others, last = state.shape.dims
  memory = [d for d in others if d.name.startswith("memory_")]
  shape = mtf.Shape([*[d for d in others if d not in memory], *memory, last])
  return state if shape == state.shape else mtf.transpose(state, shape)
