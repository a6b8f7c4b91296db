"""Sums and means of the elements that share a segment."""

from __future__ import annotations

from mesh_tensorflow.operations.binary import divide, maximum
from mesh_tensorflow.operations.constants import ones
from mesh_tensorflow.operations.elementwise import cast
from mesh_tensorflow.operations.scatter import scatter_add
from mesh_tensorflow.program.argument_kinds import FloatOrComplexTensor, IntTensor, NumberTensor
from mesh_tensorflow.program.dimensions import (
  DimensionLike,
  Shape,
  ShapeLike,
  convert_to_dimension,
)
from mesh_tensorflow.program.graph import Tensor

__all__ = ["segment_mean", "segment_sum"]


def segment_sum(
  x: NumberTensor,
  segment_ids: IntTensor,
  segments_dim: DimensionLike,
  output_shape: ShapeLike | None = None,
  name: str = "segment_sum",
) -> Tensor:
  """Sums of the elements of each segment, as `tf.math.unsorted_segment_sum`.

  Elements, segments or both may be split, over the same mesh axis too.

  Args:
    x: a `Tensor` of numbers.
    segment_ids: an integer `Tensor`: for each element its segment, in any order. An element whose
      id is out of range counts nowhere.
    segments_dim: the dimension of the segments.
    output_shape: as of `scatter_add`; by default the segments, and the dimensions of x that the ids
      do not have.
    name: of the operation.

  Returns:
    A `Tensor`; 0 for a segment without elements.
  """
  return scatter_add(x, segment_ids, segments_dim, output_shape, name=name)


def segment_mean(
  x: FloatOrComplexTensor,
  segment_ids: IntTensor,
  segments_dim: DimensionLike,
  output_shape: ShapeLike | None = None,
  name: str = "segment_mean",
) -> Tensor:
  """Means of the elements of each segment, 0 for one without; arguments as `segment_sum`."""
  total = scatter_add(x, segment_ids, segments_dim, output_shape, name=name)
  dim = convert_to_dimension(segments_dim)
  counted = Shape([d for d in total.shape if d == dim or d in segment_ids.shape])
  one = ones(x.mesh, segment_ids.shape)  # float32: a short float counts to 256 only.
  count = maximum(scatter_add(one, segment_ids, dim, counted, name=f"{name}_count"), 1.0)
  return divide(total, cast(count, x.dtype), output_shape=total.shape)
