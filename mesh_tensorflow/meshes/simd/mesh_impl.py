"""A mesh whose processors all run one per-device program (SPMD).

The program, the function given to `SimdMeshImpl.run`, is traced once, whatever
the number of processors, and sees the number of its processor as a tensor. Called
eagerly, `run` executes it in one Python thread per processor instead: slow, but
every lowered operation runs at once and can be looked at.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gin
import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.declared import ABOVE_ZERO, affects, takes
from mesh_tensorflow.environment.tensorflow_mode import not_converted
from mesh_tensorflow.errors import GraphError, MeshShapeError, UnsupportedError
from mesh_tensorflow.meshes import memory
from mesh_tensorflow.meshes.collectives.base import Collectives
from mesh_tensorflow.meshes.collectives.run_guard import collective_errors
from mesh_tensorflow.meshes.collectives.threads import run_in_threads
from mesh_tensorflow.meshes.laid_out import LaidOut, LaidOutTensor
from mesh_tensorflow.meshes.laid_out_variable import LaidOutVariable
from mesh_tensorflow.meshes.layout import LayoutLike, pnum_to_processor_coordinates
from mesh_tensorflow.meshes.simd.communication import Communication
from mesh_tensorflow.meshes.simd.devices import choose_devices, worker_of_device
from mesh_tensorflow.meshes.simd.per_device import PerDeviceMeshImpl
from mesh_tensorflow.meshes.simd.program import ConcreteProgram, Program, TracedProgram, run_traced
from mesh_tensorflow.meshes.store import VariableStore
from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.dimensions import Shape, ShapeLike


@gin.configurable(module="mesh_tensorflow.simd_mesh_impl")
@affects("report")
@takes(timeout_seconds=ABOVE_ZERO)
class SimdMeshImpl(PerDeviceMeshImpl):
  """A mesh of devices that run one program, traced once.

  Args:
    shape: mesh shape.
    layout: layout rules.
    devices: one device name per processor. By default the first logical GPUs of this
      process if there are enough, else its first logical CPUs; after `workers.join` those of
      all workers, the same number of each. A CPU may stand for several
      processors; then no messages between devices are needed, which makes it the fastest
      form of a mesh within one CPU.
    device_assignment: TPU device assignment; kept for programs that ask for it.
    logical_to_physical: a permutation: processor i, row-major in the mesh, runs on
      device `logical_to_physical[i]`. By default the identity.
    allreduce_in_bfloat16_max_group_size: bfloat16 sums over larger groups are computed
      in float32.
    variable_store: where variables live; a new one by default.
    collectives: "queues" (CPU devices of one process), "runtime" (TensorFlow's collective
      operations), or "auto": queues where all devices are CPUs; if they are of several workers,
      queues inside a worker and TensorFlow's collective operations between workers.
    timeout_seconds: how long a processor waits for another one before the run fails.

  Raises:
    MeshShapeError: there are fewer devices than processors, or another number was given.
    ConfigError: an argument has no meaning.
  """

  LaidOutVariable = LaidOutVariable

  @checked
  def __init__(
    self,
    shape: ShapeLike,
    layout: LayoutLike,
    devices: Sequence[str] | None = None,
    device_assignment: Any = None,
    logical_to_physical: Sequence[int] | None = None,
    allreduce_in_bfloat16_max_group_size: float = 8,
    *,
    variable_store: VariableStore | None = None,
    collectives: str = "auto",
    timeout_seconds: float = 600.0,
  ):
    super().__init__(shape, layout, variable_store=variable_store)
    self._device_assignment = device_assignment
    self._allreduce_in_bfloat16_max_group_size = allreduce_in_bfloat16_max_group_size
    self._timeout_seconds = timeout_seconds
    if logical_to_physical is None:
      self._logical_to_physical = list(range(self.size))
    else:
      self._logical_to_physical = [int(p) for p in logical_to_physical]
      if sorted(self._logical_to_physical) != list(range(self.size)):
        raise MeshShapeError(
          f"logical_to_physical must be a permutation of 0 to {self.size - 1} for mesh "
          f"{self.shape}, got {list(logical_to_physical)}"
        )
    self._physical_to_logical = [0] * self.size
    for logical, physical in enumerate(self._logical_to_physical):
      self._physical_to_logical[physical] = logical
    physical_devices = choose_devices(self.shape, devices)
    self._devices = [physical_devices[p] for p in self._logical_to_physical]
    worker_of = [worker_of_device(d) for d in self._devices]
    here = workers.current().index
    self._here = [p for p, w in enumerate(worker_of) if w == here]
    if not self._here:
      raise MeshShapeError(
        f"mesh {self.shape}: none of its devices is of this {workers.current().name(here)}: "
        f"{self._devices}; a mesh must have devices of every worker"
      )
    self._communication = Communication(
      self.shape, self._devices, worker_of, self._here, collectives, timeout_seconds
    )
    # The program that runs: in eager runs each processor has a thread, and one of its own.
    self._local = threading.local()

  # -------------------------------------------------------- processors and devices

  @property
  def devices(self) -> list[str]:
    """The device of every processor, in the order of processor numbers."""
    return list(self._devices)

  @property
  def device_assignment(self) -> Any:
    """The TPU device assignment that the constructor was given."""
    return self._device_assignment

  @property
  def allreduce_in_bfloat16_max_group_size(self) -> float:
    """The largest group of which sums are computed in bfloat16."""
    return self._allreduce_in_bfloat16_max_group_size

  @property
  def logical_to_physical(self) -> list[int]:
    """Device number of each processor, by the processor's number in the mesh."""
    return list(self._logical_to_physical)

  def l2p(self, logical_pnum: int) -> int:
    """Physical number of a processor."""
    return self._logical_to_physical[logical_pnum]

  def p2l(self, physical_pnum: int) -> int:
    """Logical number of a processor."""
    return self._physical_to_logical[physical_pnum]

  @property
  def local_processors(self) -> list[int]:
    """Numbers of the processors of this process."""
    return list(self._here)

  @property
  def lowerings_per_run(self) -> int:
    """Number of lowerings that a run makes in this process: one for each of its processors."""
    return len(self._here)

  @property
  def spans_workers(self) -> bool:
    """True if some processors belong to other processes."""
    return len(self._here) < self.size

  @property
  def _local_devices(self) -> list[str]:
    return [self._devices[p] for p in self._here]

  def processor_device(self, pnum: int) -> str | None:
    """The device of a processor, by its number."""
    return self._devices[pnum]

  # ------------------------------------------------------------- running a program

  @property
  def _program(self) -> Program:
    program: Program | None = getattr(self._local, "program", None)
    if program is None:
      if self.size == 1:
        return ConcreteProgram(0, [0] * self.ndims, 0)
      raise GraphError(
        f"SimdMeshImpl {self.shape}: this belongs into the per-device program: put the Lowering "
        "and what follows into a function f and call mesh_impl.run(f), or use mtf.function"
      )
    return program

  @contextlib.contextmanager
  def _running(self, program: Program) -> Iterator[Program]:
    self._local.program = program
    try:
      yield program
    finally:
      self._local.program = None

  @not_converted
  def run(
    self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
  ) -> Any:
    return self.run_per_device(fn, args, kwargs)[0]

  @not_converted
  def run_per_device(
    self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
  ) -> list[Any]:
    """Runs a per-device program on every processor.

    Inside a `tf.function`, the program is traced once. It sees the tensors around it, and every
    processor gets them whole; AutoGraph does not convert it. Eagerly, it is called once in each
    of as many threads as there are processors.

    Args:
      fn: the program.
      args: its positional arguments.
      kwargs: its keyword arguments, or None.

    Returns:
      What the program returned, on each processor.

    Raises:
      GraphError: called inside a program.
      CollectiveError: eagerly, if the programs take different paths. Inside a `tf.function`
        such errors are TensorFlow's: see `collectives.collective_errors`.
    """
    if getattr(self._local, "program", None) is not None:
      raise GraphError(f"SimdMeshImpl {self.shape}: run was called inside a per-device program")

    def call() -> Any:
      return fn(*args, **(kwargs or {}))

    if self.size == 1:
      with self._running(self._program), tf.device(self._devices[0]):
        return [call()]
    if tf.executing_eagerly():
      return self._run_eagerly(call)
    return run_traced(
      self._traced_program, call, self._local_devices, self._communication.guard().framed
    )

  @contextlib.contextmanager
  def errors_of_runs(self, what: str = "") -> Iterator[None]:
    # The innermost sees an error first: it resets the mesh, and passes on what it does not know.
    with memory.errors(what), workers.worker_errors(), collective_errors(self, what=what):
      yield

  def reset(self) -> None:
    """Makes the mesh usable after a run that failed midway (see `collectives`)."""
    self._communication.reset()

  def _coordinates(self, pnum: int) -> list[int]:
    return pnum_to_processor_coordinates(self.shape, pnum)

  def _traced_program(self) -> contextlib.AbstractContextManager[Program]:
    program = TracedProgram(self._communication.position_variables())
    program.collectives = self._communication.collectives_of(program)
    return self._running(program)

  def _run_eagerly(self, call: Callable[[], Any]) -> list[Any]:
    # Both kinds of scopes are of a thread: those of the caller go along.
    enter_scopes = scope.snapshot()
    gin_scope = gin.current_scope()
    if self.spans_workers:
      raise UnsupportedError(
        f"SimdMeshImpl {self.shape}: eager runs need every processor in this process, and this "
        "mesh spans several workers; call it in a tf.function, or debug with one worker"
      )

    def program(pnum: int, collectives: Collectives) -> Any:
      enter_scopes()
      current = ConcreteProgram(pnum, self._coordinates(pnum), pnum)
      current.collectives = collectives
      with self._running(current), tf.device(self._devices[pnum]), gin.config_scope(gin_scope):
        return call()

    return run_in_threads(program, list(self.local_processors), self._timeout_seconds)

  # --------------------------------------------------------------- several workers

  def local_part(self, shape: Shape) -> tuple[list[int], list[int]]:
    begins = [self.slice_begin(shape, p) for p in self._here]
    low = [min(b) for b in zip(*begins)]
    high = [max(b) for b in zip(*begins)]
    return low, [h - b + n for b, h, n in zip(low, high, self.slice_shape(shape))]

  def import_local_part(self, shape: Shape, tf_x: tf.Tensor) -> LaidOutTensor:
    """The slice of a tensor of which this process has its `local_part`."""
    low, sizes = self.local_part(shape)
    part = self.slice_shape(shape)
    if part == sizes:
      return LaidOutTensor([tf_x])
    begins = [
      # Within the part that this process has.
      b.one_slice - first if isinstance(b, LaidOutTensor) else b - first
      for b, first in zip(self.laid_out_slice_begin(shape), low)
    ]
    return LaidOutTensor([kernels.cut(tf_x, begins, part)])

  def result_slices(self, x: LaidOut, shape: Shape) -> list[tf.Tensor]:
    if not self.spans_workers or self.tensor_layout(shape).is_fully_replicated:
      return super().result_slices(x, shape)
    # The slices of other workers come by collectives, which only the program can run.
    return [self.export_to_tf_tensor(shape, x)]

  def combine_local_slices(self, slices: Sequence[tf.Tensor], tensor_shape: Shape) -> tf.Tensor:
    if self.spans_workers:
      return slices[0]  # Whole already.
    return super().combine_local_slices(slices, tensor_shape)
