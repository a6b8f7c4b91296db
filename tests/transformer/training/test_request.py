"""What is asked of a training: where it stops, and where its data began."""

from __future__ import annotations

import dataclasses

import pytest

from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.transformer.training.request import TrainRequest

ASKED = TrainRequest(
  dataset_fn=lambda *_: None,
  dataset_split="train",
  train_steps=None,
  steps=3,
  on_ready=None,
  seen_data_init_step=None,
  checkpoint_input_pipeline=False,
)


def test_the_last_step():
  assert ASKED.last_step(5) == 8
  assert dataclasses.replace(ASKED, train_steps=7, steps=None).last_step(5) == 7
  assert dataclasses.replace(ASKED, steps=None).last_step(5) == 5


def test_the_first_step_of_the_data():
  assert ASKED.first_step_of_data(2, 5) == 2
  given = dataclasses.replace(ASKED, seen_data_init_step=5)
  assert given.first_step_of_data(2, 5) == 5
  with pytest.raises(ConfigError, match=r"seen_data_init_step \(=5\) is after the step 4"):
    given.first_step_of_data(2, 4)
