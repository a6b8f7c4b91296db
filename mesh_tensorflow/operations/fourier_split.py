"""The Fourier transform along a dimension that stays split: three all-to-alls, and no gather.

n = p s numbers lie in blocks of s on p processors. With j = q s + t and k = a + p b, the transform
X[k] = sum over j of x[j] w_n^(j k), w_n = exp(-2 pi i / n), is (Gentleman and Sande, 1966; the
"four steps" of Bailey, 1990)

  X[a + p b] = sum over t of w_s^(t b) (w_n^(t a) sum over q of x[q s + t] w_p^(q a)).

An all-to-all brings all q of s / p numbers t to a processor, which sums over them; another one all
t of one a; and a third one puts the result into blocks again. Each processor receives
3 s (p - 1) / p numbers, where gathering receives s (p - 1), holds s numbers, not n, and does its
p-th part of the work. p must divide s.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.operations.whole_dimensions import along_last, holds_of
from mesh_tensorflow.program.dimensions import Shape, list_product


def split_over(impl: Any, before: Shape, after: Shape, axis: int) -> int | None:
  """Mesh axis over which a dimension stays split during the transform; None if it cannot.

  Args:
    impl: a `MeshImpl`.
    before: the shape of the input.
    after: the shape of the output.
    axis: number of the dimension.
  """
  holds = holds_of(impl, before)[axis]
  if len(holds) != 1 or holds != holds_of(impl, after)[axis]:
    return None
  return holds[0] if before[axis].size % impl.shape[holds[0]].size ** 2 == 0 else None


def received(impl: Any, shape: Shape, mesh_axis: int) -> int:
  """Number of elements that each processor receives.

  Args:
    impl: a `MeshImpl`.
    shape: of the tensor.
    mesh_axis: mesh axis that splits the transformed dimension, from `split_over`.
  """
  p: int = impl.shape[mesh_axis].size
  return 3 * (p - 1) * (int(list_product(impl.slice_shape(shape))) // p)


def transform_split(
  lowering: LoweringInProgress,
  impl: Any,
  slices: Any,
  axis: int,
  mesh_axis: int,
  inverse: bool,
  what: str,
) -> Any:
  """The transform of complex slices along a split axis, or its inverse.

  Args:
    lowering: gets counters of what is moved.
    impl: the `MeshImpl`.
    slices: a laid-out tensor.
    axis: number of the tensor axis.
    mesh_axis: mesh axis that splits it, from `split_over`.
    inverse: whether it is the inverse.
    what: for the counters.

  Returns:
    A laid-out tensor, of the same layout.
  """
  p, sizes = impl.shape[mesh_axis].size, list(slices.to_laid_out_tensor().slice_shape)
  part = sizes[axis] // p
  fn = tf.signal.ifft if inverse else tf.signal.fft

  def exchanged(x: Any) -> Any:
    lowering.add_counter(f"alltoall/{mesh_axis}/{what}", list_product(sizes) * impl.size)
    return impl.alltoall(x, mesh_axis, axis, axis)

  def over_processors(x: tf.Tensor, coordinate: tf.Tensor) -> tf.Tensor:
    parts = tf.reshape(x, [*sizes[:axis], p, part, *sizes[axis + 1 :]])
    y = along_last(fn, parts, axis)
    factors = _factors(p, part, coordinate, x.dtype, inverse)
    return tf.reshape(y * tf.reshape(factors, [p, part] + [1] * (len(sizes) - axis - 1)), sizes)

  def in_order(x: tf.Tensor) -> tf.Tensor:
    """From one a after another to a + p b."""
    parts = tf.reshape(x, [*sizes[:axis], p, part, *sizes[axis + 1 :]])
    order = list(range(len(sizes) + 1))
    order[axis : axis + 2] = [axis + 1, axis]
    return tf.reshape(tf.transpose(parts, order), sizes)

  slices = exchanged(slices)
  slices = exchanged(impl.slicewise(over_processors, slices, impl.laid_out_pcoord(mesh_axis)))
  slices = exchanged(impl.slicewise(lambda x: along_last(fn, x, axis), slices))
  return impl.slicewise(in_order, slices)


def _factors(p: int, part: int, coordinate: tf.Tensor, dtype: tf.DType, inverse: bool) -> tf.Tensor:
  """w_n^(t a) for all a and the t of a processor: [p, part]."""
  n = p * p * part
  t = tf.cast(coordinate, tf.int64) * part + tf.range(part, dtype=tf.int64)
  # The product as an integer: of a large angle little would be left as a floating number.
  turns = tf.range(p, dtype=tf.int64)[:, tf.newaxis] * t % n
  angle = tf.cast(turns, dtype.real_dtype) * ((2.0 if inverse else -2.0) * math.pi / n)
  return tf.complex(tf.cos(angle), tf.sin(angle))
