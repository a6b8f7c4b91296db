"""Values that the TF1 library gave (golden values), which this one must give too."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf

A, B, C = mtf.Dimension("a", 8), mtf.Dimension("b", 4), mtf.Dimension("c", 2)


@pytest.fixture(params=["", "r:2"], ids=["one_device", "split"])
def evaluate(request, cpu_devices):
  """Evaluates fn(x, mesh), x = 0..31 as [a=8, b=4]; `a` whole, or split over two devices."""

  def run(fn, dtype=tf.float32):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "golden")
    x = mtf.import_tf_tensor(mesh, tf.cast(tf.reshape(tf.range(32), [8, 4]), dtype), [A, B])
    result = fn(x)
    tensors = list(result) if isinstance(result, (list, tuple)) else [result]
    size = 2 if request.param else 1
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(
      request.param, f"a:{request.param[:1]}" if request.param else "", cpu_devices[:size]
    )
    lowering = mtf.Lowering(graph, {mesh: impl})
    values = [lowering.export_to_tf_tensor(t).numpy() for t in tensors]
    return values if isinstance(result, (list, tuple)) else values[0]

  return run


def _tensor(x, values, shape, dtype=tf.float32):
  return mtf.import_tf_tensor(x.mesh, tf.constant(values, dtype), shape)


def test_cumprod():
  assert mtf.Shape([("x", 2), ("y", 3), ("z", 4)]).cumprod == [1, 2, 6]


@pytest.mark.parametrize("cumprod,axis", [(1, 0), (2, 1), (6, 2), (24, None), (3, None)])
def test_cumprod_to_tensor_axis(cumprod, axis):
  assert mtf.Shape([("x", 2), ("y", 3), ("z", 4)]).cumprod_to_tensor_axis(cumprod) == axis


def test_cumprod_to_tensor_axis_is_the_last_of_several():
  assert mtf.Shape([("x", 1), ("y", 1), ("z", 4)]).cumprod_to_tensor_axis(1) == 2


@pytest.fixture
def mesh_2x4():
  return mtf.placement_mesh_impl.PlacementMeshImpl("r:2,c:4", "a:r,b:c", [""] * 8)


def test_slice_shape(mesh_2x4):
  assert mesh_2x4.slice_shape(mtf.Shape([("a", 4), ("b", 8), ("z", 3)])) == [2, 2, 3]


def test_slice_begin(mesh_2x4):
  shape = mtf.Shape([("a", 4), ("b", 8)])
  expected = [[0, 0], [0, 2], [0, 4], [0, 6], [2, 0], [2, 2], [2, 4], [2, 6]]
  assert [mesh_2x4.slice_begin(shape, p) for p in range(8)] == expected


def test_mesh_axis_to_cumprod(mesh_2x4):
  assert mesh_2x4.mesh_axis_to_cumprod(mtf.Shape([("a", 4), ("b", 8), ("z", 3)])) == [1, 4]


def test_laid_out_size(mesh_2x4):
  assert mesh_2x4.laid_out_size(mtf.Shape([("a", 4), ("z", 3)])) == 48


def test_pretty_print_counters():
  text = mtf.pretty_print_counters([("a/b", 1000), ("a/c", 5), ("d", 123456)])
  assert text.splitlines() == ["a: 1e+03", " a/b: 1e+03", " a/c: 5", "d: 1.23e+05"]


def test_combined_dimension():
  assert mtf.combined_dimension([mtf.Dimension("a", 2), mtf.Dimension("b", 3)]) == ("a", 6)


def test_tensor_dim_to_mesh_dim_size():
  assert mtf.tensor_dim_to_mesh_dim_size("a:r", "r:4", A) == 4
  assert mtf.tensor_dim_to_mesh_dim_size("a:r", "r:4", B) == 1


def test_cumsum(evaluate):
  assert evaluate(lambda x: mtf.cumsum(x, A), tf.int32)[-1].tolist() == [112, 120, 128, 136]


@pytest.mark.parametrize(
  "wrap,first,last",
  [(False, [0, 1, 0, 7], [24, 29, 22, 0]), (True, [28, 1, 26, 7], [24, 29, 22, 3])],
)
def test_dynamic_shift(evaluate, wrap, first, last):
  y = evaluate(lambda x: mtf.dynamic_shift(x, _tensor(x, [1, 0, 2, -1], [B], tf.int32), A, wrap))
  assert y[0].tolist() == first
  assert y[-1].tolist() == last


def test_top_k_indices(evaluate):
  indices = evaluate(lambda x: mtf.top_k(x, A, mtf.Dimension("k", 6)))[1]
  np.testing.assert_array_equal(indices, [[7, 6, 5, 4, 3, 2]] * 4)


@pytest.mark.parametrize("k", [6, 3])
def test_top_k_of_equal_values(evaluate, k):
  indices = evaluate(lambda x: mtf.top_k(mtf.zeros_like(x), A, mtf.Dimension("k", k)))[1]
  np.testing.assert_array_equal(indices, [list(range(k))] * 4)


def test_one_hot_out_of_range(evaluate):
  y = evaluate(lambda x: mtf.one_hot(_tensor(x, [9, -1], [C], tf.int32), A))
  np.testing.assert_array_equal(y, np.zeros([2, 8]))


def test_one_hot_values(evaluate):
  y = evaluate(
    lambda x: mtf.one_hot(
      _tensor(x, [3, 1], [C], tf.int32), B, on_value=5, off_value=-1, dtype=tf.int32
    )
  )
  assert y.tolist() == [[-1, -1, -1, 5], [-1, 5, -1, -1]]


def test_gather(evaluate):
  y = evaluate(lambda x: mtf.gather(x, _tensor(x, [3, 1], [C], tf.int32), A))
  assert y.tolist() == [[12, 13, 14, 15], [4, 5, 6, 7]]


def test_gather_aligned(evaluate):
  y = evaluate(lambda x: mtf.gather(x, _tensor(x, [0, 1, 2, 3], [B], tf.int32), A))
  assert y.tolist() == [0, 5, 10, 15]


def test_gather_out_of_range(evaluate):
  assert evaluate(lambda x: mtf.gather(x, 99, A)).tolist() == [0, 0, 0, 0]


def test_nth_largest_element(evaluate):
  assert evaluate(lambda x: mtf.nth_largest_element(x, 2, A)).tolist() == [20, 21, 22, 23]


def test_pool_tensor_1d(evaluate):
  y = evaluate(lambda x: mtf.pool_tensor_1d(x, A))
  assert y.tolist() == [[8 * i + 2 + j for j in range(4)] for i in range(4)]


def test_split(evaluate):
  parts = evaluate(lambda x: mtf.split(x, B, 2))
  assert [p.shape for p in parts] == [(8, 2), (8, 2)]
  assert parts[1][0].tolist() == [2, 3]


def test_gelu(evaluate):
  y = evaluate(lambda x: mtf.gelu(_tensor(x, [1.0, -1.0], [C])))
  np.testing.assert_allclose(y, [0.841192, -0.158808], atol=1e-6)


def test_reduce_logsumexp(evaluate):
  """Of the columns j + 8 i, i = 0..3."""
  y, columns = evaluate(
    lambda x: [
      mtf.reduce_logsumexp(_columns(x), mtf.Dimension("i", 4)),
      mtf.reduce_max(_columns(x), reduced_dim=mtf.Dimension("i", 4)),
    ]
  )
  np.testing.assert_allclose(y - columns, [0.00033569] * 8, atol=2e-6)


def _columns(x):
  return mtf.reshape(x, [("i", 4), ("j", 8)])


def test_relu_gradient(evaluate):
  dx = evaluate(lambda x: mtf.gradients([mtf.reduce_sum(mtf.relu(x - 3))], [x])[0])
  np.testing.assert_array_equal(dx.reshape(-1), [0] * 4 + [1] * 28)


def test_reduce_max_gradient_of_ties(evaluate):
  dx = evaluate(
    lambda x: (lambda t: mtf.gradients([mtf.reduce_max(t, reduced_dim=A)], [t])[0])(x * 0.0)
  )
  np.testing.assert_array_equal(dx, np.ones([8, 4]))


def test_maximum_of_itself_gradient(evaluate):
  dx = evaluate(lambda x: mtf.gradients([mtf.maximum(x, x)], [x])[0])
  np.testing.assert_array_equal(dx, np.full([8, 4], 2.0))


def test_stop_gradient_gradient(evaluate):
  dx = evaluate(lambda x: mtf.gradients([mtf.stop_gradient(x) * x], [x])[0])
  np.testing.assert_array_equal(dx.reshape(-1), np.arange(32))


def test_recompute_grad_golden(evaluate):
  def f(x):
    v = _tensor(x, [5.0, 10.0], [C])
    y = mtf.recompute_grad(lambda u: mtf.square(u) + u, [v])
    return [y, mtf.gradients([y], [v], [_tensor(x, [2.0, 3.0], [C])])[0]]

  y, dx = evaluate(f)
  assert y.tolist() == [30, 110]
  np.testing.assert_allclose(dx, [22, 63])


def test_add_n_of_nothing():
  assert mtf.add_n([]) == 0


def test_combine_assignments():
  """(set v1, add v2, set v2) become: set [v1, v2]; add [v2]."""
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "golden")
  v1, v2 = (mtf.get_variable(mesh, name, [B]) for name in ("v1", "v2"))
  value = mtf.ones(mesh, [B])
  given = [mtf.assign(v1, value), mtf.assign_add(v2, value), mtf.assign(v2, value)]
  combined = graph.combine_assignments(given)
  assert [op.assign_fn for op in combined] == [mtf.assign_slice, mtf.assign_add_slice]
  assert [op.variables for op in combined] == [[v1.operation, v2.operation], [v2.operation]]
  assert not any(op in graph.operations for op in given)
  assert graph.operations[-2:] == combined


def test_nth_elements_of_a_6x2_tensor(cpu_devices):
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "golden")
  x = mtf.import_tf_tensor(
    mesh, tf.constant([[1, 10], [2, 9], [3, 8], [4, 7], [5, 6], [6, 5]]), "a:6 b:2"
  )
  largest = mtf.nth_largest_element(x, 1, ("a", 6))
  smallest = mtf.nth_smallest_element(x, 0, ("b", 2))
  impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:2", "a:all", cpu_devices[:2])
  lowering = mtf.Lowering(graph, {mesh: impl})
  assert lowering.export_to_tf_tensor(largest).numpy().tolist() == [5, 9]
  assert lowering.export_to_tf_tensor(smallest).numpy().tolist() == [1, 2, 3, 4, 5, 5]


def test_top_k_of_a_6x2_tensor(cpu_devices):
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "golden")
  values = [[1, 10], [2, 9], [3, 8], [4, 7], [5, 6], [6, 5]]
  x = mtf.import_tf_tensor(mesh, tf.constant(values, tf.float32), "a:6 b:2")
  top, indices = mtf.top_k(x, ("a", 6), ("k", 2))
  dx = mtf.gradients([top], [x], [mtf.import_tf_tensor(mesh, [[1.0, 2.0], [3.0, 4.0]], "b:2 k:2")])
  impl = mtf.placement_mesh_impl.PlacementMeshImpl(
    "rows:2,cols:2", "a:rows,b:cols", cpu_devices[:4]
  )
  lowering = mtf.Lowering(graph, {mesh: impl})
  assert lowering.export_to_tf_tensor(top).numpy().tolist() == [[6, 5], [10, 9]]
  assert lowering.export_to_tf_tensor(indices).numpy().tolist() == [[5, 4], [0, 1]]
  expected = [[0, 3], [0, 4], [0, 0], [0, 0], [2, 0], [1, 0]]
  assert lowering.export_to_tf_tensor(dx[0]).numpy().tolist() == expected


# Collectives of the worked examples, as the counters of a lowering tell them: (key, elements).
SPLIT_EXAMPLES = {
  "reduce_sum": (lambda x: mtf.reduce_sum(x), [("allreduce/[0]/reduce_op", 2)]),
  "reduce_max": (
    lambda x: mtf.reduce_max(x, reduced_dim=A),
    [("allreduce/[0]/reduce_op", 8)],
  ),
  "two_pending_sums_added": (
    lambda x: mtf.reduce_sum(x, reduced_dim=A) + mtf.reduce_sum(x, reduced_dim=A),
    [("allreduce/[0]/reduce_op", 8)],
  ),
  "four_pending_sums_added": (
    lambda x: mtf.add_n([mtf.reduce_sum(x, reduced_dim=A) for _ in range(4)]),
    [("allreduce/[0]/reduce_op", 8)],
  ),
  "einsum_local": (
    lambda x: mtf.einsum([x, mtf.ones(x.mesh, [B, C])], [A, C]),
    [],
  ),
  "einsum_summed": (
    lambda x: mtf.einsum([x, mtf.ones(x.mesh, [B, C])], reduced_dims=[A]),
    [("allreduce/[0]/einsum_op", 16)],
  ),
  "rename_to_unsplit": (
    lambda x: mtf.rename_dimension(x, "a", "q"),
    [("allconcat/0/reshape_op", 64)],
  ),
}


@pytest.mark.parametrize("example", SPLIT_EXAMPLES)
def test_collectives(example, cpu_devices):
  fn, expected = SPLIT_EXAMPLES[example]
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "golden")
  y = fn(mtf.import_tf_tensor(mesh, tf.reshape(tf.range(32.0), [8, 4]), [A, B]))
  impl = mtf.placement_mesh_impl.PlacementMeshImpl("r:2", "a:r", cpu_devices[:2])
  lowering = mtf.Lowering(graph, {mesh: impl})
  lowering.export_to_tf_tensor(y)
  moved = [c for c in lowering.counters if c[0].split("/")[0] in ("allreduce", "allconcat")]
  assert moved == expected


def test_collective_over_two_mesh_axes(cpu_devices):
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "golden")
  x = mtf.import_tf_tensor(mesh, tf.ones([8, 4]), [A, B])
  y = mtf.einsum([x, x], [])
  impl = mtf.placement_mesh_impl.PlacementMeshImpl("r:2,s:2", "a:r,b:s", cpu_devices[:4])
  lowering = mtf.Lowering(graph, {mesh: impl})
  assert lowering.export_to_tf_tensor(y).numpy() == 32
  assert [c for c in lowering.counters if c[0].startswith("allreduce")] == [
    ("allreduce/[0, 1]/einsum_op", 4)
  ]
