"""Measures exchanges between worker processes, as one of them.

All workers call the same functions in the same order. Each exchange goes over a mesh axis between
workers, in as many groups at a time as a worker has devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import traceback
from collections.abc import Iterator

import tensorflow as tf

from mesh_tensorflow import exit_codes, workers
from mesh_tensorflow.errors import MeshError
from mesh_tensorflow.planning.machine_parts import KINDS, Speed, Workers
from mesh_tensorflow.planning.measure_exchanges import Sizes, measured_link
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.simd.devices import local_devices
from mesh_tensorflow.simd.mesh_impl import SimdMeshImpl
from mesh_tensorflow.workers import Cluster

# Exchanges inside a worker are measured, too, so it needs two devices at least.
_FEWEST = 2


def join(cluster: Cluster, devices: int) -> list[str]:
  """Joins the workers, with GPUs if all have enough, else with virtual CPU devices.

  Args:
    cluster: the workers.
    devices: of all of them together.

  Returns:
    The names of the devices.

  Raises:
    MeshShapeError: the number of workers does not divide that of the devices.
    WorkerLostError: another worker did not come.
  """
  cluster.devices(devices)  # Checks the number, before anybody waits for anybody.
  each = devices // cluster.size
  workers.join(cluster, virtual_cpu_devices=max(_FEWEST, each))
  lacking = workers.any_worker(len(tf.config.list_physical_devices("GPU")) < each)
  return cluster.devices(devices, "CPU" if lacking else "GPU")


def own_devices(devices: list[str]) -> list[str]:
  """The devices of this worker, at least two of them if they are CPU devices.

  Args:
    devices: of all workers, as `join` returns them.
  """
  kind = "GPU" if "GPU" in devices[0].upper() else "CPU"
  each = len(devices) // workers.current().size
  return local_devices(kind)[: max(_FEWEST, each)]


def measured_workers(devices: list[str], sizes: Sizes) -> Workers:
  """Measures the interconnect between the workers; every worker must call it.

  Args:
    devices: of all workers, as `join` returns them.
    sizes: sizes and repetitions of the measurements.
  """
  cluster = workers.current()
  shared = "GPU" not in devices[0].upper()
  shape = [Dimension("workers", cluster.size), Dimension("inside", len(devices) // cluster.size)]
  impl = SimdMeshImpl(Shape(shape), "", devices=devices)
  hosts = cluster.hosts if shared else None
  links = {kind: measured_link("workers", kind, [impl], sizes, hosts) for kind in KINDS}
  # Kinds that are not listed have the figures of the first kind, the sum.
  kinds = {k: Speed(x.bandwidth, x.latency) for k, x in links.items() if k != KINDS[0]}
  return Workers(dataclasses.replace(links[KINDS[0]], kinds=kinds), cluster.size, cluster.hosts)


@contextlib.contextmanager
def ending() -> Iterator[None]:
  """Context manager: exits after the block, with the other workers; at once after an error."""
  try:
    yield
    workers.leave(_flush)
  except BaseException as e:  # noqa: BLE001 - the process ends; Python's own end waits for others.
    if isinstance(e, MeshError):
      print(f"error: {e}", file=sys.stderr)
    else:
      traceback.print_exc()
    _flush()
    os._exit(exit_codes.of_error(e))


def _flush() -> None:
  sys.stdout.flush()
  sys.stderr.flush()
