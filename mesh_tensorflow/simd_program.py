"""Running one per-device program on every processor: traced once, or eagerly in threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.collectives import Collectives


class Program:
  """What the code of a per-device program sees of the processor that runs it.

  Args:
    pnum: its number: an int, or an int32 scalar that each processor's call fills in.
    coordinates: its coordinate along each mesh axis, likewise.
  """

  def __init__(self, pnum: Any, coordinates: Sequence[Any]):
    self.pnum = pnum
    self.coordinates = list(coordinates)
    self.collectives: Collectives | None = None

  def own(self, per_processor: Sequence[Any]) -> Any:
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

  def own(self, per_processor):
    return per_processor[self._index]


class TracedProgram(Program):
  """A program that is being traced once for all processors.

  The trace uses the resources (variables, queues) of the first processor. Each
  processor's call gets its own in their place.
  """

  def __init__(self, pnum: tf.Tensor, coordinates: Sequence[tf.Tensor]):
    super().__init__(pnum, coordinates)
    self.graph = pnum.graph
    self._per_processor: dict[int, list[tf.Tensor]] = {}
    self._graphs_with_progress = {self.graph}

  def own(self, per_processor):
    first = per_processor[0]
    handles = [x.handle if isinstance(x, tf.Variable) else x for x in per_processor]
    # The handles are kept here, so that an id means one tensor during the trace.
    self._per_processor[id(handles[0])] = handles
    return first

  def show_progress(self, counters: Callable[[], Sequence[tf.Variable]], x: tf.Tensor) -> None:
    """Advances this processor's counter in each iteration of the loop that computes x.

    A run as a whole is watched by the `RunGuard`; a loop in it may take long.
    """
    if x.graph not in self._graphs_with_progress:
      self._graphs_with_progress.add(x.graph)
      self.own(counters()).assign_add(1, read_value=False)

  def captured_by(self, captured: tf.Tensor, index: int) -> tf.Tensor | None:
    """What a processor's call gets for a tensor that the trace captured; None if not listed."""
    handles = self._per_processor.get(id(captured))
    return handles[index] if handles else None


def run_traced(
  make_program: Callable[[tf.Tensor, Sequence[tf.Tensor]], contextlib.AbstractContextManager],
  fn: Callable[[], Any],
  processors: Sequence[tuple[int, Sequence[int], str | None]],
  frame: Callable[[Callable[[], list[tf.Tensor]]], None],
  inline: bool,
) -> list[Any]:
  """Traces `fn` once and calls the trace once for each processor, all at the same time.

  Args:
    make_program: a context manager that makes a `TracedProgram` of number and coordinates
      current, and yields it.
    fn: the program; its arguments are bound.
    processors: (processor number, coordinates, device) of each processor.
    frame: called with a function that adds the calls to the graph and returns a tensor of
      each; it adds what has to come before and after.
    inline: whether TensorFlow may inline the calls. TensorFlow's collectives inside a loop
      find each other only if not: the name of the loop is part of what they go by.

  Returns:
    The structure that `fn` returned, for each processor. tf.Tensors in it are those of the
    processor; a tf.Operation becomes None; all else is as it was when traced.
  """
  traced: dict[str, Any] = {}

  def program(pnum, *coordinates):
    with make_program(pnum, coordinates) as current:
      traced["program"] = current
      traced["result"] = result = fn()
      leaves = tf.nest.flatten(result, expand_composites=True)
      traced["dynamic"] = [tf.is_tensor(x) or isinstance(x, tf.Variable) for x in leaves]
      return [tf.convert_to_tensor(x) for x, d in zip(leaves, traced["dynamic"]) if d] + [pnum]

  scalar = tf.TensorSpec([], tf.int32)
  with tf.device(None):
    function = tf.function(
      program, autograph=False, experimental_attributes=None if inline else {"_noinline": True}
    )
    concrete = function.get_concrete_function(scalar, *[scalar] * len(processors[0][1]))
  captures = concrete.captured_inputs
  shared = [
    c
    for c in captures
    if c.dtype == tf.resource and traced["program"].captured_by(c, 0) is None
  ]
  results: list[Any] = []

  def calls() -> list[tf.Tensor]:
    done = []
    for i, (pnum, coordinates, device) in enumerate(processors):
      with tf.device(device):
        arguments = [tf.constant(v, tf.int32) for v in (pnum, *coordinates)]
        for c in captures:
          mine = traced["program"].captured_by(c, i)
          if mine is None:
            # A resource that all processors use (a user's variable, say). As one tensor it
            # would make automatic control dependencies run them one after another.
            mine = tf.identity(c) if c.dtype == tf.resource else c
          arguments.append(mine)
        outputs = tf.raw_ops.StatefulPartitionedCall(
          args=arguments, Tout=[t.dtype for t in concrete.outputs], f=concrete
        )
      for out, t in zip(outputs, concrete.outputs):
        out.set_shape(t.shape)
      done.append(outputs[-1])
      results.append(_structure_of(traced, outputs))
    with tf.control_dependencies(done):
      for c in shared:
        tf.identity(c)  # Later uses of the resource come after the calls.
    return done

  frame(calls)
  return results


def _structure_of(traced: dict[str, Any], outputs: Sequence[tf.Tensor]) -> Any:
  outputs = iter(outputs)
  leaves = []
  for x, dynamic in zip(
    tf.nest.flatten(traced["result"], expand_composites=True), traced["dynamic"]
  ):
    leaves.append(next(outputs) if dynamic else None if isinstance(x, tf.Operation) else x)
  return tf.nest.pack_sequence_as(traced["result"], leaves, expand_composites=True)
