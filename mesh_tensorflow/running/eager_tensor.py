"""Tensors that have a value: those of a graph whose operations run at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow.errors import ArgumentError, DimensionError, GraphError
from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.operations import comparison
from mesh_tensorflow.operations.constants import import_laid_out_tensor
from mesh_tensorflow.operations.indexing import gather
from mesh_tensorflow.operations.slicing import mtf_slice
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Tensor

# Maximum number of slices shown; of larger meshes these are the first.
_SHOWN_SLICES = 8


class EagerTensor(Tensor):
  """An `mtf.Tensor` of an `mtf.eager` session, which has a value.

  An operation makes `Tensor`s; the session, once it has run it, makes them these.
  """

  @property
  def laid_out(self) -> Any:
    """Its slices, as a laid-out tensor."""
    return self._run_graph.laid_out(self)

  @property
  def _run_graph(self) -> Any:
    """The `EagerGraph`, whose file imports this one."""
    return self.graph

  @property
  def value(self) -> tf.Tensor:
    """The whole value, as a tf.Tensor."""
    impl = self._run_graph.mesh_impl
    return impl.export_to_tf_tensor(self, self.laid_out)

  def numpy(self) -> Any:
    """The whole value, as an array."""
    return self.value.numpy()

  @property
  def slices(self) -> list[Slice]:
    """The slice of each processor, with its device and its range of each dimension."""
    impl = self._run_graph.mesh_impl
    parts = self.laid_out.to_laid_out_tensor().tensor_list
    found = []
    for pnum in range(impl.size):
      sizes = impl.slice_extent(self.shape, pnum)
      begins = [min(b, d.size) for d, b in zip(self.shape, impl.slice_begin(self.shape, pnum))]
      part = parts[pnum]
      if part.shape.as_list() != sizes:  # Without its padding.
        part = kernels.cut(part, [0] * len(sizes), sizes)
      where = {d.name: (b, b + n) for d, b, n in zip(self.shape, begins, sizes)}
      found.append(Slice(pnum, impl.processor_device(pnum) or "", where, part))
    return found

  def detach(self) -> EagerTensor:
    """The same value without a past: `mtf.gradients` stop at it, and nothing before it is kept."""
    laid_out = self.laid_out.to_laid_out_tensor()
    same: Any = import_laid_out_tensor(self.mesh, laid_out, self.shape, name="detach")
    detached: EagerTensor = same
    return detached

  def __str__(self) -> str:
    """Value, dimensions, and where the slices lie."""
    impl = self._run_graph.mesh_impl
    split = {d.name: impl.tensor_dimension_to_mesh_axis(d) for d in self.shape}
    dims = ", ".join(f"{d.name}={d.size}" + _over(impl.shape, split[d.name]) for d in self.shape)
    value = np.array2string(self.numpy(), threshold=60, edgeitems=3, max_line_width=100)
    lines = [f"mtf.Tensor {self.name} [{dims}] {self.dtype.name}", value]
    slices = self.slices
    if impl.size > 1 and any(a is not None for a in split.values()):
      lines += [f"  {s}" for s in slices[:_SHOWN_SLICES]]
      lines += [f"... {len(slices) - _SHOWN_SLICES} more"] * (len(slices) > _SHOWN_SLICES)
    elif impl.size > 1:
      lines.append(f"whole on each of {impl.size} processors")
    return "\n".join(lines)

  def __repr__(self) -> str:
    """One line, for messages; with the value if it is one number."""
    return f"{self.to_string} = {self.numpy()}" if self.shape.size == 1 else self.to_string

  def __format__(self, spec: str) -> str:
    return format(self._scalar("format"), spec) if spec else repr(self)

  # ------------------------------------------------------------ as a number or an array

  def _scalar(self, what: str) -> Any:
    if self.shape.size != 1:
      raise ArgumentError(
        f"{what}: only a tensor of one element is a number, not {self.name} {self.shape}; take "
        ".numpy(), or reduce it"
      )
    return self.numpy().item()

  def item(self) -> Any:
    """The value of a tensor of one element, as a Python number."""
    return self._scalar("item")

  def __bool__(self) -> bool:
    return bool(self._scalar("bool"))

  def __float__(self) -> float:
    return float(self._scalar("float"))

  def __int__(self) -> int:
    return int(self._scalar("int"))

  def __index__(self) -> int:
    value = self._scalar("index")
    if not isinstance(value, int):
      raise ArgumentError(f"{self.name} of dtype {self.dtype.name} is no index")
    return value

  def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
    del copy  # A value from a device is a copy already.
    return np.asarray(self.numpy(), dtype=dtype)

  def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
    value = self.value
    return value if dtype is None else tf.cast(value, dtype, name=name)

  # ------------------------------------------------------------------------ comparison

  def __lt__(self, other: object) -> Tensor:
    return comparison.less(self, other)

  def __le__(self, other: object) -> Tensor:
    return comparison.less_equal(self, other)

  def __gt__(self, other: object) -> Tensor:
    return comparison.greater(self, other)

  def __ge__(self, other: object) -> Tensor:
    return comparison.greater_equal(self, other)

  # -------------------------------------------------------------------------- indexing

  def __getitem__(self, index: Any) -> Tensor:
    """Positions by names: `x[{"batch": 0, "length": slice(2, 5)}]`, or `x["batch", 0]`.

    Args:
      index: a dict from dimensions, or their names, to a position (which takes the dimension
        away; negative from the end) or a slice of step 1 (of a dimension that is not split); or
        one such pair.

    Raises:
      DimensionError: there is no such dimension.
      ArgumentError: a position is out of range, or is none.
    """
    if isinstance(index, tuple) and len(index) == 2 and isinstance(index[0], (str, Dimension)):
      index = {index[0]: index[1]}
    if not isinstance(index, Mapping):
      raise ArgumentError(
        f"{self.name} {self.shape} is indexed by names, x[{{'{self._some_name()}': 0}}] or "
        f"x['{self._some_name()}', 0:2], got {index!r}"
      )
    result: Tensor = self
    for key, place in index.items():
      result = _indexed(result, self._dimension(key), place)
    return result

  def _some_name(self) -> str:
    return self.shape[0].name if self.shape.ndims else "batch"

  def _dimension(self, key: Any) -> Dimension:
    for d in self.shape:
      if key in (d, d.name):
        return d
    raise DimensionError(f"{self.name} {self.shape} has no dimension {key!r}")


class Slice:
  """A slice of a tensor.

  Attributes:
    processor: the number of the processor that has it.
    device: the name of its device.
    where: dimension name -> (begin, end).
    value: a tf.Tensor.
  """

  def __init__(
    self, processor: int, device: str, where: Mapping[str, Sequence[int]], value: tf.Tensor
  ):
    self.processor = processor
    self.device = device
    self.where = dict(where)
    self.value = value

  def __repr__(self) -> str:
    device = ":".join(self.device.rsplit(":", 2)[-2:]) or "default device"
    where = ", ".join(f"{name} {b}:{e}" for name, (b, e) in self.where.items())
    return f"processor {self.processor} on {device}: {where}"


def _over(mesh_shape: Shape, axis: int | None) -> str:
  return "" if axis is None else f" over {mesh_shape[axis].name}:{mesh_shape[axis].size}"


def _indexed(x: Tensor, dim: Dimension, place: Any) -> Tensor:
  if isinstance(place, slice):
    begin, end, step = place.indices(dim.size)
    if step != 1:
      raise ArgumentError(f"{x.name} along {dim.name}: a slice has step 1, got {place}")
    return mtf_slice(x, begin, max(end - begin, 0), dim.name)
  if isinstance(place, Tensor):
    return gather(x, place, dim)
  try:
    position = int(place.__index__())
  except AttributeError:
    raise ArgumentError(
      f"{x.name} along {dim.name}: a position, a slice or an integer mtf.Tensor, got {place!r}"
    ) from None
  if not -dim.size <= position < dim.size:
    raise ArgumentError(f"{x.name}: {position} is no position along {dim.name}={dim.size}")
  return gather(x, position % dim.size, dim)


def as_eager(tensor: Tensor) -> None:
  """Turns a computed tensor into an `EagerTensor`."""
  if type(tensor) is not Tensor:
    if isinstance(tensor, EagerTensor):
      return
    raise GraphError(
      f"{tensor.name} is a {type(tensor).__name__}; mtf.eager takes mtf.Tensors only"
    )
  tensor.__class__ = EagerTensor
