"""Learning rates and decay rates: numbers, tensors, or functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any

import tensorflow as tf

from mesh_tensorflow.errors import ConfigError, ShapeError
from mesh_tensorflow.operations.constants import import_tf_tensor
from mesh_tensorflow.operations.elementwise import cast
from mesh_tensorflow.operations.global_step import get_global_step
from mesh_tensorflow.operations.slicewise import cwise
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.program.graph import Mesh, Tensor

# A number, a scalar tf.Tensor, a scalar mtf.Tensor, or a function of the global step (an
# mtf.Tensor) that returns one of these.
ScalarLike = Annotated[float | tf.Tensor | Tensor | Callable[..., Any], ConfigError]


def evaluate_scalar(value: ScalarLike, mesh: Mesh, what: str = "scalar") -> float | Tensor:
  """Evaluates a `ScalarLike` at the current step.

  Args:
    value: a `ScalarLike`.
    mesh: a `Mesh`; functions get `get_global_step(mesh)`.
    what: its meaning, for errors.

  Returns:
    A float, or a float32 scalar `Tensor`.

  Raises:
    ShapeError: it is not a scalar.
    ConfigError: it is no `ScalarLike`.
  """
  if isinstance(value, Tensor):
    if value.shape.ndims:
      raise ShapeError(f"{what} must be a scalar, got {value}")
    return cast(value, tf.float32)
  if tf.is_tensor(value) or isinstance(value, tf.Variable):
    shape = getattr(value, "shape")  # noqa: B009 - which no checker knows that these have
    if shape.rank != 0:
      raise ShapeError(f"{what} must be a scalar, got a tf.Tensor of shape {shape}")
    return import_tf_tensor(mesh, tf.cast(value, tf.float32), Shape([]))
  if callable(value):
    return evaluate_scalar(value(get_global_step(mesh)), mesh, what)
  try:
    return float(value)
  except (TypeError, ValueError):
    raise ConfigError(
      f"{what} must be a number, a scalar tensor, or a function of the step, got {value!r}"
    ) from None


def function_of_step(fn: Callable[[tf.Tensor], tf.Tensor]) -> Callable[[Any], Any]:
  """Makes a schedule of a TensorFlow function.

  Args:
    fn: takes the step as a float32 scalar; returns a float32 scalar.

  Returns:
    A function that takes the step as a number, a tf.Tensor or an mtf.Tensor, and returns a
    tf.Tensor, or for an mtf.Tensor an mtf.Tensor.
  """

  def schedule(step: float | tf.Tensor) -> Any:
    if isinstance(step, Tensor):
      return cwise(
        lambda t: fn(tf.cast(t, tf.float32)),
        [step],
        output_dtype=tf.float32,
        grad_function=0,
        name="schedule",
      )
    return fn(tf.cast(step, tf.float32))

  return schedule


def check_at_least(owner: str, lowest: float, **numbers: float) -> None:
  """Raises `ConfigError` if a number is below `lowest`, or not finite.

  Args:
    owner: name of what has these numbers, for the error.
    lowest: smallest allowed number.
    **numbers: the numbers by their names.
  """
  for name, value in numbers.items():
    if not lowest <= value < math.inf:
      raise ConfigError(f"{owner}: {name} (={value}) must be at least {lowest}, and finite")


def check_below_one(owner: str, **numbers: float) -> None:
  """Raises `ConfigError` if a number is not at least 0 and below 1; as `check_at_least`."""
  for name, value in numbers.items():
    if not 0.0 <= value < 1.0:
      raise ConfigError(f"{owner}: {name} (={value}) must be at least 0 and below 1")
