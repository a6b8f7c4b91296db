"""The learning rate of BERT, clipping, and which variables are optimized."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.bert import optimization
from mesh_tensorflow.numerics import initializers
from tests.bert import models


def _step(impl, **options):
  """w [4] of a loss whose gradient is (3, 4, 0, 0), and a bias."""

  @mtf.function(impl, [mtf.TensorSpec([("x", 4)])])
  def run(x):
    w = mtf.get_variable(x.mesh, "w", x.shape, initializer=initializers.Ones())
    b = mtf.get_variable(x.mesh, "b/bias", [], initializer=initializers.Ones())
    loss = mtf.reduce_sum(w * x) + 0.0 * b
    rate, _ = optimization.create_optimizer(loss, **options)
    mtf.optimize.count_global_step(x.graph)
    return rate if rate is not None else mtf.zeros(x.mesh, mtf.Shape([]))

  return lambda: float(run(np.array([3, 4, 0, 0], np.float32)))


def test_learning_rate_rises_then_falls(cpu_devices):
  step = _step(models.one_device(cpu_devices), init_lr=2.0, num_train_steps=10, num_warmup_steps=4)
  rates = [step() for _ in range(12)]
  # The decay counts from step 0, so the rate falls where the warm-up ends.
  wanted = [0, 0.5, 1.0, 1.5, 1.2, 1.0, 0.8, 0.6, 0.4, 0.2, 0, 0]
  np.testing.assert_allclose(rates, wanted, atol=1e-6)


def test_adam_decays_weights_but_no_biases(cpu_devices):
  impl = models.one_device(cpu_devices)
  _step(impl, init_lr=0.1, num_train_steps=10, num_warmup_steps=0)()
  g = np.array([3, 4, 0, 0]) / 5.0  # Clipped to a norm of 1.
  m, v = 0.1 * g, 0.001 * g**2
  wanted = 1 - 0.1 * (m / (np.sqrt(v) + 1e-6) + 0.01)
  np.testing.assert_allclose(impl.variable_store["w"].numpy(), wanted, rtol=1e-5)
  assert impl.variable_store["b/bias"].numpy() == 1.0
  assert {"w/adam_m", "w/adam_v"} <= set(impl.variable_store.names)


def test_large_variables_stay_as_they_are_and_are_named_once(cpu_devices, caplog):
  optimization._warn_once.cache_clear()
  options = dict(init_lr=0.1, num_train_steps=9, num_warmup_steps=0, max_optimized_variable_size=3)
  for _ in range(2):
    impl = models.one_device(cpu_devices)
    _step(impl, **options)()
  assert [r.getMessage() for r in caplog.records if r.name == "absl"] == [
    "w [4] is not trained: it has more elements than --max_optimized_variable_size=3; 0 trains all "
    "variables"
  ]
  np.testing.assert_array_equal(impl.variable_store["w"].numpy(), np.ones(4))
  assert "w/adam_m" not in impl.variable_store


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"init_lr": None}, "adam needs a learning_rate"),
    ({"init_lr": 1.0, "optimizer": "sgd"}, "'sgd' is unknown; use adam or adafactor"),
    ({"init_lr": 1.0, "num_train_steps": 0}, "num_train_steps"),
    ({"init_lr": 1.0, "max_optimized_variable_size": 0.5}, "leaves none of the 2 variables"),
  ],
)
def test_refused(cpu_devices, options, message):
  with pytest.raises(ValueError, match=message):
    _step(
      models.one_device(cpu_devices), **{"num_train_steps": 5, "num_warmup_steps": 0, **options}
    )()


def test_adafactor_has_a_schedule_of_its_own(cpu_devices):
  impl = models.one_device(cpu_devices)
  options = {"num_train_steps": 5, "num_warmup_steps": 0, "optimizer": "adafactor"}
  _step(impl, init_lr=None, **options)()
  assert (impl.variable_store["w"].numpy()[:2] < 1).all()


@pytest.mark.parametrize(("scale", "factor"), [(1.0, 0.2), (0.1, 1.0)])
def test_clip_by_global_norm(cpu_devices, scale, factor):
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "mesh")
  gradients = [mtf.constant(mesh, x * scale, dtype=tf.float32) for x in (3.0, 4.0)]
  one = mtf.constant(mesh, 1.0, dtype=tf.float32)
  clipped, norm = optimization.clip_by_global_norm([gradients[0], None, gradients[1]], one)
  lowering = mtf.Lowering(graph, {mesh: models.one_device(cpu_devices)})
  assert clipped[1] is None
  found = [float(lowering.export_to_tf_tensor(x)) for x in (clipped[0], clipped[2], norm)]
  np.testing.assert_allclose(found, [3 * scale * factor, 4 * scale * factor, 5 * scale], rtol=1e-6)
