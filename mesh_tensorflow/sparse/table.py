"""A table of embeddings: a variable of which only rows are read and written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.kinds import DTypeLike
from mesh_tensorflow.errors import DTypeError, ShapeError, VariableError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LazyLaidOutTensor
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.numerics import initializers
from mesh_tensorflow.operations.variables import Variable, VariableDType
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.dimensions import Dimension, DimensionLike, Shape, convert_to_dimension
from mesh_tensorflow.program.graph import Mesh

__all__ = ["Table", "table"]


class Table(Variable):
  """A variable [rows, ..., width] that is read and written by rows only; see `table`.

  It is not among the trainable variables of its graph: `minimize` of this room trains it, by the
  rows that were looked up.
  """

  def __init__(
    self, mesh: Mesh, name: str, rows: Sequence[Dimension], width: Dimension, dtype: Any,
    initializer: Any,
  ):  # fmt: skip
    super().__init__(mesh, name, Shape([*rows, width]), dtype, initializer, trainable=False)
    self.rows = list(rows)
    self.width = width

  @property
  def num_rows(self) -> int:
    """Number of rows."""
    return math.prod(d.size for d in self.rows)

  def stored_impl(self, impl: MeshImpl) -> MeshImpl:
    """The mesh itself: a layout rule of its rows says where they are."""
    return impl

  def lower(self, lowering: LoweringInProgress) -> None:
    laid_out = self.lay_out(lowering)
    # A read copies the slice, since TensorFlow updates rows in place: only if somebody looks.
    lowering.tensors[self.value] = LazyLaidOutTensor(
      lambda: laid_out.laid_out_tensor.to_laid_out_tensor(), list(laid_out.stored.slice_shape)
    )


@checked
def table(
  mesh: Mesh,
  name: str,
  rows: DimensionLike | Sequence[Dimension],
  width: DimensionLike,
  dtype: DTypeLike = tf.float32,
  initializer: Any = None,
) -> Table:
  """A table of embeddings, made if the graph has none of that name.

  Each device has its block of rows, and nothing ever has the whole: a layout rule for `rows`
  splits it over a mesh axis, two for two dimensions of rows over two axes.

  Args:
    mesh: a `Mesh`.
    name: name within the open variable scope.
    rows: the dimension of the rows; or two, whose positions are numbered row-major.
    width: the dimension of the vectors.
    dtype: float32, or another floating dtype.
    initializer: see `mtf.get_variable`; by default uniform from -0.05 to 0.05, as in Keras.

  Returns:
    The `Table`, for `lookup`. `table.get_master()` has its values.

  Raises:
    ShapeError: there are three dimensions of rows, or none.
    VariableError: the graph has a variable of that name which is no such table.
  """
  several = isinstance(rows, (list, tuple)) and not _is_pair(rows)
  given: Sequence[Any] = rows if several else [rows]
  dims = [convert_to_dimension(d) for d in given]
  width = convert_to_dimension(width)
  if not 1 <= len(dims) <= 2:
    raise ShapeError(f"table {name!r}: one or two dimensions of rows, got {dims}")
  if not tf.as_dtype(dtype).is_floating:
    raise DTypeError(f"table {name!r}: the dtype must be floating, got {tf.as_dtype(dtype).name}")
  full_name, graph = scope.full_variable_name(name), mesh.graph
  if full_name in graph.name_to_variable:
    found = graph.name_to_variable[full_name]
    if not isinstance(found, Table) or found.shape != Shape([*dims, width]):
      raise VariableError(
        f"table {full_name}: the graph has {found.full_name} {found.shape}, asked for are "
        f"{Shape([*dims, width])}"
      )
    return found
  if initializer is None:
    initializer = initializers.RandomUniform(-0.05, 0.05)
  return Table(mesh, name, dims, width, VariableDType(tf.as_dtype(dtype)), initializer)


def _is_pair(rows: Any) -> bool:
  """True if `rows` is a single dimension, as (name, size)."""
  return len(rows) == 2 and isinstance(rows[0], str)
