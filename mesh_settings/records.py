"""Records of settings: frozen dataclasses whose fields are declared by `setting`.

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class TrainerSettings:
      report_every: int = setting("Steps between lines.", 100, COUNT, flag="--report_every")

Here is what follows from such a class: the signature and docstring of a function that takes its
fields as arguments, and the declarations that checks, gin, flags and pages read.
"""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from mesh_settings.rules import Rule, rule_for

_KEY = "setting"
_Record = TypeVar("_Record")


@dataclasses.dataclass(frozen=True)
class Setting:
  """The declaration of a setting.

  Attributes:
    help: its meaning, in a sentence or more.
    values: the values it may have, beyond what its annotation says; None: all of its type.
    affects: "model", "precision", "training" or "report"; a resume refuses to change what affects
      the model.
    flag: its flag on the command line, with dashes; "" for none.
    metavar: placeholder of the value in the flag's help; "" for one by its type.
    short: the flag's help, where that of the setting is too long; "" for `help`.
    flag_values: the values that the flag takes, where those are fewer; None: `values`.
    commands: the commands that have the flag.
    name: the field's name, which `settings_of` fills in.
    default: the field's default, likewise; `inspect.Parameter.empty` if it has to be given.
    annotation: the field's type, likewise, as source text.
  """

  help: str
  values: Rule | None = None
  affects: str = "report"
  flag: str = ""
  metavar: str = ""
  short: str = ""
  flag_values: Rule | None = None
  commands: tuple[str, ...] = ()
  name: str = ""
  default: Any = inspect.Parameter.empty
  annotation: str = ""


def setting(
  help: str,  # noqa: A002 - as argparse calls it.
  default: object = dataclasses.MISSING,
  values: Rule | None = None,
  *,
  affects: str = "report",
  flag: str = "",
  metavar: str = "",
  short: str = "",
  flag_values: Rule | None = None,
  commands: str = "train",
) -> Any:
  """Declares a setting: a field of a dataclass. The arguments: see `Setting`.

  Args:
    help: its meaning.
    default: value if it is not given; without one it has to be.
    values: the values it may have.
    affects: what a change of it affects.
    flag: its flag on the command line.
    metavar: placeholder of the flag's value.
    short: help of the flag, in place of `help`.
    flag_values: the values that the flag takes, where those are fewer.
    commands: names of the commands that have the flag, with blanks between them.
  """
  told = Setting(help, values, affects, flag, metavar, short, flag_values, tuple(commands.split()))
  return dataclasses.field(default=default, metadata={_KEY: told})


def settings_of(record: Any) -> dict[str, Setting]:
  """The settings of a record, by name, in the order of their fields.

  Args:
    record: a dataclass, or an object of one.
  """
  return {
    f.name: dataclasses.replace(
      f.metadata[_KEY], name=f.name, default=_default(f), annotation=str(f.type)
    )
    for f in dataclasses.fields(record)
    if _KEY in f.metadata
  }


def _default(field: dataclasses.Field[Any]) -> Any:
  return inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default


def illegal(record: Any) -> Iterator[tuple[str, Any, Rule]]:
  """Yields the name, value and rule of each setting of a record whose value is not legal."""
  for name, told in settings_of(record).items():
    rule, value = rule_for(told.annotation, told.default, told.values), getattr(record, name)
    if rule is not None and value is not told.default and not rule.is_legal(value):
      yield name, value, rule


def part(kind: type[_Record], record: Any) -> _Record:
  """The settings of `kind` that a record of a subclass of it has, as a record of `kind`."""
  return kind(**{name: getattr(record, name) for name in settings_of(kind)})


def signature(
  record: type,
  positional: Sequence[str] = (),
  defaults: Mapping[str, object] | None = None,
) -> inspect.Signature:
  """Signature of a function that takes the fields of a record as arguments.

  Args:
    record: the dataclass.
    positional: names of those that may be given by position, in order.
    defaults: other defaults than those of the record: functions that it cannot name.
  """
  known, others = settings_of(record), defaults or {}

  def parameter(name: str, kind: inspect._ParameterKind) -> inspect.Parameter:
    default = others.get(name, known[name].default)
    return inspect.Parameter(name, kind, default=default, annotation=known[name].annotation)

  first = [parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in positional]
  rest = [
    parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in known if name not in positional
  ]
  return inspect.Signature([*first, *rest])


def takes_settings(
  record: type,
  positional: Sequence[str] = (),
  defaults: Mapping[str, object] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
  """Decorator of a function that takes the settings of a record as arguments.

  It calls the function with a dict of all arguments by name, and gives it the parameters of the
  record, and its settings as the "Args" of the docstring, in the place of "{settings}".

  Args:
    record: the dataclass.
    positional: names of those that may be given by position, in order.
    defaults: other defaults than those of the record.
  """
  told = signature(record, positional, defaults)

  def decorate(function: Callable[[dict[str, Any]], object]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
      bound = told.bind(*args, **kwargs)
      bound.apply_defaults()
      return function(bound.arguments)

    returns = inspect.signature(function).return_annotation
    for name in ("__module__", "__name__", "__qualname__"):
      setattr(call, name, getattr(function, name))
    call.__doc__ = (function.__doc__ or "").replace(
      "{settings}", f"Args:\n    {args_section(record, positional)}"
    )
    vars(call)["__signature__"] = told.replace(return_annotation=returns)
    return call

  return decorate


def args_section(record: type, first: Iterable[str] = ()) -> str:
  """The settings of a record as lines of an "Args" section, without its heading."""
  known = settings_of(record)
  order = [*first, *(name for name in known if name not in first)]
  return "\n".join(
    line
    for name in order
    for line in textwrap.wrap(
      f"{name}: {known[name].help}", 96, initial_indent="    ", subsequent_indent="      "
    )
  ).lstrip()


def flagged(record: type, command: str) -> Iterator[Setting]:
  """Yields the settings of a record that have a flag in a command, inherited ones last."""
  own = vars(record).get("__annotations__", {})
  found = [s for s in settings_of(record).values() if s.flag and command in s.commands]
  yield from sorted(found, key=lambda told: told.name not in own)
