"""Graph, Mesh, Tensor, Operation and Lowering: what a program is, and how it is extended."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import GraphError, LayoutError, ShapeError

A, B = mtf.Dimension("a", 4), mtf.Dimension("b", 8)


@pytest.fixture
def graph():
  return mtf.Graph()


@pytest.fixture
def mesh(graph):
  return mtf.Mesh(graph, "m")


@pytest.fixture
def x(mesh):
  return mtf.import_tf_tensor(mesh, np.arange(32, dtype=np.float32).reshape(4, 8), [A, B])


def impl(shape="r:2", layout="a:r"):
  size = mtf.convert_to_shape(shape).size
  return mtf.placement_mesh_impl.PlacementMeshImpl(shape, layout, [""] * size)


def one_device():
  return mtf.placement_mesh_impl.PlacementMeshImpl(shape=[], layout={}, devices=[""])


class TestGraph:
  def test_starts_empty(self, graph):
    assert graph.operations == []
    assert graph.all_variables == []
    assert graph.trainable_variables == []
    assert graph.name_to_variable == {}

  def test_import_adds_one_operation(self, graph, x):
    assert graph.operations == [x.operation]
    assert graph.all_variables == []

  def test_variables_are_listed(self, graph, mesh):
    v = mtf.get_variable(mesh, "v", [A])
    w = mtf.get_variable(mesh, "w", [A], trainable=False)
    assert graph.all_variables == [v.operation, w.operation]
    assert graph.trainable_variables == [v.operation]

  @pytest.mark.parametrize(
    "asked,expected",
    [
      (["a", "a"], ["a", "a_1"]),
      (["a", "a", "a_1"], ["a", "a_1", "a_1_1"]),
      (["a", "a_1", "a"], ["a", "a_1", "a_2"]),
      (["a", "A"], ["a", "A_1"]),
    ],
  )
  def test_unique_name(self, graph, asked, expected):
    assert [graph.unique_name(name) for name in asked] == expected

  def test_unique_name_without_marking(self, graph):
    assert graph.unique_name("a", mark_as_used=False) == "a"
    assert graph.unique_name("a") == "a"
    assert graph.unique_name("a", mark_as_used=False) == "a_1"
    assert graph.unique_name("a") == "a_1"

  def test_unique_name_in_a_scope(self, graph):
    with mtf.variable_scope("encoder"):
      assert [graph.unique_name("a") for _ in range(2)] == ["encoder/a", "encoder/a_1"]

  def test_repr_has_a_line_for_each_operation(self, graph, x):
    mtf.reshape(x, [("c", 32)])
    lines = repr(graph).splitlines()
    assert [line.split("[")[0] for line in lines] == ["ImportOperation", "ReshapeOperation"]

  def test_capture_operations(self, graph, x):
    y, operations = graph.capture_operations(lambda: mtf.relu(x) + 1.0)
    assert operations == graph.operations[1:]
    assert operations[-1].outputs == [y]

  def test_make_variables_untrainable(self, graph, mesh):
    v = mtf.get_variable(mesh, "v", [A]).operation
    w = mtf.get_variable(mesh, "w", [A]).operation
    graph.make_variables_untrainable([v])
    assert graph.trainable_variables == [w]
    assert graph.all_variables == [v, w]
    assert not v.trainable

  def test_combine_assignments_takes_assignments_only(self, graph, x):
    with pytest.raises(GraphError):
      graph.combine_assignments([x.operation])

  def test_clone_operations(self, graph, mesh, x):
    (y, z), operations = graph.capture_operations(
      lambda: (lambda u: (u, mtf.relu(u)))(mtf.square(x))
    )
    other = mtf.ones(mesh, [A, B])
    clones, mapping = graph.clone_operations(operations, {x: other})
    assert len(clones) == 2
    assert graph.operations[-2:] == clones
    assert clones[0].inputs == [other]
    assert mapping[y] is clones[0].outputs[0]
    assert mapping[z].name == z.name
    lowering = mtf.Lowering(graph, {mesh: one_device()})
    np.testing.assert_array_equal(lowering.export_to_tf_tensor(mapping[z]), np.ones([4, 8]))

  def test_clone_leaves_variables_and_random_numbers(self, graph, mesh):
    def build():
      v = mtf.get_variable(mesh, "v", [A])
      return mtf.random_uniform(mesh, mtf.Shape([A])) + v

    y, operations = graph.capture_operations(build)
    clones, mapping = graph.clone_operations(operations, {})
    assert [type(op).__name__ for op in clones] == ["AddOperation"]
    assert mapping[y] is not y

  def test_clone_of_what_is_mapped(self, graph, x):
    y, operations = graph.capture_operations(lambda: mtf.relu(x))
    with pytest.raises(GraphError):
      graph.clone_operations(operations, {y: x})

  def test_rewrite_stack_variables_changes_nothing(self, graph, mesh):
    mtf.get_variable(mesh, "v", [A])
    before = list(graph.operations)
    graph.rewrite_stack_variables(mesh_to_impl={mesh: impl()})
    assert graph.operations == before


class TestTensor:
  def test_properties(self, graph, mesh, x):
    assert x.shape == mtf.Shape([A, B])
    assert x.size == 32
    assert x.dtype == tf.float32
    assert x.mesh is mesh
    assert x.graph is graph is mesh.graph
    assert x.operation.outputs == [x]
    assert x.name == "import:0"
    assert "import:0" in repr(x)
    assert "Shape[a=4, b=8]" in repr(x)

  def test_equality_is_identity(self, mesh):
    x, y = mtf.zeros(mesh, [A]), mtf.zeros(mesh, [A])
    assert x == x
    assert x != y
    assert len({x, y, x}) == 2

  def test_is_true(self, x):
    assert x

  @pytest.mark.parametrize(
    "fn",
    [lambda x: x**2, lambda x: x < 1, lambda x: x[0], len, list, abs, lambda x: x @ x],
  )
  def test_operators_that_do_not_exist(self, fn, x):
    with pytest.raises(TypeError):
      fn(x)

  @pytest.mark.parametrize(
    "fn",
    [
      lambda x, y: x + y,
      lambda x, y: x - y,
      lambda x, y: x * y,
      lambda x, y: x / y,
      lambda x, y: x // y,
      lambda x, y: x % y,
    ],
  )
  @pytest.mark.parametrize("scalar", [2, 2.5, np.float32(2.5), "tf"])
  def test_operators_with_a_scalar_on_either_side(self, fn, scalar, mesh, x):
    scalar = tf.constant(2.5) if scalar == "tf" else scalar
    value = np.arange(32, dtype=np.float32).reshape(4, 8) + 1
    shifted = x + 1.0
    ys = [fn(shifted, scalar), fn(scalar, shifted)]
    lowering = mtf.Lowering(mesh.graph, {mesh: impl()})
    plain = float(scalar)
    for y, expected in zip(ys, [fn(value, plain), fn(plain, value)]):
      np.testing.assert_allclose(lowering.export_to_tf_tensor(y), expected, rtol=1e-5)


class Doubled(mtf.Operation):
  """An operation that a user defines."""

  def __init__(self, x, name=None):
    super().__init__([x], name=name or "doubled")
    if x.shape.ndims != 2:
      raise ShapeError(f"{self.name}: two dimensions, please")
    self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

  def gradient(self, grad_ys):
    return [Doubled(grad_ys[0]).outputs[0]]

  def lower(self, lowering):
    mesh_impl = lowering.mesh_impl(self)
    y = mesh_impl.slicewise(lambda t: t + t, lowering.tensors[self.inputs[0]])
    lowering.set_tensor_lowering(self.outputs[0], y)


class RowSum(mtf.Operation):
  """A user's operation with a collective."""

  def __init__(self, x, dim):
    super().__init__([x], name="row_sum")
    self._dim = dim
    self._outputs = [mtf.Tensor(self, x.shape - dim, x.dtype)]

  def lower(self, lowering):
    mesh_impl = lowering.mesh_impl(self)
    x = self.inputs[0]
    y = mesh_impl.slicewise(
      lambda t: tf.reduce_sum(t, x.shape.dims.index(self._dim)), lowering.tensors[x]
    )
    axis = mesh_impl.tensor_dimension_to_mesh_axis(self._dim)
    if axis is not None:
      counter = lambda: lowering.add_counter("row_sum", 1)  # noqa: E731
      y = mtf.LazyAllreduceSum(mesh_impl, y, [axis], counter)
    lowering.set_tensor_lowering(self.outputs[0], y)


class RowsCounted(mtf.Operation):
  """An operation as programs of the TF1 library write it: lists of dimensions for shapes."""

  def __init__(self, x):
    super().__init__([x], name="rows_counted")
    self._outputs = [mtf.Tensor(self, mtf.Shape(x.shape[:-1]), x.dtype)]
    self._splittable_dims, self._unsplittable_dims = self._initialize_all_dimensions_as_splittable()

  def lower(self, lowering):
    mesh_impl = lowering.mesh_impl(self)
    x = self.inputs[0]
    sizes = mesh_impl.slice_shape(x.shape[:-1])
    assert list(mesh_impl.tensor_layout(x.shape[:-1])) == list(
      mesh_impl.tensor_layout(self.outputs[0])
    )
    for pnum in range(mesh_impl.size):
      assert mesh_impl.slice_begin(x.shape[:-1], pnum) == mesh_impl.slice_begin(x.shape, pnum)[:-1]
    assert mesh_impl.slice_size(x.shape[:-1]) == np.prod(sizes)
    y = mesh_impl.slicewise(
      lambda t: tf.fill(sizes, tf.cast(tf.shape(t)[-1], t.dtype)), lowering.tensors[x]
    )
    lowering.set_tensor_lowering(self.outputs[0], y)


class WrongSlices(mtf.Operation):
  """An operation that breaks its promise."""

  def __init__(self, x):
    super().__init__([x], name="wrong_slices")
    self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

  def lower(self, lowering):
    y = lowering.mesh_impl(self).slicewise(lambda t: t[:1], lowering.tensors[self.inputs[0]])
    lowering.set_tensor_lowering(self.outputs[0], y)


class TestOperation:
  def test_defined_by_a_user(self, graph, mesh, x):
    y = Doubled(x).outputs[0]
    dx = mtf.gradients([mtf.reduce_sum(y)], [x])[0]
    lowering = mtf.Lowering(graph, {mesh: impl()})
    np.testing.assert_array_equal(lowering.export_to_tf_tensor(y)[1, 0], 16)
    np.testing.assert_array_equal(lowering.export_to_tf_tensor(dx), np.full([4, 8], 2))

  @pytest.mark.parametrize("kind", ["placement", "simd"])
  def test_as_the_tf1_library_has_them(self, kind, cpu_devices):
    implementation = mtf.SimdMeshImpl if kind == "simd" else mtf.PlacementMeshImpl
    mesh_impl = implementation("rows:2", "a:rows", cpu_devices[:2])

    def program():
      graph = mtf.Graph()
      x = mtf.ones(mtf.Mesh(graph, "mesh"), mtf.Shape([A, B]))
      operation = RowsCounted(x)
      assert operation.splittable_dims == {"a", "b"}
      assert operation.unsplittable_dims == frozenset()
      return mtf.Lowering(graph, {x.mesh: mesh_impl}).export_to_tf_tensor(operation.outputs[0])

    for value in mesh_impl.run_per_device(program, []):
      np.testing.assert_array_equal(value, [8.0] * 4)

  def test_lists_of_dimensions_are_shapes_of_a_mesh_implementation(self, cpu_devices):
    mesh_impl = mtf.PlacementMeshImpl("rows:2", "a:rows", cpu_devices[:2])
    value = np.arange(32.0).reshape(4, 8)
    slices = mesh_impl.make_slices(tf.constant(value), [A, B])
    assert [s.shape.as_list() for s in slices] == [[2, 8], [2, 8]]
    np.testing.assert_array_equal(mesh_impl.combine_slices(slices, [A, B]), value)
    laid_out = mesh_impl.LaidOutTensor.from_tensor_list(slices)
    wide = mesh_impl.broadcast_impl(laid_out, [A, B], [mtf.Dimension("c", 3), A, B])
    assert wide.slice_shape == [3, 2, 8]
    with pytest.raises(ShapeError, match="None"):
      mesh_impl.slice_shape(None)

  def test_with_a_pending_sum(self, graph, mesh, x):
    y = RowSum(x, A).outputs[0]
    total = y + y
    lowering = mtf.Lowering(graph, {mesh: impl()})
    expected = 2 * np.arange(32).reshape(4, 8).sum(0)
    np.testing.assert_array_equal(lowering.export_to_tf_tensor(total), expected)
    assert lowering.counters.count(("row_sum", 1)) == 1

  def test_slices_are_checked(self, graph, mesh, x):
    WrongSlices(x)
    with pytest.raises(LayoutError, match=r"wrong_slices.*\[1, 8\].*\[2, 8\]"):
      mtf.Lowering(graph, {mesh: impl()})

  def test_enters_the_graph_after_its_constructor(self, graph, mesh, x):
    with pytest.raises(ShapeError):
      Doubled(mtf.reduce_sum(x))
    assert not any(isinstance(op, Doubled) for op in graph.operations)
    mtf.Lowering(graph, {mesh: impl()})

  def test_lists_are_copies(self, x):
    op = mtf.relu(x).operation
    op.inputs.clear()
    op.outputs.clear()
    assert op.inputs == [x]
    assert len(op.outputs) == 1

  def test_needs_a_mesh_or_an_input(self):
    with pytest.raises(GraphError):
      mtf.Operation([], name="nothing")

  def test_needs_a_name(self, x):
    with pytest.raises(AssertionError):
      mtf.Operation([x])

  def test_an_unusable_tensor(self, x):
    x.usable = False
    with pytest.raises(GraphError, match="import:0"):
      mtf.relu(x)

  def test_no_gradient_by_default(self, x):
    with pytest.raises(NotImplementedError):
      mtf.Operation([x], name="base").gradient([x])

  def test_has_gradient(self, mesh, x):
    assert mtf.relu(x).operation.has_gradient
    assert not mtf.to_int32(x).operation.has_gradient
    assert not mtf.stop_gradient(x).operation.has_gradient

  def test_splittability_of_a_base_operation(self, x):
    op = mtf.Operation([x], name="base")
    assert op.splittable_dims == {"a", "b"}
    assert op.unsplittable_dims == frozenset()
    assert op._initialize_splittable_and_unsplittable_dims("unsplittable", ["a"]) == ({"a"}, {"b"})
    with pytest.raises(ValueError):
      op._initialize_splittable_and_unsplittable_dims("sometimes")


def _splittability():
  """name: (build, splittable, unsplittable)."""
  return {
    "slicewise": (
      lambda x: mtf.slicewise(tf.identity, [x], splittable_dims=[A]), {"a"}, {"b"}),
    "cwise": (lambda x: mtf.relu(x), {"a", "b"}, set()),
    "scalar_add": (lambda x: x + 1.0, {"a", "b"}, set()),
    "add": (lambda x: x + x, {"a", "b"}, set()),
    "less": (lambda x: mtf.less(x, x), {"a", "b"}, set()),
    "broadcast": (lambda x: mtf.broadcast(x, [A, B, ("c", 2)]), {"a", "b", "c"}, set()),
    "reduce": (lambda x: mtf.reduce_sum(x), {"a", "b"}, set()),
    "concat": (lambda x: mtf.concat([x, x], "a"), {"b"}, {"a"}),
    "split": (lambda x: mtf.split(x, A, 2)[0], {"b"}, {"a"}),
    "stack": (lambda x: mtf.stack([x, x], "c"), {"a", "b"}, {"c"}),
    "unstack": (lambda x: mtf.unstack(x, A)[0], {"b"}, {"a"}),
    "slice": (lambda x: mtf.slice(x, 0, 2, "a"), {"b"}, {"a"}),
    "pad": (lambda x: mtf.pad(x, [1, 1], "a"), {"b"}, {"a"}),
    "shift": (lambda x: mtf.shift(x, 1, A, True), {"a", "b"}, set()),
    "einsum": (lambda x: mtf.einsum([x, x], [A]), {"a", "b"}, set()),
    "reshape": (lambda x: mtf.reshape(x, [("c", 32)]), {"a", "b", "c"}, set()),
    "one_hot": (lambda x: mtf.one_hot(mtf.to_int32(x), ("c", 2)), {"a", "b", "c"}, set()),
    "constant": (lambda x: mtf.zeros_like(x), {"a", "b"}, set()),
    "random": (lambda x: mtf.random_uniform(x.mesh, x.shape), {"a", "b"}, set()),
    "variable": (lambda x: mtf.get_variable(x.mesh, "v", [A]), {"a"}, set()),
    "stop_gradient": (lambda x: mtf.stop_gradient(x), {"a", "b"}, set()),
    "top_k": (lambda x: mtf.top_k(x, B, ("k", 6))[0], {"a", "b"}, {"k"}),
    "import_laid_out": (
      lambda x: mtf.import_laid_out_tensor(
        x.mesh, mtf.placement_mesh_impl.PlacementMeshImpl.LaidOutTensor([tf.zeros([4])]),
        mtf.Shape([A])),
      set(), {"a"}),
  }  # fmt: skip


@pytest.mark.parametrize("name", _splittability())
def test_splittability(name, x):
  build, splittable, unsplittable = _splittability()[name]
  op = build(x).operation
  assert op.splittable_dims == splittable
  assert op.unsplittable_dims == unsplittable


class TestLowering:
  def test_import_and_export(self, graph, mesh):
    value = [[1, 2], [3, 4]]
    x = mtf.import_tf_tensor(mesh, tf.constant(value), [("c", 2), ("d", 2)])
    lowering = mtf.Lowering(graph, {mesh: one_device()})
    assert lowering.export_to_tf_tensor(x).numpy().tolist() == value

  def test_import_and_export_in_a_function(self):
    @tf.function
    def identity(value):
      graph = mtf.Graph()
      mesh = mtf.Mesh(graph, "m")
      x = mtf.import_tf_tensor(mesh, value, [("c", 2), ("d", 2)])
      return mtf.Lowering(graph, {mesh: one_device()}).export_to_tf_tensor(x)

    assert identity(tf.constant([[1, 2], [3, 4]])).numpy().tolist() == [[1, 2], [3, 4]]

  def test_copies_without_variables(self, graph, mesh, x):
    lowering = mtf.Lowering(graph, {mesh: impl()})
    lowering.copy_masters_to_slices()
    lowering.copy_slices_to_masters()

  def test_a_graph_can_be_lowered_again(self, graph, mesh, x):
    y = mtf.reduce_sum(x)
    for mesh_impl in (one_device(), impl(), impl("r:2,s:4", "a:r,b:s")):
      lowering = mtf.Lowering(graph, {mesh: mesh_impl})
      assert lowering.export_to_tf_tensor(y).numpy() == 496

  def test_tensors(self, graph, mesh, x):
    lowering = mtf.Lowering(graph, {mesh: impl()})
    laid_out = lowering.tensors[x].to_laid_out_tensor()
    assert [t.shape for t in laid_out.all_slices] == [(2, 8)] * 2
    assert laid_out.slice_shape == [2, 8]
    assert lowering.laid_out_size(x) == 32
    assert lowering.mesh_impl(x) is lowering.mesh_impl(mesh)

  def test_counters(self, graph, mesh, x):
    mtf.relu(x)
    lowering = mtf.Lowering(graph, {mesh: impl()})
    assert ("output/ImportOperation", 32) in lowering.counters
    assert ("output_unique/SlicewiseOperation", 32) in lowering.counters
    with pytest.raises(AssertionError):
      lowering.add_counter("wrong", 1.5)

  def test_log_file(self, graph, mesh, tmp_path):
    mtf.get_variable(mesh, "encoder/kernel", [A, B])
    mtf.Lowering(graph, {mesh: impl()}, log_file=str(tmp_path / "log.txt"))
    text = (tmp_path / "log.txt").read_text()
    assert "encoder/kernel" in text
    assert "Trainable Variables" in text
    assert "Counters" in text

  def test_assignments_run_in_the_order_of_the_graph(self, graph, mesh):
    v = mtf.get_variable(mesh, "v", [A], initializer=tf.ones_initializer())
    mtf.assign_add(v, mtf.ones(mesh, [A]))
    middle = mtf.read_variable(v.operation)
    mtf.assign(v, middle * 10.0)
    after = mtf.read_variable(v.operation)
    mesh_impl = impl()
    lowering = mtf.Lowering(graph, {mesh: mesh_impl})
    read = [lowering.export_to_tf_tensor(t).numpy()[0] for t in (v, middle, after)]
    assert read == [1, 2, 20]
    np.testing.assert_array_equal(mesh_impl.variable_store["v"].numpy(), np.full([4], 20))

  def test_assign_through_a_cast(self, graph, mesh):
    v = mtf.get_variable(mesh, "v", [A], initializer=tf.zeros_initializer())
    op = mtf.assign(mtf.to_bfloat16(v), mtf.ones(mesh, [A], tf.bfloat16))
    assert op.variables == [v.operation]
    mesh_impl = impl()
    lowering = mtf.Lowering(graph, {mesh: mesh_impl})
    assert lowering.lowered_operation(op) is None  # It has run.
    np.testing.assert_array_equal(mesh_impl.variable_store["v"].numpy(), np.ones([4]))

  def test_variables_keep_their_values(self, mesh):
    mesh_impl = impl()
    for step in range(3):
      graph = mtf.Graph()
      mesh = mtf.Mesh(graph, "m")
      v = mtf.get_variable(mesh, "v", [A], initializer=tf.zeros_initializer())
      mtf.assign_add(v, mtf.ones(mesh, [A]))
      lowering = mtf.Lowering(graph, {mesh: mesh_impl})
      np.testing.assert_array_equal(lowering.export_to_tf_tensor(v), np.full([4], step))


class TestVariableDType:
  def test_defaults(self):
    dtype = mtf.VariableDType(tf.float32)
    assert (dtype.master_dtype, dtype.slice_dtype, dtype.activation_dtype) == (tf.float32,) * 3

  def test_components(self, mesh):
    v = mtf.get_variable(
      mesh, "v", [A], dtype=tf.float32, slice_dtype=tf.bfloat16, activation_dtype=tf.float16
    )
    op = v.operation
    assert v.dtype == tf.float16
    assert (op.master_dtype, op.slice_dtype, op.activation_dtype) == (
      tf.float32, tf.bfloat16, tf.float16)  # fmt: skip

  def test_a_variable_dtype_is_used_as_it_is(self, mesh):
    dtype = mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16)
    v = mtf.get_variable(mesh, "v", [A], dtype=dtype, activation_dtype=tf.float16)
    assert v.operation.dtype is dtype
    assert v.dtype == tf.bfloat16

  def test_none(self, mesh):
    with pytest.raises(ValueError):
      mtf.get_variable(mesh, "v", [A], dtype=None)
    v = mtf.get_variable(mesh, "v", [A], dtype=None, master_dtype=tf.bfloat16)
    assert v.dtype == tf.bfloat16

  def test_reuse_does_not_compare(self, mesh):
    v = mtf.get_variable(mesh, "v", [A])
    assert mtf.get_variable(mesh, "v", [B], dtype=tf.bfloat16) is v


class TestExports:
  """Names of the TF1 library that must be where they were."""

  def test_builtins(self):
    assert mtf.abs is mtf.mtf_abs
    assert mtf.pow is mtf.mtf_pow
    assert mtf.range is mtf.mtf_range
    assert mtf.slice is mtf.mtf_slice
    assert mtf.ops_with_redefined_builtins.abs is mtf.ops.mtf_abs
    assert not hasattr(mtf.ops, "range") or mtf.ops.range is not range

  @pytest.mark.parametrize(
    "name",
    """add add_n anonymize anonymous_shape argmax assign assign_add assign_sub assign_slice
    assign_add_slice assign_sub_slice binary_arguments_to_tensors binary_op_with_broadcasting
    binary_reduction_fn reduction_fn broadcast cast combined_dimension
    compatible_lazy_allreduce_sums concat constant convert_args_to_laid_out_tensors
    convert_to_dimension convert_to_layout_rules convert_to_shape cos exp identity log logical_not
    negative reciprocal relu rsqrt sigmoid sign sin sqrt square tanh cumsum custom_gradient cwise
    depend divide dropout dynamic_shift einsum elu gelu selu softplus squared_relu swish equal
    floordiv greater greater_equal less less_equal logical_and logical_or mod not_equal gather
    get_variable gradients halo_exchange left_halo_exchange import_fully_replicated
    import_laid_out_tensor import_tf_tensor is_subsequence leaky_relu list_product log_softmax
    reduce_logsumexp softmax log_variable_sizes matmul maximum minimum multiply
    nth_largest_element nth_smallest_element one_hot ones zeros ones_like zeros_like pad parallel
    pnum_to_group pnum_to_processor_coordinates pnum_to_processor_coordinates_nd
    pool_tensor_1d pretty_print_counters Print processor_coordinates_to_pnum
    processor_coordinates_to_pnum_map_nd processor_groups random_normal random_uniform
    read_variable recompute_grad reduce_all reduce_any reduce_max reduce_mean reduce_min
    reduce_sum reduce_first rename_dimension replace_dimensions reshape sample_with_temperature
    scalar_summary serialize_training_step shift slicewise split stack stop_gradient
    stride_tensor_1d sub tensor_dim_to_mesh_dim_size tensor_dim_to_size_per_split to_bfloat16
    to_float to_int32 top_1 top_k transpose transpose_list_of_lists unstack verify_no_new_dims
    where while_loop Dimension Shape LayoutRules TensorLayout Graph Mesh MeshImpl
    LazyAllreduceSum LazyLaidOutTensor Lowering Tensor Operation SlicewiseOperation
    GenericGradOperation ScalarMultiplyOperation ScalarAddOperation BinaryOpWithBroadcasting
    AddOperation MinMaxOperation BroadcastOperation ReduceOperation EinsumOperation
    ReshapeOperation ConcatOperation SplitOperation StackOperation UnstackOperation
    SliceOperation PadOperation ShiftOperation OneHotOperation TopKOperation RangeOperation
    Constant ImportOperation ImportLaidOutTensorOperation RandomOperation VariableDType Variable
    ReadVariable Assign Depend StopGradient PrintOperation ScalarSummaryOperation
    WhileLoopOperation CustomGradientOperation layers optimize placement_mesh_impl
    simd_mesh_impl""".split(),
  )
  def test_name(self, name):
    assert hasattr(mtf, name)


def test_scalars_of_tensorflow_and_numpy_on_the_left(mesh):
  x = mtf.ones(mesh, [mtf.Dimension("a", 4)])
  assert not tf.is_tensor(x)
  for scalar in (np.float32(2), tf.constant(2.0), tf.Variable(2.0), 2.0):
    for y in (scalar * x, scalar + x, scalar - x, scalar / x):
      assert isinstance(y, mtf.Tensor)
      assert y.shape == x.shape


def test_a_tensor_is_true_a_key_and_no_sequence_of_tf_nest(mesh):
  x = mtf.ones(mesh, [mtf.Dimension("a", 4)])
  assert x
  assert {x: 1}[x] == 1
  assert x in [x]
  assert tf.nest.flatten({"x": [x]}) == [x]
