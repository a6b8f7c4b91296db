"""Routing of ids to the processors that have their rows, and of vectors back.

The processors along the mesh axes that split both the ids and the rows ask each other. Each has
its distinct ids, at most n of them, and a box of `capacity` places for each member of its group;
one all-to-all takes the boxes to the owners, another one brings the vectors back in the same
places. n ids never need more places than n, but that would be n for each member. So a box has
about twice what an even distribution needs, and what does not find a place goes in another round:
as many rounds are run as the fullest box of the mesh needs, nearly always one. Nothing is dropped.

Along mesh axes that split the rows alone, all processors have the same ids: each answers for the
rows that it has, and the answers are added up. Along axes that split the ids alone the table is
replicated: gradients are gathered there, so that each replica makes the same update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.meshes.laid_out import LaidOut, LaidOutTensor
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.numerics import constants
from mesh_tensorflow.operations.reduction import mesh_axes_of
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.sparse.table import Table

# Capacity of a box: _SHARE times an even share, plus _MORE places, which small batches need.
_SHARE, _MORE = 2.0, 8

# Placeholder for no id.
NONE = -1


def distinct(ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """The distinct ids of a slice, as many places as it has elements; and the place of each element.

  Args:
    ids: integers; negative ones count as none.
  """
  flat = tf.reshape(ids, [-1])
  flat = tf.maximum(flat, tf.constant(NONE, flat.dtype))
  found, place = tf.unique(flat)
  n = flat.shape[0]
  padded = tf.pad(found, [[0, n - tf.size(found)]], constant_values=NONE)
  return tf.ensure_shape(padded, [n]), place


def row_places(
  table: Table, ids: tf.Tensor, begins: Sequence[int | tf.Tensor], sizes: Sequence[int]
) -> Any:
  """Indices of ids in a slice of a table, and the mask of those that lie in it.

  Args:
    table: the table.
    ids: integers [n]; negative ones lie in no slice.
    begins: offset of the slice along each row dimension.
    sizes: size of the slice along each row dimension.

  Returns:
    (indices [n, number of row dimensions], mask [n]).
  """
  at, inside = [], ids >= 0
  for i, d in enumerate(table.rows):
    x = ids if len(table.rows) == 1 else ids // table.rows[1].size if i == 0 else ids % d.size
    x = x - tf.cast(begins[i], ids.dtype)
    inside = inside & (x >= 0) & (x < sizes[i])
    at.append(x)
  return tf.stack(at, -1), inside


class Route:
  """Exchange of ids, rows and gradients between the slices of ids and those of a table.

  Args:
    impl: the mesh implementation.
    table: the table.
    variable: the `LaidOutVariable` of the table.
    ids: the shape of the ids.
  """

  def __init__(self, impl: MeshImpl, table: Table, variable: Any, ids: Shape):
    self.impl, self.table, self.variable = impl, table, variable
    # A plan's variables hold nothing, and it takes boxes to be full as they are on average.
    self.planned = not isinstance(variable.slices[0], tf.Variable)
    rows, asking = set(mesh_axes_of(impl, table.rows)), set(mesh_axes_of(impl, ids.dims))
    self.exchanged = sorted(impl.group_axes(sorted(rows & asking)))
    self.summed = sorted(impl.group_axes(sorted(rows - asking)))
    self.replicated = sorted(impl.group_axes(sorted(asking - rows)))
    self.members = impl.group_size(self.exchanged)
    self.sizes = impl.slice_shape(Shape(table.rows))
    self.begins = impl.laid_out_slice_begin(Shape(table.rows))
    self._boxes: _Boxes | None = None

  def fetch(self, ids: LaidOut) -> LaidOut:
    """The rows of ids: zeros for those that are none, or (along summed axes) are elsewhere.

    Args:
      ids: distinct ids of each processor, laid out.
    """
    stored = self.impl.LaidOutTensor(self.variable.slices)
    width = self.variable.stored.slice_shape[-1]

    def read(v: tf.Variable, wanted: tf.Tensor, *begins: Any) -> tf.Tensor:
      at, inside = row_places(self.table, wanted, begins, self.sizes)
      at = tf.where(inside[:, tf.newaxis], at, tf.zeros_like(at))
      if self.planned:
        return tf.zeros([at.shape[0], width], v.dtype)
      # From the variable, not from its value, which would be a copy of the slice.
      found = tf.raw_ops.ResourceGatherNd(resource=v.handle, indices=at, dtype=v.dtype)
      return tf.where(inside[:, tf.newaxis], found, tf.zeros([], v.dtype))

    if not self.exchanged:
      found: LaidOut = self.impl.slicewise(read, stored, ids, *self.begins)
      return found
    boxes = self._boxes = _Boxes(self, ids)

    def one_round(number: int | tf.Tensor, state: list[LaidOut]) -> list[LaidOut]:
      asked = self.impl.alltoall(boxes.fill(number, ids, NONE), self.exchanged, 0, 0)
      answers = self.impl.slicewise(read, stored, asked, *self.begins)
      answers = self.impl.alltoall(answers, self.exchanged, 0, 0)
      return [self.impl.slicewise(boxes.empty(number), boxes.owner, boxes.rank, answers, *state)]

    start = self.impl.slicewise(lambda i, v: tf.zeros([i.shape[0], width], v.dtype), ids, stored)
    return boxes.rounds(one_round, [start])[0]

  def bring(self, ids: LaidOut, gradients: LaidOut) -> tuple[LaidOut, LaidOut]:
    """Takes gradients of rows to the processors that have them.

    Args:
      ids: the distinct ids of each processor that were fetched, laid out.
      gradients: [n, width], laid out.

    Returns:
      Ids, some of them several times or `NONE`, and their gradients: of unknown number.
    """
    for axis in self.replicated:
      ids = self.impl.allconcat(ids, axis, 0)
      gradients = self.impl.allconcat(gradients, axis, 0)
    if not self.exchanged:
      return ids, gradients
    # As they were on the way of the vectors, unless gathered ids are others.
    boxes = _Boxes(self, ids) if self.replicated or self._boxes is None else self._boxes

    def one_round(number: int | tf.Tensor, state: list[LaidOut]) -> list[LaidOut]:
      got = [
        self.impl.alltoall(boxes.fill(number, x, none), self.exchanged, 0, 0)
        for x, none in ((ids, NONE), (gradients, 0))
      ]
      return [self.impl.slicewise(lambda a, b: tf.concat([a, b], 0), *p) for p in zip(state, got)]

    start = [self.impl.slicewise(lambda t: t[:0], x) for x in (ids, gradients)]
    got_ids, got_gradients = boxes.rounds(one_round, start, growing=True)
    return got_ids, got_gradients


class _Boxes:
  """Owner of each id, and its place in the box of ids for that owner.

  Args:
    route: the ways.
    ids: distinct ids, laid out.
  """

  def __init__(self, route: Route, ids: LaidOut):
    self.impl, self.members, self.planned = route.impl, route.members, route.planned
    n = ids.slice_shape[0]
    self.capacity = min(n, int(-(-_SHARE * n // self.members)) + _MORE)
    if self.members <= 2:
      self.capacity = n

    def owners(wanted: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
      owner = self._owner(route, wanted)
      mine = tf.one_hot(owner, self.members, dtype=tf.int32)
      rank = tf.reduce_sum(tf.cumsum(mine, 0, exclusive=True) * mine, -1)
      return owner, rank, tf.reduce_max(tf.reduce_sum(mine, 0))

    self.owner, self.rank, fullest = self.impl.slicewise(owners, ids)
    # How many rounds it takes, equal on all processors; None: one, for sure.
    self._number: Any = None
    if self.capacity < n and not self.planned:
      most = self.impl.allreduce(fullest, range(self.impl.ndims), "MAX").one_slice
      self._number = -(-most // self.capacity)

  def _owner(self, route: Route, ids: tf.Tensor) -> tf.Tensor:
    """Number of the owner in the group, row-major; of `NONE` one that is not there."""
    table, coordinates = route.table, {}
    for i, d in enumerate(table.rows):
      axis = self.impl.tensor_dimension_to_mesh_axis(d)
      x = ids if len(table.rows) == 1 else ids // table.rows[1].size if i == 0 else ids % d.size
      coordinates[axis] = x // route.sizes[i]
    owner = tf.zeros_like(ids)
    for axis in route.exchanged:
      owner = owner * self.impl.shape[axis].size + coordinates[axis]
    return tf.cast(tf.where(ids >= 0, owner, self.members), tf.int32)

  def _slots(self, number: int | tf.Tensor, owner: tf.Tensor, rank: tf.Tensor) -> tf.Tensor:
    """Index of each id in the concatenated boxes of a round; past the end if not in this round."""
    there = (owner < self.members) & (rank // self.capacity == number)
    end = self.members * self.capacity
    return tf.where(there, owner * self.capacity + rank % self.capacity, end)

  def fill(self, number: int | tf.Tensor, values: LaidOut, none: int) -> LaidOut:
    """Scatters a value of each id into the concatenated boxes of a round; `none` elsewhere."""

    def put(owner: tf.Tensor, rank: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
      end = self.members * self.capacity
      empty = tf.fill([end + 1, *x.shape[1:]], tf.constant(none, x.dtype))
      slots = self._slots(number, owner, rank)
      return tf.tensor_scatter_nd_update(empty, slots[:, tf.newaxis], x)[:end]

    filled: LaidOut = self.impl.slicewise(put, self.owner, self.rank, values)
    return filled

  def empty(self, number: int | tf.Tensor) -> Callable[..., tf.Tensor]:
    """A function that takes the answers of a round out of the boxes."""

    def take(owner: tf.Tensor, rank: tf.Tensor, boxes: tf.Tensor, so_far: tf.Tensor) -> tf.Tensor:
      slots = self._slots(number, owner, rank)
      end = self.members * self.capacity
      found = tf.gather(boxes, tf.minimum(slots, end - 1))
      return tf.where((slots < end)[:, tf.newaxis], found, so_far)

    return take

  def rounds(
    self,
    one_round: Callable[[Any, list[LaidOut]], list[LaidOut]],
    state: list[LaidOut],
    growing: bool = False,
  ) -> list[LaidOut]:
    """Runs the first round, and others as long as some box of the mesh is not empty."""
    state = one_round(0, state)
    if self._number is None:
      return state
    flat = [x.to_laid_out_tensor().tensor_list for x in state]

    @constants.of_one_graph()
    def body(number: int | tf.Tensor, lists: Any) -> Any:
      after = one_round(number, [LaidOutTensor(x) for x in lists])
      return number + 1, [x.to_laid_out_tensor().tensor_list for x in after]

    shapes: Any = None
    if growing:
      shapes = (
        tf.TensorShape([]),
        [[tf.TensorShape([None, *t.shape[1:]]) for t in x] for x in flat],
      )
    _, flat = tf.while_loop(
      lambda number, _: number < self._number,
      body,
      (tf.constant(1), flat),
      shape_invariants=shapes,
      parallel_iterations=1,
    )
    return [LaidOutTensor(x) for x in flat]
