"""Custom gradients, recomputation, stop-gradient, printing and summaries."""

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.operations.comparing import placement, rand, run

A, B = mtf.Dimension("a", 2), mtf.Dimension("b", 4)
X = np.array([5.0, 10.0], np.float32)
DY = np.array([2.0, 3.0], np.float32)
LAYOUTS = ["", "a:r"]


@pytest.mark.parametrize("control_dependencies", [False, True])
@pytest.mark.parametrize("in_function", [False, True])
def test_golden_recompute_grad(control_dependencies, in_function):
  def build(m):
    x = mtf.import_tf_tensor(m, X, [A])
    y = mtf.recompute_grad(lambda x: x * x + x, [x], control_dependencies)
    return [y] + mtf.gradients([y], [x], grad_ys=[mtf.import_tf_tensor(m, DY, [A])])

  for layout in LAYOUTS:
    y, dx = run(build, layout, in_function=in_function)
    assert y.tolist() == [30, 110] and dx.tolist() == [22, 63]


def _network(x, w, v, recompute):
  """Two layers with dropout and an external input; returns (loss, gradients)."""
  m = x.mesh

  def layer(h, w=w):
    h = mtf.dropout(mtf.sin(mtf.einsum([h, w], output_shape=[A, ("c", 4)])), True, 0.5)
    bias = mtf.get_variable(m, "bias", [("c", 4)], initializer=0.5)
    hidden = mtf.rename_dimension(h + bias, "c", "b")
    return hidden, mtf.reduce_sum(hidden) + v

  def outer(h):
    h, total = mtf.recompute_grad(layer, [h]) if recompute else layer(h)
    return mtf.square(h) + total

  y = mtf.recompute_grad(outer, [x]) if recompute else outer(x)
  loss = mtf.reduce_sum(mtf.square(y))
  bias = m.graph.name_to_variable["bias"].outputs[0]
  return [loss] + mtf.gradients([loss], [x, w, v, bias])


@pytest.mark.parametrize("layout", ["", "a:r", "a:r,b:c", "c:c"])
def test_nested_recomputation_equals_none(layout):
  def build(recompute):
    def inner(m):
      x = mtf.import_tf_tensor(m, rand(2, 4), [A, B])
      w = mtf.import_tf_tensor(m, rand(4, 4, seed=1), [B, ("c", 4)])
      return _network(x, w, mtf.import_tf_tensor(m, 0.25), recompute)

    return inner

  for value, want in zip(run(build(True), layout), run(build(False))):
    np.testing.assert_allclose(value, want, rtol=1e-4)


def test_external_inputs_come_in_the_order_of_their_use():
  seen = []

  def grad_fn(explicit_inputs, all_inputs, forward_operations, outputs, output_grads):
    seen.append((explicit_inputs, all_inputs, [op.name for op in forward_operations], outputs))
    return [g * 3.0 for g in output_grads] + [None] * 3

  graph = mtf.Graph()
  m = mtf.Mesh(graph, "m")
  x, p, q = (mtf.import_tf_tensor(m, X, [A], name=n) for n in "xpq")
  i = mtf.zeros(m, [A], tf.int32)

  def fn(x):
    v = mtf.get_variable(m, "v", [A])
    return x * q + p * v + mtf.to_float(i)

  y = mtf.custom_gradient(fn, grad_fn, [x])
  dx, dp = mtf.gradients([y], [x, p])
  v = graph.name_to_variable["v"].outputs[0]
  explicit, every, _, outputs = seen[0]
  assert explicit == [x] and every == [x, q, p, v] and outputs[0].shape == y.shape
  assert dp is None
  lowering = mtf.Lowering(graph, {m: placement("a:r")})
  assert lowering.export_to_tf_tensor(dx).numpy().tolist() == [3.0, 3.0]


def _recomputed(explicit_inputs, all_inputs, forward_operations, outputs, output_grads):
  """Clones the function, and looks its results up among the clones."""
  inputs = {x: mtf.identity(x) for x in all_inputs}
  clones, mapping = all_inputs[0].graph.clone_operations(forward_operations, inputs)
  ys = [mapping[y] for y in outputs]
  return mtf.gradients(ys, list(inputs.values()), output_grads, operations=clones)


def _differentiated(explicit_inputs, all_inputs, forward_operations, outputs, output_grads):
  """Takes the gradients of the function as it is."""
  return mtf.gradients(outputs, all_inputs, output_grads)


@pytest.mark.parametrize("grad_fn", [_recomputed, _differentiated])
@pytest.mark.parametrize("nested", [False, True])
def test_outputs_are_those_of_the_forward_operations(grad_fn, nested):
  def build(own):
    def inner(m):
      x = mtf.import_tf_tensor(m, rand(2, 4), [A, B])
      w = mtf.import_tf_tensor(m, rand(4, seed=1), [B])

      def fn(x):
        h = mtf.tanh(x * w)
        return h * x, mtf.reduce_sum(mtf.square(h), output_shape=[A])

      def outer(x):
        y, total = mtf.custom_gradient(fn, grad_fn, [x]) if own else fn(x)
        return mtf.sin(y) + total

      y = mtf.recompute_grad(outer, [x]) if own and nested else outer(x)
      return mtf.gradients([mtf.reduce_sum(mtf.square(y))], [x, w])

    return inner

  for given, expected in zip(run(build(True), "a:r"), run(build(False))):
    assert np.any(expected)
    np.testing.assert_allclose(given, expected, rtol=1e-5, atol=1e-6)


def test_several_results_are_a_list():
  def build(m):
    x = mtf.import_tf_tensor(m, X, [A])
    y = mtf.recompute_grad(lambda x: (x * 2.0, x * x), [x])
    assert isinstance(y, list)
    return y + mtf.gradients([y[1]], [x])

  twice, squared, dx = run(build, "a:r")
  assert (twice.tolist(), squared.tolist(), dx.tolist()) == ([10, 20], [25, 100], [10, 20])


def test_an_argument_given_twice_gets_its_gradient_once():
  def build(m):
    x = mtf.import_tf_tensor(m, X, [A])
    return mtf.gradients([mtf.recompute_grad(lambda a, b: a * b, [x, x])], [x])

  assert run(build)[0].tolist() == [10, 20]


def test_tensors_inside_are_not_usable_outside():
  m = mtf.Mesh(mtf.Graph(), "m")
  x = mtf.ones(m, [A])
  inner = []
  mtf.recompute_grad(lambda x: inner.append(x * 2.0) or mtf.sin(inner[0]), [x])
  with pytest.raises(mtf.GraphError, match="return it from that function"):
    mtf.negative(inner[0])


def test_an_argument_without_gradient_is_told():
  m = mtf.Mesh(mtf.Graph(), "m")
  x, unused = mtf.ones(m, [A]), mtf.ones(m, [A])
  y = mtf.recompute_grad(lambda x, u: x * 2.0, [x, unused])
  with pytest.raises(mtf.GradientError, match="no output of the function depends on its argument"):
    mtf.gradients([y], [x])


def test_a_gradient_function_must_not_create_variables():
  m = mtf.Mesh(mtf.Graph(), "m")
  x = mtf.ones(m, [A])

  def grad_fn(output_grads, **kwargs):
    return [mtf.get_variable(m, "new", [A])]

  y = mtf.custom_gradient(mtf.sin, grad_fn, [x])
  with pytest.raises(mtf.GraphError, match="must not create variables"):
    mtf.gradients([y], [x])


def test_a_pending_sum_stays_pending():
  graph = mtf.Graph()
  m = mtf.Mesh(graph, "m")
  x = mtf.import_tf_tensor(m, X, [A])
  outputs = [
    mtf.stop_gradient(mtf.reduce_sum(x)),
    mtf.recompute_grad(lambda x: mtf.reduce_sum(x), [x]),
  ]
  lowering = mtf.Lowering(graph, {m: placement("a:r")})
  assert all(isinstance(lowering.tensors[y], mtf.LazyAllreduceSum) for y in outputs)


def test_stop_gradient():
  def build(m):
    x = mtf.import_tf_tensor(m, X, [A])
    return mtf.gradients([mtf.stop_gradient(x) * x], [x])

  assert run(build, "a:r")[0].tolist() == X.tolist()


@pytest.mark.parametrize("in_function", [False, True])
def test_print(capfd, in_function):
  def build(m):
    x = mtf.import_tf_tensor(m, X, [A])
    y = mtf.Print(x, [x * 2.0], "doubled")
    return [y] + mtf.gradients([y], [x])

  y, dx = run(build, "a:r", in_function=in_function)
  assert y.tolist() == X.tolist() and dx.tolist() == [1, 1]
  printed = capfd.readouterr().err
  assert printed.startswith("doubled [Tensor[") and "[10] [10] [20] [20]" in printed


def test_scalar_summary_is_an_operation_and_a_tensor():
  graph = mtf.Graph()
  m = mtf.Mesh(graph, "m")
  x = mtf.import_tf_tensor(m, X, [A])
  summary = mtf.scalar_summary("loss", mtf.reduce_sum(x))
  assert isinstance(summary, mtf.Operation) and isinstance(summary, mtf.Tensor)
  assert summary.outputs == [summary] and summary.name == "loss" and "loss" in repr(summary)
  twice = summary * 2.0
  (dx,) = mtf.gradients([twice], [x])
  lowering = mtf.Lowering(graph, {m: placement("a:r")})
  assert lowering.export_to_tf_tensor(twice) == 30.0
  assert lowering.export_to_tf_tensor(dx).numpy().tolist() == [2, 2]
  assert [(k, float(v)) for k, v in lowering.scalar_summaries] == [("loss", 15.0)]
  with pytest.raises(mtf.ShapeError, match="takes a scalar"):
    mtf.scalar_summary("x", x)


def test_recomputation_is_not_merged_with_the_forward_computation():
  """The second exponential waits for the gradient of the output."""

  @tf.function(autograph=False)
  def program(value):
    graph = mtf.Graph()
    m = mtf.Mesh(graph, "m")
    x = mtf.import_tf_tensor(m, value, [A])
    y = mtf.recompute_grad(lambda x: mtf.square(mtf.exp(x)), [x])
    (dx,) = mtf.gradients([mtf.reduce_sum(mtf.sin(y))], [x])
    return mtf.Lowering(graph, {m: placement("", "")}).export_to_tf_tensor(dx)

  nodes = program.get_concrete_function(tf.TensorSpec([2])).graph.as_graph_def().node
  waiting = [n for n in nodes if n.op == "Identity" and any(i.startswith("^") for i in n.input)]
  assert sum(n.op == "Exp" for n in nodes) == 2 and waiting
