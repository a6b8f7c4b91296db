"""Builds operations on named dimensions from a traced program."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import tensorflow as tf

from mesh_tensorflow.errors import UnsupportedError
from mesh_tensorflow.importing.axes import Axes, Factor
from mesh_tensorflow.importing.nodes import Node, Program, VariableRecord, Wire
from mesh_tensorflow.importing.replicating import rule_of
from mesh_tensorflow.importing.value import AxisDims, Value, of_static
from mesh_tensorflow.operations.cross_mesh import stage
from mesh_tensorflow.operations.reshape import reshape
from mesh_tensorflow.operations.variables import Variable, assign, get_variable, read_variable
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Mesh, Tensor

_ILLEGAL = re.compile(r"[^\w./-]")


@dataclasses.dataclass(frozen=True)
class Dimensioned:
  """Dimensions of the axes of a program.

  Attributes:
    axes: equivalence classes of axes.
    dims: the dimension of each factor of an axis.
    variables: shape of each variable, including dimensions of size 1.
  """

  axes: Axes
  dims: Mapping[Factor, Dimension]
  variables: Mapping[VariableRecord, Shape]

  def of(self, wire: Wire) -> AxisDims:
    """Dimensions of each axis of a wire."""
    return tuple(tuple(self.dims[f] for f in self.axes.factors(wire, i)) for i in range(wire.rank))


def full_shape(axes: AxisDims) -> Shape:
  """Shape with one dimension per axis: a new one of size 1 for none, their product for several."""
  dims: list[Dimension] = []
  for i, of_axis in enumerate(axes):
    if len(of_axis) == 1:
      dims.append(of_axis[0])
    elif of_axis:
      size = 1
      for d in of_axis:
        size *= d.size
      dims.append(Dimension("*".join(d.name for d in of_axis), size))
    else:
      dims.append(Dimension(f"one.{i}", 1))
  return Shape(dims)


@dataclasses.dataclass(frozen=True)
class Stages:
  """Stages of a pipeline that the operations of a program are on.

  Attributes:
    nodes: the name of the mesh of each node; others are where their inputs are.
    variables: by path the name of the mesh of each variable, where it is made.
  """

  nodes: Mapping[Node, str] = dataclasses.field(default_factory=dict)
  variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


# Makes the tensor that a program finds in a variable, from a function that returns its value.
Start = Callable[[Callable[[], Tensor], Shape, Mesh, tf.DType], Tensor]


class Builder:
  """Makes the operations of one call of an imported function; a `rules.Construction`.

  Args:
    mesh: where.
    dimensioned: the dimensions.
    made_variable: callback for each mtf `Variable` that is created or found.
    initial_value: the value of a tf.Variable when that of mtf is created.
    stages: the meshes that operations and variables are on.
    held: by path the variables that keep their values: the program finds in them what this makes,
      and its changes of them are `changes`.

  Attributes:
    changes: by path the values that the program gives to variables that are held.
  """

  def __init__(
    self,
    mesh: Mesh,
    dimensioned: Dimensioned,
    made_variable: Callable[[VariableRecord, Variable], None],
    initial_value: Callable[[tf.Variable], tf.Tensor],
    stages: Stages | None = None,
    held: Mapping[str, Start] | None = None,
  ):
    self.mesh = mesh
    self._dimensioned = dimensioned
    self._made_variable = made_variable
    self._initial_value = initial_value
    self._values: dict[Wire, Value] = {}
    self._variables: dict[VariableRecord, Variable] = {}
    self._assigned: set[VariableRecord] = set()
    self._read: dict[VariableRecord, Tensor] = {}
    self._needed: set[Wire] = set()
    self._stages = Stages() if stages is None else stages
    self._held = {} if held is None else held
    self.changes: dict[str, Tensor] = {}

  def axes_of(self, wire: Wire) -> AxisDims:
    """See `rules.Construction`."""
    return self._dimensioned.of(wire)

  def value(self, wire: Wire, axes: AxisDims | None = None) -> Value:
    """See `rules.Construction`."""
    if axes is None:
      axes = self.axes_of(wire)
    if wire.static is not None:
      return of_static(self.mesh, wire.static, axes, wire.dtype)
    return self._values[wire].with_axes(axes)

  def read(self, variable: VariableRecord) -> Tensor:
    """See `rules.Construction`."""
    if variable not in self._read and variable.path in self._held:
      shape = self._dimensioned.variables[variable]
      start = self._held[variable.path]
      dtype = variable.variable.dtype
      self._read[variable] = start(lambda: self._variable(variable).value, shape, self.mesh, dtype)
    if variable not in self._read:
      op = self._variable(variable)
      self._read[variable] = read_variable(op) if variable in self._assigned else op.value
    return self._read[variable]

  def assign(self, variable: VariableRecord, value: Value) -> None:
    """See `rules.Construction`."""
    if variable.path in self._held:
      tensor = reshape_to(value, self._dimensioned.variables[variable])
      self._read[variable] = self.changes[variable.path] = tensor
      return
    op = self._variable(variable)
    tensor = reshape_to(value, op.shape)
    with stage(op.mesh):  # It brings the value there.
      assign(op, tensor, name="assign")
    self._assigned.add(variable)
    self._read.pop(variable, None)

  def _variable(self, record: VariableRecord) -> Variable:
    if record not in self._variables:
      original = record.variable
      with scope.outside_all_scopes(), self._on(self._stages.variables.get(record.path)):
        tensor = get_variable(
          self.mesh,
          record.path,
          self._dimensioned.variables[record],
          dtype=original.dtype,
          initializer=lambda *_: self._initial_value(original),
          trainable=record.trainable,
        )
      op = tensor.operation
      assert isinstance(op, Variable)
      self._variables[record] = op
      # A call before this one, in the same graph, may have assigned to it.
      if any(op in getattr(other, "variables", ()) for other in self.mesh.graph.operations):
        self._assigned.add(record)
      self._made_variable(record, op)
    return self._variables[record]

  @contextlib.contextmanager
  def inside(self, changed: Iterable[VariableRecord] = ()) -> Iterator[None]:
    """See `rules.Construction`."""
    before = dict(self._read)
    for variable in changed:
      self._assigned.add(variable)
      self._read.pop(variable, None)
    yield
    # Values read inside are invalid outside, and variables assigned inside are read again.
    self._read = {v: x for v, x in before.items() if self._read.get(v) is x}

  @staticmethod
  def _on(mesh: str | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if mesh is None else stage(mesh)

  def is_needed(self, wire: Wire) -> bool:
    """See `rules.Construction`."""
    return wire in self._needed

  def run(self, program: Program, inputs: Sequence[Value | None]) -> list[Value]:
    """See `rules.Construction`."""
    self._needed.update(program.outputs, *(node.inputs for node in program.nodes))
    for wire, value in zip(program.inputs, inputs):
      if value is not None and wire.static is None:
        self._values[wire] = value.with_axes(self.axes_of(wire))
    for node in program.nodes:
      # Reports, errors and random numbers go by these names.
      name = _ILLEGAL.sub("_", node.name)
      with scope.variable_scope(name), self._on(self._stages.nodes.get(node)):
        for wire, value in zip(node.outputs, rule_of(node).build(node, self)):
          if value is not None:
            self._enter(node, wire, value)
    return [self.value(w) for w in program.outputs]

  def _enter(self, node: Node, wire: Wire, value: Value) -> None:
    # A rule that adds up int8 in int8 would be silent. Lists of tensors are tensors here.
    if value.tensor.dtype != wire.dtype and wire.dtype != tf.variant:
      raise UnsupportedError(
        f"from_tensorflow: the rule of {node} makes {value.tensor.dtype.name}, and "
        f"TensorFlow {wire.dtype.name}"
      )
    self._values[wire] = value.with_axes(self.axes_of(wire))


def reshape_to(value: Value, shape: Shape) -> Tensor:
  """Reshapes a value to a tensor of one dimension per axis; see `full_shape`."""
  tensor = value.ordered()
  return tensor if tensor.shape == shape else reshape(tensor, shape)
