"""Every operation and layer with one tensor at several inputs, and differentiated twice.

A long run, on every drawn layout: `MTF_CONFORMANCE_DRAWS=30 pytest -n 2
tests/conformance/test_further_ways.py`; otherwise each is run on one layout, in one mode.
"""

from __future__ import annotations

import collections
import functools
import pathlib

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.conformance import framework, further_ways
from tests.conformance.framework import T, op
from tests.conformance.test_conformance import ALL_TRACED, DRAWS, FAMILIES, layouts

ONE, AGAIN = "one tensor at several inputs", "gradients differentiated again"
WAYS = (ONE, AGAIN)
# They take turns. What is traced takes longest, so layers, which are made of operations, are not.
EAGER = ("placement_eager", "simd_eager")
TURNS = (*EAGER, *EAGER, "placement_function", "simd_eager", "placement_eager", "simd_function")
WHOLE = framework.Layout("r:1", "")


def _turns(family: str) -> tuple[str, ...]:
  layers = pathlib.Path(__file__).parents[1] / "layers" / f"descriptors_{family}.py"
  return EAGER if layers.exists() and not ALL_TRACED else TURNS


def _drawn(family: str, index: int) -> list[framework.Layout]:
  """The layouts that a descriptor of a family is run on: one, the next one for the next."""
  descriptor = FAMILIES[family][index]
  legal = [
    layout
    for layout in layouts(family)[:DRAWS]
    if not descriptor.is_illegal(layout)
    and (descriptor.has_gradient(layout) or not descriptor.differentiable)
  ] or [WHOLE]
  return legal if ALL_TRACED else [legal[index % len(legal)]]


def _case(descriptor: framework.Descriptor, way: str):
  """What is run, and what checks it; None if the descriptor cannot be run in this way."""
  if way == ONE:
    one = further_ways.with_one_tensor(descriptor)
    return one and (one, functools.partial(framework.compare, one))
  if not descriptor.differentiable or descriptor.name in further_ways.NOT_TWICE:
    return None
  again = further_ways.differentiated_again(descriptor)
  return again.descriptor, again.check


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, way, cpu_devices, record_property):
  programs = collections.defaultdict(list)
  problems = []
  count, turns = 0, _turns(family)
  for i, descriptor in enumerate(FAMILIES[family]):
    case = _case(descriptor, way)
    for layout in _drawn(family, i) if case else ():
      programs[turns[count % len(turns)], layout].append(case)
      count += 1
  with framework.graph_optimizer(False):
    for (mode, layout), cases in programs.items():
      found = further_ways.run(cases, mode, layout, cpu_devices)
      problems += [f"{p} ({layout}, {mode})" for p in found]
  record_property("conformance_way", {"family": family, "way": way, "cases": count})
  assert not problems, "\n  ".join(["", *problems])


@pytest.mark.parametrize("mode", ["placement_eager", "simd_function"])
def test_what_cannot_be_differentiated_twice_says_so(mode, cpu_devices):
  descriptors = {d.name: d for family in FAMILIES.values() for d in family}
  for name in further_ways.NOT_TWICE.keys() & descriptors.keys():
    again = further_ways.differentiated_again(descriptors[name])
    assert further_ways.refusal(again, mode, WHOLE, cpu_devices) is None


def problems_of(descriptor: framework.Descriptor, way: str) -> list[str]:
  return further_ways.run(
    [_case(descriptor, way)], "placement_eager", framework.Layout("r:2,s:2", "a:r,b:s"), [""] * 4
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
