"""Of the tests of trainings: only those of their reports draw pictures."""

from __future__ import annotations

import pytest

from mesh_tensorflow.training import model_files


@pytest.fixture(autouse=True)
def no_drawing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
  """`loss.png` is written, but not drawn: matplotlib takes a tenth of a short training."""
  if "reports" not in request.path.stem:
    monkeypatch.setattr(model_files, "_picture", lambda curves: b"not drawn in tests")
