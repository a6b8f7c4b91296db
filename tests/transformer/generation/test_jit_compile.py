"""Decoding programs that XLA compiles: the ids are those without it."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.transformer import transformer_layers
from tests.kinds import kept
from tests.transformer import bi_program as bi
from tests.transformer import lm_program as lm
from tests.transformer import small_lm
from tests.transformer.generation import test_scheduler as scheduler

PROMPTS = np.array([[5, 6] + [0] * 10, [3, 4, 2, 7] + [0] * 8, [9] * 9 + [0] * 3], np.int32)
MODELS = {
  "full": lm.make_model,
  "local": lambda: lm.transformer.Unitransformer(
    lm.transformer.make_layer_stack(
      [
        [transformer_layers.LocalSelfAttention, dict(num_heads=2, key_value_size=3, radius=3)],
        [transformer_layers.DenseReluDense, dict(hidden_size=5)],
      ],
      lambda layers: lm.transformer.LayerStack(layers, **lm.SUBLAYERS),
      num_layers=2,
    ),
    d_model=4, input_vocab_size=11, output_vocab_size=11, autoregressive=True, max_length=32,
    vocab_divisor=1, shared_embedding_and_softmax_weights=True,
  ),
}  # fmt: skip
OPTIONS = {
  "greedy": dict(),
  "max_steps": dict(max_steps=3, stop_at_token=None),
  "sampled": dict(temperature=1.0, stop_at_token=None),
  "top 3, only the new": dict(
    temperature=0.7, sampling_keep_top_k=3, remove_partial_sequences=True, never_end=True
  ),
}


def ids_of(impl, program, inputs, names=("batch", "length")):
  """What a program makes of int32 inputs without XLA, and with it."""
  results = []
  for jit_compile in (False, True):
    spec = mtf.TensorSpec(list(zip(names, inputs.shape)), tf.int32)
    function = mtf.function(impl, [spec], jit_compile=jit_compile)(program)
    results.append(function(inputs, seed=3).numpy())
  return results


@pytest.mark.parametrize(
  ("model", "options"),
  kept(
    [(m, o) for m in MODELS for o in OPTIONS],
    [("full", "greedy"), ("local", "sampled"), ("full", "top 3, only the new")],
  ),
)
def test_continued_prompts(model, options):
  impl, model = lm.one_device(), MODELS[model]()
  bi.random_weights(lm.initialize(impl, model), seed=1, scale=1.0)

  def program(ids):
    return model.sample_autoregressive(ids, **OPTIONS[options])

  plain, compiled = ids_of(impl, program, PROMPTS)
  np.testing.assert_array_equal(compiled, plain)
  assert len(set(plain.ravel())) > 3


@pytest.mark.parametrize("kind", ["placement", "simd"])
@pytest.mark.parametrize(("beam", "length"), [(1, 9), (4, 9), (4, 16)])
def test_an_encoder_decoder(beam, length, kind):
  make = {"placement": mtf.PlacementMeshImpl, "simd": mtf.SimdMeshImpl}[kind]
  impl, model = make("all:1", "", devices=["CPU:1"]), bi.make_model(bi.T5_1_0)
  bi.random_weights(bi.initialize(impl, model), seed=2, scale=1.0)

  def program(inputs):
    return model.decode(
      inputs, beam_size=beam, decode_length_constant=length, max_decode_length=length
    )

  plain, compiled = ids_of(impl, program, bi.INPUTS)
  np.testing.assert_array_equal(compiled, plain)
  assert compiled.any()


@pytest.mark.parametrize("model", MODELS)
def test_beams_of_a_language_model(model):
  impl, model = lm.one_device(), MODELS[model]()
  bi.random_weights(lm.initialize(impl, model), seed=3, scale=1.0)
  plain, compiled = ids_of(
    impl,
    lambda ids: model.beam_search(ids, 10),
    np.zeros([2, 3, 12], np.int32),
    names=("batch", "beam", "length"),
  )
  np.testing.assert_array_equal(compiled, plain)
  assert compiled.any()


@pytest.mark.parametrize("choice", [scheduler.GREEDY, scheduler.DRAWN])
def test_rows_that_join_others(choice):
  """Prefills and decode calls, with the KV cache between them."""
  plain, compiled = (
    scheduler.made(scheduler.programs(length=8, choice=choice, jit_compile=jit_compile))
    for jit_compile in (False, True)
  )
  assert compiled == plain


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("lm")
  small_lm.run(folder, "run.learning_rate_schedule = 0.01", text=small_lm.TEXT)
  return folder


def test_the_mode_infer(folder, monkeypatch):
  asked = []
  function = mtf.function
  monkeypatch.setattr(
    mtf, "function", lambda *a, **k: asked.append(k.get("jit_compile")) or function(*a, **k)
  )
  prompts = ["To be", "  or not ", "W"]
  plain = small_lm.infer(folder, prompts)
  assert asked and not any(asked)
  asked.clear()
  assert small_lm.infer(folder, prompts, "run.jit_compile = True") == plain
  assert asked.count(True) >= 2  # Prefill and decode; others make variables.


def test_a_mesh_of_several_devices(folder, capsys):
  with pytest.raises(ConfigError, match="run.jit_compile = True is for a mesh of one device.* 2,"):
    small_lm.infer(folder, ["To be"], "run.jit_compile = True", "run.mesh_shape = 'all:2'")
  assert "restored" not in capsys.readouterr().out


def test_a_saved_model_needs_no_xla(folder):
  path = small_lm.run(
    folder,
    "run.mode = 'export_infer'",
    f"run.export_path = '{folder}/saved'",
    "run.jit_compile = True",
  )
  serve = tf.saved_model.load(path).signatures["serving_default"]
  functions = serve.graph.as_graph_def().library.function
  assert functions and not any(f.attr["_XlaMustCompile"].b for f in functions)
