"""Losses of microbatches, whose sum is the loss of the whole batch.

A loss that is a mean over the examples is the mean of the microbatches'. One that is a mean over
the positions that are not masked, or over weights (`reduction="mean_with_sample_weight"`), is a sum
times a *factor* that belongs to the whole batch: it is computed once a step, of the whole batch,
and given to each microbatch. A sum (`reduction="sum"`) has the factor 1.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from mesh_tensorflow.errors import UnsupportedError

_LOCK = threading.RLock()
_MEANS = ("sum_over_batch_size", "mean")


@contextlib.contextmanager
def of_whole_batch() -> Iterator[list[tf.Tensor]]:
  """Context manager: yields a list that gets the factors of the losses that this thread computes.

  Inside it a step is traced for a whole batch; the factors are scalars, in the order of the losses.
  """
  factors: list[tf.Tensor] = []

  def loss(plain: Callable[..., Any], self: Any, y: Any, prediction: Any, weight: Any) -> Any:
    if _has_factor(self, y, prediction, weight):
      factors.append(_factor(plain, self, y, prediction, weight))
    return plain(self, y, prediction, weight)

  with _replaced(loss):
    yield factors


@contextlib.contextmanager
def of_microbatch(count: int, factors: Sequence[tf.Tensor]) -> Iterator[None]:
  """Context manager: the losses that this thread computes are those of a microbatch.

  The mean of `count` of them, over the microbatches, is the loss of the batch.

  Args:
    count: number of microbatches.
    factors: what `of_whole_batch` gave.

  Raises:
    UnsupportedError: when a loss is computed: it has no reduction, or is the sum of a scalar.
  """
  remaining = iter(factors)

  def loss(plain: Callable[..., Any], self: Any, y: Any, prediction: Any, weight: Any) -> Any:
    is_scalar = not _values_of(self, y, prediction).shape.rank
    if self.reduction in (None, "none") or (self.reduction == "sum" and is_scalar):
      raise UnsupportedError(
        f"mtf.keras: the loss {self.name} has reduction={self.reduction!r}"
        + (" of a scalar" if is_scalar else "")
        + ", and that of a batch does not follow from those of its microbatches; give it "
        "reduction='sum_over_batch_size', or give parallelize microbatches=1"
      )
    if self.reduction == "sum":
      return plain(self, y, prediction, weight) * count
    if not _has_factor(self, y, prediction, weight):
      return plain(self, y, prediction, weight)
    with _with(self, reduction="sum"):
      total = plain(self, y, prediction, weight)
    return total * count * keras.ops.cast(next(remaining), total.dtype)

  with _replaced(loss):
    yield


def _has_factor(loss: Any, y: Any, prediction: Any, weight: Any) -> bool:
  """True if a loss is a sum over a batch times what depends on masks or weights of it."""
  values = _values_of(loss, y, prediction)
  # Keras itself gives values a mask where a loss has an ignore_class.
  masks = [getattr(x, "_keras_mask", None) for x in (*tf.nest.flatten(prediction), values)]
  is_masked = any(m is not None for m in masks)
  is_weighted = loss.reduction not in _MEANS and weight is not None
  # A function that returns a scalar is a mean itself.
  return bool(values.shape.rank and loss.reduction != "sum" and (is_masked or is_weighted))


def _values_of(loss: Any, y: Any, prediction: Any) -> Any:
  """The values of a loss before its reduction; only their shape costs nothing in the end."""
  y, prediction = (
    tf.nest.map_structure(
      lambda x: keras.ops.convert_to_tensor(x, dtype=getattr(loss, "dtype", None)), x
    )
    for x in (y, prediction)
  )
  return keras.ops.convert_to_tensor(loss.call(y, prediction))


def _factor(
  plain: Callable[..., Any], loss: Any, y: Any, prediction: Any, weight: Any
) -> tf.Tensor:
  """The quotient of a loss and its sum: Keras' own, of ones in place of the values.

  Args:
    plain: `keras.Loss.__call__`.
    loss: the loss; this and the others are its arguments.
    y: the targets.
    prediction: the outputs.
    weight: of the examples. A mean over positions is divided by their number, whatever their
      weights.
  """
  if loss.reduction in _MEANS:
    weight = None
  values_of = loss.call

  def ones(*args: Any) -> Any:
    values = keras.ops.convert_to_tensor(values_of(*args))
    found = tf.ones(values.shape, values.dtype)
    mask = getattr(values, "_keras_mask", None)
    if mask is not None:
      found._keras_mask = mask
    return found

  with _with(loss, call=ones):
    mean = plain(loss, y, prediction, weight)
    with _with(loss, reduction="sum"):
      total = plain(loss, y, prediction, weight)
  return tf.math.divide_no_nan(mean, total)


@contextlib.contextmanager
def _with(loss: Any, **attributes: Any) -> Iterator[None]:
  """Context manager that gives a loss other attributes."""
  before = {k: vars(loss)[k] for k in attributes if k in vars(loss)}
  vars(loss).update(attributes)
  try:
    yield
  finally:
    for k in attributes:
      del vars(loss)[k]
    vars(loss).update(before)


@contextlib.contextmanager
def _replaced(fn: Callable[..., Any]) -> Iterator[None]:
  """Context manager: `fn` is called in place of `keras.Loss.__call__` by this thread.

  Args:
    fn: takes that method, and its arguments.
  """
  thread = threading.get_ident()
  with _LOCK:
    plain = keras.Loss.__call__
    inside = False

    @functools.wraps(plain)
    def call(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
      nonlocal inside
      if inside or threading.get_ident() != thread:
        return plain(self, y_true, y_pred, sample_weight)
      inside = True  # A loss may call another one.
      try:
        return fn(plain, self, y_true, y_pred, sample_weight)
      finally:
        inside = False

    keras.Loss.__call__ = call
    try:
      yield
    finally:
      keras.Loss.__call__ = plain
