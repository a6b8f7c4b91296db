"""Attention between the blocks of an image: what a pixel sees, names, errors."""

from __future__ import annotations

import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.errors import LayoutError, ShapeError

H, KV = mtf.Dimension("heads", 2), mtf.Dimension("kv", 4)
ROW, IMAGE = "b:2 nw:4 w:3 d:4", "b:2 nh:3 nw:4 h:2 w:3 d:4"
RNG = np.random.default_rng(0)


def run(array, dims, mask_right, store, mesh_shape="all:1", layout=""):
  mesh = mtf.Mesh(mtf.Graph(), "m")
  x = mtf.import_tf_tensor(mesh, array, dims)
  layer = (
    layers.local_2d_self_attention_spatial_blocks
    if "nh" in dims
    else layers.local_self_attention_spatial_blocks
  )
  y = layer(x, KV, H, False, mask_right=mask_right)
  assert y.shape == x.shape
  n = mtf.convert_to_shape(mesh_shape).size
  impl = mtf.placement_mesh_impl.PlacementMeshImpl(
    mesh_shape, layout, [""] * n, variable_store=store
  )
  lowering = mtf.Lowering(mesh.graph, {mesh: impl})
  return lowering.export_to_tf_tensor(y).numpy()


def draw(dims):
  return RNG.normal(size=mtf.convert_to_shape(dims).to_integer_list).astype("f")


def moved_by(dims, mask_right, position):
  """Which outputs change with the input at a position (of all dimensions but b and d)."""
  store, array = mtf.VariableStore(), draw(dims)
  before = run(array, dims, mask_right, store)
  array[(slice(None), *position)] += 1.0
  after = run(array, dims, mask_right, store)
  assert store.names == ["multihead_attention/qkvo"]
  return np.abs(after - before).max((0, -1)) > 1e-5


def test_row():
  expected = np.zeros([4, 3], bool)
  expected[0:3] = True
  np.testing.assert_array_equal(moved_by(ROW, False, (1, 1)), expected)


def test_row_masked():
  expected = np.array([[0, 0, 0], [0, 1, 1], [1, 1, 1], [0, 0, 0]], bool)
  np.testing.assert_array_equal(moved_by(ROW, True, (1, 1)), expected)


def test_image():
  expected = np.zeros([3, 4, 2, 3], bool)
  expected[0:2, 1:4] = True
  np.testing.assert_array_equal(moved_by(IMAGE, False, (0, 2, 1, 1)), expected)


def test_image_masked():
  expected = np.zeros([3, 4, 2, 3], bool)
  # The blocks on the right, below and between; its own from the pixel on.
  expected[0:2, 2:4] = True
  expected[0, 2] = [[False, False, True], [True, True, True]]
  np.testing.assert_array_equal(moved_by(IMAGE, True, (0, 2, 0, 2)), expected)


@pytest.mark.parametrize("dims, mask_right", [(ROW, True), (IMAGE, True)])
def test_first_pixel_sees_itself_alone(dims, mask_right):
  store, array = mtf.VariableStore(), draw(dims)
  y = run(array, dims, mask_right, store)
  _, _, wv, wo = store["multihead_attention/qkvo"].numpy()
  first = (slice(None), *[0] * (array.ndim - 2))
  alone = np.einsum("bd,hdk,hek->be", array[first], wv, wo)
  np.testing.assert_allclose(y[first], alone, rtol=1e-4, atol=1e-5)


def test_weights_add_up_to_one_over_the_whole_memory():
  """With one value everywhere, attention gives that value's projection, also at the borders."""
  store = mtf.VariableStore()
  array = np.broadcast_to(draw("d:4"), [2, 3, 4, 2, 3, 4])
  y = run(array, IMAGE, False, store)
  _, _, wv, wo = store["multihead_attention/qkvo"].numpy()
  alone = np.einsum("...d,hdk,hek->...e", array, wv, wo)
  np.testing.assert_allclose(y, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  "dims, layout", [(ROW, "nw:r,heads:s"), (IMAGE, "nw:r,b:s"), (IMAGE, "b:s,w:r")]
)
@pytest.mark.parametrize("mask_right", [True, False])
def test_split(dims, layout, mask_right):
  dims = dims.replace("w:3", "w:4")
  array = draw(dims)
  # Each with a store of its own: initial weights do not depend on the layout.
  whole = run(array, dims, mask_right, mtf.VariableStore())
  split = run(array, dims, mask_right, mtf.VariableStore(), "r:4,s:2", layout)
  np.testing.assert_allclose(split, whole, rtol=1e-5, atol=1e-6)


def test_memory_must_not_be_split():
  array = draw("b:2 nw:4 w:4 d:4")
  with pytest.raises(LayoutError, match="memory_w:4.*r:4"):
    run(array, "b:2 nw:4 w:4 d:4", True, mtf.VariableStore(), "r:4", "memory_w:r")


def test_names_of_the_memory():
  mesh = mtf.Mesh(mtf.Graph(), "m")
  x = mtf.zeros(mesh, IMAGE)
  mh = mtf.Dimension("rows", 2)
  layers.local_2d_self_attention_spatial_blocks(x, KV, H, False, memory_h_dim=mh, name="mine")
  names = {d.name for op in mesh.graph.operations for t in op.outputs for d in t.shape}
  assert {"rows", "memory_w"} <= names and "memory_h" not in names
  assert [v.full_name for v in mesh.graph.all_variables] == ["mine/qkvo"]
  with pytest.raises(ShapeError, match="h=2 of .* cannot be called nw in the memory"):
    layers.local_2d_self_attention_spatial_blocks(
      x, KV, H, False, memory_h_dim=mtf.Dimension("nw", 4)
    )


def test_too_few_dimensions():
  mesh = mtf.Mesh(mtf.Graph(), "m")
  with pytest.raises(ShapeError, match=r"num_w_blocks, w, io_channels\], got .*w=4"):
    layers.local_self_attention_spatial_blocks(mtf.zeros(mesh, "w:4 d:8"), KV, H, False)
  with pytest.raises(ShapeError, match=r"num_h_blocks, num_w_blocks, h, w, io_channels\], got"):
    layers.local_2d_self_attention_spatial_blocks(mtf.zeros(mesh, ROW), KV, H, False)


def test_mask_of_a_memory_that_is_too_small():
  mesh = mtf.Mesh(mtf.Graph(), "m")
  h, w = mtf.Dimension("h", 2), mtf.Dimension("w", 4)
  with pytest.raises(ShapeError, match="mw=3 must be at least as large as the block, w=4"):
    layers.attention_bias_local_2d_block(mesh, h, w, mtf.Dimension("mh", 4), mtf.Dimension("mw", 3))


def test_mask_of_one_block_is_causal_row_by_row():
  mesh = mtf.Mesh(mtf.Graph(), "m")
  dims = [mtf.Dimension(n, s) for n, s in (("h", 3), ("w", 4), ("mh", 3), ("mw", 4))]
  mask = layers.attention_bias_local_2d_block(mesh, *dims)
  impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:1", "", [""])
  lowering = mtf.Lowering(mesh.graph, {mesh: impl})
  mask = lowering.export_to_tf_tensor(mask).numpy().reshape(12, 12)
  np.testing.assert_array_equal(mask, np.where(np.tril(np.ones([12, 12])), 0.0, -1e9))
