"""Attachments: files of a program's own that are part of a checkpoint."""

from __future__ import annotations

from mesh_tensorflow import workers
from mesh_tensorflow.checkpoint import files
from mesh_tensorflow.errors import CheckpointError


def attachment(path: str, name: str) -> str:
  """The path that the function of an attachment got, in the place where the checkpoint is now.

  Args:
    path: a checkpoint.
    name: of the attachment; this worker's is meant.

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
  """The part of the files' names that tells this worker's attachment from those of others."""
  return f"{name}-{workers.current().index:05}"
