"""Single operations drawn at random: contractions and reshapes, on any layout."""

from __future__ import annotations

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
