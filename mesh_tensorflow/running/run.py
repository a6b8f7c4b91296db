"""One run of a function of named tensors on a mesh: graph, lowering, results put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.meshes.laid_out import LaidOutTensor, LazyLaidOutTensor
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.store import StoredVariable
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.program.graph import Graph, Mesh, Operation, Tensor
from mesh_tensorflow.running.lowering import Lowering

# Builds a function's graph of its arguments; returns (mesh, inputs, what the function returned).
Build = Callable[[Sequence[tf.Tensor]], tuple[Mesh, list[Tensor], Any]]


@dataclasses.dataclass(frozen=True)
class Values:
  """The values of a variable in one run.

  Attributes:
    stored: the variable.
    slices: a tensor of each slice.
  """

  stored: StoredVariable
  slices: Sequence[tf.Tensor]

  def laid_out(self, impl: Any) -> LaidOutTensor:
    """The slices that the running program holds."""
    own = dataclasses.replace(self.stored, slices=tuple(self.slices))
    return LaidOutTensor(impl.program_slices(own))


@dataclasses.dataclass
class Run:
  """Result of a run.

  Attributes:
    graph: the function's graph.
    structure: what the function returned.
    flat: the same, flat.
    results: tf.Tensors in the place of the mtf.Tensors of `flat`.
    trains: whether it changes trainable variables.
    stored: its variables, by their full names.
    counter: the counter that it drew random numbers from, or None.
    values: the values that its variables had, unless it trains.
    seed: the number it drew random numbers from, if no seed was given.
  """

  graph: Graph
  structure: Any
  flat: list[Any]
  results: list[Any]
  trains: bool
  stored: dict[str, StoredVariable]
  counter: StoredVariable | None
  values: dict[str, Values]
  seed: Any

  def packed(self) -> Any:
    """The results in the structure that the function returned."""
    return tf.nest.pack_sequence_as(self.structure, self.results)


def assigned_variables(operations: Iterable[Operation]) -> Iterator[Variable]:
  """The variables that operations change, those in loops too."""
  for op in operations:
    yield from getattr(op, "variables", ())
    yield from assigned_variables(getattr(op, "inner_operations", ()))


def run_on(
  impl: MeshImpl, build: Build, values: Sequence[tf.Tensor], seed: Any, log_file: str | None
) -> Run:
  """Builds the graph of a function, and lowers it on a mesh implementation.

  Args:
    impl: the mesh implementation.
    build: see `Build`.
    values: the arguments.
    seed: see `Lowering`.
    log_file: see `Lowering`.
  """
  made: dict[str, Any] = {}

  def program(values: Sequence[tf.Tensor], seed: Any) -> Any:
    mesh, _, result = build(values)
    graph, flat = mesh.graph, tf.nest.flatten(result)
    lowering = Lowering(graph, {mesh: impl}, log_file=log_file, seed=seed)
    trains = any(v.trainable for v in assigned_variables(graph.operations))
    made.update(graph=graph, structure=result, flat=flat, trains=trains)
    made["stored"] = {v.full_name: lowering.variables[v].stored for v in graph.all_variables}
    made["counter"] = lowering.run_counters.get(impl)
    # Values that this run may change, as they are before; not of tables, which nobody reads whole.
    at_start = {v.full_name: (v, lowering.tensors[v.value]) for v in graph.all_variables}
    kept = {
      name: value.tensor_list
      for name, (v, value) in at_start.items()
      if not (v.trainable or trains or isinstance(value, LazyLaidOutTensor))
    }
    # Slices, not whole tensors: they are put together outside, where it costs least.
    results = [
      impl.result_slices(lowering.tensors[t], t.shape) for t in flat if isinstance(t, Tensor)
    ]
    return results, kept, [n.tensor_list for n in lowering.run_numbers.values()]

  per_processor = impl.run_per_device(program, (values, seed))
  per_tensor = zip(*[r[0] for r in per_processor])
  results = [
    impl.combine_local_slices([s for r in next(per_tensor) for s in r], t.shape)
    if isinstance(t, Tensor)
    else t
    for t in made["flat"]
  ]
  read = {}
  for name, stored in made["stored"].items() if not made["trains"] else ():
    if not (stored.trainable or name in per_processor[0][1]):
      continue
    # Trainable variables do not change in this run; reading one makes a tape watch it.
    slices = (
      [s.read_value() for s in stored.slices]
      if stored.trainable
      # A tape that looks for second derivatives would find its way from here into the run.
      else [tf.stop_gradient(s) for r in per_processor for s in r[1][name]]
    )
    read[name] = Values(stored, slices)
  numbers = per_processor[0][2]
  seed = tf.stop_gradient(numbers[0][0]) if numbers else None
  return Run(**made, results=results, values=read, seed=seed)
