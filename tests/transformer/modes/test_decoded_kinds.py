"""Vocabularies that decode to a text, to bytes or to a list of words: as in the archived library.

Texts and lists reach metrics, and who asked for scores, as they are; `eval` makes a text of bytes.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow.transformer import utils
from mesh_tensorflow.transformer.data.eval_datasets import EvalDataset
from mesh_tensorflow.transformer.data.vocabularies.base import as_text
from mesh_tensorflow.transformer.generation import settings, text_metrics
from mesh_tensorflow.transformer.generation.scheduler import Row
from mesh_tensorflow.transformer.generation.texts import RowText
from mesh_tensorflow.transformer.modes import score as score_files

WORDS = ["", "", "a", "b", "c", "d"]
KINDS = {
  "text": lambda words: " ".join(words),
  "bytes": lambda words: " ".join(words).encode(),
  "list": list,
}


class Vocabulary:
  """Words, decoded to one of the kinds."""

  vocab_size = len(WORDS)

  def __init__(self, kind: str):
    self._kind = KINDS[kind]

  def encode(self, text: str) -> list[int]:
    return [WORDS.index(w) for w in text.split()]

  def decode(self, ids):
    return self._kind([WORDS[i] for i in ids])


@pytest.fixture(params=list(KINDS))
def kind(request) -> str:
  return request.param


def test_examples_get_what_the_vocabulary_gives(kind):
  examples = {"inputs": np.array([2, 3, 1, 0]), "targets": np.array([-2, -4, 5, 1])}
  utils._maybe_add_pretokenized_features(examples, Vocabulary(kind))
  assert examples["inputs_pretokenized"] == KINDS[kind](["a", "b"])
  assert examples["targets_pretokenized"] == KINDS[kind](["d"])
  assert examples["targets_neg_pretokenized"] == KINDS[kind](["a", "c"])
  # Given back once more, without a vocabulary, as decode_from_dataset does.
  again = score_files.text_of(examples["inputs_pretokenized"])
  assert again == ("a b" if kind == "bytes" else KINDS[kind](["a", "b"]))


def test_scores_come_with_what_the_vocabulary_gives(kind, tmp_path):
  results = [{"scores": -1.5, "inputs": np.array([3, 1]), "targets": np.array([2, 3, 1, 0])}]
  found = utils.save_scores(results, Vocabulary(kind), str(tmp_path / "s"))
  assert found == ([-1.5], [KINDS[kind](["b"])], [KINDS[kind](["a", "b"])])
  # A line of a file is what `str` makes of it.
  wanted = {"text": "a b\n", "bytes": "b'a b'\n", "list": "['a', 'b']\n"}
  assert (tmp_path / "s.targets").read_text() == wanted[kind]
  assert (tmp_path / "s.lengths").read_text() == "3\n"
  utils.save_scores_to_tfrecords(results, Vocabulary(kind), str(tmp_path / "s"))
  record = next(iter(tf.data.TFRecordDataset(str(tmp_path / "s_0.tfrecord")))).numpy()
  features = tf.train.Example.FromString(record).features.feature
  assert features["target"].bytes_list.value[0] == b"a b"
  assert features["input"].bytes_list.value[0] == b"b"


def test_metrics_get_what_the_vocabulary_gives_and_text_for_bytes(kind, monkeypatch):
  rows = [{"inputs": [3, 1, 0], "targets": [2, 3, 1, 0]}, {"inputs": [2, 1, 0], "targets": [5, 1]}]
  examples = [{k: np.array(v, np.int32) for k, v in row.items()} for row in rows]

  class Examples:
    def as_numpy_iterator(self):
      return iter(examples)

  seen = []

  def postprocess(text, example=None, is_target=False):
    seen.append((text, is_target))
    return text

  dataset = EvalDataset("d", lambda sequence_length: Examples(), postprocess, [])
  vocabulary = Vocabulary(kind)
  texts = text_metrics.Texts(
    dataset, {"inputs": 3, "targets": 4}, vocabulary, ["inputs", "targets"]
  )
  as_list = kind == "list"
  assert texts.targets == ([["a", "b"], ["d"]] if as_list else ["a b", "d"])
  assert texts.inputs == ([["b"], ["a"]] if as_list else ["b", "a"])
  monkeypatch.setattr(text_metrics, "generate", lambda *_: [[2, 3], [4]])
  outputs = text_metrics.decode(None, texts, None, 2, vocabulary)
  assert texts.predictions(outputs) == ([["a", "b"], ["c"]] if as_list else ["a b", "c"])
  assert [is_target for _, is_target in seen] == [True, True, False, False]


def test_a_text_grows_and_stops(kind):
  row = Row(0, [2, 3], 6)
  text = RowText(row, Vocabulary(kind), stop=[" d"])
  row.new = [4, 5, 2]
  assert text.update() and text.new == " c" and text.whole() == "a b c"
  stopping = settings.sample(stop="b")
  assert stopping.until_stop(Vocabulary(kind).decode([2, 3, 4])) == "a "
  assert settings.sample().until_stop(KINDS[kind](["a"])) == KINDS[kind](["a"])


@pytest.mark.parametrize(
  ("decoded", "text"), [("a", "a"), (b"\xc3\xa4\xff", "ä�"), (["a", b"b"], "a b"), ([], "")]
)
def test_as_text(decoded, text):
  assert as_text(decoded) == text
