"""State shared by the layers of one call when each is recomputed in the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer.models.context import Context


@contextlib.contextmanager
def recomputed_layer(context: Context, x: mtf.Tensor) -> Iterator[None]:
  """Context manager for a layer inside `mtf.recompute_grad` or another `mtf.custom_gradient`.

  Tensors made in there cannot be used outside. So what the layer caches goes away with it,
  except for what depends on variables and not on x, such as a relative attention bias that all
  layers share: that is taken out of the recomputation. Its variables are those of the first
  layer that asks for it, as without recomputation, and it is computed once.

  Args:
    context: a `Context`.
    x: the argument of the recomputed function.
  """
  cache, keep = context.cache, context.keep_cached
  start = len(x.graph.operations)
  context.cache = dict(cache)

  def keep_shared(key: Any, value: Any) -> None:
    if _take_out(value, x, start):
      cache[key] = value

  context.keep_cached = keep_shared
  try:
    yield
  finally:
    context.cache, context.keep_cached = cache, keep


def _take_out(value: Any, x: mtf.Tensor, start: int) -> bool:
  """Moves the operations of a shared `value` out of the recomputed function.

  Args:
    value: tensors in nested lists and tuples; anything else among them is ignored.
    x: what may not be taken out.
    start: how many operations the graph had before the recomputed function.

  Returns:
    True if value depends on variables and not on x, so that it was moved.
  """
  # Backwards from the value through what was made inside: reaching x means that it must be
  # computed again, reaching only variables that it need not.
  inside = set(x.graph.operations[start:])
  pending = [t.operation for t in tf.nest.flatten(value) if isinstance(t, mtf.Tensor)]
  found: set[mtf.Operation] = set()
  uses_variables = False
  while pending:
    op = pending.pop()
    uses_variables |= isinstance(op, mtf.Variable)
    if op in found or op not in inside or op.is_external:
      continue
    if any(t is x for t in op.inputs):
      return False
    found.add(op)
    pending += [t.operation for t in op.inputs]
  if uses_variables:
    for op in found:
      op.is_external, op.is_cloneable = True, False
  return uses_variables
