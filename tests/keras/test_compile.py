"""Models that are compiled, or that first predict, behind the mesh's back; and untrainable ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.keras import layouts as deciding
from tests.importing.comparing import slow_machine
from tests.keras.models import (
  X,
  Y,
  assert_same_history,
  assert_same_variables,
  compiled,
  placement,
  single,
)

FIT = {"batch_size": 11, "epochs": 2, "verbose": 0, "shuffle": False}


def _sum() -> Any:
  return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")


def _both(make: Callable[[], keras.Model] = lambda: compiled(make=single)) -> Any:
  """A model alone; an equal one, and it on a mesh."""
  alone, model = make(), make()
  return alone, model, mtf.keras.parallelize(model, placement("rows:2", "batch:rows"))


RECOMPILATIONS = {
  "optimizer and loss": lambda m: m.compile(keras.optimizers.SGD(0.02, momentum=0.9), _sum()),
  "loss": lambda m: m.compile(m.optimizer, _sum(), metrics=["accuracy"]),
  "the same": lambda m: m.compile(m.optimizer, m.loss, metrics=["accuracy"]),
  "metrics": lambda m: m.compile("sgd", m.loss, metrics=["sparse_categorical_crossentropy"]),
  "clipping": lambda m: m.compile(keras.optimizers.SGD(1.0, clipnorm=0.1), m.loss),
}


def test_the_model_itself_is_compiled_anew() -> None:
  alone, model, parallel = _both()
  for run in (alone, parallel):
    run.fit(X, Y, **FIT)
  for compile_anew in RECOMPILATIONS.values():
    for run in (alone, model):
      compile_anew(run)
    histories = [run.fit(X, Y, validation_data=(X[:8], Y[:8]), **FIT) for run in (parallel, alone)]
    assert_same_history(*histories)
    assert_same_variables(model, alone)


def test_what_is_frozen_by_compiling_the_model_itself() -> None:
  alone, model, parallel = _both(compiled)
  for run, one in ((alone, alone), (parallel, model)):
    run.fit(X, Y, **FIT)
    one.layers[0].trainable = False
    one.compile("sgd", _sum())
    before = one.layers[0].kernel.numpy()
    run.fit(X, Y, **FIT)
    np.testing.assert_array_equal(before, one.layers[0].kernel.numpy())
  assert_same_variables(model, alone)


def test_compiled_in_a_callback() -> None:
  """At the end of a loop; functions that Keras had before are not brought back."""
  alone, model, parallel = _both()
  for one in (alone, model):
    one.fit(X, Y, **FIT)  # Without the mesh, so the model has functions of Keras.
  for run, one in ((alone, alone), (parallel, model)):
    recompile = keras.callbacks.LambdaCallback(
      on_train_end=lambda logs, one=one: one.compile(keras.optimizers.SGD(0.05), _sum())
    )
    run.fit(X, Y, callbacks=[recompile], **FIT)
    one.fit(X, Y, **FIT)
    run.fit(X, Y, **FIT)
  assert_same_variables(model, alone)


def test_an_optimizer_that_is_only_set_does_not_train_as_in_keras(keras_traces: None) -> None:
  alone, model, parallel = _both()
  for run, one in ((alone, alone), (parallel, model)):
    run.fit(X, Y, **FIT)
    one.optimizer = keras.optimizers.SGD(1.0)
    run.fit(X, Y, **FIT)
  np.testing.assert_allclose(model.get_weights()[0], alone.get_weights()[0], rtol=1e-4, atol=1e-5)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
  """What is searched, on a machine for which splitting pays."""
  plain, choices = deciding.auto_layout, []

  def search(program: Any, **kwargs: Any) -> Any:
    kwargs = {**kwargs, "machine": slow_machine(), "time_limit": 2.0}
    choices.append(plain(program, **kwargs))
    return choices[-1]

  monkeypatch.setattr(deciding, "auto_layout", search)
  return choices


def test_a_layout_is_searched_anew_for_training(searches: list[Any]) -> None:
  alone, model = compiled(), compiled()
  parallel = mtf.keras.parallelize(model, placement("rows:2,cols:2", ""))
  for run in (alone, parallel):
    run.predict(X[:8], verbose=0)
    run.evaluate(X, Y, verbose=0)
    run.optimizer.iterations.assign(3)
  assert len(searches) == 1
  for run in (alone, parallel):
    run.train_on_batch(X, Y)
  assert len(searches) == 2
  assert parallel.layout == searches[1].layout
  histories = [run.fit(X, Y, validation_data=(X[:8], Y[:8]), **FIT) for run in (parallel, alone)]
  assert_same_history(*histories)
  assert_same_variables(model, alone)
  np.testing.assert_allclose(
    parallel.predict(X, verbose=0), alone.predict(X, verbose=0), rtol=1e-4, atol=1e-5
  )
  assert len(searches) == 2


def test_the_state_moves_to_the_layout_of_training(
  searches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
  """Whatever the two layouts are."""
  layouts = ["batch:rows,net/up.units:cols", "net/up.units:rows,net/down.units:cols"]
  search = deciding.auto_layout

  def other(program: Any, **kwargs: Any) -> Any:
    choice = search(program, **kwargs)
    rules = mtf.convert_to_layout_rules(layouts[len(searches) - 1])
    object.__setattr__(choice, "layout", rules)
    return choice

  monkeypatch.setattr(deciding, "auto_layout", other)
  alone, model = compiled(), compiled()
  parallel = mtf.keras.parallelize(model, placement("rows:2,cols:2", ""))
  for run in (alone, parallel):
    run.predict(X[:8], verbose=0)
    run.evaluate(X, Y, verbose=0)
    run.optimizer.build(run.trainable_variables)
    for v in run.optimizer.variables[2:]:
      v.assign(v + 0.25)
  for _ in range(2):
    for run in (alone, parallel):
      run.fit(X, Y, **FIT)
    assert parallel.layout == mtf.convert_to_layout_rules(layouts[1])
  assert_same_variables(model, alone)


def test_a_state_that_is_written_before_the_program_that_trains_is_made() -> None:
  """It is not written a second time after the first step."""
  alone, model, parallel = _both()
  for run in (alone, parallel):
    run.optimizer.build(run.trainable_variables)
    run.predict(X, verbose=0)
    run.optimizer.iterations.assign(5)
    for v in run.optimizer.variables[2:]:
      v.assign(v + 0.25)
    run.fit(X, Y, **FIT)
  assert model.optimizer.iterations == 9
  assert_same_variables(model, alone)


class TestWithoutTrainableWeights:
  @pytest.mark.parametrize("kind", ["no variables", "frozen", "only a seed"])
  def test_as_in_keras(self, kind: str) -> None:
    def make() -> keras.Model:
      keras.utils.set_random_seed(0)
      layer = {
        "no variables": lambda: keras.layers.Rescaling(2.0),
        "frozen": lambda: keras.layers.Dense(8, trainable=False),
        "only a seed": lambda: keras.layers.Dropout(0.0),
      }[kind]()
      model = keras.Sequential([keras.Input([8]), layer])
      model.compile("adam", "mse", metrics=["mae"])
      return model

    alone, model, parallel = _both(make)
    np.testing.assert_allclose(
      parallel.predict(X, verbose=0), alone.predict(X, verbose=0), rtol=1e-5, atol=1e-6
    )
    with pytest.warns(UserWarning, match="not have any trainable weights"):
      histories = [run.fit(X, X, **FIT) for run in (parallel, alone)]
    assert_same_history(*histories)
    assert parallel.evaluate(X, X, verbose=0) == pytest.approx(
      alone.evaluate(X, X, verbose=0), rel=1e-5
    )
    for u, v in zip(model.get_weights(), alone.get_weights()):
      np.testing.assert_array_equal(u, v)

  def test_without_an_optimizer(self) -> None:
    model = keras.Sequential([keras.Input([8]), keras.layers.Rescaling(2.0)])
    model.compile(optimizer=None, loss="mse")
    parallel = mtf.keras.parallelize(model, "rows:2", "batch:rows")
    history = parallel.fit(X, X, verbose=0)
    assert history.history["loss"][0] == pytest.approx(float(np.mean(X * X)), rel=1e-5)


def test_a_tape_around_an_evaluation_that_has_no_gradients() -> None:
  alone, model, parallel = _both()
  for run in (alone, parallel):
    run.fit(X, Y, **FIT)
    with tf.GradientTape(persistent=True):
      run.evaluate(X, Y, verbose=0)
  assert_same_variables(model, alone)
