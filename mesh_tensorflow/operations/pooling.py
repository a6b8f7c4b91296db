"""Pooling: maxima and averages of windows, side by side or overlapping."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow.errors import DTypeError, GraphError, LayoutError, ShapeError, SizeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LaidOut
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.operations.binary import multiply
from mesh_tensorflow.operations.constants import ones_like
from mesh_tensorflow.operations.convolution_frames import Frames, Reach, fitted
from mesh_tensorflow.operations.convolution_kernels import gathered, spread
from mesh_tensorflow.operations.convolution_slices import Window
from mesh_tensorflow.program.argument_kinds import RealTensor
from mesh_tensorflow.program.dimensions import Dimension, Shape, list_product
from mesh_tensorflow.program.graph import Operation, Tensor

__all__ = ["PoolBackPropOperation", "PoolOperation", "pool", "pool_backprop", "pool_fn"]


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

  def verify_layout(self, mesh_impl: MeshImpl) -> None:
    for d, k in zip(self._space, self._ksize):
      axis = mesh_impl.tensor_dimension_to_mesh_axis(d)
      if axis is None:
        continue
      n = mesh_impl.shape[axis].size
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


_NAME = "pool"


class _Windows(Operation):
  """Base class: windows over the space of an image, exchanged where it is split.

  Args:
    inputs: the tensors; the first is a `Tensor` of the shape of the image or of the pooled one.
    image: shape of the image.
    pooled: shape of what has one position for each window.
    window: a `Window`.
    ksize: sizes of the windows.
    kind: "MAX" or "AVG".
    name: of the operation.
  """

  def __init__(
    self,
    inputs: list[Tensor],
    image: Shape,
    pooled: Shape,
    window: Window,
    ksize: Sequence[int],
    kind: str,
    name: str,
  ):
    super().__init__(inputs, name=name)
    self._image, self._pooled = image, pooled
    self._window, self._ksize, self._kind = window, list(ksize), kind

  def _frames(self, impl: MeshImpl) -> list[Frames]:
    window = self._window
    space, pooled = window.space_of(self._image.dims), window.space_of(self._pooled.dims)
    before = window.zeros_before([d.size for d in space], self._ksize)
    first = self._image.ndims - window.rank - 1
    reaches = map(Reach, space, pooled, window.spatial_strides, self._ksize, before)
    return [Frames(impl, first + i, reach) for i, reach in enumerate(reaches)]

  def _take(self, lowering: LoweringInProgress, impl: MeshImpl, x: Tensor, fill: float = 0) -> Any:
    """The frames of an image, with `fill` for what lies beyond its ends."""
    frames = self._frames(impl)
    laid_out = lowering.tensors[x].to_laid_out_tensor()
    # First what processors exchange, so that they do not exchange the zeros of other axes.
    for f in sorted(frames, key=lambda f: not f.is_split):
      laid_out = f.take(lowering, laid_out, _NAME)
    if fill == 0 or self._window.padding == "VALID":
      return laid_out
    first = self._image.ndims - self._window.rank - 1
    sizes = [d.size for d in self._window.space_of(self._image.dims)]

    def filled(t: tf.Tensor, *begins: Any) -> tf.Tensor:
      for i, (begin, n) in enumerate(zip(begins, sizes)):
        position = begin + tf.range(t.shape[first + i])
        inside = tf.logical_and(position >= 0, position < n)
        shape = [1] * t.shape.ndims
        shape[first + i] = -1
        t = kernels.where(tf.reshape(inside, shape), t, tf.constant(fill, t.dtype))
      return t

    return impl.slicewise(filled, laid_out, *(f.begin() for f in frames))

  def _give(self, lowering: LoweringInProgress, impl: MeshImpl, dx: LaidOut) -> Any:
    for f in sorted(self._frames(impl), key=lambda f: f.is_split):
      dx = f.give(lowering, dx, _NAME)
    return dx

  def _per_count(self, impl: MeshImpl, t: LaidOut, of_sums: bool) -> Any:
    """Divides by the number of positions of each window that lie in the image.

    Args:
      impl: a `MeshImpl`.
      t: laid out as the pooled tensor: sums of the windows, or averages over their whole size.
      of_sums: which of both.
    """
    window, n = self._window, list_product(self._ksize)
    if window.padding == "VALID":
      return impl.slicewise(lambda a: a * tf.constant(1.0 / n, a.dtype), t) if of_sums else t
    space, pooled = window.space_of(self._image.dims), window.space_of(self._pooled.dims)
    before = window.zeros_before([d.size for d in space], self._ksize)
    factors = []
    for d, m, s, k, b in zip(space, pooled, window.spatial_strides, self._ksize, before):
      begin = np.arange(m.size) * s - b
      count = np.minimum(begin + k, d.size) - np.maximum(begin, 0)
      factors.append((1.0 if of_sums else float(k)) / count)
    first = self._pooled.ndims - window.rank - 1
    begins = impl.laid_out_slice_begin(self._pooled)[first:-1]

    def scaled(a: tf.Tensor, *begins: Any) -> tf.Tensor:
      for i, (factor, begin) in enumerate(zip(factors, begins)):
        here = tf.slice(tf.constant(factor, a.dtype), [begin], [a.shape[first + i]])
        a *= tf.reshape(here, [-1] + [1] * (a.shape.ndims - first - i - 1))
      return a

    return impl.slicewise(scaled, t, *begins)


class WindowPoolOperation(_Windows):
  """Maximum or average of each window; see `pool`.

  Args:
    x: [batch..., space..., channels].
    window: how windows move.
    ksize: their sizes.
    kind: "MAX" or "AVG".
    name: of the operation.
  """

  def __init__(
    self, x: Tensor, window: Window, ksize: Sequence[int], kind: str, name: str | None = None
  ):
    space = window.space_of(x.shape.dims)
    sizes = window.feature_sizes([d.size for d in space], ksize)
    dims = [Dimension(d.name, n) for d, n in zip(space, sizes)]
    pooled = Shape([*window.batch_of(x.shape.dims), *dims, x.shape.dims[-1]])
    super().__init__([x], x.shape, pooled, window, ksize, kind, name or _NAME)
    if min(sizes) < 1:
      raise ShapeError(
        f"{self.name}: windows of {list(ksize)} positions do not fit into {x}, and nothing is left"
      )
    self._outputs = [Tensor(self, pooled, x.dtype)]
    self._initialize_all_dimensions_as_splittable()

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    x, y = self._inputs[0], self._outputs[0]
    inputs = [x, y, grad_ys[0]] if self._kind == "MAX" else [grad_ys[0]]
    return [WindowGradOperation(inputs, self, to_image=True).outputs[0]]

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    x, y = self._inputs[0], self._outputs[0]
    is_max, sizes = self._kind == "MAX", impl.slice_shape(y.shape)
    frames = self._take(lowering, impl, x, _lowest(x.dtype) if is_max else 0)
    rank, strides = self._window.rank, self._window.spatial_strides
    pool_slices = pool_fn(f"{self._kind}_{max(rank, 2)}D")

    def pooled(t: tf.Tensor) -> tf.Tensor:
      if 0 in sizes:
        return tf.zeros(sizes, t.dtype)
      if rank == 1:
        t = tf.expand_dims(t, -3)
        t = pool_slices(t, [1, *self._ksize], [1, *strides], "VALID")
      else:
        t = pool_slices(t, self._ksize, strides, "VALID")
      return tf.reshape(t, sizes)

    laid_out = impl.slicewise(pooled, frames)
    if not is_max:
      laid_out = self._per_count(impl, laid_out, of_sums=False)
    lowering.set_tensor_lowering(y, laid_out)


class WindowGradOperation(_Windows):
  """Gradient of a `WindowPoolOperation`, or the transpose of that gradient.

  Each position gets the sum of what the windows that it is in give: of an average their share, of a
  maximum all, if the position equals it. Transposed, each window gets the sum of its positions.

  Args:
    inputs: [x, y, t] of a maximum, [t] of an average; t is of y's shape, or of x's if transposed.
    op: the pooling.
    to_image: whether it is the gradient, not what that is transposed to.
  """

  def __init__(self, inputs: list[Tensor], op: _Windows, to_image: bool):
    name = f"{_NAME}_backprop" if to_image else f"{_NAME}_backprop_transpose"
    super().__init__(inputs, op._image, op._pooled, op._window, op._ksize, op._kind, name)
    self._to_image = to_image
    shape = self._image if to_image else self._pooled
    self._outputs = [Tensor(self, shape, inputs[-1].dtype)]
    self._initialize_all_dimensions_as_splittable()

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    # Linear in the last input; the choice of maxima has no gradient.
    *chosen, _ = self._inputs
    back = WindowGradOperation([*chosen, grad_ys[0]], self, not self._to_image)
    return [*(None for _ in chosen), back.outputs[0]]

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    is_max, out = self._kind == "MAX", self._outputs[0]
    given = lowering.tensors[self._inputs[-1]].to_laid_out_tensor()
    chosen: list[Any] = []
    if is_max:
      x, y, _ = self._inputs
      chosen = [self._take(lowering, impl, x, _lowest(x.dtype)), lowering.tensors[y]]
    taps, sizes = self._taps(), impl.slice_shape(self._pooled)
    space = self._window.space_of(sizes)

    def where_chosen(tap: Sequence[int], t: tf.Tensor, chosen: Sequence[tf.Tensor]) -> tf.Tensor:
      if not chosen:
        return t
      x, y = chosen
      is_max = kernels.elementwise(tf.equal, self._met(x, tap, space), y)
      return kernels.where(is_max, t, tf.zeros([], t.dtype))

    if self._to_image:
      lengths = [f.size for f in self._frames(impl)]
      if not is_max:
        given = self._per_count(impl, given, of_sums=True)

      def spread_out(t: tf.Tensor, *chosen: tf.Tensor) -> tf.Tensor:
        return tf.add_n([self._back(where_chosen(p, t, chosen), p, lengths) for p in taps])

      laid_out = self._give(lowering, impl, impl.slicewise(spread_out, given, *chosen))
    else:
      frames = self._take(lowering, impl, self._inputs[-1])

      def summed(t: tf.Tensor, *chosen: tf.Tensor) -> tf.Tensor:
        return tf.add_n([where_chosen(p, self._met(t, p, space), chosen) for p in taps])

      laid_out = impl.slicewise(summed, frames, *chosen)
      if not is_max:
        laid_out = self._per_count(impl, laid_out, of_sums=True)
    lowering.set_tensor_lowering(out, laid_out)

  def _taps(self) -> list[tuple[int, ...]]:
    """The positions in a window."""
    return list(itertools.product(*(range(k) for k in self._ksize)))

  def _met(self, frame: tf.Tensor, tap: Sequence[int], sizes: Sequence[int]) -> tf.Tensor:
    """Slices the element at position `tap` of every window out of a frame."""
    first = frame.shape.ndims - self._window.rank - 1
    for i, (t, s, n) in enumerate(zip(tap, self._window.spatial_strides, sizes)):
      frame = gathered(frame, first + i, s, n, t)
    return frame

  def _back(self, y: tf.Tensor, tap: Sequence[int], lengths: Sequence[int]) -> tf.Tensor:
    """Transpose of `_met`: puts each window's value at its position `tap`, zeros elsewhere."""
    first = y.shape.ndims - self._window.rank - 1
    for i, (t, s, n) in enumerate(zip(tap, self._window.spatial_strides, lengths)):
      y = spread(y, first + i, s)
      y = fitted(y, first + i, t, n - t - y.shape[first + i])
    return y


def _lowest(dtype: tf.DType) -> Any:
  """Smallest value of the dtype: the padding of a maximum."""
  return -np.inf if dtype.is_floating else dtype.min


def pool(
  x: RealTensor,
  ksize: Sequence[int],
  strides: Sequence[int] | None = None,
  padding: str = "VALID",
  kind: str = "MAX",
  *,
  name: str | None = None,
) -> Tensor:
  """Maximum or average of windows, which may overlap, in one to three dimensions.

  All dimensions may be split over the mesh: processors exchange what the windows of their part of
  the output reach. As in TensorFlow, positions beyond the image take no part. Of a maximum each
  position that equals it gets the whole gradient, also where there are several.

  Args:
    x: a `Tensor` [batch..., space..., channels], as many dimensions of space as `ksize` has sizes.
    ksize: sizes of the windows.
    strides: from one window to the next; `ksize` by default.
    padding: "SAME" or "VALID"; sizes are TensorFlow's.
    kind: "MAX" or "AVG".
    name: of the operation.

  Returns:
    A `Tensor` [batch..., new space..., channels]; the dimensions keep their names.

  Raises:
    ShapeError: x has too few dimensions or is too small, or not as many strides as sizes.
    GraphError: another `kind`.
    DTypeError: an average of integers.
  """
  if kind not in ("MAX", "AVG"):
    raise GraphError(f"pool of {x}: kind must be MAX or AVG, got {kind!r}")
  if kind == "AVG" and not x.dtype.is_floating:
    raise DTypeError(f"pool of {x}: averages need a floating dtype; cast it (mtf.cast)")
  sizes = [operator.index(k) for k in ksize]
  steps = sizes if strides is None else [operator.index(s) for s in strides]
  rank = len(sizes)
  if not 1 <= rank <= 3 or min(sizes) < 1 or len(steps) != rank:
    raise ShapeError(
      f"pool of {x}: ksize must be one to three numbers of at least 1, and strides as many, got "
      f"{sizes} and {steps}"
    )
  if x.shape.ndims < rank + 1:
    raise ShapeError(
      f"pool needs batch dimensions, {rank} spatial dimensions and a channel dimension, got {x}"
    )
  if not isinstance(padding, str):
    raise ShapeError(f"pool of {x}: padding must be 'SAME' or 'VALID', got {padding!r}")
  window = Window("pool", rank, [1, *steps, 1], padding)
  return WindowPoolOperation(x, window, sizes, kind, name).outputs[0]
