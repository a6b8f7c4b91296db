"""Arguments of data set functions, declared as fields of records: see `mesh_settings.records`."""

from __future__ import annotations

import functools

from mesh_settings.hints import did_you_mean
from mesh_settings.records import setting, settings_of
from mesh_tensorflow.errors import ConfigError

# What is read affects the training, not the model.
argument = functools.partial(setting, affects="training")


def check_choices(record: object, owner: str = "") -> None:
  """Checks the fields of a record that are one of a few texts.

  Args:
    record: the record.
    owner: name of the function whose arguments they are, for the error.

  Raises:
    ConfigError: it names the field, its value, the choices, and one that is similar.
  """
  for name, told in settings_of(record).items():
    value = getattr(record, name)
    if told.values is None or not told.values.choices or told.values.is_legal(value):
      continue
    choices = told.values.choices
    hint = did_you_mean(str(value), choices, 1, shown=repr)
    place = f"{owner}: " if owner else ""
    raise ConfigError(f"{place}{name} (={value!r}) must be one of {', '.join(choices)}{hint}")
