"""Sampling of the next token: filters of logits, and a draw that depends on the row alone.

Every function works on logits whose vocabulary the layout may split: what is exchanged are numbers
for each row (a maximum, a sum), never the logits themselves. The order of `choose_token` is that of
common samplers: repetition penalty, temperature, top-k, top-p, min-p; each filter sees the
distribution that the ones before it left.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.meshes.slices import align
from mesh_tensorflow.numerics import kernels, random_bits
from mesh_tensorflow.operations.binary import floordiv, multiply
from mesh_tensorflow.operations.comparison import greater_equal, less
from mesh_tensorflow.operations.constants import constant
from mesh_tensorflow.operations.elementwise import cast
from mesh_tensorflow.operations.loops import while_loop
from mesh_tensorflow.operations.ranges import mtf_range
from mesh_tensorflow.operations.reduction import reduce_max, reduce_sum
from mesh_tensorflow.operations.slicewise import cwise, slicewise
from mesh_tensorflow.operations.top_k import argmax, nth_largest_element
from mesh_tensorflow.operations.where import where
from mesh_tensorflow.program.dimensions import Dimension
from mesh_tensorflow.program.graph import Tensor

_NEVER = float("-inf")
# The bits of 1.0 as float32. Those of positive floats are in the order of the floats.
_BITS_OF_ONE = 0x3F800000
# 2**32 divided by the golden ratio, and odd multiples of it: one for each thing that is hashed.
_GOLDEN = 0x9E3779B9


@dataclasses.dataclass(frozen=True)
class TokenChoice:
  """Sampling settings: how the next token is chosen from logits.

  Attributes:
    temperature: logits are divided by it; 0 takes the likeliest token, whatever the filters.
    top_k: only so many likeliest tokens (Fan et al. 2018, arXiv:1805.04833); None: all.
    top_p: only the likeliest tokens that together have at least this probability (nucleus
      sampling; Holtzman et al. 2020, arXiv:1904.09751); 1: all.
    min_p: only tokens at least this much as probable as the likeliest (Nguyen et al. 2024,
      arXiv:2407.01082); 0: all.
    repetition_penalty: positive logits of tokens that were seen are divided by it, negative ones
      multiplied (Keskar et al. 2019, CTRL, arXiv:1909.05858); 1: no penalty.

  Raises:
    ConfigError: one of them is out of range.
  """

  temperature: float = 1.0
  top_k: int | None = None
  top_p: float = 1.0
  min_p: float = 0.0
  repetition_penalty: float = 1.0

  def __post_init__(self) -> None:
    def check(name: str, legal: str, is_legal: Callable[[Any], bool]) -> None:
      value = getattr(self, name)
      is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
      if not is_number or not math.isfinite(value) or not is_legal(value):
        raise ConfigError(f"{name} (={value!r}) must be {legal}")

    check("temperature", "a number of at least 0", lambda x: x >= 0)
    if self.top_k is not None:
      check("top_k", "a whole number of at least 1, or None", lambda x: x == int(x) and x >= 1)
    check("top_p", "a number above 0 and at most 1", lambda x: 0 < x <= 1)
    check("min_p", "a number from 0 to 1", lambda x: 0 <= x <= 1)
    check("repetition_penalty", "a number above 0", lambda x: x > 0)


def penalize_repetitions(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
  """Lowers the logits of tokens that were seen.

  CTRL divides the logits, which makes negative ones likelier; as in its published program, and all
  that followed it, those are multiplied.

  Args:
    logits: `[..., vocab]`.
    seen: bool, the shape of the logits.
    penalty: 1 changes nothing; above 1 repetitions become less likely.
  """
  return cwise(
    lambda x, s: kernels.where(s, kernels.where(x > 0, x / penalty, x * penalty), x),
    [logits, seen],
    grad_function=0,
    name="repetition_penalty",
  )


def keep_top_k(logits: Tensor, vocab: Dimension, k: int) -> Tensor:
  """The k largest logits; -inf for all others. Those equal to the k-th are kept, too.

  Args:
    logits: `[..., vocab]`.
    vocab: the dimension of tokens.
    k: at least 1; from the size of the vocabulary on, all are kept.
  """
  if k >= vocab.size:
    return logits
  return where(less(logits, nth_largest_element(logits, k - 1, vocab)), _NEVER, logits)


def keep_top_p(logits: Tensor, vocab: Dimension, p: float) -> Tensor:
  """The nucleus: the likeliest tokens with a probability of at least p together; -inf for others.

  Those that are as likely as the least likely of them are kept, too, so that no order of the
  vocabulary decides.

  Sorting would take the whole vocabulary to one place. Instead the least likely token of the
  nucleus is found by bisection of the 2**30 floats from 0 to 1: each step is a sum over the
  vocabulary, of which a mesh exchanges one number for each row.

  Args:
    logits: float32 `[..., vocab]`.
    vocab: the dimension of tokens.
    p: above 0; from 1 on, all are kept.
  """
  if p >= 1.0:
    return logits
  rows = logits.shape - vocab
  # Relative to the likeliest, of which the weight is 1.
  weights = cwise(tf.exp, [logits - reduce_max(logits, reduced_dim=vocab)], grad_function=0)
  wanted = reduce_sum(weights, reduced_dim=vocab) * p

  def cond(low: Tensor, above: Tensor, step: Tensor) -> Tensor:
    del low, above
    return less(step, _BITS_OF_ONE.bit_length() + 1)

  def body(low: Tensor, above: Tensor, step: Tensor) -> list[Tensor]:
    # Those of `low` have enough probability together, those of `above` have not.
    middle = low + floordiv(above - low, 2)
    heavy = _at_least(weights, middle)
    enough = greater_equal(reduce_sum(multiply(weights, heavy), reduced_dim=vocab), wanted)
    return [where(enough, middle, low), where(enough, above, middle), step + 1]

  start = [
    constant(logits.mesh, 0, rows, tf.int32),
    constant(logits.mesh, _BITS_OF_ONE + 1, rows, tf.int32),
    constant(logits.mesh, 0, [], tf.int32),
  ]
  least = while_loop(cond, body, start)[0]
  return where(cast(_at_least(weights, least), tf.bool), logits, _NEVER)


def _at_least(weights: Tensor, bits: Tensor) -> Tensor:
  """1.0 where the bits of the weights are at least those given for the row, else 0.0."""
  dims, row_dims = weights.shape.dims, bits.shape.dims

  def compare(w: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.bitcast(w, tf.int32) >= align(b, row_dims, dims), w.dtype)

  result: Tensor = slicewise(
    compare, [weights, bits], splittable_dims=dims, grad_function=0, name="at_least"
  )
  return result


def keep_min_p(logits: Tensor, vocab: Dimension, p: float) -> Tensor:
  """Tokens at least p times as probable as the likeliest one; -inf for others.

  Args:
    logits: `[..., vocab]`.
    vocab: the dimension of tokens.
    p: from 0, which keeps all, to 1, which keeps the likeliest.
  """
  if p <= 0.0:
    return logits
  least = reduce_max(logits, reduced_dim=vocab) + math.log(p)
  return where(less(logits, least), _NEVER, logits)


def row_keys(seed: int, numbers: Any) -> npt.NDArray[np.int32]:
  """Keys of rows, for `choose_token`: distinct ones for distinct numbers.

  Args:
    seed: an integer.
    numbers: integers [rows] that tell the rows apart, wherever in a batch they are.

  Returns:
    int32 [rows].
  """
  key = random_bits.fold(random_bits.name_key("sampling"), int(seed))
  words = [random_bits.mix_int(key ^ (int(n) * _GOLDEN & 0xFFFFFFFF)) for n in numbers]
  return np.array(words, np.uint32).view(np.int32)


def gumbel_noise(like: Tensor, vocab: Dimension, keys: Tensor, counts: Tensor) -> Tensor:
  """Gumbel noise -log(-log(u)), a function of a row's key and count and of the token alone.

  So neither the layout nor the place of a row in its batch, nor the rows beside it, change it.

  Args:
    like: float32 `[rows..., vocab]`; the result has its shape.
    vocab: the dimension of tokens.
    keys: int32 [rows...], see `row_keys`.
    counts: int32 [rows...]: how many tokens were drawn for the row before.
  """
  dims, row_dims = like.shape.dims, keys.shape.dims

  def draw(x: tf.Tensor, key: tf.Tensor, count: tf.Tensor, token: tf.Tensor) -> tf.Tensor:
    def hashed(state: tf.Tensor, number: tf.Tensor, factor: int) -> tf.Tensor:
      factor = tf.constant(factor * _GOLDEN & 0xFFFFFFFF, tf.uint32)
      return random_bits.mix(tf.bitwise.bitwise_xor(state, tf.bitcast(number, tf.uint32) * factor))

    row = hashed(tf.bitcast(key, tf.uint32), count, 3)
    row = random_bits.mix(row + tf.constant(_GOLDEN, tf.uint32))
    bits = hashed(align(row, row_dims, dims), align(token, [vocab], dims), 5)
    # 23 bits and a half: never 0 nor 1, of which the noise is not finite.
    bits = tf.bitwise.right_shift(bits, tf.constant(9, tf.uint32))
    u = (tf.cast(tf.bitcast(bits, tf.int32), tf.float32) + 0.5) * 2.0**-23
    return tf.broadcast_to(-tf.math.log(-tf.math.log(u)), tf.shape(x))

  result: Tensor = slicewise(
    draw,
    [like, keys, counts, mtf_range(like.mesh, vocab, tf.int32)],
    splittable_dims=dims,
    grad_function=0,
    name="gumbel",
  )
  return result


def filtered_logits(
  logits: Tensor, vocab: Dimension, choice: TokenChoice, seen: Tensor | None = None
) -> Tensor:
  """The logits that tokens are drawn by: penalized, divided by the temperature, filtered.

  Args:
    logits: `[rows..., vocab]`.
    vocab: the dimension of tokens.
    choice: with a temperature above 0.
    seen: bool, of the shape of the logits; needed for a repetition penalty.

  Returns:
    float32, of the same shape; -inf for tokens that are left out.
  """
  # In bfloat16 many logits would be equal.
  logits = cast(logits, tf.float32)
  if seen is not None and choice.repetition_penalty != 1.0:
    logits = penalize_repetitions(logits, seen, choice.repetition_penalty)
  if choice.temperature not in (0.0, 1.0):
    logits = logits * (1.0 / choice.temperature)
  if choice.temperature == 0.0:
    return logits
  if choice.top_k is not None:
    logits = keep_top_k(logits, vocab, int(choice.top_k))
  return keep_min_p(keep_top_p(logits, vocab, choice.top_p), vocab, choice.min_p)


def choose_token(
  logits: Tensor,
  vocab: Dimension,
  choice: TokenChoice,
  keys: Tensor,
  counts: Tensor,
  seen: Tensor | None = None,
) -> Tensor:
  """The next token of each row, by the Gumbel-max method (Gumbel, 1954).

  Args:
    logits: `[rows..., vocab]`.
    vocab: the dimension of tokens.
    choice: how.
    keys: int32 [rows...], see `row_keys`.
    counts: int32 [rows...]: how many tokens were drawn for the row before.
    seen: bool, of the shape of the logits: which tokens a row has; needed for a repetition penalty.

  Returns:
    int32 [rows...].
  """
  logits = filtered_logits(logits, vocab, choice, seen)
  if choice.temperature > 0.0:
    logits = logits + gumbel_noise(logits, vocab, keys, counts)
  return argmax(logits, vocab)
