"""Random functions on random layouts, beside TensorFlow; see `random_functions`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.importing import rules
from tests.importing import random_functions
from tests.importing.random_operations import OPERATIONS

SEED = int(os.environ.get("MTF_RANDOM_FUNCTIONS_SEED", "0"))


@pytest.mark.parametrize("number", range(6))
def test_a_random_function(number: int, cpu_devices: list[str]) -> None:
  program, outcome = random_functions.run(SEED, number, cpu_devices)
  assert outcome.kind not in ("wrong", "untyped"), f"{outcome}\n{program}"


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 5000, 500))
def test_5000_random_functions(
  first: int, run_subprocess: Callable[..., Any], record_property: Callable[..., None]
) -> None:
  module = ["-m", "tests.importing.random_functions"]
  options = ["--programs=500", f"--seed={SEED}", f"--first={first}"]
  found = run_subprocess([*module, *options], timeout=7200, check=False)
  counts = found.stdout.strip().splitlines()[-1]
  record_property("random_functions", counts)
  assert "'right': " in counts, found.stderr
  assert "'wrong'" not in counts and "'untyped'" not in counts, found.stdout


def test_there_are_many_kinds_of_operations() -> None:
  assert len(OPERATIONS) > 300
  drawn = {step.name for n in range(8) for step in random_functions.draw_program(SEED, n).steps}
  assert len(drawn) > 20


class Sine(rules.Labelled):
  """Not what Cos means."""

  def labels(self, node: Any) -> rules.Labels:
    axes = tuple(range(node.inputs[0].rank))
    return rules.Labels([axes], [axes])

  def compute(self, node: Any, xs: Any, dims: Any, make: Any) -> Any:
    return [mtf.sin(xs[0])]


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch, cpu_devices: list[str]) -> None:
  step = random_functions.Step("cos", [0], tf.cos)
  program = random_functions.Program([np.ones([2, 3], np.float32)], [step], [], [1])
  assert random_functions.run_program(program, [0], cpu_devices).kind == "right"
  monkeypatch.setitem(rules._RULES, "Cos", Sine())
  outcome = random_functions.run_program(program, [0], cpu_devices)
  assert outcome.kind == "wrong" and outcome.text.startswith("result 0: 0.3")
  assert random_functions.blamed(program, [0], cpu_devices, "wrong").startswith("cos, operation 1")
