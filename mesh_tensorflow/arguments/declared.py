"""Declarations of the arguments of a class or function: what they affect, and their ranges.

    @affects(training="dropout_rate", report="summaries")
    @takes(num_heads=COUNT, dropout_rate=BELOW_ONE)
    class MyLayer: ...

    @affects("training")
    def my_schedule(step, warmup): ...

Both say it of the constructor or function below them, not of the constructors of subclasses.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mesh_tensorflow.errors import ArgumentError

# Kinds of effects of a setting. A resume refuses to change one that affects the model.
AFFECTED = ("model", "precision", "training", "report")

_ATTRIBUTE = "__declared_arguments__"
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Rule:
  """A constraint on the value of a setting.

  Attributes:
    legal: in words, after "it must be".
    is_legal: whether a value is.
    choices: the legal texts, if there are few.
  """

  legal: str
  is_legal: Callable[[Any], bool]
  choices: tuple[str, ...] = ()

  def or_none(self) -> Rule:
    """The same rule, but None is allowed, too."""
    is_legal = lambda x: x is None or self.is_legal(x)  # noqa: E731
    return Rule(f"{self.legal}, or None", is_legal, self.choices)


def is_whole(x: Any) -> bool:
  """Tests for a whole number; True and False are none."""
  # To Python True is 1, and a setting that is True by mistake would pass for a size.
  return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def is_number(x: Any) -> bool:
  """Tests for a real number; True and False are none."""
  return isinstance(x, numbers.Real) and not isinstance(x, bool)


def at_least(least: int) -> Rule:
  """A whole number from `least` on."""
  return Rule(f"a whole number of at least {least}", lambda x: is_whole(x) and x >= least)


def one_of(*choices: str) -> Rule:
  """One of a few texts."""
  return Rule(
    f"one of {', '.join(map(repr, choices))}",
    lambda x: isinstance(x, str) and x in choices,
    choices,
  )


COUNT = at_least(1)
COUNT_OR_ZERO = at_least(0)
ABOVE_ZERO = Rule("a number above 0", lambda x: is_number(x) and x > 0)
NOT_BELOW_ZERO = Rule("a number of at least 0", lambda x: is_number(x) and x >= 0)
FRACTION = Rule("a number from 0 to 1", lambda x: is_number(x) and 0 <= x <= 1)
BELOW_ONE = Rule("a number from 0 to below 1", lambda x: is_number(x) and 0 <= x < 1)


@dataclasses.dataclass
class Declaration:
  """The declarations of one class or function.

  Attributes:
    affects: what it affects as a whole; None: what its arguments say.
    arguments: for some of its arguments, what each affects.
    values: for some, what they may be. An argument whose annotation or default says None may be
      None, too.
  """

  affects: str | None = None
  arguments: dict[str, str] = dataclasses.field(default_factory=dict)
  values: dict[str, Rule] = dataclasses.field(default_factory=dict)


def affects(what: str | None = None, /, **arguments: str) -> Callable[[_T], _T]:
  """Declares what a class or function, or some of its arguments, affects.

  Args:
    what: one of `AFFECTED`, for all arguments not named below; "model" by default.
    **arguments: the names of arguments, with spaces between them, by what they affect.

  Raises:
    ArgumentError: nothing else can be affected.
  """
  wrong = sorted({*arguments, *([what] if what else [])} - set(AFFECTED))
  if wrong:
    raise ArgumentError(f"affects: {', '.join(wrong)}: it must be one of {', '.join(AFFECTED)}")

  def declare(target: _T) -> _T:
    own = _own(target)
    own.affects = what or own.affects
    own.arguments |= {name: kind for kind, names in arguments.items() for name in names.split()}
    return target

  return declare


def takes(**values: Rule) -> Callable[[_T], _T]:
  """Declares the allowed values of arguments.

  Args:
    **values: a rule for each argument.
  """

  def declare(target: _T) -> _T:
    _own(target).values.update(values)
    return target

  return declare


def declaration(target: Any) -> Declaration:
  """The declarations of a class or function itself, without those of its base classes."""
  found = _namespace(target).get(_ATTRIBUTE)
  return found if isinstance(found, Declaration) else Declaration()


def _own(target: Any) -> Declaration:
  found = declaration(target)
  setattr(target, _ATTRIBUTE, found)
  return found


def _namespace(target: Any) -> Mapping[str, Any]:
  namespace: Mapping[str, Any] = getattr(target, "__dict__", {})
  return namespace
