"""The trainer with --tpu: through `tpu_mesh`, whose TPU is replaced by CPU devices here."""

import gin
import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow.errors import ConfigError, LayoutError
from mesh_tensorflow.meshes.tpu import mesh as tpu_mesh
from mesh_tensorflow.transformer import gin_config, utils

BINDINGS = """
  import mesh_tensorflow.optimize
  import mesh_tensorflow.transformer.dataset
  import mesh_tensorflow.transformer.vocabulary
  run.vocabulary = @vocabulary.get_byte_vocabulary()
  run.train_dataset_fn = @dataset.text_lm_dataset
  dataset.text_lm_dataset.mode = 'stream'
  num_layers = 1
  d_model = 16
  d_ff = 32
  num_heads = 2
  d_kv = 8
  dropout_rate = 0.1
  run.model_type = 'lm'
  run.sequence_length = {'inputs': 16, 'targets': 16}
  Unitransformer.max_length = 16
  run.batch_size = 4
  run.train_steps = 6
  run.iterations_per_loop = 3
  run.learning_rate_schedule = 0.01
  run.optimizer = @optimize.AdamWeightDecayOptimizer
  run.mesh_shape = 'batch:2,model:2'
  run.layout_rules = 'batch:batch,d_ff:model,heads:model,vocab:model'
  get_variable_dtype.master_dtype = 'float32'
  get_variable_dtype.activation_dtype = 'float32'
"""


def run(folder, name, *more, tpu=None):
  text = folder / "text.txt"
  text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
  gin.clear_config()
  lines = [*map(str.strip, BINDINGS.strip().splitlines()), *more]
  gin_config.parse_gin([], [*lines, f"dataset.text_lm_dataset.train_files = '{text}'"])
  return utils.run(None, tpu, None, None, str(folder / name))


@pytest.fixture
def cpus_for_tpu(cpu_devices, monkeypatch):
  """`tpu_mesh` finds a TPU of 2 x 1 chips with 2 cores, that are CPU devices."""
  cores = np.array([[[0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 1]]], np.int32)
  topology = tf.tpu.experimental.Topology(mesh_shape=[2, 1, 1, 2], device_coordinates=cores)
  calls = []

  def connect(tpu, **kwargs):
    calls.append((tpu, kwargs))
    return tpu_mesh.Tpu("resolver", topology)

  def strategy(resolver, experimental_device_assignment):
    assert resolver == "resolver"
    assert experimental_device_assignment.num_replicas == 4
    return tf.distribute.MirroredStrategy(cpu_devices[:4])

  monkeypatch.setattr(tpu_mesh, "connect", connect)
  monkeypatch.setattr(tf.distribute, "TPUStrategy", strategy)
  return calls


def test_training_is_that_of_a_placement_mesh(cpus_for_tpu, tmp_path):
  expected = run(tmp_path, "cpu")
  actual = run(tmp_path, "tpu", tpu="my-tpu")
  assert [c[0] for c in cpus_for_tpu] == ["my-tpu"]
  assert len(actual) == 6
  np.testing.assert_allclose(actual, expected, rtol=1e-4)


def test_the_tiling_reaches_the_device_assignment(cpus_for_tpu, tmp_path, monkeypatch):
  made = []

  def stop(*args, **kwargs):
    made.append(args)
    raise ConfigError("far enough")

  monkeypatch.setattr(tpu_mesh, "StrategyMeshImpl", stop)
  spec = [["batch", [1, 1, 2]], ["model", [1, 2, 1]]]
  with pytest.raises(ConfigError, match="far enough"):
    run(
      tmp_path,
      "tiled",
      f"tpu_estimator_model_fn.hierarchical_tiling_spec = {spec}",
      tpu="my-tpu",
    )
  [(_, _, _, assignment)] = made
  order = [list(assignment.coordinates(r, 0)) for r in range(4)]
  assert order == [[0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 1]]


def test_wrong_layout_on_a_tpu(cpus_for_tpu, tmp_path):
  with pytest.raises(LayoutError, match="d_ff:modle.* did you mean model"):
    run(tmp_path, "wrong", "run.layout_rules = 'd_ff:modle'", tpu="my-tpu")


def test_no_tpu(tmp_path):
  with pytest.raises(ConfigError, match="no TPU was found on this machine"):
    run(tmp_path, "none", tpu="local")
