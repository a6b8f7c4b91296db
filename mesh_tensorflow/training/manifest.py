"""`manifest.json` beside the checkpoints: data, seeds, versions and settings of a training.

Versions, command line, configuration, data, vocabularies, seeds, mesh. It stands in `model_dir`, of
the newest run, and with each checkpoint (`model.ckpt-<step>.with-run-00000.json`), of the run that
wrote it. A training that goes on compares what decides its steps but not its model: data and
seeds. (The model is compared by its `ModelRecord`; a mesh changes no result.)
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow import checkpoint as checkpoint_lib
from mesh_tensorflow import workers
from mesh_tensorflow.environment import untrusted_files
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.training import model_files
from mesh_tensorflow.training.program import ModelRecord
from mesh_tensorflow.version import __version__

NAME = "manifest.json"
ATTACHMENT = "run"
_FORMAT = 1
# Of a larger file so many parts of such a size are read, evenly spread, its first and last bytes
# among them; and of so many files at most. All count with their sizes.
_WHOLE, _PARTS, _PART, _FILES = 2**20, 16, 2**16, 256
_SHOWN = 3  # Files in one line.


@dataclasses.dataclass(frozen=True)
class Manifest:
  """A record of a run.

  Attributes:
    record: of JSON's kinds; see the module.
  """

  record: dict[str, Any]

  def write(self, path: str) -> None:
    """Writes it, for `Checkpointer.save(attachments={ATTACHMENT: ...})`."""
    with tf.io.gfile.GFile(f"{path}.json", "w") as f:
      f.write(self._text())

  def write_into(self, model_dir: str) -> None:
    """Writes `manifest.json`, which a run can do without."""
    path = os.path.join(model_dir, NAME)
    content = self._text().encode()
    model_files.optional(model_dir, NAME, lambda: model_files.write(model_dir, path, content))

  def _text(self) -> str:
    return json.dumps(self.record, indent=1, sort_keys=True) + "\n"


def capture(
  mesh_impl: MeshImpl, model: ModelRecord | None, files: Iterable[str], seeds: Mapping[str, int]
) -> Manifest:
  """The record of this run.

  Args:
    mesh_impl: the mesh.
    model: what decides the model.
    files: of which the training data is made, so far as its reader says.
    seeds: by purpose.
  """
  record = {
    "format": _FORMAT,
    "versions": {
      "mesh_tensorflow": __version__,
      "numpy": np.__version__,
      "python": platform.python_version(),
      "tensorflow": tf.__version__,
    },
    "command": list(sys.argv),
    "commit": _commit(os.getcwd()),
    "data": _described(list(files)),
    "seeds": dict(seeds),
    "mesh": {
      "shape": ",".join(f"{d.name}:{d.size}" for d in mesh_impl.shape),
      "layout": mesh_impl.layout_rules.to_string,
      "implementation": type(mesh_impl).__name__,
      "workers": workers.current().size,
    },
    **(model.manifest() if model is not None else {}),
  }
  return Manifest(record)


def of_checkpoint(path: str) -> Manifest | None:
  """The record of the run that wrote a checkpoint; None if there is none that can be read."""
  found = _read(path)
  return Manifest(found) if found is not None else None


# --------------------------------------------------------------------------------- data


def _described(files: Sequence[str]) -> list[dict[str, Any]]:
  """Path, size and hash of each file; of one that cannot be read, the path."""
  every = max(1, -(-len(files) // _FILES))
  return [_of_file(path, hashes=i % every == 0) for i, path in enumerate(sorted(files))]


def _of_file(path: str, hashes: bool) -> dict[str, Any]:
  found: dict[str, Any] = {"path": path}
  try:
    size = tf.io.gfile.stat(path).length
    found["bytes"] = size
    if hashes:
      is_whole = size <= _WHOLE
      found["sha256" if is_whole else "sha256_of_parts"] = _digest(path, size, is_whole)
  except tf.errors.OpError:
    pass  # The reader has more to say about it.
  return found


def _digest(path: str, size: int, is_whole: bool) -> str:
  digest = hashlib.sha256()
  with tf.io.gfile.GFile(path, "rb") as f:
    if is_whole:
      digest.update(f.read())
    else:
      for i in range(_PARTS):
        f.seek(i * (size - _PART) // (_PARTS - 1))
        digest.update(f.read(_PART))
  return digest.hexdigest()


def _commit(folder: str) -> str | None:
  """The commit of the git repository that a folder is in; None: it is in none."""
  try:
    while not os.path.isdir(os.path.join(folder, ".git")):
      folder, before = os.path.dirname(folder), folder
      if folder == before:
        return None
    git = os.path.join(folder, ".git")
    head = _text_of(os.path.join(git, "HEAD"))
    if not head.startswith("ref: "):
      return head
    name = head.removeprefix("ref: ")
    if os.path.isfile(os.path.join(git, name)):
      return _text_of(os.path.join(git, name))
    packed = _text_of(os.path.join(git, "packed-refs")).splitlines()
    return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)
  except (OSError, UnicodeError):
    return None


def _text_of(path: str) -> str:
  with open(path, encoding="utf-8") as f:
    return f.read().strip()


# --------------------------------------------------------------------------- comparison


def differences(path: str, now: Manifest) -> list[str]:
  """Describes the differences of data and seeds between this run and that of a checkpoint.

  Args:
    path: the checkpoint from which training resumes.
    now: the manifest of this run.

  Returns:
    A list with one line of text; empty if there is no difference, or no earlier manifest.
  """
  then = _read(path)
  if then is None:
    return []
  found = _of_data(then.get("data") or [], now.record["data"])
  seeds = then.get("seeds") or {}
  for purpose, seed in now.record["seeds"].items():
    # That of the initial weights has done what it does.
    if purpose != "weights" and seeds.get(purpose, seed) != seed:
      found.append(f"the seed of {purpose} was {seeds[purpose]}, and is {seed}")
  if not found:
    return []
  return [f"this run is not as that of {os.path.basename(path)} was: {'; '.join(found)}"]


# What is read of a record; see `untrusted.expect`.
_FORM = {"format": object, "data?": ([{"path": str}], None), "seeds?": (dict, None)}


def _read(path: str) -> dict[str, Any] | None:
  """The record of a checkpoint; None if there is none that can be read."""
  try:
    # Settings may be infinite.
    record = untrusted_files.read_json(
      f"{checkpoint_lib.attachment(path, ATTACHMENT)}.json", _FORM, finite=False
    )
  except (tf.errors.OpError, ValueError):
    return None
  known = isinstance(record, dict) and record.get("format") == _FORMAT
  return record if known else None


def _of_data(then: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> list[str]:
  """Describes the differences between two lists of training data files."""
  # A file that was moved is the same one.
  before, after = ({_content(f): f["path"] for f in files} for files in (then, now))
  gone = {os.path.basename(p): p for c, p in before.items() if c not in after}
  new = {os.path.basename(p): p for c, p in after.items() if c not in before}
  words = [f"{new[n]} has changed" for n in new if n in gone]
  words += [f"{p} is new" for n, p in new.items() if n not in gone]
  words += [f"{p} is gone" for n, p in gone.items() if n not in new]
  if not words:
    return []
  more = len(words) - _SHOWN
  text = ", ".join(words[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
  return [f"of its training data {text}"]


def _content(file: Mapping[str, Any]) -> tuple[Any, ...]:
  """Identity of a data file: base name, size in bytes and SHA-256."""
  hashed = file.get("sha256") or file.get("sha256_of_parts")
  return os.path.basename(file["path"]), file.get("bytes"), hashed
