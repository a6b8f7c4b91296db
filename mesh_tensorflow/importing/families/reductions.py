"""Reductions over axes, and operations along one axis: running sums, top k, ranges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.importing.families.inputs import static_input
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
from mesh_tensorflow.importing.value import Value, flat
from mesh_tensorflow.operations.binary import divide, multiply
from mesh_tensorflow.operations.comparison import equal
from mesh_tensorflow.operations.elementwise import cast, negative, sqrt, square
from mesh_tensorflow.operations.ranges import CumsumOperation, mtf_range
from mesh_tensorflow.operations.reduction import (
  ReduceOperation,
  reduce_all,
  reduce_any,
  reduce_mean,
  reduce_sum,
)
from mesh_tensorflow.operations.slicewise import slicewise
from mesh_tensorflow.operations.top_k import argmax, top_k
from mesh_tensorflow.program.dimensions import Dimension, Shape, list_product
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


def _axis(node: Node) -> int:
  axis = int(static_input(node, 1, "axis"))
  return axis + node.inputs[0].rank if axis < 0 else axis


def _as_one(x: Tensor, dims: Dims) -> tuple[Tensor, Dimension]:
  """Reshapes an axis of no or several dimensions to one dimension, which no layout splits."""
  if len(dims) == 1:
    return x, dims[0]
  one = Dimension("_axis", list_product(d.size for d in dims))
  rest = [d for d in x.shape if d not in dims]
  axes = (*((d,) for d in rest), dims)
  return Value(x, axes).with_axes([*axes[:-1], (one,)]).tensor, one


@rule("Cumsum")
class Cumsum(Labelled):
  """Running sums; along a split axis processors exchange the sums of their blocks."""

  def labels(self, node: Node) -> Labels:
    labels: list[Label] = list(range(node.inputs[0].rank))
    _axis(node)  # It is refused at once where it is not known.
    return Labels([labels, None], [labels])

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    own = dims[_axis(node)]
    x, one = _as_one(xs[0], own)
    settings = node.attributes
    (y,) = CumsumOperation(x, one, settings["exclusive"], settings["reverse"]).outputs
    axes = tuple((d,) for d in y.shape)
    return [Value(y, axes).with_axes([own if d == one else (d,) for d in y.shape]).tensor]


@rule("Cumprod", "CumulativeLogsumexp")
class Cumulative(Slicewise):
  """Running products, and running sums of exponentials in logarithms."""

  def labels(self, node: Node) -> Labels:
    labels: list[Label] = list(range(node.inputs[0].rank))
    return Labels([labels, None], [labels], [_axis(node)])


@rule("ArgMax", "ArgMin")
class ArgMax(Labelled):
  """The position of the largest, or smallest, element along an axis."""

  def labels(self, node: Node) -> Labels:
    labels: list[Label] = list(range(node.inputs[0].rank))
    axis = _axis(node)
    return Labels([labels, None], [[*labels[:axis], *labels[axis + 1 :]]])

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    x, one = _as_one(xs[0], dims[_axis(node)])
    if x.dtype == tf.bool:
      x = cast(x, tf.int32)
    if node.type == "ArgMin":
      # Not the negative of integers, which the smallest one, and unsigned ones, do not have.
      x = negative(x) if x.dtype.is_floating else _inverted(x)
    return [cast(argmax(x, one), node.outputs[0].dtype)]


def _inverted(x: Tensor) -> Tensor:
  dims = x.shape.dims
  y: Tensor = slicewise(tf.bitwise.invert, [x], x.shape, x.dtype, dims, 0, name="invert")
  return y


@rule("TopK", "TopKV2")
class TopK(Labelled):
  """The largest elements along the last axis, and their places; only the largest are exchanged."""

  def labels(self, node: Node) -> Labels:
    others: list[Label] = list(range(node.inputs[0].rank - 1))
    inputs: list[Any] = [[*others, "all"], None]
    return Labels(inputs[: len(node.inputs)], [[*others, "largest"]] * 2, ["largest"])

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    x, one = _as_one(xs[0], dims["all"])
    values, places = node.outputs
    k = Dimension("_largest", values.shape[-1])
    found, indices = top_k(x, one, k)
    axes = [*((d,) for d in found.shape if d != k), dims["largest"]]
    made = [Value(t, tuple((d,) for d in t.shape)).with_axes(axes).tensor for t in (found, indices)]
    return [made[0], cast(made[1], places.dtype)]


@rule("InTopK", "InTopKV2")
class InTopK(Slicewise):
  """True where the score of the target class is among the k highest of its row."""

  def labels(self, node: Node) -> Labels:
    inputs: list[Any] = [("batch", "classes"), ("batch",), None]
    return Labels(inputs[: len(node.inputs)], [("batch",)], ["classes"])

  def run(self, node: Node) -> Callable[..., Any]:
    k = int(node.attributes["k"] if node.type == "InTopK" else static_input(node, 2, "k"))
    return lambda scores, targets: tf.raw_ops.InTopKV2(
      predictions=scores, targets=targets, k=tf.constant(k, targets.dtype)
    )


@rule("Range")
class Range(Labelled):
  """Ranges that are too long for constants, or that begin at a tensor."""

  def labels(self, node: Node) -> Labels:
    return Labels([(), None, ()], [("positions",)])

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    start, _, step = xs
    (out,) = node.outputs
    own = dims["positions"]
    if not own:
      return [start]
    one = own[0] if len(own) == 1 else Dimension("_range", out.shape[0])
    at = mtf_range(make.mesh, one, tf.int64 if out.dtype == tf.int64 else tf.int32)

    def numbers(i: tf.Tensor, first: tf.Tensor, distance: tf.Tensor) -> tf.Tensor:
      return tf.cast(i, out.dtype) * distance + first

    y = slicewise(numbers, [at, start, step], Shape([one]), out.dtype, [one], 0, name="Range")
    return [Value(y, ((one,),)).with_axes([own]).tensor]
