"""Programs that are planned for several workers take the link between them."""

from __future__ import annotations

import json

import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.planning import Machine
from mesh_tensorflow.planning.cost_model import exchange_seconds
from tests.planning.test_machine import BETWEEN, NEAR, fields

MACHINE = Machine.from_dict(fields(links=[NEAR], workers={"link": BETWEEN}))
MESH = mtf.convert_to_shape("a:2,b:2")
ROWS, COLS = mtf.Dimension("rows", 8), mtf.Dimension("cols", 16)


def cluster(monkeypatch, *addresses):
  config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": 0}}
  monkeypatch.setenv("TF_CONFIG", json.dumps(config))


@pytest.fixture
def two_workers(monkeypatch):
  cluster(monkeypatch, "one:1", "one:2")


def graph():
  """A program that sums over whatever its dimensions are split over."""
  made = mtf.Graph()
  mesh = mtf.Mesh(made, "mesh")
  x = mtf.ones(mesh, mtf.Shape([ROWS, COLS]))
  mtf.reduce_sum(mtf.reduce_sum(x, reduced_dim=ROWS), reduced_dim=COLS)
  return made


def function(impl):
  @mtf.function(impl, [mtf.TensorSpec([ROWS, COLS])])
  def step(x):
    return mtf.reduce_sum(x)

  return step


def test_a_graph_is_described_for_the_workers_of_tf_config(two_workers):
  seconds = {}
  for axis in "ab":
    report = mtf.describe(graph(), f"rows:{axis}", MESH, machine=MACHINE)
    assert report.machine.name == "round, 2 workers"
    assert "round, 2 workers" in str(report)
    seconds[axis] = report.to_dict()["time"]["parts"][f"allreduce over {axis}"]
  spread = MACHINE.over_workers(2, 4)
  for axis, name in enumerate("ab"):
    (one,) = exchange_seconds("allreduce", {axis: 4 * COLS.size}, spread, MESH)
    assert seconds[name] == pytest.approx(one.seconds)
  assert seconds["a"] > 100 * seconds["b"]


def test_of_one_process_and_of_a_mesh_that_workers_cannot_share_nothing_changes(
  monkeypatch, cpu_devices
):
  alone = mtf.describe(graph(), "rows:a", MESH, machine=MACHINE)
  assert alone.machine == MACHINE
  cluster(monkeypatch, "one:1", "one:2", "one:3")
  assert mtf.describe(graph(), "rows:a", MESH, machine=MACHINE).seconds == alone.seconds
  # Their devices are of this process, whatever TF_CONFIG says.
  cluster(monkeypatch, "one:1", "one:2")
  for impl in (mtf.PlacementMeshImpl, mtf.SimdMeshImpl):
    step = function(impl(MESH, "rows:a", devices=cpu_devices[:4]))
    assert mtf.describe(step, machine=MACHINE).machine == MACHINE


def test_a_mesh_that_spans_workers_has_theirs(two_workers, monkeypatch, cpu_devices):
  impl = mtf.SimdMeshImpl(MESH, "rows:a", devices=cpu_devices[:4])
  monkeypatch.setattr(mtf.SimdMeshImpl, "spans_workers", True)
  report = mtf.describe(function(impl), machine=MACHINE)
  assert [link.name for link in report.machine.links] == ["near", "net"]


def test_the_hosts_are_those_of_the_addresses(monkeypatch):
  cluster(monkeypatch, "one:1", "two:1")
  shared = Machine.from_dict(
    fields(links=[NEAR], workers={"link": BETWEEN, "hosts": 2}, shared=True)
  )
  report = mtf.describe(graph(), "rows:a", MESH, machine=shared)
  assert report.machine.device.memory == 2 * shared.device.memory
  monkeypatch.setenv("TF_CONFIG", "{")
  with pytest.raises(ConfigError, match="TF_CONFIG is no JSON"):
    mtf.describe(graph(), "rows:a", MESH, machine=shared)


def test_the_layout_that_is_found_keeps_off_a_slow_link(two_workers, monkeypatch):
  """Half of the product takes less than the link between devices, not than that of workers."""
  made = mtf.Graph()
  mesh = mtf.Mesh(made, "mesh")
  rows, d, columns = (mtf.Dimension(*x) for x in (("rows", 2048), ("d", 512), ("columns", 512)))
  x, w = mtf.ones(mesh, mtf.Shape([rows, d])), mtf.ones(mesh, mtf.Shape([d, columns]))
  mtf.reduce_sum(mtf.einsum([x, w], output_shape=[rows, columns]))
  choice = mtf.auto_layout(made, mesh_shape=MESH, machine=MACHINE)
  assert choice.machine == MACHINE.over_workers(2, 4)
  assert {m for _, m in choice.layout.pairs} == {"b"}
  # A machine that was found is taken as it is.
  report = mtf.describe(made, choice.layout, MESH, machine=choice.machine)
  assert report.machine == choice.machine
  assert report.seconds == pytest.approx(choice.seconds)
  monkeypatch.delenv("TF_CONFIG")
  alone = mtf.auto_layout(made, mesh_shape=MESH, machine=MACHINE)
  assert {m for _, m in alone.layout.pairs} == {"a", "b"}
