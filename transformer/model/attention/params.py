"""The variables of attention: projections of queries, keys, values and outputs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.layers import unit_scaling_convention, us_einsum
from mesh_tensorflow.numerics.initializers import InitializerLike
from mesh_tensorflow.program.dimensions import list_product
from mesh_tensorflow.transformer.model.context import Context
from mesh_tensorflow.transformer.model.deepnorm import XavierNormal
from mesh_tensorflow.transformer.model.moe.hparams import HParams
from mesh_tensorflow.transformer.model.moe.layer import MoE1D

# Arguments of `MoE1D` that attention by experts has, too.
EXPERTS_HPARAMS = (
  "num_experts loss_coef group_size capacity_factor_train capacity_factor_eval moe_gating "
  "min_expert_capacity switch_policy_train switch_policy_eval switch_dropout switch_temperature "
  "switch_jitter ntlb_top_k hidden_size activation z_loss"
).split()


class AttentionParams:
  """The variables of attention: `q`, `k` and `v` (or `kv`), and `o`.

  With `combine_dims` the variables are matrices: `[query_input_dim, heads * key]` and so on, where
  the combined dimension has the name of the first head dimension.

  Args:
    mesh: an `mtf.Mesh`.
    query_input_dim: dimension of what queries are computed from.
    memory_input_dim: dimension of what keys and values are computed from.
    output_dim: dimension of the result.
    key_dim: dimension of keys.
    value_dim: dimension of values.
    query_heads_dims: dimensions of heads of queries, or None.
    memory_heads_dims: dimensions of heads of keys and values, or None; fewer than those of
      queries for multi-query or grouped-query attention.
    variable_dtype: an `mtf.VariableDType`, or one dtype for all three.
    shared_kv: whether keys are the values.
    no_query: whether there is no variable `q`.
    combine_dims: whether the variables are matrices.
    ensemble_dim: leading dimension of all variables, or None.
    keep_query_heads_dims: whether the output keeps the heads apart.
    fold_scaling_into_initializer: whether the factor key_dim.size ** -0.5 is part of the initial
      value of `q`; else `compute_q` multiplies by it.
    make_attention_vars: whether there are variables besides `o`.
    initial_gain: variables start as Xavier's normal numbers, those of values and of the output
      times this (as in DeepNorm); see `deepnorm_initial_gain`. None: as they do.

  Raises:
    ShapeError: shared_kv with different key_dim and value_dim.
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
    make_attention_vars: bool = True,
    *,
    initial_gain: float | None = None,
  ):
    if shared_kv and key_dim != value_dim:
      raise errors.ShapeError(
        f"attention: shared_kv needs equal key_dim ({key_dim}) and value_dim ({value_dim})"
      )
    self.mesh = mesh
    self.query_input_dim = query_input_dim
    self.memory_input_dim = memory_input_dim
    self.output_dim = output_dim
    self.key_dim = key_dim
    self.value_dim = value_dim
    self.query_heads_dims = list(query_heads_dims or [])
    self.memory_heads_dims = list(memory_heads_dims or [])
    self.variable_dtype = variable_dtype
    self.shared_kv = shared_kv
    self.no_query = no_query
    self.combine_dims = combine_dims
    self.ensemble_dim = ensemble_dim
    self.keep_query_heads_dims = keep_query_heads_dims
    self.fold_scaling_into_initializer = fold_scaling_into_initializer
    self.make_attention_vars = make_attention_vars
    self.initial_gain = initial_gain

    def combined(dims: list[mtf.Dimension]) -> list[mtf.Dimension]:
      return [mtf.combined_dimension(dims)] if combine_dims else dims

    leading = [ensemble_dim] if ensemble_dim else []
    self.q_shape = leading + [query_input_dim] + combined(self.q_dims)
    self.k_shape = leading + [memory_input_dim] + combined(self.k_dims)
    self.v_shape = leading + [memory_input_dim] + combined(self.v_dims)
    # The head's name comes first in a combined dimension, so that a rule for heads splits it.
    self.o_shape = leading + combined(self.o_dims) + [output_dim]
    self.init_weights()

  def init_weights(self) -> None:
    """Creates the variables. Standard deviations keep the variance of what they multiply."""
    if self.initial_gain is not None:
      self._make_xavier_variables(self.initial_gain)
      return
    unit = unit_scaling_convention()

    def normal(*sizes: int) -> Any:
      return tf.random_normal_initializer(stddev=1.0 if unit else list_product(sizes) ** -0.5)

    # Queries that start smaller spare a multiplication in every step. Optimizers that move all
    # weights by equal amounts (Adam) then move these relatively faster than the others.
    fold = [self.key_dim.size] if self.fold_scaling_into_initializer else []
    heads = [d.size for d in self.query_heads_dims]
    self._make_variables(
      normal(self.query_input_dim.size, *fold),
      normal(self.memory_input_dim.size),
      normal(*heads, self.value_dim.size),
    )

  def _make_xavier_variables(self, gain: float) -> None:
    """Creates the variables; with a gain those that a value goes through."""

    def normal(
      gain: float,
      input_dims: Sequence[mtf.Dimension],
      output_dims: Sequence[mtf.Dimension],
      factor: float = 1.0,
    ) -> Any:
      fans = (list_product(d.size for d in dims) for dims in (input_dims, output_dims))
      return tf.random_normal_initializer(stddev=XavierNormal(gain).stddev(*fans) * factor)

    fold: float = self.key_dim.size**-0.5 if self.fold_scaling_into_initializer else 1.0
    self._make_variables(
      normal(1.0, [self.query_input_dim], self.q_dims, fold),
      # Keys that are values, too, begin as values.
      normal(gain if self.shared_kv else 1.0, [self.memory_input_dim], self.k_dims),
      normal(gain, self.o_dims, [self.output_dim]),
      value=normal(gain, [self.memory_input_dim], self.v_dims),
    )

  def _make_variables(
    self,
    query: InitializerLike,
    memory: InitializerLike,
    output: InitializerLike,
    suffix: str = "",
    value: InitializerLike = None,
  ) -> None:
    """Creates the variables with these initializers of `q`, of `k` and `v`, and of `o`.

    Args:
      query: of `q`.
      memory: of `k`, and of `v` unless `value` is given; or of `kv`.
      output: of `o`.
      suffix: of the names.
      value: of `v`.
    """

    def variable(
      name: str, shape: Sequence[mtf.Dimension], initializer: InitializerLike
    ) -> mtf.Tensor:
      return self._variable(name + suffix, shape, initializer)

    if self.make_attention_vars:
      if not self.no_query:
        self.wq = variable("q", self.q_shape, query)
      if self.shared_kv:
        self.wkv = variable("kv", self.k_shape, memory)
      else:
        self.wk = variable("k", self.k_shape, memory)
        self.wv = variable("v", self.v_shape, memory if value is None else value)
    self.wo = variable("o", self.o_shape, output)

  def _variable(
    self, name: str, shape: Sequence[mtf.Dimension], initializer: InitializerLike
  ) -> mtf.Tensor:
    return mtf.get_variable(
      self.mesh, name, mtf.Shape(shape), dtype=self.variable_dtype, initializer=initializer
    )

  @property
  def q_dims(self) -> list[mtf.Dimension]:
    return self.query_heads_dims + [self.key_dim]

  @property
  def k_dims(self) -> list[mtf.Dimension]:
    return self.memory_heads_dims + [self.key_dim]

  @property
  def v_dims(self) -> list[mtf.Dimension]:
    return self.memory_heads_dims + [self.value_dim]

  @property
  def o_dims(self) -> list[mtf.Dimension]:
    return self.query_heads_dims + [self.value_dim]

  def compute_q(self, query_antecedent: mtf.Tensor) -> mtf.Tensor:
    """Queries.

    Args:
      query_antecedent: `[..., query_input_dim]`.

    Returns:
      `[..., <query_heads_dims>, key_dim]`.
    """
    ret = self._project(query_antecedent, self.wq, self.query_input_dim, self.q_dims)
    if not self.fold_scaling_into_initializer:
      ret *= self.key_dim.size**-0.5
    return ret

  def compute_kv(self, memory_antecedent: mtf.Tensor) -> mtf.Tensor:
    """Keys that are values too: `[..., <memory_heads_dims>, key_dim]`."""
    if not self.shared_kv:
      raise errors.GraphError("compute_kv: this attention has separate keys and values")
    return self._project(memory_antecedent, self.wkv, self.memory_input_dim, self.k_dims)

  def keys_and_values(self, memory_antecedent: mtf.Tensor) -> list[mtf.Tensor]:
    """Keys and values; of shared_kv one tensor, which is computed, cached and moved once."""
    if self.shared_kv:
      return [self.compute_kv(memory_antecedent)]
    return [self.compute_k(memory_antecedent), self.compute_v(memory_antecedent)]

  def compute_k(self, memory_antecedent: mtf.Tensor) -> mtf.Tensor:
    """Keys: `[..., <memory_heads_dims>, key_dim]`."""
    if self.shared_kv:
      raise errors.GraphError("compute_k: keys and values are shared (shared_kv), use compute_kv")
    return self._project(memory_antecedent, self.wk, self.memory_input_dim, self.k_dims)

  def compute_v(self, memory_antecedent: mtf.Tensor) -> mtf.Tensor:
    """Values: `[..., <memory_heads_dims>, value_dim]`."""
    if self.shared_kv:
      raise errors.GraphError("compute_v: keys and values are shared (shared_kv), use compute_kv")
    return self._project(memory_antecedent, self.wv, self.memory_input_dim, self.v_dims)

  def _project(
    self,
    x: mtf.Tensor,
    weights: mtf.Tensor,
    input_dim: mtf.Dimension,
    dims: list[mtf.Dimension],
  ) -> mtf.Tensor:
    # With combined dims one matrix multiplication; the heads are cut out of its columns.
    ret = us_einsum([x, weights], reduced_dims=[input_dim])
    if self.combine_dims and ret.shape.dims[-1:] != dims:
      ret = mtf.replace_dimensions(ret, ret.shape.dims[-1], dims)
    return ret

  def compute_output(self, o: mtf.Tensor, output_shape: mtf.Shape | None = None) -> mtf.Tensor:
    """The result of attention.

    Args:
      o: a tensor with dims `o_dims`, the output of `attention`.
      output_shape: dims of the result, or None.

    Returns:
      A tensor with output_dim in place of `o_dims`; the heads stay with keep_query_heads_dims.

    Raises:
      ShapeError: keep_query_heads_dims with combine_dims.
    """
    if self.combine_dims:
      # One matrix multiplication, of o with heads and values as one dimension: faster than an
      # einsum over two.
      if self.keep_query_heads_dims:
        raise errors.ShapeError(
          "attention: keep_query_heads_dims needs combine_dims=False: the heads are not apart in "
          "the combined variable"
        )
      in_order = o.shape - self.o_dims + self.o_dims
      if in_order != o.shape:
        o = mtf.transpose(o, in_order)
      combined = self.wo.shape.dims[-2]
      if self.o_dims != [combined]:
        o = mtf.replace_dimensions(o, self.o_dims, combined)
      reduced_dims = [combined]
    else:
      reduced_dims = [self.value_dim] if self.keep_query_heads_dims else self.o_dims
    return us_einsum([o, self.wo], output_shape=output_shape, reduced_dims=reduced_dims)


def attention_params_simple(
  mesh: mtf.Mesh,
  io_dim: mtf.Dimension,
  kv_dim: mtf.Dimension,
  heads_dim: mtf.Dimension,
  variable_dtype: mtf.VariableDType | tf.DType,
) -> AttentionParams:
  """`AttentionParams` with equal dimensions on all sides.

  Args:
    mesh: an `mtf.Mesh`.
    io_dim: dimension of inputs and outputs.
    kv_dim: dimension of keys and values.
    heads_dim: dimension of heads.
    variable_dtype: an `mtf.VariableDType`, or one dtype for all three.
  """
  return AttentionParams(
    mesh,
    query_input_dim=io_dim,
    memory_input_dim=io_dim,
    output_dim=io_dim,
    key_dim=kv_dim,
    value_dim=kv_dim,
    query_heads_dims=[heads_dim],
    memory_heads_dims=[heads_dim],
    variable_dtype=variable_dtype,
  )


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


class ExpertsAttentionParams(AttentionParams):
  """Attention parameters with experts in place of some dense projections.

  Variables: those of the mixture of experts, `o`, and `kv` (expert_computation "q") or `q` ("kv").

  Args:
    mesh: see `AttentionParams`; likewise all up to fold_scaling_into_initializer, but shared_kv and
      combine_dims must be True, and queries are always multiplied by key_dim.size ** -0.5.
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
    context: Context | None = None,
    experts_hparams: HParams | None = None,
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
    self.context: Any = context  # Given wherever there are experts.
    self.expert_computation = expert_computation
    self._memory_is_input = memory_is_input
    # Experts make a token's query and key at once; the key waits here for `compute_kv`.
    self._key_of_query: mtf.Tensor | None = None
    if expert_computation == "q":
      self.wkv = self._variable("kv", self.k_shape, _initializer(memory_input_dim))
    elif expert_computation == "kv":
      self.wq = self._variable("q", self.q_shape, _initializer(query_input_dim))
    self.moe_layer = MoE1D(
      **{name: getattr(experts_hparams, name) for name in EXPERTS_HPARAMS},
      allow_noncausal=getattr(experts_hparams, "allow_noncausal", False),
      # Apart from the heads' dimension, which experts would take for one of theirs.
      output_dim=mtf.Dimension("d_model", self.q_shape[-1].size),
      use_experts_attention=expert_computation == "qkv",
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

  def _experts(self, x: mtf.Tensor, context: Context | None = None) -> list[mtf.Tensor]:
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
