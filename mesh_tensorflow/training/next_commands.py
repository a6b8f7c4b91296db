"""Suggestions of the next commands, printed at the end of a training."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence

_COMMAND = "mesh-transformer"
_CLI = "mesh_transformer_cli"
_MODULE = "mesh_tensorflow.transformer.main"
# Folders of the programs that `python -m` runs.
_OURS = re.compile(r"transformer(_cli)?$")
_STEPS = "run.train_steps"
# What else `--set` calls it.
_STEPS_NAMES = {_STEPS, f"utils.{_STEPS}", "train_steps", "steps"}


def next_commands(argv: Sequence[str], model_dir: str, last_step: int) -> list[tuple[str, str]]:
  """Commands that go on with a model.

  Args:
    argv: of this process.
    model_dir: the folder of the model.
    last_step: the step at which its training ended.

  Returns:
    (what it does, command); none if the process is another program than the trainer.
  """
  program = os.path.basename(argv[0]) if argv else ""
  if program == _COMMAND:
    command = start = _COMMAND
  elif program in ("main.py", "__main__.py") and _OURS.search(os.path.dirname(argv[0])):
    command, start = f"python -m {_CLI}", f"python -m {_MODULE}"
  else:
    return []
  # `--set` overrides all others; it takes the place of what said how long to train.
  given = " ".join(_quoted(a) for a in argv[1:] if not _says_steps(a))
  return [
    ("sample", f'{command} infer --model_dir={_quoted(model_dir)} --prompt="..."'),
    ("train on", f"{start} {given} --set={_STEPS}={2 * last_step}"),
  ]


def _says_steps(argument: str) -> bool:
  """True if a command-line argument sets the step at which training ends."""
  flag, _, binding = argument.partition("=")
  return flag.lstrip("-") in ("gin_param", "set") and (
    binding.partition("=")[0].strip() in _STEPS_NAMES
  )


def _quoted(argument: str) -> str:
  """As a shell takes it: in double quotes if it has single ones, as bindings of texts have."""
  if "'" in argument and not set(argument) & set('"$`\\!'):
    return f'"{argument}"'
  return shlex.quote(argument)
