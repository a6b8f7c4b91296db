"""Graph, Mesh, Operation and Tensor: a program, before any layout."""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import gin
import tensorflow as tf

from mesh_tensorflow.arguments import checking, kinds
from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.kinds import GraphMember, SymbolicTensor
from mesh_tensorflow.errors import (
  ArgumentError,
  DTypeError,
  GraphError,
  ShapeError,
  UnsupportedError,
  VariableError,
)
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.dimensions import (
  Dimension,
  DimensionLike,
  Shape,
  convert_to_dimension,
  no_such_dimension,
)
from mesh_tensorflow.program.operators import Operators, provided
from mesh_tensorflow.program.splitting import Splittable
from mesh_tensorflow.program.tf_scopes import ScopesOfVariables

_T = TypeVar("_T")


def is_differentiable(dtype: tf.DType) -> bool:
  """True if tensors of the dtype have gradients: if it is floating or complex.

  The gradient of a real y to a complex z = a + ib is dy/da + i dy/db, as in TensorFlow, so that
  a step against it descends; for w = f(z) with f holomorphic that is conj(f'(z)) times the
  gradient to w.

  Args:
    dtype: of the tensor.
  """
  return bool(dtype.is_floating or dtype.is_complex)


def check_tensors(what: str, xs: Iterable[object]) -> None:
  """Raises `ArgumentError` unless all are `Tensor`s; `what` is the operation, for the message."""
  for x in xs:
    if not isinstance(x, SymbolicTensor):
      shape = f" of shape {x.shape}" if hasattr(x, "shape") else ""
      raise ArgumentError(
        f"{what}: inputs must be mtf.Tensors, got {type(x).__name__}{shape}; "
        "use mtf.import_tf_tensor to bring a tf.Tensor or an array into the graph"
      )


def check_one_graph(what: str, x: GraphMember, others: Iterable[Any]) -> None:
  """Raises `GraphError` unless the others, which have a graph, too, are in that of x."""
  for other in others:
    if other.graph is not x.graph:
      raise GraphError(
        f"{what} of {x}: {other} belongs to another graph; make both in one graph, or export the "
        "one (lowering.export_to_tf_tensor) and import it here"
      )


class _Watching(threading.local):
  """Thread-local observer of created operations.

  Attributes:
    watcher: called with the graph after an operation has entered it; None for no observer.
  """

  watcher: Callable[[Any], None] | None = None


_WATCHING = _Watching()


@contextlib.contextmanager
def watched(watcher: Callable[[Graph], None] | None) -> Iterator[None]:
  """Context manager: calls `watcher(graph)` for each operation that this thread creates."""
  outer, _WATCHING.watcher = _WATCHING.watcher, watcher
  try:
    yield
  finally:
    _WATCHING.watcher = outer


def unwatched() -> contextlib.AbstractContextManager[None]:
  """Context manager without an observer: for graphs and loop bodies that are lowered whole."""
  return watched(None)


class _Stage(threading.local):
  """The mesh of all operations that this thread creates; see `on_mesh`.

  Attributes:
    mesh: the mesh, or its name; None: each operation is on its own.
  """

  mesh: Mesh | str | None = None


_STAGE = _Stage()


@contextlib.contextmanager
def on_mesh(mesh: Mesh | str | None) -> Iterator[None]:
  """Context manager: operations that this thread creates are on a mesh; see `mtf.stage`.

  Args:
    mesh: a `Mesh`, or the name of one of the graph; None: that of the inputs of each.
  """
  outer, _STAGE.mesh = _STAGE.mesh, mesh
  try:
    yield
  finally:
    _STAGE.mesh = outer


def is_in_stage() -> bool:
  """True if a `mtf.stage` is open."""
  return _STAGE.mesh is not None


def on_stage(x: Any) -> Any:
  """A tensor on the mesh of an open `mtf.stage`; as it is, if there is none, and all else."""
  if _STAGE.mesh is None or not isinstance(x, Tensor):
    return x
  found = x.graph.mesh(_STAGE.mesh) if isinstance(_STAGE.mesh, str) else _STAGE.mesh
  if found.graph is not x.graph:
    return x
  return provided("reshard")(x, found)


class OperationType(type):
  """Enters an operation into its graph once its constructor has succeeded."""

  @property
  def __signature__(cls) -> inspect.Signature:
    """That of the constructor, for `inspect.signature`, `help` and editors."""
    constructor = inspect.signature(checking.constructor_of(cls)[1])
    return constructor.replace(
      parameters=list(constructor.parameters.values())[1:],
      return_annotation=inspect.Signature.empty,
    )

  def __call__(cls, *args: Any, **kwargs: Any) -> Any:
    signature = checking.signature_of_class(cls)
    if signature is not None:
      signature.check((cls, *args), kwargs)
    op = super().__call__(*args, **kwargs)
    op.graph._operations.append(op)
    if _WATCHING.watcher is not None:
      _WATCHING.watcher(op.graph)
    return op


class UniqueNames:
  """The names that were given; those that differ only in case count as equal."""

  def __init__(self) -> None:
    self._given: dict[str, int] = {}

  def unique(self, name: str, mark_as_given: bool = True) -> str:
    """The name itself, or `name_1`, `name_2`, ...: the first that was not given.

    Args:
      name: what is asked for.
      mark_as_given: whether the answer counts as given from now on.
    """
    key = base = name.lower()
    # Starts at the number of requests for the name: a graph may have thousands of operations of one
    # name.
    i = self._given.get(key, 0)
    if mark_as_given:
      self._given[key] = i + 1
    if i == 0:
      return name
    while key in self._given:
      key = f"{base}_{i}"
      i += 1
    if mark_as_given:
      self._given[key] = 1
    return f"{name}_{i - 1}"


__all__ = ["Graph", "Mesh", "Operation", "Tensor"]


@runtime_checkable
class _Trained(Protocol):
  """Structural type: the part of a `Variable` operation that a graph uses."""

  def make_untrainable(self) -> None: ...


class Graph:
  """A list of operations, in the order of their creation."""

  def __init__(self) -> None:
    self._operations: list[Operation] = []
    # `Variable` operations, whose class is in a room above.
    self._trainable_variables: list[Any] = []
    self._all_variables: list[Any] = []
    self._names = UniqueNames()
    self.name_to_variable: dict[str, Any] = {}
    # The first of each name.
    self._meshes: dict[str, Mesh] = {}
    # What a tensor is on another mesh, for stages that use it several times.
    self.resharded: dict[tuple[Tensor, Mesh], Tensor] = {}
    self.root_scope = scope.VariableScope("")
    self.captured_variable_scope = scope.get_variable_scope()
    self.tf_scopes = ScopesOfVariables()
    # Seed of random operations, besides their names: an int, or a scalar Tensor (the step,
    # say); None: each run draws new numbers.
    self.random_seed: int | Tensor | None = None
    # The dtype in which variables of float32 are read, unless theirs is given; None: float32. See
    # `mtf.function`, argument `precision`.
    self.compute_dtype: tf.DType | None = None
    # The training step, for optimizers and schedules: a scalar Tensor, or None.
    self.global_step: Tensor | None = None
    # Schedule of the microbatches of a pipeline where `serialize_training_step` names none.
    self.schedule = "1f1b"
    # Whether the lowering rejects a layout rule for a dimension that no tensor has. Off by default:
    # one layout is often written for several programs.
    self.checks_layout_names = False

  @property
  def operations(self) -> list[Operation]:
    """The live list of operations."""
    return self._operations

  @property
  def trainable_variables(self) -> list[Any]:
    """The live list of trainable `Variable` operations."""
    return self._trainable_variables

  @property
  def all_variables(self) -> list[Any]:
    """The live list of all `Variable` operations."""
    return self._all_variables

  @property
  def to_string(self) -> str:
    """One line of text for each operation."""
    return "\n".join(op.to_string for op in self._operations)

  def __repr__(self) -> str:
    return self.to_string

  @property
  def meshes(self) -> dict[str, Mesh]:
    """Its meshes by name, in the order of their creation; of several of one name the first."""
    return dict(self._meshes)

  def mesh(self, name: str) -> Mesh:
    """The mesh of a name; of several of one name the first.

    Raises:
      GraphError: there is none.
    """
    if name not in self._meshes:
      known = ", ".join(map(repr, self._meshes)) or "no mesh"
      raise GraphError(f"the graph has no mesh {name!r}; it has {known}")
    return self._meshes[name]

  def unique_name(self, name: str, mark_as_used: bool = True) -> str:
    """A name not used in this graph: `name`, or `name_1`, `name_2`, ...

    The open variable scope is put in front. Names that differ only in case count
    as equal.
    """
    if not isinstance(name, str) or not isinstance(mark_as_used, int):
      raise ArgumentError(
        f"unique_name takes a string, and True or False, got {name!r} and {mark_as_used!r}"
      )
    prefix = scope.current_scope_name()
    return self._names.unique(f"{prefix}/{name}" if prefix else name, mark_as_used)

  def register_variable(self, variable: Any) -> None:
    """Enters a `Variable` operation into the lists of variables."""
    self._all_variables.append(variable)
    if variable.trainable:
      self._trainable_variables.append(variable)
    self.name_to_variable[variable.full_name] = variable
    self.tf_scopes.made(variable.full_name, variable.trainable)

  @gin.configurable(module="mesh_tensorflow.ops")
  def rewrite_stack_variables(
    self,
    max_combined_variable_size: int = 2**29,
    max_combined_slice_size: int = 2**27,
    mesh_to_impl: Any = None,
  ) -> None:
    """Does nothing: it made TF1 graphs smaller and has no effect on values."""
    del max_combined_variable_size, max_combined_slice_size, mesh_to_impl

  @checked
  def combine_assignments(self, assignments: Sequence[Operation]) -> list[Operation]:
    """Joins `Assign` operations of a mesh that have the same assign function into one each.

    The given operations leave the graph and the joined ones are appended to it.

    Args:
      assignments: `Assign` operations of this graph.

    Returns:
      One `Assign` for each mesh and assign function, in order of first appearance.

    Raises:
      GraphError: an element is not an `Assign`.
    """
    joined: list[Operation] = provided("combine_assignments")(self, assignments)
    return joined

  @checked
  def make_variables_untrainable(self, variables: Iterable[Operation]) -> None:
    """Takes `Variable` operations out of `trainable_variables`."""
    variables = set(variables)
    for v in variables:
      if not isinstance(v, _Trained):
        raise VariableError(f"make_variables_untrainable takes mtf Variables, got {v!r}")
      v.make_untrainable()
    self._trainable_variables[:] = [v for v in self._trainable_variables if v not in variables]

  @checked
  def clone_operations(
    self, ops: Sequence[Operation], input_mapping: dict[Tensor, Tensor]
  ) -> tuple[list[Operation], dict[Tensor, Tensor]]:
    """Copies operations, replacing their inputs.

    Variables and random operations are not copied, so a recomputation sees the
    same weights and the same dropout masks.

    Args:
      ops: operations of this graph, in order.
      input_mapping: tensor -> tensor to use in its place.

    Returns:
      The copies, and the mapping extended by old output -> new output.

    Raises:
      GraphError: an output of `ops` is already a key of the mapping.
    """
    mapping = dict(input_mapping)
    clones = []
    for op in ops:
      if not op.is_cloneable:
        continue
      clone = copy.copy(op)
      clone._inputs = [mapping.get(x, x) for x in op.inputs]
      clone._outputs = []
      for i, x in enumerate(op.outputs):
        if x in mapping:
          raise GraphError(f"{x} is an output of {op.name} and a key of input_mapping")
        mapping[x] = Tensor(clone, x.shape, x.dtype, name=x.name, index=i)
        mapping[x].stack_of = x.stack_of
        clone._outputs.append(mapping[x])
      self._operations.append(clone)
      clones.append(clone)
    return clones, mapping

  @checked
  def capture_operations(self, fn: Callable[[], _T]) -> tuple[_T, list[Operation]]:
    """Calls `fn()`; returns its result and the operations it added to the graph."""
    n = len(self._operations)
    result = fn()
    return result, self._operations[n:]


class Mesh(GraphMember):
  """A mesh of processors that a graph's tensors live on; its shape is given later.

  Args:
    graph: the `Graph`.
    name: a name for messages.
    variable_placer: kept for compatibility; slices live on their own devices.
  """

  @checked
  def __init__(self, graph: Graph, name: str, variable_placer: Any = None):
    self._graph = graph
    self._name = name
    self._variable_placer = variable_placer
    graph._meshes.setdefault(name, self)

  @property
  def graph(self) -> Graph:
    """The `Graph` to which it belongs."""
    return self._graph

  @property
  def name(self) -> str:
    """Its name."""
    return self._name

  @property
  def variable_placer_fn(self) -> Any:
    """The function of the variable placer, or "cpu:0"; plays no part."""
    return "cpu:0" if self._variable_placer is None else self._variable_placer.device_function

  def __repr__(self) -> str:
    return f"Mesh({self._name!r})"


class Tensor(Operators, SymbolicTensor):
  """A symbolic tensor with named dimensions.

  Args:
    operation: the `Operation` that makes it.
    shape: a `Shape`.
    dtype: a `tf.DType`.
    name: for messages; `<operation.name>:<index>` by default.
    index: position among the operation's outputs.
  """

  def __init__(
    self,
    operation: Operation,
    shape: Shape,
    dtype: tf.DType,
    name: str | None = None,
    index: int = 0,
  ):
    if not hasattr(operation, "mesh"):
      raise ArgumentError(f"a Tensor is made by an mtf.Operation, got {operation!r}")
    if not isinstance(shape, Shape):
      raise ShapeError(f"{operation.name}: the shape of a Tensor must be a Shape, got {shape!r}")
    if not isinstance(dtype, tf.DType):
      raise DTypeError(f"{operation.name}: the dtype of a Tensor must be a tf.DType, got {dtype!r}")
    self._mesh = operation.mesh
    self._operation = operation
    self._shape = shape
    self._dtype = dtype
    self._name = f"{operation.name}:{index}" if name is None else name
    self.usable = True
    # Exclusive upper bound of all values, if known: of positions along a dimension. A gather by
    # such indices needs no check.
    self.index_bound: int | None = None
    # Element type, if it is a stack (`operations.stacks`).
    self.stack_of: Any = None

  @property
  def shape(self) -> Shape:
    """Its `Shape`: names and sizes of its dimensions."""
    return self._shape

  @property
  def size(self) -> int:
    """Number of elements of the whole tensor."""
    return self._shape.size

  @property
  def mesh(self) -> Mesh:
    """The `Mesh` on which it lives."""
    return self._mesh

  def set_mesh(self, mesh: Mesh) -> None:
    """Puts an output of an operation of several meshes on one of them.

    Args:
      mesh: a `Mesh` of the graph.
    """
    self._mesh = mesh

  @property
  def graph(self) -> Graph:
    """The `Graph` to which it belongs."""
    return self._mesh.graph

  @property
  def operation(self) -> Operation:
    """The `Operation` that makes it."""
    return self._operation

  @property
  def dtype(self) -> tf.DType:
    """Its tf.DType."""
    return self._dtype

  @property
  def name(self) -> str:
    """Its name, for messages."""
    return self._name

  @property
  def to_string(self) -> str:
    """Its name, shape and dtype as text."""
    return f"Tensor[{self._name}, {self._shape.to_string}, {self._dtype!r}]"

  def __repr__(self) -> str:
    return self.to_string


@contextlib.contextmanager
def usable(tensors: Sequence[Tensor]) -> Iterator[None]:
  """Context manager: tensors inside a function may be used as inputs of operations."""
  before = [x.usable for x in tensors]
  for x in tensors:
    x.usable = True
  try:
    yield
  finally:
    for x, usable in zip(tensors, before):
      x.usable = usable


class Operation(Splittable, GraphMember, metaclass=OperationType):
  """An operation on the tensors of a graph.

  Subclasses set `self._outputs` (a list of `Tensor`s) in their constructor and
  define `lower` and, unless they have no gradient, `gradient`.

  Args:
    inputs: a list of `Tensor`s.
    mesh: the `Mesh`; the first input's by default.
    name: made unique within the graph.

  Raises:
    GraphError: there is neither an input nor a mesh, or an input may not be used.
  """

  # Whether recomputation (`Graph.clone_operations`) may copy the operation.
  is_cloneable = True
  # Whether a recomputation takes the outputs, with gradients, from outside: those of variables.
  is_external = False
  # Whether inputs may be on other meshes than the operation is.
  may_mix_meshes = False
  # Whether `mtf.gradients` made it.
  is_backward = False
  # Whether it takes its input from one mesh to another.
  is_between_meshes = False
  # Whether it is on its own mesh in a `mtf.stage` of another one: what has to do with a variable.
  stays_in_stages = False
  # Whether it needs of its inputs only the shards in which variables of their shapes are stored.
  reads_shards = False

  _inputs: list[Tensor]
  _outputs: list[Tensor]

  def __init__(self, inputs: list[Tensor], mesh: Mesh | None = None, name: str | None = None):
    if mesh is None:
      if not inputs:
        raise GraphError(
          f"{type(self).__name__} {name!r} has no inputs to take the mesh from; give it mesh=..."
        )
      if not isinstance(inputs[0], Tensor):
        check_tensors(repr(name), inputs[:1])
      mesh = inputs[0].mesh
    elif isinstance(mesh, Tensor):
      raise ArgumentError(f"operation {name!r}: mesh must be an mtf.Mesh, got {mesh}; write x.mesh")
    if name is None:
      raise ArgumentError(f"{type(self).__name__} of {list(inputs)} needs a name")
    if _STAGE.mesh is not None and not (self.is_between_meshes or self.stays_in_stages):
      mesh, inputs = self._on_stage(_STAGE.mesh, mesh, inputs)
    for x in inputs:
      if not isinstance(x, Tensor):
        check_tensors(f"operation {name!r}", inputs)
      if not x.usable:
        raise GraphError(
          f"operation {name!r} uses {x}, which is inside a loop, or a custom_gradient or "
          "recompute_grad function; return it from that function to use it"
        )
      if x.mesh is not mesh and x.mesh.graph is not mesh.graph:
        raise GraphError(
          f"operation {name!r} on {mesh!r}: {x} on {x.mesh!r} belongs to another graph"
        )
      if x.mesh is not mesh and not self.may_mix_meshes:
        raise GraphError(
          f"operation {name!r} is on {mesh!r}, but its input {x} on {x.mesh!r}; bring it there by "
          "mtf.reshard(x, mesh)"
        )
    self._inputs = list(inputs)
    self._outputs = []
    self._mesh = mesh
    self._name = mesh.graph.unique_name(name)
    self._splittable_dims, self._unsplittable_dims = (
      self._initialize_splittable_and_unsplittable_dims("splittable")
    )

  def _on_stage(
    self, stage: Mesh | str, mesh: Mesh, inputs: list[Tensor]
  ) -> tuple[Mesh, list[Tensor]]:
    """The mesh of an open `mtf.stage`, and the inputs brought there."""
    found = mesh.graph.mesh(stage) if isinstance(stage, str) else stage
    if found.graph is not mesh.graph:
      return mesh, inputs
    if self.may_mix_meshes:
      return found, inputs
    bring = provided("reshard")
    return found, [bring(x, found) if isinstance(x, Tensor) else x for x in inputs]

  @property
  def graph(self) -> Graph:
    """The `Graph` to which it belongs."""
    return self._mesh.graph

  @property
  def mesh(self) -> Mesh:
    """The `Mesh` on which it runs."""
    return self._mesh

  @property
  def name(self) -> str:
    """Its name, unique within the graph."""
    return self._name

  @property
  def inputs(self) -> list[Tensor]:
    """A copy of the list of input `Tensor`s."""
    return list(self._inputs)

  @property
  def outputs(self) -> list[Tensor]:
    """A copy of the list of output `Tensor`s."""
    return list(self._outputs)

  @property
  def to_string(self) -> str:
    """Its class, inputs and outputs as text."""
    ins = ", ".join(t.to_string for t in self._inputs)
    outs = ", ".join(t.to_string for t in self._outputs)
    return f"{type(self).__name__}[Inputs=({ins}) Outputs=({outs})]"

  def __repr__(self) -> str:
    return self.to_string

  @property
  def has_gradient(self) -> bool:
    """True if a gradient can flow: some input and some output is floating or complex."""
    return any(is_differentiable(t.dtype) for t in self._inputs) and any(
      is_differentiable(t.dtype) for t in self._outputs
    )

  def gradient(self, grad_ys: list[Any]) -> Sequence[Tensor | None]:
    """Gradients of the inputs.

    Args:
      grad_ys: one gradient for each output: a `Tensor`, or None where none comes. At least one
        comes, so that classes of one output may declare a `list[Tensor]`.

    Returns:
      One gradient (or None) for each input, of the input's shape.
    """
    raise UnsupportedError(
      f"{type(self).__name__} {self.name} of {self._inputs} has no gradient: its class defines no "
      "method gradient(grad_ys); stop the gradient before it with mtf.stop_gradient"
    )

  def lower(self, lowering: Any) -> None:
    """Computes the outputs: calls `lowering.set_tensor_lowering` for each.

    Args:
      lowering: the `mtf.Lowering`, of a room above; a type checker is told what an operation may
        use of it by `meshes.for_operations.LoweringInProgress`.
    """
    raise UnsupportedError(
      f"{type(self).__name__} {self.name} of {self._inputs} cannot be lowered: its class defines "
      "no method lower(lowering)"
    )


for _cls in (Graph, Mesh, Operation, Tensor):
  kinds.register_class(_cls)


def needed_operations(operations: Sequence[Operation], results: Sequence[Tensor]) -> set[Operation]:
  """Operations that lead to a result or have side effects: those that a tf.function would run."""
  wanted, needed = set(results), set()
  for op in reversed(operations):
    if not op.outputs or any(x in wanted for x in op.outputs):
      needed.add(op)
      wanted.update(reads(op))
  return needed


def is_of_one_shape(op: Operation) -> bool:
  """True if the outputs, and inputs other than scalars, have one shape, and nothing else counts.

  Such an operation can be lowered on any layout of that shape.
  """
  shapes = {x.shape for x in [*op.inputs, *op.outputs] if x.shape.ndims}
  if len(shapes) != 1 or not op.inputs or not all(x.shape.ndims for x in op.outputs):
    return False
  has_more = hasattr(op, "inner_operations") or getattr(op, "draws_random_numbers", False)
  return bool(op.outputs) and op.is_cloneable and not has_more and reads(op) == op.inputs


def read_in_shards(operations: Sequence[Operation]) -> set[Tensor]:
  """The tensors of which updates of variables need only the shards that the variables have.

  They are what updates read, and what is computed from on the way to it, in one shape.

  Args:
    operations: in order.
  """
  found: set[Tensor] = set()
  for op in reversed(operations):
    if op.reads_shards or (any(x in found for x in op.outputs) and is_of_one_shape(op)):
      found.update(x for x in op.inputs if x.shape.ndims)
  return found


def read_by_updates(operations: Sequence[Operation]) -> set[Tensor]:
  """The tensors that updates of variables read themselves: gradients, mostly.

  Args:
    operations: in order.
  """
  return {x for op in operations if op.reads_shards for x in op.inputs}


def reads(op: Operation) -> list[Tensor]:
  """Tensors that an operation reads, those that its body captured too."""
  return op.inputs + list(getattr(op, "implicit_inputs", ()))


def dimension_of(what: str, dim: DimensionLike | str, owner: Shape | Tensor) -> Dimension:
  """The dimension of a shape that is given itself, or by its name.

  Args:
    what: name of the operation or function, for the error.
    dim: the dimension, or its name.
    owner: the `Shape`, or the tensor, that has it.

  Raises:
    DimensionError: there is no such dimension.
  """
  shape = owner if isinstance(owner, Shape) else owner.shape
  if isinstance(dim, str):
    found = next((d for d in shape if d.name == dim), None)
  else:
    dim = convert_to_dimension(dim)
    found = dim if dim in shape else None
  if found is None:
    raise no_such_dimension(what, dim, owner)
  return found
