"""`mtf.function` and `mtf.TensorSpec`: a function of named tensors as one of TensorFlow."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.kinds import DTypeLike
from mesh_tensorflow.environment import collector
from mesh_tensorflow.environment.tensorflow_mode import check_tensorflow2, is_jit_compiling
from mesh_tensorflow.errors import (
  ArgumentError,
  CollectiveError,
  DivisionError,
  DTypeError,
  GraphError,
  ShapeError,
  UnsupportedError,
  VariableError,
)
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.placement.mesh_impl import PlacementMeshImpl
from mesh_tensorflow.meshes.store import StoredVariable
from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.numerics import precision as precisions
from mesh_tensorflow.operations.constants import import_laid_out_tensor, import_tf_tensor
from mesh_tensorflow.operations.elementwise import cast
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.dimensions import ShapeLike, convert_to_shape
from mesh_tensorflow.program.graph import Graph, Mesh, Tensor, unwatched
from mesh_tensorflow.running.lowering import Run, Seed, is_division_by_zero, one_store, run_on
from mesh_tensorflow.running.tape import Backward, is_differentiable


class TensorSpec:
  """Dimensions and dtype of an argument of an `mtf.function`.

  Args:
    shape: a shape.
    dtype: a dtype; float32 by default.
    name: for messages.
    local: whether each process of a mesh that spans several gives only its own part of the
      argument, `mesh_impl.local_part(shape)`; otherwise every process gives the same whole one.
    mesh: name of the mesh that gets the argument, in a program of several; the first by default.
  """

  @checked
  def __init__(
    self,
    shape: ShapeLike,
    dtype: DTypeLike = tf.float32,
    name: str | None = None,
    *,
    local: bool = False,
    mesh: str | None = None,
  ):
    self.shape = convert_to_shape(shape)
    self.dtype = tf.as_dtype(dtype)
    self.name = name
    self.local = local
    self.mesh = mesh

  def __repr__(self) -> str:
    return f"TensorSpec({self.shape}, {self.dtype.name}, name={self.name!r})"


# Implementation of `Function.plan`, set by the planning package, which imports this one.
_planners: list[Callable[[Function], Any]] = []


def attach_planner(planner: Callable[[Function], object]) -> None:
  """Sets the function that `Function.plan` calls.

  Args:
    planner: `mtf.describe`.
  """
  _planners.append(planner)


@runtime_checkable
class RunsAtOnce(Protocol):
  """Structural type: a graph whose operations run when they are made (that of `mtf.eager`)."""

  def run_function(
    self, fn: Callable[..., object], inputs: Sequence[Tensor], seed: Seed
  ) -> Any: ...


class _InPrecision:
  """A function of `Tensor`s that computes in a dtype of its own; see `function`.

  Args:
    fn: the function.
    precision: a name.
    sharing: how many workers share the mesh.

  Raises:
    ArgumentError: there is no such precision, or each worker would take its own.
  """

  def __init__(self, fn: Callable[..., object], precision: str, sharing: int):
    functools.update_wrapper(self, fn)
    what = f"mtf.function {getattr(fn, '__name__', type(fn).__name__)}"
    if precision == "auto" and sharing > 1:
      raise ArgumentError(
        f"{what}: precision 'auto' is what a process computes faster, and this mesh is of "
        f"{sharing}: give bfloat16 or float32"
      )
    self._fn, self._dtype = fn, precisions.compute_dtype(precision, what)

  def __call__(self, *inputs: Tensor) -> Any:
    if not inputs or self._dtype == tf.float32:
      return self._fn(*inputs)
    graph = inputs[0].graph
    before, graph.compute_dtype = graph.compute_dtype, self._dtype
    try:
      returned = self._fn(*(self._of(tf.float32, x, self._dtype) for x in inputs))
    finally:
      graph.compute_dtype = before
    return tf.nest.map_structure(lambda y: self._of(self._dtype, y, tf.float32), returned)

  @staticmethod
  def _of(dtype: tf.DType, x: Any, wanted: tf.DType) -> Any:
    return cast(x, wanted) if isinstance(x, Tensor) and x.dtype == dtype else x


class _Staged:
  """Holds a tf.function in an object of another class, so that a SavedModel leaves it out.

  Args:
    fn: the function that is traced.
    user_function: for whose traces TensorFlow counts those of `fn`: it warns of many, and would
      take the first traces of several functions for those of one.
    specs: of the arguments; None if they are not known, or if the trace depends on more than them.
    jit_compile: whether XLA compiles it.
  """

  def __init__(
    self,
    fn: Callable[..., object],
    user_function: Callable[..., object],
    specs: Sequence[tf.TensorSpec] | None,
    jit_compile: bool,
  ):
    def staged(values: list[tf.Tensor], seed: Seed) -> Any:
      with kernels.for_xla() if jit_compile else contextlib.nullcontext():
        return fn(values, seed)

    vars(staged).update(__wrapped__=user_function, __signature__=inspect.signature(fn))
    # None, and not False: within a tf.function that XLA compiles it is compiled with that.
    self._tf_function = tf.function(staged, autograph=False, jit_compile=jit_compile or None)
    self._specs = None if specs is None else list(specs)
    self._concrete: Any = None

  def __call__(self, values: list[tf.Tensor], seed: Seed) -> Any:
    if self._specs is None or seed is not None:
      return self._tf_function(values, seed)
    if self._concrete is None:
      self._concrete = self._tf_function.get_concrete_function(self._specs, None)
    # To find the trace for such arguments takes TensorFlow longer than a small step.
    return self._concrete(values, None)

  def trace(self, *args: Any) -> None:
    """Traces the function for `tf.TensorSpec`s of its arguments, unless that was done before."""
    self._tf_function.get_concrete_function(*args)

  def experimental_get_tracing_count(self) -> int:
    """Number of times that the function was traced."""
    count: int = self._tf_function.experimental_get_tracing_count()
    return count


class Function(tf.Module):  # type: ignore[misc]  # TensorFlow says nothing of its types.
  """A function on named tensors, bound to a mesh; see `function`.

  It is a `tf.Module`, whose variables are the slices of the mtf variables that its graph has: none
  before the first call.

  Args:
    fn: the Python function.
    mesh_impl: a `MeshImpl`, or those of several meshes by their names.
    input_signature: `TensorSpec`s.
    mesh_name: name of the mesh, if it is one.
    precision: dtype of computations, or None.
    jit_compile: whether XLA compiles the program.

  Attributes:
    mesh_impls: the mesh implementations, by the names of the meshes.
    mesh_impl: the first of them.
  """

  @checked
  def __init__(
    self,
    fn: Callable[..., object],
    mesh_impl: MeshImpl | Mapping[str, MeshImpl],
    input_signature: Sequence[object] | None,
    mesh_name: str,
    precision: str | None = None,
    jit_compile: bool = False,
  ):
    super().__init__(name="mtf_function")
    functools.update_wrapper(self, fn)
    if not hasattr(self, "__name__"):  # A functools.partial has none, nor has a callable object.
      self.__name__ = getattr(getattr(fn, "func", None), "__name__", type(fn).__name__)
    # Not by an assignment: tf.Module would put another kind of dict in its place.
    impls = self.__dict__["mesh_impls"] = _by_name(self.__name__, mesh_impl, mesh_name)
    self.mesh_impl = next(iter(impls.values()))
    if precision is not None:
      fn = _InPrecision(fn, precision, max(map(_workers, impls.values())))
    devices = sum(impl.size for impl in impls.values())
    if jit_compile and devices > 1:
      raise UnsupportedError(
        f"mtf.function {self.__name__}: jit_compile=True is for a program of one device, and "
        f"{' and '.join(str(impl.shape) for impl in impls.values())} has {devices}, between which "
        "there are exchanges that XLA does not compile; leave it out, or take a mesh of size 1"
      )
    self._jit_compile = jit_compile
    self._fn = fn
    check_tensorflow2()
    signature: list[Any] | None  # Of `TensorSpec`s, as is checked.
    signature = None if input_signature is None else list(input_signature)
    for i, spec in enumerate(signature or ()):
      if not isinstance(spec, TensorSpec):
        raise ArgumentError(
          f"input_signature of {self.__name__}: element {i} is {spec!r}; give an mtf.TensorSpec, "
          "which names the dimensions: mtf.TensorSpec([batch, io], tf.float32)"
        )
      if spec.mesh is not None and spec.mesh not in impls:
        raise GraphError(
          f"input_signature of {self.__name__}: element {i}, {spec}, is for mesh {spec.mesh!r}; "
          f"the meshes are {', '.join(map(repr, impls))}"
        )
    # Not by an assignment: tf.Module would put another kind of list in its place.
    self.__dict__["input_signature"] = signature
    self._compiled = self._staged()
    self._traced = False
    self.graph: Graph | None = None
    self.log_file: str | None = None  # For the report of each lowering; see `Lowering`.
    # Where tf.Module looks for variables, and a SavedModel.
    self._slices: dict[str, tuple[tf.Variable, ...]] = {}
    self.__dict__["stored_variables"] = {}
    if signature is not None:
      self._export(signature)

  mesh_impls: dict[str, MeshImpl]
  input_signature: list[TensorSpec] | None
  # The `StoredVariable`s of its graph, by their full names. `.slices` of one can be given to a
  # tape: `tape.gradient(loss, {name: v.slices for name, v in f.stored_variables.items()})`.
  stored_variables: dict[str, StoredVariable]

  def __call__(self, *args: Any, seed: Seed = None) -> Any:
    """Runs the function.

    A `tf.GradientTape` around the call sees gradients to the arguments and to the slices of
    trainable variables (`trainable_variables`, or `stored_variables[name].slices`); that of a
    slice is the slice of the variable's gradient, on each replica. It sees none through a function
    that changes trainable variables itself.

    Args:
      *args: one tensor, array or number for each spec of the signature. If one is an `mtf.Tensor`,
        the function becomes part of its graph, on its mesh.
      seed: what random operations depend on (an integer); see `Lowering`.

    Returns:
      The structure that the Python function returned, of tf.Tensors; of `mtf.Tensor`s, if that is
      what it was given.

    Raises:
      ShapeError: an argument has not the shape of its spec.
      DTypeError: an argument cannot be converted to the dtype of its spec.
      DivisionError: integers are divided by a tensor that has a zero.
      UnsupportedError: XLA is to compile an operation of TensorFlow's that it does not know.
      GradientError: a tape is to record an operation that has no gradient.
      CollectiveError: the processors of the mesh took different paths, or one failed; outside a
        tf.function. (Inside one, its caller gets TensorFlow's error.)
    """
    check_tensorflow2()
    if any(isinstance(a, Tensor) for a in args):
      return self._inline(args, seed)
    specs = self._specs(args)
    values = [self._convert(i, a, s) for i, (a, s) in enumerate(zip(args, specs))]
    if seed is not None and not tf.is_tensor(seed):
      # A Python number would be part of the trace: a new one for each seed.
      seed = tf.constant(seed, tf.int64)
    if self._jit_compile and tf.inside_function():
      # Its own function, which XLA compiles, within the caller's, which may have what XLA has not.
      with tf.device(self.mesh_impl.processor_device(0)):
        return self._compiled(values, seed)
    if not tf.inside_function() and not tf.config.functions_run_eagerly():
      try:
        with contextlib.ExitStack() as stack:
          for impl in self.mesh_impls.values():
            stack.enter_context(impl.errors_of_runs(self.__name__))
          if self._jit_compile:
            # XLA refuses variables of another device than the one that it compiles for.
            stack.enter_context(tf.device(self.mesh_impl.processor_device(0)))
          return self._compiled(values, seed)
      except CollectiveError:
        # The queues of the old trace may be closed.
        self._compiled = self._staged()
        raise
      except tf.errors.InvalidArgumentError as e:
        if is_division_by_zero(e):
          raise DivisionError(f"{self.__name__} divides an integer by zero") from e
        if self._jit_compile and (unknown := _not_of_xla(str(e))):
          raise UnsupportedError(
            f"{self.__name__}: XLA does not compile {unknown} on {self.mesh_impl.shape}; leave out "
            "jit_compile"
          ) from e
        raise
    with kernels.for_xla() if is_jit_compiling() else contextlib.nullcontext():
      return self._trace(values, seed)

  def create_variables(self) -> None:
    """Makes the variables, with their initial values, and runs nothing.

    For what has to happen before the first step: restoring a checkpoint, setting or looking at
    weights. The function is traced for it, once: calls use that trace. Variables that are there
    keep their values.

    Raises:
      GraphError: the function has no input_signature, so its arguments are not known.
    """
    check_tensorflow2()
    if self.input_signature is None:
      raise GraphError(
        f"create_variables: {self.__name__} has no input_signature; give one, or call it once"
      )
    self._compiled.trace([self._part(s) for s in self.input_signature], None)

  def build_graph(self) -> tuple[Graph, Mesh, Any]:
    """Builds the graph of named operations, without any layout and without running it.

    Returns:
      (graph, its first mesh, what the Python function returned).
    """
    if self.input_signature is None:
      raise GraphError("this mtf.function has no input_signature; call it once instead")
    with unwatched():
      graph = Graph()
      meshes = self._meshes(graph)
      # In a graph that nobody runs: inputs may be larger than this host.
      with tf.Graph().as_default():
        zeros = [tf.zeros(s.shape.to_integer_list, s.dtype) for s in self.input_signature]
      inputs = [
        import_tf_tensor(graph.mesh(s.mesh) if s.mesh else meshes[0], x, s.shape, name=s.name)
        for x, s in zip(zeros, self.input_signature)
      ]
      return graph, meshes[0], self._fn(*inputs)

  def _meshes(self, graph: Graph) -> list[Mesh]:
    """Makes the meshes of the function in a new graph."""
    graph.schedule = self.mesh_impl.schedule
    return [Mesh(graph, name) for name in self.mesh_impls]

  def plan(self) -> Any:
    """Returns the `Report` of `mtf.describe`: layout and costs, without running the function."""
    return _planners[-1](self)

  def _inline(self, args: Sequence[object], seed: Seed) -> Any:
    """Calls the function inside another program: adds its operations to the arguments' graph."""
    mesh = next(a for a in args if isinstance(a, Tensor)).mesh
    specs: Sequence[Any] = self.input_signature or [None] * len(args)
    if len(specs) != len(args):
      self._specs(args)
    inputs = []
    for i, (a, s) in enumerate(zip(args, specs)):
      if not isinstance(a, Tensor):
        spec = s or TensorSpec([], tf.convert_to_tensor(a).dtype)
        a = import_tf_tensor(mesh, self._convert(i, a, spec), spec.shape, name=spec.name)
      elif s is not None and a.shape != s.shape:
        raise ShapeError(f"argument {i} of {self.__name__} is {a}, expected {s}")
      elif s is not None and a.dtype != s.dtype:
        raise DTypeError(f"argument {i} of {self.__name__} is {a}, expected {s}; cast it")
      inputs.append(a)
    if isinstance(mesh.graph, RunsAtOnce):
      return mesh.graph.run_function(self._fn, inputs, seed)
    if seed is not None:
      raise GraphError(
        f"{self.__name__} becomes part of the graph of {inputs[0]}, which has a seed of its own: "
        "give the seed to the function around it"
      )
    return self._fn(*inputs)

  def _specs(self, args: Sequence[object]) -> list[TensorSpec]:
    if self.input_signature is None:
      specs = []
      for i, a in enumerate(args):
        value = tf.convert_to_tensor(a)
        if value.shape.rank:
          raise GraphError(
            f"argument {i} of {self.__name__} has shape {value.shape}: give "
            "input_signature=[mtf.TensorSpec(...)] to name its dimensions"
          )
        specs.append(TensorSpec([], value.dtype))
      return specs
    if len(args) != len(self.input_signature):
      raise GraphError(
        f"{self.__name__} takes {len(self.input_signature)} arguments "
        f"({self.input_signature}), got {len(args)}"
      )
    return self.input_signature

  def _convert(self, index: int, arg: object, spec: TensorSpec) -> tf.Tensor:
    try:
      value: Any = arg
      if not isinstance(arg, tf.Tensor) or arg.dtype != spec.dtype:
        value = tf.convert_to_tensor(arg, spec.dtype)
    except (TypeError, ValueError) as e:
      raise DTypeError(f"argument {index} of {self.__name__}: expected {spec}: {e}") from e
    expected = self._part(spec).shape.as_list()
    if not value.shape.is_compatible_with(expected):
      part = (
        "" if expected == spec.shape.to_integer_list else f", of which this worker's {expected}"
      )
      raise ShapeError(
        f"argument {index} of {self.__name__} has shape {value.shape}, expected {spec}{part}"
      )
    return value

  def _part(self, spec: TensorSpec) -> tf.TensorSpec:
    """Spec of the tensor that a call takes: the whole one, or this worker's part if `local`."""
    shape = spec.shape.to_integer_list
    if spec.local:
      shape = self._impl_of(spec).local_part(spec.shape)[1]
    return tf.TensorSpec(shape, spec.dtype)

  def _impl_of(self, spec: TensorSpec) -> MeshImpl:
    return self.mesh_impl if spec.mesh is None else self.mesh_impls[spec.mesh]

  def _staged(self) -> _Staged:
    # Under a strategy another context is another trace.
    known = self.input_signature is not None and not self._is_of_strategy()
    specs = [self._part(s) for s in self.input_signature or ()] if known else None
    return _Staged(self._trace_alone, self._fn, specs, self._jit_compile)

  def _trace_alone(self, values: list[tf.Tensor], seed: Seed) -> Any:
    return self._trace(values, seed, is_own_trace=True)

  @collector.paused()
  def _trace(self, values: list[tf.Tensor], seed: Seed, is_own_trace: bool = False) -> Any:
    """Builds and lowers the graph; called once per trace."""
    enter_scopes = scope.snapshot()
    run = self._run(self.mesh_impls, values, seed)
    self._traced = True
    stored = [*run.stored.values(), *([] if run.counter is None else [run.counter])]
    self.stored_variables.update({v.name: v for v in stored})
    self._slices.update({v.name: v.different_slices for v in stored})
    if self.input_signature is None:
      self._export(self._specs(values))
    floating = [i for i, y in enumerate(run.flat) if is_differentiable(y)]
    if not floating:
      return run.packed()
    if run.trains or self._is_of_strategy():
      # A tape would find its way through what some mesh implementations are made of, not all.
      passed = [tf.stop_gradient(run.results[i]) for i in floating]
    else:
      backward = Backward(
        name=self.__name__,
        impls=self.mesh_impls,
        build=self._build,
        arguments=values,
        seed=run.seed if seed is None else seed,
        given=run.values,
        trained=[n for n, v in run.values.items() if v.stored.trainable],
        enter_scopes=enter_scopes,
      )
      passed = backward.attach([run.results[i] for i in floating], is_own_trace)
    for i, y in zip(floating, passed):
      run.results[i] = y
    return run.packed()

  def _is_of_strategy(self) -> bool:
    return any(getattr(impl, "strategy", None) is not None for impl in self.mesh_impls.values())

  def _run(self, impls: Mapping[str, MeshImpl], values: Sequence[tf.Tensor], seed: Seed) -> Run:
    with unwatched():
      run = run_on(impls, self._build, values, seed, self.log_file)
    self.graph = run.graph
    return run

  def _build(self, values: Sequence[tf.Tensor]) -> tuple[Graph, list[Tensor], Any]:
    """The graph of the function; returns (it, the arguments, what the function returned)."""
    graph = Graph()
    first = self._meshes(graph)[0]
    inputs = [
      self._import(graph.mesh(s.mesh) if s.mesh else first, v, s)
      for v, s in zip(values, self._specs(values))
    ]
    returned = self._fn(*inputs)
    self._check_returned(returned)
    return graph, inputs, returned

  def _check_returned(self, returned: Any) -> None:
    """Raises `ArgumentError` if something is returned that TensorFlow makes no tensor of."""
    if tf.executing_eagerly():
      return
    for y in tf.nest.flatten(returned):
      if y is None or isinstance(y, Tensor) or tf.is_tensor(y):
        continue
      try:
        tf.convert_to_tensor(y)
      except (TypeError, ValueError) as e:
        raise ArgumentError(
          f"{self.__name__} returned a {type(y).__name__}, {y!r}; return Tensors, numbers, "
          "None, or structures of these: tuples, namedtuples, lists, dicts"
        ) from e

  def _import(self, mesh: Mesh, value: tf.Tensor, spec: TensorSpec) -> Tensor:
    if spec.local and value.shape.as_list() != spec.shape.to_integer_list:
      impl: Any = self._impl_of(spec)  # A SIMD mesh; on others the part of a process is the whole.
      part = impl.import_local_part(spec.shape, value)
      return import_laid_out_tensor(mesh, part, spec.shape, name=spec.name)
    return import_tf_tensor(mesh, value, spec.shape, name=spec.name)

  def _export(self, specs: Sequence[TensorSpec]) -> None:
    """Sets the tf.function that a SavedModel exports as `__call__`."""
    if self._slices and "__call__" in vars(self):
      return
    signature = [tf.TensorSpec(s.shape.to_integer_list, s.dtype, s.name) for s in specs]
    # A SavedModel takes for its object's methods the tf.functions among the attributes. Python
    # itself asks the class for `__call__`.
    saved: Any = tf.function(self._saved, input_signature=signature, autograph=False)
    self.__call__ = saved  # type: ignore[method-assign]

  def _saved(self, *values: tf.Tensor) -> Any:
    """The function in plain TensorFlow, for a SavedModel: without devices, queues or threads.

    The slices of all processors are in one program, as on a placement mesh. It is this layout's,
    as its variables are.
    """
    for impl in self.mesh_impls.values():
      if self._is_of_strategy() or len(impl.local_processors) < impl.size:
        raise UnsupportedError(
          f"{self.__name__} cannot be saved: this process has not all slices of mesh {impl.shape}; "
          "save a checkpoint, and restore it on a mesh of one process"
        )
    if not self._traced:
      raise VariableError(
        f"{self.__name__} was not called yet, so nothing is known of its variables: call it once, "
        "then save it"
      )
    plain = {
      name: PlacementMeshImpl(
        impl.shape, impl.layout_rules, [""] * impl.size, variable_store=impl.variable_store
      ).with_sharded_state(impl.state_dims, impl.reshards_after_forward)
      for name, impl in self.mesh_impls.items()
    }
    run = self._run(plain, values, None)
    return run.packed()


@checked
def function(
  mesh_impl: MeshImpl | Mapping[str, MeshImpl],
  input_signature: Sequence[object] | None = None,
  *,
  mesh_name: str = "mesh",
  precision: str | None = None,
  jit_compile: bool = False,
) -> Callable[[Callable[..., Any]], Function]:
  """Decorator: a Python function of `mtf.Tensor`s becomes a TensorFlow function on a mesh.

  The Python function gets one `mtf.Tensor` for each spec, and returns a structure of
  `mtf.Tensor`s. It is called when the function is traced; calling the result runs the
  lowered program, with the assignments that were made in the graph, and returns
  tf.Tensors. It may be called inside another tf.function. With
  `tf.config.run_functions_eagerly(True)` every operation runs at once, for debugging.

  Args:
    mesh_impl: a `MeshImpl`; or a dict of those of several meshes by their names, which share a
      variable store. The function gets its arguments on the first mesh, or on that of their specs,
      and takes tensors to another one by `mtf.reshard(x, "name")`.
    input_signature: `mtf.TensorSpec`s; may be left out if all arguments are scalars.
    mesh_name: name of the mesh, for messages, if it is one.
    precision: dtype of computations: "bfloat16", "float16" (whose loss wants a scale, as that of
      `mtf.Trainer`), "float32", or "auto": bfloat16 if this process multiplies matrices faster in
      it. The function gets float32 arguments in it; variables that it makes as float32 (the default
      of `get_variable`, and what layers take from their input) are stored and updated in float32,
      and read in it; softmax, statistics of norms and cross entropies are computed in float32; what
      it returns is float32 again. None: every dtype is as the function says.
    jit_compile: whether XLA compiles the program, which must be of one device: there are no
      exchanges in XLA. See docs/gpus.md.

  Returns:
    A decorator that makes a `Function`.

  Raises:
    UnsupportedError: XLA is to compile a program of several devices.
    ArgumentError: there is no such precision; or it is "auto", and the mesh is of several workers.
  """
  return lambda fn: Function(fn, mesh_impl, input_signature, mesh_name, precision, jit_compile)


def _by_name(
  what: str, given: MeshImpl | Mapping[str, MeshImpl], mesh_name: str
) -> dict[str, MeshImpl]:
  """The mesh implementations of a function, by the names of their meshes.

  Raises:
    ArgumentError: there is none, or something is no mesh implementation.
    VariableError: they have several variable stores.
  """
  if isinstance(given, MeshImpl):
    return given.stages or {mesh_name: given}
  impls = dict(given)
  wrong = {n: impl for n, impl in impls.items() if not isinstance(impl, MeshImpl)}
  if wrong or not impls:
    raise ArgumentError(
      f"mtf.function {what}: several meshes are given as a dict of their names and MeshImpls, "
      f"got {given!r}"
    )
  one_store(impls.values())
  return impls


def _not_of_xla(message: str) -> str:
  """The operations that an error of XLA's compiler says it does not know; "" of other errors."""
  if "unsupported operations" not in message:
    return ""
  return ", ".join(dict.fromkeys(re.findall(r"No registered '(\w+)'", message))) or "an operation"


def _workers(mesh_impl: MeshImpl) -> int:
  return workers.current().size if len(mesh_impl.local_processors) < mesh_impl.size else 1
