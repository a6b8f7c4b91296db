"""Which checkpoints of a folder a mode works on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import gin
import tensorflow as tf

from mesh_tensorflow.errors import CheckpointError
from mesh_tensorflow.transformer.text_io import get_step_from_checkpoint_path


@gin.configurable(module="mesh_tensorflow.transformer.utils")
def get_checkpoint_iterator(
  checkpoint_step: Any,
  model_dir: str,
  skip_until: int = 0,
  stop_after: int | None = None,
  find_closest: bool = True,
) -> Iterable[str | None]:
  """Paths of checkpoints.

  Args:
    checkpoint_step: "all": every one; -1: the newest; None: new ones as they appear, endlessly;
      a step, or a list of steps.
    model_dir: the folder.
    skip_until: for "all" and None: only checkpoints after this step.
    stop_after: for None: end after the first checkpoint of at least this step.
    find_closest: whether a step without checkpoint stands for the closest one.

  Raises:
    CheckpointError: there is no such checkpoint.
  """
  if checkpoint_step is None:
    return _watch(model_dir, skip_until, stop_after)
  if checkpoint_step == -1:
    return [tf.train.latest_checkpoint(model_dir)]
  steps = _steps_in(model_dir)
  path = lambda step: os.path.join(model_dir, f"model.ckpt-{step}")  # noqa: E731
  if checkpoint_step == "all":
    return [path(s) for s in steps if s > skip_until]
  wanted = checkpoint_step if isinstance(checkpoint_step, (list, tuple)) else [checkpoint_step]
  if find_closest:
    if not steps:
      raise CheckpointError(f"there is no checkpoint (model.ckpt-<step>) in {model_dir}")
    found = sorted({min(steps, key=lambda s: (abs(s - w), s)) for w in wanted})
  else:
    found = [w for w in wanted if w in steps]
    if not found:
      raise CheckpointError(
        f"there is no checkpoint of step {checkpoint_step} in {model_dir}; there are {steps}"
      )
  return [path(s) for s in found]


def _steps_in(model_dir: str) -> list[int]:
  names = tf.io.gfile.glob(os.path.join(model_dir, "model.ckpt-*.index"))
  return sorted(get_step_from_checkpoint_path(n) for n in names)


def _watch(model_dir: str, skip_until: int, stop_after: int | None) -> Iterator[str]:
  for path in tf.train.checkpoints_iterator(model_dir):
    step = get_step_from_checkpoint_path(path)
    if step <= skip_until:
      continue
    if stop_after is None or step <= stop_after:
      yield path
    if stop_after is not None and step >= stop_after:
      return
