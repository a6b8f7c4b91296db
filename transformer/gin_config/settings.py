"""Bindings of gin files and `--gin_param` with their locations, read before gin binds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from mesh_tensorflow.transformer.gin_config.names import MACRO, Macro, Place

Key = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class Setting:
  """One binding.

  Attributes:
    scope: scope; the name of a macro.
    selector: the whole selector of the configurable.
    argument: name of the argument.
    value: value, with `Reference`s and `Macro`s.
    place: where it stands.
    level: 0 is defaults.gin, n the n-th `--gin_file` with all that it includes; `--gin_param` comes
      after the last.
    files: the file that was given, ..., the file that includes this one, this one.
    name: as written.
    is_of_a_run: whether it stands in a file that a run has written: such a file binds everything,
      for others to change.
  """

  scope: str
  selector: str
  argument: str
  value: Any
  place: Place
  level: int
  files: tuple[str, ...]
  name: str
  is_of_a_run: bool = False

  @property
  def key(self) -> Key:
    return self.scope, self.selector, self.argument

  @property
  def is_macro(self) -> bool:
    return self.key[1:] == MACRO


class Settings:
  """All bindings in the order in which gin applies them; the last of a key is in force."""

  def __init__(self) -> None:
    self.all: list[Setting] = []
    self._of_key: dict[Key, list[Setting]] = {}

  def add(self, setting: Setting) -> None:
    self.all.append(setting)
    self._of_key.setdefault(setting.key, []).append(setting)

  def keys(self) -> list[Key]:
    return list(self._of_key)

  def in_force(self) -> list[Setting]:
    """The last binding of each key, in the order of the first ones."""
    return [bindings[-1] for bindings in self._of_key.values()]

  def history(self, key: Key) -> list[Setting]:
    """All bindings of a key, the one in force last."""
    return self._of_key.get(key, [])

  def exact(self, key: Key) -> Setting | None:
    """The binding of this very key, or None."""
    return self.history(key)[-1] if self.history(key) else None

  def find(self, scope: str, selector: str, argument: str) -> Setting | None:
    """The binding in force in a scope: that of the scope or of the nearest one around it."""
    for around in reversed(enclosing_scopes(scope)):
      setting = self.exact((around, selector, argument))
      if setting is not None:
        return setting
    return None

  def macro(self, name: str) -> Setting | None:
    """The binding of a macro, or None."""
    return self.exact((name, *MACRO))

  def overridden(self, setting: Setting) -> list[Setting]:
    """Earlier bindings of the same key to other values, the latest first; one for each place."""
    history = self.history(setting.key)
    before = history[: history.index(setting)] if setting in history else history
    found: list[Setting] = []
    for other in reversed(before):
      if other.value != setting.value and other.place not in [f.place for f in found]:
        found.append(other)
    return found

  def literal(self, value: Any, _names: tuple[str, ...] = ()) -> Any:
    """`value` with the values of its macros in their places; unknown macros stay."""
    if isinstance(value, Macro):
      bound = self.macro(value.name)
      # A macro that refers to itself stays, in place of an endless search.
      if bound is None or value.name in _names:
        return value
      return self.literal(bound.value, (*_names, value.name))
    if isinstance(value, dict):
      pairs = value.items()
      return {self.literal(k, _names): self.literal(v, _names) for k, v in pairs}
    if isinstance(value, (list, tuple)):
      return type(value)(self.literal(v, _names) for v in value)
    return value


def enclosing_scopes(scope: str) -> list[str]:
  """Scopes in which gin looks for bindings, the last one wins: "", "a", "a/b" for "a/b"."""
  parts = scope.split("/") if scope else []
  return ["/".join(parts[:n]) for n in range(len(parts) + 1)]


def parts_of(value: Any, kind: type) -> Iterator[Any]:
  """The parts of a value that are of a class: references, macros, texts."""
  if isinstance(value, kind):
    yield value
  elif isinstance(value, dict):
    for pair in value.items():
      for v in pair:
        yield from parts_of(v, kind)
  elif isinstance(value, (list, tuple)):
    for v in value:
      yield from parts_of(v, kind)


def mapped(value: Any, fn: Any) -> Any:
  """Applies `fn` to all leaves of nested containers."""
  if isinstance(value, dict):
    return {mapped(k, fn): mapped(v, fn) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return type(value)(mapped(v, fn) for v in value)
  return fn(value)


def short(value: Any, length: int = 60) -> str:
  """`value` as text, shortened for an error message."""
  text = repr(value)
  return text if len(text) <= length else text[: length - 3] + "..."
