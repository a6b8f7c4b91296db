"""Arguments of an `mtf.function` that is called within another program."""

from __future__ import annotations

import numpy as np
import pytest

import mesh_tensorflow as mtf

A, B = mtf.Dimension("a", 2), mtf.Dimension("b", 3)


@pytest.fixture
def inner():
  return mtf.function(
    mtf.PlacementMeshImpl("all:1", "", [""]), [mtf.TensorSpec([A]), mtf.TensorSpec([A], "int32")]
  )(lambda x, n: x * mtf.to_float(n))


@pytest.fixture
def mesh():
  return mtf.Mesh(mtf.Graph(), "m")


def given(mesh, dim, dtype):
  return mtf.zeros(mesh, [dim], dtype)


def test_tensors_are_taken_as_they_are_and_others_as_the_signature_says(inner, mesh):
  x = given(mesh, A, "float32")
  for n in (given(mesh, A, "int32"), np.ones([2], np.int32)):
    y = inner(x, n)
    assert y.shape == mtf.Shape([A]) and y.dtype == "float32"
    assert y.mesh is mesh


@pytest.mark.parametrize(
  ("dim", "dtype", "error", "text"),
  [
    (B, "int32", mtf.ShapeError, r"argument 1 of .* expected TensorSpec.*a=2"),
    (A, "float32", mtf.DTypeError, r"argument 1 of .* expected TensorSpec.*int32.*; cast it"),
  ],
)
def test_tensors_that_the_signature_does_not_allow(dim, dtype, error, text, inner, mesh):
  with pytest.raises(error, match=text):
    inner(given(mesh, A, "float32"), given(mesh, dim, dtype))
