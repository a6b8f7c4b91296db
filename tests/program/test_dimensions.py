"""Dimensions, shapes, and the functions on them."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import DimensionError, MeshError, ShapeError

X, Y, Z = mtf.Dimension("x", 4), mtf.Dimension("y", 8), mtf.Dimension("z", 3)

names = st.sampled_from(["batch", "length", "d_model", "heads", "a", "b"])
dimensions = st.builds(mtf.Dimension, names, st.integers(1, 16))
shapes = st.lists(dimensions, max_size=5, unique_by=lambda d: d.name).map(mtf.Shape)


class TestDimension:
  def test_equality_is_that_of_the_pair(self):
    assert X == ("x", 4)
    assert mtf.Dimension("x", 4) == X
    assert mtf.Dimension("x", 5) != X

  def test_is_hashable_and_ordered(self):
    assert {X: 1}["x", 4] == 1
    assert sorted([Y, X, mtf.Dimension("x", 2)]) == [("x", 2), X, Y]

  @pytest.mark.parametrize("given", [X, ("x", 4), ["x", 4], ("x", np.int64(4))])
  def test_convert(self, given):
    converted = mtf.convert_to_dimension(given)
    assert converted == X
    assert isinstance(converted, mtf.Dimension)
    assert type(converted.size) is int

  def test_convert_returns_a_dimension_as_it_is(self):
    assert mtf.convert_to_dimension(X) is X

  def test_convert_none(self):
    assert mtf.convert_to_dimension(None) is None

  def test_convert_not_iterable(self):
    with pytest.raises(TypeError):
      mtf.convert_to_dimension(5)

  @pytest.mark.parametrize(
    "given", [("x",), ("x", 4, 5), (4, "x"), ("x", "4"), ("x", 4.0), mtf.Dimension("x", 4.0), "xyz"]
  )
  def test_convert_refuses(self, given):
    with pytest.raises(DimensionError):
      mtf.convert_to_dimension(given)


class TestShape:
  @pytest.mark.parametrize("dims", [[X, Y], (X, Y), [("x", 4), ("y", 8)], mtf.Shape([X, Y])])
  def test_from_sequences(self, dims):
    assert mtf.Shape(dims).dims == [X, Y]

  def test_from_a_generator(self):
    with pytest.raises(TypeError):
      mtf.Shape(d for d in [X, Y])

  def test_from_a_dimension(self):
    with pytest.raises(DimensionError):
      mtf.Shape(X)

  def test_a_dimension_twice(self):
    with pytest.raises(DimensionError, match="x=4"):
      mtf.Shape([X, Y, X])

  def test_one_name_with_two_sizes(self):
    assert len(mtf.Shape([X, mtf.Dimension("x", 5)])) == 2

  def test_members(self):
    shape = mtf.Shape([X, Y, Z])
    assert shape.ndims == len(shape) == 3
    assert shape.size == 96
    assert shape.to_integer_list == [4, 8, 3]
    assert shape.dimension_names == ["x", "y", "z"]
    assert shape.to_string == repr(shape) == "Shape[x=4, y=8, z=3]"

  def test_empty(self):
    assert mtf.Shape([]).size == 1
    assert repr(mtf.Shape([])) == "Shape[]"
    assert mtf.Shape([]).cumprod == []

  def test_behaves_as_a_list(self):
    shape = mtf.Shape([X, Y, Z])
    assert shape[1] == Y
    assert shape[1:] == [Y, Z]
    assert list(shape) == [X, Y, Z]
    assert X in shape
    assert mtf.Dimension("x", 5) not in shape

  def test_dims_is_a_copy(self):
    shape = mtf.Shape([X])
    shape.dims.append(Y)
    assert shape.dims == [X]

  def test_equality_is_ordered(self):
    assert mtf.Shape([X, Y]) == mtf.Shape([X, Y])
    assert mtf.Shape([X, Y]) != mtf.Shape([Y, X])
    assert mtf.Shape([X]) != None  # noqa: E711

  def test_get_dim_by_name(self):
    assert mtf.Shape([X, Y]).get_dim_by_name("y") == Y
    with pytest.raises(DimensionError, match="'z'.*x=4, y=8"):
      mtf.Shape([X, Y]).get_dim_by_name("z")

  def test_rename_dimension(self):
    assert mtf.Shape([X, Y]).rename_dimension("x", "w").dims == [("w", 4), Y]
    with pytest.raises(DimensionError):
      mtf.Shape([X, Y]).rename_dimension("z", "w")

  def test_resize_dimension(self):
    assert mtf.Shape([X, Y]).resize_dimension("x", 9).dims == [("x", 9), Y]
    with pytest.raises(DimensionError):
      mtf.Shape([X, Y]).resize_dimension("z", 9)

  @pytest.mark.parametrize("other", [mtf.Shape([Y]), Y, [Y]])
  def test_add(self, other):
    assert (mtf.Shape([X]) + other).dims == [X, Y]

  def test_add_refuses(self):
    with pytest.raises(TypeError):
      mtf.Shape([X]) + (Y,)
    with pytest.raises(DimensionError):
      mtf.Shape([X]) + X

  @pytest.mark.parametrize("other", [mtf.Shape([Y]), Y, [Y], {Y}, [Y, Z]])
  def test_subtract(self, other):
    assert (mtf.Shape([X, Y]) - other).dims == [X]

  def test_subtract_none(self):
    shape = mtf.Shape([X])
    assert shape - None is shape

  def test_subtract_a_missing_dimension(self):
    with pytest.raises(DimensionError, match="z=3"):
      mtf.Shape([X, Y]) - Z

  @hypothesis.given(shapes)
  def test_cumprod_is_the_product_of_the_sizes_before(self, shape):
    for i, c in enumerate(shape.cumprod):
      assert c == np.prod(shape.to_integer_list[:i], dtype=int)

  @hypothesis.given(shapes)
  def test_cumprod_to_tensor_axis_inverts_cumprod(self, shape):
    for c in shape.cumprod:
      axis = shape.cumprod_to_tensor_axis(c)
      assert shape.cumprod[axis] == c
      assert c not in shape.cumprod[axis + 1 :]

  @hypothesis.given(shapes)
  def test_round_trip_through_text(self, shape):
    text = ";".join(f"{d.name}:{d.size}" for d in shape)
    assert mtf.convert_to_shape(text) == shape


class TestConvertToShape:
  @pytest.mark.parametrize("text", ["x:4;y:8", "x:4.y:8", "x:4 y:8", "x:4,y:8", "  x:4, y:8 "])
  def test_text(self, text):
    assert mtf.convert_to_shape(text) == mtf.Shape([X, Y])

  def test_others(self):
    shape = mtf.Shape([X])
    assert mtf.convert_to_shape(shape) is shape
    assert mtf.convert_to_shape(None) is None
    assert mtf.convert_to_shape([]).dims == []
    assert mtf.convert_to_shape("").dims == []

  @pytest.mark.parametrize("text", ["x;4", "x:4:5", "x:four", "x", "x:", ":4"])
  def test_malformed(self, text):
    with pytest.raises(ValueError):
      mtf.convert_to_shape(text)

  def test_a_dimension_is_no_shape(self):
    with pytest.raises(ValueError):
      mtf.convert_to_shape(X)


class TestFunctions:
  def test_list_product(self):
    assert mtf.list_product([2, 3, 4]) == 24
    assert mtf.list_product([]) == 1

  @pytest.mark.parametrize(
    "short,long,expected",
    [
      ([], [], True),
      ([], [1], True),
      ([1, 3], [1, 2, 3], True),
      ([3, 1], [1, 2, 3], False),
      ([1, 1], [1, 2], False),
      ([1], [], False),
    ],
  )
  def test_is_subsequence(self, short, long, expected):
    assert mtf.is_subsequence(short, long) is expected

  def test_verify_no_new_dims(self):
    assert mtf.verify_no_new_dims([mtf.Shape([X]), mtf.Shape([Y])], mtf.Shape([Y, X])) is None
    with pytest.raises(ShapeError, match="z=3"):
      mtf.verify_no_new_dims([mtf.Shape([X])], mtf.Shape([X, Z]))

  def test_combined_dimension(self):
    assert mtf.combined_dimension([X, Y]) == ("x", 32)
    assert mtf.combined_dimension([X, Y], "xy") == ("xy", 32)
    with pytest.raises(ValueError):
      mtf.combined_dimension([])

  def test_anonymous_shape(self):
    assert mtf.anonymous_shape([X, Y]).dims == [("_anonymous_0", 4), ("_anonymous_1", 8)]

  def test_replace_dimensions_of_a_shape(self):
    shape = mtf.Shape([X, Y, Z])
    assert mtf.replace_dimensions(shape, [X, Y], mtf.Dimension("w", 32)).dims == [("w", 32), Z]
    assert mtf.replace_dimensions(shape, Z, [mtf.Dimension("z", 3), mtf.Dimension("o", 1)]) == (
      mtf.Shape([X, Y, Z, ("o", 1)])
    )

  @pytest.mark.parametrize("old", [[X, Z], [Y, X], [mtf.Dimension("w", 1)], []])
  def test_replace_dimensions_that_do_not_stand_together(self, old):
    with pytest.raises(ValueError):
      mtf.replace_dimensions(mtf.Shape([X, Y, Z]), old, mtf.Dimension("w", 32))

  def test_replace_dimensions_of_something_else(self):
    with pytest.raises(ValueError):
      mtf.replace_dimensions([X], X, Y)

  def test_errors_are_of_one_family(self):
    assert issubclass(DimensionError, MeshError)
    assert issubclass(DimensionError, ValueError)
