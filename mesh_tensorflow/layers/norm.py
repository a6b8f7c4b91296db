"""Layer normalization and batch normalization."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import DimensionError
from mesh_tensorflow.numerics import initializers
from mesh_tensorflow.operations.assignments import assign
from mesh_tensorflow.operations.einsum import einsum
from mesh_tensorflow.operations.elementwise import cast, rsqrt, square
from mesh_tensorflow.operations.norms import standardize
from mesh_tensorflow.operations.reduction import reduce_mean
from mesh_tensorflow.operations.variables import VariableDType, get_variable
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.argument_kinds import FloatTensor
from mesh_tensorflow.program.dimensions import Dimension, Shape
from mesh_tensorflow.program.graph import Operation, Tensor

__all__ = ["batch_norm", "layer_norm"]


def layer_norm(
  x: FloatTensor, dim: Dimension, epsilon: float = 1e-6, name: str = "layer_prepostprocess"
) -> Tensor:
  """(x - mean) / sqrt(variance + epsilon) * scale + bias, over one dimension.

  Ba, Kiros and Hinton, 2016 (arXiv:1607.06450). Variables, both [dim]:
  `{name}/layer_norm/layer_norm_scale` (ones) and `.../layer_norm_bias` (zeros).

  Args:
    x: a floating `Tensor`.
    dim: the dimension to normalize over; may be split.
    epsilon: added to the (population) variance.
    name: name of the scope around `layer_norm`.

  Returns:
    A `Tensor` of x's shape.

  Raises:
    DimensionError: `dim` is not in x.
  """
  # Kept in float32 whatever the activations are: updates of a scale near 1 are lost in bfloat16.
  dtype = VariableDType(tf.float32, tf.float32, x.dtype)
  with scope.variable_scope(f"{name}/layer_norm"):
    scale = get_variable(
      x.mesh, "layer_norm_scale", Shape([dim]), dtype=dtype, initializer=initializers.Ones()
    )
    bias = get_variable(
      x.mesh, "layer_norm_bias", Shape([dim]), dtype=dtype, initializer=initializers.Zeros()
    )
  return einsum([standardize(x, dim, epsilon), scale], output_shape=x.shape) + bias


def batch_norm(
  x: Tensor,
  is_training: bool,
  momentum: float,
  epsilon: float | Tensor = 1e-9,
  dims_idx_start: int | None = 0,
  dims_idx_end: int | None = -1,
  init_zero: bool = False,
  name: str | None = None,
) -> tuple[Tensor, list[Operation]]:
  """Normalizes over the dimensions [dims_idx_start:dims_idx_end] of x.

  Ioffe and Szegedy, 2015 (arXiv:1502.03167). Variables, of the remaining dimensions, in
  scope `{name}`: `batch_norm_scale`, `batch_norm_bias`, and (not trained)
  `bn_moving_mean` and `bn_moving_variance`.

  Args:
    x: a floating `Tensor`.
    is_training: use the statistics of x and update the moving ones; else use those.
    momentum: moving <- momentum * moving + (1 - momentum) * batch.
    epsilon: added to the (population) variance.
    dims_idx_start: first dimension to normalize over.
    dims_idx_end: the dimension after the last.
    init_zero: whether the scale starts at 0, not 1.
    name: name of the scope; `batch_norm`, made unique, by default.

  Returns:
    A `Tensor` of x's shape, and the two operations that update the moving statistics ([]
    when not training). They run with the graph, as every assignment does.

  Raises:
    DimensionError: there is nothing to normalize over.
  """
  reduced = x.shape.dims[dims_idx_start:dims_idx_end]
  if not reduced:
    raise DimensionError(
      f"batch_norm: [{dims_idx_start}:{dims_idx_end}] selects no dimension of {x}"
    )
  kept = x.shape - reduced

  def variable(variable_name: str, initializer: Any, trainable: bool) -> Tensor:
    return get_variable(
      x.mesh,
      variable_name,
      kept,
      dtype=VariableDType(tf.float32, tf.float32, x.dtype if trainable else tf.float32),
      initializer=initializer,
      trainable=trainable,
    )

  ones, zeros = initializers.Ones(), initializers.Zeros()
  with scope.variable_scope(name, default_name="batch_norm", graph=x.graph):
    scale = variable("batch_norm_scale", zeros if init_zero else ones, True)
    bias = variable("batch_norm_bias", zeros, True)
    moving_mean = variable("bn_moving_mean", initializers.RandomNormal(), False)
    moving_variance = variable("bn_moving_variance", ones, False)

  updates: list[Operation] = []
  if is_training:
    mean = reduce_mean(x, output_shape=kept)
    centered = x - mean
    # From centered values: mean(x ** 2) - mean(x) ** 2 would cancel where the mean is large.
    variance = reduce_mean(square(centered), output_shape=kept)
    for moving, batch, what in (
      (moving_mean, mean, "bn_mean_update"),
      (moving_variance, variance, "bn_var_update"),
    ):
      # In float32: with a momentum of 0.999 a step in bfloat16 would be rounded away.
      new = moving * momentum + cast(batch, tf.float32) * (1.0 - momentum)
      updates.append(assign(moving, new, name=f"{name}/{what}"))
  else:
    centered = x - cast(moving_mean, x.dtype)
    variance = cast(moving_variance, x.dtype)
  y = einsum([centered, rsqrt(variance + epsilon), scale], output_shape=x.shape) + bias
  return y, updates
