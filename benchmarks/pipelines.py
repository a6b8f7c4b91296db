"""Pipelines: idle time and memory of the stages, predicted and measured.

  python -m benchmarks.pipelines

Idle time: stages of dense layers on virtual CPU devices that are slowed on purpose
(`benchmarks.slowed`): a product makes its device wait, and leaves the cores of the host to others,
so that the stages overlap however many cores there are. The waits are logged: a stage works from
the begin to the end of each, and is idle in between. Predicted is the table of the schedule, with
the same seconds a product.

Memory: what a process of all stages, of which all but the last have five layers, grows by from
before the first step to the highest value of some, less the same of a program of as many operations
on a sixteenth of the rows. It is compared with the sum of what is predicted of stages, likewise,
less the activations that go from stage to stage: in one process both have the same buffer.
The largest takes 1.7 GB.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import mesh_tensorflow as mtf  # isort: skip - before TensorFlow, whose start-up notices it mutes

import numpy as np
import tensorflow as tf

from benchmarks.memory import bytes_of_process, highest_from_here
from benchmarks.slowed import Wait, slowed
from mesh_tensorflow.meshes.schedules import SCHEDULES
from mesh_tensorflow.planning.machine import Machine

_WARM_UP, _MEBI = 2, 2**20
# Seconds of a product of the slowed stages, well above what the host needs to start one.
_PRODUCT_SECONDS = 0.01
# Of a microbatch whose memory is measured: activations well above what tracing takes, which varies.
_ROWS = 49152
_LAYERS = 5  # Of each stage but the last.
_KEEPING = ("gpipe", "1f1b")


@dataclasses.dataclass(frozen=True)
class Layers:
  """A pipeline of dense layers.

  Attributes:
    cut: number of layers of each stage.
    rows: examples of a microbatch.
    width: of each layer.
    microbatches: of a step.
    schedule: its name.
  """

  cut: tuple[int, ...]
  rows: int
  width: int
  microbatches: int
  schedule: str

  def step(self, impl: mtf.MeshImpl) -> Callable[..., tf.Tensor]:
    """A training step.

    Args:
      impl: the mesh of the first stage, with those of the others.

    Returns:
      An `mtf.function` of the examples that returns the loss.
    """
    batch = self.rows * self.microbatches
    stages = [s for s, n in enumerate(self.cut) for _ in range(n)]

    @mtf.function(impl, [mtf.TensorSpec([("batch", batch), ("width", self.width)])])
    def step(x: mtf.Tensor) -> mtf.Tensor:
      dim = x.shape.dims[1]
      out = mtf.Dimension("out", self.width)

      def model(features: dict[str, mtf.Tensor]) -> dict[str, mtf.Tensor]:
        y = features["x"]
        for i, s in enumerate(stages):
          with mtf.stage(f"stage{s}"):
            w = mtf.get_variable(y.mesh, f"w{i}", [dim, out])
            y = mtf.relu(
              mtf.rename_dimension(mtf.einsum([y, w], reduced_dims=[dim]), "out", "width")
            )
        with mtf.stage(f"stage{stages[-1]}"):
          return {"loss": mtf.reduce_mean(mtf.square(y))}

      gradients, outputs = mtf.serialize_training_step(
        {"x": x}, model, x.shape.dims[0], self.microbatches, schedule=self.schedule
      )
      mtf.optimize.SgdOptimizer(0.01).apply_grads(gradients, x.graph.trainable_variables)
      return outputs["loss"]

    return step

  def examples(self) -> np.ndarray:
    """A batch."""
    shape = (self.rows * self.microbatches, self.width)
    return np.random.default_rng(0).random(shape, np.float32)


# ------------------------------------------------------------------------------- idle time


def idle_time(layers: Layers, steps: int) -> tuple[float, float, float, float]:
  """Idle part and seconds of the pipeline, predicted and measured.

  Args:
    layers: the program.
    steps: timed ones; the medians count.

  Returns:
    Predicted idle part, measured, predicted seconds, measured.
  """
  devices = mtf.virtual_cpu_devices(len(layers.cut))
  store = mtf.VariableStore()
  first, *others = [mtf.PlacementMeshImpl("", "", [d], variable_store=store) for d in devices]
  flops = 2.0 * layers.rows * layers.width**2
  waits: list[Wait] = []
  with slowed(dict.fromkeys(devices, _PRODUCT_SECONDS / flops), waits):
    step = layers.step(first.with_stages(others, layers.schedule))
    planned = mtf.describe(step, machine=_machine(flops / _PRODUCT_SECONDS)).pipeline
    call = tf.function(lambda x: step(x), autograph=False)
    found = []
    for _ in range(_WARM_UP + steps):
      waits.clear()
      float(call(tf.constant(layers.examples())))
      seconds = max(w.end for w in waits) - min(w.begin for w in waits)
      busy = sum(w.end - w.begin for w in waits)
      found.append((1 - busy / (seconds * len(devices)), seconds))
  idle, seconds = np.median(found[_WARM_UP:], axis=0)
  return planned.bubble, float(idle), planned.table.seconds, float(seconds)


def _machine(flops: float) -> Machine:
  """A machine whose products take all the time."""
  cpu = Machine.load("cpu")
  device = dataclasses.replace(
    cpu.device,
    flops={"float32": flops},
    efficiency=((1.0, 1.0),),
    memory_bandwidth=1e15,
    launch_seconds=0.0,
  )
  links = tuple(dataclasses.replace(x, bandwidth=1e15, latency=0.0, kinds={}) for x in cpu.links)
  return dataclasses.replace(cpu, device=device, links=links, shared=False, variants={})


def print_idle_time(cuts: Sequence[tuple[int, ...]], steps: int) -> None:
  """Prints the table of idle times.

  Args:
    cuts: numbers of layers of the stages.
    steps: timed ones.
  """
  mtf.virtual_cpu_devices(max(map(len, cuts)))
  print("| layers | schedule | idle, predicted | measured | a step, predicted | measured |")
  print("|---|---|---|---|---|---|")
  for cut in cuts:
    for schedule in SCHEDULES:
      layers = Layers(cut, rows=8, width=32, microbatches=8, schedule=schedule)
      planned, measured, seconds, took = idle_time(layers, steps)
      sizes = " + ".join(map(str, cut))
      cells = f"{planned:.1%} | {measured:.1%} | {1e3 * seconds:.0f} ms | {1e3 * took:.0f} ms"
      print(f"| {sizes} | {schedule} | {cells} |", flush=True)


# ------------------------------------------------------------------------------- memory


def grow(schedule: str, stages: int, rows: int) -> tuple[int, int]:
  """Memory of stages of which all but the last have many layers.

  Args:
    schedule: its name.
    stages: number of stages.
    rows: examples of a microbatch.

  Returns:
    Bytes predicted of all stages, and those by which this process grows, without the batch.
  """
  cut = (_LAYERS,) * (stages - 1) + (1,)
  layers = Layers(cut, rows, width=32, microbatches=8, schedule=schedule)
  devices = mtf.virtual_cpu_devices(stages)
  store = mtf.VariableStore()
  first, *others = (mtf.PlacementMeshImpl("", "", [d], variable_store=store) for d in devices)
  step = layers.step(first.with_stages(others, schedule))
  planned = mtf.describe(step, machine="cpu").pipeline.stages
  shared = rows * layers.width * tf.float32.size * int(sum(s.under_way for s in planned[1:]))
  predicted = sum(s.memory for s in planned) - shared
  call = tf.function(lambda x: step(x), autograph=False)
  gc.collect()
  before = bytes_of_process("VmRSS")
  highest_from_here()
  # Made by TensorFlow: what NumPy gives back would be used again unseen.
  batch = tf.fill([rows * layers.microbatches, layers.width], 0.5)
  for _ in range(_WARM_UP + 1):
    float(call(batch))
  size = int(tf.size(batch)) * batch.dtype.size
  return predicted, bytes_of_process("VmHWM") - before - size


def _grown(schedule: str, stages: int, rows: int) -> list[int]:
  """What `grow` returns in a process of its own.

  Raises:
    CalledProcessError: it fails.
  """
  done = subprocess.run(
    [sys.executable, "-m", "benchmarks.pipelines", "--grow", schedule, str(stages), str(rows)],
    stdout=subprocess.PIPE,
    text=True,
    check=True,
    env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**16)},
  )
  return [int(n) for n in done.stdout.split()[-2:]]


def print_memory(of: Sequence[str]) -> None:
  """Prints the table of what stages grow by.

  Args:
    of: names of schedules.
  """
  print("| stages | schedule | predicted | measured | ratio |")
  print("|---|---|---|---|---|")
  for stages, schedule in itertools.product((2, 3, 4), of):
    large, small = (_grown(schedule, stages, n) for n in (_ROWS, _ROWS // 16))
    predicted, grown = (x - y for x, y in zip(large, small))
    sizes = f"{predicted / _MEBI:.0f} MiB | {grown / _MEBI:.0f} MiB | {predicted / grown:.2f}"
    print(f"| {stages} | {schedule} | {sizes} |", flush=True)


def print_tables(steps: int = 5) -> None:
  """Prints all tables.

  Args:
    steps: timed ones of each pipeline.
  """
  print_idle_time([(3, 3), (2, 4), (2, 2, 2, 2)], steps)
  print()
  print_memory(_KEEPING)


def main() -> int:
  """The command."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--steps", type=int, default=5, help="timed steps of each pipeline")
  parser.add_argument("--memory", nargs="*", metavar="SCHEDULE", help="only the table of memory")
  parser.add_argument("--grow", nargs=3, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.grow:
    print(*grow(args.grow[0], *map(int, args.grow[1:])))
  elif args.memory is not None:
    print_memory(args.memory or _KEEPING)
  else:
    tf.config.threading.set_inter_op_parallelism_threads(16)  # A device that waits holds one.
    print_tables(args.steps)
  return 0


if __name__ == "__main__":
  sys.exit(main())
