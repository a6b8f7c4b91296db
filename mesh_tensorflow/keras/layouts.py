"""Mesh and layout of a Keras model: given by hand, in Keras' words, or searched; `AutoParallel`."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import logging
import math
import re
import textwrap
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.errors import ArgumentError, LayoutError, MeshShapeError, UnsupportedError
from mesh_tensorflow.importing.imported import Imported
from mesh_tensorflow.keras.processes import full_name
from mesh_tensorflow.meshes.layout import (
  LayoutLike,
  LayoutRules,
  MeshLayout,
  convert_to_layout_rules,
)
from mesh_tensorflow.meshes.layout_names import check_mesh_names
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.schedules import check_schedule
from mesh_tensorflow.meshes.simd.devices import choose_devices
from mesh_tensorflow.meshes.simd.mesh_impl import SimdMeshImpl
from mesh_tensorflow.planning.auto_layout import LayoutChoice, auto_layout
from mesh_tensorflow.planning.text import format_bytes, format_seconds
from mesh_tensorflow.program.dimensions import Dimension, Shape, convert_to_shape
from mesh_tensorflow.program.graph import Graph
from mesh_tensorflow.running.function import Function, TensorSpec
from mesh_tensorflow.workers import texts

_LEGAL = (
  "a mesh implementation, a mesh shape such as 'rows:2,cols:2' or {'rows': 2, 'cols': 2}, a "
  "number of devices, a list of device names, a keras.distribution.DeviceMesh, ModelParallel or "
  "DataParallel"
)
# Of `shard_state`: an automatic layout chooses.
AUTO = "auto"
_LOG = logging.getLogger("mesh_tensorflow")
_MATCHED = "_mtf_matched"  # Attribute of a distribution: patterns that have matched something.
_DEVICE_TYPES = ("CPU", "GPU", "TPU", "XLA_CPU", "XLA_GPU")


@dataclasses.dataclass(frozen=True)
class MeshChoice:
  """Mesh of `parallelize`, as far as it is known before the layout is decided.

  Attributes:
    shape: the mesh shape, or None: then an automatic layout chooses it.
    size: the number of devices.
    devices: their names, which count in all processes; None for the first ones.
    given: the mesh implementation of the user, or None.
    announces: whether what an automatic layout chose is printed.
    shard_state: see `parallelize`.
    stages: number of such meshes, each for some of the layers, or 0 if the model is not cut;
      `devices` are those of all, stage after stage.
    schedule: of the pipeline; see `MeshImpl.with_stages`.
    others: the meshes of the other stages, beside `given`.
  """

  shape: Shape | None
  size: int
  devices: tuple[str, ...] | None = None
  given: MeshImpl | None = None
  announces: bool = False
  shard_state: bool | str | Sequence[str] = AUTO
  stages: int = 0
  schedule: str = "1f1b"
  others: tuple[MeshImpl, ...] = ()

  def __post_init__(self) -> None:
    """Raises `LayoutError` or `ArgumentError` for what `shard_state` cannot be."""
    asked = self.shard_state
    if isinstance(asked, bool) or asked == AUTO:
      return
    if not isinstance(asked, Sequence) or not all(isinstance(n, str) for n in asked):
      raise ArgumentError(
        f"mtf.keras: shard_state is {asked!r}; it takes names of mesh dimensions, such as"
        " 'batch,model', True for all of them, False for none, or 'auto'"
      )
    if self.shape is None:
      raise ArgumentError(
        f"mtf.keras: shard_state {asked!r} names dimensions of a mesh whose shape is chosen later;"
        " give the mesh shape, or shard_state=True for all of its dimensions"
      )
    MeshLayout(self.shape, "").with_sharded_state(asked)

  def make(
    self, shape: Shape, layout: LayoutLike, found: Sequence[str] = (), again: bool = True
  ) -> MeshImpl:
    """Creates the mesh implementation with its layout; of several stages that of the first.

    Args:
      shape: the mesh shape: `self.shape`, or the one that was chosen.
      layout: layout rules.
      found: mesh dimensions over which variables are stored in shards, if that was searched for.
      again: whether weights are then gathered before each use.
    """
    impl = self.given
    if impl is None:
      impl = SimdMeshImpl(shape, layout, self._devices_of(0))
    elif impl.layout_rules != convert_to_layout_rules(layout):
      impl = impl.with_layout(layout)
    asked = self.shard_state
    if asked == AUTO:
      return impl.with_sharded_state(found, again) if found else impl
    if isinstance(asked, bool):
      asked = shape.dimension_names if asked else []
    again = impl.reshards_after_forward if impl.state_dims else True
    return impl.with_sharded_state(asked, again)

  def with_stages(self, first: MeshImpl) -> MeshImpl:
    """The mesh of the first stage with those of the others; as it is, if there are no stages.

    Args:
      first: what `make` returned.
    """
    if not self.stages:
      return first
    others: list[Any] = [m.with_layout(first.layout_rules) for m in self.others]
    if self.given is None:
      others = [
        SimdMeshImpl(
          first.shape,
          first.layout_rules,
          self._devices_of(stage),
          variable_store=first.variable_store,
        )
        for stage in range(1, self.stages)
      ]
    sharding = (first.state_dims, first.reshards_after_forward)
    return first.with_stages([m.with_sharded_state(*sharding) for m in others], self.schedule)

  def _devices_of(self, stage: int) -> list[str] | None:
    devices = None if self.devices is None else [full_name(d) for d in self.devices]
    if devices is None and self.stages:
      shape = Shape([Dimension("stages", self.stages), Dimension("devices", self.size)])
      devices = choose_devices(shape, None)
    if not self.stages or devices is None:
      return devices
    return devices[stage * self.size : (stage + 1) * self.size]


def cut_into_stages(
  choice: MeshChoice, stages: int | Sequence[str] | None, schedule: str | None
) -> MeshChoice:
  """The mesh of a model in stages: one such mesh for each.

  Args:
    choice: the mesh; a number of devices, or a list of them, is of all stages.
    stages: their number, or the names of the layers with which all but the first begin; None: as
      many as the mesh implementation of the user has.
    schedule: of the pipeline; None: that of the mesh implementation, else "1f1b".

  Raises:
    ArgumentError: there is no such schedule, or there are no stages for it; or a mesh
      implementation has another number of stages.
    MeshShapeError: the stages do not divide the number of devices.
    UnsupportedError: there are several processes.
  """
  if schedule is not None:
    check_schedule(schedule, "parallelize")
  impl = choice.given
  if stages is None and (impl is None or not impl.stages):
    if schedule is not None:
      raise ArgumentError(
        f"parallelize: schedule={schedule!r} is that of stages, and there are none: give stages, "
        "their number, or leave it out"
      )
    return choice
  if stages is None:
    assert impl is not None
    count = len(impl.stages)
  elif isinstance(stages, int):
    count = stages
  else:
    count = len(stages) + 1
  if count < 1:
    raise ArgumentError(f"parallelize: stages={stages}; a model has at least 1 stage")
  if workers.current().size > 1:
    raise UnsupportedError(
      f"parallelize: stages={stages} in {workers.current().size} processes; a pipeline is of one "
      "process so far: leave stages out, and split dimensions"
    )
  if impl is not None:
    meshes = list(impl.stages.values()) or [impl]
    if len(meshes) != count:
      raise ArgumentError(
        f"parallelize: stages={stages}, that is {count}, and the mesh implementation {impl.shape} "
        f"has {len(impl.stages) or 'no'} stages: give it them (mesh_impl.with_stages([...])), or "
        "give a mesh shape, of which each stage gets devices"
      )
    first = impl.with_stages([])
    schedule = schedule or impl.schedule
    return dataclasses.replace(
      choice, given=first, others=tuple(meshes[1:]), stages=count, schedule=schedule
    )
  size = choice.size
  if choice.shape is None or (choice.devices is not None and len(choice.devices) == size):
    # Devices are counted, not those of a stage.
    if size % count:
      raise MeshShapeError(
        f"parallelize: {size} devices cannot be divided among the {count} stages of "
        f"stages={stages}; give a multiple of {count} devices"
      )
    size //= count
  if choice.shape is not None and choice.shape.size != size:
    raise MeshShapeError(
      f"parallelize: each of the {count} stages is a mesh {choice.shape} of {choice.shape.size} "
      f"devices, and {choice.size} are given; give the mesh as a shape, whose devices are the "
      f"first {count * choice.shape.size} of this process"
    )
  return dataclasses.replace(choice, size=size, stages=count, schedule=schedule or "1f1b")


class AutoParallel(keras.distribution.DataParallel):  # type: ignore[misc]  # Of Keras: no types.
  """A distribution that chooses mesh shape and layout itself: the least predicted time in memory.

  It is chosen at the first batch, and again at the first one of training if others came before; two
  lines say what was chosen, and what a step is predicted to take.

  Args:
    devices: names of devices, as of `keras.distribution.list_devices()`, the default; or their
      number.
    mesh_shape: the mesh shape, as "rows:2,cols:2"; None: it is chosen, too.
    shard_state: whether weights and optimizer state are stored in shards; see `parallelize`.

  Raises:
    MeshShapeError: it is one of another number of devices.
    LayoutError: `shard_state` names a mesh dimension that there is not.
    ArgumentError: `shard_state` is something else, or names dimensions without a mesh shape.
  """

  def __init__(
    self,
    devices: Sequence[str] | int | None = None,
    mesh_shape: Any = None,
    *,
    shard_state: bool | str | Sequence[str] = AUTO,
  ):
    known: list[str] = [str(d) for d in keras.distribution.list_devices()]
    if isinstance(devices, int):
      if not 1 <= devices <= len(known):
        raise MeshShapeError(f"AutoParallel: there are {len(known)} devices, not {devices}")
      chosen = known[:devices]
    else:
      chosen = known if devices is None else [str(d) for d in devices]
    if not chosen:
      raise MeshShapeError("AutoParallel: the list of devices is empty")
    super().__init__(devices=chosen)
    shape = None if mesh_shape is None else _shape(mesh_shape)
    if shape is not None and shape.size != len(chosen):
      raise MeshShapeError(f"AutoParallel: the mesh {shape} is not of {len(chosen)} devices")
    self.choice = MeshChoice(
      shape, len(chosen), tuple(chosen), announces=True, shard_state=shard_state
    )

  def __repr__(self) -> str:
    return f"<AutoParallel devices={self.choice.size}, mesh_shape={self.choice.shape}>"


def convert_to_mesh(mesh: Any) -> MeshChoice:
  """Converts the mesh argument of `parallelize`.

  Args:
    mesh: see `parallelize`.

  Raises:
    ArgumentError: it is nothing that stands for a mesh.
    MeshShapeError: it is one of no devices, or has a name twice.
    LayoutError: a pattern of a layout map is no regular expression.
  """
  if isinstance(mesh, MeshImpl):
    return MeshChoice(mesh.shape, mesh.size, None, mesh)
  if isinstance(mesh, AutoParallel):
    return mesh.choice
  if is_distribution(mesh):
    check_patterns(mesh)
    if mesh.device_mesh is None:
      raise ArgumentError(
        f"mtf.keras: the {type(mesh).__name__} has no device_mesh; give one to it, or give "
        "parallelize a mesh and this as its layout"
      )
    mesh = mesh.device_mesh
  if isinstance(mesh, keras.distribution.DeviceMesh):
    pairs = [(str(n), int(s)) for n, s in zip(mesh.axis_names, mesh.shape)]
    devices = tuple(str(d) for d in mesh.devices.flatten())
    return MeshChoice(_shape(pairs), len(devices), devices)
  if isinstance(mesh, bool) or mesh is None:
    raise ArgumentError(f"parallelize takes as mesh {_LEGAL}; got {mesh!r}")
  if isinstance(mesh, int):
    if mesh < 1:
      raise MeshShapeError(f"mtf.keras: a mesh has at least 1 device, got {mesh}")
    return MeshChoice(None, mesh)
  if isinstance(mesh, Mapping):
    mesh = list(mesh.items())
  if isinstance(mesh, Sequence) and not isinstance(mesh, (str, Shape)):
    if not mesh:
      raise MeshShapeError(f"mtf.keras: a mesh of no devices; give {_LEGAL}")
    if all(isinstance(d, str) and _is_device(d) for d in mesh):
      return MeshChoice(None, len(mesh), tuple(mesh))
  try:
    shape = _shape(mesh)
  except (TypeError, ValueError) as e:
    raise ArgumentError(f"parallelize takes as mesh {_LEGAL}; got {mesh!r} ({e})") from e
  return MeshChoice(shape, int(shape.size))


def is_distribution(x: Any) -> bool:
  """True for what Keras has for a layout: a distribution, or a `LayoutMap`."""
  return not isinstance(x, AutoParallel) and isinstance(
    x,
    (
      keras.distribution.LayoutMap,
      keras.distribution.ModelParallel,
      keras.distribution.DataParallel,
    ),
  )


def check_same_mesh(choice: MeshChoice, distribution: Any) -> None:
  """Checks that a distribution is of the mesh that was given beside it.

  Args:
    choice: the mesh.
    distribution: what `is_distribution`.

  Raises:
    LayoutError: they have axes of other names or sizes.
  """
  if choice.shape is None:
    raise LayoutError(
      f"mtf.keras: a {type(distribution).__name__} names axes of a mesh, so the mesh must have "
      "a shape; give it, or leave the mesh to the device_mesh of the distribution"
    )
  theirs = _axes_of(distribution.device_mesh)
  ours = {m.name: int(m.size) for m in choice.shape}
  if theirs is not None and theirs != ours:
    raise LayoutError(
      f"mtf.keras: the mesh is {choice.shape}, and the {type(distribution).__name__} is for "
      f"{', '.join(f'{n}:{s}' for n, s in theirs.items())}; give the same axes to both"
    )


def _axes_of(device_mesh: Any) -> dict[str, int] | None:
  """Names and sizes of the axes of a `keras.distribution.DeviceMesh`; None of None."""
  if device_mesh is None:
    return None
  return {str(n): int(s) for n, s in zip(device_mesh.axis_names, device_mesh.shape)}


def _shape(pairs: Any) -> Shape:
  shape: Shape = convert_to_shape(pairs)
  if len(set(shape.dimension_names)) < len(shape) or shape.size < 1:
    raise MeshShapeError(
      f"a mesh has dimensions of different names and positive sizes, got {pairs}"
    )
  return shape


def _is_device(name: str) -> bool:
  """True for a device name, such as "cpu:0" (Keras) or "/device:CPU:0" (TensorFlow)."""
  return name.startswith("/") or name.split(":")[0].upper() in _DEVICE_TYPES


@dataclasses.dataclass(frozen=True)
class VariableAxes:
  """A variable with the names of its axes.

  Attributes:
    path: its name here.
    variable: the keras.Variable, whose path the patterns of a map are for.
    dims: for each axis the name of its dimension; None of size 1.
  """

  path: str
  variable: Any
  dims: tuple[str | None, ...]

  @property
  def sizes(self) -> list[int]:
    """The sizes of its axes."""
    return [int(n) for n in self.variable.shape]


@dataclasses.dataclass(frozen=True)
class OutputAxes:
  """Output of a layer, with the layout that a map has for it.

  Attributes:
    path: as Keras has it: "block/dense/output".
    dims: for each axis the name of its dimension; None of size 1, and where it is several.
    sizes: of its axes.
    asked: a mesh axis or None for each axis.
  """

  path: str
  dims: tuple[str | None, ...]
  sizes: tuple[int, ...]
  asked: tuple[str | None, ...]


# Per graph by path: operations that may make what a layer returns, and what a map asks.
_OUTPUTS: weakref.WeakKeyDictionary[Any, dict[str, tuple[list[str], tuple[str | None, ...]]]] = (
  weakref.WeakKeyDictionary()
)


def note_output(path: str, layout: Any, tensor: tf.Tensor | None = None) -> None:
  """Notes the layout that a map has for what a layer returns, while a step is traced.

  Args:
    path: of the output, as Keras has it.
    layout: a `keras.distribution.TensorLayout`.
    tensor: the output; by default what the operations return that were made right before.
  """
  axes = tuple(None if a is None else str(a) for a in layout.axes)
  if tensor is not None:
    _OUTPUTS.setdefault(tensor.graph, {})[path] = [tensor.op.name], axes
    return
  graph = tf.no_op().graph
  fitting = [
    o for o in graph.get_operations() if o.outputs and o.outputs[0].shape.rank == len(axes)
  ]
  # Not the last one alone: a loss takes what is before a softmax.
  _OUTPUTS.setdefault(graph, {})[path] = [o.name for o in fitting[:-4:-1]], axes


def outputs_of(graph: tf.Graph, imported: Imported) -> list[OutputAxes]:
  """The outputs of layers that a map has a layout for.

  Args:
    graph: of the function that was imported.
    imported: the function.
  """
  noted = _OUTPUTS.get(graph, {})
  if not noted:
    return []
  shapes = imported.results_of({name for names, _ in noted.values() for name in names})
  known = set(imported.dimensions)
  found = []
  for path, (operations, asked) in noted.items():
    shape = next((shapes[name] for name in operations if name in shapes), Shape([]))
    dims = tuple(d.name if d.size > 1 and d.name in known else None for d in shape)
    found.append(OutputAxes(path, dims, tuple(shape.to_integer_list), asked))
  return found


@dataclasses.dataclass(frozen=True)
class MapLayout:
  """Layout rules that a Keras `LayoutMap` was converted to.

  Attributes:
    rules: the layout rules.
    stored: for each variable with axes that are stored under other names, by path: the names of
      all its axes as it is stored.
    asked: the map's layout of each variable, by path: a mesh axis or None for each axis.
  """

  rules: LayoutRules
  stored: Mapping[str, tuple[str | None, ...]]
  asked: Mapping[str, tuple[str | None, ...]]


def batch_axis_of(distribution: Any) -> str | None:
  """The mesh axis over which a distribution splits the batch.

  Args:
    distribution: an object for which `is_distribution` is True. A map alone splits the batch
      over the first axis, as a `ModelParallel` of the map does.
  """
  if isinstance(distribution, keras.distribution.LayoutMap):
    mesh = distribution.device_mesh
    return None if mesh is None else str(mesh.axis_names[0])
  data = distribution.get_data_layout((1, 1))
  axis = None if data is None else data.axes[0]
  return None if axis is None else str(axis)


def asked_of(
  distribution: Any, variable: VariableAxes, mesh_shape: Shape
) -> tuple[str | None, ...]:
  """The mesh axis that a distribution splits each axis of a variable over, or None.

  Patterns are searched as the installed Keras searches them.

  Args:
    distribution: an object for which `is_distribution` is True.
    variable: the variable.
    mesh_shape: the mesh.

  Raises:
    LayoutError: two patterns match, or a layout does not suit the variable or the mesh.
  """
  try:
    if isinstance(distribution, keras.distribution.LayoutMap):
      layout = distribution[variable.variable.path]
    else:
      layout = distribution.get_variable_layout(variable.variable)
  except ValueError as e:
    raise LayoutError(f"layout of variable {variable.path}: {e}") from e
  sizes = variable.sizes
  if layout is None:
    return (None,) * len(sizes)
  axes = tuple(None if a is None else str(a) for a in layout.axes)
  what = f"the layout map says {axes} of variable {variable.path} {sizes}"
  if len(axes) != len(sizes):
    raise LayoutError(f"{what}, which has {len(sizes)} axes; give a mesh axis, or None, for each")
  mesh = {m.name: int(m.size) for m in mesh_shape}
  used = [a for a in axes if a is not None]
  for a, size in zip(axes, sizes):
    if a is None:
      continue
    if a not in mesh:
      raise LayoutError(f"{what}, and the mesh {mesh_shape} has no axis {a}; name one that it has")
    if used.count(a) > 1:
      raise LayoutError(f"{what}: the mesh axis {a} can split one of its axes, not two")
    if size > 1 and size % mesh[a]:
      raise LayoutError(
        f"{what}, and {a}:{mesh[a]} does not divide {size}; give it None, or split another axis"
      )
  of_map = _axes_of(layout.device_mesh)
  if of_map is not None and of_map != mesh:
    raise LayoutError(
      f"{what} on the mesh {', '.join(f'{n}:{s}' for n, s in of_map.items())}, and the mesh is "
      f"{mesh_shape}; give the layout no device_mesh, or that of the distribution"
    )
  # There is nothing to split in an axis of size 1: the key of multi-query attention, say.
  return tuple(a if n > 1 else None for a, n in zip(axes, sizes))


def rules_of(
  distribution: Any,
  variables: Sequence[VariableAxes],
  mesh_shape: Shape,
  batch_names: Collection[str],
  conflicts: Callable[[], Collection[frozenset[str]]],
  outputs: Sequence[OutputAxes] = (),
  tell: Callable[[str], None] = _LOG.warning,
) -> MapLayout:
  """Converts a Keras distribution to layout rules.

  Args:
    distribution: an object for which `is_distribution` is True.
    variables: all variables of the model.
    mesh_shape: the mesh.
    batch_names: names of the dimensions that count examples.
    conflicts: returns pairs of names that one tensor of the program has; called if it matters.
    outputs: of layers, those that the distribution has a layout for.
    tell: takes warnings.

  Raises:
    LayoutError: see `asked_of`.
  """
  asked = {v.path: asked_of(distribution, v, mesh_shape) for v in variables}
  batch_axis = batch_axis_of(distribution)
  if batch_axis is None:
    batch_axis = mesh_shape[0].name
  elif batch_axis not in mesh_shape.dimension_names:
    raise LayoutError(
      f"the distribution splits the batch over {batch_axis!r}, and the mesh {mesh_shape} has no "
      "such axis"
    )
  rules = {name: batch_axis for name in batch_names}
  wishes = [(v.dims, asked[v.path], math.prod(v.sizes)) for v in variables]
  wishes += [(o.dims, _fitting(o, mesh_shape), math.prod(o.sizes)) for o in outputs]
  rules.update(_rules_of_votes(wishes, rules, conflicts))
  _tell_unused(outputs, rules, tell)
  names = {n for v in variables for n in v.dims if n is not None} | set(batch_names)
  stored: dict[str, tuple[str | None, ...]] = {}
  more: dict[str, str] = {}
  for v in variables:
    dims = list(v.dims)
    for i, (name, axis) in enumerate(zip(v.dims, asked[v.path])):
      if name is None or rules.get(name) == axis:
        continue
      dims[i] = _stored_name(name, axis, names)
      if axis is not None:
        more[str(dims[i])] = axis
    if tuple(dims) != v.dims:
      stored[v.path] = tuple(dims)
  return MapLayout(LayoutRules({**rules, **more}), stored, asked)


def _fitting(output: OutputAxes, mesh_shape: Shape) -> tuple[str | None, ...]:
  """The layout asked of an output, without axes that the mesh has not or that do not divide."""
  mesh = {m.name: int(m.size) for m in mesh_shape}
  return tuple(
    a if a in mesh and n % mesh[a] == 0 else None for a, n in zip(output.asked, output.sizes)
  )


def _tell_unused(
  outputs: Sequence[OutputAxes], rules: Mapping[str, str], tell: Callable[[str], None]
) -> None:
  """Warns of outputs that are split otherwise than a map asks."""
  for o in outputs:
    split = tuple(None if n is None else rules.get(n) for n in o.dims)
    if any(a is not None and a != b for a, b in zip(o.asked, split or (None,) * len(o.asked))):
      tell(
        f"keras.distribution: the layout map says {o.asked} of {o.path} {list(o.sizes)}, which is "
        f"split {split if o.dims else 'as its inputs are'}: there is one rule for a dimension, and "
        "no value depends on it"
      )


def _rules_of_votes(
  wishes: Sequence[tuple[tuple[str | None, ...], tuple[str | None, ...], int]],
  rules: Mapping[str, str],
  conflicts: Callable[[], Collection[frozenset[str]]],
) -> dict[str, str]:
  """Adds rules by votes of tensors, weighted by size, unless they conflict in a tensor.

  Args:
    wishes: names of dimensions, the mesh axis asked for each, and the weight.
    rules: those that there are.
    conflicts: returns pairs of names that one tensor has.
  """
  votes: dict[tuple[str, str], int] = {}
  for dims, asked, weight in wishes:
    for name, axis in zip(dims, asked):
      if name is not None and axis is not None:
        votes[name, axis] = votes.get((name, axis), 0) + weight
  chosen = dict(rules)
  for name, axis in sorted(votes, key=lambda pair: (-votes[pair], pair)):
    if name in chosen:
      continue
    if any(a == axis and frozenset((name, n)) in conflicts() for n, a in chosen.items()):
      continue
    chosen[name] = axis
  return chosen


def _stored_name(name: str, axis: str | None, names: Collection[str]) -> str:
  """A new dimension name for a variable's axis that is stored with another layout than `name`."""
  stored = f"{name}_over_{axis}" if axis else f"{name}_whole"
  while stored in names:
    stored += "_"
  return stored


# Time limit of the layout search: longer ones rarely find better, and the first batch waits.
_SEARCH_SECONDS = 20.0
# So many rules of a layout are said.
_MOST_RULES = 4
# A weight of so many numbers, and of such a share of all, is large.
_LARGE, _LARGE_SHARE = 1 << 18, 0.02


@dataclasses.dataclass(frozen=True)
class Decision:
  """A mesh with its layout.

  Attributes:
    mesh_impl: the mesh implementation.
    names: for each variable, by path, the names of its axes in a program; None for size 1.
    kind: of the program it was made for: "train", "test", "predict" or "generate".
    map_layout: layout rules made from Keras' layout map, or None.
    choice: what was found, where a layout was searched; None if there was none to be found.
    searched: whether a layout was searched.
  """

  mesh_impl: MeshImpl
  names: dict[str, tuple[str | None, ...]]
  kind: str
  map_layout: MapLayout | None = None
  choice: LayoutChoice | None = None
  searched: bool = False

  @property
  def stored(self) -> Mapping[str, tuple[str | None, ...]]:
    """Dimension names of the variables that are stored under others than `names`, by path."""
    return {} if self.map_layout is None else self.map_layout.stored

  @property
  def is_by_hand(self) -> bool:
    """True for layout rules of the user, which no program changes."""
    return self.map_layout is None and not self.searched

  def joined(self, names: Mapping[str, tuple[str | None, ...]]) -> dict[str, str]:
    """Dimensions that another program shows to be the same as others, whose names they get.

    Args:
      names: dimension names of the variables of that program, by path.
    """
    pairs = [p for path, new in names.items() for p in zip(self.names.get(path, new), new)]
    return {before: now for before, now in pairs if before and now and before != now}

  def renamed(self, joined: Mapping[str, str]) -> Decision | None:
    """A layout that was searched, by other names; None if it splits dimensions that are one now.

    Args:
      joined: see `joined`.
    """
    rules = dict(self.mesh_impl.layout_rules.written)
    names = {path: tuple(joined.get(n or "", n) for n in axes) for path, axes in self.names.items()}
    twice = any(
      len(set(axes)) < len(axes) for axes in ([n for n in a if n] for a in names.values())
    )
    if not self.searched or twice or any(rules.get(a) != rules.get(b) for a, b in joined.items()):
      return None
    pairs = list(dict.fromkeys((joined.get(d, d), m) for d, m in rules.items()))
    return dataclasses.replace(self, mesh_impl=self.mesh_impl.with_layout(pairs), names=names)


def decide(
  kind: str,
  mesh: MeshChoice,
  layout: Any,
  imported: Imported,
  body: Callable[..., Any],
  signature: Sequence[TensorSpec],
  model: keras.Model,
  traced: tf.Graph,
  tell: Callable[[str], None] = _LOG.warning,
  say: Callable[[str], None] = print,
  place: Callable[[MeshImpl], bool] = lambda impl: False,
) -> Decision:
  """Decides the layout for a program.

  Args:
    kind: kind of the program: "train", "test", "predict" or "generate".
    mesh: the mesh.
    layout: "auto", layout rules, or what `is_distribution`.
    imported: the forward part of the program.
    body: the program, a function of `mtf.Tensor`s.
    signature: its arguments.
    model: the model.
    traced: the graph of the function that was imported.
    tell: takes warnings.
    say: takes the two lines of what `AutoParallel` chose.
    place: called before a layout is searched, with a mesh of no layout: makes a pipeline of the
      program, whose stages are then looked at one by one; returns False if it is none.

  Raises:
    LayoutError: what is asked for suits neither the program nor the mesh.
    OutOfMemoryError: no layout fits into memory.
  """
  names = names_of(imported)
  shape = mesh.shape
  by_hand = rules_by_hand(mesh, layout)
  if is_distribution(layout):
    assert shape is not None
    # Making the graph takes longer than all else, and without a map there is no conflict.
    conflicts = functools.cache(lambda: _conflicts(_graph(mesh, body, signature)))
    outputs = outputs_of(traced, imported)
    found = _of_distribution(layout, imported, conflicts, shape, model, outputs, tell)
    return Decision(mesh.make(shape, found.rules), names, kind, found)
  if by_hand is not None:
    return Decision(mesh.make(shape or _shape_for(by_hand, mesh.size), by_hand), names, kind)
  if mesh.size == 1:
    return Decision(mesh.make(shape or Shape([Dimension("all", 1)]), ""), names, kind)
  any_mesh = mesh.make(shape or Shape([Dimension("all", mesh.size)]), "")
  is_pipeline = place(of_stages := mesh.with_stages(any_mesh))
  planned = Function(body, of_stages if is_pipeline else any_mesh, signature, "mesh")
  choice: LayoutChoice | None = None
  # The second best is found, too: it splits something where the best splits nothing.
  limits: Any = {
    "alternatives": 1,
    "time_limit": _SEARCH_SECONDS,
    "shard_state": mesh.shard_state == AUTO and not any_mesh.state_dims,
  }
  try:
    if shape is None:
      choice = auto_layout(
        planned, devices=mesh.size * (mesh.stages if is_pipeline else 1), **limits
      )
    else:
      choice = auto_layout(planned, mesh_shape=shape, **limits)
  except LayoutError as e:  # Sizes of 1, say: nobody asked for a rule, so none is wrong.
    decided, unsplit = any_mesh, str(e)
  else:
    decided, unsplit = mesh.make(*_same_choice(choice)), choice.why_unsplit()
    if decided.state_dims and not any_mesh.state_dims:
      _LOG.info("mtf.keras: variables are stored in shards over %s", ", ".join(decided.state_dims))
  _LOG.info("mtf.keras: layout %s", decided.layout_rules.pairs)
  if mesh.announces:
    if workers.current().is_chief:
      say(_announcement(choice, kind) if choice else _of_no_choice(decided.shape, unsplit))
  elif unsplit:
    tell(
      f"mtf.keras: the automatic layout splits nothing over the mesh {_axes_text(decided.shape)}: "
      f"{unsplit}. A larger batch or model may be split; a layout by hand is taken as it is"
    )
  return Decision(decided, names, kind, None, choice, searched=True)


def _same_choice(choice: LayoutChoice) -> tuple[Shape, LayoutRules, Sequence[str], bool]:
  """Arguments of `MeshChoice.make`, as the first process found them: timed searches may differ."""
  mesh = [(d.name, int(d.size)) for d in choice.mesh_shape]
  found = [mesh, list(choice.layout.pairs), choice.shard_state, choice.reshard_after_forward]
  shape, rules, over, again = json.loads(texts.gather_texts(json.dumps(found))[0])
  return _shape([tuple(d) for d in shape]), LayoutRules([tuple(r) for r in rules]), over, again


def _axes_text(shape: Shape) -> str:
  return ",".join(f"{m.name}:{m.size}" for m in shape)


def _announcement(choice: LayoutChoice, kind: str) -> str:
  """Two lines: what was chosen, and what it is predicted to cost."""
  rules = [f"{d}:{m}" for d, m in choice.layout.pairs]
  if len(rules) > _MOST_RULES:
    rules[_MOST_RULES:] = [f"and {len(rules) - _MOST_RULES} more (model.summary() shows weights)"]
  step = {"train": "training", "test": "evaluation", "predict": "prediction"}.get(
    kind, "generation"
  )
  how = "no layout is faster" if choice.proven else "the best of an incomplete search"
  whole = choice.mesh_shape.size > 1 and not rules
  split = next((c.seconds for c in choice.alternatives if whole and c.layout.pairs), None)
  at_best = "" if split is None else f" ({format_seconds(split)} if something is)"
  return (
    f"AutoParallel: mesh {_axes_text(choice.mesh_shape) or 'one device'}; "
    f"{'split: ' + ', '.join(rules) if rules else 'nothing is split'}\n"
    f"AutoParallel: a step of {step} is predicted to take {format_seconds(choice.seconds)}"
    f"{at_best}, and {format_bytes(choice.memory)} of a device ({choice.machine.name}; {how})"
  )


def _of_no_choice(shape: Shape, why: str) -> str:
  """Two lines, where the mesh divides nothing."""
  why = textwrap.shorten(why, 200, placeholder=" ...")
  return f"AutoParallel: mesh {_axes_text(shape)}; nothing is split\nAutoParallel: {why}"


def rules_by_hand(mesh: MeshChoice, layout: Any) -> LayoutRules | None:
  """The layout rules that a user wrote, for the layout or for the mesh; None if there are none.

  Args:
    mesh: the mesh.
    layout: "auto", layout rules, or what Keras has for a layout; see `decide`.

  Raises:
    LayoutError: a rule names a mesh dimension that there is not.
  """
  if isinstance(layout, str) and layout == "auto":
    rules = LayoutRules([]) if mesh.given is None else mesh.given.layout_rules
    if not rules.pairs:
      return None
  elif is_distribution(layout):
    return None
  else:
    rules = convert_to_layout_rules(layout)
  check_mesh_names(mesh.shape or _shape_for(rules, mesh.size), rules)
  return rules


def names_of(imported: Imported) -> dict[str, tuple[str | None, ...]]:
  """The names of the axes of the variables of an imported function; None for size 1."""
  return {
    v.name: tuple(d.name if d.size > 1 else None for d in v.shape) for v in imported.variables
  }


def suited(mesh_impl: MeshImpl, imported: Imported, always: Collection[str]) -> MeshImpl:
  """Drops layout rules that do not fit a program: the dimension is missing, or does not divide.

  A last batch that is smaller, say: its examples cannot be split, so each device computes all of
  them. Variables have the same sizes in all programs: their rules stay.

  Args:
    mesh_impl: the mesh.
    imported: the forward part of the program.
    always: names of dimensions whose rules are never left out.
  """
  mesh = {m.name: int(m.size) for m in mesh_impl.shape}
  dims, uneven = imported.dimensions, mesh_impl.layout_rules.uneven
  unsuited = [
    (d, m)
    for d, m in mesh_impl.layout_rules.pairs
    if d not in always
    and (d not in dims or (m in mesh and dims[d].size % mesh[m] and (d, m) not in uneven))
  ]
  if not unsuited:
    return mesh_impl
  for d, m in unsuited:
    if d not in dims:
      continue
    _LOG.info(
      "mtf.keras: %s:%d cannot be split over %s:%d, so each device computes all of it",
      *(d, dims[d].size, m, mesh[m]),
    )
  rules = zip(mesh_impl.layout_rules.pairs, mesh_impl.layout_rules.written)
  return mesh_impl.with_layout([written for pair, written in rules if pair not in unsuited])


def _of_distribution(
  distribution: Any,
  imported: Imported,
  conflicts: Callable[[], Collection[frozenset[str]]],
  shape: Shape,
  model: keras.Model,
  outputs: Sequence[OutputAxes],
  tell: Callable[[str], None],
) -> MapLayout:
  of_keras = {id(v.value): v for v in model.variables}
  variables = [
    VariableAxes(v.name, of_keras[id(v.variable)], names_of(imported)[v.name])
    for v in imported.variables
    if id(v.variable) in of_keras
  ]
  batch = {s[0].name for s in imported.arguments if s.ndims}
  paths = [v.path for v in model.variables]
  _tell_unmatched(distribution, paths, [o.path for o in outputs], tell)
  found = rules_of(distribution, variables, shape, batch, conflicts, outputs, tell)
  if not isinstance(distribution, keras.distribution.DataParallel):
    _tell_whole(found, variables, tell)
  return found


def _tell_unmatched(
  distribution: Any,
  paths: Sequence[str],
  outputs: Sequence[str],
  tell: Callable[[str], None] = _LOG.warning,
) -> None:
  """Warns of patterns of a layout map that match no variable: they split nothing.

  Args:
    distribution: an object for which `is_distribution` is True.
    paths: of the model's variables.
    outputs: paths of outputs of layers that a pattern matches.
    tell: takes warnings.
  """
  # One map may be for several models: a pattern that one has matched is as it should be.
  matched: set[str] = vars(distribution).setdefault(_MATCHED, set())
  for pattern, layout in _patterns(distribution):
    # Searched as the installed Keras does: in a map of this pattern alone.
    alone = keras.distribution.LayoutMap(None)
    alone[pattern] = keras.distribution.TensorLayout(layout.axes)
    if any(alone[path] is not None for path in (*paths, *outputs)):
      matched.add(pattern)
    elif pattern not in matched:
      near = difflib.get_close_matches(pattern, paths, 3, 0.0)
      hint = f"variables with names like it: {', '.join(near)}"
      for longer in (f".*{pattern}", f".*{pattern}.*"):
        found = next((path for path in paths if re.fullmatch(longer, path)), None)
        if found is not None:  # As a search would find it.
          hint = f"it is part of {found}, and Keras matches whole paths; give {longer!r}"
          break
      tell(
        f"keras.distribution: the pattern {pattern!r} of the layout map matches no variable, so it "
        f"splits nothing; {hint}"
      )


def _patterns(distribution: Any) -> list[tuple[str, Any]]:
  """Patterns and layouts of the layout map of a distribution, or of a map."""
  parts = [distribution, *vars(distribution).values()]
  maps = [m for m in parts if isinstance(m, keras.distribution.LayoutMap)]
  return [pair for m in maps for pair in m.items()]


def check_patterns(distribution: Any) -> None:
  """Checks that the patterns of a layout map are regular expressions.

  Args:
    distribution: an object for which `is_distribution` is True.

  Raises:
    LayoutError: one is not.
  """
  for pattern, _ in _patterns(distribution):
    try:
      re.compile(pattern)
    except re.error as e:
      raise LayoutError(
        f"the pattern {pattern!r} of the layout map is no regular expression: {e}"
      ) from None


def _tell_whole(
  found: MapLayout, variables: Sequence[VariableAxes], tell: Callable[[str], None]
) -> None:
  """Warns of large weights that no rule splits: a layer that a map has no pattern for."""
  rules = dict(found.rules.pairs)
  sizes = {v.path: math.prod(v.sizes) for v in variables}
  whole = [
    v.path
    for v in variables
    if sizes[v.path] >= max(_LARGE, _LARGE_SHARE * sum(sizes.values()))
    and not any(name in rules for name in found.stored.get(v.path, v.dims))
  ]
  if whole:
    whole.sort(key=lambda path: -sizes[path])
    largest = ", ".join(f"{path} ({sizes[path]:,} numbers)" for path in whole[:3])
    tell(
      f"keras.distribution: the layout map leaves {len(whole)} large weights whole on each device: "
      f"{largest}; give their paths a pattern, or build the model under mtf.keras.AutoParallel()"
    )


def _conflicts(graph: Graph) -> set[frozenset[str]]:
  """Pairs of dimension names that occur together in a tensor of a graph."""
  shapes = {
    tuple(x.shape.dimension_names)
    for op in graph.operations
    for one in (op, *getattr(op, "inner_operations", ()))
    for x in one.outputs
  }
  return {frozenset((a, b)) for names in shapes for a in names for b in names if a != b}


def _graph(mesh: MeshChoice, body: Callable[..., Any], signature: Sequence[TensorSpec]) -> Graph:
  assert mesh.shape is not None
  return Function(body, mesh.make(mesh.shape, ""), signature, "mesh").build_graph()[0]


def _shape_for(rules: LayoutRules, size: int) -> Shape:
  """Mesh shape of `size` devices for layout rules over one mesh dimension.

  Raises:
    LayoutError: the rules are over several mesh dimensions, whose sizes are not given.
  """
  names = sorted({m for _, m in rules.pairs})
  if len(names) > 1:
    raise LayoutError(
      f"mtf.keras: the layout {rules.pairs} is over the mesh dimensions {', '.join(names)}, and "
      f"of the mesh only its number of devices is given, {size}; give a mesh shape, as "
      f"'{','.join(f'{n}:{size if i == 0 else 1}' for i, n in enumerate(names))}'"
    )
  return Shape([Dimension(names[0] if names else "all", size)])
