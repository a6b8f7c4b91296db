"""Division by zero is a `DivisionError`, which is a ZeroDivisionError, too."""

from __future__ import annotations

import numpy as np
import pytest

import mesh_tensorflow as mtf

A = mtf.Dimension("a", 4)


def numbers(dtype) -> mtf.Tensor:
  return mtf.import_tf_tensor(mtf.Mesh(mtf.Graph(), "mesh"), np.ones([4], dtype), [A])


@pytest.mark.parametrize("zero", [0, np.int32(0), np.zeros([], np.int32)])
@pytest.mark.parametrize("divide", [mtf.floordiv, mtf.mod])
def test_integers_by_the_number_zero(divide, zero):
  with pytest.raises(mtf.DivisionError, match="a=4.*int32.* divided by the number"):
    divide(numbers(np.int32), zero)


def test_floats_by_the_number_zero():
  with pytest.raises(ZeroDivisionError, match="divided by the number 0"):
    numbers(np.float32) / 0
  assert mtf.floordiv(numbers(np.float32), 0.0).dtype == "float32"  # Infinity, as in TensorFlow.


@pytest.mark.parametrize("divide", [mtf.floordiv, mtf.mod])
def test_integers_by_a_tensor_with_a_zero(divide):
  """Told when it runs: at once if eager, by the function that is called if traced."""
  impl = mtf.PlacementMeshImpl("all:1", "", ["/device:CPU:0"])
  x = numbers(np.int32)
  divide(x, mtf.zeros_like(x))
  with pytest.raises(mtf.DivisionError, match="divides an integer by zero"):
    mtf.Lowering(x.graph, {x.mesh: impl})
  spec = mtf.TensorSpec([A], "int32")
  program = mtf.function(impl, [spec, spec])(divide)
  with pytest.raises(mtf.DivisionError, match="divides an integer by zero"):
    program(np.ones([4], np.int32), np.array([1, 0, 2, 3], np.int32))
  np.testing.assert_array_equal(
    program(np.full([4], 7, np.int32), np.full([4], 2, np.int32)), divide is mtf.mod or 3
  )
