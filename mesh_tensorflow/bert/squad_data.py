"""Questions in files of SQuAD's form, and windows of WordPieces that a model is asked about."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from mesh_tensorflow.bert import records, tokenization
from mesh_tensorflow.environment import untrusted_files
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_transformer_cli import untrusted

_LOG = logging.getLogger("mesh_tensorflow")

_FIRST_ID = 1000000000
# The last is a narrow space without line break, which str.split knows, too; others it knows, such
# as U+00A0, stand within words here.
_SPACES = " \t\r\n\u202f"


class SquadExample:
  """A question about a text; attributes are called as the arguments.

  Args:
    qas_id: names the question.
    question_text: the question.
    doc_tokens: the words of the text.
    orig_answer_text: the answer, in training.
    start_position: its first word, in training; -1 if there is no answer.
    end_position: its last word.
    is_impossible: whether the text has no answer.
  """

  def __init__(
    self,
    qas_id: str,
    question_text: str,
    doc_tokens: Sequence[str],
    orig_answer_text: str | None = None,
    start_position: int | None = None,
    end_position: int | None = None,
    is_impossible: bool = False,
  ):
    self.qas_id = qas_id
    self.question_text = question_text
    self.doc_tokens = doc_tokens
    self.orig_answer_text = orig_answer_text
    self.start_position = start_position
    self.end_position = end_position
    self.is_impossible = is_impossible

  def __str__(self) -> str:
    return repr(self)

  def __repr__(self) -> str:
    fields = [
      f"qas_id: {self.qas_id}",
      f"question_text: {self.question_text}",
      f"doc_tokens: [{' '.join(self.doc_tokens)}]",
    ]
    if self.start_position:
      fields += [
        f"start_position: {self.start_position}",
        f"end_position: {self.end_position}",
        f"is_impossible: {self.is_impossible}",
      ]
    return ", ".join(fields)


class InputFeatures:
  """A window of a text with its question; attributes are called as the arguments.

  Args:
    unique_id: id of the window.
    example_index: index of its example.
    doc_span_index: which of the example's windows it is.
    tokens: WordPieces, with [CLS] and [SEP].
    token_to_orig_map: position -> word of the text.
    token_is_max_context: position -> whether no other window has more of the text around it.
    input_ids: WordPieces as numbers, filled up.
    input_mask: 1 for them, 0 for what fills up.
    segment_ids: 0 for the question, 1 for the text.
    start_position: first WordPiece of the answer, in training; 0 if it is not in the window.
    end_position: last WordPiece of the answer, in training; 0 if it is not in the window.
    is_impossible: whether the text has no answer.
  """

  def __init__(
    self,
    unique_id: int,
    example_index: int,
    doc_span_index: int,
    tokens: Sequence[str],
    token_to_orig_map: Mapping[int, int],
    token_is_max_context: Mapping[int, bool],
    input_ids: Sequence[int],
    input_mask: Sequence[int],
    segment_ids: Sequence[int],
    start_position: int | None = None,
    end_position: int | None = None,
    is_impossible: bool | None = None,
  ):
    self.unique_id = unique_id
    self.example_index = example_index
    self.doc_span_index = doc_span_index
    self.tokens = tokens
    self.token_to_orig_map = token_to_orig_map
    self.token_is_max_context = token_is_max_context
    self.input_ids = input_ids
    self.input_mask = input_mask
    self.segment_ids = segment_ids
    self.start_position = start_position
    self.end_position = end_position
    self.is_impossible = is_impossible


# The training texts of SQuAD 2.0 are 40 MB with some two million values.
_MOST_BYTES, _MOST_VALUES = 1 << 29, 50_000_000


def _form(is_training: bool, with_negative: bool) -> Any:
  """The form of a file, for `untrusted.expect`."""
  question: dict[str, Any] = {"id": str, "question": str}
  answers = [{"text": str, "answer_start": int}]
  if is_training and with_negative:
    # One that is impossible needs none.
    question |= {"is_impossible": (bool, int), "answers?": answers}
  elif is_training:
    question["answers"] = answers
  return {"data": [{"paragraphs": [{"context": str, "qas": [question]}]}]}


def read_examples(input_file: str, is_training: bool, with_negative: bool) -> list[SquadExample]:
  """The questions of a JSON file.

  Args:
    input_file: {"data": [{"paragraphs": [{"context": ..., "qas": [...]}]}]}.
    is_training: whether questions have an answer each.
    with_negative: whether questions may be impossible (SQuAD 2.0).

  Raises:
    DataError: the file cannot be read, or has another form; or a question to train on has not
      exactly one answer.
  """
  try:
    content = untrusted_files.read_json(
      input_file, _form(is_training, with_negative), most=_MOST_BYTES, values=_MOST_VALUES
    )
    found = []
    for article in content["data"]:
      for paragraph in article["paragraphs"]:
        words, word_of = _words(paragraph["context"])
        for qa in paragraph["qas"]:
          example = SquadExample(qa["id"], qa["question"], words)
          if not is_training or _set_answer(example, qa, word_of, with_negative, input_file):
            found.append(example)
  except tf.errors.OpError as e:
    raise DataError(f"cannot read {input_file}: {e.message}") from e
  except untrusted.JsonError as e:
    raise DataError(f"{input_file} is not of SQuAD's form: {e}") from e
  if not found:
    raise DataError(f"{input_file} has no questions")
  return found


def _words(text: str) -> tuple[list[str], list[int]]:
  """The words of a text, and for each of its characters which word it is in, or behind."""
  words: list[str] = []
  word_of = []
  within = False
  for char in text:
    if char in _SPACES:
      within = False
    elif within:
      words[-1] += char
    else:
      words.append(char)
      within = True
    word_of.append(len(words) - 1)
  return words, word_of


def _set_answer(
  example: SquadExample,
  qa: Mapping[str, Any],
  word_of: Sequence[int],
  with_negative: bool,
  file: str,
) -> bool:
  """Puts the answer into an example; returns whether the text has it."""
  example.is_impossible = bool(with_negative and qa["is_impossible"])
  if example.is_impossible:
    example.start_position = example.end_position = -1
    example.orig_answer_text = ""
    return True
  answers = qa.get("answers", [])
  if len(answers) != 1:
    raise DataError(
      f"{file}: question {example.qas_id} has {len(answers)} answers; a question to train "
      "on has exactly one, unless it is impossible (--version_2_with_negative)"
    )
  text, start = answers[0]["text"], answers[0]["answer_start"]
  if not (text and 0 <= start and start + len(text) <= len(word_of)):
    raise DataError(
      f"{file}: question {example.qas_id}: the answer {text!r} at character {start} is not within "
      f"the {len(word_of)} characters of its text"
    )
  example.orig_answer_text = text
  first, last = word_of[start], word_of[start + len(text) - 1]
  example.start_position, example.end_position = first, last
  actual, cleaned = " ".join(example.doc_tokens[first : last + 1]), " ".join(text.split())
  if cleaned not in actual:
    _LOG.warning("question %s: answer %r is not %r", example.qas_id, cleaned, actual)
    return False
  return True


# --------------------------------------------------------------------- windows


class _Span(NamedTuple):
  """A part of a text's WordPieces."""

  start: int
  length: int


def convert_examples_to_features(
  examples: Sequence[SquadExample],
  tokenizer: tokenization.FullTokenizer,
  max_seq_length: int,
  doc_stride: int,
  max_query_length: int,
  is_training: bool,
  output_fn: Callable[[InputFeatures], object],
) -> None:
  """Makes windows: [CLS] question [SEP] part of the text [SEP].

  Args:
    examples: the questions.
    tokenizer: makes WordPieces.
    max_seq_length: WordPieces in a window.
    doc_stride: by how many WordPieces windows of one text are apart.
    max_query_length: longer questions are cut.
    is_training: whether examples have answers.
    output_fn: gets each window; unique ids count from 1000000000.

  Raises:
    ConfigError: windows have no room for a text, or no distance.
  """
  if doc_stride < 1:
    raise ConfigError(f"doc_stride (={doc_stride}) must be at least 1")
  unique_id = _FIRST_ID
  for index, example in enumerate(examples):
    query = tokenizer.tokenize(example.question_text)[:max_query_length]
    room = max_seq_length - len(query) - 3
    if room < 1:
      raise ConfigError(
        f"max_seq_length (={max_seq_length}) leaves no room for a text beside a question of "
        f"{len(query)} WordPieces"
      )
    text = _Text(example, tokenizer, is_training)
    spans = text.spans(room, doc_stride)
    for number, span in enumerate(spans):
      tokens = ["[CLS]", *query, "[SEP]"]
      before = len(tokens)
      positions = range(span.start, span.start + span.length)
      tokens += [text.pieces[p] for p in positions] + ["[SEP]"]
      ids = tokenizer.convert_tokens_to_ids(tokens)
      filling = [0] * (max_seq_length - len(ids))
      start, end = text.answer_in(span, before) if is_training else (None, None)
      output_fn(
        InputFeatures(
          unique_id,
          index,
          number,
          tokens,
          {before + i: text.word_of[p] for i, p in enumerate(positions)},
          {before + i: _check_is_max_context(spans, number, p) for i, p in enumerate(positions)},
          ids + filling,
          [1] * len(ids) + filling,
          [0] * before + [1] * (len(ids) - before) + filling,
          start,
          end,
          example.is_impossible,
        )
      )
      unique_id += 1


class _Text:
  """The text of an example in WordPieces.

  Attributes:
    pieces: the WordPieces.
    word_of: the index of each WordPiece's word.
    answer: its first and last WordPiece; None if there is none.
  """

  def __init__(
    self, example: SquadExample, tokenizer: tokenization.FullTokenizer, is_training: bool
  ):
    self.pieces: list[str] = []
    self.word_of: list[int] = []
    first_of = []
    for i, word in enumerate(example.doc_tokens):
      first_of.append(len(self.pieces))
      pieces = tokenizer.tokenize(word)
      self.pieces += pieces
      self.word_of += [i] * len(pieces)
    first_of.append(len(self.pieces))
    self.answer: tuple[int, int] | None = None
    if is_training and not example.is_impossible:
      start, end = example.start_position, example.end_position
      if start is None or end is None:
        raise DataError(f"question {example.qas_id} has no answer to train on")
      self.answer = _improve_answer_span(
        self.pieces, first_of[start], first_of[end + 1] - 1, tokenizer, example.orig_answer_text
      )

  def spans(self, room: int, stride: int) -> list[_Span]:
    """The parts that windows of a size have; none of an empty text."""
    found: list[_Span] = []
    start = 0
    while start < len(self.pieces):
      found.append(_Span(start, min(room, len(self.pieces) - start)))
      if start + found[-1].length == len(self.pieces):
        break
      start += min(found[-1].length, stride)
    return found

  def answer_in(self, span: _Span, before: int) -> tuple[int, int]:
    """Returns (start, end) of the answer in a window; (0, 0) if the window does not contain it.

    Args:
      span: the part of the text that the window has.
      before: number of WordPieces before the text in the window.
    """
    if self.answer is None:
      return 0, 0
    start, end = self.answer
    if start < span.start or end >= span.start + span.length:
      return 0, 0
    return start - span.start + before, end - span.start + before


def _improve_answer_span(
  doc_tokens: Sequence[str],
  input_start: int,
  input_end: int,
  tokenizer: tokenization.FullTokenizer,
  orig_answer_text: str | None,
) -> tuple[int, int]:
  """The part of a span of WordPieces that is the answer: of "(1895-1943)." the answer "1895"."""
  wanted = " ".join(tokenizer.tokenize(orig_answer_text or ""))
  for start in range(input_start, input_end + 1):
    for end in range(input_end, start - 1, -1):
      if " ".join(doc_tokens[start : end + 1]) == wanted:
        return start, end
  return input_start, input_end


def _check_is_max_context(spans: Sequence[Any], cur_span_index: int, position: int) -> bool:
  """True if this span has the most context around a position: min(left, right) + 0.01 * length."""
  best, best_score = None, 0.0
  for i, (start, length) in enumerate(spans):
    if start <= position < start + length:
      score = min(position - start, start + length - 1 - position) + 0.01 * length
      if best is None or score > best_score:
        best, best_score = i, score
  return best == cur_span_index


class FeatureWriter:
  """Writes windows into a file of records.

  Args:
    filename: path of the file.
    is_training: whether windows have answers.

  Attributes:
    filename: path of the file.
    num_features: number of windows written so far.
  """

  def __init__(self, filename: str, is_training: bool):
    self.filename = filename
    self.is_training = is_training
    self.num_features = 0
    self._writer = tf.io.TFRecordWriter(filename)

  def process_feature(self, feature: InputFeatures) -> None:
    """Writes a window."""
    self.num_features += 1
    columns: dict[str, Sequence[Any]] = collections.OrderedDict(
      unique_ids=[feature.unique_id],
      input_ids=feature.input_ids,
      input_mask=feature.input_mask,
      segment_ids=feature.segment_ids,
    )
    if self.is_training:
      columns["start_positions"] = [feature.start_position]
      columns["end_positions"] = [feature.end_position]
      columns["is_impossible"] = [int(bool(feature.is_impossible))]
    self._writer.write(records.example(columns))

  def close(self) -> None:
    """Ends the file."""
    self._writer.close()
