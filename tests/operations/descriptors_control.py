"""Loops, custom gradients, recomputation, microbatches, operations for their side effect."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.conformance.framework import ONE_DEVICE, T, op

A, B, C = mtf.Dimension("a", 4), mtf.Dimension("b", 8), mtf.Dimension("c", 12)
AB, ABC, BC = "a:4 b:8", "a:4 b:8 c:12", "b:8 c:12"


def _counter(x):
  return mtf.constant(x.mesh, 0, dtype=tf.int32)


def _loop(body, times, **kwargs):
  """Runs body(i, *state) -> state a number of times."""

  def build(*state):
    return mtf.while_loop(
      lambda i, *s: mtf.less(i, times),
      lambda i, *s: [i + 1, *body(i, *s)],
      [_counter(state[0]), *state],
      **kwargs,
    )[1:]

  return build


def _repeat(fn, times):
  def run(x):
    for i in range(times):
      x = fn(i, x)
    return x

  return run


def _custom(x, y):
  """x * y, with gradients that are wrong on purpose."""
  return mtf.custom_gradient(
    lambda x, y: x * y,
    lambda explicit_inputs, all_inputs, forward_operations, outputs, output_grads: [
      output_grads[0] * 10.0,
      output_grads[0] * explicit_inputs[0],
    ],
    [x, y],
  )


def _microbatches(x):
  """The outputs of two microbatches of a model without variables."""

  def model(features):
    y = mtf.square(features["x"])
    return {"loss": mtf.reduce_sum(y), "y": y}

  _, outputs = mtf.serialize_training_step({"x": x}, model, B, 2)
  return [outputs["loss"], outputs["y"]]


def _nested_loop(x):
  """Adds i * j for j <= i < 3 (7 in all), by a loop in a loop."""

  def outer(i, s):
    start = mtf.constant(x.mesh, 0, dtype=tf.int32)
    _, inner = mtf.while_loop(
      lambda j, t: mtf.less_equal(j, i),
      lambda j, t: [j + 1, t + mtf.to_float(i * j)],
      [start, s],
    )
    return [inner]

  return _loop(outer, 3)(x)


def _gathered_steps(x, h):
  """A recurrence over the positions of c, with an output for each: h' = tanh(x[c] + h)."""

  def body(i, state):
    new = mtf.tanh(mtf.gather(x, i, C) + state)
    return [i + 1, new, new * mtf.one_hot(i, C)]

  return mtf.while_loop(
    lambda i, s: mtf.less(i, 12), body, [_counter(x), h], has_accumulators=True
  )[1:]


def _gathered_steps_in_numpy(x, h):
  outputs = []
  for i in range(12):
    h = np.tanh(x[:, :, i] + h)
    outputs.append(h)
  return [h, np.stack(outputs, -1)]


def _power_until(x, w, bound):
  """Multiplies by w until the sum is above a bound: how often depends on the data."""
  return mtf.while_loop(
    lambda v: mtf.less(mtf.reduce_sum(v), bound), lambda v: [v * w + mtf.sin(v)], [x]
  )


def _power_until_in_numpy(x, w, bound):
  while x.sum() < bound:
    x = x * w + np.sin(x)
  return x


def _loop_of_conditions(x, w):
  """A loop whose odd iterations multiply, and whose even ones run a loop."""

  def body(i, s):
    even = lambda: _loop(lambda j, t: [mtf.sin(t) + w], 2)(s)[0]  # noqa: E731
    return [mtf.cond(mtf.equal(mtf.mod(i, 2), 0), even, lambda: s * w)]

  return _loop(body, 3)(x)


def _loop_of_conditions_in_numpy(x, w):
  for i in range(3):
    x = np.sin(np.sin(x) + w) + w if i % 2 == 0 else x * w
  return x


def _sums_in_branches(x, w):
  """Branches that communicate; what only one of them uses gets zeros from the other."""
  total = mtf.reduce_sum(x, output_shape=[])
  pred = mtf.greater(total, 0.0)
  return mtf.cond(
    pred, lambda: mtf.reduce_sum(x * w, reduced_dim=A), lambda: mtf.reduce_max(x, reduced_dim=A)
  )


def _weights_in_loop(x, w):
  """A weight that each iteration uses: its gradient is a sum over processors and iterations."""
  return _loop(lambda i, s: [mtf.sin(mtf.einsum([s, w], [A]) + x)], 3, maximum_iterations=3)(x)


def _recomputed_body(x, w):
  return _loop(lambda i, s: [mtf.recompute_grad(lambda v: mtf.sin(v * w) * v, [s])], 3)(x)


def _halve_until_small(x):
  """A condition that needs all processors."""
  return mtf.while_loop(
    lambda v: mtf.greater(mtf.reduce_sum(mtf.abs(v)), 1.0), lambda v: [v * 0.5], [x]
  )


def _halved_until_small(x):
  while np.abs(x).sum() > 1:
    x = x * 0.5
  return x


def _assign_in_loop(x):
  v = mtf.get_variable(x.mesh, "v", x.shape, initializer=tf.zeros_initializer(), trainable=False)

  def body(i, s):
    mtf.assign_add(v, x)
    return [s + mtf.read_variable(v.operation)]

  y = _loop(body, 3)(mtf.zeros_like(x))
  return [*y, mtf.read_variable(v.operation)]


def _training_step(x):
  """Gradients, loss and outputs of four microbatches of a linear model."""
  graph = x.graph
  graph.make_variables_untrainable(list(graph.trainable_variables))
  w = mtf.get_variable(x.mesh, "w", [C], initializer=tf.constant_initializer(0.5))

  def model(features):
    y = mtf.einsum([features["x"], w], reduced_dims=[C])
    return {"loss": mtf.reduce_sum(mtf.square(y)), "y": y, "mean": mtf.reduce_mean(y)}

  grads, outputs = mtf.serialize_training_step({"x": x}, model, B, 4)
  graph.make_variables_untrainable(list(graph.trainable_variables))
  return [grads[0], outputs["loss"], outputs["y"], outputs["mean"]]


def _expected_training_step(x):
  y = 0.5 * x.sum(1)
  return [2 * (y[:, None] * x).sum(0), (y * y).sum(), y, 4 * y.mean()]


DESCRIPTORS = [
  op(
    "while_loop",
    _loop(lambda i, x: [x * 0.5 + mtf.to_float(i)], 5),
    _repeat(lambda i, x: x * 0.5 + i, 5),
    AB,
  ),
  op(
    "while_loop_never",
    _loop(lambda i, x: [x * 2.0], 0),
    lambda x: x,
    AB,
  ),
  op(
    "while_loop_pending_state",
    lambda x, s: _loop(lambda i, s: [mtf.reduce_sum(x * s, reduced_dim=A)], 3)(s),
    lambda x, s: _repeat(lambda i, s: (x * s).sum(0), 3)(s),
    AB,
    "b:8",
  ),
  op(
    "while_loop_pending_input",
    lambda x: _loop(lambda i, s: [s * 2.0], 2)(mtf.reduce_sum(x, reduced_dim=A)),
    lambda x: 4 * x.sum(0),
    AB,
  ),
  op(
    "while_loop_accumulator",
    lambda x: mtf.while_loop(
      lambda i: mtf.less(i, 3),
      lambda i: [i + 1, mtf.reduce_sum(x * (mtf.to_float(i) + 1.0), reduced_dim=A)],
      [_counter(x)],
      has_accumulators=True,
    )[1],
    lambda x: 6 * x.sum(0),
    AB,
  ),
  op(
    "while_loop_shift",
    _loop(lambda i, x: [mtf.shift(x, 1, B, True)], 3),
    lambda x: np.roll(x, 3, 1),
    AB,
  ),
  op(
    "while_loop_gather",
    lambda x, w: _loop(lambda i, s: [s + mtf.gather(w, i, C)], 4)(x),
    lambda x, w: x + w[:4].sum(0),
    AB,
    "c:12 b:8",
    together="b:8 c:12",
  ),
  op("while_loop_nested", _nested_loop, lambda x: x + 7, AB),
  op(
    "while_loop_reduced_condition",
    _halve_until_small,
    _halved_until_small,
    AB,
  ),
  op("while_loop_assigns", _assign_in_loop, lambda x: [6 * x, 3 * x], AB, differentiable=False),
  op(
    "while_loop_random",
    lambda x: _loop(lambda i, s: [s * 2.0 + mtf.random_uniform(x.mesh, x.shape)], 3)(x),
    ONE_DEVICE,
    AB,
  ),
  op(
    "while_loop_random_nested",
    lambda x: _loop(
      lambda i, s: _loop(lambda j, t: [t * 2.0 + mtf.random_uniform(x.mesh, x.shape)], 2)(s), 2
    )(x),
    ONE_DEVICE,
    AB,
  ),
  op(
    "while_loop_maximum_iterations",
    lambda x: mtf.while_loop(
      lambda v: mtf.greater(mtf.reduce_max(v), -1e9), lambda v: [v + 1.0], [x], maximum_iterations=4
    ),
    lambda x: x + 4,
    AB,
    differentiable=False,
  ),
  op(
    "while_loop_num_loop_vars",
    lambda x, y: mtf.while_loop(
      lambda v, w: mtf.less(mtf.reduce_sum(w), -1e9), lambda v, w: [v, w], [x, y], num_loop_vars=1
    ),
    lambda x, y: [x],
    AB,
    AB,
    differentiable=False,
  ),
  op("while_loop_gathered_steps", _gathered_steps, _gathered_steps_in_numpy, ABC, AB),
  op(
    "while_loop_of_data",
    lambda x, w: _power_until(x, w, 100.0),
    lambda x, w: _power_until_in_numpy(x, w, 100.0),
    T(AB, 0.5, 1.0),
    T("b:8", 1.0, 1.5),
  ),
  op(
    "while_loop_weights",
    _weights_in_loop,
    lambda x, w: _repeat(lambda i, s: np.sin(s * w.sum(1) + x), 3)(x),
    "a:4",
    T(AB, -0.2, 0.2),
  ),
  op(
    "while_loop_dropout",
    lambda x: _loop(lambda i, s: [mtf.dropout(s, True, rate=0.5) * s], 3)(x),
    ONE_DEVICE,
    AB,
  ),
  op(
    "while_loop_recomputed",
    _recomputed_body,
    lambda x, w: _repeat(lambda i, s: np.sin(s * w) * s, 3)(x),
    AB,
    "b:8",
  ),
  op(
    "while_loop_in_recomputation",
    lambda x, w: mtf.recompute_grad(lambda v: _loop(lambda i, s: [mtf.sin(s * w)], 3)(v)[0], [x]),
    lambda x, w: _repeat(lambda i, s: np.sin(s * w), 3)(x),
    AB,
    "b:8",
  ),
  op("cond_true", _sums_in_branches, lambda x, w: (x * w).sum(0), T(AB, 0.0, 1.0), AB),
  op("cond_false", _sums_in_branches, lambda x, w: x.max(0), T(AB, -2.0, 0.0), AB),
  op("cond_in_loop", _loop_of_conditions, _loop_of_conditions_in_numpy, T(AB, 0.5, 1.0), "b:8"),
  op(
    "cond_constant",
    lambda x: mtf.cond(mtf.less(_counter(x), 1), lambda: [x * 2.0, x], lambda: (x, x)),
    lambda x: [2 * x, x],
    AB,
  ),
  op(
    "recompute_grad_dropout",
    lambda x: mtf.recompute_grad(lambda v: mtf.dropout(v, True, rate=0.5) * v, [x]),
    ONE_DEVICE,
    AB,
  ),
  op(
    "recompute_grad_variable",
    lambda x: mtf.recompute_grad(
      lambda v: mtf.einsum(
        [
          v,
          mtf.get_variable(
            x.mesh, "w", [B, C], initializer=tf.constant_initializer(0.25), trainable=False
          ),
        ],
        [A, C],
      ),
      [x],
    ),
    lambda x: np.repeat(0.25 * x.sum(1)[:, None], 12, 1),
    AB,
    together=ABC,
  ),
  op(
    "training_step",
    _training_step,
    _expected_training_step,
    "b:8 c:12",
    differentiable=False,
    illegal=lambda layout: not layout.suits(mtf.convert_to_shape("b:2")),
  ),
  op(
    "custom_gradient",
    _custom,
    lambda x, y: x * y,
    AB,
    AB,
    gradient=lambda xs, dys: [10 * dys[0], xs[0] * dys[0]],
  ),
  op(
    "recompute_grad",
    lambda x: mtf.recompute_grad(lambda v: mtf.square(v) + v, [x]),
    lambda x: x * x + x,
    AB,
  ),
  op(
    "recompute_grad_external",
    lambda x, w: mtf.recompute_grad(lambda v: mtf.tanh(mtf.einsum([v, w], [A, C])), [x]),
    lambda x, w: np.tanh(x @ w),
    AB,
    BC,
    together=ABC,
  ),
  op(
    "recompute_grad_twice",
    lambda x: mtf.recompute_grad(
      lambda v: mtf.recompute_grad(lambda u: mtf.sin(u) * u, [v]) * v, [x]
    ),
    lambda x: np.sin(x) * x * x,
    AB,
  ),
  op(
    "recompute_grad_pending",
    lambda x: mtf.recompute_grad(lambda v: mtf.reduce_sum(mtf.square(v), reduced_dim=A), [x]),
    lambda x: (x * x).sum(0),
    AB,
  ),
  op("depend", lambda x, y: mtf.depend(x, [y]), lambda x, y: x, AB, AB),
  op("print", lambda x: mtf.Print(x, [x * 0.0], "zeros", summarize=1), lambda x: x, "a:4"),
  op(
    "scalar_summary",
    lambda x: mtf.scalar_summary("loss", mtf.reduce_mean(x)).outputs[0],
    lambda x: x.mean(),
    AB,
  ),
  op(
    "microbatches",
    _microbatches,
    lambda x: [(x * x).sum(), x * x],
    "b:8 c:12",
    differentiable=False,
    illegal=lambda layout: not layout.suits(mtf.convert_to_shape("b:4")),
  ),
  op(
    "gradient_of_gradient",
    lambda x: mtf.gradients([mtf.reduce_sum(mtf.square(x) * x)], [x])[0],
    lambda x: 3 * x * x,
    T(AB, 0.5, 2.0),
  ),
]
