"""Vocabularies belong to checkpoints: what was built or read once stays in their folder."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import gin
import tensorflow as tf

from mesh_tensorflow import checkpoint as checkpoint_lib
from mesh_tensorflow import errors
from mesh_tensorflow.checkpoint import folder, writer
from mesh_tensorflow.checkpoint.by_chief import by_chief
from mesh_tensorflow.environment import untrusted_files
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.training import model_files
from mesh_tensorflow.transformer.data.vocabularies.base import Vocabulary

_V = TypeVar("_V", bound=Vocabulary)


def write_whole_file(filename: str, content: bytes) -> None:
  """Writes a file atomically, also with several concurrent writers.

  Args:
    filename: its path; its folder is made.
    content: what becomes of it.

  Raises:
    errors.StorageError: it cannot be written.
  """
  try:
    folder.write(os.path.dirname(filename), filename, content)
  except (tf.errors.OpError, OSError) as e:
    raise errors.StorageError(
      f"cannot write the vocabulary file {filename} ({writer.reason(e)}): give another filename, "
      "or the right to write there"
    ) from e


_LOG = logging.getLogger("mesh_tensorflow")

FOLDER = "vocabularies"
_INDEX = "index.json"
_CHANGE = "or give --allow_config_change to take today's"
# The ids of another library's vocabulary are compared one by one, if they are not too many.
_MOST_IDS = 1 << 17


@dataclasses.dataclass
class _Entry:
  """A vocabulary that is kept.

  Attributes:
    kind: what makes it, "characters" for instance.
    scope: the gin scope in which it was made: a model may have several.
    arguments: what it was made from, as JSON.
    file: name of its file in the folder.
    digest: SHA-256 of the file.
  """

  kind: str
  scope: str
  arguments: Any
  file: str
  digest: str

  def __post_init__(self) -> None:
    if os.path.basename(self.file) != self.file or self.file in ("", ".", ".."):
      raise ValueError(f"{self.file!r} is not the name of a file in this folder")


# An entry in the index; see `untrusted.expect`.
_FORM = {"kind": str, "scope": str, "arguments": object, "file": str, "digest": str}


class _Folder:
  """The kept vocabularies of one model_dir.

  Args:
    model_dir: folder of checkpoints.
    may_write: whether new ones are kept.
    allow_change: whether a vocabulary file that has changed is taken, in place of refused.
  """

  def __init__(self, model_dir: str, may_write: bool, allow_change: bool):
    self.path = os.path.join(model_dir, FOLDER)
    self._may_write = may_write
    self._allow_change = allow_change
    self._entries = [_Entry(**e) for e in by_chief(lambda: _read_index(model_dir, self.path))]
    self._of_checkpoints = list(self._entries)  # Those that no call has asked for so far.
    self._made: dict[str, Any] = {}

  def get(
    self,
    kind: str,
    arguments: Mapping[str, object],
    make: Callable[[], _V],
    load: Callable[[str], _V],
    save: Callable[[_V, str], None],
    source: Callable[[], str | None],
  ) -> _V:
    """The vocabulary for these arguments; see `kept`."""
    # As they come back from the index: tuples are lists there, and are to be equal to them.
    arguments = json.loads(json.dumps(arguments, default=repr))
    scope = gin.current_scope_str()
    key = json.dumps([kind, scope, arguments])
    if key not in self._made:
      entry = self._find(kind, scope, arguments)
      if entry is None:
        vocabulary = make()
        if self._may_write:
          by_chief(lambda: self._keep(kind, scope, arguments, vocabulary, save))
      else:
        vocabulary = self._load(entry, load)
        if self._is_changed(entry, vocabulary, load, source):
          vocabulary = make()
          if self._may_write:
            by_chief(lambda: self._keep(kind, scope, arguments, vocabulary, save, entry))
      self._made[key] = vocabulary
    made: _V = self._made[key]
    return made

  def _find(self, kind: str, scope: str, arguments: object) -> _Entry | None:
    """The kept vocabulary that is meant: the one made so, or the only one, made otherwise."""
    near = [e for e in self._of_checkpoints if (e.kind, e.scope) == (kind, scope)]
    found = [e for e in near if e.arguments == arguments] or near
    if len(found) > 1:
      raise ConfigError(
        f"{self.path} keeps {len(found)} vocabularies of {kind}, made from "
        f"{', '.join(str(e.arguments) for e in found)}, and none from {arguments}; give the "
        "arguments of the one that is meant"
      )
    if not found:
      return None
    # Its own: another call, with other arguments, is not given the same one.
    self._of_checkpoints.remove(found[0])
    return found[0]

  def _load(self, entry: _Entry, load: Callable[[str], _V]) -> _V:
    path = os.path.join(self.path, entry.file)
    try:
      with tf.io.gfile.GFile(path, "rb") as f:
        found = hashlib.sha256(f.read()).hexdigest()
    except tf.errors.OpError as e:
      raise DataError(
        f"the vocabulary of the checkpoints, {path}, cannot be read: {e.message}"
      ) from e
    if found != entry.digest:
      raise DataError(
        f"{path}, the vocabulary of the checkpoints, is not what was written there: put the file "
        f"back from a copy (SHA-256 {entry.digest})"
      )
    return load(path)

  def _is_changed(
    self,
    entry: _Entry,
    kept: _V,
    load: Callable[[str], _V],
    source: Callable[[], str | None],
  ) -> bool:
    """True if the given vocabulary file differs from the kept one and a change is allowed."""

    def difference() -> str | None:
      file = source()
      if file is None:
        return None  # It is not there any more, or is the text that a vocabulary was built from.
      before, now = describe(kept), describe(load(file))
      if before["digest"] == now["digest"]:
        return None
      return (
        f"the vocabulary file {file} has changed since these checkpoints were trained with it "
        f"({before['size']} ids then, {now['size']} now): the kept one is "
        f"{os.path.join(self.path, entry.file)}"
      )

    changed = by_chief(difference)
    if changed is None:
      return False
    if not self._allow_change:
      raise ConfigError(f"{changed}; put the old file back, remove the changed one, {_CHANGE}")
    _LOG.warning("%s; today's is taken (allow_config_change)", changed)
    return True

  def _keep(
    self,
    kind: str,
    scope: str,
    arguments: object,
    vocabulary: _V,
    save: Callable[[_V, str], None],
    before: _Entry | None = None,
  ) -> None:
    """Writes a vocabulary, then the index, in which it takes the place of `before`."""
    model_dir = os.path.dirname(self.path)
    with model_files.errors_of_writing(model_dir, FOLDER):
      folder.make(model_dir, self.path)  # A link that leads out of it is refused.
    base = re.sub(r"[^\w.-]", "-", f"{scope}-{kind}".strip("-"))
    names = {e.file for e in self._entries}
    file = next(n for i in range(len(names) + 1) if (n := f"{base}{i or ''}") not in names)
    path = os.path.join(self.path, file)
    # First the file, then the index that names it: stopped between them, the old index holds.
    save(vocabulary, path)
    with tf.io.gfile.GFile(path, "rb") as f:
      digest = hashlib.sha256(f.read()).hexdigest()
    self._entries = [e for e in self._entries if e is not before]
    self._entries.append(_Entry(kind, scope, arguments, file, digest))
    content = json.dumps([dataclasses.asdict(e) for e in self._entries], indent=1)
    write_whole_file(os.path.join(self.path, _INDEX), content.encode())
    # After the new index: until then it is the old file that a reader is sent to.
    if before is not None:
      folder.remove(self.path, os.path.join(self.path, before.file))


_CURRENT: list[_Folder] = []


@contextlib.contextmanager
def kept_in(
  model_dir: str | None, *, may_write: bool = True, allow_change: bool = False
) -> Iterator[None]:
  """Context manager in which vocabularies are read from a model's folder, or saved there.

  As long as the folder has no checkpoint, what is kept there is made anew. Several workers enter
  the block at the same place of their programs, and make the same vocabularies in it.

  Args:
    model_dir: folder of checkpoints; None: nothing is kept.
    may_write: whether vocabularies that are not there yet are kept: for training.
    allow_change: whether a vocabulary file that differs from the kept one is taken, with a warning,
      in place of refused.
  """
  if not model_dir:
    yield
    return
  _CURRENT.append(_Folder(model_dir, may_write, allow_change))
  try:
    yield
  finally:
    _CURRENT.pop()


def kept(
  kind: str,
  arguments: Mapping[str, object],
  *,
  make: Callable[[], _V],
  load: Callable[[str], _V],
  save: Callable[[_V, str], None],
  source: Callable[[], str | None],
) -> _V:
  """A vocabulary: the one that is kept with the checkpoints, if there is one; else a new one.

  Args:
    kind: what sort of vocabulary it is; a part of the name of its file.
    arguments: what it is made from; tells several of one kind apart.
    make: makes it; all workers call it.
    load: reads a vocabulary file: what `save` wrote, or `source` found. One worker may call it.
    save: writes a vocabulary to a path.
    source: the path of the vocabulary file that `make` would read; None if there is none, or it
      would build a vocabulary.

  Returns:
    The vocabulary.

  Raises:
    ConfigError: the vocabulary file is not the one that the checkpoints were trained with.
    DataError: the kept one is damaged.
  """
  if not _CURRENT:
    return make()
  return _CURRENT[-1].get(kind, arguments, make, load, save, source)


def describe(vocabulary: Vocabulary) -> dict[str, Any]:
  """Identity of a vocabulary: class, size and digest.

  Args:
    vocabulary: a `Vocabulary`, or an object with its methods.

  Returns:
    A JSON-like dict: `class`, `size`, and `digest`, the SHA-256 of the content that determines its
    ids; None if the content is unknown.
  """
  kind = type(vocabulary).__name__
  size = int(vocabulary.vocab_size)
  data = _content(vocabulary, size)
  return {"class": kind, "size": size, "digest": data and hashlib.sha256(data).hexdigest()}


def _content(vocabulary: Vocabulary, size: int) -> bytes | None:
  """Bytes that determine the ids; for other libraries' vocabularies the texts of all ids."""
  try:
    if isinstance(vocabulary, Vocabulary):
      return vocabulary.content()
  except NotImplementedError:
    pass
  if size > _MOST_IDS:
    return None
  try:
    return json.dumps([str(vocabulary.decode([i])) for i in range(size)]).encode()
  except Exception as e:  # noqa: BLE001 - it may not decode single ids, in any way.
    _LOG.info("the content of %s cannot be told: %s", type(vocabulary).__name__, e)
    return None


def _read_index(model_dir: str, path: str) -> list[dict[str, Any]]:
  """The entries of the index, if there are checkpoints that they belong to."""
  index = os.path.join(path, _INDEX)
  if not checkpoint_lib.all_checkpoints(model_dir) or not tf.io.gfile.exists(index):
    return []
  try:
    entries = untrusted_files.read_json(index, [_FORM], finite=False)
    return [dataclasses.asdict(_Entry(**e)) for e in entries]
  except (tf.errors.OpError, ValueError, TypeError) as e:
    raise DataError(
      f"{index}, which lists the vocabularies of the checkpoints, cannot be read: {e}"
    ) from e
