"""Matrices made orthogonal by products alone, on split tensors."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.errors import ConfigError, ShapeError
from mesh_tensorflow.operations.binary import add, multiply
from mesh_tensorflow.operations.einsum import einsum
from mesh_tensorflow.operations.elementwise import cast
from mesh_tensorflow.operations.one_hot import one_hot
from mesh_tensorflow.operations.ranges import mtf_range
from mesh_tensorflow.operations.reshape import reshape
from mesh_tensorflow.operations.slicewise import cwise
from mesh_tensorflow.program.argument_kinds import FloatTensor
from mesh_tensorflow.program.dimensions import Dimension, Shape, list_product, no_such_dimension
from mesh_tensorflow.program.graph import Mesh, Tensor

__all__ = ["orthogonalize"]

# Keller Jordan (2024), https://kellerjordan.github.io/posts/muon/: found by search, so that the
# slope at 0 is large and all of (0, 1] ends near 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@checked
def orthogonalize(
  x: FloatTensor,
  rows: Sequence[Dimension],
  columns: Sequence[Dimension],
  num_iterations: int = 5,
  coefficients: Sequence[float] = COEFFICIENTS,
  epsilon: float = 1e-7,
) -> Tensor:
  """About U V^T for the singular value decomposition U S V^T of a matrix, by Newton-Schulz steps.

  In float32, with (a, b, c) the coefficients:

    X <- X / (|X|_F + epsilon)
    X <- a X + (b A + c A A) X  with A = X X^T,  num_iterations times

  With the coefficients of Jordan's Muon the singular values end between about 0.7 and 1.2, not at
  1; (1.5, -0.5, 0) converges to 1, in more steps.

  Rows and columns may each be several dimensions, any of them split. Of X and X^T the one with
  fewer rows is taken. If these are not split, a processor multiplies the columns that it has, and
  what is exchanged in each step is the sum of A over the processors that split the columns; where
  rows are split, X and A are also gathered along them.

  Args:
    x: a floating `Tensor`.
    rows: dimensions of x.
    columns: other dimensions of x. Those that are neither count matrices: each index has its own.
    num_iterations: number of Newton-Schulz steps, at least 0.
    coefficients: (a, b, c) of a step.
    epsilon: added to the Frobenius norm |X|_F; at least 0.

  Returns:
    A float32 `Tensor` of the shape of x.

  Raises:
    ConfigError: there are not three coefficients, or a number is out of its range.
    DimensionError: rows or columns are not in x.
    ShapeError: there are none of one kind, or a dimension is both.
  """
  _check(x, rows, columns, num_iterations, coefficients, epsilon)
  rows, columns = list(rows), list(columns)
  if list_product([d.size for d in rows]) > list_product([d.size for d in columns]):
    rows, columns = columns, rows
  matrices = [d for d in x.shape if d not in rows and d not in columns]
  x = cast(x, tf.float32)
  squares = einsum([x, x], output_shape=Shape(matrices))
  factor = cwise(lambda s: 1.0 / (tf.sqrt(s) + epsilon), [squares], name="inverse_norm")
  x = multiply(x, factor, output_shape=x.shape)
  # Names of no layout rule: along these nothing is split.
  again = _renamed(rows, "_orthogonal_")
  between = _renamed(rows, "_orthogonal_sum_")
  square = Shape(matrices + rows + list(again.values()))
  a, b, c = coefficients
  identity = _identity(x.mesh, rows, again)
  for _ in range(num_iterations):
    other_x = _rename(x, again)
    polynomial = einsum([x, other_x], output_shape=square)
    # a + (b + c A) A: numbers are added to the squares, which are smaller than X.
    if c:
      # A is symmetric: its second factor is A with its rows, not with its columns, summed over.
      to_sum = {again[d]: between[d] for d in rows}
      # Added first: a sum of A over the mesh is waited for once.
      linear = multiply(add(polynomial, multiply(identity, b / c), output_shape=square), c)
      polynomial = einsum(
        [_rename(linear, to_sum), _rename(polynomial, between)], output_shape=square
      )
    else:
      polynomial = multiply(polynomial, b)
    polynomial = add(polynomial, multiply(identity, a), output_shape=square)
    x = einsum([polynomial, other_x], output_shape=x.shape)
  return x


def _check(
  x: Tensor,
  rows: Sequence[Dimension],
  columns: Sequence[Dimension],
  num_iterations: int,
  coefficients: Sequence[float],
  epsilon: float,
) -> None:
  if len(coefficients) != 3 or num_iterations < 0 or epsilon < 0:
    raise ConfigError(
      f"orthogonalize {x}: give three coefficients (={list(coefficients)}), num_iterations "
      f"(={num_iterations}) of at least 0, and epsilon (={epsilon}) of at least 0"
    )
  for what, dims in (("rows", rows), ("columns", columns)):
    for d in dims:
      if d not in x.shape:
        raise no_such_dimension(f"orthogonalize: {what}", d, x)
  if not rows or not columns or set(rows) & set(columns):
    raise ShapeError(
      f"orthogonalize {x}: rows {Shape(list(rows))} and columns {Shape(list(columns))} must each "
      "have a dimension, and none in common"
    )


def _identity(mesh: Mesh, rows: list[Dimension], again: dict[Dimension, Dimension]) -> Tensor:
  """1 where all indices of the rows are those of the columns, `[rows, again]`; else 0."""
  parts = [one_hot(mtf_range(mesh, d, tf.int32), again[d]) for d in rows]
  return einsum(parts, output_shape=Shape(rows + list(again.values())))


def _renamed(dims: Sequence[Dimension], prefix: str) -> dict[Dimension, Dimension]:
  return {d: Dimension(prefix + d.name, d.size) for d in dims}


def _rename(x: Tensor, new: dict[Dimension, Dimension]) -> Tensor:
  return reshape(x, Shape([new.get(d, d) for d in x.shape]))
