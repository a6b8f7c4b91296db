"""The commands as a newcomer types them, one after the other, on a small text."""

from __future__ import annotations

import re

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.subprocess]

TEXT = "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind\n" * 60
SMALL = ["layers=1", "d_model=16", "d_ff=16", "d_kv=8", "length=16", "batch=4"]


def test_from_a_text_to_samples(tmp_path, run_forked):
  (tmp_path / "input.txt").write_text(TEXT)
  folder = tmp_path / "plays"
  sizes = [f"--set={s}" for s in SMALL]

  def typed(*words, code=0):
    result = run_forked(["-m", "mesh_transformer_cli", *words], timeout=240, check=False)
    assert result.returncode == code, result.stdout + result.stderr
    return result

  typed("init", folder, f"--text={tmp_path / 'input.txt'}")
  config = f"--config={folder / 'train.gin'}"
  trained = typed("train", config, *sizes, "--steps=6", "--eval_every=3", "--report_every=3")
  assert "step       6/6  loss" in trained.stdout
  model = folder / "model"
  command = (model / "command").read_text()
  assert (
    f"--gin_file={folder}/train.gin" in command and "'--gin_param=run.train_steps = 6'" in command
  )
  # Settings and vocabulary come from the folder of the model; the text may be gone.
  (tmp_path / "input.txt").unlink()
  out = typed(
    "infer", f"--model_dir={model}", "--prompt=To be", r"--prompt=\nWhether", "--num_samples=2",
    "--max_tokens=5", "--seed=1",
  ).stdout  # fmt: skip
  assert out.count("To be") == 2 and out.count("\nWhether") == 2
  # Another model than that of the checkpoints is told, in a line.
  wrong = typed("infer", config, "--prompt=To be", *sizes, "--set", "heads=4", code=2)
  assert re.search(r"^ConfigError: .*model\.ckpt-6 is of another model", wrong.stderr, re.MULTILINE)
