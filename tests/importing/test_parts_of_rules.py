"""Parts of the rules of TensorFlow's operations, each alone."""

from __future__ import annotations

import types

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.importing import drawing, value
from mesh_tensorflow.importing.families.slicing import cut_axis_at
from mesh_tensorflow.importing.nested import branch_number

A, B = mtf.Dimension("a", 2), mtf.Dimension("b", 3)


@pytest.mark.parametrize(("number", "taken"), [(-1, 2), (0, 0), (1, 1), (2, 2), (3, 2)])
def test_a_branch_number_out_of_range_means_the_last(number, taken):
  assert branch_number(number, 3) == taken


@pytest.mark.parametrize("begin", [0, 2, -4, -3])
def test_positions_from_one_that_is_computed(begin):
  x = np.arange(30).reshape(5, 6)
  places = range(begin % 6, begin % 6 + 3)
  got = cut_axis_at(tf.constant(x), 1, tf.constant(begin), 3)
  np.testing.assert_array_equal(got, x[:, list(places)])


@pytest.mark.parametrize(
  ("values", "kind"),
  # Of one number each processor fills its slice; others are brought to it.
  [(np.full([2, 3], 7), "Constant"), (np.arange(6).reshape(2, 3), "ImportOperation")],
)
def test_values_that_were_known_while_tracing(values, kind):
  mesh = mtf.Mesh(mtf.Graph(), "m")
  made = value.of_static(mesh, values, [(A,), (B,)], tf.int32)
  assert type(made.tensor.operation).__name__ == kind
  assert made.tensor.shape == mtf.Shape([A, B]) and made.axes == ((A,), (B,))
  lowering = mtf.Lowering(mesh.graph, {mesh: mtf.PlacementMeshImpl("all:1", "", [""])})
  np.testing.assert_array_equal(lowering.export_to_tf_tensor(made.tensor), values)


def test_a_picture_has_a_box_for_each_run_of_names_that_begin_alike():
  names = ["net/up/MatMul", "net/up/Add", "net/down/MatMul", "loss", "net/up/Relu"]
  nodes = [types.SimpleNamespace(name=n, type="Mean") for n in names]
  parts = drawing._parts(types.SimpleNamespace(nodes=nodes))
  assert [(p.name, [n.name for n in p.nodes]) for p in parts] == [
    ("net/up", names[:2]), ("net/down", names[2:3]), ("Mean", names[3:4]), ("net/up", names[4:])
  ]  # fmt: skip
