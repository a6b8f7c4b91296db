"""Running a function once per device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from mesh_tensorflow.errors import GraphError

__all__ = [
  "parallel",
  "transpose_list_of_lists",
]

_T = TypeVar("_T")


def transpose_list_of_lists(lol: Sequence[Sequence[_T]]) -> list[list[_T]]:
  """Columns of a table of rows: [[1, 2], [3, 4]] -> [[1, 3], [2, 4]].

  Args:
    lol: a list of lists of equal length.

  Raises:
    GraphError: there is no list inside.
  """
  if not lol:
    raise GraphError("cannot transpose an empty list of lists")
  return [list(column) for column in zip(*lol)]


def parallel(
  devices: list[str], fn: Callable[..., _T], *args: list[Any], **kwargs: list[Any]
) -> list[_T]:
  """Calls a function once per device.

  Args:
    devices: a list of device names.
    fn: called with element i of every argument, under `tf.device(devices[i])`.
    *args: lists as long as `devices`.
    **kwargs: lists as long as `devices`, passed by keyword.

  Returns:
    A list of the results.

  Raises:
    GraphError: an argument is no list of that length.
  """
  if not isinstance(devices, list):
    raise GraphError(f"parallel: devices must be a list, got {type(devices).__name__}")
  for name, x in [*enumerate(args), *kwargs.items()]:
    if not isinstance(x, list) or len(x) != len(devices):
      raise GraphError(f"parallel: argument {name} must be a list of {len(devices)}, got {x!r}")
  results = []
  for i, device in enumerate(devices):
    with tf.device(device or None):
      results.append(fn(*[x[i] for x in args], **{k: x[i] for k, x in kwargs.items()}))
  return results
