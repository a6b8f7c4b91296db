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
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mesh_settings.records import settings_of
from mesh_settings.rules import ABOVE_ZERO as ABOVE_ZERO
from mesh_settings.rules import BELOW_ONE as BELOW_ONE
from mesh_settings.rules import COUNT as COUNT
from mesh_settings.rules import COUNT_OR_ZERO as COUNT_OR_ZERO
from mesh_settings.rules import FRACTION as FRACTION
from mesh_settings.rules import NOT_BELOW_ZERO as NOT_BELOW_ZERO
from mesh_settings.rules import Rule as Rule
from mesh_settings.rules import at_least as at_least
from mesh_settings.rules import is_number as is_number
from mesh_settings.rules import is_whole as is_whole
from mesh_settings.rules import one_of as one_of
from mesh_tensorflow.errors import ArgumentError

# Kinds of effects of a setting. A resume refuses to change one that affects the model.
AFFECTED = ("model", "precision", "training", "report")

_ATTRIBUTE = "__declared_arguments__"
_T = TypeVar("_T")


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


def declares(record: type) -> Callable[[_T], _T]:
  """Declares that the arguments of a function are the settings of a record.

  Args:
    record: a dataclass of settings; see `mesh_settings.records`.
  """

  def declare(target: _T) -> _T:
    own = _own(target)
    for name, told in settings_of(record).items():
      own.arguments[name] = told.affects
      if told.values is not None:
        own.values[name] = told.values
    return target

  return declare


def declaration(target: object) -> Declaration:
  """The declarations of a class or function itself, without those of its base classes."""
  found = _namespace(target).get(_ATTRIBUTE)
  return found if isinstance(found, Declaration) else Declaration()


def _own(target: object) -> Declaration:
  found = declaration(target)
  setattr(target, _ATTRIBUTE, found)
  return found


def _namespace(target: object) -> Mapping[str, Any]:
  namespace: Mapping[str, Any] = getattr(target, "__dict__", {})
  return namespace
