"""The bias that self-attention adds to its logits: masks and relative position bias.

What layers have in common is computed once per `Context` and kept in its cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer.attention import visibility_mask_to_attention_bias
from mesh_tensorflow.transformer.layers.relative_position import relative_position_bucket
from mesh_tensorflow.transformer.models.context import Context


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

  def relative_position() -> mtf.Tensor:
    key = ("relative_position", memory_position.shape, num_prompts, context.position)

    def compute() -> mtf.Tensor:
      position = memory_position - num_prompts if num_prompts else memory_position
      return _relative_position(position, context.position)

    return context.cached(key, compute)

  def mask() -> mtf.Tensor | None:
    key = ("self_attention_mask", limits, *_sources(context))
    bias = context.cached(key, lambda: _mask(layer, context, relative_position, limits))
    if bias is None or not num_prompts:
      return bias
    # All positions see the prompts.
    return context.cached(
      ("self_attention_mask_with_prompts", num_prompts, bias),
      lambda: mtf.pad(bias, [num_prompts, 0], "memory_length"),
    )

  def with_relative_bias() -> mtf.Tensor:
    relative_bias = relative_attention_bias(layer, context, relative_position(), heads_dims, q)
    return relative_bias if mask() is None else relative_bias + mask()

  kind = layer.relative_attention_type
  if kind is None:
    return mask()
  if kind == "bias_shared":
    # The first layer's variable serves all layers of the stack.
    return context.cached(
      ("self_attention_bias", *limits, num_prompts, tuple(heads_dims), *_sources(context)),
      with_relative_bias,
    )
  return with_relative_bias()


def relative_attention_bias(
  layer: Any,
  context: Context,
  relative_position: mtf.Tensor,
  heads_dims: list[mtf.Dimension],
  q: mtf.Tensor,
) -> mtf.Tensor:
  """The bias of relative positions, of a layer that has one.

  Args:
    layer: the layer; its relative_attention_type is not None.
    context: a `Context`.
    relative_position: int32: memory position minus query position.
    heads_dims: dims of query heads.
    q: the queries.

  Returns:
    A tensor whose dims are among those of the products.

  Raises:
    ConfigError: an unknown relative_attention_type.
  """
  kind = layer.relative_attention_type
  if kind not in ("bias", "bias_shared", "contextual"):
    raise errors.ConfigError(
      f'{type(layer).__name__}.relative_attention_type must be None, "bias", "bias_shared" or '
      f'"contextual", got {kind!r}'
    )
  # With input_full_attention, inputs see later ones, too.
  bidirectional = not context.model.fully_autoregressive
  buckets_dim = mtf.Dimension("buckets", layer.relative_attention_num_buckets)
  bucket = context.cached(
    ("relative_position_bucket", relative_position, bidirectional, buckets_dim),
    lambda: relative_position_bucket(
      relative_position, bidirectional=bidirectional, num_buckets=buckets_dim.size
    ),
  )
  values = _relative_values(layer, context, heads_dims, buckets_dim, q)
  return _gather_bias(values, bucket, buckets_dim)


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
  layer: Any, context: Context, relative_position: Callable[[], mtf.Tensor], limits: _Limits
) -> mtf.Tensor | None:
  """-1e9 where attention is not allowed; None if it is allowed everywhere."""
  visible = []
  if limits.low is not None:
    near = mtf.greater_equal(relative_position(), limits.low)
    visible.append(_or_sinks(layer, context, near, limits.num_sinks))
  if limits.high is not None:
    visible.append(mtf.less_equal(relative_position(), limits.high))
  if context.read_priority is not None:
    write_priority = layer.rename_length_to_memory_length(context.write_priority, context)
    visible.append(
      mtf.greater_equal(
        context.read_priority,
        write_priority,
        output_shape=_joined(context.read_priority.shape, write_priority.shape),
      )
    )
  sequence_id = _segments(context)
  if sequence_id is not None and context.length_dim in sequence_id.shape:
    memory_id = layer.rename_length_to_memory_length(sequence_id, context)
    visible.append(
      mtf.equal(sequence_id, memory_id, output_shape=_joined(sequence_id.shape, memory_id.shape))
    )
  if not visible:
    return None
  # The largest shape first, so that the result has its order of dims.
  visible.sort(key=lambda v: -v.shape.ndims)
  all_visible = visible[0]
  for v in visible[1:]:
    all_visible = mtf.logical_and(all_visible, v)
  return visibility_mask_to_attention_bias(all_visible, context.activation_dtype)


def _or_sinks(layer: Any, context: Context, near: mtf.Tensor, num_sinks: int) -> mtf.Tensor:
  """Adds attention sinks to a mask: the first `num_sinks` positions of each sequence."""
  if not num_sinks:
    return near
  if context.mode == "incremental":
    position = mtf.range(context.mesh, layer.memory_length(context), tf.int32)
  else:
    # Packed sequences have first positions of their own; a funnel's shorter ones are not known.
    packed = context.packed_position
    if packed is not None and context.length_dim in packed.shape:
      position = packed
    else:
      position = context.position
    position = layer.rename_length_to_memory_length(position, context)
  sinks = mtf.less(position, num_sinks)
  return mtf.logical_or(near, sinks, output_shape=_joined(near.shape, sinks.shape))


def _relative_values(
  layer: Any,
  context: Context,
  heads_dims: list[mtf.Dimension],
  buckets_dim: mtf.Dimension,
  q: mtf.Tensor,
) -> mtf.Tensor:
  """The bias of each bucket: `[<heads_dims>, buckets]`, with the dims of q if contextual."""
  leading = context.model.ensemble_dims + heads_dims
  if layer.relative_attention_type == "contextual":
    return mtf.layers.dense(
      q,
      reduced_dims=[layer.kv_dim],
      new_dims=[buckets_dim],
      expert_dims=leading,
      use_bias=False,
      variable_dtype=context.variable_dtype,
      name="relative_attention_ak",
    )
  return mtf.get_variable(
    context.mesh,
    "relative_attention_bias",
    mtf.Shape(leading + [buckets_dim]),
    dtype=context.variable_dtype,
  )


def _segments(context: Context) -> mtf.Tensor | None:
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
    _segments(context),
  )


def _joined(query: mtf.Shape, memory: mtf.Shape) -> mtf.Shape:
  """Union of the dims of queries and memory, those of queries first."""
  return mtf.Shape(query.dims + [d for d in memory if d not in query])


def _relative_position(memory_position: mtf.Tensor, position: mtf.Tensor) -> mtf.Tensor:
  """Memory position minus query position."""
  shape = _joined(position.shape, memory_position.shape)
  return mtf.sub(memory_position, position, output_shape=shape)


def _gather_bias(values: mtf.Tensor, bucket: mtf.Tensor, buckets_dim: mtf.Dimension) -> mtf.Tensor:
  """Gathers the buckets' values, with dims ordered as in the logits: batch, heads, lengths."""
  dims = [d for d in bucket.shape if d not in values.shape]
  dims += [d for d in values.shape if d != buckets_dim]
  lengths = [d for name in ("length", "memory_length") for d in dims if d.name == name]
  shape = mtf.Shape([d for d in dims if d not in lengths] + lengths)
  return mtf.gather(values, bucket, buckets_dim, output_shape=shape)
