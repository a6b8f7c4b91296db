"""A mixture of experts (Shazeer et al., 2017) of one level of experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import gin

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer import moe_gating
from mesh_tensorflow.transformer.context import Context, TransformerLayer
from mesh_tensorflow.transformer.moe_groups import LayoutHints, slot_dims, token_dims
from mesh_tensorflow.transformer.moe_hparams import HParams, hparam, hparam_of_mode
from mesh_tensorflow.transformer.moe_router import RouterCall

# Applies experts: `[outer_batch, experts, groups, slots, d_model]` -> tensors of the same
# dimensions but the last.
ExpertsFn = Callable[[mtf.Tensor, mtf.Dimension], Sequence[mtf.Tensor]]


def transformer_moe_layer_v1(
  inputs: mtf.Tensor,
  output_dim: mtf.Dimension,
  hparams: Any,
  train: bool,
  variable_dtype: mtf.VariableDType,
  layout: Any = None,
  mesh_shape: Any = None,
  nonpadding: mtf.Tensor | None = None,
  activation: Any = mtf.relu,
  num_microbatches: int | None = None,
  token_embeddings: mtf.Tensor | None = None,
) -> tuple[Any, mtf.Tensor]:
  """Sends each token to a few of many two-layer networks, and adds up what they return.

  Tokens are routed within groups of about `moe_group_size`. Where the layout splits "experts",
  expert weights and work are divided; over the mesh axis of the batch, tokens are exchanged by
  alltoall. Tokens that find no slot, and padding, get zeros.

  Variables: `<gating>/kernel` [d_model, expert_unsplit]; `wi/kernel` (`wi_0/kernel`, ... for
  several activations) [experts, d_model, expert_hidden]; `wo/kernel` [experts, expert_hidden,
  output_dim] (`q_wo/kernel` and `k_wo/kernel` for `moe_use_experts_attention`).

  Args:
    inputs: `[(outer_batch,) batch, ..., d_model]`.
    output_dim: the last dimension of the result.
    hparams: an object with `moe_` attributes, see `MoE1D`; missing ones have their defaults.
    train: whether the layer is being trained.
    variable_dtype: an `mtf.VariableDType`.
    layout: the layout rules that the program will have; None if they are not known.
    mesh_shape: the mesh shape that it will have; None if it is not known.
    nonpadding: 1 for tokens, 0 for padding: some of the leading dims of inputs; None: no padding.
    activation: see `mtf.layers.dense_product`.
    num_microbatches: how many of such calls make a training step; None: 1.
    token_embeddings: of the dims of inputs, for `moe_word_embed_mode`.

  Returns:
    (output, loss): `[<leading dims of inputs>, output_dim]`, or with `moe_use_experts_attention` a
    list of two; the auxiliary loss times `moe_loss_coef`.

  Raises:
    ConfigError: a hyperparameter has a value that is not known.
  """
  dropout_rate = hparam(hparams, "dropout_rate")

  def experts_fn(x: mtf.Tensor, experts_dim: mtf.Dimension) -> list[mtf.Tensor]:
    options = dict(
      expert_dims=[experts_dim], use_bias=False, variable_dtype=variable_dtype
    )
    h = mtf.layers.dense_product(
      x,
      reduced_dims=x.shape.dims[-1:],
      new_dims=mtf.Dimension("expert_hidden", hparam(hparams, "hidden_size")),
      activation_functions=activation,
      name="wi",
      **options,
    )
    if dropout_rate:
      h = mtf.dropout(h, train, rate=dropout_rate)
    names = ["q_wo", "k_wo"] if hparam(hparams, "use_experts_attention") else ["wo"]
    return [
      mtf.layers.dense(h, output_dim, reduced_dims=h.shape.dims[-1:], name=name, **options)
      for name in names
    ]

  outputs, loss = apply_experts(
    inputs,
    output_dim,
    hparams,
    train,
    variable_dtype,
    experts_fn,
    LayoutHints(layout, mesh_shape),
    nonpadding,
    num_microbatches,
    token_embeddings,
  )
  return (outputs if len(outputs) > 1 else outputs[0]), loss


def apply_experts(
  inputs: mtf.Tensor,
  output_dim: mtf.Dimension,
  hparams: Any,
  train: bool,
  variable_dtype: mtf.VariableDType,
  experts_fn: ExpertsFn,
  hints: LayoutHints,
  nonpadding: mtf.Tensor | None = None,
  num_microbatches: int | None = None,
  token_embeddings: mtf.Tensor | None = None,
) -> tuple[list[mtf.Tensor], mtf.Tensor]:
  """Routes tokens to experts and back; see `transformer_moe_layer_v1`.

  Args:
    inputs: see there, as all others.
    output_dim: the last dimension of the results of `experts_fn`.
    hparams: see there.
    train: see there.
    variable_dtype: see there.
    experts_fn: the experts.
    hints: what is known about the layout.
    nonpadding: see there.
    num_microbatches: see there.
    token_embeddings: see there.

  Returns:
    (outputs, loss), an output for each result of `experts_fn`.
  """
  leading, input_dim = inputs.shape.dims[:-1], inputs.shape.dims[-1]
  if leading[0].name == "outer_batch" and len(leading) > 1:
    outer, batch = leading[:2]
  else:
    outer, batch = mtf.Dimension("outer_batch", 1), leading[0]
  n_tokens = math.prod(d.size for d in leading) // outer.size
  groups, group = token_dims(n_tokens, hparam(hparams, "group_size"), batch, "group", hints)
  n = hparam(hparams, "num_experts")
  experts, experts_unsplit = mtf.Dimension("experts", n), mtf.Dimension("expert_unsplit", n)
  capacity = mtf.Dimension("expert_capacity", expert_capacity(group.size, n, hparams, train))
  hidden = mtf.Dimension("expert_hidden", hparam(hparams, "hidden_size"))

  def grouped(x: mtf.Tensor) -> mtf.Tensor:
    last = x.shape.dims[len(leading) :]
    return mtf.reshape(x, mtf.Shape([outer, groups, group, *last]))

  x = grouped(inputs)
  if hparam(hparams, "word_embed_mode") is None or token_embeddings is None:
    token_embeddings = None
  else:
    token_embeddings = grouped(mtf.cast(token_embeddings, inputs.dtype))
  importance = None
  if isinstance(nonpadding, mtf.Tensor):
    nonpadding = mtf.cast(nonpadding, inputs.dtype)
    importance = grouped(mtf.broadcast(nonpadding, mtf.Shape(leading)))
  gating = hparam(hparams, "gating")
  routing, loss = moe_gating.router(gating)(
    RouterCall(
      x,
      None,
      experts_unsplit,
      capacity,
      hparams,
      train,
      variable_dtype,
      importance,
      f"{gating}_gating",
      num_microbatches,
      token_embeddings,
    )
  )
  # The tensor changes hands here: from a part of the groups to a part of the experts.
  here = [outer, experts_unsplit, groups, capacity]
  there = [
    outer, experts, *slot_dims(groups, capacity, batch, [experts, hidden, input_dim, output_dim], hints)
  ]
  slots = routing.dispatch(x, mtf.Shape([*here, input_dim]))
  slots = change_hands(slots, there, hints)
  outputs = []
  for y in experts_fn(slots, experts):
    last = y.shape.dims[-1]
    y = change_hands(y, here, hints)
    y = routing.combine(y, mtf.Shape([outer, groups, group, last]))
    outputs.append(mtf.reshape(y, mtf.Shape([*leading, last])))
  return outputs, mtf.cast(loss, inputs.dtype) * hparam(hparams, "loss_coef")


def expert_capacity(group_size: int, num_experts: int, hparams: Any, train: bool) -> int:
  """The number of slots that an expert has for a group.

  Args:
    group_size: tokens of a group.
    num_experts: number of experts.
    hparams: an object with `moe_` attributes.
    train: whether the layer is being trained.
  """
  factor = hparam_of_mode(hparams, "capacity_factor", train)
  slots = min(group_size, int(group_size * factor / num_experts))
  return max(slots, hparam(hparams, "min_expert_capacity"))


def change_hands(
  x: mtf.Tensor, dims: Sequence[mtf.Dimension], hints: LayoutHints
) -> mtf.Tensor:
  """x with its dimensions but the last renamed, and so laid out in another way.

  If the layout splits "d_model_split", processors along that mesh axis divide the exchange.

  Args:
    x: a tensor.
    dims: new dimensions, of the sizes of those of x but the last.
    hints: what is known about the layout.
  """
  last = x.shape.dims[-1]
  if hints.axis("d_model_split") is not None:
    x = mtf.reshape(x, mtf.Shape([*dims, mtf.Dimension("d_model_split", last.size)]))
  return mtf.reshape(x, mtf.Shape([*dims, last]))


class ExpertsLayer(TransformerLayer):
  """Base class of layers that call a mixture of experts with the context."""

  def call(self, context: Context, x: mtf.Tensor, losses: Any = None) -> Any:
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
    has_length = context.length_dim in x.shape.dims
    embeddings = context.input_embeddings
    if not has_length:
      x = _with_length(x)
      embeddings = _with_length(embeddings) if embeddings is not None else None
    y, loss = self._apply(context, x, embeddings)
    if context.losses is not None:
      context.losses.append(loss)
    if has_length:
      return y
    if isinstance(y, list):
      return [_without_length(t) for t in y]
    return _without_length(y)

  def _apply(
    self, context: Context, x: mtf.Tensor, embeddings: mtf.Tensor | None
  ) -> tuple[Any, mtf.Tensor]:
    """(output, loss) of a tensor with a length dimension."""
    raise NotImplementedError


def _with_length(x: mtf.Tensor) -> mtf.Tensor:
  """A tensor of one position, with a dimension of positions before the last."""
  dims = x.shape.dims
  return mtf.reshape(x, mtf.Shape([*dims[:-1], mtf.Dimension("length", 1), dims[-1]]))


def _without_length(x: mtf.Tensor) -> mtf.Tensor:
  dims = x.shape.dims
  return mtf.reshape(x, mtf.Shape([*dims[:-2], dims[-1]]))


@gin.configurable(module="mesh_tensorflow.transformer.moe")
class MoE1D(ExpertsLayer):
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
    second_threshold_train: see there.
    second_threshold_eval: see there.
    dropout_rate: rate at which hidden values become 0 in training.
    activation: of the hidden layer; see `mtf.layers.dense_product`.
    moe_gating: "top_2", "top_n", "switch", "ntlb", "switch_max" or "expert_selection".
    min_expert_capacity: each expert has at least so many slots.
    switch_policy_train: "argmax", "input_dropout", "input_jitter" or "sample" (switch family).
    switch_policy_eval: likewise when not training.
    switch_dropout: rate of "input_dropout".
    switch_temperature: of "sample".
    switch_jitter: "input_jitter" multiplies inputs by up to 1 plus or minus this.
    ntlb_top_k: how many experts a token tries ("ntlb").
    output_dim: the last dimension of the result; the model's by default.
    use_experts_attention: whether there are two outputs, for queries and keys.
    z_loss: coefficient of the router's z-loss in training; None: none.
    word_embed_mode: how token embeddings enter the router: None, "concat", "concat_stop_grad",
      "add", "add_stop_grad" or "embed_only".
    use_second_place_expert_prob: probability, in training, to avoid a token's best expert (switch,
      switch_max, ntlb); None: never.
    use_second_place_expert_prob_temp: then the expert is drawn at this temperature; None: it is
      the second best.
    top_n_num_experts_per_token: n of "top_n".
  """

  def __init__(
    self,
    num_experts: int = 16,
    loss_coef: float = 1e-2,
    hidden_size: int = 4096,
    group_size: int = 1024,
    capacity_factor_train: float = 1.25,
    capacity_factor_eval: float = 2.0,
    use_second_place_loss: bool = False,
    second_policy_train: str = "random",
    second_policy_eval: str = "random",
    second_threshold_train: float = 0.2,
    second_threshold_eval: float = 0.2,
    dropout_rate: float = 0.0,
    activation: Any = "relu",
    moe_gating: str = "top_2",
    min_expert_capacity: int = 4,
    switch_policy_train: str = "input_jitter",
    switch_policy_eval: str = "input_jitter",
    switch_dropout: float = 0.1,
    switch_temperature: float = 1.0,
    switch_jitter: float = 1e-2,
    ntlb_top_k: int = 4,
    output_dim: mtf.Dimension | None = None,
    use_experts_attention: bool = False,
    z_loss: float | None = None,
    word_embed_mode: str | None = None,
    use_second_place_expert_prob: float | None = None,
    use_second_place_expert_prob_temp: float | None = None,
    top_n_num_experts_per_token: int = 3,
  ):
    self._hparams = HParams(
      moe_gating=moe_gating,
      moe_num_experts=num_experts,
      moe_loss_coef=loss_coef,
      moe_hidden_size=hidden_size,
      moe_group_size=group_size,
      moe_min_expert_capacity=min_expert_capacity,
      moe_capacity_factor_train=capacity_factor_train,
      moe_capacity_factor_eval=capacity_factor_eval,
      moe_use_second_place_loss=use_second_place_loss,
      moe_second_policy_train=second_policy_train,
      moe_second_policy_eval=second_policy_eval,
      moe_second_threshold_train=second_threshold_train,
      moe_second_threshold_eval=second_threshold_eval,
      moe_dropout_rate=dropout_rate,
      moe_switch_policy_train=switch_policy_train,
      moe_switch_policy_eval=switch_policy_eval,
      moe_switch_dropout=switch_dropout,
      moe_switch_temperature=switch_temperature,
      moe_switch_jitter=switch_jitter,
      moe_output_dim=output_dim,
      moe_ntlb_top_k=ntlb_top_k,
      moe_use_experts_attention=use_experts_attention,
      moe_z_loss=z_loss,
      moe_word_embed_mode=word_embed_mode,
      moe_use_second_place_expert_prob=use_second_place_expert_prob,
      moe_use_second_place_expert_prob_temp=use_second_place_expert_prob_temp,
      moe_top_n_num_experts_per_token=top_n_num_experts_per_token,
    )
    self._activation = activation

  def _apply(
    self, context: Context, x: mtf.Tensor, embeddings: mtf.Tensor | None
  ) -> tuple[Any, mtf.Tensor]:
    return transformer_moe_layer_v1(
      x,
      self._hparams.moe_output_dim or context.model.model_dim,
      self._hparams,
      context.train,
      context.variable_dtype,
      layout=context.model.layout,
      mesh_shape=context.model.mesh_shape,
      nonpadding=context.nonpadding,
      activation=self._activation,
      num_microbatches=context.num_microbatches,
      token_embeddings=embeddings,
    )
