"""The mesh inside a per-device program: one slice of each tensor, and collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import GraphError
from mesh_tensorflow.meshes.collectives.base import REDUCTIONS, Collectives, Groups
from mesh_tensorflow.meshes.laid_out import (
  LaidOut,
  LaidOutTensor,
  convert_args_to_laid_out_tensors,
)
from mesh_tensorflow.meshes.layout import LayoutLike
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.simd.program import Program
from mesh_tensorflow.meshes.store import StoredVariable, VariableStore
from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.program.dimensions import Shape, ShapeLike
from mesh_tensorflow.program.graph import Tensor


class PerDeviceMeshImpl(MeshImpl):
  """Base class of `SimdMeshImpl`: the part of the contract that belongs into the program.

  Args:
    shape: mesh shape.
    layout: layout rules.
    variable_store: where variables live; a new one by default.
  """

  def __init__(
    self, shape: ShapeLike, layout: LayoutLike, *, variable_store: VariableStore | None = None
  ):
    super().__init__(shape, layout, variable_store=variable_store)
    self._groups: dict[tuple[int, ...], Groups] = {}

  @property
  def allreduce_in_bfloat16_max_group_size(self) -> float:
    """The largest group of which sums are computed in bfloat16."""
    raise NotImplementedError

  @property
  def _program(self) -> Program:
    """The program that is being run, or traced, by this thread."""
    raise NotImplementedError

  @property
  def _collectives(self) -> Collectives:
    collectives = self._program.collectives
    # A program of the only processor of a mesh has none: all groups are of one member.
    assert collectives is not None
    return collectives

  def program_slices(self, stored: StoredVariable) -> list[tf.Variable]:
    """The slices of a stored variable that the running program holds."""
    return [self._program.own(stored.slices)]

  def slicewise(self, fn: Callable[..., Any], *inputs: Any) -> Any:
    slices = convert_args_to_laid_out_tensors(inputs)
    result = fn(*[x.one_slice if isinstance(x, LaidOutTensor) else x for x in slices])
    if isinstance(result, tuple):
      return tuple(LaidOutTensor([r]) for r in result)
    return LaidOutTensor([result])

  def laid_out_pnum(self) -> LaidOutTensor:
    return LaidOutTensor([self._program.pnum])

  @property
  def pnum_tensor(self) -> Any:
    """The number of the processor that runs the program."""
    return self._program.pnum

  def laid_out_pcoord(self, mesh_axis: int) -> LaidOutTensor:
    return LaidOutTensor([self._program.coordinates[mesh_axis]])

  def _groups_of(self, axes: Sequence[int]) -> Groups:
    key = tuple(sorted(set(axes)))
    if key not in self._groups:
      self._groups[key] = Groups.of(self.shape, key)
    return self._groups[key]

  def allreduce(
    self, x: LaidOut, mesh_axes: Sequence[int], reduction_fn_string: str
  ) -> LaidOutTensor:
    x = x.to_laid_out_tensor()
    if reduction_fn_string not in REDUCTIONS:
      raise GraphError(f"allreduce: {reduction_fn_string!r} is not SUM, MAX or MIN")
    axes = [a for a in mesh_axes if self.shape[a].size > 1]
    if not axes:
      return x
    groups = self._groups_of(axes)
    t = tf.convert_to_tensor(x.one_slice)
    too_large = groups.size > self.allreduce_in_bfloat16_max_group_size
    if t.dtype == tf.bfloat16 and reduction_fn_string == "SUM" and too_large:
      total = self._collectives.all_reduce(tf.cast(t, tf.float32), groups, "SUM")
      return LaidOutTensor([tf.cast(total, tf.bfloat16)])
    return LaidOutTensor([self._collectives.all_reduce(t, groups, reduction_fn_string)])

  def allconcat(
    self, x: LaidOut, mesh_axis: int, concat_axis: int, stack: bool = False
  ) -> LaidOutTensor:
    x = x.to_laid_out_tensor()
    t = tf.convert_to_tensor(x.one_slice)
    if self.shape[mesh_axis].size == 1:
      return LaidOutTensor([tf.expand_dims(t, concat_axis)]) if stack else x
    parts = self._collectives.all_gather(t, self._groups_of([mesh_axis]))
    return LaidOutTensor([(kernels.stack if stack else tf.concat)(parts, concat_axis)])

  def alltoall(
    self, x: LaidOut, mesh_axis: int | Sequence[int], split_axis: int, concat_axis: int
  ) -> LaidOutTensor:
    x = x.to_laid_out_tensor()
    axes = self.group_axes(mesh_axis)
    if not axes:
      return x
    n = self._split_parts("alltoall", x.slice_shape, split_axis, axes)
    parts = tf.split(tf.convert_to_tensor(x.one_slice), n, split_axis)
    received = self._collectives.all_to_all(parts, self._groups_of(axes))
    return LaidOutTensor([tf.concat(received, concat_axis)])

  def reduce_scatter(self, x: LaidOut, mesh_axis: int, split_axis: int) -> LaidOutTensor:
    x = x.to_laid_out_tensor()
    axes = self.group_axes(mesh_axis)
    if not axes:
      return x
    n = self._split_parts("reduce_scatter", x.slice_shape, split_axis, axes)
    t = tf.convert_to_tensor(x.one_slice)
    collectives, groups = self._collectives, self._groups_of(axes)
    if t.dtype == tf.bfloat16 and n > self.allreduce_in_bfloat16_max_group_size:
      total = collectives.reduce_scatter(tf.cast(t, tf.float32), groups, split_axis)
      return LaidOutTensor([tf.cast(total, tf.bfloat16)])
    return LaidOutTensor([collectives.reduce_scatter(t, groups, split_axis)])

  def receive(
    self, x: LaidOut, mesh_axis: int | Sequence[int], source_pcoord: Sequence[int | None]
  ) -> LaidOutTensor:
    x = x.to_laid_out_tensor()
    t = tf.convert_to_tensor(x.one_slice)
    source = list(source_pcoord)
    axes = self.group_axes(mesh_axis)
    self._check_sources(source, axes)
    if all(s is None for s in source):
      return LaidOutTensor([tf.zeros_like(t)])
    if source == list(range(len(source))):
      return x
    groups = self._groups_of(axes)
    return LaidOutTensor([self._collectives.permute(t, groups, source)])

  def slice(self, tf_tensor: tf.Tensor, tensor_shape: Shape) -> tf.Tensor:
    """This processor's slice of a whole tensor."""
    part = self.slice_shape(tensor_shape)
    if part == tensor_shape.to_integer_list:
      return tf_tensor
    begin = [
      b.one_slice if isinstance(b, LaidOutTensor) else b
      for b in self.laid_out_slice_begin(tensor_shape)
    ]
    return kernels.cut(tf_tensor, begin, part)

  def import_tf_tensor(self, x: Tensor | Shape, tf_x: tf.Tensor) -> LaidOutTensor:
    shape = x if isinstance(x, Shape) else x.shape
    return LaidOutTensor([self.slice(tf.convert_to_tensor(tf_x), shape)])

  def export_to_tf_tensor(self, x: Tensor | Shape, laid_out_x: LaidOut) -> tf.Tensor:
    shape = x if isinstance(x, Shape) else x.shape
    result = laid_out_x.to_laid_out_tensor()
    for tensor_axis, mesh_axis in enumerate(self.tensor_layout(shape)):
      if mesh_axis is not None:
        result = self.allconcat(result, mesh_axis, tensor_axis)
    return tf.convert_to_tensor(result.one_slice)

  def Print(self, x: Any, data: Sequence[Any], message: str, **kwargs: Any) -> Any:  # noqa: N802
    """Prints the slices of `data`, and the number of the processor that has them."""
    parts = [d.to_laid_out_tensor().one_slice for d in data]
    tf.print(message, "processor", self._program.pnum, *parts, summarize=kwargs.get("summarize", 3))
    return x
