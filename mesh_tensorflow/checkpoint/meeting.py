"""Rendezvous of the workers that write one checkpoint together.

Their writer threads tell each other by small files in the folder of the unfinished checkpoint,
since the main threads run collectives of the training meanwhile: each file is put there by a
rename, so whoever sees it sees all of it. The main threads agree by collectives.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.checkpoint import folder as folder_lib
from mesh_tensorflow.errors import (
  CheckpointError,
  DamagedCheckpointError,
  NewerFormatError,
  StorageError,
  WorkerLostError,
)
from mesh_tensorflow.workers import texts
from mesh_transformer_cli import untrusted

_POLL_SECONDS = (0.01, 0.25)
_SECONDS_BETWEEN_CALLS = 2.0
_PUBLISHED, _GIVEN_UP = "published", "given-up"
# Form of the messages that workers write to files; see `untrusted.expect`.
_FORM = {"problem?": (str, None), "of_storage?": bool, "files?": str}
# Classes of errors that keep their class in all workers.
_KINDS = (DamagedCheckpointError, NewerFormatError, StorageError)
_Error = TypeVar("_Error", bound=BaseException)


class Meeting:
  """The folder of one unfinished checkpoint, as its writer threads use it to meet.

  Args:
    folder: the folder.
    cluster: the workers.
    timeout_seconds: how long to wait while nothing in the folder changes.
    abandoned: is set to stop waiting.
  """

  def __init__(
    self,
    folder: str,
    cluster: workers.Cluster,
    timeout_seconds: float,
    abandoned: threading.Event,
  ):
    self.folder = folder
    self._cluster = cluster
    self._timeout = timeout_seconds
    self._abandoned = abandoned
    self._silent: set[int] = set()

  # ------------------------------------------------------------ a worker that is not the chief

  def report(self, parts: Sequence[object]) -> None:
    """Reports that this worker has written its part.

    Args:
      parts: what the chief needs to know of it; a JSON value.
    """
    self._put(_done(self._cluster.index), {"parts": parts})

  def show_progress(self, count: int) -> None:
    """Heartbeat of this worker: a slow disk may keep it busy while no file grows."""
    if self._cluster.size > 1:
      # Longer each time: `_sizes` looks at lengths.
      self._put(f"worker-{self._cluster.index:05}.progress", {"files": "x" * count})

  def report_error(self, problem: str) -> None:
    """Reports that this worker cannot write its part, as far as the disk allows.

    The others get it as a `StorageError`.
    """
    self._put(_failed(self._cluster.index), {"problem": problem})

  def wait_for_outcome(self) -> CheckpointError | None:
    """Waits until the chief has published the checkpoint, or has given it up and all know.

    Returns:
      None, or what went wrong, as an error of its kind.
    """
    try:
      outcome = self._wait_for(self._look_for_outcome)[0]
    except CheckpointError as e:
      return e
    try:
      self._put(_seen(self._cluster.index), {})
    except (tf.errors.OpError, OSError):
      pass  # The chief waits for it no longer than for any sign.
    if outcome["problem"]:
      # The program may end with the error, and would be lost to workers that still write.
      with contextlib.suppress(CheckpointError, WorkerLostError):
        self._wait_for(lambda: {0: None if tf.io.gfile.isdir(self.folder) else {}})
    kind = StorageError if outcome.get("of_storage", True) else CheckpointError
    return kind(outcome["problem"]) if outcome["problem"] else None

  def _look_for_outcome(self) -> dict[int, Any]:
    if self._get(_PUBLISHED) is not None:
      return {0: {"problem": None}}
    given_up = self._get(_GIVEN_UP)
    if given_up is None and not tf.io.gfile.isdir(self.folder):
      given_up = {}
    if given_up == {}:
      given_up = {"problem": f"{self._cluster.name(0)}: it gave this checkpoint up; see its log"}
    return {0: given_up}

  # ---------------------------------------------------------------------------- the chief

  def wait_for_parts(self) -> dict[int, Any]:
    """Waits for all other workers' parts.

    Returns:
      What each reported.

    Raises:
      CheckpointError: one cannot write its part, is gone, or is silent for too long.
    """
    others = range(1, self._cluster.size)

    def look() -> dict[int, Any]:
      for worker in others:
        failed = self._get(_failed(worker))
        if failed is not None:
          problem = failed.get("problem", "it could not write its part; its log says why")
          raise StorageError(f"{self._cluster.name(worker)}: {problem}")
      return {worker: self._get(_done(worker)) for worker in others}

    return {worker: found["parts"] for worker, found in self._wait_for(look).items()}

  def announce(self, problem: str | None, of_storage: bool = True) -> None:
    """Announces the outcome, waits until all workers have seen it, and removes the folder."""
    try:
      outcome = {"problem": problem, "of_storage": of_storage}
      self._put(_GIVEN_UP if problem else _PUBLISHED, outcome)
    except (tf.errors.OpError, OSError):
      pass  # A disk that is full still has an empty file of that name, which says enough.
    others = [w for w in range(1, self._cluster.size) if w not in self._silent]
    try:
      # Also a worker that is still at its part sees the outcome before the folder goes.
      self._wait_for(lambda: {w: self._get(_seen(w)) for w in others}, ignore_gone=True)
    except (CheckpointError, WorkerLostError):
      pass  # It hangs, and nobody waits for it any more.
    with contextlib.suppress(tf.errors.OpError, OSError):
      folder_lib.remove_tree(os.path.dirname(self.folder), self.folder)

  # ------------------------------------------------------------------------------ both

  def _wait_for(
    self, look: Callable[[], dict[int, Any]], ignore_gone: bool = False
  ) -> dict[int, Any]:
    """Polls `look` until it has a value for each worker, or (`ignore_gone`) each that is alive."""
    pause, longest = _POLL_SECONDS
    last_change = last_call = time.monotonic()
    seen = None
    gone: list[int] = []
    while True:
      found = look()
      missing = [w for w, value in found.items() if value is None and w not in gone]
      if not missing:
        return found
      names = ", ".join(self._cluster.name(worker) for worker in missing)
      if self._abandoned.is_set():
        raise CheckpointError(f"{names}: waiting for it was given up")
      now = time.monotonic()
      sizes = self._sizes()
      if sizes != seen:
        seen, last_change = sizes, now
      if now - last_change > self._timeout:
        self._silent.update(missing)
        raise CheckpointError(
          f"{names}: no sign of it for {self._timeout:.0f} s in {self.folder}; all workers must "
          "see the same folder"
        )
      if now - last_call > _SECONDS_BETWEEN_CALLS:
        lost = [worker for worker in missing if not workers.listens(self._cluster, worker)]
        # A last message of it may have arrived since.
        if lost and not ignore_gone and any(look()[worker] is None for worker in lost):
          names = ", ".join(self._cluster.name(worker) for worker in lost)
          raise CheckpointError(f"{names}: it is gone; its log says why")
        gone += lost
        workers.check()  # TensorFlow also notices one that hangs.
        last_call = time.monotonic()
      self._abandoned.wait(pause)
      # A small checkpoint is there at once; for a large one the folder is not asked all the time.
      pause = min(1.3 * pause, longest)

  def _sizes(self) -> Any:
    try:
      names = sorted(tf.io.gfile.listdir(self.folder))
      return [(n, tf.io.gfile.stat(os.path.join(self.folder, n)).length) for n in names]
    except tf.errors.OpError:
      return None  # Not made yet, or a file has just got another name.

  def _exists(self, name: str) -> bool:
    return bool(tf.io.gfile.exists(os.path.join(self.folder, name)))

  def _get(self, name: str) -> dict[str, Any] | None:
    try:
      with tf.io.gfile.GFile(os.path.join(self.folder, name)) as f:
        content = f.read()
    except tf.errors.NotFoundError:
      return None
    try:
      found: dict[str, Any] = untrusted.expect(untrusted.parse(content), _FORM)
      return found
    except ValueError:
      return {}  # There was no space left for more than the name.

  def _put(self, name: str, content: Mapping[str, object]) -> None:
    path = os.path.join(self.folder, name)
    temporary = f"{path}.of-{self._cluster.index}"
    folder_lib.make(os.path.dirname(self.folder), self.folder)
    try:
      with tf.io.gfile.GFile(temporary, "w") as f:
        f.write(json.dumps(content))
    except tf.errors.OpError:
      with contextlib.suppress(tf.errors.OpError):  # An empty one says that there is no space.
        folder_lib.rename(self.folder, temporary, path)
      raise
    folder_lib.rename(self.folder, temporary, path)


def _done(worker: int) -> str:
  return f"worker-{worker:05}.done"


def _seen(worker: int) -> str:
  return f"worker-{worker:05}.seen"


def _failed(worker: int) -> str:
  return f"worker-{worker:05}.failed"


# ------------------------------------------------------------------- in the main thread


def of_chief(value: Any) -> Any:
  """The chief's value, in every worker; all call it at the same place of their programs.

  Args:
    value: a JSON value; those of workers other than the chief are ignored.
  """
  if workers.current().size == 1:
    return value
  own = json.dumps(value) if workers.current().is_chief else ""
  return json.loads(texts.gather_texts(own)[0])


def raise_together(what: str, error: Exception | None) -> None:
  """Raises an error in every worker if there is one in any.

  Args:
    what: name of the action, for the error of workers that succeeded.
    error: error of this worker, or None.

  Raises:
    CheckpointError: naming the worker; in a worker that has an error, that one. It is a
      `DamagedCheckpointError`, `NewerFormatError` or `StorageError` in all of them if it is in one.
  """
  own = next((kind.__name__ for kind in _KINDS if isinstance(error, kind)), "")
  said = texts.gather_texts(json.dumps([own, str(error)]) if error is not None else "")
  failed = [i for i, text in enumerate(said) if text]
  if not failed:
    return
  workers.all_have_heard()
  if error is None:
    cluster = workers.current()
    kinds, problems = zip(*(json.loads(said[i]) for i in failed))
    text = f"{what}: {cluster.names(failed)} failed: {problems[0]}"
    error = next((k for k in _KINDS if k.__name__ in kinds), CheckpointError)(text)
  raise told_to_all(error)


def told_to_all(error: _Error) -> _Error:
  """Marks an error that every worker raises: a worker that exits with it is not taken for lost.

  Args:
    error: the error; its attribute `told_to_all` is set.
  """
  setattr(error, "told_to_all", True)  # noqa: B010 - of any class, TensorFlow's among them
  return error
