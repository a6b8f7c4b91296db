"""Examples for the pretraining: what they are made of, and that the seed alone decides them."""

from __future__ import annotations

import random

import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.bert import create_pretraining_data as data
from mesh_tensorflow.bert import make_vocab, records, run_pretraining, tokenization

WORDS = [f"{a}{b}" for a in "klmnp" for b in "aeiou"]
SPECIAL = ("[CLS]", "[SEP]")


@pytest.fixture
def tokenizer(tmp_path):
  (tmp_path / "vocab.txt").write_text("\n".join([*make_vocab.SPECIAL, *WORDS, "##s"]) + "\n")
  return tokenization.FullTokenizer(tmp_path / "vocab.txt")


@pytest.fixture
def documents():
  """Of each WordPiece one can tell the document and the line: the words of document 3 begin so."""
  rng = random.Random(0)
  lines = lambda d: [[f"{d}.{i}.{j}" for j in range(rng.randint(3, 9))] for i in range(12)]  # noqa: E731
  return [lines(d) for d in range(6)]


def _restored(instance):
  tokens = list(instance.tokens)
  for position, label in zip(instance.masked_lm_positions, instance.masked_lm_labels):
    tokens[position] = label
  return tokens


def test_pairs(documents):
  options = data.Options(max_seq_length=32, max_predictions_per_seq=4)
  random_next = 0
  made = []
  for repetition in range(20):
    made += data.instances_of(documents, 2, WORDS, options, random.Random(repetition))
  for instance in made:
    tokens = _restored(instance)
    assert len(tokens) <= 32
    first_end = tokens.index("[SEP]")
    first, second = tokens[1:first_end], tokens[first_end + 1 : -1]
    assert tokens[0] == "[CLS]" and tokens[-1] == "[SEP]" and first and second
    assert instance.segment_ids == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    assert {t.split(".")[0] for t in first} == {"2"}
    of_second = {t.split(".")[0] for t in second}
    if instance.is_random_next:
      random_next += 1
      assert len(of_second) == 1 and of_second != {"2"}
    else:
      assert of_second == {"2"}
      # What follows follows: no line of the second piece is before one of the first.
      assert int(first[-1].split(".")[1]) < int(second[0].split(".")[1])
  assert 0.35 < random_next / len(made) < 0.75


def test_masks():
  options = data.Options(max_seq_length=128, max_predictions_per_seq=20)
  rng = random.Random(0)
  kinds = {"mask": 0, "same": 0, "other": 0}
  documents = [[["left"] * 20] * 10, [["right"] * 20] * 10]
  for _ in range(60):
    for instance in data.instances_of(documents, 0, WORDS, options, rng):
      positions = instance.masked_lm_positions
      assert positions == sorted(set(positions))
      assert len(positions) == min(20, max(1, round(len(instance.tokens) * 0.15)))
      for position, label in zip(positions, instance.masked_lm_labels):
        token = instance.tokens[position]
        assert label not in SPECIAL
        kinds["mask" if token == "[MASK]" else "same" if token == label else "other"] += 1
      rest = [t for i, t in enumerate(instance.tokens) if i not in positions]
      assert not set(rest) - {"left", "right", *SPECIAL}
  total = sum(kinds.values())
  assert total > 2000
  assert kinds["mask"] / total == pytest.approx(0.8, abs=0.03)
  assert kinds["same"] / total == pytest.approx(0.1, abs=0.02)


def test_whole_words_are_masked_together():
  options = data.Options(32, 12, masked_lm_prob=0.3, do_whole_word_mask=True)
  documents = [[["ka", "##s", "##s"] * 2] * 6, [["la", "##s", "##s"] * 2] * 6]
  seen = 0
  for seed in range(20):
    for instance in data.instances_of(documents, 0, WORDS, options, random.Random(seed)):
      tokens = _restored(instance)
      chosen = set(instance.masked_lm_positions)
      for i, token in enumerate(tokens[:-1]):
        if tokens[i + 1] == "##s" and token not in SPECIAL:
          assert (i in chosen) == (i + 1 in chosen)
          seen += i in chosen
  assert seen


def _files(tmp_path, texts):
  for i, text in enumerate(texts):
    (tmp_path / f"{i}.txt").write_text(text)
  return [str(tmp_path / f"{i}.txt") for i in range(len(texts))]


def test_documents_end_with_an_empty_line_or_the_file(tmp_path, tokenizer):
  files = _files(tmp_path, ["ka la\nma\n\n\nna\n", "pa\n   \nka\n\u200b\nla"])
  found = data.read_documents(files, tokenizer)
  # A line of which nothing is left is no end of a document.
  assert found == [[["ka", "la"], ["ma"]], [["na"]], [["pa"]], [["ka"], ["la"]]]
  with pytest.raises(mtf.DataError, match=r"1 document\(s\) found, two are needed"):
    data.read_documents(_files(tmp_path, ["ka\nla\n"]), tokenizer)


def test_records(tmp_path, tokenizer):
  text = "\n\n".join("\n".join(" ".join(WORDS[i : i + 5]) for i in range(s, 20)) for s in range(5))
  documents = data.read_documents(_files(tmp_path, [text]), tokenizer)
  options = data.Options(max_seq_length=24, max_predictions_per_seq=5)

  def write(name, **kwargs):
    path = str(tmp_path / name)
    count = data.create(documents, tokenizer, [path], options, dupe_factor=2, **kwargs)
    return count, list(tf.data.TFRecordDataset(path).as_numpy_iterator())

  count, found = write("a", seed=1)
  assert count == len(found) > 20
  assert write("b", seed=1) == (count, found)
  assert write("c", seed=2)[1] != found
  features = run_pretraining.features_of(24, 5)
  records.check_first(str(tmp_path / "a"), features, "")
  for record in found:
    row = {k: v.numpy() for k, v in records.parse(record, features).items()}
    length, predictions = row["input_mask"].sum(), int(row["masked_lm_weights"].sum())
    assert not row["input_ids"][length:].any() and not row["segment_ids"][length:].any()
    assert row["input_ids"][0] == 2 and row["input_ids"][length - 1] == 3
    assert not row["masked_lm_ids"][predictions:].any()
    assert (row["masked_lm_positions"][:predictions] < length).all()
    assert (row["masked_lm_ids"][:predictions] >= 5).all()
    assert row["next_sentence_labels"].tolist() in ([0], [1])


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"max_seq_length": 4}, r"max_seq_length \(=4\) must be at least 5"),
    ({"max_predictions_per_seq": 200}, "from 1 to max_seq_length"),
    ({"masked_lm_prob": 1.5}, "must be from 0 to 1"),
  ],
)
def test_options_are_checked(options, message):
  with pytest.raises(mtf.ConfigError, match=message):
    data.Options(**options)


def test_wrong_records_are_told(tmp_path):
  path = str(tmp_path / "r")
  with tf.io.TFRecordWriter(path) as writer:
    writer.write(records.example({"input_ids": [1, 2, 3], "weights": [0.5]}))
  three, four = (((n,), tf.int64) for n in (3, 4))
  records.check_first(path, {"input_ids": three, "weights": ((1,), tf.float32)}, "")
  with pytest.raises(mtf.DataError, match="input_ids has 3 values .* the model needs 4; say so"):
    records.check_first(path, {"input_ids": four}, "say so")
  with pytest.raises(mtf.DataError, match="no feature mask; they have input_ids, weights"):
    records.check_first(path, {"mask": four}, "")
  for content, message in ((b"", "is empty"), (b"a text of some length", "holds no records")):
    (tmp_path / "r").write_bytes(content)
    with pytest.raises(mtf.DataError, match=message):
      records.check_first(path, {"input_ids": four}, "")


# ------------------------------------------------------------------- vocabulary


def _slowly(counts, vocab_size, min_count):
  """The same rule, counted anew each time."""
  words = {w: [w[0], *[f"##{c}" for c in w[1:]]] for w in counts}
  characters = {}
  for word, pieces in words.items():
    for piece in pieces:
      characters[piece] = characters.get(piece, 0) + counts[word]
  vocab = [*make_vocab.SPECIAL, *sorted(c for c, n in characters.items() if n >= min_count)]
  words = {w: p for w, p in words.items() if set(p) <= set(vocab)}
  while len(vocab) < vocab_size:
    pairs = {}
    for word, pieces in words.items():
      for pair in zip(pieces, pieces[1:]):
        pairs[pair] = pairs.get(pair, 0) + counts[word]
    if not pairs:
      break
    count, pair = min((-n, p) for p, n in pairs.items())
    if -count < min_count:
      break
    joined = pair[0] + pair[1][2:]
    for word, pieces in words.items():
      i, result = 0, []
      while i < len(pieces):
        if tuple(pieces[i : i + 2]) == pair:
          result.append(joined)
          i += 2
        else:
          result.append(pieces[i])
          i += 1
      words[word] = result
    if joined not in vocab:
      vocab.append(joined)
  return vocab


@pytest.mark.parametrize("min_count", [1, 2, 5])
def test_vocabulary_is_that_of_the_rule(min_count):
  rng = random.Random(min_count)
  counts = {}
  for _ in range(200):
    word = "".join(rng.choice("aabbcd") for _ in range(rng.randint(1, 7)))
    counts[word] = rng.randint(1, 6)
  counts["z"] = 1
  found = make_vocab.train(counts, 90, min_count)
  assert found == _slowly(counts, 90, min_count)
  assert len(found) == len(set(found)) <= 90


def test_small_vocabulary():
  counts = make_vocab.count_words(["Low low low", "lower lowest", "new"])
  assert counts == {"low": 3, "lower": 1, "lowest": 1, "new": 1}
  vocab = make_vocab.train(counts, 100, min_count=2)
  assert vocab == [
    *make_vocab.SPECIAL, "##e", "##o", "##w", "l", "##ow", "low",
  ]  # fmt: skip
  with pytest.raises(mtf.ConfigError, match="no room for the 4 characters"):
    make_vocab.train(counts, 8, min_count=2)
  with pytest.raises(mtf.DataError, match="there are no words"):
    make_vocab.train({}, 100)
