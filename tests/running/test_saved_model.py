"""tf.saved_model.save of an mtf.function; another process loads it without this package."""

from __future__ import annotations

import textwrap

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf

BATCH, HIDDEN, OUT = (mtf.Dimension(n, s) for n, s in [("batch", 4), ("hidden", 8), ("out", 4)])
X = np.random.default_rng(0).normal(size=[4, 8]).astype(np.float32)


def make(kind, devices):
  cls = mtf.SimdMeshImpl if kind == "simd" else mtf.PlacementMeshImpl
  return function_on(cls("r:2,s:2", "batch:r,hidden:s", devices[:4]))


def function_on(impl):
  @mtf.function(impl, [mtf.TensorSpec([BATCH, HIDDEN], name="x")])
  def f(x):
    w = mtf.get_variable(x.mesh, "w", [HIDDEN, OUT])
    calls = mtf.get_variable(
      x.mesh, "calls", [], tf.int32, initializer=mtf.initializers.Zeros(), trainable=False
    )
    y = mtf.softmax(mtf.einsum([x, w], [BATCH, OUT]), OUT)
    mtf.assign_add(calls, mtf.ones_like(calls))
    return {"y": y, "calls": calls + 0}

  return f


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("placement", marks=pytest.mark.long), "simd"])
def test_save_and_load(kind, cpu_devices, run_subprocess, tmp_path):
  module = tf.Module()
  module.f = make(kind, cpu_devices)
  want = module.f(X)["y"]
  tf.saved_model.save(module, str(tmp_path / "module"))
  tf.saved_model.save(module.f, str(tmp_path / "function"))
  np.save(tmp_path / "x.npy", X)
  np.save(tmp_path / "y.npy", want)
  result = run_subprocess(
    [
      "-c",
      textwrap.dedent(f"""
        import sys
        import numpy as np
        import tensorflow as tf
        x, y = (np.load(f"{tmp_path}/{{n}}.npy") for n in "xy")
        loaded = tf.saved_model.load("{tmp_path}/module")
        for i in (1, 2):
          got = loaded.f(x)
          np.testing.assert_allclose(got["y"], y, rtol=1e-5)
          assert got["calls"] == i, got["calls"]
        np.testing.assert_allclose(tf.saved_model.load("{tmp_path}/function")(x)["y"], y, rtol=1e-5)
        with tf.GradientTape() as tape:
          loaded.f(x)
        assert len(tape.watched_variables()) == 4
        print("loaded", any(m.startswith("mesh_tensorflow") for m in sys.modules))
      """),
    ]
  )
  assert "loaded False" in result.stdout


@pytest.mark.parametrize(
  ("kind", "reshard"), [(mtf.PlacementMeshImpl, True), (mtf.SimdMeshImpl, False)]
)
def test_of_state_in_shards_and_unequal_devices(kind, reshard, cpu_devices, tmp_path):
  impl = kind("r:4", "batch:r", cpu_devices[:2], shares={"r": [3, 1]})
  f = function_on(impl.with_sharded_state("r", reshard))
  want = f(X)["y"]
  tf.saved_model.save(f, str(tmp_path))
  got = tf.saved_model.load(str(tmp_path))(X)
  np.testing.assert_allclose(got["y"], want, rtol=1e-5)
  assert got["calls"] == 1


def test_before_its_first_call(cpu_devices, tmp_path):
  f = make("simd", cpu_devices)
  with pytest.raises(mtf.VariableError, match="f was not called yet.*call it once"):
    tf.saved_model.save(f, str(tmp_path / "m"))
  assert "w" not in f.mesh_impl.variable_store
