"""Values of settings that nothing can be done with: told, with their places, before a run."""

from __future__ import annotations

import pathlib

import pytest

from mesh_settings import run as run_settings
from mesh_tensorflow import errors
from mesh_tensorflow.transformer import gin_config, utils
from mesh_tensorflow.transformer.gin_config import checks
from mesh_tensorflow.transformer.gin_paths import gin_dir
from tests.transformer import training_program

# A layout file, so that nothing else is missing.
FILES = ["problems/stdlib_lm.gin"]

WRONG = [
  # (setting, value, what it must be)
  ("run.batch_size", "0", "a whole number of sequences of at least 1, or a pair such as"),
  ("run.batch_size", "-4", "a whole number of sequences"),
  ("run.batch_size", "'many'", "a whole number of sequences"),
  ("run.batch_size", "2.5", "a whole number of sequences"),
  ("run.batch_size", "True", "a whole number of sequences"),
  ("run.batch_size", "('tokens_per_batch', 0)", "a whole number of sequences"),
  ("run.batch_size", "('words_per_batch', 64)", "one of sequences_per_batch, tokens_per_batch"),
  ("run.batch_size", "('tokens_per_batch', 64, 2)", "a whole number of sequences"),
  ("run.train_steps", "'many'", "a whole number of at least 0, or a function"),
  ("run.train_steps", "-5", "a whole number of at least 0"),
  ("run.train_steps", "1e5", "a whole number of at least 0.*; write 100000"),
  ("run.train_steps", "None", "a whole number of at least 0"),
  ("run.report_every", "0", "a whole number of at least 1"),
  ("run.report_every", "'often'", "a whole number of at least 1"),
  ("run.iterations_per_loop", "0", "a whole number of at least 1"),
  ("run.save_checkpoints_steps", "-1", "a whole number of at least 0"),
  ("run.save_checkpoints_steps", "None", "a whole number of at least 0"),
  ("run.keep_checkpoint_max", "0", "a whole number of at least 1, or None"),
  ("run.keep_checkpoint_max", "'all'", "a whole number of at least 1, or None"),
  ("run.perplexity_eval_steps", "0", "a whole number of at least 1, or None"),
  ("run.total_run_steps", "-1", "a whole number of at least 1, or None"),
  ("run.seed", "'x'", "a whole number"),
  ("run.seen_data_init_step", "-1", "a whole number of at least 0"),
  ("run.ensemble_inputs", "0", "a whole number of at least 1, or None"),
  ("run.sequence_length", "0", "a whole number of tokens of at least 1, or a dict"),
  ("run.sequence_length", "{'targets': 'long'}", "a whole number of tokens"),
  ("run.mode", "'trian'", "one of 'train', .*; did you mean train"),
  ("run.mode", "7", "one of 'train'"),
  ("run.model_type", "'bitransfomer'", "one of .*; did you mean bitransformer"),
  ("run.mesh_implementation", "'smid'", "one of .*; did you mean simd"),
  ("run.nonfinite", "'skipp'", "one of 'stop', 'skip'; did you mean skip"),
  ("run.eval_checkpoint_step", "'newest'", "a step, a list of steps.*'new'"),
  ("run.eval_checkpoint_step", "[1, 'x']", "a step, a list of steps"),
  ("run.export_checkpoint_step", "-7", "a step, a list of steps"),
  ("run.learning_rate_schedule", "-0.1", "a schedule, a number of at least 0"),
  ("run.learning_rate_schedule", "'fast'", "a schedule, a number of at least 0"),
  ("run.skip_seen_data", "'False'", "True or False"),
  ("run.dataset_split", "3", "a text in quotes"),
  ("run.mesh_devices", "'CPU:0'", "a list of names of devices"),
  ("run.mesh_shape", "'batch:0'", "a whole number of at least 1"),
  ("Unitransformer.d_model", "0", "a whole number of at least 1"),
  ("Unitransformer.max_length", "'long'", "a whole number of at least 1"),
  ("Unitransformer.label_smoothing", "1.5", "a number from 0 to below 1"),
  ("make_layer_stack.num_layers", "0", "a whole number of at least 1"),
  ("SelfAttention.num_heads", "-2", "a whole number of at least 1"),
  ("SelfAttention.dropout_rate", "1.0", "a number from 0 to below 1"),
  ("SelfAttention.dropout_rate", "'none'", "a number from 0 to below 1"),
  ("DenseReluDense.hidden_size", "[64]", "a whole number of at least 1"),
  ("DenseReluDense.use_bias", "'no'", "True or False"),
  ("tpu_estimator_model_fn.outer_batch_size", "0", "a whole number of at least 1"),
  ("Checkpointer.keep_every_n_hours", "0", "a number above 0, or None"),
  ("workers.join.timeout_seconds", "-1", "a number above 0"),
  ("StopRequests.save_within_seconds", "0", "a number above 0"),
  ("AdamWeightDecayOptimizer.beta_1", "1", "a number from 0 to below 1"),
  ("text_lm_dataset.validation_fraction", "2", "a number from 0 to 1"),
  ("decode_from_file.repeats", "0", "a whole number of at least 1"),
  ("get_variable_dtype.slice_dtype", "'float23'", "one of 'float32', .*; did you mean float32"),
  ("run.optimizer", "3", "an optimizer class such as @optimize.AdamWOptimizer"),
  ("run.vocabulary", "'byte'", "a name such as 'bytes', 'characters' or 'sentencepiece:8000'"),
  ("run.train_dataset_fn", "'text'", "a function or class of Python or gin"),
  ("run.train_model_fn", "5", "a function or class of Python or gin"),
  ("run.predict_fn", "'abc'", "a function or class of Python or gin .@name., or None"),
  ("run.predict_fn", "'decode_from_fil'", r"or None; did you mean @decode_from_file"),
  ("SelfAttention.attention_func", "'hybird'", r"one of 'hybrid', or None; did you mean hybrid"),
  ("run.mesh_shape", "None", "a mesh shape such as 'batch:2,model:2'"),
  ("run.layout_rules", "7", "layout rules such as"),
]


@pytest.mark.parametrize(("name", "value", "legal"), WRONG)
def test_wrong_value(name, value, legal):
  gin_config.parse_gin(FILES, [f"{name} = {value}"])
  with pytest.raises(errors.ConfigError, match=legal) as e:
    gin_config.check_run()
  text = str(e.value)
  assert text.startswith(f"gin: --gin_param {f'{name} = {value}'!r}: {name} = ")
  assert "it must be" in text or "its size must be" in text
  assert "\n" not in text and len(text) < 400


def test_the_place_is_that_of_the_file_and_of_the_macro(tmp_path):
  file = tmp_path / "mine.gin"
  file.write_text("steps = -5\n\nrun.train_steps = %steps\n")
  gin_config.parse_gin([*FILES, str(file)], [])
  with pytest.raises(errors.ConfigError) as e:
    gin_config.check_run()
  assert f"gin: {file}:3, %steps of {file}:1: run.train_steps = -5: it must be" in str(e.value)


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("run.batch_size", "('tokens_per_batch', 4096)"),
    ("run.train_steps", "@auto_train_steps"),
    ("run.train_steps", "0"),
    ("run.keep_checkpoint_max", "None"),
    ("run.eval_checkpoint_step", "[0, 2000]"),
    ("run.export_checkpoint_step", "-1"),
    ("run.eval_checkpoint_step", "'all'"),
    ("run.learning_rate_schedule", "0.001"),
    ("run.skip_seen_data", "1"),
    ("linear_warmup.steps_or_fraction", "1e4"),
    ("learning_rate_schedule_noam.warmup_steps", "1e4"),
    ("SelfAttention.dropout_rate", "0"),
    ("LayerStack.dropout_rate", "None"),
    ("get_variable_dtype.slice_dtype", "'float32'"),
    ("AdafactorOptimizer.decay_rate", "0.99"),
    ("serialize_num_microbatches.tokens_per_microbatch_per_replica", "0"),
  ],
)
def test_legal_value(name, value):
  gin_config.parse_gin(FILES, [f"{name} = {value}"])
  gin_config.check_run()


@pytest.mark.parametrize("value", [None, "all", "new", "best", -1, 0, 7, [0], (2, 0), [5]])
def test_a_step_of_a_checkpoint(value):
  assert run_settings._is_checkpoint_step(value)


@pytest.mark.parametrize("value", ["newest", "", -2, 2.5, True, [], [-1], [3, -1], [2.5], ["all"]])
def test_no_step_of_a_checkpoint(value):
  assert not run_settings._is_checkpoint_step(value)


def test_every_shipped_file_is_legal():
  for path in sorted(pathlib.Path(gin_dir()).rglob("*.gin")):
    gin_config.parse_gin([str(path)], [], finalize_config=False)
    checks.check_settings(gin_config.parsing._Read.settings)
    gin_config.parsing.gin.clear_config()


@pytest.mark.parametrize(
  ("argument", "value"),
  [
    ("batch_size", 0),
    ("train_steps", "many"),
    ("train_steps", -5),
    ("report_every", 0),
    ("mesh_shape", "batch:0"),
    ("mode", "trian"),
  ],
)
def test_calls_of_run(argument, value, tmp_path):
  arguments = dict(
    mesh_shape="", layout_rules="", sequence_length=8, batch_size=2, mode="train", model_type="lm"
  )
  with pytest.raises(errors.ConfigError, match=rf"run.{argument} = "):
    utils.run(None, None, None, None, str(tmp_path), **{**arguments, argument: value})
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  ("argument", "value"),
  [
    ("steps_per_call", 0),
    ("report_every", 0),
    ("report_every", None),
    ("save_checkpoints_steps", -1),
    ("keep_checkpoint_max", 0),
    ("nonfinite", "warn"),
  ],
)
def test_trainers(argument, value, cpu_devices):
  name = {"steps_per_call": "iterations_per_loop"}.get(argument, argument)
  with pytest.raises(errors.ConfigError, match=rf"Trainer.{name} = {value!r}: it must be"):
    training_program.make_trainer(**{argument: value})


@pytest.mark.parametrize("steps", [-1, "many", 2.5, True])
def test_training_for_so_many_steps(steps, cpu_devices):
  trainer = training_program.make_trainer()
  with pytest.raises(errors.ConfigError, match="Trainer.train.train_steps = .*: it must be"):
    trainer.train(training_program.dataset, steps)
