"""A mesh whose processors are the replicas of a distribution strategy: TPU cores above all."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.declared import ABOVE_ZERO, affects, takes
from mesh_tensorflow.environment.tensorflow_mode import not_converted
from mesh_tensorflow.errors import (
  ConfigError,
  GraphError,
  MeshShapeError,
  UnsupportedError,
  VariableError,
)
from mesh_tensorflow.meshes.laid_out import LaidOut
from mesh_tensorflow.meshes.layout import LayoutLike
from mesh_tensorflow.meshes.placement.mesh_impl import suggest_mesh_shape
from mesh_tensorflow.meshes.simd.mesh_impl import SimdMeshImpl
from mesh_tensorflow.meshes.store import StoredVariable, VariableStore
from mesh_tensorflow.meshes.tpu.collectives import TpuCollectives
from mesh_tensorflow.meshes.tpu.program import ReplicaProgram, ReplicatedSlices, ReplicaTrace
from mesh_tensorflow.program.dimensions import ShapeLike, convert_to_shape, list_product

_LOG = logging.getLogger("mesh_tensorflow")


@gin.configurable(module="mesh_tensorflow.tpu_mesh_impl")
@affects("report")
@takes(timeout_seconds=ABOVE_ZERO)
class StrategyMeshImpl(SimdMeshImpl):
  """A SIMD mesh that runs its program by `strategy.run`: one processor for each replica.

  The program is traced once. A variable is one variable of the strategy, which holds another
  slice on each replica.

  Args:
    shape: mesh shape.
    layout: layout rules.
    strategy: a `tf.distribute.TPUStrategy`, or any other one of a single process: on a
      `tf.distribute.MirroredStrategy` the programs exchange data as on a `SimdMeshImpl`.
    device_assignment: the TPU device assignment that the strategy was made with.
    logical_to_physical: a permutation: processor i, row-major in the mesh, is replica
      `logical_to_physical[i]`. By default the identity.
    allreduce_in_bfloat16_max_group_size: the largest group whose sums are computed in bfloat16.
    variable_store: where variables live; a new one by default.
    collectives: "tpu", or as for `SimdMeshImpl`; "auto" is "tpu" if the replicas are TPU cores.
      A program with "tpu" collectives can be traced, but not run, where there is no TPU.
    timeout_seconds: as for `SimdMeshImpl`. Not for TPUs, which have a limit of their own.

  Raises:
    MeshShapeError: the strategy has not as many replicas as the mesh has processors.
    ConfigError: an argument has no meaning.
  """

  def __init__(
    self,
    shape: ShapeLike,
    layout: LayoutLike,
    strategy: tf.distribute.Strategy,
    device_assignment: Any = None,
    logical_to_physical: Sequence[int] | None = None,
    allreduce_in_bfloat16_max_group_size: int = 8,
    *,
    variable_store: VariableStore | None = None,
    collectives: str = "auto",
    timeout_seconds: float = 600.0,
  ):
    shape = convert_to_shape(shape)
    if not isinstance(strategy, tf.distribute.Strategy):
      raise ConfigError(f"StrategyMeshImpl needs a tf.distribute.Strategy, got {strategy!r}")
    replicas = strategy.num_replicas_in_sync
    if replicas != shape.size:
      raise MeshShapeError(
        f"mesh shape {shape} has {shape.size} processors, but the {type(strategy).__name__} has "
        f"{replicas} replica(s); a mesh that fits: {suggest_mesh_shape(shape, replicas)}"
      )
    devices = list(strategy.extended.worker_devices)
    self._on_tpu = any(":TPU:" in d.upper() for d in devices)
    self._strategy = strategy
    self._tpu_collectives = collectives == "tpu" or (collectives == "auto" and self._on_tpu)
    super().__init__(
      shape,
      layout,
      devices,
      device_assignment,
      logical_to_physical,
      allreduce_in_bfloat16_max_group_size,
      variable_store=variable_store,
      collectives="auto" if self._tpu_collectives else collectives,
      timeout_seconds=timeout_seconds,
    )

  @property
  def strategy(self) -> tf.distribute.Strategy:
    """The strategy of the constructor."""
    return self._strategy

  @property
  def is_compiled_by_xla(self) -> bool:
    return self._tpu_collectives

  # --------------------------------------------------------------------- variables

  def create_slices(
    self,
    name: str,
    begins: Sequence[tuple[int, ...]],
    value: Callable[[tuple[int, ...]], tf.Tensor],
    trainable: bool,
  ) -> tuple[tf.Variable, ...]:
    # The values are computed by the host: those of a device might differ in the last bit.
    with tf.device("CPU:0"):
      like = value(begins[0])
    with self._strategy.scope():
      variable = tf.Variable(
        lambda: tf.zeros(like.shape, like.dtype),
        # The store knows which variables are trained; TensorFlow allows no other value here.
        trainable=False,
        name=name,
        dtype=like.dtype,
        # Each replica has, and assigns to, a value of its own.
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.NONE,
        # tf.function would trace its function again for a variable that it lifted.
        experimental_enable_variable_lifting=False,
      )
    replicas = self._strategy.experimental_local_results(variable)
    slices = [replicas[self.l2p(p)] for p in range(self.size)]
    equal: dict[tuple[int, ...], list[tf.Variable]] = {}
    for begin, v in zip(begins, slices):
      equal.setdefault(begin, []).append(v)
    for begin, variables in equal.items():
      with tf.device("CPU:0"):
        initial = like if begin == begins[0] else value(begin)
      for v in variables:
        with tf.device(v.device):
          v.assign(initial)
    return ReplicatedSlices(slices, variable)

  def program_slices(self, stored: StoredVariable) -> list[tf.Variable]:
    if not isinstance(stored.slices, ReplicatedSlices):
      raise VariableError(
        f"variable {stored.name} {stored.shape} was made by a mesh without the strategy of mesh "
        f"{self.shape}; give each mesh implementation a variable store of its own, and move values "
        "with a checkpoint"
      )
    return super().program_slices(stored)

  # ------------------------------------------------------------- running a program

  @not_converted
  def trace(
    self,
    fn: Callable[..., object],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
  ) -> ReplicaTrace:
    """Traces a per-device program, without running it.

    Args:
      fn: the program.
      args: its positional arguments.
      kwargs: its keyword arguments, or None.

    Raises:
      GraphError: called inside a program.
    """
    in_replica = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    if in_replica or getattr(self._local, "program", None) is not None:
      raise GraphError(
        f"StrategyMeshImpl {self.shape}: run was called inside a per-device program; it calls "
        "strategy.run by itself"
      )
    return ReplicaTrace.of(
      self._replica_program, lambda: fn(*args, **(kwargs or {})), inline=self._tpu_collectives
    )

  @contextlib.contextmanager
  def _replica_program(self, pnum: tf.Tensor) -> Iterator[ReplicaProgram]:
    sizes = self.shape.to_integer_list
    coordinates: list[Any] = []
    for axis, n in enumerate(sizes):
      stride = list_product(sizes[axis + 1 :])
      c = pnum // stride if stride > 1 else pnum
      # For the first axis the quotient is the coordinate, without taking a remainder.
      coordinates.append(0 if n == 1 else c % n if stride * n < self.size else c)
    program = ReplicaProgram(pnum, coordinates)
    if self._tpu_collectives:
      program.collectives = TpuCollectives(pnum, self.logical_to_physical)
    else:
      program.collectives = self._communication.collectives_of(program)
    with self._running(program):
      yield program

  @not_converted
  def run_per_device(
    self,
    fn: Callable[..., object],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
  ) -> list[Any]:
    """Runs a per-device program on every replica, by `strategy.run`.

    The program is traced once, inside the tf.function that is being traced; eagerly, a
    tf.function is made for this one call. Tensors around the program reach every replica whole.

    Args:
      fn: the program.
      args: its positional arguments.
      kwargs: its keyword arguments, or None.

    Returns:
      What the program returned, on each processor.

    Raises:
      GraphError: called inside a program.
      UnsupportedError: the program would run on TPU cores, and uses strings, or a variable,
        table or other resource of which there is not one for each of them.
    """
    if not tf.executing_eagerly():
      return self._run_traced(self.trace(fn, args, kwargs))
    made: dict[str, Any] = {}

    def call() -> list[tf.Tensor]:
      made["results"] = results = self._run_traced(self.trace(fn, args, kwargs))
      return [x for x in tf.nest.flatten(results, expand_composites=True) if tf.is_tensor(x)]

    with self.errors_of_runs():
      tensors = iter(tf.function(call, autograph=False)())
    leaves = [
      next(tensors) if tf.is_tensor(x) else x
      for x in tf.nest.flatten(made["results"], expand_composites=True)
    ]
    results: list[Any] = tf.nest.pack_sequence_as(made["results"], leaves, expand_composites=True)
    return results

  def _run_traced(self, trace: ReplicaTrace) -> list[Any]:
    shared = trace.shared
    if self._on_tpu:
      _check_for_tpu(trace, f"StrategyMeshImpl {self.shape}")
    results: list[Any] = []

    def calls() -> list[tf.Tensor]:
      run = functools.partial(self._replica_call, trace)
      outputs = self._strategy.run(run, args=tuple(trace.data))
      # For each output the tensors of all replicas; then for each processor its outputs.
      replicas = list(zip(*(self._strategy.experimental_local_results(o) for o in outputs)))
      processors = [replicas[self.l2p(p)] for p in range(self.size)]
      results.extend(trace.structure(o) for o in processors)
      done = [o[-1] for o in processors]
      with tf.control_dependencies(done):
        for c in shared:
          tf.identity(c)  # Later uses of the resource come after the calls.
      return done

    if self._tpu_collectives:
      calls()
    else:
      self._communication.guard().framed(calls)
    return results

  @not_converted
  def _replica_call(self, trace: ReplicaTrace, *data: tf.Tensor) -> list[tf.Tensor]:
    """Runs the traced program in a replica, with its processor number and its resources."""
    context = tf.distribute.get_replica_context()
    replica = tf.cast(context.replica_id_in_sync_group, tf.int32)
    known = tf.get_static_value(context.replica_id_in_sync_group)
    pnum = replica
    if self.logical_to_physical != list(range(self.size)):
      pnum = tf.gather(tf.constant([self.p2l(r) for r in range(self.size)]), replica)

    def resource(captured: tf.Tensor) -> tf.Tensor:
      variable = trace.program.variable(captured)
      if variable is not None:
        return variable.handle
      # Queues and tokens, which no TPU has; elsewhere the number of the replica is known.
      mine = None if known is None else trace.program.captured_by(captured, self.p2l(int(known)))
      # As one tensor, a resource that all use would make automatic control dependencies run the
      # replicas one after another.
      return tf.identity_n([captured])[0] if mine is None else mine

    return trace.call(pnum, data, resource)

  def Print(self, x: LaidOut, data: Sequence[LaidOut], message: str, **kwargs: Any) -> Any:  # noqa: N802
    """As that of `SimdMeshImpl`; TPU cores do not print."""
    if not self._tpu_collectives:
      return super().Print(x, data, message, **kwargs)
    _LOG.warning("%s: nothing is printed by a TPU core", message)
    return x


def _check_for_tpu(trace: ReplicaTrace, what: str) -> None:
  captured = trace.function.inputs[1:]
  shared = {id(c) for c in trace.shared}
  wrong = [
    f"{placeholder.name} ({c.dtype.name})"
    for placeholder, c in zip(captured, trace.captures)
    if id(c) in shared or c.dtype in (tf.string, tf.variant)
  ]
  if wrong:
    raise UnsupportedError(
      f"{what}: the program uses what TPU cores do not have: {', '.join(wrong)}; on a TPU use mtf "
      "variables, and numbers as arguments"
    )
