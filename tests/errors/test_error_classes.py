"""Every error that the package raises is one of its typed errors: its source is searched."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import pathlib
import pickle
import sys

import pytest
import tensorflow as tf

import mesh_tensorflow
from mesh_tensorflow import errors

PACKAGE = pathlib.Path(mesh_tensorflow.__file__).parent
FILES = sorted(
  p for p in PACKAGE.rglob("*.py") if "transformer" not in p.relative_to(PACKAGE).parts
)

# What may be raised besides: (file, class) and why.
ALLOWED = {
  # Ends the other threads of a run in which one has failed; never leaves it.
  ("threads.py", "_Stopped"),
  # Becomes a CheckpointError in the writer, as what the file system raises does.
  ("snapshot.py", "OSError"),
  ("writer.py", "OSError"),
  # What the system says, or would say; the launcher prints it. It imports nothing of the package.
  ("own_network.py", "OSError"),
  # How a dict says that it has no such name, to the evaluation of an annotation.
  ("kinds.py", "KeyError"),
  # Ends a trace, outside of which a plan is made, and it is traced again.
  ("memory_check.py", "MayNotFitError"),
  # Of a file of TensorFlow's profiler: the report and `examples/read_profile.py` word it.
  ("profiling.py", "ProfileError"),
}


def _module_name(path: pathlib.Path) -> str:
  parts = path.relative_to(PACKAGE).with_suffix("").parts
  return ".".join(["mesh_tensorflow", *[p for p in parts if p != "__init__"]])


def _raises(node: ast.AST, function: ast.FunctionDef | None = None):
  """Pairs of the innermost function and a statement that raises something new."""
  if isinstance(node, ast.FunctionDef):
    function = node
  if isinstance(node, ast.Raise) and node.exc is not None:
    yield function, node
  for child in ast.iter_child_nodes(node):
    yield from _raises(child, function)


def _is_abstract(function: ast.FunctionDef | None) -> bool:
  """The body is a docstring and `raise NotImplementedError`."""
  if function is None:
    return False
  body = [
    s
    for s in function.body
    if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))
    and not isinstance(s, ast.Delete)
  ]
  return len(body) == 1


def _raised(what: ast.expr) -> list[str]:
  """Names of the classes that are raised (or of functions that make the error)."""
  if isinstance(what, ast.IfExp):
    return _raised(what.body) + _raised(what.orelse)
  called = what.func if isinstance(what, ast.Call) else what
  if isinstance(what, ast.Starred):
    return []  # Errors caught before.
  if getattr(called, "attr", getattr(called, "id", "")) == "told_to_all":
    return _raised(what.args[0])  # It returns what it is given.
  if isinstance(called, ast.Attribute):
    return [called.attr]
  assert isinstance(called, ast.Name), ast.dump(what)
  is_variable = called is what and what.id.islower()  # An error caught before.
  return [] if is_variable else [called.id]


def _problem(
  path: pathlib.Path, module, function: ast.FunctionDef | None, node: ast.Raise
) -> str | None:
  found = [_wrong(path, module, function, name) for name in _raised(node.exc)]
  return next((f"{path.relative_to(PACKAGE)}:{node.lineno}: {f}" for f in found if f), None)


def _wrong(path: pathlib.Path, module, function: ast.FunctionDef | None, name: str) -> str | None:
  if (path.name, name) in ALLOWED:
    return None
  if name == "NotImplementedError" and _is_abstract(function):
    return None
  if name == "AttributeError" and function is not None and function.name == "__getattr__":
    return None
  made = getattr(module, name, None) or getattr(builtins, name, None)
  if made is None:  # A method, perhaps.
    classes = [c for c in vars(module).values() if inspect.isclass(c)]
    made = next((vars(c)[name] for c in classes if name in vars(c)), None)
  if inspect.isfunction(made):  # A function that makes the error: its annotation tells.
    made = getattr(errors, str(made.__annotations__.get("return")), None)
  if inspect.isclass(made) and issubclass(made, errors.MeshError):
    return None
  return f"raise {name}"


def _narrows(test: ast.expr) -> bool:
  """Whether an assertion only tells a type checker what is so: a class, or that it is not None."""
  match test:
    case ast.Call(func=ast.Name(id="isinstance")):
      return True
    case ast.Compare(ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
      return True
  return False


def test_other_assertions_are_found():
  tests = [ast.parse(text, mode="eval").body for text in ("isinstance(x, A)", "x is not None")]
  assert all(map(_narrows, tests))
  others = [ast.parse(text, mode="eval").body for text in ("x > 0", "x is None", "x and y", "f(x)")]
  assert not any(map(_narrows, others))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_typed_errors_are_raised(path):
  tree = ast.parse(path.read_text())
  asserts = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Assert) and not _narrows(n.test)]
  assert not asserts, f"{path.name}: assert in lines {asserts}: raise a typed error"
  raised = list(_raises(tree))
  if raised:
    module = importlib.import_module(_module_name(path))
    problems = [_problem(path, module, function, node) for function, node in raised]
    assert not [p for p in problems if p]


def test_a_bare_raise_is_found():
  source = "def f(x):\n  def g():\n    if x:\n      raise ValueError('x')\n  return g\n"
  ((function, node),) = _raises(ast.parse(source))
  assert function.name == "g"
  assert _problem(PACKAGE / "program" / "graph.py", mesh_tensorflow, function, node) is not None


def test_every_error_class_derives_from_the_base():
  classes = [c for _, c in inspect.getmembers(errors, inspect.isclass)]
  assert len(classes) > 10
  assert all(issubclass(c, errors.MeshError) for c in classes)
  assert all(getattr(mesh_tensorflow, c.__name__) is c for c in classes)
  assert all(c.__doc__ for c in classes)


def test_text_of_a_key_error_is_not_quoted():
  assert str(errors.NotLoweredError("x was not lowered")) == "x was not lowered"


@pytest.mark.parametrize(
  "error", [c for _, c in inspect.getmembers(errors, inspect.isclass)], ids=lambda c: c.__name__
)
def test_autograph_keeps_the_class(error):
  @tf.function
  def program(x):
    if x is not None:
      raise error("one text")
    return x

  with pytest.raises(error, match="one text"):
    program(1)


def _is_of_module(cls, package):
  module = sys.modules.get(cls.__module__)
  return cls.__module__.startswith(package) and getattr(module, cls.__name__, None) is cls


@pytest.mark.parametrize("kind", [errors.CheckpointError, errors.ConfigError, errors.DataError])
def test_messages_about_what_people_hand_in_are_cut(kind):
  # Others are gin's, which makes a subclass, of the same module and name, of each error that passes
  # through a configurable.
  of_package = [c for c in kind.__subclasses__() if _is_of_module(c, "mesh_tensorflow")]
  for of in (kind, *of_package):
    assert str(of("x" * 1000)) == "x" * 1000
    text = str(of(f"a.json: key 'a' is {'7' * 100_000}: give a number"))
    assert len(text) <= 1000
    assert text.startswith("a.json: key 'a' is 777") and text.endswith("7: give a number")
    assert pickle.loads(pickle.dumps(of("y" * 2000))).args == ("y" * 2000,)
