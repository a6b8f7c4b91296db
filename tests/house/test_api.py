"""The package beside the API of the TF1 library, name for name.

The list of names is not part of the repository: these tests skip where it is absent.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import io
import json
import pkgutil
import re
import types

import pytest

from mesh_tensorflow import transformer

# The Transformer package is added to these, but for the folder of its gin files, which has no
# `__init__.py`: test_packaging.py looks for what is in it.
MODULES = [
  "mesh_tensorflow",
  "mesh_tensorflow.beam_search",
  "mesh_tensorflow.layers",
  "mesh_tensorflow.ops",
  "mesh_tensorflow.ops_with_redefined_builtins",
  "mesh_tensorflow.optimize",
  "mesh_tensorflow.placement_mesh_impl",
  "mesh_tensorflow.simd_mesh_impl",
  "mesh_tensorflow.test_utils",
  "mesh_tensorflow.tpu_variables",
  "mesh_tensorflow.utils",
]
TRANSFORMER = "mesh_tensorflow.transformer"


@pytest.fixture(scope="module")
def differences(shared_data, tmp_path_factory) -> list[tuple[str, str, str]]:
  """(MISSING or CHANGED, kind, text) of everything in `MODULES`."""
  reference = shared_data.parent / "reference" / "api.json"
  tool = shared_data.parent / "tools" / "extract_api.py"
  if not reference.is_file() or not tool.is_file():
    pytest.skip(f"no list of the API: {reference}")
  spec = importlib.util.spec_from_file_location("extract_api", tool)
  extract_api = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(extract_api)
  whole = json.loads(reference.read_text())
  wanted = MODULES + [
    m for m in whole["modules"] if m.startswith(TRANSFORMER) and m != f"{TRANSFORMER}.gin"
  ]
  # All modules: a name may be defined in any of them and be re-exported. In a checkout the
  # Transformer package is not in the folder of the others.
  names = {n for n in extract_api._list_modules("mesh_tensorflow") if TRANSFORMER not in n}
  names |= {m.name for m in pkgutil.walk_packages(transformer.__path__, f"{TRANSFORMER}.")}
  entries = {}
  for name in sorted(names | {TRANSFORMER}):
    entries[name] = extract_api._module_entry(importlib.import_module(name), "mesh_tensorflow")
    entries[name]["flags"] = extract_api._flags_of(name)
    for class_name, entry in entries[name].get("classes", {}).items():
      _add_inherited_methods(entry, getattr(importlib.import_module(name), class_name), extract_api)
  ours = {"modules": entries, "gin": extract_api._gin_entries("mesh_tensorflow")}
  theirs = {
    "modules": {name: whole["modules"][name] for name in wanted},
    # Some stand under the name of a class, whose module is not among them.
    "gin": {
      key: entry
      for key, entry in whole["gin"].items()
      if entry["object"].startswith(tuple(f"{m}." for m in wanted))
    },
  }
  assert len(theirs["modules"]) > 25 and len(theirs["gin"]) == 137
  files = types.SimpleNamespace(names_only=False, ignore_dunders=False)
  for name, content in [("reference", theirs), ("candidate", ours)]:
    path = tmp_path_factory.mktemp("api") / f"{name}.json"
    path.write_text(json.dumps(content))
    setattr(files, name, path)
  with contextlib.redirect_stdout(io.StringIO()) as printed:
    extract_api.diff(files)
  lines = printed.getvalue().splitlines()
  assert re.fullmatch(r"missing \d+, changed \d+", lines.pop())
  return [tuple(line.split(None, 2)) for line in lines if line]


def _add_inherited_methods(entry, cls, extract_api) -> None:
  """A method that a base class has now is there, and changes no less than one of the class."""
  for base in cls.__mro__[1:]:
    if not base.__module__.startswith("mesh_tensorflow"):
      continue
    for name, method in vars(base).items():
      if inspect.isfunction(method) and (name.startswith("__") or not name.startswith("_")):
        group = entry.setdefault("dunders" if name.startswith("__") else "methods", {})
        group.setdefault(name, extract_api._fmt_signature(method))


def test_no_name_is_missing(differences):
  assert [d for d in differences if d[0] != "CHANGED"] == []


def _arguments(signature: str) -> set[str]:
  return set(re.findall(r"[(,] ?\*{0,2}([a-z]\w*)", signature))


def test_the_porting_guide_explains_every_changed_signature(differences, repository):
  guide = (repository / "docs" / "porting.md").read_text()
  table = guide.split("\n## Changed signatures\n")[1].split("\n## ")[0]
  rows = dict(re.findall(r"^\| `([\w.-]+)` \| (.*) \|$", table, re.MULTILINE))
  changed = {}
  for tag, _, text in differences:
    if tag == "CHANGED":
      name, signatures = text.split(" ", 1)
      old, new = signatures.split(" -> ")
      name = re.sub(r"^mesh_tensorflow\.(ops\.)?", "", name)
      changed[name] = _arguments(new) - _arguments(old)
  assert {"in the guide only": set(rows) - set(changed), "not there": set(changed) - set(rows)} == {
    "in the guide only": set(),
    "not there": set(),
  }
  for name, new_arguments in changed.items():
    for argument in new_arguments - {"self"}:
      assert f"`{argument}`" in rows[name], f"{name}: the guide does not name {argument}"
