"""Stages of a Keras model: where its layers are cut, and which operations each stage has.

The operations of a step are cut where layers begin, in the order in which they are traced: what
comes after the beginning of a layer belongs to its stage, losses and metrics to the last one. A
variable is on the stage that uses it first; the optimizer's operations and slots are on that of the
weight they are for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import threading
import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from mesh_tensorflow.errors import ArgumentError
from mesh_tensorflow.importing.building import Stages
from mesh_tensorflow.importing.nodes import Node, Program, Wire
from mesh_tensorflow.planning.cost_model import node_flops

# Weight of a layer without operations or parameters that are counted, beside all layers.
_LEAST_SHARE = 1e-3


@dataclasses.dataclass(frozen=True)
class _Call:
  """Call of a layer in a traced step.

  Attributes:
    layer: the layer.
    marker: name of an operation that was made right before.
    depth: number of layers that call it.
  """

  layer: Any
  marker: str
  depth: int


# The calls in each traced graph, in order.
_CALLS: weakref.WeakKeyDictionary[Any, list[_Call]] = weakref.WeakKeyDictionary()
_LOCK = threading.RLock()


@contextlib.contextmanager
def noted_calls() -> Iterator[None]:
  """Context manager: notes where the layers begin that this thread calls in a traced function."""
  graph = tf.no_op().graph
  calls = _CALLS.setdefault(graph, [])
  thread = threading.get_ident()
  open_calls: list[Any] = []
  with _LOCK:
    plain = keras.Layer.__call__

    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
      if threading.get_ident() != thread:
        return plain(self, *args, **kwargs)
      marker = tf.no_op()
      if marker is not None and marker.graph is graph:
        calls.append(_Call(self, marker.name, len(open_calls)))
      open_calls.append(self)
      try:
        return plain(self, *args, **kwargs)
      finally:
        open_calls.pop()

    keras.Layer.__call__ = call
    try:
      yield
    finally:
      keras.Layer.__call__ = plain


def cut(graph: tf.Graph, stages: int | Sequence[str], title: str) -> list[Any]:
  """Cuts a model into stages.

  Args:
    graph: of a step of it, traced in `noted_calls`.
    stages: their number, for stages of like shares of all parameters and of all FLOPs; or the names
      of the layers with which all stages but the first begin.
    title: name of the model.

  Returns:
    The layers with which all stages but the first begin.

  Raises:
    ArgumentError: there are fewer layers than stages; or a name is not that of one layer, or they
      are not in the order in which the layers are called.
  """
  calls = _CALLS[graph]
  if isinstance(stages, int):
    units = _units(calls, stages)
    if len(units) < stages:
      raise ArgumentError(
        f"parallelize: stages={stages}, and the model {title} has {len(units)} "
        f"{'layer' if len(units) == 1 else 'layers'} to cut it between ({_listed(units)}); a stage "
        f"has at least one: give at most stages={max(len(units), 1)}"
      )
    costs = _costs(graph, units)
    return [units[i].layer for i in _balanced(costs, stages)[1:]]
  first = _firsts(calls)
  units = _units(calls, 1)
  chosen = [_named(name, first, units, title) for name in stages]
  operations = graph.get_operations()
  place = {op.name: i for i, op in enumerate(operations)}
  start = place[units[0].marker] if units else 0
  for call, name in zip(chosen, stages):
    end = place[call.marker]
    if all(op.type in ("NoOp", "Const") for op in operations[start:end]):
      order = ", ".join(c.layer.name for c in first if c in chosen)
      raise ArgumentError(
        f"parallelize: stages={list(stages)}: no layer would be in the stage before the one that "
        f"begins with {name!r}; name layers in the order of their calls ({order}), and not the "
        f"first one, {units[0].layer.name!r}, with which stage 0 begins"
      )
    start = end
  return [c.layer for c in chosen]


def _firsts(calls: Sequence[_Call]) -> list[_Call]:
  """The first call of each layer."""
  return list({id(c.layer): c for c in reversed(calls)}.values())[::-1]


def _units(calls: Sequence[_Call], least: int) -> list[_Call]:
  """The first calls of the layers between which a model is cut.

  Models in models are taken apart, and blocks that are layers if there are fewer than `least`.
  """

  def inside(i: int) -> list[int]:
    found = []
    for j in range(i + 1, len(calls)):
      if calls[j].depth <= calls[i].depth:
        break
      if calls[j].depth == calls[i].depth + 1:
        found.append(j)
    return found

  units = [i for i, c in enumerate(calls) if c.depth == 0]
  while True:
    parts = {i: found for i in units if (found := inside(i))}
    distinct = list({id(calls[i].layer): calls[i] for i in reversed(units)}.values())[::-1]
    opened = [i for i in parts if isinstance(calls[i].layer, keras.Model)]
    if not opened and len(distinct) < least:
      opened = list(parts)
    if not opened:
      return distinct
    units = [j for i in units for j in (parts[i] if i in opened else [i])]


def _named(name: str, first: Sequence[_Call], units: Sequence[_Call], title: str) -> _Call:
  found = [c for c in first if name in (c.layer.name, getattr(c.layer, "path", None))]
  if not found:
    raise ArgumentError(
      f"parallelize: stages names the layer {name!r}, which the model {title} does not call; its "
      f"layers are {_listed(units)}"
    )
  if len(found) > 1:
    paths = [getattr(c.layer, "path", c.layer.name) for c in found]
    raise ArgumentError(
      f"parallelize: stages names the layer {name!r}, and the model {title} has {len(found)} of "
      f"this name; give a path: {', '.join(map(repr, paths))}"
    )
  return found[0]


def _listed(units: Sequence[_Call]) -> str:
  names = [c.layer.name for c in units]
  return ", ".join(names if len(names) <= 12 else [*names[:6], "...", *names[-5:]])


def _costs(graph: tf.Graph, units: Sequence[_Call]) -> list[float]:
  """For each layer its share of all FLOPs, of all parameters, and a little."""
  index = {u.marker: i for i, u in enumerate(units)}
  flops, current = [0.0] * len(units), 0
  for op in graph.get_operations():
    current = index.get(op.name, current)
    flops[current] += node_flops(op)
  counted: set[int] = set()
  parameters = []
  for u in units:
    new = {id(v): math.prod(v.shape) for v in u.layer.trainable_variables}
    parameters.append(float(sum(n for key, n in new.items() if key not in counted)))
    counted |= set(new)
  shares = [[x / (sum(xs) or 1.0) for x in xs] for xs in (flops, parameters)]
  return [a + b + _LEAST_SHARE / len(units) for a, b in zip(*shares)]


def _balanced(costs: Sequence[float], count: int) -> list[int]:
  """The first elements of `count` runs whose largest sum is the least."""
  n = len(costs)
  sums = [0.0, *itertools.accumulate(costs)]
  # For each number of runs and of elements in them: the largest sum, that of squares, the starts.
  best: list[tuple[float, float, list[int]] | None] = [(0.0, 0.0, [])] + [None] * n
  for runs in range(1, count + 1):
    following: list[tuple[float, float, list[int]] | None] = [None] * (n + 1)
    for end in range(runs, n + 1):
      options = []
      for start in range(runs - 1, end):
        before = best[start]
        if before is not None:
          own = sums[end] - sums[start]
          options.append((max(before[0], own), before[1] + own**2, [*before[2], start]))
      following[end] = min(options) if options else None
    best = following
  found = best[n]
  assert found is not None  # There are at least as many elements as runs.
  return found[2]


def name_of(stage: int) -> str:
  """Name of the mesh of a stage; see `MeshImpl.with_stages`."""
  return f"stage{stage}"


def of_forward(
  program: Program, graph: tf.Graph, layers: Sequence[Any], known: MutableMapping[str, int]
) -> Stages:
  """The stages of the operations of a step's forward part.

  Args:
    program: the imported step.
    graph: that it was traced in, in `noted_calls`.
    layers: those with which all stages but the first begin; see `cut`.
    known: by path the stages of variables; those of variables that are new are added.
  """
  markers = {id(c.layer): c.marker for c in _firsts(_CALLS[graph])}
  begins = {markers[id(x)]: k + 1 for k, x in enumerate(layers) if id(x) in markers}
  stage_of: dict[str, int] = {}
  stage = 0
  for op in graph.get_operations():
    stage = max(stage, begins.get(op.name, 0))
    stage_of[op.name] = stage
  found = {node: stage_of[node.operation] for node in program.nodes if node.operation in stage_of}
  for node, k in found.items():
    for w in node.inputs:
      if w.variable is not None:
        known.setdefault(w.variable.path, k)
  return _stages(found, known)


def of_update(program: Program, given: Sequence[int], known: MutableMapping[str, int]) -> Stages:
  """The stages of operations on variables of several stages: an optimizer's, those of metrics.

  An operation is where the variable is that it reads or changes, or else where the largest of its
  inputs is. New variables are where operations use them.

  Args:
    program: the imported function.
    given: for each argument its stage.
    known: by path the stages of variables; those of variables that are new are added.
  """
  # An IdentityN passes on tensors of all stages: that of Keras' sum over replicas, which has a
  # gradient of its own. Nobody differentiates what is here.
  passed: dict[Wire, Wire] = {}
  for node in program.nodes:
    if node.type == "IdentityN":
      passed.update(zip(node.outputs, node.inputs))
      node.gradient, node.no_gradient = None, ""
  placed = [node for node in program.nodes if not any(y in passed for y in node.outputs)]
  wires: dict[Wire, int] = dict(zip(program.inputs, given))
  producers = {w: node for node in placed for w in node.outputs}
  found: dict[Node, int] = {}

  def operands(node: Node) -> list[Wire]:
    """The tensors that an operation takes, but for constants and variables."""
    inputs = [w for w in node.inputs if w.variable is None and w.static is None]
    for i, w in enumerate(inputs):
      while w in passed:
        w = passed[w]
      inputs[i] = w
    return inputs

  def largest(inputs: Sequence[Wire]) -> list[Wire]:
    most = max(map(_extent, inputs), default=None)
    return [w for w in inputs if _extent(w) == most]

  def settle(node: Node, stage: int) -> None:
    found[node] = stage
    wires.update(dict.fromkeys(node.outputs, stage))
    for w in node.inputs:
      if w.variable is not None:
        known.setdefault(w.variable.path, stage)

  def wanted(node: Node, strict: bool) -> int | None:
    variables = [w.variable.path for w in node.inputs if w.variable is not None]
    own = [known[path] for path in variables if path in known]
    if own:
      return own[0]
    inputs = operands(node)
    stages = [wires[w] for w in (largest(inputs) if strict else inputs) if w in wires]
    return max(stages, default=None)

  strict = True
  while len(found) < len(placed):
    before = len(found)
    for node in placed:
      if node not in found and (stage := wanted(node, strict)) is not None:
        settle(node, stage)
        strict = True
    for node in reversed(placed):
      for w in largest(operands(node)) if node in found else ():
        if w in producers and w not in wires:
          settle(producers[w], found[node])  # Nothing that it takes says where it is.
    if len(found) > before:
      continue
    if not strict:
      # Of constants, or of variables that nothing else uses.
      settle(next(n for n in placed if n not in found), 0)
    strict = not strict
  return _stages(found, known)


def _extent(w: Wire) -> tuple[int, int]:
  return math.prod(w.shape), w.rank


def _stages(nodes: Mapping[Node, int], variables: Mapping[str, int]) -> Stages:
  return Stages(
    {node: name_of(k) for node, k in nodes.items()}, {p: name_of(k) for p, k in variables.items()}
  )


def of_arguments(program: Program, stages: Stages) -> list[str]:
  """For each argument of a program the mesh of the first operation that uses it."""
  first: dict[Wire, str] = {}
  for node in program.nodes:
    for w in node.inputs:
      if node in stages.nodes:
        first.setdefault(w, stages.nodes[node])
  return [first.get(w, name_of(0)) for w in program.inputs]
