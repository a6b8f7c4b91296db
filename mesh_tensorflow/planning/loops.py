"""Loops opened: all operations of a program in one list, each with its number of runs.

A loop that is one operation among others can only be lowered whole, under each assignment of all
its dimensions. Opened, the operations of its body are pieces like all others, and layers in it that
are alike are lowered once. What the loop itself does to its variables and sums is here as
operations of their own, in no graph, which do to slices what `operations.loop_lowering` does. A
loop that keeps something for its backward pass stays whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.meshes.laid_out import LazyAllreduceSum
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.operations.loop_lowering import scatters_of
from mesh_tensorflow.operations.loops import WhileLoopOperation
from mesh_tensorflow.operations.stacks import is_stack
from mesh_tensorflow.planning.variables import placeholder
from mesh_tensorflow.program.graph import Operation, Tensor
from mesh_tensorflow.program.reachability import reads


def trips(op: Operation) -> int | None:
  """Maximum number of times that the body of an operation runs; None if not known.

  Args:
    op: a loop, or another operation that has a body.
  """
  most = getattr(op, "maximum_iterations", None)
  return most if isinstance(most, int) else None


def inner_operations(op: Operation) -> list[Operation]:
  """The operations of the bodies of an operation, and of bodies in these.

  Args:
    op: an operation.
  """
  inner = list(getattr(op, "inner_operations", ()))
  return [x for one in inner for x in [one, *inner_operations(one)]]


def added_bytes(op: Operation, impl: MeshImpl) -> list[int]:
  """Bytes of each addition to an accumulator that a loop does outside of its body.

  Args:
    op: a loop, or the operation that represents one of its sums; others add nothing.
    impl: the mesh.
  """
  if isinstance(op, _Result):
    sums, count = op.outputs if op.inputs else [], op.trips
  elif isinstance(op, WhileLoopOperation):
    added = scatters_of(op.body.operations, op.body.outputs, op.num_variables)
    numbers = range(op.num_variables, len(op.body.outputs))
    sums, count = [op.body.outputs[i] for i in numbers if i not in added], trips(op) or 1
  else:
    return []
  return [impl.slice_size(x.shape) * x.dtype.size for x in sums] * count


@dataclasses.dataclass(frozen=True)
class Unit:
  """An operation of a program whose loops are opened.

  Attributes:
    operation: the operation.
    reads: tensors that it reads; what stands for them, where they are used inside of a loop.
    times: number of times that it runs.
    block: the number of the block in which it runs; that of the program is 0.
    place: its place in that block; what a loop itself does is all at the place of the loop.
    uses: whether what it reads must still be there.
    makes: whether what it makes takes room.
  """

  operation: Operation
  reads: list[Tensor]
  times: int = 1
  block: int = 0
  place: int = 0
  uses: bool = True
  makes: bool = True


class Opened:
  """The operations of a program, with those of its loops.

  Args:
    operations: of the program, in order.

  Attributes:
    units: in the order in which they run.
    blocks: for each block the number of the one around it, and its place there; (-1, -1) for that
      of the program.
  """

  def __init__(self, operations: Sequence[Operation]):
    self.units: list[Unit] = []
    self.blocks: list[tuple[int, int]] = [(-1, -1)]
    # Tensors that stand for captured ones inside loops.
    self._stands_for: dict[Tensor, Tensor] = {}
    self._add_all(operations, 1, 0)

  def _add_all(self, operations: Sequence[Operation], times: int, block: int) -> None:
    for place, op in enumerate(operations):
      if isinstance(op, WhileLoopOperation) and _can_be_opened(op):
        self._open(op, times, block, place)
      else:
        self._add(op, times, block, place)

  def _add(self, op: Operation, times: int, block: int, place: int, **others: bool) -> None:
    read = [self._stands_for.get(x, x) for x in reads(op)]
    self.units.append(Unit(op, read, times, block, place, **others))

  def _open(self, loop: WhileLoopOperation, times: int, block: int, place: int) -> None:
    # Pending sums of captured tensors are executed once, before the first iteration.
    entered = {x: _summed(x) for x in reads(loop)}
    for op in entered.values():
      self._add(op, times, block, place, makes=False)
    before, n, body = dict(self._stands_for), loop.num_variables, loop.body
    # By the names under which the blocks know them.
    self._stands_for.update((k, entered[x].outputs[0]) for k, x in loop.known_by.items())
    inner = times * (trips(loop) or 1)
    for part in (loop.condition, body):
      number = len(self.blocks)
      self.blocks.append((block, place))
      self._add_all(part.operations, inner, number)
      # The next iteration reads its variables as sums.
      for y in dict.fromkeys(part.outputs[:n]):
        end = len(part.operations)
        self._add(_summed(y), inner, number, end, uses=False, makes=False)
    self._stands_for = before
    for i, out in enumerate(loop.outputs):
      self._add(_result(loop, None if i < n else body.outputs[i], out), times, block, place)


def _can_be_opened(loop: WhileLoopOperation) -> bool:
  """True if a loop has variables and sums only: no stacks, no sums that grow row by row."""
  body = loop.body
  return not (
    loop.is_differentiated
    or any(map(is_stack, [*loop.inputs, *body.outputs]))
    or scatters_of(body.operations, body.outputs, loop.num_variables)
  )


class _OfLoop(Operation):
  """Base class of the operations that stand for a loop's handling of one tensor."""

  def __init__(self, inputs: list[Tensor], of: Tensor, out: Tensor | None):
    # Without `Operation.__init__`, which lets nobody use tensors of a body outside of it.
    self._inputs, self._mesh, self._name = inputs, of.mesh, of.name
    self._outputs = [Tensor(self, of.shape, of.dtype) if out is None else out]
    self._initialize_all_dimensions_as_splittable()


class _Summed(_OfLoop):
  """Executes a sum that is pending."""

  def lower(self, lowering: Any) -> None:
    value = lowering.tensors[self._inputs[0]].to_laid_out_tensor()
    lowering.set_tensor_lowering(self._outputs[0], value)


class _Result(_OfLoop):
  """Result of a loop: a variable, or a sum (a pending one if its summands are)."""

  trips = 1

  def lower(self, lowering: Any) -> None:
    impl, out = lowering.mesh_impl(self), self._outputs[0]
    shape = impl.slice_shape(out.shape)
    if not self._inputs:
      value: Any = impl.slicewise(lambda: placeholder(shape, out.dtype))
    else:
      # Sums begin with zeros, each in room of its own.
      zeros = impl.slicewise(lambda: tf.zeros(shape, out.dtype))
      value = impl.slicewise(lambda t: tf.raw_ops.IdentityN(input=[t])[0], zeros)
      summand = lowering.tensors[self._inputs[0]]
      if isinstance(summand, LazyAllreduceSum) and not summand.is_reduced:
        value = LazyAllreduceSum(impl, value, summand.mesh_axes)
    lowering.set_tensor_lowering(out, value)


# By `type.__call__`: that of `Operation` would enter them into the graph of the program.


def _summed(x: Tensor) -> Operation:
  op: Operation = type.__call__(_Summed, [x], x, None)
  return op


def _result(loop: Operation, summand: Tensor | None, out: Tensor) -> Operation:
  op: _Result = type.__call__(_Result, [] if summand is None else [summand], out, out)
  op.trips = trips(loop) or 1
  return op
