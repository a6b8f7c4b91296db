"""Eager runs of SimdMeshImpl: one thread of each processor, of which one runs at a time."""

import contextlib
import sys
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import CollectiveError
from mesh_tensorflow.meshes.laid_out import LaidOutTensor


@contextlib.contextmanager
def frequent_switches():
  """Lets Python change from one thread to another as often as it can."""
  before = sys.getswitchinterval()
  sys.setswitchinterval(1e-6)
  try:
    yield
  finally:
    sys.setswitchinterval(before)


def run(impl, build):
  """Runs build(mesh) -> tensor eagerly on a mesh; returns its value."""

  def program():
    graph = mtf.Graph()
    y = build(mtf.Mesh(graph, "m"))
    return mtf.Lowering(graph, {y.mesh: impl}).export_to_tf_tensor(y)

  return impl.run(program).numpy()


def test_no_processor_computes_while_another_one_does(cpu_devices):
  """Not while a variable is created either, which one thread does on the devices of all."""
  impl = mtf.SimdMeshImpl("all:4", "d:all", cpu_devices[:4])
  intervals = []
  d = mtf.Dimension("d", 8)

  def noted(*xs):
    start = time.monotonic()
    time.sleep(0.01)
    intervals.append((start, time.monotonic(), threading.current_thread().name))
    return xs[0] + 1.0 if xs else tf.ones([8])

  def build(mesh):
    x = mtf.ones(mesh, mtf.Shape([d]))
    for i in range(3):
      x = mtf.slicewise(noted, [x], splittable_dims=[d])
      initializer = mtf.initializers.FromFunction(lambda shape, dtype: noted())
      x += mtf.get_variable(mesh, f"v{i}", mtf.Shape([d]), initializer=initializer)
      x -= mtf.reduce_mean(x)
    return x

  np.testing.assert_allclose(run(impl, build), np.zeros(8), atol=1e-6)
  intervals.sort()
  assert len({name for *_, name in intervals}) == 4
  assert len(intervals) >= 4 * 3 + 3
  for (_, end, first), (start, _, second) in zip(intervals, intervals[1:]):
    assert end <= start, (first, second)


@pytest.mark.slow
def test_processors_that_share_a_device(cpu_devices):
  """TensorFlow mixes up shapes and indices of threads that use one device, but the first CPU."""
  impl = mtf.SimdMeshImpl("all:3", "", [cpu_devices[1]] * 3)
  wrong = []

  def program():
    n = impl.pnum_tensor + 1
    for _ in range(500):
      values = [tf.fill([n], 1.0), tf.range(n), tf.concat([tf.ones([n, 2])] * 2, n % 2)]
      expected = [np.ones(n), np.arange(n), np.ones([2 * n, 2] if n % 2 == 0 else [n, 4])]
      wrong.extend(v for v, e in zip(values, expected) if not np.array_equal(v.numpy(), e))
    return impl.allreduce(LaidOutTensor([tf.fill([2], 1.0)]), [0], "SUM").one_slice

  with frequent_switches():
    np.testing.assert_array_equal(impl.run(program).numpy(), [3.0, 3.0])
  assert not wrong, wrong[:3]


def test_new_variables_beside_other_operations(cpu_devices):
  """The variables of every run are new, so that one thread creates them on all devices."""
  v, d, n = mtf.Dimension("v", 11), mtf.Dimension("d", 4), mtf.Dimension("n", 3)

  def build(mesh):
    table = mtf.get_variable(mesh, "table", mtf.Shape([v, d]), initializer=tf.ones_initializer())
    ids = mtf.constant(mesh, 5, mtf.Shape([n]), tf.int32)
    for i in range(5):
      scale = mtf.get_variable(mesh, f"s{i}", mtf.Shape([d]), initializer=tf.ones_initializer())
      rows = mtf.rename_dimension(mtf.range(mesh, v, tf.int32), "v", "rows")
      table = mtf.rename_dimension(mtf.gather(table * scale, rows, v), "rows", "v")
    return mtf.gather(table, ids, v)

  with frequent_switches():
    for _ in range(10):
      impl = mtf.SimdMeshImpl("all:4", "d:all", cpu_devices[:4])
      np.testing.assert_array_equal(run(impl, build), np.ones([3, 4]))


def test_a_thread_that_waits_for_something_else_ends_the_run():
  impl = mtf.SimdMeshImpl("all:3", "", timeout_seconds=1.0)
  forever = threading.Event()

  def program():
    if impl.pnum_tensor == 0:
      forever.wait(4.0)
    return impl.allreduce(LaidOutTensor([tf.ones([2])]), [0], "SUM").one_slice

  with pytest.raises(CollectiveError, match="processor 0 did not come within 1 s"):
    impl.run(program)
