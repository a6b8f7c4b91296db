"""Losses of a model's predictions: of tokens, and of several tokens at once (multi-token)."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.layers import VarianceScalingInitializer
from mesh_tensorflow.transformer.model import sublayers
from mesh_tensorflow.transformer.model.context import Context
from mesh_tensorflow.transformer.model.layer_stack import LayerStack, make_layer_stack
from mesh_tensorflow.transformer.model.sequence_utils import delimited_lm_inputs_mask

_LOG = logging.getLogger("mesh_tensorflow")


def exact_dtype(dtype: tf.DType) -> tf.DType:
  """The dtype of losses: float32 at least. Sums of thousands need more digits than 16 bits have."""
  return tf.float32 if dtype.size < 4 else dtype


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
    smoothing = self.label_smoothing
    # Smoothing spreads over all tokens, the right one among them: the probabilities sum up to 1.
    num_classes = self.output_vocab_size_unpadded if self.output_vocab_is_padded else None
    off_value = smoothing / (num_classes or output_vocab_dim.size)
    loss = mtf.layers.softmax_cross_entropy_with_logits(
      logits,
      mtf.maximum(targets, 0),
      output_vocab_dim,
      on_value=1.0 - smoothing + off_value,
      off_value=off_value,
      num_classes=num_classes,
      # It helps to train, and is no part of the likelihood that an evaluation reports.
      z_loss=self.z_loss if context.train else 0.0,
      loss_dtype=exact_dtype(logits.dtype),
    )
    total = mtf.einsum([loss, mtf.cast(counted, loss.dtype)], output_shape=[])
    return total * (1.0 / self.loss_denominator(targets, context.num_microbatches))


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
@affects("training")
class MultiTokenPrediction:
  """Modules behind a model, each of which predicts the token behind that of the one before.

  Module k = 1, 2, ... makes h_k(i), the hidden state at position i, of h_(k-1)(i), where h_0 is
  that of the model, and of the embedding of the target that the one before predicts there:

      h_k = block_k(A_k RMSNorm(h_(k-1)(i)) + B_k RMSNorm(Emb(t_(i+k-1))))

  Its logits, by the model's embedding or output weights, predict t_(i+k). The loss is the mean of
  the modules' losses, as the model's own is computed, times loss_weight. Padding, and targets of
  the next sequence in a packed row, do not count. So each prediction still sees all tokens before
  it, unlike those of heads side by side (Gloeckle et al., 2024; arXiv:2404.19737).

  Modules are there in training alone: evaluation and decoding use the first prediction, that of the
  model, and neither make nor restore their variables: `future_token_<k>/` with `hidden_norm/scale`
  and `embedding_norm/scale` [d_model], `hidden/kernel` and `embedding/kernel` [_d_model, d_model],
  and those of the block's layers.

  Args:
    num_tokens: number of modules.
    loss_weight: see above; 0.3, then 0.1 in the paper.
    layers: the layers of a block; None: those of `make_layer_stack`.
    layer_stack_cls: as of `make_layer_stack`; its final sublayers norm what logits are made of.

  Raises:
    ConfigError: num_tokens is not positive, or loss_weight negative.
  """

  def __init__(
    self,
    num_tokens: int = 1,
    loss_weight: float = 0.3,
    layers: Sequence[object] | None = None,
    layer_stack_cls: Callable[..., LayerStack] = LayerStack,
  ):
    if num_tokens < 1 or loss_weight < 0:
      raise errors.ConfigError(
        f"MultiTokenPrediction: num_tokens (={num_tokens}) must be positive, and loss_weight "
        f"(={loss_weight}) not negative"
      )
    self.loss_weight = loss_weight
    given: dict[str, Any] = {} if layers is None else {"layers": layers}
    self.blocks = [
      make_layer_stack(layer_stack_cls=layer_stack_cls, num_layers=1, **given)
      for _ in range(num_tokens)
    ]

  def loss(
    self,
    model: Any,
    context: Context,
    embedding: Any,
    x: mtf.Tensor,
    inputs: mtf.Tensor,
    targets: mtf.Tensor,
  ) -> mtf.Tensor:
    """The loss of the further tokens, a scalar; creates the variables, or finds them.

    Args:
      model: a `Unitransformer`, whose variable scope is open.
      context: the context of its call.
      embedding: its embedding.
      x: its hidden states `[<batch_dims>, length, d_model]`.
      inputs: int32 `[<batch_dims>, length]`.
      targets: int32 of the same dims.
    """
    # Blocks are no layers of the stack: who looks at its layers' outputs does not mean theirs.
    context = copy.copy(context)
    context.layer_outputs = []
    length, vocab = context.length_dim, model.output_vocab_dim
    counted = mtf.to_int32(model.counted_targets(targets))
    ids = context.sequence_id
    losses = []
    for k, block in enumerate(self.blocks, 1):

      def ahead(t: mtf.Tensor, k: int = k) -> mtf.Tensor:
        return mtf.shift(t, -k, length, wrap=False)

      of_same = ahead(counted)
      if isinstance(ids, mtf.Tensor):
        of_same *= mtf.to_int32(mtf.equal(ids, ahead(ids)))
      with mtf.variable_scope(f"future_token_{k}"):
        # The input behind is the target here: inputs are targets moved to the right.
        x = self._joined(context, x, embedding.ids_to_embedding(ahead(inputs), context))
        x = block.call(context, x)
      logits = model._logits(context, embedding, x, vocab)
      # Where nothing counts, padding: a loss function of one's own goes by that.
      loss = model._compute_loss(
        context, logits, ahead(targets) * of_same, vocab, counted=mtf.greater(of_same, 0)
      )
      mtf.scalar_summary(f"future_token_{k}_loss", mtf.stop_gradient(loss))
      losses.append(loss)
    total: mtf.Tensor = mtf.add_n(losses)
    return total * (self.loss_weight / len(losses))

  def _joined(self, context: Context, x: mtf.Tensor, embedded: mtf.Tensor) -> mtf.Tensor:
    """Input of a block: projected sum of the normalized hidden states and embeddings."""
    dim = x.shape.dims[-1]
    parts: list[mtf.Tensor] = []
    for name, t in (("hidden", x), ("embedding", embedded)):
      t = sublayers.sublayer_rms_norm(t, None, context, name=f"{name}_norm")
      # Two matrices are one of both vectors side by side, and no dimension is put together.
      parts.append(
        mtf.layers.dense(
          t,
          dim,
          reduced_dims=[dim],
          expert_dims=context.model.ensemble_dims,
          use_bias=False,
          variable_dtype=context.variable_dtype,
          kernel_initializer=VarianceScalingInitializer(scale=0.5),
          name=name,
        )
      )
    return parts[0] + parts[1]
