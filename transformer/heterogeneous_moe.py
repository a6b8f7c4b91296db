"""A mixture of experts of different depths and widths."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import gin
import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer import sublayers
from mesh_tensorflow.transformer.context import Context
from mesh_tensorflow.transformer.moe_dispatch import apply_experts
from mesh_tensorflow.transformer.moe_groups import LayoutHints
from mesh_tensorflow.transformer.moe_hparams import HParams, hparam
from mesh_tensorflow.transformer.moe_layer import ExpertsLayer


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
  context: Context | None = None,
) -> tuple[mtf.Tensor, mtf.Tensor]:
  """As `moe.transformer_moe_layer_v1`, with experts that are stacks of feed-forward layers.

  Between the layers of an expert there are `sublayer_dropout`, a residual connection, and
  `sublayer_rms_norm`. With `moe_heterogeneous_mask_info`, experts have different numbers of layers
  and hidden sizes (see `generate_heterogeneous_expert_masks`, whose sizes replace `moe_num_layers`
  and `moe_hidden_size`); a layer that an expert does not have adds nothing.

  Variables: `<gating>/kernel`; for layer i `expert_layer_<i>/wi/kernel` and
  `expert_layer_<i>/wo/kernel`; after the first `expert_layer_<i>/rms_norm/scale`.

  Args:
    inputs: see `moe.transformer_moe_layer_v1`, as all arguments up to token_embeddings.
    output_dim: see there; with several layers, it must be the last dimension of inputs.
    hparams: see there.
    train: see there.
    variable_dtype: see there.
    layout: see there.
    mesh_shape: see there.
    nonpadding: see there.
    activation: see there.
    num_microbatches: see there.
    token_embeddings: see there.
    context: the `Context`, of which sublayers need the model and the mode.

  Returns:
    (output, loss).

  Raises:
    ConfigError: see `generate_heterogeneous_expert_masks`.
    ShapeError: there are several layers and output_dim is not the last dimension of inputs.
  """
  num_layers, hidden_size = getattr(hparams, "moe_num_layers", 1), hparam(hparams, "hidden_size")
  mask_info = getattr(hparams, "moe_heterogeneous_mask_info", None)
  masks: list[mtf.Tensor] = []
  experts_dim = mtf.Dimension("experts", hparam(hparams, "num_experts"))
  if mask_info:
    mask = generate_heterogeneous_expert_masks(
      mask_info, experts_dim.size, experts_dim, inputs.mesh, hidden_size
    )
    hidden_size, num_layers = mask.shape.dims[0].size, mask.shape.dims[1].size
    masks = mtf.unstack(mtf.cast(mask, inputs.dtype), mask.shape.dims[1])
  if num_layers > 1 and output_dim != inputs.shape.dims[-1]:
    raise errors.ShapeError(
      f"heterogeneous mixture of experts: {num_layers} layers with residual connections need "
      f"{output_dim} to be the last dimension of {inputs}"
    )
  hidden = mtf.Dimension("expert_hidden", hidden_size)
  dropout_rate = hparam(hparams, "dropout_rate")

  def experts_fn(x: mtf.Tensor, experts: mtf.Dimension) -> list[mtf.Tensor]:
    options = dict(expert_dims=[experts], use_bias=False, variable_dtype=variable_dtype)
    for i in range(num_layers):
      with mtf.variable_scope(f"expert_layer_{i}"):
        y = x if i == 0 else sublayers.sublayer_rms_norm(x, None, context)
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
          h *= masks[i]
        y = mtf.layers.dense(h, output_dim, reduced_dims=[hidden], name="wo", **options)
        if i < num_layers - 1:
          y = _sublayer_dropout(y, context)
        x = y if i == 0 else x + y
    return [x]

  sized = copy.copy(hparams)
  sized.moe_hidden_size = hidden_size
  (output,), loss = apply_experts(
    inputs,
    output_dim,
    sized,
    train,
    variable_dtype,
    experts_fn,
    LayoutHints(layout, mesh_shape),
    nonpadding,
    num_microbatches,
    token_embeddings,
  )
  return output, loss


class _SlotsContext:
  """A context whose batch dimensions are those of slots, for the noise of `sublayer_dropout`."""

  def __init__(self, context: Context, slots: mtf.Tensor):
    self.train = context.train
    self.model = context.model
    self.batch_dims = slots.shape.dims[:-1]


def _sublayer_dropout(y: mtf.Tensor, context: Context) -> mtf.Tensor:
  """Dropout as between layers; the tokens in slots are not the rows of a batch."""
  return sublayers.sublayer_dropout(y, None, _SlotsContext(context, y))


@gin.configurable(module="mesh_tensorflow.transformer.heterogeneous_moe")
class HeterogeneousMoE1D(ExpertsLayer):
  """A mixture of experts of different depths and widths: see `transformer_moe_layer_v1`.

  Args:
    num_experts: see `MoE1D`, as all others but two.
    loss_coef: see there.
    hidden_size: see there.
    group_size: see there.
    capacity_factor_train: see there.
    capacity_factor_eval: see there.
    use_second_place_loss: see there.
    second_policy_train: see there.
    second_policy_eval: see there.
    second_threshold_train: see there.
    second_threshold_eval: see there.
    dropout_rate: see there.
    activation: see there.
    moe_gating: see there.
    min_expert_capacity: see there.
    switch_policy_train: see there.
    switch_policy_eval: see there.
    switch_dropout: see there.
    switch_temperature: see there.
    switch_jitter: see there.
    ntlb_top_k: see there.
    output_dim: see there.
    z_loss: see there.
    word_embed_mode: see there.
    use_second_place_expert_prob: see there.
    use_second_place_expert_prob_temp: see there.
    moe_num_layers: number of feed-forward layers of each expert.
    heterogeneous_mask_info: kinds of experts; see `generate_heterogeneous_expert_masks`.
    top_n_num_experts_per_token: see `MoE1D`.
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
    z_loss: float | None = None,
    word_embed_mode: str | None = None,
    use_second_place_expert_prob: float | None = None,
    use_second_place_expert_prob_temp: float | None = None,
    moe_num_layers: int = 1,
    heterogeneous_mask_info: Sequence[dict[str, float]] | None = None,
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
      moe_z_loss=z_loss,
      moe_word_embed_mode=word_embed_mode,
      moe_use_second_place_expert_prob=use_second_place_expert_prob,
      moe_use_second_place_expert_prob_temp=use_second_place_expert_prob_temp,
      moe_num_layers=moe_num_layers,
      moe_heterogeneous_mask_info=heterogeneous_mask_info,
      moe_top_n_num_experts_per_token=top_n_num_experts_per_token,
    )
    self._activation = activation

  def _apply(self, context: Context, x: mtf.Tensor) -> tuple[mtf.Tensor, mtf.Tensor]:
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
      token_embeddings=context.input_embeddings,
      context=context,
    )
