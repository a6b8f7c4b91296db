"""The state as Python sees and changes it between steps, on a mesh beside Keras alone."""

from __future__ import annotations

import gc
import pathlib
import random
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.keras import mirror
from mesh_tensorflow.meshes.store import StoredVariable
from tests.keras.models import X, Y, assert_same_variables, compiled, placement, single

SEARCHED_TOO = True
LONG_IF_SEARCHED = (
  "test_each_action_after_each_batch",
  "test_export",
  "test_in_a_graph",
  "test_class_and_call",
  "test_attributes_reach_it",
  "test_stop_training_within_a_loop",
  "test_a_model_that_stays_behind_has_the_state",
  "test_a_model_that_was_used_is_let_go_of",
  "test_nothing_is_copied_that_nobody_reads",
  "test_a_function_that_uses_the_model_for_some_arguments",
  "test_variables_that_keras_does_not_know",
  "test_frozen_weights_stay",
  "test_generate_is_said_to_be_unsplit_once",
  "test_two_meshes_share_a_model",
)
FIT = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}


class Subject:
  """What reads and writes one model: the actions that are drawn are its methods.

  Args:
    model: the Keras model.
    run: it, or it on a mesh.
    folder: for files.
  """

  def __init__(self, model: keras.Model, run: Any, folder: pathlib.Path):
    self.model, self.run, self.folder = model, run, folder
    self.kernel, self.bias = model.layers[0].kernel, model.layers[-1].bias
    # Held from before the first step on, and traced before it.
    self.held = self.kernel.value
    self.traced = tf.function(lambda x: model(x))
    self.traced(X[:2])
    self.run.train_on_batch(X[:8], Y[:8])  # Before, Keras' metrics have no values to read.
    self.average = self.kernel.numpy()

  def read_numpy(self) -> Any:
    return self.kernel.numpy()

  def read_array(self) -> Any:
    return np.array(self.bias)

  def read_held(self) -> Any:
    return tf.reduce_sum(self.held), self.held.read_value()

  def read_by_operations(self) -> Any:
    return self.kernel * 2.0, keras.ops.sum(self.bias), tf.norm(self.kernel.value)

  def read_weights(self) -> Any:
    return self.model.get_weights()

  def read_by_call(self) -> Any:
    return self.model(X[:3])

  def read_by_traced_function(self) -> Any:
    return self.traced(X[:2])

  def read_by_new_function(self) -> Any:
    return tf.function(lambda: 1.0 * self.bias)()

  def read_by_gradient(self) -> Any:
    with tf.GradientTape() as tape:
      loss = tf.reduce_mean(self.model(X[:2]) ** 2)
    return tape.gradient(loss, self.model.trainable_variables[0].value)

  def read_by_evaluation(self) -> Any:
    return self.run.evaluate(X[:8], Y[:8], verbose=0)

  def read_by_prediction(self) -> Any:
    return self.run.predict(X[:8], verbose=0)

  def read_optimizer(self) -> Any:
    o = self.model.optimizer
    return [o.iterations.numpy(), o.learning_rate.numpy(), *(v.numpy() for v in o.variables)]

  def read_metrics(self) -> Any:
    return {k: v for k, v in self.model.get_metrics_result().items()}

  def read_file(self) -> Any:
    self.model.save_weights(self.folder / "now.weights.h5")
    other = keras.models.clone_model(self.model)
    other.load_weights(self.folder / "now.weights.h5")
    return other.get_weights()

  def read_checkpoint(self) -> Any:
    path = tf.train.Checkpoint(kernel=self.held).write(str(self.folder / "checkpoint"))
    return tf.train.load_variable(path, "kernel/.ATTRIBUTES/VARIABLE_VALUE")

  def write_kernel(self) -> None:
    self.kernel.assign(self.kernel * 0.5)

  def write_sum(self) -> None:
    self.bias.assign_add(0.1 * np.ones(4, np.float32))

  def write_held(self) -> None:
    self.held.assign_sub(0.1 * tf.sign(self.held))

  def write_a_row(self) -> None:
    self.held[2].assign(tf.ones(self.held.shape[1:]))

  def write_weights(self) -> None:
    self.model.set_weights([0.9 * w for w in self.model.get_weights()])

  def write_from_file(self) -> None:
    self.model.save_weights(self.folder / "kept.weights.h5")
    self.bias.assign(self.bias + 1.0)
    self.model.load_weights(self.folder / "kept.weights.h5")

  def write_by_function(self) -> None:
    tf.function(lambda: self.held.assign(self.held * 1.1))()

  def write_rate(self) -> None:
    self.model.optimizer.learning_rate = 0.8 * self.model.optimizer.learning_rate.numpy()

  def write_slots(self) -> None:
    for v in self.model.optimizer.variables[2:]:
      v.assign(0.5 * v)

  def write_average(self) -> None:
    self.average = 0.5 * (self.average + self.kernel.numpy())
    self.kernel.assign(self.average)

  def write_metrics(self) -> None:
    self.model.reset_metrics()

  def write_stop(self) -> None:
    self.run.stop_training = True


ACTIONS = [n for n in vars(Subject) if n.startswith(("read_", "write_")) and n != "write_stop"]


class Plays(keras.callbacks.Callback):
  """Does drawn actions at drawn places, and keeps what they returned."""

  PLACES = ("train_batch_begin", "train_batch_end", "epoch_begin", "epoch_end", "test_batch_end")

  def __init__(self, subject: Subject, seed: int, actions: list[str]):
    super().__init__()
    self.draw, self.subject, self.actions = random.Random(seed), subject, actions
    self.seen: list[tuple[str, Any]] = []
    self.inside = False
    for place in self.PLACES:
      setattr(self, f"on_{place}", lambda *args, place=place, **kwargs: self.play(place))

  def play(self, place: str) -> None:
    if self.inside:
      return
    self.inside = True
    for _ in range(self.draw.choice([0, 1, 1, 2, 4])):
      name = self.draw.choice(self.actions)
      self.seen.append((f"{name} at {place}", getattr(self.subject, name)()))
    self.inside = False


def assert_same_seen(ours: Plays, theirs: Plays) -> None:
  assert [n for n, _ in ours.seen] == [n for n, _ in theirs.seen]
  assert len(ours.seen) > 3
  for (name, a), (_, b) in zip(ours.seen, theirs.seen):
    assert_same_values(a, b, name)


def assert_same_values(ours: Any, theirs: Any, name: str) -> None:
  for u, v in zip(tf.nest.flatten(ours), tf.nest.flatten(theirs), strict=True):
    if v is not None:
      np.testing.assert_allclose(u, v, rtol=1e-3, atol=1e-4, err_msg=name)


def _subjects(make: Callable[[], keras.Model], mesh: Any, folder: pathlib.Path) -> list[Subject]:
  theirs, ours = make(), make()
  parallel = mtf.keras.parallelize(ours, *mesh)
  folders = [folder / "theirs", folder / "ours"]
  for f in folders:
    f.mkdir()
  return [Subject(theirs, theirs, folders[0]), Subject(ours, parallel, folders[1])]


def _averaging() -> keras.Model:
  return compiled(lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9))


def _play(subjects: list[Subject], seed: int, actions: list[str]) -> None:
  plays = [Plays(s, seed, actions) for s in subjects]
  for s, p in zip(subjects, plays):
    s.run.fit(X[:16], Y[:16], callbacks=[p], validation_data=(X[:8], Y[:8]), **FIT)
  assert_same_seen(*plays)
  assert_same_variables(subjects[1].model, subjects[0].model, 1e-3)


@pytest.mark.parametrize(
  "seed", [0, *(pytest.param(i, marks=pytest.mark.long) for i in range(1, 25))]
)
@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.slow
def test_drawn_actions_in_callbacks(
  seed: int, large: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  """Also where each weight counts as large, so that it is in the model or on the mesh, not both."""
  if large:
    monkeypatch.setattr(mirror, "LARGE", 0)
    monkeypatch.setattr(mirror, "_KEPT_BYTES", 0)
  mesh = ["rows:2,cols:2"] if seed % 3 == 2 else [placement()]
  _play(_subjects(_averaging, mesh, tmp_path), seed, ACTIONS)


def test_each_action_after_each_batch(tmp_path: pathlib.Path) -> None:
  """By `train_on_batch`, alone and behind a write; a step follows, which must see it."""
  subjects = _subjects(lambda: compiled(make=single), [placement("rows:2", "batch:rows")], tmp_path)
  weights = subjects[0].model.get_weights()
  for action in ACTIONS:
    for s in subjects:
      s.model.set_weights(weights)
    for before in 2 * ("read_numpy", "write_kernel"):
      seen = []
      for s in subjects:
        result = s.run.train_on_batch(X[:8], Y[:8])
        getattr(s, before)()
        seen.append((result, getattr(s, action)()))
      assert_same_values(seen[1], seen[0], action)
    assert_same_variables(subjects[1].model, subjects[0].model, 1e-3)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
  """The names of the variables that are brought from the mesh to the host."""
  names: list[str] = []
  plain = StoredVariable.numpy

  def numpy(self: StoredVariable) -> Any:
    names.append(self.name)
    return plain(self)

  monkeypatch.setattr(StoredVariable, "numpy", numpy)
  return names


class Logs(keras.callbacks.Callback):
  """Looks at logs, calls a function that has nothing to do with the model."""

  def __init__(self) -> None:
    super().__init__()
    self.scaled = tf.function(lambda x: 2.0 * x)
    self.losses: list[float] = []

  def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
    self.losses.append(float(self.scaled(logs["loss"])))
    assert self.model.count_params() and self.model.layers[0].kernel.shape[0] == 8


def test_nothing_is_copied_that_nobody_reads(copies: list[str]) -> None:
  """In a loop the metrics at the end of an epoch only, whatever else callbacks look at."""
  parallel = mtf.keras.parallelize(compiled(), placement("rows:2", "batch:rows"))
  parallel.train_on_batch(X[:8], Y[:8])
  pushed = [v.slices[0].handle for v in parallel.mesh_impl.variable_store]
  copies.clear()
  parallel.fit(X[:16], Y[:16], callbacks=[Logs()], **FIT)
  parallel.train_on_batch(X[:8], Y[:8])
  assert not [n for n in copies if n.startswith(("net/", "adam"))]
  assert len(copies) <= 2 * 2 * len(parallel.metrics_variables)
  copies.clear()
  parallel.model.layers[0].kernel.numpy()
  assert copies == ["net/up/kernel"]
  assert len(pushed) == len(list(parallel.mesh_impl.variable_store))


def test_two_meshes_share_a_model() -> None:
  """Each has what the other one did."""
  theirs, ours = (compiled(make=single) for _ in range(2))
  by_rows, by_cols = (
    mtf.keras.parallelize(ours, placement(shape, layout))
    for shape, layout in (("rows:2", "batch:rows"), ("cols:2", "net/down.units:cols"))
  )
  for one in (by_rows, by_cols, by_cols, by_rows, by_cols):
    assert one.train_on_batch(X[:8], Y[:8])[0] == pytest.approx(
      theirs.train_on_batch(X[:8], Y[:8])[0], rel=1e-4
    )
  assert_same_variables(ours, theirs)


def test_a_function_that_uses_the_model_for_some_arguments() -> None:
  model = compiled(make=single)
  parallel = mtf.keras.parallelize(model, placement("rows:2", "batch:rows"))
  parallel.train_on_batch(X[:8], Y[:8])
  function = tf.function(lambda x, uses: model(x) if uses else tf.zeros([]))
  function(X[:2], False)
  for _ in range(3):
    parallel.train_on_batch(X[:8], Y[:8])
    result = function(X[:2], True)
    np.testing.assert_allclose(result, model(X[:2]), rtol=1e-5)


class Counts(keras.Sequential):
  """Has a variable of TensorFlow's own, which a step assigns."""

  def __init__(self, *args: Any, **kwargs: Any):
    super().__init__(*args, **kwargs)
    self.steps = tf.Variable(0.0, trainable=False, name="steps")

  def train_step(self, data: Any) -> Any:
    logs = super().train_step(data)
    self.steps.assign_add(1.0)
    return {**logs, "steps": self.steps + 0.0}


def test_variables_that_keras_does_not_know() -> None:
  keras.utils.set_random_seed(0)
  model = Counts([keras.Input((8,)), keras.layers.Dense(4)], name="net")
  model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
  parallel = mtf.keras.parallelize(model, placement("rows:2", "batch:rows"))
  logs = [parallel.train_on_batch(X[:8], Y[:8], return_dict=True)["steps"] for _ in range(2)]
  assert [*logs, model.steps.numpy()] == [1, 2, 2]
  model.steps.assign(10.0)
  assert parallel.train_on_batch(X[:8], Y[:8], return_dict=True)["steps"] == 11


class TestStandsForTheModel:
  def test_class_and_call(self) -> None:
    theirs, ours = (compiled(make=single) for _ in range(2))
    parallel = mtf.keras.parallelize(ours, placement("rows:2", "batch:rows"))
    assert isinstance(parallel, keras.Model)
    assert isinstance(parallel, keras.Sequential)
    assert type(parallel) is mtf.keras.ParallelModel
    for model in (parallel, theirs):
      model.train_on_batch(X[:8], Y[:8])
    np.testing.assert_allclose(parallel(X[:3]), theirs(X[:3]), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
      keras.Sequential([keras.Input((8,)), parallel]).predict(X[:3], verbose=0),
      theirs(X[:3]),
      rtol=1e-4,
      atol=1e-6,
    )
    copied = keras.models.clone_model(parallel)
    assert copied.count_params() == parallel.count_params() == theirs.count_params()

  def test_attributes_reach_it(self) -> None:
    model = compiled(make=single)
    parallel = mtf.keras.parallelize(model, placement("rows:2", "batch:rows"))
    parallel.trainable = False
    assert not model.trainable and not model.layers[0].trainable
    assert not parallel.trainable_variables
    parallel.trainable = True
    parallel.stop_training = True
    parallel.note = "kept"
    assert model.stop_training and model.note == "kept"
    del parallel.note
    assert not hasattr(model, "note")
    optimizer = keras.optimizers.SGD(0.1)
    parallel.optimizer = optimizer
    assert model.optimizer is optimizer
    assert parallel.metrics_names == model.metrics_names
    assert "count_params" in dir(parallel)
    with pytest.raises(AttributeError):
      parallel.layout = "batch:rows"

  @pytest.mark.parametrize("graph", [False, True])
  def test_export(self, graph: bool, tmp_path: pathlib.Path) -> None:
    model = compiled(make=single)
    parallel = mtf.keras.parallelize(model, placement("rows:2", "batch:rows"))
    parallel.train_on_batch(X[:8], Y[:8])
    if graph:
      tf.saved_model.save(model, str(tmp_path))
      loaded = tf.saved_model.load(str(tmp_path))
      (served,) = loaded.signatures["serving_default"](tf.constant(X[:2])).values()
    else:
      parallel.export(str(tmp_path), verbose=False)
      loaded = tf.saved_model.load(str(tmp_path))
      served = loaded.serve(X[:2])
    np.testing.assert_allclose(served, model(X[:2]), atol=1e-6)

  def test_in_a_graph(self) -> None:
    model = compiled(make=single)
    before = model.layers[0].bias.numpy()
    parallel = mtf.keras.parallelize(model, placement("rows:2", "batch:rows"))
    parallel.train_on_batch(X[:8], Y[:8])
    with tf.Graph().as_default():
      _ = model.layers[0].bias.handle
    assert "net/down/bias" not in parallel._programs.mirror._newer
    assert np.any(model.layers[0].bias.numpy() != before)

  def test_stop_training_within_a_loop(self) -> None:
    parallel = mtf.keras.parallelize(compiled(make=single), placement("rows:2", "batch:rows"))
    stop = keras.callbacks.LambdaCallback(
      on_train_batch_end=lambda batch, logs: setattr(parallel, "stop_training", True)
    )
    assert len(parallel.fit(X[:16], Y[:16], callbacks=[stop], **FIT).epoch) == 1

  def test_frozen_weights_stay(self) -> None:
    model = compiled()
    parallel = mtf.keras.parallelize(model, placement())
    parallel.layers[0].trainable = False
    parallel.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    before = parallel.get_weights()
    parallel.fit(X[:16], Y[:16], **FIT)
    changed = [bool(np.any(u != v)) for u, v in zip(before, parallel.get_weights())]
    assert changed == [False, False, True, True]


def test_a_model_that_stays_behind_has_the_state() -> None:
  """And is as it was: its variables and TensorFlow's functions have their own classes again."""
  theirs, ours = (compiled(make=single) for _ in range(2))
  kind, call = type(ours.layers[0].kernel.value), type(tf.function(lambda: 0)).__call__
  parallel = mtf.keras.parallelize(ours, placement("rows:2", "batch:rows"))
  for model in (parallel, theirs):
    model.train_on_batch(X[:8], Y[:8])
  assert type(ours.layers[0].kernel.value) is not kind
  del parallel, model
  gc.collect()
  assert_same_variables(ours, theirs)
  assert type(ours.layers[0].kernel.value) is kind
  if not mirror._WATCHED:  # Else of other tests.
    assert type(tf.function(lambda: 0)).__call__ is call


def test_a_model_that_was_used_is_let_go_of() -> None:
  """With its programs, whose gradients TensorFlow would keep."""
  model = compiled(make=single)
  parallel = mtf.keras.parallelize(model, "rows:2", "batch:rows")
  parallel.predict(X[:8], verbose=0)
  parallel.evaluate(X[:8], Y[:8], verbose=0)
  held = [weakref.ref(x) for x in (model, parallel, parallel._programs.latest().function)]
  del model, parallel
  keras.backend.clear_session()  # Keras itself keeps the functional models of a session.
  gc.collect()
  assert [ref() for ref in held] == [None] * 3


class Generates(keras.Sequential):
  """Like a task of keras-hub: a compiled function of its own."""

  def generate(self, x: Any) -> Any:
    if not hasattr(self, "generate_function"):
      self.generate_function = tf.function(lambda x: self(x))
    return self.generate_function(x).numpy()


def test_generate_is_said_to_be_unsplit_once(caplog: pytest.LogCaptureFixture) -> None:
  keras.utils.set_random_seed(0)
  model = Generates([keras.Input((8,)), keras.layers.Dense(4)], name="net")
  model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
  parallel = mtf.keras.parallelize(model, placement("rows:2", "batch:rows"))
  seen = [parallel.generate(X[:2])]

  def look(batch: int, logs: Any) -> None:
    seen.append(model.generate(X[:2]))
    np.testing.assert_array_equal(seen[-1], model(X[:2]))

  looks = keras.callbacks.LambdaCallback(on_train_batch_end=look)
  parallel.fit(X[:16], Y[:16], callbacks=[looks], **FIT)
  assert all(np.any(u != v) for u, v in zip(seen, seen[1:]))
  assert caplog.text.count("net.generate() is not split") == 1
  with pytest.raises(AttributeError, match="generate"):
    mtf.keras.parallelize(compiled(make=single), "rows:2").generate(X)
