"""A mixture of experts (Shazeer et al., 2017) of one level of experts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import ABOVE_ZERO, BELOW_ONE, COUNT, affects, takes
from mesh_tensorflow.layers.dense import Activation
from mesh_tensorflow.meshes.layout import LayoutLike
from mesh_tensorflow.program.dimensions import ShapeLike
from mesh_tensorflow.transformer.model.context import Context, TransformerLayer
from mesh_tensorflow.transformer.model.moe.dispatch import ExpertsCall, apply_experts
from mesh_tensorflow.transformer.model.moe.dropless import apply_without_dropping
from mesh_tensorflow.transformer.model.moe.groups import LayoutHints
from mesh_tensorflow.transformer.model.moe.hparams import HParams
from mesh_tensorflow.transformer.model.moe.router import refuse_noncausal
from mesh_tensorflow.transformer.model.step_sums import StepSum


def transformer_moe_layer_v1(
  inputs: mtf.Tensor,
  output_dim: mtf.Dimension,
  hparams: object,
  train: bool,
  variable_dtype: mtf.VariableDType | tf.DType,
  layout: LayoutLike | None = None,
  mesh_shape: ShapeLike | None = None,
  nonpadding: mtf.Tensor | None = None,
  activation: Activation = mtf.relu,
  num_microbatches: int | None = None,
  token_embeddings: mtf.Tensor | None = None,
  *,
  loads: list[StepSum] | None = None,
) -> tuple[Any, mtf.Tensor]:
  """Sends each token to a few of many two-layer networks, and adds up what they return.

  Tokens are routed within groups of about `moe_group_size`. Where the layout splits "experts",
  expert weights and work are divided; over the mesh axis of the batch, tokens are exchanged by
  alltoall. Tokens that find no slot, and padding, get zeros. With `moe_dropless` there are no
  slots, and each token gets to its experts; see `dropless`.

  Variables: `<gating>/kernel` [d_model, expert_unsplit]; `wi/kernel` (`wi_0/kernel`, ... for
  several activations) [experts, d_model, expert_hidden]; `wo/kernel` [experts, expert_hidden,
  output_dim] (`q_wo/kernel` and `k_wo/kernel` for `moe_use_experts_attention`); with shared experts
  `shared/wi/kernel` [d_model, d_ff] and `shared/wo/kernel` [d_ff, output_dim]; with a balance rate
  `<gating>/balance_bias` [expert_unsplit].

  Args:
    inputs: `[(outer_batch,) batch, ..., d_model]`.
    output_dim: the last dimension of the result.
    hparams: an object with `moe_` attributes, see `MoE1D`; missing ones have their defaults.
    train: whether the layer is being trained.
    variable_dtype: an `mtf.VariableDType`, or one dtype for all three.
    layout: the layout rules that the program will have; None if they are not known.
    mesh_shape: the mesh shape that it will have; None if it is not known.
    nonpadding: 1 for tokens, 0 for padding: some of the leading dims of inputs; None: no padding.
    activation: see `mtf.layers.dense_product`.
    num_microbatches: how many of such calls make a training step; None: 1.
    token_embeddings: of the dims of inputs, for `moe_word_embed_mode`.
    loads: list to which tokens of experts are appended, if `moe_balance_rate` is set.

  Returns:
    (output, loss): `[<leading dims of inputs>, output_dim]`, or with `moe_use_experts_attention` a
    list of two; the auxiliary loss times `moe_loss_coef`.

  Raises:
    ConfigError: a hyperparameter has a value that is not known.
  """
  call = ExpertsCall(
    inputs, output_dim, hparams, train, variable_dtype, activation,
    LayoutHints(layout, mesh_shape), nonpadding, num_microbatches, token_embeddings, loads,
  )  # fmt: skip
  # Queries and keys share the hidden layer: a token goes to its experts once for both.
  names = ["q_wo", "k_wo"] if call.hparam("use_experts_attention") else ["wo"]
  if call.hparam("dropless"):
    outputs, loss = apply_without_dropping(call, names)
  else:
    outputs, loss = apply_experts(call, functools.partial(_feed_forward, call, names))
  if call.hparam("num_shared_experts"):
    # Of all tokens (Dai et al., 2024; arXiv:2401.06066).
    with mtf.variable_scope("shared"):
      (shared,) = _feed_forward(call, ["wo"], inputs)
    # What is for all tokens is for queries and for keys.
    outputs = [y + shared for y in outputs]
  return (outputs if len(outputs) > 1 else outputs[0]), loss


def _feed_forward(
  call: ExpertsCall, names: list[str], x: mtf.Tensor, experts_dim: mtf.Dimension | None = None
) -> list[mtf.Tensor]:
  """The experts, each on its slots; without `experts_dim` those of all tokens, side by side."""
  hidden = mtf.Dimension("expert_hidden", call.hparam("hidden_size"))
  if experts_dim is None:
    # Not as the hidden layers of experts are called, which may be split where experts are not.
    hidden = mtf.Dimension("d_ff", call.hparam("num_shared_experts") * hidden.size)
  options: dict[str, Any] = dict(
    expert_dims=[experts_dim] if experts_dim else [],
    use_bias=False,
    variable_dtype=call.variable_dtype,
  )
  h = mtf.layers.dense_product(
    x,
    reduced_dims=x.shape.dims[-1:],
    new_dims=hidden,
    activation_functions=call.activation,
    name="wi",
    **options,
  )
  # Slots, unlike positions, are not of one sequence: each has its own mask.
  if call.hparam("dropout_rate"):
    h = mtf.dropout(h, call.train, rate=call.hparam("dropout_rate"))
  return [
    mtf.layers.dense(h, call.output_dim, reduced_dims=h.shape.dims[-1:], name=name, **options)
    for name in names
  ]


@dataclasses.dataclass(eq=False, repr=False)
class ExpertsLayer(TransformerLayer):
  """Base class of layers that call a mixture of experts with the context.

  Subclasses are dataclasses, whose fields are the hyperparameters.
  """

  def call(self, context: Context, x: mtf.Tensor, losses: list[mtf.Tensor] | None = None) -> Any:
    """Applies the layer; appends the auxiliary loss to `context.losses`.

    Args:
      context: a `Context`.
      x: see `TransformerLayer.call`.
      losses: not used.

    Returns:
      A tensor of the dimensions of x but the last, which is `output_dim`.

    Raises:
      UnsupportedError: the model is an ensemble.
    """
    del losses
    model = context.model
    if getattr(model, "ensemble_dim", None):
      raise errors.UnsupportedError(
        f"layer {self.name or ''} ({type(self).__name__}): experts cannot be used in an ensemble "
        f"({model.ensemble_dim.name}:{model.ensemble_dim.size}); set Unitransformer.ensemble = None"
      )
    y, loss = self._apply(context, x)
    if context.losses is not None:
      context.losses.append(loss)
    return y

  def _apply(self, context: Context, x: mtf.Tensor) -> tuple[Any, mtf.Tensor]:
    """(output, loss)."""
    raise NotImplementedError

  @property
  def _hparams(self) -> HParams:
    """The constructor's arguments, as the functions want them: called `moe_<name>`."""
    names = [f.name for f in dataclasses.fields(self)]
    return HParams(**{f"moe_{n.removeprefix('moe_')}": getattr(self, n) for n in names})


@dataclasses.dataclass(eq=False, repr=False)
class OneLevelExpertsLayer(ExpertsLayer):
  """Base class of `MoE1D` and `HeterogeneousMoE1D`; see `MoE1D` for the arguments."""

  num_experts: int = 16
  loss_coef: float = 1e-2
  hidden_size: int = 4096
  group_size: int = 1024
  capacity_factor_train: float = 1.25
  capacity_factor_eval: float = 2.0
  use_second_place_loss: bool = False
  second_policy_train: str = "random"
  second_policy_eval: str = "random"
  second_threshold_train: float = 0.2
  second_threshold_eval: float = 0.2
  dropout_rate: float = 0.0
  activation: Any = "relu"
  moe_gating: str = "top_2"
  min_expert_capacity: int = 4
  switch_policy_train: str = "input_jitter"
  switch_policy_eval: str = "input_jitter"
  switch_dropout: float = 0.1
  switch_temperature: float = 1.0
  switch_jitter: float = 1e-2
  ntlb_top_k: int = 4
  output_dim: mtf.Dimension | None = None
  allow_noncausal: bool = dataclasses.field(default=False, kw_only=True)

  def _call_experts(
    self, layer_fn: Callable[..., tuple[Any, mtf.Tensor]], context: Context, x: mtf.Tensor
  ) -> tuple[Any, mtf.Tensor]:
    """(output, loss) of a function like `transformer_moe_layer_v1`."""
    refuse_noncausal(self, self.moe_gating, self.allow_noncausal, context.model)
    result: tuple[Any, mtf.Tensor] = layer_fn(
      x,
      self.output_dim or context.model.model_dim,
      self._hparams,
      context.train,
      context.variable_dtype,
      layout=context.model.layout,
      mesh_shape=context.model.mesh_shape,
      nonpadding=context.nonpadding,
      activation=self.activation,
      num_microbatches=context.num_microbatches,
      token_embeddings=context.input_embeddings,
    )
    return result


@gin.configurable(module="mesh_tensorflow.transformer.moe")
@dataclasses.dataclass(eq=False, repr=False)
@affects(
  training=(
    "loss_coef capacity_factor_train use_second_place_loss second_policy_train "
    "second_threshold_train dropout_rate switch_policy_train switch_dropout "
    "switch_jitter z_loss"
  ),
  report="summaries",
)
@takes(
  num_experts=COUNT,
  hidden_size=COUNT,
  group_size=COUNT,
  capacity_factor_train=ABOVE_ZERO,
  capacity_factor_eval=ABOVE_ZERO,
  dropout_rate=BELOW_ONE,
  switch_dropout=BELOW_ONE,
  switch_temperature=ABOVE_ZERO,
  ntlb_top_k=COUNT,
)
class MoE1D(OneLevelExpertsLayer):
  """A feed-forward layer of which each token uses a small part: see `transformer_moe_layer_v1`.

  Args:
    num_experts: number of experts.
    loss_coef: coefficient of the auxiliary losses.
    hidden_size: size of the experts' hidden layer.
    group_size: tokens that are routed together.
    capacity_factor_train: slots of all experts per token of a group, in training.
    capacity_factor_eval: otherwise.
    use_second_place_loss: whether second choices too shall be balanced (top_2, top_n).
    second_policy_train: which second choices are kept: "all", "none", "threshold" (those with a
      gate above `second_threshold`), or "random" (with probability gate / second_threshold).
    second_policy_eval: likewise when not training; "random" is random then, too.
    second_threshold_train: gate threshold of "threshold" and "random" in training, 0 to 1.
    second_threshold_eval: likewise when not training.
    dropout_rate: rate at which hidden values become 0 in training.
    activation: of the hidden layer; see `mtf.layers.dense_product`.
    moe_gating: "top_2", "top_n", "top_k", "switch", "ntlb", "switch_max" or "expert_selection". In
      the last two experts choose among the tokens of all positions: they are refused in
      autoregressive models, whose predictions would depend on later tokens; see allow_noncausal.
    min_expert_capacity: each expert has at least so many slots.
    switch_policy_train: "argmax", "input_dropout", "input_jitter" or "sample" (switch family).
    switch_policy_eval: likewise when not training.
    switch_dropout: rate of "input_dropout".
    switch_temperature: of "sample".
    switch_jitter: "input_jitter" multiplies inputs by up to 1 plus or minus this.
    ntlb_top_k: how many experts a token tries ("ntlb").
    output_dim: the last dimension of the result; the model's by default.
    allow_noncausal: whether "switch_max" and "expert_selection" are used in autoregressive models,
      too. What these learn and score then depends on later tokens, and differs from what they
      decode.
    use_experts_attention: whether there are two outputs, for queries and keys.
    z_loss: coefficient of the router's z-loss in training; None: none.
    word_embed_mode: how token embeddings enter the router: None, "concat", "concat_stop_grad",
      "add", "add_stop_grad" or "embed_only".
    use_second_place_expert_prob: probability, in training, to avoid a token's best expert (switch,
      switch_max, ntlb); None: never.
    use_second_place_expert_prob_temp: then the expert is drawn at this temperature; None: it is
      the second best.
    top_n_num_experts_per_token: n of "top_n", and k of "top_k".
    summaries: whether, in training, the use of experts is reported by `mtf.scalar_summary`.
    dropless: whether all tokens get to the experts they choose; group_size, capacities and
      min_expert_capacity then decide nothing but the groups of the balance loss. For "top_2",
      "top_n", "top_k", "switch" and "ntlb".
    num_shared_experts: how many experts all tokens go to, beside those of the router, ungated.
    router_scores: of "top_k": "softmax" or "sigmoid".
    normalize_gates: of "top_k": whether the gates of a token are divided by their sum.
    gate_scale: of "top_k": what gates are multiplied by then.
    balance_rate: of "top_k": by how much the bias of an expert changes after a step, in place of a
      balance loss (the router's z-loss stays); None: there is a loss. See `top_k_routing`.
  """

  use_experts_attention: bool = False
  z_loss: float | None = None
  word_embed_mode: str | None = None
  use_second_place_expert_prob: float | None = None
  use_second_place_expert_prob_temp: float | None = None
  top_n_num_experts_per_token: int = 3
  summaries: bool = dataclasses.field(default=False, kw_only=True)
  dropless: bool = dataclasses.field(default=False, kw_only=True)
  num_shared_experts: int = dataclasses.field(default=0, kw_only=True)
  router_scores: str = dataclasses.field(default="softmax", kw_only=True)
  normalize_gates: bool = dataclasses.field(default=True, kw_only=True)
  gate_scale: float = dataclasses.field(default=1.0, kw_only=True)
  balance_rate: float | None = dataclasses.field(default=None, kw_only=True)

  def _apply(self, context: Context, x: mtf.Tensor) -> tuple[Any, mtf.Tensor]:
    layer = functools.partial(transformer_moe_layer_v1, loads=context.step_sums)
    return self._call_experts(layer, context, x)
