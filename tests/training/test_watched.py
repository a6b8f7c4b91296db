"""What a search for NaN tells of a tensor: whose gradient it is, or where it was computed."""

from __future__ import annotations

import mesh_tensorflow as mtf
from mesh_tensorflow.training import nonfinite


def test_gradients_and_variables_are_told_as_such():
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  a = mtf.Dimension("a", 4)
  w, unused = (mtf.get_variable(mesh, n, [a]) for n in ("w", "unused"))
  loss = mtf.reduce_sum(mtf.square(w))
  variables = list(graph.trainable_variables)
  gradients = mtf.gradients([loss], [v.value for v in variables])
  names, counts = nonfinite.watched(graph, gradients, variables)
  assert len(names) == len(counts)
  assert [n for n in names if "gradient of" in n] == ["the gradient of w"]
  assert {n for n in names if n.startswith("variable ")} == {"variable w", "variable unused"}
  assert any(n.startswith("square") or "Shape[a=4]" in n for n in names)
  del unused
