"""Random numbers as a function of key and global index, cut into slices freely.

A slice of a tensor is drawn without drawing the tensor: each element's bits are
a hash of the key and of the element's index along every axis. So the values do
not depend on how a tensor is split. The hash chains a 32-bit finalizer with full
avalanche (C. Wellons' `lowbias32`, exact bias 0.17) over the axes; only the last
axis costs work of the size of the slice.
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from mesh_tensorflow.errors import DTypeError
from mesh_tensorflow.numerics import constants, kernels
from mesh_tensorflow.program.dimensions import list_product

# 2**32 divided by the golden ratio. It is added before `mix`, which makes 0 of 0.
_GOLDEN = 0x9E3779B9


def _constant(value: int) -> tf.Tensor:
  return tf.convert_to_tensor(constants.constant(value & 0xFFFFFFFF, tf.uint32), tf.uint32)


def mix(x: tf.Tensor) -> tf.Tensor:
  """A bijection of uint32 whose every output bit depends on every input bit."""
  xor, shift = tf.bitwise.bitwise_xor, tf.bitwise.right_shift
  x = xor(x, shift(x, _constant(16))) * _constant(0x7FEB352D)
  x = xor(x, shift(x, _constant(15))) * _constant(0x846CA68B)
  return xor(x, shift(x, _constant(16)))


def mix_int(x: int) -> int:
  """`mix` of a Python integer."""
  x &= 0xFFFFFFFF
  x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
  x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
  return x ^ (x >> 16)


def name_key(name: str) -> int:
  """A 32-bit number for a name, the same in every process."""
  # Not `hash`, which Python salts in each process. Checksums of similar names differ in few bits:
  # `mix_int` spreads that.
  return mix_int(zlib.crc32(name.encode("utf-8")))


def fold(key: int | tf.Tensor, data: int | tf.Tensor) -> Any:
  """A new key from a key and a number.

  Args:
    key: Python int, or a uint32 scalar.
    data: Python int, or an integer scalar tensor. Of 64 bits all count; 32 bits are those of the
      positive number with the same bits.

  Returns:
    A Python int if both are, else a uint32 scalar.
  """
  if isinstance(data, int):
    low, high = data & 0xFFFFFFFF, (data >> 32) & 0xFFFFFFFF
    if isinstance(key, int):
      key = mix_int(key ^ mix_int(low + _GOLDEN))
      return mix_int(key + high) if high else key
    mixed = mix(tf.bitwise.bitwise_xor(tf.cast(key, tf.uint32), _constant(mix_int(low + _GOLDEN))))
    return mix(mixed + _constant(high)) if high else mixed
  key = _constant(key) if isinstance(key, int) else tf.cast(key, tf.uint32)
  data = tf.convert_to_tensor(data)
  mixed = mix(tf.bitwise.bitwise_xor(key, mix(tf.cast(data, tf.uint32) + _constant(_GOLDEN))))
  if data.dtype.size <= 4:
    return mixed
  # The other half, as above: a number is the same whether Python or TensorFlow has it.
  rest = tf.cast(tf.bitwise.right_shift(data, tf.constant(32, data.dtype)), tf.uint32)
  return tf.where(tf.equal(rest, 0), mixed, mix(mixed + rest))


def bits(
  key: int | tf.Tensor,
  full_shape: Sequence[int],
  begin: Sequence[int | tf.Tensor],
  slice_shape: Sequence[int],
) -> tf.Tensor:
  """Random 32-bit words of a slice of a tensor.

  Args:
    key: Python int or uint32 scalar.
    full_shape: sizes of the whole tensor.
    begin: offset of the slice along each axis; Python ints or int32 scalars.
    slice_shape: sizes of the slice.

  Returns:
    A uint32 tensor of `slice_shape`.
  """
  if (
    tf.executing_eagerly()
    and isinstance(key, int)
    and all(isinstance(b, int) for b in begin)
    and list_product(slice_shape) <= _NUMPY_SIZE
  ):
    return tf.constant(_numpy_bits(key, begin, slice_shape))
  if isinstance(key, int):
    state = _constant(mix_int(key + _GOLDEN))
  else:
    state = mix(tf.cast(key, tf.uint32) + _constant(_GOLDEN))
  ndims = len(full_shape)
  for axis, (b, n) in enumerate(zip(begin, slice_shape)):
    index = tf.range(n, dtype=tf.int32)
    if not (isinstance(b, int) and b == 0):
      # In the whole tensor, not in the slice.
      index = index + tf.cast(b, tf.int32)
    # Odd factors: a bijection of the index, and another one for each axis.
    index = tf.bitcast(index, tf.uint32) * _constant(_GOLDEN * (2 * axis + 1))
    index = tf.reshape(index, [n] + [1] * (ndims - axis - 1))
    state = mix(tf.bitwise.bitwise_xor(state, index))
  # Once more, or the last axis would have been through `mix` only once.
  return mix(state + _constant(_GOLDEN))


def half_words(
  key: int | tf.Tensor,
  full_shape: Sequence[int],
  begin: Sequence[int | tf.Tensor],
  slice_shape: Sequence[int],
) -> tf.Tensor:
  """Random 16-bit words of a slice of a tensor, at a quarter of the cost of `bits`.

  Each row along the last axis has a random key; its words are hashes of the key and of
  their number, and give two half words each.

  Args:
    key: Python int or uint32 scalar.
    full_shape: sizes of the whole tensor; at least one.
    begin: offset of the slice along each axis; Python ints or int32 scalars.
    slice_shape: sizes of the slice.

  Returns:
    A uint16 tensor of `slice_shape`.
  """
  rows = bits(key, full_shape[:-1], begin[:-1], slice_shape[:-1])
  first, n = begin[-1], slice_shape[-1]
  # The slice may begin, and end, in the middle of a word. It cannot if blocks are even.
  even = n % 2 == 0 and (not isinstance(first, int) or first % 2 == 0)
  count = n // 2 if even else n // 2 + 1
  number = tf.cast(tf.range(count) + first // 2, tf.uint32)
  # Knuth's multiplicative hash. The factor is odd: distinct numbers
  # stay distinct, and neighbours differ in their high bits too.
  number *= tf.constant(_GOLDEN, tf.uint32)
  words = mix(tf.bitwise.bitwise_xor(rows[..., None], number))
  halves = tf.reshape(tf.bitcast(words, tf.uint16), list(slice_shape[:-1]) + [2 * count])
  if even:
    return halves
  offset = [0] * len(full_shape)
  offset[-1] = first % 2
  return kernels.cut(halves, offset, slice_shape)


# Up to this size, eager NumPy beats the dispatch of some fifty TensorFlow operations: the start of
# a program draws hundreds of such slices.
_NUMPY_SIZE = 2**18


_Words: TypeAlias = npt.NDArray[np.uint32]


def _numpy_bits(key: int, begin: Sequence[int], slice_shape: Sequence[int]) -> _Words:
  """`bits` in NumPy, word for word."""
  state = np.array(mix_int(key + _GOLDEN), np.uint32)
  ndims = len(slice_shape)
  with np.errstate(over="ignore"):
    for axis, (b, n) in enumerate(zip(begin, slice_shape)):
      index = np.arange(b, b + n, dtype=np.int64).astype(np.uint32)
      index *= np.uint32((_GOLDEN * (2 * axis + 1)) & 0xFFFFFFFF)
      state = _numpy_mix(state ^ index.reshape([n] + [1] * (ndims - axis - 1)))
    return _numpy_mix(state + np.uint32(_GOLDEN))


def _numpy_mix(x: _Words) -> _Words:
  x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
  x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
  mixed: _Words = x ^ (x >> np.uint32(16))
  return mixed


def _unit(words: tf.Tensor) -> tf.Tensor:
  """float32 in [0, 1), multiples of 2**-24."""
  # float32 holds 24 bits: no number is rounded, and none becomes 1. Shifted, the words are positive
  # as int32, too.
  return tf.cast(tf.bitcast(tf.bitwise.right_shift(words, _constant(8)), tf.int32), tf.float32) * (
    1.0 / 2**24
  )


def _open_unit(words: tf.Tensor) -> tf.Tensor:
  """float64 in (0, 1), symmetric about 1/2.

  In double precision, since TensorFlow's vectorized and scalar `ndtri` differ in the last
  bit: an element's value would depend on its place in the slice. Rounding hides that.
  """
  half = tf.bitcast(tf.bitwise.right_shift(words, _constant(1)), tf.int32)
  return (tf.cast(half, tf.float64) + 0.5) * (1.0 / 2**31)


def uniform(
  key: int | tf.Tensor,
  full_shape: Sequence[int],
  begin: Sequence[int | tf.Tensor],
  slice_shape: Sequence[int],
  minval: float | tf.Tensor = 0,
  maxval: float | tf.Tensor = None,
  dtype: tf.DType = tf.float32,
  name: str | None = None,
) -> tf.Tensor:
  """A slice of a tensor of uniform numbers in [minval, maxval), as `tf.random.uniform`."""
  del name
  dtype = tf.as_dtype(dtype)
  words = bits(key, full_shape, begin, slice_shape)
  if dtype.is_integer:
    if maxval is None:
      raise DTypeError(f"random_uniform of dtype {dtype.name} needs maxval")
    span = tf.cast(maxval, tf.int64) - tf.cast(minval, tf.int64)
    # The remainder favours low numbers by at most 2**-32 in probability. A span above 2**32 is not
    # filled: there are no more words.
    return tf.cast(tf.cast(words, tf.int64) % span + tf.cast(minval, tf.int64), dtype)
  low = float(minval) if not tf.is_tensor(minval) else tf.cast(minval, tf.float32)
  high = 1.0 if maxval is None else maxval
  high = float(high) if not tf.is_tensor(high) else tf.cast(high, tf.float32)
  u = _unit(words)
  if dtype != tf.float32 and dtype.size < 4:
    # Rounding to a short mantissa must not reach 1.
    bits_kept = 7 if dtype == tf.bfloat16 else 10
    u = tf.floor(u * 2.0**bits_kept) * 2.0**-bits_kept
  if not (isinstance(low, float) and isinstance(high, float) and (low, high) == (0.0, 1.0)):
    u = u * (high - low) + low
  return tf.cast(u, dtype)


def normal(
  key: int | tf.Tensor,
  full_shape: Sequence[int],
  begin: Sequence[int | tf.Tensor],
  slice_shape: Sequence[int],
  mean: float | tf.Tensor = 0.0,
  stddev: float | tf.Tensor = 1.0,
  dtype: tf.DType = tf.float32,
  name: str | None = None,
) -> tf.Tensor:
  """A slice of a tensor of normal numbers, as `tf.random.normal`; |z| is below 6.3."""
  del name
  z = tf.math.ndtri(_open_unit(bits(key, full_shape, begin, slice_shape)))
  return _scaled(z, mean, stddev, dtype)


def _scaled(
  z: tf.Tensor, mean: float | tf.Tensor, stddev: float | tf.Tensor, dtype: tf.DType
) -> tf.Tensor:
  """Mean + stddev * z, computed in float64 so far as it is made of constants."""
  if tf.is_tensor(mean) or tf.is_tensor(stddev):
    z = tf.cast(z, tf.float32)
    return tf.cast(z * tf.cast(stddev, tf.float32) + tf.cast(mean, tf.float32), dtype)
  return tf.cast(z * float(stddev) + float(mean), dtype)


# The probability of a normal number below -2.
_LOW_TAIL = 0.5 * (1.0 + math.erf(-2.0 / math.sqrt(2.0)))


def truncated_normal(
  key: int | tf.Tensor,
  full_shape: Sequence[int],
  begin: Sequence[int | tf.Tensor],
  slice_shape: Sequence[int],
  mean: float | tf.Tensor = 0.0,
  stddev: float | tf.Tensor = 1.0,
  dtype: tf.DType = tf.float32,
  name: str | None = None,
) -> tf.Tensor:
  """A slice of normal numbers cut at two standard deviations, by the inverse CDF."""
  del name
  u = _open_unit(bits(key, full_shape, begin, slice_shape))
  # Without a rejected draw: each element has one word, whatever slice it is in.
  z = tf.math.ndtri(u * (1.0 - 2.0 * _LOW_TAIL) + _LOW_TAIL)
  return _scaled(z, mean, stddev, dtype)


# By the `__name__` of the TensorFlow function they stand for.
DISTRIBUTIONS = {
  "random_uniform": uniform,
  "uniform": uniform,
  "random_normal": normal,
  "normal": normal,
  "truncated_normal": truncated_normal,
}


def arguments_of(distribution: str) -> list[str]:
  """Names of the arguments of one of `DISTRIBUTIONS` that say what is drawn."""
  parameters = inspect.signature(DISTRIBUTIONS[distribution]).parameters.values()
  return [p.name for p in parameters if p.default is not inspect.Parameter.empty]
