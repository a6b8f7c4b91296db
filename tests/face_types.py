"""What a type checker sees of the face, `import mesh_tensorflow as mtf`: types, and not Any.

`check_types.py` checks it with the package; it is never run.
"""

from typing_extensions import assert_type

import mesh_tensorflow as mtf


def seen(x: mtf.Tensor, batch: mtf.Dimension, lowering: mtf.Lowering, graph: mtf.Graph) -> None:
  """Each of these would be Any if a line of the face no longer exported what it imports."""
  assert_type(x.shape, mtf.Shape)
  assert_type(x.shape[0], mtf.Dimension)
  assert_type(x.shape - batch, mtf.Shape)
  assert_type(batch.size, int)
  assert_type(2 * x + x, mtf.Tensor)
  assert_type(mtf.convert_to_shape("rows:2,cols:4"), mtf.Shape)
  assert_type(mtf.convert_to_dimension(None), None)
  assert_type(mtf.reduce_sum(x, reduced_dim=batch), mtf.Tensor)
  assert_type(mtf.layers.dense(x, batch), mtf.Tensor)
  assert_type(mtf.optimize.AdafactorOptimizer(), mtf.optimize.AdafactorOptimizer)
  assert_type(mtf.Mesh(graph, "m"), mtf.Mesh)
  assert_type(mtf.SimdMeshImpl("rows:2", {"batch": "rows"}), mtf.SimdMeshImpl)
  assert_type(mtf.PlacementMeshImpl("rows:1", "", [""]), mtf.PlacementMeshImpl)
  assert_type(lowering.mesh_impl(x), mtf.MeshImpl)
  assert_type(graph.operations, list[mtf.Operation])
  assert_type(mtf.TensorSpec([batch]), mtf.TensorSpec)
  assert_type(mtf.VariableStore().names, list[str])


def seen_late(store: mtf.VariableStore, stack: mtf.transformer.transformer.LayerStack) -> None:
  """Packages that are imported when they are asked for first."""
  assert_type(mtf.checkpoint.Checkpointer("folder", store), mtf.checkpoint.Checkpointer)
  assert_type(mtf.bert.bert.BertConfig(vocab_size=8), mtf.bert.bert.BertConfig)
  assert_type(mtf.checkpoint.latest_checkpoint("folder"), str | None)
  assert_type(stack, mtf.transformer.transformer.LayerStack)
