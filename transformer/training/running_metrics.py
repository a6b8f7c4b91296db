"""Metrics over several batches, under the names that the TF1 library's model function used."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

# The accumulators of metrics in traced functions, by their graphs.
_ACCUMULATORS: weakref.WeakKeyDictionary[Any, list[tf.Variable]] = weakref.WeakKeyDictionary()


def metric_sum(
  values: float | tf.Tensor, name: str | None = None, **kwargs: Any
) -> tuple[tf.Variable, Any]:
  """A sum over several batches.

  Args:
    values: a number or tensor.
    name: of the accumulator.
    **kwargs: have no effect.

  Returns:
    (accumulator, its new value): a float32 variable that starts at 0, and, in a `tf.function`, a
    tensor that adds the sum of `values` to it in each call.
  """
  del kwargs
  return _accumulated(values, name or "metric_sum", 0.0, tf.reduce_sum, tf.add)


def metric_max(
  values: float | tf.Tensor, name: str | None = None, **kwargs: Any
) -> tuple[tf.Variable, Any]:
  """A maximum over several batches.

  Args:
    values: a number or tensor.
    name: of the accumulator.
    **kwargs: have no effect.

  Returns:
    (accumulator, its new value), as `metric_sum`; it starts at -infinity.
  """
  del kwargs
  return _accumulated(values, name or "metric_max", float("-inf"), tf.reduce_max, tf.maximum)


def _accumulated(
  values: float | tf.Tensor,
  name: str,
  start: float,
  reduce: Callable[..., tf.Tensor],
  join: Callable[..., tf.Tensor],
) -> tuple[tf.Variable, tf.Tensor]:
  values = tf.cast(values, tf.float32)
  # Outside of a function that is traced: the variable is one for all of its calls.
  with tf.init_scope():
    accumulator = tf.Variable(
      start, False, dtype=tf.float32, name=name, experimental_enable_variable_lifting=False
    )
  if tf.inside_function():
    # A tf.function creates it when it is traced, and does not keep it.
    _ACCUMULATORS.setdefault(values.graph, []).append(accumulator)
  return accumulator, accumulator.assign(join(accumulator, reduce(values)))
