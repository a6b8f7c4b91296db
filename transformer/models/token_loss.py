"""The loss of a model's predictions of tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer.models.context import Context
from mesh_tensorflow.transformer.models.sequence_utils import delimited_lm_inputs_mask

_LOG = logging.getLogger("mesh_tensorflow")


class TokenLoss:
  """Mixin of a `Unitransformer`, whose arguments of these names are its attributes."""

  ensemble_dim: mtf.Dimension | None
  label_smoothing: float
  loss_on_targets_only: bool
  output_vocab_dim: mtf.Dimension | None
  output_vocab_size_unpadded: int | None
  z_loss: float
  _loss_denominator: float | None
  _loss_fn: Callable[..., mtf.Tensor] | None

  @property
  def output_vocab_is_padded(self) -> bool:
    """True if the output vocabulary's dimension is padded beyond the vocabulary."""
    dim, size = self.output_vocab_dim, self.output_vocab_size_unpadded
    return dim is not None and size is not None and size < dim.size

  def tokens_mask(self, mesh: mtf.Mesh, vocab_dim: mtf.Dimension, dtype: tf.DType) -> mtf.Tensor:
    """1 for output ids of the vocabulary, 0 for those beyond it: `[vocab]`."""
    ids = mtf.range(mesh, vocab_dim, dtype=tf.int32)
    return mtf.cast(mtf.less(ids, self.output_vocab_size_unpadded), dtype)

  def loss_denominator(self, targets: mtf.Tensor, num_microbatches: int) -> float:
    """Divisor of the sum of the positions' losses.

    Args:
      targets: int32 `[<batch_dims>, length]`.
      num_microbatches: number of such batches in a training step.
    """
    if self._loss_denominator is not None:
      return float(self._loss_denominator)
    # Padding counts: with a constant for a denominator, the losses of microbatches add up to that
    # of the batch.
    ret = float(targets.shape.size) * num_microbatches
    if self.ensemble_dim and self.ensemble_dim in targets.shape.dims:
      # The ensemble's losses add up: its members train on the same targets.
      ret /= self.ensemble_dim.size
    _LOG.info("loss denominator: %g", ret)
    return ret

  def counted_targets(self, targets: mtf.Tensor) -> mtf.Tensor:
    """Bool mask of targets that count in the loss: non-padding; in delimited models no inputs."""
    counted = mtf.greater(targets, 0)
    if self.loss_on_targets_only:
      counted = mtf.logical_and(counted, mtf.logical_not(delimited_lm_inputs_mask(targets)))
    return counted

  def _compute_loss(
    self,
    context: Context,
    logits: mtf.Tensor,
    targets: mtf.Tensor,
    output_vocab_dim: mtf.Dimension,
    counted: mtf.Tensor | None = None,
  ) -> mtf.Tensor:
    """Sum of the losses of the positions that count, divided; a scalar.

    Args:
      context: a `Context`.
      logits: `[<dims of targets>, vocab]`.
      targets: int32.
      output_vocab_dim: the dimension of tokens.
      counted: which positions count, bool of the dims of targets; None: see `counted_targets`.
    """
    if self._loss_fn:
      return self._loss_fn(self, context, logits, targets, output_vocab_dim)
    if counted is None:
      counted = self.counted_targets(targets)
    weights = mtf.cast(counted, context.activation_dtype)
    smoothing = self.label_smoothing
    # Smoothing spreads over all tokens, the right one among them: the probabilities sum up to 1.
    off_value = 0.0 if self.output_vocab_is_padded else smoothing / output_vocab_dim.size
    loss = mtf.layers.softmax_cross_entropy_with_logits(
      logits,
      mtf.maximum(targets, 0),
      output_vocab_dim,
      on_value=1.0 - smoothing + off_value,
      off_value=off_value,
      # It helps to train, and is no part of the likelihood that an evaluation reports.
      z_loss=self.z_loss if context.train else 0.0,
    )
    if smoothing and self.output_vocab_is_padded:
      # The mean of -log p over the tokens of the vocabulary, whose number is not the dimension's.
      exact = mtf.to_float(logits)
      mask = self.tokens_mask(logits.mesh, output_vocab_dim, exact.dtype)
      mean = mtf.einsum([exact, mask], output_shape=loss.shape) / mtf.reduce_sum(mask)
      spread = mtf.reduce_logsumexp(exact, output_vocab_dim) - mean
      loss += mtf.cast(spread * smoothing, loss.dtype)
    total = mtf.einsum([loss, weights], output_shape=[])
    return total * (1.0 / self.loss_denominator(targets, context.num_microbatches))
