"""Evaluation in training by texts that the model writes: the best checkpoint and an early end."""

from __future__ import annotations

import difflib
import functools
import json
import os
import pathlib
import re
import signal
from typing import Any

import gin
import numpy as np
import pytest

from mesh_tensorflow import checkpoint, errors
from mesh_tensorflow.training.best_checkpoint import Evaluations, best_checkpoint
from mesh_tensorflow.transformer import dataset, gin_config, utils
from mesh_tensorflow.transformer.training.trainer import Trainer
from tests.transformer import worker_processes
from tests.transformer.modes import test_modes as modes

# A translation that no model learns from the training data: no score is perfect.
HELD_OUT = [*modes.PAIRS, "dog\tun chien noir"]


@gin.configurable(module="decoded_validation")
def alike(targets: list[str], predictions: list[str]) -> dict[str, float]:
  ratios = [difflib.SequenceMatcher(None, t, p).ratio() for t, p in zip(targets, predictions)]
  return {"alike": 100 * float(np.mean(ratios)), "apart": 100 - 100 * float(np.mean(ratios))}


@gin.configurable(module="decoded_validation")
def scored(targets: list[str], scores: list[float]) -> dict[str, float]:
  raise AssertionError("it is for scores, and there are none")


@gin.configurable(module="decoded_validation")
def packed_pairs(**arguments: Any) -> list[dataset.EvalDataset]:
  """A data set of rows of several pairs, which cannot be told apart in what is decoded."""
  make = functools.partial(dataset.parallel_text_dataset, **arguments)
  return [dataset.EvalDataset("packed", make, lambda text, **_: text, [alike])]


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
  (tmp_path / "pairs.tsv").write_text("".join(p + "\n" for p in modes.PAIRS))
  (tmp_path / "held.tsv").write_text("".join(p + "\n" for p in HELD_OUT))
  return tmp_path


def bindings(folder: pathlib.Path, *more: str) -> list[str]:
  """Bindings, each name once: the last counts; first what is imported for them."""
  lines = modes.bindings(
    folder,
    f"files = {{'train': '{folder}/pairs.tsv', 'validation': '{folder}/held.tsv'}}",
    "dataset.parallel_text_eval_datasets.metric_fns = [@alike, @scored]",
    "Bitransformer.decode.beam_size = 2",
    "run.learning_rate_schedule = 0.005",
    "run.train_steps = 400",
    "run.iterations_per_loop = 10",
    "run.eval_every_steps = 10",
    "run.best_metric = 'alike'",
    *more,
  )
  lines = list({line.split(" = ")[0]: line for line in lines}.values())
  return sorted(lines, key=lambda line: not line.startswith("import "))


def run(folder: pathlib.Path, *more: str, name: str = "model") -> Any:
  gin.clear_config()
  gin_config.parse_gin([], bindings(folder, *more))
  return utils.run(None, None, None, None, str(folder / name))


def evaluate(folder: pathlib.Path, *more: str, name: str = "model") -> dict[str, float]:
  """What mode "eval" finds with the best checkpoint."""
  mode = ("run.mode = 'eval'", "run.dataset_split = 'validation'")
  found = run(folder, *mode, "run.eval_checkpoint_step = 'best'", *more, name=name)
  metrics: dict[str, float] = found["validation"]
  return metrics


def reported(folder: pathlib.Path, metric: str = "alike", name: str = "model") -> dict[int, float]:
  """A metric of each evaluation, as metrics.jsonl has it."""
  reports = [json.loads(x) for x in (folder / name / "metrics.jsonl").read_text().splitlines()]
  return {r["step"]: r[f"eval/{metric}"] for r in reports if f"eval/{metric}" in r}


def evaluations(path: pathlib.Path) -> Evaluations:
  newest = checkpoint.latest_checkpoint(str(path))
  assert newest is not None
  return Evaluations.of_checkpoint(newest)


@pytest.mark.slow
def test_the_best_is_what_mode_eval_finds(folder, capsys):
  """The training is the same as without; the averages of weights are what is decoded."""
  averaged = ("run.ema_decay = 0.9", "run.use_ema = True", "run.early_stopping_patience = 3")
  losses = run(folder, *averaged)
  out = capsys.readouterr().out
  found = reported(folder)
  best = max(found, key=lambda step: (found[step], -step))
  assert 10 < best < len(losses) < 400 and len(losses) == best + 30
  assert f"alike {found[best]:.4f}  apart {100 - found[best]:.4f}  (6 texts decoded in " in out
  assert (
    f"stopped early at step {len(losses)} of 400: in 3 evaluations alike was not higher than "
    f"{found[best]:.4f} (run.early_stopping_patience)"
  ) in out
  assert f"\nbest alike  {found[best]:.4f}, step {best}\n" in out
  assert best_checkpoint(str(folder / "model")).endswith(f"model.ckpt-{best}")
  assert evaluate(folder, *averaged)["alike"] == pytest.approx(found[best], rel=1e-6)
  alone = (
    *("run.eval_every_steps = 0", f"run.train_steps = {len(losses)}", "run.ema_decay = 0.9"),
    *("run.save_checkpoints_steps = 10", "run.keep_checkpoint_max = None"),
  )
  assert run(folder, *alone, name="alone") == losses
  early = "run.eval_checkpoint_step = 30"
  assert evaluate(folder, early, *averaged, name="alone")["alike"] == pytest.approx(found[30])
  assert evaluate(folder, early, name="alone")["alike"] != pytest.approx(found[30])


@pytest.mark.slow
def test_the_lowest_may_be_the_best_and_a_part_may_be_decoded(folder, capsys):
  how = (
    *("run.best_metric = 'apart'", "run.best_metric_mode = 'min'", "run.train_steps = 30"),
    *("run.batch_size = 2", "run.eval_steps = 2", "run.iterations_per_loop = 1"),
  )
  run(folder, *how)
  found = reported(folder, "apart")
  assert capsys.readouterr().out.count("(4 texts decoded in") == 3
  assert best_checkpoint(str(folder / "model")).endswith(f"-{min(found, key=found.__getitem__)}")
  assert evaluations(folder / "model").lower_is_better


@pytest.mark.long
def test_on_a_mesh_it_is_the_same(folder):
  steps = ("run.train_steps = 40", "run.eval_every_steps = 20")
  run(folder, *steps, name="one")
  expected = reported(folder, name="one")
  assert sorted(expected) == [20, 40] and expected[40] > expected[20]
  for kind in ("placement", "simd"):
    mesh = (
      "run.mesh_shape = 'batch:2,model:2'",
      "run.layout_rules = 'batch:batch,d_ff:model,heads:model,vocab:model'",
      f"run.mesh_implementation = '{kind}'",
    )
    run(folder, *steps, *mesh, name=kind)
    assert reported(folder, name=kind) == pytest.approx(expected, abs=0.5)


@pytest.mark.slow
def test_stopped_while_it_decodes_it_does_so_again(folder, monkeypatch):
  """The evaluation that was given up counts as not done, and is the first thing that is done."""
  run(folder, "run.train_steps = 20", name="whole")
  real = Trainer.sample
  batches = []

  def stopped(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
    batches.append(trainer.global_step)
    if trainer.global_step == 20:
      os.kill(os.getpid(), signal.SIGTERM)
    return real(trainer, *args, **kwargs)

  with monkeypatch.context() as patch:
    patch.setattr(Trainer, "sample", stopped)
    with pytest.raises(errors.StoppedError, match="step 20 is saved"):
      run(folder, "run.train_steps = 30")
  assert batches[-1] == 20 and evaluations(folder / "model").last_step == 10
  run(folder, "run.train_steps = 20")  # All steps are done.
  assert evaluations(folder / "model").last_step == 10
  run(folder, "run.train_steps = 30")
  assert sorted(reported(folder)) == [10, 20, 30]
  assert reported(folder)[20] == reported(folder, name="whole")[20]


@pytest.mark.parametrize(
  ("more", "error", "what"),
  [
    (
      "run.best_metric = 'alik'",
      errors.ConfigError,
      "'alik': there is no such metric; there are loss, bits_per_token, token_accuracy, alike, "
      "apart; did you mean alike",
    ),
    (
      "dataset.parallel_text_eval_datasets.metric_fns = []",
      errors.ConfigError,
      "'alike': there is no such metric.*token_accuracy; no held-out data set has metric_fns",
    ),
    ("run.eval_dataset_fn = None", errors.ConfigError, "no held-out data set has metric_fns"),
    (
      "run.eval_dataset_fn = @packed_pairs",
      errors.DataError,
      "'packed' has features .*: to evaluate texts it must yield single .not packed. examples",
    ),
  ],
)
def test_what_cannot_be_decoded_is_told_before_the_first_step(folder, more, error, what):
  with pytest.raises(error, match=what):
    run(folder, more)
  assert not checkpoint.all_checkpoints(str(folder / "model"))


@pytest.mark.long
@pytest.mark.subprocess
def test_ends_early_by_bleu_as_a_program(folder, run_subprocess):
  """The real binary, on a 2x2 mesh: the best checkpoint has the score that was reported."""
  pytest.importorskip("sacrebleu")
  config = folder / "config.gin"
  config.write_text(
    "\n".join(
      bindings(
        folder,
        "import mesh_tensorflow.transformer.bleu",
        "dataset.parallel_text_eval_datasets.metric_fns = [@bleu.bleu]",
        "bleu.bleu.tokenize = 'char'",
        "run.best_metric = 'bleu'",
        "run.early_stopping_patience = 2",
        "run.mesh_shape = 'batch:2,model:2'",
        "run.layout_rules = 'batch:batch,d_ff:model,heads:model,vocab:model'",
      )
    )
  )

  def program(command: str, *flags: str) -> str:
    words = [command, f"--model_dir={folder}/model", *flags]
    done = run_subprocess(["-m", "mesh_transformer_cli", *words], timeout=280)
    return str(done.stdout)

  out = program("train", f"--config={config}")
  found = reported(folder, "bleu")
  best = max(found, key=lambda step: (found[step], -step))
  last = max(found)
  assert 10 < best < last < 400
  assert f"stopped early at step {last} of 400: in 2 evaluations bleu was not higher" in out
  assert f"best bleu {found[best]:.4f} at step {best}; no improvement 2 of 2" in out
  evaluated = program("eval", "--checkpoint=best")
  (score,) = re.findall(rf"^step {best}  validation: bleu ([0-9.]+)  ", evaluated, re.MULTILINE)
  assert float(score) == pytest.approx(found[best], abs=0.00501)
  assert found[best] < 99


# Evaluations of two workers: test_validation_workers.py; texts of two: test_pipeline_workers.py.
@pytest.mark.long
def test_two_workers_decode_as_one(folder):
  """Each decodes its part of the batch, and all go by the numbers of the first."""
  found = []
  for count in (1, 2):
    config = folder / f"config{count}.gin"
    mesh = ("run.mesh_shape = 'batch:2'", "run.layout_rules = 'batch:batch'") if count == 2 else ()
    stops = ("run.early_stopping_patience = 1", "run.early_stopping_min_delta = 1000.0")
    config.write_text("\n".join(bindings(folder, *stops, *mesh)))
    out = worker_processes.run(
      count,
      [
        f"--model_dir={folder}/{count}",
        f"--gin_file={config}",
        "--module_import=tests.transformer.training.test_decoded_validation",
      ],
    )
    assert out.count("stopped early at step 20 of 400") == 1
    assert evaluations(folder / str(count)).last_step == 20
    found.append(reported(folder, name=str(count)))
  one, two = found
  assert sorted(one) == [10, 20]
  assert two == pytest.approx(one, abs=0.5)
