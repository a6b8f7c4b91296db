"""Variable scopes: the names that checkpoints know."""

from __future__ import annotations

import threading

import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import GraphError
from mesh_tensorflow.program import scope


@pytest.fixture
def graph():
  return mtf.Graph()


def names(graph, *default_names):
  """Opens one scope after another by default name."""
  found = []
  for name in default_names:
    with mtf.variable_scope(None, default_name=name, graph=graph) as opened:
      found.append(opened.name)
  return found


def test_full_name():
  assert scope.full_variable_name("kernel") == "kernel"
  with mtf.variable_scope("encoder"):
    with mtf.variable_scope("dense"):
      assert scope.full_variable_name("kernel") == "encoder/dense/kernel"
    assert scope.full_variable_name("scale") == "encoder/scale"


def test_names_with_slashes():
  with mtf.variable_scope("encoder/block_000"):
    assert scope.full_variable_name("kernel") == "encoder/block_000/kernel"


def test_explicit_name_is_shared():
  found = []
  for _ in range(2):
    with mtf.variable_scope("dense"):
      found.append(scope.full_variable_name("kernel"))
  assert found == ["dense/kernel"] * 2


def test_default_names_are_made_unique(graph):
  assert names(graph, "dense", "dense", "norm", "dense") == ["dense", "dense_1", "norm", "dense_2"]


def test_each_graph_counts_for_itself(graph):
  assert names(graph, "dense", "dense") == ["dense", "dense_1"]
  assert names(mtf.Graph(), "dense") == ["dense"]


def test_counts_start_anew_in_each_scope(graph):
  with mtf.variable_scope("a"):
    assert names(graph, "dense", "dense") == ["a/dense", "a/dense_1"]
  with mtf.variable_scope("b"):
    assert names(graph, "dense") == ["b/dense"]


def test_counts_start_anew_when_a_scope_is_opened_again(graph):
  for _ in range(2):
    with mtf.variable_scope("a"):
      assert names(graph, "dense") == ["a/dense"]


def test_an_explicit_name_takes_a_default_name(graph):
  with mtf.variable_scope("around"):
    with mtf.variable_scope("dense"):
      pass
    assert names(graph, "dense") == ["around/dense_1"]


def test_name_wins_over_default_name():
  with mtf.variable_scope("given", default_name="default") as opened:
    assert opened.name == "given"


def test_an_open_scope_can_be_entered_again():
  with mtf.variable_scope("a"), mtf.variable_scope("b") as inner:
    pass
  with mtf.variable_scope("elsewhere"), mtf.variable_scope(inner):
    assert scope.full_variable_name("v") == "a/b/v"


def test_no_name():
  with pytest.raises(GraphError):
    with mtf.variable_scope(None):
      pass


def test_scope_is_closed_after_an_error():
  with pytest.raises(KeyError):
    with mtf.variable_scope("a"):
      raise KeyError
  assert scope.full_variable_name("v") == "v"


def test_outside_all_scopes():
  with mtf.variable_scope("a"):
    with scope.outside_all_scopes():
      assert scope.full_variable_name("v") == "v"
    assert scope.full_variable_name("v") == "a/v"


def test_threads_do_not_see_each_other():
  found = []
  with mtf.variable_scope("a"):
    thread = threading.Thread(target=lambda: found.append(scope.full_variable_name("v")))
    thread.start()
    thread.join()
  assert found == ["v"]


def test_variables_get_the_names(graph):
  mesh = mtf.Mesh(graph, "m")
  with mtf.variable_scope("encoder"):
    v = mtf.get_variable(mesh, "kernel", "a:4")
  assert v.name == "encoder/kernel:0"
  assert v.operation.full_name == "encoder/kernel"
  assert graph.name_to_variable == {"encoder/kernel": v.operation}


def test_a_variable_is_found_again(graph):
  mesh = mtf.Mesh(graph, "m")
  with mtf.variable_scope("encoder"):
    v = mtf.get_variable(mesh, "kernel", "a:4")
  with mtf.variable_scope("encoder"):
    assert mtf.get_variable(mesh, "kernel", "a:4") is v
  assert mtf.get_variable(mesh, "kernel", "a:4") is not v


def test_operations_get_the_names(graph):
  mesh = mtf.Mesh(graph, "m")
  with mtf.variable_scope("encoder"):
    x = mtf.zeros(mesh, "a:4")
  assert x.operation.name == "encoder/constant"
