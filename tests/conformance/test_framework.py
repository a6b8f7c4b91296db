"""The suite itself: a mistake of any kind must be found."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.conformance import framework, suite
from tests.conformance.framework import Layout, T, op

SPLIT = Layout("r:2,s:2", "a:r,b:s")


def problems_of(descriptor, mode="placement_eager", layout=SPLIT, devices=("", "", "", "")):
  return framework.check_family(mode, layout, [descriptor], devices)[1]


def test_names_of_descriptors_are_unique():
  names = [d.name for descriptors in suite.FAMILIES.values() for d in descriptors]
  assert len(names) == len(set(names))


def test_families_have_names_of_their_own():
  """By which their layouts are drawn."""
  assert len(suite.FAMILIES) == sum(len(families) for families in suite.FAMILIES_OF.values())


def test_no_mistake():
  assert problems_of(op("right", mtf.sin, np.sin, "a:4 b:8")) == []


@pytest.mark.parametrize("mode", framework.MODES)
def test_a_wrong_value_is_found(mode, cpu_devices):
  (problem,) = problems_of(
    op("wrong", mtf.sin, np.cos, "a:4 b:8", differentiable=False), mode, devices=cpu_devices
  )
  assert problem.startswith("wrong: output 0: 32 of 32 values wrong")


def test_one_wrong_value_is_found():
  def reference(x):
    x = x.copy()
    x[2, 3] *= 1 + 1e-4
    return x

  (problem,) = problems_of(
    op("near", mtf.identity, reference, T("a:4 b:8", 1.0, 1.1), differentiable=False)
  )
  assert "1 of 32 values wrong, the first at (2, 3)" in problem


def test_a_wrong_shape_is_found():
  (problem,) = problems_of(op("shape", mtf.sin, lambda x: np.sin(x).T, "a:4 b:8",
                              differentiable=False))  # fmt: skip
  assert "shape (4, 8), expected (8, 4)" in problem


def test_a_wrong_gradient_is_found():
  wrong = op("gradient", lambda x: mtf.stop_gradient(x) * x, lambda x: x * x, "a:4 b:8")
  (problem,) = problems_of(wrong)
  assert problem.startswith("gradient: gradient 0")


def test_a_missing_gradient_is_found():
  (problem,) = problems_of(op("missing", mtf.stop_gradient, lambda x: x, "a:4 b:8"))
  assert problem.startswith("missing: gradient 0")


def test_a_nan_is_found():
  (problem,) = problems_of(
    op("nan", lambda x: mtf.log(x - 1e6), np.sin, "a:4 b:8", differentiable=False)
  )
  assert "32 of 32 values wrong" in problem


def test_a_layout_that_should_be_refused_is_found():
  (problem,) = problems_of(op("refused", mtf.sin, np.sin, "a:4 b:8", unsplit="b"))
  assert problem == "refused: no LayoutError for a layout that is not legal"


def test_a_layout_that_should_not_be_refused_is_found():
  (problem,) = problems_of(
    op("allowed", lambda x: mtf.slice(x, 0, 4, "b"), lambda x: x[:, :4], "a:4 b:8")
  )
  assert problem.startswith("allowed: LayoutError")


def test_an_exception_is_told():
  (problem,) = problems_of(op("broken", lambda x: mtf.reshape(x, "a:5"), np.sin, "a:4 b:8"))
  assert problem.startswith("broken: ShapeError")


@pytest.mark.parametrize("mode", ["placement_eager", "simd_eager"])
def test_processors_that_do_not_agree_are_found(mode, cpu_devices):
  """A sum over the split dimension that nobody reduced."""

  class LocalSum(mtf.Operation):
    def __init__(self, x):
      super().__init__([x], name="local_sum")
      self._outputs = [mtf.Tensor(self, mtf.Shape(x.shape[:1]), x.dtype)]

    def lower(self, lowering):
      y = lowering.mesh_impl(self).slicewise(
        lambda t: tf.reduce_sum(t, 1), lowering.tensors[self.inputs[0]]
      )
      lowering.set_tensor_lowering(self.outputs[0], y)

  found = problems_of(
    op("local", lambda x: LocalSum(x).outputs[0], lambda x: x[:, :4].sum(1), "a:4 b:8",
       differentiable=False),
    mode, devices=cpu_devices,
  )  # fmt: skip
  assert found == ["local: y 0: processors do not agree about Shape[a=4]"]


def test_the_fault_of_one_operation_is_not_told_of_others():
  right = op("right", mtf.sin, np.sin, "a:4 b:8")
  broken = op("broken", lambda x: mtf.reshape(x, "a:5"), np.sin, "a:4 b:8")
  tally, problems = framework.check_family("placement_eager", SPLIT, [right, broken], [""] * 4)
  assert tally == framework.Tally(values=2, gradients=2, refusals=0)
  assert [p.split(":")[0] for p in problems] == ["broken"]


def test_finite_differences():
  x, y = np.array([1.0, 2.0]), np.array([3.0, -4.0])
  got = framework.finite_differences(lambda x, y: x * x * y, [x, y], 0, [np.array([1.0, 10.0])])
  np.testing.assert_allclose(got, [6.0, -160.0], rtol=1e-8)


def test_layouts_are_the_same_in_every_run():
  family = [op("a", mtf.sin, np.sin, "a:4 b:8"), op("b", mtf.sin, np.sin, "b:8 c:12")]
  assert framework.draw_layouts("f", family, 4) == framework.draw_layouts("f", family, 4)
  assert framework.draw_layouts("f", family, 4) != framework.draw_layouts("g", family, 4)


def test_layout_suits():
  layout = Layout("r:2,s:3", "a:r,b:r,c:s")
  assert layout.suits(mtf.Shape([("a", 4), ("c", 12)]))
  assert not layout.suits(mtf.Shape([("a", 4), ("b", 8)]))
  assert not layout.suits(mtf.Shape([("c", 4)]))
