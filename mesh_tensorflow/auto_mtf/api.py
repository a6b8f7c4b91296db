"""The layout that needs least memory, with or without a given mesh shape."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from mesh_tensorflow.auto_mtf.layout_optimizer import LayoutOptimizer
from mesh_tensorflow.auto_mtf.memory_estimator import MemoryEstimator
from mesh_tensorflow.errors import MeshShapeError
from mesh_tensorflow.meshes.layout import LayoutRules, convert_to_layout_rules
from mesh_tensorflow.program.dimensions import Dimension, Shape, ShapeLike, convert_to_shape
from mesh_tensorflow.program.graph import Graph, Tensor

_LOG = logging.getLogger("mesh_tensorflow")


def layout(
  mtf_graph: Graph, mesh_shape: ShapeLike, mtf_outputs: Sequence[Tensor] = ()
) -> LayoutRules:
  """Finds the layout with the least peak memory of tensors.

  It knows sizes of tensors, not time: see `mtf.auto_layout`.

  Args:
    mtf_graph: an `mtf.Graph`.
    mesh_shape: a mesh shape.
    mtf_outputs: tensors that are needed to the end.

  Returns:
    The `LayoutRules`.
  """
  estimator = MemoryEstimator(mtf_graph, convert_to_shape(mesh_shape), mtf_outputs)
  return convert_to_layout_rules(LayoutOptimizer(estimator).solve())


def layout_and_mesh_shape(
  mtf_graph: Graph,
  num_machines: int,
  mtf_outputs: Sequence[Tensor] = (),
  max_mesh_shape_dimensions: int | None = 2,
) -> tuple[LayoutRules, Shape]:
  """Finds the layout and the mesh shape with the least peak memory of tensors.

  Args:
    mtf_graph: an `mtf.Graph`.
    num_machines: number of devices, a power of two.
    mtf_outputs: tensors that are needed to the end.
    max_mesh_shape_dimensions: maximum number of mesh dimensions; None for any.

  Returns:
    The `LayoutRules`, and the mesh shape, of dimensions "mesh_0", "mesh_1", ...

  Raises:
    MeshShapeError: the number is no power of two (a ValueError).
  """
  best: tuple[float, LayoutRules, Shape] | None = None
  for sizes in _mesh_shape_iterator(num_machines, max_mesh_shape_dimensions):
    shape = Shape([Dimension(f"mesh_{i}", n) for i, n in enumerate(sizes)])
    optimizer = LayoutOptimizer(MemoryEstimator(mtf_graph, shape, mtf_outputs))
    solution = optimizer.solve()
    value = optimizer.evaluate_layout(solution)
    _LOG.info("auto_mtf: mesh %s, layout %s: %g bytes", shape.to_string, solution, value)
    if best is None or value < best[0]:
      best = value, convert_to_layout_rules(solution), shape
  if best is None:
    raise MeshShapeError(
      f"a mesh of {num_machines} devices has at least 1 dimension; at most "
      f"{max_mesh_shape_dimensions} are allowed"
    )
  return best[1], best[2]


def _mesh_shape_iterator(
  num_machines: int, max_mesh_shape_dimensions: int | None = None
) -> Iterator[list[int]]:
  """Yields non-increasing lists of powers of two with this product, largest first number first.

  Raises:
    MeshShapeError: the number is no power of two (a ValueError).
  """
  if num_machines < 1 or num_machines & (num_machines - 1):
    raise MeshShapeError(
      f"the number of machines must be a power of two, got {num_machines}; mtf.auto_layout takes "
      "any number"
    )
  if num_machines == 1:
    yield [1]
    return

  def rest(n: int, largest: int) -> Iterator[list[int]]:
    if n == 1:
      yield []
      return
    first = min(n, largest)
    while first > 1:
      for others in rest(n // first, first):
        yield [first, *others]
      first //= 2

  for sizes in rest(num_machines, num_machines):
    if max_mesh_shape_dimensions is None or len(sizes) <= max_mesh_shape_dimensions:
      yield sizes
