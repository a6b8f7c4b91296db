"""Local attention in blocks against all products with a mask; a split length."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer import attention, transformer_layers
from tests.transformer import lm_program as lm
from tests.transformer.layer_context import make_context
from tests.transformer.model.layers import numpy_attention as na

RNG = np.random.default_rng(5)


def by_mask(q, k, v, radius, causal, ids=None):
  """tf: products of all, hidden outside the window and the sequence."""
  length = q.shape[1]
  r = na.relative(length)
  visible = (r > -radius) & (r <= (0 if causal else radius))
  visible = np.broadcast_to(visible, [q.shape[0], length, length])
  if ids is not None:
    visible = visible & (ids[:, :, None] == ids[:, None, :])
  logits = tf.einsum("blhk,bmhk->bhlm", q, k)
  logits = tf.where(visible[:, None], logits, tf.constant(-1e9, logits.dtype))
  return tf.einsum("bhlm,bmhk->blhk", tf.nn.softmax(logits), v)


@pytest.mark.parametrize(
  "length,radius,causal,splits,kind",
  [
    (256, 64, True, 1, "placement"),
    (256, 130, True, 2, "placement"),
    (260, 65, False, 2, "placement"),
    (384, 128, False, 4, "simd"),
    (512, 1, True, 2, "simd"),
    (512, 200, False, 4, "placement"),
  ],
)
def test_blocks_are_the_window(length, radius, causal, splits, kind, cpu_devices):
  dims = [("batch", 2), ("length", length), ("heads", 2), ("d_kv", 3)]
  arrays = [RNG.normal(size=[2, length, 2, 3]).astype(np.float32) for _ in range(4)]
  ids = np.sort(RNG.integers(0, 3, [2, length]), axis=1).astype(np.int32)
  cls = mtf.PlacementMeshImpl if kind == "placement" else mtf.SimdMeshImpl
  impl = cls(f"all:{splits}", "length:all", cpu_devices[:splits])
  length_dim, kv_dim = mtf.Dimension(*dims[1]), mtf.Dimension(*dims[3])

  @mtf.function(
    impl, input_signature=[mtf.TensorSpec(dims)] * 4 + [mtf.TensorSpec(dims[:2], np.int32)]
  )
  def program(q, k, v, dy, ids):
    y = attention.local_attention_1d(
      q, k, v, length_dim, kv_dim, kv_dim, causal, splits, radius, sequence_id=ids
    )
    return [y, *mtf.gradients([y], [q, k, v], [dy])]

  got = program(*arrays, ids)
  q, k, v, dy = (tf.constant(a) for a in arrays)
  with tf.GradientTape() as tape:
    tape.watch([q, k, v])
    y = by_mask(q, k, v, radius, causal, ids)
  want = [y, *tape.gradient(y, [q, k, v], dy)]
  for g, w in zip(got, want):
    np.testing.assert_allclose(g.numpy(), w.numpy(), rtol=1e-4, atol=2e-5)


def test_positions_see_those_of_at_most_their_priority():
  """As the decoder of a partial sequence asks for; of one kind alone nothing is hidden."""
  dims = [("batch", 2), ("length", 24), ("heads", 2), ("d_kv", 3)]
  q, k, v = (RNG.normal(size=[2, 24, 2, 3]).astype(np.float32) for _ in range(3))
  write, read = (RNG.integers(0, 4, [2, 24]).astype(np.int32) for _ in range(2))
  write[:, 0] = 0  # Each position sees at least itself.
  read = np.maximum(read, write)
  length_dim, kv_dim = mtf.Dimension(*dims[1]), mtf.Dimension(*dims[3])

  @mtf.function(
    mtf.PlacementMeshImpl("all:1", "", [""]),
    input_signature=[mtf.TensorSpec(dims)] * 3 + [mtf.TensorSpec(dims[:2], np.int32)] * 2,
  )
  def program(q, k, v, write, read):
    given = [(write, read), (write, None), (None, read)]
    return [
      attention.local_attention_1d(
        q, k, v, length_dim, kv_dim, kv_dim, True, 1, 4, write_priority=w, read_priority=r
      )
      for w, r in given
    ]

  both, *ones = (t.numpy() for t in program(q, k, v, write, read))
  r = na.relative(24)
  visible = ((r > -4) & (r <= 0)) & (read[:, :, None] >= write[:, None, :])
  logits = np.where(visible[:, None], np.einsum("blhk,bmhk->bhlm", q, k), -np.inf)
  weights = np.exp(logits - logits.max(-1, keepdims=True))
  want = np.einsum("bhlm,bmhk->blhk", weights / weights.sum(-1, keepdims=True), v)
  np.testing.assert_allclose(both, want, rtol=1e-4, atol=1e-5)
  for one in ones:
    np.testing.assert_allclose(one, by_mask(q, k, v, 4, True), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [None, "bias", "bias_shared", "contextual"])
@pytest.mark.parametrize("causal", [True, False])
def test_long_sequences_have_the_value_of_short_ones(kind, causal, monkeypatch):
  """The layer attends in blocks beyond 256 positions; the value is that of all products."""
  layer = transformer_layers.LocalSelfAttention(radius=16, num_heads=2, key_value_size=2)
  layer.relative_attention_type, layer.relative_attention_num_buckets = kind, 8
  impl = lm.one_device()
  x = RNG.normal(size=[2, 320, 4]).astype(np.float32)
  ids = np.sort(RNG.integers(1, 3, [2, 320]), axis=1).astype(np.int32)
  signature = [
    mtf.TensorSpec([("batch", 2), ("length", 320), ("d_model", 4)]),
    mtf.TensorSpec([("batch", 2), ("length", 320)], np.int32),
  ]

  def values():
    @mtf.function(impl, input_signature=signature)
    def program(x, ids):
      y = layer.call(make_context(x, causal, sequence_id=ids), x)
      return [y, *mtf.gradients([y], [v.value for v in x.graph.trainable_variables])]

    program(x, ids)
    lm.set_golden_weights(impl.variable_store)
    return [t.numpy() for t in program(x, ids)]

  in_blocks = values()

  def attend(context, q, memory, heads_dims):
    return layer._attend_to_all(context, x=q, q=q, memory=memory, heads_dims=heads_dims)

  monkeypatch.setattr(layer, "_attend_in_blocks", attend)
  for got, want in zip(in_blocks, values()):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_errors():
  mesh = mtf.Mesh(mtf.Graph(), "m")
  x = mtf.zeros(mesh, [("batch", 2), ("length", 8), ("d_kv", 3)])
  length, kv_dim = x.shape.dims[1:]
  with pytest.raises(errors.ShapeError, match="radius"):
    attention.local_attention_1d(x, x, x, length, kv_dim, kv_dim, radius=0)
  with pytest.raises(errors.ShapeError, match="length_dim_num_splits"):
    attention.local_attention_1d(x, x, x, length, kv_dim, kv_dim, length_dim_num_splits=3)
