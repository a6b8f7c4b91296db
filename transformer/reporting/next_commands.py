"""What to type next, when a training that was started by a command has ended."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

_COMMAND = "mesh-transformer"
_MODULE = "mesh_tensorflow.transformer.main"
_STEPS = "run.train_steps"


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
    sample = f"{_COMMAND} infer --model_dir={shlex.quote(model_dir)} --prompt='...'"
    start = _COMMAND
  elif program == "main.py" and "transformer" in os.path.dirname(argv[0]):
    start = f"python -m {_MODULE}"
    sample = ""
  else:
    return []
  # The last binding of a name counts; this one takes the place of what said how long to train.
  given = " ".join(shlex.quote(a) for a in argv[1:] if not _binds(a, _STEPS))
  sample = sample or (
    f"{start} {given} --gin_param=\"run.mode = 'infer'\" --gin_param=\"sample.prompt = '...'\""
  )
  more = f'{start} {given} --gin_param="{_STEPS} = {2 * last_step}"'
  return [("text of it", sample), ("train on", more)]


def _binds(argument: str, name: str) -> bool:
  """Whether an argument of the command line is a binding of a name."""
  flag, _, binding = argument.partition("=")
  return flag.lstrip("-") == "gin_param" and binding.partition("=")[0].strip() == name
