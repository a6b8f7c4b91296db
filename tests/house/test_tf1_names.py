"""What programs for the TF1 library call, and what has no meaning any more."""

from __future__ import annotations

import inspect
import logging
import re

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import checkpoint, ops, ops_with_redefined_builtins, removed_names


class TestRemovedNames:
  @pytest.mark.parametrize("module", [mtf, ops, ops_with_redefined_builtins])
  @pytest.mark.parametrize("name", sorted(removed_names.REMOVED))
  def test_access_tells_what_to_use(self, module, name):
    assert not hasattr(module, name)
    with pytest.raises(mtf.MeshError) as error:
      getattr(module, name)
    assert isinstance(error.value, AttributeError)
    assert f"{module.__name__}.{name} " in str(error.value)
    assert removed_names.REMOVED[name] in str(error.value)

  def test_from_import_tells_what_to_use(self):
    with pytest.raises(ImportError, match=r"ops\.tf_estimator .*Checkpointer"):
      from mesh_tensorflow.ops import tf_estimator  # noqa: F401
    with pytest.raises(mtf.MeshError, match=r"mesh_tensorflow\.xrange .*range"):
      from mesh_tensorflow import xrange  # noqa: F401

  def test_what_the_messages_name_exists(self):
    from mesh_tensorflow.checkpoint import Checkpointer

    assert callable(Checkpointer)
    assert callable(tf.raw_ops.Conv3DBackpropInputV2)
    assert callable(tf.raw_ops.Conv3DBackpropFilterV2)

  def test_other_names_are_unknown_as_ever(self):
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
      mtf.no_such_name  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'no_such_name'"):
      from mesh_tensorflow import no_such_name  # noqa: F401

  def test_the_porting_guide_has_all(self, repository):
    guide = (repository / "docs" / "porting.md").read_text()
    table = guide.split("\n## Names that are gone\n")[1].split("\n## ")[0]
    listed = set(re.findall(r"`mtf\.(\w+)`", re.sub(r"\| [^|]* \|$", "", table, flags=re.M)))
    assert listed == set(removed_names.REMOVED)

  def test_star_import_has_the_builtins_and_no_modules(self):
    names = {}
    exec("from mesh_tensorflow.ops_with_redefined_builtins import *", names)
    assert names["range"] is mtf.mtf_range and names["slice"] is mtf.mtf_slice
    assert names["abs"] is mtf.mtf_abs and names["pow"] is mtf.mtf_pow
    assert not [n for n, v in names.items() if inspect.ismodule(v)]


class TestSignatures:
  def test_operations_show_their_constructor(self):
    assert str(inspect.signature(mtf.Depend)).startswith("(x: 'Tensor', dependencies: ")
    assert list(inspect.signature(mtf.ReshapeOperation).parameters) == ["x", "new_shape", "name"]
    for value in vars(ops).values():
      if isinstance(value, type) and issubclass(value, mtf.Operation):
        assert "args" not in inspect.signature(value).parameters, value

  def test_of_subclasses_outside_the_package(self):
    class Own(mtf.Operation):
      def __init__(self, x, factor=2.0):
        super().__init__([x], name="own")

    class More(Own):
      pass

    assert str(inspect.signature(Own)) == str(inspect.signature(More)) == "(x, factor=2.0)"


def program(layout="a:rows,b:cols", shape="rows:2,cols:2", n=4, names=("v",), dtype=None):
  """A graph with variables [a=4, b=6] that count from 0, 100, 200, ... on."""
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  impl = mtf.placement_mesh_impl.PlacementMeshImpl(shape, layout, [""] * n)
  variables = []
  for i, name in enumerate(names):
    value = np.arange(24, dtype=np.float32).reshape(4, 6) + 100 * i
    variables.append(
      mtf.get_variable(
        mesh,
        name,
        [("a", 4), ("b", 6)],
        dtype=dtype or tf.float32,
        initializer=tf.constant_initializer(value),
      ).operation
    )
  return graph, mesh, impl, variables


class TestMasters:
  def test_whole_value_is_read_and_set(self):
    graph, mesh, impl, (v,) = program()
    mtf.Lowering(graph, {mesh: impl})
    master = v.get_master()
    assert isinstance(master, mtf.StoredVariable) and master.name == "v"
    np.testing.assert_array_equal(master.numpy(), np.arange(24).reshape(4, 6))
    v.assign_to_master(np.ones([4, 6]))
    assert [float(tf.reduce_sum(s)) for s in master.slices] == [6.0] * 4
    lowering = mtf.Lowering(graph, {mesh: impl})
    np.testing.assert_array_equal(lowering.export_to_tf_tensor(v.value), np.ones([4, 6]))
    with pytest.raises(mtf.VariableError, match="variable v has shape"):
      v.assign_to_master(np.ones([6, 4]))

  def test_device(self, cpu_devices):
    graph, mesh, _, (v,) = program()
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("rows:2", "a:rows", cpu_devices[3:5])
    mtf.Lowering(graph, {mesh: impl})
    assert v.master_device.endswith(cpu_devices[3])

  def test_before_a_lowering_there_is_no_value(self):
    _, _, _, (v,) = program()
    for use in (v.get_master, lambda: v.assign_to_master(0.0), lambda: v.master_device):
      with pytest.raises(mtf.VariableError, match="variable v has no value before an mtf.Lowering"):
        use()

  def test_a_plan_leaves_the_values_alone(self):
    graph, mesh, impl, (v,) = program()
    mtf.describe(graph, layout="a:rows", mesh_shape="rows:4")
    with pytest.raises(mtf.VariableError):
      v.get_master()
    mtf.Lowering(graph, {mesh: impl})
    mtf.describe(graph, layout="a:rows", mesh_shape="rows:4")
    assert v.get_master().numpy()[3, 5] == 23

  @pytest.mark.parametrize("in_function", [False, True])
  def test_copies_do_nothing(self, in_function):
    graph, mesh, impl, (v,) = program()

    def run():
      lowering = mtf.Lowering(graph, {mesh: impl})
      lowering.copy_masters_to_slices()
      lowering.copy_slices_to_masters()
      return lowering.export_to_tf_tensor(v.value)

    value = tf.function(run)() if in_function else run()
    np.testing.assert_array_equal(value, np.arange(24).reshape(4, 6))
    np.testing.assert_array_equal(v.get_master().numpy(), value)


class TestHooks:
  def test_called_in_the_order_of_a_session(self, caplog):
    graph, mesh, impl, (v,) = program()
    lowering = mtf.Lowering(graph, {mesh: impl})
    restore = mtf.MtfRestoreHook(lowering)
    saver = mtf.MtfCheckpointSaverListener(lowering)
    before = v.get_master().numpy()
    with caplog.at_level(logging.INFO, "mesh_tensorflow"):
      restore.begin()
      restore.after_create_session(None, None)
      saver.begin()
      saver.before_save(None, 3)
      saver.after_save(None, 3)
      saver.end(None, 3)
    np.testing.assert_array_equal(v.get_master().numpy(), before)
    assert "saved the state of step 3" in caplog.text

  @pytest.mark.parametrize("hook", [mtf.MtfRestoreHook, mtf.MtfCheckpointSaverListener])
  def test_needs_a_lowering(self, hook):
    with pytest.raises(
      mtf.GraphError, match=f"{hook.__name__}: lowering must be an mtf.Lowering, got None"
    ):
      hook(None)


class TestStackedVariable:
  @pytest.mark.parametrize("layout", ["", "a:rows,b:cols", "b:rows"])
  @pytest.mark.parametrize("simd", [False, True])
  @pytest.mark.parametrize("in_function", [False, True])
  def test_value_gradient_assignment(self, layout, simd, in_function, cpu_devices):
    make = mtf.simd_mesh_impl.SimdMeshImpl if simd else mtf.placement_mesh_impl.PlacementMeshImpl
    impl = make("rows:2,cols:2", layout, cpu_devices[:4])

    def run():
      graph, mesh, _, variables = program(names=["x/v", "w"])
      stacked = mtf.StackedVariable(variables)
      weights = mtf.import_tf_tensor(mesh, np.array([2.0, 3.0], np.float32), [("stacked", 2)])
      loss = mtf.reduce_sum(stacked.value * stacked.value * weights)
      grads = mtf.gradients([loss], [v.value for v in variables])
      mtf.assign_add(stacked, stacked.value)
      reread = [mtf.read_variable(v) for v in variables]
      lowering = mtf.Lowering(graph, {mesh: impl})
      return [lowering.export_to_tf_tensor(x) for x in [stacked.value, *grads, *reread]]

    value, dv, dw, v, w = (tf.function(impl.run) if in_function else impl.run)(run)
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    np.testing.assert_array_equal(value, [x, x + 100])
    np.testing.assert_allclose(dv, 4 * x)
    np.testing.assert_allclose(dw, 6 * (x + 100))
    np.testing.assert_array_equal(v, 2 * x)
    np.testing.assert_array_equal(w, 2 * x + 200)
    assert sorted(impl.variable_store.names) == ["w", "x/v"]

  def test_names_and_masters(self):
    graph, mesh, impl, variables = program(
      names=["x/v", "w"], dtype=mtf.VariableDType(tf.float64, tf.float32, tf.bfloat16)
    )
    stacked = mtf.StackedVariable(variables)
    assert stacked.full_name == "stacked/x/v" and stacked.original_names == ["x/v", "w"]
    assert stacked.shape == mtf.Shape([("stacked", 2), ("a", 4), ("b", 6)])
    assert stacked.dtype == variables[0].dtype and stacked.value.dtype == tf.bfloat16
    assert stacked.trainable and stacked.size == 48
    assert graph.all_variables == variables
    lowering = mtf.Lowering(graph, {mesh: impl})
    assert lowering.export_to_tf_tensor(stacked.value).dtype == tf.bfloat16
    whole = stacked.get_master()
    assert whole.dtype == tf.float64 and whole[1, 0, 2] == 102
    stacked.assign_to_master(-whole)
    assert variables[0].get_master().numpy()[3, 5] == -23
    assert stacked.master_device == variables[0].master_device

  def test_wrong_use(self):
    graph, mesh, impl, (v,) = program()
    other = mtf.get_variable(mesh, "other", [("a", 4)]).operation
    with pytest.raises(mtf.VariableError, match="other has .*a=4"):
      mtf.StackedVariable([v, other])
    with pytest.raises(mtf.VariableError, match="takes a list of Variable operations"):
      mtf.StackedVariable([])
    with pytest.raises(mtf.MeshError, match="must be an mtf.Variable"):
      mtf.StackedVariable([v.value])
    assert len(graph.operations) == 2
    mtf.StackedVariable([v, v])
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("rows:2", "stacked:rows", ["", ""])
    with pytest.raises(mtf.LayoutError, match="stacked:2 .* rows:2"):
      mtf.Lowering(graph, {mesh: impl})


def test_checkpoint_of_a_tf1_program(tmp_path):
  """As tf.train.Saver writes it: whole master variables by name, slots too, and the step."""
  value = np.random.RandomState(0).randn(4, 6).astype(np.float32)
  names = ["net/w", "net/w_slot_v", "global_step"]
  path = str(tmp_path / "model.ckpt-3000")
  tf.raw_ops.SaveV2(
    prefix=path,
    tensor_names=names,
    shape_and_slices=[""] * 3,
    tensors=[value, value**2, np.array(3000, np.int64)],
  )
  impl = mtf.placement_mesh_impl.PlacementMeshImpl("rows:2,cols:2", "a:rows,b:cols", [""] * 4)

  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  with mtf.variable_scope("net"):
    w = mtf.get_variable(mesh, "w", [("a", 4), ("b", 6)])
  optimizer = mtf.optimize.AdafactorOptimizer(learning_rate=0.1)
  optimizer.minimize(mtf.reduce_sum(mtf.square(w)))
  mtf.Lowering(graph, {mesh: impl})
  restored = checkpoint.Checkpointer(str(tmp_path), impl.variable_store).restore(path)
  assert restored.step == 3000
  assert sorted(impl.variable_store.names) == sorted(names)
  np.testing.assert_array_equal(w.operation.get_master().numpy(), value)
  np.testing.assert_array_equal(impl.variable_store["net/w_slot_v"].numpy(), value**2)


def test_dir_shows_what_a_program_needs(repository):
  """Some seventy names, all there; and what the README's programs use is among them."""
  assert 50 < len(dir(mtf)) < 80
  assert all(hasattr(mtf, name) for name in dir(mtf))
  used = re.findall(r"\bmtf\.([a-zA-Z]\w+)", (repository / "README.md").read_text())
  assert set(used) - set(dir(mtf)) == set()
  assert hasattr(mtf, "mtf_abs") and hasattr(mtf, "list_product")  # The others are there, too.
