"""Scores of targets and continuations of inputs, of a small model against NumPy."""

from __future__ import annotations

import gin
import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import utils
from mesh_tensorflow.transformer.generation import predict
from tests.transformer import numpy_lm
from tests.transformer.lm_program import (
  TARGETS,
  eagerly,
  initialize,
  make_model,
  one_device,
  set_golden_weights,
)

OPTIONS = dict(num_heads=2, d_kv=3, buckets=32)


def make_steps(inputs=6):
  """The programs of a model with known weights."""
  gin.clear_config()
  gin.parse_config("get_variable_dtype.master_dtype = 'float32'")
  model, impl = make_model(num_layers=1), one_device()
  set_golden_weights(initialize(impl, model))
  return utils.ModelSteps(model, impl, "lm", 2, {"inputs": inputs, "targets": TARGETS.shape[1]})


@pytest.fixture
def steps():
  return make_steps()


def shifted(targets):
  """What the model sees; the end of a sequence is not looked at."""
  return np.pad(targets, [[0, 0], [1, 0]])[:, :-1]


def weights_of(steps):
  store = steps.mesh_impl.variable_store
  return {v.name: v.numpy().astype(np.float64) for v in store if not v.name.startswith("_")}


def test_scores_are_log_probabilities_of_the_positive_targets(steps):
  with eagerly():
    result = predict.score_step(steps, ["targets"], 2)(TARGETS)
  logits = numpy_lm.logits(weights_of(steps), shifted(TARGETS), 1, OPTIONS)
  logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
  each = np.take_along_axis(logits, TARGETS[..., None], -1)[..., 0]
  np.testing.assert_allclose(result["scores"], (each * (TARGETS > 0)).sum(-1), rtol=1e-5)
  np.testing.assert_array_equal(result["targets"], TARGETS)


def test_scores_of_a_function_in_place_of_the_model(steps):
  def count(model, features, variable_dtype):
    assert model is steps.model and variable_dtype is steps.variable_dtype
    return mtf.reduce_sum(features["targets"], reduced_dim=features["targets"].shape.dims[-1])

  with eagerly():
    result = predict.score_step(steps, ["targets"], 2, count)(TARGETS)
  assert result["scores"].dtype == np.float32
  np.testing.assert_array_equal(result["scores"], TARGETS.sum(-1))


@pytest.mark.parametrize(("inputs", "length"), [(3, 9), (6, 12), (12, 16), (16, 16)])
def test_outputs_have_room_for_the_targets_as_far_as_there_are_positions(inputs, length):
  """The likeliest tokens after the inputs; the model has 16 positions, the targets 6."""
  steps = make_steps(inputs)
  given = np.full([2, inputs], 5, np.int32)
  with eagerly():
    outputs = predict.predict_step(steps, 2)(given).numpy()
  assert outputs.shape == (2, length)
  if inputs < length:
    padded = np.pad(given, [[0, 0], [1, 0]])
    logits = numpy_lm.logits(weights_of(steps), padded, 1, OPTIONS)
    np.testing.assert_array_equal(outputs[:, 0], logits[:, -1].argmax(-1))


def test_outputs_of_a_function_in_place_of_the_model(steps):
  with eagerly():
    outputs = predict.predict_step(steps, 2, lambda features, **_: features["inputs"] + 1)(TARGETS)
  np.testing.assert_array_equal(outputs, TARGETS + 1)
