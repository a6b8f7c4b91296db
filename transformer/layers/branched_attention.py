"""Attention whose heads go through the feed-forward layer one by one (Ahmed et al., 2017)."""

from __future__ import annotations

from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer.layers.dense_relu_dense import DenseReluDense
from mesh_tensorflow.transformer.layers.enc_dec_attention import AttendsToEncoder
from mesh_tensorflow.transformer.layers.self_attention import SelfAttention
from mesh_tensorflow.transformer.models.context import Context

_MODULE = "mesh_tensorflow.transformer.transformer_layers"


@gin.configurable(module=_MODULE)
class BranchedSelfAttention(SelfAttention):
  """Self-attention with a branch for each head: sum of alpha * feed_forward(kappa * head).

  Variables besides those of attention and feed-forward layer: `kappa` [heads], `alpha` [heads].

  Args:
    **kwargs: arguments of `SelfAttention`; combine_dims is False and keep_query_heads_dims True.

  Raises:
    ConfigError: num_memory_heads is given.
  """

  def __init__(self, **kwargs: Any):
    # The heads stay apart through the output projection: they are the branches.
    super().__init__(**(kwargs | dict(combine_dims=False, keep_query_heads_dims=True)))
    if self.num_memory_heads != 0:
      raise errors.ConfigError(
        f"{type(self).__name__}: num_memory_heads must be 0, got {self.num_memory_heads}; each "
        "branch has its own keys and values"
      )
    self.dense_layer = DenseReluDense()

  def layer_output_from_attention_output(
    self, context: Context, attention_output: mtf.Tensor, losses: Any
  ) -> mtf.Tensor:
    """The sum of the branches.

    Args:
      context: a `Context`.
      attention_output: `[..., heads, d_model]`.
      losses: see `TransformerLayer.call`.

    Returns:
      `[..., d_model]`.
    """
    # One head has no dimension in the variables of attention.
    heads = mtf.Dimension("heads", self.num_heads)
    kappa, alpha = (
      mtf.get_variable(
        context.mesh,
        name,
        mtf.Shape([heads]),
        dtype=context.variable_dtype,
        initializer=tf.random_uniform_initializer(minval=0.0, maxval=1.0),
      )
      for name in ("kappa", "alpha")
    )
    o = mtf.einsum([attention_output, kappa], output_shape=attention_output.shape)
    o = self.dense_layer.call(context, o, losses)
    return mtf.einsum([o, alpha], output_shape=o.shape - heads)


@gin.configurable(module=_MODULE)
class BranchedEncDecAttention(AttendsToEncoder, BranchedSelfAttention):
  """Attention of a decoder to an encoder's output, with a branch for each head.

  Args:
    relative_attention_type: None, "bias" or "bias_shared"; see `enc_dec_attention_bias`.
    **kwargs: arguments of `BranchedSelfAttention`.
  """
