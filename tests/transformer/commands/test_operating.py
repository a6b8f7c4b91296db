"""Every exit code once, of the real program, and the one line that says why."""

from __future__ import annotations

import json
import re

import pytest

from mesh_tensorflow import checkpoint, exit_codes
from tests.transformer import worker_processes as program

# Python modules that a user names with --module_import.
MODULES = {
  "fails": "raise ValueError('of a program of my own')",
  "nan": """
import tensorflow as tf
from mesh_tensorflow.training.loop import LearningRate
LearningRate.of = lambda self, step: tf.constant(float("nan"))
""",
  "sigterm": """
import os, signal, threading
from mesh_tensorflow.training import stopping
running = stopping.StopRequests.running
def with_signal(self, done, saved):
  running(self, done, saved)
  threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
stopping.StopRequests.running = with_signal
""",
  "lost": """
from mesh_tensorflow.errors import WorkerLostError
from mesh_tensorflow.transformer.commands import trainer
def lost(*args, **kwargs):
  raise WorkerLostError("lost worker 1 (host:1)")
trainer.run = lost
""",
  "no_memory": """
from mesh_tensorflow.meshes import memory
memory.available_bytes = lambda: 10_000
""",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory, run_forked):
  """How the real program ended, by the name of the case: (exit code, stdout, stderr)."""
  folder = tmp_path_factory.mktemp("operating")
  for name, text in MODULES.items():
    (folder / f"{name}.py").write_text(text)
  model = str(folder / "model")

  def case(*bindings, model="model", module=None, more=(), **options):
    arguments = [*program.trainer_arguments(folder / model, *bindings), *more]
    if module:
      arguments.append(f"--module_import={module}")
    return {"arguments": arguments, **options}

  long_calls = ["run.train_steps = 100000", "run.iterations_per_loop = 2000"]
  further = "run.train_steps = 20"
  cases = {
    "done": case(),
    "other": case(module="fails"),
    "configuration": case("run.batch_size = 0"),
    "flag": case(more=["--gin_params=x"]),
    "argument": case(more=["model_dir"]),
    "lost": case(module="lost"),
    "lock": case(further, lock=model),
    "numbers": case(model="nan", module="nan"),
    "storage": case(model="full", largest_file=50_000),
    "memory": case(model="large", module="no_memory"),
    "stopped": case(*long_calls, "run.save_checkpoints_steps = 0", model="long", module="sigterm"),
    "damage": case(
      "run.mode = 'perplexity_eval'", "run.eval_checkpoint_step = 8",
      "run.dataset_split = 'validation'", damage=model,
    ),
  }  # fmt: skip
  file = folder / "cases.json"
  file.write_text(json.dumps(list(cases.values())))
  arguments = ["-m", "tests.transformer.forked_mains", file]
  done = run_forked(arguments, env={"PYTHONPATH": str(folder)}, timeout=500)
  results = dict(zip(cases, json.loads(done.stdout.splitlines()[-1])))
  return {name: tuple(result) for name, result in results.items()} | {"folder": folder}


@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.parametrize(
  ("name", "code", "words"),
  [
    ("other", 1, r"^ValueError: of a program of my own"),
    (
      "configuration",
      2,
      r"^ConfigError: gin: --gin_param 'run.batch_size = 0': run.batch_size = 0",
    ),
    ("flag", 2, r"gin_params"),
    ("argument", 2, r"unknown arguments: model_dir"),
    ("memory", 2, r"^OutOfMemoryError: the training program needs about .* 10.0 KB free"),
    ("numbers", 3, r"^NonFiniteError: .*(NaN|nan)"),
    ("storage", 4, r"^StorageError: .*File too large"),
    ("damage", 5, r"^DamagedCheckpointError: "),
    ("lock", 6, r"^LockedError: another training uses .* \(process \d+ on"),
    (
      "stopped",
      74,
      r"^StoppedError: stopped by SIGTERM; step \d+ is saved in .* steps remain\. The",
    ),
    ("lost", 75, r"^WorkerLostError: lost worker 1"),
  ],
)
def test_exit_code(ended, name, code, words):
  found, out, err = ended[name]
  assert found == code, out + err
  line = next((x for x in err.splitlines() if re.search(words, x)), None)
  assert line, err
  if code != exit_codes.OTHER:
    assert "Traceback" not in err
    assert err.count(line) == 1 and len(err.splitlines()) <= 4, err


@pytest.mark.slow
@pytest.mark.subprocess
def test_every_row_of_the_table_was_seen(ended):
  found, out, err = ended["done"]
  assert found == exit_codes.DONE and "step       8/8" in out, out + err
  codes = {result[0] for name, result in ended.items() if name != "folder"}
  assert codes == {row.code for row in exit_codes.TABLE}


@pytest.mark.slow
@pytest.mark.subprocess
def test_a_long_call_was_stopped_and_saved(ended):
  """A call of 2,000 steps, of 100,000: it ended early, and nothing that was done is lost."""
  err = ended["stopped"][2]
  step, left = map(int, re.search(r"; step (\d+) is saved in .*; (\d+) of 100000", err).groups())
  assert 0 < step < 2000 and step + left == 100_000
  newest = checkpoint.latest_checkpoint(str(ended["folder"] / "long"))
  assert newest.endswith(f"model.ckpt-{step}")
  assert not list((ended["folder"] / "large").glob("model.ckpt*"))
