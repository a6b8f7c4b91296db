"""Programs drawn at random: contractions, reshapes, and chains of operations, on any layout."""

from __future__ import annotations

import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import LayoutError
from tests.conformance import framework
from tests.conformance.framework import Layout

SIZES = {"a": 2, "b": 4, "c": 4, "d": 8, "e": 8}
MESHES = ("r:2", "r:4", "r:2,s:2", "r:2,s:4", "r:4,s:2", "r:2,s:2,t:2")


@st.composite
def layouts(draw, names):
  mesh = draw(st.sampled_from(MESHES))
  axes = mtf.convert_to_shape(mesh).dimension_names
  rules = [(n, draw(st.sampled_from([None, *axes]))) for n in names]
  return Layout(mesh, ",".join(f"{n}:{axis}" for n, axis in rules if axis))


def shape_of(names):
  return mtf.Shape([(n, SIZES[n]) for n in names])


def evaluate(build, layout):
  """Values of the tensors that build(mesh) returns, on a placement mesh.

  Raises:
    LayoutError: the layout is not legal.
  """
  impl = framework.make_impl("placement", layout, [""] * layout.size)
  mesh = mtf.Mesh(mtf.Graph(), "random")
  tensors = build(mesh)
  lowering = mtf.Lowering(mesh.graph, {mesh: impl})
  return [lowering.export_to_tf_tensor(t).numpy() for t in tensors]


names_of_a_tensor = st.lists(st.sampled_from("abcde"), min_size=0, max_size=4, unique=True)


@hypothesis.settings(max_examples=60)
@hypothesis.given(
  st.lists(names_of_a_tensor, min_size=1, max_size=3),
  st.lists(st.sampled_from("abcde"), max_size=4, unique=True),
  layouts("abcde"),
)
def test_einsum(inputs, output, layout):
  """Any inputs, any output: summed, kept, and new dimensions in any order; and the gradients."""
  rng = np.random.default_rng(0)
  arrays = [rng.integers(-3, 4, [SIZES[n] for n in names]).astype(np.float32) for names in inputs]
  known = {n for names in inputs for n in names}
  cotangent = rng.integers(-3, 4, [SIZES[n] for n in output]).astype(np.float32)

  def build(mesh):
    xs = [mtf.import_tf_tensor(mesh, a, shape_of(n)) for a, n in zip(arrays, inputs)]
    y = mtf.einsum(xs, output_shape=shape_of(output))
    dy = mtf.import_tf_tensor(mesh, cotangent, y.shape)
    return [y, *mtf.gradients([y], xs, [dy])]

  def contract(operands, result):
    """np.einsum with new dimensions of the result repeated."""
    operands = [*operands, *((np.ones([SIZES[n]]), n) for n in result)]
    equation = ",".join("".join(n) for _, n in operands) + "->" + "".join(result)
    return np.einsum(equation, *[a for a, _ in operands])

  operands = list(zip(arrays, inputs))
  expected = [contract(operands, output)]
  for i, names in enumerate(inputs):
    others = [o for j, o in enumerate(operands) if j != i]
    expected.append(contract([(cotangent, output), *others], names))
  try:
    got = evaluate(build, layout)
  except LayoutError:
    # Right only if two dimensions of a product, or of its gradient's, are on one mesh axis.
    assert not layout.suits(shape_of(sorted(known | set(output))))
    return
  for a, b in zip(got, expected):
    np.testing.assert_allclose(a, b, rtol=1e-5)


factorizations = st.lists(st.sampled_from([1, 2, 2, 2, 3, 4]), min_size=1, max_size=5)


@st.composite
def regroupings(draw):
  """Two shapes of equal size, and a layout that suits both."""
  factors = draw(factorizations)
  shapes = []
  for letters in ("abcde", "pqrst"):
    order = draw(st.permutations(factors))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(order) - 1)))))
    groups = [order[i:j] for i, j in zip([0, *cuts], [*cuts, len(order)]) if i < j]
    shapes.append(mtf.Shape([(n, int(np.prod(g))) for n, g in zip(letters, groups)]))
  mesh = draw(st.sampled_from(("x:2", "x:3", "x:2,y:2", "x:2,y:4", "x:3,y:2", "x:2,y:2,z:2")))
  axes = mtf.convert_to_shape(mesh).dims
  rules = []
  for shape in shapes:
    left = list(axes)
    for d in draw(st.permutations(shape.dims)):
      fitting = [m for m in left if d.size % m.size == 0]
      axis = draw(st.sampled_from([None, *fitting]))
      if axis is not None:
        left.remove(axis)
        rules.append(f"{d.name}:{axis.name}")
  return shapes[0], shapes[1], Layout(mesh, ",".join(rules))


@hypothesis.settings(max_examples=60)
@hypothesis.given(regroupings())
def test_reshape(case):
  old, new, layout = case
  value = np.arange(old.size, dtype=np.float32)

  def build(mesh):
    y = mtf.reshape(mtf.import_tf_tensor(mesh, value.reshape(old.to_integer_list), old), new)
    return [y, mtf.reshape(y, old)]

  got, back = evaluate(build, layout)
  np.testing.assert_array_equal(got, value.reshape(new.to_integer_list))
  np.testing.assert_array_equal(back, value.reshape(old.to_integer_list))


class Named:
  """A NumPy array with named axes: the other way to compute a chain of operations."""

  def __init__(self, array, names):
    self.array, self.names = array, list(names)

  def aligned(self, names):
    """As an array that broadcasts against others of these names."""
    order = [self.names.index(n) for n in names if n in self.names]
    index = tuple(slice(None) if n in self.names else None for n in names)
    return np.transpose(self.array, order)[index]


def _union(x, y):
  if mtf.is_subsequence(x.names, y.names):
    return y.names
  if mtf.is_subsequence(y.names, x.names):
    return x.names
  return x.names + [n for n in y.names if n not in x.names]


def _binary(fn):
  def apply(x, y):
    names = _union(x, y)
    array = fn(x.aligned(names), y.aligned(names))
    return Named(np.broadcast_to(array, [SIZES[n] for n in names]), names)

  return apply


def _reduce(fn):
  def apply(x, name):
    return Named(fn(x.array, x.names.index(name)), [n for n in x.names if n != name])

  return apply


def _softmax(array, axis):
  e = np.exp(array - array.max(axis, keepdims=True))
  return e / e.sum(axis, keepdims=True)


def _dim(name):
  return mtf.Dimension(name, SIZES[name])


# name: (mtf function, function of Named), of one tensor, of one and a dimension, of two.
UNARY = {
  "relu": (mtf.relu, lambda x: Named(np.maximum(x.array, 0), x.names)),
  "tanh": (mtf.tanh, lambda x: Named(np.tanh(x.array), x.names)),
  "negative": (mtf.negative, lambda x: Named(-x.array, x.names)),
  "half": (lambda x: x * 0.5, lambda x: Named(x.array * 0.5, x.names)),
}
ALONG = {
  "sum": (lambda x, n: mtf.reduce_sum(x, reduced_dim=_dim(n)), _reduce(np.sum)),
  "mean": (lambda x, n: mtf.reduce_mean(x, reduced_dim=_dim(n)), _reduce(np.mean)),
  "max": (lambda x, n: mtf.reduce_max(x, reduced_dim=_dim(n)), _reduce(np.max)),
  "softmax": (
    lambda x, n: mtf.softmax(x, _dim(n)),
    lambda x, n: Named(_softmax(x.array, x.names.index(n)), x.names),
  ),
  "shift": (
    lambda x, n: mtf.shift(x, 1, _dim(n), True),
    lambda x, n: Named(np.roll(x.array, 1, x.names.index(n)), x.names),
  ),
  "cumsum": (
    lambda x, n: mtf.cumsum(x, _dim(n)),
    lambda x, n: Named(np.cumsum(x.array, x.names.index(n)), x.names),
  ),
}
BINARY = {
  "add": (mtf.add, _binary(np.add)),
  "sub": (mtf.sub, _binary(np.subtract)),
  "multiply": (mtf.multiply, _binary(np.multiply)),
  "maximum": (mtf.maximum, _binary(np.maximum)),
}


@st.composite
def chains(draw):
  """A list of steps; each makes a value from those before it."""
  values = [draw(names_of_a_tensor.filter(bool)) for _ in range(2)]
  steps = []
  for _ in range(draw(st.integers(3, 8))):
    i, j = (draw(st.integers(0, len(values) - 1)) for _ in range(2))
    kinds = ["unary", "binary"] + (["along"] if values[i] else [])
    kind = draw(st.sampled_from(kinds))
    if kind == "unary":
      steps.append(("unary", draw(st.sampled_from(sorted(UNARY))), (i,)))
      values.append(values[i])
    elif kind == "along":
      fn, name = draw(st.sampled_from(sorted(ALONG))), draw(st.sampled_from(values[i]))
      steps.append(("along", fn, (i, name)))
      gone = fn in ("sum", "mean", "max")
      values.append([n for n in values[i] if not (gone and n == name)])
    else:
      steps.append(("binary", draw(st.sampled_from(sorted(BINARY))), (i, j)))
      dims = [Named(None, values[k]) for k in (i, j)]
      values.append(list(_union(*dims)))
  return values[:2], steps


def _run(steps, values, which):
  """Applies the steps; `which` 0 is mtf, 1 NumPy."""
  values = list(values)
  for kind, fn, args in steps:
    table = {"unary": UNARY, "along": ALONG, "binary": BINARY}[kind]
    given = [values[a] if isinstance(a, int) else a for a in args]
    values.append(table[fn][which](*given))
  return values[2:]


@hypothesis.settings(max_examples=40)
@hypothesis.given(chains(), layouts("abcde"))
def test_chain(chain, layout):
  """Every intermediate value, and the gradient of the last one as on one device."""
  inputs, steps = chain
  rng = np.random.default_rng(1)
  arrays = [rng.uniform(-1, 1, [SIZES[n] for n in names]).astype(np.float32) for names in inputs]

  def build(mesh):
    xs = [mtf.import_tf_tensor(mesh, a, shape_of(n)) for a, n in zip(arrays, inputs)]
    ys = _run(steps, xs, 0)
    dxs = mtf.gradients([ys[-1]], xs)
    return [*ys, *(mtf.zeros_like(x) if d is None else d for x, d in zip(xs, dxs))]

  expected = _run(steps, [Named(a.astype(np.float64), n) for a, n in zip(arrays, inputs)], 1)
  try:
    got = evaluate(build, layout)
  except LayoutError:
    every = [*inputs, *(y.names for y in expected)]
    assert not all(layout.suits(shape_of(names)) for names in every)
    return
  gradients = evaluate(build, Layout("r:1", ""))[len(steps) :]
  for a, b in zip(got, [y.array for y in expected] + gradients):
    scale = np.abs(b).max(initial=1.0)
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * scale)


def test_the_mirror_is_right():
  """`Named` gives one product whatever the order of the second operand's axes."""
  x = np.arange(8.0).reshape(2, 4)
  for names in itertools.permutations("ab"):
    y = Named(np.ones([SIZES[n] for n in names]), names)
    got = _binary(np.multiply)(Named(x, "ab"), y)
    assert set(got.names) == {"a", "b"}
    np.testing.assert_array_equal(got.aligned("ab"), x)
