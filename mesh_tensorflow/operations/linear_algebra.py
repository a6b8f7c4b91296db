"""Linear algebra on matrices that each processor has whole: two dimensions of a tensor.

The other dimensions number matrices, or right-hand sides, and may be split: each processor solves
its own. What a matrix needs that is split itself is made of products (`examples/matrix.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from mesh_tensorflow.errors import DimensionError, DTypeError, ShapeError
from mesh_tensorflow.meshes.slices import transpose_to
from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.operations.slicewise import SlicewiseOperation
from mesh_tensorflow.program.argument_kinds import FloatOrComplexTensor
from mesh_tensorflow.program.dimensions import (
  Dimension,
  DimensionLike,
  Shape,
  no_such_dimension,
)
from mesh_tensorflow.program.graph import Tensor, dimension_of

__all__ = ["cholesky", "solve", "triangular_solve"]


def cholesky(
  matrix: FloatOrComplexTensor,
  row_dim: DimensionLike | str,
  column_dim: DimensionLike | str,
  name: str = "cholesky",
) -> Tensor:
  """The lower triangular L with L L^H = matrix, as `tf.linalg.cholesky`.

  Args:
    matrix: a `Tensor` of positive definite (Hermitian) matrices; only their lower triangles
      are read.
    row_dim: the dimension of the rows, or its name; it must not be split over the mesh.
    column_dim: that of the columns, or its name, of the same size; it must not be split either.
    name: of the operation.

  Returns:
    A `Tensor` of the shape of the matrix, zero above the diagonal.

  Raises:
    DimensionError: the matrix has no such dimensions, or they are one.
    DTypeError: the dtype has no such decomposition in TensorFlow (float32, float64 and complex).
    ShapeError: the dimensions have different sizes.
  """
  row, column = _square(name, matrix, row_dim, column_dim)
  dims = matrix.shape.dims
  order = [*(d for d in dims if d not in (row, column)), row, column]

  def factor(a: tf.Tensor) -> tf.Tensor:
    return transpose_to(tf.linalg.cholesky(transpose_to(a, dims, order)), order, dims)

  return _whole(factor, [matrix], matrix.shape, (row, column), name)


def triangular_solve(
  matrix: FloatOrComplexTensor,
  rhs: FloatOrComplexTensor,
  row_dim: DimensionLike | str,
  column_dim: DimensionLike | str,
  lower: bool = True,
  adjoint: bool = False,
  name: str = "triangular_solve",
) -> Tensor:
  """x with sum over columns of matrix[row, column] x[column] = rhs[row], by substitution.

  Args:
    matrix: a `Tensor` of triangular matrices; the other triangle is not read.
    rhs: the right-hand sides. Dimensions that both have number the problems; those that only the
      right-hand sides have are several for one matrix; those that only the matrices have are
      several matrices for one right-hand side.
    row_dim: the dimension of the rows, or its name; it must not be split over the mesh.
    column_dim: that of the columns, or its name, of the same size; it must not be split either.
    lower: whether the matrices are lower triangular, or upper.
    adjoint: solve with the conjugate transpose: then the right-hand sides have the columns, and x
      has the rows.
    name: of the operation.

  Returns:
    A `Tensor` with the dimensions of the right-hand sides, the columns in place of the rows, after
    those that only the matrices have.

  Raises:
    DimensionError: the matrix or the right-hand side has no such dimensions, or they are one.
    DTypeError: the dtypes differ, or TensorFlow has no such function of them.
    ShapeError: the dimensions have different sizes, or the right-hand side has both.
  """
  return _solve(
    name,
    lambda a, b: tf.linalg.triangular_solve(a, b, lower=bool(lower), adjoint=bool(adjoint)),
    matrix,
    rhs,
    row_dim,
    column_dim,
    adjoint,
  )


def solve(
  matrix: FloatOrComplexTensor,
  rhs: FloatOrComplexTensor,
  row_dim: DimensionLike | str,
  column_dim: DimensionLike | str,
  adjoint: bool = False,
  name: str = "solve",
) -> Tensor:
  """x with sum over columns of matrix[row, column] x[column] = rhs[row], as `tf.linalg.solve`.

  A singular matrix is an error of TensorFlow's when the program runs.

  Arguments, result and errors as `triangular_solve`, of invertible matrices.
  """
  return _solve(
    name,
    lambda a, b: tf.linalg.solve(a, b, adjoint=bool(adjoint)),
    matrix,
    rhs,
    row_dim,
    column_dim,
    adjoint,
  )


# What the kernels take; short floats they do not.
_DTYPES = (tf.float32, tf.float64, tf.complex64, tf.complex128)


def _square(
  name: str, matrix: Tensor, row_dim: DimensionLike | str, column_dim: DimensionLike | str
) -> tuple[Dimension, Dimension]:
  """The two dimensions of the matrices, checked."""
  row, column = (dimension_of(name, d, matrix) for d in (row_dim, column_dim))
  if row == column:
    raise DimensionError(
      f"{name} of {matrix}: rows and columns are one dimension, {row.name}={row.size}; a matrix "
      "has two, of different names"
    )
  if row.size != column.size:
    raise ShapeError(
      f"{name} of {matrix}: the rows {row.name}={row.size} and the columns {column.name}="
      f"{column.size} must have one size"
    )
  if matrix.dtype not in _DTYPES:
    raise DTypeError(
      f"{name}: {matrix} must be float32, float64, complex64 or complex128; cast it (mtf.cast)"
    )
  return row, column


def _solve(
  name: str,
  fn: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
  matrix: Tensor,
  rhs: Tensor,
  row_dim: DimensionLike | str,
  column_dim: DimensionLike | str,
  adjoint: bool,
) -> Tensor:
  row, column = _square(name, matrix, row_dim, column_dim)
  given, wanted = (column, row) if adjoint else (row, column)
  if given not in rhs.shape:
    raise no_such_dimension(f"{name}: the right-hand side", given, rhs)
  if wanted in rhs.shape:
    raise ShapeError(
      f"{name}: the right-hand side {rhs} has {wanted.name}={wanted.size}, which the solution "
      "shall have; rename it (mtf.rename_dimension)"
    )
  if rhs.dtype != matrix.dtype:
    raise DTypeError(
      f"{name}: {matrix} and {rhs} have different dtypes; cast one of them (mtf.cast)"
    )
  batch = [d for d in matrix.shape if d not in (row, column)]
  shared = [d for d in batch if d in rhs.shape]
  only_matrix = [d for d in batch if d not in rhs.shape]
  several = [d for d in rhs.shape if d not in (given, *shared)]
  out = Shape([*only_matrix, *(wanted if d == given else d for d in rhs.shape)])
  order = [*only_matrix, *shared]

  def solve_slices(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    a = transpose_to(a, matrix.shape.dims, [*order, row, column])
    b = transpose_to(b, rhs.shape.dims, [*shared, given, *several])
    sizes = b.shape.as_list()
    columns = sizes[len(shared) + 1 :]
    b = tf.reshape(b, [*sizes[: len(shared) + 1], tf.TensorShape(columns).num_elements()])
    # The kernels take as many right-hand sides as matrices.
    b = kernels.broadcast_to(b, [*a.shape.as_list()[: len(order)], *b.shape.as_list()[-2:]])
    x = tf.reshape(fn(a, b), [*b.shape.as_list()[:-1], *columns])
    return transpose_to(x, [*order, wanted, *several], out.dims)

  return _whole(solve_slices, [matrix, rhs], out, (row, column), name)


def _whole(
  fn: Callable[..., tf.Tensor],
  xs: list[Tensor],
  output_shape: Shape,
  matrix_dims: tuple[Dimension, Dimension],
  name: str,
) -> Tensor:
  """A function of slices along all dimensions but those of the matrices."""
  splittable = [d for x in xs for d in x.shape if d not in matrix_dims]
  # The gradient is TensorFlow's, of the slices. By the class itself: a name of its own in messages.
  return SlicewiseOperation(fn, xs, [output_shape], [xs[0].dtype], splittable, name=name).outputs[0]
