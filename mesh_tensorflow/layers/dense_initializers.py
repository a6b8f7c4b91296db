"""Initial values of dense kernels, by the dimensions that are reduced and made."""

from __future__ import annotations

import math
from collections.abc import Sequence

import gin

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.layers.scaling import unit_scaling_convention
from mesh_tensorflow.numerics import initializers
from mesh_tensorflow.program.dimensions import Dimension, list_product

__all__ = ["DenseInitializer", "VarianceScalingInitializer"]


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
