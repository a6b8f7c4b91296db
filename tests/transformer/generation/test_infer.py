"""The mode "infer" of a language model: files that are gone on with, prompts, a conversation."""

from __future__ import annotations

import io
import json
import logging
import os
import signal

import gin
import pytest

from mesh_tensorflow import errors, exit_codes
from mesh_tensorflow.transformer.generation import texts as continued_texts
from mesh_tensorflow.transformer.generation.files import ResumableFile
from mesh_tensorflow.transformer.modes import infer_files
from tests.transformer import small_lm

NEVER_END = "Unitransformer.sample_autoregressive.never_end = True"
PROMPTS = ["To be", "", "  or", "Whether 'tis nobler", "W", "that is", "the mind", "a", "question"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A folder with a language model of two steps."""
  folder = tmp_path_factory.mktemp("lm")
  small_lm.run(folder, text=small_lm.TEXT)
  yield folder
  gin.clear_config()


@pytest.fixture
def small_blocks(monkeypatch):
  monkeypatch.setattr(infer_files, "_BATCHES", 1)
  return ("sample.batch_size = 2", "sample.num_samples = 2")


def infer(folder, *bindings):
  return small_lm.run(folder, "run.mode = 'infer'", *bindings)


def asked(folder, name):
  (folder / "in").write_text("".join(p + "\n" for p in PROMPTS))
  return (
    f"decode_from_file.input_filename = '{folder}/in'",
    f"decode_from_file.output_filename = '{folder}/{name}'",
  )


@pytest.mark.slow
def test_an_interrupted_file_becomes_that_of_a_whole_run(folder, small_blocks, monkeypatch, capsys):
  number = signal.SIGTERM
  infer(folder, *asked(folder, "whole"), *small_blocks)
  whole = (folder / "whole-2").read_text()
  assert whole.count("\n") == 2 * len(PROMPTS)
  append = ResumableFile.append

  def interrupted(file, lines):
    append(file, lines)
    if file.done >= 8:
      os.kill(os.getpid(), number)

  monkeypatch.setattr(ResumableFile, "append", interrupted)
  kept = rf"stopped by {number.name}; 8 of 18 lines are kept. The same command goes on from there"
  with pytest.raises(errors.StoppedError, match=kept) as caught:
    infer(folder, *asked(folder, f"again{number}"), *small_blocks)
  assert exit_codes.of_error(caught.value) == exit_codes.STOPPED
  assert not (folder / f"again{number}-2").exists()
  assert (folder / f"again{number}-2.unfinished").read_text() == "".join(whole.splitlines(True)[:8])
  monkeypatch.undo()
  monkeypatch.setattr(infer_files, "_BATCHES", 1)
  capsys.readouterr()
  infer(folder, *asked(folder, f"again{number}"), *small_blocks)
  printed = capsys.readouterr().out
  assert "8 of 18 lines are there: going on with" in printed
  assert "10 lines decoded in" in printed and "tokens/s: " in printed
  assert (folder / f"again{number}-2").read_text() == whole
  assert not (folder / f"again{number}-2.progress").exists()


def test_the_seed_decides_and_the_batch_does_not(folder):
  lines = {}
  for name, bindings in {
    "a": ["sample.batch_size = 3"], "b": ["sample.batch_size = 7"], "c": ["sample.seed = 1"],
    "d": ["sample.temperature = 0.0"],
  }.items():  # fmt: skip
    infer(folder, *asked(folder, name), NEVER_END, *bindings)
    lines[name] = (folder / f"{name}-2").read_text().splitlines()
  assert lines["a"] == lines["b"] != lines["c"]
  assert lines["d"] not in (lines["a"], lines["c"])
  for made in lines.values():
    assert [text.startswith(p) for text, p in zip(made, PROMPTS)] == [True] * len(PROMPTS)
    assert {len(text) for text in made} == {24}


class _Onto(logging.Handler):
  """Writes what is logged where texts are shown, as a terminal does."""

  def emit(self, record):
    print(record.getMessage(), flush=True)


@pytest.mark.parametrize("texts", [["To be\u20ac"], ["To", "b\u20ace", "q\xe9"]])
def test_a_warning_of_prompts_stands_before_all_texts(folder, texts, capsys):
  handler = _Onto()
  logging.getLogger("mesh_tensorflow").addHandler(handler)
  try:
    infer(folder, f"sample.prompt = {texts!r}", "sample.max_tokens = 3", "sample.num_samples = 2")
  finally:
    logging.getLogger("mesh_tensorflow").removeHandler(handler)
  shown = capsys.readouterr().out
  assert "are left out" in shown
  assert shown.rindex("are left out") < shown.index("--- ") < shown.index(texts[0])


def test_prompts_on_the_screen_and_in_a_file(folder, capsys):
  prompts = ["To be", "\n  or"]
  infer(
    folder, f"sample.prompt = {prompts!r}", "sample.num_samples = 2",
    "sample.max_tokens = 60", NEVER_END,
    f"sample.output = '{folder}/texts.jsonl'",
  )  # fmt: skip
  records = [json.loads(line) for line in (folder / "texts.jsonl").read_text().splitlines()]
  assert [(r["prompt"], r["sample"]) for r in records] == [(p, j) for p in prompts for j in (0, 1)]
  # Of 24 positions: the window slides.
  assert [len(r["text"]) - len(r["prompt"]) for r in records] == [60] * 4
  printed = capsys.readouterr().out
  shown = "".join(
    f"--- prompt {1 + i // 2} of 2, sample {1 + i % 2} of 2\n{r['text']}\n"
    for i, r in enumerate(records)
  )
  assert f"\n{shown}4 text(s) of 240 tokens written in " in printed
  # One alone, and a stop string that comes in it.
  text = records[0]["text"]
  stop = text[25:28]
  infer(
    folder, "sample.prompt = 'To be'", "sample.max_tokens = 60", f"sample.stop = {stop!r}",
    NEVER_END, f"sample.output = '{folder}/texts.txt'",
  )  # fmt: skip
  cut = "To be" + text[5 : text.index(stop, 5)]
  assert (folder / "texts.txt").read_text() == f"{cut}\n---\n"
  assert f"\n{cut}\n1 text(s)" in capsys.readouterr().out


class Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_conversation(folder, stream, monkeypatch, capsys):
  monkeypatch.setattr("sys.stdin", stream("To be\n\nor \\\nnot\n" + "the"))
  infer(folder, "sample.interactive = True", "sample.max_tokens = 4")
  printed = capsys.readouterr().out.split("model.ckpt-2\n")[1]
  if stream is Terminal:
    help_line, _, printed = printed.partition("\n")
    assert "Ctrl-D" in help_line
    assert printed.count("> ") == 5
    printed = printed.replace("> ", "")
  texts = [p for p in ("To be", "or \nnot", "the") if f"{p}" in printed]
  assert texts == ["To be", "or \nnot", "the"]
  assert len(printed.replace("  ", "")) <= len("To be\nor \nnot\nthe\n") + 3 * 4


@pytest.mark.parametrize(
  ("binding", "error", "text"),
  [
    ("sample.prompt = ''", errors.ConfigError, "sample.prompt is empty"),
    ("sample.temperature = -1", errors.ConfigError, "sample.temperature = -1: it must be"),
    (f"sample.prompt = '{'T' * 24}'", errors.DataError,
     "a prompt has 24 ids, which leaves no room in sequences of 24; shorten it(\\n|$)"),
    ("sample.output = '/dev/null/x'", errors.StorageError, r"cannot write x in the folder /dev"),
  ],
)  # fmt: skip
def test_wrong_input_is_one_line(folder, binding, error, text):
  with pytest.raises(error, match=text) as caught:
    infer(folder, *(() if "prompt" in binding else ("sample.prompt = 'To'",)), binding)
  assert "\n" not in str(caught.value).split("\n  In call to")[0]


def test_few_programs_for_rows_of_all_lengths(monkeypatch):
  monkeypatch.setattr(continued_texts.TextGenerator, "longest", 96)
  rows = [continued_texts.Row(i, [3] * (i % 90), 1) for i in range(1000)]
  model = continued_texts.TextGenerator(None, None, None, None, {"targets": 96}, 16)
  groups = model._by_length(rows)
  assert sum(len(group) for _, group in groups) == 1000
  assert [length for length, _ in groups] == [8, 12, 16, 24, 32, 48, 64, 96]
  for length, group in groups:
    assert all(len(row.given) < length for row in group)
