"""A condition: one of two functions is run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import ArgumentError, DTypeError, GraphError, ShapeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LaidOut, LaidOutTensor
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.numerics import constants
from mesh_tensorflow.operations.blocks import (
  BackwardBlock,
  Block,
  BlockOperation,
  block_gradients,
  capture,
  like,
  summaries_of,
  wanted_inputs,
)
from mesh_tensorflow.operations.stacks import (
  element_like,
  empty_slices,
  is_stack,
  pop,
  push_slices,
  stack_tensor,
  zero_gradient,
)
from mesh_tensorflow.operations.variables import grouped
from mesh_tensorflow.program.argument_kinds import BoolTensor
from mesh_tensorflow.program.graph import Operation, Tensor, check_one_graph, on_stage

__all__ = ["ConditionalOperation", "cond"]


class ConditionalOperation(BlockOperation):
  """Runs one of two functions; see `cond`.

  Both are called once, here. Their operations are kept in this one; the variables that they create
  go to the graph, in front of it.

  Args:
    pred: a bool scalar.
    true_fn: function without arguments; its outputs are the result if `pred` is true.
    false_fn: function without arguments; as many outputs, of the same shapes and dtypes.
    name: of the operation.
  """

  def __init__(
    self,
    pred: Tensor,
    true_fn: Callable[[], object],
    false_fn: Callable[[], object],
    name: str | None = None,
  ):
    super().__init__([pred], name=name or "cond")
    if pred.dtype != tf.bool or pred.shape.ndims:
      raise GraphError(
        f"{self.name}: pred must be a bool scalar, got {pred}; reduce it (mtf.reduce_all, "
        "mtf.reduce_any), or select element by element (mtf.where)"
      )
    self._blocks = []
    self.structures: list[type] = []
    for fn in (true_fn, false_fn):
      self._blocks.append(self._block(fn))
      # Before the other is called: what one branch makes, the other cannot use.
      self._blocks[-1].forbid_use()
    self._check_outputs(true_fn, false_fn)
    self._outputs = []
    for i, x in enumerate(self._blocks[0].outputs):
      self._outputs.append(Tensor(self, x.shape, x.dtype, name=f"output:{i}", index=i))
      self._outputs[-1].stack_of = x.stack_of
    # Tensors that each branch saves for the backward pass, if there is one.
    self.saved: tuple[tuple[int, Tensor], ...] = ()
    self._keys = list(dict.fromkeys([x for block in self._blocks for x in block.captured()]))
    check_one_graph(self.name, pred, self._keys)
    self._inputs += self._keys
    self._initialize_all_dimensions_as_splittable()

  @property
  def branches(self) -> list[Block]:
    """Blocks of the true and the false branch, in this order."""
    return list(self._blocks)

  def _block(self, fn: Callable[[], object]) -> Block:
    try:
      inspect.signature(fn).bind()
    except ValueError:  # Of a builtin nothing is known.
      pass
    except TypeError:
      raise ArgumentError(
        f"{self.name}: {_name(fn)}{inspect.signature(fn)} must take no argument; what it uses from "
        "outside it finds by itself"
      ) from None

    def on_one_mesh() -> list[Any]:
      result = fn()
      self.structures.append(type(result))
      outputs = list(result) if isinstance(result, (list, tuple)) else [result]
      return [] if result is None else [on_stage(y) for y in outputs]

    outputs, operations = capture(self.graph, on_one_mesh)
    for y in outputs:
      if not isinstance(y, Tensor):
        raise GraphError(f"{self.name}: {_name(fn)} must return mtf.Tensors, got {y!r}")
    return Block([], operations, outputs)

  def _check_outputs(self, true_fn: Callable[[], object], false_fn: Callable[[], object]) -> None:
    ys, zs = (block.outputs for block in self._blocks)
    names = f"{_name(true_fn)} returned", f"{_name(false_fn)}"
    if len(ys) != len(zs):
      raise GraphError(
        f"{self.name}: {names[0]} {len(ys)} tensors, {names[1]} {len(zs)}; both must return as many"
      )
    for i, (y, z) in enumerate(zip(ys, zs)):
      if y.shape != z.shape:
        raise ShapeError(
          f"{self.name}: result {i}: {names[0]} {y}, {names[1]} {z}; both must have one shape"
        )
      if y.dtype != z.dtype:
        raise DTypeError(
          f"{self.name}: result {i}: {names[0]} {y}, {names[1]} {z}; cast one (mtf.cast)"
        )

  def gradient(self, grad_ys: list[Tensor | None]) -> Sequence[Tensor | None]:
    return self.gradient_of(grad_ys, None)

  def gradient_of(
    self, grad_ys: Sequence[Tensor | None], wanted: Sequence[bool] | None
  ) -> list[Tensor | None]:
    """Gradients of the requested inputs, by another condition on the same predicate.

    Each branch outputs the intermediates that its backward pass needs; the backward pass of the
    branch that was run is run.

    Args:
      grad_ys: a gradient or None for each output.
      wanted: whether the gradient is wanted, for each input; by default all are.
    """
    wanted = wanted_inputs(self, wanted)
    regular = len(self._blocks[0].outputs)
    keys = [x for x, w in zip(self._keys, wanted[1:]) if w]
    backward, popped = [], []
    for branch, block in enumerate(self._blocks):
      pairs = [(y, like(g, y)) for y, g in zip(block.outputs, grad_ys[:regular])]
      given = [(y, g) for y, g in pairs if g is not None]
      # Gradients of what was kept are on stacks, as it is itself: they stand for the elements.
      kept = [
        (x, g) for (b, x), g in zip(self.saved, grad_ys[regular:]) if b == branch and g is not None
      ]
      stand_ins = {self._stand_in(x): g for x, g in kept}
      ys = [y for y, _ in given] + [x for x, _ in kept]
      gs = [g for _, g in given] + list(stand_ins)
      backward.append(block_gradients(block, ys, gs, keys))
      popped.append(stand_ins)
    reached = [x for x, *grads in zip(keys, *(b.grads for b in backward)) if _any_of(grads)]
    results: dict[Tensor, Tensor] = {}
    if reached:
      places = [keys.index(x) for x in reached]
      stacks = self.keep([(i, x) for i, b in enumerate(backward) for x in b.saved])
      for b, own, branch_stacks in zip(backward, popped, _cut(stacks, backward)):
        own.update(zip(b.saved, branch_stacks))
      true_fn, false_fn = (
        self._backward_fn(b, values, keys, places) for b, values in zip(backward, popped)
      )
      op = ConditionalOperation(self._inputs[0], true_fn, false_fn, name="backward_cond")
      op.use_captured_of(self)
      results = dict(zip(reached, op.outputs))
    return [None] + [results.get(x) for x in self._keys]

  def _stand_in(self, x: Tensor) -> Tensor:
    result = Tensor(self, x.shape, x.dtype, name=f"{x.name}:gradient")
    result.stack_of = x.stack_of
    return result

  def _backward_fn(
    self,
    backward: BackwardBlock,
    stacks: dict[Tensor, Tensor],
    keys: Sequence[Tensor],
    places: Sequence[int],
  ) -> Callable[[], list[Tensor]]:
    def backward_fn() -> list[Tensor]:
      values = {x: pop(stack)[1] for x, stack in stacks.items()}
      grads = backward.put_into_graph(self.graph, values)
      found = []
      for i in places:
        g = grads[i]
        found.append(zero_gradient(keys[i]) if g is None else g)
      return found

    return backward_fn

  def keep(self, tensors: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
    """Adds outputs that carry a branch's intermediates to the backward pass.

    Args:
      tensors: number of the branch, and the tensor.

    Returns:
      For each tensor a stack, of one element or none.
    """
    outputs, saved = list(self._outputs), dict.fromkeys(self.saved)
    for branch, x in tensors:
      if (branch, x) not in saved:
        saved[branch, x] = None
        element = element_like(x, 1)
        outputs.append(stack_tensor(self, element, len(outputs), name=f"{x.name}:stack"))
    # New lists: a copy of this operation may share the old ones.
    self.saved, self._outputs = tuple(saved), outputs
    stacks = dict(zip(self.saved, outputs[len(self._blocks[0].outputs) :]))
    return [stacks[key] for key in tensors]

  @property
  def exchanges_over_whole_mesh(self) -> bool:
    """True if the lowering communicates over all mesh axes, also those that split none of it.

    A predicate computed from floating-point numbers may differ between processors.
    """
    return not _is_exact(self._inputs[0])

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    for x in self.captured:
      if x not in lowering.tensors:
        raise GraphError(f"{self.name} uses {x}, which is not computed before it")
    lowering.prepare_random(self.inner_operations)
    outside = self.outside(lowering)
    summaries = self.scalar_summaries
    run_inside: dict[Operation, None] = {}

    def branch_fn(number: int) -> Callable[[], list[tf.Tensor]]:
      @constants.of_one_graph()
      def run() -> list[tf.Tensor]:
        inner = self._child(outside, number)
        values = self._values(inner, number)
        run_inside.update((op, None) for op in inner.operations if op not in outside.operations)
        reported = self._reported(number, inner)
        flat = [tf.convert_to_tensor(t) for v in values for t in v.tensor_list]
        # tf.cond wants one value at least.
        return [*flat, *reported, tf.constant(0)]

      return run

    pred = _agreed(impl, self._inputs[0], lowering.tensors[self._inputs[0]])
    results = list(tf.cond(pred, branch_fn(0), branch_fn(1)))
    count = (len(results) - 1 - len(summaries)) // max(1, len(self._outputs))
    for i, out in enumerate(self._outputs):
      slices = results[i * count : (i + 1) * count]
      lowering.set_tensor_lowering(out, impl.LaidOutTensor.from_tensor_list(slices))
    reported = results[len(results) - 1 - len(summaries) : -1]
    lowering.scalar_summaries += [(op.name, x) for op, x in zip(summaries, reported)]
    for op in run_inside:
      # Dependencies on an assignment in a branch wait for the end of the condition.
      lowering.operations[op] = grouped(results)

  def _child(self, outside: Any, number: int) -> Any:
    """Lowers the operations of a branch in a child lowering; returns it."""
    inner = outside.child()
    inner.operations, inner.scalar_summaries = dict(outside.operations), []
    inner.lower_operations(self._blocks[number].operations)
    return inner

  def _values(self, inner: LoweringInProgress, number: int) -> list[LaidOutTensor]:
    """Outputs of a branch, and the stacks of saved tensors: those of the other branch empty."""
    impl = inner.mesh_impl(self)
    values = [inner.tensors[y].to_laid_out_tensor() for y in self._blocks[number].outputs]
    for branch, x in self.saved:
      stack = empty_slices(impl, element_like(x), 1)
      if branch == number:
        stack = push_slices(impl, stack, inner.tensors[x].to_laid_out_tensor())
      values.append(stack)
    return values

  def _reported(self, number: int, inner: LoweringInProgress) -> list[Any]:
    """Scalar summaries of both branches; zeros for the one that is not run."""
    found = iter(value for _, value in inner.scalar_summaries)
    return [
      next(found) if branch == number else tf.zeros([], op.dtype)
      for branch, block in enumerate(self._blocks)
      for op in summaries_of(block.operations)
    ]


def _any_of(grads: Sequence[Tensor | None]) -> bool:
  """True if any gradient is not None (a Tensor has no truth value)."""
  return any(g is not None for g in grads)


def _cut(stacks: Sequence[Tensor], backward: Sequence[BackwardBlock]) -> list[Sequence[Tensor]]:
  """Splits the stacks of saved tensors by branch."""
  first = len(backward[0].saved)
  return [stacks[:first], stacks[first:]]


def _name(fn: Callable[..., object]) -> str:
  return str(getattr(fn, "__name__", fn))


def _agreed(impl: MeshImpl, pred: Tensor, laid_out: LaidOut) -> tf.Tensor:
  """Makes the predicate equal on all processors; diverging branches would deadlock.

  All processors compute it from the same values, but floats may differ in their last bits where
  TensorFlow's optimizer rewrites equal parts of two programs differently.
  """
  laid_out = laid_out.to_laid_out_tensor()
  several = len(laid_out.tensor_list) < impl.size
  if several and not _is_exact(pred):
    as_int = impl.slicewise(lambda t: tf.cast(t, tf.int32), laid_out)
    agreed = impl.allreduce(as_int, list(range(impl.ndims)), "MIN")
    laid_out = impl.slicewise(lambda t: tf.cast(t, tf.bool), agreed)
  result: tf.Tensor = laid_out.one_slice
  return result


def _is_exact(pred: Tensor) -> bool:
  """True if a tensor is computed from integers and booleans only."""
  seen: set[Tensor] = set()
  waiting = [pred]
  while waiting:
    x = waiting.pop()
    if x in seen:
      continue
    seen.add(x)
    if x.dtype.is_floating or x.dtype.is_complex or is_stack(x):
      return False
    waiting += x.operation.inputs
  return True


def cond(
  pred: BoolTensor,
  true_fn: Callable[[], object],
  false_fn: Callable[[], object],
  name: str | None = None,
) -> Any:
  """Returns `true_fn()` if `pred` is true, else `false_fn()`.

  Only one of them is run, on all processors the same, so both may communicate, assign to variables
  and contain loops. Both are traced, once. There are gradients for what they use from outside:
  those of the function that was run, and zeros for what only the other one uses.

  Args:
    pred: a bool scalar `Tensor`. To choose element by element: `mtf.where`.
    true_fn: takes nothing, returns a `Tensor`, a list or tuple of them, or None.
    false_fn: takes nothing, returns as many tensors, of the same shapes and dtypes.
    name: of the operation.

  Returns:
    A `Tensor`, or a list of them if `true_fn` returned a list or tuple; None if it did.

  Raises:
    GraphError: `pred` is no bool scalar, or the functions return different numbers of tensors.
    ShapeError: a result has different shapes.
    DTypeError: a result has different dtypes.
  """
  op = ConditionalOperation(pred, true_fn, false_fn, name=name)
  if op.structures[0] is type(None):
    return None
  return op.outputs if issubclass(op.structures[0], (list, tuple)) else op.outputs[0]
