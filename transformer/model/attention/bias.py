"""Terms added to logits: masks (causal, segments, window, sinks), relative position biases.

What layers have in common is computed once per `Context` and kept in its cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.layers.masks import masked_logit
from mesh_tensorflow.transformer.model.context import Context


def visibility_mask_to_attention_bias(visible: mtf.Tensor, dtype: tf.DType) -> mtf.Tensor:
  """0 where `visible`, a bool tensor, is true; `masked_logit` elsewhere."""
  # Finite: a position that sees nothing, as padding may, has equal weights, and what it gets is not
  # used.
  return mtf.cast(mtf.logical_not(visible), dtype) * masked_logit(dtype)


def compared(
  compare: Callable[..., mtf.Tensor], query: mtf.Tensor, memory: mtf.Tensor
) -> mtf.Tensor:
  """A mask: an operation such as `mtf.equal`, of each query and each position of memory."""
  return compare(query, memory, output_shape=_joined(query.shape, memory.shape))


def all_visible(masks: list[mtf.Tensor], last: tuple[mtf.Dimension, ...] = ()) -> mtf.Tensor:
  """Logical and of masks; the dims `last` come last."""
  # The largest shape first, so that the result has its order of dims.
  result, *others = sorted(masks, key=lambda mask: -mask.shape.ndims)
  for mask in others:
    dims = _joined(result.shape, mask.shape)
    shape = [d for d in dims if d not in last] + [d for d in last if d in dims]
    result = mtf.logical_and(result, mask, output_shape=mtf.Shape(shape))
  return result


class _Limits(NamedTuple):
  """Range of relative positions that a layer's mask allows.

  Attributes:
    low: the leftmost relative position; None: no limit.
    high: the rightmost relative position; None: no limit.
    num_sinks: number of first positions of a sequence that are always visible.
  """

  low: int | None
  high: int | None
  num_sinks: int


class RelativeLayer(Protocol):
  """Structural type: a layer of attention that has a relative bias."""

  relative_attention_type: str | None
  relative_attention_num_buckets: int

  @property
  def kv_dim(self) -> mtf.Dimension: ...


def self_attention_bias(
  layer: Any,
  context: Context,
  memory_position: mtf.Tensor,
  heads_dims: list[mtf.Dimension],
  q: mtf.Tensor,
  num_prompts: int = 0,
) -> mtf.Tensor | None:
  """The bias of a `SelfAttention` layer; see its `compute_bias`.

  Args:
    layer: the layer.
    context: a `Context`.
    memory_position: int32 tensor with dimension `memory_length`.
    heads_dims: dims of query heads.
    q: the queries.
    num_prompts: how many positions of memory, before the sequence's own, are prompts.

  Returns:
    A tensor whose dims are among those of the products, or None.

  Raises:
    ConfigError: an unknown relative_attention_type.
  """
  limits = _Limits(
    layer.min_relative_position(context), layer.max_relative_position(context), layer.num_sinks
  )
  seen = context.seen_by_beams
  if seen is not None and (num_prompts or seen.shape[-1] not in memory_position.shape):
    seen = None  # The beams have caches of their own in this layer.

  def relative_position() -> mtf.Tensor:
    key = ("relative_position", memory_position.shape, num_prompts, context.position)

    def compute() -> mtf.Tensor:
      position = memory_position - num_prompts if num_prompts else memory_position
      return _relative_position(position, context.position)

    return context.cached(key, compute)

  def mask() -> mtf.Tensor | None:
    key = ("self_attention_mask", limits, seen, *_sources(context))
    bias = context.cached(
      key, lambda: _mask(layer, context, memory_position, relative_position, limits, seen)
    )
    if bias is None or not num_prompts:
      return bias
    # All positions see the prompts.
    return context.cached(
      ("self_attention_mask_with_prompts", num_prompts, bias),
      lambda: mtf.pad(bias, [num_prompts, 0], "memory_length"),
    )

  def with_relative_bias() -> mtf.Tensor:
    relative_bias = relative_attention_bias(layer, context, relative_position(), heads_dims, q)
    bias = mask()
    if bias is None or seen is None:
      return relative_bias if bias is None else relative_bias + bias
    # Each beam sees other entries: in the order of the logits, so that no layer transposes it.
    heads = [d for d in relative_bias.shape if d not in bias.shape]
    *batch_dims, beam, memory = bias.shape.dims
    return mtf.add(relative_bias, bias, output_shape=mtf.Shape([*batch_dims, *heads, beam, memory]))

  kind = layer.relative_attention_type
  if kind is None:
    return mask()
  if kind == "bias_shared":
    # The first layer's variable serves all layers of the stack.
    return context.cached(
      (
        "self_attention_bias",
        *limits,
        num_prompts,
        tuple(heads_dims),
        seen,
        *_sources(context),
      ),
      with_relative_bias,
    )
  return with_relative_bias()


def relative_attention_bias(
  layer: RelativeLayer,
  context: Context,
  relative_position: mtf.Tensor,
  heads_dims: list[mtf.Dimension],
  q: mtf.Tensor,
) -> mtf.Tensor:
  """The `relative_bias` of a layer of self-attention.

  Raises:
    ConfigError: an unknown relative_attention_type.
  """
  kind = layer.relative_attention_type
  if kind not in ("bias", "bias_shared", "contextual"):
    raise errors.ConfigError(
      f'{type(layer).__name__}.relative_attention_type must be None, "bias", "bias_shared" or '
      f'"contextual", got {kind!r}'
    )
  return relative_bias(
    layer,
    context,
    relative_position,
    heads_dims,
    # With input_full_attention, inputs see later ones, too.
    bidirectional=not context.model.fully_autoregressive,
    name="relative_attention_bias",
    q=q,
  )


def relative_bias(
  layer: RelativeLayer,
  context: Context,
  relative_position: mtf.Tensor,
  heads_dims: list[mtf.Dimension],
  *,
  bidirectional: bool,
  name: str,
  q: Any = None,
) -> mtf.Tensor:
  """A trained number for each head and bucket of relative positions.

  Args:
    layer: the layer, for the number of buckets, and whether numbers are computed from queries.
    context: a `Context`.
    relative_position: int32, of positions of queries and of memory.
    heads_dims: dims of query heads.
    bidirectional: see `relative_position_bucket`.
    name: name of the variable.
    q: the queries.

  Returns:
    A tensor whose dims are among those of the products, in their order.
  """
  buckets_dim = mtf.Dimension("buckets", layer.relative_attention_num_buckets)
  bucket = context.cached(
    ("relative_position_bucket", relative_position, bidirectional, buckets_dim),
    lambda: relative_position_bucket(
      relative_position, bidirectional=bidirectional, num_buckets=buckets_dim.size
    ),
  )
  leading = context.model.ensemble_dims + heads_dims
  if layer.relative_attention_type == "contextual":
    values = mtf.layers.dense(
      q,
      reduced_dims=[layer.kv_dim],
      new_dims=[buckets_dim],
      expert_dims=leading,
      use_bias=False,
      variable_dtype=context.variable_dtype,
      name="relative_attention_ak",
    )
  else:
    shape = mtf.Shape(leading + [buckets_dim])
    values = mtf.get_variable(context.mesh, name, shape, dtype=context.variable_dtype)
  # With dims ordered as in the logits: batch, heads, lengths.
  dims = [d for d in bucket.shape if d not in values.shape]
  dims += [d for d in values.shape if d != buckets_dim]
  lengths = [d for name in ("length", "memory_length") for d in dims if d.name == name]
  shape = mtf.Shape([d for d in dims if d not in lengths] + lengths)
  return mtf.gather(values, bucket, buckets_dim, output_shape=shape)


def length_to_memory_length(
  x: mtf.Tensor, context: Context, memory_length: mtf.Dimension
) -> mtf.Tensor:
  """Calls the context's length dimension `memory_length`, in tensors that have it."""
  if context.length_dim not in x.shape.dims:
    return x
  return context.cached(
    (memory_length, x), lambda: mtf.replace_dimensions(x, context.length_dim, memory_length)
  )


def _mask(
  layer: Any,
  context: Context,
  memory_position: mtf.Tensor,
  relative_position: Callable[[], mtf.Tensor],
  limits: _Limits,
  seen_by_beams: mtf.Tensor | None,
) -> mtf.Tensor | None:
  """-1e9 where attention is not allowed; None if it is allowed everywhere."""
  visible = []
  if limits.low is not None:
    near = mtf.greater_equal(relative_position(), limits.low)
    visible.append(_or_sinks(layer, context, memory_position, near, limits.num_sinks))
  if limits.high is not None:
    visible.append(mtf.less_equal(relative_position(), limits.high))

  def memory(x: mtf.Tensor) -> mtf.Tensor:
    renamed: mtf.Tensor = layer.rename_length_to_memory_length(x, context)
    return renamed

  if seen_by_beams is not None:
    visible.append(seen_by_beams)
  elif context.read_priority is not None and context.write_priority is not None:
    write_priority = memory(context.write_priority)
    visible.append(compared(mtf.greater_equal, context.read_priority, write_priority))
  sequence_id = segments(context)
  if sequence_id is not None and context.length_dim in sequence_id.shape:
    visible.append(compared(mtf.equal, sequence_id, memory(sequence_id)))
  if not visible:
    return None
  return visibility_mask_to_attention_bias(all_visible(visible), context.activation_dtype)


def _or_sinks(
  layer: Any, context: Context, memory_position: mtf.Tensor, near: mtf.Tensor, num_sinks: int
) -> mtf.Tensor:
  """Adds attention sinks to a mask: the first `num_sinks` positions of each sequence."""
  if not num_sinks:
    return near
  if context.mode == "incremental":
    position = memory_position
  else:
    position = layer.rename_length_to_memory_length(position_in_sequence(context), context)
  sinks = mtf.less(position, num_sinks)
  return mtf.logical_or(near, sinks, output_shape=_joined(near.shape, sinks.shape))


def position_in_sequence(context: Context) -> mtf.Tensor:
  """Positions, of packed sequences within each: the first ones may be attention sinks."""
  packed = context.packed_position
  # A funnel's shorter sequences have no known positions.
  return packed if packed is not None and context.length_dim in packed.shape else context.position


def segments(context: Context) -> mtf.Tensor | None:
  """Segment ids: a position attends only to positions with an equal id; None: no segments."""
  for ids in (context.subsequence_id, context.sequence_id):
    if isinstance(ids, mtf.Tensor):
      return ids
  return None


def _sources(context: Context) -> tuple[Any, ...]:
  """The parts of a context that masks and relative positions depend on; a cache key."""
  return (
    context.length_dim,
    context.position,
    context.read_priority,
    context.write_priority,
    segments(context),
  )


def _joined(query: mtf.Shape, memory: mtf.Shape) -> mtf.Shape:
  """Union of the dims of queries and memory, those of queries first."""
  return mtf.Shape(query.dims + [d for d in memory if d not in query])


def _relative_position(memory_position: mtf.Tensor, position: mtf.Tensor) -> mtf.Tensor:
  """Memory position minus query position."""
  shape = _joined(position.shape, memory_position.shape)
  return mtf.sub(memory_position, position, output_shape=shape)


def relative_position_bucket(
  relative_position: mtf.Tensor,
  bidirectional: bool = True,
  num_buckets: int = 32,
  max_distance: int = 128,
) -> mtf.Tensor:
  """The number of the bucket that a relative position falls into.

  Half of the buckets are for one position each, the others for ranges that grow logarithmically
  up to `max_distance`; all positions beyond share the last.

  Args:
    relative_position: int32 tensor, memory position minus query position.
    bidirectional: whether positions to the right have buckets (the upper half); else they share
      bucket 0 with relative position 0.
    num_buckets: number of buckets.
    max_distance: the distance from which on there is one bucket.

  Returns:
    An int32 tensor of the same dims, in [0, num_buckets).
  """

  def bucket(relative: tf.Tensor) -> tf.Tensor:
    n = -relative
    if bidirectional:
      buckets = num_buckets // 2
      # The second half of the buckets is for memory after the query.
      offset = tf.cast(n < 0, tf.int32) * buckets
      n = tf.abs(n)
    else:
      buckets, offset = num_buckets, 0
      n = tf.maximum(n, 0)
    exact = buckets // 2
    # Float32 products with reciprocals, in this order: at the edges of the ranges the bucket
    # depends on the rounding, and trained biases belong to these buckets.
    scale = 1.0 / math.log(max_distance / exact)
    log_ratio = tf.math.log(tf.cast(tf.maximum(n, 1), tf.float32) * (1.0 / exact))
    large = exact + tf.cast(log_ratio * scale * float(buckets - exact), tf.int32)
    return offset + tf.where(n < exact, n, tf.minimum(large, buckets - 1))

  return mtf.cwise(bucket, [relative_position], grad_function=0, name="relative_position_bucket")
