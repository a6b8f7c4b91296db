"""Rows continued together: what one gets is its own, on every layout, however they meet."""

from __future__ import annotations

import functools
import types

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.decoding.token_choice import TokenChoice
from mesh_tensorflow.errors import UnsupportedError
from mesh_tensorflow.transformer import transformer_layers
from mesh_tensorflow.transformer.generation.prefill_decode import (
  DecodeOptions,
  DecodePrograms,
  rounded_length,
)
from mesh_tensorflow.transformer.generation.scheduler import Row, continue_rows
from tests.kinds import kept
from tests.transformer import lm_program as lm
from tests.transformer import numpy_lm

PROMPTS = [[5, 6], [3, 4, 2, 7], [], [9] * 7, [2, 3]]
DRAWN = TokenChoice(1.0, top_p=0.9, min_p=0.01, repetition_penalty=1.3)
GREEDY = TokenChoice(0.0)


def programs(impl=None, rows=2, length=16, choice=GREEDY, model=None, jit_compile=False, **options):
  """A `Continuation` of the golden model; no id ends a row unless it is said."""
  impl = impl or lm.one_device()
  model = model or lm.make_model()
  lm.set_golden_weights(lm.initialize(impl, model))
  steps = types.SimpleNamespace(
    model=model,
    mesh_impl=impl,
    model_type="lm",
    variable_dtype=mtf.VariableDType(tf.float32),
    decoding_function=functools.partial(mtf.function, impl, jit_compile=jit_compile),
  )
  options = {"eos_id": None, **options}
  return DecodePrograms(steps, rows, length, DecodeOptions(choice, **options))


def made(continuation, limit=12, most=5, prompts=PROMPTS, listener=None, seed=0):
  rows = [Row(i, p, limit) for i, p in enumerate(prompts)]
  continue_rows(continuation, rows, seed, most, listener)
  assert all(row.ended for row in rows)
  return [row.new for row in rows]


@functools.cache
def golden_weights():
  impl = lm.one_device()
  lm.set_golden_weights(lm.initialize(impl, lm.make_model()))
  return {s.name: s.numpy().astype(np.float64) for s in impl.variable_store}


def reference(prompt, limit, length, banned=(0,)):
  """Token by token by the forward pass in NumPy; a full window loses its first quarter."""
  weights = golden_weights()
  ids, window = list(prompt), 0
  for _ in range(limit):
    if len(ids) - window >= length:
      window += length // 4
    inputs = np.array([[0, *ids[window:]]])
    logits = numpy_lm.logits(weights, inputs, 2, dict(num_heads=2, d_kv=3))[0, -1].copy()
    logits[list(banned)] = -np.inf
    ids.append(int(logits.argmax()))
  return ids[len(prompt) :]


def test_the_likeliest_tokens_through_windows_that_slide():
  """More tokens than positions: as if each token were made anew from what the window has."""
  continuation = programs(length=8)
  expected = [reference(p, 12, 8) for p in PROMPTS]
  assert made(continuation) == expected
  # However many tokens a call makes, and wherever the rows stand.
  assert made(continuation, most=1) == expected
  assert made(continuation, prompts=PROMPTS[::-1]) == expected[::-1]


def test_no_program_is_traced_again_for_other_prompts():
  continuation = programs(length=16, rows=4)
  made(continuation, limit=3)
  looks = dict(continuation._prefills)
  counts = {
    f: f._compiled.experimental_get_tracing_count()
    for f in [continuation._decode, *(p.function for p in looks.values())]
  }
  made(continuation, limit=4, most=2, prompts=[[4] * n for n in range(1, 9)])
  assert continuation._prefills == looks
  for f, count in counts.items():
    assert f._compiled.experimental_get_tracing_count() == count <= 1


@pytest.mark.parametrize(
  ("kind", "layout"),
  kept(
    [("placement", "batch:a,vocab:b"), ("simd", "batch:a,heads:b"), ("simd", "batch:a,vocab:b")],
    [("simd", "batch:a,vocab:b")],
  ),
)
def test_draws_do_not_depend_on_layout_order_and_places(kind, layout, cpu_devices):
  alone = made(programs(choice=DRAWN, rows=5, length=8, model=model_of_layouts()), most=100)
  make = {"placement": mtf.PlacementMeshImpl, "simd": mtf.SimdMeshImpl}[kind]
  impl = make("a:2,b:2", layout, cpu_devices[:4])
  continuation = programs(impl, choice=DRAWN, length=8, model=model_of_layouts())
  assert made(continuation) == alone
  other = made(continuation, seed=1)
  assert other != alone and all(len(new) == 12 for new in other)


def model_of_layouts():
  return lm.make_model(vocab_divisor=4, d_ff=6)


def test_ends():
  """An end of sequence, the limit, and a listener end a row; other rows go on."""
  free, other = reference(PROMPTS[0], 12, 16), reference(PROMPTS[3], 5, 16)
  eos = next(t for t in free if t != free[0] and t not in other)
  continuation = programs(eos_id=eos)
  rows = [Row(0, PROMPTS[0], 12), Row(1, PROMPTS[1], 3), Row(2, PROMPTS[3], 9)]
  heard = []

  def listener(row):
    heard.append((row.number, len(row.new)))
    return row.number == 2 and len(row.new) >= 4

  continue_rows(continuation, rows, 0, 2, listener)
  assert rows[0].new == free[: free.index(eos)] and eos not in rows[0].new
  assert len(rows[1].new) == 3 or eos == reference(PROMPTS[1], 3, 16)[len(rows[1].new)]
  assert len(rows[2].new) in (4, 5)
  assert {n for n, _ in heard} == {0, 1, 2}


def test_never_end_and_what_is_no_token():
  """The end and padding are never chosen, nor a place that only fills up the vocabulary."""
  free = reference(PROMPTS[0], 6, 16)
  eos = free[0]
  continuation = programs(eos_id=eos, never_end=True)
  assert made(continuation, 6, prompts=PROMPTS[:1]) == [reference(PROMPTS[0], 6, 16, (0, eos))]
  hot = programs(choice=TokenChoice(50.0), length=16, rows=8, model=lm.make_model(vocab_divisor=32))
  tokens = {t for new in made(hot, 12, prompts=PROMPTS * 4) for t in new}
  assert tokens == set(range(1, 11))


@pytest.mark.parametrize("penalty", [1.0, 100.0])
def test_repetition_penalty_counts_prompt_and_new_tokens(penalty):
  """A penalty without bounds: each token once, until there are none left."""
  choice = TokenChoice(1e-3, repetition_penalty=penalty)
  # A token a call: what is seen in one call is to be known in the next one.
  (new,) = made(programs(choice=choice, length=16), 7, most=1, prompts=[[5, 6, 7]])
  assert (len({5, 6, 7, *new}) == 10) == (penalty > 1)


LAYERS = {
  "local": (transformer_layers.LocalSelfAttention, dict(radius=3)),
  "relative": (
    transformer_layers.SelfAttention,
    dict(relative_attention_type="bias_shared", relative_attention_num_buckets=6),
  ),
}


@pytest.mark.parametrize("name", ["local", "relative"])
def test_short_prefills_leave_the_cache_of_long_ones(name):
  """Rows that join others are looked at by a program of their length; others keep theirs."""
  layer, options = LAYERS[name]
  attention = dict(num_heads=2, key_value_size=3, **options)
  model = lm.transformer.Unitransformer(
    lm.transformer.make_layer_stack(
      [[layer, attention], [transformer_layers.DenseReluDense, dict(hidden_size=5)]],
      lambda layers: lm.transformer.LayerStack(layers, **lm.SUBLAYERS),
      num_layers=1,
    ),
    d_model=4, input_vocab_size=11, output_vocab_size=11, autoregressive=True, max_length=32,
    vocab_divisor=1, shared_embedding_and_softmax_weights=True,
  )  # fmt: skip
  short = programs(rows=4, length=32, model=model, choice=DRAWN)
  together = made(short, 14, prompts=PROMPTS)
  assert any(length == 16 for _, length in short._prefills)
  alone = programs(rows=1, length=32, model=model, choice=DRAWN)
  rows = [Row(i, p, 14) for i, p in enumerate(PROMPTS)]
  for row in rows:
    continue_rows(alone, [row], 0, 100)
  assert together == [row.new for row in rows]


def test_other_models_are_refused():
  with pytest.raises(UnsupportedError, match="'lm' does not continue rows token by token"):
    programs(model=lm.make_model(input_full_attention=True))


def test_lengths_are_few():
  lengths = [rounded_length(n, 100) for n in range(1, 101)]
  assert all(a >= n for n, a in enumerate(lengths, 1))
  assert sorted(set(lengths)) == [8, 12, 16, 24, 32, 48, 64, 96, 100]
