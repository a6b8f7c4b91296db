"""Attention of a decoder to an encoder's output, against NumPy."""

import gin
import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer import transformer, transformer_layers
from tests.transformer import lm_program as lm
from tests.transformer import numpy_lm

RNG = np.random.default_rng(0)
DIMS = dict(num_heads=2, key_value_size=3)
X = RNG.normal(size=[2, 4, 4]).astype(np.float32)
MEMORY = RNG.normal(size=[2, 5, 4]).astype(np.float32)
IDS = np.array([[1, 1, 2, 2], [1, 1, 1, 0]], np.int32)
MEMORY_IDS = np.array([[1, 1, 1, 2, 2], [1, 1, 0, 0, 0]], np.int32)


def run_layer(layer, with_ids, mode="eval", **kwargs):
  """The layer's output and the store."""
  impl = lm.one_device()
  dims = [("batch", 2), ("length", 4), ("d_model", 4)]
  memory_dims = [("batch", 2), ("memory_length", 5), ("d_model", 4)]

  @mtf.function(
    impl,
    input_signature=[
      mtf.TensorSpec(dims),
      mtf.TensorSpec(memory_dims),
      mtf.TensorSpec(dims[:2], np.int32),
      mtf.TensorSpec(memory_dims[:2], np.int32),
    ],
  )
  def program(x, memory, ids, memory_ids):
    context = transformer.Context(
      lm.make_model(),
      x.mesh,
      x.shape.dims[:1],
      x.shape.dims[1],
      mtf.VariableDType(np.float32),
      mode=mode,
      encoder_output=memory,
      sequence_id=ids if with_ids else None,
      encoder_sequence_id=memory_ids if with_ids else None,
      inputs=ids,
      encoder_inputs=memory_ids,
      **kwargs,
    )
    return layer.call(context, x)

  program(X, MEMORY, IDS, MEMORY_IDS)
  lm.set_golden_weights(impl.variable_store)
  y = program(X, MEMORY, IDS, MEMORY_IDS).numpy()
  return y, {s.name: s.numpy().astype(np.float64) for s in impl.variable_store}


def expected(w, allowed=None, bias=0.0):
  q, k, v = ((t @ w[n]).reshape(2, -1, 2, 3) for n, t in (("q", X), ("k", MEMORY), ("v", MEMORY)))
  logits = np.einsum("blhk,bmhk->bhlm", q, k) + bias
  if allowed is not None:
    logits = np.where(allowed[:, None], logits, -1e9)
  out = np.einsum("bhlm,bmhk->blhk", numpy_lm.softmax(logits), v)
  return out.reshape(2, 4, 6) @ w["o"]


@pytest.mark.parametrize("with_ids", [False, True])
def test_attends_to_the_encoder(with_ids):
  y, w = run_layer(transformer_layers.EncDecAttention(**DIMS), with_ids)
  assert set(w) == {"q", "k", "v", "o"}
  allowed = IDS[:, :, None] == MEMORY_IDS[:, None, :] if with_ids else None
  np.testing.assert_allclose(y, expected(w, allowed), rtol=1e-4, atol=1e-5)


def spans(num_sentinels, vocab):
  """Relative positions of relative_position_spans, position by position."""
  first = vocab - num_sentinels
  result = np.zeros([2, 4, 5], np.int64)
  for b in range(2):
    memory_span = np.cumsum(MEMORY_IDS[b] >= first)
    span = np.cumsum(IDS[b] >= first)
    for i in range(4):
      result[b, i] = (memory_span < span[i]).sum() - np.arange(5)
  return result


@pytest.mark.parametrize("kind", ["bias", "bias_shared"])
def test_relative_bias_of_spans(kind):
  layer = transformer_layers.EncDecAttention(relative_attention_type=kind, **DIMS)
  gin.bind_parameter("relative_position_spans.num_sentinels", 9)
  y, w = run_layer(layer, False)
  assert set(w) == {"q", "k", "v", "o", "enc_dec_relative_attention_bias"}
  buckets = numpy_lm.bucket(spans(9, 11), True, 32)
  bias = np.moveaxis(w["enc_dec_relative_attention_bias"][:, buckets], 0, 1)
  np.testing.assert_allclose(y, expected(w, bias=bias), rtol=1e-4, atol=1e-5)


def test_decoding_uses_the_keys_and_values_of_the_first_part():
  layer = transformer_layers.EncDecAttention(**DIMS)
  constant_states: list = []
  first = run_layer(layer, False, mode="first_part", constant_states=constant_states)[0]
  np.testing.assert_allclose(first, run_layer(layer, False)[0], rtol=1e-5)
  k, v, memory_length = constant_states[0]
  assert memory_length == mtf.Dimension("memory_length", 5)
  assert [d.name for d in k.shape] == ["batch", "memory_length", "heads", "d_kv"]


def test_errors():
  layer = transformer_layers.EncDecAttention(relative_attention_type="contextual", **DIMS)
  with pytest.raises(errors.ConfigError, match="relative_attention_type"):
    run_layer(layer, False)
