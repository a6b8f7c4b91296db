"""The ring collectives against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import placement_mesh_impl as pmi

NUMBERS = [1, 2, 3, 4, 5, 8]
REDUCE = {"SUM": np.sum, "MAX": np.max, "MIN": np.min}


def values(n, shape, dtype=np.float32, seed=0):
  return list(np.random.RandomState(seed).randint(-50, 50, [n, *shape]).astype(dtype))


def placed(xs, devices):
  result = []
  for x, d in zip(xs, devices):
    with tf.device(d):
      result.append(tf.constant(x))
  return result


def check(got, expected, devices):
  assert len(got) == len(expected)
  for g, e, d in zip(got, expected, devices):
    np.testing.assert_array_equal(g.numpy(), e)
    assert g.device.endswith(d)


@pytest.mark.parametrize("n", NUMBERS)
@pytest.mark.parametrize("shape", [[], [3, 2], [32, 30, 2]])  # the last one is cut into shards
@pytest.mark.parametrize("reduction", ["SUM", "MAX", "MIN"])
@pytest.mark.parametrize("single", [False, True])
def test_allreduce(n, shape, reduction, single, cpu_devices):
  xs, devices = values(n, shape), cpu_devices[:n]
  fn = pmi.allreduce_ring_single_shard if single else pmi.allreduce_ring
  got = fn(placed(xs, devices), devices, reduction)
  check(got, [REDUCE[reduction](xs, axis=0)] * n, devices)


def test_large_tensors_are_cut_into_shards_that_start_on_all_devices(cpu_devices):
  """Every device does some of the additions."""
  devices = cpu_devices[:4]

  def additions(size):
    @tf.function
    def f(x):
      return pmi.allreduce_ring([x + i for i in range(4)], devices)

    graph = f.get_concrete_function(tf.TensorSpec([size], tf.float32)).graph
    return [op.device[-1] for op in graph.get_operations() if op.type == "AddV2" and op.device]

  assert sorted(additions(1000)) == ["1", "2", "3"]
  assert sorted(additions(2048)) == sorted("0123" * 3)
  assert sorted(additions(2049)) == ["1", "2", "3"]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float64])
def test_dtypes_are_kept_exactly(dtype, cpu_devices):
  xs = [np.full([1024], 2**24 + 1 + i, dtype) for i in range(2)]
  got = pmi.allreduce_ring(placed(xs, cpu_devices), cpu_devices[:2])
  assert got[0].dtype == dtype
  check(got, [xs[0] + xs[1]] * 2, cpu_devices[:2])


@pytest.mark.parametrize("n", NUMBERS)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_allconcat(n, axis, cpu_devices):
  xs, devices = values(n, [3, 2, 4]), cpu_devices[:n]
  got = pmi.allconcat_ring(placed(xs, devices), devices, axis)
  check(got, [np.concatenate(xs, axis)] * n, devices)


@pytest.mark.parametrize("n", NUMBERS)
@pytest.mark.parametrize("split_axis,concat_axis", [(0, 1), (1, 0), (0, 0)])
@pytest.mark.parametrize("fn", [pmi.alltoall_ring, pmi.alltoall_pointtwise])
def test_alltoall(n, split_axis, concat_axis, fn, cpu_devices):
  xs, devices = values(n, [2 * n, 3 * n]), cpu_devices[:n]
  got = fn(placed(xs, devices), devices, split_axis, concat_axis)
  parts = [np.split(x, n, split_axis) for x in xs]
  check(got, [np.concatenate([p[k] for p in parts], concat_axis) for k in range(n)], devices)


def test_rings_hand_on_to_neighbours_only(cpu_devices):
  """No operation reads the output of one on a device that is not next to it."""
  n = 5
  devices = cpu_devices[:n]

  def hops(fn):
    @tf.function
    def f():
      xs = []
      for d in devices:
        with tf.device(d):
          xs.append(tf.random.uniform([1500, 10]))
      return fn(xs)

    found = set()
    for op in f.get_concrete_function().graph.get_operations():
      for x in op.inputs:
        if op.device and x.op.device and x.op.type not in ("Const", "Placeholder"):
          found.add((int(op.device[-1]) - int(x.op.device[-1])) % n)
    return found

  neighbours = {0, 1, n - 1}
  assert hops(lambda xs: pmi.allreduce_ring(xs, devices)) == {0, 1}
  assert hops(lambda xs: pmi.allconcat_ring(xs, devices, 0)) == neighbours
  assert hops(lambda xs: pmi.alltoall_ring(xs, devices, 0, 1)) == neighbours
  assert hops(lambda xs: pmi.alltoall_pointtwise(xs, devices, 0, 1)) == set(range(n))


def test_default_device_may_stand_for_all():
  xs = values(3, [2])
  got = pmi.allreduce_ring([tf.constant(x) for x in xs], [""] * 3)
  for g in got:
    np.testing.assert_array_equal(g, sum(xs))


def test_wrong_use(cpu_devices):
  xs = [tf.zeros([4]), tf.zeros([4])]
  for fn, more in [
    (pmi.allreduce_ring, ()),
    (pmi.allreduce_ring_single_shard, ()),
    (pmi.allconcat_ring, (0,)),
    (pmi.alltoall_ring, (0, 0)),
    (pmi.alltoall_pointtwise, (0, 0)),
  ]:
    with pytest.raises(mtf.MeshShapeError, match="2 tensors on 3 devices"):
      fn(xs, cpu_devices[:3], *more)
  with pytest.raises(ValueError, match="'MEAN' is not SUM, MAX or MIN"):
    pmi.allreduce_ring(xs, cpu_devices[:2], "MEAN")
  with pytest.raises(mtf.ShapeError, match=r"\(4,\) and \(5,\)"):
    pmi.allreduce_ring([tf.zeros([4]), tf.zeros([5])], cpu_devices[:2])
  for fn in (pmi.alltoall_ring, pmi.alltoall_pointtwise):
    with pytest.raises(mtf.ShapeError, match="axis 0 .* into 3 parts"):
      fn([tf.zeros([4])] * 3, cpu_devices[:3], 0, 0)
