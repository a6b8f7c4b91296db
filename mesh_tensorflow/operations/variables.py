"""Variables, the operations that read and assign them, and what is ordered after those."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from mesh_tensorflow.arguments import kinds
from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.kinds import DTypeLike
from mesh_tensorflow.errors import ArgumentError, DTypeError, GraphError, ShapeError, VariableError
from mesh_tensorflow.meshes.contract import LaidOutVariable
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LazyLaidOutTensor
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.remade_stores import Life
from mesh_tensorflow.meshes.store import StoredVariable
from mesh_tensorflow.numerics import initializers
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.dimensions import Shape, ShapeLike, convert_to_shape
from mesh_tensorflow.program.graph import (
  Graph,
  Mesh,
  Operation,
  Tensor,
  check_one_graph,
  is_in_stage,
)
from mesh_tensorflow.program.operators import provide, provided

__all__ = [
  "Assign",
  "Depend",
  "ReadVariable",
  "Variable",
  "VariableDType",
  "assign",
  "assign_add",
  "assign_add_slice",
  "assign_slice",
  "assign_sub",
  "assign_sub_slice",
  "depend",
  "get_variable",
  "read_variable",
]


class VariableDType:
  """The three dtypes of a variable.

  Args:
    master_dtype: dtype in checkpoints.
    slice_dtype: dtype in which it is kept and updated; the master's by default.
    activation_dtype: dtype of the `Tensor` that computations see; the master's by default.
  """

  @checked
  def __init__(
    self,
    master_dtype: DTypeLike = tf.float32,
    slice_dtype: DTypeLike = None,
    activation_dtype: DTypeLike = None,
  ):
    if master_dtype is None:
      raise DTypeError("VariableDType needs a master_dtype")
    self._master_dtype = tf.as_dtype(master_dtype)
    self._slice_dtype = self._master_dtype if slice_dtype is None else tf.as_dtype(slice_dtype)
    self._activation_dtype = (
      self._master_dtype if activation_dtype is None else tf.as_dtype(activation_dtype)
    )

  @property
  def master_dtype(self) -> tf.DType:
    """The dtype in checkpoints."""
    return self._master_dtype

  @property
  def slice_dtype(self) -> tf.DType:
    """The dtype in which it is kept and updated."""
    return self._slice_dtype

  @property
  def activation_dtype(self) -> tf.DType:
    """The dtype of the `Tensor` that computations see."""
    return self._activation_dtype

  def __eq__(self, other: object) -> bool:
    return isinstance(other, VariableDType) and self._key() == other._key()

  def __hash__(self) -> int:
    return hash(self._key())

  def __repr__(self) -> str:
    master, slice_, activation = (d.name for d in self._key())
    return f"VariableDType(master={master}, slice={slice_}, activation={activation})"

  def _key(self) -> tuple[tf.DType, tf.DType, tf.DType]:
    return (self._master_dtype, self._slice_dtype, self._activation_dtype)


# A dtype stands for all three.
VariableDTypeLike: TypeAlias = VariableDType | tf.DType


def convert_to_variable_dtype(dtype: object, of: str = "variable_dtype") -> VariableDType:
  """A `VariableDType` of what may be a dtype alone, which then is that of all three.

  Args:
    dtype: a `VariableDType` or a tf.DType.
    of: the argument's name, for the error.

  Raises:
    DTypeError: it is something else.
  """
  if isinstance(dtype, tf.DType):
    return VariableDType(dtype)
  if not isinstance(dtype, VariableDType):
    raise DTypeError(f"{of} must be a tf.DType or an mtf.VariableDType, got {dtype!r}")
  return dtype


@dataclasses.dataclass(frozen=True)
class Compact:
  """Form of a running average, or weight, whose values are rounded stochastically to fewer bits.

  Attributes:
    scales: the variables of the scales of 8 bits, see `compact.encode`; () of bfloat16.
  """

  scales: tuple[Variable, ...] = ()


class Variable(Operation):
  """A variable; its output is its value where it stands in the graph.

  Args:
    mesh: a `Mesh`.
    name: name within the open variable scope.
    shape: a `Shape`.
    dtype: a `VariableDType`.
    initializer: an `mtf.initializers.Initializer`, or what `convert_to_initializer` turns into one.
    trainable: whether it is among `graph.trainable_variables`.
    **kwargs: TF1's `collections`, `use_resource` and the like; they have no meaning here.
  """

  lowers_uneven_slices = True
  is_cloneable = False
  is_external = True

  def __init__(
    self,
    mesh: Mesh,
    name: str,
    shape: Shape,
    dtype: VariableDType,
    initializer: Any,
    trainable: bool,
    **kwargs: Any,
  ):
    del kwargs
    if not isinstance(dtype, VariableDType):
      raise DTypeError(f"variable {name}: dtype must be an mtf.VariableDType, got {dtype!r}")
    self.full_name = scope.full_variable_name(name)
    if self.full_name in mesh.graph.name_to_variable:
      raise VariableError(
        f"variable {self.full_name} exists in this graph with {shape}; mtf.get_variable returns it"
      )
    initializers.check_initializer(initializer, f"variable {self.full_name} {shape}", shape.size)
    super().__init__([], mesh, name=name)
    self._dtype = dtype
    self._trainable = trainable
    self._initializer = initializer
    # The variable whose slot this is: it is stored in shards along the same dimensions.
    self.sharded_as: Variable | None = None
    # Of a slot in bfloat16 or 8 bits, or a weight in bfloat16.
    self.compact: Compact | None = None
    self._stored: StoredVariable | None = None
    self._life: Life | None = None
    self._outputs = [Tensor(self, shape, dtype.activation_dtype, name=self.full_name + ":0")]
    self._initialize_all_dimensions_as_splittable()
    mesh.graph.register_variable(self)

  @property
  def value(self) -> Tensor:
    """The `Tensor` of the value where the variable stands in the graph."""
    return self._outputs[0]

  @property
  def shape(self) -> Shape:
    """Its `Shape`."""
    return self.value.shape

  @property
  def size(self) -> int:
    """Number of its elements."""
    return self.shape.size

  @property
  def dtype(self) -> VariableDType:
    """The `VariableDType`."""
    return self._dtype

  @property
  def master_dtype(self) -> tf.DType:
    """Its dtype in checkpoints."""
    return self._dtype.master_dtype

  @property
  def slice_dtype(self) -> tf.DType:
    """The dtype in which it is kept and updated."""
    return self._dtype.slice_dtype

  @property
  def activation_dtype(self) -> tf.DType:
    """The dtype of the `Tensor` that computations see."""
    return self._dtype.activation_dtype

  @property
  def trainable(self) -> bool:
    """True if it is among `graph.trainable_variables`."""
    return self._trainable

  @property
  def initializer(self) -> Any:
    """Initializer that it was made with."""
    return self._initializer

  def make_untrainable(self) -> None:
    """Marks it as not trained; see `Graph.make_variables_untrainable`."""
    self._trainable = False

  @property
  def master_device(self) -> str:
    """The device of its first slice: there is no copy of the whole besides the slices.

    Raises:
      VariableError: no `Lowering` has been made of it yet, so it is nowhere; or its mesh is in
        other workers.
    """
    slices = self.get_master().slices
    if not slices:
      raise VariableError(
        f"variable {self.full_name} has no slice in this process: {self.mesh!r} is in other workers"
      )
    device: str = slices[0].device
    return device

  def get_master(self) -> StoredVariable:
    """The values behind the variable, as its last lowering found or made them.

    Returns:
      The `StoredVariable`: `.numpy()` is the whole value, `.slices` are the tf.Variables.

    Raises:
      VariableError: no `Lowering` has been made of it yet, so it has no value.
    """
    if self._stored is None:
      raise VariableError(
        f"variable {self.full_name} has no value before an mtf.Lowering of its graph is made: "
        "only then is it known on which devices it is"
      )
    if self._life is not None:
      self._life.looked_at()
    return self._stored

  def assign_to_master(self, val: tf.Tensor) -> None:
    """Sets the whole value, on all devices.

    Args:
      val: an array or tf.Tensor of the variable's shape; cast to the slice dtype.

    Raises:
      VariableError: no `Lowering` has been made of it yet, or the shape differs.
    """
    self.get_master().assign(val)

  @property
  def has_gradient(self) -> bool:
    return False

  def __repr__(self) -> str:
    return f"Variable({self.value})"

  def lower(self, lowering: LoweringInProgress) -> None:
    laid_out = self.lay_out(lowering)
    if self.value in lowering.unread:
      impl = lowering.mesh_impl(self)
      value = LazyLaidOutTensor(
        lambda: laid_out.read(self.activation_dtype).to_laid_out_tensor(),
        impl.slice_shape(self.shape),
      )
      lowering.set_tensor_lowering(self.value, value)
    else:
      read_slices(lowering, self, self.value)

  def lay_out(self, lowering: LoweringInProgress) -> LaidOutVariable:
    """Makes the slices of this process, or finds them.

    Args:
      lowering: the lowering, whose `variables` get it.
    """
    impl = lowering.mesh_impl(self)
    stored = impl.variable_store.get(
      self.stored_impl(impl),
      self.full_name,
      self.shape,
      master_dtype=self.master_dtype,
      slice_dtype=self.slice_dtype,
      initializer=self._initializer,
      trainable=self._trainable,
    )
    if all(isinstance(s, tf.Variable) for s in stored.slices):  # a plan's slices hold nothing
      self._stored, self._life = stored, impl.variable_store.life
    scales = [lowering.variables[s] for s in self.compact.scales] if self.compact else []
    laid_out = lowering.variables[self] = LaidOutVariable(impl, stored, self, scales)
    kind = "trainable" if self._trainable else "untrainable"
    lowering.add_counter(f"variables/{kind}", self.size)
    return laid_out

  def stored_impl(self, impl: MeshImpl) -> MeshImpl:
    """The mesh with the layout in which the slices are stored.

    Args:
      impl: the mesh with the layout of the program.
    """
    if self.sharded_as is None:
      return impl.stored_layout(self.shape)
    return impl.stored_layout(self.shape, impl.shards_of(self.sharded_as.shape))


def read_slices(lowering: LoweringInProgress, variable: Variable, output: Tensor) -> None:
  """Sets `output` to the current value of the variable, in its activation dtype."""
  lowering.set_tensor_lowering(
    output,
    lowering.variables[variable].read(variable.activation_dtype, lowering.computed_before),
  )


def get_variable(
  mesh: Mesh,
  name: str,
  shape: ShapeLike,
  dtype: VariableDType | DTypeLike | None = tf.float32,
  master_dtype: DTypeLike = None,
  slice_dtype: DTypeLike = None,
  activation_dtype: DTypeLike = None,
  initializer: Any = None,
  trainable: bool = True,
  **kwargs: Any,
) -> Tensor:
  """The value of a variable, which is created if the graph does not have it.

  Args:
    mesh: a `Mesh`.
    name: name within the open variable scope (`mtf.variable_scope`).
    shape: its shape. If the graph has a variable of that name, it is returned as it is.
    dtype: a `VariableDType`, or a dtype that stands for all three (float32 in an `mtf.function`
      with a `precision`: but for the last), or None.
    master_dtype: dtype in checkpoints; this and the next two override `dtype`, unless that is a
      `VariableDType`.
    slice_dtype: dtype in which the slices are stored and updated.
    activation_dtype: dtype of the returned `Tensor`.
    initializer: an `mtf.initializers.Initializer`, one of TensorFlow's, a callable
      `fn(shape, dtype)`, a number, or None (Glorot-uniform; zeros for integers).
    trainable: whether it is among `graph.trainable_variables`.
    **kwargs: TF1's `collections` and the like; they have no meaning here.

  Returns:
    A `Tensor` of the activation dtype.

  Raises:
    DTypeError: `dtype` is something else.
    VariableError: the open scope's `reuse` forbids it; or the variable was made in another of
      TensorFlow's scopes.
  """
  if dtype is None:
    if master_dtype is None:
      raise DTypeError(f"get_variable {name!r}: give a dtype, or at least a master_dtype")
    dtype = VariableDType(master_dtype, slice_dtype, activation_dtype)
  elif isinstance(dtype, tf.DType):
    if activation_dtype is None and dtype == tf.float32:
      activation_dtype = mesh.graph.compute_dtype
    dtype = VariableDType(master_dtype or dtype, slice_dtype or dtype, activation_dtype or dtype)
  else:
    dtype = convert_to_variable_dtype(dtype, f"get_variable {name!r}: dtype")
  full_name = scope.full_variable_name(name)
  if _is_shared(mesh.graph, full_name):
    shared: Variable = mesh.graph.name_to_variable[full_name]
    return shared.outputs[0]
  return Variable(
    mesh, name, convert_to_shape(shape), dtype, initializer, trainable, **kwargs
  ).outputs[0]


def _is_shared(graph: Graph, full_name: str) -> bool:
  """True if the graph has the variable and it is shared; False if it is to be created.

  Raises:
    VariableError: the open variable scope, or one of TensorFlow's, says otherwise.
  """
  reuse = scope.current_reuse()
  if full_name not in graph.name_to_variable:
    if reuse is True:
      known = ", ".join(sorted(graph.name_to_variable)[:20]) or "none"
      raise VariableError(
        f"variable {full_name} does not exist, but its scope says reuse=True; make it first, or "
        f'say reuse="AUTO_REUSE"; this graph has: {known}'
      )
    return False
  if reuse is False:
    raise VariableError(
      f"variable {full_name} exists already, but its scope says reuse=False; take another name, or "
      "say reuse=True to share it"
    )
  if reuse is None:
    graph.tf_scopes.found(full_name)
  return True


class ReadVariable(Operation):
  """The value of a variable at this place in the graph (after assignments before it).

  Args:
    var: a `Variable` operation.
    name: of the operation.
  """

  lowers_uneven_slices = True
  is_cloneable = False
  stays_in_stages = True

  def __init__(self, var: Variable, name: str | None = None):
    super().__init__(var.outputs, name=name or "read_variable")
    self._var = var
    self._outputs = [Tensor(self, var.shape, var.activation_dtype)]

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    return grad_ys

  def lower(self, lowering: LoweringInProgress) -> None:
    read_slices(lowering, self._var, self.outputs[0])


def read_variable(var: Variable) -> Tensor:
  """Reads a `Variable` operation again.

  Args:
    var: a `Variable` operation.
  """
  if not isinstance(var, Variable):
    raise VariableError(
      f"read_variable takes the Variable operation (tensor.operation), got {var!r}"
    )
  return ReadVariable(var).outputs[0]


kinds.register_class(Variable, VariableError)
kinds.register_class(VariableDType, DTypeError)


def assign_slice(variable: Variable, slice_var: tf.Variable, val: tf.Tensor) -> Any:
  """Sets a slice to a value, cast to the slice dtype.

  Args:
    variable: the mtf `Variable`.
    slice_var: one of its slices.
    val: a tf.Tensor of the slice's shape.
  """
  return slice_var.assign(tf.cast(val, variable.slice_dtype), read_value=False)


def assign_add_slice(variable: Variable, slice_var: tf.Variable, val: tf.Tensor) -> Any:
  """Adds a value, cast to the slice dtype, to a slice; arguments as `assign_slice`."""
  return slice_var.assign_add(tf.cast(val, variable.slice_dtype), read_value=False)


def assign_sub_slice(variable: Variable, slice_var: tf.Variable, val: tf.Tensor) -> Any:
  """Subtracts a value, cast to the slice dtype, from a slice; arguments as `assign_slice`."""
  return slice_var.assign_sub(tf.cast(val, variable.slice_dtype), read_value=False)


class Assign(Operation):
  """Assigns values to variables, in order, where it stands in the graph.

  Args:
    variables: `Variable` operations.
    new_values: one `Tensor` for each, of its shape.
    assign_fn: `fn(mtf_variable, slice_tf_variable, tf_value)`.
    name: of the operation.

  Raises:
    ShapeError: a value has other dimensions than its variable.
  """

  lowers_uneven_slices = True
  is_cloneable = False
  may_mix_meshes = True
  stays_in_stages = True
  reads_shards = True

  def __init__(
    self,
    variables: Sequence[Variable],
    new_values: Sequence[Tensor],
    assign_fn: Callable[..., object] = assign_slice,
    name: str | None = None,
  ):
    variables, new_values = list(variables), list(new_values)
    if not variables or len(variables) != len(new_values):
      raise ArgumentError(
        f"{name or 'assign'}: one value for each variable is needed, got {len(new_values)} values "
        f"for {len(variables)} variables {[v.full_name for v in variables]}"
      )
    if is_in_stage():
      bring = provided("reshard")
      new_values = [
        bring(x, v.mesh) if isinstance(x, Tensor) else x for v, x in zip(variables, new_values)
      ]
    super().__init__(new_values, variables[0].mesh, name=name or "assign")
    self._variables = variables
    self._assign_fn = assign_fn
    for v, x in zip(self._variables, new_values):
      if v.shape != x.shape:
        raise ShapeError(
          f"{self.name}: the value for variable {v.full_name} has {x.shape}, the variable {v.shape}"
        )
      if (x.dtype == tf.string) != (v.slice_dtype == tf.string):
        raise DTypeError(
          f"{self.name}: the value for variable {v.full_name} of dtype {v.slice_dtype.name} is {x}"
        )

  @property
  def variables(self) -> list[Variable]:
    """The `Variable` operations that are assigned to."""
    return self._variables

  @property
  def assign_fn(self) -> Callable[..., Any]:
    """The function that writes a value into a slice."""
    return self._assign_fn

  @property
  def has_gradient(self) -> bool:
    return False

  def lower(self, lowering: LoweringInProgress) -> None:
    done = []
    # All values are read before anything is written.
    laid_out = [lowering.variables[v] for v in self._variables]
    values = [v.to_shards(lowering.tensors[x]) for v, x in zip(laid_out, self._inputs)]
    for v, value in zip(laid_out, values):
      done += v.assign_shards(self._assign_fn, value)
    lowering.operations[self] = grouped(done)


def grouped(results: Sequence[object]) -> Any:
  """Groups operations into one tf.Operation; None when executing eagerly."""
  if tf.executing_eagerly():
    return None
  done = [r for r in results if r is not None]
  # An operation that has no outputs is one to wait for as it is.
  if len(done) == 1 and isinstance(done[0], tf.Operation):
    return done[0]
  return tf.group(done)


def assign(
  var: object,
  new_val: Tensor,
  assign_fn: Callable[..., object] = assign_slice,
  name: str | None = None,
) -> Assign:
  """Assigns to a variable.

  The assignment happens whenever the graph's lowering runs, where it stands in the
  order of the graph's operations. Values read before it are not affected.

  Args:
    var: a `Variable`, or its value (also through a chain of operations of one input,
      a cast for example).
    new_val: a `Tensor` of the variable's shape.
    assign_fn: `fn(mtf_variable, slice_tf_variable, tf_value)`, which writes a value into a slice.
    name: of the operation.

  Returns:
    The `Assign` operation.

  Raises:
    VariableError: `var` leads to no variable.
  """
  op = var.operation if isinstance(var, Tensor) else var
  while isinstance(op, Operation) and not isinstance(op, Variable):
    if len(op.inputs) != 1:
      break
    op = op.inputs[0].operation
  if not isinstance(op, Variable):
    raise VariableError(f"assign: {var!r} is not a variable, nor the value of one")
  return Assign([op], [new_val], assign_fn=assign_fn, name=name)


def assign_add(var: object, new_val: Tensor) -> Assign:
  """Adds to a variable; arguments as `assign`."""
  return assign(var, new_val, assign_fn=assign_add_slice)


def assign_sub(var: object, new_val: Tensor) -> Assign:
  """Subtracts from a variable; arguments as `assign`."""
  return assign(var, new_val, assign_fn=assign_sub_slice)


class Depend(Operation):
  """x, after the given operations and tensors.

  Operations run in the order of the graph, so this only needs to exist.

  Args:
    x: a `Tensor`.
    dependencies: a list of `Operation`s and `Tensor`s.
    name: of the operation.
  """

  lowers_uneven_slices = True

  def __init__(
    self, x: Tensor, dependencies: Sequence[Operation | Tensor], name: str | None = None
  ):
    super().__init__([x], x.mesh, name=name or "depend")
    for d in dependencies:
      if not isinstance(d, (Operation, Tensor)):
        raise GraphError(
          f"{self.name} of {x}: a dependency must be an Operation or a Tensor, got {d!r}"
        )
    check_one_graph(self.name, x, dependencies)
    self._dependencies = list(dependencies)
    self._outputs = [Tensor(self, x.shape, x.dtype)]

  @property
  def dependencies(self) -> list[Operation | Tensor]:
    """The operations and tensors that it is ordered after."""
    return list(self._dependencies)

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    return grad_ys

  def lower(self, lowering: LoweringInProgress) -> None:
    for d in self._dependencies:
      if isinstance(d, Tensor) and d in lowering.tensors:  # Else it is of another mesh.
        lowering.tensors[d].to_laid_out_tensor()
    lowering.set_tensor_lowering(
      self.outputs[0],
      lowering.mesh_impl(self).slicewise(tf.identity, lowering.tensors[self.inputs[0]]),
    )


def depend(x: Tensor, dependencies: Sequence[Operation | Tensor]) -> Tensor:
  """Identity of x, ordered after the dependencies."""
  return Depend(x, dependencies).outputs[0]


def _combine_assignments(graph: Graph, assignments: Sequence[Operation]) -> list[Operation]:
  """Implements `Graph.combine_assignments`."""
  groups: dict[Any, list[Assign]] = {}
  for op in assignments:
    if not isinstance(op, Assign):
      raise GraphError(f"combine_assignments takes Assign operations, got {op!r}")
    groups.setdefault((op.assign_fn, op.mesh), []).append(op)
  given = set(assignments)
  graph.operations[:] = [op for op in graph.operations if op not in given]
  return [
    Assign(
      [v for op in ops for v in op.variables],
      [x for op in ops for x in op.inputs],
      assign_fn=assign_fn,
    )
    for (assign_fn, _), ops in groups.items()
  ]


provide(combine_assignments=_combine_assignments)
