"""Selection of the checkpoints that a mode works on."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import gin
import tensorflow as tf

from mesh_tensorflow import checkpoint as checkpoint_lib
from mesh_tensorflow.arguments.declared import COUNT_OR_ZERO, affects, takes
from mesh_tensorflow.checkpoint import restoring, verification
from mesh_tensorflow.checkpoint.by_chief import by_chief
from mesh_tensorflow.errors import CheckpointError, ConfigError, DamagedCheckpointError
from mesh_tensorflow.training.best_checkpoint import best_checkpoint
from mesh_tensorflow.training.state import FewCheckpointsError
from mesh_tensorflow.transformer.training.trainer import Trainer

_LOG = logging.getLogger("mesh_tensorflow")
_SECONDS_BETWEEN_LOOKS = 1.0

# A step, several, or one of the words below.
CheckpointStep: TypeAlias = int | str | Sequence[int] | None

# Steps that do not name a checkpoint, but stand for what is in the folder now, or will be.
_ALL, _NEW, _BEST = "all", "new", "best"

_MODULE = "mesh_tensorflow.transformer.utils"
_ITERATOR = f"{_MODULE}.get_checkpoint_iterator"
_STEPS_SHOWN = 20  # In an error.


@gin.configurable(module=_MODULE)
@affects("report")
@takes(skip_until=COUNT_OR_ZERO)
def get_checkpoint_iterator(
  checkpoint_step: CheckpointStep,
  model_dir: str,
  skip_until: int = 0,
  stop_after: int | None = None,
  find_closest: bool = True,
) -> Iterable[str | None]:
  """Paths of checkpoints; several workers must all call it, and get the same.

  Args:
    checkpoint_step: "all": every one; -1: the newest good one; "new" or None: new good ones as they
      appear, endlessly; "best": the one that was best in the evaluations of its training, by
      `run.best_metric` (`run.keep_best`); a step, or a list of steps.
    model_dir: the folder.
    skip_until: for "all" and "new": only checkpoints after this step.
    stop_after: for "new": end after the first checkpoint of at least this step.
    find_closest: whether a step without checkpoint stands for the closest one. (The modes of
      `run` say False, unless gin binds it.)

  Raises:
    CheckpointError: there is no such checkpoint.
    ConfigError: a `checkpoint_step` that is none of these; or "best", and nothing was evaluated.
    DamagedCheckpointError: for -1: all checkpoints are damaged. (Those of "all" and of steps are
      looked at when they are restored.)
  """
  if checkpoint_step is None or checkpoint_step == _NEW:
    return _watch(model_dir, skip_until, stop_after)
  if checkpoint_step == -1:
    return [restoring.newest_good(model_dir)]
  if checkpoint_step == _BEST:
    return [best_checkpoint(model_dir)]
  steps: list[int] = by_chief(lambda: _steps_in(model_dir))

  def path(step: int) -> str:
    return os.path.join(model_dir, f"model.ckpt-{step}")

  if checkpoint_step == _ALL:
    return [path(s) for s in steps if s > skip_until]
  wanted: Sequence[Any]  # Numbers, as is checked.
  wanted = checkpoint_step if isinstance(checkpoint_step, (list, tuple)) else [checkpoint_step]
  if not all(isinstance(w, int) for w in wanted):
    raise ConfigError(
      f"checkpoint step {checkpoint_step!r} is unknown: use a step, a list of steps, -1 (the "
      "newest), 'best', 'all' or 'new' (as they appear)"
    )
  if find_closest:
    if not steps:
      raise CheckpointError(f"there is no checkpoint (model.ckpt-<step>) in {model_dir}")

    def closest(step: int) -> int:
      # Of two that are equally near, the earlier one.
      return min(steps, key=lambda s: (abs(s - step), s))

    found = sorted({closest(w) for w in wanted})
  else:
    found = [w for w in wanted if w in steps]
    if not found:
      raise _missing(wanted, steps, model_dir)
  return [path(s) for s in found]


def _missing(wanted: Sequence[int], steps: Sequence[int], model_dir: str) -> CheckpointError:
  """The error for steps of which a folder has no checkpoint."""
  if not steps:
    return CheckpointError(f"there is no checkpoint (model.ckpt-<step>) in {model_dir}")
  what = f"step {wanted[0]}" if len(wanted) == 1 else f"steps {', '.join(map(str, wanted))}"
  return CheckpointError(
    f"there is no checkpoint of {what} in {model_dir}; there are those of {_listed(steps)}. Give "
    "one of these; without a step (--checkpoint=newest) the newest is taken"
  )


def _listed(steps: Sequence[int]) -> str:
  """Steps, those in the middle left out if there are many."""
  half = _STEPS_SHOWN // 2
  if len(steps) <= _STEPS_SHOWN:
    return ", ".join(map(str, steps))
  ends = [", ".join(map(str, part)) for part in (steps[:half], steps[-half:])]
  return f"{ends[0]}, ... {ends[1]} ({len(steps)} of them)"


def named_checkpoints(checkpoint_step: CheckpointStep, model_dir: str) -> Iterable[str | None]:
  """`get_checkpoint_iterator` of steps that a user named: all must be there.

  Unless gin binds `find_closest`.

  Args:
    checkpoint_step: see `get_checkpoint_iterator`.
    model_dir: the folder.

  Raises:
    CheckpointError: there is none of a step; the error lists those that are there.
  """
  if "find_closest" in gin.get_bindings(_ITERATOR, resolve_references=False):
    return get_checkpoint_iterator(checkpoint_step, model_dir)
  named: Sequence[Any]
  named = checkpoint_step if isinstance(checkpoint_step, (list, tuple)) else [checkpoint_step]
  if checkpoint_step != -1 and all(isinstance(n, int) for n in named):
    steps = by_chief(lambda: _steps_in(model_dir))
    missing = [n for n in named if n not in steps]
    if missing:
      raise _missing(missing, steps, model_dir)
  return get_checkpoint_iterator(checkpoint_step, model_dir, find_closest=False)


def _steps_in(model_dir: str) -> list[int]:
  return [checkpoint_lib.get_step_from_path(p) for p in checkpoint_lib.all_checkpoints(model_dir)]


def _watch(model_dir: str, skip_until: int, stop_after: int | None) -> Iterator[str | None]:
  content: list[str] | None = None
  while True:
    # The chief looks for all: workers that look by themselves may see different checkpoints.
    content = by_chief(functools.partial(_wait_for_change, model_dir, content))
    try:
      path = restoring.newest_good(model_dir)
    except DamagedCheckpointError as e:
      _LOG.warning("waiting for the next checkpoint: %s", e)
      continue
    step = checkpoint_lib.get_step_from_path(path) if path else skip_until
    # The change was no newer checkpoint; for example an old one was deleted.
    if step <= skip_until:
      continue
    skip_until = step
    if stop_after is None or step <= stop_after:
      yield path
    if stop_after is not None and step >= stop_after:
      return


def _wait_for_change(model_dir: str, before: list[str] | None) -> list[str]:
  while (content := _content(model_dir)) == before:
    time.sleep(_SECONDS_BETWEEN_LOOKS)
  return content


def _content(model_dir: str) -> list[str]:
  """Fingerprint of a folder's checkpoints: changes when one is added; reads no checkpoint."""
  names = checkpoint_lib.all_checkpoints(model_dir)
  # The state file is written last, when a checkpoint is whole. What it says, not when it was
  # written: the clocks of some file systems are so coarse that two of the same size look alike.
  try:
    with tf.io.gfile.GFile(os.path.join(model_dir, "checkpoint"), "rb") as state:
      return [*names, state.read().decode(errors="replace")]
  except tf.errors.OpError:
    return names


def restored_checkpoints(
  estimator: Trainer,
  checkpoint_step: CheckpointStep,
  model_dir: str,
  paths: Iterable[str] | None = None,
) -> Iterator[str]:
  """Restores one checkpoint after the other.

  Of all, or of those to come, the ones that are damaged, or are deleted by then, or have fewer
  before them than are to be averaged, are left out; a warning names them.

  Args:
    estimator: a `Trainer`.
    checkpoint_step: see `get_checkpoint_iterator`; None is the newest.
    model_dir: folder of checkpoints.
    paths: checkpoints to restore in place of those.

  Yields:
    The path of each, when `estimator` holds it.

  Raises:
    ConfigError: there is none.
    CheckpointError: there is none of a step that was asked for; the error lists those that are.
    DamagedCheckpointError: one that was asked for by its step or path is damaged; or all are.
    FewCheckpointsError: there are fewer before it, or all in all, than are to be averaged.
  """
  step = -1 if checkpoint_step is None else checkpoint_step
  may_skip = not paths and step in (_ALL, _NEW)
  restored = 0
  left_out: list[str] = []
  few: FewCheckpointsError | None = None
  for path in paths or named_checkpoints(step, model_dir):
    if path is None:
      break
    try:
      estimator.restore_for_inference(path)
    except CheckpointError as e:
      is_unfit = isinstance(e, (DamagedCheckpointError, FewCheckpointsError))
      if not may_skip or not (is_unfit or _is_gone(path)):
        raise
      _LOG.warning("left out: %s", e)
      few = e if isinstance(e, FewCheckpointsError) else few
      if isinstance(e, DamagedCheckpointError):
        left_out.append(e.what or str(e))
    else:
      restored += 1
      yield path
  if not restored and left_out:
    raise verification.all_damaged(model_dir, left_out)
  if not restored and few is not None:
    raise few
  if not restored and step != _NEW:
    raise ConfigError(f"there is no checkpoint in {model_dir}; train first")


def _is_gone(path: str) -> bool:
  return bool(by_chief(lambda: not tf.io.gfile.exists(path + ".index")))
