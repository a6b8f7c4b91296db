"""A per-device program traced once, to be called by each replica of a distribution strategy."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from mesh_tensorflow.meshes.simd.program import TracedProgram
from mesh_tensorflow.numerics import constants

_T = TypeVar("_T")


class ReplicatedSlices(tuple[tf.Variable, ...]):
  """The slices of a variable, one for each processor, that are one variable of a strategy.

  Args:
    slices: the tf.Variable of each processor.
    variable: the strategy's variable; its `handle`, asked for in a replica, is that of the slice.
  """

  variable: tf.Variable

  def __new__(cls, slices: Sequence[tf.Variable], variable: tf.Variable) -> ReplicatedSlices:
    result = super().__new__(cls, slices)
    result.variable = variable
    return result


class ReplicaProgram(TracedProgram):
  """A program whose processor number is an argument.

  Args:
    pnum: the number, an int32 scalar.
    coordinates: the processor's coordinate along each mesh axis.
  """

  def __init__(self, pnum: tf.Tensor, coordinates: Sequence[int | tf.Tensor]):
    # Not that of TracedProgram, which reads the number from a variable of the processor.
    super(TracedProgram, self).__init__(pnum, coordinates)
    self._per_processor: dict[int, list[tf.Tensor]] = {}
    self._graphs_with_progress = {pnum.graph}
    self._variables: dict[int, tf.Variable] = {}

  def own(self, per_processor: Sequence[_T]) -> _T:
    first = super().own(per_processor)
    if isinstance(per_processor, ReplicatedSlices):
      self._variables[id(per_processor[0].handle)] = per_processor.variable
    return first

  def run_once(self, graph: tf.Graph, make: Callable[[], list[tf.Tensor]]) -> bool:
    del graph, make
    return False  # The strategy calls the program, and nothing beside it.

  def variable(self, captured: tf.Tensor) -> tf.Variable | None:
    """The strategy's variable of which the trace captured a handle; None if it is of none."""
    return self._variables.get(id(captured))


@dataclasses.dataclass(frozen=True)
class ReplicaTrace:
  """Result of tracing a program.

  Attributes:
    function: the traced tf.function: of the processor number (int32 scalar) and of what the trace
      captured. Its outputs are those of the program, flat, then the processor number.
    program: the `ReplicaProgram` that was traced.
    result: what the program returned.
    dynamic: which leaves of `result` are tensors.
  """

  function: Any
  program: ReplicaProgram
  result: Any
  dynamic: Sequence[bool]

  @classmethod
  def of(
    cls,
    make_program: Callable[[tf.Tensor], contextlib.AbstractContextManager[ReplicaProgram]],
    fn: Callable[[], object],
    inline: bool,
  ) -> ReplicaTrace:
    """Traces `fn`.

    Args:
      make_program: called with the processor number; makes a context manager that makes a
        `ReplicaProgram` current, and yields it.
      fn: the program; its arguments are bound.
      inline: whether TensorFlow may make the function part of the one that calls it.
    """
    traced: dict[str, Any] = {}

    @constants.of_one_graph()
    def program(pnum: tf.Tensor) -> list[tf.Tensor]:
      with make_program(pnum) as current:
        traced["program"] = current
        traced["result"] = result = fn()
        leaves = tf.nest.flatten(result, expand_composites=True)
        traced["dynamic"] = [tf.is_tensor(x) or isinstance(x, tf.Variable) for x in leaves]
        tensors = [tf.convert_to_tensor(x) for x, d in zip(leaves, traced["dynamic"]) if d]
        # One output more: what the run waits for, of a program that returns no tensor.
        return [*tensors, tf.identity(pnum)]

    function = tf.function(
      program,
      input_signature=[tf.TensorSpec([], tf.int32, "processor")],
      autograph=False,
      experimental_attributes=None if inline else {"_noinline": True},
    )
    with tf.device(None):
      concrete = function.get_concrete_function()
    return cls(concrete, traced["program"], traced["result"], traced["dynamic"])

  @property
  def captures(self) -> list[tf.Tensor]:
    """Captured tensors, in the order of the function's inputs after the first."""
    return list(self.function.captured_inputs)

  @property
  def data(self) -> list[tf.Tensor]:
    """The captured tensors that are no resources."""
    return [c for c in self.captures if c.dtype != tf.resource]

  @property
  def shared(self) -> list[tf.Tensor]:
    """The captured resources of which there is one for all processors."""
    return [
      c for c in self.captures if c.dtype == tf.resource and self.program.captured_by(c, 0) is None
    ]

  def call(
    self, pnum: tf.Tensor, data: Sequence[tf.Tensor], resource: Callable[[tf.Tensor], tf.Tensor]
  ) -> list[tf.Tensor]:
    """Calls the function for one processor.

    Args:
      pnum: number of the processor.
      data: values to pass for `self.data`.
      resource: function from a captured resource to the one to pass for it.
    """
    values = iter(data)
    arguments = [resource(c) if c.dtype == tf.resource else next(values) for c in self.captures]
    outputs: list[tf.Tensor] = tf.raw_ops.StatefulPartitionedCall(
      args=[pnum, *arguments],
      Tout=[t.dtype for t in self.function.outputs],
      f=self.function,
    )
    for out, t in zip(outputs, self.function.outputs):
      out.set_shape(t.shape)
    return outputs

  def structure(self, outputs: Sequence[tf.Tensor]) -> Any:
    """Packs the tensors of one call as the program's result; a tf.Operation becomes None."""
    tensors = iter(outputs)
    leaves = [
      next(tensors) if dynamic else None if isinstance(x, tf.Operation) else x
      for x, dynamic in zip(tf.nest.flatten(self.result, expand_composites=True), self.dynamic)
    ]
    return tf.nest.pack_sequence_as(self.result, leaves, expand_composites=True)
