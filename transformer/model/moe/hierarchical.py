"""A mixture of experts of two levels: a router chooses among rows of experts, others within."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.meshes.layout import LayoutLike
from mesh_tensorflow.program.dimensions import ShapeLike
from mesh_tensorflow.transformer.model.context import Context
from mesh_tensorflow.transformer.model.moe.dispatch import change_hands
from mesh_tensorflow.transformer.model.moe.groups import LayoutHints, slot_dims, token_dims
from mesh_tensorflow.transformer.model.moe.hparams import hparam, hparam_of_mode
from mesh_tensorflow.transformer.model.moe.layer import ExpertsLayer
from mesh_tensorflow.transformer.model.moe.router import RouterCall, top_2_routing
from mesh_tensorflow.transformer.model.moe.routing import Routing


def transformer_moe_layer_v2(
  inputs: mtf.Tensor,
  output_dim: mtf.Dimension,
  hparams: Any,
  train: bool,
  variable_dtype: mtf.VariableDType | tf.DType,
  layout: LayoutLike | None = None,
  mesh_shape: ShapeLike | None = None,
  nonpadding: mtf.Tensor | None = None,
  num_microbatches: int | None = None,
) -> tuple[mtf.Tensor, mtf.Tensor]:
  """Like `transformer_moe_layer_v1` with experts in a table of `moe_expert_x` by `moe_expert_y`.

  A token goes to its two best rows x, and in each to the two best experts y; where it is only the
  second choice of a row, to the best expert alone. On a mesh of two dimensions, tokens are
  exchanged along one of them for x ("batch" and "expert_x" split over it), then along the other
  for y ("outer_batch" and "expert_y").

  Variables: `outer_gating/kernel` [d_model, expert_x_unsplit]; `inner_gating/kernel` [expert_x,
  d_model, expert_y_unsplit]; `wi/kernel` [expert_y, expert_x, d_model, expert_hidden]; `wo/kernel`
  [expert_y, expert_x, expert_hidden, output_dim].

  Arguments are those of `transformer_moe_layer_v1`, with `[(outer_batch,) batch, length, d_model]`
  as inputs and the hyperparameters of `MoE2D`.

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
  # The Python int 1 of a `Context` is no padding, too.
  if isinstance(nonpadding, mtf.Tensor):
    nonpadding = mtf.broadcast(mtf.cast(nonpadding, inputs.dtype), mtf.Shape(leading))
  else:
    nonpadding = None
  levels = _Levels(
    hparams,
    train,
    variable_dtype,
    num_microbatches,
    LayoutHints(layout, mesh_shape),
    mtf.Dimension("expert_x", hparams.moe_expert_x),
    mtf.Dimension("expert_y", hparams.moe_expert_y),
    mtf.Dimension("expert_hidden", hparam(hparams, "hidden_size")),
    input_dim,
    output_dim,
  )
  y, loss = _through_both_levels(levels, inputs, nonpadding)
  loss = mtf.cast(loss, inputs.dtype) * hparam(hparams, "loss_coef")
  return mtf.reshape(y, mtf.Shape([*leading, output_dim])), loss


@dataclasses.dataclass(frozen=True)
class _Level:
  """The dimensions of one level.

  Attributes:
    tokens: groups, and the tokens of a group.
    experts: among which this level's router chooses, under a name that is not split.
    capacity: the slots of an expert for a group.
    slots: groups and slots, as experts see them.
  """

  tokens: tuple[mtf.Dimension, mtf.Dimension]
  experts: mtf.Dimension
  capacity: mtf.Dimension
  slots: tuple[mtf.Dimension, mtf.Dimension]


@dataclasses.dataclass(frozen=True)
class _Levels:
  """Settings common to both levels; see `transformer_moe_layer_v2` and `RouterCall`."""

  hparams: Any
  train: bool
  variable_dtype: mtf.VariableDType | tf.DType
  num_microbatches: int | None
  hints: LayoutHints
  x_dim: mtf.Dimension
  y_dim: mtf.Dimension
  hidden_dim: mtf.Dimension
  input_dim: mtf.Dimension
  output_dim: mtf.Dimension

  def level(
    self,
    experts: mtf.Dimension,
    n_tokens: int,
    batch: mtf.Dimension,
    factor: float,
    divisor: int = 1,
  ) -> _Level:
    """The dimensions of a level.

    Args:
      experts: those of the level.
      n_tokens: number of tokens in all.
      batch: the dimension over whose mesh axis the level exchanges tokens.
      factor: the capacity factor: slots of all experts per token of a group.
      divisor: divides the number of groups.
    """
    which = experts.name.removeprefix("expert_")
    max_size = hparam(self.hparams, "group_size")
    tokens = token_dims(n_tokens, max_size, batch, f"group_size_{which}", self.hints, divisor)
    group_size = tokens[1].size
    # As `dispatch.expert_capacity`, with a factor of the level's own.
    slots = min(group_size, int(group_size * factor / experts.size))
    slots = max(slots, hparam(self.hparams, "min_expert_capacity"))
    capacity = mtf.Dimension(f"expert_capacity_{which}", slots)
    work = [self.x_dim, self.y_dim, self.hidden_dim, self.input_dim, self.output_dim]
    return _Level(
      tokens,
      mtf.Dimension(f"{experts.name}_unsplit", experts.size),
      capacity,
      slot_dims(tokens[0], capacity, batch, work, self.hints),
    )

  def routed(
    self,
    x: mtf.Tensor,
    outer_expert_dims: list[mtf.Dimension] | None,
    level: _Level,
    importance: mtf.Tensor | None,
    name: str,
  ) -> tuple[Routing, mtf.Tensor]:
    """(routing, auxiliary loss) of a level."""
    call = RouterCall(
      x, outer_expert_dims, level.experts, level.capacity, self.hparams, self.train,
      self.variable_dtype, importance, name, self.num_microbatches, None,
    )  # fmt: skip
    return top_2_routing(call)

  def experts(self, slots: mtf.Tensor) -> mtf.Tensor:
    """Applies the experts to their slots; returns `[..., output_dim]`."""
    options: dict[str, Any] = dict(
      expert_dims=[self.y_dim, self.x_dim], use_bias=False, variable_dtype=self.variable_dtype
    )
    h = mtf.layers.dense(
      slots,
      self.hidden_dim,
      reduced_dims=[self.input_dim],
      activation=mtf.relu,
      name="wi",
      **options,
    )
    return mtf.layers.dense(
      h, self.output_dim, reduced_dims=[self.hidden_dim], name="wo", **options
    )


def _through_both_levels(
  levels: _Levels, inputs: mtf.Tensor, nonpadding: mtf.Tensor | None
) -> tuple[mtf.Tensor, mtf.Tensor]:
  """To the experts and back.

  Args:
    levels: what both levels have in common.
    inputs: `[(outer_batch,) batch, length, d_model]`.
    nonpadding: of the leading dims of inputs, or None.

  Returns:
    (output, loss): `[outer_batch, <groups>, <tokens of a group>, output_dim]`, and the sum of the
    routers' losses.
  """
  leading, input_dim = inputs.shape.dims[:-1], levels.input_dim
  outer = leading[0] if len(leading) == 3 else mtf.Dimension("outer_batch_unsplit", 1)
  batch, length = leading[-2:]

  # The first level: groups of tokens, to rows of experts.
  factor = hparam_of_mode(levels.hparams, "capacity_factor", levels.train)
  first = levels.level(levels.x_dim, batch.size * length.size, batch, factor)
  tokens = [outer, *first.tokens]
  importance = None if nonpadding is None else mtf.reshape(nonpadding, mtf.Shape(tokens))
  x = mtf.reshape(inputs, mtf.Shape([*tokens, input_dim]))
  outer_routing, outer_loss = levels.routed(x, None, first, importance, "outer_gating")
  here = [first.experts, outer, first.tokens[0], first.capacity]
  there = [levels.x_dim, outer, *first.slots]
  slots = outer_routing.dispatch(x, mtf.Shape([*here, input_dim]))
  slots = change_hands(slots, there, levels.hints)

  # The second level: what a row of experts got is divided into groups again.
  n_slots = outer.size * first.tokens[0].size * first.capacity.size
  factor = hparam(levels.hparams, "capacity_factor_second_level")
  # None of them has slots of two outer batches, which may be on two processors.
  second = levels.level(levels.y_dim, n_slots, outer, factor, outer.size)
  tokens_y = [levels.x_dim, *second.tokens]
  gates = mtf.transpose(outer_routing.gates_of_slots(), mtf.Shape(here))
  # 1 for first choices, 0.5 for second ones, 0 for empty slots. The two gates of a token add up to
  # 1: only the first can be above a half.
  chosen_first = mtf.cast(mtf.greater(gates, 0.5), tf.float32)
  importance = 0.5 * (chosen_first + mtf.cast(mtf.greater(gates, 0.0), tf.float32))
  # The way that the slots took: first to the row of experts, then into its groups.
  importance = mtf.reshape(mtf.reshape(importance, mtf.Shape(there)), mtf.Shape(tokens_y))
  y = mtf.reshape(slots, mtf.Shape([*tokens_y, input_dim]))
  inner_routing, inner_loss = levels.routed(y, [levels.x_dim], second, importance, "inner_gating")
  here_y = [second.experts, levels.x_dim, second.tokens[0], second.capacity]
  there_y = [levels.y_dim, levels.x_dim, *second.slots]
  slots = inner_routing.dispatch(y, mtf.Shape([*here_y, input_dim]))
  h = levels.experts(change_hands(slots, there_y, levels.hints))

  # Back through both levels.
  h = change_hands(h, here_y, levels.hints)
  h = inner_routing.combine(h, mtf.Shape([*tokens_y, levels.output_dim]))
  h = mtf.reshape(h, mtf.Shape([*there, levels.output_dim]))
  h = change_hands(h, here, levels.hints)
  h = outer_routing.combine(h, mtf.Shape([*tokens, levels.output_dim]))
  return h, outer_loss + inner_loss


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
