"""Operations that run one TensorFlow function on every processor's slices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.arguments.kinds import DTypeLike
from mesh_tensorflow.errors import ArgumentError, GradientError, GraphError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LazyAllreduceSum
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.program.dimensions import Dimension, Shape, ShapeLike, convert_to_shape
from mesh_tensorflow.program.graph import Operation, Tensor, is_differentiable

__all__ = ["GenericGradOperation", "SlicewiseOperation", "cwise", "slicewise"]


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
    tf_fn: Callable[..., object],
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
    # Whether the function is elementwise; and, if it is, whether it takes every integer: padding
    # may be any, and TensorFlow raises an error if it is a divisor of 0, or an index out of range.
    self.is_elementwise = False
    self.takes_all_integers = False
    self._reach = [frozenset(y.shape) for y in self._outputs]

  @property
  def reach(self) -> list[frozenset[Dimension]]:
    """For each output the dimensions along which it is computed from local slices only."""
    return list(self._reach)

  @property
  def tf_fn(self) -> Callable[..., Any]:
    """The TensorFlow function of the slices."""
    return self._tf_fn

  @property
  def has_gradient(self) -> bool:
    return self._grad_function != 0 and super().has_gradient

  def gradient(self, grad_ys: list[Tensor | None]) -> Sequence[Tensor | None]:
    if self._grad_function is not None:
      grads: Sequence[Tensor | None] = self._grad_function(self, *grad_ys)
      return grads
    return _generic_gradients(self, grad_ys)

  def suits_uneven_slices(self, mesh_impl: MeshImpl) -> bool:
    del mesh_impl
    integers = any(x.dtype.is_integer for x in self._inputs)
    return self.is_elementwise and (self.takes_all_integers or not integers)

  def verify_layout(self, mesh_impl: MeshImpl) -> None:
    super().verify_layout(mesh_impl)
    for t in self._inputs + self._outputs:
      for d in t.shape:
        if d.name in self._unsplittable_dims:
          self._require_unsplit(
            mesh_impl, d, f"it is not among the splittable dimensions of {self.name}"
          )

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    results = impl.slicewise(self._tf_fn, *[lowering.tensors[x] for x in self._inputs])
    if not isinstance(results, tuple):
      results = (results,)
    if len(results) != len(self._outputs):
      raise GraphError(
        f"slicewise {self.name}: tf_fn returned {len(results)} tensors, expected "
        f"{len(self._outputs)} (several outputs must be a tuple)"
      )
    for out, laid_out in zip(self._outputs, results):
      lowering.set_tensor_lowering(out, laid_out)


class GenericGradOperation(SlicewiseOperation):
  """Gradient of a `SlicewiseOperation`: TensorFlow's, slice by slice.

  It is a function of slices itself, so it has a gradient in the same way, and so on.

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
    xs = forward_op.inputs
    splittable = forward_op.splittable_dims
    given = {i: g for i, g in enumerate(grad_ys) if g is not None}
    super().__init__(
      _TensorFlowGradient(forward_op, list(given)),
      xs + list(given.values()),
      [x.shape for x in xs],
      [x.dtype for x in xs],
      [d for t in xs + forward_op.outputs for d in t.shape if d.name in splittable],
      name=name or "generic_grad",
    )
    reached = frozenset[Dimension]().union(*[forward_op.reach[i] for i in given])
    self._reach = [frozenset(x.shape) | reached for x in xs]
    self.is_elementwise = forward_op.is_elementwise
    self.takes_all_integers = forward_op.takes_all_integers

  def suits_uneven_slices(self, mesh_impl: MeshImpl) -> bool:
    # What an output does not have is summed, by the function itself: padding, too.
    summed = {d for y, reach in zip(self._outputs, self._reach) for d in reach - set(y.shape)}
    return super().suits_uneven_slices(mesh_impl) and not any(map(mesh_impl.is_uneven, summed))

  def lower(self, lowering: LoweringInProgress) -> None:
    super().lower(lowering)
    impl = lowering.mesh_impl(self)
    for out, reach in zip(self._outputs, self._reach):
      # What a processor computed is the part that its slices of the outputs have in it.
      axes = sorted(_mesh_axes(impl, reach) - _mesh_axes(impl, out.shape))
      if axes and is_differentiable(out.dtype):
        key, size = f"allreduce/{axes}/generic_grad", lowering.laid_out_size(out)
        lowering.tensors[out] = LazyAllreduceSum(
          impl, lowering.tensors[out], axes, functools.partial(lowering.add_counter, key, size)
        )


def _mesh_axes(impl: MeshImpl, dims: Iterable[Dimension]) -> set[int]:
  """The mesh axes over which some of the dimensions are split."""
  axes = {impl.tensor_dimension_to_mesh_axis(d) for d in dims}
  return {a for a in axes if a is not None and impl.shape[a].size > 1}


class _TensorFlowGradient:
  """The gradients of a function of slices, as such a function: of its inputs and output gradients.

  Args:
    op: the operation that runs the function.
    given: numbers of the outputs that have a gradient.
  """

  def __init__(self, op: SlicewiseOperation, given: Sequence[int]):
    self._op = op
    self._given = list(given)

  def __call__(self, *slices: tf.Tensor) -> Any:
    op = self._op
    floating = [is_differentiable(x.dtype) for x in op.inputs]
    # A tape knows tensors by identity: it would give one that stands for two inputs, or that the
    # function uses besides, the gradients of all its places. So each input is a tensor of its own.
    xs = [tf.identity(x) if ok else x for x, ok in zip(slices, floating)]
    watched = [x for x, ok in zip(xs, floating) if ok]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
      tape.watch(watched)
      ys = op.tf_fn(*xs)
    ys = ys if isinstance(ys, tuple) else (ys,)
    try:
      found = tape.gradient(
        [ys[i] for i in self._given],
        watched,
        list(slices[len(xs) :]),
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
      )
    except (LookupError, NotImplementedError) as e:
      raise GradientError(
        f"{op.name} of {op.inputs}: TensorFlow has no gradient of its function ({e}); give a "
        "grad_function, or stop the gradient before it with mtf.stop_gradient"
      ) from e
    gradients = iter(found)
    results = [next(gradients) if ok else tf.zeros_like(x) for x, ok in zip(xs, floating)]
    return tuple(tf.convert_to_tensor(r) for r in results)


def _generic_gradients(
  op: SlicewiseOperation, grad_ys: Sequence[Tensor | None]
) -> list[Tensor | None]:
  """One gradient for each floating or complex input, through all outputs that have a gradient."""
  # Outputs that are split differently: their parts of a gradient are summed differently, too.
  alike: dict[frozenset[Dimension], list[int]] = {}
  for i, g in enumerate(grad_ys):
    if g is not None:
      alike.setdefault(op.reach[i], []).append(i)
  total: list[Tensor | None] = [None] * len(op.inputs)
  for places in alike.values():
    parts = GenericGradOperation(op, [g if i in places else None for i, g in enumerate(grad_ys)])
    for i, (x, part) in enumerate(zip(op.inputs, parts.outputs)):
      if is_differentiable(x.dtype):
        total[i] = part if total[i] is None else total[i] + part
  return total


def slicewise(
  tf_fn: Callable[..., object],
  xs: Sequence[Tensor],
  output_shape: Any = None,
  output_dtype: DTypeLike | Sequence[DTypeLike] = None,
  splittable_dims: Sequence[Dimension] | None = None,
  grad_function: Any = None,
  name: str | None = None,
) -> Any:
  """Runs a TensorFlow function on every processor's slices.

  Args:
    tf_fn: takes one tf.Tensor per input; returns a tf.Tensor, or a tuple for several outputs.
    xs: a list of `Tensor`s.
    output_shape: the shape of the first input by default; a list of shapes (None for
      the default) if there are several outputs.
    output_dtype: the first input's by default; a list for several outputs.
    splittable_dims: dimensions that may be split over the mesh. Required.
    grad_function: None for TensorFlow's gradient of `tf_fn`; 0 for no gradient; or a function
      `(op, *grad_ys)` that returns a list with one gradient (or None) per input.
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
  output_dtype: DTypeLike = None,
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
  result: Tensor = slicewise(
    tf_fn,
    xs,
    output_dtype=output_dtype,
    splittable_dims=xs[0].shape.dims,
    grad_function=grad_function,
    name=name or "cwise",
  )
  op = result.operation
  assert isinstance(op, SlicewiseOperation)
  op.is_elementwise = True
  return result


def taking_all_integers(x: Tensor) -> Tensor:
  """x, the result of `cwise`, whose function takes every integer without an error."""
  op = x.operation
  assert isinstance(op, SlicewiseOperation)
  op.takes_all_integers = True
  return x
