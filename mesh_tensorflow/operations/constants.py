"""Constants, and tensors brought in from TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow.arguments.kinds import DTypeLike, shown
from mesh_tensorflow.errors import (
  ArgumentError,
  DTypeError,
  LayoutError,
  MeshError,
  ShapeError,
  SizeError,
)
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.program.dimensions import Shape, ShapeLike, convert_to_shape
from mesh_tensorflow.program.graph import Mesh, Operation, Tensor

__all__ = [
  "Constant",
  "ImportLaidOutTensorOperation",
  "ImportOperation",
  "constant",
  "import_laid_out_tensor",
  "import_tf_tensor",
  "ones",
  "ones_like",
  "zeros",
  "zeros_like",
]


class Constant(Operation):
  """A constant: a scalar fills the shape; an array of the shape's size is cut into slices.

  Args:
    mesh: a `Mesh`.
    value: a number, or an array.
    shape: a `Shape`.
    dtype: a tf.DType.
    name: of the operation.
  """

  lowers_uneven_slices = True

  def __init__(
    self, mesh: Mesh, value: Any, shape: Shape, dtype: tf.DType, name: str | None = None
  ):
    super().__init__([], mesh, name=name or "constant")
    dtype = tf.as_dtype(dtype)
    self._value = value = _checked_value(self.name, value, dtype)
    self._outputs = [Tensor(self, shape, dtype)]
    self._initialize_all_dimensions_as_splittable()
    if np.ndim(value) and np.size(value) != shape.size:
      raise ShapeError(
        f"{self.name}: {np.size(value)} values for {shape}, which has {shape.size} elements"
      )

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    out = self.outputs[0]
    if np.ndim(self._value) == 0:
      sizes = impl.slice_shape(out.shape)
      laid_out = impl.slicewise(
        lambda: (
          tf.constant(self._value, out.dtype, sizes)
          if not tf.is_tensor(self._value)
          else tf.fill(sizes, tf.cast(self._value, out.dtype))
        )
      )
    else:
      value = tf.constant(np.reshape(self._value, out.shape.to_integer_list), out.dtype)
      laid_out = impl.import_tf_tensor(out, value)
    lowering.set_tensor_lowering(out, laid_out)


def _checked_value(name: str, value: Any, dtype: tf.DType) -> Any:
  """A constant's value, as TensorFlow's `constant` takes it for the dtype.

  Raises:
    DTypeError: it has none.
  """
  if tf.is_tensor(value):
    if tf.string in (value.dtype, dtype) and value.dtype != dtype:
      raise DTypeError(f"{name}: the value has dtype {value.dtype.name}, not {dtype.name}")
    return value
  try:
    array = np.asarray(value)
    if dtype == tf.bool and array.dtype.kind in "iuf":
      return array.astype(bool)
    # Checks the dtype by the first of many values.
    tf.constant(value if not array.ndim else array.flat[0] if array.size else 0, dtype)
  except (TypeError, ValueError) as e:
    text = str(e).split("\n")[0]
    raise DTypeError(f"{name}: the value {value!r} is not of dtype {dtype.name}: {text}") from None
  return value


def constant(
  mesh: Mesh, value: object, shape: ShapeLike | None = None, dtype: DTypeLike = tf.float32
) -> Tensor:
  """A tensor of a constant value.

  Args:
    mesh: a `Mesh`.
    value: a scalar, which fills the shape, or as many values as the shape has elements.
    shape: a shape; a scalar by default.
    dtype: of the result.
  """
  shape = convert_to_shape(shape)
  return Constant(mesh, value, Shape([]) if shape is None else shape, tf.as_dtype(dtype)).outputs[0]


def zeros(mesh: Mesh, shape: ShapeLike, dtype: DTypeLike = tf.float32) -> Tensor:
  """A tensor of zeros.

  Args:
    mesh: a `Mesh`.
    shape: a shape.
    dtype: a tf.DType.
  """
  return constant(mesh, 0, shape=shape, dtype=dtype)


def zeros_like(t: Tensor) -> Tensor:
  """Zeros of the shape and dtype of t."""
  return zeros(t.mesh, t.shape, t.dtype)


def ones(mesh: Mesh, shape: ShapeLike, dtype: DTypeLike = tf.float32) -> Tensor:
  """A tensor of ones; arguments as `zeros`."""
  return constant(mesh, 1, shape=shape, dtype=dtype)


def ones_like(t: Tensor) -> Tensor:
  """Ones of the shape and dtype of t."""
  return ones(t.mesh, t.shape, t.dtype)


class ImportOperation(Operation):
  """A whole tf.Tensor as a tensor of the graph.

  Args:
    mesh: a `Mesh`.
    tf_tensor: a tf.Tensor or array.
    shape: a `Shape`.
    name: of the operation.
  """

  lowers_uneven_slices = True

  def __init__(self, mesh: Mesh, tf_tensor: Any, shape: Shape, name: str | None = None):
    super().__init__([], mesh=mesh, name=name or "import")
    tf_tensor = _converted(self.name, tf_tensor)
    if not tf_tensor.shape.is_compatible_with(shape.to_integer_list):
      raise ShapeError(
        f"{self.name}: a tf.Tensor of shape {tf_tensor.shape} cannot be imported as {shape}"
      )
    if not tf_tensor.shape.is_fully_defined():
      tf_tensor = tf.ensure_shape(tf_tensor, shape.to_integer_list)
    self._outputs = [Tensor(self, shape, tf_tensor.dtype)]
    self._tf_tensor = tf_tensor
    self._initialize_all_dimensions_as_splittable()

  def lower(self, lowering: LoweringInProgress) -> None:
    out = self.outputs[0]
    lowering.set_tensor_lowering(
      out, lowering.mesh_impl(self).import_tf_tensor(out, self._tf_tensor)
    )


def _converted(name: str, value: object) -> tf.Tensor:
  """`tf.convert_to_tensor`, with a typed error."""
  try:
    return tf.convert_to_tensor(value)
  except (TypeError, ValueError) as e:
    if isinstance(e, MeshError):
      raise
    raise ArgumentError(
      f"{name}: tf_tensor must be a tf.Tensor, an array or a number, got {shown(value)}"
    ) from None


class ImportLaidOutTensorOperation(Operation):
  """Ready slices as a tensor of the graph.

  Args:
    mesh: a `Mesh`.
    laid_out_tensor: a laid-out tensor.
    shape: a `Shape`: that of the whole tensor.
    name: of the operation.
  """

  lowers_uneven_slices = True

  def __init__(self, mesh: Mesh, laid_out_tensor: Any, shape: Shape, name: str | None = None):
    super().__init__([], mesh=mesh, name=name or "import")
    if not hasattr(laid_out_tensor, "tensor_list"):
      raise ArgumentError(
        f"{self.name}: laid_out_tensor must be a laid-out tensor, got {shown(laid_out_tensor)}; "
        "use mtf.import_tf_tensor for a whole one"
      )
    self._laid_out_tensor = laid_out_tensor
    dtype = laid_out_tensor.tensor_list[0].dtype
    self._outputs = [Tensor(self, shape, dtype)]
    # The slices are what they are: the layout optimizer must not move them.
    self._splittable_dims, self._unsplittable_dims = (
      self._initialize_splittable_and_unsplittable_dims("unsplittable")
    )

  def verify_layout(self, mesh_impl: MeshImpl) -> None:
    super().verify_layout(mesh_impl)
    expected = mesh_impl.slice_shape(self._outputs[0].shape)
    given = list(self._laid_out_tensor.slice_shape)
    if given != expected:
      raise LayoutError(
        f"{type(self).__name__} {self.name}: the given slices of {self._outputs[0]} have shape "
        f"{given}, the layout {mesh_impl.layout_rules.pairs} on mesh {mesh_impl.shape} asks for "
        f"{expected}"
      )

  def lower(self, lowering: LoweringInProgress) -> None:
    lowering.set_tensor_lowering(self.outputs[0], self._laid_out_tensor)


def import_tf_tensor(
  mesh: Mesh, tf_tensor: Any, shape: ShapeLike | None = None, name: str | None = None
) -> Tensor:
  """Brings a tf.Tensor (or array, or number) into the graph.

  Args:
    mesh: a `Mesh`.
    tf_tensor: anything `tf.convert_to_tensor` takes; its dtype is kept.
    shape: a shape of the same sizes; may be left out for a scalar.
    name: of the operation.

  Raises:
    ShapeError: the sizes differ, or there is no shape for what is not a scalar.
  """
  tf_tensor = _converted(name or "import_tf_tensor", tf_tensor)
  shape = convert_to_shape(shape)
  if shape is None:
    if tf_tensor.shape.rank != 0:
      raise SizeError(
        f"{name or 'import_tf_tensor'} on {mesh!r}: give the dimensions of a tf.Tensor of shape "
        f"{tf_tensor.shape} names (shape=[...])"
      )
    shape = Shape([])
  return ImportOperation(mesh, tf_tensor, shape, name=name).outputs[0]


def import_laid_out_tensor(
  mesh: Mesh, laid_out_tensor: Any, shape: ShapeLike, name: str | None = None
) -> Tensor:
  """Makes a tensor of the graph from its slices.

  Args:
    mesh: a `Mesh`.
    laid_out_tensor: a `LaidOutTensor`: one slice per processor of this program.
    shape: shape of the whole tensor.
    name: of the operation.
  """
  return ImportLaidOutTensorOperation(
    mesh, laid_out_tensor, convert_to_shape(shape), name=name
  ).outputs[0]
