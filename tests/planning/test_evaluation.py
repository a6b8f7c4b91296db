"""Chains of operations: a sum that is pending stays in one."""

from __future__ import annotations

import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.planning.evaluation import Evaluator

A, B, C = mtf.Dimension("a", 8), mtf.Dimension("b", 4), mtf.Dimension("c", 6)


@pytest.fixture
def program():
  """relu(x . v + x . w): the two products, if `b` is split, are summed after they are added."""
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  x, v, w = (mtf.get_variable(mesh, n, s) for n, s in (("x", [A, B]), ("v", [B, C]), ("w", [B, C])))
  products = [mtf.einsum([x, y], output_shape=[A, C]) for y in (v, w)]
  result = mtf.relu(mtf.add(*products))
  return graph, result


def chains_of(program):
  graph, result = program
  chains = Evaluator(graph, [result])
  return chains, [[chains.units[i].operation.name for i in c.units] for c in chains.chains]


def sums_of(step):
  return [(s.axes, s.bytes) for s in step.sums]


def test_a_sum_that_is_pending_is_in_one_chain_with_what_it_passes(program):
  chains, names = chains_of(program)
  assert names == [["x"], ["v"], ["einsum", "einsum_1", "add"], ["relu"]]
  assert [c.count for c in chains.chains] == [1, 2, 1, 1]
  assert [c.dims for c in chains.chains] == [["a", "b"], ["b", "c"], ["a", "b", "c"], ["a", "c"]]
  assert (chains.forbidden, chains.others) == ({}, [])


@pytest.mark.parametrize(
  ("layout", "sums"),
  # A slice of 8 by 6 numbers of 4 bytes, or of a quarter of its rows.
  [({"a": 0}, {}), ({"b": 0}, {"relu": [((0,), 192)]}), ({"b": 0, "a": 1}, {"relu": [((0,), 48)]})],
)
def test_it_is_executed_by_what_it_cannot_pass(layout, sums, program):
  chains, _ = chains_of(program)
  steps = chains.walk(range(len(chains.units)), layout, (2, 4))
  executed = {chains.units[s.index].operation.name: sums_of(s) for s in steps if s.sums}
  assert executed == sums


def test_a_chain_executes_what_goes_out_of_it(program):
  chains, names = chains_of(program)
  (alone,) = (c for c, n in zip(chains.chains, names) if "add" in n)
  steps = chains.walk(alone.units, {"b": 0}, (2, 4))
  assert [sums_of(s) for s in steps] == [[], [], [((0,), 192)]]
