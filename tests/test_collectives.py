"""Every collective, on both mesh implementations, eagerly and traced, against NumPy."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow.collectives import Groups, device_order, fold
from mesh_tensorflow.dimensions import convert_to_shape
from mesh_tensorflow.errors import GraphError, ShapeError
from mesh_tensorflow.mesh_impl import LaidOutTensor
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.processors import pnum_to_processor_coordinates
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl

MESHES = [
  "all:1", "a:2", "a:3", "a:4", "a:8", "a:2,b:2", "a:2,b:3", "a:1,b:4", "a:4,b:2", "a:2,b:2,c:2",
  "a:2,b:1,c:3",
]
# Cheap to trace, and between them every kind of mesh.
FEW_MESHES = ["a:3", "a:2,b:2", "a:2,b:2,c:2"]
KINDS = ["placement", "queues", "runtime", "threads"]


class Mesh:
  """A mesh implementation, and a way to run collectives on given slices."""

  def __init__(self, kind, shape, devices, **kwargs):
    self.kind = kind
    shape = convert_to_shape(shape)
    if kind == "placement":
      self.impl = PlacementMeshImpl(shape, "", devices[: shape.size])
    else:
      collectives = "auto" if kind == "threads" else kind
      self.impl = SimdMeshImpl(
        shape, "", devices[: shape.size], collectives=collectives, timeout_seconds=60, **kwargs
      )

  def __call__(self, fn, slices, eager=False):
    """`fn(impl, laid_out)` on the slices (an array: processors first); all resulting slices."""
    impl = self.impl

    def program(slices):
      if isinstance(impl, PlacementMeshImpl):
        laid_out = LaidOutTensor(tf.unstack(slices))
      else:
        pnum = impl.laid_out_pnum().one_slice
        laid_out = LaidOutTensor([tf.gather(slices, pnum)])
      return fn(impl, laid_out).to_laid_out_tensor().tensor_list

    def run(slices):
      return [s for r in impl.run_per_device(program, [slices]) for s in r]

    slices = tf.constant(slices)
    eager = eager or self.kind == "threads"
    result = run(slices) if eager else tf.function(run)(slices)
    return np.stack([r.numpy() for r in result])


def all_axes(shape):
  n = len(convert_to_shape(shape))
  return [list(c) for k in range(n + 1) for c in itertools.combinations(range(n), k)]


def group_of(shape, axes, pnum):
  """The processors that differ from `pnum` only along `axes`, in order of coordinates."""
  shape = convert_to_shape(shape)
  mine = pnum_to_processor_coordinates(shape, pnum)
  result = []
  for other in range(shape.size):
    c = pnum_to_processor_coordinates(shape, other)
    if all(c[i] == mine[i] for i in range(len(shape)) if i not in axes):
      result.append(other)
  return result


def slices_of(shape, slice_shape, dtype=np.float32, seed=0):
  rng = np.random.default_rng(seed)
  size = [convert_to_shape(shape).size, *slice_shape]
  if np.dtype(dtype) == bool:
    return rng.integers(0, 2, size).astype(bool)
  # Small integers: sums are exact in any order.
  return rng.integers(0, 50, size).astype(dtype)


cases = pytest.mark.parametrize(
  ("kind", "shape"),
  [(k, s) for k in KINDS for s in (FEW_MESHES if k == "runtime" else MESHES)],
)


@cases
def test_allreduce_over_any_axes(kind, shape, cpu_devices):
  x = slices_of(shape, [2, 3])
  mesh = Mesh(kind, shape, cpu_devices)
  for axes in all_axes(shape):
    for name, reduce in (("SUM", np.sum), ("MAX", np.max), ("MIN", np.min)):
      if name == "MIN" and len(axes) != 1:
        continue
      actual = mesh(lambda impl, t, a=axes, n=name: impl.allreduce(t, a, n), x)
      for pnum, y in enumerate(actual):
        np.testing.assert_array_equal(y, reduce(x[group_of(shape, axes, pnum)], axis=0))


@cases
def test_allconcat(kind, shape, cpu_devices):
  x = slices_of(shape, [2, 3])
  mesh = Mesh(kind, shape, cpu_devices)
  for axis in range(mesh.impl.ndims):
    for concat_axis, stack in ((0, False), (1, False), (1, True)):
      actual = mesh(
        lambda impl, t, a=axis, c=concat_axis, s=stack: impl.allconcat(t, a, c, stack=s), x
      )
      join = np.stack if stack else np.concatenate
      for pnum, y in enumerate(actual):
        np.testing.assert_array_equal(y, join(list(x[group_of(shape, [axis], pnum)]), concat_axis))


@cases
def test_alltoall(kind, shape, cpu_devices):
  mesh = Mesh(kind, shape, cpu_devices)
  for axis in range(mesh.impl.ndims):
    n = mesh.impl.shape[axis].size
    x = slices_of(shape, [2 * n, 3])
    actual = mesh(lambda impl, t, a=axis: impl.alltoall(t, a, 0, 1), x)
    for pnum, y in enumerate(actual):
      group = group_of(shape, [axis], pnum)
      k = group.index(pnum)
      expected = np.concatenate([x[q][2 * k : 2 * k + 2] for q in group], 1)
      np.testing.assert_array_equal(y, expected)


@cases
def test_receive_shift_and_broadcast(kind, shape, cpu_devices):
  x = slices_of(shape, [3]) + 1
  mesh = Mesh(kind, shape, cpu_devices)
  for axis in range(mesh.impl.ndims):
    n = mesh.impl.shape[axis].size
    sources = {
      "shift": [None, *range(n - 1)],
      "wrap": [(i - 1) % n for i in range(n)],
      "from_last": [n - 1] * n,
      "mixed": [None] + [0] * (n - 1),
      "nothing": [None] * n,
    }
    for name, source in sources.items():

      def fn(impl, t, axis=axis, n=n, name=name, source=source):
        if name in ("shift", "wrap"):
          return impl.shift_by_n_processors(t, axis, 1, wrap=name == "wrap")
        if name == "from_last":
          return impl.broadcast(t, axis, n - 1)
        return impl.receive(t, axis, source)

      for pnum, y in enumerate(mesh(fn, x)):
        group = group_of(shape, [axis], pnum)
        s = source[group.index(pnum)]
        np.testing.assert_array_equal(y, np.zeros(3) if s is None else x[group[s]], err_msg=name)


@cases
def test_allsplit(kind, shape, cpu_devices):
  mesh = Mesh(kind, shape, cpu_devices)
  for axis in range(mesh.impl.ndims):
    n = mesh.impl.shape[axis].size
    x = slices_of(shape, [3, 2 * n])
    for pnum, y in enumerate(mesh(lambda impl, t, a=axis: impl.allsplit(t, a, 1), x)):
      k = pnum_to_processor_coordinates(mesh.impl.shape, pnum)[axis]
      np.testing.assert_array_equal(y, x[pnum][:, 2 * k : 2 * k + 2])


def test_the_examples_of_the_reference(cpu_devices):
  for kind in KINDS:
    mesh = Mesh(kind, "r:2,s:3", cpu_devices)
    x = np.arange(6, dtype=np.int32)[:, None]

    def run(fn, mesh=mesh, x=x):
      return mesh(fn, x)[:, 0].tolist()

    assert run(lambda m, t: m.allreduce(t, [0], "SUM")) == [3, 5, 7, 3, 5, 7]
    assert run(lambda m, t: m.allreduce(t, [1], "MAX")) == [2, 2, 2, 5, 5, 5]
    assert run(lambda m, t: m.allreduce(t, [0, 1], "SUM")) == [15] * 6
    assert run(lambda m, t: m.shift_by_n_processors(t, 1, 1, wrap=False)) == [0, 0, 1, 0, 3, 4]
    assert run(lambda m, t: m.shift_by_n_processors(t, 1, 1, wrap=True)) == [2, 0, 1, 5, 3, 4]
    assert run(lambda m, t: m.receive(t, 1, [None, 0, 0])) == [0, 0, 0, 0, 3, 3]


DTYPES = [
  "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16",
  "float32", "float64", "complex64",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_travel_exactly(kind, dtype, cpu_devices):
  shape = "a:3"
  x = slices_of(shape, [4], dtype)
  if np.dtype(dtype).kind in "iu":
    x += np.iinfo(dtype).max // 4 - 50  # float32 would round the large ones.
  mesh = Mesh(kind, shape, cpu_devices)

  def fn(impl, t):
    parts = [impl.allreduce(t, [0], "SUM"), impl.receive(t, 0, [2, None, 0]),
             impl.allconcat(t, 0, 0)]
    if dtype != "complex64":
      parts += [impl.allreduce(t, [0], "MAX"), impl.allreduce(t, [0], "MIN")]
    return impl.slicewise(lambda *p: tf.concat(p, 0), *parts)

  for pnum, y in enumerate(mesh(fn, x)):
    parts = [x.any(0) if dtype == "bool" else x.sum(0, dtype=dtype),
             [x[2], np.zeros_like(x[0]), x[0]][pnum], x.reshape(-1)]
    if dtype != "complex64":
      parts += [x.max(0), x.min(0)]
    np.testing.assert_array_equal(y, np.concatenate(parts))


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_sums_of_large_groups_are_computed_in_float32(kind, cpu_devices):
  values = np.array([256.0] + [1.0] * 7, np.float32)[:, None]
  if kind == "placement":
    pytest.skip("a placement mesh has no such limit")
  for limit, exact in ((8, False), (4, True)):
    mesh = Mesh(kind, "a:8", cpu_devices, allreduce_in_bfloat16_max_group_size=limit)
    got = mesh(
      lambda impl, t: impl.slicewise(
        lambda s: tf.cast(s, tf.float32),
        impl.allreduce(impl.slicewise(lambda s: tf.cast(s, tf.bfloat16), t), [0], "SUM"),
      ),
      values,
    )
    assert len(set(got.ravel())) == 1
    if exact:
      assert got[0, 0] == 264.0  # 263 rounded to bfloat16, once.


@pytest.mark.parametrize("kind", ["queues", "runtime", "threads"])
@pytest.mark.parametrize("shape", ["a:3", "a:4", "a:2,b:2"])
def test_large_sums_are_equal_on_all_members_bit_by_bit(kind, shape, cpu_devices):
  size = convert_to_shape(shape).size
  x = np.random.default_rng(1).normal(size=[size, 12 * 16384]).astype(np.float32)
  mesh = Mesh(kind, shape, cpu_devices)
  actual = mesh(lambda impl, t: impl.allreduce(t, range(impl.ndims), "SUM"), x)
  for y in actual:
    np.testing.assert_array_equal(y, actual[0])
  np.testing.assert_allclose(actual[0], x.sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["queues", "runtime"])
def test_devices_in_any_order(kind, cpu_devices):
  order = [5, 2, 7, 0]
  devices = [cpu_devices[i] for i in order]
  x = slices_of("a:4", [4])
  mesh = Mesh(kind, "a:4", devices)
  np.testing.assert_array_equal(
    mesh(lambda impl, t: impl.allconcat(t, 0, 0), x), np.tile(x.reshape(-1), (4, 1))
  )
  np.testing.assert_array_equal(mesh(lambda impl, t: impl.alltoall(t, 0, 0, 0), x), x.T)
  np.testing.assert_array_equal(mesh(lambda impl, t: impl.receive(t, 0, [1, 2, 3, 0]), x), x[[1, 2, 3, 0]])


def test_one_device_for_all_processors(cpu_devices):
  x = slices_of("a:2,b:2", [4])
  mesh = Mesh("queues", "a:2,b:2", [cpu_devices[0]] * 4)
  np.testing.assert_array_equal(
    mesh(lambda impl, t: impl.allreduce(t, [0, 1], "SUM"), x), np.tile(x.sum(0), (4, 1))
  )


def test_placement_eagerly(cpu_devices):
  x = slices_of("a:2,b:2", [4])
  mesh = Mesh("placement", "a:2,b:2", cpu_devices)
  actual = mesh(lambda impl, t: impl.allreduce(t, [1], "SUM"), x, eager=True)
  np.testing.assert_array_equal(actual, x.reshape(2, 2, 4).sum(1).repeat(2, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_use(kind, cpu_devices):
  mesh = Mesh(kind, "a:2,b:2", cpu_devices)
  x = slices_of("a:2,b:2", [3])
  with pytest.raises(GraphError, match="'MEAN' is not SUM, MAX or MIN"):
    mesh(lambda impl, t: impl.allreduce(t, [0], "MEAN"), x)
  with pytest.raises(ShapeError, match="alltoall: axis 0 of size 3 .* mesh axis b:2"):
    mesh(lambda impl, t: impl.alltoall(t, 1, 0, 0), x)
  with pytest.raises(ShapeError, match="allsplit: axis 0 of size 3 .* mesh axis a:2"):
    mesh(lambda impl, t: impl.allsplit(t, 0, 0), x)


def test_groups():
  groups = Groups.of(convert_to_shape("a:2,b:3"), [1])
  assert groups.members == ((0, 1, 2), (3, 4, 5))
  assert (groups.size, groups.number(4), groups.rank(4), groups.name) == (3, 1, 1, "b")
  both = Groups.of(convert_to_shape("a:2,b:3"), [1, 0])
  assert both.members == (tuple(range(6)),)
  assert both.name == "a*b"


def test_devices_are_ranked_by_number_not_by_text():
  names = [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in (10, 9, 2)]
  assert sorted(names, key=device_order) == names[::-1]


def test_fold_of_bool():
  t, f = tf.constant([True]), tf.constant([False])
  assert bool(fold([f, t], "SUM")) and bool(fold([f, t], "MAX")) and not bool(fold([f, t], "MIN"))
