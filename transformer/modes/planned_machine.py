"""The machine that steps are predicted for: that of `choose_layout.machine`, or the usual one."""

from __future__ import annotations

from typing import Any

import gin
import tensorflow as tf

from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.planning.machine import Machine, convert_to_machine
from mesh_tensorflow.planning.program import machine_of

_MOST_VIRTUAL = 16


def usual_machine(devices: int, on_tpu: bool = False) -> str:
  """The shipped machine that is predicted for where `choose_layout.machine` is not bound.

  Args:
    devices: how many there are.
    on_tpu: whether they are those of a TPU.
  """
  if not on_tpu and tf.config.list_physical_devices("GPU"):
    return "a100"
  # More devices than one host has virtual CPUs are planned for a machine elsewhere.
  return "tpu-v3" if on_tpu or devices > _MOST_VIRTUAL else "cpu"


def _bound(name: str) -> Any:
  try:
    return gin.query_parameter(f"choose_layout.{name}")
  except ValueError:  # It is not bound.
    return None


def machine_without_search(mesh_impl: MeshImpl, implementation: str) -> tuple[Machine, float]:
  """The machine that a step is predicted for where no layout is searched, and a device's memory.

  Args:
    mesh_impl: the mesh, or the first of several stages; it need not have devices.
    implementation: "placement" or "simd", of which a machine that was measured knows more; else any
      other text.

  Returns:
    The machine; and the bytes that a device may hold.

  Raises:
    ConfigError: there is no such machine.
  """
  devices = int(mesh_impl.shape.size) * max(len(mesh_impl.stages), 1)
  machine = convert_to_machine(_bound("machine") or usual_machine(devices))
  assert machine is not None
  machine = machine_of(machine.variant(implementation), None, devices)
  limit = _bound("memory_limit")
  return machine, machine.memory_of_each(devices) if limit is None else float(limit)
