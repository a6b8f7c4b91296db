"""Devices of unequal speed: the even split, and the shares that planning proposes, by turns.

  python -m benchmarks.unequal

Two virtual CPU devices stand for accelerators, the second of which is slowed three times on
purpose: a product takes four times as long as the host needs on the first one, and twelve times on
the second (`benchmarks.slowed`), so that the devices, not the cores of the host, are what a step
waits for. The machine is measured, shares are proposed from that, and a training step is timed on
the even split and with the shares, by turns. A second table has what several processors on one
device cost beside one that does the same work. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import mesh_tensorflow as mtf  # isort: skip - before TensorFlow, whose start-up notices it mutes

import numpy as np
import tensorflow as tf

from benchmarks.slowed import slowed
from mesh_tensorflow.planning import Machine, measure

_WARM_UP = 3


def make_step(impl: mtf.MeshImpl, batch: int, width: int, layers: int) -> Callable[..., tf.Tensor]:
  """A training step of a network of dense layers.

  Args:
    impl: the mesh.
    batch: number of examples.
    width: size of each layer.
    layers: number of layers.

  Returns:
    An `mtf.function` of the examples that returns the loss.
  """

  @mtf.function(impl, [mtf.TensorSpec([("batch", batch), ("width", width)])])
  def step(x: mtf.Tensor) -> mtf.Tensor:
    h, dim = x, x.shape.dims[1]
    for i in range(layers):
      out = mtf.Dimension("out", width)
      y = mtf.layers.dense(h, out, reduced_dims=[dim], activation=mtf.relu, name=f"layer_{i}")
      h = mtf.rename_dimension(y, "out", "width")
    loss = mtf.reduce_mean(mtf.square(h - x))
    mtf.optimize.SgdOptimizer(0.1).minimize(loss)
    return loss

  return step


def product_seconds(device: str, width: int) -> float:
  """Seconds of a FLOP of a product on a device of an idle host.

  Args:
    device: its name.
    width: side of the matrices.
  """
  with tf.device(device):
    x = tf.random.uniform([width, width])
    call = tf.function(lambda x: tf.reduce_max(tf.matmul(x, x)))
    float(call(x))
    times = []
    for _ in range(10):
      start = time.perf_counter()
      float(call(x))
      times.append(time.perf_counter() - start)
  return min(times) / (2.0 * width**3)


def run(arguments: argparse.Namespace) -> float:
  """Measures, and prints the table.

  Args:
    arguments: of the command line.

  Returns:
    The step with shares, as a part of that of the even split.
  """
  tf.get_logger().setLevel("ERROR")
  # A device that waits holds a thread.
  tf.config.threading.set_inter_op_parallelism_threads(8)
  tf.config.threading.set_intra_op_parallelism_threads(arguments.threads)
  devices = mtf.virtual_cpu_devices(2)
  sizes = (arguments.batch, arguments.width, arguments.layers)
  unit = product_seconds(devices[0], arguments.width)
  waits = [arguments.accelerator * n - 1 for n in (1.0, arguments.times)]
  with slowed({d: max(n, 0.0) * unit for d, n in zip(devices, waits)}):
    quick = measure.Sizes(products=(128, 512, arguments.width), channels=(8,), repeats=3)
    machine: Machine = measure.measure(devices, quick, shared=arguments.accelerator <= 1)
    print(measure.report(machine))
    even = mtf.PlacementMeshImpl("batch:2", "batch:batch", devices)
    steps = {"even split": make_step(even, *sizes)}
    report = mtf.describe(steps["even split"], machine=machine)
    print(f"\n{report.shares or 'The devices are equally fast: nothing to divide.'}\n")
    if report.shares is None:
      return 1.0
    parts = report.shares.proposed.parts
    name = "shares " + ":".join(map(str, parts))
    used = [d for d, n in zip(devices, parts) if n]
    impl = mtf.PlacementMeshImpl(
      report.shares.proposed.mesh_shape, "batch:batch", used, shares=report.shares.shares
    )
    steps[name] = make_step(impl, *sizes)
    predicted = {"even split": report.shares.equal.seconds, name: report.shares.proposed.seconds}
    ratio = _compared(steps, predicted, arguments)
  apart = {
    f"{n} processor{'s' if n > 1 else ''}": make_step(
      mtf.PlacementMeshImpl(f"batch:{n}", "batch:batch", devices[:1], shares={"batch": [n]}), *sizes
    )
    for n in (1, 2, 4)
  }
  print("\nOne device, not slowed:")
  _compared(apart, {}, arguments)
  return ratio


def _compared(
  steps: Mapping[str, Callable[..., tf.Tensor]],
  predicted: Mapping[str, float],
  arguments: argparse.Namespace,
) -> float:
  """Times steps by turns, and prints them beside the first; returns the ratio of the last."""
  shape = (arguments.batch, arguments.width)
  x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
  losses = {k: [float(step(x)) for _ in range(_WARM_UP)] for k, step in steps.items()}
  times: dict[str, list[float]] = {k: [] for k in steps}
  for _ in range(arguments.rounds):
    for k, step in steps.items():
      start = time.perf_counter()
      losses[k].append(float(step(x)))
      times[k].append(time.perf_counter() - start)
  first = next(iter(steps))
  base, ratio = np.array(losses[first]), 1.0
  print(f"{'division':<16}{'measured':>12}{'predicted':>12}{'of the first':>14}{'losses':>12}")
  for k in steps:
    ratio = statistics.median(mine / its for mine, its in zip(times[k], times[first]))
    apart = float(np.max(np.abs(np.array(losses[k]) / base - 1)))
    shown = f"{1e3 * predicted[k]:.1f} ms" if k in predicted else "-"
    seconds = f"{1e3 * statistics.median(times[k]):.1f} ms"
    print(f"{k:<16}{seconds:>12}{shown:>12}{ratio:>14.2f}{apart:>12.1e}")
  return ratio


def main(arguments: Sequence[str] | None = None) -> int:
  """The command.

  Args:
    arguments: of the command line; those of the process by default.
  """
  parser = argparse.ArgumentParser(prog="python -m benchmarks.unequal", description=__doc__)
  parser.add_argument(
    "--accelerator", type=float, default=4.0, help="time of a product, in that of the idle host"
  )
  parser.add_argument("--times", type=float, default=3.0, help="how much slower the device is")
  parser.add_argument("--batch", type=int, default=1024, help="examples in a batch")
  parser.add_argument("--width", type=int, default=1024, help="size of each layer")
  parser.add_argument("--layers", type=int, default=4, help="number of layers")
  parser.add_argument("--rounds", type=int, default=15, help="timed steps of each")
  parser.add_argument("--threads", type=int, default=1, help="threads of an operation")
  run(parser.parse_args(arguments))
  return 0


if __name__ == "__main__":
  sys.exit(main())
