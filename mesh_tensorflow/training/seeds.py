"""The seeds of a run, told apart by what is drawn with them."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping

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


_SEED: contextvars.ContextVar[int] = contextvars.ContextVar("data_seed", default=0)


def current() -> int:
  """The seed; 0 outside of a training.

  To be asked for while a data set function is called (not later, in its generators and maps).
  """
  return _SEED.get()


def chosen(seed: int | None) -> int:
  """The seed given to a reader, or `current()` if it is None."""
  return current() if seed is None else int(seed)


@contextlib.contextmanager
def used(seed: int) -> Iterator[None]:
  """Context manager that sets `current()` around the call of a data set function."""
  token = _SEED.set(seed)
  try:
    yield
  finally:
    _SEED.reset(token)
