"""A mixture of experts of different depths and widths."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import gin
import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import ABOVE_ZERO, BELOW_ONE, COUNT, affects, takes
from mesh_tensorflow.layers.dense import Activation
from mesh_tensorflow.meshes.layout import LayoutLike
from mesh_tensorflow.program.dimensions import ShapeLike
from mesh_tensorflow.transformer.model import sublayers
from mesh_tensorflow.transformer.model.context import Context
from mesh_tensorflow.transformer.model.moe.dispatch import ExpertsCall, apply_experts
from mesh_tensorflow.transformer.model.moe.groups import LayoutHints
from mesh_tensorflow.transformer.model.moe.hparams import hparam
from mesh_tensorflow.transformer.model.moe.layer import OneLevelExpertsLayer


def generate_heterogeneous_expert_masks(
  mask_info: Sequence[dict[str, float]],
  num_experts: int,
  experts_dim: mtf.Dimension,
  mesh: mtf.Mesh,
  expert_width: int,
) -> mtf.Tensor:
  """1 for hidden values that an expert has in a layer, 0 for those it has not.

  Args:
    mask_info: kinds of experts, each a dict of `percent_number`, the fraction of the experts (if
      below 1) or their number; `layers`; and `width`. The last kind gets all experts that are left.
    num_experts: number of experts.
    experts_dim: the experts.
    mesh: an `mtf.Mesh`.
    expert_width: an expert has `width * expert_width` hidden values, of as many as the largest
      width.

  Returns:
    float64 `[expert_hidden, num_expert_layers, <experts_dim>]`, of the largest width and number of
    layers.

  Raises:
    ConfigError: the kinds have more experts than there are; a kind has no layer or no width.
  """
  for kind in mask_info:
    if kind["width"] < 1 or kind["layers"] < 1:
      raise errors.ConfigError(
        f"heterogeneous_mask_info: {kind} needs layers and width of at least 1"
      )
  width = max(int(kind["width"]) for kind in mask_info)
  layers = max(int(kind["layers"]) for kind in mask_info)
  mask = np.zeros([width, layers, num_experts])
  first = 0
  for i, kind in enumerate(mask_info):
    number = kind["percent_number"]
    number = int(num_experts * number) if number < 1 else int(number)
    # The last kind gets what is left: fractions of a number of experts are rounded down.
    end = num_experts if i == len(mask_info) - 1 else first + number
    if end > num_experts:
      raise errors.ConfigError(
        f"heterogeneous_mask_info {list(mask_info)}: its first {i + 1} kinds have {end} experts, "
        f"{experts_dim.name} is {num_experts}"
      )
    mask[: int(kind["width"] * expert_width), : int(kind["layers"]), first:end] = 1.0
    first = end
  dims = [mtf.Dimension("expert_hidden", width), mtf.Dimension("num_expert_layers", layers)]
  return mtf.import_tf_tensor(mesh, tf.constant(mask), mtf.Shape([*dims, experts_dim]))


def _sizes_and_masks(inputs: mtf.Tensor, hparams: Any) -> tuple[int, int, list[mtf.Tensor]]:
  """Number of layers, their hidden size, and for each layer which expert has how much of it."""
  num_layers, hidden_size = getattr(hparams, "moe_num_layers", 1), hparam(hparams, "hidden_size")
  mask_info = getattr(hparams, "moe_heterogeneous_mask_info", None)
  if not mask_info:
    return num_layers, hidden_size, []
  experts_dim = mtf.Dimension("experts", hparam(hparams, "num_experts"))
  mask = generate_heterogeneous_expert_masks(
    mask_info, experts_dim.size, experts_dim, inputs.mesh, hidden_size
  )
  hidden_dim, layers_dim, _ = mask.shape.dims
  masks = mtf.unstack(mtf.cast(mask, inputs.dtype), layers_dim)
  return layers_dim.size, hidden_dim.size, masks


def _check_output_dim(inputs: mtf.Tensor, output_dim: mtf.Dimension, num_layers: int) -> None:
  if num_layers > 1 and output_dim != inputs.shape.dims[-1]:
    raise errors.ShapeError(
      f"heterogeneous mixture of experts: {num_layers} layers with residual connections need "
      f"{output_dim} to be the last dimension of {inputs}"
    )


def transformer_moe_layer_v1(
  inputs: mtf.Tensor,
  output_dim: mtf.Dimension,
  hparams: Any,
  train: bool,
  variable_dtype: mtf.VariableDType | tf.DType,
  layout: LayoutLike | None = None,
  mesh_shape: ShapeLike | None = None,
  nonpadding: mtf.Tensor | None = None,
  activation: Activation = mtf.relu,
  num_microbatches: int | None = None,
  token_embeddings: mtf.Tensor | None = None,
  context: Context | None = None,
) -> tuple[mtf.Tensor, mtf.Tensor]:
  """Like `moe.transformer_moe_layer_v1`, with experts that are stacks of feed-forward layers.

  Between the layers of an expert there are `sublayer_dropout`, a residual connection, and
  `sublayer_rms_norm`. With `moe_heterogeneous_mask_info`, experts have different numbers of layers
  and hidden sizes (see `generate_heterogeneous_expert_masks`, whose sizes replace `moe_num_layers`
  and `moe_hidden_size`); a layer that an expert does not have adds nothing.

  Variables: `<gating>/kernel`; for layer i `expert_layer_<i>/wi/kernel` and
  `expert_layer_<i>/wo/kernel`; after the first `expert_layer_<i>/rms_norm/scale`.

  Arguments are those of `moe.transformer_moe_layer_v1`, and the `Context`, of which sublayers need
  the model and the mode. With several layers, output_dim must be the last dimension of inputs.

  Returns:
    (output, loss).

  Raises:
    ConfigError: see `generate_heterogeneous_expert_masks`.
    ShapeError: there are several layers and output_dim is not the last dimension of inputs.
  """
  num_layers, hidden_size, masks = _sizes_and_masks(inputs, hparams)
  _check_output_dim(inputs, output_dim, num_layers)
  around: Any = context  # A caller without a context has one layer, and no sublayers between.
  hidden = mtf.Dimension("expert_hidden", hidden_size)
  dropout_rate = hparam(hparams, "dropout_rate")

  def experts_fn(x: mtf.Tensor, experts: mtf.Dimension) -> list[mtf.Tensor]:
    options: dict[str, Any] = dict(
      expert_dims=[experts], use_bias=False, variable_dtype=variable_dtype
    )
    for i in range(num_layers):
      with mtf.variable_scope(f"expert_layer_{i}"):
        y = x if i == 0 else sublayers.sublayer_rms_norm(x, None, around)
        h = mtf.layers.dense_product(
          y,
          reduced_dims=y.shape.dims[-1:],
          new_dims=hidden,
          activation_functions=activation,
          name="wi",
          **options,
        )
        if dropout_rate:
          h = mtf.dropout(h, train, rate=dropout_rate)
        if masks:
          h *= masks[i]  # Without a bias, hidden values of 0 add nothing through `wo`.
        y = mtf.layers.dense(h, output_dim, reduced_dims=[hidden], name="wo", **options)
        if i < num_layers - 1:
          y = _sublayer_dropout(y, around)
        x = y if i == 0 else x + y
    return [x]

  sized = copy.copy(hparams)
  sized.moe_hidden_size = hidden_size
  call = ExpertsCall(
    inputs, output_dim, sized, train, variable_dtype, activation, LayoutHints(layout, mesh_shape),
    nonpadding, num_microbatches, token_embeddings,
  )  # fmt: skip
  (output,), loss = apply_experts(call, experts_fn)
  return output, loss


class _SlotsContext:
  """A context whose batch dimensions are those of slots, for the noise of `sublayer_dropout`."""

  def __init__(self, context: Context, slots: mtf.Tensor):
    self.train = context.train
    self.model = context.model
    self.batch_dims = slots.shape.dims[:-1]
    self.length_dim = None


def _sublayer_dropout(y: mtf.Tensor, context: Context) -> mtf.Tensor:
  """Dropout as between layers; the tokens in slots are not the rows of a batch."""
  slots: Any = _SlotsContext(context, y)
  return sublayers.sublayer_dropout(y, None, slots)


@gin.configurable(module="mesh_tensorflow.transformer.heterogeneous_moe")
@dataclasses.dataclass(eq=False, repr=False)
@affects(
  training=(
    "loss_coef capacity_factor_train use_second_place_loss second_policy_train "
    "second_threshold_train dropout_rate switch_policy_train switch_dropout "
    "switch_jitter z_loss"
  ),
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
class HeterogeneousMoE1D(OneLevelExpertsLayer):
  """A mixture of experts of different depths and widths: see `transformer_moe_layer_v1`.

  Other arguments are those of `MoE1D` but use_experts_attention and summaries.

  Args:
    moe_num_layers: number of feed-forward layers of each expert.
    heterogeneous_mask_info: kinds of experts; see `generate_heterogeneous_expert_masks`.
  """

  z_loss: float | None = None
  word_embed_mode: str | None = None
  use_second_place_expert_prob: float | None = None
  use_second_place_expert_prob_temp: float | None = None
  moe_num_layers: int = 1
  heterogeneous_mask_info: Sequence[dict[str, float]] | None = None
  top_n_num_experts_per_token: int = 3

  def _apply(self, context: Context, x: mtf.Tensor) -> tuple[Any, mtf.Tensor]:
    layer_fn = functools.partial(transformer_moe_layer_v1, context=context)
    return self._call_experts(layer_fn, context, x)
