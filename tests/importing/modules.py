"""Modules of plain TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

RNG = np.random.default_rng(1)


def floats(*shape: int) -> np.ndarray:
  return RNG.normal(size=shape).astype(np.float32)


class Dense(tf.Module):
  """A layer in plain TensorFlow."""

  def __init__(self, d_in: int, units: int):
    super().__init__()
    self.kernel = tf.Variable(floats(d_in, units))
    self.bias = tf.Variable(floats(units))

  def __call__(self, x: Any) -> Any:
    return tf.nn.bias_add(tf.matmul(x, self.kernel), self.bias)


class Mlp(tf.Module):
  """Two layers, of which the hidden one is as large as `hidden`."""

  def __init__(self, hidden: int = 16):
    super().__init__()
    self.layers = [Dense(8, hidden), Dense(hidden, 8)]
    self.calls = tf.Variable(0, trainable=False)

  @tf.function
  def __call__(self, inputs: Any, training: bool = True) -> Any:
    self.calls.assign_add(1)
    return inputs + self.layers[1](tf.nn.relu(self.layers[0](inputs)))
