"""Places of a tensor's slices: layout rules, numbers of processors, offsets.

Computed from the mesh shape and the layout rules alone; nothing here runs TensorFlow.
"""

from __future__ import annotations

import collections.abc
import copy
import difflib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex, TypeAlias, TypeVar, cast, overload

from mesh_tensorflow.arguments import kinds
from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.kinds import ArrayOrScalar, Kind
from mesh_tensorflow.errors import DimensionError, LayoutError, LayoutTypeError, ShapeError
from mesh_tensorflow.program.dimensions import (
  Dimension,
  DimensionLike,
  Shape,
  ShapeLike,
  convert_to_dimension,
  convert_to_shape,
  list_product,
  parse_pairs,
)
from mesh_tensorflow.program.graph import Tensor

__all__ = [
  "LayoutRules",
  "TensorLayout",
  "convert_to_layout_rules",
  "pnum_to_group",
  "pnum_to_processor_coordinates",
  "pnum_to_processor_coordinates_nd",
  "processor_coordinates_to_pnum",
  "processor_coordinates_to_pnum_map_nd",
  "processor_groups",
  "tensor_dim_to_mesh_dim_size",
  "tensor_dim_to_size_per_split",
]

_LOG = logging.getLogger("mesh_tensorflow")
_Self = TypeVar("_Self", bound="MeshLayout")

# Ends the mesh dimension of a rule that splits sizes which the mesh dimension does not divide, too.
UNEVEN = "~"

# The shape of a mesh, where only the sizes of its dimensions count.
MeshSizes: TypeAlias = Shape | Sequence[int]


class TensorLayout:
  """For each axis of a tensor the mesh axis it is split over, or None.

  Args:
    tensor_axis_to_mesh_axis: one integer or None per tensor axis.
  """

  @checked
  def __init__(self, tensor_axis_to_mesh_axis: Iterable[int | None]):
    self._axes = tuple(tensor_axis_to_mesh_axis)

  @property
  def tensor_axis_to_mesh_axis(self) -> tuple[int | None, ...]:
    """For each tensor axis the mesh axis over which it is split, or None."""
    return self._axes

  @property
  def is_fully_replicated(self) -> bool:
    """True if no tensor axis is split."""
    return all(a is None for a in self._axes)

  @checked
  def mesh_axis_to_tensor_axis(self, mesh_ndims: int) -> tuple[int | None, ...]:
    """For each mesh axis the tensor axis that is split over it, or None."""
    return tuple(self._axes.index(m) if m in self._axes else None for m in range(mesh_ndims))

  def __len__(self) -> int:
    return len(self._axes)

  @overload
  def __getitem__(self, key: SupportsIndex) -> int | None: ...
  @overload
  def __getitem__(self, key: slice) -> tuple[int | None, ...]: ...

  def __getitem__(self, key: SupportsIndex | slice) -> int | None | tuple[int | None, ...]:
    return self._axes[key]

  def __iter__(self) -> Iterator[int | None]:
    return iter(self._axes)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, TensorLayout) and self._axes == other._axes

  def __ne__(self, other: object) -> bool:
    return not self == other

  def __hash__(self) -> int:
    return hash(self._axes)

  def __repr__(self) -> str:
    return f"TensorLayout{self._axes}"


class LayoutRules:
  """A set of rules (tensor dimension name, mesh dimension name).

  A rule splits every tensor dimension of that name over the mesh dimension of
  that name. Rules for mesh dimensions that a mesh does not have are ignored.

  A `~` behind the mesh dimension ("vocab:model~") lets the rule split a size that the mesh
  dimension does not divide. All slices then have as many places as the largest one; those
  behind the end of the dimension are padding, which no value depends on.

  Args:
    pairs: (tensor dimension name, mesh dimension name) pairs, or a dict.
  """

  def __init__(self, pairs: Iterable[tuple[str, str]] | dict[str, str]):
    if isinstance(pairs, dict):
      pairs = pairs.items()
    if not isinstance(pairs, Iterable) or hasattr(pairs, "dtype"):
      raise LayoutTypeError(
        "a layout is text like 'batch:rows,d_ff:cols', a dict, or a list of pairs (tensor "
        f"dimension name, mesh dimension name), got {pairs!r}; write {{}} or '' to split nothing"
      )
    pairs = [tuple(p) if isinstance(p, (list, tuple)) else p for p in pairs]
    for p in pairs:
      if not isinstance(p, tuple) or len(p) != 2 or not all(isinstance(s, str) for s in p):
        raise LayoutError(
          f"a layout rule is a pair (tensor dimension name, mesh dimension name), got {p!r}"
        )
    self._uneven = frozenset((t, m.removesuffix(UNEVEN)) for t, m in pairs if m.endswith(UNEVEN))
    self._pairs = {(t, m.removesuffix(UNEVEN)) for t, m in pairs}

  @checked
  def tensor_dimension_to_mesh_axis(
    self, tensor_dimension: Dimension, mesh_shape: Shape
  ) -> int | None:
    """The mesh axis over which the dimension is split, or None.

    Raises:
      LayoutError: two rules split the dimension over two axes of this mesh.
    """
    axes = [i for i, m in enumerate(mesh_shape) if (tensor_dimension.name, m.name) in self._pairs]
    if len(axes) > 1:
      names = " and ".join(f"{mesh_shape[i].name}:{mesh_shape[i].size}" for i in axes)
      raise LayoutError(
        f"dimension {tensor_dimension.name}:{tensor_dimension.size} is split over {len(axes)} mesh "
        f"axes, {names}; keep one of the rules"
      )
    return axes[0] if axes else None

  @checked
  def tensor_layout(
    self, tensor_shape: Shape, mesh_shape: Shape, *, what: str = ""
  ) -> TensorLayout:
    """The `TensorLayout` of a tensor of this shape.

    Raises:
      LayoutError: two dimensions of the shape are split over one mesh axis.
    """
    axes = [self.tensor_dimension_to_mesh_axis(d, mesh_shape) for d in tensor_shape]
    used: dict[int, int] = {}
    for i, axis in enumerate(axes):
      if axis is None:
        continue
      if axis in used:
        first, second = tensor_shape[used[axis]], tensor_shape[i]
        raise LayoutError(
          f"{what or 'tensor'} {tensor_shape}: dimensions {first.name}:{first.size} and "
          f"{second.name}:{second.size} are both split over mesh axis "
          f"{mesh_shape[axis].name}:{mesh_shape[axis].size}; a mesh axis can split one "
          f"dimension of a tensor: rename one of the two, or drop one of the rules "
          f"{first.name}:{mesh_shape[axis].name}, {second.name}:{mesh_shape[axis].name}"
        )
      used[axis] = i
    return TensorLayout(axes)

  @checked
  def mesh_dimension_name_to_tensor_dimension_names(self, mesh_dimension_name: str) -> list[str]:
    """Names of the tensor dimensions that are split over the mesh dimension, sorted."""
    return sorted(t for t, m in self._pairs if m == mesh_dimension_name)

  @property
  def pairs(self) -> list[tuple[str, str]]:
    """The rules, sorted, without any `~`."""
    return sorted(self._pairs)

  @property
  def uneven(self) -> frozenset[tuple[str, str]]:
    """Those of `pairs` that split sizes which the mesh dimension does not divide, too."""
    return self._uneven

  @property
  def written(self) -> list[tuple[str, str]]:
    """The rules as they are written, sorted: `LayoutRules` of these are the same rules."""
    return [(t, m + UNEVEN if (t, m) in self._uneven else m) for t, m in self.pairs]

  @property
  def to_string(self) -> str:
    """The rules as text, from which `convert_to_layout_rules` makes the same ones."""
    return ",".join(f"{t}:{m}" for t, m in self.written)

  @checked
  def check_mesh(self, mesh_shape: Shape) -> list[tuple[str, str]]:
    """Rules whose mesh dimension this mesh does not have (they have no effect)."""
    names = mesh_shape.dimension_names
    return [p for p in self.pairs if p[1] not in names]

  def __eq__(self, other: object) -> bool:
    return isinstance(other, LayoutRules) and self._key() == other._key()

  def __hash__(self) -> int:
    return hash(self._key())

  def __repr__(self) -> str:
    return f"LayoutRules{set(self.written)}"

  def _key(self) -> tuple[frozenset[tuple[str, str]], frozenset[tuple[str, str]]]:
    return frozenset(self._pairs), self._uneven


LayoutLike: TypeAlias = LayoutRules | str | Iterable[tuple[str, str]] | dict[str, str]


class _LayoutLike(Kind):
  words = "a layout"
  error = LayoutTypeError
  types = frozenset([LayoutRules, str, dict])

  def accepts(self, value: object) -> bool:
    return isinstance(value, collections.abc.Iterable) and not hasattr(value, "dtype")

  def advice(self, name: str, value: object) -> str:
    del name, value
    return "write it as 'batch:rows,d_ff:cols', or {} to split nothing"


kinds.register(LayoutLike, _LayoutLike)
kinds.register(LayoutLike | None, _LayoutLike)
kinds.register_class(LayoutRules, LayoutTypeError)


def convert_to_layout_rules(x: LayoutLike) -> LayoutRules:
  """Turns `LayoutRules`, "batch:rows,d_ff:cols", pairs, or a dict into `LayoutRules`.

  Args:
    x: any of these; "" and {} split nothing. "vocab:cols~" splits a size that the mesh dimension
      does not divide, too.
  """
  if isinstance(x, LayoutRules):
    return x
  if isinstance(x, str):
    return LayoutRules(parse_pairs(x, "layout"))
  return LayoutRules(x)


def tensor_dim_to_mesh_dim_size(
  layout: LayoutLike, mesh_shape: ShapeLike, tensor_dim: DimensionLike
) -> int:
  """Size of the mesh dimension over which the tensor dimension is split, or 1.

  Args:
    layout: layout rules, as `convert_to_layout_rules` takes them.
    mesh_shape: a mesh shape, as `convert_to_shape` takes it.
    tensor_dim: a tensor dimension.
  """
  mesh_shape = convert_to_shape(mesh_shape)
  tensor_dim = convert_to_dimension(tensor_dim)
  axis = convert_to_layout_rules(layout).tensor_dimension_to_mesh_axis(tensor_dim, mesh_shape)
  return 1 if axis is None else mesh_shape[axis].size


def tensor_dim_to_size_per_split(
  layout: LayoutLike, mesh_shape: ShapeLike, tensor_dim: DimensionLike
) -> int:
  """Size of the part of the tensor dimension that one processor holds.

  Args:
    layout: layout rules, as `convert_to_layout_rules` takes them.
    mesh_shape: a mesh shape, as `convert_to_shape` takes it.
    tensor_dim: a tensor dimension. Split unevenly it has parts of different sizes: the largest.

  Raises:
    LayoutError: the mesh dimension does not divide the tensor dimension, and the rule has no `~`.
  """
  mesh_shape = convert_to_shape(mesh_shape)
  tensor_dim = convert_to_dimension(tensor_dim)
  rules = convert_to_layout_rules(layout)
  axis = rules.tensor_dimension_to_mesh_axis(tensor_dim, mesh_shape)
  if axis is None:
    return tensor_dim.size
  return _part_size(rules, tensor_dim, mesh_shape[axis], "")


def _part_size(rules: LayoutRules, d: Dimension, mesh_dim: Dimension, what: str) -> int:
  """Places of a slice along a dimension that is split over a mesh dimension.

  Raises:
    LayoutError: the mesh dimension does not divide it, and the rule has no `~`.
  """
  if d.size % mesh_dim.size and (d.name, mesh_dim.name) not in rules.uneven:
    raise LayoutError(indivisible_message(what, d, mesh_dim))
  return -(-d.size // mesh_dim.size)


def indivisible_message(what: str, tensor_dim: Dimension, mesh_dim: Dimension) -> str:
  """The text of the error for a dimension that the mesh axis does not divide."""
  size, parts = tensor_dim.size, mesh_dim.size
  # Eight are shown: a dimension of millions need not be searched to its end.
  legal = [n for n in range(1, min(size, 4096) + 1) if size % n == 0]
  shown = ", ".join(map(str, legal[:8])) + (", ..." if len(legal) > 8 else "")
  up = -(-size // parts) * parts
  return (
    f"dimension {tensor_dim.name}:{size}{what} cannot be split over mesh axis "
    f"{mesh_dim.name}:{parts}: {parts} does not divide {size}; legal: a mesh axis of size "
    f"{shown}, a dimension of size {up}, no rule {tensor_dim.name}:{mesh_dim.name}, or the rule "
    f"{tensor_dim.name}:{mesh_dim.name}{UNEVEN}, which splits it unevenly"
  )


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


class MeshLayout:
  """Base class of `MeshImpl`: which processor has which part of a tensor.

  Args:
    shape: mesh shape; a `Shape`, a list of dimensions, or "rows:2,cols:4".
    layout_rules: `LayoutRules`, or what `convert_to_layout_rules` takes.
  """

  # See `with_sharded_state`.
  _state_dims: tuple[str, ...] = ()
  _reshards = False

  @checked
  def __init__(self, shape: ShapeLike, layout_rules: LayoutLike):
    self._shape = convert_to_shape(shape)
    self._set_rules(convert_to_layout_rules(layout_rules))
    unused = self._layout_rules.check_mesh(self._shape)
    for dim, axis in unused:
      close = difflib.get_close_matches(axis, self._shape.dimension_names, 1, 0.75)
      if close:
        _LOG.warning(
          "layout rule %s:%s has no effect: the mesh %s has no dimension %s; did you mean %s:%s?",
          *(dim, axis, self._shape, axis, dim, close[0]),
        )
    if unused:
      _LOG.info(
        "layout rules without effect on mesh %s: %s",
        self._shape,
        ", ".join(f"{t}:{m}" for t, m in unused),
      )

  def _set_rules(self, layout_rules: LayoutRules) -> None:
    self._layout_rules = layout_rules
    # Each operation asks for the layouts of its tensors, several times, in every lowering.
    self._layout_cache: dict[Shape, TensorLayout] = {}
    self._verified: set[Shape] = set()
    self._finer: dict[tuple[tuple[str, str], ...], Any] = {}
    self._uneven_names = frozenset(
      t for t, m in layout_rules.uneven if any(m == d.name and d.size > 1 for d in self._shape)
    )
    self._uneven_axes: dict[Shape, tuple[int, ...]] = {}
    self._coarser: dict[frozenset[str], Any] = {}
    self._even: Any = None

  def with_layout(self: _Self, layout_rules: LayoutLike) -> _Self:
    """The same mesh with other layout rules: of the same devices, and with the same variables.

    A variable that exists keeps its slices; a program that would split it otherwise is refused.

    Args:
      layout_rules: `LayoutRules`, or what `convert_to_layout_rules` takes.
    """
    other = copy.copy(self)
    MeshLayout.__init__(other, self._shape, layout_rules)
    return other

  def with_sharded_state(
    self: _Self, mesh_dims: str | Sequence[str], reshard_after_forward: bool = True
  ) -> _Self:
    """The same mesh, with variables stored in shards over mesh dimensions that do not split them.

    Weights and optimizer state that the layout rules leave whole on each processor along such a
    mesh dimension are cut along one more of their dimensions: the first that no rule splits and
    that the size of the mesh dimension divides; if it divides none, the largest, the last shards
    of which have padding, or nothing else. Scalars stay whole. A processor updates its shard, for
    which it needs its part of the summed gradient only. What the program reads are weights as the
    layout rules have them, gathered from the shards. No value depends on it. This is ZeRO
    (Rajbhandari et al., 2020, arXiv:1910.02054), FSDP, and the weight-update sharding of Xu et al.
    (2020, arXiv:2004.13336).

    Args:
      mesh_dims: names of mesh dimensions, as a list or as "data,model"; none: nothing is sharded.
      reshard_after_forward: weights are gathered anew before each use, in the backward pass, too,
        so that few are whole at a time; else once in a run, and kept to its end.

    Raises:
      LayoutError: the mesh has no such dimension.
    """
    names = names_of_dimensions(mesh_dims)
    known = self._shape.dimension_names
    for name in names:
      if name not in known:
        raise LayoutError(
          f"state cannot be sharded over {name!r}: the mesh {self._shape} has no such dimension; "
          f"it has {', '.join(known) or 'none'}"
        )
    other = copy.copy(self)
    other._set_rules(self._layout_rules)
    other._state_dims = tuple(dict.fromkeys(names))
    other._reshards = reshard_after_forward
    return other

  @property
  def state_dims(self) -> tuple[str, ...]:
    """Names of the mesh dimensions over which variables are stored in shards."""
    return self._state_dims

  @property
  def reshards_after_forward(self) -> bool:
    """True if weights that are stored in shards are gathered anew before each use."""
    return self._reshards

  def stored_layout(self: _Self, shape: Shape, finer: Mapping[str, str] | None = None) -> _Self:
    """The same mesh with the layout in which a variable is stored.

    Args:
      shape: its `Shape`.
      finer: dimensions of the variable that it belongs to, a slot's weight, say, and the mesh
        dimensions which shard them; by default found for this shape.

    Returns:
      This mesh itself, if its rules are the layout.
    """
    if not self._state_dims:
      return self
    found = self.shards_of(shape) if finer is None else finer
    sizes, parts = _sizes_of(shape), _sizes_of(self._shape)
    pairs = tuple(
      (d, m if sizes[d] % parts[m] == 0 else m + UNEVEN) for d, m in found.items() if d in sizes
    )
    if not pairs:
      return self
    if pairs not in self._finer:
      # Not `with_layout`, which tells of rules without effect each time.
      finer_layout = self._finer[pairs] = copy.copy(self)
      finer_layout._set_rules(LayoutRules([*self._layout_rules.written, *pairs]))
    layout: _Self = self._finer[pairs]
    return layout

  def cuts_of_shards(self, shape: Shape) -> tuple[tuple[int, int], ...]:
    """The mesh axes over which a variable is cut into shards, each with the size that it cuts.

    Args:
      shape: its `Shape`.
    """
    if not self._state_dims:
      return ()
    names, sizes = self._shape.dimension_names, _sizes_of(shape)
    return tuple((names.index(m), sizes[d]) for d, m in self.shards_of(shape).items())

  def shards_of(self, shape: Shape) -> dict[str, str]:
    """The dimensions along which a variable is cut into shards, with their mesh dimensions.

    Args:
      shape: its `Shape`.
    """
    layout, names = self.tensor_layout(shape), shape.dimension_names
    found: dict[str, str] = {}
    for name in self._state_dims:
      axis = self._shape.dimension_names.index(name)
      n = self._shape[axis].size
      if n == 1 or axis in layout:
        continue
      # Of a name that stands twice both would be split.
      free = [
        d
        for d, split in zip(shape, layout)
        if split is None and d.name not in found and names.count(d.name) == 1 and d.size > 1
      ]
      # The first: what is gathered along it lies in memory one after the other.
      even = [d for d in free if d.size % n == 0]
      if free:
        chosen = even[0] if even else max(free, key=lambda d: d.size)
        found[chosen.name] = name
    return found

  @property
  def shape(self) -> Shape:
    """The mesh `Shape`."""
    return self._shape

  @property
  def ndims(self) -> int:
    """Number of mesh dimensions."""
    return len(self._shape)

  @property
  def size(self) -> int:
    """Number of processors."""
    return self._shape.size

  @property
  def layout_rules(self) -> LayoutRules:
    """The `LayoutRules`: the mesh dimension that splits each tensor dimension."""
    return self._layout_rules

  @checked
  def tensor_dimension_to_mesh_axis(self, tensor_dimension: Dimension) -> int | None:
    """The mesh axis over which the dimension is split, or None."""
    return self._layout_rules.tensor_dimension_to_mesh_axis(tensor_dimension, self._shape)

  def tensor_layout(self, arg: Tensor | ShapeLike) -> TensorLayout:
    """`TensorLayout` of a `Tensor`, a `Shape`, or what `convert_to_shape` takes."""
    shape = shape_of(arg)
    if shape not in self._layout_cache:
      self._layout_cache[shape] = self._layout_rules.tensor_layout(shape, self._shape)
    return self._layout_cache[shape]

  def verify_layout(self, shape: ShapeLike, what: str) -> None:
    """Checks that a tensor of this shape can be laid out.

    Raises:
      LayoutError: two dimensions on one mesh axis, or an indivisible dimension without a `~`.
    """
    shape = shape_of(shape)
    if shape in self._verified:
      return
    layout = self._layout_rules.tensor_layout(shape, self._shape, what=what)
    for d, axis in zip(shape, layout):
      if axis is not None:
        _part_size(self._layout_rules, d, self._shape[axis], f" of {what}")
    self._layout_cache[shape] = layout
    self._verified.add(shape)

  def mesh_axis_to_cumprod(self, tensor_shape: ShapeLike) -> list[int | None]:
    """For each mesh axis the product of the sizes before the axis split over it, or None."""
    tensor_shape = shape_of(tensor_shape)
    axes = self.tensor_layout(tensor_shape).mesh_axis_to_tensor_axis(self.ndims)
    cumprod = tensor_shape.cumprod
    return [None if a is None else cumprod[a] for a in axes]

  def slice_shape(self, tensor_shape: ShapeLike) -> list[int]:
    """Sizes of the slice of one processor, padding included: the same on all processors.

    Args:
      tensor_shape: a `Shape`, or a list of dimensions such as `x.shape[:-1]`.

    Raises:
      LayoutError: a mesh dimension does not divide the tensor dimension split over it, and the
        rule has no `~`.
    """
    tensor_shape = shape_of(tensor_shape)
    what = f" of {tensor_shape}"
    return [
      d.size if axis is None else _part_size(self._layout_rules, d, self._shape[axis], what)
      for d, axis in zip(tensor_shape, self.tensor_layout(tensor_shape))
    ]

  def slice_begin(self, tensor_shape: ShapeLike, pnum: int) -> list[int]:
    """Offsets of the slice of processor `pnum` in the whole tensor.

    One that has nothing but padding along a dimension begins at the dimension's end or behind it.
    """
    tensor_shape = shape_of(tensor_shape)
    coord = pnum_to_processor_coordinates(self._shape, pnum)
    return [
      0 if axis is None else -(-d.size // self._shape[axis].size) * coord[axis]
      for d, axis in zip(tensor_shape, self.tensor_layout(tensor_shape))
    ]

  def slice_extent(self, tensor_shape: ShapeLike, pnum: int) -> list[int]:
    """Sizes of the slice of processor `pnum` without its padding, 0 where it is nothing else."""
    tensor_shape = shape_of(tensor_shape)
    begins, sizes = self.slice_begin(tensor_shape, pnum), self.slice_shape(tensor_shape)
    return [min(n, max(0, d.size - b)) for d, b, n in zip(tensor_shape, begins, sizes)]

  @property
  def uneven_names(self) -> frozenset[str]:
    """Names of the tensor dimensions that are split whether or not it leaves padding."""
    return self._uneven_names

  def is_uneven(self, dim: Dimension) -> bool:
    """True if the dimension is split over a mesh axis that does not divide its size."""
    if dim.name not in self._uneven_names:
      return False
    axis = self.tensor_dimension_to_mesh_axis(dim)
    return axis is not None and bool(dim.size % self._shape[axis].size)

  def uneven_axes(self, tensor_shape: ShapeLike) -> tuple[int, ...]:
    """Axes of a tensor that are split unevenly: along them slices may have padding."""
    if not self._uneven_names:
      return ()
    shape = shape_of(tensor_shape)
    if shape not in self._uneven_axes:
      self._uneven_axes[shape] = tuple(i for i, d in enumerate(shape) if self.is_uneven(d))
    return self._uneven_axes[shape]

  def unsplit(self: _Self, names: Iterable[str]) -> _Self:
    """The same mesh with a layout that leaves tensor dimensions whole.

    Args:
      names: names of the dimensions.
    """
    key = frozenset(names)
    if key not in self._coarser:
      coarser = self._coarser[key] = copy.copy(self)
      coarser._set_rules(LayoutRules([p for p in self._layout_rules.written if p[0] not in key]))
      coarser._state_dims = ()
    layout: _Self = self._coarser[key]
    return layout

  @property
  def even_only(self: _Self) -> _Self:
    """The same mesh with the same rules, but for the `~` of some."""
    if not self._layout_rules.uneven:
      return self
    if self._even is None:
      self._even = copy.copy(self)
      self._even._set_rules(LayoutRules(self._layout_rules.pairs))
    layout: _Self = self._even
    return layout

  def slice_size(self, tensor_shape: ShapeLike) -> int:
    """Number of elements of a slice."""
    return list_product(self.slice_shape(tensor_shape))

  def laid_out_size(self, tensor_shape: ShapeLike) -> int:
    """Number of elements of all slices on all processors."""
    return self.slice_size(tensor_shape) * self.size

  def group_axes(self, mesh_axis: int | Sequence[int]) -> list[int]:
    """One mesh axis or several, as the list of those along which there are several processors.

    Args:
      mesh_axis: number of a mesh axis, or a sequence of numbers.
    """
    axes = [mesh_axis] if isinstance(mesh_axis, int) else mesh_axis
    return [m for m in axes if self._shape[m].size > 1]

  def group_size(self, mesh_axes: Sequence[int]) -> int:
    """Number of processors that differ only along the mesh axes.

    Args:
      mesh_axes: numbers of mesh axes.
    """
    return list_product(self._shape[m].size for m in mesh_axes)

  def _split_parts(
    self, what: str, slice_shape: list[int], split_axis: int, axes: list[int]
  ) -> int:
    """Number of parts that a collective along `axes` splits a slice into."""
    n = self.group_size(axes)
    if slice_shape[split_axis] % n:
      names = ",".join(f"{self._shape[m].name}:{self._shape[m].size}" for m in axes)
      raise ShapeError(
        f"{what}: axis {split_axis} of size {slice_shape[split_axis]} cannot be split over mesh "
        f"ax{'is' if len(axes) == 1 else 'es'} {names}"
      )
    return n

  def _check_sources(self, source: Sequence[int | None], axes: list[int]) -> None:
    n = self.group_size(axes)
    if len(source) != n or any(s is not None and not 0 <= s < n for s in source):
      names = ",".join(f"{self._shape[m].name}:{self._shape[m].size}" for m in axes)
      raise ShapeError(
        f"receive: source_pcoord {list(source)} must have {n} entries, None or 0 to {n - 1}, for "
        f"mesh ax{'is' if len(axes) == 1 else 'es'} {names}"
      )


def _sizes_of(shape: Shape) -> dict[str, int]:
  return {d.name: d.size for d in shape}


def names_of_dimensions(given: str | Sequence[str]) -> list[str]:
  """A list of names, which may be written as "data,model"."""
  return given.replace(",", " ").split() if isinstance(given, str) else list(given)


def shape_of(arg: Tensor | ShapeLike) -> Shape:
  """The `Shape` of a `Tensor`, or what a shape may be written as."""
  if isinstance(arg, Shape):
    return arg
  found = getattr(arg, "shape", None)  # Of a Tensor, or of a Variable.
  if isinstance(found, Shape):
    return found
  if arg is None:
    raise ShapeError("a layout needs a Tensor, a Shape or a list of dimensions, got None")
  return convert_to_shape(cast(ShapeLike, arg))
