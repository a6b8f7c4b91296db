"""Each wrong use of the language gets its typed error, with the words that help, at build time."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.planning.mesh_impl import PlanMeshImpl
from tests.conformance.framework import Layout, make_impl
from tests.errors import error_layout_rows, error_rows_layers
from tests.errors.error_rows import ROWS, World

LAYOUT_ROWS = error_layout_rows.LAYOUT_ROWS + error_rows_layers.LAYOUT_ROWS


def _has(text: str, word: str) -> bool:
  if word in ("x", "y", "i", "t"):
    return f"Tensor[{word}:0, Shape[" in text
  return re.search(rf"(?<!\w){re.escape(word)}", text) is not None


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.name.replace(" ", "_"))
def test_wrong_use(row):
  world = World()
  with pytest.raises(row.error) as caught:
    row.provoke(world)
  error = caught.value
  # (gin wraps errors of its configurables into a class of the same name.)
  assert type(error).__name__ == row.error.__name__
  assert isinstance(error, row.old)
  assert isinstance(error, errors.MeshError) or row.error is NotImplementedError
  missing = [w for w in row.words if not _has(str(error), w)]
  assert not missing, f"{missing} not in: {error}"


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.name.replace(" ", "_"))
def test_a_wrong_use_leaves_the_graph_usable(row):
  """Nothing half-built stays in the graph, and the store has what it should have."""
  world = World()
  with pytest.raises(row.error):
    row.provoke(world)
  if any(type(op) is mtf.Operation for op in world.graph.operations):
    return  # The row is about an operation that is complete and can only not be lowered.
  for op in world.graph.operations:
    assert op.outputs or isinstance(op, mtf.Assign), op
    op.to_string  # noqa: B018 - works for every operation that is there.
  impl = mtf.PlacementMeshImpl("rows:2", "a:rows", ["", ""])
  impls = {op.mesh: impl for op in world.graph.operations}
  lowering = mtf.Lowering(world.graph, impls)
  np.testing.assert_array_equal(lowering.export_to_tf_tensor(world.x), np.ones([4, 8]))
  assert "v" in impl.variable_store


def test_names_of_rows_differ():
  names = [r.name for r in ROWS] + [r.name for r in LAYOUT_ROWS]
  assert len(set(names)) == len(names)


def _impls(row, cpu_devices):
  size = mtf.convert_to_shape(row.mesh_shape).size
  yield mtf.PlacementMeshImpl(row.mesh_shape, row.layout, [""] * size)
  yield make_impl("simd", Layout(row.mesh_shape, row.layout), cpu_devices)
  yield PlanMeshImpl(row.mesh_shape, row.layout)


@pytest.mark.parametrize("row", LAYOUT_ROWS, ids=lambda r: r.name.replace(" ", "_"))
def test_layout_that_cannot_work(row, cpu_devices):
  """Every mesh implementation refuses it before anything is lowered."""
  for impl in _impls(row, cpu_devices):
    world = World()
    before = world.v * 1.0  # Something to lower before the operation that does not suit.
    row.build(world)

    def program(world=world, impl=impl, before=before):
      return mtf.Lowering(world.graph, {world.mesh: impl}).export_to_tf_tensor(before)

    with pytest.raises(errors.LayoutError) as caught:
      impl.run(program)
    text = str(caught.value)
    missing = [w for w in row.words if not _has(text, w)]
    assert not missing, f"{type(impl).__name__}: {missing} not in: {text}"
    assert len(impl.variable_store) == 0


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("kind", ["placement", "simd"])
def test_a_failed_lowering_leaves_the_store_usable(kind, mode, cpu_devices):
  """An operation that fails while it runs: variables made so far are found by the next lowering."""
  impl = make_impl(kind, Layout("rows:2", "a:rows"), cpu_devices)

  def run(fn):
    def program():
      world = World()
      mtf.assign_add(world.v, world.x)
      y = mtf.slicewise(fn, [world.x], splittable_dims=[mtf.Dimension("a", 4)])
      z = mtf.get_variable(world.mesh, "z", [mtf.Dimension("a", 4)], initializer=2.0)
      low = mtf.Lowering(world.graph, {world.mesh: impl})
      return low.export_to_tf_tensor(y), low.export_to_tf_tensor(z)

    call = lambda: impl.run(program)  # noqa: E731
    return call() if mode == "eager" else tf.function(call)()

  def broken(t):
    raise RuntimeError(f"no value for {t.shape}")

  with pytest.raises(RuntimeError, match="no value"):
    run(broken)
  assert impl.variable_store.names == ["v"]
  y, z = run(tf.square)
  np.testing.assert_array_equal(y, np.ones([4, 8]))
  np.testing.assert_array_equal(z, np.full([4], 2.0))
  assert impl.variable_store.names == ["v", "z"]


def test_slices_of_another_shape_than_was_said():
  """What only the run can tell: the function of a slicewise operation returns something else."""
  world = World()
  dims = world.x.shape.dims
  mtf.slicewise(tf.transpose, [world.x], splittable_dims=dims, name="turned")
  impl = mtf.PlacementMeshImpl("rows:2", "a:rows", ["", ""])
  with pytest.raises(errors.LayoutError) as caught:
    mtf.Lowering(world.graph, {world.mesh: impl})
  for word in ("SlicewiseOperation", "turned", "a=4, b=8", "[8, 2]", "[2, 8]"):
    assert word in str(caught.value)


def test_an_unknown_mesh_dimension_is_named_with_the_nearest_one(caplog):
  with caplog.at_level("WARNING", logger="mesh_tensorflow"):
    mtf.PlacementMeshImpl("rows:2,cols:2", "a:row", [""] * 4)
  assert "a:row" in caplog.text
  assert "a:rows" in caplog.text
