"""Bindings of gin files and flags, with their locations, and the names in them."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import gin

from mesh_settings import hints
from mesh_tensorflow.errors import ConfigError

# Gin keeps the macro `d_model = 512` as the argument `value` of gin.macro in the scope `d_model`.
MACRO = ("gin.macro", "value")


@dataclasses.dataclass(frozen=True)
class Place:
  """Location of a statement: a file and a line, or `--gin_param` and its text."""

  source: str
  line: int | None = None
  text: str = dataclasses.field(default="", compare=False)

  def __str__(self) -> str:
    if self.line is not None:
      return f"{self.source}:{self.line}"
    return f"{self.source} {self.text!r}" if self.text else self.source


@dataclasses.dataclass(frozen=True)
class Reference:
  """`@scope/name` or `@scope/name()` in a value; equal if it means the same configurable."""

  name: str = dataclasses.field(compare=False)
  evaluate: bool
  scope: str = ""
  selector: str = ""

  def __repr__(self) -> str:
    return f"@{self.name}{'()' if self.evaluate else ''}"


@dataclasses.dataclass(frozen=True)
class Macro:
  """`%name` in a value."""

  name: str

  def __repr__(self) -> str:
    return f"%{self.name}"


class UnknownNameError(ConfigError):
  """Nothing configurable has this name; `skip_unknown` may allow that."""


def resolve_binding(scope: str, selector: str, argument: str, place: Place) -> str:
  """Resolves a shortened selector to the full one.

  Args:
    scope: the scope.
    selector: the selector as written ("utils.run").
    argument: the argument that is bound.
    place: for the error.

  Raises:
    UnknownNameError: there is no such configurable.
    ConfigError: several have this name, or it has no such parameter.
  """
  try:
    return str(gin.config.ParsedBindingKey.parse((scope, selector, argument)).complete_selector)
  except (ValueError, KeyError) as e:
    text = str(e)
  # Gin has one class of errors for all of these: only their texts tell them apart.
  if "doesn't have a parameter" in text:
    legal = parameters(selector)
    raise ConfigError(
      f"gin: {place}: {selector} has no parameter {argument!r}{did_you_mean(argument, legal)}"
      + (f" (it has {', '.join(legal)})" if len(legal) <= 12 else "")
    )
  if "allowlist" in text or "denylist" in text:
    raise ConfigError(
      f"gin: {place}: {selector}.{argument} cannot be bound: its caller always gives it"
    )
  raise _unresolved(text, selector, place)


def resolve_reference(reference: Reference, place: Place) -> Reference:
  """`reference` with its scope and whole selector; raises as `resolve_binding`."""
  *scopes, selector = reference.name.split("/")
  try:
    configurable = gin.config.ConfigurableReference(selector, False).configurable
  except (ValueError, KeyError) as e:
    raise _unresolved(str(e), selector, place) from None
  return dataclasses.replace(reference, scope="/".join(scopes), selector=configurable.selector)


def _unresolved(text: str, selector: str, place: Place) -> ConfigError:
  if "Ambiguous" in text:
    legal = [shortest(s) for s in _matches(text)]
    return ConfigError(
      f"gin: {place}: {selector!r} is ambiguous; write {' or '.join(sorted(legal))}"
    )
  if "without class name" in text:
    legal = re.findall(r"'([^']*)'", text)
    return ConfigError(f"gin: {place}: {selector!r} is a method; write {legal[-1]}.{legal[0]}")
  meant = hints.hint(similar_names(selector))
  return UnknownNameError(f"gin: {place}: nothing configurable is called {selector!r}{meant}")


def did_you_mean(name: str, legal: Iterable[str], cutoff: float = 0.6) -> str:
  """A "did you mean" suffix for an error about `name`; "" if nothing resembles it."""
  return hints.hint(similar(name, legal, cutoff))


def similar(name: str, legal: Iterable[str], cutoff: float = 0.6) -> list[str]:
  """Up to three names that resemble one: by their letters, or it is a part or initials of them."""
  names = sorted(set(legal))
  return (_by_letters(name, names, cutoff, 3) or _by_parts(name, names))[:3]


def _by_letters(name: str, names: Sequence[str], cutoff: float, most: int) -> list[str]:
  """Names that resemble one by their letters; first those in another case: "self_attention"."""
  same = [n for n in names if plain(n) == plain(name)]
  close = difflib.get_close_matches(name, names, n=most, cutoff=cutoff)
  return list(dict.fromkeys(same + close))


def _by_parts(name: str, names: Sequence[str]) -> list[str]:
  """Names with a part or initials: "adam" of AdamWeightDecayOptimizer, "lr" of learning_rate."""
  part = plain(name)
  if len(part) < 2:
    return []
  found = [n for n in names if len(part) > 2 and part in plain(n)]
  return found or [n for n in names if _initials(n).startswith(part)]


def plain(name: str) -> str:
  """Normalizes a name: lower case, without underscores."""
  return name.lower().replace("_", "")


def _initials(name: str) -> str:
  return "".join(part[0] for part in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", name)).lower()


def parameters(selector: str) -> list[str]:
  """The names of the parameters of a configurable that gin may bind."""
  configurable = gin.config.ConfigurableReference(selector, False).configurable
  names = inspect.signature(configurable.wrapped).parameters
  return [n for n in names if n != "self" and n not in (configurable.denylist or ())]


def required_parameters(selector: str) -> list[str]:
  """The names of the parameters of a configurable that must be bound or given."""
  wrapped = gin.config.ConfigurableReference(selector, False).configurable.wrapped
  return [n for n, p in inspect.signature(wrapped).parameters.items() if p.default is gin.REQUIRED]


def configurable_of(selector: str) -> Any:
  """The function or class that a selector stands for."""
  return gin.config.ConfigurableReference(selector, False).configurable.wrapped


def is_constant(name: str) -> bool:
  """True if `%name` is a constant defined by Python code, such as `%gin.REQUIRED`."""
  try:
    gin.query_parameter(name)
  except (ValueError, KeyError):
    return False
  return True


def similar_names(selector: str) -> list[str]:
  """Up to three names of configurables that resemble one which does not exist."""
  last = selector.rpartition(".")[2]
  names = _registered_names()
  # "optimize.Adam": by its letters it resembles all that is called ...Optimizer.
  part = plain(last)
  begins = _known([n for n in names if len(part) > 2 and plain(n).startswith(part)], selector)
  if begins:
    return begins[:3]
  for most in (3, 50):  # Many, if the nearest are of functions and classes that gin does not know.
    close = [n for x in (selector, last) for n in _by_letters(x, names, 0.6, most)]
    found = _known(close, selector)
    if found:
      return found[:3]
  return _known(_by_parts(last, names), selector)[:3]


def _known(names: Iterable[str], selector: str) -> list[str]:
  """Those names that gin knows, in their short form; with the module if `selector` has one."""
  wholes = [whole for name in names for whole in whole_selectors(name)]
  short = [".".join(w.split(".")[-2:]) if "." in selector else shortest(w) for w in wholes]
  return list(dict.fromkeys(short))


def _registered_names() -> list[str]:
  """Names of functions, classes and methods of the modules that use gin, registered or not.

  Gin has no public list of what is registered, so `whole_selectors` asks it for the near ones.
  """
  names = set()
  for module in list(sys.modules.values()):
    content = getattr(module, "__dict__", {})
    if content.get("gin") is not gin:
      continue
    for name, value in list(content.items()):
      if callable(value) and not name.startswith("_"):
        names.add(name)
        if inspect.isclass(value):
          names |= {f"{name}.{m}" for m, f in vars(value).items() if callable(f) and m[0] != "_"}
  return sorted(names)


def selectors_of(module: str) -> list[str]:
  """The whole selectors of the configurables that gin knows in a module or package.

  Args:
    module: as gin knows it, which need not be where they are written: what a
      `@gin.configurable(module=...)` says.
  """
  wholes = {whole for name in _registered_names() for whole in whole_selectors(name)}
  return sorted(w for w in wholes if w.rpartition(".")[0] == module)


def whole_selectors(name: str) -> list[str]:
  """Full selectors that a name matches: several if it is ambiguous, none if it is unknown."""
  try:
    configurable = gin.config.ConfigurableReference(name, False).configurable
  except KeyError as e:
    return _matches(str(e))
  except ValueError:
    return []
  return [configurable.selector]


def _matches(text: str) -> list[str]:
  """The selectors in gin's text "Ambiguous selector 'a', matches ['b.a', 'c.a']."."""
  return re.findall(r"'([^']*)'", text[text.index("matches") :].replace('"', "'"))


def shortest(whole: str) -> str:
  """The shortest unambiguous form of a full selector."""
  parts = whole.split(".")
  for n in range(1, len(parts)):
    if whole_selectors(".".join(parts[-n:])) == [whole]:
      return ".".join(parts[-n:])
  return whole


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

  def literal(self, value: object, _names: tuple[str, ...] = ()) -> Any:
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


def parts_of(value: object, kind: type) -> Iterator[Any]:
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


def mapped(value: object, fn: Callable[[Any], object]) -> Any:
  """Applies `fn` to all leaves of nested containers."""
  if isinstance(value, dict):
    return {mapped(k, fn): mapped(v, fn) for k, v in value.items()}
  if isinstance(value, (list, tuple)):
    return type(value)(mapped(v, fn) for v in value)
  return fn(value)


def short(value: object, length: int = 60) -> str:
  """`value` as text, shortened for an error message."""
  text = repr(value)
  return text if len(text) <= length else text[: length - 3] + "..."
