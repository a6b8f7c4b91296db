"""Synchronization and data exchange of the processors of a SIMD mesh.

Variables and queues on their devices, made when a program first needs them, and the guard that
ends a run in which a processor waits in vain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from mesh_tensorflow.errors import ConfigError, MeshShapeError
from mesh_tensorflow.meshes.collectives.base import Collectives
from mesh_tensorflow.meshes.collectives.mixed import MixedCollectives
from mesh_tensorflow.meshes.collectives.queues import QueueCollectives, QueueNetwork
from mesh_tensorflow.meshes.collectives.run_guard import RunGuard, unlifted_variable
from mesh_tensorflow.meshes.collectives.runtime import RuntimeCollectives
from mesh_tensorflow.meshes.layout import pnum_to_processor_coordinates
from mesh_tensorflow.meshes.simd.program import TracedProgram
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.workers.membership import abort_collectives


class Communication:
  """Guard, collectives and per-device variables of the processors of one process.

  Args:
    shape: the mesh shape.
    devices: device of every processor, of all workers.
    worker_of: for every processor the number of its worker.
    here: the processors of this process.
    collectives: "queues", "runtime" or "auto": see `SimdMeshImpl`.
    timeout_seconds: how long a processor waits for another one before the run fails.

  Raises:
    ConfigError: the devices do not allow such collectives.
    MeshShapeError: several processors have one device, and the collectives do not allow it.
  """

  def __init__(
    self,
    shape: Shape,
    devices: Sequence[str],
    worker_of: Sequence[int],
    here: Sequence[int],
    collectives: str,
    timeout_seconds: float,
  ):
    self._shape = shape
    self._devices = list(devices)
    self._worker_of = list(worker_of)
    self._here = list(here)
    self._timeout_seconds = timeout_seconds
    self._spans_workers = len(set(self._worker_of)) > 1
    self._use_queues = self._choose(collectives)
    self._guard: RunGuard | None = None
    self._network: QueueNetwork | None = None
    self._positions: list[tf.Variable] | None = None
    self._tokens: list[tf.Variable] | None = None

  def _choose(self, collectives: str) -> bool:
    """Returns whether data goes through in-process queues, rather than TensorFlow's collectives.

    Args:
      collectives: "auto" (queues on CPUs), "queues" or "runtime".

    Raises:
      ConfigError: `collectives` is none of these, or queues cannot serve these devices.
      MeshShapeError: two processors have one device, where each needs its own.
    """
    on_cpu = all(":CPU:" in d.upper() for d in self._devices)
    if collectives not in ("auto", "queues", "runtime"):
      raise ConfigError(
        f"SimdMeshImpl: collectives={collectives!r} is not 'auto', 'queues' or 'runtime'"
      )
    if collectives == "queues" and not on_cpu:
      raise ConfigError(
        f"SimdMeshImpl: collectives='queues' needs CPU devices, got {self._devices}; use 'runtime'"
      )
    if collectives == "queues" and self._spans_workers:
      raise ConfigError(
        "SimdMeshImpl: collectives='queues' needs devices of one process, and these are of "
        f"{len(set(self._worker_of))} workers; use 'auto' or 'runtime'"
      )
    use_queues = on_cpu and collectives != "runtime"
    shared = len(set(self._devices)) < len(self._devices)
    if self._spans_workers and shared:
      raise MeshShapeError(
        f"mesh {self._shape}: over several workers every processor needs a device of its own, got "
        f"{self._devices}; a PlacementMeshImpl, in one process, takes devices of several processors"
      )
    if not use_queues and shared:
      raise MeshShapeError(
        f"mesh {self._shape}: TensorFlow's collectives need a device of its own for every "
        f"processor, got {self._devices}; a PlacementMeshImpl takes devices of several processors "
        "(shares of unequal devices), and so does this mesh where all are CPUs of one process"
      )
    return use_queues

  def guard(self) -> RunGuard:
    """The guard of all runs; with new queues if the old ones had to be closed."""
    if self._guard is None or (self._guard.broken and self._use_queues):
      local_devices = [self._devices[p] for p in self._here]
      break_off: Callable[[], None] = functools.partial(abort_collectives, local_devices[0])
      if self._use_queues:
        self._network = QueueNetwork(self._devices, self._here)
        break_off = self._break_off if self._spans_workers else self._network.close
      self._guard = RunGuard(local_devices, self._timeout_seconds, break_off)
    return self._guard

  def _break_off(self) -> None:
    """Aborts everything that this worker waits for: queues and collectives with other workers."""
    if self._network is not None:
      self._network.close()
    abort_collectives(self._devices[self._here[0]])

  def reset(self) -> None:
    """Makes runs possible after one that failed midway (see `collectives`)."""
    if self._guard is not None and not self._guard.broken:
      if self._network is not None:
        self._network.reset()
      self._guard.reset()

  def collectives_of(self, program: TracedProgram) -> Collectives:
    """The collectives of a program that is being traced."""
    guard = self.guard()
    show = functools.partial(program.show_progress, lambda: guard.progress)
    if self._network is None:  # The guard made it, if data goes through queues.
      return self._across_workers(program, show)
    inside = QueueCollectives(self._network, program.pnum, program.own, show, program.run_once)
    if not self._spans_workers:
      return inside
    return MixedCollectives(inside, self._across_workers(program, show), self._worker_of)

  def _across_workers(
    self, program: TracedProgram, show: Callable[[tf.Tensor], None]
  ) -> RuntimeCollectives:
    token = program.own(self._collective_tokens()).handle
    return RuntimeCollectives(self._devices, program.pnum, token, show)

  def position_variables(self) -> list[tf.Variable]:
    """Number and coordinates of each processor."""
    if self._positions is None:
      self._positions = self._on_each_device(
        lambda p: unlifted_variable(
          [p, *pnum_to_processor_coordinates(self._shape, p)], tf.int32, "mtf_position"
        )
      )
    return self._positions

  def _collective_tokens(self) -> list[tf.Variable]:
    """Ordering tokens of collectives, one resource per device, so that devices stay independent."""
    if self._tokens is None:
      self._tokens = self._on_each_device(
        lambda p: unlifted_variable(0, tf.int32, "mtf_collective_token")
      )
    return self._tokens

  def _on_each_device(self, make: Callable[[int], tf.Variable]) -> list[tf.Variable]:
    made = []
    with tf.init_scope():
      for p in self._here:
        with tf.device(self._devices[p]):
          made.append(make(p))
    return made
