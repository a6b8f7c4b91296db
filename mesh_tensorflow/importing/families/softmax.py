"""Softmax, and the cross entropies that TensorFlow has as one operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mesh_tensorflow.importing.families.custom_gradients import CustomGradientOperation
from mesh_tensorflow.importing.nodes import Node
from mesh_tensorflow.importing.rules import Construction, Dims, Label, Labelled, Labels, rule
from mesh_tensorflow.operations.binary import multiply, sub
from mesh_tensorflow.operations.constants import zeros_like
from mesh_tensorflow.operations.control import stop_gradient
from mesh_tensorflow.operations.cross_entropy import SoftmaxCrossEntropyOperation
from mesh_tensorflow.operations.einsum import einsum
from mesh_tensorflow.operations.elementwise import negative
from mesh_tensorflow.operations.one_hot import one_hot
from mesh_tensorflow.operations.reduction import reduce_sum
from mesh_tensorflow.operations.reshape import replace_dimensions, reshape
from mesh_tensorflow.operations.softmax import log_softmax, softmax
from mesh_tensorflow.program.dimensions import Dimension, Shape, list_product
from mesh_tensorflow.program.graph import Tensor


def _last(node: Node, operands: int = 1) -> Labels:
  """Labels of operations on the last axis, of one shape."""
  axes = (*range(node.inputs[0].rank - 1), "last")
  return Labels([axes] * operands, [axes])


def as_one(x: Tensor, dims: Dims) -> tuple[Tensor, Dimension]:
  """Reshapes an axis of no or several dimensions to one, which is returned, too."""
  if len(dims) == 1:
    return x, dims[0]
  one = Dimension("_last", list_product(d.size for d in dims))
  if not dims:
    return reshape(x, x.shape + one), one
  rest = [d for d in x.shape if d not in dims]
  return x_with_last(x, rest, dims, one), one


def x_with_last(x: Tensor, rest: list[Dimension], dims: Dims, one: Dimension) -> Tensor:
  """The tensor with some dimensions replaced by one, which stands last."""
  ordered = einsum([x], output_shape=Shape([*rest, *dims]))
  return replace_dimensions(ordered, list(dims), one)


@rule("Softmax", "LogSoftmax")
class Softmax(Labelled):
  """Normalized exponentials over the last axis, or their logarithms."""

  def labels(self, node: Node) -> Labels:
    return _last(node)

  def compute(
    self, node: Node, xs: Sequence[Tensor], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    x, dim = as_one(xs[0], dims["last"])
    y = (softmax if node.type == "Softmax" else log_softmax)(x, dim)
    if not dims["last"]:  # Of a single value: it has a gradient all the same, which is 0.
      return [reshape(y, y.shape - dim)]
    return [y if len(dims["last"]) == 1 else replace_dimensions(y, dim, list(dims["last"]))]


class _CrossEntropy(Labelled):
  """Base class: loss of each row, and the gradient of the logits as a second output."""

  def compute(
    self, node: Node, xs: Sequence[Tensor], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    x, labels = xs
    several = len(dims["class"]) != 1
    x, dim = as_one(x, dims["class"])
    if several and labels.dtype == x.dtype:
      labels, _ = as_one(labels, dims["class"])
    loss = self.loss(x, labels, dim)
    if not make.is_needed(node.outputs[1]):
      return [loss, zeros_like(xs[0])]
    back = sub(softmax(x, dim), self.targets(x, labels, dim), output_shape=x.shape)
    if not dims["class"]:
      return [loss, reshape(back, back.shape - dim)]
    return [loss, replace_dimensions(back, dim, list(dims["class"])) if several else back]

  def loss(self, x: Tensor, labels: Tensor, dim: Dimension) -> Tensor:
    """The loss of each row."""
    raise NotImplementedError

  def targets(self, x: Tensor, labels: Tensor, dim: Dimension) -> Tensor:
    """The labels as probabilities."""
    raise NotImplementedError


@rule("SparseSoftmaxCrossEntropyWithLogits")
class SparseCrossEntropy(_CrossEntropy):
  """Labels are numbers of classes."""

  def labels(self, node: Node) -> Labels:
    return Labels([("row", "class"), ("row",)], [("row",), ("row", "class")])

  def loss(self, x: Tensor, labels: Tensor, dim: Dimension) -> Tensor:
    return SoftmaxCrossEntropyOperation(x, labels, dim).outputs[0]

  def targets(self, x: Tensor, labels: Tensor, dim: Dimension) -> Tensor:
    return one_hot(labels, dim, dtype=x.dtype)


@rule("SoftmaxCrossEntropyWithLogits")
class DenseCrossEntropy(_CrossEntropy):
  """Labels are probabilities of classes; both operands may have one row for all."""

  def labels(self, node: Node) -> Labels:
    both = ("row", "class")
    return Labels([both, both], [("row",), both])

  def loss(self, x: Tensor, labels: Tensor, dim: Dimension) -> Tensor:
    product = multiply(log_softmax(x, dim), labels)
    loss = negative(reduce_sum(product, output_shape=product.shape - dim))

    def backward(
      inputs: Sequence[Tensor], outputs: Sequence[Tensor], grad_ys: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
      _, x, labels = inputs
      (dy,) = grad_ys
      if dy is None:
        return [None] * 3
      # TensorFlow's, whatever the labels sum to: a derivative would have their sum before softmax.
      to_x = multiply(sub(softmax(x, dim), self.targets(x, labels, dim)), dy)
      to_labels = multiply(negative(log_softmax(x, dim)), dy)
      return [
        None,
        reduce_sum(to_x, output_shape=x.shape),
        reduce_sum(to_labels, output_shape=labels.shape),
      ]

    name = "softmax_cross_entropy"
    return CustomGradientOperation([loss, x, labels], 1, backward, name).outputs[0]

  def targets(self, x: Tensor, labels: Tensor, dim: Dimension) -> Tensor:
    # TensorFlow's gradient of this gradient is none for the labels.
    return stop_gradient(labels)
