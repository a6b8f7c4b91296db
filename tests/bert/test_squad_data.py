"""Questions, their windows, and from logits to answers."""

from __future__ import annotations

import json
import math

import pytest
from absl.testing import flagsaver

import mesh_tensorflow as mtf
from mesh_tensorflow.bert import run_squad, squad_data, squad_predictions, tokenization


@pytest.fixture
def tokenizer(tmp_path):
  words = [f"w{i}" for i in range(20)] + ["who", "what", "(", ")", "-", ".", "##s", "lee"]
  (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words]))
  return tokenization.FullTokenizer(tmp_path / "vocab.txt")


def _file(tmp_path, context, *qas):
  path = tmp_path / "squad.json"
  path.write_text(json.dumps({"data": [{"paragraphs": [{"context": context, "qas": qas}]}]}))
  return str(path)


def _qa(text="", start=0, name="q", **more):
  answers = [{"text": text, "answer_start": start}] if text else []
  return {"id": name, "question": "Who?", "answers": answers, **more}


def test_read(tmp_path):
  context = "w0  w1\u202fw2\u00a0x\nJohn Lee's."
  file = _file(tmp_path, context, _qa("John Lee", context.index("John")), _qa("gone", 0, "r"))
  examples = run_squad.read_squad_examples(file, is_training=True)
  # The answer of the second question does not stand there.
  assert [e.qas_id for e in examples] == ["q"]
  assert examples[0].doc_tokens == ["w0", "w1", "w2\u00a0x", "John", "Lee's."]
  assert (examples[0].start_position, examples[0].end_position) == (3, 4)
  assert "start_position: 3" in repr(examples[0])
  asked = run_squad.read_squad_examples(file, is_training=False)
  assert [(e.qas_id, e.start_position) for e in asked] == [("q", None), ("r", None)]
  assert "position" not in str(asked[0])


def test_impossible_questions(tmp_path):
  file = _file(tmp_path, "w0 w1", _qa(is_impossible=True), _qa("w1", 3, "r", is_impossible=False))
  with pytest.raises(ValueError, match="question q has 0 answers; .* exactly one"):
    run_squad.read_squad_examples(file, True)
  with flagsaver.flagsaver(version_2_with_negative=True):
    first, second = run_squad.read_squad_examples(file, True)
  assert (first.is_impossible, first.start_position, first.orig_answer_text) == (True, -1, "")
  assert (second.is_impossible, second.start_position) == (False, 1)


@pytest.mark.parametrize(
  ("content", "message"),
  [
    ("{}", "not of SQuAD's form: key 'data' is missing"),
    ("[", "not of SQuAD's form: Expecting value"),
    ('{"data": []}', "has no questions"),
    (
      '{"data": [{"paragraphs": [{"context": "ab", "qas": [{"id": "q", "question": "?", "answers":'
      ' [{"text": "b", "answer_start": 5}]}]}]}]}',
      "question q: the answer 'b' at character 5 is not within the 2",
    ),
  ],
)
def test_wrong_files(tmp_path, content, message):
  (tmp_path / "x.json").write_text(content)
  with pytest.raises(mtf.DataError, match=message):
    run_squad.read_squad_examples(str(tmp_path / "x.json"), True)
  with pytest.raises(mtf.DataError):
    run_squad.read_squad_examples(str(tmp_path / "none.json"), True)


def _windows(example, tokenizer, length=12, stride=3, query=4, is_training=True):
  found = []
  run_squad.convert_examples_to_features(
    [example], tokenizer, length, stride, query, is_training, found.append
  )
  return found


def _example(words, start=None, end=None, text=None, **kwargs):
  return run_squad.SquadExample("q", "who what", words, text, start, end, **kwargs)


def test_windows(tokenizer):
  words = [f"w{i}" for i in range(12)]
  found = _windows(_example(words, 5, 6, "w5 w6"), tokenizer)
  room = 12 - 2 - 3
  assert [f.unique_id for f in found] == [1000000000, 1000000001, 1000000002]
  assert [f.tokens[4:-1] for f in found] == [words[0:room], words[3:10], words[6:12]]
  assert [f.doc_span_index for f in found] == [0, 1, 2]
  # In the first window the answer is at 4 + 5; the last one has a part of it only.
  assert [(f.start_position, f.end_position) for f in found] == [(9, 10), (6, 7), (0, 0)]
  assert found[1].token_to_orig_map == {4 + i: 3 + i for i in range(7)}
  for f in found:
    n = len(f.tokens)
    assert f.tokens[:4] == ["[CLS]", "who", "what", "[SEP]"] and f.tokens[-1] == "[SEP]"
    assert f.input_mask == [1] * n + [0] * (12 - n)
    assert f.segment_ids == [0] * 4 + [1] * (n - 4) + [0] * (12 - n)
    assert f.input_ids == tokenizer.convert_tokens_to_ids(f.tokens) + [0] * (12 - n)
  # Each word has its most context in exactly one window.
  best = [f.token_to_orig_map[p] for f in found for p, yes in f.token_is_max_context.items() if yes]
  assert sorted(best) == list(range(12))
  assert squad_data._check_is_max_context([(0, 5), (3, 5)], 0, 3)
  assert not squad_data._check_is_max_context([(0, 5), (3, 5)], 0, 4)


def test_windows_of_short_impossible_and_empty_texts(tokenizer):
  found = _windows(_example(["w1"], -1, -1, "", is_impossible=True), tokenizer)
  assert [(f.start_position, f.is_impossible) for f in found] == [(0, True)]
  assert _windows(_example([]), tokenizer, is_training=False) == []
  cut = _windows(_example(["w1"]), tokenizer, query=1, is_training=False)
  assert cut[0].tokens == ["[CLS]", "who", "[SEP]", "w1", "[SEP]"]
  assert cut[0].start_position is None
  with pytest.raises(mtf.ConfigError, match="leaves no room for a text"):
    _windows(_example(["w1"]), tokenizer, length=5, is_training=False)


def test_the_answer_within_a_word(tokenizer):
  # "(w3-w4)." is one word, of which the answer is a part.
  found = _windows(_example(["w1", "(w3-w4)."], 1, 1, "w3"), tokenizer, length=20)
  assert found[0].tokens[found[0].start_position : found[0].end_position + 1] == ["w3"]


@pytest.mark.parametrize(
  ("predicted", "original", "wanted"),
  [
    ("steve smith", "Steve Smith's", "Steve Smith"),
    ("steve smith", "Jean Dupont", "Jean Dupont"),
    ("5 . 0", "about $5.0 each", "5.0"),
    ("", "Steve", "Steve"),
    # Without its accent a letter is one still, so places can be counted; a ligature's cannot.
    ("e", "caf\u00e9 \u00e9!", "\u00e9"),
  ],
)
def test_final_text(predicted, original, wanted):
  assert run_squad.get_final_text(predicted, original, do_lower_case=True) == wanted


def _predict(
  tmp_path, tokenizer, logits, with_negative=False, n_best=4, longest=3, threshold=0.0,
  words=("w1", "w2", "Lee's."),
):  # fmt: skip
  """Of words and logits by position."""
  example = _example(list(words))
  features = _windows(example, tokenizer, length=16, is_training=False)
  start, end = ([logits[which].get(p, -9.0) for p in range(16)] for which in ("start", "end"))
  results = [run_squad.RawResult(features[0].unique_id, start, end)]
  paths = [str(tmp_path / name) for name in ("p.json", "n.json", "o.json")]
  with flagsaver.flagsaver(
    version_2_with_negative=with_negative, null_score_diff_threshold=threshold
  ):
    run_squad.write_predictions([example], features, results, n_best, longest, True, *paths)
  contents = [(tmp_path / n).read_text() for n in ("p.json", "n.json")]
  assert all(c.endswith("}\n") for c in contents)
  prediction, nbest = (json.loads(c)["q"] for c in contents)
  odds = (tmp_path / "o.json").exists() and json.loads((tmp_path / "o.json").read_text())["q"]
  assert sum(a["probability"] for a in nbest) == pytest.approx(1.0)
  return prediction, nbest, odds


# Positions: [CLS] who what [SEP] w1 w2 lee ' s . [SEP]
def test_predictions(tmp_path, tokenizer):
  logits = {"start": {4: 1.5, 5: 4.0, 1: 9.0}, "end": {4: 5.0, 5: 2.0, 6: 1.0}}
  prediction, nbest, odds = _predict(tmp_path, tokenizer, logits)
  # The question's position 1 is no answer, and none ends before it begins (5 to 4).
  assert (prediction, odds) == ("w1", False)
  found = [(a["text"], a["start_logit"] + a["end_logit"]) for a in nbest]
  assert found[:4] == [("w1", 6.5), ("w2", 6.0), ("w2 Lee", 5.0), ("w1 w2", 3.5)]
  z = sum(math.exp(s) for _, s in found)
  assert nbest[2]["probability"] == pytest.approx(math.exp(5.0) / z)


def test_predictions_of_too_long_answers_and_of_nothing(tmp_path, tokenizer):
  logits = {"start": {4: 5.0}, "end": {6: 5.0, 4: 1.0}}
  assert _predict(tmp_path, tokenizer, logits, longest=3)[0] == "w1 w2 Lee"
  assert _predict(tmp_path, tokenizer, logits, longest=2)[0] == "w1"
  outside = {"start": {1: 5.0}, "end": {1: 5.0}}
  prediction, nbest, _ = _predict(tmp_path, tokenizer, outside, n_best=1)
  assert prediction == nbest[0]["text"] == "empty"


def test_prediction_of_a_word_that_the_vocabulary_has_not(tmp_path, tokenizer):
  # As [UNK] it is not found in the text, whose words from the first to the last are taken whole.
  logits = {"start": {5: 5.0}, "end": {5: 5.0}}
  words = ["w1", "Zzyzx", "w2"]
  assert _predict(tmp_path, tokenizer, logits, words=words)[0] == "Zzyzx"


def test_predictions_without_an_answer(tmp_path, tokenizer):
  logits = {"start": {0: 3.0, 5: 2.0}, "end": {0: 3.0, 5: 2.0}}
  prediction, nbest, odds = _predict(tmp_path, tokenizer, logits, with_negative=True)
  assert (prediction, odds) == ("", 2.0)
  assert [a["text"] for a in nbest[:2]] == ["", "w2"]
  found = _predict(tmp_path, tokenizer, logits, with_negative=True, threshold=2.5)
  assert (found[0], found[2]) == ("w2", 2.0)
  # Only "no answer" is left: the archived program fails here.
  nothing = {"start": {0: 3.0}, "end": {0: 3.0}}
  found = _predict(tmp_path, tokenizer, nothing, with_negative=True, n_best=1)
  assert (found[0], [a["text"] for a in found[1]], found[2]) == ("", [""], 6.0)


def test_predictions_with_negative_where_no_answer_is_not_among_the_best(tmp_path, tokenizer):
  logits = {"start": {4: 5.0, 5: 5.0}, "end": {4: 5.0, 5: 5.0}}
  _, nbest, odds = _predict(tmp_path, tokenizer, logits, with_negative=True, n_best=2)
  assert [a["text"] for a in nbest][-1] == "" and odds == -28.0


def test_a_window_without_result(tmp_path, tokenizer):
  example = _example(["w1"])
  features = _windows(example, tokenizer, is_training=False)
  options = squad_predictions.Options(3, 3, True)
  with pytest.raises(mtf.DataError, match="no result for window 1000000000"):
    squad_predictions.write([example], features, [], options, "a", "b", "c")


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ({}, "set --do_train or --do_predict"),
    ({"do_train": True}, "--do_train needs --train_file"),
    ({"do_predict": True}, "--do_predict needs --predict_file"),
    (
      {"do_train": True, "train_file": "x", "max_seq_length": 64},
      "more than --max_query_length=64",
    ),
    ({"do_train": True, "train_file": "x", "max_seq_length": 900}, "more than the 512 positions"),
    (
      {"do_train": True, "train_file": "x", "max_seq_length": 384, "n_best_size": 0},
      "--n_best_size=0",
    ),
  ],
)
def test_flags(flags, message):
  with flagsaver.flagsaver(**flags), pytest.raises(ValueError, match=message):
    run_squad.validate_flags_or_throw(run_squad.BertConfig(100))
