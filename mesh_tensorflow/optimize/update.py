"""Update operations, which change a variable and its slots in place, and their count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import UnsupportedError
from mesh_tensorflow.meshes.contract import LaidOutVariable
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LaidOut
from mesh_tensorflow.numerics import initializers, random_bits
from mesh_tensorflow.operations.constants import ones_like
from mesh_tensorflow.operations.variables import Variable, assign_add, get_variable, grouped
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.graph import Mesh, Operation, Tensor


class UpdateOperation(Operation):
  """Changes a variable, and slots of the same layout, where it stands in the graph.

  A subclass defines `step(w, *slots, *tensors, *scalars)`, which runs on the slices of one
  processor: w is a tf.Variable, slots and tensors are tf.Tensors, scalars are tf.Tensors or
  numbers. It returns a list of tf.Operations, and the new value of each slot. If TensorFlow has an
  operation that does all in place, or no slot is written as a whole, it defines `update`, too, of
  the same arguments, with slots that are tf.Variables; it returns the operations alone.

  Args:
    variable: the `Variable` operation.
    slots: `Variable` operations of its shape.
    tensors: `Tensor`s of its shape (the gradient, say).
    scalars: scalar `Tensor`s or numbers.
    name: name of the operation.
  """

  # Each step is of one place; gradients are zero in padding.
  lowers_uneven_slices = True
  # A recomputation must not update a second time.
  is_cloneable = False
  reads_shards = True

  def __init__(
    self,
    variable: Variable,
    slots: Sequence[Variable],
    tensors: Sequence[Tensor],
    scalars: Sequence[float | Tensor],
    name: str,
  ):
    super().__init__(
      [*tensors, *[s for s in scalars if isinstance(s, Tensor)]], variable.mesh, name=name
    )
    self._variable = variable
    self._slots = list(slots)
    self._tensors = list(tensors)
    self._scalars = list(scalars)

  @property
  def variables(self) -> list[Variable]:
    """The variables that it changes."""
    return [self._variable, *self._slots]

  @property
  def has_gradient(self) -> bool:
    return False

  @property
  def draws_random_numbers(self) -> bool:
    """True if slots, or the weight, are rounded stochastically."""
    return any(v.compact for v in self.variables)

  def step(self, w: tf.Variable, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    raise UnsupportedError(
      f"{type(self).__name__} {self.name} of variable {self._variable.full_name} defines no method "
      "step"
    )

  def update(self, w: tf.Variable, *args: Any, **kwargs: Any) -> list[Any]:
    slots, rest = args[: len(self._slots)], args[len(self._slots) :]
    done, *new = self.step(w, *[s.read_value() for s in slots], *rest, **kwargs)
    return [*done, *[s.assign(x, read_value=False) for s, x in zip(slots, new)]]

  def lower(self, lowering: LoweringInProgress) -> None:
    done: list[Any] = []
    laid_out = lowering.variables[self._variable]
    rest = [
      *[laid_out.to_shards(lowering.tensors[x]) for x in self._tensors],
      *[laid_out_scalar(lowering, s) for s in self._scalars],
    ]
    if self.draws_random_numbers:
      done = self._update_compact(lowering, laid_out, rest)
    else:
      laid_out.update(
        lambda *args: done.extend(self.update(*args)),
        *[slices_of(lowering, s) for s in self._slots],
        *rest,
      )
    lowering.operations[self] = grouped(done)

  def _update_compact(
    self, lowering: LoweringInProgress, laid_out: LaidOutVariable, rest: Sequence[Any]
  ) -> list[Any]:
    done: list[Any] = []
    old = [lowering.variables[s].read_shards(tf.float32) for s in self._slots]
    written = self._slots

    def step(w: tf.Variable, *args: Any) -> tuple[Any, ...]:
      ops, *new = self.step(w, *args)
      done.extend(ops)
      return tuple(new)

    def step_in_float32(w: tf.Tensor, *args: Any) -> tuple[Any, ...]:
      weight = _Float32Weight(w)
      _, *new = self.step(weight, *args)
      return weight.read_value(), *new

    if self._variable.compact is None:
      new = laid_out.update_to(step, *old, *rest)
    else:
      written = self.variables
      weight = laid_out.read_shards(tf.float32)
      new = lowering.mesh_impl(self).slicewise(step_in_float32, weight, *old, *rest)
    for variable, x in zip(written, new):
      done += write_rounded(lowering, self, variable, x)
    return done


class _Float32Weight:
  """Stands for the tf.Variable of a weight whose new value is rounded after it was computed.

  Args:
    value: the weight, float32.
  """

  dtype = tf.float32

  def __init__(self, value: tf.Tensor):
    self._value = value

  def read_value(self) -> tf.Tensor:
    """The current value."""
    return self._value

  def assign_sub(self, delta: tf.Tensor, read_value: bool = True) -> tf.Tensor:
    """Subtracts from the value."""
    del read_value
    self._value -= delta
    return self._value


def write_rounded(
  lowering: LoweringInProgress, op: Operation, slot: Variable, values: LaidOut
) -> list[Any]:
  """Sets a slot, or a weight.

  Args:
    lowering: the lowering.
    op: the operation that does so.
    slot: the variable.
    values: float32, in the layout of its slices.

  Returns:
    What the assignments returned.
  """
  laid_out: LaidOutVariable = lowering.variables[slot]
  if slot.compact is None:
    return laid_out.write_shards(values)
  key, of_slot = lowering.random_key(op), random_bits.name_key(slot.full_name)
  if isinstance(key, int):
    key = random_bits.fold(key, of_slot)
  else:
    key = lowering.mesh_impl(op).slicewise(lambda k: random_bits.fold(k, of_slot), key)
  return laid_out.write_shards(values, key)


def slices_of(lowering: LoweringInProgress, variable: Variable) -> Any:
  """The tf.Variables of a variable, laid out."""
  laid_out = lowering.variables[variable]
  return lowering.mesh_impl(variable).LaidOutTensor(laid_out.slices)


def laid_out_scalar(lowering: LoweringInProgress, scalar: float | Tensor) -> Any:
  """A scalar `Tensor` laid out, or the number."""
  return lowering.tensors[scalar] if isinstance(scalar, Tensor) else scalar


def is_float32(*slices: tf.Variable | tf.Tensor) -> bool:
  """True if all are float32; TensorFlow's fused update operations need one dtype throughout."""
  return all(s.dtype == tf.float32 for s in slices)


def subtract(w: tf.Variable, delta: tf.Tensor) -> Any:
  """Subtracts delta in the dtype of the slice: the slice itself is never rounded."""
  return w.assign_sub(tf.cast(delta, w.dtype), read_value=False)


def decay(w: tf.Variable, rate: float | tf.Tensor) -> Any:
  """Multiplies a float32 slice by 1 - rate, in one pass: a slice that is assigned is not copied."""
  return w.assign((1.0 - rate) * w.read_value(), read_value=False)


def subtract_scaled(w: tf.Variable, rate: float | tf.Tensor, delta: tf.Tensor) -> Any:
  """Subtracts rate * delta from a float32 slice, in place and in one pass."""
  rate = tf.cast(rate, tf.float32)
  return tf.raw_ops.ResourceApplyGradientDescent(var=w.handle, alpha=rate, delta=delta)


def update_count(mesh: Mesh, name: str) -> tuple[Tensor, list[Operation]]:
  """The number of updates that came before the one of this graph.

  It is a variable of its own, not the global step: slots that begin with zeros in a training that
  goes on from a checkpoint without them are at their first update, whatever its step.

  Args:
    mesh: a `Mesh`.
    name: name of the untrainable int64 variable, within the open variable scope.

  Returns:
    The count, as it is before this graph's update; and, when a graph asks for it first, the
    operation that counts this update, in a list.
  """
  is_counted = scope.full_variable_name(name) in mesh.graph.name_to_variable
  count = get_variable(
    mesh, name, [], dtype=tf.int64, initializer=initializers.Zeros(), trainable=False
  )
  if is_counted:
    return count, []
  return count, [assign_add(count, ones_like(count))]
