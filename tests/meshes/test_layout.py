"""Layout rules and tensor layouts, and the shapes of slices that they give."""

from __future__ import annotations

import logging

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import LayoutError

MESH = mtf.Shape([("rows", 2), ("cols", 4)])
D_FF = mtf.Dimension("d_ff", 8)
HEADS = mtf.Dimension("heads", 4)


class TestConvert:
  @pytest.mark.parametrize(
    "text",
    [
      "d_ff:rows;heads:cols",
      "d_ff:rows.heads:cols",
      "d_ff:rows heads:cols",
      "d_ff:rows,heads:cols",
    ],
  )
  def test_text(self, text):
    expected = mtf.LayoutRules([("d_ff", "rows"), ("heads", "cols")])
    assert mtf.convert_to_layout_rules(text)._pairs == expected._pairs

  def test_rules_are_returned_as_they_are(self):
    rules = mtf.LayoutRules([])
    assert mtf.convert_to_layout_rules(rules) is rules

  @pytest.mark.parametrize("rules", [[("d_ff", "rows")], {("d_ff", "rows")}, {"d_ff": "rows"}])
  def test_other_forms(self, rules):
    assert mtf.convert_to_layout_rules(rules)._pairs == {("d_ff", "rows")}

  def test_empty(self):
    assert mtf.convert_to_layout_rules("")._pairs == set()
    assert mtf.convert_to_layout_rules({})._pairs == set()

  @pytest.mark.parametrize("text", ["d_ff;heads", "d_ff:rows:cols", "d_ff:"])
  def test_malformed(self, text):
    with pytest.raises(ValueError):
      mtf.convert_to_layout_rules(text)

  def test_no_pair(self):
    with pytest.raises(LayoutError):
      mtf.LayoutRules([("a", "b", "c")])

  def test_repr_shows_the_rules(self):
    assert repr(mtf.LayoutRules([("d_ff", "rows")])) == "LayoutRules{('d_ff', 'rows')}"


class TestRules:
  def test_axis_of_a_dimension(self):
    rules = mtf.convert_to_layout_rules("d_ff:rows;heads:cols")
    assert rules.tensor_dimension_to_mesh_axis(D_FF, MESH) == 0
    assert rules.tensor_dimension_to_mesh_axis(HEADS, MESH) == 1
    assert rules.tensor_dimension_to_mesh_axis(mtf.Dimension("batch", 8), MESH) is None

  def test_only_the_name_matters(self):
    rules = mtf.convert_to_layout_rules("d_ff:rows")
    assert rules.tensor_dimension_to_mesh_axis(mtf.Dimension("d_ff", 3), MESH) == 0

  def test_two_axes_for_one_dimension(self):
    rules = mtf.convert_to_layout_rules("d_ff:rows;d_ff:cols")
    with pytest.raises(LayoutError, match="d_ff.*rows.*cols"):
      rules.tensor_dimension_to_mesh_axis(D_FF, MESH)

  def test_rules_for_other_meshes_are_ignored(self):
    rules = mtf.convert_to_layout_rules("d_ff:rows;d_ff:layers;heads:layers")
    assert rules.tensor_dimension_to_mesh_axis(D_FF, MESH) == 0
    assert rules.tensor_dimension_to_mesh_axis(HEADS, MESH) is None
    assert rules.check_mesh(MESH) == [("d_ff", "layers"), ("heads", "layers")]

  def test_an_ignored_rule_is_logged(self, caplog):
    with caplog.at_level(logging.INFO, logger="mesh_tensorflow"):
      mtf.MeshImpl(MESH, "d_ff:rowz")
    assert "d_ff:rowz" in caplog.text

  def test_names_on_a_mesh_dimension(self):
    rules = mtf.convert_to_layout_rules("d_ff:rows;heads:cols;vocab:rows")
    assert set(rules.mesh_dimension_name_to_tensor_dimension_names("rows")) == {"d_ff", "vocab"}
    assert rules.mesh_dimension_name_to_tensor_dimension_names("layers") == []

  def test_tensor_layout(self):
    rules = mtf.convert_to_layout_rules("d_ff:rows;heads:cols")
    shape = mtf.Shape([mtf.Dimension("batch", 2), HEADS, D_FF])
    assert rules.tensor_layout(shape, MESH) == mtf.TensorLayout([None, 1, 0])

  def test_two_dimensions_on_one_axis(self):
    rules = mtf.convert_to_layout_rules("d_ff:rows;heads:rows")
    with pytest.raises(LayoutError, match="heads:4.*d_ff:8.*rows:2"):
      rules.tensor_layout(mtf.Shape([HEADS, D_FF]), MESH)


class TestTensorLayout:
  @pytest.mark.parametrize("ndims,expected", [(0, ()), (1, (0,)), (2, (0, 2)), (3, (0, 2, 1))])
  def test_mesh_axis_to_tensor_axis(self, ndims, expected):
    assert mtf.TensorLayout([0, 2, 1]).mesh_axis_to_tensor_axis(ndims) == expected

  def test_is_fully_replicated(self):
    assert mtf.TensorLayout([None, None]).is_fully_replicated
    assert not mtf.TensorLayout([None, 0]).is_fully_replicated
    assert mtf.TensorLayout([]).is_fully_replicated

  def test_behaves_as_a_tuple(self):
    layout = mtf.TensorLayout([0, None, 1])
    assert len(layout) == 3
    assert layout[2] == 1
    assert list(layout) == [0, None, 1]
    assert layout.tensor_axis_to_mesh_axis == (0, None, 1)
    assert layout == mtf.TensorLayout((0, None, 1))
    assert layout != mtf.TensorLayout([0, None, None])
    assert repr(layout) == "TensorLayout(0, None, 1)"


class TestSizes:
  def test_tensor_dim_to_mesh_dim_size(self):
    assert mtf.tensor_dim_to_mesh_dim_size("d_ff:cols", "rows:2,cols:4", D_FF) == 4
    assert mtf.tensor_dim_to_mesh_dim_size("d_ff:cols", "rows:2,cols:4", HEADS) == 1

  def test_tensor_dim_to_size_per_split(self):
    assert mtf.tensor_dim_to_size_per_split("d_ff:cols", "rows:2,cols:4", D_FF) == 2
    assert mtf.tensor_dim_to_size_per_split("", "rows:2,cols:4", D_FF) == 8

  def test_size_that_does_not_divide(self):
    with pytest.raises(LayoutError, match="d_ff:8.*rows:3.*1, 2, 4, 8"):
      mtf.tensor_dim_to_size_per_split("d_ff:rows", "rows:3", D_FF)


class TestMeshImpl:
  def test_properties(self):
    impl = mtf.MeshImpl("rows:2,cols:4", "d_ff:rows")
    assert impl.shape == MESH
    assert impl.ndims == 2
    assert impl.size == 8
    assert impl.layout_rules._pairs == {("d_ff", "rows")}
    assert impl.supports_control_dependencies
    assert impl.tensor_dimension_to_mesh_axis(D_FF) == 0

  def test_tensor_layout_of_a_tensor(self):
    mesh = mtf.Mesh(mtf.Graph(), "m")
    x = mtf.zeros(mesh, [HEADS, D_FF])
    impl = mtf.MeshImpl(MESH, "d_ff:rows")
    assert impl.tensor_layout(x) == impl.tensor_layout(x.shape) == mtf.TensorLayout([None, 0])

  def test_a_layout_that_was_asked_for_is_still_verified(self):
    impl = mtf.MeshImpl(MESH, "heads:cols")
    shape = mtf.Shape([("heads", 6)])
    assert impl.tensor_layout(shape) == mtf.TensorLayout([1])
    for _ in range(2):
      with pytest.raises(LayoutError, match="heads:6 of x cannot be split.*4 does not divide 6"):
        impl.verify_layout(shape, "x")

  def test_slice_shape_that_does_not_divide(self):
    with pytest.raises(LayoutError, match="heads:6.*cols:4"):
      mtf.MeshImpl(MESH, "heads:cols").slice_shape(mtf.Shape([("heads", 6)]))

  @hypothesis.given(
    st.permutations(["a", "b", "c"]),
    st.lists(st.sampled_from(["rows", "cols", None]), min_size=3, max_size=3).filter(
      lambda axes: all(axes.count(a) < 2 for a in ("rows", "cols"))
    ),
  )
  def test_slices_cover_the_tensor(self, names, axes):
    """Every element is in as many slices as there are replicas of it."""
    rules = [(n, a) for n, a in zip(names, axes) if a]
    impl = mtf.MeshImpl(MESH, rules)
    shape = mtf.Shape([("a", 4), ("b", 8), ("c", 12)])
    count = np.zeros(shape.to_integer_list, int)
    sizes = impl.slice_shape(shape)
    for pnum in range(impl.size):
      begin = impl.slice_begin(shape, pnum)
      count[tuple(slice(b, b + n) for b, n in zip(begin, sizes))] += 1
    assert (count == impl.size * impl.slice_size(shape) // shape.size).all()
    assert impl.laid_out_size(shape) == count.sum()

  def test_abstract_methods(self):
    impl = mtf.MeshImpl("rows:2", "")
    with pytest.raises(NotImplementedError):
      impl.slicewise(lambda: 0)
    with pytest.raises(NotImplementedError):
      impl.allreduce(None, [0], "SUM")
