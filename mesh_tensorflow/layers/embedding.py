"""Embeddings: a vector for each id."""

from __future__ import annotations

from typing import Any

from mesh_tensorflow.numerics import initializers
from mesh_tensorflow.operations.indexing import gather
from mesh_tensorflow.operations.variables import get_variable
from mesh_tensorflow.program.dimensions import Dimension, DimensionLike, Shape
from mesh_tensorflow.program.graph import Mesh, Tensor

__all__ = ["embedding", "embedding_weights"]


def embedding_weights(
  mesh: Mesh,
  vocab_dim: Dimension,
  output_dim: DimensionLike,
  variable_dtype: Any,
  name: str = "embedding",
  ensemble_dim: DimensionLike | None = None,
  initializer: Any = None,
) -> Tensor:
  """The variable `{name}` [vocab_dim, output_dim].

  Args:
    mesh: a `Mesh`.
    vocab_dim: dimension of ids.
    output_dim: dimension of the vectors.
    variable_dtype: dtypes of the variable.
    name: within the open scope.
    ensemble_dim: a first dimension of the variable, or None.
    initializer: see `mtf.get_variable`; normal with standard deviation 1 by default.
  """
  dims = [vocab_dim, output_dim] if ensemble_dim is None else [ensemble_dim, vocab_dim, output_dim]
  return get_variable(
    mesh,
    name,
    Shape(dims),
    dtype=variable_dtype,
    initializer=initializers.RandomNormal() if initializer is None else initializer,
  )


def embedding(
  indices: Tensor,
  vocab_dim: Dimension,
  output_dim: DimensionLike,
  variable_dtype: Any,
  name: str = "embedding",
) -> Tensor:
  """The vectors of ids; zeros for ids out of range.

  Args:
    indices: an integer `Tensor`.
    vocab_dim: dimension of ids.
    output_dim: dimension of the vectors.
    variable_dtype: dtypes of the variable.
    name: name of the variable [vocab_dim, output_dim].

  Returns:
    A `Tensor` of the dimensions of `indices`, then `output_dim`.
  """
  weights = embedding_weights(indices.mesh, vocab_dim, output_dim, variable_dtype, name)
  return gather(weights, indices, vocab_dim)
