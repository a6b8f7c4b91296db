"""Subword vocabularies of tensor2tensor, read without tensor2tensor.

A vocabulary file has one subtoken a line, in single or double quotes; the first two are padding
and EOS, so ids are as here. Text is cut where letters and digits meet other characters, and a
single blank between two words is not kept. Each such token, with "_" at its end (and "_" in it
escaped), is made of the longest subtokens from left to right.
"""

from __future__ import annotations

import functools
import json
import os
import re
import unicodedata
from collections.abc import Iterable

import gin
import tensorflow as tf

from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.errors import DataError
from mesh_tensorflow.transformer.data.files import text_files
from mesh_tensorflow.transformer.data.vocabularies.base import PythonVocabulary
from mesh_tensorflow.transformer.data.vocabularies.kept import kept, write_whole_file

_ESCAPE_CHARACTERS = frozenset("\\_u;0123456789")
_ESCAPED = re.compile(r"\\u|\\\\|\\([0-9]+);")
_BAD_ESCAPE = "\u3013"  # What tensor2tensor writes for a number that is no character.


class T2tVocabulary(PythonVocabulary):
  """A subword vocabulary in the file format of tensor2tensor.

  Args:
    filepath: the vocabulary file.

  Raises:
    DataError: the file is missing or empty.
  """

  def __init__(self, filepath: str):
    text = text_files.read_text_file(filepath, "utf-8").text
    self._text = text
    lines = [line.rstrip() for line in text.split("\n")]
    if lines and not lines[-1]:
      lines.pop()
    self._subtokens = [_unquoted(line) for line in lines]
    # Of repeated subtokens tensor2tensor takes the last; empty ones encode nothing.
    self._ids = {s: i for i, s in enumerate(self._subtokens) if s}
    self._alphabet = frozenset("".join(self._ids)) | _ESCAPE_CHARACTERS
    missing = sorted(c for c in _ESCAPE_CHARACTERS if c not in self._ids)
    if missing:
      raise DataError(
        f"{filepath} is not a subword vocabulary of tensor2tensor: it has no subtokens "
        f"{' '.join(missing)}, which every such vocabulary has"
      )
    self._longest = max(map(len, self._ids))
    # Words repeat, and the search for subtokens is slow. A cache of the class would keep every
    # vocabulary alive.
    self._token_ids = functools.lru_cache(maxsize=1 << 16)(self._encode_token)

  def content(self) -> bytes:
    return json.dumps(self._subtokens).encode()

  def save(self, filename: str) -> None:
    """Writes the vocabulary file, whole or not at all.

    Raises:
      ConfigError: it cannot be written.
    """
    write_whole_file(filename, self._text.encode())

  @property
  def vocab_size(self) -> int:
    return len(self._subtokens)

  def encode(self, s: str | bytes) -> list[int]:
    text = s if isinstance(s, str) else s.decode("utf-8", "replace")
    return [i for token in _tokens(text) for i in self._token_ids(token)]

  def decode(self, ids: Iterable[int]) -> str:
    known = (int(i) for i in ids)
    joined = "".join(self._subtokens[i] for i in known if 0 <= i < len(self._subtokens))
    tokens = [_unescaped(part) for part in joined.split("_") if part]
    return _joined([t for t in tokens if t])

  def _encode_token(self, token: str) -> tuple[int, ...]:
    token = token.replace("\\", "\\\\").replace("_", "\\u")
    token = "".join(c if c in self._alphabet and c != "\n" else f"\\{ord(c)};" for c in token) + "_"
    ids, start = [], 0
    while start < len(token):
      for end in range(min(len(token), start + self._longest), start, -1):
        found = self._ids.get(token[start:end])
        if found is not None:
          ids.append(found)
          start = end
          break
      else:
        raise DataError(
          f"the vocabulary has no subtoken for {token[start]!r} of token {token!r}, though it "
          "occurs in others: the vocabulary file is damaged"
        )
    return tuple(ids)


@gin.configurable(module="mesh_tensorflow.transformer.t2t_vocabulary")
@affects("report")
def get_t2t_vocabulary(
  data_dir: str = gin.REQUIRED, vocabulary_filename: str = gin.REQUIRED
) -> T2tVocabulary:
  """The vocabulary `{data_dir}/{vocabulary_filename}` of tensor2tensor.

  Args:
    data_dir: folder.
    vocabulary_filename: "vocab.translate_ende_wmt32k.32768.subwords", for instance.

  Raises:
    DataError: the file is missing or empty, or no such vocabulary.
  """
  path = os.path.join(os.path.expanduser(data_dir), vocabulary_filename)
  vocabulary: T2tVocabulary = kept(
    "t2t",
    {"path": path},
    make=lambda: T2tVocabulary(path),
    load=T2tVocabulary,
    save=T2tVocabulary.save,
    source=lambda: path if tf.io.gfile.exists(path) else None,
  )
  return vocabulary


def _unquoted(line: str) -> str:
  if len(line) > 1 and line[0] == line[-1] and line[0] in "'\"":
    return line[1:-1]
  return line


@functools.lru_cache(maxsize=1 << 16)
def _is_word(character: str) -> bool:
  # Letters (L) and numbers (N) of all scripts.
  return unicodedata.category(character)[0] in "LN"


def _tokens(text: str) -> list[str]:
  """Runs of letters and digits, and what is between them if that is more than one blank."""
  tokens, start = [], 0
  for i in range(1, len(text) + 1):
    if i == len(text) or _is_word(text[i]) != _is_word(text[i - 1]):
      token = text[start:i]
      if token != " " or start == 0 or i == len(text):
        tokens.append(token)
      start = i
  return tokens


def _joined(tokens: list[str]) -> str:
  """The text of tokens: a blank between two words."""
  parts, was_word = [], False
  for token in tokens:
    word = _is_word(token[0])
    if word and was_word:
      parts.append(" ")
    parts.append(token)
    was_word = word
  return "".join(parts)


def _unescaped(token: str) -> str:
  def replacement(match: re.Match[str]) -> str:
    if match.group(1) is None:
      return "_" if match.group(0) == "\\u" else "\\"
    try:
      return chr(int(match.group(1)))
    except (ValueError, OverflowError):
      return _BAD_ESCAPE

  return _ESCAPED.sub(replacement, token)
