"""`ParallelModel`: a Keras model that trains, evaluates and predicts on a mesh."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from mesh_tensorflow.errors import UnsupportedError
from mesh_tensorflow.keras import hooks
from mesh_tensorflow.keras.programs import Programs
from mesh_tensorflow.keras.summary import variables_table
from mesh_tensorflow.meshes.layout import LayoutRules
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.planning.describe import Report, describe


class ParallelModel:
  """A Keras model on a mesh; see `parallelize`, which makes it.

  It has the methods of a `keras.Model`, with the arguments and results of the installed Keras. What
  it has not itself is that of the model: `parallel.layers`, `parallel.optimizer`.

  The state is twice there: in the slices on the mesh, and in the variables of the model. `fit`,
  `evaluate` and `predict` begin with what the model's variables hold, and when they are done those
  hold what the mesh has; so do `save`, `get_weights` and their kin. After `train_on_batch` it is
  `sync` that brings it over.

  Args:
    programs: what runs.

  Attributes:
    model: the Keras model.
  """

  def __init__(self, programs: Programs):
    self._programs = programs
    self._running = 0
    self.model = programs.model

  def __getattr__(self, name: str) -> Any:
    if name.startswith("_") or name == "model":
      raise AttributeError(name)
    return getattr(self.model, name)

  # ------------------------------------------------------------------- the mesh

  @property
  def mesh_impl(self) -> MeshImpl | None:
    """The mesh implementation; None until a first batch has decided the layout."""
    return self._programs.mesh_impl

  @property
  def layout(self) -> LayoutRules | None:
    """The layout rules; None until a first batch has decided them."""
    return None if self.mesh_impl is None else self.mesh_impl.layout_rules

  @property
  def dimensions(self) -> Any:
    """The dimensions of a step (of training, if one ran): a table of names, sizes and places."""
    return self._programs.latest().imported.dimensions

  def picture(self) -> str:
    """An SVG picture of the program of `dimensions`: results of layers, variables, dimensions."""
    picture: str = self._programs.latest().imported.picture()
    return picture

  def save_picture(self, path: str) -> None:
    """Writes `picture` into a file.

    Args:
      path: ends in .svg.
    """
    self._programs.latest().imported.save_picture(path)

  def describe(self, machine: Any = None) -> Report:
    """`mtf.describe` of a step: what the layout matches, memory of a device, bytes, time.

    Args:
      machine: see `mtf.describe`.

    Raises:
      GraphError: no step has run yet, so the sizes of a batch are not known.
    """
    function = self._programs.latest().function
    assert function is not None
    return describe(function, machine=machine)

  def sync(self) -> None:
    """Sets the variables of the Keras model to what the mesh has."""
    self._programs.mirror.pull()

  # ------------------------------------------------------------- Keras' methods

  def compile(self, *args: Any, **kwargs: Any) -> None:
    """As `keras.Model.compile`: the model is compiled; programs are made anew."""
    self.sync()
    self.model.compile(*args, **kwargs)
    self._programs.reset()

  def fit(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
    """As `keras.Model.fit`, on the mesh.

    A batch of another size than the others is no matter: where its examples cannot be split over
    the mesh, each device computes all of them, and the weights stay as they are split.

    Raises:
      UnsupportedError: `run_eagerly` is set, or a step has an operation without a rule.
    """
    return self._loop("fit", args, kwargs)

  def evaluate(self, *args: Any, **kwargs: Any) -> Any:
    """As `keras.Model.evaluate`, on the mesh."""
    return self._loop("evaluate", args, kwargs)

  def predict(self, *args: Any, **kwargs: Any) -> Any:
    """As `keras.Model.predict`, on the mesh."""
    return self._loop("predict", args, kwargs)

  def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
    """As `keras.Model.train_on_batch`, on the mesh; see `sync`."""
    with self._on_mesh():
      return self.model.train_on_batch(*args, **kwargs)

  def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
    """As `keras.Model.test_on_batch`, on the mesh."""
    with self._on_mesh():
      return self.model.test_on_batch(*args, **kwargs)

  def predict_on_batch(self, *args: Any, **kwargs: Any) -> Any:
    """As `keras.Model.predict_on_batch`, on the mesh."""
    with self._on_mesh():
      return self.model.predict_on_batch(*args, **kwargs)

  def save(self, *args: Any, **kwargs: Any) -> Any:
    """As `keras.Model.save`: the model with the state of the mesh, optimizer included."""
    self.sync()
    return self.model.save(*args, **kwargs)

  def save_weights(self, *args: Any, **kwargs: Any) -> Any:
    """As `keras.Model.save_weights`."""
    self.sync()
    return self.model.save_weights(*args, **kwargs)

  def load_weights(self, *args: Any, **kwargs: Any) -> Any:
    """As `keras.Model.load_weights`."""
    return self._written("load_weights", args, kwargs)

  def get_weights(self) -> list[Any]:
    """As `keras.Model.get_weights`."""
    self.sync()
    weights: list[Any] = self.model.get_weights()
    return weights

  def set_weights(self, weights: Any) -> None:
    """As `keras.Model.set_weights`."""
    self._written("set_weights", (weights,), {})

  def export(self, *args: Any, **kwargs: Any) -> Any:
    """As `keras.Model.export`: the plain model, with the state of the mesh."""
    self.sync()
    return self.model.export(*args, **kwargs)

  def get_metrics_result(self) -> Any:
    """As `keras.Model.get_metrics_result`."""
    self.sync()
    return self.model.get_metrics_result()

  def reset_metrics(self) -> None:
    """As `keras.Model.reset_metrics`."""
    self._written("reset_metrics", (), {})

  def summary(self, print_fn: Callable[[str], Any] | None = None, **kwargs: Any) -> None:
    """As `keras.Model.summary`, and how each variable is split.

    Args:
      print_fn: gets the text of each of the two tables; prints by default.
      **kwargs: other arguments of `keras.Model.summary`.
    """
    self.model.summary(print_fn=print_fn, **kwargs)
    (print_fn or print)(self.placement())

  def placement(self) -> str:
    """A table: how each variable lies on the mesh, beside what a layout map says, if one was given.

    Raises:
      GraphError: no step has run yet.
    """
    self._programs.latest()
    decision = self._programs.decision
    assert decision is not None
    asked = {} if decision.map_layout is None else decision.map_layout.asked
    of_model = self._programs.names_of_model()
    return variables_table(list(decision.mesh_impl.variable_store), of_model, asked)

  # ------------------------------------------------------------------- within

  def _written(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mirror = self._programs.mirror
    return hooks.before_push(getattr(self.model, method), mirror)(*args, **kwargs)

  def _loop(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    method = getattr(self.model, name)
    bound = inspect.signature(method).bind(*args, **kwargs)
    mirror = self._programs.mirror
    first = hooks.FirstCallback(mirror)
    last = hooks.LastCallback(mirror, self._programs.never_assigned)
    with self._on_mesh(), hooks.around(bound.arguments.get("callbacks"), first, last) as callbacks:
      bound.arguments["callbacks"] = callbacks
      try:
        return method(*bound.args, **bound.kwargs)
      finally:
        if name != "predict":
          self.sync()

  @contextlib.contextmanager
  def _on_mesh(self) -> Iterator[None]:
    """Puts the mesh's functions into the place of Keras'."""
    if self._running:  # A callback that evaluates, say.
      yield
      return
    if self.model.run_eagerly:
      raise UnsupportedError(
        "parallelize: the model is compiled with run_eagerly=True, and a mesh runs programs; "
        "compile it without, and debug with tf.config.run_functions_eagerly(True)"
      )
    self._programs.mirror.push()
    self._running += 1
    try:
      with contextlib.ExitStack() as stack:
        stack.enter_context(hooks.replaced(self.model, self._shadows()))
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None:
          finalize = optimizer.finalize_variable_values
          shadow = hooks.before_push(finalize, self._programs.mirror)
          stack.enter_context(hooks.replaced(optimizer, {"finalize_variable_values": shadow}))
        yield
    finally:
      self._running -= 1

  def _shadows(self) -> dict[str, Any]:
    """The attributes that the model has while it runs on the mesh."""
    model, mirror, programs = self.model, self._programs.mirror, self._programs
    shadows: dict[str, Any] = {
      name: hooks.after_pull(getattr(model, name), mirror)
      for name in ("get_weights", "save", "save_weights", "export")
    }
    for name in ("load_weights", "set_weights"):
      shadows[name] = hooks.before_push(getattr(model, name), mirror)
    for name, function in (
      ("train", programs.train_function),
      ("test", programs.test_function),
      ("predict", programs.predict_function),
    ):
      shadows[f"{name}_function"] = function
      # Keras calls it before each loop, to make the function if there is none.
      shadows[f"make_{name}_function"] = lambda force=False, function=function: function
    result, reset = model.get_metrics_result, model.reset_metrics

    def get_metrics_result() -> Any:
      if not tf.inside_function():  # Else it is traced, as a part of the program.
        mirror.pull(programs.metric_variables())
      return result()

    def reset_metrics() -> None:
      mirror.pull(programs.metric_variables())  # Else a zero might be no change.
      reset()
      mirror.push(programs.metric_variables())

    return {**shadows, "get_metrics_result": get_metrics_result, "reset_metrics": reset_metrics}
