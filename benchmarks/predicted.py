"""Predicted against measured: steps of a program under layouts that are drawn at random.

  python -m benchmarks.predicted --program bench --mesh_shape a:2,b:2 --implementation placement

Measures the machine (or takes a file of one), draws layouts, predicts and measures a training step
under each, and prints both, their rank correlation, the median error of the prediction, and how
the layout that `mtf.auto_layout` chooses compares with the best one measured. Nothing else should
run meanwhile.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import mesh_tensorflow as mtf  # isort: skip - before TensorFlow, whose start-up notices it mutes

import numpy as np

from benchmarks.programs import PROGRAMS, Program
from mesh_tensorflow.errors import LayoutError
from mesh_tensorflow.planning import Machine, measure

_WARM_UP = 2
# So many drawn layouts in a row that are not legal, or known already: there are no more.
_MOST_TRIES = 2000


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
  """The rank correlation of two lists of different numbers.

  Args:
    x: numbers.
    y: as many others.
  """
  ranks = [np.argsort(np.argsort(values)) for values in (x, y)]
  return float(np.corrcoef(*ranks)[0, 1])


def draw_layouts(
  program: Program, mesh: str, implementation: str, count: int, seed: int
) -> list[str]:
  """Different legal layouts, drawn at random.

  Args:
    program: the program.
    mesh: mesh shape.
    implementation: "placement" or "simd".
    count: how many; fewer if there are not as many.
    seed: of the draw.
  """
  draw = random.Random(seed)
  graph, _, _ = program.make(mesh, implementation, "").build_graph()
  names = sorted({d.name for op in graph.operations for x in op.outputs for d in x.shape})
  axes = mtf.convert_to_shape(mesh).dimension_names
  found: list[str] = []
  tried: set[str] = set()
  tries = 0
  while len(found) < count and tries < _MOST_TRIES:
    tries += 1
    some = sorted(draw.sample(names, draw.randint(1, min(4, len(names)))))
    layout = ",".join(f"{name}:{draw.choice(axes)}" for name in some)
    if layout in tried:
      continue
    tried.add(layout)
    impl = mtf.MeshImpl(mesh, layout)
    try:
      for op in graph.operations:
        op.verify_layout(impl)
    except LayoutError:
      continue
    found.append(layout)
    tries = 0
  return found


def measured_seconds(step: mtf.Function, program: Program, repeats: int) -> float:
  """The median time of a step.

  Args:
    step: the training step.
    program: the program.
    repeats: how many steps are timed.
  """
  batch = program.batch()
  times = []
  for i in range(_WARM_UP + repeats):
    start = time.perf_counter()
    float(step(*batch))
    if i >= _WARM_UP:
      times.append(time.perf_counter() - start)
  return statistics.median(times)


def main() -> int:
  """The command."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--program", choices=sorted(PROGRAMS), default="bench")
  parser.add_argument("--mesh_shape", default="a:2,b:2")
  parser.add_argument("--implementation", choices=("placement", "simd"), default="placement")
  parser.add_argument("--layouts", type=int, default=24, help="how many are drawn")
  parser.add_argument("--repeats", type=int, default=7, help="steps that are timed of each")
  parser.add_argument("--machine", help="a machine file; measured without one")
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args()
  program, mesh = PROGRAMS[args.program], mtf.convert_to_shape(args.mesh_shape)
  devices = mtf.virtual_cpu_devices(mesh.size)
  machine = Machine.load(args.machine) if args.machine else measure.measure(devices)
  print(measure.report(machine), flush=True)

  def time_of(layout: str) -> tuple[float, float]:
    step = program.make(args.mesh_shape, args.implementation, layout)
    predicted = mtf.describe(step, machine=machine).seconds
    return predicted, measured_seconds(step, program, args.repeats)

  layouts = draw_layouts(program, args.mesh_shape, args.implementation, args.layouts, args.seed)
  print(f"{'predicted':>10} {'measured':>10}  layout")
  results = []
  for layout in layouts:
    results.append(time_of(layout))
    print(f"{1e3 * results[-1][0]:7.1f} ms {1e3 * results[-1][1]:7.1f} ms  {layout}", flush=True)
  predicted, measured = zip(*results)
  errors = [abs(p - m) / m for p, m in results]
  free = program.make(args.mesh_shape, args.implementation, "")
  choice = mtf.auto_layout(free, mesh_shape=args.mesh_shape, machine=machine)
  chosen = ",".join(f"{t}:{m}" for t, m in choice.layout.pairs)
  expected, took = time_of(chosen)
  print(f"{1e3 * expected:7.1f} ms {1e3 * took:7.1f} ms  {chosen or '(no rules)'}, chosen")
  print(
    f"{args.program} on {args.mesh_shape}, {args.implementation}, {len(results)} layouts: rank "
    f"correlation {spearman(predicted, measured):.2f}, median error "
    f"{100 * statistics.median(errors):.0f} %, the chosen layout takes "
    f"{took / min(measured):.2f} of the best drawn one"
  )
  return 0


if __name__ == "__main__":
  sys.exit(main())
