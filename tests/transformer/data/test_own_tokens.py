"""Folders of tokens: made once, they are what `own_text` makes each time; interruptions, faults."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os

import numpy as np
import pytest

from mesh_tensorflow import errors
from mesh_tensorflow.training.input_shards import BatchRows
from mesh_tensorflow.transformer import dataset as ds
from mesh_tensorflow.transformer import vocabulary
from mesh_tensorflow.transformer.data import tokenizing
from mesh_tensorflow.transformer.data.files import own_files, token_folder
from mesh_tensorflow.transformer.data.vocabularies import named
from mesh_tensorflow.transformer.data.vocabularies.kept import kept_in

BYTES = vocabulary.ByteVocabulary()
DOCUMENTS = [f"document {i} says {'é' * (i % 7)}" for i in range(200)]


def rows(dataset, n=None):
  return [
    {k: v.tolist() for k, v in r.items()} for r in itertools.islice(dataset.as_numpy_iterator(), n)
  ]


@pytest.fixture
def texts(tmp_path):
  folder = tmp_path / "texts"
  folder.mkdir()
  for n in range(4):
    lines = [json.dumps({"text": d}) for d in DOCUMENTS[50 * n : 50 * n + 50]]
    (folder / f"{n}.jsonl").write_text("\n".join(lines))
  return str(folder)


@pytest.fixture
def folder(tmp_path, texts):
  path = str(tmp_path / "tokens")
  tokenizing.tokenize(texts, path, "bytes", validation_fraction=0.2, progress=False)
  return path


# --------------------------------------------------------------------------- the same data


@pytest.mark.parametrize("mode", ["stream", "documents", "packed"])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_examples_are_those_of_the_texts(texts, folder, mode, split):
  kwargs = {"sequence_length": 24, "vocabulary": BYTES, "dataset_split": split, "mode": mode}
  expected = rows(ds.own_text(path=texts, validation_fraction=0.2, **kwargs), 400)
  assert rows(ds.own_tokens(path=folder, **kwargs), 400) == expected
  assert len(expected) > 30
  for skip in (1, 29):
    found = rows(ds.own_tokens(path=folder, skip=skip, **kwargs), len(expected) - skip)
    assert found == expected[skip:]
  some = ds.own_tokens(path=folder, batch_rows=BatchRows(4, (0, 3)), **kwargs)
  assert rows(some, 10) == [r for i, r in enumerate(expected[:20]) if i % 4 in (0, 3)]


def test_what_is_in_a_folder(folder):
  tokens = token_folder.read(folder)
  files = [f"{s}{e}" for s in token_folder.SPLITS for e in (".bin", ".documents.bin")]
  assert sorted(os.listdir(folder)) == sorted([*files, "tokens.json"])
  assert tokens.dtype == "uint16" and tokens.vocabulary["kept"] == "bytes"
  assert sum(tokens.documents.values()) == 200
  assert sum(tokens.tokens.values()) == sum(len(BYTES.encode(d)) + 1 for d in DOCUMENTS)
  # Files of bare numbers: documents end with EOS, and the index says where they begin.
  for split in token_folder.SPLITS:
    ids = np.fromfile(os.path.join(folder, f"{split}.bin"), "<u2")
    begins = tokens.map_documents(split)
    assert begins.tolist() == [0, *(np.flatnonzero(ids == 1) + 1).tolist()[:-1]]
    found = [BYTES.decode(ids[b:]).split("é")[0] for b in begins[:1]]
    assert found[0].startswith("document ")
  assert "16" in tokens.dtype and isinstance(tokens.map_tokens("train"), np.memmap)
  said = tokenizing.summary(tokens)
  assert "held out; ByteVocabulary of 259 ids" in said and "run.vocabulary = 'tokens:" in said


def test_large_vocabularies_need_four_bytes(tmp_path, texts):
  class Large(vocabulary.ByteVocabulary):
    vocab_size = 2**16 + 1

  path = str(tmp_path / "large")
  tokens = tokenizing.tokenize(texts, path, Large(), progress=False)
  assert tokens.dtype == "uint32"
  assert tokens.vocabulary["kept"] == ""
  assert "run.vocabulary" not in tokenizing.summary(tokens)
  found = ds.own_tokens(8, Large(), path=path, dataset_split="validation")
  expected = ds.own_text(8, BYTES, path=texts, dataset_split="validation")
  assert rows(found) == rows(expected)
  with pytest.raises(errors.ConfigError, match="made with a vocabulary that has no file"):
    vocabulary.named_vocabulary(f"tokens:{path}", None)


@pytest.mark.parametrize("name", ["characters", "sentencepiece:290"])
def test_a_vocabulary_of_the_texts_is_in_the_folder(tmp_path, texts, name):
  pytest.importorskip("sentencepiece")
  path = str(tmp_path / "tokens")
  tokens = tokenizing.tokenize(texts, path, name, validation_fraction=0.2, progress=False)
  assert tokens.vocabulary["kept"] == "file" and os.path.exists(f"{path}/vocabulary")
  found = vocabulary.named_vocabulary(f"tokens:{path}", None)
  # It is made of what is trained on.
  train = own_files.find(texts).divided(0.2, 0)
  assert [i for i, _ in train if i]
  ids = tokens.map_tokens("train").tolist()
  first = found.decode(ids[: ids.index(1)])
  assert first in DOCUMENTS
  assert rows(ds.own_tokens(8, found, path=path), 3)
  with pytest.raises(errors.DataError, match="are of .*give run.vocabulary = 'tokens:"):
    ds.own_tokens(8, BYTES, path=path)
  with pytest.raises(errors.ConfigError, match="tokens have their vocabulary"):
    named.resolve("characters", ds.own_tokens.texts)
  os.remove(f"{path}/vocabulary")
  with pytest.raises(errors.DataError, match="cannot read the vocabulary"):
    vocabulary.named_vocabulary(f"tokens:{path}", None)


def test_tokens_of_another_vocabulary_than_the_checkpoints(tmp_path, texts):
  path, model_dir = str(tmp_path / "tokens"), tmp_path / "model"
  model_dir.mkdir()
  tokenizing.tokenize(texts, path, "characters", progress=False)
  with kept_in(str(model_dir)):
    first = vocabulary.named_vocabulary(f"tokens:{path}", None)
  (model_dir / "model.ckpt-1.index").write_text("")
  other = str(tmp_path / "other")
  (tmp_path / "a.txt").write_text("other characters: #*")
  tokenizing.tokenize(str(tmp_path / "a.txt"), other, "characters", progress=False)
  os.rename(path, f"{path}.old")
  with kept_in(str(model_dir)):  # Gone: to generate text, no tokens are needed.
    assert vocabulary.named_vocabulary(f"tokens:{path}", None) == first
  os.rename(other, path)
  with kept_in(str(model_dir)), pytest.raises(errors.ConfigError, match="with another vocabulary"):
    vocabulary.named_vocabulary(f"tokens:{path}", None)


# ------------------------------------------------------------- interruptions, other processes


def content(folder):
  """All files but the metadata, which tells the time of the texts."""
  found = {}
  for name in set(os.listdir(folder)) - {"tokens.json"}:
    with open(os.path.join(folder, name), "rb") as f:
      found[name] = f.read()
  return found


def test_an_interrupted_tokenization_goes_on(tmp_path, texts, folder, monkeypatch):
  path = str(tmp_path / "again")
  made = []
  make = tokenizing._make_part

  def stops(job, number, read):
    if number == 2 and len(made) == 2:
      # In the middle of a file, which is there in part.
      open(job.path(2, "train.bin"), "wb").write(b"part")
      raise KeyboardInterrupt
    made.append(number)
    make(job, number, read)

  monkeypatch.setattr(tokenizing, "_make_part", stops)
  with pytest.raises(KeyboardInterrupt):
    tokenizing.tokenize(texts, path, "bytes", validation_fraction=0.2, progress=False)
  assert not token_folder.is_token_folder(path)
  with pytest.raises(errors.DataError, match="is a folder without tokens.json"):
    ds.own_tokens(8, BYTES, path=path)
  made.append(None)
  tokenizing.tokenize(texts, path, "bytes", validation_fraction=0.2, progress=False)
  assert made == [0, 1, None, 2, 3]
  assert content(path) == content(folder)
  # All is done: nothing happens.
  tokenizing.tokenize(texts, path, "bytes", validation_fraction=0.2, progress=False)
  assert made == [0, 1, None, 2, 3]


def test_parts_of_other_files_are_not_taken(tmp_path, texts, monkeypatch):
  path = str(tmp_path / "again")
  make = tokenizing._make_part

  def stops(job, number, read):
    if number == 3:
      raise KeyboardInterrupt
    make(job, number, read)

  monkeypatch.setattr(tokenizing, "_make_part", stops)
  with pytest.raises(KeyboardInterrupt):
    tokenizing.tokenize(texts, path, "bytes", progress=False)
  monkeypatch.undo()
  (tmp_path / "texts" / "0.jsonl").write_text('{"text": "new"}')
  tokens = tokenizing.tokenize(texts, path, "bytes", validation_fraction=0, progress=False)
  assert BYTES.decode(tokens.map_tokens("train")[:4]) == "new"
  assert tokens.documents == {"train": 151, "validation": 0}
  with pytest.raises(errors.DataError, match="has no validation tokens: tokenize again"):
    ds.own_tokens(8, BYTES, path=path, dataset_split="validation")


@pytest.mark.long
def test_several_processes_make_the_same(tmp_path, texts, folder):
  path = str(tmp_path / "again")
  tokenizing.tokenize(texts, path, BYTES, validation_fraction=0.2, processes=2, progress=False)
  assert content(path) == content(folder)
  (tmp_path / "texts" / "1.jsonl").write_text('{"text": 3}')
  with pytest.raises(errors.DataError, match=r"1\.jsonl, line 1: field 'text' is int"):
    tokenizing.tokenize(texts, str(tmp_path / "bad"), BYTES, processes=2, progress=False)


# ------------------------------------------------------------------------------- faults


def test_what_a_folder_may_not_be(tmp_path, texts, folder):
  for path, error in (
    (str(tmp_path / "none"), "does not exist, so there is no tokens.json"),
    (str(tmp_path), "is a folder without tokens.json"),
  ):
    with pytest.raises(errors.DataError, match=error):
      ds.own_tokens(8, BYTES, path=path)
  with pytest.raises(errors.ConfigError, match="made from other validation_fraction, vocabulary"):
    tokenizing.tokenize(texts, folder, "characters", progress=False)
  with pytest.raises(errors.ConfigError, match="mapped into memory from a disk"):
    tokenizing.tokenize(texts, "gs://bucket/x", "bytes")
  with pytest.raises(errors.ConfigError, match="processes"):
    tokenizing.tokenize(texts, str(tmp_path / "x"), "bytes", processes=0)
  (tmp_path / "foreign").mkdir()
  (tmp_path / "foreign" / "train.bin").write_text("mine")
  with pytest.raises(errors.ConfigError, match="not of this program"):
    tokenizing.tokenize(texts, str(tmp_path / "foreign"), "bytes")
  assert (tmp_path / "foreign" / "train.bin").read_text() == "mine"
  (tmp_path / "file").write_text("")
  with pytest.raises(errors.StorageError, match="cannot write tokens in the folder"):
    tokenizing.tokenize(texts, str(tmp_path / "file"), "bytes")


def test_damaged_folders(folder):
  tokens = token_folder.read(folder)
  with open(os.path.join(folder, "train.bin"), "ab") as f:
    f.write(b"xx")
  with pytest.raises(errors.DataError, match=r"train.bin has \d+ bytes, and tokens.json says"):
    ds.own_tokens(8, BYTES, path=folder)
  os.remove(os.path.join(folder, "train.bin"))
  with pytest.raises(errors.DataError, match="cannot read .*train.bin"):
    ds.own_tokens(8, BYTES, path=folder)
  metadata = os.path.join(folder, "tokens.json")
  for text, error in (
    (tokens.to_json().replace(b'"format": 1', b'"format": 2'), "of another version"),
    (
      dataclasses.replace(tokens, dtype="int8").to_json(),
      "dtype must be uint16 or uint32, got .int8",
    ),
    (b"{", "is damaged"),
    (b"[]", "is damaged"),
    (b'{"format": 1}', "is damaged"),
  ):
    with open(metadata, "wb") as f:
      f.write(text)
    with pytest.raises(errors.DataError, match=error):
      ds.own_tokens(8, BYTES, path=folder)


def test_texts_that_cannot_be_encoded(tmp_path):
  (tmp_path / "blank.txt").write_text("\n")
  with pytest.raises(errors.DataError, match="blank.txt has no text"):
    tokenizing.tokenize(str(tmp_path / "blank.txt"), str(tmp_path / "x"), "bytes", progress=False)
  (tmp_path / "a.txt").write_text("known text\n" * 300)
  (tmp_path / "b.txt").write_text("Ω и 日本語 " * 300)
  characters = vocabulary.get_character_vocabulary(str(tmp_path / "a.txt"), unknown="error")
  with pytest.raises(errors.DataError, match="b.txt: .* are not among the"):
    tokenizing.tokenize(str(tmp_path / "b.txt"), str(tmp_path / "y"), characters, progress=False)


def test_tokens_within_the_folder_of_texts_are_no_texts(texts):
  before = own_files.find(texts).paths
  inside = os.path.join(texts, "tokens")
  tokenizing.tokenize(texts, inside, "bytes", progress=False)
  assert own_files.find(texts).paths == before
  tokenizing.tokenize(texts, inside, "bytes", progress=False)  # So it is all there.
