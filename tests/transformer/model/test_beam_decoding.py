"""Beam search with models, against all sequences scored by the forward pass."""

import itertools

import gin
import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer import transformer
from tests.transformer import bi_program as bi
from tests.transformer import lm_program as lm
from tests.transformer import numpy_lm

VOCAB, LENGTH, EOS = 4, 3, 1
# As many as there are sequences: the search is exhaustive.
BEAM = VOCAB**LENGTH
INPUTS = np.array([[2, 3, 1, 0], [3, 3, 2, 1]], np.int32)


def finished_sequences(length):
  """All that end with EOS within `length` tokens, filled up with zeros."""
  sequences = set()
  for ids in itertools.product(range(VOCAB), repeat=length):
    if EOS in ids:
      end = ids.index(EOS) + 1
      sequences.add(ids[:end] + (0,) * (length - end))
  return np.array(sorted(sequences), np.int32)


def best(log_probs, sequences, alpha):
  """The sequence with the highest penalized log probability.

  Args:
    log_probs: [number of sequences, length, vocab].
    sequences: [number of sequences, length].
    alpha: exponent of the penalty.
  """
  ends = (sequences == EOS).argmax(-1)
  likely = np.take_along_axis(log_probs, sequences[..., None], -1)[..., 0]
  totals = np.array([likely[i, : end + 1].sum() for i, end in enumerate(ends)])
  scores = totals / ((5 + ends + 1) / 6) ** alpha
  return sequences[scores.argmax()]


def language_model(seed, **kwargs):
  impl = lm.one_device()
  model = lm.make_model(input_vocab_size=VOCAB, output_vocab_size=VOCAB, num_layers=1, **kwargs)
  bi.random_weights(lm.initialize(impl, model, np.ones([1, 2], np.int32)), seed, scale=1.0)
  return impl, model


def search(impl, model, shape=(1, BEAM, LENGTH), decode_length=None, **options):
  names = ["batch", "beam", "length"] if len(shape) == 3 else ["outer_batch", "batch", "beam"]
  names += [] if len(shape) == 3 else ["length"]

  def program(ids):
    return model.beam_search(ids, decode_length, **options)

  return lm.run(impl, program, np.zeros(shape, np.int32), names=names)


def log_probs_of(impl, model, sequences, bos_id=0):
  """The model's, in one forward pass."""

  def program(ids):
    inputs = transformer.autoregressive_inputs(ids)
    if bos_id:
      first = mtf.equal(mtf.range(ids.mesh, ids.shape.dims[-1], ids.dtype), 0)
      inputs += mtf.to_int32(first) * bos_id
    return model.call_simple(inputs, ids, compute_loss=False, mode="eval")[0]

  return np.log(numpy_lm.softmax(lm.run(impl, program, sequences)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("alpha", [0.0, 1.5])
def test_exhaustive_search_finds_the_best_sequence(seed, alpha):
  impl, model = language_model(seed, attention=dict(relative_attention_type="bias"))
  sequences = finished_sequences(LENGTH)
  expected = best(log_probs_of(impl, model, sequences), sequences, alpha)
  ids = search(impl, model, alpha=alpha)
  assert ids.shape == (1, LENGTH)
  np.testing.assert_array_equal(ids[0], expected)


def test_first_input():
  impl, model = language_model(4)
  sequences = finished_sequences(LENGTH)
  expected = best(log_probs_of(impl, model, sequences, bos_id=3), sequences, 0.6)
  np.testing.assert_array_equal(search(impl, model, bos_id=3)[0], expected)


def test_decode_length():
  impl, model = language_model(5)
  sequences = finished_sequences(2)
  expected = best(log_probs_of(impl, model, sequences), sequences, 0.6)
  np.testing.assert_array_equal(search(impl, model, decode_length=2)[0], [*expected, 0])


def test_several_batch_dimensions():
  impl, model = language_model(6)
  ids = search(impl, model, shape=(2, 3, 4, LENGTH))
  assert ids.shape == (2, 3, LENGTH)
  np.testing.assert_array_equal(
    ids, np.broadcast_to(search(impl, model, (1, 4, LENGTH)), ids.shape)
  )


@pytest.mark.parametrize("bindings", [bi.T5_1_0, "Unitransformer.ensemble = 2"])
def test_encoder_decoder(bindings):
  impl = lm.one_device()
  model = bi.make_model(bindings + "\nnum_layers = 1", vocab=VOCAB)
  bi.random_weights(bi.initialize(impl, model, INPUTS, INPUTS), 7, scale=0.9)
  sequences = finished_sequences(LENGTH)
  ids = lm.run(
    impl, lambda x: model.decode(x, beam_size=BEAM, alpha=0.8, max_decode_length=LENGTH), INPUTS
  )
  ones = np.ones_like(sequences)

  def program(inputs, targets, ids):
    # In decoding no token is padding, not even token 0.
    return model.call_simple(inputs, targets, False, mode="eval", decoder_sequence_id=ids)[0]

  for row in range(2):
    inputs = np.broadcast_to(INPUTS[row], [len(sequences), 4])
    log_probs = np.log(numpy_lm.softmax(lm.run(impl, program, inputs, sequences, ones)))
    np.testing.assert_array_equal(ids[row], best(log_probs, sequences, 0.8))


def test_a_beam_of_one_is_greedy_as_long_as_nothing_ends():
  gin.parse_config("beam_search.beam_search.eos_id = -1")
  impl, model = lm.one_device(), lm.make_model()
  bi.random_weights(lm.initialize(impl, model), 2, scale=1.0)
  nothing = np.zeros([1, 12], np.int32)
  greedy = lm.run(impl, lambda ids: model.sample_autoregressive(ids, stop_at_token=None), nothing)
  beam = lm.run(
    impl,
    lambda ids: model.beam_search(ids, None),
    nothing[:, None],
    names=["batch", "beam", "length"],
  )
  np.testing.assert_array_equal(beam, greedy)
  assert len(np.unique(greedy)) > 2


@pytest.mark.parametrize("kind", ["bias", "bias_shared"])
def test_relative_attention_to_the_encoder(kind):
  """The encoder's positions are told in beam search too; inputs without padding or sentinels."""
  inputs = np.array([[2, 3, 4, 1], [3, 3, 2, 1]], np.int32)
  impl = lm.one_device()
  model = bi.make_model(
    f"""
    EncDecAttention.relative_attention_type = "{kind}"
    relative_position_spans.num_sentinels = 3
    beam_search.beam_search.eos_id = -1
    """
  )
  bi.random_weights(bi.initialize(impl, model, inputs, inputs), 9)
  ids = lm.run(impl, lambda x: model.decode(x, beam_size=11), inputs)
  assert ids.shape == inputs.shape and (ids != 0).any()
  targets = np.array([[5, 2, 6], [7, 3, 1]], np.int32)

  def whole(inputs, targets):
    return model.call_simple(inputs, targets, False, mode="eval")[0]

  np.testing.assert_allclose(
    lm.run(impl, bi.stepwise_program(model), inputs, targets),
    lm.run(impl, whole, inputs, targets),
    atol=2e-5,
  )


def test_ended_searches_stop():
  """With a likely end of sequence the loop ends long before the length does."""
  impl, model = language_model(0)
  store = impl.variable_store
  embedding = np.zeros([VOCAB, 4], np.float32)
  embedding[EOS] = 20.0
  store["transformer/embedding"].assign(embedding)
  store["transformer/positional_embedding"].assign(np.full([16, 4], 9.0, np.float32))
  store["transformer/rms_norm/scale"].assign(np.ones([4], np.float32))

  def program(ids):
    out = model.beam_search(ids, None)
    (loop,) = [op for op in ids.graph.operations if isinstance(op, mtf.WhileLoopOperation)]
    return out, loop.outputs[0]

  ids, steps = lm.run(
    impl, program, np.zeros([1, 2, 16], np.int32), names=["batch", "beam", "length"]
  )
  np.testing.assert_array_equal(ids[0], [EOS] + [0] * 15)
  assert steps < 8


def test_errors():
  impl = lm.one_device()
  with pytest.raises(errors.ConfigError, match="not autoregressive"):
    search(impl, lm.make_model(autoregressive=False))
  with pytest.raises(errors.UnsupportedError, match="input_full_attention"):
    search(impl, lm.make_model(input_full_attention=True))
  with pytest.raises(errors.ShapeError, match="beam"):
    lm.run(impl, lambda ids: lm.make_model().beam_search(ids, None), np.zeros([2, 3], np.int32))
