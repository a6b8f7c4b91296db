"""What reports cost: a training step with and without them, taken in turns.

    python -m benchmarks.reporting [--copies 4] [--rounds 20] [--size small] [--mesh batch:2]

Each kind is the loop of the trainer itself (a call of the compiled program, the next learning rate,
`TrainingProgress.update`) on the same batches: without reports (nothing is computed or written
besides the losses), with those of the defaults (a line every 100 steps), and with norms in each
step. A round is some steps of each kind, in changing order, so that what else the machine does
meets all alike. Where its buffers lie in memory makes one program some per cent faster than the
next, for as long as it lives: so there are several copies of each kind, of which the mean counts,
and what the copies without reports differ by is shown. The goal: at most 1.01 with the defaults, at
most 1.03 with norms in each step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from benchmarks import ours
from benchmarks.sizes import SIZES, Size, random_tokens
from mesh_tensorflow.environment.virtual_devices import virtual_cpu_devices
from mesh_tensorflow.training.reported import ReportSteps
from mesh_tensorflow.transformer.training.trainer import Trainer

_EVERY = 100
_LAST = 10**6
_BASE = "without reports"
KINDS = {_BASE: 0, "the defaults": None, "norms in each step": 1}


class Side:
  """One kind of training.

  Args:
    kind: of `KINDS`.
    size: of the model.
    mesh: mesh shape.
    folder: for what is written.
  """

  def __init__(self, kind: str, size: Size, mesh: str, folder: str):
    reports = kind != _BASE
    norms_every = KINDS[kind]
    steps = ours.make_steps(size, 0, mesh)
    self._trainer = Trainer(
      steps, None, folder if reports else None,
      optimizer=mtf.optimize.AdamWeightDecayOptimizer, learning_rate_schedule=1e-3, quiet=True,
      report_every=_EVERY, norms_every=norms_every,
    )  # fmt: skip
    self._steps = ReportSteps(0, _LAST, _EVERY, norms_every)
    self._compiled = self._trainer.loop.compile_steps(["targets"], None, self._steps)
    self._trainer.loop.prepare(self._compiled)
    self._progress, _ = self._trainer.loop._new_progress(0, _LAST)
    self._trainer.loop._complete_rates(self._progress)
    self._tokens = random_tokens(size)

  def run(self, steps: int) -> tuple[float, float]:
    """Seconds of so many steps, in calls as the trainer makes them: of the clock, of all CPUs."""
    trainer, left = self._trainer, steps
    batches = tf.constant(np.stack([self._tokens] * steps))
    started, used = time.perf_counter(), time.process_time()
    while left:
      before = trainer.global_step
      count = min(left, self._steps.steps_of_call(before, steps))
      losses, _, values = trainer.loop._call(self._compiled, (batches[:count],))
      trainer.state.step += count
      self._progress.update(trainer.global_step, losses, trainer.loop._rate.at, values=values)
      left -= count
    return time.perf_counter() - started, time.process_time() - used


def main(argv: list[str] | None = None) -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
  parser.add_argument("--size", choices=list(SIZES), default="small")
  parser.add_argument("--mesh", default="", help="mesh shape; one device by default")
  parser.add_argument("--steps", type=int, default=20, help="steps of a kind in a round")
  parser.add_argument("--rounds", type=int, default=20)
  parser.add_argument("--copies", type=int, default=4, help="programs of each kind")
  flags = parser.parse_args(argv)
  if flags.mesh:
    virtual_cpu_devices(mtf.convert_to_shape(flags.mesh).size)
  with tempfile.TemporaryDirectory() as folder:
    sides = {
      (kind, i): Side(kind, SIZES[flags.size], flags.mesh, f"{folder}/{n}-{i}")
      for i in range(flags.copies)
      for n, kind in enumerate(KINDS)
    }
    for side in sides.values():  # TensorFlow optimizes a program when it first runs.
      side.run(flags.steps)
    times: dict[tuple[str, int], list[tuple[float, float]]] = {of: [] for of in sides}
    for i in range(flags.rounds):
      order = list(sides)
      for of in order[i % len(order) :] + order[: i % len(order)]:
        times[of].append(sides[of].run(flags.steps))
  print(
    f"{flags.size}, {flags.copies} copies, {flags.rounds} rounds of {flags.steps} steps, "
    f"a line each {_EVERY} steps"
  )
  print(f"{'':<20} {'time of a step':>17} {'of all CPUs':>21}")
  for kind in KINDS:
    cells = []
    for i in (0, 1):
      found, base = (_of_copies(times, of, i, flags.steps) for of in (kind, _BASE))
      mean, ratio = statistics.mean(found), statistics.mean(found) / statistics.mean(base)
      cells.append(f"{1000 * mean:8.2f} ms  {ratio:6.3f}")
    print(f"{kind:<20} {'   '.join(cells)}")
  base = _of_copies(times, _BASE, 0, flags.steps)
  least, most = (x / statistics.mean(base) for x in (min(base), max(base)))
  print(f"copies {_BASE}: {least:.3f} to {most:.3f} of their mean")


def _of_copies(
  times: dict[tuple[str, int], list[tuple[float, float]]], kind: str, i: int, steps: int
) -> list[float]:
  """Seconds of a step of each copy: the mean of the rounds, without a tenth at each end."""
  found = []
  for of, rounds in times.items():
    if of[0] == kind:
      ordered = sorted(t[i] for t in rounds)
      cut = len(ordered) // 10
      found.append(statistics.mean(ordered[cut : len(ordered) - cut]) / steps)
  return found


if __name__ == "__main__":
  main()
