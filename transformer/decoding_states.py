"""Operations on the states that layers keep while decoding one position at a time."""

from __future__ import annotations

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.slices import align


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
    return tf.where(align(here, here_dims, dims), align(new, new_dims, dims), old)

  return mtf.slicewise(
    select, [old, new, here], splittable_dims=dims, grad_function=0, name="replace"
  )
