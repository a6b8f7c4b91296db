"""Which operations a program needs, and how long it holds their outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from mesh_tensorflow.meshes.laid_out import LazyAllreduceSum
from mesh_tensorflow.planning.mesh_impl import PlanMeshImpl
from mesh_tensorflow.program.graph import Operation, Tensor
from mesh_tensorflow.program.reachability import reads
from mesh_tensorflow.running.lowering import Lowering

# Operations whose output is the buffer of their input.
_ALIASES = ("Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "EnsureShape")


class Held(NamedTuple):
  """A tensor in memory, and the bytes of its slice."""

  name: str
  bytes: int


@dataclasses.dataclass
class Memory:
  """Bytes that one processor holds, if operations run in the order of the graph.

  Attributes:
    variables: slices of all variables.
    inputs: slices of what is brought in from outside.
    activations: the most that outputs of operations take at any time.
    peak_operation: the operation at which that is.
    largest: tensors live at the peak, largest first.
    timeline: for each operation, in order, the bytes of activations while it runs.
  """

  variables: int = 0
  inputs: int = 0
  activations: int = 0
  peak_operation: str = ""
  largest: list[Held] = dataclasses.field(default_factory=list)
  timeline: list[Held] = dataclasses.field(default_factory=list)

  @property
  def total(self) -> int:
    return self.variables + self.inputs + self.activations


def activation_memory(
  lowering: Lowering,
  operations: Sequence[Operation],
  results: Sequence[Tensor],
  inside: dict[Operation, int],
) -> Memory:
  """Peak memory of operation outputs; each is live from its creation to its last use.

  Args:
    lowering: a lowering of the operations onto a `PlanMeshImpl`.
    operations: in the order in which they run.
    results: tensors that are held to the end.
    inside: bytes that operations take while they run, for a body or for their kernels.
  """
  held_elsewhere = {
    x.ref()
    for impl in set(lowering.mesh_to_impl.values())
    if isinstance(impl, PlanMeshImpl)
    for x in impl.inputs + impl.variable_reads
  }
  buffers: dict[Any, list[Any]] = {}  # Key: first use, last use, bytes, tensor.
  for i, op in enumerate(operations):
    for x in reads(op) + op.outputs:
      if x not in lowering.tensors:
        continue
      buffer = base(planned_slice(lowering, x))
      if buffer.ref() in held_elsewhere:
        continue
      if x in op.outputs:
        buffers.setdefault(buffer.ref(), [i, i, bytes_held(lowering, x), x.name])
      elif buffer.ref() in buffers:
        buffers[buffer.ref()][1] = i
  for x in results:
    key = base(planned_slice(lowering, x)).ref()
    if key in buffers:
      buffers[key][1] = len(operations) - 1
  change = [0] * (len(operations) + 1)
  for first, last, size, _ in buffers.values():
    change[first] += size
    change[last + 1] -= size
  memory, held = Memory(), 0
  peak = 0
  for i, op in enumerate(operations):
    held += change[i]
    now = held + inside.get(op, 0)
    memory.timeline.append(Held(op.name, now))
    if now > memory.activations:
      memory.activations, memory.peak_operation, peak = now, op.name, i
  live = [Held(name, n) for first, last, n, name in buffers.values() if first <= peak <= last]
  memory.largest = sorted(live, key=lambda held: -held.bytes)
  return memory


def probable_results(operations: Sequence[Operation]) -> list[Tensor]:
  """Tensors that no operation reads.

  If the program assigns variables, gradients that were not used are by-products.
  """
  read = {x for op in operations for x in reads(op)}
  assigns = any(not op.outputs for op in operations)
  return [
    x
    for op in operations
    if not (assigns and "/gradients/" in op.name)
    for x in op.outputs
    if x not in read
  ]


def planned_slice(lowering: Lowering, x: Tensor) -> tf.Tensor:
  """The slice of a tensor, without executing a pending sum."""
  laid_out = lowering.tensors[x]
  if isinstance(laid_out, LazyAllreduceSum):
    laid_out = laid_out.laid_out_input
  value = tf.convert_to_tensor(laid_out.to_laid_out_tensor().one_slice)
  # Slices that were imported ready may be eager; in the scratch graph they have an operation.
  return value if hasattr(value, "graph") else tf.identity(value)


def bytes_held(lowering: Lowering, x: Tensor) -> int:
  """Bytes of the buffer of a tensor's slice; of a stack, those of its elements.

  The slice tells the size, not the buffer at its base: an element taken from a stack has a shape
  only from the `EnsureShape` behind it, which, as all aliases, keeps the number of elements.

  Args:
    lowering: a lowering of the tensor onto a `PlanMeshImpl`.
    x: the tensor.
  """
  if x.stack_of is not None:
    return int(x.stack_of.bytes_of_slice(lowering.mesh_impl(x)))
  value = planned_slice(lowering, x)
  return int(value.shape.num_elements()) * int(base(value).dtype.size)


def base(x: tf.Tensor) -> tf.Tensor:
  """The tensor whose buffer x uses."""
  while x.op.type in _ALIASES:
    x = x.op.inputs[0]
  return x
