"""Laid-out tensors: the slices of one tensor, there already or computed on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import tensorflow as tf

from mesh_tensorflow.numerics import kernels, padding

__all__ = [
  "LazyAllreduceSum",
  "LazyLaidOutTensor",
  "compatible_lazy_allreduce_sums",
  "convert_args_to_laid_out_tensors",
]


class _Summing(Protocol):
  """Structural type: the part of `MeshImpl` that a pending sum uses."""

  @property
  def shape(self) -> Any:
    """The mesh `Shape`."""

  def slicewise(self, fn: Callable[..., object], *inputs: Any) -> Any: ...

  def allreduce(
    self, x: LaidOut, mesh_axes: Sequence[int], reduction_fn_string: str
  ) -> LaidOutTensor: ...

  def reduce_scatter(self, x: LaidOut, mesh_axis: int, split_axis: int) -> LaidOutTensor: ...

  def allsplit(self, x: LaidOut, mesh_axis: int, split_axis: int) -> LaidOutTensor: ...

  def allconcat(self, x: LaidOut, mesh_axis: int, concat_axis: int) -> LaidOutTensor: ...


class LaidOut(Protocol):
  """Structural type: a `LaidOutTensor`, or an object that computes one on demand."""

  def to_laid_out_tensor(self) -> LaidOutTensor:
    """The slices; computed now, where they are not there yet."""

  @property
  def slice_shape(self) -> list[int]:
    """Sizes of a slice."""

  @property
  def tensor_list(self) -> list[Any]:
    """The slices that this program holds."""

  @property
  def all_slices(self) -> list[Any]:
    """The slices that this program holds."""

  @property
  def one_slice(self) -> Any:
    """The first of the slices that this program holds."""


class LaidOutTensor:
  """The slices of one tensor, one for each processor that this program runs.

  A placement mesh holds one slice per processor; a SIMD mesh holds one, the
  slice of the processor that runs the program.

  Args:
    tensor_list: the slices (tf.Tensors; Python numbers where they are static).
  """

  def __init__(self, tensor_list: Sequence[Any]):
    self._tensor_list = list(tensor_list)

  @classmethod
  def from_tensor_list(cls, tensor_list: Sequence[Any]) -> LaidOutTensor:
    """A laid-out tensor of these slices."""
    return cls(tensor_list)

  @property
  def tensor_list(self) -> list[Any]:
    """The slices that this program holds."""
    return self._tensor_list

  @property
  def all_slices(self) -> list[Any]:
    """The slices that this program holds."""
    return self._tensor_list

  @property
  def one_slice(self) -> Any:
    """The first of the slices that this program holds."""
    return self._tensor_list[0]

  @property
  def slice_shape(self) -> list[int]:
    """Static shape of a slice."""
    return list(
      np.shape(self._tensor_list[0])
      if not tf.is_tensor(self._tensor_list[0])
      else self._tensor_list[0].shape
    )

  def to_laid_out_tensor(self) -> LaidOutTensor:
    """The laid-out tensor itself."""
    return self

  def __repr__(self) -> str:
    return f"LaidOutTensor({self._tensor_list!r})"


class _Forced:
  """Slices of something computed on demand; reading them computes it."""

  def to_laid_out_tensor(self) -> LaidOutTensor:
    raise NotImplementedError

  @property
  def tensor_list(self) -> list[Any]:
    return self.to_laid_out_tensor().tensor_list

  @property
  def all_slices(self) -> list[Any]:
    return self.to_laid_out_tensor().all_slices

  @property
  def one_slice(self) -> Any:
    return self.to_laid_out_tensor().one_slice


# Over which mesh axes slices are cut into shards, in order: each with the tensor axis that it cuts,
# and the size of that before. The last shards have padding if the mesh axis does not divide it.
Split: TypeAlias = tuple[tuple[int, int, int], ...]


class LazyAllreduceSum(_Forced):
  """A SUM allreduce that is not executed yet.

  Sums of several such tensors are added before the one allreduce they need.

  Args:
    mesh_impl: a `MeshImpl`.
    laid_out_input: the slices before the allreduce.
    mesh_axes: mesh axes to reduce over.
    add_counter_fn: called once, when the allreduce is executed.

  Attributes:
    exchange_with_others: executes the allreduce of this sum together with those of others; None if
      it has to be executed alone. See `joined_sums`.
  """

  def __init__(
    self,
    mesh_impl: _Summing,
    laid_out_input: LaidOut,
    mesh_axes: Sequence[int],
    add_counter_fn: Callable[[], None] | None = None,
  ):
    self.mesh_impl = mesh_impl
    self.laid_out_input = laid_out_input
    self.mesh_axes = list(mesh_axes)
    self.add_counter_fn = add_counter_fn
    self.exchange_with_others: Callable[[], None] | None = None
    self._reduced: LaidOutTensor | None = None
    self._shards: dict[Split, LaidOutTensor] = {}

  def to_laid_out_tensor(self) -> LaidOutTensor:
    """The sum, as a laid-out tensor; communicates at the first call."""
    if self._reduced is None and self._shards:
      split, x = next(iter(self._shards.items()))
      self._reduced = gathered(self.mesh_impl, x, split)
    if self._reduced is None and self.exchange_with_others is not None:
      self.exchange_with_others()
    if self._reduced is None:
      self._reduced = self.mesh_impl.allreduce(self.laid_out_input, self.mesh_axes, "SUM")
      if self.add_counter_fn:
        self.add_counter_fn()
    return self._reduced

  def set_sum(self, reduced: LaidOutTensor) -> None:
    """Sets the sum, which has been executed elsewhere."""
    self._reduced = reduced

  @property
  def is_reduced(self) -> bool:
    """True if the allreduce has been executed."""
    return self._reduced is not None

  @property
  def is_scattered(self) -> bool:
    """True if shards of the sum have been computed, and not the sum."""
    return self._reduced is None and bool(self._shards)

  def shards(self, split: Split) -> LaidOutTensor:
    """The sum, cut: of a sum that is still pending each processor computes only its part.

    Args:
      split: see `Split`; computed once for each.
    """
    if split not in self._shards:
      impl, x, left = self.mesh_impl, self.laid_out_input, list(self.mesh_axes)
      if self._reduced is not None or not any(m in left for m, _, _ in split):
        x, left = self.to_laid_out_tensor(), []
      for mesh_axis, tensor_axis, size in split:
        x = _padded(impl, x, mesh_axis, tensor_axis, size)
        if mesh_axis in left:
          x = impl.reduce_scatter(x, mesh_axis, tensor_axis)
          left.remove(mesh_axis)
        else:
          x = impl.allsplit(x, mesh_axis, tensor_axis)
      if left:
        x = impl.allreduce(x, left, "SUM")
      if self._reduced is None and not self._shards and self.add_counter_fn:
        self.add_counter_fn()
      self._shards[split] = x.to_laid_out_tensor()
    return self._shards[split]

  @property
  def slice_shape(self) -> list[int]:
    """Sizes of a slice."""
    return self.laid_out_input.slice_shape


class LazyLaidOutTensor(_Forced):
  """Slices that a function computes, each time they are asked for.

  Args:
    to_laid_out_tensor_fn: makes the laid-out tensor.
    slice_shape: sizes of its slices.
  """

  def __init__(self, to_laid_out_tensor_fn: Callable[[], LaidOutTensor], slice_shape: list[int]):
    self._fn = to_laid_out_tensor_fn
    self._slice_shape = slice_shape

  def to_laid_out_tensor(self) -> LaidOutTensor:
    """Calls the function; each call computes the slices again."""
    return self._fn()

  @property
  def slice_shape(self) -> list[int]:
    """Sizes of a slice."""
    return self._slice_shape


class LazyGather(LazyLaidOutTensor):
  """Slices that are gathered from shards where they are used.

  Args:
    mesh_impl: a `MeshImpl`.
    shards: the shards.
    split: what they are cut along; see `Split`.
    slice_shape: sizes of the slices.
    keeps: gathers once; else each time that the slices are asked for, so that none of them is in
      memory from one use to the next.
    after: returns tensors that a gather waits for, if it is one of several.
  """

  def __init__(
    self,
    mesh_impl: _Summing,
    shards: LaidOutTensor,
    split: Split,
    slice_shape: list[int],
    keeps: bool,
    after: Callable[[], Sequence[tf.Tensor]] = list,
  ):
    super().__init__(lambda: gathered(mesh_impl, shards, split), slice_shape)
    self.shards = shards
    self.split = split
    self.keeps = keeps
    self._after = after
    self._kept: LaidOutTensor | None = None

  def to_laid_out_tensor(self) -> LaidOutTensor:
    """The slices; they are gathered at the first call, or at each."""
    if self._kept is not None:
      return self._kept
    if not self.keeps:
      # Besides, TensorFlow would find that two gathers of a variable are the same, and keep one.
      with tf.control_dependencies(self._after()):
        return super().to_laid_out_tensor()
    self._kept = super().to_laid_out_tensor()
    return self._kept


def gathered(mesh_impl: _Summing, shards: LaidOutTensor, split: Split) -> LaidOutTensor:
  """The slices of which shards are parts."""
  for mesh_axis, tensor_axis, size in split:
    shards = mesh_impl.allconcat(shards, mesh_axis, tensor_axis)
    if shards.slice_shape[tensor_axis] != size:
      shards = mesh_impl.slicewise(
        lambda t, i=tensor_axis, n=size: kernels.cut_axis(t, i, 0, n), shards
      )
  return shards


def cut(mesh_impl: _Summing, x: LaidOut, split: Split) -> LaidOutTensor:
  """The shards of slices that each processor has; no communication."""
  for mesh_axis, tensor_axis, size in split:
    x = _padded(mesh_impl, x, mesh_axis, tensor_axis, size)
    x = mesh_impl.allsplit(x, mesh_axis, tensor_axis)
  return x.to_laid_out_tensor()


def _padded(
  mesh_impl: _Summing, x: LaidOut, mesh_axis: int, tensor_axis: int, size: int
) -> LaidOut:
  """Slices that can be cut over a mesh axis."""
  n = mesh_impl.shape[mesh_axis].size
  if size % n == 0:
    return x
  places = -(-size // n) * n
  found: LaidOutTensor = mesh_impl.slicewise(lambda t: padding.padded(t, tensor_axis, places), x)
  return found


def compatible_lazy_allreduce_sums(xs: Sequence[Any]) -> bool:
  """True if all are pending sums of one mesh over the same mesh axes.

  Args:
    xs: a list of anything.
  """
  if not xs or not all(isinstance(x, LazyAllreduceSum) for x in xs):
    return False
  return all(x.mesh_impl is xs[0].mesh_impl and x.mesh_axes == xs[0].mesh_axes for x in xs)


def convert_args_to_laid_out_tensors(xs: Sequence[object]) -> list[Any]:
  """Forces every element that has `to_laid_out_tensor`; leaves the others.

  Args:
    xs: a list of anything.
  """
  return [x.to_laid_out_tensor() if hasattr(x, "to_laid_out_tensor") else x for x in xs]


def slicewise_of_one(fn: Callable[..., object], *inputs: Any) -> Any:
  """`slicewise` of a mesh implementation whose laid-out tensors have one slice."""
  slices = convert_args_to_laid_out_tensors(inputs)
  result = fn(*[x.one_slice if isinstance(x, LaidOutTensor) else x for x in slices])
  if isinstance(result, tuple):
    return tuple(LaidOutTensor([r]) for r in result)
  return LaidOutTensor([result])
