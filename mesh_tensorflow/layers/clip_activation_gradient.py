"""Clipping of the gradient that flows through an activation."""

from __future__ import annotations

from collections.abc import Sequence

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.operations.control import ScalarSummaryOperation, scalar_summary
from mesh_tensorflow.operations.einsum import einsum
from mesh_tensorflow.operations.elementwise import cast, sqrt, square
from mesh_tensorflow.operations.reduction import reduce_max, reduce_mean
from mesh_tensorflow.operations.slicewise import cwise
from mesh_tensorflow.program.dimensions import DimensionLike, Shape
from mesh_tensorflow.program.graph import Operation, Tensor

__all__ = ["clip_activation_gradient", "summary_for_clip_activation_gradient"]


class ClipGradientOperation(Operation):
  """The value of x; its gradient is scaled down to an RMS of at most `clip_rms_norm`."""

  lowers_uneven_slices = True

  def __init__(self, x: Tensor, clip_rms_norm: float, name: str | None = None):
    super().__init__([x], name=name or "clip_activation_gradient")
    self._clip_rms_norm = clip_rms_norm
    self._outputs = [Tensor(self, x.shape, x.dtype)]

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    g = grad_ys[0]
    # Squares of short floats are added up in float32.
    wide = cast(g, tf.float32) if g.dtype.size < 4 else g
    # Over the whole tensor: the clipping is the same on every layout.
    mean_square = einsum([wide, wide], output_shape=Shape([])) * (1.0 / g.size)
    # rsqrt(0) is infinite, and so the scale of a gradient of zeros is 1.
    scale = cwise(
      lambda ms: tf.minimum(tf.math.rsqrt(ms) * self._clip_rms_norm, 1.0), [mean_square]
    )
    return [g * cast(scale, g.dtype)]

  def lower(self, lowering: LoweringInProgress) -> None:
    # As it is: a sum that is pending stays pending.
    lowering.set_tensor_lowering(self._outputs[0], lowering.tensors[self._inputs[0]])


@gin.configurable(module="mesh_tensorflow.layers")
@affects("training")
def clip_activation_gradient(
  x: Tensor, clip_rms_norm: float | None = None, *, summaries: bool = False
) -> Tensor:
  """The value of x; the gradient g becomes g / max(1, RMS(g) / clip_rms_norm).

  Args:
    x: a floating `Tensor`.
    clip_rms_norm: largest root mean square of the whole gradient; None or 0 leaves it as
      it is.
    summaries: whether statistics of x are reported, see
      `summary_for_clip_activation_gradient`. They are computed in each step.

  Returns:
    A `Tensor` of x's shape.
  """
  if summaries:
    summary_for_clip_activation_gradient(x)
  return ClipGradientOperation(x, clip_rms_norm).outputs[0] if clip_rms_norm else x


def summary_for_clip_activation_gradient(
  t: Tensor, name: str | None = None, batch_dims: Sequence[DimensionLike] | None = None
) -> list[ScalarSummaryOperation]:
  """Reports statistics of a tensor through `mtf.scalar_summary`.

  These are the mean and the maximum of t, and mean, maximum and variance of the root mean
  squares that t has for each index of `batch_dims`.

  Args:
    t: a floating `Tensor`.
    name: the summaries are `mean/{name}`, `max/{name}`, `rms_mean/{name}`, `rms_max/{name}`
      and `rms_var/{name}`. By default it is empty for the first two, and `forward_act` for
      the others.
    batch_dims: dimensions of t; all but the last by default.

  Returns:
    The five summaries.
  """
  batch_dims = t.shape.dims[:-1] if batch_dims is None else list(batch_dims)
  value_name = "" if name is None else name
  rms_name = "forward_act" if name is None else name
  t = cast(t, tf.float32) if t.dtype.size < 4 else t
  rms = sqrt(reduce_mean(square(t), output_shape=Shape(batch_dims)))
  rms_mean = reduce_mean(rms)
  return [
    scalar_summary(f"mean/{value_name}", reduce_mean(t)),
    scalar_summary(f"max/{value_name}", reduce_max(t)),
    scalar_summary(f"rms_mean/{rms_name}", rms_mean),
    scalar_summary(f"rms_max/{rms_name}", reduce_max(rms)),
    scalar_summary(f"rms_var/{rms_name}", reduce_mean(square(rms - rms_mean))),
  ]
