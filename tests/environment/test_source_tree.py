"""A clone is imported as it lies: installed or not, and whatever else is installed."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import zipfile

import pytest

import mesh_tensorflow
from mesh_tensorflow.environment import source_tree

# The real package starts TensorFlow; what is to be seen here is how its parts find each other.
_INIT = "from {name} import source_tree\nsource_tree.find_parts_beside(__path__)\n"


@pytest.fixture
def clean_import(monkeypatch):
  """Imports as a new process would, with folders first on the path; then all is as it was."""
  modules = {n: m for n, m in sys.modules.items() if n.split(".")[0] == "mesh_tensorflow"}
  for name in modules:
    monkeypatch.delitem(sys.modules, name)
  monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not _is_ours(f)])

  def import_with(*path, name):
    monkeypatch.setattr(sys, "path", [*map(str, path), *sys.path])
    importlib.invalidate_caches()
    return importlib.import_module(name)

  yield import_with
  for name in [n for n in sys.modules if n.split(".")[0] == "mesh_tensorflow"]:
    del sys.modules[name]


def _is_ours(finder) -> bool:
  return type(finder).__name__ == "SourceTreeFinder"


def make_clone(root, word: str) -> None:
  """A tiny package of the same form as the repository; `word` tells clones apart."""
  for folder in ("mesh_tensorflow", "transformer", "examples"):
    (root / folder).mkdir(parents=True)
    (root / folder / "__init__.py").write_text(f"word = {word!r}\n")
  (root / "mesh_tensorflow" / "__init__.py").write_text(_INIT.format(name="mesh_tensorflow"))
  (root / "transformer" / "main.py").write_text(f"word = {word!r}\n")
  (root / "gin").mkdir()
  shutil.copy(source_tree.__file__, root / "mesh_tensorflow")


@pytest.mark.parametrize("part", ["transformer", "transformer.main", "examples", "transformer.gin"])
def test_parts_lie_beside(clean_import, tmp_path, part):
  make_clone(tmp_path, "here")
  module = clean_import(tmp_path, name=f"mesh_tensorflow.{part}")
  assert os.path.commonpath([*getattr(module, "__path__", []), tmp_path]) == str(tmp_path)
  assert getattr(module, "word", "here") == "here"
  assert module.__name__ == f"mesh_tensorflow.{part}"


def test_nothing_else_beside_becomes_a_part(clean_import, tmp_path):
  make_clone(tmp_path, "here")
  (tmp_path / "benchmarks").mkdir()
  (tmp_path / "benchmarks" / "__init__.py").write_text("")
  clean_import(tmp_path, name="mesh_tensorflow")
  with pytest.raises(ModuleNotFoundError):
    importlib.import_module("mesh_tensorflow.benchmarks")


@pytest.mark.parametrize("first", [False, True])
def test_a_clone_wins_over_another_that_is_installed(clean_import, tmp_path, first):
  """An editable install maps the names to its own clone; its finder comes last, as a rule."""
  make_clone(tmp_path / "a", "a")
  make_clone(tmp_path / "b", "b")
  other = source_tree.SourceTreeFinder(str(tmp_path / "b"))
  other.find_spec = lambda name, path=None, target=None: source_tree.PathFinder.find_spec(
    name, [str(tmp_path / "b")] if name.startswith("mesh_tensorflow.") else []
  )
  sys.meta_path.insert(0 if first else len(sys.meta_path), other)
  assert clean_import(tmp_path / "a", name="mesh_tensorflow.transformer").word == "a"


def test_in_a_wheel_the_parts_are_inside(clean_import, tmp_path):
  """What lies beside it there is somebody else's."""
  make_clone(tmp_path, "beside")
  inside = tmp_path / "mesh_tensorflow" / "transformer"
  inside.mkdir()
  (inside / "__init__.py").write_text("word = 'inside'\n")
  assert clean_import(tmp_path, name="mesh_tensorflow.transformer").word == "inside"
  assert not any(map(_is_ours, sys.meta_path))


def test_a_zipped_clone(clean_import, tmp_path):
  make_clone(tmp_path / "clone", "zipped")
  with zipfile.ZipFile(tmp_path / "clone.zip", "w") as archive:
    for file in (tmp_path / "clone").rglob("*.py"):
      archive.write(file, file.relative_to(tmp_path / "clone"))
  module = clean_import(tmp_path / "clone.zip", name="mesh_tensorflow.transformer.main")
  assert module.word == "zipped"


def test_this_repository_knows_its_parts(repository):
  """Those that setup.py maps."""
  text = (repository / "setup.py").read_text()
  for part in source_tree._PARTS:
    folder = part.rpartition(".")[2]
    assert f'"{part}": "{folder}"' in text and (repository / folder).is_dir()
  assert text.count('": "') - text.count('"mesh_tensorflow": "') == len(source_tree._PARTS)
  assert mesh_tensorflow.__version__
