"""What `parallelize` takes for a mesh and a layout, and what it and the methods refuse."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import ArgumentError, LayoutError, MeshShapeError, UnsupportedError
from mesh_tensorflow.keras.layouts import convert_to_mesh, cut_into_stages
from mesh_tensorflow.keras.mirror import Mirror
from tests.keras.models import X, Y, compiled, placement, single, small


@pytest.mark.parametrize(
  ("mesh", "shape", "size"),
  [
    ("rows:2,cols:2", "rows:2,cols:2", 4),
    ({"rows": 2, "cols": 4}, "rows:2,cols:4", 8),
    ([("rows", 2)], "rows:2", 2),
    (mtf.Shape([("rows", 2)]), "rows:2", 2),
    (4, None, 4),
    (["cpu:0", "cpu:1"], None, 2),
    (["/device:CPU:0"], None, 1),
  ],
)
def test_meshes(mesh: Any, shape: str | None, size: int) -> None:
  choice = convert_to_mesh(mesh)
  assert choice.shape == mtf.convert_to_shape(shape)
  assert choice.size == size


def test_a_mesh_of_stages(cpu_devices):
  store = mtf.VariableStore()
  first, second = (
    mtf.PlacementMeshImpl("all:1", "", [d], variable_store=store) for d in cpu_devices[:2]
  )
  choice = cut_into_stages(convert_to_mesh(first.with_stages([second], "gpipe")), None, None)
  assert (choice.size, choice.stages, choice.schedule) == (1, 2, "gpipe")
  assert choice.others == (second,)


@pytest.mark.parametrize("mesh", [True, 1.5, "rows", object(), {"rows": "two"}])
def test_what_is_no_mesh(mesh: Any) -> None:
  with pytest.raises(ArgumentError, match="a mesh implementation, a mesh shape such as"):
    mtf.keras.parallelize(small(), mesh)


@pytest.mark.parametrize("mesh", [0, [], "rows:2,rows:2"])
def test_meshes_that_cannot_be(mesh: Any) -> None:
  with pytest.raises((MeshShapeError, ArgumentError)):
    mtf.keras.parallelize(small(), mesh)


def test_refused_at_once() -> None:
  with pytest.raises(ArgumentError, match=r"takes a keras.Model, got 3"):
    mtf.keras.parallelize(3, "rows:2")
  with pytest.raises(ArgumentError, match="give a mesh"):
    mtf.keras.parallelize(small())
  message = "batch:row: the mesh has no dimension 'row'; it has rows; did you mean rows?"
  with pytest.raises(LayoutError, match=re.escape(message)):
    mtf.keras.parallelize(small(), "rows:2", "batch:row")
  with pytest.raises(LayoutError, match="has no dimension 'lines'; it has rows, cols"):
    mtf.keras.parallelize(small(), placement(layout="batch:lines"))
  with pytest.raises(LayoutError, match="over the mesh dimensions cols, rows, .* a mesh shape"):
    mtf.keras.parallelize(small(), 4, "batch:rows,net/up.units:cols")
  with pytest.raises(ArgumentError, match="fallback is"):
    mtf.keras.parallelize(small(), "rows:2", fallback="never")
  mesh = keras.distribution.DeviceMesh((2,), ("data",), ["cpu:0", "cpu:1"])
  distribution = keras.distribution.DataParallel(mesh)
  with pytest.raises(LayoutError, match="the mesh is .*rows.* is for data:2"):
    mtf.keras.parallelize(small(), "rows:2", distribution)


def test_refused_at_a_first_batch() -> None:
  parallel = mtf.keras.parallelize(compiled(run_eagerly=True), "rows:2")
  with pytest.raises(UnsupportedError, match="run_eagerly=True"):
    parallel.fit(X, Y)
  with pytest.raises(ValueError, match="compile"):
    mtf.keras.parallelize(small(), "rows:2").fit(X, Y, verbose=0)
  parallel = mtf.keras.parallelize(compiled(), "rows:2")
  with pytest.raises(UnsupportedError, match="RaggedTensor"):
    parallel.train_on_batch(tf.ragged.constant([[1.0], [2.0, 3.0]]), Y[:2])
  with pytest.raises(UnsupportedError, match="texts"):
    parallel.predict_on_batch(tf.constant(["a", "b"]))


@pytest.mark.parametrize("mesh", ["rows:2,cols:2", 2])
def test_an_automatic_layout_that_splits_nothing_says_why(
  mesh: Any, caplog: pytest.LogCaptureFixture
) -> None:
  parallel = mtf.keras.parallelize(compiled(make=single), mesh)
  parallel.train_on_batch(X[:8], Y[:8])
  assert parallel.layout is not None and not parallel.layout.pairs
  (text,) = [r.getMessage() for r in caplog.records if "splits nothing" in r.getMessage()]
  assert re.search(r"the mesh (rows:2,cols:2|mesh_0:2): whole on each device, a step is", text)
  assert re.search(r"take [\d.]+ m?s, and [\d.]+ m?s by the best layout that splits", text)


@pytest.mark.parametrize("mesh", ["rows:3", 3])
def test_a_mesh_that_divides_nothing(mesh: Any, caplog: pytest.LogCaptureFixture) -> None:
  expected = compiled(make=single).train_on_batch(X[:8], Y[:8])
  parallel = mtf.keras.parallelize(compiled(make=single), mesh)
  np.testing.assert_allclose(parallel.train_on_batch(X[:8], Y[:8]), expected, rtol=1e-5)
  assert parallel.layout is not None and not parallel.layout.pairs
  (text,) = [r.getMessage() for r in caplog.records if "splits nothing" in r.getMessage()]
  assert re.search(r":3 divides no dimension .*batch:8.*A larger batch", text)


@pytest.mark.parametrize("mesh", ["rows:2,cols:2", 2])
def test_sizes_of_one(mesh: Any) -> None:
  model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1), keras.layers.Dense(1)])
  model.compile("sgd", "mse")
  arguments = dict(batch_size=1, epochs=2, shuffle=False, verbose=0)
  weights = model.get_weights()
  expected = model.fit(X[:3, :1], X[:3, 1:2], **arguments).history["loss"]
  model.set_weights(weights)
  parallel = mtf.keras.parallelize(model, mesh)
  found = parallel.fit(X[:3, :1], X[:3, 1:2], **arguments).history["loss"]
  np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_first_batch_of_one_leaves_the_layout_of_training_open() -> None:
  model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
  model.compile("sgd", "mse")
  parallel = mtf.keras.parallelize(model, "rows:2")
  parallel.predict(X[:1, :1], verbose=0)
  decided = parallel._programs.decision
  assert decided is not None and decided.kind == "predict" and decided.choice is None
  parallel.train_on_batch(X[:8, :1], X[:8, :1])
  decided = parallel._programs.decision
  assert decided is not None and decided.kind == "train" and decided.choice is not None


def test_names_of_the_user() -> None:
  dims = {"inputs": ["examples", "features"], "net/down/kernel": [None, "classes"]}
  parallel = mtf.keras.parallelize(
    single(), placement(layout="examples:rows,classes:cols"), dims=dims
  )
  expected = parallel.model.predict(X[:8], verbose=0)
  np.testing.assert_allclose(parallel.predict(X[:8], verbose=0), expected, atol=1e-6)
  assert list(parallel.dimensions) == ["examples", "features", "classes"]
  assert parallel.mesh_impl.variable_store["net/down/kernel"].slice_shape == (8, 2)


def test_mirror() -> None:
  store = placement(layout="").variable_store
  mirror, variable = Mirror(), tf.Variable(np.ones([2], np.float32))
  mirror.attach(store)
  mirror.enter({"v": variable})
  mirror.push()  # There is no copy yet.
  impl = placement(layout="")
  copy = impl.variable_store.get(
    impl, "v", mtf.Shape([("a", 2)]), master_dtype=tf.float32, slice_dtype=tf.float32
  )
  mirror.attach(impl.variable_store)
  copy.assign([3.0, 4.0])
  mirror.pull()  # Nobody said that a program ran.
  assert variable.numpy().tolist() == [1, 1]
  mirror.ran(["v"])
  mirror.pull()
  assert variable.numpy().tolist() == [3, 4]
  mirror.push()
  variable.assign([5.0, 6.0])
  mirror.pull()
  assert variable.numpy().tolist() == [5, 6]
  mirror.push()
  assert copy.numpy().tolist() == [5, 6]
