"""NaN and infinity in training: the error names step and tensor; steps may be skipped."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.training import nonfinite
from mesh_tensorflow.transformer.model.model_steps import ModelSteps
from tests.kinds import kept
from tests.transformer import training_program as program

pytestmark = pytest.mark.usefixtures("without_attention")

BAD_STEP = 7


@pytest.fixture
def bad_step(request, monkeypatch):
  """In step BAD_STEP (from 0) the loss is NaN; or the gradients are, and the loss is not."""
  whole = ModelSteps.logits_and_loss

  def broken(self, *args, **kwargs):
    logits, loss = whole(self, *args, **kwargs)
    bad = mtf.cast(mtf.equal(loss.graph.global_step, BAD_STEP), tf.float32)
    if request.param == "loss":
      return logits, loss + mtf.log(1.0 - 2.0 * bad)
    return logits, loss + 1e-30 * mtf.sqrt(mtf.reduce_sum(mtf.square(logits)) * (1.0 - bad))

  monkeypatch.setattr(ModelSteps, "logits_and_loss", broken)
  return request.param


def nan_weights(step):
  """A schedule: the update of step BAD_STEP makes all weights NaN."""
  return tf.where(tf.equal(step, float(BAD_STEP)), math.nan, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("mesh", "implementation"),
  kept([("", "placement"), ("batch:2,model:2", "simd")], [("batch:2,model:2", "simd")]),
)
def test_the_error_names_step_and_tensor(mesh, implementation, tmp_path, cpu_devices):
  trainer = program.make_trainer(
    mesh, implementation, str(tmp_path), learning_rate=nan_weights, save_checkpoints_steps=5,
    steps_per_call=5, optimizer=mtf.optimize.AdafactorOptimizer,
  )  # fmt: skip
  # The call of steps 6 to 10 has the NaN; a checkpoint of 5 is there.
  with pytest.raises(errors.NonFiniteError) as e:
    trainer.train(program.dataset, 100)
  text = str(e.value)
  assert f"at step {BAD_STEP + 2} (variable transformer/" in text, text
  assert f"was not finite first, in step {BAD_STEP + 2})" in text, text
  assert "nothing was saved after step 5" in text


@pytest.mark.slow
@pytest.mark.parametrize("bad_step", ["loss", "gradient"], indirect=True)
def test_a_bad_gradient_is_named(bad_step, cpu_devices):
  with pytest.raises(errors.NonFiniteError) as e:
    program.make_trainer().train(program.dataset, 100)
  text = str(e.value)
  assert f"was not finite first, in step {BAD_STEP + 1})" in text, text
  # The loss is NaN at once, or one step after the gradients.
  assert f"became nan at step {BAD_STEP + (1 if bad_step == 'loss' else 2)} (" in text, text
  assert "variable" not in text and "nothing was saved after step 0" in text


@pytest.mark.slow
@pytest.mark.parametrize(
  ("bad_step", "mesh", "implementation", "optimizer"),
  [
    ("loss", "", "placement", mtf.optimize.AdamWeightDecayOptimizer),
    ("gradient", "batch:2,model:2", "simd", mtf.optimize.AdafactorOptimizer),
  ],
  indirect=["bad_step"],
)
def test_skipped_steps_change_nothing(bad_step, mesh, implementation, optimizer, cpu_devices):
  def train(steps, **options):
    trainer = program.make_trainer(mesh, implementation, optimizer=optimizer, **options)
    return trainer.train(program.dataset, steps), trainer

  losses, skipping = train(BAD_STEP + 1, nonfinite="skip", steps_per_call=4)
  before, stopped = train(BAD_STEP)
  assert skipping.skipped_steps == 1
  assert losses[:BAD_STEP] == before
  expected, found = program.weights(stopped), program.weights(skipping)
  assert expected.keys() == found.keys()
  for name, value in expected.items():
    np.testing.assert_array_equal(found[name], value, err_msg=name)
  # It goes on, and learns.
  more = skipping.train(program.dataset, steps=3)
  assert np.isfinite(more).all()
  assert any((value != expected[n]).any() for n, value in program.weights(skipping).items())


@pytest.mark.slow
def test_a_training_whose_steps_are_all_skipped_stops(monkeypatch, cpu_devices):
  monkeypatch.setattr(nonfinite, "MAX_SKIPPED_IN_A_ROW", 6)
  trainer = program.make_trainer(learning_rate=nan_weights, nonfinite="skip")
  with pytest.raises(errors.NonFiniteError, match="last 6 steps, up to 14, were NaN"):
    trainer.train(program.dataset, 100)


def test_unknown_choice():
  with pytest.raises(errors.ConfigError, match="nonfinite = 'ignore'.*'stop', 'skip'"):
    program.make_trainer(nonfinite="ignore")


@pytest.mark.parametrize("first", [0, 1_000_000])
def test_few_steps_are_repeated_however_long_the_training_was(first, monkeypatch):
  monkeypatch.setattr(nonfinite, "_find", lambda *_: "the culprit")
  most = first + nonfinite._MAX_REPEATED
  assert nonfinite.find(None, None, most, first, "model.ckpt") == "the culprit"
  assert nonfinite.find(None, None, most + 1, first, "model.ckpt") is None
