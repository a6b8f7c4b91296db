"""Dropout of a Transformer, and which values share its mask."""

from __future__ import annotations

import gin

import mesh_tensorflow as mtf
from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.transformer.model.context import Context


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
@affects("training")
def dropout_broadcast_dims(context: Context, per_position: bool = False) -> list[mtf.Dimension]:
  """The dimensions along which values share a dropout mask, wherever a model has dropout.

  Args:
    context: a `Context`, whose length_dim is None where there are no positions.
    per_position: whether each position has a mask of its own, and each query one of its attention
      weights, as most libraries have it. By default all positions of a row share one, those of all
      sequences that are packed into it: fewer random numbers, as in Mesh TensorFlow for
      TensorFlow 1.
  """
  return [] if per_position or context.length_dim is None else [context.length_dim]


def dropout(
  x: mtf.Tensor, rate: float, context: Context, shape: mtf.Shape | None = None
) -> mtf.Tensor:
  """Dropout in training: a share of `rate` of x becomes 0, the rest is divided by 1 - rate.

  Args:
    x: `[<batch_dims>, length, ...]`.
    rate: the share.
    context: a `Context`.
    shape: dimensions of x along which masks may differ; by default all.
  """
  if not context.train or rate <= 0:
    return x
  noise_shape = (shape or x.shape) - dropout_broadcast_dims(context)
  return mtf.dropout(x, is_training=True, rate=rate, noise_shape=noise_shape)
