"""Training tables by the rows that were looked up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.errors import GraphError, UnsupportedError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.numerics import initializers
from mesh_tensorflow.operations.constants import ones_like
from mesh_tensorflow.operations.einsum import transpose
from mesh_tensorflow.operations.global_step import count_global_step_if_there
from mesh_tensorflow.operations.gradients import gradients
from mesh_tensorflow.operations.variables import assign_add, get_variable, grouped
from mesh_tensorflow.optimize.base import Optimizer
from mesh_tensorflow.optimize.scalars import ScalarLike, evaluate_scalar
from mesh_tensorflow.optimize.update import laid_out_scalar, slices_of
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.program.graph import Operation, Tensor
from mesh_tensorflow.sparse.lookup import LookupOperation, lookups_of
from mesh_tensorflow.sparse.routing import row_places
from mesh_tensorflow.sparse.table import Table

__all__ = ["Adagrad", "LazyAdam", "RowOptimizer", "Sgd", "minimize"]

_raw = tf.raw_ops

# Adds, subtracts or sets rows: (variable, places [k, dims], values [k, width]) -> operation.
_Rows = Callable[[tf.Variable, tf.Tensor, tf.Tensor], Any]


def _scatter(op: Callable[..., object]) -> _Rows:
  def run(v: tf.Variable, at: tf.Tensor, x: tf.Tensor) -> Any:
    return op(ref=v.handle, indices=at, updates=tf.cast(x, v.dtype))

  return run


_add, _subtract, _set = (
  _scatter(_raw.ResourceScatterNdAdd),
  _scatter(_raw.ResourceScatterNdSub),
  _scatter(_raw.ResourceScatterNdUpdate),
)


def _rows(v: tf.Variable, at: tf.Tensor) -> tf.Tensor:
  found = _raw.ResourceGatherNd(resource=v.handle, indices=at, dtype=v.dtype)
  return tf.cast(found, tf.float32)


class RowOptimizer:
  """Base class: how a row changes by its gradient.

  Args:
    learning_rate: a `ScalarLike` of `mtf.optimize`: a number, a `Tensor`, or a schedule.
  """

  # Slots: the ends of their names, and their first values.
  slots: Sequence[tuple[str, float]] = ()
  # Whether `update` is given the number of the step, from 1.
  counts = False

  @checked
  def __init__(self, learning_rate: ScalarLike):
    self.learning_rate = learning_rate

  def update(self, w: tf.Variable, *slots_at_g_lr_step: Any) -> None:
    """Changes rows of one slice.

    Args:
      w: the slice of the table.
      *slots_at_g_lr_step: its slots; the places of the rows [k, dims], each once; their gradients
        [k, width] in float32; the learning rate; and the step, if it `counts`.
    """
    raise UnsupportedError(f"{type(self).__name__} defines no method update")

  def slots_of(self, table: Table) -> list[Table]:
    """The slots of a table: tables of its shape."""
    return [_table_like(table, f"{table.full_name}_{end}", value) for end, value in self.slots]


class Sgd(RowOptimizer):
  """w <- w - lr * g, for the rows that were looked up."""

  def update(self, w: tf.Variable, at: tf.Tensor, g: tf.Tensor, lr: tf.Tensor) -> None:
    _subtract(w, at, lr * g)


class Adagrad(RowOptimizer):
  """a <- a + g^2; w <- w - lr * g / sqrt(a + epsilon), for the rows that were looked up.

  Duchi et al., 2011, as Keras computes it; a row without a gradient would not change anyway. Slot:
  `{table}_adagrad_a`, of the table's shape.

  Args:
    learning_rate: lr, a `ScalarLike`.
    initial_accumulator: the first value of a.
    epsilon: a small number.
  """

  @checked
  def __init__(
    self, learning_rate: ScalarLike, initial_accumulator: float = 0.1, epsilon: float = 1e-7
  ):
    super().__init__(learning_rate)
    self.slots = [("adagrad_a", initial_accumulator)]
    self.epsilon = epsilon

  def update(
    self, w: tf.Variable, a: tf.Variable, at: tf.Tensor, g: tf.Tensor, lr: tf.Tensor
  ) -> None:
    total = _rows(a, at) + tf.square(g)
    _set(a, at, total)
    _subtract(w, at, lr * g * tf.math.rsqrt(total + self.epsilon))


class LazyAdam(RowOptimizer):
  """Adam (Kingma and Ba, 2015) of the rows that were looked up; all others stay as they are.

  m <- b1 m + (1 - b1) g; v <- b2 v + (1 - b2) g^2;
  w <- w - lr sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + epsilon), with t the number of steps.
  Adam itself would also move rows by their old averages, of all the table in each step. Slots:
  `{table}_adam_m`, `{table}_adam_v`, and the scalar `{table}_adam_t`.

  Args:
    learning_rate: lr, a `ScalarLike`.
    beta1: b1.
    beta2: b2.
    epsilon: a small number.
  """

  slots = (("adam_m", 0.0), ("adam_v", 0.0))
  counts = True

  @checked
  def __init__(
    self,
    learning_rate: ScalarLike,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-7,
  ):
    super().__init__(learning_rate)
    self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon

  def update(
    self, w: tf.Variable, m: tf.Variable, v: tf.Variable, at: tf.Tensor, g: tf.Tensor,
    lr: tf.Tensor, step: tf.Tensor,
  ) -> None:  # fmt: skip
    new_m = self.beta1 * _rows(m, at) + (1 - self.beta1) * g
    new_v = self.beta2 * _rows(v, at) + (1 - self.beta2) * tf.square(g)
    _set(m, at, new_m)
    _set(v, at, new_v)
    lr = lr * tf.sqrt(1 - tf.pow(self.beta2, step)) / (1 - tf.pow(self.beta1, step))
    _subtract(w, at, lr * new_m / (tf.sqrt(new_v) + self.epsilon))


class RowUpdateOperation(Operation):
  """Changes the rows of a table that lookups read, where it stands in the graph.

  Gradients of one row, of all lookups and all processors, are added up before the update.

  Args:
    optimizer: the `RowOptimizer`.
    table: the `Table`.
    slots: its slots.
    lookups: the `LookupOperation`s.
    grads: the gradient of the output of each.
    scalars: learning rate, and step: `Tensor`s or numbers.
  """

  # The ids of padding are `NONE`.
  lowers_uneven_slices = True
  is_cloneable = False

  def __init__(
    self,
    optimizer: RowOptimizer,
    table: Table,
    slots: Sequence[Table],
    lookups: Sequence[LookupOperation],
    grads: Sequence[Tensor],
    scalars: Sequence[float | Tensor],
  ):
    ids = [op.inputs[0] for op in lookups]
    super().__init__(
      [*ids, *grads, *[s for s in scalars if isinstance(s, Tensor)]],
      table.mesh,
      name=f"{table.full_name}/update_rows",
    )
    self._optimizer, self._table, self._slots = optimizer, table, list(slots)
    self._lookups, self._grads, self._scalars = list(lookups), list(grads), list(scalars)

  @property
  def variables(self) -> list[Table]:
    """The variables that it changes."""
    return [self._table, *self._slots]

  def _brought(self, lowering: LoweringInProgress) -> list[Any]:
    """Sends ids and gradients of all lookups to the processors that have the rows."""
    impl, found = lowering.mesh_impl(self), []
    for op, grad in zip(self._lookups, self._grads):
      asked = lowering.operations[op]

      def add_up(ids: tf.Tensor, place: tf.Tensor, g: tf.Tensor) -> tf.Tensor:
        g = tf.cast(tf.reshape(g, [place.shape[0], -1]), tf.float32)
        return tf.math.unsorted_segment_sum(g, place, ids.shape[0])

      own = impl.slicewise(add_up, asked.ids, asked.place, lowering.tensors[grad])
      found += asked.route.bring(asked.ids, own)
    return found

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    pairs = self._brought(lowering)
    scalars = [laid_out_scalar(lowering, s) for s in self._scalars]
    begins = impl.laid_out_slice_begin(Shape(self._table.rows))
    sizes = impl.slice_shape(Shape(self._table.rows))
    done: list[Any] = []

    def update(w: tf.Tensor, *rest: Any) -> None:
      slots, rest = rest[: len(self._slots)], rest[len(self._slots) :]
      scalars, rest = rest[: len(self._scalars)], rest[len(self._scalars) :]
      begins, rest = rest[: len(sizes)], rest[len(sizes) :]
      if not isinstance(w, tf.Variable):  # Of a plan.
        return
      ids, g = tf.concat(rest[::2], 0), tf.concat(rest[1::2], 0)
      _, inside = row_places(self._table, ids, begins, sizes)
      ids, g = tf.boolean_mask(ids, inside), tf.boolean_mask(g, inside)
      ids, place = tf.unique(ids)
      g = tf.math.unsorted_segment_sum(g, place, tf.size(ids))
      at, _ = row_places(self._table, ids, begins, sizes)
      self._optimizer.update(w, *slots, at, g, *scalars)

    lowering.variables[self._table].update(
      update, *[slices_of(lowering, s) for s in self._slots], *scalars, *begins, *pairs
    )
    lowering.operations[self] = grouped(done)


def _count(table: Table, scalars: list[Any]) -> list[Operation]:
  """Counts the steps of a table; appends the number of this one, from 1, to `scalars`."""
  done = get_variable(
    table.mesh,
    f"{table.full_name}_adam_t",
    [],
    dtype=tf.float32,
    initializer=initializers.Zeros(),
    trainable=False,
  )
  scalars.append(done + 1.0)
  return [assign_add(done, ones_like(done))]


def _in_order(grad: Tensor, op: LookupOperation) -> Tensor:
  shape = op.outputs[0].shape
  return grad if grad.shape == shape else transpose(grad, shape)


def _table_like(table: Table, name: str, value: float) -> Table:
  found = table.graph.name_to_variable.get(scope.full_variable_name(name))
  if found is not None:
    assert isinstance(found, Table)
    return found
  return Table(table.mesh, name, table.rows, table.width, table.dtype, initializers.Constant(value))


@checked
def minimize(loss: Tensor, rows: RowOptimizer, weights: Optimizer | None = None) -> list[Operation]:
  """Updates the looked-up rows of tables, and all weights, along the gradient of a loss.

  One backward pass serves both.

  Args:
    loss: a scalar `Tensor`.
    rows: the optimizer of the graph's tables.
    weights: an `mtf.optimize.Optimizer` of `graph.trainable_variables`; None: they do not change.

  Returns:
    The update operations.

  Raises:
    GraphError: no lookup of the graph leads to the loss.
    UnsupportedError: a lookup is in a loop, or in a recomputed part.
  """
  graph = loss.graph
  lookups = [op for op in graph.operations if isinstance(op, LookupOperation)]
  inside = [op for op in lookups_of(graph.operations) if op not in set(lookups)]
  if inside:
    raise UnsupportedError(
      f"minimize: {inside[0].name} in table {inside[0].table.full_name} is inside a loop; look up "
      "before it"
    )
  variables = list(graph.trainable_variables) if weights is not None else []
  xs = [op.outputs[0] for op in lookups] + [v.outputs[0] for v in variables]
  found = gradients([loss], xs)
  by_table: dict[Table, list[tuple[LookupOperation, Tensor]]] = {}
  for op, g in zip(lookups, found):
    if g is not None:
      by_table.setdefault(op.table, []).append((op, g))
  if not by_table:
    raise GraphError(f"minimize: {loss} depends on no lookup in a table (mtf.sparse.lookup)")
  updates: list[Operation] = []
  for table, pairs in by_table.items():
    scalars = [evaluate_scalar(rows.learning_rate, table.mesh, "learning_rate")]
    if rows.counts:
      updates += _count(table, scalars)
    ops, grads = [op for op, _ in pairs], [_in_order(g, op) for op, g in pairs]
    updates.append(RowUpdateOperation(rows, table, rows.slots_of(table), ops, grads, scalars))
  if weights is not None:
    updates += weights.apply_grads(found[len(lookups) :], variables)
  return updates + count_global_step_if_there(graph)
