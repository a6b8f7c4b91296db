"""`mesh_tensorflow.utils`, `.test_utils` and `.tpu_variables`."""

from __future__ import annotations

import glob
import re
import struct

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import test_utils, tpu_variables, utils


class TestPlacer:
  def test_least_loaded_device(self):
    devices = [f"cpu:{i}" for i in range(4)]
    placer = utils.BalancedVariablePlacer(devices, [100, 0, 0, 0])
    graph = tf.Graph()
    with graph.as_default():
      variables = [
        tf.raw_ops.VarHandleOp(shape=[10, 10], dtype=tf.float32, shared_name=f"w{i}").op
        for i in range(5)
      ]
    got = [placer.device_function(v) for v in variables]
    assert got == ["cpu:1", "cpu:2", "cpu:3", "cpu:0", "cpu:1"]

  def test_variables_of_tensorflow_2(self):
    placer = utils.BalancedVariablePlacer(["a", "b"])
    sizes = [tf.Variable(tf.zeros([n], dtype)) for n, dtype in [(4, tf.float64), (5, tf.int16)]]
    assert [placer.device_function(v) for v in sizes] == ["a", "b"]  # 32 and 10 bytes
    assert placer.device_function(tf.Variable(tf.zeros([5]))) == "b"  # 30
    assert placer.device_function(tf.Variable(0.0)) == "b"  # 34
    assert placer.device_function(tf.Variable(0.0)) == "a"

  def test_other_operations_go_where_the_last_variable_went(self):
    placer = utils.BalancedVariablePlacer(["a", "b"], [1, 0])
    with tf.Graph().as_default():
      op = tf.constant(1.0).op
    assert placer.device_function(op) == "a"
    placer.device_function(tf.Variable(1.0))
    assert placer.device_function(op) == "b"

  def test_wrong_usage_list(self):
    with pytest.raises(AssertionError, match="1 entries of init_usage for 2 devices"):
      utils.BalancedVariablePlacer(["a", "b"], [0])

  def test_mesh_takes_one(self):
    placer = utils.BalancedVariablePlacer(["a"])
    mesh = mtf.Mesh(mtf.Graph(), "m", placer)
    assert mesh.variable_placer_fn == placer.device_function


class TestHostCall:
  def program(self, with_step=True):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "m")
    if with_step:
      graph.global_step = mtf.constant(mesh, 7, [], tf.int64)
    mtf.scalar_summary("loss", mtf.constant(mesh, 2.5, [], tf.float32))
    mtf.scalar_summary("steps", mtf.constant(mesh, 3, [], tf.int64))
    mtf.scalar_summary("half", mtf.constant(mesh, 0.5, [], tf.bfloat16))
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:2", {}, ["", ""])
    return mtf.Lowering(graph, {mesh: impl})

  def test_values_and_event_file(self, tmp_path):
    @tf.function
    def step():
      fn, tensors = utils.create_host_call(str(tmp_path), lowering=self.program())
      step.host_call = fn
      return tensors

    tensors = step()
    assert [t.dtype for t in tensors] == [tf.int32, tf.float32, tf.int32, tf.float32]
    assert [t.numpy().tolist() for t in tensors] == [[7], [2.5], [3], [0.5]]
    step.host_call(*tensors)
    (path,) = glob.glob(str(tmp_path / "events*"))
    records = [r.numpy() for r in tf.data.TFRecordDataset(path)]
    written = dict(item for r in records for item in _summaries(r))
    assert written == {"loss": (7, 2.5), "steps": (7, 3.0), "half": (7, 0.5)}

  def test_step_may_be_given(self, tmp_path):
    lowering = self.program(with_step=False)
    _, tensors = utils.create_host_call(str(tmp_path), lowering=lowering, step=11)
    assert tensors[0].numpy() == [11]
    with pytest.raises(mtf.GraphError, match="give the number of the step"):
      utils.create_host_call(str(tmp_path), lowering=lowering)

  def test_none_without_summaries(self, tmp_path):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "m")
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:1", {}, [""])
    lowering = mtf.Lowering(graph, {mesh: impl})
    assert utils.create_host_call(str(tmp_path), lowering=lowering) is None

  def test_the_call_of_the_tf1_library_is_told_what_to_give(self):
    with pytest.raises(mtf.UnsupportedError, match="lowering=lowering"):
      utils.create_host_call("folder")

  def test_remove_summaries_and_the_key(self):
    lowering = self.program()
    utils.remove_summaries()
    assert len(lowering.scalar_summaries) == 3
    assert utils.SCALAR_SUMMARIES_COLLECTION_KEY == "mtf_scalar_summaries"


def _summaries(record):
  """(tag, (step, value)) of the scalars in a record of an event file."""
  (step,) = tf.io.decode_proto(record, "tensorflow.Event", ["step"], [tf.int64]).values
  # Summary.Value {tag tensor {dtype: DT_FLOAT tensor_shape {} tensor_content}}
  value = rb'\n.(\w+)B\n\x08\x01\x12\x00"\x04(.{4})'
  for tag, number in re.findall(value, record, re.DOTALL):
    yield tag.decode(), (int(step[0]), struct.unpack("<f", number)[0])


def test_outside_all_rewrites():
  @tf.function
  def f():
    with utils.outside_all_rewrites():
      assert tf.executing_eagerly()
      return int(tf.constant(3))

  assert f() == 3


def test_topology_rank():
  topology = tf.tpu.experimental.Topology(
    mesh_shape=[2, 2, 1, 1],
    device_coordinates=np.array([[[i, j, 0, 0] for i in range(2) for j in range(2)]]),
  )
  assert utils.topology_rank(topology) == 4
  assert utils.topology_rank(topology.serialized()) == 4
  with pytest.raises(ValueError, match="got list"):
    utils.topology_rank([2, 2, 2])


class TestNumpyConverter:
  def test_round_trip(self):
    converter = test_utils.NumpyConverter()
    x = np.array([[1, 2, 3], [4, 5, 6]])
    t = converter.convert_np_array_to_mtf_tensor(x)
    assert t.dtype == tf.int32 and t.shape == mtf.Shape([("dim0", 2), ("dim1", 3)])
    assert t.mesh is converter.mesh and t.graph is converter.graph
    got = converter.convert_mtf_tensor_to_np_array(t)
    assert isinstance(got, np.ndarray)
    np.testing.assert_array_equal(got, x)

  def test_names_and_dtypes(self):
    converter = test_utils.NumpyConverter()
    cut = converter.convert_np_array_to_mtf_tensor([1.7, -1.7])
    kept = converter.convert_np_array_to_mtf_tensor([1.75], dim_names=["a"], dtype=tf.float32)
    assert converter.convert_mtf_tensor_to_np_array(cut).tolist() == [1, -1]
    assert kept.shape.dimension_names == ["a"]
    assert converter.convert_mtf_tensor_to_np_array(kept).tolist() == [1.75]
    with pytest.raises(mtf.ShapeError, match="1 names"):
      converter.convert_np_array_to_mtf_tensor([[1]], dim_names=["a"])

  def test_variables_keep_their_values(self):
    converter = test_utils.NumpyConverter()
    v = mtf.get_variable(
      converter.mesh, "v", [("a", 3)], initializer=tf.keras.initializers.RandomNormal()
    )
    first = converter.convert_mtf_tensor_to_np_array(v)
    assert np.any(first != 0)
    np.testing.assert_array_equal(first, converter.convert_mtf_tensor_to_np_array(v))
    mtf.assign(v, v + 1.0)
    converter.convert_mtf_tensor_to_np_array(v)
    np.testing.assert_allclose(converter.convert_mtf_tensor_to_np_array(v), first + 1, rtol=1e-6)

  def test_tf_tensor(self):
    converter = test_utils.NumpyConverter()
    t = converter.convert_np_array_to_mtf_tensor([1, 2])
    lowering, value = converter.convert_mtf_tensor_to_tf_tensor(t)
    assert isinstance(lowering, mtf.Lowering) and isinstance(value, tf.Tensor)
    np.testing.assert_array_equal(lowering.export_to_tf_tensor(t), value)

  def test_no_session(self):
    converter = test_utils.NumpyConverter()
    assert not hasattr(converter, "session")
    with pytest.raises(mtf.MeshError, match="convert_mtf_tensor_to_np_array"):
      converter.session  # noqa: B018


class TestReplicatedVariable:
  def test_acts_as_the_first_outside(self):
    parts = [tf.Variable([1.0, 2.0], name="a"), tf.Variable([3.0, 4.0], name="b")]
    v = tpu_variables.ReplicatedVariable("v", parts)
    assert (v.name, v.shape, v.get_shape(), v.dtype) == ("v", [2], [2], tf.float32)
    assert v.constraint is None and v.handle is parts[0].handle and v.get() is parts[0]
    v.assign([5.0, 6.0])
    v.assign_add([1.0, 1.0])
    v.assign_sub([0.0, 1.0])
    np.testing.assert_array_equal(v.read_value(), [6, 6])
    np.testing.assert_array_equal(parts[1], [3, 4])
    np.testing.assert_array_equal(tf.add(v, [1.0, 2.0]), [7, 8])
    np.testing.assert_array_equal((2.0 * v - v / 2.0 + 1.0)[0], 10)
    np.testing.assert_array_equal(1.0 - (-v), [7, 7])

  def test_each_replica_has_its_own(self, cpu_devices):
    strategy = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
    parts = []
    for i in range(2):
      with tf.device(cpu_devices[i]):
        parts.append(tf.Variable(float(i)))
    v = tpu_variables.ReplicatedVariable("v", parts)

    @tf.function
    def run():
      return strategy.run(lambda: v.assign_add(10.0).read_value())

    got = [float(x) for x in strategy.experimental_local_results(run())]
    assert got == [10.0, 11.0]
    assert [float(p) for p in parts] == [10.0, 11.0]

  def test_refusals(self):
    with pytest.raises(mtf.VariableError, match="at least one"):
      tpu_variables.ReplicatedVariable("v", [])
    with pytest.raises(mtf.VariableError, match=r"\(1,\)"):
      tpu_variables.ReplicatedVariable("v", [tf.Variable([1.0]), tf.Variable(1.0)])
    v = tpu_variables.ReplicatedVariable("v", [tf.Variable(1.0)])
    for what in ("op", "initializer", "graph"):
      with pytest.raises(mtf.UnsupportedError, match=f"no {what}"):
        getattr(v, what)
    with pytest.raises(mtf.UnsupportedError, match="no proto"):
      v.to_proto()
    with pytest.raises(mtf.DTypeError, match="of float32, and asked for as int32"):
      tf.convert_to_tensor(v, tf.int32)
