"""Vocabularies by name, and byte-pair encodings: exact, kept with checkpoints, refused if wrong."""

from __future__ import annotations

import base64
import inspect
import pickle
import textwrap

import gin
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow import errors
from mesh_tensorflow.transformer import vocabulary
from mesh_tensorflow.transformer.data.vocabularies import kept, named, subwords, tiktoken_bpe

TEXT = inspect.getsource(textwrap)  # With line ends, indentation, signs.
HARD = ["", "a", " ", "\n\n", "  lead, end  ", "naïve 日本語 😀\t\0", "a\r\nb", "<|endoftext|>"]


def texts(feature=None):
  return [TEXT] if feature != "inputs" else ["ein Satz\n" * 50]


def ranks(*merges):
  return {**{bytes([b]): b for b in range(256)}, **{m: 256 + i for i, m in enumerate(merges)}}


def write_ranks(path, found):
  path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(t), r) for t, r in found.items()))
  return str(path)


# -------------------------------------------------------------------------- byte pairs


@pytest.fixture
def pairs():
  pytest.importorskip("tiktoken")
  return vocabulary.TiktokenVocabulary(
    ranks(b"th", b"the", b" the", b"in", b"\xc3\xa9"), tiktoken_bpe.PATTERNS["gpt2"]
  )


def test_bytes_are_joined_by_rank(pairs):
  assert pairs.vocab_size == 2 + 261
  assert pairs.encode("the the") == [2 + 257, 2 + 258]
  # "th" comes before "he" would, and no token spans two words of the pattern.
  assert pairs.encode("thin th") == [2 + 256, 2 + 259, 2 + 32, 2 + 256]
  assert pairs.encode("é") == [2 + 260]
  assert pairs.encode("😀") == [2 + b for b in "😀".encode()]
  assert pairs.encode_array("the").dtype == np.int32


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(
  st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from(sorted(tiktoken_bpe.PATTERNS))
)
def test_every_text_comes_back(text, name):
  pytest.importorskip("tiktoken")
  pattern = tiktoken_bpe.PATTERNS[name]
  found = vocabulary.TiktokenVocabulary(ranks(b"in", b"  ", b"\r\n"), pattern)
  ids = found.encode(text)
  assert found.decode(ids) == text
  assert all(2 <= i < found.vocab_size for i in ids)


def test_tensorflow_encodes_as_python_does(pairs):
  for text in ["the thé in 😀", *HARD]:
    ids = pairs.encode_tf(tf.constant(text))
    assert ids.numpy().tolist() == pairs.encode(text)
    assert pairs.decode_tf(ids).numpy().decode() == text
  rows = [[259, 0, 1, 1000, 2 + 104], [2 + 0xC3, 0, 0, 0, 0]]
  assert [s.decode() for s in pairs.decode_tf(tf.constant(rows)).numpy()] == ["theh", "\ufffd"]
  assert [pairs.decode(r) for r in rows] == ["theh", "\ufffd"]


def test_tiktoken_files(tmp_path, pairs):
  path = write_ranks(tmp_path / "gpt2.tiktoken", pairs._ranks)
  assert vocabulary.get_tiktoken_vocabulary(path) == pairs
  pairs.save(str(tmp_path / "saved"))
  again = vocabulary.TiktokenVocabulary.load(str(tmp_path / "saved"))
  assert again == pairs and again.content() == pairs.content() and hash(again) == hash(pairs)
  assert pickle.loads(pickle.dumps(pairs)).encode("the") == pairs.encode("the")
  other = write_ranks(tmp_path / "mine.tiktoken", pairs._ranks)
  with pytest.raises(errors.ConfigError, match="mine.tiktoken does not say how .* gpt2, r50k_base"):
    vocabulary.get_tiktoken_vocabulary(other)
  gin.parse_config(f"get_tiktoken_vocabulary.filename = {other!r}")
  assert vocabulary.get_tiktoken_vocabulary(pattern="gpt2") == pairs
  assert vocabulary.get_tiktoken_vocabulary(pattern=r"\w+|\W+") != pairs
  with pytest.raises(errors.ConfigError, match="is no regular expression"):
    vocabulary.get_tiktoken_vocabulary(pattern="(")


def test_damaged_tiktoken_files(tmp_path, monkeypatch):
  pytest.importorskip("tiktoken")
  path = tmp_path / "gpt2.tiktoken"
  whole = ranks()
  for content, error in (
    (b"IQ== 0 1\n", r"line 1 is no token in base64 and its rank"),
    (b"I! 0\n", r"line 1 is no token in base64"),
    (b"IQ== x\n", r"line 1 is no token"),
    (b"IQ== 0\n", r"255 of the 256 bytes have no rank, 0x00 for one"),
  ):
    path.write_bytes(content)
    with pytest.raises(errors.DataError, match=rf"gpt2\.tiktoken.*{error}"):
      vocabulary.get_tiktoken_vocabulary(str(path))
  write_ranks(path, {**whole, b"ab": 5})
  with pytest.raises(errors.DataError, match="two tokens have the same rank"):
    vocabulary.get_tiktoken_vocabulary(str(path))
  with pytest.raises(errors.DataError, match="cannot read"):
    vocabulary.get_tiktoken_vocabulary(str(tmp_path / "gpt2.none"))
  monkeypatch.setitem(__import__("sys").modules, "tiktoken", None)
  with pytest.raises(errors.ConfigError, match="pip install tiktoken"):
    vocabulary.TiktokenVocabulary(whole, "x")


# ------------------------------------------------------------------------------ names


def test_names_without_texts(tmp_path):
  assert isinstance(vocabulary.named_vocabulary("bytes", None), vocabulary.ByteVocabulary)
  (tmp_path / "a.txt").write_text("abc")
  found = vocabulary.named_vocabulary(f"characters:{tmp_path}/a.txt", None)
  assert found.characters == "abc"
  made = object()
  assert named.resolve(made, None) is made and named.resolve((made, made), None) == (made, made)
  pair = named.resolve(("bytes", made), None)
  assert pair[0].vocab_size == 259 and pair[1] is made


def test_characters_of_the_texts():
  found = vocabulary.named_vocabulary("characters", texts)
  assert found.characters == "".join(sorted(set(TEXT)))
  both = named.resolve(("characters", "characters"), texts)
  assert both[0].characters == "".join(sorted(set("ein Satz\n"))) and both[1] == found


def test_subwords_of_the_texts_are_exact():
  pytest.importorskip("sentencepiece")
  found = vocabulary.named_vocabulary("sentencepiece:400", texts)
  assert found.vocab_size == 400
  for text in [TEXT, *HARD]:
    ids = found.encode(text)
    assert found.decode(ids) == text and subwords.UNK_ID not in ids
  assert len(found.encode(TEXT)) < 0.7 * len(TEXT)
  # Always the same.
  assert vocabulary.named_vocabulary("sentencepiece:400", texts) == found
  pickled = pickle.loads(pickle.dumps(found))
  assert pickled.encode(TEXT) == found.encode(TEXT)


def test_wrong_names():
  for name, error in (
    ("sentencepeice:100", "did you mean 'sentencepiece'"),
    ("sentencepiece", "'sentencepiece:8000', 'sentencepiece:FILE'"),
    ("bytes:3", "there is no vocabulary 'bytes:3'"),
    ("tiktoken:", "there is no vocabulary 'tiktoken:'"),
    ("", "there is no vocabulary ''"),
    ("characters", "is made of the training texts, and run.train_dataset_fn is no reader"),
  ):
    with pytest.raises(errors.ConfigError, match=error):
      vocabulary.named_vocabulary(name, None)
  with pytest.raises(errors.ConfigError, match="a pair of names is needed"):
    named.resolve(("bytes", "bytes", "bytes"), None)
  with pytest.raises(errors.DataError, match="there are no characters"):
    vocabulary.named_vocabulary("characters", lambda feature: [])
  pytest.importorskip("sentencepiece")
  with pytest.raises(errors.ConfigError, match="cannot make a 'unigram' vocabulary of .* 99999"):
    vocabulary.named_vocabulary("sentencepiece:99999", texts)
  with pytest.raises(errors.DataError, match="there is no file|cannot read"):
    vocabulary.named_vocabulary("tiktoken:gpt2.none", None)


def test_long_texts_are_thinned():
  lines = [f"line {i}" for i in range(20_000)]
  size = sum(len(x) + 1 for x in lines)
  assert list(named.thinned(lines, size)) == lines
  few = list(named.thinned(lines, size // 10))
  assert size // 20 < sum(len(x) + 1 for x in few) < size // 4
  there = set(few)
  assert few == [x for x in lines if x in there]
  # Of the whole text, not of its beginning.
  assert len([x for x in few if int(x[5:]) >= 10_000]) == pytest.approx(len(few) / 2, rel=0.15)
  assert list(named.thinned(iter(lines), size // 10)) == few


@pytest.mark.parametrize("name", ["characters", "sentencepiece:400"])
def test_a_vocabulary_of_texts_stays_with_its_checkpoints(tmp_path, name):
  pytest.importorskip("sentencepiece")
  model_dir = str(tmp_path)
  with kept.kept_in(model_dir):
    first = vocabulary.named_vocabulary(name, texts)
  (tmp_path / "model.ckpt-1.index").write_text("")  # A checkpoint, so far as vocabularies go.

  def gone(feature):
    raise AssertionError("the texts are not looked at any more")

  with kept.kept_in(model_dir, may_write=False):
    assert vocabulary.named_vocabulary(name, gone) == first
    # Nor does another reader, which tells no texts, change it.
  with kept.kept_in(model_dir, may_write=False):
    assert vocabulary.named_vocabulary(name, None) == first
