"""An embedding whose vectors are longer for more frequent tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.transformer.embeddings.factorized import FactorizedVocabEmbedding
from mesh_tensorflow.transformer.models.context import Context
from mesh_tensorflow.transformer.models.vocab_embedding import VocabEmbedding


@gin.configurable(module="mesh_tensorflow.transformer.vocab_embeddings")
@affects(report="mesh")
class AdaptiveVocabEmbedding:
  """Vectors whose size depends on how frequent the token is.

  Baevski and Auli, 2018 (arXiv:1809.10853), with one softmax over the whole vocabulary. The
  vocabulary is divided into clusters of consecutive ids, most frequent first; cluster i has a
  `VocabEmbedding` or, if its vectors are shorter than the model's, a `FactorizedVocabEmbedding`,
  called `<name>_<i>`. The vocabulary may be split over the mesh if every cluster's size can be;
  the logits of the clusters are then exchanged, to be put one behind the other.

  Args:
    mesh: an `mtf.Mesh`.
    vocab_dim: dimension of tokens.
    output_dim: dimension of vectors.
    variable_dtype: an `mtf.VariableDType`, or one dtype for all three.
    name: of the variables; see above.
    ensemble_dim: a dimension, or None.
    clusters: list of dicts with the keys "token_count", number of ids, and "embedding_size". The
      counts sum up to the size of vocab_dim.

  Raises:
    ConfigError: they do not, or a dict has other keys.
  """

  def __init__(
    self,
    mesh: mtf.Mesh,
    vocab_dim: mtf.Dimension,
    output_dim: mtf.Dimension,
    variable_dtype: mtf.VariableDType | tf.DType,
    name: str,
    ensemble_dim: mtf.Dimension | None,
    clusters: Sequence[Mapping[str, Any]] = gin.REQUIRED,
  ):
    for cluster in clusters:
      if set(cluster) != {"token_count", "embedding_size"}:
        raise errors.ConfigError(
          f"AdaptiveVocabEmbedding.clusters: each must have the keys token_count and "
          f"embedding_size and no others, got {dict(cluster)}"
        )
    check_token_counts("AdaptiveVocabEmbedding", vocab_dim, clusters)
    self._vocab_dim = vocab_dim
    # Pairs: the first id, and the embedding.
    self._clusters: list[tuple[int, VocabEmbedding | FactorizedVocabEmbedding]] = []
    start = 0
    for i, cluster in enumerate(clusters):
      embedding = cluster_embedding(
        mesh,
        mtf.Dimension(vocab_dim.name, cluster["token_count"]),
        output_dim,
        variable_dtype,
        f"{name}_{i}",
        ensemble_dim,
        cluster["embedding_size"],
      )
      self._clusters.append((start, embedding))
      start += cluster["token_count"]

  def ids_to_embedding(self, ids: mtf.Tensor, context: Context) -> mtf.Tensor:
    """The vectors of the ids: the dims of `ids`, then output_dim; zeros for ids out of range."""
    # Ids of other clusters are out of the range of this one: zeros.
    embedded: mtf.Tensor = mtf.add_n(
      [
        embedding.ids_to_embedding(ids - start if start else ids, context)
        for start, embedding in self._clusters
      ]
    )
    return embedded

  def hidden_to_logits(self, hidden: mtf.Tensor, context: Context) -> mtf.Tensor:
    """Products with the vectors: the dims of `hidden`, vocab_dim for output_dim."""
    logits = [embedding.hidden_to_logits(hidden, context) for _, embedding in self._clusters]
    return concat_vocab(logits, self._vocab_dim)


def check_token_counts(
  what: str, vocab_dim: mtf.Dimension, clusters: Sequence[Mapping[str, Any]]
) -> None:
  """Raises ConfigError if the clusters do not make up the vocabulary."""
  counts = [cluster["token_count"] for cluster in clusters]
  if sum(counts) != vocab_dim.size:
    raise errors.ConfigError(
      f"{what}.clusters: the token counts {counts} sum up to {sum(counts)}, but the dimension is "
      f"{vocab_dim.name}={vocab_dim.size} (the vocabulary, rounded up to a multiple of "
      "Unitransformer.vocab_divisor)"
    )


def cluster_embedding(
  mesh: mtf.Mesh,
  vocab_dim: mtf.Dimension,
  output_dim: mtf.Dimension,
  variable_dtype: mtf.VariableDType | tf.DType,
  name: str,
  ensemble_dim: mtf.Dimension | None,
  embedding_size: int,
) -> VocabEmbedding | FactorizedVocabEmbedding:
  """The embedding of a cluster: factorized, unless its vectors are of the model's size."""
  arguments: dict[str, Any] = dict(
    mesh=mesh,
    vocab_dim=vocab_dim,
    output_dim=output_dim,
    variable_dtype=variable_dtype,
    name=name,
    ensemble_dim=ensemble_dim,
  )
  if embedding_size == output_dim.size:
    return VocabEmbedding(**arguments)
  return FactorizedVocabEmbedding(**arguments, inner_dimension_size=embedding_size)


def concat_vocab(parts: Sequence[mtf.Tensor], vocab_dim: mtf.Dimension) -> mtf.Tensor:
  """Puts tensors one behind the other along the vocabulary, which may be split over the mesh.

  Args:
    parts: tensors whose last dimension is called as vocab_dim, of sizes that sum up to its own.
    vocab_dim: dimension of the result.

  Returns:
    A tensor `[..., vocab_dim]`.
  """
  if len(parts) == 1:
    return parts[0]
  # Under another name the dimension is not split.
  whole = [mtf.rename_dimension(x, vocab_dim.name, f"_{vocab_dim.name}") for x in parts]
  joined = mtf.concat(whole, f"_{vocab_dim.name}")
  return mtf.rename_dimension(joined, f"_{vocab_dim.name}", vocab_dim.name)
