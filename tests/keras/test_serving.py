"""`mtf.keras.enable`: programs written for `keras.distribution` under JAX, on TensorFlow."""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import pathlib
import re
import types
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.keras import layouts as deciding
from tests.keras.models import X, Y
from tests.kinds import in_turns, kept

pytestmark = pytest.mark.usefixtures("enabled")


def devices(n: int = 4) -> list[str]:
  return list(keras.distribution.list_devices()[:n])


def model_parallel(maps: dict[str, Any] | None = None) -> Any:
  mesh = keras.distribution.DeviceMesh((2, 2), ("data", "model"), devices())
  layouts = keras.distribution.LayoutMap(mesh)
  for key, axes in (maps or {"d1/kernel": (None, "model"), "d2/kernel": ("model", None)}).items():
    layouts[key] = axes
  return keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="data")


KINDS: dict[str, Any] = {
  "nothing": lambda: None,
  "data": lambda: keras.distribution.DataParallel(devices=devices()),
  "model": model_parallel,
  "auto": lambda: mtf.keras.AutoParallel(devices()),
}
GUIDES = list(itertools.product(KINDS, ("set", "scope")))


def build() -> keras.Model:
  keras.utils.set_random_seed(0)
  inputs = keras.layers.Input(shape=(28, 28, 1))
  y = keras.layers.Flatten()(inputs)
  y = keras.layers.Dense(units=32, use_bias=False, activation="relu", name="d1")(y)
  y = keras.layers.Dropout(0.0)(y)
  return keras.Model(inputs, keras.layers.Dense(units=10, activation="softmax", name="d2")(y))


def guide() -> tuple[keras.Model, list[float]]:
  """The program of Keras' guide to distribution, with a smaller layer and random data."""
  model = build()
  model.compile("adam", "sparse_categorical_crossentropy")
  rng = np.random.RandomState(0)
  x, labels = rng.normal(size=(64, 28, 28, 1)).astype("f"), rng.randint(0, 10, 64)
  data = tf.data.Dataset.from_tensor_slices((x, labels)).batch(16)
  losses = model.fit(data, epochs=2, verbose=0, validation_data=data).history
  values = [*losses["loss"], *losses["val_loss"], model.evaluate(data, verbose=0)]
  return model, [*values, float(model.predict(data, verbose=0)[3, 4])]


@pytest.fixture(scope="module")
def one_device(cpu_devices: list[str]) -> list[float]:
  return guide()[1]


@pytest.mark.parametrize(("kind", "by"), kept(GUIDES, in_turns(GUIDES)))
def test_the_guide_of_keras(kind: str, by: str, one_device: list[float]) -> None:
  """Data and model parallel, word for word: losses, evaluation and outputs of one device."""
  if by == "set":
    keras.distribution.set_distribution(KINDS[kind]())
    model, values = guide()
  elif kind == "nothing":
    return
  else:
    with KINDS[kind]().scope():
      model, values = guide()
  np.testing.assert_allclose(values, one_device, rtol=1e-5)
  programs = mtf.keras.serving.programs_of(model)
  assert (programs is not None) == (kind != "nothing")
  if kind == "model":
    assert programs is not None and programs.mesh_impl is not None
    assert set(programs.mesh_impl.layout_rules.pairs) >= {("batch", "data"), ("d1.units", "model")}


def test_what_is_chosen_is_said(capsys: pytest.CaptureFixture[str]) -> None:
  keras.distribution.set_distribution(mtf.keras.AutoParallel(2))
  guide()
  said = capsys.readouterr().out.splitlines()
  assert len(said) == 2 and said[0].startswith("AutoParallel: mesh ")
  assert "a step of training is predicted to take" in said[1] and "of a device" in said[1]


@pytest.mark.parametrize(
  ("count", "second"),
  [
    (2, r"take [\d.]+ .?s \([\d.]+ .?s if something is\), and [\d.]+ B of a device \(CPU host;"),
    (3, r"mesh_0:3 divides no dimension .*batch:8"),
  ],
  ids=["slower", "indivisible"],
)
def test_that_nothing_is_split_is_said_in_two_lines(
  count: int, second: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
  with mtf.keras.AutoParallel(count).scope():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(4), keras.layers.Dropout(0.1)])
  model.compile("sgd", "mse")
  x = np.ones([8, 4], np.float32)
  model.evaluate(x, x, batch_size=8, verbose=0)
  said = capfd.readouterr().out.splitlines()
  assert len(said) == 2 and said[0].endswith(f":{count}; nothing is split")
  assert re.search(second, said[1]) and not caplog.records


def test_of_many_rules_some_are_said() -> None:
  rules = mtf.convert_to_layout_rules([(f"d{i}", "m") for i in range(6)])
  machine = types.SimpleNamespace(name="a machine")
  choice: Any = dict(mesh_shape=mtf.Shape([("m", 2)]), layout=rules, seconds=1.0, memory=1024)
  choice.update(proven=True, alternatives=(), machine=machine, memory_limit=2.0**20)
  text = deciding._announcement(deciding.LayoutChoice(**choice, search_seconds=1.0), "train")
  first, second = text.split("\n")
  assert first.endswith("split: d0:m, d1:m, d2:m, d3:m, and 2 more (model.summary() shows weights)")
  assert second.endswith("take 1 s, and 1 KiB of a device (a machine; no layout is faster)")


def test_a_model_built_in_a_scope_trains_outside(one_device: list[float]) -> None:
  with model_parallel().scope():
    model = build()
  model.compile("adam", "sparse_categorical_crossentropy")
  model.train_on_batch(np.zeros((8, 28, 28, 1), "f"), np.zeros(8))
  programs = mtf.keras.serving.programs_of(model)
  assert programs is not None and programs.mesh_impl is not None
  said: list[str] = []
  model.summary(print_fn=lambda text, **_: said.append(text))
  assert "32/model" in "".join(said)


def test_the_model_is_the_users_own() -> None:
  """One object, one state: what a callback reads or assigns is what the mesh has."""
  keras.distribution.set_distribution(model_parallel({"up/kernel": (None, "model")}))
  keras.utils.set_random_seed(1)
  model = keras.Sequential(
    [keras.Input((8,)), keras.layers.Dense(16, name="up"), keras.layers.Dense(4, name="down")]
  )
  model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
  assert type(model) is keras.Sequential
  seen = []

  class Halves(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
      kernel = self.model.layers[0].kernel
      seen.append(kernel.numpy())
      kernel.assign(kernel * 0.5)

  model.fit(X[:16], Y[:16], batch_size=8, verbose=0, callbacks=[Halves()])
  np.testing.assert_array_equal(model.layers[0].kernel.numpy(), seen[-1] * 0.5)
  again = keras.models.clone_model(model)
  again.set_weights(model.get_weights())
  np.testing.assert_allclose(model.predict(X[:8], verbose=0), again(X[:8]), rtol=1e-5, atol=1e-6)


def test_a_model_that_is_loaded_is_compiled(tmp_path: pathlib.Path) -> None:
  """Keras takes a class whose `compile` was replaced for one that has its own, and leaves it."""
  keras.distribution.set_distribution(model_parallel())
  model, _ = guide()
  model.save(tmp_path / "model.keras")
  loaded = keras.models.load_model(tmp_path / "model.keras")
  assert loaded.compiled and loaded.optimizer.iterations.numpy() == 8
  np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])
  x = np.ones((16, 28, 28, 1), "f")
  for m in (model, loaded):
    m.train_on_batch(x, np.arange(16) % 10)
  assert mtf.keras.serving.programs_of(loaded) is not None
  np.testing.assert_allclose(*[m.get_weights()[0] for m in (model, loaded)], atol=1e-6)


def test_what_was_replaced_is_put_back() -> None:
  served = keras.Model.fit
  mtf.keras.enable()  # Once is enough.
  assert keras.Model.fit is served and mtf.keras.is_enabled()
  mtf.keras.disable()
  assert not mtf.keras.is_enabled()
  assert "fit" not in vars(keras.Model) and keras.Model.fit is not served
  assert keras.distribution.initialize.__module__.startswith("keras.")
  assert "num_processes" not in vars(keras.distribution.DataParallel)
  keras.distribution.set_distribution(model_parallel())
  assert guide()[1]  # As Keras alone: on one device.


@pytest.mark.parametrize(
  ("maps", "rules", "told"),
  [
    # Of a layer whose kernel no pattern has: it computes split, and its weights lie whole.
    pytest.param(
      {"d1/output": ("data", "model")}, {("d1.units", "model")}, "", marks=pytest.mark.long
    ),
    ({"d1/kernel": (None, "model"), "d1/output": ("data", None)}, {("d1.units", "model")}, ""),
    # The kernel between the two has both dimensions, and a mesh axis splits one of them.
    ({"d./output": ("data", "model")}, {("d1.units", "model")}, "('data', 'model') of d2/output"),
    # One rule for a dimension: that of the batch is the distribution's.
    ({"d1/output": ("model", None)}, {("batch", "data")}, "says ('model', None) of d1/output"),
    ({"d7/output": (None, "model")}, {("batch", "data")}, "'d7/output' of the layout map matches"),
    ({"d2/output": ("data", "model")}, {("d2.units", "model")}, ""),
    ({"drop.*/output": ("data", "model")}, {("d1.units", "model")}, ""),
  ],
)
def test_layouts_of_outputs(
  maps: dict[str, Any],
  rules: set[tuple[str, str]],
  told: str,
  one_device: list[float],
  caplog: pytest.LogCaptureFixture,
) -> None:
  keras.distribution.set_distribution(model_parallel(maps))
  with caplog.at_level(logging.WARNING, "mesh_tensorflow"):
    model, values = guide()
  np.testing.assert_allclose(values, one_device, rtol=1e-5)
  programs = mtf.keras.serving.programs_of(model)
  assert programs is not None and programs.mesh_impl is not None
  assert rules <= set(programs.mesh_impl.layout_rules.pairs), programs.mesh_impl.layout_rules
  assert (told in caplog.text) if told else ("output" not in caplog.text), caplog.text


class Relayout(keras.layers.Layer):
  """As JAX' programs have it: a layout of a tensor in the middle of a layer."""

  def __init__(self, axes: Any) -> None:
    super().__init__()
    self.axes = axes

  def call(self, x: Any) -> Any:
    distribution: Any = keras.distribution.distribution()
    mesh = None if distribution is None else distribution.device_mesh
    layout = keras.distribution.TensorLayout(self.axes, mesh)
    return keras.distribution.distribute_tensor(x * 2.0, layout)


def test_distribute_tensor() -> None:
  """In a step it counts as a layout of an output does; by itself a tensor stays as it is."""

  def run() -> tuple[keras.Model, Any]:
    keras.utils.set_random_seed(0)
    dense = [keras.layers.Dense(n, name=f"d{i}") for i, n in enumerate((12, 4))]
    model = keras.Sequential(
      [keras.Input([8]), dense[0], Relayout(("data", "model")), dense[1]], name="net"
    )
    return model, model.predict(X, verbose=0)

  want = run()[1]
  keras.distribution.set_distribution(model_parallel({"d9/kernel": (None, "model")}))
  model, found = run()
  np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
  programs = mtf.keras.serving.programs_of(model)
  assert programs is not None and programs.mesh_impl is not None
  assert ("net/d0.units", "model") in programs.mesh_impl.layout_rules.pairs
  layout = keras.distribution.TensorLayout(("data", None))
  np.testing.assert_array_equal(keras.distribution.distribute_tensor(X, layout), X)
  with pytest.raises(errors.LayoutError, match=r"2 axes, and the tensor has the shape \(3,\)"):
    keras.distribution.distribute_tensor(np.zeros(3), layout)
  with pytest.raises(errors.ArgumentError, match="takes a keras.distribution.TensorLayout, got"):
    keras.distribution.distribute_tensor(X, ("data", None))
  mtf.keras.disable()
  assert keras.distribution.distribute_tensor.__qualname__ == "distribute_tensor"


@pytest.mark.parametrize(
  ("make", "kind", "message"),
  [
    (lambda: model_parallel({"d1/(k": (None, "model")}), "LayoutError", r"'d1/\(k' .* no regular"),
    (
      lambda: keras.distribution.DataParallel(devices=["cpu:0", "cpu:99"]),
      *("MeshShapeError", "'cpu:99': this process has CPU:0 to CPU:"),
    ),
    (
      lambda: keras.distribution.DataParallel(devices=["cpu:0", "tpu:0"]),
      *("MeshShapeError", "'tpu:0': this process has no TPU"),
    ),
    (lambda: mtf.keras.AutoParallel([]), "MeshShapeError", "AutoParallel: the list .* is empty"),
  ],
)
def test_what_cannot_be_is_told_early(make: Any, kind: str, message: str) -> None:
  with pytest.raises(getattr(errors, kind), match=message):
    keras.distribution.set_distribution(make())
    guide()


def build_and_evaluate_first() -> None:
  model = build()
  model.compile("adam", "sparse_categorical_crossentropy")
  x, labels = np.zeros((16, 28, 28, 1), "f"), np.zeros(16)
  model.evaluate(x, labels, batch_size=16, verbose=0)
  model.fit(x, labels, batch_size=16, verbose=0)


def test_patterns_that_match_nothing_are_told(caplog: pytest.LogCaptureFixture) -> None:
  maps = {"d1/kernel": (None, "model"), "d2/kernels": ("model", None), "d7.*": ("model", None)}
  keras.distribution.set_distribution(model_parallel(maps))
  with caplog.at_level(logging.WARNING, "mesh_tensorflow"):
    build_and_evaluate_first()
  # Once, though training decides the layout again.
  assert caplog.text.count("'d2/kernels'") == 1
  assert "'d2/kernels' of the layout map matches no variable" in caplog.text
  assert "names like it: d2/kernel," in caplog.text and "'d7.*'" in caplog.text
  assert "'d1/kernel'" not in caplog.text


def test_a_pattern_of_a_part_of_a_path_is_told_what_matches(
  caplog: pytest.LogCaptureFixture,
) -> None:
  """Keras matches whole paths: a reader of its guides may expect a search."""
  distribution = model_parallel({"head/kernel": (None, "model"), ".*d1/kernel": ("model", None)})
  matched = ["net/d1/kernel", "net/head/kernel"]
  with caplog.at_level(logging.WARNING, "mesh_tensorflow"):
    deciding._tell_unmatched(distribution, matched, [])
    assert caplog.text.count("matches no variable") == 1
    assert "'head/kernel' of" in caplog.text and "part of net/head/kernel" in caplog.text
    assert "give '.*head/kernel'" in caplog.text
    caplog.clear()
    deciding._tell_unmatched(distribution, ["other/kernel"], [])  # A second model, a GAN's say.
  assert "'.*d1/kernel'" not in caplog.text


def test_a_model_of_strings_runs_on_one_device(caplog: pytest.LogCaptureFixture) -> None:
  """As Keras' guides put the preprocessing before a model that was trained without it."""
  keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices()))
  lookup = keras.layers.StringLookup(vocabulary=["a", "b", "c"], output_mode="one_hot")
  inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
  inner.compile("sgd", "mse")
  texts, targets = tf.constant([["a"], ["b"], ["c"], ["d"]]), np.ones([4, 2], np.float32)
  inner.fit(lookup(texts), targets, verbose=0)
  model = keras.Sequential([keras.Input((1,), dtype="string"), lookup, inner])
  model.compile("sgd", "mse")
  with caplog.at_level(logging.WARNING, "mesh_tensorflow"):
    before = model.evaluate(texts, targets, verbose=0)
    np.testing.assert_allclose(before, inner.evaluate(lookup(texts), targets, verbose=0), 1e-5)
    model.fit(texts, targets, verbose=0)
  assert caplog.text.count("an input of strings, which meshes do not compute with") == 1
  after = model.evaluate(texts, targets, verbose=0)
  assert after < before
  np.testing.assert_allclose(after, inner.evaluate(lookup(texts), targets, verbose=0), 1e-5)
  np.testing.assert_allclose(model.predict(texts, verbose=0), inner(lookup(texts)), atol=1e-5)


def test_threads_take_turns_at_the_steps_of_a_model() -> None:
  keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices()))
  model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
  model.compile("sgd", "mse")
  x = np.random.default_rng(0).normal(size=[32, 8]).astype(np.float32)
  model.fit(x, x[:, :2], batch_size=8, verbose=0)
  expected = model.predict(x, batch_size=8, verbose=0)
  with concurrent.futures.ThreadPoolExecutor(3) as threads:
    found = list(threads.map(lambda _: model.predict(x, batch_size=8, verbose=0), range(6)))
  np.testing.assert_array_equal(found, [expected] * 6)
  assert "make_predict_function" not in vars(model)  # Keras' own again.
  with concurrent.futures.ThreadPoolExecutor(2) as threads:
    fitted = threads.submit(model.fit, x, x[:, :2], batch_size=8, epochs=3, verbose=0)
    predicted = threads.submit(model.predict, x, batch_size=8, verbose=0)
    assert np.isfinite(predicted.result()).all()
    assert np.all(np.diff(fitted.result().history["loss"]) < 0)


def test_a_data_set_of_unknown_length_takes_no_step_more_than_it_has() -> None:
  """Keras under TensorFlow counts one more at its end, which Adam's updates depend on."""
  keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices()))
  model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
  model.compile("adam", "mse")
  batches = tf.data.Dataset.from_tensors((np.ones([8, 8]), np.ones([8, 2]))).repeat(3)
  model.fit(batches.filter(lambda x, y: True), epochs=2, verbose=0)
  assert int(model.optimizer.iterations) == 6


def test_large_weights_that_stay_whole_are_told(caplog: pytest.LogCaptureFixture) -> None:
  keras.distribution.set_distribution(model_parallel({"up/kernel": (None, "model")}))
  layers = [keras.layers.Dense(n, name=name) for n, name in ((512, "up"), (512, "down"), (4, "x"))]
  model = keras.Sequential([keras.Input((512,)), *layers], name="")
  model.compile("sgd", "mse")
  with caplog.at_level(logging.WARNING, "mesh_tensorflow"):
    model.train_on_batch(np.zeros((8, 512), "f"), np.zeros((8, 4), "f"))
  assert "leaves 1 large weights whole on each device: down/kernel (262,144 numbers)" in caplog.text


def test_a_model_that_was_built_before(caplog: pytest.LogCaptureFixture) -> None:
  model = build()
  model.compile("adam", "sparse_categorical_crossentropy")
  keras.distribution.set_distribution(model_parallel())
  with caplog.at_level(logging.WARNING, "mesh_tensorflow"):
    model.train_on_batch(np.zeros((8, 28, 28, 1), "f"), np.zeros(8))
  assert "was built before the distribution was set" in caplog.text
  assert mtf.keras.serving.programs_of(model) is None


def test_wrong_maps() -> None:
  mesh = keras.distribution.DeviceMesh((2, 2), ("data", "model"), devices())
  layouts = keras.distribution.LayoutMap(mesh)
  layouts["d2/kernel"] = (None, None, "model")
  keras.distribution.set_distribution(
    keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="data")
  )
  with pytest.raises(errors.LayoutError, match="d2/kernel.*2 axes"):
    guide()
  with pytest.raises(errors.MeshShapeError, match="not of 4 devices"):
    mtf.keras.AutoParallel(devices(), mesh_shape="rows:2,cols:3")
  with pytest.raises(errors.MeshShapeError, match=r"there are \d+ devices, not 99"):
    mtf.keras.AutoParallel(99)


def test_a_model_without_a_distribution_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
  """A `train_on_batch` of it does not go through its variables each time."""
  model = build()
  model.compile("adam", "sparse_categorical_crossentropy")
  asked = []
  plain = mtf.keras.serving._distribution_of
  monkeypatch.setattr(
    mtf.keras.serving, "_distribution_of", lambda model: asked.append(model) or plain(model)
  )
  for _ in range(3):
    model.train_on_batch(np.zeros((8, 28, 28, 1), "f"), np.zeros(8))
  assert len(asked) == 1
  keras.distribution.set_distribution(model_parallel())
  model.train_on_batch(np.zeros((8, 28, 28, 1), "f"), np.zeros(8))
  assert len(asked) == 2 and mtf.keras.serving.programs_of(model) is None
