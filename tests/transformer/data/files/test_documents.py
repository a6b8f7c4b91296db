"""Documents of own files: every format, compression, boundary; what is wrong, with its place."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import random

import hypothesis
import hypothesis.strategies as st
import pytest

from mesh_tensorflow import errors
from mesh_tensorflow.transformer.data.files import documents, own_files, text_files
from mesh_tensorflow.transformer.data.files.documents import Form
from mesh_tensorflow.transformer.data.files.own_files import FileForm

quick = hypothesis.settings(
  max_examples=60,
  deadline=None,
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
# Documents are kept if they have text; a lone half of a surrogate pair is no UTF-8.
TEXTS = st.lists(
  st.text(st.characters(exclude_categories=["Cs"])).filter(lambda t: bool(t.strip())), min_size=1
)


def read(path, **form):
  """The first field of each document."""
  return [texts[0] for texts in documents.documents(str(path), Form(**form))]


def write(folder, name, data):
  path = folder / name
  path.write_bytes(data.encode() if isinstance(data, str) else data)
  return str(path)


# ------------------------------------------------------------------------- compression


def zstd(data):
  module = pytest.importorskip("zstandard")
  half = len(data) // 2  # Two frames, as `cat a.zst b.zst` makes.
  return module.compress(data[:half]) + module.compress(data[half:])


@pytest.mark.parametrize(
  "suffix, compress, name",
  [
    (".gz", gzip.compress, "gzip"),
    (".bz2", bz2.compress, "bzip2"),
    (".xz", lzma.compress, "xz"),
    (".zst", zstd, "zstd"),
  ],
)
def test_compressed_files(tmp_path, suffix, compress, name):
  data = bytes(random.Random(0).choices(b"abcdefgh\n", k=1_200_000))
  packed = compress(data)
  path = write(tmp_path, f"a.txt{suffix}", packed)
  seen = []
  assert b"".join(text_files.chunks(path, seen.append)) == data
  assert sum(seen) == len(packed)
  assert text_files.read_text_file(path).text == data.decode()
  lines = [x.decode() for x in text_files.text_line_dataset(path).take(5).as_numpy_iterator()]
  assert lines == data.decode().split("\n")[:5]
  write(tmp_path, f"a.txt{suffix}", packed[: len(packed) // 2])
  with pytest.raises(errors.DataError, match=rf"a\.txt\{suffix} is not a whole {name} file"):
    read(path)
  write(tmp_path, f"a.txt{suffix}", b"no such thing" * 100)
  with pytest.raises(errors.DataError, match=f"is not a whole {name} file"):
    read(path)


def test_zstd_that_is_not_installed(tmp_path, monkeypatch):
  monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
  with pytest.raises(errors.ConfigError, match="pip install zstandard"):
    read(write(tmp_path, "a.zst", b"abc"))


# -------------------------------------------------------------------------------- text


def test_what_a_document_of_text_is(tmp_path):
  path = write(tmp_path, "a.txt", "one\r\ntwo\n\n \t\nthree\n  four\n\n\n")
  assert read(path) == ["one\r\ntwo\n\n \t\nthree\n  four\n\n\n"]
  assert read(path, unit="line") == ["one", "two", "three", "  four"]
  assert read(path, unit="paragraph") == ["one\ntwo", "three\n  four"]
  path = write(tmp_path, "b.txt", "a\n<|end|>b<|end|>  <|end|>c")
  assert read(path, unit="separator", separator="<|end|>") == ["a\n", "b", "c"]


@quick
@hypothesis.given(st.text("ab|", max_size=60), st.sampled_from(["|", "ab", "aa", "a|a", "abab"]),
                  st.integers(1, 5))  # fmt: skip
def test_pieces_are_those_of_the_whole_text(text, separator, size):
  chunks = [text[i : i + size] for i in range(0, len(text), size)]
  assert list(documents.pieces(chunks, separator)) == text.split(separator)


def test_text_that_is_not_of_its_encoding(tmp_path):
  # The bad byte is behind the first chunk, and in the middle of a character.
  data = "é".encode() * 700_000 + b"\xc3" + b"abc"
  with pytest.raises(errors.DataError, match=r"byte 0xc3 at offset 1400000 .*latin-1"):
    read(write(tmp_path, "a.txt", data))
  with pytest.raises(errors.DataError, match=r"byte 0xc3 at offset 3 \(unexpected end of data\)"):
    read(write(tmp_path, "b.txt", b"abc\xc3"))
  assert read(write(tmp_path, "c.txt", b"caf\xe9"), encoding="latin-1") == ["café"]
  assert read(
    write(tmp_path, "d.txt", "日本\nx".encode("utf-16")), encoding="utf-16", unit="line"
  ) == [
    "日本",
    "x",
  ]
  # The mark that some programs write.
  assert read(write(tmp_path, "e.txt", "\ufeffabc")) == ["abc"]


# ----------------------------------------------------------------------------- records


@quick
@hypothesis.given(TEXTS, st.booleans())
def test_json_lines_come_back(tmp_path, texts, ascii_only):
  lines = [json.dumps({"id": i, "text": t}, ensure_ascii=ascii_only) for i, t in enumerate(texts)]
  path = write(tmp_path, "a.jsonl", "\n".join(lines))
  assert read(path, format="jsonl") == texts
  assert read(path, format="jsonl", fields=("text",)) == texts


@quick
@hypothesis.given(TEXTS, st.sampled_from([",", "\t"]))
def test_tables_come_back(tmp_path, texts, delimiter):
  hypothesis.assume(not any("\r" in t or "\0" in t for t in texts))  # The module's reader, in 3.10.
  out = io.StringIO()
  table = csv.writer(out, delimiter=delimiter, lineterminator="\n")
  table.writerows([["n", "text"], *([str(i), t] for i, t in enumerate(texts))])
  path = write(tmp_path, "a.csv", out.getvalue())
  form = {"format": "csv" if delimiter == "," else "tsv", "quotes": True}
  assert read(path, **form, fields=("text",)) == texts
  assert read(path, **form) == texts
  assert read(path, **form, fields=(1,), header=True) == texts
  assert read(path, **form, fields=(1,)) == ["text", *texts]


def test_tsv_has_no_quotes_of_its_own(tmp_path):
  path = write(tmp_path, "a.tsv", 'he said "no\tnon\n\n"yes"\toui\n')
  assert list(documents.documents(path, Form("tsv", fields=(0, 1)))) == [
    ('he said "no', "non"),
    ('"yes"', "oui"),
  ]


def test_parquet_comes_back(tmp_path):
  pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
  texts = [f"document {i} é" for i in range(3000)]
  table = pyarrow.table(
    {"text": pyarrow.array([*texts, None]), "n": list(range(3001)),
     "kind": pyarrow.array([*texts, "x"]).dictionary_encode()}
  )  # fmt: skip
  path = str(tmp_path / "a.parquet")
  parquet.write_table(table, path, row_group_size=500)
  assert read(path, format="parquet") == texts
  assert read(path, format="parquet", fields=("kind",)) == [*texts, "x"]
  assert read(path, format="parquet", fields=(0,)) == texts
  with pytest.raises(errors.DataError, match="column 'n' is int64, not text"):
    read(path, format="parquet", fields=("n",))
  with pytest.raises(errors.DataError, match="no column 'body'; there are 'text', 'n', 'kind'"):
    read(path, format="parquet", fields=("body",))
  data = (tmp_path / "a.parquet").read_bytes()
  plain = str(tmp_path / "plain.parquet")
  parquet.write_table(
    pyarrow.table({"text": ["some text"]}), plain, compression="none", use_dictionary=False,
    write_statistics=False,
  )  # fmt: skip
  no_text = (tmp_path / "plain.parquet").read_bytes().replace(b"some text", b"som\xb2 text")
  for damaged in (data[:-100], b"x" * 100, no_text):
    with pytest.raises(errors.DataError, match="a.parquet is not a whole Parquet file"):
      read(write(tmp_path, "a.parquet", damaged), format="parquet")
  with pytest.raises(errors.DataError, match="cannot read"):
    read(tmp_path / "none.parquet", format="parquet")


@pytest.mark.parametrize(
  "name, data, fields, text",
  [
    ("a.jsonl", '{"a": "x"}\n{"a": 3}', ("a",), r"line 2: field 'a' is int, not text: 3"),
    ("a.jsonl", '{"a": "x"}\n\n{"b": "x"}', ("a",), r"line 3: there is no field 'a'; .* 'b'"),
    ("a.jsonl", '{"a": "x", "b": ""}', (), r"which field is the text\? There are 'a', 'b'"),
    ("a.jsonl", '{"a": "x"}', (0,), r"there is no field 0; there are 'a'"),
    ("a.jsonl", '{"a": "x"', ("a",), r"line 1: this is not JSON"),
    ("a.jsonl", '[\n {"a": "x"}]', ("a",), r"a whole array is no JSON lines"),
    ("a.jsonl", "[1]", ("a",), r"line 1: an object with fields is needed, not \[1\]"),
    ("a.csv", "a,b\nx,y", ("c",), r"no column 'c'; there are 'a', 'b'"),
    ("a.csv", "a,b\nx,y", (), r"which column is the text\? There are 'a', 'b'"),
    ("a.csv", "a,b\nx,y", (2,), r"line 1: 2 column\(s\), and column 2 \(from 0\) is asked for"),
    ("a.csv", "a,b\nx", ("b",), r"line 2: 1 column\(s\)"),
    ("a.csv", 'a,b\nx,"y', ("b",), r"this is not csv: unexpected end of data; .*quotes = False"),
  ],
)  # fmt: skip
def test_what_is_wrong_with_records(tmp_path, name, data, fields, text):
  path = write(tmp_path, name, data)
  with pytest.raises(errors.DataError, match=text) as e:
    read(path, format=name[2:], fields=fields)
  assert path in str(e.value) and "\n" not in str(e.value)


def test_a_table_without_header(tmp_path):
  path = write(tmp_path, "a.csv", "x,y\n")
  with pytest.raises(
    errors.DataError, match="with header = False columns have numbers, from 0 to 1"
  ):
    read(path, format="csv", fields=("x",), header=False)
  with pytest.raises(errors.DataError, match="which of the 2 columns"):
    read(path, format="csv", header=False)
  assert read(write(tmp_path, "b.csv", "x\ny\n"), format="csv", header=False) == ["x", "y"]


# ------------------------------------------------------------------------------ finding


def test_files_of_a_folder(tmp_path):
  (tmp_path / "below" / "deep").mkdir(parents=True)
  (tmp_path / ".git").mkdir()
  for name in ("b.txt", "a.jsonl.gz", "below/deep/c.CSV", ".hidden.txt", ".git/x.txt", "x.png"):
    (tmp_path / name).write_bytes(b"")
  found = own_files.find(str(tmp_path))
  assert [p.removeprefix(f"{tmp_path}/") for p in found.paths] == [
    "a.jsonl.gz",
    "b.txt",
    "below/deep/c.CSV",
  ]
  assert [f.format for f in found.forms] == ["jsonl", "text", "csv"]
  # A format that is said, and a name that is said, count for more than suffixes.
  assert len(own_files.find(str(tmp_path), FileForm(format="text")).paths) == 4
  assert own_files.find(f"{tmp_path}/*.png").forms[0].format == "text"
  both = own_files.find([f"{tmp_path}/*.txt", f"{tmp_path}/below"])
  assert [f.format for f in both.forms] == ["text", "csv"]


def test_wrong_paths_and_settings(tmp_path):
  (tmp_path / "a.py").write_text("x")
  (tmp_path / "a.txt").write_text("x")
  text = str(tmp_path / "a.txt")
  (tmp_path / "empty").mkdir()
  (tmp_path / "python").mkdir()
  (tmp_path / "python" / "a.py").write_text("x")
  for path, error in (
    (str(tmp_path / "none.txt"), "there is no file"),
    (str(tmp_path / "*.none"), "no file matches"),
    (str(tmp_path / "empty"), "it is empty"),
    (str(tmp_path / "python"), r"but 1 of \.py: give their format, or a glob"),
  ):
    with pytest.raises(errors.DataError, match=error):
      own_files.find(path)
  for kwargs, error in (
    ({"format": "jsnl"}, "did you mean 'jsonl'"),
    ({"document": "lines"}, "did you mean 'line'"),
    ({"document": "line", "separator": "x"}, "not both"),
    ({"separator": ""}, "must not be empty"),
    ({"field": "text"}, "is a text file, which has no fields"),
    ({"format": "csv", "document": "line"}, "are for text files"),
    ({"encoding": "utf9"}, "unknown text encoding 'utf9'"),
  ):
    if kwargs.get("format") == "csv":
      path = str(tmp_path / "b.csv")
      (tmp_path / "b.csv").write_text("x")
    else:
      path = text
    with pytest.raises(errors.ConfigError, match=error):
      own_files.find(path, FileForm(**kwargs))
  with pytest.raises(errors.ConfigError, match="a text file glob or a list of globs"):
    own_files.find([])


# ----------------------------------------------------------------------- the held-out part


def sides(files, fraction):
  """The texts that are trained on, and those that are held out."""
  found = [p for n in range(len(files.paths)) for p in files.divided(fraction, n)]
  return [[x[0] for x in side if x is not None] for side in zip(*found)]


def test_a_document_stays_on_its_side(tmp_path):
  for n in range(4):
    lines = [f"document {i}" for i in range(500 * n, 500 * n + 500)]
    write(tmp_path, f"{n}.txt", "\n".join(lines))
  few = own_files.find([f"{tmp_path}/1.txt", f"{tmp_path}/3.txt"], FileForm(document="line"))
  more = own_files.find(str(tmp_path), FileForm(document="line"))
  (train, held_out), (train_more, held_out_more) = sides(few, 0.1), sides(more, 0.1)
  assert set(train) <= set(train_more) and set(held_out) <= set(held_out_more)
  assert len(train_more) + len(held_out_more) == 2000
  assert not set(train_more) & set(held_out_more)
  assert 150 < len(held_out_more) < 250
  # Larger fractions hold the same and more out.
  assert set(held_out_more) <= set(sides(more, 0.2)[1])
  assert sides(more, 0.0)[1] == []


def test_one_document_and_long_ones_give_their_ends(tmp_path):
  lines = "\n".join(["x" * 70_000, "y" * 60_000, "z" * 60_000])
  records = own_files.find(write(tmp_path, "lines.csv", lines), FileForm(header=False))
  assert sorted(map(len, sides(records, 0.2)[1]))[-1] in (14_000, 60_000)
  assert len(sides(records, 1e-9)[1][0]) == 1  # Of the first: the others are shorter.
  (tmp_path / "lines.csv").unlink()
  write(tmp_path, "a.txt", "0123456789")
  assert sides(own_files.find(str(tmp_path)), 0.2) == [["01234567"], ["89"]]
  long = "abcdefghij" * 1000
  write(tmp_path, "b.txt", long)
  train, held_out = sides(own_files.find(str(tmp_path)), 0.2)
  assert long[:8000] in train and long[8000:] in held_out
  # The short one is now on one side.
  assert ("0123456789" in train) != ("0123456789" in held_out)
