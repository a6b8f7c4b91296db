"""Layers that read a large memory."""

from __future__ import annotations

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import COUNT, takes
from mesh_tensorflow.transformer.model.context import Context, TransformerLayer


@gin.configurable(module="mesh_tensorflow.transformer.memory_layers")
@takes(key_size=COUNT)
class ProductKeyValueMemory(TransformerLayer):
  """Reads the values of the best of n_keys ** 2 keys.

  Lample et al., 2019: "Large Memory Layers with Product Keys" (arXiv:1907.05242). A key is a pair
  of half keys, and its score the sum of theirs, so that the best pairs are found among the best
  halves. Variables: `keys` [n_heads, product_key=2, n_keys, key], `values` [n_values, d_model],
  `query/kernel` and `query/bias`, and those of the layer norm of queries.

  Args:
    key_size: size of a key, at least 2. A half key has half of it, rounded down: an odd size
      makes the variables of the even one below it, as in the TF1 library.
    n_keys: number of half keys of each half.
    n_heads: number of queries for each position; all read the same values.
    knn: how many values a query reads; at most n_keys.

  Raises:
    ConfigError: a size does not fit the others.
  """

  def __init__(
    self,
    key_size: int = gin.REQUIRED,
    n_keys: int = gin.REQUIRED,
    n_heads: int = gin.REQUIRED,
    knn: int = gin.REQUIRED,
  ):
    if key_size < 2:
      raise errors.ConfigError(
        f"ProductKeyValueMemory.key_size must be at least 2, for two half keys; got {key_size}"
      )
    if not 1 <= knn <= n_keys:
      raise errors.ConfigError(
        f"ProductKeyValueMemory.knn must be 1 to n_keys (={n_keys}), got {knn}"
      )
    self.key_size = key_size
    self.n_keys = n_keys
    self.n_heads = n_heads
    self.knn = knn

  def call(
    self, context: Context, x: mtf.Tensor, losses: list[mtf.Tensor] | None = None
  ) -> mtf.Tensor:
    """Applies the layer; see `TransformerLayer.call`."""
    del losses
    io_dim = x.shape[-1]
    heads_dim = mtf.Dimension("n_heads", self.n_heads)
    halves_dim = mtf.Dimension("product_key", 2)
    keys_dim = mtf.Dimension("n_keys", self.n_keys)
    key_dim = mtf.Dimension("key", self.key_size // 2)
    values_dim = mtf.Dimension("n_values", self.n_keys**2)
    keys = mtf.get_variable(
      context.mesh,
      "keys",
      mtf.Shape([heads_dim, halves_dim, keys_dim, key_dim]),
      dtype=context.variable_dtype,
    )
    values = mtf.get_variable(
      context.mesh,
      "values",
      mtf.Shape([values_dim, io_dim]),
      dtype=context.variable_dtype,
      initializer=tf.random_normal_initializer(stddev=1.0),
    )
    query = mtf.layers.dense(
      x,
      reduced_dims=[io_dim],
      new_dims=[heads_dim, halves_dim, key_dim],
      use_bias=True,
      variable_dtype=context.variable_dtype,
      name="query",
    )
    # The paper has a batch norm here; with this one examples do not depend on their batch.
    query = mtf.layers.layer_norm(query, key_dim)
    scores, indices = self.get_indices(keys, query)
    weights = mtf.softmax(scores, scores.shape[-1])
    return mtf.einsum(
      [weights, mtf.gather(values, indices, values_dim)],
      reduced_dims=[heads_dim, scores.shape[-1]],
      output_shape=x.shape,
    )

  def get_indices(self, keys: mtf.Tensor, query: mtf.Tensor) -> tuple[mtf.Tensor, mtf.Tensor]:
    """The best keys of each query.

    Args:
      keys: `[n_heads, product_key, n_keys, key]`.
      query: `[..., n_heads, product_key, key]`.

    Returns:
      Scores, in descending order, and the int32 indices of the values: both `[..., n_heads, knn]`.
      A pair (i, j) of half keys has the index i * n_keys + j.
    """
    keys_dim, (halves_dim, key_dim) = keys.shape[-2], query.shape.dims[-2:]
    knn_dim, knn2_dim = mtf.Dimension("knn", self.knn), mtf.Dimension("knn2", self.knn)
    pairs_dim = mtf.Dimension("knn_square_dim", self.knn**2)
    products = mtf.einsum(
      [query, keys], reduced_dims=[key_dim], output_shape=query.shape - key_dim + keys_dim
    )
    # A half that is not among the knn best is in none of the knn best pairs: knn better halves with
    # the same other half are better pairs.
    scores, indices = mtf.top_k(products, keys_dim, knn_dim)
    # First the candidates of the one half, then those of the other, in a square.
    scores1, scores2 = mtf.unstack(scores, halves_dim)
    indices1, indices2 = mtf.unstack(indices, halves_dim)
    square = scores1.shape + knn2_dim
    flat = scores1.shape - knn_dim + pairs_dim

    def pairs(first: mtf.Tensor, second: mtf.Tensor) -> mtf.Tensor:
      second = mtf.rename_dimension(second, knn_dim.name, knn2_dim.name)
      return mtf.reshape(mtf.add(first, second, output_shape=square), flat)

    # Of knn ** 2 pairs, in place of n_keys ** 2.
    best, place = mtf.top_k(pairs(scores1, scores2), pairs_dim, knn_dim)
    return best, mtf.gather(pairs(indices1 * keys_dim.size, indices2), place, pairs_dim)
