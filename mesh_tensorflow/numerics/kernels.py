"""TensorFlow operations on one slice with any number of axes. No mesh here.

TensorFlow's kernels take a limited number of axes (measured: TensorFlow 2.21, CPU; those for GPUs
are made of the same code):

  functions of two tensors, BroadcastTo    5, when neighbours that broadcast alike count as one
  SelectV2, Slice, Pad along one axis      8
  ArgMax, ArgMin                           7
  Softmax (oneDNN)                         5

Reduce, Transpose, Reshape, Concat, Split, Gather, MatMul, Cumsum, TopK, OneHot, the segment sums,
and functions of one tensor take any number. So each of the first goes through a function of this
file. Below the limit that is the operation itself. Above it, neighbouring axes are
merged by reshapes, which move nothing; and where they alternate too often for that, an operand is
repeated along a few axes first.

`stack` is here for another reason: TensorFlow's optimizer of graphs computes something else than
`tf.stack` says. So it does for `argmax`. And `sum_of` keeps it from joining sums in loops. `top_k`
is here since TensorFlow's looks at every element of a long row one by one, `overwrite_rows` since
its tensor_scatter_nd_update for CPUs copies the tensor, even one that nothing else needs. `matmul`
and small calls of `softmax` are here since oneDNN takes 40 us for a call, however small.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import tensorflow as tf

from mesh_tensorflow.program.dimensions import list_product

_BROADCAST, _SELECT, _SLICE, _PAD, _ARGMAX, _SOFTMAX = 5, 8, 8, 8, 7, 5
_LONG_ROW = 1024  # From here on `top_k` searches in groups.
# Up to so many elements of a softmax, and multiplications of a batch of products, the 40 us that
# oneDNN takes for a call with several threads cost more than its kernel gains.
_SMALL_SOFTMAX, _SMALL_PRODUCT = 2**13, 2**17


class _Run(NamedTuple):
  """Adjacent axes that are merged into one.

  Attributes:
    size: product of their sizes.
    present: for each operand whether it has these axes (else they are of size 1 in it).
  """

  size: int
  present: tuple[bool, ...]


def _merged(runs: Iterable[_Run]) -> list[_Run]:
  """Removes runs of size 1, and merges adjacent runs that the same operands have."""
  merged: list[_Run] = []
  for run in runs:
    if run.size == 1:
      continue
    if merged and merged[-1].present == run.present:
      run = _Run(merged.pop().size * run.size, run.present)
    merged.append(run)
  return merged


def _sizes_in(runs: Sequence[_Run], operand: int) -> list[int]:
  return [run.size if run.present[operand] else 1 for run in runs]


class _Plan(NamedTuple):
  """Shapes by which operands are merged and repeated, so that few axes are left to broadcast.

  Attributes:
    views: for each operand its sizes with merged axes.
    repeated: for each operand its sizes after it is repeated.
    operands: for each operand the sizes in which it is handed to the function.
    output: sizes of the result.
  """

  views: list[list[int]]
  repeated: list[list[int]]
  operands: list[list[int]]
  output: list[int]


@functools.lru_cache(maxsize=4096)
def _plan(shapes: tuple[tuple[int, ...], ...], most_axes: int, most_runs: int) -> _Plan | None:
  """The plan for operands of these shapes; None where they may be handed over as they are."""
  rank = max(len(s) for s in shapes)
  aligned = [(1,) * (rank - len(s)) + s for s in shapes]
  output = [next((n for n in sizes if n != 1), 1) for sizes in zip(*aligned)]
  runs = _merged(_Run(n, tuple(s == n for s in sizes)) for n, *sizes in zip(output, *aligned))
  if rank <= most_axes and len(runs) <= most_runs:
    return None
  first, last = (0, 0) if len(runs) <= most_runs else _cheapest_stretch(runs, most_runs)
  filled = _filled(runs, first, last)
  operands = range(len(shapes))
  return _Plan(
    views=[_sizes_in(runs, k) for k in operands],
    repeated=[_sizes_in(filled, k) for k in operands],
    operands=[_sizes_in(_merged(filled), k) for k in operands],
    output=output,
  )


def _filled(runs: Sequence[_Run], first: int, last: int) -> list[_Run]:
  """The runs after all operands are repeated along those from `first` to before `last`."""
  everywhere = (True,) * len(runs[0].present) if runs else ()
  return [_Run(run.size, everywhere) if first <= i < last else run for i, run in enumerate(runs)]


def _cheapest_stretch(runs: Sequence[_Run], most: int) -> tuple[int, int]:
  """Cheapest range of runs which, once repeated in all operands, leaves at most `most` runs.

  The cost is the total number of elements of the operands that are repeated.
  """

  def cost(filled: Sequence[_Run]) -> int:
    pairs = [(_sizes_in(runs, k), _sizes_in(filled, k)) for k in range(len(runs[0].present))]
    return sum(list_product(after) for before, after in pairs if before != after)

  choices = []
  for first in range(len(runs)):
    for last in range(first + 1, len(runs) + 1):
      filled = _filled(runs, first, last)
      if len(_merged(filled)) <= most:
        choices.append((cost(filled), first, last))
        break  # A longer stretch costs more.
  return min(choices)[1:]


def _reshaped(x: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
  return x if x.shape.as_list() == list(sizes) else tf.reshape(x, sizes)


def elementwise(fn: Callable[..., tf.Tensor], *xs: tf.Tensor) -> tf.Tensor:
  """`fn(*xs)` of an element-wise function that broadcasts, as `tf.add`.

  Args:
    fn: takes as many tensors as `xs`.
    *xs: tensors whose shapes broadcast together.
  """
  return _broadcasting(fn, xs, _SELECT, _BROADCAST)


def where(condition: tf.Tensor, if_true: tf.Tensor, if_false: tf.Tensor) -> tf.Tensor:
  """`tf.where` of three tensors whose shapes broadcast together."""
  return _broadcasting(tf.where, (condition, if_true, if_false), _SELECT, _SELECT)


def _broadcasting(
  fn: Callable[..., tf.Tensor], xs: Sequence[tf.Tensor], most_axes: int, most_runs: int
) -> tf.Tensor:
  if max(x.shape.ndims for x in xs) <= min(most_axes, most_runs):
    return fn(*xs)
  plan = _plan(tuple(tuple(x.shape.as_list()) for x in xs), most_axes, most_runs)
  if plan is None:
    return fn(*xs)
  operands = []
  for x, view, repeated, sizes in zip(xs, plan.views, plan.repeated, plan.operands):
    if view != repeated:
      x = broadcast_to(tf.reshape(x, view), repeated)
    operands.append(_reshaped(x, sizes))
  return tf.reshape(fn(*operands), plan.output)


def broadcast_to(x: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
  """`tf.broadcast_to`.

  Where axes that x has and has not alternate more often than the kernel allows, x is repeated in
  steps: first along that which makes it the least larger.

  Args:
    x: a tensor.
    sizes: static sizes of the result.
  """
  if len(sizes) <= _BROADCAST:
    return tf.broadcast_to(x, sizes)
  own = [1] * (len(sizes) - x.shape.ndims) + x.shape.as_list()
  runs = _merged(_Run(n, (n == o,)) for n, o in zip(sizes, own))
  if len(runs) <= _BROADCAST:
    return tf.broadcast_to(x, sizes)
  while len(runs) > _BROADCAST:
    i = min((i for i, run in enumerate(runs) if not run.present[0]), key=lambda i: runs[i].size)
    before, after = (list_product(_sizes_in(part, 0)) for part in (runs[:i], runs[i + 1 :]))
    x = tf.broadcast_to(tf.reshape(x, [before, 1, after]), [before, runs[i].size, after])
    runs = _merged(_filled(runs, i, i + 1))
  x = tf.reshape(x, _sizes_in(runs, 0))
  return tf.reshape(tf.broadcast_to(x, [run.size for run in runs]), sizes)


def _along(
  fn: Callable[[tf.Tensor, int], tf.Tensor], x: tf.Tensor, axis: int, most_axes: int
) -> tf.Tensor:
  """`fn(x, axis)` of a function of one axis; the others are merged if they are too many.

  Args:
    fn: leaves the other axes as they are; may change the size of its own, or remove it.
    x: a tensor.
    axis: at least 0.
    most_axes: maximum number of axes with which x is passed to the function unchanged.
  """
  sizes = x.shape.as_list()
  if len(sizes) <= most_axes:
    return fn(x, axis)
  before, after = list_product(sizes[:axis]), list_product(sizes[axis + 1 :])
  # An axis that is the last stays it.
  behind = [after] if after != 1 else []
  y = fn(tf.reshape(x, [before, sizes[axis], *behind]), 1)
  own = y.shape.as_list()[1 : y.shape.ndims - len(behind)]
  return tf.reshape(y, [*sizes[:axis], *own, *sizes[axis + 1 :]])


def softmax(x: tf.Tensor, axis: int) -> tf.Tensor:
  """`tf.nn.softmax`; the axis is at least 0. A small one on CPUs is composed of Eigen's kernels."""
  if x.dtype == tf.float32 and x.shape.num_elements() <= _SMALL_SOFTMAX and only_cpu_kernels():
    x = tf.exp(x - tf.reduce_max(x, axis, keepdims=True))
    return x / tf.reduce_sum(x, axis, keepdims=True)
  return _along(tf.nn.softmax, x, axis, _SOFTMAX)


def matmul(
  a: tf.Tensor, b: tf.Tensor, transpose_a: bool = False, transpose_b: bool = False
) -> tf.Tensor:
  """`tf.matmul`; on CPUs batches of vectors and of small matrices go to Eigen's kernel."""
  if a.dtype == tf.float32 and a.shape.ndims > 2 and only_cpu_kernels():
    *batch, rows, contracted = a.shape
    if transpose_a:
      rows, contracted = contracted, rows
    columns = b.shape[-2 if transpose_b else -1]
    is_small = list_product(batch) * rows * contracted * columns <= _SMALL_PRODUCT
    if is_small or 1 in (rows, columns):
      # Unlike the operation of `tf.matmul`, this one is not replaced by one of oneDNN.
      return tf.raw_ops.BatchMatMulV3(x=a, y=b, Tout=a.dtype, adj_x=transpose_a, adj_y=transpose_b)
  return tf.matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b)


def argmax(x: tf.Tensor, axis: int) -> tf.Tensor:
  """`tf.argmax`, of dtype int32: the first of equal elements; the axis is at least 0.

  TensorFlow's optimizer of graphs takes the argmax of x for that of a function of x that rises (a
  relu, a floor), which may have made elements equal. A Snapshot keeps it off.
  """
  if not tf.executing_eagerly():
    x = tf.raw_ops.Snapshot(input=x)
  return _along(lambda t, i: tf.argmax(t, i, output_type=tf.int32), x, axis, _ARGMAX)


def top_k(x: tf.Tensor, k: int) -> tuple[tf.Tensor, tf.Tensor]:
  """`tf.math.top_k`: along the last axis, in descending order, of equal elements the first first.

  A long row is cut into groups, of which only the k with the largest maxima are looked at: each of
  the k largest elements lies in one of them. TensorFlow's kernel for CPUs takes nanoseconds for an
  element, a maximum a fraction of one (8 of 64 rows of 32,128: 0.5 ms in place of 4.5).
  """
  *rows, n = x.shape.as_list()
  size = _group_size(n, k)
  if not size:
    values, indices = tf.math.top_k(x, k)
    return values, indices
  groups = tf.reshape(x, [*rows, n // size, size])
  _, chosen = tf.math.top_k(tf.reduce_max(groups, -1), k)
  # In the order of positions again, by which equal elements are ordered.
  chosen = -tf.math.top_k(-chosen, k)[0]
  found = tf.gather(groups, chosen, axis=-2, batch_dims=len(rows))
  values, at = tf.math.top_k(tf.reshape(found, [*rows, k * size]), k)
  begin = tf.gather(chosen * size, at // size, axis=-1, batch_dims=len(rows))
  return values, begin + at % size


@functools.lru_cache(maxsize=256)
def _group_size(n: int, k: int) -> int:
  """The size of the groups in which `top_k` searches n elements; 0 if that gains nothing."""
  if n < _LONG_ROW:
    return 0
  sizes = [d for d in range(2, n // max(k, 1) + 1) if n % d == 0]
  size = min(sizes, key=lambda d: n // d + k * d, default=0)
  return size if size and 4 * (n // size + k * size) <= n else 0


_FOR_XLA: contextvars.ContextVar[bool] = contextvars.ContextVar("for_xla", default=False)


@contextlib.contextmanager
def for_xla() -> Iterator[None]:
  """Inside, programs are traced that XLA compiles, with kernels of its own."""
  token = _FOR_XLA.set(True)
  try:
    yield
  finally:
    _FOR_XLA.reset(token)


def only_cpu_kernels() -> bool:
  """True if TensorFlow's kernels for CPUs run the program, for all that planning can know."""
  kinds = {d.device_type for d in tf.config.list_physical_devices()}
  # TPUs that are reached through a strategy may be of other hosts.
  return kinds <= {"CPU"} and not tf.distribute.has_strategy() and not _FOR_XLA.get()


# By the bytes of an element: integers of as many, which have sums that are exact.
_BITS = {1: tf.uint8, 2: tf.uint16, 4: tf.int32, 8: tf.int64}


def overwrite_rows(
  x: tf.Tensor, rows: tf.Tensor, values: tf.Tensor, chosen: tf.Tensor, for_xla: bool = False
) -> tf.Tensor:
  """`x` with other values in some rows; in place, where nothing else needs `x` (as in loops).

  On CPUs this adds the difference of the bits, as integers, by the only operation there that
  changes rows of a tensor in place.

  Args:
    x: a matrix.
    rows: int32 [n], different rows of x.
    values: [n, columns of x].
    chosen: bool [n]; the rows of others stay as they are.
    for_xla: whether XLA compiles the program, which does not know that operation.
  """
  index, chosen = rows[:, tf.newaxis], chosen[:, tf.newaxis]
  bits = _BITS.get(x.dtype.size) if x.dtype.is_floating or x.dtype.is_integer else None
  if bits is None or for_xla or not only_cpu_kernels():
    values = tf.where(chosen, values, tf.gather_nd(x, index))
    return tf.tensor_scatter_nd_update(x, index, values)
  y = tf.bitcast(x, bits)
  change = tf.bitcast(values, bits) - tf.gather_nd(y, index)
  change = tf.where(chosen, change, tf.zeros([], bits))
  y = tf.raw_ops.ScatterNdNonAliasingAdd(input=y, indices=index, updates=change)
  return tf.bitcast(y, x.dtype)


def pad(x: tf.Tensor, axis: int, before: int, after: int) -> tf.Tensor:
  """`tf.pad` along one axis (at least 0)."""

  def padded(t: tf.Tensor, i: int) -> tf.Tensor:
    paddings = [[0, 0] for _ in t.shape]
    paddings[i] = [before, after]
    return tf.pad(t, paddings)

  return _along(padded, x, axis, _PAD)


def cut(x: tf.Tensor, begin: Sequence[int | tf.Tensor], sizes: Sequence[int]) -> tf.Tensor:
  """`tf.slice`.

  Args:
    x: a tensor.
    begin: for each axis the first position: ints or int32 scalars, or an int32 vector.
    sizes: for each axis the number of positions; -1 for all from the first one on, which is 0.
  """
  if not len(sizes):
    return x  # A scalar; tf.slice takes an empty list for one of floats.
  if len(sizes) <= _SLICE:
    return tf.slice(x, begin, sizes)
  whole = x.shape.as_list()
  wanted = [n if size == -1 else size for n, size in zip(whole, sizes)]
  for axis, n in enumerate(wanted):
    if n != whole[axis]:
      x = cut_axis(x, axis, begin[axis], n)
  return x


def _cut_along(x: tf.Tensor, axis: int, begin: int | tf.Tensor, size: int) -> tf.Tensor:
  begins, sizes = [0] * x.shape.ndims, [-1] * x.shape.ndims
  begins[axis], sizes[axis] = begin, size
  return tf.slice(x, begins, sizes)


def cut_axis(x: tf.Tensor, axis: int, begin: int | tf.Tensor, size: int) -> tf.Tensor:
  """Positions `begin` (an int, or an int32 scalar) to `begin + size` along one axis."""
  return _along(functools.partial(_cut_along, begin=begin, size=size), x, axis, _SLICE)


def stack(xs: Sequence[tf.Tensor], axis: int = 0) -> tf.Tensor:
  """`tf.stack` of tensors of one shape.

  Not the operation itself: where its inputs are one tensor, TensorFlow's optimizer of graphs makes
  a Tile of the first output of the operation that made it. For the second part of a tf.unstack,
  tf.split or tf.math.top_k that is another tensor, without a word if it has the same shape. What
  seems to be different tensors may become one before: by common subexpressions, or identities.

  Args:
    xs: tensors.
    axis: where the new axis goes, at least 0.
  """
  if tf.executing_eagerly() or len(xs) == 1:
    return tf.stack(xs, axis)
  sizes = xs[0].shape.as_list()
  if axis == len(sizes):
    return tf.concat([tf.expand_dims(x, axis) for x in xs], axis)
  return tf.reshape(tf.concat(xs, axis), [*sizes[:axis], len(xs), *sizes[axis:]])


_SUMS_APART: contextvars.ContextVar[bool] = contextvars.ContextVar("sums_apart", default=False)


@contextlib.contextmanager
def sums_apart() -> Iterator[None]:
  """Inside, TensorFlow does not join what `sum_of` adds with other sums; for bodies of loops.

  Sums of three and more terms, made so or joined, get a temporary variable on CPUs, if a program
  takes more than some 200 MB; in a loop within a loop TensorFlow makes it twice, and fails with
  "Resource ... tmp_var already exists".
  """
  token = _SUMS_APART.set(True)
  try:
    yield
  finally:
    _SUMS_APART.reset(token)


def of_its_own(fn: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
  """A sum or difference of two tensors, which stays apart where sums do."""

  def result_of(*xs: tf.Tensor) -> tf.Tensor:
    x = fn(*xs)
    return tf.ensure_shape(x, x.shape) if _SUMS_APART.get() else x

  return result_of


def sum_of(xs: Sequence[tf.Tensor]) -> tf.Tensor:
  """The sum of one or more tensors of one shape, in one pass where that is possible."""
  if len(xs) <= 2 or _SUMS_APART.get():
    return functools.reduce(of_its_own(tf.add), xs)
  return tf.add_n(xs)
