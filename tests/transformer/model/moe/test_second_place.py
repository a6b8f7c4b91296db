"""Tokens that are kept from their best expert in training."""

from __future__ import annotations

import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import moe
from mesh_tensorflow.transformer.model.moe.router import RouterCall
from tests.transformer import lm_program as lm

LOGITS = np.random.default_rng(1).normal(size=[64, 5]).astype(np.float32)


def chosen(train: bool = True, **hparams):
  """The best expert of each token after it was kept from the best one of `LOGITS`."""
  dims = [mtf.Dimension("tokens", 64), mtf.Dimension("experts", 5)]

  @mtf.function(lm.one_device(), input_signature=[mtf.TensorSpec(dims)])
  def program(logits):
    bag = moe.HParams(**{f"moe_{k}": v for k, v in hparams.items()})
    call = RouterCall(
      logits, None, dims[1], dims[1], bag, train, mtf.VariableDType(), None, "r", None, None
    )
    return mtf.argmax(call.away_from_the_top(logits), dims[1])

  return program(LOGITS).numpy()


FIRST, SECOND = np.argsort(-LOGITS, axis=1)[:, :2].T


def test_always_the_second_best():
  np.testing.assert_array_equal(chosen(use_second_place_expert_prob=1.0), SECOND)


def test_for_some_tokens():
  found = chosen(use_second_place_expert_prob=0.5)
  assert 10 < np.sum(found == FIRST) < 54
  np.testing.assert_array_equal(np.where(found == FIRST, FIRST, SECOND), found)


def test_drawn_from_the_others():
  found = chosen(use_second_place_expert_prob=1.0, use_second_place_expert_prob_temp=3.0)
  assert not np.any(found == FIRST)
  assert 5 < np.sum(found != SECOND)


@pytest.mark.parametrize(("train", "probability"), [(False, 1.0), (True, None), (True, 0.0)])
def test_else_the_best_stays(train, probability):
  found = chosen(train, use_second_place_expert_prob=probability)
  np.testing.assert_array_equal(found, FIRST)
