"""The contract of a mesh implementation: what each defines for itself.

A `MeshImpl` runs per-device code (`slicewise`), moves slices between devices
(the collectives), and holds variables. An implementation defines `slicewise`,
`laid_out_pnum`, `allreduce`, `allconcat`, `alltoall`, `receive`, `import_tf_tensor`,
`export_to_tf_tensor`, where its variables are, and `run` unless one program stands for
all processors. What follows from these is in `mesh_impl`.

`LaidOutVariable` is a variable of the store on such a mesh, as one lowering sees it.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.errors import ArgumentError, MeshShapeError
from mesh_tensorflow.meshes import laid_out, memory
from mesh_tensorflow.meshes.laid_out import LaidOut
from mesh_tensorflow.meshes.layout import LayoutLike, MeshLayout
from mesh_tensorflow.meshes.remade_stores import Life
from mesh_tensorflow.meshes.schedules import check_schedule
from mesh_tensorflow.meshes.shares import SharesLike, assign_processors, device_grid
from mesh_tensorflow.meshes.store import StoredVariable, VariableStore
from mesh_tensorflow.numerics import compact, padding, random_bits
from mesh_tensorflow.program.dimensions import Shape, ShapeLike
from mesh_tensorflow.program.graph import Tensor

_LOG = logging.getLogger("mesh_tensorflow")

_Self = TypeVar("_Self", bound="MeshContract")


class MeshContract(MeshLayout):
  """Base class of `MeshImpl`: what an implementation defines.

  Args:
    shape: mesh shape; a `Shape`, a list of dimensions, or "rows:2,cols:4".
    layout_rules: `LayoutRules`, or what `convert_to_layout_rules` takes.
    variable_store: where variables live; a new `VariableStore` by default.
    shares: how many processors each device gets; see `shares.assign_processors`.

  Raises:
    MeshShapeError: the shares do not suit the mesh.
  """

  # Programs of the TF1 library make laid-out tensors by mesh_impl.LaidOutTensor(slices).
  LaidOutTensor = laid_out.LaidOutTensor

  def __init__(
    self,
    shape: ShapeLike,
    layout_rules: LayoutLike,
    *,
    variable_store: VariableStore | None = None,
    shares: SharesLike | None = None,
  ):
    super().__init__(shape, layout_rules)
    # Of a mesh without devices. One with devices names them.
    self._processor_devices = list(range(self.size))
    if shares is not None:
      count = device_grid(self.shape, shares).size
      self._processor_devices = assign_processors(self.shape, range(count), shares)
    if variable_store is None:
      variable_store = VariableStore()
      variable_store.life = Life(self, variable_store)
    self.variable_store = variable_store
    self._stages: dict[str, Any] = {}
    self._schedule = "1f1b"

  @property
  def stages(self) -> dict[str, Any]:
    """The mesh of each stage of a pipeline by its name, this one first; {} if there is none."""
    return dict(self._stages)

  @property
  def schedule(self) -> str:
    """The schedule of the pipeline; see `mtf.serialize_training_step`."""
    return self._schedule

  @checked
  def with_stages(self: _Self, others: Sequence[_Self], schedule: str = "1f1b") -> _Self:
    """The same mesh as the first stage of a pipeline.

    An `mtf.function` on it is one on the meshes "stage0", "stage1", ...

    Args:
      others: the meshes of the other stages, of the same variable store and of other devices.
      schedule: "gpipe", "1f1b" or "zero_bubble"; see `mtf.serialize_training_step`.

    Raises:
      MeshShapeError: two stages have a device in common.
      ArgumentError: there is no such schedule, or one of the others has stages itself.
    """
    check_schedule(schedule, "with_stages")
    first = copy.copy(self)
    meshes = [first, *others]
    owner: dict[Any, int] = {}
    for i, impl in enumerate(meshes):
      if i and impl.stages:
        raise ArgumentError(
          f"with_stages: the mesh of stage {i} is a pipeline of {len(impl.stages)} stages itself; "
          "give the mesh of each stage"
        )
      for p in range(impl.size):
        device = impl.processor_device(p) if impl.has_devices else None
        if device and owner.setdefault(device, i) != i:
          raise MeshShapeError(
            f"stages {owner[device]} and {i} of a pipeline have device {device} in common: each "
            "stage computes while the others do, on devices of its own"
          )
    first._stages = {f"stage{i}": impl for i, impl in enumerate(meshes)}
    first._schedule = schedule
    return first

  def with_store(self: _Self, variable_store: VariableStore) -> _Self:
    """The same mesh, and its stages, with other variables.

    Args:
      variable_store: where they live.
    """
    other = copy.copy(self)
    other.variable_store = variable_store
    if self._stages:
      _, *others = self._stages.values()
      stages = [stage.with_store(variable_store) for stage in others]
      other._stages = dict(zip(self._stages, [other, *stages]))
    return other

  def with_layout(self: _Self, layout_rules: LayoutLike) -> _Self:
    """See `MeshLayout.with_layout`; of a pipeline all stages get the layout rules."""
    other = super().with_layout(layout_rules)
    if not self._stages:
      return other
    _, *others = self._stages.values()
    return other.with_stages([impl.with_layout(layout_rules) for impl in others], self._schedule)

  @property
  def supports_control_dependencies(self) -> bool:
    """True: operations run in the order of the graph."""
    return True

  # ------------------------------------------------------------ for the store

  @property
  def has_devices(self) -> bool:
    """False of the base class, which knows the sizes of slices only."""
    return type(self).processor_device is not MeshContract.processor_device

  @property
  def processors_of_devices(self) -> list[int]:
    """Number of processors of each device, in the order of their first processors."""
    names: list[Any] = self._processor_devices
    if self.has_devices:
      # The default device stands for any.
      names = [self.processor_device(p) or p for p in range(self.size)]
    return list(collections.Counter(names).values())

  @property
  def local_processors(self) -> Sequence[int]:
    """Numbers of the processors of this process."""
    raise NotImplementedError

  @property
  def processors_of_workers(self) -> Sequence[Sequence[int]]:
    """For each worker process the numbers of its processors; by default there is this one."""
    return [self.local_processors]

  @property
  def is_of_cluster(self) -> bool:
    """True if it is one mesh for all workers of a cluster, of whose devices it has some."""
    return False

  @property
  def is_elsewhere(self) -> bool:
    """True if this process has no devices of it, and knows the shapes of slices only."""
    return False

  @property
  def is_compiled_by_xla(self) -> bool:
    """True if XLA compiles programs, which knows fewer operations; False does not rule it out."""
    return False

  @property
  def lowerings_per_run(self) -> int:
    """Number of lowerings per run of a program in this process: 1, for all processors."""
    return 1

  def processor_device(self, pnum: int) -> str | None:
    """The device of a processor, by its number."""
    raise NotImplementedError

  def program_slices(self, stored: StoredVariable) -> list[tf.Variable]:
    """The slices of a stored variable that the running program holds."""
    return list(stored.slices)

  def in_program(self, slices: Sequence[Any]) -> laid_out.LaidOutTensor:
    """A laid-out tensor, in the running program, of tensors around it.

    Args:
      slices: one for each processor of this process.
    """
    return laid_out.LaidOutTensor(slices)

  def create_slices(
    self,
    name: str,
    begins: Sequence[tuple[int, ...]],
    value: Callable[[tuple[int, ...]], tf.Tensor],
    trainable: bool,
  ) -> tuple[tf.Variable, ...]:
    """Makes the slices of a variable, each on its device.

    Processors of one device with the same slice share it if one program runs for all of them. (If
    each runs a program of its own, each assigns to a slice of its own.)

    Args:
      name: what the names of the slices begin with.
      begins: for each processor of this process the offset of its slice.
      value: the initial value of the slice at an offset.
      trainable: whether the variable is trained.
    """
    made: list[tf.Variable] = []
    values: dict[tuple[int, ...], tf.Tensor] = {}
    shared: dict[Any, tf.Variable] = {}
    for pnum, begin in zip(self.local_processors, begins):
      key = (self.processor_device(pnum), begin)
      if key in shared and self.lowerings_per_run == 1:
        made.append(shared[key])
        continue
      with tf.device(self.processor_device(pnum)):
        if begin not in values:
          values[begin] = value(begin)
        made.append(
          tf.Variable(
            values[begin],
            trainable=trainable,
            name=f"{name}_{pnum}",
            # tf.function would trace its function again for a variable that it lifted.
            experimental_enable_variable_lifting=False,
          )
        )
      shared[key] = made[-1]
    return tuple(made)

  # ------------------------------------------------------------- the contract

  def slicewise(self, fn: Callable[..., object], *inputs: Any) -> Any:
    """Calls `fn` on every processor's slices.

    Args:
      fn: takes one slice for each laid-out input, and other inputs as they are.
      *inputs: laid-out tensors (anything with `to_laid_out_tensor`) and others.

    Returns:
      A `LaidOutTensor`, or a tuple of them if `fn` returns a tuple.
    """
    raise NotImplementedError

  def slicewise_update(self, fn: Callable[..., object], variables: LaidOut, *inputs: Any) -> Any:
    """`slicewise` of a function that changes its first argument, a tf.Variable.

    Called once for a variable that several processors share; they would all do the same.

    Args:
      fn: takes a tf.Variable, and slices as of `slicewise`.
      variables: the tf.Variables of the program, laid out.
      *inputs: as of `slicewise`.
    """
    return self.slicewise(fn, variables, *inputs)

  def laid_out_pnum(self) -> laid_out.LaidOutTensor:
    """The processor number: an int32 scalar per processor (Python ints if static)."""
    raise NotImplementedError

  def allreduce(
    self, x: LaidOut, mesh_axes: Sequence[int], reduction_fn_string: str
  ) -> laid_out.LaidOutTensor:
    """Elementwise "SUM", "MAX" or "MIN" over the processors that differ along `mesh_axes`."""
    raise NotImplementedError

  def allconcat(
    self, x: LaidOut, mesh_axis: int, concat_axis: int, stack: bool = False
  ) -> laid_out.LaidOutTensor:
    """Concatenates the slices along a mesh axis, on every processor.

    Args:
      x: a laid-out tensor.
      mesh_axis: the mesh axis along which the slices differ.
      concat_axis: the tensor axis to concatenate (or, with `stack`, to insert).
      stack: stack the slices instead of concatenating them.
    """
    raise NotImplementedError

  def alltoall(
    self, x: LaidOut, mesh_axis: int | Sequence[int], split_axis: int, concat_axis: int
  ) -> laid_out.LaidOutTensor:
    """Splits each slice along one tensor axis, exchanges, concatenates along another.

    Args:
      x: a laid-out tensor.
      mesh_axis: the mesh axis along which processors exchange; or several, increasing: then the
        parts go to, and come from, the processors in the row-major order of their coordinates.
      split_axis: the tensor axis to split.
      concat_axis: the tensor axis to concatenate.

    Raises:
      ShapeError: `split_axis` cannot be split into as many parts.
    """
    raise NotImplementedError

  def receive(
    self, x: LaidOut, mesh_axis: int | Sequence[int], source_pcoord: Sequence[int | None]
  ) -> laid_out.LaidOutTensor:
    """Every processor receives the slice of another one along the mesh axis (or a shared one).

    Args:
      x: a laid-out tensor.
      mesh_axis: the mesh axis; or several, increasing, whose coordinates are then numbered
        row-major.
      source_pcoord: the slice at coordinate k becomes that of `source_pcoord[k]`, or zeros
        for None.

    Raises:
      ShapeError: an entry is missing, or is no coordinate.
    """
    raise NotImplementedError

  def import_tf_tensor(self, x: Tensor | Shape, tf_x: tf.Tensor) -> laid_out.LaidOutTensor:
    """Cuts a whole tf.Tensor into slices, laid out as `x` (a `Tensor` or `Shape`)."""
    raise NotImplementedError

  def export_to_tf_tensor(self, x: Tensor | Shape, laid_out_x: LaidOut) -> tf.Tensor:
    """Assembles the whole tensor of `x` (a `Tensor` or `Shape`) from its slices."""
    raise NotImplementedError

  def run(
    self,
    fn: Callable[..., object],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
  ) -> Any:
    """Calls the per-device program `fn(*args, **kwargs)` on every processor.

    Args:
      fn: builds a graph and a `Lowering` on this mesh; returns a structure of tf.Tensors
        that are equal on every processor (exported tensors are).
      args: positional arguments; every processor gets them whole.
      kwargs: keyword arguments, or None.

    Returns:
      What `fn` returned, on the first processor.
    """
    return fn(*args, **(kwargs or {}))

  def run_per_device(
    self,
    fn: Callable[..., object],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
  ) -> list[Any]:
    """As `run`, but returns the list of what every (local) processor's program returned.

    Under a placement mesh, whose program runs once for all processors, the list has one element.
    """
    return [self.run(fn, args, kwargs)]

  def errors_of_runs(self, what: str = "") -> contextlib.AbstractContextManager[None]:
    """Context manager for calls of a tf.function on this mesh: converts errors to typed ones.

    Args:
      what: name of the function, for messages.
    """
    return memory.errors(what)

  def result_slices(self, x: LaidOut, shape: Shape) -> list[tf.Tensor]:
    """Slices of a result that a per-device program returns, for `combine_local_slices`.

    Args:
      x: the result, laid out.
      shape: a `Shape`.
    """
    del shape
    return x.to_laid_out_tensor().tensor_list

  def Print(self, x: LaidOut, data: Sequence[LaidOut], message: str, **kwargs: Any) -> Any:  # noqa: N802
    """Prints slices of `data` whenever `x` is computed; returns x."""
    del data, message, kwargs
    _LOG.warning("%s does not print", type(self).__name__)
    return x


def _assign_cast(variable: Any, slice_variable: tf.Variable, value: tf.Tensor) -> Any:
  del variable
  if value.dtype != slice_variable.dtype:
    value = tf.cast(value, slice_variable.dtype)
  return slice_variable.assign(value, read_value=False)


class LaidOutVariable:
  """A stored variable as one lowering sees it.

  Args:
    mesh_impl: the `MeshImpl`.
    stored: the `StoredVariable`.
    variable: the mtf `Variable` operation; None of one that no graph has (the run counter).
    scales: of a variable in 8 bits those of its scales, see `compact.encode`.

  Attributes:
    stored: the `StoredVariable`.
    stored_impl: the mesh with the layout of the slices; it is finer than that of `mesh_impl` if
      they are shards (`MeshLayout.stored_layout`).
  """

  def __init__(
    self,
    mesh_impl: Any,
    stored: StoredVariable,
    variable: Any,
    scales: Sequence[LaidOutVariable] = (),
  ):
    self._scales = list(scales)
    self._mesh_impl = mesh_impl
    self._variable = variable
    self.stored = stored
    self.stored_impl = mesh_impl if variable is None else variable.stored_impl(mesh_impl)

  @property
  def slices(self) -> list[tf.Variable]:
    """The tf.Variables of the processors that this program runs."""
    found: list[tf.Variable] = self._mesh_impl.program_slices(self.stored)
    return found

  @property
  def laid_out_tensor(self) -> laid_out.LaidOut:
    """The current values (slice dtype)."""
    return self.read(self.stored.slice_dtype)

  def read(
    self, dtype: tf.DType, after: Callable[[], Sequence[tf.Tensor]] = list
  ) -> laid_out.LaidOut:
    """The current values, cast; of shards they are gathered when they are used.

    Args:
      dtype: their dtype.
      after: see `MeshImpl.from_shards`.
    """
    # Cast before they are gathered.
    found: laid_out.LaidOut = self._mesh_impl.from_shards(
      self.read_shards(dtype), self.stored.shape, self.stored_impl, after
    )
    return found

  def read_shards(self, dtype: tf.DType) -> laid_out.LaidOutTensor:
    """The current values in the layout of the slices, cast."""
    impl = self._mesh_impl
    values = impl.slicewise(lambda v: v.value(), impl.LaidOutTensor(self.slices))
    if padding.is_filled():
      values = self.stored_impl.without_padding(values, self.stored.shape, padding.fill_of)
    if self._scales:
      values = impl.slicewise(
        lambda x, *scales: tf.cast(compact.decode(x, scales), dtype),
        values,
        *[s.read_shards(tf.float32) for s in self._scales],
      )
    elif dtype != self.stored.slice_dtype:
      values = impl.slicewise(lambda x: tf.cast(x, dtype), values)
    found: laid_out.LaidOutTensor = values
    return found

  def write_shards(self, values: LaidOut, key: Any = None) -> list[Any]:
    """Sets the slices; what is kept in a compact form is rounded stochastically.

    Args:
      values: floating, in the layout of the slices.
      key: of the random numbers; a Python int, or uint32 scalars laid out. None for a variable
        that is not `compact`.

    Returns:
      What the assignments returned.
    """
    values = self.stored_impl.without_padding(values, self.stored.shape, padding.zero)
    if getattr(self._variable, "compact", None) is None:
      return self.assign_shards(_assign_cast, values)
    impl, shape = self.stored_impl, self.stored.shape
    full, part = shape.to_integer_list, impl.slice_shape(shape)
    random = [key, *impl.laid_out_slice_begin(shape)]

    def words(key: int | tf.Tensor, *begin: int | tf.Tensor) -> tf.Tensor:
      return random_bits.half_words(key, full, begin, part)

    if not self._scales:
      rounded = impl.slicewise(
        lambda x, *random: compact.round_to_bfloat16(x, words(*random)), values, *random
      )
      return self.assign_shards(_assign_cast, rounded)
    scales = self._new_scales(values)
    dtype = self.stored.slice_dtype
    codes = impl.slicewise(
      lambda x, *rest: compact.encode(x, rest[: len(scales)], words(*rest[len(scales) :]), dtype),
      values,
      *scales,
      *random,
    )
    done = [op for s, x in zip(self._scales, scales) for op in s.write_shards(x)]
    return done + self.assign_shards(_assign_cast, codes)

  def _new_scales(self, values: LaidOut) -> list[laid_out.LaidOut]:
    """The scales of values: those of the slices, compared along the mesh axes that cut these."""
    impl = self.stored_impl
    layout = impl.tensor_layout(self.stored.shape)
    found = []
    for i, x in enumerate(impl.slicewise(lambda x: tuple(compact.scales(x)), values)):
      own = None if len(layout) == 1 else layout[i]
      axes = [a for a in layout if a is not None and a != own and impl.shape[a].size > 1]
      found.append(impl.allreduce(x, axes, "MAX") if axes else x)
    return found

  def to_shards(self, values: LaidOut) -> laid_out.LaidOutTensor:
    """Values in the layout of the program, in the layout of the slices, with zeros as padding."""
    shape = self.stored.shape
    shards = self._mesh_impl.to_shards(values, shape, self.stored_impl)
    # Any other values would do; these stay finite, whatever an update does with them.
    found: laid_out.LaidOutTensor = self.stored_impl.without_padding(shards, shape, padding.zero)
    return found

  def assign_to_slices(self, assign_fn: Callable[..., object], values: LaidOut) -> list[Any]:
    """Runs `assign_fn(mtf_variable, slice_tf_variable, tf_value)` on every slice.

    Args:
      assign_fn: as `mtf.assign_slice`.
      values: a laid-out tensor.

    Returns:
      A list of what `assign_fn` returned.
    """
    return self.assign_shards(assign_fn, self.to_shards(values))

  def assign_shards(self, assign_fn: Callable[..., object], values: LaidOut) -> list[Any]:
    """As `assign_to_slices`, of values in the layout of the slices."""
    results: list[Any] = []
    self._is_changed()

    def run(v: tf.Variable, value: tf.Tensor) -> tf.Tensor:
      results.append(assign_fn(self._variable, v, value))
      return value

    self._mesh_impl.slicewise_update(run, self._mesh_impl.LaidOutTensor(self.slices), values)
    return results

  def update(self, fn: Callable[..., object], *values: Any) -> None:
    """Runs `fn(slice_tf_variable, *slices)` for its effect on every processor.

    Args:
      fn: the function.
      *values: laid out as the slices are, see `to_shards`; or scalars.
    """

    def run(v: tf.Variable, *slices: tf.Tensor) -> int:
      fn(v, *slices)
      # `slicewise` wants a result of each slice.
      return 0

    self.update_to(run, *values)

  def update_to(self, fn: Callable[..., object], *values: Any) -> Any:
    """As `update`; returns what the function returned, laid out as the slices are."""
    self._is_changed()
    variables = self._mesh_impl.LaidOutTensor(self.slices)
    return self._mesh_impl.slicewise_update(fn, variables, *values)

  def _is_changed(self) -> None:
    life = self._mesh_impl.variable_store.life
    if life is not None:
      life.changed(self.stored)
