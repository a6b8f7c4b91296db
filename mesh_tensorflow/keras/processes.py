"""Several processes of one Keras program: who they are, their devices, input, files, and end.

Each process runs the same program. `serving` puts what is here into Keras' public API.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import json
import logging
import os
import pathlib
import random
import sys
import tempfile
import threading
import types
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from mesh_tensorflow import exit_codes, workers
from mesh_tensorflow.errors import (
  CollectiveError,
  ConfigError,
  DataError,
  GraphError,
  StorageError,
  VariableError,
  WorkerLostError,
)
from mesh_tensorflow.keras.batches import Batch
from mesh_tensorflow.workers import loss_watch, texts

_VARIABLE = "KERAS_DISTRIBUTION_"
_HOW = (
  "give keras.distribution.initialize(job_addresses='host0:port,host1:port', num_processes=2, "
  f"process_id=0), or set {_VARIABLE}JOB_ADDRESSES, {_VARIABLE}NUM_PROCESSES and "
  f"{_VARIABLE}PROCESS_ID, or TF_CONFIG"
)
# How long processes wait for each other's last step out: see `workers.leave`.
_LEAVE_SECONDS = 15.0
# Time limit for the other processes to save, too.
_MEET_SECONDS = 300.0


# ------------------------------------------------------------------------- who there is


def cluster_of(
  job_addresses: Any = None,
  num_processes: Any = None,
  process_id: Any = None,
  environ: Mapping[str, str] | None = None,
) -> workers.Cluster:
  """The processes that the arguments of `keras.distribution.initialize` describe.

  Args:
    job_addresses: "host:port" of every process, with commas between. This and the others may be
      None: then the environment says it.
    num_processes: their number.
    process_id: the number of this one.
    environ: environment variables; `os.environ` by default.

  Raises:
    ConfigError: something is missing, malformed, or contradicts the rest.
  """
  environ = os.environ if environ is None else environ
  given: dict[str, Any] = {
    "job_addresses": job_addresses,
    "num_processes": num_processes,
    "process_id": process_id,
  }
  for name, value in given.items():
    if value is None:
      given[name] = environ.get(_VARIABLE + name.upper(), "").strip() or None
  if all(value is None for value in given.values()):
    if not environ.get("TF_CONFIG", "").strip():
      raise ConfigError(
        f"keras.distribution.initialize: nothing says which processes there are: {_HOW}"
      )
    return workers.cluster_from_environment(environ)
  missing = [name for name in ("job_addresses", "process_id") if given[name] is None]
  if missing:
    raise ConfigError(f"keras.distribution.initialize: {' and '.join(missing)} missing: {_HOW}")
  if not isinstance(given["job_addresses"], str):
    raise ConfigError(
      f"keras.distribution.initialize: job_addresses is a text with commas, got {job_addresses!r}"
    )
  addresses = [a.strip() for a in given["job_addresses"].split(",")]
  index = _number("process_id", given["process_id"])
  count = len(addresses)
  if given["num_processes"] is not None:
    count = _number("num_processes", given["num_processes"])
  if count != len(addresses):
    raise ConfigError(
      f"keras.distribution.initialize: num_processes is {count}, and job_addresses has "
      f"{len(addresses)} ({','.join(addresses)}); under TensorFlow give the address of every "
      "process, not of the first one alone"
    )
  if not 0 <= index < count:
    raise ConfigError(
      f"keras.distribution.initialize: process_id is {index}, and {count} processes have the "
      f"numbers 0 to {count - 1}"
    )
  # Their syntax is that of the addresses of TF_CONFIG.
  task = {"type": "worker", "index": index}
  try:
    return workers.cluster_from_environment(
      {"TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task})}
    )
  except ConfigError as e:
    raise ConfigError(
      f"keras.distribution.initialize: job_addresses {','.join(addresses)!r} must be different "
      "addresses host:port with commas between, as '10.0.0.1:2222,10.0.0.2:2222'"
    ) from e


def _number(name: str, value: Any) -> int:
  with contextlib.suppress(TypeError, ValueError):
    if not isinstance(value, bool):
      return int(value)
  raise ConfigError(f"keras.distribution.initialize: {name} must be a whole number, got {value!r}")


def initialize(
  job_addresses: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
) -> None:
  """Joins the processes; `keras.distribution.initialize` under TensorFlow.

  It is called in each process, before TensorFlow runs anything. From then on, if another process is
  lost, this one ends within a minute, with exit code 75; an error that nobody catches ends it at
  once; and at the end of the program it waits for the others.

  Args:
    job_addresses: "host:port" of every process, with commas between. Without it and the others the
      environment counts: KERAS_DISTRIBUTION_JOB_ADDRESSES, KERAS_DISTRIBUTION_NUM_PROCESSES and
      KERAS_DISTRIBUTION_PROCESS_ID, and where none of them is set TF_CONFIG.
    num_processes: their number.
    process_id: the number of this process. Process 0 writes files.

  Raises:
    ConfigError: something is missing, malformed, or contradicts the rest; or this process has
      joined others.
    GraphError: TensorFlow has run something before.
    WorkerLostError: another process did not come.
  """
  cluster = cluster_of(job_addresses, num_processes, process_id)
  try:
    workers.join(cluster)
  except GraphError as e:
    raise GraphError(
      f"keras.distribution.initialize: {e}. mtf.virtual_cpu_devices starts TensorFlow, too: in "
      "several processes divide the CPU by tf.config.set_logical_device_configuration"
    ) from e
  if workers.current().size > 1:
    _end_with_the_others(f"process {cluster.index}/{cluster.size}: ")
    _same_seeds()


def _same_seeds() -> None:
  """Seeds Keras alike in all processes, unless they were seeded alike before."""
  of_numpy: Any = np.random.get_state()
  states = repr((random.getstate(), of_numpy[1].tolist()))
  keys = workers.gather(np.int32(zlib.crc32(states.encode()) >> 1))
  if (keys != keys[0]).any():
    keras.utils.set_random_seed(int(workers.gather(np.int32(random.getrandbits(31)))[0]))


# ------------------------------------------------------------------------- their end


@functools.cache  # Once.
def _end_with_the_others(prefix: str) -> None:
  """Sees to the end of this process, which must not leave the others waiting.

  Args:
    prefix: of what is told.
  """
  loss_watch.start(workers.check, prefix)
  plain = sys.excepthook

  def fail(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
  ) -> None:
    plain(kind, error, trace)
    # At its usual end a process of TensorFlow's would wait for the others.
    _end_now(exit_codes.of_error(error))

  def end() -> None:
    try:
      workers.barrier()
    except WorkerLostError as e:
      print(f"{prefix}WorkerLostError: {e}", file=sys.stderr)
      _end_now(exit_codes.WORKER_LOST)
    # All have done their work. One that ends at once would break the meeting for the others.
    thread = threading.Thread(target=_meet_if_possible, daemon=True, name="mtf-keras-end")
    thread.start()
    thread.join(_LEAVE_SECONDS)

  sys.excepthook = fail
  atexit.register(end)


def _meet_if_possible() -> None:
  with contextlib.suppress(Exception):
    workers.barrier()


def _end_now(code: int) -> None:
  logging.shutdown()
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError, ValueError):
      if stream is not None:
        stream.flush()
  if _scratch_folder.cache_info().currsize:
    _scratch_folder().cleanup()
  os._exit(code)


# ------------------------------------------------------------------------- devices


def list_devices(device_type: str | None = None) -> list[str]:
  """The devices of all processes, by Keras' names: "cpu:0", "cpu:1", ..., process by process.

  Args:
    device_type: "cpu", "gpu" or "tpu"; by default accelerators if there are some, else CPUs.
  """
  found = _devices(device_type.upper()) if device_type else _devices("GPU") or _devices("CPU")
  kinds = [str(tf.DeviceSpec.from_string(name).device_type).lower() for name in found]
  return [f"{kind}:{i}" for i, kind in enumerate(kinds)]


def full_name(device: str) -> str:
  """TensorFlow's name of a device that Keras' name stands for, which counts in all processes."""
  if workers.current().size == 1 or device.startswith("/"):
    return device
  kind, _, number = device.partition(":")
  found = _devices(kind.upper())
  if not (number or "0").isdecimal() or int(number or 0) >= len(found):
    raise ConfigError(
      f"there is no device {device!r}: {workers.current().size} processes have {len(found)} "
      f"devices of that kind together; see keras.distribution.list_devices({kind.lower()!r})"
    )
  return found[int(number or 0)]


def _devices(kind: str) -> list[str]:
  """Full names of the devices of a kind of all processes, process by process."""
  tasks = [(job, number) for job, number, _ in workers.current().tasks]
  found = []
  for device in tf.config.list_logical_devices(kind):
    spec = tf.DeviceSpec.from_string(device.name)
    if (spec.job, spec.task) in tasks:
      found.append((tasks.index((spec.job, spec.task)), spec.device_index, device.name))
  return [name for _, _, name in sorted(found)]


# ------------------------------------------------------------------------- input


def data_shard(distribution: Any) -> tuple[int, int]:
  """(number of shards of a batch, number of this process's one); as `Distribution` has it in JAX.

  Args:
    distribution: a `keras.distribution.DataParallel` or `ModelParallel`.

  Raises:
    ConfigError: the processes cannot be divided among the replicas of the model.
  """
  cluster = workers.current()
  replicas = int(distribution.num_model_replicas)
  if replicas >= cluster.size:
    return cluster.size, cluster.index
  if cluster.size % replicas:
    raise ConfigError(
      f"keras.distribution: {cluster.size} processes cannot share {replicas} replicas of the model "
      f"(the mesh axis {distribution.batch_dim_name!r}); one of the numbers must divide the other"
    )
  return replicas, cluster.index // (cluster.size // replicas)


def whole_batch(batch: Batch, distribution: Any) -> Batch:
  """The whole batch, of which each process has its shard if the distribution says so.

  Args:
    batch: of this process.
    distribution: a distribution, whose `auto_shard_dataset` is False if data are sharded; or None.

  Raises:
    DataError: the shards have other structures, dtypes or sizes of an example.
  """
  if workers.current().size == 1 or getattr(distribution, "auto_shard_dataset", True):
    return batch
  count, _ = data_shard(distribution)
  if count == 1:
    return batch
  leaves = batch.leaves
  told = [[list(t.shape), t.dtype.name] for t in leaves]
  every = [json.loads(x) for x in texts.gather_texts(json.dumps([batch.names, told]))]
  shards = every[:: workers.current().size // count]
  names, first = shards[0]
  for i, (others, of_leaves) in enumerate(shards):
    alike = [[s[1:], d] for s, d in of_leaves] == [[s[1:], d] for s, d in first]
    if others != names or not alike:
      raise DataError(
        f"keras.distribution: shard {i} of a batch has {dict(zip(others, of_leaves))}, and shard 0 "
        f"{dict(zip(names, first))}; they may differ in their numbers of examples alone"
      )
  wholes = iter(
    [
      t if not t.shape.rank else _concatenated(t, [of_leaves[i][0] for _, of_leaves in shards])
      for i, t in enumerate(leaves)
    ]
  )
  values = tf.nest.map_structure(lambda t: None if t is None else next(wholes), batch.values)
  return dataclasses.replace(batch, values=values)


def _concatenated(part: tf.Tensor, shapes: list[list[int]]) -> tf.Tensor:
  """The parts of all shards, one after the other; each is that of several processes, perhaps."""
  array = part.numpy()
  sizes = [int(np.prod(shape)) * array.dtype.itemsize for shape in shapes]
  room = -(-max(*sizes, 4) // 4) * 4
  rows = workers.gather(np.frombuffer(array.tobytes().ljust(room, b"\0"), np.int32))
  each = workers.current().size // len(shapes)
  return tf.convert_to_tensor(
    np.concatenate(
      [
        row.view(np.uint8)[:size].view(array.dtype).reshape(shape)
        for row, size, shape in zip(rows[::each], sizes, shapes)
      ]
    )
  )


def digest(batch: Batch) -> str:
  """Digest of the values of a batch, the same for the same ones."""
  found = 0
  for t in batch.leaves:
    found = zlib.crc32(np.ascontiguousarray(t.numpy()).tobytes(), found)
  return f"{found:08x}"


# ------------------------------------------------------------------------- files


def writes() -> bool:
  """True for the process that writes files: the first one."""
  return workers.current().is_chief


def written_once(write: Callable[[Any], Any], path: Any) -> Any:
  """Calls a function that writes a file or folder, in all processes; the first one's stays.

  All take part, as they gather variables in it; the others write into a temporary folder. None goes
  on before the first one has written.

  Args:
    write: is given the path.
    path: where the first process writes.

  Raises:
    StorageError: in the other processes: the first one could not write. It raises what there was.
    VariableError: the others do not call it within a time.
  """
  if workers.current().size == 1 or not isinstance(path, (str, os.PathLike)):
    return write(path)
  try:
    # Nobody reads any more what was there before.
    workers.gather(np.int32(0), timeout_seconds=_MEET_SECONDS)
  except WorkerLostError:
    raise
  except CollectiveError as e:
    raise VariableError(
      f"{os.fspath(path)} is saved by all processes, as their variables are gathered, and this one "
      f"waited {_MEET_SECONDS:g} s in vain for the others to save it; call it in all of them: the "
      "first one writes"
    ) from e
  result, error = None, None
  try:
    if writes():
      result = write(path)
    else:
      with tempfile.TemporaryDirectory(prefix="mtf-keras-") as folder:
        result = write(os.path.join(folder, pathlib.PurePath(path).name))
  except (VariableError, WorkerLostError):
    raise  # The others are elsewhere, or gone.
  except Exception as e:  # noqa: BLE001 - raised when the others know of it.
    error = e
  failed = workers.gather(np.int32(error is not None)).astype(bool)
  if error is not None:
    raise error
  if failed[0]:
    raise StorageError(f"process 0 could not write {os.fspath(path)}: its log says why")
  return result


@contextlib.contextmanager
def written_elsewhere(owner: Any, name: str) -> Iterator[None]:
  """Context manager: a path that an object has is one in a temporary folder, but in process 0.

  Args:
    owner: a callback.
    name: of its attribute.
  """
  path = getattr(owner, name)
  if writes():
    yield
    return
  setattr(owner, name, elsewhere(path))
  try:
    yield
  finally:
    setattr(owner, name, path)


def elsewhere(path: Any) -> str:
  """A path of the same name in a temporary folder, which ends with this process."""
  return os.path.join(_scratch_folder().name, pathlib.PurePath(path).name)


@functools.cache
def _scratch_folder() -> tempfile.TemporaryDirectory[str]:
  return tempfile.TemporaryDirectory(prefix="mtf-keras-", ignore_cleanup_errors=True)
