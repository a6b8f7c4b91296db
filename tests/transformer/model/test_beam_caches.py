"""Beams that share KV caches find what beams with caches of their own find."""

import gin
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.operations.indexing import GatherOperation
from mesh_tensorflow.transformer import transformer
from mesh_tensorflow.transformer import transformer_layers as t
from mesh_tensorflow.transformer.model import beam_caches
from tests.kinds import kept
from tests.transformer import bi_program as bi
from tests.transformer import lm_program as lm
from tests.transformer.model.layers import test_layer_decoding as layers

BATCH, BEAM, LENGTH = 2, 4, 6
NAMES, ROWS = ("batch", "beam", "length"), ("batch", "length")
NOTHING = np.zeros([BATCH, BEAM, LENGTH], np.int32)
GROUPED = dict(num_heads=4, num_memory_heads=2, key_value_size=4)
KINDS = {
  "plain": (t.SelfAttention, layers.DIMS),
  "bias": (t.SelfAttention, dict(relative_attention_type="bias", **layers.DIMS)),
  "contextual": (t.SelfAttention, dict(relative_attention_type="contextual", **layers.DIMS)),
  "one_memory_head": (
    t.SelfAttention,
    dict(num_memory_heads=1, **layers.DIMS | layers.SHARED_BIAS),
  ),
  "shared_kv": (t.SelfAttention, dict(shared_kv=True, **layers.DIMS)),
  "rotary": (t.GroupedQueryAttention, dict(rotary=t.Rotary(), query_key_norm=True, **GROUPED)),
  "window": (
    t.GroupedQueryAttention,
    dict(window=3, num_sinks=1, sink_logits=True, logit_soft_cap=5.0, **GROUPED),
  ),
  **{
    name: layers.CASES[name][:2]
    for name in (
      "local",
      "talking_heads",
      "dynamic_talking_heads",
      "bilinear",
      "branched",
      "experts_qkv",
      "synthesizer_random_plus_alpha",
      "lightweight",
      "parallel",
    )
  },
}
# Whose caches are not in the order of positions, or have only few of them, or are no caches.
REORDERED = {"local", "synthesizer_random_plus_alpha", "lightweight"}


def make_model(cls=t.SelfAttention, kwargs=layers.DIMS | layers.SHARED_BIAS, num_layers=1):
  """With a softmax of its own: with that of the embedding, tokens repeat themselves."""
  made = transformer.make_layer_stack(
    [[cls, kwargs], [t.DenseReluDense, dict(hidden_size=5)]],
    lambda made: transformer.LayerStack(made, **lm.SUBLAYERS),
    num_layers=num_layers,
  )
  return transformer.Unitransformer(
    made,
    d_model=4,
    input_vocab_size=11,
    output_vocab_size=11,
    autoregressive=True,
    max_length=16,
    vocab_divisor=1,
    shared_embedding_and_softmax_weights=False,
  )


@pytest.fixture
def searched(monkeypatch):
  """Runs searches, with caches that are shared or not.

  Called with (impl, search, array, share), of which search takes the array as an mtf.Tensor, it
  returns ids and scores of all beams, and whether a state was a shared cache.
  """
  beam_search = mtf.beam_search.beam_search

  def run(impl, search, array, share, names=NAMES, traced=False):
    found = []

    def recorded(*args, **kwargs):
      found.append((*beam_search(*args, **kwargs), kwargs["states"]))
      return found[-1][:2]

    def program(tensor):
      search(tensor)
      ids, scores, states = found.pop()
      shared = any("memory_beam" in s.shape.dimension_names for s in states)
      return ids, scores, mtf.constant(ids.mesh, shared, dtype=np.bool_)

    monkeypatch.setattr(mtf.beam_search, "beam_search", recorded)
    monkeypatch.setattr(beam_caches, "MOST_BEAMS", 8 if share else 0)
    return lm.run(impl, program, array, names=names, traced=traced)

  return run


def compare(searched, model, array, search, impl=None, names=NAMES, seed=5):
  """The search of a model finds the same with shared caches; returns ids, and what was shared."""
  initialize = bi.initialize if names == ROWS else lm.initialize
  results, one = [], lm.one_device()
  for on, share in ((one, False), (impl or one, True)):
    bi.random_weights(initialize(on, model), seed, scale=1.5)
    results.append(searched(on, search(model), array, share, names, traced=share))
  (expected, scores, never), (ids, shared_scores, shared) = results
  np.testing.assert_array_equal(ids, expected)
  np.testing.assert_allclose(shared_scores, scores, rtol=2e-5, atol=2e-5)
  assert not never
  return ids, shared


def search(model):
  return lambda ids: model.beam_search(ids, None)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_attention(name, searched):
  # No sequence ends: beams have ancestors other than themselves.
  gin.bind_parameter("beam_search.beam_search.eos_id", -1)
  ids, shared = compare(searched, make_model(*KINDS[name]), NOTHING, search)
  assert shared == (name not in REORDERED)
  assert len(np.unique(ids[0], axis=0)) == BEAM


class Later(t.SelfAttention):
  """Takes the index of memory for its position: the later, the more is seen of it."""

  def attend(self, context, q, memory, memory_length, bias):
    index = mtf.range(q.mesh, memory_length, tf.float32)
    return super().attend(context, q, memory, memory_length, bias + 0.5 * index)


class ByPosition(t.SelfAttention):
  """Says that it goes by the positions that it is given."""

  memory_in_any_order = True

  def attend(self, *args):
    return super().attend(*args)


class MoreOfIt(ByPosition):
  """Has the `attend` of the one above."""


@pytest.mark.parametrize("cls", [Later, ByPosition])
def test_attention_of_ones_own(cls, searched):
  gin.bind_parameter("beam_search.beam_search.eos_id", -1)
  _, shared = compare(searched, make_model(cls), NOTHING, search)
  assert shared == cls.memory_in_any_order == (cls is ByPosition)
  assert MoreOfIt.memory_in_any_order


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("beam", [1, 2, 7])
def test_drawn_models(seed, beam, searched):
  gin.bind_parameter("beam_search.beam_search.eos_id", seed % 2 * 2 - 1)
  compare(searched, make_model(), NOTHING[:1, :1].repeat(beam, 1), search, seed=20 + seed)


@pytest.mark.parametrize("bindings", [bi.T5_1_0, "Unitransformer.ensemble = 2"])
def test_encoder_decoders(bindings, searched):
  """Rows of different inputs: each has beams of its own."""
  more = """
    beam_search.beam_search.eos_id = -1
    Unitransformer.shared_embedding_and_softmax_weights = False
    """
  model = bi.make_model(bindings + more)
  inputs = np.random.default_rng(3).integers(2, 11, [2, 6], np.int32)

  def decode(model):
    return lambda inputs: model.decode(inputs, beam_size=BEAM, max_decode_length=LENGTH)

  ids, shared = compare(searched, model, inputs, decode, names=ROWS)
  assert shared and len(np.unique(ids[:, 0], axis=0)) == 2


def test_more_beams_have_caches_of_their_own(searched):
  found = searched(lm.one_device(), search(make_model()), NOTHING.repeat(3, 1), share=True)
  assert not found[2]


LAYOUTS = {
  "batch": ("rows:2", "batch:rows"),
  "beams": ("rows:2,cols:2", "beam:rows,heads:cols"),
  "lengths": ("rows:2,cols:2", "batch:rows,memory_length:cols"),
  "heads": ("rows:2", "heads:rows"),
  "beams of caches": ("rows:2,cols:2", "memory_beam:rows,length:cols"),
  "uneven": ("rows:2,cols:4", "batch:rows,memory_length:cols~"),
}
RUNS = [(layout, kind) for layout in LAYOUTS for kind in ("placement", "simd")]


@pytest.mark.slow
@pytest.mark.parametrize(
  "layout,kind", kept(RUNS, [("beams", "simd"), ("lengths", "placement"), ("batch", "simd")])
)
def test_layouts(layout, kind, searched, cpu_devices):
  gin.bind_parameter("beam_search.beam_search.eos_id", -1)
  shape, rules = LAYOUTS[layout]
  cls = mtf.PlacementMeshImpl if kind == "placement" else mtf.SimdMeshImpl
  impl = cls(shape, rules, cpu_devices[: mtf.convert_to_shape(shape).size])
  _, shared = compare(searched, make_model(), NOTHING, search, impl)
  assert shared


def test_stages_of_a_pipeline(searched, cpu_devices):
  """The caches of each are on its mesh, the table of ancestors on the first."""
  gin.bind_parameter("beam_search.beam_search.eos_id", -1)
  first = mtf.PlacementMeshImpl("all:1", "", cpu_devices[:1])
  second = mtf.PlacementMeshImpl("all:1", "", cpu_devices[1:2], variable_store=first.variable_store)
  model = make_model(num_layers=2)
  assert compare(searched, model, NOTHING, search, first.with_stages([second]))[1]


def test_no_cache_is_reordered():
  reordered = []

  def program(ids):
    out = make_model().beam_search(ids, None)
    (loop,) = [op for op in ids.graph.operations if isinstance(op, mtf.WhileLoopOperation)]
    gathers = [op for op in loop.body.operations if isinstance(op, GatherOperation)]
    reordered.extend(op.inputs[0].shape for op in gathers)
    return out

  lm.run(lm.one_device(), program, NOTHING, names=NAMES)
  table = mtf.convert_to_shape([("batch", BATCH), ("beam", BEAM), ("memory_length", LENGTH)])
  assert table in reordered
  assert not [shape for shape in reordered if "d_kv" in shape.dimension_names]
