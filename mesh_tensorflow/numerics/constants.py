"""Constants that a traced graph has once on a device, wherever its operations need them.

A program asks for the same few shapes, axes and factors hundreds of times, and each constant costs
Python when it is made, and TensorFlow when it optimizes the graph.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

# The constants of the graph that is being lowered, and the device whose slices are computed.
_graph: contextvars.ContextVar[dict[Any, tf.Tensor] | None] = contextvars.ContextVar(
  "graph", default=None
)
_device: contextvars.ContextVar[str | None] = contextvars.ContextVar("device", default=None)


@contextlib.contextmanager
def of_one_graph(made: dict[Any, tf.Tensor] | None = None) -> Iterator[None]:
  """Context, or decorator, of operations that become part of one TensorFlow graph.

  Whatever makes a graph inside of another one (a branch, the body of a loop, a program) enters it.

  Args:
    made: the constants that the graph has already, by which new ones are added; None: it has none.
  """
  # Another graph's slices are computed by calls of their own.
  tokens = _graph.set({} if made is None else made), _device.set(None)
  try:
    yield
  finally:
    _graph.reset(tokens[0])
    _device.reset(tokens[1])


@contextlib.contextmanager
def on_device(device: str | None) -> Iterator[None]:
  """Context in which the slices of one processor are computed; None: constants are not shared.

  Args:
    device: its device; "" for the default one.
  """
  token = _device.set(device)
  try:
    yield
  finally:
    _device.reset(token)


def constant(value: float | Sequence[int], dtype: tf.DType) -> Any:
  """A number, or a list of integers, as an operand of operations on slices.

  Args:
    value: the value.
    dtype: its dtype.

  Returns:
    A tf.Tensor that other operations of the graph use, too; the value itself where there is
    nothing to share: eagerly, and outside of what is computed slice by slice.
  """
  made, device = _graph.get(), _device.get()
  if made is None or device is None or tf.executing_eagerly():
    return value
  # As text: 0.0 is equal to -0.0, and 1 to True.
  key = device, dtype, repr(value) if isinstance(value, (int, float)) else tuple(value)
  if key not in made:
    # It must not wait for what the first of its uses waits for.
    with tf.control_dependencies(None):
      made[key] = tf.constant(value, dtype)
  return made[key]


def sizes(value: Sequence[int]) -> Any:
  """A shape, a permutation or axes; see `constant`."""
  return constant(value, tf.int32)
