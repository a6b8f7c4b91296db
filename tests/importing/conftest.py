"""Tests that compare an imported function run a second time, with the layout that is searched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.importing import comparing


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
  compares = getattr(metafunc.module, "comparing", None) is comparing
  if compares and "cpu_devices" in metafunc.fixturenames:
    metafunc.fixturenames.append("layouts_of")
    both = ["given", pytest.param("auto", marks=pytest.mark.slow)]
    metafunc.parametrize("layouts_of", both, indirect=True)


@pytest.fixture
def layouts_of(request: pytest.FixtureRequest) -> Iterator[str]:
  """Whose layouts `comparing.compare` takes: the test's, or those of `mtf.auto_layout`."""
  if request.param == "given":
    yield request.param
    return
  with comparing.search():
    yield request.param
