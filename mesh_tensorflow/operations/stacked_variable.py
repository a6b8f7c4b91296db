"""Several variables of one shape, seen as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import VariableError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.laid_out import LaidOut
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.numerics import kernels
from mesh_tensorflow.operations.stacking import unstack
from mesh_tensorflow.operations.variables import Variable, read_slices
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Operation, Tensor

__all__ = ["StackedVariable"]


class StackedVariable(Variable):
  """A view of several variables as one with a new first dimension `stacked`.

  The variables stay what they are: they keep their names in checkpoints and their places in
  `graph.all_variables`, the view is saved nowhere. Assigning to the view assigns to them.

  The TF1 library put such variables in the place of small ones, to make its graphs smaller
  (`Graph.rewrite_stack_variables`); here programs alone make them.

  Args:
    vs: a list of `Variable` operations of equal mesh, shape and dtypes.

  Raises:
    VariableError: there is none, or they differ.
  """

  def __init__(self, vs: Sequence[Variable]):
    vs = list(vs)
    if not vs or not all(isinstance(v, Variable) for v in vs):
      raise VariableError(f"StackedVariable takes a list of Variable operations, got {vs!r}")
    first = vs[0]
    for v in vs[1:]:
      if (v.mesh, v.shape, v.dtype) != (first.mesh, first.shape, first.dtype):
        raise VariableError(
          f"StackedVariable: {v.full_name} has {v.shape} and {v.dtype} on {v.mesh!r}, "
          f"{first.full_name} has {first.shape} and {first.dtype} on {first.mesh!r}"
        )
    self.full_name = f"stacked/{first.full_name}"
    Operation.__init__(self, [v.value for v in vs], name=self.full_name)
    self._vs = vs
    self._dim = Dimension("stacked", len(vs))
    self._dtype = first.dtype
    self._trainable = first.trainable
    self._initializer = None
    shape = Shape([self._dim] + first.shape.dims)
    self._outputs = [Tensor(self, shape, first.activation_dtype, name=self.full_name + ":0")]
    self._initialize_all_dimensions_as_splittable()

  @property
  def original_names(self) -> list[str]:
    """Names of the variables that are stacked."""
    return [v.full_name for v in self._vs]

  @property
  def has_gradient(self) -> bool:
    # Of an operation on its inputs; a variable alone has none.
    return super(Variable, self).has_gradient

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    return unstack(grad_ys[0], self._dim)

  def verify_layout(self, mesh_impl: MeshImpl) -> None:
    super().verify_layout(mesh_impl)
    self._require_unsplit(mesh_impl, self._dim, "each variable is split by itself")

  def lower(self, lowering: LoweringInProgress) -> None:
    members = [lowering.variables[v] for v in self._vs]
    lowering.variables[self] = _StackedSlices(lowering.mesh_impl(self), members)
    read_slices(lowering, self, self.value)

  @property
  def master_device(self) -> str:
    return self._vs[0].master_device

  def get_master(self) -> tf.Tensor:
    """The current values of the variables, whole, stacked, in the dtype of checkpoints."""
    return tf.stack(
      [tf.convert_to_tensor(v.get_master().numpy(), v.master_dtype) for v in self._vs]
    )

  def assign_to_master(self, val: tf.Tensor) -> None:
    """Sets every variable, on all devices.

    Args:
      val: the whole values, stacked.
    """
    for v, x in zip(self._vs, tf.unstack(tf.convert_to_tensor(val), len(self._vs))):
      v.assign_to_master(x)


class _StackedSlices:
  """Slices of a stacked variable in a lowering; has the methods of a `LaidOutVariable`."""

  def __init__(self, mesh_impl: MeshImpl, members: Sequence[Any]):
    self._mesh_impl = mesh_impl
    self._members = members

  def read(self, dtype: tf.DType, after: Callable[[], Sequence[tf.Tensor]]) -> Any:
    return self._mesh_impl.slicewise(
      lambda *xs: kernels.stack(xs), *[m.read(dtype, after) for m in self._members]
    )

  def to_shards(self, values: LaidOut) -> LaidOut:
    return values.to_laid_out_tensor()

  def assign_shards(self, assign_fn: Callable[..., object], values: LaidOut) -> list[Any]:
    results = []
    for i, member in enumerate(self._members):
      part = self._mesh_impl.slicewise(lambda x, i=i: x[i], values)
      results += member.assign_to_slices(assign_fn, part)
    return results
