"""Looking up rows of a table."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.errors import ArgumentError, DTypeError, GraphError, ShapeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LaidOut, LazyAllreduceSum
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.tpu.mesh_impl import StrategyMeshImpl
from mesh_tensorflow.numerics import random_bits
from mesh_tensorflow.operations.comparison import equal, greater, greater_equal, less, logical_and
from mesh_tensorflow.operations.elementwise import cast, sqrt, square
from mesh_tensorflow.operations.reduction import reduce_sum
from mesh_tensorflow.operations.slicewise import cwise
from mesh_tensorflow.planning.mesh_impl import PlanMeshImpl
from mesh_tensorflow.program.dimensions import (
  DimensionLike,
  convert_to_dimension,
  no_such_dimension,
)
from mesh_tensorflow.program.graph import Operation, Tensor
from mesh_tensorflow.sparse.routing import NONE, Route, distinct
from mesh_tensorflow.sparse.table import Table

__all__ = ["hash_ids", "lookup"]


@dataclasses.dataclass(frozen=True)
class Asked:
  """Route and ids of a lookup, saved for the update of the rows.

  Attributes:
    route: the exchange of ids and rows between processors.
    ids: the distinct ids of each processor, laid out.
    place: the index of each id among the distinct ones, laid out.
  """

  route: Route
  ids: LaidOut
  place: LaidOut


class LookupOperation(Operation):
  """Rows of a table; see `lookup`.

  It has no gradient of the table as a whole: `minimize` takes the gradient of its output.

  Args:
    table: a `Table`.
    ids: an integer `Tensor`.
    name: name of the operation.
  """

  lowers_uneven_slices = True

  def __init__(self, table: Table, ids: Tensor, name: str = "lookup"):
    super().__init__([ids], name=name)
    if not ids.dtype.is_integer:
      raise DTypeError(f"{self.name}: ids must be integers, got {ids}; cast them (mtf.cast)")
    if table.graph is not ids.graph:
      raise GraphError(f"{self.name}: table {table.full_name} and {ids} are of different graphs")
    for d in (*table.rows, table.width):
      if d.name in ids.shape.dimension_names:
        raise ShapeError(
          f"{self.name}: {ids} has a dimension {d.name}, as table {table.full_name} {table.shape}; "
          "rename it (mtf.rename_dimension)"
        )
    if not ids.size:
      raise ShapeError(f"{self.name}: {ids} has no element")
    self.table = table
    self._outputs = [Tensor(self, ids.shape + [table.width], table.activation_dtype)]
    self._initialize_all_dimensions_as_splittable()

  @property
  def has_gradient(self) -> bool:
    return False

  def verify_layout(self, mesh_impl: MeshImpl) -> None:
    super().verify_layout(mesh_impl)
    mesh_impl.verify_layout(
      self.table.shape, f"{type(self).__name__} {self.name}: the table {self.table.full_name}"
    )
    # Optimizers of rows look at whole ones.
    mesh_impl.even_only.verify_layout(
      [self.table.width], f"{type(self).__name__} {self.name}: the table {self.table.full_name}"
    )

  def _distinct(self, lowering: LoweringInProgress) -> Any:
    """The distinct ids of each processor, and the place of each id among them."""
    rows = self.table.num_rows
    dtype = tf.int64 if rows >= 2**31 else tf.int32
    impl = lowering.mesh_impl(self)
    # A program of XLA prints nothing, and a plan has no ids.
    counts = not isinstance(impl, StrategyMeshImpl | PlanMeshImpl)

    def of_slice(ids: tf.Tensor) -> Any:
      wide = tf.cast(ids, tf.int64)
      if counts:
        _tell_of_wrong_ids(self.table, wide)
      valid = tf.where((wide >= 0) & (wide < rows), wide, tf.constant(NONE, tf.int64))
      return distinct(tf.cast(valid, dtype))

    ids = self._inputs[0]
    slices = impl.without_padding(
      lowering.tensors[ids], ids.shape, lambda dtype: tf.cast(NONE, dtype)
    )
    return impl.slicewise(of_slice, slices)

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    out = self._outputs[0]
    sizes = impl.slice_shape(out.shape)
    variable = lowering.variables[self.table]
    route = Route(impl, self.table, variable, self._inputs[0].shape)
    ids, place = self._distinct(lowering)
    rows = route.fetch(ids)
    lowering.operations[self] = Asked(route, ids, place)

    def spread(rows: tf.Tensor, place: tf.Tensor) -> tf.Tensor:
      return tf.cast(tf.reshape(tf.gather(rows, place), sizes), out.dtype)

    laid_out = impl.slicewise(spread, rows, place)
    if route.summed:
      key, size = f"allreduce/{route.summed}/lookup_op", lowering.laid_out_size(out)
      laid_out = LazyAllreduceSum(
        impl, laid_out, route.summed, lambda: lowering.add_counter(key, size)
      )
    lowering.set_tensor_lowering(out, laid_out)


def _tell_of_wrong_ids(table: Table, ids: tf.Tensor) -> None:
  """Prints a warning, once in a process, if some ids are not below the number of rows.

  Args:
    table: the table.
    ids: int64, those of a device.
  """
  wrong = tf.math.count_nonzero(ids >= table.num_rows)

  def tell() -> tf.Tensor:
    # No variable of the program: it would be one more in each checkpoint.
    name = f"ids_out_of_range/{table.full_name}/{table.num_rows}"
    told = tf.raw_ops.VarHandleOp(dtype=tf.bool, shape=[], shared_name=name)

    def first() -> tf.Tensor:
      tf.print(
        f"WARNING: table {table.full_name}: {table.num_rows} or more, its number of rows, are",
        wrong,
        "of",
        tf.size(ids),
        "ids of a device, as is",
        tf.reduce_max(ids),
        "- their vectors are zeros, and they train nothing. More rows, or hashed=True, take them; "
        "ids that shall be none are negative. This is said once.",
        output_stream=sys.stderr,
      )
      tf.raw_ops.AssignVariableOp(resource=told, value=True)
      return tf.constant(True)

    return tf.cond(tf.raw_ops.VarIsInitializedOp(resource=told), lambda: tf.constant(True), first)

  with tf.device("CPU:0"):
    tf.cond(wrong > 0, tell, lambda: tf.constant(True))


@checked
def lookup(
  table: Table,
  ids: Tensor,
  *,
  combine: str | None = None,
  over: DimensionLike | None = None,
  weights: Tensor | None = None,
  hashed: bool = False,
  drop_weights: bool = False,
  name: str = "lookup",
) -> Tensor:
  """Vectors of ids.

  Duplicates of a device's ids are removed; ids go to the devices that have their rows, and vectors
  come back. The table is not moved, and there is no one-hot matrix. An id that is negative, or not
  below the number of rows, is none: its vector is zeros. Of those that are too large a warning says
  how many there are, once for each table (not on TPUs).

  Args:
    table: a `Table`.
    ids: an integer `Tensor`, split in any way.
    combine: "sum", "mean" or "sqrtn" of a multi-valued feature, over the dimension `over`: of the
      ids that are one. A mean is the sum divided by that of the weights, "sqrtn" the sum divided by
      the root of that of their squares, and zeros where that is 0, as of no ids.
    over: a dimension of the ids, which the result then does not have.
    weights: a floating `Tensor` of some dimensions of the ids, by which vectors are multiplied; 1
      by default. They are taken as they are, as `tf.nn.embedding_lookup_sparse` does.
    hashed: ids are any integers but negative ones: `hash_ids` makes rows of them.
    drop_weights: whether, of "mean" and "sqrtn", ids whose weight is not positive are left out, as
      `tf.nn.safe_embedding_lookup_sparse` does.
    name: name of the operation.

  Returns:
    A `Tensor` of the dimensions of the ids (without `over`) and the width of the table.

  Raises:
    ArgumentError: only one of `combine` and `over` is given; or another word.
    DTypeError: the ids are not integers.
    DimensionError: the ids have no dimension `over`.
    ShapeError: the ids have a dimension of a name that the table has.
  """
  if combine not in (None, "sum", "mean", "sqrtn") or (combine is None) != (over is None):
    raise ArgumentError(
      f"lookup in table {table.full_name}: combine is 'sum', 'mean' or 'sqrtn' with a dimension "
      f"over=..., or both are None, got combine={combine!r}, over={over!r}"
    )
  if hashed:
    ids = hash_ids(ids, table)
  y = LookupOperation(table, ids, name).outputs[0]
  if weights is not None:
    for d in weights.shape:
      if d not in ids.shape:
        raise ShapeError(f"lookup: weights {weights} have {d.name}={d.size}, which {ids} has not")
    weights = cast(weights, y.dtype)
    if drop_weights and combine in ("mean", "sqrtn"):
      weights = weights * cast(greater(weights, 0), y.dtype)
    y = y * weights
  if over is None:
    return y
  dim = convert_to_dimension(over)
  if dim not in ids.shape:
    raise no_such_dimension("lookup: over", dim, ids)
  total = reduce_sum(y, reduced_dim=dim)
  if combine == "sum":
    return total
  # Compared as 64 bits: a table may have more rows than small ids have numbers.
  wide = cast(ids, tf.int64)
  there = cast(logical_and(greater_equal(wide, 0), less(wide, table.num_rows)), y.dtype)
  if weights is not None:
    there = there * weights
  if combine == "sqrtn":
    there = square(there)
  divisor = reduce_sum(there, reduced_dim=dim)
  # Nowhere a division by 0, of which a gradient would be no number either.
  none = cast(equal(divisor, 0), y.dtype)
  divisor = divisor + none
  if combine == "sqrtn":
    divisor = sqrt(divisor)
  return total * (1 - none) / divisor


@checked
def hash_ids(ids: Tensor, table: Table) -> Tensor:
  """Rows for any ids, by a hash of the id and of the table's name; negative ids stay none.

  Two ids may get one row ("the hashing trick", Weinberger et al., 2009).

  Args:
    ids: an integer `Tensor`.
    table: the `Table`.
  """
  if not ids.dtype.is_integer:
    raise DTypeError(f"hash_ids: ids must be integers, got {ids}; cast them (mtf.cast)")
  key, rows = random_bits.name_key(table.full_name), table.num_rows

  def mixed(x: tf.Tensor) -> tf.Tensor:
    wide = tf.cast(x, tf.int64)
    low = random_bits.fold(key, tf.cast(tf.bitwise.bitwise_and(wide, 0xFFFFFFFF), tf.uint32))
    high = tf.cast(tf.bitwise.right_shift(wide, tf.constant(32, tf.int64)), tf.uint32)
    both = random_bits.mix(tf.bitwise.bitwise_xor(low, random_bits.mix(high)))
    row = tf.cast(both, tf.int64) % rows
    return tf.where(wide >= 0, row, tf.constant(-1, tf.int64))

  return cwise(mixed, [ids], output_dtype=tf.int64, grad_function=0, name="hash_ids")


def lookups_of(operations: Iterable[Operation]) -> list[LookupOperation]:
  """The lookups among operations, those in loops too."""
  found = []
  for op in operations:
    found += [op] if isinstance(op, LookupOperation) else []
    found += lookups_of(getattr(op, "inner_operations", ()))
  return found
