"""The memory of a graph on a mesh: the sizes of its tensors, nothing else."""

from __future__ import annotations

from collections.abc import Iterable

from mesh_tensorflow.auto_mtf.graph_interface import GraphInterface
from mesh_tensorflow.auto_mtf.valid_layouts import LayoutValidator
from mesh_tensorflow.program.dimensions import Shape, ShapeLike, convert_to_shape
from mesh_tensorflow.program.graph import Graph, Tensor


class MemoryEstimator:
  """A graph and a mesh, as a `LayoutOptimizer` takes them.

  A subclass may override `_compute_layout_validator` and `_compute_graph_interface`.

  Args:
    mtf_graph: an `mtf.Graph`.
    mesh_shape: a mesh shape.
    mtf_outputs: `mtf.Tensor`s that are needed to the end.
  """

  def __init__(self, mtf_graph: Graph, mesh_shape: ShapeLike, mtf_outputs: Iterable[Tensor] = ()):
    self.mtf_graph = mtf_graph
    self.mesh_shape: Shape = convert_to_shape(mesh_shape)
    self.mtf_outputs = list(mtf_outputs)
    self._layout_validator: LayoutValidator | None = None
    self._graph_interface: GraphInterface | None = None

  def get_layout_validator(self) -> LayoutValidator:
    """The `LayoutValidator`, made when it is first asked for."""
    if self._layout_validator is None:
      self._layout_validator = self._compute_layout_validator()
    return self._layout_validator

  def get_graph_interface(self) -> GraphInterface:
    """The `GraphInterface`, with the outputs marked as final; made when it is first asked for."""
    if self._graph_interface is None:
      self._graph_interface = self._compute_graph_interface()
    return self._graph_interface

  def _compute_layout_validator(self) -> LayoutValidator:
    return LayoutValidator(self.mtf_graph, self.mesh_shape)

  def _compute_graph_interface(self) -> GraphInterface:
    result = GraphInterface(self.mtf_graph)
    for x in self.mtf_outputs:
      result.set_tensor_final(result.name_of(x))
    return result
