"""Checkpoints of a model of 100 M parameters: how long a save blocks the training, and its memory.

Each phase runs in a process of its own, so that the peak memory is that of the phase. `run.py`
prints the table with the others; alone: `python -m benchmarks.checkpoint`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

LAYERS, D_MODEL, D_FF, BATCH = 12, 1024, 4096, 16
MESH, LAYOUT = "model:4", "d_ff:model"
ROUNDS = 3
_MB = 2**20


def parameters() -> int:
  """How many parameters the model has; an optimizer with two slots triples what is saved."""
  return 2 * LAYERS * D_MODEL * D_FF


class Model:
  """The model on a mesh of four virtual devices, with its optimizer."""

  def __init__(self):
    import numpy as np
    import tensorflow as tf

    import mesh_tensorflow as mtf

    mtf.virtual_cpu_devices(4)
    self.impl = mtf.simd_mesh_impl.SimdMeshImpl(MESH, LAYOUT)
    batch, model, ff = (
      mtf.Dimension(*d) for d in (("batch", BATCH), ("d_model", D_MODEL), ("d_ff", D_FF))
    )

    @mtf.function(self.impl, [mtf.TensorSpec([batch, model], tf.float32)])
    def step(x):
      y = x
      for i in range(LAYERS):
        wi = mtf.get_variable(x.mesh, f"layer_{i:02}/wi", [model, ff])
        wo = mtf.get_variable(x.mesh, f"layer_{i:02}/wo", [ff, model])
        h = mtf.relu(mtf.einsum([y, wi], output_shape=[batch, ff]))
        y += mtf.einsum([h, wo], output_shape=[batch, model])
      loss = mtf.reduce_mean(mtf.square(y - x))
      mtf.optimize.AdamWeightDecayOptimizer(learning_rate=1e-4).minimize(loss)
      return loss

    self._step = step
    self._x = np.random.default_rng(0).standard_normal([BATCH, D_MODEL]).astype(np.float32)

  def build(self) -> None:
    """Traces the program, which makes the variables."""
    import tensorflow as tf

    compiled = tf.function(lambda: self._step(self._x), autograph=False)
    compiled.get_concrete_function()
    self.step = lambda: float(compiled())

  @property
  def slice_bytes(self) -> int:
    """The memory that the slices of all devices take."""
    return sum(
      v.shape.num_elements() * v.dtype.size for s in self.impl.variable_store for v in s.slices
    )


# ----------------------------------------------------------------------- memory


def resident() -> int:
  """Bytes of memory that this process has now."""
  return _status("VmRSS")


def peak_of(call: Callable[[], Any]) -> int:
  """The most memory that this process had during a call."""
  with open("/proc/self/clear_refs", "w") as f:
    f.write("5")  # Begins the peak anew.
  call()
  return _status("VmHWM")


def _status(key: str) -> int:
  with open("/proc/self/status") as f:
    return next(int(line.split()[1]) * 1024 for line in f if line.startswith(key))


# ----------------------------------------------------------------------- phases


def blocked(folder: str, in_memory: bool = False) -> dict[str, Any]:
  """Seconds that a save blocks, and what the steps beside the writing lose."""
  from mesh_tensorflow import checkpoint

  model = Model()
  model.build()
  model.step()
  times: dict[str, list[float]] = {"synchronous": [], "asynchronous": [], "step": [], "next": []}

  def timed(key: str, call: Callable[[], Any]) -> None:
    started = time.perf_counter()
    call()
    times[key].append(time.perf_counter() - started)

  store = model.impl.variable_store
  with checkpoint.Checkpointer(folder, store, max_to_keep=1, snapshot_in_memory=in_memory) as saver:
    saver.save(0, asynchronous=False)
    for i in range(ROUNDS):
      for _ in range(2):
        timed("step", model.step)
      timed("synchronous", lambda i=i: saver.save(2 * i + 1, asynchronous=False))
      model.step()
      timed("asynchronous", lambda i=i: saver.save(2 * i + 2))
      timed("next", model.step)
      saver.wait()
  return {key: statistics.median(values) for key, values in times.items()}


def memory_of_save(folder: str, asynchronous: bool, in_memory: bool = False) -> dict[str, int]:
  """Extra memory of a save; in the background, with training steps beside it."""
  from mesh_tensorflow import checkpoint

  model = Model()
  model.build()
  model.step()
  saver = checkpoint.Checkpointer(folder, model.impl.variable_store, snapshot_in_memory=in_memory)

  def steps() -> None:
    for _ in range(3):
      model.step()

  def save() -> None:
    saver.save(1, asynchronous=asynchronous)
    steps()
    saver.wait()

  # A step has temporary values of its own: what it takes without a save is not the save's.
  before = peak_of(steps) if asynchronous else resident()
  return {
    "extra": peak_of(save if asynchronous else lambda: saver.save(1, asynchronous=False)) - before,
    "slices": model.slice_bytes,
  }


def memory_of_restore(folder: str) -> dict[str, int]:
  """Extra memory, beyond the slices, of making the variables and of restoring them."""
  from mesh_tensorflow import checkpoint

  model = Model()
  small = resident()
  start_up = peak_of(model.build)
  before = resident()
  saver = checkpoint.Checkpointer(folder, model.impl.variable_store)
  restored = peak_of(saver.restore)
  return {
    "start_up": start_up - small - model.slice_bytes,
    "extra": restored - before,
    "slices": model.slice_bytes,
  }


PHASES: dict[str, Callable[[str], dict[str, Any]]] = {
  "blocked": blocked,
  "blocked in memory": lambda folder: blocked(folder, in_memory=True),
  "save": lambda folder: memory_of_save(folder, asynchronous=False),
  "background": lambda folder: memory_of_save(folder, asynchronous=True),
  "background in memory": lambda folder: memory_of_save(folder, True, in_memory=True),
  "restore": memory_of_restore,
}


def measure() -> dict[str, dict[str, Any]]:
  """The figures of all phases, each in its process."""
  folder = tempfile.mkdtemp(prefix="mtf-checkpoint-")
  try:
    results = {}
    for phase in PHASES:
      command = [sys.executable, "-m", "benchmarks.checkpoint", "--phase", phase, folder]
      done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
      results[phase] = json.loads(done.stdout.splitlines()[-1])
    return results
  finally:
    shutil.rmtree(folder, ignore_errors=True)


def print_table() -> None:
  """Measures and prints the group (g) of the benchmarks."""
  from mesh_tensorflow.checkpoint.snapshot import TRANSFER_BUFFER

  results = measure()
  slices = results["save"]["slices"] / _MB
  million = parameters() / 1e6
  print(
    f"\n| (g) checkpoints: {million:.0f} M parameters, with their optimizer {slices:.0f} MB "
    "| measured | wanted |"
  )
  print("|---|---|---|")
  in_memory = "the same with snapshot_in_memory"
  for phase, label, wanted in (
    ("blocked", "an asynchronous save", "at most 20 %"),
    ("blocked in memory", in_memory, ""),
  ):
    times = results[phase]
    whole, part = times["synchronous"], times["asynchronous"]
    print(
      f"| {label} blocks {part:.2f} s, a synchronous one {whole:.2f} s | "
      f"**{part / whole:.1%}** | {wanted} |"
    )
    print(
      f"| the step after it takes {times['next']:.2f} s, others {times['step']:.2f} s "
      f"| {times['next'] - times['step']:+.2f} s | |"
    )
  # What restoring reads and saving writes at once, and a second copy of it in TensorFlow.
  buffer = f"at most {2 * TRANSFER_BUFFER / _MB:.0f} MB"
  for phase, key, label, wanted in (
    ("restore", "start_up", "start-up, traced program included", buffer),
    ("restore", "extra", "restore", buffer),
    ("save", "extra", "synchronous save", buffer),
    ("background", "extra", "asynchronous save, steps beside it", buffer),
    ("background in memory", "extra", in_memory, f"at most {slices:.0f} MB"),
  ):
    print(
      f"| peak memory beyond the slices: {label} | {results[phase][key] / _MB:.0f} MB | {wanted} |"
    )


def main() -> None:
  """Prints the table, or runs one phase for it."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--phase", choices=sorted(PHASES))
  parser.add_argument("folder", nargs="?", default="")
  args = parser.parse_args()
  if args.phase:
    print(json.dumps(PHASES[args.phase](args.folder)))
  else:
    print_table()


if __name__ == "__main__":
  main()
