"""Objects made from the flags that the BERT programs share, and the programs' start."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow.bert.config import BertConfig
from mesh_tensorflow.bert.program_flags import (
  AUTO,
  FINE_TUNING,
  SHARED,
  TRAINER_FLAGS,
  ProgramFlags,
)
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.meshes.tpu import mesh as tpu_mesh
from mesh_tensorflow.training import command
from mesh_tensorflow.training.settings import checked_settings
from mesh_tensorflow.transformer.model import mesh_setup

SHARED_FLAGS = ProgramFlags(SHARED, FINE_TUNING)


def value(name: str) -> Any:
  """The value of a flag that all programs, or those for fine-tuning, have with one default."""
  return SHARED_FLAGS.value(name)


def load_config(max_seq_length: int) -> BertConfig:
  """The configuration of --bert_config_file.

  Args:
    max_seq_length: the longest sequence it shall do for.

  Raises:
    ConfigError: there is none, or it has too few positions.
  """
  config = BertConfig.from_json_file(value("bert_config_file"))
  if not config.vocab_size:
    raise ConfigError(f"BERT configuration {value('bert_config_file')}: vocab_size is missing")
  if max_seq_length > config.max_position_embeddings:
    raise ConfigError(
      f"--max_seq_length={max_seq_length} is more than the {config.max_position_embeddings} "
      f"positions (max_position_embeddings) of {value('bert_config_file')}"
    )
  return config


def check_vocabulary(config: BertConfig, vocab: Sequence[str] | dict[str, int]) -> None:
  """Raises `ConfigError` if tokens have no embedding, or the special ones are missing."""
  if len(vocab) > int(config.vocab_size or 0):
    raise ConfigError(
      f"--vocab_file={value('vocab_file')} has {len(vocab)} tokens, the model of "
      f"--bert_config_file={value('bert_config_file')} {config.vocab_size} (vocab_size): they are "
      "not of one model"
    )
  missing = [t for t in ("[CLS]", "[SEP]", "[UNK]") if t not in vocab]
  if missing:
    raise ConfigError(f"--vocab_file={value('vocab_file')} has no {', '.join(missing)}")


def make_mesh_impl(layout: str | None = None) -> mtf.MeshImpl:
  """The mesh that the flags say.

  Args:
    layout: layout rules in place of --layout.

  Raises:
    MeshError: it cannot be made; it says why.
  """
  shape, layout = value("mesh_shape"), value("layout") if layout is None else layout
  if not value("use_tpu"):
    return mesh_setup.make_mesh_impl(
      shape,
      layout,
      implementation=value("mesh_implementation"),
      seed=value("random_seed"),
      shard_state=value("shard_state"),
    )
  mesh_shape, rules = mtf.convert_to_shape(shape), mtf.convert_to_layout_rules(layout)
  mesh_setup.check_mesh_names(mesh_shape, rules)
  impl: mtf.MeshImpl = tpu_mesh.make_mesh_impl(
    mesh_shape,
    rules,
    value("tpu_name") or value("master") or "local",
    zone=value("tpu_zone"),
    project=value("gcp_project"),
    variable_store=mtf.VariableStore(seed=value("random_seed")),
  )
  return impl.with_sharded_state(value("shard_state"))


def prepare_devices() -> None:
  """Makes virtual devices, or joins other workers; afterwards TensorFlow may run something.

  Raises:
    MeshError: the mesh shape is malformed, or there are too few devices.
  """
  if value("mesh_shape") == AUTO:
    raise ConfigError("--mesh_shape=auto: give a mesh shape, such as batch:2,model:2")
  if not value("use_tpu"):
    shape = mtf.convert_to_shape(value("mesh_shape"))
    mesh_setup.join_workers(shape)
    mesh_setup.find_devices(shape.size)


def trainer_settings(**changes: Any) -> TrainerSettings:
  """The settings of the training loop that the flags say.

  Args:
    **changes: other values, by name.
  """
  given = {name: value(name) for name in ("init_checkpoint", *(f.name for f in TRAINER_FLAGS))}
  settings = TrainerSettings(owner="--", seed=value("random_seed"))
  return checked_settings(settings, **{**given, **changes})


def find_files(patterns: str | None, flag: str) -> list[str]:
  """The files that a flag names.

  Args:
    patterns: paths, in which * and the like stand for anything, separated by commas.
    flag: its name.

  Raises:
    DataError: there are none for one of the patterns.
  """
  files: list[str] = []
  for pattern in (patterns or "").split(","):
    found = sorted(tf.io.gfile.glob(pattern.strip())) if pattern.strip() else []
    if not found:
      raise DataError(f"--{flag}={patterns}: there is no file {pattern.strip()!r}")
    files += found
  return files


def training_steps(num_examples: int) -> int:
  """Number of training steps in --num_train_epochs epochs of `num_examples` examples.

  Raises:
    ConfigError: it is less than one step, and --do_train is set.
  """
  batch, epochs = value("train_batch_size"), value("num_train_epochs")
  steps = int(num_examples / batch * epochs)
  if value("do_train") and steps < 1:
    raise ConfigError(
      f"{num_examples} examples x --num_train_epochs={epochs} are not one batch of "
      f"--train_batch_size={batch}"
    )
  return steps


def make_folder(path: str) -> None:
  """Makes a folder, with those around it.

  Raises:
    ConfigError: that is not possible.
  """
  try:
    tf.io.gfile.makedirs(path)
  except tf.errors.OpError as e:
    raise ConfigError(f"cannot make the folder {path}: {e.message}") from e


def in_folder(name: str) -> str:
  """The path of a file in --output_dir."""
  return os.path.join(value("output_dir"), name)


def run_program(
  main: Callable[[Sequence[str]], object],
  description: str | None,
  required: Sequence[str],
  *,
  trains: bool = False,
) -> NoReturn:
  """Runs a program of this package; see `command.run_program`."""
  command.run_program(main, description, required, "mesh_tensorflow.bert.", trains=trains)
