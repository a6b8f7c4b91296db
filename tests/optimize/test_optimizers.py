"""Optimizers against NumPy, over several steps, on several layouts and in all modes."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import optimize
from tests.conformance.framework import MODES, Layout, graph_optimizer, make_impl
from tests.optimize import reference

STEPS = 3
TOLERANCE = 2e-5
LAYOUTS = [
  Layout("r:1", ""),
  Layout("r:2,s:2", "a:r,b:s"),
  Layout("r:2,s:4", "b:r,a:s"),
  Layout("r:2,s:2,t:2", "c:t,b:r"),
  Layout("r:2,s:2", "a:s,c:r"),
]


@dataclasses.dataclass(frozen=True)
class Case:
  name: str
  make: Callable[[], optimize.Optimizer]
  reference: Callable[[], Any]
  dims: str = "a:8 b:16"


def adafactor(**kwargs):
  return lambda: optimize.AdafactorOptimizer(min_dim_size_to_factor=4, **kwargs)


CASES = [
  Case("sgd", lambda: optimize.SgdOptimizer(0.1), lambda: reference.Sgd(0.1)),
  Case(
    "momentum", lambda: optimize.MomentumOptimizer(0.1, 0.9), lambda: reference.Momentum(0.1, 0.9)
  ),
  Case("adam", lambda: optimize.AdamWeightDecayOptimizer(0.01), lambda: reference.Adam(0.01)),
  Case(
    "adam_decay",
    lambda: optimize.AdamWeightDecayOptimizer(0.01, 0.1, beta_1=0.8, beta_2=0.9, epsilon=1e-3),
    lambda: reference.Adam(0.01, 0.1, 0.8, 0.9, 1e-3),
  ),
  Case("adafactor", adafactor(), lambda: reference.Adafactor(factored=(1, 0))),
  Case("adafactor_tie", adafactor(), lambda: reference.Adafactor(factored=(0, 1)), "a:8 b:8"),
  Case(
    "adafactor_large_first", adafactor(), lambda: reference.Adafactor(factored=(0, 1)), "b:16 a:8"
  ),
  Case(
    "adafactor_rank_3", adafactor(), lambda: reference.Adafactor(factored=(2, 0)), "a:8 c:4 b:16"
  ),
  Case("adafactor_vector", adafactor(), lambda: reference.Adafactor(), "b:16"),
  Case("adafactor_scalar", adafactor(), lambda: reference.Adafactor(), ""),
  Case("adafactor_not_factored", adafactor(factored=False), lambda: reference.Adafactor()),
  Case(
    "adafactor_stacked",
    adafactor(stacked_dim_names=["b"], learning_rate=0.1, clipping_threshold=0.5),
    lambda: reference.Adafactor(lambda t: 0.1, factored=(0, 2), stacked=(1,), threshold=0.5),
    "a:8 b:16 c:4",
  ),
  Case(
    "adafactor_plain",
    adafactor(multiply_by_parameter_scale=False, clipping_threshold=None, decay_rate=0.7),
    lambda: reference.Adafactor(factored=(1, 0), scale=False, threshold=None, decay=lambda t: 0.7),
  ),
  Case(
    "adafactor_momentum",
    adafactor(beta1=0.9, learning_rate=0.1),
    lambda: reference.Adafactor(lambda t: 0.1, factored=(1, 0), beta1=0.9),
  ),
]


def data(case):
  """Shape, initial weight, and a gradient for each step."""
  shape = mtf.convert_to_shape(case.dims)
  rng = np.random.default_rng(zlib.crc32(case.name.encode()))
  sizes = shape.to_integer_list
  draw = [np.asarray(rng.normal(size=sizes), np.float32) for _ in range(STEPS + 1)]
  return shape, draw[0], [g * np.float32(10.0**-i) for i, g in enumerate(draw[1:])]


def train(impl, cases, traced):
  """Runs all cases in one program, one step for each gradient; the global step counts them."""
  optimizers = {case.name: case.make() for case in cases}

  def step(grads, count):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "m")
    graph.global_step = mtf.import_tf_tensor(mesh, count, [])
    for case in cases:
      shape, initial, _ = data(case)
      with mtf.variable_scope(case.name, graph=graph):
        w = mtf.get_variable(mesh, "w", shape, initializer=initial)
      # The gradient of this sum is the given one.
      loss = mtf.reduce_sum(w * mtf.import_tf_tensor(mesh, grads[case.name], shape))
      updates = optimizers[case.name].minimize(loss, [w.operation])
      assert updates and all(op in graph.operations for op in updates)
    lowering = mtf.Lowering(graph, {mesh: impl})
    return lowering.export_to_tf_tensor(loss)

  def run(grads, count):
    return impl.run(step, [grads, count])

  if traced:
    run = tf.function(run, autograph=False)
  for i in range(STEPS):
    run({case.name: tf.constant(data(case)[2][i]) for case in cases}, tf.constant(i, tf.int64))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_equals_numpy(mode, layout, cpu_devices):
  kind, execution = mode.split("_")
  cases = [case for case in CASES if layout.suits(data(case)[0])]
  assert len(cases) >= len(CASES) - 2
  impl = make_impl(kind, layout, cpu_devices)
  with graph_optimizer(layout is LAYOUTS[1]):
    train(impl, cases, execution == "function")
  expected_names = set()
  for case in cases:
    _, initial, grads = data(case)
    expected = case.reference()
    w = np.asarray(initial, np.float64)
    for g in grads:
      w = expected.step(w, np.asarray(g, np.float64))
    # The change of the weight, so that a wrong small one shows.
    np.testing.assert_allclose(
      impl.variable_store[f"{case.name}/w"].numpy() - initial,
      w - initial,
      rtol=TOLERANCE,
      atol=TOLERANCE * np.abs(w - initial).max() + 2e-7 * np.abs(initial).max(),
      err_msg=case.name,
    )
    slots = {f"{case.name}/w{name}": value for name, value in expected.slots().items()}
    expected_names |= {f"{case.name}/w", *slots}
    for name, value in slots.items():
      stored = impl.variable_store[name]
      assert stored.master_dtype == stored.slice_dtype == tf.float32
      assert not stored.trainable
      np.testing.assert_allclose(
        stored.numpy(), value, rtol=TOLERANCE, atol=1e-6 * np.abs(value).max(), err_msg=name
      )
  assert set(impl.variable_store.names) == expected_names
