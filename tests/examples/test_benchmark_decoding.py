"""The decoding benchmark compares the same work: all sides find the same sequences."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util

import numpy as np
import pytest

from benchmarks import ours_t5, run, t5_sizes
from tests.kinds import kept

SIZE = t5_sizes.T5_TINY


@pytest.mark.parametrize("side", ["hf_t5", "ct2_t5"])
@pytest.mark.parametrize("seed", kept([0, 1], [0]))
@pytest.mark.slow
def test_both_sides_find_the_same_sequences(side, seed):
  for module in run.NEEDED[side]:
    if importlib.util.find_spec(module) is None:
      pytest.skip(f"not installed: {module}")
  inputs = t5_sizes.random_inputs(SIZE, seed)
  ours = ours_t5.Decoder(SIZE, seed)
  theirs = importlib.import_module(f"benchmarks.{side}").Decoder(SIZE, seed)
  ids = ours.decode(inputs)
  assert ids.shape == (SIZE.batch, SIZE.output_length)
  # Else the comparison would say little.
  assert len(np.unique(ids)) > 2
  np.testing.assert_array_equal(theirs.decode(inputs), ids)
  expected = theirs.mean_log_prob(inputs, ids)
  assert ours.mean_log_prob(inputs, ids) == pytest.approx(expected, abs=1e-5)
  # Other sequences have other probabilities, and lower ones: these were the best.
  assert ours.mean_log_prob(inputs, (ids + 1) % SIZE.vocab) < expected - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("implementation", kept(["placement", "simd"], ["simd"]))
def test_meshes_find_the_same_sequences(implementation, cpu_devices):
  size = dataclasses.replace(SIZE, batch=4)
  inputs = t5_sizes.random_inputs(size, 1)
  expected = ours_t5.Decoder(size, 1).decode(inputs)
  decoder = ours_t5.Decoder(size, 1, "batch:2,model:2", implementation)
  np.testing.assert_array_equal(decoder.decode(inputs), expected)


@pytest.mark.slow
@pytest.mark.parametrize("beam", [1, 4])
def test_xla_finds_the_same_sequences(beam):
  size = dataclasses.replace(SIZE, beam=beam)
  inputs = t5_sizes.random_inputs(size, 1)
  expected = ours_t5.Decoder(size, 1).decode(inputs)
  np.testing.assert_array_equal(ours_t5.Decoder(size, 1, jit_compile=True).decode(inputs), expected)
