"""The worker processes that a mesh spans, and joining them by TF_CONFIG.

`join` is called first in every worker, before TensorFlow runs anything. A `SimdMeshImpl` then takes
the devices of all workers, and each worker runs the processors that are on its own devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow import quiet, virtual_devices
from mesh_tensorflow.errors import (
  CollectiveError,
  ConfigError,
  GraphError,
  MeshShapeError,
  WorkerLostError,
)

_LOG = logging.getLogger("mesh_tensorflow")

# Exit code of a worker that ends because another one was lost.
EXIT_WORKER_LOST = 75

# After so long without heartbeats TensorFlow takes a worker for lost; some more to be sure.
_HEARTBEAT_SECONDS = 15.0

# TensorFlow knows groups of devices, and what they exchange, by numbers: those of a mesh are higher
# (`collectives.KEYS`), those of a strategy lower.
_GROUP_KEY = 50_000


@dataclasses.dataclass(frozen=True)
class Cluster:
  """The workers, and which of them this process is.

  Attributes:
    tasks: (job, number in the job, address "host:port") of every worker, by its number.
    index: the number of this worker.
  """

  tasks: tuple[tuple[str, int, str], ...] = (("localhost", 0, ""),)
  index: int = 0

  @property
  def size(self) -> int:
    """How many workers there are."""
    return len(self.tasks)

  @property
  def is_chief(self) -> bool:
    """Whether this worker does what only one does: reports, and the last part of a checkpoint."""
    return self.index == 0

  def name(self, worker: int) -> str:
    """A worker in messages: "worker 1 (host:port)"."""
    return f"worker {worker} ({self.tasks[worker][2]})"

  def devices(self, count: int, kind: str = "CPU") -> list[str]:
    """Full names of the first `count` devices of a kind of all workers together.

    Args:
      count: a multiple of the number of workers.
      kind: "CPU" or "GPU".

    Raises:
      MeshShapeError: the number of workers does not divide it.
    """
    if count % self.size:
      raise MeshShapeError(
        f"a mesh of {count} processors cannot be shared by {self.size} workers: each worker has "
        f"the same number of devices; use a multiple of {self.size} processors"
      )
    return [
      f"/job:{job}/replica:0/task:{task}/device:{kind}:{i}"
      for job, task, _ in self.tasks
      for i in range(count // self.size)
    ]


def _malformed(text: str, what: str) -> ConfigError:
  return ConfigError(
    f"TF_CONFIG {what}; it must look like "
    '{"cluster": {"worker": ["host0:port", "host1:port"]}, '
    f'"task": {{"type": "worker", "index": 0}}}}; it is {text}'
  )


def cluster_from_environment(environ: Mapping[str, str] | None = None) -> Cluster:
  """The cluster that TF_CONFIG describes; one worker if it is not set.

  Args:
    environ: environment variables; `os.environ` by default.

  Raises:
    ConfigError: TF_CONFIG is malformed.
  """
  text = (os.environ if environ is None else environ).get("TF_CONFIG", "").strip()
  if not text:
    return Cluster()

  try:
    config = json.loads(text)
  except ValueError as e:
    raise _malformed(text, f"is no JSON ({e})") from e
  if not isinstance(config, dict) or not isinstance(config.get("cluster", {}), dict):
    raise _malformed(text, "has no 'cluster'")
  jobs = config.get("cluster") or {}
  unknown = sorted(set(jobs) - {"chief", "worker", "evaluator"})
  if unknown:
    raise _malformed(
      text, f"has the job(s) {', '.join(unknown)}, and there are only 'chief' and 'worker'"
    )
  tasks = []
  for job in ("chief", "worker"):
    addresses = jobs.get(job, [])
    if not isinstance(addresses, list):
      raise _malformed(text, f"has no list of addresses for the job {job!r}")
    tasks += [(job, i, str(address)) for i, address in enumerate(addresses)]
  if not tasks:
    return Cluster()
  for _, _, address in tasks:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
      raise _malformed(text, f"has the address {address!r}, which is not host:port")
  if len({a for _, _, a in tasks}) < len(tasks):
    raise _malformed(text, "has one address twice")
  task = config.get("task") or {}
  me = (task.get("type"), task.get("index"))
  known = [(job, i) for job, i, _ in tasks]
  if me not in known:
    raise _malformed(
      text, f"says that this process is {me[0]} {me[1]}, which is not in its cluster"
    )
  return Cluster(tuple(tasks), known.index(me))


class _Joined:
  """What a process that has joined a cluster holds.

  Args:
    cluster: the cluster.
  """

  def __init__(self, cluster: Cluster):
    self.cluster = cluster
    # TensorFlow's server, which also notices when heartbeats of a worker are missing.
    self._strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with tf.device(host_device(cluster)):
      self._token = tf.Variable(0, trainable=False, name="mtf_workers_token")
    self._gathers: dict[Any, Any] = {}

  def gather_function(self, dtype: Any, elements: int) -> Any:
    """A compiled gather of vectors: a collective is known by its number, so each kind has one."""
    key = (dtype, elements)
    if key not in self._gathers:
      number = len(self._gathers)

      @tf.function(input_signature=[tf.TensorSpec([elements], dtype)], autograph=False)
      def gather_vectors(x):
        with tf.device(host_device(self.cluster)):
          return tf.raw_ops.CollectiveGatherV2(
            input=x,
            group_size=self.cluster.size,
            group_key=_GROUP_KEY,
            instance_key=_GROUP_KEY + number,
            ordering_token=[self._token.handle],
          )

      self._gathers[key] = gather_vectors
    return self._gathers[key]


_JOINED: _Joined | None = None


def current() -> Cluster:
  """The cluster that this process has joined; one of one worker if it has joined none."""
  return _JOINED.cluster if _JOINED else Cluster()


def join(
  cluster: Cluster | None = None,
  virtual_cpu_devices: int | None = None,
  timeout_seconds: float = 300.0,
) -> Cluster:
  """Joins the cluster; to be called in all workers before TensorFlow runs anything.

  Args:
    cluster: the cluster; what TF_CONFIG says by default. One worker alone has nothing to join.
    virtual_cpu_devices: how many devices to make of the CPU of this worker.
    timeout_seconds: how long to wait for the other workers. A process that waits longer ends,
      with exit code `EXIT_WORKER_LOST`.

  Returns:
    The cluster.

  Raises:
    ConfigError: TF_CONFIG is malformed, or this process has joined another cluster.
    GraphError: TensorFlow has run something before.
  """
  global _JOINED  # noqa: PLW0603 - a process is in one cluster.
  cluster = cluster_from_environment() if cluster is None else cluster
  if cluster.size == 1:
    if virtual_cpu_devices:
      virtual_devices.virtual_cpu_devices(virtual_cpu_devices)
    return cluster
  if _JOINED:
    if _JOINED.cluster != cluster:
      raise ConfigError("this process has joined another cluster, and can be in one only")
    return cluster
  started = time.monotonic()
  with _waiting_for_others(cluster, timeout_seconds):
    try:
      if virtual_cpu_devices:
        virtual_devices.configure_virtual_cpu_devices(virtual_cpu_devices)
      _JOINED = _Joined(cluster)
    except RuntimeError as e:
      raise GraphError(
        f"{cluster.name(cluster.index)} cannot join the cluster any more: TensorFlow has run "
        "something before. Call workers.join() first"
      ) from e
    barrier()
  seconds = time.monotonic() - started
  _LOG.info("%s of %d joined in %.1f s", cluster.name(cluster.index), cluster.size, seconds)
  return cluster


def host_device(cluster: Cluster | None = None) -> str:
  """The first CPU of this worker."""
  cluster = current() if cluster is None else cluster
  job, task, _ = cluster.tasks[cluster.index]
  return f"/job:{job}/replica:0/task:{task}/device:CPU:0"


def gather(value: Any) -> np.ndarray:
  """The values of all workers, stacked; every worker calls it at the same place of its program.

  Args:
    value: a number or array, of the same shape and dtype in all workers.

  Returns:
    An array `[workers, ...]`.

  Raises:
    WorkerLostError: another worker is gone.
  """
  value = np.asarray(value)
  if not _JOINED:
    return value[np.newaxis]
  flat = value.reshape([-1])
  with worker_errors():
    rows = _JOINED.gather_function(flat.dtype, flat.size)(tf.constant(flat)).numpy()
  return rows.reshape((_JOINED.cluster.size, *value.shape))


def any_worker(condition: bool) -> bool:
  """Whether a condition holds in one of the workers; every worker calls it and gets the same."""
  return bool(condition) if not _JOINED else bool(gather(np.int32(condition)).any())


def barrier() -> None:
  """Waits until every worker is here."""
  any_worker(False)


@contextlib.contextmanager
def worker_errors() -> Iterator[None]:
  """Turns errors that come from a lost worker into `WorkerLostError`, which names it.

  TensorFlow's coordination service, in worker 0, notices within about 10 s that a worker sends
  no heartbeats, and ends all collectives of the others.
  """
  try:
    yield
  except (tf.errors.OpError, CollectiveError) as e:
    lost = _lost_workers(str(e))
    if lost is None:
      raise
    cluster = current()
    if 0 not in lost and not cluster.is_chief:
      # This one goes on sending heartbeats, so that worker 0 misses those of the lost one alone.
      time.sleep(_HEARTBEAT_SECONDS)
    who = ", ".join(cluster.name(i) for i in lost) or "another worker"
    raise WorkerLostError(
      f"lost {who}: it was killed, failed (its log says why), or hangs. "
      f"{cluster.name(cluster.index)} stops. Training goes on from the last checkpoint when all "
      "workers are started again, or fewer of them with a smaller mesh"
    ) from e


def _lost_workers(message: str) -> list[int] | None:
  """The workers that TensorFlow's error says are lost; None if it is of another kind."""
  cluster = current()
  if cluster.size == 1 or not any(sign in message for sign in _SIGNS_OF_LOSS):
    return None
  if "CoordinationService/Heartbeat" in message:
    return [0]  # It does not answer to heartbeats.
  named = re.findall(r"/job:(\w+)(?:/replica:0)?/task:(\d+)", message)
  tasks = [(job, number) for job, number, _ in cluster.tasks]
  found = {tasks.index((j, int(n))) for j, n in named if (j, int(n)) in tasks} - {cluster.index}
  return [i for i in sorted(found) if not listens(cluster, i)] or sorted(found)


# Words of TensorFlow's errors when another worker is gone, or has given up.
_SIGNS_OF_LOSS = (
  "are unhealthy",
  "stopped sending heartbeats",
  "Connection reset by peer",
  "failed to connect",
  "Socket closed",
  "Connection refused",
  "CoordinationServiceError",
  "CoordinationService/Heartbeat",
  "RPC Request was cancelled",
)


@contextlib.contextmanager
def _waiting_for_others(cluster: Cluster, timeout_seconds: float) -> Iterator[None]:
  """Says for which workers this one waits, and ends the process after some time.

  TensorFlow waits inside a call that cannot be interrupted.
  """
  done = threading.Event()

  def say(stderr: int) -> None:
    def write(text: str) -> None:
      os.write(stderr, f"{cluster.name(cluster.index)} {text}\n".encode())

    end = time.monotonic() + timeout_seconds
    while not done.wait(min(15.0, max(0.1, end - time.monotonic()))):
      missing = [cluster.name(i) for i in range(cluster.size) if not listens(cluster, i)]
      what = ", ".join(missing) or "the others, which are starting"
      if time.monotonic() >= end:
        write(
          f"waited {timeout_seconds:.0f} s in vain for {what}: look at its log, and whether its "
          "address is right"
        )
        os._exit(EXIT_WORKER_LOST)
      write(f"waits for {what}")

  with quiet.held_back_notices() as stderr:
    thread = threading.Thread(target=say, args=(stderr,), daemon=True, name="mtf-join")
    thread.start()
    try:
      yield
    finally:
      done.set()
      thread.join()


def listens(cluster: Cluster, worker: int) -> bool:
  """Whether a worker's process is there, hanging or not; usable in any thread."""
  host, _, port = cluster.tasks[worker][2].rpartition(":")
  try:
    with socket.create_connection((host.strip("[]"), int(port)), 2.0):
      return True
  except OSError:
    return False
