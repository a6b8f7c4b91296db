"""Precisions: in which dtype a program computes, while its variables stay float32."""

from __future__ import annotations

import functools
import time

import tensorflow as tf

from mesh_settings.hints import did_you_mean
from mesh_settings.run import PRECISIONS
from mesh_tensorflow.errors import ArgumentError

__all__ = ["compute_dtype", "faster"]

# bfloat16 is taken if products take less than this part of the time of float32: what else the
# machine does shall not decide.
_WORTH = 0.8


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
  """The dtype in which this process multiplies matrices of 512 x 512 faster, measured once.

  It is bfloat16 if products in it take less than 0.8 of the time of those in float32; else float32.
  """
  seconds = {tf.bfloat16: [float("inf")], tf.float32: [float("inf")]}
  with tf.init_scope():
    product = tf.function(lambda x: tf.matmul(x, x), autograph=False)
    x = tf.random.stateless_normal([512, 512], [0, 0])
    factors = {dtype: tf.cast(x, dtype) for dtype in seconds}
    for i in range(30):  # In turns, so that what else the machine does meets both.
      for dtype, times in seconds.items():
        started = time.perf_counter()
        product(factors[dtype]).numpy()
        if i:  # The first of them is compiled.
          times.append(time.perf_counter() - started)
  bfloat16, float32 = map(min, seconds.values())
  return "bfloat16" if bfloat16 < _WORTH * float32 else "float32"
