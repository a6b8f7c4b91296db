import math
import re

import numpy as np
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
RATE, BANDWIDTH, LAUNCH = 4e9, 2e9, 3e-6
SIZES = measure.Sizes((16, 64, 1024), (8,), 2**16, 7, (2**10, 2**16), 3)


@pytest.fixture
def clock(monkeypatch):
  """A machine whose times follow from what is run: `clock["seconds"](devices, shape, count)`."""
  chosen = {"runs": []}

  def on_each(devices, shape, dtype, step, count):
    chosen["runs"].append((len(devices), shape, dtype, count))
    chosen["step"] = step
    return chosen["seconds"](len(devices), shape, count)

  monkeypatch.setattr(measure, "_on_each", on_each)
  monkeypatch.setattr(measure, "median_seconds", lambda seconds, repeats: seconds)
  return chosen


def test_products_are_timed_often_enough_and_counted(clock):
  clock["seconds"] = lambda devices, shape, count: 3 * 2 * shape[0] ** 3 * count * devices / RATE
  rates = measure._product_rates("float32", ["CPU:0", "CPU:1"], SIZES)
  assert rates == {2.0 * n**3: pytest.approx(RATE) for n in SIZES.products}
  assert clock["runs"] == [
    (2, [16, 16], "float32", 20), (2, [64, 64], "float32", 20), (2, [1024, 1024], "float32", 1)
  ]  # fmt: skip


def test_a_product_is_followed_by_those_of_its_gradients(clock):
  clock["seconds"] = lambda *_: 1.0
  measure._product_rates("float32", ["CPU:0"], measure.Sizes((16,)))
  x, y = np.random.default_rng(0).standard_normal([2, 5, 5])
  # Of d = x y: d times y by columns, and y by columns times that.
  np.testing.assert_allclose(clock["step"](x, y), y.T @ ((x @ y) @ y.T), rtol=1e-9, atol=1e-9)


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
  # As many bytes on each, also where more share a host: its caches do not hold them all.
  assert clock["runs"][0][1] == [2**16 // 4]
  measure._memory_bandwidth(["CPU:0", "CPU:1"], measure.Sizes(memory=4))
  assert clock["runs"][1][1] == [1]


def test_launches_are_pairs_of_operations(clock):
  clock["seconds"] = lambda devices, shape, count: 2 * count * devices * LAUNCH
  assert measure._launch_seconds(["CPU:0", "CPU:1"], SIZES) == pytest.approx(LAUNCH)
  assert clock["runs"] == [(2, [4], "float32", 4)]  # Of seven, that are eight.


@pytest.mark.parametrize(("shared", "hosts"), [(False, None), (True, 1)])
@pytest.mark.parametrize(("devices", "axes"), [(2, [2]), (4, [2, 4])])
def test_a_link_is_of_sums_over_two_and_over_all(devices, axes, shared, hosts, monkeypatch):
  names = [f"CPU:{i}" for i in range(devices)]

  def implementation(shape, layout, devices):
    assert devices == names[: shape.size]
    return int(shape.size)

  monkeypatch.setattr(measure, "measured_link", lambda *args, **kwargs: (*args, kwargs))
  found = measure._link("some", implementation, names, SIZES, shared)
  assert found == ("some", "allreduce", axes, SIZES, {"hosts": hosts})


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


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--out", "machine.txt"], "--out=machine.txt: a machine is saved as .json"),
    (["--workers", "2", "--devices", "3"], "--workers=2 cannot share --devices=3 evenly"),
    (["--workers=-1"], "--workers=-1 cannot share"),
    (["--devices", "0"], "--devices=0: exchanges take at least 2"),
    (["--devices", "1"], "--devices=1: exchanges take at least 2"),
    (["--memory=-5"], "--memory=-5.0: give a number of bytes"),
    (["--memory", "nan"], "--memory=nan: give a number of bytes"),
    (["--out", "no such folder/machine.json"], "there is no folder no such folder"),
  ],
)
def test_wrong_arguments_are_told_before_anything_is_measured(arguments, message, capsys):
  with pytest.raises(SystemExit) as e:
    measure.main(arguments)
  assert e.value.code == 2
  assert message in capsys.readouterr().err


def test_workers_are_started_here_with_the_same_arguments(monkeypatch):
  started = []
  monkeypatch.setattr(
    measure, "launch", lambda command, workers: started.append((command, workers))
  )
  measure.main(["--workers", "2", "--devices", "4", "--quick"])
  ((_, *command), count) = started[0]
  assert count == 2
  assert command == [
    "-m", "mesh_tensorflow.planning.measure",
    "--workers", "2", "--devices", "4", "--quick", "--workers=0",
  ]  # fmt: skip


def test_the_help_names_a_setting_that_is_there(capsys, repository):
  with pytest.raises(SystemExit):
    measure.main(["--help"])
  text = " ".join(capsys.readouterr().out.split())
  (name,) = re.findall(r"as (\S+) by the trainer", text)
  assert f"| `{name}` |" in (repository / "docs" / "settings.md").read_text()
