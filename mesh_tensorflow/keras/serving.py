"""`mtf.keras.enable`: Keras' own distribution API, served under TensorFlow.

`keras.distribution` is Keras' way to train on many devices. Keras serves it under JAX; under
TensorFlow `set_distribution` followed by `fit` trains on one device, and says nothing. Here its
public classes get what is missing, in this file alone, and `disable` puts back what was there.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.errors import ArgumentError, LayoutError
from mesh_tensorflow.keras import archives, mirror, processes, steps
from mesh_tensorflow.keras.layouts import (
  AutoParallel,
  check_patterns,
  convert_to_mesh,
  note_output,
)
from mesh_tensorflow.keras.programs import Programs

_LOG = logging.getLogger("mesh_tensorflow")

# Methods of keras.Model that run Keras' loops, or one step of one.
_LOOPS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
# Attributes that Keras does not track, of a model and of a variable.
_PROGRAMS, _IS_ALONE, _BORN_UNDER = "_mtf_programs", "_mtf_is_alone", "_mtf_distribution"
_TWIN = "_mtf_twin"  # Of a callback.

_LOCK = threading.Lock()
# What was replaced: class or module; name; the attribute that it had itself, None if inherited.
_REPLACED: list[tuple[Any, str, Any]] = []


def enable() -> None:
  """Serves `keras.distribution` under TensorFlow, for every `keras.Model` that is built after.

  From then on `keras.distribution.set_distribution(d)`, and `with d.scope():`, mean what they mean
  under JAX: a model that is built under `DataParallel`, `ModelParallel` or `AutoParallel` trains,
  evaluates and predicts split over the devices of its mesh. The model stays the user's own. A model
  that was built without a distribution is Keras' alone, also if one is set when it is trained: that
  is told.

  `keras.distribution.initialize` joins several processes, whose devices `list_devices` then lists;
  see `processes`.

  Under another backend than TensorFlow nothing is done: JAX serves the API itself. Calling it again
  does nothing.
  """
  if keras.config.backend() != "tensorflow":
    return
  with _LOCK:
    if _REPLACED:
      return
    for name in _LOOPS:
      _replace(keras.Model, name, _loop(name))
    _replace(keras.Model, "summary", _summary())
    _replace(keras.Model, "__init_subclass__", _made_class)
    for kind in _subclasses(keras.Model):
      _serve_generation(kind)
    _replace(keras.Variable, "__init__", _born())
    _replace(keras.distribution.ModelParallel, "get_tensor_layout", _tensor_layout())
    _replace(keras.distribution, "distribute_tensor", _distribute_tensor)
    _replace(keras.Model, "save", _saved)
    for module in (keras.saving, keras.models):
      _replace(module, "save_model", _saved)
      _replace(module, "load_model", _loaded)
    for module in (keras.backend, keras.utils):
      _replace(module, "clear_session", _clear_session)
    _serve_processes()


def _serve_processes() -> None:
  """Replaces what several processes need; in one process it does as before."""
  api = keras.distribution
  _replace(api, "initialize", lambda _: processes.initialize)
  _replace(api, "list_devices", _of_all_processes(processes.list_devices))
  if hasattr(api, "get_device_count"):
    _replace(api, "get_device_count", _of_all_processes(lambda t=None: len(api.list_devices(t))))
  for kind in (api.DeviceMesh, api.DataParallel):
    _replace(kind, "__init__", _with_devices)
  for kind in (api.DataParallel, api.ModelParallel):
    if hasattr(kind, "data_shard_id"):
      _replace(kind, "num_processes", lambda _: property(lambda _: workers.current().size))
      _replace(kind, "data_shard_id", lambda _: property(lambda d: processes.data_shard(d)[1]))
  for owner, name in (
    *((keras.Model, name) for name in ("save", "save_weights", "export")),
    *((keras.saving, name) for name in ("save_model", "save_weights")),
    (keras.models, "save_model"),
  ):
    if hasattr(owner, name):
      _replace(owner, name, _written_once)
  callbacks = keras.callbacks
  for name in ("on_epoch_end", "on_train_batch_end"):
    _replace(callbacks.ModelCheckpoint, name, _written_elsewhere("filepath"))
  _replace(callbacks.TensorBoard, "set_model", _written_elsewhere("log_dir"))
  for name in ("on_epoch_end", "on_train_batch_end", "on_train_end"):
    _replace(callbacks.BackupAndRestore, name, _of_twin(name))
  for name in ("on_train_begin", "on_epoch_end", "on_train_end"):
    _replace(callbacks.CSVLogger, name, _by_first)
  _replace(callbacks.RemoteMonitor, "on_epoch_end", _by_first)


def disable() -> None:
  """Puts back what `enable` replaced.

  Models that were trained on a mesh go on as Keras' own, with the state that they have by then.
  """
  with _LOCK:
    while _REPLACED:
      _put_back(*_REPLACED.pop())


def is_enabled() -> bool:
  """True between `enable` and `disable`."""
  return bool(_REPLACED)


def programs_of(model: keras.Model) -> Programs | None:
  """The programs of a model on its mesh; None if no distribution is meant for it.

  Args:
    model: a model, which may not be built yet: then the current distribution counts.

  Raises:
    ArgumentError: the distribution has no mesh.
  """
  found: Programs | None = vars(model).get(_PROGRAMS)
  if found is None:
    if _takes_texts(model):
      return None
    if vars(model).get(_IS_ALONE) and keras.distribution.distribution() is None:
      return None
    distribution = _distribution_of(model)
    if distribution is None:
      vars(model)[_IS_ALONE] = bool(model.variables)
      return None
    layout = "auto" if isinstance(distribution, AutoParallel) else distribution
    found = Programs(model, convert_to_mesh(distribution), layout, {}, "replicate", distribution)
    vars(model)[_PROGRAMS] = found
    weakref.finalize(model, found.mirror.close).atexit = False
  return found


def _takes_texts(model: keras.Model) -> bool:
  """True of a model with an input of strings, which no mesh computes with; it is told once.

  A preprocessing layer in front of a model that was trained on the mesh, as Keras' guides make it.
  """
  # A subclass may call so what it likes.
  inputs = keras.tree.flatten(getattr(model, "inputs", None))
  if not any(isinstance(x, keras.KerasTensor) and x.dtype == "string" for x in inputs):
    return False
  if not vars(model).get(_IS_ALONE) and _distribution_of(model) is not None:
    _LOG.warning(
      "keras.distribution: %s has an input of strings, which meshes do not compute with, so it "
      "runs on one device; to train on the mesh, apply the preprocessing layers in the data set",
      model.name,
    )
    vars(model)[_IS_ALONE] = True
  return True


def _distribution_of(model: keras.Model) -> Any:
  """The distribution under which the first variables of a model were made; None if without one."""
  born_under = (getattr(v, _BORN_UNDER, None) for v in model.variables)
  first = next((d for d in born_under if d is not None), None)
  if first is not None:
    return first
  current = keras.distribution.distribution()
  if current is not None and model.variables:
    _LOG.warning(
      "keras.distribution: %s was built before the distribution was set, so it trains on one "
      "device; set the distribution first, then build the model",
      model.name,
    )
    return None
  return current


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
  """Replaces an attribute of a public class or module of Keras.

  Args:
    owner: the class or module.
    name: of the attribute.
    make: makes the new one of the one that is there.
  """
  _REPLACED.append((owner, name, vars(owner).get(name)))
  setattr(owner, name, make(getattr(owner, name)))


def _put_back(owner: Any, name: str, before: Any) -> None:
  if before is None:
    delattr(owner, name)
  else:
    setattr(owner, name, before)


def _loop(name: str) -> Callable[[Any], Any]:
  def make(plain: Any) -> Any:
    @functools.wraps(plain)
    def served(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
      programs = _programs_of_loop(self)
      if programs is None:
        return plain(self, *args, **kwargs)
      with programs.running():
        return plain(self, *args, **kwargs)

    return served

  return make


def _programs_of_loop(model: keras.Model) -> Programs | None:
  """The programs that a loop of Keras runs with; None if it is to run as it would without."""
  found: Programs | None = vars(model).get(_PROGRAMS)
  if found is not None:
    return found if found.takes_loops() else None
  # Otherwise the model is in `ParallelModel.fit`, say, which has put its own functions there.
  return None if "make_train_function" in vars(model) else programs_of(model)


def _subclasses(kind: type) -> set[type]:
  direct: list[type] = type.__subclasses__(kind)
  return {*direct, *(c for d in direct for c in _subclasses(d))}


def _made_class(_: Any) -> Any:
  def served(cls: Any, /, **kwargs: Any) -> None:
    super(keras.Model, cls).__init_subclass__(**kwargs)
    _serve_generation(cls)

  return classmethod(served)


def _serve_generation(kind: type) -> None:
  """Serves `generate` of a class that has its own, as those of keras-hub; keras.Model has none."""
  if "generate" in vars(kind) and hasattr(kind, "make_generate_function"):
    _replace(kind, "generate", _generate)


def _generate(plain: Any) -> Any:
  @functools.wraps(plain)
  def served(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
    is_served = steps.generates(self) and "make_generate_function" not in vars(self)
    programs = programs_of(self) if is_served else None
    if programs is None:
      return plain(self, *args, **kwargs)
    with programs.running():
      return self.generate(*args, **kwargs)

  return served


def _summary() -> Callable[[Any], Any]:
  def make(plain: Any) -> Any:
    @functools.wraps(plain)
    def served(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
      result = plain(self, *args, **kwargs)
      programs: Programs | None = vars(self).get(_PROGRAMS)
      if programs is not None and programs.decision is not None:
        (kwargs.get("print_fn") or print)(programs.placement())
      return result

    return served

  return make


def _tensor_layout() -> Callable[[Any], Any]:
  def make(plain: Any) -> Any:
    @functools.wraps(plain)
    def served(self: keras.distribution.ModelParallel, path: str) -> None:
      # Keras would hand it to a function that its TensorFlow backend does not have.
      try:
        layout = plain(self, path)
      except re.error:
        check_patterns(self)
        raise
      if layout is not None and tf.inside_function():
        note_output(path, layout)

    return served

  return make


def _saved(plain: Any) -> Any:
  @functools.wraps(plain)
  def served(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    if any(getattr(v, _BORN_UNDER, None) is not None for v in getattr(model, "variables", ())):
      return archives.save(plain, model, filepath, *args, **kwargs)
    return plain(model, filepath, *args, **kwargs)

  return served


def _loaded(plain: Any) -> Any:
  @functools.wraps(plain)
  def served(filepath: Any, *args: Any, **kwargs: Any) -> Any:
    if keras.distribution.distribution() is not None:
      return archives.load(plain, filepath, *args, **kwargs)
    return plain(filepath, *args, **kwargs)

  return served


def _distribute_tensor(plain: Any) -> Any:
  @functools.wraps(plain)
  def served(tensor: Any, layout: Any) -> Any:
    if isinstance(tensor, keras.KerasTensor):
      return tensor
    tensor = keras.ops.convert_to_tensor(tensor)
    if not isinstance(layout, keras.distribution.TensorLayout):
      raise ArgumentError(
        f"keras.distribution.distribute_tensor takes a keras.distribution.TensorLayout, got "
        f"{layout!r}"
      )
    if len(layout.axes) != tensor.shape.rank:
      raise LayoutError(
        f"keras.distribution.distribute_tensor: the layout {layout.axes} is of "
        f"{len(layout.axes)} axes, and the tensor has the shape {tensor.shape}; give a mesh axis, "
        "or None, for each"
      )
    # Eagerly it stays as it is: what has no program is on one device.
    if tf.inside_function():
      note_output(f"distribute_tensor({tensor.name})", layout, tensor)
    return tensor

  return served


def _clear_session(plain: Any) -> Any:
  @functools.wraps(plain)
  def served(*args: Any, **kwargs: Any) -> Any:
    before = keras.distribution.distribution()
    result = plain(*args, **kwargs)
    if before is not None and keras.distribution.distribution() is None:
      _LOG.warning(
        "keras.distribution: clear_session has also dropped the distribution (%s), as under JAX, "
        "so models that are built from now on train on one device; set it again after "
        "clear_session, or build the model in `with distribution.scope():`",
        type(before).__name__,
      )
    return result

  return served


def _of_all_processes(fn: Callable[..., Any]) -> Callable[[Any], Any]:
  """Replaces a function where there are several processes."""

  def make(plain: Any) -> Any:
    @functools.wraps(plain)
    def served(device_type: str | None = None) -> Any:
      return (plain if workers.current().size == 1 else fn)(device_type)

    return served

  return make


def _with_devices(plain: Any) -> Any:
  """Of an initializer: it takes the devices of all processes, if there are several."""
  signature = inspect.signature(plain)

  @functools.wraps(plain)
  def served(*args: Any, **kwargs: Any) -> None:
    given = signature.bind(*args, **kwargs)
    has_devices = any(given.arguments.get(n) is not None for n in ("device_mesh", "devices"))
    if workers.current().size > 1 and not has_devices:
      given.arguments["devices"] = processes.list_devices()
    plain(*given.args, **given.kwargs)

  return served


def _written_once(plain: Any) -> Any:
  """Of a function of (model, path, ...): the first process writes, with the others' slices."""

  @functools.wraps(plain)
  def served(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    return processes.written_once(lambda path: plain(model, path, *args, **kwargs), filepath)

  return served


def _written_elsewhere(attribute: str) -> Callable[[Any], Any]:
  """Of a callback's method: other processes than the first have a temporary path meanwhile."""

  def make(plain: Any) -> Any:
    @functools.wraps(plain)
    def served(self: Any, *args: Any, **kwargs: Any) -> Any:
      with processes.written_elsewhere(self, attribute):
        return plain(self, *args, **kwargs)

    return served

  return make


def _by_first(plain: Any) -> Any:
  """Of a callback's method that reads no variables: the first process alone runs it."""

  @functools.wraps(plain)
  def served(*args: Any, **kwargs: Any) -> Any:
    return plain(*args, **kwargs) if processes.writes() else None

  return served


def _of_twin(name: str) -> Callable[[Any], Any]:
  """Of a method of BackupAndRestore: in other processes than the first, a twin writes elsewhere."""

  def make(plain: Any) -> Any:
    @functools.wraps(plain)
    def served(self: Any, *args: Any, **kwargs: Any) -> Any:
      if name == "on_train_end":
        workers.barrier()  # Before it deletes what another one has yet to read.
      if processes.writes():
        return plain(self, *args, **kwargs)
      twin = vars(self).get(_TWIN)
      if twin is None:
        kind = keras.callbacks.BackupAndRestore
        same = [n for n in inspect.signature(kind).parameters if n != "backup_dir"]
        twin = kind(processes.elsewhere(self.backup_dir), **{n: getattr(self, n) for n in same})
        vars(self)[_TWIN] = twin
      twin.set_model(self.model)
      return plain(twin, *args, **kwargs)

    return served

  return make


def _born() -> Callable[[Any], Any]:
  def make(plain: Any) -> Any:
    @functools.wraps(plain)
    def served(self: keras.Variable, *args: Any, **kwargs: Any) -> None:
      distribution = keras.distribution.distribution()
      with contextlib.nullcontext() if distribution is None else _drawn_later(*args, **kwargs):
        plain(self, *args, **kwargs)
      setattr(self, _BORN_UNDER, distribution)

    return served

  return make


def _drawn_later(
  initializer: Any, shape: Any = None, dtype: Any = None, *_: Any, **__: Any
) -> contextlib.AbstractContextManager[None]:
  """Context manager: a large variable of Keras' own initializers is not drawn until it is needed.

  Those draw the same whenever they are asked, unless their seeds come from a generator.

  Args:
    initializer: argument of keras.Variable, as the next two.
    shape: of the variable.
    dtype: of the variable.
  """
  if isinstance(initializer, str) and initializer in ("zeros", "ones"):  # Not what takes a seed.
    initializer = keras.initializers.get(initializer)
  is_of_keras = (
    isinstance(initializer, keras.initializers.Initializer)
    and type(initializer).__module__.partition(".")[0] == "keras"
    and isinstance(getattr(initializer, "seed", None), (int, type(None)))
  )
  if not is_of_keras or shape is None or not tf.executing_eagerly():
    return contextlib.nullcontext()
  sizes = [shape] if isinstance(shape, int) else list(shape)
  # Keras' own names included: "int" of a counter of LossScaleOptimizer.
  name = keras.backend.standardize_dtype(dtype or keras.config.floatx())
  size = tf.as_dtype(name).size * math.prod(n or 0 for n in sizes)
  if size < mirror.LARGE:
    return contextlib.nullcontext()
  return mirror.drawn_later(sizes, lambda dtype: initializer(sizes, dtype=dtype.name))
