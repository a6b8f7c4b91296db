"""The trainer as one gin-configurable function, `run`: what is asked for, checked, and done."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import gin
import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.arguments.declared import (
  ABOVE_ZERO,
  BELOW_ONE,
  COUNT,
  COUNT_OR_ZERO,
  affects,
  takes,
)
from mesh_tensorflow.environment.tensorflow_mode import check_tensorflow2
from mesh_tensorflow.transformer.data import own_documents
from mesh_tensorflow.transformer.gin_config import value_checks
from mesh_tensorflow.transformer.meshes.batching import auto_train_steps
from mesh_tensorflow.transformer.modes import automatic_layout, registry
from mesh_tensorflow.transformer.modes.job import Job, Mode
from mesh_tensorflow.transformer.modes.train import train_model
from mesh_tensorflow.transformer.vocabularies import named
from mesh_tensorflow.transformer.vocabularies.kept import kept_in

_MODULE = "mesh_tensorflow.transformer.utils"


def _before_arguments(configured: Callable[..., Any]) -> Callable[..., Any]:
  """Decorator that sets up the process before gin evaluates the arguments of `run`.

  It joins the cluster first: gin's arguments may run TensorFlow, after which no worker can join,
  and only workers that have joined can leave writing a vocabulary to one of them. It also has
  vocabularies read from the folder of the model's checkpoints.
  """

  @functools.wraps(configured)
  def run(*args: Any, **kwargs: Any) -> Any:
    check_tensorflow2()
    given = _as_bound(inspect.signature(configured).bind_partial(*args, **kwargs).arguments)
    mode = registry.find(given.get("mode", "train"))
    if workers.cluster_from_environment().size > 1:
      _join_as_bound(mode, given)
    with kept_in(
      given.get("model_dir"),
      may_write=mode is not None and mode.trains,
      allow_change=bool(given.get("allow_config_change")),
    ):
      return configured(*args, **kwargs)

  return run


def _as_bound(arguments: dict[str, Any]) -> dict[str, Any]:
  """Some arguments of `run`: those given, else what gin binds."""
  bound = gin.get_bindings(f"{_MODULE}.run", resolve_references=False)
  # A copy of what refers to a configurable or macro is its value; all at once would be too much.
  names = (
    *("model_dir", "mode", "mesh_shape", "mesh_implementation", "allow_config_change"),
    *("num_devices", "mesh_devices"),
  )
  return {n: copy.deepcopy(bound[n]) for n in names if n in bound} | arguments


def _join_as_bound(mode: Mode | None, given: dict[str, Any]) -> None:
  """Joins the workers with the devices that `run` will need, by its arguments and bindings."""
  if given.get("tpu") or mode is None or not mode.on_devices or "mesh_shape" not in given:
    return  # `run` has no use for workers, or something to complain about.
  shape = automatic_layout.mesh_to_join(
    given["mesh_shape"], given.get("num_devices"), given.get("mesh_devices")
  )
  mode.join_workers(shape, given.get("mesh_implementation", "auto"))


@_before_arguments
@gin.configurable(module=_MODULE)
@affects("report")
@takes(
  iterations_per_loop=COUNT,
  save_checkpoints_steps=COUNT_OR_ZERO,
  keep_checkpoint_max=COUNT,
  total_run_steps=COUNT,
  perplexity_eval_steps=COUNT,
  ensemble_inputs=COUNT,
  seen_data_init_step=COUNT_OR_ZERO,
  report_every=COUNT,
  max_grad_norm=ABOVE_ZERO,
  ema_decay=BELOW_ONE,
  gradient_accumulation_steps=COUNT,
  eval_steps=COUNT,
  early_stopping_patience=COUNT,
)
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
  predict_fn: Callable[..., Any] | None = None,
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
  max_grad_norm: float | None = None,
  ema_decay: float | None = None,
  use_ema: bool = False,
  gradient_accumulation_steps: int | None = None,
  num_devices: int | None = None,
  eval_every_steps: int = 0,
  eval_steps: int | None = 100,
  keep_best: bool = True,
  early_stopping_patience: int | None = None,
  early_stopping_min_delta: float = 0.0,
  norms_every: int | None = None,
  peak_flops: Any = None,
  profile_steps: Any = None,
  seeds: dict[str, int] | None = None,
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
    vocabulary: a vocabulary, or its name, such as 'bytes', 'characters' or 'sentencepiece:8000',
      which are made of the texts of `train_dataset_fn` (see `named_vocabulary`); or an (inputs,
      targets) pair.
    train_dataset_fn: see `Trainer.train`.
    eval_dataset_fn: see `eval_model` and `perplexity_eval`.
    dataset_split: "train" in training; the split to evaluate otherwise.
    autostack: has no effect.
    eval_checkpoint_step: which checkpoints the modes that evaluate or decode take: a step, a list
      of steps, "all", "new" (each as it appears, endlessly), "best" (see `keep_best`), or None, the
      newest; see `get_checkpoint_iterator`.
    export_checkpoint_step: the checkpoint to export, see `get_checkpoint_iterator`; None or 0: the
      newest.
    export_path: the SavedModel goes into a new folder in here.
    mode: "train"; "eval" (decode the data sets of `eval_dataset_fn` that have metrics, and compare
      the texts: see `eval_model`; without such a data set as "perplexity_eval"); "score_eval"
      (likewise, with scores of the targets in place of texts); "perplexity_eval" (teacher-forced);
      "infer" (decode the lines of a file: see `infer_model`); "score_from_strings",
      "score_from_dataset" (see these functions); "export_infer", "export_score" (write a SavedModel
      that makes outputs, or scores: see `export.save`; "export" is the old name of the first);
      "plan" (print what training needs on each processor, and the best layouts, without doing it);
      "search" (write the best layout as a gin file); "dry_run" (plan a training, and show a batch
      of its data, without doing it).
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
    mesh_shape: mesh shape; "auto": that with which a step is predicted to be fastest; see
      `automatic_layout`.
    mesh_devices: names of devices; see `mesh_setup.make_mesh_impl`.
    layout_rules: layout rules; "auto" likewise.
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
    seed: of all that is random: initial weights, the order of the data, dropout, samples. What is
      drawn for one of these is independent of the others.
    report_every: steps between lines of the report.
    nonfinite: in training, what a NaN or infinite loss does: "stop" or "skip"; see `Trainer`.
    allow_config_change: whether the checkpoints may be of another model or vocabulary than this
      one: that is then told, else refused; see `gin_config.model_config`.
    max_grad_norm: in training, gradients of all variables together are scaled to this norm where
      theirs is larger; None: they are not.
    ema_decay: in training, the decay of a moving average of the weights, which is kept beside them
      (0.999, say: over about 1000 steps); None: there is none.
    use_ema: the modes that evaluate, decode or export take that average from a checkpoint, in
      place of the weights; and so do evaluations in training.
    gradient_accumulation_steps: in training, the number of microbatches into which a batch is cut,
      one after the other, for one update; `batch_size` is that of the update. None: as
      `serialize_num_microbatches` says.
    num_devices: how many devices the mesh has, where `mesh_shape` is "auto"; by default as many
      as `mesh_devices` names, or as there are GPUs.
    eval_every_steps: in training, steps between evaluations on held-out data, and one after the
      last step: on `eval_dataset_fn`, or, if that is not bound, on the split "validation" of
      `train_dataset_fn`; 0: none. See `Validation`.
    eval_steps: number of batches of such an evaluation, at most; None: all.
    keep_best: whether the checkpoint with the lowest loss in these evaluations is kept beside the
      newest `keep_checkpoint_max`; its `eval_checkpoint_step` is "best".
    early_stopping_patience: number of evaluations in a row without a lower loss after which
      training ends; None: it does not end early.
    early_stopping_min_delta: a loss must be lower by more than this, in nats, to count as lower.
    norms_every: in training, steps between norms of gradients, weights and updates; None: those
      that have a line of the report; 0: none are computed.
    peak_flops: peak FLOP/s of all devices together, for `flops_utilization`; or a machine, by the
      name of a shipped one or of its file; None: measured before the first step; 0: no utilization
      is reported.
    profile_steps: the steps to profile with TensorFlow's profiler, (first, last) or "first:last";
      None: none.
    seeds: other seeds than `seed` for single purposes: a dict from "weights", "data", "dropout" or
      "sampling".

  Returns:
    Losses (train), metrics (eval), what the function of the mode returned (scores), the path of
    the SavedModel (export), the report (plan), or None.

  Raises:
    ConfigError: settings that contradict each other.
  """
  arguments = locals()
  value_checks.check_arguments("run", run, arguments)
  value_checks.check_mesh_shape(mesh_shape)
  asked = registry.get(mode)
  arguments["vocabulary"] = named.resolve(vocabulary, own_documents.texts_of(train_dataset_fn))
  return asked.run(Job(asked, arguments))
