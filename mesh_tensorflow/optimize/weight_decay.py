"""Selection of the weights that decay."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.operations.variables import Variable

# Biases, the scales of norms, and single trained factors: to shrink them does not regularize a
# product of matrices, and pulls norms away from 1.
NOT_DECAYED = ("bias$", "scale$", "sink_logits$", "(rezero|fixup_scale)_weight$")


def found_in(patterns: Sequence[str], variable: Variable) -> bool:
  """True if one of the regular expressions is found in the name of a variable.

  Args:
    patterns: for `re.search`.
    variable: has a `full_name`.
  """
  return any(re.search(p, variable.full_name) for p in patterns)


def check_patterns(owner: str, what: str, patterns: Sequence[str]) -> list[str]:
  """A list of regular expressions.

  Args:
    owner: name of the optimizer, for errors.
    what: name of the argument.
    patterns: the expressions.

  Raises:
    ConfigError: one is none.
  """
  for p in patterns:
    try:
      re.compile(p)
    except re.error as e:
      raise ConfigError(f"{owner}: {what} has {p!r}, which is no regular expression: {e}") from None
  return list(patterns)


class WeightDecay:
  """Weight decay of all weights but those with some names.

  Args:
    owner: name of the optimizer, for errors.
    rate: of the weights that decay.
    excluded: regular expressions for the names of those that do not; `NOT_DECAYED` for None.

  Raises:
    ConfigError: one is no regular expression.
  """

  def __init__(self, owner: str, rate: float, excluded: Sequence[str] | None):
    excluded = NOT_DECAYED if excluded is None else excluded
    self._rate = rate
    self._excluded = check_patterns(owner, "exclude_from_weight_decay", excluded)

  def rate_of(self, variable: Variable) -> float:
    """The rate at which a variable decays."""
    return 0.0 if found_in(self._excluded, variable) else self._rate
