"""Self-attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.arguments.declared import (
  BELOW_ONE,
  COUNT,
  COUNT_OR_ZERO,
  affects,
  one_of,
  takes,
)
from mesh_tensorflow.transformer import attention
from mesh_tensorflow.transformer.layers.attention_bias import (
  length_to_memory_length,
  self_attention_bias,
)
from mesh_tensorflow.transformer.layers.model_attention_params import attention_params
from mesh_tensorflow.transformer.models.context import Context, TransformerLayer
from mesh_tensorflow.transformer.models.decoding_states import write_at


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
@affects(training="dropout_rate z_loss_coeff initial_gain")
@takes(
  num_heads=COUNT,
  num_memory_heads=COUNT_OR_ZERO,
  key_value_size=COUNT,
  dropout_rate=BELOW_ONE,
  relative_attention_num_buckets=COUNT,
  attention_func=one_of(["hybrid"]),
)
class SelfAttention(TransformerLayer):
  """Multi-head attention of a sequence to itself.

  Args:
    num_heads: number of query heads.
    num_memory_heads: number of heads of keys and values (1: multi-query, more: grouped-query
      attention); 0: as many as queries have.
    key_value_size: size of a key and of a value.
    shared_kv: whether keys are the values.
    dropout_rate: rate at which attention weights become 0 in training.
    attention_kwargs: dict of further arguments of `attention.attention`.
    relative_attention_type: None, "bias" (a bias for each head and bucket of relative
      positions), "bias_shared" (the same for all layers of a stack) or "contextual" (computed
      from the query).
    relative_attention_num_buckets: number of buckets.
    attention_func: None, or "hybrid".
    combine_dims: whether the variables are matrices.
    keep_query_heads_dims: whether the output keeps the heads apart.
    fold_scaling_into_initializer: see `attention.AttentionParams`.
    z_loss_coeff: see `attention.attention`.
    use_hyperprompt: whether the network that makes prompts is itself made, from embeddings of task
      and layer; see `attention.make_params_hyperprompt`, else `attention.make_params_mtlprompt`.
    hyperprompt_mtlshare: whether all tasks share that network.
    hyperprompt_length_encoder: number of trained prompts in front of the keys and values of layers
      in the scope `encoder`; None: none.
    hyperprompt_length_decoder: likewise of layers in the scope `decoder`.
    hyperprompt_hidden_dim: hidden size of the network that makes prompts.
    hyperprompt_task_num: number of tasks.
    initial_gain: see `attention.AttentionParams`; `@deepnorm_initial_gain()`, say.
  """

  # How many first positions of a sequence are seen from everywhere; see `GroupedQueryAttention`.
  num_sinks = 0

  def __init__(
    self,
    num_heads: int = 8,
    num_memory_heads: int = 0,
    key_value_size: int = 128,
    shared_kv: bool = False,
    dropout_rate: float = 0.0,
    attention_kwargs: dict[str, Any] | None = None,
    relative_attention_type: str | None = None,
    relative_attention_num_buckets: int = 32,
    attention_func: str | None = None,
    combine_dims: bool = True,
    keep_query_heads_dims: bool = False,
    fold_scaling_into_initializer: bool = True,
    z_loss_coeff: float | None = None,
    use_hyperprompt: bool = False,
    hyperprompt_mtlshare: bool = False,
    hyperprompt_length_encoder: int | None = None,
    hyperprompt_length_decoder: int | None = None,
    hyperprompt_hidden_dim: int | None = None,
    hyperprompt_task_num: int = 8,
    *,
    initial_gain: float | None = None,
  ):
    self.initial_gain = initial_gain
    self.num_heads = num_heads
    self.num_memory_heads = num_memory_heads
    self.key_value_size = key_value_size
    self.shared_kv = shared_kv
    self.dropout_rate = dropout_rate
    self.attention_kwargs = attention_kwargs or {}
    self.relative_attention_type = relative_attention_type
    self.relative_attention_num_buckets = relative_attention_num_buckets
    self.attention_func = attention_func
    self.combine_dims = combine_dims
    self.keep_query_heads_dims = keep_query_heads_dims
    self.fold_scaling_into_initializer = fold_scaling_into_initializer
    self.z_loss_coeff = z_loss_coeff
    self.use_hyperprompt = use_hyperprompt
    self.hyperprompt_mtlshare = hyperprompt_mtlshare
    self.hyperprompt_length_encoder = hyperprompt_length_encoder
    self.hyperprompt_length_decoder = hyperprompt_length_decoder
    self.hyperprompt_hidden_dim = hyperprompt_hidden_dim
    self.hyperprompt_task_num = hyperprompt_task_num

  # ------------------------------------------------------- hooks of subclasses

  def layer_output_from_attention_output(
    self, context: Context, attention_output: mtf.Tensor, losses: Any
  ) -> mtf.Tensor:
    """Maps the attention output to the layer's output: the identity; for subclasses to override."""
    del context, losses
    return attention_output

  def expected_attention_output_shape(
    self, x: mtf.Tensor, params: attention.AttentionParams
  ) -> mtf.Shape:
    """The dims of the output of attention."""
    if self.keep_query_heads_dims:
      return mtf.Shape(x.shape[:-1] + params.query_heads_dims + x.shape[-1:])
    return x.shape

  def attention_kwargs_from_context(self, context: Context) -> dict[str, Any]:
    """Further arguments of `attention`: dropout, whose mask all queries of a sequence share."""
    kwargs = dict(self.attention_kwargs)
    kwargs["dropout_rate"] = self.dropout_rate if context.train else 0.0
    kwargs.setdefault("dropout_broadcast_dims", [context.length_dim])
    return kwargs

  def make_params(self, context: Context) -> attention.AttentionParams:
    """Creates the variables, or finds them."""
    return attention_params(
      context=context,
      kv_dim=self.kv_dim,
      num_heads=self.num_heads,
      num_memory_heads=self.num_memory_heads,
      shared_kv=self.shared_kv,
      combine_dims=self.combine_dims,
      keep_query_heads_dims=self.keep_query_heads_dims,
      fold_scaling_into_initializer=self.fold_scaling_into_initializer,
      initial_gain=self.initial_gain,
    )

  def min_relative_position(self, context: Context) -> int | None:
    """The relative position of the leftmost memory that is seen, or None."""
    del context
    return None

  def max_relative_position(self, context: Context) -> int | None:
    """The relative position of the rightmost memory that is seen, or None."""
    del context
    return None

  def positioned(
    self, context: Context, q: mtf.Tensor, memory: list[mtf.Tensor]
  ) -> tuple[mtf.Tensor, list[mtf.Tensor]]:
    """Applies position encodings to queries and memory: none here; for subclasses to override.

    Args:
      context: a `Context`.
      q: the queries.
      memory: keys and values of the same positions, or one tensor that is both; the dimension of
        positions may be called `memory_length`.
    """
    del context
    return q, memory

  @property
  def kv_dim(self) -> mtf.Dimension:
    """The dimension of a key, and of a value."""
    return mtf.Dimension("d_kv", self.key_value_size)

  @property
  def attention_fn(self) -> Callable[..., mtf.Tensor]:
    """The attention function; has the signature of `attention.attention`."""
    return attention.hybrid_attention if self.attention_func == "hybrid" else attention.attention

  # ---------------------------------------------------------------- the layer

  def call(self, context: Context, x: mtf.Tensor, losses: Any = None) -> mtf.Tensor:
    """Attends; see `TransformerLayer.call`.

    The decoding states are keys and values `[<batch_dims>, memory_length, heads, d_kv]`; the order
    of the last dims that is given is kept.
    """
    params = self.make_params(context)
    q = params.compute_q(x)
    memory_length = self.memory_length(context)
    m = self.as_memory(context, x)
    if self.shared_kv:
      # One tensor for both: computed, cached and moved once.
      memory = [params.compute_kv(m)]
    else:
      memory = [params.compute_k(m), params.compute_v(m)]
    q, memory = self.positioned(context, q, memory)
    memory, memory_position = self.with_earlier(context, memory)
    num_prompts = self._num_prompts()
    if num_prompts:
      k, v, memory_position, memory_length = attention.concat_hyper_prompts_kv(
        memory[0],
        memory[-1],
        _first_scope(),
        self.use_hyperprompt,
        memory_length,
        self.hyperprompt_task_num,
        mtf.Shape(params.memory_heads_dims).size,
        self.hyperprompt_hidden_dim,
        self.kv_dim,
        context,
        self.hyperprompt_mtlshare,
        self.dropout_rate,
        num_prompts,
      )
      memory = [k, v]
    o = self.attention_fn(
      q,
      memory[0],
      memory[-1],
      context=context,
      memory_length_dim=memory_length,
      key_dim=self.kv_dim,
      value_dim=self.kv_dim,
      bias=self.compute_bias(
        context, memory_position, x, params.query_heads_dims, q, use_prompt_kv=bool(num_prompts)
      ),
      z_loss_coeff=self.z_loss_coeff,
      **self.attention_kwargs_from_context(context),
    )
    output = params.compute_output(o, output_shape=self.expected_attention_output_shape(x, params))
    return self.layer_output_from_attention_output(context, output, losses)

  def _num_prompts(self) -> int:
    """Number of prompts of a layer in the open variable scope."""
    lengths = {
      "encoder": self.hyperprompt_length_encoder,
      "decoder": self.hyperprompt_length_decoder,
    }
    return lengths.get(_first_scope()) or 0

  def memory_length(self, context: Context) -> mtf.Dimension:
    """The dimension of what is attended to."""
    return mtf.Dimension("memory_length", context.length_dim.size)

  def rename_length_to_memory_length(self, x: mtf.Tensor, context: Context) -> mtf.Tensor:
    """Calls the length dimension of x `memory_length`."""
    return length_to_memory_length(x, context, self.memory_length(context))

  def as_memory(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
    """The layer's input, as what keys and values are computed from."""
    # One position is not a sequence yet: `with_earlier` puts it among those before.
    return x if context.mode == "incremental" else self.rename_length_to_memory_length(x, context)

  def with_earlier(
    self, context: Context, memory: list[mtf.Tensor]
  ) -> tuple[list[mtf.Tensor], mtf.Tensor]:
    """Extends memory by the KV cache of earlier positions; returns it with its positions.

    In decoding the result is recorded as the layer's new states, its KV cache.

    Args:
      context: a `Context`.
      memory: tensors with dimension `memory_length`; without it in incremental decoding.

    Returns:
      (the tensors, with dimension `memory_length`; int32 positions along it).
    """
    incremental = context.mode == "incremental"
    memory_length = self.memory_length(context)
    if incremental:
      memory = [
        write_at(old, new, context.position, memory_length)
        for old, new in zip(context.get_states(len(memory)), memory)
      ]
    if incremental or context.mode == "first_part":
      context.record_new_states(memory)
    if incremental:
      return memory, mtf.range(context.mesh, memory_length, tf.int32)
    return memory, self.rename_length_to_memory_length(context.position, context)

  def compute_bias(
    self,
    context: Context,
    memory_position: mtf.Tensor,
    x: mtf.Tensor,
    heads_dims: list[mtf.Dimension],
    q: mtf.Tensor,
    use_prompt_kv: Any = None,
  ) -> mtf.Tensor | None:
    """Computes the bias of the attention logits.

    -1e9 where attention is not allowed, plus the relative bias.

    Args:
      context: a `Context`.
      memory_position: int32 tensor with dimension `memory_length`.
      x: the layer's input.
      heads_dims: dims of query heads.
      q: the queries.
      use_prompt_kv: whether memory begins with prompts.

    Returns:
      A tensor whose dims are among those of the products, or None.

    Raises:
      ConfigError: an unknown relative_attention_type.
    """
    del x
    num_prompts = self._num_prompts() if use_prompt_kv else 0
    return self_attention_bias(self, context, memory_position, heads_dims, q, num_prompts)


def _first_scope() -> str:
  """The first component of the open variable scope."""
  name: str = mtf.get_variable_scope().name
  return name.split("/")[0]
