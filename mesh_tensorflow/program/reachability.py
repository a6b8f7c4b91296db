"""Operations that lead to a result."""

from __future__ import annotations

from collections.abc import Sequence

from mesh_tensorflow.program.graph import Operation, Tensor


def needed_operations(operations: Sequence[Operation], results: Sequence[Tensor]) -> set[Operation]:
  """Operations that lead to a result or have side effects: those that a tf.function would run."""
  wanted, needed = set(results), set()
  for op in reversed(operations):
    if not op.outputs or any(x in wanted for x in op.outputs):
      needed.add(op)
      wanted.update(reads(op))
  return needed


def reads(op: Operation) -> list[Tensor]:
  """Tensors that an operation reads, those that its body captured too."""
  return op.inputs + list(getattr(op, "implicit_inputs", ()))
