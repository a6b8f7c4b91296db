"""From a TPU's topology to a mesh; and what is said where there is no TPU."""

import itertools
import math
import types

import numpy as np
import pytest
import tensorflow as tf
from absl import flags

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import ConfigError, MeshShapeError
from mesh_tensorflow.meshes.topology import auto_logical_to_physical_tpu
from mesh_tensorflow.meshes.tpu import mesh as tpu_mesh


@pytest.fixture
def set_flag():
  """Sets a flag for the time of the test."""
  before = {n: flags.FLAGS[n].value for n in ("fold_xy", "logical_cores_per_chip")}

  def set_value(name, value):
    flags.FLAGS[name].value = value

  yield set_value
  for name, value in before.items():
    flags.FLAGS[name].value = value


def make_topology(shape, hosts=1):
  """A topology of a TPU that is not there: the cores of each host are a part of the chips."""
  cores = np.array(list(itertools.product(*map(range, shape))), np.int32)
  return tf.tpu.experimental.Topology(
    mesh_shape=np.array(shape, np.int32), device_coordinates=cores.reshape(hosts, -1, 4)
  )


def test_a_mesh_follows_the_tiles_of_the_reference():
  # Golden: ([2, 4], [2, 2, 2]) is [0, 1, 4, 5, 2, 3, 6, 7], over [y * z, x, core].
  assert auto_logical_to_physical_tpu([2, 4], [2, 2, 2]) == [0, 1, 4, 5, 2, 3, 6, 7]
  got = tpu_mesh.physical_coordinates("a:2,b:4", [2, 2, 1, 2])
  numbers = [y * 4 + x * 2 + core for x, y, _, core in got]
  assert numbers == [0, 1, 4, 5, 2, 3, 6, 7]


@pytest.mark.parametrize("fold_xy", [False, True])
@pytest.mark.parametrize(
  ("mesh", "chips"),
  [
    ("a:8", [2, 2, 1, 2]),
    ("a:2,b:4", [2, 2, 1, 2]),
    ("a:16,b:8", [8, 8, 1, 2]),
    ("a:4,b:4,c:4", [4, 4, 2, 2]),
    ("a:3,b:4", [3, 2, 1, 2]),
    ("a:1,b:32", [2, 4, 4, 1]),
  ],
)
def test_every_core_is_one_processor(mesh, chips, fold_xy, set_flag):
  set_flag("fold_xy", fold_xy)
  set_flag("logical_cores_per_chip", chips[3])
  got = tpu_mesh.physical_coordinates(mesh, chips)
  assert sorted(map(tuple, got)) == list(itertools.product(*map(range, chips)))
  assignment = tpu_mesh.device_assignment(make_topology(chips, hosts=chips[0]), mesh)
  assert assignment.num_replicas == math.prod(chips)
  assert assignment.num_cores_per_replica == 1
  for replica, c in enumerate(got):
    assert list(assignment.coordinates(replica, 0)) == c


def test_neighbours_on_the_last_axis_are_near():
  """In a tile of 2 x 2 chips no step is longer than one chip; in the order of cores it is."""
  got = tpu_mesh.physical_coordinates("a:16,b:8", [8, 8, 1, 2])
  for group in np.array(got).reshape(16, 8, 4):
    steps = np.abs(group - np.roll(group, 1, 0))[:, :3].sum(1)
    assert steps.max() == 1
    assert (group[:, :2].max(0) - group[:, :2].min(0)).tolist() == [1, 1]


def test_a_tiling_of_the_caller():
  spec = [("dp", None), ("mp", [1, 1, 2])]
  got = tpu_mesh.physical_coordinates("dp:4,mp:2", [2, 2, 1, 2], spec)
  numbers = [y * 4 + x * 2 + core for x, y, _, core in got]
  assert numbers == [0, 1, 2, 3, 6, 7, 4, 5]  # Golden.
  with pytest.raises(MeshShapeError, match="gives the mesh .*dp=4.* not .*dp=2"):
    tpu_mesh.physical_coordinates("dp:2,mp:4", [2, 2, 1, 2], spec)
  # It has no effect on several layers, as before.
  deep = [2, 2, 2, 2]
  assert tpu_mesh.physical_coordinates("a:4,b:4", deep, spec) == tpu_mesh.physical_coordinates(
    "a:4,b:4", deep
  )


def test_wrong_sizes():
  with pytest.raises(MeshShapeError, match=r"\[4\] has 4 processors, a TPU .* has 8 cores"):
    tpu_mesh.physical_coordinates("a:4", [2, 2, 1, 2])
  with pytest.raises(MeshShapeError, match=r"\[x, y, z, core\], got \[2, 2, 2\]"):
    tpu_mesh.physical_coordinates("a:8", [2, 2, 2])


def test_a_warning_if_the_flag_does_not_fit_the_chips(caplog):
  with caplog.at_level("WARNING", "mesh_tensorflow"):
    tpu_mesh.physical_coordinates("a:8", [2, 4, 1, 1])
  assert "set the flag to 1" in caplog.text


def test_no_tpu_here():
  with pytest.raises(ConfigError, match="no TPU was found on this machine: TensorFlow sees CPU"):
    tpu_mesh.make_mesh_impl("a:8", "")
  with pytest.raises(ConfigError, match="TPU 'no-such-tpu' cannot be used: .*gcloud"):
    tpu_mesh.connect("no-such-tpu", zone="nowhere", project="none")


def test_no_tpu_wanted():
  with pytest.raises(ConfigError, match="tpu=False leaves no TPU to make a mesh on"):
    tpu_mesh.make_mesh_impl("a:8", "", tpu=False)


@pytest.mark.parametrize(("given", "address"), [(True, "local"), ("my-tpu", "my-tpu")])
def test_which_tpu_is_connected(given, address, monkeypatch):
  asked = []

  def connect(tpu, **kwargs):
    asked.append((tpu, kwargs))
    raise ConfigError("enough")

  monkeypatch.setattr(tpu_mesh, "connect", connect)
  with pytest.raises(ConfigError, match="enough"):
    tpu_mesh.make_mesh_impl("a:8", "", tpu=given, zone="z", project="p")
  assert asked == [(address, {"zone": "z", "project": "p", "job_name": None})]


class Resolver:
  """What `tf.distribute.TPUStrategy` asks a cluster resolver for."""

  tpu_hardware_feature = None

  def __init__(self, topology, cores):
    names = [f"/job:localhost/replica:0/task:0/device:TPU:{i}" for i in range(cores)]
    devices = [types.SimpleNamespace(name=n, device_type="TPU") for n in names]
    self._metadata = tf.tpu.experimental.TPUSystemMetadata(
      num_cores=cores,
      num_hosts=1,
      num_of_cores_per_host=cores,
      topology=topology,
      devices=devices,
    )

  def get_tpu_system_metadata(self):
    return self._metadata

  def cluster_spec(self):
    return None


def test_the_graph_that_a_tpu_gets(cpu_devices, monkeypatch):
  """The TPUStrategy is TensorFlow's own; only its variables are elsewhere, on CPUs."""
  real = tf.distribute.TPUStrategy

  def strategy(*args, **kwargs):
    result = real(*args, **kwargs)
    # Where it would create variables.
    result.extended._tpu_devices = np.array([[d] for d in cpu_devices[:4]], object)
    return result

  monkeypatch.setattr(tf.distribute, "TPUStrategy", strategy)
  topology = make_topology([2, 1, 1, 2])
  spec = [("rows", [1, 1, 2]), ("cols", [1, 2, 1])]
  impl = tpu_mesh.make_mesh_impl(
    "rows:2,cols:2",
    "batch:rows,hidden:cols",
    tpu_mesh.Tpu(Resolver(topology, 4), topology),
    hierarchical_tiling_spec=spec,
  )
  monkeypatch.setattr(impl, "_on_tpu", True)
  monkeypatch.setattr(impl, "_tpu_collectives", True)
  batch, io, hidden = [mtf.Dimension(*d) for d in (("batch", 4), ("io", 6), ("hidden", 8))]

  @mtf.function(impl, [mtf.TensorSpec([batch, io])])
  def train_step(x):
    h = mtf.layers.dense(x, hidden, reduced_dims=[io], activation=mtf.relu, name="up")
    y = mtf.layers.dense(h, io, reduced_dims=[hidden], name="down")
    loss = mtf.reduce_mean(mtf.square(y - x))
    mtf.optimize.AdafactorOptimizer(learning_rate=0.05).minimize(loss)
    return loss, y

  @tf.function(input_signature=[tf.TensorSpec([4, 6])], autograph=False)
  def step(x):
    return train_step(x)

  concrete = step.get_concrete_function()
  operations = concrete.graph.get_operations()
  [metadata] = [op for op in operations if op.type == "TPUReplicateMetadata"]
  assert metadata.get_attr("num_replicas") == 4
  # [x, y, z, core] of each replica.
  assert list(metadata.get_attr("device_assignment")) == [
    *(0, 0, 0, 0),
    *(1, 0, 0, 0),
    *(0, 0, 0, 1),
    *(1, 0, 0, 1),
  ]
  [call] = [op for op in operations if op.type == "StatefulPartitionedCall"]
  handles = [t.op for t in call.inputs if t.dtype == tf.resource]
  assert {op.type for op in handles} == {"TPUReplicatedInput"}
  assert len(handles) == len(impl.variable_store) > 4
  loss, y = concrete.structured_outputs
  assert (loss.shape, y.shape) == ([], [4, 6])
  bodies = [f.node_def for f in concrete.graph.as_graph_def().library.function]
  assert any(n.op == "CrossReplicaSum" for body in bodies for n in body)
