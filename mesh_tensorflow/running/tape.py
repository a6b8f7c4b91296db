"""An `mtf.function` as a `tf.GradientTape` sees it: one operation, with a backward program.

TensorFlow cannot differentiate the program of a SIMD mesh, whose processors exchange slices
through queues, and would store each slice that a placement mesh exchanges. So a tape does not look
inside. The results of a run pass through one operation with a gradient of its own, whose inputs
are the arguments and the slices of the trainable variables; its gradient is a second program on the
mesh: the function's graph once more, with `mtf.gradients` of it. Nothing is stored in between but
values that may change until then: those of the variables, and the number that random operations
drew from, so what the backward program computes again is what the run computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import GradientError
from mesh_tensorflow.meshes.cross_mesh import whole_everywhere
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.numerics import padding
from mesh_tensorflow.operations.constants import import_tf_tensor
from mesh_tensorflow.operations.einsum import transpose
from mesh_tensorflow.operations.gradients import gradients
from mesh_tensorflow.operations.variables import ReadVariable, Variable
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.graph import (
  Graph,
  Mesh,
  Operation,
  Tensor,
  needed_operations,
  unwatched,
)
from mesh_tensorflow.running.lowering import Build, Lowering, Seed, Values, cross_workers, meshes_of


class GivenValues(Lowering):
  """A lowering in which variables have given values, and nothing is assigned.

  Args:
    graph: a `Graph`.
    mesh_to_impl: mesh implementation of each mesh; see `Lowering`.
    given: the values of its variables, by their full names.
    seed: seed of random operations; see `Lowering`.
    wanted: see `Lowering`.
  """

  def __init__(
    self,
    graph: Graph,
    mesh_to_impl: dict[Mesh, MeshImpl],
    given: Mapping[str, Values],
    seed: Seed,
    wanted: Sequence[Tensor],
  ):
    self._given = given
    self._assigned: set[Variable] = set()
    super().__init__(graph, mesh_to_impl, seed=seed, wanted=wanted)

  def lower_operations(self, operations: Iterable[Operation]) -> None:
    for op in operations:
      changed = getattr(op, "variables", None)
      if changed:
        self._assigned.update(changed)
        continue
      variable = op.inputs[0].operation if isinstance(op, ReadVariable) else op
      if not isinstance(variable, Variable) or variable.full_name not in self._given:
        super().lower_operations([op])
        continue
      if variable in self._assigned:
        raise GradientError(
          f"{op.name} reads variable {variable.full_name} after it was assigned to: a "
          "tf.GradientTape cannot go through that; use mtf.gradients inside the mtf.function"
        )
      impl = self.mesh_impl(variable)
      shards = impl.slicewise(
        lambda t, v=variable: tf.cast(t, v.activation_dtype),
        self._given[variable.full_name].laid_out(impl),
      )
      value = impl.from_shards(shards, variable.shape, variable.stored_impl(impl))
      self.set_tensor_lowering(op.outputs[0], value)


# Under this name TensorFlow finds `_of_operation`; a `Backward` is in its graph, by operation.
_GRADIENT = "MeshTensorFlowBackward"


@tf.RegisterGradient(_GRADIENT)  # type: ignore[untyped-decorator]
def _of_operation(op: tf.Operation, *grad_ys: tf.Tensor) -> list[Any]:
  (backward,) = op.graph.get_collection(f"{_GRADIENT}/{op.name}")
  found: list[Any] = backward.of_inputs(grad_ys)
  return found


@dataclasses.dataclass
class Backward:
  """The gradient of one run of an `mtf.function`.

  Attributes:
    name: name of the function.
    impls: the mesh implementations, by the names of their meshes.
    build: builds the function's graph.
    arguments: their values.
    seed: what random operations drew from; None if there were none.
    given: values of all variables, by full name.
    trained: the names of those that gradients are for.
    enter_scopes: enters the scopes in which the function was called.
  """

  name: str
  impls: Mapping[str, Any]
  build: Build
  arguments: Sequence[tf.Tensor]
  seed: Any
  given: Mapping[str, Values]
  trained: Sequence[str]
  enter_scopes: Callable[[], None]
  _results: int = 0

  def attach(self, results: Sequence[tf.Tensor], is_own_trace: bool) -> list[tf.Tensor]:
    """The floating results of the run, as tensors with this gradient.

    TensorFlow keeps each `tf.custom_gradient` of a graph until the process ends, and with it all
    that the gradient knows. In a trace of the function alone there is no tape that would need one.

    Args:
      results: the floating results.
      is_own_trace: whether a graph is traced that has nothing else in it.
    """
    slices = [t for name in self.trained for t in self.given[name].slices]
    n = len(results)
    if is_own_trace:
      graph = results[0].graph
      with graph.gradient_override_map({"IdentityN": _GRADIENT}):
        outputs = tf.identity_n([*results, *self.arguments, *slices])
      graph.add_to_collection(f"{_GRADIENT}/{outputs[0].op.name}", self)
      self._results = n
      own: list[tf.Tensor] = outputs[:n]
      return own

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def through(*tensors: tf.Tensor) -> Any:
      def gradient(*grad_ys: tf.Tensor) -> list[Any]:
        # Not of the results themselves: a tape would go on into what made them.
        return [None] * n + self(grad_ys)

      return [tf.identity(t) for t in tensors[:n]], gradient

    passed: list[tf.Tensor] = through(*results, *self.arguments, *slices)
    return passed

  def of_inputs(self, grad_ys: Sequence[Any]) -> list[Any]:
    """Gradients of the inputs of the operation that `attach` makes in a trace of its own.

    Args:
      grad_ys: gradients of its outputs.
    """
    n = self._results
    # Not of the results themselves: a tape would go on into what made them.
    return [None] * n + self(grad_ys[:n])

  def __call__(self, grad_ys: Sequence[tf.Tensor]) -> list[Any]:
    """Gradients of the arguments, then of the slices of the trained variables; or None."""
    there: list[bool] = []

    def run() -> list[tf.Tensor]:
      found = self._run(grad_ys)
      there[:] = [g is not None for g in found]
      return [g for g in found if g is not None]

    if tf.executing_eagerly():
      made = run()
    else:
      # A function, since what TensorFlow makes of gradients has no automatic control dependencies;
      # called as an operation, since a tape in a tape would else differentiate the function.
      concrete = tf.function(run, autograph=False).get_concrete_function()
      made = []
      if concrete.outputs:  # A call without results would be an operation, not a list of them.
        made = tf.raw_ops.StatefulPartitionedCall(
          args=concrete.captured_inputs, Tout=[t.dtype for t in concrete.outputs], f=concrete
        )
      for g, t in zip(made, concrete.outputs):
        g.set_shape(t.shape)
    # Second derivatives end here.
    found = iter([tf.stop_gradient(g) for g in made])
    return [next(found) if t else None for t in there]

  def _run(self, grad_ys: Sequence[tf.Tensor]) -> list[Any]:
    made: dict[str, Any] = {}
    several = len(set(self.impls.values())) > 1
    first = next(iter(self.impls.values()))

    def program(arguments: Sequence[tf.Tensor], seed: Seed, grad_ys: Sequence[tf.Tensor]) -> Any:
      graph, inputs, result = self.build(arguments)
      flat = tf.nest.flatten(result)
      xs = [*inputs, *[graph.name_to_variable[name].outputs[0] for name in self.trained]]
      made["found"] = found = self._gradients(xs, flat, grad_ys)
      there = [g for g in found if g is not None]
      needed = needed_operations(graph.operations, there)
      graph.operations[:] = [op for op in graph.operations if op in needed]
      made["meshes"] = meshes = meshes_of(graph, self.impls)
      lowering = GivenValues(graph, meshes, self.given, seed, there)
      of_arguments: list[Any] = []
      of_variables: list[Any] = []
      for i, g in enumerate(found):
        if g is None:
          continue
        value, impl = lowering.tensors[g], meshes[g.mesh]
        if i >= len(inputs) and impl.is_elsewhere:
          of_variables.append([])
        elif i >= len(inputs):
          stored = xs[i].operation.stored_impl(impl)
          shards = impl.to_shards(value, g.shape, stored)
          # An optimizer that is not ours may look at all of a slice.
          shards = stored.without_padding(shards, g.shape, padding.zero)
          of_variables.append(shards.tensor_list)
        elif several:
          of_arguments.append(value.tensor_list)
        else:
          of_arguments.append(impl.result_slices(value, g.shape))
      return of_arguments, of_variables

    leave = scope.snapshot()
    self.enter_scopes()
    arguments = (self.arguments, self.seed, grad_ys)
    try:
      with unwatched():
        results = [program(*arguments)] if several else first.run_per_device(program, arguments)
    finally:
      leave()
    of_arguments = zip(*[r[0] for r in results])
    of_variables = zip(*[r[1] for r in results])
    found: list[Any] = []
    for i, (x, g) in enumerate(zip([*self.arguments, *self.trained], made["found"])):
      if i < len(self.arguments):
        found.append(
          None if g is None else self._whole(i, x, next(of_arguments), g, made["meshes"][g.mesh])
        )
      elif g is None:
        found += [None] * len(self.given[x].slices)
      else:
        stored = self.given[x].stored
        parts = [t for part in next(of_variables) for t in part]
        ids = [id(v) for v in stored.slices]
        for i, t in enumerate(parts):
          # Of a slice that several processors share, once: a tape would add them up.
          is_shared = i < len(ids) and ids[i] in ids[:i]
          found.append(None if is_shared else tf.cast(t, stored.slice_dtype))
    return found

  def _gradients(
    self, xs: list[Tensor], flat: list[Any], grad_ys: Sequence[tf.Tensor]
  ) -> list[Tensor | None]:
    """Operations that compute the gradients; each with the dimensions of its x, in their order."""
    ys = [y for y in flat if is_differentiable(y)]
    given = [import_tf_tensor(y.mesh, g, y.shape) for g, y in zip(grad_ys, ys)]
    found = gradients(ys, xs, given)
    return [
      g if g is None or g.shape == x.shape else transpose(g, x.shape) for x, g in zip(xs, found)
    ]

  def _whole(
    self,
    index: int,
    argument: tf.Tensor,
    per_processor: Sequence[Any],
    gradient: Tensor,
    impl: MeshImpl,
  ) -> tf.Tensor:
    if argument.shape.as_list() != gradient.shape.to_integer_list:
      raise GradientError(
        f"argument {index} of {self.name} is only this worker's part of {gradient.shape}: it has no"
        " gradient outside; give the whole argument, or use mtf.gradients inside"
      )
    slices = [t for part in per_processor for t in part]
    if cross_workers(self.impls.values()):
      return whole_everywhere(impl, gradient.shape, gradient.dtype, slices)
    return impl.combine_local_slices(slices, gradient.shape)


def is_differentiable(y: object) -> bool:
  """True for a `Tensor` of a floating or complex dtype."""
  return isinstance(y, Tensor) and bool(y.dtype.is_floating or y.dtype.is_complex)
