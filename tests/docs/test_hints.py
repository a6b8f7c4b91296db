"""`pip install` in messages and pages names what is missing itself.

`mesh-tensorflow` on the package index is the archived library: a hint that asks for it, or for an
extra of it, would install that one where this package is not.
"""

from __future__ import annotations

import ast
import re
import subprocess

import pytest

from tests.conftest import ROOT

PLACES = "mesh_tensorflow transformer mesh_transformer_cli examples benchmarks gin docs tpu_scripts"
# TensorFlow's other builds, of which one takes the place of another; and pip itself.
OTHERS = {"tensorflow-cpu", "tensorflow-tpu", "pip"}
# README.md tells what this would install.
TOLD = "`pip install mesh-tensorflow`, without a clone, gets another package"
NAME = re.compile(r"'?([A-Za-z][\w-]*)")


def texts() -> list[tuple[str, str]]:
  listed = subprocess.run(
    ["git", "ls-files", *PLACES.split(), "README.md"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  found = []
  for name in listed.stdout.splitlines():
    if name.endswith((".py", ".md", ".gin", ".sh", ".ipynb")):
      text = (ROOT / name).read_text(encoding="utf-8").replace(TOLD, "")
      # A text in several strings, one behind the other, is one.
      found.append((name, re.sub(r'"\s*\n\s*f?"', "", text)))
  return found


def installed_by(text: str) -> list[str]:
  """The packages that the `pip install`s of a text name, without extras and versions."""
  found = []
  for words in re.findall(r"pip install\s+([^`\n\";:,)&|\\]*)", text):
    for word in words.split():
      match = NAME.match(word)
      if match:
        found.append(match[1].lower())
      elif not word.startswith("-"):
        break  # A path, or what a program fills in.
  return found


def required() -> set[str]:
  """The packages that setup.py names: the strings of its requirements."""
  tree = ast.parse((ROOT / "setup.py").read_text())
  call = next(n for n in ast.walk(tree) if isinstance(n, ast.Call) and _called(n) == "setup")
  asked = [k.value for k in call.keywords if k.arg in ("install_requires", "extras_require")]
  lists = [n for node in asked for n in ast.walk(node) if isinstance(n, ast.List)]
  strings = [ast.literal_eval(e) for n in lists for e in n.elts]
  return {match[1].lower() for match in map(NAME.match, strings) if match}


def _called(call: ast.Call) -> str:
  return call.func.id if isinstance(call.func, ast.Name) else ""


def test_the_mechanism_itself():
  assert installed_by(
    "a (`pip install -q xprof 'x[y]>=2'`), b: pip install .; pip install ~/z"
  ) == [
    "xprof",
    "x",
  ]
  assert installed_by("pip install 'mesh-tensorflow[plot]'; draws") == ["mesh-tensorflow"]
  assert {"pyarrow", "tensorflow", "gin-config"} <= required()


@pytest.mark.parametrize(("name", "text"), texts(), ids=[name for name, _ in texts()])
def test_hints_name_packages_of_the_extras(name, text):
  for package in installed_by(text):
    assert package in required() | OTHERS, f"{name}: pip install {package}"
