"""Trainings killed by SIGKILL at random moments, resumed until the end, and compared bit for bit.

  python benchmarks/kill_runs.py --runs 50

The real program trains a small model, with dropout, Adam and data whose position is saved. One
training is left alone. Each other one is killed: at a random moment, or, every second time, while a
checkpoint is being written; then the same command goes on, which may be killed again. In the end
every variable of the last checkpoint must equal that of the undisturbed training.

With `--workers 2` it is several workers, of which one is killed: the others end by themselves.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

from mesh_tensorflow.environment import quiet

quiet.import_tensorflow()

import tensorflow as tf  # noqa: E402

TEXT = "To be, or not to be, that is the question.\nWhether 'tis nobler in the mind\n" * 60
STEPS, SAVE_EVERY = 60, 4


def arguments(model_dir: pathlib.Path, workers: int = 1) -> list[str]:
  """The command line of the trainer, or of the launcher of several workers."""
  text = model_dir.parent / "text.txt"
  text.write_text(TEXT)
  bindings = [
    f"text_file = '{text}'", "num_layers = 1", "d_model = 32", "d_ff = 64", "num_heads = 4",
    "d_kv = 8", "dropout_rate = 0.1", "Unitransformer.max_length = 16",
    "run.sequence_length = {'inputs': 16, 'targets': 16}", "run.batch_size = 8",
    "run.learning_rate_schedule = 0.01", "run.iterations_per_loop = 2", "run.report_every = 10",
    f"run.save_checkpoints_steps = {SAVE_EVERY}", f"run.train_steps = {STEPS}",
    "run.keep_checkpoint_max = 3", "run.checkpoint_input_pipeline = True",
  ]  # fmt: skip
  program = ["main"]
  if workers > 1:
    program = ["launch", f"--workers={workers}", "--"]
    bindings += [f"run.mesh_shape = 'batch:{workers}'", "run.layout_rules = 'batch:batch'"]
  program[0] = f"mesh_tensorflow.transformer.{program[0]}"
  return [
    sys.executable, "-m", *program, f"--model_dir={model_dir}",
    "--gin_file=problems/tinyshakespeare.gin", *[f"--gin_param={b}" for b in bindings],
  ]  # fmt: skip


def last_saved(folder: pathlib.Path) -> int:
  """The step of the last checkpoint that TensorFlow sees as complete; 0 if there is none."""
  path = tf.train.latest_checkpoint(str(folder))
  return int(path.rpartition("-")[2]) if path else 0


def is_writing(folder: pathlib.Path) -> bool:
  """Whether a checkpoint is being written."""
  return any(folder.glob(".unfinished-*"))


def values(folder: pathlib.Path) -> dict[str, bytes]:
  """All tensors of the last checkpoint."""
  reader = tf.train.load_checkpoint(str(folder / f"model.ckpt-{STEPS}"))
  found = {}
  for name in reader.get_variable_to_shape_map():
    x = reader.get_tensor(name)
    found[name] = str((x.dtype, x.shape)).encode() + x.tobytes()
  return found


def start(folder: pathlib.Path, log: pathlib.Path, workers: int) -> subprocess.Popen:
  """Starts the training."""
  with log.open("a") as f:
    return subprocess.Popen(arguments(folder, workers), stdout=f, stderr=subprocess.STDOUT)


def kill(process: subprocess.Popen, workers: int, draw: random.Random) -> None:
  """Kills the training, or one of its workers."""
  if workers == 1:
    process.kill()
    return
  found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
  pids = [int(line) for line in found.stdout.split()]
  if pids:  # Else they have just ended.
    os.kill(draw.choice(pids), signal.SIGKILL)


def kill_and_resume(
  folder: pathlib.Path, draw: random.Random, kills: int, workers: int
) -> list[dict]:
  """Kills and resumes one training until its end; what was there at each kill."""
  log = folder.with_suffix(".log")
  told = []
  for _ in range(kills):
    in_write = draw.random() < 0.5
    wanted = draw.uniform(0.0, STEPS - 2 * SAVE_EVERY)
    process = start(folder, log, workers)
    # Of the steps, not of the seconds: most of the time goes into starting.
    while process.poll() is None:
      done = last_saved(folder)
      if done >= wanted and (not in_write or is_writing(folder)):
        break
      time.sleep(0.0005)
    time.sleep(draw.uniform(0.0, 0.003 if in_write else 0.05))
    writing = is_writing(folder)
    kill(process, workers, draw)
    code = process.wait(timeout=120)
    told.append(
      {
        "code": code,
        "writing": writing or is_writing(folder),
        "saved": last_saved(folder),
      }
    )
  process = start(folder, log, workers)
  code = process.wait(timeout=600)
  told.append({"code": code})
  if code:
    print(log.read_text()[-3000:], file=sys.stderr)
  return told


def resumed_at(log: pathlib.Path) -> list[int]:
  """The steps of the checkpoints from which the program went on."""
  lines = [line for line in log.read_text().splitlines() if line.startswith("restored ")]
  return [int(line.rpartition("-")[2]) for line in lines]


def compare(folder: pathlib.Path, runs: int, kills: int, seed: int, workers: int = 1) -> int:
  """Does the runs and prints the table; returns how many of them differ."""
  whole = folder / "whole"
  code = start(whole, folder / "whole.log", workers).wait(timeout=600)
  if code:
    raise SystemExit((folder / "whole.log").read_text())
  expected = values(whole)
  print(f"{len(expected)} tensors of {STEPS} steps, a checkpoint every {SAVE_EVERY}", flush=True)
  print(
    " run  killed with the checkpoint of step (* while one was written)  resumed at  final",
    flush=True,
  )
  failed = 0
  for i in range(runs):
    model_dir = folder / f"run-{i}"
    told = kill_and_resume(model_dir, random.Random(seed * 1000 + i), kills, workers)
    at = ", ".join(f"{t['saved']}{'*' if t['writing'] else ''}" for t in told[:-1])
    again = resumed_at(model_dir.with_suffix(".log"))
    # No step is lost beyond the last checkpoint that was whole.
    lost = [
      t["saved"] for t in told[:-1] if t["saved"] and t["saved"] < STEPS and t["saved"] not in again
    ]
    same = told[-1]["code"] == 0 and not lost and values(model_dir) == expected
    failed += not same
    resumed = ", ".join(map(str, again)) or "0"
    print(f"{i + 1:>4}  {at:<56}  {resumed:<10}  {'equal' if same else 'DIFFERENT'}", flush=True)
  print(
    f"{runs - failed} of {runs} runs end with the checkpoint of the undisturbed one", flush=True
  )
  return failed


def main() -> int:
  """Parses the command line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--runs", type=int, default=10)
  parser.add_argument("--kills", type=int, default=1, help="kills in each run")
  parser.add_argument("--workers", type=int, default=1, help="processes of each training")
  parser.add_argument("--seed", type=int, default=0)
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    return min(1, compare(pathlib.Path(folder), args.runs, args.kills, args.seed, args.workers))


if __name__ == "__main__":
  sys.exit(main())
