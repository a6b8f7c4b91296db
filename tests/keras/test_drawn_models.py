"""Random Keras models on random layouts, beside Keras; see `drawn_models`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras
import pytest

from tests.keras import drawn_models
from tests.kinds import kept

SEED = int(os.environ.get("MTF_DRAWN_MODELS_SEED", "0"))


@pytest.mark.parametrize(
  ("number", "way"),
  # Two, two and three stages; two and eight microbatches; all schedules.
  kept(
    [(5, "auto"), (5, "by hand"), (22, "in stages"), (31, "in stages"), (33, "in stages")],
    [(5, "auto"), (5, "by hand"), (33, "in stages")],
  ),
)
def test_a_drawn_model(number: int, way: str, cpu_devices: list[str]) -> None:
  layers, outcomes = drawn_models.run(SEED, number, cpu_devices, [way])
  for outcome in outcomes:
    assert outcome.kind not in ("wrong", "untyped"), f"{outcome}\n{layers}"


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 500, 50))
def test_500_drawn_models(
  first: int, run_subprocess: Callable[..., Any], record_property: Callable[..., None]
) -> None:
  module = ["-m", "tests.keras.drawn_models"]
  options = ["--models=50", f"--seed={SEED}", f"--first={first}"]
  found = run_subprocess([*module, *options], timeout=7200, check=False)
  counts = found.stdout.strip().splitlines()[-1]
  record_property("drawn_models", counts)
  assert "'right': " in counts, found.stderr
  assert "'wrong'" not in counts and "'untyped'" not in counts, found.stdout


def test_there_are_many_kinds_of_layers() -> None:
  assert len(drawn_models.LAYERS) > 45
  drawn = {name for n in range(12) for name in drawn_models.draw_task(SEED, n).layers}
  assert len(drawn) > 15


def test_a_wrong_training_is_found(monkeypatch: pytest.MonkeyPatch, cpu_devices: list[str]) -> None:
  """One weight that is a little off on the mesh."""
  plain = drawn_models.Reference.model

  def other(self: Any, initial: Any = None) -> keras.Model:
    model = plain(self, initial)
    if initial is None:
      weights = [w for w in model.trainable_weights if len(w.shape) > 1]
      weights[-1].assign(weights[-1] * 1.01)
    return model

  monkeypatch.setattr(drawn_models.Reference, "model", other)
  _, outcomes = drawn_models.run(SEED, 5, cpu_devices, ["by hand"])
  assert [o.kind for o in outcomes] == ["wrong"]
  assert "fit loss" in outcomes[0].text
