"""A mixture of experts that drops no token: products of rows with the matrices of their experts.

It costs what rows cost: no slots stay empty. Where experts share a mesh axis with tokens,
processors along it get copies of all of its tokens, do the work of their own experts, and add up
the results: of n processors each sends and receives (n - 1) / n of all tokens twice, where slots
would be exchanged by alltoall, about twice its own tokens; but these could reckon with all tokens
going to one expert only by slots for all of them. Who has the expert with the most tokens is waited
for.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.layers import unit_scaling_convention
from mesh_tensorflow.layers.dense import activation_function
from mesh_tensorflow.operations.gating import gated
from mesh_tensorflow.transformer.model.moe.dispatch import ExpertsCall, change_hands, route
from mesh_tensorflow.transformer.model.moe.expert_products import expert_products
from mesh_tensorflow.transformer.model.moe.groups import LayoutHints
from mesh_tensorflow.transformer.model.moe.routing import TokenRouting


def apply_without_dropping(
  call: ExpertsCall, output_names: list[str]
) -> tuple[list[mtf.Tensor], mtf.Tensor]:
  """Like `apply_experts` of two-layer networks, with the same variables.

  Args:
    call: what is to be done.
    output_names: the scopes of the last layers.

  Returns:
    (outputs, loss), an output for each of `output_names`.

  Raises:
    ConfigError: the router lets experts choose tokens.
  """
  routed, hints, output_dim = route(call), call.hints, call.output_dim
  if not isinstance(routed.routing, TokenRouting):
    raise errors.ConfigError(
      f"mixture of experts: moe_gating {call.hparam('gating')!r} lets experts choose tokens, "
      "and leaves some; set dropless = False, or moe_gating = 'top_k'"
    )
  experts = mtf.Dimension("experts", call.hparam("num_experts"))
  hidden = mtf.Dimension("expert_hidden", call.hparam("hidden_size"))
  here = routed.token_dims
  tokens = _unsplit(here, [experts, hidden, call.inputs.shape.dims[-1], output_dim], hints)
  x = change_hands(routed.x, tokens, hints)
  index, gates = routed.routing.experts_and_gates()
  choices = index.shape.dims[len(here) :]
  # The router's decision is small beside the tokens.
  index, gates = (mtf.reshape(t, mtf.Shape([*tokens, *choices])) for t in (index, gates))
  owners, index = _of_owners(index, experts, hints)
  products = _Products(experts, owners, tokens, choices, index, call.variable_dtype)
  h = products.hidden(x, hidden, call.activation)
  if call.train and call.hparam("dropout_rate"):
    # Owners are of the layout, which must not decide what is drawn.
    ones = mtf.ones(h.mesh, mtf.Shape([*tokens, *choices, hidden]), h.dtype)
    mask = mtf.dropout(ones, call.train, rate=call.hparam("dropout_rate"))
    h = mtf.multiply(h, mask, output_shape=h.shape)
  # Before the last product, so that its sums over choices and owners are taken where they arise.
  h = mtf.multiply(h, mtf.cast(gates, h.dtype), output_shape=h.shape)
  outputs = []
  for name in output_names:
    y = change_hands(products(h, output_dim, tokens, name), here, hints)
    outputs.append(mtf.reshape(y, mtf.Shape([*routed.leading, output_dim])))
  return outputs, mtf.cast(routed.loss, call.inputs.dtype) * call.hparam("loss_coef")


@dataclasses.dataclass(frozen=True)
class _Products:
  """Products of rows with the kernels of their experts, which are variables.

  Attributes:
    experts: the dimension of experts.
    owners: the parts that it is split in, see `_of_owners`.
    tokens: the dims of tokens.
    choices: the dims of the choices of a token.
    index: the expert of each row, of its owner.
    variable_dtype: an `mtf.VariableDType`, or one dtype for all three.
  """

  experts: mtf.Dimension
  owners: list[mtf.Dimension]
  tokens: list[mtf.Dimension]
  choices: list[mtf.Dimension]
  index: mtf.Tensor
  variable_dtype: mtf.VariableDType | tf.DType

  def __call__(
    self, x: mtf.Tensor, new_dim: mtf.Dimension, output_dims: list[mtf.Dimension], name: str
  ) -> mtf.Tensor:
    """`[<output_dims>, new_dim]`; see `expert_products`. The kernel is `<name>/kernel`."""
    reduced = x.shape.dims[-1]
    kernel = mtf.layers.get_dense_kernel_weights(
      x, [new_dim], [reduced], [self.experts], None, name=name, variable_dtype=self.variable_dtype
    )
    if self.owners:
      own = mtf.Dimension("experts_of_owner", self.experts.size // self.owners[0].size)
      kernel = mtf.replace_dimensions(kernel, self.experts, [*self.owners, own])
    y = expert_products(x, kernel, self.index, new_dim, self.tokens, output_dims)
    return y * reduced.size**-0.5 if unit_scaling_convention() else y

  def hidden(self, x: mtf.Tensor, dim: mtf.Dimension, activation: Any) -> mtf.Tensor:
    """The hidden layers, a row for each choice of a token, as `mtf.layers.dense_product` has it."""
    rows = [*self.owners, *self.tokens, *self.choices]
    activations = list(activation) if isinstance(activation, (list, tuple)) else [activation]
    if not activations:
      raise errors.ConfigError("mixture of experts: activation is empty; write 'linear' for none")
    factors = []
    for i, name in enumerate(activations):
      fn = activation_function(name)
      factor = self(x, dim, rows, f"wi_{i}" if len(activations) > 1 else "wi")
      factors.append(factor if fn is None else fn(factor))
    return functools.reduce(gated, factors)


def _of_owners(
  index: mtf.Tensor, experts: mtf.Dimension, hints: LayoutHints
) -> tuple[list[mtf.Dimension], mtf.Tensor]:
  """The parts that experts are split in, if that is known, and the experts' numbers within them.

  With a dimension for the parts, what is computed of a part is a tensor that stays where the part
  is. Without it, hidden values would be summed over the processors of all parts.

  Returns:
    (dims, int32 of these dims and those of index): a dimension that is split as experts are, or
    none. Numbers that are not of the part are out of its range.
  """
  parts = hints.parts(experts.name)
  if parts == 1 or experts.size % parts:
    return [], index
  owner = mtf.Dimension(experts.name, parts)
  first = mtf.range(index.mesh, owner, tf.int32) * (experts.size // parts)
  shape = mtf.Shape([owner, *index.shape.dims])
  # That of no expert is below the range of all parts.
  return [owner], mtf.sub(index, first, output_shape=shape)


def _unsplit(
  dims: list[mtf.Dimension], others: list[mtf.Dimension], hints: LayoutHints
) -> list[mtf.Dimension]:
  """The dims of tokens, those renamed that would meet one of the experts' on a mesh axis."""
  used = {hints.axis(d.name) for d in others}
  return [
    mtf.Dimension(f"{d.name}_for_experts", d.size)
    if not hints.known or (hints.axis(d.name) is not None and hints.axis(d.name) in used)
    else d
    for d in dims
  ]
