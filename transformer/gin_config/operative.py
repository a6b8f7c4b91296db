"""The operative configuration as a gin file, with the origin of each value in a comment."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import gin
from gin import config_parser

from mesh_tensorflow.environment import collector
from mesh_tensorflow.transformer.gin_config import bindings as gin_names
from mesh_tensorflow.transformer.gin_config.bindings import (
  MACRO,
  Key,
  Macro,
  Place,
  Reference,
  Setting,
  Settings,
  enclosing_scopes,
  short,
)
from mesh_tensorflow.transformer.gin_config.reader import TextDelegate

_WIDTH = 100
_HEAD = """\
# Every value of this run; after it, what set it: the file and line, --gin_param, or the default of
# the function. Given back with --gin_file, it makes the same run.
"""
# Gin's heading of what a configurable was called with.
_CALLED = re.compile(r"^# Parameters for (\S+):$", re.MULTILINE)
_NOT_USED = """\
# Also bound: what a narrower scope above has taken over, and what this run has not used so far.
# {rule}
"""


@dataclasses.dataclass(frozen=True)
class _Statement:
  """A binding in a text that gin has written, and its line, counted from 1."""

  key: Key
  value: Any
  line: int


# What a run has found in place of what was bound ("auto"), and where it is from, in words.
_FOUND: dict[Key, tuple[Any, str | None]] = {}


def say_found(key: Key, value: object, why: str | None) -> None:
  """Records the value found for a parameter (mostly for "auto"); it becomes the operative value.

  Args:
    key: key of the parameter.
    value: a text or number.
    why: a text that says where the value comes from; None: it was bound, and is part of the result.
  """
  _FOUND[key] = (value, why)


def forget_found() -> None:
  """Clears the found values at the beginning of a new run."""
  _FOUND.clear()


def found_values() -> dict[str, Any]:
  """Values that this run has found for "auto", by the names of arguments."""
  return {argument: value for (_, _, argument), (value, _) in _FOUND.items()}


def _operative_text() -> str:
  """Gin's operative configuration, with the found values in place of "auto"."""
  text = str(gin.operative_config_str(max_line_length=_WIDTH))
  lines = text.split("\n")
  for statement in reversed(_statements(text)):
    if _FOUND.get(statement.key, ("", None))[1] is not None:
      first, last = statement.line - 1, _end(lines, statement)
      value = repr(_FOUND[statement.key][0])
      lines[first:last] = [f"{lines[first].split(' = ')[0]} = {value}"]
  return "\n".join(lines)


@collector.paused()
def operative_config_str(settings: Settings, paths: list[str]) -> str:
  """Gin's operative configuration, with the place of each value in a comment.

  What is bound but was not used so far stands in a section at the end, but for what defaults.gin
  binds: so the file can be given back for evaluation and decoding, too.

  Args:
    settings: all bindings that were read from files and `--gin_param`.
    paths: the files that were read.
  """
  operative = _operative_text()
  bound = gin.config_str(max_line_length=_WIDTH)
  used = _statements(operative)
  in_config = {s.key: s for s in _statements(bound)}
  writer = _Places(settings, in_config)
  used_keys = {s.key for s in used}
  rest = [s for s in in_config.values() if s.key not in used_keys and not writer.is_default(s)]
  files = "".join(f"#   {path}\n" for path in dict.fromkeys(paths))
  head = _HEAD + (f"# Read, in this order:\n{files}" if files else "")
  text = head + "\n" + "\n".join(writer.annotated(operative, used)).rstrip() + "\n"
  if rest:
    lines = bound.split("\n")
    text += "\n" + _NOT_USED.format(rule="=" * (_WIDTH - 2))
    for s in rest:
      text += "\n".join(writer.annotated("\n".join(lines[: _end(lines, s)]), [s])[s.line - 1 :])
      text += "\n"
  return text


@collector.paused()
def operative_values() -> tuple[dict[Key, Any], list[tuple[str, str]]]:
  """Values with which gin has called configurables so far.

  Returns:
    The values, defaults included, with macros replaced by their values; and (scope, full selector)
    of everything that was called, also without such values.
  """
  text = _operative_text()
  statements = {s.key: s.value for s in _statements(text)}
  # As if they had been read: to have macros replaced by their values.
  bound = Settings()
  for key, value in [
    *((s.key, s.value) for s in _statements(gin.config_str())),
    *statements.items(),
  ]:
    bound.add(Setting(*key, value, Place("gin"), 0, (), key[2]))
  values = {k: bound.literal(v) for k, v in statements.items() if k[1:] != MACRO}
  called = []
  for scoped in _CALLED.findall(text):
    scope, _, selector = scoped.rpartition("/")
    called.append((scope, _whole(selector)))
  return values, called


@collector.paused()
def places_of(settings: Settings, keys: Iterable[Key]) -> dict[Key, str]:
  """Describes the origin of each of some operative values.

  Args:
    settings: all bindings that were read.
    keys: of values that are in the operative configuration, or defaults that it does not show.
  """
  used = {s.key: s for s in _statements(gin.operative_config_str())}
  writer = _Places(settings, {s.key: s for s in _statements(gin.config_str())})
  other = "default, or given by the program"
  return {k: writer.place(used[k], history=False) if k in used else other for k in keys}


@collector.paused()
def bound_in_unused_scopes(settings: Settings) -> list[tuple[Setting, set[str]]]:
  """Bindings of given files for something that was called, but not in their scope.

  Such a binding has no effect; its scope is misspelt, or belongs to another model type.

  Returns:
    Settings, with the scopes in which what they are for was called ("" is none).
  """
  called: dict[str, set[str]] = {}
  for statement in _statements(gin.operative_config_str()):
    scope, selector, _ = statement.key
    called.setdefault(selector, set()).update(enclosing_scopes(scope))
  found = []
  for s in settings.in_force():
    scope, selector, _ = s.key
    if not scope or s.is_macro or s.level == 0 or s.is_of_a_run:
      continue
    if selector in called and scope not in called[selector]:
      found.append((s, called[selector]))
  return found


def _statements(text: str) -> list[_Statement]:
  parser = config_parser.ConfigParser(text, TextDelegate())
  found = []
  for statement in parser:
    if not isinstance(statement, config_parser.BindingStatement):
      continue
    scope, selector, argument = statement.scope, statement.selector, statement.arg_name
    if not argument:
      scope = f"{scope}/{selector}" if scope else selector
      selector, argument = MACRO
    at = statement.location.line_num
    selector = _whole(selector)
    value = gin_names.mapped(statement.value, _resolved)
    found.append(_Statement((scope, selector, argument), value, at))
  return found


def _resolved(value: object) -> Any:
  if not isinstance(value, Reference):
    return value
  *scopes, selector = value.name.split("/")
  return dataclasses.replace(value, scope="/".join(scopes), selector=_whole(selector))


def _whole(selector: str) -> str:
  """The whole selector of a name that gin has written.

  With dynamic registration that begins with the module, which need not be the registered one.
  """
  parts = selector.split(".")
  for n in range(len(parts)):
    found = gin_names.whole_selectors(".".join(parts[n:]))
    if len(found) == 1:
      return found[0]
  return selector


def _end(lines: list[str], statement: _Statement) -> int:
  """The number of the last line of a statement: a long one stands, indented, below its name."""
  at = statement.line
  if lines[at - 1].endswith(" = \\"):
    while at < len(lines) and lines[at].startswith(" "):
      at += 1
  return at


class _Places:
  """Writes the comments.

  Args:
    settings: all bindings that were read.
    in_config: all bindings that gin has; Python code may have made some.
  """

  def __init__(self, settings: Settings, in_config: dict[Key, _Statement]):
    self._settings = settings
    self._in_config = in_config

  def annotated(self, text: str, statements: list[_Statement]) -> list[str]:
    """The lines of `text` with a comment behind each statement, or above one of several lines."""
    lines = text.split("\n")
    for s in reversed(statements):
      comment = f"# {self.place(s)}"
      if lines[s.line - 1].endswith(" = \\"):
        # In front of the first line, as one line with it: line numbers stay those of gin's text.
        lines[s.line - 1] = f"{comment}\n{lines[s.line - 1]}"
      else:
        lines[s.line - 1] += f"  {comment}"
    return lines

  def is_default(self, s: _Statement) -> bool:
    """True if a binding still has the value that defaults.gin gives it."""
    read = self._settings.exact(s.key)
    return read is not None and read.level == 0 and read.value == s.value

  def place(self, s: _Statement, history: bool = True) -> str:
    """Locations that set a value and its macros; with `history` also those they override."""
    found = _FOUND.get(s.key)
    if found is not None and found[1] is not None:
      return found[1]
    scope, selector, argument = s.key
    parts = [self._origin(scope, selector, argument, history)]
    for name in self._macros(s.value):
      origin = self._origin(name, *MACRO, history)
      bound = self._in_config.get((name, *MACRO))
      if bound is not None:
        parts.append(f"{name} = {short(self._literal(bound.value), 40)}: {origin}")
    return "; ".join(parts)

  def _origin(self, scope: str, selector: str, argument: str, history: bool) -> str:
    """Location that set the value in force in a scope; "default" if nothing did."""
    for around in reversed(enclosing_scopes(scope) if selector != MACRO[0] else [scope]):
      key = (around, selector, argument)
      bound, read = self._in_config.get(key), self._settings.exact(key)
      if bound is None:
        continue
      if read is None or bound.value != read.value:
        return "set by Python code"
      before = self._settings.overridden(read) if history else []
      return str(_plain(read)) + (f", overrides {_all(before)}" if before else "")
    return "default"

  def _macros(self, value: object) -> list[str]:
    """The names of the macros in a value, with those in their values."""
    names: list[str] = []
    for macro in gin_names.parts_of(value, Macro):
      bound = self._in_config.get((macro.name, *MACRO))
      names.append(macro.name)
      names += self._macros(bound.value) if bound is not None else []
    return list(dict.fromkeys(names))

  def _literal(self, value: object) -> Any:
    if isinstance(value, Macro):
      bound = self._in_config.get((value.name, *MACRO))
      return self._literal(bound.value) if bound is not None else value
    if isinstance(value, (list, tuple, dict)):
      return gin_names.mapped(value, self._literal)
    return value


def _plain(setting: Setting) -> Place:
  """The place without the text of a `--gin_param`, which is the line itself."""
  return dataclasses.replace(setting.place, text="")


def _all(settings: list[Setting]) -> str:
  return ", ".join(str(_plain(s)) for s in settings)
