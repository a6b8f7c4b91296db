"""`fit`, `evaluate` and `predict` on a mesh against the same model under Keras alone."""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import GraphError
from tests.keras.models import (
  RNG,
  X,
  Y,
  assert_same_history,
  assert_same_variables,
  compiled,
  placement,
  searched,
  simd,
  small,
)

SEARCHED_TOO = True
LONG_IF_SEARCHED = (
  "test_batches_of_a_few_examples_may_come_first",
  "test_files",
  "test_data_is_not_tuned_within_a_loop",
  "test_keras_functions_are_back_afterwards",
  "test_before_a_first_step",
  "test_not_built_with_statistics_of_batches",
  "test_callbacks",
  "test_memory_of_a_device_is_a_part_of_the_model",
)
FIT = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


class TestFit:
  @pytest.mark.parametrize("kind", ["simd", pytest.param("placement", marks=pytest.mark.long)])
  def test_history_weights_and_slots_are_those_of_keras(self, kind: str) -> None:
    # The last batch has 6 examples, and those of the validation 5: neither is split in two rows.
    theirs, ours = compiled(), compiled()
    mesh = placement() if kind == "placement" else simd()
    parallel = mtf.keras.parallelize(ours, mesh)
    kwargs = {**FIT, "validation_data": (X[:5], Y[:5])}
    expected = theirs.fit(X[:21], Y[:21], **kwargs)
    history = parallel.fit(X[:21], Y[:21], **kwargs)
    assert_same_history(history, expected)
    assert_same_variables(ours, theirs)
    if not searched():
      assert mesh.variable_store["net/up/kernel"].slice_shape == (8, 8)
    assert int(ours.optimizer.iterations.numpy()) == 6
    np.testing.assert_allclose(
      parallel.predict(X[:21], batch_size=8, verbose=0),
      theirs.predict(X[:21], verbose=0),
      atol=1e-5,
    )
    # The plain model goes on where the mesh stopped, and the mesh where the plain model did.
    assert_same_history(ours.fit(X, Y, **FIT), theirs.fit(X, Y, **FIT))
    assert_same_history(parallel.fit(X, Y, **FIT), theirs.fit(X, Y, **FIT))
    assert_same_variables(ours, theirs)

  @pytest.mark.long
  def test_automatic_layout_and_shape(self) -> None:
    theirs, ours = compiled(), compiled()
    parallel = mtf.keras.parallelize(ours, 4)
    assert parallel.layout is None
    assert_same_history(parallel.fit(X[:16], Y[:16], **FIT), theirs.fit(X[:16], Y[:16], **FIT))
    assert parallel.mesh_impl is not None
    assert parallel.mesh_impl.size == 4

  @pytest.mark.long
  def test_weights_of_classes_and_of_samples(self) -> None:
    theirs, ours = compiled(weighted_metrics=["accuracy"]), compiled(weighted_metrics=["accuracy"])
    parallel = mtf.keras.parallelize(ours, placement())
    weights = {"class_weight": {0: 1.0, 1: 3.0, 2: 0.5, 3: 1.0}}
    assert_same_history(
      parallel.fit(X[:16], Y[:16], **FIT, **weights), theirs.fit(X[:16], Y[:16], **FIT, **weights)
    )
    weights = {"sample_weight": RNG.uniform(size=16).astype(np.float32)}
    assert_same_history(
      parallel.fit(X[:16], Y[:16], **FIT, **weights), theirs.fit(X[:16], Y[:16], **FIT, **weights)
    )

  @pytest.mark.long
  def test_data_sets_generators_and_numbers_of_steps(self) -> None:
    theirs, ours = compiled(steps_per_execution=2), compiled(steps_per_execution=2)
    parallel = mtf.keras.parallelize(ours, placement())
    data = tf.data.Dataset.from_tensor_slices((X[:16], Y[:16])).batch(4, drop_remainder=True)
    kwargs = {"epochs": 3, "initial_epoch": 1, "steps_per_epoch": 3, "verbose": 0}
    assert_same_history(parallel.fit(data.repeat(), **kwargs), theirs.fit(data.repeat(), **kwargs))

    def generator() -> Any:
      while True:
        yield X[:4], Y[:4]

    kwargs = {"steps_per_epoch": 4, "verbose": 0}
    assert_same_history(parallel.fit(generator(), **kwargs), theirs.fit(generator(), **kwargs))
    assert_same_variables(ours, theirs)
    np.testing.assert_allclose(parallel.evaluate(data, verbose=0), theirs.evaluate(data, verbose=0))

  @pytest.mark.long
  def test_single_batches(self) -> None:
    theirs, ours = compiled(), compiled()
    parallel = mtf.keras.parallelize(ours, placement())
    for i in (0, 8, 0):
      batch = X[i : i + 8], Y[i : i + 8]
      np.testing.assert_allclose(
        parallel.train_on_batch(*batch), theirs.train_on_batch(*batch), rtol=1e-4
      )
    assert_same_variables(ours, theirs)
    np.testing.assert_allclose(
      parallel.test_on_batch(X[:8], Y[:8]), theirs.test_on_batch(X[:8], Y[:8]), rtol=1e-4
    )
    np.testing.assert_allclose(
      parallel.predict_on_batch(X[:8]), theirs.predict_on_batch(X[:8]), atol=1e-5
    )


@pytest.mark.parametrize("sizes", [(1, 8), (3, 1, 8)])
def test_batches_of_a_few_examples_may_come_first(sizes: tuple[int, ...]) -> None:
  """The axis of one example has no name of its own; the layout rule for it is no slip."""
  theirs, ours = compiled(), compiled()
  parallel = mtf.keras.parallelize(ours, simd())
  for size in sizes:
    expected = theirs.train_on_batch(X[:size], Y[:size])
    np.testing.assert_allclose(parallel.train_on_batch(X[:size], Y[:size]), expected, rtol=1e-5)
  assert_same_variables(ours, theirs)


class NotBuilt(keras.Model):
  """Has no variables before its first call."""

  def __init__(self) -> None:
    super().__init__()
    self.up = keras.layers.Dense(16, kernel_regularizer="l2")
    self.norm = keras.layers.BatchNormalization()
    self.down = keras.layers.Dense(4)

  def call(self, x: Any, training: bool | None = None) -> Any:
    return self.down(keras.ops.relu(self.norm(self.up(x), training=training)))


def _seeded() -> keras.Model:
  keras.utils.set_random_seed(0)
  return NotBuilt()


class TestModels:
  @pytest.mark.slow
  def test_not_built_with_statistics_of_batches(self) -> None:
    # Not Adam: the bias before the norm has no gradient but for what is rounded.
    theirs, ours = (compiled(lambda: keras.optimizers.SGD(0.1), _seeded) for _ in range(2))
    parallel = mtf.keras.parallelize(ours, placement(layout="batch:rows"))
    assert_same_history(parallel.fit(X[:16], Y[:16], **FIT), theirs.fit(X[:16], Y[:16], **FIT))
    assert_same_variables(ours, theirs)


class TestState:
  def test_files(self, tmp_path: pathlib.Path) -> None:
    ours = compiled()
    parallel = mtf.keras.parallelize(ours, placement())
    parallel.fit(X[:16], Y[:16], **FIT)
    parallel.save(tmp_path / "model.keras")
    parallel.save_weights(tmp_path / "model.weights.h5")
    saved = keras.models.load_model(tmp_path / "model.keras")
    assert_same_variables(saved, ours)
    parallel.set_weights([0 * w for w in parallel.get_weights()])
    assert not parallel.predict(X[:16], verbose=0).any()
    parallel.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_allclose(
      parallel.predict(X[:16], verbose=0), saved.predict(X[:16], verbose=0), atol=1e-5
    )

  @pytest.mark.long  # test_callbacks has something of it.
  def test_what_python_assigns_counts(self) -> None:
    theirs, ours = compiled(), compiled()
    parallel = mtf.keras.parallelize(ours, placement())
    for model in (parallel, theirs):
      model.fit(X[:16], Y[:16], **FIT)
    for model in (ours, theirs):
      model.layers[0].kernel.assign(model.layers[0].kernel * 0.5)
      model.optimizer.learning_rate = 0.1
    assert_same_history(parallel.fit(X[:16], Y[:16], **FIT), theirs.fit(X[:16], Y[:16], **FIT))
    assert_same_variables(ours, theirs)

  def test_callbacks(self, tmp_path: pathlib.Path) -> None:
    seen: dict[str, list[Any]] = {"ours": [], "theirs": []}

    class Looks(keras.callbacks.Callback):
      def __init__(self, name: str):
        super().__init__()
        self.name = name

      def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.01 * (batch + 1)

      def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        seen[self.name].append(self.model.layers[0].kernel.numpy())
        seen[self.name].append(self.model.evaluate(X[:16], Y[:16], verbose=0)[0])
        self.model.layers[1].bias.assign(self.model.layers[1].bias + 1.0)

    def callbacks(name: str) -> list[Any]:
      path = str(tmp_path / f"{name}-{{epoch}}.keras")
      return [
        Looks(name),
        keras.callbacks.ModelCheckpoint(path),
        keras.callbacks.EarlyStopping("loss", mode="max", patience=1, restore_best_weights=True),
      ]

    theirs, ours = compiled(), compiled()
    parallel = mtf.keras.parallelize(ours, placement())
    kwargs = {**FIT, "epochs": 4}
    expected = theirs.fit(X[:16], Y[:16], callbacks=callbacks("theirs"), **kwargs)
    history = parallel.fit(X[:16], Y[:16], callbacks=callbacks("ours"), **kwargs)
    assert len(history.epoch) == 2
    assert_same_history(history, expected)
    for u, v in zip(seen["ours"], seen["theirs"]):
      np.testing.assert_allclose(u, v, rtol=1e-3, atol=1e-5)
    assert_same_variables(ours, theirs)
    first = [keras.models.load_model(tmp_path / f"{n}-1.keras") for n in ("ours", "theirs")]
    assert_same_variables(*first)

  @pytest.mark.long
  def test_a_model_compiled_anew(self) -> None:
    theirs, ours = compiled(), compiled()
    parallel = mtf.keras.parallelize(ours, placement())
    parallel.fit(X[:16], Y[:16], **FIT)
    theirs.fit(X[:16], Y[:16], **FIT)
    for model in (parallel, theirs):
      model.compile(keras.optimizers.SGD(0.1), loss="mse", metrics=["mae"])
    targets = np.eye(4, dtype=np.float32)[Y[:16]]
    assert_same_history(parallel.fit(X[:16], targets, **FIT), theirs.fit(X[:16], targets, **FIT))

  def test_data_is_not_tuned_within_a_loop(self, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow's tuner would let the end of an iterator wait, for up to a minute."""
    iterated, plain = [], tf.data.Dataset.__iter__

    def noted(dataset: tf.data.Dataset) -> Any:
      iterated.append(dataset.options().autotune.enabled)
      return plain(dataset)

    def evaluates(*_: object) -> None:
      parallel.evaluate(X[:8], Y[:8], verbose=0)

    monkeypatch.setattr(tf.data.Dataset, "__iter__", noted)
    parallel = mtf.keras.parallelize(compiled(), placement())
    data = tf.data.Dataset.from_tensor_slices((X[:16], Y[:16])).batch(8)
    callback = keras.callbacks.LambdaCallback(on_epoch_end=evaluates)
    parallel.fit(data, verbose=0, epochs=2, callbacks=[callback])
    assert len(iterated) >= 3
    assert not any(iterated)
    assert None not in iterated
    assert tf.data.Dataset.__iter__ is noted

  def test_keras_functions_are_back_afterwards(self) -> None:
    ours = compiled()
    ours.train_on_batch(X[:8], Y[:8])
    before = ours.train_function
    parallel = mtf.keras.parallelize(ours, placement())
    with pytest.raises(ValueError, match="incompatible"):
      parallel.fit(X[:16, :3], Y[:16], **FIT)
    assert ours.train_function is before
    assert "make_train_function" not in vars(ours)


class TestSummary:
  @pytest.mark.long
  def test_tables(self) -> None:
    parallel = mtf.keras.parallelize(compiled(), placement())
    parallel.fit(X[:16], Y[:16], **FIT)
    lines: list[str] = []
    parallel.summary(print_fn=lambda text, **_: lines.append(text))
    row = next(line for line in lines[-1].splitlines() if "net/up/kernel" in line)
    assert parallel.dimensions["net/up.units"].size == 16
    report = parallel.describe()
    if searched():
      return
    assert row.split() == ["net/up/kernel", "8", "x", "16/cols", "512", "B", "256", "B"]
    assert {p.name: p.bytes_per_device for p in report.variables}["net/up/kernel"] == 256

  def test_memory_of_a_device_is_a_part_of_the_model(self) -> None:
    layers = [keras.Input((64,)), keras.layers.Dense(512, name="up"), keras.layers.Dense(64)]
    model = keras.Sequential(layers, name="net")
    model.compile("adam", "mse")
    layout = "net/up.input:rows,net/up.units:cols,net/dense.units:rows"
    names = {"net/dense*/kernel": [None, "net/dense.units"]}
    parallel = mtf.keras.parallelize(model, placement("rows:2,cols:4", layout), dims=names)
    x = RNG.normal(size=(8, 64)).astype(np.float32)
    losses = [parallel.train_on_batch(x, x) for _ in range(4)]
    assert losses[-1] < losses[0]
    whole = 4 * sum(int(np.prod(v.shape)) for v in [*model.variables, *model.optimizer.variables])
    report = parallel.describe()
    stored = sum(v.nbytes for v in _slices_of(parallel.mesh_impl, 0))
    assert report.memory.variables == stored
    if not searched():
      assert stored < whole / 7
      assert report.memory.total < whole / 2

  def test_before_a_first_step(self) -> None:
    parallel = mtf.keras.parallelize(small(), placement())
    with pytest.raises(GraphError, match="no step has run"):
      parallel.describe()
    lines: list[str] = []
    parallel.summary(print_fn=lambda text, **_: lines.append(text))
    assert "Total params" in lines[0] and "decided at the first batch" in lines[-1]


def _slices_of(mesh: Any, processor: int) -> list[Any]:
  """What one device holds of all variables."""
  return [v.slices[processor].numpy() for v in mesh.variable_store]
