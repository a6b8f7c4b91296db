"""Names of the arguments and variables of a function of TensorFlow."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import ArgumentError
from mesh_tensorflow.importing.own_names import OwnNames, is_part


def callable_of(fn: Any) -> Callable[..., Any]:
  """Returns the callable to trace: of a tf.Module its `__call__`.

  Raises:
    ArgumentError: it cannot be called.
  """
  if not callable(fn):
    raise ArgumentError(
      "from_tensorflow: fn must be a tf.function, a Keras model, a tf.Module with __call__, or "
      f"another callable, got {type(fn).__name__}"
    )
  if hasattr(fn, "get_concrete_function"):
    return fn  # type: ignore[no-any-return]
  method = fn.__call__
  if isinstance(fn, tf.Module) and hasattr(method, "get_concrete_function"):
    return method  # type: ignore[no-any-return]
  # A function of its own: AutoGraph translates functions, not objects.
  return fn if inspect.isroutine(fn) else lambda *args, **kwargs: fn(*args, **kwargs)


def parameter_names(fn: Any, count: int) -> list[str]:
  """The names of the first parameters of a function.

  Args:
    fn: what the user gave: of a Keras model, `call` has the names.
    count: number of parameters.
  """
  called = getattr(fn, "call", fn)
  try:
    parameters = list(inspect.signature(called).parameters.values())
  except (TypeError, ValueError):
    parameters = []
  named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
  names = [p.name for p in parameters if p.kind in named]
  rest = [f"argument_{i}" for i in range(len(names), count)]
  return [*names, *rest][:count]


def named_leaves(name: str, structure: Any) -> Iterator[tuple[str, Any]]:
  """The leaves of a nested structure, in the order of `tf.nest.flatten`, with their paths.

  Args:
    name: of the whole.
    structure: dicts, tuples, lists, and leaves.
  """
  if isinstance(structure, Mapping):
    for key in sorted(structure):
      yield from named_leaves(f"{name}/{key}", structure[key])
  elif isinstance(structure, (list, tuple)):
    names = getattr(structure, "_fields", range(len(structure)))
    for key, part in zip(names, structure):
      yield from named_leaves(f"{name}/{key}", part)
  else:
    yield name, structure


def variable_paths(fn: Any, own: OwnNames) -> dict[int, tuple[str, bool]]:
  """Names of the variables of a model or module, and whether they are trained.

  Args:
    fn: what the user gave: a Keras model or layer, a tf.Module, a method of one, or a function.
    own: the names of its parts.

  Returns:
    By the id of the tf.Variable. Those that are found nowhere have the names that TensorFlow knows.
  """
  owner = getattr(fn, "__self__", fn)
  found: dict[int, tuple[str, bool]] = {}
  if isinstance(owner, tf.Module):
    _walk(owner, "", found, set())
  for v in (*_keras_variables(owner), *own.variables):
    found.setdefault(id(v.value), (own.of(v.path) if is_part(v) else v.path, bool(v.trainable)))
  return found


def _keras_variables(owner: Any) -> Sequence[Any]:
  """The variables of a Keras object: its own kind, which have a path and a value."""
  variables = getattr(owner, "variables", ()) if hasattr(owner, "call") else ()
  return [v for v in variables if hasattr(v, "path") and hasattr(v, "value")]


def _walk(value: Any, path: str, found: dict[int, tuple[str, bool]], seen: set[int]) -> None:
  """Enters the variables below an attribute of a module."""
  if id(value) in seen:
    return
  seen.add(id(value))
  if isinstance(value, tf.Variable):
    found[id(value)] = path, bool(value.trainable)
  elif isinstance(value, Mapping):
    for key, part in value.items():
      _walk(part, f"{path}/{key}", found, seen)
  elif isinstance(value, (list, tuple)):
    for i, part in enumerate(value):
      _walk(part, f"{path}/{i}", found, seen)
  elif isinstance(value, tf.Module):
    for key, part in vars(value).items():
      if not key.startswith("_self_"):
        _walk(part, f"{path}/{key}".lstrip("/"), found, seen)
