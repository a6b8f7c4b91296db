"""A pytest plugin of the processes that run tests: 8 virtual CPU devices, clean gin, hypothesis."""

from __future__ import annotations

import gc
import logging
import os
import random
from collections.abc import Iterator

import gin
import hypothesis
import numpy as np
import pytest
import tensorflow as tf

NUM_CPU_DEVICES = 8

# Before any operation runs: afterwards TensorFlow refuses to split the CPU. One thread for an
# operation, as `mtf.virtual_cpu_devices` does: the devices and the test processes share the cores.
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.set_logical_device_configuration(
  tf.config.list_physical_devices("CPU")[0],
  [tf.config.LogicalDeviceConfiguration() for _ in range(NUM_CPU_DEVICES)],
)
# A program of a test runs a few times, and its graph is optimized for longer than that takes. With
# the optimizer run: programs in processes of their own (`run_forked`, `run_subprocess`), a layout
# of the conformance tests, and all with MTF_GRAPH_OPTIMIZER=1.
GRAPH_OPTIMIZER = os.environ.get("MTF_GRAPH_OPTIMIZER") == "1"
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not GRAPH_OPTIMIZER})

_NOT_TOO_SLOW = [
  hypothesis.HealthCheck.too_slow,
  # Fixtures such as cpu_devices are constant, so sharing them between examples is harmless.
  hypothesis.HealthCheck.function_scoped_fixture,
]
hypothesis.settings.register_profile(
  "ci", max_examples=15, deadline=None, derandomize=True, suppress_health_check=_NOT_TOO_SLOW
)
hypothesis.settings.register_profile(
  "long", max_examples=500, deadline=None, suppress_health_check=_NOT_TOO_SLOW
)
hypothesis.settings.load_profile(os.environ.get("MTF_HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_finish() -> None:
  """What stays until the end, modules and tests, is not looked through for garbage any more.

  Graphs and traces are many small objects that live as long as a test: Python's usual threshold,
  700 of them, would look through the young ones again and again.
  """
  gc.collect()
  gc.freeze()
  gc.set_threshold(20_000, 10, 10)
  gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
  """What a test or its fixtures draw without a seed is the same in each run, in any order of tests.

  Keras' initial weights and its dropout are drawn from `random`, too.
  """
  random.seed(0)
  np.random.seed(0)


@pytest.fixture(scope="session")
def cpu_devices() -> list[str]:
  """The names of the 8 virtual CPU devices: "/device:CPU:0" to "/device:CPU:7"."""
  return [device.name for device in tf.config.list_logical_devices("CPU")]


@pytest.fixture(autouse=True)
def clean_gin() -> Iterator[None]:
  """No binding passes from one test to another."""
  gin.clear_config()
  yield
  gin.clear_config()


@pytest.fixture(autouse=True)
def logging_stays() -> Iterator[None]:
  """No test silences the warnings that another one reads."""
  before = _logging()
  yield
  assert _logging() == before, "the test leaves logging otherwise than it was"


def _logging() -> tuple[object, ...]:
  ours = logging.getLogger("mesh_tensorflow")
  return logging.root.manager.disable, ours.disabled, ours.propagate, ours.level
