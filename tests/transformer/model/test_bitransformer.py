"""Encoder-decoders: decoding, packing, losses, ensembles."""

from __future__ import annotations

import gin
import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer import transformer
from tests.transformer import bi_program as bi
from tests.transformer import lm_program as lm
from tests.transformer import numpy_lm

RNG = np.random.default_rng(3)
# Five pairs; inputs end in padding, targets are whole.
INPUTS = RNG.integers(2, 11, [4, 7]).astype(np.int32)
INPUTS[1, 5:] = 0
INPUTS[2, 2:] = 0
TARGETS = RNG.integers(1, 11, [4, 4]).astype(np.int32)

MODELS = {
  "plain": "",
  "T5 1.0": bi.T5_1_0,
  "T5 1.1": bi.T5_1_1,
  "one key and value head": "SelfAttention.num_memory_heads = 1\nSelfAttention.shared_kv = True",
  "sinusoids, own embeddings": """
    Unitransformer.sinusoid_positional_embedding = True
    Bitransformer.shared_embedding = False
  """,
  "contextual": 'SelfAttention.relative_attention_type = "contextual"',
  "ensemble": "Unitransformer.ensemble = 2",
}


def model_on(impl, bindings="", scale=0.6, **kwargs):
  model = bi.make_model(bindings, **kwargs)
  bi.random_weights(bi.initialize(impl, model, INPUTS, TARGETS), scale=scale)
  return model


def logits_of(impl, model, inputs, targets, **options):
  def program(inputs, targets):
    return model.call_simple(inputs, targets, compute_loss=False, mode="eval", **options)[0]

  return lm.run(impl, program, inputs, targets)


# ------------------------------------------------------------------- decoding


@pytest.mark.parametrize("name", MODELS)
def test_decoding_step_by_step_gives_the_logits_of_the_whole(name):
  impl = lm.one_device()
  model = model_on(impl, MODELS[name])
  whole = logits_of(impl, model, INPUTS, TARGETS)
  steps = lm.run(impl, bi.stepwise_program(model), INPUTS, TARGETS)
  np.testing.assert_allclose(steps, whole, rtol=1e-4, atol=2e-5)
  assert np.ptp(whole, axis=0).max() > 0.1


def test_greedy_decoding_takes_the_likeliest_token_each_time():
  impl = lm.one_device()
  model = model_on(impl, bi.T5_1_1)
  with gin.unlock_config():
    gin.bind_parameter("Unitransformer.sample_autoregressive.stop_at_token", None)
  ids = lm.run(impl, lambda x: model.decode(x, max_decode_length=6), INPUTS)
  assert ids.shape == (4, 6)
  for i in range(6):
    before = np.concatenate([ids[:, :i], np.full([4, 6 - i], 2, np.int32)], axis=1)
    # Token 0 is padding for the forward pass.
    rows = (before != 0).all(-1)
    best = logits_of(impl, model, INPUTS, before)[:, i].argmax(-1)
    assert rows.any()
    np.testing.assert_array_equal(ids[rows, i], best[rows])


def test_length_of_results():
  impl = lm.one_device()
  model = model_on(impl, "beam_search.beam_search.eos_id = -1")
  decode = lambda **options: lm.run(impl, lambda x: model.decode(x, **options), INPUTS)  # noqa: E731
  assert decode().shape == decode(beam_size=2).shape == (4, 7)
  assert decode(beam_size=2, max_decode_length=9).shape == (4, 9)
  # The longest input has 7 tokens: at most 7 * 0.5 + 0.9 = 4 tokens are made.
  ids = decode(beam_size=2, decode_length_multiplier=0.5, decode_length_constant=0.9)
  assert not ids[:, 4:].any() and ids[:, 3].any()


def test_sampling_depends_on_seed_and_temperature():
  impl = lm.one_device()
  model = model_on(impl)

  def sample(seed, **options):
    return lm.run(impl, lambda x: model.decode(x, **options), INPUTS, seed=seed)

  first = sample(1, temperature=1.0)
  np.testing.assert_array_equal(first, sample(1, temperature=1.0))
  assert (first != sample(2, temperature=1.0)).any()
  top = sample(1, temperature=9.0, sampling_keep_top_k=1)
  np.testing.assert_array_equal(top, sample(2))


def test_beam_search_does_not_sample():
  impl = lm.one_device()
  model = bi.make_model()
  for options in (dict(temperature=0.5), dict(sampling_keep_top_k=3)):
    with pytest.raises(errors.ConfigError, match="beam_size=2.*temperature"):
      lm.run(impl, lambda x, o=options: model.decode(x, beam_size=2, **o), INPUTS)


def test_gin_binds_arguments_of_decode():
  impl = lm.one_device()
  model = model_on(impl, "Bitransformer.decode.max_decode_length = 3")
  assert lm.run(impl, model.decode, INPUTS).shape == (4, 3)
  assert model.decoder.label_smoothing == 0.0


@pytest.mark.parametrize("beam_size", [1, 3])
def test_the_loop_uses_the_encoder_through_cached_keys_and_values(beam_size):
  """No operation of the loop reads the encoder's weights, or those of keys and values of it."""
  model = bi.make_model(bi.T5_1_0)
  mesh = mtf.Mesh(mtf.Graph(), "mesh")
  inputs = mtf.zeros(mesh, [("batch", 2), ("length", 4)], tf.int32)
  model.decode(inputs, beam_size=beam_size)
  (loop,) = [op for op in mesh.graph.operations if isinstance(op, mtf.WhileLoopOperation)]
  names = {v.value: v.full_name for v in mesh.graph.all_variables}
  read = {names[x] for op in loop.inner_operations for x in op.inputs if x in names}
  assert {n for n in read if n.endswith("EncDecAttention/q")} and "shared/embedding" in read
  assert not [n for n in read if n.startswith("encoder/")]
  assert not [n for n in read if n.endswith(("EncDecAttention/k", "EncDecAttention/v"))]
  # The mask of the encoder's padding is made once, too.
  attention = [op for op in loop.inner_operations if "EncDecAttention" in op.name]
  ids = [x for op in attention for x in op.inputs if x.dtype == tf.int32]
  assert not [x for x in ids if {"batch", "memory_length"} <= set(x.shape.dimension_names)]


def test_decoding_ends_when_all_rows_have_ended():
  impl = lm.one_device()
  model = model_on(impl)
  # Whatever the decoder sees, it says the end of the sequence.
  store = impl.variable_store
  embedding = np.zeros([11, 4], np.float32)
  embedding[1] = 20.0
  store["shared/embedding"].assign(embedding)
  for name in bi.names(impl):
    if name.endswith(("/o", "/wo/kernel")):
      store[name].assign(np.zeros(store[name].shape.to_integer_list, np.float32))
  store["shared/positional_embedding"].assign(np.full([16, 4], 9.0, np.float32))

  def program(inputs):
    ids = model.decode(inputs, max_decode_length=16)
    (loop,) = [op for op in inputs.graph.operations if isinstance(op, mtf.WhileLoopOperation)]
    return ids, loop.outputs[0]

  ids, position = lm.run(impl, program, INPUTS)
  np.testing.assert_array_equal(ids, np.eye(1, 16, dtype=np.int32).repeat(4, 0))
  np.testing.assert_array_equal(position, 1)


# ---------------------------------------------------------- packing, padding


def test_packed_pairs_do_not_see_each_other():
  impl = lm.one_device()
  model = model_on(impl)
  inputs = np.array([[5, 6, 1, 3, 8, 9, 1, 0]], np.int32)
  targets = np.array([[4, 2, 7, 1, 9, 1, 0]], np.int32)
  ids = [np.array(x, np.int32) for x in ([[1, 1, 1, 2, 2, 2, 2, 0]], [[1, 1, 1, 1, 2, 2, 0]])]
  places = [np.array(x, np.int32) for x in ([[0, 1, 2, 0, 1, 2, 3, 0]], [[0, 1, 2, 3, 0, 1, 0]])]

  def program(inputs, targets, *more):
    keys = ("encoder_sequence_id", "decoder_sequence_id", "encoder_position", "decoder_position")
    options = dict(zip(keys, more))
    return model.call_simple(inputs, targets, False, mode="eval", **options)[0]

  packed = lm.run(impl, program, inputs, targets, *ids, *places)
  first = lm.run(impl, program, inputs[:, :3], targets[:, :4])
  second = lm.run(impl, program, inputs[:, 3:7], targets[:, 4:6])
  np.testing.assert_allclose(packed[:, :4], first, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(packed[:, 4:6], second, rtol=1e-4, atol=1e-5)


def test_subsequences_of_the_decoder_share_the_encoder():
  """Two targets of one input: apart in self-attention, one sequence for the encoder."""
  impl = lm.one_device()
  model = model_on(impl)
  inputs = np.array([[5, 6, 1]], np.int32)
  targets = np.array([[4, 2, 1, 9, 8, 1]], np.int32)
  sub = np.array([[1, 1, 1, 2, 2, 2]], np.int32)

  def program(inputs, targets, sub):
    return model.call_simple(
      inputs, targets, False, mode="eval", decoder_subsequence_id=sub
    )[0]  # fmt: skip

  base = lm.run(impl, program, inputs, targets, sub)
  other = targets.copy()
  other[0, 0] = 7  # It is the input of position 1, and no part of the second target.
  changed = lm.run(impl, program, inputs, other, sub)
  assert np.abs(changed[0, 1:3] - base[0, 1:3]).max() > 1e-3
  np.testing.assert_allclose(changed[0, 3:], base[0, 3:], atol=1e-6)
  elsewhere = lm.run(impl, program, np.array([[5, 7, 1]], np.int32), targets, sub)
  assert (np.abs(elsewhere - base).max(-1) > 1e-4).all()


def test_padding_of_the_inputs_has_no_effect():
  impl = lm.one_device()
  model = model_on(impl)
  longer = np.pad(INPUTS, [[0, 0], [0, 3]])
  np.testing.assert_allclose(
    logits_of(impl, model, longer, TARGETS), logits_of(impl, model, INPUTS, TARGETS), atol=1e-5
  )


# ----------------------------------------------------------------------- loss


def test_loss_by_its_formula():
  """Label smoothing and z-loss of the decoder; masked and padded targets; microbatches."""
  impl = lm.one_device()
  smoothing, z_loss, microbatches = 0.2, 0.03, 3
  model = model_on(
    impl,
    f"""
    decoder/Unitransformer.label_smoothing = {smoothing}
    decoder/Unitransformer.z_loss = {z_loss}
    encoder/Unitransformer.z_loss = 100.0
    """,
  )
  targets = TARGETS * np.where(RNG.random(TARGETS.shape) < 0.3, -1, 1).astype(np.int32)
  targets[0, 3:] = 0
  ids = np.abs(np.sign(targets))

  def program(mode):
    def run(inputs, targets, ids):
      return model.call_simple(
        inputs, targets, True, mode=mode, decoder_sequence_id=ids, num_microbatches=microbatches
      )

    return lm.run(impl, run, INPUTS, targets, ids)

  for mode, z in (("train", z_loss), ("eval", 0.0)):
    logits, loss = program(mode)
    log_z = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    log_probs = logits - log_z[..., None]
    likely = np.take_along_axis(log_probs, np.maximum(targets, 0)[..., None], -1)[..., 0]
    position_loss = -(1 - smoothing) * likely - smoothing * log_probs.mean(-1) + z * log_z**2
    expected = (position_loss * (targets > 0)).sum() / (targets.size * microbatches)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
  assert model.z_loss == z_loss and model.output_vocab_dim == mtf.Dimension("vocab", 11)


def test_loss_denominator():
  impl = lm.one_device()
  model = model_on(impl, "decoder/Unitransformer.loss_denominator = 7")

  def program(inputs, targets):
    assert model.loss_denominator(targets, 5) == 7.0
    return model.call_simple(inputs, targets, True)[1]

  fixed = lm.run(impl, program, INPUTS, TARGETS)
  by_size = bi.make_model()
  loss = lm.run(impl, bi.loss_program(by_size), INPUTS, TARGETS)[0]
  np.testing.assert_allclose(fixed * 7, loss * TARGETS.size, rtol=1e-5)


def test_auxiliary_losses_of_the_encoder_count():
  impl = lm.one_device()
  model = model_on(impl)
  plain = lm.run(impl, bi.loss_program(model, "eval"), INPUTS, TARGETS)[0]

  class Added(transformer.TransformerLayer):
    """Leaves x as it is and adds 2 to the losses."""

    def call(self, context, x):
      if context.losses is not None:
        context.losses.append(mtf.constant(x.mesh, 2.0))
      return mtf.zeros_like(x)

  model.encoder.layer_stack._layers.append(Added())
  again = lm.run(impl, bi.loss_program(model, "eval"), INPUTS, TARGETS)[0]
  np.testing.assert_allclose(again, plain + 2.0, rtol=1e-5)


# ------------------------------------------------------------------ ensembles


@pytest.mark.parametrize("reduction", ["mean_prob", "mean_logit", "select"])
def test_ensemble_is_its_members_side_by_side(reduction):
  binding = f"reduce_ensemble_logits.reduce_fn = @reduce_ensemble_logits_{reduction}"
  impl = lm.one_device()
  model = model_on(impl, f"Unitransformer.ensemble = 2\n{binding}")
  weights = {s.name: s.numpy() for s in impl.variable_store}
  loss, logits, grads, _ = lm.run(impl, bi.loss_program(model), INPUTS, TARGETS)
  members = []
  for i in range(2):
    single = lm.one_device()
    model_i = bi.make_model()
    store = bi.initialize(single, model_i, INPUTS, TARGETS)
    for name in bi.names(single):
      store[name].assign(weights[name][i])
    members.append(lm.run(single, bi.loss_program(model_i), INPUTS, TARGETS))
  np.testing.assert_allclose(loss, sum(m[0] for m in members), rtol=1e-5)
  for name, grad in grads.items():
    np.testing.assert_allclose(grad, np.stack([m[2][name] for m in members]), atol=1e-5)
  expected = {
    "mean_prob": np.log(sum(numpy_lm.softmax(m[1]) for m in members) / 2),
    "mean_logit": sum(m[1] for m in members) / 2,
    "select": members[0][1],
  }[reduction]
  np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------- plumbing


def test_decoder_layers_get_the_outputs_of_the_encoders_layers():
  seen = []

  class Looks(transformer.TransformerLayer):
    def call(self, context, x):
      seen.append((context.mode, context.encoder_layer_outputs, context.encoder_output))
      return mtf.zeros_like(x)

  model = bi.make_model()
  model.decoder.layer_stack._layers.append(Looks())
  mesh = mtf.Mesh(mtf.Graph(), "mesh")
  ids = mtf.zeros(mesh, [("batch", 2), ("length", 4)], tf.int32)
  model.call_simple(ids, ids, compute_loss=True)
  model.decode(ids)
  assert [mode for mode, *_ in seen] == ["train", "first_part", "incremental"]
  for _, outputs, output in seen:
    # After the initial sublayers, of layers 0, 1 and 2 of 4, and after the final ones.
    assert len(outputs) == 5
    assert all(x.shape.dimension_names == ["batch", "length", "d_model"] for x in outputs)
    assert output.shape.dimension_names == ["batch", "memory_length", "d_model"]


@pytest.mark.parametrize("file", ["bi_base", "bi_w1", "aiayn_base", "bi_l12"])
def test_packaged_models_build(file):
  model = bi.make_model(files=(f"models/{file}.gin",))
  mesh = mtf.Mesh(mtf.Graph(), "mesh")
  ids = mtf.zeros(mesh, [("batch", 2), ("length", 4)], tf.int32)
  logits, loss = model.call_simple(ids, ids, compute_loss=True)
  assert logits.shape.dimension_names == ["batch", "length", "vocab"] and loss.shape.size == 1
  assert model.encoder.layer_stack.num_layers == 4  # The small sizes come last.


def test_a_decoder_longer_than_its_positions():
  model = bi.make_model()
  mesh = mtf.Mesh(mtf.Graph(), "mesh")
  ids = mtf.zeros(mesh, [("batch", 2), ("length", 4)], tf.int32)
  with pytest.raises(errors.ShapeError, match="Unitransformer.max_length = 17"):
    model.decode(ids, max_decode_length=17)
