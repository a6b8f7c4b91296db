"""What reports are made of: steps, metrics, warnings, the summary, commands, figures of a step."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import pty
import random
import shlex
import struct
import sys
import termios
import threading

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow import errors
from mesh_tensorflow.training import (
  divergence,
  memory_check,
  model_files,
  profiling,
  progress,
  utilization,
)
from mesh_tensorflow.training.reported import ReportSteps
from mesh_tensorflow.training.settings import checked_settings


@pytest.fixture(autouse=True)
def nothing_said():
  model_files._warned.clear()
  model_files._denied.clear()


# ---------------------------------------------------------------------------- steps


def test_reported_are_the_first_step_the_multiples_and_the_last():
  steps = ReportSteps(first=25, last=47, every=10)
  assert steps.between(25, 47) == [26, 30, 40, 47]
  assert steps.between(30, 39) == [] and steps.between(39, 40) == [40]
  assert ReportSteps(0, 3, 1).between(0, 3) == [1, 2, 3]


def test_calls_end_where_a_line_is_due():
  """One step first; then up to the last line within reach, or as far as it may."""
  steps = ReportSteps(0, 1000, 100, ends=(210, 220))
  assert [steps.steps_of_call(0, 50), steps.steps_of_call(1, 50)] == [1, 50]
  assert steps.steps_of_call(51, 60) == 49
  assert steps.steps_of_call(1, 350) == 199  # To 200: behind it a call has to end anyway.
  assert steps.steps_of_call(200, 100) == 10 and steps.steps_of_call(210, 100) == 10
  assert steps.steps_of_call(220, 300) == 280


@pytest.mark.parametrize("norms_every", [None, 1, 3])
def test_norms_are_computed_in_steps_that_have_a_line(norms_every):
  steps = ReportSteps(2, 17, 5, norms_every)
  asked = [bool(steps.norms_wanted(tf.constant(n, tf.int64))) for n in range(2, 17)]
  lines = set(steps.between(2, 17))
  expected = [n in lines or (norms_every and n % norms_every == 0) for n in range(3, 18)]
  assert asked == [bool(x) for x in expected]


# -------------------------------------------------------------------------- metrics


def test_a_run_that_goes_on_takes_out_what_it_does_again(tmp_path):
  first = model_files.MetricsFile(str(tmp_path), 0)
  for step in (1, 10, 20):
    first.write(step, {"loss": 1.0 / step, "gradient_norm": math.nan})
  path = tmp_path / "metrics.jsonl"
  with path.open("a") as f:
    f.write('{"step": 30, "lo')  # It was killed.
  second = model_files.MetricsFile(str(tmp_path), 10)
  second.write(20, {"loss": 7})
  reports = [json.loads(line) for line in path.read_text().splitlines()]
  assert [(r["step"], r["loss"]) for r in reports] == [(1, 1.0), (10, 0.1), (20, 7)]
  assert reports[0]["gradient_norm"] is None  # JSON has no NaN.
  assert model_files.read_metrics(str(tmp_path)) == reports
  model_files.MetricsFile(str(tmp_path), 0)
  assert path.read_text() == ""


def test_metrics_are_not_written_through_a_link(tmp_path):
  victim = tmp_path / "victim"
  victim.write_text('{"step": 1}\n')
  model = tmp_path / "model"
  model.mkdir()
  (model / "metrics.jsonl").symlink_to(victim)
  model_files.MetricsFile(str(model), 5).write(6, {"loss": 1.0})
  assert victim.read_text() == '{"step": 1}\n'
  assert [r["step"] for r in model_files.read_metrics(str(model))] == [1, 6]


def test_a_full_disk_is_told_once(tmp_path, monkeypatch, caplog):
  def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  told = progress.TrainingProgress(0, 4, 10, 1, str(tmp_path), quiet=True)
  told.update(1, [2.0])
  monkeypatch.setattr(model_files, "_append", full)
  for step in (2, 3, 4):
    told.update(step, [1.0])
  told.close()
  (said,) = [r.getMessage() for r in caplog.records if "No space left" in r.getMessage()]
  assert "cannot write metrics.jsonl" in said
  assert [r["step"] for r in model_files.read_metrics(str(tmp_path))] == [1]


# ------------------------------------------------------------------------- progress


def test_losses_of_a_call_are_split_into_lines(tmp_path, capsys):
  """Also those of skipped steps are left out of the mean of their line alone."""
  told = progress.TrainingProgress(0, 8, 10, 3, str(tmp_path))
  told.update(1, [8.0], 0.5)
  values = {"gradient_norm": np.arange(2.0, 9.0, dtype=np.float32)}
  told.update(
    8,
    [4.0, 6.0, 1.0, math.nan, 3.0, 5.0, 7.0],
    lambda n: n / 10,
    bad=[0, 0, 0, 1, 0, 0, 0],
    values=values,
  )
  told.close()
  reports = model_files.read_metrics(str(tmp_path))
  assert [(r["step"], r["loss"]) for r in reports] == [(1, 8.0), (3, 5.0), (6, 2.0), (8, 6.0)]
  assert [r["learning_rate"] for r in reports] == [0.5, 0.2, 0.5, 0.7]
  assert [r.get("gradient_norm") for r in reports] == [None, 3.0, 6.0, 8.0]
  assert "tokens_per_second" not in reports[0] and reports[1]["tokens_per_second"] > 0
  first, *_, last = capsys.readouterr().out.splitlines()
  assert "step       1/8  loss 8.0000  the first step is done, after" in first
  assert "step       8/8  loss 6.0000" in last and last.endswith("1 step(s) skipped")


def test_the_speed_is_without_what_is_left_out(monkeypatch, tmp_path):
  now = [0.0]
  monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
  told = progress.TrainingProgress(0, 100, 10, 10, str(tmp_path), quiet=True)
  told.rates.flops, told.rates.peak_flops = 1000, 4000.0
  for step in (1, 6, 11):
    now[0] += 1.0 if step == 1 else 2.5  # Half a second for a step.
    told.update(step, [1.0] * (1 if step == 1 else 5))
    now[0] += 1000.0  # An evaluation.
    told.restart_clock()
  report = model_files.read_metrics(str(tmp_path))[-1]
  assert report["step"] == 10
  assert report["tokens_per_second"] == pytest.approx(20.0)
  assert report["flops_utilization"] == pytest.approx(0.5)


def test_seconds_that_training_waits_for_input(monkeypatch, tmp_path):
  now = [0.0]
  monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])

  def slow():
    for seconds in (50.0, 0.5, 0.0, 2.0):
      now[0] += seconds
      yield seconds
    now[0] += 7.0  # To find out that it has ended.

  told = progress.TrainingProgress(0, 4, 10, 2, str(tmp_path), quiet=True)
  for step, _ in enumerate(told.inputs("data", slow()), 1):
    now[0] += 1.0  # The step.
    told.update(step, [1.0])
  reports = {r["step"]: r.get("input_wait") for r in model_files.read_metrics(str(tmp_path))}
  assert reports == {1: None, 2: 0.5, 4: 2.0}  # What comes before the first step is the start.


def test_no_utilization_above_1_is_told(caplog):
  draw = random.Random(5)
  above = 0
  for _ in range(200):
    flops, peak = draw.randint(1, 10**12), 10 ** draw.uniform(6, 15)
    rates = progress.Rates(10, flops, peak)
    caplog.clear()
    found = [rates.of(steps) for steps in (10 ** draw.uniform(-3, 4) for _ in range(3))]
    assert all(0 < f.get("flops_utilization", 1) <= 1 for f in found)
    left_out = sum("flops_utilization" not in f for f in found)
    assert len(caplog.records) == min(left_out, 1)  # It is said once.
    above += left_out
  assert above > 100


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_no_product_is_faster_than_the_measured_peak_by_much(dtype):
  impl = mtf.PlacementMeshImpl("all:1", "", ["cpu:0"])
  peak = utilization.peak_flops(None, impl, dtype)
  assert peak >= 0.5 * utilization.peak_flops(None, impl, tf.float32)


def test_on_a_terminal_the_bar_moves_between_lines(monkeypatch):
  master, slave = pty.openpty()
  fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
  shown: list[bytes] = []

  def read() -> None:
    while True:
      try:
        shown.append(os.read(master, 4096))
      except OSError:
        return

  reader = threading.Thread(target=read, daemon=True)
  reader.start()
  with open(slave, "w", closefd=True) as terminal:
    monkeypatch.setattr(sys, "stderr", terminal)
    told = progress.TrainingProgress(0, 400, 10, 100)
    told._bar.mininterval = 0.0
    told.update(1, [5.0])
    for step in (50, 90):
      told.update(step, [4.0] * 10)
    told.close()
    monkeypatch.undo()
  reader.join(10.0)  # It ends when nobody has the terminal open for writing any more.
  os.close(master)
  text = b"".join(shown).decode()
  assert "1/400" in text and "50/400" in text and "90/400" in text and "loss 4.0000" in text


# ----------------------------------------------------------------------- divergence


def test_a_loss_far_over_its_start_is_told_once():
  watch = divergence.DivergenceWatch(0, 1000)
  told = [watch.look(n, loss) for n, loss in enumerate([4.0, 3.0, 5.9, 6.1, 9.0, 3.0, 9.0])]
  assert [len(t) for t in told] == [0, 0, 0, 1, 0, 0, 0]
  assert "loss is 6.1000, far over the 4.0000" in told[3][0] and "learning rate" in told[3][0]


def test_a_loss_that_stays_at_ln_of_the_vocabulary_is_told_after_the_warm_up():
  watch = divergence.DivergenceWatch(0, 5000, vocab_size=64)
  flat = math.log(64) + 0.02
  rates = {100: 0.1, 300: 0.2, 500: 0.3, 600: 0.4, 700: 0.4, 800: 0.4}
  told = {step: watch.look(step, flat, rate) for step, rate in rates.items()}
  assert [step for step, texts in told.items() if texts] == [700]
  assert "ln(vocabulary) = 4.1589" in told[700][0]
  learns = divergence.DivergenceWatch(0, 1000, vocab_size=64)
  assert not any(learns.look(n, 3.0, 0.1) for n in range(100, 1000, 100))
  resumed = divergence.DivergenceWatch(900, 1000, vocab_size=64)
  assert not resumed.look(950, flat, 0.1)  # It has said nothing of its own yet.


def test_exploding_gradients_are_told_of():
  watch = divergence.DivergenceWatch(0, 1000)
  norms = [1.0, 2.0, 1.0, 150.0, 1.0, 1.5, 2.0, 200.0, 900.0]
  told = [watch.look(n, 3.0, norm=norm) for n, norm in enumerate(norms)]
  assert [n for n, texts in enumerate(told) if texts] == [7]
  assert "norm of the gradients is 200, usually 1.5" in told[7][0]
  assert divergence.DivergenceWatch(0, 10).look(1, 3.0, norm=math.inf)


def test_a_norm_of_just_the_limit_is_none_that_explodes():
  watch = divergence.DivergenceWatch(0, 1000)
  told = [watch.look(n, 3.0, norm=norm) for n, norm in enumerate([2.0] * 5 + [200.0, 200.001])]
  assert [n for n, texts in enumerate(told) if texts] == [6]


def test_a_training_is_told_of_its_divergence_and_goes_on(caplog):
  watch = divergence.DivergenceWatch(0, 3)
  told = progress.TrainingProgress(0, 3, 10, 1, quiet=True, watch=watch)
  told.update(3, [1.0, 9.0, 10.0])
  told.close()
  (record,) = [r for r in caplog.records if "far over" in r.getMessage()]
  assert record.levelno == logging.WARNING and "step 2" in record.getMessage()


# -------------------------------------------------------------------------- the end


def test_the_summary_tells_losses_without_those_that_are_no_numbers():
  losses = progress.LossSummary()
  losses.add(10, np.array([math.nan, 5.0, 2.0], np.float32))
  losses.add(13, np.array([3.0, math.inf], np.float32))
  text = progress.end_summary(10, 15, 61.0, losses, {"checkpoint": "m/c"}, [("more", "do it")])
  assert text.splitlines() == [
    "done        5 steps, up to step 15, in 61 s, start-up included",
    "loss        5.0000 at first, 3.0000 at last; the best of one step was 2.0000, step 13",
    "checkpoint  m/c",
    "more        do it",
  ]


def test_what_to_type_next_is_what_was_typed(tmp_path):
  model = "/a folder/m"
  argv = ["/bin/mesh-transformer", f"--model_dir={model}", "--gin_file=my.gin"]
  argv += ["--gin_param=text_file = 'a.txt'", "--gin_param=run.train_steps = 50", "--set=steps=50"]
  (_, sample), (_, more) = progress.next_commands(argv, model, 50)
  assert shlex.split(sample) == [
    "mesh-transformer", "infer", f"--model_dir={model}", "--prompt=..."
  ]  # fmt: skip
  assert shlex.split(more) == [
    "mesh-transformer", *argv[1:4], "--set=run.train_steps=100"
  ]  # fmt: skip
  argv[0] = "/x/transformer/main.py"
  (_, sample), (_, more) = progress.next_commands(argv, model, 50)
  assert sample.startswith("python -m mesh_transformer_cli infer ")
  assert more.startswith("python -m mesh_tensorflow.transformer.main ")
  assert progress.next_commands(["my_program.py"], model, 50) == []


def test_evaluations_are_in_the_summary(capsys):
  told = progress.TrainingProgress(0, 2, 10)
  for step, loss in ((1, 3.0), (2, 3.5)):
    told.scalars(step, {"eval/loss": loss, "eval/token_accuracy": 0.5})
  told.summarize(None)
  assert "eval loss  3.5000 at last; the best was 3.0000, step 1" in capsys.readouterr().out


def test_a_picture_of_the_losses(tmp_path, monkeypatch):
  metrics = model_files.MetricsFile(str(tmp_path), 0)
  assert model_files.draw_losses(str(tmp_path)) is None
  for step in (1, 10):
    metrics.write(step, {"loss": 3.0 / step, "eval/loss": 4.0, "tokens_per_second": 1e6})
  assert model_files._curves(model_files.read_metrics(str(tmp_path))) == {
    "loss": ([1, 10], [3.0, 0.3]), "eval/loss": ([1, 10], [4.0, 4.0]),
  }  # fmt: skip
  if model_files.can_draw():
    assert model_files.draw_losses(str(tmp_path)) == str(tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
  monkeypatch.setattr(model_files, "can_draw", lambda: False)
  told = progress.TrainingProgress(10, 11, 10, summary_dir=str(tmp_path), quiet=True)
  assert "pip install" in told._picture() and "matplotlib" in told._picture()


def test_the_command_of_tensorboard_works_here(monkeypatch):
  monkeypatch.setattr(progress.shutil, "which", lambda _: None)
  monkeypatch.setattr(progress.importlib.util, "find_spec", lambda _: None)
  assert progress.tensorboard_command("a b") == (
    "pip install tensorboard && tensorboard --logdir 'a b'"
  )
  monkeypatch.setattr(progress.shutil, "which", lambda _: "/bin/tensorboard")
  assert progress.tensorboard_command("m") == "tensorboard --logdir m"


# ----------------------------------------------------------------- figures of a step


def test_flops_are_counted_in_loops_and_in_products_only():
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "mesh")
  a, b, c = (mtf.Dimension(*d) for d in [("a", 2), ("b", 3), ("c", 5)])
  x, y = mtf.zeros(mesh, [a, b]), mtf.zeros(mesh, [b, c])
  mtf.einsum([x, y], output_shape=[a, c])
  mtf.reduce_sum(x + x)
  assert utilization.step_flops(graph) == 2 * 30

  def body(i):
    mtf.einsum([x, y], output_shape=[a, c])
    return [i + 1]

  zero = mtf.constant(mesh, 0, dtype=tf.int32)
  mtf.while_loop(lambda i: mtf.less(i, 7), body, [zero], maximum_iterations=7)
  assert utilization.step_flops(graph) == 8 * 2 * 30
  image = mtf.zeros(mesh, [a, mtf.Dimension("h", 6), mtf.Dimension("w", 6), b])
  kernel = mtf.zeros(mesh, [mtf.Dimension("kh", 3), mtf.Dimension("kw", 3), b, c])
  mtf.Conv2dOperation(image, kernel, strides=[1, 1, 1, 1], padding="SAME")
  assert utilization.step_flops(graph) == 8 * 2 * 30 + 2 * (2 * 6 * 6 * 5) * (3 * 3 * 3)


def test_the_peak_is_given_that_of_a_machine_or_measured(cpu_devices):
  impl = mtf.PlacementMeshImpl("all:4", "", cpu_devices[:4])
  peak = lambda given: utilization.peak_flops(given, impl, tf.float32)  # noqa: E731
  assert peak(1e12) == 1e12
  machine = mtf.planning.Machine.load("a100")
  assert peak("a100") == 4 * machine.device.peak("float32")
  assert 1e8 < peak(None) < 1e15
  # That of all stages.
  impl = impl.with_stages([mtf.PlacementMeshImpl("all:2", "", cpu_devices[4:6])])
  assert peak("a100") == 6 * machine.device.peak("float32")


def test_memory_is_that_of_the_process(cpu_devices):
  impl = mtf.PlacementMeshImpl("all:2", "", cpu_devices[:2])
  found = memory_check.used_bytes(impl)
  assert list(found) == ["memory_bytes"] and 1e7 < found["memory_bytes"] < 1e13


def test_memory_of_devices_is_that_of_all_stages(monkeypatch):
  of = {f"GPU:{i}": 1000 * (i + 1) for i in range(3)}
  monkeypatch.setattr(
    tf.config.experimental, "get_memory_info", lambda name: {"current": 0, "peak": of[name]}
  )
  first, second = (
    mtf.PlacementMeshImpl(f"all:{len(d)}", "", d) for d in (["GPU:0"], ["GPU:1", "GPU:2"])
  )
  found = memory_check.used_bytes(first.with_stages([second]))
  assert {n: b for n, b in found.items() if "/" in n} == {
    f"memory_bytes/{n}": b for n, b in of.items()
  }


@pytest.mark.parametrize(
  ("settings", "text"),
  [
    ({"profile_steps": "10"}, r"run.profile_steps = '10': .*\(10, 20\) or '10:20'"),
    ({"profile_steps": (20, 10)}, "run.profile_steps"),
    ({"profile_steps": (1.5, 10)}, "run.profile_steps"),
    ({"norms_every": -1}, "run.norms_every = -1"),
    ({"norms_every": True}, "run.norms_every = True"),
    ({"peak_flops": -1.0}, "run.peak_flops = -1.0"),
    ({"peak_flops": "h10"}, "no machine 'h10'; did you mean 'h100'"),
    ({"peak_flops": [1]}, "run.peak_flops"),
  ],
)
def test_wrong_settings_are_refused(settings, text):
  with pytest.raises(errors.ConfigError, match=text):
    checked_settings(TrainerSettings(**settings))
  assert checked_settings(TrainerSettings(profile_steps=" 3: 4")).profile_steps == (3, 4)


def test_a_profiler_that_cannot_be_had_is_told_of(tmp_path, monkeypatch, caplog):
  def taken(_):
    raise tf.errors.AlreadyExistsError(None, None, "Another profiler is running.")

  monkeypatch.setattr(tf.profiler.experimental, "start", taken)
  said: list[str] = []
  profile = profiling.StepsProfile((1, 3), str(tmp_path), said.append)
  for step in (0, 1, 2, 3):
    profile.before_call(step)
    profile.after_call(step + 1)
  profile.close(4)
  assert said == []
  (record,) = caplog.records
  assert "run.profile_steps: no profile" in record.getMessage()
