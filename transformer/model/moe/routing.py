"""Assignment of tokens to experts' slots: moving tokens there, and results back.

A router's decision is a list of places, not a tensor of tokens x experts x slots: rows are moved by
gathers, and cost what they are long. `dispatch_and_combine` gives the decision as such tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.operations.indexing import ScatterAddOperation


def scatter_add(
  values: mtf.Tensor, indices: mtf.Tensor, shape: mtf.Shape, dim: mtf.Dimension
) -> mtf.Tensor:
  """Adds values up at positions along a dimension; those out of range are dropped.

  Args:
    values: `[<dims of indices>, <dims of shape but dim>]`, shared ones once.
    indices: integer.
    shape: of the result.
    dim: the dimension of it that is indexed.
  """
  return ScatterAddOperation(values, indices, shape, dim).outputs[0]


class Routing:
  """The decision of a router.

  Args:
    token_dims: leading dimensions of tokens and slots, then the tokens of a group.
    experts_dim: the experts.
    capacity_dim: the slots of an expert for a group.
  """

  def __init__(
    self,
    token_dims: Sequence[mtf.Dimension],
    experts_dim: mtf.Dimension,
    capacity_dim: mtf.Dimension,
  ):
    self.batch_dims = list(token_dims[:-1])
    self.group_dim = token_dims[-1]
    self.experts_dim = experts_dim
    self.capacity_dim = capacity_dim

  @property
  def token_dims(self) -> list[mtf.Dimension]:
    return [*self.batch_dims, self.group_dim]

  @property
  def slot_dims(self) -> list[mtf.Dimension]:
    return [*self.batch_dims, self.experts_dim, self.capacity_dim]

  def dispatch(self, x: mtf.Tensor, slots_shape: mtf.Shape) -> mtf.Tensor:
    """Brings tokens to slots; empty slots are zeros.

    Args:
      x: `[<token_dims>, <others>]`.
      slots_shape: `slot_dims` and the others, in any order.
    """
    # Nothing is at position -1, that of empty slots: the gather gives zeros.
    return mtf.gather(x, self.token_of_slot(), self.group_dim, output_shape=slots_shape)

  def combine(self, y: mtf.Tensor, tokens_shape: mtf.Shape) -> mtf.Tensor:
    """Brings the contents of slots back to their tokens, times the gates, and adds them up.

    Args:
      y: `[<slot_dims>, <others>]`, in any order.
      tokens_shape: `token_dims` and the others, in this order.
    """
    raise NotImplementedError

  def gates_of_slots(self) -> mtf.Tensor:
    """float32 `slot_dims`: the gate of the token in a slot, 0 for empty slots."""
    raise NotImplementedError

  def dispatch_and_combine(self, dtype: tf.DType) -> tuple[mtf.Tensor, mtf.Tensor]:
    """The decision as two tensors of tokens x experts x slots.

    Args:
      dtype: of both.

    Returns:
      dispatch, 1 where a token is brought to a slot; combine, its gate there. An einsum of tokens
      and dispatch gives slots; an einsum of slots and combine gives tokens.
    """
    raise NotImplementedError

  def token_of_slot(self) -> mtf.Tensor:
    """int32 `slot_dims`: position in its group of the token in a slot; -1 if there is none."""
    raise NotImplementedError


class TokenRouting(Routing):
  """Tokens choose experts, one or several times.

  Args:
    token_dims: see `Routing`.
    experts_dim: see `Routing`.
    capacity_dim: see `Routing`.
    choices: a list of triples of tensors `token_dims`: the expert (int32), the slot (float32
      or int32), and the gate (float32), which is 0 where the token is not brought to the expert.
  """

  def __init__(
    self,
    token_dims: Sequence[mtf.Dimension],
    experts_dim: mtf.Dimension,
    capacity_dim: mtf.Dimension,
    choices: Sequence[tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]],
  ):
    super().__init__(token_dims, experts_dim, capacity_dim)
    self._choices = list(choices)
    # All slots of all experts in one row.
    self._slots = mtf.Dimension("expert_slots", experts_dim.size * capacity_dim.size)
    self._choice = mtf.Dimension("expert_choice", len(self._choices))
    self._gates = self._stack([gate for _, _, gate in self._choices])
    slot = self._stack(
      [index * capacity_dim.size + mtf.to_int32(slot) for index, slot, _ in self._choices]
    )
    # Beyond the end for choices that are not kept: nothing is written or read there.
    kept = mtf.to_int32(mtf.not_equal(self._gates, 0.0))
    self._slot_of_choice = slot * kept + (1 - kept) * self._slots.size
    self._choice_of_slot: mtf.Tensor | None = None

  def experts_and_gates(self) -> tuple[mtf.Tensor, mtf.Tensor]:
    """The experts of tokens, int32, and their gates, float32: both `[<token_dims>, <choices>]`.

    The expert is -1 where the token is not brought to one; with one choice there is no dimension
    for it.
    """
    index = self._stack([index for index, _, _ in self._choices])
    kept = mtf.to_int32(mtf.not_equal(self._gates, 0.0))
    return (index + 1) * kept - 1, self._gates

  def _stack(self, xs: list[mtf.Tensor]) -> mtf.Tensor:
    """The tensors of all choices as one; without another dimension if there is one choice."""
    return xs[0] if len(xs) == 1 else mtf.stack(xs, self._choice.name, axis=xs[0].shape.ndims)

  def _flat(self, y: mtf.Tensor) -> mtf.Tensor:
    """`[<slot_dims>, <others>]` in any order, with one row of slots."""
    others = [d for d in y.shape if d not in self.slot_dims]
    y = mtf.transpose(y, mtf.Shape([*self.slot_dims, *others]))
    return mtf.reshape(y, mtf.Shape([*self.batch_dims, self._slots, *others]))

  def _choices_of_slots(self) -> mtf.Tensor:
    """int32 `slot_dims`: the number of the choice whose slot it is, token * choices + choice."""
    if self._choice_of_slot is None:
      # One is added, so that zero stays for empty slots.
      shape = self._gates.shape
      number = mtf.range(self._gates.mesh, self.group_dim, tf.int32) * self._choice.size + 1
      if self._choice in shape:
        choice = mtf.range(self._gates.mesh, self._choice, tf.int32)
        number = mtf.add(number, choice, output_shape=mtf.Shape([self.group_dim, self._choice]))
      # No two choices have one slot, so that a sum of numbers is the number itself.
      number = scatter_add(
        mtf.broadcast(number, shape),
        self._slot_of_choice,
        mtf.Shape([*self.batch_dims, self._slots]),
        self._slots,
      )
      self._choice_of_slot = mtf.reshape(number - 1, mtf.Shape(self.slot_dims))
    return self._choice_of_slot

  def token_of_slot(self) -> mtf.Tensor:
    number = self._choices_of_slots()
    return number if self._choice.size == 1 else mtf.floordiv(number, self._choice.size)

  def combine(self, y: mtf.Tensor, tokens_shape: mtf.Shape) -> mtf.Tensor:
    # The task's loss trains the router through the gates alone: where a token goes has no gradient.
    rows = mtf.gather(self._flat(y), self._slot_of_choice, self._slots)
    return mtf.einsum([rows, mtf.cast(self._gates, y.dtype)], output_shape=tokens_shape)

  def gates_of_slots(self) -> mtf.Tensor:
    gates = scatter_add(
      self._gates, self._slot_of_choice, mtf.Shape([*self.batch_dims, self._slots]), self._slots
    )
    return mtf.reshape(gates, mtf.Shape(self.slot_dims))

  def dispatch_and_combine(self, dtype: tf.DType) -> tuple[mtf.Tensor, mtf.Tensor]:
    shape = mtf.Shape([*self.token_dims, self.experts_dim, self.capacity_dim])
    combine = mtf.add_n(
      [
        mtf.einsum(
          [
            gate,
            mtf.one_hot(index, self.experts_dim),
            mtf.one_hot(mtf.to_int32(position), self.capacity_dim),
          ],
          output_shape=shape,
        )
        for index, position, gate in self._choices
      ]
    )
    # A choice that is not kept has gate 0: where gates are, tokens go.
    combine = mtf.cast(combine, dtype)
    return mtf.cast(mtf.not_equal(combine, 0), dtype), combine


class ExpertRouting(Routing):
  """Experts choose tokens, one for each slot.

  Args:
    token_dims: see `Routing`.
    experts_dim: see `Routing`.
    capacity_dim: see `Routing`.
    tokens: int32 `slot_dims`: the positions of the tokens in their group; -1 for none.
    gates: float32 `slot_dims`.
  """

  def __init__(
    self,
    token_dims: Sequence[mtf.Dimension],
    experts_dim: mtf.Dimension,
    capacity_dim: mtf.Dimension,
    tokens: mtf.Tensor,
    gates: mtf.Tensor,
  ):
    super().__init__(token_dims, experts_dim, capacity_dim)
    self._tokens, self._gates = tokens, gates

  def token_of_slot(self) -> mtf.Tensor:
    return self._tokens

  def combine(self, y: mtf.Tensor, tokens_shape: mtf.Shape) -> mtf.Tensor:
    # A token may be in slots of several experts: their results add up.
    weighted = y * mtf.cast(self._gates, y.dtype)
    return scatter_add(weighted, self._tokens, tokens_shape, self.group_dim)

  def gates_of_slots(self) -> mtf.Tensor:
    return self._gates

  def dispatch_and_combine(self, dtype: tf.DType) -> tuple[mtf.Tensor, mtf.Tensor]:
    # The one-hot of -1, of an empty slot, is zero.
    dispatch = mtf.one_hot(self._tokens, self.group_dim, dtype=dtype)
    return dispatch, dispatch * mtf.cast(self._gates, dtype)
