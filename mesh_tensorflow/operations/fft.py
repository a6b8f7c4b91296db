"""Discrete Fourier transforms over one, two or three dimensions; what they do: `fourier`."""

from __future__ import annotations

from collections.abc import Sequence

from mesh_tensorflow.errors import ShapeError
from mesh_tensorflow.operations.fourier import FourierOperation
from mesh_tensorflow.program.dimensions import (
  Dimension,
  DimensionLike,
  convert_to_dimension,
)
from mesh_tensorflow.program.graph import Tensor

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


def _transform(
  x: Tensor,
  rank: int,
  dims: Sequence[DimensionLike] | None,
  new_dims: Sequence[DimensionLike] | None,
  name: str,
  *,
  inverse: bool = False,
  of_real: bool = False,
) -> Tensor:
  """The output of a `FourierOperation`, of checked numbers of dimensions."""
  if dims is None:
    if x.shape.ndims < rank:
      raise ShapeError(f"{name}: {x} has not {rank} dimensions")
    dims = x.shape.dims[-rank:]
  old = [convert_to_dimension(d) for d in dims]
  new = list(old) if new_dims is None else [convert_to_dimension(d) for d in new_dims]
  if new_dims is None and of_real and old:
    n = old[-1].size
    new[-1] = Dimension(old[-1].name, 2 * (n - 1) if inverse else n // 2 + 1)
  for given in (old, new):
    if len(given) != rank:
      raise ShapeError(f"{name} of {x} is over {rank} dimensions, got {len(given)}: {given}")
  return FourierOperation(x, old, new, inverse, of_real, name).outputs[0]


def _list(dim: DimensionLike | None) -> list[DimensionLike] | None:
  return None if dim is None else [dim]


def fft(
  x: Tensor,
  dim: DimensionLike | None = None,
  new_dim: DimensionLike | None = None,
  name: str = "fft",
) -> Tensor:
  """The discrete Fourier transform along a dimension, as `tf.signal.fft`; see `fft3d`.

  Args:
    x: a complex `Tensor`.
    dim: a dimension of it; the last by default.
    new_dim: what it becomes, of the same size; by default it keeps its name, and so its layout.
    name: of the operation.

  Raises:
    DimensionError: x has no such dimension.
    DTypeError: x is not complex.
    ShapeError: the new dimension has another size.
  """
  return _transform(x, 1, _list(dim), _list(new_dim), name)


def ifft(
  x: Tensor,
  dim: DimensionLike | None = None,
  new_dim: DimensionLike | None = None,
  name: str = "ifft",
) -> Tensor:
  """The inverse of `fft`; arguments as `fft`."""
  return _transform(x, 1, _list(dim), _list(new_dim), name, inverse=True)


def fft2d(
  x: Tensor,
  dims: Sequence[DimensionLike] | None = None,
  new_dims: Sequence[DimensionLike] | None = None,
  name: str = "fft2d",
) -> Tensor:
  """The discrete Fourier transform over two dimensions; arguments as `fft3d`."""
  return _transform(x, 2, dims, new_dims, name)


def ifft2d(
  x: Tensor,
  dims: Sequence[DimensionLike] | None = None,
  new_dims: Sequence[DimensionLike] | None = None,
  name: str = "ifft2d",
) -> Tensor:
  """The inverse of `fft2d`; arguments as `fft3d`."""
  return _transform(x, 2, dims, new_dims, name, inverse=True)


def fft3d(
  x: Tensor,
  dims: Sequence[DimensionLike] | None = None,
  new_dims: Sequence[DimensionLike] | None = None,
  name: str = "fft3d",
) -> Tensor:
  """The discrete Fourier transform over three dimensions, as `tf.signal.fft3d`.

  Any of them may be split: each is brought together for its turn, by the exchanges that move the
  fewest bytes between the layouts of x and of the result. To save the way back, give the
  frequencies names of their own, and split them as the last exchange leaves them: with
  "x:rows,y:cols" that is "ky:rows,kz:cols".

  Args:
    x: a complex `Tensor`. It may have other dimensions besides.
    dims: three dimensions of it; the last three by default.
    new_dims: what they become, each in its place and of its size; by default they keep their
      names, and so their layout.
    name: of the operation.

  Raises:
    DimensionError: x has no such dimension.
    DTypeError: x is not complex.
    ShapeError: they are not three, or the new ones have other sizes.
  """
  return _transform(x, 3, dims, new_dims, name)


def ifft3d(
  x: Tensor,
  dims: Sequence[DimensionLike] | None = None,
  new_dims: Sequence[DimensionLike] | None = None,
  name: str = "ifft3d",
) -> Tensor:
  """The inverse of `fft3d`, divided by the number of positions; arguments as `fft3d`."""
  return _transform(x, 3, dims, new_dims, name, inverse=True)


def rfft(
  x: Tensor,
  dim: DimensionLike | None = None,
  new_dim: DimensionLike | None = None,
  name: str = "rfft",
) -> Tensor:
  """`fft` of a real tensor: the frequencies 0 to n // 2, as `tf.signal.rfft`.

  Args:
    x: a float32 or float64 `Tensor`.
    dim: a dimension of it; the last by default.
    new_dim: what it becomes, of size n // 2 + 1; by default it keeps its name.
    name: of the operation.

  Returns:
    A complex `Tensor`.

  Raises:
    DimensionError: x has no such dimension.
    DTypeError: x is of another dtype.
    ShapeError: the new dimension has another size.
  """
  return _transform(x, 1, _list(dim), _list(new_dim), name, of_real=True)


def irfft(
  x: Tensor,
  dim: DimensionLike | None = None,
  new_dim: DimensionLike | None = None,
  name: str = "irfft",
) -> Tensor:
  """The inverse of `rfft`: a real tensor.

  Args:
    x: a complex `Tensor`.
    dim: the dimension of the frequencies 0 to n // 2; the last by default.
    new_dim: what it becomes, of size n, which may be even or odd; by default it keeps its name, and
      n is even.
    name: of the operation.
  """
  return _transform(x, 1, _list(dim), _list(new_dim), name, inverse=True, of_real=True)


def rfft2d(
  x: Tensor,
  dims: Sequence[DimensionLike] | None = None,
  new_dims: Sequence[DimensionLike] | None = None,
  name: str = "rfft2d",
) -> Tensor:
  """`fft2d` of a real tensor; arguments as `rfft3d`."""
  return _transform(x, 2, dims, new_dims, name, of_real=True)


def irfft2d(
  x: Tensor,
  dims: Sequence[DimensionLike] | None = None,
  new_dims: Sequence[DimensionLike] | None = None,
  name: str = "irfft2d",
) -> Tensor:
  """The inverse of `rfft2d`; arguments as `irfft3d`."""
  return _transform(x, 2, dims, new_dims, name, inverse=True, of_real=True)


def rfft3d(
  x: Tensor,
  dims: Sequence[DimensionLike] | None = None,
  new_dims: Sequence[DimensionLike] | None = None,
  name: str = "rfft3d",
) -> Tensor:
  """`fft3d` of a real tensor: of the last dimension the frequencies 0 to n // 2.

  Args:
    x: a float32 or float64 `Tensor`.
    dims: three dimensions of it; the last three by default. Any may be split.
    new_dims: what they become, each in its place and of its size, but the last of n // 2 + 1; by
      default they keep their names.
    name: of the operation.

  Returns:
    A complex `Tensor`.

  Raises:
    DimensionError: x has no such dimension.
    DTypeError: x is of another dtype.
    ShapeError: they are not three, or the new ones have other sizes.
  """
  return _transform(x, 3, dims, new_dims, name, of_real=True)


def irfft3d(
  x: Tensor,
  dims: Sequence[DimensionLike] | None = None,
  new_dims: Sequence[DimensionLike] | None = None,
  name: str = "irfft3d",
) -> Tensor:
  """The inverse of `rfft3d`: a real tensor.

  Args:
    x: a complex `Tensor`.
    dims: three dimensions of it, of the last of which it has the frequencies 0 to n // 2.
    new_dims: what they become; the size of the last is n, which may be even or odd. By default they
      keep their names, and n is even.
    name: of the operation.
  """
  return _transform(x, 3, dims, new_dims, name, inverse=True, of_real=True)
