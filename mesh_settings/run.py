"""Settings of a run of the Transformer: arguments of `mesh_tensorflow.transformer.utils.run`."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from mesh_settings.records import setting
from mesh_settings.rules import (
  CALLABLE,
  COUNT,
  COUNT_OR_ZERO,
  NOT_BELOW_ZERO,
  PATH,
  Rule,
  is_number,
  is_whole,
  one_of,
)
from mesh_settings.trainer import TrainerSettings

# Model types of an encoder and a decoder.
PAIRED = ("bitransformer", "bi_student_teacher")
MODEL_TYPES = (*PAIRED, "lm", "delimited_lm", "aligned")
PRECISIONS = ("float32", "bfloat16", "float16", "auto")
MESH_IMPLEMENTATIONS = ("auto", "placement", "simd")
PIPELINE_SCHEDULES = ("gpipe", "1f1b", "zero_bubble")
PIPELINE_CUTS = ("auto", "equal")
BATCH_METHODS = (
  "sequences_per_batch", "tokens_per_batch", "sequences_per_replica", "tokens_per_replica"
)  # fmt: skip
VOCABULARIES = ("bytes", "characters", "sentencepiece", "tiktoken", "tokens")
# The modes; `mesh_tensorflow.transformer.modes` adds them as it is imported, and users do.
MODES: list[str] = []


def is_vocabulary_name(name: str) -> bool:
  """True if this is a valid name of a vocabulary, such as "bytes" or "sentencepiece:8000"."""
  kind, _, rest = name.partition(":")
  # Bytes are made of nothing, characters of texts or a file, all else of what is named.
  return kind == "characters" or (kind in VOCABULARIES and (kind == "bytes") != bool(rest))


def _is_batch_size(x: object) -> bool:
  if isinstance(x, (list, tuple)):
    return len(x) == 2 and isinstance(x[0], str) and x[0] in BATCH_METHODS and COUNT.is_legal(x[1])
  return COUNT.is_legal(x)


def _are_lengths(x: object) -> bool:
  if isinstance(x, Mapping):
    return bool(x) and all(isinstance(k, str) and COUNT.is_legal(v) for k, v in x.items())
  return x is None or COUNT.is_legal(x)


def _is_checkpoint_step(x: Any) -> bool:
  if isinstance(x, (list, tuple)):
    return bool(x) and all(is_whole(n) and n >= 0 for n in x)
  return x in (None, "all", "new", "best") or (is_whole(x) and x >= -1)


def _is_no_number(x: object) -> bool:
  return x is not None and not isinstance(x, numbers.Number)


def _are_rates(x: object) -> bool:
  if isinstance(x, (list, tuple)):
    return all(callable(f) or is_number(f) for f in x)
  return x is None or callable(x) or NOT_BELOW_ZERO.is_legal(x)


def _is_vocabulary(x: object) -> bool:
  if isinstance(x, (tuple, list)):
    return len(x) == 2 and all(v is not None and _is_vocabulary(v) for v in x)
  return is_vocabulary_name(x) if isinstance(x, str) else not isinstance(x, numbers.Number)


def _are_device_names(x: object) -> bool:
  return x is None or (isinstance(x, (list, tuple)) and all(isinstance(d, str) for d in x))


def _are_shares(x: object) -> bool:
  return x is None or (
    isinstance(x, Mapping)
    and all(isinstance(name, str) for name in x)
    and all(isinstance(n, (list, tuple)) and n and all(map(COUNT.is_legal, n)) for n in x.values())
  )


def _is_cut(x: object) -> bool:
  if isinstance(x, (list, tuple)):
    return bool(x) and all(COUNT.is_legal(n) for n in x)
  return x in PIPELINE_CUTS


_CHECKPOINT_STEP = Rule(
  "a step, a list of steps, -1 (the newest), 'best', 'all', 'new' (each as it appears) or None",
  _is_checkpoint_step,
)
_DATASET_FN = (
  "called as `fn(sequence_length=, vocabulary=, dataset_split=)`; if it takes `skip`, with the "
  "number of examples that were seen before; if it takes `batch_rows`, with those that this worker "
  "needs (see `TrainingData`). Returns single examples."
)
_MESH = Rule("a mesh shape such as 'batch:2,model:2' ('' is one device)", _is_no_number)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings(TrainerSettings):
  """The settings of a run; the help of each field says what it means."""

  tpu_job_name: str | None = setting('name of the job of the TPU workers; None: "worker".')
  tpu: str | None = setting(
    'a TPU to run on: "local", a name or an address; see `tpu_mesh.connect`. None: run on GPU or '
    "CPU."
  )
  gcp_project: str | None = setting("project of a TPU that is given by name.")
  tpu_zone: str | None = setting("zone of a TPU that is given by name.")
  model_dir: str = setting("folder for checkpoints, summaries and the configuration.")
  model_type: str = setting("see `build_model`.", "bitransformer", one_of(MODEL_TYPES))
  vocabulary: Any = setting(
    "a vocabulary, or its name, such as 'bytes', 'characters' or 'sentencepiece:8000', which are "
    "made of the texts of `train_dataset_fn` (see `named_vocabulary`); or an (inputs, targets) "
    "pair.",
    None,
    Rule(
      "a vocabulary such as @vocabulary.get_byte_vocabulary(), a name such as 'bytes', "
      "'characters' or 'sentencepiece:8000', a pair of them, or None",
      _is_vocabulary,
    ),
  )
  train_dataset_fn: Callable[..., Any] | None = setting(_DATASET_FN, None)
  eval_dataset_fn: Callable[..., Any] | None = setting(
    "see `eval_model` and `perplexity_eval`.", None
  )
  dataset_split: str = setting('"train" in training; the split to evaluate otherwise.', "train")
  autostack: bool = setting("has no effect.", True)
  eval_checkpoint_step: Any = setting(
    "which checkpoints the modes that evaluate or decode take: a step, a list of steps, "
    '"all", "new" (each as it appears, endlessly), "best" (see `keep_best`), or None, the newest; '
    "see `get_checkpoint_iterator`.",
    None,
    _CHECKPOINT_STEP,
  )
  export_checkpoint_step: Any = setting(
    'the checkpoint to export, or the last of those that mode "average" averages, see '
    "`get_checkpoint_iterator`; None or 0: the newest.",
    None,
    _CHECKPOINT_STEP,
  )
  export_path: str = setting(
    'the SavedModel goes into a new folder in here; of mode "average": the folder of the average, '
    "which must not be there.",
    "",
    flag="--output",
    metavar="DIR",
    flag_values=PATH,
    short="The SavedModel goes into a new folder in here, named by the time in seconds.",
    commands="export",
  )
  mode: str = setting(
    '"train"; "eval" (decode the data sets of `eval_dataset_fn` that have metrics, and compare the '
    'texts: see `eval_model`; without such a data set as "perplexity_eval"); "score_eval" '
    '(likewise, with scores of the targets in place of texts); "perplexity_eval" '
    '(teacher-forced); "infer" (decode the lines of a file: see `infer_model`); '
    '"score_from_strings", "score_from_dataset" (see these functions); "export_infer", '
    '"export_score" (write a SavedModel that makes outputs, or scores: see `export.save`; "export" '
    'is the old name of the first); "average" (write the mean of the weights of the last '
    '`average_checkpoints` checkpoints as a model of its own); "plan" (print what training needs '
    'on each processor, and the best layouts, without doing it); "search" (write the best layout '
    'as a gin file); "dry_run" (plan a training, and show a batch of its data, without doing it).',
    "train",
    one_of(MODES),
  )
  eval_summary_dir: str | None = setting("see `eval_model` and `perplexity_eval`.", None)
  batch_size: Any = setting(
    "number of sequences, or see `compute_batch_size`.",
    ("tokens_per_replica", 2048),
    Rule(
      "a whole number of sequences of at least 1, or a pair such as ('tokens_per_batch', 4096), of "
      f"one of {', '.join(BATCH_METHODS)} and such a number",
      _is_batch_size,
    ),
    flag="--batch_size",
    short="Sequences in a batch.",
    flag_values=COUNT,
    commands="train plan eval infer score export",
  )
  train_steps: Any = setting(
    "the absolute step at which training ends, or a function of batch size and sequence length.",
    None,
    Rule(
      "a whole number of at least 0, or a function of batch size and sequence length",
      lambda x: callable(x) or (is_whole(x) and x >= 0),
    ),
    flag="--steps",
    short="Train until this step.",
    flag_values=COUNT_OR_ZERO,
  )
  total_run_steps: int | None = setting(
    "what schedules take for the length of training; `train_steps` by default.", None, COUNT
  )
  sequence_length: Any = setting(
    'number of tokens, or a dict from feature to that; None, in modes "eval" and "score_eval": '
    "that of the longest examples.",
    None,
    Rule(
      "a whole number of tokens of at least 1, or a dict such as {'inputs': 64, 'targets': 64}",
      _are_lengths,
    ),
  )
  mesh_shape: Any = setting(
    'mesh shape; "auto": that with which a step is predicted to be fastest; see '
    "`automatic_layout`.",
    values=_MESH,
    flag="--mesh",
    metavar="SHAPE",
    short="Mesh of devices: batch:2,model:2 ('' is one device), or auto: the one that is best.",
    commands="train eval infer score plan average",
  )
  mesh_devices: list[str] | None = setting(
    "names of devices; see `mesh_setup.make_mesh_impl`.",
    None,
    Rule("a list of names of devices, or None", _are_device_names),
  )
  device_shares: Any = setting(
    "for devices of unequal speed, how many processors of a mesh dimension each one gets: "
    "{'batch': [3, 1]} of the mesh 'batch:4' are three for the first device, and one for the "
    "second. None: each processor has a device of its own. See docs/layouts.md.",
    None,
    Rule(
      "a dict from mesh dimensions to lists of whole numbers of at least 1, such as "
      "{'batch': [3, 1]}, or None",
      _are_shares,
    ),
  )
  layout_rules: Any = setting(
    'layout rules; "auto" likewise.',
    values=Rule("layout rules such as 'batch:batch,d_ff:model' ('' splits nothing)", _is_no_number),
    flag="--layout",
    metavar="RULES",
    short="Which dimension of tensors is split over which of the mesh: batch:batch,d_ff:model; or "
    "auto.",
    commands="train eval infer score plan average",
  )
  learning_rate_schedule: Any = setting(
    "a function `(step, total_train_steps)`, a list of such and numbers (their product), or a "
    "number.",
    None,
    Rule("a schedule, a number of at least 0, or a list of such", _are_rates),
  )
  optimizer: Any = setting(
    "an optimizer class.",
    None,
    Rule(
      "an optimizer class such as @optimize.AdamWOptimizer, or None", CALLABLE.or_none().is_legal
    ),
  )
  predict_fn: Callable[..., Any] | None = setting("see `tpu_estimator_model_fn`.", None)
  variable_filter: Any = setting("which variables are trained; see `ModelSteps`.", None)
  perplexity_eval_steps: int | None = setting(
    "number of batches to evaluate; None: all.",
    100,
    COUNT,
  )
  ensemble_inputs: int | None = setting(
    "in training, the members of an ensemble that see data of their own.", None, COUNT
  )
  train_model_fn: Callable[..., Any] | None = setting("what trains.", None)
  skip_seen_data: bool = setting("see `train_model`.", False)
  seen_data_init_step: int = setting("see `train_model`.", 0, COUNT_OR_ZERO)
  output_eval_examples: bool = setting(
    'whether "eval" writes inputs, targets and predictions.', True
  )
  checkpoint_input_pipeline: bool = setting("see `train_model`.", False)
  eval_dir_suffix: str | None = setting(
    "added to the name of the folder of evaluation scalars.", None
  )
  mesh_implementation: str = setting(
    '"auto", "placement" or "simd"; see `mesh_setup.make_mesh_impl`.',
    "auto",
    one_of(MESH_IMPLEMENTATIONS),
  )
  shard_state: Any = setting(
    'dimensions of the mesh, as "batch" or "batch,model": weights and optimizer state that the '
    "layout leaves whole on each device along them are stored in shards there (ZeRO, FSDP); see "
    "`MeshImpl.with_sharded_state`.",
    "",
    Rule(
      'names of dimensions of the mesh, such as "batch" or ["batch", "model"]',
      lambda x: (
        isinstance(x, str) or (isinstance(x, (list, tuple)) and all(isinstance(n, str) for n in x))
      ),
    ),
  )
  reshard_after_forward: bool = setting(
    "with `shard_state`, whether weights are gathered anew before each use; else once in a step, "
    "which takes fewer exchanges and more memory.",
    True,
  )
  pipeline_stages: int = setting(
    "into how many stages the layers are cut, each on a mesh of `mesh_shape` of its own: the mesh "
    "then has so many times the devices. The microbatches of a step go through the stages one "
    "after the other (`serialize_num_microbatches`); see docs/pipelines.md.",
    1,
    COUNT,
    flag="--pipeline_stages",
    short="Cut the layers into so many stages, each on devices of its own.",
    commands="train eval infer score export plan",
  )
  pipeline_schedule: str = setting(
    'with `pipeline_stages`, the order of work: "gpipe", "1f1b" (few activations at a time) or '
    '"zero_bubble" (gradients of weights fill what would be idle time).',
    "1f1b",
    one_of(PIPELINE_SCHEDULES),
  )
  pipeline_chunks: int = setting(
    "with `pipeline_stages`, the number of runs of layers on each stage: with 2 and two stages the "
    "first and the third quarter of the layers are on the first stage. Stages wait less and send "
    "more (interleaved schedules); see docs/pipelines.md.",
    1,
    COUNT,
  )
  pipeline_cut: Any = setting(
    'with `pipeline_stages`, which layers are on which stage: "auto": the longest stage is '
    'predicted to be as short as can be, if that is a gain; "equal": equal numbers of layers; or '
    "the number of each stage, such as (5, 4, 3); with `pipeline_chunks` that of each run. "
    "Attention and feed-forward layers count one each.",
    "auto",
    Rule('"auto", "equal", or the number of layers of each stage, such as (5, 4, 3)', _is_cut),
  )
  precision: str | None = setting(
    'the dtype of computations: "float32"; "bfloat16"; "float16", in training with a loss scale; '
    'or "auto": bfloat16 if the device multiplies matrices faster in it, else float32. Weights, '
    "optimizer state, softmax, norms, losses and checkpoints are float32. None: as "
    "`get_variable_dtype` says.",
    None,
    Rule("one of float32, bfloat16, float16, auto, or None", lambda x: x in (None, *PRECISIONS)),
    flag="--precision",
    flag_values=one_of(PRECISIONS),
    short="Compute in float32, bfloat16, float16, or what is faster here (auto).",
    commands="train eval infer score export plan",
  )
  num_devices: int | None = setting(
    'how many devices the mesh has, where `mesh_shape` is "auto"; by default as many as '
    "`mesh_devices` names, or as there are GPUs.",
    None,
    flag="--devices",
    flag_values=COUNT,
    short="Find the best mesh of so many devices.",
    commands="plan",
  )


# Of the TF1 library's `run`, in its order, which callers may give arguments in.
POSITIONAL = (
  "tpu_job_name tpu gcp_project tpu_zone model_dir model_type vocabulary train_dataset_fn "
  "eval_dataset_fn dataset_split autostack eval_checkpoint_step export_checkpoint_step "
  "export_path mode iterations_per_loop save_checkpoints_steps keep_checkpoint_max "
  "eval_summary_dir batch_size train_steps total_run_steps sequence_length mesh_shape "
  "mesh_devices layout_rules learning_rate_schedule optimizer predict_fn variable_filter "
  "perplexity_eval_steps init_checkpoint ensemble_inputs train_model_fn skip_seen_data "
  "seen_data_init_step output_eval_examples checkpoint_input_pipeline eval_dir_suffix"
).split()
