"""The files of a folder of checkpoints: names, order, the `checkpoint` state file, remains.

A checkpoint `model.ckpt-N` is whole as soon as its index file is there: that one is written last
and removed first.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import zlib
from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.errors import CheckpointError, DamagedCheckpointError

_LOG = logging.getLogger("mesh_tensorflow")

NAME = "model.ckpt-"
INDEX = ".index"
MANIFEST = ".manifest"
# What a program adds to a checkpoint: "model.ckpt-7.with-<name>", each from one worker.
ATTACHED = ".with-"
_STATE = "checkpoint"
_TEMPORARY = ".unfinished-"
_INDEX = re.compile(re.escape(NAME) + r"(\d+)\.index")
_DATA = re.compile(r"(.*)\.data-(\d{5})-of-(\d{5})")
# The first line of a state file that this package wrote; to TensorFlow it is a comment.
_CHECKSUM = re.compile(rb"# crc32 ([0-9a-f]{8})\n")


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


def candidates(directory: str) -> list[str]:
  """The checkpoints of a folder in the order in which to try them, the best first.

  These are the ones that the state file lists, the newest first, then the others by descending
  step. Of files that are missing or damaged only an index that is not there is noticed here.

  Args:
    directory: a folder; it need not exist.

  Raises:
    DamagedCheckpointError: the state file names checkpoints, and there are none.
  """
  state = read_state(directory)
  listed = state.paths[::-1] if state else []
  there = [p for p in listed if tf.io.gfile.exists(p + INDEX)]
  result = there + [p for p in all_checkpoints(directory)[::-1] if p not in there]
  if listed and listed[0] not in there:
    problem = (
      f"{os.path.join(directory, _STATE)} names {listed[0]} as the newest checkpoint, but "
      f"{listed[0]}{INDEX} is missing; "
    )
    if not result:
      raise DamagedCheckpointError(problem + advice(directory))
    _LOG.warning("%sthe next one is %s", problem, result[0])
  return result


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


def damaged(prefix: str, what: str) -> DamagedCheckpointError:
  """The error for a damaged checkpoint."""
  error = DamagedCheckpointError(
    f"checkpoint {prefix} is damaged: {what}; {advice(os.path.dirname(prefix) or '.', prefix)}"
  )
  error.what = what
  return error


def data_files(prefix: str) -> list[str]:
  """The data files of a checkpoint.

  Raises:
    DamagedCheckpointError: one or all are missing.
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
      raise damaged(prefix, f"{file} is missing")
  return files


def remove_checkpoint(prefix: str) -> None:
  """Deletes the files of a checkpoint, the index first."""
  directory, name = os.path.split(prefix)
  directory = directory or "."
  own = [name + INDEX, name + MANIFEST, name + ".meta"]
  for file in own + [f for f in _list(directory) if f not in own and belongs_to(f, name)]:
    path = os.path.join(directory, file)
    if tf.io.gfile.exists(path):
      tf.io.gfile.remove(path)


def belongs_to(file: str, name: str) -> bool:
  """Whether a file is one of those that hold the content of the checkpoint `name`."""
  match = _DATA.fullmatch(file)
  return file.startswith(name + ATTACHED) or bool(match) and match.group(1) == name


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
  """Reads the state file; None if there is none, or it is damaged, which is logged."""
  path = os.path.join(directory, _STATE)
  if not tf.io.gfile.exists(path):
    return None
  with tf.io.gfile.GFile(path, "rb") as f:
    content = f.read()
  if _is_as_written(content):
    try:
      state = tf.train.get_checkpoint_state(directory)
    except (tf.errors.OpError, ValueError):
      state = None
    if state is not None and state.model_checkpoint_path:
      newest = state.model_checkpoint_path
      paths = [p for p in state.all_model_checkpoint_paths if p != newest] + [newest]
      times = list(state.all_model_checkpoint_timestamps)
      if len(times) != len(paths):
        times = [0.0] * len(paths)
      return State(paths, times, state.last_preserved_timestamp)
  _LOG.warning("%s is damaged; it is ignored, and the files of the folder decide", path)
  return None


def _is_as_written(content: bytes) -> bool:
  """Whether a state file has its checksum; those of TensorFlow have none, and no comment."""
  match = _CHECKSUM.match(content)
  if match:
    return int(match.group(1), 16) == zlib.crc32(content[match.end() :])
  return b"#" not in re.sub(rb'"[^"\n]*"', b"", content)


def write_state(directory: str, state: State) -> None:
  """Replaces the state file in one step; TensorFlow's own functions read it."""
  names = [os.path.relpath(p, directory) for p in state.paths]
  lines = [f'model_checkpoint_path: "{names[-1]}"'] if names else []
  lines += [f'all_model_checkpoint_paths: "{n}"' for n in names]
  lines += [f"all_model_checkpoint_timestamps: {t!r}" for t in state.times]
  lines += [f"last_preserved_timestamp: {state.last_preserved!r}"]
  content = ("\n".join(lines) + "\n").encode()
  temporary = os.path.join(directory, f"{_TEMPORARY}{_STATE}")
  with tf.io.gfile.GFile(temporary, "wb") as f:
    f.write(b"# crc32 %08x\n" % zlib.crc32(content) + content)
  sync(temporary)
  tf.io.gfile.rename(temporary, os.path.join(directory, _STATE), overwrite=True)


# ------------------------------------------------------------------------- remains


def temporary_folder(directory: str, step: int, mark: str = "") -> str:
  """Where a checkpoint is written before it becomes visible; `mark` tells several runs apart."""
  return os.path.join(directory, f"{_TEMPORARY}{NAME}{step}{mark}")


def token_file(directory: str, mark: str) -> str:
  """A file by which workers look whether they see the same folder."""
  return os.path.join(directory, f"{_TEMPORARY}test-{mark}")


def publish(folder: str, directory: str, step: int) -> str:
  """Moves a whole checkpoint from its temporary folder to its place, the index last.

  Args:
    folder: the temporary folder; files of other names stay there.
    directory: folder of the checkpoints.
    step: of the checkpoint.

  Returns:
    The path of the checkpoint.
  """
  name = f"{NAME}{step}"
  prefix = os.path.join(directory, name)
  if tf.io.gfile.exists(prefix + INDEX):
    # Between the renames below a reader would find data of one and index of the other.
    state = read_state(directory)
    if state is not None and prefix in state.paths:
      i = state.paths.index(prefix)
      del state.paths[i], state.times[i]
      if state.paths:
        write_state(directory, state)
      else:
        tf.io.gfile.remove(os.path.join(directory, _STATE))
    remove_checkpoint(prefix)
  files = [f for f in _list(folder) if belongs_to(f, name)]
  for file in [*files, name + MANIFEST, name + INDEX]:
    tf.io.gfile.rename(os.path.join(folder, file), os.path.join(directory, file), overwrite=True)
  sync(directory)
  return prefix


def remove_remains(directory: str, keep: str | None = None) -> None:
  """Deletes what a killed run left: temporary files, and data without an index.

  Args:
    directory: folder of the checkpoints.
    keep: a temporary folder to leave alone.
  """
  names = _list(directory)
  for name in names:
    path = os.path.join(directory, name)
    if name.startswith(_TEMPORARY):
      if path != keep:
        remove_folder(path)
      continue
    step = re.match(re.escape(NAME) + r"\d+", name)
    owner = step.group() if step else ""
    if owner and (name == owner + MANIFEST or belongs_to(name, owner)):
      if owner + INDEX not in names:
        tf.io.gfile.remove(path)


def remove_folder(path: str) -> None:
  """Deletes a file or folder, if it is there."""
  if tf.io.gfile.exists(path):
    (tf.io.gfile.rmtree if tf.io.gfile.isdir(path) else tf.io.gfile.remove)(path)


def remove_if_possible(path: str) -> None:
  """Deletes a file, unless the file system does not let it."""
  try:
    tf.io.gfile.remove(path)
  except tf.errors.OpError:
    pass


def sync(path: str) -> None:
  """Makes sure that the content of a local file survives a loss of power."""
  if "://" not in path:
    descriptor = os.open(path, os.O_RDONLY)
    try:
      os.fsync(descriptor)
    finally:
      os.close(descriptor)


def _list(directory: str) -> Sequence[str]:
  if not tf.io.gfile.isdir(directory or "."):
    return []
  return [n.rstrip("/") for n in tf.io.gfile.listdir(directory or ".")]
