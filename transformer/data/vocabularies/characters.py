"""Characters as ids."""

from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Iterable, Sequence

import gin
import numpy as np
import tensorflow as tf

from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.transformer.data.files import text_files
from mesh_tensorflow.transformer.data.vocabularies.base import Vocabulary, shifted
from mesh_tensorflow.transformer.data.vocabularies.kept import kept, write_whole_file
from mesh_transformer_cli import untrusted

_LOG = logging.getLogger("mesh_tensorflow")

# A text of at least so many characters with a larger part of unknown ones is refused.
_LONG, _MOST_UNKNOWN = 1000, 0.1


class CharacterVocabulary(Vocabulary):
  """The distinct characters of a text, sorted by code point.

  Id 0 is padding, 1 EOS, and the characters follow from 2. There is no id for an unknown
  character. Ids that are no characters decode to nothing.

  Args:
    characters: the characters, each a string of length one; order and repetitions do not matter.
    unknown: what becomes of other characters in a text: "error": the text is refused; "skip": they
      are left out, with a warning that counts and shows them.

  Raises:
    errors.DataError: there are none, or one is not a single character.
    errors.ConfigError: another `unknown`.
  """

  _OFFSET = 2
  _HEADER = "# mesh_tensorflow character vocabulary: one JSON string a line, the first has id 2"

  def __init__(self, characters: Iterable[str], *, unknown: str = "error"):
    if unknown not in ("error", "skip"):
      raise errors.ConfigError(
        f"CharacterVocabulary: unknown (={unknown!r}) must be 'error' or 'skip'"
      )
    distinct = sorted(set(characters))
    if not distinct:
      raise errors.DataError("CharacterVocabulary: there are no characters")
    for c in distinct:
      if not isinstance(c, str) or len(c) != 1:
        raise errors.DataError(f"CharacterVocabulary: {c!r} is not a single character")
    self._characters = distinct
    self._codes = np.array([ord(c) for c in distinct], np.int32)
    self._skips = unknown == "skip"
    self._told: set[str] = set()

  @classmethod
  def from_text_files(
    cls, files: str | Sequence[str], *, unknown: str = "error"
  ) -> CharacterVocabulary:
    """The characters of the text files (plain, or .gz) that match one or several globs.

    Args:
      files: a glob, or several.
      unknown: see the class.

    Raises:
      errors.DataError: no file matches, or a file is empty or not of its encoding (see
          `text_files.text_encoding`).
    """
    characters: set[str] = set()
    for file in text_files.read_text_files(files):
      characters.update(file.text)
    return cls(characters, unknown=unknown)

  @classmethod
  def load(cls, filename: str, *, unknown: str = "error") -> CharacterVocabulary:
    """Reads what `save` wrote.

    Args:
      filename: its path.
      unknown: see the class.

    Raises:
      errors.DataError: the file is missing or damaged.
    """
    text = text_files.read_text_files(filename, encoding="utf-8")[0].text
    header, *lines = text.split("\n")
    try:
      if header != cls._HEADER or lines[-1:] != [""]:
        raise ValueError("wrong first or last line")
      lines.pop()
      characters = [untrusted.expect(untrusted.parse(line, surrogates=True), str) for line in lines]
      if any(len(c) != 1 for c in characters):
        raise ValueError("a line has not one character")
      result = cls(characters, unknown=unknown)
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

  def content(self) -> bytes:
    return self.characters.encode("utf-8", "surrogatepass")

  def encode_array(self, s: str) -> np.ndarray:
    """Like `encode`, but int32 [length].

    Raises:
      errors.DataError: a character is not in the vocabulary, and not left out; or of a long text
        more than a tenth would be left out: it is in another alphabet.
    """
    # In UTF-32 a character is one number: a whole text is looked up at once.
    codes = np.frombuffer(s.encode("utf-32-le", errors="surrogatepass"), np.uint32).astype(np.int32)
    # Where a character would be if it were there; what is found there may be another one.
    index = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
    bad = self._codes[index] != codes
    if bad.any():
      self._tell_of_unknown(codes, bad)
      index = index[~bad]
    return index.astype(np.int32) + self._OFFSET

  def _tell_of_unknown(self, codes: np.ndarray, bad: np.ndarray) -> None:
    """Raises, or warns, of the characters `codes[bad]` of a text, which are to be left out."""
    unknown = sorted({chr(c) for c in np.unique(codes[bad])})
    text = (
      f"{len(unknown)} character(s) of the text are not among the {len(self._codes)} of the "
      f"vocabulary: {''.join(unknown[:20])!r}, the first at character {int(bad.argmax())}"
    )
    count = int(bad.sum())
    if not self._skips or (len(codes) >= _LONG and count > _MOST_UNKNOWN * len(codes)):
      raise errors.DataError(
        f"{text} ({count:,} of {len(codes):,} characters); build the vocabulary from all texts, or "
        "use get_byte_vocabulary(), which encodes any text (a trained model keeps its vocabulary)"
      )
    # Each character once, not with each text that has it.
    if not self._told.issuperset(unknown):
      self._told.update(unknown)
      _LOG.warning("%s; they are left out, %d time(s) in this text", text, count)

  def encode(self, s: str) -> list[int]:
    ids: list[int] = self.encode_array(s).tolist()
    return ids

  def decode(self, ids: Iterable[int]) -> str:
    shifted = (int(i) - self._OFFSET for i in ids)
    return "".join(self._characters[i] for i in shifted if 0 <= i < len(self._characters))

  def encode_tf(self, s: tf.Tensor) -> tf.Tensor:
    """Like `encode`; a refused character is a tf.errors.InvalidArgumentError when it runs."""
    codes = tf.strings.unicode_decode(s, "UTF-8", errors="strict")
    known = tf.constant(self._codes)
    index = tf.minimum(tf.searchsorted(known, codes), len(self._codes) - 1)
    if self._skips:
      is_known = tf.equal(tf.gather(known, index), codes)
      left_out = tf.boolean_mask(codes, tf.logical_not(is_known))
      warned = tf.cond(
        tf.size(left_out) > 0,
        lambda: _printed(tf.strings.unicode_encode(left_out, "UTF-8"), s),
        lambda: True,
      )
      with tf.control_dependencies([warned]):
        return tf.boolean_mask(index, is_known) + self._OFFSET
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


def _printed(characters: tf.Tensor, text: tf.Tensor) -> bool:
  """Prints which characters of a text are left out, when it runs."""
  start = tf.strings.substr(text, 0, 60)
  tf.print(
    *("characters that are not in the vocabulary are left out:", characters, "of", start),
    output_stream=sys.stderr,
  )
  return True


@gin.configurable(module="mesh_tensorflow.transformer.vocabulary")
@affects("report")
def get_character_vocabulary(
  filename: str | Sequence[str] = gin.REQUIRED, *, unknown: str = "skip"
) -> CharacterVocabulary:
  """A `CharacterVocabulary` from text, or from a file that its `save` wrote.

  The trainer keeps it with the checkpoints, and takes that one as soon as there are any: the text
  may change then, or be gone.

  Args:
    filename: a text file (plain UTF-8, or .gz), a glob, a list of them; or a vocabulary file.
    unknown: what becomes of characters that are not in the vocabulary; see `CharacterVocabulary`.

  Returns:
    The vocabulary.

  Raises:
    errors.ConfigError: the vocabulary file is not the one that checkpoints were trained with.
    errors.DataError: no file matches, or a file is empty, not UTF-8, or damaged.
  """
  load = functools.partial(CharacterVocabulary.load, unknown=unknown)

  def make() -> CharacterVocabulary:
    file = _vocabulary_file(text_files.find_files(filename))
    return load(file) if file else CharacterVocabulary.from_text_files(filename, unknown=unknown)

  def source() -> str | None:
    try:
      return _vocabulary_file(text_files.find_files(filename))
    except errors.DataError:
      return None  # It is gone.

  vocabulary: CharacterVocabulary = kept(
    "characters",
    {"filename": filename},
    make=make,
    load=load,
    save=CharacterVocabulary.save,
    source=source,
  )
  return vocabulary


def _vocabulary_file(files: Sequence[str]) -> str | None:
  """The one file, if it is a vocabulary file and no text."""
  if len(files) != 1 or files[0].endswith(".gz"):
    return None
  with tf.io.gfile.GFile(files[0], "rb") as f:
    start = f.read(len(CharacterVocabulary._HEADER))
  return files[0] if start == CharacterVocabulary._HEADER.encode() else None
