"""Parameters of attention whose projections are mixtures of experts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.layers import unit_scaling_convention
from mesh_tensorflow.transformer.attention.params import AttentionParams
from mesh_tensorflow.transformer.moe.layer import MoE1D


class ExpertsAttentionParams(AttentionParams):
  """Attention parameters with experts in place of some dense projections.

  Variables: those of the mixture of experts, `o`, and `kv` (expert_computation "q") or `q` ("kv").

  Args:
    mesh: an `mtf.Mesh`.
    query_input_dim: dimension of the inputs of queries.
    memory_input_dim: dimension of the inputs of keys and values.
    output_dim: dimension of the result.
    key_dim: dimension of keys.
    value_dim: dimension of values.
    query_heads_dims: dimensions of heads of queries, or None.
    memory_heads_dims: dimensions of heads of keys and values, or None.
    variable_dtype: an `mtf.VariableDType`, or one dtype for all three.
    shared_kv: must be True: keys are the values.
    no_query: True if there is no variable `q`.
    combine_dims: must be True: the variables are matrices.
    ensemble_dim: leading dimension of all variables, or None.
    keep_query_heads_dims: True if the output keeps the heads apart.
    fold_scaling_into_initializer: not used: queries are always multiplied by key_dim.size ** -0.5.
    context: a `Context`.
    experts_hparams: an object with the arguments of `ExpertsSelfAttention` as attributes.
    expert_computation: what experts compute: "qkv" (queries and keys, by experts that share their
      hidden layers), "q" or "kv".
    memory_is_input: whether what is attended to is the queries' own sequence; then a token is sent
      to its experts once, for its query and its key.

  Raises:
    ConfigError: shared_kv or combine_dims is false, expert_computation is not known, or keys made
      by experts have fewer heads than queries.
    UnsupportedError: the unit-scaling convention is on.
  """

  def __init__(
    self,
    mesh: mtf.Mesh,
    query_input_dim: mtf.Dimension,
    memory_input_dim: mtf.Dimension,
    output_dim: mtf.Dimension,
    key_dim: mtf.Dimension,
    value_dim: mtf.Dimension,
    query_heads_dims: Sequence[mtf.Dimension] | None,
    memory_heads_dims: Sequence[mtf.Dimension] | None,
    variable_dtype: mtf.VariableDType | tf.DType,
    shared_kv: bool = False,
    no_query: bool = False,
    combine_dims: bool = True,
    ensemble_dim: mtf.Dimension | None = None,
    keep_query_heads_dims: bool = False,
    fold_scaling_into_initializer: bool = True,
    context: Any = None,
    experts_hparams: Any = None,
    expert_computation: str = "qkv",
    *,
    memory_is_input: bool = True,
  ):
    _check_arguments(
      shared_kv, combine_dims, expert_computation, query_heads_dims, memory_heads_dims
    )
    super().__init__(
      mesh,
      query_input_dim,
      memory_input_dim,
      output_dim,
      key_dim,
      value_dim,
      query_heads_dims,
      memory_heads_dims,
      variable_dtype,
      shared_kv=shared_kv,
      no_query=no_query,
      combine_dims=combine_dims,
      ensemble_dim=ensemble_dim,
      keep_query_heads_dims=keep_query_heads_dims,
      fold_scaling_into_initializer=fold_scaling_into_initializer,
      make_attention_vars=False,
    )
    self.context = context
    self.expert_computation = expert_computation
    self._memory_is_input = memory_is_input
    # Experts make a token's query and key at once; the key waits here for `compute_kv`.
    self._key_of_query: mtf.Tensor | None = None
    if expert_computation == "q":
      self.wkv = self._variable("kv", self.k_shape, _initializer(memory_input_dim))
    elif expert_computation == "kv":
      self.wq = self._variable("q", self.q_shape, _initializer(query_input_dim))
    self.moe_layer = self._experts_layer(experts_hparams)

  def _experts_layer(self, h: Any) -> MoE1D:
    """The experts; h: see `experts_hparams`."""
    return MoE1D(
      moe_gating=h.moe_gating,
      allow_noncausal=getattr(h, "allow_noncausal", False),
      num_experts=h.num_experts,
      loss_coef=h.loss_coef,
      group_size=h.group_size,
      min_expert_capacity=h.min_expert_capacity,
      capacity_factor_train=h.capacity_factor_train,
      capacity_factor_eval=h.capacity_factor_eval,
      switch_policy_train=h.switch_policy_train,
      switch_policy_eval=h.switch_policy_eval,
      switch_dropout=h.switch_dropout,
      switch_temperature=h.switch_temperature,
      switch_jitter=h.switch_jitter,
      ntlb_top_k=h.ntlb_top_k,
      hidden_size=h.hidden_size,
      activation=h.activation,
      z_loss=h.z_loss,
      # Apart from the heads' dimension, which experts would take for one of theirs.
      output_dim=mtf.Dimension("d_model", self.q_shape[-1].size),
      use_experts_attention=self.expert_computation == "qkv",
    )

  def compute_q(self, query_antecedent: mtf.Tensor) -> mtf.Tensor:
    """Queries; see `AttentionParams.compute_q`."""
    if self.expert_computation == "kv":
      q = self._project(query_antecedent, self.wq, self.query_input_dim, self.q_dims)
      if self._memory_is_input:
        self._key_of_query = self._experts(query_antecedent)[0]
    else:
      # "qkv" makes keys along with queries, "q" does not.
      q, *keys = self._experts(query_antecedent)
      if keys and self._memory_is_input:
        self._key_of_query = keys[0]
    # Experts have their own initial values: the scale of attention is in no initializer here.
    scale: float = self.key_dim.size**-0.5
    return q * scale

  def compute_k(self, memory_antecedent: mtf.Tensor) -> mtf.Tensor:
    """Keys, which are values too: see `compute_kv`."""
    return self.compute_kv(memory_antecedent)

  def compute_kv(self, memory_antecedent: mtf.Tensor) -> mtf.Tensor:
    """Keys that are values too.

    Args:
      memory_antecedent: `[..., memory_input_dim]`. If experts compute keys of the queries' own
        sequence, `compute_q` has computed them; this gives the dims.

    Returns:
      `[..., <memory_heads_dims>, key_dim]`.

    Raises:
      GraphError: `compute_q` was not called.
    """
    m = memory_antecedent
    if self.expert_computation == "q":
      return self._project(m, self.wkv, self.memory_input_dim, self.k_dims)
    if not self._memory_is_input:
      return self._experts(m, self._context_of_memory())[-1]
    if self._key_of_query is None:
      raise errors.GraphError("attention by experts: call compute_q before compute_kv")
    shape = mtf.Shape(m.shape.dims[:-1] + self.k_dims)
    k = self._key_of_query
    return k if k.shape == shape else mtf.reshape(k, shape)

  def compute_v(self, memory_antecedent: mtf.Tensor) -> mtf.Tensor:
    """Raises UnsupportedError: keys are the values."""
    raise errors.UnsupportedError("attention by experts has no values apart from its keys")

  def _context_of_memory(self) -> Any:
    """A copy of the context with the encoder's sequence ids in place of the decoder's."""
    context = copy.copy(self.context)
    context.sequence_id = self.context.encoder_sequence_id
    # The embeddings of the decoder's tokens say nothing of the encoder's.
    context.input_embeddings = None
    return context

  def _experts(self, x: mtf.Tensor, context: Any = None) -> list[mtf.Tensor]:
    """The outputs of the experts: `[..., <heads>, key_dim]`."""
    ys = self.moe_layer.call(context or self.context, x)
    ys = ys if isinstance(ys, (list, tuple)) else [ys]
    return [mtf.replace_dimensions(y, y.shape[-1], self.q_dims) for y in ys]


def _check_arguments(
  shared_kv: bool,
  combine_dims: bool,
  expert_computation: str,
  query_heads_dims: Sequence[mtf.Dimension] | None,
  memory_heads_dims: Sequence[mtf.Dimension] | None,
) -> None:
  """Raises for arguments that `ExpertsAttentionParams` does not support."""
  if not combine_dims or not shared_kv:
    raise errors.ConfigError(
      "attention by experts needs combine_dims=True and shared_kv=True, got "
      f"combine_dims={combine_dims}, shared_kv={shared_kv}; bind SelfAttention.shared_kv = True"
    )
  if expert_computation not in ("qkv", "q", "kv"):
    raise errors.ConfigError(
      f'expert_computation must be "qkv", "q" or "kv", got {expert_computation!r}'
    )
  if "kv" in expert_computation and list(query_heads_dims or []) != list(memory_heads_dims or []):
    raise errors.ConfigError(
      f'expert_computation="{expert_computation}" needs as many heads of keys as of queries; set '
      "num_memory_heads to 0"
    )
  if unit_scaling_convention():
    raise errors.UnsupportedError(
      "attention by experts does not have the unit-scaling convention; unbind "
      "unit_scaling_convention.value"
    )


def _initializer(input_dim: mtf.Dimension) -> Any:
  """Initializer that preserves the variance of the input: stddev input_dim.size ** -0.5."""
  return tf.random_normal_initializer(stddev=input_dim.size**-0.5)
