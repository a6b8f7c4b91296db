"""Access to a folder: the check that a path is inside, and all functions that write or delete.

A state file, a manifest or a link in a folder may name anything. Whoever writes, renames or deletes
in a folder of checkpoints does so by these functions: they look where a path really leads, and
refuse what is not inside. The folder itself may be a link: a user named it. What a link in it
points to may be read, and the link may be deleted or replaced; nothing is done to its target.

Paths of stores such as gs://, which have no links, are compared as text.
"""

from __future__ import annotations

import os
import random
import shutil

import tensorflow as tf

from mesh_tensorflow.errors import StorageError

# Names of what is on its way; what a killed run leaves of it is deleted by the next.
TEMPORARY = ".unfinished-"
_FILE_SCHEME = "file://"


def local_path(path: str) -> str | None:
  """Path for functions of the operating system; None if it is in a remote store."""
  path = path.removeprefix(_FILE_SCHEME)
  return None if "://" in path else path


def relative(directory: str, path: str) -> str | None:
  """Path relative to a folder, or None if it is not inside: the check for all access to a folder.

  Links are followed but for the last part of the path, which may be one.

  Args:
    directory: the folder; it need not exist.
    path: path of a file or folder, which need not exist, as functions that open files take it.

  Returns:
    Its path from the folder on, without links and ".."; None if it is not inside, is the folder
    itself, or has a zero byte in it, at which functions of C would end it.
  """
  root, local = local_path(directory or "."), local_path(path)
  if root is None:
    return _rest(directory.rstrip("/"), path)
  if local is None:
    return None
  parent, name = os.path.split(local)
  try:
    real = os.path.join(os.path.realpath(parent or "."), name)
    return None if name in ("", ".", "..") else _rest(os.path.realpath(root), real)
  except ValueError:  # A zero byte, or what is no text.
    return None


def _rest(root: str, path: str) -> str | None:
  """The part of a path after a folder, compared as strings; None if it is not inside."""
  start = root if root.endswith("/") else root + "/"
  rest = path[len(start) :]
  plain = "\0" not in rest and not any(part in ("", ".", "..") for part in rest.split("/"))
  return rest if plain and path.startswith(start) else None


def inside(directory: str, path: str) -> str:
  """The path, if it is inside a folder.

  Args:
    directory: the folder.
    path: path of a file or folder, which need not exist.

  Raises:
    StorageError: it is not; the error says where it leads.
  """
  if relative(directory, path) is not None:
    return path
  local = local_path(path)
  real = "" if local is None or "\0" in local else os.path.realpath(local)
  leads = f" (it leads to {real})" if real and real != os.path.abspath(local or "") else ""
  raise StorageError(
    f"{path!r}{leads} is not inside {directory}: nothing outside of that folder is written or "
    "deleted for it. Delete the link or the entry that leads there, or give the other folder by "
    "its own name"
  )


def make(directory: str, path: str) -> None:
  """Creates a folder within a folder, unless it exists.

  Args:
    directory: the outer folder.
    path: path of the new one.

  Raises:
    StorageError: it is not inside, or is a link that leads out.
  """
  inside(directory, os.path.join(path, "any"))
  tf.io.gfile.makedirs(path)


def write(directory: str, path: str, content: bytes) -> None:
  """Writes a file in a folder atomically: readers see the old content or the new.

  If it is there as a link, or one of several names of a file, only this name changes its meaning.

  Args:
    directory: the folder; made if it is not there, as the folders between it and the file.
    path: path of the file.
    content: all of it.

  Raises:
    StorageError: it is not inside.
  """
  parent, name = os.path.split(path)
  make(directory, parent) if parent != directory else tf.io.gfile.makedirs(parent or ".")
  token = random.SystemRandom().getrandbits(48)
  temporary = inside(directory, os.path.join(parent, f"{TEMPORARY}{name[:200]}.{token:012x}"))
  try:
    with tf.io.gfile.GFile(temporary, "wb") as f:
      f.write(content)
    sync(temporary)
    rename(directory, temporary, path)
  except BaseException:
    remove_if_possible(directory, temporary)
    raise


def rename(directory: str, source: str, target: str) -> None:
  """Renames a file within a folder; replaces a file or link that has the new name.

  Raises:
    StorageError: one of them is not inside.
  """
  tf.io.gfile.rename(inside(directory, source), inside(directory, target), overwrite=True)


def remove(directory: str, path: str) -> None:
  """Deletes a file or a link in a folder, if it exists.

  Raises:
    StorageError: it is not inside.
  """
  try:
    tf.io.gfile.remove(inside(directory, path))
  except tf.errors.NotFoundError:
    pass  # Users delete, too.


def remove_if_possible(directory: str, path: str) -> None:
  """Calls `remove`, and ignores errors of the file system and paths that are not inside."""
  try:
    remove(directory, path)
  except (tf.errors.OpError, StorageError):
    pass


def remove_tree(directory: str, path: str) -> None:
  """Deletes a file, a link, or a folder with its content; does not follow links.

  Raises:
    StorageError: it is not inside.
  """
  local = local_path(inside(directory, path))
  if local is None and tf.io.gfile.isdir(path):
    tf.io.gfile.rmtree(path)
  elif local is not None and os.path.isdir(local) and not os.path.islink(local):
    shutil.rmtree(local)  # TensorFlow's goes through links.
  else:
    remove(directory, path)


def sync(path: str) -> None:
  """Flushes a local file or folder to the disk (fsync)."""
  local = local_path(path)
  if local is not None:
    descriptor = os.open(local, os.O_RDONLY)
    try:
      os.fsync(descriptor)
    finally:
      os.close(descriptor)
