"""Layers that configurations may name, and that this version does not have yet.

The packaged `defaults.gin` binds arguments of these layers, so gin must know them. They take and
keep their arguments; a call raises UnsupportedError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gin

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer.context import Context, TransformerLayer
from mesh_tensorflow.transformer.self_attention import SelfAttention

_MODULE = "mesh_tensorflow.transformer.transformer_layers"

_Heads = Sequence[tuple[str, int]]


def _unavailable(layer: TransformerLayer) -> errors.UnsupportedError:
  return errors.UnsupportedError(
    f"layer {layer.name or ''} ({type(layer).__name__}) is not available in this version; "
    "SelfAttention is"
  )


@gin.configurable(module=_MODULE)
class LocalSelfAttention(SelfAttention):
  """Self-attention to the last `radius` positions (to both sides, if not autoregressive).

  Args:
    radius: how far a position sees.
    num_heads: see `SelfAttention`.
    num_memory_heads: see `SelfAttention`.
    key_value_size: see `SelfAttention`.
    shared_kv: see `SelfAttention`.
    dropout_rate: see `SelfAttention`.
    attention_kwargs: see `SelfAttention`.
  """

  def __init__(
    self,
    radius: int = 128,
    num_heads: int = 8,
    num_memory_heads: int = 0,
    key_value_size: int = 128,
    shared_kv: bool = False,
    dropout_rate: float = 0.0,
    attention_kwargs: dict[str, Any] | None = None,
  ):
    super().__init__(
      num_heads, num_memory_heads, key_value_size, shared_kv, dropout_rate, attention_kwargs
    )
    self.radius = radius

  def call(self, context: Context, x: mtf.Tensor, losses: Any = None) -> mtf.Tensor:
    """Raises UnsupportedError."""
    raise _unavailable(self)


@gin.configurable(module=_MODULE)
class TalkingHeadsSelfAttention(SelfAttention):
  """Self-attention with projections between heads (Shazeer et al., 2020).

  Args:
    key_heads_dims: (name, size) pairs: heads of queries and keys.
    softmax_heads_dims: heads of the softmax.
    value_heads_dims: heads of values.
    key_size: size of a key.
    value_size: size of a value.
    dropout_rate: rate at which attention weights become 0 in training.
    relative_attention_type: see `SelfAttention`.
    relative_attention_num_buckets: see `SelfAttention`.
    dynamic_projections: names of projections computed from the inputs, or None.
    dynamic_projections_init_scale: their initial scale.
  """

  def __init__(
    self,
    key_heads_dims: _Heads = (("heads", 12),),
    softmax_heads_dims: _Heads = (("heads", 12),),
    value_heads_dims: _Heads = (("heads", 12),),
    key_size: int = 64,
    value_size: int = 64,
    dropout_rate: float = 0.0,
    relative_attention_type: str | None = None,
    relative_attention_num_buckets: int = 32,
    dynamic_projections: Sequence[str] | None = None,
    dynamic_projections_init_scale: float = 1e-2,
  ):
    # The arguments of SelfAttention and their bindings do not hold here.
    self.key_heads_dims = [mtf.Dimension(*d) for d in key_heads_dims]
    self.softmax_heads_dims = [mtf.Dimension(*d) for d in softmax_heads_dims]
    self.value_heads_dims = [mtf.Dimension(*d) for d in value_heads_dims]
    self.key_dim = mtf.Dimension("d_k", key_size)
    self.value_dim = mtf.Dimension("d_v", value_size)
    self.dropout_rate = dropout_rate
    self.relative_attention_type = relative_attention_type
    self.relative_attention_num_buckets = relative_attention_num_buckets
    self.dynamic_projections = dynamic_projections or []
    self.dynamic_projections_init_scale = dynamic_projections_init_scale

  def call(self, context: Context, x: mtf.Tensor, losses: Any = None) -> mtf.Tensor:
    """Raises UnsupportedError."""
    raise _unavailable(self)


@gin.configurable(module=_MODULE)
class GeneralBilinearSelfAttention(SelfAttention):
  """Self-attention by a general bilinear form of the vectors of the model's size.

  Args:
    heads_dims: (name, size) pairs.
    dropout_rate: rate at which attention weights become 0 in training.
    relative_attention_type: see `SelfAttention`.
    relative_attention_num_buckets: see `SelfAttention`.
  """

  def __init__(
    self,
    heads_dims: _Heads = (("heads", 12),),
    dropout_rate: float = 0.0,
    relative_attention_type: str | None = None,
    relative_attention_num_buckets: int = 32,
  ):
    # The arguments of SelfAttention and their bindings do not hold here.
    self.heads_dims = [mtf.Dimension(*d) for d in heads_dims]
    self.dropout_rate = dropout_rate
    self.relative_attention_type = relative_attention_type
    self.relative_attention_num_buckets = relative_attention_num_buckets

  def call(self, context: Context, x: mtf.Tensor, losses: Any = None) -> mtf.Tensor:
    """Raises UnsupportedError."""
    raise _unavailable(self)
