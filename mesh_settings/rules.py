"""Constraints on the values of settings and arguments: in words, as a test, as a parser of text."""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Rule:
  """A constraint on the value of a setting.

  Attributes:
    words: after "it must be"; "" if `choices` say it.
    is_legal: tests a value.
    choices: the legal texts, if there are few; a list of them may grow.
    parse: makes a value of a text, as flags give it; raises ValueError where it cannot.
  """

  words: str
  is_legal: Callable[[Any], bool]
  choices: Collection[str] = ()
  parse: Callable[[str], Any] = str

  @property
  def legal(self) -> str:
    """The constraint in words, after "it must be"."""
    return self.words or f"one of {', '.join(map(repr, self.choices))}"

  def or_none(self) -> Rule:
    """The same rule, but None is allowed, too."""
    is_legal = lambda x: x is None or self.is_legal(x)  # noqa: E731
    return dataclasses.replace(self, words=f"{self.legal}, or None", is_legal=is_legal)


def is_whole(x: object) -> bool:
  """Tests for a whole number; True and False are none."""
  # To Python True is 1, and a setting that is True by mistake would pass for a size.
  return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def is_number(x: object) -> bool:
  """Tests for a real number; True and False are none."""
  return isinstance(x, numbers.Real) and not isinstance(x, bool)


def at_least(least: int) -> Rule:
  """A whole number from `least` on."""
  words = f"a whole number of at least {least}"
  return Rule(words, lambda x: is_whole(x) and x >= least, parse=int)


def number(words: str, is_legal: Callable[[float], bool]) -> Rule:
  """A real number, in words "a number ...", for which `is_legal` is true."""
  return Rule(f"a number {words}", lambda x: is_number(x) and is_legal(x), parse=_finite)


def _finite(text: str) -> float:
  value = float(text)
  if math.isinf(value):
    raise ValueError(text)
  return value


def one_of(choices: Collection[str]) -> Rule:
  """One of some texts; to those of a list others may be added later."""
  return Rule("", lambda x: isinstance(x, str) and x in choices, choices)


def names_to(kind: Rule, names: Sequence[str]) -> Rule:
  """A dict from some of a few names to values of a rule."""
  words = f"a dict from {', '.join(map(repr, names))} to {kind.legal.removeprefix('a ')}s"
  return Rule(
    words,
    lambda x: isinstance(x, Mapping) and all(k in names and kind.is_legal(x[k]) for k in x),
  )


WHOLE = Rule("a whole number", is_whole, parse=int)
NUMBER = Rule("a number", is_number, parse=float)
COUNT = at_least(1)
COUNT_OR_ZERO = at_least(0)
ABOVE_ZERO = number("above 0", lambda x: x > 0)
NOT_BELOW_ZERO = number("of at least 0", lambda x: x >= 0)
FRACTION = number("from 0 to 1", lambda x: 0 <= x <= 1)
BELOW_ONE = number("from 0 to below 1", lambda x: 0 <= x < 1)
CALLABLE = Rule("a function or class of Python or gin (@name)", callable)
YES_OR_NO = Rule("True or False", lambda x: isinstance(x, bool) or (is_whole(x) and x in (0, 1)))
TEXT = Rule("a text in quotes", lambda x: not isinstance(x, (numbers.Number, Mapping)))
PATH = Rule("a path", lambda x: isinstance(x, str) and x != "")

# What the texts of annotations ask for.
_OF_KINDS = {"int": WHOLE, "float": NUMBER, "bool": YES_OR_NO, "str": TEXT}


def kinds_of(annotation: object) -> list[str]:
  """Splits an annotation such as "int | None" into its parts."""
  if isinstance(annotation, type):
    return [annotation.__name__] if annotation is not inspect.Parameter.empty else []
  return [part.strip() for part in annotation.split("|")] if isinstance(annotation, str) else []


def rule_for(annotation: object, default: object, declared: Rule | None = None) -> Rule | None:
  """The rule for the values of a parameter or field; None: no rule.

  Args:
    annotation: its annotation, as source text.
    default: its default.
    declared: the rule that is declared for it.
  """
  if str(annotation).startswith("Callable["):
    may_be_none = default is None or str(annotation).endswith("| None")
    return CALLABLE.or_none() if may_be_none else CALLABLE
  kinds = kinds_of(annotation)
  found = [_OF_KINDS[k] for k in kinds if k in _OF_KINDS]
  # One of the kinds has no rule: what it allows is not known.
  if declared is None and (not kinds or len(found) + ("None" in kinds) < len(kinds)):
    return None
  rule = declared or (found[0] if len(found) == 1 else None)
  may_be_none = "None" in kinds or default is None or rule is TEXT
  return rule.or_none() if rule and may_be_none and not rule.is_legal(None) else rule
