import math

import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.planning import Machine, measure


@pytest.mark.slow
def test_the_command_writes_a_machine_that_describe_takes(tmp_path, cpu_devices, capsys):
  path = str(tmp_path / "here.json")
  assert measure.main(["--out", path, "--devices", "2", "--quick", "--memory", "1e9"]) == 0
  printed = capsys.readouterr().out
  assert "exchange placement" in printed and "exchange simd" in printed and path in printed
  machine = Machine.load(path)
  assert machine.shared and machine.device.memory == 1e9
  assert set(machine.device.flops) == {"float32", "bfloat16"}
  assert set(machine.variants) == {"placement", "simd"}
  figures = [machine.device.memory_bandwidth, machine.device.launch_seconds]
  figures += [x for _, links in machine.variants.values() for x in (links[0].bandwidth,)]
  assert all(math.isfinite(x) and x > 0 for x in figures)
  impl = mtf.PlacementMeshImpl("rows:2", "a:rows", cpu_devices[:2])

  @mtf.function(impl, [mtf.TensorSpec([("a", 8), ("b", 4)])])
  def step(x):
    return mtf.reduce_sum(x)

  assert mtf.describe(step, machine=path).seconds > 0


def test_a_larger_product_is_not_taken_for_a_slower_one():
  points = measure._increasing({8.0: 0.5, 64.0: 0.4, 512.0: 1.0})
  assert points == ((8.0, 0.5), (64.0, 0.5), (512.0, 1.0))


def test_wrong_devices():
  with pytest.raises(ConfigError, match="at least 2 devices"):
    measure.measure(["CPU:0"])
  with pytest.raises(ConfigError, match="how many bytes a GPU has"):
    measure.measure(["GPU:0", "GPU:1"])


# ------------------------------------------------------ figures of a machine with known speeds
RATE, BANDWIDTH, LATENCY, LAUNCH = 4e9, 2e9, 1e-5, 3e-6
SIZES = measure.Sizes((16, 64, 1024), (8,), 2**16, 7, (2**10, 2**12, 2**16), 3)


@pytest.fixture
def clock(monkeypatch):
  """A machine whose times follow from what is run: `clock["seconds"](devices, shape, count)`."""
  chosen = {"runs": []}

  def on_each(devices, shape, dtype, step, count):
    chosen["runs"].append((len(devices), shape, dtype, count))
    return chosen["seconds"](len(devices), shape, count)

  monkeypatch.setattr(measure, "_on_each", on_each)
  monkeypatch.setattr(measure, "_seconds", lambda seconds, repeats: seconds)
  return chosen


def test_products_are_timed_often_enough_and_counted(clock):
  clock["seconds"] = lambda devices, shape, count: 3 * 2 * shape[0] ** 3 * count * devices / RATE
  rates = measure._product_rates("float32", ["CPU:0", "CPU:1"], SIZES)
  assert rates == {2.0 * n**3: pytest.approx(RATE) for n in SIZES.products}
  assert clock["runs"] == [
    (2, [16, 16], "float32", 20), (2, [64, 64], "float32", 20), (2, [1024, 1024], "float32", 1)
  ]  # fmt: skip


def test_a_product_of_middle_size_is_as_many_operations_as_others(clock):
  clock["seconds"] = lambda *_: 1.0
  measure._product_rates("bfloat16", ["CPU:0"], measure.Sizes((256,)))
  assert clock["runs"] == [(1, [256, 256], "bfloat16", int(2e8 / (2 * 256**3)))]


def test_a_convolution_counts_with_its_two_gradients(clock):
  flops = 2 * 9 * 16 * 16**2 * 8**2  # Three by three, 16 images of 16 by 16, 8 channels to 8.
  clock["seconds"] = lambda devices, shape, count: 3 * flops * count * devices / RATE
  assert measure._convolution_rate(["CPU:0", "CPU:1"], 8, 3) == (pytest.approx(RATE), flops)
  assert clock["runs"][0] == (2, [16, 16, 16, 8], "float32", 3)


def test_convolutions_of_many_channels_are_of_few_images(clock):
  clock["seconds"] = lambda *_: 1.0
  measure._convolution_rate(["CPU:0"], 128, 3)
  assert clock["runs"][0][1] == [2, 16, 16, 128]


def test_memory_is_read_and_written(clock):
  clock["seconds"] = lambda devices, shape, count: 8 * shape[0] * count * devices / BANDWIDTH
  assert measure._memory_bandwidth(["CPU:0", "CPU:1"], SIZES) == pytest.approx(BANDWIDTH)
  assert clock["runs"][0][1] == [2**16 // 4 // 2]  # All of them together have so many bytes.
  measure._memory_bandwidth(["CPU:0", "CPU:1"], measure.Sizes(memory=4))
  assert clock["runs"][1][1] == [1]


def test_launches_are_pairs_of_operations(clock):
  clock["seconds"] = lambda devices, shape, count: 2 * count * devices * LAUNCH
  assert measure._launch_seconds(["CPU:0", "CPU:1"], SIZES) == pytest.approx(LAUNCH)
  assert clock["runs"] == [(2, [4], "float32", 4)]  # Of seven, that are eight.


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("devices", [2, 4])
def test_latency_and_bandwidth_of_a_link_follow_from_sums(shared, devices, monkeypatch):
  """A reduction of `n` bytes sends 2 (k - 1) / k of them, in 2 log2(k) messages, of k devices."""
  asked = []

  def sum_seconds(impl, n, slice_bytes, repeats):
    asked.append((impl["size"], n, slice_bytes, repeats))
    messages = 2 * {2: 1, 4: 2}[n]
    sent = 2 * (n - 1) / n * (slice_bytes - 2**10)
    return (LATENCY * messages + sent / BANDWIDTH) * (n if shared else 1)

  def implementation(shape, layout, devices):
    assert (layout, devices) == ("part:axis", [f"CPU:{i}" for i in range(shape.size)])
    return {"size": shape.size}

  monkeypatch.setattr(measure, "_sum_seconds", sum_seconds)
  names = [f"CPU:{i}" for i in range(devices)]
  link = measure._link("some", implementation, names, SIZES, shared)
  assert link.latency == pytest.approx(LATENCY)
  assert link.bandwidth == pytest.approx(BANDWIDTH)
  assert asked == [(n, n, s, 3) for n in {2: [2], 4: [2, 4]}[devices] for s in SIZES.exchanges]


def test_a_large_sum_that_was_disturbed_less_has_a_bandwidth_all_the_same(monkeypatch):
  monkeypatch.setattr(measure, "_sum_seconds", lambda *_: 1.0)
  link = measure._link("some", lambda *_, **__: None, ["CPU:0", "CPU:1"], SIZES, False)
  assert link.bandwidth == pytest.approx((2**16 - 2**10) / 0.01)


@pytest.mark.parametrize(("slice_bytes", "sums"), [(2**10, 20), (2**21, 8), (2**26, 2)])
def test_what_the_call_costs_is_left_out_of_a_sum(slice_bytes, sums, monkeypatch):
  """Of so many sums; the others of the call cost the same each."""
  counts, shapes = [], []

  class Sums:
    def __init__(self, x, count):
      counts.append(count)
      self.outputs = [x]

  def function(impl, specs):
    shapes.append([d.size for d in specs[0].shape])
    return lambda program: lambda x: program(x)

  monkeypatch.setattr(measure, "_Sums", Sums)
  monkeypatch.setattr(measure, "function", function)
  monkeypatch.setattr(measure.tf, "zeros", lambda shape: {(0, 0): shapes.append(shape)})

  def seconds(run, repeats):
    run()
    return 5.0 + LATENCY * counts[-1]

  monkeypatch.setattr(measure, "_seconds", seconds)
  assert measure._sum_seconds(None, 2, slice_bytes, 3) == pytest.approx(LATENCY)
  assert counts == [1, 1 + sums]
  assert shapes == [[2, slice_bytes // 4]] * 4
  monkeypatch.setattr(measure, "_seconds", lambda run, repeats: 1.0)
  assert measure._sum_seconds(None, 2, slice_bytes, 3) == 1e-9 / sums


def test_the_first_call_is_not_counted_and_the_median_of_the_others_is(monkeypatch):
  times = iter([0.0, 9.0, 10.0, 12.0, 20.0, 21.0])
  monkeypatch.setattr(measure.time, "perf_counter", lambda: next(times))
  calls = []
  assert measure._seconds(lambda: calls.append(1) or 0.0, 3) == 2.0
  assert len(calls) == 4


def test_the_graph_optimizer_is_off_while_operations_are_timed():
  key = "disable_meta_optimizer"
  before = tf.config.optimizer.get_experimental_options()
  try:
    for was in (False, True):
      tf.config.optimizer.set_experimental_options({key: was})
      with measure._as_written():
        assert tf.config.optimizer.get_experimental_options()[key]
      assert tf.config.optimizer.get_experimental_options().get(key, False) == was
  finally:
    tf.config.optimizer.set_experimental_options({key: before.get(key, False)})
