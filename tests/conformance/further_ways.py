"""Further ways to run a descriptor: one tensor at several inputs, gradients of gradients, in half.

All make another descriptor of the given one, which runs as any other.

One tensor: inputs of one shape and dtype become one. The value is that of the reference with the
same array in these places; the gradient is the sum of those of the places.

Gradients of gradients: the descriptor's output is h = <gradient, v> for a random v. Its gradient
(of inputs, variables and cotangents) is compared in a random direction w:

  <dh, w> = (h(x + e w) - h(x - e w)) / 2 e

where h is computed from the gradient that the descriptor gives, or is itself a difference of the
reference, (L(x + e v) - L(x - e v)) / 2 e, of its outputs times the cotangents, L. In float64 and
with e = 1e-4 this is right to about 1e-7, and needs four values of the reference, whatever the
number of elements.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import DTypeError, MeshError
from mesh_tensorflow.program import scope
from tests.conformance import framework
from tests.conformance.framework import Descriptor, Input, Layout

_STEP = 1e-4
# Where a value lies nearer than this to a corner (of relu, say): the step, at the cost of noise.
_SMALLER_STEPS = {"universal_act_accumulated": 1e-5}

# Sources (their numbers; None: all) whose change does not reach the gradient, as a step to the side
# would have it: the derivative in their direction must be 0.
CONSTANTS: dict[str, tuple[int, ...] | None] = {
  # At a tie both have all of the gradient.
  "maximum_ties": None,
  "minimum_ties": None,
  "reduce_max_ties": None,
  "reduce_min_ties": None,
  # A stopped factor is a constant in the gradient, too.
  "stop_gradient_times_x": None,
  "pending_sum_stopped": None,
  # No gradient reaches the extra logit.
  "softmax_extra_tensor": (1,),
  "softmax_extra_8": (1,),
}

# In half precision: float32 inputs become bfloat16 or float16. What is computed of them is rounded
# several times, to 2 ** -9 and 2 ** -12.
HALF_TOLERANCE = {"bfloat16": 3e-2, "float16": 4e-3}
# What its own function, or its test's, does in float32 beside the input.
_FLOAT32_BESIDE = "it has float32 variables or constants beside the input"
NOT_IN_HALF = {
  **dict.fromkeys(
    (
      "cholesky", "embedding_weights", "gradient_of_variable", "multihead_attention",
      "multihead_attention_params", "positions", "recompute_grad_variable", "scalar_mul_tf",
      "training_step", "while_loop", "while_loop_accumulator", "while_loop_assigns",
      "while_loop_gathered_steps", "while_loop_nested", "while_loop_random",
      "while_loop_random_nested",
    ),
    _FLOAT32_BESIDE,
  ),
  **dict.fromkeys(
    ("solve", "solve_adjoint", "solve_complex", "solve_one_matrix", "triangular_solve"),
    "TensorFlow solves nothing in half precision",
  ),
}  # fmt: skip
# TensorFlow's own error, of a function that is given to `slicewise`; or what the package only calls
# with float32, as it decides by small differences.
UNTRIED_IN_HALF = (
  "beam_search_all_steps", "choice_gumbel", "choice_top_k", "choice_top_p", "slicewise_lrn",
  "slicewise_several",
)  # fmt: skip
# What rounds more often, or whose gradient is a sum that nearly cancels (of a scalar: 32 terms, and
# one fortieth of them is left): how much more.
_COARSER = {"reversible": 5.0, "cwise_scalar": 5.0}

# What cannot be differentiated twice, and must say so.
NOT_TWICE = {
  "slicewise_lrn": "TensorFlow has no gradient of LRNGrad",
}


# ------------------------------------------------------------ one tensor at several inputs


def _merged(inputs: Sequence[Input]) -> Input | None:
  """An input whose values suit all of these; None if there are none."""
  given = [x for x in inputs if x.values is not None]
  if given:
    return given[0]
  low, high = max(x.low for x in inputs), min(x.high for x in inputs)
  return dataclasses.replace(inputs[0], low=low, high=high) if low < high else None


def with_one_tensor(descriptor: Descriptor) -> Descriptor | None:
  """The descriptor with one tensor at all inputs that can take it; None if no two can."""
  kinds: dict[tuple[Any, str], list[int]] = {}
  for i, x in enumerate(descriptor.inputs):
    kinds.setdefault((tuple(x.shape.dims), x.dtype), []).append(i)
  merged = [_merged([descriptor.inputs[i] for i in places]) for places in kinds.values()]
  if len(kinds) == len(descriptor.inputs) or None in merged:
    return None
  place = {i: n for n, places in enumerate(kinds.values()) for i in places}
  order = [place[i] for i in range(len(descriptor.inputs))]

  def spread(xs: Sequence[Any]) -> list[Any]:
    return [xs[n] for n in order] + list(xs[len(merged) :])

  def gradient(arrays, cotangents):
    """One for each floating input, then for variables: those of one tensor are added up."""
    found = framework._as_list(descriptor.gradient(spread(arrays), cotangents))
    total: dict[int, Any] = {}
    for i, g in zip(descriptor.with_gradient, found):
      n = order[i] if i < len(order) else i - len(order) + len(merged)
      total[n] = total[n] + g if n in total else g
    return [total[n] for n in sorted(total)]

  reference = descriptor.reference
  return dataclasses.replace(
    descriptor,
    name=f"{descriptor.name}_of_one",
    inputs=tuple(merged),
    build=lambda *xs: descriptor.build(*spread(xs)),
    reference=reference
    if reference is framework.ONE_DEVICE
    else lambda *xs: reference(*spread(xs)),
    gradient=gradient if descriptor.gradient else None,
  )


# ------------------------------------------------------------------------ half precision


def in_half(given: Descriptor) -> Descriptor | None:
  """A descriptor with bfloat16 or float16 inputs, in turns; None if no input is float32."""
  if not any(x.dtype == "float32" for x in given.inputs):
    return None
  dtype = sorted(HALF_TOLERANCE)[zlib.crc32(given.name.encode()) % 2]
  inputs = [
    dataclasses.replace(x, dtype=dtype, values=_rounded(x, a, dtype))
    if x.dtype == "float32"
    else dataclasses.replace(x, values=a)
    for x, a in zip(given.inputs, given.arrays)
  ]
  return dataclasses.replace(
    given,
    name=f"{given.name}_{dtype}",
    inputs=tuple(inputs),
    tolerance=max(HALF_TOLERANCE[dtype] * _COARSER.get(given.name, 1.0), given.tolerance),
  )


def _rounded(x: Input, a: np.ndarray, dtype: str) -> np.ndarray:
  """Values in a dtype; those that were drawn, and so had no ties, have none then."""
  rounded = np.asarray(a, tf.as_dtype(dtype).as_numpy_dtype)
  if x.values is not None or len(np.unique(rounded)) == rounded.size:
    return rounded
  flat = rounded.reshape(-1).copy()
  order = np.argsort(a, axis=None)
  for before, i in zip(order, order[1:]):
    if np.float32(flat[i]) <= np.float32(flat[before]):
      flat[i] = _next(flat[before])
  return flat.reshape(rounded.shape)


def _next(value: Any) -> Any:
  """The number that follows."""
  bits = np.asarray(value).view(np.int16)
  if bits & 0x7FFF == 0:
    return np.int16(1).view(value.dtype)
  return np.int16(bits + (1 if bits > 0 else -1)).view(value.dtype)


def refusal_of_half(given: Descriptor) -> str | None:
  """What is wrong with the refusal to compute in half precision; None if it is as it should be."""
  half = in_half(given)
  if half is None:
    return None
  try:
    _outputs(half)
  except DTypeError:
    return None
  except Exception as e:  # Whatever it is, it is told.
    return f"{half.name}: {type(e).__name__}: {str(e)[:300]}"
  return f"{half.name} is computed; it is listed as one that is not"


# ------------------------------------------------------------------ gradients of gradients


@dataclasses.dataclass(frozen=True)
class Again:
  """A descriptor of h = <gradient, v>, and what its own gradient must be.

  Attributes:
    descriptor: of h; its inputs are the given one's, and the cotangents.
    check: (what ran) -> what is wrong with it.
  """

  descriptor: Descriptor
  check: Callable[[framework.Values], list[str]]


def _directions(name: str, sources: Sequence[Input]) -> list[np.ndarray]:
  rng = np.random.default_rng(zlib.crc32(name.encode()))
  return [rng.uniform(-1.0, 1.0, x.shape.to_integer_list) for x in sources]


def differentiated_again(given: Descriptor) -> Again:
  """What is run to differentiate the gradient of a descriptor; see above."""
  floating = [y for y in given.expected if framework._is_floating(y)]
  shapes = [x.shape for x in _outputs(given) if x.dtype.is_floating]
  cotangents = tuple(
    Input(" ".join(f"{d.name}:{d.size}" for d in shape), values=c)
    for shape, c, y in zip(shapes, _of_floating(given, given.cotangents), floating)
  )
  sources = given.sources
  v = {i: d for i, d in enumerate(_directions(f"{given.name} v", sources))}
  v = {i: v[i] for i in given.with_gradient}
  descriptor = dataclasses.replace(
    given,
    name=f"{given.name}_again",
    # The values of the given one, not new ones: none of them shall come upon a corner.
    inputs=(*_fixed(given.inputs, given.arrays), *cotangents),
    variables=given.variables
    and tuple(
      (name, x)
      for (name, _), x in zip(
        given.variables,
        _fixed([x for _, x in given.variables], given.arrays[len(given.inputs) :]),
      )
    ),
    build=functools.partial(_build_product, given, v, shapes),
    reference=framework.ONE_DEVICE if given.reference is framework.ONE_DEVICE else None,
    gradient=None,
    differentiable=True,
  )
  if given.reference is framework.ONE_DEVICE and given.gradient is None:
    descriptor.__dict__["cotangents"] = [np.ones([], np.float32)]
    return Again(descriptor, lambda values: framework.compare(descriptor, values))
  descriptor.__dict__["expected"] = [np.zeros([])]
  descriptor.__dict__["cotangents"] = [np.ones([], np.float32)]
  return Again(descriptor, functools.partial(_compare, given, descriptor, v, len(cotangents)))


def _fixed(inputs: Sequence[Input], arrays: Sequence[np.ndarray]) -> list[Input]:
  return [dataclasses.replace(x, values=a) for x, a in zip(inputs, arrays)]


def _outputs(given: Descriptor) -> list[mtf.Tensor]:
  mesh = mtf.Mesh(mtf.Graph(), "shapes")
  pairs = zip(given.arrays, given.inputs)
  return framework._call(given, mesh, [mtf.import_tf_tensor(mesh, a, x.shape) for a, x in pairs])


def _of_floating(given: Descriptor, values: Sequence[Any]) -> list[Any]:
  return [x for x, y in zip(values, given.expected) if framework._is_floating(y)]


def _build_product(given: Descriptor, v: dict[int, Any], shapes: Any, *xs: Any) -> mtf.Tensor:
  """h: the gradients of what the descriptor builds, times v."""
  first = xs[0]
  mesh = first if isinstance(first, mtf.Mesh) else first.mesh
  count = len(given.inputs)
  prefix = scope.current_scope_name() + "/"

  def build():
    return framework._as_list(given.build(*xs[:count]) if count else given.build(mesh))

  ys, operations = mesh.graph.capture_operations(build)
  ys = [y for y in ys if y.dtype.is_floating]
  made = {x.full_name.removeprefix(prefix): x.value for x in mesh.graph.all_variables}
  sources = [*xs[:count], *(made[name] for name, _ in given.variables or ())]
  dys = [mtf.cast(c, y.dtype) for c, y in zip(xs[count:], ys)]
  grads = mtf.gradients(ys, [sources[i] for i in v], dys, operations=operations)
  products = [
    mtf.reduce_sum(mtf.cast(g, tf.float64) * mtf.import_tf_tensor(mesh, v[i], sources[i].shape))
    for i, g in zip(v, grads)
    if g is not None
  ]
  return mtf.add_n(products) if products else mtf.zeros(mesh, [], tf.float64)


def _compare(
  given: Descriptor,
  descriptor: Descriptor,
  v: dict[int, np.ndarray],
  num_cotangents: int,
  values: framework.Values,
) -> list[str]:
  """What is wrong with h and its gradient."""
  count = len(given.inputs)
  step = _SMALLER_STEPS.get(given.name, _STEP)
  arrays = [framework._wide(a) for a in descriptor.arrays]
  w = _directions(f"{given.name} w", descriptor.sources)
  held = _held(given, num_cotangents)

  def moved(by):
    return [a if i in held else a + by * w[i] for i, a in enumerate(arrays)]

  def h(values):
    own = [*values[:count], *values[count + num_cotangents :]]
    rest = iter(values[count : count + num_cotangents])
    cs = [
      next(rest) if framework._is_floating(y) else np.zeros(np.shape(y)) for y in given.expected
    ]
    if given.gradient is not None:
      grads = framework._as_list(given.gradient(own, cs))
      return sum(float(np.sum(g * v[i])) for i, g in zip(v, grads))

    def loss(by):
      at = [a + by * v[i] if i in v else a for i, a in enumerate(own)]
      ys = framework._as_list(given.reference(*at))
      return sum(float(np.sum(c * y)) for c, y in zip(cs, ys) if framework._is_floating(y))

    return (loss(step) - loss(-step)) / (2 * step)

  want = (h(moved(step)) - h(moved(-step))) / (2 * step)
  got = scale = 0.0
  for i, dx in zip(descriptor.with_gradient, values.dx):
    products = np.asarray(dx, np.float64) * w[i]
    got, scale = got + float(np.sum(products)), scale + float(np.sum(np.abs(products)))
  problems = list(values.disagreements)
  tolerance = max(5 * given.tolerance, 1e-4)
  if not abs(got - want) <= tolerance * (scale + abs(want)) + 1e-6:
    problems.append(f"gradient of the gradient, in one direction: {got!r}, expected {want!r}")
  return problems


def _held(given: Descriptor, num_cotangents: int) -> set[int]:
  """Which of the sources (the cotangents among them) the gradient does not depend on."""
  places = [i if i < len(given.inputs) else i + num_cotangents for i in range(len(given.sources))]
  held = {places[i] for i in range(len(places)) if i not in given.with_gradient}
  constants = CONSTANTS.get(given.name, ())
  held.update(places if constants is None else [places[i] for i in constants])
  return held


# ------------------------------------------------------------------------ running


def run(
  pairs: Sequence[tuple[Descriptor, Callable[[framework.Values], list[str]]]],
  mode: str,
  layout: Layout,
  devices: Sequence[str],
) -> list[str]:
  """Runs descriptors as one program; one by one if that fails.

  Args:
    pairs: descriptors, and what checks their values.
    mode: one of `framework.MODES`.
    layout: legal for all.
    devices: names of the devices.

  Returns:
    What is wrong.
  """
  kind, execution = mode.split("_")
  traced = execution == "function"
  try:
    impl = framework.make_impl(kind, layout, devices)
    results = framework.run_program(impl, [d for d, _ in pairs], traced)
  except Exception:  # Told below, of the operation whose fault it is.
    results = {}
  problems = []
  for d, check in pairs:
    try:
      values = results.get(d.name)
      if values is None:
        impl = framework.make_impl(kind, layout, devices)
        values = framework.run_program(impl, [d], traced)[d.name]
      problems += [f"{d.name}: {p}" for p in check(values)]
    except Exception as e:  # Whatever it is, it is told.
      problems.append(f"{d.name}: {type(e).__name__}: {str(e)[:300]}")
  return problems


def refusal(again: Again, mode: str, layout: Layout, devices: Sequence[str]) -> str | None:
  """What is wrong with the refusal to differentiate again; None if it is as it should be."""
  name = again.descriptor.name
  kind, execution = mode.split("_")
  try:
    impl = framework.make_impl(kind, layout, devices)
    framework.run_program(impl, [again.descriptor], execution == "function")
  except MeshError as e:
    return None if name in str(e) else f"{name}: the error does not name the operation: {e}"
  except Exception as e:  # Whatever it is, it is told.
    return f"{name}: {type(e).__name__}: {str(e)[:300]}"
  return f"{name} is differentiated again; it is listed as one that is not"
