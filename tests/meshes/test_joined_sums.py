"""Joined sums: gradients meet in few exchanges, in the order of the backward pass, bit for bit."""

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.meshes.collectives import queues, runtime
from mesh_tensorflow.meshes.joined_sums import JoinedSums
from mesh_tensorflow.meshes.laid_out import LaidOutTensor, LazyAllreduceSum
from mesh_tensorflow.operations.microbatches import serialize_training_step
from mesh_tensorflow.training.nonfinite import skip_updates

BATCH, IO = mtf.Dimension("batch", 8), mtf.Dimension("io", 4)
HIDDEN = [mtf.Dimension(f"hidden_{n}", n) for n in (16, 24, 32)]
X = np.random.default_rng(0).normal(size=[8, 4]).astype(np.float32)
# Numbers of elements of the weights below, in the order of the forward pass, and of all biases.
WEIGHTS, BIASES = [4 * 16, 16 * 24, 24 * 32], 16 + 24 + 32


def loss_of(x):
  for i, hidden in enumerate(HIDDEN):
    x = mtf.layers.dense(
      x, hidden, reduced_dims=[x.shape.dims[-1]], activation=mtf.relu, name=f"layer_{i}"
    )
  return mtf.reduce_mean(mtf.square(x))


def plain(x):
  loss = loss_of(x)
  mtf.optimize.AdafactorOptimizer(learning_rate=0.05).minimize(loss)
  return loss


def clipped(x):
  loss = loss_of(x)
  variables = x.graph.trainable_variables
  gradients = mtf.gradients([loss], [v.value for v in variables])
  gradients, _ = mtf.optimize.clip_by_global_norm(gradients, 0.01)
  mtf.optimize.SgdOptimizer(learning_rate=0.1).apply_grads(gradients, variables)
  return loss


def in_microbatches(x):
  gradients, outputs = serialize_training_step(
    {"x": x}, lambda part: {"loss": loss_of(part["x"])}, BATCH, 2
  )
  made = mtf.optimize.SgdOptimizer(learning_rate=0.1)
  made.apply_grads(gradients, x.graph.trainable_variables)
  return outputs["loss"]


def skipping(x):
  loss = plain(x)
  skip_updates(x.graph, [loss])  # The updates, which alone read the gradients, are in a branch.
  return loss


class Exchanges(list):
  """Numbers of elements of the sums that a program exchanges, as it is traced."""

  def __init__(self, backend, monkeypatch):
    all_reduce = backend.all_reduce

    def counted(collectives, x, groups, reduction):
      self.append(x.shape.num_elements())
      return all_reduce(collectives, x, groups, reduction)

    monkeypatch.setattr(backend, "all_reduce", counted)


BACKENDS = {
  "runtime": (runtime, runtime.RuntimeCollectives),
  "queues": (queues, queues.QueueCollectives),
}


def trained(program, joined_bytes, monkeypatch, collectives="runtime"):
  """(losses, weights, exchanges) of three steps with sums joined up to a size."""
  module, backend = BACKENDS[collectives]
  with monkeypatch.context() as m:
    m.setattr(module, "JOINED_BYTES", joined_bytes)
    exchanges = Exchanges(backend, m)
    store = mtf.VariableStore(seed=1)
    impl = mtf.SimdMeshImpl("batch:2", "batch:batch", collectives=collectives, variable_store=store)
    step = mtf.function(impl, [mtf.TensorSpec([BATCH, IO])])(program)
    losses = [float(step(X)) for _ in range(3)]
  return losses, {v.name: v.numpy() for v in store}, list(exchanges)


@pytest.mark.parametrize(
  ("program", "collectives"),
  [
    (plain, "runtime"),
    (clipped, "queues"),
    (in_microbatches, "runtime"),
    (in_microbatches, "queues"),
    (skipping, "queues"),
  ],
)
def test_what_is_exchanged_together_has_the_same_bits(program, collectives, monkeypatch):
  losses, weights, alone = trained(program, 0, monkeypatch, collectives)
  for most in (1, 1500, 1 << 20):
    again, same, exchanges = trained(program, most, monkeypatch, collectives)
    assert again == losses
    for name, value in weights.items():
      np.testing.assert_array_equal(same[name], value, err_msg=name)
    assert sum(exchanges) == sum(alone)
    if most == 1:
      assert sorted(exchanges) == sorted(alone)
  assert losses[-1] < losses[0]
  if program is not skipping:
    # Three weights and three biases in one exchange in place of six.
    assert len(exchanges) == len(alone) - 5


def test_gradients_are_exchanged_in_the_order_of_the_backward_pass(monkeypatch):
  *_, exchanges = trained(plain, 4 * WEIGHTS[1], monkeypatch)
  # The weights of the last layers at once; what is too small for an exchange waits for the end.
  assert [n for n in exchanges if n > 1] == [WEIGHTS[2], WEIGHTS[1], WEIGHTS[0] + BIASES]


def test_sums_over_other_axes_or_of_other_dtypes_are_apart():
  impl = mtf.PlacementMeshImpl("a:2,b:2", "", ["CPU:0"] * 4)
  impl.joined_sum_bytes = lambda axes: 1 << 20
  exchanged = []
  allreduce = impl.allreduce

  def counted(x, axes, reduction):
    exchanged.append((axes, x.one_slice.dtype.name, x.slice_shape))
    return allreduce(x, axes, reduction)

  impl.allreduce = counted
  joined, sums, counts = JoinedSums(), [], []
  for axes, dtype in [([0], tf.float32), ([0], tf.float32), ([1], tf.float32), ([0], tf.bfloat16)]:
    slices = LaidOutTensor([tf.fill([2, 3], tf.cast(i, dtype)) for i in range(4)])
    x = LazyAllreduceSum(impl, slices, axes, lambda: counts.append(1))
    joined.add(x, impl)
    joined.add(x, impl)  # A second time, which changes nothing.
    sums.append(x)
  assert not exchanged
  assert [float(t[0, 0]) for t in sums[1].to_laid_out_tensor().tensor_list] == [2, 4, 2, 4]
  assert exchanged == [([0], "float32", [12])]
  assert [x.is_reduced for x in sums] == [True, True, False, False]
  joined.exchange()
  assert exchanged[1:] == [([1], "float32", [2, 3]), ([0], "bfloat16", [2, 3])]
  assert [float(t[0, 0]) for t in sums[2].tensor_list] == [1, 1, 5, 5]
  assert sums[3].slice_shape == [2, 3] and len(counts) == 4
