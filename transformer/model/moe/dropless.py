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
import operator
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.layers import unit_scaling_convention
from mesh_tensorflow.layers.dense import activation_function
from mesh_tensorflow.transformer.model.moe.dispatch import change_hands, route
from mesh_tensorflow.transformer.model.moe.expert_products import expert_products
from mesh_tensorflow.transformer.model.moe.groups import LayoutHints
from mesh_tensorflow.transformer.model.moe.hparams import hparam
from mesh_tensorflow.transformer.model.moe.routing import TokenRouting
from mesh_tensorflow.transformer.model.step_sums import StepSum


def apply_without_dropping(
  inputs: mtf.Tensor,
  output_dim: mtf.Dimension,
  hparams: object,
  train: bool,
  variable_dtype: mtf.VariableDType | tf.DType,
  activation: Any,
  output_names: list[str],
  hints: LayoutHints,
  nonpadding: mtf.Tensor | None = None,
  num_microbatches: int | None = None,
  token_embeddings: mtf.Tensor | None = None,
  loads: list[StepSum] | None = None,
) -> tuple[list[mtf.Tensor], mtf.Tensor]:
  """Like `apply_experts` of two-layer networks, with the same variables.

  Args:
    inputs: `[(outer_batch,) batch, ..., d_model]`.
    output_dim: the last dimension of the results.
    hparams: an object with `moe_` attributes, see `MoE1D`.
    train: True in training.
    variable_dtype: an `mtf.VariableDType`, or one dtype for all three.
    activation: activation of the hidden layer; see `mtf.layers.dense_product`.
    output_names: the scopes of the last layers.
    hints: the known parts of the layout.
    nonpadding: 1 for tokens, 0 for padding: some of the leading dims of inputs; None: no padding.
    num_microbatches: number of such calls in a training step; None: 1.
    token_embeddings: tensor with the dims of inputs, for `moe_word_embed_mode`.
    loads: list to which the experts' token counts are appended, if `moe_balance_rate` is set.

  Returns:
    (outputs, loss), an output for each of `output_names`.

  Raises:
    ConfigError: the router lets experts choose tokens.
  """
  routed = route(
    inputs, hparams, train, variable_dtype, hints, nonpadding, num_microbatches, token_embeddings,
    loads,
  )  # fmt: skip
  if not isinstance(routed.routing, TokenRouting):
    raise errors.ConfigError(
      f"mixture of experts: moe_gating {hparam(hparams, 'gating')!r} lets experts choose tokens, "
      "and leaves some; set dropless = False, or moe_gating = 'top_k'"
    )
  experts = mtf.Dimension("experts", hparam(hparams, "num_experts"))
  hidden = mtf.Dimension("expert_hidden", hparam(hparams, "hidden_size"))
  here = routed.token_dims
  tokens = _unsplit(here, [experts, hidden, inputs.shape.dims[-1], output_dim], hints)
  x = change_hands(routed.x, tokens, hints)
  index, gates = routed.routing.experts_and_gates()
  choices = index.shape.dims[len(here) :]
  # The router's decision is small beside the tokens.
  index, gates = (mtf.reshape(t, mtf.Shape([*tokens, *choices])) for t in (index, gates))
  owners, index = _of_owners(index, experts, hints)
  products = _Products(experts, owners, tokens, choices, index, variable_dtype)
  h = products.hidden(x, hidden, activation)
  if train and hparam(hparams, "dropout_rate"):
    # Owners are of the layout, which must not decide what is drawn.
    ones = mtf.ones(h.mesh, mtf.Shape([*tokens, *choices, hidden]), h.dtype)
    mask = mtf.dropout(ones, train, rate=hparam(hparams, "dropout_rate"))
    h = mtf.multiply(h, mask, output_shape=h.shape)
  # Before the last product, so that its sums over choices and owners are taken where they arise.
  h = mtf.multiply(h, mtf.cast(gates, h.dtype), output_shape=h.shape)
  outputs = []
  for name in output_names:
    y = change_hands(products(h, output_dim, tokens, name), here, hints)
    outputs.append(mtf.reshape(y, mtf.Shape([*routed.leading, output_dim])))
  return outputs, mtf.cast(routed.loss, inputs.dtype) * hparam(hparams, "loss_coef")


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
    return functools.reduce(operator.mul, factors)


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
