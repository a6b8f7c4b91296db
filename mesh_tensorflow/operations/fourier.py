"""The operation of discrete Fourier transforms, over dimensions that are whole or split.

X[k] = sum over j of x[j] exp(-2 pi i j k / n) along each dimension; the inverse has the other sign
and divides by n. Where the mesh splits a dimension that is transformed, each comes together for its
turn by the exchanges that move the fewest bytes (`meshes.redistribution`). Of a field [x, y, z]
with x and y split these are two, if the output [kx, ky, kz] has ky split as x was, and kz as y was:
then each processor sends, of its slice of s bytes, s (n - 1) / n along each of the two mesh axes of
n. With the layout of the input kept it takes two more.

Real fields have spectra with X[-k] = conj(X[k]): `rfft` and its kind keep n // 2 + 1 frequencies of
the last dimension, and move half as many bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow.errors import DimensionError, DTypeError, ShapeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.redistribution import Plan
from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.operations.constants import constant
from mesh_tensorflow.operations.einsum import einsum
from mesh_tensorflow.operations.fourier_split import received, split_over, transform_split
from mesh_tensorflow.operations.scalar import ScalarMultiplyOperation
from mesh_tensorflow.operations.whole_dimensions import (
  along_last,
  holds_of,
  plan_along,
  run_plan,
)
from mesh_tensorflow.program.dimensions import (
  Dimension,
  DimensionLike,
  Shape,
  convert_to_dimension,
  list_product,
  no_such_dimension,
)
from mesh_tensorflow.program.graph import Operation, Tensor


class FourierOperation(Operation):
  """A discrete Fourier transform, or its inverse; see `fft3d` and `rfft3d`.

  Args:
    x: a `Tensor`: complex, or floating for the forward transform of a real tensor.
    dims: the dimensions of x that are transformed.
    new_dims: what they become, each in its place.
    inverse: whether it is the inverse transform.
    of_real: whether the side of positions is real: of the last of `dims` the side of frequencies
      has n // 2 + 1.
    name: of the operation.
  """

  # Its plan may use mesh axes that split none of it.
  exchanges_over_whole_mesh = True

  def __init__(
    self,
    x: Tensor,
    dims: Sequence[DimensionLike],
    new_dims: Sequence[DimensionLike],
    inverse: bool = False,
    of_real: bool = False,
    name: str | None = None,
  ):
    super().__init__([x], name=name or "fourier")
    self._dims = [convert_to_dimension(d) for d in dims]
    self._new_dims = [convert_to_dimension(d) for d in new_dims]
    self._inverse, self._of_real = inverse, of_real
    for d in self._dims:
      if d not in x.shape:
        raise no_such_dimension(self.name, d, x)
    if len(set(self._dims)) < len(self._dims):
      raise DimensionError(f"{self.name} of {x}: {Shape([self._dims[0]])} is transformed twice")
    self._check_dtype(x)
    self._check_sizes(x)
    renamed = dict(zip(self._dims, self._new_dims))
    parts = {tf.float32: tf.complex64, tf.float64: tf.complex128}
    dtype = x.dtype
    if of_real:
      dtype = x.dtype.real_dtype if inverse else parts[x.dtype]
    self._outputs = [Tensor(self, Shape([renamed.get(d, d) for d in x.shape]), dtype)]
    self._axes = [x.shape.dims.index(d) for d in self._dims]
    self._initialize_all_dimensions_as_splittable()

  def _check_dtype(self, x: Tensor) -> None:
    if self._of_real and not self._inverse:
      if x.dtype not in (tf.float32, tf.float64):
        advice = "use mtf.fft of a complex one" if x.dtype.is_complex else "cast it (mtf.cast)"
        raise DTypeError(f"{self.name}: the input must be float32 or float64, got {x}; {advice}")
    elif not x.dtype.is_complex:
      real = " or use mtf.rfft, of a real one," if not self._of_real and not self._inverse else ""
      raise DTypeError(
        f"{self.name}: the input must be complex, got {x};{real} cast it: mtf.cast(x, tf.complex64)"
      )

  def _check_sizes(self, x: Tensor) -> None:
    for d in (*self._dims, *self._new_dims):
      if not d.size:
        raise ShapeError(f"{self.name} of {x}: {d.name}=0 has no position to transform")
    want = [d.size for d in self._dims]
    if self._of_real and not self._inverse:
      want[-1] = want[-1] // 2 + 1
    sizes = [d.size for d in self._new_dims]
    given = list(sizes)
    if self._of_real and self._inverse and given:
      given[-1] = given[-1] // 2 + 1
    if given != want:
      legal = [str(n) for n in want]
      if self._of_real and self._inverse:
        legal[-1] = f"{2 * want[-1] - 2} or {2 * want[-1] - 1}"
      raise ShapeError(
        f"{self.name} of {x}: the new dimensions {Shape(self._new_dims)} must have the sizes "
        f"{', '.join(legal)}, for {Shape(self._dims)}"
      )

  @property
  def size(self) -> int:
    """Number of positions, by which the inverse divides."""
    return list_product(d.size for d in (self._new_dims if self._inverse else self._dims))

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    # The matrix is symmetric, so its conjugate transpose is n times the inverse transform (and of
    # the inverse, the transform by n). A real tensor has each frequency but 0 (and n / 2) twice.
    dy = grad_ys[0]
    if self._of_real and not self._inverse:
      dy = self._weighted(dy, self._new_dims[-1], self._dims[-1].size, 0.5)
    dx = FourierOperation(
      dy, self._new_dims, self._dims, not self._inverse, self._of_real, f"{self.name}_grad"
    ).outputs[0]
    if self._of_real and self._inverse:
      dx = self._weighted(dx, self._dims[-1], self._new_dims[-1].size, 2.0)
    scale = 1.0 / self.size if self._inverse else float(self.size)
    return [ScalarMultiplyOperation(dx, scale).outputs[0]]

  def _weighted(self, x: Tensor, half: Dimension, n: int, weight: float) -> Tensor:
    """Multiplies by `weight` the frequencies of x that stand for two."""
    weights = np.full([half.size], weight)
    weights[0] = 1.0
    if n % 2 == 0:
      weights[-1] = 1.0
    return einsum([x, constant(x.mesh, weights, Shape([half]), x.dtype)], output_shape=x.shape)

  def plan(self, impl: Any) -> tuple[Plan, int]:
    """Plans the exchanges and transforms on a mesh, and the padded size of the halved dimension.

    Args:
      impl: a `MeshImpl`.
    """
    before, after = self._inputs[0].shape, self._outputs[0].shape
    in_bytes, out_bytes = self._inputs[0].dtype.size, self._outputs[0].dtype.size
    if not self._of_real:
      steps = plan_along(
        impl, before, after, self._axes, weight_before=in_bytes, weight_after=out_bytes
      )
      return steps, 0
    half = self._axes[-1]
    frequencies = before if self._inverse else after
    found = []
    for size in _padded_sizes(impl, frequencies, half):
      sizes = frequencies.to_integer_list
      sizes[half] = size
      steps = plan_along(
        impl,
        before,
        after,
        self._axes,
        sizes_before=sizes if self._inverse else None,
        sizes_after=None if self._inverse else sizes,
        first=None if self._inverse else half,
        last=half if self._inverse else None,
        weight_before=in_bytes,
        weight_after=out_bytes,
      )
      found.append((steps, size))
    return min(found, key=lambda f: (f[0].received, f[1]))

  def _split_over(self, impl: Any, steps: Plan) -> int | None:
    """The mesh axis of a dimension that is transformed as it lies; None: the plan moves less."""
    x, y = self._inputs[0], self._outputs[0]
    if self._of_real or len(self._axes) > 1:
      return None
    axis = split_over(impl, x.shape, y.shape, self._axes[0])
    if axis is None or received(impl, x.shape, axis) * x.dtype.size > steps.received:
      return None
    return axis

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    steps, padded = self.plan(impl)
    slices = lowering.tensors[self._inputs[0]].to_laid_out_tensor()
    mesh_axis = self._split_over(impl, steps)
    if mesh_axis is not None:
      done = transform_split(
        lowering, impl, slices, self._axes[0], mesh_axis, self._inverse, "fourier_op"
      )
      lowering.set_tensor_lowering(self._outputs[0], done)
      return
    kept = (self._dims if self._inverse else self._new_dims)[-1].size
    half = self._axes[-1]

    def transform(t: tf.Tensor, axis: int) -> tf.Tensor:
      if not self._of_real or axis != half:
        return along_last(tf.signal.ifft if self._inverse else tf.signal.fft, t, axis)
      if self._inverse:
        t = t if padded == kept else kernels.cut_axis(t, half, 0, kept)
        n = self._new_dims[-1].size
        return along_last(lambda v: tf.signal.irfft(v, [n]), t, half)
      t = along_last(tf.signal.rfft, t, half)
      return t if padded == kept else kernels.pad(t, half, 0, padded - kept)

    is_padded = self._of_real and padded != kept
    if is_padded and self._inverse:
      slices = impl.slicewise(lambda t: kernels.pad(t, half, 0, padded - kept), slices)
    slices = run_plan(lowering, impl, slices, steps.steps, transform, "fourier_op")
    if is_padded and not self._inverse:
      slices = impl.slicewise(lambda t: kernels.cut_axis(t, half, 0, kept), slices)
    lowering.set_tensor_lowering(self._outputs[0], slices)


def _padded_sizes(impl: Any, shape: Shape, axis: int) -> list[int]:
  """Candidate sizes of a dimension while computing: its own, and multiples of mesh sizes.

  n // 2 + 1 is odd for most n; padding by a few frequencies lets the mesh split it in between,
  which saves an exchange.
  """
  size = shape[axis].size
  if holds_of(impl, shape)[axis]:
    return [size]  # Its slices cannot be padded at one end.
  sizes = [m.size for m in impl.shape]
  return sorted({size, *(-(-size // n) * n for n in (*sizes, math.prod(sizes)))})
