"""The embedding of token ids, and the logits that share its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.layers.masks import masked_logit
from mesh_tensorflow.transformer.model.context import Context

_MODULE = "mesh_tensorflow.transformer.transformer"


def without_padding(
  logits: mtf.Tensor,
  vocab_dim: mtf.Dimension,
  context: Context,
  start: int = 0,
  count: int | None = None,
) -> mtf.Tensor:
  """Logits without those of ids that only pad the vocabulary, which become about -1e9.

  Args:
    logits: of a part of the ids, or of all.
    vocab_dim: their dimension.
    context: a `Context`, whose model says how many ids are tokens.
    start: the first id.
    count: how many of the dimension are ids; None: all.
  """
  size = getattr(getattr(context, "model", None), "output_vocab_size_unpadded", None)
  end = start + (vocab_dim.size if count is None else count)
  if size is None or end <= size:
    return logits
  ids = mtf.range(logits.mesh, vocab_dim, dtype=tf.int32) + start
  padding = mtf.logical_and(mtf.greater_equal(ids, size), mtf.less(ids, end))
  return logits + mtf.cast(padding, logits.dtype) * masked_logit(logits.dtype)


class TokenVectors:
  """Base class of embeddings: a vector for each token, the row of the table `_embedding_weights`.

  For the arguments see `VocabEmbedding`.
  """

  _embedding_weights: mtf.Tensor

  def __init__(
    self,
    mesh: mtf.Mesh,
    vocab_dim: mtf.Dimension,
    output_dim: mtf.Dimension,
    variable_dtype: mtf.VariableDType | tf.DType,
    name: str,
    ensemble_dim: mtf.Dimension | None,
  ):
    self._mesh = mesh
    self._vocab_dim = vocab_dim
    self._output_dim = output_dim
    self._variable_dtype = variable_dtype
    self._name = name
    self._ensemble_dims = [ensemble_dim] if ensemble_dim else []

  def _variable(self, suffix: str, *dims: mtf.Dimension, stddev: float = 1.0) -> mtf.Tensor:
    """The variable `<name><suffix>` [<ensemble_dim>, <dims>], which starts as random numbers."""
    return mtf.get_variable(
      self._mesh,
      self._name + suffix,
      mtf.Shape([*self._ensemble_dims, *dims]),
      dtype=self._variable_dtype,
      initializer=tf.random_normal_initializer(stddev=stddev) if stddev else tf.zeros_initializer(),
    )

  def ids_to_embedding(self, ids: mtf.Tensor, context: Context) -> mtf.Tensor:
    """The vectors of the ids: the dims of `ids`, then output_dim; zeros for ids out of range."""
    del context
    return mtf.gather(
      self._embedding_weights, ids, self._vocab_dim, output_shape=ids.shape + self._output_dim
    )


@gin.configurable(module=_MODULE)
@affects(report="mesh", training="init_scale")
class VocabEmbedding(TokenVectors):
  """A table of one vector per token.

  Any class with these constructor arguments and these two methods may take its place; see
  `get_vocab_embedding_cls`.

  Args:
    mesh: an `mtf.Mesh`.
    vocab_dim: dimension of tokens.
    output_dim: dimension of vectors.
    variable_dtype: an `mtf.VariableDType`, or one dtype for all three.
    name: of the variable, `[<ensemble_dim>, vocab_dim, output_dim]`.
    ensemble_dim: a dimension, or None.
    scale_variable_like_classifier_weights: start with a standard deviation of
      `output_dim.size ** -0.5` instead of 1, and scale embeddings up instead of logits down.
    init_scale: factor of the standard deviation at the start; see `Unitransformer`'s
      logits_init_scale, which gives it.
  """

  def __init__(
    self,
    mesh: mtf.Mesh,
    vocab_dim: mtf.Dimension,
    output_dim: mtf.Dimension,
    variable_dtype: mtf.VariableDType | tf.DType,
    name: str,
    ensemble_dim: mtf.Dimension | None,
    scale_variable_like_classifier_weights: bool = False,
    init_scale: float = 1.0,
  ):
    super().__init__(mesh, vocab_dim, output_dim, variable_dtype, name, ensemble_dim)
    self._scale_variable_like_classifier_weights = scale_variable_like_classifier_weights
    stddev = output_dim.size**-0.5 if scale_variable_like_classifier_weights else 1.0
    self._embedding_weights = self._variable("", vocab_dim, output_dim, stddev=stddev * init_scale)

  def ids_to_embedding(self, ids: mtf.Tensor, context: Context) -> mtf.Tensor:
    """The rows of the table: the dims of `ids`, then output_dim."""
    ret = super().ids_to_embedding(ids, context)
    if self._scale_variable_like_classifier_weights:
      # To variance 1, as the other convention has it from the start.
      ret *= self._output_dim.size**0.5
    return ret

  def hidden_to_logits(self, hidden: mtf.Tensor, context: Context) -> mtf.Tensor:
    """Products with the rows of the table: the dims of `hidden`, vocab_dim for output_dim."""
    # Vectors that start with variance 1 would make logits of variance d_model.
    if not self._scale_variable_like_classifier_weights:
      hidden *= self._output_dim.size**-0.5
    weights = self._embedding_weights
    key = ("softmax_kernel", weights)
    if context is not None and (context.mode == "first_part" or key in context.cache):
      # Decoding multiplies few rows by the table, again and again: transposed once, that takes
      # half of the time.
      order = weights.shape - self._vocab_dim + self._vocab_dim
      weights = context.cached(key, lambda: mtf.transpose(weights, order))
    return mtf.einsum(
      [hidden, weights],
      reduced_dims=[self._output_dim],
      output_shape=hidden.shape - self._output_dim + self._vocab_dim,
    )


@gin.configurable(module=_MODULE)
def get_vocab_embedding_cls(cls: Any = VocabEmbedding) -> Any:
  """The class of embeddings: `VocabEmbedding`, or another one by gin."""
  return cls


@gin.configurable(module=_MODULE)
@affects("precision")
def reduce_ensemble_logits_select(
  logits: mtf.Tensor, ensemble_dim: mtf.Dimension, vocab_dim: mtf.Dimension, model_id: int = 0
) -> mtf.Tensor:
  """The logits of one member of the ensemble."""
  del vocab_dim
  return mtf.gather(logits, model_id % ensemble_dim.size, dim=ensemble_dim)


@gin.configurable(module=_MODULE)
@affects("precision")
def reduce_ensemble_logits_mean_prob(
  logits: mtf.Tensor, ensemble_dim: mtf.Dimension, vocab_dim: mtf.Dimension
) -> mtf.Tensor:
  """Logarithm of the mean probability, at least log(1e-20)."""
  probs = mtf.reduce_mean(mtf.softmax(logits, reduced_dim=vocab_dim), reduced_dim=ensemble_dim)
  # Not exactly 0, whose logarithm would spoil sums with other scores.
  return mtf.log(mtf.maximum(probs, 1e-20))


@gin.configurable(module=_MODULE)
@affects("precision")
def reduce_ensemble_logits_mean_logit(
  logits: mtf.Tensor, ensemble_dim: mtf.Dimension, vocab_dim: mtf.Dimension
) -> mtf.Tensor:
  """Mean of the logits."""
  del vocab_dim
  return mtf.reduce_mean(logits, reduced_dim=ensemble_dim)


@gin.configurable(module=_MODULE)
@affects("precision")
def reduce_ensemble_logits(
  logits: mtf.Tensor,
  ensemble_dim: mtf.Dimension,
  vocab_dim: mtf.Dimension,
  reduce_fn: Callable[..., mtf.Tensor] = reduce_ensemble_logits_mean_prob,
) -> mtf.Tensor:
  """The logits of an ensemble from those of its members.

  Args:
    logits: a tensor with dims ensemble_dim and vocab_dim.
    ensemble_dim: the dimension to remove.
    vocab_dim: the dimension of tokens.
    reduce_fn: one of the `reduce_ensemble_logits_*` functions.
  """
  return reduce_fn(logits, ensemble_dim, vocab_dim)
