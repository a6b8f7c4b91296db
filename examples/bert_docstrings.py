"""Writes text and tasks for a tiny BERT: of the docstrings of Python's standard library.

  python -m mesh_tensorflow.examples.bert_docstrings --output_dir=docstrings

train.txt and eval.txt are for the pretraining: a module is a document, a paragraph a line. cola/
has a task for run_classifier: are the words of a sentence in order? squad_train.json and
squad_dev.json are for run_squad. docs/bert.md says what came of them.
"""

from __future__ import annotations

import argparse
import ast
import json
import pathlib
import random
import re
import sysconfig
from typing import Any

_LEFT_OUT = {"test", "tests", "site-packages", "idlelib", "lib2to3", "turtledemo"}
_EVALUATED = 12  # Every so manieth document.
_FACTS = ("It was written by {}.", "It is of version {}.")
_QUESTIONS = ("Who was it written by?", "Which version is it of?")


def documents() -> list[str]:
  """The docstrings of each module that has several paragraphs, a paragraph a line."""
  root = pathlib.Path(sysconfig.get_paths()["stdlib"])
  found = []
  for path in sorted(root.rglob("*.py")):
    if _LEFT_OUT.intersection(path.parts):
      continue
    try:
      tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
      continue
    lines = []
    for node in ast.walk(tree):
      if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
        paragraphs = (ast.get_docstring(node) or "").split("\n\n")
        lines += [" ".join(p.split()) for p in paragraphs if p.strip()]
    if len(lines) > 1:
      found.append("\n".join(lines))
  return found


def sentences(texts: list[str]) -> list[str]:
  """The sentences of five to sixteen words, each once."""
  found = set()
  for line in "\n".join(texts).splitlines():
    for sentence in re.split(r"(?<=[.]) ", line.strip()):
      if 5 <= len(sentence.split()) <= 16 and sentence[0].isupper() and sentence.endswith("."):
        found.add(sentence)
  return sorted(found)


def in_order_or_not(given: list[str], count: int, rng: random.Random) -> list[tuple[str, str]]:
  """(label, sentence): 1 if its words are in order, 0 if they were shuffled, in turn."""
  rows = []
  for i, sentence in enumerate(rng.sample(given, min(count, len(given)))):
    words = sentence.split()
    while i % 2 and " ".join(words) == sentence and len(set(words)) > 1:
      rng.shuffle(words)
    rows.append((str(1 - i % 2), " ".join(words)))
  return rows


def questions(given: list[str], count: int, rng: random.Random) -> dict[str, Any]:
  """Questions of SQuAD 2.0's form, three of ten without an answer."""
  short = [s for s in given if len(s) < 90]
  words = sorted({w.strip(".,").lower() for s in given for w in s.split()})
  words = [w for w in words if w.isalpha() and len(w) > 3]
  paragraphs = []
  for i in range(count):
    values = (rng.choice(words), str(rng.randrange(10, 99)))
    facts = [fact.format(value) for fact, value in zip(_FACTS, values)]
    asked, is_impossible = rng.randrange(2), rng.random() < 0.3
    parts = rng.sample(short, 2)
    parts += [f for j, f in enumerate(facts) if not (is_impossible and j == asked)]
    rng.shuffle(parts)
    context, answers = " ".join(parts), []
    if not is_impossible:
      start = context.index(facts[asked]) + len(_FACTS[asked].split("{")[0])
      answers = [{"text": values[asked], "answer_start": start}]
    qa = {"id": f"q{i}", "question": _QUESTIONS[asked], "answers": answers}
    paragraphs.append({"context": context, "qas": [{**qa, "is_impossible": is_impossible}]})
  return {"version": "v2.0", "data": [{"title": "docstrings", "paragraphs": paragraphs}]}


def main(argv: list[str] | None = None) -> None:
  """Writes the files."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--output_dir", default="docstrings", help="folder to write")
  folder = pathlib.Path(parser.parse_args(argv).output_dir)
  (folder / "cola").mkdir(parents=True, exist_ok=True)
  found = documents()
  rng = random.Random(0)
  parts = {
    "train": (4000, 2000, [d for i, d in enumerate(found) if i % _EVALUATED]),
    "dev": (400, 200, found[::_EVALUATED]),
  }
  for name, (rows, asked, texts) in parts.items():
    text = folder / ("train.txt" if name == "train" else "eval.txt")
    text.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    given = sentences(texts)
    lines = [f"docstrings\t{label}\t\t{s}" for label, s in in_order_or_not(given, rows, rng)]
    (folder / "cola" / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    content = json.dumps(questions(given, asked, rng))
    (folder / f"squad_{name}.json").write_text(content, encoding="utf-8")
    print(f"{name}: {len(texts)} documents, {len(given)} sentences for tasks")


if __name__ == "__main__":
  main()
