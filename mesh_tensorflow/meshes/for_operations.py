"""Structural type of a lowering, as operations use it.

`mtf.Lowering` is in a room above those of the operations; this is its side that they see.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from mesh_tensorflow.meshes.laid_out import LaidOut, LaidOutTensor
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.program.graph import Graph, Operation, Tensor


class LoweringInProgress(Protocol):
  """A `Lowering` as `Operation.lower` gets it.

  Attributes:
    graph: the graph that is lowered.
    tensors: what is laid out so far.
    operations: what an assignment became.
    variables: variables as this lowering sees them.
    scalar_summaries: (name, value) of each scalar that the program reports.
    unread: values of variables that no operation reads, and that are not asked for.
  """

  graph: Graph
  tensors: dict[Tensor, LaidOut]
  operations: dict[Operation, Any]
  # `LaidOutVariable`s, or what acts as one: a stacked variable is several of them.
  variables: dict[Operation, Any]
  scalar_summaries: list[tuple[str, Any]]
  unread: frozenset[Tensor]

  def mesh_impl(self, m: object) -> MeshImpl:
    """The `MeshImpl` of a mesh, or of anything that has a `mesh`."""

  def set_tensor_lowering(self, tensor: Tensor, laid_out_tensor: LaidOut) -> None:
    """Stores the slices of a tensor, after checking their shape."""

  def laid_out_size(self, tensor: Tensor) -> int:
    """Number of elements of all slices of the tensor."""

  def add_counter(self, key: str, value: int) -> None:
    """Adds to a counter, for the report."""

  def computed_before(self) -> list[tf.Tensor]:
    """Slices that a gather of a variable, made now, waits for."""

  def random_key(self, op: Operation) -> Any:
    """The key of a random operation in this run: a Python int, or uint32 scalars laid out."""

  def prepare_random(self, operations: Sequence[Operation]) -> None:
    """Reads the seed now, if an operation draws: inside a loop it would be read anew."""

  def lower_operations(self, operations: Iterable[Operation]) -> None:
    """Lowers operations in order."""

  def lower_block(self, operations: Sequence[Operation], wanted: Sequence[Tensor]) -> None:
    """Lowers the operations of a block, of which some tensors are asked for afterwards."""

  def child(
    self, loop_key: LaidOutTensor | None = None, impl: MeshImpl | None = None
  ) -> LoweringInProgress:
    """A lowering for the body of a loop or branch: sees this one's tensors, keeps its own."""
