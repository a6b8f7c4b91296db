"""Trains a small program again and again, kills it, and looks what is left.

Each run is a child process, killed by SIGKILL at a random moment, most often some time after it
began to write a checkpoint. The next run goes on from what is there. In the end the last checkpoint
must be that of a run that was not disturbed, bit for bit.

Arguments: a folder, number of kills, seed, number of steps. Prints a table.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import checkpoint
from mesh_tensorflow.checkpoint import keeping, snapshot

SAVE_EVERY = 4
ROWS, COLUMNS = 512, 256


def train(folder, log, steps):
  """Trains to the end; tells in a file what was done, so that a killed run has told it, too."""
  snapshot.TRANSFER_BUFFER = 200_000
  mtf.virtual_cpu_devices(2)
  impl = mtf.simd_mesh_impl.SimdMeshImpl("rows:2", "rows:rows")
  dims = [mtf.Dimension("rows", ROWS), mtf.Dimension("columns", COLUMNS)]

  @mtf.function(impl, [mtf.TensorSpec(dims[1:], tf.float32)])
  def step(x):
    w = mtf.get_variable(x.mesh, "w", dims)
    total = mtf.get_variable(x.mesh, "total", dims[:1], trainable=False)
    y = mtf.einsum([x, mtf.dropout(w, True, keep_prob=0.5)], output_shape=dims[:1])
    mtf.assign_add(total, y)
    mtf.optimize.AdamWeightDecayOptimizer(learning_rate=0.01).minimize(mtf.reduce_sum(y * y))
    return mtf.reduce_sum(total)

  class Told(keeping.Keeping):
    def publish(self, directory, path):
      super().publish(directory, path)
      tell(f"saved {checkpoint.get_step_from_path(path)}")

  def tell(text):
    os.write(descriptor, f"{text}\n".encode())

  descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
  c = checkpoint.Checkpointer(folder, impl.variable_store, max_to_keep=3)
  c._keeping = Told(**vars(c._keeping))
  start = 0
  inputs = np.random.default_rng(0).standard_normal([steps, COLUMNS]).astype(np.float32)
  if c.latest():
    step(inputs[0])  # Makes the variables.
    start = c.restore().step
  tell(f"start {start}")
  for i in range(start, steps):
    step(inputs[i])
    if (i + 1) % SAVE_EVERY == 0:
      c.save(i + 1)
  c.wait()
  tell("end")


def run(folder, log, steps):
  """A child process that trains."""
  child = os.fork()
  if not child:
    try:
      train(folder, log, steps)
      os._exit(0)
    finally:
      os._exit(1)
  return child


def wait_for(condition, child):
  """Waits until something is so; False if the child ends before."""
  while not condition():
    if os.waitpid(child, os.WNOHANG)[0]:
      return False
    time.sleep(0.002)
  return True


def kill(child, folder, log, draw):
  """Kills a run; returns in the middle of what, or None if it ended before."""
  old = unfinished(folder)  # What the run before left is there until the first save.
  told = len(lines(log)) + draw.randrange(1, 8)
  if not wait_for(lambda: len(lines(log)) >= told, child):
    return None
  if draw.random() < 0.8:
    if not wait_for(lambda: unfinished(folder) - old, child):
      return None
    time.sleep(draw.uniform(0, 0.03))
  else:
    time.sleep(draw.uniform(0, 0.1))
  os.kill(child, signal.SIGKILL)
  _, status = os.waitpid(child, 0)
  if not os.WIFSIGNALED(status):
    return None
  return "a write" if unfinished(folder) - old else "a step"


def lines(log):
  if not os.path.exists(log):
    return []
  with open(log) as f:
    return [line.split() for line in f.read().splitlines()]


def unfinished(folder):
  names = os.listdir(folder) if os.path.isdir(folder) else []
  return {n for n in names if n.startswith(".unfinished-model")}


def numbers(log, word):
  return [int(line[1]) for line in lines(log) if line[0] == word]


def all_values(folder):
  reader = tf.train.load_checkpoint(folder)
  return {n: reader.get_tensor(n).tobytes() for n in reader.get_variable_to_shape_map()}


def main(folder, kills, seed, steps):
  steps = int(steps)
  draw = random.Random(int(seed))
  shutil.rmtree(folder, ignore_errors=True)
  os.makedirs(folder)
  paths = [os.path.join(folder, name) for name in ("undisturbed", "killed")]
  logs = [path + ".log" for path in paths]
  _, status = os.waitpid(run(paths[0], logs[0], steps), 0)
  assert status == 0, status
  print(f"{'kill':>4} {'in the middle of':<18} {'saved before':>12} {'resumed at':>10}")
  counts = {"a write": 0, "a step": 0}
  for i in range(int(kills)):
    before = numbers(logs[1], "saved")
    child = run(paths[1], logs[1], steps)
    what = kill(child, paths[1], logs[1], draw)
    if what is None:
      print(f"the run ended before kill {i + 1}")
      break
    counts[what] += 1
    resumed = numbers(logs[1], "start")[-1]
    saved = max(before, default=0)
    # A write that was complete but for the word about it is not lost either.
    assert saved <= resumed <= saved + SAVE_EVERY, (saved, resumed)
    print(f"{i + 1:>4} {what:<18} {saved:>12} {resumed:>10}", flush=True)
  _, status = os.waitpid(run(paths[1], logs[1], steps), 0)
  assert status == 0, status
  values = [all_values(path) for path in paths]
  assert values[0] == values[1], "the final checkpoints differ"
  assert sorted(os.listdir(paths[0])) == sorted(os.listdir(paths[1]))
  print(
    f"{sum(counts.values())} kills, {counts['a write']} in the middle of a write; same final values"
  )


if __name__ == "__main__":
  main(*sys.argv[1:])
