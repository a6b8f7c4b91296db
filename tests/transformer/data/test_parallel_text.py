"""Pairs of texts from files: reading, packing, order, resumption, wrong files."""

from __future__ import annotations

import gzip
import itertools
import logging

import gin
import numpy as np
import pytest

from mesh_tensorflow import errors
from mesh_tensorflow.transformer import dataset as ds
from mesh_tensorflow.transformer.data import sources
from mesh_tensorflow.transformer.subword_vocabulary import train_subword_vocabulary
from mesh_tensorflow.transformer.vocabulary import ByteVocabulary, CharacterVocabulary

LETTERS = CharacterVocabulary("abcdefghij ")
LENGTH = {"inputs": 12, "targets": 16}


@pytest.fixture
def folder(tmp_path):
  """100 pairs of 1 to 9 letters: the targets are the inputs, and one more letter."""
  rng = np.random.default_rng(0)
  words = ["".join(rng.choice(list("abcdefghij"), rng.integers(1, 10))) for _ in range(100)]
  (tmp_path / "in.txt").write_text("".join(f"{w}\n" for w in words))
  (tmp_path / "out.txt.gz").write_bytes(gzip.compress("".join(f"{w}a\n" for w in words).encode()))
  (tmp_path / "both.tsv").write_text("".join(f"{w}\t{w}a\r\n" for w in words))
  return tmp_path


FILES = {"train": ("in.txt", "out.txt.gz"), "validation": "both.tsv"}


def read(folder, split="train", vocabulary=LETTERS, length=LENGTH, files=FILES, **kwargs):
  return ds.parallel_text_dataset(
    length, vocabulary, split, files=files, data_dir=str(folder), **kwargs
  )


def rows(dataset):
  return [
    {k: np.asarray(v).tolist() for k, v in row.items()} for row in dataset.as_numpy_iterator()
  ]


def pairs_of(row, decode=LETTERS.decode):
  """The texts of a packed row, found by segmentation and position alone."""
  result = []
  for number in range(1, max(row["inputs_segmentation"]) + 1):
    pair = []
    for key in ("inputs", "targets"):
      at = [i for i, s in enumerate(row[f"{key}_segmentation"]) if s == number]
      ids = [row[key][i] for i in at]
      assert [row[f"{key}_position"][i] for i in at] == list(range(len(at)))
      assert ids[-1] == 1 and 1 not in ids[:-1]
      pair.append(decode(ids[:-1]))
    result.append(tuple(pair))
  return result


def test_parallel_files_and_columns_hold_the_same_pairs(folder):
  words = (folder / "in.txt").read_text().split()
  expected = [(w, w + "a") for w in words]
  for split in FILES:
    assert sources.read_pairs(FILES, split, str(folder)) == expected
  single = rows(read(folder, "validation", pack=False))
  assert [set(r) for r in single] == [{"inputs", "targets"}] * 100
  for row, (a, b) in zip(single, expected):
    assert row["inputs"] == (LETTERS.encode(a) + [1] + [0] * 12)[:12]
    assert row["targets"] == (LETTERS.encode(b) + [1] + [0] * 16)[:16]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_packed_rows_hold_each_pair_once_an_epoch(folder, split):
  expected = sources.read_pairs(FILES, split, str(folder))
  dataset = read(folder, split)
  found, count = [], 0
  for row in dataset.as_numpy_iterator():
    row = {k: v.tolist() for k, v in row.items()}
    found += pairs_of(row)
    count += 1
    for key, ids in row.items():
      base, _, kind = key.partition("_")
      assert len(ids) == LENGTH[base]
      if kind:
        used = row[f"{base}_segmentation"]
        assert all(ids[i] == 0 for i in range(len(ids)) if not used[i])
    if len(found) >= 100:
      break
  assert sorted(found) == sorted(expected)
  filled = sum(len(b) + 1 for _, b in expected) / (16 * count)
  assert filled > 0.7
  if split == "train":
    first = rows(dataset.take(count))
    second = rows(dataset.skip(count).take(count))
    assert first != second
    other_seed = rows(read(folder, seed=1).take(count))
    assert first != other_seed


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_skip_resumes_where_it_stopped(folder, split, pack):
  whole = rows(read(folder, split, pack=pack).take(350))
  for skip in (0, 1, 64, 99, 101, 250):
    resumed = rows(read(folder, split, pack=pack, skip=skip).take(max(0, 350 - skip)))
    assert resumed == whole[skip:]


def test_pairs_with_vocabularies_of_their_own(folder):
  (row, *_) = rows(read(folder, "validation", vocabulary=(ByteVocabulary(), LETTERS), pack=False))
  word = (folder / "in.txt").read_text().split()[0]
  assert row["inputs"][: len(word) + 1] == ByteVocabulary().encode(word) + [1]
  assert row["targets"][: len(word) + 2] == LETTERS.encode(word + "a") + [1]


def test_too_long_pairs_are_dropped_and_counted_cut_or_refused(folder, caplog):
  expected = sources.read_pairs(FILES, "validation", str(folder))
  short = [(a, b) for a, b in expected if len(b) < 6]
  length = {"inputs": 12, "targets": 6}
  with caplog.at_level(logging.WARNING):
    dropped = rows(read(folder, "validation", length=length))
  assert sorted(p for row in dropped for p in pairs_of(row)) == sorted(short)
  assert f"{100 - len(short)} of 100 pairs are left out" in caplog.text
  cut = rows(read(folder, "validation", length=length, pack=False, too_long="truncate"))
  assert len(cut) == 100
  assert all(row["targets"][5] in (0, 1) and 1 in row["targets"] for row in cut)
  number = next(i for i, (_, b) in enumerate(expected, 1) if len(b) > 5)
  with pytest.raises(errors.DataError, match=f"targets of pair {number} have .* tokens.*'drop'"):
    read(folder, "validation", length=length, too_long="error")
  with pytest.raises(errors.DataError, match="all 100 pairs have more tokens"):
    read(folder, "validation", length=1)


def test_empty_sides_are_dropped_and_counted(tmp_path, caplog):
  (tmp_path / "x.tsv").write_text("a\tb\n\tb\na\t \nc\td")
  with caplog.at_level(logging.WARNING):
    assert sources.read_pairs({"t": "x.tsv"}, "t", str(tmp_path)) == [("a", "b"), ("c", "d")]
  assert "2 of 4 pairs are left out, because one side is empty" in caplog.text


@pytest.mark.parametrize(
  ("files", "error", "text"),
  [
    ({"train": ("in.txt", "nothing.txt")}, errors.DataError, "there is no file .*nothing.txt"),
    ({"train": ("in.txt", "short.txt")}, errors.DataError,
     "equally many lines: .*in.txt has 100, and .*short.txt 2"),
    ({"train": ("*.txt", "short.txt")}, errors.DataError, r"\*.txt matches 3 file.* 1"),
    ({"train": ("in.txt", "empty.tsv")}, errors.DataError, "empty.tsv is empty"),
    ({"train": "short.txt"}, errors.DataError, r"short.txt, line 1: 1 column\(s\).*'a'"),
    ({"train": "three.tsv"}, errors.DataError, r"three.tsv, line 2: 3 column\(s\)"),
    ({"train": "blank.txt"}, errors.DataError, r"line 1: 1 column\(s\)"),
    ({"train": ("blank.txt", "blank.txt")}, errors.DataError, "there is no pair of texts"),
    ({"validation": "both.tsv"}, errors.ConfigError, r"no files for split 'train', only.*valid"),
    ({"train": ("in.txt", "in.txt", "in.txt")}, errors.ConfigError, r"tuple \(inputs, targets\)"),
    ({}, errors.ConfigError, "must be a dict"),
    ("in.txt", errors.ConfigError, "must be a dict"),
  ],
)  # fmt: skip
def test_wrong_files(folder, files, error, text):
  (folder / "short.txt").write_text("a\nb\n")
  (folder / "empty.tsv").write_text("")
  (folder / "blank.txt").write_text("\n\n")
  (folder / "three.tsv").write_text("a\tb\na\tb\tc\n")
  with pytest.raises(error, match=f"(?s){text}"):
    read(folder, files=files)


def test_wrong_settings(folder):
  with pytest.raises(errors.ConfigError, match="too_long.*drop, truncate, error"):
    read(folder, too_long="split")
  with pytest.raises(errors.ConfigError, match="skip"):
    read(folder, skip=-1)
  with pytest.raises(errors.ConfigError, match="no 'inputs'"):
    read(folder, length={"targets": 4})
  with pytest.raises(errors.DataError, match="not among"):
    read(folder, vocabulary=CharacterVocabulary("ab"))


def test_gin_binds_files_and_the_evaluation_reads_them(folder):
  gin.parse_config(
    f"""
    files = {{'train': ('in.txt', 'out.txt.gz'), 'test': 'both.tsv'}}
    dataset.parallel_text_dataset.files = %files
    dataset.parallel_text_dataset.data_dir = '{folder}'
    dataset.parallel_text_eval_datasets.files = %files
    dataset.parallel_text_eval_datasets.data_dir = '{folder}'
    """
  )
  row = next(iter(ds.parallel_text_dataset(LENGTH, LETTERS)))
  assert row["targets"].shape == [16]
  (evaluated,) = ds.parallel_text_eval_datasets(LENGTH, LETTERS, "test")
  examples = rows(evaluated.dataset_fn(sequence_length={"inputs": 5, "targets": 4}))
  expected = sources.read_pairs({"test": "both.tsv"}, "test", str(folder))
  assert len(examples) == 100 and evaluated.name == "test"
  for example, (a, b) in zip(examples, expected):
    assert example["inputs_pretokenized"] == a.encode()
    assert example["targets_pretokenized"] == b.encode()
    assert example["inputs"] == (LETTERS.encode(a)[:4] + [1] + [0] * 4)[:5]
    assert example["targets"] == (LETTERS.encode(b)[:3] + [1] + [0] * 3)[:4]


def test_multi30k_fills_its_rows(shared_data):
  folder = shared_data / "multi30k"
  files = {"validation": ("val.en.gz", "val.fr.gz")}
  dataset = ds.parallel_text_dataset(
    {"inputs": 512, "targets": 600}, ByteVocabulary(), "validation", files=files,
    data_dir=str(folder),
  )  # fmt: skip
  decode = ByteVocabulary().decode
  found = [p for row in rows(dataset) for p in pairs_of(row, decode)]
  expected = [
    [line.strip() for line in gzip.decompress((folder / f).read_bytes()).decode().split("\n")]
    for f in files["validation"]
  ]
  assert sorted(found) == sorted(p for p in zip(*expected) if all(p))
  assert len(found) == 1014
  filled = [np.count_nonzero(row["targets"]) / 600 for row in itertools.islice(rows(dataset), 100)]
  assert np.mean(filled) > 0.85


@pytest.fixture(params=["bpe", "unigram"])
def pieces(request, folder):
  pytest.importorskip("sentencepiece")
  return train_subword_vocabulary(
    (folder / "in.txt").read_text().split(), 40, model_type=request.param
  )


def test_sampled_pieces_are_of_the_same_texts(folder, pieces, request):
  """In each epoch each pair once, in other pieces; what row n is depends on n and the seed."""
  expected = sorted(sources.read_pairs(FILES, "train", str(folder)))

  def read_rows(n, skip=0, seed=3, split="train", **kwargs):
    return rows(read(folder, split, pieces, skip=skip, seed=seed, **kwargs).take(n))

  found, cuts = [], []
  for row in read_rows(200, sampled_pieces=0.3):
    found += pairs_of(row, pieces.decode)
    cuts.append(row)
    if len(found) >= 200:
      break
  assert sorted(found[:100]) == expected
  assert sorted(found[100:200]) == expected
  ahead = read_rows(5, skip=len(cuts) - 2, sampled_pieces=0.3)
  assert len(ahead) == 5 and ahead[:2] == cuts[-2:]
  assert read_rows(5, seed=4, sampled_pieces=0.3) != cuts[:5]
  # The pieces of all pairs, of two epochs and of one without sampling.
  ids = [pair for row in (*cuts, *read_rows(100)) for pair in pairs_of(row, tuple)]
  epochs = [sorted(ids[first : first + 100]) for first in (0, 100, len(found))]
  assert len({tuple(epoch) for epoch in epochs}) == 3
  if (
    request.node.callspec.params["pieces"] == "bpe"
  ):  # A merge that is left out leaves more pieces.
    counts = [sum(len(side) for pair in epoch for side in pair) for epoch in epochs]
    assert counts[0] > counts[2] and counts[1] > counts[2]
  # Held-out texts are not sampled, nor is anything by default.
  best = read_rows(100, split="validation", sampled_pieces=0.3)
  assert best == read_rows(100, split="validation")


def test_a_seed_may_be_negative(folder, pieces):
  read_rows = [
    rows(read(folder, vocabulary=pieces, seed=seed, sampled_pieces=alpha).take(5))
    for seed in (-3, 3)
    for alpha in (0.0, 0.3)
  ]
  assert all(a != b for a, b in itertools.combinations(read_rows, 2))


def test_pieces_are_sampled_from_a_vocabulary_that_has_them(folder):
  with pytest.raises(errors.ConfigError, match="CharacterVocabulary has no pieces to choose from"):
    read(folder, sampled_pieces=0.1)
