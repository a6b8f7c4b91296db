"""50 steps of models of eight layers, dropout on: stages, meshes and schedules change no loss.

In `make test` 3 steps of a model of four.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable

import numpy as np
import pytest

from mesh_tensorflow import exit_codes
from mesh_tensorflow.meshes.schedules import SCHEDULES
from tests.kinds import kept
from tests.transformer import small_lm
from tests.transformer import worker_processes as program

# As many as a training has, of those that run in `make test`, and of the others.
FEW, MANY = 3, 50
TIMEOUT = 1200  # Of each training in processes of its own.
SETTINGS = [
  "d_model = 16",
  "d_ff = 32",
  "num_heads = 2",
  "d_kv = 8",
  "dropout_rate = 0.1",
  "Unitransformer.max_length = 24",
  "run.batch_size = ('sequences_per_batch', 8)",
  "run.gradient_accumulation_steps = 4",
  "run.report_every = 1",
]
LANGUAGE_MODEL = [
  *SETTINGS,
  "num_layers = 8",
  "run.sequence_length = {'inputs': 16, 'targets': 16}",
]
# Four layers in the encoder, four in the decoder.
PAIRED = [
  *SETTINGS,
  "num_layers = 4",
  "run.model_type = 'bitransformer'",
  "run.train_dataset_fn = @dataset.parallel_text_dataset",
  "dataset.parallel_text_dataset.files = {'train': 'pairs.tsv'}",
  "run.vocabulary = @vocabulary.get_byte_vocabulary()",
  "run.sequence_length = {'inputs': 12, 'targets': 16}",
]
MODELS = {"language model": LANGUAGE_MODEL, "encoder-decoder": PAIRED}
PAIRS = "one two\tun deux\nthree\ttrois\ndog\tchien\nred cat\tchat rouge\nblue\tbleu\n"
MESHES = {
  "1": ("", ""),
  "2x1": ("batch:2", "batch:batch"),
  "1x2": ("model:2", "d_ff:model,heads:model,vocab:model"),
}
CASES = [(*case, MANY) for case in itertools.product(MODELS, (2, 4), MESHES, SCHEDULES)]
SHORT = ("encoder-decoder", 2, "1x2", "zero_bubble", FEW)
Losses = Callable[..., list[float]]


@pytest.fixture
def losses_of(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Losses:
  """Trains a model, with further bindings; returns the loss of each step."""

  def train(model: str, steps: int, *bindings: str) -> list[float]:
    folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "pairs.tsv").write_text(PAIRS)
    settings = [*MODELS[model], f"run.train_steps = {steps}", *bindings]
    if steps == FEW:
      settings.append("num_layers = 2")
    small_lm.run(folder, *settings, text=small_lm.TEXT)
    losses = program.losses(folder / "model")
    assert list(losses) == list(range(1, steps + 1))
    return list(losses.values())

  return train


# Losses of models on one device, by name and number of steps.
ALONE: dict[tuple[str, int], list[float]] = {}


@pytest.mark.parametrize("model,stages,mesh,schedule,steps", kept([*CASES, SHORT], [SHORT]))
def test_losses_are_those_of_one_mesh(model, stages, mesh, schedule, steps, losses_of):
  shape, layout = MESHES[mesh]
  if (model, steps) not in ALONE:
    ALONE[model, steps] = losses_of(model, steps)
  found = losses_of(
    model,
    steps,
    f"run.pipeline_stages = {stages}",
    f"run.pipeline_schedule = '{schedule}'",
    f"run.mesh_shape = '{shape}'",
    f"run.layout_rules = '{layout}'",
  )
  np.testing.assert_allclose(found, ALONE[model, steps], rtol=1e-5)


# Several runs of layers, resumed and continued, of a language model: test_pipeline.py.
@pytest.mark.long
def test_an_encoder_decoder_in_several_runs_a_stage(tmp_path, monkeypatch):
  """Losses, a resume with other runs, perplexities and texts are those of one mesh."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / "pairs.tsv").write_text(PAIRS)
  (tmp_path / "alone").mkdir()
  # Five layers: attention and feed-forward in the encoder, and one more in the decoder.
  settings = [
    *PAIRED,
    "num_layers = 1",
    "run.learning_rate_schedule = 0.001",  # A larger one makes more of rounding than 1e-5.
    "dataset.parallel_text_dataset.files = {'train': 'pairs.tsv', 'validation': 'pairs.tsv'}",
  ]
  two, cut = "run.pipeline_stages = 2", "run.pipeline_cut = (1, 1, 2, 1)"
  chunks = (two, "run.pipeline_chunks = 2")
  for folder, steps, more in (
    ("alone", 3, ()),
    ("", 2, (*chunks, cut)),
    ("", 3, (two,)),
  ):
    small_lm.run(tmp_path / folder, *settings, f"run.train_steps = {steps}", *more, text="")
  losses = [list(program.losses(tmp_path / f / "model").values()) for f in ("alone", "")]
  assert len(losses[0]) == 3
  np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
  scored = ("run.mode = 'perplexity_eval'", "run.dataset_split = 'validation'")
  few = (*scored, "run.perplexity_eval_steps = 1")
  found = [small_lm.run(tmp_path, *settings, *few, *m)["validation"] for m in ((), chunks)]
  assert found[0] and found[1] == pytest.approx(found[0], rel=1e-5)
  texts = [small_lm.infer(tmp_path, ["dog"], *settings, *more, step=3) for more in ((), chunks)]
  assert texts[0] == texts[1]


@pytest.mark.long
@pytest.mark.subprocess
@pytest.mark.timeout(4 * TIMEOUT)
@pytest.mark.parametrize("workers,stages", [(1, 4), (2, 2)])
def test_a_training_that_is_killed_goes_on(workers, stages, tmp_path, monkeypatch):
  """Two workers have a stage each."""
  settings = [
    *LANGUAGE_MODEL,
    f"run.train_steps = {MANY}",
    "run.save_checkpoints_steps = 20",
    # As of the other trainings here: a larger one makes more of rounding than 1e-5.
    "run.learning_rate_schedule = 0.001",
  ]
  whole = tmp_path / "whole"
  program.run(1, program.trainer_arguments(whole, *settings), timeout=TIMEOUT)
  folder = tmp_path / "model"
  arguments = program.trainer_arguments(folder, *settings, f"run.pipeline_stages = {stages}")
  with monkeypatch.context() as m:
    m.setenv("MTF_FAULT", f"SIGKILL {workers - 1} step/30")
    hooks = "--module_import=tests.transformer.fault_hooks"
    with program.processes(tmp_path, workers, [*arguments, hooks]) as group:
      code = group.wait_of(0, TIMEOUT)
      assert code == (exit_codes.WORKER_LOST if workers > 1 else -9), group.text(0)
  assert 20 <= len(program.losses(folder)) < MANY
  program.run(workers, arguments, timeout=TIMEOUT)
  losses, expected = program.losses(folder), program.losses(whole)
  assert list(losses) == list(expected) == list(range(1, MANY + 1))
  np.testing.assert_allclose(list(losses.values()), list(expected.values()), rtol=1e-5)
