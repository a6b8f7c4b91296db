"""The trainer as one gin-configurable function, `run`: what is asked for, checked, and done."""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import checkpoint as checkpoint_lib
from mesh_tensorflow import workers
from mesh_tensorflow.environment.tensorflow_mode import check_tensorflow2
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.tpu import mesh as tpu_mesh
from mesh_tensorflow.transformer.gin_config import value_checks, write_operative_config
from mesh_tensorflow.transformer.meshes import mesh_setup
from mesh_tensorflow.transformer.meshes.batching import (
  auto_train_steps,
  compute_batch_size,
  resolve_steps,
)
from mesh_tensorflow.transformer.modes import plan
from mesh_tensorflow.transformer.modes.checkpoints import named_checkpoints
from mesh_tensorflow.transformer.modes.estimator import get_estimator, train_model
from mesh_tensorflow.transformer.modes.evaluation import eval_model, perplexity_eval
from mesh_tensorflow.transformer.modes.score_files import show_scores
from mesh_tensorflow.transformer.modes.scoring import score_from_dataset, score_from_strings
from mesh_tensorflow.transformer.modes.translate import infer_model
from mesh_tensorflow.transformer.programs import training_data
from mesh_tensorflow.transformer.programs.export import export_model
from mesh_tensorflow.transformer.schedules.product import bound_schedule
from mesh_tensorflow.transformer.vocabularies.kept import kept_in

_MODULE = "mesh_tensorflow.transformer.utils"

MODES = value_checks.MODES
# Modes that can do without a sequence length: the examples have one.
_EVAL_MODES = ("eval", "score_eval")


def _before_arguments(configured: Callable[..., Any]) -> Callable[..., Any]:
  """What must be done before gin makes the arguments of `run`.

  The workers join: what gin calls may run TensorFlow, after which no worker can join; and workers
  that have joined can leave it to one of them to write a vocabulary. And vocabularies come from the
  folder of the model's checkpoints.
  """

  @functools.wraps(configured)
  def run(*args, **kwargs):
    check_tensorflow2()
    given = _as_bound(inspect.signature(configured).bind_partial(*args, **kwargs).arguments)
    if workers.cluster_from_environment().size > 1:
      _join_as_bound(given)
    with kept_in(
      given.get("model_dir"),
      may_write=given.get("mode", "train") == "train",
      allow_change=bool(given.get("allow_config_change")),
    ):
      return configured(*args, **kwargs)

  return run


def _as_bound(arguments: dict[str, Any]) -> dict[str, Any]:
  """Some arguments of `run`: those given, else what gin binds."""
  bound = gin.get_bindings(f"{_MODULE}.run", resolve_references=False)
  # A copy of what refers to a configurable or macro is its value; all at once would be too much.
  names = ("model_dir", "mode", "mesh_shape", "mesh_implementation", "allow_config_change")
  return {n: copy.deepcopy(bound[n]) for n in names if n in bound} | arguments


def _join_as_bound(given: dict[str, Any]) -> None:
  """Joins the workers with the devices that `run` will need, by its arguments and bindings."""
  mode = given.get("mode", "train")
  if given.get("tpu") or mode not in MODES or mode == "plan" or "mesh_shape" not in given:
    return  # `run` has no use for workers, or something to complain about.
  _join(mode, given["mesh_shape"], given.get("mesh_implementation", "auto"))


def _join(mode: str, mesh_shape: Any, mesh_implementation: str) -> None:
  """Joins the workers that TF_CONFIG names, if it names several."""
  count = workers.cluster_from_environment().size
  if count > 1 and mode.startswith("export"):
    raise ConfigError(
      f"run.mode {mode!r} runs in one process, but TF_CONFIG names {count} workers: unset it, and "
      "give a mesh of this machine; any mesh restores any checkpoint"
    )
  mesh_setup.join_workers(mtf.convert_to_shape(mesh_shape), mesh_implementation)


@_before_arguments
@gin.configurable(module=_MODULE)
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
  keep_checkpoint_max: int | None = 5,
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
  nonfinite: str = "stop",
  allow_config_change: bool = False,
) -> Any:
  """Trains, evaluates or decodes, as gin says.

  Args:
    tpu_job_name: name of the job of the TPU workers; None: "worker".
    tpu: a TPU to run on: "local", a name or an address; see `tpu_mesh.connect`. None: run on GPU or
      CPU.
    gcp_project: project of a TPU that is given by name.
    tpu_zone: zone of a TPU that is given by name.
    model_dir: folder for checkpoints, summaries and the configuration.
    model_type: see `build_model`.
    vocabulary: a vocabulary, or an (inputs, targets) pair.
    train_dataset_fn: see `Trainer.train`.
    eval_dataset_fn: see `eval_model` and `perplexity_eval`.
    dataset_split: "train" in training; the split to evaluate otherwise.
    autostack: has no effect.
    eval_checkpoint_step: which checkpoints the modes that evaluate or decode take: a step, a list
      of steps, "all", "new" (each as it appears, endlessly), or None, the newest; see
      `get_checkpoint_iterator`.
    export_checkpoint_step: the checkpoint to export, see `get_checkpoint_iterator`; None or 0: the
      newest.
    export_path: the SavedModel goes into a new folder in here.
    mode: "train"; "eval" (decode the data sets of `eval_dataset_fn` that have metrics, and compare
      the texts: see `eval_model`; without such a data set as "perplexity_eval"); "score_eval"
      (likewise, with scores of the targets in place of texts); "perplexity_eval" (teacher-forced);
      "infer" (decode the lines of a file: see `infer_model`); "score_from_strings",
      "score_from_dataset" (see these functions); "export_infer", "export_score" (write a SavedModel
      that makes outputs, or scores: see `export.save`; "export" is the old name of the first);
      "plan" (print what training needs on each processor, without doing it).
    iterations_per_loop: training steps in one call of the compiled program.
    save_checkpoints_steps: steps between checkpoints.
    keep_checkpoint_max: number of checkpoints to keep, the newest; None: all.
    eval_summary_dir: see `eval_model` and `perplexity_eval`.
    batch_size: number of sequences, or see `compute_batch_size`.
    train_steps: the absolute step at which training ends, or a function of batch size and
      sequence length.
    total_run_steps: what schedules take for the length of training; `train_steps` by default.
    sequence_length: number of tokens, or a dict from feature to that; None, in modes "eval" and
      "score_eval": that of the longest examples.
    mesh_shape: mesh shape.
    mesh_devices: names of devices; see `mesh_setup.make_mesh_impl`.
    layout_rules: layout rules.
    learning_rate_schedule: a function `(step, total_train_steps)`, a list of such and numbers
      (their product), or a number.
    optimizer: an optimizer class.
    predict_fn: see `tpu_estimator_model_fn`.
    variable_filter: which variables are trained; see `ModelSteps`.
    perplexity_eval_steps: number of batches to evaluate; None: all.
    init_checkpoint: a checkpoint to start from when model_dir has none; see
      `init_checkpoint.restore`.
    ensemble_inputs: in training, the members of an ensemble that see data of their own.
    train_model_fn: what trains.
    skip_seen_data: see `train_model`.
    seen_data_init_step: see `train_model`.
    output_eval_examples: whether "eval" writes inputs, targets and predictions.
    checkpoint_input_pipeline: see `train_model`.
    eval_dir_suffix: added to the name of the folder of evaluation scalars.
    mesh_implementation: "auto", "placement" or "simd"; see `mesh_setup.make_mesh_impl`.
    seed: of initial weights and of random operations.
    report_every: steps between lines of the report.
    nonfinite: in training, what a NaN or infinite loss does: "stop" or "skip"; see `Trainer`.
    allow_config_change: whether the checkpoints may be of another model or vocabulary than this
      one: that is then told, else refused; see `gin_config.model_config`.

  Returns:
    Losses (train), metrics (eval), what the function of the mode returned (scores), the path of
    the SavedModel (export), the report (plan), or None.

  Raises:
    ConfigError: settings that contradict each other.
  """
  value_checks.check_arguments("run", run, locals())
  value_checks.check_mesh_shape(mesh_shape)
  _check_bindings(mode, dataset_split, train_dataset_fn, vocabulary)
  training_data.check_data_options(skip_seen_data, checkpoint_input_pipeline)
  if tpu and mode != "plan":
    # Before TensorFlow runs anything.
    tpu = tpu_mesh.connect(tpu, zone=tpu_zone, project=gcp_project, job_name=tpu_job_name)
  if sequence_length is None and (mode not in _EVAL_MODES or eval_dataset_fn is None):
    raise ConfigError("run.sequence_length is not bound")
  if isinstance(sequence_length, int):
    sequence_length = {"inputs": sequence_length, "targets": sequence_length}
  mesh_shape = mtf.convert_to_shape(mesh_shape)
  layout_rules = mtf.convert_to_layout_rules(layout_rules)
  batch_size = _number_of_sequences(batch_size, sequence_length, mesh_shape, layout_rules)
  if mode == "plan":
    return plan.print_plan(
      model_type, mesh_shape, layout_rules, batch_size, sequence_length, optimizer, vocabulary
    )
  if not tpu:
    _join(mode, mesh_shape, mesh_implementation)
  schedule = None
  if mode == "train":
    if optimizer is None:
      raise ConfigError("run.optimizer is not bound; bind @optimize.AdafactorOptimizer, say")
    train_steps = resolve_steps(train_steps, batch_size, sequence_length)
    schedule = bound_schedule(learning_rate_schedule, total_run_steps or train_steps)

  make_estimator = functools.partial(
    get_estimator,
    model_type=model_type,
    vocabulary=vocabulary,
    mesh_shape=mesh_shape,
    layout_rules=layout_rules,
    model_dir=model_dir,
    batch_size=batch_size,
    autostack=autostack,
    learning_rate_schedule=schedule,
    keep_checkpoint_max=keep_checkpoint_max,
    save_checkpoints_steps=save_checkpoints_steps,
    optimizer=optimizer,
    predict_fn=predict_fn,
    variable_filter=variable_filter,
    ensemble_inputs=ensemble_inputs if mode == "train" else None,
    use_tpu=tpu,
    tpu_job_name=tpu_job_name,
    iterations_per_loop=iterations_per_loop,
    cluster=None,
    init_checkpoint=init_checkpoint,
    mesh_devices=mesh_devices,
    score_in_predict_mode="score" in mode,
    mesh_implementation=mesh_implementation,
    seed=seed,
    report_every=report_every,
    nonfinite=nonfinite,
    allow_config_change=allow_config_change,
  )
  # First of all the devices: when data is read they cannot be made any more.
  if sequence_length is None:
    if not mesh_devices:
      mesh_setup.find_devices(mesh_shape.size)
    estimator = lambda lengths: make_estimator(sequence_length=lengths)  # noqa: E731
  else:
    estimator = make_estimator(sequence_length=sequence_length)
  if mode in _EVAL_MODES and (eval_dataset_fn is not None or mode == "score_eval"):
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
      eval_with_score=mode == "score_eval",
      output_eval_examples=output_eval_examples,
      eval_dir_suffix=eval_dir_suffix,
    )
    if results or sequence_length is None or mode == "score_eval":
      return results
  common = (estimator, vocabulary)
  if mode == "train":
    if workers.current().is_chief and not checkpoint_lib.all_checkpoints(model_dir or ""):
      # Of a model that has checkpoints it is written when they are known to be of this one.
      write_operative_config(model_dir)
    return train_model_fn(
      *common,
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
    return infer_model(
      *common, sequence_length, batch_size, model_type, model_dir, eval_checkpoint_step
    )
  if mode == "score_from_strings":
    result = score_from_strings(
      *common, model_type, batch_size, sequence_length, model_dir, eval_checkpoint_step
    )
    show_scores(result)
    return result
  if mode == "score_from_dataset":
    result = score_from_dataset(
      *common, batch_size, sequence_length, model_dir, eval_checkpoint_step, dataset_split
    )
    show_scores(result)
    return result
  if mode.startswith("export"):
    path = None
    if export_checkpoint_step:
      path = next(iter(named_checkpoints(export_checkpoint_step, model_dir)))
    exported = export_model(
      estimator,
      export_path,
      vocabulary,
      sequence_length,
      model_type,
      eval_with_score=mode == "export_score",
      batch_size=batch_size,
      checkpoint_path=path,
    )
    print(f"step {estimator.global_step} exported: {exported}", flush=True)
    return exported
  if mode == "eval":
    # The folder of evaluations, of one data set or several.
    eval_summary_dir = eval_summary_dir or os.path.join(model_dir, f"{dataset_split}_eval")
  return perplexity_eval(
    *common,
    sequence_length,
    dataset_split,
    model_dir,
    eval_dataset_fn,
    train_dataset_fn,
    eval_checkpoint_step,
    eval_summary_dir,
    perplexity_eval_steps,
    eval_dir_suffix,
  )


def _check_bindings(mode: str, dataset_split: str, train_dataset_fn: Any, vocabulary: Any) -> None:
  """Raises `ConfigError` for what is missing, or contradicts the mode."""
  if mode not in MODES:
    raise ConfigError(f"run.mode {mode!r} is unknown or not available; use {', '.join(MODES)}")
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


def _number_of_sequences(
  batch_size: Any,
  sequence_length: dict[str, int] | None,
  mesh_shape: mtf.Shape,
  layout_rules: mtf.LayoutRules,
) -> int:
  """The size of a batch, which may be given in tokens or for each replica."""
  if isinstance(batch_size, int):
    return batch_size
  if sequence_length is None and batch_size[0] != "sequences_per_batch":
    raise ConfigError(
      f"run.sequence_length is not bound, so run.batch_size must be a number, not {batch_size}"
    )
  return compute_batch_size(sequence_length, mesh_shape, layout_rules, batch_size)
