"""Incremental detokenization of a row, with stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mesh_tensorflow.transformer.data.text_io import inputs_vocabulary, targets_vocabulary
from mesh_tensorflow.transformer.sampling.rows import Row
from mesh_tensorflow.transformer.vocabularies.base import as_text

_UNKNOWN = "\ufffd"


class RowText:
  """The text of a row while it is decoded.

  A vocabulary decodes a text as a whole: pieces of words have no blank in front at its beginning,
  and a character may be several tokens of bytes. So prompt and continuation are decoded together,
  and what is new is what comes after the prompt.

  Args:
    row: the row.
    vocabulary: a vocabulary or a pair.
    stop: texts before the first of which the continuation ends.

  Attributes:
    row: the row whose text this is.
    new: the text after the prompt, as far as it was decoded.
    stopped: whether a stop string ended it.
  """

  def __init__(self, row: Row, vocabulary: Any, stop: Sequence[str] = ()):
    self.row = row
    self.new = ""
    self.stopped = False
    self._vocabulary = targets_vocabulary(vocabulary)
    self._given = self._decode(row.given)
    self._stop = stop

  def _decode(self, ids: Sequence[int]) -> str:
    return as_text(self._vocabulary.decode(ids))

  def update(self) -> bool:
    """Decodes the row's ids; returns True if a stop string was found, so that the row ends."""
    if self.stopped:
      return True
    whole = self._decode(self.row.ids)
    if whole.startswith(self._given):
      new = whole[len(self._given) :]
    else:
      new = self._decode(self.row.new)
    places = [i for i in (new.find(s) for s in self._stop) if i >= 0]
    if places:
      new, self.stopped = new[: min(places)], True
    self.new = new
    return self.stopped

  def sure(self) -> str:
    """The part of `new` that later tokens do not change.

    Left out are the beginning of a character, and of a stop string.
    """
    if self.stopped or self.row.ended:
      return self.new
    text = self.new.rstrip(_UNKNOWN)
    longest = max((len(s) - 1 for s in self._stop), default=0)
    for n in range(min(longest, len(text)), 0, -1):
      if any(s.startswith(text[-n:]) for s in self._stop):
        return text[:-n]
    return text

  def whole(self, only_new: bool = False) -> str:
    """Prompt and continuation, as the vocabulary writes them; or the continuation alone."""
    return self.new if only_new else self._given + self.new


def prompt_ids(text: str, vocabulary: Any) -> list[int]:
  """The ids of a prompt of a language model: all of its characters count, and no end follows."""
  return [int(i) for i in inputs_vocabulary(vocabulary).encode(text)]
