"""Dense layers: a product with a kernel, a bias, an activation; and initial values of kernels."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import gin
import tensorflow as tf

from mesh_tensorflow import ops
from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.errors import ConfigError, ShapeError
from mesh_tensorflow.layers.scaling import unit_scaling_convention, us_einsum
from mesh_tensorflow.numerics import initializers
from mesh_tensorflow.operations.elementwise import cast, relu
from mesh_tensorflow.operations.gating import gated
from mesh_tensorflow.operations.random import dropout as dropout_fn
from mesh_tensorflow.operations.reshape import rename_dimension
from mesh_tensorflow.operations.variables import VariableDType, VariableDTypeLike, get_variable
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.argument_kinds import NumberTensor
from mesh_tensorflow.program.dimensions import Dimension, Shape, list_product
from mesh_tensorflow.program.graph import Tensor

__all__ = [
  "DenseInitializer",
  "VarianceScalingInitializer",
  "dense",
  "dense_product",
  "dense_relu_dense",
  "get_dense_kernel_weights",
]

# A name of a function, a function, or several, whose results are multiplied.
Activation: TypeAlias = str | Callable[..., Tensor] | Sequence[str | Callable[..., Tensor]]


class DenseInitializer:
  """Makes the initializer of a dense kernel."""

  def __call__(
    self, reduced_dims: Sequence[Dimension], new_dims: Sequence[Dimension]
  ) -> initializers.Initializer:
    """The initializer of a kernel.

    Args:
      reduced_dims: dimensions of the input that the layer sums over.
      new_dims: dimensions of the output that it makes.
    """
    raise NotImplementedError


@gin.configurable(module="mesh_tensorflow.layers")
@affects("training")
class VarianceScalingInitializer(DenseInitializer):
  """Weights whose variance is scale / n, n being the fan-in, the fan-out or their mean.

  Fans are the products of the sizes of the reduced and of the new dimensions; expert
  dimensions do not count. The truncation of the normal distribution is not
  compensated, so the real standard deviation is 0.88 of the nominal one (unlike
  TensorFlow's initializer of this name). Under the unit-scaling convention the
  variance is `scale`.

  Args:
    scale: variance times fan.
    mode: "fan_in", "fan_out" or "fan_avg".
    distribution: "normal" (cut at two standard deviations) or "uniform".
  """

  @checked
  def __init__(self, scale: float = 1.0, mode: str = "fan_in", distribution: str = "normal"):
    if scale < 0:
      raise ConfigError(f"VarianceScalingInitializer: scale must not be negative, got {scale}")
    self.scale = scale
    self.mode = mode.lower()
    self.distribution = distribution.lower()

  def __call__(
    self, reduced_dims: Sequence[Dimension], new_dims: Sequence[Dimension]
  ) -> initializers.Initializer:
    """The initializer of a kernel.

    Raises:
      ConfigError: unknown mode or distribution, or a mode other than "fan_in" under the
        unit-scaling convention.
    """
    fan_in = list_product(d.size for d in reduced_dims)
    fan_out = list_product(d.size for d in new_dims)
    fans = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}
    if self.mode not in fans:
      raise ConfigError(
        f"VarianceScalingInitializer: mode {self.mode!r} is not one of {', '.join(fans)}"
      )
    variance = self.scale
    if not unit_scaling_convention():
      # A kernel with an empty dimension has a fan of 0.
      variance /= max(1.0, fans[self.mode])
    elif self.mode != "fan_in":
      raise ConfigError(
        f"VarianceScalingInitializer: under the unit-scaling convention the mode must be fan_in, "
        f"got {self.mode!r}"
      )
    stddev = math.sqrt(variance)
    if self.distribution == "normal":
      return initializers.TruncatedNormal(stddev=stddev)
    if self.distribution == "uniform":
      # A uniform number in +-limit has the variance limit ** 2 / 3.
      limit = stddev * math.sqrt(3.0)
      return initializers.RandomUniform(-limit, limit)
    raise ConfigError(
      f"VarianceScalingInitializer: distribution {self.distribution!r} is not one of normal, "
      "uniform"
    )


_LOG = logging.getLogger("mesh_tensorflow")


def dense(
  x: NumberTensor,
  new_dims: Dimension | Sequence[Dimension],
  reduced_dims: Sequence[Dimension] | None = None,
  expert_dims: Sequence[Dimension] | None = None,
  use_bias: bool = True,
  activation: Callable[[Tensor], Tensor] | None = None,
  master_dtype: tf.DType = tf.float32,
  slice_dtype: tf.DType | None = tf.float32,
  variable_dtype: VariableDTypeLike | None = None,
  kernel_initializer: Any = None,
  kernel_weights: Tensor | None = None,
  name: str | None = None,
) -> Tensor:
  """activation(einsum(x, kernel) + bias).

  Variables: `{name}/kernel` [expert_dims + reduced_dims + new_dims] and `{name}/bias`
  [expert_dims + new_dims]. Without a name the two get scopes of their own, new in the
  scope around (`dense/kernel` and `dense_1/bias`, then `dense_2/kernel`, ...):
  existing checkpoints have those names.

  Args:
    x: a `Tensor`.
    new_dims: dimensions of the output, last.
    reduced_dims: dimensions of x to sum over. If one of them is also a new dimension,
      it is called `_<name>` in the kernel. Its last one by default (deprecated).
    expert_dims: dimensions of x along which each index has weights of its own.
    use_bias: whether to add a bias.
    activation: a function of a `Tensor`, or None.
    master_dtype: dtype of the variables in checkpoints, unless `variable_dtype` is given.
    slice_dtype: dtype in which they are kept and updated, unless `variable_dtype` is given.
    variable_dtype: dtypes of the variables; its activation dtype must be x's.
    kernel_initializer: see `get_dense_kernel_weights`.
    kernel_weights: used in place of a kernel variable.
    name: name of the scope.

  Returns:
    A `Tensor` of the dimensions of x without the reduced ones, then `new_dims`.

  Raises:
    ShapeError: a reduced or expert dimension is not in x.
    DTypeError: the bias has another activation dtype than x.
  """
  new_dims, expert_dims = _as_list(new_dims), _as_list(expert_dims)
  if reduced_dims is None:
    _LOG.warning("dense: give reduced_dims; the last dimension of %s is taken", x)
    reduced_dims = x.shape.dims[-1:]
  reduced_dims = _as_list(reduced_dims)
  _check_dims(x, reduced_dims, expert_dims, name)
  if variable_dtype is None:
    variable_dtype = VariableDType(master_dtype, slice_dtype, x.dtype)
  # Under one name the kernel would have the dimension twice, and the product would not sum over it.
  for i, d in enumerate(reduced_dims):
    if d in new_dims:
      reduced_dims[i] = Dimension(f"_{d.name}", d.size)
      x = rename_dimension(x, d.name, reduced_dims[i].name)
  if kernel_weights is None:
    kernel_weights = get_dense_kernel_weights(
      x,
      new_dims,
      reduced_dims,
      expert_dims,
      kernel_initializer,
      name=name,
      variable_dtype=variable_dtype,
    )
  output_dims = [d for d in x.shape if d not in reduced_dims] + new_dims
  # Entered a second time, also without a bias: the names of later unnamed layers depend on it.
  with scope.variable_scope(name, default_name="dense", graph=x.graph):
    y = us_einsum([x, kernel_weights], output_shape=Shape(output_dims))
    if use_bias:
      y += get_variable(
        x.mesh,
        "bias",
        Shape(expert_dims + new_dims),
        dtype=variable_dtype,
        initializer=initializers.Zeros(),
      )
  return y if activation is None else activation(y)


def _check_dims(
  x: Tensor, reduced_dims: list[Dimension], expert_dims: list[Dimension], name: str | None
) -> None:
  for what, dims in (("reduced", reduced_dims), ("expert", expert_dims)):
    for d in dims:
      if d not in x.shape:
        raise ShapeError(f"dense {name or ''}: {what} dimension {d.name}={d.size} is not in {x}")


def get_dense_kernel_weights(
  x: NumberTensor,
  new_dims: Sequence[Dimension],
  reduced_dims: Sequence[Dimension],
  expert_dims: Sequence[Dimension],
  kernel_initializer: Any,
  name: str | None = None,
  variable_dtype: VariableDTypeLike | None = None,
  master_dtype: tf.DType = tf.float32,
  slice_dtype: tf.DType | None = tf.float32,
) -> Tensor:
  """The variable `{name}/kernel` [expert_dims + reduced_dims + new_dims], in x's dtype.

  Args:
    x: the `Tensor` that it is to be multiplied with.
    new_dims: list of the dimensions that the product makes.
    reduced_dims: list of the dimensions that the product sums over.
    expert_dims: list of the dimensions along which each index has weights of its own.
    kernel_initializer: a `DenseInitializer`; anything that `mtf.get_variable` takes; or
      None, for `VarianceScalingInitializer()`.
    name: name of the scope; `dense`, made unique, by default.
    variable_dtype: dtypes of the variable; master_dtype, slice_dtype and x's by default.
    master_dtype: dtype of the variable in checkpoints, unless `variable_dtype` is given.
    slice_dtype: dtype in which it is kept and updated, unless `variable_dtype` is given; None:
      master_dtype.
  """
  if variable_dtype is None:
    variable_dtype = VariableDType(master_dtype, slice_dtype, x.dtype)
  if kernel_initializer is None:
    kernel_initializer = VarianceScalingInitializer()
  if isinstance(kernel_initializer, DenseInitializer):
    kernel_initializer = kernel_initializer(reduced_dims, new_dims)
  with scope.variable_scope(name, default_name="dense", graph=x.graph):
    kernel = get_variable(
      x.mesh,
      "kernel",
      Shape(list(expert_dims) + list(reduced_dims) + list(new_dims)),
      dtype=variable_dtype,
      initializer=kernel_initializer,
    )
  return cast(kernel, x.dtype)


def dense_product(
  x: NumberTensor,
  reduced_dims: Sequence[Dimension] | None,
  new_dims: Dimension | Sequence[Dimension],
  activation_functions: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None = None,
  name: str = "dense_product",
  **kwargs: Any,
) -> Tensor:
  """The product of one dense layer for each activation function.

  Args:
    x: a `Tensor`.
    reduced_dims: see `dense`.
    new_dims: see `dense`.
    activation_functions: a list, or one, of: a function of a `Tensor`; None or "linear" for
      none; the name of an mtf function ("relu", "gelu", "swish", ...).
    name: scope of the layer if there is one, else the scopes are `{name}_0`, `{name}_1`, ...
    **kwargs: for `dense`.

  Returns:
    A `Tensor`.

  Raises:
    ConfigError: there is no mtf function of that name, or the list is empty.
  """
  given: Any = activation_functions
  activations = list(given) if isinstance(given, (list, tuple)) else [given]
  product: Tensor | None = None
  for i, activation in enumerate(activations):
    factor = dense(
      x,
      reduced_dims=reduced_dims,
      new_dims=new_dims,
      activation=activation_function(activation),
      name=f"{name}_{i}" if len(activations) > 1 else name,
      **kwargs,
    )
    product = factor if product is None else gated(product, factor)
  if product is None:
    raise ConfigError(f"{name} of {x}: activation_functions is empty; write [None] for one layer")
  return product


def activation_function(
  activation: str | Callable[..., Tensor] | None,
) -> Callable[[Tensor], Tensor] | None:
  """The function that an activation of `dense_product` stands for; None: the identity."""
  if activation is None or activation == "linear":
    return None
  function: Any = activation if callable(activation) else getattr(ops, str(activation), None)
  if not callable(function):
    raise ConfigError(
      f"activation function {activation!r}: there is no such mtf function; use a name like relu, "
      "gelu, swish, sigmoid, linear, or a function of an mtf.Tensor"
    )
  found: Callable[[Tensor], Tensor] = function
  return found


def dense_relu_dense(
  x: NumberTensor,
  hidden_channels: Dimension,
  is_training: bool,
  dropout: float = 0.0,
  dropout_broadcast_dims: Sequence[Dimension] | None = None,
  master_dtype: tf.DType = tf.float32,
  slice_dtype: tf.DType | None = tf.float32,
  name: str | None = None,
) -> Tensor:
  """Two dense layers without biases, relu and dropout between them.

  Variables: `{name}/wi/kernel` [io, hidden] and `{name}/wo/kernel` [hidden, io].

  Args:
    x: a `Tensor` [..., io].
    hidden_channels: the dimension between the layers.
    is_training: whether dropout happens.
    dropout: the rate.
    dropout_broadcast_dims: dimensions along which the mask is repeated.
    master_dtype: dtype of the variables in checkpoints.
    slice_dtype: dtype in which slices of the variables are kept and updated.
    name: name of the scope; `dense_relu_dense`, made unique, by default.

  Returns:
    A `Tensor` of x's shape.
  """
  io_channels = x.shape.dims[-1]
  with scope.variable_scope(name, default_name="dense_relu_dense", graph=x.graph):
    h = dense(
      x,
      hidden_channels,
      reduced_dims=[io_channels],
      use_bias=False,
      activation=relu,
      master_dtype=master_dtype,
      slice_dtype=slice_dtype,
      name="wi",
    )
    h = dropout_fn(
      h, is_training, keep_prob=1.0 - dropout, noise_shape=h.shape - dropout_broadcast_dims
    )
    return dense(
      h,
      io_channels,
      reduced_dims=[hidden_channels],
      use_bias=False,
      master_dtype=master_dtype,
      slice_dtype=slice_dtype,
      name="wo",
    )


def _as_list(dims: Dimension | Sequence[Dimension] | None) -> list[Dimension]:
  if dims is None:
    return []
  return [dims] if isinstance(dims, Dimension) else list(dims)
