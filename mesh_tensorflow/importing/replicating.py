"""Operations without a rule: computed whole on each device, by TensorFlow, where that is right.

A part of a function in which shapes depend on values (`tf.boolean_mask`, `tf.unique`, sparse
tensors) is one such operation, if what goes into it and what comes out has a static shape.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import UnsupportedError
from mesh_tensorflow.importing.axes import Axes
from mesh_tensorflow.importing.nested import all_programs
from mesh_tensorflow.importing.nodes import Node, Program, Wire
from mesh_tensorflow.importing.rules import (
  Construction,
  Dims,
  Label,
  Labels,
  Rule,
  Slicewise,
  call_raw,
  raw_operation,
  registered_rule,
)
from mesh_tensorflow.importing.value import flat
from mesh_tensorflow.operations.constants import constant
from mesh_tensorflow.operations.slicewise import slicewise
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.program.graph import Tensor

_LOG = logging.getLogger("mesh_tensorflow")


class Replicated(Slicewise):
  """Any operation, computed whole on each device, whatever the layout splits.

  Its gradient is TensorFlow's, computed whole on each device, too: each has all of it, and nothing
  is summed over devices.
  """

  def labels(self, node: Node) -> Labels:
    # What is known while tracing is no operand: TensorFlow may need it to infer shapes.
    ins = [
      None if w.static is not None else [("in", k, i) for i in range(w.rank)]
      for k, w in enumerate(node.inputs)
    ]
    outs = [[("out", k, i) for i in range(w.rank)] for k, w in enumerate(node.outputs)]
    return Labels(ins, outs, [label for labels in (*ins, *outs) for label in labels or ()])

  def run(self, node: Node) -> Callable[..., Any]:
    is_operand = [w.static is None for w in node.inputs]
    return _of_parts(node) if node.parts else raw_operation(node, is_operand)

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    if any(x is not None for x in xs):
      return super().compute(node, xs, dims, make)
    # The mesh is that of an operand.
    run, outs = self.run(node), [Shape(flat(d)) for d in self._output_dims(node, dims)]
    dtypes = [w.dtype for w in node.outputs]

    def of_nothing(_: tf.Tensor) -> tuple[tf.Tensor, ...]:
      made = run()
      several = made if isinstance(made, (tuple, list)) else [made]
      return tuple(tf.reshape(y, s.to_integer_list) for y, s in zip(several, outs))

    nothing = constant(make.mesh, 0, [])
    return slicewise(of_nothing, [nothing], outs, dtypes, [], 0, name=node.type)  # type: ignore[no-any-return]

  def _output_dims(self, node: Node, dims: Mapping[Label, Dims]) -> list[list[Dims]]:
    return [
      [() if n == 1 else dims[label] for n, label in zip(w.shape, labels)]
      for w, labels in zip(node.outputs, self.labels(node).outputs)
    ]


def _of_parts(node: Node) -> Callable[..., Any]:
  """Returns a function that runs the operations of a node's `parts` in order."""
  given = [w for w in node.inputs if w.static is None]

  def run(*xs: tf.Tensor) -> tuple[tf.Tensor, ...]:
    values: dict[Wire, Any] = dict(zip(given, xs))
    for part in node.parts:
      made = call_raw(
        part, [_of_static(w) if w.static is not None else values[w] for w in part.inputs]
      )
      several = made if isinstance(made, (tuple, list)) else [made]
      values.update(zip(part.outputs, several))
    return tuple(values[w] for w in node.outputs)

  return run


def _of_static(wire: Wire) -> tf.Tensor:
  return tf.constant(wire.static, wire.dtype)


_REPLICATED = Replicated()


def rule_of(node: Node) -> Rule:
  """The rule of a node.

  Raises:
    UnsupportedError: its type has none, and it is not computed whole on each device.
  """
  if node.fallback:
    return _REPLICATED
  found = registered_rule(node.type)
  if found is not None:
    return found
  reason = why_not_replicated(node)
  raise UnsupportedError(
    f"from_tensorflow: there is no rule for the operation {node.type} ({node.name}), made at "
    f"{node.line}; "
    + (
      f"and it cannot be computed whole on each device: {reason}"
      if reason
      else 'fallback="replicate", the default, computes it whole on each device'
    )
  )


def why_not_replicated(node: Node) -> str | None:
  """Reason why an operation cannot be replicated, with advice; None if it can.

  It has to be a pure function: an operation with state, or one that draws random numbers, would
  do so on each device separately, and the layout would change results.
  """
  handles = [w for w in (*node.inputs, *node.outputs) if w.dtype in (tf.resource, tf.variant)]
  handles += [w for w in node.inputs if w.variable is not None]
  outside = "compute it outside of the function, and pass what it gives as an argument"
  if handles:
    return f"{handles[0].name} is a state outside of the function; {outside}"
  if node.is_stateful and "PyFunc" in node.type:
    return (
      "it calls Python, whose state is not known; write it with operations of TensorFlow, or "
      + outside
    )
  if node.is_stateful or _draws(node):
    return (
      "it is stateful: each device would have a state, or random numbers, of its own; use a "
      f"stateless operation (tf.random.stateless_*), or {outside}"
    )
  if node.gradient or node.no_gradient:
    return "it ends a function under tf.custom_gradient, whose shapes must be static"
  if node.functions:
    return "it calls functions; write it as tf.while_loop, tf.cond or tf.switch_case"
  if not hasattr(tf.raw_ops, node.type):
    return f"it is no operation of tf.raw_ops; {outside}"
  return None


def _draws(node: Node) -> bool:
  """True if it draws random numbers seeded by attributes, as FractionalMaxPool does."""
  attributes = node.attributes
  return {"seed", "seed2"} <= set(attributes) and not attributes.get("deterministic", False)


def relate_program(program: Program, axes: Axes) -> None:
  """Applies the rule of each node to the axes; rules of loops call it for the bodies.

  Nodes without a rule, or with settings that their rule does not support, are replicated on each
  device if the user allows it.

  Args:
    program: a program.
    axes: the classes of axes.

  Raises:
    UnsupportedError: a node can neither be split nor be computed whole.
  """
  for wire in program.wires:
    axes.add(wire, pinned=wire.variable is not None)
    if wire.dtype == tf.variant and wire.shape and not wire.is_stack:
      axes.pin(wire, 0)  # Elements of a list lie along one dimension.
  for node in program.nodes:
    with axes.because_of(node):
      try:
        rule_of(node).relate(node, axes)
      except UnsupportedError:
        if node.fallback or not node.may_replicate or why_not_replicated(node):
          raise
        node.fallback = True
        rule_of(node).relate(node, axes)


def replicated_nodes(program: Program) -> list[Node]:
  """The nodes that are computed whole on each device; of bodies and own gradients, too."""
  found = []
  for node in program.nodes:
    if node.fallback:
      found.append(node)
    inner = [*all_programs(node), *([node.gradient.program] if node.gradient else [])]
    found += [n for p in inner for n in replicated_nodes(p)]
  return found


def warn_of(title: str, nodes: Iterable[Node], warned: set[str]) -> None:
  """Logs a warning for each type of operations that each device computes whole.

  Args:
    title: name of the function.
    nodes: the operations.
    warned: the types that were warned of before; new ones are added.
  """
  by_type: dict[str, list[Node]] = {}
  for node in nodes:
    if node.type not in warned:
      by_type.setdefault(node.type, []).append(node)
  warned.update(by_type)
  for op_type, alike in by_type.items():
    sizes = [
      math.prod(w.shape) * max(w.dtype.size or 0, 1)
      for node in alike
      for w in dict.fromkeys(node.inputs)
      if w.static is None
    ]
    others = f", and {len(alike) - 1} more of its type" if len(alike) > 1 else ""
    _LOG.warning(
      "%s: there is no rule to split %s (%s, %s)%s: each device does all of its work, on inputs "
      "of %s, which are gathered where a layout splits them; fallback='error' refuses it",
      title,
      op_type,
      alike[0].name,
      alike[0].line,
      others,
      _bytes(sum(sizes)),
    )


def _bytes(n: int) -> str:
  for unit in ("bytes", "KiB", "MiB"):
    if n < 1024:
      return f"{n:.4g} {unit}"
    n /= 1024  # type: ignore[assignment]
  return f"{n:.4g} GiB"


def with_parts(nodes: Sequence[Node], outputs: Iterable[Wire]) -> list[Node]:
  """Merges nodes that are connected by wires of dynamic shape into one node each.

  Args:
    nodes: in the order in which they run; only such as are needed.
    outputs: of the program.

  Returns:
    The nodes; where some cannot be computed whole on each device, they are left as they are.

  Raises:
    UnsupportedError: one of them has no rule, and keeps a state.
  """
  results = set(outputs)
  used = results | {w for node in nodes for w in node.inputs}
  dynamic = {
    w
    for n in nodes
    for w in n.outputs
    if w in used and _is_dynamic(w) and n.type != "FusedBatchNormV3"
  }
  seeds = [
    n
    for n in nodes
    if n.may_replicate and registered_rule(n.type) is None and any(map(_is_dynamic, n.outputs))
  ]
  if not dynamic and not seeds:
    return list(nodes)
  for group in _groups(nodes, dynamic, seeds):
    for n in group:
      if n.may_replicate and registered_rule(n.type) is None and why_not_replicated(n):
        rule_of(n)  # It raises: that is the reason, not the shape.
    is_open = any(w in results and w in dynamic for n in group for w in n.outputs)
    if is_open or any(not n.may_replicate or why_not_replicated(n) for n in group):
      continue
    nodes = _with_one(nodes, group, results)
  return list(nodes)


def _is_dynamic(wire: Wire) -> bool:
  return None in wire.shape and wire.dtype not in (tf.variant, tf.resource)


def _groups(nodes: Sequence[Node], dynamic: set[Wire], seeds: Sequence[Node]) -> list[list[Node]]:
  """Groups of nodes that have to be merged, each in order.

  Nodes that share a dynamic wire, and all nodes on a path from one of them to another.
  """
  group_of: dict[Node, set[Node]] = {n: {n} for n in seeds}
  touching: dict[Wire, list[Node]] = {}
  for n in nodes:
    for w in (*n.inputs, *n.outputs):
      if w in dynamic:
        touching.setdefault(w, []).append(n)

  def join(members: Iterable[Node]) -> None:
    whole: set[Node] = set()
    for n in members:
      whole |= group_of.get(n, {n})
    for n in whole:
      group_of[n] = whole

  for members in touching.values():
    join(members)
  while True:
    groups = list({id(g): g for g in group_of.values()}.values())
    grown = [(g, between) for g in groups if (between := _between(nodes, g))]
    if not grown:
      return [[n for n in nodes if n in g] for g in groups]
    for g, between in grown:
      join([*g, *between])


def _between(nodes: Sequence[Node], group: set[Node]) -> set[Node]:
  """Nodes outside of a group that both depend on it and are needed by it."""
  behind = {w for n in group for w in n.outputs}
  later = set()
  for n in nodes:
    if n not in group and any(w in behind for w in n.inputs):
      later.add(n)
      behind.update(n.outputs)
  before = {w for n in group for w in n.inputs}
  earlier = set()
  for n in reversed(nodes):
    if n not in group and any(w in before for w in n.outputs):
      earlier.add(n)
      before.update(n.inputs)
  return later & earlier


def _with_one(nodes: Sequence[Node], group: Sequence[Node], results: set[Wire]) -> list[Node]:
  """Replaces a group of nodes by one; returns the nodes in topological order."""
  members = set(group)
  made = [w for n in group for w in n.outputs]
  outside = results | {w for n in nodes if n not in members for w in n.inputs}
  inputs = dict.fromkeys(w for n in group for w in n.inputs if w not in set(made))
  kinds = list(dict.fromkeys(n.type for n in group))
  first = group[0]
  one = dataclasses.replace(
    first,
    type=first.type if len(group) == 1 else "+".join([*kinds[:3], *(["..."] if kinds[3:] else [])]),
    inputs=tuple(w for w in inputs if w.static is None),
    outputs=tuple(w for w in made if w in outside),
    fallback=True,
    parts=tuple(group),
  )
  behind = set(one.outputs)
  before: list[Node] = []
  after: list[Node] = []
  for n in nodes:
    if n in members:
      continue
    is_behind = any(w in behind for w in n.inputs)
    (after if is_behind else before).append(n)
    if is_behind:
      behind.update(n.outputs)
  return [*before, one, *after]
