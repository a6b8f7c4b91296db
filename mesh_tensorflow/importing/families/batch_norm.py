"""FusedBatchNorm: of means and variances over the whole mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.importing.families.inputs import layout_of
from mesh_tensorflow.importing.nodes import Node
from mesh_tensorflow.importing.rules import Construction, Dims, Label, Labelled, Labels, rule
from mesh_tensorflow.operations.binary import add, multiply, sub
from mesh_tensorflow.operations.control import stop_gradient
from mesh_tensorflow.operations.elementwise import cast, rsqrt, square
from mesh_tensorflow.operations.reduction import reduce_mean
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.program.graph import Tensor


@rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
class FusedBatchNorm(Labelled):
  """(x - mean) / sqrt(variance + epsilon) * scale + offset for each channel.

  Written with operations of the language, so statistics are of the whole batch whatever splits
  it, and gradients flow through those of the batch. Through given ones none flows, as in
  TensorFlow: they are running averages.
  """

  def labels(self, node: Node) -> Labels:
    layout = layout_of(node)
    space = [f"space{i}" for i in range(layout.rank)]
    image = layout.ordered("batch", space, "channels")
    one = ("channels",)
    # Batch and new running statistics, what TensorFlow keeps for the gradient; the last of V3 has
    # no meaning but on GPUs.
    given: list[Any] = [image, one, one]
    # While training, and without an average of old and new, the old statistics are empty.
    given += [one if w.shape != (0,) else None for w in node.inputs[3:]]
    made = [image, one, one, one, one]
    return Labels(given, [*made, *([()] * (len(node.outputs) - 5))])

  def compute(
    self, node: Node, xs: Sequence[Tensor], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    x, scale, offset, old_mean, old_variance = xs
    per_channel = Shape(dims["channels"])
    # The statistics are float32, also of shorter floats.
    wide = cast(x, scale.dtype)
    epsilon = float(node.attributes["epsilon"])
    if node.attributes["is_training"]:
      mean = reduce_mean(wide, output_shape=per_channel)
      centered = sub(wide, mean, output_shape=wide.shape)
      variance = reduce_mean(square(centered), output_shape=per_channel)
      count = max(x.size // per_channel.size, 1)
      new_mean, new_variance = mean, variance * (count / max(count - 1, 1))
      share = float(node.attributes.get("exponential_avg_factor", 1.0))
      if share != 1.0:
        new_mean = old_mean * (1.0 - share) + new_mean * share
        new_variance = old_variance * (1.0 - share) + new_variance * share
    else:
      mean, variance = new_mean, new_variance = stop_gradient(old_mean), stop_gradient(old_variance)
      centered = sub(wide, mean, output_shape=wide.shape)
    factor = multiply(rsqrt(variance + epsilon), scale, output_shape=per_channel)
    y = multiply(centered, factor, output_shape=wide.shape)
    y = cast(add(y, offset, output_shape=wide.shape), x.dtype)
    rest = [
      make.value(w).tensor if w.static is not None else _zeros_like(mean, w.dtype)
      for w in node.outputs[5:]
    ]
    # TensorFlow lets no gradient through them either: they are for running averages.
    statistics = [stop_gradient(t) for t in (new_mean, new_variance, mean, variance)]
    return [y, *statistics, *rest]


def _zeros_like(x: Tensor, dtype: tf.DType) -> Tensor:
  """A zero."""
  return cast(reduce_mean(x, output_shape=Shape([])) * 0.0, dtype)
