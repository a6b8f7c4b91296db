"""Own files as data: the same examples from any form of file, any split, order and resumption."""

from __future__ import annotations

import gzip
import itertools
import json

import gin
import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow import errors
from mesh_tensorflow.training.input_shards import BatchRows
from mesh_tensorflow.transformer import dataset as ds
from mesh_tensorflow.transformer.data import options, sources, token_rows
from mesh_tensorflow.transformer.vocabulary import ByteVocabulary

BYTES = ByteVocabulary()
WORDS = ["".join(w) for w in itertools.product("abcde", repeat=3)]
DOCUMENTS = [" ".join(WORDS[i : i + 1 + i % 4]) for i in range(100)]


def rows(dataset, n=None):
  return [
    {k: v.tolist() for k, v in r.items()} for r in itertools.islice(dataset.as_numpy_iterator(), n)
  ]


def targets(dataset, n=None):
  return [r["targets"] for r in rows(dataset, n)]


def decoded(ids):
  """The documents in some ids; the last one has no EOS behind it if it is cut."""
  text = "".join("|" if i == 1 else BYTES.decode([i]) for i in ids if i)
  return text.split("|")


@pytest.fixture
def lines(tmp_path):
  path = tmp_path / "text.txt"
  path.write_text("\n".join(DOCUMENTS))
  return str(path)


def own(path, **kwargs):
  kwargs = {"sequence_length": 16, "vocabulary": BYTES, "document": "line", **kwargs}
  return ds.own_text(path=path, **kwargs)


# ----------------------------------------------------------------------- what is read


def test_every_form_of_file_has_the_same_examples(tmp_path, lines):
  folder = tmp_path / "folder"
  folder.mkdir()
  (folder / "a.txt.gz").write_bytes(gzip.compress("\n".join(DOCUMENTS[:50]).encode()))
  (folder / "b.txt").write_text("\n".join(DOCUMENTS[50:]))
  (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": d}) for d in DOCUMENTS))
  (tmp_path / "a.csv").write_text(
    "n,text\n" + "\n".join(f'{i},"{d}"' for i, d in enumerate(DOCUMENTS))
  )
  (tmp_path / "a.tsv").write_text("\n".join(f"{i}\t{d}" for i, d in enumerate(DOCUMENTS)))
  (tmp_path / "s.txt").write_text("<|end|>".join(DOCUMENTS))
  forms = [
    own(str(folder)),
    own(str(tmp_path / "a.jsonl"), document="auto"),
    own(str(tmp_path / "a.csv"), document="auto", field="text"),
    own(str(tmp_path / "a.tsv"), document="auto", field=1),
    own(str(tmp_path / "s.txt"), document="auto", separator="<|end|>"),
  ]
  expected = targets(own(lines), 60)
  assert all(targets(form, 60) == expected for form in forms)
  assert len({tuple(r) for r in expected}) > 50


def test_the_splits_are_all_documents_each_once(lines):
  whole = []
  for split in ("train", "validation"):
    kwargs = {"validation_fraction": 0.2, "dataset_split": split, "mode": "packed"}
    dataset = own(lines, **kwargs)
    if split == "train":
      assert dataset.cardinality() == tf.data.INFINITE_CARDINALITY
      # An epoch of packed rows has each document once.
      source = sources.source(
        "x", sources.HeldOut(path=lines, validation_fraction=0.2, document="line")
      )
      found, count = [], len(list(source.documents("train")))
      for row in dataset.as_numpy_iterator():  # Endless.
        found += decoded(row["targets"].tolist())[:-1]
        if len(found) >= count:
          break
    else:
      found = [d for row in rows(dataset) for d in decoded(row["targets"])[:-1]]
      assert found == [d for d in DOCUMENTS if d in set(found)]  # In order.
      assert 5 < len(found) < 40
    whole += found
  assert sorted(whole) == sorted(DOCUMENTS)


def test_a_split_that_is_none(tmp_path, lines):
  pairs = tmp_path / "a.tsv"
  pairs.write_text("a\tb\n" * 9)
  for make, kwargs in (
    (ds.own_text, {"path": lines}),
    (ds.text_lm_dataset, {"train_files": lines, "validation_fraction": 0.5}),
    (ds.own_tokens, {"path": str(tmp_path)}),
    (ds.own_pairs, {"path": str(pairs)}),
  ):
    with pytest.raises(
      errors.ConfigError, match=r"dataset_split \(='validatoin'\) must be one of train, validation"
    ):
      make(sequence_length=16, vocabulary=BYTES, dataset_split="validatoin", **kwargs)


def test_held_out_files(tmp_path, lines):
  (tmp_path / "held_out.txt").write_text("xyz")
  kwargs = {"validation_path": str(tmp_path / "held_out.txt"), "dataset_split": "validation"}
  assert targets(own(lines, **kwargs)) == [[*BYTES.encode("xyz"), 1, *[0] * 12]]


# --------------------------------------------------------------------------- the rows


TOKENS = np.array([i % 40 + 2 if i % 9 else 1 for i in range(1, 200)], np.int32)


def cut(mode="stream", train=True, n=None, tokens=TOKENS, skip=0, batch_rows=None, **kwargs):
  sizes = np.diff(np.flatnonzero(np.append(1, tokens) == 1))
  dataset = token_rows.dataset(
    tokens if mode != "packed" else tokens[: sizes.sum()],
    token_rows.Cut(8, mode, **kwargs),
    train=train, what="the text", document_sizes=sizes, skip=skip, rows=batch_rows,
  )  # fmt: skip
  return rows(dataset, n)


def test_an_epoch_has_each_window_once_and_the_next_is_another():
  size = len(TOKENS)
  count = 1 + (size - 7 - 8) // 8
  found = cut(n=3 * count)
  epochs = []
  for e in range(3):
    epoch = [r["targets"] for r in found[e * count : (e + 1) * count]]
    # The windows of an epoch lie side by side from one place on.
    shifts = [
      s for s in range(8)
      if sorted(epoch) == sorted(TOKENS[s + 8 * i : s + 8 * i + 8].tolist() for i in range(count))
    ]  # fmt: skip
    assert shifts, e
    epochs.append(epoch)
  assert epochs[0] != epochs[1] and epochs[1] != epochs[2]
  assert epochs[0] != sorted(epochs[0])
  # Over many epochs, cuts are at all places.
  begins, _ = token_rows._windows(size, token_rows.Cut(8), True, "x")[1](
    tf.range(100 * count, dtype=tf.int64)
  )
  assert set((begins.numpy() % 8).tolist()) == set(range(8))


def test_random_windows_are_anywhere():
  found = cut(order="random", n=4000)
  where = {tuple(TOKENS[i : i + 8].tolist()) for i in range(len(TOKENS) - 7)}
  assert {tuple(r["targets"]) for r in found} == where


@pytest.mark.parametrize("context", [0, 3])
def test_held_out_windows_score_each_token_once(context):
  found = cut(train=False, context=context)
  scored = [i for r in found for i in r["targets"] if i > 0]
  assert scored == TOKENS[context:].tolist()
  seen = [-i for r in found for i in r["targets"][:context]]
  assert seen == [i for n in range(len(found)) for i in TOKENS[n * (8 - context) :][:context]]


def test_documents_are_told_apart():
  for row in cut("documents", train=False) + cut("documents", n=100) + cut("packed", n=100):
    segment, position = 1, 0
    for i, s, p in zip(row["targets"], row["targets_segmentation"], row["targets_position"]):
      assert (s, p) == ((segment, position) if i else (0, 0))
      segment, position = (segment + 1, 0) if i == 1 else (segment, position + 1)
  long = np.array([*range(2, 22), 1, 5, 1], np.int32)
  found = cut("packed", train=False, tokens=long)
  assert [r["targets"] for r in found] == [
    [2, 3, 4, 5, 6, 7, 8, 9],
    [10, 11, 12, 13, 14, 15, 16, 17],
    [18, 19, 20, 21, 1, 5, 1, 0],
  ]
  assert found[2]["targets_segmentation"] == [1, 1, 1, 1, 1, 2, 2, 0]


WAYS = [
  ("stream", "shuffled"),
  ("stream", "random"),
  ("documents", "shuffled"),
  ("packed", "shuffled"),
]


@pytest.mark.parametrize("mode, order", WAYS)
@pytest.mark.parametrize("train", [True, False])
def test_any_row_is_where_it_was_without_those_before(mode, order, train):
  kwargs = {"mode": mode, "order": order, "train": train, "seed": 3}
  all_rows = cut(**kwargs, n=150)
  assert len(all_rows) > 20
  for skip in (1, 7, 130 if train else len(all_rows) - 1):
    assert cut(**kwargs, skip=skip, n=150 - skip) == all_rows[skip:]
  half = BatchRows(4, (1, 3))
  wanted = [r for i, r in enumerate(all_rows[2:100]) if i % 4 in (1, 3)]
  assert cut(**kwargs, skip=2, batch_rows=half, n=len(wanted)) == wanted
  if train:
    assert cut(**{**kwargs, "seed": 4}, n=150) != all_rows
    # Far behind: nothing is read or drawn up to there.
    far = 10**15
    assert cut(**kwargs, skip=far, n=5)[2:] == cut(**kwargs, skip=far + 2, n=3)


def test_a_map_of_a_file_gives_what_memory_gives(tmp_path):
  TOKENS.astype("<u2").tofile(tmp_path / "tokens")
  mapped = np.memmap(tmp_path / "tokens", "<u2", "r")
  for kwargs in ({"mode": "documents"}, {"order": "random"}, {"train": False}, {"mode": "packed"}):
    sizes = np.diff(np.flatnonzero(np.append(1, TOKENS) == 1))
    made = token_rows.dataset(
      mapped, token_rows.Cut(8, **{k: v for k, v in kwargs.items() if k != "train"}),
      train=kwargs.get("train", True), what="x", document_sizes=sizes,
    )  # fmt: skip
    assert rows(made, 50) == cut(**kwargs, n=50)


def test_the_least_text_that_makes_a_row():
  assert cut(tokens=TOKENS[:8], n=2) == [{"targets": TOKENS[:8].tolist()}] * 2
  with pytest.raises(errors.DataError, match="the text has 7 tokens, fewer than one row"):
    cut(tokens=TOKENS[:7])
  assert cut(tokens=TOKENS[:3], train=False) == [{"targets": [*TOKENS[:3].tolist(), *[0] * 5]}]


# ------------------------------------------------------------------------------- pairs


def test_pairs_from_records(tmp_path):
  path = tmp_path / "a.jsonl"
  pairs = [(f"in {i}", f"out {i}") for i in range(40)]
  path.write_text("\n".join(json.dumps({"q": a, "a": b, "n": 1}) for a, b in [*pairs, ("x", "")]))
  kwargs = {"sequence_length": 8, "vocabulary": BYTES, "pack": False, "inputs": "q", "targets": "a"}
  train, held_out = (
    ds.own_pairs(path=str(path), dataset_split=s, validation_fraction=0.2, **kwargs)
    for s in ("train", "validation")
  )
  text = lambda r: tuple(BYTES.decode(r[k]) for k in ("inputs", "targets"))  # noqa: E731
  found = [text(r) for r in rows(held_out)]
  assert 2 < len(found) < 20 and found == [p for p in pairs if p in set(found)]
  first = rows(train, 40 - len(found))
  assert sorted([text(r) for r in first] + found) == sorted(pairs)
  skipped = ds.own_pairs(path=str(path), validation_fraction=0.2, skip=5, **kwargs)
  assert rows(skipped, 20) == rows(train, 25)[5:]
  # Columns by number.
  (tmp_path / "a.tsv").write_text("\n".join("\t".join(p) for p in pairs))
  kwargs |= {"inputs": 0, "targets": 1}
  again = ds.own_pairs(path=str(tmp_path / "a.tsv"), validation_fraction=0.2, **kwargs)
  assert rows(again, 20) == rows(train, 20)


# ------------------------------------------------------------------------------- errors


def test_wrong_settings_and_empty_data(tmp_path, lines):
  (tmp_path / "blank.txt").write_text(" \n\n")
  (tmp_path / "few.txt").write_text("a\nb\nc")
  for kwargs, error in (
    ({"validation_fraction": 1.0}, "must be at least 0 and less than 1"),
    ({"validation_fraction": 0.1, "validation_path": lines}, "not both"),
    ({"validation_path": lines}, r"1 file\(s\) are in path and in validation_path"),
    ({"mode": "streams"}, "must be one of stream, documents, packed"),
    ({"order": "sorted"}, "must be one of shuffled, random"),
    ({"mode": "packed", "context_tokens": 2}, "has no windows"),
    ({"context_tokens": 16}, "less than sequence_length"),
    ({"skip": -1}, "must not be negative"),
    ({"sequence_length": {"inputs": 3}}, "has no 'targets'"),
  ):
    with pytest.raises(errors.ConfigError, match=error):
      own(lines, **kwargs)
  for path, kwargs, error in (
    ("blank.txt", {}, "blank.txt has no text"),
    ("few.txt", {"dataset_split": "validation", "validation_fraction": 1e-9},
     "none of the 3 documents of .*few.txt is in the validation split"),
    ("few.txt", {"validation_fraction": 0}, "has 6 tokens, fewer than one row"),
  ):  # fmt: skip
    with pytest.raises(errors.DataError, match=error):
      own(str(tmp_path / path), **kwargs)
  with pytest.raises(errors.ConfigError, match="own_pairs: too_long"):
    ds.own_pairs(8, BYTES, path=lines, too_long="x", format="tsv", inputs=0, targets=0)


def test_texts_for_vocabularies(tmp_path, lines):
  assert options.texts_of(None) is None and options.texts_of(len) is None
  texts = options.texts_of(ds.own_text)
  with pytest.raises(errors.ConfigError, match="own_text.path is not bound"):
    list(texts(None))
  gin.parse_config(f"own_text.path = {lines!r}\nown_text.document = 'line'")
  train = list(texts(None))
  assert len(train) < 100 and set(train) < set(DOCUMENTS)
  pairs = tmp_path / "p.jsonl"
  pairs.write_text('{"inputs": "a", "targets": "b"}')
  gin.parse_config(f"own_pairs.path = {str(pairs)!r}\nown_pairs.validation_fraction = 0")
  texts = options.texts_of(ds.own_pairs)
  assert [list(texts(f)) for f in (None, "inputs", "targets")] == [["a", "b"], ["a"], ["b"]]
  gin.parse_config(f"text_lm_dataset.train_files = {lines!r}")
  assert list(options.texts_of(ds.text_lm_dataset)(None)) == ["\n".join(DOCUMENTS)]
  (tmp_path / "in.txt").write_text("x\n")
  files = {"train": (str(tmp_path / "in.txt"), str(tmp_path / "in.txt"))}
  gin.parse_config(f"parallel_text_dataset.files = {files!r}")
  assert list(options.texts_of(ds.parallel_text_dataset)("targets")) == ["x"]
