"""The demo and the benchmarks as programs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from mesh_tensorflow import exit_codes


@pytest.mark.slow
@pytest.mark.parametrize(
  "more",
  [
    pytest.param([], id="default", marks=pytest.mark.long),
    pytest.param(["--implementation=simd"], id="simd"),  # Traced once for all processors.
  ],
)
def test_demo_trains_evaluates_and_writes(more, run_forked, repository, tmp_path):
  program = str(repository / "examples" / "demo.py")
  result = run_forked(
    [program, f"--model_dir={tmp_path}", "--steps=3", "--eval_files=4", *more], timeout=290
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


@pytest.mark.long
@pytest.mark.subprocess
def test_the_demo_goes_on_by_the_same_command(repository, tmp_path):
  """Ctrl-C in the middle; the same command trains the rest, and writes."""
  program = [sys.executable, str(repository / "examples" / "demo.py"), "--eval_files=2"]
  environ = {**os.environ, "PYTHONPATH": str(repository), "PYTHONUNBUFFERED": "1"}
  options = dict(cwd=tmp_path, env=environ, text=True, stdout=subprocess.PIPE)
  first = subprocess.Popen(
    [*program, "--steps=100000"], stderr=subprocess.STDOUT, start_new_session=True, **options
  )
  try:
    lines = []
    for line in first.stdout:
      lines.append(line)
      if "the first step is done" in line:
        first.send_signal(signal.SIGINT)
    code = first.wait(timeout=120)
  finally:
    first.kill()
  told = "".join(lines)
  assert code == exit_codes.STOPPED, told
  (step,) = re.findall(r"stopped by SIGINT; step (\d+) is saved in .*mesh_tensorflow_demo", told)
  assert "The same command goes on from there" in told and "lost" not in told
  again = subprocess.run([*program, f"--steps={int(step) + 2}"], timeout=240, **options)
  assert again.returncode == 0
  assert f"{int(step) + 2}/{int(step) + 2}" in again.stdout and "What to try next" in again.stdout


@pytest.fixture(scope="module")
def plain_losses(run_forked, repository):
  """Of the program in plain TensorFlow."""
  return losses_of(run_forked, repository, "plain", "tiny")


# The benchmark's worker, with a size of which a step is traced in seconds.
TINY = """
import dataclasses
from benchmarks import sizes, worker
small = sizes.SIZES["small"]
sizes.SIZES["tiny"] = dataclasses.replace(small, d_model=32, d_ff=64, heads=4, d_kv=8, layers=2)
worker.main()
"""


def losses_of(run_forked, repository, *arguments):
  result = run_forked(["-c", TINY, *arguments], timeout=280, cwd=repository)
  return json.loads(result.stdout.splitlines()[0])["losses"]


@pytest.mark.parametrize(
  "mesh",
  [
    pytest.param([], marks=pytest.mark.long),
    pytest.param(["--mesh", "batch:2,model:2"], marks=pytest.mark.long),
    ["--mesh", "batch:2,model:2", "--implementation", "simd"],
  ],
)
def test_benchmark_sides_compute_the_same_losses(run_forked, repository, plain_losses, mesh):
  """What is compared is the same work: equal losses, until Adam has amplified the rounding."""
  ours = losses_of(run_forked, repository, "ours", "tiny", *mesh)
  assert ours[:3] == pytest.approx(plain_losses[:3], rel=1e-4)
  assert plain_losses[-1] < plain_losses[0]
