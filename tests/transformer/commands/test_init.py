"""`mesh-transformer init`: which text it finds, what it measures and writes, what it refuses."""

from __future__ import annotations

import csv
import gzip
import json
import os
import pathlib
import shlex

import gin
import pytest

from mesh_tensorflow.transformer import gin_config, utils  # noqa: F401 - registers the names.
from mesh_tensorflow.transformer.data.files import own_files
from mesh_transformer_cli import front, init, measuring

PROGRAM = "mesh-transformer"
TEXT = "To be, or not to be, that is the question:\n" * 60
LATIN = TEXT.replace("question", "qu\xe9stion")


@pytest.fixture(autouse=True)
def inside(tmp_path, monkeypatch):
  """An empty folder to work in."""
  monkeypatch.chdir(tmp_path)
  return tmp_path


def run(*arguments: str) -> None:
  assert front.command_line(PROGRAM, ["init", *arguments])[1] is None


def write(name: str, text: str | bytes = TEXT) -> str:
  path = pathlib.Path(name)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(text if isinstance(text, bytes) else text.encode())
  return name


def settings(folder: str) -> dict[str, object]:
  """What the gin file of a folder binds, read and checked as a run does."""
  gin.clear_config()
  gin_config.parse_gin([os.path.join(folder, "train.gin")], [])
  gin_config.check_run()
  names = (
    *("own_text.path", "own_text.validation_fraction", "run.vocabulary", "run.model_dir"),
    *("run.train_steps", "run.sequence_length", "run.batch_size", "run.eval_every_steps"),
  )
  found = {name: gin.query_parameter(name) for name in names}
  for name in ("own_text.field", "text_encoding.encoding"):
    try:
      found[name] = gin.query_parameter(name)
    except ValueError:
      found[name] = None
  gin.clear_config()
  return found


def test_a_text_becomes_settings_that_are_right(inside, capsys):
  run("my model", f"--text={write('input.txt')}")
  out = capsys.readouterr().out
  assert f"{inside}/input.txt: 2,580 characters" in out and "characters; 2 layers of 64" in out
  assert "train --config='my model/train.gin' --dry_run" in out
  found = settings("my model")
  assert found["own_text.path"] == f"{inside}/input.txt"
  assert found["run.vocabulary"] == "characters"
  assert found["run.model_dir"] == f"{inside}/my model/model"
  assert 0 < found["own_text.validation_fraction"] <= 0.1
  assert 0 < found["run.eval_every_steps"] < found["run.train_steps"]
  assert sorted(os.listdir("my model")) == ["README.md", "train.gin"]


def test_each_line_of_the_gin_file_has_a_comment_near(inside):
  """A paragraph of settings begins with what it is about."""
  run("m", f"--text={write('input.txt')}")
  first, *parts = pathlib.Path("m/train.gin").read_text().split("\n\n")
  assert first.startswith("# ") and len(parts) == 6
  for part in parts:
    assert part.startswith("# ---- ") and "=" in part


def test_the_readme_names_commands_that_are_right(inside):
  run("m", f"--text={write('input.txt')}")
  lines = pathlib.Path("m/README.md").read_text().splitlines()
  typed = [line.split("`")[1] for line in lines if line.startswith("| ") and f"`{PROGRAM}" in line]
  assert len(typed) == 7
  for line in typed:
    program, *words = shlex.split(line)
    assert program == PROGRAM and front.command_line(program, words)[1]


@pytest.mark.parametrize(
  ("files", "arguments", "path", "characters"),
  [
    (["m/a.txt"], [], "m/a.txt", 1),
    (["m/a.txt", "m/b.txt"], [], "m/*.txt", 2),
    (["m/texts/a.txt", "m/texts/deep/b.md"], [], "m/texts", 2),
    (["m/a.txt", "m/model/b.txt", "m/.hidden/c.txt"], [], "m/a.txt", 1),
    (["t/a.txt", "t/b.txt"], ["--text=t"], "t", 2),
    (["t/a.txt", "t/b.txt", "t/c.md"], ["--text=t/*.txt"], "t/*.txt", 2),
    (["plain"], ["--text=plain"], "plain", 1),
    (["m/a.txt", "m/b.csv"], ["--text=m/a.txt"], "m/a.txt", 1),
    (["m/a.txt"], ["--text=m"], "m/a.txt", 1),
  ],
)
def test_which_text_it_is(inside, files, arguments, path, characters):
  for file in files:
    write(file)
  run("m", *arguments)
  assert settings("m")["own_text.path"] == str(inside / path)
  about = f"{characters * len(TEXT):,} characters"
  assert about in pathlib.Path("m/README.md").read_text()


def test_its_files_are_those_that_training_reads(inside):
  """The suffixes that it knows, and the files that it finds, are those of the reader."""
  assert measuring.FORMATS == own_files.FORMAT_OF_SUFFIX
  for file in ("m/a.txt", "m/b.txt", "m/c.txt"):
    write(file)
  run("m")
  found = own_files.find(settings("m")["own_text.path"])
  assert found.paths == tuple(str(inside / "m" / f"{x}.txt") for x in "abc")


def test_compressed_text(inside):
  write("a.txt.gz", gzip.compress(TEXT.encode()))
  run("m", "--text=a.txt.gz")
  assert "2,580 characters" in pathlib.Path("m/README.md").read_text()


def test_fields_of_records(inside):
  lines = [json.dumps({"n": i, "body": TEXT[:200]}) for i in range(20)]
  write("a.jsonl", "\n".join(lines))
  run("m", "--text=a.jsonl")
  assert settings("m")["own_text.field"] == "body"
  assert "4,000 characters" in pathlib.Path("m/README.md").read_text()
  with open("b.csv", "w", newline="") as f:
    csv.writer(f).writerows([["who", "text"], *[["x", TEXT[:200]]] * 20])
  run("n", "--text=b.csv")
  assert settings("n")["own_text.field"] is None  # It is called "text".


def test_rows_of_a_table_may_be_short(inside, capsys):
  with open("a.csv", "w", newline="") as f:
    csv.writer(f).writerows([["who", "text"], *[["x"], ["x", TEXT[:200]], []] * 20])
  run("m", "--text=a.csv")
  assert "4,000 characters" in capsys.readouterr().out


def test_encoding(inside):
  write("a.txt", LATIN.encode("latin-1"))
  run("m", "--text=a.txt", "--encoding=LATIN-1")
  assert settings("m")["text_encoding.encoding"] == "iso8859-1"


@pytest.mark.parametrize(
  ("characters", "different", "whole", "installed", "vocabulary"),
  [
    (1_000_000, 65, True, True, "characters"),
    (1_000_000, 3000, True, True, "bytes"),
    (9_000_000, 65, False, True, "bytes"),
    (50_000_000, 90, False, True, "sentencepiece:8000"),
    (5_000_000_000, 90, False, True, "sentencepiece:32000"),
    (50_000_000, 90, False, False, "bytes"),
  ],
)
def test_vocabulary_and_sizes(monkeypatch, characters, different, whole, installed, vocabulary):
  monkeypatch.setattr(init, "_has_sentencepiece", lambda: installed)
  text = measuring.Text("a", ("a",), "text", None, characters, different, whole)
  assert init.suitable_vocabulary(text) == vocabulary
  sizes = init.suitable_sizes(text, vocabulary)
  tokens = characters / 3.5 if vocabulary.startswith("s") else characters
  assert tokens <= sizes.tokens and (sizes is init.SIZES[0] or tokens > init.SIZES[0].tokens)


@pytest.mark.parametrize("sizes", init.SIZES, ids=lambda s: str(s.d_model))
def test_sizes_go_together(sizes):
  assert sizes.d_model % sizes.heads == 0 and sizes.d_ff % 8 == 0
  assert 8 / 3 <= sizes.d_ff / sizes.d_model < 2.8
  # The held-out part of the shortest text of these sizes has at least a sequence.
  shorter = [s.tokens for s in init.SIZES if s.tokens < sizes.tokens]
  assert max(shorter, default=init._LEAST) * sizes.validation >= sizes.length


@pytest.mark.parametrize(
  ("arguments", "says"),
  [
    ([], "no folder is given: init DIR --text=PATH"),
    (["m"], "no text is given, and in m there is none: add --text=PATH"),
    (["m", "--text=nowhere.txt"], "there is no text nowhere.txt in "),
    (["m", "--text=x*.txt"], "there is no text x*.txt"),
    (["m", "--text=empty"], "in the folder empty is no text: files .csv"),
    (["m", "--text=short.txt"], "has 5 characters; a model and a held-out part need at least"),
    (["m", "--text=latin.txt"], "latin.txt: byte 35 (0xe9) is not utf-8: give its encoding"),
    (["m", "--text=later.txt"], "later.txt: byte 78 (0xe9) is not utf-8: give its encoding"),
    (["m", "--text=broken.txt.gz"], "broken.txt.gz cannot be read: "),
    (["m", "--text=two.jsonl"], "two.jsonl has the fields a, b: choose by --field=NAME"),
    (["m", "--text=two.jsonl", "--field=c"], "two.jsonl has no field 'c'; there are a, b"),
    (["m", "--text=broken.jsonl"], "broken.jsonl:2 is no JSON of one line"),
    (["m", "--text=head.csv"], "head.csv:1 is no row of a table: new-line character"),
    (["m", "--text=list.jsonl"], "list.jsonl:1 is no object with named fields"),
    (["m", "--text=good.txt", "--encoding=utf-99"], "Python knows no encoding 'utf-99'"),
    (["m", "--text=good.txt", "--vocabulary=words"], "'words' is none of characters, bytes"),
    (["m", "--text=good.txt", "--vocabulary=sentencepiece:x"], "a number of 300 to 1,000,000"),
    (["m", "--text=good.txt", "--vocabulary=sentencepiece:40000000"], "a number of 300 to"),
    (["m", "--text=good.txt", "--vocabulary=sentencepiece:" + "9" * 5000], "a number of 300 to"),
    (["m", "--text=good.txt", "--vocabulary=sentencepiece:1000000"], "not have so many pieces"),
    (["good.txt", "--text=good.txt"], "good.txt is a file; init takes the folder"),
    (["done", "--text=good.txt"], "is there already: give another folder, or --force"),
    (["several"], "in several lie several texts (a.txt, b.csv, ...): choose by --text=PATH"),
    (["m", "good.txt"], "'good.txt' is no flag"),
    (["m", "--txt=good.txt"], "there is no flag --txt; did you mean --text?"),
  ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(inside, capsys, arguments, says):
  write("good.txt")
  write("short.txt", "To be")
  write("latin.txt", LATIN.encode("latin-1"))
  write("later.txt", TEXT[: TEXT.index("\n") + 1].encode() + LATIN.encode("latin-1"))
  write("broken.txt.gz", gzip.compress(TEXT.encode())[:-9])
  write("two.jsonl", json.dumps({"a": TEXT, "b": TEXT}))
  write("head.csv", "text\rother,b\nx,y\n")
  write("broken.jsonl", '{"text": "x"}\n{"text": \n')
  write("list.jsonl", "[1]\n")
  write("done/train.gin", "")
  write("several/a.txt")
  write("several/b.csv")
  (inside / "empty").mkdir()
  with pytest.raises(SystemExit) as end:
    run(*arguments)
  out, err = capsys.readouterr()
  assert end.value.code == 2 and out == "" and len(err.splitlines()) == 1
  assert err.startswith(f"{PROGRAM} init: ") and says in err
  assert not (inside / "m").exists()


def test_a_folder_that_cannot_be_written_to(inside, capsys, monkeypatch):
  write("a.txt")

  def refuse(*args, **kwargs):
    raise PermissionError(13, "Permission denied", "m")

  monkeypatch.setattr(init.os, "makedirs", refuse)
  with pytest.raises(SystemExit) as end:
    run("m", "--text=a.txt")
  assert end.value.code == 4
  assert "init: m cannot be written: Permission denied" in capsys.readouterr().err


def test_force_writes_over(inside):
  run("m", f"--text={write('a.txt')}")
  run("m", f"--text={write('b.txt')}", "--vocabulary=bytes", "--force")
  found = settings("m")
  assert found["own_text.path"] == str(inside / "b.txt") and found["run.vocabulary"] == "bytes"


def test_which_files_of_a_folder_are_text(inside):
  """By their suffixes, below compression; nothing that is hidden, and not the model's folder."""
  for name in ("t/a.txt", "t/b.MD", "t/deep/c.text", "t/deep/er/d.ndjson.txt"):
    write(name)
  for name in ("t/e.txt.gz", "t/F.TXT.gz"):
    write(name, gzip.compress(TEXT.encode(), mtime=0))
  for name in (
    "t/.hidden.txt",
    "t/.git/x.txt",
    "t/g.bin",
    "t/h",
    "t/i.gz",
    "t/j.bin.gz",
    "t/k.txt.bin",
  ):
    write(name, b"\xff")
  run("m", "--text=t")
  assert f"{6 * len(TEXT):,} characters" in pathlib.Path("m/README.md").read_text()
  run("n", "--text=t/**/*.t*xt")
  assert settings("n")["own_text.path"] == str(inside / "t/**/*.t*xt")
  assert f"{3 * len(TEXT):,} characters" in pathlib.Path("n/README.md").read_text()
  write("z/model/a.txt", b"\xff")  # Not the folder of a model: only that of init has one.
  write("p/a.txt.gz", gzip.compress(TEXT.encode(), mtime=0))
  write("p/b.txt.gz", gzip.compress(TEXT.encode(), mtime=0))
  run("p")
  assert settings("p")["own_text.path"] == str(inside / "p" / "*.txt.gz")
  with pytest.raises(SystemExit):
    run("q", "--text=z")


def test_the_first_of_several_texts_are_named(inside, capsys):
  for name in "abcd":
    write(f"m/{name}.{'csv' if name == 'd' else 'txt'}")
  with pytest.raises(SystemExit):
    run("m")
  assert "in m lie several texts (a.txt, b.txt, c.txt, ...): choose" in capsys.readouterr().err
  for name in "ab":
    write(f"n/{name}.md")
  with pytest.raises(SystemExit):
    run("n")


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_of_a_large_text_the_beginning_is_read(inside, capsys, name):
  """16 Mi characters; then its bytes count, three times if it is compressed."""
  line = "\u00e9" * 99_999 + "\n"

  def written(characters):
    data = (line * (characters // len(line))).encode()
    write(name, data if name == "a.txt" else gzip.compress(data, 1, mtime=0))
    return os.path.getsize(name) * (1 if name == "a.txt" else 3)

  size = written(17_100_000)
  run("m", f"--text={name}", "--vocabulary=bytes")
  assert f"{size:,} characters" in capsys.readouterr().out
  written(16_500_000)
  run("n", f"--text={name}", "--vocabulary=bytes")
  assert "16,500,000 characters" in capsys.readouterr().out


def test_what_only_extras_read_is_measured_by_its_size(inside, capsys):
  for name, characters in (("a.txt.zst", 15_000), ("b.parquet", 5_000), ("c.jsonl.zst", 15_000)):
    write(name, b"\xff" * 5_000)
    run(f"of_{name}", f"--text={name}", "--vocabulary=bytes")
    assert f"{characters:,} characters" in capsys.readouterr().out
  write("d/a.txt.zst", b"\xff" * 5_000)
  write("d/b.txt")
  run("of_both", "--text=d", "--vocabulary=bytes")
  assert f"{15_000 + len(TEXT):,} characters" in capsys.readouterr().out


def test_a_field_is_named_for_all_files_but_plain_text(inside):
  rows = "".join(json.dumps({"n": i, "body": TEXT[:400]}) + "\n" for i in range(9))
  for name in ("one/a.jsonl", "two/a.jsonl", "two/b.jsonl", "both/a.jsonl"):
    write(name, rows)
  write("both/b.txt")
  for folder in ("one", "two", "both"):
    run(f"of_{folder}", f"--text={folder}")
    assert settings(f"of_{folder}")["own_text.field"] == "body"
  write("text/a.jsonl", rows.replace("body", "text"))
  run("of_text", "--text=text")
  assert settings("of_text")["own_text.field"] is None


def test_a_text_has_to_have_the_pieces(inside, capsys, monkeypatch):
  """Four characters for each."""
  monkeypatch.setattr(init, "_has_sentencepiece", lambda: True)
  write("a.txt", TEXT[:1600])
  run("m", "--text=a.txt", "--vocabulary=sentencepiece:400")
  capsys.readouterr()
  with pytest.raises(SystemExit):
    run("n", "--text=a.txt", "--vocabulary=sentencepiece:401")
  assert "take at most sentencepiece:400" in capsys.readouterr().err
  write("b.txt", TEXT[:1199])
  with pytest.raises(SystemExit):
    run("n", "--text=b.txt", "--vocabulary=sentencepiece:300")
  assert "take characters or bytes" in capsys.readouterr().err
