"""Layers side by side."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import gin

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer.model.context import Context, TransformerLayer
from mesh_tensorflow.transformer.model.layers.dense_relu_dense import DenseReluDense
from mesh_tensorflow.transformer.model.layers.self_attention import SelfAttention


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class ParallelLayer(TransformerLayer):
  """Several layers of one input; the sum of their outputs, times n ** -0.5.

  Args:
    layer_classes: the classes of the layers.
    use_scope: whether layer i has its variables in the scope `parallel_layer_<i>`; else variables
      of one name are shared.
  """

  def __init__(
    self,
    layer_classes: Sequence[Callable[[], TransformerLayer]] = (DenseReluDense, SelfAttention),
    use_scope: bool = True,
  ):
    self.layer_classes = list(layer_classes)
    self.use_scope = use_scope
    self.layers = [cls() for cls in self.layer_classes]

  def call(
    self, context: Context, x: mtf.Tensor, losses: list[mtf.Tensor] | None = None
  ) -> mtf.Tensor:
    """Applies the layers; see `TransformerLayer.call`."""
    del losses
    outputs = []
    for i, layer in enumerate(self.layers):
      scope = mtf.variable_scope(f"parallel_layer_{i}")
      with scope if self.use_scope else contextlib.nullcontext():
        outputs.append(layer.call(context, x))
    # Outputs that do not depend on each other add up in variance: this keeps that of one.
    scale: float = len(outputs) ** -0.5
    total: mtf.Tensor = mtf.add_n(outputs)
    return total * scale
