"""Hints at what was meant, for errors about names that nothing has."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

# Flags of the trainer that its user has written by another name.
_written: dict[str, str] = {}


@contextlib.contextmanager
def written(names: Mapping[str, str]) -> Iterator[None]:
  """Context in which errors name flags of the trainer as they were given to this process.

  Args:
    names: by flag how it was written, if otherwise.
  """
  _written.update(names)
  try:
    yield
  finally:
    _written.clear()


def as_written(flag: str) -> str:
  """A flag of the trainer as its user has written it: of "--gin_file" perhaps "--config"."""
  return _written.get(flag, flag)


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
