"""`mtf.TensorSpec`: dimensions and dtype of an argument of an `mtf.function`."""

from __future__ import annotations

import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.kinds import DTypeLike
from mesh_tensorflow.program.dimensions import ShapeLike, convert_to_shape


class TensorSpec:
  """Dimensions and dtype of an argument of an `mtf.function`.

  Args:
    shape: a shape.
    dtype: a dtype; float32 by default.
    name: for messages.
    local: whether each process of a mesh that spans several gives only its own part of the
      argument, `mesh_impl.local_part(shape)`; otherwise every process gives the same whole one.
  """

  @checked
  def __init__(
    self,
    shape: ShapeLike,
    dtype: DTypeLike = tf.float32,
    name: str | None = None,
    *,
    local: bool = False,
  ):
    self.shape = convert_to_shape(shape)
    self.dtype = tf.as_dtype(dtype)
    self.name = name
    self.local = local

  def __repr__(self) -> str:
    return f"TensorSpec({self.shape}, {self.dtype.name}, name={self.name!r})"
