"""Hints at what was meant, for errors about names that nothing has."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence

# Flags of the trainer that its user has written by another name, set when the process starts.
_WRITTEN: dict[str, str] = {}


def note_written(flag: str, name: str) -> None:
  """Notes by which name a flag of the trainer was given to this process.

  Args:
    flag: the flag.
    name: as it was written.
  """
  _WRITTEN[flag] = name


def as_written(flag: str) -> str:
  """A flag of the trainer as its user has written it: of "--gin_file" perhaps "--config"."""
  return _WRITTEN.get(flag, flag)


def did_you_mean(
  name: str,
  legal: Iterable[str],
  most: int = 3,
  cutoff: float = 0.6,
  shown: Callable[[str], str] = str,
) -> str:
  """The end of an error: "; did you mean ...?" with the legal names that resemble one, or "".

  Args:
    name: what was written.
    legal: the names that there are.
    most: number of names to tell, at most.
    cutoff: how similar they must be; see `difflib.get_close_matches`.
    shown: shows a name; `repr` for quotes.
  """
  return hint(difflib.get_close_matches(name, legal, most, cutoff), shown)


def hint(names: Sequence[str], shown: Callable[[str], str] = str) -> str:
  """The same with these names."""
  return f"; did you mean {' or '.join(map(shown, names))}?" if names else ""
