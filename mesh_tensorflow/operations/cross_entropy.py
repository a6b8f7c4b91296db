"""Cross entropy of logits and integer targets, without a one-hot tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import DTypeError, ShapeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.slices import transpose_to
from mesh_tensorflow.numerics import kernels, padding
from mesh_tensorflow.operations.binary import add, multiply
from mesh_tensorflow.operations.comparison import greater_equal, less, logical_and
from mesh_tensorflow.operations.constants import ones_like
from mesh_tensorflow.operations.einsum import einsum
from mesh_tensorflow.operations.elementwise import cast
from mesh_tensorflow.operations.reduction import broadcast
from mesh_tensorflow.operations.softmax import reduce_logsumexp, softmax
from mesh_tensorflow.program.dimensions import Dimension, Shape, list_product, no_such_dimension
from mesh_tensorflow.program.graph import Operation, Tensor


class _Positions:
  """Positions of one slice's targets in its logits, seen as a matrix [rows, ids].

  Args:
    targets: ids of one slice, any shape.
    begin: the first id of the processor's part of the vocabulary.
    part_size: the number of ids of that part.
    classes: how many of these are classes, which precede all others; None: all.
  """

  def __init__(
    self,
    targets: tf.Tensor,
    begin: int | tf.Tensor,
    part_size: int,
    classes: int | tf.Tensor | None,
  ):
    targets = tf.reshape(targets, [-1])
    rows = targets.shape[0]
    end = part_size if classes is None else classes
    if not (isinstance(begin, int) and begin == 0):
      targets -= tf.cast(begin, targets.dtype)
    # As an unsigned number a negative one is large: one comparison for both bounds.
    unsigned = tf.uint32 if targets.dtype == tf.int32 else tf.uint64
    self.inside = tf.bitcast(targets, unsigned) < tf.cast(end, unsigned)
    # Numbers of elements in the whole matrix, which may have more than int32 counts.
    small = rows * part_size < 2**31
    start = tf.range(rows, dtype=tf.int32 if small else tf.int64) * part_size
    # A target that is not here points at the first id of its row, so that every position can be
    # gathered and scattered; the caller gives it the weight 0.
    local = tf.where(self.inside, targets, tf.zeros([], targets.dtype))
    self.flat = start + tf.cast(local, start.dtype)


class SoftmaxCrossEntropyOperation(Operation):
  """Cross entropy of the softmax of logits with smoothed one-hot targets.

  With x the V logits of one position, t the target, logZ = log sum exp x, and soft_v = on_value
  where v = t, off_value elsewhere, 0 for ids from `num_classes` on:

    loss = logZ * sum_v soft_v - sum_v soft_v * x_v + z_loss * logZ ** 2

  A target that is no class is equal to no v. The vocabulary may be split: each processor
  takes the softmax of its part, and three numbers a position are exchanged.

  The second and third output are there for the gradient only: the softmax over the
  processor's own part of the vocabulary, and for each position the factor that turns it
  into the derivative of loss - (target terms). That factor differs between processors
  that hold different parts of the vocabulary.

  Args:
    logits: a floating `Tensor`; the statistics are computed in float32 at least.
    targets: integer ids, of the dimensions of `logits` but `vocab_dim`.
    vocab_dim: dimension of the ids.
    z_loss: factor of the squared log normalizer.
    on_value: weight of the target.
    off_value: weight of every other id below `num_classes`.
    num_classes: how many ids are classes, where the others only pad the dimension; None: all.
    loss_dtype: dtype of the loss; None: that of the logits.
    name: of the operation.

  Raises:
    DimensionError: `vocab_dim` is not in `logits`.
    ShapeError: `targets` has other dimensions, or `num_classes` is not 1 to V.
    DTypeError: `logits` are not floating, or `targets` no integers.
  """

  lowers_uneven_slices = True

  def __init__(
    self,
    logits: Tensor,
    targets: Tensor,
    vocab_dim: Dimension,
    z_loss: float = 0.0,
    *,
    on_value: float = 1.0,
    off_value: float = 0.0,
    num_classes: int | None = None,
    loss_dtype: tf.DType | None = None,
    name: str | None = None,
  ):
    super().__init__([logits, targets], name=name or "softmax_cross_entropy")
    if vocab_dim not in logits.shape:
      raise no_such_dimension(f"{self.name}: vocab_dim", vocab_dim, logits)
    rest = logits.shape - vocab_dim
    if set(targets.shape) != set(rest):
      raise ShapeError(
        f"{self.name}: integer targets must have the dimensions of the logits {logits} without "
        f"{vocab_dim.name}={vocab_dim.size}, {rest}; got {targets}"
      )
    if not logits.dtype.is_floating or not targets.dtype.is_integer:
      raise DTypeError(
        f"{self.name}: logits must be floating and targets integers, got {logits} and {targets}"
      )
    if num_classes is not None and not 0 < num_classes <= vocab_dim.size:
      raise ShapeError(
        f"{self.name}: num_classes must be 1 to the size of {vocab_dim.name}={vocab_dim.size}, got "
        f"{num_classes}"
      )
    self._vocab_dim = vocab_dim
    self._num_classes = vocab_dim.size if num_classes is None else num_classes
    self._z_loss = z_loss
    self._on_value = on_value
    self._off_value = off_value
    matrix = rest + vocab_dim
    self._outputs = [
      Tensor(self, rest, loss_dtype or logits.dtype, index=0),
      Tensor(self, matrix, logits.dtype, index=1),
      Tensor(self, rest, _statistics_dtype(logits.dtype), index=2),
    ]

  def gradient(self, grad_ys: list[Tensor | None]) -> Sequence[Tensor | None]:
    dy, again, _ = grad_ys
    dx = None if dy is None else SoftmaxCrossEntropyGradOperation(self, dy).outputs[0]
    if again is not None:  # What the gradient operation says of the logits.
      again = broadcast(again, self._inputs[0].shape)  # Its dimensions in their order.
      dx = again if dx is None else add(dx, again)
    return [dx, None]

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    logits, targets = (lowering.tensors[x] for x in self._inputs)
    logits = impl.without_padding(logits, self._inputs[0].shape, padding.lowest, [self._vocab_dim])
    split_axis, begin, part_size = vocabulary_part(impl, self._vocab_dim)
    dims = self._inputs[0].shape.dims
    rest, matrix = self._outputs[0].shape, self._outputs[1].shape
    target_dims = self._inputs[1].shape.dims
    rest_sizes, matrix_sizes = impl.slice_shape(rest), impl.slice_shape(matrix)
    dtype, exact = self._outputs[1].dtype, self._outputs[2].dtype
    loss_dtype = self._outputs[0].dtype
    rows = list_product(rest_sizes)
    on, off, z_loss = self._on_value, self._off_value, self._z_loss

    def part(x: tf.Tensor, t: tf.Tensor, b: int | tf.Tensor) -> tuple[tf.Tensor, ...]:
      """Of one part: softmax, log normalizer, sum of soft * x, weight of the target."""
      x = tf.reshape(transpose_to(x, dims, matrix.dims), [rows, part_size])
      x = tf.cast(x, exact)
      p = tf.nn.softmax(x)
      # Exact, and cheaper than exp and a sum: the largest element of p cannot underflow.
      largest = tf.reduce_max(x, -1)
      # max p is exp(0) / sum exp(x - largest).
      log_z = largest - tf.math.log(tf.reduce_max(p, -1))
      classes = self.classes_of(impl, b, part_size)
      at = _Positions(transpose_to(t, target_dims, rest.dims), b, part_size, classes)
      weight = _times(tf.cast(at.inside, exact), on - off)
      # Not a plain product: a target of another part stands at a logit that may be -inf.
      dot = tf.math.multiply_no_nan(tf.gather(tf.reshape(x, [-1]), at.flat), weight)
      if off:
        if isinstance(classes, int):
          x = x[:, :classes]
        elif classes is not None:
          x = tf.where(tf.range(part_size) < classes, x, tf.zeros([], exact))
        dot += off * tf.reduce_sum(x, -1)
      if split_axis is not None:
        # A part may hold nothing but -inf; its softmax is NaN then.
        log_z = tf.where(tf.math.is_inf(largest), largest, log_z)
      return tf.cast(tf.reshape(p, matrix_sizes), dtype), log_z, dot, weight

    p, log_z, dot, weight = impl.slicewise(part, logits, targets, begin)

    def total(
      log_z: tf.Tensor, part_log_z: tf.Tensor | None, dot: tf.Tensor, weight: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
      """Loss, and the factor of the softmax of the part in the gradient."""
      if off:
        # Not in the parts, whose weights are summed: each would count the whole vocabulary.
        weight += off * self._num_classes
      loss = log_z * weight - dot
      slope = weight
      if z_loss:
        loss += z_loss * tf.square(log_z)
        slope += (2.0 * z_loss) * log_z
      if part_log_z is not None:
        # p sums to 1 over the part; this is the share that the part has in the whole.
        slope *= tf.exp(part_log_z - log_z)
      return tf.cast(tf.reshape(loss, rest_sizes), loss_dtype), tf.reshape(slope, rest_sizes)

    if split_axis is None:
      loss, slope = impl.slicewise(total, log_z, None, dot, weight)
    else:
      stacked = impl.slicewise(lambda *s: kernels.stack(s), log_z, dot, weight)
      # One exchange. Allreduces would be two, one after the other: of the maximum, then of the sum.
      stacked = impl.allconcat(stacked, split_axis, 0, stack=True)
      lowering.add_counter(f"allconcat/{split_axis}/cross_entropy", 3 * rows * impl.size)

      def join(stacked: tf.Tensor, part_log_z: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        parts = stacked[:, 0]
        largest = tf.reduce_max(parts, 0)
        log_z = largest + tf.math.log(tf.reduce_sum(tf.exp(parts - largest), 0))
        # The target is in one part at most; the others have added zeros for it.
        dot, weight = tf.unstack(tf.reduce_sum(stacked[:, 1:], 0))
        return total(log_z, part_log_z, dot, weight)

      loss, slope = impl.slicewise(join, stacked, log_z)
    for out, laid_out in zip(self._outputs, (loss, p, slope)):
      lowering.set_tensor_lowering(out, laid_out)

  def classes_of(
    self, impl: MeshImpl, begin: int | tf.Tensor, part_size: int
  ) -> int | tf.Tensor | None:
    """How many ids of a part of the vocabulary are classes, an integer; None: all ids are."""
    if self._num_classes == self._vocab_dim.size and not impl.is_uneven(self._vocab_dim):
      return None
    if isinstance(begin, int):
      return min(max(self._num_classes - begin, 0), part_size)
    return tf.clip_by_value(self._num_classes - tf.cast(begin, tf.int32), 0, part_size)


class SoftmaxCrossEntropyGradOperation(Operation):
  """Gradient of a `SoftmaxCrossEntropyOperation` with respect to the logits.

  Args:
    forward_op: the operation.
    dy: the gradient of its loss.
    name: of the operation.
  """

  lowers_uneven_slices = True

  def __init__(self, forward_op: SoftmaxCrossEntropyOperation, dy: Tensor, name: str | None = None):
    logits, targets = forward_op.inputs
    _, p, slope = forward_op.outputs
    super().__init__([dy, p, slope, targets], name=name or "softmax_cross_entropy_grad")
    self._forward_op = forward_op
    self._outputs = [Tensor(self, logits.shape, logits.dtype)]

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    dy, p, slope, targets = self._inputs
    # Not self._forward_op: a clone of this operation has that of its inputs.
    forward = p.operation
    assert isinstance(forward, SoftmaxCrossEntropyOperation)
    logits = forward.inputs[0]
    # The operation is linear in dy: its derivative is itself, for a dy of 1.
    unscaled = SoftmaxCrossEntropyGradOperation(forward, ones_like(dy)).outputs[0]
    # The second output is of one part of the vocabulary. In its gradient's place goes that of
    # the logits, which the forward operation passes on:
    #   dy p ((weight + 2 z_loss log_z) (g - <p, g>) + 2 z_loss <p, g>).
    vocab_dim, exact = forward._vocab_dim, slope.dtype
    x, g = cast(logits, exact), cast(grad_ys[0], exact)
    soft = softmax(x, vocab_dim)
    mean = einsum([soft, g], output_shape=slope.shape)
    inside = logical_and(greater_equal(targets, 0), less(targets, forward._num_classes))
    factor = cast(inside, exact) * (forward._on_value - forward._off_value)
    factor += forward._off_value * forward._num_classes
    to_x = g - mean
    if forward._z_loss:
      factor += reduce_logsumexp(x, vocab_dim) * (2.0 * forward._z_loss)
    to_x = multiply(to_x, factor)
    if forward._z_loss:
      to_x += mean * (2.0 * forward._z_loss)
    to_x = multiply(multiply(to_x, soft), cast(dy, exact), output_shape=p.shape)
    to_dy = einsum([grad_ys[0], unscaled], output_shape=dy.shape)
    return [cast(to_dy, dy.dtype), cast(to_x, p.dtype), None, None]

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    forward = self._forward_op
    split_axis, begin, part_size = vocabulary_part(impl, forward._vocab_dim)
    dy, p, slope, targets = self._inputs
    rest: Shape = slope.shape
    rows = list_product(impl.slice_shape(rest))
    matrix_sizes = impl.slice_shape(p.shape)
    on, off = forward._on_value, forward._off_value
    # Where a part of the vocabulary has no share at all its softmax may be NaN.
    multiply = tf.multiply if split_axis is None else tf.math.multiply_no_nan

    def gradient(
      dy_slice: tf.Tensor,
      p_slice: tf.Tensor,
      slope_slice: tf.Tensor,
      t: tf.Tensor,
      b: int | tf.Tensor,
    ) -> tf.Tensor:
      dy_slice = tf.reshape(transpose_to(dy_slice, dy.shape.dims, rest.dims), [rows])
      dy_slice = tf.cast(dy_slice, slope.dtype)
      factor = dy_slice * tf.reshape(slope_slice, [rows])
      classes = forward.classes_of(impl, b, part_size)
      p_slice = tf.reshape(p_slice, [rows, part_size])
      # d loss / d x = slope * p - soft, with soft = off everywhere and on - off more at the target:
      # a scatter of one number a position instead of a matrix of targets.
      dx = multiply(p_slice, tf.reshape(tf.cast(factor, p.dtype), [rows, 1]))
      if off:
        everywhere = tf.reshape(tf.cast(off * dy_slice, p.dtype), [rows, 1])
        if classes is not None:
          everywhere *= tf.cast(tf.range(part_size) < classes, p.dtype)
        dx -= everywhere
      at = _Positions(transpose_to(t, targets.shape.dims, rest.dims), b, part_size, classes)
      at_target = _times(dy_slice, on - off) * tf.cast(at.inside, slope.dtype)
      dx = tf.tensor_scatter_nd_sub(
        tf.reshape(dx, [-1]), tf.reshape(at.flat, [rows, 1]), tf.cast(at_target, p.dtype)
      )
      return transpose_to(tf.reshape(dx, matrix_sizes), p.shape.dims, self._outputs[0].shape.dims)

    inputs = [lowering.tensors[x] for x in self._inputs]
    lowering.set_tensor_lowering(self._outputs[0], impl.slicewise(gradient, *inputs, begin))


def vocabulary_part(impl: MeshImpl, vocab_dim: Dimension) -> tuple[int | None, Any, int]:
  """The processor's part of the vocabulary.

  Args:
    impl: a `MeshImpl`.
    vocab_dim: dimension of the ids.

  Returns:
    The mesh axis that splits it (or None), its first id (0, or an integer laid out), and
    its size.
  """
  shape = Shape([vocab_dim])
  axis = impl.tensor_dimension_to_mesh_axis(vocab_dim)
  if axis is not None and impl.shape[axis].size == 1:
    axis = None
  return axis, impl.laid_out_slice_begin(shape)[0], impl.slice_shape(shape)[0]


def _times(x: tf.Tensor, factor: float) -> tf.Tensor:
  return x if factor == 1.0 else factor * x


def _statistics_dtype(dtype: tf.DType) -> tf.DType:
  return dtype if dtype.size >= 4 else tf.float32
