"""Reading of machine files: each field with its check, and errors that name it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mesh_tensorflow.errors import ConfigError
from mesh_transformer_cli import untrusted


def _is_finite(number: float) -> bool:
  try:
    return math.isfinite(number)
  except OverflowError:  # A whole number beyond all floats.
    return False


class Fields:
  """The fields of an object in a machine file, each read with its check."""

  def __init__(self, what: str, path: str, fields: Any):
    self.what, self.path = what, path
    if not isinstance(fields, dict):
      shown = untrusted.shortened(repr(fields), 200)
      raise ConfigError(f"{what}: {path or 'it'} must be an object with fields, got {shown}")
    self.fields: dict[str, Any] = fields

  def name(self, key: str) -> str:
    return f"{self.path}.{key}" if self.path else key

  def get(self, key: str) -> Any:
    if key not in self.fields:
      raise ConfigError(f"{self.what}: field {self.name(key)} is missing")
    return self.fields[key]

  def wrong(self, key: str, wanted: str) -> ConfigError:
    value = self.fields[key]
    shown = untrusted.shortened(repr(value), 200)
    return ConfigError(f"{self.what}: field {self.name(key)} must be {wanted}, got {shown}")

  def number(self, key: str, default: float | None = None, low: float = 0.0) -> float:
    if default is not None and key not in self.fields:
      return default
    value = self.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
      raise self.wrong(key, "a number")
    if value < low or (value == 0 and default is None):
      raise self.wrong(key, f"at least {low:g}" if default is not None else "a number above 0")
    return float(value)

  def whole(self, key: str, default: int, low: int) -> int:
    value = self.fields.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**63:
      raise self.wrong(key, f"a whole number of at least {low}")
    return value

  def text(self, key: str) -> str:
    value = self.get(key)
    if not isinstance(value, str) or not value:
      raise self.wrong(key, "a text")
    return value

  def boolean(self, key: str, default: bool) -> bool:
    value = self.fields.get(key, default)
    if not isinstance(value, bool):
      raise self.wrong(key, "true or false")
    return value

  def part(self, key: str) -> Fields:
    return Fields(self.what, self.name(key), self.get(key))

  def parts(self, key: str) -> list[Fields]:
    value = self.get(key)
    if not isinstance(value, list) or not value:
      raise self.wrong(key, "a list with at least one object")
    return [Fields(self.what, f"{self.name(key)}[{i}]", v) for i, v in enumerate(value)]

  def parts_by_name(self, key: str) -> dict[str, Fields]:
    whole = self.part(key)
    return {k: whole.part(k) for k in whole.fields}

  def texts(self, key: str) -> dict[str, str]:
    whole = self.part(key)
    return {k: whole.text(k) for k in whole.fields}

  def done(self, known: Sequence[str]) -> None:
    for key in self.fields:
      if key not in known:
        raise ConfigError(
          f"{self.what}: field {self.name(key)} is unknown; there are {', '.join(known)}"
        )
