"""Several worker processes: TF_CONFIG, and one mesh over all of them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import socket

import numpy as np
import pytest

from mesh_tensorflow import errors, workers
from tests import fork_server, ports, worker_group


def config(cluster, kind="worker", index=0):
  return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def test_no_tf_config_is_one_worker():
  environs = [{"TF_CONFIG": text} for text in ("", " ", "{}", '{"cluster": {}}')]
  for environ in ({}, *environs, config({}), config({"worker": ["a:1"]})):
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


def test_an_evaluator_is_alone():
  jobs = {"chief": ["a:1"], "worker": ["b:1"], "evaluator": ["c:1"]}
  cluster = workers.cluster_from_environment(config(jobs, "evaluator"))
  assert (cluster.size, cluster.is_chief, cluster.is_evaluator) == (1, True, True)
  # Where it is not listed, too, as some cluster managers have it; and it is no worker to others.
  del jobs["evaluator"]
  assert workers.cluster_from_environment(config(jobs, "evaluator")) == cluster
  jobs["evaluator"] = ["c:1"]
  cluster = workers.cluster_from_environment(config(jobs, "worker"))
  assert (cluster.size, cluster.index, cluster.is_evaluator) == (2, 1, False)


def test_an_index_may_be_a_text():
  jobs = {"worker": ["a:1", "[::1]:2"]}
  cluster = workers.cluster_from_environment(config(jobs, index="1"))
  assert (cluster.index, cluster.address(1)) == (1, ("::1", 2))


def test_workers_of_one_host():
  cluster = workers.cluster_from_environment(config({"worker": ["a:1", "b:1", "a:2"]}))
  assert (cluster.hosts, cluster.size_of_host) == (2, 2)
  assert workers.Cluster().size_of_host == 1


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
    (config([["worker", "a:1"]]), "has no 'cluster'"),
    (config({"chief": ["a:1", "b:1"]}, "chief"), "more than one 'chief'"),
    (config({"worker": "a:1"}), "no list of addresses for the job 'worker'"),
    (config({"worker": ["a"]}), "address 'a', which is not host:port"),
    (config({"worker": ["a:0"]}), "address 'a:0', which is not host:port"),
    (config({"worker": ["a:1", "b:66000"]}), "address 'b:66000', which is not host:port"),
    (config({"worker": ["a:1", 7]}), "address 7, which is not host:port"),
    (config({"worker": ["a:1", "a:1"]}), "one address twice"),
    (config({"chief": ["a:1"], "worker": ["a:1"]}), "one address twice"),
    (config({"worker": ["a:1", "b:1"]}, index=-1), "this process is worker -1, which is not in"),
    (config({"worker": ["a:1", "b:1"]}, index="x"), "this process is worker x, which is not in"),
    ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, "this process is None None, which is not"),
    ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": [0]}'}, "'task' without 'type' and"),
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


def test_a_port_in_use():
  with socket.socket() as s:
    s.bind(("", 0))
    s.listen()
    jobs = {"worker": [f"127.0.0.1:{s.getsockname()[1]}", "127.0.0.1:1"]}
    cluster = workers.cluster_from_environment(config(jobs))
    with pytest.raises(
      errors.ConfigError, match=r"worker 0 \(127.0.0.1:\d+\) cannot listen .* that port"
    ):
      workers.join(cluster)


SAYS_WHAT_DIFFERS = """
import os, sys
from mesh_tensorflow import errors, workers
from mesh_tensorflow.workers import agreement
cluster = workers.join()
agreement.check_same(["run.seed = 1", *agreement.versions()])
try:
  agreement.check_same([f"run.seed = {cluster.index // 2}", "d_model = 8"] * 3)
except errors.ConfigError as e:
  print(cluster.index, e, flush=True)
workers.leave(lambda: print(cluster.index, "leaves", flush=True))
"""


@pytest.mark.subprocess
def test_workers_with_different_settings_are_told(tmp_path):
  out = printed(3, ["-c", SAYS_WHAT_DIFFERS])
  for i in range(3):
    assert f"{i} the workers must run the same program with the same settings, but worker 0" in out
    assert f"{i} leaves" in out
  assert out.count("has run.seed = 0, but worker 2 (127.0.0.1:") == 3
  assert out.count("has run.seed = 1. Start") == 3 and "d_model" not in out


WAITS = """
from mesh_tensorflow import workers
from mesh_tensorflow.workers import joining
joining._AWAY_SECONDS = 2.0
workers.join(timeout_seconds={timeout})
"""


@pytest.mark.subprocess
@pytest.mark.parametrize(
  ("timeout", "is_there", "code", "words"),
  [
    (
      3,
      False,
      1,
      r"LostError: worker 1 \(.*\) waited 3 s in vain for worker 0 \({address}\): look",
    ),
    # It is gone while TensorFlow joins the workers, where only another process can end this one.
    (200, True, -9, r"worker 1 \(.*\) lost worker 0 \({address}\) while the workers joined"),
  ],
)
def test_a_worker_that_does_not_come_is_named(timeout, is_there, code, words, tmp_path):
  with socket.socket() as chief:
    numbers = ports.free(2)
    chief.bind(("127.0.0.1", numbers[0]))
    addresses = [f"127.0.0.1:{port}" for port in numbers]
    environ = {**os.environ, **config({"worker": addresses}, index=1)}
    if is_there:
      chief.listen()
    with (tmp_path / "out").open("w") as file:
      run = fork_server.start(["-c", WAITS.format(timeout=timeout)], file, file, environ)
      try:
        if is_there:
          chief.settimeout(60)
          chief.accept()[0].close()  # Now it is seen; and then it is gone.
          chief.close()
        found = run.wait(120)
      finally:
        run.kill()
  out = (tmp_path / "out").read_text()
  assert found == code, out
  assert re.search(words.format(address=addresses[0]), out), out


CHIEF_AND_WORKERS = """
import tensorflow as tf
from mesh_tensorflow import workers
cluster = workers.join(virtual_cpu_devices=1)
threads = tf.config.threading.get_intra_op_parallelism_threads()
task = cluster.tasks[cluster.index][:2]
print(workers.gather(cluster.index).tolist(), task, threads, flush=True)
workers.check()
workers.leave()
"""


@pytest.mark.subprocess
def test_a_cluster_with_chief_and_evaluator(tmp_path):
  a, b, c = (f"127.0.0.1:{port}" for port in ports.free(3))
  jobs = {"evaluator": [a], "worker": [b], "chief": [c]}
  with contextlib.ExitStack() as stack:
    runs = []
    for kind in jobs:
      out, err = (stack.enter_context((tmp_path / f"{kind}.{x}").open("w")) for x in ("out", "err"))
      env = {**os.environ, **config(jobs, kind, "0")}
      runs.append(fork_server.start(["-c", CHIEF_AND_WORKERS], out, err, env))
      stack.callback(runs[-1].kill)
    assert [run.wait(120) for run in runs] == [0, 0, 0]
  outs = [(tmp_path / f"{kind}.out").read_text() for kind in jobs]
  # Workers of one host share its cores; TensorFlow decides for a process that is alone (0).
  share = max(1, len(os.sched_getaffinity(0)) // 2)
  assert outs == [
    "[0] ('localhost', 0) 0\n",
    f"[0, 1] ('worker', 0) {share}\n",
    f"[0, 1] ('chief', 0) {share}\n",
  ]


STUCK = """
import time
from mesh_tensorflow import errors, workers
from mesh_tensorflow.workers import membership
membership._STUCK_SECONDS = 1.0
cluster = workers.join()
if cluster.index:
  time.sleep(10.0)
try:
  workers.barrier()
except errors.WorkerLostError as e:
  print(cluster.index, e, flush=True)
"""


@pytest.mark.subprocess
def test_a_worker_that_lives_and_does_not_come_is_given_up():
  """TensorFlow notices nothing: heartbeats are sent by threads of its own."""
  out = printed(2, ["-c", STUCK])
  assert "0 lost another worker (of worker 1 (127.0.0.1:" in out, out


def printed(count, arguments):
  """What so many workers printed."""
  codes, texts = worker_group.run(count, arguments, 300)
  assert codes == [0] * count, "".join(texts)
  return "".join(texts)


@functools.cache
def train(count, devices, *meshes):
  """What worker 0 of so many workers, of so many devices each, printed of each mesh."""
  arguments = ["-m", "tests.workers.workers_program", str(devices), *itertools.chain(*meshes)]
  codes, texts = worker_group.run(count, arguments, 300)
  assert codes == [0] * count, "".join(texts)
  return [json.loads(line) for line in texts[0].splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def one():
  """What one process prints."""
  return train(1, 1, ("", "", "auto"))[0]


STANDARD = "batch:batch,d_ff:model,vocab:model"
# Of 2 workers, one run; "runtime" as between GPUs.
TWO = [("batch:2,model:2", STANDARD, "auto"), ("batch:2,model:2", STANDARD, "runtime")]
SWAPPED = [("model:2,batch:2", STANDARD, "auto")]
THREE = [("rows:3", "vocab:rows", "auto")]


@pytest.mark.subprocess
@pytest.mark.parametrize(
  ("count", "devices", "meshes", "which", "seen"),
  [
    (2, 2, TWO, 0, [[16, 2], [16, 2]]),
    (2, 2, TWO, 1, [[16, 2], [16, 2]]),
    pytest.param(2, 2, SWAPPED, 0, [[32, 2], [32, 2]], marks=pytest.mark.long),
    (3, 1, THREE, 0, [[32, 1]] * 3),
  ],
)
def test_the_mesh_may_span_workers(count, devices, meshes, which, seen, one):
  several = train(count, devices, *meshes)[which]
  assert several["seen"] == seen  # Each worker is given the part of the batch that it needs.
  np.testing.assert_allclose(several["losses"], one["losses"], rtol=1e-5)
  np.testing.assert_allclose(several["logits"], one["logits"], rtol=1e-4, atol=1e-5)
  assert one["losses"][-1] < one["losses"][0]
