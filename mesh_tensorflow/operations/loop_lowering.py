"""A loop in TensorFlow: `tf.while_loop` over a flat list of slices.

Sums that grow by one position at a time are lists of rows, which the loop changes in place. The
gradient of a gather at one position is a scatter there, zeros elsewhere. To add up such tensors in
a loop would cost, over all iterations, the square of their number; and a tensor that a loop writes
into is copied in each iteration, as TensorFlow's loops have it. A `TensorList` is not.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import GraphError, UnsupportedError
from mesh_tensorflow.meshes.cross_mesh import whole_everywhere
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LaidOut, LaidOutTensor, LazyAllreduceSum
from mesh_tensorflow.meshes.slices import transpose_to
from mesh_tensorflow.numerics import constants, kernels
from mesh_tensorflow.operations.blocks import with_inner
from mesh_tensorflow.operations.indexing import ScatterAddOperation, begin_of, is_split, keep_where
from mesh_tensorflow.operations.stacks import element_like, empty_slices, push_slices
from mesh_tensorflow.operations.variables import Variable, grouped
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.program.graph import Operation, Tensor, reads


def has_one_position(op: ScatterAddOperation) -> bool:
  """True if the index of a scatter is a scalar, so that it adds to one row."""
  return not op.inputs[1].shape.ndims


def _indexed_first(op: ScatterAddOperation) -> Shape:
  return Shape([op.dim, *(op.outputs[0].shape - op.dim)])


def empty_rows(op: ScatterAddOperation, lowering: LoweringInProgress) -> Any:
  """Creates each processor's list of rows of the scatter's output, along the indexed dimension.

  Args:
    op: the scatter.
    lowering: the lowering in which the loop is lowered.
  """
  impl = lowering.mesh_impl(op)
  size, *sizes = impl.slice_shape(_indexed_first(op))
  return impl.slicewise(
    lambda: tf.raw_ops.TensorListReserve(
      element_shape=tf.constant(sizes, tf.int32),
      num_elements=size,
      element_dtype=op.outputs[0].dtype,
    )
  )


def add_to_row(op: ScatterAddOperation, lowering: LoweringInProgress, rows: LaidOut) -> Any:
  """Adds the scatter's update to its row; returns the new list.

  Args:
    op: the scatter.
    lowering: the lowering that has its inputs.
    rows: the list, from `empty_rows` or an earlier call.
  """
  impl = lowering.mesh_impl(op)
  y, indices = op.inputs
  rest = _indexed_first(op).dims[1:]
  size, *sizes = impl.slice_shape(_indexed_first(op))
  checked = is_split(impl, op.dim) or not op.in_range

  def add_row(handle: tf.Tensor, row: tf.Tensor, i: tf.Tensor, begin: int | tf.Tensor) -> tf.Tensor:
    row = transpose_to(row, y.shape.dims, rest)
    i = tf.cast(i, tf.int32)
    if checked:
      i = i - tf.cast(begin, i.dtype)
      safe = tf.clip_by_value(i, 0, size - 1)
      row = keep_where(row, tf.equal(safe, i))
      i = safe
    # Rows without a value are read as zeros.
    before = tf.raw_ops.TensorListGetItem(
      input_handle=handle,
      index=i,
      element_shape=tf.constant(sizes, tf.int32),
      element_dtype=row.dtype,
    )
    total = tf.add(tf.ensure_shape(before, sizes), row)
    return tf.raw_ops.TensorListSetItem(input_handle=handle, index=i, item=total)

  return impl.slicewise(
    add_row,
    rows,
    lowering.tensors[y].to_laid_out_tensor(),
    lowering.tensors[indices],
    begin_of(impl, op.dim),
  )


def from_rows(op: ScatterAddOperation, lowering: LoweringInProgress, rows: LaidOut) -> Any:
  """Stacks the rows to the slices of the sum.

  Args:
    op: the scatter.
    lowering: the lowering in which the loop is lowered.
    rows: the list.
  """
  impl = lowering.mesh_impl(op)
  shape, out = _indexed_first(op), op.outputs[0]
  size, *sizes = impl.slice_shape(shape)

  def stack(handle: tf.Tensor) -> tf.Tensor:
    t = tf.raw_ops.TensorListStack(
      input_handle=handle,
      element_shape=tf.constant(sizes, tf.int32),
      element_dtype=out.dtype,
      num_elements=size,
    )
    return transpose_to(tf.ensure_shape(t, [size, *sizes]), shape.dims, out.shape.dims)

  return impl.slicewise(stack, rows)


class LoweredLoop:
  """One lowering of a loop.

  The list is: the iteration number (if random numbers are drawn, or a backward pass counts down
  from it), the slices of the loop variables, those of the accumulators, those of the stacks, and
  the scalar summaries.
  """

  def __init__(self, loop: Any, lowering: LoweringInProgress):
    self.loop, self.lowering = loop, lowering
    self.impl = lowering.mesh_impl(loop)
    # Of several meshes it is a loop around their programs, of plain loop variables.
    impls = {lowering.mesh_impl(op) for op in with_inner(loop.body.operations)}
    self.of_several_meshes = len(impls) > 1
    # Then all workers need to know whether the loop goes on.
    self.crosses_workers = self.of_several_meshes and any(impl.is_of_cluster for impl in impls)
    if self.of_several_meshes and (
      loop.is_differentiated or len(loop.body.outputs) > loop.num_variables
    ):
      raise UnsupportedError(
        f"{type(loop).__name__} {loop.name}: its body is of several meshes, and it has accumulators"
        " or a gradient; only mtf.serialize_training_step can do that with several meshes"
      )
    for x in loop.captured:
      # Programs of several meshes read variables by themselves.
      by_itself = self.of_several_meshes and isinstance(x.operation, Variable)
      if x not in lowering.tensors and not by_itself:
        raise GraphError(f"{loop.name} uses {x}, which is not computed before the loop")
    lowering.prepare_random(loop.inner_operations)
    self.outside = loop.outside(lowering)
    # Of a loop that crosses workers, one may have no other loop variable.
    self.numbered = loop.draws_random_numbers or loop.is_differentiated or self.crosses_workers
    self.summaries = loop.scalar_summaries
    body = loop.body
    self.n, self.regular = loop.num_variables, len(body.outputs)
    # By accumulator: the scatter that only adds to it, done in place on a list.
    self.scatters = scatters_of(body.operations, body.outputs, self.n)
    skipped = set(self.scatters.values())
    self.body_operations = [op for op in body.operations if op not in skipped]
    # By accumulator: the sum that was pending in the body. Operations that were run in it.
    self.pending: dict[int, LazyAllreduceSum] = {}
    self.run_inside: dict[Operation, None] = {}

  def run(self) -> None:
    loop, lowering, impl = self.loop, self.lowering, self.impl
    state = [lowering.tensors[x].to_laid_out_tensor() for x in loop.inputs[: self.n]]
    for i in range(self.n, self.regular):
      if i in self.scatters:
        state.append(empty_rows(self.scatters[i], lowering))
        continue
      y = loop.body.outputs[i]
      state.append(impl.slicewise(lambda y=y: tf.zeros(impl.slice_shape(y.shape), y.dtype)))
    most = loop.maximum_iterations if isinstance(loop.maximum_iterations, int) else -1
    state += [empty_slices(impl, element_like(x), most) for x in loop.saved]
    # Number of slices of each laid-out tensor in this program.
    self.widths = [len(x.tensor_list) for x in state]
    # tf.while_loop wants a value before the first iteration; if there is none, it stays.
    summaries = [tf.zeros([], op.dtype) for op in self.summaries]
    initial = self.flatten(tf.constant(0) if self.numbered else None, state, summaries)
    results = tf.while_loop(self.cond, self.body, initial, **loop.tf_kwargs)
    number, state, summaries = self.unflatten(list(results))
    for i, scatter in self.scatters.items():
      state[i] = from_rows(scatter, lowering, state[i])
    for i, (out, laid_out) in enumerate(zip(loop.outputs, state[: self.regular])):
      pending = self.pending.get(i)
      lowering.set_tensor_lowering(
        out,
        laid_out
        if pending is None
        else LazyAllreduceSum(
          impl, laid_out, pending.mesh_axes, add_counter_fn=pending.add_counter_fn
        ),
      )
    if loop.is_differentiated:
      extra = [impl.slicewise(lambda: tf.identity(number)), *state[self.regular :]]
      for out, laid_out in zip(loop.outputs[self.regular :], extra):
        lowering.set_tensor_lowering(out, laid_out)
    lowering.scalar_summaries += [(op.name, x) for op, x in zip(self.summaries, summaries)]
    for op in self.run_inside:
      # Dependencies on an assignment in the body wait for the end of the loop.
      lowering.operations[op] = grouped(results)

  def flatten(
    self, number: LaidOutTensor | None, state: list[LaidOutTensor], summaries: list[Any]
  ) -> list[Any]:
    flat = [] if number is None else [number]
    for laid_out in state:
      flat += [tf.convert_to_tensor(t) for t in laid_out.tensor_list]
    return flat + summaries

  def unflatten(self, flat: list[Any]) -> tuple[Any, list[LaidOutTensor], list[Any]]:
    number = flat.pop(0) if self.numbered else None
    state, end = [], 0
    for width in self.widths:
      state.append(self.impl.LaidOutTensor.from_tensor_list(flat[end : end + width]))
      end += width
    return number, state, flat[end:]

  @constants.of_one_graph()
  @kernels.sums_apart()
  def cond(self, *flat: tf.Tensor) -> tf.Tensor:
    condition = self.loop.condition
    number, state, _ = self.unflatten(list(flat))
    inner = self.child(number, condition.placeholders, state)
    inner.lower_block(condition.operations, condition.outputs)
    goes_on = condition.outputs[0]
    laid_out = inner.tensors[goes_on].to_laid_out_tensor()
    if self.crosses_workers:
      impl, slices = self.lowering.mesh_impl(goes_on), laid_out.tensor_list
      return whole_everywhere(impl, goes_on.shape, goes_on.dtype, slices)
    return laid_out.one_slice

  @constants.of_one_graph()
  @kernels.sums_apart()
  def body(self, *flat: tf.Tensor) -> list[tf.Tensor]:
    body, impl = self.loop.body, self.impl
    number, state, _ = self.unflatten(list(flat))
    inner = self.child(number, body.placeholders, state)
    inner.lower_block(self.body_operations, body.outputs)
    # A loop variable is read as it is in the next iteration, so it must be reduced.
    new_state = [inner.tensors[y].to_laid_out_tensor() for y in body.outputs[: self.n]]
    for i in range(self.n, self.regular):
      if i in self.scatters:
        new_state.append(add_to_row(self.scatters[i], inner, state[i]))
        continue
      value = inner.tensors[body.outputs[i]]
      if isinstance(value, LazyAllreduceSum) and not value.is_reduced:
        # The parts are added up, and exchanged once, after the loop.
        self.pending[i] = value
        value = value.laid_out_input
      new_state.append(impl.slicewise(kernels.of_its_own(tf.add), state[i], value))
    for stack, x in zip(state[self.regular :], self.loop.saved):
      new_state.append(push_slices(impl, stack, inner.tensors[x].to_laid_out_tensor()))
    self.run_inside.update(
      (op, None) for op in inner.operations if op not in self.outside.operations
    )
    return self.flatten(
      None if number is None else number + 1, new_state, [x for _, x in inner.scalar_summaries]
    )

  def child(
    self, number: LaidOutTensor | None, placeholders: list[Tensor], state: list[LaidOutTensor]
  ) -> Any:
    """A lowering for one iteration."""
    if number is not None and self.loop.counts_down:
      # Random operations here recompute an iteration of the forward pass: they need its number.
      number = self.impl.slicewise(lambda k: k - 1, state[0])
    inner = self.outside.child(number, self.impl)
    # Copies: `body` tells by the difference what was run inside.
    inner.operations = dict(self.outside.operations)
    inner.scalar_summaries = []
    inner.tensors.update(zip(placeholders, state))
    return inner


def scatters_of(
  operations: list[Operation], outputs: list[Tensor], n: int
) -> dict[int, ScatterAddOperation]:
  """Accumulators to which each iteration adds one position: the gradient of a gather, say.

  Args:
    operations: of the body.
    outputs: of the body.
    n: number of loop variables, which come first among the outputs.

  Returns:
    By number of the output, the scatter.
  """
  uses: dict[Tensor, int] = {}
  for x in [x for op in operations for x in reads(op)] + outputs:
    uses[x] = uses.get(x, 0) + 1
  made = set(operations)
  return {
    i: y.operation
    for i, y in enumerate(outputs)
    if i >= n
    and uses[y] == 1
    and isinstance(y.operation, ScatterAddOperation)
    and y.operation in made
    and has_one_position(y.operation)
  }
