"""Texts of a language model: rows decoded together, detokenized as they grow, with stop strings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import DataError
from mesh_tensorflow.transformer.data.text_io import inputs_vocabulary, targets_vocabulary
from mesh_tensorflow.transformer.data.vocabularies.base import Vocabularies, as_text
from mesh_tensorflow.transformer.generation import predict
from mesh_tensorflow.transformer.generation.prefill_decode import rounded_length
from mesh_tensorflow.transformer.generation.scheduler import Row, continue_rows
from mesh_tensorflow.transformer.generation.settings import LanguageModelSampling, Sampling

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

  def __init__(self, row: Row, vocabulary: Vocabularies, stop: Sequence[str] = ()):
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


def prompt_ids(text: str, vocabulary: Vocabularies) -> list[int]:
  """The ids of a prompt of a language model: all of its characters count, and no end follows."""
  return [int(i) for i in inputs_vocabulary(vocabulary).encode(text)]


# Tokens per decode call. Stops, sliding windows and signals are handled between calls.
_TOKENS_PER_CALL = 32


@dataclasses.dataclass
class TextGenerator:
  """Continues texts with a language model.

  Args:
    estimator: a `Trainer`, with variables restored.
    vocabulary: a vocabulary or a pair.
    settings: the settings of `sample`.
    how: the decoding settings of a language model that were made from these.
    sequence_length: dict from feature to number of tokens.
    batch_size: number of slots.
  """

  estimator: Any
  vocabulary: Vocabularies
  settings: Sampling
  how: LanguageModelSampling
  sequence_length: dict[str, int]
  batch_size: int

  @property
  def longest(self) -> int:
    """The maximum context length in tokens."""
    length = predict.row_length(self.sequence_length)
    table = predict.longest_sequence(self.estimator.steps.model)
    return length if table is None else min(length, table)

  def row(self, number: int, prompt: str, place: str = "a prompt") -> Row:
    """Makes the row of a prompt.

    Args:
      number: number of the row in this run; with the seed it determines the random draws.
      prompt: the text.
      place: name of the prompt in error messages.

    Raises:
      DataError: it leaves no room for a token.
    """
    ids = prompt_ids(prompt, self.vocabulary)
    longest = self.longest
    if len(ids) >= longest:
      table = predict.longest_sequence(self.estimator.steps.model)
      most = "" if table is None else f" of at most {table}, the model's positions"
      larger = f", or bind a larger run.sequence_length{most}" if table != longest else ""
      raise DataError(
        f"{place} has {len(ids)} ids, which leaves no room in sequences of {longest}; "
        f"shorten it{larger}"
      )
    limit = longest - len(ids) if self.how.max_tokens is None else self.how.max_tokens
    return Row(number, ids, limit)

  def texts_of(self, rows: Sequence[Row]) -> list[RowText]:
    """Decodes rows to their ends; returns their texts, in the same order."""
    texts = {row: RowText(row, self.vocabulary, self.settings.stop) for row in rows}
    listener = (lambda row: texts[row].update()) if self.settings.stop else None
    for length, group in self._by_length(rows):
      programs = self.estimator.decode_programs(self.batch_size, length, self.how.options)
      continue_rows(programs, group, self.settings.seed or 0, _TOKENS_PER_CALL, listener)
    for text in texts.values():
      text.update()
    return list(texts.values())

  def follow(
    self, rows: Sequence[Row], most: Callable[[], int], listener: Callable[[RowText], None]
  ) -> None:
    """Decodes a few rows together and streams their texts.

    Args:
      rows: the rows.
      most: returns the maximum number of tokens of the next decode call.
      listener: called with the text of a row that has grown or ended.
    """
    texts = {row: RowText(row, self.vocabulary, self.settings.stop) for row in rows}

    def heard(row: Row) -> bool:
      stops = texts[row].update()
      listener(texts[row])
      return stops

    size = self.fewest_rows(len(rows))
    programs = self.estimator.decode_programs(size, self.longest, self.how.options)
    continue_rows(programs, rows, self.settings.seed or 0, most, heard)

  def fewest_rows(self, count: int) -> int:
    """The smallest batch size for `count` rows that the mesh can split, at most `batch_size`."""
    impl = self.estimator.mesh_impl
    axis = impl.tensor_dimension_to_mesh_axis(mtf.Dimension("batch", self.batch_size))
    parts = 1 if axis is None else impl.shape[axis].size
    return min(-(-count // parts) * parts, max(self.batch_size, parts))

  def _by_length(self, rows: Sequence[Row]) -> list[tuple[int, list[Row]]]:
    """Groups rows by the length bucket of their programs, longer prompts first in each."""
    longest = self.longest
    groups: dict[int, list[Row]] = {}
    for row in rows:
      length = rounded_length(len(row.given) + row.limit, longest)
      groups.setdefault(length, []).append(row)
    # Groups too small for a batch join the next longer one: empty slots cost as much as rows.
    sizes = sorted(groups)
    for size, longer in zip(sizes, sizes[1:]):
      if len(groups[size]) < self.batch_size:
        groups[longer] += groups.pop(size)
    return [
      (size, sorted(groups[size], key=lambda row: (-len(row.given), row.number)))
      for size in sorted(groups)
    ]
