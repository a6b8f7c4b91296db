"""Sums, means, extremes, products, and logical reductions over axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.importing.families.shapes import static_values
from mesh_tensorflow.importing.nodes import Node
from mesh_tensorflow.importing.rules import (
  Construction,
  Dims,
  Label,
  Labelled,
  Labels,
  Slicewise,
  rule,
)
from mesh_tensorflow.importing.value import flat
from mesh_tensorflow.operations.binary import divide, multiply
from mesh_tensorflow.operations.comparison import equal
from mesh_tensorflow.operations.elementwise import cast, sqrt, square
from mesh_tensorflow.operations.reduction import (
  ReduceOperation,
  reduce_all,
  reduce_any,
  reduce_mean,
  reduce_sum,
)
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.program.graph import Tensor


def _labels(node: Node) -> Labels:
  rank = node.inputs[0].rank
  reduced = {int(i) % rank for i in static_values(node, 1)} if rank else set()
  kept = [i for i in range(rank) if i not in reduced]
  if node.attributes["keep_dims"]:
    return Labels([range(rank), None], [[("one", i) if i in reduced else i for i in range(rank)]])
  return Labels([range(rank), None], [kept])


class _EvenlyShared(ReduceOperation):
  """Maximum or minimum whose gradient is divided among equal elements, as in TensorFlow."""

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    (x,), y, dy = self.inputs, self.outputs[0], grad_ys[0]
    chosen = cast(equal(x, y, output_shape=x.shape), x.dtype)
    share = divide(dy, reduce_sum(chosen, output_shape=y.shape), output_shape=y.shape)
    return [multiply(chosen, share, output_shape=x.shape)]


@rule("Sum", "Mean", "Max", "Min", "All", "Any", "EuclideanNorm")
class Reduction(Labelled):
  """A reduction that takes the parts of an axis one after the other."""

  def labels(self, node: Node) -> Labels:
    return _labels(node)

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    x = xs[0]
    kept = set(flat(dims[label] for label in self.labels(node).outputs[0]))
    shape = Shape([d for d in x.shape if d in kept])
    if node.type in ("Max", "Min"):
      if shape == x.shape:
        return [x]
      return [_EvenlyShared(x, shape, node.type.upper(), name=node.type).outputs[0]]
    if node.type == "EuclideanNorm":
      return [sqrt(reduce_sum(square(x), output_shape=shape))]
    if node.type == "Mean" and not x.dtype.is_floating:
      # TensorFlow rounds the quotient of integers towards zero.
      total = reduce_sum(x, output_shape=shape)
      count = x.shape.size // shape.size
      return [cast(cast(total, tf.float64) / float(count), x.dtype)]
    reduce = {"Sum": reduce_sum, "Mean": reduce_mean, "All": reduce_all, "Any": reduce_any}
    return [reduce[node.type](x, output_shape=shape)]


@rule("Prod")
class Product(Slicewise):
  """Product; the reduced axes must not be split."""

  def labels(self, node: Node) -> Labels:
    labels = _labels(node)
    assert labels.inputs[0] is not None
    return Labels(
      labels.inputs,
      labels.outputs,
      [label for label in labels.inputs[0] if label not in labels.outputs[0]],
    )
