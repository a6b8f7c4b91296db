"""Workers that die or hang at any place of the trainer: the others end soon, and name them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time

import pytest

from mesh_tensorflow import exit_codes, workers
from tests.conftest import ROOT
from tests.transformer import worker_processes as program

# (what happens to which worker where, workers, bindings); of all two are tried each time.
FAULTS = [
  ("SIGKILL 0 step/4", 2, []),
  ("SIGSTOP 0 write/8", 2, []),
  ("SIGKILL 1 trace", 2, []),
  ("SIGKILL 0 step/4", 3, []),
  ("SIGSTOP 0 write/8", 3, []),
  ("SIGSTOP 1 write/8", 3, []),
  ("SIGSTOP 0 end", 2, []),
  ("SIGSTOP 2 end", 3, []),
  ("SIGKILL 1 end", 3, []),
  ("SIGKILL 1 write/4", 3, []),
  ("SIGSTOP 1 after join", 3, []),
  ("SIGSTOP 1 trace", 3, []),
  ("SIGSTOP 0 step/4", 3, []),
  ("SIGSTOP 2 step/4", 3, []),
  ("SIGKILL 3 step/4", 4, []),
  ("SIGSTOP 1 eval", 2, ["run.mode = 'perplexity_eval'"]),
  ("SIGKILL 0 eval", 2, ["run.mode = 'perplexity_eval'"]),
  ("SIGSTOP 1 before join", 2, ["workers.join.timeout_seconds = 30"]),
]


@pytest.mark.slow
@pytest.mark.subprocess
@pytest.mark.parametrize(
  ("fault", "count", "bindings"),
  [*FAULTS[:2], *(pytest.param(*fault, marks=pytest.mark.long) for fault in FAULTS[2:])],
)
def test_the_others_end_and_name_it(fault, count, bindings, tmp_path, monkeypatch):
  folder = tmp_path / "model"
  if "eval" in fault:
    program.run(1, program.trainer_arguments(folder, "run.train_steps = 4"))
  lost = int(fault.split()[1])
  arguments = program.trainer_arguments(
    folder, *program.on_mesh(f"batch:{count}", "batch:batch"), *bindings
  )
  monkeypatch.setenv("MTF_FAULT", fault)
  hooks = "--module_import=tests.transformer.fault_hooks"
  with program.processes(tmp_path, count, [*arguments, hooks]) as group:
    group.wait_for(lambda: "fault: " in group.text(lost), may_end=True)
    happened = time.monotonic()
    for i in set(range(count)) - {lost}:
      assert group.wait_of(i, 120) == workers.EXIT_WORKER_LOST, group.text(i)
      print(f"{fault}: worker {i} ended after {time.monotonic() - happened:.0f} s")  # For -s.
      last = group.text(i).splitlines()[-1]
      assert re.search(rf"(: lost|in vain for) worker {lost} \(127.0.0.1:\d+\): ", last), last
    assert time.monotonic() - happened < 120


@pytest.mark.subprocess
def test_a_worker_with_other_settings_is_told(tmp_path):
  arguments = program.trainer_arguments(
    tmp_path / "model", *program.on_mesh("batch:2", "batch:batch")
  )
  more = ["--gin_param=run.seed = 5"]
  with program.processes(tmp_path, 2, arguments, more) as group:
    assert group.wait() == [exit_codes.CONFIGURATION] * 2
    for i in range(2):
      last = group.text(i).splitlines()[-1]
      assert f"worker {i}/2: ConfigError: the workers must run the same program" in last
      assert re.search(r"worker 1 \(127.0.0.1:\d+\) has run.seed = 5. Start the same command", last)


# (fault, exit code of the launcher, what is said)
OF_LAUNCHER = [
  # Not the minute that the launcher gives the others where it does not know why one ended.
  (
    "SIGKILL 1 before join",
    exit_codes.of_signal(signal.SIGKILL),
    "worker 0 is ended: it waits for worker 1 to join, which ended before",
  ),
  ("SIGSTOP 1 step/4", exit_codes.WORKER_LOST, "worker 1 does not end, and is killed"),
  ("SIGTERM 1 after join", exit_codes.STOPPED, "StoppedError: stopped by SIGTERM before training"),
]


@pytest.mark.long
@pytest.mark.subprocess
@pytest.mark.parametrize(("fault", "code", "said"), OF_LAUNCHER)
def test_the_launcher_tells_who_is_to_blame(fault, code, said, tmp_path, monkeypatch):
  arguments = program.trainer_arguments(
    tmp_path / "model", *program.on_mesh("batch:2", "batch:batch")
  )
  monkeypatch.setenv("MTF_FAULT", fault)
  monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
  hooks = "--module_import=tests.transformer.fault_hooks"
  started = time.monotonic()
  ended = subprocess.run(
    program.launcher(2, [*arguments, hooks]), capture_output=True, text=True, timeout=600
  )
  print(f"{fault}: the launcher ended after {time.monotonic() - started:.0f} s")  # For -s.
  assert ended.returncode == code, ended.stderr
  assert said in ended.stderr
