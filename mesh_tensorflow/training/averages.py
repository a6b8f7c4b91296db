"""Use of the moving averages as weights: read from a checkpoint, or swapped in temporarily."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import tensorflow as tf

from mesh_tensorflow import checkpoint as checkpoint_lib
from mesh_tensorflow import optimize
from mesh_tensorflow.checkpoint.by_chief import by_chief
from mesh_tensorflow.errors import CheckpointError
from mesh_tensorflow.meshes.store import VariableStore


def names_in(path: str) -> Callable[[str], str]:
  """Maps variables to names in a checkpoint: the moving average, or the variable if it has none.

  Args:
    path: a checkpoint, or a folder with checkpoints.

  Returns:
    A function from the name of a variable to the name under which to read it.

  Raises:
    CheckpointError: the checkpoint has no averages.
  """
  names: list[str] = by_chief(lambda: sorted(checkpoint_lib.describe(path)))
  there = set(names)
  if not any(optimize.averaged_name(n) in there for n in names):
    raise CheckpointError(
      f"run.use_ema is True, but {path} has no averages of weights: they are kept if run.ema_decay "
      "is bound while the model is trained"
    )

  def name_in_checkpoint(name: str) -> str:
    average = optimize.averaged_name(name)
    return average if average in there else name

  return name_in_checkpoint


@contextlib.contextmanager
def in_place(store: VariableStore) -> Iterator[None]:
  """Context manager that swaps in the weights' moving averages, and restores the weights.

  Args:
    store: the variables. Those that have no average stay as they are.
  """
  weights: list[tuple[tf.Variable, tf.Tensor]] = []
  try:
    for name in store.names:
      if optimize.averaged_name(name) not in store:
        continue
      # Slice by slice, each on its device.
      averages = store[optimize.averaged_name(name)].slices
      for weight, average in zip(store[name].slices, averages):
        with tf.device(weight.device):
          weights.append((weight, tf.identity(weight)))
          weight.assign(tf.cast(average, weight.dtype))
    yield
  finally:
    for weight, value in weights:
      with tf.device(weight.device):
        weight.assign(value)
