"""Programs inside of nodes: the condition and the body of a loop, the branches of a condition.

And the shapes of TensorLists, which TensorFlow does not tell: a list is the tensor of its elements,
stacked along a first axis. Its wire has the dtype tf.variant, and that tensor's shape (() as long
as it is not known). A list that only grows and shrinks at its end is a stack, of any length: its
wire has the shape of an element.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow.errors import ShapeError, UnsupportedError
from mesh_tensorflow.importing.dynamic_shapes import check_shapes
from mesh_tensorflow.importing.nodes import Node, Program, VariableRecord, Wire

LOOPS = ("While", "StatelessWhile")
CONDITIONS = ("If", "StatelessIf", "Case", "StatelessCase")
# Operations that tell the shape of a list.
LIST_SHAPES = ("TensorListElementShape", "TensorListLength")
# Operations that only read from the variables they are given.
_VARIABLE_READERS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape")
_READERS = (
  "TensorListConcatV2",
  "TensorListGather",
  "TensorListGetItem",
  "TensorListScatterIntoExistingList",
  "TensorListStack",
)


@dataclasses.dataclass(eq=False)
class Loop:
  """The programs of a While.

  Attributes:
    condition: takes what the body takes.
    body: its inputs that do not vary are the wires of the node themselves, so that constants are
      constants in it, and weights are found outside.
    varying: the numbers of the inputs that the body changes.
  """

  condition: Program
  body: Program
  varying: tuple[int, ...]

  @property
  def most(self) -> int | None:
    """Maximum number of iterations, from `maximum_iterations`; None if it was not given."""
    counter = self.condition.inputs[0] if 0 in self.varying else None
    for node in self.condition.nodes:
      if node.type == "Less" and counter is not None and node.inputs[0] is counter:
        bound = node.static(1)
        if bound is not None and bound.size == 1 and int(bound) > 0:
          return int(bound)
    return None


_loops: weakref.WeakKeyDictionary[Node, Loop] = weakref.WeakKeyDictionary()
_branches: weakref.WeakKeyDictionary[Node, list[Program]] = weakref.WeakKeyDictionary()


def loop_of(node: Node) -> Loop:
  """The programs of a While; built at the first call."""
  if node not in _loops:
    _loops[node] = _loop(node)
  return _loops[node]


def branches_of(node: Node) -> list[Program]:
  """The programs of an If, that of true first, or of a Case; built at the first call."""
  if node not in _branches:
    if "then_branch" in node.functions:
      bodies = [node.functions["then_branch"], node.functions["else_branch"]]
    else:
      bodies = [node.functions[f"branches_{i}"] for i in range(len(node.functions))]
    _branches[node] = [_checked(node, body(node.inputs[1:])) for body in bodies]
  return _branches[node]


def possible_branches(node: Node) -> list[Program]:
  """Branches of an If or a Case that may run: only one if the condition is static."""
  branches, chosen = branches_of(node), node.static(0)
  if chosen is None:
    return branches
  if "then_branch" in node.functions:
    return [branches[0 if chosen else 1]]
  return [branches[branch_number(int(chosen), len(branches))]]


def branch_number(chosen: int, count: int) -> int:
  """Index of the branch that a Case runs: the last one for an index out of range."""
  return chosen if 0 <= chosen < count else count - 1


def _loop(node: Node) -> Loop:
  body_of, varying = node.functions["body"], set[int]()
  while True:
    inside = [_inside(w) if i in varying else w for i, w in enumerate(node.inputs)]
    body = body_of(inside)
    made_by = {w: n for n in body.nodes for w in n.outputs}
    kept = {i for i, w in enumerate(inside) if _is_same(w, _source(body.outputs[i], made_by))}
    changed = set(range(len(inside))) - kept - varying
    learned = [i for i in varying if _learn(node.inputs[i], body.outputs[i])]
    if not changed and not learned:
      break
    varying |= changed
  for i in varying:
    if node.inputs[i].variable is not None:
      raise UnsupportedError(f"from_tensorflow: {node} changes which variable it works on")
  condition = node.functions["cond"](inside)
  return Loop(_checked(node, condition), _checked(node, body), tuple(sorted(varying)))


def _is_same(before: Wire, after: Wire) -> bool:
  """True if an iteration leaves a loop variable unchanged; constants are compared by value."""
  if before.static is None or after.static is None:
    return before is after
  return np.array_equal(before.static, after.static)


def _source(wire: Wire, made_by: Mapping[Wire, Node]) -> Wire:
  """Follows Identity operations back to the wire that is copied."""
  while wire in made_by and made_by[wire].type == "Identity":
    wire = made_by[wire].inputs[0]
  return wire


def _inside(wire: Wire) -> Wire:
  """Makes the wire of a loop variable inside the body: its value varies per iteration."""
  return Wire(f"{wire.name}/inside", wire.shape, wire.dtype, is_stack=wire.is_stack)


def _learn(before: Wire, after: Wire) -> bool:
  """Infers the shape of a list from the body's result; returns whether anything changed."""
  if before.dtype != tf.variant or _is_known(before) or not _is_known(after):
    return False
  before.shape, before.is_stack = after.shape, after.is_stack
  return True


def _checked(node: Node, program: Program) -> Program:
  check_shapes(program, node)
  return program


def _is_known(wire: Wire) -> bool:
  return (bool(wire.shape) or wire.is_stack) and None not in wire.shape


def note_lists(node: Node) -> None:
  """Infers the shapes of the lists that a node makes, and of the elements that it reads.

  Args:
    node: a new node; its outputs are changed.
  """
  if any(w.is_stack for w in node.inputs) or node.type == "EmptyTensorList":
    _note_stacks(node)
  if node.type == "TensorListReserve":
    element, count = node.static(0), node.static(1)
    if element is not None and count is not None and element.ndim and (element >= 0).all():
      node.outputs[0].shape = (int(count), *(int(n) for n in element))
    elif count is not None:
      node.outputs[0].shape = (int(count), None)  # type: ignore[assignment]
  elif node.type == "TensorListFromTensor":
    node.outputs[0].shape = node.inputs[0].shape
  elif node.type == "TensorListSetItem":
    before, item = node.inputs[0], node.inputs[2]
    if before.shape and before.shape[0] is not None:
      node.outputs[0].shape = (before.shape[0], *item.shape)
      before.shape = node.outputs[0].shape
  elif node.type in _READERS and _is_known(node.inputs[0]):
    _note_reading(node)
  elif node.type in ("AddN", "ZerosLike") and node.outputs[0].dtype == tf.variant:
    known = next((w for w in node.inputs if _is_known(w)), node.inputs[0])
    node.outputs[0].shape, node.outputs[0].is_stack = known.shape, known.is_stack
  elif node.type == "Identity" and None in node.outputs[0].shape:
    node.outputs[0].shape = node.inputs[0].shape  # TensorFlow did not know that of a concat.
  elif node.type in LOOPS and _has_lists(node):
    loop = loop_of(node)
    for i, out in enumerate(node.outputs):
      if out.dtype == tf.variant:
        last = loop.body.outputs[i] if i in loop.varying else node.inputs[i]
        out.shape, out.is_stack = last.shape, last.is_stack
  elif node.type in CONDITIONS and _has_lists(node):
    for out, inner in zip(node.outputs, branches_of(node)[0].outputs):
      if out.dtype == tf.variant:
        out.shape, out.is_stack = inner.shape, inner.is_stack


def note_shapes_of_programs(node: Node) -> None:
  """Infers unknown output shapes of a loop or a condition from its programs.

  Args:
    node: the loop or condition; its outputs are changed.
  """
  try:
    if node.type in LOOPS:
      same = [node.inputs, loop_of(node).body.outputs]
    else:
      same = [program.outputs for program in possible_branches(node)]
  except ShapeError:
    return  # Told if the node is needed.
  for out, wires in zip(node.outputs, zip(*same)):
    if None in out.shape and len({w.shape for w in wires}) == 1:
      out.shape = wires[0].shape


def _note_reading(node: Node) -> None:
  """Infers the output shape of a node that reads from a list of known shape."""
  shape, out = node.inputs[0].shape, node.outputs[0]
  if node.type == "TensorListStack":
    out.shape = shape
  elif node.type == "TensorListGetItem":
    out.shape = shape[1:]
  elif node.type == "TensorListGather":
    out.shape = (node.inputs[1].shape[0], *shape[1:])
  elif node.type == "TensorListScatterIntoExistingList":
    out.shape = shape
  elif len(shape) > 1:  # TensorListConcatV2
    out.shape = (shape[0] * shape[1], *shape[2:])
    node.outputs[1].static = np.full(shape[:1], shape[1], np.int64)
    node.outputs[1].shape = shape[:1]


def _note_stacks(node: Node) -> None:
  """Marks a list as a stack, and infers the shape of its elements.

  Raises:
    UnsupportedError: an element other than the last one is read.
  """
  if node.type == "EmptyTensorList":
    element = node.static(0)
    node.outputs[0].is_stack = True
    is_known = element is not None and element.ndim and (element >= 0).all()
    node.outputs[0].shape = tuple(map(int, element)) if is_known else (None,)  # type: ignore[assignment, arg-type]
  elif node.type == "TensorListPushBack":
    stack, item = node.inputs
    if not _is_known(stack):
      stack.shape = item.shape
    node.outputs[0].shape, node.outputs[0].is_stack = item.shape, True
  elif node.type == "TensorListPopBack":
    stack = node.inputs[0]
    node.outputs[0].shape, node.outputs[0].is_stack = stack.shape, True
    if _is_known(stack):
      node.outputs[1].shape = stack.shape
  elif node.type.startswith("TensorList") and node.type != "TensorListElementShape":
    raise UnsupportedError(
      f"from_tensorflow: {node} reads a list that grows, whose length is known only when it runs; "
      "use a tf.TensorArray of a fixed size, or a tensor"
    )


def fold_list_shape(node: Node) -> bool:
  """Folds an operation that returns the shape of a list; returns False if that is unknown.

  Args:
    node: its outputs are changed.
  """
  (of,) = node.inputs[:1]
  if not _is_known(of) or (of.is_stack and node.type == "TensorListLength"):
    return False
  element = of.shape if of.is_stack else of.shape[1:]
  (out,) = node.outputs
  dtype = out.dtype.as_numpy_dtype
  out.static = np.array(of.shape[0] if node.type == "TensorListLength" else element, dtype)
  out.shape = out.static.shape
  return True


def _has_lists(node: Node) -> bool:
  return any(w.dtype == tf.variant for w in node.outputs)


def set_element_shape(op: tf.Operation, known: Any) -> None:
  """Tells TensorFlow the shape of an element of a list that came into a function.

  Args:
    op: an operation of the function.
    known: name of a tensor -> wire, of the arguments.
  """
  if op.type in ("TensorListGetItem", "TensorListPopBack") and op.inputs[0].name in known:
    wire = known[op.inputs[0].name]
    if _is_known(wire):
      op.outputs[-1].set_shape(wire.shape if wire.is_stack else wire.shape[1:])


def changes_variables(node: Node) -> bool:
  """True if an operation changes a variable that it is given, or runs what may."""
  return node.type not in _VARIABLE_READERS and any(w.variable is not None for w in node.inputs)


def variables_changed(programs: Iterable[Program]) -> set[VariableRecord]:
  """The variables that operations of programs change, those of programs inside of them too."""
  found: set[VariableRecord] = set()
  for node in (n for program in programs for n in program.nodes):
    inner = all_programs(node)
    if inner:
      found |= variables_changed(inner)
    elif changes_variables(node):
      found |= {w.variable for w in node.inputs if w.variable is not None}
  return found


def all_programs(node: Node) -> Sequence[Program]:
  """All programs inside of a node."""
  if node.type in LOOPS:
    loop = loop_of(node)
    return [loop.condition, loop.body]
  return branches_of(node) if node.type in CONDITIONS else []
