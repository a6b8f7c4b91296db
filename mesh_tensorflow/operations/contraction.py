"""Contraction of slices: how an einsum becomes few matrix multiplications.

A contraction of two slices with named axes is one `tf.matmul` if their axes fall
into the groups batch, rows, columns and contracted. The order within the groups
is chosen so that the fewest elements are transposed; matrices are transposed by
the flags of the multiplication, which costs nothing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from mesh_tensorflow.meshes.slices import align, transpose_to
from mesh_tensorflow.numerics import constants
from mesh_tensorflow.numerics.kernels import elementwise, matmul
from mesh_tensorflow.program.dimensions import Dimension, list_product

Dims = tuple[Dimension, ...]

# Below this a multiplication of a matrix by a vector costs less as a product and a sum.
_MATRIX_SIDE = 16


def contract(
  tensors: Sequence[tf.Tensor], dims: Sequence[Sequence[Dimension]], output: Sequence[Dimension]
) -> tf.Tensor:
  """Product of tensors, summed over the dimensions that the output does not have.

  Args:
    tensors: slices.
    dims: the dimensions of each, with the whole tensors' sizes or the slices'; only
      their identity counts.
    output: dimensions of the result, all of which are in some input.

  Returns:
    A tensor with the output's axes.
  """
  output = tuple(output)
  terms = [(t, tuple(d)) for t, d in zip(tensors, dims)]
  while len(terms) > 2:
    i, j = _cheapest_pair(terms, output)
    rest = [term for k, term in enumerate(terms) if k not in (i, j)]
    needed = set(output).union(*(d for _, d in rest))
    a, b = terms[i], terms[j]
    kept = tuple(d for d in dict.fromkeys(a[1] + b[1]) if d in needed)
    terms = [(_contract_two(a[0], a[1], b[0], b[1], kept), kept), *rest]
  if len(terms) == 1:
    return _reduce_to(*terms[0], output)
  (a, a_dims), (b, b_dims) = terms
  return _contract_two(a, a_dims, b, b_dims, output)


def _cheapest_pair(terms: Sequence[tuple[tf.Tensor, Dims]], output: Dims) -> tuple[int, int]:
  """The two terms whose product has the fewest elements."""

  def cost(pair: tuple[int, int]) -> int:
    i, j = pair
    needed = set(output).union(*(d for k, (_, d) in enumerate(terms) if k not in pair))
    return list_product(d.size for d in set(terms[i][1] + terms[j][1]) if d in needed)

  # Greedy: the smallest product now, which need not begin the cheapest order of all.
  return min(itertools.combinations(range(len(terms)), 2), key=cost)


def _reduce_to(x: tf.Tensor, dims: Dims, output: Dims) -> tf.Tensor:
  """Sums the dimensions that the output does not have, and orders the others."""
  axes = [i for i, d in enumerate(dims) if d not in output]
  if axes:
    x = tf.reduce_sum(x, axis=constants.sizes(axes))
  return transpose_to(x, [d for d in dims if d in output], output)


def _contract_two(
  a: tf.Tensor, a_dims: Dims, b: tf.Tensor, b_dims: Dims, output: Dims
) -> tf.Tensor:
  # What only one operand has and the output has not is summed first.
  kept_a = tuple(d for d in a_dims if d in b_dims or d in output)
  kept_b = tuple(d for d in b_dims if d in a_dims or d in output)
  a, b = _reduce_to(a, a_dims, kept_a), _reduce_to(b, b_dims, kept_b)
  a_sizes = dict(zip(kept_a, a.shape.as_list()))
  b_sizes = dict(zip(kept_b, b.shape.as_list()))
  sizes = {**a_sizes, **b_sizes}
  contracted = [d for d in kept_a if d in kept_b and d not in output]
  rows = [d for d in kept_a if d not in kept_b]
  columns = [d for d in kept_b if d not in kept_a]
  if not contracted:
    return elementwise(tf.multiply, align(a, kept_a, output), align(b, kept_b, output))
  if bool(rows) != bool(columns) and _has_matmul(a.dtype):
    product = _vector_product(a, kept_a, b, kept_b, output, sizes)
    if product is not None:
      return product
  if not rows or not columns or not _has_matmul(a.dtype):
    # A matrix times a vector: reads each operand once, without a transpose.
    # A dtype without a kernel (tf.int8, say) comes here with rows and columns: this is then the
    # whole product, before it is summed.
    full = kept_a if not columns else kept_b if not rows else tuple(dict.fromkeys(kept_a + kept_b))
    product = elementwise(tf.multiply, align(a, kept_a, full), align(b, kept_b, full))
    return _reduce_to(product, full, output)
  plan = _plan(kept_a, kept_b, output, tuple(sizes.items()))
  product = _matmul(a, kept_a, b, kept_b, plan, sizes)
  return transpose_to(product, plan.result, output)


def _vector_product(
  a: tf.Tensor, a_dims: Dims, b: tf.Tensor, b_dims: Dims, output: Dims, sizes: dict[Dimension, int]
) -> tf.Tensor | None:
  """Product of large matrices and vectors; None if the order of the axes does not suit it."""
  # The vector has no dimension of its own, and so fewer than the matrix.
  if len(a_dims) > len(b_dims):
    a, a_dims, b, b_dims = b, b_dims, a, a_dims
  batch = tuple(d for d in a_dims if d in output)
  contracted = tuple(d for d in a_dims if d not in output)
  others = tuple(d for d in b_dims if d not in a_dims)

  def size(dims: Dims) -> int:
    return list_product(sizes[d] for d in dims)

  if a_dims != batch + contracted or b_dims not in (
    batch + contracted + others,
    batch + others + contracted,
  ):
    return None
  if min(size(contracted), size(others)) < _MATRIX_SIDE:
    return None
  b, transpose_b = _as_matrices(b, b_dims, batch, contracted, others, sizes)
  rows = [sizes[d] for d in batch]
  vectors = tf.reshape(a, constants.sizes([*rows, 1, size(contracted)]))
  product = matmul(vectors, b, transpose_b=transpose_b)
  product = tf.reshape(product, constants.sizes([sizes[d] for d in batch + others]))
  return transpose_to(product, batch + others, output)


def _has_matmul(dtype: tf.DType) -> bool:
  return dtype.is_floating or dtype.is_complex or dtype in (tf.int32, tf.int64)


class _Plan(NamedTuple):
  """One matrix multiplication: groups of dimensions, and which operand is first."""

  batch: Dims
  rows: Dims
  contracted: Dims
  columns: Dims
  swap: bool
  result: Dims


# The slices of all processors ask for the same plan. Sizes are a tuple because dicts do not hash.
@functools.lru_cache(maxsize=4096)
def _plan(a: Dims, b: Dims, output: Dims, sizes: tuple[tuple[Dimension, int], ...]) -> _Plan:
  """The plan that transposes the fewest elements."""
  size_of = dict(sizes)

  def size(dims: Dims) -> int:
    return list_product(size_of[d] for d in dims)

  both = [d for d in a if d in b]

  def orders(group: set[Dimension], *sources: Dims) -> list[Dims]:
    """The orders of the group's dimensions in the given operands, without repeats."""
    return list(dict.fromkeys(tuple(d for d in s if d in group) for s in sources))

  batch = {d for d in both if d in output}
  contracted = {d for d in both if d not in output}
  rows = {d for d in a if d not in b}
  columns = {d for d in b if d not in a}
  plans: list[tuple[int, _Plan]] = []
  for bo, ko, ro, co in itertools.product(
    orders(batch, output, a, b),
    orders(contracted, a, b),
    orders(rows, output, a),
    orders(columns, output, b),
  ):
    cost = 0
    if a not in (bo + ro + ko, bo + ko + ro):
      cost += size(a)
    if b not in (bo + ko + co, bo + co + ko):
      cost += size(b)
    # With the operands swapped, b^T a^T = (a b)^T: the result is transposed for nothing.
    for swap, result in ((False, bo + ro + co), (True, bo + co + ro)):
      total = cost + (0 if result == output else size(output))
      plans.append((total, _Plan(bo, ro, ko, co, swap, result)))
  return min(plans, key=lambda p: p[0])[1]


def _matmul(
  a: tf.Tensor, a_dims: Dims, b: tf.Tensor, b_dims: Dims, plan: _Plan, sizes: dict[Dimension, int]
) -> tf.Tensor:
  """Multiplies as planned; the result has the axes `plan.result`."""
  if plan.swap:
    a, a_dims, b, b_dims = b, b_dims, a, a_dims
    rows, columns = plan.columns, plan.rows
  else:
    rows, columns = plan.rows, plan.columns
  a, transpose_a = _as_matrices(a, a_dims, plan.batch, rows, plan.contracted, sizes)
  b, transpose_b = _as_matrices(b, b_dims, plan.batch, plan.contracted, columns, sizes)
  product = matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b)
  shape = [sizes[d] for d in plan.result]
  if product.shape.as_list() == shape:
    return product
  return tf.reshape(product, constants.sizes(shape))


def _as_matrices(
  x: tf.Tensor, dims: Dims, batch: Dims, first: Dims, second: Dims, sizes: dict[Dimension, int]
) -> tuple[tf.Tensor, bool]:
  """Reshapes x to [batch..., first, second]; or to the last two swapped, with True.

  Avoids a transpose: the matrix product takes a swapped operand as it is.
  """
  # Both hold if a group is empty; then no flag is needed.
  swapped = dims == batch + second + first and dims != batch + first + second
  if swapped:
    first, second = second, first
  else:
    x = transpose_to(x, dims, batch + first + second)
  shape = [sizes[d] for d in batch]
  shape += [list_product(sizes[d] for d in first), list_product(sizes[d] for d in second)]
  if x.shape.as_list() != shape:
    x = tf.reshape(x, constants.sizes(shape))
  return x, swapped
