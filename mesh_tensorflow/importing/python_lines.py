"""Source line of Python that made an operation."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
# Frames that say nothing of who made an operation: of TensorFlow, of this package, and of Keras'
# functions below its layers.
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_BETWEEN = re.compile(r"keras/src/(ops|backend|utils|activations)/|/tensorflow/")


def python_line(frames: Iterable[Any]) -> str:
  """Source line of the user's code that made an operation, and that of the library it called.

  Args:
    frames: a traceback, the innermost frame last.
  """
  library, own = "", ""
  for frame in reversed(list(frames)):
    path = frame.filename
    if path.startswith((_HERE, "<")) or _BETWEEN.search(path.replace(os.sep, "/")):
      continue
    if any(x in path for x in _LIBRARIES):
      for x in _LIBRARIES:
        path = path.split(x)[-1]
      library = library or _shown(path, frame)
    else:
      own = _shown(os.path.basename(path), frame)
      break
  if library and own:
    return f"{library}, called from {own}"
  return library or own or "no Python line"


def _shown(path: str, frame: Any) -> str:
  return f"{path}:{frame.lineno}" + (f", in {frame.name}" if frame.name else "")
