"""Compressed files that become far larger than they are: read in bounds, or refused."""

from __future__ import annotations

import bz2
import gzip
import itertools
import lzma
import random
import tracemalloc

import pytest

from mesh_tensorflow import errors
from mesh_tensorflow.transformer.data.files import documents, text_files
from mesh_tensorflow.transformer.generation import files as prompts
from mesh_transformer_cli import measuring


def zstd(data):
  return pytest.importorskip("zstandard").compress(data)


COMPRESS = {
  ".gz": lambda d: gzip.compress(d, 1),
  ".bz2": lambda d: bz2.compress(d, 1),
  ".xz": lambda d: lzma.compress(d, preset=0),
  ".zst": zstd,
}
suffixes = pytest.mark.parametrize("suffix", COMPRESS)


@pytest.fixture
def bounded():
  """Fails a test whose objects took more than 150 MB at once."""
  tracemalloc.start()
  try:
    yield
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  assert peak < 150e6, f"{peak / 1e6:.0f} MB"


def all_of(path, **form):
  for _ in documents.documents(path, documents.Form(**form)):
    pass


READERS = {
  "text": ("", lambda p: text_files.read_text_file(p)),
  "file": ("", lambda p: all_of(p)),
  "line": ("", lambda p: all_of(p, unit="line")),
  "paragraph": ("", lambda p: all_of(p, unit="paragraph")),
  "separator": ("", lambda p: all_of(p, unit="separator", separator="||")),
  "jsonl": ('{"text": "', lambda p: all_of(p, format="jsonl")),
  "csv": ('text\n"', lambda p: all_of(p, format="csv")),
  "tsv": ("text\n", lambda p: all_of(p, format="tsv")),
}


@suffixes
def test_one_document_that_is_far_larger_than_its_file(tmp_path, suffix, bounded):
  big = COMPRESS[suffix](b"a" * (1 << 26))
  for name, (head, read) in READERS.items():
    path = tmp_path / f"{name}.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](head.encode()) + big)
    with pytest.raises(errors.DataError, match="has more than 33,554,432 bytes|field limit"):
      read(str(path))


@pytest.mark.parametrize("tail", ["", "a" * (3 << 19)], ids=["small", "large"])
def test_a_line_that_tf_data_would_read(tmp_path, tail):
  draw = random.Random(0)
  noise = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz ", k=len(tail))).encode()
  path = tmp_path / "a.txt.gz"
  path.write_bytes(gzip.compress(noise + b"\n" + b"a" * (1 << 27 if tail else 1 << 26), 1))
  with pytest.raises(errors.DataError, match="a line has more than [0-9,]+ bytes, so much more"):
    text_files.text_line_dataset(str(path))
  path.write_bytes(gzip.compress((b"a" * 99_999 + b"\n") * 700, 1))
  assert len(next(iter(text_files.text_line_dataset(str(path)))).numpy()) == 99_999


@suffixes
def test_prompts_and_init(tmp_path, suffix, bounded):
  path = tmp_path / f"a.jsonl{suffix}"
  path.write_bytes(COMPRESS[suffix](b'{"text": "' + b"a" * (1 << 26)))
  with pytest.raises(errors.DataError, match="has more than 33,554,432 bytes"):
    prompts.read_prompts(str(path)) if suffix == ".gz" else text_files.read_text_file(str(path))
  if suffix != ".zst":
    with pytest.raises(measuring.TextError, match="a line has 33,554,432 bytes or more"):
      measuring.measure(str(path), [str(path)], "utf-8", None)


@suffixes
def test_many_documents_are_read_one_by_one(tmp_path, suffix, bounded):
  path = tmp_path / f"a.txt{suffix}"
  lines = (b"a" * 99_999 + b"\n") * 300
  path.write_bytes(COMPRESS[suffix](lines) * 50)  # 1.5 GB.
  found = documents.documents(str(path), documents.Form(unit="line"))
  assert [len(text) for (text,) in itertools.islice(found, 5)] == [99_999] * 5
  sizes = [len(data) for data in itertools.islice(text_files.chunks(str(path)), 50)]
  assert max(sizes) <= 1 << 20


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_document_may_be_as_large_as_texts_are(tmp_path, suffix):
  path = tmp_path / f"a.txt{suffix}"
  path.write_bytes(COMPRESS[suffix](b"some text\n" * 3_000_000))
  assert len(text_files.read_text_file(str(path)).text) == 30_000_000


def test_what_a_decompressor_remembers_is_bounded(tmp_path):
  filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 30}]
  path = tmp_path / "a.txt.xz"
  path.write_bytes(lzma.compress(b"a", filters=[dict(filters[0], dict_size=1 << 26)]))
  assert text_files.read_text_file(str(path)).text == "a"
  # The size of the dictionary stands in the header of the block, which has a checksum: of 1 GiB.
  raw = lzma.compress(b"a", format=lzma.FORMAT_ALONE)
  path.write_bytes(raw[:1] + (1 << 30).to_bytes(4, "little") + raw[5:])
  with pytest.raises(errors.DataError, match="is not a whole xz file: Memory usage limit"):
    text_files.read_text_file(str(path))


@pytest.mark.parametrize("suffix", [".bz2", ".xz", ".zst"])
def test_what_stands_behind_a_stream_is_not_left_out(tmp_path, suffix):
  path = tmp_path / f"a.txt{suffix}"
  one, two = COMPRESS[suffix](b"one"), COMPRESS[suffix](b"two")
  path.write_bytes(one + two)
  assert text_files.read_text_file(str(path)).text == "onetwo"
  path.write_bytes(one + b"\x01" + two[1:])
  with pytest.raises(errors.DataError, match="is not a whole"):
    text_files.read_text_file(str(path))
  if suffix == ".xz":
    path.write_bytes(one + b"\0" * 8 + two + b"\0" * 4)
    assert text_files.read_text_file(str(path)).text == "onetwo"
