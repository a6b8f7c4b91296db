"""The command line of the trainer: its help, its version, and what is wrong with it.

Python's `argparse` ends with 0 after --help and with 2 after a wrong flag, and so does the trainer;
absl, which the flags are of, would end with 1 after both.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
import textwrap
from collections.abc import Sequence
from typing import NoReturn

import tensorflow as tf
from absl import flags

import mesh_tensorflow as mtf
from mesh_tensorflow import exit_codes
from mesh_tensorflow.errors import ConfigError

_HELP = ("--help", "-help", "-h", "-?", "--helpshort", "-helpshort")
_FULL_HELP = ("--helpfull", "-helpfull")
_VERSION = ("--version", "-version")

# What every run needs stands first in the help.
_FIRST = ("model_dir", "gin_file", "gin_param", "set")


def parse_flags(argv: Sequence[str], description: str) -> list[str]:
  """Parses the command line, as `flags_parser` of `absl.app.run`.

  Ends the process, after the help or the version with 0, after a wrong command line with 2.

  Args:
    argv: the program and its arguments.
    description: what the program does, for --help.

  Returns:
    The program alone.
  """
  options = argv[1 : argv.index("--")] if "--" in argv else argv[1:]
  if any(option in _HELP for option in options):
    _show(f"{description}\n{_usage(argv[0])}\n\n{_own_flags()}")
  if any(option in _FULL_HELP for option in options):
    _show(f"{description}\n{_usage(argv[0])}\n{flags.FLAGS.get_help()}")
  if any(option in _VERSION for option in options):
    _show(version())
  if len(argv) == 1:
    _refuse(argv[0], "no flags are given; a run needs a folder and gin files")
  try:
    rest = flags.FLAGS(list(argv))
  except flags.Error as e:
    _refuse(argv[0], str(e))
  if len(rest) > 1:
    _refuse(
      argv[0],
      f"unknown arguments: {' '.join(rest[1:])}; a binding with blanks stands in quotes: "
      '--gin_param="run.train_steps = 100"; a command comes first: mesh-transformer train ...',
    )
  own = flags.FLAGS["module_import"].value if "module_import" in flags.FLAGS else None
  assigned = flags.FLAGS["set"].value if "set" in flags.FLAGS else None
  if not (flags.FLAGS.gin_file or flags.FLAGS.gin_param or assigned or own):
    _refuse(argv[0], "no --gin_file is given, which says what to train, on which text and mesh")
  return rest


def version() -> str:
  """The version and where it was imported from, and the versions of what it runs on."""
  return (
    f"mesh-tensorflow {mtf.__version__} from {os.path.dirname(mtf.__file__)}\n"
    f"TensorFlow {tf.__version__}, Python {platform.python_version()}"
  )


def import_module(name: str) -> None:
  """Imports a module of --module_import.

  Raises:
    ConfigError: there is no such module.
  """
  try:
    importlib.import_module(name)
  except ModuleNotFoundError as e:
    if e.name is None or not f"{name}.".startswith(f"{e.name}."):
      raise  # One that the module needs.
    raise ConfigError(
      f"--module_import={name}: there is no module {e.name!r} in the folder {os.getcwd()} or "
      "elsewhere where Python looks (PYTHONPATH adds a folder)"
    ) from e


def check_not_moved(model_dir: str, gin_files: Sequence[str]) -> None:
  """Refuses a folder that a gin file names, and that was moved together with the file.

  A training would begin anew in the old place, and nobody would be told.

  Args:
    model_dir: `run.model_dir` of the gin files.
    gin_files: as they were given; those of the package lie beside no checkpoints.

  Raises:
    ConfigError: the folder is not there, and one of its name, with checkpoints, is beside a file.
  """
  if tf.io.gfile.isdir(model_dir):
    return
  for file in gin_files:
    beside = os.path.join(os.path.dirname(file), os.path.basename(os.path.normpath(model_dir)))
    if tf.io.gfile.exists(file) and tf.io.gfile.exists(os.path.join(beside, "checkpoint")):
      raise ConfigError(
        f"run.model_dir is {model_dir!r}, which is not there, but beside {file} there is {beside} "
        f"with checkpoints. If it was moved, add --model_dir={beside}, or change run.model_dir; to "
        f"begin anew, add --model_dir={model_dir}"
      )


def find_modules_here() -> None:
  """Puts the working folder on `sys.path`, as `python -m` does and a console command does not."""
  here = os.getcwd()
  safe = getattr(sys.flags, "safe_path", False)  # Of Python 3.11 and later.
  if not safe and here not in sys.path and "" not in sys.path:
    sys.path.insert(0, here)


def checked_model_dir(model_dir: str | None) -> str:
  """`--model_dir`.

  Raises:
    ConfigError: there is none. A default would be a folder in which trainings meet.
  """
  if not model_dir:
    raise ConfigError(
      "no folder is given for the checkpoints: add --model_dir=DIR (or bind run.model_dir), a "
      "folder of its own for each training; a run that finds checkpoints there goes on from the "
      "newest"
    )
  return model_dir


def _usage(program: str) -> str:
  name = os.path.basename(program)
  if name == "main.py":
    name = "python -m mesh_tensorflow.transformer.main"
  return (
    f'usage: {name} --model_dir=DIR --gin_file=FILE ... [--gin_param="NAME = VALUE" ...]\n'
    f"for example: {name} --model_dir=my_model --gin_file=problems/stdlib_lm.gin"
  )


def _own_flags() -> str:
  """The flags that modules of this package define, with what they mean."""
  modules = flags.FLAGS.flags_by_module_dict()
  own = {
    flag.name: flag
    for module, found in modules.items()
    if module.startswith("mesh_tensorflow.") or module == sys.argv[0]
    for flag in found
  }
  names = [n for n in _FIRST if n in own] + sorted(n for n in own if n not in _FIRST)
  lines = []
  for name in names:
    default = own[name].default
    lines.append(f"  --{name}" + (f" (default: {default})" if default else ""))
    # absl says of a flag that may be repeated that it may; so do the texts.
    text = own[name].help.split(";\n    repeat this option")[0]
    lines += textwrap.wrap(text, 96, initial_indent=" " * 6, subsequent_indent=" " * 6)
  lines += ["  --version", "      The version, where it was imported from, that of TensorFlow."]
  lines += ["  --helpfull", "      Also the flags of absl and other libraries."]
  return "\n".join(["flags:", *lines])


def _show(text: str) -> NoReturn:
  print(text)
  sys.exit(exit_codes.DONE)


def _refuse(program: str, reason: str) -> NoReturn:
  print(f"{reason}\n{_usage(program)}\n--help lists the flags.", file=sys.stderr)
  sys.exit(exit_codes.CONFIGURATION)
