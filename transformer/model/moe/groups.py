"""Division of tokens into groups, and the dimensions of groups that a mesh may split.

Experts have a number of slots for each group, so the grouping decides which tokens find a place:
it depends on the number of tokens alone, never on the layout. The layout only chooses the names of
the dimensions: where the groups can be split as the batch is, processors hold whole groups and
exchange slots by alltoall; where there are too few groups, processors hold parts of each group.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any

import mesh_tensorflow as mtf
from mesh_tensorflow import errors

_LOG = logging.getLogger("mesh_tensorflow")


def split_into_groups(n: int, max_group_size: int, mesh_dim_size: int) -> tuple[int, int]:
  """Divides n tokens into equal groups.

  Args:
    n: number of tokens.
    max_group_size: size to aim at; groups are larger if n has no fitting divisor.
    mesh_dim_size: divides the number of groups.

  Returns:
    (number of groups, size of a group).

  Raises:
    ShapeError: mesh_dim_size does not divide n.
  """
  if n % mesh_dim_size:
    raise errors.ShapeError(
      f"mixture of experts: {n} tokens cannot be divided into groups over a mesh axis of size "
      f"{mesh_dim_size}, which does not divide {n}"
    )
  # The fewest groups that are small enough: a larger group fills its experts' slots more evenly.
  num_groups = max(1, n // max_group_size)
  while num_groups % mesh_dim_size or n % num_groups:
    num_groups += 1
  return num_groups, n // num_groups


@dataclasses.dataclass(frozen=True)
class LayoutHints:
  """Layout that a layer will have; unknown if the rules or the mesh shape are None.

  Attributes:
    layout: layout rules.
    mesh_shape: shape of the mesh.
  """

  layout: Any = None
  mesh_shape: Any = None

  @property
  def known(self) -> bool:
    return self.layout is not None and self.mesh_shape is not None

  def axis(self, name: str) -> str | None:
    """The mesh axis over which dimensions of this name are split, if it is known to be."""
    if not self.known:
      return None
    mesh_shape = mtf.convert_to_shape(self.mesh_shape)
    layout = mtf.convert_to_layout_rules(self.layout)
    axis = layout.tensor_dimension_to_mesh_axis(mtf.Dimension(name, 1), mesh_shape)
    # An axis of one processor splits nothing.
    return None if axis is None or mesh_shape[axis].size == 1 else mesh_shape[axis].name

  def parts(self, name: str) -> int:
    """In how many parts dimensions of this name are split, as far as is known."""
    axis = self.axis(name)
    if axis is None:
      return 1
    size: int = mtf.convert_to_shape(self.mesh_shape).get_dim_by_name(axis).size
    return size


def token_dims(
  n_tokens: int,
  max_group_size: int,
  batch_dim: mtf.Dimension,
  group_name: str,
  hints: LayoutHints,
  divisor: int = 1,
) -> tuple[mtf.Dimension, mtf.Dimension]:
  """The dimensions of groups, and of the tokens of a group.

  One of them is called like the batch dimension, so that it is split as the batch is.

  Args:
    n_tokens: number of tokens in all.
    max_group_size: see `split_into_groups`.
    batch_dim: the batch dimension.
    group_name: name of the dimension of the tokens of a group.
    hints: if the layout is not known, any legal split of the batch is reckoned with.
    divisor: divides the number of groups.

  Returns:
    (groups, tokens of a group).
  """
  num_groups, size = split_into_groups(n_tokens, max_group_size, divisor)
  # Of an unknown layout the most parts there can be: any other number of parts divides that.
  parts = hints.parts(batch_dim.name) if hints.known else batch_dim.size
  groups, group = mtf.Dimension(batch_dim.name, num_groups), mtf.Dimension(group_name, size)
  if num_groups % parts == 0:
    return groups, group
  if hints.known:
    _warn_of_few_groups(num_groups, size, batch_dim.name, hints.axis(batch_dim.name), parts)
  groups = mtf.Dimension(unsplit_name(batch_dim), num_groups)
  # Then the parts of a group are what the batch's mesh axis divides.
  if size % parts == 0:
    group = mtf.Dimension(batch_dim.name, size)
  return groups, group


@functools.cache
def _warn_of_few_groups(num_groups: int, size: int, name: str, axis: str, parts: int) -> None:
  """Says once that groups are too few for an alltoall."""
  _LOG.warning(
    "mixture of experts: %d group(s) of %d tokens cannot be split over %s:%d as %s is; each "
    "processor holds parts of all groups and gets a copy of all slots. Groups of at most %d tokens "
    "(group_size) would be exchanged by alltoall.",
    *(num_groups, size, axis, parts, name, num_groups * size // parts),
  )


def unsplit_name(batch_dim: mtf.Dimension) -> str:
  """Name of a batch dimension where experts, not groups, are split over its mesh axis."""
  return f"{batch_dim.name}_unsplit"


def slot_dims(
  groups: mtf.Dimension,
  capacity: mtf.Dimension,
  batch_dim: mtf.Dimension,
  others: Sequence[mtf.Dimension],
  hints: LayoutHints,
) -> tuple[mtf.Dimension, mtf.Dimension]:
  """The dimensions of groups and of slots, as experts see them.

  If one of the other dimensions of the experts' work is split over the batch's mesh axis, or the
  layout is not known, then groups are not split: an expert gets the slots of all groups. Else the
  experts' work stays divided along the batch's mesh axis.

  Args:
    groups: from `token_dims`.
    capacity: the slots of a group.
    batch_dim: the batch dimension.
    others: dimensions of the experts, their inputs, hidden layers and outputs.
    hints: what is known about the layout.

  Returns:
    (groups, slots of a group), of the same sizes.
  """
  # A dimension of an operand split over the batch's axis would be asked to share it with the
  # groups: no tensor can have two dimensions over one axis.
  axis = hints.axis(batch_dim.name)
  parts = hints.parts(batch_dim.name)
  if axis is not None and all(hints.axis(d.name) != axis for d in others):
    if groups.name == batch_dim.name:
      return groups, capacity
    # Groups are too few to be split: the slots of each group are, in their place.
    if capacity.size % parts == 0:
      return groups, mtf.Dimension(batch_dim.name, capacity.size)
  return mtf.Dimension(unsplit_name(batch_dim), groups.size), capacity
