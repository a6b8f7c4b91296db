import json

import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import ConfigError, MeshShapeError
from mesh_tensorflow.planning import Machine, shipped_machines
from mesh_tensorflow.planning.cost_model import exchange_seconds
from mesh_tensorflow.planning.machine import _warn_once, convert_to_machine

SHIPPED = {"tpu-v2", "tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p", "a100", "a100-fused", "h100", "cpu"}


BETWEEN = {
  "name": "net",
  "topology": "switch",
  "bandwidth": 1e8,
  "latency": 1e-3,
  "kinds": {"alltoall": {"bandwidth": 5e7, "latency": 2e-3}},
}
NEAR = {"name": "near", "devices": None, "topology": "switch", "bandwidth": 1e10, "latency": 1e-6}


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
    ({"workers": 2}, "workers must be an object with fields, got 2"),
    ({"workers": {"count": 2}}, "field workers.link is missing"),
    ({"workers": {"speed": 2}}, "field workers.speed is unknown; there are link, count, hosts"),
    ({"workers": {"link": BETWEEN, "count": 1}}, "workers.count must be a whole number of at"),
    ({"workers": {"link": BETWEEN, "hosts": 0.5}}, "workers.hosts must be a whole number of at"),
    ({"workers": {"link": {**BETWEEN, "devices": 2}}}, "workers.link.devices must be null: it"),
    ({"workers": {"link": {"name": "x", "topology": "switch"}}}, "link.bandwidth is missing"),
    ({"workers": {"link": BETWEEN}, "spread": 1}, "field spread must be true or false, got 1"),
    ({"links__0__kinds": {"gather": {}}}, r"links\[0\].kinds.gather is unknown; there are allr"),
    ({"links__0__kinds": {"alltoall": {"latency": 0}}}, "kinds.alltoall.bandwidth is missing"),
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


def test_groups_that_lie_in_two_nodes_take_the_link_between_nodes():
  machine = Machine.from_dict(fields())
  names = [machine.link(mtf.convert_to_shape("a:4,b:3"), axis).name for axis in range(2)]
  assert names == ["far", "far"]  # Of nodes of four: 0 to 2, but 3 to 5, ...
  assert machine.link(mtf.convert_to_shape("b:3"), 0).name == "near"  # One node.


# ------------------------------------------------------------------------ several workers
MESH = mtf.convert_to_shape("a:2,b:2,c:2")


def over(count=2, devices=8, hosts=1, **changes):
  return Machine.from_dict(fields(**changes)).over_workers(count, devices, hosts)


@pytest.fixture
def warnings(caplog):
  _warn_once.cache_clear()
  caplog.set_level("WARNING", "mesh_tensorflow")
  yield caplog
  _warn_once.cache_clear()


def test_axes_across_workers_take_the_link_between_them(warnings):
  measured = {"links": [NEAR], "workers": {"link": BETWEEN, "count": 2}}
  for workers, names in ((2, ["net", "near", "near"]), (4, ["net", "net", "near"])):
    machine = over(workers, **measured)
    assert [machine.link(MESH, axis).name for axis in range(3)] == names
    assert machine.name == f"round, {workers} workers"
  assert over(1, **measured).link(MESH, 0).name == "near"
  # Two of three devices in a row are of two workers.
  machine = over(2, 6, **measured)
  assert machine.link(mtf.convert_to_shape("a:3,b:2"), 1).name == "net"
  assert not warnings.messages


def test_a_kind_of_exchange_may_have_a_speed_of_its_own():
  machine = over(links=[NEAR], workers={"link": BETWEEN})
  (sums,) = exchange_seconds("allreduce", {0: 10**6}, machine, MESH)
  (swaps,) = exchange_seconds("alltoall", {0: 10**6}, machine, MESH)
  assert (sums.latency, sums.transfer) == pytest.approx((2 * 1e-3, 1e6 / 1e8))
  assert (swaps.latency, swaps.transfer) == pytest.approx((2e-3, 1e6 / 5e7))
  (inside,) = exchange_seconds("alltoall", {1: 10**6}, machine, MESH)
  assert inside.transfer == pytest.approx(1e6 / 1e10)


def test_what_simd_measured_is_what_counts_inside_of_workers():
  variants = {"simd": {"links": [{**NEAR, "name": "queues"}]}}
  machine = over(links=[NEAR], variants=variants, workers={"link": BETWEEN})
  assert [link.name for link in machine.links] == ["queues", "net"]
  assert machine.variant("placement") == machine.over_workers(4, 8) == machine


def test_each_host_has_what_its_devices_share():
  """Two hosts are taken for one that does twice as much, as are the devices of one."""
  one = over(links=[NEAR], workers={"link": BETWEEN, "hosts": 2}, shared=True)
  two = over(links=[NEAR], workers={"link": BETWEEN, "hosts": 2}, shared=True, hosts=2)
  assert two.device.peak("float32") == 2 * one.device.peak("float32")
  assert two.device.memory_bandwidth == 2 * one.device.memory_bandwidth
  assert two.device.launch_seconds == one.device.launch_seconds / 2
  assert two.memory_of_each(8) == 2 * one.memory_of_each(8)
  for kind in ("allreduce", "alltoall"):
    for axis in (0, 1):
      before, after = (exchange_seconds(kind, {axis: 999}, m, MESH)[0] for m in (one, two))
      assert after.seconds == pytest.approx(before.seconds / 2)
  # Devices that do not share a host have each their own, wherever they are.
  alone = over(links=[NEAR], workers={"link": BETWEEN, "hosts": 2}, hosts=2)
  assert alone.device == Machine.from_dict(fields()).device


def test_what_is_assumed_of_workers_is_said_once(warnings):
  for _ in range(2):
    machine = over(links=[NEAR])
  assert [link.name for link in machine.links] == ["near", "near"]
  assert machine.name == "round, 2 workers (their link is assumed)"
  assert machine.sources["workers"].startswith("assumed: the exchange between workers was not")
  (text,) = warnings.messages
  assert "planning.measure --workers 2" in text
  over(links=[NEAR], workers={"link": BETWEEN}, hosts=2)
  assert "was measured on one host, and these are on 2 hosts" in warnings.messages[1]


def test_nodes_have_links_between_them_already(warnings):
  assert [link.devices for link in over().links] == [4, None]
  assert [link.devices for link in over(2, 4, 2).links] == [2, None]  # Hosts of two devices.
  assert [link.name for link in over(2, 4, 2).links] == ["near", "far"]
  assert not warnings.messages


def test_a_machine_of_workers_is_saved_and_loaded(tmp_path):
  path = str(tmp_path / "machine.json")
  for machine in (
    Machine.from_dict(fields(links=[NEAR], workers={"link": BETWEEN, "count": 3, "hosts": 3})),
    over(links=[NEAR], workers={"link": BETWEEN}),
  ):
    machine.save(path)
    assert Machine.load(path) == machine
  with pytest.raises(MeshShapeError, match="7 devices on one host cannot be shared evenly by 2"):
    over(2, 7)
