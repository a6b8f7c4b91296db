"""The defaults of several programs in one process; the order of examples."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from absl import flags
from absl.testing import flagsaver

from mesh_tensorflow.bert import (
  create_pretraining_data,
  records,
  run_classifier,
  run_pretraining,
  run_squad,
  settings,
)


def test_each_program_has_its_own_defaults():
  programs = (run_classifier, run_squad, run_pretraining, create_pretraining_data)
  assert [p.FLAGS.max_seq_length for p in programs] == [128, 384, 128, 128]
  assert [p.FLAGS.random_seed for p in programs] == [0, 0, 0, 12345]
  assert settings.value("random_seed") == 0
  assert run_classifier.FLAGS.eval_batch_size == 32 and run_pretraining.FLAGS.eval_batch_size == 8
  with flagsaver.flagsaver(max_seq_length=7, random_seed=3):
    assert [p.FLAGS.max_seq_length for p in programs] == [7] * 4
    assert [p.FLAGS.random_seed for p in programs] == [3] * 4
    assert settings.value("random_seed") == 3
  assert run_squad.FLAGS.max_seq_length == 384
  assert "max_seq_length" in flags.FLAGS
  with pytest.raises(AttributeError, match="no flag --doc_stride"):
    run_classifier.FLAGS.doc_stride  # noqa: B018 - the look-up raises.


def _order(seed: int, batches: int, first_step: int = 0) -> np.ndarray:
  make = records.in_memory({"x": np.arange(150)}, is_training=True, drop_remainder=True)
  dataset = make({"batch_size": 10, "seed": seed, "first_step": first_step})
  return np.array([batch["x"].numpy() for batch in dataset.take(batches)])


def test_the_order_of_examples_is_that_of_the_seed():
  """Not of `tf.random.set_seed`, whose seed would be part of that of `Dataset.shuffle`."""
  whole = _order(0, 30)
  # Two epochs, of which each hundred examples are shuffled among themselves.
  np.testing.assert_array_equal(np.bincount(whole.ravel()), [2] * 150)
  np.testing.assert_array_equal(np.sort(whole[:10].ravel()), np.arange(100))
  assert (whole[:10].ravel() != np.arange(100)).sum() > 80
  try:
    tf.random.set_seed(1)
    np.testing.assert_array_equal(_order(0, 30), whole)
  finally:
    tf.random.set_seed(None)
  np.testing.assert_array_equal(_order(0, 4, first_step=11), whole[11:15])
  assert (_order(1, 10) != whole[:10]).any()
