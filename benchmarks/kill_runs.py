"""Trainings killed by SIGKILL at random moments, resumed until the end, and compared bit for bit.

  python benchmarks/kill_runs.py --runs 50

The real program trains a small model, with dropout, Adam and data whose position is saved. One
training is left alone. Each other one is killed: at a random moment, or, every second time, while a
checkpoint is being written; then the same command goes on, which may be killed again. In the end
every variable of the last checkpoint must equal that of the undisturbed training.

With `--workers 2` it is several workers, of which one is killed: the others end by themselves.

  python benchmarks/kill_runs.py --signals --workers 2 --runs 50

is one training, stopped again and again by SIGINT, SIGTERM or SIGKILL, to the launcher, to one
worker or to all of them, at random moments, every second time while a checkpoint is written. Each
time the exit code, what was said and what is in the folder must agree.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from mesh_tensorflow import exit_codes
from mesh_tensorflow.environment import quiet

quiet.import_tensorflow()

import tensorflow as tf  # noqa: E402

from mesh_tensorflow import checkpoint  # noqa: E402

TEXT = "To be, or not to be, that is the question.\nWhether 'tis nobler in the mind\n" * 60
STEPS, SAVE_EVERY = 60, 4
_PYTHONPATH = [p for p in [os.environ.get("PYTHONPATH", "")] if p]


def arguments(model_dir: pathlib.Path, workers: int = 1) -> list[str]:
  """The command line of the trainer, or of the launcher of several workers."""
  text = model_dir.parent / "text.txt"
  text.write_text(TEXT)
  bindings = [
    f"text_file = '{text}'", "num_layers = 1", "d_model = 32", "d_ff = 64", "num_heads = 4",
    "d_kv = 8", "dropout_rate = 0.1", "Unitransformer.max_length = 16",
    "run.sequence_length = {'inputs': 16, 'targets': 16}", "run.batch_size = 12",
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


def start(
  folder: pathlib.Path, log: pathlib.Path, workers: int, more: Sequence[str] = ()
) -> subprocess.Popen:
  """Starts the training."""
  with log.open("a") as f:
    command = [*arguments(folder, workers), *more]
    root = str(pathlib.Path(__file__).parents[1])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *_PYTHONPATH])}
    return subprocess.Popen(command, stdout=f, stderr=subprocess.STDOUT, env=environ)


def children(process: subprocess.Popen) -> list[int]:
  """The ids of the processes that a process has started."""
  found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
  return [int(line) for line in found.stdout.split()]


def kill(process: subprocess.Popen, workers: int, draw: random.Random) -> None:
  """Kills the training, or one of its workers."""
  if workers == 1:
    process.kill()
    return
  pids = children(process)
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


# ---------------------------------------------------------------------- signals

# More steps than all runs do.
_ENDLESS = [f"--gin_param=run.train_steps = {10**9}"]
# A save of the small model is over before a busy machine lets this program see it.
_SLOW_SAVES = ["--module_import=benchmarks.slow_saves"]
_SAVED = re.compile(r"stopped by [^;]*; step (\d+) is saved in")
_LOST = re.compile(r"the steps after the last whole checkpoint \(step (\d+)\) are lost", re.I)
_NOTHING = re.compile(r"no step was done", re.I)


@dataclasses.dataclass(frozen=True)
class Stop:
  """A signal, and what came of it.

  Attributes:
    signal: which.
    to: "launcher", "one" (worker) or "all" (workers).
    stage: "start" (before the first step of the run), "steps", or "save" (inside of a checkpoint).
    code: the exit code.
    said: the kind of the last word: "saved", "lost", "nothing", or "" (none of these).
    step: the step that is named there.
    before: the step of the last whole checkpoint when the run began.
    after: when it had ended.
    damaged: what is wrong with that checkpoint.
  """

  signal: signal.Signals
  to: str
  stage: str
  code: int
  said: str
  step: int | None
  before: int
  after: int
  damaged: list[str]

  @property
  def disagrees(self) -> str:
    """What does not fit together; "" if all does."""
    if self.damaged:
      return f"checkpoint {self.after}: {self.damaged[0]}"
    if self.after < self.before:
      return f"the last checkpoint was {self.before}, and is {self.after}"
    killed = self.signal == signal.SIGKILL
    asked = 128 + self.signal
    # Whoever is killed says nothing; its others lost a worker, which is not what is to blame.
    codes = {asked} if killed else {exit_codes.STOPPED, asked}
    if self.code not in codes:
      return f"exit code {self.code}, not {' or '.join(map(str, sorted(codes)))}"
    if self.said == "saved" and self.step != self.after:
      return f"step {self.step} is said to be saved, {self.after} is"
    if self.said == "lost" and self.step is not None and self.step > self.after:
      return f"step {self.step} is said to be whole, {self.after} is"
    if self.said == "nothing" and self.after != self.before:
      return f"no step is said to be done, and {self.after} is saved after {self.before}"
    if self.code == exit_codes.STOPPED and self.said not in ("saved", "nothing"):
      return f"exit code {self.code}, and nothing is said to be saved"
    if self.code == asked and not killed and self.said == "saved":
      return f"exit code {self.code}, and step {self.step} is said to be saved"
    return ""


def stop_once(
  folder: pathlib.Path, log: pathlib.Path, draw: random.Random, workers: int, in_write: bool
) -> Stop:
  """Starts the training, sends a signal, and waits until all of it has ended."""
  number = draw.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
  to = draw.choice(["launcher", "one", "all"])
  before = last_saved(folder)
  at_start = not in_write and draw.random() < 0.2
  wanted = before + draw.randrange(1, 4 * SAVE_EVERY)
  log.write_text("")
  process = start(folder, log, workers, [*_ENDLESS, *(_SLOW_SAVES if in_write else ())])
  started = time.monotonic()
  wait = draw.uniform(0.5, 12.0)
  while process.poll() is None:
    if at_start:
      if time.monotonic() - started > wait and (to == "launcher" or children(process)):
        break
    elif last_saved(folder) >= wanted and (not in_write or is_writing(folder)):
      break
    time.sleep(0.0005)
  time.sleep(draw.uniform(0.0, 0.2 if in_write else 0.5))
  stepped = "the first step is done" in log.read_text()
  stage = "save" if is_writing(folder) else "steps" if stepped else "start"
  pids = children(process)
  for pid in {"launcher": [process.pid], "one": [draw.choice(pids)] if pids else [], "all": pids}[
    to
  ]:
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, number)
  code = process.wait(timeout=300)
  # As a shell counts, whoever is told of the signal: the launcher, or Python before it is that.
  code = exit_codes.of_signal(-code) if code < 0 else code
  deadline = time.monotonic() + 120
  while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < deadline:
    time.sleep(0.05)
  said, step = _last_word(log.read_text())
  after = last_saved(folder)
  path = str(folder / f"model.ckpt-{after}")
  damaged = [str(x) for x in checkpoint.verify(path)] if after else []
  return Stop(number, to, stage, code, said, step, before, after, damaged)


def _last_word(text: str) -> tuple[str, int | None]:
  """What a training said that it left behind."""
  for kind, pattern in (("saved", _SAVED), ("lost", _LOST), ("nothing", _NOTHING)):
    found = pattern.findall(text)
    if found:
      return kind, int(found[-1]) if kind != "nothing" else None
  return "", None


def stop_again_and_again(folder: pathlib.Path, runs: int, seed: int, workers: int) -> int:
  """Does the runs and prints the table; returns how many of them disagree."""
  draw, model_dir, log = random.Random(seed), folder / "model", folder / "log.txt"
  print(
    f"{workers} workers, a checkpoint every {SAVE_EVERY} steps\n"
    " run  signal   to        when   code  said           before  after",
    flush=True,
  )
  failed = inside = 0
  for i in range(runs):
    stop = stop_once(model_dir, log, draw, workers, in_write=i % 2 == 1)
    said = stop.said if stop.step is None else f"{stop.said} {stop.step}"
    told = f"  {stop.disagrees}" if stop.disagrees else ""
    print(
      f"{i + 1:>4}  {stop.signal.name:<8} {stop.to:<9} {stop.stage:<6} {stop.code:>4}  {said:<14} "
      f"{stop.before:>6} {stop.after:>6}{told}",
      flush=True,
    )
    if stop.disagrees:
      print(log.read_text()[-3000:], file=sys.stderr)
    failed += bool(stop.disagrees)
    inside += stop.stage == "save"
  print(f"{runs - failed} of {runs} agree; {inside} were inside of a save", flush=True)
  return failed


def main() -> int:
  """Parses the command line."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--runs", type=int, default=10)
  parser.add_argument("--kills", type=int, default=1, help="kills in each run")
  parser.add_argument("--workers", type=int, default=1, help="processes of each training")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument(
    "--signals", action="store_true", help="one training, stopped by signals of all kinds"
  )
  args = parser.parse_args()
  if args.signals and args.workers < 2:
    parser.error("--signals is for several workers: --workers 2")
  # A shell starts what runs in the background with SIGINT ignored, and trainings would inherit it.
  signal.signal(signal.SIGINT, signal.default_int_handler)
  with tempfile.TemporaryDirectory() as folder:
    if args.signals:
      return min(1, stop_again_and_again(pathlib.Path(folder), args.runs, args.seed, args.workers))
    return min(1, compare(pathlib.Path(folder), args.runs, args.kills, args.seed, args.workers))


if __name__ == "__main__":
  sys.exit(main())
