"""`run.precision`: half precision on every mesh; in float16 a loss scale."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow import checkpoint
from mesh_tensorflow.errors import ConfigError, NonFiniteError
from mesh_tensorflow.operations.elementwise import cast_before_sum
from mesh_tensorflow.training import loss_scale
from mesh_tensorflow.transformer.model import model_building
from tests.kinds import in_turns, kept
from tests.transformer import small_lm
from tests.transformer import worker_processes as program

SETTINGS = ("run.report_every = 1", "run.train_steps = 4", "dropout_rate = 0.1")
MESHES = {
  "placement": (
    *("run.mesh_shape = 'batch:2,model:2'", "run.layout_rules = 'batch:batch,d_ff:model'"),
    "run.mesh_implementation = 'placement'",
  ),
  "simd": (
    *("run.mesh_shape = 'batch:2,model:2'", "run.layout_rules = 'batch:batch,d_ff:model'"),
    *("run.mesh_implementation = 'simd'", "run.shard_state = 'batch'"),
  ),
}

CASES = [(precision, mesh) for precision in ("bfloat16", "float16") for mesh in MESHES]


def trained(folder, *bindings):
  folder.mkdir(exist_ok=True)
  small_lm.run(folder, *SETTINGS, *bindings, text=small_lm.TEXT)
  return list(program.losses(folder / "model").values())


def saved(folder, name, step=4):
  return checkpoint.Values(str(folder / f"model/model.ckpt-{step}"))[name]


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
  """Folder and losses of float32."""
  folder = tmp_path_factory.mktemp("exact") / "run"
  return folder, trained(folder, "run.precision = 'float32'")


@pytest.mark.parametrize(("precision", "mesh"), kept(CASES, in_turns(CASES)))
def test_losses_on_every_mesh(precision, mesh, exact, tmp_path):
  losses = trained(tmp_path / "run", f"run.precision = '{precision}'", *MESHES[mesh])
  np.testing.assert_allclose(losses, exact[1], rtol=5e-3)
  # Sums in float32: not one of the 256 numbers between 2 and 4 that bfloat16 has.
  assert all(x != np.float32(tf.cast(x, tf.float16)) for x in losses)
  dtypes = {s.dtype for s in checkpoint.describe(str(tmp_path / "run/model/model.ckpt-4")).values()}
  assert not dtypes & {tf.bfloat16, tf.float16}


def test_microbatches_and_skips(exact, tmp_path):
  losses = trained(
    tmp_path / "run",
    "run.precision = 'float16'",
    "run.gradient_accumulation_steps = 2",
    "run.max_grad_norm = 1.0",
    "run.nonfinite = 'skip'",
    "run.gradient_dtype = 'float32'",
    *MESHES["placement"],
  )
  assert np.isfinite(losses).all() and losses[0] == pytest.approx(exact[1][0], rel=0.02)


def test_an_overflow_is_skipped_counted_and_recovered_from(monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(loss_scale, "_FIRST", 2.0**23)
  settings = ("run.precision = 'float16'", "run.train_steps = 20")
  trained(tmp_path / "run", *settings)
  scale = saved(tmp_path / "run", "_loss_scale", 20)
  skipped = int(np.log2(2.0**23 / scale))
  assert 0 < skipped < 15  # It stops as soon as gradients are finite.
  assert 0 < saved(tmp_path / "run", "_loss_scale_steps", 20) <= 20 - skipped
  assert f"{skipped} step(s) skipped" in capsys.readouterr().out
  lines = (tmp_path / "run/model/metrics.jsonl").read_text().splitlines()
  reported = [json.loads(line).get("loss_scale") for line in lines]
  assert {2.0**23, float(scale)} <= set(reported)


def test_an_overflow_changes_nothing(monkeypatch, tmp_path):
  monkeypatch.setattr(loss_scale, "_FIRST", 2.0**60)
  trained(tmp_path / "run", "run.precision = 'float16'", "run.save_checkpoints_steps = 1")
  for name in checkpoint.describe(str(tmp_path / "run/model/model.ckpt-4")):
    if name.startswith(("lm/", "decoder/")) and "adam" not in name:
      before, after = (saved(tmp_path / "run", name, step) for step in (1, 4))
      np.testing.assert_array_equal(before, after, err_msg=name)


def test_what_always_overflows_ends(tmp_path):
  with pytest.raises(NonFiniteError, match="last 100 steps.*skipped.*float16"):
    trained(
      tmp_path / "run",
      "run.precision = 'float16'",
      "run.loss_scale = 1e30",
      "run.train_steps = 120",
    )


def test_the_scale_doubles(monkeypatch, tmp_path):
  monkeypatch.setattr(loss_scale, "_STEPS_TO_GROW", 2)
  trained(tmp_path / "run", "run.precision = 'float16'")
  assert saved(tmp_path / "run", "_loss_scale") == 2.0**17
  assert saved(tmp_path / "run", "_loss_scale_steps") == 0


def test_small_gradients_are_kept(cpu_devices):
  """Of 1e-9, which float16 does not have."""
  impl = mtf.PlacementMeshImpl("", "", cpu_devices[:1])

  def gradient(scaled):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "m")
    dtype = mtf.VariableDType(tf.float32, tf.float32, tf.float16)
    x = mtf.get_variable(mesh, "x", "a:4", dtype)
    losses = lambda features, count: {"loss": mtf.reduce_sum(x * 1e-5) * 1e-4}  # noqa: E731
    scale = loss_scale.LossScale(TrainerSettings(), mesh)
    outputs = (scale.scaled(losses) if scaled else losses)({}, 1)
    grads = mtf.gradients([outputs["loss"]], [x])
    grads = scale.unscaled(grads) if scaled else grads
    return mtf.Lowering(graph, {mesh: impl}).export_to_tf_tensor(grads[0]).numpy()

  assert not gradient(False).any()
  np.testing.assert_allclose(gradient(True), 1e-9, rtol=0.05)


@pytest.mark.parametrize(
  "precisions",
  [("float32", "float16"), pytest.param(("float16", "bfloat16"), marks=pytest.mark.long)],
)
def test_a_training_goes_on_in_another(precisions, exact, tmp_path):
  for i, precision in enumerate(precisions):
    setting = f"run.precision = '{precision}'"
    losses = trained(tmp_path / "run", setting, f"run.train_steps = {2 * i + 2}")
  np.testing.assert_allclose(losses, exact[1], rtol=5e-3)


def test_an_interrupted_training_goes_on(tmp_path):
  """With its scale, and the steps since it was changed."""
  settings = ("run.precision = 'float16'", "run.learning_rate_schedule = 0.01")
  losses = trained(tmp_path / "at once", *settings)
  trained(tmp_path / "twice", *settings, "run.train_steps = 2")
  assert trained(tmp_path / "twice", *settings) == losses
  assert saved(tmp_path / "twice", "_loss_scale_steps") == 4


@pytest.mark.parametrize("faster", ["float32", "bfloat16"])
def test_auto_takes_what_is_faster(faster, monkeypatch):
  monkeypatch.setattr(model_building, "faster", lambda: faster)
  found = model_building.dtype_of_precision("auto")
  assert found == mtf.VariableDType(tf.float32, tf.float32, tf.as_dtype(faster))


def test_auto_measures():
  assert model_building.faster() in ("float32", "bfloat16")


def test_texts_are_continued_in_half_precision(exact):
  folder, _ = exact
  setting = "run.precision = 'bfloat16'"
  assert small_lm.infer(folder, ["To be"], setting, "run.train_steps = 4", step=4)


@pytest.mark.parametrize("setting", ["run.precision = 'float8'", "run.loss_scale = 0"])
def test_wrong_settings(setting, tmp_path):
  with pytest.raises(ConfigError, match="precision.*bfloat16|loss_scale.*above 0"):
    trained(tmp_path / "run", setting)


def test_gradients_are_exchanged_in_half_the_bytes(cpu_devices):
  impl = mtf.PlacementMeshImpl("x:2", "batch:x", cpu_devices[:2])

  def moved(dtype):
    @mtf.function(impl, [mtf.TensorSpec("batch:8 a:16")])
    def step(x):
      w = mtf.get_variable(x.mesh, "w", "a:16 b:32")
      y = mtf.einsum([x, w], mtf.convert_to_shape("batch:8 b:32"))
      (grad,) = mtf.gradients([mtf.reduce_sum(mtf.square(y))], [w])
      return mtf.cast(cast_before_sum(grad, dtype), tf.float32)

    x = np.random.default_rng(0).normal(size=[8, 16]).astype(np.float32)
    return step(x).numpy(), mtf.describe(step).bytes_moved()["x"]

  (exact, bytes_of_32), (rounded, bytes_of_16) = moved(tf.float32), moved(tf.bfloat16)
  assert 2 * bytes_of_16 == bytes_of_32
  np.testing.assert_allclose(rounded, exact, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("layout", ["", "v:x"])
def test_losses_of_half_precision_logits_in_float32(layout, cpu_devices):
  impl = mtf.PlacementMeshImpl("x:2", layout, cpu_devices[:2])
  rng = np.random.default_rng(0)
  logits = np.float32(tf.cast(rng.normal(size=[6, 8]) * 3, tf.bfloat16))
  targets = rng.integers(0, 8, size=[6]).astype(np.int32)

  @mtf.function(impl, [mtf.TensorSpec("n:6 v:8"), mtf.TensorSpec("n:6", tf.int32)])
  def loss(x, t):
    half = mtf.cast(x, tf.bfloat16)
    found = mtf.layers.softmax_cross_entropy_with_logits(half, t, x.shape[1], loss_dtype=tf.float32)
    return found, mtf.gradients([mtf.reduce_sum(found)], [x])[0]

  found, grad = loss(logits, targets)
  with tf.GradientTape() as tape:
    x = tf.constant(logits)
    tape.watch(x)
    expected = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, x)
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  np.testing.assert_allclose(grad, tape.gradient(expected, x), atol=0.01)
