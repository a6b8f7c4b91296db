"""Tests that give layouts by hand run a second time, with the layout that is searched.

So do those of a module that says `SEARCHED_TOO = True`; of the functions in its `LONG_IF_SEARCHED`
the second time is a long test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.environment.data_sets import UntunedIterators
from mesh_tensorflow.keras import layouts
from tests.importing.comparing import slow_machine
from tests.keras import models


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
  if not getattr(metafunc.module, "SEARCHED_TOO", False):
    return
  is_long = metafunc.function.__name__ in getattr(metafunc.module, "LONG_IF_SEARCHED", ())
  mark = pytest.mark.long if is_long else pytest.mark.slow
  metafunc.fixturenames.append("layouts_of")
  metafunc.parametrize("layouts_of", ["given", pytest.param("auto", marks=mark)], indirect=True)


@pytest.fixture(autouse=True, scope="session")
def _iterators_end_at_once() -> Iterator[None]:
  """Those of plain Keras, too, beside which the tests look at parallel models."""
  with UntunedIterators():
    yield


@pytest.fixture(autouse=True, scope="session")
def _traced_by_keras() -> Iterator[dict[str, Callable[..., Any]]]:
  """Plain Keras, beside which the tests look at parallel models, runs operations one by one.

  To trace its step takes longer than to run the few steps of a test. Models on a mesh do not make
  Keras' functions. Several steps per execution are a loop, which is traced; it is not compiled by
  XLA unless a test asks for it. Yields Keras' methods, which trace.
  """
  names = ("make_train_function", "make_test_function", "make_predict_function")
  traced = {name: getattr(keras.Model, name) for name in names}

  def with_operations_one_by_one(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(model: keras.Model, force: bool = False) -> Any:
      asked = model.run_eagerly
      model.run_eagerly = asked or model.steps_per_execution == 1
      try:
        return make(model, force)
      finally:
        model.run_eagerly = asked

    return made

  with pytest.MonkeyPatch.context() as m:
    m.setattr(keras.Model, "_resolve_auto_jit_compile", lambda self: False, raising=False)
    for name, make in traced.items():
      m.setattr(keras.Model, name, with_operations_one_by_one(make))
    yield traced


@pytest.fixture
def keras_traces(
  _traced_by_keras: dict[str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
  """Plain Keras traces its functions, as it does for users."""
  for name, make in _traced_by_keras.items():
    monkeypatch.setattr(keras.Model, name, make)


@pytest.fixture
def enabled(cpu_devices: list[str]) -> Iterator[None]:
  """Keras' distributions are served, and none is left behind."""
  mtf.keras.enable()
  yield
  keras.distribution.set_distribution(None)
  mtf.keras.disable()


@pytest.fixture
def layouts_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
  """Whose layouts meshes of `models` have: the test's, or those of an automatic layout.

  The machine is one whose devices compute so slowly that splitting pays even for models of tests.
  """
  if request.param == "given":
    yield request.param
    return
  plain, choices = layouts.auto_layout, []

  def search(program: Any, **kwargs: Any) -> Any:
    choices.append(plain(program, **{**kwargs, "machine": slow_machine(), "time_limit": 5.0}))
    return choices[-1]

  monkeypatch.setattr(layouts, "auto_layout", search)
  with models.search():
    yield request.param
  assert all(c.layout.pairs for c in choices)
