"""The names of the trainer that gin files and other packages use."""

from __future__ import annotations

from absl import flags

from mesh_tensorflow.training.init_checkpoint import (
  init_checkpoint_variable_mapping,
  should_load_variable,
  variable_filter_max_size,
)
from mesh_tensorflow.transformer.data import text_io
from mesh_tensorflow.transformer.data.text2self import dynamic_text2self
from mesh_tensorflow.transformer.data.text_io import (
  clean_decodes,
  encode_delimited_lm,
  encode_inputs,
  get_inputs_from_file,
  get_step_from_checkpoint_path,
  inputs_vocabulary,
  separate_vocabularies,
  targets_vocabulary,
  write_lines_to_file,
)
from mesh_tensorflow.transformer.generation.settings import sample
from mesh_tensorflow.transformer.gin_config import (
  parse_gin_defaults_and_flags,
  write_operative_config,
)
from mesh_tensorflow.transformer.learning_rate_schedules import bound_schedule
from mesh_tensorflow.transformer.model.batching import (
  auto_train_steps,
  compute_batch_size,
  serialize_num_microbatches,
  tpu_mesh_shape,
)
from mesh_tensorflow.transformer.model.model_building import build_model, get_variable_dtype
from mesh_tensorflow.transformer.model.model_steps import ModelSteps
from mesh_tensorflow.transformer.modes import job
from mesh_tensorflow.transformer.modes.chosen_checkpoints import get_checkpoint_iterator
from mesh_tensorflow.transformer.modes.eval import eval_model
from mesh_tensorflow.transformer.modes.export import export_model
from mesh_tensorflow.transformer.modes.infer import decode_from_file, infer_model
from mesh_tensorflow.transformer.modes.infer_datasets import decode, decode_from_dataset
from mesh_tensorflow.transformer.modes.input_fns import combined_dataset_input_fn, filter_features
from mesh_tensorflow.transformer.modes.make_estimator import get_estimator, tpu_estimator_model_fn
from mesh_tensorflow.transformer.modes.perplexity_eval import perplexity_eval
from mesh_tensorflow.transformer.modes.run import run
from mesh_tensorflow.transformer.modes.score import (
  add_pretokenized,
  compute_log_likelihoods,
  save_scores,
  save_scores_to_tfrecords,
  score_from_dataset,
  score_from_strings,
  score_with_estimator,
  score_with_estimator_lazy,
)
from mesh_tensorflow.transformer.modes.train import train_model
from mesh_tensorflow.transformer.training.layer_mapping import flexible_ckpt_init_mapping
from mesh_tensorflow.transformer.training.running_metrics import metric_max, metric_sum
from mesh_tensorflow.transformer.training.trainer import Trainer

MODES = job.mode_names()

# A program that imports this module as a library finds the flags of gin here.
for _flag in ("gin_file", "gin_param", "gin_location_prefix"):
  flags.FLAGS.register_flag_by_module(__name__, flags.FLAGS[_flag])

# Names of the TF1 library that other packages import, underscore or not.
_filter_features = filter_features
_dynamic_text2self = dynamic_text2self
_maybe_add_pretokenized_features = add_pretokenized
_get_combined_dataset_input_fn = combined_dataset_input_fn

__all__ = [
  "MODES",
  "ModelSteps",
  "Trainer",
  "auto_train_steps",
  "bound_schedule",
  "build_model",
  "clean_decodes",
  "compute_batch_size",
  "compute_log_likelihoods",
  "decode",
  "decode_from_dataset",
  "decode_from_file",
  "encode_delimited_lm",
  "encode_inputs",
  "eval_model",
  "export_model",
  "flexible_ckpt_init_mapping",
  "get_checkpoint_iterator",
  "get_estimator",
  "get_inputs_from_file",
  "get_step_from_checkpoint_path",
  "get_variable_dtype",
  "infer_model",
  "init_checkpoint_variable_mapping",
  "inputs_vocabulary",
  "metric_max",
  "metric_sum",
  "parse_gin_defaults_and_flags",
  "perplexity_eval",
  "run",
  "sample",
  "save_scores",
  "save_scores_to_tfrecords",
  "score_from_dataset",
  "score_from_strings",
  "score_with_estimator",
  "score_with_estimator_lazy",
  "separate_vocabularies",
  "serialize_num_microbatches",
  "should_load_variable",
  "targets_vocabulary",
  "text_io",
  "tpu_estimator_model_fn",
  "tpu_mesh_shape",
  "train_model",
  "variable_filter_max_size",
  "write_lines_to_file",
  "write_operative_config",
]
