"""The files of a folder of checkpoints: names, order, the `checkpoint` state file, remains.

A checkpoint `model.ckpt-N` is whole as soon as its index file is there: that one is written last
and removed first.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.errors import CheckpointError

NAME = "model.ckpt-"
_STATE = "checkpoint"
_TEMPORARY = ".unfinished-"
_INDEX = re.compile(re.escape(NAME) + r"(\d+)\.index")
_DATA = re.compile(r"(.*)\.data-(\d{5})-of-(\d{5})")


def get_step_from_path(path: str) -> int:
  """The step in the name of a checkpoint ("dir/model.ckpt-20", also with a suffix).

  Args:
    path: a path of a checkpoint.

  Raises:
    CheckpointError: there is none.
  """
  match = re.search(re.escape(NAME) + r"(\d+)", os.path.basename(path))
  if not match:
    raise CheckpointError(f"there is no step in {path!r}: its name must contain '{NAME}<number>'")
  return int(match.group(1))


def all_checkpoints(directory: str) -> list[str]:
  """The checkpoints `directory/model.ckpt-N`, by ascending step."""
  steps = [int(m.group(1)) for m in map(_INDEX.fullmatch, _list(directory)) if m]
  return [os.path.join(directory, f"{NAME}{n}") for n in sorted(steps)]


def latest_checkpoint(directory: str) -> str | None:
  """The newest checkpoint: the one the state file names, else the one of the largest step.

  Args:
    directory: a folder; it need not exist.

  Returns:
    Its path without suffix; None if there is no checkpoint.

  Raises:
    CheckpointError: the state file names a checkpoint that is not there.
  """
  state = read_state(directory)
  if state is None:
    return (all_checkpoints(directory) or [None])[-1]
  if not tf.io.gfile.exists(state.paths[-1] + ".index"):
    raise CheckpointError(
      f"{os.path.join(directory, _STATE)} names {state.paths[-1]} as the newest checkpoint, but "
      f"{state.paths[-1]}.index is missing; {advice(directory)}"
    )
  return state.paths[-1]


def advice(directory: str, without: str | None = None) -> str:
  """What an error about a bad checkpoint says at its end."""
  others = [os.path.basename(p) for p in all_checkpoints(directory) if p != without]
  if not others:
    return "there is no other checkpoint in that folder"
  remove = "" if without is None else f"{without}.* and "
  return (
    f"others in that folder: {', '.join(others)}; give the path of one, or delete {remove}"
    f"{os.path.join(directory, _STATE)} to go on from {others[-1]}"
  )


def data_files(prefix: str) -> list[str]:
  """The data files of a checkpoint.

  Raises:
    CheckpointError: one or all are missing.
  """
  directory = os.path.dirname(prefix) or "."
  found = {}
  for name in _list(directory):
    match = _DATA.fullmatch(name)
    if match and match.group(1) == os.path.basename(prefix):
      found.setdefault(int(match.group(3)), set()).add(int(match.group(2)))
  # Two sets of files can only be there when somebody copied one checkpoint over another.
  count = next((n for n, shards in found.items() if len(shards) == n), max(found, default=1))
  files = [f"{prefix}.data-{i:05}-of-{count:05}" for i in range(count)]
  for i, file in enumerate(files):
    if i not in found.get(count, ()):
      raise CheckpointError(
        f"checkpoint {prefix} is damaged: {file} is missing; {advice(directory, prefix)}"
      )
  return files


def remove_checkpoint(prefix: str) -> None:
  """Deletes the files of a checkpoint, the index first."""
  directory, name = os.path.split(prefix)
  directory = directory or "."
  own = [f for f in _list(directory) if f == name + ".meta" or _is_data_of(f, name)]
  for file in [name + ".index", *own]:
    path = os.path.join(directory, file)
    if tf.io.gfile.exists(path):
      tf.io.gfile.remove(path)


# ------------------------------------------------------------------------ state file


@dataclasses.dataclass
class State:
  """What the file `checkpoint` says.

  Attributes:
    paths: checkpoints, the newest last; with the folder.
    times: when each was written, seconds.
    last_preserved: when the newest of the checkpoints that are kept forever was written.
  """

  paths: list[str]
  times: list[float]
  last_preserved: float


def read_state(directory: str) -> State | None:
  """Reads the state file; None if there is none."""
  if not tf.io.gfile.exists(os.path.join(directory, _STATE)):
    return None
  state = tf.train.get_checkpoint_state(directory)
  if state is None or not state.model_checkpoint_path:
    raise CheckpointError(f"{os.path.join(directory, _STATE)} is damaged; {advice(directory)}")
  newest = state.model_checkpoint_path
  paths = [p for p in state.all_model_checkpoint_paths if p != newest] + [newest]
  times = list(state.all_model_checkpoint_timestamps)
  if len(times) != len(paths):
    times = [0.0] * len(paths)
  return State(paths, times, state.last_preserved_timestamp)


def write_state(directory: str, state: State) -> None:
  """Replaces the state file in one step; TensorFlow's own functions read it."""
  names = [os.path.relpath(p, directory) for p in state.paths]
  lines = [f'model_checkpoint_path: "{names[-1]}"'] if names else []
  lines += [f'all_model_checkpoint_paths: "{n}"' for n in names]
  lines += [f"all_model_checkpoint_timestamps: {t!r}" for t in state.times]
  lines += [f"last_preserved_timestamp: {state.last_preserved!r}"]
  temporary = os.path.join(directory, f"{_TEMPORARY}{_STATE}")
  with tf.io.gfile.GFile(temporary, "w") as f:
    f.write("\n".join(lines) + "\n")
  sync(temporary)
  tf.io.gfile.rename(temporary, os.path.join(directory, _STATE), overwrite=True)


# ------------------------------------------------------------------------- remains


def temporary_folder(directory: str, step: int) -> str:
  """Where a checkpoint is written before it becomes visible."""
  return os.path.join(directory, f"{_TEMPORARY}{NAME}{step}")


def publish(folder: str, directory: str, step: int) -> str:
  """Moves a whole checkpoint from its temporary folder to its place, the index last.

  Returns:
    The path of the checkpoint.
  """
  prefix = os.path.join(directory, f"{NAME}{step}")
  if tf.io.gfile.exists(prefix + ".index"):
    # Between the two renames below a reader would find data of one and index of the other.
    state = read_state(directory)
    if state is not None and prefix in state.paths:
      i = state.paths.index(prefix)
      del state.paths[i], state.times[i]
      if state.paths:
        write_state(directory, state)
      else:
        tf.io.gfile.remove(os.path.join(directory, _STATE))
    remove_checkpoint(prefix)
  names = sorted(_list(folder), key=lambda n: n.endswith(".index"))
  for name in names:
    sync(os.path.join(folder, name))
    tf.io.gfile.rename(os.path.join(folder, name), os.path.join(directory, name), overwrite=True)
  tf.io.gfile.rmtree(folder)
  return prefix


def remove_remains(directory: str) -> None:
  """Deletes what a killed run left: temporary files, and data files without an index."""
  for name in _list(directory):
    path = os.path.join(directory, name)
    data = _DATA.fullmatch(name)
    if name.startswith(_TEMPORARY):
      remove_folder(path)
    elif data and _INDEX.fullmatch(data.group(1) + ".index"):
      if not tf.io.gfile.exists(os.path.join(directory, data.group(1) + ".index")):
        tf.io.gfile.remove(path)


def remove_folder(path: str) -> None:
  """Deletes a file or folder, if it is there."""
  if tf.io.gfile.exists(path):
    (tf.io.gfile.rmtree if tf.io.gfile.isdir(path) else tf.io.gfile.remove)(path)


def sync(path: str) -> None:
  """Makes sure that the content of a local file survives a loss of power."""
  if "://" not in path:
    descriptor = os.open(path, os.O_RDONLY)
    try:
      os.fsync(descriptor)
    finally:
      os.close(descriptor)


def _is_data_of(file: str, name: str) -> bool:
  match = _DATA.fullmatch(file)
  return bool(match) and match.group(1) == name


def _list(directory: str) -> Sequence[str]:
  if not tf.io.gfile.isdir(directory or "."):
    return []
  return [n.rstrip("/") for n in tf.io.gfile.listdir(directory or ".")]
