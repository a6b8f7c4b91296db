"""Blocks: operations that a function makes, taken out of the graph into an operation of their own.

The body of a loop and the branches of a condition are blocks. What they use from outside is among
the inputs of the operation that has them; inside it goes by the tensors with which the block was
made, so that a copy of the operation (in a recomputation) may have other inputs.

Differentiation is here, too: `block_gradients` makes the operations of the backward pass of a
block, and says what of the forward pass they need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LazyAllreduceSum, LazyGather
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.operations.control import PrintOperation, ScalarSummaryOperation
from mesh_tensorflow.operations.einsum import transpose
from mesh_tensorflow.operations.gradients import gradients
from mesh_tensorflow.operations.stacks import carries_gradient
from mesh_tensorflow.operations.variables import Depend, Variable
from mesh_tensorflow.program.graph import (
  Graph,
  Mesh,
  Operation,
  Tensor,
  needed_operations,
  on_stage,
  reads,
  unwatched,
  usable,
)


@dataclasses.dataclass(frozen=True)
class Block:
  """Tensors and operations of one traced function.

  Attributes:
    placeholders: the tensors that it was called with.
    operations: the operations that it made, except variables.
    outputs: what it returned.
  """

  placeholders: list[Tensor]
  operations: list[Operation]
  outputs: list[Tensor]

  @property
  def made(self) -> list[Tensor]:
    """Tensors that exist only inside: placeholders and outputs of operations."""
    return self.placeholders + [x for op in self.operations for x in op.outputs]

  def captured(self) -> list[Tensor]:
    """Tensors from outside, in the order of their first use."""
    inside = set(self.placeholders)
    found: dict[Tensor, None] = {}
    for op in self.operations:
      found.update((x, None) for x in reads(op) if x not in inside)
      inside.update(op.outputs)
    found.update((x, None) for x in self.outputs if x not in inside)
    return list(found)

  def forbid_use(self) -> None:
    """Makes later operations refuse the tensors inside as inputs."""
    for x in self.made:
      x.usable = False


def capture(graph: Graph, fn: Callable[[], object]) -> tuple[Any, list[Operation]]:
  """Calls `fn`; removes the operations that it makes from the graph.

  Variables stay there, and what brings a tensor of the graph to another mesh: so the block may be
  of one mesh.
  """
  operations = graph.operations
  n = len(operations)
  try:
    with unwatched():  # They run in a block, not here.
      result = fn()
  finally:
    made = operations[n:]
    outside = _outside(operations[:n], made)
    operations[n:] = [op for op in made if op in outside]
  return result, [op for op in made if op not in outside]


def _outside(before: Sequence[Operation], made: Sequence[Operation]) -> set[Operation]:
  """Those of the operations made in a block that are in front of it."""
  outside: set[Operation] = {op for op in made if isinstance(op, Variable)}
  moves = [op for op in made if op.is_between_meshes]
  known = {*before, *outside} if moves else outside
  for op in moves:
    if op.inputs[0].operation in known:
      known.add(op)
      outside.add(op)
  return outside


class BlockOperation(Operation):
  """Base class of operations that have blocks.

  Subclasses set `_blocks`, and `_keys`: the tensors from outside that the blocks use, which are
  the last of `_inputs`.
  """

  # Each operation inside does, or is lowered on gathered inputs there.
  lowers_uneven_slices = True
  may_mix_meshes = True

  _blocks: list[Block]
  _keys: list[Tensor]

  def _on_stage(
    self, stage: Mesh | str, mesh: Mesh, inputs: list[Tensor]
  ) -> tuple[Mesh, list[Tensor]]:
    # What the blocks begin with is brought there, as what they take is.
    return super()._on_stage(stage, mesh, [on_stage(x) for x in inputs])

  @property
  def inner_operations(self) -> list[Operation]:
    """The operations of the blocks."""
    return [op for block in self._blocks for op in block.operations]

  @property
  def captured(self) -> list[Tensor]:
    """Tensors from outside that the blocks use."""
    return self._inputs[len(self._inputs) - len(self._keys) :]

  @property
  def known_by(self) -> dict[Tensor, Tensor]:
    """Maps the tensors that stand for captured ones in the blocks to those captured now."""
    return dict(zip(self._keys, self.captured))

  def use_captured_of(self, other: BlockOperation) -> None:
    """Captures the same tensors as `other`, from whose blocks the own ones were derived.

    The blocks of both refer to the tensors captured when the block was made; a copy of an
    operation may have captured others in their place.
    """
    actual = other.known_by
    first = len(self._inputs) - len(self._keys)
    self._inputs = self._inputs[:first] + [actual.get(x, x) for x in self._inputs[first:]]

  @property
  def draws_random_numbers(self) -> bool:
    """True if an operation inside draws random numbers."""
    return any(getattr(op, "draws_random_numbers", False) for op in self.inner_operations)

  @property
  def scalar_summaries(self) -> list[ScalarSummaryOperation]:
    """Summaries made in the blocks, also in blocks inside of these."""
    return summaries_of(self.inner_operations)

  def verify_layout(self, mesh_impl: MeshImpl) -> None:
    for op in self.inner_operations:
      op.check_layout(mesh_impl)
    super().verify_layout(mesh_impl)

  def outside(self, lowering: LoweringInProgress) -> Any:
    """Child lowering with the captured tensors; shares no pending sum with its parent.

    A sum that is executed in a block must not be remembered outside it.
    """
    known = {key: x for key, x in self.known_by.items() if x in lowering.tensors}
    for x in known.values():
      value = lowering.tensors[x]
      # A pending sum is executed here, once; inside it would be in every iteration. A weight
      # that is gathered for each use is gathered inside.
      if not isinstance(value, LazyGather) or value.keeps:
        value.to_laid_out_tensor()
    result = lowering.child()
    result.tensors.update({key: lowering.tensors[x] for key, x in known.items()})
    for x, value in result.tensors.items():
      if isinstance(value, LazyAllreduceSum):
        result.tensors[x] = (
          # Alone: a sum remembers its shards, which may be cut inside, in one of two branches.
          value.to_laid_out_tensor()
          if value.is_reduced
          else LazyAllreduceSum(
            value.mesh_impl, value.laid_out_input, value.mesh_axes, value.add_counter_fn
          )
        )
    return result


def with_inner(operations: Iterable[Operation]) -> Iterator[Operation]:
  """Operations, and those in their blocks, and in the blocks of these."""
  for op in operations:
    yield op
    yield from with_inner(getattr(op, "inner_operations", ()))


def summaries_of(operations: Iterable[Operation]) -> list[ScalarSummaryOperation]:
  """The scalar summaries among operations, those inside of blocks too."""
  found = []
  for op in operations:
    if isinstance(op, ScalarSummaryOperation):
      found.append(op)
    elif isinstance(op, BlockOperation):
      found += op.scalar_summaries
  return found


# ------------------------------------------------------------------------- gradients


def downstream(operations: Iterable[Operation], sources: Iterable[Tensor]) -> set[Tensor]:
  """The sources, and what depends on them differentiably."""
  found = set(sources)
  for op in operations:
    if op.has_gradient and any(x in found for x in op.inputs):
      found.update(op.outputs)
  return found


def upstream(operations: Sequence[Operation], results: Iterable[Tensor]) -> set[Tensor]:
  """The results, and what they depend on differentiably."""
  found = set(results)
  for op in reversed(operations):
    if op.has_gradient and any(y in found for y in op.outputs):
      found.update(op.inputs)
  return found


@dataclasses.dataclass(frozen=True)
class BackwardBlock:
  """The backward pass of a block, not yet in any graph.

  Attributes:
    operations: what computes the gradients.
    grads: one for each of the tensors asked for, or None.
    repeated: operations of the forward block that the backward pass does again: they depend on
      nothing that the block changes.
    saved: tensors of the forward block that it needs as they were.
  """

  operations: list[Operation]
  grads: list[Tensor | None]
  repeated: list[Operation]
  saved: list[Tensor]

  def put_into_graph(self, graph: Graph, values: Mapping[Tensor, Tensor]) -> list[Tensor | None]:
    """Appends the operations to the graph, once.

    Args:
      graph: the graph.
      values: for each tensor of the forward block, and each given gradient, its replacement.

    Returns:
      The gradients.
    """
    _, mapping = graph.clone_operations(self.repeated, dict(values))
    for op in self.operations:
      # They are new, and nobody has seen them: what a clone would get, they get themselves.
      op._inputs = [mapping.get(x, x) for x in op._inputs]
      if isinstance(op, PrintOperation):
        op._data = [mapping.get(x, x) for x in op._data]
      elif isinstance(op, Depend):
        # A copy, made by a recomputation: what the first one waited for is done.
        op._dependencies = []
    graph.operations.extend(self.operations)
    return [None if g is None else mapping.get(g, g) for g in self.grads]


def block_gradients(
  block: Block, ys: Sequence[Tensor], grad_ys: Sequence[Tensor], xs: Sequence[Tensor]
) -> BackwardBlock:
  """Gradients of tensors of a block.

  Args:
    block: the block.
    ys: tensors of it.
    grad_ys: a gradient for each.
    xs: its placeholders, or tensors from outside.
  """
  if not ys:
    return BackwardBlock([], [None] * len(xs), [], [])
  graph = ys[0].graph
  # Captured tensors may be inside another block: in a backward pass, say.
  with usable(block.made + block.captured()):
    grads, made = capture(graph, lambda: _gradients_like(xs, ys, grad_ys, block.operations))
  results = [g for g in grads if g is not None]
  needed = needed_operations(made, results)
  made = [op for op in made if op in needed]
  inside = set(block.made)
  used = dict.fromkeys(x for op in made for x in reads(op) if x in inside)
  used.update((g, None) for g in results if g in inside)
  repeated = _independent(block)
  wanted = set(used)
  again = []
  for op in reversed(repeated):
    if any(y in wanted for y in op.outputs):
      again.append(op)
      wanted.update(op.inputs)
  done_again = {y for op in again for y in op.outputs}
  return BackwardBlock(made, grads, again[::-1], [x for x in used if x not in done_again])


def _gradients_like(
  xs: Sequence[Tensor],
  ys: Sequence[Tensor],
  grad_ys: Sequence[Tensor],
  operations: Sequence[Operation],
) -> list[Tensor | None]:
  """Gradients, each transposed to the dimension order of its tensor."""
  return [like(g, x) for x, g in zip(xs, gradients(ys, xs, grad_ys, operations))]


def like(grad: Tensor | None, x: Tensor) -> Tensor | None:
  """Transposes a gradient to the dimension order of `x`."""
  return grad if grad is None or grad.shape == x.shape else transpose(grad, x.shape)


def _independent(block: Block) -> list[Operation]:
  """Loop-invariant operations without side effects.

  Recomputing them takes no memory per iteration: constants, casts and transposed weights.
  """
  changing = set(block.placeholders)
  found = []
  for op in block.operations:
    plain = op.is_cloneable and not op.is_external and not isinstance(op, BlockOperation)
    effect = isinstance(op, (ScalarSummaryOperation, Depend)) or not op.outputs
    # `implicit_inputs`: what prints has them.
    stable = not any(x in changing for x in reads(op)) and not hasattr(op, "implicit_inputs")
    if plain and stable and not effect:
      found.append(op)
    else:
      changing.update(op.outputs)
  return found


def wanted_inputs(op: Operation, wanted: Sequence[bool] | None) -> list[bool]:
  """For each input True if its gradient is requested and defined."""
  asked = [True] * len(op.inputs) if wanted is None else wanted
  return [w and carries_gradient(x) for w, x in zip(asked, op.inputs)]
