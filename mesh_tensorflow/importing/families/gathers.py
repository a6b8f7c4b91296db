"""Reading and writing at computed positions, and look-ups in constant tables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from mesh_tensorflow.errors import UnsupportedError
from mesh_tensorflow.importing.axes import Axes
from mesh_tensorflow.importing.families.inputs import static_input
from mesh_tensorflow.importing.families.state import read_value
from mesh_tensorflow.importing.nodes import Node, Wire
from mesh_tensorflow.importing.rules import (
  Construction,
  Dims,
  Label,
  Labelled,
  Labels,
  Rule,
  Slicewise,
  label_dims,
  rule,
)
from mesh_tensorflow.importing.value import AxisDims, Value, flat
from mesh_tensorflow.operations.binary import add, multiply
from mesh_tensorflow.operations.constants import ones_like
from mesh_tensorflow.operations.control import stop_gradient
from mesh_tensorflow.operations.elementwise import cast
from mesh_tensorflow.operations.one_hot import one_hot
from mesh_tensorflow.operations.reduction import broadcast
from mesh_tensorflow.operations.scatter import SplitGatherOperation, SplitScatterAddOperation
from mesh_tensorflow.operations.slicewise import slicewise
from mesh_tensorflow.operations.where import where
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Tensor


def _looked_up(table: Tensor, indices: Tensor, axis: Dims) -> Tensor:
  """Gathers rows of a table along an axis, which may be of size 1 (no dimension)."""
  if not axis:
    shape = Shape([*indices.shape, *(d for d in table.shape if d not in indices.shape)])
    return broadcast(table, shape)
  (dim,) = axis
  return SplitGatherOperation(table, indices, dim).outputs[0]


def _check_numbers(node: Node) -> None:
  """Checks that the gathered values can be summed.

  Raises:
    UnsupportedError: they are strings, which each device gathers whole.
  """
  if node.outputs[0].dtype == tf.string:
    raise UnsupportedError(f"from_tensorflow: {node} gathers texts, which no rule splits")


@rule("Gather", "GatherV2")
class Gather(Labelled):
  """Slices of a tensor at positions along an axis."""

  def labels(self, node: Node) -> Labels:
    table, indices = node.inputs[:2]
    _check_numbers(node)
    axis, batch = _gather_axes(node)
    first: list[Label] = [f"table{i}" for i in range(table.rank)]
    second: list[Label] = [f"index{i}" for i in range(indices.rank)]
    second[:batch] = first[:batch]
    out = [*first[:axis], *second[batch:], *first[axis + 1 :]]
    others: list[Any] = [None] * (len(node.inputs) - 2)
    return Labels([first, second, *others], [out])

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    axis, _ = _gather_axes(node)
    label = f"table{axis}"
    labels, wire = self.labels(node), node.inputs[0]
    table, looked_up = xs[0], dims[label]
    if len(looked_up) > 1:
      # A product of dimensions: for the time of the look-up it is one, of its own.
      axes = [() if n == 1 else dims[x] for n, x in zip(wire.shape, labels.inputs[0] or ())]
      looked_up = (Dimension("_gather", wire.shape[axis]),)
      renamed = [*axes[:axis], looked_up, *axes[axis + 1 :]]
      table = Value(table, tuple(axes)).with_axes(renamed).tensor
    return [_looked_up(table, xs[1], looked_up)]


def _gather_axes(node: Node) -> tuple[int, int]:
  """Axis along which a gather looks up, and its number of batch axes."""
  table, indices = node.inputs[:2]
  if node.type == "Gather":
    return 0, 0
  axis = int(static_input(node, 2, "axis"))
  batch = int(node.attributes["batch_dims"])
  return axis + table.rank if axis < 0 else axis, batch + indices.rank if batch < 0 else batch


@rule("ResourceGather")
class ResourceGather(Rule):
  """Rows of a variable."""

  def relate(self, node: Node, axes: Axes) -> None:
    table, indices = node.inputs
    (out,) = node.outputs
    batch = int(node.attributes["batch_dims"])
    for i in range(indices.rank):
      axes.join((indices, i), (out, i))
    for i in range(batch):
      axes.join((table, i), (out, i))
    for i in range(batch + 1, table.rank):
      axes.join((table, i), (out, indices.rank + i - batch - 1))

  def build(self, node: Node, make: Construction) -> Sequence[Value | None]:
    table, indices = node.inputs
    if table.variable is None:
      raise UnsupportedError(f"from_tensorflow: {node} looks up in what is no variable")
    batch = int(node.attributes["batch_dims"])
    first: list[Label] = [f"table{i}" for i in range(table.rank)]
    second: list[Label] = [f"index{i}" for i in range(indices.rank)]
    second[:batch] = first[:batch]
    out = [*first[:batch], *second[batch:], *first[batch + 1 :]]
    dims = label_dims(node, Labels([first, second], [out]), make)
    # A variable has all its axes, of size 1 too, which `with_axes` takes off.
    whole = make.read(table.variable)
    weights = Value(whole, tuple((d,) for d in whole.shape)).with_axes(_axes(table, first, dims))
    where_from = make.value(indices, _axes(indices, second, dims))
    y = _looked_up(weights.tensor, where_from.tensor, dims[f"table{batch}"])
    return [Value(y, _axes(node.outputs[0], out, dims))]


def _axes(wire: Wire, labels: Sequence[Label], dims: Mapping[Label, Dims]) -> AxisDims:
  return tuple(() if n == 1 else dims[label] for n, label in zip(wire.shape, labels))


@rule("GatherNd")
class GatherNd(Labelled):
  """Slices at positions along the first axes; the indices' last axis has a number for each."""

  def labels(self, node: Node) -> Labels:
    table, indices = node.inputs
    _check_numbers(node)
    depth = indices.shape[-1]
    first: list[Label] = [f"table{i}" for i in range(table.rank)]
    second: list[Label] = [f"index{i}" for i in range(indices.rank - 1)]
    return Labels(
      [first, [*second, "depth"]], [[*second, *first[depth:]]], ["depth", *first[:depth]]
    )

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    labels, (table, indices) = self.labels(node), node.inputs
    depth = indices.shape[-1]
    axes = _axes(table, labels.inputs[0] or (), dims)
    flat_dim = Dimension("_gather_nd", math.prod(table.shape[:depth]))
    rows = Value(xs[0], axes).ordered()
    rows = Value(rows, axes).with_axes([(flat_dim,), *axes[depth:]]).tensor
    positions = _positions(xs[1], dims["depth"], table.shape[:depth])
    return [_looked_up(rows, positions, (flat_dim,))]


@rule("ResourceGatherNd")
class ResourceGatherNd(GatherNd):
  """Slices of a variable."""

  def build(self, node: Node, make: Construction) -> Sequence[Value | None]:
    labels, indices = self.labels(node), node.inputs[1]
    dims = label_dims(node, labels, make)
    first, second = (_axes(w, n or (), dims) for w, n in zip(node.inputs, labels.inputs))
    value = read_value(node, make).with_axes(first)
    (y,) = self.compute(node, [value.tensor, make.value(indices, second).tensor], dims, make)
    return [Value(y, _axes(node.outputs[0], labels.outputs[0], dims))]


def _positions(indices: Tensor, depth: Dims, sizes: Sequence[int]) -> Tensor:
  """Row-major numbers of positions in axes of the given sizes; -1 for those outside."""
  strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
  dims = indices.shape.dims
  axis = dims.index(depth[0]) if depth else None

  def number(t: tf.Tensor) -> tf.Tensor:
    parts = [t] if axis is None else tf.unstack(t, axis=axis)
    inside = tf.ones_like(parts[0], tf.bool)
    total = tf.zeros_like(parts[0])
    for part, size, stride in zip(parts, sizes, strides):
      inside = tf.logical_and(inside, tf.logical_and(part >= 0, part < size))
      total += part * tf.constant(stride, part.dtype)
    return tf.where(inside, total, -tf.ones_like(total))

  rest = [d for d in dims if d not in depth]
  y: Tensor = slicewise(number, [indices], Shape(rest), indices.dtype, rest, 0, name="positions")
  return y


class _Scatter(Labelled):
  """Adds updates at positions along the first axes of a tensor."""

  # Number of the input that is the indices, of the updates; of the tensor that is changed.
  _indices, _updates = 0, 1
  _target: int | None = None

  def labels(self, node: Node) -> Labels:
    (out,) = node.outputs
    indices = node.inputs[self._indices]
    depth = indices.shape[-1]
    first: list[Label] = [f"table{i}" for i in range(out.rank)]
    second: list[Label] = [f"index{i}" for i in range(indices.rank - 1)]
    inputs: list[Any] = [None] * len(node.inputs)
    inputs[self._indices] = [*second, "depth"]
    inputs[self._updates] = [*second, *first[depth:]]
    if self._target is not None:
      inputs[self._target] = first
    return Labels(inputs, [first], ["depth", *first[:depth]])

  def _added(self, node: Node, updates: Tensor, indices: Tensor, dims: Mapping[Label, Dims]) -> Any:
    """The sum of the updates at each position of the output, of the dimensions of its labels."""
    (out,) = node.outputs
    depth = node.inputs[self._indices].shape[-1]
    axes = _axes(out, self.labels(node).outputs[0], dims)
    positions = _positions(indices, dims["depth"], out.shape[:depth])
    flat_dim = Dimension("_scatter_nd", math.prod(out.shape[:depth]))
    rows = SplitScatterAddOperation(
      updates, positions, Shape([flat_dim, *flat(axes[depth:])]), flat_dim
    ).outputs[0]
    return Value(rows, ((flat_dim,), *axes[depth:])).with_axes(axes).tensor


@rule("ScatterNd")
class ScatterNd(_Scatter):
  """A tensor of zeros, with updates added at positions."""

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    return [self._added(node, xs[1], xs[0], dims)]


@rule("TensorScatterAdd", "TensorScatterSub", "TensorScatterUpdate")
class TensorScatter(_Scatter):
  """Adds, subtracts or writes updates at positions of a tensor.

  Of several updates written to one position TensorFlow takes any; here it is their mean.
  """

  _target, _indices, _updates = 0, 1, 2

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    tensor, indices, updates = xs
    dtype = tensor.dtype
    if node.type == "TensorScatterUpdate" and not dtype.is_floating:
      # Sums of these are exact in int32; bools have none.
      updates = cast(updates, tf.int64 if dtype == tf.int64 else tf.int32)
    total = self._added(node, updates, indices, dims)
    if node.type == "TensorScatterAdd":
      return [add(tensor, total, output_shape=tensor.shape)]
    if node.type == "TensorScatterSub":
      return [add(tensor, multiply(total, -1), output_shape=tensor.shape)]
    ones = cast(ones_like(cast(updates, tf.float32)), tf.float32)
    count = stop_gradient(self._added(node, ones, indices, dims))
    dims_in_order = tensor.shape.dims

    def put(old: tf.Tensor, new: tf.Tensor, n: tf.Tensor) -> tf.Tensor:
      m = tf.cast(tf.maximum(n, 1.0), new.dtype)
      mean = new / m if new.dtype.is_floating else new // m
      return tf.where(n > 0, tf.cast(mean, old.dtype), old)

    operands = [Value(t, tuple((d,) for d in dims_in_order)).ordered() for t in (total, count)]
    return [slicewise(put, [tensor, *operands], tensor.shape, dtype, dims_in_order, name=node.type)]


@rule("OneHot")
class OneHot(Labelled):
  """One-hot encoding along a new axis."""

  def labels(self, node: Node) -> Labels:
    labels: list[Label] = list(range(node.inputs[0].rank))
    out = list(labels)
    axis = int(node.attributes["axis"])
    out.insert(len(labels) if axis < 0 else axis, "depth")
    scalars: list[Any] = [None, (), ()]
    return Labels([labels, *scalars], [out])

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    indices, _, on, off = xs
    (out,) = node.outputs
    depth = dims["depth"]
    size = math.prod(d.size for d in depth)
    one = depth[0] if len(depth) == 1 else Dimension("_one_hot", size)
    y = one_hot(indices, one, dtype=tf.bool, on_value=True, off_value=False)
    axes = tuple((d,) for d in y.shape)
    y = Value(y, axes).with_axes([*axes[:-1], depth]).tensor
    values = [node.static(i) for i in (2, 3)]
    if any(v is None for v in values):
      # TensorFlow has no gradient of these either.
      return [where(y, stop_gradient(on), stop_gradient(off), output_shape=y.shape)]
    high, low = (v.item() for v in values if v is not None)
    return [_choice(y, high, low, out.dtype)]


def _choice(mask: Tensor, high: Any, low: Any, dtype: tf.DType) -> Tensor:
  """Chooses between two numbers by a mask."""
  if dtype == tf.bool and high and not low:
    return mask
  if (high, low) == (1, 0):
    return cast(mask, dtype)
  dims = mask.shape.dims

  def choose(m: tf.Tensor) -> tf.Tensor:
    return tf.where(m, tf.constant(high, dtype), tf.constant(low, dtype))

  y: Tensor = slicewise(choose, [mask], mask.shape, dtype, dims, 0, name="one_hot_values")
  return y


@rule("UnsortedSegmentSum")
class UnsortedSegmentSum(Labelled):
  """Segment sums; data and segment ids may be split."""

  def labels(self, node: Node) -> Labels:
    data, numbers, _ = node.inputs
    labels: list[Label] = list(range(data.rank))
    return Labels([labels, labels[: numbers.rank], None], [["segments", *labels[numbers.rank :]]])

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    data, numbers, _ = xs
    rest = [d for d in data.shape if d not in numbers.shape]
    return [_counted(data, numbers, dims["segments"], rest)]


def _counted(data: Tensor, numbers: Tensor, segments: Dims, rest: Sequence[Dimension]) -> Tensor:
  """Sums data by segment id."""
  size = math.prod(d.size for d in segments)
  one = segments[0] if len(segments) == 1 else Dimension("_segments", size)
  y = SplitScatterAddOperation(data, numbers, Shape([one, *rest]), one).outputs[0]
  return Value(y, ((one,), tuple(rest))).with_axes([segments, rest]).tensor


@rule("Bincount", "DenseBincount")
class Bincount(Labelled):
  """Counts how often each number occurs, or sums its weights."""

  def labels(self, node: Node) -> Labels:
    numbers, _, weights = node.inputs
    labels: list[Label] = list(range(numbers.rank))
    rows = labels[:1] if node.type == "DenseBincount" and numbers.rank == 2 else []
    given = labels if weights.shape == numbers.shape else None
    return Labels([labels, None, given], [[*rows, "numbers"]])

  def compute(
    self, node: Node, xs: Sequence[Any], dims: Mapping[Label, Dims], make: Construction
  ) -> Sequence[Tensor]:
    numbers, _, weights = xs
    (out,) = node.outputs
    if node.attributes.get("binary_output"):
      weights = None
    if weights is None:
      weights = cast(ones_like(cast(numbers, tf.float32)), out.dtype)
    rest = list(dims[0]) if len(self.labels(node).outputs[0]) == 2 else []
    count = _counted(weights, numbers, dims["numbers"], rest)
    if node.attributes.get("binary_output"):
      count = cast(cast(count, tf.bool), out.dtype)
    return [count]


@dataclasses.dataclass(frozen=True)
class _Table:
  """Contents of a table, sorted by key; by the hash of the key for strings."""

  sorted_by: npt.NDArray[np.generic]
  keys: npt.NDArray[np.generic]
  values: npt.NDArray[np.generic]


def _hashed(keys: tf.Tensor) -> tf.Tensor:
  """Integer hashes of string keys; integer keys themselves."""
  return tf.strings.to_hash_bucket_fast(keys, 2**63 - 1) if keys.dtype == tf.string else keys


def _contents(node: Node) -> _Table:
  """Reads the keys and values of the table that a node looks up in.

  Raises:
    UnsupportedError: the table may change, or is made in the function, or its keys are neither
      integers nor strings.
  """
  handle, keys, values = node.inputs[0].resource, node.inputs[1].dtype, node.outputs[0].dtype
  outside = "; look up outside of the function, and pass what is found as an argument"
  if handle is None:
    raise UnsupportedError(
      f"from_tensorflow: {node}: the table must be there before the function is traced{outside}"
    )
  if not (keys.is_integer or keys == tf.string):
    raise UnsupportedError(f"from_tensorflow: {node}: keys must be integers or strings{outside}")
  with tf.init_scope():
    try:
      none: Any = [tf.zeros([0], keys), tf.zeros([0], values)]
      tf.raw_ops.LookupTableInsertV2(table_handle=handle, keys=none[0], values=none[1])
    except tf.errors.UnimplementedError:
      pass  # So it stays as it is.
    else:
      raise UnsupportedError(
        f"from_tensorflow: {node}: the table may be written to: it is a state outside of the "
        f"function; make it a tf.lookup.StaticHashTable, or{outside[1:]}"
      )
    try:
      found = tf.raw_ops.LookupTableExportV2(table_handle=handle, Tkeys=keys, Tvalues=values)
    except tf.errors.OpError as e:
      raise UnsupportedError(
        f"from_tensorflow: {node}: the table must be initialized before the function is traced"
        f"{outside}"
      ) from e
    hashes = _hashed(found.keys).numpy()
    order = np.argsort(hashes)
    table = _Table(hashes[order], found.keys.numpy()[order], found.values.numpy()[order])
  if len(np.unique(hashes)) < len(hashes):
    raise UnsupportedError(f"from_tensorflow: {node}: two strings have the same hash{outside}")
  return table


@rule("LookupTableFind", "LookupTableFindV2")
class LookUp(Slicewise):
  """Values of keys, or the default."""

  def labels(self, node: Node) -> Labels:
    _, keys, default = node.inputs
    if default.rank or keys.shape != node.outputs[0].shape:
      raise UnsupportedError(f"from_tensorflow: {node}: values of a table must be scalars")
    _contents(node)
    axes = range(keys.rank)
    return Labels([None, axes, []], [axes])

  def run(self, node: Node) -> Callable[..., Any]:
    table = _contents(node)

    def find(keys: tf.Tensor, default: tf.Tensor) -> tf.Tensor:
      hashes = tf.reshape(_hashed(keys), [-1])
      places = tf.searchsorted(tf.constant(table.sorted_by, hashes.dtype), hashes)
      places = tf.reshape(tf.minimum(places, table.keys.size - 1), keys.shape)
      is_there = tf.gather(tf.constant(table.keys, keys.dtype), places) == keys
      values = tf.gather(tf.constant(table.values, node.outputs[0].dtype), places)
      return tf.where(is_there, values, default)

    return find
