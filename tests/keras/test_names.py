"""Names of dimensions: the same in each process and model, and legal ones in layouts only."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import LayoutError
from mesh_tensorflow.importing.naming import OwnNames
from tests.keras.models import X, Y, compiled, placement, single, small
from tests.kinds import kept


class Gate(keras.layers.Layer):
  """Has a variable that nobody named, and a layer within."""

  def build(self, shape: Any) -> None:
    self.scale = self.add_weight(shape=(shape[-1],))
    self.inner = keras.layers.Dense(shape[-1])
    self.inner.build(shape)

  def call(self, x: Any) -> Any:
    return self.inner(x * self.scale)


def images() -> keras.Model:
  x = keras.Input((8, 8, 3))
  y = keras.layers.BatchNormalization()(keras.layers.Conv2D(4, 3)(x))
  y = keras.layers.Flatten()(keras.layers.MaxPooling2D()(y))
  y = keras.layers.Dropout(0.3)(Gate()(keras.layers.Dense(16, activation="relu")(y)))
  y = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(8)])(y)
  return keras.Model(x, keras.layers.Dense(4)(y))


def recurrent() -> keras.Model:
  layers = [keras.layers.Embedding(9, 4), keras.layers.LSTM(4), keras.layers.Dense(4)]
  return keras.Sequential([keras.Input((3,), dtype="int32"), *layers])


class Subclass(keras.Model):
  def __init__(self) -> None:
    super().__init__()
    self.blocks = [keras.layers.Dense(4), keras.layers.LayerNormalization(), Gate()]

  def call(self, x: Any) -> Any:
    for block in self.blocks:
      x = block(x)
    return x


MODELS: dict[str, tuple[Callable[[], keras.Model], Any]] = {
  "images": (images, np.ones((4, 8, 8, 3), np.float32)),
  "recurrent": (recurrent, np.ones((4, 3), np.int32)),
  "subclass": (Subclass, np.ones((4, 8), np.float32)),
}
OPTIMIZERS = [lambda: "adam", lambda: keras.optimizers.Adafactor(0.1)]


def all_names(make: Callable[[], keras.Model], x: Any, optimizer: Any) -> list[str]:
  """The names of dimensions, variables and operations of a new model."""
  model = make()
  iou = keras.metrics.MeanIoU(4, sparse_y_true=False, sparse_y_pred=False)
  model.compile(optimizer, "mse", metrics=[iou])
  parallel = mtf.keras.parallelize(model, "rows:2", "batch:rows")
  parallel.train_on_batch(x, np.ones((4, 4), np.float32))
  programs = [parallel._programs.latest().imported]
  spec = [tf.TensorSpec(x.shape, x.dtype)]
  programs += [mtf.from_tensorflow(model, spec), mtf.from_tensorflow(lambda y: model(y), spec)]
  found = list(parallel.mesh_impl.variable_store.names)
  for imported in programs:
    found += [*imported.dimensions, *(v.name for v in imported.variables)]
    found += [op.name for op in imported.operations]
  return found


@pytest.mark.parametrize("kind", kept(list(MODELS), ["images", "recurrent"]))
@pytest.mark.slow
def test_names_do_not_tell_what_was_made_before(kind: str) -> None:
  make, x = MODELS[kind]
  optimizer = OPTIMIZERS[len(kind) % 2]
  first = all_names(make, x, optimizer())
  for other in ("dense", "conv"):
    keras.layers.Dense(2, name=None if other == "conv" else other)
  images()
  assert all_names(make, x, optimizer()) == first


def unnamed() -> keras.Model:
  """As Keras names it: of the second one layers are called otherwise."""
  keras.utils.set_random_seed(1)
  layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(8), keras.layers.Dense(4)]
  return keras.Sequential([keras.Input((8,)), *layers])


def test_a_layout_fits_in_any_order() -> None:
  for _ in range(2):
    parallel = mtf.keras.parallelize(
      compiled(make=unnamed),
      placement(layout="batch:rows,sequential/dense_1.units:cols"),
      dims={"sequential/dense/kernel": ["features", None]},
    )
    parallel.train_on_batch(X[:8], Y[:8])
    assert "features" in parallel.dimensions
    store = parallel.mesh_impl.variable_store
    assert store["sequential/dense_1/kernel"].slice_shape == (16, 4)


class TestOwnNames:
  def test_given_names_stay(self) -> None:
    layers = [keras.layers.Dense(2, name=n) for n in ("up", "block_3", "dense_1_out", "conv2d_7")]
    own = OwnNames(keras.Sequential([keras.Input((2,)), *layers], name="net_4"))
    for layer in layers:
      assert own.of(f"net_4/{layer.name}/kernel") == f"net_4/{layer.name}/kernel"

  def test_numbers_count_within(self) -> None:
    names = ("dense_3", "dense_7", "dense_20")
    layers = [keras.layers.Dense(2, name=n) for n in names]
    own = OwnNames(keras.Sequential([keras.Input((2,)), *layers], name="sequential_9"), ["dense_7"])
    found = [own.of(f"sequential_9/{n}/kernel") for n in names]
    assert found == [f"sequential/{n}/kernel" for n in ("dense", "dense_1", "dense_2")]
    assert own.of("dense_7_2/MatMul") == "dense_1_2/MatMul"
    assert own.of("slots/dense_7_kernel_momentum") == "slots/dense_1_kernel_momentum"

  def test_no_name_is_taken_twice(self) -> None:
    layers = [keras.layers.Dense(2, name="dense_3"), keras.layers.LayerNormalization(name="dense")]
    own = OwnNames(keras.Sequential([keras.Input((2,)), *layers]))
    assert own.of("dense_3") == "dense_1"
    assert own.of("dense") == "dense"


class TestUnknown:
  def _parallel(self, layout: str, **kwargs: Any) -> Any:
    return mtf.keras.parallelize(compiled(), placement(layout=layout), **kwargs)

  @pytest.mark.parametrize("by", ["train_on_batch", "test_on_batch", "predict_on_batch"])
  def test_dimensions(self, by: str) -> None:
    parallel = self._parallel("batch:rows,net/up.unit:cols")
    arguments = [X[:8]] if by == "predict_on_batch" else [X[:8], Y[:8]]
    message = (
      "layout rule net/up.unit:cols: no tensor of the model has a dimension 'net/up.unit'; did you "
      "mean net/up.units"
    )
    with pytest.raises(LayoutError, match=re.escape(message) + ".*the dimensions are batch, "):
      getattr(parallel, by)(*arguments)
    assert parallel.mesh_impl is None

  def test_dimensions_of_training_only(self) -> None:
    """A first prediction has no targets; training tells."""
    parallel = self._parallel("batch:rows,classes:cols", dims={"targets": ["batch", "classes"]})
    parallel.compile("sgd", lambda y, outputs: tf.reduce_sum(outputs) * tf.reduce_mean(y))
    parallel.predict_on_batch(X[:8])
    parallel.train_on_batch(X[:8], np.ones((8, 4), np.float32))
    assert parallel.layout.pairs == [("batch", "rows"), ("classes", "cols")]
    parallel = self._parallel("batch:rows,targets.7:cols")
    parallel.predict_on_batch(X[:8])
    with pytest.raises(LayoutError, match="no tensor of the model has a dimension 'targets.7'"):
      parallel.train_on_batch(X[:8], Y[:8])

  def test_names_of_keras(self, caplog: pytest.LogCaptureFixture) -> None:
    """Of a layer that has another number here."""
    layers = [keras.layers.Dense(n, name=f"dense_{i}") for i, n in enumerate((16, 8, 4), 5)]
    model = keras.Sequential([keras.Input((8,)), *layers], name="net")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    parallel = mtf.keras.parallelize(model, "rows:2", "net/dense_6.units:rows")
    with pytest.raises(LayoutError, match=re.escape("did you mean net/dense_1.units?")):
      parallel.train_on_batch(X[:8], Y[:8])
    layers = [keras.layers.Dense(n, name=f"dense_{i}") for i, n in enumerate((16, 8, 4), 1)]
    model = keras.Sequential([keras.Input((8,)), *layers], name="net")
    model.compile("sgd", loss)
    parallel = mtf.keras.parallelize(model, "rows:2", "net/dense_1.units:rows")
    with caplog.at_level(logging.WARNING):
      parallel.train_on_batch(X[:8], Y[:8])
    assert "net/dense_1.units is not Keras' layer net/dense_1, whose dimension is" in caplog.text

  @pytest.mark.parametrize("kind", ["function", "lowering"])
  def test_imported_functions(self, kind: str) -> None:
    imported = mtf.from_tensorflow(single(), [tf.TensorSpec([4, 8])])
    impl = placement(layout="net/down.unit:rows")

    def run() -> None:
      if kind == "function":
        mtf.function(impl, [mtf.TensorSpec("b:4,f:8")])(lambda x: imported(x))(X[:4])
      else:
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        imported(mtf.import_tf_tensor(mesh, X[:4], mtf.Shape([("b", 4), ("f", 8)])))
        mtf.Lowering(graph, {mesh: impl})

    with pytest.raises(LayoutError, match=r"'net/down\.unit'; did you mean net/down\.units"):
      run()
    impl = placement(layout="net/down.units:rows")
    run()

  def test_a_mesh_of_several_functions(self) -> None:
    """A dimension of variables that another function has is none that is unknown."""
    impl = placement(layout="net/up.units:cols,net/down.units:rows")
    whole = mtf.from_tensorflow(small(), [tf.TensorSpec([4, 8])])
    part = mtf.from_tensorflow(lambda x: tf.nn.relu(x), [tf.TensorSpec([4, 8])])
    for imported in (whole, part):
      mtf.function(impl, [mtf.TensorSpec("b:4,f:8")])(lambda x, f=imported: f(x))(X[:4])
