"""A mesh whose processors all run one per-device program (SPMD).

The program, the function given to `SimdMeshImpl.run`, is traced once, whatever
the number of processors, and sees the number of its processor as a tensor. Called
eagerly, `run` executes it in one Python thread per processor instead: slow, but
every lowered operation runs at once and can be looked at.

`PerDeviceMeshImpl` is the mesh inside the program: one slice of each tensor, and collectives.
`SimdMeshImpl` has the devices, and runs the program.
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
from mesh_tensorflow.meshes.collectives.base import REDUCTIONS, Collectives, Groups
from mesh_tensorflow.meshes.collectives.run_guard import collective_errors
from mesh_tensorflow.meshes.collectives.threads import run_in_threads
from mesh_tensorflow.meshes.contract import LaidOutVariable
from mesh_tensorflow.meshes.laid_out import LaidOut, LaidOutTensor, slicewise_of_one
from mesh_tensorflow.meshes.layout import LayoutLike, pnum_to_processor_coordinates
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.shares import SharesLike, assign_processors, device_grid
from mesh_tensorflow.meshes.simd.communication import Communication
from mesh_tensorflow.meshes.simd.devices import choose_devices, has_job, worker_of_device
from mesh_tensorflow.meshes.simd.program import ConcreteProgram, Program, TracedProgram, run_traced
from mesh_tensorflow.meshes.store import StoredVariable, VariableStore
from mesh_tensorflow.meshes.worker_transfers import TRANSFERS
from mesh_tensorflow.numerics import constants, kernels, padding
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.dimensions import Shape, ShapeLike
from mesh_tensorflow.program.graph import Tensor


class PerDeviceMeshImpl(MeshImpl):
  """Base class of `SimdMeshImpl`: the part of the contract that belongs into the program.

  Args:
    shape: mesh shape.
    layout: layout rules.
    variable_store: where variables live; a new one by default.
  """

  def __init__(
    self, shape: ShapeLike, layout: LayoutLike, *, variable_store: VariableStore | None = None
  ):
    super().__init__(shape, layout, variable_store=variable_store)
    self._groups: dict[tuple[int, ...], Groups] = {}

  @property
  def allreduce_in_bfloat16_max_group_size(self) -> float:
    """The largest group of which sums are computed in bfloat16."""
    raise NotImplementedError

  @property
  def _program(self) -> Program:
    """The program that is being run, or traced, by this thread."""
    raise NotImplementedError

  @property
  def _collectives(self) -> Collectives:
    collectives = self._program.collectives
    # A program of the only processor of a mesh has none: all groups are of one member.
    assert collectives is not None
    return collectives

  def program_slices(self, stored: StoredVariable) -> list[tf.Variable]:
    """The slices of a stored variable that the running program holds."""
    return [self._program.own(stored.slices)]

  def in_program(self, slices: Sequence[Any]) -> LaidOutTensor:
    return LaidOutTensor([self._program.own(slices)])

  def slicewise(self, fn: Callable[..., object], *inputs: Any) -> Any:
    with constants.on_device(""):
      return slicewise_of_one(fn, *inputs)

  def laid_out_pnum(self) -> LaidOutTensor:
    return LaidOutTensor([self._program.pnum])

  @property
  def pnum_tensor(self) -> Any:
    """The number of the processor that runs the program."""
    return self._program.pnum

  def laid_out_pcoord(self, mesh_axis: int) -> LaidOutTensor:
    return LaidOutTensor([self._program.coordinates[mesh_axis]])

  def _groups_of(self, axes: Sequence[int]) -> Groups:
    key = tuple(sorted(set(axes)))
    if key not in self._groups:
      self._groups[key] = Groups.of(self.shape, key)
    return self._groups[key]

  def allreduce(
    self, x: LaidOut, mesh_axes: Sequence[int], reduction_fn_string: str
  ) -> LaidOutTensor:
    x = x.to_laid_out_tensor()
    if reduction_fn_string not in REDUCTIONS:
      raise GraphError(f"allreduce: {reduction_fn_string!r} is not SUM, MAX or MIN")
    axes = [a for a in mesh_axes if self.shape[a].size > 1]
    if not axes:
      return x
    groups = self._groups_of(axes)
    t = tf.convert_to_tensor(x.one_slice)
    too_large = groups.size > self.allreduce_in_bfloat16_max_group_size
    if t.dtype == tf.bfloat16 and reduction_fn_string == "SUM" and too_large:
      total = self._collectives.all_reduce(tf.cast(t, tf.float32), groups, "SUM")
      return LaidOutTensor([tf.cast(total, tf.bfloat16)])
    return LaidOutTensor([self._collectives.all_reduce(t, groups, reduction_fn_string)])

  def joined_sum_bytes(self, mesh_axes: Sequence[int]) -> int:
    axes = [a for a in mesh_axes if self.shape[a].size > 1]
    return self._collectives.joined_bytes(self._groups_of(axes)) if axes else 0

  def allconcat(
    self, x: LaidOut, mesh_axis: int, concat_axis: int, stack: bool = False
  ) -> LaidOutTensor:
    x = x.to_laid_out_tensor()
    t = tf.convert_to_tensor(x.one_slice)
    if self.shape[mesh_axis].size == 1:
      return LaidOutTensor([tf.expand_dims(t, concat_axis)]) if stack else x
    parts = self._collectives.all_gather(t, self._groups_of([mesh_axis]))
    return LaidOutTensor([(kernels.stack if stack else tf.concat)(parts, concat_axis)])

  def alltoall(
    self, x: LaidOut, mesh_axis: int | Sequence[int], split_axis: int, concat_axis: int
  ) -> LaidOutTensor:
    x = x.to_laid_out_tensor()
    axes = self.group_axes(mesh_axis)
    if not axes:
      return x
    n = self._split_parts("alltoall", x.slice_shape, split_axis, axes)
    parts = tf.split(tf.convert_to_tensor(x.one_slice), n, split_axis)
    received = self._collectives.all_to_all(parts, self._groups_of(axes))
    return LaidOutTensor([tf.concat(received, concat_axis)])

  def reduce_scatter(self, x: LaidOut, mesh_axis: int, split_axis: int) -> LaidOutTensor:
    x = x.to_laid_out_tensor()
    axes = self.group_axes(mesh_axis)
    if not axes:
      return x
    n = self._split_parts("reduce_scatter", x.slice_shape, split_axis, axes)
    t = tf.convert_to_tensor(x.one_slice)
    collectives, groups = self._collectives, self._groups_of(axes)
    if t.dtype == tf.bfloat16 and n > self.allreduce_in_bfloat16_max_group_size:
      total = collectives.reduce_scatter(tf.cast(t, tf.float32), groups, split_axis)
      return LaidOutTensor([tf.cast(total, tf.bfloat16)])
    return LaidOutTensor([collectives.reduce_scatter(t, groups, split_axis)])

  def receive(
    self, x: LaidOut, mesh_axis: int | Sequence[int], source_pcoord: Sequence[int | None]
  ) -> LaidOutTensor:
    x = x.to_laid_out_tensor()
    t = tf.convert_to_tensor(x.one_slice)
    source = list(source_pcoord)
    axes = self.group_axes(mesh_axis)
    self._check_sources(source, axes)
    if all(s is None for s in source):
      return LaidOutTensor([tf.zeros_like(t)])
    if source == list(range(len(source))):
      return x
    groups = self._groups_of(axes)
    return LaidOutTensor([self._collectives.permute(t, groups, source)])

  def slice(self, tf_tensor: tf.Tensor, tensor_shape: Shape) -> tf.Tensor:
    """This processor's slice of a whole tensor."""
    part = self.slice_shape(tensor_shape)
    if part == tensor_shape.to_integer_list:
      return tf_tensor
    begin = [
      b.one_slice if isinstance(b, LaidOutTensor) else b
      for b in self.laid_out_slice_begin(tensor_shape)
    ]
    return kernels.cut(self.padded_whole(tf_tensor, tensor_shape), begin, part)

  def import_tf_tensor(self, x: Tensor | Shape, tf_x: tf.Tensor) -> LaidOutTensor:
    shape = x if isinstance(x, Shape) else x.shape
    return LaidOutTensor([self.slice(tf.convert_to_tensor(tf_x), shape)])

  def export_to_tf_tensor(self, x: Tensor | Shape, laid_out_x: LaidOut) -> tf.Tensor:
    shape = x if isinstance(x, Shape) else x.shape
    result = laid_out_x.to_laid_out_tensor()
    for tensor_axis, mesh_axis in enumerate(self.tensor_layout(shape)):
      if mesh_axis is not None:
        result = self.allconcat(result, mesh_axis, tensor_axis)
    whole = tf.convert_to_tensor(result.one_slice)
    for axis in self.uneven_axes(shape):
      whole = kernels.cut_axis(whole, axis, 0, shape[axis].size)
    return whole

  def Print(self, x: LaidOut, data: Sequence[LaidOut], message: str, **kwargs: Any) -> Any:  # noqa: N802
    """Prints the slices of `data`, and the number of the processor that has them."""
    parts = [d.to_laid_out_tensor().one_slice for d in data]
    tf.print(message, "processor", self._program.pnum, *parts, summarize=kwargs.get("summarize", 3))
    return x


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
      form of a mesh within one CPU. Names with job and task ("/job:worker/task:1/device:CPU:0")
      may be of some of the workers only, for a program of several meshes: each worker makes all
      meshes, and runs what is on its devices.
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
    shares: for devices of unequal speed, how many processors each one gets; see
      `PlacementMeshImpl`. CPU devices only; each processor has variables of its own.

  Raises:
    MeshShapeError: there are fewer devices than processors, or another number was given; or
      `shares` do not suit the mesh or its devices.
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
    shares: SharesLike | None = None,
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
    if shares is None:
      physical_devices = choose_devices(self.shape, devices)
    else:
      groups = device_grid(self.shape, shares)
      physical_devices = assign_processors(
        self.shape, choose_devices(groups, devices) if devices is None else devices, shares
      )
      physical_devices = choose_devices(self.shape, physical_devices)
    self._devices = [physical_devices[p] for p in self._logical_to_physical]
    worker_of = [worker_of_device(d) for d in self._devices]
    self._of_workers = [
      [p for p, w in enumerate(worker_of) if w == worker]
      for worker in range(workers.current().size)
    ]
    self._here = self._of_workers[workers.current().index]
    if devices is not None and not all(has_job(d) for d in devices):
      self._of_workers = [self._here]  # A mesh of this process alone; others may have their own.
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
  def processors_of_workers(self) -> list[list[int]]:
    """For each worker process the numbers of its processors; of a process's own mesh one list."""
    return [list(processors) for processors in self._of_workers]

  @property
  def is_of_cluster(self) -> bool:
    return len(self._of_workers) > 1

  @property
  def is_elsewhere(self) -> bool:
    return not self._here

  @property
  def timeout_seconds(self) -> float:
    """Seconds that a processor waits for another one before the run fails."""
    return self._timeout_seconds

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
    self,
    fn: Callable[..., object],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
  ) -> Any:
    return self.run_per_device(fn, args, kwargs)[0]

  @not_converted
  def run_per_device(
    self,
    fn: Callable[..., object],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
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
    if not self._here:
      cluster = workers.current()
      raise UnsupportedError(
        f"SimdMeshImpl {self.shape}: {cluster.name(cluster.index)} has none of its devices "
        f"{self._devices}, and cannot run a program on it; give mtf.function a dict of all meshes "
        "of the program, and call it in all workers"
      )

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
    if self.is_of_cluster:
      TRANSFERS.reset()

  def _coordinates(self, pnum: int) -> list[int]:
    return pnum_to_processor_coordinates(self.shape, pnum)

  def _traced_program(self) -> contextlib.AbstractContextManager[Program]:
    program = TracedProgram(self._communication.position_variables())
    program.collectives = self._communication.collectives_of(program)
    return self._running(program)

  def _run_eagerly(self, call: Callable[[], object]) -> list[Any]:
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
    if not self._here:  # It is not asked for values; any will do, and those of others fit.
      return super().local_part(shape)
    begins = [self.slice_begin(shape, p) for p in self._here]
    # What lies behind the end is padding, which nobody has to read.
    low = [min(*b, d.size) for b, d in zip(zip(*begins), shape)]
    high = [max(b) + n for b, n in zip(zip(*begins), self.slice_shape(shape))]
    return low, [min(h, d.size) - b for b, h, d in zip(low, high, shape)]

  def import_local_part(self, shape: Shape, tf_x: tf.Tensor) -> LaidOutTensor:
    """The slice of a tensor of which this process has its `local_part`."""
    low, sizes = self.local_part(shape)
    part = self.slice_shape(shape)
    for axis in self.uneven_axes(shape):
      last = max(self.slice_begin(shape, p)[axis] for p in self._here)
      tf_x = padding.padded(tf_x, axis, last + part[axis] - low[axis])
    if part == tf_x.shape.as_list():
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
