"""Evaluation while a model is trained, the best checkpoint, and stopping early."""

from __future__ import annotations

import dataclasses
import math
import os
import signal

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import checkpoint, errors
from mesh_tensorflow.training import validation as validation_lib
from mesh_tensorflow.training.best_checkpoint import Evaluations, best_checkpoint
from tests.kinds import kept
from tests.transformer import small_lm
from tests.transformer import training_program as program

pytestmark = pytest.mark.usefixtures("without_attention")
ROWS = 20  # Of the held-out data: two batches and a half.


def held_out() -> tf.data.Dataset:
  return program.dataset({"targets": program.LENGTH}, skip=10**6).take(ROWS)


NAMES = {
  "max_batches": "eval_steps", "patience": "early_stopping_patience",
  "min_delta": "early_stopping_min_delta",
}  # fmt: skip


def validation(every: int = 2, make=held_out, **options) -> dict:
  """Arguments of a trainer."""
  named = {NAMES.get(name, name): value for name, value in options.items()}
  return dict(held_out=lambda: {"validation": make}, eval_every_steps=every, **named)


def make_trainer(model_dir=None, *, how=None, **options):
  options = {"save_checkpoints_steps": 0, "keep_checkpoint_max": 2, **options}
  options.setdefault("optimizer", mtf.optimize.SgdOptimizer)
  return program.make_trainer(
    model_dir=str(model_dir) if model_dir else None,
    **(validation() if how is None else how),
    **options,
  )


def steps_in(folder) -> list[int]:
  return [checkpoint.get_step_from_path(p) for p in checkpoint.all_checkpoints(str(folder))]


def evaluations(folder) -> Evaluations:
  return Evaluations.of_checkpoint(checkpoint.latest_checkpoint(str(folder)))


@pytest.fixture
def evaluated(monkeypatch):
  """The steps and losses of evaluations in training; `losses` in it replaces those to come."""

  class Seen(list):
    losses: dict[int, float] = {}

  seen = Seen()
  real = validation_lib.Validator.run

  def run(validator, step, goes_on):
    take = validator._evaluations.take

    def taken(step, loss, min_delta):
      loss = seen.losses.get(step, loss)
      seen.append((step, loss))
      return take(step, loss, min_delta)

    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(validator._evaluations, "take", taken)
      return real(validator, step, goes_on)

  monkeypatch.setattr(validation_lib.Validator, "run", run)
  return seen


# --------------------------------------------------------------------- what is evaluated


def test_evaluates_what_evaluate_does_and_changes_nothing(evaluated):
  """Every other step and after the last one; the training is the same as without."""
  plain = make_trainer(how={})
  expected = plain.train(program.dataset, 5)
  assert not evaluated
  trainer = make_trainer()
  losses = trainer.train(program.dataset, 5)
  assert losses == expected
  for name, value in program.weights(plain).items():
    np.testing.assert_array_equal(program.weights(trainer)[name], value, err_msg=name)
  assert [s for s, _ in evaluated] == [2, 4, 5]
  # The same number as an evaluation by itself; of all tokens alike, in the last batch, too.
  metrics = trainer.evaluate(held_out())
  assert metrics["num_eval_tokens"] == ROWS * program.LENGTH
  assert evaluated[-1][1] == metrics["loss"]
  assert len({loss for _, loss in evaluated}) == 3  # Of the weights of each step.


MESHES = [("model:2", "placement"), ("model:2", "simd"), ("batch:2", "simd")]


@pytest.mark.parametrize(("mesh", "implementation"), kept(MESHES, MESHES[1:2]))
def test_on_split_weights_it_is_the_same(mesh, implementation, evaluated):
  make_trainer().train(program.dataset, 3)
  make_trainer(mesh=mesh, implementation=implementation).train(program.dataset, 3)
  (a, of_one), (b, of_several) = np.split(np.array(evaluated), 2)
  np.testing.assert_allclose(of_several, of_one, rtol=1e-5)
  np.testing.assert_allclose(b, a, rtol=1e-5)


@pytest.mark.slow
def test_one_program_and_no_second_copy_of_the_weights(evaluated):
  trainer = make_trainer()
  traced = []
  real = trainer.steps.eval_step
  trainer.steps.eval_step = lambda names: traced.append(list(names)) or real(names)
  trainer.train(program.dataset, 6)
  assert len(evaluated) == 3
  assert traced == [["targets"]]
  (key,) = trainer._programs
  assert trainer._programs[key].experimental_get_tracing_count() == 1
  names = [v.name for v in trainer.mesh_impl.variable_store]
  assert len(names) == len(set(names))
  alone = make_trainer(how={})
  alone.train(program.dataset, 1)
  assert sorted(names) == sorted(v.name for v in alone.mesh_impl.variable_store)


def shuffled(seed: int | None = None, buffer: int = 400) -> tf.data.Dataset:
  return program.dataset({"targets": program.LENGTH}, skip=10**6).take(400).shuffle(buffer, seed)


@pytest.mark.parametrize(
  "make",
  [
    shuffled,
    pytest.param(lambda: shuffled(seed=5), marks=pytest.mark.long),
    pytest.param(lambda: shuffled(buffer=2), marks=pytest.mark.long),
  ],
)
def test_each_evaluation_sees_the_same_examples(make, evaluated):
  """Also of data that shuffles and is cut short: weights that do not change have one loss."""
  trainer = make_trainer(how=validation(1, make, max_batches=2), learning_rate=0.0)
  trainer.train(program.dataset, 4)
  assert len({loss for _, loss in evaluated}) == 1
  assert trainer.evaluate(held_out(), 2)["loss"] != evaluated[0][1]  # There are others.


def test_data_that_does_not_shuffle_is_made_once(evaluated):
  made = []

  def make() -> tf.data.Dataset:
    made.append(None)
    return held_out()

  make_trainer(how=validation(1, make)).train(program.dataset, 4)
  assert len(evaluated) == 4 and len(made) == 1


def test_several_data_sets_count_by_their_tokens(capsys):
  how = dict(held_out=lambda: {"a": held_out, "b": lambda: held_out().take(3)}, eval_every_steps=2)
  trainer = make_trainer(how=how, quiet=False)
  trainer.train(program.dataset, 2)
  a, b = trainer.evaluate(held_out()), trainer.evaluate(held_out().take(3))
  whole = (a["total_nats"] + b["total_nats"]) / (a["num_eval_tokens"] + b["num_eval_tokens"])
  line = next(x for x in capsys.readouterr().out.splitlines() if "eval loss" in x)
  assert f"eval loss {whole:.4f} nats" in line
  assert f"{whole / math.log(2):.4f} bits/token" in line
  assert f"a {a['loss']:.4f}, b {b['loss']:.4f}" in line
  assert "(368 tokens)" in line


def test_line_and_scalars(tmp_path, capsys):
  trainer = make_trainer(tmp_path, quiet=False)
  trainer.train(program.dataset, 4)
  metrics = trainer.evaluate(held_out())
  lines = [x for x in capsys.readouterr().out.splitlines() if "nats  " in x]
  assert len(lines) == 2
  assert (
    lines[1].split()
    == (
      f"step 4 eval loss {metrics['loss']:.4f} nats {metrics['bits_per_token']:.4f} bits/token "
      f"accuracy {metrics['token_accuracy']:.4f} (320 tokens) the best so far"
    ).split()
  )
  found: dict[str, dict[int, float]] = {}
  for file in tmp_path.glob("events.out.tfevents.*"):
    for record in tf.data.TFRecordDataset(str(file)):
      event = tf.compat.v1.Event.FromString(record.numpy())
      for value in event.summary.value:
        found.setdefault(value.tag, {})[event.step] = float(tf.make_ndarray(value.tensor))
  assert sorted(found["eval/loss"]) == [2, 4]
  for name in ("loss", "bits_per_token", "token_accuracy"):
    assert found[f"eval/{name}"][4] == pytest.approx(metrics[name], rel=1e-6)


# ------------------------------------------------------------------ the best checkpoint


def test_the_best_stays_beside_the_newest(tmp_path, evaluated):
  evaluated.losses = {2: 3.0, 4: 1.0, 6: 2.0, 8: 2.5, 10: 2.2, 12: 0.5}
  trainer = make_trainer(tmp_path, save_checkpoints_steps=3)
  trainer.train(program.dataset, 11)
  # Due were 3, 6, 9, 11, of which the newest two stay. 4 is the best; 2 was, and went with it.
  assert steps_in(tmp_path) == [4, 9, 11]
  assert best_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt-4")
  assert checkpoint.latest_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt-11")
  # Known by who goes on; a better one takes its place.
  again = make_trainer(tmp_path, save_checkpoints_steps=3)
  again.train(program.dataset, 12)
  assert steps_in(tmp_path) == [11, 12]
  assert best_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt-12")


def test_it_holds_the_weights_of_its_step(tmp_path, evaluated):
  evaluated.losses = {2: 3.0, 4: 3.5}
  make_trainer(tmp_path).train(program.dataset, 4)
  alone = make_trainer(how={})
  alone.train(program.dataset, 2)
  reader = tf.train.load_checkpoint(best_checkpoint(str(tmp_path)))
  for name, value in program.weights(alone).items():
    np.testing.assert_array_equal(reader.get_tensor(name), value, err_msg=name)


def test_not_kept_if_nobody_wants_it(tmp_path, evaluated):
  evaluated.losses = {2: 1.0}
  make_trainer(tmp_path, how=validation(keep_best=False)).train(program.dataset, 5)
  assert steps_in(tmp_path) == [5]
  with pytest.raises(errors.ConfigError, match=r"model\.ckpt-5 knows of no best .*eval_every"):
    best_checkpoint(str(tmp_path))


def test_without_evaluation_it_stays_known(tmp_path, evaluated):
  """A training that goes on without evaluating keeps what was best."""
  evaluated.losses = {2: 1.0, 4: 2.0}
  make_trainer(tmp_path).train(program.dataset, 4)
  options = {"how": {}, "save_checkpoints_steps": 1, "steps_per_call": 1}
  make_trainer(tmp_path, **options).train(program.dataset, 7)
  assert steps_in(tmp_path) == [2, 6, 7]
  assert best_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt-2")


def test_errors_of_best(tmp_path, evaluated):
  with pytest.raises(errors.ConfigError, match="there is no checkpoint"):
    best_checkpoint(str(tmp_path))
  evaluated.losses = {2: 1.0, 4: 2.0}
  make_trainer(tmp_path).train(program.dataset, 4)
  for file in tmp_path.glob("model.ckpt-2.*"):
    file.unlink()
  with pytest.raises(errors.CheckpointError, match=r"ckpt-2, was deleted; there are model.ckpt-4"):
    best_checkpoint(str(tmp_path))


# --------------------------------------------------------------------- stopping early


def test_stops_early_and_says_why(tmp_path, evaluated, capsys):
  evaluated.losses = {2: 3.0, 4: 2.0, 6: 2.5, 8: 1.95, 10: 1.96, 12: 1.0}
  how = validation(patience=3, min_delta=0.1)
  trainer = make_trainer(tmp_path, how=how, quiet=False)
  assert len(trainer.train(program.dataset, 100)) == 10
  out = capsys.readouterr().out
  assert (
    "stopped early at step 10 of 100: in 3 evaluations the loss was not lower by more than 0.1 "
    "than 2.0000 (run.early_stopping_patience)"
  ) in out
  # 1.95 is the best, though it was too little to go on for.
  assert "no improvement 2 of 3" in out
  assert steps_in(tmp_path) == [8, 10]
  assert best_checkpoint(str(tmp_path)).endswith("-8")
  # The same command has nothing to do; with more patience it goes on.
  assert make_trainer(tmp_path, how=how, quiet=False).train(program.dataset, 100) == []
  assert "training was stopped early at step 10" in capsys.readouterr().out
  more = make_trainer(tmp_path, how=validation(patience=4, min_delta=0.1))
  assert len(more.train(program.dataset, 13)) == 3
  assert evaluations(tmp_path).without_improvement in (0, 1)  # At 12, and at 13 after it.


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize(
  ("gains", "min_delta", "expected"),
  [  # Of each evaluation: whether it is the best, and how many were no improvement.
    ([1, 1, 1], 0.0, [(True, 0), (True, 0), (True, 0)]),
    ([1, 0, -1, 3], 0.0, [(True, 0), (False, 1), (False, 2), (True, 0)]),
    # Together an improvement, each by too little: the best moves on, what it is measured by not.
    ([1, 0.4, 0.4, 0.4], 1.0, [(True, 0), (True, 1), (True, 2), (True, 0)]),
    ([1, 1, 0.5], 1.0, [(True, 0), (True, 1), (True, 0)]),
    ([1, math.nan], 0.0, [(True, 0), (False, 1)]),
  ],
)
def test_what_is_better(lower, gains, min_delta, expected):
  seen = Evaluations()
  seen.compare_by("m", lower)
  value, found = 10.0, []
  for step, gain in enumerate(gains):
    value += -gain if lower else gain
    found.append((seen.take(step, value, min_delta), seen.without_improvement))
  assert found == expected


@pytest.mark.parametrize(
  ("metric", "mode", "lower"),
  [
    ("loss", "auto", True),
    ("bits_per_token", "auto", True),
    ("validation/loss", "auto", True),
    ("token_accuracy", "auto", False),
    ("bleu", "auto", False),
    ("wer", "min", True),
    ("loss", "max", False),
  ],
)
def test_direction_of_a_metric(metric, mode, lower):
  trainer = make_trainer(how={})
  how = {"eval_every_steps": 1, "best_metric": metric, "best_metric_mode": mode}
  seen = Evaluations()
  settings = dataclasses.replace(trainer.loop.settings, **how)
  assert validation_lib.compare_by_metric(settings, trainer.loop._evaluator, seen) is None
  assert (seen.metric, seen.lower_is_better) == (metric, lower)


def test_results_of_a_checkpoint(tmp_path, evaluated):
  """With the metric; checkpoints from before there was a choice are by the loss."""
  trainer = make_trainer(tmp_path, how=validation(best_metric="token_accuracy"))
  trainer.train(program.dataset, 2)
  seen = evaluations(tmp_path)
  assert (seen.metric, seen.lower_is_better, seen.best_step) == ("token_accuracy", False, 2)
  assert seen.best_value == evaluated[-1][1]
  saved = {"evaluation_" + k: v for k, v in {
    "last_step": 6, "best_step": 4, "best_loss": 1.5, "reference_loss": 1.75,
    "without_improvement": 1, "kept_step": 4, "kept_counts": False,
  }.items()}  # fmt: skip
  folder, store = tmp_path / "old", trainer.mesh_impl.variable_store
  with checkpoint.Checkpointer(str(folder), store, asynchronous=False) as saver:
    saver.save(6, {k: np.array(v) for k, v in saved.items()})
  assert evaluations(folder) == Evaluations(6, 4, 1.5, 1.75, 1, 4, False, "loss", True)


def test_another_metric_begins_anew(tmp_path, evaluated, capsys):
  """Losses say nothing of accuracies: neither which one is best, nor when training ends."""
  evaluated.losses = {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.6, 10: 0.2, 12: 0.4, 14: 0.3}
  make_trainer(tmp_path, how=validation(patience=2)).train(program.dataset, 20)
  assert steps_in(tmp_path) == [4, 8]
  how = validation(best_metric="token_accuracy", patience=1)
  evaluated.losses[8] = 0.1  # The step it goes on from is evaluated by the new metric.
  trainer = make_trainer(tmp_path, how=how, quiet=False)
  trainer.train(program.dataset, 20)
  out = capsys.readouterr().out
  assert (
    "the best checkpoint is chosen by the highest token_accuracy now, and was by the lowest loss "
    "(2.0000 at step 4): these cannot be compared, so the evaluations until now do not count"
  ) in out
  assert [s for s, _ in evaluated] == [2, 4, 6, 8, 8, 10, 12, 14]
  assert "best token_accuracy 0.4000 at step 12; no improvement 1 of 1" in out
  assert (
    "stopped early at step 14 of 20: in 1 evaluation token_accuracy was not higher than 0.4000"
  ) in out
  assert best_checkpoint(str(tmp_path)).endswith("-12")
  assert 4 not in steps_in(tmp_path)
  # With the same metric all is known: there is nothing to do.
  again = make_trainer(tmp_path, how=how, quiet=False)
  assert again.train(program.dataset, 20) == []
  out = capsys.readouterr().out
  assert "was by" not in out and "token_accuracy was not higher than 0.4000" in out


def test_of_one_of_several_data_sets(tmp_path, evaluated):
  how = dict(
    held_out=lambda: {"a": held_out, "b": lambda: held_out().take(3)},
    eval_every_steps=2, best_metric="b/loss",
  )  # fmt: skip
  trainer = make_trainer(how=how)
  trainer.train(program.dataset, 2)
  assert evaluated == [(2, trainer.evaluate(held_out().take(3))["loss"])]


def test_nan_is_no_improvement():
  seen = Evaluations()
  assert not seen.take(1, math.nan, 0.0)
  assert (seen.best_step, seen.without_improvement) == (-1, 1)
  assert seen.take(2, 5.0, 0.0) and not seen.take(3, math.nan, 0.0)
  assert (seen.best_step, seen.without_improvement) == (2, 1)


@pytest.mark.parametrize("stops_in_evaluation", [pytest.param(False, marks=pytest.mark.long), True])
def test_interrupted_it_is_as_if_it_had_not_been(
  tmp_path, evaluated, monkeypatch, stops_in_evaluation
):
  """Stopped while it is evaluated, or between: the same evaluations, best checkpoint, and end."""
  evaluated.losses = {2: 3.0, 4: 2.0, 6: 2.5, 8: 2.25, 10: 2.6}
  how = validation(patience=3)
  make_trainer(tmp_path / "whole", how=how).train(program.dataset, 100)
  expected, evaluated[:] = list(evaluated), []
  folder, stopped = tmp_path / "parts", []
  for stop_at in (4, 8, None):
    trainer = make_trainer(folder, how=how)
    owner, name = (trainer, "_eval_step") if stops_in_evaluation else (trainer.loop, "_call")
    real = getattr(owner, name)

    def kill(*args, trainer=trainer, real=real, stop_at=stop_at):
      # A call goes two steps further, and ends after the first when the signal comes.
      if trainer.global_step + (0 if stops_in_evaluation else 2) == stop_at:
        os.kill(os.getpid(), signal.SIGTERM)
      return real(*args)

    monkeypatch.setattr(owner, name, kill)
    try:
      trainer.train(program.dataset, 100)
    except errors.StoppedError:
      stopped.append(trainer.global_step)
  assert stopped == ([4, 8] if stops_in_evaluation else [3, 7])
  assert evaluated == expected
  of_parts, of_whole = evaluations(folder), evaluations(tmp_path / "whole")
  of_parts.kept_counts = of_whole.kept_counts  # That of a step at which it was stopped counts.
  assert of_parts == of_whole
  assert best_checkpoint(str(folder)) == str(folder / "model.ckpt-4")
  assert steps_in(folder) == [4, 8 if stops_in_evaluation else 7, 10]


# ----------------------------------------------------------------------------- settings


def test_settings_of_a_run_and_the_modes_that_take_the_best(tmp_path, evaluated, capsys):
  evaluated.losses = {2: 3.0, 4: 3.5, 6: 3.6}
  settings = ("run.eval_every_steps = 2", "run.eval_steps = 2", "run.train_steps = 9")
  stops = "run.early_stopping_patience = 2"
  small_lm.run(tmp_path, *settings, stops, text=small_lm.TEXT)
  out = capsys.readouterr().out
  assert [s for s, _ in evaluated] == [2, 4, 6]
  assert "(192 tokens)" in out and "stopped early at step 6 of 9" in out
  assert steps_in(tmp_path / "model") == [2, 6]
  best = ("run.mode = 'perplexity_eval'", "run.dataset_split = 'validation'")
  small_lm.run(tmp_path, *best, "run.eval_checkpoint_step = 'best'")
  assert "step 2  " in capsys.readouterr().out
  with pytest.raises(errors.ConfigError, match="'best', 'all', 'new'"):
    small_lm.run(tmp_path, *best, "run.eval_checkpoint_step = 'bset'")


@pytest.mark.parametrize(
  ("binding", "what"),
  [
    ("run.eval_every_steps = -1", "eval_every_steps = -1: it must be a whole number of at least 0"),
    ("run.eval_steps = 0", "eval_steps = 0"),
    ("run.early_stopping_min_delta = -1", "early_stopping_min_delta = -1"),
    ("run.early_stopping_patience = 2.5", "early_stopping_patience = 2.5"),
    ("run.best_metric = 3", "best_metric = 3: it must be the name of a metric"),
    ("run.best_metric_mode = 'low'", "best_metric_mode = 'low': it must be one of 'auto', 'min'"),
    (
      "run.eval_every_steps = 1\nrun.best_metric = 'acuracy'",
      "best_metric = 'acuracy': there is no such metric; there are loss, bits_per_token, "
      "token_accuracy; no held-out data set has metric_fns",
    ),
    ("run.keep_best = 'yes'", "keep_best = 'yes': it must be True or False"),
  ],
)
def test_bad_settings_are_refused(tmp_path, binding, what):
  with pytest.raises(errors.ConfigError, match=what):
    small_lm.run(tmp_path, binding, text=small_lm.TEXT)


# ----------------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
  ("arguments", "what"),
  [
    ({"every": -1}, "eval_every_steps = -1: it must be a whole number of at least 0"),
    (
      {"every": 0, "patience": 3},
      "early_stopping_patience is 3, but nothing is evaluated.*eval_every_steps",
    ),
    ({"patience": 0}, "patience = 0: it must be a whole number of at least 1, or None"),
    ({"min_delta": -0.5}, "min_delta = -0.5: it must be a number of at least 0"),
    ({"max_batches": 0}, "eval_steps = 0"),
  ],
)
def test_bad_values_are_refused(arguments, what):
  with pytest.raises(errors.ConfigError, match=what):
    make_trainer(how=validation(**arguments))


def test_held_out_data_is_needed():
  trainer = make_trainer(how={"eval_every_steps": 2})
  with pytest.raises(errors.ConfigError, match="no held-out data sets"):
    trainer.train(program.dataset, 4)


@pytest.mark.parametrize(
  ("make", "options", "error", "what"),
  [
    (lambda: held_out().take(0), {}, errors.DataError, "'validation'.* has no example"),
    (lambda: held_out().repeat(), {"max_batches": None}, errors.ConfigError, "eval_steps is None"),
    (
      lambda: held_out().map(lambda ex: {"targets": ex["targets"][:5]}),
      {}, errors.DataError, r"feature 'targets' of the data has shape \(5,\)",
    ),
    (lambda: held_out().map(lambda ex: {"x": ex["targets"]}), {}, errors.DataError, "targets"),
  ],
)  # fmt: skip
def test_bad_data_is_told_before_the_first_step(tmp_path, make, options, error, what):
  trainer = make_trainer(tmp_path, how=validation(make=make, **options))
  with pytest.raises(error, match=what):
    trainer.train(program.dataset, 4)
  assert not trainer.losses and not steps_in(tmp_path)
