"""Functions that a graph calls: from their definitions to graphs that can be read.

The body of a called function (of a nested tf.function, a saved model, a loop) is there only as a
`FunctionDef`. Its nodes are imported into a graph of its own, one by one, so that TensorFlow infers
their shapes from those at the call, which may be known better than in the function.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import ShapeError
from mesh_tensorflow.importing.nested import set_element_shape
from mesh_tensorflow.importing.nodes import Node, Wire
from mesh_tensorflow.importing.rules import call_raw

# The attribute of an IdentityN that ends a function under tf.custom_gradient.
GRADIENT = "_gradient_op_type"
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")


def in_order(operations: Sequence[tf.Operation]) -> list[tf.Operation]:
  """Sorts operations topologically.

  They are in such an order already, except for differentiated loops: TensorFlow adds inputs to the
  loop that are created after it.

  Args:
    operations: of a graph, in the order of their making.
  """
  done: dict[tf.Operation, None] = {}
  for first in operations:
    stack = [first]
    while stack:
      missing = [t.op for t in stack[-1].inputs if t.op not in done]
      if missing and stack[-1] not in done:
        stack += missing
      else:
        done[stack.pop()] = None
  return list(done)


class FunctionLibrary:
  """The functions that come with a graph.

  Args:
    graph: a tf.Graph.
  """

  def __init__(self, graph: tf.Graph):
    self._graph = graph

  @functools.cached_property
  def _definition(self) -> Any:
    return self._graph.as_graph_def(add_shapes=False)

  @functools.cached_property
  def _functions(self) -> dict[str, Any]:
    return {f.signature.name: f for f in self._definition.library.function}

  @functools.cached_property
  def has_own_gradients(self) -> bool:
    """True if an operation in any of the functions has a custom gradient."""
    return any(has_own_gradient(f) for f in self._functions.values())

  def is_call(self, op: tf.Operation) -> bool:
    """True if an operation calls a function, which can be inlined."""
    return op.type in _CALLS or op.type in self._functions

  def called(self, op: tf.Operation) -> Any:
    """Definition of the function that an operation calls, by attribute or by its type."""
    return self.named(op.get_attr("f").name if op.type in _CALLS else op.type)

  def named(self, name: str) -> Any:
    """The definition of the function of a name."""
    return self._functions[name]

  def imported(
    self, function: Any, inputs: Sequence[Wire]
  ) -> tuple[tf.Graph, list[str], list[str], dict[str, str]]:
    """Imports the body of a function into a graph.

    Args:
      function: its definition.
      inputs: what it is called with.

    Returns:
      The graph, whose operations are in an order in which they can run; the names of the tensors
      that stand for the inputs; the names of its results; by the names that tensors had in the
      function those that they have in the graph.
    """
    graph = _function_graph() if has_own_gradient(function) else tf.Graph()
    tensors: dict[str, Any] = {}  # "argument" or "node:output:number" -> tensor
    arguments = []
    with graph.as_default():
      library = type(self._definition)()
      library.library.CopyFrom(self._definition.library)
      library.versions.CopyFrom(self._definition.versions)
      tf.graph_util.import_graph_def(library, name="")
      for arg, wire in zip(function.signature.input_arg, inputs):
        placeholder = _placeholder(arg, wire)
        tensors[arg.name] = placeholder
        arguments.append(placeholder.name)
      made: dict[str, tf.Operation] = {}
      known = dict(zip(arguments, inputs))
      for node in _in_order(function):
        op = _import_node(node, tensors, type(self._definition), self._definition.versions)
        made[node.name] = op
        _enter_outputs(op, node.name, tensors)
        if op.type == "ReadVariableOp" and op.inputs[0].name in known:
          # The placeholder of a resource does not tell.
          op.outputs[0].set_shape(known[op.inputs[0].name].shape)
        set_element_shape(op, known)
    results = [tensors[function.ret[arg.name]].name for arg in function.signature.output_arg]
    names = {f"{name}:{i}": t.name for name, op in made.items() for i, t in enumerate(op.outputs)}
    return graph, arguments, results, names

  def note_shapes(self, op: tf.Operation, node: Node) -> None:
    """Infers the shapes of outputs from inputs that are better known than in TensorFlow's graph.

    A layer's own tf.function, say, may have been traced for a batch of any size.

    Args:
      op: an operation.
      node: what it became; its outputs are changed. Its inputs may be known better than those of
        `op`: by their shapes, and by their values.

    Raises:
      ShapeError: they do not fit together, which TensorFlow would say when it runs.
    """
    if _note_counts(node):
      return
    plain = all(w.dtype not in (tf.resource, tf.variant) for w in node.inputs)
    if not plain or any(w.variable or None in w.shape for w in node.inputs):
      return
    with tf.Graph().as_default():
      tensors = {}
      for i, (t, wire) in enumerate(zip(op.inputs, node.inputs)):
        is_known = wire.static is not None
        tensors[f"{i}"] = (
          tf.constant(wire.static, t.dtype)
          if is_known
          else tf.raw_ops.Placeholder(dtype=t.dtype, shape=wire.shape)
        )
      alone = type(op.node_def)()
      alone.CopyFrom(op.node_def)
      del alone.input[:]
      alone.input.extend(tensors)
      try:
        again = _import_node(alone, tensors, type(self._definition), self._definition.versions)
      except ValueError as e:
        raise ShapeError(f"from_tensorflow: {node}: {str(e).splitlines()[0]}") from None
    for wire, t in zip(node.outputs, again.outputs):
      if t.shape.is_fully_defined() and t.dtype not in (tf.resource, tf.variant):
        wire.shape = tuple(t.shape.as_list())


# Operations whose results' sizes follow from the values of all inputs but that of this number.
_COUNTED = {
  "DynamicPartition": 0,
  "RaggedTensorToTensor": 1,
  **dict.fromkeys([f"Segment{kind}" for kind in ("Max", "Mean", "Min", "Prod", "Sum")], 0),
}


def _note_counts(node: Node) -> bool:
  """Sets the shapes of outputs whose sizes can be computed now; returns whether it did."""
  data = _COUNTED.get(node.type)
  if data is None or any((i == data) == (w.static is not None) for i, w in enumerate(node.inputs)):
    return False
  if None in node.inputs[data].shape:
    return False
  with tf.init_scope():  # It may be imported while another function is traced.
    made = call_raw(
      node,
      [
        tf.zeros(w.shape, w.dtype) if i == data else tf.constant(w.static, w.dtype)
        for i, w in enumerate(node.inputs)
      ],
    )
  for wire, y in zip(node.outputs, made if isinstance(made, (tuple, list)) else [made]):
    wire.shape = tuple(y.shape.as_list())
  return True


def has_own_gradient(function: Any) -> bool:
  """True if an operation of a function definition has a custom gradient."""
  return any(GRADIENT in node.attr for node in function.node_def)


def _function_graph() -> tf.Graph:
  """Creates an empty graph of a tf.function, which may capture tensors of other graphs.

  A gradient under tf.custom_gradient uses tensors of the graph that it was made in.
  """
  graphs = []

  def empty() -> None:
    graphs.append(tf.no_op().graph)

  tf.function(empty, autograph=False).get_concrete_function()
  return graphs[0]


def is_graph_of(graph: tf.Graph, function: Any) -> bool:
  """True if a graph has all operations of a function definition, with the same gradients."""
  operations = {op.name: op for op in graph.get_operations()}
  for node in function.node_def:
    op = operations.get(node.name)
    if op is None or op.type != node.op:
      return False
    if GRADIENT in node.attr and op.get_attr(GRADIENT) != node.attr[GRADIENT].s:
      return False
  return True


def _placeholder(arg: Any, wire: Wire) -> tf.Tensor:
  if wire.static is not None and wire.variable is None:
    return tf.constant(wire.static, wire.dtype)
  if wire.variable is not None or wire.dtype in (tf.resource, tf.variant):
    return tf.raw_ops.Placeholder(dtype=tf.as_dtype(arg.type), shape=[])
  return tf.raw_ops.Placeholder(dtype=wire.dtype, shape=wire.shape)


def _in_order(function: Any) -> list[Any]:
  """The nodes of a function, each behind those that it takes something from or has to wait for."""
  nodes = {n.name: n for n in function.node_def}
  done: dict[str, Any] = {}
  for first in nodes:
    stack = [first]
    while stack:
      name = stack[-1]
      needs = [i.lstrip("^").split(":")[0] for i in nodes[name].input]
      missing = [n for n in needs if n in nodes and n not in done]
      if missing:
        stack += missing
      else:
        done[name] = nodes[name]
        stack.pop()
  return list(done.values())


def _import_node(node: Any, tensors: dict[str, Any], graph_def: Any, versions: Any) -> tf.Operation:
  """Imports one node of a function into the current graph."""
  single = graph_def()
  single.versions.CopyFrom(versions)
  copy = single.node.add()
  copy.CopyFrom(node)
  copy.attr.pop("_class", None)  # Colocation with nodes that are not there.
  del copy.input[:]
  inputs = {}
  for i, name in enumerate(n for n in node.input if not n.startswith("^")):
    inputs[f"_input_{i}:0"] = tensors[name]
    copy.input.append(f"_input_{i}:0")
  (op,) = tf.graph_util.import_graph_def(
    single, input_map=inputs, return_elements=[node.name], name=""
  )
  return op


def _enter_outputs(op: tf.Operation, name: str, tensors: dict[str, Any]) -> None:
  outputs = list(op.outputs)
  for arg in op.op_def.output_arg:
    count = 1
    if arg.number_attr:
      count = op.get_attr(arg.number_attr)
    elif arg.type_list_attr:
      count = len(op.get_attr(arg.type_list_attr))
    for i in range(count):
      tensors[f"{name}:{arg.name}:{i}"] = outputs.pop(0)
