"""Collectives of TPU cores, made of the three exchanges that a TPU program has.

CrossReplicaSum adds over groups of replicas, AllToAll passes equal blocks around in a
group, CollectivePermute sends whole tensors along given pairs. All else is made of
these, exactly: what an operation does not take travels in a dtype that holds it.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.errors import DTypeError
from mesh_tensorflow.meshes.collectives.base import Collectives, Groups, check_static, fold
from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.program.dimensions import list_product

# Dtypes that CrossReplicaSum supports.
_SUMMED = (tf.float32, tf.bfloat16, tf.float64, tf.int32)
# Integers of up to 32 bits. Casts to int32 and back keep their bits, also those of sums that
# overflow.
_INT32 = (tf.int8, tf.uint8, tf.int16, tf.uint16, tf.uint32)
# Dtypes that others are cast to for XLA's CollectivePermute. (AllToAll supports all.)
_PERMUTED_AS = {
  **{t: t for t in (tf.float32, tf.bfloat16, tf.int32, tf.complex64)},
  **{t: tf.int32 for t in (*_INT32, tf.bool)},
  tf.float16: tf.float32,
}
# Sums of 16-bit pieces fit into int32 for groups of up to 2 ** 15 replicas.
_PIECE_BITS = 16
_PIECES = 64 // _PIECE_BITS


class TpuCollectives(Collectives):
  """The collectives of a program that `tf.distribute.TPUStrategy` replicates.

  Args:
    pnum: the processor number, an int32 scalar.
    logical_to_physical: for each processor, by its number in the mesh, the id of its replica.
  """

  def __init__(self, pnum: int | tf.Tensor, logical_to_physical: Sequence[int]):
    super().__init__(pnum)
    self._replica = [int(r) for r in logical_to_physical]

  def _assignment(self, groups: Groups) -> tf.Tensor:
    """The replica ids of each group in order of rank, as an int32 constant [groups, members]."""
    return tf.constant([[self._replica[p] for p in group] for group in groups.members], tf.int32)

  # -------------------------------------------------------------------- sums

  def all_reduce(self, x: tf.Tensor, groups: Groups, reduction: str) -> tf.Tensor:
    check_static(x, f"allreduce over {groups.name}")
    if reduction == "SUM" and x.dtype != tf.bool:
      return self._sum(x, groups)
    if x.dtype == tf.bool:
      votes = self._cross_replica_sum(tf.cast(x, tf.int32), groups)
      # "Any" is one vote at least, "all" as many as there are members.
      return votes > 0 if reduction != "MIN" else tf.equal(votes, groups.size)
    return self._extremum(x, groups, reduction)

  def _cross_replica_sum(self, x: tf.Tensor, groups: Groups) -> tf.Tensor:
    return tf.raw_ops.CrossReplicaSum(input=x, group_assignment=self._assignment(groups))

  def _sum(self, x: tf.Tensor, groups: Groups) -> tf.Tensor:
    dtype = x.dtype
    if dtype in _SUMMED:
      return self._cross_replica_sum(x, groups)
    if dtype == tf.float16:
      return tf.cast(self._cross_replica_sum(tf.cast(x, tf.float32), groups), dtype)
    if dtype in _INT32:
      return tf.cast(self._cross_replica_sum(tf.cast(x, tf.int32), groups), dtype)
    if dtype in (tf.int64, tf.uint64):
      return self._sum_of_int64(x, groups)
    if dtype.is_complex:
      # One exchange for both parts.
      parts = self._cross_replica_sum(kernels.stack([tf.math.real(x), tf.math.imag(x)]), groups)
      return tf.complex(parts[0], parts[1])
    raise DTypeError(f"allreduce over {groups.name}: a TPU cannot add tensors of {dtype.name}")

  def _sum_of_int64(self, x: tf.Tensor, groups: Groups) -> tf.Tensor:
    """Sums int64 with wrap-around, by sums of 16-bit pieces: TPUs have no such all-reduce."""
    words = tf.cast(x, tf.int64)
    mask = tf.constant((1 << _PIECE_BITS) - 1, tf.int64)
    pieces = [
      tf.cast(
        tf.bitwise.bitwise_and(tf.bitwise.right_shift(words, _shift(k * _PIECE_BITS)), mask),
        tf.int32,
      )
      for k in range(_PIECES)
    ]
    sums = tf.unstack(self._cross_replica_sum(kernels.stack(pieces), groups))
    total = tf.cast(sums[0], tf.int64)
    for k, s in enumerate(sums[1:], 1):
      total += tf.bitwise.left_shift(tf.cast(s, tf.int64), _shift(k * _PIECE_BITS))
    return tf.cast(total, x.dtype)

  def _extremum(self, x: tf.Tensor, groups: Groups, reduction: str) -> tf.Tensor:
    n = groups.size
    if n == 2 or list_product(x.shape.as_list()) < n:
      return fold(self.all_gather(x, groups), reduction)
    # Each member reduces one part for all: two exchanges of the size of x, whatever n. By
    # gathering, each would receive n - 1 tensors.
    parts = self._all_to_all(_in_parts(x, n), groups)
    part = fold(tf.unstack(parts, n), reduction)
    return _from_parts(self._gather(part, groups), x)

  # --------------------------------------------------------------- exchanges

  def _all_to_all(self, rows: tf.Tensor, groups: Groups) -> tf.Tensor:
    """Rows for each rank become rows of each rank."""
    return tf.raw_ops.AllToAll(
      input=rows,
      group_assignment=self._assignment(groups),
      concat_dimension=0,
      split_dimension=0,
      split_count=groups.size,
    )

  def _gather(self, x: tf.Tensor, groups: Groups) -> tf.Tensor:
    """The tensors of all members, stacked."""
    rows = tf.broadcast_to(x[tf.newaxis], [groups.size, *x.shape.as_list()])
    return self._all_to_all(rows, groups)

  def all_gather(self, x: tf.Tensor, groups: Groups) -> list[tf.Tensor]:
    check_static(x, f"allconcat over {groups.name}")
    parts: list[tf.Tensor] = tf.unstack(self._gather(x, groups), groups.size)
    return parts

  def all_to_all(self, parts: Sequence[tf.Tensor], groups: Groups) -> list[tf.Tensor]:
    check_static(parts[0], f"alltoall over {groups.name}")
    rows = self._all_to_all(kernels.stack(list(parts)), groups)
    received: list[tf.Tensor] = tf.unstack(rows, groups.size)
    return received

  def permute(self, x: tf.Tensor, groups: Groups, source: Sequence[int | None]) -> tf.Tensor:
    check_static(x, f"receive along {groups.name}")
    named = [s for s in source if s is not None]
    if x.dtype in _PERMUTED_AS and len(set(named)) == len(named):
      pairs = [
        [self._replica[group[s]], self._replica[group[k]]]
        for group in groups.members
        for k, s in enumerate(source)
        if s is not None
      ]
      # Members that are no target get zeros.
      y = tf.raw_ops.CollectivePermute(
        input=tf.cast(x, _PERMUTED_AS[x.dtype]), source_target_pairs=tf.constant(pairs, tf.int32)
      )
      return tf.cast(y, x.dtype)
    # A member that sends to several: with everyone as a relay for a part, each member receives
    # twice its tensor; by gathering, n - 1 times.
    rows = self._all_to_all(_in_parts(x, groups.size), groups)
    # Members without a source get the first one's rows, which are replaced by zeros.
    rows = self._all_to_all(tf.gather(rows, [s or 0 for s in source]), groups)
    return self.zeros_where_none(_from_parts(rows, x), groups, source)


def _shift(bits: int) -> tf.Tensor:
  return tf.constant(bits, tf.int64)


def _in_parts(x: tf.Tensor, n: int) -> tf.Tensor:
  """Reshapes x to n rows, padded with zeros at the end."""
  flat = tf.reshape(x, [-1])
  missing = -flat.shape[0] % n
  if missing:
    flat = tf.concat([flat, tf.zeros([missing], x.dtype)], 0)
  return tf.reshape(flat, [n, -1])


def _from_parts(rows: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
  """Inverse of `_in_parts`."""
  flat = tf.reshape(rows, [-1])
  elements = list_product(like.shape.as_list())
  return tf.reshape(flat if flat.shape[0] == elements else flat[:elements], like.shape)
