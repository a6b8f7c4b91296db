"""Every wrong use gets one typed error whose text names what is wrong."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from tests.conformance.framework import Layout, make_impl

A, B, C = mtf.Dimension("a", 4), mtf.Dimension("b", 8), mtf.Dimension("c", 12)


@pytest.fixture
def mesh():
  return mtf.Mesh(mtf.Graph(), "errors")


@pytest.fixture
def x(mesh):
  return mtf.import_tf_tensor(mesh, np.ones([4, 8], np.float32), [A, B], name="x")


@pytest.fixture
def y(mesh):
  return mtf.import_tf_tensor(mesh, np.ones([8, 12], np.float32), [B, C], name="y")


def _placement(shape, layout):
  size = mtf.convert_to_shape(shape).size
  return mtf.placement_mesh_impl.PlacementMeshImpl(shape, layout, [""] * size)


def _names(error, *words):
  """The text has every word, and the graph is left without the failed operation."""
  text = str(error.value)
  assert isinstance(error.value, errors.MeshError)
  missing = [w for w in words if w not in text]
  assert not missing, f"{missing} not in: {text}"


# -------------------------------------------------------------------- layouts


def _lower(mesh, shape, layout):
  return mtf.Lowering(mesh.graph, {mesh: _placement(shape, layout)})


def test_indivisible_dimension(mesh, x):
  with pytest.raises(errors.LayoutError) as e:
    _lower(mesh, "rows:3", "b:rows")
  _names(e, "ImportOperation", "x", "b:8", "rows:3", "does not divide")


def test_indivisible_dimension_of_a_variable(mesh):
  mtf.get_variable(mesh, "encoder/q", [mtf.Dimension("heads", 8)])
  with pytest.raises(errors.LayoutError) as e:
    _lower(mesh, "model:3", "heads:model")
  _names(e, "heads:8", "encoder/q", "model:3")


def test_indivisible_dimension_says_what_is_legal(mesh, x):
  with pytest.raises(errors.LayoutError) as e:
    _lower(mesh, "rows:3", "b:rows")
  _names(e, "1, 2, 4, 8", "9")


def test_two_dimensions_on_one_mesh_axis(mesh, x):
  with pytest.raises(errors.LayoutError) as e:
    _lower(mesh, "rows:2", "a:rows,b:rows")
  _names(e, "ImportOperation", "x", "a:4", "b:8", "rows:2")


def test_two_dimensions_of_a_product_on_one_mesh_axis(mesh, x, y):
  mtf.einsum([x, y], [A, C], name="logits")
  with pytest.raises(errors.LayoutError) as e:
    _lower(mesh, "rows:2", "a:rows,c:rows")
  _names(e, "EinsumOperation", "logits", "a:4", "c:12", "rows:2")


def test_summed_dimension_on_the_axis_of_a_kept_one(mesh, x, y):
  mtf.einsum([mtf.rename_dimension(x, "a", "d"), y], [mtf.Dimension("d", 4)], name="summed")
  with pytest.raises(errors.LayoutError) as e:
    _lower(mesh, "rows:2", "d:rows,c:rows")
  _names(e, "EinsumOperation", "summed", "rows:2")


def test_two_rules_for_one_dimension(mesh, x):
  with pytest.raises(errors.LayoutError) as e:
    _lower(mesh, "rows:2,cols:2", "a:rows,a:cols")
  _names(e, "a", "rows", "cols")


def test_nothing_is_lowered_if_a_later_operation_is_not_legal(mesh, x):
  assigned = mtf.get_variable(mesh, "v", [A, B], initializer=tf.zeros_initializer())
  mtf.assign(assigned, x)
  mtf.slice(x, 0, 2, "b")
  impl = _placement("rows:2", "b:rows")
  with pytest.raises(errors.LayoutError):
    mtf.Lowering(mesh.graph, {mesh: impl})
  assert len(impl.variable_store) == 0


UNSPLIT = {
  "concat": lambda x: mtf.concat([x, x], "b"),
  "split": lambda x: mtf.split(x, B, 2),
  "stack": lambda x: mtf.stack([mtf.rename_dimension(x, "b", "d")] * 8, "b"),
  "unstack": lambda x: mtf.unstack(x, B),
  "slice": lambda x: mtf.slice(x, 0, 4, "b"),
  "pad": lambda x: mtf.pad(x, [4, 4], "b"),
  "top_k": lambda x: mtf.top_k(mtf.rename_dimension(x, "b", "d"), ("d", 8), B),
  "slicewise": lambda x: mtf.slicewise(tf.sort, [x], splittable_dims=[A]),
  "halo_exchange": lambda x: mtf.halo_exchange(x, A, B, 1),
}


@pytest.mark.parametrize("name", UNSPLIT)
def test_dimension_that_must_not_be_split(name, mesh, x):
  UNSPLIT[name](x)
  with pytest.raises(errors.LayoutError) as e:
    _lower(mesh, "rows:2", "b:rows")
  _names(e, "b:8", "rows:2", "rename")


def test_mesh_larger_than_the_devices():
  with pytest.raises(errors.MeshShapeError) as e:
    mtf.placement_mesh_impl.PlacementMeshImpl("rows:2,cols:4", "", [""] * 4)
  _names(e, "rows:2", "cols:4", "8", "4")


def test_simd_mesh_larger_than_the_devices(cpu_devices):
  with pytest.raises(errors.MeshShapeError) as e:
    mtf.simd_mesh_impl.SimdMeshImpl("rows:2,cols:8", "")
  _names(e, "rows:2", "cols:8", "16", str(len(cpu_devices)))


def test_rule_for_an_unknown_mesh_dimension_is_logged(mesh, x, caplog):
  with caplog.at_level(logging.INFO, logger="mesh_tensorflow"):
    impl = _placement("rows:2", "a:rows,b:colls")
  assert "b:colls" in caplog.text
  assert impl.layout_rules.check_mesh(impl.shape) == [("b", "colls")]
  assert impl.slice_shape(x.shape) == [2, 8]


def test_mesh_without_implementation(mesh, x):
  with pytest.raises(errors.GraphError) as e:
    mtf.Lowering(mesh.graph, {})
  _names(e, "errors")


def test_export_of_what_was_not_lowered(mesh, x):
  lowering = _lower(mesh, "rows:2", "")
  late = x + 1.0
  with pytest.raises(errors.GraphError) as e:
    lowering.export_to_tf_tensor(late)
  _names(e, late.name)


# --------------------------------------------------------------------- shapes


def test_add_of_two_sizes(mesh, x):
  other = mtf.ones(mesh, [mtf.Dimension("b", 6)])
  with pytest.raises(errors.ShapeError) as e:
    x + other
  _names(e, "add", "b=8", "b=6", "x")


def test_einsum_of_two_sizes(mesh, x):
  other = mtf.ones(mesh, [mtf.Dimension("b", 6), C])
  with pytest.raises(errors.ShapeError) as e:
    mtf.einsum([x, other], [A, C], name="product")
  _names(e, "product", "dimension b", "8", "6")


def test_add_with_an_output_shape_without_a_dimension(x):
  with pytest.raises(errors.ShapeError) as e:
    mtf.add(x, x, output_shape=[A])
  _names(e, "add", "b=8")


def test_add_with_a_new_output_dimension(x):
  with pytest.raises(errors.ShapeError) as e:
    mtf.add(x, x, output_shape=[A, B, C])
  _names(e, "add", "c=12")


def test_reshape_of_another_size(x):
  with pytest.raises(errors.ShapeError) as e:
    mtf.reshape(x, [A, C])
  _names(e, "reshape", "x", "32", "48")


def test_transpose_to_other_dimensions(x):
  with pytest.raises(errors.ShapeError) as e:
    mtf.transpose(x, [B, C])
  _names(e, "transpose", "x", "c=12")


def test_broadcast_without_a_dimension(x):
  with pytest.raises(errors.ShapeError) as e:
    mtf.broadcast(x, [A, C])
  _names(e, "broadcast", "x", "b=8")


@pytest.mark.parametrize(
  "fn",
  [
    lambda x: mtf.reduce_sum(x, reduced_dim=C),
    lambda x: mtf.reduce_mean(x, reduced_dim=C),
    lambda x: mtf.reduce_max(x, reduced_dim=C),
    lambda x: mtf.softmax(x, C),
    lambda x: mtf.reduce_logsumexp(x, C),
    lambda x: mtf.argmax(x, C),
    lambda x: mtf.top_k(x, C, mtf.Dimension("k", 6)),
    lambda x: mtf.cumsum(x, C),
    lambda x: mtf.shift(x, 1, C, False),
    lambda x: mtf.split(x, C, 2),
    lambda x: mtf.unstack(x, C),
    lambda x: mtf.gather(x, 1, C),
  ],
)
def test_missing_dimension(fn, x):
  with pytest.raises((errors.DimensionError, errors.ShapeError)) as e:
    fn(x)
  _names(e, "c", "12", "a=4", "b=8")


@pytest.mark.parametrize(
  "fn",
  [
    lambda x: mtf.slice(x, 0, 2, "c"),
    lambda x: mtf.pad(x, [1, 1], "c"),
    lambda x: mtf.concat([x, x], "c"),
    lambda x: mtf.rename_dimension(x, "c", "d"),
  ],
)
def test_missing_dimension_name(fn, x):
  with pytest.raises(errors.DimensionError) as e:
    fn(x)
  _names(e, "'c'", "a=4", "b=8")


def test_reduction_to_a_dimension_that_is_not_there(x):
  with pytest.raises(errors.ShapeError) as e:
    mtf.reduce_sum(x, output_shape=[C])
  _names(e, "c=12", "x")


def test_contradicting_reduction(x):
  with pytest.raises(errors.ShapeError) as e:
    mtf.reduce_sum(x, output_shape=[B], reduced_dim=B)
  _names(e, "b=8", "x")


def test_contradicting_einsum(x, y):
  with pytest.raises(errors.ShapeError) as e:
    mtf.einsum([x, y], output_shape=[A], reduced_dims=[B])
  _names(e, "einsum", "a=4")


def test_einsum_of_nothing():
  with pytest.raises(errors.MeshError):
    mtf.einsum([], output_shape=[A])


def test_einsum_reduced_dims_must_be_dimensions(x):
  with pytest.raises(errors.DimensionError):
    mtf.einsum([x], reduced_dims=[("a", 4)])


def test_dimension_twice():
  with pytest.raises(errors.DimensionError) as e:
    mtf.Shape([A, B, A])
  _names(e, "a=4")


def test_rename_to_a_name_that_is_there(x):
  square = mtf.reshape(x, [A, mtf.Dimension("d", 2), mtf.Dimension("e", 4)])
  with pytest.raises(errors.DimensionError) as e:
    mtf.rename_dimension(square, "e", "a")
  _names(e, "a=4")


@pytest.mark.parametrize(
  "fn",
  [
    lambda x, y: mtf.concat([x, y], "b"),
    lambda x, y: mtf.stack([x, y], "d"),
    lambda x, y: mtf.split(x, B, 3),
    lambda x, y: mtf.split(x, B, [3, 4]),
    lambda x, y: mtf.slice(x, 6, 4, "b"),
    lambda x, y: mtf.pad(x, [1, 2, 3], "b"),
    lambda x, y: mtf.pool_tensor_1d(x, B, pool_size=3),
    lambda x, y: mtf.top_k(x, B, mtf.Dimension("k", 9)),
    lambda x, y: mtf.nth_largest_element(x, 8, B),
    lambda x, y: mtf.dynamic_shift(x, mtf.cast(y, tf.int32), B, True),
  ],
)
def test_sizes_that_do_not_fit(fn, x, y):
  before = len(x.graph.operations)
  with pytest.raises(errors.ShapeError) as e:
    fn(x, mtf.identity(y))
  _names(e, "8")
  half_built = [op for op in x.graph.operations[before:] if not op.outputs]
  assert not half_built


def test_import_of_another_shape(mesh):
  with pytest.raises(errors.ShapeError) as e:
    mtf.import_tf_tensor(mesh, np.ones([4, 6]), [A, B])
  _names(e, "(4, 6)", "a=4, b=8")


def test_import_without_names(mesh):
  with pytest.raises(errors.ShapeError) as e:
    mtf.import_tf_tensor(mesh, np.ones([4, 8]))
  _names(e, "(4, 8)")


def test_constant_of_another_size(mesh):
  with pytest.raises(errors.ShapeError) as e:
    mtf.constant(mesh, [1, 2, 3], shape=[A])
  _names(e, "3", "a=4")


# --------------------------------------------------------------------- dtypes


@pytest.mark.parametrize(
  "fn",
  [
    lambda x, i: x + i,
    lambda x, i: x - i,
    lambda x, i: x * i,
    lambda x, i: mtf.einsum([x, i], [A]),
    lambda x, i: mtf.maximum(x, i),
    lambda x, i: mtf.less(x, i),
    lambda x, i: mtf.concat([x, i], "a"),
    lambda x, i: mtf.where(mtf.greater(x, 0.0), x, i),
  ],
)
def test_dtypes_differ(fn, mesh, x):
  integers = mtf.ones(mesh, [A, B], tf.int32)
  with pytest.raises(errors.DTypeError) as e:
    fn(x, integers)
  _names(e, "float32", "int32")


@pytest.mark.parametrize(
  "fn",
  [
    lambda i: i + 1.5,
    lambda i: i * 2.0,
    lambda i: i / 2,
    lambda i: mtf.reduce_mean(i),
    lambda i: i / i,
  ],
)
def test_float_with_an_integer_tensor(fn, mesh):
  with pytest.raises(errors.DTypeError) as e:
    fn(mtf.ones(mesh, [A], tf.int32))
  _names(e, "int32")


def test_one_hot_of_floats(x):
  with pytest.raises(errors.DTypeError) as e:
    mtf.one_hot(x, C)
  _names(e, "one_hot", "float32")


def test_gather_with_float_indices(x, y):
  with pytest.raises(errors.DTypeError) as e:
    mtf.gather(y, x, C)
  _names(e, "gather", "float32")


def test_array_as_a_scalar(x):
  with pytest.raises(errors.MeshError) as e:
    x + np.ones([8])
  _names(e, "import_tf_tensor")


# ------------------------------------------------------------ graphs, gradients


def test_tensor_of_another_graph(x):
  other = mtf.import_tf_tensor(mtf.Mesh(mtf.Graph(), "other"), np.ones([8], np.float32), [B])
  with pytest.raises(errors.GraphError) as e:
    x + other
  _names(e, "another graph", other.name)


def test_plain_tensor_in_an_einsum(x):
  with pytest.raises((errors.MeshError, AttributeError)):
    mtf.einsum([x, tf.ones([8])], [A])


def test_two_scalars():
  with pytest.raises(errors.GraphError):
    mtf.less(1.0, 2.0)


def test_gradient_of_what_has_none(x):
  y = mtf.mod(x, x)
  with pytest.raises(errors.GradientError) as e:
    mtf.gradients([y], [x])
  _names(e, "gradient")


def test_gradient_of_a_loop_that_was_to_have_none(mesh, x):
  i = mtf.constant(mesh, 0, dtype=tf.int32)
  y = mtf.while_loop(
    lambda i, v: mtf.less(i, 2), lambda i, v: [i + 1, v * v], [i, x], back_prop=False
  )[1]
  with pytest.raises(errors.GradientError) as e:
    mtf.gradients([y], [x])
  _names(e, "while_loop")


def test_gradient_of_integers(mesh, x):
  with pytest.raises(errors.GradientError) as e:
    mtf.gradients([mtf.to_int32(x)], [x])
  _names(e, "int32")


def test_tensor_inside_a_recomputed_function(x):
  inside = []

  def fn(v):
    inside.append(mtf.square(v))
    return inside[0] + 1.0

  mtf.recompute_grad(fn, [x])
  with pytest.raises(errors.GraphError) as e:
    inside[0] + 1.0
  _names(e, inside[0].name)


def test_dropout_needs_one_of_keep_prob_and_rate(x):
  with pytest.raises(errors.MeshError):
    mtf.dropout(x, True)
  with pytest.raises(errors.MeshError):
    mtf.dropout(x, True, keep_prob=0.5, rate=0.5)


def test_a_failed_operation_is_not_in_the_graph(mesh, x):
  before = list(mesh.graph.operations)
  with pytest.raises(errors.ShapeError):
    mtf.reshape(x, [A])
  with pytest.raises(errors.DimensionError):
    mtf.concat([x, x], "z")
  assert mesh.graph.operations == before


# ------------------------------------------------------------------ variables


def test_variable_of_another_shape(mesh):
  impl = _placement("rows:2", "")
  mtf.get_variable(mesh, "v", [A])
  mtf.Lowering(mesh.graph, {mesh: impl})
  again = mtf.Mesh(mtf.Graph(), "again")
  mtf.get_variable(again, "v", [B])
  with pytest.raises(errors.VariableError) as e:
    mtf.Lowering(again.graph, {again: impl})
  _names(e, "v", "a=4", "b=8")


def test_variable_of_another_dtype(mesh):
  impl = _placement("rows:2", "")
  mtf.get_variable(mesh, "v", [A])
  mtf.Lowering(mesh.graph, {mesh: impl})
  again = mtf.Mesh(mtf.Graph(), "again")
  mtf.get_variable(again, "v", [A], dtype=tf.bfloat16)
  with pytest.raises(errors.VariableError) as e:
    mtf.Lowering(again.graph, {again: impl})
  _names(e, "v", "float32", "bfloat16")


def test_variable_dtype_as_text(mesh):
  with pytest.raises(errors.DTypeError) as e:
    mtf.get_variable(mesh, "v", [A], dtype="float32")
  _names(e, "v", "float32")


def test_unknown_variable():
  with pytest.raises(errors.VariableError) as e:
    _placement("rows:2", "").variable_store["nothing"]
  _names(e, "nothing")


def test_assign_of_another_shape(mesh):
  v = mtf.get_variable(mesh, "v", [A])
  with pytest.raises(errors.ShapeError) as e:
    mtf.assign(v, mtf.ones(mesh, [B]))
  _names(e, "assign", "v", "a=4", "b=8")


def test_assign_to_what_is_no_variable(x):
  with pytest.raises(errors.VariableError) as e:
    mtf.assign(x, x)
  _names(e, x.name)


def test_custom_gradient_may_not_create_variables(mesh, x):
  def grad_fn(explicit_inputs, all_inputs, forward_operations, outputs, output_grads):
    return [mtf.get_variable(mesh, "w", [A, B])]

  y = mtf.custom_gradient(mtf.square, grad_fn, [x])
  with pytest.raises(errors.MeshError) as e:
    mtf.gradients([y], [x])
  _names(e, "w")


# ----------------------------------------------------------------- while loops


def test_loop_body_of_another_shape(mesh, x):
  with pytest.raises(errors.ShapeError) as e:
    mtf.while_loop(lambda v: mtf.less(mtf.reduce_sum(v), 1.0),
                   lambda v: [mtf.reduce_sum(v, reduced_dim=A)], [x])  # fmt: skip
  _names(e, "while_loop", "a=4")


def test_loop_body_with_too_few_outputs(mesh, x):
  with pytest.raises(errors.MeshError) as e:
    mtf.while_loop(lambda v, w: mtf.less(mtf.reduce_sum(v), 1.0), lambda v, w: [v], [x, x])
  _names(e, "while_loop")


# ---------------------------------------------------------------- mtf.function


def test_function_argument_of_another_shape():
  @mtf.function(_placement("rows:2", "a:rows"), [mtf.TensorSpec([A, B])])
  def double(x):
    return x + x

  with pytest.raises(errors.ShapeError) as e:
    double(np.ones([4, 6], np.float32))
  _names(e, "double", "argument 0", "(4, 6)", "b=8")


def test_function_with_too_many_arguments():
  @mtf.function(_placement("rows:2", "a:rows"), [mtf.TensorSpec([A])])
  def double(x):
    return x + x

  with pytest.raises(errors.GraphError) as e:
    double(np.ones([4]), np.ones([4]))
  _names(e, "double", "1", "2")


def test_function_argument_of_another_dtype():
  @mtf.function(_placement("rows:2", "a:rows"), [mtf.TensorSpec([A], tf.int32)])
  def double(x):
    return x + x

  with pytest.raises(errors.DTypeError) as e:
    double(tf.ones([4]))
  _names(e, "double", "argument 0", "int32")


def test_function_without_names_for_dimensions():
  @mtf.function(_placement("rows:2", "a:rows"))
  def double(x):
    return x + x

  with pytest.raises(errors.GraphError) as e:
    double(np.ones([4]))
  _names(e, "double", "argument 0", "input_signature")


@pytest.mark.parametrize("kind", ["placement", "simd"])
def test_layout_of_a_function(kind, cpu_devices):
  impl = make_impl(kind, Layout("rows:2", "a:rows,b:rows"), cpu_devices)

  @mtf.function(impl, [mtf.TensorSpec([A, B], name="tokens")])
  def double(x):
    return x + x

  with pytest.raises(errors.LayoutError) as e:
    double(np.ones([4, 8], np.float32))
  _names(e, "tokens", "a:4", "b:8", "rows:2")


@pytest.mark.parametrize("kind", ["placement", "simd"])
def test_layout_inside_a_tf_function(kind, cpu_devices):
  """AutoGraph leaves the type of the error."""
  impl = make_impl(kind, Layout("rows:3", "b:rows"), cpu_devices)

  @tf.function
  def run(value):
    def program(value):
      mesh = mtf.Mesh(mtf.Graph(), "errors")
      x = mtf.import_tf_tensor(mesh, value, [A, B], name="x")
      return mtf.Lowering(mesh.graph, {mesh: impl}).export_to_tf_tensor(x)

    return impl.run(program, [value])

  with pytest.raises(errors.LayoutError) as e:
    run(tf.ones([4, 8]))
  _names(e, "x", "b:8", "rows:3")


def test_simd_lowering_outside_a_program(mesh, x, cpu_devices):
  impl = make_impl("simd", Layout("rows:2", "a:rows"), cpu_devices)
  with pytest.raises(errors.GraphError) as e:
    mtf.Lowering(mesh.graph, {mesh: impl})
  _names(e, "rows=2", "run")


@pytest.mark.parametrize("kind", ["placement", "simd"])
def test_error_in_an_eager_program_is_the_program_s(kind, cpu_devices):
  impl = make_impl(kind, Layout("rows:2", "a:rows"), cpu_devices)

  def program():
    mesh = mtf.Mesh(mtf.Graph(), "errors")
    return mtf.reshape(mtf.ones(mesh, [A]), [B])

  with pytest.raises(errors.ShapeError) as e:
    impl.run(program)
  _names(e, "reshape", "a=4", "b=8")
