import math

import pytest

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
