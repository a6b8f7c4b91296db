"""The collectives of a TPU, rewritten to those of virtual CPUs (`tpu_rewrite`), against NumPy."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow.errors import DTypeError, ShapeError
from mesh_tensorflow.meshes.laid_out import LaidOutTensor
from mesh_tensorflow.meshes.layout import pnum_to_processor_coordinates
from mesh_tensorflow.meshes.tpu.mesh_impl import StrategyMeshImpl
from mesh_tensorflow.program.dimensions import convert_to_shape
from tests.meshes.tpu import tpu_rewrite

MESHES = ["a:3", "a:2,b:3", "a:1,b:4", "a:2,b:2,c:2"]


REDUCTIONS = (("SUM", np.sum), ("MAX", np.max), ("MIN", np.min))


def make_impl(shape, devices, **kwargs):
  """A mesh with TPU collectives whose processors are replicas in another order."""
  size = convert_to_shape(shape).size
  strategy = tf.distribute.MirroredStrategy(devices[:size])
  # 5 is prime to all the sizes.
  order = [(5 * p + 1) % size for p in range(size)]
  return StrategyMeshImpl(
    shape, "", strategy, logical_to_physical=order, collectives="tpu", **kwargs
  )


def results_of(impl, calls, devices):
  """For each (function of a laid-out tensor, slices of all processors) the resulting slices."""

  def program(arrays):
    done = []
    for (fn, _), slices in zip(calls, arrays):
      x = LaidOutTensor([tf.gather(slices, impl.pnum_tensor)])
      done.append(fn(x).to_laid_out_tensor().one_slice)
    return done

  trace = impl.trace(program, [[tf.constant(slices) for _, slices in calls]])
  for t in trace.function.outputs:
    assert t.shape.is_fully_defined()
  outputs = tpu_rewrite.run(impl, trace, devices)
  assert [int(o[-1]) for o in outputs] == list(range(impl.size))
  return [np.stack([o[i].numpy() for o in outputs]) for i in range(len(calls))]


def all_axes(shape):
  n = len(convert_to_shape(shape))
  every = [list(c) for k in range(1, n + 1) for c in itertools.combinations(range(n), k)]
  return every if n < 3 else [[0], [2], [0, 2], [0, 1, 2]]


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
  return rng.integers(1, 50, size).astype(dtype)


@pytest.mark.parametrize("shape", MESHES)
def test_every_collective_on_every_group_of_axes(shape, cpu_devices):
  impl = make_impl(shape, cpu_devices)
  x = slices_of(shape, [2, 5])
  calls, wanted = [], []

  for axes in all_axes(shape):
    n = len(group_of(shape, axes, 0))
    for name, reduce in REDUCTIONS:
      calls.append((lambda t, a=axes, name=name: impl.allreduce(t, a, name), x))
      wanted.append((axes, lambda group, k, reduce=reduce: reduce(x[group], 0)))
    tall = slices_of(shape, [3, 2 * n], seed=n)
    calls.append((lambda t, a=axes: impl.alltoall(t, a, 1, 0), tall))
    wanted.append(
      (
        axes,
        lambda group, k, y=tall: np.concatenate([y[q][:, 2 * k : 2 * k + 2] for q in group], 0),
      )
    )
    calls.append((lambda t, a=axes: impl.reduce_scatter(t, a, 1), tall))
    wanted.append((axes, lambda group, k, y=tall: y[group].sum(0)[:, 2 * k : 2 * k + 2]))
    for source in ([n - 1 - i for i in range(n)], [None] + [0] * (n - 1), [None, *range(n - 1)]):
      calls.append((lambda t, a=axes, s=source: impl.receive(t, a, s), x))
      wanted.append(
        (
          axes,
          lambda group, k, s=source: 0 * x[0] if s[k] is None else x[group[s[k]]],
        )
      )
  for axis in range(impl.ndims):
    calls.append((lambda t, a=axis: impl.allconcat(t, a, 1), x))
    wanted.append(([axis], lambda group, k: np.concatenate(x[group], 1)))
    calls.append((lambda t, a=axis: impl.allconcat(t, a, 0, stack=True), x))
    wanted.append(([axis], lambda group, k: x[group]))
  for i, actual in enumerate(results_of(impl, calls, cpu_devices)):
    axes, reference = wanted[i]
    for p in range(impl.size):
      group = group_of(shape, axes, p)
      np.testing.assert_array_equal(actual[p], reference(group, group.index(p)), str((i, axes, p)))


DTYPES = (
  "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 complex64 "
  "complex128"
).split()


@pytest.mark.slow
def test_dtypes_travel_exactly(cpu_devices):
  impl = make_impl("a:3", cpu_devices)
  calls, wanted = [], []
  for dtype in DTYPES:
    kind = np.dtype(dtype).kind
    x = slices_of("a:3", [4], dtype)
    if kind in "iu":
      # Sums wrap around, and float32 would round what it carries.
      x = x * (np.iinfo(dtype).max // 128) + np.arange(12, dtype=dtype).reshape(3, 4)
      if kind == "i":
        x[1] = -x[1]
    if kind == "c":
      x = x + 1j * x[::-1]
    source = [2, None, 0]
    calls.append((lambda t, s=source: impl.receive(t, 0, s), x))
    wanted.append([x[2], 0 * x[0], x[0]])
    calls.append((lambda t: impl.allconcat(t, 0, 0), x))
    wanted.append([x.reshape(-1)] * 3)
    calls.append((lambda t: impl.allreduce(t, [0], "SUM"), x))
    wanted.append([x.any(0) if dtype == "bool" else x.sum(0, dtype=dtype)] * 3)
    if kind == "b":
      calls.append((lambda t: impl.allreduce(t, [0], "MIN"), x))
      wanted.append([x.all(0)] * 3)
    if kind != "c":
      calls.append((lambda t: impl.allreduce(t, [0], "MAX"), x))
      wanted.append([x.max(0)] * 3)
  for (_, x), actual, expected in zip(calls, results_of(impl, calls, cpu_devices), wanted):
    assert actual.dtype == x.dtype
    np.testing.assert_array_equal(actual, np.stack(expected).astype(x.dtype))


def test_no_infinity_or_nan_touches_what_is_not_asked_for(cpu_devices):
  impl = make_impl("a:4", cpu_devices)
  x = np.array([[np.inf, 1], [np.nan, 2], [3, -np.inf], [4, 5]], np.float32)
  calls = [
    (lambda t: impl.receive(t, 0, [3, 2, 1, 0]), x),
    (lambda t: impl.receive(t, 0, [None, 3, 3, 3]), x),
    (lambda t: impl.allconcat(t, 0, 0, stack=True), x),
    (lambda t: impl.allreduce(t, [0], "MAX"), x[[0, 2, 3, 3]]),
  ]
  results = results_of(impl, calls, cpu_devices)
  np.testing.assert_array_equal(results[0], x[::-1])
  np.testing.assert_array_equal(results[1], [[0, 0], [4, 5], [4, 5], [4, 5]])
  np.testing.assert_array_equal(results[2], [x] * 4)
  np.testing.assert_array_equal(results[3], [[np.inf, 5]] * 4)


def test_bfloat16_sums_of_large_groups_are_computed_in_float32(cpu_devices):
  values = np.array([256.0] + [1.0] * 7, np.float32)[:, None]

  def sums(impl):
    def in_bfloat16(fn, x):
      narrow = impl.slicewise(lambda s: tf.cast(s, tf.bfloat16), x)
      return impl.slicewise(lambda s: tf.cast(s, tf.float32), fn(narrow))

    calls = [
      (lambda t: in_bfloat16(lambda n: impl.allreduce(n, [0], "SUM"), t), values),
      (
        lambda t: in_bfloat16(
          lambda n: impl.reduce_scatter(impl.slicewise(lambda s: tf.tile(s, [8]), n), 0, 0), t
        ),
        values,
      ),
      (lambda t: in_bfloat16(lambda n: impl.receive(n, 0, [0] * 8), t), values),
      (lambda t: in_bfloat16(lambda n: impl.allreduce(n, [0], "MAX"), t), values),
    ]
    return results_of(impl, calls, cpu_devices)

  summed, scattered, sent, maximum = sums(
    make_impl("a:8", cpu_devices, allreduce_in_bfloat16_max_group_size=4)
  )
  # 263 rounded to bfloat16, once.
  np.testing.assert_array_equal(summed, [[264.0]] * 8)
  np.testing.assert_array_equal(scattered, [[264.0]] * 8)
  np.testing.assert_array_equal(sent, [[256.0]] * 8)
  np.testing.assert_array_equal(maximum, [[256.0]] * 8)


def test_collectives_in_a_loop(cpu_devices):
  impl = make_impl("a:2,b:2", cpu_devices)
  x = slices_of("a:2,b:2", [4])

  def loop(values):
    def step(i, s):
      t = impl.allreduce(LaidOutTensor([s]), [1], "SUM")
      t = impl.allreduce(t, [0, 1], "MAX")
      return i + 1, impl.receive(t, 0, [1, None]).one_slice + s

    start = tf.gather(values, impl.pnum_tensor)
    return tf.while_loop(lambda i, s: i < 3, step, [0, start])[1]

  trace = impl.trace(loop, [tf.constant(x)])
  assert tpu_rewrite.counts(trace) == {"CrossReplicaSum": 1, "AllToAll": 2, "CollectivePermute": 1}
  assert trace.function.outputs[0].shape == [4]
  with tpu_rewrite.replaced(impl.size):
    trace = impl.trace(loop, [tf.constant(x)])
  expected = x.reshape(2, 2, 4)
  for _ in range(3):
    sums = expected.sum(1)
    expected = expected + np.stack([sums.max(0), 0 * sums[0]])[:, None]
  for p, (actual, _) in enumerate(tpu_rewrite.run(impl, trace, cpu_devices)):
    np.testing.assert_array_equal(actual, expected[p // 2, p % 2])


def test_how_many_exchanges_there_are(cpu_devices):
  """A sum is one, a permutation is one; an extremum of a large group two, each of the size of x."""
  impl = make_impl("a:4", cpu_devices)
  x = tf.zeros([8, 3])

  def count(fn):
    trace = impl.trace(lambda: fn(LaidOutTensor([x])).one_slice)
    return tuple(tpu_rewrite.counts(trace).values()), trace

  assert count(lambda t: impl.allreduce(t, [0], "SUM"))[0] == (1, 0, 0)
  assert count(lambda t: impl.receive(t, 0, [1, 0, 3, 2]))[0] == (0, 0, 1)
  assert count(lambda t: impl.allconcat(t, 0, 0))[0] == (0, 1, 0)
  assert count(lambda t: impl.alltoall(t, 0, 0, 0))[0] == (0, 1, 0)
  assert count(lambda t: impl.reduce_scatter(t, 0, 0))[0] == (0, 1, 0)
  assert count(lambda t: impl.receive(t, 0, [1, 1, 1, 1]))[0] == (0, 2, 0)
  counts, trace = count(lambda t: impl.allreduce(t, [0], "MAX"))
  assert counts == (0, 2, 0)
  operations = trace.function.graph.get_operations()
  sizes = [op.inputs[0].shape.num_elements() for op in operations if op.type == "AllToAll"]
  assert sizes == [24, 24]


def test_wrong_use(cpu_devices):
  impl = make_impl("a:4", cpu_devices)
  unknown = tf.TensorSpec([None], tf.float32)

  @tf.function(input_signature=[unknown], autograph=False)
  def no_static_shape(x):
    impl.trace(lambda: impl.allreduce(LaidOutTensor([x]), [0], "SUM").one_slice)

  with pytest.raises(ShapeError, match="allreduce over a: the slice has shape .* static"):
    no_static_shape.get_concrete_function()
  with pytest.raises(DTypeError, match="allreduce over a: a TPU cannot add tensors of string"):
    impl.trace(lambda: impl.allreduce(LaidOutTensor([tf.constant(["a"])]), [0], "SUM").one_slice)
