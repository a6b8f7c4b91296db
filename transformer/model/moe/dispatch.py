"""Tokens to experts and back: groups, routing, and the exchange between processors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.layers.dense import Activation
from mesh_tensorflow.transformer.model.moe.groups import LayoutHints, slot_dims, token_dims
from mesh_tensorflow.transformer.model.moe.hparams import hparam, hparam_of_mode
from mesh_tensorflow.transformer.model.moe.router import RouterCall, router, summarize_routing
from mesh_tensorflow.transformer.model.moe.routing import Routing
from mesh_tensorflow.transformer.model.step_sums import StepSum

# Applies experts: `[outer_batch, experts, groups, slots, d_model]` -> tensors of the same
# dimensions but the last.
ExpertsFn = Callable[[mtf.Tensor, mtf.Dimension], Sequence[mtf.Tensor]]


@dataclasses.dataclass(frozen=True)
class ExpertsCall:
  """Tokens, and what is to be done with them; see `transformer_moe_layer_v1`.

  Attributes:
    inputs: `[(outer_batch,) batch, ..., d_model]`.
    output_dim: the last dimension of the results.
    hparams: an object with `moe_` attributes, see `MoE1D`.
    train: True in training.
    variable_dtype: an `mtf.VariableDType`, or one dtype for all three.
    activation: activation of the hidden layer; see `mtf.layers.dense_product`.
    hints: the known parts of the layout.
    nonpadding: 1 for tokens, 0 for padding: some of the leading dims of inputs; None: no padding.
    num_microbatches: number of such calls in a training step; None: 1.
    token_embeddings: tensor with the dims of inputs, for `moe_word_embed_mode`.
    loads: list to which the experts' token counts are appended, if `moe_balance_rate` is set.
  """

  inputs: mtf.Tensor
  output_dim: mtf.Dimension
  hparams: object
  train: bool
  variable_dtype: mtf.VariableDType | tf.DType
  activation: Activation
  hints: LayoutHints
  nonpadding: mtf.Tensor | None = None
  num_microbatches: int | None = None
  token_embeddings: mtf.Tensor | None = None
  loads: list[StepSum] | None = None

  def hparam(self, name: str) -> Any:
    """A hyperparameter, or its default."""
    return hparam(self.hparams, name)


@dataclasses.dataclass(frozen=True)
class Routed:
  """Tokens in groups, and where a router sends them.

  Attributes:
    leading: the dims of tokens as they were.
    batch: the one of them that the batch is split over.
    token_dims: the outer batch, groups, and the tokens of a group.
    x: the tokens, `[<token_dims>, d_model]`.
    capacity: the slots of an expert for a group.
    routing: the decision.
    loss: the router's auxiliary loss, a scalar.
  """

  leading: list[mtf.Dimension]
  batch: mtf.Dimension
  token_dims: list[mtf.Dimension]
  x: mtf.Tensor
  capacity: mtf.Dimension
  routing: Routing
  loss: mtf.Tensor


def route(call: ExpertsCall) -> Routed:
  """Groups tokens, and lets the router decide."""
  leading = call.inputs.shape.dims[:-1]
  if leading[0].name == "outer_batch" and len(leading) > 1:
    outer, batch = leading[:2]
  else:
    outer, batch = mtf.Dimension("outer_batch_unsplit", 1), leading[0]
  n_tokens = math.prod(d.size for d in leading) // outer.size
  groups, group = token_dims(n_tokens, call.hparam("group_size"), batch, "group", call.hints)
  n = call.hparam("num_experts")
  slots = expert_capacity(group.size, n, call.hparams, call.train)
  capacity = mtf.Dimension("expert_capacity", slots)

  def grouped(x: mtf.Tensor) -> mtf.Tensor:
    last = x.shape.dims[len(leading) :]
    return mtf.reshape(x, mtf.Shape([outer, groups, group, *last]))

  x = grouped(call.inputs)
  token_embeddings = None
  if call.hparam("word_embed_mode") is not None and call.token_embeddings is not None:
    token_embeddings = grouped(mtf.cast(call.token_embeddings, x.dtype))
  importance = None
  if isinstance(call.nonpadding, mtf.Tensor):
    nonpadding = mtf.cast(call.nonpadding, x.dtype)
    importance = grouped(mtf.broadcast(nonpadding, mtf.Shape(leading)))
  gating = call.hparam("gating")
  of_router = RouterCall(
    x, None, mtf.Dimension("expert_unsplit", n), capacity, call.hparams, call.train,
    call.variable_dtype, importance, f"{gating}_gating", call.num_microbatches, token_embeddings,
    call.loads,
  )  # fmt: skip
  routing, loss = router(gating)(of_router)
  if call.train and call.hparam("summaries"):
    summarize_routing(f"{gating}_gating", routing, loss, importance)
  return Routed(leading, batch, [outer, groups, group], x, capacity, routing, loss)


def apply_experts(call: ExpertsCall, experts_fn: ExpertsFn) -> tuple[list[mtf.Tensor], mtf.Tensor]:
  """Routes tokens to experts and back.

  Args:
    call: what is to be done.
    experts_fn: the experts, whose results have the last dimension `call.output_dim`.

  Returns:
    (outputs, loss), an output for each result of `experts_fn`.
  """
  routed, hints = route(call), call.hints
  outer, groups, group = routed.token_dims
  n, input_dim = call.hparam("num_experts"), call.inputs.shape.dims[-1]
  # Two names for one thing: the router, whose tokens are split, needs all experts of each token.
  experts, experts_unsplit = mtf.Dimension("experts", n), routed.routing.experts_dim
  hidden = mtf.Dimension("expert_hidden", call.hparam("hidden_size"))
  # The tensor changes hands here: from a part of the groups to a part of the experts.
  here = [outer, experts_unsplit, groups, routed.capacity]
  others = [experts, hidden, input_dim, call.output_dim]
  there = [outer, experts, *slot_dims(groups, routed.capacity, routed.batch, others, hints)]
  slots = routed.routing.dispatch(routed.x, mtf.Shape([*here, input_dim]))
  slots = change_hands(slots, there, hints)
  outputs = []
  for y in experts_fn(slots, experts):
    last = y.shape.dims[-1]
    y = change_hands(y, here, hints)
    y = routed.routing.combine(y, mtf.Shape([outer, groups, group, last]))
    outputs.append(mtf.reshape(y, mtf.Shape([*routed.leading, last])))
  return outputs, mtf.cast(routed.loss, call.inputs.dtype) * call.hparam("loss_coef")


def expert_capacity(group_size: int, num_experts: int, hparams: object, train: bool) -> int:
  """The number of slots that an expert has for a group; without dropping, one for each token.

  Args:
    group_size: tokens of a group.
    num_experts: number of experts.
    hparams: an object with `moe_` attributes.
    train: whether the layer is being trained.
  """
  if hparam(hparams, "dropless"):
    return group_size
  factor = hparam_of_mode(hparams, "capacity_factor", train)
  # An expert gets a token of the group at most once: it cannot fill more slots than that.
  slots = min(group_size, int(group_size * factor / num_experts))
  return max(slots, int(hparam(hparams, "min_expert_capacity")))


def change_hands(x: mtf.Tensor, dims: Sequence[mtf.Dimension], hints: LayoutHints) -> mtf.Tensor:
  """Renames all dimensions of x but the last, so that its layout changes (an alltoall).

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
