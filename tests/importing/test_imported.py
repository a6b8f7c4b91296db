"""`mtf.from_tensorflow`: what it takes and returns, names, training, and bad input."""

from __future__ import annotations

import functools
import pathlib
import xml.etree.ElementTree
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from docs.tools import imported_picture
from mesh_tensorflow.importing import rules
from tests.importing import comparing
from tests.importing.modules import Mlp, floats

SPEC = [tf.TensorSpec([4, 8])]


def test_module_with_names_of_its_attributes(cpu_devices: list[str]) -> None:
  imported = mtf.from_tensorflow(Mlp(), SPEC, dims={"inputs": ["batch", "d_model"]})
  assert [v.name for v in imported.variables] == [
    "calls",
    "layers/0/kernel",
    "layers/0/bias",
    "layers/1/kernel",
    "layers/1/bias",
  ]
  assert not imported.variables[0].trainable
  assert imported.variables[3].shape == mtf.Shape([("layers/0.units", 16), ("d_model", 8)])
  assert dict(imported.dimensions) == {
    d.name: d for d in map(mtf.Dimension, ["batch", "d_model", "layers/0.units"], [4, 8, 16])
  }
  table = str(imported.dimensions)
  assert "layers/0.units" in table
  assert "layers/0/kernel[1], layers/0/bias[0], layers/1/kernel[0]" in table
  assert {op.type for op in imported.operations} >= {"MatMul", "BiasAdd", "Relu"}
  (matmul, _) = [op for op in imported.operations if op.type == "MatMul"]
  assert matmul.dimensions == {"batch", "d_model", "layers/0.units"}


def test_an_operation_is_not_split_along_what_it_needs_whole() -> None:
  fn = lambda x: tf.reduce_sum(tf.reverse(x, [1]), 0)  # noqa: E731
  imported = mtf.from_tensorflow(fn, SPEC, dims={"x": ["rows", "columns"]})
  of = {op.type: op.dimensions for op in imported.operations}
  assert of["ReverseV2"] == {"rows"}
  assert of["Sum"] == {"rows", "columns"}


def test_training_by_optimizer_and_back(cpu_devices: list[str]) -> None:
  module, twin = Mlp(), Mlp()
  for a, b in zip(twin.variables, module.variables):
    a.assign(b)
  imported = mtf.from_tensorflow(module, SPEC, dims={"inputs": ["batch", "d"]})
  impl = mtf.SimdMeshImpl("r:2,c:2", "batch:r,layers/0.units:c", cpu_devices[:4])

  @mtf.function(impl, input_signature=[mtf.TensorSpec("batch:4,d:8")])
  def step(x: mtf.Tensor) -> mtf.Tensor:
    y = imported(x)
    loss = mtf.reduce_sum(mtf.square(y))
    variables = x.mesh.graph.trainable_variables
    grads = mtf.gradients([loss], [v.value for v in variables])
    mtf.optimize.SgdOptimizer(learning_rate=0.001).apply_grads(grads, variables)
    return loss

  x = floats(4, 8)
  before = [v.numpy() for v in module.variables]
  with pytest.raises(mtf.VariableError, match="not run on a mesh"):
    imported.sync()
  losses = [float(step(x)) for _ in range(3)]
  np.testing.assert_array_equal(before[1], module.variables[1])
  imported.sync()
  for expected in losses:
    with tf.GradientTape() as tape:
      loss = tf.reduce_sum(twin(tf.constant(x)) ** 2)
    np.testing.assert_allclose(expected, float(loss), rtol=1e-5)
    for v, g in zip(twin.trainable_variables, tape.gradient(loss, twin.trainable_variables)):
      v.assign_sub(0.001 * g)
  for a, b in zip(module.variables, twin.variables):
    np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-6)
  assert module.calls.numpy() == 3
  module.layers[0].bias.assign(np.zeros(16))
  module.layers[1].kernel.assign(np.zeros([16, 8]))
  module.layers[1].bias.assign(np.zeros(8))
  imported.load()
  np.testing.assert_allclose(float(step(x)), np.sum(x * x), rtol=1e-5)


def test_reads_see_the_assignments_before_them(cpu_devices: list[str]) -> None:
  v = tf.Variable(floats(1, 4), name="v")

  def fn(x: Any) -> Any:
    first = x * v
    v.assign(v * 2.0 + x[:1])
    v.assign_sub(tf.ones([1, 4]))
    return first, x + v

  x, value = floats(4, 4), v.numpy()
  imported = mtf.from_tensorflow(fn, [tf.TensorSpec([4, 4])])
  impl = mtf.PlacementMeshImpl("r:2,c:2", "x.0:r", cpu_devices[:4])

  @mtf.function(impl, input_signature=[mtf.TensorSpec("a:4,b:4")])
  def run(x: mtf.Tensor) -> Any:
    return imported(x), imported(x)

  (y, z), (again, last) = run(x)
  np.testing.assert_allclose(y, x * value, rtol=1e-6)
  second = value * 2 + x[:1] - 1
  np.testing.assert_allclose(z, x + second, rtol=1e-6)
  np.testing.assert_allclose(again, x * second, rtol=1e-6)
  np.testing.assert_allclose(last, x + second * 2 + x[:1] - 1, rtol=1e-5)
  assert imported.variables[0].shape.to_integer_list == [1, 4]


def test_structures_keywords_and_python_values(cpu_devices: list[str]) -> None:
  def fn(features: Any, scale: Any, *, training: bool) -> Any:
    assert training
    a, b = features["b"]["c"], features["a"]
    return {"sum": a + b * scale, "both": (a[:, :1], [b]), "none": None, "number": 7}

  specs = [{"b": {"c": tf.TensorSpec([4, 2])}, "a": tf.TensorSpec([4, 2])}, tf.TensorSpec([])]
  imported = mtf.from_tensorflow(
    functools.partial(fn, training=True),
    specs,
    dims={"a": ["batch", "d"], "features/b/c": ["batch", None], "output/sum": ["batch", None]},
  )
  a, b = floats(4, 2), floats(4, 2)
  impl = mtf.PlacementMeshImpl("r:2", "batch:r", cpu_devices[:2])

  @mtf.function(impl, input_signature=[mtf.TensorSpec("n:4,m:2")])
  def run(x: mtf.Tensor) -> Any:
    # An array, and a number, may stand beside an mtf.Tensor.
    results = imported({"b": {"c": b}, "a": x}, scale=np.float32(3))
    assert results.pop("none") is None
    assert results["number"].shape == mtf.Shape([])  # TensorFlow makes a tensor of it.
    assert results["sum"].shape == mtf.Shape([("batch", 4), ("d", 2)])
    return results

  results = run(a)
  np.testing.assert_allclose(results["sum"], b + 3 * a, rtol=1e-6)
  np.testing.assert_array_equal(results["both"][0], b[:, :1])
  np.testing.assert_array_equal(results["both"][1][0], a)


def test_without_signature_it_is_traced_for_the_arguments(cpu_devices: list[str]) -> None:
  imported = mtf.from_tensorflow(lambda x: tf.nn.softmax(x @ tf.transpose(x)))
  with pytest.raises(mtf.GraphError, match="input_signature"):
    print(imported.dimensions)
  impl = mtf.PlacementMeshImpl("r:2", "rows:r", cpu_devices[:2])
  for n in (4, 2):
    x = floats(n, 3)
    spec = mtf.TensorSpec(mtf.Shape([("rows", n), ("d", 3)]))
    y = mtf.function(impl, input_signature=[spec])(lambda x: imported(x))(x)
    np.testing.assert_allclose(y, tf.nn.softmax(x @ x.T), rtol=1e-5)
    # The scores would have the rows twice: the looked at ones are another dimension.
    assert list(imported.dimensions) == ["rows", "d", "memory_rows"]
    assert imported.dimensions["rows"].size == n


def test_functions_in_functions_and_saved_models(
  tmp_path: pathlib.Path, cpu_devices: list[str]
) -> None:
  module = Mlp()
  module(tf.zeros([4, 8]))
  tf.saved_model.save(module, str(tmp_path))
  loaded = tf.saved_model.load(str(tmp_path))

  @tf.function
  def inner(x: Any) -> Any:
    total = tf.zeros_like(x)
    for i in range(2):  # AutoGraph's own loops are there, too.
      total += tf.sin(x) * float(i + 1)
    return total, tf.split(x, 2, -1)

  def fn(x: Any) -> Any:
    total, parts = inner(x)
    return loaded(total), loaded(inner(x)[0]), parts

  x = floats(4, 8)
  both = comparing.compare(fn, [x], "x.0:r,Identity_2.1:c", cpu_devices[:4])
  assert both.difference < 1e-5
  assert len(both.imported.variables) == 5


def test_repeated_parts_share_names_and_sizes_do_not() -> None:
  blocks = [Mlp(16), Mlp(16), Mlp(32)]

  def fn(x: Any) -> Any:
    for b in blocks:
      x = b.layers[1](tf.nn.relu(b.layers[0](x)))
    return x

  holder = tf.Module()
  holder.blocks = blocks
  holder.__class__ = type("Holder", (tf.Module,), {"__call__": lambda self, x: fn(x)})
  imported = mtf.from_tensorflow(holder, SPEC)
  kernels = [v.shape.dimension_names for v in imported.variables if "kernel" in v.name]
  names = [k[1] for k in kernels]
  assert names[0] == names[2] == "blocks/0/layers/0.units"
  assert names[4] not in names[:4]
  assert all(len(set(k)) == 2 for k in kernels)
  assert [k[0] for k in kernels[1:]] == names[:-1]


def test_named_patterns_and_values_of_size_one() -> None:
  imported = mtf.from_tensorflow(
    Mlp(),
    [mtf.TensorSpec("batch:1,d_model:8")],
    dims={"layers/?/kernel": [None, None], "layers/0/kernel": [None, "d_ff"]},
  )
  assert list(imported.dimensions) == ["d_model", "d_ff"]
  assert imported.variables[1].shape == mtf.Shape([("d_model", 8), ("d_ff", 16)])


def test_bad_calls_are_told() -> None:
  imported = mtf.from_tensorflow(Mlp(), SPEC)
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "mesh")
  x = mtf.import_tf_tensor(mesh, floats(4, 8), mtf.Shape([("a", 4), ("b", 8)]))
  wide = mtf.import_tf_tensor(mesh, floats(4, 9), mtf.Shape([("a", 4), ("b", 9)]))
  with pytest.raises(mtf.ShapeError, match=r"inputs of shape \[4, 8\]"):
    imported(wide)
  with pytest.raises(mtf.DTypeError, match="cast it"):
    imported(mtf.to_int32(x))
  with pytest.raises(mtf.ArgumentError, match=r"takes 1 tensors \(inputs\), got 2"):
    imported(x, x)
  with pytest.raises(mtf.ArgumentError, match="at least one argument must be an mtf.Tensor"):
    imported(floats(4, 8))
  with pytest.raises(mtf.ArgumentError, match="unexpected keyword"):
    imported(x, trainig=True)


def test_fallback_computes_whole_on_each_device(
  cpu_devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
  def inverse(x: Any) -> Any:
    return tf.linalg.inv(tf.matmul(x, x, transpose_b=True) + tf.eye(4)) @ x

  monkeypatch.delitem(rules._RULES, "MatrixInverse", raising=False)
  x = floats(4, 8)
  with pytest.raises(mtf.UnsupportedError, match="no rule for the operation MatrixInverse"):
    comparing.imported_of(inverse, [x], fallback="error")
  imported = comparing.imported_of(inverse, [x])
  assert [(op.type, op.dimensions) for op in imported.fallbacks] == [("MatrixInverse", set())]
  for layout in ("x.0:r,x.1:c", "memory_x.0:r,x.1:c"):
    both = comparing.compare(inverse, [x], layout, cpu_devices[:4], imported=imported)
    assert both.difference < 2e-5


def test_picture_shows_parts_variables_and_dimensions(tmp_path: pathlib.Path) -> None:
  """Else: python -m docs.tools.imported_picture."""
  drawn = imported_picture.draw()
  assert imported_picture.FILE.read_text(encoding="utf-8") == drawn
  imported = mtf.from_tensorflow(Mlp(), SPEC, dims={"inputs": ["<batch>", "d"]})
  imported.save_picture(str(tmp_path / "a.svg"))
  svg = xml.etree.ElementTree.parse(tmp_path / "a.svg")
  texts = [t.text for t in svg.iter() if t.tag.endswith("}text")]
  assert texts[:3] == ["inputs", "<batch> 4", "d 8"]
  assert texts.count("layers/0.units 16") >= 4
  with pytest.raises(mtf.ArgumentError, match="ends in .svg"):
    imported.save_picture(str(tmp_path / "a.gif"))


def test_two_imports_share_a_variable_under_other_names(cpu_devices: list[str]) -> None:
  w, x = tf.Variable(floats(8, 8), name="shared"), floats(4, 8)
  first = mtf.from_tensorflow(lambda a: tf.nn.relu(a @ w), SPEC, dims={"a": ["batch", "d"]})
  second = mtf.from_tensorflow(lambda b: b @ w, SPEC, dims={"shared": ["rows", "columns"]})
  impl = mtf.PlacementMeshImpl("r:2,c:2", "d:r,columns:c", cpu_devices[:4])
  run = mtf.function(impl, input_signature=[mtf.TensorSpec("n:4,m:8")])(lambda x: second(first(x)))
  np.testing.assert_allclose(run(x), tf.nn.relu(x @ w) @ w, rtol=1e-5, atol=1e-5)


def test_labels_take_the_dimensions_of_a_result() -> None:
  imported = mtf.from_tensorflow(Mlp(), SPEC, dims={"output": ["batch", "d_model"]})
  graph = mtf.Graph()
  y = mtf.import_tf_tensor(mtf.Mesh(graph, "mesh"), floats(4, 8), mtf.Shape([("a", 4), ("b", 8)]))
  assert imported.renamed(y, "output").shape == mtf.Shape([("batch", 4), ("d_model", 8)])
  assert imported.renamed(y, "inputs").shape.dimension_names == ["batch", "d_model"]
  with pytest.raises(mtf.DimensionError, match="no argument or result 'outputs'"):
    imported.renamed(y, "outputs")
  with pytest.raises(mtf.ShapeError, match="not the sizes"):
    imported.renamed(mtf.transpose(y, mtf.Shape([("b", 8), ("a", 4)])), "output")
