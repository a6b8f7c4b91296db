"""Attention whose weights are not, or not only, made from queries and keys (Tay et al., 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.layers import us_einsum
from mesh_tensorflow.transformer.attention.dot_product import weights_dropout
from mesh_tensorflow.transformer.models.sequence_utils import first_positions

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
  extra_logit: Any = None,
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
    products = us_einsum([q, k], output_shape=order, reduced_dims=[key_dim])
    logits = _mixed(context, products, mtf.cast(logits, products.dtype), synthesize_mode)
  if bias is not None:
    logits += mtf.cast(bias, logits.dtype)
  weights = mtf.softmax(logits, memory_length_dim, extra_logit=extra_logit)
  weights = weights_dropout(mtf.cast(weights, v.dtype), dropout_rate, dropout_broadcast_dims)
  return mtf.einsum([weights, v], output_shape=output_shape)


def _check_lengths(mode: str, table_length: int, dims: list[mtf.Dimension]) -> None:
  """Raises ShapeError if a dimension of positions is longer than the tables."""
  for d in dims:
    if d.size > table_length:
      raise errors.ShapeError(
        f"synthetic_attention {mode}: {d.name}={d.size} is longer than the tables of "
        f"synthetic logits, which have {table_length} positions; shorten the sequences"
      )


def _table(
  context: Any,
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
  context: Any, heads: list[mtf.Dimension], factorized_dim: int, memory_length: mtf.Dimension
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
  context: Any, products: mtf.Tensor, synthetic: mtf.Tensor, synthesize_mode: str
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
  context: Any, name: str, dims: list[mtf.Dimension], initializer: Any = None
) -> mtf.Tensor:
  return mtf.get_variable(
    context.mesh, name, mtf.Shape(dims), dtype=context.variable_dtype, initializer=initializer
  )
