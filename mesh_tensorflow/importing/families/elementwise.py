"""Functions of each element, broadcasting as TensorFlow does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow.importing.nodes import Node
from mesh_tensorflow.importing.rules import (
  Construction,
  Dims,
  Label,
  Labelled,
  Labels,
  call_raw,
  rule,
)
from mesh_tensorflow.importing.value import flat
from mesh_tensorflow.meshes.slices import align
from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.operations.binary import add, divide, multiply, sub
from mesh_tensorflow.operations.control import stop_gradient
from mesh_tensorflow.operations.elementwise import (
  cast,
  exp,
  identity,
  log,
  mtf_abs,
  negative,
  reciprocal,
  relu,
  rsqrt,
  sigmoid,
  sqrt,
  square,
  tanh,
)
from mesh_tensorflow.operations.slicewise import slicewise
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Tensor, is_differentiable

# TensorFlow's functions of each element, of one operand and of several.
_UNARY = """Acos Acosh Angle Asin Asinh Atan Atanh BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0
BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Bitcast Bucketize Ceil
CheckNumerics ComplexAbs Conj Cos Cosh Dawsn Digamma Elu Erf Erfc Erfinv Exp Expint Expm1
FakeQuantWithMinMaxArgs Floor FresnelCos FresnelSin Imag Inv Invert IsFinite IsInf IsNan LeakyRelu
Lgamma LogicalNot Log Log1p Ndtri PopulationCount Real Relu6 Rint Round Selu Sign Sin Sinh
Softplus Softsign Spence Tan"""
_OF_STRINGS = """AsString StaticRegexFullMatch StaticRegexReplace StringLength StringLower
StringStrip StringToHashBucket StringToHashBucketFast StringToHashBucketStrong StringToNumber
StringUpper"""
_SEVERAL = """ApproximateEqual Atan2 Betainc BitwiseAnd BitwiseOr BitwiseXor ClipByValue Complex
DivNoNan Equal FloorDiv FloorMod Greater GreaterEqual Igamma Igammac LeftShift Less LessEqual
LogicalAnd LogicalOr Maximum Minimum Mod MulNoNan NextAfter NotEqual Polygamma Pow RightShift
SelectV2 SquaredDifference TruncateDiv TruncateMod Xdivy Xlog1py Xlogy Zeta"""
# Of these, those whose operands are numbers, or all of one shape.
_UNBROADCAST = ("Betainc", "ClipByValue")
_GRADIENTS = """EluGrad InvGrad LeakyReluGrad ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad SeluGrad
SigmoidGrad SoftplusGrad SoftsignGrad SqrtGrad TanhGrad"""


def broadcast_labels(node: Node) -> Labels:
  """Axes aligned from the last one, for inputs and outputs of any ranks."""

  def of(rank: int) -> tuple[int, ...]:
    return tuple(range(-rank, 0))

  return Labels([of(w.rank) for w in node.inputs], [of(w.rank) for w in node.outputs])


class Elementwise(Labelled):
  """Elementwise function on the slices; subclasses use mtf's own operation."""

  def labels(self, node: Node) -> Labels:
    return broadcast_labels(node)

  def compute(
    self, node: Node, xs: Sequence[Tensor], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    out = _widest_order(xs)
    shapes = [x.shape.dims for x in xs]

    def run(*slices: tf.Tensor) -> tf.Tensor:
      aligned = [align(x, s, out) for x, s in zip(slices, shapes)]
      if len(aligned) == 1 or node.type in _UNBROADCAST:
        return call_raw(node, aligned)
      return kernels.elementwise(lambda *operands: call_raw(node, operands), *aligned)

    grad = None if is_differentiable(node.outputs[0].dtype) else 0
    y = slicewise(run, list(xs), Shape(out), node.outputs[0].dtype, out, grad, name=node.type)
    return [y]


def _widest_order(xs: Sequence[Tensor]) -> list[Dimension]:
  """Union of the dimensions, the largest tensor's first, so that this one is not transposed."""
  widest = max(xs, key=lambda x: x.shape.ndims)
  return list(dict.fromkeys(flat([widest.shape.dims, *(x.shape.dims for x in xs)])))


rule(*_UNARY.split(), *_OF_STRINGS.split(), *_SEVERAL.split(), *_GRADIENTS.split())(Elementwise)

# Operations that mtf has, too: their gradients need no recomputation, and sums over the mesh may
# stay pending through the linear ones.
_MTF: dict[str, Callable[[Tensor], Tensor]] = {
  "Abs": mtf_abs,
  "Exp": exp,
  "Identity": identity,
  "Log": log,
  "Neg": negative,
  "Reciprocal": reciprocal,
  "Relu": relu,
  "Rsqrt": rsqrt,
  "Sigmoid": sigmoid,
  "Sqrt": sqrt,
  "Square": square,
  "StopGradient": stop_gradient,
  "PreventGradient": stop_gradient,
  "Tanh": tanh,
}


@rule(*_MTF)
class OfMtf(Elementwise):
  """Elementwise function that mtf has as an operation."""

  def compute(
    self, node: Node, xs: Sequence[Tensor], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    return [_MTF[node.type](xs[0])]


_ARITHMETIC: dict[str, Callable[..., Tensor]] = {
  "Add": add,
  "AddV2": add,
  "Div": divide,
  "Mul": multiply,
  "RealDiv": divide,
  "Sub": sub,
}


@rule(*_ARITHMETIC)
class Arithmetic(Elementwise):
  """Arithmetic of two operands, of which one may be a number."""

  def compute(
    self, node: Node, xs: Sequence[Tensor], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    if not node.outputs[0].dtype.is_floating:
      return super().compute(node, xs, dims, make)
    operands = [_number(x, w.static) for x, w in zip(xs, node.inputs)]
    if not any(isinstance(x, Tensor) for x in operands):
      operands = list(xs)
    if all(isinstance(x, Tensor) for x in operands):
      return [_ARITHMETIC[node.type](*operands, output_shape=Shape(_widest_order(xs)))]
    return [_ARITHMETIC[node.type](*operands)]


def _number(x: Tensor, static: np.ndarray | None) -> Any:
  return static.flat[0].item() if static is not None and static.size == 1 else x


@rule("AddN", "AccumulateNV2")
class AddN(Elementwise):
  """The sum of several tensors of one shape."""

  def compute(
    self, node: Node, xs: Sequence[Tensor], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    total = xs[0]
    for x in xs[1:]:
      total = add(total, x, output_shape=Shape(_widest_order([total, x])))
    return [total]


@rule("Cast")
class Cast(Elementwise):
  """Another dtype."""

  def compute(
    self, node: Node, xs: Sequence[Tensor], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    return [cast(xs[0], node.outputs[0].dtype)]


@rule("Select")
class Select(Elementwise):
  """A choice of each element, or of each position along the first axis: no broadcasting."""

  def labels(self, node: Node) -> Labels:
    condition, x, _ = node.inputs
    whole = tuple(range(x.rank))
    return Labels([whole[: condition.rank], whole, whole], [whole])

  def compute(
    self, node: Node, xs: Sequence[Tensor], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    out = _widest_order(xs[1:])
    shapes = [x.shape.dims for x in xs]

    def run(*slices: tf.Tensor) -> tf.Tensor:
      return kernels.where(*[align(x, s, out) for x, s in zip(slices, shapes)])

    return [slicewise(run, list(xs), Shape(out), node.outputs[0].dtype, out, name="Select")]
