"""This process among the workers: joining them, meeting them, noticing their loss, leaving."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import gin
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from mesh_tensorflow.arguments.declared import ABOVE_ZERO, COUNT, affects, takes
from mesh_tensorflow.environment import virtual_devices
from mesh_tensorflow.errors import CollectiveError, ConfigError, GraphError, WorkerLostError
from mesh_tensorflow.workers import joining, launcher_reports, parent_watch
from mesh_tensorflow.workers.cluster import Cluster, cluster_from_environment, listens

_LOG = logging.getLogger("mesh_tensorflow")

# After so long without heartbeats TensorFlow takes a worker for lost; some more to be sure.
_HEARTBEAT_SECONDS = 15.0
_PASS_ON_SECONDS = 5.0

# TensorFlow knows groups of devices, and what they exchange, by numbers: those of a mesh are higher
# (`meshes.collectives.runtime.KEYS`), those of a strategy lower.
_GROUP_KEY = 50_000
_ABORT_KEYS = itertools.count(60_000)

# Time limit for a worker whose process is alive, but whose program does not reach the collective.
_STUCK_SECONDS = 1800.0

# Maximum time that the ports of a killed process stay open.
_CLOSING_SECONDS = 5.0

# Maximum time that workers wait for each other when all have done their work.
_LEAVE_SECONDS = 15.0


def abort_collectives(device: str) -> None:
  """Makes every collective of this process fail, now and in future."""
  try:
    with tf.device(device):
      # Waits for a member that does not exist. TensorFlow then gives up all collectives.
      key = next(_ABORT_KEYS)
      tf.raw_ops.CollectiveReduceV2(
        input=tf.zeros([]),
        group_size=2,
        group_key=key,
        instance_key=key,
        ordering_token=[],
        merge_op="Add",
        final_op="Id",
        timeout_seconds=0.1,
      )
  except tf.errors.OpError:
    pass


class _Joined:
  """State of a process that has joined a cluster: TensorFlow's server, and its gather functions.

  Args:
    cluster: the cluster.
  """

  def __init__(self, cluster: Cluster):
    self.cluster = cluster
    job, task, _ = cluster.tasks[cluster.index]
    # TensorFlow's server, which also notices when heartbeats of a worker are missing. Of TF_CONFIG
    # it is given what is understood here: no evaluator, and the index as a number.
    self._strategy = tf.distribute.MultiWorkerMirroredStrategy(
      tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(_addresses_by_job(cluster)), task_type=job, task_id=task
      )
    )
    with tf.device(host_device(cluster)):
      self._token = tf.Variable(0, trainable=False, name="mtf_workers_token")
    self._gathers: dict[Any, Any] = {}
    self._noticed_loss: float | None = None

  def gather(self, vector: np.ndarray, timeout_seconds: float | None = None) -> npt.NDArray[Any]:
    """The vectors of all workers, one after the other."""
    function = self.gather_function(vector.dtype, vector.size)
    # TensorFlow notices processes that are gone or stopped. One that lives, and is stuck in its
    # Python program, is noticed here.
    timer = threading.Timer(
      timeout_seconds or _STUCK_SECONDS, abort_collectives, [host_device(self.cluster)]
    )
    timer.daemon = True
    timer.start()
    try:
      # Also threads beside the main one come here: see `host_device`.
      with tf.device(host_device(self.cluster)):
        rows: npt.NDArray[Any] = function(tf.constant(vector)).numpy()
        return rows
    finally:
      timer.cancel()

  def probe(self) -> None:
    """Runs a collective of this worker alone; it fails if TensorFlow has noticed a lost worker."""
    with tf.device(host_device(self.cluster)):
      tf.raw_ops.CollectiveReduceV2(
        input=tf.zeros([]),
        group_size=1,
        group_key=_GROUP_KEY + 1 + self.cluster.index,
        instance_key=_GROUP_KEY + 1,
        ordering_token=[],
        merge_op="Add",
        final_op="Id",
      )

  def stay(self, seconds: float) -> None:
    """Sleeps until `seconds` after this process first noticed the loss of another worker."""
    now = time.monotonic()
    self._noticed_loss = self._noticed_loss or now
    time.sleep(max(0.0, self._noticed_loss + seconds - now))

  def gather_function(self, dtype: tf.DType, elements: int) -> Any:
    """The compiled gather of a dtype and size, each with an instance key of its own."""
    key = (dtype, elements)
    if key not in self._gathers:
      number = len(self._gathers)

      def gather_vectors(x: tf.Tensor) -> tf.Tensor:
        with tf.device(host_device(self.cluster)):
          return tf.raw_ops.CollectiveGatherV2(
            input=x,
            group_size=self.cluster.size,
            group_key=_GROUP_KEY,
            instance_key=_GROUP_KEY + number,
            ordering_token=[self._token.handle],
          )

      # Its one trace: TensorFlow warns of functions that are traced often, of the same code.
      signature = [tf.TensorSpec([elements], dtype)]
      function = tf.function(gather_vectors, input_signature=signature, autograph=False)
      self._gathers[key] = function.get_concrete_function()
    return self._gathers[key]


def _addresses_by_job(cluster: Cluster) -> dict[str, list[str]]:
  jobs: dict[str, list[str]] = {}
  for job, _, address in cluster.tasks:
    jobs.setdefault(job, []).append(address)
  return jobs


_JOINED: _Joined | None = None


def current() -> Cluster:
  """The cluster that this process has joined; one of one worker if it has joined none."""
  return _JOINED.cluster if _JOINED else Cluster()


@gin.configurable(module="mesh_tensorflow.workers")
@affects("report")
@takes(virtual_cpu_devices=COUNT, timeout_seconds=ABOVE_ZERO)
def join(
  cluster: Cluster | None = None,
  virtual_cpu_devices: int | None = None,
  timeout_seconds: float = 300.0,
) -> Cluster:
  """Joins the cluster; to be called in all workers before TensorFlow runs anything.

  Args:
    cluster: the cluster; what TF_CONFIG says by default. One worker alone has nothing to join.
    virtual_cpu_devices: number of devices to make of the CPU of this worker. Each gets its share of
      the cores, which the workers of one host divide among them; numbers of threads that are set
      already (`tf.config.threading`) stay.
    timeout_seconds: how long to wait for the other workers to come.

  Returns:
    The cluster.

  Raises:
    ConfigError: TF_CONFIG is malformed, this process has joined another cluster, or another process
      of this machine has its port.
    GraphError: TensorFlow has run something before.
    WorkerLostError: another worker did not come, or was there and is gone.
  """
  global _JOINED  # noqa: PLW0603 - a process is in one cluster.
  cluster = cluster_from_environment() if cluster is None else cluster
  parent_watch.end_with_launcher()
  if cluster.size == 1:
    if virtual_cpu_devices:
      virtual_devices.virtual_cpu_devices(virtual_cpu_devices)
    return cluster
  if _JOINED:
    if _JOINED.cluster != cluster:
      raise ConfigError("this process has joined another cluster, and can be in one only")
    return cluster
  started = time.monotonic()
  launcher_reports.tell(launcher_reports.JOINING)
  joining.meet(cluster, timeout_seconds)
  with joining.watched(cluster):
    try:
      if virtual_cpu_devices:
        virtual_devices.configure_virtual_cpu_devices(virtual_cpu_devices, cluster.size_of_host)
      _JOINED = _Joined(cluster)
    except RuntimeError as e:
      raise GraphError(
        f"{cluster.name(cluster.index)} cannot join the cluster any more: TensorFlow has run "
        f"something before. Call workers.join() first ({e})"
      ) from e
    except tf.errors.OpError as e:
      raise WorkerLostError(
        f"{cluster.name(cluster.index)} cannot join the other workers: {e.message}"
      ) from e
    barrier()
  launcher_reports.tell(launcher_reports.JOINED)
  seconds = time.monotonic() - started
  _LOG.info("%s of %d joined in %.1f s", cluster.name(cluster.index), cluster.size, seconds)
  return cluster


def host_device(cluster: Cluster | None = None) -> str:
  """The first CPU of this worker: where threads beside the main one may run operations.

  TensorFlow (2.16 to 2.21) mixes up the inputs of eager operations that two Python threads run at
  once on one device, if a kernel takes some in the host's memory (Fill, Reshape, Slice ...); only
  on a process's first CPU it does not. Devices of a mesh belong to the main thread and the ones of
  a `SimdMeshImpl`, which take turns. So whatever else runs beside them, as writers of checkpoints
  and watchers of workers do, names this device for its operations.
  """
  cluster = current() if cluster is None else cluster
  job, task, _ = cluster.tasks[cluster.index]
  return f"/job:{job}/replica:0/task:{task}/device:CPU:0"


def gather(value: npt.ArrayLike, *, timeout_seconds: float | None = None) -> npt.NDArray[Any]:
  """The values of all workers, stacked; every worker calls it at the same place of its program.

  Args:
    value: a number or array, of the same shape and dtype in all workers.
    timeout_seconds: how long to wait for workers that live, and do not call it; by default half an
      hour. This process can run no collectives afterwards.

  Returns:
    An array `[workers, ...]`.

  Raises:
    WorkerLostError: another worker is gone.
    CollectiveError: `timeout_seconds` was given, and has passed.
  """
  array: npt.NDArray[Any] = np.asarray(value)
  if not _JOINED:
    return array[np.newaxis]
  flat = array.reshape([-1])
  started = time.monotonic()
  try:
    with worker_errors():
      rows = _JOINED.gather(flat, timeout_seconds)
  except WorkerLostError as e:
    if timeout_seconds is None or time.monotonic() - started < timeout_seconds:
      raise
    raise CollectiveError(f"waited {timeout_seconds:g} s in vain for the other workers") from e
  return rows.reshape((_JOINED.cluster.size, *array.shape))


def any_worker(condition: bool) -> bool:
  """True in all workers if `condition` holds in at least one; every worker must call it."""
  return bool(condition) if not _JOINED else bool(gather(np.int32(condition)).any())


def check() -> None:
  """Raises an error if another worker is gone; does not wait, and is safe in any thread.

  For loops that wait for something of another worker that is no collective. What is noticed is what
  TensorFlow has noticed: processes that do not send heartbeats for about 10 s.

  Raises:
    WorkerLostError: naming it.
  """
  if _JOINED:
    with worker_errors():
      _JOINED.probe()


def barrier() -> None:
  """Waits until every worker is here."""
  any_worker(False)


def all_have_heard() -> None:
  """Barrier before every worker raises the same error.

  All call it before they raise it. A worker that ended at once would break the exchange by which
  the others hear of it; and one whose wait is broken because another is through has heard, too, so
  that no loss of a worker takes the place of the error.
  """
  with contextlib.suppress(WorkerLostError):
    barrier()


def leave(finish: Callable[[], None] = lambda: None, exit_code: int = 0) -> None:
  """Ends this process when every worker has done its work and calls it.

  At its usual end a process of TensorFlow's waits for the others without a limit of time, and the
  others take one that is gone for lost. Does nothing if this process has joined no cluster.

  Args:
    finish: called before the end, when all others are here, too.
    exit_code: exit code of this process.

  Raises:
    WorkerLostError: another worker is gone, and its work may not be done.
  """
  if not _JOINED:
    return
  barrier()
  finish()
  # A worker that has passed the first barrier knows that all have done their work; but exiting now
  # could break it for workers still inside. The second barrier waits for those; it may fail.
  thread = threading.Thread(
    target=_meet_if_possible, args=(_JOINED,), daemon=True, name="mtf-leave"
  )
  thread.start()
  thread.join(_LEAVE_SECONDS)
  os._exit(exit_code)


def _meet_if_possible(joined: _Joined) -> None:
  with contextlib.suppress(Exception):
    joined.gather(np.zeros([1], np.int32))


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
    if lost is None and any(isinstance(x, tf.errors.CancelledError) for x in (e, e.__cause__)):
      # An exchange inside this process was cancelled, as one with another process failed, perhaps.
      lost = _lost_workers(_noticed())
    if lost is None:
      raise
    cluster = current()
    if _JOINED and 0 not in lost:
      # This one goes on sending heartbeats, so that worker 0 misses those of the lost one alone;
      # and worker 0 stays a while, so that the others hear of the lost one and do not miss it.
      _JOINED.stay(_PASS_ON_SECONDS if cluster.is_chief else _HEARTBEAT_SECONDS)
    others = [i for i in range(cluster.size) if i != cluster.index]
    who = cluster.names(lost) or f"another worker (of {cluster.names(others)})"
    raise WorkerLostError(
      f"lost {who}: it was killed, failed (its log says why), or hangs. "
      f"{cluster.name(cluster.index)} stops. Started again, training goes on from the last "
      "checkpoint, with any number of workers that divides the mesh, and on any mesh"
    ) from e


def _noticed() -> str:
  """Text of what TensorFlow notices about lost workers within a time; "" if nothing."""
  end = time.monotonic() + _HEARTBEAT_SECONDS
  while _JOINED and time.monotonic() < end:
    try:
      _JOINED.probe()
    except tf.errors.OpError as e:
      return str(e)
    time.sleep(0.2)
  return ""


def _lost_workers(message: str) -> list[int] | None:
  """Numbers of the workers that a TensorFlow error names as lost; None for another error."""
  cluster = current()
  if cluster.size == 1 or not any(sign in message for sign in _SIGNS_OF_LOSS):
    return None
  # Whose heartbeats are missing is said in so many words; others only passed the error on.
  silent = re.search(
    r"stopped sending heartbeats\):((?:\s+/job:\w+/replica:\d+/task:\d+)+)", message
  )
  if silent is not None:
    found = _tasks_in(silent.group(1), cluster)
    if found:
      return found
  if "CoordinationService/Heartbeat" in message:
    return [0]  # It does not answer to heartbeats.
  found = _tasks_in(message, cluster)
  # If several are named, keep those that are gone: others only pass the error on. The port of a
  # process that is gone may stay open for a moment.
  end = time.monotonic() + _CLOSING_SECONDS
  while len(found) > 1 and time.monotonic() < end:
    gone = [i for i in found if not listens(cluster, i)]
    if gone:
      return gone
    time.sleep(0.2)
  return found


def _tasks_in(message: str, cluster: Cluster) -> list[int]:
  """The other workers that are named in a message of TensorFlow's."""
  named = re.findall(r"/job:(\w+)(?:/replica:0)?/task:(\d+)", message)
  tasks = [(job, number) for job, number, _ in cluster.tasks]
  found = {tasks.index((j, int(n))) for j, n in named if (j, int(n)) in tasks}
  return sorted(found - {cluster.index})


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
  "timed out waiting for other workers",
)
