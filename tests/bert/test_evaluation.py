"""Results do not depend on the batch size, nor on what fills up the last batch."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.bert import (
  classifier_features,
  records,
  run_classifier,
  run_pretraining,
  run_squad,
  training,
)
from tests.bert import models

EXAMPLES, LENGTH = 11, 8
# Whole batches; a filled one; all examples in one; one more than there are; more than half filling.
SIZES = [1, 4, 11, 12, 32]


def columns(seed: int = 0) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(seed)
  mask = (np.arange(LENGTH) < rng.integers(3, LENGTH + 1, [EXAMPLES, 1])).astype(np.int64)
  return {
    "input_ids": rng.integers(0, 100, [EXAMPLES, LENGTH]) * mask,
    "input_mask": mask,
    "segment_ids": rng.integers(0, 2, [EXAMPLES, LENGTH]) * mask,
  }


@pytest.fixture(scope="module")
def runner_of(cpu_devices):
  """A runner of a model function, whose weights are the same each time."""

  def make(model_fn, mode, input_fn):
    impl = models.one_device(cpu_devices)
    runner = training.Runner(model_fn, impl)
    # A trace makes the variables.
    if mode == training.EVAL:
      runner.evaluate(input_fn, 4)
    else:
      next(runner.predict(input_fn, 4))
    models.scatter(impl.variable_store)
    return runner

  return make


def same(results: list[dict[str, float]]) -> None:
  assert len(results) == len(SIZES)
  for found in results[1:]:
    assert found == pytest.approx(results[0], rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("in_memory", [False, True])
def test_classifier(runner_of, tmp_path, in_memory):
  data = columns()
  labels = np.random.default_rng(1).integers(0, 3, EXAMPLES)
  features = [
    classifier_features.InputFeatures(
      *(data[name][i].tolist() for name in ("input_ids", "input_mask", "segment_ids")),
      label_id=int(labels[i]),
    )
    for i in range(EXAMPLES)
  ]
  if in_memory:
    # These have no feature `is_real_example`.
    input_fn = run_classifier.input_fn_builder(features, LENGTH, False, False)
  else:
    file = str(tmp_path / "eval.tf_record")
    with tf.io.TFRecordWriter(file) as writer:
      for i, f in enumerate(features):
        row = {name: data[name][i].tolist() for name in data}
        writer.write(records.example({**row, "label_ids": [f.label_id], "is_real_example": [1]}))
    input_fn = run_classifier.file_based_input_fn_builder(file, LENGTH, False, False)
  model_fn = run_classifier.model_fn_builder(models.config(), 3, None, 1e-3, None, None, False)
  runner = runner_of(model_fn, training.EVAL, input_fn)
  found = [runner.evaluate(input_fn, size) for size in SIZES]
  same(found)
  assert set(found[0]) == {"eval_accuracy", "eval_loss", "loss", "global_step"}
  assert found[0]["loss"] == found[0]["eval_loss"] > 0.1
  rows = [np.array([r["probabilities"] for r in runner.predict(input_fn, s)]) for s in SIZES]
  for row in rows:
    np.testing.assert_allclose(row, rows[0], rtol=1e-5)
  # The mean of what is predicted for each example.
  losses = -np.log(rows[0][range(EXAMPLES), labels])
  assert found[0]["loss"] == pytest.approx(losses.mean(), rel=1e-5)


def write_pretraining(file: str, count: int) -> None:
  rng = np.random.default_rng(2)
  data = columns()
  with tf.io.TFRecordWriter(file) as writer:
    for i in range(count):
      # As many masked positions as there are differ from one example to the next.
      weights = (np.arange(3) < rng.integers(0, 4)).astype(np.float64)
      writer.write(
        records.example(
          {
            **{name: data[name][i].tolist() for name in data},
            "masked_lm_positions": rng.integers(0, LENGTH, 3).tolist(),
            "masked_lm_ids": rng.integers(0, 100, 3).tolist(),
            "masked_lm_weights": weights.tolist(),
            "next_sentence_labels": [int(rng.integers(0, 2))],
          }
        )
      )


@pytest.mark.slow
def test_pretraining(runner_of, tmp_path):
  file = str(tmp_path / "eval.tfrecord")
  write_pretraining(file, EXAMPLES)
  input_fn = run_pretraining.input_fn_builder([file], LENGTH, 3, is_training=False)
  model_fn = run_pretraining.model_fn_builder(models.config(), None, 1e-3, 10, 2)
  runner = runner_of(model_fn, training.EVAL, input_fn)
  # More steps than the file has batches: no example counts twice.
  found = [runner.evaluate(input_fn, size, 100) for size in SIZES]
  same(found)
  assert found[0]["loss"] == pytest.approx(
    found[0]["masked_lm_loss"] + found[0]["next_sentence_loss"]
  )
  # The first batches only, if there are more.
  assert runner.evaluate(input_fn, 4, 2) == pytest.approx(runner.evaluate(input_fn, 2, 4))
  assert runner.evaluate(input_fn, 4, 2) != pytest.approx(found[0])


@pytest.mark.slow
def test_squad(runner_of, tmp_path):
  file = str(tmp_path / "eval.tf_record")
  data = columns()
  with tf.io.TFRecordWriter(file) as writer:
    for i in range(EXAMPLES):
      row = {name: data[name][i].tolist() for name in data}
      writer.write(records.example({"unique_ids": [1000 + i], **row}))
  input_fn = run_squad.input_fn_builder(file, LENGTH, is_training=False, drop_remainder=False)
  model_fn = run_squad.model_fn_builder(models.config(), None, 1e-3, None, None, False)
  runner = runner_of(model_fn, training.PREDICT, input_fn)
  first = None
  for size in SIZES:
    rows = list(runner.predict(input_fn, size))
    assert [int(r["unique_ids"]) for r in rows] == list(range(1000, 1000 + EXAMPLES))
    logits = np.array([[r["start_logits"], r["end_logits"]] for r in rows])
    first = logits if first is None else first
    np.testing.assert_allclose(logits, first, atol=1e-5)


@pytest.mark.slow
def test_the_balance_of_experts_is_told_apart(runner_of):
  """`loss` has it, as in the archived library: a batch counts once for each example."""
  data = {name: x.astype(np.int32) for name, x in columns().items()}
  data["label_ids"] = np.arange(EXAMPLES, dtype=np.int32) % 3
  input_fn = records.in_memory(data, False, drop_remainder=False)
  config = models.config(block_layers="attention,moe", moe_num_experts=4, moe_intermediate_size=8)
  model_fn = run_classifier.model_fn_builder(config, 3, None, 1e-3, None, None, False)
  found = runner_of(model_fn, training.EVAL, input_fn).evaluate(input_fn, 4)
  assert found["experts_loss"] > 0
  assert found["loss"] == pytest.approx(found["eval_loss"] + found["experts_loss"])


def test_a_model_without_checkpoint_says_that_it_is_random(cpu_devices, tmp_path, capsys):
  def model_fn(features, labels, mode, params):
    del labels, mode, params
    w = mtf.get_variable(features["x"].mesh, "w", mtf.Shape([]))
    found = mtf.to_float(features["x"]) * w
    return training.ModelSpec(metrics={"m": (mtf.reduce_sum(found), mtf.reduce_sum(found))})

  input_fn = records.in_memory({"x": np.arange(3)}, False, drop_remainder=False)
  runner = training.Runner(model_fn, models.one_device(cpu_devices), str(tmp_path))
  assert runner.evaluate(input_fn, 2) == {"m": 1.0, "global_step": 0}
  assert f"{tmp_path} has no checkpoint" in capsys.readouterr().out


def test_results_are_lines(tmp_path):
  training.write_results(str(tmp_path / "r.txt"), {"b": 1.5, "a": 2, "global_step": 3})
  assert (tmp_path / "r.txt").read_text() == "a = 2\nb = 1.5\nglobal_step = 3\n"
