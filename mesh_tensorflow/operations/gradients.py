"""Reverse-mode differentiation of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mesh_tensorflow.errors import DTypeError, GradientError, ShapeError
from mesh_tensorflow.operations.binary import add
from mesh_tensorflow.operations.constants import constant
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.graph import Operation, Tensor, needed_operations, on_mesh, usable

__all__ = ["gradients"]


def gradients(
  ys: Sequence[Tensor],
  xs: Sequence[Tensor],
  grad_ys: Sequence[Tensor | None] | None = None,
  operations: Sequence[Operation] | None = None,
) -> list[Tensor | None]:
  """Gradients of the sum of `ys` with respect to `xs`, as new operations of the graph.

  Args:
    ys: `Tensor`s. One that stands twice counts twice.
    xs: `Tensor`s (of a variable its value, which `get_variable` returned).
    grad_ys: a gradient (or None) for each y; ones by default.
    operations: the operations to go through; all of the graph by default.

  Returns:
    A `Tensor` for each x, or None if no y depends on it.

  Raises:
    GradientError: an operation on the way has no gradient.
    ShapeError: a gradient has not the shape of its tensor.
  """
  ys, xs = list(ys), list(xs)
  if not ys:
    return [None] * len(xs)
  graph = ys[0].graph
  start = len(graph.operations)
  operations = list(graph.operations if operations is None else operations)
  if grad_ys is None:
    for y in ys:
      if not y.dtype.is_floating:
        raise GradientError(f"gradients: {y} is not floating; give grad_ys, or cast it")
    with on_mesh(None):
      grad_ys = [constant(y.mesh, 1.0, shape=y.shape, dtype=y.dtype) for y in ys]
  _check_given(ys, grad_ys)
  found: dict[Tensor, Tensor] = {}
  with on_mesh(None):
    for y, g in zip(ys, grad_ys):
      if g is not None:
        found[y] = add(found[y], g) if y in found else g

  # Gradients are made only on the ways from xs to ys: of the rest nobody asked, and some of it may
  # have none.
  downstream = set(xs)
  for op in operations:
    if op.has_gradient and any(x in downstream for x in op.inputs):
      downstream.update(op.outputs)

  # The names of what is made here, on which random numbers depend, are those of the forward
  # operations, whatever scope is open where gradients are asked for.
  with (
    scope.outside_all_scopes(),
    scope.variable_scope(graph.captured_variable_scope),
    on_mesh(None),
  ):
    # An operation stands behind those that made its inputs: backwards, every use of an output has
    # added its gradient before the operation itself comes.
    for op in reversed(operations):
      if not op.has_gradient or not any(y in found for y in op.outputs):
        continue
      if not any(x in downstream for x in op.inputs):
        continue
      with scope.variable_scope(f"{op.name}/gradients"):
        _accumulate(op, found, downstream)
  for op in graph.operations[start:]:
    op.is_backward = True
  return [found.get(x) for x in xs]


def _check_given(ys: list[Tensor], grad_ys: Sequence[Tensor | None]) -> None:
  if len(grad_ys) != len(ys):
    raise GradientError(f"gradients: {len(grad_ys)} grad_ys for {len(ys)} ys {ys}")
  for y, g in zip(ys, grad_ys):
    if g is None:
      continue
    if set(g.shape) != set(y.shape):
      raise ShapeError(f"gradients: the given gradient {g} has not the dimensions of {y}")
    if g.dtype != y.dtype:
      raise DTypeError(f"gradients: the given gradient {g} has not the dtype of {y}; cast it")


def _accumulate(op: Operation, found: dict[Tensor, Tensor], downstream: set[Tensor]) -> None:
  """Adds the gradients of an operation's inputs to those found before."""
  operations = op.graph.operations
  before = len(operations)
  try:
    grad_ys = [found.get(y) for y in op.outputs]
    # Operations with a body compute only the requested gradients: none can be removed afterwards.
    only = getattr(op, "gradient_of", None)
    # A gradient made of the results of a function under `custom_gradient` goes through its inside.
    with usable([*op.inputs, *op.outputs]):
      grads: list[Any] = list(
        op.gradient(grad_ys)
        if only is None
        else only(grad_ys, [x in downstream for x in op.inputs])
      )
  except NotImplementedError as e:
    raise GradientError(
      f"gradients: {type(op).__name__} {op.name} has no gradient; stop it with mtf.stop_gradient"
    ) from e
  # An operation makes the gradients of all its inputs; those of images, say, nobody asked for.
  kept = [g for x, g in zip(op.inputs, grads) if g is not None and x in downstream]
  needed = needed_operations(operations[before:], kept)
  operations[before:] = [
    made for made in operations[before:] if made in needed or isinstance(made, Variable)
  ]
  for x, g in zip(op.inputs, grads):
    if g is None or x not in downstream:
      continue
    if set(g.shape) != set(x.shape):
      raise ShapeError(
        f"gradients: {type(op).__name__} {op.name} gave a gradient of {g.shape} for {x}"
      )
    found[x] = add(found[x], g, output_shape=x.shape) if x in found else g
