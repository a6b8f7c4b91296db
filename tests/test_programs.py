"""The demo and the benchmarks as programs."""

from __future__ import annotations

import json

import pytest


@pytest.mark.slow
def test_demo_trains_evaluates_and_writes(run_subprocess, repository, tmp_path):
  program = str(repository / "examples" / "demo.py")
  result = run_subprocess(
    [program, f"--model_dir={tmp_path}", "--steps=3", "--eval_files=4"],
    timeout=290,
  )
  for text in (
    " 4 more are held out",
    "heads        split over model",
    "step       3/3  loss",
    "bits per byte (gzip -9 needs",
    "import ",
    "What to try next",
  ):
    assert text in result.stdout
  assert "oneDNN" not in result.stderr


@pytest.mark.parametrize(
  "mesh",
  [
    [],
    ["--mesh", "batch:2,model:2"],
    ["--mesh", "batch:2,model:2", "--implementation", "simd"],
  ],
)
def test_benchmark_sides_compute_the_same_losses(run_subprocess, repository, mesh):
  """What is compared is the same work: equal losses, until Adam has amplified the rounding."""
  losses = []
  for arguments in (["plain", "small"], ["ours", "small", *mesh]):
    result = run_subprocess(["-m", "benchmarks.worker", *arguments], timeout=280, cwd=repository)
    losses.append(json.loads(result.stdout.splitlines()[0])["losses"])
  assert losses[1][:3] == pytest.approx(losses[0][:3], rel=1e-4)
  assert losses[0][-1] < losses[0][0]
