"""Constants, imports, variables and assignments."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.conformance.framework import ONE_DEVICE, T, op

AB, ABC = "a:4 b:8", "a:4 b:8 c:12"
VALUES = np.arange(32, dtype=np.float32).reshape(4, 8)


def _variable(mesh, name="v", shape=AB, **kwargs):
  kwargs.setdefault("initializer", tf.zeros_initializer())
  return mtf.get_variable(mesh, name, mtf.convert_to_shape(shape), **kwargs)


def _assigned(assign, initial=0.0):
  """The value of a variable after an assignment of the input."""

  def build(x):
    v = _variable(x.mesh, initializer=tf.constant_initializer(initial))
    assign(v, x)
    return [v, mtf.read_variable(v.operation)]

  return build


def _initialized(initializer, shape=ABC, **kwargs):
  return lambda mesh: _variable(mesh, shape=shape, initializer=initializer, **kwargs)


def _swapped(x, y):
  """Two variables that exchange their values in one assignment."""
  v, w = _variable(x.mesh, "v"), _variable(x.mesh, "w")
  first = [mtf.assign(v, x), mtf.assign(w, y)]
  x.graph.combine_assignments(first)
  v_now, w_now = mtf.read_variable(v.operation), mtf.read_variable(w.operation)
  x.graph.combine_assignments([mtf.assign(v, w_now), mtf.assign(w, v_now)])
  return [mtf.read_variable(v.operation), mtf.read_variable(w.operation)]


DESCRIPTORS = [
  op("constant", lambda mesh: mtf.constant(mesh, 2.5, shape=AB), lambda: np.full((4, 8), 2.5)),
  op(
    "constant_int",
    lambda mesh: mtf.constant(mesh, 7, shape=AB, dtype=tf.int32),
    lambda: np.full((4, 8), 7),
  ),
  op("constant_array", lambda mesh: mtf.constant(mesh, VALUES, shape=AB), lambda: VALUES),
  op(
    "constant_list",
    lambda mesh: mtf.constant(mesh, list(range(8)), shape="b:8", dtype=tf.int32),
    lambda: np.arange(8),
  ),
  op("zeros", lambda mesh: mtf.zeros(mesh, AB, tf.int32), lambda: np.zeros((4, 8), np.int32)),
  op("ones", lambda mesh: mtf.ones(mesh, ABC), lambda: np.ones((4, 8, 12))),
  op("import_int", lambda x: x, lambda x: x, T(AB, -9, 10, "int32")),
  op("import_bool", lambda x: x, lambda x: x, T(AB, dtype="bool")),
  op(
    "import_replicated",
    lambda mesh: mtf.import_fully_replicated(mesh, tf.constant(VALUES), mtf.convert_to_shape(AB)),
    lambda: VALUES,
  ),
  op("variable_zeros", _initialized(tf.zeros_initializer()), lambda: np.zeros((4, 8, 12))),
  op(
    "variable_constant",
    _initialized(tf.constant_initializer(1.5)),
    lambda: np.full((4, 8, 12), 1.5),
  ),
  op("variable_normal", _initialized(tf.random_normal_initializer(stddev=0.5)), ONE_DEVICE),
  op("variable_uniform", _initialized(tf.random_uniform_initializer(-1, 1)), ONE_DEVICE),
  op("variable_default", _initialized(None, shape="a:4 b:8"), ONE_DEVICE),
  op(
    "variable_bfloat16",
    _initialized(
      tf.constant_initializer(1.5),
      dtype=mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16),
    ),
    lambda: np.full((4, 8, 12), 1.5),
  ),
  op("assign", _assigned(mtf.assign), lambda x: [0 * x, x], AB, differentiable=False),
  op("assign_add", _assigned(mtf.assign_add, 2.0), lambda x: [0 * x + 2, 2 + x], AB,
     differentiable=False),
  op("assign_sub", _assigned(mtf.assign_sub, 2.0), lambda x: [0 * x + 2, 2 - x], AB,
     differentiable=False),
  op(
    "assign_pending",
    lambda x: _assigned(mtf.assign)(mtf.reduce_sum(x, output_shape=AB)),
    lambda x: [0 * x.sum(2), x.sum(2)],
    ABC,
    differentiable=False,
  ),
  op("assign_swap", _swapped, lambda x, y: [y, x], AB, AB, differentiable=False),
  op(
    "gradient_of_variable",
    lambda x: mtf.gradients(
      [mtf.reduce_sum(mtf.square(x + v))], [v]
    )[0] if (v := _variable(x.mesh)) else None,
    lambda x: 2 * x,
    AB,
  ),
]  # fmt: skip
