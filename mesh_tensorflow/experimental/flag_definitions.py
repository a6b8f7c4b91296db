"""Command-line flags that several modules may define."""

from __future__ import annotations

import functools
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


# Each takes the name of a flag, its value if it is not given, and its description.
string = functools.partial(flag, flags.DEFINE_string)
integer = functools.partial(flag, flags.DEFINE_integer)
number = functools.partial(flag, flags.DEFINE_float)
boolean = functools.partial(flag, flags.DEFINE_boolean)
