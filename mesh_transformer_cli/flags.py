"""Flags of commands: kinds of values, and the trainer's arguments that a flag becomes."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

from mesh_settings.records import flagged
from mesh_settings.rules import NOT_BELOW_ZERO, NUMBER, PATH, TEXT, WHOLE, YES_OR_NO, Rule

Kind = Callable[[str], Any]


class _Nothing:
  """Value of a flag that binds None in gin; None itself means that a flag was not given."""

  def __repr__(self) -> str:
    return "None"


NOTHING = _Nothing()
NEWEST = -1  # As `run.eval_checkpoint_step` has it.


@dataclasses.dataclass(frozen=True)
class Flag:
  """A flag of a command.

  What it becomes is said by one of `gin`, `short` and `passed`; by none of them where the command
  itself looks at the value.

  Attributes:
    name: with its dashes.
    help: its description, for --help.
    kind: makes its value of the text, or raises `argparse.ArgumentTypeError`; None: it takes no
      value, and its value is True.
    metavar: placeholder of the value in the help.
    gin: the parameter that gin binds to the value.
    short: the name that `--set` gives the text to, which it makes a value of as it does by hand.
    passed: whether the trainer has a flag of this name, or of its first alias.
    repeated: whether it may be given several times: the value is a list, or, of a single one that
      gin binds, that one.
    advanced: whether it stands in a part of the help of its own.
    aliases: other names of it.
  """

  name: str
  help: str
  kind: Kind | None = str
  metavar: str = "TEXT"
  gin: str = ""
  short: str = ""
  passed: bool = False
  repeated: bool = False
  advanced: bool = False
  aliases: tuple[str, ...] = ()

  @property
  def dest(self) -> str:
    """Its name without dashes."""
    return self.name.lstrip("-")

  def arguments(self, value: Any) -> Iterator[str]:
    """Yields the trainer's arguments for a value of this flag; none if it was not given."""
    if value is None:
      return
    values = value if self.repeated else [value]
    if self.gin:
      # As Python writes it, which gin reads: quotes and newlines of a text stay what they are.
      bound = values[0] if len(values) == 1 else values
      yield f"--gin_param={self.gin} = {bound!r}"
      return
    for one in values:
      if self.short:
        yield f"--set={self.short}={one}"
      elif self.passed:
        name = self.aliases[0] if self.aliases else self.name
        yield name if self.kind is None else f"{name}={one}"


def of_rule(rule: Rule, none: str = "") -> Kind:
  """Kind of a flag whose values a rule constrains.

  Args:
    rule: the rule.
    none: a word that may stand for None.
  """

  def convert(text: str) -> Any:
    if none and text == none:
      return NOTHING
    try:
      value = rule.parse(text)
      if rule.is_legal(value):
        return value
    except ValueError:
      pass
    if rule is PATH:
      raise argparse.ArgumentTypeError("the path is empty")
    if rule.choices:
      raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(rule.choices)}")
    legal = rule.legal.removeprefix("a ")
    other = f', or "{none}"' if none else ""
    raise argparse.ArgumentTypeError(f"{text!r} is no {legal}{other}")

  return convert


def of_settings(record: type, owner: str, command: str) -> Iterator[Flag]:
  """Yields the flags of a command that bind the settings of a record.

  Args:
    record: a record of settings; see `mesh_settings.records`.
    owner: what gin calls it: "run", say.
    command: name of the command.
  """
  for told in flagged(record, command):
    rule = told.flag_values or told.values or _BY_TYPE.get(told.annotation.split(" ")[0], TEXT)
    yield Flag(
      told.flag,
      told.short or f"{told.help[0].upper()}{told.help[1:]}",
      None if rule is YES_OR_NO else of_rule(rule),
      told.metavar or _METAVARS.get(rule.parse, "TEXT"),
      gin=f"{owner}.{told.name}",
    )


_BY_TYPE = {"int": WHOLE, "float": NUMBER, "bool": YES_OR_NO}
_METAVARS: dict[Any, str] = {int: "N", NUMBER.parse: "X", NOT_BELOW_ZERO.parse: "X"}


def escaped(text: str) -> str:
  r"""A text in which \n is a newline, \t a tab, and \\ a backslash, which no shell types easily."""
  parts = text.split("\\\\")
  return "\\".join(p.replace("\\n", "\n").replace("\\t", "\t") for p in parts)


def some_text(text: str) -> str:
  """As `escaped`, and not empty."""
  if not text:
    raise argparse.ArgumentTypeError("the text is empty")
  return escaped(text)


def file(text: str) -> str:
  """A file that is there; what has a scheme (gs://) is looked for by the trainer."""
  if "://" not in text:
    if os.path.isdir(text):
      raise argparse.ArgumentTypeError(f"{text} is a folder; give one file")
    if not os.path.exists(text):
      raise argparse.ArgumentTypeError(f"there is no file {text} in {os.getcwd()}")
  return text


def setting(text: str) -> str:
  """NAME=VALUE."""
  name, equals, _ = text.partition("=")
  if not equals or not name.strip():
    raise argparse.ArgumentTypeError(f"{text!r} is not of the form NAME=VALUE, such as d_model=512")
  return text


def binding(text: str) -> str:
  """A binding of gin's: NAME = VALUE."""
  if "=" not in text and "\n" not in text:
    raise argparse.ArgumentTypeError(
      f'{text!r} is no binding; it stands in quotes: --gin_param="run.train_steps = 100"'
    )
  return text


def checkpoint(several: bool) -> Kind:
  """Kind of a flag that selects checkpoints: a step, a word, or several steps if `several`."""
  words = ("newest", "best", "all", "new") if several else ("newest", "best")

  def convert(text: str) -> Any:
    if text == "newest":
      return NEWEST
    if text in words:
      return text
    try:
      steps = [int(part) for part in text.split(",")]
    except ValueError:
      steps = [-1]
    if min(steps) < 0 or (len(steps) > 1 and not several):
      some = "a step, several with commas between" if several else "a step"
      raise argparse.ArgumentTypeError(f"{text!r} is none of {some}, {', '.join(words)}")
    return steps if len(steps) > 1 else steps[0]

  return convert
