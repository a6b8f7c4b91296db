"""Compact forms of running averages: bfloat16, and 8 bits with scales.

Both round stochastically: up or down with probabilities such that the mean is the value. Rounded to
the nearest, an average that moves by less than half a step of its form would never move at all:
0.999 times a number of bfloat16 is, rounded, that number.

The 8 bits of an element are an element of a scale between 0 and 1, which is finer near 0, times the
smallest of its scales: along each axis there is one, the largest absolute value of the elements
that share the index there (Li et al., 2023, arXiv:2309.01507, "rank-1 normalization"). Unlike
blocks of neighbours, they are the same however the tensor is split.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.numerics import kernels

__all__ = [
  "base_of_codes",
  "decode",
  "encode",
  "name_of_codes",
  "names_of_scales",
  "round_to_bfloat16",
  "scales",
]


def name_of_codes(name: str) -> str:
  """The name of the variable of the 8 bits of what is called `name`."""
  return f"{name}/codes"


def names_of_scales(name: str, dims: Sequence[str]) -> list[str]:
  """The names of the variables of its scales, see `scales`; its dimensions are `dims`."""
  return [f"{name}/scale_{d}" for d in dims]


def base_of_codes(name: str) -> str | None:
  """The name of that of which a variable has the 8 bits; None if it has none."""
  base, _, last = name.rpartition("/")
  return base if base and last == "codes" else None


def round_to_bfloat16(x: tf.Tensor, words: tf.Tensor) -> tf.Tensor:
  """Rounds stochastically.

  Args:
    x: float32.
    words: random uint16 numbers, of its shape.

  Returns:
    bfloat16; NaN and infinity stay what they are.
  """
  # bfloat16 is the upper half of float32: the carry of the lower half, to which a random number is
  # added, happens with the probability that is wanted.
  bits = tf.bitcast(x, tf.uint32) + tf.cast(words, tf.uint32)
  rounded = tf.bitcast(tf.bitwise.bitwise_and(bits, tf.constant(0xFFFF0000, tf.uint32)), tf.float32)
  return tf.cast(kernels.where(tf.math.is_finite(x), rounded, x), tf.bfloat16)


def scales(x: tf.Tensor) -> list[tf.Tensor]:
  """The largest absolute values along each axis, or of all where there is only one axis.

  Args:
    x: float32, of at least one axis.
  """
  size, axes = tf.abs(x), list(range(x.shape.ndims))
  if len(axes) == 1:
    return [tf.reduce_max(size)]
  return [tf.reduce_max(size, [a for a in axes if a != axis]) for axis in axes]


def _smallest(parts: Sequence[tf.Tensor], ndims: int) -> tf.Tensor:
  """The scale of each element."""
  if len(parts) == 1:
    return parts[0]
  found = None
  for axis, part in enumerate(parts):
    part = tf.reshape(part, [1] * axis + [-1] + [1] * (ndims - axis - 1))
    found = part if found is None else tf.minimum(found, part)
  return found


# Signed: sign(k) (k / 127)^2 for k from -127 to 127. Of what is never negative, and is a divisor:
# ((k + 1) / 256)^4 for k from 0 to 255; it has no zero.
_SIGNED, _POSITIVE = 127.0, 256.0


def encode(
  x: tf.Tensor, parts: Sequence[tf.Tensor], words: tf.Tensor, dtype: tf.DType
) -> tf.Tensor:
  """The 8 bits of a slice.

  Args:
    x: float32.
    parts: its scales, see `scales`; of the whole tensor, at the indices of the slice.
    words: random uint16 numbers, of its shape.
    dtype: int8; or uint8, if no element is negative.

  Returns:
    A tensor of the dtype, of the slice's shape.
  """
  # Between 0 and 1; rows of zeros have the scale 0.
  share = tf.math.divide_no_nan(tf.abs(x), _smallest(parts, x.shape.ndims))
  chance = tf.cast(tf.cast(words, tf.int32), tf.float32) * (1.0 / 65536.0)
  if dtype == tf.uint8:
    target = share * _POSITIVE**4
    low = tf.clip_by_value(tf.floor(tf.sqrt(tf.sqrt(target))), 1.0, _POSITIVE)
    square, above = tf.square(low), tf.square(low + 1.0)
    part = (target - tf.square(square)) / (tf.square(above) - tf.square(square))
    low = tf.minimum(low + tf.cast(chance < part, tf.float32), _POSITIVE)
    return tf.cast(low - 1.0, dtype)
  target = share * _SIGNED**2
  low = tf.floor(tf.sqrt(target))
  part = (target - tf.square(low)) / (2.0 * low + 1.0)
  low = tf.minimum(low + tf.cast(chance < part, tf.float32), _SIGNED)
  return tf.cast(tf.sign(x) * low, dtype)


def decode(codes: tf.Tensor, parts: Sequence[tf.Tensor]) -> tf.Tensor:
  """The float32 values of `encode`'s 8 bits; arguments as there."""
  scale, number = _smallest(parts, codes.shape.ndims), tf.cast(codes, tf.float32)
  if codes.dtype == tf.uint8:
    return tf.square(tf.square((number + 1.0) * (1.0 / _POSITIVE))) * scale
  return number * tf.abs(number) * (scale * (1.0 / _SIGNED**2))
