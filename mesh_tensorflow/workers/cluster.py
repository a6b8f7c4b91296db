"""The worker processes that a mesh spans, as TF_CONFIG names them."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Mapping
from typing import Any

from mesh_tensorflow.errors import ConfigError, MeshShapeError
from mesh_transformer_cli import untrusted


@dataclasses.dataclass(frozen=True)
class Cluster:
  """The workers, and which of them this process is.

  Attributes:
    tasks: (job, number in the job, address "host:port") of every worker, by its number.
    index: the number of this worker.
    is_evaluator: whether this process is the `evaluator` of a cluster. It is alone then: it looks
      at the checkpoints that the workers write, and is none of them.
  """

  tasks: tuple[tuple[str, int, str], ...] = (("localhost", 0, ""),)
  index: int = 0
  is_evaluator: bool = False

  @property
  def size(self) -> int:
    """Number of workers."""
    return len(self.tasks)

  @property
  def hosts(self) -> int:
    """Number of hosts that the workers run on, by their addresses."""
    return len(set(self._hosts))

  @property
  def size_of_host(self) -> int:
    """Number of workers on the host of this one, by their addresses."""
    return self._hosts.count(self._hosts[self.index])

  @property
  def _hosts(self) -> list[str]:
    return [address.rpartition(":")[0] for _, _, address in self.tasks]

  @property
  def is_chief(self) -> bool:
    """True for worker 0, which alone reports, and completes each checkpoint."""
    return self.index == 0

  def name(self, worker: int) -> str:
    """A worker in messages: "worker 1 (host:port)"."""
    return f"worker {worker} ({self.tasks[worker][2]})"

  def names(self, workers: list[int]) -> str:
    """Several workers in messages."""
    return ", ".join(self.name(w) for w in workers)

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

  def address(self, worker: int) -> tuple[str, int]:
    """Host and port of a worker."""
    host, _, port = self.tasks[worker][2].rpartition(":")
    return host.strip("[]"), int(port)


def _malformed(text: str, what: str) -> ConfigError:
  return ConfigError(
    f"TF_CONFIG {what}; it must look like "
    '{"cluster": {"worker": ["host0:port", "host1:port"]}, '
    f'"task": {{"type": "worker", "index": 0}}}}; it is {text}'
  )


def cluster_from_environment(environ: Mapping[str, str] | None = None) -> Cluster:
  """The cluster that TF_CONFIG describes; one worker if it is not set.

  An `evaluator`, which some cluster managers start next to the workers, is a process of its own.

  Args:
    environ: environment variables; `os.environ` by default.

  Raises:
    ConfigError: TF_CONFIG is malformed.
  """
  text = (os.environ if environ is None else environ).get("TF_CONFIG", "").strip()
  if not text:
    return Cluster()

  try:
    config = untrusted.parse(text)
  except ValueError as e:
    raise _malformed(text, f"is no JSON ({e})") from e
  if not isinstance(config, dict) or not isinstance(config.get("cluster") or {}, dict):
    raise _malformed(text, "has no 'cluster'")
  jobs = config.get("cluster") or {}
  unknown = sorted(set(jobs) - {"chief", "worker", "evaluator"})
  if unknown:
    raise _malformed(
      text,
      f"has the job(s) {', '.join(unknown)}, and there are only 'chief' and 'worker' (and "
      "'evaluator'): the variables are in the workers",
    )
  tasks = [
    (job, i, address)
    for job in ("chief", "worker")
    for i, address in enumerate(_addresses(text, jobs.get(job) or [], job))
  ]
  if len({a for _, _, a in tasks}) < len(tasks):
    raise _malformed(text, "has one address twice")
  if len([job for job, _, _ in tasks if job == "chief"]) > 1:
    raise _malformed(text, "has more than one 'chief'")
  kind, index = _task(text, config.get("task"))
  if kind == "evaluator":
    return Cluster(is_evaluator=True)
  if not tasks:
    return Cluster()
  known = [(job, i) for job, i, _ in tasks]
  if (kind, index) not in known:
    raise _malformed(text, f"says that this process is {kind} {index}, which is not in its cluster")
  return Cluster(tuple(tasks), known.index((kind, index)))


def _addresses(text: str, addresses: object, job: str) -> list[str]:
  if not isinstance(addresses, list):
    raise _malformed(text, f"has no list of addresses for the job {job!r}")
  for address in addresses:
    host, _, port = str(address).rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
      raise _malformed(text, f"has the address {address!r}, which is not host:port")
  return [str(a) for a in addresses]


def _task(text: str, task: Any) -> tuple[Any, Any]:
  if not isinstance(task or {}, dict):
    raise _malformed(text, "has a 'task' without 'type' and 'index'")
  task = task or {}
  index = task.get("index")
  if isinstance(index, str) and index.isascii() and index.isdigit():
    index = int(index)  # As some cluster managers write it.
  return task.get("type"), index


def listens(cluster: Cluster, worker: int) -> bool:
  """True if a worker's process accepts connections (it may be hung); safe in any thread."""
  try:
    with socket.create_connection(cluster.address(worker), 2.0):
      return True
  except OSError:
    return False
