"""The text of a report: how long its tables are."""

from __future__ import annotations

import types

import pytest

from mesh_tensorflow.planning import text
from mesh_tensorflow.planning.liveness import Held, Memory


@pytest.mark.parametrize(("rows", "shown"), [(2, 2), (100, 5)])
def test_the_table_of_the_peak_has_at_most_five_rows(rows, shown):
  memory = Memory(inputs=0)
  memory.peak_operation = "dense/einsum"
  memory.largest = [Held(f"{name}/out:0", 1024) for name in "abcdefgh"]
  peak = text._memory(types.SimpleNamespace(memory=memory), rows).split("The peak is at")[1]
  assert len([line for line in peak.splitlines() if "/out" in line]) == shown
  assert f"and {8 - shown} more" in peak
