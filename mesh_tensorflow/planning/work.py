"""Work of one processor in an operation: products, bytes moved, kernel launches."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import tensorflow as tf

from mesh_tensorflow.planning.flops import convolution_channels, node_flops

# Nodes that start nothing: they name, describe or hand on what is there.
_FREE = frozenset(
  "Placeholder Const Identity IdentityN Reshape Squeeze ExpandDims StopGradient EnsureShape NoOp"
  " VarHandleOp ReadVariableOp Shape ShapeN Size Rank PreventGradient StatelessWhile While If"
  " StatelessIf StatefulPartitionedCall PartitionedCall BroadcastGradientArgs".split()
)
# Nodes that read only as much of their first input as they write.
_PARTIAL = frozenset(
  "GatherV2 GatherNd ResourceGather Slice StridedSlice Split SplitV DynamicStitch".split()
)


class Product(NamedTuple):
  """A matrix product or convolution.

  Attributes:
    flops: two for each multiply-add.
    dtype: name of the dtype of its result.
    bytes: of its operands and its result.
    channels: of a convolution, see `flops.convolution_channels`; 0 of other products.
  """

  flops: int
  dtype: str
  bytes: int
  channels: float = 0.0


@dataclasses.dataclass
class Work:
  """Work of one processor: products, memory traffic and kernel launches.

  Attributes:
    products: its matrix products and convolutions.
    traffic: bytes that everything else reads and writes, each node on its own.
    launches: nodes that are not products.
  """

  products: list[Product] = dataclasses.field(default_factory=list)
  traffic: int = 0
  launches: int = 0

  @property
  def flops(self) -> int:
    """FLOPs of its products."""
    return sum(p.flops for p in self.products)

  def add_node(self, node: tf.Operation) -> None:
    """Adds a TensorFlow node, as far as its shapes are static.

    Args:
      node: an operation of a TensorFlow graph.
    """
    if node.type in _FREE:
      return
    written = sum(_bytes(x) for x in node.outputs)
    read = written if node.type in _PARTIAL else sum(_bytes(x) for x in node.inputs)
    flops = node_flops(node)
    if flops:
      dtype = node.outputs[0].dtype.name
      self.products.append(Product(flops, dtype, read + written, convolution_channels(node)))
    else:
      self.traffic += read + written
      self.launches += 1


def _bytes(x: tf.Tensor) -> int:
  if not x.shape.is_fully_defined() or x.dtype in (tf.resource, tf.variant, tf.string):
    return 0
  return int(x.shape.num_elements()) * int(x.dtype.size)
