"""`mtf.keras.parallelize`, and `ParallelModel`, which it makes."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.errors import ArgumentError, GraphError
from mesh_tensorflow.keras.layouts import (
  AUTO,
  check_same_mesh,
  convert_to_mesh,
  cut_into_stages,
  is_distribution,
  rules_by_hand,
)
from mesh_tensorflow.keras.programs import Pipeline, Programs
from mesh_tensorflow.keras.steps import check_model, check_own_step
from mesh_tensorflow.meshes.layout import LayoutRules
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.planning.describe import Report, describe

# The attributes that are not the model's.
_OWN = frozenset(["_programs", "model"])


class ParallelModel:
  """A Keras model on a mesh; see `parallelize`, which makes it.

  It stands for the model: `isinstance(parallel, keras.Model)` is true, it is called as the model
  is, and what it has not itself is read, set and deleted there (`parallel.layers`,
  `parallel.trainable = False`, `parallel.save(path)`).

  A program reads and changes the slices on the mesh. Who reads a variable of the model, or assigns
  to it, finds what programs have made of it, at any time; a program finds what was assigned.

  Args:
    programs: the programs of the model on the mesh.

  Attributes:
    model: the Keras model.
  """

  def __init__(self, programs: Programs):
    self._programs = programs
    self.model = programs.model
    # Of a model that stays behind the variables have the state.
    weakref.finalize(self, programs.mirror.close).atexit = False

  @property  # type: ignore[misc]
  def __class__(self) -> Any:
    """The class of the model, for `isinstance`; `type(parallel)` is `ParallelModel`."""
    return type(self.model)

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Calls the model, in Keras alone, with the state of the mesh."""
    return self.model(*args, **kwargs)

  def __getattr__(self, name: str) -> Any:
    # Without its own it is a copy that is being made.
    if name in _OWN or name.startswith("__"):
      raise AttributeError(name)
    found = getattr(self.model, name)
    if name == "generate":
      return functools.partial(self._loop, name)
    return found

  def __setattr__(self, name: str, value: Any) -> None:
    if name in _OWN or hasattr(ParallelModel, name):
      object.__setattr__(self, name, value)
    else:
      setattr(self.model, name, value)

  def __delattr__(self, name: str) -> None:
    delattr(self.model, name)

  def __dir__(self) -> list[str]:
    return sorted({*object.__dir__(self), *dir(self.model)})

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
  def stages(self) -> list[str] | None:
    """Names of the layers with which all stages but the first begin; None until a first batch."""
    found = self._programs.cut
    return None if found is None else [layer.name for layer in found]

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
    """Sets the variables of the Keras model to what the mesh has.

    Each is anyway when it is read; this is for readers that TensorFlow's Python does not see, such
    as the functions of a tf.data.Dataset.
    """
    self._programs.mirror.pull()

  # ------------------------------------------------------------- Keras' methods

  def compile(self, *args: Any, **kwargs: Any) -> None:
    """As `keras.Model.compile`; programs are made anew, also if the model itself is compiled."""
    self.model.compile(*args, **kwargs)
    self._programs.follow()

  def fit(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
    """As `keras.Model.fit`, on the mesh.

    A batch of another size than the others is no matter: where its examples cannot be split over
    the mesh, each device computes all of them, and the weights stay as they are split.

    Raises:
      UnsupportedError: `run_eagerly` is set, or a step has an operation without a rule.
    """
    return self._loop("fit", *args, **kwargs)

  def evaluate(self, *args: Any, **kwargs: Any) -> Any:
    """As `keras.Model.evaluate`, on the mesh."""
    return self._loop("evaluate", *args, **kwargs)

  def predict(self, *args: Any, **kwargs: Any) -> Any:
    """As `keras.Model.predict`, on the mesh."""
    return self._loop("predict", *args, **kwargs)

  def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
    """As `keras.Model.train_on_batch`, on the mesh."""
    return self._loop("train_on_batch", *args, **kwargs)

  def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
    """As `keras.Model.test_on_batch`, on the mesh."""
    return self._loop("test_on_batch", *args, **kwargs)

  def predict_on_batch(self, *args: Any, **kwargs: Any) -> Any:
    """As `keras.Model.predict_on_batch`, on the mesh."""
    return self._loop("predict_on_batch", *args, **kwargs)

  def summary(self, print_fn: Callable[[str], Any] | None = None, **kwargs: Any) -> None:
    """As `keras.Model.summary`, and how each variable is split, once a first batch has decided it.

    Args:
      print_fn: gets the text of each of the two tables; prints by default.
      **kwargs: other arguments of `keras.Model.summary`.
    """
    self.model.summary(print_fn=print_fn, **kwargs)
    try:
      table = self.placement()
    except GraphError:
      table = "How variables are split is decided at the first batch."
    (print_fn or print)(table)

  def placement(self) -> str:
    """Table of each variable's layout on the mesh, beside that of a layout map if one was given.

    Raises:
      GraphError: no step has run yet.
    """
    return self._programs.placement()

  # ------------------------------------------------------------------- within

  def _loop(self, name: str, *args: Any, **kwargs: Any) -> Any:
    with self._programs.running():
      return getattr(self.model, name)(*args, **kwargs)


@checked
def parallelize(
  model: Any,
  mesh_impl_or_shape: Any = None,
  layout: Any = "auto",
  dims: Mapping[str, Sequence[str | None]] | None = None,
  *,
  fallback: str = "replicate",
  shard_state: bool | str | Sequence[str] = AUTO,
  stages: int | Sequence[str] | None = None,
  microbatches: int | None = None,
  schedule: str | None = None,
) -> ParallelModel:
  """A Keras model that trains, evaluates and predicts split over a mesh of devices.

  The model is as it is: nothing of it is written anew, no layer is replaced. Its step is traced by
  TensorFlow and becomes a program on named dimensions (`mtf.from_tensorflow`), which any layout
  may split: batches, weights, heads, images. Losses, metrics, optimizers, schedules, callbacks and
  the loop are Keras' own.

  Args:
    model: a keras.Model; compiled, or to be compiled by the `compile` of what is returned.
    mesh_impl_or_shape: a mesh implementation; a mesh shape ("rows:2,cols:2", {"rows": 2}); a number
      of devices, or a list of their names: an automatic layout then chooses the shape; or a
      `keras.distribution.DeviceMesh`, `ModelParallel` or `DataParallel`. By default what
      `keras.distribution.set_distribution` has set.
    layout: "auto" (a mesh implementation with layout rules keeps them; a distribution is a layout
      itself; else `mtf.auto_layout` searches, at the first batch); layout rules over the names that
      `dimensions` has; or a `keras.distribution.LayoutMap`, `ModelParallel` or `DataParallel`.
    dims: names of dimensions, as of `mtf.from_tensorflow`; the arguments are called "inputs",
      "targets" and "sample_weight", and their first axis "batch".
    fallback: "replicate" (each device computes operations without a rule whole, with a warning) or
      "error"; see `mtf.from_tensorflow`.
    shard_state: mesh dimensions over which weights and optimizer state that the layout leaves whole
      are stored in shards, as "batch" or "batch,model"; True: over all; False: over none. See
      `MeshImpl.with_sharded_state`. "auto": as the mesh implementation has them; else over all if
      an automatic layout would not fit into memory otherwise.
    stages: cuts the model into stages, each on a mesh of its own of the given shape: their number,
      for like shares of parameters and FLOPs; or the names of the layers with which all stages but
      the first begin. A number or list of devices is of all stages. By default one mesh has the
      whole model, or as many stages as a mesh implementation has (`MeshImpl.with_stages`).
    microbatches: number of parts of a training batch, which go through the stages one behind the
      other, and whose gradients are averaged; a smaller last batch has fewer. By default up to four
      a stage, as many as divide what a replica has of a batch; 1 without stages.
    schedule: "gpipe", "1f1b" or "zero_bubble"; see `mtf.serialize_training_step`. By default that
      of the mesh implementation, or "1f1b".

  Returns:
    A `ParallelModel`.

  Raises:
    ArgumentError: the model is no Keras model on TensorFlow, or the mesh is none; there is no such
      schedule, or there are no stages for it; or a number is a bool. That the model has too few
      layers, or not the named ones, is told at the first batch.
    UnsupportedError: the model has a train_step of its own, and stages or microbatches.
    LayoutError: the layout is for another mesh, or `shard_state` names no dimension of it. A rule
      for a dimension that there is not is told at the first batch.
    MeshShapeError: the mesh has no devices, or two dimensions of one name.
  """
  check_model(model)
  if mesh_impl_or_shape is None:
    mesh_impl_or_shape = keras.distribution.distribution()
    if mesh_impl_or_shape is None and is_distribution(layout):
      mesh_impl_or_shape = layout
    if mesh_impl_or_shape is None:
      raise ArgumentError(
        "parallelize: give a mesh, as 'rows:2,cols:2', or set a keras.distribution before"
      )
  mesh = convert_to_mesh(mesh_impl_or_shape)
  if shard_state != AUTO:
    mesh = dataclasses.replace(mesh, shard_state=shard_state)
  if layout is None:
    layout = ""
  if isinstance(layout, str) and layout == "auto" and is_distribution(mesh_impl_or_shape):
    layout = mesh_impl_or_shape
  if is_distribution(layout):
    check_same_mesh(mesh, layout)
  else:
    rules_by_hand(mesh, layout)
  if fallback not in ("error", "replicate"):
    raise ArgumentError(f"parallelize: fallback is 'error' or 'replicate', got {fallback!r}")
  for name, number in (("stages", stages), ("microbatches", microbatches)):
    if isinstance(number, bool):
      raise ArgumentError(f"parallelize: {name}={number} is no number; give that of the {name}")
  if isinstance(stages, str):
    stages = [stages]
  if microbatches is not None and microbatches < 1:
    raise ArgumentError(f"parallelize: microbatches={microbatches}; a batch has at least 1")
  mesh = cut_into_stages(mesh, stages, schedule)
  if mesh.stages or (microbatches or 1) > 1:
    check_own_step(model)
  pipeline = Pipeline(mesh.stages if stages is None else stages, microbatches)
  return ParallelModel(Programs(model, mesh, layout, dims or {}, fallback, pipeline=pipeline))
