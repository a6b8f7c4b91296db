"""Functions of drawn operations, on drawn layouts over the dimensions that were found in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tests.importing import comparing

RNG = np.random.default_rng(2)
W = RNG.normal(size=(4, 4, 4)).astype(np.float32) / 2

# Each takes a tensor of four axes of sizes 2 and 4, another one, and a number that says which axes.
Step = Callable[[Any, Any, int], Any]


def _joined(x: Any, k: int) -> Any:
  """Two neighbouring axes as one."""
  shape, i = x.shape.as_list(), k % (x.shape.rank - 1)
  return tf.reshape(x, [*shape[:i], shape[i] * shape[i + 1], *shape[i + 2 :]])


def _as_four(x: Any) -> Any:
  """Any tensor of 2 ** 6 elements, with four axes."""
  return tf.reshape(x, [2, 4, 4, 2]) if x.shape.rank != 4 else x


def _swapped(x: Any, k: int) -> Any:
  order = list(range(4))
  i, j = k % 4, (k // 4) % 4
  order[i], order[j] = order[j], order[i]
  return tf.transpose(x, order)


def _product(x: Any, k: int) -> Any:
  """Each axis may be the one that is summed."""
  moved = _swapped(x, k % 4 + 12)  # That axis is now the last one.
  n = moved.shape[-1]
  return _swapped(tf.matmul(moved, W[0, :n, :n]), k % 4 + 12)


def _scores(x: Any, k: int) -> Any:
  """Attention of the positions of an axis to those of the same axis."""
  moved = _swapped(x, k % 4 + 8)
  return _swapped(tf.nn.softmax(tf.matmul(moved, moved, transpose_b=True)) @ moved, k % 4 + 8)


def _reduced(x: Any, y: Any, k: int) -> Any:
  kind = (tf.reduce_sum, tf.reduce_mean, tf.reduce_max, tf.reduce_min)[k % 4]
  return x * 0.5 + kind(y if y.shape == x.shape else x, [k % 3, 3], keepdims=True)


def _moved_parts(x: Any, k: int) -> Any:
  """An axis cut into two, which come back in the other order."""
  axis = k % 4
  first, second = tf.split(x, 2, axis)
  return tf.concat([second, tf.tanh(first)], axis)


STEPS: dict[str, Step] = {
  "add": lambda x, y, k: x + y if x.shape == y.shape else x + x[:, :1],
  "multiply": lambda x, y, k: x * tf.tanh(y) if x.shape == y.shape else x * x[:1],
  "unary": lambda x, y, k: (tf.tanh, tf.nn.gelu, tf.math.softplus, tf.sin)[k % 4](x),
  "join": lambda x, y, k: _as_four(tf.tanh(_joined(x, k))),
  "join_twice": lambda x, y, k: _as_four(_joined(_joined(x, k), k // 3) * 0.7),
  "swap": lambda x, y, k: _swapped(x, k),
  "product": lambda x, y, k: _product(x, k),
  "scores": lambda x, y, k: _scores(x, k),
  "reduce": _reduced,
  "softmax": lambda x, y, k: tf.nn.softmax(x, axis=k % 4),
  "parts": lambda x, y, k: _moved_parts(x, k),
  "select": lambda x, y, k: tf.where(x > 0, x, y if x.shape == y.shape else tf.square(x)),
  "stack": lambda x, y, k: tf.reduce_sum(tf.stack([x, tf.sin(x)], k % 5), k % 5),
  "tile": lambda x, y, k: tf.tile(x[:, :2], [1, x.shape[1] // 2, 1, 1]) + x,
}


def _function(steps: list[tuple[str, int, int]]) -> Callable[[Any], Any]:
  def run(x: Any) -> Any:
    found = [x]
    for name, of, k in steps:
      found.append(STEPS[name](found[-1], found[of % len(found)], k))
    return found[-1], tf.reduce_sum(found[len(found) // 2], 1)

  return run


def _check(steps: list[tuple[str, int, int]], choice: int, devices: list[str]) -> None:
  x = np.random.default_rng(len(steps)).normal(size=(2, 4, 4, 2)).astype(np.float32)
  fn = _function(steps)
  imported = comparing.imported_of(fn, [x])
  assert not imported.fallbacks
  names = list(imported.dimensions)
  rows, columns = names[choice % len(names)], names[choice // 7 % len(names)]
  layout = [(rows, "r")] + ([(columns, "c")] if columns != rows else [])
  both = comparing.compare(fn, [x], layout, devices[:4], imported=imported)
  assert both.difference < 2e-5, layout


_DRAWN = st.lists(
  st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 15)),
  min_size=2,
  max_size=6,
)


@hypothesis.settings(max_examples=6)
@hypothesis.given(steps=_DRAWN, choice=st.integers(0, 200))
def test_drawn_functions_on_drawn_layouts(
  steps: list[tuple[str, int, int]], choice: int, cpu_devices: list[str]
) -> None:
  _check(steps, choice, cpu_devices)


@pytest.mark.long
@hypothesis.settings(max_examples=60)
@hypothesis.given(steps=_DRAWN, choice=st.integers(0, 200))
def test_many_drawn_functions(
  steps: list[tuple[str, int, int]], choice: int, cpu_devices: list[str]
) -> None:
  _check(steps, choice, cpu_devices)
