"""Losses and the weights of their positions."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from mesh_tensorflow.arguments.kinds import DTypeLike
from mesh_tensorflow.errors import DTypeError, ShapeError
from mesh_tensorflow.operations.cross_entropy import SoftmaxCrossEntropyOperation
from mesh_tensorflow.operations.einsum import einsum
from mesh_tensorflow.operations.elementwise import cast, square
from mesh_tensorflow.operations.slicewise import cwise
from mesh_tensorflow.operations.softmax import reduce_logsumexp
from mesh_tensorflow.program.argument_kinds import FloatTensor, NumberTensor
from mesh_tensorflow.program.dimensions import (
  DimensionLike,
  convert_to_dimension,
  no_such_dimension,
)
from mesh_tensorflow.program.graph import Tensor

__all__ = [
  "sigmoid_cross_entropy_with_logits",
  "softmax_cross_entropy_with_logits",
  "weights_nonzero",
]


def softmax_cross_entropy_with_logits(
  logits: Tensor,
  targets: Tensor,
  vocab_dim: DimensionLike,
  z_loss: float | Tensor | None = 0.0,
  *,
  on_value: float = 1.0,
  off_value: float = 0.0,
  num_classes: int | None = None,
  loss_dtype: DTypeLike = None,
) -> Tensor:
  """-sum(targets * log_softmax(logits)) + z_loss * logsumexp(logits) ** 2.

  Args:
    logits: a floating `Tensor`.
    targets: integer ids, of the dimensions of `logits` but `vocab_dim` (an id out of range
      costs nothing but the z-loss); or probabilities, of the dimensions of `logits`, taken
      to sum to 1.
    vocab_dim: dimension of the classes.
    z_loss: keeps the log normalizer near 0.
    on_value: for integer targets: weight of the target. Label smoothing by e is
      on_value = 1 - e + e / V, off_value = e / V, with V the size of `vocab_dim`.
    off_value: for integer targets: weight of every other class.
    num_classes: for integer targets: how many ids are classes, if those after them only pad
      `vocab_dim`, to be split over a mesh; they have no off_value. None: all.
    loss_dtype: dtype of the result; None: that of the logits, in an `mtf.function` with a
      `precision` float32. It is computed in float32 at least, of integer targets.

  Returns:
    A `Tensor` of the dimensions of `logits` but `vocab_dim`, in nats.

  Raises:
    DimensionError: `vocab_dim` is not in `logits`.
    ShapeError: the dimensions of `targets` do not fit.
    DTypeError: on_value, off_value or num_classes is given with probabilities.
  """
  vocab_dim = convert_to_dimension(vocab_dim)
  what = "softmax_cross_entropy_with_logits"
  if loss_dtype is None and logits.dtype == logits.graph.compute_dtype:
    loss_dtype = tf.float32
  if targets.dtype.is_integer:
    factor: Any = z_loss  # The fused operation takes a number, and tells what else it got.
    return SoftmaxCrossEntropyOperation(
      logits,
      targets,
      vocab_dim,
      factor,
      on_value=on_value,
      off_value=off_value,
      num_classes=num_classes,
      loss_dtype=None if loss_dtype is None else tf.as_dtype(loss_dtype),
    ).outputs[0]
  if vocab_dim not in logits.shape:
    raise no_such_dimension(f"{what}: vocab_dim", vocab_dim, logits)
  if set(targets.shape) != set(logits.shape):
    raise ShapeError(
      f"{what}: probabilities must have the dimensions of the logits {logits}, got {targets}; "
      "class numbers must be integers"
    )
  if (on_value, off_value, num_classes) != (1.0, 0.0, None):
    raise DTypeError(
      f"{what}: on_value, off_value and num_classes are for integer targets, got {targets}"
    )
  log_z = reduce_logsumexp(logits, vocab_dim)
  # log_softmax, with log_z at hand for the z-loss.
  loss = -einsum([targets, logits - log_z], output_shape=log_z.shape)
  if z_loss:
    loss += square(log_z) * z_loss
  return loss if loss_dtype is None else cast(loss, loss_dtype)


def sigmoid_cross_entropy_with_logits(logits: FloatTensor, targets: FloatTensor) -> Tensor:
  """Elementwise -z * log(sigmoid(x)) - (1 - z) * log(1 - sigmoid(x)).

  Computed as relu(x) - x * z + log(1 + exp(-|x|)).

  Args:
    logits: x.
    targets: z, probabilities, of the same shape and dtype.

  Returns:
    A `Tensor` of the same shape.

  Raises:
    ShapeError: the shapes differ.
  """
  if logits.shape != targets.shape:
    raise ShapeError(
      "sigmoid_cross_entropy_with_logits: logits and targets must have one shape, got "
      f"{logits} and {targets}"
    )
  if logits.dtype != targets.dtype:
    raise DTypeError(
      "sigmoid_cross_entropy_with_logits: logits and targets must have one dtype, got "
      f"{logits} and {targets}; cast one of them (mtf.cast)"
    )
  return cwise(
    lambda x, z: tf.nn.sigmoid_cross_entropy_with_logits(labels=z, logits=x),
    [logits, targets],
    # With respect to x and z. A tape would run the stable form again, and go back piece by piece.
    grad_function=lambda op, dy: [
      cwise(lambda g, x, z: g * (tf.sigmoid(x) - z), [dy, *op.inputs]),
      cwise(lambda g, x: -g * x, [dy, op.inputs[0]]),
    ],
    name="sigmoid_cross_entropy",
  )


def weights_nonzero(targets: NumberTensor, dtype: DTypeLike = tf.float32) -> Tensor:
  """1 where targets are not 0 (negative ones included), else 0.

  Args:
    targets: a `Tensor` of numbers.
    dtype: dtype of the result.
  """
  dtype = tf.as_dtype(dtype)
  return cwise(
    lambda t: tf.cast(tf.not_equal(t, 0), dtype),
    [targets],
    output_dtype=dtype,
    grad_function=0,
    name="weights_nonzero",
  )
