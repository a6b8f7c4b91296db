"""Interface of the collectives of a per-device program, and the groups that they run in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from mesh_tensorflow.errors import ShapeError
from mesh_tensorflow.meshes.layout import processor_groups
from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.program.dimensions import Shape

# Reductions by the name the mesh contract gives them.
REDUCTIONS = ("SUM", "MAX", "MIN")

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Groups:
  """The groups of processors that differ only along some mesh axes.

  Attributes:
    name: the axes, for messages: "rows" or "rows*cols".
    axes: mesh axes, increasing.
    members: the processor numbers of each group, in order of their coordinates.
  """

  name: str
  axes: tuple[int, ...]
  members: tuple[tuple[int, ...], ...]

  @classmethod
  def of(cls, mesh_shape: Shape, axes: Sequence[int]) -> Groups:
    """The groups of `mesh_shape` along `axes`."""
    axes = tuple(sorted(set(axes)))
    return cls(
      name="*".join(mesh_shape[a].name for a in axes),
      axes=axes,
      members=tuple(tuple(g) for g in processor_groups(mesh_shape, axes)),
    )

  @property
  def size(self) -> int:
    """Members of a group."""
    return len(self.members[0])

  def number(self, pnum: int) -> int:
    """The number of the group of a processor."""
    return next(i for i, g in enumerate(self.members) if pnum in g)

  def group(self, pnum: int) -> tuple[int, ...]:
    """The members of the group of a processor."""
    return self.members[self.number(pnum)]

  def rank(self, pnum: int) -> int:
    """The place of a processor in its group."""
    return self.group(pnum).index(pnum)

  def member(self, rank: int) -> Callable[[int], int]:
    """A function from a processor to the member of its group that has this rank."""
    return lambda pnum: self.group(pnum)[rank]

  def table(self, fn: Callable[[int], _T]) -> list[_T]:
    """`fn(pnum)` of every processor."""
    return [fn(p) for p in range(len(self.members) * self.size)]


class Collectives:
  """Collectives of a per-device program; a group's members must call the same in the same order.

  Args:
    pnum: the number of the processor that runs the program: an int32 scalar, or an int.
  """

  def __init__(self, pnum: int | tf.Tensor):
    self.pnum = pnum

  def joined_bytes(self, groups: Groups) -> int:
    """Size of a message, in bytes, up to which sums are better exchanged as one vector; or 0."""
    del groups
    return 0

  def all_reduce(self, x: tf.Tensor, groups: Groups, reduction: str) -> tf.Tensor:
    """Elementwise sum, maximum or minimum; the same bits on every member."""
    raise NotImplementedError

  def all_gather(self, x: tf.Tensor, groups: Groups) -> list[tf.Tensor]:
    """The tensors of all members, in order of rank."""
    raise NotImplementedError

  def all_to_all(self, parts: Sequence[tf.Tensor], groups: Groups) -> list[tf.Tensor]:
    """Member k gets part k of every member, in order of rank; parts are of one shape."""
    raise NotImplementedError

  def reduce_scatter(self, x: tf.Tensor, groups: Groups, axis: int) -> tf.Tensor:
    """Member k gets part k, along a tensor axis, of the elementwise sum."""
    return fold(self.all_to_all(tf.split(x, groups.size, axis), groups), "SUM")

  def permute(self, x: tf.Tensor, groups: Groups, source: Sequence[int | None]) -> tf.Tensor:
    """Member k gets the tensor of member `source[k]`, or zeros for None."""
    raise NotImplementedError

  def choose(self, table: Sequence[int | Sequence[int]]) -> Any:
    """The entry of this processor in a table of numbers or lists of numbers."""
    if all(t == table[0] for t in table):
      return tf.constant(table[0])
    return tf.gather(tf.constant(table), self.pnum)

  def zeros_where_none(
    self, x: tf.Tensor, groups: Groups, source: Sequence[int | None]
  ) -> tf.Tensor:
    """x, or zeros on members whose source is None."""
    if None not in source:
      return x
    present = self.choose(groups.table(lambda p: source[groups.rank(p)] is not None))
    return kernels.where(present, x, tf.zeros_like(x))


def check_static(x: tf.Tensor, what: str) -> None:
  """Raises `ShapeError` for a tensor whose shape is not known before it runs."""
  if not x.shape.is_fully_defined():
    raise ShapeError(f"{what}: the slice has shape {x.shape}; a collective needs a static shape")


def fold(parts: Sequence[tf.Tensor], reduction: str) -> tf.Tensor:
  """Sum, maximum or minimum of tensors, in their order."""
  parts = list(parts)
  if reduction == "SUM":
    if parts[0].dtype == tf.bool:
      return fold(parts, "MAX")
    return kernels.sum_of(parts)
  if parts[0].dtype == tf.bool:
    combine = tf.logical_or if reduction == "MAX" else tf.logical_and
  else:
    combine = tf.maximum if reduction == "MAX" else tf.minimum
  result = parts[0]
  for p in parts[1:]:
    result = combine(result, p)
  return result
