"""Checks of what an operation is given: tensors of this language, and of one graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mesh_tensorflow.arguments.kinds import GraphMember, SymbolicTensor
from mesh_tensorflow.errors import ArgumentError, GraphError


def check_tensors(what: str, xs: Iterable[Any]) -> None:
  """Raises `ArgumentError` unless all are `Tensor`s; `what` is the operation, for the message."""
  for x in xs:
    if not isinstance(x, SymbolicTensor):
      shape = f" of shape {x.shape}" if hasattr(x, "shape") else ""
      raise ArgumentError(
        f"{what}: inputs must be mtf.Tensors, got {type(x).__name__}{shape}; "
        "use mtf.import_tf_tensor to bring a tf.Tensor or an array into the graph"
      )


def check_one_graph(what: str, x: GraphMember, others: Iterable[Any]) -> None:
  """Raises `GraphError` unless the others, which have a graph, too, are in that of x."""
  for other in others:
    if other.graph is not x.graph:
      raise GraphError(
        f"{what} of {x}: {other} belongs to another graph; make both in one graph, or export the "
        "one (lowering.export_to_tf_tensor) and import it here"
      )
