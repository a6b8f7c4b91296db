"""Value of a wire while a program is built: an `mtf.Tensor` and its axes, or NumPy values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

from mesh_tensorflow.operations.constants import constant, import_tf_tensor
from mesh_tensorflow.operations.einsum import transpose
from mesh_tensorflow.operations.reshape import reshape
from mesh_tensorflow.program.dimensions import Dimension, Shape, list_product
from mesh_tensorflow.program.graph import Mesh, Tensor

# For each TensorFlow axis the dimensions that it is the product of, major first; none for size 1.
AxisDims = tuple[tuple[Dimension, ...], ...]


def flat(axes: Iterable[Iterable[Dimension]]) -> list[Dimension]:
  """The dimensions of all axes, in order."""
  return [d for dims in axes for d in dims]


@dataclasses.dataclass(frozen=True)
class Value:
  """A tensor with the order of TensorFlow's axes beside it.

  The `tensor` has the dimensions of `axes` in any order: a transposition only changes `axes`.

  Attributes:
    tensor: an `mtf.Tensor` of exactly the dimensions of `axes`.
    axes: for each TensorFlow axis its dimensions. Of a stack those of its elements, which stay.
  """

  tensor: Tensor
  axes: AxisDims

  @property
  def shape(self) -> tuple[int, ...]:
    """The sizes of TensorFlow's axes."""
    return tuple(list_product(d.size for d in dims) for dims in self.axes)

  def ordered(self) -> Tensor:
    """The tensor with its dimensions in the order of the axes."""
    shape = Shape(flat(self.axes))
    is_ordered = self.tensor.shape == shape or self.tensor.dtype == tf.variant
    return self.tensor if is_ordered else transpose(self.tensor, shape)

  def with_axes(self, axes: Sequence[Sequence[Dimension]]) -> Value:
    """Renames, joins or splits dimensions, as a row-major reshape.

    Args:
      axes: for each axis dimensions of the same product of sizes. It may also be another number of
        axes, of the same elements: a reshape.
    """
    new = tuple(tuple(dims) for dims in axes)
    if new == self.axes or self.tensor.dtype == tf.variant:
      return self
    old, wanted = flat(self.axes), flat(new)
    if old == wanted:
      return Value(self.tensor, new)
    if [d.size for d in old] == [d.size for d in wanted]:
      # Only names change, so the order of the tensor's dimensions may stay.
      renamed = dict(zip(old, wanted))
      return Value(reshape(self.tensor, [renamed[d] for d in self.tensor.shape]), new)
    return Value(reshape(self.ordered(), wanted), new)

  def transposed(self, permutation: Sequence[int]) -> Value:
    """The axes in another order; nothing is computed."""
    return Value(self.tensor, tuple(self.axes[i] for i in permutation))


def of_static(
  mesh: Mesh, values: np.ndarray, axes: Sequence[Sequence[Dimension]], dtype: tf.DType
) -> Value:
  """Imports static values as a tensor.

  Args:
    mesh: the mesh.
    values: an array.
    axes: for each of its axes its dimensions.
    dtype: of the tensor.
  """
  dims = flat(axes)
  if values.size and not values.dtype.hasobject and (values == values.flat[0]).all():
    tensor = constant(mesh, values.flat[0], dims, dtype)  # Each processor fills its slice.
  else:
    whole = tf.constant(values.reshape([d.size for d in dims]), dtype)
    tensor = import_tf_tensor(mesh, whole, dims)
  return Value(tensor, tuple(tuple(dims) for dims in axes))
