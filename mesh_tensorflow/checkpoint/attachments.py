"""Attachments: files of a program's own that are part of a checkpoint."""

from __future__ import annotations

from mesh_tensorflow import workers
from mesh_tensorflow.checkpoint import files
from mesh_tensorflow.errors import CheckpointError


def attachment(path: str, name: str) -> str:
  """Path of an attachment of a published checkpoint, as the function that wrote it was given one.

  Args:
    path: a checkpoint.
    name: name of the attachment, of which this worker's is returned.

  Raises:
    CheckpointError: no attachment can have this name.
  """
  check_name(name)
  return f"{path}{files.ATTACHED}{own_name(name)}"


def check_name(name: str) -> None:
  """Raises an error for a name of an attachment that would lead out of the folder."""
  if not name or "/" in name or "\0" in name:
    raise CheckpointError(
      f"an attachment cannot have the name {name!r}: it is part of a file's name, and has no '/'"
    )


def own_name(name: str) -> str:
  """Name of this worker's attachment: the attachment's name and the worker's number."""
  return f"{name}-{workers.current().index:05}"
