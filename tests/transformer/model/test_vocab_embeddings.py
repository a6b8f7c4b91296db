"""Embeddings of tokens: names, initial values, errors, and language models that have them."""

import itertools

import gin
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer import transformer, vocab_embeddings
from mesh_tensorflow.transformer.model.layers.self_attention import SelfAttention
from tests.kinds import in_turns, kept
from tests.transformer import layer_program
from tests.transformer import lm_program as lm

VOCAB, D = mtf.Dimension("vocab", 12), mtf.Dimension("d_model", 4)
MODULE = "mesh_tensorflow.transformer.vocab_embeddings."
BINDINGS = {
  "FactorizedVocabEmbedding": "FactorizedVocabEmbedding.inner_dimension_size = 2",
  "AdaptiveVocabEmbedding": """
    AdaptiveVocabEmbedding.clusters = [
      {"token_count": 4, "embedding_size": 4}, {"token_count": 8, "embedding_size": 2}]
  """,
  "MixtureOfSoftmaxes": "MixtureOfSoftmaxes.num_softmaxes = 3",
  "Mixtape": """
    Mixtape.gate_embedding_size = 2
    Mixtape.frequent_token_fraction = 0.34
    Mixtape.extra_ids = 2
    Mixtape.dropout_rate = 0.3
    Mixtape.noise_std_dev = 0.1
  """,
}
VARIABLES = {
  "FactorizedVocabEmbedding": {"1": [12, 2], "2": [2, 4]},
  "AdaptiveVocabEmbedding": {"_0": [4, 4], "_11": [8, 2], "_12": [2, 4]},
  "MixtureOfSoftmaxes": {
    "_embedding_weights": [12, 4], "_mixture_weights": [3, 4], "_context_weights": [3, 4, 4],
  },
  "Mixtape": {
    "_embedding_weights": [12, 4], "_context_weights": [4, 4, 4], "_context_weights_bias": [4, 4],
    "_prior_weights": [3, 2, 4], "_prior_weights_bias": [3, 2], "_prior_vocab_vector": [4, 2],
    "_prior_gates_vector": [3, 4], "_prior_bias": [4, 3],
  },
}  # fmt: skip


def bind(name, more=""):
  gin.parse_config(f"get_vocab_embedding_cls.cls = @{MODULE}{name}\n{BINDINGS[name]}\n{more}")


def make_lm(**kwargs):
  layers = [[SelfAttention, dict(num_heads=2, key_value_size=3)]]
  return layer_program.make_lm(layers, vocab_divisor=4, **kwargs)


@pytest.mark.parametrize("name", BINDINGS)
def test_variables(name):
  bind(name)
  made = {k: v.to_integer_list for k, v in layer_program.names(make_lm()).items()}
  found = {k.removeprefix("transformer/embedding"): v for k, v in made.items() if "/emb" in k}
  assert found == VARIABLES[name]


@pytest.mark.parametrize("name", BINDINGS)
def test_ensembles_have_a_leading_dimension(name):
  bind(name)
  made = layer_program.names(make_lm(ensemble=2))
  for suffix, sizes in VARIABLES[name].items():
    assert made[f"transformer/embedding{suffix}"].to_integer_list == [2, *sizes]


@pytest.mark.parametrize("name", BINDINGS)
def test_members_of_an_ensemble_are_models(name):
  bind(name, "reduce_ensemble_logits.reduce_fn = @reduce_ensemble_logits_select")
  impl, one = lm.one_device(), lm.one_device()
  rng = np.random.default_rng(0)
  ensemble, single = make_lm(ensemble=2), make_lm()
  store, single_store = lm.initialize(impl, ensemble), lm.initialize(one, single)
  for variable in [s.name for s in store if not s.name.startswith("_")]:
    value = rng.normal(size=store[variable].shape.to_integer_list).astype(np.float32)
    store[variable].assign(value)
    # The positional embedding has the dimension too.
    single_store[variable].assign(value[0])
  actual = lm.run(impl, layer_program.full_program(ensemble), lm.TARGETS)
  expected = lm.run(one, layer_program.full_program(single), lm.TARGETS)
  np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


NAMES_AND_KINDS = list(itertools.product(BINDINGS, ["placement", "simd"]))


@pytest.mark.parametrize(("name", "kind"), kept(NAMES_AND_KINDS, in_turns(NAMES_AND_KINDS)))
def test_training_on_a_mesh(name, kind, cpu_devices):
  """With a split vocabulary, in training with dropout and noise."""
  bind(name)
  targets = np.random.default_rng(1).integers(1, 12, [4, 6]).astype(np.int32)
  cls = mtf.SimdMeshImpl if kind == "simd" else mtf.PlacementMeshImpl
  impl = cls("rows:2,cols:2", "batch:rows,vocab:cols,heads:cols", cpu_devices[:4])
  actual = layer_program.losses_and_gradients(make_lm(), impl, targets)
  expected = layer_program.losses_and_gradients(make_lm(), lm.one_device(), targets)
  for a, b in zip(actual, expected):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", BINDINGS)
def test_decoding(name):
  bind(name)
  layer_program.check_decoding(make_lm())


def test_log_probabilities_of_a_mixture():
  bind("MixtureOfSoftmaxes")
  impl, model = lm.one_device(), make_lm()
  lm.initialize(impl, model)
  logits = lm.run(impl, layer_program.full_program(model), lm.TARGETS)
  np.testing.assert_allclose(np.exp(logits).sum(-1), 1.0, rtol=1e-5)


def test_initial_values():
  """Deviation 1 of embedding weights; inner ** -0.25 of both factors."""
  impl = lm.one_device()
  vocab = mtf.Dimension("vocab", 400)

  def program(x):
    vocab_embeddings.FactorizedVocabEmbedding(
      x.mesh, vocab, D, layer_program.FLOATS, "f", None, inner_dimension_size=16
    )
    vocab_embeddings.MixtureOfSoftmaxes(
      x.mesh, vocab, D, layer_program.FLOATS, "m", None, num_softmaxes=2
    )
    vocab_embeddings.Mixtape(
      x.mesh, vocab, D, layer_program.FLOATS, "t", None, gate_embedding_size=8
    )
    return x

  lm.run(impl, program, lm.TARGETS)
  store = impl.variable_store
  for name, deviation in (("f1", 0.5), ("m_embedding_weights", 1), ("t_prior_vocab_vector", 1)):
    assert np.std(store[name].numpy()) == pytest.approx(deviation, rel=0.1)
  assert not store["t_context_weights_bias"].numpy().any()
  assert store["t_prior_vocab_vector"].shape.to_integer_list == [40, 8]


def test_bindings_of_the_table_hold_for_full_clusters():
  bind("AdaptiveVocabEmbedding", "VocabEmbedding.scale_variable_like_classifier_weights = True")
  impl = lm.one_device()
  wide = layer_program.make_lm([], d_model=64, vocab_divisor=4, input_vocab_size=12)
  gin.parse_config("""
    AdaptiveVocabEmbedding.clusters = [
      {"token_count": 8, "embedding_size": 64}, {"token_count": 4, "embedding_size": 2}]
  """)
  store = lm.initialize(impl, wide)
  assert np.std(store["transformer/embedding_0"].numpy()) == pytest.approx(1 / 8, rel=0.1)


def make(cls, **kwargs):
  mesh = mtf.Mesh(mtf.Graph(), "m")
  return cls(mesh, VOCAB, D, layer_program.FLOATS, "embedding", None, **kwargs)


@pytest.mark.parametrize("cls,kwargs,message", [
  ("AdaptiveVocabEmbedding", dict(clusters=[dict(token_count=11, embedding_size=4)]), "vocab=12"),
  ("AdaptiveVocabEmbedding", dict(clusters=[dict(token_count=12)]), "embedding_size"),
  ("Mixtape", dict(gate_embedding_size=2, frequent_token_fraction=0.01), "1 to 12"),
  ("Mixtape", dict(gate_embedding_size=2, extra_ids=13), "extra_ids=13"),
])  # fmt: skip
def test_errors(cls, kwargs, message):
  with pytest.raises(errors.ConfigError, match=message) as caught:
    make(getattr(vocab_embeddings, cls), **kwargs)
  assert isinstance(caught.value, ValueError)


def test_a_split_vocabulary_must_suit_the_clusters(cpu_devices):
  bind("AdaptiveVocabEmbedding")
  gin.parse_config("""
    AdaptiveVocabEmbedding.clusters = [
      {"token_count": 3, "embedding_size": 4}, {"token_count": 9, "embedding_size": 2}]
  """)
  impl = mtf.PlacementMeshImpl("cols:2", "vocab:cols", cpu_devices[:2])
  with pytest.raises(errors.LayoutError, match="vocab:3"):
    lm.initialize(impl, make_lm())


def test_arguments_are_required():
  for name in BINDINGS:
    with pytest.raises(RuntimeError, match="Required bindings"):
      make(getattr(vocab_embeddings, name))


def test_dropout_has_one_mask_for_all_positions():
  layer = make(vocab_embeddings.Mixtape, gate_embedding_size=2, dropout_rate=0.5)
  hidden = mtf.zeros(
    layer._embedding_weights.mesh, [("batch", 2), ("length", 3), ("d_model", 4)], tf.float32
  )
  layer.hidden_to_logits(hidden, layer_program.context(hidden, mode="train"))
  noise = [op for op in hidden.graph.operations if "random" in op.name]
  assert len(noise) == 2
  assert all("length" not in op.outputs[0].shape.dimension_names for op in noise)


def test_selectors():
  for name in BINDINGS:
    gin.get_configurable(MODULE + name)
  assert transformer.get_vocab_embedding_cls() is transformer.VocabEmbedding
