"""The folder of a model: links in it lead nowhere, who reads it need not write, steps are named."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import shutil
import subprocess

import gin
import pytest
import tensorflow as tf

from mesh_tensorflow import checkpoint, errors
from mesh_tensorflow.checkpoint import writer
from mesh_tensorflow.training import model_files, progress, run_lock
from mesh_tensorflow.transformer import main
from mesh_tensorflow.transformer.modes import chosen_checkpoints
from tests.transformer import small_checkpoints, small_lm, training_program

INFER = ("run.mode = 'infer'", "decode_from_file.input_filename = 'FOLDER/prompts'")
PERPLEXITY = ("run.mode = 'perplexity_eval'", "run.dataset_split = 'validation'")
PERPLEXITY += ("run.perplexity_eval_steps = 1",)


@pytest.fixture(autouse=True)
def nothing_said():
  model_files._warned.clear()
  model_files._denied.clear()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """A folder with a model that was trained for two steps."""
  folder = tmp_path_factory.mktemp("trained")
  small_lm.run(folder, text=small_lm.TEXT)
  (folder / "prompts").write_text("To be\n")
  yield folder
  gin.clear_config()


@pytest.fixture
def folder(trained, tmp_path):
  """A copy of it."""
  return pathlib.Path(shutil.copytree(trained, tmp_path / "copy"))


def content_of(place: pathlib.Path) -> dict[str, bytes]:
  return {str(p.relative_to(place)): p.read_bytes() for p in place.rglob("*") if p.is_file()}


# ---------------------------------------------------------------------------- links


@pytest.mark.parametrize("kind", ["symbolic", "hard"])
@pytest.mark.slow
def test_files_of_a_run_are_not_written_through_links(kind, folder, tmp_path):
  """Training, its command line, its lock, and what evaluation notes."""
  model, victim = folder / "model", tmp_path / "victim"
  victim.mkdir()
  names = ["command", "operative_config.gin", "operative_config.gin.tmp", "command.1"]
  for name in names:
    (model / name).unlink(missing_ok=True)
    if name != "command.1":  # That one is to be made.
      (victim / name).write_text("precious")
    if kind == "hard" and name != "command.1":
      (model / name).hardlink_to(victim / name)
    else:
      (model / name).symlink_to(victim / name)
  (model / "validation_eval").symlink_to(victim)
  before = content_of(victim)
  main.write_command(str(model), ["program", "--flag"])
  main.write_command(str(model), ["program", "--flag"])
  small_lm.run(folder, "run.train_steps = 3", "run.keep_checkpoint_max = 1")
  small_lm.run(folder, *small_lm.EVAL, "run.perplexity_eval_steps = 1")
  assert content_of(victim) == before
  assert [p.name for p in model.glob("model.ckpt-*.index")] == ["model.ckpt-3.index"]
  assert "run.train_steps = 3" in (model / "operative_config.gin").read_text()


def test_vocabularies_that_would_be_kept_elsewhere(tmp_path):
  (tmp_path / "victim").mkdir()
  (tmp_path / "model").mkdir()
  (tmp_path / "model" / "vocabularies").symlink_to(tmp_path / "victim")
  with pytest.raises(errors.StorageError, match="vocabularies/any.* is not inside"):
    small_lm.run(tmp_path, text=small_lm.TEXT)
  assert not any((tmp_path / "victim").iterdir())


@pytest.mark.parametrize("kind", ["symbolic", "hard", "dangling", "pipe"])
def test_a_lock_that_is_a_link(kind, tmp_path):
  model, victim = tmp_path / "model", tmp_path / "victim"
  model.mkdir()
  lock = model / run_lock.NAME
  if kind != "dangling":
    victim.write_text("precious")
  if kind == "pipe":
    os.mkfifo(lock)
  elif kind == "hard":
    lock.hardlink_to(victim)
  else:
    lock.symlink_to(victim)
  with pytest.raises(errors.StorageError, match="training.lock is .*Delete it"):
    with run_lock.training_lock(str(model)):
      pass
  assert victim.read_text() == "precious" if kind != "dangling" else not victim.exists()
  lock.unlink()
  with run_lock.training_lock(str(model)):
    with pytest.raises(errors.LockedError, match="another training uses"):
      with run_lock.training_lock(str(model)):
        pass


def test_notes_of_an_evaluation_that_would_lead_elsewhere(folder, tmp_path, caplog, capsys):
  """A warning names the link, and the evaluation is done; a folder that a user names may be one."""
  elsewhere = tmp_path / "elsewhere"
  elsewhere.mkdir()
  (tmp_path / "link").symlink_to(elsewhere)
  (folder / "model" / "validation_eval").symlink_to(elsewhere)
  small_lm.run(folder, *small_lm.EVAL, "run.perplexity_eval_steps = 1")
  assert "step 2  validation: loss " in capsys.readouterr().out
  (said,) = [r.getMessage() for r in caplog.records if "elsewhere" in r.getMessage()]
  assert f"leads to {elsewhere}/any) is not inside {folder}/model: nothing outside" in said
  assert not any(elsewhere.iterdir())
  named = f"run.eval_summary_dir = '{tmp_path}/link/sub'"
  small_lm.run(folder, *small_lm.EVAL, "run.perplexity_eval_steps = 1", named)
  assert any((elsewhere / "sub").iterdir())


# ------------------------------------------------------------------ read-only folders


@contextlib.contextmanager
def read_only(place: pathlib.Path):
  """A folder that root cannot write to either."""
  try:
    subprocess.run(["mount", "--bind", place, place], check=True, capture_output=True)
  except (OSError, subprocess.CalledProcessError) as e:
    pytest.skip(f"no read-only folder can be made here: {e}")
  try:
    subprocess.run(["mount", "-o", "remount,ro,bind", place], check=True, capture_output=True)
    with pytest.raises(OSError, match="Read-only"):
      (place / "x").write_text("")
    yield
  finally:
    subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.slow
def test_modes_of_a_folder_that_cannot_be_written_to(folder, tmp_path, caplog, capsys):
  out = f"decode_from_file.output_filename = '{tmp_path}/out'"
  modes = {
    "eval": (*small_lm.EVAL, "run.perplexity_eval_steps = 1"),
    "perplexity_eval": PERPLEXITY,
    "infer": (*(b.replace("FOLDER", str(folder)) for b in INFER), out),
    "score_from_strings": (
      "run.mode = 'score_from_strings'",
      "score_from_strings.inputs = None",
      "score_from_strings.targets = ['to be']",
      "score_from_strings.score_postprocess_fn = @save_scores",
    ),
    "plan": ("run.mode = 'plan'", "print_best_layouts.search = False"),
  }
  before = content_of(folder)
  with read_only(folder):
    for mode, bindings in modes.items():
      caplog.clear()
      model_files._warned.clear()
      model_files._denied.clear()
      small_lm.run(folder, *bindings)
      said = [r.getMessage() for r in caplog.records if "cannot write" in r.getMessage()]
      assert len(said) == (1 if "eval" in mode else 0), (mode, said)
      if said:
        assert f"in the folder {folder}/model (" in said[0] and "The run goes on" in said[0]
    printed = capsys.readouterr().out
    assert printed.count("step 2  validation: loss ") == 2
    assert (tmp_path / "out-2").read_text().startswith("To be")
    # What was asked for is an error, in words.
    for more in (f"decode_from_file.output_filename = '{folder}/out'",):
      with pytest.raises(errors.StorageError, match="cannot write out-2 in the folder .*file name"):
        small_lm.run(folder, *modes["infer"][:2], more)
    with pytest.raises(errors.StorageError, match="cannot write summaries in the folder .*/notes"):
      small_lm.run(folder, *PERPLEXITY, f"run.eval_summary_dir = '{folder}/notes'")
    with pytest.raises(errors.StorageError, match="--model_dir"):
      small_lm.run(folder, "run.train_steps = 3")
    with pytest.raises(errors.StorageError, match="cannot make the folder .*/new"):
      trainer = training_program.make_trainer(model_dir=str(folder / "new"))
      trainer.train(training_program.dataset, 2)
  assert content_of(folder) == before


def test_the_command_line_is_a_note_of_all_modes_but_training(folder, caplog):
  """`main` writes it first of all."""
  with read_only(folder):
    with pytest.raises(errors.StorageError, match="cannot write command in .*--model_dir"):
      main.write_command(str(folder / "model"), ["program"])
    write = lambda: main.write_command(str(folder / "model"), ["program"])  # noqa: E731
    assert not model_files.optional(str(folder / "model"), "command", write)
    assert not model_files.optional(str(folder / "model"), "command", write)
  (record,) = caplog.records
  assert "Read-only file system" in record.getMessage()


@pytest.mark.slow
def test_training_goes_on_without_summaries(tmp_path, monkeypatch, caplog):
  """A disk may be full for these, and have room again for the checkpoint."""

  def full(*_, **__):
    raise tf.errors.ResourceExhaustedError(None, None, "No space left on device")

  monkeypatch.setattr(tf.summary, "write", full)
  losses = small_lm.run(tmp_path, "run.train_steps = 2", text=small_lm.TEXT)
  assert len(losses) == 2
  (said,) = [r.getMessage() for r in caplog.records if "No space left" in r.getMessage()]
  assert f"cannot write summaries in the folder {tmp_path}" in said
  assert len(checkpoint.all_checkpoints(str(tmp_path / "model"))) == 1


def test_a_checkpoint_that_failed_in_the_background_ends_the_training(tmp_path, monkeypatch):
  """Soon, and not when the next one is due."""

  def full(_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  save, steps = checkpoint.Checkpointer.save, []

  def and_wait(self, step, *args, **kwargs):
    save(self, step, *args, **kwargs)
    steps.append(step)
    self._thread.join()

  monkeypatch.setattr(writer.Job, "_write_parts", full)
  monkeypatch.setattr(checkpoint.Checkpointer, "save", and_wait)
  done = []
  update = progress.TrainingProgress.update
  monkeypatch.setattr(
    progress.TrainingProgress,
    "update",
    lambda self, step, *args, **kwargs: done.append(step) or update(self, step, *args, **kwargs),
  )
  settings = ("run.train_steps = 40", "run.save_checkpoints_steps = 20")
  with pytest.raises(errors.StorageError, match="model.ckpt-20 .*No space left"):
    small_lm.run(tmp_path, *settings, "run.iterations_per_loop = 1", text=small_lm.TEXT)
  assert steps == [20] and done[-1] == 21


def test_a_folder_without_a_model_is_not_made_by_who_looks(tmp_path):
  (tmp_path / "text.txt").write_text(small_lm.TEXT)
  with pytest.raises(errors.ConfigError, match="there is no checkpoint in .*; train first"):
    small_lm.run(tmp_path, *PERPLEXITY)
  assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]


# ----------------------------------------------------------------------------- steps


@pytest.mark.parametrize(
  ("wanted", "text"),
  [
    (25, "there is no checkpoint of step 25 in FOLDER; there are those of 0, 10, 20, 30. Give one"),
    ([10, 25], "there is no checkpoint of step 25 in FOLDER; there are those of 0, 10, 20, 30."),
    ([5, 25], "there is no checkpoint of steps 5, 25 in FOLDER; there are those of 0, 10, 20, 30."),
  ],
)
def test_a_step_that_is_not_there(wanted, text, tmp_path):
  """In every mode; the function of the TF1 library takes the closest, and so does who binds it."""

  class Estimator:
    def restore_for_inference(self, path):
      restored.append(path)

  for step in (0, 10, 20, 30):
    small_checkpoints.write(tmp_path, step)
  restored: list[str] = []

  def look():
    return list(chosen_checkpoints.restored_checkpoints(Estimator(), wanted, str(tmp_path)))

  with pytest.raises(errors.CheckpointError) as e:
    look()
  assert text.replace("FOLDER", str(tmp_path)) in str(e.value)
  gin.bind_parameter("get_checkpoint_iterator.find_closest", True)
  assert len(look()) == (1 if wanted == 25 else 2)


def test_many_steps_are_listed_in_a_line(tmp_path, trained):
  for step in range(0, 3000, 10):
    (tmp_path / f"model.ckpt-{step}.index").write_text("")
  with pytest.raises(errors.CheckpointError, match=r"of 0, 10, .* 90, \.\.\. 2900, .* \(300 of"):
    chosen_checkpoints.named_checkpoints(5, str(tmp_path))
  for mode in (small_lm.EVAL, PERPLEXITY, INFER):
    with pytest.raises(errors.CheckpointError, match="no checkpoint of step 1 in .*of 2. Give"):
      small_lm.run(
        trained,
        *(b.replace("FOLDER", str(trained)) for b in mode),
        "decode_from_file.output_filename = '/nowhere/out'",
        "run.eval_checkpoint_step = 1",
      )
  with pytest.raises(errors.CheckpointError, match="no checkpoint of step 1 in .*of 2. Give"):
    small_lm.run(
      trained, "run.mode = 'export'", "run.export_path = 'x'", "run.export_checkpoint_step = 1"
    )


def test_five_checkpoints_are_kept(tmp_path):
  save = ("run.train_steps = 8", "run.save_checkpoints_steps = 1", "run.iterations_per_loop = 1")
  small_lm.run(tmp_path, *save, text=small_lm.TEXT)
  paths = checkpoint.all_checkpoints(str(tmp_path / "model"))
  assert [p.rpartition("-")[2] for p in paths] == ["4", "5", "6", "7", "8"]
