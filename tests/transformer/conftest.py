"""Of the tests of the trainer: only those of its reports draw pictures."""

from __future__ import annotations

import pytest

from mesh_tensorflow.training import loss_picture


@pytest.fixture(autouse=True)
def no_drawing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
  """`loss.png` is written, but not drawn: matplotlib takes a tenth of a short training."""
  if "reporting" not in request.path.parts:
    monkeypatch.setattr(loss_picture, "_picture", lambda curves: b"not drawn in tests")
