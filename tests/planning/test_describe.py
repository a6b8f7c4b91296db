import collections
import json
import resource
import sys

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import GraphError, LayoutError, ShapeError, UnsupportedError
from mesh_tensorflow.planning import text as describe_text
from mesh_tensorflow.planning.cost_model import node_flops
from mesh_tensorflow.planning.describe import describe
from mesh_tensorflow.planning.mesh_impl import PlanMeshImpl, PlannedVariable, allreduce_bytes
from mesh_tensorflow.transformer import transformer
from tests.conformance import framework
from tests.conformance.suite import FAMILIES
from tests.kinds import kept
from tests.transformer.lm_program import make_model

A, B, C = mtf.Dimension("a", 8), mtf.Dimension("b", 4), mtf.Dimension("c", 2)


def new_mesh():
  graph = mtf.Graph()
  return graph, mtf.Mesh(graph, "m")


def import_x(mesh):
  return mtf.import_tf_tensor(mesh, np.arange(32, dtype=np.float32).reshape(8, 4), [A, B])


def import_y(mesh):
  return mtf.import_tf_tensor(mesh, np.ones([4, 2], np.float32), [B, C])


def collectives(report):
  return [
    (c["kind"], c["reduction"], tuple(c["mesh_dimensions"]))
    for op in report.to_dict()["operations"]
    for c in op["collectives"]
  ]


SUM_R, MAX_R = ("allreduce", "SUM", ("r",)), ("allreduce", "MAX", ("r",))


def _sum_a(x):
  return mtf.reduce_sum(x, reduced_dim=A)


# The worked examples of the reference: x [a=8, b=4], mesh r:2, layout a:r.
@pytest.mark.parametrize(
  ("program", "expected"),
  [
    (lambda x, y: mtf.reduce_sum(x), [SUM_R]),
    (lambda x, y: mtf.reduce_max(x, reduced_dim=A), [MAX_R]),
    (lambda x, y: mtf.einsum([x, y], output_shape=[A, C]), []),
    (lambda x, y: mtf.einsum([x, y], reduced_dims=[A]), [SUM_R]),
    (lambda x, y: _sum_a(x) + _sum_a(x), [SUM_R]),
    (lambda x, y: mtf.add_n([_sum_a(x) for _ in range(4)]), [SUM_R]),
    (lambda x, y: mtf.rename_dimension(x, "a", "q"), [("allconcat", "", ("r",))]),
    (
      lambda x, y: (
        mtf.rename_dimension(_sum_a(x), "b", "bb") + mtf.rename_dimension(_sum_a(x), "b", "bb")
      ),
      [SUM_R],
    ),
    (lambda x, y: mtf.shift(x, -8, A, wrap=False), []),
    (lambda x, y: mtf.shift(x, 4, A, wrap=True), [("receive", "", ("r",))]),
    (
      lambda x, y: mtf.reshape(mtf.reshape(x, [("q", 8), B]), [("q", 8), ("a", 4)]),
      [("allconcat", "", ("r",))],
    ),
    (lambda x, y: mtf.reshape(x, [("q", 8), ("a", 4)]), [("alltoall", "", ("r",))]),
  ],
)
def test_collectives_of_worked_examples(program, expected):
  graph, mesh = new_mesh()
  out = program(import_x(mesh), import_y(mesh))
  report = describe(graph, "a:r", "r:2", results=[out])
  assert collectives(report) == expected


def test_sum_over_two_mesh_dimensions_is_one_allreduce():
  graph, mesh = new_mesh()
  x = import_x(mesh)
  mtf.einsum([x, x], output_shape=[])
  report = describe(graph, "a:r,b:s", "r:2,s:2")
  assert collectives(report) == [("allreduce", "SUM", ("r", "s"))]


def test_bytes_of_a_hand_computed_layer():
  graph, mesh = new_mesh()
  d, f = mtf.Dimension("d", 16), mtf.Dimension("f", 32)
  x = mtf.import_tf_tensor(mesh, np.zeros([8, 16], np.float32), [A, d])
  w = mtf.get_variable(mesh, "w", [d, f])
  v = mtf.get_variable(mesh, "v", [f, d])
  h = mtf.einsum([x, w], output_shape=[A, f])
  out = mtf.einsum([h, v], output_shape=[A, d], name="down")
  report = describe(graph, "a:rows,f:cols", "rows:4,cols:2", results=[out])
  # A slice of the output is [2, 16] floats; a ring over 2 sends 2 * 1/2 of it.
  assert report.bytes_moved() == {"rows": 0, "cols": 2 * 16 * 4}
  (down,) = [op for op in report.operations if op.name == "down"]
  assert down.bytes_over() == {1: 2 * 16 * 4}
  assert down.flops == 2 * 2 * 16 * 16
  assert report.flops_per_device == 2 * (2 * 2 * 16 * 16)
  assert report.flops_needed == 2 * (2 * 8 * 16 * 32)
  assert report.memory.variables == 2 * 16 * 16 * 4
  assert report.memory.inputs == 2 * 16 * 4
  # h and the output, [2, 16] floats each.
  assert report.memory.activations == 2 * (2 * 16 * 4)
  assert {p.name: (p.bytes, p.bytes_per_device, p.copies) for p in report.variables} == {
    "w": (2048, 1024, 4),
    "v": (2048, 1024, 4),
  }


@pytest.mark.parametrize("kind", ["allconcat", "alltoall", "receive"])
def test_bytes_of_other_collectives(kind):
  graph, mesh = new_mesh()
  x = import_x(mesh)  # A slice is [2, 4] floats: 32 bytes.
  if kind == "allconcat":
    mtf.rename_dimension(x, "a", "q")
  elif kind == "alltoall":
    mtf.reshape(x, [("q", 8), ("a", 4)])
  else:
    mtf.shift(x, 2, A, wrap=True)
  report = describe(graph, "a:r", "r:4")
  assert [c[0] for c in collectives(report)] == [kind]
  assert report.bytes_moved() == {"r": {"allconcat": 3 * 32, "alltoall": 24, "receive": 32}[kind]}


def test_allreduce_over_several_axes_sends_what_one_ring_sends():
  over = allreduce_bytes(2400, [0, 2], [2, 7, 4])
  assert over == {2: 3600, 0: 600}
  assert sum(over.values()) == 2 * 7 / 8 * 2400


def test_a_pending_sum_belongs_to_the_operation_that_made_it():
  graph, mesh = new_mesh()
  x = import_x(mesh)
  s = mtf.reduce_sum(x, reduced_dim=A, name="the_sum")
  mtf.relu(mtf.rename_dimension(s, "b", "bb"))
  report = describe(graph, "a:r", "r:2")
  assert [op.name for op in report.operations if op.collectives] == ["the_sum"]


def test_rules_that_match_nothing_are_told_with_suggestions():
  graph, mesh = new_mesh()
  heads = mtf.Dimension("heads", 4)
  mtf.relu(mtf.zeros(mesh, [A, heads]))
  report = describe(graph, "a:rows,hedas:cols,a:colls,zzz:rows", "rows:2,cols:2,one:1")
  problems = {(r.tensor_dimension, r.mesh_dimension): r.problem for r in report.rules}
  assert problems["a", "rows"] == ""
  assert problems["hedas", "cols"] == (
    "the program has no dimension 'hedas'; did you mean 'heads'?"
  )
  assert problems["a", "colls"] == "the mesh has no dimension 'colls'; did you mean 'cols'?"
  assert problems["zzz", "rows"] == "the program has no dimension 'zzz'; there are a, heads"
  assert report.idle_mesh_dimensions == ["cols"]
  text = str(report)
  assert "hedas:cols matches nothing" in text
  assert "mesh dimension cols splits nothing" in text
  (match,) = [r for r in report.rules if not r.problem]
  assert (match.sizes, match.mesh_size, match.variables, match.tensors) == ([8], 2, 0, 2)


def test_a_mesh_dimension_of_size_1_splits_nothing():
  graph, mesh = new_mesh()
  mtf.get_variable(mesh, "w", [A])
  report = describe(graph, "a:one", "one:1")
  assert report.rules[0].problem == "a mesh dimension of size 1 splits nothing"
  assert [v.name for v in report.replicated_variables] == ["w"]
  assert report.idle_mesh_dimensions == []


def test_replicated_tensors_and_variables():
  graph, mesh = new_mesh()
  mtf.get_variable(mesh, "split", [A, B])
  mtf.get_variable(mesh, "whole", [B, C], trainable=False)
  mtf.relu(mtf.zeros(mesh, [B]), name="local")
  report = describe(graph, "a:r", "r:2")
  assert [v.name for v in report.replicated_variables] == ["whole"]
  assert report.replicated_variables[0].trainable is False
  assert [t.name for t in report.replicated_tensors] == ["constant:0", "local:0"]
  splits = {v.name: v.split for v in report.variables}
  assert splits == {"split": ["r", None], "whole": [None, None]}


def test_work_that_is_repeated():
  graph, mesh = new_mesh()
  mtf.einsum([import_x(mesh), import_y(mesh)], output_shape=[A, C], name="product")
  report = describe(graph, "a:r", "r:2,s:4")
  (product,) = [op for op in report.operations if op.name == "product"]
  assert product.repeated == 4
  assert report.flops_needed == 2 * 8 * 4 * 2
  assert "each on 4 devices alike" in str(report)


def test_a_matrix_times_a_vector_counts():
  graph, mesh = new_mesh()
  v = mtf.import_tf_tensor(mesh, np.ones([4], np.float32), [B])
  mtf.einsum([import_x(mesh), v], output_shape=[A])
  assert describe(graph, "a:r", "r:2").flops_per_device == 2 * 4 * 4


def test_memory_is_given_back_after_the_last_use():
  graph, mesh = new_mesh()
  x = import_x(mesh)
  for _ in range(5):
    x = mtf.relu(x)
  report = describe(graph, "", "r:2")
  assert report.memory.activations == 2 * 128
  assert report.memory.inputs == 128


def test_a_reshape_takes_no_memory():
  graph, mesh = new_mesh()
  x = mtf.relu(import_x(mesh))
  for name in "pqr":
    x = mtf.reshape(x, [(name, 32)])
  assert describe(graph, "", "r:2").memory.activations == 128


def test_unneeded_gradients_are_not_counted():
  graph, mesh = new_mesh()
  x, y = import_x(mesh), mtf.get_variable(mesh, "y", [B, C])
  loss = mtf.reduce_sum(mtf.einsum([x, y], output_shape=[A, C], name="product"))
  (dy,) = mtf.gradients([loss], [y])
  mtf.assign_sub(y, dy)
  report = describe(graph, "a:r", "r:2")
  names = [op.name for op in report.operations if op.name.startswith("product/gradients")]
  assert len(names) == 1
  assert collectives(report) == [SUM_R, SUM_R]


def test_a_function_that_returns_nothing():
  impl = mtf.PlacementMeshImpl("r:2", "a:r", [""] * 2)

  @mtf.function(impl, [mtf.TensorSpec([A, B])])
  def step(x):
    w = mtf.get_variable(x.mesh, "w", [B])
    mtf.reduce_sum(x, reduced_dim=B, name="unused")
    mtf.assign_add(w, mtf.reduce_sum(x, reduced_dim=A))

  report = step.plan()
  assert "unused" not in [op.name for op in report.operations]
  assert collectives(report) == [SUM_R]


class CountingMeshImpl(mtf.PlacementMeshImpl):
  """Counts the exchanges that really run."""

  def __init__(self, *args):
    super().__init__(*args)
    self.log = []

  def _note(self, kind, axes):
    if any(self.shape[a].size > 1 for a in axes):
      self.log.append((kind, tuple(self.shape[a].name for a in axes)))

  def allreduce(self, x, mesh_axes, reduction_fn_string):
    x = x.to_laid_out_tensor()
    if x.tensor_list[0].dtype != tf.bool:  # Those are exchanged by another call, as integers.
      self._note("allreduce", mesh_axes)
    return super().allreduce(x, mesh_axes, reduction_fn_string)

  def allconcat(self, x, mesh_axis, concat_axis, stack=False):
    self._note("allconcat", [mesh_axis])
    return super().allconcat(x, mesh_axis, concat_axis, stack)

  def alltoall(self, x, mesh_axis, split_axis, concat_axis):
    self._note("alltoall", self.group_axes(mesh_axis))
    return super().alltoall(x, mesh_axis, split_axis, concat_axis)

  def reduce_scatter(self, x, mesh_axis, split_axis):
    self._note("reduce_scatter", [mesh_axis])
    return super().reduce_scatter(x, mesh_axis, split_axis)

  def receive(self, x, mesh_axis, source_pcoord):
    if not all(s is None or s == k for k, s in enumerate(source_pcoord)):
      self._note("receive", self.group_axes(mesh_axis))
    return super().receive(x, mesh_axis, source_pcoord)


def lm_step(mesh_impl, batch, layers, d_model, d_ff, heads, vocab, length=8):
  """A training step of a language model, as an mtf.function."""
  batch, length = mtf.Dimension("batch", batch), mtf.Dimension("length", length)
  memory = mtf.Dimension("memory_length", length.size)
  d_model, d_ff = mtf.Dimension("d_model", d_model), mtf.Dimension("d_ff", d_ff)
  heads, d_kv = mtf.Dimension("heads", heads), mtf.Dimension("d_kv", d_model.size // heads)
  vocab = mtf.Dimension("vocab", vocab)

  @mtf.function(mesh_impl, [mtf.TensorSpec([batch, length], tf.int32, name="tokens")])
  def step(tokens):
    mesh = tokens.mesh
    get = lambda name, dims: mtf.get_variable(mesh, name, mtf.Shape(dims))  # noqa: E731
    embedding = get("embedding", [vocab, d_model])
    x = mtf.gather(embedding, tokens, vocab)
    for i in range(layers):
      with mtf.variable_scope(f"layer_{i}"):
        y = mtf.rename_dimension(x, "length", "memory_length")
        q = mtf.einsum([x, get("q", [d_model, heads, d_kv])], reduced_dims=[d_model])
        k = mtf.einsum([y, get("k", [d_model, heads, d_kv])], reduced_dims=[d_model])
        v = mtf.einsum([y, get("v", [d_model, heads, d_kv])], reduced_dims=[d_model])
        weights = mtf.softmax(mtf.einsum([q, k], reduced_dims=[d_kv]), memory)
        o = mtf.einsum([weights, v], output_shape=q.shape)
        x += mtf.einsum([o, get("o", [heads, d_kv, d_model])], output_shape=x.shape)
        h = mtf.relu(mtf.einsum([x, get("wi", [d_model, d_ff])], reduced_dims=[d_model]))
        x += mtf.einsum([h, get("wo", [d_ff, d_model])], output_shape=x.shape)
    logits = mtf.einsum([x, embedding], reduced_dims=[d_model])
    log_z = mtf.reduce_logsumexp(logits, vocab)
    picked = mtf.reduce_sum(logits * mtf.one_hot(tokens, vocab), reduced_dim=vocab)
    loss = mtf.reduce_mean(log_z - picked)
    variables = mesh.graph.trainable_variables
    for w, g in zip(variables, mtf.gradients([loss], [w.value for w in variables])):
      mtf.assign_sub(w, g * 0.1)
    return loss

  return step


def test_the_plan_exchanges_what_a_run_exchanges(cpu_devices):
  layout = "batch:rows,d_ff:cols,heads:cols,vocab:cols"
  impl = CountingMeshImpl("rows:2,cols:4", layout, cpu_devices)
  step = lm_step(impl, batch=4, layers=1, d_model=16, d_ff=32, heads=4, vocab=32)
  report = step.plan()
  assert not impl.log and len(impl.variable_store) == 0
  step(np.zeros([4, 8], np.int32))
  assert len(impl.log) > 10
  assert sorted(impl.log) == sorted((kind, axes) for kind, _, axes in collectives(report))
  assert report.title == "step"
  held = sum(v.slices[0].shape.num_elements() * 4 for v in impl.variable_store)
  assert report.memory.variables == held


@pytest.mark.parametrize("first", kept([0, 1], [0]))
@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.slow
def test_the_plan_of_every_operation_exchanges_what_a_run_exchanges(family, first):
  """Every other one in one plan; each runs by itself: what is exchanged is known to be its own."""
  (layout,) = framework.draw_layouts(family, FAMILIES[family], 1)
  legal = [d for d in FAMILIES[family] if not d.is_illegal(layout)][first::2]
  graph, mesh = new_mesh()
  graph.random_seed = 1
  outputs, owner = [], {}
  for d in legal:
    built, operations = graph.capture_operations(lambda d=d: _build(d, mesh))
    outputs += built
    owner.update((op.name, d.name) for op in operations)
  report = describe(graph, layout.rules, layout.mesh, results=outputs)
  planned, name = {d.name: [] for d in legal}, ""
  for op in report.operations:
    name = owner.get(op.name, name)  # Those of a loop's body come after the loop.
    axes = [tuple(report.mesh_shape[a].name for a in c.mesh_axes) for c in op.collectives]
    planned[name] += zip((c.kind for c in op.collectives), axes)
  for d in legal:
    log = _exchanged(d, layout)
    if d.name.startswith("cond"):  # The plan has both branches, a run takes one.
      assert not collections.Counter(log) - collections.Counter(planned[d.name]), d.name
      continue
    assert sorted(log) == sorted(planned[d.name]), f"{d.name} on {layout}"


def _build(descriptor, mesh):
  inputs = zip(descriptor.arrays, descriptor.inputs)
  return framework._call(
    descriptor, mesh, [mtf.import_tf_tensor(mesh, a, x.shape) for a, x in inputs]
  )


def _exchanged(descriptor, layout):
  """Exchanges of a run of one descriptor; the body of a loop counts once."""
  graph, mesh = new_mesh()
  graph.random_seed = 1
  outputs = _build(descriptor, mesh)
  impl = CountingMeshImpl(layout.mesh, layout.rules, [""] * layout.size)

  def lower():
    lowering = mtf.Lowering(graph, {mesh: impl})
    for x in outputs:
      lowering.tensors[x].to_laid_out_tensor()

  if any(type(op).__name__ == "WhileLoopOperation" for op in graph.operations):
    with tf.Graph().as_default():
      tf.function(lower, autograph=False).get_concrete_function()
  else:
    lower()
  return impl.log


def test_the_plan_of_a_transformer_exchanges_what_a_run_exchanges(cpu_devices):
  model = make_model(num_layers=1, num_heads=4, d_ff=8, vocab_divisor=4)
  layout = "batch:rows,heads:cols,d_ff:cols,vocab:cols"
  impl = CountingMeshImpl("rows:2,cols:4", layout, cpu_devices)

  @mtf.function(impl, [mtf.TensorSpec([("batch", 4), ("length", 6)], tf.int32)])
  def step(targets):
    inputs = transformer.autoregressive_inputs(targets)
    _, loss = model.call_simple(inputs, targets, compute_loss=True, mode="train")
    variables = loss.graph.trainable_variables
    gradients = mtf.gradients([loss], [v.value for v in variables])
    mtf.optimize.AdafactorOptimizer(learning_rate=0.1).apply_grads(gradients, variables)
    return loss

  report = step.plan()
  step(np.ones([4, 6], np.int32))
  assert len(impl.log) > 10
  assert sorted(impl.log) == sorted((kind, axes) for kind, _, axes in collectives(report))
  planned = {v.name: v.bytes for v in report.variables}
  assert planned == {v.name: v.shape.size * v.slice_dtype.size for v in impl.variable_store}


def test_a_large_model_on_512_cores_takes_no_memory(tmp_path):
  impl = mtf.PlacementMeshImpl([], {}, [""])
  step = lm_step(
    impl, batch=512, layers=3, d_model=16384, d_ff=65536, heads=128, vocab=65536, length=2048
  )
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  layout = "batch:batch,d_ff:model,heads:model,vocab:model"
  report = describe(step, layout, "batch:64,model:8")
  assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB
  assert sum(v.bytes for v in report.variables) / 4 > 5e9
  weights = sum(v.bytes for v in report.variables) // 8
  assert report.memory.variables == weights
  # The gradient of every weight goes round the 64 devices of a batch ring once.
  gradients = sum(op.bytes_over().get(0, 0) for op in report.operations if "gradients" in op.name)
  assert gradients == pytest.approx(2 * 63 / 64 * weights, rel=1e-3)
  assert report.flops_needed == pytest.approx(report.flops_per_device * 512, rel=1e-3)
  # 6 FLOPs for each weight and token, and attention's products.
  tokens = 512 * 2048
  expected = 6 * 8 * weights / 4 * tokens + 3 * 2 * 6 * tokens * 2048 * 16384
  assert report.flops_needed == pytest.approx(expected, rel=0.01)
  text = str(report)
  assert max(len(line) for line in text.split("\n")) <= 100
  assert "layer_*/wi" in text and "GiB" in text and "TFLOP" in text


def test_to_dict_is_json():
  graph, mesh = new_mesh()
  y = mtf.get_variable(mesh, "y", [B, C])
  mtf.einsum([import_x(mesh), y], reduced_dims=[A, B])
  result = json.loads(json.dumps(describe(graph, "a:r,b:s", "r:2,s:2").to_dict()))
  assert result["mesh_shape"] == {"r": 2, "s": 2}
  assert result["devices"] == 4
  assert result["layout"] == [["a", "r"], ["b", "s"]]
  assert result["variables"][0]["split"] == ["s", None]
  assert result["bytes_moved"] == {
    "r": sum(op["bytes_moved"].get("r", 0) for op in result["operations"]),
    "s": sum(op["bytes_moved"].get("s", 0) for op in result["operations"]),
  }
  assert set(result["memory_per_device"]) >= {"variables", "inputs", "activations", "total"}


def test_tables_have_so_many_rows():
  graph, mesh = new_mesh()
  for name in "opqrstuvw":
    mtf.get_variable(mesh, f"variable_{name}", [A, B])
  text = describe(graph, "a:r", "r:2").to_text(rows=4)
  assert text.count("variable_") == 4
  assert "... and 5 more" in text


def test_a_loop_counts_its_iterations():
  def program(maximum_iterations):
    graph, mesh = new_mesh()
    x = import_x(mesh)
    start = mtf.constant(mesh, 0, dtype=tf.int32)

    def body(i, s):
      return [i + 1, s + mtf.reduce_sum(x, reduced_dim=A, name="inner_sum")]

    mtf.while_loop(
      lambda i, s: mtf.less(i, 3),
      body,
      [start, mtf.zeros(mesh, [B])],
      maximum_iterations=maximum_iterations,
    )
    return describe(graph, "a:r", "r:2")

  def inner(report):
    (found,) = [op for op in report.operations if op.name.endswith("inner_sum")]
    return found

  report = program(None)
  assert inner(report).in_unbounded_loop
  assert inner(report).bytes_over() == {0: 16}
  assert "(each iteration)" in str(report)
  report = program(3)
  assert not inner(report).in_unbounded_loop
  assert inner(report).bytes_over() == {0: 3 * 16}
  assert "(x 3)" in str(report)


def test_an_accumulator_of_a_loop_is_exchanged_once():
  graph, mesh = new_mesh()
  x = import_x(mesh)
  start = mtf.constant(mesh, 0, dtype=tf.int32)
  mtf.while_loop(
    lambda i: mtf.less(i, 3), lambda i: [i + 1, _sum_a(x)], [start], has_accumulators=True
  )
  report = describe(graph, "a:r", "r:2")
  assert collectives(report) == [SUM_R]
  (loop,) = [op for op in report.operations if op.type == "WhileLoopOperation"]
  assert loop.times == 1 and loop.bytes_over() == {0: 16}


def test_programs_with_random_numbers_eager_constants_and_own_assignment_functions():
  graph, mesh = new_mesh()
  noise = mtf.random_uniform(mesh, [A, B])
  eager = tf.random.normal([100])
  x = mtf.slicewise(lambda t: t * tf.reduce_sum(eager), [noise], splittable_dims=[A, B])
  w = mtf.get_variable(mesh, "w", [A, B])

  def decay(variable, slice_var, value):
    return slice_var.assign(slice_var * 0.9 + 0.1 * value + slice_var[0, 0])

  mtf.assign(w, x, assign_fn=decay)
  report = describe(graph, "a:r", "r:2")
  assert [v.name for v in report.variables] == ["w"]


def test_slices_that_are_imported_ready():
  graph, mesh = new_mesh()
  laid_out = PlanMeshImpl.LaidOutTensor([tf.ones([4, 4])] * 2)
  x = mtf.import_laid_out_tensor(mesh, laid_out, [A, B])
  mtf.reduce_sum(x)
  report = describe(graph, "a:r", "r:2")
  assert collectives(report) == [SUM_R]
  assert report.memory.activations == 4 * 4 * 4 + 4


def test_an_empty_graph_and_a_mesh_of_one_device(tmp_path):
  report = describe(mtf.Graph(), "", "")
  assert report.memory.total == 0 and report.rules == []
  assert "1 devices" not in str(report)
  with pytest.raises(GraphError, match="no tensor to draw"):
    report.save_picture("x.svg")
  graph, mesh = new_mesh()
  mtf.reduce_sum(import_x(mesh), name="total")
  report = describe(graph, "", "")
  assert report.bytes_moved() == {}
  pytest.importorskip("matplotlib")
  report.save_picture(str(tmp_path / "scalar.svg"), "total")


def test_describe_inside_a_tf_function():
  reports = []

  @tf.function
  def step(t):
    graph, mesh = new_mesh()
    x = mtf.import_tf_tensor(mesh, t, [A, B])
    y = mtf.slicewise(lambda s: s + tf.reduce_sum(t), [x], splittable_dims=[A, B])
    reports.append(describe(graph, "a:r", "r:2", results=[mtf.reduce_sum(y)]))
    return t

  step(tf.ones([8, 4]))
  assert collectives(reports[0]) == [SUM_R]


def test_a_planned_variable_stands_for_a_tf_variable():
  with tf.Graph().as_default():
    v = PlannedVariable("v", [2, 3], tf.float32, True)
    assert (v * 2.0 + v).shape == [2, 3]
    assert tf.reduce_sum(v, axis=0).shape == [3]
    assert v.assign_add(v.read_value()) is None
    assert v.handle.dtype == tf.resource
    assert v.shape == [2, 3] and v.dtype == tf.float32


def test_layout_errors_are_raised():
  graph, mesh = new_mesh()
  import_x(mesh)
  with pytest.raises(LayoutError, match="dimension a:8 .*mesh axis r:3"):
    describe(graph, "a:r", "r:3")


def test_wrong_arguments():
  graph, _ = new_mesh()
  with pytest.raises(GraphError, match="mesh_shape is missing"):
    describe(graph, "a:r")
  with pytest.raises(GraphError, match=r"must be an mtf\.Graph or an mtf\.Function"):
    describe("graph", "a:r", "r:2")


def test_layout_and_mesh_shape_of_a_mesh_impl():
  graph, mesh = new_mesh()
  mtf.reduce_sum(import_x(mesh))
  impl = mtf.PlacementMeshImpl("r:2", "a:r", [""] * 2)
  assert describe(graph, mesh_impl=impl).bytes_moved() == {"r": 4}
  assert describe(graph, mesh_impl=impl, mesh_shape="r:4").bytes_moved() == {"r": 6}


def test_the_plan_mesh_checks_its_collectives():
  impl = PlanMeshImpl("r:2", "")
  with tf.Graph().as_default():
    x = impl.LaidOutTensor([tf.zeros([3, 4])])
    with pytest.raises(ShapeError, match="axis 0 of size 3 .*r:2"):
      impl.alltoall(x, 0, 0, 1)
    with pytest.raises(GraphError, match="'MEAN' is not SUM, MAX or MIN"):
      impl.allreduce(x, [0], "MEAN")
    assert impl.allconcat(x, 0, -1, stack=True).slice_shape == [3, 4, 2]
    flags = impl.LaidOutTensor([tf.zeros([6], tf.bool)])
    assert impl.allreduce(flags, [0], "MAX").one_slice.dtype == tf.bool
    assert impl.collectives[-1].slice_bytes == 24


@pytest.mark.parametrize(
  ("make", "flops"),
  [
    (lambda z: tf.matmul(z(2, 3), z(3, 5)), 2 * 30),
    (lambda z: tf.matmul(z(3, 2), z(3, 5), transpose_a=True), 2 * 30),
    (lambda z: tf.matmul(z(7, 2, 3), z(7, 5, 3), transpose_b=True), 2 * 210),
    (lambda z: tf.einsum("...ab,bc->...ac", z(4, 2, 3), z(3, 5)), 2 * 120),
    (lambda z: tf.nn.conv2d(z(1, 8, 8, 3), z(3, 3, 3, 16), 1, "SAME"), 2 * 64 * 16 * 27),
    (
      lambda z: tf.raw_ops.Conv2DBackpropInput(
        input_sizes=[1, 8, 8, 3],
        filter=z(3, 3, 3, 16),
        out_backprop=z(1, 4, 4, 16),
        strides=[1, 2, 2, 1],
        padding="SAME",
      ),
      2 * 16 * 16 * 27,
    ),
    (
      lambda z: tf.raw_ops.Conv2DBackpropFilter(
        input=z(1, 8, 8, 3),
        filter_sizes=[3, 3, 3, 16],
        out_backprop=z(1, 4, 4, 16),
        strides=[1, 2, 2, 1],
        padding="SAME",
      ),
      2 * 16 * 16 * 27,
    ),
    (lambda z: tf.nn.conv3d(z(1, 4, 4, 4, 2), z(2, 2, 2, 2, 5), [1] * 5, "SAME"), 2 * 64 * 5 * 16),
    (
      lambda z: tf.nn.depthwise_conv2d(z(1, 8, 8, 3), z(3, 3, 3, 2), [1] * 4, "SAME"),
      2 * 64 * 6 * 9,
    ),
    (lambda z: z(2, 3) + 1.0, 0),
  ],
)
def test_flops_of_nodes(make, flops):
  with tf.Graph().as_default() as graph:
    make(lambda *shape: tf.raw_ops.Placeholder(dtype=tf.float32, shape=shape))
    assert sum(node_flops(n) for n in graph.get_operations()) == flops


def test_units():
  sizes = [0, 1023, 1024, 1536, 1023 * 2**20, 5 * 2**40]
  texts = ["0 B", "1023 B", "1 KiB", "1.5 KiB", "1023 MiB", "5 TiB"]
  assert [describe_text.format_bytes(n) for n in sizes] == texts
  assert describe_text.format_flops(3.2e12) == "3.2 TFLOP"


@pytest.mark.parametrize("name", ["layout.svg", "layout.png"])
def test_picture(tmp_path, name):
  pytest.importorskip("matplotlib")
  graph, mesh = new_mesh()
  mtf.get_variable(mesh, "w", [A, B])
  x = mtf.relu(mtf.zeros(mesh, [A, B, C]))
  report = describe(graph, "a:r,b:s,c:t", "r:2,s:2,t:2")
  for i, tensor in enumerate([None, "w", x, x.name]):
    path = tmp_path / f"{i}_{name}"
    report.save_picture(str(path), tensor=tensor)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") if name.endswith("png") else b"<svg" in data


def test_picture_names_the_devices_of_each_part(tmp_path, monkeypatch):
  drawn = []
  # `mtf.describe` is the function, so the module is reached by its name.
  module = sys.modules["mesh_tensorflow.planning.describe"]
  monkeypatch.setattr(module, "draw_layout", lambda *args: drawn.append(args))
  graph, mesh = new_mesh()
  mtf.get_variable(mesh, "w", [A, B])
  report = describe(graph, "b:s", "r:2,s:2")
  report.save_picture("w.svg")
  _, shape, slice_shape, parts, title = drawn[0]
  assert (shape.to_integer_list, slice_shape) == ([8, 4], [8, 2])
  assert parts == {(0, 0): [0, 2], (0, 2): [1, 3]}
  assert title == "w [a=8, b=4/s] on mesh r:2,s:2"


def test_picture_errors(monkeypatch):
  graph, mesh = new_mesh()
  mtf.get_variable(mesh, "weight", [A, B])
  report = describe(graph, "a:r", "r:2")
  with pytest.raises(GraphError, match="no tensor 'wieght'; did you mean 'weight'"):
    report.save_picture("x.svg", "wieght")
  with pytest.raises(UnsupportedError, match=r"\.svg, \.png, \.pdf"):
    report.save_picture("x.bmp")
  monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
  with pytest.raises(UnsupportedError, match="pip install matplotlib"):
    report.save_picture("x.svg")


def test_device_text():
  from mesh_tensorflow.planning.pictures import device_text

  assert device_text([3]) == "device 3"
  assert device_text(range(8)) == "devices 0-7"
  assert device_text([0, 4, 8]) == "devices 0, 4, 8"
  assert device_text(list(range(0, 512, 8))) == "devices 0, 8,\n..., 504 (64)"


def test_inputs_may_be_larger_than_this_host():
  """A plan makes no tensors: here a batch would be 64 TiB."""
  batch, width = mtf.Dimension("batch", 2**24), mtf.Dimension("width", 2**20)

  @mtf.function(mtf.MeshImpl("all:4", "batch:all"), [mtf.TensorSpec([batch, width])])
  def mean(x):
    return mtf.reduce_mean(mtf.square(x))

  assert mtf.describe(mean).memory.inputs == 2**44 * 4 // 4
