import json
import math

import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import ConfigError, GraphError
from mesh_tensorflow.planning import Machine
from mesh_tensorflow.planning.cost_model import (
  Product,
  Seconds,
  Work,
  exchange_seconds,
  step_time,
  work_seconds,
)
from tests.planning.test_machine import fields

MACHINE = Machine.from_dict(fields())
SHARED = Machine.from_dict(fields(shared=True))
MESH = mtf.convert_to_shape("a:8,b:4")  # a: far, torus; b: near, switch.


def work_of(make):
  work = Work()
  with tf.Graph().as_default() as graph:
    make(lambda *shape: tf.raw_ops.Placeholder(dtype=tf.float32, shape=shape))
    for node in graph.get_operations():
      work.add_node(node)
  return work


def test_work_of_nodes():
  work = work_of(lambda z: tf.reshape(tf.nn.relu(tf.matmul(z(2, 3), z(3, 5))), [10]))
  assert work.products == [Product(2 * 30, "float32", 4 * (6 + 15 + 10))]
  assert (work.traffic, work.launches) == (4 * (10 + 10), 1)
  # Of a table a gather reads what it writes.
  work = work_of(lambda z: tf.gather(z(1000, 4), [1, 2]))
  assert work.traffic == 2 * 4 * 8


def test_a_product_takes_the_longer_of_computing_and_of_memory():
  computing = Work([Product(10**8, "bfloat16", 10)])
  assert work_seconds(computing, MACHINE, 4).seconds == pytest.approx(1e8 / 3e12 + 1e-6)
  moving = Work([Product(10**8, "bfloat16", 10**9)])
  assert work_seconds(moving, MACHINE, 4).seconds == pytest.approx(1e9 / 1e11 + 1e-6)


def test_convolutions_have_a_rate_by_channels():
  slow = Machine.from_dict(fields(device__convolution=[[4, 0.2], [16, 0.4], [64, 2.0]])).device
  rates = [
    slow.convolution_rate("float32", 1e9, c) / slow.rate("float32", 1e9) for c in (1, 4, 8, 16, 99)
  ]
  assert rates == pytest.approx([0.2, 0.2, 0.3, 0.4, 2.0])


def test_convolutions_have_a_rate_of_their_own():
  work = work_of(lambda z: tf.nn.conv2d(z(2, 8, 8, 3), z(3, 3, 3, 5), 1, "SAME"))
  assert work.products == [Product(2 * 2 * 64 * 5 * 27, "float32", 4 * (384 + 135 + 640), 15**0.5)]
  slow = Machine.from_dict(fields(device__convolution=0.25))
  flops, launch = 10**8, 1e-6
  times = [
    work_seconds(Work([Product(flops, "float32", 1, channels)]), slow, 4).seconds - launch
    for channels in (0, 8)
  ]
  assert times[1] == pytest.approx(4 * times[0])


def test_traffic_launches_and_fusion():
  work = Work(traffic=10**6, launches=8)
  assert work_seconds(work, MACHINE, 4).seconds == pytest.approx(1e-5 + 8e-6)
  fused = Machine.from_dict(fields(device__operations_per_kernel=4))
  assert work_seconds(work, fused, 4).seconds == pytest.approx((1e-5 + 8e-6) / 4)


def test_devices_that_share_a_host_add_up():
  work = Work([Product(10**8, "float32", 1)], 10**6, 8)
  alone = work_seconds(work, MACHINE, 4).seconds
  assert work_seconds(work, SHARED, 4).seconds == pytest.approx(4 * alone)
  (alone,) = exchange_seconds("allreduce", {1: 1000}, MACHINE, MESH)
  (shared,) = exchange_seconds("allreduce", {1: 1000}, SHARED, MESH)
  assert shared.seconds == pytest.approx(32 * alone.seconds)


@pytest.mark.parametrize(
  ("kind", "axis", "expected"),
  [
    ("allreduce", 1, 2 * 2 * 1e-6 + 1e6 / 1e10),  # A tree of 4, up and down.
    ("allconcat", 1, 2 * 1e-6 + 1e6 / 1e10),
    ("receive", 1, 1e-6 + 1e6 / 1e10),
    ("allreduce", 0, 2 * 4 * 1e-5 + 1e6 / 1e9),  # Half around a ring of 8, twice.
    ("alltoall", 0, 4 * 1e-5 + 2 * 1e6 / 1e9),  # Two links between two devices on average.
    ("alltoall", 1, 2 * 1e-6 + 1e6 / 1e10),
  ],
)
def test_exchanges(kind, axis, expected):
  (found,) = exchange_seconds(kind, {axis: 10**6}, MACHINE, MESH)
  assert found.axis == axis
  assert found.seconds == pytest.approx(expected)


def test_hidden_exchanges_and_parts_of_a_step():
  machine = Machine.from_dict(fields(links__0__overlap=0.5))
  work = Work([Product(10**8, "float32", 1)], 10**6, 3)
  step = step_time([(work, [("allreduce", {1: 10**6})], 2)], machine, MESH)
  exchange = 2 * (4e-6 + 1e-4)
  assert step.hidden == pytest.approx(exchange / 2)
  computing = 2 * work_seconds(work, machine, 32).seconds
  assert step.seconds == pytest.approx(computing + exchange / 2)
  assert set(step.parts()) == {
    "products float32",
    "memory traffic",
    "launches",
    "allreduce over b",
    "hidden behind computing",
  }
  assert sum(step.parts().values()) == pytest.approx(step.seconds)
  assert step.ideal_seconds == pytest.approx(2 * 1e8 / 1e12)
  assert step.latency == pytest.approx(2 * 4e-6)
  # No more is hidden than there is to compute.
  assert Seconds(computing=3.0, exchanging=8.0, overlappable=5.0).hidden == 3.0


def language_model(impl):
  batch, length, d = mtf.Dimension("batch", 8), mtf.Dimension("length", 4), mtf.Dimension("d", 16)
  vocab = mtf.Dimension("vocab", 32)

  @mtf.function(impl, [mtf.TensorSpec([batch, length], tf.int32)])
  def train_step(tokens):
    x = mtf.layers.embedding(tokens, vocab, d, tf.float32)
    logits = mtf.layers.dense(x, vocab, reduced_dims=[d], name="out")
    loss = mtf.reduce_mean(
      mtf.layers.softmax_cross_entropy_with_logits(
        logits, mtf.one_hot(tokens, vocab, dtype=tf.float32), vocab
      )
    )
    mtf.optimize.SgdOptimizer(learning_rate=0.1).minimize(loss)
    return loss

  return train_step


def test_describe_predicts_seconds():
  impl = mtf.PlacementMeshImpl("rows:2,cols:2", "batch:rows,vocab:cols", [""] * 4)
  step = language_model(impl)
  without = mtf.describe(step)
  assert (without.seconds, without.time, without.utilisation) == (None, None, None)
  assert without.to_dict()["seconds"] is None
  report = mtf.describe(step, machine=MACHINE)
  time = report.to_dict()["time"]
  assert report.to_dict()["seconds"] == report.seconds > 0
  assert sum(time["parts"].values()) == pytest.approx(report.seconds)
  # A product with a vector is no matrix product on a device: its time is that of its bytes.
  products = sum(p["flops"] for p in time["products"])
  assert 0.95 * report.flops_per_device < products <= report.flops_per_device
  assert report.tokens == 32
  assert report.tokens_per_second == pytest.approx(32 / report.seconds)
  with pytest.raises(mtf.ArgumentError) as error:
    mtf.describe(mtf.Graph(), {}, "all:1", tokens=0)
  assert "at least 1, got 0" in str(error.value)
  assert 0 < report.utilisation < 1
  json.dumps(report.to_dict())
  text = str(report)
  assert "Predicted for round" in text and "tokens/s" in text and "allreduce over rows" in text
  assert max(len(line) for line in text.split("\n")) <= 100


def test_utilisation_counts_no_work_twice():
  # Without a rule both devices do the same: half of what they do is needed.
  impl = mtf.PlacementMeshImpl("all:2", "", [""] * 2)
  step = language_model(impl)
  idle = mtf.describe(step, machine=MACHINE)
  split = mtf.describe(step, "batch:all", machine=MACHINE)
  ideal = idle.time.ideal_seconds / idle.seconds
  assert idle.utilisation == pytest.approx(ideal / 2)
  assert split.utilisation == pytest.approx(split.time.ideal_seconds / split.seconds)


def test_the_variant_of_the_mesh_implementation_is_taken():
  links = [{"name": "x", "devices": None, "topology": "switch", "bandwidth": 1.0, "latency": 9.0}]
  machine = Machine.from_dict(fields(variants={"placement": {"links": links}}))
  step = language_model(mtf.PlacementMeshImpl("rows:2", "batch:rows", [""] * 2))
  assert mtf.describe(step, machine=machine).seconds > 9
  assert mtf.describe(step.build_graph()[0], "batch:rows", "r:2", machine=machine).seconds < 9


def test_memory_at_its_moment():
  step = language_model(mtf.PlacementMeshImpl("rows:2", "batch:rows", [""] * 2))
  memory = mtf.describe(step).memory
  highest = max(memory.timeline, key=lambda held: held.bytes)
  assert (highest.bytes, highest.name) == (memory.activations, memory.peak_operation)


def test_pictures_and_wrong_arguments(tmp_path):
  step = language_model(mtf.PlacementMeshImpl("rows:2", "batch:rows", [""] * 2))
  with pytest.raises(ConfigError, match="there is no machine 'tpu'"):
    mtf.describe(step, machine="tpu")
  with pytest.raises(GraphError, match=r"needs mtf.describe\(program, machine=...\)"):
    mtf.describe(step).save_time_picture("x.svg")
  pytest.importorskip("matplotlib")
  path = tmp_path / "time.svg"
  mtf.describe(step, machine="cpu").save_time_picture(str(path))
  assert b"<svg" in path.read_bytes()


def test_loops_count_their_iterations():
  def seconds(iterations):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "m")
    x = mtf.import_tf_tensor(mesh, tf.zeros([8, 8]), [("a", 8), ("b", 8)])
    mtf.while_loop(
      lambda i, y: mtf.less(i, 3),
      lambda i, y: [i + 1, mtf.relu(y)],
      [mtf.constant(mesh, 0, dtype=tf.int32), x],
      maximum_iterations=iterations,
    )
    return mtf.describe(graph, "", "one:1", machine=MACHINE).seconds

  assert seconds(9) - seconds(5) == pytest.approx(4 / 3 * (seconds(5) - seconds(2)), rel=1e-6)
  assert math.isfinite(seconds(3))


@pytest.mark.parametrize(
  ("run", "channels"),
  [
    (lambda: tf.nn.conv2d(tf.zeros([2, 8, 8, 4]), tf.zeros([3, 3, 4, 16]), 1, "SAME"), 8),
    (lambda: tf.nn.conv3d(tf.zeros([2, 4, 4, 4, 1]), tf.ones([3, 3, 3, 1, 4]), [1] * 5, "SAME"), 2),
    (
      lambda: tf.nn.depthwise_conv2d(
        tf.zeros([2, 8, 8, 4]), tf.zeros([3, 3, 4, 1]), [1] * 4, "SAME"
      ),
      1,
    ),
    (
      lambda: tf.raw_ops.Conv2DBackpropFilter(
        input=tf.zeros([2, 8, 8, 2]), filter_sizes=tf.constant([3, 3, 2, 8]), strides=[1] * 4,
        out_backprop=tf.zeros([2, 8, 8, 8]), padding="SAME",
      ),
      4,
    ),
    (lambda: tf.matmul(tf.zeros([4, 4]), tf.zeros([4, 4])), 0),
  ],
)  # fmt: skip
def test_channels_of_convolutions(run, channels):
  graph = tf.Graph()
  with graph.as_default():
    run()
  work = Work()
  for node in graph.get_operations():
    work.add_node(node)
  assert [p.channels for p in work.products] == [channels]
