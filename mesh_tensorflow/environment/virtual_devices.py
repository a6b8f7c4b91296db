"""Virtual CPU devices: a mesh on a machine without accelerators."""

from __future__ import annotations

import os

import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.environment import quiet
from mesh_tensorflow.errors import MeshShapeError


@checked
def virtual_cpu_devices(count: int) -> list[str]:
  """Splits the CPU into virtual devices; call it before TensorFlow runs anything.

  Each device gets its share of the cores: with as many devices as cores or more, an operation
  runs on one thread and the devices run side by side, which is faster than that every
  operation of every device asks for all cores. Numbers of threads that are set already
  (`tf.config.threading`) stay.

  Args:
    count: how many devices to make; if TensorFlow has at least as many, they are used.

  Returns:
    The names of the first `count` CPU devices.

  Raises:
    MeshShapeError: TensorFlow has started with fewer devices.
  """
  started = None
  try:
    configure_virtual_cpu_devices(count)
  except RuntimeError as e:
    # The number of existing devices is checked below; the error then names this as its cause.
    started = e
  with quiet.held_back_notices():
    names = [d.name for d in tf.config.list_logical_devices("CPU")]
  quiet.first_operation()
  if len(names) < count:
    raise MeshShapeError(
      f"{count} virtual CPU devices are needed, but TensorFlow has started with {len(names)}: make "
      f"them first (mtf.virtual_cpu_devices({count}), before any operation, in a new process or "
      f"notebook kernel), or use a mesh of at most {len(names)} processors"
    ) from started
  return names[:count]


def configure_virtual_cpu_devices(count: int, processes: int = 1) -> None:
  """As `virtual_cpu_devices`, for a process that joins a cluster: TensorFlow is not started.

  Args:
    count: number of devices to make.
    processes: number of processes of the cluster on this machine, which share its cores.

  Raises:
    RuntimeError: TensorFlow has started.
  """
  with quiet.held_back_notices():  # It looks for GPUs, too.
    cpu = tf.config.list_physical_devices("CPU")[0]
  configured = tf.config.get_logical_device_configuration(cpu)
  makes_devices = count > 1 and (configured is None or len(configured) < count)
  if makes_devices:
    tf.config.set_logical_device_configuration(
      cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    )
  if makes_devices or processes > 1:
    _share_threads(count * processes)


def _share_threads(count: int) -> None:
  """Sets the numbers of TensorFlow's threads, where neither program nor environment has."""
  cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
  threading, environ = tf.config.threading, os.environ
  if not (threading.get_intra_op_parallelism_threads() or "TF_NUM_INTRAOP_THREADS" in environ):
    threading.set_intra_op_parallelism_threads(max(1, cores // count))
  if not (threading.get_inter_op_parallelism_threads() or "TF_NUM_INTEROP_THREADS" in environ):
    threading.set_inter_op_parallelism_threads(cores)
