"""The launcher of several workers on one machine: exit codes, restarts, signals, its own death."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from mesh_tensorflow import exit_codes
from mesh_tensorflow.workers import launcher_reports, launching, parent_watch

# What workers do here needs neither TensorFlow nor this package.
HEAD = """
import json, os, signal, sys, time
config = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))
index = config["task"]["index"]
def tell(word, number=0):
  pipe, _, worker = os.environ["MTF_LAUNCHER_REPORTS"].split(":")
  os.write(int(pipe), f"{worker} {word} {number}\\n".encode())
"""


def worker(body: str) -> list[str]:
  return [sys.executable, "-S", "-c", HEAD + body]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  monkeypatch.setattr(launching, "_GRACE_SECONDS", 2.0)
  monkeypatch.setattr(launching, "_FIRST_PAUSE_SECONDS", 0.1)


pytestmark = pytest.mark.usefixtures("ctrl_c")


def test_every_worker_finds_the_others(capfd):
  body = "print(index, json.dumps(config['cluster']['worker']), flush=True)"
  assert launching.launch(worker(body), 3) == 0
  out, err = capfd.readouterr()
  told, *of_others = err.splitlines()
  assert told.startswith("launch: workers ")
  lines = out.splitlines() + [line.partition("] ")[2] for line in of_others]
  assert sorted(line[0] for line in lines) == ["0", "1", "2"]
  assert len({line[2:] for line in lines}) == 1
  assert len(set(json.loads(lines[0][2:]))) == 3
  assert sorted(line[:10] for line in of_others) == ["[worker 1]", "[worker 2]"]


def test_one_worker_has_no_tf_config(capfd, monkeypatch):
  monkeypatch.setenv("TF_CONFIG", "{}")
  assert launching.launch(worker("print('TF_CONFIG' in os.environ)"), 1) == 0
  assert capfd.readouterr().out == "False\n"


def test_the_one_that_failed_by_itself_is_told_from_those_that_lost_it(capfd, monkeypatch):
  monkeypatch.setattr(launching, "_GRACE_SECONDS", 60.0)  # It ends by itself, however slowly.
  body = f"time.sleep(0 if index == 0 else 0.5); sys.exit({exit_codes.WORKER_LOST} - 72 * index)"
  assert launching.launch(worker(body), 2) == 3
  assert "launch: worker 1 ended with exit code 3" in capfd.readouterr().err


def test_a_worker_that_was_killed(capfd):
  assert launching.launch(worker("index or os.kill(os.getpid(), signal.SIGKILL)"), 2) == 137
  assert "launch: worker 0 was ended by SIGKILL" in capfd.readouterr().err


@pytest.mark.parametrize("code", [0, 3])
def test_one_that_hangs_while_others_have_ended_is_killed(code, capfd):
  started = time.monotonic()
  body = f"time.sleep(60) if index else sys.exit({code})"
  assert launching.launch(worker(body), 2) == (code or exit_codes.WORKER_LOST)
  assert time.monotonic() - started < 50
  assert "launch: worker 1 does not end, and is killed" in capfd.readouterr().err


@pytest.mark.parametrize("code", [0, 2])
def test_one_that_ends_before_it_joins_is_not_waited_for(code, capfd, monkeypatch):
  """The others are ended as soon as they wait for it; one that does not wait yet is not."""
  monkeypatch.setattr(launching, "_GRACE_SECONDS", 600.0)
  body = f"""
if index == 0: sys.exit({code})
if index == 2: time.sleep(1)
tell("joining")
time.sleep(600)
"""
  assert launching.launch(worker(body), 3) == (code or exit_codes.WORKER_LOST)
  err = capfd.readouterr().err
  for i in (1, 2):
    assert f"launch: worker {i} is ended: it waits for worker 0 to join, which ended before" in err
  assert "SIGTERM" not in err


def test_one_that_ends_after_it_joined_is_left_to_the_others(capfd, monkeypatch):
  monkeypatch.setattr(launching, "_GRACE_SECONDS", 600.0)
  body = """
tell("joining")
tell("joined")
time.sleep(index)
sys.exit(75 if index else 3)
"""
  assert launching.launch(worker(body), 2) == 3
  assert "waits for" not in capfd.readouterr().err


def test_a_newer_checkpoint_resets_the_count_of_restarts(tmp_path, capfd):
  """Steps 4, 4, 8, 12, 12, 12: two in a row without progress are borne, three are not."""
  starts = tmp_path / "starts"
  body = f"""
f = open({str(starts)!r}, "a+"); f.write("x"); f.seek(0)
tell("saved", (4, 4, 8, 12, 12, 12, 99)[len(f.read()) - 1])
sys.exit(75)
"""
  assert launching.launch(worker(body), 1, restarts=2) == 75
  assert starts.read_text() == "x" * 6
  err = capfd.readouterr().err
  told = [line.split("(")[1].split(")")[0] for line in err.splitlines() if " again in " in line]
  steps = [(1, 4), (2, 4), (1, 8), (1, 12), (2, 12)]
  assert told == [f"{n} of 2 since step {step} was saved" for n, step in steps]


def test_reports_are_read_however_they_come(monkeypatch):
  reports = launcher_reports.Reports()
  try:
    for piece in (b"0 joining 0\n1 joi", b"ning 0\n0 joined 0\n0 saved 8\n0 saved 4\n1 sa"):
      os.write(reports.file, piece)
      reports.read()
    assert reports.at == {0: "joined", 1: "joining"}
    assert reports.saved == 8
    reports.read()
    monkeypatch.setitem(os.environ, *next(iter(reports.for_worker(2).items())))
    launcher_reports._end_of_pipe.cache_clear()
    os.write(reports.file, b"ved 9\n")
    for _ in range(20_000):  # More than a pipe holds: a launcher that is stopped holds up nobody.
      launcher_reports.tell(launcher_reports.SAVED, 12)
    reports.read()
    assert reports.saved == 12
    assert launcher_reports.VARIABLE not in os.environ
  finally:
    reports.close()
    launcher_reports._end_of_pipe.cache_clear()


def test_a_run_that_always_fails_is_given_up_after_growing_pauses(tmp_path, capfd):
  starts = tmp_path / "starts"
  body = f"open({str(starts)!r}, 'a').write('x'); sys.exit(75)"
  assert launching.launch(worker(body), 1, restarts=3) == 75
  assert starts.read_text() == "x" * 4
  err = capfd.readouterr().err
  told = [
    line.split(" in ")[1].split(" s ")[0] for line in err.splitlines() if " again in " in line
  ]
  assert told == ["0.1", "0.2", "0.4"]


def test_what_a_restart_does_not_cure_is_not_started_again(tmp_path, capfd):
  for row in exit_codes.TABLE:
    starts = tmp_path / f"starts{row.code}"
    body = f"open({str(starts)!r}, 'a').write('x'); sys.exit({row.code})"
    assert launching.launch(worker(body), 1, restarts=1) == row.code
    err = capfd.readouterr().err
    assert starts.read_text() == ("xx" if row.restart_cures else "x")
    if row.code and not row.restart_cures:
      assert err == f"launch: no worker is started again after exit code {row.code}: {row.why}\n"
    elif row.code:
      assert (
        f"are started again in 0.1 s (1 of 1), since one failed with exit code {row.code}" in err
      )


def test_a_worker_that_somebody_stopped_is_not_started_again(capfd):
  body = "os.kill(os.getpid(), signal.SIGTERM)"
  assert launching.launch(worker(body), 1, restarts=3) == 143
  assert "after exit code 143: it was asked to stop" in capfd.readouterr().err


def test_all_are_started_again_until_it_succeeds(tmp_path):
  starts = tmp_path / "starts"
  body = f"""
f = open({str(starts)!r} + str(index), "a+"); f.write("x"); f.seek(0)
if len(f.read()) < 3: os.kill(os.getpid(), signal.SIGKILL)
"""
  assert launching.launch(worker(body), 2, restarts=5) == 0
  assert [(tmp_path / f"starts{i}").read_text() for i in range(2)] == ["xxx", "xxx"]


def interrupt_after(condition):
  """Ctrl-C to this process, the launcher, as soon as something is so."""

  def wait():
    while not condition():
      time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

  threading.Thread(target=wait, daemon=True).start()


def test_ctrl_c_stops_all_and_starts_none_again(tmp_path, capfd, monkeypatch):
  monkeypatch.setattr(launching, "_GRACE_SECONDS", 60.0)
  body = f"""
def stop(*_):
  open({str(tmp_path / "stopped")!r}, "a").write("x")
  sys.exit(74)
signal.signal(signal.SIGINT, stop)
open({str(tmp_path)!r} + f"/ready{{index}}", "w").close()
time.sleep(60)
"""
  interrupt_after(lambda: len(list(tmp_path.glob("ready*"))) == 2)
  assert launching.launch(worker(body), 2, restarts=5) == 74
  assert (tmp_path / "stopped").read_text() == "xx"
  assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_between_two_attempts(tmp_path, monkeypatch):
  monkeypatch.setattr(launching, "_FIRST_PAUSE_SECONDS", 60.0)
  start = tmp_path / "start"
  interrupt_after(lambda: start.exists() and not time.sleep(1.0))
  body = f"open({str(start)!r}, 'a').write('x'); sys.exit(75)"
  assert launching.launch(worker(body), 1, restarts=5) == 130
  assert start.read_text() == "x"


@pytest.mark.long
@pytest.mark.subprocess
def test_workers_end_with_a_launcher_that_is_killed(tmp_path):
  """By SIGKILL; the workers are asked to stop, and their output going nowhere is no error."""
  watch = pathlib.Path(parent_watch.__file__)
  body = (
    HEAD
    + f"""
sys.path.insert(0, {str(watch.parent)!r})
import parent_watch
def stop(*_):
  print("stops", flush=True)
  open({str(tmp_path)!r} + f"/stopped{{index}}", "w").close()
  sys.exit(74)
signal.signal(signal.SIGTERM, stop)
parent_watch.end_with_launcher()
open({str(tmp_path)!r} + f"/{{os.getpid()}}.ready", "w").close()
while True: time.sleep(0.1)
"""
  )
  command = [sys.executable, "-c", body]
  program = f"from mesh_tensorflow.transformer.launch import launch\nlaunch({command!r}, 2)"
  with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL) as launcher:
    ready = []
    try:
      end = time.monotonic() + 120
      while len(ready) < 2 and time.monotonic() < end:
        ready = list(tmp_path.glob("*.ready"))
        time.sleep(0.05)
    finally:
      launcher.kill()
  assert len(ready) == 2
  end = time.monotonic() + 30
  while any(pathlib.Path(f"/proc/{r.stem}").exists() for r in ready) and time.monotonic() < end:
    time.sleep(0.05)
  assert len(list(tmp_path.glob("stopped*"))) == 2
