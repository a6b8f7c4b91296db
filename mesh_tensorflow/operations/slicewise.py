"""Operations that run one TensorFlow function on every processor's slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.dimensions import Dimension, Shape, ShapeLike, convert_to_shape
from mesh_tensorflow.errors import ArgumentError, GraphError
from mesh_tensorflow.graph import Operation, Tensor


class SlicewiseOperation(Operation):
  """Runs `tf_fn` on the slices of the inputs.

  Args:
    tf_fn: takes one tf.Tensor per input; returns a tf.Tensor, or a tuple of them if
      there are several outputs.
    inputs: a list of `Tensor`s.
    output_shapes: a list of `Shape`s.
    output_dtypes: a list of dtypes.
    splittable_dims: dimensions that may be split; all others must not be.
    grad_function: None for TensorFlow's gradient of `tf_fn`, recomputed slice by
      slice; 0 for no gradient; or a function `(op, *grad_ys)` that returns a list
      with one gradient (or None) per input.
    name: of the operation.
  """

  def __init__(
    self,
    tf_fn: Callable[..., Any],
    inputs: list[Tensor],
    output_shapes: Sequence[Shape],
    output_dtypes: Sequence[tf.DType],
    splittable_dims: Sequence[Dimension],
    grad_function: Any = None,
    name: str | None = None,
  ):
    super().__init__(inputs, name=name or "slicewise")
    self._tf_fn = tf_fn
    self._outputs = [
      Tensor(self, shape, dtype, index=i)
      for i, (shape, dtype) in enumerate(zip(output_shapes, output_dtypes))
    ]
    self._splittable_dims, self._unsplittable_dims = (
      self._initialize_splittable_and_unsplittable_dims(
        "unsplittable", [d.name for d in splittable_dims]
      )
    )
    self._grad_function = grad_function

  @property
  def tf_fn(self) -> Callable[..., Any]:
    """The TensorFlow function of the slices."""
    return self._tf_fn

  @property
  def has_gradient(self) -> bool:
    return self._grad_function != 0 and super().has_gradient

  def gradient(self, grad_ys):
    if self._grad_function is not None:
      return self._grad_function(self, *grad_ys)
    return GenericGradOperation(self, grad_ys).outputs

  def verify_layout(self, mesh_impl):
    super().verify_layout(mesh_impl)
    for t in self._inputs + self._outputs:
      for d in t.shape:
        if d.name in self._unsplittable_dims:
          self._require_unsplit(
            mesh_impl, d, f"it is not among the splittable dimensions of {self.name}"
          )

  def lower(self, lowering):
    impl = lowering.mesh_impl(self)
    results = impl.slicewise(self._tf_fn, *[lowering.tensors[x] for x in self._inputs])
    if len(self._outputs) == 1 and not isinstance(results, tuple):
      results = (results,)
    if len(results) != len(self._outputs):
      raise GraphError(
        f"slicewise {self.name}: tf_fn returned {len(results)} tensors, expected "
        f"{len(self._outputs)} (several outputs must be a tuple)"
      )
    for out, laid_out in zip(self._outputs, results):
      lowering.set_tensor_lowering(out, laid_out)


class GenericGradOperation(Operation):
  """Gradient of a `SlicewiseOperation`: TensorFlow's, slice by slice.

  Args:
    forward_op: the operation.
    grad_ys: one gradient (or None) per output of it.
    name: of the operation.
  """

  def __init__(
    self,
    forward_op: SlicewiseOperation,
    grad_ys: Sequence[Tensor | None],
    name: str | None = None,
  ):
    self._given = [g is not None for g in grad_ys]
    super().__init__(
      forward_op.inputs + forward_op.outputs + [g for g in grad_ys if g is not None],
      name=name or "generic_grad",
    )
    self._forward_op = forward_op
    self._outputs = [
      Tensor(self, x.shape, x.dtype, index=i) for i, x in enumerate(forward_op.inputs)
    ]

  def lower(self, lowering):
    forward = self._forward_op
    n = len(forward.inputs)
    given = self._given
    differentiable = [x.dtype.is_floating for x in forward.inputs]

    def grad(*slices):
      xs = list(slices[:n])
      grad_ys = iter(slices[n:])
      with tf.GradientTape(watch_accessed_variables=False) as tape:
        watched = [x for x, ok in zip(xs, differentiable) if ok]
        tape.watch(watched)
        ys = forward.tf_fn(*xs)
      ys = ys if isinstance(ys, tuple) else (ys,)
      pairs = [(y, next(grad_ys)) for y, g in zip(ys, given) if g]
      found = iter(
        tape.gradient(
          [y for y, _ in pairs],
          watched,
          [g for _, g in pairs],
          unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
      )
      return tuple(next(found) if ok else tf.zeros_like(x) for x, ok in zip(xs, differentiable))

    # Inputs of this operation are forward inputs, forward outputs, gradients.
    sources = self._inputs[:n] + self._inputs[n + len(forward.outputs) :]
    results = lowering.mesh_impl(self).slicewise(grad, *[lowering.tensors[x] for x in sources])
    for out, laid_out in zip(self._outputs, results):
      lowering.set_tensor_lowering(out, laid_out)


def slicewise(
  tf_fn: Callable[..., Any],
  xs: Sequence[Tensor],
  output_shape: Any = None,
  output_dtype: Any = None,
  splittable_dims: Sequence[Dimension] | None = None,
  grad_function: Any = None,
  name: str | None = None,
) -> Any:
  """Runs a TensorFlow function on every processor's slices.

  Args:
    tf_fn: see `SlicewiseOperation`.
    xs: a list of `Tensor`s.
    output_shape: the shape of the first input by default; a list of shapes (None for
      the default) if there are several outputs.
    output_dtype: the first input's by default; a list for several outputs.
    splittable_dims: dimensions that may be split over the mesh. Required.
    grad_function: see `SlicewiseOperation`.
    name: of the operation.

  Returns:
    A `Tensor`, or a tuple of them if `output_dtype` is a list.

  Raises:
    ArgumentError: `splittable_dims` is missing.
  """
  xs = list(xs)
  if splittable_dims is None:
    raise ArgumentError(
      f"{name or 'slicewise'} of {xs} needs splittable_dims: the dimensions along which the "
      "function may be run in parts ([] if there are none)"
    )
  several = isinstance(output_dtype, list)
  dtypes = output_dtype if several else [output_dtype]
  shapes: Sequence[ShapeLike] = output_shape if several else [output_shape]
  if several and shapes is None:
    shapes = [None] * len(dtypes)
  op = SlicewiseOperation(
    tf_fn,
    xs,
    [xs[0].shape if s is None else convert_to_shape(s) for s in shapes],
    [xs[0].dtype if d is None else tf.as_dtype(d) for d in dtypes],
    splittable_dims,
    grad_function,
    name=name,
  )
  return tuple(op.outputs) if several else op.outputs[0]


def cwise(
  tf_fn: Callable[..., tf.Tensor],
  xs: Sequence[Tensor],
  output_dtype: Any = None,
  grad_function: Any = None,
  name: str | None = None,
) -> Tensor:
  """Runs an elementwise TensorFlow function; the result has the shape of `xs[0]`.

  Args:
    tf_fn: an elementwise function of one tf.Tensor for each input.
    xs: a list of `Tensor`s.
    output_dtype: that of the first input by default.
    grad_function: see `SlicewiseOperation`; by default TensorFlow's gradient of `tf_fn`.
    name: of the operation.
  """
  return slicewise(
    tf_fn,
    xs,
    output_dtype=output_dtype,
    splittable_dims=xs[0].shape.dims,
    grad_function=grad_function,
    name=name or "cwise",
  )
