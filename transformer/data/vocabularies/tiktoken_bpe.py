"""Byte-pair encodings from .tiktoken files (Sennrich et al. 2016, arXiv:1508.07909), as GPT's are.

Needs the package tiktoken: `pip install tiktoken`.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
import os
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import gin
import numpy as np
import tensorflow as tf

from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.transformer.data.files import text_files
from mesh_tensorflow.transformer.data.vocabularies.base import PythonVocabulary, shifted
from mesh_tensorflow.transformer.data.vocabularies.kept import kept, write_whole_file
from mesh_transformer_cli import untrusted

# How a text is cut into words before bytes are joined. GPT-2's; and those that came after it, which
# keep contractions in any case together, take at most three digits, and leave blanks at line ends.
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = "|".join(
  [
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
  ]
)
PATTERNS = {
  "gpt2": _GPT2,
  "r50k_base": _GPT2,
  "p50k_base": _GPT2,
  "cl100k_base": _CL100K,
  "o200k_base": _O200K,
}
# Ranks that no token has: so many, and three for each that one has, at most.
_GAPS = 1 << 16
# The first line of a file that `save` wrote; a .tiktoken file does not tell its pattern.
_HEADER = b"# mesh_tensorflow byte-pair encoding, pattern "


class TiktokenVocabulary(PythonVocabulary):
  """A byte-pair encoding of ranked byte strings: a text is joined from bytes, lowest rank first.

  Id 0 is padding, 1 EOS, and the token of rank r has id r + 2. Every text has ids, and decodes to
  itself. Ids without a token decode to nothing. The special tokens of such encodings, which are not
  in their files, have no ids: `<|endoftext|>` in a text is text.

  Args:
    ranks: from token to rank; all 256 bytes are among the tokens.
    pattern: a regular expression of the words that a text is cut into first.

  Raises:
    ConfigError: tiktoken is not installed, or the pattern is no regular expression.
    DataError: a byte has no rank, or two tokens have the same.
  """

  _OFFSET = 2

  def __init__(self, ranks: Mapping[bytes, int], pattern: str):
    missing = [b for b in range(256) if bytes([b]) not in ranks]
    if missing:
      raise DataError(
        f"{len(missing)} of the 256 bytes have no rank, 0x{missing[0]:02x} for one: some texts "
        "could not be encoded"
      )
    self._ranks = dict(ranks)
    self._size = max(ranks.values()) + 1
    if len(set(ranks.values())) < len(ranks) or min(ranks.values()) < 0:
      raise DataError("two tokens have the same rank, or one has a negative rank")
    if self._size > 4 * len(ranks) + _GAPS:
      raise DataError(f"a token has the rank {self._size - 1}, and there are {len(ranks)} tokens")
    self._pattern = pattern
    self._encoding = self._make()

  def _make(self) -> Any:
    try:
      return tiktoken_module().Encoding(
        "own", pat_str=self._pattern, mergeable_ranks=self._ranks, special_tokens={}
      )
    except ValueError as e:
      raise ConfigError(
        f"the pattern {self._pattern[:60]!r} of a byte-pair encoding is no regular expression: {e}"
      ) from e

  @classmethod
  def load(cls, filename: str, pattern: str | None = None) -> TiktokenVocabulary:
    """Reads a .tiktoken file: on each line a token in base64, a blank and its rank.

    Args:
      filename: its path; or that of a file that `save` wrote.
      pattern: a name of `PATTERNS`, or a regular expression; None: that of the name of the file.

    Raises:
      ConfigError: there is no pattern for the file.
      DataError: the file is missing or damaged.
    """
    filename = os.path.expanduser(filename)
    lines = text_files.read_text_file(filename, encoding=None).text.splitlines()
    if lines[0].startswith(_HEADER):
      try:
        pattern = untrusted.expect(untrusted.parse(lines.pop(0).removeprefix(_HEADER)), str)
      except ValueError as e:
        raise DataError(f"{filename}, line 1: the pattern is no text in JSON: {e}") from e
    stem = os.path.basename(filename).split(".")[0]
    if pattern is None and stem not in PATTERNS:
      raise ConfigError(
        f"{filename} does not say how texts are cut into words: bind "
        f"get_tiktoken_vocabulary.pattern to {', '.join(PATTERNS)}, or a regular expression"
      )
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
      if not line.strip():
        continue
      try:
        token, rank = line.split()
        ranks[base64.b64decode(token, validate=True)] = int(rank)
      except (ValueError, binascii.Error) as e:
        raise DataError(
          f"{filename}, line {number} is no token in base64 and its rank: {line[:60]!r}"
        ) from e
    try:
      return cls(ranks, PATTERNS.get(pattern or stem, pattern or ""))
    except DataError as e:
      raise DataError(f"{filename}: {e}") from e

  def save(self, filename: str) -> None:
    """Writes the tokens, and the pattern, as a file that `load` reads.

    Raises:
      StorageError: it cannot be written.
    """
    write_whole_file(filename, self.content())

  def content(self) -> bytes:
    lines = [_HEADER + json.dumps(self._pattern).encode()]
    for token, rank in sorted(self._ranks.items(), key=lambda item: item[1]):
      lines.append(b"%s %d" % (base64.b64encode(token), rank))
    return b"\n".join(lines) + b"\n"

  def __eq__(self, other: object) -> bool:
    return (
      isinstance(other, TiktokenVocabulary)
      and other._pattern == self._pattern
      and other._ranks == self._ranks
    )

  def __hash__(self) -> int:
    return hash((self._pattern, len(self._ranks)))

  def __reduce__(self) -> Any:
    # Of the encoding only what it is made of can be sent to another process.
    return TiktokenVocabulary, (self._ranks, self._pattern)

  @property
  def vocab_size(self) -> int:
    return self._OFFSET + self._size

  def encode_array(self, s: str | bytes) -> np.ndarray:
    """Like `encode`, but int32 [length]."""
    text = s if isinstance(s, str) else s.decode("utf-8", "replace")
    return np.array(self._encoding.encode_ordinary(text), np.int32) + self._OFFSET

  def encode(self, s: str | bytes) -> list[int]:
    ids: list[int] = self.encode_array(s).tolist()
    return ids

  def decode(self, ids: Iterable[int]) -> str:
    tokens = self._tokens
    shifted = (int(i) - self._OFFSET for i in ids)
    return b"".join(tokens[i] for i in shifted if 0 <= i < self._size).decode("utf-8", "replace")

  @functools.cached_property
  def _tokens(self) -> list[bytes]:
    """The tokens by rank."""
    tokens = [b""] * self._size
    for token, rank in self._ranks.items():
      tokens[rank] = token
    return tokens

  def decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
    table = tf.constant([*self._tokens, b""])
    joined = tf.gather(table, shifted(ids, self._OFFSET, self._size))
    joined = tf.strings.reduce_join(joined, axis=-1)
    return tf.strings.unicode_transcode(joined, "UTF-8", "UTF-8", errors="replace")


@gin.configurable(module="mesh_tensorflow.transformer.vocabulary")
@affects("report")
def get_tiktoken_vocabulary(
  filename: str = gin.REQUIRED, pattern: str | None = None
) -> TiktokenVocabulary:
  """A `TiktokenVocabulary` from a .tiktoken file, such as cl100k_base.tiktoken.

  Args:
    filename: the file. The trainer keeps a copy with the checkpoints, and takes that.
    pattern: how a text is cut into words: "gpt2", "r50k_base", "p50k_base", "cl100k_base",
      "o200k_base", or a regular expression; None: that of the name of the file.

  Returns:
    The vocabulary.

  Raises:
    ConfigError: there is no pattern for the file, or tiktoken is not installed.
    DataError: the file is missing or damaged.
  """
  filename = os.path.expanduser(filename)
  load = functools.partial(TiktokenVocabulary.load, pattern=pattern)
  vocabulary: TiktokenVocabulary = kept(
    "tiktoken",
    {"filename": filename},
    make=lambda: load(filename),
    load=load,
    save=TiktokenVocabulary.save,
    source=lambda: filename if tf.io.gfile.exists(filename) else None,
  )
  return vocabulary


def tiktoken_module() -> ModuleType:
  """The package tiktoken; `ConfigError` if it is not installed."""
  try:
    import tiktoken
  except ImportError as e:
    raise ConfigError(
      "byte-pair encodings need the package tiktoken: pip install tiktoken; "
      "run.vocabulary = 'bytes' needs nothing"
    ) from e
  return tiktoken
