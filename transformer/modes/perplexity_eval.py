"""The mode "perplexity_eval": how probable the targets of data sets are, teacher-forced."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence

import tensorflow as tf

from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.training.progress import write_scalars
from mesh_tensorflow.transformer.data.eval_datasets import EvalDataset, reset_seeds
from mesh_tensorflow.transformer.data.vocabularies.base import Vocabularies
from mesh_tensorflow.transformer.modes.chosen_checkpoints import (
  CheckpointStep,
  restored_checkpoints,
)
from mesh_tensorflow.transformer.modes.input_fns import tell_training_split
from mesh_tensorflow.transformer.modes.job import Job, mode
from mesh_tensorflow.transformer.training.trainer import Trainer


@mode("perplexity_eval")
def run_perplexity_eval(job: Job) -> dict[str, dict[str, float]]:
  """The loss on `eval_dataset_fn`, else on a split of the training data."""
  tell_training_split(job.dataset_split)
  return perplexity_eval_of(job, job.make_estimator(), job.eval_summary_dir)


def perplexity_eval_of(
  job: Job, estimator: Trainer, folder: str | None
) -> dict[str, dict[str, float]]:
  """`perplexity_eval` of what a job asks for, with scalars in a folder."""
  return perplexity_eval(
    estimator,
    job.vocabulary,
    job.sequence_length,
    job.dataset_split,
    job.model_dir,
    job.eval_dataset_fn,
    job.train_dataset_fn,
    job.eval_checkpoint_step,
    folder,
    job.perplexity_eval_steps,
    job.eval_dir_suffix,
  )


def datasets_to_evaluate(
  sequence_length: dict[str, int],
  vocabulary: Vocabularies,
  dataset_split: str,
  eval_dataset_fn: Callable[..., Sequence[EvalDataset]] | None,
  train_dataset_fn: Callable[..., tf.data.Dataset] | None,
) -> dict[str, Callable[[], tf.data.Dataset]]:
  """The functions that make the data sets of a teacher-forced evaluation, by name.

  Args:
    sequence_length: dict from feature to number of tokens.
    vocabulary: a vocabulary or an (inputs, targets) pair.
    dataset_split: name of the split.
    eval_dataset_fn: returns the list of `EvalDataset`s; None: use `train_dataset_fn`.
    train_dataset_fn: returns the data set of a split, if there is no `eval_dataset_fn`; or None.

  Raises:
    ConfigError: there is no data set function.
  """
  arguments = dict(
    sequence_length=sequence_length, vocabulary=vocabulary, dataset_split=dataset_split
  )
  if eval_dataset_fn is not None:
    return {
      d.name: functools.partial(d.dataset_fn, sequence_length=sequence_length)
      for d in eval_dataset_fn(**arguments)
    }
  if train_dataset_fn is not None:
    return {dataset_split: functools.partial(train_dataset_fn, **arguments)}
  raise ConfigError("bind run.eval_dataset_fn or run.train_dataset_fn to evaluate")


def perplexity_eval(
  estimator: Trainer,
  vocabulary: Vocabularies,
  sequence_length: dict[str, int],
  dataset_split: str,
  model_dir: str,
  eval_dataset_fn: Callable[..., Sequence[EvalDataset]] | None,
  train_dataset_fn: Callable[..., tf.data.Dataset] | None,
  eval_checkpoint_step: CheckpointStep,
  eval_summary_dir: str | None,
  max_batches: int | None,
  eval_dir_suffix: str | None = None,
) -> dict[str, dict[str, float]]:
  """Teacher-forced evaluation of the chosen checkpoints; one line and TensorBoard scalars each.

  Args:
    estimator: the `Trainer`.
    vocabulary: a vocabulary or a pair.
    sequence_length: dict from feature to number of tokens.
    dataset_split: name of the split.
    model_dir: folder of checkpoints.
    eval_dataset_fn: called with sequence_length, vocabulary and dataset_split; returns
      `EvalDataset`s. None: the training data's function makes the split.
    train_dataset_fn: returns the data set of a split, if there is no `eval_dataset_fn`; or None.
    eval_checkpoint_step: see `get_checkpoint_iterator`; None is the newest.
    eval_summary_dir: where the scalars go; by default, for each data set,
      `model_dir/eval_<data set>_<split>_<number of examples>`, where the number is "all" without
      `max_batches`.
    max_batches: number of batches; None: all.
    eval_dir_suffix: added to the name of the folder, after "_".

  Returns:
    For each data set the metrics with the last checkpoint.

  Raises:
    ConfigError: there is no data set function.
  """
  datasets = datasets_to_evaluate(
    sequence_length, vocabulary, dataset_split, eval_dataset_fn, train_dataset_fn
  )

  def opened(name: str) -> tf.data.Dataset:
    # Each checkpoint sees the same examples, also of data that is shuffled and cut short.
    reset_seeds()
    return datasets[name]()

  # One before a checkpoint is restored, which takes a while: there may be no such split.
  ready = {name: opened(name) for name in list(datasets)[:1]}
  results: dict[str, dict[str, float]] = {}
  for _ in restored_checkpoints(estimator, eval_checkpoint_step, model_dir):
    for name in datasets:
      metrics = estimator.evaluate(ready.pop(name, None) or opened(name), max_batches, what=name)
      results[name] = metrics
      count = "all" if max_batches is None else max_batches * estimator.steps.batch_size
      folder = eval_summary_dir or os.path.join(model_dir, f"eval_{name}_{dataset_split}_{count}")
      if eval_dir_suffix:
        folder += f"_{eval_dir_suffix}"
      print(
        f"step {estimator.global_step}  {name}: loss {metrics['loss']:.4f} nats  "
        f"{metrics['bits_per_token']:.4f} bits/token  accuracy {metrics['token_accuracy']:.4f}  "
        f"({metrics['num_eval_tokens']:,.0f} tokens)",
        flush=True,
      )
      scalars = {f"eval/{name}/{k}": v for k, v in metrics.items()}
      write_scalars(folder, estimator.global_step, scalars, model_dir=model_dir)
  return results
