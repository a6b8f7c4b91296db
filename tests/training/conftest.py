"""Of the tests of trainings: only those of their reports draw pictures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mesh_tensorflow.training import model_files
from tests.transformer import training_program


@pytest.fixture(autouse=True)
def no_drawing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
  """`loss.png` is written, but not drawn: matplotlib takes a tenth of a short training."""
  if "reports" not in request.path.stem:
    monkeypatch.setattr(model_files, "_picture", lambda curves: b"not drawn in tests")


@pytest.fixture(scope="module")
def without_attention() -> Iterator[None]:
  """The model of `training_program` is traced in half the time."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(training_program, "BINDINGS", training_program.WITHOUT_ATTENTION)
    yield
