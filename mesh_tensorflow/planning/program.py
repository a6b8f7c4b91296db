"""Program to plan: a graph, or a function that builds one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.environment import collector
from mesh_tensorflow.errors import GraphError
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.placement.mesh_impl import PlacementMeshImpl
from mesh_tensorflow.meshes.simd.mesh_impl import SimdMeshImpl
from mesh_tensorflow.planning.evaluation import Evaluator
from mesh_tensorflow.planning.machine import Machine
from mesh_tensorflow.planning.pieces import Pieces
from mesh_tensorflow.program.graph import Graph, Tensor
from mesh_tensorflow.running.function import Function, TensorSpec


class Reading:
  """Programs that have been read, for several plans of them; see `read_once`.

  Attributes:
    pieces: those of all programs.
    evaluators: of functions.
  """

  def __init__(self) -> None:
    self.pieces = Pieces()
    self.evaluators: dict[Function, Evaluator] = {}


class _OpenReading(threading.local):
  """That of the `read_once` that this thread has opened."""

  reading: Reading | None = None


_OPEN = _OpenReading()


@contextlib.contextmanager
def read_once() -> Iterator[Reading]:
  """Context manager: programs that are planned several times are read, and lowered, once.

  What the functions depend on must not change meanwhile. Inside of another one it is that one.
  """
  outer = _OPEN.reading
  _OPEN.reading = outer or Reading()
  try:
    with collector.paused():
      yield _OPEN.reading
  finally:
    _OPEN.reading = outer


class Program:
  """A graph with its results, or an `mtf.function`.

  Args:
    caller: for messages.
    graph_or_function: an `mtf.Graph`, or an `mtf.function`.
    results: `Tensor`s of a graph that will be exported, or None.

  Attributes:
    title: for reports.
    mesh_impl: the `MeshImpl` of a function; None for a graph.
    tokens: elements of the largest integer argument of a function whose last dimension is a
      length; None if there is none.

  Raises:
    GraphError: it is something else, or a result belongs to another graph.
  """

  def __init__(
    self, caller: str, graph_or_function: object, results: Sequence[Tensor] | None = None
  ):
    self._function: Function | None = None
    self._graph: Graph | None = None
    self._results = results
    self.mesh_impl: MeshImpl | None = None
    self.title = "graph"
    self.tokens: int | None = None
    if isinstance(graph_or_function, Function):
      self._function = graph_or_function
      self.mesh_impl = graph_or_function.mesh_impl
      self.title = str(graph_or_function.__name__)
      self.tokens = _tokens(graph_or_function.input_signature or [])
    elif isinstance(graph_or_function, Graph):
      self._graph = graph_or_function
      for x in results or ():
        if x.graph is not graph_or_function:
          raise GraphError(f"{caller}: the result {x} belongs to another graph")
    else:
      raise GraphError(f"{caller} takes an mtf.Graph or an mtf.function, got {graph_or_function!r}")

  def build(self) -> tuple[Graph, Sequence[Tensor] | None]:
    """The graph, and its results (None: those that no operation reads)."""
    if self._function is None:
      assert self._graph is not None
      return self._graph, self._results
    graph, _, returned = self._function.build_graph()
    return graph, [t for t in tf.nest.flatten(returned) if isinstance(t, Tensor)]

  def evaluator(self, parts: Sequence[int] = ()) -> Evaluator:
    """Reads the program, unless that was done in the same `read_once`.

    Args:
      parts: see `Evaluator`.
    """
    with read_once() as reading:
      found = None if self._function is None else reading.evaluators.get(self._function)
      if found is None:
        found = Evaluator(*self.build(), reading.pieces)
        if self._function is not None:
          reading.evaluators[self._function] = found
      found.parts = sorted(n for n in parts if n > 1) or found.parts
      return found


def implementation_of(mesh_impl: MeshImpl | None) -> str | None:
  """Name of the variant of a machine that models a mesh implementation.

  Args:
    mesh_impl: a `MeshImpl`, or None.
  """
  if isinstance(mesh_impl, PlacementMeshImpl):
    return "placement"
  return "simd" if isinstance(mesh_impl, SimdMeshImpl) else None


def machine_of(machine: Machine, mesh_impl: MeshImpl | None, devices: int) -> Machine:
  """The machine as a mesh sees it: of its implementation, and over the workers that share it.

  Args:
    machine: the machine.
    mesh_impl: of the program. Of None, and of one without devices, the workers are those that this
      process has joined, or that TF_CONFIG names, if they can share so many devices.
    devices: number of devices of the mesh.

  Raises:
    ConfigError: TF_CONFIG is malformed.
  """
  machine = machine.variant(implementation_of(mesh_impl))
  if isinstance(mesh_impl, SimdMeshImpl):
    shared_by_workers = mesh_impl.spans_workers
  else:
    shared_by_workers = not isinstance(mesh_impl, PlacementMeshImpl)
  if machine.spread or not shared_by_workers:
    return machine
  cluster = workers.current()
  if cluster.size == 1:
    cluster = workers.cluster_from_environment()
  if devices % cluster.size:
    return machine
  return machine.over_workers(cluster.size, devices, cluster.hosts)


def loaded_machine(machine: Machine, mesh_impl: MeshImpl | None, devices: int) -> Machine:
  """The machine as the processors of a mesh see it; see `Machine.with_loads`.

  Args:
    machine: the machine.
    mesh_impl: of the program, or None.
    devices: number of devices if there is no mesh, or one of another size; each has a processor.

  Raises:
    ConfigError: the machine says of fewer devices how fast they are.
  """
  if mesh_impl is None or mesh_impl.size != devices:
    return machine.with_loads([1] * devices)
  # The stages of a pipeline are taken to be as slow as the slowest.
  stages = mesh_impl.stages.values() or [mesh_impl]
  return machine.with_loads([n for stage in stages for n in stage.processors_of_devices])


def _tokens(signature: Sequence[TensorSpec]) -> int | None:
  sizes = [
    int(spec.shape.size)
    for spec in signature
    if spec.dtype.is_integer and spec.shape.ndims and "length" in spec.shape.dims[-1].name
  ]
  return max(sizes, default=None)
