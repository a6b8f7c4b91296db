"""Rotary positions (Su et al., 2021; arXiv:2104.09864)."""

from __future__ import annotations

import dataclasses
import math

import gin
import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.transformer.model.context import Context

_SCALINGS = (None, "linear", "ntk", "llama3", "yarn")


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
@dataclasses.dataclass(frozen=True)
class Rotary:
  """Turns queries and keys by angles that grow with the position.

  With n the size of a vector, its channels i and i + n / 2 are the coordinates of a point, which at
  position p is turned by the angle p f_i, f_i = base ** (-2 i / n). The product of a query and a
  key then depends on their distance, not on their positions. Bind it as
  `GroupedQueryAttention.rotary = @Rotary()`, and `Unitransformer.positional_embedding = False`.

  `scaling` makes a model, trained on short sequences, read sequences `factor` times as long:

      "linear": f_i / factor (Chen et al., 2023; arXiv:2306.15595)
      "ntk": base * factor ** (n / (n - 2)) in place of base: the slowest pair turns as with
          "linear", the fastest as without
      "llama3": w_i = 2 pi / f_i positions make a turn. Pairs of original_length / w_i at least
          high_freq_factor turns have f_i, those of at most low_freq_factor turns f_i / factor;
          between, s f_i + (1 - s) f_i / factor, where s grows linearly with the turns, from 0 to 1
      "yarn": s f_i + (1 - s) f_i / factor (Peng et al., 2023; arXiv:2309.00071), where s falls
          linearly with i, as in the authors' program and the models trained with it: from 1 at the
          pair of beta_fast turns in original_length positions (rounded down) to 0 at that of
          beta_slow turns (rounded up). Queries and keys are multiplied by attention_factor

  Args:
    base: see above; the larger, the slower the slowest pair turns.
    fraction: which part of the pairs is turned; those of the largest i are left as they are.
    scaling: None, "linear", "ntk", "llama3" or "yarn".
    factor: of the scaling, at least 1.
    original_length: length of the sequences of training, for "llama3" and "yarn".
    low_freq_factor: see above.
    high_freq_factor: see above.
    beta_fast: see above.
    beta_slow: see above.
    attention_factor: of "yarn", whose longer sequences have more to attend to: products of queries
      and keys are multiplied by its square. None: 0.1 ln(factor) + 1.

  Raises:
    ConfigError: an argument that is none of these.
  """

  base: float = 10000.0
  fraction: float = 1.0
  scaling: str | None = None
  factor: float = 1.0
  original_length: int = 8192
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  beta_fast: float = dataclasses.field(default=32.0, kw_only=True)
  beta_slow: float = dataclasses.field(default=1.0, kw_only=True)
  attention_factor: float | None = dataclasses.field(default=None, kw_only=True)

  def __post_init__(self) -> None:
    if self.scaling not in _SCALINGS:
      raise errors.ConfigError(
        f'Rotary.scaling must be None, "linear", "ntk", "llama3" or "yarn", got {self.scaling!r}'
      )
    if self.base <= 1 or not 0 <= self.fraction <= 1 or self.factor < 1:
      raise errors.ConfigError(
        f"Rotary: base (={self.base}) must be larger than 1, fraction (={self.fraction}) between 0 "
        f"and 1, and factor (={self.factor}) at least 1"
      )
    if self.factor != 1 and self.scaling is None:
      raise errors.ConfigError(
        f"Rotary.factor (={self.factor}) has no effect without Rotary.scaling; bind it to "
        '"linear", "ntk", "llama3" or "yarn"'
      )
    if not 0 < self.low_freq_factor < self.high_freq_factor:
      raise errors.ConfigError(
        f"Rotary: low_freq_factor (={self.low_freq_factor}) must be positive, and less than "
        f"high_freq_factor (={self.high_freq_factor})"
      )
    if not 0 < self.beta_slow < self.beta_fast:
      raise errors.ConfigError(
        f"Rotary: beta_slow (={self.beta_slow}) must be positive, and less than beta_fast "
        f"(={self.beta_fast})"
      )
    if self.attention_factor is not None and self.scaling != "yarn":
      raise errors.ConfigError(
        f"Rotary.attention_factor (={self.attention_factor}) is of Rotary.scaling = 'yarn', which "
        f"is {self.scaling!r}"
      )

  def frequencies(self, size: int) -> list[float]:
    """The angle per position of each pair of a vector's channels.

    Args:
      size: of the vector; even.
    """
    base = self.base
    # For one pair alone n - 2 is 0, and its frequency is 1 for any base.
    if self.scaling == "ntk" and size > 2:
      base *= self.factor ** (size / (size - 2))
    pairs = size // 2
    turned = round(pairs * self.fraction)
    # Pairs of frequency 0 are not turned: they compare contents, wherever these are.
    return [
      self._scaled(base ** (-i / pairs), i, size) if i < turned else 0.0 for i in range(pairs)
    ]

  def _scaled(self, frequency: float, i: int, size: int) -> float:
    """The frequency of pair i of a vector of this size, scaled."""
    if self.scaling == "linear":
      return frequency / self.factor
    if self.scaling == "llama3":
      turns = self.original_length * frequency / (2 * math.pi)
      low, high = self.low_freq_factor, self.high_freq_factor
      share = (turns - low) / (high - low)
    elif self.scaling == "yarn":
      first = max(math.floor(self._pair_of_turns(self.beta_fast, size)), 0)
      last = min(math.ceil(self._pair_of_turns(self.beta_slow, size)), size - 1)
      # Sizes of tests can have both at one pair; then it is the last that keeps its frequency.
      share = 1 - (i - first) / max(last - first, 1e-3)
    else:
      return frequency
    share = min(max(share, 0.0), 1.0)
    return share * frequency + (1 - share) * frequency / self.factor

  def _pair_of_turns(self, turns: float, size: int) -> float:
    """Fractional index of the pair that makes `turns` turns in original_length positions."""
    length = self.original_length / (2 * math.pi * turns)
    return size / 2 * math.log(length) / math.log(self.base)

  @property
  def vector_factor(self) -> float:
    """Factor applied to rotated vectors: YaRN's attention factor, else 1."""
    if self.scaling != "yarn":
      return 1.0
    if self.attention_factor is not None:
      return self.attention_factor
    return 0.1 * math.log(self.factor) + 1.0

  def __call__(
    self, context: Context, x: mtf.Tensor, position: mtf.Tensor, dim: mtf.Dimension
  ) -> mtf.Tensor:
    """Rotates queries or keys by their positions.

    Args:
      context: a `Context`, in whose cache layers share sines and cosines.
      x: queries or keys.
      position: int32, some of the dims of x.
      dim: the dimension of the vectors; may be split.

    Returns:
      A tensor of the shape and dtype of x.

    Raises:
      DimensionError: the size of dim is odd.
    """
    if dim.size % 2:
      raise errors.DimensionError(
        f"Rotary: {dim.name}={dim.size} of {x} must be even: pairs of channels are turned; change "
        "key_value_size"
      )
    # Names of no layout rule: both channels of a pair must be on one processor. Where the layout
    # splits dim, the reshapes exchange parts of it; elsewhere they cost nothing.
    pair, half = mtf.Dimension("_rotary_pair", 2), mtf.Dimension("_rotary", dim.size // 2)
    key = ("rotary", self, half, position)
    cos, sin = context.cached(key, lambda: self._cos_and_sin(position, pair, half))
    # Positions of long sequences times small frequencies need more digits than bfloat16 has.
    points = mtf.cast(mtf.replace_dimensions(x, dim, [pair, half]), tf.float32)

    def times(a: mtf.Tensor, b: mtf.Tensor) -> mtf.Tensor:
      return mtf.multiply(a, b, output_shape=points.shape)

    turned = times(points, cos) + times(_swapped(points, pair), sin)
    return mtf.cast(mtf.replace_dimensions(turned, [pair, half], dim), x.dtype)

  def _cos_and_sin(
    self, position: mtf.Tensor, pair: mtf.Dimension, half: mtf.Dimension
  ) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Float32 factors of the channels, and of the other ones of their pairs.

    Both are `[<dims of position>, pair, half]`: the cosines twice, and the sines, of which the
    first ones are negative.
    """
    frequencies = np.array(self.frequencies(2 * half.size), np.float32)
    angle = mtf.multiply(
      mtf.cast(position, tf.float32),
      mtf.import_tf_tensor(
        position.mesh, tf.constant(np.stack([-frequencies, frequencies])), mtf.Shape([pair, half])
      ),
      output_shape=position.shape + [pair, half],
    )
    cos = mtf.cwise(tf.cos, [angle], grad_function=0, name="cos")
    sin = mtf.cwise(tf.sin, [angle], grad_function=0, name="sin")
    factor = self.vector_factor
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def _swapped(points: mtf.Tensor, pair: mtf.Dimension) -> mtf.Tensor:
  """Swaps the two channels of each pair.

  Args:
    points: channels.
    pair: a dimension of it, of size 2.
  """
  axis = points.shape.dims.index(pair)

  def swap(t: tf.Tensor) -> tf.Tensor:
    # One operation, which copies rows. Cut apart and joined again all would be moved twice.
    rows = tf.reshape(t, [-1, 2, math.prod(t.shape[axis + 1 :])])
    return tf.reshape(tf.reverse(rows, [1]), t.shape)

  swapped: mtf.Tensor = mtf.slicewise(
    swap,
    [points],
    splittable_dims=[d for d in points.shape if d != pair],
    grad_function=lambda op, dy: [_swapped(dy, pair)],
    name="swap_pairs",
  )
  return swapped
