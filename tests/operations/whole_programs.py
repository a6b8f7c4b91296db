"""Whole programs drawn at random, and their dense values in plain TensorFlow.

A program is a list of steps; each makes a value from those before it. `Mesh` side: mtf tensors.
`Dense` side: float64 `tf.Tensor`s with a list of names, which know no mesh and no layout. A step
adds one to four operations. Functions with kinks (relu, max ...) are drawn only where the dense
values are well away from them, so that rounding does not choose the gradient.

A program over two meshes has places, too: on which mesh each step is done, and whether what it
takes is brought there by `mtf.reshard` or by `mtf.stage`. Such programs also draw random numbers,
loop, branch and change variables.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.conformance.framework import SEED, Layout, make_impl

SIZES = {"a": 2, "b": 4, "c": 4, "d": 8, "e": 8, "f": 4, "g": 8, "k": 3}
MESHES = ("r:2", "r:4", "r:8", "r:2,s:2", "r:2,s:4", "r:4,s:2", "r:2,s:2,t:2", "r:2,s:1,t:4")
# Of programs over several meshes.
SMALL_MESHES = ("r:1", "r:2", "r:4", "r:2,s:2")
LARGEST_TENSOR = 4096
_BOUND = 8.0  # Values above it are scaled down, so that 30 steps stay in range.
_KINK = 1e-3  # How far from a kink the values have to be.


@dataclasses.dataclass
class Dense:
  """A float64 tensor with named axes."""

  array: tf.Tensor
  dims: list[mtf.Dimension]

  @property
  def names(self) -> list[str]:
    return [d.name for d in self.dims]

  def axis(self, name: str) -> int:
    return self.names.index(name)

  def aligned(self, dims: Sequence[mtf.Dimension]) -> tf.Tensor:
    """As an array that broadcasts against others of these dimensions."""
    order = [self.axis(d.name) for d in dims if d.name in self.names]
    sizes = [d.size if d.name in self.names else 1 for d in dims]
    return tf.reshape(tf.transpose(self.array, order), sizes)

  def to(self, dims: Sequence[mtf.Dimension]) -> tf.Tensor:
    return tf.broadcast_to(self.aligned(dims), [d.size for d in dims])


@dataclasses.dataclass(frozen=True)
class Step:
  """A step of a program.

  Attributes:
    text: for messages.
    inputs: numbers of the values it takes.
    on_mesh: mtf tensors -> an mtf tensor.
    on_dense: `Dense`s -> a `Dense`.
    meeting: names of dimensions that must not be on one mesh axis, besides those of its value.
    unsplit: names of dimensions that must not be split.
    changes_variable: whether it changes the variable that it takes first; its value is the new one.
  """

  text: str
  inputs: tuple[int, ...]
  on_mesh: Callable[..., mtf.Tensor]
  on_dense: Callable[..., Dense]
  meeting: tuple[frozenset[str], ...] = ()
  unsplit: tuple[str, ...] = ()
  changes_variable: bool = False


@dataclasses.dataclass(frozen=True)
class Place:
  """Where a step is done: on which mesh, and whether in a `mtf.stage` of it."""

  mesh: str
  in_stage: bool

  def __str__(self) -> str:
    return f"{'in stage' if self.in_stage else 'on'} {self.mesh}"


@dataclasses.dataclass(frozen=True)
class DrawnMesh:
  """A mesh: "placement" or "simd", its layout, and the number of its first device."""

  kind: str
  layout: Layout
  first: int

  def __str__(self) -> str:
    return f"{self.kind} {self.layout} from device {self.first}"


def implementations(meshes: dict[str, DrawnMesh], devices: Sequence[str]) -> dict[str, Any]:
  """The mesh implementations by name, of one store; one that has several names is made once."""
  store = mtf.VariableStore(seed=SEED)
  made = {
    m: make_impl(m.kind, m.layout, devices[m.first :], store)
    for m in dict.fromkeys(meshes.values())
  }
  return {name: made[m] for name, m in meshes.items()}


@dataclasses.dataclass
class Program:
  """Inputs, variables and steps; `layout` is legal for every value and gradient.

  Attributes:
    inputs: shapes and values.
    variables: shapes and initial values.
    steps: in order.
    layout: of a program on one mesh.
    meshes: of a program over several meshes, by name.
    homes: likewise, for each input and variable the name of its mesh.
    places: likewise, for each step.
    in_stage: likewise, the mesh in whose stage gradients are asked for, or "".
    left_out: numbers of steps whose values nobody asks for.
  """

  inputs: list[tuple[mtf.Shape, np.ndarray]]
  variables: list[tuple[mtf.Shape, np.ndarray]]
  steps: list[Step]
  layout: Layout | None = None
  meshes: dict[str, DrawnMesh] = dataclasses.field(default_factory=dict)
  homes: list[str] = dataclasses.field(default_factory=list)
  places: list[Place] = dataclasses.field(default_factory=list)
  in_stage: str = ""
  left_out: frozenset[int] = frozenset()

  def __repr__(self) -> str:
    given = [f"x{i} {s}" for i, (s, _) in enumerate([*self.inputs, *self.variables])]
    lines = [f"x{i + len(given)} = {s.text}" for i, s in enumerate(self.steps)]
    if not self.meshes:
      return "\n".join(["", str(self.layout), *given, *lines])
    meshes = [f"{name}: {m}" for name, m in self.meshes.items()]
    given = [f"{text} on {home}" for text, home in zip(given, self.homes)]
    lines = [f"{text} {place}" for text, place in zip(lines, self.places)]
    end = [f"gradients in stage {self.in_stage!r}, values left out: {sorted(self.left_out)}"]
    return "\n".join(["", *meshes, *given, *lines, *end])

  def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
    """How hypothesis shows a failing program."""
    del cycle
    printer.text(repr(self))

  def sinks(self) -> list[int]:
    """Numbers of the values that no step takes: what gradients are taken of."""
    first = len(self.inputs) + len(self.variables)
    used = {i for s in self.steps for i in s.inputs}
    return [i for i in range(first, first + len(self.steps)) if i not in used]

  def cotangent(self, number: int, sizes: Sequence[int]) -> np.ndarray:
    return np.random.default_rng(number).uniform(-1, 1, sizes).astype(np.float32)

  def build(self, mesh: mtf.Mesh, arrays: Sequence[tf.Tensor]) -> list[mtf.Tensor]:
    """The values of all steps, then the gradients of inputs and variables.

    Of a program over several meshes those that are asked for; its graph has the meshes, and each
    variable is changed by a tenth of its gradient.
    """
    homes = [mesh.graph.mesh(name) for name in self.homes] or [mesh] * len(self.given)
    n = len(self.inputs)
    values = [mtf.import_tf_tensor(m, a, s) for m, a, (s, _) in zip(homes, arrays, self.inputs)]
    for i, (home, (shape, value)) in enumerate(zip(homes[n:], self.variables)):
      initializer = mtf.initializers.Constant(value)
      values.append(mtf.get_variable(home, f"v{i}", shape, initializer=initializer))
    sources = list(values)
    for i, step in enumerate(self.steps):
      place = self.places[i] if self.places else None
      values.append(self._at(place, step, [values[k] for k in step.inputs]))
    ys = [values[i] for i in self.sinks()]
    dys = [
      mtf.import_tf_tensor(
        values[i].mesh, self.cotangent(i, values[i].shape.to_integer_list), values[i].shape
      )
      for i in self.sinks()
    ]
    with mtf.stage(self.in_stage) if self.in_stage else contextlib.nullcontext():
      gradients = mtf.gradients(ys, sources, dys)
    gradients = [mtf.zeros_like(x) if d is None else d for x, d in zip(sources, gradients)]
    if self.meshes:
      for x, d in zip(sources[n:], gradients[n:]):
        mtf.assign_sub(x.operation, d * 0.1)
    return self._asked_for(values[len(sources) :] + gradients)

  @property
  def given(self) -> list[tuple[mtf.Shape, np.ndarray]]:
    """Inputs and variables."""
    return [*self.inputs, *self.variables]

  def _at(self, place: Place | None, step: Step, xs: list[mtf.Tensor]) -> mtf.Tensor:
    """The value of a step at a place."""
    if place is None:
      return step.on_mesh(*xs)
    if place.in_stage:
      with mtf.stage(place.mesh):
        return step.on_mesh(*xs)
    # A variable that is changed is changed where it is.
    kept = 1 if step.changes_variable else 0
    return step.on_mesh(*xs[:kept], *[mtf.reshard(x, place.mesh) for x in xs[kept:]])

  def _asked_for(self, results: list[Any]) -> list[Any]:
    return [x for i, x in enumerate(results) if i not in self.left_out]

  def run(self, impls: dict[str, Any], arrays: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The results over several meshes.

    Args:
      impls: the mesh implementations by name.
      arrays: the inputs.
    """

    def lower(arrays):
      graph = mtf.Graph()
      meshes = {mtf.Mesh(graph, name): impl for name, impl in impls.items()}
      tensors = self.build(next(iter(meshes)), arrays)
      lowering = mtf.Lowering(graph, meshes, seed=SEED, wanted=tensors)
      return [lowering.export_to_tf_tensor(t) for t in tensors]

    first = next(iter(impls.values()))
    # Several meshes have programs of their own.
    return lower(arrays) if len(set(impls.values())) > 1 else first.run(lower, (arrays,))

  def expected(self) -> list[np.ndarray]:
    """The same in plain TensorFlow, in float64; over several meshes then the variables."""
    given = [Dense(tf.constant(a, tf.float64), s.dims) for s, a in self.given]
    with tf.GradientTape() as tape:
      tape.watch([x.array for x in given])
      values = list(given)
      now = dict(enumerate(given))
      for step in self.steps:
        xs = [values[i] for i in step.inputs]
        values.append(_change(step, now, xs) if step.changes_variable else step.on_dense(*xs))
      loss = tf.add_n(
        [
          tf.reduce_sum(values[i].array * self.cotangent(i, values[i].array.shape))
          for i in self.sinks()
        ]
      )
    gradients = tape.gradient(loss, [x.array for x in given], unconnected_gradients="zero")
    # The gradient of a gather comes as `tf.IndexedSlices`.
    gradients = [tf.convert_to_tensor(g).numpy() for g in gradients]
    results = self._asked_for([x.array.numpy() for x in values[len(given) :]] + gradients)
    if self.meshes:
      changed = range(len(self.inputs), len(given))
      results += [now[i].array.numpy() - 0.1 * gradients[i] for i in changed]
    return results


def _change(step: Step, now: dict[int, Dense], xs: list[Dense]) -> Dense:
  """Changes the variable in `now` that a step takes first; returns what is read afterwards."""
  i, first = step.inputs[0], xs[0]
  new = step.on_dense(now[i], *xs[1:])
  # What is read has the gradient of the variable, whatever was assigned to it.
  delta = tf.stop_gradient(new.array - first.array)
  now[i] = Dense(first.array + delta, first.dims)
  return now[i]


# ----------------------------------------------------------------------- kinds of step


def _softmax(x: Dense, name: str) -> Dense:
  return Dense(tf.nn.softmax(x.array, x.axis(name)), x.dims)


def _without(x: Dense, name: str) -> list[mtf.Dimension]:
  return [d for d in x.dims if d.name != name]


def _reduce(fn: Callable[..., tf.Tensor]) -> Callable[[Dense, str], Dense]:
  return lambda x, name: Dense(fn(x.array, x.axis(name)), _without(x, name))


def _shift(offset: int, wrap: bool) -> Callable[[Dense, str], Dense]:
  def apply(x: Dense, name: str) -> Dense:
    axis, size = x.axis(name), x.dims[x.axis(name)].size
    moved = tf.roll(x.array, offset, axis)
    if not wrap:
      index = np.arange(size) - offset
      inside = ((index >= 0) & (index < size)).astype(np.float64)
      moved *= inside.reshape([-1 if i == axis else 1 for i in range(len(x.dims))])
    return Dense(moved, x.dims)

  return apply


def _swap_halves(x: mtf.Tensor, dim: mtf.Dimension) -> mtf.Tensor:
  low = mtf.slice(x, 0, dim.size // 2, dim.name)
  high = mtf.slice(x, dim.size // 2, dim.size - dim.size // 2, dim.name)
  return mtf.concat([high, low], dim.name)


def _reversed(x: mtf.Tensor, dim: mtf.Dimension) -> mtf.Tensor:
  axis = x.shape.dims.index(dim)
  return mtf.stack(mtf.unstack(x, dim)[::-1], dim.name, axis)


def _recomputed(x: mtf.Tensor) -> mtf.Tensor:
  return mtf.recompute_grad(lambda y: mtf.tanh(y) * mtf.sigmoid(y), [x])


def _elementwise(fn: Callable[[tf.Tensor], tf.Tensor]) -> Callable[[Dense], Dense]:
  return lambda x: Dense(fn(x.array), x.dims)


_UNARY = {
  "tanh": (mtf.tanh, tf.tanh),
  "sigmoid": (mtf.sigmoid, tf.sigmoid),
  "softplus": (mtf.softplus, tf.math.softplus),
  "sin": (mtf.sin, tf.sin),
  "negative": (mtf.negative, tf.negative),
  "half": (lambda x: x * 0.5, lambda x: x * 0.5),
  "plus 1": (lambda x: 1.0 + x, lambda x: 1.0 + x),
  "square": (mtf.square, tf.square),
  "exp of -x^2": (lambda x: mtf.exp(-mtf.square(x)), lambda x: tf.exp(-tf.square(x))),
  "log of 1 + x^2": (lambda x: mtf.log(1.0 + x * x), lambda x: tf.math.log(1.0 + x * x)),
  "rsqrt of 1 + x^2": (
    lambda x: mtf.rsqrt(mtf.square(x) + 1.0),
    lambda x: tf.math.rsqrt(tf.square(x) + 1.0),
  ),
  "swish": (mtf.swish, tf.nn.silu),
  "recomputed": (_recomputed, lambda x: tf.tanh(x) * tf.sigmoid(x)),
  "x + stop_gradient(x)": (
    lambda x: x + mtf.stop_gradient(x),
    lambda x: x + tf.stop_gradient(x),
  ),
}
# Their inputs must not be near 0.
_KINKED_UNARY = {
  "relu": (mtf.relu, tf.nn.relu),
  "leaky_relu": (mtf.leaky_relu, tf.nn.leaky_relu),
  "abs": (mtf.abs, tf.abs),
  "squared_relu": (mtf.squared_relu, lambda x: tf.square(tf.nn.relu(x))),
}
_ALONG = {
  "reduce_sum": (lambda x, d: mtf.reduce_sum(x, reduced_dim=d), _reduce(tf.reduce_sum)),
  "reduce_mean": (lambda x, d: mtf.reduce_mean(x, reduced_dim=d), _reduce(tf.reduce_mean)),
  "reduce_logsumexp": (mtf.reduce_logsumexp, _reduce(tf.reduce_logsumexp)),
  "reduce_first": (
    lambda x, d: mtf.reduce_first(x, d),
    _reduce(lambda a, axis: tf.gather(a, 0, axis=axis)),
  ),
  "softmax": (mtf.softmax, _softmax),
  "log_softmax": (
    mtf.log_softmax,
    lambda x, name: Dense(tf.nn.log_softmax(x.array, x.axis(name)), x.dims),
  ),
  "layer norm": (
    lambda x, d: mtf.layers.standardize(x, d, epsilon=0.1),
    lambda x, name: Dense(
      (x.array - tf.reduce_mean(x.array, x.axis(name), keepdims=True))
      * tf.math.rsqrt(tf.math.reduce_variance(x.array, x.axis(name), keepdims=True) + 0.1),
      x.dims,
    ),
  ),
  "shift 1": (lambda x, d: mtf.shift(x, 1, d, wrap=False), _shift(1, False)),
  "shift -2": (lambda x, d: mtf.shift(x, -2, d, wrap=False), _shift(-2, False)),
  "shift 3 wrapped": (lambda x, d: mtf.shift(x, 3, d, wrap=True), _shift(3, True)),
  "cumsum": (
    mtf.cumsum,
    lambda x, name: Dense(tf.cumsum(x.array, x.axis(name)), x.dims),
  ),
  "exclusive cumsum": (
    lambda x, d: mtf.cumsum(x, d, exclusive=True),
    lambda x, name: Dense(tf.cumsum(x.array, x.axis(name), exclusive=True), x.dims),
  ),
}
_KINKED_ALONG = {
  "reduce_max": (lambda x, d: mtf.reduce_max(x, reduced_dim=d), _reduce(tf.reduce_max)),
  "reduce_min": (lambda x, d: mtf.reduce_min(x, reduced_dim=d), _reduce(tf.reduce_min)),
}
_UNSPLIT_ALONG = {
  "halves swapped": (
    _swap_halves,
    lambda x, name: Dense(
      tf.roll(x.array, -(x.dims[x.axis(name)].size // 2), x.axis(name)), x.dims
    ),
  ),
  "reversed": (
    _reversed,
    lambda x, name: Dense(tf.reverse(x.array, [x.axis(name)]), x.dims),
  ),
}
_BINARY = {
  "add": (mtf.add, tf.add),
  "sub": (mtf.sub, tf.subtract),
  "multiply": (mtf.multiply, tf.multiply),
  "divide": (lambda x, y: x / (1.0 + y * y), lambda x, y: x / (1.0 + y * y)),
}
# The two inputs must not be near each other.
_KINKED_BINARY = {
  "maximum": (mtf.maximum, tf.maximum),
  "minimum": (mtf.minimum, tf.minimum),
  "where": (
    lambda x, y: mtf.where(mtf.less(x, y), x, y),
    lambda x, y: tf.where(tf.less(x, y), x, y),
  ),
}


def _union(x: Sequence[mtf.Dimension], y: Sequence[mtf.Dimension]) -> list[mtf.Dimension]:
  """The dimensions of a binary operation's output."""
  if mtf.is_subsequence(x, y):
    return list(y)
  if mtf.is_subsequence(y, x):
    return list(x)
  return list(x) + [d for d in y if d not in x]


def _size(dims: Sequence[mtf.Dimension]) -> int:
  return mtf.list_product(d.size for d in dims)


def _away(array: tf.Tensor) -> bool:
  """Whether no value is near 0."""
  return bool(tf.reduce_all(tf.abs(array) > _KINK))


def _distinct(x: Dense, name: str) -> bool:
  """Whether no two values along a dimension are near each other."""
  ordered = tf.sort(x.array, x.axis(name))
  size = x.dims[x.axis(name)].size
  low = tf.gather(ordered, np.arange(size - 1), axis=x.axis(name))
  high = tf.gather(ordered, np.arange(1, size), axis=x.axis(name))
  return _away(high - low)


class _Drawing:
  """One program being drawn."""

  def __init__(self, draw: Callable[[Any], Any]):
    self.draw = draw
    self.rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    self.program = Program([], [], [])
    self.values: list[Dense] = []
    self.now: dict[int, Dense] = {}  # The variables, where they were changed.
    for kind in (self.program.inputs, self.program.inputs, self.program.variables):
      names = draw(st.lists(st.sampled_from("abcde"), min_size=1, max_size=3, unique=True))
      shape = mtf.Shape([(n, SIZES[n]) for n in names])
      kind.append((shape, self.rng.uniform(-1.5, 1.5, shape.to_integer_list).astype(np.float32)))
    for shape, a in [*self.program.inputs, *self.program.variables]:
      self.values.append(Dense(tf.constant(a, tf.float64), shape.dims))
    self.now.update(enumerate(self.values))

  def pick(self, options: Sequence[Any]) -> Any:
    return self.draw(st.sampled_from(list(options)))

  def value(self) -> int:
    """A value; the latest ones more often, so that programs are deep."""
    last = len(self.values) - 1
    back = self.draw(st.integers(0, last if self.draw(st.booleans()) else min(last, 2)))
    return last - back

  def add(self, step: Step) -> None:
    """Appends a step; scales its value if it is large."""
    xs = [self.values[i] for i in step.inputs]
    if step.changes_variable:
      self.program.steps.append(step)
      self.values.append(_change(step, self.now, xs))
      return
    result = step.on_dense(*xs)
    if (size := float(tf.reduce_max(tf.abs(result.array)))) > _BOUND:
      factor = _BOUND / (4 * size)
      step = dataclasses.replace(
        step,
        text=f"{step.text} * {factor:.3g}",
        on_mesh=lambda *xs, fn=step.on_mesh: fn(*xs) * factor,
        on_dense=lambda *xs, fn=step.on_dense: (lambda y: Dense(y.array * factor, y.dims))(fn(*xs)),
      )
      result = Dense(result.array * factor, result.dims)
    self.program.steps.append(step)
    self.values.append(result)

  def unary(self) -> None:
    i = self.value()
    table = {**_UNARY, **_KINKED_UNARY} if _away(self.values[i].array) else _UNARY
    name = self.pick(sorted(table))
    on_mesh, on_dense = table[name]
    self.add(Step(f"{name}(x{i})", (i,), on_mesh, _elementwise(on_dense)))

  def along(self) -> None:
    i = self.value()
    x = self.values[i]
    if not x.dims:
      return self.unary()
    dim = self.pick(x.dims)
    table = {**_ALONG, **_UNSPLIT_ALONG}
    if _distinct(x, dim.name):
      table |= _KINKED_ALONG
    name = self.pick(sorted(table))
    on_mesh, on_dense = table[name]
    self.add(
      Step(
        f"{name}(x{i}, {dim.name})",
        (i,),
        lambda x: on_mesh(x, dim),
        lambda x: on_dense(x, dim.name),
        # cumsum is a product with a triangle of the dimension with itself under another name.
        unsplit=(dim.name,) if name in _UNSPLIT_ALONG else (),
      )
    )

  def binary(self) -> None:
    i, j = self.value(), self.value()
    x, y = self.values[i], self.values[j]
    dims = _union(x.dims, y.dims)
    if _size(dims) > LARGEST_TENSOR:
      return self.unary()
    away = _away(x.to(dims) - y.to(dims))
    table = {**_BINARY, **_KINKED_BINARY} if away else _BINARY
    name = self.pick(sorted(table))
    on_mesh, on_dense = table[name]
    self.add(
      Step(
        f"{name}(x{i}, x{j})",
        (i, j),
        on_mesh,
        lambda x, y: Dense(on_dense(x.to(dims), y.to(dims)), dims),
      )
    )

  def einsum(self) -> None:
    inputs = [self.value() for _ in range(self.draw(st.integers(2, 3)))]
    dims = list(dict.fromkeys(d for i in inputs for d in self.values[i].dims))
    if len({d.name for d in dims}) < len(dims) or _size(dims) > 4 * LARGEST_TENSOR:
      return self.unary()
    kept = self.draw(st.permutations(dims))[: self.draw(st.integers(0, min(4, len(dims))))]
    if _size(kept) > LARGEST_TENSOR:
      return self.unary()
    letters = {d.name: chr(97 + k) for k, d in enumerate(dims)}

    def on_dense(*xs):
      terms = ["".join(letters[n] for n in x.names) for x in xs]
      result = "".join(letters[d.name] for d in kept)
      return Dense(tf.einsum(",".join(terms) + "->" + result, *[x.array for x in xs]), kept)

    self.add(
      Step(
        f"einsum({', '.join(f'x{i}' for i in inputs)} -> {[d.name for d in kept]})",
        tuple(inputs),
        lambda *xs: mtf.einsum(list(xs), output_shape=mtf.Shape(kept)),
        on_dense,
        meeting=(frozenset(d.name for d in dims),),
      )
    )

  def reshape(self) -> None:
    """Transposes; or renames, joins or cuts dimensions."""
    i = self.value()
    dims = self.values[i].dims
    if not dims:
      return self.unary()
    kind = self.pick(["transpose", "rename", "join", "cut", "broadcast"])
    if kind == "transpose":
      new = self.draw(st.permutations(dims))
      return self.add(
        Step(
          f"transpose(x{i} to {[d.name for d in new]})",
          (i,),
          lambda x: mtf.transpose(x, new),
          lambda x: Dense(x.to(new), new),
        )
      )
    taken = {d.name for d in dims}
    at = self.draw(st.integers(0, len(dims) - 1))
    if kind == "broadcast":
      free = [n for n in SIZES if n not in taken]
      if not free or _size(dims) * 8 > LARGEST_TENSOR:
        return self.unary()
      name = self.pick(free)
      new = [*dims[:at], mtf.Dimension(name, SIZES[name]), *dims[at:]]
      return self.add(
        Step(
          f"broadcast(x{i} to {[d.name for d in new]})",
          (i,),
          lambda x: mtf.broadcast(x, new),
          lambda x: Dense(x.to(new), new),
        )
      )
    if kind == "rename":
      size = dims[at].size
      options = [n for n, s in SIZES.items() if s == size and n not in taken]
      if not options:
        return self.unary()
      new = [*dims[:at], mtf.Dimension(self.pick(options), size), *dims[at + 1 :]]
    elif kind == "join":
      if at + 1 == len(dims) or dims[at].size * dims[at + 1].size > 64:
        return self.unary()
      joined = mtf.Dimension(
        f"j{dims[at].size * dims[at + 1].size}", dims[at].size * dims[at + 1].size
      )
      if joined.name in taken:
        return self.unary()
      new = [*dims[:at], joined, *dims[at + 2 :]]
    else:
      size = dims[at].size
      cuts = [n for n in (2, 4) if size % n == 0 and size > n]
      if not cuts:
        return self.unary()
      n = self.pick(cuts)
      parts = [mtf.Dimension(f"p{n}", n), mtf.Dimension(f"q{size // n}", size // n)]
      if taken & {d.name for d in parts}:
        return self.unary()
      new = [*dims[:at], *parts, *dims[at + 1 :]]
    self.add(
      Step(
        f"reshape(x{i} to {[f'{d.name}:{d.size}' for d in new]})",
        (i,),
        lambda x: mtf.reshape(x, new),
        lambda x: Dense(tf.reshape(x.array, [d.size for d in new]), new),
      )
    )

  def gather(self) -> None:
    """Rows by constant indices: a contraction with one-hot rows, without making them."""
    i = self.value()
    x = self.values[i]
    if not x.dims or "k" in x.names or _size(x.dims) * 3 > LARGEST_TENSOR:
      return self.unary()
    dim = self.pick(x.dims)
    rows = self.rng.integers(0, dim.size, SIZES["k"]).astype(np.int32)
    k = mtf.Dimension("k", SIZES["k"])

    def on_mesh(x):
      return mtf.gather(x, mtf.constant(x.mesh, rows, [k], tf.int32), dim)

    def on_dense(x):
      rest = _without(x, dim.name)
      moved = tf.transpose(x.array, [x.axis(dim.name), *(x.axis(d.name) for d in rest)])
      return Dense(tf.gather(moved, rows), [k, *rest])

    meeting = (frozenset([*x.names, "k"]),)
    self.add(Step(f"gather(x{i}, {rows} of {dim.name})", (i,), on_mesh, on_dense, meeting))

  def dropout(self) -> None:
    """Random numbers: they depend on the name and the seed, on no layout."""
    i = self.value()
    name = f"dropout{len(self.program.steps)}"
    dims = self.values[i].dims
    kept = _dropout_mask(name, mtf.Shape(dims))
    self.add(
      Step(
        f"dropout(x{i})",
        (i,),
        lambda x: mtf.dropout(x, True, rate=0.25, name=name),
        lambda x: Dense(x.array * kept, x.dims),
      )
    )

  def assign(self) -> None:
    """Changes a variable, and reads it again."""
    v = len(self.program.inputs) + self.draw(st.integers(0, len(self.program.variables) - 1))
    i = self.value()

    def on_mesh(v, x):
      change = mtf.tanh(mtf.reshard(mtf.reduce_mean(x), v.mesh))
      mtf.assign(v.operation, mtf.read_variable(v.operation) * 0.5 + change)
      return mtf.read_variable(v.operation)

    def on_dense(v, x):
      return Dense(v.array * 0.5 + tf.tanh(tf.reduce_mean(x.array)), v.dims)

    text = f"assign(x{v}, x{v} / 2 + mean(x{i}))"
    self.add(Step(text, (v, i), on_mesh, on_dense, changes_variable=True))

  def _part_of(self, dims: Sequence[mtf.Dimension]) -> int:
    """A value that has no other dimensions."""
    return self.pick([i for i, x in enumerate(self.values) if set(x.dims) <= set(dims)])

  def loop(self) -> None:
    """A loop of three iterations, which takes a value from outside."""
    i = self.value()
    dims = self.values[i].dims
    j = self._part_of(dims)

    def on_mesh(x, y):
      start = mtf.constant(x.mesh, 0, dtype=tf.int32)
      body = lambda k, z: [k + 1, mtf.tanh(mtf.add(z, y * 0.5, output_shape=z.shape))]  # noqa: E731
      return mtf.while_loop(lambda k, z: mtf.less(k, 3), body, [start, x])[1]

    def on_dense(x, y):
      z = x.array
      for _ in range(3):
        z = tf.tanh(z + y.to(dims) * 0.5)
      return Dense(z, dims)

    self.add(Step(f"loop(x{i}, x{j})", (i, j), on_mesh, on_dense))

  def conditional(self) -> None:
    """One of two functions of two values."""
    i = self.value()
    dims = self.values[i].dims
    j = self._part_of(dims)
    if not _away(tf.reduce_mean(self.values[i].array)):
      return self.unary()

    def on_mesh(x, y):
      shape = mtf.Shape(dims)
      return mtf.cond(
        mtf.greater(mtf.reduce_mean(x), 0.0),
        lambda: mtf.sin(mtf.add(x, y, output_shape=shape)),
        lambda: mtf.multiply(x, y, output_shape=shape),
      )

    def on_dense(x, y):
      y = y.to(dims)
      positive = tf.reduce_mean(x.array) > 0
      return Dense(tf.sin(x.array + y) if positive else x.array * y, dims)

    self.add(Step(f"conditional(x{i}, x{j})", (i, j), on_mesh, on_dense))

  def recomputed(self) -> None:
    """What the backward pass computes again; it takes a value from outside, too."""
    i = self.value()
    dims = self.values[i].dims
    j = self._part_of(dims)
    on_mesh = lambda x, y: mtf.recompute_grad(  # noqa: E731
      lambda z: mtf.sin(mtf.tanh(z) + mtf.sigmoid(y) * z), [x]
    )

    def on_dense(x, y):
      return Dense(tf.sin(tf.tanh(x.array) + tf.sigmoid(y.to(dims)) * x.array), dims)

    self.add(Step(f"recomputed(x{i}, x{j})", (i, j), on_mesh, on_dense))

  def depend(self) -> None:
    """A value, after another one."""
    i, j = self.value(), self.value()
    self.add(Step(f"depend(x{i}, x{j})", (i, j), lambda x, y: mtf.depend(x, [y]), lambda x, y: x))


def _dropout_mask(name: str, shape: mtf.Shape) -> tf.Tensor:
  """What dropout of a name multiplies by, on one device."""
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "one")
  kept = mtf.dropout(mtf.ones(mesh, shape), True, rate=0.25, name=name)
  impl = mtf.PlacementMeshImpl(
    "all:1", "", ["/device:CPU:0"], variable_store=mtf.VariableStore(seed=SEED)
  )
  lowering = mtf.Lowering(graph, {mesh: impl}, seed=SEED)
  return tf.cast(lowering.export_to_tf_tensor(kept), tf.float64)


def _legal_layout(
  draw: Callable[[Any], Any],
  program: Program,
  values: Sequence[Dense],
  meshes: Sequence[str] = MESHES,
) -> Layout:
  """A layout under which no two dimensions that meet are on one mesh axis."""
  meeting = [frozenset(x.names) for x in values]
  meeting += [group for s in program.steps for group in s.meeting]
  unsplit = {n for s in program.steps for n in s.unsplit}
  sizes: dict[str, set[int]] = {}
  for x in values:
    for d in x.dims:
      sizes.setdefault(d.name, set()).add(d.size)
  mesh = draw(st.sampled_from(meshes))
  axes = {d.name: d.size for d in mtf.convert_to_shape(mesh)}
  on_axis: dict[str, set[str]] = {axis: set() for axis in axes}
  rules = []
  for name in draw(st.permutations(sorted(sizes))):
    met = set().union(*(g for g in meeting if name in g)) - {name}
    options = [
      axis
      for axis, n in axes.items()
      if name not in unsplit and not on_axis[axis] & met and not any(s % n for s in sizes[name])
    ]
    if options and draw(st.integers(0, 3)):
      axis = draw(st.sampled_from(options))
      on_axis[axis].add(name)
      rules.append(f"{name}:{axis}")
  return Layout(mesh, ",".join(sorted(rules)))


@st.composite
def programs(draw, min_steps: int = 5, max_steps: int = 30) -> Program:
  """A program, and a layout that is legal for it."""
  drawing = _drawn(draw, _KINDS, min_steps, max_steps)
  drawing.program.layout = _legal_layout(draw, drawing.program, drawing.values)
  return drawing.program


_KINDS = ["unary", "along", "along", "binary", "binary", "einsum", "einsum", "reshape"]
_KINDS += ["reshape", "gather"]
_FURTHER_KINDS = ["dropout", "dropout", "assign", "loop", "conditional", "recomputed", "depend"]


def _drawn(
  draw: Callable[[Any], Any], kinds: Sequence[str], min_steps: int, max_steps: int
) -> _Drawing:
  drawing = _Drawing(draw)
  steps = draw(st.integers(min_steps, max_steps))
  while len(drawing.program.steps) < steps:
    getattr(drawing, draw(st.sampled_from(kinds)))()
  return drawing


@st.composite
def programs_over_two_meshes(draw, min_steps: int = 4, max_steps: int = 20) -> Program:
  """A program, two meshes with layouts that are legal for it, and places of its steps."""
  drawing = _drawn(draw, _KINDS + _FURTHER_KINDS, min_steps, max_steps)
  program, names = drawing.program, ("first", "second")
  program.meshes = draw_meshes(
    draw, names, lambda: _legal_layout(draw, program, drawing.values, SMALL_MESHES)
  )
  mesh = st.sampled_from(names)
  program.homes = [draw(mesh) for _ in program.given]
  place = Place(draw(mesh), draw(st.booleans()))
  for _ in program.steps:
    # Runs of steps on a mesh, and sometimes a single one.
    if not draw(st.integers(0, 2)):
      place = Place(draw(mesh), draw(st.booleans()))
    program.places.append(place)
  program.in_stage = draw(st.sampled_from(["", "", *names]))
  numbers = range(len(program.steps))
  program.left_out = frozenset(i for i in numbers if draw(st.booleans()))
  return program


def draw_meshes(
  draw: Callable[[Any], Any], names: Sequence[str], layout: Callable[[], Layout]
) -> dict[str, DrawnMesh]:
  """Meshes on the 8 virtual devices, most on devices of their own; some names share one.

  Args:
    draw: a function that draws from a strategy.
    names: of the meshes.
    layout: draws the layout of a mesh.
  """
  meshes: dict[str, DrawnMesh] = {}
  free = 0
  for name in names:
    if meshes and not draw(st.integers(0, 7)):
      meshes[name] = draw(st.sampled_from(list(meshes.values())))
      continue
    found = dataclasses.replace(layout(), shards=not draw(st.integers(0, 5)))
    size = found.size
    shares = free + size > 8 or not draw(st.integers(0, 4))
    first = draw(st.integers(0, 8 - size)) if shares else free
    free = max(free, first + size)
    meshes[name] = DrawnMesh(draw(st.sampled_from(["placement", "simd"])), found, first)
  return meshes


# The mesh of one device that all others are compared with.
ONE_DEVICE = DrawnMesh("placement", Layout("r:1", ""), 0)
