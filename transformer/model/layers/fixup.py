"""The initial values, layers and sublayers of Fixup; see the package."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import BELOW_ONE, COUNT, affects, takes
from mesh_tensorflow.layers.dense import Activation
from mesh_tensorflow.numerics.initializers import InitializerLike
from mesh_tensorflow.transformer.model.context import Context
from mesh_tensorflow.transformer.model.layers.dense_relu_dense import DenseReluDense
from mesh_tensorflow.transformer.model.sublayers import Stack


class _VarianceScaling(mtf.initializers.Initializer):
  """TensorFlow's variance scaling, computed slice by slice.

  The fans are those of the shape as TensorFlow sees it: the last two axes, each times the product
  of the axes before them.

  Args:
    scale: variance times fan.
    mode: "fan_in" or "fan_avg".
    distribution: "uniform", "truncated_normal" ("normal" is the same) or "untruncated_normal".
  """

  def __init__(self, scale: float, mode: str, distribution: str):
    distributions = ("uniform", "truncated_normal", "normal", "untruncated_normal")
    if distribution not in distributions:
      raise errors.ConfigError(
        f"init_distribution must be one of {', '.join(distributions)}; got {distribution!r}"
      )
    self._scale, self._mode, self._distribution = scale, mode, distribution

  def slice_values(
    self,
    key: int,
    full_shape: Sequence[int],
    begin: Sequence[int],
    slice_shape: Sequence[int],
    dtype: tf.DType,
  ) -> tf.Tensor:
    """See `mtf.initializers.Initializer.slice_values`."""
    if len(full_shape) < 2:
      fan_in = fan_out = full_shape[0] if full_shape else 1
    else:
      receptive_field = math.prod(full_shape[:-2])
      fan_in, fan_out = (n * receptive_field for n in full_shape[-2:])
    fan = fan_in if self._mode == "fan_in" else (fan_in + fan_out) / 2
    stddev = math.sqrt(self._scale / max(1.0, fan))
    if self._distribution == "uniform":
      # A uniform distribution in (-a, a) has the variance a ** 2 / 3.
      limit = math.sqrt(3.0) * stddev
      initializer: mtf.initializers.Initializer = mtf.initializers.RandomUniform(-limit, limit)
    elif self._distribution == "untruncated_normal":
      initializer = mtf.initializers.RandomNormal(stddev=stddev)
    else:
      # The standard deviation of a normal distribution cut at two standard deviations.
      initializer = mtf.initializers.TruncatedNormal(stddev=stddev / 0.87962566103423978)
    return initializer.slice_values(key, full_shape, begin, slice_shape, dtype)


def fixup_initializer(
  what: str, default_init: str, init_distribution: str, factor: float
) -> _VarianceScaling:
  """Glorot's or He's initializer, its variance times `factor`."""
  if default_init == "glorot":
    return _VarianceScaling(factor, "fan_avg", init_distribution)
  if default_init == "he":
    return _VarianceScaling(2.0 * factor, "fan_in", init_distribution)
  raise errors.ConfigError(f'{what}: default_init must be "glorot" or "he", got {default_init!r}')


_MODULE = "mesh_tensorflow.transformer.fixup_layers"


def get_single_scalar_bias(x: mtf.Tensor, name: str) -> mtf.Tensor:
  """A variable of one number that starts as 0: `[single_bias=1]`, of the dtype of x."""
  return mtf.get_variable(
    x.mesh,
    name,
    mtf.Shape([mtf.Dimension("single_bias", 1)]),
    dtype=x.dtype,
    initializer=tf.zeros_initializer(),
  )


def _scalar(x: mtf.Tensor) -> mtf.Tensor:
  """The one number of a tensor."""
  return mtf.reshape(x, mtf.Shape([]))


def dense_product_fixup(
  x: mtf.Tensor,
  reduced_dims: Sequence[mtf.Dimension],
  new_dims: mtf.Dimension | Sequence[mtf.Dimension],
  kernel_initializer: InitializerLike,
  activation_functions: Activation | None = None,
  name: str = "dense_product",
  **kwargs: Any,
) -> mtf.Tensor:
  """`mtf.layers.dense_product` with a given initializer of the kernels.

  Args:
    x: a tensor.
    reduced_dims: see `mtf.layers.dense`.
    new_dims: see `mtf.layers.dense`.
    kernel_initializer: see `mtf.layers.dense`.
    activation_functions: see `mtf.layers.dense_product`.
    name: see `mtf.layers.dense_product`.
    **kwargs: further arguments of `mtf.layers.dense`.
  """
  return mtf.layers.dense_product(
    x,
    reduced_dims=reduced_dims,
    new_dims=new_dims,
    activation_functions=activation_functions,
    name=name,
    kernel_initializer=kernel_initializer,
    **kwargs,
  )


@gin.configurable(module=_MODULE)
@affects(training="dropout_rate default_init init_distribution")
@takes(hidden_size=COUNT, dropout_rate=BELOW_ONE)
class DenseReluDenseFixup(DenseReluDense):
  """`DenseReluDense` whose output starts as 0, with a number added to the hidden values.

  Variables: as of `DenseReluDense`, and `shift` [single_bias=1].

  Args:
    hidden_size: see `DenseReluDense`.
    dropout_rate: see `DenseReluDense`.
    activation: see `DenseReluDense`.
    use_bias: see `DenseReluDense`.
    default_init: "glorot" or "he": how the first kernel starts.
    init_distribution: "uniform", "truncated_normal" or "untruncated_normal".
    num_blocks: number of blocks of the stack, by which the variance is divided.
  """

  def __init__(
    self,
    hidden_size: int = 4096,
    dropout_rate: float = 0.0,
    activation: str
    | Callable[..., mtf.Tensor]
    | Sequence[str | Callable[..., mtf.Tensor]] = "relu",
    use_bias: bool = False,
    default_init: str = "he",
    init_distribution: str = "uniform",
    num_blocks: int = gin.REQUIRED,
  ):
    # All is given, so that bindings of DenseReluDense do not hold for these.
    super().__init__(
      hidden_size=hidden_size, dropout_rate=dropout_rate, activation=activation, use_bias=use_bias
    )
    self.default_init = default_init
    self.init_distribution = init_distribution
    self.num_blocks = num_blocks

  def _inner_initializer(self) -> Any:
    # The paper's L ** (-1 / (2 m - 2)) for a branch of m = 2 matrices, squared: a variance.
    return fixup_initializer(
      "DenseReluDenseFixup", self.default_init, self.init_distribution, 1.0 / self.num_blocks
    )

  def _outer_initializer(self) -> Any:
    # Each residual branch starts as 0: the stack starts as the identity, however deep.
    return tf.zeros_initializer()

  def _shifted(self, h: mtf.Tensor) -> mtf.Tensor:
    return h + _scalar(get_single_scalar_bias(h, "shift"))


@gin.configurable(module=_MODULE)
def sublayer_fixup_scale(x: mtf.Tensor, layer_stack: Stack | None, context: Context) -> mtf.Tensor:
  """Multiplies by one trained number; variable `fixup_scale_weight` [single_scale=1]."""
  del layer_stack
  weight = mtf.get_variable(
    x.mesh,
    "fixup_scale_weight",
    mtf.Shape([mtf.Dimension("single_scale", 1)]),
    dtype=context.variable_dtype,
    initializer=tf.ones_initializer(),
  )
  return x * _scalar(weight)


@gin.configurable(module=_MODULE)
def sublayer_fixup_shift(x: mtf.Tensor, layer_stack: Stack | None, context: Context) -> mtf.Tensor:
  """Adds one trained number; variable `fixup_bias` [single_bias=1]."""
  del layer_stack, context
  return x + _scalar(get_single_scalar_bias(x, "fixup_bias"))
