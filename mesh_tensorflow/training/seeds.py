"""The seeds of a run, told apart by what is drawn with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mesh_settings.trainer import PURPOSES
from mesh_tensorflow.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Seeds:
  """One seed for each purpose.

  What is drawn is a hash of the seed with what it is drawn for: the name of a variable; the number
  of a step and the name of an operation; the number of an epoch or an example. So one number for
  all purposes gives independent numbers for each; another seed for one changes nothing else.

  Attributes:
    weights: of initial values.
    data: of the order of the training data, where its reader is given no seed of its own.
    dropout: of what operations draw while a model is trained.
    sampling: of what they draw in other modes; of tokens, if `sample.seed` is not bound.
  """

  weights: int
  data: int
  dropout: int
  sampling: int

  @classmethod
  def of_run(cls, seed: int, others: Mapping[str, int] | None = None) -> Seeds:
    """The seeds that `run.seed` and `run.seeds` say.

    Args:
      seed: for all purposes that `others` has no seed for.
      others: by purpose.

    Raises:
      ConfigError: there is no such purpose.
    """
    others = others or {}
    unknown = sorted(set(others) - set(PURPOSES))
    if unknown:
      raise ConfigError(
        f"run.seeds has no purpose {unknown[0]!r}; there are {', '.join(map(repr, PURPOSES))}"
      )
    return cls(**{purpose: int(others.get(purpose, seed)) for purpose in PURPOSES})
