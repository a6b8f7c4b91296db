"""What is drawn: its frequencies, its keys; and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.decoding import token_choice
from mesh_tensorflow.decoding.token_choice import TokenChoice
from tests.decoding import descriptors_token_choice as formulas

LOGITS = np.log(np.array([0.5, 0.2, 0.15, 0.1, 0.05], np.float32))
VOCAB = mtf.Dimension("vocab", 5)


def draw(keys, counts, **choice):
  rows = mtf.Dimension("rows", len(keys))
  impl = mtf.PlacementMeshImpl("all:1", "", ["CPU:0"])

  @mtf.function(impl, [mtf.TensorSpec([rows], tf.int32)] * 2)
  def run(keys, counts):
    logits = mtf.import_tf_tensor(
      keys.mesh, np.tile(LOGITS, [rows.size, 1]), [rows, VOCAB]
    )  # fmt: skip
    return token_choice.choose_token(logits, VOCAB, TokenChoice(**choice), keys, counts)

  return run(np.asarray(keys, np.int32), np.asarray(counts, np.int32)).numpy()


LAYOUTS = {
  "one device": ("", ""),
  "a split vocabulary": ("a:2,b:2", "rows:a,vocab:b"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_filters_and_the_draw(layout, cpu_devices):
  """The order of the filters, and tokens that formulas in NumPy choose."""
  shape, rules = LAYOUTS[layout]
  rows, vocab = mtf.Dimension("rows", 64), formulas.VOCAB
  impl = mtf.SimdMeshImpl(shape, rules, cpu_devices[: 4 if shape else 1])
  rng = np.random.default_rng(0)
  x = rng.normal(size=[64, 16]).astype(np.float32) * 2
  seen = rng.random([64, 16]) < 0.3
  keys, counts = token_choice.row_keys(5, range(64)), np.arange(64, dtype=np.int32)

  specs = [mtf.TensorSpec([rows, vocab], d) for d in (tf.float32, tf.bool)]

  @mtf.function(impl, [*specs, *[mtf.TensorSpec([rows], tf.int32)] * 2])
  def run(x, seen, keys, counts):
    choice = formulas.CHOICE
    return (
      formulas.finite(token_choice.filtered_logits(x, vocab, choice, seen)),
      token_choice.choose_token(x, vocab, choice, keys, counts, seen),
      *(formulas.finite(token_choice.keep_top_p(x, vocab, p)) for p in (1e-3, 0.4, 0.999)),
    )

  filtered, tokens, *nuclei = (t.numpy() for t in run(x, seen, keys, counts))
  wide = x.astype(np.float64)
  np.testing.assert_allclose(filtered, formulas.filtered(wide, seen), rtol=1e-5)
  assert 1 < np.mean(np.sum(filtered > -1e8, 1)) < 8
  np.testing.assert_array_equal(tokens, formulas.chosen(wide, seen, keys, counts))
  for p, nucleus in zip((1e-3, 0.4, 0.999), nuclei):
    np.testing.assert_allclose(nucleus, formulas.top_p(wide, p), rtol=1e-5)
  assert (np.sum(nuclei[0] > -1e8, 1) == 1).all()


def test_equally_likely_tokens_stay_in_the_nucleus_together():
  rows, vocab = mtf.Dimension("batch", 4), formulas.VOCAB
  impl = mtf.PlacementMeshImpl("all:1", "", ["CPU:0"])
  ties = np.asarray(formulas.TIES.values)

  @mtf.function(impl, [mtf.TensorSpec([rows, vocab])])
  def run(x):
    return formulas.finite(token_choice.keep_top_p(x, vocab, 0.4))

  # 4, 4, 2, 2, 2, 2 of 26: the first two are 0.31, and one of the next would be enough.
  np.testing.assert_array_equal(np.sum(run(ties).numpy() > -1e8, 1), [6] * 4)


@pytest.mark.parametrize("along", ["rows", "counts"])
def test_frequencies_are_the_probabilities(along):
  """Also along the tokens of one row, whose draws must not depend on each other."""
  n = 20_000
  keys = token_choice.row_keys(3, range(n) if along == "rows" else [7] * n)
  counts = np.zeros(n) if along == "rows" else np.arange(n)
  tokens = draw(keys, counts)
  expected = np.exp(LOGITS)
  # Four standard deviations.
  bound = 4 * np.sqrt(expected * (1 - expected) / n)
  assert (np.abs(np.bincount(tokens, minlength=5) / n - expected) < bound).all()
  # Neighbours are independent: pairs of the likeliest token come as often as they must.
  pairs = np.mean((tokens[1:] == 0) & (tokens[:-1] == 0))
  assert abs(pairs - 0.25) < 4 * np.sqrt(0.25 * 0.75 / n) * 1.5


def test_temperature_changes_the_frequencies():
  n = 10_000
  tokens = draw(token_choice.row_keys(0, range(n)), np.zeros(n), temperature=0.5)
  expected = formulas.softmax(LOGITS[None].astype(np.float64) / 0.5)[0]
  assert (np.abs(np.bincount(tokens, minlength=5) / n - expected) < 0.025).all()


def test_a_draw_is_of_seed_number_and_count():
  keys = token_choice.row_keys(1, range(1000))
  assert len(set(keys.tolist())) == 1000
  again = draw(keys[::-1], np.zeros(1000))[::-1]
  np.testing.assert_array_equal(draw(keys, np.zeros(1000)), again)
  for other in (token_choice.row_keys(2, range(1000)), keys):
    counts = np.ones(1000) if other is keys else np.zeros(1000)
    assert np.mean(draw(other, counts) == again) < 0.5


@pytest.mark.parametrize(
  ("choice", "text"),
  [
    (dict(temperature=-0.1), r"temperature \(=-0.1\) must be a number of at least 0"),
    (dict(temperature=float("nan")), r"temperature \(=nan\)"),
    (dict(top_k=0), r"top_k \(=0\) must be a whole number of at least 1, or None"),
    (dict(top_p=0.0), r"top_p \(=0.0\) must be a number above 0 and at most 1"),
    (dict(top_p=1.5), r"top_p \(=1.5\)"),
    (dict(min_p=-0.1), r"min_p \(=-0.1\) must be a number from 0 to 1"),
    (dict(repetition_penalty=0.0), r"repetition_penalty \(=0.0\) must be a number above 0"),
    (dict(temperature=True), r"temperature \(=True\)"),
  ],
)
def test_illegal_choices(choice, text):
  with pytest.raises(errors.ConfigError, match=text):
    TokenChoice(**choice)
