"""Pictures of layouts: their sizes."""

from __future__ import annotations

import re

import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.planning import pictures


@pytest.mark.parametrize(
  ("rows", "columns", "inches"), [(1, 1, (5, 2.4)), (3, 5, (7.75, 3.1)), (300, 100, (60, 60))]
)
def test_the_size_of_a_picture(rows, columns, inches, tmp_path):
  """It grows with the parts, and stays one that a viewer can open."""
  pytest.importorskip("matplotlib")
  parts = {(i, 0): [i] for i in range(rows)} | {(0, i): [i] for i in range(columns)}
  shape = mtf.Shape([mtf.Dimension("a", rows), mtf.Dimension("b", columns)])
  path = tmp_path / "x.svg"
  pictures.draw_layout(str(path), shape, [1, 1], parts, "title")
  size = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', path.read_text())
  assert [float(n) / 72 for n in size.groups()] == pytest.approx(inches, rel=0.01)
