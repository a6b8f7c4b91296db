"""Tests that compare an imported function run a second time, with the layout that is searched.

Of the functions in a module's `LONG_IF_SEARCHED` the second time is a long test.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.importing import comparing


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
  compares = getattr(metafunc.module, "comparing", None) is comparing
  if compares and "cpu_devices" in metafunc.fixturenames:
    metafunc.fixturenames.append("layouts_of")
    is_long = metafunc.function.__name__ in getattr(metafunc.module, "LONG_IF_SEARCHED", ())
    mark = pytest.mark.long if is_long else pytest.mark.slow
    both = ["given", pytest.param("auto", marks=mark)]
    metafunc.parametrize("layouts_of", both, indirect=True)


@pytest.fixture
def layouts_of(request: pytest.FixtureRequest) -> Iterator[str]:
  """Whose layouts `comparing.compare` takes: the test's, or those of `mtf.auto_layout`."""
  if request.param == "given":
    yield request.param
    return
  with comparing.search():
    yield request.param
