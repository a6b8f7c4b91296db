"""Names of the TF1 library that are not here any more, and what to use instead."""

from __future__ import annotations

import dis
import importlib
import sys
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

from mesh_tensorflow.errors import RemovedImportError, RemovedNameError

_FROM_FUTURE = "it was a feature of Python 2 that leaked; every Python 3 has it switched on"
_RAW_GRADIENT = (
  "it was an operation of TensorFlow that leaked; use tf.raw_ops.{}, or on mtf.Tensors mtf.{}"
)

# Name -> what to do instead.
REMOVED = {
  "tf_estimator": (
    "Estimator left TensorFlow with 2.16; write the loop as a Python loop over an mtf.function, "
    "and keep state with mesh_tensorflow.checkpoint.Checkpointer"
  ),
  "tf": "write `import tensorflow as tf`; the TF1 library's was tensorflow.compat.v1",
  "six": "it bridged Python 2 and 3; use Python 3's own names",
  "xrange": "use Python's range (within `import mesh_tensorflow as mtf`, mtf.range makes a Tensor)",
  "absolute_import": _FROM_FUTURE,
  "division": _FROM_FUTURE,
  "print_function": _FROM_FUTURE,
  "conv3d_backprop_input_v2": _RAW_GRADIENT.format(
    "Conv3DBackpropInputV2", "conv3d_backprop_input"
  ),
  "conv3d_backprop_filter_v2": _RAW_GRADIENT.format(
    "Conv3DBackpropFilterV2", "conv3d_backprop_filter"
  ),
  "np": "write `import numpy as np`",
  **{
    name: f"write `import {name}`"
    for name in ("collections", "copy", "functools", "gin", "itertools", "operator", "os", "re")
  },
}


def attribute_hook(module_name: str, late: Collection[str] = ()) -> Callable[[str], Any]:
  """A `__getattr__` for a module: explains the names in `REMOVED`.

  Args:
    module_name: `__name__` of the module.
    late: its packages that are imported when they are asked for first: they import something that
      takes seconds, and that most programs do not use.

  Returns:
    A function that imports what is `late`, and else always raises: `RemovedNameError` for
    `module.name`, so that `hasattr` is False; `RemovedImportError` for `from module import name`,
    where Python would put a text of its own in the place of an AttributeError's; a plain
    AttributeError for other names.
  """

  def __getattr__(name: str) -> Any:  # noqa: N807
    if name in late:
      return importlib.import_module(f"{module_name}.{name}")
    if name not in REMOVED:
      raise AttributeError(f"module {module_name!r} has no attribute {name!r}")
    text = f"{module_name}.{name} is not in Mesh TensorFlow for TensorFlow 2: {REMOVED[name]}"
    raise RemovedImportError(text) if _is_import(sys._getframe(1)) else RemovedNameError(text)

  return __getattr__


def _is_import(frame: FrameType) -> bool:
  """True if the frame is executing the IMPORT_FROM of `from module import name`."""
  code = frame.f_code.co_code
  return 0 <= frame.f_lasti < len(code) and dis.opname[code[frame.f_lasti]] == "IMPORT_FROM"
