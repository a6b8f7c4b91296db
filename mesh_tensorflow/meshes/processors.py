"""Processor numbers, coordinates and groups on a mesh. No TensorFlow here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from mesh_tensorflow.arguments.kinds import ArrayOrScalar
from mesh_tensorflow.errors import DimensionError
from mesh_tensorflow.program.dimensions import Shape, list_product

__all__ = [
  "pnum_to_group",
  "pnum_to_processor_coordinates",
  "pnum_to_processor_coordinates_nd",
  "processor_coordinates_to_pnum",
  "processor_coordinates_to_pnum_map_nd",
  "processor_groups",
]

MeshSizes: TypeAlias = Shape | Sequence[int]


def _sizes(mesh_shape: MeshSizes) -> list[int]:
  if isinstance(mesh_shape, Shape):
    return mesh_shape.to_integer_list
  if isinstance(mesh_shape, (list, tuple)) and all(isinstance(s, int) for s in mesh_shape):
    return list(mesh_shape)
  raise DimensionError(f"expected a mesh Shape or a list of integers, got {mesh_shape!r}")


def pnum_to_processor_coordinates(mesh_shape: MeshSizes, pnum: ArrayOrScalar) -> list[int]:
  """Coordinates of a processor, row-major (the last mesh axis runs fastest).

  Args:
    mesh_shape: a mesh shape: a `Shape`, or a list of sizes.
    pnum: a processor number.
  """
  # With % and // only, so that a tensor, or an array of many numbers, will do.
  coordinates = []
  for size in reversed(_sizes(mesh_shape)):
    coordinates.append(pnum % size)
    pnum //= size
  return coordinates[::-1]


def processor_coordinates_to_pnum(mesh_shape: MeshSizes, coord: Sequence[ArrayOrScalar]) -> int:
  """Processor number of the coordinates; inverse of `pnum_to_processor_coordinates`.

  Args:
    mesh_shape: a mesh shape: a `Shape`, or a list of sizes.
    coord: one coordinate for each mesh axis.
  """
  pnum = 0
  for size, c in zip(_sizes(mesh_shape), coord):
    pnum = pnum * size + c
  return pnum


def pnum_to_group(mesh_shape: MeshSizes, group_dims: Sequence[int], pnum: ArrayOrScalar) -> int:
  """Number of the group of processors that differ only along `group_dims`.

  Args:
    mesh_shape: a mesh shape: a `Shape`, or a list of sizes.
    group_dims: mesh axes (integers) along which members of a group differ.
    pnum: a processor number.
  """
  coord = pnum_to_processor_coordinates(mesh_shape, pnum)
  rest = [i for i in range(len(coord)) if i not in group_dims]
  sizes = _sizes(mesh_shape)
  return processor_coordinates_to_pnum([sizes[i] for i in rest], [coord[i] for i in rest])


def processor_groups(mesh_shape: MeshSizes, group_dims: Sequence[int]) -> list[list[int]]:
  """Groups of processors that differ only along `group_dims`, each in increasing order.

  Args:
    mesh_shape: a mesh shape: a `Shape`, or a list of sizes.
    group_dims: mesh axes (integers) along which members of a group differ.
  """
  sizes = _sizes(mesh_shape)
  groups: dict[int, list[int]] = {}
  for pnum in range(list_product(sizes)):
    groups.setdefault(pnum_to_group(sizes, group_dims, pnum), []).append(pnum)
  return [groups[g] for g in sorted(groups)]


def pnum_to_processor_coordinates_nd(
  mesh_shape: Any, pnum: ArrayOrScalar, device_assignment: Any
) -> Any:
  """Hardware coordinates of a TPU core; `mesh_shape` plays no part.

  Args:
    mesh_shape: plays no part.
    pnum: number of the replica.
    device_assignment: a TPU device assignment.
  """
  del mesh_shape
  return device_assignment.coordinates(pnum, 0)


def processor_coordinates_to_pnum_map_nd(
  mesh_shape: Sequence[int], logical_to_physical: Sequence[Sequence[int]], device_assignment: Any
) -> list[int]:
  """Replica numbers of TPU chips given by their coordinates, in logical order.

  Args:
    mesh_shape: sizes of the physical mesh.
    logical_to_physical: physical coordinates of each logical processor.
    device_assignment: a TPU device assignment.
  """
  hardware = [int(s) for s in device_assignment.topology.mesh_shape]
  replica_of = {}
  for replica in range(device_assignment.num_replicas):
    c = [int(v) for v in device_assignment.coordinates(replica, 0)]
    replica_of[c[0] + c[1] * hardware[0] + c[2] * hardware[0] * hardware[1]] = replica
  return [replica_of[c[0] + c[1] * mesh_shape[0]] for c in logical_to_physical]
