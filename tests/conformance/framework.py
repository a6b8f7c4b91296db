"""The conformance suite: what a descriptor is, how layouts are drawn, how a case is run.

An operation is tested by one line in a `descriptors_<family>.py`:

  op("square", mtf.square, np.square, "a:4 b:8"),

All operations of a family that a drawn layout allows are put into one program, which runs on a
placement and on a SIMD mesh, eagerly and inside `tf.function`. Values must equal the NumPy
function's; gradients must equal finite differences of the NumPy function in float64. Operations
that the layout does not allow must say so by a `LayoutError`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import LayoutError
from mesh_tensorflow.numerics import padding

MODES = ("placement_eager", "placement_function", "simd_eager", "simd_function")
# For a test of several layouts, which take turns: of each both kinds, and one execution of each.
MODE_PAIRS = (("placement_function", "simd_eager"), ("placement_eager", "simd_function"))
SEED = 7  # Of the random operations.
# Of so many elements of an array the gradient is checked, of the others that it is finite: of all
# if MTF_CONFORMANCE_DRAWS is set. NumPy computes the function twice for each.
POSITIONS = None if "MTF_CONFORMANCE_DRAWS" in os.environ else 48

_MESHES = (
  "r:2", "r:4", "r:8", "r:3", "r:2,s:2", "r:2,s:4", "r:4,s:2", "r:1,s:4", "r:3,s:2",
  "r:2,s:2,t:2", "r:2,s:1,t:4",
)  # fmt: skip
# For layouts whose rules split unevenly: most sizes of the descriptors are 4, 8, 12 and 16.
_UNEVEN_MESHES = (
  "r:3", "r:2,s:3", "r:5", "r:4", "r:2,s:2", "r:2", "r:3,s:2", "r:8", "r:2,s:4", "r:7",
)  # fmt: skip
_CANDIDATES = 150


@dataclasses.dataclass(frozen=True)
class Input:
  """A named-dimension input, drawn uniformly from [low, high).

  Attributes:
    dims: "a:4 b:8".
    low: smallest value.
    high: bound above all values.
    dtype: name of the dtype.
    values: the values themselves, instead of drawn ones.
  """

  dims: str
  low: float = -2.0
  high: float = 2.0
  dtype: str = "float32"
  values: Any = None

  @property
  def shape(self) -> mtf.Shape:
    return mtf.convert_to_shape(self.dims)

  @property
  def floating(self) -> bool:
    return tf.as_dtype(self.dtype).is_floating

  def draw(self, rng: np.random.Generator) -> np.ndarray:
    sizes = self.shape.to_integer_list
    if self.values is not None:
      drawn = np.reshape(np.asarray(self.values), sizes)
    elif self.dtype == "bool":
      drawn = rng.random(sizes) < 0.5
    elif self.floating:
      drawn = self.low + (self.high - self.low) * rng.random(sizes)
    else:
      drawn = rng.integers(int(self.low), int(self.high), sizes)
    return np.asarray(drawn, tf.as_dtype(self.dtype).as_numpy_dtype)


T = Input


@dataclasses.dataclass(frozen=True)
class Layout:
  """A mesh shape and layout rules, as text, and whether variables are stored in shards.

  Shards are over all mesh dimensions: each cuts what no rule splits over it.
  """

  mesh: str
  rules: str
  shards: bool = False

  @functools.cached_property
  def _axes(self) -> dict[str, mtf.Dimension]:
    mesh = mtf.convert_to_shape(self.mesh)
    pairs = mtf.convert_to_layout_rules(self.rules).pairs
    return {name: mesh.get_dim_by_name(axis) for name, axis in pairs}

  @functools.cached_property
  def is_uneven(self) -> bool:
    """Whether its rules, all of them, split sizes that the mesh dimensions do not divide."""
    return "~" in self.rules

  def axis(self, name: str) -> mtf.Dimension | None:
    """The mesh dimension over which dimensions of this name are split."""
    return self._axes.get(name)

  def splits(self, name: str) -> bool:
    axis = self.axis(name)
    return axis is not None and axis.size > 1

  def suits(self, shape: mtf.Shape) -> bool:
    """Whether a tensor of this shape can be laid out."""
    axes = self._axes
    split = [(d, axes[d.name]) for d in shape if d.name in axes]
    return len({axis for _, axis in split}) == len(split) and (
      self.is_uneven or not any(d.size % axis.size for d, axis in split)
    )

  def splits_unevenly(self, dim: mtf.Dimension) -> bool:
    """Whether slices of a tensor with this dimension have padding along it."""
    axis = self.axis(dim.name)
    return self.is_uneven and axis is not None and dim.size % axis.size != 0

  @property
  def size(self) -> int:
    return mtf.convert_to_shape(self.mesh).size

  def __str__(self) -> str:
    return f"mesh {self.mesh}, layout {self.rules or '(none)'}{', shards' if self.shards else ''}"


# A reference that stands for: the value that one device computes (random operations).
ONE_DEVICE = object()


@dataclasses.dataclass(frozen=True, eq=False)
class Descriptor:
  """One operation, and how to compute it another way.

  Attributes:
    name: unique in the suite.
    build: mtf tensors -> an mtf tensor, or a list of them.
    reference: arrays (floating ones as float64) -> an array, or a list of them.
    inputs: the inputs.
    differentiable: whether the gradients of all floating inputs are checked.
    gradient: (arrays, cotangents) -> gradients of the floating inputs, where finite
      differences of the reference are not what is promised (ties, cut gradients).
    tolerance: relative to each value, and to the largest value of the tensor.
    unsplit: names of dimensions that must not be split.
    together: dimensions ("a:4 b:8") that meet inside the operation: no two on one mesh axis.
    gradient_together: as `together`, but of the gradient alone.
    illegal: further layouts that must be refused.
    variables: of a layer, name (below the scope it is built in) and what it is set to; they
      come after the inputs in `reference`, and the gradients to them are checked too. The layer
      must make these, of these shapes, and no others. None: it makes what it wants.
    untrained: names among them that are not trainable; no gradient is asked for.
    replica_tolerance: how much the processors' values of one slice may differ, relative to the
      largest. 0 except where TensorFlow's graph optimizer rewrites the devices' equal subgraphs
      differently.
  """

  name: str
  build: Callable[..., Any]
  reference: Any
  inputs: tuple[Input, ...]
  differentiable: bool = True
  gradient: Callable[..., Any] | None = None
  tolerance: float = 1e-5
  unsplit: tuple[str, ...] = ()
  together: tuple[str, ...] = ()
  gradient_together: tuple[str, ...] = ()
  illegal: Callable[[Layout], bool] | None = None
  variables: tuple[tuple[str, Input], ...] | None = None
  untrained: tuple[str, ...] = ()
  replica_tolerance: float = 0.0

  @property
  def sources(self) -> list[Input]:
    """What the value is a function of: the inputs, then the variables."""
    return [*self.inputs, *(x for _, x in self.variables or ())]

  @functools.cached_property
  def arrays(self) -> list[np.ndarray]:
    """The values of `sources`."""
    rng = np.random.default_rng(zlib.crc32(self.name.encode()))
    return [x.draw(rng) for x in self.sources]

  @property
  def with_gradient(self) -> list[int]:
    """Which of the `sources` a gradient is taken of."""
    names = [None] * len(self.inputs) + [name for name, _ in self.variables or ()]
    return [i for i, x in enumerate(self.sources) if x.floating and names[i] not in self.untrained]

  @functools.cached_property
  def shapes(self) -> list[mtf.Shape]:
    """The shapes that a layout must suit: of inputs, of outputs, and those of `together`."""
    return self.own_shapes + [mtf.convert_to_shape(t) for t in self.together]

  @functools.cached_property
  def own_shapes(self) -> list[mtf.Shape]:
    """The shapes of inputs, outputs and variables."""
    mesh = mtf.Mesh(mtf.Graph(), "shapes")
    inputs = [mtf.import_tf_tensor(mesh, a, x.shape) for a, x in zip(self.arrays, self.inputs)]
    try:
      outputs = _call(self, mesh, inputs)
    except Exception:  # It is told, with its text, when the operation is run.
      outputs = []
    made = [v.shape for v in mesh.graph.all_variables]
    return [t.shape for t in inputs + outputs] + made

  @functools.cached_property
  def dimension_names(self) -> list[str]:
    return sorted({n for shape in self.shapes for n in shape.dimension_names} | set(self.unsplit))

  def is_illegal(self, layout: Layout) -> bool:
    """Whether the layout must be refused."""
    if any(layout.splits(name) for name in self.unsplit):
      return True
    if not all(layout.suits(shape) for shape in self.shapes):
      return True
    return self.illegal is not None and self.illegal(layout)

  def may_be_refused(self, layout: Layout) -> bool:
    """Whether a layout that splits unevenly may be refused, and need not be.

    What an operation demands of a split does not count where its inputs are gathered.
    """
    suits = all(layout.suits(shape) for shape in self.own_shapes)
    return layout.is_uneven and suits and self.is_illegal(layout)

  def has_gradient(self, layout: Layout) -> bool:
    """Whether the gradient can be checked on a layout that is legal for the value."""
    return self.differentiable and all(
      layout.suits(mtf.convert_to_shape(dims)) for dims in self.gradient_together
    )

  def split_dimensions(self, layout: Layout) -> int:
    """How many of its dimensions the layout splits."""
    return sum(layout.splits(name) for name in self.dimension_names)

  @functools.cached_property
  def expected(self) -> list[np.ndarray]:
    if self.reference is ONE_DEVICE:
      return self._on_one_device(differentiable=False).y
    return _as_list(self.reference(*[_wide(a) for a in self.arrays]))

  @functools.cached_property
  def cotangents(self) -> list[np.ndarray]:
    """For each output a random gradient, of the output's shape."""
    rng = np.random.default_rng(zlib.crc32(f"{self.name} cotangent".encode()))
    return [rng.uniform(-1.0, 1.0, np.shape(y)).astype(np.float32) for y in self.expected]

  @functools.cached_property
  def value_only(self) -> Descriptor:
    return dataclasses.replace(self, differentiable=False) if self.differentiable else self

  def _on_one_device(self, differentiable: bool) -> Values:
    single = self if differentiable else self.value_only
    return run_program(make_impl("placement", Layout("r:1", ""), [""]), [single])[self.name]

  @functools.cached_property
  def expected_gradients(self) -> list[np.ndarray]:
    if self.reference is ONE_DEVICE and self.gradient is None:
      return self._on_one_device(differentiable=True).dx
    arrays = [_wide(a) for a in self.arrays]
    cotangents = [c.astype(np.float64) for c in self.cotangents]
    if self.gradient is not None:
      return _as_list(self.gradient(arrays, cotangents))
    return [
      finite_differences(self.reference, arrays, i, cotangents, POSITIONS)
      for i in self.with_gradient
    ]


def op(
  name: str, build: Callable[..., Any], reference: Any, *inputs: str | Input, **kwargs: Any
) -> Descriptor:
  """A `Descriptor`; an input given by its dimensions alone is float32 in [-2, 2)."""
  made = tuple(Input(x) if isinstance(x, str) else x for x in inputs)
  for key in ("unsplit", "together", "gradient_together"):
    if isinstance(kwargs.get(key), str):
      kwargs[key] = (kwargs[key],)
  if kwargs.get("variables") is not None:
    given = kwargs["variables"].items()
    kwargs["variables"] = tuple((n, Input(x) if isinstance(x, str) else x) for n, x in given)
  floating = any(x.floating for x in made) or bool(kwargs.get("variables"))
  kwargs.setdefault("differentiable", floating)
  return Descriptor(name, build, reference, made, **kwargs)


def _as_list(x: Any) -> list[Any]:
  return list(x) if isinstance(x, (list, tuple)) else [x]


def _wide(a: np.ndarray) -> np.ndarray:
  return a if a.dtype.kind in "iub" else np.asarray(a, np.float64)


def _is_floating(a: Any) -> bool:
  return tf.as_dtype(np.asarray(a).dtype).is_floating


def finite_differences(
  fn: Callable[..., Any],
  arrays: Sequence[np.ndarray],
  index: int,
  cotangents: Sequence[np.ndarray],
  positions: int | None = None,
  step: float = 1e-5,
) -> np.ma.MaskedArray:
  """Gradient of sum(cotangent * output) with respect to one array: central differences.

  Of an array of more elements than `positions` it is taken at so many drawn ones; the others are
  masked.
  """

  def loss(x):
    outputs = _as_list(fn(*arrays[:index], x, *arrays[index + 1 :]))
    return sum(float(np.sum(c * y)) for c, y in zip(cotangents, outputs) if _is_floating(y))

  gradient = np.ma.masked_all_like(arrays[index])
  chosen = np.random.default_rng(SEED).permutation(gradient.size)[:positions]
  for position in zip(*np.unravel_index(chosen, gradient.shape)) if gradient.ndim else [()]:
    moved = arrays[index].copy()
    moved[position] += step
    above = loss(moved)
    moved[position] -= 2 * step
    gradient[position] = (above - loss(moved)) / (2 * step)
  return gradient


# ------------------------------------------------------------------------ layouts


def _random_layout(rng: random.Random, mesh: str, names: Sequence[str]) -> Layout:
  left = list(names)
  rng.shuffle(left)
  rules = []
  for axis in mtf.convert_to_shape(mesh).dimension_names:
    # Mostly one dimension on an axis, sometimes more: illegal for tensors that have both.
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3))):
      if left:
        rules.append(f"{left.pop()}:{axis}")
  return Layout(mesh, ",".join(sorted(rules)))


def draw_layouts(
  family: str,
  descriptors: Sequence[Descriptor],
  count: int,
  wild: int = 0,
  second: str | None = None,
) -> list[Layout]:
  """Draws layouts for a family, the same ones in every run.

  Of many random candidates those are taken that are legal for, and split, the operations that
  the ones before split least. Every second draw has a mesh of its own, so that sizes which
  suit few operations have their turn.

  Args:
    family: name, from which the random numbers come.
    descriptors: the operations.
    count: how many layouts.
    wild: how many more, taken as they come: many operations refuse them.
    second: the mesh of the second layout; None: that, too, is drawn.

  Returns:
    A list of layouts, the wild ones last; each second one, the first among them, stores variables
    in shards.
  """
  rng = random.Random(zlib.crc32(family.encode()))
  meshes = rng.sample(_MESHES, len(_MESHES))
  names = sorted({n for d in descriptors for n in d.dimension_names})
  times = dict.fromkeys(descriptors, 0)
  layouts: list[Layout] = []
  for i in range(count):
    best: tuple[float, Layout, list[Descriptor]] | None = None
    # The first ones see to it that each operation is split; later ones come more as they come.
    for _ in range(_CANDIDATES if i < 6 else _CANDIDATES // 10):
      mesh = meshes[i // 2 % len(meshes)] if i % 2 else rng.choice(meshes)
      mesh = second if second is not None and i == 1 else mesh
      layout = _random_layout(rng, mesh, names)
      if layout in layouts:
        continue
      hit = [d for d in descriptors if d.split_dimensions(layout) and not d.is_illegal(layout)]
      score = sum(d.split_dimensions(layout) * 50.0 ** -times[d] for d in hit)
      if best is None or score > best[0]:
        best = (score, layout, hit)
    if best is None:  # A family with few dimensions: all layouts of this mesh were drawn.
      best = (0.0, _random_layout(rng, rng.choice(meshes), names), [])
    layouts.append(best[1])
    for d in best[2]:
      times[d] += 1
  layouts += [_random_layout(rng, rng.choice(meshes), names) for _ in range(wild)]
  return [dataclasses.replace(layout, shards=i % 2 == 0) for i, layout in enumerate(layouts)]


def draw_uneven_layouts(family: str, descriptors: Sequence[Descriptor], count: int) -> list[Layout]:
  """Draws layouts whose rules split unevenly, the same ones in every run.

  Args:
    family: name, from which the random numbers come.
    descriptors: the operations.
    count: how many layouts. Each of many candidates is as good as the operations of which it
      splits a tensor unevenly, and the ones before did not.
  """
  rng = random.Random(zlib.crc32(f"{family} unevenly".encode()))
  names = sorted({n for d in descriptors for n in d.dimension_names})
  dims = {d: {dim for shape in d.own_shapes for dim in shape} for d in descriptors}
  all_dims = set().union(*dims.values())
  times = dict.fromkeys(descriptors, 0)
  layouts: list[Layout] = []
  for _ in range(count):
    best: tuple[float, Layout, list[Descriptor]] | None = None
    for _ in range(_CANDIDATES):
      even = _random_layout(rng, rng.choice(_UNEVEN_MESHES), names)
      layout = Layout(even.mesh, ",".join(f"{r}~" for r in even.rules.split(",") if r))
      if layout in layouts:
        continue
      uneven = set(filter(layout.splits_unevenly, all_dims))
      hit = [d for d in descriptors if uneven & dims[d] and not d.is_illegal(layout)]
      score = sum(d.split_dimensions(layout) * 50.0 ** -times[d] for d in hit)
      if best is None or score > best[0]:
        best = (score, layout, hit)
    if best is None:  # A family with few dimensions: all layouts were drawn.
      break
    layouts.append(best[1])
    for d in best[2]:
      times[d] += 1
  return [dataclasses.replace(layout, shards=i % 3 == 1) for i, layout in enumerate(layouts)]


# ------------------------------------------------------------------------ running


def make_impl(kind: str, layout: Layout, devices: Sequence[str], store: Any = None) -> Any:
  """A mesh implementation, "placement" or "simd", on the first of the devices.

  On about two thirds of the layouts some devices have several processors: by shares of the first
  mesh dimension that has several, or as it comes. (Not if each device is the default one, "".)
  """
  devices, shares = list(devices[: layout.size]), None
  turn = zlib.crc32(str(layout).encode()) % 3 if all(devices) else 0
  if turn == 1:
    devices = [devices[2 * p // 3] for p in range(layout.size)]
  if turn == 2 and layout.size > 1:
    axis = next(m for m in mtf.convert_to_shape(layout.mesh) if m.size > 1)
    parts = [axis.size - 1, 1] if axis.size > 2 else [axis.size]
    shares = {axis.name: parts}
    devices = devices[: layout.size // axis.size * len(parts)]
  cls = mtf.simd_mesh_impl.SimdMeshImpl if kind == "simd" else mtf.PlacementMeshImpl
  impl = cls(layout.mesh, layout.rules, devices, variable_store=store, shares=shares)
  sharded = mtf.convert_to_shape(layout.mesh).dimension_names if layout.shards else []
  return impl.with_sharded_state(sharded) if sharded else impl


def _call(descriptor: Descriptor, mesh: mtf.Mesh, inputs: Sequence[mtf.Tensor]) -> list[mtf.Tensor]:
  # The scope makes names, on which random numbers depend, independent of the batch.
  with mtf.variable_scope(descriptor.name, graph=mesh.graph):
    if not inputs:
      return _as_list(descriptor.build(mesh))
    return _as_list(descriptor.build(*inputs))


@contextlib.contextmanager
def graph_optimizer(enabled: bool) -> Iterator[None]:
  """Switches TensorFlow's graph optimizer, which takes most of the time of a short run."""
  before = tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer", False)
  tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not enabled})
  try:
    yield
  finally:
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": before})


@dataclasses.dataclass
class Values:
  """What a program computed for one descriptor.

  Attributes:
    y: the outputs.
    dx: the gradients of the floating inputs; empty if they were not asked for.
    disagreements: tensors whose slices, or exports on several processors, do not fit together.
  """

  y: list[np.ndarray]
  dx: list[np.ndarray]
  disagreements: list[str]


def _build(
  mesh: mtf.Mesh, descriptor: Descriptor, arrays: Sequence[tf.Tensor]
) -> dict[str, list[mtf.Tensor]]:
  """Adds a descriptor to a graph; returns its outputs "y" and gradients "dx"."""
  given = iter(arrays)
  xs = [mtf.import_tf_tensor(mesh, next(given), x.shape) for x in descriptor.inputs]
  ys, operations = mesh.graph.capture_operations(lambda: _call(descriptor, mesh, xs))
  variables = _variables(mesh.graph, descriptor)
  if not descriptor.differentiable:
    return {"y": ys, "dx": []}
  floating = [y for y in ys if y.dtype.is_floating]
  dys = [mtf.cast(mtf.import_tf_tensor(mesh, next(given), y.shape), y.dtype) for y in floating]
  sources = [*xs, *(v.value for v in variables)]
  wanted = [sources[i] for i in descriptor.with_gradient]
  dxs = mtf.gradients(floating, wanted, dys, operations=operations)
  return {"y": ys, "dx": [mtf.zeros_like(x) if d is None else d for x, d in zip(wanted, dxs)]}


def _variables(graph: mtf.Graph, descriptor: Descriptor) -> list[mtf.Variable]:
  """The variables that a descriptor made, in the order in which it declares them.

  Raises:
    AssertionError: they are not those that it declares, or their shapes are not.
  """
  if descriptor.variables is None:
    return []
  prefix = descriptor.name + "/"
  made = {v.full_name.removeprefix(prefix): v for v in graph.all_variables}
  made = {name: v for name, v in made.items() if prefix + name == v.full_name}
  want = dict(descriptor.variables)
  assert made.keys() == want.keys(), f"variables {sorted(made)}, expected {sorted(want)}"
  for name, v in made.items():
    assert v.shape == want[name].shape, f"{name} is {v.shape}, expected {want[name].shape}"
    assert v.trainable == (name not in descriptor.untrained), f"{name}: trainable={v.trainable}"
  return [made[name] for name in want]


def _set_variables(impl: Any, graph: mtf.Graph, descriptors: Sequence[Descriptor]) -> None:
  """Makes the declared variables with their values, before a lowering would initialize them."""
  for d in descriptors:
    values = d.arrays[len(d.inputs) :]
    for v, value in zip(_variables(graph, d), values):
      impl.variable_store.get(
        v.stored_impl(impl),
        v.full_name,
        v.shape,
        master_dtype=v.master_dtype,
        slice_dtype=v.slice_dtype,
        initializer=mtf.initializers.Constant(value),
        trainable=v.trainable,
      )


def run_program(
  impl: Any, descriptors: Sequence[Descriptor], traced: bool = False
) -> dict[str, Values]:
  """Runs all descriptors as one program; returns the values of each, by name."""
  shapes: dict[tuple[str, str, int], mtf.Shape] = {}

  def program(arrays):
    graph = mtf.Graph()
    graph.random_seed = SEED
    mesh = mtf.Mesh(graph, "conformance")
    built = {d.name: _build(mesh, d, arrays[d.name]) for d in descriptors}
    _set_variables(impl, graph, descriptors)
    lowering = mtf.Lowering(graph, {mesh: impl})
    results = []
    for name, parts in built.items():
      for key, tensors in parts.items():
        for i, t in enumerate(tensors):
          shapes[name, key, i] = t.shape
          slices = lowering.tensors[t].to_laid_out_tensor().all_slices
          results.append((lowering.export_to_tf_tensor(t), slices))
    return results

  arrays = {}
  for d in descriptors:
    arrays[d.name] = [tf.constant(a) for a in d.arrays[: len(d.inputs)]]
    if d.differentiable:
      arrays[d.name] += [
        tf.constant(c) for c, y in zip(d.cotangents, d.expected) if _is_floating(y)
      ]
  run = functools.partial(impl.run_per_device, program)
  if traced:
    run = tf.function(run, autograph=False)
  per_processor = run([arrays])
  values = {d.name: Values([], [], []) for d in descriptors}
  tolerances = {d.name: d.replica_tolerance for d in descriptors}
  for place, *everywhere in zip(shapes, *per_processor):
    name, key, i = place
    # (NumPy does not take scalars of bfloat16 for arrays.)
    exports = [np.asarray(export.numpy()) for export, _ in everywhere]
    slices = [np.asarray(s.numpy()) for _, laid_out in everywhere for s in laid_out]
    getattr(values[name], key).append(exports[0])
    if not _agree(impl, shapes[place], exports, slices, tolerances[name]):
      values[name].disagreements.append(f"{key} {i}: processors do not agree about {shapes[place]}")
  return values


def _agree(
  impl: Any,
  shape: mtf.Shape,
  exports: Sequence[np.ndarray],
  slices: Sequence[np.ndarray],
  tolerance: float,
) -> bool:
  """Whether all exports are equal, and every processor's slice is its part of them."""
  whole = exports[0]
  sizes = impl.slice_shape(shape)
  parts = [
    whole[tuple(slice(b, b + n) for b, n in zip(impl.slice_begin(shape, p), sizes))]
    for p in range(impl.size)
  ]
  if any(s.shape != tuple(sizes) for s in slices):
    return False
  # Without their padding.
  slices = [s[tuple(slice(n) for n in impl.slice_extent(shape, p))] for p, s in enumerate(slices)]
  pairs = [*((whole, e) for e in exports), *zip(parts, slices)]
  if len(slices) != impl.size or any(a.shape != b.shape for a, b in pairs):
    return False
  if tolerance:
    return not any(mismatch(a, b, tolerance) for a, b in pairs)
  return all(a.tobytes() == b.tobytes() for a, b in pairs)


def mismatch(got: Any, want: Any, tolerance: float) -> str | None:
  """What is wrong with an array, or None."""
  got, want = np.asarray(got), np.asarray(want)
  if got.shape != want.shape:
    return f"shape {got.shape}, expected {want.shape}"
  if not _is_floating(got):
    if _is_floating(want):
      return f"dtype {got.dtype}, expected floating"
    wrong = got != want
  else:
    got = got.astype(np.float64)
    want = np.asarray(want, np.float64)
    finite = np.abs(want[np.isfinite(want)])
    allowed = tolerance * (np.abs(want) + (finite.max() if finite.size else 0.0)) + 1e-30
    with np.errstate(invalid="ignore"):
      wrong = np.abs(got - want) > allowed
    wrong = np.where(np.isfinite(want), wrong | ~np.isfinite(got), False)
    wrong |= (np.isnan(want) != np.isnan(got)) | (np.isinf(want) & (got != want))
  if not np.any(wrong):
    return None
  where = tuple(int(i) for i in np.argwhere(wrong)[0])
  return (
    f"{int(np.sum(wrong))} of {wrong.size} values wrong, the first at {where}: "
    f"{got[where]!r}, expected {want[where]!r}"
  )


def _known_or_finite(want: Any, got: np.ndarray) -> Any:
  """`want`, of which elements that are masked may have any finite value."""
  if not np.ma.is_masked(want) or want.shape != got.shape:
    return want
  free = want.mask & np.isfinite(got.astype(np.float64))
  return np.where(free, got.astype(np.float64), want.filled(0.0))


def compare(descriptor: Descriptor, values: Values) -> list[str]:
  """What is wrong with the values of one descriptor."""
  if len(values.y) != len(descriptor.expected):
    return [f"{len(values.y)} outputs, expected {len(descriptor.expected)}"]
  problems = list(values.disagreements)
  for i, (got, want) in enumerate(zip(values.y, descriptor.expected)):
    problem = mismatch(got, want, descriptor.tolerance)
    if problem:
      problems.append(f"output {i}: {problem}")
  if descriptor.differentiable:
    for i, (got, want) in enumerate(zip(values.dx, descriptor.expected_gradients)):
      problem = mismatch(got, _known_or_finite(want, got), 2 * descriptor.tolerance)
      if problem:
        problems.append(f"gradient {i}: {problem}")
  return problems


def check_refused(impl: Any, descriptors: Sequence[Descriptor], traced: bool = False) -> list[str]:
  """Names of descriptors that the layout does not allow, but that are lowered all the same."""
  accepted: set[str] = set()

  def program():
    for d in descriptors:
      mesh = mtf.Mesh(mtf.Graph(), "conformance")
      xs = [mtf.import_tf_tensor(mesh, a, x.shape) for a, x in zip(d.arrays, d.inputs)]
      _call(d, mesh, xs)
      try:
        mtf.Lowering(mesh.graph, {mesh: impl})
      except LayoutError:
        continue
      accepted.add(d.name)
    return tf.constant(0)

  run = functools.partial(impl.run, program)
  if traced:
    run = tf.function(run, autograph=False)
  run()
  return sorted(accepted)


@dataclasses.dataclass
class Tally:
  """How many cases were checked."""

  values: int = 0
  gradients: int = 0
  refusals: int = 0


def check_family(
  mode: str, layout: Layout, descriptors: Sequence[Descriptor], devices: Sequence[str]
) -> tuple[Tally, list[str]]:
  """Runs a family on one layout in one mode.

  Returns:
    The number of cases, and what is wrong.
  """
  kind, execution = mode.split("_")
  traced = execution == "function"
  unsure = [d for d in descriptors if d.may_be_refused(layout)]
  descriptors = [d for d in descriptors if d not in unsure]
  refused = [d for d in descriptors if d.is_illegal(layout)]
  allowed = [d for d in descriptors if not d.is_illegal(layout)]
  allowed = [d if d.has_gradient(layout) else d.value_only for d in allowed]
  tally = Tally(len(allowed), sum(d.differentiable for d in allowed), len(refused))
  problems = []
  if refused:
    for name in check_refused(make_impl(kind, layout, devices), refused, traced):
      problems.append(f"{name}: no LayoutError for a layout that is not legal")
  results: dict[str, Values] = {}
  failure = None
  try:
    results = run_program(make_impl(kind, layout, devices), allowed, traced)
  except Exception as e:  # Told below, if possible of the operation whose fault it is.
    failure = f"all together: {type(e).__name__}: {str(e)[:300]}"
  for d in allowed:
    try:
      values = results.get(d.name)
      if values is None:
        values = run_program(make_impl(kind, layout, devices), [d], traced)[d.name]
      problems += [f"{d.name}: {p}" for p in compare(d, values)]
    except Exception as e:  # Whatever it is, it is told.
      problems.append(f"{d.name}: {type(e).__name__}: {str(e)[:300]}")
  for d in unsure:
    d = d if d.has_gradient(layout) else d.value_only
    try:
      values = run_program(make_impl(kind, layout, devices), [d], traced)[d.name]
      problems += [f"{d.name}: {p}" for p in compare(d, values)]
    except LayoutError:
      tally.refusals += 1
    except Exception as e:  # Whatever it is, it is told.
      problems.append(f"{d.name}: {type(e).__name__}: {str(e)[:300]}")
    else:
      tally.values += 1
      tally.gradients += d.differentiable
  if failure and not problems:
    problems.append(failure)
  return tally, problems


def check_family_unevenly(
  mode: str, layout: Layout, descriptors: Sequence[Descriptor], devices: Sequence[str]
) -> tuple[Tally, list[str]]:
  """`check_family` of a layout that splits unevenly, with NaN in all padding."""
  with padding.filled_with(float("nan")):
    return check_family(mode, layout, descriptors, devices)
