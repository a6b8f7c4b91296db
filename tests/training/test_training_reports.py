"""What a real training shows and writes, and what it writes when it goes on."""

from __future__ import annotations

import json
import pathlib
import re

import pytest
import tensorflow as tf

from mesh_tensorflow.training import model_files, several_steps
from tests.transformer import small_lm, training_program

SETTINGS = (
  "run.iterations_per_loop = 20",
  "run.report_every = 4",
  "run.profile_steps = '5:7'",
  "run.norms_every = 1",
  "run.peak_flops = 1e13",
  "run.save_checkpoints_steps = 5",
  "dropout_rate = 0.0",
)


def scalars(folder: pathlib.Path) -> dict[str, dict[int, float]]:
  """All of the event files, by tag and step."""
  found: dict[str, dict[int, float]] = {}
  for path in sorted(folder.glob("events*")):
    for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
      event = tf.compat.v1.Event.FromString(record)
      for value in event.summary.value:
        found.setdefault(value.tag, {})[event.step] = float(tf.make_ndarray(value.tensor))
  return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """The folder of a run of 10 steps and of one that goes on to 13, what they said, their losses."""
  folder = tmp_path_factory.mktemp("reports")
  with pytest.MonkeyPatch.context() as patch:
    said: list[str] = []
    patch.setattr("builtins.print", lambda *args, **_: said.append(" ".join(map(str, args))))
    # However slow the machine is: as many steps in a call as there may be.
    patch.setattr(several_steps.CallLengths, "measured", lambda self, *_: setattr(self, "most", 20))
    losses = small_lm.run(folder, *SETTINGS, "run.train_steps = 10", text=small_lm.TEXT)
    (folder / "model" / "metrics.jsonl").open("a").write('{"step": 12, "loss": 0.5}\n{"st')
    more = small_lm.run(folder, *SETTINGS, "run.train_steps = 13")
  return folder / "model", "\n".join(said), [*losses, *more]


def test_lines_come_for_the_first_step_the_multiples_and_the_last(trained):
  """With 20 steps in a call, too."""
  _, said, losses = trained
  lines = [line for line in said.splitlines() if line.startswith("step ")]
  steps = [line.split()[1] for line in lines]
  assert steps == ["1/10", "4/10", "8/10", "10/10", "11/13", "12/13", "13/13"]
  assert f"loss {losses[0]:.4f}  the first step is done, after " in lines[0]
  parts = re.search(r"\((.*)\)$", lines[0])
  assert [p.split()[0] for p in parts[1].split(", ")] == ["data", "tracing", "TensorFlow"]
  assert f"loss {sum(losses[1:4]) / 3:.4f}" in lines[1] and "tokens/s" in lines[1]
  assert said.index("the training program is built") < said.index(lines[0])


def test_the_end_is_summarized(trained):
  model, said, losses = trained
  first, second = said.split("done  ")[1:]
  assert "10 steps, up to step 10, in " in first and "3 steps, up to step 13" in second
  assert f"{losses[0]:.4f} at first, {losses[9]:.4f} at last; the best of one step" in first
  assert f"{model}/model.ckpt-10" in first and f"{model}/model.ckpt-13" in second
  assert f"tensorboard --logdir {model}" in first
  drawn = (model / "loss.png").exists()
  assert drawn == model_files.can_draw() and (drawn or model_files.HINT in first)


def test_metrics_are_those_of_the_lines_each_once(trained):
  model, _, losses = trained
  reports = [json.loads(line) for line in (model / "metrics.jsonl").read_text().splitlines()]
  assert [r["step"] for r in reports] == [1, 4, 8, 10, 11, 12, 13]
  assert reports[1]["loss"] == pytest.approx(sum(losses[1:4]) / 3, rel=1e-6)
  assert reports[5]["loss"] == pytest.approx(losses[11], rel=1e-6)  # Not what was told before.
  for report in reports:
    assert {"time", "learning_rate", "gradient_norm", "parameter_norm"} <= set(report)
    assert report["gradient_norm"] > 0 < report["parameter_norm"] and report["memory_bytes"] > 1e7
  used = reports[1]["flops_utilization"] / reports[1]["tokens_per_second"]
  again = reports[2]["flops_utilization"] / reports[2]["tokens_per_second"]
  assert used == pytest.approx(again, rel=1e-5)  # FLOPs of a token over the peak.
  assert 1e3 < used * 1e13 < 1e6


def test_tensorboard_has_losses_and_norms_of_each_step(trained):
  model, _, losses = trained
  found = scalars(model)
  assert list(found["loss"].values()) == pytest.approx(losses, rel=1e-6)
  for name in ("gradient_norm", "parameter_norm", "update_norm"):
    assert sorted(found[name]) == list(range(1, 14))
  assert sorted(found["tokens_per_second"]) == [4, 8, 10, 12, 13]
  assert sorted(found["memory_bytes"]) == [1, 4, 8, 10, 11, 12, 13]


@pytest.mark.slow
def test_a_profile_of_some_steps_is_written_and_read(trained):
  model, said, _ = trained
  assert list((model / "plugins" / "profile").rglob("*.xplane.pb"))
  table = said[said.index("profile of steps 6 to 7 in") :].splitlines()
  assert "ms in each step" in table[1]
  rows = [line.split() for line in table[2:] if "%" in line]
  assert 5 <= len(rows) <= 10 and all(float(r[2].rstrip("%")) <= 100 for r in rows)
  assert said.count("profile of steps") == 1


def test_a_training_without_a_folder_reports_lines_alone(capsys):
  trainer = training_program.make_trainer(report_every=2, dropout=False, quiet=False)
  trainer.train(training_program.dataset, 3)
  said = capsys.readouterr().out
  assert [line.split()[1] for line in said.splitlines() if line.startswith("step ")] == [
    "1/3", "2/3", "3/3",
  ]  # fmt: skip
  assert "done  " in said and "metrics" not in said
  assert trainer.loop._reported is None  # No norms are computed that nobody would see.
