"""Wrong uses of the language, one row each: how, the error's class and old class, its words.

The rows follow the order of the language's parts. `k` is a fresh `World` of tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors as e

A, B, C = mtf.Dimension("a", 4), mtf.Dimension("b", 8), mtf.Dimension("c", 12)


class World:
  """A graph with a few tensors: x [a, b] and y [b, c] floats, i [a] ints, t [a, b] bools."""

  def __init__(self):
    self.graph = mtf.Graph()
    self.mesh = mtf.Mesh(self.graph, "world")
    ones = lambda dims, dtype: np.ones([d.size for d in dims], dtype)  # noqa: E731
    self.x = mtf.import_tf_tensor(self.mesh, ones([A, B], np.float32), [A, B], name="x")
    self.y = mtf.import_tf_tensor(self.mesh, ones([B, C], np.float32), [B, C], name="y")
    self.i = mtf.import_tf_tensor(self.mesh, ones([A], np.int32), [A], name="i")
    self.t = mtf.import_tf_tensor(self.mesh, ones([A, B], np.bool_), [A, B], name="t")
    self.v = mtf.get_variable(self.mesh, "v", [A, B], initializer=tf.zeros_initializer())
    self.plain = tf.ones([4, 8])

  def other_mesh(self) -> mtf.Tensor:
    """A tensor of the same graph on another mesh."""
    return mtf.ones(mtf.Mesh(self.graph, "moon"), [A, B])


@dataclasses.dataclass
class Row:
  """One wrong use.

  Attributes:
    name: of the test.
    provoke: does it.
    error: the exact class that is raised.
    words: what its text must have.
    old: the class that the TF1 library raised, which the error must be an instance of.
  """

  name: str
  provoke: Callable[[World], Any]
  error: type[Exception]
  words: list[str]
  old: type[Exception] = ValueError


ROWS: list[Row] = []


def row(
  name: str, error: type[Exception], words: str | list[str], old: type[Exception] = ValueError
) -> Callable[[Callable[[World], Any]], None]:
  """Registers what it is called with; the words are a list, or a text of words without blanks."""
  words = words.split() if isinstance(words, str) else words
  return lambda provoke: ROWS.append(Row(name, provoke, error, words, old))


# ------------------------------------------------------------ dimensions, shapes

row("dimension of a float size", e.DimensionError, "'heads' 8.0 integer")(
  lambda k: mtf.convert_to_dimension(("heads", 8.0))
)
row("dimension of three parts", e.DimensionError, ["('heads', 8, 1)", "(name, size)"])(
  lambda k: mtf.convert_to_dimension(("heads", 8, 1))
)
row("dimension with a number for a name", e.DimensionError, "8 string")(
  lambda k: mtf.convert_to_dimension((8, "heads"))
)
row("a number as a dimension", e.DimensionTypeError, "5 Dimension", TypeError)(
  lambda k: mtf.convert_to_dimension(5)
)
row("shape from a generator", e.DimensionTypeError, "generator list", TypeError)(
  lambda k: mtf.Shape(d for d in [A])
)
row("shape from one dimension", e.DimensionError, "a 4 Shape([")(lambda k: mtf.convert_to_shape(A))
row("shape with None", e.DimensionError, "None a 4")(lambda k: mtf.Shape([A, None]))
row("dimension twice", e.DimensionError, ["a=4", "twice", "a=4, b=8", "rename"])(
  lambda k: mtf.Shape([A, B, A])
)
row("no dimension of a name", e.DimensionError, "'head' heads=8 mean")(
  lambda k: mtf.Shape([("heads", 8)]).get_dim_by_name("head")
)
row("rename of no dimension", e.DimensionError, "'z' a=4")(
  lambda k: mtf.Shape([A]).rename_dimension("z", "q")
)
row("resize of no dimension", e.DimensionError, "'z' a=4")(
  lambda k: mtf.Shape([A]).resize_dimension("z", 3)
)
row("shape plus tuple", e.DimensionTypeError, "a=4 tuple list", TypeError)(
  lambda k: mtf.Shape([A]) + (B,)
)
row("shape plus a dimension of it", e.DimensionError, "a=4 twice")(lambda k: mtf.Shape([A]) + A)
row("shape minus a dimension it has not", e.DimensionError, "b=8 a=4")(lambda k: mtf.Shape([A]) - B)
row("shape minus the dimension of another size", e.DimensionError, "b=6 b=8 mean")(
  lambda k: mtf.Shape([A, B]) - mtf.Dimension("b", 6)
)
row("shape text of two colons", e.DimensionError, "'a:4:b' name:value")(
  lambda k: mtf.convert_to_shape("a:4:b")
)
row("shape text without a size", e.DimensionError, "'a' 'four' integer")(
  lambda k: mtf.convert_to_shape("a:four")
)
row("new output dimension", e.ShapeError, "c=12 a=4 b=8")(
  lambda k: mtf.verify_no_new_dims([mtf.Shape([A, B])], mtf.Shape([A, C]))
)
row("combination of no dimensions", e.DimensionError, "combined_dimension")(
  lambda k: mtf.combined_dimension([])
)

# ----------------------------------------------------------------- layout rules

row("layout text", e.DimensionError, "layout 'a=rows' name:value")(
  lambda k: mtf.convert_to_layout_rules("a=rows")
)
row("no layout", e.LayoutTypeError, "None layout {}", TypeError)(
  lambda k: mtf.convert_to_layout_rules(None)
)
row("layout rule of three parts", e.LayoutError, ["('a', 'b', 'c')", "pair"])(
  lambda k: mtf.LayoutRules([("a", "b", "c")])
)
row("dimension over two axes", e.LayoutError, "a:4 rows:2 cols:2")(
  lambda k: mtf.LayoutRules([("a", "rows"), ("a", "cols")]).tensor_dimension_to_mesh_axis(
    A, mtf.Shape([("rows", 2), ("cols", 2)])
  )
)
row("two dimensions over one axis", e.LayoutError, "a:4 b:8 rows:2 rename")(
  lambda k: mtf.LayoutRules([("a", "rows"), ("b", "rows")]).tensor_layout(
    mtf.Shape([A, B]), mtf.Shape([("rows", 2)])
  )
)
row("indivisible dimension", e.LayoutError, ["b:8", "rows:3", "divide", "1, 2, 4, 8"])(
  lambda k: mtf.tensor_dim_to_size_per_split("b:rows", "rows:3", B)
)
row("slice shape of an indivisible dimension", e.LayoutError, "b:8 rows:3 a=4 9")(
  lambda k: mtf.MeshImpl("rows:3", "b:rows").slice_shape(mtf.Shape([A, B]))
)

# ------------------------------------------------------------ processors, devices

row("mesh shape of another kind", e.DimensionTypeError, "'two'")(
  lambda k: mtf.pnum_to_processor_coordinates("two", 0)
)
row("transpose of nothing", e.GraphError, "empty list")(lambda k: mtf.transpose_list_of_lists([]))
row("parallel on a tuple", e.GraphError, "devices list tuple")(
  lambda k: mtf.parallel(("", ""), lambda x: x, [1, 2])
)
row("parallel with a short list", e.GraphError, "argument 0 2 [1]")(
  lambda k: mtf.parallel(["", ""], lambda x: x, [1])
)
row("reduction function", e.ArgumentError, "reduction_fn 'MEAN' 'SUM'")(
  lambda k: mtf.reduction_fn("MEAN")
)
row("binary reduction function", e.ArgumentError, "binary_reduction_fn 'MEAN' 'MAX'")(
  lambda k: mtf.binary_reduction_fn("MEAN")
)
row("abstract mesh", NotImplementedError, "", NotImplementedError)(
  lambda k: mtf.MeshImpl("rows:2", "").laid_out_pnum()
)

# ------------------------------------------------ graph, operations, tensor operators

row("joined assignments of something else", e.GraphError, "combine_assignments x")(
  lambda k: k.graph.combine_assignments([k.x.operation])
)
row("tensor of a list of dimensions", e.ShapeError, "x: Shape a b 4 8")(
  lambda k: mtf.Tensor(k.x.operation, [A, B], tf.float32)
)
row("tensor of a dtype as text", e.DTypeError, "x: 'float32'")(
  lambda k: mtf.Tensor(k.x.operation, mtf.Shape([A]), "float32")
)
row("operation without inputs and mesh", e.GraphError, "Operation 'op' mesh")(
  lambda k: mtf.Operation([], name="op")
)
row("operation without a name", e.ArgumentError, "Operation x name", AssertionError)(
  lambda k: mtf.Operation([k.x])
)
row("operation on a plain tensor", e.ArgumentError, ["'op'", "(4, 8)", "import_tf_tensor"])(
  lambda k: mtf.Operation([k.plain], name="op")
)
row("splittability of another word", e.GraphError, "op 'maybe' 'splittable'")(
  lambda k: mtf.Operation([k.x], name="op")._initialize_splittable_and_unsplittable_dims("maybe")
)
row(
  "gradient of an operation without",
  e.UnsupportedError,
  "Operation op x gradient",
  NotImplementedError,
)(lambda k: mtf.Operation([k.x], name="op").gradient([k.x]))
row(
  "lowering of an operation without",
  e.UnsupportedError,
  "Operation op x lower",
  NotImplementedError,
)(lambda k: mtf.Operation([k.x], name="op").lower(None))
row("tensors of two graphs", e.GraphError, "add b=8 c=12 another graph 'world' 'ones'")(
  lambda k: k.y + mtf.ones(mtf.Mesh(mtf.Graph(), "ones"), [B, C])
)
row("tensors of two meshes", e.GraphError, "'add' 'world' 'moon' mtf.reshard(x, mesh)")(
  lambda k: k.x + k.other_mesh()
)
for _symbol, _fn, _instead in [
  ("**", lambda k: k.x**2, "mtf.pow"),
  ("x ** y", lambda k: 2**k.x, "mtf.pow"),
  ("abs", lambda k: abs(k.x), "mtf.abs"),
  ("@", lambda k: k.x @ k.y, "mtf.einsum"),
  ("<", lambda k: k.x < 1, "mtf.less"),
  ("<=", lambda k: k.x <= 1, "mtf.less_equal"),
  (">", lambda k: k.x > k.x, "mtf.greater"),
  (">=", lambda k: 1 <= k.x, "mtf.greater_equal"),
  ("&", lambda k: k.t & k.t, "mtf.logical_and"),
  ("|", lambda k: k.t | k.t, "mtf.logical_or"),
  ("~", lambda k: ~k.t, "mtf.logical_not"),
  ("x[i]", lambda k: k.x[0], "mtf.slice"),
  ("iteration", lambda k: list(k.x), "mtf.unstack"),
  ("len", lambda k: len(k.x), "ndims"),
]:
  row(f"operator {_symbol} {_instead}", e.ArgumentError, [_symbol, _instead, "a=4"], TypeError)(_fn)

row("TensorFlow function of a tensor", e.ArgumentError, "TensorFlow x export_to_tf_tensor")(
  lambda k: tf.reduce_sum(k.x)
)
row("tf.Tensor with dimensions plus a tensor", e.ArgumentError, "TensorFlow x export_to_tf_tensor")(
  lambda k: tf.ones([8]) + k.x
)
row("array plus a tensor", e.DTypeError, "add x (8,) import_tf_tensor")(
  lambda k: np.ones([8]) + k.x
)

# ------------------------------------------------------------ slicewise, elementwise

row("slicewise without splittable dims", e.ArgumentError, "slicewise x splittable_dims", TypeError)(
  lambda k: mtf.slicewise(tf.identity, [k.x])
)
row("float times integers", e.DTypeError, "scalar_mul 2.5 int32 i to_float", TypeError)(
  lambda k: k.i * 2.5
)
row("float plus integers", e.DTypeError, "scalar_add 2.0 int32 i", TypeError)(lambda k: k.i + 2.0)
row("integers divided by a number", e.DTypeError, "scalar_mul int32 i a=4", TypeError)(
  lambda k: k.i / 2
)
row("array as a scalar", e.DTypeError, "add x (8,) import_tf_tensor")(lambda k: k.x + np.ones([8]))
row("text as a scalar", e.DTypeError, "multiply str x")(lambda k: k.x * "2")
row("scalar tensor of another dtype", e.DTypeError, "scalar_mul int64 x cast")(
  lambda k: k.x * tf.constant(2, tf.int64)
)
row("plain tensor in a unary function", e.ArgumentError, ["relu", "(4, 8)", "import_tf_tensor"])(
  lambda k: mtf.relu(k.plain)
)

# ---------------------------------------------------------------- binary operations

row("two numbers", e.ArgumentError, "less 1.0 2.0 mtf.Tensor")(lambda k: mtf.less(1.0, 2.0))
row("sum of two numbers", e.ArgumentError, "add 1.0 2.0 mtf.Tensor")(lambda k: mtf.add(1.0, 2.0))
row("where of two numbers", e.ArgumentError, "where 1.0 2.0")(lambda k: mtf.where(k.t, 1.0, 2.0))
for _name in ["add", "sub", "maximum", "minimum", "less", "equal", "divide", "mod", "floordiv"]:
  row(f"{_name} of two dtypes", e.DTypeError, "float32 int32 x i cast")(
    lambda k, name=_name: getattr(mtf, name)(k.x, k.i)
  )
row("multiply of two dtypes", e.DTypeError, "multiply float32 int32 x i cast")(
  lambda k: mtf.multiply(k.x, k.i)
)
row("output dtype as text", e.DTypeError, "binary_op 'float32'")(
  lambda k: mtf.binary_op_with_broadcasting(tf.add, k.x, k.x, output_dtype="float32")
)
row("output shape without a dimension", e.ShapeError, "add b=8 x a=4")(
  lambda k: mtf.add(k.x, k.x, output_shape=[A])
)
row("output shape with a new dimension", e.ShapeError, "binary_op c=12 x broadcast")(
  lambda k: mtf.less(k.x, k.x, output_shape=[A, B, C])
)
row("operands of two sizes", e.ShapeError, "add b=8 b=6 x")(
  lambda k: k.x + mtf.ones(k.mesh, [mtf.Dimension("b", 6)])
)
row("integers divided by integers", e.DTypeError, "divide i int32 floordiv")(lambda k: k.i / k.i)
row("gradient of mod", e.GradientError, "x stop_gradient")(
  lambda k: mtf.gradients([mtf.mod(k.x, k.x)], [k.x])
)
row("where of two dtypes", e.DTypeError, "where x int32")(
  lambda k: mtf.where(k.t, k.x, mtf.ones(k.mesh, [A, B], tf.int32))
)

# ---------------------------------------------------------- broadcast and reductions

row("broadcast without a dimension", e.ShapeError, "broadcast b=8 x a=4")(
  lambda k: mtf.broadcast(k.x, [A, C])
)
for _name in ["sum", "mean", "max", "min", "all", "any"]:
  row(f"reduce_{_name} by position", e.ArgumentError, "reduce a=4 keyword", AssertionError)(
    lambda k, name=_name: getattr(mtf, f"reduce_{name}")(k.t if name in ("all", "any") else k.x, A)
  )
  row(f"reduce_{_name} of no dimension", e.DimensionError, "reduce reduced_dim c=12 a=4 b=8")(
    lambda k, name=_name: getattr(mtf, f"reduce_{name}")(
      k.t if name in ("all", "any") else k.x, reduced_dim=C
    )
  )
row("reduction to a new dimension", e.ShapeError, "reduce c=12 x")(
  lambda k: mtf.reduce_sum(k.x, output_shape=[C])
)
row("contradicting reduction", e.ShapeError, "reduce_max x b=8 only")(
  lambda k: mtf.reduce_max(k.x, output_shape=[B], reduced_dim=B)
)
row("mean of integers", e.DTypeError, "reduce_mean int32 to_float", TypeError)(
  lambda k: mtf.reduce_mean(k.i)
)
for _name in ["softmax", "log_softmax", "reduce_logsumexp"]:
  row(f"{_name} of no dimension", e.DimensionError, f"{_name} c=12 a=4 b=8")(
    lambda k, name=_name: getattr(mtf, name)(k.x, C)
  )
row("reduce_first of no dimension", e.DimensionError, "reduce_first c=12 x")(
  lambda k: mtf.reduce_first(k.x, C)
)

# ------------------------------------------------------------------- einsum, reshape

row("einsum of nothing", e.GraphError, "einsum a=4 input")(
  lambda k: mtf.einsum([], output_shape=[A])
)
row("einsum of a plain tensor", e.ArgumentError, ["einsum", "(4, 8)", "import_tf_tensor"])(
  lambda k: mtf.einsum([k.x, k.plain])
)
row("einsum of two dtypes", e.DTypeError, "product float32 int32 x i cast")(
  lambda k: mtf.einsum([k.x, k.i], [B], name="product")
)
row("einsum with pairs", e.DimensionTypeError, ["product", "x", "('a', 4)"])(
  lambda k: mtf.einsum([k.x], reduced_dims=[("a", 4)], name="product")
)
row("einsum over no dimension", e.DimensionError, "product c=12 a=4 b=8")(
  lambda k: mtf.einsum([k.x], reduced_dims=[C], name="product")
)
row("contradicting einsum", e.ShapeError, "product x a=4 b=8")(
  lambda k: mtf.einsum([k.x], output_shape=[A], reduced_dims=[A], name="product")
)
row("einsum of two sizes", e.ShapeError, "product b 8 6 x rename")(
  lambda k: mtf.einsum([k.x, mtf.ones(k.mesh, [("b", 6)])], [A], name="product")
)
row("transpose to other dimensions", e.ShapeError, "transpose x a=4 c=12")(
  lambda k: mtf.transpose(k.x, [B, C])
)
row("reshape to another size", e.ShapeError, "reshape x 32 48")(lambda k: mtf.reshape(k.x, [A, C]))
row("rename of no dimension of a tensor", e.DimensionError, "rename_dimension 'z' x")(
  lambda k: mtf.rename_dimension(k.x, "z", "q")
)
row("replacement in something else", e.DimensionTypeError, "replace_dimensions int")(
  lambda k: mtf.replace_dimensions(5, A, B)
)
row("replacement of scattered", e.DimensionError, "replace_dimensions b=8 a=4 x transpose")(
  lambda k: mtf.replace_dimensions(k.x, [B, A], mtf.Dimension("c", 32))
)
row("replacement of no dimension", e.DimensionError, "replace_dimensions c=12 x")(
  lambda k: mtf.replace_dimensions(k.x, C, [("d", 3), ("e", 4)])
)
row("replacement by another size", e.ShapeError, "reshape x 32 48")(
  lambda k: mtf.replace_dimensions(k.x, B, C)
)
row("replacement by nothing", e.DimensionError, "replace_dimensions x b 8 new")(
  lambda k: mtf.replace_dimensions(k.x, B, [])
)

# -------------------------------------------------------- concat, split, slice, pad

row("concat along no dimension", e.DimensionError, "concat 'z' x")(
  lambda k: mtf.concat([k.x, k.x], "z")
)
row("concat of other dimensions", e.ShapeError, "concat 'b' x y")(
  lambda k: mtf.concat([k.x, k.y], "b")
)
row("concat of nothing", e.ShapeError, "concat 'b' tensor")(lambda k: mtf.concat([], "b"))
row("split of no dimension", e.DimensionError, "split c=12 x")(lambda k: mtf.split(k.x, C, 2))
row(
  "split into unequal parts", e.SizeError, ["split", "b=8", "x", "3", "1, 2, 4, 8"], AssertionError
)(lambda k: mtf.split(k.x, B, 3))
row("split into sizes that do not add up", e.SizeError, ["split", "b=8", "x", "[3, 4]"])(
  lambda k: mtf.split(k.x, B, [3, 4])
)
row("split by text", e.ArgumentError, "split x '2'", AssertionError)(
  lambda k: mtf.split(k.x, B, "2")
)
row("stack of two shapes", e.ShapeError, "stack x y")(lambda k: mtf.stack([k.x, k.y], "d"))
row("stack at no axis", e.ShapeError, "stack 5 x")(lambda k: mtf.stack([k.x], "d", axis=5))
row("unstack of no dimension", e.DimensionError, "unstack c=12 x")(lambda k: mtf.unstack(k.x, C))
row("slice of no dimension", e.DimensionError, "slice 'z' x")(lambda k: mtf.slice(k.x, 0, 1, "z"))
row("slice out of range", e.ShapeError, "slice 6 10 b=8 x")(lambda k: mtf.slice(k.x, 6, 4, "b"))
row("slice from a float", e.ArgumentError, "slice x 1.5")(lambda k: mtf.slice(k.x, 1.5, 4, "b"))
row("pad of no dimension", e.DimensionError, "pad 'z' x")(lambda k: mtf.pad(k.x, [1, 1], "z"))
row("three paddings", e.SizeError, ["pad", "b=8", "x", "[1, 2, 3]"], AssertionError)(
  lambda k: mtf.pad(k.x, [1, 2, 3], "b")
)

# ------------------------------------------------- shift, halo, indexing, top-k, ranges

row("shift of no dimension", e.DimensionError, "shift c=12 x")(
  lambda k: mtf.shift(k.x, 1, C, False)
)
row("dynamic shift with the dimension in the offset", e.ShapeError, "dynamic_shift b=8 x")(
  lambda k: mtf.dynamic_shift(k.x, mtf.to_int32(k.x), B, True)
)
row("dynamic shift by floats", e.DTypeError, "dynamic_shift x float32")(
  lambda k: mtf.dynamic_shift(k.x, mtf.to_float(k.i), B, True)
)
row("halo of no dimension", e.DimensionError, "halo_exchange c=12 x")(
  lambda k: mtf.halo_exchange(k.x, A, C, 1)
)
row("halo of a negative size", e.ShapeError, "halo_exchange x -1")(
  lambda k: mtf.halo_exchange(k.x, A, B, -1)
)
row("one_hot of floats", e.DTypeError, "one_hot x float32 cast")(lambda k: mtf.one_hot(k.x, C))
row("gather by floats", e.DTypeError, "gather x float32 cast")(lambda k: mtf.gather(k.y, k.x, C))
row("gather along no dimension", e.DimensionError, "gather c=12 x")(
  lambda k: mtf.gather(k.x, k.i, C)
)
row("gather by text", e.ArgumentError, "gather x 'first'")(lambda k: mtf.gather(k.x, "first", B))
row("top_k of no dimension", e.DimensionError, "top_k c=12 x")(
  lambda k: mtf.top_k(k.x, C, mtf.Dimension("k", 5))
)
row("top_k of too many", e.ShapeError, "top_k k=9 b=8 x")(
  lambda k: mtf.top_k(k.x, B, mtf.Dimension("k", 9))
)
row("argmax of no dimension", e.DimensionError, "argmax c=12 x")(lambda k: mtf.argmax(k.x, C))
row("tenth of eight", e.ShapeError, "nth_largest_element x 9 b=8")(
  lambda k: mtf.nth_largest_element(k.x, 9, B)
)
row("cumsum of no dimension", e.DimensionError, "cumsum c=12 x")(lambda k: mtf.cumsum(k.x, C))
row("pooling by no divisor", e.ShapeError, "pool_tensor_1d b=8 x 3")(
  lambda k: mtf.pool_tensor_1d(k.x, B, pool_size=3)
)
row("sampling along no dimension", e.DimensionError, "c=12 a=4 b=8")(
  lambda k: mtf.sample_with_temperature(k.x, C)
)

# --------------------------------------------------------- constants, imports, random

row("constant of another size", e.ShapeError, "constant 3 a=4")(
  lambda k: mtf.constant(k.mesh, [1, 2, 3], shape=[A])
)
row("import of another shape", e.ShapeError, ["image", "(4, 6)", "a=4, b=8"])(
  lambda k: mtf.import_tf_tensor(k.mesh, np.ones([4, 6]), [A, B], name="image")
)
row("import without names", e.SizeError, ["image", "'world'", "(4, 8)", "names"], AssertionError)(
  lambda k: mtf.import_tf_tensor(k.mesh, np.ones([4, 8]), name="image")
)
row("random integers without maxval", e.DTypeError, "random int32 maxval")(
  lambda k: mtf.random_uniform(k.mesh, [A], dtype=tf.int32)
)
row(
  "unknown argument of a random operation", e.ArgumentError, "random 'sigma' 'stddev'", TypeError
)(lambda k: mtf.random_normal(k.mesh, [A], sigma=2.0))
row("dropout without a rate", e.GraphError, "dropout x keep_prob rate")(
  lambda k: mtf.dropout(k.x, True)
)
row("dropout with two rates", e.GraphError, "dropout x 0.5 0.25")(
  lambda k: mtf.dropout(k.x, True, keep_prob=0.5, rate=0.25)
)
row("dropout of everything", e.GraphError, "dropout x keep_prob 1.5")(
  lambda k: mtf.dropout(k.x, True, rate=1.5)
)
row("dropout noise of another shape", e.ShapeError, "dropout c=12 x")(
  lambda k: mtf.dropout(k.x, True, rate=0.5, noise_shape=[C])
)

# ------------------------------------------------------------- variables, assignments

row("variable dtype without any", e.DTypeError, "get_variable 'w' master_dtype")(
  lambda k: mtf.get_variable(k.mesh, "w", [A], dtype=None)
)
row("variable dtype as text", e.DTypeError, "get_variable 'w' 'float32'")(
  lambda k: mtf.get_variable(k.mesh, "w", [A], dtype="float32")
)
row("variable of a plain dtype", e.DTypeError, "w VariableDType float32")(
  lambda k: mtf.Variable(k.mesh, "w", mtf.Shape([A]), tf.float32, None, True)
)
row("variable twice", e.VariableError, "v exists")(
  lambda k: mtf.Variable(k.mesh, "v", mtf.Shape([A]), mtf.VariableDType(), None, True)
)
row("initializer as text", e.VariableError, "w 'zeros' a=4 callable")(
  lambda k: mtf.get_variable(k.mesh, "w", [A], initializer="zeros")
)
row("read of a tensor", e.VariableError, "read_variable v")(lambda k: mtf.read_variable(k.v))
row("assign of another shape", e.ShapeError, "assign v a=4 b=8 c=12")(
  lambda k: mtf.assign(k.v, k.y)
)
row("assign to what is no variable", e.VariableError, "assign x")(lambda k: mtf.assign(k.x, k.x))
row("assign of too few values", e.ArgumentError, "assign 1 2 'v'")(
  lambda k: mtf.Assign([k.v.operation] * 2, [k.x])
)
row("dependency on a number", e.ArgumentError, "depend x 5")(lambda k: mtf.depend(k.x, [5]))
row("summary of a matrix", e.ShapeError, "'loss' x scalar")(
  lambda k: mtf.scalar_summary("loss", k.x)
)

# ------------------------------------------------- loops, custom gradients, gradients


def _loop(k: World, body: Callable[..., Any], **kwargs: Any) -> Any:
  return mtf.while_loop(lambda v: mtf.less(mtf.reduce_sum(v), 1.0), body, [k.x], **kwargs)


row("gradient of a loop that was to have none", e.GradientError, "while_loop back_prop=False")(
  lambda k: mtf.gradients([mtf.reduce_sum(_loop(k, lambda v: [v], back_prop=False)[0])], [k.x])
)
row("loop without variables", e.ArgumentError, "while_loop num_loop_vars 0", AssertionError)(
  lambda k: _loop(k, lambda v: [v], num_loop_vars=0)
)
row("loop condition of a shape", e.GraphError, "while_loop cond_fn scalar a=4")(
  lambda k: mtf.while_loop(lambda v: mtf.less(v, 1.0), lambda v: [v], [k.x])
)
row("loop variable of another shape", e.ShapeError, "while_loop 0 x a=4 b=8")(
  lambda k: _loop(k, lambda v: [mtf.reduce_sum(v, reduced_dim=A)])
)
row("loop variable of another dtype", e.DTypeError, "while_loop 0 x int32 cast")(
  lambda k: _loop(k, lambda v: [mtf.to_int32(v)])
)
row("loop body of too few", e.GraphError, "while_loop 0 1 variables")(
  lambda k: _loop(k, lambda v: [])
)
row("loop body of too many", e.GraphError, "while_loop 2 1 has_accumulators")(
  lambda k: _loop(k, lambda v: [v, v])
)
row("loop body of numbers", e.GraphError, "while_loop mtf.Tensor 1.0")(
  lambda k: _loop(k, lambda v: [1.0])
)
row("custom gradient of nothing", e.GraphError, "custom_gradient input")(
  lambda k: mtf.custom_gradient(lambda: k.x, lambda *xs: [], [])
)
row("variable in a gradient function", e.GraphError, "custom_gradient w grad_fn")(
  lambda k: mtf.gradients(
    [mtf.custom_gradient(mtf.square, lambda **kw: [mtf.get_variable(k.mesh, "w", [A, B])], [k.x])],
    [k.x],
  )
)
row("recomputed function without a gradient", e.GradientError, "recompute_grad y b=8 c=12")(
  lambda k: mtf.gradients([mtf.recompute_grad(lambda x, y: x * 2.0, [k.x, k.y])], [k.x, k.y])
)
row("clone of what is mapped", e.GraphError, "square input_mapping a=4")(
  lambda k: (lambda y: k.graph.clone_operations([y.operation], {y: k.x}))(mtf.square(k.x))
)
row("microbatches of no divisor", e.ShapeError, "serialize_training_step b=8 3")(
  lambda k: mtf.serialize_training_step(
    {"x": k.x}, lambda f: {"loss": mtf.reduce_mean(f["x"])}, B, 3
  )
)
row("microbatches without the batch", e.DimensionError, "serialize_training_step 'x' c=12 a=4")(
  lambda k: mtf.serialize_training_step(
    {"x": k.x}, lambda f: {"loss": mtf.reduce_mean(f["x"])}, C, 2
  )
)
row("microbatches without a gradient", e.GradientError, "serialize_training_step v loss")(
  lambda k: mtf.serialize_training_step(
    {"x": k.x}, lambda f: {"loss": mtf.reduce_mean(f["x"])}, B, 2
  )
)
row("microbatches without a loss", e.ArgumentError, "serialize_training_step 'loss' ['mean']")(
  lambda k: mtf.serialize_training_step(
    {"x": k.x}, lambda f: {"mean": mtf.reduce_mean(f["x"])}, B, 2
  )
)
row("gradient of integers", e.GradientError, "gradients int32")(
  lambda k: mtf.gradients([mtf.to_int32(k.x)], [k.x])
)
row("gradient of another shape", e.ShapeError, "gradients c=12 a=4")(
  lambda k: mtf.gradients([mtf.square(k.x)], [k.x], grad_ys=[k.y])
)

# ------------------------------------------------------------ lowering, mesh implementations


def _lowering(k: World) -> mtf.Lowering:
  return mtf.Lowering(k.graph, {k.mesh: mtf.PlacementMeshImpl("rows:2", "", ["", ""])})


row("lowering without a mesh", e.GraphError, "'world' x; MeshImpl")(
  lambda k: mtf.Lowering(k.graph, {})
)
row("export of a later tensor", e.NotLoweredError, "square a=4 b=8 after", KeyError)(
  lambda k: (lambda low: low.export_to_tf_tensor(mtf.square(k.x)))(_lowering(k))
)
row("lowered operation of a later one", e.NotLoweredError, "Assign assign after", KeyError)(
  lambda k: (lambda low: low.lowered_operation(mtf.assign(k.v, k.x)))(_lowering(k))
)
row("counter of a float", e.ArgumentError, "'key' 0.5 int", AssertionError)(
  lambda k: _lowering(k).add_counter("key", 0.5)
)
row("too few devices", e.MeshShapeError, "rows:2 cols:4 8 4 rows:1,cols:4")(
  lambda k: mtf.PlacementMeshImpl("rows:2,cols:4", "", [""] * 4)
)
row(
  "logical_to_physical that is no permutation",
  e.MeshShapeError,
  ["permutation", "rows=2", "[0, 0]"],
)(lambda k: mtf.SimdMeshImpl("rows:2", "", logical_to_physical=[0, 0]))

# ------------------------------------------------------------------ layers, optimizers

row("dense over no dimension", e.ShapeError, "dense out c=12 x")(
  lambda k: mtf.layers.dense(k.x, mtf.Dimension("d", 2), reduced_dims=[C], name="out")
)
row("layer norm of no dimension", e.DimensionError, "c=12 x")(
  lambda k: mtf.layers.layer_norm(k.x, C)
)
row("correlation of no dimension", e.DimensionError, "corr c=12 x")(
  lambda k: mtf.layers.corr(k.x, C)
)
row("compressed mean by no divisor", e.ShapeError, "compress_mean b=8 3 x")(
  lambda k: mtf.layers.compress_mean(k.x, B, 3)
)
row("cross entropy over no dimension", e.DimensionError, "softmax_cross_entropy vocab_dim c=12 x")(
  lambda k: mtf.layers.softmax_cross_entropy_with_logits(k.x, k.x, C)
)
row("cross entropy with targets of another shape", e.ShapeError, "softmax_cross_entropy y i c=12")(
  lambda k: mtf.layers.softmax_cross_entropy_with_logits(k.y, k.i, C)
)
row("cross entropy of more classes", e.ShapeError, "softmax_cross_entropy num_classes c=12 13")(
  lambda k: mtf.layers.softmax_cross_entropy_with_logits(
    k.y, mtf.zeros(k.mesh, [B], tf.int32), C, num_classes=13
  )
)
row("cross entropy with probabilities of another shape", e.ShapeError, "softmax_cross_entropy x y")(
  lambda k: mtf.layers.softmax_cross_entropy_with_logits(k.x, k.y, B)
)
row("sigmoid cross entropy of two shapes", e.ShapeError, "sigmoid_cross_entropy x y")(
  lambda k: mtf.layers.sigmoid_cross_entropy_with_logits(k.x, k.y)
)
row("initializer of an unknown mode", e.ConfigError, "mode fan_both")(
  lambda k: mtf.layers.VarianceScalingInitializer(mode="fan_both")([A], [B])
)
row("annealed dropout without a rate", e.ArgumentError, "annealed_dropout x init_rate", TypeError)(
  lambda k: mtf.layers.annealed_dropout(k.x, True, 0, 10)
)
row("base optimizer", e.GraphError, "Optimizer v apply_grad")(
  lambda k: mtf.optimize.Optimizer().apply_grad(k.x, k.v.operation)
)
row("too few gradients", e.GraphError, "apply_grads 1 2")(
  lambda k: mtf.optimize.SgdOptimizer(0.1).apply_grads([k.x], [k.v.operation] * 2)
)
row("gradient of another shape than its variable", e.ShapeError, "SgdOptimizer v a=4 c=12")(
  lambda k: mtf.optimize.SgdOptimizer(0.1).apply_grads([k.y], [k.v.operation])
)
