"""Adaptive softmax: frequent tokens in a head, others in tails that the head chooses between.

Grave, Joulin, Cissé, Grangier and Jégou, 2016 (arXiv:1609.04309): the loss of training computes
the logits of a tail only for the targets in it. To use it, bind

    get_vocab_embedding_cls.cls = @adaptive_softmax.AdaptiveSoftmaxVocabEmbedding
    Unitransformer.shared_embedding_and_softmax_weights = True
    Unitransformer.loss_fn = @adaptive_softmax.adaptive_softmax_loss_fn
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.operations.indexing import ScatterAddOperation
from mesh_tensorflow.transformer.model.context import Context
from mesh_tensorflow.transformer.model.token_loss import exact_dtype
from mesh_tensorflow.transformer.model.unitransformer import Unitransformer
from mesh_tensorflow.transformer.model.vocab_embedding import without_padding
from mesh_tensorflow.transformer.vocab_embeddings import (
  check_token_counts,
  cluster_embedding,
  concat_vocab,
)

__all__ = ["AdaptiveSoftmaxVocabEmbedding", "adaptive_softmax_loss_fn"]

_MODULE = "mesh_tensorflow.transformer.adaptive_softmax"
# The key of a context's cache under which a training pass leaves its embedding for the loss.
_EMBEDDING = "adaptive_softmax_embedding"


@dataclasses.dataclass(frozen=True)
class _Cluster:
  """Consecutive ids.

  Attributes:
    start: the first id.
    size: how many.
    vocab_dim: dimension of the embedding; that of the head has rows for the tails behind the ids.
    embedding: of those rows.
    length_projection_factor: for which part of a sequence there is room.
  """

  start: int
  size: int
  vocab_dim: mtf.Dimension
  embedding: Any
  length_projection_factor: float

  def has(self, ids: mtf.Tensor) -> mtf.Tensor:
    """Bool mask of the ids that belong to this cluster."""
    return mtf.logical_and(
      mtf.greater_equal(ids, self.start), mtf.less(ids, self.start + self.size)
    )


@gin.configurable(module=_MODULE)
@affects(report="mesh")
class AdaptiveSoftmaxVocabEmbedding:
  """Embeddings of tokens, and an adaptive softmax with the same weights.

  The first cluster is the head. Variables: as of `vocab_embeddings.AdaptiveVocabEmbedding`; those
  of the head have one more row for each other cluster.

  Args:
    mesh: an `mtf.Mesh`.
    vocab_dim: dimension of tokens; may be split over the mesh if all clusters' can.
    output_dim: dimension of vectors.
    variable_dtype: an `mtf.VariableDType`, or one dtype for all three.
    name: of the variables, with the number of the cluster behind it.
    ensemble_dim: a dimension, or None.
    clusters: list of dicts with the keys "token_count", number of ids; "embedding_size", by default
      that of output_dim; and "length_projection_factor", by default 1: training computes the
      logits of a tail for at most this part of the positions of a sequence, rounded up. Targets
      beyond those have no loss in that tail. The counts sum up to the size of vocab_dim.

  Raises:
    ConfigError: they do not; or a factor is not above 0 and at most 1; or a dict has other keys.
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
    _check_clusters(vocab_dim, clusters)
    self._vocab_dim = vocab_dim
    self._clusters: list[_Cluster] = []
    start = 0
    for i, cluster in enumerate(clusters):
      size = cluster["token_count"]
      # The head chooses among its tokens and the tails: a row for each of those.
      rows = size + len(clusters) - 1 if i == 0 else size
      cluster_dim = mtf.Dimension(vocab_dim.name, rows)
      embedding = cluster_embedding(
        cluster.get("embedding_size", output_dim.size), mesh, cluster_dim, output_dim,
        variable_dtype, f"{name}_{i}", ensemble_dim,
      )  # fmt: skip
      factor = cluster.get("length_projection_factor", 1)
      self._clusters.append(_Cluster(start, size, cluster_dim, embedding, factor))
      start += size

  def ids_to_embedding(self, ids: mtf.Tensor, context: Context) -> mtf.Tensor:
    """The vectors of the ids: the dims of `ids`, then output_dim; zeros for ids out of range."""
    head, *tails = self._clusters
    # An id that no cluster has any row for. The head has rows for tails, which are not ids.
    nowhere = self._vocab_dim.size
    if tails:
      ids_in_head = mtf.where(mtf.less(ids, head.size), ids, nowhere)
    else:
      ids_in_head = ids
    embedded: mtf.Tensor = mtf.add_n(
      [head.embedding.ids_to_embedding(ids_in_head, context)]
      + [tail.embedding.ids_to_embedding(ids - tail.start, context) for tail in tails]
    )
    return embedded

  def hidden_to_logits(self, hidden: mtf.Tensor, context: Context) -> mtf.Tensor:
    """Log probabilities: the dims of `hidden`, vocab_dim for output_dim.

    In training `hidden` itself: the loss needs no more; see `adaptive_softmax_loss_fn`.
    """
    # The loss takes the hidden states: logits of all clusters are what it is there to save.
    if context.mode == "train":
      context.cache[_EMBEDDING] = self
      return hidden
    head, *tails = self._clusters
    name = self._vocab_dim.name
    log_probs = mtf.log_softmax(_cluster_logits(head, hidden, context), head.vocab_dim)
    if not tails:
      return log_probs
    # Under another name the dimension is not split over the mesh, and can be cut.
    whole = mtf.rename_dimension(log_probs, name, f"_{name}")
    ids, *nodes = mtf.split(
      whole, mtf.Dimension(f"_{name}", head.vocab_dim.size), [head.size] + [1] * len(tails)
    )
    parts = [mtf.rename_dimension(ids, f"_{name}", name)]
    for tail, node in zip(tails, nodes):
      in_tail = mtf.log_softmax(_cluster_logits(tail, hidden, context), tail.vocab_dim)
      # p(token) = p(tail) p(token | tail), in logarithms.
      parts.append(in_tail + mtf.reshape(node, hidden.shape[:-1]))
    return concat_vocab(parts, self._vocab_dim)

  def compute_loss(
    self, decoder: Unitransformer, hidden: mtf.Tensor, targets: mtf.Tensor, context: Context
  ) -> mtf.Tensor:
    """The loss of training: the sum of the losses of the clusters.

    That of a cluster is a sum over the positions of its targets, divided by
    `decoder.loss_denominator` of its positions, or of those there is room for.

    Args:
      decoder: gives `z_loss` and `loss_denominator(targets, num_microbatches)`.
      hidden: `[<batch_dims>, length, output_dim]`.
      targets: int32 `[<batch_dims>, length]`. Only positive ones count.
      context: a `Context`.

    Returns:
      A scalar tensor.
    """
    head, *tails = self._clusters
    head_targets = targets
    losses = []
    for i, tail in enumerate(tails):
      inside = tail.has(targets)
      # To the head, a target in a tail is the row of that tail.
      head_targets = mtf.where(inside, head.size + i, head_targets)
      # Targets elsewhere become 0, which does not count.
      tail_hidden, tail_targets = hidden, targets * mtf.to_int32(inside)
      if tail.length_projection_factor != 1:
        tail_hidden, tail_targets = _collect(hidden, targets, inside, tail)
      losses.append(_cluster_loss(tail, decoder, tail_hidden, tail_targets, context))
    losses.append(_cluster_loss(head, decoder, hidden, head_targets, context))
    loss: mtf.Tensor = mtf.add_n(losses)
    return loss


def _check_clusters(vocab_dim: mtf.Dimension, clusters: Sequence[Mapping[str, Any]]) -> None:
  what = "AdaptiveSoftmaxVocabEmbedding"
  keys = {"token_count", "embedding_size", "length_projection_factor"}
  for i, cluster in enumerate(clusters):
    if not {"token_count"} <= set(cluster) <= keys:
      raise errors.ConfigError(
        f"{what}.clusters: each must have the key token_count, may have embedding_size and "
        f"length_projection_factor, and no others; got {dict(cluster)}"
      )
    factor = cluster.get("length_projection_factor", 1)
    if not 0 < factor <= 1:
      raise errors.ConfigError(
        f"{what}.clusters: length_projection_factor must be above 0 and at most 1, got {factor} "
        f"in cluster {i}"
      )
  check_token_counts(what, vocab_dim, clusters)


def _collect(
  hidden: mtf.Tensor, targets: mtf.Tensor, inside: mtf.Tensor, cluster: _Cluster
) -> tuple[mtf.Tensor, mtf.Tensor]:
  """The positions of a cluster, as many as there is room for, one behind the other.

  Args:
    hidden: `[<batch_dims>, length, output_dim]`.
    targets: int32 `[<batch_dims>, length]`.
    inside: bool `[<batch_dims>, length]`: which ones to collect.
    cluster: gives the room.

  Returns:
    (hidden, targets) with a shorter dimension `length_of_cluster` for `length`; zeros at the end.
  """
  if "length" not in targets.shape.dimension_names:
    raise errors.DimensionError(
      f"adaptive softmax: a length_projection_factor (={cluster.length_projection_factor}) needs "
      f"targets with a dimension called length, got {targets}"
    )
  length_dim = targets.shape.get_dim_by_name("length")
  # Of another name than the length, over which both may be split.
  room = mtf.Dimension(
    "length_of_cluster", math.ceil(cluster.length_projection_factor * length_dim.size)
  )
  inside = mtf.to_int32(inside)
  # -1 for the others: what is out of range is left out.
  place = mtf.cumsum(inside, length_dim) * inside - 1

  def collect(x: mtf.Tensor) -> mtf.Tensor:
    dims = [room if d == length_dim else d for d in x.shape]
    return ScatterAddOperation(x, place, mtf.Shape(dims), room).outputs[0]

  return collect(hidden), collect(targets)


def _cluster_logits(cluster: _Cluster, hidden: mtf.Tensor, context: Context) -> mtf.Tensor:
  """Logits of the ids of a cluster, and behind those of the head of the tails."""
  logits = cluster.embedding.hidden_to_logits(hidden, context)
  return without_padding(logits, cluster.vocab_dim, context, cluster.start, cluster.size)


def _cluster_loss(
  cluster: _Cluster,
  decoder: Unitransformer,
  hidden: mtf.Tensor,
  targets: mtf.Tensor,
  context: Context,
) -> mtf.Tensor:
  """The divided sum of the cross entropies at positive targets."""
  logits = _cluster_logits(cluster, hidden, context)
  loss = mtf.layers.softmax_cross_entropy_with_logits(
    logits,
    targets - cluster.start if cluster.start else targets,
    cluster.vocab_dim,
    z_loss=decoder.z_loss,
    loss_dtype=exact_dtype(logits.dtype),
  )
  return _weighted_sum(loss, targets, decoder, context)


def _weighted_sum(
  loss: mtf.Tensor, targets: mtf.Tensor, decoder: Unitransformer, context: Context
) -> mtf.Tensor:
  total = mtf.einsum([loss, mtf.cast(mtf.greater(targets, 0), loss.dtype)], output_shape=[])
  denominator: float = decoder.loss_denominator(targets, context.num_microbatches)
  return total * (1.0 / denominator)


@gin.configurable(module=_MODULE)
def adaptive_softmax_loss_fn(
  decoder: Unitransformer,
  context: Context,
  logits: mtf.Tensor,
  targets: mtf.Tensor,
  output_vocab_dim: mtf.Dimension,
) -> mtf.Tensor:
  """The loss of a model whose embedding is an `AdaptiveSoftmaxVocabEmbedding`.

  In training `AdaptiveSoftmaxVocabEmbedding.compute_loss`. Otherwise the cross entropy of the log
  probabilities. Label smoothing and `loss_on_targets_only` have no effect.

  Args:
    decoder: the `Unitransformer`, whose `loss_fn` this is.
    context: a `Context`.
    logits: what `hidden_to_logits` returned: in training hidden states `[<batch_dims>, length,
      d_model]`, else log probabilities `[<batch_dims>, length, vocab]`.
    targets: int32 `[<batch_dims>, length]`. Only positive ones count.
    output_vocab_dim: dimension of tokens.

  Returns:
    A scalar tensor.

  Raises:
    ConfigError: the model's embedding is of another class, or it does not make the logits.
  """
  if context.mode != "train":
    # Log probabilities have no partition function: no z-loss.
    loss = mtf.layers.softmax_cross_entropy_with_logits(logits, targets, output_vocab_dim)
    return _weighted_sum(loss, targets, decoder, context)
  embedding = context.shared_params.get("embedding") or context.cache.get(_EMBEDDING)
  made_logits = output_vocab_dim in logits.shape
  if made_logits or not isinstance(embedding, AdaptiveSoftmaxVocabEmbedding):
    raise errors.ConfigError(
      "adaptive_softmax_loss_fn: the model needs get_vocab_embedding_cls.cls = "
      "@adaptive_softmax.AdaptiveSoftmaxVocabEmbedding and "
      "Unitransformer.shared_embedding_and_softmax_weights = True"
    )
  return embedding.compute_loss(decoder, logits, targets, context)
