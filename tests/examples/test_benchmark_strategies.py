"""The benchmark's sides on several devices do the same work as the plain one."""

from __future__ import annotations

import importlib.util

import pytest

import benchmarks.run
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
