"""The options of `sample_autoregressive`, against the forward pass."""

import numpy as np
import pytest

from mesh_tensorflow import errors
from tests.transformer import lm_program as lm
from tests.transformer import numpy_lm

LENGTH = 8
PARTIAL = np.array([[5, 6, 0, 0, 0, 0, 0, 0], [3, 4, 2, 7, 0, 0, 0, 0]], np.int32)
OPTIONS = dict(num_heads=2, d_kv=3)


@pytest.fixture(scope="module")
def golden():
  """(mesh implementation, model, weights)."""
  impl, model = lm.one_device(), lm.make_model()
  store = lm.initialize(impl, model)
  lm.set_golden_weights(store)
  return impl, model, {s.name: s.numpy().astype(np.float64) for s in store}


def sample(golden, partial=PARTIAL, seed=None, traced=False, **options):
  impl, model, _ = golden
  return lm.run(
    impl, lambda p: model.sample_autoregressive(p, **options), partial, seed=seed, traced=traced
  )


def greedy(golden, partial, choose=lambda logits: logits.argmax(-1), bos_id=0):
  """Continues every row to the end, one forward pass a token."""
  ids = partial.copy()
  given = (partial != 0).sum(-1)
  for position in range(LENGTH):
    inputs = np.pad(ids, [[0, 0], [1, 0]])[:, :-1]
    inputs[:, 0] += bos_id
    best = choose(numpy_lm.logits(golden[2], inputs, 2, OPTIONS)[:, position])
    ids[:, position] = np.where(position < given, ids[:, position], best)
  return ids


def test_to_the_end_of_the_sequence(golden):
  np.testing.assert_array_equal(sample(golden, stop_at_token=None), greedy(golden, PARTIAL))


def test_stops_when_every_row_has_ended(golden):
  whole = greedy(golden, PARTIAL)
  # A token that both rows produce, the second row later than the first, or at the same place.
  common = (set(whole[0, 2:]) & set(whole[1, 4:])) - {0}
  stop = sorted(common)[0]
  new = [list(whole[0, 2:]), list(whole[1, 4:])]
  steps = max(row.index(stop) for row in new) + 1
  ids = sample(golden, stop_at_token=int(stop), traced=True)
  for row, given in ((0, 2), (1, 4)):
    end = given + steps
    np.testing.assert_array_equal(ids[row, :end], whole[row, :end])
    assert not ids[row, end:].any()


def test_stop_tokens_that_are_given_do_not_count(golden):
  partial = np.where(PARTIAL == 6, 1, PARTIAL).astype(np.int32)
  ids = sample(golden, partial, max_steps=2)
  np.testing.assert_array_equal(ids[0, :4], greedy(golden, partial)[0, :4])


def test_max_steps(golden):
  ids = sample(golden, stop_at_token=None, max_steps=3)
  whole = greedy(golden, PARTIAL)
  np.testing.assert_array_equal(ids[0], [*whole[0, :5], 0, 0, 0])
  np.testing.assert_array_equal(ids[1], [*whole[1, :7], 0])


def test_never_end(golden):
  whole = greedy(golden, PARTIAL)
  stop = int(whole[0, 2])

  def choose(logits):
    logits = logits.copy()
    logits[:, stop] = -1e9
    return logits.argmax(-1)

  ids = sample(golden, stop_at_token=stop, never_end=True)
  np.testing.assert_array_equal(ids, greedy(golden, PARTIAL, choose))
  assert stop not in ids[0, 2:]


def test_remove_partial_sequences(golden):
  whole = greedy(golden, PARTIAL)
  ids = sample(golden, stop_at_token=None, remove_partial_sequences=True)
  np.testing.assert_array_equal(ids[0], [*whole[0, 2:], 0, 0])
  np.testing.assert_array_equal(ids[1], [*whole[1, 4:], 0, 0, 0, 0])


def test_without_partial_sequences_and_with_bos(golden):
  nothing = np.zeros_like(PARTIAL)
  np.testing.assert_array_equal(
    sample(golden, nothing, stop_at_token=None, has_partial_sequences=False),
    greedy(golden, nothing),
  )
  np.testing.assert_array_equal(
    sample(golden, nothing, stop_at_token=None, has_partial_sequences=False, bos_id=3),
    greedy(golden, nothing, bos_id=3),
  )


def test_top_1_is_greedy_at_any_temperature(golden):
  ids = sample(golden, stop_at_token=None, temperature=5.0, sampling_keep_top_k=1, seed=1)
  np.testing.assert_array_equal(ids, greedy(golden, PARTIAL))


def test_top_k_chooses_among_k(golden):
  partial = np.zeros([64, 3], np.int32)
  partial[:, :2] = 5, 6
  logits = numpy_lm.logits(golden[2], np.array([[0, 5, 6]]), 2, OPTIONS)[0, 2]
  best = set(np.argsort(-logits)[:3])
  ids = sample(golden, partial, stop_at_token=None, temperature=20.0, sampling_keep_top_k=3, seed=2)
  assert set(ids[:, 2]) == best
  # More than there are tokens: no restriction.
  ids = sample(
    golden, partial, stop_at_token=None, temperature=20.0, sampling_keep_top_k=100, seed=2
  )
  assert len(set(ids[:, 2])) > 3


def test_temperature_draws_from_the_distribution(golden):
  impl, model, weights = golden
  n = 4000
  partial = np.zeros([n, 2], np.int32)
  partial[:, 0] = 5
  options = dict(stop_at_token=None, temperature=1.0)
  ids = lm.run(impl, lambda p: model.sample_autoregressive(p, **options), partial, seed=3)
  logits = numpy_lm.logits(weights, np.array([[0, 5]]), 2, OPTIONS)[0, 1]
  frequency = np.bincount(ids[:, 1], minlength=11) / n
  np.testing.assert_allclose(frequency, numpy_lm.softmax(logits), atol=0.03)


def test_inputs_of_a_delimited_model():
  """Decoding gives what the forward pass with full attention among inputs gives."""
  impl = lm.one_device()
  model = lm.make_model(input_full_attention=True)
  lm.set_golden_weights(lm.initialize(impl, model))
  partial = np.array([[5, 6, 7, 1, 0, 0, 0, 0]], np.int32)
  ids = lm.run(
    impl, lambda p: model.sample_autoregressive(p, stop_at_token=None, max_steps=3), partial
  )

  def logits(targets):
    inputs = lm.transformer.autoregressive_inputs(targets)
    return model.call_simple(inputs, targets, compute_loss=False, mode="eval")[0]

  best = lm.run(impl, logits, ids).argmax(-1)
  np.testing.assert_array_equal(ids[0, 4:7], best[0, 4:7])


def test_errors(golden):
  with pytest.raises(errors.ConfigError, match="sampling_keep_top_k"):
    sample(golden, sampling_keep_top_k=0)
  model = lm.make_model(autoregressive=False)
  with pytest.raises(errors.ConfigError, match="not autoregressive"):
    lm.run(lm.one_device(), model.sample_autoregressive, PARTIAL)


def test_the_loop_runs_as_few_times_as_needed(golden):
  """Nothing is decoded when all rows are full."""
  full = np.full([2, LENGTH], 4, np.int32)
  np.testing.assert_array_equal(sample(golden, full), full)
