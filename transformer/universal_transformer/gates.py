"""Gates of the Universal Transformer: how much of a step is taken over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer.models.context import Context


def ffn_layer_multi_inputs(
  context: Context,
  mask: mtf.Tensor | None,
  inputs_list: list[mtf.Tensor],
  norm: Callable[[Context, mtf.Tensor], mtf.Tensor],
  kernel_initializer: Any = None,
  activation: Callable[[mtf.Tensor], mtf.Tensor] | None = None,
  preprocess: bool = False,
  postprocess: bool = False,
) -> mtf.Tensor:
  """A dense layer of several tensors, one behind the other; see `UTLayerStack`."""
  if preprocess:
    # In place: the next gate of the same list normalizes what is normalized. So were the models
    # trained whose checkpoints exist.
    for i, x in enumerate(inputs_list):
      inputs_list[i] = norm(context, masked(x, mask))
  channels = inputs_list[0].shape[-1]
  if len(inputs_list) == 1:
    inputs = inputs_list[0]
  else:
    inputs = mtf.concat(inputs_list, channels.name)
  output = mtf.layers.dense(
    inputs,
    reduced_dims=[inputs.shape[-1]],
    new_dims=[channels],
    activation=activation,
    use_bias=True,
    variable_dtype=context.variable_dtype,
    kernel_initializer=kernel_initializer,
  )
  return norm(context, masked(output, mask)) if postprocess else output


def masked(x: mtf.Tensor, mask: mtf.Tensor | None) -> mtf.Tensor:
  """x, zero at padding."""
  return x if mask is None else x * mask


def gru(
  gate: Callable[[list[mtf.Tensor]], mtf.Tensor], x: mtf.Tensor, transformed_x: mtf.Tensor
) -> mtf.Tensor:
  """A gated recurrent unit whose state is `transformed_x`.

  Args:
    gate: makes a gate, between 0 and 1, from tensors, which it may normalize in place.
    x: the input.
    transformed_x: the state.
  """
  inputs = [x, transformed_x]
  update = gate(inputs)
  reset = gate(inputs)
  candidate = gate([reset * x, transformed_x])
  # (1 - update) state + update * candidate, with one product less.
  return transformed_x + update * (candidate - transformed_x)


def highway(
  gate: Callable[[list[mtf.Tensor]], mtf.Tensor],
  inputs: list[mtf.Tensor],
  x: mtf.Tensor,
  transformed_x: mtf.Tensor,
  coupled: bool,
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
  """x times a carry gate plus transformed_x times a transform gate.

  Args:
    gate: makes a gate, between 0 and 1, from tensors, which it may normalize in place.
    inputs: what the gates are made from.
    x: what is carried.
    transformed_x: what it is transformed to.
    coupled: whether the gates sum up to 1.

  Returns:
    (the sum, the transform gate, the carry gate).
  """
  # Transform before carry: each gate may normalize the inputs in place once more.
  transform = gate(inputs)
  carry = 1.0 - transform if coupled else gate(inputs)
  return x * carry + transformed_x * transform, transform, carry
