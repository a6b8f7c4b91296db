"""A long training keeps its memory, and its one program."""

from __future__ import annotations

import json
import statistics

import pytest

STEPS, EVERY, FIRST = 100_000, 200, 1_000
MEGABYTE = 2**20


@pytest.mark.long
@pytest.mark.subprocess
@pytest.mark.timeout(7200)
def test_memory_does_not_grow(tmp_path, run_subprocess):
  """Less than 1 MB from step 1,000 to step 100,000; medians, since checkpoints come and go."""
  run = run_subprocess(
    ["-m", "tests.transformer.soak_program", str(tmp_path / "m"), str(STEPS), str(EVERY)],
    timeout=7000,
    # Large buffers go back to the system at once; malloc may keep one of a checkpoint's (8 MB).
    env={"MALLOC_MMAP_THRESHOLD_": "131072"},
  )
  told = json.loads(run.stdout.splitlines()[-1])
  samples = [(step, size) for step, size in told["samples"] if step >= FIRST]
  first = statistics.median(size for step, size in samples if step < FIRST + 5_000)
  last = statistics.median(size for step, size in samples if step > STEPS - 5_000)
  print(f"resident: {first / MEGABYTE:.2f} MB, then {last / MEGABYTE:.2f} MB")
  assert told["traces"] == 1
  assert told["losses"][1] < told["losses"][0]
  assert last - first < MEGABYTE, samples[:: len(samples) // 50]
