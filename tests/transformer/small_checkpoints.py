"""Checkpoints of one number, for tests that choose among several."""

from __future__ import annotations

import pathlib

import tensorflow as tf


def write(folder: pathlib.Path, step: int, newest: bool = True) -> str:
  """Writes `model.ckpt-<step>`; returns its path.

  Args:
    folder: where.
    step: of the checkpoint.
    newest: whether the state file names it.
  """
  path = str(folder / f"model.ckpt-{step}")
  tf.raw_ops.SaveV2(
    prefix=path, tensor_names=["x"], shape_and_slices=[""], tensors=[tf.constant(float(step))]
  )
  if newest:
    (folder / "checkpoint").write_text(f'model_checkpoint_path: "model.ckpt-{step}"\n')
  return path


def damage(path: str) -> str:
  """Cuts the data of a checkpoint; returns the name of that file."""
  data = pathlib.Path(f"{path}.data-00000-of-00001")
  data.write_bytes(data.read_bytes()[:-1])
  return str(data)
