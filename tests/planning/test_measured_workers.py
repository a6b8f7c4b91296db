"""Measuring as several workers, and what is predicted over them with what they have found."""

from __future__ import annotations

import math

import pytest

from mesh_tensorflow.planning import Machine, measure
from mesh_tensorflow.planning.machine import KINDS
from tests import worker_group

COMMAND = ["-m", "mesh_tensorflow.planning.measure", "--quick", "--memory", "1e9"]


@pytest.mark.subprocess
@pytest.mark.slow
def test_workers_measure_what_they_exchange_and_the_first_one_writes_it(tmp_path):
  path = str(tmp_path / "here.json")
  codes, texts = worker_group.run(2, [*COMMAND, "--devices", "2", "--out", path], 300)
  assert codes == [0, 0], "\n".join(texts)
  assert "exchange between 2 workers on one host" in texts[0] and path in texts[0]
  assert "exchange" not in texts[1]
  machine = Machine.load(path)
  assert (machine.workers.count, machine.workers.hosts) == (2, 1)
  # Two devices in a worker, to have what they exchange as well.
  assert machine.shared and set(machine.variants) == {"placement", "simd"}
  speeds = [machine.workers.link.speed(kind) for kind in KINDS]
  assert set(machine.workers.link.kinds) == set(KINDS) - {"allreduce"}
  assert all(math.isfinite(x) and x > 0 for s in speeds for x in (s.bandwidth, s.latency))
  spread = machine.over_workers(2, 4)
  assert [link.devices for link in spread.links] == [2, None]


@pytest.mark.subprocess
def test_an_error_of_workers_is_one_line_and_an_exit_code(tmp_path):
  path = str(tmp_path / "here.json")
  codes, texts = worker_group.run(2, [*COMMAND, "--devices", "3", "--out", path], 120)
  assert codes == [2, 2]
  for text in texts:
    assert "error: a mesh of 3 processors cannot be shared by 2 workers" in text
    assert "Traceback" not in text


def test_a_worker_has_two_cpu_devices_to_measure(monkeypatch):
  monkeypatch.setattr(measure, "local_devices", lambda kind: [f"{kind}:{i}" for i in "0123"])
  assert measure._own_devices(["/device:CPU:0"]) == ["CPU:0", "CPU:1"]
  assert measure._own_devices([f"/device:GPU:{i}" for i in "012"]) == [
    "GPU:0", "GPU:1", "GPU:2"
  ]  # fmt: skip
