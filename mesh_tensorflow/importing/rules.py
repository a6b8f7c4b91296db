"""Base classes of the rules that translate TensorFlow's operations to named dimensions.

A family is a file of `families`, which registers a class for each kind of operation:

    @rule("Softmax", "LogSoftmax")
    class Softmax(Labelled):
      def labels(self, node):
        kept, last = tuple(range(node.inputs[0].rank - 1)), "last"
        return Labels([(*kept, last)], [(*kept, last)])

      def compute(self, node, xs, dims, make):
        fn = softmax if node.type == "Softmax" else log_softmax
        return [fn(xs[0], dims["last"])]

Most are `Labelled`: each axis of each operand has a label, as in an einsum; axes of one label are
one dimension. From that follow the joins of axes, and the operands that `compute` gets: renamed
where they have to be. `Slicewise` does without `compute`: TensorFlow's own operation, and its
gradient, run on the slices, which must be whole along the labels of `Labels.whole`; so an operation
that works on each example, say, is a few lines, and right on every layout. Anything else is a
`Rule` with `relate` and `build` of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import tensorflow as tf

from mesh_tensorflow.errors import UnsupportedError
from mesh_tensorflow.importing.axes import Axes
from mesh_tensorflow.importing.nodes import Node, Program, VariableRecord, Wire
from mesh_tensorflow.importing.value import AxisDims, Value, flat
from mesh_tensorflow.operations.slicewise import slicewise
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Mesh, Tensor

Label = Hashable
Dims = tuple[Dimension, ...]


class Construction(Protocol):
  """The program of named operations that is being made; see `building.Builder`."""

  mesh: Mesh

  def axes_of(self, wire: Wire) -> AxisDims:
    """Dimensions of each axis of a wire."""

  def value(self, wire: Wire, axes: AxisDims | None = None) -> Value:
    """Value of a wire, renamed to `axes` (default: `axes_of`); static ones become constants."""

  def read(self, variable: VariableRecord) -> Tensor:
    """Value of a variable after the assignments so far, with all axes, also those of size 1."""

  def assign(self, variable: VariableRecord, value: Value) -> None:
    """Assigns to a variable; later reads see the value."""

  def inside(
    self, changed: Iterable[VariableRecord] = ()
  ) -> contextlib.AbstractContextManager[None]:
    """Context manager for the body of a loop or a branch: variables read inside stay inside.

    Args:
      changed: variables that another iteration may have assigned.
    """

  def is_needed(self, wire: Wire) -> bool:
    """True if something uses an output; an unused one need not be computed."""

  def run(self, program: Program, inputs: Sequence[Value | None]) -> list[Value]:
    """Builds the program of a function's body; None for inputs that are variables."""


class Rule:
  """Import rule for operations of some types; a rule has no state."""

  def relate(self, node: Node, axes: Axes) -> None:
    """Joins the axes of inputs and outputs that are one dimension.

    Args:
      node: the operation.
      axes: the classes of axes.
    """

  def build(self, node: Node, make: Construction) -> Sequence[Value | None]:
    """Makes mtf operations.

    Args:
      node: the operation.
      make: the program that is being made.

    Returns:
      A `Value` for each output, of any dimensions: the caller renames them to
      `make.axes_of(output)`. None for an output that is static, or a variable.
    """
    raise UnsupportedError(f"from_tensorflow: there is no way to build {node}")


@dataclasses.dataclass(frozen=True)
class Labels:
  """The axes of an operation, named as in an einsum.

  Attributes:
    inputs: for each input a label for each axis; None for an input that is not an operand (the
      reduction indices, say). Axes of size 1 may have a label that is wider elsewhere
      (broadcasting).
    outputs: for each output a label for each axis.
    whole: labels along which the operation needs all positions: a layout does not split them in
      there, whatever splits them before and behind.
  """

  inputs: Sequence[Sequence[Label] | None]
  outputs: Sequence[Sequence[Label]]
  whole: Collection[Label] = ()


class Labelled(Rule):
  """An operation whose axes have labels; see `Labels`."""

  def labels(self, node: Node) -> Labels:
    """The labels of the operation's axes."""
    raise NotImplementedError

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    """Makes mtf operations of operands whose axes are the dimensions of their labels.

    Args:
      node: the operation.
      xs: for each input an `mtf.Tensor` without dimensions of size 1, in any order of dimensions;
        None for inputs without labels.
      dims: the dimensions of each label: none for size 1, as a rule one, several where a reshape
        joined axes.
      make: the program that is being made.

    Returns:
      For each output a tensor of the dimensions of its labels, in any order.
    """
    raise NotImplementedError

  def relate(self, node: Node, axes: Axes) -> None:
    labels = self.labels(node)
    for places in _places(node, labels).values():
      # Constants are shared between operations that have nothing else in common.
      axes.join(*[(w, i) for w, i in places if w.static is None])

  def build(self, node: Node, make: Construction) -> Sequence[Value | None]:
    labels = self.labels(node)
    dims = label_dims(node, labels, make)
    xs = [
      None if names is None else make.value(wire, _axes(wire, names, dims)).tensor
      for wire, names in zip(node.inputs, labels.inputs)
    ]
    outputs = self.compute(node, xs, dims, make)
    return [
      Value(y, _axes(wire, names, dims))
      for y, wire, names in zip(outputs, node.outputs, labels.outputs)
    ]


class Slicewise(Labelled):
  """Runs TensorFlow's own operation on the slices; see `Labels.whole`.

  What the slices of a label that is split hold must be a function of these positions alone. A
  gradient is TensorFlow's, too.
  """

  def labels(self, node: Node) -> Labels:
    raise NotImplementedError

  def run(self, node: Node) -> Callable[..., Any]:
    """Returns the function of the slices of inputs with labels, in TensorFlow's axis order.

    Sizes along split labels are those of the slices; sizes in attributes or other inputs have to
    be adapted to them. The default is the operation itself.
    """
    return raw_operation(node, [n is not None for n in self.labels(node).inputs])

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    labels = self.labels(node)
    whole = {d for label in labels.whole for d in dims[label]}
    ins = [
      _axes(wire, names, dims)
      for wire, names in zip(node.inputs, labels.inputs)
      if names is not None
    ]
    outs = [_axes(wire, names, dims) for wire, names in zip(node.outputs, labels.outputs)]
    operands = [Value(x, a).ordered() for x, a in zip([x for x in xs if x is not None], ins)]
    return on_slices(
      self.run(node),
      operands,
      ins,
      outs,
      [w.dtype for w in node.outputs],
      [d for axes in ins for d in flat(axes) if d not in whole],
      name=node.type,
    )


def on_slices(
  fn: Callable[..., Any],
  xs: Sequence[Tensor],
  ins: Sequence[AxisDims],
  outs: Sequence[AxisDims],
  dtypes: Sequence[tf.DType],
  kept: Sequence[Dimension],
  name: str,
) -> tuple[Tensor, ...]:
  """`mtf.slicewise` of a function of tensors with TensorFlow's axes.

  Args:
    fn: a function of one tf.Tensor for each x, of the rank of its axes; returns one, or several.
    xs: tensors whose dimensions are those of `ins`, in order.
    ins: for each x the dimensions of each axis.
    outs: for each output the dimensions of each axis.
    dtypes: dtypes of the outputs.
    kept: dimensions along which `fn` may be run in parts.
    name: of the operation.

  Returns:
    One tensor for each output, of the dimensions of its axes, in order.
  """

  def run(*slices: tf.Tensor) -> tuple[tf.Tensor, ...]:
    sizes = {d: n for x, axes in zip(slices, ins) for d, n in zip(flat(axes), x.shape)}
    shaped = [
      _reshaped(x, [math.prod(sizes[d] for d in dims) for dims in axes])
      for x, axes in zip(slices, ins)
    ]
    results = fn(*shaped)
    several = isinstance(results, (tuple, list))  # raw operations return a namedtuple
    return tuple(
      _reshaped(y, [sizes.get(d, d.size) for d in flat(axes)])
      for y, axes in zip(results if several else [results], outs)
    )

  made: tuple[Tensor, ...] = slicewise(
    run, list(xs), [Shape(flat(axes)) for axes in outs], list(dtypes), list(kept), name=name
  )
  return made


def _reshaped(x: tf.Tensor, shape: list[int]) -> tf.Tensor:
  known = x.shape.is_fully_defined()
  if known and x.shape.as_list() == shape:
    return x
  if known and 0 in shape:
    # What a kernel leaves out (vectors beside eigenvalues) may have another shape than it says.
    return tf.zeros(shape, x.dtype)
  return tf.reshape(x, shape)


def raw_operation(node: Node, is_operand: Sequence[bool]) -> Callable[..., Any]:
  """The operation of a node as a function of its operands.

  Args:
    node: the operation.
    is_operand: for each input whether it is an argument; others are static, and filled in.
  """
  return lambda *xs: call_raw(node, _merged(node, is_operand, xs))


def _merged(node: Node, is_operand: Sequence[bool], xs: Sequence[tf.Tensor]) -> list[Any]:
  operands = iter(xs)
  return [
    next(operands) if ok else tf.constant(wire.static, wire.dtype)
    for ok, wire in zip(is_operand, node.inputs)
  ]


def call_raw(node: Node, inputs: Sequence[tf.Tensor], **changed: Any) -> Any:
  """Runs `tf.raw_ops.<type>` with the attributes of a node.

  Args:
    node: the operation.
    inputs: tf.Tensors, one for each input.
    **changed: attributes that are others than the node's.
  """
  arguments: dict[str, Any] = {}
  remaining = list(inputs)
  for name, count in node.arguments:
    arguments[name] = remaining.pop(0) if count is None else remaining[:count]
    if count is not None:
      del remaining[:count]
  attributes = {k: v for k, v in node.attributes.items() if k in node.settable}
  return getattr(tf.raw_ops, node.type)(**arguments, **{**attributes, **changed})


def label_dims(node: Node, labels: Labels, make: Construction) -> dict[Label, Dims]:
  """Dimensions of each label while an operation is built; no two labels share one.

  They are those of the output, or else of the first operand. A label gets a new dimension, which
  no layout splits, if others have taken all of these, or if it has to be whole.
  """
  chosen: dict[Label, Dims] = {}
  taken: set[Dimension] = set()
  for label, places in _places(node, labels).items():
    wide = [(w, i) for w, i in places if w.shape[i] != 1]
    if not wide:
      chosen[label] = ()
      continue
    wire, position = wide[0]
    own: Dims = (Dimension(f"_{node.type}_{len(chosen)}", wire.shape[position]),)
    candidates = [make.axes_of(w)[i] for w, i in wide if w.static is None]
    free = [d for d in candidates if not taken & set(d)]
    chosen[label] = free[0] if free and label not in labels.whole else own
    taken |= set(chosen[label])
  return chosen


def _places(node: Node, labels: Labels) -> dict[Label, list[tuple[Wire, int]]]:
  """Wires and axis numbers of each label: in outputs, then in inputs."""
  found: dict[Label, list[tuple[Wire, int]]] = {}
  operands = zip(node.inputs, labels.inputs)
  for wire, names in [*zip(node.outputs, labels.outputs), *operands]:
    for i, name in enumerate(names or ()):
      found.setdefault(name, []).append((wire, i))
  return found


def _axes(wire: Wire, names: Sequence[Label], dims: Mapping[Label, Dims]) -> AxisDims:
  return tuple(() if n == 1 else dims[name] for n, name in zip(wire.shape, names))


_RULES: dict[str, Rule] = {}
_T = TypeVar("_T", bound=type[Rule])


def rule(*types: str) -> Callable[[_T], _T]:
  """Decorator: the class is the rule of these types of operations."""

  def register(cls: _T) -> _T:
    instance = cls()
    for t in types:
      _RULES[t] = instance
    return cls

  return register


def registered_rule(op_type: str) -> Rule | None:
  """The rule of a type of operations, if there is one."""
  return _RULES.get(op_type)
