"""Characters as ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import gin
import numpy as np
import tensorflow as tf

from mesh_tensorflow import errors
from mesh_tensorflow.transformer.files import text_files
from mesh_tensorflow.transformer.vocabularies.base import Vocabulary, shifted
from mesh_tensorflow.transformer.vocabularies.vocabulary_files import write_whole_file


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
    index = shifted(ids, self._OFFSET, len(self._characters))
    return tf.strings.reduce_join(tf.gather(table, index), axis=-1)


@gin.configurable(module="mesh_tensorflow.transformer.vocabulary")
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
