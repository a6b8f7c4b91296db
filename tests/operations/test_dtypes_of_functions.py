"""The dtypes that element-wise functions refuse are those that TensorFlow's own refuse."""

from __future__ import annotations

import re

import pytest
import tensorflow as tf

import mesh_tensorflow as mtf

A = mtf.Dimension("a", 2)
DTYPES = "bool int8 int32 int64 uint8 float16 bfloat16 float32 float64 complex64 string".split()
PLAIN = {
  "sin": tf.sin,
  "cos": tf.cos,
  "square": tf.square,
  "sqrt": tf.sqrt,
  "rsqrt": tf.math.rsqrt,
  "log": tf.math.log,
  "exp": tf.exp,
  "sigmoid": tf.sigmoid,
  "tanh": tf.tanh,
  "negative": tf.negative,
  "reciprocal": tf.math.reciprocal,
  "relu": tf.nn.relu,
  "elu": tf.nn.elu,
  "selu": tf.nn.selu,
  "softplus": tf.math.softplus,
  "sign": tf.sign,
  "abs": tf.abs,
  "logical_not": tf.logical_not,
}
# TensorFlow takes integers there, of which it makes 0 or infinity, or wraps around.
STRICTER = {("reciprocal", "int"), ("reciprocal", "uint")}


def tensor(dtype: str) -> tf.Tensor:
  return tf.fill([2], "s") if dtype == "string" else tf.cast(tf.ones([2]), dtype)


@pytest.mark.parametrize("name", PLAIN)
def test_refused_where_tensorflow_refuses(name):
  for dtype in DTYPES:
    value = tensor(dtype)
    try:
      PLAIN[name](value)
      expected = True
    except (tf.errors.OpError, TypeError, ValueError):
      expected = False
    x = mtf.import_tf_tensor(mtf.Mesh(mtf.Graph(), "mesh"), value, [A])
    try:
      getattr(mtf, name)(x)
      taken = True
    except mtf.DTypeError as e:
      taken = False
      assert ("text has no value" if dtype == "string" else "cast it: mtf.") in str(e)
    if (name, dtype.rstrip("0123456789")) not in STRICTER:
      assert taken == expected, f"{name} of {dtype}: TensorFlow takes it: {expected}, mtf: {taken}"


REDUCTIONS = ("reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "reduce_logsumexp")


@pytest.mark.parametrize("name", [*PLAIN, *REDUCTIONS])
def test_the_cast_that_a_message_recommends_is_taken(name):
  refused = 0
  for dtype in DTYPES:
    x = mtf.import_tf_tensor(mtf.Mesh(mtf.Graph(), "mesh"), tensor(dtype), [A])
    try:
      function = getattr(mtf, name)
      function(x, A) if name == "reduce_logsumexp" else function(x)
    except mtf.DTypeError as e:
      refused += 1
      assert str(e).startswith(f"{name}: ")
      casts = re.findall(r"mtf\.\w+\(x(?:, tf\.bool)?\)", str(e))
      assert bool(casts) == (dtype != "string")
      for cast in casts:
        y = eval(cast, {"mtf": mtf, "tf": tf, "x": x})
        function(y, A) if name == "reduce_logsumexp" else function(y)
  assert refused
