"""A mixture of experts of two levels: a router chooses among rows of experts, others within."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer.models.context import Context
from mesh_tensorflow.transformer.moe.dispatch import change_hands
from mesh_tensorflow.transformer.moe.groups import LayoutHints, slot_dims, token_dims
from mesh_tensorflow.transformer.moe.hparams import hparam, hparam_of_mode
from mesh_tensorflow.transformer.moe.layer import ExpertsLayer
from mesh_tensorflow.transformer.moe.router import RouterCall
from mesh_tensorflow.transformer.moe.routing import Routing
from mesh_tensorflow.transformer.moe.top_n import top_2_routing


def transformer_moe_layer_v2(
  inputs: mtf.Tensor,
  output_dim: mtf.Dimension,
  hparams: Any,
  train: bool,
  variable_dtype: mtf.VariableDType,
  layout: Any = None,
  mesh_shape: Any = None,
  nonpadding: mtf.Tensor | None = None,
  num_microbatches: int | None = None,
) -> tuple[mtf.Tensor, mtf.Tensor]:
  """As `transformer_moe_layer_v1` with experts in a table of `moe_expert_x` by `moe_expert_y`.

  A token goes to its two best rows x, and in each to the two best experts y; where it is only the
  second choice of a row, to the best expert alone. On a mesh of two dimensions, tokens are
  exchanged along one of them for x ("batch" and "expert_x" split over it), then along the other
  for y ("outer_batch" and "expert_y").

  Variables: `outer_gating/kernel` [d_model, expert_x_unsplit]; `inner_gating/kernel` [expert_x,
  d_model, expert_y_unsplit]; `wi/kernel` [expert_y, expert_x, d_model, expert_hidden]; `wo/kernel`
  [expert_y, expert_x, expert_hidden, output_dim].

  Args:
    inputs: `[(outer_batch,) batch, length, d_model]`.
    output_dim: the last dimension of the result.
    hparams: an object with `moe_` attributes, see `MoE2D`; missing ones have their defaults.
    train: whether the layer is being trained.
    variable_dtype: an `mtf.VariableDType`.
    layout: the layout rules that the program will have; None if they are not known.
    mesh_shape: the mesh shape that it will have; None if it is not known.
    nonpadding: 1 for tokens, 0 for padding: some of the leading dims of inputs; None: no padding.
    num_microbatches: how many of such calls make a training step; None: 1.

  Returns:
    (output, loss): `[<leading dims of inputs>, output_dim]`; the auxiliary loss times
    `moe_loss_coef`.

  Raises:
    ConfigError: `moe_gating` is not "top_2".
    ShapeError: inputs has not 3 or 4 dimensions.
  """
  if hparam(hparams, "gating") != "top_2":
    raise errors.ConfigError(
      f"two-level mixture of experts: moe_gating {hparam(hparams, 'gating')!r} is not available; "
      "only top_2 is"
    )
  leading, input_dim = inputs.shape.dims[:-1], inputs.shape.dims[-1]
  if len(leading) not in (2, 3):
    raise errors.ShapeError(
      f"two-level mixture of experts: inputs must be [(outer_batch,) batch, length, d_model], got "
      f"{inputs}"
    )
  hints = LayoutHints(layout, mesh_shape)
  outer = leading[0] if len(leading) == 3 else mtf.Dimension("outer_batch_unsplit", 1)
  batch, length = leading[-2:]
  size_x, size_y = hparams.moe_expert_x, hparams.moe_expert_y
  x_dim, y_dim = mtf.Dimension("expert_x", size_x), mtf.Dimension("expert_y", size_y)
  x_unsplit = mtf.Dimension("expert_x_unsplit", size_x)
  y_unsplit = mtf.Dimension("expert_y_unsplit", size_y)
  hidden = mtf.Dimension("expert_hidden", hparam(hparams, "hidden_size"))
  max_size = hparam(hparams, "group_size")
  work = [x_dim, y_dim, hidden, input_dim, output_dim]

  def routed(
    x: mtf.Tensor,
    outer_expert_dims: list[mtf.Dimension] | None,
    experts: mtf.Dimension,
    capacity: mtf.Dimension,
    importance: mtf.Tensor | None,
    name: str,
  ) -> tuple[Routing, mtf.Tensor]:
    call = RouterCall(
      x, outer_expert_dims, experts, capacity, hparams, train, variable_dtype, importance, name,
      num_microbatches, None,
    )  # fmt: skip
    return top_2_routing(call)

  def capacity(name: str, tokens: int, factor: float, n: int) -> mtf.Dimension:
    slots = max(min(tokens, int(tokens * factor / n)), hparam(hparams, "min_expert_capacity"))
    return mtf.Dimension(name, slots)

  # The first level: groups of tokens, to rows of experts.
  groups, group = token_dims(batch.size * length.size, max_size, batch, "group_size_x", hints)
  factor = hparam_of_mode(hparams, "capacity_factor", train)
  capacity_x = capacity("expert_capacity_x", group.size, factor, size_x)
  tokens = [outer, groups, group]
  importance = None
  if isinstance(nonpadding, mtf.Tensor):
    nonpadding = mtf.broadcast(mtf.cast(nonpadding, inputs.dtype), mtf.Shape(leading))
    importance = mtf.reshape(nonpadding, mtf.Shape(tokens))
  x = mtf.reshape(inputs, mtf.Shape([*tokens, input_dim]))
  outer_routing, outer_loss = routed(x, None, x_unsplit, capacity_x, importance, "outer_gating")
  here = [x_unsplit, outer, groups, capacity_x]
  there = [x_dim, outer, *slot_dims(groups, capacity_x, batch, work, hints)]
  slots = change_hands(outer_routing.dispatch(x, mtf.Shape([*here, input_dim])), there, hints)

  # The second level: what a row of experts got is divided into groups again.
  n_slots = outer.size * groups.size * capacity_x.size
  # None of them has slots of two outer batches, which may be on two processors.
  groups_y, group_y = token_dims(n_slots, max_size, outer, "group_size_y", hints, outer.size)
  factor = hparam(hparams, "capacity_factor_second_level")
  capacity_y = capacity("expert_capacity_y", group_y.size, factor, size_y)
  tokens_y = [x_dim, groups_y, group_y]
  gates = mtf.transpose(outer_routing.gates_of_slots(), mtf.Shape(here))
  # 1 for first choices, 0.5 for second ones, 0 for empty slots.
  first = mtf.cast(mtf.greater(gates, 0.5), tf.float32)
  importance = 0.5 * (first + mtf.cast(mtf.greater(gates, 0.0), tf.float32))
  importance = mtf.reshape(mtf.reshape(importance, mtf.Shape(there)), mtf.Shape(tokens_y))
  y = mtf.reshape(slots, mtf.Shape([*tokens_y, input_dim]))
  inner_routing, inner_loss = routed(y, [x_dim], y_unsplit, capacity_y, importance, "inner_gating")
  here_y = [y_unsplit, x_dim, groups_y, capacity_y]
  there_y = [y_dim, x_dim, *slot_dims(groups_y, capacity_y, outer, work, hints)]
  slots = change_hands(inner_routing.dispatch(y, mtf.Shape([*here_y, input_dim])), there_y, hints)

  options = dict(expert_dims=[y_dim, x_dim], use_bias=False, variable_dtype=variable_dtype)
  h = mtf.layers.dense(
    slots, hidden, reduced_dims=[input_dim], activation=mtf.relu, name="wi", **options
  )
  h = mtf.layers.dense(h, output_dim, reduced_dims=[hidden], name="wo", **options)

  # Back through both levels.
  h = change_hands(h, here_y, hints)
  h = inner_routing.combine(h, mtf.Shape([*tokens_y, output_dim]))
  h = mtf.reshape(h, mtf.Shape([*there, output_dim]))
  h = change_hands(h, here, hints)
  h = outer_routing.combine(h, mtf.Shape([*tokens, output_dim]))
  loss = mtf.cast(outer_loss + inner_loss, inputs.dtype) * hparam(hparams, "loss_coef")
  return mtf.reshape(h, mtf.Shape([*leading, output_dim])), loss


@dataclasses.dataclass(eq=False, repr=False)
class MoE2D(ExpertsLayer):
  """Two-level mixture of experts: see `transformer_moe_layer_v2`.

  Args:
    expert_x: rows of experts.
    expert_y: experts in a row.
    loss_coef: coefficient of the auxiliary losses.
    hidden_size: size of the experts' hidden layer.
    group_size: see `MoE1D`.
    capacity_factor_train: see `MoE1D`; of the first level.
    capacity_factor_eval: likewise.
    capacity_factor_second_level: slots of a row per token that the first level may bring to it.
    use_second_place_loss: see `MoE1D`.
    second_policy_train: see `MoE1D`.
    second_policy_eval: see `MoE1D`.
    second_threshold_train: see `MoE1D`.
    second_threshold_eval: see `MoE1D`.
  """

  expert_x: int = 8
  expert_y: int = 8
  loss_coef: float = 1e-2
  hidden_size: int = 4096
  group_size: int = 1024
  capacity_factor_train: float = 1.25
  capacity_factor_eval: float = 2.0
  capacity_factor_second_level: float = 1.0
  use_second_place_loss: bool = False
  second_policy_train: str = "random"
  second_policy_eval: str = "random"
  second_threshold_train: float = 0.2
  second_threshold_eval: float = 0.2

  def _apply(self, context: Context, x: mtf.Tensor) -> tuple[mtf.Tensor, mtf.Tensor]:
    # One position at a time, there is no dimension of positions.
    dims = x.shape.dims
    has_length = context.length_dim in dims
    if not has_length:
      x = mtf.reshape(x, mtf.Shape([*dims[:-1], mtf.Dimension("one_position", 1), dims[-1]]))
    y, loss = transformer_moe_layer_v2(
      x,
      context.model.model_dim,
      self._hparams,
      context.train,
      context.variable_dtype,
      layout=context.model.layout,
      mesh_shape=context.model.mesh_shape,
      nonpadding=context.nonpadding,
      num_microbatches=context.num_microbatches,
    )
    if not has_length:
      y = mtf.reshape(y, mtf.Shape([*dims[:-1], context.model.model_dim]))
    return y, loss
