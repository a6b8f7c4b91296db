"""Funnel-Transformer: an encoder whose sequences get shorter (Dai et al., 2020; 2006.03236)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import COUNT, NOT_BELOW_ZERO, affects, takes
from mesh_tensorflow.transformer.model import sublayers
from mesh_tensorflow.transformer.model.bitransformer import Bitransformer
from mesh_tensorflow.transformer.model.context import Context, TransformerLayer
from mesh_tensorflow.transformer.model.layer_stack import Sublayer, SublayerStack
from mesh_tensorflow.transformer.model.sequence_utils import first_positions

_MODULE = "mesh_tensorflow.transformer.funnel_transformer"

_FLOAT32 = mtf.VariableDType(tf.float32)

_POOLING = {"mean": mtf.reduce_mean, "max": mtf.reduce_max, "min": mtf.reduce_min}


@gin.configurable(module=_MODULE)
class FunnelTransformerLayerStack(SublayerStack):
  """A stack of blocks; at the start of each but the first, neighbouring positions are pooled.

  For encoders: later positions must be visible. A layer consists of `n_submodules` members of
  `layers` (attention and feed-forward, say). Positions are pooled after the first of them, so that
  its queries, keys and values are those of the block before. Submodule s of layer p of block b has
  the variable scope `funnel_block_{b:03d}/param_idx_{p:03d}/submodule_{s:03d}`.

  Bind it as `make_layer_stack.layer_stack_cls`. The bindings of `LayerStack` do not hold here.

  Args:
    layers: a list of `TransformerLayer`s, of length sum(block_param_size) * n_submodules.
    n_blocks: number of blocks.
    block_param_size: for each block, the number of layers with weights of their own.
    block_repeat_size: for each block, how many times each layer is applied.
    pooling_size: how many positions become one.
    sublayers_initial: see `LayerStack`.
    sublayers_per_layer: see `LayerStack`.
    sublayers_final: see `LayerStack`.
    pooling_type: "mean", "max" or "min".
    n_submodules: number of submodules of a layer.

  Raises:
    ConfigError: the numbers do not fit together, or an unknown pooling_type.
  """

  def __init__(
    self,
    layers: Sequence[TransformerLayer],
    n_blocks: int = gin.REQUIRED,
    block_param_size: Sequence[int] = gin.REQUIRED,
    block_repeat_size: Sequence[int] = gin.REQUIRED,
    pooling_size: int = 2,
    sublayers_initial: Sequence[Sublayer] | None = None,
    sublayers_per_layer: Sequence[Sublayer] | None = None,
    sublayers_final: Sequence[Sublayer] | None = None,
    pooling_type: str = "mean",
    n_submodules: int = 2,
  ):
    what = "FunnelTransformerLayerStack"
    for name, sizes in (
      ("block_param_size", block_param_size),
      ("block_repeat_size", block_repeat_size),
    ):
      if len(sizes) != n_blocks:
        raise errors.ConfigError(
          f"{what}.{name} must have a number for each of n_blocks={n_blocks} blocks, got "
          f"{list(sizes)}"
        )
    expected = sum(block_param_size) * n_submodules
    if len(layers) != expected:
      raise errors.ConfigError(
        f"{what}: there are {len(layers)} layers, but block_param_size={list(block_param_size)} "
        f"and n_submodules={n_submodules} make {expected}"
      )
    if pooling_type not in _POOLING:
      raise errors.ConfigError(
        f'{what}.pooling_type must be "mean", "max" or "min", got {pooling_type!r}'
      )
    super().__init__(layers, sublayers_initial, sublayers_per_layer, sublayers_final)
    self.n_blocks = n_blocks
    self.block_param_size = block_param_size
    self.block_repeat_size = block_repeat_size
    self.pooling_size = pooling_size
    self.pooling_type = pooling_type
    self.n_submodules = n_submodules
    self._context: Context | None = None

  @property
  def context(self) -> Context | None:
    """The context of the last call: its length, positions and sequence ids are the pooled ones."""
    return self._context

  def set_context(self, context: Context) -> None:
    """Sets `context`."""
    self._context = context

  def update_context(self, context: Context, x: mtf.Tensor, pool_dim_name: str) -> Context:
    """Adapts a context to a pooled x.

    Args:
      context: a `Context`; it is changed.
      x: the pooled tensor.
      pool_dim_name: name of the pooled dimension.

    Returns:
      The context. Positions are the first ones, as many as are left; sequence ids and token ids
      are those of the first position of each pool.
    """
    old = context.length_dim
    new = x.shape.get_dim_by_name(pool_dim_name)

    def strided(ids: int | mtf.Tensor | None) -> Any:
      if not isinstance(ids, mtf.Tensor) or old not in ids.shape:
        return ids
      # A pooled position takes the id of the first that it is made of.
      return mtf.stride_tensor_1d(ids, old, old.size // new.size)

    context.sequence_id = strided(context.sequence_id)
    context.subsequence_id = strided(context.subsequence_id)
    context.inputs = strided(context.inputs)
    if context.position is not None:
      if context.position_is_default:
        # Relative positions in a pooled block count pooled positions.
        context.position = mtf.range(context.mesh, new, dtype=tf.int32)
      elif old in context.position.shape:
        context.position = first_positions(context.position, old.name, new.size)
    context.length_dim = new
    # Masks and biases are of the old length.
    context.cache.clear()
    return context

  def call(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
    """Calls the layers in order; see `LayerStack.call`.

    Returns:
      `[<batch_dims>, length, d_model]`, the length divided by pooling_size ** (n_blocks - 1).

    Raises:
      UnsupportedError: a call of a decoder, or with layers before this stack.
      ShapeError: the sublayers of a layer change the dimensions of x, or pooling_size does not
        divide the length.
    """
    if context.write_priority is not None or context.mode in ("first_part", "incremental"):
      raise errors.UnsupportedError(
        "FunnelTransformerLayerStack pools positions, so it cannot be in an autoregressive model; "
        "bind it for the encoder alone (encoder/make_layer_stack.layer_stack_cls)"
      )
    if context.layer_index != 0:
      raise errors.UnsupportedError(
        f"FunnelTransformerLayerStack must be the first stack of its context, but "
        f"{context.layer_index} layers were called before"
      )
    x = self._call_sublayers("initial", x, context)
    context.layer_outputs.append(x)
    schedule = list(self._schedule())
    for i, (block, param, repeat, submodule, layer) in enumerate(schedule):
      layer.set_name(f"funnel_block_{block:03d}/param_idx_{param:03d}/submodule_{submodule:03d}")
      with mtf.variable_scope(layer.name):
        x = self._layer_fn(x, layer, context)
      if block > 0 and param == repeat == submodule == 0:
        name = context.length_dim.name
        x = mtf.pool_tensor_1d(
          x, context.length_dim, _POOLING[self.pooling_type], self.pooling_size
        )
        context = self.update_context(context, x, name)
      if i != len(schedule) - 1:
        context.layer_outputs.append(x)
      context.layer_index += 1
    x = self._call_sublayers("final", x, context)
    x = sublayers.sublayer_mask_padding(x, self, context)
    context.layer_outputs.append(x)
    self.set_context(context)
    return x

  def _schedule(self) -> Any:
    """Yields (block, param, repeat, submodule, layer) in the order of calls."""
    first = 0
    for block in range(self.n_blocks):
      for param in range(self.block_param_size[block]):
        for repeat in range(self.block_repeat_size[block]):
          for submodule in range(self.n_submodules):
            yield block, param, repeat, submodule, self._layers[first + submodule]
        first += self.n_submodules


@gin.configurable(module=_MODULE)
class BitransformerFunnel(Bitransformer):
  """A `Bitransformer` whose encoder has a `FunnelTransformerLayerStack`.

  The decoder attends to the pooled positions. Its attention can have no relative position bias to
  the encoder: there are more input ids than positions.

  Args:
    encoder: see `Bitransformer`.
    decoder: see `Bitransformer`.
    shared_embedding: see `Bitransformer`.
  """

  def _encode(
    self, inputs: mtf.Tensor, sequence_id: mtf.Tensor, compute_loss: bool, **arguments: Any
  ) -> tuple[dict[str, Any], Any]:
    """See `Bitransformer`; the sequence ids are those of the pooled positions."""
    encoded, loss = super()._encode(inputs, sequence_id, compute_loss, **arguments)
    # A `FunnelTransformerLayerStack`, which keeps the context that it pooled.
    stack: Any = self.encoder.layer_stack
    pooled: mtf.Tensor = stack.context.sequence_id
    encoded["encoder_sequence_id"] = mtf.rename_dimension(
      pooled, inputs.shape[-1].name, "memory_length"
    )
    return encoded, loss

  @gin.configurable(module="BitransformerFunnel")
  @affects("report")
  @takes(beam_size=COUNT, alpha=NOT_BELOW_ZERO, temperature=NOT_BELOW_ZERO)
  def decode(
    self,
    inputs: mtf.Tensor,
    variable_dtype: mtf.VariableDType | tf.DType = _FLOAT32,
    beam_size: int = 1,
    alpha: float = 0.6,
    temperature: float = 0.0,
    sampling_keep_top_k: int = -1,
    decode_length_multiplier: float = 1.5,
    decode_length_constant: float = 10,
    max_decode_length: int | None = None,
  ) -> mtf.Tensor:
    """See `Bitransformer.decode`, whose gin bindings do not hold here."""
    return super().decode(
      inputs,
      variable_dtype=variable_dtype,
      beam_size=beam_size,
      alpha=alpha,
      temperature=temperature,
      sampling_keep_top_k=sampling_keep_top_k,
      decode_length_multiplier=decode_length_multiplier,
      decode_length_constant=decode_length_constant,
      max_decode_length=max_decode_length,
    )
