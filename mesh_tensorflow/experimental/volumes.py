"""Blocks of volumes in NIfTI, HDF5, Zarr and NumPy files: each process reads only its own.

`open_volume` opens a file and reads nothing of it. `read_slices` reads what the processors of this
process hold of a tensor, one block at a time; `read_local_part` the smallest block that has all of
them, which a `TensorSpec` with `local=True` takes. Files are opened with the libraries that the
field uses, nibabel, h5py and zarr, each needed for its own files only: `pip install nibabel h5py
zarr`.
"""

from __future__ import annotations

import abc
import importlib
import math
import operator
import os
import tokenize
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow.errors import (
  ArgumentError,
  DataError,
  InstallationError,
  ShapeError,
  SizeError,
)
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.program.dimensions import Dimension, Shape, ShapeLike, convert_to_shape

# Elements of a block that are converted at a time, so that a block is not twice in memory.
_AT_ONCE = 1 << 22
# Exceptions of the libraries for files that are damaged, closed, or of another format.
_BROKEN = (
  OSError, ValueError, EOFError, RuntimeError, TypeError, LookupError, AttributeError,
  ArithmeticError, MemoryError, SyntaxError, tokenize.TokenError, zlib.error,
)  # fmt: skip


def _one_line(e: Exception) -> str:
  return " ".join(str(e).split())


class Volume(abc.ABC):
  """An array in a file.

  Attributes:
    path: the file.
    shape: sizes of the array.
    dtype: NumPy dtype of what `read` returns by default.
  """

  path: str
  shape: tuple[int, ...]
  dtype: np.dtype[Any]

  @abc.abstractmethod
  def _part(self, place: tuple[slice, ...]) -> np.ndarray:
    """Reads the part at `place`, which lies within the array."""

  def close(self) -> None:
    """Closes the file."""
    return

  def __enter__(self) -> Volume:
    return self

  def __exit__(self, *exc_info: Any) -> None:
    self.close()

  def read(
    self, begin: Sequence[int], sizes: Sequence[int], dtype: Any = None, fill: float = 0.0
  ) -> np.ndarray:
    """Reads a block; nothing else of the file is read but the chunks that it lies in.

    Args:
      begin: the first position along each axis; may lie before the array.
      sizes: positions along each axis; the block may end behind the array.
      dtype: dtype of the result; that of the array by default.
      fill: value of elements outside of the array.

    Raises:
      ArgumentError: they are no integers, or there is no such dtype, or the array is complex and
        the dtype is not.
      ShapeError: not as many numbers as axes, or a size is below 0.
      DataError: the file cannot be read there.
    """
    try:
      begin, sizes = [operator.index(b) for b in begin], [operator.index(n) for n in sizes]
      dtype = np.dtype(self.dtype if dtype is None else dtype)
    except TypeError as e:
      raise ArgumentError(
        f"read of {self.path}: begin and sizes must be lists of integers, dtype one of NumPy, "
        f"got {begin!r}, {sizes!r} and {dtype!r}"
      ) from e
    if not len(begin) == len(sizes) == len(self.shape) or min(sizes, default=0) < 0:
      raise ShapeError(
        f"{self.path} has the sizes {list(self.shape)}: begin and sizes must be as many numbers, "
        f"got {begin} and {sizes}"
      )
    if self.dtype.kind == "c" and dtype.kind != "c":
      raise ArgumentError(
        f"{self.path} is of dtype {self.dtype}, and {dtype} would lose the imaginary part; read it "
        "as complex64 or complex128"
      )
    block = np.full(sizes, fill, dtype)
    low = [max(b, 0) for b in begin]
    high = [min(b + n, size) for b, n, size in zip(begin, sizes, self.shape)]
    if any(a >= b for a, b in zip(low, high)):
      return block
    if not sizes:
      block[...] = self._part(())
      return block
    # A few planes at a time: what the library returns is of the file's dtype, and may be a copy.
    plane = math.prod(b - a for a, b in zip(low[1:], high[1:]))
    planes = max(_AT_ONCE // max(plane, 1), 1)
    for first in range(low[0], high[0], planes):
      last = min(first + planes, high[0])
      here = slice(first, last), *(slice(a, b) for a, b in zip(low[1:], high[1:]))
      there = tuple(slice(p.start - b, p.stop - b) for p, b in zip(here, begin))
      try:
        block[there] = self._part(here)
      except _BROKEN as e:
        place = ", ".join(f"{p.start}:{p.stop}" for p in here)
        raise DataError(f"{self.path} cannot be read at [{place}]: {_one_line(e)}") from e
    return block


class _ArrayVolume(Volume):
  """A volume that a library shows as something that is indexed by slices.

  Args:
    path: the file.
    array: has `shape`, `dtype`, and what it is indexed by.
    close: closes the file.
    dtype: dtype of what is read; `array.dtype` by default.
  """

  def __init__(
    self, path: str, array: Any, close: Callable[[], None] | None = None, dtype: Any = None
  ):
    self.path = path
    self.shape = tuple(int(n) for n in array.shape)
    self.dtype = np.dtype(array.dtype if dtype is None else dtype)
    self._array, self._close = array, close

  def _part(self, place: tuple[slice, ...]) -> np.ndarray:
    return np.asarray(self._array[place])

  def close(self) -> None:
    if self._close is not None:
      self._close()


class _NumpyVolume(Volume):
  """An .npy file; mapped anew for each block, or all pages that were read would stay in memory."""

  def __init__(self, path: str):
    array = np.load(path, mmap_mode="r")
    self.path, self.shape, self.dtype = path, array.shape, array.dtype

  def _part(self, place: tuple[slice, ...]) -> np.ndarray:
    return np.array(np.load(self.path, mmap_mode="r")[place])


def _library(name: str, what: str) -> Any:
  try:
    return importlib.import_module(name)
  except ImportError as e:
    raise InstallationError(f"{what} needs the package {name}: pip install {name}") from e


def open_volume(path: str | os.PathLike[str], dataset: str | None = None) -> Volume:
  """Opens a volume by what its name ends with; none of its numbers are read.

  Args:
    path: a file .nii or .nii.gz (NIfTI: a block of a compressed one is read by unpacking all before
      it), .h5 or .hdf5, .npy, or a folder .zarr.
    dataset: name of the array in an HDF5 file or in a Zarr group; by default the only one.

  Returns:
    A `Volume`.

  Raises:
    ArgumentError: `path` is no name of a file, or `dataset` none of an array.
    DataError: there is no such file, or it has no such array, or its name ends with something else.
    InstallationError: the library that reads it is not installed.
  """
  if not isinstance(path, (str, os.PathLike)):
    raise ArgumentError(f"open_volume: path must be the name of a file, got {path!r}")
  if dataset is not None and not isinstance(dataset, str):
    raise ArgumentError(f"open_volume: dataset must be the name of an array, got {dataset!r}")
  path = os.fspath(path)
  if not os.path.exists(path):
    raise DataError(f"there is no file {path}")
  lower = path.rstrip("/").lower()
  for endings, opens in _OPENERS.items():
    if lower.endswith(endings):
      try:
        return opens(path, dataset)
      except _BROKEN as e:
        if isinstance(e, (DataError, InstallationError)):
          raise
        raise DataError(f"{path} cannot be opened as a volume: {_one_line(e)}") from e
  known = ", ".join(e for endings in _OPENERS for e in endings)
  raise DataError(f"{path} is no volume that can be read; its name must end with one of {known}")


def _open_nifti(path: str, dataset: str | None) -> Volume:
  del dataset
  nibabel = _library("nibabel", f"the NIfTI file {path}")
  try:
    image = nibabel.load(path, mmap=False)
  except (
    nibabel.filebasedimages.ImageFileError,
    nibabel.spatialimages.HeaderDataError,
    nibabel.spatialimages.HeaderTypeError,
    nibabel.wrapstruct.WrapStructError,
  ) as e:
    raise DataError(f"{path} cannot be opened as a volume: {e}") from e
  # Scaled numbers are of float64 in nibabel; the file has no more digits than float32.
  scaled = (image.dataobj.slope, image.dataobj.inter) != (1.0, 0.0)
  return _ArrayVolume(path, image.dataobj, dtype=np.float32 if scaled else None)


def _open_hdf5(path: str, dataset: str | None) -> Volume:
  h5py = _library("h5py", f"the HDF5 file {path}")
  file = h5py.File(path, "r")
  found: dict[str, Any] = {}
  file.visititems(lambda n, x: found.update({n: x}) if isinstance(x, h5py.Dataset) else None)
  try:
    return _ArrayVolume(path, _chosen(path, found, dataset), file.close)
  except DataError:
    file.close()
    raise


def _open_zarr(path: str, dataset: str | None) -> Volume:
  zarr = _library("zarr", f"the Zarr folder {path}")
  opened = zarr.open(path, mode="r")
  if isinstance(opened, zarr.Array):
    return _ArrayVolume(path, opened)
  found = (
    dict(opened.members(max_depth=None)) if hasattr(opened, "members") else dict(opened.arrays())
  )
  arrays = {n: a for n, a in found.items() if isinstance(a, zarr.Array)}
  return _ArrayVolume(path, _chosen(path, arrays, dataset))


def _chosen(path: str, found: dict[str, Any], dataset: str | None) -> Any:
  name = (dataset or "").strip("/")
  if dataset is None and len(found) == 1:
    (name,) = found
  if name not in found:
    asked = "dataset must name one" if dataset is None else f"it has no array {dataset!r}"
    raise DataError(f"{path} has the arrays {', '.join(sorted(found)) or 'none'}: {asked}")
  return found[name]


def _open_npy(path: str, dataset: str | None) -> Volume:
  del dataset
  return _NumpyVolume(path)


_OPENERS: dict[tuple[str, ...], Callable[[str, str | None], Volume]] = {
  (".nii", ".nii.gz"): _open_nifti,
  (".h5", ".hdf5"): _open_hdf5,
  (".zarr",): _open_zarr,
  (".npy",): _open_npy,
}


def _space(volume: Volume, shape: ShapeLike) -> tuple[Shape, int]:
  """Returns a tensor's shape, and which of its axes is the first of the volume's; others are 1."""
  shape = convert_to_shape(shape)
  sizes = shape.to_integer_list
  for first in range(len(sizes) - len(volume.shape) + 1):
    last = first + len(volume.shape)
    around = sizes[:first] + sizes[last:]
    if tuple(sizes[first:last]) == volume.shape and all(n == 1 for n in around):
      return shape, first
  raise ShapeError(
    f"{volume.path} has the sizes {list(volume.shape)}; a tensor of it has these, and may have "
    f"dimensions of size 1 before and behind them, got {shape}"
  )


def _halos(shape: Shape, halo: dict[str, int] | None) -> list[int]:
  wanted = dict(halo or {})
  halos = [wanted.pop(d.name, 0) for d in shape]
  if wanted or min(halos, default=0) < 0:
    raise SizeError(
      f"halo must have a number of at least 0 for names of {shape}, got {dict(halo or {})}"
    )
  return halos


def read_slices(
  mesh_impl: MeshImpl,
  shape: ShapeLike,
  volume: Volume,
  dtype: Any = tf.float32,
  halo: dict[str, int] | None = None,
) -> list[tf.Tensor]:
  """The slices of a volume that the processors of this process hold, each on its device.

  Only one block at a time is in the memory of the host; processors that hold the same one share it.
  A list of them is what `mesh_impl.LaidOutTensor` and `mtf.import_laid_out_tensor` take on a
  placement mesh.

  Args:
    mesh_impl: a `MeshImpl`.
    shape: shape of the tensor: the volume's dimensions, with others of size 1 before or behind.
    volume: a `Volume`.
    dtype: dtype of the slices.
    halo: by names of dimensions, how many positions more there shall be on both sides of a block:
      zeros beyond the ends of the volume.

  Raises:
    ShapeError: the shape is not that of the volume.
    LayoutError: the layout does not divide a dimension; an uneven split is refused, too.
  """
  shape, first = _space(volume, shape)
  halos, sizes = _halos(shape, halo), mesh_impl.even_only.slice_shape(shape)
  wide = [n + 2 * h for n, h in zip(sizes, halos)]
  last = first + len(volume.shape)
  if any(halos[:first] + halos[last:]):
    raise SizeError(f"halo {halo} of {shape}: a dimension that the volume has not has none")
  dtype = tf.as_dtype(dtype)
  made: dict[tuple[tuple[int, ...], str | None], tf.Tensor] = {}
  slices = []
  for pnum in mesh_impl.local_processors:
    begin = [b - h for b, h in zip(mesh_impl.slice_begin(shape, pnum), halos)]
    key = tuple(begin), mesh_impl.processor_device(pnum)
    if key not in made:
      block = volume.read(begin[first:last], wide[first:last], dtype.as_numpy_dtype)
      with tf.device(key[1]):
        made[key] = tf.constant(block.reshape(wide))
    slices.append(made[key])
  return slices


def read_local_part(
  mesh_impl: MeshImpl, shape: ShapeLike, volume: Volume, dtype: Any = tf.float32
) -> np.ndarray:
  """The smallest block of a volume that has all slices of the processors of this process.

  It is an argument of an `mtf.function` whose `TensorSpec` has `local=True`; of several workers
  each reads its own.

  Args:
    mesh_impl: a `MeshImpl`.
    shape: shape of the tensor; see `read_slices`.
    volume: a `Volume`.
    dtype: dtype of the result.
  """
  shape, first = _space(volume, shape)
  begin, sizes = mesh_impl.local_part(shape)
  last = first + len(volume.shape)
  dtype = tf.as_dtype(dtype).as_numpy_dtype
  return volume.read(begin[first:last], sizes[first:last], dtype).reshape(sizes)


def dimensions_of(volume: Volume, names: Sequence[str]) -> list[Dimension]:
  """Dimensions of a volume, by names.

  Args:
    volume: a `Volume`.
    names: a name for each axis.

  Raises:
    ArgumentError: `names` is no list of names.
    ShapeError: not as many names as axes.
  """
  if not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names):
    raise ArgumentError(
      f"dimensions_of {volume.path}: names must be a list of names, got {names!r}"
    )
  if len(names) != len(volume.shape):
    raise ShapeError(
      f"{volume.path} has the sizes {list(volume.shape)}: as many names are needed, got {names}"
    )
  return [Dimension(name, n) for name, n in zip(names, volume.shape)]
