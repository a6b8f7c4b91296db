"""Fusion of elementwise operations into kernels, as XLA and NVRTC do it, and what kernels move.

A kernel reads from memory what it does not compute itself, each tensor once, and writes what others
need. An elementwise operation is computed inside of the kernels that read its result, and that is
never in memory, if all of these can be fused, and if fewer bytes move so than if it were written
once (several kernels compute it anew, each from what it reads: XLA's criterion). Reductions and
norms read a row once, and write their result. Products, exchanges, gathers and updates are not
fused, and neither are loops: what goes in or out of them, or to the backward pass, is in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mesh_tensorflow.operations.broadcasting import BinaryOpWithBroadcasting
from mesh_tensorflow.operations.einsum import EinsumOperation
from mesh_tensorflow.operations.elementwise import CastBeforeSumOperation
from mesh_tensorflow.operations.norms import (
  RmsNormalizeGradOperation,
  RmsNormalizeOperation,
  StandardizeGradOperation,
  StandardizeOperation,
)
from mesh_tensorflow.operations.random import DropoutOperation
from mesh_tensorflow.operations.reduction import BroadcastOperation, ReduceOperation
from mesh_tensorflow.operations.scalar import ScalarOperation
from mesh_tensorflow.operations.slicewise import GenericGradOperation, SlicewiseOperation
from mesh_tensorflow.operations.softmax import (
  LogSoftmaxOperation,
  LogSumExpOperation,
  SoftmaxOperation,
)
from mesh_tensorflow.operations.where import WhereOperation
from mesh_tensorflow.planning.lowering import Piece
from mesh_tensorflow.program.graph import Operation, Tensor

_ELEMENTWISE = (
  BinaryOpWithBroadcasting,
  BroadcastOperation,
  CastBeforeSumOperation,
  DropoutOperation,
  EinsumOperation,
  ScalarOperation,
  SlicewiseOperation,
  WhereOperation,
)
_OF_ROWS = (
  EinsumOperation,
  LogSoftmaxOperation,
  LogSumExpOperation,
  ReduceOperation,
  RmsNormalizeGradOperation,
  RmsNormalizeOperation,
  SoftmaxOperation,
  StandardizeGradOperation,
  StandardizeOperation,
)


def kernels(
  units: Sequence[Any], pieces: Sequence[Piece], results: Collection[Tensor]
) -> dict[int, list[Tensor]]:
  """Finds the kernels of a program.

  Args:
    units: its `evaluation.Unit`s.
    pieces: what each does where nothing is split.
    results: tensors that must be in memory in the end.

  Returns:
    By number of a unit that can be fused the tensors that its kernel moves; none if it is computed
    inside of others.
  """
  # A reshape is the tensor that it reads.
  stands_for: dict[Tensor, Tensor] = {}
  inputs: list[list[Tensor]] = []
  readers: dict[Tensor, list[int]] = {}
  for i, (unit, piece) in enumerate(zip(units, pieces)):
    inputs.append(list(dict.fromkeys(stands_for.get(x, x) for x in unit.reads)))
    outputs = unit.operation.outputs
    if [len(inputs[i]), len(outputs)] == [1, 1] and piece.buffers[0] == ("input", 0):
      stands_for[outputs[0]] = inputs[i][0]
    else:
      for x in inputs[i]:
        readers.setdefault(x, []).append(i)
  kept = {stands_for.get(x, x) for x in results}
  may = [_may_be_fused(unit.operation, piece) for unit, piece in zip(units, pieces)]
  # Of what is computed where it is read, the tensors that it is computed from.
  sources: dict[Tensor, list[Tensor]] = {}
  found: dict[int, list[Tensor]] = {}
  for i, unit in enumerate(units):
    op = unit.operation
    if not may[i] or (op.outputs[0] in stands_for):
      continue
    read = list(dict.fromkeys(s for x in inputs[i] for s in sources.get(x, [x])))
    found[i] = [*read, *op.outputs]
    if _is_elementwise(op) and op.outputs[0] not in kept:
      users = [(j, units[j]) for j in readers.get(op.outputs[0], ())]
      side = unit.block, op.is_backward
      inside = all(may[j] and (u.block, u.operation.is_backward) == side for j, u in users)
      if users and inside and _is_gain(read, op.outputs[0], len(users)):
        sources[op.outputs[0]], found[i] = read, []
  return found


def bytes_of(x: Tensor, parts: Mapping[str, int]) -> int:
  """Bytes of a slice.

  Args:
    x: a tensor.
    parts: by name of a dimension into how many it is split.
  """
  size = int(x.dtype.size)
  for d in x.shape:
    size *= -(-int(d.size) // parts.get(d.name, 1))
  return size


def _may_be_fused(op: Operation, piece: Piece) -> bool:
  is_alone = len(piece.costs) == 1 and piece.is_local and not piece.costs[0].work.products
  if not is_alone or not op.outputs or hasattr(op, "inner_operations"):
    return False
  return _is_elementwise(op) or isinstance(op, _OF_ROWS)


def _is_elementwise(op: Operation) -> bool:
  """True if an operation computes each element from those in its place, of broadcast inputs too."""
  if not isinstance(op, _ELEMENTWISE) or isinstance(op, GenericGradOperation):
    return False
  names = set(op.outputs[0].shape.dimension_names)
  if isinstance(op, SlicewiseOperation) and not names <= op.splittable_dims:
    return False
  return len(op.outputs) == 1 and all(names >= set(x.shape.dimension_names) for x in op.inputs)


def _is_gain(read: Sequence[Tensor], made: Tensor, users: int) -> bool:
  """True if less is moved where each user reads what a tensor is made of than if it is written."""
  if users == 1:
    return True
  size, once = bytes_of(made, {}), sum(bytes_of(x, {}) for x in read)
  return users * once < once + size + users * size
