"""Every public name has a docstring that says something."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re

import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow import beam_search, checkpoint, test_utils

# What users import from. The Transformer package has tests of its own.
FACES = [
  mtf,
  mtf.ops_with_redefined_builtins,
  mtf.initializers,
  mtf.layers,
  mtf.optimize,
  mtf.placement_mesh_impl,
  mtf.simd_mesh_impl,
  mtf.tpu_variables,
  mtf.utils,
  beam_search,
  checkpoint,
  test_utils,
]


def _is_ours(value) -> bool:
  return getattr(value, "__module__", "").split(".")[0] == "mesh_tensorflow"


def public_names() -> dict[str, object]:
  """Functions and classes by the shortest name under which they are reached."""
  found: dict[int, tuple[str, object]] = {}
  for face in FACES:
    prefix = face.__name__.replace("mesh_tensorflow", "mtf")
    # A module shows what it defines or lists; a package what it imports, too.
    listed = getattr(face, "__all__", None)
    for name, value in sorted(vars(face).items()):
      if name.startswith("_") or not _is_ours(value) or not callable(value):
        continue
      if (
        (name in listed)
        if listed
        else (hasattr(face, "__path__") or value.__module__ == face.__name__)
      ):
        found.setdefault(id(inspect.unwrap(value)), (f"{prefix}.{name}", value))
  return dict(found.values())


NAMES = public_names()
FUNCTIONS = {n: v for n, v in NAMES.items() if not inspect.isclass(v)}
CLASSES = {n: v for n, v in NAMES.items() if inspect.isclass(v)}


def public_members(cls) -> dict[str, object]:
  """Methods and properties that the class itself defines."""
  return {
    name: value
    for name, value in vars(cls).items()
    if not name.startswith("_")
    and (
      inspect.isfunction(value)
      or isinstance(value, (property, classmethod, staticmethod))
      or hasattr(value, "__wrapped__")
    )
  }


def parameters(value) -> list[str]:
  return [
    name
    for name, p in inspect.signature(value).parameters.items()
    if name not in ("self", "cls") and not name.startswith("_")
  ]


def problems(doc: str | None, arguments=()) -> list[str]:
  """What is wrong with a docstring."""
  if not doc or not doc.strip():
    return ["no docstring"]
  found = []
  summary = inspect.cleandoc(doc).splitlines()[0]
  if not summary.endswith((".", ":")):
    found.append(f"the first line does not end with a period: {summary!r}")
  if len(re.findall(r"\w+", summary)) < 2:
    found.append(f"the first line says nothing: {summary!r}")
  found += [f"does not mention {a}" for a in arguments if not re.search(rf"\b{a}\b", doc)]
  return found


def test_there_is_something_to_check():
  assert len(FUNCTIONS) > 150 and len(CLASSES) > 60


def documentation(value) -> str:
  """The docstring, and that of what it refers to: "arguments as `reduce_sum`", "see `pad`"."""
  doc, done = value.__doc__ or "", {value.__name__}
  todo = [doc]
  while todo:
    for name in re.findall(r"\b(?:as|see) `(\w+)`", todo.pop(), re.IGNORECASE):
      referred = [v for n, v in NAMES.items() if n.split(".")[-1] == name]
      if referred and name not in done:
        done.add(name)
        todo.append(referred[0].__doc__ or "")
        doc += todo[-1]
  return doc


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_function(name):
  assert problems(documentation(FUNCTIONS[name]), parameters(FUNCTIONS[name])) == []


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_class(name):
  cls = CLASSES[name]
  constructor = vars(cls).get("__init__")
  exempt = issubclass(cls, BaseException) or constructor is None
  assert problems(documentation(cls), [] if exempt else parameters(constructor)) == []


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_members(name):
  """A method's docstring may be that of the method it overrides."""
  cls = CLASSES[name]
  wrong = {}
  for member in public_members(cls):
    found = problems(inspect.getdoc(getattr(cls, member)))
    if found:
      wrong[member] = found
  assert wrong == {}


def test_modules():
  wrong = []
  for info in pkgutil.walk_packages(mtf.__path__, "mesh_tensorflow."):
    if not info.name.startswith("mesh_tensorflow.transformer."):
      if problems(importlib.import_module(info.name).__doc__):
        wrong.append(info.name)
  assert wrong == []
