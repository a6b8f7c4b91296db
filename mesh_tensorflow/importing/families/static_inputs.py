"""Inputs of operations that must be known while tracing: axes, sizes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mesh_tensorflow.errors import UnsupportedError
from mesh_tensorflow.importing.nodes import Node


def static_input(node: Node, index: int, what: str) -> npt.NDArray[np.generic]:
  """The values of an input.

  Args:
    node: an operation.
    index: number of the input.
    what: what it is, for the message.

  Raises:
    UnsupportedError: they are known only when the program runs.
  """
  value = node.static(index)
  if value is None:
    raise UnsupportedError(
      f"from_tensorflow: {node}: its {what} must be known while tracing, but {node.inputs[index]} "
      "is computed"
    )
  return value
