"""Attention functions: of dot products, doubly normalized, synthetic.

They are composed of the same parts: logits (products of queries and keys, or tables), a soft cap,
a bias, and `attend`, which normalizes them and sums up the values. Masks and relative positions are
in `bias`, windows in `local`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.layers import us_einsum
from mesh_tensorflow.layers.attention import attend
from mesh_tensorflow.numerics.initializers import InitializerLike
from mesh_tensorflow.transformer.model.attention.sharding import (
  Replacement,
  replace_in,
  split_for_unused_axis,
)
from mesh_tensorflow.transformer.model.context import Context
from mesh_tensorflow.transformer.model.sequence_utils import first_positions

MODES = (
  "random",
  "factorized",
  "dense_minus",
  "random_plus",
  "random_plus_alpha",
  "dense_plus",
  "dense_plus_alpha",
)
# The tables of the modes in which `max_length` does not count have this many positions.
_FIXED_LENGTH = 512


def attention(
  q: mtf.Tensor,
  k: mtf.Tensor,
  v: mtf.Tensor,
  memory_length_dim: mtf.Dimension,
  key_dim: mtf.Dimension,
  value_dim: mtf.Dimension,
  bias: mtf.Tensor | None = None,
  dropout_rate: float = 0.0,
  dropout_broadcast_dims: Sequence[mtf.Dimension] | None = None,
  extra_logit: float | mtf.Tensor | None = None,
  context: Any = None,
  float32_logits: bool = True,
  z_loss_coeff: float | None = None,
  *,
  logit_soft_cap: float | None = None,
  sink_logits: mtf.Tensor | None = None,
) -> mtf.Tensor:
  """softmax(q k + bias) v (Vaswani et al., 2017).

  The products are not divided by sqrt(key_dim.size): see `AttentionParams`.

  Args:
    q: `[..., key_dim]`.
    k: `[..., memory_length_dim, key_dim]`; its other dims are among those of q.
    v: `[..., memory_length_dim, value_dim]`; its other dims are among those of q.
    memory_length_dim: the dimension of what is attended to.
    key_dim: the dimension of products.
    value_dim: the dimension of values.
    bias: added to the products; its dims are among theirs.
    dropout_rate: rate at which weights become 0; the caller says 0 outside training.
    dropout_broadcast_dims: dims along which weights share one dropout mask.
    extra_logit: a number or tensor: the logit of attending to nothing.
    context: a `Context`; needed for `z_loss_coeff`.
    float32_logits: whether products and softmax are computed in float32.
    z_loss_coeff: in training, coefficient of the mean square of the logarithm of the softmax's
      denominator, an auxiliary loss.
    logit_soft_cap: products become cap * tanh(product / cap), less than this, before the bias is
      added (Gemma Team, 2024; arXiv:2408.00118); None: they stay.
    sink_logits: of some dims of q, as its heads: exp of it is one more summand of the softmax's
      denominator, an `extra_logit` that is trained (OpenAI, 2025; arXiv:2508.10925). None: none.

  Returns:
    The dims of q without key_dim, then value_dim.
  """
  output_shape = whole_output_shape = q.shape - key_dim + value_dim
  replacement = split_for_unused_axis(context, q, k, v, bias, [key_dim, value_dim])
  if replacement is not None:
    k_is_v = k is v
    q, k = replace_in(q, replacement), replace_in(k, replacement)
    bias = None if bias is None else replace_in(bias, replacement)
    v = k if k_is_v else replace_in(v, replacement)
    output_shape = q.shape - key_dim + value_dim
    sink_logits = replace_in(sink_logits, replacement)
    if isinstance(extra_logit, mtf.Tensor):
      extra_logit = replace_in(extra_logit, replacement)
  if float32_logits:  # A softmax makes factors of rounding errors of its logits.
    k = mtf.cast(k, tf.float32)
    q = mtf.cast(q, tf.float32)
  shared = [d for d in q.shape if d in k.shape and d != key_dim]
  queries = [d for d in q.shape if d not in k.shape]
  memory = [d for d in k.shape if d not in q.shape]
  if queries:
    # As matrices [shared dims, rows, columns], forward and backward are batched matrix
    # multiplications without further transpositions. One query is no matrix: in incremental
    # decoding the cached keys and values are read as they are.
    q = transposed(q, shared + queries + [key_dim])
    if k.shape.dims != shared + [key_dim] + memory:  # As the product takes it, too.
      k = transposed(k, shared + memory + [key_dim])
    v = transposed(v, [d for d in shared if d in v.shape] + memory + [value_dim])
  logits = products(q, k, mtf.Shape(shared + queries + memory), key_dim)
  if logit_soft_cap is not None:  # Before the bias, of whose -1e9 it would make -logit_soft_cap.
    logits = mtf.tanh(logits * (1.0 / logit_soft_cap)) * logit_soft_cap
  logits = plus_bias(logits, bias)
  if z_loss_coeff is not None and context.train:
    _add_z_loss(logits, memory_length_dim, context, z_loss_coeff, v.dtype, replacement)
  outputs = attend(
    logits,
    v,
    mtf.Shape(shared + queries + [value_dim]),
    normalize=softmax_over(memory_length_dim, extra_logit),
    dropout=dropout_of_weights(dropout_rate, dropout_broadcast_dims, replacement),
    weights_dtype=v.dtype,
  )
  if sink_logits is not None:
    outputs *= mtf.cast(_share_of_memory(logits, memory_length_dim, sink_logits), outputs.dtype)
  outputs = transposed(outputs, output_shape.dims)
  return outputs if replacement is None else mtf.reshape(outputs, whole_output_shape)


def products(q: mtf.Tensor, k: mtf.Tensor, shape: mtf.Shape, key_dim: mtf.Dimension) -> mtf.Tensor:
  """Logits of the given dims: dot products of queries and keys."""
  logits: mtf.Tensor = us_einsum([q, k], output_shape=shape, reduced_dims=[key_dim])
  return logits


def plus_bias(logits: mtf.Tensor, bias: mtf.Tensor | None) -> mtf.Tensor:
  """Logits with a bias, whose dims are among theirs, added."""
  return logits if bias is None else logits + mtf.cast(bias, logits.dtype)


def softmax_over(
  memory_length: mtf.Dimension, extra_logit: float | mtf.Tensor | None = None
) -> Callable[[mtf.Tensor], mtf.Tensor]:
  """The usual normalization of `attend`."""
  return functools.partial(mtf.softmax, reduced_dim=memory_length, extra_logit=extra_logit)


def _share_of_memory(
  logits: mtf.Tensor, memory_length_dim: mtf.Dimension, sink_logits: mtf.Tensor
) -> mtf.Tensor:
  """Share of the attention weights that memory gets: Z / (Z + exp(sink)), Z = sum exp(logits).

  No gradient flows to an extra logit of `mtf.softmax` (it never did), so it is taken here. Weights
  are multiplied by it after they are summed up: outputs have fewer elements.
  """
  log_z = mtf.reduce_logsumexp(logits, memory_length_dim)
  return mtf.sigmoid(mtf.sub(log_z, mtf.cast(sink_logits, log_z.dtype), output_shape=log_z.shape))


def dropout_of_weights(
  rate: float,
  broadcast_dims: Sequence[mtf.Dimension] | None,
  replacement: Replacement | None = None,
) -> Callable[[mtf.Tensor], mtf.Tensor] | None:
  """Dropout of attention weights, for `attend`; None at rate 0.

  Args:
    rate: rate at which weights become 0.
    broadcast_dims: dims along which weights share one mask; those that weights lack do not count.
    replacement: what was done to the dims, if `broadcast_dims` are those before it.
  """
  if not rate:
    return None
  shared = list(broadcast_dims or [])

  def drop(weights: mtf.Tensor) -> mtf.Tensor:
    if replacement is None:
      return mtf.dropout(weights, is_training=True, rate=rate, noise_shape=weights.shape - shared)
    # Random numbers depend on the dims they are drawn for: as for the layouts that replace none.
    whole, parts = replacement
    dims = [whole if d == parts[0] else d for d in weights.shape if d != parts[1]]
    ones = mtf.ones(weights.mesh, mtf.Shape(dims) - shared, weights.dtype)
    return weights * replace_in(mtf.dropout(ones, is_training=True, rate=rate), replacement)

  return drop


def transposed(x: mtf.Tensor, dims: list[mtf.Dimension]) -> mtf.Tensor:
  """Transposes x to the given order of dims; x itself if it has it."""
  return x if x.shape.dims == dims else mtf.transpose(x, mtf.Shape(dims))


def _add_z_loss(
  logits: mtf.Tensor,
  memory_length_dim: mtf.Dimension,
  context: Context,
  coefficient: float,
  dtype: tf.DType,
  replacement: Replacement | None,
) -> None:
  """Appends the z-loss of attention to `context.losses`."""
  if context.losses is None:
    return
  # Of what is masked exp(-1e9) is 0: only what is seen counts.
  log_z = mtf.reduce_logsumexp(logits, memory_length_dim)
  z_loss = mtf.square(log_z)
  if isinstance(context.nonpadding, mtf.Tensor):
    z_loss *= mtf.cast(replace_in(context.nonpadding, replacement), z_loss.dtype)
  z_loss = mtf.reduce_mean(z_loss)
  if context.num_microbatches and context.num_microbatches > 1:
    z_loss *= 1.0 / context.num_microbatches
  mtf.scalar_summary("attention_z_loss", z_loss)
  # Of the dtype of the activations, as the losses of other layers are that it is added to.
  context.losses.append(mtf.cast(z_loss * coefficient, dtype))


def hybrid_attention(
  q: mtf.Tensor,
  k: mtf.Tensor,
  v: mtf.Tensor,
  context: Context,
  memory_length_dim: mtf.Dimension,
  key_dim: mtf.Dimension,
  value_dim: mtf.Dimension,
  bias: mtf.Tensor | None = None,
  dropout_rate: float = 0.0,
  dropout_broadcast_dims: Sequence[mtf.Dimension] | None = None,
  extra_logit: float | mtf.Tensor | None = None,
  *,
  z_loss_coeff: float | None = None,
) -> mtf.Tensor:
  """Doubly normalized attention (Ding et al., 2020) mixed with the usual one.

  The weights are c softmax(log_softmax(logits over queries) over memory) + (1 - c) softmax(logits
  over memory). Variable: `doubly_coeff` [], whose value, limited to [0, 1], is c.

  Arguments are those of `attention`; memory_length_dim is as long as q's dimension `length`, and
  z_loss_coeff is not used, but taken because layers pass it to any attention function.

  Returns:
    The dims of q without key_dim, then value_dim.

  Raises:
    UnsupportedError: q has no dimension `length` of the size of memory_length_dim: in decoding one
      position at a time there are no other queries to normalize over.
  """
  del z_loss_coeff
  query_length = mtf.Dimension("length", memory_length_dim.size)
  if query_length not in q.shape:
    raise errors.UnsupportedError(
      f"hybrid_attention: the queries {q} need the dimension length={memory_length_dim.size}, over "
      "which weights are normalized too; it cannot decode one position at a time"
    )
  shared = [d for d in q.shape if d in k.shape and d != key_dim]
  queries = [d for d in q.shape if d not in k.shape]
  logits = plus_bias(
    products(q, k, mtf.Shape(shared + queries + [memory_length_dim]), key_dim), bias
  )
  coefficient = _variable(context, "doubly_coeff", [], tf.constant_initializer(0.5))
  # Limited, not a sigmoid: checkpoints hold the coefficient itself. Outside it has no gradient.
  coefficient = mtf.cast(mtf.maximum(mtf.minimum(coefficient, 1.0), 0.0), logits.dtype)
  softmax = softmax_over(memory_length_dim, extra_logit)

  def normalize(logits: mtf.Tensor) -> mtf.Tensor:
    upper = softmax(logits)
    # The inner one normalizes over queries, the outer one over memory; between them logarithms, so
    # that no exponential overflows.
    doubly = softmax(mtf.log_softmax(logits, query_length))
    # c doubly + (1 - c) upper, with one product less.
    return upper + (doubly - upper) * coefficient

  return attend(
    logits,
    v,
    q.shape - key_dim + value_dim,
    normalize=normalize,
    dropout=dropout_of_weights(dropout_rate, dropout_broadcast_dims),
    weights_dtype=v.dtype,
  )


def synthetic_attention(
  q: mtf.Tensor,
  k: mtf.Tensor,
  v: mtf.Tensor,
  memory_length_dim: mtf.Dimension,
  key_dim: mtf.Dimension,
  value_dim: mtf.Dimension,
  bias: mtf.Tensor | None = None,
  dropout_rate: float = 0.0,
  dropout_broadcast_dims: Sequence[mtf.Dimension] | None = None,
  extra_logit: float | mtf.Tensor | None = None,
  synthesize: bool = True,
  synthesize_mode: str = "random_plus_alpha",
  factorized_dim: int = 16,
  max_length: int = 512,
  context: Any = None,
) -> mtf.Tensor:
  """Attention with synthetic logits.

  Modes: "random": a trained table, variable `R` [length, heads, memory_length]; "factorized": the
  product of `R1` and `R2` [tmp, heads, memory_length], the same for all queries; "dense_minus": a
  dense layer `pi/kernel` [key_dim, memory_length] of relu(q); "random_plus" and "dense_plus": those
  added to the products of queries and keys; "random_plus_alpha" and "dense_plus_alpha": mixed with
  them, (1 - a) products + a synthetic, a = sigmoid of the variable `alpha`. The tables are for
  `max_length` positions in "random" and "dense_minus", else for 512.

  Args:
    q: queries `[..., key_dim]`; in "random" and "factorized" any tensor, of which only the dims
      before the last count.
    k: keys, used in the modes with "plus".
    v: `[..., memory_length_dim, <heads>, value_dim]`.
    memory_length_dim: the dimension of what is attended to.
    key_dim: the dimension of products.
    value_dim: the dimension of values.
    bias: added to the logits.
    dropout_rate: rate at which weights become 0; the caller says 0 outside training.
    dropout_broadcast_dims: dims along which weights share one dropout mask.
    extra_logit: a number or tensor: the logit of attending to nothing.
    synthesize: must be true.
    synthesize_mode: one of the above.
    factorized_dim: size of `tmp`.
    max_length: number of positions of the tables.
    context: a `Context`.

  Returns:
    The dims of q without the last, then heads if q has none, then value_dim.

  Raises:
    ConfigError: the mode is not known, or synthesize is false.
    ShapeError: there are more positions than the tables have.
  """
  if not synthesize or synthesize_mode not in MODES:
    raise errors.ConfigError(
      f"synthetic_attention: synthesize_mode must be one of {', '.join(MODES)}, and synthesize "
      f"must be true; got {synthesize_mode!r}, {synthesize!r}"
    )
  with_products = "plus" in synthesize_mode
  heads = [d for d in (q if with_products else v).shape if d.name in ("heads", "query_heads")]
  output_shape = mtf.Shape(q.shape.dims[:-1] + [d for d in heads if d not in q.shape] + [value_dim])
  table_length = max_length if synthesize_mode in ("random", "dense_minus") else _FIXED_LENGTH
  _check_lengths(synthesize_mode, table_length, [memory_length_dim, context.length_dim])
  if synthesize_mode.startswith("random"):
    logits = _table(context, heads, table_length, memory_length_dim, q)
  elif synthesize_mode == "factorized":
    logits = _product_of_tables(context, heads, factorized_dim, memory_length_dim)
  else:
    logits = _dense(q, key_dim, table_length, memory_length_dim)
  if with_products:
    order = mtf.Shape([d for d in q.shape if d != key_dim] + [memory_length_dim])
    dot_products = products(q, k, order, key_dim)
    logits = mtf.cast(logits, dot_products.dtype)
    logits = _mixed(context, dot_products, logits, synthesize_mode)
  return attend(
    plus_bias(logits, bias),
    v,
    output_shape,
    normalize=softmax_over(memory_length_dim, extra_logit),
    dropout=dropout_of_weights(dropout_rate, dropout_broadcast_dims),
    weights_dtype=v.dtype,
  )


def _check_lengths(mode: str, table_length: int, dims: list[mtf.Dimension]) -> None:
  """Raises ShapeError if a dimension of positions is longer than the tables."""
  for d in dims:
    if d.size > table_length:
      raise errors.ShapeError(
        f"synthetic_attention {mode}: {d.name}={d.size} is longer than the tables of "
        f"synthetic logits, which have {table_length} positions; shorten the sequences"
      )


def _table(
  context: Context,
  heads: list[mtf.Dimension],
  table_length: int,
  memory_length: mtf.Dimension,
  q: mtf.Tensor,
) -> mtf.Tensor:
  """The rows of the table `R` for the queries: `[<query dims>, heads, memory_length]`."""
  length = mtf.Dimension("length", table_length)
  dims = [length, *heads, mtf.Dimension("memory_length", table_length)]
  table = first_positions(_variable(context, "R", dims), "memory_length", memory_length.size)
  # A row of the table belongs to a position of the queries, of which there is one.
  if context.mode == "incremental":
    return mtf.gather(table, context.position, length)
  (query_length,) = [d for d in q.shape if d == context.length_dim]
  return first_positions(table, "length", query_length.size)


def _product_of_tables(
  context: Context, heads: list[mtf.Dimension], factorized_dim: int, memory_length: mtf.Dimension
) -> mtf.Tensor:
  """The product of the tables `R1` and `R2`: `[heads, memory_length]`."""
  tmp = mtf.Dimension("tmp", factorized_dim)
  dims = [tmp, *heads, mtf.Dimension("memory_length", _FIXED_LENGTH)]
  factors = [
    first_positions(_variable(context, name, dims), "memory_length", memory_length.size)
    for name in ("R1", "R2")
  ]
  return mtf.einsum(factors, output_shape=mtf.Shape([*heads, memory_length]))


def _dense(
  q: mtf.Tensor, key_dim: mtf.Dimension, table_length: int, memory_length: mtf.Dimension
) -> mtf.Tensor:
  """A dense layer of relu(q): `[<dims of q but key_dim>, memory_length]`."""
  dims = [mtf.Dimension("memory_length", table_length)]
  kernel = mtf.layers.get_dense_kernel_weights(q, dims, [key_dim], [], None, name="pi")
  # The kernel is as long as the table, whatever the sequence: checkpoints fit all lengths.
  kernel = first_positions(kernel, "memory_length", memory_length.size)
  return us_einsum([mtf.relu(q), kernel], reduced_dims=[key_dim])


def _mixed(
  context: Context, products: mtf.Tensor, synthetic: mtf.Tensor, synthesize_mode: str
) -> mtf.Tensor:
  """Sum or mixture, of the dims of the products."""
  if not synthesize_mode.endswith("alpha"):
    return mtf.add(products, synthetic, output_shape=products.shape)
  dims = [mtf.Dimension("alpha", 1)]
  alpha = mtf.reshape(_variable(context, "alpha", dims, tf.zeros_initializer()), [])
  alpha = mtf.cast(mtf.sigmoid(alpha), products.dtype)
  # (1 - a) products + a synthetic, with one multiplication of large tensors less.
  difference = mtf.sub(synthetic, products, output_shape=products.shape)
  return products + difference * alpha


def _variable(
  context: Context, name: str, dims: list[mtf.Dimension], initializer: InitializerLike = None
) -> mtf.Tensor:
  return mtf.get_variable(
    context.mesh, name, mtf.Shape(dims), dtype=context.variable_dtype, initializer=initializer
  )
