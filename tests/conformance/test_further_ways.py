"""The further ways themselves: what they must refuse, and the mistakes that they must find."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.conformance import framework, further_ways, suite
from tests.conformance.framework import T, op
from tests.conformance.suite import AGAIN, ONE, WAYS


@pytest.mark.parametrize("mode", ["placement_eager", "simd_function"])
def test_what_cannot_be_differentiated_twice_says_so(mode, cpu_devices):
  descriptors = {d.name: d for family in suite.FAMILIES.values() for d in family}
  for name in further_ways.NOT_TWICE.keys() & descriptors.keys():
    again = further_ways.differentiated_again(descriptors[name])
    assert further_ways.refusal(again, mode, suite.WHOLE, cpu_devices) is None


def problems_of(descriptor: framework.Descriptor, way: str) -> list[str]:
  return further_ways.run(
    [suite.further_case(descriptor, way)],
    "placement_eager",
    framework.Layout("r:2,s:2", "a:r,b:s"),
    [""] * 4,
  )


@pytest.mark.parametrize("way", WAYS)
def test_no_mistake(way):
  assert problems_of(op("right", mtf.multiply, np.multiply, "a:4 b:8", "a:4 b:8"), way) == []


def test_a_gradient_of_each_place_that_is_that_of_all_is_found():
  """What the one tensor was there for: b4b88b2 gave 12 for the 6 of x * x at 3."""

  def twice(x, y):
    return mtf.cwise(
      tf.multiply,
      [x, y],
      grad_function=lambda op, dy: [dy * op.inputs[0] * 2.0, dy * op.inputs[1] * 2.0],
    )

  (problem,) = problems_of(op("twice", twice, np.multiply, "a:4 b:8", "a:4 b:8"), ONE)
  assert problem.startswith("twice_of_one: gradient 0: 32 of 32 values wrong")


def test_a_wrong_second_derivative_is_found():
  """A first derivative that is right, and a second one that is not."""

  def wrong(x):
    return mtf.cwise(
      tf.square, [x], grad_function=lambda op, dy: [dy * mtf.stop_gradient(op.inputs[0]) * 2.0]
    )

  (problem,) = problems_of(op("wrong", wrong, np.square, "a:4 b:8"), AGAIN)
  assert problem.startswith("wrong_again: gradient of the gradient")


def test_one_wrong_element_of_a_second_derivative_is_found():
  def wrong(x):
    weights = np.full([4, 8], 2.0, np.float32)
    stopped = np.zeros([4, 8], np.float32)
    weights[2, 3], stopped[2, 3] = 0.0, 2.0

    def gradient(op, dy):
      v = op.inputs[0]
      moving, fixed = (mtf.import_tf_tensor(x.mesh, c, x.shape) for c in (weights, stopped))
      return [dy * (v * moving + mtf.stop_gradient(v) * fixed)]

    return mtf.cwise(tf.square, [x], grad_function=gradient)

  (problem,) = problems_of(op("element", wrong, np.square, T("a:4 b:8", 0.5, 2.0)), AGAIN)
  assert problem.startswith("element_again: gradient of the gradient")
