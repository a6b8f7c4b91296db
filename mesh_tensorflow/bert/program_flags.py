"""The flags of the BERT programs: tables that they share, and what holds if one is not given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from absl import flags

from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.training import command

# Flags that are defined here are those of the module that asks for it.
flags.disclaim_key_flags()

AUTO = "auto"


class Flag(NamedTuple):
  """A flag: `flags.DEFINE_string` or its like, the name, the value if not given, and the help."""

  definer: Callable[..., Any]
  name: str
  default: Any
  text: str


class ProgramFlags:
  """The flags of a program; its attributes are their values.

  The programs have flags of the same names, some with other defaults, and a process knows a name
  once. So a flag that was not given is what the table of the program says that asks, whichever of
  the programs defined it first. Values can be read before flags are parsed, as in a library.

  Args:
    tables: its flags; a name stands in one of them.
  """

  def __init__(self, *tables: tuple[Flag, ...]):
    self._flags = {flag.name: flag for table in tables for flag in table}

  def define(self, module: str) -> None:
    """Defines the flags, or shares those that are there.

    Args:
      module: name of the module whose they are, for --help.
    """
    for flag in self._flags.values():
      if flag.name in flags.FLAGS:
        flags.FLAGS.register_flag_by_module(module, flags.FLAGS[flag.name])
      else:
        flag.definer(flag.name, flag.default, flag.text)
        # For a program that is imported later, such as the trainer of Transformers, which has some
        # of these names, too, and only defines.
        flags.FLAGS[flag.name].allow_override = True

  def value(self, name: str) -> Any:
    """The value of a flag."""
    default = self._flags[name].default
    if name not in flags.FLAGS or flags.FLAGS[name].using_default_value:
      return default
    return flags.FLAGS[name].value

  def __getattr__(self, name: str) -> Any:
    if name.startswith("_") or name not in self._flags:
      raise AttributeError(f"there is no flag --{name} here")
    return self.value(name)

  def check_positive(self, *names: str) -> None:
    """Raises `ConfigError` for a flag that is below 1."""
    for name in names:
      if self.value(name) < 1:
        raise ConfigError(f"--{name}={self.value(name)} must be at least 1")


# Flags of all programs that run a model on a mesh, beside those of the training loop.
_ON_A_MESH = (
  Flag(flags.DEFINE_string, "bert_config_file", None, "JSON file with the model's configuration."),
  Flag(flags.DEFINE_string, "output_dir", None, "Folder for checkpoints and results."),
  Flag(
    flags.DEFINE_string,
    "init_checkpoint",
    None,
    "Weights to start from, if output_dir has no checkpoint: a checkpoint (or its folder) of "
    "these programs or of Google's BERT, or a folder of Hugging Face's.",
  ),
  Flag(flags.DEFINE_float, "learning_rate", 5e-5, "Peak of the learning rate."),
  Flag(flags.DEFINE_bool, "clip_gradients", True, "Clip gradients to a global norm of 1."),
  Flag(flags.DEFINE_string, "optimizer", "adam", "adam or adafactor."),
  Flag(flags.DEFINE_integer, "train_batch_size", 32, "Examples in a batch of the training."),
  Flag(flags.DEFINE_bool, "use_tpu", False, "Run on a TPU."),
  Flag(flags.DEFINE_string, "mesh_shape", "batch:8", "Names and sizes of the mesh's dimensions."),
  Flag(
    flags.DEFINE_string,
    "layout",
    "batch:batch,vocab:model,intermediate:model,num_heads:model,experts:batch",
    "Which dimension is split over which mesh dimension; auto: the fastest that is predicted.",
  ),
  Flag(
    flags.DEFINE_string, "tpu_name", None, "A TPU by name or address; that of this machine else."
  ),
  Flag(flags.DEFINE_string, "tpu_zone", None, "Zone of a TPU that is given by name."),
  Flag(flags.DEFINE_string, "gcp_project", None, "Project of a TPU that is given by name."),
  Flag(flags.DEFINE_string, "master", None, "An address in place of tpu_name."),
  Flag(
    flags.DEFINE_string,
    "mesh_implementation",
    AUTO,
    "placement: one program for all devices; simd: one for each; auto: what suits.",
  ),
  Flag(
    flags.DEFINE_string,
    "shard_state",
    "",
    "Dimensions of the mesh over which weights and optimizer state that the layout leaves whole "
    "are stored in shards (ZeRO, FSDP): batch, or batch,model.",
  ),
  Flag(
    flags.DEFINE_integer, "random_seed", 0, "Of initial weights, dropout and order of examples."
  ),
)

# Settings of the training loop that are flags by the same names.
TRAINER_FLAGS = tuple(
  Flag(*told)
  for told in command.trainer_flags(
    save_checkpoints_steps=1000,
    iterations_per_loop=1000,
    keep_checkpoint_max=10,
    state_dtype="float32",
  )
)
SHARED = (*_ON_A_MESH, *TRAINER_FLAGS)

# Flags of the fine-tuning programs, beside `SHARED`.
FINE_TUNING = (
  Flag(flags.DEFINE_string, "vocab_file", None, "The vocabulary that the model was trained with."),
  Flag(flags.DEFINE_bool, "do_lower_case", True, "Lower-case the text; False for a cased model."),
  Flag(flags.DEFINE_string, "cached_train_file", None, "Records of an earlier run, to train on."),
  Flag(
    flags.DEFINE_float,
    "max_optimized_variable_size",
    1e7,
    "Variables with more elements stay as they are; 0: none.",
  ),
  Flag(flags.DEFINE_float, "num_train_epochs", 3.0, "How often the training sees each example."),
  Flag(
    flags.DEFINE_float,
    "warmup_proportion",
    0.1,
    "Part of the training in which the learning rate rises.",
  ),
  Flag(flags.DEFINE_bool, "do_train", False, "Train."),
  Flag(flags.DEFINE_bool, "do_predict", False, "Predict."),
  Flag(flags.DEFINE_integer, "predict_batch_size", 8, "Examples in a batch of the prediction."),
)
