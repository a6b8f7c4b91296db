"""Kinds of attention that replace a part: branches, experts, synthetic weights, talking heads.

Each is `SelfAttention` with other variables, another attention function or another output, and with
`AttendsToEncoder` before it attention to an encoder.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import (
  ABOVE_ZERO,
  BELOW_ONE,
  COUNT,
  COUNT_OR_ZERO,
  affects,
  one_of,
  takes,
)
from mesh_tensorflow.layers import VarianceScalingInitializer, unit_scaling_convention, us_einsum
from mesh_tensorflow.layers.attention import attend
from mesh_tensorflow.layers.dense import Activation
from mesh_tensorflow.numerics.initializers import InitializerLike
from mesh_tensorflow.transformer.model import attention
from mesh_tensorflow.transformer.model.attention.functions import (
  dropout_of_weights,
  plus_bias,
  products,
)
from mesh_tensorflow.transformer.model.attention.params import params_of_model
from mesh_tensorflow.transformer.model.context import Context
from mesh_tensorflow.transformer.model.dropout import dropout_broadcast_dims
from mesh_tensorflow.transformer.model.layers.dense_relu_dense import DenseReluDense
from mesh_tensorflow.transformer.model.layers.enc_dec_attention import (
  AttendsToEncoder,
  enc_dec_attention_bias,
  encoder_memory,
)
from mesh_tensorflow.transformer.model.layers.self_attention import SelfAttention
from mesh_tensorflow.transformer.model.moe.hparams import HParams
from mesh_tensorflow.transformer.model.moe.router import refuse_noncausal

_MODULE = "mesh_tensorflow.transformer.transformer_layers"
_Heads = Sequence[tuple[str, int]]
_PROJECTIONS = ("x2l", "m2l", "x2w", "m2w")


@gin.configurable(module=_MODULE)
class BranchedSelfAttention(SelfAttention):
  """Self-attention with a branch for each head: sum of alpha * feed_forward(kappa * head).

  Variables besides those of attention and feed-forward layer: `kappa` [heads], `alpha` [heads].

  Args:
    **kwargs: arguments of `SelfAttention`; combine_dims is False and keep_query_heads_dims True.

  Raises:
    ConfigError: num_memory_heads is given.
  """

  def __init__(self, **kwargs: Any):
    # The heads stay apart through the output projection: they are the branches.
    super().__init__(**(kwargs | dict(combine_dims=False, keep_query_heads_dims=True)))
    if self.num_memory_heads != 0:
      raise errors.ConfigError(
        f"{type(self).__name__}: num_memory_heads must be 0, got {self.num_memory_heads}; each "
        "branch has its own keys and values"
      )
    self.dense_layer = DenseReluDense()

  def layer_output_from_attention_output(
    self, context: Context, attention_output: mtf.Tensor, losses: list[mtf.Tensor] | None
  ) -> mtf.Tensor:
    """The sum of the branches.

    Args:
      context: a `Context`.
      attention_output: `[..., heads, d_model]`.
      losses: see `TransformerLayer.call`.

    Returns:
      `[..., d_model]`.
    """
    # One head has no dimension in the variables of attention.
    heads = mtf.Dimension("heads", self.num_heads)
    kappa, alpha = (
      mtf.get_variable(
        context.mesh,
        name,
        mtf.Shape([heads]),
        dtype=context.variable_dtype,
        initializer=tf.random_uniform_initializer(minval=0.0, maxval=1.0),
      )
      for name in ("kappa", "alpha")
    )
    o = mtf.einsum([attention_output, kappa], output_shape=attention_output.shape)
    o = self.dense_layer.call(context, o, losses)
    return mtf.einsum([o, alpha], output_shape=o.shape - heads)


@gin.configurable(module=_MODULE)
class BranchedEncDecAttention(AttendsToEncoder, BranchedSelfAttention):
  """Attention of a decoder to an encoder's output, with a branch for each head.

  Args:
    relative_attention_type: None, "bias" or "bias_shared"; see `enc_dec_attention_bias`.
    **kwargs: arguments of `BranchedSelfAttention`.
  """


@gin.configurable(module=_MODULE)
@affects(
  training="loss_coef capacity_factor_train switch_policy_train switch_dropout switch_jitter z_loss"
)
@takes(
  num_experts=COUNT,
  group_size=COUNT,
  capacity_factor_train=ABOVE_ZERO,
  capacity_factor_eval=ABOVE_ZERO,
  switch_dropout=BELOW_ONE,
  switch_temperature=ABOVE_ZERO,
  ntlb_top_k=COUNT,
  hidden_size=COUNT,
)
class ExpertsSelfAttention(SelfAttention):
  """Self-attention with experts that compute queries, or keys, or both.

  Args:
    num_experts: see `MoE1D`; likewise all up to z_loss.
    loss_coef: see `MoE1D`.
    group_size: see `MoE1D`.
    capacity_factor_train: see `MoE1D`.
    capacity_factor_eval: see `MoE1D`.
    moe_gating: see `MoE1D`.
    min_expert_capacity: see `MoE1D`.
    switch_policy_train: see `MoE1D`.
    switch_policy_eval: see `MoE1D`.
    switch_dropout: see `MoE1D`.
    switch_temperature: see `MoE1D`.
    switch_jitter: see `MoE1D`.
    ntlb_top_k: see `MoE1D`.
    hidden_size: see `MoE1D`.
    activation: see `MoE1D`.
    z_loss: see `MoE1D`.
    expert_computation: "qkv", "q" or "kv"; see `attention.ExpertsAttentionParams`.
    allow_noncausal: see `MoE1D`.
    **kwargs: arguments of `SelfAttention`; shared_kv must be True.
  """

  def __init__(
    self,
    num_experts: int = 16,
    loss_coef: float = 1e-2,
    group_size: int = 1024,
    capacity_factor_train: float = 1.25,
    capacity_factor_eval: float = 2.0,
    moe_gating: str = "switch",
    min_expert_capacity: int = 4,
    switch_policy_train: str = "input_jitter",
    switch_policy_eval: str = "input_jitter",
    switch_dropout: float = 0.0,
    switch_temperature: float = 1.0,
    switch_jitter: float = 1e-2,
    ntlb_top_k: int = 4,
    hidden_size: int = 3072,
    activation: Activation = "relu",
    z_loss: float | None = None,
    expert_computation: str = "qkv",
    *,
    allow_noncausal: bool = False,
    **kwargs: Any,
  ):
    super().__init__(**kwargs)
    self._hparams = HParams(
      num_experts=num_experts,
      loss_coef=loss_coef,
      group_size=group_size,
      capacity_factor_train=capacity_factor_train,
      capacity_factor_eval=capacity_factor_eval,
      moe_gating=moe_gating,
      allow_noncausal=allow_noncausal,
      min_expert_capacity=min_expert_capacity,
      switch_policy_train=switch_policy_train,
      switch_policy_eval=switch_policy_eval,
      switch_dropout=switch_dropout,
      switch_temperature=switch_temperature,
      switch_jitter=switch_jitter,
      ntlb_top_k=ntlb_top_k,
      hidden_size=hidden_size,
      activation=activation,
      z_loss=z_loss,
    )
    self.expert_computation = expert_computation
    self.moe_gating = moe_gating
    self.allow_noncausal = allow_noncausal

  # Whether what is attended to is the sequence of the queries.
  _memory_is_input = True

  def make_params(self, context: Context) -> attention.ExpertsAttentionParams:
    """Creates the variables, or finds them."""
    refuse_noncausal(self, self.moe_gating, self.allow_noncausal, context.model)
    return attention.ExpertsAttentionParams(
      **params_of_model(context, self.kv_dim, self.num_heads, self.num_memory_heads),
      shared_kv=self.shared_kv,
      combine_dims=self.combine_dims,
      keep_query_heads_dims=self.keep_query_heads_dims,
      fold_scaling_into_initializer=self.fold_scaling_into_initializer,
      context=context,
      experts_hparams=self._hparams,
      expert_computation=self.expert_computation,
      memory_is_input=self._memory_is_input,
    )


@gin.configurable(module=_MODULE)
class ExpertsEncDecAttention(AttendsToEncoder, ExpertsSelfAttention):
  """Attention of a decoder to an encoder's output, with experts.

  Keys that experts compute are made from the encoder's output, by the experts of the queries.

  Args:
    relative_attention_type: None, "bias" or "bias_shared"; see `enc_dec_attention_bias`.
    **kwargs: arguments of `ExpertsSelfAttention`.
  """

  _memory_is_input = False


@gin.configurable(module=_MODULE)
@affects(training="dropout_rate")
@takes(
  num_heads=COUNT,
  num_memory_heads=COUNT_OR_ZERO,
  key_value_size=COUNT,
  dropout_rate=BELOW_ONE,
  relative_attention_num_buckets=COUNT,
  attention_func=one_of(["hybrid"]),
)
class Synthesizer(SelfAttention):
  """Self-attention whose weights are not, or not only, made from queries and keys.

  The mode decides which variables there are: with "plus" queries, keys and values; "dense_minus"
  has queries, and keys that are values; the others have no queries. The decoding states are always
  two, keys and values.

  Args:
    num_heads: see `SelfAttention`.
    num_memory_heads: see `SelfAttention`.
    key_value_size: see `SelfAttention`.
    shared_kv: not used: the mode decides.
    dropout_rate: see `SelfAttention`.
    attention_kwargs: dict of further arguments of `attention.synthetic_attention`.
    relative_attention_type: see `SelfAttention`.
    relative_attention_num_buckets: see `SelfAttention`.
    attention_func: not used.
    combine_dims: not used: variables are matrices.
    keep_query_heads_dims: not used.
    synthesize_mode: see `attention.synthetic_attention`.
    fold_scaling_into_initializer: see `SelfAttention`.
    **kwargs: further arguments of `SelfAttention`.
  """

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
    synthesize_mode: str = "random_plus_alpha",
    fold_scaling_into_initializer: bool = True,
    **kwargs: Any,
  ):
    del shared_kv, combine_dims, keep_query_heads_dims
    # All is given, so that bindings of SelfAttention do not hold for these.
    super().__init__(
      num_heads=num_heads,
      num_memory_heads=num_memory_heads,
      key_value_size=key_value_size,
      shared_kv="plus" not in synthesize_mode,
      dropout_rate=dropout_rate,
      attention_kwargs=attention_kwargs,
      relative_attention_type=relative_attention_type,
      relative_attention_num_buckets=relative_attention_num_buckets,
      attention_func=attention_func,
      combine_dims=True,
      keep_query_heads_dims=False,
      fold_scaling_into_initializer=fold_scaling_into_initializer,
      **kwargs,
    )
    self.synthesize_mode = synthesize_mode
    self.no_query = "plus" not in synthesize_mode and "minus" not in synthesize_mode
    # Neither counts here: projections start as they do without a gain, and there are no prompts.
    self.initial_gain = None
    self.hyperprompt_length_encoder = self.hyperprompt_length_decoder = None

  def projected(
    self, context: Context, x: mtf.Tensor, params: attention.AttentionParams
  ) -> tuple[mtf.Tensor, list[mtf.Tensor]]:
    """Queries, keys and values; without queries only the dims of x count."""
    memory = params.keys_and_values(self.as_memory(context, x))
    # Two states in any mode, as programs that hold states of this layer count on.
    return x if self.no_query else params.compute_q(x), [memory[0], memory[-1]]

  def attend(
    self,
    context: Context,
    q: mtf.Tensor,
    memory: list[mtf.Tensor],
    memory_length: mtf.Dimension,
    bias: mtf.Tensor | None,
  ) -> mtf.Tensor:
    """Calls `attention.synthetic_attention`."""
    return attention.synthetic_attention(
      q,
      memory[0],
      memory[-1],
      memory_length,
      self.kv_dim,
      self.kv_dim,
      bias=bias,
      synthesize_mode=self.synthesize_mode,
      context=context,
      **self.attention_kwargs_from_context(context),
    )


@gin.configurable(module=_MODULE)
@affects(training="dropout_rate dynamic_projections_init_scale")
@takes(
  key_size=COUNT, value_size=COUNT, dropout_rate=BELOW_ONE, relative_attention_num_buckets=COUNT
)
class TalkingHeadsSelfAttention(SelfAttention):
  """Self-attention with projections between heads, before and after the softmax.

  Variables: `q/kernel`, `k/kernel` [d_model, <key heads>, d_k]; `v/kernel` [d_model, <value heads>,
  d_v]; `y/kernel` [<value heads>, d_v, d_model]; `logits/kernel` and `weights/kernel`, between the
  heads, where they differ. The decoding states are keys and values, `[<batch_dims>, memory_length,
  <heads>, d_k or d_v]`, and with "m2l" or "m2w" the inputs `[<batch_dims>, memory_length,
  d_model]`.

  Args:
    key_heads_dims: (name, size) pairs: heads of queries and keys.
    softmax_heads_dims: heads of the softmax.
    value_heads_dims: heads of values.
    key_size: size of a key.
    value_size: size of a value.
    dropout_rate: rate at which attention weights become 0 in training.
    relative_attention_type: None, "bias" or "bias_shared"; see `SelfAttention`.
    relative_attention_num_buckets: see `SelfAttention`.
    dynamic_projections: some of "x2l", "m2l", "x2w", "m2w": what the projections between heads
      are computed from besides, the query's input (x) or the memory's (m), and which one, of the
      logits (l) or of the weights (w).
    dynamic_projections_init_scale: the initial scale of those.

  Raises:
    ConfigError: relative_attention_type or a dynamic projection is not known.
  """

  def __init__(
    self,
    key_heads_dims: _Heads = (("heads", 12),),
    softmax_heads_dims: _Heads = (("heads", 12),),
    value_heads_dims: _Heads = (("heads", 12),),
    key_size: int = 64,
    value_size: int = 64,
    dropout_rate: float = 0.0,
    relative_attention_type: str | None = None,
    relative_attention_num_buckets: int = 32,
    dynamic_projections: Sequence[str] | None = None,
    dynamic_projections_init_scale: float = 1e-2,
  ):
    # The arguments of SelfAttention and their bindings do not hold here.
    check_relative_attention_type(self, relative_attention_type)
    self.key_heads_dims = [mtf.Dimension(*d) for d in key_heads_dims]
    self.softmax_heads_dims = [mtf.Dimension(*d) for d in softmax_heads_dims]
    self.value_heads_dims = [mtf.Dimension(*d) for d in value_heads_dims]
    self.key_dim = mtf.Dimension("d_k", key_size)
    self.value_dim = mtf.Dimension("d_v", value_size)
    self.dropout_rate = dropout_rate
    self.relative_attention_type = relative_attention_type
    self.relative_attention_num_buckets = relative_attention_num_buckets
    self.dynamic_projections = list(dynamic_projections or [])
    self.dynamic_projections_init_scale = dynamic_projections_init_scale
    for name in self.dynamic_projections:
      if name not in _PROJECTIONS:
        raise errors.ConfigError(
          f"{type(self).__name__}.dynamic_projections must be some of {', '.join(_PROJECTIONS)}, "
          f"got {name!r}"
        )

  def _dense(
    self,
    context: Context,
    x: mtf.Tensor,
    reduced_dims: list[mtf.Dimension],
    new_dims: list[mtf.Dimension],
    name: str,
    initializer: InitializerLike = None,
  ) -> mtf.Tensor:
    return mtf.layers.dense(
      x,
      new_dims,
      reduced_dims=reduced_dims,
      expert_dims=context.model.ensemble_dims,
      use_bias=False,
      variable_dtype=context.variable_dtype,
      kernel_initializer=initializer,
      name=name,
    )

  def compute_q(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
    """Queries `[..., <key heads>, d_k]` of x, `[..., d_model]`."""
    # The factor key_size ** -0.5 is part of the initial value.
    scale = 1.0 if unit_scaling_convention() else 1.0 / self.key_dim.size
    new_dims = self.key_heads_dims + [self.key_dim]
    initializer = VarianceScalingInitializer(scale=scale)
    return self._dense(context, x, [context.model.model_dim], new_dims, "q", initializer)

  def compute_k(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
    """Keys `[..., <key heads>, d_k]` of x, `[..., d_model]`."""
    new_dims = self.key_heads_dims + [self.key_dim]
    return self._dense(context, x, [context.model.model_dim], new_dims, "k")

  def compute_v(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
    """Values `[..., <value heads>, d_v]` of x, `[..., d_model]`."""
    new_dims = self.value_heads_dims + [self.value_dim]
    return self._dense(context, x, [context.model.model_dim], new_dims, "v")

  def _keys_and_values(self, context: Context, m: mtf.Tensor) -> list[mtf.Tensor]:
    return [self.compute_k(context, m), self.compute_v(context, m)]

  def compute_y(self, context: Context, u: mtf.Tensor) -> mtf.Tensor:
    """The output `[..., d_model]` of u, `[..., <value heads>, d_v]`."""
    reduced_dims = self.value_heads_dims + [self.value_dim]
    return self._dense(context, u, reduced_dims, [context.model.model_dim], "y")

  def call(
    self, context: Context, x: mtf.Tensor, losses: list[mtf.Tensor] | None = None
  ) -> mtf.Tensor:
    """Attends; see `TransformerLayer.call`."""
    del losses
    q = self.compute_q(context, x)
    m = self.as_memory(context, x)
    memory = self._keys_and_values(context, m)
    if any(name.startswith("m") for name in self.dynamic_projections):
      memory.append(m)
    memory, memory_position = self.with_earlier(context, memory)
    k, v, *inputs = memory
    bias = self.compute_bias(context, memory_position, x, self.softmax_heads_dims, q)
    # While decoding, dynamic projections need the inputs of all positions of memory.
    m = inputs[0] if inputs else m
    memory_length = k.shape.get_dim_by_name("memory_length")
    return self.attention_internal(context, x, m, q, k, v, memory_length, bias)

  def attention_internal(
    self,
    context: Context,
    x: mtf.Tensor,
    m: mtf.Tensor,
    q: mtf.Tensor,
    k: mtf.Tensor,
    v: mtf.Tensor,
    memory_length: mtf.Dimension,
    bias: mtf.Tensor | None,
  ) -> mtf.Tensor:
    """Attention with talking heads.

    Args:
      context: a `Context`.
      x: `[..., d_model]`, what queries are computed from.
      m: `[..., memory_length, d_model]`, what keys and values are computed from.
      q: `[..., <key heads>, d_k]`.
      k: `[..., memory_length, <key heads>, d_k]`.
      v: `[..., memory_length, <value heads>, d_v]`.
      memory_length: the dimension of what is attended to.
      bias: added to the logits, or None.

    Returns:
      `[..., d_model]`.
    """
    queries = [d for d in x.shape.dims[:-1] if d not in k.shape]
    batch = [d for d in x.shape.dims[:-1] if d in k.shape]
    # The heads stand before the lengths, as in the bias and in batched matrix products.
    order = mtf.Shape([*batch, *self.key_heads_dims, *queries, memory_length])
    logits = products(q, k, order, self.key_dim)
    sources = {"x": x, "m": m}

    def dynamic(suffix: str) -> list[mtf.Tensor]:
      names = [name for name in _PROJECTIONS if name in self.dynamic_projections]
      return [sources[name[0]] for name in names if name.endswith(suffix)]

    logits = self.talking_heads(
      context, logits, "logits", self.key_heads_dims, self.softmax_heads_dims, dynamic("2l")
    )

    def normalize(logits: mtf.Tensor) -> mtf.Tensor:
      weights = mtf.softmax(logits, memory_length)
      return self.talking_heads(
        context, weights, "weights", self.softmax_heads_dims, self.value_heads_dims, dynamic("2w")
      )

    u = attend(
      plus_bias(logits, bias),
      v,
      mtf.Shape(x.shape.dims[:-1] + self.value_heads_dims + [self.value_dim]),
      normalize=normalize,
      dropout=dropout_of_weights(
        self.dropout_rate if context.train else 0.0, dropout_broadcast_dims(context)
      ),
    )
    return self.compute_y(context, u)

  def talking_heads(
    self,
    context: Context,
    inp: mtf.Tensor,
    name: str,
    input_heads_dims: list[mtf.Dimension],
    output_heads_dims: list[mtf.Dimension],
    dynamic_projections_from: list[mtf.Tensor] | None = None,
  ) -> mtf.Tensor:
    """Projects heads to other heads.

    Variables: `{name}/kernel` [shared, removed, added heads], and for the n-th dynamic projection
    `{name}/{name}_dynamic_{n}/kernel` [d_model, shared, removed, added heads].

    Args:
      context: a `Context`.
      inp: a tensor with input_heads_dims.
      name: of the variable scope.
      input_heads_dims: dims of heads.
      output_heads_dims: dims of heads.
      dynamic_projections_from: `[..., d_model]` tensors of which projections are computed that are
        added to the trained one.

    Returns:
      A tensor with output_heads_dims, in the place of input_heads_dims; inp if they are the same.
    """
    shared = [d for d in input_heads_dims if d in output_heads_dims]
    reduced = [d for d in input_heads_dims if d not in output_heads_dims]
    new = [d for d in output_heads_dims if d not in input_heads_dims]
    if not reduced and not new:
      return inp
    expert_dims = context.model.ensemble_dims + shared
    kernel = mtf.layers.get_dense_kernel_weights(
      inp, new, reduced, expert_dims, None, name=name, variable_dtype=context.variable_dtype
    )
    i = next(i for i, d in enumerate(inp.shape) if d in input_heads_dims)
    others = [d for d in inp.shape if d not in input_heads_dims]
    output_shape = mtf.Shape(others[:i] + output_heads_dims + others[i:])
    projections = []
    # By default small: training begins near the projections that are the same for all positions.
    scale = self.dynamic_projections_init_scale / mtf.Shape(reduced).size
    with mtf.variable_scope(name):
      for n, source in enumerate(dynamic_projections_from or []):
        projections.append(
          self._dense(
            context,
            source,
            [context.model.model_dim],
            shared + reduced + new,
            f"{name}_dynamic_{n}",
            VarianceScalingInitializer(scale=scale),
          )
        )
    # Added to a projection, not to its result: kernels are small, results have two lengths.
    if projections:
      projections[0] += kernel
    else:
      projections = [kernel]
    products = [us_einsum([inp, p], output_shape=output_shape) for p in projections]
    result: mtf.Tensor = mtf.add_n(products)
    return result


@gin.configurable(module=_MODULE)
class TalkingHeadsEncDecAttention(AttendsToEncoder, TalkingHeadsSelfAttention):
  """Attention of a decoder to an encoder's output, with projections between heads.

  Args:
    relative_attention_type: None, "bias" or "bias_shared"; see `enc_dec_attention_bias`.
    **kwargs: arguments of `TalkingHeadsSelfAttention`.
  """

  def call(
    self, context: Context, x: mtf.Tensor, losses: list[mtf.Tensor] | None = None
  ) -> mtf.Tensor:
    """Attends; see `TransformerLayer.call`."""
    del losses
    m = context.encoder_output
    (k, v), memory_length = encoder_memory(
      context, m, functools.partial(self._keys_and_values, context)
    )
    q = self.compute_q(context, x)
    bias = enc_dec_attention_bias(self, context, self.softmax_heads_dims)
    return self.attention_internal(context, x, m, q, k, v, memory_length, bias)


@gin.configurable(module=_MODULE)
@affects(training="dropout_rate")
@takes(dropout_rate=BELOW_ONE, relative_attention_num_buckets=COUNT)
class GeneralBilinearSelfAttention(SelfAttention):
  """Self-attention whose keys and values are the inputs themselves.

  Variables: `q/kernel` [_d_model, <heads>, d_model] and `y/kernel` [<heads>, _d_model, d_model].
  The decoding state is the inputs, `[<batch_dims>, memory_length, d_model]`.

  Args:
    heads_dims: (name, size) pairs.
    dropout_rate: rate at which attention weights become 0 in training.
    relative_attention_type: None, "bias" or "bias_shared"; see `SelfAttention`.
    relative_attention_num_buckets: see `SelfAttention`.

  Raises:
    ConfigError: relative_attention_type is not known.
  """

  def __init__(
    self,
    heads_dims: Sequence[tuple[str, int]] = (("heads", 12),),
    dropout_rate: float = 0.0,
    relative_attention_type: str | None = None,
    relative_attention_num_buckets: int = 32,
  ):
    # The arguments of SelfAttention and their bindings do not hold here.
    check_relative_attention_type(self, relative_attention_type)
    self.heads_dims = [mtf.Dimension(*d) for d in heads_dims]
    self.dropout_rate = dropout_rate
    self.relative_attention_type = relative_attention_type
    self.relative_attention_num_buckets = relative_attention_num_buckets

  def compute_q(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
    """Queries `[..., <heads>, d_model]` of x, `[..., d_model]`."""
    model_dim = context.model.model_dim
    # Keys are of the size of the model: the factor d_model ** -0.5 of attention, as a variance.
    scale = 1.0 if unit_scaling_convention() else 1.0 / model_dim.size
    return mtf.layers.dense(
      x,
      self.heads_dims + [model_dim],
      reduced_dims=[model_dim],
      expert_dims=context.model.ensemble_dims,
      use_bias=False,
      variable_dtype=context.variable_dtype,
      kernel_initializer=VarianceScalingInitializer(scale=scale),
      name="q",
    )

  def compute_y(self, context: Context, u: mtf.Tensor) -> mtf.Tensor:
    """The output `[..., d_model]` of u, `[..., <heads>, d_model]`."""
    model_dim = context.model.model_dim
    return mtf.layers.dense(
      u,
      [model_dim],
      reduced_dims=self.heads_dims + [model_dim],
      expert_dims=context.model.ensemble_dims,
      use_bias=False,
      variable_dtype=context.variable_dtype,
      name="y",
    )

  def call(
    self, context: Context, x: mtf.Tensor, losses: list[mtf.Tensor] | None = None
  ) -> mtf.Tensor:
    """Attends; see `TransformerLayer.call`."""
    del losses
    q = self.compute_q(context, x)
    # Keys and values are the inputs: a state of d_model in place of heads times d_kv, twice.
    (m,), memory_position = self.with_earlier(context, [self.as_memory(context, x)])
    bias = self.compute_bias(context, memory_position, x, self.heads_dims, q)
    memory_length = m.shape.get_dim_by_name("memory_length")
    return self.attention_internal(context, q, m, memory_length, bias)

  def attention_internal(
    self,
    context: Context,
    q: mtf.Tensor,
    m: mtf.Tensor,
    memory_length: mtf.Dimension,
    bias: mtf.Tensor | None,
  ) -> mtf.Tensor:
    """Attention to m itself.

    Args:
      context: a `Context`.
      q: `[..., <heads>, d_model]`.
      m: `[..., memory_length, d_model]`.
      memory_length: the dimension of what is attended to.
      bias: added to the logits, or None.

    Returns:
      `[..., d_model]`.
    """
    model_dim = context.model.model_dim
    u = attention.attention(
      q,
      m,
      m,
      memory_length,
      model_dim,
      model_dim,
      bias,
      dropout_rate=self.dropout_rate if context.train else 0.0,
      dropout_broadcast_dims=dropout_broadcast_dims(context),
      context=context,
      float32_logits=False,
    )
    return self.compute_y(context, u)


@gin.configurable(module=_MODULE)
class GeneralBilinearEncDecAttention(AttendsToEncoder, GeneralBilinearSelfAttention):
  """Attention of a decoder to an encoder's output, by a general bilinear form.

  Args:
    relative_attention_type: None, "bias" or "bias_shared"; see `enc_dec_attention_bias`.
    **kwargs: arguments of `GeneralBilinearSelfAttention`.
  """

  def call(
    self, context: Context, x: mtf.Tensor, losses: list[mtf.Tensor] | None = None
  ) -> mtf.Tensor:
    """Attends; see `TransformerLayer.call`."""
    del losses
    q = self.compute_q(context, x)
    (m,), memory_length = encoder_memory(context, context.encoder_output, lambda m: [m])
    bias = enc_dec_attention_bias(self, context, self.heads_dims)
    return self.attention_internal(context, q, m, memory_length, bias)


def check_relative_attention_type(layer: object, relative_attention_type: str | None) -> None:
  """Raises ConfigError for a type that needs queries of one size d_kv."""
  if relative_attention_type not in (None, "bias", "bias_shared"):
    raise errors.ConfigError(
      f'{type(layer).__name__}.relative_attention_type must be None, "bias" or "bias_shared", got '
      f"{relative_attention_type!r}"
    )
