"""Assignment of TPU cores to the processors of a mesh.

Processors that differ only along one mesh axis exchange data; a good order puts
them on neighbouring chips. A physical shape is [rows, columns, cores of a chip];
physical processor numbers run row-major over it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from absl import flags

from mesh_tensorflow.errors import MeshShapeError
from mesh_tensorflow.meshes.layout import (
  pnum_to_processor_coordinates,
  processor_coordinates_to_pnum,
  processor_coordinates_to_pnum_map_nd,
)
from mesh_tensorflow.program.dimensions import Shape, convert_to_shape, list_product

_LOG = logging.getLogger("mesh_tensorflow")

# (size, stride) along each physical axis of the part that one logical axis walks through.
SizesAndStrides = Sequence[tuple[int, int]]

# The module that the flags belong to: they are listed under it by --help.
_FLAGS_MODULE = "mesh_tensorflow.simd_mesh_impl"

# Another copy of the package, or its predecessor, may have defined them in this process.
if "logical_cores_per_chip" not in flags.FLAGS:
  flags.DEFINE_integer(
    "logical_cores_per_chip",
    2,
    "Number of logical cores of a TPU chip.",
    module_name=_FLAGS_MODULE,
  )
if "fold_xy" not in flags.FLAGS:
  flags.DEFINE_bool(
    "fold_xy",
    False,
    "Fold axes x and y of a TPU topology, instead of y and z.",
    module_name=_FLAGS_MODULE,
  )


def _flag(name: str) -> Any:
  """The value of a flag, also before the command line has been parsed."""
  return flags.FLAGS[name].value


def physical_shape_3d_from_topology_proto_4d(mesh_shape: Sequence[int]) -> list[int]:
  """Folds a topology [x, y, z, core] to [y * z, x, core]; with the flag fold_xy, [x * y, z, core].

  Raises:
    MeshShapeError: `mesh_shape` has not four entries.
  """
  sizes = [int(s) for s in mesh_shape]
  if len(sizes) != 4:
    raise MeshShapeError(f"expected a topology [x, y, z, core], got {sizes}")
  x, y, z, core = sizes
  return [x * y, z, core] if _flag("fold_xy") else [y * z, x, core]


def _ring_2d(m: int, n: int) -> list[tuple[int, int]]:
  """The cells of an m x n grid in an order in which neighbours, last and first too, touch.

  There is no such ring if m is odd (and m, n > 1): then the cells column by column.
  """
  if m == 1:
    return [(0, j) for j in range(n)]
  if n == 1:
    return [(i, 0) for i in range(m)]
  if m % 2:
    _LOG.warning("no ring goes through %d rows, an odd number; going column by column", m)
    return [(i, j) for j in range(n) for i in range(m)]
  ring = [(0, 0)]
  for i in range(m):
    columns = range(1, n)
    ring += [(i, j) for j in (columns if i % 2 == 0 else reversed(columns))]
  return ring + [(i, 0) for i in range(m - 1, 0, -1)]


def _logical_1d_to_physical_subspace_auto(
  sizes_and_strides: SizesAndStrides, physical_shape: Sequence[int]
) -> list[list[int]]:
  """Physical coordinates, in order, of the processors along one logical axis.

  Args:
    sizes_and_strides: (size, stride) along each physical axis.
    physical_shape: physical shape; plays no part.
  """
  del physical_shape
  sizes = [size for size, _ in sizes_and_strides]
  if len(sizes) >= 2 and sizes[0] > 1 and sizes[1] > 1:
    outer = _ring_2d(sizes[0], sizes[1])
    inner = _row_major(sizes[2:])
    coordinates = [list(o) + i for o in outer for i in inner]
  else:
    coordinates = _row_major(sizes)
  return [[c * stride for c, (_, stride) in zip(cs, sizes_and_strides)] for cs in coordinates]


def _row_major(sizes: Sequence[int]) -> list[list[int]]:
  return [pnum_to_processor_coordinates(list(sizes), i) for i in range(list_product(sizes))]


def _logical_to_physical_v1(
  sizes_and_strides: Sequence[SizesAndStrides],
  physical_shape: Sequence[int],
  fn_1d: Callable[..., list[list[int]]] = _logical_1d_to_physical_subspace_auto,
) -> list[list[int]]:
  """Physical coordinates of every processor, row-major over the logical axes.

  Args:
    sizes_and_strides: for each logical axis its (size, stride) along each physical axis.
    physical_shape: physical shape.
    fn_1d: the order along one logical axis; as `_logical_1d_to_physical_subspace_auto`.

  Raises:
    MeshShapeError: some processor is used twice, or not at all.
  """
  sizes = [list_product(size for size, _ in axis) for axis in sizes_and_strides]
  if list_product(sizes) != list_product(physical_shape):
    raise MeshShapeError(
      f"logical axes of sizes {sizes} do not cover the physical shape {list(physical_shape)}"
    )
  along = [fn_1d(axis, physical_shape) for axis in sizes_and_strides]
  result = [
    [sum(cs) for cs in zip(*(along[axis][c] for axis, c in enumerate(logical)))]
    for logical in _row_major(sizes)
  ]
  if sorted(result) != _row_major(physical_shape):
    raise MeshShapeError(
      f"sizes and strides {sizes_and_strides} do not visit every processor of the physical shape "
      f"{list(physical_shape)} once"
    )
  return result


class HierarchicalTiling:
  """A physical mesh cut into tiles, these into smaller tiles, and so on.

  Args:
    spec: (name, sizes) pairs from the outermost to the innermost tile: each is a mesh
      dimension, and its tile repeats that many times along each physical axis. The first
      sizes may be None: what is left.
    physical_shape: a list of integers.

  Raises:
    MeshShapeError: the tiles do not cover the physical shape.
  """

  def __init__(self, spec: Sequence[tuple[str, Sequence[int] | None]], physical_shape: list[int]):
    if not isinstance(physical_shape, list):
      raise MeshShapeError(f"physical_shape must be a list of integers, got {physical_shape!r}")
    names = [name for name, _ in spec]
    inner_tiles = _inner_tiles(spec)
    inner = [list_product(t[axis] for t in inner_tiles) for axis in range(len(physical_shape))]
    outer_tiles = [
      [p // i for p, i in zip(physical_shape, inner)] if sizes is None else sizes
      for _, sizes in spec[:1]
    ]
    tiles = outer_tiles + inner_tiles
    covered = [list_product(t[axis] for t in tiles) for axis in range(len(physical_shape))]
    if covered != physical_shape:
      raise MeshShapeError(
        f"the tiles {list(zip(names, tiles))} cover {covered}, not the physical shape "
        f"{physical_shape}"
      )
    sizes_and_strides: list[list[tuple[int, int]]] = []
    strides = [1] * len(physical_shape)
    # From the innermost outwards: a tile is repeated at the distance of all that is inside it.
    for tile in reversed(tiles):
      sizes_and_strides.insert(0, list(zip(tile, strides)))
      strides = [s * t for s, t in zip(strides, tile)]
    coordinates = _logical_to_physical_v1(sizes_and_strides, physical_shape)
    self._logical_to_physical = [
      processor_coordinates_to_pnum(physical_shape, c) for c in coordinates
    ]
    self._mesh_shape = convert_to_shape(
      [(name, list_product(tile)) for name, tile in zip(names, tiles)]
    )

  @property
  def logical_to_physical(self) -> list[int]:
    """Physical number of each processor."""
    return self._logical_to_physical

  @property
  def mesh_shape(self) -> Shape:
    """The mesh `Shape`: each tile's name and number of repetitions."""
    return self._mesh_shape

  @classmethod
  def spec_to_mesh_shape(
    cls, spec: Sequence[tuple[str, Sequence[int] | None]], num_processors: int
  ) -> Shape:
    """The mesh shape of a tiling, without knowing the physical shape.

    Args:
      spec: (name, sizes) pairs, from the outermost to the innermost tile.
      num_processors: size of the mesh.

    Raises:
      MeshShapeError: the sizes of the tiles do not give that number.
    """
    inner = [list_product(tile) for tile in _inner_tiles(spec)]
    outer = [
      num_processors // list_product(inner) if tile is None else list_product(tile)
      for _, tile in spec[:1]
    ]
    sizes = outer + inner
    if list_product(sizes) != num_processors:
      raise MeshShapeError(
        f"the tiling {list(spec)} has dimensions of sizes {sizes}, which do not give "
        f"{num_processors} processors"
      )
    return convert_to_shape([(name, size) for (name, _), size in zip(spec, sizes)])


def _inner_tiles(spec: Sequence[tuple[str, Sequence[int] | None]]) -> list[Sequence[int]]:
  """The sizes of all tiles but the outermost, which have to be given."""
  tiles = []
  for name, sizes in spec[1:]:
    if sizes is None:
      raise MeshShapeError(
        f"the tiling {list(spec)} leaves the sizes of {name!r} open; only those of the outermost "
        f"tile, {spec[0][0]!r}, may be None"
      )
    tiles.append(sizes)
  return tiles


def auto_logical_to_physical_tpu(
  logical_shape: Sequence[int],
  physical_shape: Sequence[int],
  return_coordinates: bool = False,
  device_assignment: Any = None,
) -> list[Any]:
  """A good order of the cores of a TPU for a mesh.

  The first logical axis goes over tiles of chips, the others within a tile; each
  follows a ring of neighbours. Where there is no such order, processors are physical.

  Args:
    logical_shape: sizes of the mesh dimensions.
    physical_shape: [rows, columns, cores of a chip], or a topology [x, y, z, core].
    return_coordinates: return physical coordinates instead of numbers.
    device_assignment: needed where a chip has one core: says which replica it is.

  Returns:
    For each processor of the mesh its physical number, or its coordinates.

  Raises:
    MeshShapeError: the sizes differ, or the device assignment is missing.
  """
  logical = [int(s) for s in logical_shape]
  physical = [int(s) for s in physical_shape]
  if len(physical) == 4:
    physical = physical_shape_3d_from_topology_proto_4d(physical)
  if list_product(logical) != list_product(physical):
    raise MeshShapeError(
      f"a mesh of shape {logical} has {list_product(logical)} processors, a TPU of shape "
      f"{physical} has {list_product(physical)} cores"
    )
  coordinates = _tiled_order([s for s in logical if s != 1], physical)
  if coordinates is None:
    return _row_major(physical) if return_coordinates else list(range(list_product(physical)))
  if return_coordinates:
    return coordinates
  if physical[2] == 1:
    if device_assignment is None:
      raise MeshShapeError(
        "auto_logical_to_physical_tpu needs a device_assignment where a chip has one core"
      )
    return processor_coordinates_to_pnum_map_nd(physical, coordinates, device_assignment)
  return [processor_coordinates_to_pnum(physical, c) for c in coordinates]


def _tiled_order(logical: list[int], physical: list[int]) -> list[list[int]] | None:
  """Physical coordinates in logical order, or None if the shape does not allow tiles."""
  cores = _flag("logical_cores_per_chip")
  if len(physical) != 3 or physical[2] != cores:
    return None
  rows, columns, _ = physical
  # Powers of two, so that tiles of powers of two fit in, and rings close (they need even rows).
  if rows & (rows - 1) or columns & (columns - 1):
    return None
  if len(logical) <= 1:
    return [[i, j, core] for i, j in _ring_2d(rows, columns) for core in range(cores)]
  tiles = logical[0]
  tile_chips, rest = divmod(rows * columns, tiles)
  if rest or not tile_chips:
    return None
  if len(logical) == 2 and tile_chips == rows:
    tile = (rows, 1)
  elif len(logical) == 2 and tile_chips == columns:
    tile = (1, columns)
  else:
    # A power of two as near to the square root as the physical shape allows.
    height = 1 << (tile_chips.bit_length() - 1) // 2
    height = max(min(height, rows), tile_chips // columns)
    tile = (height, tile_chips // height)
  inside = _tiled_order(logical[1:], [*tile, cores])
  if inside is None:
    return None
  return [
    [ti * tile[0] + i, tj * tile[1] + j, core]
    for ti, tj in _ring_2d(rows // tile[0], columns // tile[1])
    for i, j, core in inside
  ]


def topology_rank(topology: object) -> int:
  """The number of dimensions of a TPU topology.

  Args:
    topology: a `tf.tpu.experimental.Topology`, or the bytes of its proto.

  Raises:
    MeshShapeError: it is something else.
  """
  if isinstance(topology, bytes):
    topology = tf.tpu.experimental.Topology(serialized=topology)
  if not isinstance(topology, tf.tpu.experimental.Topology):
    raise MeshShapeError(
      "topology_rank takes a tf.tpu.experimental.Topology or the bytes of its proto, got "
      f"{type(topology).__name__}"
    )
  return len(topology.mesh_shape)
