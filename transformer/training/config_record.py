"""A gin configuration as the record of a model that a training keeps with its checkpoints."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any

from mesh_tensorflow.transformer.gin_config import model_config
from mesh_tensorflow.transformer.gin_config.model_config import ATTACHMENT, ModelConfig


@dataclasses.dataclass(frozen=True)
class ConfigRecord:
  """The `ModelRecord` of a Transformer.

  Attributes:
    config: what decides the model, as `model_config.capture` finds it.
    allow_change: whether checkpoints may be of another model.
  """

  config: ModelConfig
  allow_change: bool = False

  def attachments(self) -> dict[str, Callable[[str], None]]:
    """The writer of the configuration."""
    return {ATTACHMENT: self.config.write}

  def manifest(self) -> dict[str, Any]:
    """Hash of the configuration, and the vocabulary."""
    return {
      "configuration": {"file": "operative_config.gin", "sha256": self._hash()},
      "vocabulary": self.config.record["vocabulary"],
    }

  def _hash(self) -> str:
    """Hash of all settings except the folder, equal for runs with the same settings."""
    settings = {k: v for k, v in self.config.record.items() if k != "vocabulary"}
    settings["other"] = {
      k: v for k, v in settings.get("other", {}).items() if not k.endswith(".run.model_dir")
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

  def compare(self, path: str, fits: Callable[[], bool]) -> list[str]:
    """See `model_config.compare`."""
    return model_config.compare(path, self.config, self.allow_change, fits=fits)

  def compare_with_initial(self, path: str) -> list[str]:
    """See `model_config.compare_with_initial`."""
    return model_config.compare_with_initial(path, self.config)
