"""A stack of reversible layers, which needs little memory in training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import gin

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer.models import sublayers
from mesh_tensorflow.transformer.models.context import Context, TransformerLayer
from mesh_tensorflow.transformer.models.layer_stack import LayerStack
from mesh_tensorflow.transformer.models.recomputation import recomputed_layer

_LOG = logging.getLogger("mesh_tensorflow")


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
class ReversibleLayerStack(LayerStack):
  """A `LayerStack` of two streams, x1 and x2: a layer f makes (x2, x1 + f(x2)) of them.

  See `mtf.layers.reversible_half_residual_and_swap`. Both streams start as the input, and their
  sum is the result. The residual connection is part of this: `sublayers_per_layer` must do
  without `sublayer_residual`. gin bindings of `LayerStack` hold here too.

  The constructor's arguments are those of `LayerStack`; `recompute_grads` makes training compute
  the activations again in the backward pass, each layer's inputs from its outputs, so that
  none need to be kept.
  """

  def call(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
    """Calls the layers in order; see `LayerStack.call`.

    Appends to `context.layer_outputs` the sum of the streams after each layer but the last.
    Padding is not masked at the end.

    Raises:
      UnsupportedError: with `recompute_grads`, a layer has auxiliary losses.
    """
    if sublayers.sublayer_residual in (self._sublayers_per_layer or []):
      _LOG.warning(
        "ReversibleLayerStack: its layers have a residual connection already; take "
        "sublayer_residual out of ReversibleLayerStack.sublayers_per_layer"
      )
    x = self._call_sublayers("initial", x, context)
    context.layer_outputs.append(x)
    recompute = bool(self.recompute_grads and context.train)
    # Each stream with its value computed backwards, of which there is none in the forward pass.
    streams: tuple[mtf.Tensor, Any, mtf.Tensor, Any] = (x, None, x, None)
    for i, layer in enumerate(self._layers):
      with mtf.variable_scope(layer.name or ""):
        streams = mtf.layers.reversible_half_residual_and_swap(
          *streams, self._function(layer, context, recompute), recompute_grads=recompute
        )
      if i != len(self._layers) - 1:
        context.layer_outputs.append(streams[0] + streams[2])
      context.layer_index += 1
    x = streams[0] + streams[2]
    x = self._call_sublayers("final", x, context)
    context.layer_outputs.append(x)
    return x

  def _function(
    self, layer: TransformerLayer, context: Context, recompute: bool
  ) -> Callable[[mtf.Tensor], mtf.Tensor]:
    """The sublayers of one layer, as a function of x."""

    def fn(x: mtf.Tensor) -> mtf.Tensor:
      if not recompute:
        return self._layer_fn(x, layer, context)
      # The backward pass runs this again: a loss appended then would be one of a finished graph.
      num_losses = len(context.losses or [])
      with recomputed_layer(context, x):
        y = self._layer_fn(x, layer, context)
      if len(context.losses or []) > num_losses:
        raise errors.UnsupportedError(
          f"ReversibleLayerStack: layer {layer.name or ''} ({type(layer).__name__}) has an "
          "auxiliary loss, which has no gradient when layers are reversed; set "
          "ReversibleLayerStack.recompute_grads = False"
        )
      return y

    return fn
