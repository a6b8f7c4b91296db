"""Optimizers against NumPy, over several steps, on drawn layouts and in all modes.

A long run: `MTF_CONFORMANCE_DRAWS=30 pytest tests/optimize/test_optimizers.py`.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import optimize
from mesh_tensorflow.numerics import padding
from tests.conformance.framework import (
  MODE_PAIRS,
  MODES,
  Layout,
  draw_layouts,
  draw_uneven_layouts,
  graph_optimizer,
  make_impl,
  op,
)
from tests.kinds import kept
from tests.optimize import reference

STEPS = 3
TOLERANCE = 2e-5
DRAWS = int(os.environ.get("MTF_CONFORMANCE_DRAWS", "2"))


@dataclasses.dataclass(frozen=True)
class Case:
  name: str
  make: Callable[[], optimize.Optimizer]
  reference: Callable[[], Any]
  dims: str = "a:8 b:16"
  initial_scale: float = 1.0
  # Else in one mode of each implementation only: what makes many operations is costly to trace for
  # each device of placement, and to run in a thread for each.
  in_all_modes: bool = True


def rising(step, total_steps=None):
  """A schedule of the step, also with the signature of a factor of a product."""
  del total_steps
  return mtf.to_float(step) * 0.1 + 0.2


def rising_reference(t):
  return 0.1 * t + 0.2


def default_rate(t):
  return min((t + 1) ** -0.5, 0.01)


def adafactor(**kwargs):
  return lambda: optimize.AdafactorOptimizer(min_dim_size_to_factor=4, **kwargs)


# Fewer products than by default: they are most of what the graphs of this test have.
def muon(*args, **kwargs):
  return lambda: optimize.MuonOptimizer(*args, num_iterations=2, **kwargs)


def muon_rule(*args, **kwargs):
  return lambda: reference.Muon(*args, num_iterations=2, **kwargs)


def original(rows, columns):
  return max(1, columns / rows) ** 0.5


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
  # Of one dimension that is not stacked: not factored, but a scale for each index of the others.
  Case(
    "adafactor_stacked_vectors",
    adafactor(beta1=0.5, learning_rate=0.1, stacked_dim_names=["a", "c"]),
    lambda: reference.Adafactor(lambda t: 0.1, stacked=(0, 2), beta1=0.5),
    "a:8 b:16 c:4",
  ),
  # The root mean square of the weight counts as at least epsilon2.
  Case(
    "adafactor_small_weight",
    adafactor(learning_rate=0.1),
    lambda: reference.Adafactor(lambda t: 0.1, factored=(1, 0)),
    initial_scale=1e-5,
  ),
  Case(
    "adafactor_excluded",
    adafactor(exclude_from_parameter_scale=["nothing", "_exclu"]),
    lambda: reference.Adafactor(default_rate, factored=(1, 0), scale=False),
  ),
  Case(
    "adafactor_adam_decay",
    lambda: optimize.AdafactorOptimizer(decay_rate=optimize.adafactor_decay_rate_adam(0.9)),
    lambda: reference.Adafactor(decay=lambda t: 0.9 * (1 - 0.9**t) / (1 - 0.9 ** (t + 1))),
  ),
  Case(
    "adafactor_multi",
    lambda: optimize.AdafactorWithMultiLRSchedule(
      ["nothing", "multi/w$", "."],
      [[9.0], [0.5, rising], [9.0]],
      learning_rate=9.0,
      min_dim_size_to_factor=4,
    ),
    lambda: reference.Adafactor(lambda t: 0.5 * rising_reference(t), factored=(1, 0)),
  ),
  Case(
    "adafactor_multi_normal",
    lambda: optimize.AdafactorWithMultiLRSchedule(
      ["nothing"], [[9.0]], min_dim_size_to_factor=4, beta1=0.9
    ),
    lambda: reference.Adafactor(factored=(1, 0), beta1=0.9),
  ),
  Case(
    "adam_multi",
    lambda: optimize.AdamWithMultiLRSchedule(
      ["nothing", "multi/w$", "."],
      [[9.0], [0.5, rising], [9.0]],
      learning_rate=9.0,
      weight_decay_rate=0.1,
    ),
    lambda: reference.Adam(lambda t: 0.5 * rising_reference(t), 0.1),
  ),
  Case(
    "adam_excluded",
    lambda: optimize.AdamWeightDecayOptimizer(0.01, 0.1, exclude_from_weight_decay=["excl.d.d/w"]),
    lambda: reference.Adam(0.01),
  ),
  # Sizes that three processors can share.
  Case("adafactor_thirds", adafactor(), lambda: reference.Adafactor(factored=(0, 1)), "e:12 f:6"),
  Case(
    "momentum_schedule",
    lambda: optimize.MomentumOptimizer(rising, 0.5),
    lambda: reference.Momentum(rising_reference, 0.5),
    "b:16 c:4",
  ),
  Case("adamw", lambda: optimize.AdamWOptimizer(0.01), lambda: reference.AdamW(0.01)),
  Case(
    "adamw_options",
    lambda: optimize.AdamWOptimizer(rising, 0.1, beta_1=0.0, beta_2=0.95, epsilon=1e-3),
    lambda: reference.AdamW(rising_reference, 0.1, 0.0, 0.95, 1e-3),
    "b:16 c:4",
  ),
  Case(
    "adamw_uncorrected",
    lambda: optimize.AdamWOptimizer(
      0.01, 0.1, bias_correction=False, exclude_from_weight_decay=["uncorrected"]
    ),
    lambda: reference.AdamW(0.01, 0.0, bias_correction=False),
  ),
  Case("lion", lambda: optimize.LionOptimizer(0.01), lambda: reference.Lion(0.01)),
  Case(
    "lion_options",
    lambda: optimize.LionOptimizer(rising, 0.1, beta_1=0.5, beta_2=0.75),
    lambda: reference.Lion(rising_reference, 0.1, 0.5, 0.75),
  ),
  Case(
    "muon",
    lambda: optimize.MuonOptimizer(0.01),
    lambda: reference.Muon(0.01, reference.one_matrix()),
  ),
  Case(
    "muon_tall",
    muon(rising, 0.1, momentum=0.5, nesterov=False, adjust_learning_rate="original"),
    muon_rule(rising_reference, reference.one_matrix(), 0.1, 0.5, False, original),
    "b:16 c:4",
    in_all_modes=False,
  ),
  Case(
    "muon_square",
    muon(0.01, 0.0, coefficients=[1.5, -0.5, 0.0], epsilon=0.5),
    muon_rule(0.01, reference.one_matrix(), 0.0, coefficients=(1.5, -0.5, 0.0), epsilon=0.5),
    "a:8 d:8",
    in_all_modes=False,
  ),
  # As the weights of heads: the model on one side, all else on the other.
  Case(
    "muon_heads",
    muon(0.01),
    muon_rule(0.01, reference.one_matrix()),
    "d_model:8 a:8 c:4",
    in_all_modes=False,
  ),
  Case(
    "muon_heads_out",
    muon(0.01),
    muon_rule(0.01, reference.one_matrix(2)),
    "a:8 c:4 d_model:16",
    in_all_modes=False,
  ),
  Case(
    "muon_experts", muon(0.01), muon_rule(0.01, reference.stacked_matrices()), "experts:4 a:8 b:16"
  ),
  # By its name: for each index of c a matrix, whose rows stand last.
  Case(
    "muon_named",
    muon(
      0.01,
      adjust_learning_rate="original",
      learning_rate_factor=2.0,
      matrices=[("nothing", ["x"], ["y"]), ("named/w", ["b"], ["a"])],
    ),
    muon_rule(0.02, reference.stacked_matrices(1), scale=lambda a, b: original(b, a)),
    "a:8 c:4 b:16",
    in_all_modes=False,
  ),
  Case("muon_vector", muon(0.01), lambda: reference.AdamW(0.01), "b:16"),
  Case(
    "muon_excluded",
    muon(rising, others=optimize.LionOptimizer, exclude_from_muon=["excluded/"]),
    lambda: reference.Lion(rising_reference),
  ),
]

_WEIGHTS = [op(c.name, lambda x: x, lambda x: x, c.dims) for c in CASES]
LAYOUTS = [
  Layout("r:1", ""),
  *draw_layouts("optimizers", _WEIGHTS, DRAWS),
  *draw_uneven_layouts("optimizers", _WEIGHTS, DRAWS),
]


def data(case):
  """Shape, initial weight, and a gradient for each step."""
  shape = mtf.convert_to_shape(case.dims)
  rng = np.random.default_rng(zlib.crc32(case.name.encode()))
  sizes = shape.to_integer_list
  draw = [np.asarray(rng.normal(size=sizes), np.float32) for _ in range(STEPS + 1)]
  initial = draw[0] * np.float32(case.initial_scale)
  return shape, initial, [g * np.float32(10.0**-i) for i, g in enumerate(draw[1:])]


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


# With TensorFlow's graph optimizer in all modes, or if a number of layouts is given; else in turns.
GRAPH_OPTIMIZER = LAYOUTS[1]
RUNS = [
  (layout, mode)
  for i, layout in enumerate(LAYOUTS)
  for mode in MODES
  if layout is GRAPH_OPTIMIZER or "MTF_CONFORMANCE_DRAWS" in os.environ or mode in MODE_PAIRS[i % 2]
]


# In `make test` one layout in all modes; traced is each optimizer in one of them, in turns.
USUAL = [(layout, mode) for layout, mode in RUNS if layout is GRAPH_OPTIMIZER]
TRACED = [mode for mode in MODES if mode.endswith("function")]


def chosen(layout, mode):
  """The cases that are run on a layout in a mode."""
  if "MTF_CONFORMANCE_DRAWS" in os.environ:
    return [c for c in CASES if layout.suits(data(c)[0])]
  found = [c for c in CASES if c.in_all_modes or mode in ("placement_eager", "simd_function")]
  if (layout, mode) in USUAL and mode in TRACED:
    both = [c for c in CASES if c.in_all_modes]
    found = [c for c in found if c not in both or both.index(c) % 2 == TRACED.index(mode)]
  return [c for c in found if layout.suits(data(c)[0])]


@pytest.mark.parametrize(("layout", "mode"), kept(RUNS, USUAL), ids=str)
@pytest.mark.slow
def test_equals_numpy(layout, mode, cpu_devices):
  kind, execution = mode.split("_")
  cases = chosen(layout, mode)
  assert cases
  impl = make_impl(kind, layout, cpu_devices)
  fill = float("nan") if layout.is_uneven else 0.0
  with graph_optimizer(layout is GRAPH_OPTIMIZER), padding.filled_with(fill):
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
      assert stored.numpy().shape == np.shape(value), name
      assert stored.master_dtype == stored.slice_dtype == tf.float32
      assert not stored.trainable
      np.testing.assert_allclose(
        stored.numpy(), value, rtol=TOLERANCE, atol=1e-6 * np.abs(value).max(), err_msg=name
      )
  assert set(impl.variable_store.names) == expected_names | {"adam_updates"}
  # Once for all weights of a graph.
  assert impl.variable_store["adam_updates"].numpy() == STEPS


def test_every_optimizer_is_split_by_many_layouts():
  """Layouts that do not suit a weight are left out; these must not be too many."""
  for case in CASES:
    shape = data(case)[0]
    split = [l for l in LAYOUTS if l.suits(shape) and any(l.splits(d.name) for d in shape)]
    assert len(split) >= max(1, DRAWS // 3) or not shape.ndims, case.name
