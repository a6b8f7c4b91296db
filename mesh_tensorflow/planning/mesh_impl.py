"""A mesh without devices, on which programs are lowered symbolically.

A `PlanMeshImpl` runs lowerings of any mesh size on symbolic slices: every slice is a TensorFlow
placeholder of the slice's shape, a collective is a record of what would be sent, and a variable is
its description. Nothing is computed and nothing is allocated. It must be used inside a scratch
TensorFlow graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import GraphError
from mesh_tensorflow.meshes.laid_out import LaidOut, LaidOutTensor, slicewise_of_one
from mesh_tensorflow.meshes.layout import LayoutLike
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.store import MakesSlices, StoredVariable, VariableStore
from mesh_tensorflow.numerics import bodies, constants
from mesh_tensorflow.numerics.initializers import InitializerLike
from mesh_tensorflow.program.dimensions import Shape, ShapeLike
from mesh_tensorflow.program.graph import Tensor


@dataclasses.dataclass(frozen=True)
class Collective:
  """One exchange between processors.

  Attributes:
    kind: "allreduce", "reduce_scatter", "allconcat", "alltoall" or "receive".
    reduction: "SUM", "MAX" or "MIN" of an allreduce or reduce_scatter, else "".
    mesh_axes: numbers of the mesh axes it goes over.
    slice_bytes: bytes of the slice that one processor gives.
    bytes_over: for each mesh axis the bytes that one processor sends along it.
    source: the laid-out tensor that is exchanged, while it is needed.
  """

  kind: str
  reduction: str
  mesh_axes: tuple[int, ...]
  slice_bytes: int
  bytes_over: dict[int, int]
  source: LaidOutTensor | None = dataclasses.field(default=None, compare=False)


def allreduce_bytes(
  slice_bytes: int, mesh_axes: Sequence[int], sizes: Sequence[int]
) -> dict[int, int]:
  """Bytes that a processor sends along each mesh axis in a bandwidth-optimal allreduce.

  Over n processors a ring sends 2 (n - 1) / n of the slice (Patarasuk and Yuan, 2009):
  a reduce-scatter and an all-gather. Over several axes it is done one axis after the
  other, the last (fastest) first, each with the part that is left; the sum is that of
  one ring over all of them.
  """
  left, result = float(slice_bytes), {}
  for axis in sorted(mesh_axes, reverse=True):
    result[axis] = round(2 * (sizes[axis] - 1) / sizes[axis] * left)
    left /= sizes[axis]
  return result


def placeholder(shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
  """A symbolic tensor, which no computation makes."""
  return tf.raw_ops.Placeholder(dtype=dtype, shape=shape)


class PlannedVariable:
  """Stands for the tf.Variable of a slice: has its shape and dtype, and holds nothing.

  Reading makes a placeholder and assigning does nothing. What else is asked of it, a
  symbolic tf.Variable of the scratch graph answers.
  """

  def __init__(
    self,
    name: str,
    shape: Sequence[int],
    dtype: tf.DType,
    trainable: bool,
    make: Callable[..., tf.Tensor] = placeholder,
  ):
    self.name = name
    self._make = make
    self.shape = tf.TensorShape(shape)
    self.dtype = dtype
    self.trainable = trainable
    self.reads: list[tf.Tensor] = []
    self._symbolic: tf.Variable | None = None

  def read_value(self) -> tf.Tensor:
    self.reads.append(self._make(self.shape, self.dtype))
    return self.reads[-1]

  value = read_value

  @property
  def handle(self) -> tf.Tensor:
    """A symbolic resource, for raw operations such as ResourceApplyAdam."""
    return tf.raw_ops.VarHandleOp(dtype=self.dtype, shape=self.shape)

  def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
    return tf.convert_to_tensor(self.read_value(), dtype, name=name)

  def assign(self, value: object, *args: Any, **kwargs: Any) -> None:
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
  """A store whose variables hold nothing.

  Args:
    make: makes the values that they are read as.
  """

  def __init__(self, make: Callable[..., tf.Tensor] = placeholder):
    super().__init__()
    self._make = make

  # It is made for each piece, and nobody looks into it as into a tf.Module: nothing is tracked.
  __setattr__ = object.__setattr__

  def get(
    self,
    mesh_impl: MakesSlices,
    name: str,
    shape: Shape,
    *,
    master_dtype: tf.DType,
    slice_dtype: tf.DType,
    initializer: InitializerLike = None,
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
        slices=(PlannedVariable(name, part, slice_dtype, trainable, self._make),),
        begins=((0,) * len(part),),
        slice_shape=tuple(part),
      )
    return self._stored[name]


class PlanMeshImpl(MeshImpl):
  """A mesh of any size without devices: records what a program would exchange.

  Args:
    shape: mesh shape.
    layout_rules: layout rules.
    make: makes symbolic slices of a shape and a dtype, as `placeholder` does.

  Attributes:
    collectives: the `Collective`s so far, in order.
    inputs: the slices that were brought in from outside.
    variable_reads: the slices that were read from variables.
  """

  def __init__(
    self,
    shape: ShapeLike,
    layout_rules: LayoutLike,
    make: Callable[..., tf.Tensor] = placeholder,
  ):
    super().__init__(shape, layout_rules, variable_store=PlanStore(make))
    self.placeholder = make
    self.collectives: list[Collective] = []
    self.inputs: list[tf.Tensor] = []

  @property
  def variable_reads(self) -> list[tf.Tensor]:
    return [r for s in self.variable_store for v in s.slices for r in v.reads]

  # ------------------------------------------------------------ for the store

  @property
  def local_processors(self) -> range:
    return range(1)

  def processor_device(self, pnum: int) -> str | None:
    del pnum
    return None

  # ----------------------------------------------------------------- the contract

  def slicewise(self, fn: Callable[..., object], *inputs: Any) -> Any:
    with bodies.inlined(), constants.on_device(""):
      return slicewise_of_one(fn, *inputs)

  def laid_out_pnum(self) -> LaidOutTensor:
    return LaidOutTensor([self.placeholder([], tf.int32)])

  def allreduce(
    self, x: LaidOut, mesh_axes: Sequence[int], reduction_fn_string: str
  ) -> LaidOutTensor:
    x = _laid_out(x)
    if reduction_fn_string not in ("SUM", "MAX", "MIN"):
      raise GraphError(f"allreduce: {reduction_fn_string!r} is not SUM, MAX or MIN")
    axes = tuple(a for a in mesh_axes if self.shape[a].size > 1)
    if not axes:
      return _laid_out(x)
    value = _slice_of(x)
    # Booleans travel as int32.
    size = value.shape.num_elements() * (4 if value.dtype == tf.bool else value.dtype.size)
    over = allreduce_bytes(size, axes, self.shape.to_integer_list)
    return self._exchange("allreduce", x, axes, over, value.shape, reduction_fn_string, size)

  def allconcat(
    self, x: LaidOut, mesh_axis: int, concat_axis: int, stack: bool = False
  ) -> LaidOutTensor:
    x = _laid_out(x)
    n = self.shape[mesh_axis].size
    if n == 1 and not stack:
      return _laid_out(x)
    value = _slice_of(x)
    shape = value.shape.as_list()
    if stack:
      shape.insert(concat_axis + len(shape) + 1 if concat_axis < 0 else concat_axis, n)
    else:
      shape[concat_axis] *= n
    over = {mesh_axis: (n - 1) * _bytes_of(value)}
    return self._exchange("allconcat", x, (mesh_axis,), over, shape)

  def alltoall(
    self, x: LaidOut, mesh_axis: int | Sequence[int], split_axis: int, concat_axis: int
  ) -> LaidOutTensor:
    x = _laid_out(x)
    axes = self.group_axes(mesh_axis)
    if not axes:
      return _laid_out(x)
    value = _slice_of(x)
    shape = value.shape.as_list()
    n = self._split_parts("alltoall", shape, split_axis, axes)
    shape[split_axis] //= n
    shape[concat_axis] *= n
    # As in a sum over several axes: the last axis first, then the others with the rest.
    part, over = _bytes_of(value) // n, {}
    for axis in axes:
      size = self.shape[axis].size
      over[axis] = (size - 1) * part
      part *= size
    return self._exchange("alltoall", x, tuple(axes), over, shape)

  def reduce_scatter(self, x: LaidOut, mesh_axis: int, split_axis: int) -> LaidOutTensor:
    x = _laid_out(x)
    axes = self.group_axes(mesh_axis)
    if not axes:
      return _laid_out(x)
    value = _slice_of(x)
    shape = value.shape.as_list()
    n = self._split_parts("reduce_scatter", shape, split_axis, axes)
    shape[split_axis] //= n
    over = {mesh_axis: _bytes_of(value) // n * (n - 1)}
    return self._exchange("reduce_scatter", x, (mesh_axis,), over, shape, "SUM")

  def receive(
    self, x: LaidOut, mesh_axis: int | Sequence[int], source_pcoord: Sequence[int | None]
  ) -> LaidOutTensor:
    x = _laid_out(x)
    axes = self.group_axes(mesh_axis)
    self._check_sources(source_pcoord, axes)
    value = _slice_of(x)
    if all(s is None or s == k for k, s in enumerate(source_pcoord)):
      return LaidOutTensor([self.placeholder(value.shape, value.dtype)])
    # A message across several axes counts once, in equal shares.
    size, n = _bytes_of(value), len(axes)
    over = {axis: size * (i + 1) // n - size * i // n for i, axis in enumerate(axes)}
    return self._exchange("receive", x, tuple(axes), over, value.shape)

  def import_tf_tensor(self, x: Tensor | Shape, tf_x: tf.Tensor) -> LaidOutTensor:
    shape = x if isinstance(x, Shape) else x.shape
    dtype = tf_x.dtype if tf.is_tensor(tf_x) else tf.convert_to_tensor(tf_x).dtype
    self.inputs.append(self.placeholder(self.slice_shape(shape), dtype))
    return LaidOutTensor([self.inputs[-1]])

  def export_to_tf_tensor(self, x: Tensor | Shape, laid_out_x: LaidOut) -> tf.Tensor:
    shape = x if isinstance(x, Shape) else x.shape
    dtype = _slice_of(laid_out_x.to_laid_out_tensor()).dtype
    return placeholder(shape.to_integer_list, dtype)

  def Print(self, x: LaidOut, data: Sequence[LaidOut], message: str, **kwargs: Any) -> Any:  # noqa: N802
    del data, message, kwargs
    return x

  def _exchange(
    self,
    kind: str,
    x: LaidOutTensor,
    mesh_axes: tuple[int, ...],
    bytes_over: dict[int, int],
    shape: Sequence[int],
    reduction: str = "",
    slice_bytes: int | None = None,
  ) -> LaidOutTensor:
    """Records an exchange; its result has the given slice shape."""
    value = _slice_of(x)
    size = _bytes_of(value) if slice_bytes is None else slice_bytes
    self.collectives.append(Collective(kind, reduction, mesh_axes, size, bytes_over, x))
    return LaidOutTensor([self.placeholder(shape, value.dtype)])


def _slice_of(x: LaidOutTensor) -> tf.Tensor:
  return tf.convert_to_tensor(x.one_slice)


def _laid_out(x: LaidOut) -> LaidOutTensor:
  result: LaidOutTensor = x.to_laid_out_tensor()
  return result


def _bytes_of(x: tf.Tensor) -> int:
  return int(x.shape.num_elements()) * int(x.dtype.size)
