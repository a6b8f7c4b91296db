"""Processor numbers, coordinates and groups."""

from __future__ import annotations

import types

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import mesh_tensorflow as mtf

meshes = st.lists(st.integers(1, 4), min_size=0, max_size=3)


@hypothesis.given(meshes)
def test_coordinates_are_row_major(sizes):
  for pnum in range(mtf.list_product(sizes)):
    expected = [int(i) for i in np.unravel_index(pnum, sizes)] if sizes else []
    coordinates = mtf.pnum_to_processor_coordinates(sizes, pnum)
    assert coordinates == expected
    assert mtf.processor_coordinates_to_pnum(sizes, coordinates) == pnum


def test_a_shape_is_a_mesh_shape():
  shape = mtf.Shape([("rows", 2), ("cols", 4)])
  assert mtf.pnum_to_processor_coordinates(shape, 6) == [1, 2]
  assert mtf.processor_coordinates_to_pnum(shape, [1, 2]) == 6


def test_something_else_is_no_mesh_shape():
  with pytest.raises(ValueError):
    mtf.pnum_to_processor_coordinates("2,4", 1)


@pytest.mark.parametrize(
  "dims,expected",
  [
    ([0], [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ([1], [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ([0, 1], [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ([], [[0], [1], [2], [3], [4], [5], [6], [7]]),
  ],
)
def test_processor_groups(dims, expected):
  assert mtf.processor_groups([2, 4], dims) == expected


@hypothesis.given(meshes, st.sets(st.integers(0, 2)))
def test_groups_differ_in_the_group_dims_only(sizes, dims):
  dims = [d for d in sorted(dims) if d < len(sizes)]
  groups = mtf.processor_groups(sizes, dims)
  assert sorted(p for g in groups for p in g) == list(range(mtf.list_product(sizes)))
  for number, group in enumerate(groups):
    assert group == sorted(group)
    for pnum in group:
      assert mtf.pnum_to_group(sizes, dims, pnum) == number
      here = mtf.pnum_to_processor_coordinates(sizes, pnum)
      first = mtf.pnum_to_processor_coordinates(sizes, group[0])
      assert all(a == b for i, (a, b) in enumerate(zip(here, first)) if i not in dims)


def test_hardware_coordinates():
  assignment = types.SimpleNamespace(coordinates=lambda replica, core: [replica, core])
  assert mtf.pnum_to_processor_coordinates_nd([4, 2], 3, assignment) == [3, 0]


def test_replicas_of_coordinates():
  """Four replicas on a 2 x 2 x 1 topology, numbered against the grain."""
  coordinates = [[1, 1, 0], [0, 1, 0], [1, 0, 0], [0, 0, 0]]
  assignment = types.SimpleNamespace(
    num_replicas=4,
    topology=types.SimpleNamespace(mesh_shape=[2, 2, 1]),
    # A replica is its first core.
    coordinates=lambda replica, core: coordinates[replica] if core == 0 else [1, 1, core],
  )
  found = mtf.processor_coordinates_to_pnum_map_nd(
    [2, 2], [(0, 0), (1, 0), (0, 1), (1, 1)], assignment
  )
  assert found == [3, 2, 1, 0]


def test_replicas_of_a_mesh_that_is_not_square():
  """Three by two chips, numbered along the first axis."""
  chips = [(x, y) for y in range(2) for x in range(3)]
  assignment = types.SimpleNamespace(
    num_replicas=6,
    topology=types.SimpleNamespace(mesh_shape=[3, 2, 1]),
    coordinates=lambda replica, core: [*chips[replica], core],
  )
  turned = [(x, y) for x in range(3) for y in range(2)]
  found = mtf.processor_coordinates_to_pnum_map_nd([3, 2], turned, assignment)
  assert found == [0, 3, 1, 4, 2, 5]


def test_transpose_list_of_lists():
  assert mtf.transpose_list_of_lists([[1, 2, 3], [4, 5, 6]]) == [[1, 4], [2, 5], [3, 6]]
  with pytest.raises(ValueError):
    mtf.transpose_list_of_lists([])
