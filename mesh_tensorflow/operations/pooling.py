"""Pooling over windows that do not overlap, in two and three dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import DTypeError, GraphError, LayoutError, ShapeError, SizeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.operations.binary import multiply
from mesh_tensorflow.operations.constants import ones_like
from mesh_tensorflow.operations.convolution_slices import Window
from mesh_tensorflow.program.dimensions import Dimension, Shape, list_product
from mesh_tensorflow.program.graph import Operation, Tensor

__all__ = ["PoolBackPropOperation", "PoolOperation", "pool_backprop", "pool_fn"]

_KINDS = {"MAX_2D": ("MAX", 2), "AVG_2D": ("AVG", 2), "MAX_3D": ("MAX", 3), "AVG_3D": ("AVG", 3)}
# The dtypes for which TensorFlow pools in three dimensions on every kind of device.
_POOL_3D_DTYPES = (tf.float32, tf.bfloat16)


def pool_fn(pool_fn_string: str) -> Callable[..., tf.Tensor]:
  """A function that pools a tf.Tensor [batch..., space..., channels].

  Args:
    pool_fn_string: "MAX_2D", "AVG_2D", "MAX_3D" or "AVG_3D".

  Returns:
    A function of (tf.Tensor, ksize, strides, padding); ksize and strides have one number for
    each spatial dimension.

  Raises:
    GraphError: another string.
  """
  kind, rank = _kind_and_rank(pool_fn_string)

  def pool(x: tf.Tensor, ksize: Sequence[int], strides: Sequence[int], padding: str) -> tf.Tensor:
    sizes = x.shape.as_list()
    batch, ndims = sizes[: -rank - 1], len(sizes)
    if 0 in sizes:
      # No channels: some kernels, and the sizes that TensorFlow infers, refuse them.
      window = Window("pool", rank, [1, *strides, 1], padding)
      pooled = window.feature_sizes(sizes[-rank - 1 : -1], ksize)
      return tf.zeros([*batch, *pooled, sizes[-1]], x.dtype)
    if ndims != rank + 2:
      x = tf.reshape(x, [list_product(batch), *sizes[-rank - 1 :]])
    y = _pool(kind, x, list(ksize), list(strides), padding)
    return y if ndims == rank + 2 else tf.reshape(y, [*batch, *y.shape.as_list()[1:]])

  return pool


def _kind_and_rank(pool_fn_string: str) -> tuple[str, int]:
  if pool_fn_string not in _KINDS:
    raise GraphError(f"pool_fn_string must be one of {', '.join(_KINDS)}, got {pool_fn_string!r}")
  return _KINDS[pool_fn_string]


def _pool(kind: str, x: tf.Tensor, ksize: list[int], strides: list[int], padding: str) -> tf.Tensor:
  """Pools [batch, space..., channels]."""
  kwargs = {"ksize": [1, *ksize, 1], "strides": [1, *strides, 1], "padding": padding}
  if len(ksize) == 2:
    if kind == "MAX":
      return tf.raw_ops.MaxPool(input=x, **kwargs)
    return tf.raw_ops.AvgPool(value=x, **kwargs)
  if x.dtype in _POOL_3D_DTYPES:
    return (tf.raw_ops.MaxPool3D if kind == "MAX" else tf.raw_ops.AvgPool3D)(input=x, **kwargs)
  # First the height and width of each depth, then the depth.
  # The same values: a maximum of maxima is the maximum, and the planes of one window, being of one
  # size, have the mean of their means as its mean.
  n, depth, *plane, channels = x.shape.as_list()
  y = _pool(kind, tf.reshape(x, [n * depth, *plane, channels]), ksize[1:], strides[1:], padding)
  *_, height, width, _ = y.shape.as_list()
  y = tf.reshape(y, [n, depth, height * width, channels])
  y = _pool(kind, y, [ksize[0], 1], [strides[0], 1], padding)
  return tf.reshape(y, [n, y.shape[1], height, width, channels])


class _Pooling(Operation):
  """Base class: windows of the spatial dimensions of an input."""

  def _set_windows(
    self, x: Tensor, ksize: Sequence[int], strides: Sequence[int], pool_fn_string: str
  ) -> None:
    self._pool_fn_string = pool_fn_string
    self._kind, self._rank = _kind_and_rank(pool_fn_string)
    self._ksize = list(ksize)
    if list(strides) != self._ksize or len(self._ksize) != self._rank or min(self._ksize) < 1:
      raise SizeError(
        f"{self.name}: {pool_fn_string} of {x} needs ksize and strides that are equal, "
        f"{self._rank} numbers of at least 1, got ksize {list(ksize)} and strides {list(strides)}"
      )
    if x.shape.ndims < self._rank + 1:
      raise ShapeError(
        f"{self.name}: {pool_fn_string} needs batch dimensions, {self._rank} spatial dimensions "
        f"and a channel dimension, got {x}"
      )
    if x.dtype in (tf.bool, tf.string) or x.dtype.is_complex:
      raise DTypeError(f"{self.name}: windows are of real numbers, got {x}; cast it (mtf.cast)")
    if self._kind == "AVG" and not x.dtype.is_floating:
      raise DTypeError(f"{self.name}: averages need a floating dtype, got {x}; cast it (mtf.cast)")
    self._space = x.shape[-self._rank - 1 : -1]
    for d, k in zip(self._space, self._ksize):
      if k > d.size:
        raise ShapeError(
          f"{self.name}: a window of size {k} does not fit into dimension {d.name}={d.size} of {x}"
        )

  def _pooled_shape(self, x: Tensor) -> Shape:
    pooled = [Dimension(d.name, d.size // k) for d, k in zip(self._space, self._ksize)]
    return Shape([*x.shape[: -self._rank - 1], *pooled, x.shape[-1]])

  def verify_layout(self, mesh_impl: Any) -> None:
    for d, k in zip(self._space, self._ksize):
      axis = mesh_impl.tensor_dimension_to_mesh_axis(d)
      n = 1 if axis is None else mesh_impl.shape[axis].size
      if n > 1 and d.size % (n * k):
        raise LayoutError(
          f"{type(self).__name__} {self.name}: spatial dimension {d.name}:{d.size} of "
          f"{self._inputs[0]} cannot be split over mesh axis {mesh_impl.shape[axis].name}:{n}: "
          f"each part must be a multiple of the window size {k}; drop the rule "
          f"{d.name}:{mesh_impl.shape[axis].name}, or rename the dimension "
          "(mtf.rename_dimension to a name without a rule)"
        )
    super().verify_layout(mesh_impl)


class PoolOperation(_Pooling):
  """Maximum or average of each window [batch..., space..., channels].

  The windows do not overlap; spatial dimensions keep their names and get the size // ksize.
  What is left over at their ends is dropped. Spatial dimensions may be split if each part is
  a multiple of the window size.

  Args:
    x: a `Tensor` with any number of batch dimensions.
    ksize: window size of each spatial dimension.
    strides: stride of each spatial dimension, equal to `ksize`.
    pool_fn_string: "MAX_2D", "AVG_2D", "MAX_3D" or "AVG_3D".
    name: of the operation.

  Raises:
    SizeError: strides differ from ksize, or are too many or too few.
    ShapeError: x has too few dimensions, or is smaller than a window.
    GraphError: another `pool_fn_string`.
  """

  def __init__(
    self,
    x: Tensor,
    ksize: Sequence[int],
    strides: Sequence[int],
    pool_fn_string: str,
    name: str | None = None,
  ):
    super().__init__([x], name=name or "pool")
    self._set_windows(x, ksize, strides, pool_fn_string)
    self._outputs = [Tensor(self, self._pooled_shape(x), x.dtype)]
    self._splittable_dims, self._unsplittable_dims = (
      self._initialize_splittable_and_unsplittable_dims("splittable", [d.name for d in self._space])
    )

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    dx = pool_backprop(
      self._inputs[0], self._outputs[0], grad_ys[0], self._ksize, self._ksize, self._pool_fn_string
    )
    return [dx]

  def lower(self, lowering: LoweringInProgress) -> None:
    pool = pool_fn(self._pool_fn_string)
    laid_out = lowering.mesh_impl(self).slicewise(
      lambda t: pool(t, self._ksize, self._ksize, "VALID"), lowering.tensors[self._inputs[0]]
    )
    lowering.set_tensor_lowering(self._outputs[0], laid_out)


class PoolBackPropOperation(_Pooling):
  """Gradient of a `PoolOperation`; see `pool_backprop`."""

  def __init__(
    self,
    x: Tensor,
    y: Tensor,
    dy: Tensor,
    ksize: Sequence[int],
    strides: Sequence[int],
    pool_fn_string: str,
    name: str | None = None,
  ):
    super().__init__([x, y, dy], name=name or "pool_backprop")
    self._set_windows(x, ksize, strides, pool_fn_string)
    want = self._pooled_shape(x)
    if y.shape != want or dy.shape != want:
      raise ShapeError(
        f"{self.name}: {x} pooled by {self._ksize} has the shape {want}, not that of {y} or of "
        f"its gradient {dy}"
      )
    if self._kind == "MAX" and x.dtype != y.dtype:
      raise DTypeError(f"{self.name}: {y} is not of the dtype of {x}, of which it is the maximum")
    self._outputs = [Tensor(self, x.shape, dy.dtype)]
    self._initialize_all_dimensions_as_splittable()

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    # Linear in dy: each dy gets what its window has, of a maximum only where the maximum is.
    x, y, dy = self._inputs
    spread, ksize = grad_ys[0], self._ksize
    if self._kind == "MAX":
      chosen = pool_backprop(x, y, ones_like(dy), ksize, ksize, self._pool_fn_string)
      spread = multiply(chosen, spread)
    # A sum over each window, for which there is no pooling: the average times the window's size.
    average = PoolOperation(spread, ksize, ksize, f"AVG_{self._rank}D").outputs[0]
    windows = list_product(ksize)
    return [None, None, multiply(average, float(windows)) if self._kind == "MAX" else average]

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    x, y, dy = [lowering.tensors[t] for t in self._inputs]
    if self._kind == "MAX":
      laid_out = impl.slicewise(self._max_gradient, x, y, dy)
    else:
      sizes = impl.slice_shape(self._outputs[0].shape)
      laid_out = impl.slicewise(lambda g: self._avg_gradient(g, sizes), dy)
    lowering.set_tensor_lowering(self._outputs[0], laid_out)

  def _max_gradient(self, x: tf.Tensor, y: tf.Tensor, dy: tf.Tensor) -> tf.Tensor:
    """Every position that equals its window's maximum gets all of dy."""
    # Not TensorFlow's MaxPoolGrad, which gives dy to one of equal positions.
    sizes, pooled = x.shape.as_list(), y.shape.as_list()
    used = self._used(sizes, pooled)
    if used != sizes:
      x = kernels.cut(x, [0] * len(sizes), used)
    is_max = kernels.elementwise(
      tf.equal,
      tf.reshape(x, self._windows(pooled, self._ksize)),
      tf.reshape(y, self._per_window(pooled)),
    )
    dx = kernels.where(is_max, tf.reshape(dy, self._per_window(pooled)), tf.zeros([], dy.dtype))
    return self._whole(dx, used, sizes)

  def _avg_gradient(self, dy: tf.Tensor, sizes: list[int]) -> tf.Tensor:
    """Every position gets its share of dy."""
    pooled = dy.shape.as_list()
    if 0 in sizes:
      return tf.zeros(sizes, dy.dtype)
    if self._rank == 2 or dy.dtype in _POOL_3D_DTYPES:
      first = len(sizes) - self._rank - 1
      flat = [list_product(sizes[:first]), *sizes[first:]]
      spread = tf.raw_ops.AvgPoolGrad if self._rank == 2 else tf.raw_ops.AvgPool3DGrad
      if first != 1:
        dy = tf.reshape(dy, [flat[0], *pooled[first:]])
      window = [1, *self._ksize, 1]
      dx = spread(orig_input_shape=flat, grad=dy, ksize=window, strides=window, padding="VALID")
      return dx if first == 1 else tf.reshape(dx, sizes)
    share = dy * tf.constant(1.0 / list_product(self._ksize), dy.dtype)
    dx = kernels.broadcast_to(
      tf.reshape(share, self._per_window(pooled)), self._windows(pooled, self._ksize)
    )
    return self._whole(dx, self._used(sizes, pooled), sizes)

  def _windows(self, pooled: list[int], window: Sequence[int]) -> list[int]:
    """Sizes with an axis for the windows and one for the place within, for each dimension."""
    first = len(pooled) - self._rank - 1
    pairs = [n for pair in zip(pooled[first:-1], window) for n in pair]
    return [list_product(pooled[:first]), *pairs, pooled[-1]]

  def _per_window(self, pooled: list[int]) -> list[int]:
    return self._windows(pooled, [1] * self._rank)

  def _used(self, sizes: list[int], pooled: list[int]) -> list[int]:
    """Sizes of the part of the input that is in some window."""
    first = len(sizes) - self._rank - 1
    space = [n * k for n, k in zip(pooled[first:-1], self._ksize)]
    return [*sizes[:first], *space, sizes[-1]]

  def _whole(self, dx: tf.Tensor, used: list[int], sizes: list[int]) -> tf.Tensor:
    if used == sizes:
      return tf.reshape(dx, sizes)
    first = len(sizes) - self._rank - 1
    paddings = [[0, 0], *([0, n - u] for n, u in zip(sizes[first:], used[first:]))]
    dx = tf.pad(tf.reshape(dx, [list_product(sizes[:first]), *used[first:]]), paddings)
    return dx if first == 1 else tf.reshape(dx, sizes)


def pool_backprop(
  x: Tensor,
  y: Tensor,
  dy: Tensor,
  ksize: Sequence[int],
  strides: Sequence[int],
  pool_fn_string: str,
  name: str | None = None,
) -> Tensor:
  """Gradient of the input of a `PoolOperation`.

  An average shares dy equally; of a maximum every position that equals it gets all of dy, also
  where there are several. Positions that are in no window get zero.

  Args:
    x: the input.
    y: the output.
    dy: the gradient of the output.
    ksize: window sizes of the pooling.
    strides: strides of the pooling, equal to `ksize`.
    pool_fn_string: "MAX_2D", "AVG_2D", "MAX_3D" or "AVG_3D".
    name: of the operation.

  Returns:
    A `Tensor` of the shape of x and the dtype of dy.

  Raises:
    SizeError: strides differ from ksize, or are too many or too few.
    ShapeError: the shapes do not fit together.
  """
  return PoolBackPropOperation(x, y, dy, ksize, strides, pool_fn_string, name).outputs[0]
