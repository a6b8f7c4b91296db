"""What `mtf.from_tensorflow` refuses, and what it says: the operation, the line, what is legal."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.importing.modules import Mlp

SPEC = [tf.TensorSpec([4, 8])]
QUEUE = tf.queue.FIFOQueue(1, tf.float32)


def unknown(x: Any) -> Any:
  return tf.linalg.logm(tf.cast(x[:, :4], tf.complex64))


def makes_variable(x: Any) -> Any:
  return x * tf.Variable(tf.ones([8]), name="late")


BAD: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
  "unknown operation": (
    unknown,
    {"fallback": "error"},
    mtf.UnsupportedError,
    r"no rule for the operation MatrixLogarithm .*made at .*test_refused.py:\d+, in unknown",
  ),
  "dynamic shape": (
    lambda x: tf.boolean_mask(x, x[:, 0] > 0),
    {},
    mtf.ShapeError,
    r"the shape \[\?, 1\] of .*Where \(test_refused.py:\d+.*\), .*place of tf.where\(condition\)",
  ),
  "dynamic shape in a branch": (
    lambda x: tf.cond(x[0, 0] > 0, lambda: tf.size(tf.where(x > 0)), lambda: 0),
    {"fallback": "error"},
    mtf.ShapeError,
    r"the shape \[\?, 2\] of .*Where .* in .*If .*test_refused.py:\d+.*all shapes are static",
  ),
  "a number of bins that depends on values": (
    lambda x: tf.math.bincount(tf.cast(x, tf.int32)),
    {},
    mtf.ShapeError,
    r"DenseBincount .*test_refused.py:\d+.*tf.one_hot\(x, size\)",
  ),
  "a number of values that depends on them": (
    lambda x: tf.unique(x[0])[0],
    {},
    mtf.ShapeError,
    r"made by Unique .*test_refused.py:\d+.*in place of tf.unique",
  ),
  "unknown beside a dynamic shape": (
    lambda x: tf.unique(x[0]),
    {"fallback": "replicate"},
    mtf.ShapeError,
    r"made by Unique .*test_refused.py:\d+.*or tf.ensure_shape where you know it",
  ),
  "random numbers of each device": (
    lambda x: tf.nn.fractional_max_pool(x[..., None, None], 1.5)[0],
    {},
    mtf.UnsupportedError,
    r"FractionalMaxPool .*test_refused.py:\d+.*device would have .* of its own; use a stateless",
  ),
  "Python of an unknown state": (
    lambda x: tf.numpy_function(abs, [x], tf.float32) + x,
    {},
    mtf.UnsupportedError,
    r"PyFunc .*test_refused.py:\d+.*calls Python, .*; write it with operations of TensorFlow, or",
  ),
  "a state outside": (
    lambda x: tf.raw_ops.QueueSizeV2(handle=QUEUE.queue_ref),
    {},
    mtf.UnsupportedError,
    r"QueueSizeV2 .*is a state outside of the function; compute it outside",
  ),
  "dynamic signature": (
    lambda x: x,
    {"input_signature": [tf.TensorSpec([None, 8])]},
    mtf.ShapeError,
    "the argument x of .* all shapes are static",
  ),
  "a signature of any rank": (
    lambda x: x,
    {"input_signature": [tf.TensorSpec(None)]},
    mtf.ShapeError,
    "the argument x of .* the shape <unknown>; on a mesh all shapes are static",
  ),
  "a variable made in the call": (
    makes_variable,
    {},
    mtf.VariableError,
    r"makes the variable 'late' when it is called \(test_refused.py:\d+, in makes_variable",
  ),
  "no such argument": (
    Mlp(),
    {"dims": {"input": ["batch", "d"]}},
    mtf.DimensionError,
    "dims has 'input', but no argument.*inputs",
  ),
  "too many names": (
    Mlp(),
    {"dims": {"inputs": ["batch", "length", "d"]}},
    mtf.DimensionError,
    r"inputs has 2 axes of sizes \[4, 8\]",
  ),
  "two names for one axis": (
    Mlp(),
    {"dims": {"inputs": ["batch", "d_model"], "layers/0/kernel": ["d_in", None]}},
    mtf.DimensionError,
    "two names for one axis: .*d_model.*d_in.*by MatMul",
  ),
  "two names by two patterns": (
    Mlp(),
    {"dims": {"layers/0/bias": ["a"], "layers/0/b*": ["b"]}},
    mtf.DimensionError,
    "two names for axis 0 of layers/0/bias: 'a' and 'b'",
  ),
  "one name for two sizes": (
    Mlp(),
    {"dims": {"layers/0/kernel": ["d", "e"], "layers/1/bias": ["e"]}},
    mtf.DimensionError,
    "two names for one axis|sizes",
  ),
  "one name twice": (
    Mlp(),
    {"dims": {"inputs": ["d", "d"]}},
    mtf.DimensionError,
    r"has a name twice",
  ),
  "an illegal name": (
    Mlp(),
    {"dims": {"inputs": ["my batch", "d"]}},
    mtf.DimensionError,
    "without blanks",
  ),
  "another number of arguments": (
    lambda x: x,
    {"input_signature": SPEC * 2},
    mtf.ArgumentError,
    "cannot be called with the 2 arguments of input_signature: too many positional",
  ),
  "no specification": (
    lambda x: x,
    {"input_signature": [(4, 8)]},
    mtf.ArgumentError,
    "has a tf.TensorSpec, or an mtf.TensorSpec, for each tensor",
  ),
  "one specification": (
    lambda x: x,
    {"input_signature": SPEC[0]},
    mtf.ArgumentError,
    "input_signature must be a list",
  ),
  "no function": (7, {}, mtf.ArgumentError, "must be a tf.function"),
  "another fallback": (Mlp(), {"fallback": "ignore"}, mtf.ArgumentError, "'error' or 'replicate'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told(name: str) -> None:
  fn, kwargs, error, text = BAD[name]
  with pytest.raises(error, match=text) as e:
    mtf.from_tensorflow(fn, **{"input_signature": SPEC, **kwargs})
  assert "\n" not in str(e.value)
