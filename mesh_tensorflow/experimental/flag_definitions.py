"""Command-line flags that several modules may define."""

from __future__ import annotations

from collections.abc import Callable

from absl import flags

FLAGS = flags.FLAGS

# A flag is that of the module that calls these functions.
flags.disclaim_key_flags()


def flag(definer: Callable[..., object], name: str, default: object, help_text: str) -> None:
  """Defines a flag, or shares one that is there.

  Args:
    definer: `flags.DEFINE_integer` or its like.
    name: name of the flag.
    default: its value if it is not given.
    help_text: its description, for --help.

  absl refuses a second definition. Where programs that have a flag of the same name are imported
  into one process, it keeps the default of the one that came first; each program by itself has its
  own.
  """
  if name not in FLAGS:
    definer(name, default, help_text)


def string(name: str, default: str | None, help_text: str) -> None:
  """Defines a flag of a string, or shares that of this name with the module that defined it.

  Args:
    name: name of the flag.
    default: its value if it is not given.
    help_text: its description, for --help.
  """
  flag(flags.DEFINE_string, name, default, help_text)


def integer(name: str, default: int | None, help_text: str) -> None:
  """Defines a flag of an integer; otherwise as `string`."""
  flag(flags.DEFINE_integer, name, default, help_text)


def number(name: str, default: float, help_text: str) -> None:
  """Defines a flag of a number; otherwise as `string`."""
  flag(flags.DEFINE_float, name, default, help_text)


def boolean(name: str, default: bool, help_text: str) -> None:
  """Defines a flag that is true or false; otherwise as `string`."""
  flag(flags.DEFINE_boolean, name, default, help_text)
