"""Traces a function of TensorFlow to a `Program` of nodes."""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import dataclasses
import functools
import inspect
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from mesh_tensorflow.errors import UnsupportedError, VariableError
from mesh_tensorflow.importing.dynamic_shapes import check_shapes
from mesh_tensorflow.importing.functions import (
  GRADIENT,
  FunctionLibrary,
  in_order,
  is_graph_of,
)
from mesh_tensorflow.importing.nested import (
  LIST_SHAPES,
  LOOPS,
  all_programs,
  changes_variables,
  fold_list_shape,
  note_lists,
  note_shapes_of_programs,
)
from mesh_tensorflow.importing.nodes import (
  Body,
  CustomGradient,
  Node,
  Program,
  VariableRecord,
  Wire,
)
from mesh_tensorflow.importing.replicating import with_parts

_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
# Frames that say nothing of who made an operation: of TensorFlow, of this package, and of Keras'
# functions below its layers.
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_BETWEEN = re.compile(r"keras/src/(ops|backend|utils|activations)/|/tensorflow/")


def python_line(frames: Sequence[Any]) -> str:
  """Source line of the user's code that made an operation, and that of the library it called.

  Args:
    frames: a traceback, the innermost frame last. It is read from there as far as is needed.
  """
  library, own = "", ""
  for frame in reversed(frames):
    is_library, path = _place(frame.filename)
    if not path:
      continue
    if is_library:
      library = library or _shown(path, frame)
    else:
      own = _shown(path, frame)
      break
  if library and own:
    return f"{library}, called from {own}"
  return library or own or "no Python line"


@functools.cache
def _place(path: str) -> tuple[bool, str]:
  """True if a file is a library's, and its path as it is shown; "" if it says nothing."""
  if path.startswith((_HERE, "<")) or _BETWEEN.search(path.replace(os.sep, "/")):
    return False, ""
  for folder in _LIBRARIES:
    if folder in path:
      return True, path.split(folder)[-1]
  return False, os.path.basename(path)


def _shown(path: str, frame: Any) -> str:
  return f"{path}:{frame.lineno}" + (f", in {frame.name}" if frame.name else "")


_LOCK = threading.Lock()
_inside = 0


@contextlib.contextmanager
def without_cudnn() -> Iterator[None]:
  """Context manager: `keras.layers.LSTM` and `GRU` are traced as loops, also with a GPU.

  On a GPU they would be one cuDNN operation for all steps, which no layout can split. The values
  are the same.
  """
  global _inside
  keras = sys.modules.get("keras")
  layers = getattr(keras, "layers", None)
  classes = [c for c in (getattr(layers, n, None) for n in ("LSTM", "GRU")) if c is not None]
  with _LOCK:
    _inside += 1
    for cls in classes:
      cls.use_cudnn = property(_never, _keep)
  try:
    yield
  finally:
    with _LOCK:
      _inside -= 1
      for cls in classes if not _inside else ():
        del cls.use_cudnn  # Each layer has its own setting again.


def _never(layer: object) -> bool:
  return False


def _keep(layer: object, value: object) -> None:
  vars(layer)["use_cudnn"] = value


_T = TypeVar("_T")
# Folding stops at tensors of this many elements: what is larger is computed on the mesh.
_MOST_FOLDED = 2**22
# Operations whose result is not a function of their inputs, or is to be drawn by index.
_NOT_FOLDED = ("Random", "Stateless", "StatefulUniform", "Multinomial", "TensorList", "EmptyTensor")
# Maximum order of derivatives of functions under tf.custom_gradient.
_MOST_GRADIENTS = 2
_SHAPES = ("Shape", "ShapeN", "Size", "Rank", "VariableShape")


@dataclasses.dataclass(frozen=True)
class Result:
  """Placeholder of a tensor in the structure that a function returns.

  Attributes:
    number: index in `Program.outputs`.
  """

  number: int


@dataclasses.dataclass(frozen=True)
class Traced:
  """A function, traced.

  Attributes:
    program: its nodes. Its inputs are the tensors of the arguments, flat.
    variables: what it reads and assigns to, in the order of first use.
    structure: what it returned; a `Result` in place of each tensor.
  """

  program: Program
  variables: tuple[VariableRecord, ...]
  structure: Any


def trace(
  fn: Callable[..., object],
  args: Sequence[object],
  kwargs: Mapping[str, object],
  paths: Mapping[int, tuple[str, bool]],
  fallback: bool = False,
  own_name: Callable[[str], str] = str,
) -> Traced:
  """Traces a function.

  Args:
    fn: a tf.function, or a callable.
    args: its arguments: structures of tf.TensorSpec and of Python values.
    kwargs: its keyword arguments, of the same kinds.
    paths: by the id of a tf.Variable its name, and whether it is trained; others have TensorFlow's.
    fallback: whether operations without a rule may be computed whole on each device.
    own_name: gives operations, and variables without a path, names of TensorFlow's without counters
      of the process.

  Raises:
    ShapeError: a tensor has no static shape.
    VariableError: the function makes a variable.
  """

  def run() -> tuple[Any, Program]:
    function = fn if hasattr(fn, "get_concrete_function") else tf.function(fn)
    concrete = _concrete(function, args, kwargs)
    results, structure = _results(concrete)
    specs = [s for s in tf.nest.flatten((args, kwargs)) if isinstance(s, tf.TensorSpec)]
    return structure, _Tracer(concrete, paths, fallback, own_name).program(results, specs)

  structure, program = _eagerly(run)
  used = dict.fromkeys(w.variable for w in program.wires if w.variable is not None)
  return Traced(program, tuple(used), structure)


def _eagerly(run: Callable[[], _T]) -> _T:
  """Runs a function eagerly, also while an outer function is traced; for constant folding."""
  if tf.executing_eagerly():
    return run()
  # A thread of its own has no graph around it. Within tf.init_scope no tape of the function's would
  # record, and its gradients would be None.
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    return thread.submit(contextvars.copy_context().run, run).result()


def _concrete(function: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
  """The concrete function for arguments.

  Raises:
    VariableError: it makes a variable.
  """
  refused: list[str] = []

  def refuse(next_creator: object, **settings: Any) -> Any:
    # The traceback of an operation made here: Python's own shows what AutoGraph generated.
    name = settings.get("name") or "(no name)"
    refused.append(
      f"from_tensorflow: the function makes the variable {name!r} when it is called "
      f"({python_line(tf.no_op().traceback)}); make it before: build the model, or call it once"
    )
    raise VariableError(refused[-1])

  try:
    with tf.variable_creator_scope(refuse), without_cudnn():
      return function.get_concrete_function(*args, **kwargs)
  except Exception:
    if not refused:
      raise
  # AutoGraph, and Keras, raised another one, of many lines.
  raise VariableError(refused[0])


def _results(concrete: Any) -> tuple[list[tf.Tensor], Any]:
  """The tensors that a concrete function returns, and its structure with a `Result` for each.

  tf.IndexedSlices, as gradients of tables are, become the tensors that they stand for: an operation
  of the graph more for each.

  Raises:
    UnsupportedError: it returns something of several tensors that is no tensor.
  """
  given, results = list(concrete.outputs), list[tf.Tensor]()

  def place(x: object) -> Any:
    parts = [p for p in tf.nest.flatten(x, expand_composites=True) if _is_tensor(p)]
    tensors = [given.pop(0) for _ in parts]
    if not tensors:
      return x
    if isinstance(x, (tf.IndexedSlices, tf.IndexedSlicesSpec)) and len(tensors) == 3:
      with concrete.graph.as_default():
        tensors = [tf.convert_to_tensor(tf.IndexedSlices(*tensors))]
    elif not _is_tensor(x):
      kind = type(x).__name__.removesuffix("Spec")
      raise UnsupportedError(
        f"from_tensorflow: the function returns a {kind}"
        + (" without dense_shape" * (kind == "IndexedSlices"))
        + ", which is no tensor; return one: tf.convert_to_tensor, tf.sparse.to_dense, "
        "to_tensor of a RaggedTensor"
      )
    results.extend(tensors)
    return Result(len(results) - 1)

  return results, tf.nest.map_structure(place, concrete.structured_outputs)


def _is_unknown(tensor: tf.Tensor) -> bool:
  """True if the shape of a tensor is not fully known."""
  return tensor.dtype not in (tf.variant, tf.resource) and not tensor.shape.is_fully_defined()


def _is_tensor(x: object) -> bool:
  return isinstance(x, (tf.Tensor, tf.TensorSpec))


@dataclasses.dataclass(frozen=True)
class _Around:
  """A function whose body is being traced.

  Attributes:
    function: its definition.
    wires: by the names of tensors in the graph of its body.
    arguments: the names of the tensors that stand for its arguments.
    names: by the names that tensors had where the function was made those in the graph.
  """

  function: Any
  wires: dict[str, Wire]
  arguments: Sequence[str]
  names: Mapping[str, str]


class _Tracer:
  """Turns the operations of a concrete function into nodes."""

  def __init__(
    self,
    concrete: Any,
    paths: Mapping[int, tuple[str, bool]],
    fallback: bool,
    own_name: Callable[[str], str],
  ):
    self._concrete = concrete
    self._fallback = fallback
    self._own_name = own_name
    self._line_of_call = "no Python line"
    self._operation_of_call = ""
    self._gradients_around = 0
    self._library = FunctionLibrary(concrete.graph)
    # Functions being traced: wires of the outermost, and the enclosing bodies, outermost first.
    self._outermost: dict[str, Wire] = {}
    self._around: list[_Around] = []
    self._used_inside: set[Wire] = set()
    self._records: dict[int, VariableRecord] = {}
    taken: set[str] = set()
    for v in concrete.variables:
      path, trainable = paths.get(id(v), (own_name(v.name.split(":")[0]), bool(v.trainable)))
      unique = path
      while unique in taken:
        unique = f"{path}_{len(taken)}"
      taken.add(unique)
      self._records[id(v.handle)] = VariableRecord(unique, v, trainable)

  def program(self, results: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]) -> Program:
    """The whole function.

    Args:
      results: tensors of its graph.
      specs: of its arguments, flat; it may have been traced for more sizes than these.
    """
    concrete = self._concrete
    n = len(concrete.inputs) - len(concrete.captured_inputs)
    arguments = [wire_of(t) for t in concrete.inputs[:n]]
    for wire, spec in zip(arguments, specs):
      wire.shape = tuple(spec.shape.as_list())
    captured = [
      self._captured(t, value) for t, value in zip(concrete.inputs[n:], concrete.captured_inputs)
    ]
    wires = self._outermost
    wires.update(zip((t.name for t in concrete.inputs), [*arguments, *captured]))
    nodes = self._nodes(in_order(concrete.graph.get_operations()), wires)
    outputs = [wires[t.name] for t in results]
    needed = _needed(nodes, [*outputs, *self._used_inside])
    program = Program(tuple(arguments), tuple(outputs), needed)
    check_shapes(program)
    return program

  def _captured(self, tensor: tf.Tensor, value: Any) -> Wire:
    """Wire of a captured tensor or variable."""
    record = self._records.get(id(value))
    if record is not None:
      shape = tuple(record.variable.shape.as_list())
      return Wire(record.path, shape, record.variable.dtype, variable=record)
    wire = wire_of(tensor)
    if value.dtype not in (tf.resource, tf.variant):
      wire.static = np.asarray(value.numpy())
      wire.shape = wire.static.shape
    else:
      wire.resource = value
    return wire

  def _nodes(self, operations: Iterable[tf.Operation], wires: dict[str, Wire]) -> list[Node]:
    """The nodes of operations; enters their outputs into `wires`."""
    nodes: list[Node] = []
    for op in operations:
      if all(t.name in wires for t in op.outputs) and op.outputs:
        continue  # An argument.
      inputs = [wires[t.name] for t in op.inputs]
      if op.type == "Identity" and (inputs[0].variable or inputs[0].dtype == tf.variant):
        wires[op.outputs[0].name] = inputs[0]  # A handle, or a list, passed on.
        continue
      if self._library.is_call(op):
        outer, self._operation_of_call = self._operation_of_call, self._operation_of_call or op.name
        program = self._body(self._library.called(op), self._line(op), inputs)
        self._operation_of_call = outer
        nodes += program.nodes
        wires.update(zip((t.name for t in op.outputs), program.outputs))
        continue
      outputs = [wire_of(t) for t in op.outputs]
      wires.update(zip((t.name for t in op.outputs), outputs))
      if op.type in LOOPS:  # A variable that a loop returns is the one that it was given.
        wires.update((t.name, w) for t, w in zip(op.outputs, inputs) if w.variable)
      node = self._node(op, inputs, outputs)
      node.may_replicate = self._fallback
      note_lists(node)
      if any(_is_unknown(t) for t in (*op.inputs, *op.outputs)):
        if node.functions:
          note_shapes_of_programs(node)
        else:
          self._library.note_shapes(op, node)
      if op.type == "IdentityN" and GRADIENT in op.node_def.attr:
        # A gradient may have one of its own, without end: that of a sum over replicas is one.
        node.no_gradient = "a gradient of a gradient of a gradient is not followed"
        if self._gradients_around < _MOST_GRADIENTS:
          self._with_gradient(op, node, wires)
      if node.functions and self._library.has_own_gradients:
        all_programs(node)  # Now: gradients in there may use what would seem not to be needed.
      if not _fold(node):
        nodes.append(node)
    return nodes

  def _node(self, op: tf.Operation, inputs: list[Wire], outputs: list[Wire]) -> Node:
    functions: dict[str, Body] = {}
    attributes: dict[str, Any] = {}
    for attr in op.op_def.attr:
      if attr.type == "func":
        called = self._library.named(op.get_attr(attr.name).name)
        functions[attr.name] = functools.partial(self._body, called, self._line(op))
      elif attr.type == "list(func)":
        for i, f in enumerate(op.get_attr(attr.name)):
          called = self._library.named(f.name)
          functions[f"{attr.name}_{i}"] = functools.partial(self._body, called, self._line(op))
      else:
        attributes[attr.name] = op.get_attr(attr.name)
    arguments: list[tuple[str, int | None]] = []
    for arg in op.op_def.input_arg:
      count: int | None = None
      if arg.number_attr:
        count = attributes[arg.number_attr]
      elif arg.type_list_attr:
        count = len(attributes[arg.type_list_attr])
      arguments.append((arg.name, count))
    settable = _settable(op.type)
    # tf.raw_ops has other names for some inputs: of Split "axis" for "split_dim"; and for an
    # attribute: of Squeeze "axis" for "squeeze_dims". Others follow from the inputs.
    given = {name for name, _ in arguments} | set(attributes)
    renamed = iter([name for name in settable if name not in given])
    arguments = [(n if n in settable else next(renamed, n), count) for n, count in arguments]
    types = ("type_attr", "number_attr", "type_list_attr")
    follow = {getattr(arg, t) for arg in op.op_def.input_arg for t in types}
    for name in [n for n in attributes if n not in settable and n not in follow]:
      attributes[next(renamed, name)] = attributes[name]
    return Node(
      op.type,
      self._own_name(op.name),
      tuple(inputs),
      tuple(outputs),
      attributes,
      functions,
      self._line(op),
      arguments,
      frozenset(settable) - {name for name, _ in arguments},
      is_stateful=op.op_def.is_stateful,
      operation=self._operation_of_call or op.name,
    )

  def _with_gradient(self, op: tf.Operation, node: Node, wires: dict[str, Wire]) -> None:
    """Traces the gradient of a function under tf.custom_gradient, which ends in an IdentityN."""
    graph = op.graph
    done = len(graph.get_operations())
    floating = [i for i, y in enumerate(op.outputs) if y.dtype.is_floating]
    # A result may be an argument as it is: it stands twice among the inputs, with one gradient. And
    # inputs may depend on each other; each has the gradient of this operation alone.
    distinct = list({t.name: t for t in op.inputs}.values())
    with graph.as_default():
      ys = [op.outputs[i] for i in floating]
      dys = [tf.raw_ops.Placeholder(dtype=y.dtype, shape=y.shape) for y in ys]
      try:
        grads = tf.gradients(ys, distinct, dys, stop_gradients=distinct)
      except Exception as e:  # noqa: BLE001 - of the user's function; nobody may want its gradient
        node.no_gradient = f"{type(e).__name__}: {e}".splitlines()[0]
        return
    inner = dict(wires)
    for i, dy in zip(floating, dys):  # TensorFlow may not know its shape.
      inner[dy.name] = Wire(dy.name, node.outputs[i].shape, dy.dtype)
    for value, t in getattr(graph, "captures", ()):
      if t.name not in inner:
        inner[t.name] = self._captured_by_gradient(t, value, node)
    self._gradients_around += 1
    nodes = self._nodes(graph.get_operations()[done:], inner)
    self._gradients_around -= 1
    names = [t.name for t in op.inputs]
    numbers = [names.index(t.name) for t, g in zip(distinct, grads) if g is not None]
    results = [inner[tf.convert_to_tensor(g).name] for g in grads if g is not None]
    arguments = [inner[dy.name] for dy in dys]
    kept = _needed(nodes, results)
    made = {*arguments, *(w for n in kept for w in n.outputs)}
    read = [*(w for n in kept for w in n.inputs), *results]
    used = [w for w in dict.fromkeys(read) if w not in made and w.static is None]
    program = Program((*arguments, *used), tuple(results), kept)
    node.no_gradient = ""
    node.gradient = CustomGradient(program, tuple(floating), tuple(numbers), len(node.inputs))
    # What it uses of the forward pass is kept.
    node.inputs = (*node.inputs, *(w for w in used if w not in node.inputs))

  def _captured_by_gradient(self, tensor: tf.Tensor, value: Any, node: Node) -> Wire:
    """The wire of something that a gradient takes from outside, or from where it was made."""
    if not hasattr(value, "graph") or hasattr(value, "numpy"):
      return self._captured(tensor, value)
    if value.graph is self._concrete.graph and value.name in self._outermost:
      self._used_inside.add(self._outermost[value.name])
      return self._outermost[value.name]
    for around in reversed(self._around):
      if is_graph_of(value.graph, around.function):
        numbers = [i for i, t in enumerate(value.graph.inputs) if t.name == value.name]
        name = around.arguments[numbers[0]] if numbers else around.names[value.name]
        self._used_inside.add(around.wires[name])
        return around.wires[name]
    raise UnsupportedError(
      f"from_tensorflow: the gradient under tf.custom_gradient at {node} uses {value.name} of "
      "another function; give it to the function as an argument"
    )

  def _line(self, op: tf.Operation) -> str:
    """The line that made an operation; in the body of a function, that of the call."""
    frames = op.traceback
    return python_line(frames) if frames else self._line_of_call

  def _body(self, function: Any, line: str, inputs: Sequence[Wire]) -> Program:
    """The program of a function of the library, for given inputs."""
    graph, arguments, results, names = self._library.imported(function, inputs)
    wires = dict(zip(arguments, inputs))
    before, self._line_of_call = self._line_of_call, line
    self._around.append(_Around(function, wires, arguments, names))
    nodes = self._nodes(graph.get_operations(), wires)
    self._around.pop()
    self._line_of_call = before
    outputs = [wires[name] for name in results]
    needed = _needed(nodes, [*outputs, *self._used_inside])
    return Program(tuple(inputs), tuple(outputs), needed)


def wire_of(tensor: tf.Tensor) -> Wire:
  """Makes the wire of a tensor; `check_shapes` reports an unknown shape later if it matters."""
  shape = tensor.shape
  known = tuple(shape.as_list()) if shape.rank is not None else (None,)
  return Wire(tensor.name, known, tensor.dtype)


@functools.cache
def _settable(op_type: str) -> tuple[str, ...]:
  """The parameters of the function of `tf.raw_ops`, in order."""
  function = getattr(tf.raw_ops, op_type, None)
  names = inspect.signature(function).parameters if function else ()
  return tuple(n for n in names if n != "name")


def _fold(node: Node) -> bool:
  """Computes a node whose inputs are known; returns whether it did."""
  if node.type == "Const":
    (out,) = node.outputs
    out.static = tf.make_ndarray(node.attributes["value"])
    out.shape = out.static.shape
    return True
  if node.type in _SHAPES:
    return _fold_shape(node)
  if node.type in LIST_SHAPES:
    return fold_list_shape(node)
  if node.type == "Placeholder" or node.is_stateful or not node.outputs or node.functions:
    return False
  if any(w.static is None for w in node.inputs) or any(t in node.type for t in _NOT_FOLDED):
    return False
  sizes = [np.prod([n or 0 for n in w.shape]) for w in node.outputs]
  if max(sizes) > _MOST_FOLDED or not hasattr(tf.raw_ops, node.type):
    return False
  arguments: dict[str, Any] = {k: v for k, v in node.attributes.items() if k in node.settable}
  with tf.init_scope():  # It may be imported while another function is traced.
    values = [tf.constant(w.static, w.dtype) for w in node.inputs]
    for name, count in node.arguments:
      arguments[name] = values.pop(0) if count is None else values[:count]
      del values[: count or 0]
    results = getattr(tf.raw_ops, node.type)(**arguments)
  for w, y in zip(node.outputs, results if isinstance(results, (tuple, list)) else [results]):
    w.static = np.asarray(y.numpy())
    w.shape = tuple(y.shape.as_list())
  return True


def _fold_shape(node: Node) -> bool:
  """Folds Shape, Size and Rank, if the static shape is known; returns whether it did."""
  if any(None in w.shape for w in node.inputs):
    return False
  for w, out in zip(node.inputs, node.outputs):
    dtype = out.dtype.as_numpy_dtype
    if node.type == "Size":
      out.static = np.array(np.prod(w.shape, dtype=np.int64), dtype)
    elif node.type == "Rank":
      out.static = np.array(w.rank, dtype)
    else:
      out.static = np.array(w.shape, dtype)
    out.shape = out.static.shape
  return True


def without_changes(program: Program) -> Program:
  """A program without the changes of variables, but for those that its results depend on."""
  nodes = _needed(program.nodes, program.outputs, keep_changes=False)
  return dataclasses.replace(program, nodes=nodes)


def _needed(
  nodes: Sequence[Node], outputs: Sequence[Wire], keep_changes: bool = True
) -> tuple[Node, ...]:
  """Removes nodes that neither lead to an output nor change a variable (dead code)."""
  needed = set(outputs)
  kept = []
  for node in reversed(nodes):
    if (keep_changes and changes_variables(node)) or any(w in needed for w in node.outputs):
      kept.append(node)
      needed.update(node.inputs)
  return tuple(with_parts(kept[::-1], outputs))
