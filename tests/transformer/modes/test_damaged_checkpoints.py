"""Modes of the trainer on a folder whose newest checkpoint is damaged, by `utils.run`."""

from __future__ import annotations

import pathlib
import shutil

import gin
import pytest

from mesh_tensorflow import checkpoint
from mesh_tensorflow.transformer import gin_config, utils
from tests.kinds import kept
from tests.transformer import worker_processes as program

BINDINGS = [
  *program.SMALL,
  *program.on_mesh("", ""),
  "d_model = 16",
  "d_ff = 32",
  "num_heads = 2",
  "run.batch_size = 4",
  "run.learning_rate_schedule = 0.01",
  "run.iterations_per_loop = 3",
  "run.save_checkpoints_steps = 3",
  "run.checkpoint_input_pipeline = True",
  "get_variable_dtype.master_dtype = 'float32'",
]
# Files of a checkpoint of this training, by their ends.
SUFFIXES = [
  ".index",
  ".data-00000-of-00001",
  ".manifest",
  ".with-input_pipeline-00000.index",
  ".with-input_pipeline-00000.data-00000-of-00001",
  ".with-config-00000.json",
  ".with-run-00000.json",
]
FILES = [f"model.ckpt-6{s}" for s in SUFFIXES] + ["checkpoint"]
# What a training writes beside its checkpoints.
OTHERS = (
  *("events.", "loss.png", "manifest.json", "metrics.jsonl", "operative_config.gin"),
  *("training.lock", "vocabularies"),
)


def run(folder: pathlib.Path, *bindings: str):
  gin.clear_config()
  text = folder.parent / "text.txt"
  text.write_text(program.TEXT)
  files = ["problems/tinyshakespeare.gin"]
  gin_config.parse_gin(files, [f"text_file = '{text}'", *BINDINGS, *bindings])
  try:
    return utils.run(None, None, None, None, str(folder))
  finally:
    gin.clear_config()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
  """(values of step 9 of a training without incident, a folder of one that ended at step 6)"""
  folder = tmp_path_factory.mktemp("damage")
  run(folder / "whole", "run.train_steps = 9")
  run(folder / "six", "run.train_steps = 6")
  names = {p.name for p in (folder / "six").iterdir() if not p.name.startswith(OTHERS)}
  assert names == {*FILES, *(f"model.ckpt-3{s}" for s in SUFFIXES)}
  return program.checkpoint_values(folder / "whole", 9), folder / "six"


@pytest.fixture
def six(undisturbed, tmp_path):
  """A copy of the folder of the training that ended at step 6."""
  return pathlib.Path(shutil.copytree(undisturbed[1], tmp_path / "model"))


def content_of(folder: pathlib.Path) -> dict[str, bytes]:
  files = [p for p in folder.iterdir() if not p.name.startswith(OTHERS)]
  return {p.name: p.read_bytes() for p in files}


def damage(file: pathlib.Path, kind: str) -> str:
  """Changes one bit, or cuts the tail."""
  content = bytearray(file.read_bytes())
  content[len(content) // 2] ^= 16
  file.write_bytes(content if kind == "flip" else content[: -min(5, len(content) // 2)])
  return str(file)


# Of the checkpoint itself, beside it, of the folder; tests/checkpoint damages every file.
USUAL = [(FILES[0], "cut"), (FILES[5], "flip"), ("checkpoint", "cut")]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "kind"), kept([(name, kind) for name in FILES for kind in ("flip", "cut")], USUAL)
)
def test_training_goes_on_from_the_one_before(
  name, kind, undisturbed, six, monkeypatch, caplog, capsys
):
  """It ends with the same weights, bit for bit; and till its next save it changes nothing else."""
  damaged = damage(six / name, kind)
  before, at_first_save = content_of(six), []
  save = checkpoint.Checkpointer.save

  def look_and_save(checkpointer, *args, **kwargs):
    if not at_first_save:
      at_first_save.append(content_of(six))
    return save(checkpointer, *args, **kwargs)

  monkeypatch.setattr(checkpoint.Checkpointer, "save", look_and_save)
  losses = run(six, "run.train_steps = 9")
  # Without the state file the names decide which one is the newest.
  newest = 6 if name == "checkpoint" else 3
  assert len(losses) == 9 - newest
  assert f"restored {six}/model.ckpt-{newest}\n" in capsys.readouterr().out
  (warning,) = {r.getMessage() for r in caplog.records if "damaged" in r.getMessage()}
  assert f"{damaged} " in warning
  assert at_first_save[0] == before
  assert program.checkpoint_values(six, 9) == undisturbed[0]
  assert checkpoint.verify(str(six / "model.ckpt-6")) == []


@pytest.mark.slow
def test_without_manifests_the_tensors_are_read(undisturbed, six, caplog, capsys):
  """As in a folder of an earlier version: its newest checkpoint is found to be damaged in time."""
  for manifest in six.glob("*.manifest"):
    manifest.unlink()
  data = damage(six / FILES[1], "flip")
  run(six, "run.train_steps = 9")
  assert f"restored {six}/model.ckpt-3\n" in capsys.readouterr().out
  assert f"cannot read {data}: " in caplog.text
  assert program.checkpoint_values(six, 9) == undisturbed[0]


EVAL = ["run.mode = 'perplexity_eval'", "run.dataset_split = 'validation'"]
EVAL.append("run.perplexity_eval_steps = 2")


@pytest.mark.slow
def test_other_modes_name_it_and_take_the_one_before(six, caplog, capsys):
  def seen_steps(step):
    caplog.clear()
    run(six, *EVAL, f"run.eval_checkpoint_step = {step}")
    lines = capsys.readouterr().out.split("\n")
    return list(dict.fromkeys(line.split()[1] for line in lines if line.startswith("step ")))

  assert seen_steps("'all'") == ["3", "6"]
  data = damage(six / FILES[1], "flip")
  for step in (None, -1, "'all'"):
    assert seen_steps(step) == ["3"]
    assert data in caplog.text
  assert seen_steps(3) == ["3"] and data not in caplog.text
  with pytest.raises(checkpoint.DamagedCheckpointError, match=f"{data} has .* but other content"):
    seen_steps(6)
  prompts = six / "prompts.txt"
  prompts.write_text("To be\n")
  names = [f"decode_from_file.input_filename = '{prompts}'"]
  names.append(f"decode_from_file.output_filename = '{six}/out'")
  run(six, "run.mode = 'infer'", *names)
  assert (six / "out-3").exists() and not (six / "out-6").exists()
  damage(six / "model.ckpt-3.manifest", "cut")
  for step in (-1, "'all'"):
    with pytest.raises(checkpoint.DamagedCheckpointError, match="manifest"):
      seen_steps(step)


@pytest.mark.slow
def test_evaluation_of_new_checkpoints(six, caplog, capsys):
  """One that is damaged is left out, and the next good one comes."""
  data = damage(six / FILES[1], "cut")
  new = "run.eval_checkpoint_step = 'new'"
  run(six, *EVAL, new, "get_checkpoint_iterator.stop_after = 3")
  assert "step 3  " in capsys.readouterr().out
  assert data in caplog.text


@pytest.mark.slow
def test_starting_from_a_damaged_checkpoint(six, tmp_path, caplog, capsys):
  data = damage(six / FILES[1], "flip")
  with pytest.raises(checkpoint.DamagedCheckpointError, match=data):
    run(tmp_path / "new", f"run.init_checkpoint = '{six}/model.ckpt-6'")
  run(tmp_path / "new", f"run.init_checkpoint = '{six}'", "run.train_steps = 4")
  assert f"started from {six}/model.ckpt-3: " in capsys.readouterr().out
  assert data in caplog.text
