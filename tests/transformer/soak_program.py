"""Trains a tiny model for many steps; prints, as JSON, what the process's memory was meanwhile.

Arguments: folder of the model, number of steps, steps between samples.
"""

from __future__ import annotations

import gc
import json
import pathlib
import resource
import sys

import mesh_tensorflow as mtf
from mesh_tensorflow.training import progress
from mesh_tensorflow.training.loop import TrainingLoop
from tests.transformer import training_program


def resident_bytes() -> int:
  """The memory that this process has in RAM."""
  pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
  return pages * resource.getpagesize()


def main(folder: str, steps: int, every: int) -> None:
  """Trains, and prints {"samples": [[step, bytes], ...], "traces": n}."""
  smaller = {"d_model = 32": "d_model = 8", "hidden_size = 64": "hidden_size = 8"}
  smaller["num_heads = 4"] = "num_heads = 1"
  for old, new in smaller.items():
    training_program.BINDINGS = training_program.BINDINGS.replace(old, new)
  samples, compiled = [], []
  update, compile_steps = progress.TrainingProgress.update, TrainingLoop.compile_steps

  def watched(self, step, *args, **kwargs):
    update(self, step, *args, **kwargs)
    if step % every == 0:
      gc.collect()
      samples.append([step, resident_bytes()])

  def kept(self, *args, **kwargs):
    compiled.append(compile_steps(self, *args, **kwargs))
    return compiled[-1]

  progress.TrainingProgress.update, TrainingLoop.compile_steps = watched, kept
  trainer = training_program.make_trainer(
    model_dir=folder, batch=2, steps_per_call=100, report_every=1000,
    save_checkpoints_steps=200, keep_checkpoint_max=2,
    optimizer=mtf.optimize.AdafactorOptimizer, dropout=False,
  )  # fmt: skip
  # The thread that writes checkpoints gets its buffers, once, before the thousandth step, too.
  trainer.train(training_program.dataset, 1000)
  trainer.loop._checkpoints._save_every = 10_000
  losses = trainer.train(training_program.dataset, steps)
  assert trainer.global_step == steps
  traces = compiled[-1].experimental_get_tracing_count()
  print(json.dumps({"samples": samples, "traces": traces, "losses": [losses[0], losses[-1]]}))


if __name__ == "__main__":
  main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
