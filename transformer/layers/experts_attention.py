"""Attention whose projections are mixtures of experts."""

from __future__ import annotations

from typing import Any

import gin

from mesh_tensorflow.arguments.declared import ABOVE_ZERO, BELOW_ONE, COUNT, affects, takes
from mesh_tensorflow.transformer import attention
from mesh_tensorflow.transformer.layers.enc_dec_attention import AttendsToEncoder
from mesh_tensorflow.transformer.layers.model_attention_params import params_of_model
from mesh_tensorflow.transformer.layers.self_attention import SelfAttention
from mesh_tensorflow.transformer.models.context import Context
from mesh_tensorflow.transformer.moe.hparams import HParams
from mesh_tensorflow.transformer.moe.router import refuse_noncausal

_MODULE = "mesh_tensorflow.transformer.transformer_layers"


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
    activation: Any = "relu",
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
