"""One-hot: an index as the position of a value along a new dimension."""

from __future__ import annotations

import tensorflow as tf

from mesh_tensorflow.arguments.kinds import DTypeLike, Scalar
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.operations.indexing import as_index, begin_of, check_integer
from mesh_tensorflow.program.dimensions import DimensionLike, Shape, convert_to_dimension
from mesh_tensorflow.program.graph import Operation, Tensor

__all__ = ["OneHotOperation", "one_hot"]


class OneHotOperation(Operation):
  """`on_value` where a new dimension's position is the index; see `one_hot`."""

  lowers_uneven_slices = True

  def __init__(
    self,
    indices: Tensor,
    output_dim: DimensionLike,
    on_value: Scalar,
    off_value: Scalar,
    dtype: DTypeLike,
    name: str | None = None,
  ):
    super().__init__([indices], name=name or "one_hot")
    check_integer(self, indices)
    self._dim = convert_to_dimension(output_dim)
    self._on_value, self._off_value = on_value, off_value
    shape = Shape(indices.shape.dims + [self._dim])
    self._outputs = [Tensor(self, shape, tf.as_dtype(dtype))]
    self._initialize_all_dimensions_as_splittable()

  @property
  def has_gradient(self) -> bool:
    return False

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    out = self._outputs[0]
    depth = impl.slice_shape(Shape([self._dim]))[0]
    on_value = tf.cast(self._on_value, out.dtype)
    off_value = tf.cast(self._off_value, out.dtype)

    def encode(t: tf.Tensor, begin: int | tf.Tensor) -> tf.Tensor:
      t = as_index(t)
      if not isinstance(begin, int) or begin:
        # An index of another processor's block is out of range then: tf.one_hot gives off_value.
        t = t - tf.cast(begin, t.dtype)
      return tf.one_hot(t, depth, on_value, off_value, dtype=out.dtype)

    indices = lowering.tensors[self._inputs[0]]
    lowering.set_tensor_lowering(out, impl.slicewise(encode, indices, begin_of(impl, self._dim)))


def one_hot(
  indices: Tensor,
  output_dim: DimensionLike,
  on_value: Scalar = 1.0,
  off_value: Scalar = 0.0,
  dtype: DTypeLike = tf.float32,
  name: str | None = None,
) -> Tensor:
  """A new last dimension that is `on_value` at the index and `off_value` elsewhere.

  Args:
    indices: an integer `Tensor`. Out of range, all values are off.
    output_dim: the new dimension.
    on_value: a scalar.
    off_value: a scalar.
    dtype: of the result; bool is allowed.
    name: of the operation.

  Raises:
    DTypeError: the indices are not integers.
  """
  return OneHotOperation(indices, output_dim, on_value, off_value, dtype, name=name).outputs[0]
