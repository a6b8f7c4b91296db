"""Precisions: in which dtype a program computes, while its variables stay float32."""

from __future__ import annotations

import functools
import time

import tensorflow as tf

from mesh_settings.hints import did_you_mean
from mesh_settings.run import PRECISIONS
from mesh_tensorflow.errors import ArgumentError

__all__ = ["compute_dtype", "faster"]


def compute_dtype(precision: str, what: str) -> tf.DType:
  """The dtype of computations.

  Args:
    precision: "float32", "bfloat16", "float16", or "auto": what this process computes faster.
    what: whose it is, for errors.

  Raises:
    ArgumentError: it is something else.
  """
  if precision not in PRECISIONS:
    close = did_you_mean(precision, PRECISIONS, shown=repr) if isinstance(precision, str) else ""
    raise ArgumentError(
      f"{what}: precision is {precision!r}{close}; it is one of {', '.join(PRECISIONS)}"
    )
  return tf.as_dtype(faster() if precision == "auto" else precision)


@functools.cache
def faster() -> str:
  """The dtype, float32 or bfloat16, in which this process multiplies matrices of 512 x 512 faster.

  It is measured once.
  """

  def seconds(dtype: tf.DType) -> float:
    with tf.init_scope():
      x = tf.cast(tf.random.stateless_normal([512, 512], [0, 0]), dtype)
      product = tf.function(lambda x: tf.matmul(x, x), autograph=False)
      times = []
      for _ in range(6):  # The first of them is compiled.
        started = time.perf_counter()
        product(x).numpy()
        times.append(time.perf_counter() - started)
    return min(times)

  return "bfloat16" if seconds(tf.bfloat16) < seconds(tf.float32) else "float32"
