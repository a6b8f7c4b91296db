"""benchmarks.slowed: a device that waits, by the FLOPs of its products; and the benchmark."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from benchmarks import slowed, unequal


@pytest.fixture
def waits(monkeypatch):
  """The seconds of each wait; none is waited for."""
  waited = []
  monkeypatch.setattr(slowed.time, "sleep", waited.append)
  return waited


def test_a_device_waits_for_its_products(waits, cpu_devices):
  x = np.random.default_rng(0).normal(size=[8, 4]).astype(np.float32)
  steps = {}
  for name, devices, shares in (
    ("one", cpu_devices[:1], {"batch": [1]}),
    ("even", cpu_devices[:2], {"batch": [1, 1]}),
    ("shares", cpu_devices[:2], {"batch": [3, 1]}),
  ):
    size = sum(shares["batch"])
    impl = mtf.PlacementMeshImpl(f"batch:{size}", "batch:batch", devices, shares=shares)
    steps[name] = unequal.make_step(impl, batch=8, width=4, layers=2)
  losses = {}
  with slowed.slowed({cpu_devices[1]: 1.0}):
    for name, step in steps.items():
      losses[name] = [float(step(x)) for _ in range(3)]
      # Two layers: a product and two of its gradients each, but for that of the data.
      flops = 3 * 5 * 2 * 8 * 4 * 4
      assert sum(waits) == pytest.approx({"one": 0, "even": flops / 2, "shares": flops / 4}[name])
      waits.clear()
  np.testing.assert_allclose(losses["even"], losses["one"], rtol=1e-5)
  np.testing.assert_allclose(losses["shares"], losses["one"], rtol=1e-5)


def test_only_while_it_is_asked_for(waits, cpu_devices):
  impl = mtf.PlacementMeshImpl("batch:1", "", cpu_devices[:1])
  with slowed.slowed({cpu_devices[0]: 1.0}):
    pass
  unequal.make_step(impl, 4, 4, 1)(np.ones([4, 4], np.float32))
  assert not waits


def test_flops_between_arguments_and_results():
  with tf.Graph().as_default():
    a, b = tf.zeros([2, 3]), tf.zeros([3, 5])
    before = tf.matmul(a, b)
    after = tf.matmul(before, b, transpose_b=True)
    assert slowed.flops_of((after, [tf.nn.relu(after)]), [before, b, 3]) == 2 * 2 * 5 * 3
    assert slowed.flops_of(after, [a, b]) == 2 * (2 * 2 * 5 * 3)
    assert slowed.flops_of(3, []) == 0


@pytest.mark.long
def test_the_benchmark_trains_alike_on_all_divisions(run_forked, repository):
  sizes = ["--batch=96", "--width=64", "--layers=2", "--rounds=1"]
  told = run_forked(["-m", "benchmarks.unequal", *sizes], cwd=repository).stdout
  rows = [line.split() for line in told.splitlines() if line[:5] in ("even ", "share", "1 pro")]
  apart = [float(row[-1]) for row in rows if row[-1][-4:-2] == "e-" or row[-1] == "0.0e+00"]
  assert len(apart) >= 2 and max(apart) < 1e-5, told
