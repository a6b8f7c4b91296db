"""Embeddings of tokens other than one table: smaller ones, and richer distributions.

Each class can be bound as `get_vocab_embedding_cls.cls`; with
`Unitransformer.shared_embedding_and_softmax_weights = True` it makes the logits too. `vocab_dim` is
the dimension that the model uses, its size rounded up to a multiple of
`Unitransformer.vocab_divisor`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import BELOW_ONE, COUNT_OR_ZERO, affects, takes
from mesh_tensorflow.transformer.model.context import Context
from mesh_tensorflow.transformer.model.dropout import dropout
from mesh_tensorflow.transformer.model.vocab_embedding import (
  TokenVectors,
  VocabEmbedding,
  without_padding,
)

__all__ = [
  "AdaptiveVocabEmbedding",
  "FactorizedVocabEmbedding",
  "Mixtape",
  "MixtureOfSoftmaxes",
]

_MODULE = "mesh_tensorflow.transformer.vocab_embeddings"


@gin.configurable(module=_MODULE)
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


@gin.configurable(module=_MODULE)
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
      cluster_dim = mtf.Dimension(vocab_dim.name, cluster["token_count"])
      embedding = cluster_embedding(
        cluster["embedding_size"], mesh, cluster_dim, output_dim, variable_dtype, f"{name}_{i}",
        ensemble_dim,
      )  # fmt: skip
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
  embedding_size: int,
  mesh: mtf.Mesh,
  vocab_dim: mtf.Dimension,
  output_dim: mtf.Dimension,
  variable_dtype: mtf.VariableDType | tf.DType,
  name: str,
  ensemble_dim: mtf.Dimension | None,
) -> VocabEmbedding | FactorizedVocabEmbedding:
  """The embedding of a cluster: factorized, unless its vectors are of the model's size."""
  arguments = (mesh, vocab_dim, output_dim, variable_dtype, name, ensemble_dim)
  if embedding_size == output_dim.size:
    return VocabEmbedding(*arguments)
  return FactorizedVocabEmbedding(*arguments, inner_dimension_size=embedding_size)


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


@gin.configurable(module=_MODULE)
@affects(report="mesh")
class MixtureOfSoftmaxes(TokenVectors):
  """A mixture of several softmaxes, whose logits are not of the rank of the model's size.

  Yang et al., 2017 (arXiv:1711.03953). Variables, with a leading ensemble_dim if there is one:
  `<name>_embedding_weights` [vocab_dim, output_dim], `<name>_mixture_weights` [softmax_components,
  output_dim] and `<name>_context_weights` [softmax_components, _<output_dim>_copy, output_dim].

  Args:
    mesh: an `mtf.Mesh`.
    vocab_dim: dimension of tokens.
    output_dim: dimension of vectors.
    variable_dtype: an `mtf.VariableDType`, or one dtype for all three.
    name: of the variables, with what they are behind it.
    ensemble_dim: a dimension, or None.
    num_softmaxes: how many.
  """

  def __init__(
    self,
    mesh: mtf.Mesh,
    vocab_dim: mtf.Dimension,
    output_dim: mtf.Dimension,
    variable_dtype: mtf.VariableDType | tf.DType,
    name: str,
    ensemble_dim: mtf.Dimension | None,
    num_softmaxes: int = gin.REQUIRED,
  ):
    super().__init__(mesh, vocab_dim, output_dim, variable_dtype, name, ensemble_dim)
    self._copy_dim = mtf.Dimension(f"_{output_dim.name}_copy", output_dim.size)
    self._components_dim = mtf.Dimension("softmax_components", num_softmaxes)
    components = self._components_dim
    self._embedding_weights = self._variable("_embedding_weights", vocab_dim, output_dim)
    self._mixture_weights = self._variable("_mixture_weights", components, output_dim)
    self._context_weights = self._variable(
      "_context_weights", components, self._copy_dim, output_dim
    )

  def hidden_to_logits(self, hidden: mtf.Tensor, context: Context) -> mtf.Tensor:
    """Log probabilities: the dims of `hidden`, vocab_dim for output_dim."""
    output_dim, components_dim = self._output_dim, self._components_dim
    hidden *= output_dim.size**-0.5
    batch = hidden.shape - output_dim
    prior = mtf.log_softmax(
      mtf.einsum([hidden, self._mixture_weights], output_shape=batch + components_dim),
      components_dim,
    )
    # A matrix has no two dimensions of one name: its input has another one.
    renamed = mtf.rename_dimension(hidden, output_dim.name, self._copy_dim.name)
    hidden_of_component = mtf.tanh(
      mtf.einsum([renamed, self._context_weights], output_shape=batch + components_dim + output_dim)
    )
    logits = mtf.einsum(
      [hidden_of_component, self._embedding_weights],
      output_shape=batch + components_dim + self._vocab_dim,
    )
    logits = without_padding(logits, self._vocab_dim, context)
    log_probs = mtf.log_softmax(logits, self._vocab_dim)
    # log of sum(prior * probability): the probabilities themselves could be too small for floats.
    return mtf.reduce_logsumexp(log_probs + prior, components_dim)


@gin.configurable(module=_MODULE)
@affects(report="mesh", training="dropout_rate noise_std_dev")
@takes(extra_ids=COUNT_OR_ZERO, dropout_rate=BELOW_ONE)
class Mixtape(TokenVectors):
  """Logits that are mixed, with weights for each token, from four sets of logits.

  Yang, Luong, Salakhutdinov and Le, 2019: "Mixtape: Breaking the Softmax Bottleneck Efficiently".
  The weights of infrequent tokens do not depend on the token. Variables, with a leading
  ensemble_dim if there is one; f is the number of frequent tokens:

      <name>_embedding_weights [vocab_dim, output_dim]
      <name>_context_weights [gates=4, _<output_dim>_copy, output_dim], _bias [gates=4, output_dim]
      <name>_prior_weights [gates=3, gate_embedding, output_dim], _bias [gates=3, gate_embedding]
      <name>_prior_vocab_vector [vocab=f, gate_embedding]
      <name>_prior_gates_vector [gates=3, output_dim]
      <name>_prior_bias [vocab=f, gates=3]

  Args:
    mesh: an `mtf.Mesh`.
    vocab_dim: dimension of tokens. Split over the mesh, the number of frequent tokens must be
      splittable too.
    output_dim: dimension of vectors.
    variable_dtype: an `mtf.VariableDType`, or one dtype for all three.
    name: of the variables; see above.
    ensemble_dim: a dimension, or None.
    extra_ids: how many ids at the end of the vocabulary (sentinels) are to count as the most
      frequent; ids from 0 follow.
    dropout_rate: rate at which logits, and vectors of gates, become 0 in training; all positions
      of a sequence have one mask.
    gate_embedding_size: size of the vectors from which gates of frequent tokens are computed.
    frequent_token_fraction: which part of the vocabulary counts as frequent.
    noise_std_dev: standard deviation of noise that is added to the gates in training.

  Raises:
    ConfigError: extra_ids or frequent_token_fraction does not fit the vocabulary.
  """

  def __init__(
    self,
    mesh: mtf.Mesh,
    vocab_dim: mtf.Dimension,
    output_dim: mtf.Dimension,
    variable_dtype: mtf.VariableDType | tf.DType,
    name: str,
    ensemble_dim: mtf.Dimension | None,
    extra_ids: int = 0,
    dropout_rate: float = 0.0,
    gate_embedding_size: int = gin.REQUIRED,
    frequent_token_fraction: float = 0.1,
    noise_std_dev: float = 0.0,
  ):
    # Ids are ordered by frequency: the first ones are the frequent ones.
    frequent = int(frequent_token_fraction * vocab_dim.size)
    if not 0 < frequent <= vocab_dim.size:
      raise errors.ConfigError(
        f"Mixtape: frequent_token_fraction={frequent_token_fraction} of the dimension "
        f"{vocab_dim.name}={vocab_dim.size} is {frequent} tokens; it must be 1 to {vocab_dim.size}"
      )
    if not 0 <= extra_ids <= vocab_dim.size:
      raise errors.ConfigError(
        f"Mixtape: extra_ids={extra_ids} must be 0 to {vocab_dim.name}={vocab_dim.size}"
      )
    super().__init__(mesh, vocab_dim, output_dim, variable_dtype, name, ensemble_dim)
    self._extra_ids = extra_ids
    self._dropout_rate = dropout_rate
    self._noise_std_dev = noise_std_dev
    self._copy_dim = mtf.Dimension(f"_{output_dim.name}_copy", output_dim.size)
    self._gates_dim, self._logits_dim = mtf.Dimension("gates", 3), mtf.Dimension("gates", 4)
    self._gate_embedding_dim = mtf.Dimension("gate_embedding", gate_embedding_size)
    self._rare_size = vocab_dim.size - frequent
    frequent_dim = mtf.Dimension(vocab_dim.name, frequent)
    variable = self._variable
    self._embedding_weights = variable("_embedding_weights", vocab_dim, output_dim)
    self._context_weights = variable(
      "_context_weights", self._logits_dim, self._copy_dim, output_dim
    )
    self._context_bias = variable("_context_weights_bias", self._logits_dim, output_dim, stddev=0.0)
    gates, gate_embedding = self._gates_dim, self._gate_embedding_dim
    self._prior_weights = variable("_prior_weights", gates, gate_embedding, output_dim)
    self._prior_weights_bias = variable("_prior_weights_bias", gates, gate_embedding, stddev=0.0)
    self._prior_vocab_vector = variable("_prior_vocab_vector", frequent_dim, gate_embedding)
    self._prior_gates_vector = variable("_prior_gates_vector", gates, output_dim)
    self._prior_bias = variable("_prior_bias", frequent_dim, gates)

  def hidden_to_logits(self, hidden: mtf.Tensor, context: Context) -> mtf.Tensor:
    """Mixed logits: the dims of `hidden`, vocab_dim for output_dim."""
    # The table has variance 1: see `VocabEmbedding.hidden_to_logits`.
    hidden *= self._output_dim.size**-0.5
    gate0, gate1, gate2 = self._gates(hidden, context)
    logits0, logits1, logits2, logits3 = mtf.unstack(
      self._component_logits(hidden, context), self._logits_dim
    )
    # gate * a + (1 - gate) * b, three times.
    # The paper's tree of sigmoids: four weights that add up to 1, of three gates without a softmax.
    left = logits1 + gate1 * (logits0 - logits1)
    right = logits3 + gate2 * (logits2 - logits3)
    logits = right + gate0 * (left - right)
    if self._extra_ids:
      # The last ids were computed as the first ones.
      logits = mtf.shift(logits, -self._extra_ids, self._vocab_dim, wrap=True)
    return logits

  def _component_logits(self, hidden: mtf.Tensor, context: Context) -> mtf.Tensor:
    """Four sets of logits: `[..., gates=4, vocab_dim]`."""
    dims = hidden.shape - self._output_dim + self._logits_dim
    renamed = mtf.rename_dimension(hidden, self._output_dim.name, self._copy_dim.name)
    vectors = mtf.einsum([renamed, self._context_weights], output_shape=dims + self._output_dim)
    logits = mtf.einsum(
      [mtf.tanh(vectors + self._context_bias), self._embedding_weights],
      output_shape=dims + self._vocab_dim,
    )
    return self._dropout(logits, context)

  def _gates(self, hidden: mtf.Tensor, context: Context) -> list[mtf.Tensor]:
    """Three gates, between 0 and 1, for each token: tensors `[..., vocab_dim]`."""
    batch = hidden.shape - self._output_dim
    dims = batch + self._gates_dim
    vectors = mtf.einsum(
      [hidden, self._prior_weights], output_shape=dims + self._gate_embedding_dim
    )
    vectors = self._dropout(mtf.tanh(vectors + self._prior_weights_bias), context)
    shared = mtf.einsum([hidden, self._prior_gates_vector], output_shape=dims)
    # Under another name the frequent tokens are not split over the mesh: their gates are padded.
    name = self._vocab_dim.name
    vocab_vector, bias = (
      mtf.rename_dimension(x, name, f"_{name}")
      for x in (self._prior_vocab_vector, self._prior_bias)
    )
    frequent_dim = mtf.Dimension(f"_{name}", self._vocab_dim.size - self._rare_size)
    prior = mtf.einsum([vocab_vector, vectors], output_shape=dims + frequent_dim) + bias
    if self._rare_size:
      # Zeros for rare tokens: their gates are the part that all tokens share.
      prior = mtf.pad(prior, [0, self._rare_size], f"_{name}")
    prior = mtf.rename_dimension(prior, f"_{name}", name) + shared
    if context.mode == "train" and self._noise_std_dev:
      prior += mtf.random_normal(
        prior.mesh, prior.shape, stddev=self._noise_std_dev, dtype=prior.dtype
      )
    gates: list[mtf.Tensor] = mtf.unstack(mtf.sigmoid(prior), self._gates_dim)
    return gates

  def _dropout(self, x: mtf.Tensor, context: Context) -> mtf.Tensor:
    return dropout(x, self._dropout_rate, context)
