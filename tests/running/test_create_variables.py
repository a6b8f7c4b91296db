"""Variables before the first step, and programs that begin or go on."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.checkpoint import Checkpointer
from mesh_tensorflow.errors import CheckpointError, DamagedCheckpointError, GraphError

batch, io = mtf.Dimension("batch", 4), mtf.Dimension("io", 6)
X = np.arange(24, dtype=np.float32).reshape(4, 6) / 24


def make(kind, cpu_devices):
  """A mesh, its training step, and how often the step was traced."""
  impl = {"simd": mtf.SimdMeshImpl, "placement": mtf.PlacementMeshImpl}[kind](
    "r:2,c:2", "batch:r,io:c", cpu_devices[:4]
  )
  traces = []

  @mtf.function(impl, [mtf.TensorSpec([batch, io])])
  def step(x):
    traces.append(x)
    w = mtf.get_variable(x.mesh, "w", [io])
    loss = mtf.reduce_mean(mtf.square(x * w - 1.0))
    mtf.optimize.AdafactorOptimizer(learning_rate=0.1).minimize(loss)
    return loss

  return impl, step, traces


@pytest.mark.parametrize("kind", ["simd", "placement"])
def test_variables_are_made_once_and_nothing_runs(kind, cpu_devices):
  impl, step, traces = make(kind, cpu_devices)
  step.create_variables()
  before = impl.variable_store["w"].numpy()
  assert set(impl.variable_store.names) == {"w", "w_slot_v", "global_step"}
  assert impl.variable_store["global_step"].numpy() == 0
  step.create_variables()
  np.testing.assert_array_equal(impl.variable_store["w"].numpy(), before)
  losses = [float(step(X)) for _ in range(2)]
  assert len(traces) == 1
  _, without, _ = make(kind, cpu_devices)
  assert losses == [float(without(X)) for _ in range(2)]


@pytest.mark.parametrize("kind", ["simd", "placement"])
def test_a_program_begins_or_goes_on(kind, cpu_devices, tmp_path):
  """Also where the folder is not there yet."""
  losses = []
  for steps in (2, 5):
    impl, step, _ = make(kind, cpu_devices)
    with Checkpointer(str(tmp_path / "new" / "model"), impl.variable_store) as checkpoints:
      step.create_variables()
      restored = checkpoints.restore_or_none()
      assert (restored is None) == (steps == 2)
      for i in range(restored.step if restored else 0, steps):
        losses.append(float(step(X)))
        checkpoints.save(i + 1)
  _, whole, _ = make(kind, cpu_devices)
  np.testing.assert_allclose(losses, [float(whole(X)) for _ in range(5)], rtol=1e-6)


def test_restore_or_none_is_none_only_without_a_checkpoint(cpu_devices, tmp_path):
  impl, step, _ = make("simd", cpu_devices)
  step.create_variables()
  saver = Checkpointer(str(tmp_path), impl.variable_store, asynchronous=False)
  assert saver.restore_or_none() is None
  with pytest.raises(CheckpointError, match="there is no checkpoint in"):
    saver.restore()
  saver.save(0)
  assert saver.restore_or_none().step == 0
  other = mtf.SimdMeshImpl("r:2", "", cpu_devices[:2])
  mtf.function(other, [mtf.TensorSpec([io])])(
    lambda x: mtf.reduce_sum(x * mtf.get_variable(x.mesh, "v", [io]))
  ).create_variables()
  strict = Checkpointer(str(tmp_path), other.variable_store)
  with pytest.raises(CheckpointError, match="v"):
    strict.restore_or_none()
  assert strict.restore_or_none(ignore_missing=True, ignore_unexpected=True).missing == ("v",)
  data = next(tmp_path.glob("*.data-*"))
  data.write_bytes(data.read_bytes()[:-3])
  with pytest.raises(DamagedCheckpointError):
    saver.restore_or_none()


def test_errors_say_how_variables_are_made(cpu_devices, tmp_path):
  impl, step, _ = make("simd", cpu_devices)
  saver = Checkpointer(str(tmp_path), impl.variable_store)
  for call in (saver.restore_or_none, saver.restore, lambda: saver.save(0)):
    with pytest.raises(CheckpointError, match=r"create_variables\(\)"):
      call()
  no_signature = mtf.function(impl)(lambda x: x * 2.0)
  with pytest.raises(GraphError, match="create_variables: .* has no input_signature"):
    no_signature.create_variables()


def test_several_functions_are_not_taken_for_one_that_is_traced_anew(cpu_devices, caplog):
  """TensorFlow warns of a function that is traced for many of its calls."""
  impl = mtf.PlacementMeshImpl("r:2", "io:r", cpu_devices[:2])
  source = "def f{0}(x):\n  return x + {0}.0"
  tf.get_logger().addHandler(caplog.handler)
  try:
    with caplog.at_level(logging.WARNING):
      for i in range(12):
        namespace = {}
        exec(source.format(i), namespace)  # noqa: S102 - functions of other names
        add = mtf.function(impl, [mtf.TensorSpec([io])])(namespace[f"f{i}"])
        np.testing.assert_allclose(add(X[0]).numpy(), X[0] + i)
  finally:
    tf.get_logger().removeHandler(caplog.handler)
  assert "retracing" not in caplog.text
