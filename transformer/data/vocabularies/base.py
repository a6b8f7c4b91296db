"""Base class of vocabularies, and bytes as ids: id 0 is padding, id 1 ends a sequence (EOS)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import gin
import numpy as np
import tensorflow as tf

from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import COUNT_OR_ZERO, affects, takes

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


# One vocabulary, or an (inputs, targets) pair.
Vocabularies: TypeAlias = Vocabulary | tuple[Vocabulary, Vocabulary]


def as_text(decoded: object) -> str:
  """Converts a vocabulary's decoded output (str, UTF-8 bytes or a list of words) to a str."""
  if isinstance(decoded, bytes):
    return decoded.decode("utf-8", "replace")
  if isinstance(decoded, (list, tuple)):
    return " ".join(map(as_text, decoded))
  return str(decoded)


class PythonVocabulary(Vocabulary):
  """Base class of what encodes in Python: a graph with it runs in this process only."""

  def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each of several strings, without EOS."""
    return [self.encode(text) for text in texts]

  def encode_tf(self, s: tf.Tensor) -> tf.Tensor:
    """Like `encode`, of a scalar string tensor: int32 [length]."""
    ids, lengths = self.encode_rows_tf(tf.convert_to_tensor(s)[tf.newaxis])
    return ids[0, : lengths[0]]

  def encode_rows_tf(
    self, texts: tf.Tensor, most: int | None = None
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """The ids of strings, by one call of Python.

    Args:
      texts: string [n].
      most: number of ids behind which a text is cut.

    Returns:
      int32 [n, length of the longest, at least 1], padded with 0, and the lengths, int32 [n].
    """

    def encode(texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
      rows = self.encode_texts([text.decode("utf-8", "replace") for text in texts])
      rows = [row[:most] for row in rows]
      lengths = np.array([len(row) for row in rows], np.int32)
      # TensorFlow crashes where it takes rows of no elements apart.
      ids = np.zeros([len(rows), lengths.max(initial=1)], np.int32)
      ids[np.arange(ids.shape[1]) < lengths[:, np.newaxis]] = [i for row in rows for i in row]
      return ids, lengths

    ids, lengths = tf.numpy_function(encode, [texts], (tf.int32, tf.int32), stateful=False)
    return tf.ensure_shape(ids, [*texts.shape, None]), tf.ensure_shape(lengths, texts.shape)


def shifted(ids: tf.Tensor, offset: int, count: int) -> tf.Tensor:
  """Subtracts `offset`; ids that are then not in 0..count-1 become `count`."""
  result = tf.cast(ids, tf.int32) - offset
  return tf.where((result >= 0) & (result < count), result, count)


class ByteVocabulary(Vocabulary):
  """The bytes of UTF-8 text, numbered as ByT5 does (Xue et al. 2021, arXiv:2105.13626).

  Id 0 is padding, 1 EOS, 2 unknown (never produced), 3..258 are the bytes 0..255, and `extra_ids`
  more follow (sentinels). Ids that are no bytes decode to nothing, and bytes that are no UTF-8 to
  U+FFFD.

  Args:
    extra_ids: number of ids after the bytes.
  """

  _OFFSET = 3

  def __init__(self, extra_ids: int = 0):
    if extra_ids < 0:
      raise errors.ConfigError(f"ByteVocabulary: extra_ids (={extra_ids}) must not be negative")
    self._extra_ids = int(extra_ids)

  @property
  def vocab_size(self) -> int:
    return self._OFFSET + 256 + self._extra_ids

  def content(self) -> bytes:
    return str(self._extra_ids).encode()

  def encode_array(self, s: str | bytes) -> np.ndarray:
    """Like `encode`, but int32 [length]."""
    data = s if isinstance(s, bytes) else s.encode("utf-8")
    return np.frombuffer(data, np.uint8).astype(np.int32) + self._OFFSET

  def encode(self, s: str | bytes) -> list[int]:
    ids: list[int] = self.encode_array(s).tolist()
    return ids

  def decode(self, ids: Iterable[int]) -> str:
    shifted = (int(i) - self._OFFSET for i in ids)
    return bytes(b for b in shifted if 0 <= b < 256).decode("utf-8", errors="replace")

  def encode_tf(self, s: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.io.decode_raw(s, tf.uint8), tf.int32) + self._OFFSET

  def decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
    # Every id that is no byte points to the empty string behind the 256 bytes.
    table = tf.constant([bytes([b]) for b in range(256)] + [b""])
    joined = tf.strings.reduce_join(tf.gather(table, shifted(ids, self._OFFSET, 256)), axis=-1)
    return tf.strings.unicode_transcode(joined, "UTF-8", "UTF-8", errors="replace")


@gin.configurable(module="mesh_tensorflow.transformer.vocabulary")
@affects("report")
@takes(extra_ids=COUNT_OR_ZERO)
def get_byte_vocabulary(extra_ids: int = 0) -> ByteVocabulary:
  """A `ByteVocabulary`: needs no file and encodes any text; 259 ids and `extra_ids` more."""
  return ByteVocabulary(extra_ids)
