"""Every collective, on both mesh implementations, eagerly and traced, against NumPy."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mesh_tensorflow.errors import GraphError, ShapeError
from mesh_tensorflow.meshes.collectives import queues
from mesh_tensorflow.meshes.collectives.base import Groups, fold
from mesh_tensorflow.meshes.collectives.runtime import RELAY_BYTES, device_order
from mesh_tensorflow.meshes.laid_out import LaidOutTensor
from mesh_tensorflow.meshes.layout import pnum_to_processor_coordinates
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.program.dimensions import convert_to_shape
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl
from tests.kinds import kept

MESHES = [
  "all:1",
  "a:2",
  "a:3",
  "a:4",
  "a:8",
  "a:2,b:2",
  "a:2,b:3",
  "a:1,b:4",
  "a:4,b:2",
  "a:2,b:2,c:2",
  "a:2,b:1,c:3",
]
# Cheap to trace, and between them every kind of mesh.
FEW_MESHES = ["a:3", "a:2,b:2", "a:2,b:2,c:2"]
# In `make test`: one processor, a group of 4, unequal axes, an axis of one among three.
USUAL_MESHES = ["all:1", "a:4", "a:2,b:3", "a:2,b:1,c:3"]
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
    return self.all([(fn, slices)], eager)[0]

  def all(self, calls, eager=False):
    """The same for several (function, slices), in one trace."""
    impl = self.impl

    def program(arrays):
      results = []
      for (fn, _), slices in zip(calls, arrays):
        if isinstance(impl, PlacementMeshImpl):
          laid_out = LaidOutTensor(tf.unstack(slices))
        else:
          laid_out = LaidOutTensor([tf.gather(slices, impl.laid_out_pnum().one_slice)])
        results.append(fn(impl, laid_out).to_laid_out_tensor().tensor_list)
      return results

    def run(arrays):
      per_program = impl.run_per_device(program, [arrays])
      return [[s for r in rs for s in r] for rs in zip(*per_program)]

    arrays = [tf.constant(slices) for _, slices in calls]
    eager = eager or self.kind == "threads"
    results = run(arrays) if eager else tf.function(run)(arrays)
    return [np.stack([r.numpy() for r in rs]) for rs in results]


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


CASES = [(k, s) for k in KINDS for s in (FEW_MESHES if k == "runtime" else MESHES)]
# Of the first two, one for each implementation.
USUAL_OF = {
  "placement": USUAL_MESHES[1:],
  "queues": [USUAL_MESHES[0], *USUAL_MESHES[2:]],
  "runtime": FEW_MESHES[:2],
  "threads": USUAL_MESHES[1:],
}
USUAL = [(kind, shape) for kind in KINDS for shape in USUAL_OF[kind]]
cases = pytest.mark.parametrize(("kind", "shape"), kept(CASES, USUAL))


@cases
def test_allreduce_over_any_axes(kind, shape, cpu_devices):
  x = slices_of(shape, [2, 3])
  mesh = Mesh(kind, shape, cpu_devices)
  wanted = [
    (axes, name, reduce)
    for axes in all_axes(shape)
    for name, reduce in (("SUM", np.sum), ("MAX", np.max), ("MIN", np.min))
  ]
  results = mesh.all([(lambda impl, t, a=a, n=n: impl.allreduce(t, a, n), x) for a, n, _ in wanted])
  for actual, (axes, _, reduce) in zip(results, wanted):
    for pnum, y in enumerate(actual):
      np.testing.assert_array_equal(y, reduce(x[group_of(shape, axes, pnum)], axis=0))


@cases
def test_allconcat(kind, shape, cpu_devices):
  x = slices_of(shape, [2, 3])
  mesh = Mesh(kind, shape, cpu_devices)
  wanted = [
    (axis, *how)
    for axis in range(mesh.impl.ndims)
    for how in ((0, {}), (1, {"stack": False}), (1, {"stack": True}))
  ]
  results = mesh.all(
    [(lambda impl, t, w=w: impl.allconcat(t, w[0], w[1], **w[2]), x) for w in wanted]
  )
  for actual, (axis, concat_axis, how) in zip(results, wanted):
    join = np.stack if how.get("stack") else np.concatenate
    for pnum, y in enumerate(actual):
      np.testing.assert_array_equal(y, join(list(x[group_of(shape, [axis], pnum)]), concat_axis))


@cases
def test_alltoall_and_allsplit(kind, shape, cpu_devices):
  mesh = Mesh(kind, shape, cpu_devices)
  sizes = mesh.impl.shape.to_integer_list
  tall = [slices_of(shape, [2 * n, 3]) for n in sizes]
  wide = [slices_of(shape, [3, 2 * n]) for n in sizes]
  results = mesh.all(
    [(lambda impl, t, a=a: impl.alltoall(t, a, 0, 1), x) for a, x in enumerate(tall)]
    + [(lambda impl, t, a=a: impl.allsplit(t, a, 1), x) for a, x in enumerate(wide)]
  )
  for axis, x in enumerate(tall):
    for pnum, y in enumerate(results[axis]):
      group = group_of(shape, [axis], pnum)
      k = group.index(pnum)
      expected = np.concatenate([x[q][2 * k : 2 * k + 2] for q in group], 1)
      np.testing.assert_array_equal(y, expected)
  for axis, x in enumerate(wide):
    for pnum, y in enumerate(results[len(sizes) + axis]):
      k = pnum_to_processor_coordinates(mesh.impl.shape, pnum)[axis]
      np.testing.assert_array_equal(y, x[pnum][:, 2 * k : 2 * k + 2])


# Halves are swapped in groups of more than four only.
@pytest.mark.parametrize(("kind", "shape"), kept(CASES, [*USUAL, ("queues", "a:8")]))
def test_reduce_scatter(kind, shape, cpu_devices):
  """Against the sum over the group; and the way that an implementation without an own one goes."""
  mesh = Mesh(kind, shape, cpu_devices)
  calls, wanted = [], []
  for axis, n in enumerate(mesh.impl.shape.to_integer_list):
    for split_axis in (0, 1):
      x = slices_of(shape, [2 * n, 3] if split_axis == 0 else [3, 2 * n])
      for scatter in (type(mesh.impl).reduce_scatter, MeshImpl.reduce_scatter):
        calls.append((lambda impl, t, a=axis, s=split_axis, f=scatter: f(impl, t, a, s), x))
        wanted.append((axis, split_axis, x))
  for actual, (axis, split_axis, x) in zip(mesh.all(calls), wanted):
    for pnum, y in enumerate(actual):
      group = group_of(shape, [axis], pnum)
      k = group.index(pnum)
      expected = np.take(x[group].sum(0), [2 * k, 2 * k + 1], split_axis)
      np.testing.assert_array_equal(y, expected)


@cases
def test_receive_shift_and_broadcast(kind, shape, cpu_devices):
  x = slices_of(shape, [3]) + 1
  mesh = Mesh(kind, shape, cpu_devices)
  calls, wanted = [], []
  for axis, n in enumerate(mesh.impl.shape.to_integer_list):
    for wrap in (False, True):
      calls.append(lambda impl, t, a=axis, w=wrap: impl.shift_by_n_processors(t, a, 1, w))
      wanted.append((axis, [(i - 1) % n if wrap or i else None for i in range(n)]))
    calls.append(lambda impl, t, a=axis, n=n: impl.broadcast(t, a, n - 1))
    wanted.append((axis, [n - 1] * n))
    for source in ([None] + [0] * (n - 1), [None] * n, [n - 1 - i for i in range(n)]):
      calls.append(lambda impl, t, a=axis, s=source: impl.receive(t, a, s))
      wanted.append((axis, source))
  results = mesh.all([(fn, x) for fn in calls])
  for actual, (axis, source) in zip(results, wanted):
    for pnum, y in enumerate(actual):
      group = group_of(shape, [axis], pnum)
      s = source[group.index(pnum)]
      np.testing.assert_array_equal(y, np.zeros(3) if s is None else x[group[s]])


SEVERAL_AXES = [(k, s) for k, s in CASES if "," in s]


@pytest.mark.parametrize(
  ("kind", "shape"), kept(SEVERAL_AXES, [case for case in USUAL if "," in case[1]])
)
def test_receive_and_alltoall_over_several_axes(kind, shape, cpu_devices):
  """A group along several axes is numbered row-major by its coordinates."""
  mesh = Mesh(kind, shape, cpu_devices)
  several = [axes for axes in all_axes(shape) if len(axes) > 1]
  x = slices_of(shape, [3]) + 1
  calls, wanted = [], []
  for axes in several:
    n = len(group_of(shape, axes, 0))
    for source in (
      [(5 * i + 1) % n if n % 5 else n - 1 - i for i in range(n)],
      [None] + [0] * (n - 1),
      list(range(n)),
    ):
      calls.append((lambda impl, t, a=axes, s=source: impl.receive(t, a, s), x))
      wanted.append((axes, source))
  tall = [slices_of(shape, [2 * len(group_of(shape, axes, 0)), 3]) for axes in several]
  calls += [
    (lambda impl, t, a=axes: impl.alltoall(t, a, 0, 1), y) for axes, y in zip(several, tall)
  ]
  results = mesh.all(calls)
  for actual, (axes, source) in zip(results, wanted):
    for pnum, y in enumerate(actual):
      group = group_of(shape, axes, pnum)
      s = source[group.index(pnum)]
      np.testing.assert_array_equal(y, np.zeros(3) if s is None else x[group[s]])
  for actual, axes, y in zip(results[len(wanted) :], several, tall):
    for pnum, part in enumerate(actual):
      group = group_of(shape, axes, pnum)
      k = group.index(pnum)
      expected = np.concatenate([y[q][2 * k : 2 * k + 2] for q in group], 1)
      np.testing.assert_array_equal(part, expected)


@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_large_permutations_through_relays(dtype, cpu_devices):
  """TensorFlow's collectives have a way of their own for them."""
  shape = "a:2,b:3"
  x = slices_of(shape, [6, 1 << 18 if dtype == "float32" else 1 << 20], dtype)
  assert x[0].nbytes >= RELAY_BYTES
  mesh = Mesh("runtime", shape, cpu_devices)
  sources = [[3, 5, 1, 0, 2, 4], [None, 0, 0, 5, 3, None]]
  results = mesh.all(
    [(lambda impl, t, s=source: impl.receive(t, [0, 1], s), x) for source in sources]
  )
  for actual, source in zip(results, sources):
    for y, s in zip(actual, source):
      np.testing.assert_array_equal(y, np.zeros_like(x[0]) if s is None else x[s])


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
  "bool",
  "int8",
  "uint8",
  "int16",
  "uint16",
  "int32",
  "uint32",
  "int64",
  "uint64",
  "float16",
  "float32",
  "float64",
  "complex64",
]


@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_travel_exactly(kind, cpu_devices):
  """All dtypes in one program."""
  shape = "a:3"
  mesh = Mesh(kind, shape, cpu_devices)

  def fn(impl, t):
    parts = [
      impl.allreduce(t, [0], "SUM"),
      impl.receive(t, 0, [2, None, 0]),
      impl.allconcat(t, 0, 0),
    ]
    if not parts[0].to_laid_out_tensor().tensor_list[0].dtype.is_complex:
      parts += [impl.allreduce(t, [0], "MAX"), impl.allreduce(t, [0], "MIN")]
    return impl.slicewise(lambda *p: tf.concat(p, 0), *parts)

  values = {dtype: slices_of(shape, [4], dtype) for dtype in DTYPES}
  for dtype, x in values.items():
    if np.dtype(dtype).kind in "iu":
      x += np.iinfo(dtype).max // 4 - 50  # float32 would round the large ones.
  results = mesh.all([(fn, x) for x in values.values()])
  for (dtype, x), actual in zip(values.items(), results):
    assert actual.dtype == x.dtype
    for pnum, y in enumerate(actual):
      parts = [
        x.any(0) if dtype == "bool" else x.sum(0, dtype=dtype),
        [x[2], np.zeros_like(x[0]), x[0]][pnum],
        x.reshape(-1),
      ]
      if dtype != "complex64":
        parts += [x.max(0), x.min(0)]
      np.testing.assert_array_equal(y, np.concatenate(parts), err_msg=dtype)


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
    scattered = mesh(
      lambda impl, t: impl.slicewise(
        lambda s: tf.cast(s, tf.float32),
        impl.reduce_scatter(
          impl.slicewise(lambda s: tf.cast(tf.tile(s, [8]), tf.bfloat16), t), 0, 0
        ),
      ),
      values,
    )
    if exact:
      np.testing.assert_array_equal(scattered, got)
    assert len(set(got.ravel())) == 1
    if exact:
      assert got[0, 0] == 264.0  # 263 rounded to bfloat16, once.


@pytest.mark.parametrize("kind", ["queues", "runtime", "threads"])
@pytest.mark.parametrize("shape", kept(["a:3", "a:4", "a:2,b:2", "a:6"], ["a:3", "a:2,b:2"]))
def test_large_sums_are_equal_on_all_members_bit_by_bit(kind, shape, cpu_devices):
  size = convert_to_shape(shape).size
  x = np.random.default_rng(1).normal(size=[size, 12 * 32768]).astype(np.float32)
  mesh = Mesh(kind, shape, cpu_devices)
  actual = mesh(lambda impl, t: impl.allreduce(t, range(impl.ndims), "SUM"), x)
  for y in actual:
    np.testing.assert_array_equal(y, actual[0])
  np.testing.assert_allclose(actual[0], x.sum(0), rtol=1e-4, atol=1e-4)


SHAPES_OF_SUMS = ["a:2", "a:3", "a:4", "a:8", "a:2,b:2", "a:2,b:3", "a:4,b:2", "a:2,b:2,c:2"]


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(
  shape=st.sampled_from(SHAPES_OF_SUMS),
  which=st.lists(
    st.tuples(
      st.integers(1, 7),  # Bits: the axes.
      st.sampled_from(["SUM", "MAX", "MIN"]),
      st.sampled_from(["float32", "int32", "bool"]),
      st.sampled_from(["program", "loop", "branch"]),
    ),
    min_size=1,
    max_size=6,
  ),
)
def test_reductions_by_one_member(shape, which, cpu_devices):
  """Some for all of a group, some in loops and branches; two runs, in a loop, of one trace."""
  shape = convert_to_shape(shape)
  impl = SimdMeshImpl(shape, "", cpu_devices[: shape.size], timeout_seconds=60)
  which = [([a for a in range(len(shape)) if bits >> a & 1] or [0], *w) for bits, *w in which]
  slices = [slices_of(shape, [5], dtype, i) for i, (*_, dtype, _) in enumerate(which)]

  def program():
    reduced = []
    for (axes, name, _, where), x in zip(which, slices):
      mine = tf.gather(tf.constant(x), impl.laid_out_pnum().one_slice)

      def reduce(t, axes=axes, name=name):
        return impl.allreduce(LaidOutTensor([t]), axes, name).one_slice

      if where == "loop":  # The second round reduces what all members have the same of.
        mine = tf.while_loop(
          lambda i, t: i < 2,
          lambda i, t: (i + 1, reduce(t)),
          (tf.constant(0), mine),
        )[1]
      elif where == "branch":
        yes = tf.equal(tf.size(mine), 5)
        mine = tf.cond(yes, lambda t=mine: reduce(t), lambda t=mine: t)
      else:
        mine = reduce(mine)
      reduced.append(mine)
    return reduced

  @tf.function
  def twice():
    tf.while_loop(lambda i: i < 1, lambda i: (impl.run_per_device(program) and i + 1,), (0,))
    return impl.run_per_device(program)

  with pytest.MonkeyPatch.context() as m:
    m.setattr(queues, "ONCE_BYTES", 1)
    traced = twice.get_concrete_function()
  once = sum(where == "program" for *_, where in which)
  calls = [op for op in traced.graph.get_operations() if op.type == "StatefulPartitionedCall"]
  assert len(calls) == shape.size + (once > 0)
  if once:
    functions = traced.graph.as_graph_def().library.function
    name = calls[-1].get_attr("f").name
    nodes = next(f.node_def for f in functions if f.signature.name == name)
    # The part of each member, once.
    assert sum(n.op == "QueueDequeueV2" for n in nodes) == shape.size * once
  for results in (traced(), traced()):
    for i, (axes, name, dtype, where) in enumerate(which):
      ufunc = {"SUM": np.add, "MAX": np.maximum, "MIN": np.minimum}[name]
      for pnum in range(shape.size):
        members = group_of(shape, axes, pnum)
        wanted = ufunc.reduce(slices[i][members], axis=0, dtype=dtype)
        if where == "loop":
          wanted = ufunc.reduce(np.stack([wanted] * len(members)), axis=0, dtype=dtype)
        np.testing.assert_array_equal(results[pnum][i], wanted)


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
  source = [1, 2, 3, 0]
  actual = mesh(lambda impl, t: impl.receive(t, 0, source), x)
  np.testing.assert_array_equal(actual, x[source])


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


@pytest.mark.parametrize("kind", kept(KINDS, ["placement", "threads"]))
@pytest.mark.slow
def test_wrong_use(kind, cpu_devices):
  mesh = Mesh(kind, "a:2,b:2", cpu_devices)
  x = slices_of("a:2,b:2", [3])
  with pytest.raises(GraphError, match="'MEAN' is not SUM, MAX or MIN"):
    mesh(lambda impl, t: impl.allreduce(t, [0], "MEAN"), x)
  with pytest.raises(ShapeError, match="alltoall: axis 0 of size 3 .* mesh axis b:2"):
    mesh(lambda impl, t: impl.alltoall(t, 1, 0, 0), x)
  with pytest.raises(ShapeError, match="reduce_scatter: axis 0 of size 3 .* mesh axis b:2"):
    mesh(lambda impl, t: impl.reduce_scatter(t, 1, 0), x)
  with pytest.raises(ShapeError, match="alltoall: axis 0 of size 3 .* mesh axes a:2,b:2"):
    mesh(lambda impl, t: impl.alltoall(t, [0, 1], 0, 0), x)
  with pytest.raises(ShapeError, match=r"receive: source_pcoord \[0, 2\] .* 0 to 1, for mesh axis"):
    mesh(lambda impl, t: impl.receive(t, 1, [0, 2]), x)
  with pytest.raises(ShapeError, match="have 4 entries, None or 0 to 3, for mesh axes a:2,b:2"):
    mesh(lambda impl, t: impl.receive(t, [0, 1], [0, 2]), x)
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
