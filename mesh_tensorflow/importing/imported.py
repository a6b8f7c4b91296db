"""`from_tensorflow`: a model of TensorFlow or Keras as a function of mtf.Tensors.

A `Model` is the function for arguments of certain shapes: traced, its axes followed and named. An
`Imported` has one for each kind of arguments, and builds its operations in the caller's graph.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.kinds import shown
from mesh_tensorflow.errors import (
  ArgumentError,
  DimensionError,
  DTypeError,
  GraphError,
  ShapeError,
  VariableError,
)
from mesh_tensorflow.importing import (
  drawing,
  families,  # noqa: F401 - it registers rules
)
from mesh_tensorflow.importing.axes import Axes
from mesh_tensorflow.importing.building import (
  Builder,
  Dimensioned,
  Stages,
  Start,
  full_shape,
  reshape_to,
)
from mesh_tensorflow.importing.drawing import DimensionTable, ImportedOperation, operation_rows
from mesh_tensorflow.importing.naming import (
  OwnNames,
  Places,
  callable_of,
  give_names,
  keras_variables,
  name_factors,
  named_leaves,
  parameter_names,
  variable_paths,
)
from mesh_tensorflow.importing.nodes import Program, VariableRecord, Wire
from mesh_tensorflow.importing.replicating import relate_program, replicated_nodes, warn_of
from mesh_tensorflow.importing.tracing import Result, Traced, trace, without_changes
from mesh_tensorflow.importing.value import Value
from mesh_tensorflow.operations.constants import import_tf_tensor
from mesh_tensorflow.operations.reshape import reshape
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Mesh, Tensor
from mesh_tensorflow.running.function import TensorSpec


@dataclasses.dataclass(frozen=True)
class Model:
  """A function, traced for arguments of certain shapes, with dimensions."""

  traced: Traced
  places: Places
  dimensioned: Dimensioned
  arguments: tuple[Wire, ...]


def make_model(
  original: Any,
  title: str,
  specs: list[Any],
  dims: Mapping[str, Sequence[str | None]],
  fallback: bool,
  derived: Collection[str] = (),
) -> Model:
  """Traces a function, follows its axes and names them.

  Args:
    original: what the user gave.
    title: its name, for messages.
    specs: for each argument a structure of tf.TensorSpec, `mtf.TensorSpec`, Python values.
    dims: names of the axes of arguments, results and variables; see `mtf.from_tensorflow`.
    fallback: whether operations without a rule may be computed whole on each device.
    derived: names in `dims` that are not the user's; see `Axes`.
  """
  dims = dict(dims)
  names = parameter_names(original, len(specs))
  leaves = [leaf for n, s in zip(names, specs) for leaf in named_leaves(n, s)]
  for name, spec in leaves:
    if isinstance(spec, TensorSpec):
      dims.setdefault(name, spec.shape.dimension_names)
  if not any(is_tensor(spec) for _, spec in leaves):
    raise ArgumentError(
      f"from_tensorflow: the input_signature of {title} has a tf.TensorSpec, or an mtf.TensorSpec, "
      f"for each tensor; got {shown(specs)}"
    )
  _check_binding(title, original, specs)
  tf_specs = tf.nest.map_structure(_tf_spec, specs)
  _check_static(title, [(n, s) for (n, _), s in zip(leaves, tf.nest.flatten(tf_specs))])
  own = OwnNames(original)
  paths = variable_paths(original, own)
  traced = trace(callable_of(original), tf_specs, {}, paths, fallback, own.of)
  tensors = [(n, s) for n, s in leaves if is_tensor(s)]
  arguments = traced.program.inputs
  for (name, _), wire in zip(tensors, arguments):
    wire.name = name
  results = {
    name: traced.program.outputs[leaf.number]
    for name, leaf in named_leaves("output", traced.structure)
    if isinstance(leaf, Result)
  }
  # In the order of a Keras model, which all of its functions share; else as the function has them.
  of_keras = keras_variables(getattr(original, "__self__", original))
  order = {paths[id(v.value)][0]: number for number, v in enumerate(of_keras)}
  variables = {w.variable.path: w for w in traced.program.wires if w.variable is not None}
  places = Places(
    {n: w for (n, _), w in zip(tensors, arguments)},
    results,
    dict(sorted(variables.items(), key=lambda item: order.get(item[0], len(order)))),
  )
  return Model(traced, places, _dimensioned(traced.program, places, dims, derived), arguments)


def _dimensioned(
  program: Program,
  places: Places,
  dims: Mapping[str, Sequence[str | None]],
  derived: Collection[str],
) -> Dimensioned:
  """Follows the axes through a program, and names them."""
  axes = Axes(derived)
  for wire in (*places.variables.values(), *places.arguments.values()):
    axes.add(wire, pinned=True)
  give_names(axes, places, dims)
  relate_program(program, axes)
  named = name_factors(axes, program, places)
  dimensioned = Dimensioned(axes, named, {})
  given = {path: names for p, names in dims.items() for path in places.matching(p)}
  variables = {}
  for path, wire in places.variables.items():
    assert wire.variable is not None
    shape = full_shape(dimensioned.of(wire))
    names = given.get(path, [None] * wire.rank)
    # A name that the user gave to an axis of size 1 joins nothing, but it is shown.
    variables[wire.variable] = Shape(
      [Dimension(n or d.name, 1) if d.size == 1 else d for d, n in zip(shape, names)]
    )
  return Dimensioned(axes, named, variables)


def is_tensor(x: object) -> bool:
  """True if it is a tensor, or the specification of one."""
  return isinstance(x, (Tensor, TensorSpec, tf.TensorSpec)) or tf.is_tensor(x)


def spec_of(x: object) -> Any:
  """The specification of a tensor or array; Python values as they are."""
  if isinstance(x, Tensor):
    return TensorSpec(x.shape, x.dtype)
  if is_tensor(x) or hasattr(x, "__array__"):
    value = tf.convert_to_tensor(x)
    return tf.TensorSpec(value.shape, value.dtype)
  return x


def _tf_spec(x: object) -> Any:
  if isinstance(x, TensorSpec):
    return tf.TensorSpec(x.shape.to_integer_list, x.dtype)
  return x


def key_of(specs: object) -> str:
  """Cache key of a traced function: arguments of different keys need separate traces."""
  return repr(tf.nest.map_structure(_key, specs))


def _key(x: object) -> Any:
  spec = _tf_spec(x)
  return (str(spec.shape), spec.dtype.name) if isinstance(spec, tf.TensorSpec) else repr(x)


def own_signature(fn: object) -> Sequence[Any] | None:
  """Input signature of a tf.function; None without one, or if a size is unknown."""
  specs = getattr(fn, "input_signature", None)
  if specs is None or not all(s.shape.is_fully_defined() for s in tf.nest.flatten(specs)):
    return None
  return list(specs)


def _check_binding(title: str, original: Any, specs: Sequence[object]) -> None:
  """Raises `ArgumentError` if the function cannot be called with these arguments."""
  try:
    signature = inspect.signature(getattr(original, "call", original))
  except (TypeError, ValueError):
    return  # A function of C.
  try:
    signature.bind(*specs)
  except TypeError as e:
    raise ArgumentError(
      f"from_tensorflow: {title}{signature} cannot be called with the {len(specs)} arguments of "
      f"input_signature: {e}"
    ) from None


def _check_static(name: str, specs: Sequence[tuple[str, object]]) -> None:
  for argument, spec in specs:
    if isinstance(spec, tf.TensorSpec) and not spec.shape.is_fully_defined():
      raise ShapeError(
        f"from_tensorflow: the argument {argument} of {name} has the shape {spec.shape}; on a mesh "
        "all shapes are static: give its sizes in input_signature"
      )


class ImportedVariable:
  """A variable of an imported function.

  Attributes:
    name: its name, also that of the mtf variable.
    variable: the original tf.Variable.
    shape: its dimensions, an `mtf.Shape`.
    trainable: whether optimizers change it.
  """

  def __init__(self, record: VariableRecord, shape: Shape):
    self.name = record.path
    self.variable = record.variable
    self.shape = shape
    self.trainable = record.trainable

  def __repr__(self) -> str:
    kind = "" if self.trainable else ", not trained"
    return f"ImportedVariable({self.name}, {self.shape}{kind})"


class Imported:
  """A function of TensorFlow on named dimensions; see `from_tensorflow`.

  Args:
    fn: a tf.function, Keras model or other callable; this and the next three arguments are those
      of `from_tensorflow`.
    input_signature: specifications of the arguments, or None.
    dims: names of the axes of arguments, results and variables.
    fallback: "replicate", or "error".
    warned: types of operations without a rule that were warned of already; it is extended, and
      parts of one function share it.
    initial_value: the value of a tf.Variable when its slices are made; by default that it has.
    derived: names in `dims` that another part of the program has derived: two of them may be one
      dimension here, and then have one name.
  """

  def __init__(
    self,
    fn: Any,
    input_signature: Sequence[object] | None,
    dims: Mapping[str, Sequence[str | None]],
    fallback: str,
    warned: set[str] | None = None,
    initial_value: Callable[[tf.Variable], tf.Tensor] = lambda v: v.value(),
    derived: Collection[str] = (),
  ):
    self._original = fn
    self._initial_value = initial_value
    self._dims = dict(dims)
    self._fallback = fallback
    self._derived = derived
    self._warned = set() if warned is None else warned
    self._models: dict[Any, Model] = {}
    self._last: Model | None = None
    self._made: dict[VariableRecord, list[Variable]] = {}
    self._stages: Stages | None = None
    self.__name__ = str(getattr(fn, "name", None) or getattr(fn, "__name__", type(fn).__name__))
    if input_signature is None:
      input_signature = own_signature(callable_of(fn))
    if input_signature is not None:
      self._model(list(input_signature))
    self._is_fixed = input_signature is not None

  @property
  def dimensions(self) -> DimensionTable:
    """The dimensions: a table, and a mapping from names to `mtf.Dimension`s."""
    model = self._traced()
    return DimensionTable(model.traced.program, model.dimensioned, model.places)

  @property
  def variables(self) -> list[ImportedVariable]:
    """The variables that it uses, in the order of the original, with their dimensions."""
    model = self._traced()
    shapes = model.dimensioned.variables
    return [ImportedVariable(v, shapes[v]) for v in model.traced.variables]

  @property
  def trainable_variables(self) -> list[ImportedVariable]:
    """Those of `variables` that optimizers change."""
    return [v for v in self.variables if v.trainable]

  @property
  def operations(self) -> list[ImportedOperation]:
    """Records of the operations: type, name, Python line, dimensions."""
    model = self._traced()
    return operation_rows(model.traced.program.nodes, model.dimensioned)

  def results_of(self, operations: Collection[str]) -> dict[str, Shape]:
    """The dimensions of the first results of operations; one of size 1 for an axis without.

    Args:
      operations: their names in TensorFlow; those that are not there any more are left out.
    """
    model, own = self._traced(), OwnNames(self._original)
    named = {own.of(name): name for name in operations}
    return {
      named[node.name]: full_shape(model.dimensioned.of(node.outputs[0]))
      for node in model.traced.program.nodes
      if node.name in named and node.outputs
    }

  @property
  def fallbacks(self) -> list[ImportedOperation]:
    """Records of the operations computed whole on each device, those in loop bodies too."""
    model = self._traced()
    return operation_rows(replicated_nodes(model.traced.program), model.dimensioned)

  @property
  def program(self) -> Program:
    """The traced program."""
    return self._traced().traced.program

  def trace(self, *args: Any) -> None:
    """Traces the function for tensors, without making operations, unless that was done before.

    Args:
      *args: as of a call, none by keyword.
    """
    self._model_for(args)

  def place(self, stages: Stages | None) -> None:
    """Sets the meshes that the operations of later calls are on, in a graph that has several.

    Args:
      stages: the meshes; None: that of the arguments.
    """
    self._stages = stages

  def leave_out_changes(self) -> None:
    """Leaves out all changes of variables, and what only they need: results are as without them."""
    model = self._traced()
    program = without_changes(model.traced.program)
    self._last = dataclasses.replace(
      model, traced=dataclasses.replace(model.traced, program=program)
    )
    self._models = {key: self._last if m is model else m for key, m in self._models.items()}

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Makes the operations, inside an `mtf.function` or any other mtf graph.

    Args:
      *args: `mtf.Tensor`s, in structures as the function takes them; renamed, by position, to the
        dimensions of `dimensions` if they have others. Arrays, and tf.Tensors, may stand beside.
      **kwargs: keyword arguments, of the same kinds.

    Returns:
      What the function returns, of `mtf.Tensor`s.

    Raises:
      ShapeError: an argument has other sizes than the signature.
      DTypeError: it has another dtype.
      LayoutError: when the function around it runs: a layout rule names a dimension that there is
        not.
    """
    return self.call_holding({}, *self._by_position(args, kwargs))[0]

  def call_holding(self, held: Mapping[str, Start], *args: Any) -> tuple[Any, dict[str, Tensor]]:
    """Makes the operations, as a call does, but changes no variable of certain names.

    Args:
      held: by name of a variable what makes the tensor that the operations find in it.
      *args: the arguments.

    Returns:
      (what the function returns, by name the values that the variables would have got).
    """
    flat = tf.nest.flatten(args)
    mesh = next((x.mesh for x in flat if isinstance(x, Tensor)), None)
    if mesh is None:
      raise ArgumentError(
        f"{self.__name__}: at least one argument must be an mtf.Tensor, got {list(args)}; call it "
        "inside of an mtf.function"
      )
    # The names of its dimensions are derived: a layout rule with another one is a slip.
    mesh.graph.checks_layout_names = True
    model = self._model_for(args)
    given = [x for x in flat if is_tensor(x) or hasattr(x, "__array__")]
    if len(given) != len(model.arguments):
      raise ArgumentError(
        f"{self.__name__} takes {len(model.arguments)} tensors "
        f"({', '.join(w.name for w in model.arguments)}), got {len(given)}"
      )
    inputs = [self._argument(model, mesh, w, x) for w, x in zip(model.arguments, given)]
    builder = Builder(
      *(mesh, model.dimensioned, self._note_variable, self._initial_value, self._stages, held)
    )
    results = [
      reshape_to(value, full_shape(value.axes))
      for value in builder.run(model.traced.program, inputs)
    ]
    returned = tf.nest.map_structure(
      lambda x: results[x.number] if isinstance(x, Result) else x, model.traced.structure
    )
    return returned, builder.changes

  @property
  def arguments(self) -> list[Shape]:
    """The dimensions of each tensor of the arguments, in the order of `tf.nest.flatten`."""
    model = self._traced()
    return [full_shape(model.dimensioned.of(w)) for w in model.arguments]

  def store_as(self, names: Mapping[str, Sequence[str | None]]) -> None:
    """Sets the dimension names under which variables are stored, to split them differently.

    Where the function reads such a variable, it is renamed to the dimensions used in the
    computation, and redistributed if the layout requires it.

    Args:
      names: path of a variable -> for each axis a name; None for an axis of size 1.

    Raises:
      DimensionError: there is no such variable, or it has another number of axes.
    """
    model = self._traced()
    shapes = dict(model.dimensioned.variables)
    records = {v.path: v for v in shapes}
    for path, given in names.items():
      if path not in records or len(given) != shapes[records[path]].ndims:
        raise DimensionError(
          f"{self.__name__}: store_as({path!r}: {list(given)}), but "
          + (f"it is {shapes[records[path]]}" if path in records else "there is no such variable")
        )
      old = shapes[records[path]]
      shapes[records[path]] = Shape([Dimension(n or d.name, d.size) for d, n in zip(old, given)])
    stored = dataclasses.replace(
      model, dimensioned=dataclasses.replace(model.dimensioned, variables=shapes)
    )
    self._models = {key: stored if m is model else m for key, m in self._models.items()}
    self._last = stored

  def picture(self) -> str:
    """An SVG picture: each layer's result and variables, their dimensions as boxes."""
    model = self._traced()
    return drawing.picture(model.traced.program, model.dimensioned, model.places)

  def save_picture(self, path: str) -> None:
    """Writes `picture` into a file.

    Args:
      path: ends in .svg.
    """
    drawing.save(path, self.picture())

  def renamed(self, x: Tensor, name: str) -> Tensor:
    """Renames the dimensions of a tensor to those of an argument or a result, by position.

    Args:
      x: a `Tensor` of the sizes of that one: labels, say.
      name: "inputs", "output", "output/0", ...

    Raises:
      DimensionError: there is none of this name.
      ShapeError: x has other sizes.
    """
    model = self._traced()
    named = {**model.places.arguments, **model.places.outputs}
    if name not in named:
      raise DimensionError(f"{self.__name__} has no argument or result {name!r}: {list(named)}")
    shape = full_shape(model.dimensioned.of(named[name]))
    if x.shape.to_integer_list != shape.to_integer_list:
      raise ShapeError(f"{self.__name__}: {x} has not the sizes of {name}, {shape}")
    return x if x.shape == shape else reshape(x, shape)

  def variable_tensors(self, mesh: Mesh) -> list[Tensor]:
    """Tensors of the `variables` in a graph, to pass to `mtf.gradients`.

    Args:
      mesh: the mesh of a graph in which the function was called.
    """
    known = mesh.graph.name_to_variable
    missing = [v.name for v in self.variables if v.name not in known]
    if missing:
      raise VariableError(f"{self.__name__} was not called in this graph: it lacks {missing[0]}")
    return [known[v.name].value for v in self.variables]

  def sync(self) -> None:
    """Writes the values that the variables have on the mesh into the original tf.Variables.

    Raises:
      VariableError: the function has not run on a mesh.
    """
    for record, op in self._lowered().items():
      record.variable.assign(op.get_master().numpy())

  def load(self) -> None:
    """Writes the values of the original tf.Variables into the variables on the mesh.

    Raises:
      VariableError: the function has not run on a mesh.
    """
    for record, op in self._lowered().items():
      op.assign_to_master(record.variable.numpy())

  def _lowered(self) -> dict[VariableRecord, Variable]:
    found = {}
    for record, made in self._made.items():
      op = next((op for op in reversed(made) if _has_values(op)), None)
      if op is not None:
        found[record] = op
    if self._last is not None and not found and self._last.traced.variables:
      raise VariableError(
        f"{self.__name__} has not run on a mesh; call it in an mtf.function, and run that"
      )
    return found

  def _note_variable(self, record: VariableRecord, op: Variable) -> None:
    made = self._made.setdefault(record, [])
    # Of older graphs only the last one that has run: the others need not be kept in memory.
    lowered = [v for v in made if _has_values(v)]
    made[:] = [*lowered[-1:], op]

  def _traced(self) -> Model:
    if self._last is None:
      raise GraphError(
        f"{self.__name__} has no input_signature, so it is traced when it is called first; "
        "call it, or give from_tensorflow input_signature=[tf.TensorSpec(...), ...]"
      )
    return self._last

  def _by_position(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[Any, ...]:
    if not kwargs:
      return args
    try:
      bound = inspect.signature(getattr(self._original, "call", self._original)).bind(
        *args, **kwargs
      )
    except TypeError as e:
      raise ArgumentError(f"{self.__name__}: {e}") from None
    if bound.kwargs:
      raise ArgumentError(
        f"{self.__name__}: {sorted(bound.kwargs)} can only be given by keyword; bind them before: "
        "mtf.from_tensorflow(lambda x: model(x, training=True), ...)"
      )
    return bound.args

  def _argument(self, model: Model, mesh: Mesh, wire: Wire, x: object) -> Value:
    axes = model.dimensioned.of(wire)
    if not isinstance(x, Tensor):
      x = import_tf_tensor(mesh, tf.convert_to_tensor(x, wire.dtype), full_shape(axes))
    if x.shape.to_integer_list != list(wire.shape):
      raise ShapeError(
        f"{self.__name__}: {x} is given for {wire.name} of shape {list(wire.shape)}; the sizes "
        "must be those of the input_signature"
      )
    if x.dtype != wire.dtype:
      raise DTypeError(f"{self.__name__}: {x} is given for {wire}; cast it (mtf.cast)")
    wanted = Shape([d for dims in axes for d in dims])
    return Value(x if x.shape == wanted else reshape(x, wanted), axes)

  def _model_for(self, args: Sequence[object]) -> Model:
    """The model for the arguments of a call."""
    if self._is_fixed:
      return self._traced()
    return self._model(tf.nest.map_structure(spec_of, list(args)))

  def _model(self, specs: list[Any]) -> Model:
    """Model for arguments of these specs, from the cache or traced."""
    key = key_of(specs)
    if key not in self._models:
      self._models[key] = make_model(
        *(self._original, self.__name__, specs, self._dims, self._fallback == "replicate"),
        self._derived,
      )
      warn_of(self.__name__, replicated_nodes(self._models[key].traced.program), self._warned)
    self._last = self._models[key]
    return self._last


def _has_values(op: Variable) -> bool:
  try:
    op.get_master()
  except VariableError:
    return False
  return True


@checked
def from_tensorflow(
  fn: Any,
  input_signature: Sequence[object] | None = None,
  dims: Mapping[str, Sequence[str | None]] | None = None,
  fallback: str = "replicate",
) -> Imported:
  """A tf.function, Keras model or tf.Module as a function of `mtf.Tensor`s.

  It is traced once, and its operations become operations on named dimensions, so any layout
  splits it, `mtf.gradients` differentiates it, and `mtf.optimize` trains it. Axes are followed
  through the function; their names come from the variables' paths ("mlp/dense_1.units"), and from
  `dims`. Random operations are drawn as all of this package: a layout does not change them.

  Args:
    fn: what is called with tf.Tensors.
    input_signature: for each argument a tf.TensorSpec, or an `mtf.TensorSpec`, whose names are
      those of the axes; or a structure of them. Without one the function is traced when it is
      called first, for the shapes and names of its arguments, and again for other shapes.
    dims: names of dimensions: the name of an argument or result ("inputs", "inputs/user",
      "output"), or a pattern over variables' paths ("*/ffn/kernel") -> a name, or None, for each
      axis.
    fallback: what happens to operations that have no rule: "replicate": each device computes them
      whole, and a warning tells which, and what it costs; or "error".

  Returns:
    An `Imported`, to be called inside an `mtf.function`.

  Raises:
    UnsupportedError: an operation has no rule, and keeps a state, or `fallback` is "error".
    ShapeError: a shape is known only when the function runs.
    VariableError: the function makes a variable when it is called.
    DimensionError: `dims` names what is not there, or gives two names to one axis.
  """
  if fallback not in ("error", "replicate"):
    raise ArgumentError(f"from_tensorflow: fallback is 'error' or 'replicate', got {fallback!r}")
  return Imported(fn, input_signature, dims or {}, fallback)
