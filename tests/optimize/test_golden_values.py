"""Optimizers by figures: slots of each, first steps by hand, defaults."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import optimize

FLOAT32 = mtf.VariableDType(tf.float32, tf.float32, tf.float32)
SHORT = mtf.VariableDType(tf.bfloat16, tf.float32, tf.bfloat16)
NAME = "encoder/block_000/layer_000/SelfAttention/q"
MATRIX, ROWS, COLUMNS = "d_model:256 heads:512", "d_model:256", "heads:512"


def make_impl():
  return mtf.placement_mesh_impl.PlacementMeshImpl("all:1", "", [""])


def train(impl, optimizer, initial, gradients, dims="", dtype=FLOAT32):
  """The weight after each step; the global step counts them from 0."""
  found = []
  for step, gradient in enumerate(gradients):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "m")
    graph.global_step = mtf.constant(mesh, step, dtype=tf.int64)
    w = mtf.get_variable(
      mesh, "w", dims, dtype=dtype, initializer=mtf.initializers.Constant(initial)
    )
    g = mtf.import_tf_tensor(mesh, tf.cast(gradient, w.dtype), dims)
    optimizer.apply_grads([g], [w.operation])
    mtf.Lowering(graph, {mesh: impl})
    found.append(impl.variable_store["w"].numpy())
  return found


def adafactor(cls="AdafactorOptimizer", **kwargs):
  return lambda: getattr(optimize, cls)(**kwargs)


def adam(cls="AdamWeightDecayOptimizer", **kwargs):
  return lambda: getattr(optimize, cls)(learning_rate=0.1, **kwargs)


ADAM_SLOTS = {"/adam_m": (MATRIX, FLOAT32), "/adam_v": (MATRIX, FLOAT32)}
FACTORED = {"_slot_vr": (ROWS, FLOAT32), "_slot_vc": (COLUMNS, FLOAT32)}
NOT_FACTORED = {"_slot_v": (MATRIX, FLOAT32)}
MOMENTUM = {"_slot_m": (MATRIX, FLOAT32)}


@pytest.mark.parametrize(
  "make, slots",
  [
    (lambda: optimize.SgdOptimizer(0.1), {}),
    (lambda: optimize.MomentumOptimizer(0.1, 0.9), {"_momentum_v": (MATRIX, SHORT)}),
    (adam(), ADAM_SLOTS),
    (adam(weight_decay_rate=0.1), ADAM_SLOTS),
    (adam("AdamWithMultiLRSchedule", variable_search=["q"], alt_lr_schedules=[[0.5]]), ADAM_SLOTS),
    (adafactor(), FACTORED),
    (adafactor(beta1=0.9), {**FACTORED, **MOMENTUM}),
    (adafactor(factored=False), NOT_FACTORED),
    (adafactor(min_dim_size_to_factor=257), NOT_FACTORED),
    (adafactor(stacked_dim_names=["heads"]), NOT_FACTORED),
    (adafactor(factored=False, beta1=0.9), {**NOT_FACTORED, **MOMENTUM}),
    (
      adafactor("AdafactorWithMultiLRSchedule", variable_search=["q"], alt_lr_schedules=[[0.5]]),
      FACTORED,
    ),
  ],
)
def test_slots(make, slots):
  """Names, shapes, dtypes and order, of a weight with a bfloat16 master."""
  mesh = mtf.Mesh(mtf.Graph(), "m")
  mesh.graph.global_step = mtf.constant(mesh, 0, dtype=tf.int64)
  w = mtf.get_variable(mesh, NAME, MATRIX, dtype=SHORT)
  make().minimize(mtf.cast(mtf.reduce_sum(w), tf.float32))
  _, *found = mesh.graph.all_variables
  assert [v.full_name for v in found] == [NAME + name for name in slots]
  for v, (dims, dtype) in zip(found, slots.values()):
    assert (v.shape, v.dtype) == (mtf.convert_to_shape(dims), dtype)
    assert not v.trainable
  assert mesh.graph.trainable_variables == [w.operation]


def test_sgd():
  assert train(make_impl(), optimize.SgdOptimizer(0.5), 2.0, [1.0, -3.0]) == [1.5, 3.0]


@pytest.mark.parametrize("dtype", [FLOAT32, SHORT, mtf.VariableDType(tf.bfloat16)])
def test_momentum_uses_the_new_velocity(dtype):
  """v: 1, 0.5, 1.25. With the old one the weight would lag by a step."""
  optimizer = optimize.MomentumOptimizer(1.0, 0.5)
  found = train(make_impl(), optimizer, 8.0, [1.0, 0.0, 1.0], dtype=dtype)
  assert [float(w) for w in found] == [7.0, 6.5, 5.25]


def test_adam_has_no_bias_correction():
  """m = 0.05, v = 0.00025: the first step is 0.05 / sqrt(0.00025) = 3.162 rates long."""
  impl = make_impl()
  first, second = train(impl, optimize.AdamWeightDecayOptimizer(0.01), 1.0, [0.5, 0.5])
  np.testing.assert_allclose(first, 1.0 - 0.01 * 0.05 / (0.00025**0.5 + 1e-6), rtol=1e-6)
  np.testing.assert_allclose(impl.variable_store["w/adam_m"].numpy(), 0.095, rtol=1e-5)
  # TensorFlow's fused update takes 1 - beta_2 in float32: 1.3e-5 off.
  np.testing.assert_allclose(impl.variable_store["w/adam_v"].numpy(), 0.00049975, rtol=2e-5)
  np.testing.assert_allclose(second, first - 0.01 * 0.095 / (0.00049975**0.5 + 1e-6), rtol=1e-5)


def test_weight_decay_is_decoupled():
  """It is not divided by sqrt(v), and not in the averages."""
  impl = make_impl()
  (w,) = train(impl, optimize.AdamWeightDecayOptimizer(0.1, weight_decay_rate=0.5), 4.0, [0.0])
  np.testing.assert_allclose(w, 4.0 - 0.1 * 0.5 * 4.0, rtol=1e-6)
  assert impl.variable_store["w/adam_m"].numpy() == 0.0


def test_first_slots_of_adafactor_are_the_squared_gradient():
  """The default decay rate is 0 at step 0, 0.42565 at step 1."""
  impl = make_impl()
  g = np.array([0.5, -2.0, 0.0, 1.0], "f")
  train(impl, optimize.AdafactorOptimizer(), 1.0, [g], "a:4")
  np.testing.assert_allclose(impl.variable_store["w_slot_v"].numpy(), g**2 + 1e-30, rtol=1e-6)
  impl = make_impl()
  train(impl, optimize.AdafactorOptimizer(), 1.0, [g, 0.0 * g], "a:4")
  np.testing.assert_allclose(
    impl.variable_store["w_slot_v"].numpy(), 0.42565 * g**2, rtol=2e-5, atol=1e-12
  )


def test_default_step_of_adafactor_is_a_hundredth_of_the_weight():
  (w,) = train(make_impl(), optimize.AdafactorOptimizer(), 2.0, [0.3])
  np.testing.assert_allclose(w, 2.0 - 0.01 * 2.0, rtol=1e-6)
  (w,) = train(make_impl(), optimize.AdafactorOptimizer(), 0.0, [0.3])
  np.testing.assert_allclose(w, -0.01 * 1e-3, rtol=1e-6)
  unscaled = optimize.AdafactorOptimizer(multiply_by_parameter_scale=False)
  (w,) = train(make_impl(), unscaled, 2.0, [0.3])
  np.testing.assert_allclose(w, 2.0 - 0.01 * 0.05, rtol=1e-6)


def test_clipping_is_over_all_of_the_weight_also_what_is_stacked():
  """v = g ** 2 / 4, so x is 2 or -2 everywhere: RMS 2, which is clipped to 0.5."""
  optimizer = optimize.AdafactorOptimizer(
    learning_rate=1.0,
    decay_rate=0.75,
    multiply_by_parameter_scale=False,
    stacked_dim_names=["a"],
    clipping_threshold=0.5,
  )
  (w,) = train(make_impl(), optimizer, 0.0, [np.array([1.0, -10.0, 1.0, 1.0], "f")], "a:4")
  np.testing.assert_allclose(w, [-0.5, 0.5, -0.5, -0.5], rtol=1e-5)


@pytest.mark.parametrize("name", ["AdafactorWithMultiLRSchedule", "AdamWithMultiLRSchedule"])
@pytest.mark.parametrize("lists", [(None, None), ([], []), (["w"], None), (None, [[0.5]])])
def test_without_a_schedule_it_is_the_parent(name, lists):
  parent = getattr(optimize, name).__mro__[2]  # Behind the mixin of both.
  own = getattr(optimize, name)(*lists, learning_rate=0.25)
  found = [train(make_impl(), o, 2.0, [0.3, 0.1]) for o in (own, parent(learning_rate=0.25))]
  assert found[0] == found[1]


def test_total_steps_of_schedules_are_524288_unless_bound():
  (rate,) = optimize.compute_lr_for_step([[lambda step, total: total]], 0.1)
  assert rate(0) == 524288
