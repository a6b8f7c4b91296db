"""Layout rules: which tensor dimension is split over which mesh dimension. No TensorFlow here."""

from __future__ import annotations

import collections.abc
from collections.abc import Iterable, Iterator
from typing import Any, SupportsIndex, TypeAlias, overload

from mesh_tensorflow.arguments import kinds
from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.kinds import Kind
from mesh_tensorflow.errors import LayoutError, LayoutTypeError
from mesh_tensorflow.program.dimensions import (
  Dimension,
  DimensionLike,
  Shape,
  ShapeLike,
  convert_to_dimension,
  convert_to_shape,
  parse_pairs,
)

__all__ = [
  "LayoutRules",
  "TensorLayout",
  "convert_to_layout_rules",
  "tensor_dim_to_mesh_dim_size",
  "tensor_dim_to_size_per_split",
]


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

  def __eq__(self, other: Any) -> bool:
    return isinstance(other, TensorLayout) and self._axes == other._axes

  def __ne__(self, other: Any) -> bool:
    return not self == other

  def __hash__(self) -> int:
    return hash(self._axes)

  def __repr__(self) -> str:
    return f"TensorLayout{self._axes}"


class LayoutRules:
  """A set of rules (tensor dimension name, mesh dimension name).

  A rule splits every tensor dimension of that name over the mesh dimension of
  that name. Rules for mesh dimensions that a mesh does not have are ignored.

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
    self._pairs = set(pairs)

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
    """The rules, sorted."""
    return sorted(self._pairs)

  @checked
  def check_mesh(self, mesh_shape: Shape) -> list[tuple[str, str]]:
    """Rules whose mesh dimension this mesh does not have (they have no effect)."""
    names = mesh_shape.dimension_names
    return [p for p in self.pairs if p[1] not in names]

  def __eq__(self, other: Any) -> bool:
    return isinstance(other, LayoutRules) and self._pairs == other._pairs

  def __hash__(self) -> int:
    return hash(frozenset(self._pairs))

  def __repr__(self) -> str:
    return f"LayoutRules{self._pairs}"


LayoutLike: TypeAlias = LayoutRules | str | Iterable[tuple[str, str]] | dict[str, str]


class _LayoutLike(Kind):
  words = "a layout"
  error = LayoutTypeError
  types = frozenset([LayoutRules, str, dict])

  def accepts(self, value: Any) -> bool:
    return isinstance(value, collections.abc.Iterable) and not hasattr(value, "dtype")

  def advice(self, name: str, value: Any) -> str:
    del name, value
    return "write it as 'batch:rows,d_ff:cols', or {} to split nothing"


kinds.register(LayoutLike, _LayoutLike)
kinds.register(LayoutLike | None, _LayoutLike)
kinds.register_class(LayoutRules, LayoutTypeError)


def convert_to_layout_rules(x: LayoutLike) -> LayoutRules:
  """Turns `LayoutRules`, "batch:rows,d_ff:cols", pairs, or a dict into `LayoutRules`.

  Args:
    x: any of these; "" and {} split nothing.
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
    tensor_dim: a tensor dimension.

  Raises:
    LayoutError: the mesh dimension does not divide the tensor dimension.
  """
  mesh_shape = convert_to_shape(mesh_shape)
  tensor_dim = convert_to_dimension(tensor_dim)
  axis = convert_to_layout_rules(layout).tensor_dimension_to_mesh_axis(tensor_dim, mesh_shape)
  if axis is None:
    return tensor_dim.size
  parts = mesh_shape[axis].size
  if tensor_dim.size % parts:
    raise LayoutError(indivisible_message("", tensor_dim, mesh_shape[axis]))
  return tensor_dim.size // parts


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
    f"{shown}, a dimension of size {up}, or no rule {tensor_dim.name}:{mesh_dim.name}"
  )
