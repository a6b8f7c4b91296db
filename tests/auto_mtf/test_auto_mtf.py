"""The worked examples of the reference, and what the TF1 library's own tests asked."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.auto_mtf import (
  api,
  graph_interface,
  memory_estimator,
  print_cp_model_solution,
  scheduler,
  valid_layouts,
)
from mesh_tensorflow.auto_mtf.layout_optimizer import (
  LayoutOptimizer,
  _generate_assignments,
  _global_var_name,
  _local_var_name,
)
from mesh_tensorflow.auto_mtf.print_cp_model_solution import IntegerProgram, Solution, Variable
from mesh_tensorflow.errors import ArgumentError, GraphError, MeshShapeError


def example(repeats=1):
  """zeros [a:10, b:5], zeros [b:5, c:20], and so many times their product [a, c]."""
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "my_mesh")
  a, b, c = mtf.Dimension("a", 10), mtf.Dimension("b", 5), mtf.Dimension("c", 20)
  x, y = mtf.zeros(mesh, [a, b]), mtf.zeros(mesh, [b, c])
  for i in range(repeats):
    z = mtf.einsum([x, y], output_shape=[a, c], name=f"product_{i}")
  return graph, z


def optimizer_of(graph, mesh, outputs=(), alg="LIST"):
  return LayoutOptimizer(memory_estimator.MemoryEstimator(graph, mesh, outputs), alg)


# ------------------------------------------------------------------------ api


def test_names():
  assert mtf.auto_mtf.layout is api.layout
  assert mtf.auto_mtf.layout_and_mesh_shape is api.layout_and_mesh_shape


def test_layout():
  graph, z = example()
  layout = mtf.auto_mtf.layout(graph, "m1:4,m2:2", [z])
  assert set(layout.pairs) == {("a", "m2"), ("c", "m1")}


def test_layout_and_mesh_shape():
  graph, z = example()
  layout, mesh = mtf.auto_mtf.layout_and_mesh_shape(graph, 8, [z])
  assert mesh == mtf.convert_to_shape("mesh_0:4,mesh_1:2")
  assert set(layout.pairs) == {("a", "mesh_1"), ("c", "mesh_0")}
  layout, mesh = mtf.auto_mtf.layout_and_mesh_shape(graph, 8, [z], 1)
  assert (mesh, layout.pairs) == (mtf.convert_to_shape("mesh_0:8"), [])
  layout, mesh = mtf.auto_mtf.layout_and_mesh_shape(graph, 1, [z])
  assert (mesh, len(layout.pairs)) == (mtf.convert_to_shape("mesh_0:1"), 1)


def test_mesh_shape_iterator():
  iterate = api._mesh_shape_iterator
  assert list(iterate(1)) == [[1]]
  assert list(iterate(16)) == [[16], [8, 2], [4, 4], [4, 2, 2], [2, 2, 2, 2]]
  assert list(iterate(16, 2)) == [[16], [8, 2], [4, 4]]
  for n in (0, 3, 6, 12):
    with pytest.raises(ValueError, match=f"power of two, got {n}"):
      list(iterate(n))
  with pytest.raises(MeshShapeError, match="at least 1 dimension"):
    api.layout_and_mesh_shape(example()[0], 8, (), 0)


# ----------------------------------------------------------- layout_optimizer


@pytest.mark.parametrize("repeats", [1, 100])
def test_the_solution_of_the_example(repeats):
  graph, z = example(repeats)
  optimizer = optimizer_of(graph, "m1:4,m2:2", [z])
  assert optimizer.solve() == "a:m2;c:m1"
  assert len(optimizer._model.Proto().variables) < 50


def test_a_mesh_dimension_of_size_1_is_used_too():
  graph, z = example()
  assert optimizer_of(graph, "m1:4,m2:2,m3:1", [z]).solve() == "a:m2;b:m3;c:m1"


def test_what_is_unstacked_is_not_split():
  graph, z = example()
  a, c = z.shape.dims
  mtf.unstack(z, a)
  mtf.unstack(z, c)
  assert optimizer_of(graph, "m1:4,m2:2", [z]).solve() == ""


def test_the_solution_is_the_best_of_all_that_are_allowed():
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  dims = [mtf.Dimension(n, s) for n, s in [("a", 8), ("b", 12), ("c", 4), ("d", 6)]]
  a, b, c, d = dims
  x = mtf.einsum([mtf.zeros(mesh, [a, b]), mtf.zeros(mesh, [b, c])], output_shape=[a, c])
  y = mtf.einsum([mtf.relu(x), mtf.zeros(mesh, [c, d])], output_shape=[a, d])
  optimizer = optimizer_of(graph, "r:2,s:4", [y])
  together = [set(o) for o in optimizer._operation_dims]
  best = min(
    optimizer.evaluate_layout(
      ";".join(f"{n.name}:{m}" for n, m in zip(dims, places) if m is not None)
    )
    for places in itertools.product([None, "r", "s"], repeat=4)
    if all(
      m is None or optimizer._validator.is_valid_assignment(n.name, m) for n, m in zip(dims, places)
    )
    and not any(
      {n.name, o.name} <= t
      for (n, p), (o, q) in itertools.combinations(zip(dims, places), 2)
      if p == q and p is not None
      for t in together
    )
  )
  assert optimizer.evaluate_layout(optimizer.solve()) == best


def test_evaluate_layout(caplog):
  graph, z = example()
  optimizer = optimizer_of(graph, "m1:4,m2:2", [z])
  assert optimizer.evaluate_layout("a:m2;c:m1") == 300.0
  assert optimizer.evaluate_layout("") == 1400.0
  with caplog.at_level("WARNING"):
    assert optimizer.evaluate_layout("zzz:m1") == 1400.0
  assert "zzz cannot be split" in caplog.text
  with pytest.raises(KeyError):
    optimizer.evaluate_layout("a:m9")


def test_the_model_of_the_example(capsys):
  graph, z = example()
  optimizer = optimizer_of(graph, "m1:4,m2:2", [z])
  names = [v.name for v in optimizer._model.Proto().variables]
  assert (len(names), len(optimizer._model.Proto().constraints)) == (41, 139)
  assert {"x_(a:m1)", "y_(a:m2,c:m1)", "y_(a,b)", "z"} <= set(names)
  values = optimizer._values({"a": "m2", "c": "m1"})
  assert all(c.holds(values) for c in optimizer._model.constraints)
  # Not so where the peak is higher, or an operation has two dimensions on one mesh dimension.
  assert not all(c.holds({**values, "z": 299}) for c in optimizer._model.constraints)
  wrong = optimizer._values({"a": "m2", "c": "m2"})
  assert not all(c.holds(wrong) for c in optimizer._model.constraints)
  assert optimizer.solve(print_solution=True) == "a:m2;c:m1"
  lines = capsys.readouterr().out.split("\n")
  assert "  z = 300" in lines and "  x_(a:m2) = 1" in lines
  (objective,) = [line for line in lines if line.startswith("Minimize:")]
  assert "4 * z" in objective and "- 1 * x_(a:m1)" in objective
  assert lines[-3:] == ["Objective value: 1198.0", "", ""]


def test_print_solution(capsys):
  # As OR-Tools has a model that maximizes: coefficients negated, and a negative scale.
  program = IntegerProgram([Variable("x", 1), Variable("", 1), Variable("y", 5)])
  program.minimize({"x": -2, "y": 1})
  program.objective.scaling_factor = -1.0
  print_cp_model_solution.print_solution(program, Solution(program, {"x": 1}))
  lines = capsys.readouterr().out.split("\n")
  assert lines[:2] == ["  x = 1", "  y = 0"]
  assert lines[2].split() == ["Maximize:", "2", "*", "x", "-", "1", "*", "y"]
  assert lines[3:] == ["Objective value: -2.0", "", ""]


def test_assignments_and_names_of_variables():
  found = _generate_assignments(["a", "b", "c"], {"m1": 4, "m2": 2})
  assert len(found) == 13
  assert {} in found and {"a": "m1", "c": "m2"} in found
  assert _global_var_name("a", "m1") == "x_(a:m1)"
  assert _local_var_name(frozenset("cab"), {"b": "m1"}) == "y_(a,b:m1,c)"
  assert _local_var_name(frozenset(), {}) == "y_()"


# ------------------------------------------------------------ graph_interface


def products():
  """X [a:3, b:4], Y [b:4, c:5], and two products of them."""
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  a, b, c = mtf.Dimension("a", 3), mtf.Dimension("b", 4), mtf.Dimension("c", 5)
  x, y = mtf.zeros(mesh, [a, b]), mtf.zeros(mesh, [b, c])
  for name in ("Z1", "Z2"):
    mtf.einsum([x, y], output_shape=[a, c], name=name)
  return graph


def test_an_mtf_graph_by_names():
  graph = products()
  interface = graph_interface.GraphInterface(graph)
  names = [op.name for op in graph.operations]
  assert interface.get_num_operations() == 4
  assert list(interface.get_all_operation_names()) == names
  x, y, z1, z2 = [f"{n}:0" for n in names]
  assert list(interface.get_all_tensor_names()) == [x, y, z1, z2]
  assert list(interface.get_operation_input_names(names[2])) == [x, y]
  assert list(interface.get_operation_output_names(names[2])) == [z1]
  assert interface.get_tensor_dtype(x) == tf.float32
  assert interface.get_tensor_shape(x) == tf.TensorShape([3, 4])
  assert interface.get_tensor_mtf_dimension_names(x) == ["a", "b"]
  assert interface.get_operation_mtf_dimension_names(names[2]) == {"a", "b", "c"}
  assert interface.get_tensor_num_entries(x) == 12
  assert interface.get_tensor_num_entries(x, {"a": "m"}, {"m": 2}) == 6
  assert interface.get_tensor_num_entries(x, {"a": "m", "b": "n"}, {"m": 5, "n": 2}) == 2
  assert interface.get_tensor_size(x) == 48
  assert interface.get_tensor_device(x) is None
  assert interface.get_operation_device(names[0]) is None
  assert interface.is_tensor_on_canonical_device(x)
  for call in (interface.get_tensor_shape, interface.set_tensor_final, interface.is_tensor_final):
    with pytest.raises(KeyError):
      call("none:0")
  with pytest.raises(TypeError, match="takes an mtf.Graph or a tf.Graph"):
    graph_interface.GraphInterface("graph")
  assert issubclass(ArgumentError, TypeError)


def test_a_tf_graph_by_names():
  @tf.function
  def product(x, y):
    with tf.device("CPU:0"):
      return tf.matmul(x, y, name="product")

  spec = tf.TensorSpec([3, 3], tf.float32)
  graph = product.get_concrete_function(spec, spec).graph
  interface = graph_interface.GraphInterface(graph, canonical_device="")
  assert list(interface.get_operation_input_names("product")) == ["x:0", "y:0"]
  assert interface.get_tensor_size("product:0") == 36
  assert interface.get_tensor_mtf_dimension_names("product:0") == []
  assert interface.is_tensor_on_canonical_device("x:0")
  device = interface.get_tensor_device("product:0")
  assert "CPU:0" in device and not interface.is_tensor_on_canonical_device("product:0")
  costs = interface.compute_cost_graph(devices=[""])
  sizes = {node.name: [i.size for i in node.output_info] for node in costs.node}
  assert sizes["x"] == [36] and sizes["product"] == [0]
  assert graph_interface.GraphInterface(graph, device).is_tensor_on_canonical_device("product:0")
  unknown = product.get_concrete_function(tf.TensorSpec([None, 3]), spec).graph
  with pytest.raises(GraphError, match="not static"):
    graph_interface.GraphInterface(unknown).get_tensor_size("x:0")


def test_cost_graph():
  interface = graph_interface.GraphInterface(products())
  names = list(interface.get_all_operation_names())
  interface.set_tensor_final(f"{names[2]}:0")
  nodes = interface.compute_cost_graph(devices=[]).node
  assert [(n.name, n.id, n.device, n.is_final) for n in nodes] == [
    (name, i, "", i == 2) for i, name in enumerate(names)
  ]
  inputs = [(i.preceding_node, i.preceding_port) for i in nodes[2].input_info]
  assert inputs == [(0, 0), (1, 0)]
  (output,) = nodes[2].output_info
  assert (output.size, output.alias_input_port, output.dtype) == (60, -1, 1)
  assert [d.size for d in output.shape.dim] == [3, 5]


def test_memory_contents():
  interface = graph_interface.GraphInterface(products())
  x, y, z1, z2 = interface.get_all_tensor_names()
  interface.set_tensor_final(z1)
  contents = interface.compute_memory_contents_under_schedule([0, 1, 2, 3])
  assert contents == [{x}, {x, y}, {x, y, z1}, {x, y, z1, z2}]
  contents = interface.compute_memory_contents_under_schedule([0, 1, 3, 2])
  assert contents == [{x}, {x, y}, {x, y, z2}, {x, y, z1}]


def test_copies_of_operations_have_names_of_their_own():
  graph, z = example()
  clones, _ = graph.clone_operations([z.operation], {})
  interface = graph_interface.GraphInterface(graph)
  assert interface.get_num_operations() == 4
  assert interface.name_of(clones[0].outputs[0]) == f"{z.operation.name}_copy_1:0"
  with pytest.raises(GraphError, match="not in the graph"):
    interface.name_of(example()[1])


# -------------------------------------------------------------- valid_layouts


def test_valid_layouts():
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  a, b, c = mtf.Dimension("a", 16), mtf.Dimension("b", 24), mtf.Dimension("c", 10)
  x = mtf.zeros(mesh, [a, b, c])
  mtf.zeros(mesh, [mtf.Dimension("a", 8)])
  mtf.slicewise(lambda t: t, [x], output_shape=x.shape, splittable_dims=[a, b])
  mtf.zeros(mesh, mtf.anonymous_shape([mtf.Dimension("d", 4)]))
  validator = valid_layouts.LayoutValidator(graph, "m1:4,m2:16,m3:12")
  assert validator.splittable_mtf_dimension_names == {"a", "b"}
  assert list(validator.mesh_dimension_name_to_size.items()) == [("m1", 4), ("m2", 16), ("m3", 12)]
  valid = validator.is_valid_assignment
  assert valid("a", "m1") and valid("b", "m3")
  # Of the sizes 16 and 8 of a dimension only what divides both.
  assert not valid("a", "m2") and not valid("c", "m1") and not valid("zzz", "no such")
  with pytest.raises(KeyError):
    valid("a", "no such")


# ------------------------------------------- memory_estimator and scheduler


def test_memory_estimator():
  graph, z = example()
  estimator = memory_estimator.MemoryEstimator(graph, "m1:4", [z])
  interface = estimator.get_graph_interface()
  assert interface is estimator.get_graph_interface()
  assert interface.is_tensor_final(interface.name_of(z))
  assert not interface.is_tensor_final(interface.name_of(z.operation.inputs[0]))
  assert estimator.get_layout_validator().is_valid_assignment("c", "m1")
  assert estimator.mtf_graph is graph and estimator.mtf_outputs == [z]
  assert estimator.mesh_shape == mtf.convert_to_shape("m1:4")


def test_schedules():
  graph, z = example(3)
  interface = graph_interface.GraphInterface(graph)
  interface.set_tensor_final(interface.name_of(z))
  assert list(scheduler.minimize_peak_memory(interface, "NAIVE")) == [0, 1, 2, 3, 4]
  order = list(scheduler.minimize_peak_memory(interface, "LIST"))
  assert sorted(order) == [0, 1, 2, 3, 4] and set(order[:2]) == {0, 1}
  with pytest.raises(NotImplementedError, match="'NAIVE' or 'LIST', got 'BEST'"):
    scheduler.minimize_peak_memory(interface, "BEST")


def test_the_list_schedule_frees_first():
  # A large tensor is used as soon as it can be, before another is made.
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  large = [("a", 100)]
  for name in ("one", "two"):
    x = mtf.import_tf_tensor(mesh, tf.zeros([100]), large, name=f"{name}_large")
    mtf.relu(mtf.reduce_sum(x, name=f"{name}_sum"), name=f"{name}_last")
  interface = graph_interface.GraphInterface(graph)
  names = list(interface.get_all_operation_names())
  order = [names[i] for i in scheduler.minimize_peak_memory(interface, "LIST")]
  assert np.abs(order.index("one_large") - order.index("one_sum")) == 1
  peak = lambda schedule: max(  # noqa: E731
    sum(interface.get_tensor_size(x) for x in alive)
    for alive in interface.compute_memory_contents_under_schedule(schedule)
  )
  assert peak(scheduler.minimize_peak_memory(interface, "LIST")) < 800
