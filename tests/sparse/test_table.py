"""What a table is to its graph, and to the store of its mesh."""

from __future__ import annotations

import numpy as np

import mesh_tensorflow as mtf

IDS, ROWS, WIDTH = mtf.Dimension("ids", 2), mtf.Dimension("rows", 6), mtf.Dimension("width", 3)


def test_only_what_is_looked_up_trains_a_table(cpu_devices):
  """To the graph, to TensorFlow's tapes and to what is remade it is not among what is trained."""
  impl = mtf.PlacementMeshImpl("m:1", "", cpu_devices[:1])
  found = {}

  @mtf.function(impl, [mtf.TensorSpec([IDS], "int32")])
  def step(ids):
    table = mtf.sparse.table(ids.mesh, "table", ROWS, WIDTH)
    bias = mtf.get_variable(ids.mesh, "bias", [WIDTH])
    loss = mtf.reduce_sum(mtf.sparse.lookup(table, ids) + bias)
    mtf.sparse.minimize(loss, mtf.sparse.Sgd(1.0))
    found.update(graph=ids.graph, table=table)
    return loss

  step(np.array([1, 4]))
  assert [v.full_name for v in found["graph"].trainable_variables] == ["bias"]
  assert {v.name: v.trainable for v in impl.variable_store if not v.name.startswith("_")} == {
    "bias": True, "table": False
  }  # fmt: skip
  (update,) = (op for op in found["graph"].operations if op.name.endswith("update_rows"))
  assert update.outputs == [] and not update.has_gradient


def test_rows_as_a_pair_as_dimensions_and_as_several_of_them():
  mesh = mtf.Mesh(mtf.Graph(), "m")
  two = [mtf.Dimension("a", 2), mtf.Dimension("b", 3)]
  ways = {"pair": ("rows", 6), "one": ROWS, "list": [ROWS], "two": two}
  for name, given in ways.items():
    rows = two if name == "two" else [ROWS]
    table = mtf.sparse.table(mesh, name, given, WIDTH)
    assert (table.rows, table.num_rows) == (rows, 6)
    assert table.shape == mtf.Shape([*rows, WIDTH])
