"""The training loop: layouts, resuming, microbatches, evaluation, sampling."""

from __future__ import annotations

import math
import shutil
import time
import unittest.mock

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import checkpoint, errors
from mesh_tensorflow.transformer.model.attention import functions, sharding
from tests.kinds import kept
from tests.transformer import training_program as program

STEPS = 50
# Adam divides by the root of a small number at first, which amplifies rounding: not too fast.
RATE = 1e-3


@pytest.fixture(scope="module")
def one_device_losses() -> list[float]:
  return program.make_trainer(learning_rate=RATE).train(program.dataset, STEPS)


@pytest.fixture(scope="module")
def trained_2x2(tmp_path_factory) -> str:
  """The folder of a model that a mesh of 2x2 has trained for 5 steps."""
  folder = str(tmp_path_factory.mktemp("2x2") / "model")
  trainer = program.make_trainer("batch:2,model:2", model_dir=folder, learning_rate=RATE)
  trainer.train(program.dataset, 5)
  return folder


@pytest.mark.slow
@pytest.mark.parametrize(
  ("mesh", "implementation"),
  kept(
    [("batch:2,model:2", "placement"), ("batch:2,model:2", "simd"), ("batch:2,model:4", "simd")],
    [("batch:2,model:2", "simd")],
  ),
)
def test_loss_curve_does_not_depend_on_the_mesh(mesh, implementation, one_device_losses):
  """50 seeded steps with dropout: equal to float32 rounding on every mesh."""
  trainer = program.make_trainer(mesh, implementation, learning_rate=RATE)
  losses = trainer.train(program.dataset, STEPS)
  assert len(losses) == STEPS
  assert losses[-1] < losses[0] - 0.3
  np.testing.assert_allclose(losses, one_device_losses, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("mesh", "layout"),
  [
    pytest.param("all:2", "d_ff:all", marks=pytest.mark.long),
    ("all:2", "vocab:all"),
    pytest.param("data:2,all:2", "batch:data,d_ff:all", marks=pytest.mark.long),
    pytest.param("data:2,all:2", "heads:data,vocab:all", marks=pytest.mark.long),
  ],
)
def test_attention_on_axes_that_nothing_else_uses(mesh, layout, one_device_losses):
  """Attention then divides another dimension over them; its dropout stays the same."""
  trainer = program.make_trainer(mesh, learning_rate=RATE, layout=layout)
  replaced = []
  split = sharding.split_for_unused_axis

  def spied(*args):
    replaced.append(split(*args))
    return replaced[-1]

  with unittest.mock.patch.object(functions, "split_for_unused_axis", spied):
    losses = trainer.train(program.dataset, 5)
  assert replaced and all(replaced)
  np.testing.assert_allclose(losses, one_device_losses[:5], rtol=1e-5)


@pytest.mark.slow
def test_dropout_is_on_and_seeded(one_device_losses):
  again = program.make_trainer(learning_rate=RATE).train(program.dataset, 5)
  assert again == one_device_losses[:5]
  without = program.make_trainer(learning_rate=RATE, dropout=False).train(program.dataset, 5)
  assert max(abs(a - b) for a, b in zip(without, again)) > 1e-3
  other_seed = program.make_trainer(learning_rate=RATE, seed=4).train(program.dataset, 5)
  assert other_seed != again


@pytest.mark.slow
@pytest.mark.parametrize(
  ("mesh", "implementation"),
  kept([("model:2", "placement"), ("batch:2,model:2", "simd")], [("batch:2,model:2", "simd")]),
)
def test_resumed_training_equals_uninterrupted_training(tmp_path, mesh, implementation):
  """Stopped after 10 of 20 steps and resumed by a new trainer: the same losses and weights."""
  straight = program.make_trainer(mesh, implementation, str(tmp_path / "a"))
  losses = straight.train(program.dataset, 20)
  first = program.make_trainer(mesh, implementation, str(tmp_path / "b"))
  before = first.train(program.dataset, 10)
  second = program.make_trainer(mesh, implementation, str(tmp_path / "b"))
  after = second.train(program.dataset, 20)
  assert before + after == losses
  for name, value in program.weights(straight).items():
    np.testing.assert_array_equal(program.weights(second)[name], value, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("mesh", "implementation"),
  kept(
    [("", "placement"), ("batch:2", "placement"), ("model:2", "simd"), ("batch:2,model:4", "simd")],
    [("", "placement"), ("model:2", "simd")],
  ),
)
def test_checkpoint_of_2x2_goes_on_with_any_mesh(
  tmp_path, mesh, implementation, trained_2x2, one_device_losses
):
  folder = shutil.copytree(trained_2x2, str(tmp_path / "model"))
  path = checkpoint.latest_checkpoint(folder)
  whole = tf.train.load_checkpoint(path)
  assert whole.get_tensor("transformer/embedding").shape == (64, 32)
  assert whole.get_tensor("global_step") == 5
  trainer = program.make_trainer(mesh, implementation, folder, learning_rate=RATE)
  resumed = trainer.train(program.dataset, 10)
  np.testing.assert_allclose(resumed, one_device_losses[5:10], rtol=2e-4)


@pytest.mark.slow
def test_microbatches_give_the_loss_of_the_whole_batch():
  whole = program.make_trainer(dropout=False).train(program.dataset, 5)
  cut = program.make_trainer(dropout=False, microbatch_tokens=2 * program.LENGTH)
  np.testing.assert_allclose(cut.train(program.dataset, 5), whole, rtol=1e-4)


@pytest.mark.long
def test_microbatches_of_200_mb_in_several_steps_of_a_call():
  """TensorFlow joins sums of such programs on CPUs, and fails on joined sums in nested loops.

  Those that the program adds are in a loop within a loop, and those over the mesh.
  """
  rows = 16384
  trainer = program.make_trainer(
    "batch:2,model:2", dropout=False, batch=2 * rows, microbatch_tokens=rows * program.LENGTH // 2
  )
  losses = trainer.train(program.dataset, 3)
  assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize(
  ("optimizer", "rate"),
  [
    (mtf.optimize.SgdOptimizer, 0.3),
    (mtf.optimize.AdafactorOptimizer, 3e-2),
    (mtf.optimize.AdamWeightDecayOptimizer, 3e-2),
  ],
)
def test_optimizers_lower_the_loss(optimizer, rate):
  losses = program.make_trainer(dropout=False, optimizer=optimizer, learning_rate=rate).train(
    program.dataset, 30
  )
  assert losses[-1] < losses[0] - 0.1


@pytest.mark.slow
def test_several_steps_per_call_are_the_same_as_one():
  one = program.make_trainer(steps_per_call=1).train(program.dataset, 6)
  three = program.make_trainer(steps_per_call=3).train(program.dataset, 6)
  assert one == three


@pytest.mark.slow
def test_learning_rate_schedule_is_evaluated_in_each_step(tmp_path):
  """With a rate of 0 after step 5 nothing changes any more."""
  schedule = lambda step: tf.where(step < 5.0, 1e-2, 0.0)  # noqa: E731
  trainer = program.make_trainer(dropout=False, learning_rate=schedule, model_dir=str(tmp_path))
  trainer.train(program.dataset, 5)
  before = program.weights(trainer)["transformer/embedding"]
  resumed = program.make_trainer(dropout=False, learning_rate=schedule, model_dir=str(tmp_path))
  resumed.train(program.dataset, 8)
  np.testing.assert_array_equal(program.weights(resumed)["transformer/embedding"], before)


@pytest.mark.slow
def test_nan_loss_stops_and_keeps_what_was_saved(tmp_path):
  schedule = lambda step: tf.where(step < 9.0, 1e-3, math.nan)  # noqa: E731
  trainer = program.make_trainer(
    learning_rate=schedule, model_dir=str(tmp_path), save_checkpoints_steps=5
  )
  with pytest.raises(errors.NonFiniteError, match=r"NaN.*by step 10.*after step 5"):
    trainer.train(program.dataset, 100)
  saved = checkpoint.all_checkpoints(str(tmp_path))
  assert [checkpoint.get_step_from_path(p) for p in saved] == [5]


def test_empty_data_is_an_error():
  def empty(sequence_length, vocabulary, dataset_split):
    return program.dataset(sequence_length).take(3)

  with pytest.raises(errors.DataError, match="no complete batch of 8"):
    program.make_trainer().train(empty, 10)


@pytest.mark.slow
def test_data_that_ends_is_repeated():
  """As if its function had made it endless."""

  def short(sequence_length, vocabulary, dataset_split):
    return program.dataset(sequence_length).take(3 * program.BATCH)

  def endless(**kwargs):
    return short(**kwargs).repeat()

  losses = program.make_trainer(dropout=False).train(short, 10)
  assert losses == program.make_trainer(dropout=False).train(endless, 10)


def test_data_of_the_wrong_shape_or_features_are_errors():
  def long(sequence_length, vocabulary, dataset_split):
    return program.dataset({"targets": program.LENGTH + 1})

  with pytest.raises(errors.DataError, match=r"'targets'.*expected \[16\]"):
    program.make_trainer().train(long, 10)

  def pairs(sequence_length, vocabulary, dataset_split):
    return program.dataset(sequence_length).map(lambda e: {**e, "inputs": e["targets"]})

  with pytest.raises(errors.DataError, match="delimited_lm"):
    program.make_trainer().train(pairs, 10)


@pytest.mark.slow
def test_checkpoint_of_another_model_names_every_difference(tmp_path):
  folder = str(tmp_path)
  program.make_trainer(model_dir=folder).train(program.dataset, 5)
  other = program.make_trainer(model_dir=folder, optimizer=mtf.optimize.SgdOptimizer)
  with pytest.raises(errors.CheckpointError) as e:
    other.train(program.dataset, 10)
  names = [n for n, _ in tf.train.list_variables(folder) if n.endswith("adam_m")]
  # The text is short; what it leaves out is in the details.
  assert str(e.value).count("\n") < 10 and "more (all names" in str(e.value)
  assert e.value.details.count("adam_m") == len(names) > 3


def test_evaluation_sums_over_all_tokens():
  trainer = program.make_trainer(dropout=False)
  rows = program.dataset({"targets": program.LENGTH}).take(11)
  untrained = trainer.evaluate(rows)
  assert untrained["num_eval_tokens"] == 11 * program.LENGTH
  trained = program.make_trainer(dropout=False, learning_rate=1e-2)
  trained.train(program.dataset, 60)
  after = trained.evaluate(rows)
  assert after["loss"] < untrained["loss"] - 0.5
  assert after["token_accuracy"] > untrained["token_accuracy"]
  assert after["neg_log_perplexity"] == -after["loss"]


@pytest.mark.slow
def test_samples_continue_the_prompts():
  trainer = program.make_trainer("model:2", dropout=False, learning_rate=1e-2)
  trainer.train(program.dataset, 40)
  rows = trainer.sample([[3, 4, 5], [10, 12]], program.LENGTH, batch_size=2)
  assert [r[:2] for r in rows] == [[3, 4], [10, 12]]
  assert all(len(r) == program.LENGTH for r in rows)
  with pytest.raises(errors.DataError, match="no room"):
    trainer.sample([list(range(1, 17))], program.LENGTH)


@pytest.mark.slow
def test_inputs_and_targets_are_joined_for_a_delimited_lm():
  """model_type "delimited_lm": rows of 8 inputs and 8 targets train as one sequence of 16."""

  def pairs(sequence_length, vocabulary, dataset_split):
    half = program.LENGTH // 2
    rows = program.dataset({"targets": program.LENGTH})
    return rows.map(lambda e: {"inputs": e["targets"][:half], "targets": e["targets"][half:]})

  trainer = program.make_trainer("batch:2", dropout=False, learning_rate=5e-3)
  trainer.steps.model_type = "delimited_lm"
  trainer.steps.sequence_length = {"inputs": 8, "targets": 8}
  losses = trainer.train(pairs, 25)
  assert losses[-1] < losses[0] - 0.3
  whole = program.make_trainer(dropout=False, learning_rate=5e-3).train(program.dataset, 25)
  assert losses == pytest.approx(whole, rel=1e-3)


@pytest.mark.slow
def test_gin_reaches_the_checkpoints_of_a_training(tmp_path, monkeypatch, cpu_devices):
  """Of checkpoints an hour apart every other one is kept, and the newest."""
  now = [1e9]
  monkeypatch.setattr(time, "time", lambda: now[0])
  bindings = "\nCheckpointer.keep_every_n_hours = 2\nCheckpointer.asynchronous = False\n"
  monkeypatch.setattr(program, "BINDINGS", program.BINDINGS + bindings)
  trainer = program.make_trainer(
    model_dir=str(tmp_path), save_checkpoints_steps=2, steps_per_call=2, keep_checkpoint_max=1
  )
  for step in (2, 4, 6):
    now[0] += 3600
    trainer.train(program.dataset, step)
  saved = checkpoint.all_checkpoints(str(tmp_path))
  assert [checkpoint.get_step_from_path(p) for p in saved] == [4, 6]
