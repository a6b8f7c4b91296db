"""The assignments of dimensions to mesh dimensions that a layout may have."""

from __future__ import annotations

import math

from mesh_tensorflow.program.dimensions import Shape, ShapeLike, convert_to_shape
from mesh_tensorflow.program.graph import Graph

# Dimensions of tensors that are imported without names.
_ANONYMOUS = "_anonymous_"


class LayoutValidator:
  """Validator of assignments of a graph's dimensions to dimensions of a mesh.

  Dimensions are identified by name: one that some operation cannot split is split nowhere.

  Args:
    mtf_graph: an `mtf.Graph`.
    mesh_shape: a mesh shape.
  """

  def __init__(self, mtf_graph: Graph, mesh_shape: ShapeLike):
    shape: Shape = convert_to_shape(mesh_shape)
    self._sizes = {m.name: int(m.size) for m in shape}
    common: dict[str, int] = {}
    unsplittable: set[str] = set()
    for op in mtf_graph.operations:
      unsplittable |= op.unsplittable_dims
      for x in op.outputs:
        for d in x.shape:
          common[d.name] = math.gcd(common.get(d.name, 0), int(d.size))
    self._common = common
    self._splittable = {
      name for name in common if not name.startswith(_ANONYMOUS) and name not in unsplittable
    }

  @property
  def splittable_mtf_dimension_names(self) -> set[str]:
    """Names of the dimensions that every operation can split."""
    return self._splittable

  @property
  def mesh_dimension_name_to_size(self) -> dict[str, int]:
    """Sizes of the mesh dimensions, in the order of the mesh."""
    return self._sizes

  def is_valid_assignment(self, mtf_dimension_name: str, mesh_dimension_name: str) -> bool:
    """True if a dimension may be split over a mesh dimension.

    Args:
      mtf_dimension_name: name of the dimension.
      mesh_dimension_name: name of the mesh dimension.

    Raises:
      KeyError: the dimension can be split, and the mesh has none of that name.
    """
    return (
      mtf_dimension_name in self._splittable
      and self._common[mtf_dimension_name] % self._sizes[mesh_dimension_name] == 0
    )
