"""Text that is not UTF-8: one setting for all who read text, and errors that name file and byte."""

from __future__ import annotations

import gzip

import gin
import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow import errors
from mesh_tensorflow.transformer import dataset, vocabulary
from mesh_tensorflow.transformer.data import sources, text_io
from mesh_tensorflow.transformer.data.files import records, text_files
from mesh_tensorflow.transformer.data.vocabularies import subwords

PAIRS = [("Der Bär", "the bear"), ("grün und süß", "green and sweet"), ("Öl", "oil")]
BYTES = vocabulary.ByteVocabulary()


@pytest.fixture(params=["latin-1", "cp1252", "utf-16"])
def files(request, tmp_path):
  """A text of lines, and pairs in columns, in an encoding that is bound."""
  gin.parse_config(f"text_encoding.encoding = '{request.param}'")
  (tmp_path / "text").write_text("".join(f"{a}\n" for a, _ in PAIRS), encoding=request.param)
  columns = "".join(f"{a}\t{b}\n" for a, b in PAIRS)
  (tmp_path / "pairs.tsv").write_text(columns, encoding=request.param)
  return tmp_path


def read_lm(path, **options):
  options = dict(mode="documents", document_unit="line") | options
  rows = dataset.text_lm_dataset(
    {"targets": 40},
    BYTES,
    "validation",
    train_files=f"{path}.none",
    validation_files=path,
    **options,
  )
  return "".join(BYTES.decode(row["targets"].numpy().tolist()) for row in rows)


def read_parallel(path):
  return sources.read_pairs({"train": path}, "train")


def read_lines(path):
  return sorted(line.numpy().decode() for line in dataset.simple_text_line_dataset(path))


def test_every_reader_takes_the_encoding_that_is_bound(files):
  text, pairs = str(files / "text"), str(files / "pairs.tsv")
  sides = [a for a, _ in PAIRS]
  assert all(a in read_lm(text) for a in sides)
  assert read_parallel(pairs) == PAIRS
  assert read_lines(text) == sorted(sides)
  assert text_io.get_inputs_from_file(text) == sides
  characters = vocabulary.CharacterVocabulary.from_text_files(text)
  assert characters.decode(characters.encode("Bär")) == "Bär"
  assert "grün und süß" in list(subwords._lines_of("", text))


def test_a_reader_may_be_given_another(files):
  (files / "other").write_text("naïf\n", encoding="utf-8")
  assert "naïf" in read_lm(str(files / "other"), encoding="utf-8")


def test_files_of_the_package_are_utf8_whatever_is_bound(files, tmp_path):
  made = vocabulary.CharacterVocabulary("aä")
  made.save(str(tmp_path / "vocabulary"))
  loaded = vocabulary.CharacterVocabulary.load(str(tmp_path / "vocabulary"))
  assert loaded.encode("aä") == made.encode("aä")


def through_trainer(path):
  return list(records.reading(dataset.simple_text_line_dataset(path).batch(2)))


@pytest.mark.parametrize(
  "read",
  [
    read_lm,
    read_parallel,
    text_io.get_inputs_from_file,
    vocabulary.CharacterVocabulary.from_text_files,
    lambda path: list(subwords._lines_of("", path)),
    through_trainer,
  ],
)
@pytest.mark.parametrize("bound", ["utf-8", "ascii", "shift_jis"])
def test_what_is_no_text_is_told_with_file_and_byte(read, bound, tmp_path):
  gin.parse_config(f"text_encoding.encoding = '{bound}'")
  path = tmp_path / "mixed"
  path.write_bytes(b"plain\tpair\nB\xfc\xffr\tx\n" * 3)
  with pytest.raises(errors.DataError) as e:
    read(str(path))
  assert f"{path} is not {bound} text: byte 0xf" in str(e.value)
  assert "at offset 12" in str(e.value) or "at offset 13" in str(e.value)
  (line,) = str(e.value).split("\n  In call to configurable")[0].splitlines()
  assert "text_encoding.encoding" in line


def test_an_unknown_encoding(tmp_path):
  gin.parse_config("text_encoding.encoding = 'latin1-1'")
  (tmp_path / "text").write_text("a")
  with pytest.raises(errors.ConfigError, match="unknown text encoding 'latin1-1'; did you mean"):
    text_files.read_text_file(str(tmp_path / "text"))


def test_other_opened_files_are_not_blamed(tmp_path, monkeypatch):
  """One that is empty, a large one, one that is no gzip any more, one cut inside a character."""
  monkeypatch.setattr(text_files, "_OPENED", {})
  monkeypatch.setattr(text_files, "_CHUNK", 5)
  for name, data in {"empty": b"", "good.gz": gzip.compress("äöü\n".encode() * 99)}.items():
    (tmp_path / name).write_bytes(data)
    text_files.text_line_dataset(str(tmp_path / name))
  text_files.check_opened()
  (tmp_path / "good.gz").write_bytes(b"no")
  text_files.check_opened()
  (tmp_path / "bad").write_bytes("äöü".encode()[:-1])
  text_files.text_line_dataset(str(tmp_path / "bad"))
  with pytest.raises(errors.DataError, match="bad is not utf-8 text: byte 0xc3 at offset 4 "):
    text_files.check_opened()


@pytest.mark.parametrize("lines", [0, 1, 64, 130])
def test_data_sets_are_encoded_in_groups(lines):
  """By a vocabulary that encodes in Python, many texts in a call: the ids and the order of one."""
  text = [f"the {'bear ' * (i % 7)}{i}" for i in range(130)]
  pieces = subwords.train_subword_vocabulary(text, 30)
  columns = {
    "inputs": text[:lines],
    "targets": text[lines - 1 :: -1][:lines],
    "weight": [0.5] * lines,
  }
  columns = {
    k: tf.constant(v, tf.float32 if k == "weight" else tf.string) for k, v in columns.items()
  }
  made = dataset.encode_all_features(tf.data.Dataset.from_tensor_slices(columns), (BYTES, pieces))
  assert int(made.cardinality()) == lines
  for row, (x, y) in zip(made, zip(text[:lines], text[lines - 1 :: -1]), strict=False):
    assert set(row) == {"inputs", "targets"}
    np.testing.assert_array_equal(row["inputs"], [*BYTES.encode(x), 1])
    np.testing.assert_array_equal(row["targets"], [*pieces.encode(y), 1])
  assert len(list(made)) == lines


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("texts", [["a bear " * (i % 9) for i in range(300)], [""] * 3])
def test_texts_encoded_for_packing_make_the_same_rows(texts, pack):
  """Cut while they are encoded, some of them; also where all are empty, one vocabulary or two."""
  pieces = subwords.train_subword_vocabulary(["the bear is a bear"] * 9, 13)
  columns = {"inputs": texts, "targets": texts[::-1]}
  for of_texts in (pieces, (BYTES, pieces)):
    whole, cut = (
      dataset.pack_or_pad(
        dataset.encode_all_features(tf.data.Dataset.from_tensor_slices(columns), of_texts, length),
        {"inputs": 20, "targets": 7},
        pack=pack,
      )
      for length in (None, {"inputs": 20, "targets": 7})
    )
    assert whole.element_spec == cut.element_spec
    found, expected = (list(d.as_numpy_iterator()) for d in (cut, whole))
    assert found and len(found) == len(expected)
    for row, same in zip(found, expected):
      assert {k: v.tolist() for k, v in row.items()} == {k: v.tolist() for k, v in same.items()}
    if not pack:
      of_last = pieces.encode(texts[0])[:7]
      assert found[-1]["targets"].tolist()[: len(of_last) + 1] == [*of_last, 1][:7]
