"""The trainer made from settings, under the names that the TF1 library's Estimator had."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import gin

import mesh_tensorflow as mtf
from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow.arguments.declared import COUNT, COUNT_OR_ZERO, affects, takes
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.meshes.layout import LayoutLike
from mesh_tensorflow.meshes.shares import SharesLike
from mesh_tensorflow.meshes.tpu import mesh as tpu_mesh
from mesh_tensorflow.program.dimensions import ShapeLike
from mesh_tensorflow.training.loop import LearningRateLike
from mesh_tensorflow.training.validation import MakeDatasets
from mesh_tensorflow.transformer.data.text_io import inputs_vocabulary, targets_vocabulary
from mesh_tensorflow.transformer.data.vocabularies.base import Vocabularies
from mesh_tensorflow.transformer.generation.text_metrics import MakeEvalDatasets
from mesh_tensorflow.transformer.model import mesh_setup
from mesh_tensorflow.transformer.model.model_building import Model, build_model
from mesh_tensorflow.transformer.model.model_steps import ModelSteps, VariableFilter
from mesh_tensorflow.transformer.modes import layer_cut
from mesh_tensorflow.transformer.training.trainer import Trainer


@gin.configurable(
  module="mesh_tensorflow.transformer.utils",
  denylist=["predict_fn", "settings", "held_out", "held_out_texts"],
)
@affects("report")
@takes(
  batch_size=COUNT,
  keep_checkpoint_max=COUNT,
  save_checkpoints_steps=COUNT_OR_ZERO,
  outer_batch_size=COUNT,
  ensemble_inputs=COUNT,
  iterations_per_loop=COUNT,
)
def tpu_estimator_model_fn(
  model_type: str,
  transformer_model: Model,
  vocabulary: Vocabularies,
  model_dir: str | None,
  use_tpu: tpu_mesh.TpuLike,
  mesh_shape: ShapeLike,
  layout_rules: LayoutLike,
  batch_size: int,
  sequence_length: dict[str, int],
  autostack: bool,
  keep_checkpoint_max: int | None,
  save_checkpoints_steps: int,
  learning_rate_schedule: LearningRateLike = None,
  optimizer: Callable[..., mtf.optimize.Optimizer] | None = None,
  outer_batch_size: int = 1,
  tpu_summaries: bool = False,
  predict_fn: Callable[..., mtf.Tensor] | None = None,
  score_in_predict_mode: bool = False,
  variable_filter: VariableFilter = None,
  init_checkpoint: str | None = None,
  init_variable_filter: str = "",
  ensemble_inputs: int | None = None,
  mesh_devices: list[str] | None = None,
  model_info_file: str | None = None,
  hierarchical_tiling_spec: tpu_mesh.TilingSpec | None = None,
  weight_decay_checkpoint: str | None = None,
  *,
  iterations_per_loop: int | None = None,
  mesh_implementation: str = "auto",
  shard_state: str | Sequence[str] = "",
  reshard_after_forward: bool = True,
  pipeline_stages: int = 1,
  pipeline_schedule: str = "1f1b",
  device_shares: SharesLike | None = None,
  pipeline_cut: str | Sequence[int] = "auto",
  pipeline_chunks: int = 1,
  precision: str | None = None,
  settings: TrainerSettings | None = None,
  held_out: MakeDatasets | None = None,
  held_out_texts: MakeEvalDatasets | None = None,
) -> Trainer:
  """The `Trainer` of a model, with its programs on a mesh (in the TF1 library a model function).

  Args:
    model_type: see `build_model`.
    transformer_model: the model.
    vocabulary: a vocabulary, or an (inputs, targets) tuple.
    model_dir: folder for checkpoints and summaries.
    use_tpu: what runs it: a `tpu_mesh.Tpu`, or the name of one, or True for that of this machine;
      else GPU or CPU.
    mesh_shape: mesh shape.
    layout_rules: layout rules.
    batch_size: sequences in a batch.
    sequence_length: dict from feature to number of tokens.
    autostack: has no effect.
    keep_checkpoint_max: number of checkpoints to keep; None: all.
    save_checkpoints_steps: steps between checkpoints.
    learning_rate_schedule: see `Trainer`.
    optimizer: an optimizer class.
    outer_batch_size: size of a dimension `outer_batch`, in which a batch may be split too.
    tpu_summaries: has no effect: summaries are written everywhere.
    predict_fn: called with `model`, `features` and `variable_dtype`, mtf tensors, for outputs or
      scores, in place of the model.
    score_in_predict_mode: `predict` scores given targets in place of making outputs.
    variable_filter: which variables are trained; see `ModelSteps`.
    init_checkpoint: a checkpoint to start from when model_dir has none; see
      `init_checkpoint.restore`.
    init_variable_filter: regular expression: which variables of `init_checkpoint` are taken.
    ensemble_inputs: the members of an ensemble that see data of their own; see `ModelSteps`.
    mesh_devices: names of devices; see `mesh_setup.make_mesh_impl`.
    model_info_file: a file for the sizes of variables and the counters of the training program.
    hierarchical_tiling_spec: which core of a TPU is which processor; see
      `tpu_mesh.physical_coordinates`. Elsewhere it has no effect.
    weight_decay_checkpoint: has no effect, and had none.
    iterations_per_loop: training steps in one call of the compiled program; None: as `settings`
      has it.
    mesh_implementation: see `mesh_setup.make_mesh_impl`.
    shard_state: likewise.
    reshard_after_forward: likewise.
    pipeline_stages: likewise.
    pipeline_schedule: likewise.
    device_shares: likewise.
    pipeline_cut: which layers are on which stage; see `layer_cut.set_cut`.
    pipeline_chunks: number of runs of layers on each stage; likewise.
    precision: see `model_building.dtype_of_precision`.
    settings: those of the trainer which are no argument here.
    held_out: makes the data sets of evaluations during training; see `Trainer`.
    held_out_texts: returns those of them that may be decoded; see `Trainer`.

  Raises:
    ConfigError: a TPU is asked for, and there is none, or for a pipeline or with shares.
  """
  del autostack, tpu_summaries, weight_decay_checkpoint
  settings = settings or TrainerSettings()
  settings = dataclasses.replace(
    settings,
    keep_checkpoint_max=keep_checkpoint_max,
    save_checkpoints_steps=save_checkpoints_steps,
    init_checkpoint=init_checkpoint,
    iterations_per_loop=settings.iterations_per_loop
    if iterations_per_loop is None
    else iterations_per_loop,
  )
  if use_tpu:
    if pipeline_stages > 1:
      raise ConfigError(
        f"run.pipeline_stages is {pipeline_stages}, but a TPU runs one program on all cores: leave"
        " it out, or split the layers' dimensions (run.layout_rules)"
      )
    if device_shares is not None:
      raise ConfigError(
        f"run.device_shares is {device_shares}, but all cores of a TPU are alike: leave it out"
      )
    mesh_shape = mtf.convert_to_shape(mesh_shape)
    layout_rules = mtf.convert_to_layout_rules(layout_rules)
    # As `mesh_setup.make_mesh_impl` does for devices of this machine.
    mesh_setup.check_mesh_names(mesh_shape, layout_rules)
    mesh_impl: mtf.MeshImpl = tpu_mesh.make_mesh_impl(
      mesh_shape,
      layout_rules,
      use_tpu,
      hierarchical_tiling_spec=hierarchical_tiling_spec,
      variable_store=mtf.VariableStore(seed=settings.seed),
    ).with_sharded_state(shard_state, reshard_after_forward)
  else:
    mesh_impl = mesh_setup.make_mesh_impl(
      mesh_shape,
      layout_rules,
      mesh_devices,
      mesh_implementation,
      settings.seed,
      shard_state,
      reshard_after_forward,
      pipeline_stages,
      pipeline_schedule,
      device_shares,
    )
  steps = ModelSteps(
    transformer_model,
    mesh_impl,
    model_type,
    batch_size,
    sequence_length,
    outer_batch_size=outer_batch_size,
    variable_filter=variable_filter,
    ensemble_inputs=ensemble_inputs,
    precision=precision,
    settings=settings,
  )
  layer_cut.set_cut(steps, optimizer, pipeline_cut, mesh_implementation, pipeline_chunks)
  return Trainer(
    steps,
    vocabulary,
    model_dir,
    optimizer=optimizer,
    learning_rate_schedule=learning_rate_schedule,
    settings=settings,
    init_variable_filter=init_variable_filter,
    predict_fn=predict_fn,
    score_in_predict_mode=score_in_predict_mode,
    model_info_file=model_info_file,
    held_out=held_out,
    held_out_texts=held_out_texts,
  )


def get_estimator(
  model_type: str,
  vocabulary: Vocabularies,
  mesh_shape: ShapeLike,
  layout_rules: LayoutLike,
  model_dir: str | None,
  batch_size: int,
  sequence_length: dict[str, int],
  autostack: bool,
  learning_rate_schedule: LearningRateLike,
  keep_checkpoint_max: int | None,
  save_checkpoints_steps: int,
  optimizer: Callable[..., mtf.optimize.Optimizer] | None,
  predict_fn: Callable[..., mtf.Tensor] | None,
  variable_filter: VariableFilter,
  ensemble_inputs: int | None,
  use_tpu: tpu_mesh.TpuLike,
  tpu_job_name: str | None,
  iterations_per_loop: int,
  cluster: object,
  init_checkpoint: str | None = None,
  mesh_devices: list[str] | None = None,
  score_in_predict_mode: bool = False,
  **options: Any,
) -> Trainer:
  """Builds the model that gin describes, and its `Trainer`.

  Args:
    model_type: see `build_model`.
    vocabulary: a vocabulary, or an (inputs, targets) tuple; the model gets their sizes.
    mesh_shape: mesh shape, as text or an `mtf.Shape`.
    layout_rules: layout rules, as text or `mtf.LayoutRules`.
    model_dir: folder for checkpoints and summaries; None keeps nothing.
    batch_size: sequences in a batch.
    sequence_length: dict from feature to number of tokens.
    autostack: has no effect.
    learning_rate_schedule: a function of the step, a number or None; see `Trainer`.
    keep_checkpoint_max: number of checkpoints to keep; None: all.
    save_checkpoints_steps: steps between checkpoints.
    optimizer: an optimizer class.
    predict_fn: called with `model`, `features` and `variable_dtype` for outputs or scores, in place
      of the model; None: the model makes them.
    variable_filter: selects the trained variables; see `ModelSteps`.
    ensemble_inputs: number of members of an ensemble with data of their own; see `ModelSteps`.
    use_tpu: a `tpu_mesh.Tpu`, the name of one, or True for that of this machine; else GPU or CPU.
    tpu_job_name: has no effect.
    iterations_per_loop: training steps in one call of the compiled program.
    cluster: has no effect.
    init_checkpoint: a checkpoint to start from if `model_dir` has none.
    mesh_devices: names of devices; see `mesh_setup.make_mesh_impl`.
    score_in_predict_mode: True if `predict` scores given targets instead of generating outputs.
    **options: `mesh_implementation`, `shard_state`, `reshard_after_forward`, `pipeline_stages`,
      `pipeline_schedule`, `pipeline_cut`, `pipeline_chunks`, `device_shares`, `precision`,
      `settings`, `held_out`, `held_out_texts`; see `tpu_estimator_model_fn`.
  """
  del tpu_job_name, cluster
  mesh_shape = mtf.convert_to_shape(mesh_shape)
  layout_rules = mtf.convert_to_layout_rules(layout_rules)
  model = build_model(
    model_type=model_type,
    input_vocab_size=inputs_vocabulary(vocabulary).vocab_size,
    output_vocab_size=targets_vocabulary(vocabulary).vocab_size,
    layout_rules=layout_rules,
    mesh_shape=mesh_shape,
  )
  return tpu_estimator_model_fn(
    model_type=model_type,
    transformer_model=model,
    vocabulary=vocabulary,
    model_dir=model_dir,
    use_tpu=use_tpu,
    mesh_shape=mesh_shape,
    layout_rules=layout_rules,
    batch_size=batch_size,
    sequence_length=sequence_length,
    autostack=autostack,
    keep_checkpoint_max=keep_checkpoint_max,
    save_checkpoints_steps=save_checkpoints_steps,
    learning_rate_schedule=learning_rate_schedule,
    optimizer=optimizer,
    predict_fn=predict_fn,
    score_in_predict_mode=score_in_predict_mode,
    variable_filter=variable_filter,
    init_checkpoint=init_checkpoint,
    ensemble_inputs=ensemble_inputs,
    mesh_devices=mesh_devices,
    iterations_per_loop=iterations_per_loop,
    **options,
  )
