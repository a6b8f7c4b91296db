"""What is chosen from what a user gives: arguments, meshes, names; each alone."""

from __future__ import annotations

import dataclasses
import types

import keras
import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.keras import hooks, layouts, mirror, steps, summary
from mesh_tensorflow.keras.batches import batch_of
from mesh_tensorflow.keras.parallelize import ParallelModel

X, Y = np.ones([2, 3], np.float32), np.zeros([2], np.float32)


@pytest.mark.parametrize(
  ("data", "names", "names_of_inputs"),
  [
    (X, ("inputs",), ("inputs",)),
    ((X, Y), ("inputs", "targets"), ("inputs",)),
    ((X, Y, Y), steps.ARGUMENTS, ("inputs",)),
  ],
)
def test_the_arguments_of_a_step(data, names, names_of_inputs):
  assert batch_of(data).names == names
  only = batch_of(data, inputs_only=True)
  assert only.names == names_of_inputs and len(only.values) == 1
  np.testing.assert_array_equal(only.leaves[0], X)


@pytest.mark.parametrize(
  ("rules", "name"),
  [("a:rows", "rows"), ("a:rows;b:rows", "rows"), ("", "all")],
)
def test_a_mesh_for_layout_rules(rules, name):
  shape = layouts._shape_for(mtf.convert_to_layout_rules(rules), 4)
  assert shape == mtf.Shape([(name, 4)])


def test_variables_of_one_path_have_different_names():
  variables = [keras.Variable(np.zeros([2], np.float32), name="same") for _ in range(4)]
  model = types.SimpleNamespace(
    variables=variables[:3], metrics_variables=variables[3:], trainable_variables=variables[1:2]
  )
  known: dict[int, steps.NamedVariable] = {}
  found = steps.named_variables(model, known)
  assert [v.path for v in found] == ["same", "same_2", "same_3", "same_4"]
  assert [v.trainable for v in found] == [False, True, False, False]
  assert [v.value for v in found] == [v.value for v in variables]
  # They keep their names, and what is trained may be others later.
  model.variables, model.trainable_variables = variables[::-1], variables
  model.metrics_variables = []
  again = steps.named_variables(model, known)
  assert [v.path for v in again] == ["same_4", "same_3", "same_2", "same"]
  assert all(v.trainable for v in again)


@pytest.mark.parametrize(
  ("name", "is_one"),
  [("cpu:0", True), ("GPU:1", True), ("/device:CPU:0", True), ("rows:2", False), ("", False)],
)
def test_names_of_devices(name, is_one):
  assert layouts._is_device(name) == is_one


def test_what_was_asked_of_a_variable():
  found = [summary._asked(axes) for axes in (None, (), ("model", None), (None,))]
  assert found == ["", "-", "model, -", "-"]


def test_attributes_are_those_of_the_model():
  model = types.SimpleNamespace(optimizer="an optimizer", _private=1)
  programs = dict(model=model, mirror=mirror.Mirror(), unsplit=hooks.Unsplit(model))
  parallel = ParallelModel(types.SimpleNamespace(**programs))
  assert parallel.optimizer == "an optimizer" and parallel.model is model
  assert parallel._private == 1
  for name in ("__private__", "nothing"):
    with pytest.raises(AttributeError, match=name):
      getattr(parallel, name)
  # As in a copy that is being made: it has no model yet.
  with pytest.raises(AttributeError, match="model"):
    _ = ParallelModel.__new__(ParallelModel).model


def test_values_on_the_host_are_compared_by_their_bytes():
  x = np.array([0.0, np.nan], np.float32)
  assert mirror._same(x, x) and mirror._same(x, x[:]) and mirror._same(x, x.copy())
  assert not mirror._same(x, np.array([-0.0, np.nan], np.float32))


def test_rules_that_do_not_suit_a_program_are_left_out_unless_they_always_hold(cpu_devices):
  """Five examples cannot be split in two; of variables nothing changes."""
  impl = mtf.PlacementMeshImpl("rows:2,cols:2", "a:rows;b:cols;c:cols;d:cols", cpu_devices[:4])
  sizes = {"a": 5, "b": 5, "c": 4, "e": 5}
  imported = types.SimpleNamespace(dimensions={n: mtf.Dimension(n, s) for n, s in sizes.items()})
  left = layouts.suited(impl, imported, ["b", "d"]).layout_rules
  assert left == mtf.convert_to_layout_rules("b:cols;c:cols;d:cols")
  assert layouts.suited(impl, imported, ["a", "b", "d"]) is impl
  # Of a dimension of other programs, too.
  left = layouts.suited(impl, imported, ["a", "b"]).layout_rules
  assert left == mtf.convert_to_layout_rules("a:rows;b:cols;c:cols")


def test_a_map_without_a_mesh_splits_examples_over_the_first_axis():
  shape = mtf.Shape([("first", 2), ("second", 2)])
  found = layouts.rules_of(keras.distribution.LayoutMap(None), [], shape, ["examples"], list)
  assert found.rules.pairs == [("examples", "first")] and not found.stored


def test_a_searched_layout_stays_where_dimensions_turn_out_to_be_the_same(cpu_devices):
  """If they are split alike; a program of generation may show it after training."""
  impl = mtf.PlacementMeshImpl("rows:2,cols:2", "a:rows;b:rows;c:cols", cpu_devices[:4])
  names = {"v": ("a", "c"), "w": ("b", "d"), "x": (None, "d")}
  decision = layouts.Decision(impl, names, "train", searched=True)
  found = decision.renamed({"b": "a"})
  assert found is not None and found.kind == "train"
  assert found.mesh_impl.layout_rules == mtf.convert_to_layout_rules("a:rows;c:cols")
  assert found.names == {"v": ("a", "c"), "w": ("a", "d"), "x": (None, "d")}
  # Split in different ways, of one variable, or by hand.
  assert decision.renamed({"d": "c"}) is None and decision.renamed({"c": "a"}) is None
  assert decision.renamed({"d": "b"}) is None
  assert dataclasses.replace(decision, searched=False).renamed({"b": "a"}) is None
