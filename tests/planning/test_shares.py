"""Shares for devices of unequal speed: the proposal, and the prediction beside the equal split."""

import dataclasses
import itertools
import math
import random
import re

import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import ArgumentError, ConfigError, LayoutError
from mesh_tensorflow.planning import Machine, Speed, best_shares, measure, propose_shares
from mesh_tensorflow.planning.machine import convert_to_machine
from mesh_tensorflow.planning.shares import best_division, relative_time
from tests.planning.test_machine import fields


def machine(*speeds, **changes):
  made = fields(**changes)
  made["links"] = made["links"][:1]
  made["links"][0] |= {"devices": None, "bandwidth": 1e13, "latency": 0.0}
  # Products alone take time, of all sizes alike.
  alone = {"launch_seconds": 0.0, "memory_bandwidth": 1e16, "efficiency": [[1e6, 0.5]]}
  made["device"] |= alone
  return dataclasses.replace(Machine.from_dict(made), speeds=speeds)


def step_of(impl, batch=96, width=512):
  @mtf.function(impl, [mtf.TensorSpec([("batch", batch), ("width", width)])])
  def step(x):
    w = mtf.get_variable(x.mesh, "w", [x.shape.dims[1], mtf.Dimension("out", width)])
    y = mtf.einsum([x, w], reduced_dims=[x.shape.dims[1]])
    loss = mtf.reduce_mean(mtf.square(y))
    mtf.optimize.SgdOptimizer(0.1).minimize(loss)
    return loss

  return step


# ------------------------------------------------------------------------ by speeds alone


def all_divisions(count, processors):
  return [c for c in itertools.product(range(processors + 1), repeat=count) if sum(c) == processors]


@pytest.mark.parametrize("seed", range(8))
def test_no_division_of_so_many_processors_is_faster(seed):
  draw = random.Random(seed)
  speeds = [1.0, *(draw.uniform(0.05, 1.0) for _ in range(draw.randint(1, 3)))]
  for n in range(1, 9):
    least = min(relative_time(c, speeds) for c in all_divisions(len(speeds), n))
    assert relative_time(best_division(speeds, n), speeds) == pytest.approx(least)


@pytest.mark.parametrize("seed", range(12))
def test_the_proposal_is_nearly_the_best_and_takes_few_processors(seed):
  draw = random.Random(seed)
  speeds = [draw.choice([1.0, draw.uniform(0.1, 1.0)]) for _ in range(draw.randint(2, 3))]
  most = 10
  divisions = [c for n in range(1, most + 1) for c in all_divisions(len(speeds), n)]
  times = {c: relative_time(c, speeds) for c in divisions}
  least, equal = min(times.values()), (1,) * len(speeds)
  found = best_shares(speeds, most)
  if found == equal:
    assert times[equal] * 0.95 <= least
    return
  assert least < times[equal] * 0.95 and times[found] * 0.98 <= least
  fewer = [c for c in divisions if sum(c) < sum(found)]
  assert all(times[c] * 0.98 > least for c in fewer)


@pytest.mark.parametrize(
  ("speeds", "expected"),
  [
    ([3, 1], (3, 1)),
    ([1, 1 / 3], (3, 1)),
    ([1, 0.34], (3, 1)),
    ([0.5, 1.0, 0.5], (1, 2, 1)),
    ([1, 1, 0.5, 0.5], (2, 2, 1, 1)),
    ([1, 0.97], (1, 1)),
    ([7.0], (1,)),
    ([1, 0.01], (1, 0)),
  ],
)
def test_shares_by_speeds(speeds, expected):
  assert best_shares(speeds) == expected


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (([],), "speeds of devices are numbers above 0, got \\[\\]"),
    (([1.0, 0.0],), "numbers above 0"),
    (([1.0, math.inf],), "numbers above 0"),
    (([1.0, math.nan],), "numbers above 0"),
    (([1.0, 0.5, 0.5], 2), "most=2 processors cannot be shared by 3 devices"),
  ],
)
def test_wrong_speeds(arguments, message):
  with pytest.raises(ArgumentError, match=message):
    best_shares(*arguments)


# ------------------------------------------------------------------------ machines


def test_a_machine_file_has_the_speeds(tmp_path):
  made = machine(1.0, 0.5)
  made = dataclasses.replace(made, pairs=(Speed(1e9, 1e-6), Speed(1e8, 2e-6)))
  made.save(str(tmp_path / "m.json"))
  assert convert_to_machine(str(tmp_path / "m.json")) == made
  assert "speeds" not in machine().to_dict() and "pairs" not in machine().to_dict()


@pytest.mark.parametrize("speeds", [3, [], [0.5, 0], [1.5, 1], ["1", 1], [True, 1], {}])
def test_wrong_speeds_in_a_file(speeds):
  with pytest.raises(ConfigError, match="speeds must be a list of numbers above 0 and at most 1"):
    Machine.from_dict(fields(speeds=speeds))


@pytest.mark.parametrize(
  ("pairs", "message"),
  [
    (3, "pairs must be a list with at least one object"),
    ([{"bandwidth": 1e9}], r"pairs\[0\].latency is missing"),
    ([{"bandwidth": 0, "latency": 0}], r"pairs\[0\].bandwidth must be a number above 0"),
    ([{"bandwidth": 1, "latency": 0, "x": 1}], r"pairs\[0\].x is unknown"),
  ],
)
def test_wrong_pairs_in_a_file(pairs, message):
  with pytest.raises(ConfigError, match=message):
    Machine.from_dict(fields(pairs=pairs))


@pytest.mark.parametrize(
  ("speeds", "loads", "slower"),
  [
    ((), [1, 1], 1.0),
    ((), [3, 1], 3.0),
    ((1.0, 0.25), [1, 1], 4.0),
    ((1.0, 0.25), [3, 1], 4.0),
    ((1.0, 0.25), [8, 2], 8.0),
    ((1.0, 0.25), [1], 1.0),  # The first one alone.
    ((0.5, 1.0), [1], 2.0),
  ],
)
def test_the_most_loaded_device_counts(speeds, loads, slower):
  plain, made = machine(), machine(*speeds).with_loads(loads)
  assert made.device.peak("float32") == plain.device.peak("float32") / slower
  assert made.device.memory == plain.device.memory / max(loads)
  assert made.speeds == ()


@pytest.mark.parametrize(
  ("speeds", "loads", "slower"),
  [
    ((), [3, 1], 1.0),  # The host does all of it.
    ((1.0, 0.25), [1, 1], 2.0),
    ((1.0, 0.25), [3, 1], 1.0),
    ((0.5, 0.125), [3, 1], 2.0),  # None of them has all of the host.
  ],
)
def test_devices_that_share_a_host(speeds, loads, slower):
  made = machine(*speeds, shared=True).with_loads(loads)
  assert made.device.peak("float32") == machine().device.peak("float32") / slower
  assert made.device.memory == machine().device.memory


def test_a_mesh_that_leaves_out_a_slow_link_is_faster():
  made = dataclasses.replace(
    machine(), pairs=(Speed(8e9, 1e-6), Speed(1e9, 1e-6), Speed(2e9, 1e-6))
  )
  (link,) = machine().links
  assert [made.with_loads([1] * n).links[0].bandwidth / link.bandwidth for n in (1, 2, 3)] == [
    1.0,
    8.0,
    1.0,
  ]


def test_a_mesh_of_more_devices_than_were_measured(cpu_devices):
  step = step_of(mtf.PlacementMeshImpl("b:4", "batch:b", cpu_devices[:4]))
  with pytest.raises(ConfigError, match="says how fast 2 devices are, and the mesh has 4: measure"):
    mtf.describe(step, machine=machine(1.0, 0.5))


# ------------------------------------------------------------------------ of a program


def test_shares_are_proposed_and_shown_beside_the_equal_split(cpu_devices):
  step = step_of(mtf.PlacementMeshImpl("b:2", "batch:b", cpu_devices[:2]))
  found = propose_shares(step, machine(1.0, 1 / 3))
  assert found.proposed.parts == (3, 1) and found.shares == {"b": [3, 1]} and not found.left_out
  assert found.proposed.mesh_shape == mtf.convert_to_shape("b:4")
  assert found.equal.mesh_shape == mtf.convert_to_shape("b:2") and not found.is_equal
  # By speeds alone one half.
  assert 0.45 < found.proposed.seconds / found.equal.seconds < 0.6
  report = mtf.describe(step, machine=machine(1.0, 1 / 3))
  assert report.shares == found and report.to_dict()["shares"]["proposed"]["parts"] == [3, 1]
  assert report.seconds == pytest.approx(found.equal.seconds)
  text = str(report)
  assert "Devices along b have the speeds 1, 0.333: shares are predicted to take 0.5" in text
  assert re.search("proposed +3:1 +b:4", text) and re.search("equal split +1:1 +b:2", text)


def test_the_step_of_a_mesh_with_shares_is_the_one_that_was_predicted(cpu_devices):
  made = machine(1.0, 1 / 3)
  found = propose_shares(step_of(mtf.MeshImpl("b:2", "batch:b")), made)
  for kind, devices in ((mtf.PlacementMeshImpl, cpu_devices[:2]), (mtf.SimdMeshImpl, None)):
    impl = kind(found.proposed.mesh_shape, "batch:b", devices, shares=found.shares)
    report = mtf.describe(step_of(impl), machine=made)
    assert report.seconds == pytest.approx(found.proposed.seconds)
    assert report.shares == found
    assert report.processors_of_devices == [3, 1] == report.to_dict()["processors_of_devices"]
    assert "step on mesh b:4 (4 processors on 2 devices, 3:1), layout batch:b" in str(report)
    assert "Memory of one processor" in str(report) and report.to_dict()["devices"] == 2
  planned = mtf.MeshImpl("b:4", "batch:b", shares={"b": [3, 1]})
  assert mtf.describe(step_of(planned), machine=made).seconds == found.proposed.seconds


def test_shares_that_the_layout_cannot_have_are_not_proposed():
  # Of a batch of 9 there are no four parts, but three, and nine.
  found = propose_shares(step_of(mtf.MeshImpl("b:2", "batch:b"), batch=9), machine(1.0, 1 / 3))
  assert found.proposed.parts == (7, 2)
  assert [d.parts for d in found.others] == [(1, 0)]
  assert found.equal is None and not found.is_equal
  assert "the layout has no equal split" in str(found) and found.to_dict()["equal"] is None
  with pytest.raises(LayoutError, match="dimension batch:1 of .* cannot be split over mesh axis b"):
    propose_shares(step_of(mtf.MeshImpl("b:2", "batch:b"), batch=1), machine(0.4, 0.4))
  uneven = step_of(mtf.MeshImpl("b:2", "batch:b~"), batch=30)
  assert propose_shares(uneven, machine(1.0, 1 / 3)).proposed.parts == (3, 1)


def test_devices_that_are_equally_fast():
  step = step_of(mtf.MeshImpl("b:2", "batch:b"))
  found = propose_shares(step, machine(1.0, 0.98))
  assert found.is_equal and found.shares == {"b": [1, 1]}
  assert "no shares are predicted to gain" in str(found)
  assert mtf.describe(step, machine=machine()).shares is None


def test_a_device_that_is_of_no_use_is_left_out():
  step = step_of(mtf.MeshImpl("b:2", "batch:b"))
  found = propose_shares(step, machine(0.02, 1.0))
  assert found.proposed.parts == (0, 1) and found.left_out == [0] and found.shares == {"b": [1]}


def test_a_device_of_a_host_is_not_taken_alone_since_it_has_all_of_it():
  step = step_of(mtf.MeshImpl("b:2", "batch:b"))
  found = propose_shares(step, machine(1.0, 1 / 3, shared=True))
  assert found.proposed.parts == (3, 1)
  assert all(all(d.parts) for d in found.others)


@pytest.mark.parametrize(
  ("speeds", "dimension", "proposed"),
  [
    ((1.0, 1.0, 0.5, 0.5), "b", (2, 1)),
    ((1.0, 0.5, 1.0, 0.5), "o", (2, 1)),
    ((1.0, 0.9, 0.5, 0.45), "b", (2, 1)),  # Groups of devices: of each the slowest counts.
  ],
)
def test_the_dimension_along_which_devices_differ(speeds, dimension, proposed):
  step = step_of(mtf.MeshImpl("b:2,o:2", "batch:b,out:o"), batch=96, width=768)
  found = propose_shares(step, machine(*speeds))
  assert (found.dimension, found.proposed.parts) == (dimension, proposed)
  sizes = {m.name: m.size for m in found.proposed.mesh_shape}
  assert sizes == {"b": 2, "o": 2, dimension: 3}
  other = "b" if dimension == "o" else "o"
  assert propose_shares(step, machine(*speeds), dimension=other).is_equal


def test_a_report_of_a_mesh_without_a_choice():
  step = step_of(mtf.MeshImpl("b:2,o:2", "batch:b,out:o"))
  report = mtf.describe(step, machine=machine(1.0, 0.5, 0.5, 1.0, 1.0))
  assert report.shares is None and "Devices along" not in str(report)
  alone = mtf.describe(step_of(mtf.MeshImpl("", "")), machine=machine(1.0, 0.5))
  assert alone.shares is None and alone.seconds


def test_more_devices_than_processors_are_usual():
  speeds = [1.0] * 10 + [0.5] * 10
  step = step_of(mtf.MeshImpl("b:20", "batch:b"), batch=600)
  assert propose_shares(step, machine(*speeds)).is_equal
  found = propose_shares(step, machine(*speeds), most=30)
  assert found.proposed.parts == (2,) * 10 + (1,) * 10


def test_three_devices():
  step = step_of(mtf.MeshImpl("b:3", "batch:b"))
  assert propose_shares(step, machine(1.0, 0.5, 0.5)).proposed.parts == (2, 1, 1)
  assert propose_shares(step, machine(1.0, 0.5, 0.5), most=3).is_equal


def test_a_graph_and_a_layout(cpu_devices):
  del cpu_devices
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  x = mtf.zeros(mesh, "batch:12,d:512")
  y = mtf.einsum([x, mtf.zeros(mesh, "d:512,e:512")], "batch:12,e:512")
  found = propose_shares(graph, machine(1.0, 1 / 3), "batch:b", "b:2", results=[y])
  assert found.proposed.parts == (3, 1)
  with pytest.raises(ArgumentError, match="needs a layout and a mesh_shape"):
    propose_shares(graph, machine(1.0, 0.5), "batch:b")


@pytest.mark.parametrize(
  ("given", "arguments", "error", "message"),
  [
    (machine(), {}, ConfigError, "machine 'round' has no speeds of single devices"),
    (machine(1.0, 0.5, 0.5), {"dimension": "z"}, ArgumentError, "has no dimension 'z'; it has b"),
    (machine(1.0, 0.5, 0.5), {"most": 2}, ArgumentError, "most=2 processors cannot be shared by 3"),
    ("no such machine", {}, ConfigError, "there is no machine 'no such machine'"),
  ],
)
def test_wrong_arguments(given, arguments, error, message):
  with pytest.raises(error, match=message):
    propose_shares(step_of(mtf.MeshImpl("b:2", "batch:b")), given, **arguments)


def test_devices_that_make_no_mesh():
  step = step_of(mtf.MeshImpl("b:2,o:2", "batch:b,out:o"))
  with pytest.raises(ConfigError, match="how fast 3 devices are; they make no mesh b:2,o:2"):
    propose_shares(step, machine(1.0, 0.5, 0.5))


def test_a_pipeline_is_as_slow_as_its_slowest_device():
  first, second = (mtf.MeshImpl("b:2", "batch:b") for _ in range(2))
  pipeline = first.with_stages([second])

  def timed(*speeds):
    return mtf.describe(step_of(pipeline), machine=machine(*speeds)).seconds

  assert timed(1.0, 1.0, 1.0, 0.5) == pytest.approx(2 * timed(1.0, 1.0, 1.0, 1.0), rel=0.1)


# ------------------------------------------------------------------------ measured


def measured(monkeypatch, devices, seconds, shared):
  """A measured machine; `seconds` are those of products on a list of devices."""
  sizes = measure.Sizes((16, 64), (2,), 2**10, 2, (2**10, 2**12), 1)
  monkeypatch.setattr(
    measure, "_least_seconds", lambda groups, _: [seconds(list(g)) for g in groups]
  )
  return measure.measure(devices, sizes, 1e9, shared=shared)


def test_each_device_is_measured_alone(monkeypatch, cpu_devices):
  devices, slow = cpu_devices[:2], {cpu_devices[1]: 3.0}
  found = measured(monkeypatch, devices, lambda g: sum(slow.get(d, 1.0) for d in g), False)
  assert found.speeds == (1.0, pytest.approx(1 / 3)) and found.pairs == ()
  text = measure.report(found)
  assert "device 1               33.3 %" in text
  assert "shares 3:1 of a mesh dimension over them would take 0.50 of the equal split's" in text


def test_of_devices_that_share_a_host_each_has_a_part(monkeypatch, cpu_devices):
  """Two cores, a thread each: together they do twice as much as one alone."""
  devices, slow = cpu_devices[:2], {cpu_devices[1]: 3.0}
  found = measured(monkeypatch, devices, lambda g: max(slow.get(d, 1.0) for d in g), None)
  assert found.shared and found.speeds == (0.5, pytest.approx(0.5 / 3))
  assert "device 1               33.3 %" in measure.report(found)


def test_devices_that_are_nearly_equal_have_no_speeds(monkeypatch, cpu_devices):
  found = measured(
    monkeypatch, cpu_devices[:2], lambda g: 1.1 if g == cpu_devices[1:2] else 1.0, False
  )
  assert found.speeds == () and "one by one" not in measure.report(found)


@pytest.mark.parametrize(("slow", "kept"), [(0.1, True), (0.8, False)])
def test_links_that_are_unequal_are_kept(slow, kept, monkeypatch, cpu_devices):
  asked = []

  def speed(kind, impl, sizes, hosts):
    asked.append(impl.devices)
    return Speed(slow if impl.devices[1] == cpu_devices[2] else 1.0, 0.5)

  monkeypatch.setattr(measure, "_speed", speed)
  found = measure._unequal_links(cpu_devices[:3], measure.Sizes(), False)
  a, b, c = cpu_devices[:3]
  assert asked == [[a, b], [b, c], [c, a]]
  assert found == ((Speed(1.0, 0.5), Speed(slow, 0.5), Speed(1.0, 0.5)) if kept else ())
  if kept:
    told = measure.report(dataclasses.replace(machine(), pairs=found))
    assert "exchange of each device and the next" in told and told.count("    device ") == 3


def test_measuring_devices_one_by_one(cpu_devices):
  sizes = measure.Sizes((16, 32), (2,), 2**10, 2, (2**10, 2**12), 1)
  found = measure.device_speeds(cpu_devices[:3], sizes)
  assert len(found) == 3 and max(found) == 1.0 and all(0 < s <= 1 for s in found)
  links = measure.link_speeds(cpu_devices[:3], sizes, True)
  assert len(links) == 3 and all(x.bandwidth > 0 for x in links)
