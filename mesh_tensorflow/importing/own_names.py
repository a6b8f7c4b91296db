"""Names of the parts of a model without the counters of the process.

Keras calls the first Dense of a process "dense", the next one "dense_1": in the second model of a
process names begin where those of the first one ended. Here such numbers count within what is
imported, so that its names are the same in every process, and a layout that was written once always
fits. Names that were given are as they were, but where they look like one that Keras counts: those
of the class of what has them ("dense_7" of a Dense) count, too.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

_COUNTED = re.compile(r"(.+?)(?:_(\d+))?")


class OwnNames:
  """Names of parts and variables as in a process that has nothing but this model.

  Args:
    owner: a model, or a function that uses some.
    variables: paths of variables from which Keras makes those of an optimizer's.

  Attributes:
    variables: Keras' variables that the owner has, or uses.
  """

  def __init__(self, owner: Any, variables: Iterable[str] = ()):
    parts = _parts_of(owner)
    self.variables = [x for x in parts if hasattr(type(x), "assign") and hasattr(type(x), "path")]
    self._parts = _counted_among(parts)
    self._flat: list[tuple[str, str]] = []
    flat = [(path.replace("/", "_"), self.of(path).replace("/", "_")) for path in variables]
    self._flat = sorted(flat, key=lambda pair: -len(pair[0]))

  def of(self, path: str) -> str:
    """Renumbers the parts of a path, or of an operation's name, within this model.

    Args:
      path: names, joined by slashes.
    """
    return "/".join(map(self._part, path.split("/")))

  def _part(self, name: str) -> str:
    if name in self._parts:
      return self._parts[name]
    for path, own in self._flat:
      if name.startswith(f"{path}_"):  # "sequential_1_dense_3_kernel_momentum"
        return own + name[len(path) :]
    # TensorFlow counts scopes of one name: "dense_3_1" is where that layer is called again.
    again = _COUNTED.fullmatch(name)
    if again is not None and again[2] and again[1] in self._parts:
      return f"{self._parts[again[1]]}_{again[2]}"
    return name


def _counted_among(parts: Iterable[Any]) -> dict[str, str]:
  """Maps names with Keras' process-wide counters to names counted within this model."""
  numbers: dict[str, set[int]] = {}
  given: set[str] = set()
  for part in parts:
    name = getattr(part, "name", None)
    found = _COUNTED.fullmatch(name) if isinstance(name, str) else None
    if found is None:
      continue
    if _plain(found[1]) == _plain(type(part).__name__):
      numbers.setdefault(found[1], set()).add(int(found[2] or 0))
    else:
      given.add(found[0])
  own: dict[str, str] = {}
  for base, used in numbers.items():
    free = (n for i in range(len(used) + len(given)) if (n := _numbered(base, i)) not in given)
    own.update(zip((_numbered(base, n) for n in sorted(used)), free))
  return own


def _numbered(base: str, number: int) -> str:
  return f"{base}_{number}" if number else base


def _plain(name: str) -> str:
  """Normalizes a name: "multi_head_attention" and "MultiHeadAttention" become equal."""
  return re.sub(r"\W|_", "", name).lower()


def _parts_of(owner: Any) -> list[Any]:
  """Layers, metrics, optimizers and variables below an object."""
  seen: dict[int, Any] = {id(owner): owner}
  waiting = [owner, *_used_by(owner)]
  parts = []
  while waiting:
    x = waiting.pop()
    if isinstance(x, Mapping):
      inside: Collection[Any] = list(x.values())
    elif isinstance(x, (list, tuple, set, frozenset)):
      inside = list(x)
    elif x is owner or is_part(x):
      parts.append(x)
      inside = list(getattr(x, "__dict__", {}).values())
    else:
      continue
    for y in inside:
      if id(y) not in seen:
        seen[id(y)] = y
        waiting.append(y)
  return parts


def is_part(x: Any) -> bool:
  """True if it is a part of a model, so that its name may have Keras' counter."""
  kind = type(x)
  return hasattr(kind, "variables") or kind.__module__.partition(".")[0] == "keras"


def _used_by(owner: Any) -> list[Any]:
  """Objects in a function's closure and globals, and the object that a method is bound to."""
  function = getattr(owner, "python_function", owner)  # Of a tf.function.
  found = [getattr(function, "__self__", None)]
  try:
    names = inspect.getclosurevars(function)
  except (TypeError, ValueError):  # It is no function of Python's.
    return found
  return [*found, *names.nonlocals.values(), *names.globals.values()]
