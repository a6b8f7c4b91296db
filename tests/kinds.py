"""Of cases that test one thing on many layouts, `make test` runs one of each kind; see `kept`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def kept(cases: Sequence[Any], keep: Sequence[Any]) -> list[Any]:
  """The cases, those that are not kept marked `long`.

  Args:
    cases: for `pytest.mark.parametrize`: values, or a tuple of values each.
    keep: those among them that run in `make test`.

  Returns:
    As many cases, in the same order.

  Raises:
    ValueError: one to keep is not among the cases.
  """
  missing = [case for case in keep if case not in cases]
  if missing:
    raise ValueError(f"not among the cases: {missing}")
  return [case if case in keep else _long(case) for case in cases]


def in_turns(cases: Sequence[Any]) -> list[Any]:
  """Every other case of pairs: one of the first two, the other one of the next two, and so on."""
  return [case for i, case in enumerate(cases) if i % 4 in (0, 3)]


def _long(case: Any) -> Any:
  return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
