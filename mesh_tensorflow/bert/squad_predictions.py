"""From the logits of windows to answers."""

from __future__ import annotations

import collections
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from mesh_tensorflow.bert import tokenization
from mesh_tensorflow.bert.squad_data import InputFeatures, SquadExample
from mesh_tensorflow.errors import DataError

_LOG = logging.getLogger("mesh_tensorflow")


class RawResult(NamedTuple):
  """Logits of a model for one window.

  Attributes:
    unique_id: id of the window.
    start_logits: for each position, the logit that the answer begins there.
    end_logits: for each position, the logit that the answer ends there.
  """

  unique_id: int
  start_logits: Sequence[float]
  end_logits: Sequence[float]


class Options(NamedTuple):
  """Settings of answer selection.

  Attributes:
    n_best_size: number of starts and ends considered in a window, and of answers to a question.
    max_answer_length: WordPieces of the longest answer.
    do_lower_case: whether text is lower-cased, as it was when the model was trained.
    with_negative: whether a question may have no answer.
    null_score_diff_threshold: there is none if it scores by more than this over the best one.
    verbose: whether what cannot be projected to the text is logged.
  """

  n_best_size: int
  max_answer_length: int
  do_lower_case: bool
  with_negative: bool = False
  null_score_diff_threshold: float = 0.0
  verbose: bool = False


class _Candidate(NamedTuple):
  """A span of a window that may be the answer; without a window: that there is no answer."""

  feature: InputFeatures | None
  start: int
  end: int
  start_logit: float
  end_logit: float

  @property
  def score(self) -> float:
    return self.start_logit + self.end_logit


class _Answer(NamedTuple):
  text: str
  start_logit: float
  end_logit: float

  @property
  def score(self) -> float:
    return self.start_logit + self.end_logit


def write(
  all_examples: Sequence[SquadExample],
  all_features: Iterable[InputFeatures],
  all_results: Iterable[RawResult],
  options: Options,
  output_prediction_file: str,
  output_nbest_file: str,
  output_null_log_odds_file: str,
) -> None:
  """Writes the answers as JSON.

  Args:
    all_examples: the questions.
    all_features: their windows.
    all_results: logits of each window.
    options: see `Options`.
    output_prediction_file: gets question -> answer.
    output_nbest_file: gets question -> the best answers, with probabilities and logits.
    output_null_log_odds_file: gets, with negative questions, question -> by how much "no answer"
      scores over the best one.

  Raises:
    DataError: a window has no logits.
  """
  windows = collections.defaultdict(list)
  for feature in all_features:
    windows[feature.example_index].append(feature)
  results = {result.unique_id: result for result in all_results}
  predictions, nbest, odds = {}, {}, {}
  for i, example in enumerate(all_examples):
    missing = [f.unique_id for f in windows[i] if f.unique_id not in results]
    if missing:
      raise DataError(f"question {example.qas_id}: there is no result for window {missing[0]}")
    candidates, null = _candidates(windows[i], results, options)
    answers = _answers(candidates, null, example, options)
    nbest[example.qas_id] = [
      {"text": a.text, "probability": p, "start_logit": a.start_logit, "end_logit": a.end_logit}
      for a, p in zip(answers, _compute_softmax([a.score for a in answers]))
    ]
    if null is None:
      predictions[example.qas_id] = answers[0].text
      continue
    best = next((a for a in answers if a.text), None)
    # If "no answer" is the only candidate, there is no score to subtract.
    odds[example.qas_id] = null.score - (best.score if best else 0.0)
    has_answer = best and odds[example.qas_id] <= options.null_score_diff_threshold
    predictions[example.qas_id] = best.text if best and has_answer else ""
  written: list[tuple[str, Mapping[str, Any]]] = [
    (output_prediction_file, predictions),
    (output_nbest_file, nbest),
  ]
  if options.with_negative:
    written.append((output_null_log_odds_file, odds))
  for path, content in written:
    with tf.io.gfile.GFile(path, "w") as f:
      f.write(json.dumps(content, indent=4) + "\n")


def _candidates(
  features: Sequence[InputFeatures], results: Mapping[int, RawResult], options: Options
) -> tuple[list[_Candidate], _Candidate | None]:
  """Candidate answers of all windows by descending score, and the one of no answer (or None)."""
  found = []
  null: _Candidate | None = None
  if options.with_negative:
    of_windows = [results[f.unique_id] for f in features]
    scores = [
      _Candidate(None, 0, 0, float(r.start_logits[0]), float(r.end_logits[0])) for r in of_windows
    ]
    # From the window with the lowest score of "no answer".
    null = min(scores, key=lambda c: c.score, default=_Candidate(None, 0, 0, 0.0, 0.0))
  for feature in features:
    result = results[feature.unique_id]
    for start in _get_best_indexes(result.start_logits, options.n_best_size):
      for end in _get_best_indexes(result.end_logits, options.n_best_size):
        if (
          start in feature.token_to_orig_map
          and end in feature.token_to_orig_map
          and feature.token_is_max_context.get(start, False)
          and 0 <= end - start < options.max_answer_length
        ):
          logits = float(result.start_logits[start]), float(result.end_logits[end])
          found.append(_Candidate(feature, start, end, *logits))
  if null is not None:
    found.append(null)
  return sorted(found, key=lambda c: c.score, reverse=True), null


def _answers(
  candidates: Sequence[_Candidate],
  null: _Candidate | None,
  example: SquadExample,
  options: Options,
) -> list[_Answer]:
  """The `n_best_size` best answers, each text once; at least one."""
  answers: dict[str, _Answer] = {}
  for c in candidates:
    if len(answers) >= options.n_best_size:
      break
    text = "" if c.feature is None else _text_of(c.feature, c.start, c.end, example, options)
    answers.setdefault(text, _Answer(text, c.start_logit, c.end_logit))
  if null is not None:
    answers.setdefault("", _Answer("", null.start_logit, null.end_logit))
  return list(answers.values()) or [_Answer("empty", 0.0, 0.0)]


def _text_of(
  feature: InputFeatures, start: int, end: int, example: SquadExample, options: Options
) -> str:
  pieces = " ".join(feature.tokens[start : end + 1])
  words = " ".join(pieces.replace(" ##", "").replace("##", "").split())
  first, last = feature.token_to_orig_map[start], feature.token_to_orig_map[end]
  original = " ".join(example.doc_tokens[first : last + 1])
  return final_text(words, original, options.do_lower_case, options.verbose)


def final_text(pred_text: str, orig_text: str, do_lower_case: bool, verbose: bool = False) -> str:
  """The part of a text that a prediction, which lost case and accents, stands for.

  Args:
    pred_text: WordPieces put together: "steve smith".
    orig_text: the words of the text that they are of: "Steve Smith's".
    do_lower_case: whether text is lower-cased, as it was when the model was trained.
    verbose: whether it is logged if that cannot be told.

  Returns:
    "Steve Smith"; all of `orig_text` if it cannot be told.
  """

  def without_spaces(text: str) -> tuple[str, list[int]]:
    """The other characters, and where they are."""
    places = [i for i, char in enumerate(text) if char != " "]
    return "".join(text[i] for i in places), places

  tokens = tokenization.BasicTokenizer(do_lower_case=do_lower_case).tokenize(orig_text)
  tokenized = " ".join(tokens)
  start = tokenized.find(pred_text)
  end = start + len(pred_text) - 1
  original, places = without_spaces(orig_text)
  compared, places_compared = without_spaces(tokenized)
  if start < 0 or not pred_text or len(original) != len(compared):
    if verbose:
      _LOG.warning("cannot find %r in %r", pred_text, orig_text)
    return orig_text
  number = {place: i for i, place in enumerate(places_compared)}
  if start not in number or end not in number:
    return orig_text
  return orig_text[places[number[start]] : places[number[end]] + 1]


def _get_best_indexes(logits: Sequence[float], n_best_size: int) -> list[int]:
  """Indices of the `n_best_size` largest logits, in descending order; ties by index."""
  order = np.argsort(-np.asarray(logits, np.float64), kind="stable")
  return [int(i) for i in order[:n_best_size]]


def _compute_softmax(scores: Sequence[float]) -> list[float]:
  """Probabilities; [] of none."""
  if not scores:
    return []
  largest = max(scores)
  parts = [math.exp(s - largest) for s in scores]
  return [p / sum(parts) for p in parts]
