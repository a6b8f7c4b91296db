"""Log-likelihoods of given targets, beside NumPy; and what becomes of them."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow import errors
from mesh_tensorflow.transformer import (
  dataset,
  utils,
)
from mesh_tensorflow.transformer.modes import input_fns
from mesh_tensorflow.transformer.vocabulary import CharacterVocabulary
from tests.transformer import numpy_lm
from tests.transformer import training_program as program

LETTERS = CharacterVocabulary("abcdefghijklmnopqrstuvwxyz ")
OPTIONS = {"num_heads": 4, "d_kv": 8}
LENGTHS = {"inputs": 16, "targets": 16}
ROWS = np.array([[5, 9, 3, 1] + [0] * 12, list(range(2, 18)), [7] * 8 + [1] + [0] * 7], np.int32)


def log_likelihoods(weights, targets, scored):
  """Sums of log probabilities of abs(targets), each after those before it, by NumPy."""
  given = np.pad(np.abs(targets), [[0, 0], [1, 0]])[:, :-1]
  logits = numpy_lm.logits(weights, given, 1, OPTIONS)
  logits -= logits.max(-1, keepdims=True)
  log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  each = np.take_along_axis(log_probs, np.abs(targets)[..., None], -1)[..., 0]
  return np.where(scored, each, 0).sum(-1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
  """A folder with a trained model."""
  path = str(tmp_path_factory.mktemp("model"))
  program.make_trainer(model_dir=path, dropout=False, learning_rate=5e-3).train(program.dataset, 10)
  return path


def make_scorer(folder, mesh="", implementation="placement", model_type="lm", lengths=None):
  trainer = program.make_trainer(
    mesh, implementation, model_dir=folder, dropout=False, score_in_predict_mode=True
  )
  trainer.steps.model_type = model_type
  trainer.steps.sequence_length = lengths or LENGTHS
  return trainer


@pytest.fixture(scope="module")
def scorer(folder):
  return make_scorer(folder)


def batches(features, size=program.BATCH):
  return lambda: tf.data.Dataset.from_tensor_slices(features).batch(size)


def scores(trainer, features):
  return np.array(utils.compute_log_likelihoods(trainer, batches(features)))


def test_scores_are_the_log_likelihoods_that_numpy_computes(scorer):
  results = list(scorer.predict(batches({"targets": ROWS})))
  weights = program.weights(scorer)
  expected = log_likelihoods(weights, ROWS, ROWS > 0)
  np.testing.assert_allclose([r["scores"] for r in results], expected, rtol=1e-4)
  assert all(r["scores"].dtype == np.float32 for r in results)
  # The evaluation counts the same.
  total = scorer.evaluate(tf.data.Dataset.from_tensor_slices({"targets": ROWS}))["total_nats"]
  assert total == pytest.approx(-expected.sum(), rel=1e-4)
  # Targets come back up to the first end of sequence; those without one whole.
  np.testing.assert_array_equal([r["targets"] for r in results], ROWS)


def test_negative_targets_are_seen_but_not_scored(scorer):
  rows = ROWS.copy()
  rows[:, :3] *= -1
  expected = log_likelihoods(program.weights(scorer), rows, rows > 0)
  np.testing.assert_allclose(scores(scorer, {"targets": rows}), expected, rtol=1e-4)
  assert not np.allclose(expected, scores(scorer, {"targets": ROWS}))


@pytest.mark.parametrize("implementation", ["placement", "simd"])
def test_scores_do_not_depend_on_the_mesh(scorer, folder, implementation):
  other = make_scorer(folder, "batch:2,model:2", implementation)
  np.testing.assert_allclose(
    scores(other, {"targets": ROWS}), scores(scorer, {"targets": ROWS}), rtol=1e-4
  )


def test_a_delimited_lm_scores_what_comes_after_the_inputs(folder):
  trainer = make_scorer(folder, model_type="delimited_lm", lengths={"inputs": 6, "targets": 10})
  inputs = np.array([[5, 6, 1, 0, 0, 0], [9, 8, 7, 6, 5, 1]], np.int32)
  targets = np.array([[11, 12, 13, 1] + [0] * 6, [20] * 9 + [1]], np.int32)
  joined = np.zeros([2, 16], np.int32)
  for row, a, b in zip(joined, inputs, targets):
    ids = [*a[a > 0], *b[b > 0]]
    row[: len(ids)] = ids
  scored = np.zeros([2, 16], bool)
  scored[0, 3:7] = scored[1, 6:16] = True
  expected = log_likelihoods(program.weights(make_ready(trainer)), joined, scored)
  results = list(trainer.predict(batches({"inputs": inputs, "targets": targets})))
  np.testing.assert_allclose([r["scores"] for r in results], expected, rtol=1e-4)
  # Inputs and targets, both whole.
  np.testing.assert_array_equal([r["targets"] for r in results], joined)


def test_examples_of_a_packed_row_are_scored_each_by_itself(scorer):
  alone = np.zeros([2, 16], np.int32)
  alone[0, :3], alone[1, :5] = [4, 5, 1], [9, 8, 7, 6, 1]
  packed = np.zeros([1, 16], np.int32)
  packed[0, :8] = [4, 5, 1, 9, 8, 7, 6, 1]
  segmentation = np.array([[1] * 3 + [2] * 5 + [0] * 8], np.int32)
  position = np.array([[0, 1, 2, 0, 1, 2, 3, 4] + [0] * 8], np.int32)
  features = dict(targets=packed, targets_segmentation=segmentation, targets_position=position)
  expected = scores(scorer, {"targets": alone}).sum()
  assert scores(scorer, features) == pytest.approx([expected], rel=1e-4)


def make_ready(trainer):
  trainer.restore_for_inference()
  return trainer


def test_inputs_of_an_lm_count_and_a_warning_says_so(scorer, folder, caplog):
  half = {"inputs": 8, "targets": 8}
  trainer = make_scorer(folder, lengths=half)
  with caplog.at_level(logging.WARNING):
    result = scores(trainer, {"inputs": ROWS[1:2, :8], "targets": ROWS[1:2, 8:]})
  assert "count in the scores" in caplog.text
  np.testing.assert_allclose(result, scores(scorer, {"targets": ROWS[1:2]}), rtol=1e-4)


@pytest.mark.slow
def test_predict_fn_takes_the_place_of_the_model(folder):
  def count(model, features, variable_dtype):
    del model, variable_dtype
    import mesh_tensorflow as mtf

    ids = features["targets"]
    return mtf.reduce_sum(mtf.to_float(mtf.greater(ids, 0)), reduced_dim=ids.shape.dims[-1])

  trainer = make_scorer(folder)
  trainer.predict_fn = count
  assert scores(trainer, {"targets": ROWS}).tolist() == [4, 16, 9]


def test_predict_cuts_to_what_a_batch_says_and_refuses_wrong_data(scorer):
  data = {"targets": ROWS, "predict_batch_size": np.full([3], 2)}
  assert len(list(scorer.predict(batches(data)))) == 2
  for features, text in [
    ({"targets": np.zeros([2, 17], np.int32)}, r"\[2, 17\], expected \[rows, 16\]"),
    ({"inputs": ROWS}, "needs 'targets' to score"),
  ]:
    with pytest.raises(errors.DataError, match=text):
      list(scorer.predict(batches(features)))
  with pytest.raises(errors.DataError, match="must return a tf.data.Dataset"):
    list(scorer.predict(lambda: 3))
  outputs = program.make_trainer(dropout=False)
  with pytest.raises(errors.DataError, match="needs 'inputs' to predict"):
    list(outputs.predict(batches({"targets": ROWS})))
  with pytest.raises(errors.ConfigError, match="score_in_predict_mode"):
    utils.compute_log_likelihoods(outputs, batches({"targets": ROWS}))
  with pytest.raises(errors.ConfigError, match="the estimator scores"):
    list(utils.decode(scorer, batches({"inputs": ROWS}), LETTERS))


# ------------------------------------------------------------------------ strings


def from_strings(scorer, folder, inputs, targets, **kwargs):
  arguments = dict(
    vocabulary=LETTERS, model_type="lm", batch_size=program.BATCH, sequence_length=LENGTHS,
    model_dir=folder, eval_checkpoint_step=-1, score_postprocess_fn=utils.save_scores,
  )  # fmt: skip
  arguments.update(kwargs)
  return utils.score_from_strings(scorer, inputs=inputs, targets=targets, **arguments)


def test_score_from_strings_and_files(scorer, folder, tmp_path):
  values, texts = from_strings(scorer, folder, None, ["abc", "hello world"])
  assert texts == ["abc", "hello world"]
  rows = np.zeros([2, 16], np.int32)
  for row, text in zip(rows, texts):
    row[: len(text)] = LETTERS.encode(text)
  expected = log_likelihoods(program.weights(scorer), rows, rows > 0)
  np.testing.assert_allclose(values, expected, rtol=1e-4)
  # A common prefix is not scored; the probability of both is the product.
  ((whole,), _), ((prefix,), _), ((rest,), _) = (
    from_strings(scorer, folder, *pair)
    for pair in [(None, ["abcd"]), (None, ["ab"]), (["ab"], ["cd"])]
  )
  assert whole == pytest.approx(prefix + rest, rel=1e-4)
  # Files; two targets for each input.
  (tmp_path / "in").write_text("ab\nba\n")
  (tmp_path / "out").write_text("cd\nce\ncd\nce\n")
  values, texts = from_strings(scorer, folder, str(tmp_path / "in"), str(tmp_path / "out"))
  assert values[0] == pytest.approx(rest, rel=1e-4) and texts == ["cd", "ce"] * 2
  alone, _ = from_strings(scorer, folder, ["ba"], ["ce"])
  assert values[3] == pytest.approx(alone[0], rel=1e-4)
  # One target for all inputs.
  assert len(from_strings(scorer, folder, ["a", "b", "c"], ["d"])[0]) == 3


@pytest.mark.parametrize(
  ("inputs", "targets", "kwargs", "text"),
  [
    (["a", "b"], ["a", "b", "c"], {}, r"targets \(3\) is no multiple.*inputs \(2\)"),
    (["a", "b", "c"], ["a", "b"], {}, "3 inputs, but 2 targets"),
    ([], ["a"], {}, "no multiple"),
    (None, [], {}, "no targets"),
    (None, "nowhere.txt", {}, "nowhere.txt.* cannot be read"),
    (None, ["a"], {"model_type": "bitransformer"}, "needs inputs"),
    (None, ["a"], {"eval_checkpoint_step": [5, 10]}, "no checkpoint of step 5.*those of 10"),
  ],
)
def test_score_from_strings_wrong_input(scorer, folder, inputs, targets, kwargs, text):
  with pytest.raises((errors.DataError, errors.CheckpointError), match=text):
    from_strings(scorer, folder, inputs, targets, **kwargs)


def test_exactly_one_checkpoint(scorer, folder, tmp_path):
  with pytest.raises(errors.ConfigError, match="exactly one checkpoint, but there is none"):
    from_strings(scorer, str(tmp_path), None, ["a"])
  for step in (5, 9):
    (tmp_path / f"model.ckpt-{step}.index").write_text("")
  with pytest.raises(errors.ConfigError, match="there are 2 of 'all'"):
    from_strings(scorer, str(tmp_path), None, ["a"], eval_checkpoint_step="all")
  with pytest.raises(errors.ConfigError, match="not of new ones"):
    from_strings(scorer, str(tmp_path), None, ["a"], eval_checkpoint_step="new")
  # None does not wait for a second one.
  assert from_strings(scorer, folder, None, ["a"], eval_checkpoint_step=None)[1] == ["a"]


# ------------------------------------------------------------------------ data sets


def eval_dataset(name, rows, metric_fns=()):
  def dataset_fn(sequence_length=None):
    return tf.data.Dataset.from_tensor_slices({"targets": rows, "other": ["x"] * len(rows)})

  return dataset.EvalDataset(name, dataset_fn, lambda x, **_: x, list(metric_fns))


def test_score_from_dataset_scores_all_and_no_padding(scorer, folder):
  def datasets(sequence_length, vocabulary, dataset_split):
    assert (sequence_length, vocabulary, dataset_split) == (LENGTHS, LETTERS, "test")
    return [eval_dataset("a", ROWS), eval_dataset("b", ROWS[1:], [len])]

  values, texts = utils.score_from_dataset(
    scorer, LETTERS, program.BATCH, LENGTHS, folder, -1, "test", datasets, utils.save_scores
  )
  expected = scores(scorer, {"targets": np.concatenate([ROWS, ROWS[1:]])})
  np.testing.assert_allclose(values, expected, rtol=1e-5)
  assert len(texts) == 5 and texts[2] == "e" * 8
  with pytest.raises(errors.ConfigError, match="score_dataset_fn is not bound"):
    utils.score_from_dataset(
      scorer, LETTERS, program.BATCH, LENGTHS, folder, -1, "test",
      score_postprocess_fn=utils.save_scores,
    )  # fmt: skip
  with pytest.raises(errors.DataError, match="no results"):
    utils.score_from_dataset(
      scorer, LETTERS, program.BATCH, LENGTHS, folder, -1, "test",
      lambda **_: [eval_dataset("a", ROWS * 0)], utils.save_scores,
    )  # fmt: skip


def test_the_combined_input_fn(scorer):
  sets = [eval_dataset("a", ROWS), eval_dataset("b", ROWS[:2], [len])]
  got = list(utils._get_combined_dataset_input_fn(sets, 4, 16)())
  assert [sorted(b) for b in got] == [["targets"]] * 2
  expected = np.concatenate([ROWS, ROWS[:2], np.zeros([3, 16])])
  np.testing.assert_array_equal(np.concatenate([b["targets"] for b in got]), expected)
  only = list(utils._get_combined_dataset_input_fn(sets, 4, 16, check_for_metrics=True)({}))
  np.testing.assert_array_equal(only[0]["targets"], np.pad(ROWS[:2], [[0, 2], [0, 0]]))
  with pytest.raises(errors.DataError, match="no data set"):
    input_fns.combined_dataset_input_fn(sets[:1], 4, 16, check_for_metrics=True)()


class Results:
  """Stands for a `Trainer`: predicts given results."""

  score_in_predict_mode = True

  def __init__(self, targets):
    self.targets = targets
    self.taken = 0

  def predict(self, input_fn, checkpoint_path):
    for i, row in enumerate(self.targets):
      self.taken += 1
      yield {"scores": np.float32(i), "targets": np.array(row)}


@pytest.mark.parametrize(
  ("rows", "num_examples", "shard", "expected"),
  [
    (7, None, 3, [3, 3, 1]),
    (6, None, 3, [3, 3]),
    (7, 4, 3, [3, 1]),
    (7, 3, 3, [3]),
    (7, 5, 100, [5]),
    (2, 5, 100, [2]),
  ],
)
def test_lazy_scores_come_in_full_shards_and_no_more(folder, rows, num_examples, shard, expected):
  parts = []

  def keep(results, vocabulary, shard_idx):
    assert vocabulary is LETTERS and shard_idx == len(parts)
    parts.append([float(r["scores"]) for r in results])

  # Padding in the middle counts, that at the end does not.
  targets = [[2], [0], *[[3]] * (rows - 2)] + [[0], [0]] * (num_examples is None)
  estimator = Results(targets)
  utils.score_with_estimator_lazy(
    estimator, None, -1, folder, LETTERS, keep, num_examples, num_examples_per_shard=shard
  )
  assert [len(p) for p in parts] == expected
  assert sum(parts, []) == list(range(sum(expected)))
  # It does not wait for results that nobody asked for.
  if num_examples is not None:
    assert estimator.taken == min(num_examples, rows)
  kept, _ = utils.score_with_estimator(
    Results([[2], [0], *[[3]] * (rows - 2)]), None, -1, folder, LETTERS, num_examples=num_examples
  )
  assert len(kept) == sum(expected)


def test_results_of_another_estimator_may_be_strings(folder):
  class Texts(Results):
    def predict(self, input_fn, checkpoint_path):
      return iter([{"scores": 1.0, "targets": t} for t in (b"cab", b"", b"b", b"")])

  results = utils.score_with_estimator(Texts(None), None, -1, folder, LETTERS)
  assert results == ([1.0] * 3, ["cab", "", "b"])


def test_lazy_without_results(folder):
  with pytest.raises(errors.DataError, match="no results"):
    utils.score_with_estimator_lazy(Results([[0]]), None, -1, folder, LETTERS, print)
  with pytest.raises(errors.ConfigError, match="num_examples_per_shard"):
    utils.score_with_estimator_lazy(
      Results([[2]]), None, -1, folder, LETTERS, print, num_examples_per_shard=0
    )


# ------------------------------------------------------------------------ files


def test_save_scores(tmp_path):
  ids = np.array([*LETTERS.encode("cab"), 1, 0])
  results = [
    {"scores": np.float32(-1.25), "targets": ids, "inputs": np.array([3, 4, 1, 0, 0])},
    {"scores": np.float32(-123456789.0), "targets": np.array([2, 2, 2, 2, 2]), "inputs": ids},
  ]
  name = str(tmp_path / "new" / "out")
  expected = ([-1.25, -123456792.0], ["ab", "cab"], ["cab", "     "])
  assert utils.save_scores(results, LETTERS, name) == expected
  read = {p.suffix: p.read_text() for p in (tmp_path / "new").iterdir()}
  assert read == {
    ".scores": "-1.25\n-1.23457e+08\n",
    ".inputs": "ab\ncab\n",
    ".targets": "cab\n     \n",
    ".lengths": "4\n5\n",
  }
  for r in results:
    del r["inputs"]
  assert utils.save_scores(results, LETTERS) == (expected[0], expected[2])
  assert utils.save_scores(results, LETTERS, save_example_text=False) == expected[0]
  text = [{"scores": 1.0, "targets": b"cab"}, {"scores": 2.0, "targets": "b"}]
  assert utils.save_scores(text, LETTERS) == ([1.0, 2.0], ["cab", "b"])
  with pytest.raises(ValueError, match="no results"):
    utils.save_scores([], LETTERS)


@pytest.mark.parametrize("ids_only", [False, True])
def test_save_scores_to_tfrecords(tmp_path, ids_only):
  prefix = [-i for i in LETTERS.encode("id a")]
  results = [
    {"scores": np.float32(-2.5), "targets": np.array([*prefix, *LETTERS.encode("bc"), 1, 0])},
    {"targets": np.array(LETTERS.encode("x")), "inputs": np.array(LETTERS.encode("y z"))},
  ]
  utils.save_scores_to_tfrecords(results, LETTERS, str(tmp_path / "s"), 7, save_ids_only=ids_only)
  read = []
  for record in tf.data.TFRecordDataset(str(tmp_path / "s_7.tfrecord")):
    f = tf.train.Example.FromString(record.numpy()).features.feature
    read.append(
      (f["input"].bytes_list.value[0], f["target"].bytes_list.value[0], f["score"].float_list.value)
    )
  given = (b"id", b"y") if ids_only else (b"id a", b"y z")
  assert read == [(given[0], b"bc", [-2.5]), (given[1], b"x", [0.0])]


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64])
def test_texts_are_added_to_examples(dtype):
  ids = np.array([*LETTERS.encode("cab"), 1, 0], dtype)
  examples = {"inputs": ids, "targets": -ids, "other": ids}
  utils._maybe_add_pretokenized_features(examples, LETTERS)
  assert examples["inputs_pretokenized"] == "cab" and examples["targets_pretokenized"] == ""
  assert examples["targets_neg_pretokenized"] == "cab" and "inputs_neg_pretokenized" not in examples
  assert len(examples) == 6
  kept = {"inputs": ids, "inputs_pretokenized": "as it was"}
  utils._maybe_add_pretokenized_features(kept, LETTERS)
  assert kept == {"inputs": ids, "inputs_pretokenized": "as it was"}
