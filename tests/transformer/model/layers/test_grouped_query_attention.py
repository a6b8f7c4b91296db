"""Rotary positions and the options of queries and keys: what descriptors do not say."""

from __future__ import annotations

import collections

import gin
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer import transformer
from mesh_tensorflow.transformer import transformer_layers as t
from tests.transformer import layer_program
from tests.transformer import lm_program as lm
from tests.transformer.layer_context import make_context

DIMS = dict(num_heads=2, key_value_size=4)
# Llama 3.1's.
LLAMA3 = dict(base=500000.0, scaling="llama3", factor=8.0, original_length=8192)


def test_frequencies():
  f = 500000.0 ** (-np.arange(64) / 64)
  np.testing.assert_allclose(t.Rotary(500000.0).frequencies(128), f)
  turns = 8192 * f / (2 * np.pi)
  share = np.clip((turns - 1) / (4 - 1), 0, 1)
  expected = f * (share + (1 - share) / 8)
  np.testing.assert_allclose(t.Rotary(**LLAMA3).frequencies(128), expected)
  assert 0 < (share == 0).sum() and 0 < (share == 1).sum() < 64 - (share == 0).sum()
  np.testing.assert_allclose(
    t.Rotary(500000.0, scaling="linear", factor=4.0).frequencies(128), f / 4
  )
  ntk = t.Rotary(500000.0, scaling="ntk", factor=4.0).frequencies(128)
  np.testing.assert_allclose([ntk[0], ntk[-1]], [f[0], f[-1] / 4])
  assert t.Rotary(fraction=0.5).frequencies(8)[2:] == [0.0, 0.0]


def turned(x, positions, rotary, dtype=tf.float32):
  """x `[batch=1, length, d_kv]` at these positions."""

  def program(x):
    context = make_context(x)
    position = mtf.import_tf_tensor(
      x.mesh, np.array(positions, np.int32), mtf.Shape([context.length_dim])
    )
    return rotary(context, mtf.cast(x, dtype), position, x.shape[-1])

  spec = mtf.TensorSpec([("batch", 1), ("length", x.shape[1]), ("d_kv", x.shape[2])], tf.float32)
  with lm.eagerly():
    return mtf.function(lm.one_device(), input_signature=[spec])(program)(x).numpy()


@pytest.mark.parametrize(
  "rotary",
  [t.Rotary(), t.Rotary(**LLAMA3), t.Rotary(fraction=0.5)],
  ids=["plain", "llama3", "half"],
)
def test_products_depend_on_distances_alone(rotary):
  x = np.random.default_rng(0).normal(size=[1, 2, 8]).astype(np.float32)
  near, far = (turned(x, p, rotary)[0] for p in ([3, 7], [1003, 1007]))
  np.testing.assert_allclose(near[0] @ near[1], far[0] @ far[1], rtol=1e-3)
  other = turned(x, [3, 8], rotary)[0]
  assert abs(near[0] @ near[1] - other[0] @ other[1]) > 1e-3
  np.testing.assert_allclose(turned(x, [0, 0], rotary), x, rtol=1e-6)


def test_turning_moves_the_channels_once():
  """And its gradient: of what is one operation on a slice, no parts are cut out and joined."""

  def program(x):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "m")
    x = mtf.import_tf_tensor(mesh, x, "batch:2 length:4 heads:2 d_kv:8")
    context = make_context(x)
    position = mtf.range(mesh, context.length_dim, tf.int32)
    y = t.Rotary()(context, x, position, x.shape[-1])
    (dx,) = mtf.gradients([y], [x])
    lowering = mtf.Lowering(graph, {mesh: lm.one_device()})
    return [lowering.export_to_tf_tensor(z) for z in (y, dx)]

  traced = tf.function(program, autograph=False)
  spec = tf.TensorSpec([2, 4, 2, 8], tf.float32)
  kinds = collections.Counter(
    op.type for op in traced.get_concrete_function(spec).graph.get_operations()
  )
  assert kinds["ReverseV2"] == 2
  assert not {"ConcatV2", "Pack", "Split", "StridedSlice", "Transpose", "Unpack"} & set(kinds)


def test_the_dtype_is_kept():
  x = np.ones([1, 2, 4], np.float32)
  assert turned(x, [3, 7], t.Rotary(), tf.bfloat16).dtype == tf.bfloat16.as_numpy_dtype


@pytest.mark.parametrize(
  "arguments,says",
  [
    (dict(scaling="dynamic"), '"ntk", "llama3" or "yarn", got \'dynamic\''),
    (dict(scaling="yarn", factor=2.0, beta_fast=1.0), r"beta_slow \(=1.0\) must be positive, and"),
    (dict(attention_factor=2.0), r"attention_factor \(=2.0\) is of Rotary.scaling = 'yarn'"),
    (dict(factor=2.0), "no effect without Rotary.scaling"),
    (dict(scaling="linear", factor=0.5), r"factor \(=0.5\) at least 1"),
    (dict(fraction=1.5), r"fraction \(=1.5\) between 0 and 1"),
    (dict(base=1.0), r"base \(=1.0\) must be larger than 1"),
    (dict(low_freq_factor=4.0), r"low_freq_factor \(=4.0\) must be positive, and less"),
  ],
)
def test_rotary_that_cannot_be(arguments, says):
  with pytest.raises(errors.ConfigError, match=says):
    t.Rotary(**arguments)


def test_vectors_of_an_odd_size_cannot_be_turned():
  with pytest.raises(errors.DimensionError, match="d_kv=3 .* must be even"):
    turned(np.ones([1, 2, 3], np.float32), [0, 1], t.Rotary())


@pytest.mark.parametrize(
  "cls,arguments,says",
  [
    (t.GroupedQueryAttention, dict(rotary=t.Rotary(), shared_kv=True), "set shared_kv = False"),
    (t.LocalGroupedQueryAttention, dict(query_key_norm=True, shared_kv=True), "shared_kv = False"),
    (t.GroupedQueryAttention, dict(logit_soft_cap=1.0, attention_func="hybrid"), "hybrid"),
    (t.GroupedQueryAttention, dict(window=0), r"window \(=0\) must be None or at least 1"),
    (t.GroupedQueryAttention, dict(num_sinks=1), r"num_sinks \(=1\) 0 without a window"),
    (
      t.GroupedQueryAttention,
      dict(window=2, hyperprompt_length_decoder=3),
      r"prompts would be outside of the window \(=2\)",
    ),
  ],
)
def test_layers_that_cannot_be(cls, arguments, says):
  with pytest.raises(errors.ConfigError, match=says):
    cls(**DIMS, **arguments)


def logits_of(layer):
  model = layer_program.make_lm([layer])
  impl = lm.one_device()
  lm.set_golden_weights(lm.initialize(impl, model))
  return lm.run(impl, layer_program.full_program(model), lm.TARGETS)


def test_without_options_it_is_self_attention():
  class SelfAttention(t.GroupedQueryAttention):
    """Named as the variable scope is."""

  arguments = dict(num_heads=4, num_memory_heads=2, key_value_size=2)
  np.testing.assert_array_equal(
    logits_of(lambda: SelfAttention(**arguments)), logits_of(lambda: t.SelfAttention(**arguments))
  )


def test_sampling_is_the_whole_model():
  """Both kinds of windows, grouped heads and sinks, in one model without vectors of positions."""
  rotary = t.Rotary(base=100.0, scaling="ntk", factor=2.0)
  layers = [
    lambda: t.LocalGroupedQueryAttention(rotary=rotary, query_key_norm=True, radius=3, **DIMS),
    lambda: t.GroupedQueryAttention(
      rotary=rotary,
      window=3,
      num_sinks=2,
      logit_soft_cap=2.0,
      num_heads=4,
      num_memory_heads=2,
      key_value_size=4,
    ),
  ]
  layer_program.check_decoding(layer_program.make_lm(layers, positional_embedding=False))


def test_gin_names():
  gin.parse_config("""
SelfAttention.num_heads = 4
SelfAttention.num_memory_heads = 2
GroupedQueryAttention.rotary = @Rotary()
Rotary.base = 50.0
LocalSelfAttention.radius = 5
LocalGroupedQueryAttention.logit_soft_cap = 3.0
""")
  layer = t.GroupedQueryAttention()
  assert (layer.num_heads, layer.num_memory_heads, layer.rotary) == (4, 2, t.Rotary(base=50.0))
  local = t.LocalGroupedQueryAttention()
  assert (local.radius, local.logit_soft_cap, local.num_heads) == (5, 3.0, 8)


def test_sinks_of_packed_sequences_in_a_model():
  """Two sequences in a row give what each gives alone, as position 0 of each is a sink."""
  layer = lambda: t.GroupedQueryAttention(rotary=t.Rotary(), window=2, num_sinks=1, **DIMS)  # noqa: E731
  model = layer_program.make_lm([layer], positional_embedding=False)
  impl = lm.one_device()
  lm.set_golden_weights(lm.initialize(impl, model, np.ones([1, 8], np.int32)))
  first, second = [3, 5, 7, 2], [4, 6, 2, 9]

  def program(targets):
    ids = mtf.import_tf_tensor(
      targets.mesh, np.repeat([1, 2], 4)[None].astype(np.int32), targets.shape
    )
    position = mtf.import_tf_tensor(
      targets.mesh, np.tile(np.arange(4), 2)[None].astype(np.int32), targets.shape
    )
    inputs = transformer.autoregressive_inputs(targets, sequence_id=ids)
    return model.call_simple(
      inputs, targets, compute_loss=False, mode="eval", sequence_id=ids, position=position
    )[0]

  together = lm.run(impl, program, np.array([first + second], np.int32))
  for row, here in ((first, together[:, :4]), (second, together[:, 4:])):
    alone = lm.run(impl, layer_program.full_program(model), np.array([row], np.int32))
    np.testing.assert_allclose(here, alone, rtol=1e-4, atol=1e-5)
