"""Variables that hold nothing, for a mesh that is not there; see `planning.mesh_impl`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.meshes.store import StoredVariable, VariableStore
from mesh_tensorflow.program.dimensions import Shape


def placeholder(shape: Any, dtype: tf.DType) -> tf.Tensor:
  """A symbolic tensor, which no computation makes."""
  return tf.raw_ops.Placeholder(dtype=dtype, shape=shape)


class PlannedVariable:
  """Stands for the tf.Variable of a slice: has its shape and dtype, and holds nothing.

  Reading makes a placeholder and assigning does nothing. What else is asked of it, a
  symbolic tf.Variable of the scratch graph answers.
  """

  def __init__(self, name: str, shape: Sequence[int], dtype: tf.DType, trainable: bool):
    self.name = name
    self.shape = tf.TensorShape(shape)
    self.dtype = dtype
    self.trainable = trainable
    self.reads: list[tf.Tensor] = []
    self._symbolic: tf.Variable | None = None

  def read_value(self) -> tf.Tensor:
    self.reads.append(placeholder(self.shape, self.dtype))
    return self.reads[-1]

  value = read_value

  @property
  def handle(self) -> tf.Tensor:
    """A symbolic resource, for raw operations such as ResourceApplyAdam."""
    return tf.raw_ops.VarHandleOp(dtype=self.dtype, shape=self.shape)

  def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
    return tf.convert_to_tensor(self.read_value(), dtype, name=name)

  def assign(self, value: Any, *args: Any, **kwargs: Any) -> None:
    """Does nothing."""
    del value, args, kwargs

  assign_add = assign_sub = assign

  def __getattr__(self, name: str) -> Any:
    if name.startswith("__"):
      raise AttributeError(name)
    if self._symbolic is None:
      with tf.init_scope():
        self._symbolic = tf.Variable(
          placeholder(self.shape, self.dtype), trainable=self.trainable, name="planned"
        )
    return getattr(self._symbolic, name)


def _on_value(operator: str) -> Callable[..., Any]:
  return lambda self, *args: getattr(self.read_value(), operator)(*args)


for _operator in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
  for _name in (f"__{_operator}__", f"__r{_operator}__"):
    setattr(PlannedVariable, _name, _on_value(_name))
for _name in ("__neg__", "__abs__", "__getitem__", "__lt__", "__le__", "__gt__", "__ge__"):
  setattr(PlannedVariable, _name, _on_value(_name))


class PlanStore(VariableStore):
  """A store whose variables hold nothing."""

  def get(
    self,
    mesh_impl: Any,
    name: str,
    shape: Shape,
    *,
    master_dtype: tf.DType,
    slice_dtype: tf.DType,
    initializer: Any = None,
    trainable: bool = True,
  ) -> StoredVariable:
    if name not in self._stored:
      part = mesh_impl.slice_shape(shape)
      self._stored[name] = StoredVariable(
        name=name,
        shape=shape,
        master_dtype=master_dtype,
        slice_dtype=slice_dtype,
        trainable=trainable,
        layout=mesh_impl.tensor_layout(shape),
        mesh_shape=mesh_impl.shape,
        slices=(PlannedVariable(name, part, slice_dtype, trainable),),
        begins=((0,) * len(part),),
        slice_shape=tuple(part),
      )
    return self._stored[name]
