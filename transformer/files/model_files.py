"""What a run writes into the folder of its model beside the checkpoints.

Nothing that is in that folder, a link say, makes it write elsewhere; see `checkpoint.folder`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

import tensorflow as tf

from mesh_tensorflow.checkpoint import folder, writer
from mesh_tensorflow.errors import StorageError

_LOG = logging.getLogger("mesh_tensorflow")

# Folders in which something could not be written, and a warning said so.
_warned: set[str] = set()


def write(model_dir: str, path: str, content: bytes) -> None:
  """Writes a file inside a folder, in one step; links are replaced, not followed.

  Args:
    model_dir: the folder.
    path: of the file; folders between are made.
    content: all of it.

  Raises:
    StorageError: it cannot be written, or is not inside.
  """
  with errors_of_writing(model_dir, os.path.basename(path)):
    folder.write(model_dir, path, content)


@contextlib.contextmanager
def errors_of_writing(model_dir: str, what: str) -> Iterator[None]:
  """Inside it, what a disk says becomes a `StorageError` that names the folder.

  Args:
    model_dir: the folder.
    what: is written, for the message.
  """
  try:
    yield
  except (tf.errors.OpError, OSError) as e:
    raise StorageError(
      f"cannot write {what} in the folder {model_dir} ({writer.reason(e)}): give another "
      "--model_dir, the right to write there, or space on its disk"
    ) from e


@contextlib.contextmanager
def optional(model_dir: str, what: str) -> Iterator[None]:
  """Inside it, files are written that a run can do without: evaluation scalars, its command line.

  If they cannot be, the block ends, and the first time a warning says so.

  Args:
    model_dir: the folder.
    what: is written, for the warning.
  """
  try:
    with errors_of_writing(model_dir, what):
      yield
  except StorageError as e:
    if model_dir not in _warned:
      _warned.add(model_dir)
      _LOG.warning("%s. The run goes on without this and other notes in that folder", e)


def inside(model_dir: str | None, path: str) -> str:
  """A folder for files of a run; if it is inside the model's, no link in that leads out of it.

  Args:
    model_dir: the folder of the model, or None.
    path: the folder in it that a run chose; one that a user chose may be anywhere.

  Raises:
    StorageError: a link leads out.
  """
  if model_dir:
    folder.inside(model_dir, os.path.join(path, "any"))
  return path
