"""Verification of checkpoints: the manifest, the check of files, the newest good checkpoint.

Beside the files of a checkpoint there is `model.ckpt-N.manifest` with the size and checksum of
each. Of checkpoints without one, of TensorFlow or of older versions, all tensors are read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import mmap
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.checkpoint import files, folder, reader
from mesh_tensorflow.checkpoint import reader as stored
from mesh_tensorflow.checkpoint.files import INDEX, MANIFEST
from mesh_tensorflow.environment import untrusted_files
from mesh_tensorflow.errors import CheckpointError, DamagedCheckpointError, NewerFormatError
from mesh_transformer_cli import untrusted

_LOG = logging.getLogger("mesh_tensorflow")

_FORMAT = 1
# Form of a manifest's body (see `untrusted.expect`), and maximum bytes of its first line.
_FORM = {"files": [{"file": str, "bytes": int, "crc32": str}]}
_LONGEST_HEAD = 4096
# Bytes that are in memory while a checksum is computed.
_CHUNK = 4 * 2**20
# File systems keep times in ticks: a file that changed so recently may change unnoticed.
_SECONDS_OF_A_TICK = 2.0

# Results of the check of a file.
GOOD, MISSING, TRUNCATED, TOO_LONG, CHANGED, UNREADABLE = range(6)
_WORDS = {
  MISSING: "is missing",
  TRUNCATED: "is truncated (it is shorter than the {} bytes written)",
  TOO_LONG: "is longer than the {} bytes written",
  CHANGED: "has {} bytes as written, but other content",
  UNREADABLE: "cannot be read",
}


@dataclasses.dataclass(frozen=True)
class FileRecord:
  """A line of a manifest.

  Attributes:
    suffix: name of the file after the checkpoint's ("model.ckpt-7" + suffix).
    size: bytes.
    crc32: checksum of the content.
  """

  suffix: str
  size: int
  crc32: int


@dataclasses.dataclass(frozen=True)
class Damage:
  """A file of a checkpoint that is not as it was written, and what is wrong with it."""

  file: str
  what: str

  def __str__(self) -> str:
    return untrusted.shortened(f"{self.file} {self.what}")


# ------------------------------------------------------------------------ manifest


def measure(path: str, suffix: str) -> FileRecord:
  """Size and checksum of a file, whose name in the checkpoint will end in `suffix`."""
  size, crc = 0, 0
  with _opened(path) as chunks:
    for chunk in chunks:
      size += len(chunk)
      crc = zlib.crc32(chunk, crc)
  return FileRecord(suffix, size, crc)


def write_manifest(prefix: str, records: Sequence[FileRecord]) -> None:
  """Writes the manifest of a checkpoint: a line of JSON about itself, then the list of files."""
  listed = [{"file": r.suffix, "bytes": r.size, "crc32": f"{r.crc32:08x}"} for r in records]
  body = json.dumps({"files": listed}, indent=1).encode() + b"\n"
  path = prefix + MANIFEST
  folder.write(os.path.dirname(path), path, _head_of(body) + body)


def _head_of(body: bytes) -> bytes:
  head = {"format": _FORMAT, "bytes": len(body), "crc32": f"{zlib.crc32(body):08x}"}
  return json.dumps(head).encode() + b"\n"


def read_manifest(prefix: str) -> tuple[list[FileRecord], Damage | None]:
  """The files of a checkpoint, or what is wrong with its manifest.

  Args:
    prefix: path of the checkpoint; its manifest must be there.

  Raises:
    NewerFormatError: it is of a newer format.
  """
  path = prefix + MANIFEST
  try:
    content = untrusted_files.read_bytes(path)
  except tf.errors.OpError as e:
    return [], Damage(path, f"cannot be read: {e.message}")
  except ValueError as e:
    return [], Damage(path, f"cannot be read: {e}")
  head, _, body = content.partition(b"\n")
  _refuse_newer(path, head)
  if content != _head_of(body) + body:
    short = len(body) < _parsed_head(head).get("bytes", 0) or b"\n" not in content
    return [], Damage(path, "is truncated" if short else "has other content than was written")
  try:
    listed = untrusted.expect(untrusted.parse(body), _FORM)["files"]
    records = [FileRecord(f["file"], f["bytes"], int(f["crc32"], 16)) for f in listed]
  except ValueError as e:
    return [], Damage(path, f"is of a format that this version does not know: {e}")
  name = os.path.basename(prefix)
  for record in records:
    if record.suffix != INDEX and not files.belongs_to(name + record.suffix, name):
      return [], Damage(path, f"lists {name + record.suffix!r}, which is no file of the checkpoint")
  return records, None


def check_format(path: str) -> None:
  """Looks at the first line of the manifest of a checkpoint, if it has one.

  Args:
    path: path of the checkpoint.

  Raises:
    NewerFormatError: it is of a newer format.
  """
  try:
    with tf.io.gfile.GFile(path + MANIFEST, "rb") as f:
      _refuse_newer(path + MANIFEST, f.read(_LONGEST_HEAD).partition(b"\n")[0])
  except tf.errors.OpError:  # There is none, or it is told by who needs it.
    pass


def _refuse_newer(path: str, head: bytes) -> None:
  found = _parsed_head(head).get("format", 0)
  if found > _FORMAT:
    raise NewerFormatError(
      f"{path} was written by a newer version: format {untrusted.shortened(str(found), 20)}, this "
      f"one reads up to {_FORMAT}; update mesh-tensorflow, or use another folder"
    )


def _parsed_head(head: bytes) -> dict[str, int]:
  """Parses a manifest's first line; {} if it is damaged."""
  try:
    found: dict[str, int] = untrusted.parse(head[:_LONGEST_HEAD])
    return dict(untrusted.expect(found, {"format?": int, "bytes?": int}))
  except ValueError:
    return {}


# --------------------------------------------------------------------------- check


def verify(path: str) -> list[Damage]:
  """Compares every file of a checkpoint with what was written.

  All files are read. Of a checkpoint without a manifest all tensors are read, each of which has a
  checksum of TensorFlow's.

  Args:
    path: as `resolve` takes it.

  Returns:
    What is wrong; empty if nothing is.

  Raises:
    CheckpointError: there is no such checkpoint.
    NewerFormatError: a newer version of the package wrote it.
  """
  path = resolve(path)
  records, damages = records_of(path)
  if damages or records:
    return damages or damages_of(path, records, check_files(path, records))
  return check_tensors(path)


def records_of(path: str) -> tuple[list[FileRecord], list[Damage]]:
  """The files to check, as the manifest lists them, and any damage of the manifest itself.

  Without a manifest there are none, and the index and the sizes of files are looked at.
  """
  if tf.io.gfile.exists(path + MANIFEST):
    records, damage = read_manifest(path)
    return records, [damage] if damage else []
  try:
    reader.contents(path)
  except DamagedCheckpointError as e:
    return [], [Damage(path, f"is damaged: {e.what}")]
  return [], []


def check_files(path: str, records: Sequence[FileRecord], share: int = 0, of: int = 1) -> list[int]:
  """Checks one of `of` shares of the files.

  Args:
    path: a checkpoint.
    records: its files.
    share: number of the share: worker 1 of 3 checks files 1, 4, 7, ...
    of: number of shares.

  Returns:
    For each file one of `GOOD`, `MISSING` ...; `GOOD` for the files of other shares.
  """
  suffixes = [MANIFEST, *(r.suffix for r in records)] if records else []
  before = _signature([path + s for s in suffixes], records)
  codes = [GOOD] * len(records)
  if before is None or _found_good.get((path, share, of)) != before:
    for i in range(share, len(records), of):
      codes[i] = _check_file(path, records[i])
    if before is not None and not any(codes):
      _found_good[path, share, of] = before
  return codes


def check_tensors(path: str, share: int = 0, of: int = 1) -> list[Damage]:
  """Reads one of `of` shares of the tensors of a checkpoint: for one without a manifest.

  Args:
    path: a checkpoint.
    share: number of the share.
    of: number of shares.

  Returns:
    What is wrong with it; the first thing that is found.
  """
  try:
    before = _signature([path + INDEX, *files.data_files(path)])
    if before is None or _found_good.get((path, share, of)) != before:
      stored.check(path, stored.stored_in(path)[share::of])
      if before is not None:
        _found_good[path, share, of] = before
  except DamagedCheckpointError as e:
    return [Damage(path, f"is damaged: {e.what}")]
  return []


# What was read once need not be read again while no file changes.
_found_good: dict[tuple[str, int, int], Any] = {}


def damages_of(path: str, records: Sequence[FileRecord], codes: Sequence[int]) -> list[Damage]:
  """Turns the codes of `check_files` into descriptions of the damage."""
  return [
    Damage(path + r.suffix, _WORDS[code].format(r.size))
    for r, code in zip(records, codes)
    if code != GOOD
  ]


def _check_file(path: str, record: FileRecord) -> int:
  file = path + record.suffix
  try:
    if not tf.io.gfile.exists(file):
      return MISSING
    size = tf.io.gfile.stat(file).length
    if size != record.size:
      return TRUNCATED if size < record.size else TOO_LONG
    return GOOD if measure(file, record.suffix) == record else CHANGED
  except (tf.errors.OpError, OSError):
    return UNREADABLE


def _signature(paths: Sequence[str], records: Sequence[FileRecord] = ()) -> Any:
  """Fingerprint by size and mtime; None if a file is gone, or changed too recently to trust it."""
  try:
    stats = [tf.io.gfile.stat(p) for p in paths]
  except tf.errors.OpError:
    return None
  if not stats or max(s.mtime_nsec for s in stats) / 1e9 > time.time() - _SECONDS_OF_A_TICK:
    return None
  return tuple((s.length, s.mtime_nsec) for s in stats), tuple(records)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Iterator[Any]]:
  """The content of a file in chunks."""
  if "://" in path:
    with tf.io.gfile.GFile(path, "rb") as f:
      yield iter(lambda: f.read(_CHUNK), b"")
    return
  # Memory of the system's own: what malloc had from a thread of each checkpoint would stay with it.
  buffer = memoryview(mmap.mmap(-1, _CHUNK))
  with io.FileIO(path) as f:

    def chunks() -> Iterator[memoryview]:
      while count := f.readinto(buffer):
        yield buffer[:count]

    yield chunks()


# ------------------------------------------------------------------------- finding


def latest_checkpoint(directory: str) -> str | None:
  """The newest good checkpoint of a folder.

  Damaged ones are skipped; a warning names what is wrong with them. Reads the files of the
  checkpoint whole, unless this process did before.

  Args:
    directory: a folder; it need not exist.

  Returns:
    Its path without suffix; None if there is no checkpoint.

  Raises:
    DamagedCheckpointError: there are checkpoints, and all are damaged.
    NewerFormatError: the newest that is not damaged was written by a newer version of the package:
      going on from an older one would lose what it has.
  """
  damaged: list[Damage] = []
  for path in files.candidates(directory):
    damages = verify(path)
    if not damages:
      return path
    warn(path, damages)
    damaged += damages
  if damaged:
    raise all_damaged(directory, damaged)
  return None


def warn(path: str, damages: Sequence[object]) -> None:
  """Logs a warning that a damaged checkpoint is skipped, and why."""
  _LOG.warning(
    "checkpoint %s is damaged, an older one is used: %s", path, "; ".join(map(str, damages))
  )


def damaged_error(path: str, damages: Sequence[object]) -> DamagedCheckpointError:
  """The error for a checkpoint that was asked for by name."""
  return files.damaged(path, "; ".join(map(str, damages)))


def all_damaged(directory: str, damages: Sequence[object]) -> DamagedCheckpointError:
  """The error for a folder without a good checkpoint."""
  return DamagedCheckpointError(
    f"all checkpoints in {directory} are damaged: {'; '.join(map(str, damages))}; to begin anew, "
    "use another folder, or delete these"
  )


def resolve(path: str) -> str:
  """The checkpoint that a path means: itself, its index file, or the newest good one in a folder.

  Raises:
    CheckpointError: there is none.
  """
  path = os.fspath(path)
  if path.endswith(INDEX):
    path = path[: -len(INDEX)]
  if tf.io.gfile.exists(path + INDEX):
    return path
  if tf.io.gfile.isdir(path):
    latest = latest_checkpoint(path)
    if latest is None:
      raise CheckpointError(f"there is no checkpoint in {path}")
    return latest
  directory = os.path.dirname(path) or "."
  if not tf.io.gfile.isdir(directory):
    raise CheckpointError(f"there is no checkpoint {path}: there is no folder {directory}")
  raise CheckpointError(
    f"there is no checkpoint {path}: {path}{INDEX} is missing; {files.advice(directory)}"
  )


def describe(path: str) -> dict[str, tf.TensorSpec]:
  """Shape and dtype of every tensor in a checkpoint, by name; also looks whether files are whole.

  Args:
    path: as `resolve` takes it.

  Returns:
    A dict of tf.TensorSpec.

  Raises:
    CheckpointError: there is no such checkpoint, or a file is missing, truncated, or damaged.
  """
  return reader.contents(resolve(path))
