"""The memory of the devices of this process, and whether a training fits into it."""

from __future__ import annotations

import logging
import math
import pathlib
import resource
import sys
from collections.abc import Callable
from typing import Any

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.errors import OutOfMemoryError
from mesh_tensorflow.meshes import memory
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.planning.describe import describe
from mesh_tensorflow.program.graph import Graph
from mesh_tensorflow.running.function import Function


def used_bytes(mesh_impl: MeshImpl) -> dict[str, int]:
  """Bytes in use, by name of a metric.

  `memory_bytes` is what this process has in RAM. Of devices with a memory of their own
  `memory_bytes/GPU:0` is the most that was in use at one time; TensorFlow tells it of GPUs and
  TPUs, not of CPU devices, which all use the RAM of the process.

  Args:
    mesh_impl: the mesh; of all its stages.
  """
  found = {"memory_bytes": _resident()}
  meshes = mesh_impl.stages.values() or [mesh_impl]
  for device in [
    impl.processor_device(p) or "CPU:0" for impl in meshes for p in impl.local_processors
  ]:
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


_LOG = logging.getLogger("mesh_tensorflow")

# A plan counts what is held in one order of the operations; TensorFlow may do with less, or take
# more. Beyond this part of the memory a training is warned of, beyond that one refused.
_WARNED, _REFUSED = 0.8, 2.0


class MayNotFitError(Exception):
  """A training step that is being built could need more memory than there is."""


@gin.configurable(module="mesh_tensorflow.transformer.memory_check", allowlist=["refuse"])
@affects("report")
class MemoryCheck:
  """Checks the memory of training steps on CPU devices; for others it is unknown.

  Args:
    mesh_impl: the mesh.
    refuse: True raises an error if a training does not fit, False only warns.
  """

  def __init__(self, mesh_impl: MeshImpl, *, refuse: bool = True):
    self._impl = mesh_impl
    self._refuse = refuse
    self._done = False
    self._variables = 0

  def look(self, graph: Graph) -> None:
    """Computes an upper bound of a graph's memory.

    Args:
      graph: the complete graph of a training step.

    Raises:
      MayNotFitError: the bound exceeds the available memory.
    """
    # Once planned, it is traced again without another look.
    available = None if self._done else self._available()
    if available is None:
      return
    impl = self._impl
    size = sum(
      impl.slice_size(x.shape) * x.dtype.size for op in graph.operations for x in op.outputs
    )
    self._variables = sum(self._bytes_of(v) for v in graph.all_variables)
    if size * self._processors() + self._variables > _WARNED * available:
      # Aborts tracing: the plan is made outside of it; see `trace`.
      raise MayNotFitError

  def trace(self, trace: Callable[[], object], step: Function) -> None:
    """Traces the training step, with the memory check; traces again once a plan has been made.

    Args:
      trace: builds and lowers the step, with a call of `look` between.
      step: the step.

    Raises:
      OutOfMemoryError: the step does not fit, or TensorFlow has no memory for the variables.
    """
    with memory.errors("the training program"):
      try:
        trace()
      except MayNotFitError:
        self._done = True
        self._judge(describe(step, self._impl.layout_rules, self._impl.shape).memory)
        trace()

  def _judge(self, needed: Any) -> None:
    """Raises or warns for what one processor needs, a `costs.Memory`."""
    available, count = self._available(), self._processors()
    variables = min(needed.variables * count, self._variables)
    total = (needed.total - needed.variables) * count + variables
    if available is None or total <= _WARNED * available:
      return
    text = (
      f"the training program needs about {memory.text(total)} on this machine (run.mode = 'plan': "
      f"{count} processor(s), each {memory.text(needed.variables)} of variables, with the "
      f"optimizer's, and {memory.text(needed.inputs + needed.activations)} of activations), which "
      f"has {memory.text(available)} free"
    )
    if self._refuse and (variables > available or total > _REFUSED * available):
      raise OutOfMemoryError(
        f"{text}. Use a smaller model or batch, microbatches "
        "(serialize_num_microbatches.tokens_per_microbatch_per_replica), recomputation, state in "
        "shards (run.shard_state) or fewer bits (run.state_dtype), or a mesh of more machines; "
        "MemoryCheck.refuse = False tries it all the same"
      )
    _LOG.warning("%s: the system may end this process (exit code 137)", text)

  def _bytes_of(self, variable: Variable) -> int:
    """Bytes of a variable in this process; a slice that processors share counts once."""
    impl = variable.stored_impl(self._impl)
    places = {
      (self._impl.processor_device(p) or p, tuple(impl.slice_begin(variable.shape, p)))
      if self._impl.lowerings_per_run == 1
      else p
      for p in self._impl.local_processors
    }
    return len(places) * int(impl.slice_size(variable.shape)) * int(variable.slice_dtype.size)

  def _processors(self) -> int:
    """Number of this process's mesh processors on CPU devices, which share the host's RAM."""
    devices = (self._impl.processor_device(p) or "CPU" for p in self._impl.local_processors)
    return sum("CPU" in d.upper() for d in devices)

  def _available(self) -> int | None:
    """Memory budget in bytes: free RAM plus existing variables; None if unknown or not on CPUs."""
    free = memory.available_bytes() if self._processors() else None
    if free is None:
      return None
    # Existing variables are counted in the need, and are no longer part of the free memory.
    there = sum(
      len(v.different_slices) * math.prod(v.slice_shape) * v.slice_dtype.size
      for v in self._impl.variable_store
    )
    return int(free + there)
