"""A run of an mtf.function that fails: a typed error, and what can be run after it."""

from __future__ import annotations

import pytest

PROGRAM = """
import sys, time
import mesh_tensorflow as mtf
import tensorflow as tf

mtf.virtual_cpu_devices(4)
impl = mtf.SimdMeshImpl(
  "rows:2,cols:2", "a:rows", collectives=sys.argv[1], timeout_seconds=6.0)
a = mtf.Dimension("a", 4)

class Diverge(mtf.Operation):
  # Exchanges on processor 0 whatever happens, on the others only if x is positive.
  def __init__(self, x):
    super().__init__([x], name="diverge")
    self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

  def lower(self, lowering):
    impl, x = lowering.mesh_impl(self), self.inputs[0]
    value = lowering.tensors[x].to_laid_out_tensor()
    t = value.one_slice
    here = tf.logical_or(impl.pnum_tensor == 0, tf.reduce_sum(t) > 0.0)
    exchange = lambda: impl.allreduce(value, [1], "SUM").one_slice
    lowering.set_tensor_lowering(
      self.outputs[0], impl.LaidOutTensor([tf.cond(here, exchange, lambda: t)]))

@mtf.function(impl, [mtf.TensorSpec([a])])
def train_step(x):
  count = mtf.get_variable(x.mesh, "count", [], initializer=0.0)
  mtf.assign_add(count, mtf.ones(x.mesh, []))
  return Diverge(x).outputs[0]

@mtf.function(impl, [mtf.TensorSpec([a])])
def checked(x):
  def check(t):
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(t > 0.0), ["not positive"])]):
      return tf.identity(t)
  y = mtf.slicewise(check, [x], splittable_dims=[a])
  return mtf.reduce_sum(y)

print("first", train_step(tf.ones([4])).numpy().tolist())
start = time.time()
try:
  train_step(-tf.ones([4]))
except mtf.CollectiveError as e:
  print("typed", isinstance(e.__cause__, tf.errors.OpError), str(e).splitlines()[0])
assert time.time() - start < 60
if sys.argv[1] == "queues":
  print("again", train_step(tf.ones([4])).numpy().tolist())
  print("sum", float(checked(tf.constant([1.0, 2.0, 3.0, 4.0]))))
  try:
    checked(tf.constant([1.0, 2.0, 3.0, -4.0]))
  except tf.errors.InvalidArgumentError as e:
    print("check", "not positive" in str(e))
  print("sum", float(checked(tf.constant([1.0, 2.0, 3.0, 4.0]))))
  print("store", impl.variable_store.names)
"""


@pytest.mark.subprocess
@pytest.mark.parametrize("collectives", ["queues", "runtime"])
def test_a_failed_exchange_is_a_typed_error(collectives, run_forked):
  result = run_forked(["-c", PROGRAM, collectives], timeout=240)
  lines = result.stdout.splitlines()
  assert lines[0] == "first [2.0, 2.0, 2.0, 2.0]"
  assert lines[1].startswith("typed True train_step on mesh Shape[rows=2, cols=2]: a processor")
  if collectives == "queues":  # TensorFlow's collectives do not recover.
    assert lines[2] == "again [2.0, 2.0, 2.0, 2.0]"
    assert lines[3:6] == ["sum 10.0", "check True", "sum 10.0"]
    assert lines[6] == "store ['count']"
