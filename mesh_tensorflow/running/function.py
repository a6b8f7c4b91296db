"""`mtf.function`: a Python function on named tensors, as one TensorFlow function on a mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.kinds import DTypeLike
from mesh_tensorflow.environment.tensorflow_mode import check_tensorflow2
from mesh_tensorflow.errors import (
  CollectiveError,
  DivisionError,
  DTypeError,
  GraphError,
  ShapeError,
)
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.operations.constants import import_laid_out_tensor, import_tf_tensor
from mesh_tensorflow.program.dimensions import ShapeLike, convert_to_shape
from mesh_tensorflow.program.graph import Graph, Mesh, Tensor
from mesh_tensorflow.running.lowering import Lowering, is_division_by_zero

# What `Function.plan` calls; the room that plans is above this one, and hands it in.
_planners: list[Callable[[Function], Any]] = []


def attach_planner(planner: Callable[[Function], Any]) -> None:
  """Says what `Function.plan` calls.

  Args:
    planner: `mtf.describe`.
  """
  _planners.append(planner)


class TensorSpec:
  """Dimensions and dtype of an argument of an `mtf.function`.

  Args:
    shape: a shape.
    dtype: a dtype; float32 by default.
    name: for messages.
    local: whether each process of a mesh that spans several gives only its own part of the
      argument, `mesh_impl.local_part(shape)`; otherwise every process gives the same whole one.
  """

  @checked
  def __init__(
    self,
    shape: ShapeLike,
    dtype: DTypeLike = tf.float32,
    name: str | None = None,
    *,
    local: bool = False,
  ):
    self.shape = convert_to_shape(shape)
    self.dtype = tf.as_dtype(dtype)
    self.name = name
    self.local = local

  def __repr__(self) -> str:
    return f"TensorSpec({self.shape}, {self.dtype.name}, name={self.name!r})"


class Function:
  """A function on named tensors, bound to a mesh; see `function`.

  Args:
    fn: the Python function.
    mesh_impl: a `MeshImpl`.
    input_signature: `TensorSpec`s.
    mesh_name: name of the mesh, for messages.
  """

  @checked
  def __init__(
    self,
    fn: Callable[..., Any],
    mesh_impl: MeshImpl,
    input_signature: Sequence[Any] | None,
    mesh_name: str,
  ):
    functools.update_wrapper(self, fn)
    if not hasattr(self, "__name__"):  # A functools.partial has none, nor has a callable object.
      self.__name__ = getattr(getattr(fn, "func", None), "__name__", type(fn).__name__)
    self._fn = fn
    self.mesh_impl = mesh_impl
    self.input_signature = None if input_signature is None else list(input_signature)
    self._mesh_name = mesh_name
    self._compiled = self._new_tf_function()
    self.graph: Graph | None = None
    self.log_file: str | None = None  # For the report of each lowering; see `Lowering`.

  def __call__(self, *args: Any, seed: Any = None) -> Any:
    """Runs the function.

    Args:
      *args: one tensor, array or number for each spec of the signature.
      seed: what random operations depend on (an integer); see `Lowering`.

    Returns:
      The structure that the Python function returned, of tf.Tensors.

    Raises:
      ShapeError: an argument has not the shape of its spec.
      DTypeError: an argument cannot be converted to the dtype of its spec.
      DivisionError: integers are divided by a tensor that has a zero.
      CollectiveError: the processors of the mesh took different paths, or one failed; outside a
        tf.function. (Inside one, its caller gets TensorFlow's error.)
    """
    check_tensorflow2()
    specs = self._specs(args)
    values = [self._convert(i, a, s) for i, (a, s) in enumerate(zip(args, specs))]
    if seed is not None and not tf.is_tensor(seed):
      # A Python number would be part of the trace: a new one for each seed.
      seed = tf.constant(seed, tf.int64)
    if not tf.inside_function() and not tf.config.functions_run_eagerly():
      try:
        with self.mesh_impl.errors_of_runs(self.__name__):
          return self._compiled(values, seed)
      except CollectiveError:
        self._compiled = self._new_tf_function()  # The queues of the old trace may be closed.
        raise
      except tf.errors.InvalidArgumentError as e:
        if is_division_by_zero(e):
          raise DivisionError(f"{self.__name__} divides an integer by zero") from e
        raise
    return self._trace(values, seed)

  def _new_tf_function(self) -> Any:
    return tf.function(self._trace, autograph=False)

  def build_graph(self) -> tuple[Graph, Mesh, Any]:
    """Builds the graph of named operations, without any layout and without running it.

    Returns:
      (graph, mesh, what the Python function returned).
    """
    if self.input_signature is None:
      raise GraphError("this mtf.function has no input_signature; call it once instead")
    graph = Graph()
    mesh = Mesh(graph, self._mesh_name)
    inputs = [
      import_tf_tensor(mesh, tf.zeros(s.shape.to_integer_list, s.dtype), s.shape, name=s.name)
      for s in self.input_signature
    ]
    return graph, mesh, self._fn(*inputs)

  def plan(self) -> Any:
    """What the layout matches and costs, without running: the `Report` of `mtf.describe`."""
    return _planners[-1](self)

  def _specs(self, args: Sequence[Any]) -> list[TensorSpec]:
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

  def _convert(self, index: int, arg: Any, spec: TensorSpec) -> tf.Tensor:
    try:
      value = tf.convert_to_tensor(arg, spec.dtype)
    except (TypeError, ValueError) as e:
      raise DTypeError(f"argument {index} of {self.__name__}: expected {spec}: {e}") from e
    expected = spec.shape.to_integer_list
    if spec.local:
      expected = self.mesh_impl.local_part(spec.shape)[1]
    if not value.shape.is_compatible_with(expected):
      part = (
        "" if expected == spec.shape.to_integer_list else f", of which this worker's {expected}"
      )
      raise ShapeError(
        f"argument {index} of {self.__name__} has shape {value.shape}, expected {spec}{part}"
      )
    return value

  def _trace(self, values: list[tf.Tensor], seed: Any) -> Any:
    """Builds and lowers the graph; called once per trace."""
    impl = self.mesh_impl
    specs = self._specs(values)
    made: dict[str, Any] = {}

    def program(values: Sequence[tf.Tensor], seed: Any) -> list[Any]:
      graph = Graph()
      mesh = Mesh(graph, self._mesh_name)
      inputs = [self._import(mesh, v, s) for v, s in zip(values, specs)]
      result = self._fn(*inputs)
      flat = tf.nest.flatten(result)
      lowering = Lowering(graph, {mesh: impl}, log_file=self.log_file, seed=seed)
      self.graph = graph
      made["structure"], made["flat"] = result, flat
      # Slices, not whole tensors: they are put together outside, where it costs least.
      return [
        impl.result_slices(lowering.tensors[t], t.shape) for t in flat if isinstance(t, Tensor)
      ]

    results = impl.run_per_device(program, (values, seed))
    per_tensor = zip(*results)
    flat = [
      impl.combine_local_slices([s for r in next(per_tensor) for s in r], t.shape)
      if isinstance(t, Tensor)
      else t
      for t in made["flat"]
    ]
    return tf.nest.pack_sequence_as(made["structure"], flat)

  def _import(self, mesh: Mesh, value: tf.Tensor, spec: TensorSpec) -> Tensor:
    if spec.local and value.shape.as_list() != spec.shape.to_integer_list:
      impl: Any = self.mesh_impl  # A SIMD mesh; on others the part of a process is the whole.
      part = impl.import_local_part(spec.shape, value)
      return import_laid_out_tensor(mesh, part, spec.shape, name=spec.name)
    return import_tf_tensor(mesh, value, spec.shape, name=spec.name)


@checked
def function(
  mesh_impl: MeshImpl,
  input_signature: Sequence[Any] | None = None,
  *,
  mesh_name: str = "mesh",
) -> Callable[[Callable[..., Any]], Function]:
  """Decorator: a Python function of `mtf.Tensor`s becomes a TensorFlow function on a mesh.

  The Python function gets one `mtf.Tensor` for each spec, and returns a structure of
  `mtf.Tensor`s. It is called when the function is traced; calling the result runs the
  lowered program, with the assignments that were made in the graph, and returns
  tf.Tensors. It may be called inside another tf.function. With
  `tf.config.run_functions_eagerly(True)` every operation runs at once, for debugging.

  Args:
    mesh_impl: a `MeshImpl`.
    input_signature: `mtf.TensorSpec`s; may be left out if all arguments are scalars.
    mesh_name: name of the mesh, for messages.

  Returns:
    A decorator that makes a `Function`.
  """
  return lambda fn: Function(fn, mesh_impl, input_signature, mesh_name)
