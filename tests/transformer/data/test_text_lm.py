"""Language-model data from text files: every split, mode, seed, resumption, and error."""

from __future__ import annotations

import gzip
import itertools
import pathlib

import gin
import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow import errors
from mesh_tensorflow.transformer import dataset as ds
from mesh_tensorflow.transformer.data import stdlib_text
from mesh_tensorflow.transformer.data.files import text_files
from mesh_tensorflow.transformer.vocabulary import (
  ByteVocabulary,
  CharacterVocabulary,
  get_character_vocabulary,
)

LETTERS = "abcdefghijklmnopqrstuvwxyz"
BYTES = ByteVocabulary()
TEXT = "".join(np.random.RandomState(0).choice(list(LETTERS), 1000))


def rows(dataset, n=None):
  return [
    {k: v.tolist() for k, v in r.items()} for r in itertools.islice(dataset.as_numpy_iterator(), n)
  ]


def targets(dataset, n=None):
  return [r["targets"] for r in rows(dataset, n)]


@pytest.fixture
def text(tmp_path):
  path = tmp_path / "text.txt"
  path.write_text(TEXT)
  return str(path)


def stream(text, **kwargs):
  kwargs = {"sequence_length": 8, "vocabulary": BYTES, "validation_fraction": 0.1, **kwargs}
  return ds.text_lm_dataset(train_files=text, mode="stream", **kwargs)


# ----------------------------------------------------------------------------- stream


def test_training_windows_are_random_and_from_the_first_part(text):
  out = stream(text)
  assert out.element_spec == {"targets": tf.TensorSpec([8], tf.int32)}
  windows = [BYTES.decode(t) for t in targets(out, 300)]
  assert all(len(w) == 8 and w in TEXT[:900] for w in windows)
  assert len(set(windows)) > 150
  # Every position occurs: also the first and the last one.
  many = {BYTES.decode(t) for t in targets(stream(text, sequence_length=890), 200)}
  assert many == {TEXT[i : i + 890] for i in range(11)}


def test_validation_windows_cover_the_rest_once(text):
  out = targets(stream(text, dataset_split="validation", sequence_length=30))
  assert [len(t) for t in out] == [30] * 4
  assert "".join(BYTES.decode(t) for t in out) == TEXT[900:]
  assert out[-1][10:] == [0] * 20


def test_context_tokens_are_negative_and_windows_overlap(text):
  out = targets(stream(text, dataset_split="validation", sequence_length=30, context_tokens=2))
  assert all(i < 0 for t in out for i in t[:2])
  scored = "".join(BYTES.decode(i for i in t if i > 0) for t in out)
  assert scored == TEXT[902:]
  assert [-i for i in out[1][:2]] == out[0][-2:]
  trained = targets(stream(text, context_tokens=1), 5)
  assert all(t[0] < 0 and BYTES.decode(map(abs, t)) in TEXT for t in trained)


@pytest.mark.slow
def test_windows_are_a_function_of_seed_and_index(text):
  first = targets(stream(text, seed=1), 200)
  assert first == targets(stream(text, seed=1), 200)
  assert first != targets(stream(text, seed=2), 200)
  assert first != targets(stream(text, seed=-1), 200)
  for skip in (1, 63, 64, 65, 130):
    assert targets(stream(text, seed=1, skip=skip), 20) == first[skip : skip + 20]
  held_out = targets(stream(text, dataset_split="validation"))
  assert targets(stream(text, dataset_split="validation", skip=5)) == held_out[5:]
  assert targets(stream(text, dataset_split="validation", skip=500)) == []


def test_skipping_far_is_fast(text):
  """A reader that made what it skips would never end."""
  assert len(targets(stream(text, skip=10**12 + 7), 3)) == 3


def test_batches_of_a_resumed_run(text):
  def batches(skip_batches):
    out = stream(text, skip=12 * skip_batches).repeat().batch(12, drop_remainder=True)
    return [b["targets"] for b in out.prefetch(2).take(10).as_numpy_iterator()]

  np.testing.assert_array_equal(batches(0)[7:], batches(7)[:3])


def test_tinyshakespeare_characters(shared_data):
  path = str(shared_data / "tinyshakespeare" / "input.txt.gz")
  characters = get_character_vocabulary(path)
  kwargs = dict(vocabulary=characters, sequence_length=64)
  with gzip.open(path, "rt") as f:
    whole = f.read()
  border = int(0.9 * len(whole))
  out = targets(stream(path, dataset_split="validation", **kwargs))
  assert len(out) == -(-(len(whole) - border) // 64)
  assert "".join(map(characters.decode, out)) == whole[border:]
  assert sum(1 for _ in stream(path, **kwargs).batch(12).take(2000)) == 2000


def test_several_files_are_one_stream(tmp_path):
  (tmp_path / "b.txt").write_text("world")
  (tmp_path / "a.txt").write_text("hello ")
  (tmp_path / "sub").mkdir()
  (tmp_path / "sub" / "c.txt.gz").write_bytes(gzip.compress(b"!!"))
  out = ds.text_lm_dataset(
    sequence_length={"targets": 5, "inputs": 7},
    vocabulary=(None, BYTES),
    dataset_split="validation",
    train_files=str(tmp_path / "sub" / "*"),
    validation_files=[str(tmp_path / "*.txt")],
    mode="stream",
    batch_size=3,
  )
  assert [BYTES.decode(t) for t in targets(out)] == ["hello", " worl", "d"]


# -------------------------------------------------------------------------- documents


def write_documents(tmp_path, documents):
  for i, d in enumerate(documents):
    (tmp_path / f"doc{i:03}.txt").write_text(d)
  return str(tmp_path / "doc*.txt")


def documents(globs, **kwargs):
  kwargs = {"sequence_length": 8, "vocabulary": BYTES, "train_files": globs, **kwargs}
  if kwargs.get("dataset_split", "train") != "train" and "validation_fraction" not in kwargs:
    kwargs["train_files"], kwargs["validation_files"] = __file__, globs
  return ds.text_lm_dataset(**kwargs)


@pytest.mark.slow
def test_rows_are_those_of_pack_dataset(tmp_path):
  random = np.random.RandomState(0)
  texts = [LETTERS[: random.randint(1, 26)] for _ in range(40)]
  globs = write_documents(tmp_path, texts)
  pieces = []
  for t in texts:
    ids = BYTES.encode(t) + [1]
    pieces += [ids[i : i + 8] for i in range(0, len(ids), 8)]
  by_tf = tf.data.Dataset.from_generator(
    lambda: ({"targets": p} for p in pieces),
    output_signature={"targets": tf.TensorSpec([None], tf.int32)},
  )
  expected = rows(ds.pack_dataset(by_tf, 8))
  held_out = rows(documents(globs, dataset_split="validation"))
  assert held_out == expected
  assert len(held_out) > 8
  # An epoch of training has the same rows, in another order, and another one the next time.
  n = len(expected)
  trained = rows(documents(globs), 2 * n)

  def by_content(row):
    return row["targets"], row["targets_segmentation"]

  for epoch in (trained[:n], trained[n:]):
    assert sorted(epoch, key=by_content) == sorted(expected, key=by_content)
    assert epoch != expected
  assert trained[:n] != trained[n:]
  assert rows(documents(globs, seed=5), n) != trained[:n]
  for skip in (1, n - 1, n, n + 3):
    assert rows(documents(globs, skip=skip), 5) == (trained + trained)[skip : skip + 5]
  assert rows(documents(globs, dataset_split="validation", skip=3)) == expected[3:]
  assert rows(documents(globs, dataset_split="validation", skip=3000)) == []


def test_rows_have_segments_and_positions(tmp_path):
  globs = write_documents(tmp_path, ["ab", "c"])
  out = documents(globs)
  assert all(s == tf.TensorSpec([8], tf.int32) for s in out.element_spec.values())
  a, b, c = BYTES.encode("abc")
  assert rows(out, 1) == [
    {
      "targets": [a, b, 1, c, 1, 0, 0, 0],
      "targets_segmentation": [1, 1, 1, 2, 2, 0, 0, 0],
      "targets_position": [0, 1, 2, 0, 1, 0, 0, 0],
    }
  ]


def test_too_long_documents(tmp_path):
  globs = write_documents(tmp_path, ["ab", "abcdefgh"])
  kwargs = dict(dataset_split="validation", sequence_length=4)
  split = [BYTES.decode(t) for t in targets(documents(globs, **kwargs))]
  assert split == ["ab", "abcd", "efgh", ""]
  cut = [BYTES.decode(t) for t in targets(documents(globs, too_long="truncate", **kwargs))]
  assert cut == ["ab", "abcd"]
  with pytest.raises(
    errors.DataError, match=r"doc001.txt: document 1 has 9 tokens .* sequence_length 4; use"
  ):
    documents(globs, too_long="error", **kwargs)
  assert len(rows(documents(globs, too_long="error", **{**kwargs, "sequence_length": 9}))) == 2


@pytest.mark.parametrize("encoding", ["utf-8", None])
@pytest.mark.parametrize(
  "unit, expected",
  [
    ("file", ["a\r\nb\n \n\nc\n"]),
    ("line", ["a", "b", " ", "c"]),
    ("paragraph", ["a\r\nb", "c"]),
  ],
)
def test_document_units(tmp_path, unit, expected, encoding):
  path = tmp_path / "doc.txt"
  path.write_bytes(b"a\r\nb\n \n\nc\n")
  (row,) = rows(
    documents(
      str(path),
      dataset_split="validation",
      sequence_length=20,
      document_unit=unit,
      encoding=encoding,
    )
  )
  segment = np.array(row["targets_segmentation"])
  ids = np.array(row["targets"])
  assert [BYTES.decode(ids[segment == i + 1]) for i in range(max(segment))] == expected


def test_validation_fraction_of_documents_and_of_files(tmp_path):
  globs = write_documents(tmp_path, list(LETTERS[:10]))

  def letters(**kwargs):
    out = rows(documents(globs, validation_fraction=0.2, **kwargs), 5)
    return sorted(set("".join(BYTES.decode(r["targets"]) for r in out)))

  assert letters() == list("abcdefgh")
  assert letters(dataset_split="validation") == list("ij")
  assert letters(validation_unit="file") == list("abcdfghi")
  assert letters(validation_unit="file", dataset_split="validation") == list("ej")
  kwargs = dict(validation_unit="file", mode="stream", sequence_length=2)
  assert letters(dataset_split="validation", **kwargs) == list("ej")


def test_eval_datasets_come_from_the_same_gin_bindings(text):
  gin.parse_config(
    f"""
    dataset.text_lm_dataset.train_files = "{text}"
    mesh_tensorflow.transformer.dataset.text_lm_dataset.mode = "stream"
    text_lm_dataset.validation_fraction = 0.1
    text_lm_eval_datasets.name = "held_out"
    """
  )
  (held_out,) = ds.text_lm_eval_datasets(
    sequence_length={"targets": 20}, vocabulary=BYTES, dataset_split="validation"
  )
  assert (held_out.name, held_out.metric_fns) == ("held_out", [])
  assert held_out.postprocess_fn("a", example={}, is_target=True) == "a"
  assert "".join(map(BYTES.decode, targets(held_out.dataset_fn()))) == TEXT[900:]
  assert len(targets(held_out.dataset_fn(sequence_length={"targets": 50}))) == 2


# ----------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
  "kwargs, error, message",
  [
    (dict(mode="words"), errors.ConfigError, "mode.*'words'.*documents, stream"),
    (dict(document_unit="word"), errors.ConfigError, "document_unit.*file, paragraph, line"),
    (dict(too_long="cut"), errors.ConfigError, "too_long.*split, truncate, error"),
    (dict(validation_unit="x"), errors.ConfigError, "validation_unit.*text, file"),
    (dict(skip=-1), errors.ConfigError, "skip"),
    (dict(context_tokens=8), errors.ConfigError, "less than sequence_length"),
    (dict(context_tokens=1, mode="documents"), errors.ConfigError, "needs mode 'stream'"),
    (dict(validation_fraction=1.5), errors.ConfigError, "between 0 and 1"),
    (dict(validation_files="x"), errors.ConfigError, "not both"),
    (dict(sequence_length={"inputs": 3}), errors.ConfigError, "no 'targets'"),
    (
      dict(validation_fraction=None, dataset_split="validation"),
      errors.ConfigError,
      "give validation_files or validation_fraction",
    ),
    (
      dict(dataset_split="validation", sequence_length=101),
      errors.DataError,
      "validation split of .*text.txt has 100 tokens, fewer than .* sequence_length 101",
    ),
    (dict(sequence_length=901), errors.DataError, "train split of .* has 900 tokens"),
    (
      dict(mode="documents", dataset_split="train"),
      errors.DataError,
      "train split of .*text.txt has no documents",
    ),
    (
      dict(validation_unit="file", dataset_split="validation", validation_fraction=0.5),
      errors.DataError,
      "of 1 file.s. leaves none for validation",
    ),
    (
      dict(vocabulary=CharacterVocabulary("abc")),
      errors.DataError,
      "text.txt: .*not among the 3 of the vocabulary: 'defg",
    ),
  ],
)
def test_wrong_settings(text, kwargs, error, message):
  with pytest.raises(error, match=message):
    ds.text_lm_dataset(
      **{
        "train_files": text,
        "mode": "stream",
        "sequence_length": 8,
        "vocabulary": BYTES,
        "validation_fraction": 0.1,
        **kwargs,
      }
    )


def test_ids_outside_the_vocabulary(text):
  class Broken(ByteVocabulary):
    vocab_size = 110

  with pytest.raises(errors.DataError, match=r"text.txt: .* id 1\d\d, which is not in 1..109"):
    stream(text, vocabulary=Broken())


def test_same_file_for_training_and_validation(text, tmp_path):
  (tmp_path / "other.txt").write_text("abc")
  with pytest.raises(errors.DataError, match="1 file.*text.txt.*would be trained on"):
    stream(str(tmp_path / "*.txt"), validation_fraction=None, validation_files=text)


def test_files_that_cannot_be_used(tmp_path):
  good, empty, bad = tmp_path / "good", tmp_path / "empty", tmp_path / "latin"
  good.write_text("abc")
  empty.write_text("")
  bad.write_bytes(b"caf\xe9 au lait")
  damaged = tmp_path / "x.gz"
  for data in (b"abc", gzip.compress(b"hello" * 100)[:-9], b""):
    damaged.write_bytes(data)
    with pytest.raises(errors.DataError, match="x.gz is (not a whole gzip file|empty)"):
      text_files.read_text_file(str(damaged))
  read = text_files.read_text_files
  with pytest.raises(errors.DataError, match="empty is empty"):
    read(str(empty))
  with pytest.raises(errors.DataError, match="latin is not utf-8 text: byte 0xe9 at offset 3"):
    read(str(bad))
  with pytest.raises(errors.ConfigError, match="'utf-9'"):
    read(str(good), encoding="utf-9")
  assert read(str(bad), encoding="latin-1")[0].text == "café au lait"
  assert read(str(bad), encoding=None)[0].text == b"caf\xe9 au lait"
  usable = read([str(good), str(empty), str(bad)], skip_bad_files=True)
  assert [f.path for f in usable] == [str(good)]
  with pytest.raises(errors.DataError, match="none of the files"):
    read([str(empty), str(bad)], skip_bad_files=True)
  with pytest.raises(errors.DataError, match="is a folder; name its files"):
    read(str(tmp_path))
  with pytest.raises(errors.DataError, match=r"no file matches '.*\*.text'"):
    read([str(good), str(tmp_path / "*.text")])
  with pytest.raises(errors.DataError, match=r"there is no file 'nowhere.txt' \(from /"):
    read("nowhere.txt")
  for wrong in ([], 5, [5], None):
    with pytest.raises((errors.ConfigError, TypeError)):
      read(wrong)


def test_what_gzip_needs_is_told_of_all_files_together(tmp_path):
  paths, contents = [str(tmp_path / name) for name in "ab"], [b"ab" * 500, bytes(range(256))]
  for path, content in zip(paths, contents):
    pathlib.Path(path).write_bytes(content)
  packed = sum(len(gzip.compress(content, 9)) for content in contents)
  assert stdlib_text.gzip_bits_per_byte(paths) == pytest.approx(8 * packed / (1000 + 256))


def test_find_files_below(tmp_path):
  (tmp_path / "a" / "b").mkdir(parents=True)
  (tmp_path / "a" / "b" / "c.txt").write_text("x")
  (tmp_path / "d.txt").write_text("x")
  found = text_files.find_files(str(tmp_path / "**" / "*"))
  assert found == [str(tmp_path / "a" / "b" / "c.txt"), str(tmp_path / "d.txt")]
  assert text_files.find_files([str(tmp_path / "d*"), str(tmp_path / "*.txt")]) == found[1:]
