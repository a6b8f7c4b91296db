"""An embedding by a table of short vectors and a matrix."""

from __future__ import annotations

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.transformer.models.context import Context
from mesh_tensorflow.transformer.models.vocab_embedding import TokenVectors


@gin.configurable(module="mesh_tensorflow.transformer.vocab_embeddings")
@affects(report="mesh")
class FactorizedVocabEmbedding(TokenVectors):
  """A table of short vectors, and a matrix from those to vectors of the model's size.

  Lan et al., 2019 (arXiv:1909.11942). Variables: `<name>1` [vocab_dim, inner_vocab] and `<name>2`
  [inner_vocab, output_dim], both with a leading ensemble_dim if there is one.

  Args:
    mesh: an `mtf.Mesh`.
    vocab_dim: dimension of tokens.
    output_dim: dimension of vectors.
    variable_dtype: an `mtf.VariableDType`, or one dtype for all three.
    name: of the variables, with a digit behind it.
    ensemble_dim: a dimension, or None.
    inner_dimension_size: size of the short vectors.
  """

  def __init__(
    self,
    mesh: mtf.Mesh,
    vocab_dim: mtf.Dimension,
    output_dim: mtf.Dimension,
    variable_dtype: mtf.VariableDType | tf.DType,
    name: str,
    ensemble_dim: mtf.Dimension | None,
    inner_dimension_size: int = gin.REQUIRED,
  ):
    super().__init__(mesh, vocab_dim, output_dim, variable_dtype, name, ensemble_dim)
    self._inner_dim = mtf.Dimension("inner_vocab", inner_dimension_size)
    # A product has the variance inner_dimension_size * stddev ** 4 = 1, as a vector of one table.
    stddev = inner_dimension_size**-0.25
    self._factor1 = self._variable("1", vocab_dim, self._inner_dim, stddev=stddev)
    self._factor2 = self._variable("2", self._inner_dim, output_dim, stddev=stddev)

  def ids_to_embedding(self, ids: mtf.Tensor, context: Context) -> mtf.Tensor:
    """The vectors of the ids: the dims of `ids`, then output_dim; zeros for ids out of range."""
    del context
    inner = mtf.gather(
      self._factor1, ids, self._vocab_dim, output_shape=ids.shape + self._inner_dim
    )
    return mtf.einsum([inner, self._factor2], output_shape=ids.shape + self._output_dim)

  def hidden_to_logits(self, hidden: mtf.Tensor, context: Context) -> mtf.Tensor:
    """Products with the vectors: the dims of `hidden`, vocab_dim for output_dim."""
    del context
    # Vectors have variance 1 here, too: see `VocabEmbedding.hidden_to_logits`.
    batch = hidden.shape - self._output_dim
    # To short vectors first: the product with the whole vocabulary is of the inner size only.
    inner = mtf.einsum(
      [hidden * self._output_dim.size**-0.5, self._factor2], output_shape=batch + self._inner_dim
    )
    return mtf.einsum([inner, self._factor1], output_shape=batch + self._vocab_dim)
