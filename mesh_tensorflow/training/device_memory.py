"""Memory use of the devices of this process."""

from __future__ import annotations

import pathlib
import resource
import sys

import tensorflow as tf

from mesh_tensorflow.meshes.mesh_impl import MeshImpl


def used_bytes(mesh_impl: MeshImpl) -> dict[str, int]:
  """Bytes in use, by name of a metric.

  `memory_bytes` is what this process has in RAM. Of devices with a memory of their own
  `memory_bytes/GPU:0` is the most that was in use at one time; TensorFlow tells it of GPUs and
  TPUs, not of CPU devices, which all use the RAM of the process.

  Args:
    mesh_impl: the mesh.
  """
  found = {"memory_bytes": _resident()}
  for pnum in mesh_impl.local_processors:
    device = mesh_impl.processor_device(pnum) or "CPU:0"
    kind, number = (["", *device.upper().split(":")])[-2:]
    kind = kind.split("/")[-1]
    if kind != "CPU" and number.isdecimal():
      name = f"{kind}:{number}"
      try:
        found[f"memory_bytes/{name}"] = int(tf.config.experimental.get_memory_info(name)["peak"])
      except (ValueError, tf.errors.OpError):  # It does not tell.
        continue
  return found


def _resident() -> int:
  """Resident set size of this process in bytes; its peak where only that is available."""
  try:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
  except (OSError, ValueError, IndexError):
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most
