"""The files of a folder of checkpoints: names, order, the `checkpoint` state file, remains.

A checkpoint `model.ckpt-N` is whole as soon as its index file is there: that one is written last
and removed first. What a state file names outside of its folder is refused: it is not read, and
nothing is changed there (see `folder`).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import zlib
from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.checkpoint import folder as folder_lib
from mesh_tensorflow.errors import CheckpointError, DamagedCheckpointError

_LOG = logging.getLogger("mesh_tensorflow")

NAME = "model.ckpt-"
INDEX = ".index"
MANIFEST = ".manifest"
# Attachments of a program to a checkpoint: "model.ckpt-7.with-<name>", each from one worker.
ATTACHED = ".with-"
_STATE = "checkpoint"
_TEMPORARY = folder_lib.TEMPORARY
_INDEX = re.compile(re.escape(NAME) + r"(0|[1-9][0-9]*)\.index")
_DATA = re.compile(r"(.*)\.data-([0-9]{5})-of-([0-9]{5})")
# The first line of a state file that this package wrote; to TensorFlow it is a comment.
_CHECKSUM = re.compile(rb"# crc32 ([0-9a-f]{8})\n")
# A text in a state file, as protocol buffers are written as text.
_QUOTED = re.compile(rb'"(?:[^"\\\n]|\\.)*"')
_SHOWN, _CHARACTERS_SHOWN = 3, 400  # Maximum names of a list in a message, characters of each.

# Refused entries that were logged already, to log them once: (state file, its entries).
_refused: set[tuple[str, ...]] = set()


def get_step_from_path(path: str) -> int:
  """The step in the name of a checkpoint ("dir/model.ckpt-20", also with a suffix).

  Args:
    path: a path of a checkpoint.

  Raises:
    CheckpointError: there is none.
  """
  match = re.search(re.escape(NAME) + r"([0-9]+)", os.path.basename(path))
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
    DamagedCheckpointError: the state file names checkpoints, and there are none in the folder.
  """
  state = read_state(directory)
  listed = state.paths[::-1] if state else []
  there = [p for p in listed if tf.io.gfile.exists(p + INDEX)]
  result = there + [p for p in all_checkpoints(directory)[::-1] if p not in there]
  if state is not None and state.outside and not result:
    raise DamagedCheckpointError(
      f"there is no checkpoint in {directory}; {_of_elsewhere(directory, state.outside)}"
    )
  if listed and listed[0] not in there:
    problem = (
      f"{os.path.join(directory, _STATE)} names {_shortened(listed[0])} as the newest checkpoint, "
      f"but {_shortened(listed[0] + INDEX)} is missing; "
    )
    if not result:
      raise DamagedCheckpointError(problem + advice(directory))
    _LOG.warning("%sthe next one is %s", problem, result[0])
  return result


def advice(directory: str, without: str | None = None) -> str:
  """End of an error message about a bad checkpoint: which others there are, and how to use one."""
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
  found: dict[int, set[int]] = {}
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


def remove_checkpoint(directory: str, prefix: str) -> None:
  """Deletes the files of a checkpoint, the index first.

  Args:
    directory: folder of the checkpoints.
    prefix: path of the checkpoint.

  Raises:
    StorageError: it is not inside the folder.
  """
  parent, name = os.path.split(prefix)
  own = [name + INDEX, name + MANIFEST, name + ".meta"]
  for file in own + [f for f in _list(parent) if f not in own and belongs_to(f, name)]:
    folder_lib.remove(directory, os.path.join(parent, file))


def attached_sizes(prefix: str) -> list[int]:
  """The sizes of the files that programs added to a checkpoint."""
  parent, name = os.path.split(prefix)
  added = [os.path.join(parent, f) for f in _list(parent) if f.startswith(name + ATTACHED)]
  return [tf.io.gfile.stat(f).length for f in added if tf.io.gfile.exists(f)]


def belongs_to(file: str, name: str) -> bool:
  """True if a file is a data file or an attachment of the checkpoint `name`."""
  match = _DATA.fullmatch(file)
  is_attached = file.startswith(name + ATTACHED) and "/" not in file
  return is_attached or match is not None and match.group(1) == name


# ------------------------------------------------------------------------ state file


@dataclasses.dataclass
class State:
  """Contents of the state file, `checkpoint`.

  Attributes:
    paths: checkpoints, the newest last; with the folder, in which they are.
    times: when each was written, seconds.
    last_preserved: when the newest of the checkpoints that are kept forever was written.
    outside: checkpoints that it names outside of the folder; nothing is done with them.
  """

  paths: list[str]
  times: list[float]
  last_preserved: float
  outside: tuple[str, ...] = ()


def read_state(directory: str) -> State | None:
  """Reads the state file; None if there is none, or it is damaged, which is logged.

  Checkpoints that it names outside of the folder are logged, too.
  """
  directory = directory or "."
  path = os.path.join(directory, _STATE)
  if not tf.io.gfile.exists(path):
    return None
  try:
    with tf.io.gfile.GFile(path, "rb") as f:
      content = f.read()
  except tf.errors.OpError as e:
    _LOG.warning("%s cannot be read (%s); the files of the folder decide", path, e.message)
    return None
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
      return _inside(directory, paths, times, state.last_preserved_timestamp)
  _LOG.warning("%s is damaged; it is ignored, and the files of the folder decide", path)
  return None


def _is_as_written(content: bytes) -> bool:
  """True if a state file matches its checksum, or has neither one nor comments (TensorFlow's)."""
  match = _CHECKSUM.match(content)
  if match:
    return int(match.group(1), 16) == zlib.crc32(content[match.end() :])
  return b"#" not in _QUOTED.sub(b"", content)


def _inside(directory: str, paths: list[str], times: list[float], preserved: float) -> State:
  """State with the listed checkpoints that lie in the folder, without duplicates; logs others."""
  listed: dict[str, float] = {}
  outside = []
  for path, written in zip(paths, times):
    if "://" in directory and "://" in path[len(directory) :]:
      path = path[len(directory) :].lstrip("/")  # TensorFlow takes it for a relative one.
    name = folder_lib.relative(directory, path)
    if name is None:
      outside.append(path)
      continue
    inner = os.path.join(directory, name)
    listed.pop(inner, None)  # The last mention counts: that is the newest.
    listed[inner] = written
  key = (os.path.join(directory, _STATE), *outside)
  if outside and key not in _refused:
    _refused.add(key)
    _LOG.warning("%s", _of_elsewhere(directory, outside))
  return State(list(listed), list(listed.values()), preserved, tuple(outside))


def _of_elsewhere(directory: str, outside: Sequence[str]) -> str:
  """Message about checkpoints that a state file names outside of its folder."""
  names = ", ".join(repr(_shortened(p)) for p in outside[-_SHOWN:])
  more = f" and {len(outside) - _SHOWN} more" if len(outside) > _SHOWN else ""
  return (
    f"{os.path.join(directory, _STATE)} names {names}{more}, outside of {directory}: nothing is "
    "read, written or deleted there. To use such a checkpoint give its path (to restore, or as "
    "run.init_checkpoint), or copy its files here; a state file without it ends this message"
  )


def _shortened(path: str) -> str:
  """Shortens a path for a message: one from a damaged file may have any length."""
  half = _CHARACTERS_SHOWN // 2
  return path if len(path) <= _CHARACTERS_SHOWN else f"{path[:half]}...{path[-half:]}"


def _quoted(text: str) -> str:
  """A text as protocol buffers are written as text."""
  return '"' + re.sub(r'[\\"\x00-\x1f\x7f]', lambda c: f"\\{ord(c.group()):03o}", text) + '"'


def write_state(directory: str, state: State) -> None:
  """Replaces the state file in one step; TensorFlow's own functions read it."""
  names = [_quoted(_name_in(directory, p)) for p in state.paths]
  lines = [f"model_checkpoint_path: {names[-1]}"] if names else []
  lines += [f"all_model_checkpoint_paths: {n}" for n in names]
  lines += [f"all_model_checkpoint_timestamps: {t!r}" for t in state.times]
  lines += [f"last_preserved_timestamp: {state.last_preserved!r}"]
  content = ("\n".join(lines) + "\n").encode()
  checksum = b"# crc32 %08x\n" % zlib.crc32(content)
  folder_lib.write(directory, os.path.join(directory, _STATE), checksum + content)


def _name_in(directory: str, path: str) -> str:
  folder_lib.inside(directory, path)  # `read_state` and `publish` give no others.
  return folder_lib.relative(directory, path) or ""


# ------------------------------------------------------------------------- remains


def temporary_folder(directory: str, step: int, mark: str = "") -> str:
  """Folder where a checkpoint is written before it is published; `mark` tells runs apart."""
  return os.path.join(directory, f"{_TEMPORARY}{NAME}{step}{mark}")


def token_file(directory: str, mark: str) -> str:
  """Path of a file by which workers check that they see the same folder."""
  return os.path.join(directory, f"{_TEMPORARY}test-{mark}")


def publish(folder: str, directory: str, step: int) -> str:
  """Moves a whole checkpoint from its temporary folder to its place, the index last.

  Args:
    folder: the temporary folder; files of other names stay there.
    directory: folder of the checkpoints.
    step: step of the checkpoint.

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
        folder_lib.remove(directory, os.path.join(directory, _STATE))
    remove_checkpoint(directory, prefix)
  files = [f for f in _list(folder) if belongs_to(f, name)]
  for file in [*files, name + MANIFEST, name + INDEX]:
    folder_lib.rename(directory, os.path.join(folder, file), os.path.join(directory, file))
  folder_lib.sync(directory)
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
        folder_lib.remove_tree(directory, path)
      continue
    step = re.match(re.escape(NAME) + r"[0-9]+", name)
    owner = step.group() if step else ""
    if owner and (name == owner + MANIFEST or belongs_to(name, owner)):
      if owner + INDEX not in names:
        folder_lib.remove(directory, path)


def _list(directory: str) -> Sequence[str]:
  if not tf.io.gfile.isdir(directory or "."):
    return []
  return [n.rstrip("/") for n in tf.io.gfile.listdir(directory or ".")]
