"""Tests that compare an imported function run a second time, with the layout that is searched.

So does each case of a function in `make long`, one in four in `make test`; of the functions in a
module's `LONG_IF_SEARCHED` none.
"""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Iterator, Sequence

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


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
  room = pathlib.Path(__file__).parent
  searched: collections.Counter[str] = collections.Counter()
  for item in items:
    if item.path.parent != room or item.get_closest_marker("long"):
      continue
    if getattr(item, "callspec", None) and item.callspec.params.get("layouts_of") == "auto":
      name = item.nodeid.partition("[")[0]
      if searched[name] % 4:
        item.add_marker(pytest.mark.long)
      searched[name] += 1


@pytest.fixture
def layouts_of(request: pytest.FixtureRequest) -> Iterator[str]:
  """Whose layouts `comparing.compare` takes: the test's, or those of `mtf.auto_layout`."""
  if request.param == "given":
    yield request.param
    return
  with comparing.search():
    yield request.param
