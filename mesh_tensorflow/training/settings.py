"""The settings of a training, checked."""

from __future__ import annotations

import dataclasses
from typing import Any

from mesh_settings.records import illegal, settings_of
from mesh_settings.trainer import TrainerSettings, steps_to_profile
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.planning.machine import convert_to_machine

# Without them, and without any settings, a trainer takes the seeds of its mesh's variable store.
SEEDS = ("seed", "seeds")


def checked_settings(
  settings: TrainerSettings, *, owner: str | None = None, **fields: Any
) -> TrainerSettings:
  """Settings with other values of some fields; all values are checked.

  Args:
    settings: the settings.
    owner: of these values, for errors; None: that of `settings`.
    **fields: other values, by name.

  Raises:
    ConfigError: there is no such setting; or it cannot have such a value.
  """
  known = settings_of(settings)
  unknown = sorted(set(fields) - set(known))
  if unknown:
    said = owner or settings.owner
    raise ConfigError(f"{said} has no setting {unknown[0]!r}; it has {', '.join(known)}")
  settings = dataclasses.replace(settings, **fields)
  for name, value, rule in illegal(settings):
    said = dataclasses.replace(settings, owner=owner or settings.owner).named(name)
    raise ConfigError(f"{said} = {value!r}: it must be {rule.legal}")
  if isinstance(settings.peak_flops, str):
    convert_to_machine(settings.peak_flops)
  if settings.early_stopping_patience is not None and not settings.eval_every_steps:
    raise ConfigError(
      f"{settings.named('early_stopping_patience')} is {settings.early_stopping_patience}, but "
      f"nothing is evaluated in training: set {settings.named('eval_every_steps')}, the steps "
      "between evaluations"
    )
  return dataclasses.replace(settings, profile_steps=steps_to_profile(settings.profile_steps))
