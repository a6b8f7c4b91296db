"""Clipping by the global norm, averages of weights, orthogonal matrices; on drawn layouts."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import optimize
from mesh_tensorflow.errors import ConfigError, DimensionError, GraphError, ShapeError
from mesh_tensorflow.numerics import padding
from tests.conformance.framework import (
  MODES,
  Layout,
  draw_layouts,
  draw_uneven_layouts,
  make_impl,
  op,
)
from tests.kinds import in_turns, kept
from tests.optimize import reference

DIMS = {"w": "a:8 b:16", "u": "b:16", "s": "", "t": "c:4 a:8"}
_TENSORS = [op(n, lambda x: x, lambda x: x, d) for n, d in DIMS.items()]
LAYOUTS = [
  Layout("r:1", ""),
  *draw_layouts("clipping", _TENSORS, 3),
  *draw_uneven_layouts("clipping", _TENSORS, 2),
  Layout("r:2,s:4", "a:r,b:s"),
]
# Each layout in one mode, in turns; in a long run in two.
RUNS = [(layout, MODES[i % 2 :: 2][j]) for i, layout in enumerate(LAYOUTS) for j in range(2)]
RUNS = kept(RUNS, in_turns(RUNS))


def values(seed, scale=1.0):
  rng = np.random.default_rng(seed)
  sizes = {n: mtf.convert_to_shape(d).to_integer_list for n, d in DIMS.items()}
  return {n: np.asarray(rng.normal(size=s) * scale, np.float32) for n, s in sizes.items()}


def suited(layout):
  return [n for n, d in DIMS.items() if layout.suits(mtf.convert_to_shape(d))]


def norm_of(arrays):
  return np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in arrays))


def lower(impl, build, traced):
  """Exports what `build(mesh)` returns, a list of tensors."""

  def program():
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "m")
    results = build(mesh)
    lowering = mtf.Lowering(graph, {mesh: impl})
    return [lowering.export_to_tf_tensor(x) for x in results]

  run = lambda: impl.run(program, [])  # noqa: E731
  with padding.filled_with(float("nan") if impl.uneven_names else 0.0):
    return [x.numpy() for x in (tf.function(run, autograph=False) if traced else run)()]


@pytest.mark.parametrize(("layout", "mode"), RUNS, ids=str)
def test_clipping_equals_numpy(layout, mode, cpu_devices):
  kind, execution = mode.split("_")
  impl = make_impl(kind, layout, cpu_devices)
  given = values(1)
  names = suited(layout)
  norm = norm_of(given[n] for n in names)

  def build(mesh):
    xs = [mtf.import_tf_tensor(mesh, given[n], DIMS[n]) for n in names]
    xs[-1] = mtf.cast(xs[-1], tf.bfloat16)
    smaller, found = optimize.clip_by_global_norm([*xs, None], 0.5)
    same, _ = optimize.clip_by_global_norm(xs, 1e3)
    assert smaller.pop() is None
    assert [x.dtype for x in smaller] == [x.dtype for x in xs]
    return [found, *[mtf.to_float(x) for x in smaller + same]]

  found, *scaled = lower(impl, build, execution == "function")
  # One of the tensors is rounded to bfloat16.
  np.testing.assert_allclose(found, norm, rtol=1e-3)
  smaller, same = scaled[: len(names)], scaled[len(names) :]
  np.testing.assert_allclose(norm_of(smaller), 0.5, rtol=1e-3)
  for name, x, y in list(zip(names, smaller, same))[:-1]:
    np.testing.assert_allclose(x, given[name] * (0.5 / found), rtol=1e-5, err_msg=name)
    # Not scaled at all, not even by a number near 1.
    np.testing.assert_array_equal(y, given[name], err_msg=name)


def test_the_norm_of_complex_tensors_counts_both_parts(cpu_devices):
  rng = np.random.default_rng(2)
  z = (rng.normal(size=[8, 4]) + 1j * rng.normal(size=[8, 4])).astype(np.complex64)
  x = rng.normal(size=[4]).astype(np.float32)

  def build(mesh):
    xs = [mtf.import_tf_tensor(mesh, z, "a:8 c:4"), mtf.import_tf_tensor(mesh, x, "c:4")]
    clipped, norm = optimize.clip_by_global_norm(xs, 0.5)
    return [norm, *clipped]

  norm, *clipped = lower(make_impl("placement", Layout("r:2", "a:r"), cpu_devices), build, False)
  want = np.sqrt(np.sum(np.abs(z) ** 2) + np.sum(x**2))
  np.testing.assert_allclose(norm, want, rtol=1e-5)
  for got, given in zip(clipped, (z, x)):
    np.testing.assert_allclose(got, given * (0.5 / want), rtol=1e-5)


def test_global_norm_exchanges_one_number():
  mesh = mtf.Mesh(mtf.Graph(), "m")
  xs = [mtf.zeros(mesh, d) for d in DIMS.values()]
  optimize.global_norm(xs)
  report = mtf.describe(mesh.graph, "a:r,b:s", "r:2,s:4,t:3")
  (norm,) = [o for o in report.operations if o.name.startswith("global_norm")]
  # One float32, along the axes that split something: whole along one, its parts along the other.
  assert norm.bytes_over() == {0: 1, 1: 6}
  assert report.bytes_moved() == {"r": 1, "s": 6, "t": 0}


def test_wrong_arguments_of_clipping():
  mesh = mtf.Mesh(mtf.Graph(), "m")
  x = mtf.zeros(mesh, "a:4")
  with pytest.raises(ConfigError, match=r"clip_norm \(=0.0\) must be above 0"):
    optimize.clip_by_global_norm([x], 0.0)
  with pytest.raises(GraphError, match="at least one tensor"):
    optimize.global_norm([None])


# ----------------------------------------------------------------------------------- averages


@pytest.mark.parametrize(("layout", "mode"), RUNS, ids=str)
def test_averages_equal_numpy(layout, mode, cpu_devices):
  kind, execution = mode.split("_")
  impl = make_impl(kind, layout, cpu_devices)
  names, decay, steps = suited(layout), 0.25, 4
  initial = values(2)
  dtype = mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16)

  def build(mesh):
    weights = [
      mtf.get_variable(mesh, n, DIMS[n], dtype=dtype, initializer=initial[n]) for n in names
    ]
    variables = [w.operation for w in weights]
    optimize.SgdOptimizer(0.5).apply_grads([mtf.ones_like(w) for w in weights], variables)
    assert len(optimize.average_weights(variables, decay)) == len(names) + 1
    return [mtf.reduce_sum(weights[0])]

  for _ in range(steps):
    lower(impl, build, execution == "function")
  store = impl.variable_store
  assert store["ema_updates"].numpy() == steps
  for name in names:
    w, average = np.asarray(initial[name], np.float64), 0.0
    for n in range(steps):
      w = w - 0.5
      d = min(decay, (1 + n) / (10 + n)) if n else 0.0
      average = d * average + (1 - d) * w
    stored = store[optimize.averaged_name(name)]
    assert not stored.trainable and stored.slice_dtype == stored.master_dtype == tf.float32
    # In float32, whatever the activations are.
    np.testing.assert_allclose(stored.numpy(), average, rtol=1e-5, atol=1e-5, err_msg=name)


def test_a_decay_that_is_none():
  mesh = mtf.Mesh(mtf.Graph(), "m")
  w = mtf.get_variable(mesh, "w", "a:4")
  with pytest.raises(ConfigError, match=r"decay \(=1.0\) must be at least 0 and below 1"):
    optimize.average_weights([w.operation], 1.0)
  assert optimize.average_weights([], 0.5) == []


# --------------------------------------------------------------------------- orthogonal matrices


def test_orthogonalize_comes_near_to_orthogonal():
  """With coefficients that converge, U V^T of the singular value decomposition."""
  x = np.random.default_rng(0).normal(size=[6, 10]).astype(np.float32)
  rows, columns = mtf.Dimension("r", 6), mtf.Dimension("c", 10)
  impl = mtf.PlacementMeshImpl("", "", [""])
  # Of Muon, and others; a factor of the square of either sign, and none.
  others = [(5, (3.4445, -4.7750, 2.0315)), (3, (1.875, -1.25, 0.375)), (4, (1.3, -0.1, -0.2)),
            (0, (3.4445, -4.7750, 2.0315))]  # fmt: skip
  found, ten, *more = lower(
    impl,
    lambda mesh: [
      optimize.orthogonalize(y, [rows], [columns], n, coefficients)
      for y in [mtf.import_tf_tensor(mesh, x, [rows, columns])]
      for n, coefficients in [(30, (1.5, -0.5, 0.0)), *others]
    ],
    traced=True,
  )
  u, _, v = np.linalg.svd(x, full_matrices=False)
  np.testing.assert_allclose(found, u @ v, atol=1e-4)
  assert np.all(np.abs(np.linalg.svd(ten)[1] - 1) < 0.35)
  for y, arguments in zip([ten, *more], others):
    np.testing.assert_allclose(y, reference.newton_schulz(np.float64(x), *arguments), atol=1e-5)


@pytest.mark.parametrize(
  ("layout", "expected"),
  [
    ("columns:r", {"allreduce"}),
    ("rows:s", {"allreduce", "allconcat"}),
    ("rows:r,columns:s", {"allreduce", "allconcat"}),
  ],
)
def test_products_of_split_columns_exchange_no_matrix(layout, expected):
  """Split columns: what is exchanged are sums of the small square, not the matrix."""
  mesh = mtf.Mesh(mtf.Graph(), "m")
  shape = mtf.convert_to_shape("rows:8 columns:64")
  optimize.orthogonalize(mtf.zeros(mesh, shape), shape.dims[:1], shape.dims[1:])
  report = mtf.describe(mesh.graph, layout, "r:2,s:4")
  kinds = {c.kind for o in report.operations for c in o.collectives}
  assert kinds == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["", "a:r", "b:s", "a:r,b:s", "a:s~", "c:r,b:s"])
def test_orthogonalize_in_bfloat16(layout, mode, cpu_devices):
  """The float32 value, but for the rounding of five steps; the same on all layouts."""
  x = np.random.default_rng(0).normal(size=[2, 6, 16]).astype(np.float32)
  dims = mtf.convert_to_shape("c:2 a:6 b:16").dims
  kind, execution = mode.split("_")
  found, exact = lower(
    make_impl(kind, Layout("r:2,s:4", layout), cpu_devices),
    lambda mesh: [
      optimize.orthogonalize(y, dims[1:2], dims[2:], product_dtype=dtype)
      for y in [mtf.import_tf_tensor(mesh, x, dims)]
      for dtype in ("bfloat16", tf.float32)
    ],
    execution == "function",
  )
  assert found.dtype == tf.float32
  for y, z, matrix in zip(found, exact, x):
    wanted = reference.newton_schulz(np.float64(matrix))
    np.testing.assert_allclose(z, wanted, atol=1e-5)
    assert np.linalg.norm(y - wanted) < 0.05 * np.linalg.norm(wanted)
    assert np.linalg.norm(y - wanted) > 1e-3 * np.linalg.norm(wanted)


def test_wrong_arguments_of_orthogonalize():
  x = mtf.zeros(mtf.Mesh(mtf.Graph(), "m"), "a:4 b:8")
  a, b = x.shape.dims
  with pytest.raises(ConfigError, match="three coefficients"):
    optimize.orthogonalize(x, [a], [b], coefficients=[1.0, 2.0])
  with pytest.raises(
    ConfigError, match="orthogonalize .*'float16' is not one of float32, bfloat16"
  ):
    optimize.orthogonalize(x, [a], [b], product_dtype=tf.float16)
  with pytest.raises(ShapeError, match="none in common"):
    optimize.orthogonalize(x, [a], [a])
  with pytest.raises(ShapeError, match="must each have a dimension"):
    optimize.orthogonalize(x, [a], [])
  with pytest.raises(DimensionError, match="columns"):
    optimize.orthogonalize(x, [a], [mtf.Dimension("c", 8)])
