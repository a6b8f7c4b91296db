"""Memory: what `mtf.describe` predicts for one device, and how much a process grows.

  python -m benchmarks.memory

Training steps on one CPU device, each in a process of its own. Two steps make what stays (code,
kernels, thread pools); then what the process holds is read before a further step, and its highest
value after it. The difference is compared with the predicted peak of inputs and activations.
Tensors of 64 KiB and more are mapped, and unmapped when they are freed (MALLOC_MMAP_THRESHOLD_), so
that what earlier steps left is not used again unseen.

The last rows are of a language model of 353 million parameters with Adam on 1 to 8 virtual devices,
split by batch alone: what a process of all of them grows by, from before it makes the variables to
the highest of a step, less what it grows by for a program of as many operations with sizes of a
sixteenth; with nothing in shards, with weights and optimizer state, and with weights gathered for
each use, too. Beside it stands what `mtf.describe` predicts for so many devices; what would need
more than 20 GiB is not run. Then the models with most layers that 8 devices train in 20 GiB.
"""

from __future__ import annotations

import argparse
import bisect
import dataclasses
import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import mesh_tensorflow as mtf  # isort: skip - before TensorFlow, whose start-up notices it mutes

import numpy as np
import tensorflow as tf

from benchmarks import ours, programs, unet
from benchmarks.sizes import BENCH, Size
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


def bytes_of_process(field: str) -> int:
  """Bytes that this process holds.

  Args:
    field: of /proc/self/status: "VmRSS", now; "VmHWM", at most.
  """
  with open("/proc/self/status", encoding="ascii") as status:
    found = re.search(rf"^{field}:\s+(\d+) kB", status.read(), re.MULTILINE)
  assert found
  return int(found[1]) * 1024


def highest_from_here() -> None:
  """Has "VmHWM" count from here."""
  with open("/proc/self/clear_refs", "w", encoding="ascii") as refs:
    refs.write("5")


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
  highest_from_here()
  before = bytes_of_process("VmRSS")
  float(compiled(*batch))
  return told["inputs"] + told["activations"], bytes_of_process("VmHWM") - before


# 353 million parameters: with Adam, 3.9 GiB a device where nothing is in shards.
_SHARDED = dataclasses.replace(
  BENCH, d_model=1024, d_ff=4096, heads=16, d_kv=64, layers=24, length=32, vocab=50176
)
_SHARDINGS = {"": "nothing", "state": "state", "all": "everything"}
_LIMIT = 20 * 2**30


def _sharded_step(devices: int, sharding: str, size: Size) -> mtf.Function:
  return ours.make_function(size, 0, f"batch:{devices}", "simd", "batch:batch", sharding)


def _predicted(devices: int, sharding: str, size: Size) -> int:
  """Bytes that a training takes on all devices."""
  step = _sharded_step(devices, sharding, dataclasses.replace(size, batch=devices))
  return int(devices * mtf.describe(step).to_dict()["memory_per_device"]["total"])


def measure_shards(devices: int, sharding: str, layers: int, width: int) -> tuple[float, float]:
  """Predicted bytes of a training on so many devices, and those by which this process grows.

  Args:
    devices: number of virtual CPU devices; each has one sequence.
    sharding: see `ours.make_function`.
    layers: of the model.
    width: what d_model is divided by, and all other sizes.
  """
  size = dataclasses.replace(
    _SHARDED,
    layers=layers,
    batch=devices,
    **{n: getattr(_SHARDED, n) // width for n in ("d_model", "d_ff", "d_kv", "vocab")},
  )
  step = _sharded_step(devices, sharding, size)
  predicted = _predicted(devices, sharding, size)
  batch = programs.language_batch(size)
  float(tf.reduce_sum(tf.matmul(tf.ones([64, 64]), tf.ones([64, 64]))))
  before = bytes_of_process("VmRSS")
  compiled = tf.function(lambda *values: tf.nest.flatten(step(*values))[0], autograph=False)
  for _ in range(_WARM_UP + 1):
    float(compiled(*batch))
  highest_from_here()
  float(compiled(*batch))
  return predicted, bytes_of_process("VmHWM") - before


def most_layers(sharding: str) -> int:
  """How many layers of the model 8 devices train within the limit, as predicted."""

  def is_too_large(layers: int) -> bool:
    return _predicted(8, sharding, dataclasses.replace(_SHARDED, layers=layers)) > _LIMIT

  return bisect.bisect_left(range(1, 200), True, key=is_too_large)


def parameters(layers: int) -> int:
  """The size of the model, with so many layers."""
  size = dataclasses.replace(_SHARDED, layers=layers)
  one = 4 * size.d_model * size.heads * size.d_kv + 2 * size.d_model * (size.d_ff + 1)
  return layers * one + size.d_model * (size.vocab + size.length + 1)


def main() -> int:
  """The command."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--model", choices=list(MODELS), help=argparse.SUPPRESS)
  parser.add_argument("--shards", nargs=4, help=argparse.SUPPRESS)
  parser.add_argument("--shards_only", action="store_true", help="the last rows only")
  args = parser.parse_args()
  if args.model:
    print(*measure(args.model))
    return 0
  if args.shards:
    devices, sharding, layers, width = args.shards
    print(*measure_shards(int(devices), sharding, int(layers), int(width)))
    return 0
  print(f"{'':<40}{'predicted':>12}{'grown':>12}{'ratio':>8}")
  done = args.shards_only or all([_print_row(n, ["--model", n]) for n in MODELS])
  return 0 if done and _print_shards() else 1


def _print_shards() -> bool:
  """The rows of the language model with Adam."""
  mtf.virtual_cpu_devices(8)  # Before the first prediction: later there can be no more of them.
  done = []
  for devices in (1, 2, 4, 8):
    for sharding, what in _SHARDINGS.items():
      if devices > 1 or not sharding:
        done.append(_print_row_of(devices, sharding, _SHARDED.layers, f"{what} in shards"))
  for sharding, what in _SHARDINGS.items():
    layers = most_layers(sharding)
    size = f"{parameters(layers) / 1e6:,.0f} M, {what} in shards"
    done.append(_print_row_of(8, sharding, layers, size))
  return all(done)


def _print_row_of(devices: int, sharding: str, layers: int, what: str) -> bool:
  name = f"{what}, {devices} devices"
  arguments = ["--shards", str(devices), sharding, str(layers)]
  predicted = _predicted(devices, sharding, dataclasses.replace(_SHARDED, layers=layers))
  if predicted > _LIMIT * 1.05:
    print(f"{name:<40}{predicted / _MEBI:>8.1f} MiB{'not run':>12}", flush=True)
    return True
  # What a process takes for a program of as many operations, whose tensors are small.
  program = _grown([*arguments, "16"])[1]
  return _print_row(name, [*arguments, "1"], program)


def _grown(arguments: Sequence[str]) -> tuple[float, float]:
  """What this program prints in a process of its own: predicted bytes, and those grown by.

  Raises:
    CalledProcessError: it fails.
  """
  done = subprocess.run(
    [sys.executable, "-m", "benchmarks.memory", *arguments],
    stdout=subprocess.PIPE,
    text=True,
    check=True,
    env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**16)},
  )
  predicted, grown = map(float, done.stdout.split()[-2:])
  return predicted, grown


def _print_row(name: str, arguments: Sequence[str], program: float = 0.0) -> bool:
  try:
    predicted, grown = _grown(arguments)
  except subprocess.CalledProcessError as e:
    print(f"{name:<40} failed with {e.returncode}", flush=True)
    return False
  grown -= program
  print(
    f"{name:<40}{predicted / _MEBI:>8.1f} MiB{grown / _MEBI:>8.1f} MiB{predicted / grown:>8.2f}",
    flush=True,
  )
  return True


if __name__ == "__main__":
  sys.exit(main())
