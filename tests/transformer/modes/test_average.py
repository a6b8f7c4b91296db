"""The mode and the command "average": the mean of several checkpoints as a model of its own."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow import checkpoint, errors, optimize
from tests.transformer import small_lm

EMA = "run.ema_decay = 0.5"
STEPS = [2, 4, 6]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """A folder with the `model` of a training, its checkpoints those of `STEPS`."""
  folder = tmp_path_factory.mktemp("trained")
  every = ("run.train_steps = 6", "run.save_checkpoints_steps = 2")
  small_lm.run(folder, *every, EMA, "run.vocabulary = 'characters'", text=small_lm.TEXT)
  return folder


@pytest.fixture
def output(tmp_path: pathlib.Path, trained: pathlib.Path) -> pathlib.Path:
  """A folder with the same text, and no model yet."""
  shutil.copy(trained / "text.txt", tmp_path)
  return tmp_path


def average(folder: pathlib.Path, output: pathlib.Path, count: int = 3, *more: str) -> str:
  path: str = small_lm.run(
    folder,
    "run.mode = 'average'",
    "run.vocabulary = 'characters'",
    f"run.average_checkpoints = {count}",
    f"run.export_path = '{output}'",
    *more,
  )
  return path


def loss(folder: pathlib.Path, *more: str) -> float:
  found = small_lm.run(folder, *small_lm.EVAL, "run.vocabulary = 'characters'", *more)
  return float(found["validation"]["loss"])


def values(path: pathlib.Path | str) -> dict[str, np.ndarray]:
  reader = tf.train.load_checkpoint(str(path))
  return {n: reader.get_tensor(n) for n in reader.get_variable_to_shape_map()}


def files(folder: pathlib.Path) -> dict[str, bytes]:
  return {
    str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
  }


@pytest.mark.parametrize(
  ("count", "more", "steps"),
  [
    (3, (), [2, 4, 6]),
    (2, (), [4, 6]),
    (2, ("run.export_checkpoint_step = 4",), [2, 4]),
    (2, ("run.use_ema = True",), [4, 6]),
    (2, ("run.mesh_shape = 'model:2'", "run.layout_rules = 'd_ff:model,heads:model'"), [4, 6]),
  ],
)
def test_means_of_what_is_in_the_checkpoints(
  trained: pathlib.Path,
  output: pathlib.Path,
  capsys: Any,
  count: int,
  more: tuple[str, ...],
  steps: list[int],
) -> None:
  before = files(trained)
  path = average(trained, output / "model", count, *more)
  assert files(trained) == before  # Nothing is changed, and nothing added.
  assert path == str(output / "model" / f"model.ckpt-{steps[-1]}")
  out = capsys.readouterr().out
  assert f"averaged the weights of {count} checkpoints: steps {', '.join(map(str, steps))}\n" in out
  assert f"step {steps[-1]} written: {path}\n" in out
  given, found = [values(trained / "model" / f"model.ckpt-{s}") for s in steps], values(path)
  weights = [n for n in found if n != checkpoint.GLOBAL_STEP]
  assert found[checkpoint.GLOBAL_STEP] == steps[-1]
  assert len(weights) > 5 and not [n for n in weights if "_slot_" in n or "adam" in n]
  averages_used = "run.use_ema = True" in more
  for name in weights:
    key = optimize.averaged_name(name) if averages_used else name
    want = np.mean([v[key] for v in given], 0)
    np.testing.assert_allclose(found[name], want, rtol=1e-5, atol=1e-6, err_msg=name)
    assert np.abs(want - given[-1][name]).max() > 1e-6 or np.ptp(want) == 0
  told = json.loads((output / "model" / "manifest.json").read_text())
  assert told["average_of"] == {
    "folder": str(trained / "model"),
    "steps": steps,
    "use_ema": averages_used,
  }
  of_training = json.loads((trained / "model" / "manifest.json").read_text())
  assert {k: v for k, v in told.items() if k != "average_of"} == of_training
  assert json.loads(pathlib.Path(f"{path}.with-run-00000.json").read_text()) == told
  assert not checkpoint.verify(path)


def test_the_folder_is_a_model_as_any_other(
  trained: pathlib.Path, output: pathlib.Path, capsys: Any
) -> None:
  average(trained, output / "model", 3)
  # Of the text nothing is read to make the vocabulary: it is that of the model.
  assert files(output / "model" / "vocabularies") == files(trained / "model" / "vocabularies")
  expected = loss(trained, "run.average_checkpoints = 3")
  assert loss(output) == pytest.approx(expected, rel=1e-6) != loss(trained)
  vocabulary = "run.vocabulary = 'characters'"
  asked = "run.average_checkpoints = 3"
  prompts = ["To be", "Whether"]
  assert small_lm.infer(output, prompts, vocabulary, step=6) == small_lm.infer(
    trained, prompts, vocabulary, asked, step=6
  )
  exported = small_lm.run(
    output, "run.mode = 'export_score'", vocabulary, f"run.export_path = '{output}/exported'"
  )
  assert (pathlib.Path(exported) / "saved_model.pb").exists()
  # It can be averaged no further, and a training may start from it.
  with pytest.raises(errors.CheckpointError, match="is 2, and up to step 6 there is 1 check"):
    average(output, output / "more", 2)
  assert not (output / "more").exists()
  capsys.readouterr()
  new = output / "new"
  new.mkdir()
  start = f"run.init_checkpoint = '{output}/model'"
  losses = small_lm.run(new, vocabulary, start, "run.train_steps = 8", text=small_lm.TEXT)
  assert len(losses) == 2 and f"started from {output}/model/model.ckpt-6" in capsys.readouterr().out


@pytest.mark.parametrize("with_average", [False, True])
def test_the_configuration_does_not_ask_for_the_mean_again(
  trained: pathlib.Path, output: pathlib.Path, with_average: bool
) -> None:
  """What the training's settings say of means is done; all else stays as it was."""
  source = output / "source"
  shutil.copytree(trained / "model", source / "model")
  config = source / "model" / "operative_config.gin"
  text = config.read_text()
  if with_average:
    text = text.replace("run.use_ema = False  # default", "run.use_ema = True  # --gin_param")
    text = re.sub(r"run.average_checkpoints = 1 .*", "run.average_checkpoints = 2", text)
    config.write_text(text)
    assert "run.use_ema = True" in text and "run.average_checkpoints = 2" in text
  shutil.copy(trained / "text.txt", source)
  average(source, output / "model", 2)
  lines = (output / "model" / "operative_config.gin").read_text().splitlines()
  assert "run.use_ema = False" in lines and "run.average_checkpoints = 1" in lines
  same = [x for x in lines if "run.use_ema" not in x and "run.average_checkpoints" not in x]
  old = text.splitlines()
  assert same == [x for x in old if "run.use_ema" not in x and "run.average_checkpoints" not in x]


def test_what_is_wrong_is_told_and_nothing_is_written(
  trained: pathlib.Path, output: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
  before, there = files(trained), output / "there"
  there.mkdir()
  (there / "notes.txt").write_text("mine")
  (output / "link").symlink_to(trained / "model")
  vocabulary, mode = "run.vocabulary = 'characters'", "run.mode = 'average'"
  for error, what, arguments in (
    (errors.CheckpointError, "there are 3 checkpoints .*keep_checkpoint_max", (output / "a", 4)),
    (errors.ConfigError, "the folder of the model itself", (trained / "model", 2)),
    (errors.ConfigError, "the folder of the model itself", (output / "link", 2)),
    (errors.ConfigError, "there exists, and nothing in it is overwritten", (there, 2)),
    (errors.ConfigError, "text.txt exists", (output / "text.txt", 2)),
    (errors.ConfigError, "average_checkpoints is 1: say how many", (output / "a", 1)),
    (
      errors.CheckpointError,
      "no checkpoint of step 5 .*2, 4, 6",
      (output / "a", 2, "run.export_checkpoint_step = 5"),
    ),
  ):
    with pytest.raises(error, match=what):
      average(trained, *arguments)
  with pytest.raises(errors.ConfigError, match="export_path is not bound: .*--output=DIR"):
    small_lm.run(trained, mode, vocabulary, "run.average_checkpoints = 2")
  empty = tmp_path_factory.mktemp("empty")
  with pytest.raises(errors.ConfigError, match="there is no checkpoint in .*; train first"):
    shutil.copy(trained / "text.txt", empty)
    average(empty, output / "a", 2)
  assert files(trained) == before and not (output / "a").exists()
  assert (there / "notes.txt").read_text() == "mine" and len(list(there.iterdir())) == 1


def test_of_all_checkpoints_the_first_have_too_few_before_them(
  trained: pathlib.Path, capsys: Any, caplog: Any
) -> None:
  all_of_them = "run.eval_checkpoint_step = 'all'"
  last = loss(trained, "run.average_checkpoints = 2")
  capsys.readouterr()
  assert loss(trained, "run.average_checkpoints = 2", all_of_them) == pytest.approx(last, rel=1e-6)
  assert re.findall(r"^step (\d+)  validation", capsys.readouterr().out, re.MULTILINE) == ["4", "6"]
  assert "left out: run.average_checkpoints (--last" in caplog.text
  with pytest.raises(
    errors.CheckpointError, match="is 4, and up to step 6 there are 3 checkpoints"
  ):
    loss(trained, "run.average_checkpoints = 4", all_of_them)


@pytest.mark.parametrize("damage", ["another shape", "a damaged file"])
def test_checkpoints_that_cannot_be_averaged(
  trained: pathlib.Path, output: pathlib.Path, damage: str
) -> None:
  source = output / "source"
  shutil.copytree(trained / "model", source / "model")
  shutil.copy(trained / "text.txt", source)
  data = source / "model" / "model.ckpt-4.data-00000-of-00001"
  if damage == "a damaged file":
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    error, what = errors.DamagedCheckpointError, "model.ckpt-4"
  else:
    other = output / "other"
    other.mkdir()
    wider = ("d_ff = 24", "run.train_steps = 4", "run.vocabulary = 'characters'")
    small_lm.run(other, *wider, text=small_lm.TEXT)
    for file in (source / "model").glob("model.ckpt-4.*"):
      file.unlink()
    for file in (other / "model").glob("model.ckpt-4.*"):
      shutil.copy(file, source / "model")
    # Also without the record of the model, which would tell it first.
    (source / "model" / "model.ckpt-4.with-config-00000.json").unlink()
    (source / "model" / "model.ckpt-4.manifest").unlink()
    error, what = errors.CheckpointError, "model.ckpt-4.*24 in the checkpoint, 16 here"
  with pytest.raises(error, match=f"(?s){what}"):
    average(source, output / "a", 3)
  assert not (output / "a").exists()


@pytest.mark.long
@pytest.mark.subprocess
def test_the_command(trained: pathlib.Path, output: pathlib.Path, run_subprocess: Any) -> None:
  """The real binary; what it writes needs no gin file, and has the loss of the mean."""

  def program(*words: str, code: int = 0) -> str:
    done = run_subprocess(["-m", "mesh_transformer_cli", *words], timeout=240, check=False)
    assert done.returncode == code, done.stderr
    return str(done.stdout + done.stderr)

  model, new = f"--model_dir={trained}/model", output / "averaged"
  out = program("average", model, f"--output={new}", "--last=3")
  assert "averaged the weights of 3 checkpoints: steps 2, 4, 6" in out
  assert f"step 6 written: {new}/model.ckpt-6" in out
  mean = "--gin_param=run.average_checkpoints = 3"
  of_folder, of_mean = program("eval", f"--model_dir={new}"), program("eval", model, mean)
  lines = [
    next(x for x in text.splitlines() if x.startswith("step 6  validation: loss"))
    for text in (of_folder, of_mean)
  ]
  assert lines[0] == lines[1]
  again = program("average", model, f"--output={new}", code=2)
  assert f"ConfigError: run.export_path (--output): {new} exists" in again
  assert "--output=DIR is needed" in program("average", model, code=2)
