"""Reversible residual layers, whose backward pass computes their activations again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mesh_tensorflow.errors import ArgumentError, ShapeError
from mesh_tensorflow.operations.binary import add, sub
from mesh_tensorflow.operations.constants import zeros_like
from mesh_tensorflow.operations.custom_gradient import AfterOperation, custom_gradient
from mesh_tensorflow.operations.gradients import gradients
from mesh_tensorflow.program.graph import Tensor

__all__ = ["reversible_half_residual_and_swap"]


def reversible_half_residual_and_swap(
  x1: Tensor,
  x1_backwards: Tensor | None,
  x2: Tensor,
  x2_backwards: Tensor | None,
  f: Callable[[Tensor], Tensor],
  recompute_grads: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
  """One layer of a reversible residual network: (x1, x2) becomes (x2, x1 + f(x2)).

  Gomez, Ren, Urtasun and Grosse, "The Reversible Residual Network", 2017
  (arXiv:1707.04585). A layer's inputs can be computed from its outputs, so the backward
  pass needs no activations of the layers but the last one's outputs. In a chain,

    x1, x1_backwards, x2, x2_backwards = x, None, x, None
    for f in layers:
      x1, x1_backwards, x2, x2_backwards = reversible_half_residual_and_swap(
          x1, x1_backwards, x2, x2_backwards, f)
    y = x1 + x2

  what is computed again goes backwards from layer to layer, in place of the gradients of
  the tensors called `backwards`. Nothing else may use these; forwards they are zero. f is
  computed again with the same weights and the same dropout masks.

  Args:
    x1: a floating `Tensor`.
    x1_backwards: None, or what the layer before returned along with x1.
    x2: a `Tensor` of x1's shape.
    x2_backwards: None, or what the layer before returned along with x2.
    f: a function of a `Tensor` that returns one of its shape. It may use variables and other
      tensors, to which gradients flow.
    recompute_grads: if false, activations are kept as usual.

  Returns:
    x2, x2_backwards, x1 + f(x2) and x1_backwards. Without recomputation the tensors
    called `backwards` are those given.

  Raises:
    ArgumentError: f does not return a `Tensor`.
    ShapeError: x1, x2 and f(x2) differ in shape or dtype.
  """
  if not recompute_grads:
    return x2, x2_backwards, _residual(x1, x2, f(x2)), x1_backwards
  half = _HalfResidual(f, [x1_backwards is not None, x2_backwards is not None])
  x1_backwards = zeros_like(x1) if x1_backwards is None else x1_backwards
  x2_backwards = zeros_like(x2) if x2_backwards is None else x2_backwards
  inputs = [x1, x1_backwards, x2, x2_backwards]
  outputs = custom_gradient(half.forward, half.backward, inputs)
  # Before the inputs of a copy of this operation take their place (in a recomputation).
  half.inputs = outputs[0].operation.inputs
  return tuple(outputs)


def _residual(x1: Tensor, x2: Tensor, fx2: object) -> Tensor:
  if not isinstance(fx2, Tensor):
    raise ArgumentError(
      f"reversible_half_residual_and_swap: f must return a Tensor of the shape of {x2}, got {fx2!r}"
    )
  for t in (x2, fx2):
    if t.shape != x1.shape or t.dtype != x1.dtype:
      raise ShapeError(
        f"reversible_half_residual_and_swap: x1, x2 and f(x2) must have one shape and dtype, got "
        f"{x1} and {t}"
      )
  return add(x1, fx2)


class _HalfResidual:
  """The function and the gradient function of one layer.

  Args:
    f: see `reversible_half_residual_and_swap`.
    wanted: whether the layer before takes what is computed again for x1, and for x2.
  """

  def __init__(self, f: Callable[[Tensor], Tensor], wanted: list[bool]):
    self._f = f
    self._wanted = wanted
    self.inputs: list[Tensor] = []

  def forward(
    self, x1: Tensor, x1_backwards: Tensor, x2: Tensor, x2_backwards: Tensor
  ) -> tuple[Tensor, ...]:
    self._x2 = x2
    self._fx2, self._operations = x1.graph.capture_operations(lambda: self._f(x2))
    return x2, x2_backwards, _residual(x1, x2, self._fx2), x1_backwards

  def backward(
    self,
    explicit_inputs: list[Tensor],
    all_inputs: list[Tensor],
    forward_operations: Any,
    outputs: list[Tensor],
    output_grads: list[Tensor | None],
  ) -> list[Tensor | None]:
    del explicit_inputs, forward_operations
    d_out1, out1, d_out2, out2 = output_grads
    # The last layer of a chain: its outputs are there.
    out1 = outputs[0] if out1 is None else out1
    out2 = outputs[2] if out2 is None else out2
    # One layer after the other: not all of them computed again before the first gradient.
    dependency = d_out1 if d_out2 is None else d_out2
    x2 = out1 if dependency is None else AfterOperation(out1, dependency).outputs[0]

    keys = self.inputs[: len(all_inputs)]
    mapping = dict(zip(keys, all_inputs))
    mapping[self._x2] = x2
    clones, mapping = x2.graph.clone_operations(self._operations, mapping)
    fx2 = mapping.get(self._fx2, self._fx2)
    # out1 = x2 and out2 = x1 + f(x2).
    dx1, dx2 = d_out2, d_out1
    extra: list[Tensor | None] = [None] * (len(all_inputs) - 4)
    if d_out2 is not None:
      # x1, too, may be among what f uses besides.
      sources = [x2, all_inputs[0], *all_inputs[4:]]
      through_f, besides, *extra = gradients([fx2], sources, [d_out2], operations=clones)
      if through_f is not None:
        dx2 = through_f if dx2 is None else add(dx2, through_f)
      if besides is not None:
        dx1 = add(dx1, besides)
    # The layer undone: what goes on to the layer before as its outputs.
    x1_again = sub(out2, fx2) if self._wanted[0] else None
    x2_again = out1 if self._wanted[1] else None
    return [dx1, x1_again, dx2, x2_again, *extra]
