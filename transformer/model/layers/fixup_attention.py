"""Attention with Fixup initialization; see `fixup_layers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.layers import unit_scaling_convention
from mesh_tensorflow.transformer.model import attention
from mesh_tensorflow.transformer.model.attention.params import params_of_model
from mesh_tensorflow.transformer.model.context import Context
from mesh_tensorflow.transformer.model.layers.enc_dec_attention import EncDecAttention
from mesh_tensorflow.transformer.model.layers.fixup import fixup_initializer
from mesh_tensorflow.transformer.model.layers.self_attention import SelfAttention

_MODULE = "mesh_tensorflow.transformer.fixup_layers"


class AttentionParamsFixup(attention.AttentionParams):
  """The variables of attention: `q_fixup`, `k_fixup` and `v_fixup` (or `kv_fixup`), `o_fixup`.

  The last one starts as 0.

  Args:
    mesh: see `AttentionParams`; likewise up to shared_kv.
    fold_scaling_into_initializer: must be False.
    num_blocks: number of blocks of the stack; variances are multiplied by num_blocks ** (-1 / 3).
    default_init: "glorot" or "he".
    init_distribution: "uniform", "truncated_normal" or "untruncated_normal".
    **kwargs: further arguments of `AttentionParams`.

  Raises:
    ConfigError: fold_scaling_into_initializer, or the unit-scaling convention, or no num_blocks, or
      an unknown default_init or init_distribution.
  """

  def __init__(
    self,
    mesh: mtf.Mesh,
    query_input_dim: mtf.Dimension,
    memory_input_dim: mtf.Dimension,
    output_dim: mtf.Dimension,
    key_dim: mtf.Dimension,
    value_dim: mtf.Dimension,
    query_heads_dims: Sequence[mtf.Dimension] | None,
    memory_heads_dims: Sequence[mtf.Dimension] | None,
    variable_dtype: mtf.VariableDType | tf.DType,
    shared_kv: bool = False,
    fold_scaling_into_initializer: bool = False,
    num_blocks: int | None = None,
    default_init: str = "he",
    init_distribution: str = "uniform",
    **kwargs: Any,
  ):
    if fold_scaling_into_initializer:
      raise errors.ConfigError(
        "Fixup attention scales queries when it runs: set fold_scaling_into_initializer = False"
      )
    if not num_blocks:
      raise errors.ConfigError(f"Fixup attention needs num_blocks, at least 1; got {num_blocks}")
    self.num_blocks = num_blocks
    self.default_init = default_init
    self.init_distribution = init_distribution
    super().__init__(
      mesh,
      query_input_dim,
      memory_input_dim,
      output_dim,
      key_dim,
      value_dim,
      query_heads_dims,
      memory_heads_dims,
      variable_dtype,
      shared_kv=shared_kv,
      fold_scaling_into_initializer=False,
      **kwargs,
    )

  def init_weights(self) -> None:
    """Creates the variables."""
    if unit_scaling_convention():
      raise errors.ConfigError("Fixup attention does not go with unit_scaling_convention")
    # The paper's L ** (-1 / (2 m - 2)) for a branch of m = 4 matrices, squared: a variance.
    initializer = fixup_initializer(
      "Fixup attention", self.default_init, self.init_distribution, self.num_blocks ** (-1 / 3)
    )
    self._make_variables(initializer, initializer, tf.zeros_initializer(), suffix="_fixup")


@gin.configurable(module=_MODULE)
@affects(training="default_init init_distribution")
class SelfAttentionFixup(SelfAttention):
  """`SelfAttention` with the variables of `AttentionParamsFixup`.

  Args:
    num_blocks: see `AttentionParamsFixup`.
    default_init: see `AttentionParamsFixup`.
    init_distribution: see `AttentionParamsFixup`.
    **kwargs: arguments of `SelfAttention`; fold_scaling_into_initializer is False.
  """

  def __init__(
    self,
    num_blocks: int = gin.REQUIRED,
    default_init: str = "glorot",
    init_distribution: str = "uniform",
    **kwargs: Any,
  ):
    self.num_blocks = num_blocks
    self.default_init = default_init
    self.init_distribution = init_distribution
    # Given here, so that a binding for all kinds of self-attention does not hold for this one.
    kwargs.setdefault("fold_scaling_into_initializer", False)
    super().__init__(**kwargs)

  def make_params(self, context: Context) -> AttentionParamsFixup:
    """Creates the variables, or finds them."""
    return AttentionParamsFixup(
      **params_of_model(context, self.kv_dim, self.num_heads, self.num_memory_heads),
      shared_kv=self.shared_kv,
      fold_scaling_into_initializer=self.fold_scaling_into_initializer,
      num_blocks=self.num_blocks,
      default_init=self.default_init,
      init_distribution=self.init_distribution,
      combine_dims=self.combine_dims,
      keep_query_heads_dims=self.keep_query_heads_dims,
    )


@gin.configurable(module=_MODULE)
class EncDecAttentionFixup(EncDecAttention):
  """`EncDecAttention` under another name: its variables and their initial values are the same.

  Args:
    relative_attention_type: see `EncDecAttention`.
    **kwargs: arguments of `SelfAttention`.
  """

  def __init__(self, relative_attention_type: str | None = None, **kwargs: Any):
    super().__init__(relative_attention_type=relative_attention_type, **kwargs)
