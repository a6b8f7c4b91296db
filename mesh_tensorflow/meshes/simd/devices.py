"""Choice of the devices that a SIMD mesh runs on."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.errors import MeshShapeError
from mesh_tensorflow.meshes.placement.mesh_impl import suggest_mesh_shape
from mesh_tensorflow.program.dimensions import Shape


def choose_devices(shape: Shape, devices: Sequence[str] | None) -> list[str]:
  """The device of every physical processor of a mesh.

  Args:
    shape: mesh shape.
    devices: device names, or None for the first logical GPUs of this process if there are
      enough, else its first logical CPUs; in a cluster, of all workers alike.

  Raises:
    MeshShapeError: there are too few, another number was given, or one is not there.
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
  cluster = workers.current()
  counts = []
  for kind in ("GPU", "CPU"):
    count = _count(kind)
    if count * cluster.size >= shape.size:
      if cluster.size > 1:
        return cluster.devices(shape.size, kind)
      return local_devices(kind)[: shape.size]
    counts.append(f"{count} logical {kind}s")
  raise MeshShapeError(
    f"mesh shape {dims} has {shape.size} processors, but this process has "
    f"{' and '.join(counts)}{_times(cluster.size)}; a mesh that fits: "
    f"{suggest_mesh_shape(shape, count * cluster.size)}; or make virtual CPU devices, before "
    f"TensorFlow runs anything: mtf.virtual_cpu_devices({shape.size}); or give `devices`"
  )


def _count(kind: str) -> int:
  """The number of logical devices of this process.

  Asked for without starting TensorFlow's runtime where that can be: with too few of them the
  program, or the reader at the prompt, can still make more.
  """
  if workers.current().size > 1:
    return len(local_devices(kind))
  parts = [
    tf.config.get_logical_device_configuration(d) for d in tf.config.get_visible_devices(kind)
  ]
  return sum(len(p) if p else 1 for p in parts)


def _times(count: int) -> str:
  return f" (and so has each of the {count} workers)" if count > 1 else ""


def local_devices(kind: str) -> list[str]:
  """Full names of the logical devices of this process."""
  names = [d.name for d in tf.config.list_logical_devices(kind)]
  return [n for n in names if worker_of_device(n) == workers.current().index]


def worker_of_device(device: str) -> int:
  """The number of the worker that has a device."""
  cluster = workers.current()
  if cluster.size == 1:
    return 0
  spec = tf.DeviceSpec.from_string(device)
  tasks = [(job, number) for job, number, _ in cluster.tasks]
  if (spec.job, spec.task) not in tasks:
    known = ", ".join(f"/job:{job}/task:{number}" for job, number in tasks)
    raise MeshShapeError(f"device {device} is of none of the workers, which are {known}")
  return tasks.index((spec.job, spec.task))


def has_job(device: str) -> bool:
  """True if the name of a device says whose it is: "/job:worker/task:1/device:CPU:0"."""
  return tf.DeviceSpec.from_string(device or "").job is not None


def _full_name(device: str) -> str:
  """The name as the runtime spells it; the default device is the first CPU."""
  try:
    spec = tf.DeviceSpec.from_string(device or "/device:CPU:0")
  except ValueError as e:
    raise MeshShapeError(f"device {device!r}: {e}; write it as '/device:CPU:0'") from None
  if spec.job is not None:
    return device
  kind = spec.device_type or "CPU"
  names = local_devices(kind)
  for name in names:
    if tf.DeviceSpec.from_string(name).device_index == (spec.device_index or 0):
      return name
  # TensorFlow would run on another one in its place, where the others wait for it in vain.
  has = f"{kind}:0 to {kind}:{len(names) - 1}" if len(names) > 1 else f"{kind}:0"
  raise MeshShapeError(
    f"device {device!r}: this process has {has if names else f'no {kind}'}; virtual CPU devices "
    "are made by mtf.virtual_cpu_devices(n), before TensorFlow runs anything"
  )
