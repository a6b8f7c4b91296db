"""Files and modules that texts speak of are there: in docs, docstrings, comments, settings."""

from __future__ import annotations

import ast
import functools
import importlib
import io
import pathlib
import re
import tokenize

import pytest

from tests.conftest import ROOT

# In texts on what is not there: the guides for porting and configuration, the list of changes.
SAID_TO_BE_MISSING = {
  "mesh_tensorflow.bert",
  "mesh_tensorflow.transformer.moo",  # An example of a misspelt name.
}
PAPERS = ("*.md", "docs/*.md", "gin/**/*.gin", "Makefile", "*.yml", "setup.py", "pyproject.toml")
PROGRAMS = ("mesh_tensorflow", "transformer", "examples", "docs/tools", "benchmarks", "tests")
FOLDERS = "mesh_tensorflow|transformer|tests|docs|examples|gin|benchmarks|tpu_scripts"

_DOTTED = re.compile(r"\bmesh_tensorflow(?:\.\w+)+")
_PATH = re.compile(rf"(?<![\w/.-])(?:{FOLDERS})(?:/\w+)+(?:\.(?:py|md|gin|svg|sh|ipynb))?\b")

# Operations and variables of a model, as plans and profiles print them: no files.
_OF_MODELS = re.compile(r"transformer/(?:block_|softmax_|positional_embedding)")


def prose_of(text: str) -> str:
  """The docstrings and comments of a program."""
  found = []
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
      found.append(ast.get_docstring(node) or "")
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    if token.type == tokenize.COMMENT:
      found.append(token.string)
  return "\n".join(found)


def texts() -> dict[pathlib.Path, str]:
  found = {path: path.read_text() for pattern in PAPERS for path in ROOT.glob(pattern)}
  for folder in PROGRAMS:
    for path in (ROOT / folder).rglob("*.py"):
      text = path.read_text()
      # Most programs name only what they import: these need not be taken apart, which takes long.
      if path != pathlib.Path(__file__) and missing(text):
        found[path] = prose_of(text)
  return found


@functools.cache
def is_name(name: str) -> bool:
  """Whether a module is there, or what it has under a dotted name."""
  parts = name.split(".")
  for k in range(len(parts), 0, -1):
    try:
      value = importlib.import_module(".".join(parts[:k]))
    except ModuleNotFoundError as e:
      if not name.startswith(str(e.name)):
        return True  # The module is there; an extra that it needs is not.
      continue
    for attribute in parts[k:]:
      if not hasattr(value, attribute):
        return attribute in getattr(value, "__annotations__", {})
      value = getattr(value, attribute)
    return True
  return False


def is_path(path: str) -> bool:
  """Whether a file or folder is there, by its path here or in the installed package."""
  installed = ("", "mesh_tensorflow/", "mesh_tensorflow/transformer/")
  return any((ROOT / path.removeprefix(prefix)).exists() for prefix in installed)


def missing(text: str) -> list[str]:
  """Modules and paths in a text that are nowhere."""
  names = {m[0] for m in _DOTTED.finditer(text) if not m[0].endswith((".py", ".md"))}
  found = [n for n in sorted(names - SAID_TO_BE_MISSING) if not is_name(n)]
  paths = sorted(m for m in {m[0] for m in _PATH.finditer(text)} if not _OF_MODELS.match(m))
  return found + [p for p in paths if not is_path(p)]


def test_what_texts_speak_of_is_there():
  found = {str(path.relative_to(ROOT)): missing(text) for path, text in texts().items()}
  assert {path: names for path, names in found.items() if names} == {}


def test_there_is_something_to_check():
  papers = "\n".join(path.read_text() for path in ROOT.glob("docs/*.md"))
  assert len(set(_DOTTED.findall(papers))) > 10
  assert len({m[0] for m in _PATH.finditer(papers)}) > 10
  assert prose_of("x = 1  # of y\ndef f():\n  'Doc.'\n").splitlines() == ["", "Doc.", "# of y"]


@pytest.mark.parametrize(
  ("text", "found"),
  [
    ("see mesh_tensorflow/layers/dense.py and `mesh_tensorflow.layers.dense`.", []),
    ("see mesh_tensorflow/dense.py.", ["mesh_tensorflow/dense.py"]),
    ("`mesh_tensorflow.dense` is", ["mesh_tensorflow.dense"]),
    ("mesh_tensorflow.ops.Graph.nothing", ["mesh_tensorflow.ops.Graph.nothing"]),
    ("in `transformer/modes` and `transformer/nodes`", ["transformer/nodes"]),
    ("mesh_tensorflow/transformer/main.py, gin/defaults.gin, gin/none.gin", ["gin/none.gin"]),
    ("transformer/block_000/layer_000/einsum, transformer/blocks", ["transformer/blocks"]),
    ("there is no mesh_tensorflow.bert yet; my_gin/models/x.gin", []),
  ],
)
def test_missing(text, found):
  assert missing(text) == found
