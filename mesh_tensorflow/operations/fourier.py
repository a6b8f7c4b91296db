"""Discrete Fourier transforms over one to three dimensions, which may be split.

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

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow.arguments import families
from mesh_tensorflow.errors import DimensionError, DTypeError, ShapeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LaidOut
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.redistribution import Plan
from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.operations.constants import constant
from mesh_tensorflow.operations.einsum import einsum
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

__all__ = [
  "fft",
  "fft2d",
  "fft3d",
  "ifft",
  "ifft2d",
  "ifft3d",
  "irfft",
  "irfft2d",
  "irfft3d",
  "rfft",
  "rfft2d",
  "rfft3d",
]


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

  def plan(self, impl: MeshImpl) -> tuple[Plan, int]:
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

  def _split_over(self, impl: MeshImpl, steps: Plan) -> int | None:
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


def _padded_sizes(impl: MeshImpl, shape: Shape, axis: int) -> list[int]:
  """Candidate sizes of a dimension while computing: its own, and multiples of mesh sizes.

  n // 2 + 1 is odd for most n; padding by a few frequencies lets the mesh split it in between,
  which saves an exchange.
  """
  size = shape[axis].size
  if holds_of(impl, shape)[axis]:
    return [size]  # Its slices cannot be padded at one end.
  sizes = [m.size for m in impl.shape]
  return sorted({size, *(-(-size // n) * n for n in (*sizes, math.prod(sizes)))})


def split_over(impl: MeshImpl, before: Shape, after: Shape, axis: int) -> int | None:
  """Mesh axis over which a dimension stays split during the transform; None if it cannot.

  Args:
    impl: a `MeshImpl`.
    before: the shape of the input.
    after: the shape of the output.
    axis: number of the dimension.
  """
  holds = holds_of(impl, before)[axis]
  if len(holds) != 1 or holds != holds_of(impl, after)[axis]:
    return None
  return holds[0] if before[axis].size % impl.shape[holds[0]].size ** 2 == 0 else None


def received(impl: MeshImpl, shape: Shape, mesh_axis: int) -> int:
  """Number of elements that each processor receives.

  Args:
    impl: a `MeshImpl`.
    shape: of the tensor.
    mesh_axis: mesh axis that splits the transformed dimension, from `split_over`.
  """
  p: int = impl.shape[mesh_axis].size
  return 3 * (p - 1) * (int(list_product(impl.slice_shape(shape))) // p)


def transform_split(
  lowering: LoweringInProgress,
  impl: MeshImpl,
  slices: LaidOut,
  axis: int,
  mesh_axis: int,
  inverse: bool,
  what: str,
) -> Any:
  """The transform of complex slices along a dimension that stays split, without a gather.

  n = p s numbers lie in blocks of s on p processors. With j = q s + t and k = a + p b, the
  transform X[k] = sum over j of x[j] w_n^(j k), w_n = exp(-2 pi i / n), is (Gentleman and Sande,
  1966; the "four steps" of Bailey, 1990)

    X[a + p b] = sum over t of w_s^(t b) (w_n^(t a) sum over q of x[q s + t] w_p^(q a)).

  An all-to-all brings all q of s / p numbers t to a processor, which sums over them; another one
  all t of one a; and a third one puts the result into blocks again. Each processor receives
  3 s (p - 1) / p numbers, where gathering receives s (p - 1), holds s numbers, not n, and does its
  p-th part of the work. p must divide s.

  Args:
    lowering: gets counters of what is moved.
    impl: the `MeshImpl`.
    slices: a laid-out tensor.
    axis: number of the tensor axis.
    mesh_axis: mesh axis that splits it, from `split_over`.
    inverse: whether it is the inverse.
    what: for the counters.

  Returns:
    A laid-out tensor, of the same layout.
  """
  p, sizes = impl.shape[mesh_axis].size, list(slices.to_laid_out_tensor().slice_shape)
  part = sizes[axis] // p
  fn = tf.signal.ifft if inverse else tf.signal.fft

  def exchanged(x: LaidOut) -> Any:
    lowering.add_counter(f"alltoall/{mesh_axis}/{what}", list_product(sizes) * impl.size)
    return impl.alltoall(x, mesh_axis, axis, axis)

  def over_processors(x: tf.Tensor, coordinate: tf.Tensor) -> tf.Tensor:
    parts = tf.reshape(x, [*sizes[:axis], p, part, *sizes[axis + 1 :]])
    y = along_last(fn, parts, axis)
    factors = _factors(p, part, coordinate, x.dtype, inverse)
    return tf.reshape(y * tf.reshape(factors, [p, part] + [1] * (len(sizes) - axis - 1)), sizes)

  def in_order(x: tf.Tensor) -> tf.Tensor:
    """From one a after another to a + p b."""
    parts = tf.reshape(x, [*sizes[:axis], p, part, *sizes[axis + 1 :]])
    order = list(range(len(sizes) + 1))
    order[axis : axis + 2] = [axis + 1, axis]
    return tf.reshape(tf.transpose(parts, order), sizes)

  slices = exchanged(slices)
  slices = exchanged(impl.slicewise(over_processors, slices, impl.laid_out_pcoord(mesh_axis)))
  slices = exchanged(impl.slicewise(lambda x: along_last(fn, x, axis), slices))
  return impl.slicewise(in_order, slices)


def _factors(p: int, part: int, coordinate: tf.Tensor, dtype: tf.DType, inverse: bool) -> tf.Tensor:
  """w_n^(t a) for all a and the t of a processor: [p, part]."""
  n = p * p * part
  t = tf.cast(coordinate, tf.int64) * part + tf.range(part, dtype=tf.int64)
  # The product as an integer: of a large angle little would be left as a floating number.
  turns = tf.range(p, dtype=tf.int64)[:, tf.newaxis] * t % n
  angle = tf.cast(turns, dtype.real_dtype) * ((2.0 if inverse else -2.0) * math.pi / n)
  return tf.complex(tf.cos(angle), tf.sin(angle))


@dataclasses.dataclass(frozen=True)
class _Transform(families.Family):
  """A transform over `rank` dimensions, as a public function; see `FourierOperation`."""

  rank: int
  inverse: bool = False
  of_real: bool = False

  @property
  def defaults(self) -> Mapping[str, Any]:
    return {"name": self.name}

  @property
  def words(self) -> Mapping[str, str]:
    number = {1: "one dimension", 2: "two dimensions", 3: "three dimensions"}[self.rank]
    forward = self.name.removeprefix("i")
    words = {"number": number, "x": "a complex `Tensor`", "output": "complex", "sizes": ""}
    words["summary"] = f"Discrete Fourier transform over {number}, as `tf.signal.{self.name}`"
    if self.inverse:
      words["summary"] = f"Inverse of `{forward}`, divided by the number of positions"
    if self.of_real and self.inverse:
      words["x"] += ", with the frequencies 0 to n // 2 of the last dimension"
      words["sizes"] = ", but the last of n, which may be even or odd and is even by default"
      words["output"] = "real"
    elif self.of_real:
      words["summary"] = (
        f"`{forward[1:]}` of a real tensor: the frequencies 0 to n // 2 of the last"
      )
      words["x"] = "a float32 or float64 `Tensor`"
      words["sizes"] = ", but the last of n // 2 + 1"
    return words

  def over_one(
    self,
    x: Tensor,
    dim: DimensionLike | None = None,
    new_dim: DimensionLike | None = None,
    name: str = "",
  ) -> Tensor:
    """{summary}.

    Args:
      x: {x}. It may have other dimensions besides.
      dim: a dimension of it, which may be split; the last by default.
      new_dim: what it becomes, of its size{sizes}; by default it keeps its name, and so its layout.
      name: of the operation.

    Returns:
      A {output} `Tensor`.

    Raises:
      DimensionError: x has no such dimension.
      DTypeError: x is of another dtype.
      ShapeError: the new dimension has another size.
    """
    dims, new_dims = (None if d is None else [d] for d in (dim, new_dim))
    return self.over_several(x, dims, new_dims, name)

  def over_several(
    self,
    x: Tensor,
    dims: Sequence[DimensionLike] | None = None,
    new_dims: Sequence[DimensionLike] | None = None,
    name: str = "",
  ) -> Tensor:
    """{summary}.

    Any of them may be split: each is brought together for its turn, by the exchanges that move the
    fewest bytes between the layouts of x and of the result. To save the way back, give the
    frequencies names of their own, and split them as the last exchange leaves them: of three, with
    "x:rows,y:cols" that is "ky:rows,kz:cols".

    Args:
      x: {x}. It may have other dimensions besides.
      dims: {number} of it; the last by default.
      new_dims: what they become, each in its place and of its size{sizes}; by default they keep
        their names, and so their layout.
      name: of the operation.

    Returns:
      A {output} `Tensor`.

    Raises:
      DimensionError: x has no such dimension.
      DTypeError: x is of another dtype.
      ShapeError: they are not {number}, or the new ones have other sizes.
    """
    rank = self.rank
    if dims is None:
      if x.shape.ndims < rank:
        raise ShapeError(f"{name}: {x} has not {rank} dimensions")
      dims = x.shape.dims[-rank:]
    old = [convert_to_dimension(d) for d in dims]
    new = list(old) if new_dims is None else [convert_to_dimension(d) for d in new_dims]
    if new_dims is None and self.of_real and old:
      n = old[-1].size
      new[-1] = Dimension(old[-1].name, 2 * (n - 1) if self.inverse else n // 2 + 1)
    for given in (old, new):
      if len(given) != rank:
        raise ShapeError(f"{name} of {x} is over {rank} dimensions, got {len(given)}: {given}")
    return FourierOperation(x, old, new, self.inverse, self.of_real, name).outputs[0]


fft = families.member(_Transform("fft", 1).over_one)
ifft = families.member(_Transform("ifft", 1, inverse=True).over_one)
rfft = families.member(_Transform("rfft", 1, of_real=True).over_one)
irfft = families.member(_Transform("irfft", 1, inverse=True, of_real=True).over_one)
fft2d = families.member(_Transform("fft2d", 2).over_several)
ifft2d = families.member(_Transform("ifft2d", 2, inverse=True).over_several)
rfft2d = families.member(_Transform("rfft2d", 2, of_real=True).over_several)
irfft2d = families.member(_Transform("irfft2d", 2, inverse=True, of_real=True).over_several)
fft3d = families.member(_Transform("fft3d", 3).over_several)
ifft3d = families.member(_Transform("ifft3d", 3, inverse=True).over_several)
rfft3d = families.member(_Transform("rfft3d", 3, of_real=True).over_several)
irfft3d = families.member(_Transform("irfft3d", 3, inverse=True, of_real=True).over_several)
