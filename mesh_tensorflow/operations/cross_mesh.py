"""Tensors that go from one mesh of a program to another."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from mesh_tensorflow.errors import GraphError
from mesh_tensorflow.meshes import cross_mesh
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LaidOutTensor
from mesh_tensorflow.program.graph import Mesh, Operation, Tensor, check_one_graph, on_mesh
from mesh_tensorflow.program.operators import provide

__all__ = ["Reshard", "reshard", "stage"]


class Reshard(Operation):
  """A tensor on another mesh of the graph, laid out as that mesh's rules say.

  Args:
    x: a `Tensor`.
    mesh: the `Mesh` that gets it.
    name: of the operation.
  """

  may_mix_meshes = True
  is_between_meshes = True
  lowers_uneven_slices = True

  def __init__(self, x: Tensor, mesh: Mesh, name: str | None = None):
    check_one_graph("reshard", x, [mesh])
    super().__init__([x], mesh, name=name or "reshard")
    self._outputs = [Tensor(self, x.shape, x.dtype)]
    self._outputs[0].index_bound = x.index_bound
    self._initialize_all_dimensions_as_splittable()

  def gradient(self, grad_ys: list[Tensor]) -> list[Tensor | None]:
    return [reshard(grad_ys[0], self.inputs[0].mesh)]

  def lower(self, lowering: LoweringInProgress) -> None:
    (x,), (y,) = self.inputs, self.outputs
    source, target = lowering.mesh_impl(x), lowering.mesh_impl(y)
    laid_out: Any = lowering.tensors[x]
    if source is not target:
      slices = laid_out.to_laid_out_tensor().tensor_list
      laid_out = LaidOutTensor(cross_mesh.reshard(source, target, x.shape, x.dtype, slices))
    lowering.set_tensor_lowering(y, laid_out)


def reshard(x: Tensor, mesh: Mesh | str, name: str | None = None) -> Tensor:
  """A tensor on another mesh of the program, laid out as that mesh's rules say.

  Its value is the same, and so are its dimensions. Each element is sent once to the other mesh,
  however many of its processors hold it; gradients go back the same way.

  Args:
    x: a `Tensor`.
    mesh: a `Mesh` of its graph, or the name of one.
    name: of the operation.

  Returns:
    A `Tensor` on the mesh; x itself if it is there already.

  Raises:
    GraphError: the graph has no mesh of this name, or the mesh is of another graph.
  """
  found = x.graph.mesh(mesh) if isinstance(mesh, str) else mesh
  if not isinstance(found, Mesh):
    raise GraphError(f"reshard of {x}: mesh must be an mtf.Mesh or the name of one, got {mesh!r}")
  if x.mesh is found:
    return x
  known = x.graph.resharded
  # What was made in a block cannot be used outside.
  if (x, found) not in known or not known[x, found].usable:
    known[x, found] = Reshard(x, found, name).outputs[0]
  return known[x, found]


provide(reshard=reshard)


@contextlib.contextmanager
def stage(mesh: Mesh | str) -> Iterator[None]:
  """Context manager: all operations and variables made in the block are on a mesh.

  Tensors of other meshes that they take are brought there, each once, as by `reshard`; a variable
  that exists stays where it is. So a model is cut into the stages of a pipeline without a change
  of its layers:

      for i, layer in enumerate(layers):
        with mtf.stage(f"stage{i // 4}"):
          x = layer(x)

  Gradients are computed on the mesh of each operation, wherever they are asked for.

  Args:
    mesh: a `Mesh` of the graph, or the name of one.
  """
  with on_mesh(mesh):
    yield
