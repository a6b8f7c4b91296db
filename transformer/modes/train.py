"""The mode "train"."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_settings.run import RunSettings
from mesh_tensorflow import checkpoint, workers
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.transformer.data.vocabularies.base import Vocabularies
from mesh_tensorflow.transformer.gin_config import warn_of_unused_scopes, write_operative_config
from mesh_tensorflow.transformer.learning_rate_schedules import bound_schedule
from mesh_tensorflow.transformer.model.batching import resolve_steps
from mesh_tensorflow.transformer.modes.job import Job, mode
from mesh_tensorflow.transformer.modes.perplexity_eval import datasets_to_evaluate
from mesh_tensorflow.transformer.training.trainer import Trainer


def _check(settings: RunSettings) -> None:
  if settings.dataset_split != "train":
    raise ConfigError(f"run.mode is 'train' but run.dataset_split is {settings.dataset_split!r}")
  if settings.train_dataset_fn is None:
    raise ConfigError(
      "run.train_dataset_fn is not bound: give a problem file, such as "
      "--gin_file problems/tinyshakespeare.gin"
    )
  if settings.optimizer is None:
    raise ConfigError("run.optimizer is not bound; bind @optimize.AdafactorOptimizer, say")
  check_data_options(settings.skip_seen_data, settings.checkpoint_input_pipeline)


def check_data_options(skip_seen_data: bool, checkpoint_input_pipeline: bool) -> None:
  """Raises `ConfigError` if both are asked for."""
  if skip_seen_data and checkpoint_input_pipeline:
    raise ConfigError(
      "run.skip_seen_data and run.checkpoint_input_pipeline are two ways to go on with the data; "
      "bind one of them"
    )


@mode("train", trains=True, check=_check)
def run_train(job: Job) -> Any:
  """Trains by `run.train_model_fn`, from the newest checkpoint on."""
  steps = resolve_steps(job.train_steps, job.batch_size, job.sequence_length)
  arguments = dict(
    sequence_length=job.sequence_length, vocabulary=job.vocabulary, dataset_split="validation"
  )
  texts = (
    None if job.eval_dataset_fn is None else functools.partial(job.eval_dataset_fn, **arguments)
  )
  estimator = job.make_estimator(
    learning_rate_schedule=bound_schedule(job.learning_rate_schedule, job.total_run_steps or steps),
    ensemble_inputs=job.ensemble_inputs,
    held_out=functools.partial(
      datasets_to_evaluate,
      job.sequence_length,
      job.vocabulary,
      "validation",
      job.eval_dataset_fn,
      job.train_dataset_fn,
    ),
    held_out_texts=texts,
  )
  if workers.current().is_chief and not checkpoint.all_checkpoints(job.model_dir or ""):
    # Of a model that has checkpoints it is written when they are known to be of this one.
    write_operative_config(job.model_dir)
  return job.train_model_fn(
    estimator,
    job.vocabulary,
    job.sequence_length,
    job.batch_size,
    job.train_dataset_fn,
    steps,
    job.ensemble_inputs,
    skip_seen_data=job.skip_seen_data,
    seen_data_init_step=job.seen_data_init_step,
    checkpoint_input_pipeline=job.checkpoint_input_pipeline,
  )


def train_model(
  estimator: Trainer,
  vocabulary: Vocabularies,
  sequence_length: dict[str, int],
  batch_size: int,
  train_dataset_fn: Callable[..., tf.data.Dataset],
  train_steps: int,
  ensemble_inputs: int | None,
  dataset_split: str = "train",
  skip_seen_data: bool = False,
  seen_data_init_step: int = 0,
  checkpoint_input_pipeline: bool = False,
) -> list[float]:
  """Trains until the global step is `train_steps`; the default of `run.train_model_fn`.

  Resumed training goes on with the examples that come after those seen, always.

  Args:
    estimator: the `Trainer`, which knows the next three and `ensemble_inputs`.
    vocabulary: a vocabulary or a pair.
    sequence_length: dict from feature to number of tokens.
    batch_size: sequences in a batch.
    train_dataset_fn: see `Trainer.train`.
    train_steps: the absolute step at which to stop.
    ensemble_inputs: see `ModelSteps`.
    dataset_split: for the dataset function.
    skip_seen_data: seen data is counted from `seen_data_init_step`, in place of the step of
      `init_checkpoint`.
    seen_data_init_step: the step at which training on this data began.
    checkpoint_input_pipeline: go on with the data where a saved iterator was, without reading what
      came before; shuffled data continues exactly.

  Returns:
    The losses.

  Raises:
    ConfigError: both `skip_seen_data` and `checkpoint_input_pipeline`.
  """
  del vocabulary, sequence_length, batch_size, ensemble_inputs
  check_data_options(skip_seen_data, checkpoint_input_pipeline)

  def on_ready(graph: mtf.Graph) -> None:
    if not workers.current().is_chief:
      return
    # Now everything that gin configures has been called once.
    write_operative_config(estimator.model_dir)
    warn_of_unused_scopes()
    print(estimator.describe_graph(graph), flush=True)

  return estimator.train(
    train_dataset_fn,
    train_steps,
    dataset_split=dataset_split,
    on_ready=on_ready,
    seen_data_init_step=seen_data_init_step if skip_seen_data else None,
    checkpoint_input_pipeline=checkpoint_input_pipeline,
  )
