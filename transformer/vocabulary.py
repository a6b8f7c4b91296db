"""Vocabularies: text to integer ids and back.

Conventions of all of them: id 0 is padding and id 1 ends a sequence (EOS). `encode` adds no EOS.
Anything with `vocab_size`, `encode`, `decode`, `encode_tf` (and `decode_tf`, if there is one) can
stand in for a `Vocabulary`.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Sequence
from typing import Any

import gin
import numpy as np
import tensorflow as tf

from mesh_tensorflow import errors
from mesh_tensorflow.transformer import text_files

PAD_ID = 0
EOS_ID = 1


class Vocabulary:
  """Base class: the interface of a vocabulary."""

  @property
  def vocab_size(self) -> int:
    """Number of ids, padding (0) and EOS (1) included."""
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


class TFDSVocabulary(Vocabulary):
  """A text encoder of TensorFlow Datasets, its ids shifted by one to make room for EOS.

  Args:
    tfds_encoder: has `vocab_size`, `encode(s)` and `decode(ids)`; its id 0 is padding.
  """

  def __init__(self, tfds_encoder: Any):
    self._tfds_encoder = tfds_encoder

  @property
  def vocab_size(self) -> int:
    return self._tfds_encoder.vocab_size + 1

  def encode(self, s: str) -> list[int]:
    return [i + 1 for i in self._tfds_encoder.encode(s)]

  def decode(self, ids: Iterable[int]) -> str:
    return self._tfds_encoder.decode([int(i) - 1 for i in ids])


@gin.configurable
def get_tfds_vocabulary(
  dataset_name: str = gin.REQUIRED, *, tfds_data_dir: str | None = None
) -> TFDSVocabulary:
  """The vocabulary that a TensorFlow dataset was tokenized with.

  Args:
    dataset_name: a dataset whose text feature has an encoder, "lm1b/subwords32k" for instance.
    tfds_data_dir: where TensorFlow Datasets keeps its data; its own default if not given.

  Returns:
    The vocabulary of the second supervised feature; inputs are taken to use the same one.

  Raises:
    errors.ConfigError: the dataset has no such feature, or the feature has no encoder.
  """
  import tensorflow_datasets as tfds  # Slow to import, and most runs do not need it.

  info = tfds.builder(dataset_name, data_dir=tfds_data_dir).info
  if not info.supervised_keys:
    raise errors.ConfigError(f"TFDS dataset {dataset_name!r} has no supervised keys")
  key = info.supervised_keys[1]
  encoder = getattr(info.features[key], "encoder", None)
  if encoder is None:
    raise errors.ConfigError(
      f"feature {key!r} of TFDS dataset {dataset_name!r} is not tokenized (it has no encoder); use "
      "untokenized_tfds_dataset with another vocabulary, get_byte_vocabulary() for instance"
    )
  return TFDSVocabulary(encoder)


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

  def encode_array(self, s: str | bytes) -> np.ndarray:
    """As `encode`, but int32 [length]."""
    data = s if isinstance(s, bytes) else s.encode("utf-8")
    return np.frombuffer(data, np.uint8).astype(np.int32) + self._OFFSET

  def encode(self, s: str | bytes) -> list[int]:
    return self.encode_array(s).tolist()

  def decode(self, ids: Iterable[int]) -> str:
    shifted = (int(i) - self._OFFSET for i in ids)
    return bytes(b for b in shifted if 0 <= b < 256).decode("utf-8", errors="replace")

  def encode_tf(self, s: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.io.decode_raw(s, tf.uint8), tf.int32) + self._OFFSET

  def decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
    # Every id that is no byte points to the empty string behind the 256 bytes.
    table = tf.constant([bytes([b]) for b in range(256)] + [b""])
    joined = tf.strings.reduce_join(tf.gather(table, _shift(ids, self._OFFSET, 256)), axis=-1)
    return tf.strings.unicode_transcode(joined, "UTF-8", "UTF-8", errors="replace")


@gin.configurable
def get_byte_vocabulary(extra_ids: int = 0) -> ByteVocabulary:
  """A `ByteVocabulary`: needs no file and encodes any text; 259 ids and `extra_ids` more."""
  return ByteVocabulary(extra_ids)


class CharacterVocabulary(Vocabulary):
  """The distinct characters of a text, sorted by code point.

  Id 0 is padding, 1 EOS, and the characters follow from 2. There is no unknown character: text
  with another character is refused. Ids that are no characters decode to nothing.

  Args:
    characters: the characters, each a string of length one; order and repetitions do not matter.

  Raises:
    errors.DataError: there are none, or one is not a single character.
  """

  _OFFSET = 2
  _HEADER = "# mesh_tensorflow character vocabulary: one JSON string a line, the first has id 2"

  def __init__(self, characters: Iterable[str]):
    distinct = sorted(set(characters))
    if not distinct:
      raise errors.DataError("CharacterVocabulary: there are no characters")
    for c in distinct:
      if not isinstance(c, str) or len(c) != 1:
        raise errors.DataError(f"CharacterVocabulary: {c!r} is not a single character")
    self._characters = distinct
    self._codes = np.array([ord(c) for c in distinct], np.int32)

  @classmethod
  def from_text_files(cls, files: str | Sequence[str]) -> CharacterVocabulary:
    """The characters of the UTF-8 text files (plain, or .gz) that match one or several globs.

    Raises:
      errors.DataError: no file matches, or a file is empty or not UTF-8.
    """
    characters: set[str] = set()
    for file in text_files.read_text_files(files):
      characters.update(file.text)
    return cls(characters)

  @classmethod
  def load(cls, filename: str) -> CharacterVocabulary:
    """Reads what `save` wrote.

    Raises:
      errors.DataError: the file is missing or damaged.
    """
    text = text_files.read_text_files(filename)[0].text
    header, *lines = text.split("\n")
    try:
      if header != cls._HEADER or lines.pop() != "":
        raise ValueError("wrong first or last line")
      result = cls([json.loads(line) for line in lines])
    except ValueError as e:
      raise errors.DataError(f"{filename} is not a whole character vocabulary file: {e}") from e
    if len(result._characters) != len(lines):
      raise errors.DataError(f"{filename} is not a character vocabulary file: repeated characters")
    return result

  def save(self, filename: str) -> None:
    """Writes the vocabulary as a text file that `load` and `get_character_vocabulary` read.

    Raises:
      errors.ConfigError: it cannot be written.
    """
    lines = [self._HEADER, *(json.dumps(c) for c in self._characters)]
    write_whole_file(filename, ("\n".join(lines) + "\n").encode())

  def __eq__(self, other: object) -> bool:
    return isinstance(other, CharacterVocabulary) and other._characters == self._characters

  def __hash__(self) -> int:
    return hash(tuple(self._characters))

  @property
  def characters(self) -> str:
    """All characters, in the order of their ids."""
    return "".join(self._characters)

  @property
  def vocab_size(self) -> int:
    return self._OFFSET + len(self._characters)

  def encode_array(self, s: str) -> np.ndarray:
    """As `encode`, but int32 [length].

    Raises:
      errors.DataError: a character is not in the vocabulary.
    """
    codes = np.frombuffer(s.encode("utf-32-le", errors="surrogatepass"), np.uint32).astype(np.int32)
    index = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
    bad = self._codes[index] != codes
    if bad.any():
      unknown = sorted({chr(c) for c in np.unique(codes[bad])})
      raise errors.DataError(
        f"{len(unknown)} character(s) of the text are not among the {len(self._codes)} of the "
        f"vocabulary: {''.join(unknown[:20])!r}, the first at character {int(bad.argmax())}; "
        "build the vocabulary from all texts, or use get_byte_vocabulary(), which encodes any text"
      )
    return index.astype(np.int32) + self._OFFSET

  def encode(self, s: str) -> list[int]:
    return self.encode_array(s).tolist()

  def decode(self, ids: Iterable[int]) -> str:
    shifted = (int(i) - self._OFFSET for i in ids)
    return "".join(self._characters[i] for i in shifted if 0 <= i < len(self._characters))

  def encode_tf(self, s: tf.Tensor) -> tf.Tensor:
    """As `encode`; an unknown character is a tf.errors.InvalidArgumentError when it runs."""
    codes = tf.strings.unicode_decode(s, "UTF-8", errors="strict")
    known = tf.constant(self._codes)
    index = tf.minimum(tf.searchsorted(known, codes), len(self._codes) - 1)
    check = tf.debugging.Assert(
      tf.reduce_all(tf.equal(tf.gather(known, index), codes)),
      ["a character of this text is not in the vocabulary:", s],
    )
    with tf.control_dependencies([] if check is None else [check]):  # None: it ran eagerly.
      return index + self._OFFSET

  def decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
    table = tf.constant([*self._characters, ""])
    index = _shift(ids, self._OFFSET, len(self._characters))
    return tf.strings.reduce_join(tf.gather(table, index), axis=-1)


@gin.configurable
def get_character_vocabulary(filename: str | Sequence[str] = gin.REQUIRED) -> CharacterVocabulary:
  """A `CharacterVocabulary` from text, or from a file that its `save` wrote.

  Args:
    filename: a text file (plain UTF-8, or .gz), a glob, a list of them; or a vocabulary file.

  Returns:
    The vocabulary.

  Raises:
    errors.DataError: no file matches, or a file is empty, not UTF-8, or damaged.
  """
  if isinstance(filename, str):
    files = text_files.find_files(filename)
    if len(files) == 1 and not files[0].endswith(".gz"):
      with tf.io.gfile.GFile(files[0], "rb") as f:
        start = f.read(len(CharacterVocabulary._HEADER))
      if start == CharacterVocabulary._HEADER.encode():
        return CharacterVocabulary.load(files[0])
  return CharacterVocabulary.from_text_files(filename)


def encode_in_python(vocabulary: Vocabulary, s: tf.Tensor) -> tf.Tensor:
  """The ids of a scalar string tensor by `vocabulary.encode`: int32 [length].

  A graph with it runs in this process only.
  """

  def encode(s: bytes | np.ndarray) -> np.ndarray:
    # Eagerly it is an array without dimensions.
    data = s.item() if isinstance(s, np.ndarray) else s
    return np.array(vocabulary.encode(data.decode("utf-8", "replace")), np.int32)

  return tf.ensure_shape(tf.numpy_function(encode, [s], tf.int32, stateful=False), [None])


def write_whole_file(filename: str, content: bytes) -> None:
  """Writes a file so that a reader sees all of it or nothing, whoever else writes it meanwhile.

  Args:
    filename: its path; its folder is made.
    content: what becomes of it.

  Raises:
    errors.ConfigError: it cannot be written.
  """
  # Processes of several machines may have the same number.
  temporary = f"{filename}.tmp-{socket.gethostname()}-{os.getpid()}"
  try:
    if os.path.dirname(filename):
      tf.io.gfile.makedirs(os.path.dirname(filename))
    try:
      with tf.io.gfile.GFile(temporary, "wb") as f:
        f.write(content)
      tf.io.gfile.rename(temporary, filename, overwrite=True)
    finally:
      if tf.io.gfile.exists(temporary):
        tf.io.gfile.remove(temporary)
  except tf.errors.OpError as e:
    raise errors.ConfigError(
      f"cannot write the vocabulary file {filename} ({e.message}): give another filename, or the "
      "right to write there"
    ) from e


def _shift(ids: tf.Tensor, offset: int, count: int) -> tf.Tensor:
  """Subtracts `offset`; ids that are then not in 0..count-1 become `count`."""
  shifted = tf.cast(ids, tf.int32) - offset
  return tf.where((shifted >= 0) & (shifted < count), shifted, count)
