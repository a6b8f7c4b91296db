"""The trainer as one gin-configurable function, `run`; and the names that gin files use."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.transformer import learning_rate_schedules, mesh_setup, plan, text_io
from mesh_tensorflow.transformer.batching import (
  auto_train_steps,
  compute_batch_size,
  resolve_steps,
  serialize_num_microbatches,
  tpu_mesh_shape,
)
from mesh_tensorflow.transformer.checkpoints import get_checkpoint_iterator
from mesh_tensorflow.transformer.gin_config import parse_gin_defaults_and_flags
from mesh_tensorflow.transformer.model_steps import ModelSteps, build_model, get_variable_dtype
from mesh_tensorflow.transformer.progress import write_scalars
from mesh_tensorflow.transformer.text_io import (
  clean_decodes,
  encode_inputs,
  get_inputs_from_file,
  get_step_from_checkpoint_path,
  inputs_vocabulary,
  separate_vocabularies,
  targets_vocabulary,
  write_lines_to_file,
)
from mesh_tensorflow.transformer.trainer import Trainer
from mesh_tensorflow.transformer.translate import (
  decode_from_file,
  eval_model,
  restored_checkpoints,
)

MODES = ("train", "eval", "perplexity_eval", "infer", "plan")


@gin.configurable(denylist=["predict_fn"])
def tpu_estimator_model_fn(
  model_type: str,
  transformer_model: Any,
  mesh_impl: mtf.MeshImpl,
  batch_size: int,
  sequence_length: dict[str, int],
  outer_batch_size: int = 1,
  predict_fn: Any = None,
  variable_filter: Any = None,
) -> ModelSteps:
  """The programs of a model (the TF1 library made an Estimator's model function here).

  Args:
    model_type: see `build_model`.
    transformer_model: the model.
    mesh_impl: the mesh.
    batch_size: sequences in a batch.
    sequence_length: dict from feature to number of tokens.
    outer_batch_size: size of a dimension `outer_batch`, in which a batch may be split too.
    predict_fn: must be None: it made TF1 tensors.
    variable_filter: see `ModelSteps`.
  """
  if predict_fn is not None:
    raise ConfigError("predict_fn is not available: it made TF1 tensors; use Trainer.sample")
  return ModelSteps(
    transformer_model,
    mesh_impl,
    model_type,
    batch_size,
    sequence_length,
    outer_batch_size=outer_batch_size,
    variable_filter=variable_filter,
  )


def train_model(
  estimator: Trainer,
  vocabulary: Any,
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
    estimator: the `Trainer`.
    vocabulary: a vocabulary or a pair.
    sequence_length: dict from feature to number of tokens.
    batch_size: sequences in a batch.
    train_dataset_fn: see `Trainer.train`.
    train_steps: the absolute step at which to stop.
    ensemble_inputs: must be None.
    dataset_split: for the dataset function.
    skip_seen_data: has no effect: seen data is skipped always.
    seen_data_init_step: must be 0.
    checkpoint_input_pipeline: has no effect, likewise.

  Returns:
    The losses.
  """
  del vocabulary, sequence_length, batch_size, skip_seen_data, checkpoint_input_pipeline
  if ensemble_inputs:
    raise ConfigError("run.ensemble_inputs is not available in this version")
  if seen_data_init_step:
    raise ConfigError("run.seen_data_init_step is not available in this version")
  return estimator.train(
    train_dataset_fn,
    train_steps,
    dataset_split=dataset_split,
    on_ready=lambda graph: print(
      mesh_setup.describe_layout(estimator.mesh_impl, graph), flush=True
    ),
  )


@gin.configurable
def infer_model(
  estimator: Trainer,
  vocabulary: Any,
  sequence_length: dict[str, int],
  batch_size: int,
  model_type: str,
  model_dir: str,
  eval_checkpoint_step: Any,
  checkpoint_paths: list[str] | None = None,
  decode_fn: Callable[..., Any] = decode_from_file,
) -> None:
  """Decodes with each of the chosen checkpoints.

  Args:
    estimator: the `Trainer`.
    vocabulary: a vocabulary or a pair.
    sequence_length: dict from feature to number of tokens.
    batch_size: rows at a time.
    model_type: see `build_model`.
    model_dir: folder of checkpoints.
    eval_checkpoint_step: see `get_checkpoint_iterator`.
    checkpoint_paths: paths to use in place of those.
    decode_fn: called for each checkpoint.

  Raises:
    ConfigError: there is no checkpoint.
  """
  for path in restored_checkpoints(estimator, eval_checkpoint_step, model_dir, checkpoint_paths):
    decode_fn(
      estimator,
      vocabulary=vocabulary,
      model_type=model_type,
      batch_size=batch_size,
      sequence_length=sequence_length,
      checkpoint_path=path,
    )


def perplexity_eval(
  estimator: Trainer,
  vocabulary: Any,
  sequence_length: dict[str, int],
  dataset_split: str,
  model_dir: str,
  eval_dataset_fn: Callable[..., Any] | None,
  train_dataset_fn: Callable[..., tf.data.Dataset] | None,
  eval_checkpoint_step: Any,
  eval_summary_dir: str | None,
  max_batches: int | None,
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
    train_dataset_fn: see there.
    eval_checkpoint_step: see `get_checkpoint_iterator`; None is the newest.
    eval_summary_dir: where the scalars go; `model_dir/<split>_eval` by default.
    max_batches: number of batches; None: all.

  Returns:
    For each data set the metrics with the last checkpoint.

  Raises:
    ConfigError: there is no data set function.
  """
  arguments = dict(
    sequence_length=sequence_length, vocabulary=vocabulary, dataset_split=dataset_split
  )
  if eval_dataset_fn is not None:
    datasets = {
      d.name: functools.partial(d.dataset_fn, sequence_length=sequence_length)
      for d in eval_dataset_fn(**arguments)
    }
  elif train_dataset_fn is not None:
    datasets = {dataset_split: functools.partial(train_dataset_fn, **arguments)}
  else:
    raise ConfigError("bind run.eval_dataset_fn or run.train_dataset_fn to evaluate")
  results: dict[str, dict[str, float]] = {}
  for _ in restored_checkpoints(estimator, eval_checkpoint_step, model_dir):
    for name, make in datasets.items():
      metrics = estimator.evaluate(make(), max_batches, what=name)
      results[name] = metrics
      folder = eval_summary_dir or os.path.join(model_dir, f"{dataset_split}_eval")
      write_scalars(
        folder, estimator.global_step, {f"eval/{name}/{k}": v for k, v in metrics.items()}
      )
      print(
        f"step {estimator.global_step}  {name}: loss {metrics['loss']:.4f} nats  "
        f"{metrics['bits_per_token']:.4f} bits/token  accuracy {metrics['token_accuracy']:.4f}  "
        f"({metrics['num_eval_tokens']:,.0f} tokens)",
        flush=True,
      )
  return results


@gin.configurable
def run(
  tpu_job_name: str | None,
  tpu: str | None,
  gcp_project: str | None,
  tpu_zone: str | None,
  model_dir: str,
  model_type: str = "bitransformer",
  vocabulary: Any = None,
  train_dataset_fn: Callable[..., tf.data.Dataset] | None = None,
  eval_dataset_fn: Callable[..., Any] | None = None,
  dataset_split: str = "train",
  autostack: bool = True,
  eval_checkpoint_step: Any = None,
  export_checkpoint_step: Any = None,
  export_path: str = "",
  mode: str = "train",
  iterations_per_loop: int = 100,
  save_checkpoints_steps: int = 5000,
  keep_checkpoint_max: int | None = None,
  eval_summary_dir: str | None = None,
  batch_size: Any = ("tokens_per_replica", 2048),
  train_steps: Any = auto_train_steps,
  total_run_steps: int | None = None,
  sequence_length: Any = None,
  mesh_shape: Any = gin.REQUIRED,
  mesh_devices: list[str] | None = None,
  layout_rules: Any = gin.REQUIRED,
  learning_rate_schedule: Any = None,
  optimizer: Any = None,
  predict_fn: Any = None,
  variable_filter: Any = None,
  perplexity_eval_steps: int | None = 100,
  init_checkpoint: str | None = None,
  ensemble_inputs: int | None = None,
  train_model_fn: Callable[..., Any] = train_model,
  skip_seen_data: bool = False,
  seen_data_init_step: int = 0,
  output_eval_examples: bool = True,
  checkpoint_input_pipeline: bool = False,
  eval_dir_suffix: str | None = None,
  *,
  mesh_implementation: str = "auto",
  seed: int = 0,
  report_every: int = 100,
) -> Any:
  """Trains, evaluates or decodes, as gin says.

  Args:
    tpu_job_name: TPU only.
    tpu: TPU only.
    gcp_project: TPU only.
    tpu_zone: TPU only.
    model_dir: folder for checkpoints, summaries and the configuration.
    model_type: see `build_model`.
    vocabulary: a vocabulary, or an (inputs, targets) pair.
    train_dataset_fn: see `Trainer.train`.
    eval_dataset_fn: see `eval_model` and `perplexity_eval`.
    dataset_split: "train" in training; the split to evaluate otherwise.
    autostack: has no effect.
    eval_checkpoint_step: see `get_checkpoint_iterator`.
    export_checkpoint_step: not available in this version.
    export_path: not available in this version.
    mode: "train"; "eval" (decode the data sets of `eval_dataset_fn` that have metrics, and score
      the texts: see `eval_model`; without such a data set as the next); "perplexity_eval"
      (teacher-forced); "infer" (decode the lines of a file); "plan" (print what training needs on
      each processor, without doing it).
    iterations_per_loop: training steps in one call of the compiled program.
    save_checkpoints_steps: steps between checkpoints.
    keep_checkpoint_max: number of checkpoints to keep; None: all.
    eval_summary_dir: see `eval_model` and `perplexity_eval`.
    batch_size: number of sequences, or see `compute_batch_size`.
    train_steps: the absolute step at which training ends, or a function of batch size and
      sequence length.
    total_run_steps: what schedules take for the length of training; `train_steps` by default.
    sequence_length: number of tokens, or a dict from feature to that.
    mesh_shape: mesh shape.
    mesh_devices: names of devices; see `mesh_setup.make_mesh_impl`.
    layout_rules: layout rules.
    learning_rate_schedule: a function `(step, total_train_steps)`, a list of such and numbers
      (their product), or a number.
    optimizer: an optimizer class.
    predict_fn: must be None.
    variable_filter: which variables are trained; see `ModelSteps`.
    perplexity_eval_steps: number of batches to evaluate; None: all.
    init_checkpoint: a checkpoint to start from when model_dir has none.
    ensemble_inputs: not available in this version.
    train_model_fn: what trains.
    skip_seen_data: see `train_model`.
    seen_data_init_step: see `train_model`.
    output_eval_examples: whether "eval" writes inputs, targets and predictions.
    checkpoint_input_pipeline: see `train_model`.
    eval_dir_suffix: added to the name of the folder of evaluation scalars.
    mesh_implementation: "auto", "placement" or "simd"; see `mesh_setup.make_mesh_impl`.
    seed: of initial weights and of random operations.
    report_every: steps between lines of the report.

  Returns:
    Losses (train), metrics (eval), or None.

  Raises:
    ConfigError: settings that contradict each other.
  """
  del tpu_job_name, gcp_project, tpu_zone, autostack
  del export_checkpoint_step, export_path
  if mode not in MODES:
    raise ConfigError(f"run.mode {mode!r} is unknown or not available; use {', '.join(MODES)}")
  if tpu:
    raise ConfigError("--tpu is not available in this version; leave it out to use CPU or GPU")
  if mode == "train" and dataset_split != "train":
    raise ConfigError(f"run.mode is 'train' but run.dataset_split is {dataset_split!r}")
  if mode == "train" and train_dataset_fn is None:
    raise ConfigError(
      "run.train_dataset_fn is not bound: give a problem file, such as "
      "--gin_file problems/tinyshakespeare.gin"
    )
  if vocabulary is None and mode != "plan":
    raise ConfigError(
      "run.vocabulary is not bound: bind @vocabulary.get_byte_vocabulary(), or give a problem file"
    )
  if sequence_length is None:
    raise ConfigError("run.sequence_length is not bound")
  if isinstance(sequence_length, int):
    sequence_length = {"inputs": sequence_length, "targets": sequence_length}
  mesh_shape = mtf.convert_to_shape(mesh_shape)
  layout_rules = mtf.convert_to_layout_rules(layout_rules)
  if not isinstance(batch_size, int):
    batch_size = compute_batch_size(sequence_length, mesh_shape, layout_rules, batch_size)
  if mode == "plan":
    return print_plan(
      model_type, mesh_shape, layout_rules, batch_size, sequence_length, optimizer, vocabulary
    )
  train_steps = resolve_steps(train_steps, batch_size, sequence_length)
  schedule = bound_schedule(learning_rate_schedule, total_run_steps or train_steps)

  mesh_impl = mesh_setup.make_mesh_impl(
    mesh_shape, layout_rules, mesh_devices, mesh_implementation, seed
  )
  model = build_model(
    model_type=model_type,
    input_vocab_size=inputs_vocabulary(vocabulary).vocab_size,
    output_vocab_size=targets_vocabulary(vocabulary).vocab_size,
    layout_rules=layout_rules,
    mesh_shape=mesh_shape,
  )
  steps = tpu_estimator_model_fn(
    model_type=model_type,
    transformer_model=model,
    mesh_impl=mesh_impl,
    batch_size=batch_size,
    sequence_length=sequence_length,
    predict_fn=predict_fn,
    variable_filter=variable_filter,
  )
  estimator = Trainer(
    steps,
    vocabulary,
    model_dir,
    optimizer=optimizer,
    learning_rate_schedule=schedule,
    steps_per_call=iterations_per_loop,
    save_checkpoints_steps=save_checkpoints_steps,
    keep_checkpoint_max=keep_checkpoint_max,
    report_every=report_every,
    init_checkpoint=init_checkpoint,
  )
  if mode == "train":
    if optimizer is None:
      raise ConfigError("run.optimizer is not bound; bind @optimize.AdafactorOptimizer, say")
    write_operative_config(model_dir)
    return train_model_fn(
      estimator,
      vocabulary,
      sequence_length,
      batch_size,
      train_dataset_fn,
      train_steps,
      ensemble_inputs,
      skip_seen_data=skip_seen_data,
      seen_data_init_step=seen_data_init_step,
      checkpoint_input_pipeline=checkpoint_input_pipeline,
    )
  if mode == "infer":
    infer_model(
      estimator,
      vocabulary,
      sequence_length,
      batch_size,
      model_type,
      model_dir,
      eval_checkpoint_step,
    )
    return None
  if mode == "eval" and eval_dataset_fn is not None:
    results = eval_model(
      estimator,
      vocabulary,
      sequence_length,
      batch_size,
      dataset_split,
      model_dir,
      eval_dataset_fn,
      eval_summary_dir,
      eval_checkpoint_step,
      output_eval_examples=output_eval_examples,
      eval_dir_suffix=eval_dir_suffix,
    )
    if results:
      return results
  if eval_dir_suffix:
    eval_summary_dir = (
      eval_summary_dir or os.path.join(model_dir, f"{dataset_split}_eval")
    ) + f"_{eval_dir_suffix}"
  return perplexity_eval(
    estimator,
    vocabulary,
    sequence_length,
    dataset_split,
    model_dir,
    eval_dataset_fn,
    train_dataset_fn,
    eval_checkpoint_step,
    eval_summary_dir,
    perplexity_eval_steps,
  )


def print_plan(
  model_type: str,
  mesh_shape: mtf.Shape,
  layout_rules: mtf.LayoutRules,
  batch_size: int,
  sequence_length: dict[str, int],
  optimizer: Any,
  vocabulary: Any,
) -> mtf.Report:
  """Prints what a training step needs on each processor; see `plan.plan`.

  Args:
    model_type: see `build_model`.
    mesh_shape: mesh shape.
    layout_rules: layout rules.
    batch_size: sequences in a batch.
    sequence_length: dict from feature to number of tokens.
    optimizer: an optimizer class.
    vocabulary: a vocabulary or a pair; None: `make_steps.vocab_size` of gin.

  Returns:
    The `mtf.Report`.
  """
  sizes = {}
  if vocabulary is not None:
    sizes["vocab_size"] = (
      inputs_vocabulary(vocabulary).vocab_size,
      targets_vocabulary(vocabulary).vocab_size,
    )
  if optimizer is None:
    raise ConfigError("run.optimizer is not bound; bind @optimize.AdafactorOptimizer, say")
  steps = plan.make_steps(
    model_type, mesh_shape, layout_rules, batch_size, sequence_length, **sizes
  )
  print(f"{plan.count_parameters(steps):,} parameters", flush=True)
  report = plan.plan(steps, optimizer)
  print(report, flush=True)
  return report


def bound_schedule(schedule: Any, total_train_steps: int) -> Any:
  """A schedule as a function of the step alone; numbers stay numbers.

  Args:
    schedule: a function `(step, total_train_steps)`, a list of such and numbers, or a number.
    total_train_steps: number of training steps.
  """
  if isinstance(schedule, list):
    schedule = functools.partial(learning_rate_schedules.product_learning_rate, factors=schedule)
  if callable(schedule):
    return functools.partial(schedule, total_train_steps=total_train_steps)
  return schedule


def write_operative_config(model_dir: str | None) -> None:
  """Writes the bindings in force beside the checkpoints, as `operative_config.gin`."""
  if not model_dir:
    return
  tf.io.gfile.makedirs(model_dir)
  with tf.io.gfile.GFile(os.path.join(model_dir, "operative_config.gin"), "w") as f:
    f.write(gin.operative_config_str())


__all__ = [
  "MODES",
  "ModelSteps",
  "Trainer",
  "auto_train_steps",
  "bound_schedule",
  "build_model",
  "clean_decodes",
  "compute_batch_size",
  "decode_from_file",
  "encode_inputs",
  "eval_model",
  "get_checkpoint_iterator",
  "get_inputs_from_file",
  "get_step_from_checkpoint_path",
  "get_variable_dtype",
  "infer_model",
  "inputs_vocabulary",
  "parse_gin_defaults_and_flags",
  "perplexity_eval",
  "run",
  "separate_vocabularies",
  "serialize_num_microbatches",
  "targets_vocabulary",
  "text_io",
  "tpu_estimator_model_fn",
  "tpu_mesh_shape",
  "train_model",
  "write_lines_to_file",
  "write_operative_config",
]
