import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.planning import measure
from mesh_tensorflow.planning.machine import KINDS
from mesh_tensorflow.planning.measure import Sizes
from mesh_tensorflow.planning.mesh_impl import PlanMeshImpl

BANDWIDTH, LATENCY = 2e9, 1e-5
SIZES = Sizes(exchanges=(2**10, 2**16), repeats=3)
# Bytes sent of each byte of a slice, and messages one after the other, by the size of the axis.
SENT = {
  "allreduce": {2: 1, 4: 1.5},
  "reduce_scatter": {2: 0.5, 4: 0.75},
  "allconcat": {2: 1, 4: 3},
  "alltoall": {2: 0.5, 4: 0.75},
  "receive": {2: 1, 4: 1},
}
MESSAGES = {k: {2: 1, 4: 2} for k in KINDS} | {"allreduce": {2: 2, 4: 4}, "receive": {2: 1, 4: 1}}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hosts", [None, 1, 2])
def test_latency_and_bandwidth_of_a_link_follow_from_exchanges(kind, hosts, monkeypatch):
  """Of devices that share a host each takes its time; `hosts` of them work side by side."""
  asked = []

  def exchange_time(kind, impl, slice_bytes, repeats):
    n = impl.shape[0].size
    asked.append((n, slice_bytes, repeats))
    sent = SENT[kind][n] * (slice_bytes - 2**10)
    share = impl.shape.size / hosts if hosts else 1
    return (LATENCY * MESSAGES[kind][n] + sent / BANDWIDTH) * share

  monkeypatch.setattr(measure, "exchange_time", exchange_time)
  impls = [PlanMeshImpl(shape, "") for shape in ("a:2,b:3", "a:4")]
  link = measure.measured_link("some", kind, impls, SIZES, hosts)
  assert (link.name, link.devices, link.topology) == ("some", None, "switch")
  assert link.latency == pytest.approx(LATENCY)
  assert link.bandwidth == pytest.approx(BANDWIDTH)
  assert asked == [(n, s, 3) for n in (2, 4) for s in SIZES.exchanges]


def test_a_large_exchange_that_was_disturbed_less_has_a_bandwidth_all_the_same(monkeypatch):
  monkeypatch.setattr(measure, "exchange_time", lambda *_: 1.0)
  impl = PlanMeshImpl("a:2", "")
  link = measure.measured_link("some", "allreduce", [impl], SIZES, None)
  assert link.bandwidth == pytest.approx((2**16 - 2**10) / 0.01)


@pytest.mark.parametrize(("slice_bytes", "exchanges"), [(2**10, 20), (2**21, 8), (2**26, 2)])
def test_what_the_call_costs_is_left_out_of_an_exchange(slice_bytes, exchanges, monkeypatch):
  """The median counts, and a call that was disturbed does not."""
  monkeypatch.setattr(measure, "_call", lambda kind, impl, size, count: count)
  calls = []

  def seconds(count):
    calls.append(count)
    return 5 * LATENCY + LATENCY * count + (7.0 if len(calls) == 3 else 0.0)

  monkeypatch.setattr(measure, "_seconds", seconds)
  found = measure.exchange_time("allreduce", None, slice_bytes, 3)
  assert found == pytest.approx(LATENCY)
  assert calls == [1, 1 + exchanges] * 3
  monkeypatch.setattr(measure, "_seconds", lambda count: 1.0)
  found = measure.exchange_time("allreduce", None, slice_bytes, 3)
  # Not free: the link of a machine that was measured in a hurry would have millions of GB/s.
  assert found == pytest.approx(0.02 / exchanges)


def test_the_first_call_is_not_counted_and_the_median_of_the_others_is(monkeypatch):
  times = iter([0.0, 9.0, 10.0, 12.0, 20.0, 21.0])
  monkeypatch.setattr(measure.time, "perf_counter", lambda: next(times))
  calls = []
  assert measure.median_seconds(lambda: calls.append(1) or 0.0, 3) == 2.0
  assert len(calls) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_exchange_runs(kind, cpu_devices):
  impl = mtf.PlacementMeshImpl("a:2,b:2", "", cpu_devices[:4])
  assert float(measure._call(kind, impl, 2**10, 3)()) == 0.0
