"""The flags that the BERT programs share, what is made of them, and how the programs start."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import tensorflow as tf
from absl import app, flags, logging

import mesh_tensorflow as mtf
from mesh_tensorflow import exit_codes
from mesh_tensorflow.bert.config import BertConfig
from mesh_tensorflow.errors import ConfigError, DataError, MeshError
from mesh_tensorflow.tpu import mesh as tpu_mesh
from mesh_tensorflow.transformer.meshes import mesh_setup

# Flags that functions here define are those of the module that calls them.
flags.disclaim_key_flags()

AUTO = "auto"
_HELP = ("--help", "-help", "-h", "-?", "--helpshort", "-helpshort")


def define(module: str, definer: Callable[..., Any], name: str, default: Any, text: str) -> None:
  """Defines a flag, or shares one that is there.

  The programs have flags of the same names. Where several are imported into one process, which
  absl would refuse, a flag keeps the default of the program that came first.

  Args:
    module: name of the module whose flag it is.
    definer: `flags.DEFINE_string` or another one.
    name: the flag's.
    default: its value if it is not given.
    text: for --help.
  """
  if name in flags.FLAGS:
    flags.FLAGS.register_flag_by_module(module, flags.FLAGS[name])
  else:
    definer(name, default, text)
    # For a program that is imported later, such as the trainer of Transformers, which has some of
    # these names, too, and only defines.
    flags.FLAGS[name].allow_override = True


def define_shared(module: str) -> None:
  """Defines the flags that all programs have, which run a model on a mesh."""
  for definer, name, default, text in (
    (flags.DEFINE_string, "bert_config_file", None, "JSON file with the model's configuration."),
    (flags.DEFINE_string, "output_dir", None, "Folder for checkpoints and results."),
    (
      flags.DEFINE_string,
      "init_checkpoint",
      None,
      "Weights to start from, if output_dir has no checkpoint: a checkpoint (or its folder) of "
      "these programs or of Google's BERT, or a folder of Hugging Face's.",
    ),
    (flags.DEFINE_float, "learning_rate", 5e-5, "Peak of the learning rate."),
    (flags.DEFINE_bool, "clip_gradients", True, "Clip gradients to a global norm of 1."),
    (flags.DEFINE_string, "optimizer", "adam", "adam or adafactor."),
    (flags.DEFINE_integer, "train_batch_size", 32, "Examples in a batch of the training."),
    (flags.DEFINE_integer, "save_checkpoints_steps", 1000, "Steps between checkpoints."),
    (flags.DEFINE_integer, "iterations_per_loop", 1000, "Most steps of one call."),
    (flags.DEFINE_bool, "use_tpu", False, "Run on a TPU."),
    (flags.DEFINE_string, "mesh_shape", "batch:8", "Names and sizes of the mesh's dimensions."),
    (
      flags.DEFINE_string,
      "layout",
      "batch:batch,vocab:model,intermediate:model,num_heads:model,experts:batch",
      "Which dimension is split over which mesh dimension; auto: the fastest that is predicted.",
    ),
    (flags.DEFINE_string, "tpu_name", None, "A TPU by name or address; that of this machine else."),
    (flags.DEFINE_string, "tpu_zone", None, "Zone of a TPU that is given by name."),
    (flags.DEFINE_string, "gcp_project", None, "Project of a TPU that is given by name."),
    (flags.DEFINE_string, "master", None, "An address in place of tpu_name."),
    (
      flags.DEFINE_string,
      "mesh_implementation",
      AUTO,
      "placement: one program for all devices; simd: one for each; auto: what suits.",
    ),
    (flags.DEFINE_integer, "random_seed", 0, "Of initial weights, dropout and order of examples."),
  ):
    define(module, definer, name, default, text)


def define_fine_tuning(module: str) -> None:
  """Defines the flags that programs for tasks of their own have beside `define_shared`."""
  for definer, name, default, text in (
    (flags.DEFINE_string, "vocab_file", None, "The vocabulary that the model was trained with."),
    (flags.DEFINE_bool, "do_lower_case", True, "Lower-case the text; False for a cased model."),
    (flags.DEFINE_string, "cached_train_file", None, "Records of an earlier run, to train on."),
    (
      flags.DEFINE_float,
      "max_optimized_variable_size",
      1e7,
      "Variables with more elements stay as they are; 0: none.",
    ),
    (flags.DEFINE_float, "num_train_epochs", 3.0, "How often the training sees each example."),
    (
      flags.DEFINE_float,
      "warmup_proportion",
      0.1,
      "Part of the training in which the learning rate rises.",
    ),
    (flags.DEFINE_bool, "do_train", False, "Train."),
    (flags.DEFINE_bool, "do_predict", False, "Predict."),
    (flags.DEFINE_integer, "predict_batch_size", 8, "Examples in a batch of the prediction."),
  ):
    define(module, definer, name, default, text)


def value(name: str) -> Any:
  """The value of a flag; its default where flags have not been parsed, as in a library."""
  return flags.FLAGS[name].value


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
    )
  mesh_shape, rules = mtf.convert_to_shape(shape), mtf.convert_to_layout_rules(layout)
  mesh_setup.check_mesh_names(mesh_shape, rules)
  return tpu_mesh.make_mesh_impl(
    mesh_shape,
    rules,
    value("tpu_name") or value("master") or "local",
    zone=value("tpu_zone"),
    project=value("gcp_project"),
    variable_store=mtf.VariableStore(seed=value("random_seed")),
  )


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


def check_positive(*names: str) -> None:
  """Raises `ConfigError` for a flag that is below 1."""
  for name in names:
    if value(name) < 1:
      raise ConfigError(f"--{name}={value(name)} must be at least 1")


def training_steps(num_examples: int) -> int:
  """The steps in which --num_train_epochs see so many examples.

  Raises:
    ConfigError: that is less than one step, and there is to be training.
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


# ------------------------------------------------------------------- programs


def run_program(
  main: Callable[[Sequence[str]], Any], description: str | None, required: Sequence[str]
) -> NoReturn:
  """Runs a program and ends the process: with 0, or with a line of what is wrong and its exit code.

  Args:
    main: takes the arguments that are no flags.
    description: what the program does, for --help.
    required: flags without which it cannot do anything.
  """

  def parse(argv: Sequence[str]) -> list[str]:
    if any(a in _HELP for a in argv[1:]):
      print(f"{description}\n{_own_flags(argv[0])}")
      sys.exit(exit_codes.DONE)
    try:
      rest = list(flags.FLAGS(list(argv)))
    except flags.Error as e:
      _end_by_wrong_flags(str(e))
    missing = [f"--{name}" for name in required if value(name) in (None, "")]
    if missing:
      _end_by_wrong_flags(f"{', '.join(missing)} must be given")
    if len(rest) > 1:
      _end_by_wrong_flags(f"unknown arguments: {' '.join(rest[1:])}")
    return rest

  def guarded(argv: Sequence[str]) -> int:
    try:
      main(argv)
    except (MeshError, KeyboardInterrupt) as e:
      if flags.FLAGS.verbosity > 0:
        raise
      print(f"{type(e).__name__}: {e}", file=sys.stderr)
      return exit_codes.of_error(e)
    return exit_codes.DONE

  logging.set_verbosity(logging.WARNING)  # --verbosity says otherwise.
  app.run(guarded, flags_parser=parse)
  sys.exit(exit_codes.DONE)  # app.run has ended the process before.


def _end_by_wrong_flags(what: str) -> NoReturn:
  print(f"{what}\n--help lists the flags.", file=sys.stderr)
  sys.exit(exit_codes.CONFIGURATION)


def _own_flags(program: str) -> str:
  """The flags of a program, with what they mean."""
  modules = flags.FLAGS.flags_by_module_dict()
  own = [
    flag
    for module, found in modules.items()
    if module == program or module.startswith("mesh_tensorflow.bert.")
    for flag in found
  ]
  lines = ["flags:"]
  for flag in sorted(own, key=lambda flag: str(flag.name)):
    default = "" if flag.default is None else f" (default: {flag.default})"
    lines.append(f"  --{flag.name}{default}")
    lines += textwrap.wrap(flag.help, 96, initial_indent=" " * 6, subsequent_indent=" " * 6)
  return "\n".join(lines)
