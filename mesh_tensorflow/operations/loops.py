"""While loops."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import (
  ArgumentError,
  DTypeError,
  GradientError,
  GraphError,
  ShapeError,
  UnsupportedError,
)
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.operations.binary import sub
from mesh_tensorflow.operations.blocks import (
  BackwardBlock,
  Block,
  BlockOperation,
  block_gradients,
  capture,
  downstream,
  like,
  summaries_of,
  upstream,
  wanted_inputs,
)
from mesh_tensorflow.operations.comparison import greater
from mesh_tensorflow.operations.control import ScalarSummaryOperation
from mesh_tensorflow.operations.loop_lowering import LoweredLoop
from mesh_tensorflow.operations.stacks import (
  carries_gradient,
  element_like,
  is_stack,
  pop,
  stack_tensor,
  zero_gradient,
)
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.program.graph import Tensor, on_stage

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


def _check_count(name: str, fn: Callable[..., object], count: int) -> None:
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


class WhileLoopOperation(BlockOperation):
  """Repeats a body while a condition holds; see `while_loop`.

  The condition and the body are called once, here. Their operations are kept in this
  one; the variables that they create go to the graph, in front of the loop.

  Args:
    cond_fn: takes a `Tensor` for each loop variable, returns a bool scalar.
    body_fn: takes the same, returns their new values, then any accumulators.
    inputs: initial values of the loop variables.
    tf_kwargs: keyword arguments of `tf.while_loop`.
    has_accumulators: whether the body may return more than the loop variables.
    name: of the operation.
    counts_down: of a backward pass: the first loop variable is the number of iterations of the
      forward pass that are left to go back.
    schedule: name of the schedule of a loop over microbatches whose body is of several meshes;
      None: that of the graph.
  """

  def __init__(
    self,
    cond_fn: Callable[..., Tensor],
    body_fn: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    tf_kwargs: dict[str, Any] | None = None,
    has_accumulators: bool = False,
    name: str = "while_loop",
    *,
    counts_down: bool = False,
    schedule: str | None = None,
  ):
    super().__init__(list(inputs), name=name)
    self.num_variables = len(self._inputs)
    self.counts_down = counts_down
    self.tf_kwargs = {"parallel_iterations": 1, **(tf_kwargs or {})}
    unknown = sorted(set(self.tf_kwargs) - _TF_KWARGS)
    if unknown:
      raise ArgumentError(
        f"{self.name}: {', '.join(unknown)} is no option of a loop; there are "
        f"{', '.join(sorted(_TF_KWARGS))}"
      )
    # Maximum number of iterations, or None; `describe` multiplies costs by it.
    self.maximum_iterations = self.tf_kwargs.get("maximum_iterations")
    self._back_prop = bool(self.tf_kwargs.pop("back_prop", True))
    self.condition = self._block("cond_input", cond_fn)
    cond = self.condition.outputs[0]
    if not isinstance(cond, Tensor) or cond.dtype != tf.bool or cond.shape.ndims:
      raise GraphError(f"{self.name}: cond_fn must return a bool scalar, got {cond!r}")
    self.body = self._block("body_input", body_fn)
    self._check_body_outputs(has_accumulators)
    self._blocks = [self.condition, self.body]
    self._outputs = []
    for i, x in enumerate(self.body.outputs):
      self._outputs.append(Tensor(self, x.shape, x.dtype, name=f"output:{i}", index=i))
      self._outputs[-1].stack_of = x.stack_of
      self._outputs[-1].set_mesh(x.mesh)  # Of a pipeline each is on the mesh of its stage.
    # How its iterations are run if the body is of several meshes, see `meshes.schedules`.
    self.schedule = schedule or self.graph.schedule
    # Tensors of the body that each iteration saves for the backward pass, if there is one.
    self.saved: tuple[Tensor, ...] = ()
    self.is_differentiated = False
    self._keys = list(dict.fromkeys([x for block in self._blocks for x in block.captured()]))
    self._inputs += self._keys
    # Returned from inside the loop, a tensor has no meaning outside it.
    for block in self._blocks:
      block.forbid_use()
    self._initialize_all_dimensions_as_splittable()

  def _block(self, name: str, fn: Callable[..., Any]) -> Block:
    placeholders = [
      Tensor(self, x.shape, x.dtype, name=f"{name}:{i}", index=i)
      for i, x in enumerate(self._inputs)
    ]
    for placeholder, x in zip(placeholders, self._inputs):
      placeholder.stack_of = x.stack_of
      placeholder.set_mesh(x.mesh)
    _check_count(self.name, fn, len(placeholders))

    def on_one_mesh() -> list[Any]:
      result = fn(*placeholders)
      outputs = list(result) if isinstance(result, (list, tuple)) else [result]
      n = self.num_variables  # What is added up stays where it is made.
      return [*map(on_stage, outputs[:n]), *outputs[n:]]

    outputs, operations = capture(self.graph, on_one_mesh)
    return Block(placeholders, operations, outputs)

  def _check_body_outputs(self, has_accumulators: bool) -> None:
    n, outputs = self.num_variables, self.body.outputs
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
      if x.mesh is not y.mesh:
        raise GraphError(
          f"{self.name}: loop variable {i} begins on {x.mesh!r}, but body_fn returned {y} on "
          f"{y.mesh!r} for it; bring it back (mtf.reshard)"
        )
    for y in outputs[n:]:
      if y.dtype == tf.bool:
        raise DTypeError(f"{self.name}: the accumulator {y} is bool, which cannot be summed up")

  @property
  def scalar_summaries(self) -> list[ScalarSummaryOperation]:
    """Summaries made in the body, also in blocks inside it; the last iteration's count."""
    return summaries_of(self.body.operations)

  def gradient(self, grad_ys: list[Tensor | None]) -> Sequence[Tensor | None]:
    return self.gradient_of(grad_ys, None)

  def gradient_of(
    self, grad_ys: Sequence[Tensor | None], wanted: Sequence[bool] | None
  ) -> list[Tensor | None]:
    """Gradients of the requested inputs, by a loop that runs backwards.

    The forward loop pushes the tensors of each iteration that the gradient of the body needs onto
    stacks; the backward loop pops them. Gradients of captured tensors are accumulated in the
    backward loop, and reduced over the mesh once, after it.

    Args:
      grad_ys: a gradient or None for each output.
      wanted: whether the gradient is wanted, for each input; by default all are.

    Raises:
      GradientError: the loop was made with `back_prop=False`.
    """
    if not self._back_prop:
      raise GradientError(
        f"gradients: {self.name} was made with back_prop=False, so it keeps nothing for a backward "
        "pass; leave that out, or stop the gradient behind the loop with mtf.stop_gradient"
      )
    return _Differentiation(self, list(grad_ys), wanted_inputs(self, wanted)).run()

  def keep(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Adds outputs that carry intermediates of each iteration to the backward pass.

    Args:
      tensors: to keep of each iteration.

    Returns:
      The number of iterations, and for each tensor the stack.
    """
    first, most = len(self.body.outputs), self.maximum_iterations
    outputs = list(self._outputs)
    if not self.is_differentiated:
      outputs.append(Tensor(self, Shape([]), tf.int32, name="iterations", index=first))
    saved = dict.fromkeys(self.saved)
    for x in tensors:
      if x not in saved:
        saved[x] = None
        element = element_like(x, most if isinstance(most, int) else None)
        outputs.append(stack_tensor(self, element, len(outputs), name=f"{x.name}:stack"))
    # New lists: a copy of this operation may share the old ones.
    self.is_differentiated, self.saved, self._outputs = True, tuple(saved), outputs
    stacks = dict(zip(self.saved, outputs[first + 1 :]))
    return outputs[first], [stacks[x] for x in tensors]

  def lower(self, lowering: LoweringInProgress) -> None:
    LoweredLoop(self, lowering).run()


class _Differentiation:
  """The backward pass of a loop.

  Args:
    loop: the loop.
    grad_ys: a gradient or None for each of its outputs.
    wanted: whether a gradient is wanted, for each of its inputs.
  """

  def __init__(self, loop: WhileLoopOperation, grad_ys: list[Tensor | None], wanted: list[bool]):
    self.loop, self.body, self.wanted = loop, loop.body, wanted
    n, regular = loop.num_variables, len(self.body.outputs)
    self.grad_ys = grad_ys[:n]
    accumulated = list(zip(self.body.outputs[n:], grad_ys[n:regular]))
    # The same in each iteration: the sum has it for every summand.
    self.accumulators = [(y, like(g, y)) for y, g in accumulated if g is not None]
    # A gradient of this gradient comes by the stacks, one for each iteration.
    kept = zip(loop.saved, grad_ys[regular + 1 :])
    self.kept = [(x, g) for x, g in kept if g is not None]
    self.keys = [x for w, x in zip(wanted[n:], loop._keys) if w]
    self.active = self._active()

  def _active(self) -> list[int]:
    """Numbers of the loop variables on a path from requested inputs to outputs with gradients."""
    operations, inputs, outputs = self.body.operations, self.body.placeholders, self.body.outputs
    n = self.loop.num_variables
    forward = {i for i in range(n) if self.wanted[i]}
    backward = {i for i in range(n) if self.grad_ys[i] is not None}
    sources = set(self.keys)
    results = {x for x, _ in self.accumulators + self.kept}
    while True:
      reached = downstream(operations, sources | {inputs[i] for i in forward})
      more = {i for i in range(n) if outputs[i] in reached} - forward
      if not more:
        break
      forward |= more
    while True:
      reached = upstream(operations, results | {outputs[i] for i in backward})
      more = {i for i in range(n) if inputs[i] in reached} - backward
      if not more:
        break
      backward |= more
    return [i for i in sorted(forward & backward) if carries_gradient(inputs[i])]

  def run(self) -> list[Tensor | None]:
    loop, active = self.loop, self.active
    n = loop.num_variables
    outputs = [self.body.outputs[i] for i in active]
    # They stand for the gradients that the backward loop has for an iteration.
    given = [_stand_in(loop, y) for y in outputs + [x for x, _ in self.kept]]
    backward = block_gradients(
      self.body,
      outputs + [x for x, _ in self.kept] + [y for y, _ in self.accumulators],
      given + [g for _, g in self.accumulators if g is not None],
      [self.body.placeholders[i] for i in active] + self.keys,
    )
    summed = [x for x, g in zip(self.keys, backward.grads[len(active) :]) if g is not None]
    for x in summed:
      if is_stack(x):
        raise UnsupportedError(
          f"gradients: {loop.name} uses the stack {x}, to which each iteration would give another "
          "gradient; take second gradients of the loop inside, or stop one with mtf.stop_gradient"
        )
    results: list[Tensor | None] = [None] * len(loop.inputs)
    if active or summed:
      found = self._backward_loop(backward, given)
      for i, g in zip(active, found):
        results[i] = g
      for x, g in zip(summed, found[len(found) - len(summed) :]):
        results[n + loop._keys.index(x)] = g
    return [g if w else None for g, w in zip(results, self.wanted)]

  def _backward_loop(self, backward: BackwardBlock, given: list[Tensor]) -> list[Tensor]:
    """The outputs of the loop that runs backwards: gradients of variables first, sums last."""
    loop, graph = self.loop, self.loop.graph
    count, stacks = loop.keep(backward.saved)
    start: list[Tensor] = []
    for i in self.active:
      y = loop.outputs[i]
      g = like(self.grad_ys[i], y)
      start.append(zero_gradient(y) if g is None else g)
    num, num_kept = len(start), len(self.kept)

    def body_fn(k: Tensor, *state: Tensor) -> list[Tensor]:
      values = dict(zip(given, state[:num]))
      rests = []
      for stack in state[num:]:
        rest, value = pop(stack)
        rests.append((rest, value))
      values.update(zip(given[num:], [v for _, v in rests[:num_kept]]))
      values.update(zip(backward.saved, [v for _, v in rests[num_kept:]]))
      grads = backward.put_into_graph(graph, values)
      variables = [
        zero_gradient(y) if g is None else g
        for g, y in zip(grads, [self.body.placeholders[i] for i in self.active])
      ]
      sums = [g for g in grads[num:] if g is not None]
      return [sub(k, 1), *variables, *[rest for rest, _ in rests], *sums]

    kept = [g for _, g in self.kept]
    backward_loop = type(loop)(
      lambda k, *_: greater(k, 0),
      body_fn,
      [count, *start, *kept, *stacks],
      loop.tf_kwargs,
      has_accumulators=True,
      name="backward_loop",
      counts_down=True,
    )
    backward_loop.use_captured_of(loop)
    return backward_loop.outputs[1:]


def _stand_in(loop: WhileLoopOperation, y: Tensor) -> Tensor:
  result = Tensor(loop, y.shape, y.dtype, name=f"{y.name}:gradient")
  result.stack_of = y.stack_of
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

  Random operations draw anew in each iteration.

  It has gradients, also if the number of iterations depends on data (Yu et al., "Dynamic Control
  Flow in Large-Scale Machine Learning", 2018): each processor saves the slices of each iteration
  that its backward pass needs; only the loop variables, with the body in `mtf.recompute_grad`.
  Random numbers are not drawn again. Gradients of captured tensors, weights among them, are
  accumulated over the iterations and reduced over the mesh once.

  Args:
    cond_fn: takes a `Tensor` for each loop variable, returns a bool scalar.
    body_fn: takes the same, returns a list of their new values (of the same shapes and
      dtypes), and then, with `has_accumulators`, any other tensors.
    inputs: initial values of the loop variables.
    num_loop_vars: number of loop variables to return, from the first. (TF1 kept the others in
      variables, because its loops could not have many; here all are loop variables.)
    has_accumulators: the body's other outputs are summed up over the iterations, from
      zero. Sums over the mesh that are pending in the body are executed once, after the loop.
    **kwargs: `maximum_iterations`, `parallel_iterations`, `swap_memory` or `name` of
      `tf.while_loop`; `back_prop=False` refuses gradients.

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
