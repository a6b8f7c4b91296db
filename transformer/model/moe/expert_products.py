"""Products of rows with the matrices of their experts, whatever their numbers are.

Rows are sorted by expert and multiplied in blocks, each block with one matrix. Of n rows and e
experts there are at most n / block + e blocks, whatever the routing is: work is that of the rows,
but for blocks that are not full, and all shapes are known when the program is built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LazyAllreduceSum
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.slices import transpose_to
from mesh_tensorflow.operations.indexing import begin_of
from mesh_tensorflow.operations.reduction import mesh_axes_of
from mesh_tensorflow.program.dimensions import list_product
from mesh_tensorflow.program.graph import Operation

# Rows of a block, at most: enough for a product to be faster than the reading of its matrix.
_BLOCK = 128


@dataclasses.dataclass(frozen=True)
class _Blocks:
  """Rows sorted by expert, in blocks of rows of one expert.

  Attributes:
    rows: int32 [blocks, rows of a block]: numbers of rows; where a block is not full, that behind
      the last.
    expert: int32 [blocks].
    count: int32 scalar: how many blocks there are in use, the first ones.
    number: how many rows there are.
    dtype: of what is computed.
  """

  rows: tf.Tensor
  expert: tf.Tensor
  count: tf.Tensor
  number: int
  dtype: tf.DType

  @classmethod
  def of(cls, index: tf.Tensor, num_experts: int, dtype: tf.DType) -> _Blocks:
    """The blocks of rows, of which these [rows] are the experts; -1 for none."""
    n = int(index.shape[0])
    size = max(1, min(_BLOCK, -(-n // num_experts)))
    index = tf.where(index < 0, num_experts, index)
    # Stable, so that sums are taken in the order of rows.
    order = tf.argsort(index, stable=True)
    counts = tf.math.unsorted_segment_sum(tf.ones_like(index), index, num_experts + 1)[:-1]
    blocks = (counts + (size - 1)) // size
    first_row = tf.cumsum(counts, exclusive=True)
    last_block = tf.cumsum(blocks)
    number = tf.range(-(-n // size) + num_experts)
    expert = tf.searchsorted(last_block, number, side="right", out_type=tf.int32)
    expert = tf.minimum(expert, num_experts - 1)
    within = (number - tf.gather(last_block - blocks, expert)) * size
    within = within[:, tf.newaxis] + tf.range(size)
    place = tf.gather(first_row, expert)[:, tf.newaxis] + within
    rows = tf.gather(order, tf.minimum(place, n - 1))
    in_use = within < tf.gather(counts, expert)[:, tf.newaxis]
    return cls(tf.where(in_use, rows, n), expert, tf.reduce_sum(blocks), n, dtype)

  def products(self, fn: Callable[[tf.Tensor, tf.Tensor], tf.Tensor], columns: int) -> tf.Tensor:
    """fn(rows of the block, its expert) [rows of a block, columns] of all blocks, one array.

    Blocks that are not in use are zeros.
    """
    blocks, size = self.rows.shape.as_list()
    # Arrays, for a tensor that the loop writes into would be copied in each step.
    results = tf.TensorArray(self.dtype, blocks, element_shape=[size, columns])
    _, results = tf.while_loop(
      lambda i, _: i < self.count,
      lambda i, results: (i + 1, results.write(i, fn(self.rows[i], self.expert[i]))),
      [0, results],
    )
    return tf.reshape(results.stack(), [blocks * size, columns])

  def sums(
    self, fn: Callable[[tf.Tensor], tf.Tensor], num_experts: int, shape: Sequence[int]
  ) -> tf.Tensor:
    """For each expert the sum of fn(rows of the block), of this shape, over its blocks."""
    results = tf.TensorArray(self.dtype, num_experts, element_shape=shape)

    def step(i: tf.Tensor, total: tf.Tensor, results: tf.TensorArray) -> tuple[Any, ...]:
      expert = self.expert[i]
      # Blocks are in the order of experts: what is written for one last is its whole sum.
      same = (i > 0) & tf.equal(expert, self.expert[tf.maximum(i - 1, 0)])
      total = fn(self.rows[i]) + tf.where(same, total, tf.zeros_like(total))
      return i + 1, total, results.write(expert, total)

    *_, results = tf.while_loop(
      lambda i, *_: i < self.count, step, [0, tf.zeros(shape, self.dtype), results]
    )
    return results.stack()


@dataclasses.dataclass(frozen=True)
class _Rows:
  """The rows of products: all combinations of owners of experts, tokens, and choices of tokens.

  Attributes:
    owners: dims of which each index has experts of its own.
    tokens: dims of tokens.
    choices: dims of the choices of a token.
  """

  owners: list[mtf.Dimension]
  tokens: list[mtf.Dimension]
  choices: list[mtf.Dimension]

  @property
  def dims(self) -> list[mtf.Dimension]:
    return [*self.owners, *self.tokens, *self.choices]

  def check(self, name: str, x: mtf.Tensor, dims: Sequence[mtf.Dimension]) -> None:
    """Raises ShapeError unless the dims of x are tokens, and all or none of the others."""
    legal = [o + self.tokens + c for o in ([], self.owners) for c in ([], self.choices)]
    if list(dims) not in legal:
      raise errors.ShapeError(
        f"{name}: {x} must have the dimensions of {mtf.Shape(self.tokens)}, and may have those of "
        f"owners {mtf.Shape(self.owners)} before and of choices {mtf.Shape(self.choices)} behind"
      )

  def of(self, impl: MeshImpl, dims: Sequence[mtf.Dimension], rows: tf.Tensor) -> tf.Tensor:
    """The numbers that rows have in a slice with these of the dims."""

    def size(dims: Sequence[mtf.Dimension]) -> int:
      number: int = list_product(impl.slice_shape(mtf.Shape(list(dims))))
      return number

    tokens, choices = size(self.tokens), size(self.choices)
    number = (rows // choices) % tokens
    # A tensor without owners, or choices, has one row for all of them.
    if set(self.owners) <= set(dims):
      number += rows // (choices * tokens) * tokens
    if set(self.choices) <= set(dims):
      number = number * choices + rows % choices
    return number


class _ExpertOperation(Operation):
  """Base class of the expert products and their gradients.

  Args:
    inputs: two factors and the index.
    rows: the rows.
    experts_dim: the dimension of experts.
    output: a tensor's shape.
    name: of the operation.
  """

  def __init__(
    self,
    inputs: Sequence[mtf.Tensor],
    rows: _Rows,
    experts_dim: mtf.Dimension,
    output: mtf.Shape,
    name: str,
  ):
    super().__init__(list(inputs), name=name)
    first, second, index = inputs
    if not index.dtype.is_integer or first.dtype != second.dtype:
      raise errors.DTypeError(
        f"{self.name}: experts must be integers, got {index}; and {first} and {second} of one dtype"
      )
    if set(index.shape) != set(rows.dims):
      raise errors.ShapeError(f"{self.name}: {index} must have the dims {mtf.Shape(rows.dims)}")
    self._rows, self._experts_dim = rows, experts_dim
    dims = [d for shape in (*(x.shape for x in inputs), output) for d in shape]
    self._union = mtf.Shape(list(dict.fromkeys(dims)))
    self._outputs = [mtf.Tensor(self, output, first.dtype)]
    self._initialize_all_dimensions_as_splittable()

  def verify_layout(self, mesh_impl: MeshImpl) -> None:
    super().verify_layout(mesh_impl)
    mesh_impl.verify_layout(
      self._union, f"{type(self).__name__} {self.name}: the product of its inputs"
    )

  def products_of_slice(self, mesh_impl: MeshImpl) -> list[tuple[int, str, int]]:
    """FLOPs, dtype and bytes of a processor's products, if experts get as many rows each."""
    first, second, _ = self.inputs
    kernel = next(x.shape for x in (second, self.outputs[0]) if self._experts_dim in x.shape)
    *experts, depth, columns = mesh_impl.slice_shape(kernel)
    rows = self._rows.tokens + self._rows.choices
    count = list_product(mesh_impl.slice_shape(mtf.Shape(rows)))
    # Of rows that all experts share.
    each = count // list_product(kernel.to_integer_list[:-2])
    size = (each * (depth + columns) + depth * columns) * first.dtype.size
    return [(2 * each * depth * columns, first.dtype.name, size)] * list_product(experts)

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    experts = impl.slice_shape(mtf.Shape([self._experts_dim]))[0]
    per_owner = list_product(impl.slice_shape(mtf.Shape(self._rows.tokens + self._rows.choices)))
    order, dims = self.inputs[2].shape.dims, self._rows.dims

    def of_slices(
      a: tf.Tensor, b: tf.Tensor, index: tf.Tensor, begin: int | tf.Tensor
    ) -> tf.Tensor:
      index = tf.cast(tf.reshape(transpose_to(index, order, dims), [-1]), tf.int32) - begin
      index = tf.where((index < 0) | (index >= experts), -1, index)
      owners = int(index.shape[0]) // per_owner
      if owners > 1:
        # The experts of all owners in one row.
        index += tf.where(index < 0, 0, tf.range(owners * per_owner) // per_owner * experts)
      return self._of_slices(impl, a, b, _Blocks.of(index, owners * experts, a.dtype))

    values = [lowering.tensors[x] for x in self.inputs]
    result = impl.slicewise(of_slices, *values, begin_of(impl, self._experts_dim))
    output = self.outputs[0].shape
    axes = mesh_axes_of(impl, [d for d in self._union if d not in output])
    if axes:
      key, size = f"allreduce/{axes}/expert_products", impl.laid_out_size(output)
      result = LazyAllreduceSum(impl, result, axes, lambda: lowering.add_counter(key, size))
    lowering.set_tensor_lowering(self.outputs[0], result)

  def _of_slices(self, impl: MeshImpl, a: tf.Tensor, b: tf.Tensor, blocks: _Blocks) -> tf.Tensor:
    """The slice of the result, of slices of the factors."""
    raise NotImplementedError


class ExpertProductsOperation(_ExpertOperation):
  """Rows times the matrices of their experts; see `expert_products`.

  Args:
    x: `[<owners>, <tokens>, <choices>, d]`; without owners or choices it is the same for all.
    kernel: `[<owners>, experts, d, new]`, the last two dims in any order.
    index: integers `[<owners>, <tokens>, <choices>]`: the expert of each row.
    rows: the dimensions of rows: owners, tokens and choices.
    output_dims: the dimensions of rows that the result has.
    new_dim: the last dimension of the result.
  """

  def __init__(
    self,
    x: mtf.Tensor,
    kernel: mtf.Tensor,
    index: mtf.Tensor,
    rows: _Rows,
    output_dims: Sequence[mtf.Dimension],
    new_dim: mtf.Dimension,
  ):
    name = "expert_products"
    *owners, experts_dim, _, _ = kernel.shape.dims
    if owners != rows.owners or set(kernel.shape.dims[-2:]) != {x.shape.dims[-1], new_dim}:
      raise errors.ShapeError(
        f"{name}: the kernel {kernel} must have the dimensions {mtf.Shape(rows.owners)}, one of "
        f"experts, and then {x.shape.dims[-1]} and {new_dim}"
      )
    rows.check(name, x, x.shape.dims[:-1])
    output = mtf.Shape([*output_dims, new_dim])
    super().__init__([x, kernel, index], rows, experts_dim, output, name)

  def gradient(self, grad_ys: list[mtf.Tensor]) -> Sequence[mtf.Tensor | None]:
    x, kernel, index = self.inputs
    *dims, depth = x.shape.dims
    dx = ExpertProductsOperation(grad_ys[0], kernel, index, self._rows, dims, depth)
    dk = ExpertKernelsOperation(x, grad_ys[0], index, self._rows, kernel.shape)
    return [dx.outputs[0], dk.outputs[0], None]

  def _of_slices(self, impl: MeshImpl, a: tf.Tensor, b: tf.Tensor, blocks: _Blocks) -> tf.Tensor:
    *dims, depth = self.inputs[0].shape.dims
    *output_dims, new_dim = self.outputs[0].shape.dims
    transposed = self.inputs[1].shape.dims[-1] == depth and depth != new_dim
    x = tf.reshape(a, [-1, int(a.shape[-1])])
    kernels = tf.reshape(b, [-1, *b.shape[-2:]])
    *sizes, columns = impl.slice_shape(self.outputs[0].shape)
    number = list_product(sizes)

    def product(rows: tf.Tensor, expert: tf.Tensor) -> tf.Tensor:
      # The row behind the last stands for none: what comes of it is not looked at.
      taken = tf.gather(x, tf.minimum(self._rows.of(impl, dims, rows), int(x.shape[0]) - 1))
      return tf.matmul(taken, kernels[expert], transpose_b=transposed)

    y = blocks.products(product, columns)
    rows = tf.reshape(blocks.rows, [-1])
    to = tf.where(rows < blocks.number, self._rows.of(impl, output_dims, rows), -1)
    # Of several choices the sum; what goes to -1 is dropped.
    return tf.reshape(tf.math.unsorted_segment_sum(y, to, number), [*sizes, columns])


class ExpertKernelsOperation(_ExpertOperation):
  """For each expert, the sum over its rows of x dy: the gradient of products to the matrices.

  Args:
    x: `[<some dims of rows>, depth]`.
    dy: `[<some dims of rows>, columns]`.
    index: as of `expert_products`.
    rows: the rows.
    shape: of the result: owners, experts, and depth and columns in any order.
  """

  def __init__(
    self, x: mtf.Tensor, dy: mtf.Tensor, index: mtf.Tensor, rows: _Rows, shape: mtf.Shape
  ):
    super().__init__([x, dy, index], rows, shape.dims[-3], shape, "expert_kernels")

  def gradient(self, grad_ys: list[mtf.Tensor]) -> Sequence[mtf.Tensor | None]:
    x, dy, index = self.inputs

    def products(a: mtf.Tensor, b: mtf.Tensor) -> mtf.Tensor:
      *dims, last = b.shape.dims
      return ExpertProductsOperation(a, grad_ys[0], index, self._rows, dims, last).outputs[0]

    return [products(dy, x), products(x, dy), None]

  def _of_slices(self, impl: MeshImpl, a: tf.Tensor, b: tf.Tensor, blocks: _Blocks) -> tf.Tensor:
    (*x_dims, depth), (*dy_dims, _) = (t.shape.dims for t in self.inputs[:2])
    shape = self.outputs[0].shape
    x, dy = (tf.reshape(t, [-1, int(t.shape[-1])]) for t in (a, b))
    sizes = impl.slice_shape(shape)

    def product(rows: tf.Tensor) -> tf.Tensor:
      here = tf.minimum(rows, blocks.number - 1)
      u = tf.gather(x, self._rows.of(impl, x_dims, here))
      v = tf.gather(dy, self._rows.of(impl, dy_dims, here))
      v *= tf.cast(rows < blocks.number, v.dtype)[:, tf.newaxis]
      if shape.dims[-2] != depth:
        u, v = v, u
      return tf.matmul(u, v, transpose_a=True)

    result = blocks.sums(product, list_product(sizes[:-2]), sizes[-2:])
    return tf.reshape(result, sizes)


def expert_products(
  x: mtf.Tensor,
  kernel: mtf.Tensor,
  index: mtf.Tensor,
  new_dim: mtf.Dimension,
  tokens: Sequence[mtf.Dimension],
  output_dims: Sequence[mtf.Dimension],
) -> mtf.Tensor:
  """y[i, new] = sum over d of x[i, d] kernel[index[i], d, new]; 0 where index[i] is no expert.

  Args:
    x: `[<owners>, <tokens>, <choices>, d]`; without owners or choices it is the same for all.
    kernel: `[<owners>, experts, d, new]`, of the dtype of x: each owner has experts of its own.
    index: integers `[<owners>, <tokens>, <choices>]`: the expert of each row. There may be no
      dimensions of owners and of choices.
    new_dim: the dimension of results.
    tokens: the dimensions of tokens.
    output_dims: the dimensions of the result but the last: tokens, and owners or choices, if the
      result is not to be summed over them.

  Returns:
    `[<output_dims>, new]`.

  Raises:
    ShapeError: the dimensions are others.
    DTypeError: index is not of integers, or x and kernel have two dtypes.
  """
  owners = kernel.shape.dims[:-3]
  choices = [d for d in index.shape if d not in owners and d not in tokens]
  rows = _Rows(owners, list(tokens), choices)
  return ExpertProductsOperation(x, kernel, index, rows, output_dims, new_dim).outputs[0]
