"""Drawn pipelines: loss, outputs, every gradient and the variables are those of one device.

`make long` draws more of them: as many as MTF_DRAWN_PROGRAMS says.
"""

from __future__ import annotations

import os
import zlib

import hypothesis
import pytest
import tensorflow as tf

from tests.running.drawn_pipelines import pipelines

MANY = int(os.environ.get("MTF_DRAWN_PROGRAMS", "50"))


@pytest.fixture
def run_eagerly(execution):
  tf.config.run_functions_eagerly(execution == "eager")
  yield
  tf.config.run_functions_eagerly(False)


@pytest.mark.parametrize(
  "execution,examples",
  [
    ("eager", 6),
    ("function", 2),
    pytest.param("eager", MANY, marks=[pytest.mark.long, pytest.mark.timeout(36000)]),
    pytest.param("function", MANY, marks=[pytest.mark.long, pytest.mark.timeout(36000)]),
  ],
)
def test_it_is_the_training_of_one_device(
  execution, examples, cpu_devices, run_eagerly, record_property
):
  checked = 0

  @hypothesis.seed(zlib.crc32(f"{execution} {examples}".encode()))
  # Making a failing pipeline smaller means tracing hundreds: left to who looks into it.
  @hypothesis.settings(max_examples=examples, phases=[hypothesis.Phase.generate])
  @hypothesis.given(pipelines())
  def check(pipeline):
    nonlocal checked
    checked += pipeline.check(cpu_devices)

  check()
  record_property("conformance_cases", checked)
