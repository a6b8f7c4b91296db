"""Initial values of Fixup layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors


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
