"""While loops."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import (
  ArgumentError,
  DTypeError,
  GraphError,
  ShapeError,
  UnsupportedError,
)
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LaidOutTensor, LazyAllreduceSum
from mesh_tensorflow.operations.assignments import grouped
from mesh_tensorflow.operations.control import ScalarSummaryOperation
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.program.graph import Operation, Tensor

__all__ = ["WhileLoopOperation", "while_loop"]

_TF_KWARGS = frozenset(
  [
    "parallel_iterations",
    "maximum_iterations",
    "swap_memory",
    "back_prop",
    "shape_invariants",
    "name",
  ]
)


def _check_count(name: str, fn: Callable[..., Any], count: int) -> None:
  """Raises `ArgumentError` if a function does not take so many tensors."""
  try:
    signature = inspect.signature(fn)
  except (TypeError, ValueError):  # Of a builtin nothing is known.
    return
  try:
    signature.bind(*[None] * count)
  except TypeError:
    raise ArgumentError(
      f"{name} of {count} loop variables: {getattr(fn, '__name__', fn)}{signature} must take one "
      "tensor for each"
    ) from None


class WhileLoopOperation(Operation):
  """Repeats a body while a condition holds; see `while_loop`.

  The condition and the body are called once, here. Their operations are kept in this
  one; the variables that they create go to the graph, in front of the loop.

  Args:
    cond_fn: see `while_loop`.
    body_fn: see `while_loop`.
    inputs: initial values of the loop variables.
    tf_kwargs: keyword arguments of `tf.while_loop`.
    has_accumulators: whether the body may return more than the loop variables.
    name: of the operation.
  """

  may_mix_meshes = True

  def __init__(
    self,
    cond_fn: Callable[..., Tensor],
    body_fn: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    tf_kwargs: dict[str, Any] | None = None,
    has_accumulators: bool = False,
    name: str = "while_loop",
  ):
    super().__init__(list(inputs), name=name)
    self._tf_kwargs = {"parallel_iterations": 1, **(tf_kwargs or {})}
    unknown = sorted(set(self._tf_kwargs) - _TF_KWARGS)
    if unknown:
      raise ArgumentError(
        f"{self.name}: {', '.join(unknown)} is no option of a loop; there are "
        f"{', '.join(sorted(_TF_KWARGS))}"
      )
    # How often the body runs at most, if that is known: what `describe` multiplies by.
    self.maximum_iterations = self._tf_kwargs.get("maximum_iterations")
    if self._tf_kwargs.pop("back_prop", False):
      raise ArgumentError(
        f"{self.name} of {self._inputs}: loops have no gradient; back_prop must be False"
      )
    self._cond_inputs = self._placeholders("cond_input")
    cond, self._cond_operations = self._capture(cond_fn, self._cond_inputs)
    if not isinstance(cond, Tensor) or cond.dtype != tf.bool or cond.shape.ndims:
      raise GraphError(f"{self.name}: cond_fn must return a bool scalar, got {cond!r}")
    self._cond_output = cond
    self._body_inputs = self._placeholders("body_input")
    outputs, self._body_operations = self._capture(body_fn, self._body_inputs)
    self._body_outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    self._check_body_outputs(has_accumulators)
    self._outputs = [
      Tensor(self, x.shape, x.dtype, name=f"output:{i}", index=i)
      for i, x in enumerate(self._body_outputs)
    ]
    self._captured = self._find_captured()
    # Returned from inside the loop, a tensor has no meaning outside it.
    for op in self.inner_operations:
      for x in op.outputs:
        x.usable = False
    self._initialize_all_dimensions_as_splittable()

  def _placeholders(self, name: str) -> list[Tensor]:
    return [
      Tensor(self, x.shape, x.dtype, name=f"{name}:{i}", index=i)
      for i, x in enumerate(self._inputs)
    ]

  def _capture(
    self, fn: Callable[..., Any], placeholders: list[Tensor]
  ) -> tuple[Any, list[Operation]]:
    """Calls `fn`, and takes the operations that it makes out of the graph."""
    operations = self.graph.operations
    n = len(operations)
    _check_count(self.name, fn, len(placeholders))
    try:
      result = fn(*placeholders)
    finally:
      made = operations[n:]
      operations[n:] = [op for op in made if isinstance(op, Variable)]
    return result, [op for op in made if not isinstance(op, Variable)]

  def _check_body_outputs(self, has_accumulators: bool) -> None:
    n, outputs = len(self._inputs), self._body_outputs
    for y in outputs:
      if not isinstance(y, Tensor):
        raise GraphError(f"{self.name}: body_fn must return mtf.Tensors, got {y!r}")
    if len(outputs) < n or (len(outputs) > n and not has_accumulators):
      raise GraphError(
        f"{self.name}: body_fn returned {len(outputs)} tensors for {n} loop variables"
        + ("" if len(outputs) < n else "; give has_accumulators=True to sum up the others")
      )
    for i, (x, y) in enumerate(zip(self._inputs, outputs)):
      if x.shape != y.shape:
        raise ShapeError(
          f"{self.name}: loop variable {i} begins as {x}, but body_fn returned {y} for it"
        )
      if x.dtype != y.dtype:
        raise DTypeError(
          f"{self.name}: loop variable {i} begins as {x}, but body_fn returned {y} for it; "
          "cast it (mtf.cast)"
        )
    for y in outputs[n:]:
      if y.dtype == tf.bool:
        raise DTypeError(f"{self.name}: the accumulator {y} is bool, which cannot be summed up")

  def _find_captured(self) -> list[Tensor]:
    """Tensors from outside, in the order of their first use."""
    inside = set(self._cond_inputs + self._body_inputs)
    captured: dict[Tensor, None] = {}
    for op in self.inner_operations:
      # A loop inside this one uses tensors that are not among its inputs.
      for x in op.inputs + list(getattr(op, "implicit_inputs", ())):
        if x not in inside:
          captured[x] = None
      inside.update(op.outputs)
    for x in [self._cond_output] + self._body_outputs:
      if x not in inside:
        captured[x] = None
    return list(captured)

  @property
  def inner_operations(self) -> list[Operation]:
    """The operations of the condition and of the body."""
    return self._cond_operations + self._body_operations

  @property
  def implicit_inputs(self) -> list[Tensor]:
    """Tensors from outside that the condition and the body use."""
    return list(self._captured)

  @property
  def draws_random_numbers(self) -> bool:
    """Whether an operation inside the loop does."""
    return any(getattr(op, "draws_random_numbers", False) for op in self.inner_operations)

  @property
  def scalar_summaries(self) -> list[ScalarSummaryOperation]:
    """Summaries made in the body, also in loops inside it; the last iteration's count."""
    found = []
    for op in self._body_operations:
      if isinstance(op, ScalarSummaryOperation):
        found.append(op)
      elif isinstance(op, WhileLoopOperation):
        found += op.scalar_summaries
    return found

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    raise UnsupportedError(f"{self.name}: a while loop has no gradient; use mtf.stop_gradient")

  def verify_layout(self, mesh_impl: Any) -> None:
    for op in self.inner_operations:
      op.verify_layout(mesh_impl)
    super().verify_layout(mesh_impl)

  def lower(self, lowering: LoweringInProgress) -> None:
    _LoweredLoop(self, lowering).run()


class _LoweredLoop:
  """One lowering of a loop: `tf.while_loop` over a flat list of slices.

  The list is: the iteration number (if random numbers are drawn), the slices of the
  loop variables, those of the accumulators, and the scalar summaries.
  """

  def __init__(self, loop: WhileLoopOperation, lowering: LoweringInProgress):
    self.loop, self.lowering = loop, lowering
    self.impl = lowering.mesh_impl(loop)
    for x in loop.implicit_inputs:
      if x not in lowering.tensors:
        raise GraphError(f"{loop.name} uses {x}, which is not computed before the loop")
      # A sum that is pending is executed here, once; inside it would be in every iteration.
      lowering.tensors[x].to_laid_out_tensor()
    lowering.prepare_random(loop.inner_operations)
    self.outside = _without_pending_sums(lowering)
    self.numbered = loop.draws_random_numbers
    self.summaries = loop.scalar_summaries
    # By accumulator: the sum that was pending in the body. Operations that were run in it.
    self.pending: dict[int, LazyAllreduceSum] = {}
    self.run_inside: dict[Operation, None] = {}

  def run(self) -> None:
    loop, lowering = self.loop, self.lowering
    n = len(loop.inputs)
    state = [lowering.tensors[x].to_laid_out_tensor() for x in loop.inputs]
    state += [
      self.impl.slicewise(lambda y=y: tf.zeros(self.impl.slice_shape(y.shape), y.dtype))
      for y in loop.outputs[n:]
    ]
    # How many slices a laid-out tensor has in this program.
    self.width = len(state[0].tensor_list) if state else 0
    # tf.while_loop wants a value before the first iteration; if there is none, it stays.
    summaries = [tf.zeros([], op.dtype) for op in self.summaries]
    initial = self.flatten(tf.constant(0) if self.numbered else None, state, summaries)
    results = tf.while_loop(self.cond, self.body, initial, **loop._tf_kwargs)
    _, state, summaries = self.unflatten(list(results))
    for i, (out, laid_out) in enumerate(zip(loop.outputs, state)):
      pending = self.pending.get(i)
      lowering.set_tensor_lowering(
        out,
        laid_out
        if pending is None
        else LazyAllreduceSum(
          self.impl, laid_out, pending.mesh_axes, add_counter_fn=pending.add_counter_fn
        ),
      )
    lowering.scalar_summaries += [(op.name, x) for op, x in zip(self.summaries, summaries)]
    for op in self.run_inside:
      # Who waits for an assignment of the body waits for the end of the loop.
      lowering.operations[op] = grouped(results)

  def flatten(self, number: Any, state: list[LaidOutTensor], summaries: list[Any]) -> list[Any]:
    flat = [] if number is None else [number]
    for laid_out in state:
      flat += [tf.convert_to_tensor(t) for t in laid_out.tensor_list]
    return flat + summaries

  def unflatten(self, flat: list[Any]) -> tuple[Any, list[LaidOutTensor], list[Any]]:
    number = flat.pop(0) if self.numbered else None
    end = self.width * len(self.loop.outputs)
    slices = [flat[i : i + self.width] for i in range(0, end, self.width or 1)]
    return number, [self.impl.LaidOutTensor.from_tensor_list(s) for s in slices], flat[end:]

  def cond(self, *flat: tf.Tensor) -> tf.Tensor:
    loop = self.loop
    number, state, _ = self.unflatten(list(flat))
    inner = self.child(number, loop._cond_inputs, state)
    inner.lower_operations(loop._cond_operations)
    return inner.tensors[loop._cond_output].to_laid_out_tensor().one_slice

  def body(self, *flat: tf.Tensor) -> list[tf.Tensor]:
    loop = self.loop
    number, state, _ = self.unflatten(list(flat))
    inner = self.child(number, loop._body_inputs, state)
    inner.lower_operations(loop._body_operations)
    n = len(loop.inputs)
    values = [inner.tensors[y] for y in loop._body_outputs]
    # A loop variable is read as it is in the next iteration, so it must be reduced.
    new_state = [v.to_laid_out_tensor() for v in values[:n]]
    for i in range(n, len(values)):
      value = values[i]
      if isinstance(value, LazyAllreduceSum) and not value.is_reduced:
        # The parts are added up, and exchanged once, after the loop.
        self.pending[i] = value
        value = value.laid_out_input
      new_state.append(self.impl.slicewise(tf.add, state[i], value))
    self.run_inside.update(
      (op, None) for op in inner.operations if op not in self.outside.operations
    )
    return self.flatten(
      None if number is None else number + 1, new_state, [x for _, x in inner.scalar_summaries]
    )

  def child(self, number: Any, placeholders: list[Tensor], state: list[LaidOutTensor]) -> Any:
    """A lowering for one iteration."""
    inner = self.outside.child(loop_key=number)
    # Copies: `body` tells by the difference what was run inside.
    inner.operations = dict(self.outside.operations)
    inner.scalar_summaries = []
    inner.tensors.update(zip(placeholders, state))
    return inner


def _without_pending_sums(lowering: LoweringInProgress) -> Any:
  """A child lowering that shares no pending sum with its parent.

  A sum that is executed inside a loop must not be remembered outside it.
  """
  result = lowering.child()
  for x, value in result.tensors.items():
    if isinstance(value, LazyAllreduceSum) and not value.is_reduced:
      result.tensors[x] = LazyAllreduceSum(
        value.mesh_impl, value.laid_out_input, value.mesh_axes, value.add_counter_fn
      )
  return result


def while_loop(
  cond_fn: Callable[..., Tensor],
  body_fn: Callable[..., Sequence[Tensor]],
  inputs: Sequence[Tensor],
  num_loop_vars: int | None = None,
  has_accumulators: bool = False,
  **kwargs: Any,
) -> list[Tensor]:
  """Repeats a body while a condition holds.

  Random operations draw anew in each iteration. There is no gradient.

  Args:
    cond_fn: takes a `Tensor` for each loop variable, returns a bool scalar.
    body_fn: takes the same, returns a list of their new values (of the same shapes and
      dtypes), and then, with `has_accumulators`, any other tensors.
    inputs: initial values of the loop variables.
    num_loop_vars: return only the first so many loop variables. (TF1 kept the others in
      variables, because its loops could not have many; here all are loop variables.)
    has_accumulators: the body's other outputs are summed up over the iterations, from
      zero. Sums over the mesh that are pending in the body are executed once, after the loop.
    **kwargs: `maximum_iterations`, `parallel_iterations`, `swap_memory` or `name` of
      `tf.while_loop`; `back_prop` must not be true.

  Returns:
    A list: the last values of the loop variables, then the accumulators.

  Raises:
    GraphError: the condition is no bool scalar, or the body returned too few or too many.
    ShapeError: the body changed the shape of a loop variable.
    DTypeError: the body changed the dtype of a loop variable.
  """
  n = len(inputs)
  if num_loop_vars is not None and not 0 < num_loop_vars:
    raise ArgumentError(
      f"while_loop of {n} inputs: num_loop_vars must be at least 1, got {num_loop_vars}"
    )
  outputs = WhileLoopOperation(cond_fn, body_fn, inputs, kwargs, has_accumulators).outputs
  return outputs if num_loop_vars is None else outputs[: min(num_loop_vars, n)] + outputs[n:]
