"""Which devices a SIMD mesh runs on."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.dimensions import Shape
from mesh_tensorflow.errors import MeshShapeError
from mesh_tensorflow.placement_mesh_impl import suggest_mesh_shape


def choose_devices(shape: Shape, devices: Sequence[str] | None) -> list[str]:
  """The device of every physical processor of a mesh.

  Args:
    shape: mesh shape.
    devices: device names, or None for the first logical GPUs of this process if there are
      enough, else its first logical CPUs.

  Raises:
    MeshShapeError: there are too few, or another number was given.
  """
  dims = " x ".join(f"{d.name}:{d.size}" for d in shape) or "(no dimensions)"
  if devices is not None:
    devices = [_full_name(d) for d in devices]
    if len(devices) != shape.size:
      raise MeshShapeError(
        f"mesh shape {dims} has {shape.size} processors, but {len(devices)} device(s) were given; "
        f"a mesh that fits: {suggest_mesh_shape(shape, len(devices))}; or give {shape.size} devices"
      )
    return devices
  counts = []
  for kind in ("GPU", "CPU"):
    found = [d.name for d in tf.config.list_logical_devices(kind)]
    if len(found) >= shape.size:
      return [_full_name(d) for d in found[: shape.size]]
    counts.append(f"{len(found)} logical {kind}s")
  raise MeshShapeError(
    f"mesh shape {dims} has {shape.size} processors, but this process has "
    f"{' and '.join(counts)}; a mesh that fits: {suggest_mesh_shape(shape, len(found))}; or split "
    f"the CPU before TensorFlow runs anything: tf.config.set_logical_device_configuration(cpu, "
    f"[tf.config.LogicalDeviceConfiguration()] * {shape.size}); or give `devices`"
  )


def _full_name(device: str) -> str:
  """The name as the runtime spells it; the default device is the first CPU."""
  spec = tf.DeviceSpec.from_string(device or "/device:CPU:0")
  if spec.job is None:
    for d in tf.config.list_logical_devices(spec.device_type or "CPU"):
      known = tf.DeviceSpec.from_string(d.name)
      if known.device_index == (spec.device_index or 0):
        return d.name
  return device
