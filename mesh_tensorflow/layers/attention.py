"""Multihead attention: its weights, whole sequences, and steps of decoding with a KV cache.

Vaswani et al., 2017 (arXiv:1706.03762). The factor 1 / sqrt(kv) of the logits lies in the initial
values of the weights. All kinds are put together of `attend`, masks, and `Projections`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import ShapeError
from mesh_tensorflow.layers.masks import mask_where, rename_length_to_memory_length
from mesh_tensorflow.layers.statistics import compress_mean
from mesh_tensorflow.numerics import initializers
from mesh_tensorflow.operations.einsum import einsum
from mesh_tensorflow.operations.elementwise import cast
from mesh_tensorflow.operations.one_hot import one_hot
from mesh_tensorflow.operations.random import dropout as dropout_fn
from mesh_tensorflow.operations.ranges import mtf_range
from mesh_tensorflow.operations.reshape import rename_dimension
from mesh_tensorflow.operations.softmax import softmax
from mesh_tensorflow.operations.stacking import unstack
from mesh_tensorflow.operations.variables import VariableDType, get_variable
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.argument_kinds import FloatTensor, TensorOrScalar
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Mesh, Tensor

__all__ = [
  "dot_product_attention",
  "multihead_attention",
  "multihead_attention_params",
  "multihead_attention_vars",
  "multihead_encdec_attention_incremental",
  "multihead_self_attention_incremental",
  "multihead_self_attention_memory_compressed",
]


def attend(
  logits: Tensor,
  v: Tensor,
  output_shape: Shape,
  *,
  normalize: Callable[[Tensor], Tensor],
  dropout: Callable[[Tensor], Tensor] | None = None,
  weights_dtype: tf.DType | None = None,
) -> Tensor:
  """The sum of values, weighted by dropout(normalize(logits)): what all kinds of attention end in.

  Args:
    logits: [..., memory_length], products of queries and keys or what stands for them, with masks.
    v: values [..., memory_length, value], of the dtype of the result.
    output_shape: dims of the result.
    normalize: makes weights of logits, as a softmax over memory_length.
    dropout: applied to the weights, or None.
    weights_dtype: what weights are cast to; None: that of the logits.
  """
  weights = normalize(logits)
  if weights_dtype is not None:
    weights = cast(weights, weights_dtype)
  if dropout is not None:
    weights = dropout(weights)
  return einsum([weights, v], output_shape=output_shape)


def dot_product_attention(
  q: FloatTensor,
  k: Tensor,
  v: Tensor,
  mask: TensorOrScalar | None,
  is_training: bool,
  dropout: float | None = 0.0,
  dropout_broadcast_dims: Sequence[Dimension] | None = None,
  extra_logit: TensorOrScalar = None,
) -> Tensor:
  """softmax(q . k + mask) . v, without a scale.

  Args:
    q: queries [..., length_q, depth_k].
    k: keys [..., length_kv, depth_k].
    v: values [..., length_kv, depth_v].
    mask: added to the logits, or None.
    is_training: whether dropout happens.
    dropout: rate, on the attention weights.
    dropout_broadcast_dims: dimensions along which the dropout mask is repeated.
    extra_logit: a number, or a `Tensor` of some dimensions of q: exp of it is added to the
      denominator of the softmax.

  Returns:
    A `Tensor` [..., length_q, depth_v].
  """
  length_kv = k.shape.dims[-2]
  logits = einsum([q, k], output_shape=Shape(q.shape.dims[:-1] + [length_kv]))
  if mask is not None:
    logits += mask

  rate = dropout or 0.0

  def drop(weights: Tensor) -> Tensor:
    noise_shape = weights.shape - dropout_broadcast_dims
    return dropout_fn(weights, is_training, keep_prob=1.0 - rate, noise_shape=noise_shape)

  return attend(
    logits,
    v,
    Shape(q.shape.dims[:-1] + v.shape.dims[-1:]),
    normalize=lambda logits: softmax(logits, length_kv, extra_logit=extra_logit),
    dropout=drop if rate else None,
  )


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


@dataclasses.dataclass(frozen=True)
class Projections:
  """The weights of multihead attention, each [heads, io_channels, kv_channels]."""

  q: Tensor
  k: Tensor
  v: Tensor
  o: Tensor

  @classmethod
  def of(
    cls,
    x: Tensor,
    heads: Dimension,
    kv_channels: Dimension,
    master_dtype: tf.DType,
    slice_dtype: tf.DType | None,
  ) -> Projections:
    """Those of inputs x [..., io_channels]: the variable `qkvo` of the open scope."""
    io_channels = x.shape.dims[-1]
    return cls(
      *multihead_attention_vars(
        x.mesh, heads, io_channels, kv_channels, master_dtype, slice_dtype, x.dtype
      )
    )

  def queries_keys_values(
    self, x: Tensor, memory: Tensor, num_positions: int = 1, num_blocks: int = 0
  ) -> list[Tensor]:
    """Queries of x, keys and values of memory: [batch..., heads, blocks..., positions..., kv].

    Both are [batch..., blocks..., positions..., io_channels], with so many dims of each.
    """
    heads, _, kv_channels = self.q.shape.dims

    def projected(x: Tensor, w: Tensor) -> Tensor:
      dims = x.shape.dims[:-1]
      i = len(dims) - num_positions - num_blocks
      return einsum([x, w], output_shape=Shape([*dims[:i], heads, *dims[i:], kv_channels]))

    return [projected(x, self.q), projected(memory, self.k), projected(memory, self.v)]

  def output(self, o: Tensor, output_shape: Shape) -> Tensor:
    """The result of attention, of what heads have attended to."""
    return einsum([o, self.o], output_shape=output_shape)

  def decode(
    self,
    x: Tensor,
    prev_k: Tensor,
    prev_v: Tensor,
    write: Callable[[Tensor, Tensor], Tensor],
    slots: Tensor,
    step_num: Tensor,
  ) -> tuple[Tensor, Tensor, Tensor]:
    """One decoding step: `write` puts the position's key and value into the KV cache.

    Args:
      x: [batch..., io_channels], the position `step_num`.
      prev_k: cached keys [batch..., heads, slots, kv_channels].
      prev_v: cached values, likewise.
      write: from a cache and the position's key or value to the new cache.
      slots: 0, 1, ... along the slots of the caches.
      step_num: an integer tensor; slots after it hold nothing yet, and are hidden.

    Returns:
      (the output, of x's shape; the new caches of keys and of values).
    """
    q, new_k, new_v = self.queries_keys_values(x, x, num_positions=0)
    k, v = write(prev_k, new_k), write(prev_v, new_v)
    mask = mask_where(tf.greater, slots, step_num, x.dtype)
    o = dot_product_attention(q, k, v, mask, is_training=False)
    return self.output(o, x.shape), k, v


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


def multihead_attention(
  query_antecedent: FloatTensor,
  memory_antecedent: Tensor | None,
  mask: TensorOrScalar | None,
  kv_channels: Dimension,
  heads: Dimension,
  is_training: bool,
  dropout: float | None = 0.0,
  dropout_broadcast_dims: Sequence[Dimension] | None = None,
  master_dtype: tf.DType = tf.float32,
  slice_dtype: tf.DType | None = tf.float32,
  name: str | None = "multihead_attention",
) -> Tensor:
  """Multihead attention with its four projections; variable `{name}/qkvo`.

  Args:
    query_antecedent: [batch..., query_length, io_channels].
    memory_antecedent: [batch..., memory_length, io_channels]; None for self-attention,
      where the dimension of the memory is called `memory_length`.
    mask: added to the logits [batch..., heads, query_length, memory_length], or None.
    kv_channels: dimension of keys and values.
    heads: dimension of the heads.
    is_training: whether dropout happens.
    dropout: rate, on the attention weights.
    dropout_broadcast_dims: dimensions along which the dropout mask is repeated.
    master_dtype: dtype of the variable in checkpoints.
    slice_dtype: dtype in which slices of the variable are kept and updated.
    name: name of the scope.

  Returns:
    A `Tensor` of the shape of `query_antecedent`.

  Raises:
    ShapeError: batch dimensions or channels of query and memory differ.
  """
  *batch_dims, query_length, io_channels = query_antecedent.shape.dims
  with scope.variable_scope(name, default_name="multihead_attention", graph=query_antecedent.graph):
    weights = Projections.of(query_antecedent, heads, kv_channels, master_dtype, slice_dtype)
    if memory_antecedent is None:
      memory_antecedent = rename_length_to_memory_length(query_antecedent, query_length.name)
    *memory_batch_dims, memory_length, memory_channels = memory_antecedent.shape.dims
    if memory_batch_dims != batch_dims:
      raise ShapeError(
        f"multihead_attention {name}: query {query_antecedent} and memory {memory_antecedent} must "
        "have the same dimensions before the length"
      )
    if memory_channels != io_channels:
      raise ShapeError(
        f"multihead_attention {name}: query {query_antecedent} and memory {memory_antecedent} must "
        f"have the same last dimension, got {io_channels.name}={io_channels.size} and "
        f"{memory_channels.name}={memory_channels.size}"
      )
    # The memory's length has another name than the queries': the logits need both dimensions.
    q, k, v = weights.queries_keys_values(query_antecedent, memory_antecedent)
    o = dot_product_attention(q, k, v, mask, is_training, dropout, dropout_broadcast_dims)
    return weights.output(o, query_antecedent.shape)


def multihead_self_attention_memory_compressed(
  x: FloatTensor,
  mask_right: bool,
  compression_factor: int,
  kv_channels: Dimension,
  heads: Dimension,
  is_training: bool,
  dropout: float | None = 0.0,
  dropout_broadcast_dims: Sequence[Dimension] | None = None,
  master_dtype: tf.DType = tf.float32,
  slice_dtype: tf.DType | None = tf.float32,
  name: str | None = "multihead_attention",
) -> Tensor:
  """Self-attention whose memory is the means of groups of neighbouring positions.

  A query may attend to nothing: an extra logit of 0 takes part in the softmax. With
  `mask_right` the first compression_factor - 1 positions see no group, and give 0.
  Variable `{name}/qkvo`.

  Args:
    x: [batch..., length, io_channels]; the dimension must be called `length`.
    mask_right: a group is visible from its last position on.
    compression_factor: size of a group.
    kv_channels: dimension of keys and values.
    heads: dimension of the heads.
    is_training: whether dropout happens.
    dropout: rate, on the attention weights.
    dropout_broadcast_dims: dimensions along which the dropout mask is repeated.
    master_dtype: dtype of the variable in checkpoints.
    slice_dtype: dtype in which slices of the variable are kept and updated.
    name: name of the scope; None for `compressed_attention`, made unique.

  Returns:
    A `Tensor` of x's shape.

  Raises:
    DimensionError: x has no dimension `length`.
    ShapeError: the factor does not divide the length.
  """
  length = x.shape.get_dim_by_name("length")
  with scope.variable_scope(name, default_name="compressed_attention", graph=x.graph):
    weights = Projections.of(x, heads, kv_channels, master_dtype, slice_dtype)
    memory = rename_dimension(
      compress_mean(x, length, compression_factor), length.name, "memory_length"
    )
    q, k, v = weights.queries_keys_values(x, memory)
    mask = None
    if mask_right:
      # The mean of a group knows all its positions: before the last of them it would show the
      # future.
      last = compression_factor - 1
      mask = mask_where(
        lambda pos, group: pos < group * compression_factor + last,
        mtf_range(x.mesh, length, tf.int32),
        mtf_range(x.mesh, memory.shape.get_dim_by_name("memory_length"), tf.int32),
        x.dtype,
      )
    o = dot_product_attention(
      q, k, v, mask, is_training, dropout, dropout_broadcast_dims, extra_logit=0.0
    )
    return weights.output(o, x.shape)


def multihead_self_attention_incremental(
  query_antecedent: FloatTensor,
  prev_k: Tensor,
  prev_v: Tensor,
  step_num: Tensor,
  master_dtype: tf.DType,
  slice_dtype: tf.DType | None,
  name: str | None = "multihead_attention",
) -> tuple[Tensor, Tensor, Tensor]:
  """One step of causal self-attention; variable `{name}/qkvo` as `multihead_attention`.

  Args:
    query_antecedent: [batch..., io_channels], the position `step_num`.
    prev_k: keys [batch..., heads, memory_length, kv_channels], 0 at `step_num`.
    prev_v: values, likewise.
    step_num: an integer scalar `Tensor`.
    master_dtype: dtype of the variable in checkpoints.
    slice_dtype: dtype in which slices of the variable are kept and updated.
    name: name of the scope.

  Returns:
    The output (of the shape of `query_antecedent`), and keys and values with this
    position's.
  """
  heads, memory_length, kv_channels = cached_dims("multihead_self_attention_incremental", prev_k)
  with scope.variable_scope(name, default_name="multihead_attention", graph=query_antecedent.graph):
    weights = Projections.of(query_antecedent, heads, kv_channels, master_dtype, slice_dtype)
    # The caches are 0 at this position: adding to them is writing.
    here = one_hot(step_num, memory_length, dtype=query_antecedent.dtype)
    return weights.decode(
      query_antecedent,
      prev_k,
      prev_v,
      lambda cache, new: cache + einsum([new, here], output_shape=cache.shape),
      mtf_range(query_antecedent.mesh, memory_length, step_num.dtype),
      step_num,
    )


def multihead_encdec_attention_incremental(
  query_antecedent: FloatTensor,
  wq: Tensor,
  wo: Tensor,
  k: Tensor,
  v: Tensor,
  mask: TensorOrScalar | None,
  name: str | None = "multihead_attention",
) -> Tensor:
  """One step of attention to ready keys and values; makes no variables.

  Args:
    query_antecedent: [query_dims..., io_channels].
    wq: [heads, io_channels, kv_channels].
    wo: [heads, io_channels, kv_channels].
    k: [batch..., heads, memory_length, kv_channels].
    v: [batch..., heads, memory_length, kv_channels].
    mask: added to the logits [query_dims..., heads, memory_length], or None.
    name: name of the scope.

  Returns:
    A `Tensor` of the shape of `query_antecedent`.
  """
  if wq.shape.ndims != 3:
    raise ShapeError(
      f"multihead_encdec_attention_incremental: wq must be [heads, io_channels, kv_channels], "
      f"got {wq}"
    )
  heads, _, kv_channels = wq.shape.dims
  query_dims = query_antecedent.shape.dims[:-1]
  with scope.variable_scope(name, default_name="multihead_attention", graph=query_antecedent.graph):
    q = einsum([query_antecedent, wq], output_shape=Shape([*query_dims, heads, kv_channels]))
    o = dot_product_attention(q, k, v, mask, is_training=False)
    return einsum([o, wo], output_shape=query_antecedent.shape)
