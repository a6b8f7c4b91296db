"""Vocabularies: ids, round trips, TensorFlow against Python, files, errors."""

from __future__ import annotations

import gzip
import types

import gin
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow import errors
from mesh_tensorflow.transformer import vocabulary

TEXTS = ["", "a", "To be, or not to be.\n", "naïve café", "日本語 😀\t\0", "a\r\nb"]


class FakeEncoder:
  vocab_size = 10

  def encode(self, s):
    return [int(c) for c in s]

  def decode(self, ids):
    return " ".join(map(str, ids))


def test_base_class_implements_nothing():
  v = vocabulary.Vocabulary()
  with pytest.raises(NotImplementedError):
    v.vocab_size  # noqa: B018
  for method in (v.encode, v.decode, v.encode_tf, v.decode_tf):
    with pytest.raises(NotImplementedError):
      method("a")


def test_tfds_vocabulary_shifts_by_one():
  v = vocabulary.TFDSVocabulary(FakeEncoder())
  assert v.vocab_size == 11
  assert v.encode("123") == [2, 3, 4]
  assert v.decode(np.array([2, 3, 4])) == "1 2 3"
  assert v.decode([0, 1, 5]) == "-1 0 4"
  with pytest.raises(NotImplementedError):
    v.decode_tf([[1]])


def test_get_tfds_vocabulary(monkeypatch):
  tfds = pytest.importorskip("tensorflow_datasets")
  features = {"a": types.SimpleNamespace(), "b": types.SimpleNamespace(encoder=FakeEncoder())}
  info = types.SimpleNamespace(supervised_keys=("a", "b"), features=features)
  asked = []

  def builder(name, data_dir=None):
    asked.append((name, data_dir))
    return types.SimpleNamespace(info=info)

  monkeypatch.setattr(tfds, "builder", builder)
  gin.parse_config(
    'vocabulary.get_tfds_vocabulary.dataset_name = "lm/x"\n'
    'get_tfds_vocabulary.tfds_data_dir = "somewhere"'
  )
  assert vocabulary.get_tfds_vocabulary().encode("1") == [2]
  assert asked == [("lm/x", "somewhere")]
  info.supervised_keys = ("b", "a")
  with pytest.raises(errors.ConfigError, match="'a' of TFDS dataset 'lm/x' is not tokenized"):
    vocabulary.get_tfds_vocabulary()
  info.supervised_keys = None
  with pytest.raises(errors.ConfigError, match="no supervised keys"):
    vocabulary.get_tfds_vocabulary()


def test_bytes_are_numbered_as_byt5_does():
  v = vocabulary.ByteVocabulary()
  assert v.vocab_size == 259
  assert v.encode("ab") == [100, 101]
  assert v.encode(bytes([0, 255])) == [3, 258]
  assert v.decode([0, 100, 1, 2, 101, 0, 0]) == "ab"
  assert vocabulary.ByteVocabulary(extra_ids=100).vocab_size == 359
  assert vocabulary.ByteVocabulary(extra_ids=100).decode([100, 300]) == "a"
  with pytest.raises(errors.ConfigError, match="extra_ids"):
    vocabulary.ByteVocabulary(-1)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["bytes", "characters"])
def test_round_trip_in_python_and_tensorflow(kind, text):
  v = (
    vocabulary.ByteVocabulary()
    if kind == "bytes"
    else vocabulary.CharacterVocabulary("".join(TEXTS))
  )
  ids = v.encode(text)
  assert v.decode(ids) == text
  assert v.encode_array(text).tolist() == ids
  for run in (lambda f: f, tf.function):
    in_tf = run(v.encode_tf)(tf.constant(text))
    assert in_tf.dtype == tf.int32
    assert in_tf.numpy().tolist() == ids
    assert run(v.decode_tf)(tf.constant(ids, tf.int32)).numpy().decode() == text


@hypothesis.given(st.lists(st.lists(st.integers(-3, 270), min_size=6, max_size=6), max_size=5))
def test_bytes_decode_alike_in_python_and_tensorflow(rows):
  v = vocabulary.ByteVocabulary(extra_ids=2)
  out = v.decode_tf(np.array(rows, np.int64).reshape(-1, 6))
  assert [s.decode() for s in out.numpy()] == [v.decode(r) for r in rows]


def test_decode_tf_of_a_batch():
  v = vocabulary.CharacterVocabulary("abc")
  out = v.decode_tf(tf.constant([[[2, 3, 1, 0], [4, 9, -2, 4]]], tf.int64))
  assert out.shape == [1, 2]
  assert out.numpy().tolist() == [[b"ab", b"cc"]]


def test_characters_are_sorted_and_start_at_two():
  v = vocabulary.CharacterVocabulary("banana\n")
  assert v.characters == "\nabn"
  assert v.vocab_size == 6
  assert v.encode("ban\n") == [4, 3, 5, 2]
  assert v.decode([1, 4, 0, 3, 77]) == "ba"


def test_unknown_character_is_refused():
  v = vocabulary.CharacterVocabulary("ab")
  with pytest.raises(errors.DataError, match=r"'xy', the first at character 1.*byte"):
    v.encode("axby")
  with pytest.raises(tf.errors.InvalidArgumentError, match="not in the vocabulary"):
    v.encode_tf(tf.constant("ax"))
  dataset = tf.data.Dataset.from_tensors("ax").map(v.encode_tf)
  with pytest.raises(tf.errors.InvalidArgumentError, match="not in the vocabulary"):
    list(dataset)


@pytest.mark.parametrize("bad", ["", ["ab"]])
def test_character_vocabulary_needs_characters(bad):
  with pytest.raises(errors.DataError, match="character"):
    vocabulary.CharacterVocabulary(bad)


def test_character_vocabulary_from_text_and_from_its_file(tmp_path):
  (tmp_path / "a.txt").write_text('he said: "é\\n\u2028"\n', encoding="utf-8")
  (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"xyz\r\n"))
  v = vocabulary.get_character_vocabulary([str(tmp_path / "a.txt"), str(tmp_path / "b*")])
  assert set(v.characters) == set('he said: "é\\n\u2028\nxyz\r')
  assert v == vocabulary.get_character_vocabulary(str(tmp_path / "*"))
  saved = str(tmp_path / "saved.txt")
  v.save(saved)
  again = vocabulary.get_character_vocabulary(saved)
  assert again == v and hash(again) == hash(v)
  assert again.characters == v.characters
  assert len(list(tmp_path.iterdir())) == 3
  with open(saved, encoding="utf-8") as f:
    whole = f.read()
  for damage in (whole[:-1], whole[:-4], whole + '"h"\n', whole[:60]):
    with open(saved, "w", encoding="utf-8") as f:
      f.write(damage)
    with pytest.raises(errors.DataError, match="saved.txt is not a"):
      vocabulary.CharacterVocabulary.load(saved)


def test_factories_are_gin_configurable(tmp_path):
  (tmp_path / "text").write_text("hello")
  gin.parse_config(
    f'vocabulary.get_character_vocabulary.filename = "{tmp_path}/text"\n'
    "mesh_tensorflow.transformer.vocabulary.get_byte_vocabulary.extra_ids = 5"
  )
  assert vocabulary.get_character_vocabulary().vocab_size == 6
  assert vocabulary.get_byte_vocabulary().vocab_size == 264


def test_missing_text(tmp_path):
  with pytest.raises(errors.DataError, match="there is no file .*nothing.txt"):
    vocabulary.get_character_vocabulary(str(tmp_path / "nothing.txt"))


def test_tinyshakespeare(shared_data):
  path = str(shared_data / "tinyshakespeare" / "input.txt.gz")
  v = vocabulary.get_character_vocabulary(path)
  assert v.vocab_size == 67
  assert v.decode(v.encode("First Citizen:\n")) == "First Citizen:\n"
