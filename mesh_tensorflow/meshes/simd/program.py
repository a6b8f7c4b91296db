"""Running one per-device program on every processor: traced once, or eagerly in threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from mesh_tensorflow.errors import GraphError
from mesh_tensorflow.meshes.collectives.base import Collectives
from mesh_tensorflow.numerics import constants

# A serialized ConfigProto that turns off the graph optimizer (graph_options.rewrite_options.
# disable_meta_optimizer) for the instance of the program on each device: the program has been
# optimized before, as part of the function around it, once for all.
_NO_OPTIMIZER = b"\x52\x05\x52\x03\x98\x01\x01"

_T = TypeVar("_T")


class Program:
  """Context of a per-device program: the number, coordinates and collectives of its processor.

  Args:
    pnum: its number: an int, or an int32 scalar that each processor's call fills in.
    coordinates: its coordinate along each mesh axis, likewise.
  """

  def __init__(self, pnum: int | tf.Tensor, coordinates: Sequence[int | tf.Tensor]):
    self.pnum = pnum
    self.coordinates = list(coordinates)
    self.collectives: Collectives | None = None

  def own(self, per_processor: Sequence[_T]) -> _T:
    """This processor's element of a list with one for each processor of this process."""
    raise NotImplementedError


class ConcreteProgram(Program):
  """A program of one known processor.

  Args:
    index: its place among the processors of this process.
  """

  def __init__(self, pnum: int, coordinates: Sequence[int], index: int):
    super().__init__(pnum, coordinates)
    self._index = index

  def own(self, per_processor: Sequence[_T]) -> _T:
    return per_processor[self._index]


class TracedProgram(Program):
  """A program that is being traced once for all processors.

  The trace uses the resources (variables, queues) of the first processor. Each
  processor's call gets its own in their place.

  Args:
    positions: a variable on each processor, with its number and coordinates. (As
      constants they would make TensorFlow optimize each processor's call by itself.)
  """

  def __init__(self, positions: Sequence[tf.Variable]):
    self._per_processor: dict[int, list[tf.Tensor]] = {}
    pnum, *coordinates = tf.unstack(self.own(positions).read_value())
    super().__init__(pnum, coordinates)
    self._graph = pnum.graph
    self._graphs_with_progress = {pnum.graph}
    self._once: list[Callable[[], list[tf.Tensor]]] = []

  def own(self, per_processor: Sequence[_T]) -> _T:
    first = per_processor[0]
    handles: list[tf.Tensor] = [
      x.handle if isinstance(x, tf.Variable) else x for x in per_processor
    ]
    # The handles are kept here, so that an id means one tensor during the trace.
    known = self._per_processor.setdefault(id(handles[0]), handles)
    if len(known) != len(handles) or any(a is not b for a, b in zip(known, handles)):
      raise GraphError(f"{handles[0]} is the first of two lists of slices, which are not the same")
    return first

  def show_progress(self, counters: Callable[[], Sequence[tf.Variable]], x: tf.Tensor) -> None:
    """Advances this processor's counter in each iteration of the loop that computes x.

    A run as a whole is watched by the `RunGuard`; a loop in it may take long.
    """
    if x.graph not in self._graphs_with_progress:
      self._graphs_with_progress.add(x.graph)
      self.own(counters()).assign_add(1, read_value=False)

  def run_once(self, graph: tf.Graph, make: Callable[[], list[tf.Tensor]]) -> bool:
    """Adds operations that run once in each run, beside the calls of the program.

    Args:
      graph: the graph that is being built where the program meets with them.
      make: makes them; returns tensors that they compute.

    Returns:
      False, without effect, if that is the graph of a loop, a branch or a function in the
      program, which may run any number of times.
    """
    if graph is not self._graph:
      return False
    self._once.append(make)
    return True

  def call_once(self) -> list[tf.Tensor]:
    """Calls what runs once; returns what it computes."""
    if not self._once:
      return []
    # A function, as the program is: the error of a program that fails comes to light before those
    # of what is cancelled then.
    return _call(_traced(lambda: [t for make in self._once for t in make()]))

  def captured_by(self, captured: tf.Tensor, index: int) -> tf.Tensor | None:
    """The handle to pass in a processor's call for a captured tensor; None if not listed."""
    handles = self._per_processor.get(id(captured))
    return handles[index] if handles else None


def run_traced(
  make_program: Callable[[], contextlib.AbstractContextManager[Program]],
  fn: Callable[[], object],
  devices: Sequence[str | None],
  frame: Callable[[Callable[[], list[tf.Tensor]]], None],
) -> list[Any]:
  """Traces `fn` once and calls the trace once for each processor, all at the same time.

  Args:
    make_program: makes a context manager that makes a `TracedProgram` current, and yields it.
    fn: the program; its arguments are bound.
    devices: the device of each processor of this process.
    frame: called with a function that adds the calls to the graph and returns a tensor of
      each; it adds what has to come before and after.

  Returns:
    The structure that `fn` returned, for each processor. tf.Tensors in it are those of the
    processor; a tf.Operation becomes None; all else is as it was when traced.
  """
  traced: dict[str, Any] = {}

  @constants.of_one_graph()
  def program() -> list[tf.Tensor]:
    with make_program() as current:
      traced["program"] = current
      traced["result"] = result = fn()
      leaves = tf.nest.flatten(result, expand_composites=True)
      traced["dynamic"] = [tf.is_tensor(x) or isinstance(x, tf.Variable) for x in leaves]
      tensors = [tf.convert_to_tensor(x) for x, d in zip(leaves, traced["dynamic"]) if d]
      # One output more: what the run waits for, of a program that returns no tensor.
      return tensors + [current.pnum]

  concrete = _traced(program)
  captures = concrete.captured_inputs
  shared = [
    c for c in captures if c.dtype == tf.resource and traced["program"].captured_by(c, 0) is None
  ]
  results: list[Any] = []

  def calls() -> list[tf.Tensor]:
    done = []
    for i, device in enumerate(devices):
      with tf.device(device):
        arguments = []
        for c in captures:
          mine = traced["program"].captured_by(c, i)
          if mine is None:
            # A resource that all processors use (a user's variable, say). As one tensor it
            # would make automatic control dependencies run them one after another.
            mine = tf.identity_n([c])[0] if c.dtype == tf.resource else c
          arguments.append(mine)
        outputs = _call(concrete, arguments)
      done.append(outputs[-1])
      results.append(_structure_of(traced, outputs))
    done += traced["program"].call_once()
    with tf.control_dependencies(done):
      for c in shared:
        tf.identity(c)  # Later uses of the resource come after the calls.
    return done

  frame(calls)
  return results


def _traced(fn: Callable[[], list[tf.Tensor]]) -> Any:
  # Inlined, the calls would be compiled as one large graph. And TensorFlow's collectives inside
  # a loop would not find each other: they go by the name of the loop, which inlining changes.
  function = tf.function(fn, autograph=False, experimental_attributes={"_noinline": True})
  with tf.device(None):
    return function.get_concrete_function()


def _call(concrete: Any, arguments: Sequence[tf.Tensor] | None = None) -> list[tf.Tensor]:
  """Calls a traced function, by default with what it captured."""
  outputs: list[tf.Tensor] = tf.raw_ops.StatefulPartitionedCall(
    args=concrete.captured_inputs if arguments is None else arguments,
    Tout=[t.dtype for t in concrete.outputs],
    f=concrete,
    config_proto=_NO_OPTIMIZER,
  )
  for out, t in zip(outputs, concrete.outputs):
    out.set_shape(t.shape)
  return outputs


def _structure_of(traced: dict[str, Any], outputs: Sequence[tf.Tensor]) -> Any:
  tensors = iter(outputs)
  leaves = []
  for x, dynamic in zip(
    tf.nest.flatten(traced["result"], expand_composites=True), traced["dynamic"]
  ):
    leaves.append(next(tensors) if dynamic else None if isinstance(x, tf.Operation) else x)
  return tf.nest.pack_sequence_as(traced["result"], leaves, expand_composites=True)
