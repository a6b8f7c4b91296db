"""The variables of attention between vectors of the model's size."""

from __future__ import annotations

from typing import Any

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer.attention.params import AttentionParams
from mesh_tensorflow.transformer.models.context import Context


def attention_params(
  context: Context,
  kv_dim: mtf.Dimension,
  num_heads: int,
  num_memory_heads: int = 0,
  shared_kv: bool = False,
  no_query: bool = False,
  combine_dims: bool = True,
  keep_query_heads_dims: bool = False,
  fold_scaling_into_initializer: bool = True,
  *,
  initial_gain: float | None = None,
) -> AttentionParams:
  """The variables of attention between vectors of the model's size.

  Args:
    context: a `Context`.
    kv_dim: dimension of keys and values.
    num_heads: number of query heads.
    num_memory_heads: number of heads of keys and values; 0: as many as queries have.
    shared_kv: whether keys are the values.
    no_query: whether there is no variable `q`.
    combine_dims: whether the variables are matrices.
    keep_query_heads_dims: whether the output keeps the heads apart.
    fold_scaling_into_initializer: see `AttentionParams`.
    initial_gain: see `AttentionParams`.

  Returns:
    `AttentionParams`. One head has no dimension; the heads of queries are `heads`, or with fewer
    memory heads `heads` and `query_heads`.

  Raises:
    DimensionError: num_memory_heads does not divide num_heads.
  """
  return AttentionParams(
    **params_of_model(context, kv_dim, num_heads, num_memory_heads),
    shared_kv=shared_kv,
    no_query=no_query,
    combine_dims=combine_dims,
    keep_query_heads_dims=keep_query_heads_dims,
    fold_scaling_into_initializer=fold_scaling_into_initializer,
    initial_gain=initial_gain,
  )


def params_of_model(
  context: Context, kv_dim: mtf.Dimension, num_heads: int, num_memory_heads: int
) -> dict[str, Any]:
  """The arguments of `AttentionParams` that say where and of which dimensions the variables are.

  For its own arguments see `attention_params`.
  """
  model_dim = context.model.model_dim
  query_heads_dims, memory_heads_dims = attention_heads_dims(num_heads, num_memory_heads)
  return dict(
    mesh=context.mesh,
    query_input_dim=model_dim,
    memory_input_dim=model_dim,
    output_dim=model_dim,
    key_dim=kv_dim,
    value_dim=kv_dim,
    query_heads_dims=query_heads_dims,
    memory_heads_dims=memory_heads_dims,
    variable_dtype=context.variable_dtype,
    ensemble_dim=context.model.ensemble_dim,
  )


def attention_heads_dims(
  num_heads: int, num_memory_heads: int
) -> tuple[list[mtf.Dimension], list[mtf.Dimension]]:
  """The dimensions of heads of queries and of memory; see `attention_params`."""
  # Queries attend with the keys of the dimensions they share: `heads` of keys divided among
  # `query_heads` of queries makes groups without any copy of keys.
  if num_heads == 1:
    query_heads_dims = memory_heads_dims = []
  elif num_memory_heads == 0:
    query_heads_dims = memory_heads_dims = [mtf.Dimension("heads", num_heads)]
  elif num_memory_heads == 1:
    query_heads_dims, memory_heads_dims = [mtf.Dimension("heads", num_heads)], []
  else:
    if num_heads % num_memory_heads:
      raise errors.DimensionError(
        f"attention: num_memory_heads (={num_memory_heads}) must divide num_heads (={num_heads})"
      )
    memory_heads_dims = [mtf.Dimension("heads", num_memory_heads)]
    query_heads_dims = memory_heads_dims + [
      mtf.Dimension("query_heads", num_heads // num_memory_heads)
    ]
  return query_heads_dims, memory_heads_dims
