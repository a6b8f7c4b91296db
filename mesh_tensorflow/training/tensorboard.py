"""The command that shows a training in TensorBoard."""

from __future__ import annotations

import importlib.util
import shlex
import shutil

_INSTALL = "pip install tensorboard"


def command(model_dir: str) -> str:
  """The command that works here; with what installs TensorBoard, if it is not there.

  Args:
    model_dir: the folder of the model.
  """
  flags = f"--logdir {shlex.quote(model_dir)}"
  if shutil.which("tensorboard"):
    return f"tensorboard {flags}"
  if importlib.util.find_spec("tensorboard") is not None:
    return f"python -m tensorboard.main {flags}"
  return f"{_INSTALL} && tensorboard {flags}"
