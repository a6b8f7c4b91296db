"""The weights of multihead attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import ShapeError
from mesh_tensorflow.numerics import initializers
from mesh_tensorflow.operations.stacking import unstack
from mesh_tensorflow.operations.variables import VariableDType, get_variable
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Mesh, Tensor

__all__ = ["multihead_attention_params", "multihead_attention_vars"]


class _NormalRows(initializers.RandomNormal):
  """Normal numbers with a standard deviation for each index of the first axis."""

  def __init__(self, stddevs: Sequence[float]):
    super().__init__()
    self._stddevs = list(stddevs)

  def slice_values(
    self,
    key: int,
    full_shape: Sequence[int],
    begin: Sequence[int],
    slice_shape: Sequence[int],
    dtype: tf.DType,
  ) -> tf.Tensor:
    # Drawn with deviation 1: one draw for four deviations, the same ones however the axis is cut.
    values = super().slice_values(key, full_shape, begin, slice_shape, tf.float32)
    # A large variable is computed in parts, which are cut along this axis.
    stddevs = self._stddevs[begin[0] : begin[0] + slice_shape[0]]
    return tf.cast(
      values * tf.reshape(tf.constant(stddevs), [-1] + [1] * (len(full_shape) - 1)), dtype
    )


def multihead_attention_params(
  mesh: Mesh,
  heads: Dimension,
  io_channels: Dimension,
  kv_channels: Dimension,
  variable_dtype: Any,
  combine: bool = False,
) -> list[Tensor]:
  """The projections of queries, keys, values and outputs.

  Initial values are normal with standard deviations io^-1/2 kv^-1/4 (queries, keys: so the
  logits need no scale), io^-1/2 (values) and (io heads)^-1/2 (outputs).

  Args:
    mesh: a `Mesh`.
    heads: dimension of the heads.
    io_channels: dimension of inputs and outputs.
    kv_channels: dimension of keys and values.
    variable_dtype: dtypes of the variables.
    combine: one variable `qkvo` [qkvo=4, heads, io, kv], unstacked; else `q`, `k`, `v`, `o`.

  Returns:
    [wq, wk, wv, wo], each [heads, io_channels, kv_channels].
  """
  for d in (heads, io_channels, kv_channels):
    if not d.size:
      raise ShapeError(f"multihead_attention_params: dimension {d.name}=0 must not be empty")
  # For inputs of variance 1, q and k have the variance kv ** -0.5 each, and a logit, the sum of kv
  # products of the two, has 1.
  qk_stddev = io_channels.size**-0.5 * kv_channels.size**-0.25
  v_stddev = io_channels.size**-0.5
  o_stddev = (io_channels.size * heads.size) ** -0.5
  stddevs = [qk_stddev, qk_stddev, v_stddev, o_stddev]
  shape = Shape([heads, io_channels, kv_channels])
  if combine:
    qkvo = Dimension("qkvo", 4)
    combined = get_variable(
      mesh, "qkvo", Shape([qkvo]) + shape, dtype=variable_dtype, initializer=_NormalRows(stddevs)
    )
    return list(unstack(combined, qkvo))
  return [
    get_variable(
      mesh, name, shape, dtype=variable_dtype, initializer=initializers.RandomNormal(stddev=stddev)
    )
    for name, stddev in zip("qkvo", stddevs)
  ]


def multihead_attention_vars(
  mesh: Mesh,
  heads: Dimension,
  io_channels: Dimension,
  kv_channels: Dimension,
  master_dtype: tf.DType,
  slice_dtype: tf.DType | None,
  activation_dtype: tf.DType | None,
) -> list[Tensor]:
  """`multihead_attention_params` in one variable (deprecated: call that with combine=True).

  Args:
    mesh: a `Mesh`.
    heads: the dimension of the heads.
    io_channels: the dimension of inputs and outputs.
    kv_channels: the dimension of keys and values.
    master_dtype: dtype in checkpoints.
    slice_dtype: dtype of the slices.
    activation_dtype: dtype of the results.
  """
  return multihead_attention_params(
    mesh,
    heads,
    io_channels,
    kv_channels,
    VariableDType(master_dtype, slice_dtype, activation_dtype),
    combine=True,
  )


def cached_dims(what: str, keys: Tensor) -> tuple[Dimension, Dimension, Dimension]:
  """The last three dimensions of cached keys [..., heads, memory_length, kv_channels].

  Args:
    what: the function, for messages.
    keys: the keys.

  Raises:
    ShapeError: there are fewer.
  """
  if keys.shape.ndims < 3:
    raise ShapeError(
      f"{what}: prev_k must be [batch..., heads, memory_length, kv_channels], got {keys}"
    )
  heads, length, kv_channels = keys.shape.dims[-3:]
  return heads, length, kv_channels
