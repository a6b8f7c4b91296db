"""Registry of the modes of `run`: functions that are decorated with `@mode`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from mesh_settings.run import MODES
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.transformer.modes.job import Job, Mode

_MODES: dict[str, Mode] = {}

_Run = TypeVar("_Run", bound=Callable[[Job], Any])


def mode(name: str, **properties: Any) -> Callable[[_Run], _Run]:
  """Makes a function of a `Job` a mode of `run`.

  A module of --module_import may do so, too: it is imported before gin files are read.

  Args:
    name: what `run.mode` is then bound to.
    **properties: of `Mode`.

  Returns:
    A decorator, which returns the function as it is.

  Raises:
    ConfigError: there is such a mode.
  """

  def register(run: _Run) -> _Run:
    there = _MODES.get(name)
    # A module may be imported twice: a notebook's cell, or by another name.
    if there is not None and there.run.__qualname__ != run.__qualname__:
      raise ConfigError(f"a mode {name!r} is there already: {there.run.__module__}")
    _MODES[name] = Mode(name, run, **properties)
    MODES[:] = names()
    return run

  return register


def names() -> tuple[str, ...]:
  """The names of all modes; the default, "train", first."""
  return tuple(sorted(_MODES, key=lambda name: not _MODES[name].trains))


def find(name: Any) -> Mode | None:
  """The mode of this name; None if there is none."""
  return _MODES.get(name) if isinstance(name, str) else None


def get(name: Any) -> Mode:
  """The mode of this name.

  Raises:
    ConfigError: there is none.
  """
  found = find(name)
  if found is None:
    raise ConfigError(f"run.mode {name!r} is unknown; use {', '.join(names())}")
  return found
