"""Slices and their offsets, computed from the mesh shape and the layout rules alone."""

from __future__ import annotations

import copy
import difflib
import logging
from collections.abc import Sequence
from typing import TypeVar, cast

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.errors import LayoutError, ShapeError
from mesh_tensorflow.meshes.layout import (
  LayoutLike,
  LayoutRules,
  TensorLayout,
  convert_to_layout_rules,
  indivisible_message,
)
from mesh_tensorflow.meshes.processors import pnum_to_processor_coordinates
from mesh_tensorflow.program.dimensions import (
  Dimension,
  Shape,
  ShapeLike,
  convert_to_shape,
  list_product,
)
from mesh_tensorflow.program.graph import Tensor

_LOG = logging.getLogger("mesh_tensorflow")
_Self = TypeVar("_Self", bound="MeshLayout")


class MeshLayout:
  """Base class of `MeshImpl`: which processor has which part of a tensor.

  Args:
    shape: mesh shape; a `Shape`, a list of dimensions, or "rows:2,cols:4".
    layout_rules: `LayoutRules`, or what `convert_to_layout_rules` takes.
  """

  @checked
  def __init__(self, shape: ShapeLike, layout_rules: LayoutLike):
    self._shape = convert_to_shape(shape)
    self._layout_rules = convert_to_layout_rules(layout_rules)
    # Each operation asks for the layouts of its tensors, several times, in every lowering.
    self._layout_cache: dict[Shape, TensorLayout] = {}
    self._verified: set[Shape] = set()
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

  def with_layout(self: _Self, layout_rules: LayoutLike) -> _Self:
    """The same mesh with other layout rules: of the same devices, and with the same variables.

    A variable that exists keeps its slices; a program that would split it otherwise is refused.

    Args:
      layout_rules: `LayoutRules`, or what `convert_to_layout_rules` takes.
    """
    other = copy.copy(self)
    MeshLayout.__init__(other, self._shape, layout_rules)
    return other

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
      LayoutError: two dimensions on one mesh axis, or an indivisible dimension.
    """
    shape = shape_of(shape)
    if shape in self._verified:
      return
    layout = self._layout_rules.tensor_layout(shape, self._shape, what=what)
    for d, axis in zip(shape, layout):
      if axis is not None and d.size % self._shape[axis].size:
        raise LayoutError(indivisible_message(f" of {what}", d, self._shape[axis]))
    self._layout_cache[shape] = layout
    self._verified.add(shape)

  def mesh_axis_to_cumprod(self, tensor_shape: ShapeLike) -> list[int | None]:
    """For each mesh axis the product of the sizes before the axis split over it, or None."""
    tensor_shape = shape_of(tensor_shape)
    axes = self.tensor_layout(tensor_shape).mesh_axis_to_tensor_axis(self.ndims)
    cumprod = tensor_shape.cumprod
    return [None if a is None else cumprod[a] for a in axes]

  def slice_shape(self, tensor_shape: ShapeLike) -> list[int]:
    """Sizes of the slice of one processor.

    Args:
      tensor_shape: a `Shape`, or a list of dimensions such as `x.shape[:-1]`.

    Raises:
      LayoutError: a mesh dimension does not divide the tensor dimension split over it.
    """
    tensor_shape = shape_of(tensor_shape)
    result = []
    for d, axis in zip(tensor_shape, self.tensor_layout(tensor_shape)):
      if axis is None:
        result.append(d.size)
        continue
      n = self._shape[axis].size
      if d.size % n:
        raise LayoutError(indivisible_message(f" of {tensor_shape}", d, self._shape[axis]))
      result.append(d.size // n)
    return result

  def slice_begin(self, tensor_shape: ShapeLike, pnum: int) -> list[int]:
    """Offsets of the slice of processor `pnum` in the whole tensor."""
    tensor_shape = shape_of(tensor_shape)
    coord = pnum_to_processor_coordinates(self._shape, pnum)
    return [
      0 if axis is None else d.size // self._shape[axis].size * coord[axis]
      for d, axis in zip(tensor_shape, self.tensor_layout(tensor_shape))
    ]

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
