"""Several worker processes: TF_CONFIG, and one mesh over all of them."""

from __future__ import annotations

import functools
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from mesh_tensorflow import errors, workers


def config(cluster, kind="worker", index=0):
  return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def test_no_tf_config_is_one_worker():
  for environ in ({}, {"TF_CONFIG": ""}, {"TF_CONFIG": "{}"}):
    cluster = workers.cluster_from_environment(environ)
    assert (cluster.size, cluster.index, cluster.is_chief) == (1, 0, True)


def test_chief_comes_first():
  jobs = {"worker": ["b:1", "c:1"], "chief": ["a:1"]}
  cluster = workers.cluster_from_environment(config(jobs, "worker", 1))
  assert [address for _, _, address in cluster.tasks] == ["a:1", "b:1", "c:1"]
  assert cluster.index == 2
  assert not cluster.is_chief
  assert cluster.name(2) == "worker 2 (c:1)"
  assert cluster.devices(6)[1:4] == [
    "/job:chief/replica:0/task:0/device:CPU:1",
    "/job:worker/replica:0/task:0/device:CPU:0",
    "/job:worker/replica:0/task:0/device:CPU:1",
  ]


def test_devices_are_shared_evenly():
  cluster = workers.cluster_from_environment(config({"worker": ["a:1", "b:1", "c:1"]}))
  with pytest.raises(errors.MeshShapeError, match="mesh of 4 processors .* by 3 workers"):
    cluster.devices(4)


@pytest.mark.parametrize(
  ("environ", "words"),
  [
    ({"TF_CONFIG": "{"}, "is no JSON"),
    ({"TF_CONFIG": "[1]"}, "has no 'cluster'"),
    (config({"worker": ["a:1"], "ps": ["b:1"]}), r"has the job\(s\) ps"),
    (config({"worker": "a:1"}), "no list of addresses for the job 'worker'"),
    (config({"worker": ["a"]}), "address 'a', which is not host:port"),
    (config({"worker": ["a:1", "a:1"]}), "one address twice"),
    (config({"worker": ["a:1", "b:1"]}, index=2), "this process is worker 2, which is not in"),
    (config({"worker": ["a:1", "b:1"]}, "chief"), "this process is chief 0, which is not in"),
  ],
)
def test_wrong_tf_config(environ, words):
  with pytest.raises(errors.ConfigError, match=words) as e:
    workers.cluster_from_environment(environ)
  assert environ["TF_CONFIG"] in str(e.value)
  assert '"cluster": {"worker": ["host0:port"' in str(e.value)


def test_one_process_agrees_with_itself():
  assert workers.join() == workers.Cluster()
  assert workers.any_worker(True)
  assert not workers.any_worker(False)
  assert workers.gather([3, 4]).tolist() == [[3, 4]]


@functools.cache
def train(count, mesh_shape, layout):
  """What worker 0 of so many workers printed."""
  program = pathlib.Path(__file__).with_name("workers_program.py")
  run = subprocess.run(
    [sys.executable, "-c", LAUNCH, str(count), str(program), mesh_shape, layout],
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert run.returncode == 0, run.stdout + run.stderr
  return json.loads(run.stdout.splitlines()[-1])


LAUNCH = """
import sys
from mesh_tensorflow.transformer.launch import launch
sys.exit(launch([sys.executable, *sys.argv[2:]], int(sys.argv[1])))
"""


@pytest.mark.parametrize(
  ("count", "mesh_shape", "layout", "seen"),
  [
    (2, "batch:2,model:2", "batch:batch,d_ff:model,vocab:model", [[16, 2], [16, 2]]),
    (2, "model:2,batch:2", "batch:batch,d_ff:model,vocab:model", [[32, 2], [32, 2]]),
    (3, "rows:3", "vocab:rows", [[32, 1]] * 3),
  ],
)
def test_the_mesh_may_span_workers(count, mesh_shape, layout, seen):
  one = train(1, "", "")
  several = train(count, mesh_shape, layout)
  assert several["seen"] == seen  # Each worker is given the part of the batch that it needs.
  np.testing.assert_allclose(several["losses"], one["losses"], rtol=1e-5)
  np.testing.assert_allclose(several["logits"], one["logits"], rtol=1e-4, atol=1e-5)
  assert one["losses"][-1] < one["losses"][0]
