"""Imperative tensors as numbers, and what is told of them."""

from __future__ import annotations

import operator

import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.running import eager_session as session

ROWS = mtf.Dimension("rows", 2)


@pytest.fixture
def mesh(cpu_devices):
  with mtf.eager(mtf.PlacementMeshImpl("m:2", "rows:m", cpu_devices[:2])) as mesh:
    yield mesh


def test_a_whole_number_is_an_index(mesh):
  assert operator.index(mtf.constant(mesh, 3, dtype=tf.int32)) == 3
  assert "abcd"[mtf.constant(mesh, 3, dtype=tf.int32)] == "d"
  with pytest.raises(mtf.ArgumentError, match="of dtype float32 is no index"):
    operator.index(mtf.constant(mesh, 3.0))
  assert int(mtf.constant(mesh, 3.7)) == 3 and float(mtf.constant(mesh, 2)) == 2.0


def test_its_text_says_over_what_it_is_split(mesh):
  rows, other = (mtf.zeros(mesh, [d]) for d in (ROWS, mtf.Dimension("other", 2)))
  assert "[rows=2 over m:2] float32" in str(rows)
  assert "[other=2] float32" in str(other)


@pytest.mark.parametrize(
  ("dtype", "size"), [(tf.float32, 8), (tf.bool, 2), (tf.int8, 2), (tf.complex128, 32)]
)
def test_bytes_that_are_kept(dtype, size):
  graph_mesh = mtf.Mesh(mtf.Graph(), "m")
  assert session._bytes(mtf.zeros(graph_mesh, [ROWS], dtype)) == size
