"""Names of operations, each given once in a graph. No TensorFlow here."""

from __future__ import annotations


class UniqueNames:
  """The names that were given; those that differ only in case count as equal."""

  def __init__(self) -> None:
    self._given: dict[str, int] = {}

  def unique(self, name: str, mark_as_given: bool = True) -> str:
    """The name itself, or `name_1`, `name_2`, ...: the first that was not given.

    Args:
      name: what is asked for.
      mark_as_given: whether the answer counts as given from now on.
    """
    key = base = name.lower()
    # Starts at the number of requests for the name: a graph may have thousands of operations of one
    # name.
    i = self._given.get(key, 0)
    if mark_as_given:
      self._given[key] = i + 1
    if i == 0:
      return name
    while key in self._given:
      key = f"{base}_{i}"
      i += 1
    if mark_as_given:
      self._given[key] = 1
    return f"{name}_{i - 1}"
