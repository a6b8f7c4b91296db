import json

import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.planning import Machine, shipped_machines
from mesh_tensorflow.planning.machine import convert_to_machine

SHIPPED = {"tpu-v2", "tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p", "a100", "h100", "cpu"}


def fields(**changes):
  """The fields of a machine of round figures, with changes by path ("device.memory")."""
  made = {
    "name": "round",
    "device": {
      "flops": {"float32": 1e12, "bfloat16": 4e12},
      "efficiency": [[1e6, 0.25], [1e8, 0.75]],
      "memory": 1e9,
      "memory_bandwidth": 1e11,
      "launch_seconds": 1e-6,
    },
    "links": [
      {"name": "near", "devices": 4, "topology": "switch", "bandwidth": 1e10, "latency": 1e-6},
      {"name": "far", "devices": None, "topology": "torus", "bandwidth": 1e9, "latency": 1e-5},
    ],
  }
  for path, value in changes.items():
    *parents, key = path.split("__")
    place = made
    for parent in parents:
      place = place[int(parent) if parent.isdigit() else parent]
    if value is KeyError:
      del place[key]
    else:
      place[key] = value
  return made


def test_mtf_has_the_name():
  assert mtf.planning.Machine is Machine


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_shipped_machines_load_and_say_where_their_figures_come_from(name, tmp_path):
  assert set(shipped_machines()) == SHIPPED
  machine = Machine.load(name)
  path = str(tmp_path / "copy.json")
  machine.save(path)
  assert Machine.load(path) == machine
  for field in ("device", "links"):
    assert any(key.startswith(field) for key in machine.sources)


@pytest.mark.parametrize("name", sorted(SHIPPED - {"cpu"}))
def test_shipped_machines_have_a_source_for_each_figure(name):
  machine = Machine.load(name)
  figures = ("flops", "efficiency", "memory", "memory_bandwidth", "launch_seconds")
  wanted = {f"device.{f}" for f in figures} | {"links.bandwidth", "links.latency", "links.overlap"}
  assert wanted <= set(machine.sources)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"name": KeyError}, r"machine file .*: field name is missing"),
    ({"device": KeyError}, "field device is missing"),
    ({"device": 3}, "device must be an object with fields, got 3"),
    ({"device__memory": KeyError}, "field device.memory is missing"),
    ({"device__memory": "8 GB"}, "field device.memory must be a number, got '8 GB'"),
    ({"device__memory": 0}, "field device.memory must be a number above 0, got 0"),
    ({"device__memory": True}, "field device.memory must be a number, got True"),
    ({"device__launch_seconds": -1}, "field device.launch_seconds must be at least 0, got -1"),
    ({"device__launch_seconds": KeyError}, "field device.launch_seconds is missing"),
    ({"device__operations_per_kernel": 0.5}, "must be at least 1, got 0.5"),
    ({"device__convolution": 0}, "must be a number above 0, got 0"),
    ({"device__convolution": [[8, 0.5], [4, 0.6]]}, "must be a number, or a list of .channels"),
    ({"device__flops": {}}, "field device.flops must be an object from dtype to FLOP/s"),
    ({"device__flops__float33": 1e9}, "field device.flops.float33: there is no such dtype"),
    ({"device__efficiency": [[1e6, 0.9], [1e8, 0.8]]}, "field device.efficiency must be a list"),
    ({"device__efficiency": 1}, "field device.efficiency must be a list"),
    ({"device__colour": 1}, "field device.colour is unknown; there are flops, efficiency"),
    ({"colour": 1}, "field colour is unknown"),
    ({"links": []}, "field links must be a list with at least one object"),
    ({"links__0__bandwidth": KeyError}, r"field links\[0\].bandwidth is missing"),
    ({"links__0__devices": "all"}, r"field links\[0\].devices must be a whole number, or null"),
    ({"links__0__topology": "ring"}, r"links\[0\].topology must be one of switch, torus"),
    ({"links__1__devices": 4}, r"links\[1\].devices must be more than those of the link before"),
    ({"links__1__devices": 8}, "the last link must join all devices"),
    ({"links__1__overlap": 2}, r"links\[1\].overlap must be a number from 0 to 1, got 2"),
    ({"shared": "no"}, "field shared must be true or false, got 'no'"),
    ({"variants": {"simd": {"speed": 1}}}, "field variants.simd.speed is unknown"),
    ({"sources": {"device": 1}}, "field sources.device must be a text, got 1"),
  ],
)
def test_each_wrong_field_is_one_error(tmp_path, changes, message):
  path = tmp_path / "machine.json"
  path.write_text(json.dumps(fields(**changes)))
  with pytest.raises(ConfigError, match=message):
    Machine.load(str(path))


def test_files_that_are_none(tmp_path):
  with pytest.raises(ConfigError, match="there is no machine 'tpu-v22'; did you mean 'tpu-v2'"):
    Machine.load("tpu-v22")
  with pytest.raises(ConfigError, match="machine file .*: No such file"):
    Machine.load(str(tmp_path / "x.json"))
  path = tmp_path / "broken.json"
  path.write_text("{")
  with pytest.raises(ConfigError, match="is no JSON"):
    Machine.load(str(path))
  path.write_text("[]")
  with pytest.raises(ConfigError, match=r"must be an object with fields, got \[\]"):
    Machine.load(str(path))
  with pytest.raises(ConfigError, match=r"saved as \.json"):
    Machine.load("cpu").save("machine.txt")
  with pytest.raises(ConfigError, match=r"must be an mtf\.planning\.Machine.*got 3"):
    convert_to_machine(3)


def test_small_products_reach_less_of_the_peak():
  device = Machine.from_dict(fields()).device
  assert device.rate("float32", 1) == 0.25e12
  assert device.rate("float32", 1e7) == pytest.approx(0.5e12)
  assert device.rate("float32", 1e12) == 0.75e12
  assert device.rate("bfloat16", 1e12) == 3e12
  assert device.rate("int32", 1e12) == 0.75e12  # Of a dtype without a figure: the slowest.


def test_a_mesh_axis_takes_the_smallest_link_that_joins_its_devices():
  machine = Machine.from_dict(fields())
  shape = mtf.Shape([mtf.Dimension("a", 3), mtf.Dimension("b", 2), mtf.Dimension("c", 2)])
  assert [machine.link(shape, axis).name for axis in range(3)] == ["far", "near", "near"]


def test_variants_by_mesh_implementation():
  links = [{"name": "x", "devices": None, "topology": "switch", "bandwidth": 5.0, "latency": 0}]
  machine = Machine.from_dict(fields(variants={"simd": {"links": links}}))
  assert machine.variant("simd").links[0].bandwidth == 5
  assert machine.variant("simd").device == machine.device
  assert machine.variant("placement") == machine.variant(None) == machine
  assert Machine.from_dict(json.loads(json.dumps(machine.to_dict()))) == machine
