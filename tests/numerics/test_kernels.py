"""TensorFlow operations of slices: any number of axes; below the limits nothing but them."""

from __future__ import annotations

import pathlib
import re
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.numerics import kernels

PACKAGE = pathlib.Path(mtf.__file__).parent


def _draw(rng, most_axes):
  """Three tensors that broadcast together, and the joint sizes."""
  sizes = [int(n) for n in rng.choice([1, 2, 3], rng.integers(1, most_axes + 1), p=[0.2, 0.6, 0.2])]
  shapes = [[n if rng.random() < 0.6 else 1 for n in sizes] for _ in range(3)]
  shapes = [s[rng.integers(0, 2) :] for s in shapes]
  return [rng.integers(-4, 4, s).astype(np.float32) for s in shapes], sizes


def _check_broadcasts(rng, most_axes):
  (a, b, c), sizes = _draw(rng, most_axes)
  np.testing.assert_array_equal(kernels.elementwise(tf.subtract, *map(tf.constant, (a, b))), a - b)
  chosen = kernels.where(tf.constant(a > 0), tf.constant(b), tf.constant(c))
  np.testing.assert_array_equal(chosen, np.where(a > 0, b, c))
  np.testing.assert_array_equal(
    kernels.broadcast_to(tf.constant(a), sizes), np.broadcast_to(a, sizes)
  )


def _check_axes(rng, most_axes):
  x = rng.integers(-9, 9, rng.integers(1, 4, rng.integers(1, most_axes + 1))).astype(np.float32)
  axis = int(rng.integers(0, x.ndim))
  n, t = x.shape[axis], tf.constant(x)
  np.testing.assert_array_equal(kernels.argmax(t, axis), x.argmax(axis))
  paddings = [(0, 0)] * x.ndim
  paddings[axis] = (1, 2)
  np.testing.assert_array_equal(kernels.pad(t, axis, 1, 2), np.pad(x, paddings))
  last = np.take(x, [n - 1], axis)
  np.testing.assert_array_equal(kernels.cut_axis(t, axis, n - 1, 1), last)
  np.testing.assert_array_equal(kernels.cut_axis(t, axis, tf.constant(n - 1), 1), last)
  e = np.exp(x)
  for most in (0, 2**13):
    with mock.patch.object(kernels, "_SMALL_SOFTMAX", most):
      np.testing.assert_allclose(kernels.softmax(t, axis), e / e.sum(axis, keepdims=True), 1e-5)
  begin = [int(rng.integers(0, n)) for n in x.shape]
  sizes = [int(rng.integers(1, n - b + 1)) for n, b in zip(x.shape, begin)]
  part = x[tuple(slice(b, b + n) for b, n in zip(begin, sizes))]
  np.testing.assert_array_equal(kernels.cut(t, begin, sizes), part)
  np.testing.assert_array_equal(kernels.cut(t, tf.constant(begin), sizes), part)
  # In a graph, where it is not tf.stack.
  stack = tf.function(lambda t: kernels.stack([t, t + 1.0, t], axis), autograph=False)
  np.testing.assert_array_equal(stack(t), np.stack([x, x + 1.0, x], axis))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "int8"])
def test_largest_of_long_rows(dtype):
  rng = np.random.default_rng(2)
  for n in (1023, 1024, 1200, 3 * 701, 6016, 2039):  # The last is a prime.
    rows = [int(r) for r in rng.integers(1, 4, int(rng.integers(0, 3)))]
    k = int(rng.choice([1, 3, 8, 40, n]))
    few = int(rng.choice([2, 50]))  # Values: many are equal.
    x = tf.cast(rng.integers(-few, few, [*rows, n]), dtype)
    if dtype == "float32":
      x = tf.where(x == -few, float("-inf"), x)
    want = np.argsort(-tf.cast(x, tf.float64).numpy(), -1, kind="stable")[..., :k]
    values, indices = kernels.top_k(x, k)
    np.testing.assert_array_equal(indices, want)
    np.testing.assert_array_equal(values, tf.gather(x, want, axis=-1, batch_dims=len(rows)))


def test_long_rows_are_searched_in_groups():
  @tf.function(autograph=False)
  def top(x):
    return kernels.top_k(x, 8)

  def lengths(n):
    graph = top.get_concrete_function(tf.TensorSpec([3, n])).graph
    return [op.inputs[0].shape[-1] for op in graph.get_operations() if op.type == "TopKV2"]

  assert lengths(1000) == [1000]
  assert lengths(32128) == [502, 8, 512]


@pytest.mark.parametrize("cpus", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int32", "uint8", "bool"])
def test_rows_are_overwritten(dtype, cpus, monkeypatch):
  monkeypatch.setattr(kernels, "only_cpu_kernels", lambda: cpus)
  rng = np.random.default_rng(3)
  x, values = (tf.cast(rng.integers(0, 2, s) * 117, dtype).numpy() for s in ([9, 4], [3, 4]))
  if dtype == "float32":
    values[0] = [np.nan, -0.0, np.inf, 1e-40]  # Bits as they are.
  given = x.copy()

  @tf.function(autograph=False)
  def overwrite(x, values):
    rows, chosen = tf.constant([7, 0, 3]), tf.constant([True, False, True])
    return kernels.overwrite_rows(x, rows, values, chosen)

  want = x.copy()
  want[[7, 3]] = values[[0, 2]]
  given_tensor = tf.constant(x)
  assert overwrite(given_tensor, tf.constant(values)).numpy().tobytes() == want.tobytes()
  np.testing.assert_array_equal(given_tensor.numpy(), given)  # What others need is copied.


def test_rows_are_overwritten_by_what_works_in_place():
  @tf.function(autograph=False)
  def overwrite(x):
    return kernels.overwrite_rows(x, tf.constant([2]), tf.ones([1, 3]), tf.constant([True]))

  types = {
    op.type for op in overwrite.get_concrete_function(tf.TensorSpec([4, 3])).graph.get_operations()
  }
  assert "ScatterNdNonAliasingAdd" in types and "TensorScatterUpdate" not in types


def test_drawn_axes():
  rng = np.random.default_rng(0)
  for _ in range(60):
    _check_broadcasts(rng, 10)
  for _ in range(12):
    _check_axes(rng, 10)


@pytest.mark.long
def test_many_drawn_axes():
  rng = np.random.default_rng(1)
  for _ in range(5000):
    _check_broadcasts(rng, 12)
  for _ in range(300):
    _check_axes(rng, 12)


def test_every_number_of_alternating_axes():
  """Each operand has every other axis, up to 12: the worst that there is."""
  for n in range(1, 13):
    a = np.arange(2 ** ((n + 1) // 2)).reshape([2 - i % 2 for i in range(n)])
    b = np.arange(2 ** (n // 2)).reshape([1 + i % 2 for i in range(n)])
    ta, tb = tf.constant(a), tf.constant(b)
    np.testing.assert_array_equal(kernels.elementwise(tf.add, ta, tb), a + b)
    np.testing.assert_array_equal(kernels.where(ta < 5, ta, tb), np.where(a < 5, a, b))
    np.testing.assert_array_equal(kernels.broadcast_to(tb, [2] * n), np.broadcast_to(b, [2] * n))


def test_dtypes_of_what_is_repeated():
  sizes = [2, 1, 2, 1, 2, 1]
  for dtype in (tf.bool, tf.uint16, tf.int8, tf.uint32, tf.int64, tf.bfloat16, tf.complex64):
    x = tf.cast(tf.reshape(tf.range(8), sizes), dtype)
    y = kernels.elementwise(tf.equal, x, tf.transpose(x, [1, 0, 3, 2, 5, 4]))
    assert y.shape == [2] * 6 and int(tf.reduce_sum(tf.cast(y, tf.int32))) >= 8


def test_little_is_repeated():
  """Of operands of very different sizes the small one, along a short axis."""
  graph = tf.Graph()
  with graph.as_default():
    x = tf.raw_ops.Placeholder(dtype=tf.float32, shape=[64, 3, 64, 2, 64, 5])
    y = tf.raw_ops.Placeholder(dtype=tf.float32, shape=[1, 3, 1, 2, 1, 5])
    kernels.elementwise(tf.add, x, y)
  made = [op.outputs[0].shape.num_elements() for op in graph.get_operations()
          if op.type == "BroadcastTo"]  # fmt: skip
  assert len(made) == 1 and made[0] <= 64 * 30


def _operations(fn, *shapes):
  """Types of the operations that a function makes of tensors of these shapes."""
  graph = tf.Graph()
  with graph.as_default():
    fn(*[tf.raw_ops.Placeholder(dtype=tf.float32, shape=s) for s in shapes])
  return [op.type for op in graph.get_operations() if op.type not in ("Placeholder", "Const")]


@pytest.mark.parametrize(
  "fn,shapes,want",
  [
    (lambda x, y: kernels.elementwise(tf.add, x, y), ([2, 1, 3], [4, 1]), "AddV2"),
    (lambda x, y: kernels.elementwise(tf.add, x, y), ([2] * 8, [2] * 8), "AddV2"),
    (lambda x, y: kernels.elementwise(tf.add, x, y), ([2] * 8, [2] * 3), "AddV2"),
    (lambda x, y: kernels.elementwise(tf.add, x, y), ([2, 1, 1, 1, 2, 1], [2] * 6), "AddV2"),
    (lambda x, y: kernels.where(tf.constant(True), x, y), ([2, 1] * 4, [1, 2] * 4), "SelectV2"),
    (lambda x: kernels.broadcast_to(x, [2] * 8), ([2, 1, 1, 2, 1, 1],), "BroadcastTo"),
    (lambda x: kernels.softmax(x, 2), ([64] * 3,), "Softmax"),
    (lambda x: kernels.argmax(x, 3), ([2] * 7,), "Snapshot ArgMax"),
    (lambda x: kernels.pad(x, 3, 1, 1), ([2] * 8,), "Pad"),
    (lambda x: kernels.cut(x, [1] * 8, [1] * 8), ([2] * 8,), "Slice"),
    (lambda x: kernels.cut_axis(x, 1, 1, 1), ([2] * 8,), "Slice"),
    (lambda x, y: kernels.stack([x, y], 0), ([2, 3], [2, 3]), "ConcatV2 Reshape"),
  ],
)
def test_below_the_limits_nothing_is_added(fn, shapes, want):
  assert _operations(fn, *shapes) == want.split()


@pytest.mark.parametrize(
  "a,b,transpose_a,transpose_b,want",
  [
    # Vectors, small matrices, large ones, and a product without a batch.
    ([64, 1, 64], [64, 128, 64], False, True, "BatchMatMulV3"),
    ([64, 64, 128], [64, 64, 1], True, False, "BatchMatMulV3"),
    ([8, 4, 16], [8, 16, 32], False, False, "BatchMatMulV3"),
    ([8, 64, 32], [8, 32, 64], False, False, "BatchMatMulV2"),
    ([1, 64], [64, 128], False, False, "MatMul"),
  ],
)
def test_products_of_vectors_and_of_small_matrices_avoid_onednn(
  a, b, transpose_a, transpose_b, want
):
  def product(x, y):
    return kernels.matmul(x, y, transpose_a, transpose_b)

  assert _operations(product, a, b) == [want]
  rng = np.random.default_rng(0)
  x, y = (rng.standard_normal(s).astype(np.float32) for s in (a, b))
  expected = (np.swapaxes(x, -1, -2) if transpose_a else x) @ (
    np.swapaxes(y, -1, -2) if transpose_b else y
  )
  np.testing.assert_allclose(product(tf.constant(x), tf.constant(y)), expected, 1e-4, 1e-4)


# ------------------------------------------------------------- TensorFlow's graph optimizer


def _second_parts(x):
  """Second outputs of operations, each twice: those that the optimizer takes for the first."""
  a, k = mtf.Dimension("a", 2), mtf.Dimension("k", 2)
  _, part = mtf.unstack(x, a)
  small = mtf.split(x, mtf.Dimension("b", 4), [3, 1])[1]
  positions = mtf.to_float(mtf.top_k(x, mtf.Dimension("b", 4), k)[1])
  again = mtf.unstack(x, a)[1]
  return {
    "unstack": mtf.stack([part, part], "s"),
    "computed twice": mtf.stack([part, again], "s"),
    "identity": mtf.stack([mtf.identity(part)] * 3, "s"),
    "chain": mtf.stack([mtf.stack([part, part], "s")] * 2, "t", axis=1),
    "split": mtf.concat([mtf.stack([small, small], "s", axis=1)] * 2, "s"),
    "top_k": mtf.stack([positions, positions], "s", axis=1),
    "gradient": mtf.gradients(
      [mtf.add_n(mtf.unstack(mtf.stack([part, part], "s"), mtf.Dimension("s", 2)))], [x]
    )[0],
  }


@pytest.mark.parametrize("kind,count", [("placement", 1), ("placement", 2), ("simd", 2)])
def test_stacks_of_one_tensor(kind, count, cpu_devices):
  implementations = {
    "placement": mtf.placement_mesh_impl.PlacementMeshImpl,
    "simd": mtf.simd_mesh_impl.SimdMeshImpl,
  }

  def run(value):
    impl = implementations[kind](f"r:{count}", "", cpu_devices[:count])

    def program(value):
      graph = mtf.Graph()
      mesh = mtf.Mesh(graph, "stacks")
      made = _second_parts(mtf.import_tf_tensor(mesh, value, mtf.convert_to_shape("a:2 b:4")))
      lowering = mtf.Lowering(graph, {mesh: impl})
      return {name: lowering.export_to_tf_tensor(y) * 2.0 for name, y in made.items()}

    return impl.run(program, [value])

  value = tf.constant([[1.0, 2.0, 3.0, 4.0], [8.0, 7.0, 6.0, 5.0]])
  expected = run(value)
  np.testing.assert_array_equal(expected["unstack"][1], 2.0 * value[1])
  traced = tf.function(run, autograph=False)(value)
  assert traced.keys() == expected.keys()
  for name, want in expected.items():
    np.testing.assert_array_equal(traced[name], want, err_msg=name)


def test_the_first_of_elements_that_a_function_made_equal(run_forked):
  """With the optimizer, which takes such functions off before an argmax."""
  run_forked(
    """
import numpy as np
import tensorflow as tf
from mesh_tensorflow.numerics import kernels

x = tf.constant(np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32) - 1)
for rising in (tf.nn.relu, tf.floor, tf.sign, tf.nn.relu6):
  for sign in (1.0, -1.0):
    fn = lambda x: kernels.argmax(sign * rising(x), 1)
    np.testing.assert_array_equal(tf.function(fn, autograph=False)(x), fn(x))
"""
  )


# ------------------------------------------------------------------- one way to the kernels

_LIMITED = re.compile(
  r"\btf\.(where|broadcast_to|slice|strided_slice|pad|argmax|argmin|reverse|stack|nn\.softmax)\("
)
# Where there are few axes, whatever a program's tensors have (those of an imported function are as
# many as TensorFlow took there): file and number of calls.
_FEW_AXES = {
  "bert/optimization.py": 1,
  "bert/records.py": 1,
  "bert/training.py": 1,
  "checkpoint/snapshot.py": 1,
  "decoding/beam_search_state.py": 2,
  "decoding/token_choice.py": 1,
  "experimental/data_aug_lib.py": 9,
  "experimental/input_reader.py": 1,
  "experimental/model_executor.py": 1,
  "experimental/unet_data.py": 3,
  "importing/dynamic_shapes.py": 2,
  "importing/families/batched.py": 5,
  "importing/families/elementwise.py": 1,
  "importing/families/gathers.py": 4,
  "importing/families/images.py": 2,
  "importing/families/pooling.py": 1,
  "importing/families/slicing.py": 5,
  "importing/keyed_random.py": 1,
  "layers/masks.py": 2,
  "meshes/tpu/collectives.py": 1,
  "numerics/random_bits.py": 1,
  "operations/convolution_kernels.py": 3,
  "operations/convolution_slices.py": 6,
  "operations/cross_entropy.py": 4,
  "operations/pooling.py": 2,
  "operations/stacked_variable.py": 1,
  "optimize/averaging.py": 1,
  "sparse/lookup.py": 2,
  "sparse/routing.py": 7,
  "training/loss_scale.py": 3,
  "training/reported.py": 3,
}


def test_operations_call_limited_kernels_through_one_file():
  found = {}
  for path in sorted(PACKAGE.rglob("*.py")):
    calls = len(_LIMITED.findall(path.read_text()))
    if calls and path.name != "kernels.py":
      found[path.relative_to(PACKAGE).as_posix()] = calls
  more = {name: n for name, n in found.items() if n > _FEW_AXES.get(name, 0)}
  assert not more, f"call these through mesh_tensorflow/numerics/kernels.py: {more}"
