"""Devices for variables of a program's own, as programs written for the TF1 library place them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.errors import ArgumentError
from mesh_tensorflow.program.dimensions import list_product

_VARIABLE_TYPES = ("Variable", "VariableV2", "VarHandleOp")


class BalancedVariablePlacer:
  """Assigns each variable to the device that has least to hold so far.

  A mesh implementation keeps the slices of a variable on their own devices; the placer is for
  variables of a program's own: `with tf.device(placer.device_function(variable_or_op)): ...`.

  Args:
    devices: device names.
    init_usage: bytes that each device holds already; none by default.

  Raises:
    ArgumentError: `init_usage` has another length than `devices`.
  """

  @checked
  def __init__(self, devices: Sequence[str], init_usage: Sequence[int] | None = None):
    devices = list(devices)
    usage = [0] * len(devices) if init_usage is None else list(init_usage)
    if not devices or len(usage) != len(devices):
      raise ArgumentError(
        f"BalancedVariablePlacer: {len(usage)} entries of init_usage for {len(devices)} devices"
      )
    self._heap = list(zip(usage, devices))
    heapq.heapify(self._heap)
    self._last_device = devices[0]

  def device_function(self, var: Any) -> str:
    """The device for a variable or an operation.

    Args:
      var: a variable operation (with `type`, and `get_attr` for "shape" and "dtype"), a
        tf.Variable, or another operation.

    Returns:
      For a variable the device with the fewest bytes, of several the first in alphabetical
      order; for another operation the device returned last.
    """
    if isinstance(var, tf.Variable):
      shape, dtype = var.shape, var.dtype
    elif var.type in _VARIABLE_TYPES:
      shape, dtype = tf.TensorShape(var.get_attr("shape")), tf.as_dtype(var.get_attr("dtype"))
    else:
      return self._last_device
    used, device = heapq.heappop(self._heap)
    heapq.heappush(self._heap, (used + list_product(shape.as_list()) * dtype.size, device))
    self._last_device = device
    return device
