"""A TensorFlow profile of some steps of a training, and the table of what they spend time on."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
import re
from collections.abc import Callable, Iterator

import tensorflow as tf

from mesh_tensorflow.checkpoint import folder as folder_lib
from mesh_tensorflow.training import model_files, profile_table

_LOG = logging.getLogger("mesh_tensorflow")

_ROWS = 10
# Where TensorFlow's profiler writes in the folder that it is given.
_FOLDER = os.path.join("plugins", "profile")
# Reading is Python's work: a second for ten megabytes.
_MOST_BYTES = 300_000_000
# The loop of steps, which all operations of a step are in; and what TensorFlow puts behind a name.
_LOOP = re.compile(r"^(Func/)?while/body/(_\d+/)?(while/)?|(/_\d+)+$")
# They hand tensors on; how long they wait for them is no work.
_BETWEEN = re.compile(r"_?(Host)?(Send|Recv)|LoopCond|Enter|Exit|NextIteration|Merge|Switch")


class StepsProfile:
  """The profile of the steps behind `first`, up to `last`.

  Args:
    steps: (first, last), in numbers of steps done; None: there is no profile.
    model_dir: the folder of the model, in which TensorBoard looks for profiles; None: no profile.
    say: gets the table.
  """

  def __init__(
    self, steps: tuple[int, int] | None, model_dir: str | None, say: Callable[[str], None]
  ):
    self._steps = steps if model_dir else None
    self._folder = model_dir or ""
    self._say = say
    self._began: int | None = None

  @property
  def ends(self) -> tuple[int, ...]:
    """Step numbers at which calls of the program must end."""
    return self._steps or ()

  def before_call(self, step: int) -> None:
    """Starts the profile, if it is time.

    Args:
      step: number of steps done.
    """
    if self._steps is None or self._began is not None or not self._within(step):
      return
    started: list[bool] = []
    with self._told():
      folder_lib.inside(self._folder, os.path.join(self._folder, _FOLDER, "any"))
      tf.profiler.experimental.start(self._folder)
      started.append(True)
    if started:
      self._began = step
    else:
      self._steps = None

  def after_call(self, step: int) -> None:
    """Ends the profile, if it is time, and tells what is in it.

    Args:
      step: number of steps done.
    """
    if self._began is not None and self._steps is not None and step >= self._steps[1]:
      self._end(step)

  def close(self, step: int) -> None:
    """Ends a running profile.

    Args:
      step: number of steps done.
    """
    if self._began is not None:
      self._end(step)

  def _within(self, step: int) -> bool:
    return self._steps is not None and self._steps[0] <= step < self._steps[1]

  def _end(self, step: int) -> None:
    began, self._began, self._steps = self._began or 0, None, None
    with self._told():
      tf.profiler.experimental.stop()
      self._say(self._table(began, step))

  def _table(self, began: int, step: int) -> str:
    where = f"profile of steps {began + 1} to {step} in {os.path.join(self._folder, _FOLDER)}"
    local = folder_lib.local_path(self._folder)
    path = profile_table.find_profile(pathlib.Path(local, _FOLDER)) if local else None
    if step <= began or path is None or path.stat().st_size > _MOST_BYTES:
      return where
    try:
      by_name, _ = profile_table.read(path)
    except profile_table.ProfileError as e:
      return f"{where} ({e})"
    found = [_named(e) for e in by_name if not _BETWEEN.match(e.kind)]
    return f"{where}\n{profile_table.table('operations', found, step - began, _ROWS)}"

  @contextlib.contextmanager
  def _told(self) -> Iterator[None]:
    """Inside it, what goes wrong is told, and training goes on."""
    try:
      with model_files.errors_of_writing(self._folder, "a profile"):
        yield
    except Exception as e:  # noqa: BLE001 - of a profiler that runs already, a full disk, a link.
      _LOG.warning("run.profile_steps: no profile: %s", e)


def _named(entry: profile_table.Entry) -> profile_table.Entry:
  """An entry under the name that the operation has in a step, with its type."""
  return dataclasses.replace(entry, name=f"{_LOOP.sub('', entry.name)} ({entry.kind})")
