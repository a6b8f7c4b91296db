"""Optimizers, clipping, averages of weights and accumulated gradients in the real trainer."""

from __future__ import annotations

import functools
import json

import gin
import numpy as np
import pytest

from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow import errors, optimize
from mesh_tensorflow.training.program import num_microbatches
from mesh_tensorflow.transformer import learning_rate_schedules as schedules
from tests.transformer import small_lm
from tests.transformer import training_program as program
from tests.transformer.small_lm import EVAL, TEXT

SMALLER = """
  transformer.make_layer_stack.num_layers = 1
  Unitransformer.d_model = 16
  DenseReluDense.hidden_size = 32
  SelfAttention.num_heads = 2
"""
COSINE = functools.partial(schedules.cosine_decay, total_train_steps=6, warmup=2, peak=1e-2)
MESH = "model:2"


@pytest.fixture(scope="module", autouse=True)
def smaller():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(program, "BINDINGS", program.BINDINGS + SMALLER)
    yield


def make(optimizer, *args, updates=None, **options):
  return program.make_trainer(
    *args, optimizer=optimizer, learning_rate=COSINE, updates=updates,
    **{"steps_per_call": 2, **options},
  )  # fmt: skip


MUON = functools.partial(optimize.MuonOptimizer, num_iterations=2)
ALL = TrainerSettings(max_grad_norm=0.5, ema_decay=0.9, gradient_accumulation_steps=2)


@pytest.fixture(scope="module")
def muon_on_one_device(smaller):
  trainer = make(MUON, updates=ALL)
  return trainer.train(program.dataset, 6), program.weights(trainer)


@pytest.mark.slow
def test_goes_on_in_mid_schedule_as_without_interruption(tmp_path, muon_on_one_device):
  """With all that keeps state: AdamW in Muon, its counter, and the averages; bit for bit.

  And as on one device: of parts of the matrices, orthogonal steps would be others.
  """
  whole = make(MUON, MESH, "simd", updates=ALL, nonfinite="skip")
  losses = whole.train(program.dataset, 6)
  first = make(MUON, MESH, "simd", str(tmp_path), updates=ALL, nonfinite="skip")
  begun = first.train(program.dataset, 3)
  second = make(MUON, MESH, "simd", str(tmp_path), updates=ALL, nonfinite="skip")
  assert begun + second.train(program.dataset, 6) == losses
  expected, found = program.weights(whole), program.weights(second)
  assert found["adam_updates"] == found["ema_updates"] == 6
  assert {n.rpartition("/")[2] for n in found} >= {"muon_m", "adam_m", "adam_v", "ema"}
  for name, value in expected.items():
    np.testing.assert_array_equal(found[name], value, err_msg=name)
  alone, weights = muon_on_one_device
  np.testing.assert_allclose(losses, alone, rtol=1e-4)
  for name, value in expected.items():
    if value.ndim == 2:
      np.testing.assert_allclose(value, weights[name], atol=1e-3, err_msg=name)


@pytest.mark.parametrize("optimizer", [optimize.AdamWOptimizer, optimize.LionOptimizer])
def test_learns_on_every_mesh(optimizer):
  options = dict(batch=16, learning_rate=3e-3)
  alone = program.make_trainer(optimizer=optimizer, **options).train(program.dataset, 20)
  split = program.make_trainer("batch:2,model:2", "simd", optimizer=optimizer, **options)
  np.testing.assert_allclose(split.train(program.dataset, 10), alone[:10], rtol=2e-3)
  assert np.mean(alone[-3:]) < alone[0] - 0.2


def test_accumulated_gradients_are_those_of_the_batch():
  run = functools.partial(make, optimize.SgdOptimizer, dropout=False)
  expected = run().train(program.dataset, 3)
  found = run(updates=TrainerSettings(gradient_accumulation_steps=4)).train(program.dataset, 3)
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  assert found[0] > found[2]
  # It has the word, also where microbatches are bound by their size.
  steps = program.make_trainer(microbatch_tokens=16).steps
  assert num_microbatches(steps, ALL) == 2
  assert num_microbatches(steps, TrainerSettings()) == program.BATCH
  with pytest.raises(errors.ConfigError, match=r"gradient_accumulation_steps \(=3\) .* 8 examples"):
    num_microbatches(steps, TrainerSettings(gradient_accumulation_steps=3))


def test_clipped_steps_have_the_norm():
  """Of all trained variables together: the step of gradient descent shows it."""
  changes = []
  for norm in (None, 1e-3):
    trainer = program.make_trainer(
      optimizer=optimize.SgdOptimizer,
      learning_rate=2.0,
      updates=TrainerSettings(max_grad_norm=norm),
    )
    trainer.build_for_inference()
    before = program.weights(trainer)
    trainer.train(program.dataset, 1)
    after = program.weights(trainer)
    changes.append(np.concatenate([np.ravel(after[n] - before[n]) for n in before]))
  free, clipped = (np.linalg.norm(c) for c in changes)
  assert free > 0.1
  np.testing.assert_allclose(clipped, 2e-3, rtol=1e-2)
  np.testing.assert_allclose(changes[1] / clipped, changes[0] / free, atol=1e-3)


def test_averages_in_evaluation(tmp_path, capsys):
  """By settings alone: kept by one run, used by another one, refused where there are none."""
  with_averages, without = tmp_path / "with", tmp_path / "without"
  for folder in (with_averages, without):
    folder.mkdir()
  use = ("run.use_ema = True", *EVAL)
  small_lm.run(with_averages, "run.ema_decay = 0.5", text=TEXT)
  small_lm.run(without, text=TEXT)
  capsys.readouterr()
  plain, averaged = (small_lm.run(with_averages, *b) for b in (EVAL, use))
  lines = [l for l in capsys.readouterr().out.splitlines() if l.startswith("restored")]
  assert [l.endswith("(averages of weights)") for l in lines] == [False, True]
  # Of the same model, not of the same weights: after two steps with a rate that is small yet.
  loss, averaged_loss = (next(iter(r.values()))["loss"] for r in (plain, averaged))
  assert 0 < abs(loss - averaged_loss) < 0.1
  with pytest.raises(errors.CheckpointError, match="use_ema is True, but .* has no averages"):
    small_lm.run(without, *use)
  gin.clear_config()


def test_averages_in_evaluations_of_the_training(tmp_path):
  """What is evaluated then are the averages, and training goes on with the weights."""

  def held_out():
    return program.dataset({"targets": program.LENGTH}, skip=10**6).take(8)

  validated = dict(held_out=lambda: {"validation": held_out}, eval_every_steps=2)
  options = dict(updates=TrainerSettings(ema_decay=0.5), steps_per_call=5)
  losses, found = [], []
  for settings in ({}, dict(validated, use_ema=True)):
    folder = str(tmp_path / str(len(losses)))
    trainer = make(optimize.SgdOptimizer, MESH, "simd", folder, **options, **settings)
    losses.append(trainer.train(program.dataset, 4))
    lines = (tmp_path / str(len(losses) - 1) / "metrics.jsonl").read_text().splitlines()
    found.append([x["eval/loss"] for x in map(json.loads, lines) if "eval/loss" in x])
  assert losses[0] == losses[1]
  assert len(found[1]) == 2 and not found[0]
  after = [
    make(optimize.SgdOptimizer, model_dir=folder, use_ema=use).evaluate(held_out())["loss"]
    for use in (True, False)
  ]
  assert after[0] == pytest.approx(found[1][-1], abs=1e-5)
  assert abs(after[1] - found[1][-1]) > 1e-4


def test_averages_are_what_is_restored(tmp_path):
  folder = str(tmp_path)
  trained = make(optimize.AdamWOptimizer, model_dir=folder, updates=TrainerSettings(ema_decay=0.5))
  trained.train(program.dataset, 4)
  kept = program.weights(trained)
  reader = make(optimize.AdamWOptimizer, model_dir=folder, use_ema=True)
  reader.build_for_inference()
  weights = program.weights(reader)
  assert reader.global_step == 4 and weights
  for name, value in weights.items():
    np.testing.assert_array_equal(value, kept[f"{name}/ema"], err_msg=name)
    assert np.any(value != kept[name]), name
