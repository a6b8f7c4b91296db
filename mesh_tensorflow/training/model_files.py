"""Files that a run writes into its model folder beside the checkpoints.

Nothing that is in that folder, a link say, makes it write elsewhere; see `checkpoint.folder`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator

import tensorflow as tf

from mesh_tensorflow.checkpoint import folder, writer
from mesh_tensorflow.errors import StorageError

_LOG = logging.getLogger("mesh_tensorflow")

# Folders in which something could not be written, and a warning said so; and those of them that
# nobody may write to.
_warned: set[str] = set()
_denied: set[str] = set()


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
def errors_of_writing(place: str, what: str, setting: str = "--model_dir") -> Iterator[None]:
  """Context manager that converts file-system errors to a `StorageError` naming the folder.

  Args:
    place: the folder.
    what: name of the written thing, for the message.
    setting: name of the setting that gives the folder.
  """
  try:
    yield
  except (tf.errors.OpError, OSError) as e:
    raise StorageError(
      f"cannot write {what} in the folder {place} ({writer.reason(e)}): give another "
      f"{setting}, the right to write there, or space on its disk"
    ) from e


def optional(model_dir: str, what: str, write_it: Callable[[], None]) -> bool:
  """Writes optional files of a run: scalars, evaluated texts, the command line.

  If it cannot be written, a warning says so, once for a folder, and the run goes on.

  Args:
    model_dir: the folder.
    what: is written, for the warning.
    write_it: writes it.

  Returns:
    Whether it is written.
  """
  if model_dir in _denied:
    return False
  try:
    with errors_of_writing(model_dir, what):
      write_it()
  except StorageError as e:
    if isinstance(e.__cause__, (tf.errors.PermissionDeniedError, PermissionError)):
      _denied.add(model_dir)
    if model_dir not in _warned:
      _warned.add(model_dir)
      _LOG.warning("%s. The run goes on without it, and without others of its notes there", e)
    return False
  return True


def notes(model_dir: str, place: str, what: str, write_it: Callable[[str | None], None]) -> None:
  """Writes notes of an evaluation into a folder.

  Those in the folder of the model are optional, and a link in it that leads elsewhere is refused,
  as a disk that cannot be written to is; another folder was named by a user, who gets an error.

  Args:
    model_dir: the folder of the model.
    place: where they go.
    what: they are, for messages.
    write_it: writes them; called with the folder in which all must be, or None.

  Raises:
    StorageError: they cannot be written into a folder of a user's.
  """
  if not _is_own(model_dir, place):
    with errors_of_writing(place, what, "folder"):
      write_it(None)
    return

  def write_inside() -> None:
    folder.inside(model_dir, os.path.join(place, "any"))
    write_it(model_dir)

  optional(model_dir, what, write_inside)


def _is_own(model_dir: str, place: str) -> bool:
  """True if `place` is the model's folder or below it, judged by the paths alone."""
  own, other = (p if "://" in p else os.path.abspath(p) for p in (model_dir, place))
  # With the slash at the end, "model2" is not in "model".
  return f"{other.rstrip('/')}/".startswith(f"{own.rstrip('/')}/")


def make_folder(path: str) -> None:
  """Makes a folder, if it is not there.

  Raises:
    StorageError: it cannot be made.
  """
  try:
    tf.io.gfile.makedirs(path)
  except tf.errors.OpError as e:
    raise StorageError(
      f"cannot make the folder {path} ({e.message}): give another --model_dir, or the right to "
      "write there"
    ) from e
