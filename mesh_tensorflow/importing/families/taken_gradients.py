"""Gradients that the function takes itself, by a tape: of biases, pooling, batch norm.

Those of convolutions are in `convolutions`; most others are made of operations that have rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.importing.families.inputs import layout_of
from mesh_tensorflow.importing.nodes import Node
from mesh_tensorflow.importing.rules import (
  Construction,
  Dims,
  Label,
  Labelled,
  Labels,
  Slicewise,
  call_raw,
  rule,
)
from mesh_tensorflow.operations.binary import multiply, sub
from mesh_tensorflow.operations.elementwise import cast, rsqrt, square
from mesh_tensorflow.operations.reduction import reduce_mean, reduce_sum
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.program.graph import Tensor


@rule("BiasAddGrad")
class BiasAddGrad(Labelled):
  """The sum over all axes but that of the channels."""

  def labels(self, node: Node) -> Labels:
    rank = node.inputs[0].rank
    is_second = node.attributes.get("data_format") in (b"NCHW", "NCHW")
    return Labels([tuple(range(rank))], [(1 if is_second else rank - 1,)])

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    ((channel,),) = self.labels(node).outputs
    return [reduce_sum(xs[0], output_shape=Shape(dims[channel]))]


@rule("MaxPoolGrad", "MaxPool3DGrad")
class MaxPoolGrad(Slicewise):
  """The gradient of a maximum: of the image, the features and their gradient."""

  def labels(self, node: Node) -> Labels:
    layout = layout_of(node)
    space: list[Label] = [f"space{i}" for i in range(layout.rank)]
    made: list[Label] = [f"new_space{i}" for i in range(layout.rank)]
    features = layout.ordered("batch", made, "channels")
    image = layout.ordered("batch", space, "channels")
    return Labels([image, features, features], [image], [*space, *made])


@rule("AvgPoolGrad", "AvgPool3DGrad")
class AvgPoolGrad(Slicewise):
  """The gradient of a mean: of the shape of the image, which is static, and of the features'."""

  def labels(self, node: Node) -> Labels:
    layout = layout_of(node)
    space: list[Label] = [f"space{i}" for i in range(layout.rank)]
    made: list[Label] = [f"new_space{i}" for i in range(layout.rank)]
    return Labels(
      [None, layout.ordered("batch", made, "channels")],
      [layout.ordered("batch", space, "channels")],
      [*space, *made],
    )

  def run(self, node: Node) -> Callable[..., Any]:
    layout, whole = layout_of(node), node.outputs[0].shape

    def of_slice(dy: tf.Tensor) -> Any:
      # A slice has fewer examples and channels, and all of the space.
      split = (0, layout.channel_axis)
      sizes = [dy.shape[i] if i in split else n for i, n in enumerate(whole)]
      return call_raw(node, [tf.constant(sizes, tf.int32), dy])

    return of_slice


@rule("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3")
class FusedBatchNormGrad(Labelled):
  """Gradients of image, scale and offset: of statistics of the whole batch, or of given ones."""

  def labels(self, node: Node) -> Labels:
    layout = layout_of(node)
    image = layout.ordered("batch", [f"space{i}" for i in range(layout.rank)], "channels")
    per_channel = ("channels",)
    others: list[Any] = [None] * (len(node.inputs) - 5)  # What only GPUs keep.
    # Other outputs have no meaning.
    return Labels([image, image, *[per_channel] * 3, *others], [image, per_channel, per_channel])

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    dy, x, scale, mean, variance = xs[:5]
    each, all_of = Shape(dims["channels"]), x.shape
    image = cast(x, scale.dtype)
    if node.attributes["is_training"]:
      # What the forward pass kept is cut off from x, and this may be differentiated again.
      mean = reduce_mean(image, output_shape=each)
      variance = reduce_mean(square(sub(image, mean, output_shape=all_of)), output_shape=each)
    inverse = rsqrt(variance + float(node.attributes["epsilon"]))
    centered = sub(image, mean, output_shape=all_of)
    normed = multiply(centered, inverse, output_shape=all_of)
    wide = cast(dy, scale.dtype)
    product = multiply(wide, normed, output_shape=all_of)
    rest = wide
    if node.attributes["is_training"]:
      rest = sub(rest, reduce_mean(wide, output_shape=each), output_shape=all_of)
      along = multiply(normed, reduce_mean(product, output_shape=each), output_shape=all_of)
      rest = sub(rest, along, output_shape=all_of)
    dx = multiply(rest, multiply(scale, inverse, output_shape=each), output_shape=all_of)
    sums = [reduce_sum(t, output_shape=each) for t in (product, wide)]
    return [cast(dx, x.dtype), *sums]
