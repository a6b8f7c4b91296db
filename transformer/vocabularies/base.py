"""Base class of vocabularies: id 0 is padding, id 1 ends a sequence (EOS).

`encode` adds no EOS.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

PAD_ID = 0
EOS_ID = 1


class Vocabulary:
  """Base class: the interface of a vocabulary."""

  @property
  def vocab_size(self) -> int:
    """Number of ids, padding (0) and EOS (1) included."""
    raise NotImplementedError

  def content(self) -> bytes:
    """Bytes that determine the ids of texts: equal in equal vocabularies of one class."""
    raise NotImplementedError

  def encode(self, s: str) -> list[int]:
    """The ids of a string, without EOS."""
    raise NotImplementedError

  def decode(self, ids: Iterable[int]) -> str:
    """The string of some ids."""
    raise NotImplementedError

  def encode_tf(self, s: tf.Tensor) -> tf.Tensor:
    """The ids of a scalar string tensor: int32 [length], without EOS."""
    raise NotImplementedError

  def decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
    """The strings of int ids [..., length]: a string tensor [...]."""
    raise NotImplementedError


def as_text(decoded: Any) -> str:
  """Converts a vocabulary's decoded output (str, UTF-8 bytes or a list of words) to a str."""
  if isinstance(decoded, bytes):
    return decoded.decode("utf-8", "replace")
  if isinstance(decoded, (list, tuple)):
    return " ".join(map(as_text, decoded))
  return str(decoded)


def encode_in_python(vocabulary: Vocabulary, s: tf.Tensor) -> tf.Tensor:
  """The ids of a scalar string tensor by `vocabulary.encode`: int32 [length].

  A graph with it runs in this process only.
  """

  def encode(s: bytes | np.ndarray) -> np.ndarray:
    # Eagerly it is an array without dimensions.
    data = s.item() if isinstance(s, np.ndarray) else s
    return np.array(vocabulary.encode(data.decode("utf-8", "replace")), np.int32)

  return tf.ensure_shape(tf.numpy_function(encode, [s], tf.int32, stateful=False), [None])


def shifted(ids: tf.Tensor, offset: int, count: int) -> tf.Tensor:
  """Subtracts `offset`; ids that are then not in 0..count-1 become `count`."""
  result = tf.cast(ids, tf.int32) - offset
  return tf.where((result >= 0) & (result < count), result, count)
