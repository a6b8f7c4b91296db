"""The benchmark's sides on several devices do the same work as the plain one."""

from __future__ import annotations

import importlib.util
import math
import re
import subprocess
import sys

import pytest

import benchmarks.run
from benchmarks import first_steps
from benchmarks.run import Side


@pytest.mark.long
@pytest.mark.parametrize(
  "side, mesh",
  [
    ("mirrored", "batch:4"),
    ("dtensor", "batch:2,model:2"),
    ("jax", ""),
    ("jax", "batch:2,model:4"),
  ],
)
def test_losses_are_those_of_one_device(side, mesh):
  for module in benchmarks.run.NEEDED.get(side, []):
    if importlib.util.find_spec(module) is None:
      pytest.skip(f"not installed: {module}")
  losses = {}
  for each in (Side("plain", "small"), Side(side, "small", mesh)):
    worker = benchmarks.run.Worker(each)
    losses[each] = worker.losses
    worker.close()
  benchmarks.run.check_losses(losses)


@pytest.mark.long
@pytest.mark.parametrize(
  "side, mesh",
  [("Keras", ""), ("MirroredStrategy", "batch:4"), ("JAX", ""), ("JAX", "batch:2,model:4")],
)
def test_first_step_of_others_is_of_random_weights(side, mesh):
  if side == "JAX" and importlib.util.find_spec("jax") is None:
    pytest.skip("not installed: jax")
  command = ["-m", "benchmarks.first_steps", "--side", side, "--mesh", mesh]
  said = subprocess.run(
    [sys.executable, *command], capture_output=True, text=True, timeout=300, check=True
  ).stdout
  loss = float(re.search(r"loss (\S+)  the first step is done", said)[1])
  assert abs(loss - math.log(first_steps.IDS)) < 0.6
