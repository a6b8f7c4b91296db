"""Memory: what `mtf.describe` predicts for one device, and how much a process grows.

  python -m benchmarks.memory

Training steps on one CPU device, each in a process of its own. Two steps make what stays (code,
kernels, thread pools); then what the process holds is read before a further step, and its highest
value after it. The difference is compared with the predicted peak of inputs and activations.
Tensors of 64 KiB and more are mapped, and unmapped when they are freed (MALLOC_MMAP_THRESHOLD_), so
that what earlier steps left is not used again unseen.

The last rows are of a language model with Adam on 1 to 8 virtual devices, split by batch alone:
what a process of all of them grows by, from before it makes the variables to the highest of a step;
with nothing in shards, with weights and optimizer state, and with weights gathered for each use,
too. Beside it stands what `mtf.describe` predicts for so many devices.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import mesh_tensorflow as mtf  # isort: skip - before TensorFlow, whose start-up notices it mutes

import numpy as np
import tensorflow as tf

from benchmarks import ours, programs, unet
from benchmarks.sizes import BENCH
from benchmarks.unet_sizes import UNetSize

_MEBI, _WARM_UP = 2**20, 2


def _language_model(**changes: int) -> programs.Program:
  size = dataclasses.replace(BENCH, **changes)

  def make(mesh: str, implementation: str, layout: str) -> mtf.Function:
    return ours.make_function(size, 0, mesh, implementation, layout)

  return programs.Program(make, lambda: programs.language_batch(size))


def _dense(rows: int, width: int, layers: int) -> programs.Program:
  """Layers of one width with relu, squared error, Adafactor."""
  batch, first = mtf.Dimension("batch", rows), mtf.Dimension("width_0", width)

  def make(mesh: str, implementation: str, layout: str) -> mtf.Function:
    del mesh, implementation, layout

    @mtf.function(mtf.PlacementMeshImpl("", "", [""]), [mtf.TensorSpec([batch, first])])
    def step(x: mtf.Tensor) -> mtf.Tensor:
      for i in range(layers):
        out = mtf.Dimension(f"width_{i + 1}", width)
        x = mtf.layers.dense(
          x, out, reduced_dims=[x.shape[-1]], activation=mtf.relu, name=f"layer_{i}"
        )
      loss = mtf.reduce_mean(mtf.square(x))
      mtf.optimize.SgdOptimizer(0.01).minimize(loss)
      return loss

    return step

  return programs.Program(
    make, lambda: [tf.constant(np.random.default_rng(0).random([rows, width]), tf.float32)]
  )


def _unet(size: int, filters: int, levels: int, batch_size: int) -> programs.Program:
  sizes = UNetSize("", size, filters, levels, batch_size)

  def make(mesh: str, implementation: str, layout: str) -> mtf.Function:
    del layout
    return unet.make_function(sizes, mesh, implementation)

  return programs.Program(make, lambda: unet.make_volumes(sizes))


MODELS: dict[str, Callable[[], programs.Program]] = {
  "dense, 4 layers of 256, 2048 rows": lambda: _dense(2048, 256, 4),
  "dense, 8 layers of 512, 8192 rows": lambda: _dense(8192, 512, 8),
  "convolutions (mnist)": lambda: programs.PROGRAMS["mnist"],
  "U-Net, 2 volumes of 32 x 32 x 32": lambda: _unet(32, 8, 3, 2),
  "U-Net, a volume of 48 x 48 x 48": lambda: _unet(48, 4, 2, 1),
  "language model, vocabulary 1024": lambda: _language_model(vocab=1024),
  "language model (bench)": lambda: programs.PROGRAMS["bench"],
  "language model, batch 16": lambda: _language_model(batch=16),
}


def _bytes_of_process(field: str) -> int:
  with open("/proc/self/status", encoding="ascii") as status:
    found = re.search(rf"^{field}:\s+(\d+) kB", status.read(), re.MULTILINE)
  assert found
  return int(found[1]) * 1024


def measure(name: str) -> tuple[float, float]:
  """Predicted bytes of inputs and activations, and those by which this process grows.

  Args:
    name: of a model.
  """
  program = MODELS[name]()
  step = program.make("", "placement", "")
  told = mtf.describe(step).to_dict()["memory_per_device"]
  batch = program.batch()
  compiled = tf.function(lambda *values: tf.nest.flatten(step(*values))[0], autograph=False)
  for _ in range(_WARM_UP):
    float(compiled(*batch))
  gc.collect()
  with open("/proc/self/clear_refs", "w", encoding="ascii") as refs:
    refs.write("5")  # The highest value counts from here.
  before = _bytes_of_process("VmRSS")
  float(compiled(*batch))
  return told["inputs"] + told["activations"], _bytes_of_process("VmHWM") - before


# 41 million parameters: with Adam, 656 MiB a device where nothing is in shards.
_SHARDED = dataclasses.replace(
  BENCH, d_model=512, d_ff=2048, heads=8, d_kv=64, layers=12, length=32
)
_SHARDINGS = {"": "nothing", "state": "state", "all": "everything"}


def measure_shards(devices: int, sharding: str) -> tuple[float, float]:
  """Predicted bytes of a training on so many devices, and those by which this process grows.

  Args:
    devices: number of virtual CPU devices; each has one sequence.
    sharding: see `ours.make_function`.
  """
  size = dataclasses.replace(_SHARDED, batch=devices)
  mesh = f"batch:{devices}"
  step = ours.make_function(size, 0, mesh, "simd", "batch:batch", sharding)
  told = mtf.describe(step).to_dict()["memory_per_device"]
  batch = programs.language_batch(size)
  float(tf.reduce_sum(tf.matmul(tf.ones([64, 64]), tf.ones([64, 64]))))
  before = _bytes_of_process("VmRSS")
  compiled = tf.function(lambda *values: tf.nest.flatten(step(*values))[0], autograph=False)
  for _ in range(_WARM_UP + 1):
    float(compiled(*batch))
  with open("/proc/self/clear_refs", "w", encoding="ascii") as refs:
    refs.write("5")
  float(compiled(*batch))
  return devices * told["total"], _bytes_of_process("VmHWM") - before


def main() -> int:
  """The command."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--model", choices=list(MODELS), help=argparse.SUPPRESS)
  parser.add_argument("--shards", nargs=2, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.model:
    print(*measure(args.model))
    return 0
  if args.shards:
    print(*measure_shards(int(args.shards[0]), args.shards[1]))
    return 0
  print(f"{'':<36}{'predicted':>12}{'grown':>12}{'ratio':>8}")
  runs = {name: ["--model", name] for name in MODELS}
  for devices in (1, 2, 4, 8):
    for sharding, what in _SHARDINGS.items():
      if devices > 1 or not sharding:
        runs[f"{what} in shards, {devices} devices"] = ["--shards", str(devices), sharding]
  return 0 if all(_print_row(name, arguments) for name, arguments in runs.items()) else 1


def _print_row(name: str, arguments: list[str]) -> bool:
  done = subprocess.run(
    [sys.executable, "-m", "benchmarks.memory", *arguments],
    capture_output=True,
    text=True,
    check=False,
    env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**16)},
  )
  if done.returncode:
    print(f"{name:<36} failed: {done.stderr.strip().splitlines()[-1]}")
    return False
  predicted, grown = map(float, done.stdout.split()[-2:])
  print(
    f"{name:<36}{predicted / _MEBI:>8.1f} MiB{grown / _MEBI:>8.1f} MiB{predicted / grown:>8.2f}",
    flush=True,
  )
  return True


if __name__ == "__main__":
  sys.exit(main())
