"""Convolutions and pooling: sizes, names, counters, errors, second derivatives, op counts."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import (
  DimensionError,
  DTypeError,
  GraphError,
  LayoutError,
  ShapeError,
  SizeError,
)
from mesh_tensorflow.operations.convolution_slices import Window
from mesh_tensorflow.planning.describe import describe
from tests.operations.comparing import placement, rand, run

X2, W2, T2 = "b:2 h:5 w:6 i:2", "fh:3 fw:2 i:2 o:4", "fh:3 fw:2 o:4 i:2"
X3, W3 = "b:2 d:2 h:4 w:6 i:2", "fd:1 fh:2 fw:2 i:2 o:4"
T3 = "fd:1 fh:2 fw:2 o:4 i:2"
Y2, Y3 = "b:2 h:5 w:6 o:4", "b:2 d:2 h:4 w:6 o:4"


@pytest.fixture
def mesh():
  return mtf.Mesh(mtf.Graph(), "m")


def tensor(mesh, dims, dtype=tf.float32):
  return mtf.zeros(mesh, dims, dtype)


def imported(mesh, dims, name):
  shape = mtf.convert_to_shape(dims)
  return mtf.import_tf_tensor(mesh, rand(*shape.to_integer_list), shape, name=name)


def says(error, *words):
  missing = [w for w in words if w not in str(error.value)]
  assert not missing, f"{missing} not in: {error.value}"


# ------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_sizes_are_those_of_tensorflow(padding):
  checked = 0
  for stride in (1, 2, 3, 4):
    window = Window("conv", 2, [1, stride, 1, 1], padding)
    for n in range(1, 10):
      for k in range(1, 6 if padding == "SAME" else min(n, 5) + 1):
        y = tf.nn.conv2d(tf.ones([1, n, 1, 1]), tf.ones([k, 1, 1, 1]), [stride, 1], padding)
        assert window.feature_sizes([n, 1], [k, 1]) == y.shape[1:3].as_list()
        checked += 1
  assert checked >= 140


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_sizes_of_transposed_convolutions(padding):
  for stride in (1, 2, 3, 4):
    window = Window("conv", 2, [1, stride, 1, 1], padding)
    for n in range(1, 6):
      for k in range(1, 6):
        (size, _) = window.image_sizes([n, 1], [k, 1])
        beyond = max(k - stride, 0) if padding == "VALID" else 0
        assert size == n * stride + beyond
        # The convolution from there comes back to n.
        assert window.feature_sizes([size, 1], [k, 1]) == [n, 1]


def test_no_strides_are_strides_of_one():
  def build(m):
    x, w = imported(m, X2, "x"), imported(m, W2, "w")
    results = []
    for strides in (None, [1, 1, 1, 1]):
      y = mtf.Conv2dOperation(x, w, strides, "VALID").outputs[0]
      results += [y, *mtf.gradients([y], [x, w])]
    return results

  without = run(build)
  assert without[0].shape == (2, 3, 5, 4)
  for a, b in zip(without[:3], without[3:]):
    assert a.tobytes() == b.tobytes()


def test_dimensions_keep_their_order_and_names(mesh):
  y = mtf.Conv3dOperation(tensor(mesh, X3), tensor(mesh, W3), [1, 1, 2, 4, 1], "SAME").outputs[0]
  assert y.shape == mtf.convert_to_shape("b:2 d:2 h:2 w:2 o:4")
  x = tensor(mesh, "a:3 b:2 h:5 w:6 i:2")
  y = mtf.Conv2dTransposeOperation(x, tensor(mesh, T2), [1, 2, 3, 1], "SAME").outputs[0]
  assert y.shape == mtf.convert_to_shape("a:3 b:2 h:10 w:18 o:4")


# ----------------------------------------------------------------- names of things


def _operations(mesh):
  x2, w2, t2, y2 = (tensor(mesh, d) for d in (X2, W2, T2, Y2))
  x3, w3, t3, y3 = (tensor(mesh, d) for d in (X3, W3, T3, Y3))
  mtf.Conv2dOperation(x2, w2, None, "SAME")
  mtf.Conv3dOperation(x3, w3, None, "SAME")
  mtf.Conv2dTransposeOperation(x2, t2, None, "SAME")
  mtf.Conv3dTransposeOperation(x3, t3, None, "SAME")
  mtf.conv2d_backprop_input(X2, w2, y2, None, "SAME")
  mtf.conv3d_backprop_input(X3, w3, y3, None, "SAME")
  mtf.conv2d_transpose_backprop_input(X2, t2, y2, None, "SAME")
  mtf.conv3d_transpose_backprop_input(X3, t3, y3, None, "SAME")
  mtf.conv2d_backprop_filter(x2, W2, y2, None, "SAME")
  mtf.conv3d_backprop_filter(x3, W3, y3, None, "SAME")
  mtf.conv2d_transpose_backprop_filter(x2, T2, y2, None, "SAME")
  mtf.conv3d_transpose_backprop_filter(x3, T3, y3, None, "SAME")
  pooled = mtf.PoolOperation(x2, (5, 3), (5, 3), "MAX_2D").outputs[0]
  mtf.pool_backprop(x2, pooled, pooled, (5, 3), (5, 3), "MAX_2D")
  return mesh.graph.operations[-14:]


def test_default_names(mesh):
  assert [op.name for op in _operations(mesh)] == [
    "conv2d", "conv3d", "conv2d_transpose", "conv3d_transpose",
    "conv2d_backprop", "conv3d_backprop", "conv2d_trans_backprop", "conv3d_trans_backprop",
    "conv2d_backprop_filter", "conv3d_backprop_filter",
    "conv2d_trans_backprop_filter", "conv3d_trans_backprop_filter",
    "pool", "pool_backprop",
  ]  # fmt: skip


def test_splittable_dimensions(mesh):
  ops = _operations(mesh)
  space2, space3 = {"h", "w", "fh", "fw"}, {"d", "h", "w", "fd", "fh", "fw"}
  for op, space in zip(ops[:4], (space2, space3, space2, space3)):
    assert (op.splittable_dims, op.unsplittable_dims) == ({"b", "i", "o"}, space)
  for op, space in zip(ops[4:12], (space2, space3) * 4):
    assert (op.splittable_dims, op.unsplittable_dims) == ({"b", "i", "o"} | space, set())
  assert (ops[12].splittable_dims, ops[12].unsplittable_dims) == ({"b", "i"}, {"h", "w"})
  assert (ops[13].splittable_dims, ops[13].unsplittable_dims) == ({"b", "h", "w", "i"}, set())


# ---------------------------------------------------------------- communication


def _lowered(mesh, layout, *outputs):
  lowering = mtf.Lowering(mesh.graph, {mesh: placement(layout)})
  for y in outputs:
    lowering.tensors[y].to_laid_out_tensor()
  return dict(lowering.counters)


@pytest.mark.parametrize(
  "operation,x,w,family,trans,y_size",
  [
    (mtf.Conv2dOperation, X2, W2, "conv2d", "conv2d", 240),
    (mtf.Conv3dOperation, X3, W3, "conv3d", "conv3d", 384),
    (mtf.Conv2dTransposeOperation, X2, T2, "conv2d_transpose", "conv2d_trans", 240),
    (mtf.Conv3dTransposeOperation, X3, T3, "conv3d_transpose", "conv3d_trans", 384),
  ],
)
def test_counters(mesh, operation, x, w, family, trans, y_size):
  x, w = tensor(mesh, x), tensor(mesh, w)
  y = operation(x, w, None, "SAME").outputs[0]
  dx, dw = mtf.gradients([y], [x, w])
  assert y.size == y_size
  both = mtf.Shape([*w.shape, *(d for d in y.shape if d.name != "o")])
  back = mtf.Shape([*w.shape, *(d for d in x.shape if d.name != "i")])
  c = _lowered(mesh, "b:r,i:c", y, dx, dw)
  # 4 processors: the sums over i (split over axis 1) of y, and over b (axis 0) of dw.
  assert c[f"allreduce/[1]/{family}_op"] == 4 * y.size // 2
  assert c[f"allreduce/[0]/{trans}_backprop_filter"] == 4 * w.size // 2
  assert c[f"{family}/forward"] == both.size
  assert c[f"{family}_unique/forward"] == both.size
  assert c[f"{trans}/backprop_input"] == c[f"{trans}_unique/backprop_input"] == back.size
  assert c[f"{trans}/backprop_filter"] == c[f"{trans}_unique/backprop_filter"] == both.size
  assert f"allreduce/[0]/{trans}_op" not in c
  c = _lowered(mesh, "b:r,o:c", y, dx, dw)
  assert c[f"allreduce/[1]/{trans}_op"] == 4 * x.size // 2
  assert f"allreduce/[1]/{family}_op" not in c or family == trans


def test_a_sum_over_two_batch_dimensions_is_one_allreduce(mesh):
  x, w = tensor(mesh, "a:2 b:2 h:3 w:3 i:2"), tensor(mesh, "fh:3 fw:3 i:2 o:4")
  y = mtf.Conv2dOperation(x, w, None, "SAME").outputs[0]
  (dw,) = mtf.gradients([y], [w])
  c = _lowered(mesh, "a:r,b:c", dw)
  assert c["allreduce/[0, 1]/conv2d_backprop_filter"] == 4 * w.size


def test_pending_sums_are_added_before_they_are_reduced(mesh):
  w = tensor(mesh, "fh:3 fw:3 i:2 o:4")
  ys = [mtf.Conv2dOperation(imported(mesh, X2, n), w, None, "SAME").outputs[0] for n in ("p", "q")]
  total = ys[0] + ys[1]
  lowering = mtf.Lowering(mesh.graph, {mesh: placement("i:r")})
  lowering.export_to_tf_tensor(total)
  sums = [k for k, _ in lowering.counters if k.startswith("allreduce")]
  assert sums == ["allreduce/[0]/conv2d_op"]


def test_describe_counts_the_multiplications(mesh):
  x, w = imported(mesh, "b:4 h:8 w:8 i:4", "x"), imported(mesh, "fh:3 fw:3 i:4 o:8", "w")
  y = mtf.Conv2dOperation(x, w, None, "SAME").outputs[0]
  gradients = mtf.gradients([y], [x, w])
  report = describe(mesh.graph, "b:r", "r:2", results=[y, *gradients])
  flops = {
    op["name"]: op["flops"] for op in report.to_dict()["operations"] if "conv2d" in op["name"]
  }
  each = 2 * (2 * 8 * 8 * 8) * (3 * 3 * 4)  # Half of the batch on each device.
  assert list(flops.values()) == [each] * 3


# ------------------------------------------------------------------------- cost


def _traced(build, *sizes):
  """Types of the nodes that a program on one device makes, besides its inputs and outputs."""

  def program(*arrays):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "m")
    outputs = build(*[mtf.import_tf_tensor(mesh, a, s) for a, s in zip(arrays, sizes)])
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("r:1", "", [""])
    lowering = mtf.Lowering(graph, {mesh: impl})
    return [lowering.export_to_tf_tensor(y) for y in outputs]

  specs = [tf.TensorSpec(mtf.convert_to_shape(s).to_integer_list) for s in sizes]
  nodes = tf.function(program, autograph=False).get_concrete_function(*specs).graph.get_operations()
  return sorted(n.type for n in nodes if n.type not in ("Placeholder", "Const", "Identity"))


def test_one_operation_is_one_node():
  def build(x, w, dy):
    y = mtf.Conv2dOperation(x, w, None, "SAME").outputs[0]
    return [y, *mtf.gradients([y], [x, w], [dy])]

  made = ["Conv2D", "Conv2DBackpropFilter", "Conv2DBackpropInput"]
  assert _traced(build, X2, W2, Y2) == made
  assert _traced(
    lambda x, w: [mtf.Conv3dTransposeOperation(x, w, [1, 2, 2, 2, 1], "SAME").outputs[0]], X3, T3
  ) == ["Conv3DBackpropInputV2"]


def test_pooling_is_one_node_and_so_is_the_gradient_of_an_average():
  def build(kind):
    def fn(x, dy):
      y = mtf.PoolOperation(x, (2, 2), (2, 2), f"{kind}_2D").outputs[0]
      return [y, *mtf.gradients([y], [x], [dy])]

    return fn

  sizes = "b:2 h:4 w:6 i:2", "b:2 h:2 w:3 i:2"
  assert _traced(build("AVG"), *sizes) == ["AvgPool", "AvgPoolGrad"]
  # Ties rule MaxPoolGrad out.
  assert _traced(build("MAX"), *sizes) == [
    "Equal", "MaxPool", "Reshape", "Reshape", "Reshape", "Reshape", "SelectV2",
  ]  # fmt: skip


# ---------------------------------------------------------------------- gradients


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", ["", "b:r,i:c", "o:r,b:c"])
def test_gradients_of_gradients(transposed, layout):
  """Of a squared gradient, through input and filter, against nested tapes."""
  strides = [1, 2, 2, 1]
  x, w = rand(2, 4, 6, 2), rand(3, 2, *((4, 2) if transposed else (2, 4)), seed=1)
  (n_h, n_w) = (8, 12) if transposed else (2, 3)
  dy = rand(2, n_h, n_w, 4, seed=2)

  def forward(x, w):
    if transposed:
      return tf.nn.conv2d_transpose(x, w, [2, n_h, n_w, 4], strides, "SAME")
    return tf.nn.conv2d(x, w, strides, "SAME")

  xs = [tf.constant(a) for a in (x, w, dy)]
  with tf.GradientTape() as outer:
    outer.watch(xs)
    with tf.GradientTape() as inner:
      inner.watch(xs[:2])
      y = forward(*xs[:2])
    first = inner.gradient(y, xs[:2], output_gradients=xs[2])
    loss = sum(tf.reduce_sum(g**2) for g in first)
  expected = outer.gradient(loss, xs)

  def build(m):
    kernel = "fh:3 fw:2 o:4 i:2" if transposed else "fh:3 fw:2 i:2 o:4"
    shapes = "b:2 h:4 w:6 i:2", kernel, f"b:2 h:{n_h} w:{n_w} o:4"
    tensors = [mtf.import_tf_tensor(m, a, s) for a, s in zip((x, w, dy), shapes)]
    operation = mtf.Conv2dTransposeOperation if transposed else mtf.Conv2dOperation
    y = operation(tensors[0], tensors[1], strides, "SAME").outputs[0]
    first = mtf.gradients([y], tensors[:2], [tensors[2]])
    loss = mtf.add_n([mtf.reduce_sum(mtf.square(g)) for g in first])
    return mtf.gradients([loss], tensors)

  for value, want in zip(run(build, layout), expected):
    np.testing.assert_allclose(value, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def test_golden_gradient_of_a_maximum_of_equal_values():
  def build(m):
    x = mtf.ones(m, "b:2 h:4 w:4 c:1")
    y = mtf.PoolOperation(x, (2, 2), (2, 2), "MAX_2D").outputs[0]
    return mtf.gradients([y], [x])

  for layout in ("", "b:r", "h:r,w:c"):
    (dx,) = run(build, layout)
    assert dx.tolist() == np.ones([2, 4, 4, 1]).tolist()


def test_a_maximum_that_meets_an_infinite_gradient_spoils_nothing_else():
  def build(m):
    x = mtf.import_tf_tensor(m, np.arange(4.0, dtype="f").reshape(1, 2, 2, 1), "b:1 h:2 w:2 c:1")
    y = mtf.PoolOperation(x, (2, 2), (2, 2), "MAX_2D").outputs[0]
    return mtf.gradients([y], [x], [mtf.constant(m, np.inf, y.shape)])

  assert run(build)[0].ravel().tolist() == [0.0, 0.0, 0.0, np.inf]


# --------------------------------------------------------------------------- pool_fn


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3)])
def test_pool_fn_takes_any_leading_dimensions(leading):
  x = tf.constant(rand(*leading, 4, 6, 2))
  flat = tf.reshape(x, [-1, 4, 6, 2])
  for kind, fn in (("MAX_2D", tf.nn.max_pool2d), ("AVG_2D", tf.nn.avg_pool2d)):
    for padding in ("SAME", "VALID"):
      y = mtf.pool_fn(kind)(x, (2, 4), (2, 3), padding)
      want = fn(flat, (2, 4), (2, 3), padding)
      assert y.shape.as_list() == [*leading, *want.shape[1:]]
      np.testing.assert_array_equal(tf.reshape(y, want.shape), want)


@pytest.mark.parametrize("kind", ["MAX_2D", "AVG_2D", "MAX_3D", "AVG_3D"])
@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
def test_pooling_of_no_channels(kind, in_function):
  def build(mesh):
    x = mtf.zeros(mesh, f"b:2 {'d:3 ' if '3' in kind else ''}h:5 w:4 i:0")
    window = (2, 3, 1) if "3" in kind else (3, 1)
    y = mtf.PoolOperation(x, window, window, kind).outputs[0]
    return [y, *mtf.gradients([mtf.reduce_sum(y)], [x])]

  y, dx = run(build, in_function=in_function)
  assert y.shape == ((2, 1, 1, 4, 0) if "3" in kind else (2, 1, 4, 0))
  assert dx.shape == ((2, 3, 5, 4, 0) if "3" in kind else (2, 5, 4, 0))


def test_pool_fn_in_three_dimensions_for_dtypes_that_tensorflow_has_not():
  x = rand(2, 4, 5, 6, 3).astype(np.float64)
  for kind, fn in (("MAX_3D", tf.nn.max_pool3d), ("AVG_3D", tf.nn.avg_pool3d)):
    for padding in ("SAME", "VALID"):
      y = mtf.pool_fn(kind)(tf.constant(x), (2, 3, 2), (2, 2, 1), padding)
      assert y.dtype == tf.float64
      want = fn(x.astype(np.float32), (2, 3, 2), (2, 2, 1), padding)
      np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------------- errors


@pytest.mark.parametrize("dim", ["h", "w"])
def test_a_split_image_whose_parts_are_not_equal_is_refused(mesh, dim):
  x = imported(mesh, "b:2 h:10 w:6 i:2", "photo")
  mtf.Conv2dOperation(x, imported(mesh, "fh:2 fw:2 i:2 o:4", "w"), None, "VALID")
  with pytest.raises(LayoutError) as e:
    mtf.Lowering(mesh.graph, {mesh: placement(f"{dim}:r")})
  # The output has 9 and 5 positions.
  says(e, "Conv2dOperation conv2d", f"{dim}:{9 if dim == 'h' else 5}", "r:2")


def test_a_split_filter_is_refused(mesh):
  mtf.Conv2dOperation(imported(mesh, X2, "x"), imported(mesh, W2, "weights"), None, "SAME")
  with pytest.raises(LayoutError) as e:
    mtf.Lowering(mesh.graph, {mesh: placement("fw:r")})
  says(e, "Conv2dOperation", "weights", "fw:2", "r:2", "rename_dimension")
  assert "with_blocks" not in str(e.value)


def test_space_of_the_output_on_the_axis_of_what_is_summed_is_refused(mesh):
  """Of other names, else one tensor would have both."""
  w, dy = imported(mesh, W2, "w"), imported(mesh, "b:2 g:5 v:6 o:4", "dy")
  mtf.conv2d_backprop_input("b:2 h:5 w:6 i:2", w, dy, None, "SAME")
  with pytest.raises(LayoutError) as e:
    mtf.Lowering(mesh.graph, {mesh: placement("w:r,o:r")})
  says(e, "Conv2or3dBackpropInputOperation", "w:6", "o:4", "r:2", "rename_dimension")


@pytest.mark.parametrize("layout", ["w:r", "v:r", "v:r,w:c", "w:c,v:c,b:r", "v:c,o:r"])
def test_image_and_gradient_may_be_split_in_other_ways(layout):
  def build(m):
    w, dy = imported(m, W2, "w"), imported(m, "b:2 g:5 v:6 o:4", "dy")
    x = imported(m, "b:2 h:5 w:6 i:2", "x")
    back = mtf.conv2d_backprop_filter(x, W2, dy, None, "SAME")
    return [mtf.conv2d_backprop_input("b:2 h:5 w:6 i:2", w, dy, None, "SAME"), back]

  for value, want in zip(run(build, layout), run(build)):
    np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-5)


def test_both_channels_on_one_axis_are_refused(mesh):
  mtf.Conv2dOperation(imported(mesh, X2, "x"), imported(mesh, W2, "weights"), None, "SAME")
  with pytest.raises(LayoutError) as e:
    mtf.Lowering(mesh.graph, {mesh: placement("i:r,o:r")})
  says(e, "weights", "i", "o", "r")


def test_a_maximum_is_of_the_dtype_of_what_it_is_the_maximum_of(mesh):
  x = mtf.zeros(mesh, "b:2 h:4 w:6 i:2")
  y = mtf.zeros(mesh, "b:2 h:2 w:3 i:2", tf.bfloat16)
  with pytest.raises(DTypeError, match="is not of the dtype of"):
    mtf.pool_backprop(x, y, y, (2, 2), (2, 2), "MAX_2D")
  # An average is not looked at.
  assert mtf.pool_backprop(x, y, y, (2, 2), (2, 2), "AVG_2D").shape == x.shape


def test_pooling_through_a_window_is_refused(mesh):
  x = imported(mesh, "b:2 h:8 w:6 i:2", "photo")
  mtf.PoolOperation(x, (2, 2), (2, 2), "MAX_2D")
  with pytest.raises(LayoutError) as e:
    mtf.Lowering(mesh.graph, {mesh: placement("w:r")})
  says(e, "PoolOperation", "photo", "w:6", "r:2", "multiple of the window size 2", "w:r")
  mtf.Lowering(mesh.graph, {mesh: placement("h:r")})


def _wrong(operation, x, w, strides=None, padding="SAME", dtype=tf.float32):
  return lambda m: operation(tensor(m, x), tensor(m, w, dtype), strides, padding)


@pytest.mark.parametrize(
  "provoke,error,words",
  [
    (_wrong(mtf.Conv2dOperation, X2, "fh:3 fw:2 i:3 o:4"), DimensionError,
     ["conv2d", "i=2", "i=3"]),
    (_wrong(mtf.Conv2dTransposeOperation, X2, W2), DimensionError,
     ["conv2d_transpose", "i=2", "o=4"]),
    (_wrong(mtf.Conv2dOperation, "h:3 i:2", W2), ShapeError, ["2 spatial dimensions", "h=3"]),
    (_wrong(mtf.Conv3dOperation, X3, W2), ShapeError, ["conv3d", "3 spatial", "fh=3"]),
    (_wrong(mtf.Conv2dOperation, X2, "fh:6 fw:2 i:2 o:4", padding="VALID"), ShapeError,
     ["conv2d", "h=5", "fh=6", "VALID"]),
    (_wrong(mtf.Conv2dOperation, X2, W2, dtype=tf.bfloat16), DTypeError,
     ["float32", "bfloat16", "mtf.cast"]),
    (lambda m: mtf.Conv2dOperation(tensor(m, X2, tf.int32), tensor(m, W2, tf.int32), None, "SAME"),
     DTypeError, ["floating", "int32"]),
    (_wrong(mtf.Conv2dOperation, X2, W2, [1, 2, 1]), ShapeError, ["strides", "[1, 2, 1]"]),
    (_wrong(mtf.Conv2dOperation, X2, W2, [2, 1, 1, 1]), ShapeError, ["strides", "[2, 1, 1, 1]"]),
    (_wrong(mtf.Conv2dOperation, X2, W2, [1, 0, 1, 1]), ShapeError, ["strides", "[1, 0, 1, 1]"]),
    (_wrong(mtf.Conv2dOperation, X2, W2, padding="FULL"), ShapeError, ["padding", "FULL", "SAME"]),
    (lambda m: mtf.Conv2or3dBackpropInputOperation(
      4, False, mtf.convert_to_shape(X2), tensor(m, W2), tensor(m, Y2), None, "SAME"),
     SizeError, ["conv_dimension", "2 or 3", "4"]),
    (lambda m: mtf.conv2d_backprop_input(X2, tensor(m, W2), tensor(m, "b:2 h:4 w:6 o:4"), None,
                                         "SAME"), ShapeError, ["[5, 6]", "h=4", "conv2d_backprop"]),
    (lambda m: mtf.conv2d_backprop_input(X2, tensor(m, W2), tensor(m, "c:2 h:5 w:6 o:4"), None,
                                         "SAME"), ShapeError, ["b=2", "c=2", "conv2d_backprop"]),
    (lambda m: mtf.conv2d_backprop_filter(tensor(m, X2), "fh:3 fw:2 i:3 o:4", tensor(m, Y2), None,
                                          "SAME"), ShapeError, ["i=2", "i=3"]),
    (lambda m: mtf.pool_fn("MIN_2D"), GraphError, ["MIN_2D", "MAX_2D", "AVG_3D"]),
    (lambda m: mtf.PoolOperation(tensor(m, X2), (2, 2), (1, 2), "MAX_2D"), SizeError,
     ["ksize [2, 2]", "strides [1, 2]", "pool"]),
    (lambda m: mtf.PoolOperation(tensor(m, X2), (2, 2), (2, 2), "MAX_3D"), SizeError, ["3"]),
    (lambda m: mtf.PoolOperation(tensor(m, X2), (6, 2), (6, 2), "MAX_2D"), ShapeError,
     ["h=5", "6"]),
    (lambda m: mtf.PoolOperation(tensor(m, "h:5 i:2"), (2, 2), (2, 2), "MAX_2D"), ShapeError,
     ["spatial", "h=5"]),
    (lambda m: mtf.PoolOperation(tensor(m, X2, tf.int32), (2, 2), (2, 2), "AVG_2D"), DTypeError,
     ["floating", "mtf.cast"]),
    (lambda m: mtf.pool_backprop(tensor(m, X2), tensor(m, X2), tensor(m, X2), (2, 2), (2, 2),
                                 "AVG_2D"), ShapeError, ["h=2", "h=5"]),
  ],
)  # fmt: skip
def test_wrong_use_is_told_at_once(mesh, provoke, error, words):
  with pytest.raises(error) as e:
    provoke(mesh)
  says(e, *words)
  # Only what it was made of is left in the graph.
  assert {type(op).__name__ for op in mesh.graph.operations} <= {"Constant"}


def test_old_classes_of_errors(mesh):
  with pytest.raises(AssertionError):
    mtf.PoolOperation(tensor(mesh, X2), (2, 2), (1, 2), "MAX_2D")
  with pytest.raises(ValueError):
    mtf.Conv2dOperation(tensor(mesh, X2), tensor(mesh, "fh:3 fw:2 i:3 o:4"), None, "SAME")
