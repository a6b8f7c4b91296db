"""Restores variables: finds the checkpoint, checks that it fits, lets each device read slices."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow import workers
from mesh_tensorflow.checkpoint import files, reader, verification
from mesh_tensorflow.checkpoint.converting import Conversion, conversions
from mesh_tensorflow.checkpoint.files import INDEX, MANIFEST
from mesh_tensorflow.checkpoint.meeting import of_chief, raise_together
from mesh_tensorflow.checkpoint.verification import Damage, all_damaged, damaged_error
from mesh_tensorflow.errors import CheckpointError, DamagedCheckpointError
from mesh_tensorflow.meshes.store import StoredVariable
from mesh_tensorflow.running.lowering import OF_A_RUN
from mesh_tensorflow.workers.texts import gather_texts

_LOG = logging.getLogger("mesh_tensorflow")

_SHOWN = 3  # Maximum number of names shown of each list.
_CAUSES = 3  # Maximum number of changed dimensions that are named as the cause.

# A dimension that differs: its name, its size in the checkpoint and in the model.
Change = tuple[str, int, int]


def not_of_this_model(
  path: str,
  missing: Sequence[str],
  unexpected: Sequence[str],
  mismatched: Sequence[str],
  changes: Sequence[Sequence[Change] | None],
) -> CheckpointError:
  """The error for a checkpoint that is not of a model; the log has all names, at level info.

  Args:
    path: the checkpoint.
    missing: variables that it does not have, each with its shape.
    unexpected: variables that only the checkpoint has, each with its shape.
    mismatched: variables of another shape there, each with both.
    changes: for each of these the dimensions that differ; None: the numbers of dimensions do.

  Returns:
    The error: a few lines, with the likely cause. Its `details` are all.
  """
  head = f"checkpoint {path} is not of this model:"
  groups = [
    ("missing in the checkpoint", missing),
    ("in the checkpoint but not in the model", unexpected),
    ("of another shape or kind", mismatched),
  ]
  whole = [head, *(line for title, names in groups for line in listed(title, names))]
  cause = _cause(changes)
  if cause and not missing and not unexpected:
    lines = [f"{head} {_count(mismatched)} another shape, and all differ by {cause}"]
    lines.append(f"  {'such as ' if len(mismatched) > 1 else ''}{mismatched[0]}")
  else:
    lines = [head]
    for title, names in groups:
      why = f", by {cause}" if names is mismatched and cause else _place_of(names)
      lines += listed(title, names, most=_SHOWN, why=why)
  left_out = len(whole) > len(lines)
  if cause:
    lines.append(f"  set what makes {_sizes(changes)}, or use another folder or checkpoint")
  if left_out:
    lines[-1] += " (all names: --verbosity=0, or the error's `details`)"
    _LOG.info("%s", "\n".join(whole))
  result = CheckpointError("\n".join(lines))
  result.details = "\n".join(whole)
  return result


def listed(
  title: str, names: Sequence[str], *, most: int | None = None, why: str = ""
) -> list[str]:
  """Formats a list as lines: title with the number of names, then the names.

  Args:
    title: title of the list.
    names: an empty list makes no lines.
    most: maximum number of names to show; None: all.
    why: common property of the names, added to the title.
  """
  if not names:
    return []
  shown = [f"    {n}" for n in names[:most]]
  more = [f"    and {len(names) - len(shown)} more"] if len(names) > len(shown) else []
  return [f"  {title} ({len(names)}){why}:", *shown, *more]


def _count(names: Sequence[str]) -> str:
  return "1 variable has" if len(names) == 1 else f"{len(names)} variables have"


def _distinct(changes: Sequence[Sequence[Change] | None]) -> list[Change]:
  """The distinct changes of sizes, in order; [] if too many, or a variable has none of them."""
  found: dict[Change, None] = {}
  for change in changes:
    if not change:
      return []
    found.update(dict.fromkeys(change))
  return list(found) if len(found) <= _CAUSES else []


def _cause(changes: Sequence[Sequence[Change] | None]) -> str:
  """The dimensions by which shapes differ, if a few are all."""
  texts = [f"{name}: {old} in the checkpoint, {new} here" for name, old, new in _distinct(changes)]
  return " and ".join(texts)


def _sizes(changes: Sequence[Sequence[Change] | None]) -> str:
  return " and ".join(f"{name} {new} so that it is {old}" for name, old, new in _distinct(changes))


def _place_of(names: Sequence[str]) -> str:
  """Text that names the scope that all of many variables share; "" for a few, or without one."""
  if len(names) <= _SHOWN:
    return ""
  scope = os.path.commonprefix([n.split(" ")[0] for n in names]).rpartition("/")[0]
  return f", all in {scope}/" if scope else ""


GLOBAL_STEP = "global_step"
# Names of additional values in a checkpoint; no variable scope begins so.
EXTRA = "_extra/"


@dataclasses.dataclass(frozen=True)
class Restored:
  """Result of `Checkpointer.restore`: what was restored, and what did not match.

  Attributes:
    path: the checkpoint.
    step: its `global_step`; None if it has none.
    extra: the additional values, as numpy arrays by name.
    matched: from each restored variable to its name in the checkpoint.
    missing: variables that the checkpoint does not have; they are as they were.
    mismatched: variables of another shape there, with both shapes; they are as they were.
    unused: names in the checkpoint that no restored variable uses.
  """

  path: str
  step: int | None
  extra: dict[str, Any]
  matched: dict[str, str] = dataclasses.field(default_factory=dict)
  missing: tuple[str, ...] = ()
  mismatched: tuple[str, ...] = ()
  unused: tuple[str, ...] = ()

  def report(self) -> str:
    """Lines that tell what matched and what did not."""
    lines = [f"{self.path}: {len(self.matched)} variables restored"]
    renamed = [f"{n} (as {there})" for n, there in self.matched.items() if n != there]
    return "\n".join(
      lines
      + listed("of these under another name", renamed)
      + listed("not in the checkpoint, unchanged", self.missing)
      + listed("of another shape or kind, unchanged", self.mismatched)
      + listed("in the checkpoint, not used", self.unused)
    )


# ------------------------------------------------------------------------- finding


def newest_good(directory: str) -> str | None:
  """`verification.latest_checkpoint`, with the reading shared by all workers."""
  found: str | None = _first_good(directory, lambda path: path, is_folder=True, check_content=True)
  return found


def _first_good(
  path: str, use: Callable[[str], object], *, is_folder: bool, check_content: bool
) -> Any:
  """Calls `use` with the checkpoint of a path; with that of a folder that is the newest good one.

  Args:
    path: a checkpoint or a folder.
    use: a function; `DamagedCheckpointError` of it counts as damage.
    is_folder: whether the path is sure to mean a folder.
    check_content: whether to read the files before.

  Returns:
    What it returned; None if the folder has no checkpoint.

  Raises:
    DamagedCheckpointError: the checkpoint is damaged; or all of the folder.
  """
  found, error = None, None
  if workers.current().is_chief:
    try:
      found = _find(path, is_folder)
    except CheckpointError as e:
      error = e
  raise_together(f"restore {path}", error)
  is_folder, candidates = of_chief(found)
  damaged: list[Any] = []
  for candidate in candidates:
    # Reading another's checkpoint twice is worth it where there is an older one to fall back to.
    _refuse_newer(candidate)
    damages: list[Any] = _verify_together(candidate, is_folder) if check_content else []
    if not damages:
      try:
        return use(candidate)
      except DamagedCheckpointError as e:
        damages = [e.what or e]
    if not is_folder:
      raise damaged_error(candidate, damages)
    verification.warn(candidate, damages)
    damaged += damages
  if damaged:
    raise all_damaged(path, damaged)
  return None


def _refuse_newer(path: str) -> None:
  """Raises `NewerFormatError` in all workers for a checkpoint of a newer version."""
  error = None
  if workers.current().is_chief:
    try:
      verification.check_format(path)
    except CheckpointError as e:
      error = e
  raise_together(f"restore {path}", error)


def _find(path: str, is_folder: bool) -> tuple[bool, list[str]]:
  """Returns (whether the path means a folder, paths of its checkpoints or its only one)."""
  if is_folder or tf.io.gfile.isdir(path) and not tf.io.gfile.exists(path + INDEX):
    return True, files.candidates(path)
  return False, [verification.resolve(path)]


def _verify_together(path: str, reads_tensors: bool) -> list[Damage]:
  """`verification.verify`, each worker reading a share of the files.

  Args:
    path: a checkpoint.
    reads_tensors: whether to read those of a checkpoint without a manifest.
  """
  cluster = workers.current()
  error = None
  if cluster.size == 1:
    path = verification.resolve(path)
  elif not tf.io.gfile.exists(path + INDEX):
    error = CheckpointError(
      f"{cluster.name(cluster.index)} does not see {path}: all workers must see the same folder"
    )
  raise_together(f"restore {path}", error)
  # All workers use the manifest that the chief has read.
  records, damages = verification.records_of(path) if cluster.is_chief else ([], [])
  records, damages = of_chief(
    [[dataclasses.astuple(r) for r in records], [dataclasses.astuple(d) for d in damages]]
  )
  if damages:
    return [Damage(*d) for d in damages]
  if not records and not reads_tensors:
    return []
  if not records:
    own = verification.check_tensors(path, cluster.index, cluster.size)
    said = gather_texts(own[0].what if own else "")
    return [Damage(path, text) for text in said if text]
  records = [verification.FileRecord(*r) for r in records]
  codes = verification.check_files(path, records, cluster.index, cluster.size)
  # A file was looked at by one worker; the others say GOOD, which is 0.
  codes = workers.gather(np.asarray(codes, np.int32)).max(axis=0)
  return verification.damages_of(path, records, codes.tolist())


# ------------------------------------------------------------------------- restoring


def restore(
  path: str,
  wanted: Mapping[str, tuple[str, StoredVariable]],
  model: Set[str],
  *,
  is_folder: bool,
  ignore_missing: bool = False,
  ignore_unexpected: bool = False,
  ignore_mismatched: bool = False,
  check_content: bool = True,
) -> Restored | None:
  """Does the work of `Checkpointer.restore`; returns None if a folder has no checkpoint.

  Args:
    path: a checkpoint or a folder.
    wanted: by the name of each variable to restore its name in the checkpoint, and itself.
    model: names of all variables.
    is_folder: whether the path is sure to mean a folder, which need not exist.
    ignore_missing: leave variables that the checkpoint does not have unchanged, without an error.
    ignore_unexpected: allow the checkpoint to have variables that the model does not have.
    ignore_mismatched: leave variables that have another shape in the checkpoint unchanged.
    check_content: whether to verify the files first; else only damage in what is read is noticed.
  """

  def use(checkpoint: str) -> Restored | None:
    result, error = None, None
    try:
      found = reader.contents(checkpoint)
      converted = conversions(found, wanted)
      comparison = _compare({**found, **{n: c.spec for n, c in converted.items()}}, wanted)
      strict = _compare_strictly(found, converted, comparison, wanted, model)
      allowed = (ignore_missing, ignore_unexpected, ignore_mismatched)
      wrong = [[] if ignored else names for names, ignored in zip(strict, allowed)]
      if any(wrong):
        missing, unexpected, mismatched = wrong
        changes = [_changes(found, *wanted[n]) for n in comparison.mismatched if mismatched]
        raise not_of_this_model(checkpoint, missing, unexpected, mismatched, changes)
      result = _read(checkpoint, found, converted, comparison, wanted)
    except CheckpointError as e:
      error = e
    # Also without an error: another worker may have one.
    raise_together(f"restore {checkpoint}", error)
    return result

  result: Restored | None = _first_good(path, use, is_folder=is_folder, check_content=check_content)
  return result


@dataclasses.dataclass(frozen=True)
class _Comparison:
  """Comparison of a checkpoint with the variables to restore, by their names in the model."""

  matched: dict[str, str]
  missing: list[str]
  mismatched: dict[str, str]


def _compare(
  found: Mapping[str, tf.TensorSpec], wanted: Mapping[str, tuple[str, StoredVariable]]
) -> _Comparison:
  result = _Comparison({}, [], {})
  for name, (there, stored) in wanted.items():
    if there not in found:
      # Programs that were given a seed, and other libraries, have no run counter, say.
      if not name.startswith(OF_A_RUN):
        result.missing.append(name)
    elif found[there].shape != stored.shape.to_integer_list:
      dims = ", ".join(f"{d.name}:{d.size}" for d in stored.shape)
      result.mismatched[name] = f"{found[there].shape} in the checkpoint, [{dims}] in the model"
    elif found[there].dtype == tf.string:
      result.mismatched[name] = f"string in the checkpoint, {stored.master_dtype.name} here"
    else:
      result.matched[name] = there
  return result


def _compare_strictly(
  found: Mapping[str, tf.TensorSpec],
  converted: Mapping[str, Conversion],
  comparison: _Comparison,
  wanted: Mapping[str, tuple[str, StoredVariable]],
  model: Set[str],
) -> tuple[list[str], list[str], list[str]]:
  """Lists the missing, unexpected and mismatched variables, each with its shapes."""

  def label(name: str) -> str:
    there = wanted[name][0]
    return name if name == there else f"{name} (as {there})"

  missing = [f"{label(n)} {wanted[n][1].shape.to_integer_list}" for n in comparison.missing]
  known = {there for there, _ in wanted.values()} | model | _sources(converted)
  unexpected = [f"{n} {found[n].shape}" for n in _own_names(found) if n not in known]
  mismatched = [f"{label(n)}: {what}" for n, what in comparison.mismatched.items()]
  return missing, unexpected, mismatched


def _changes(
  found: Mapping[str, tf.TensorSpec], there: str, stored: StoredVariable
) -> list[Change] | None:
  """The dimensions of a variable that have another size in a checkpoint; None if it is not that."""
  old = found[there].shape.as_list()
  if len(old) != len(stored.shape.dims) or found[there].dtype == tf.string:
    return None
  return [(d.name, n, d.size) for d, n in zip(stored.shape.dims, old) if d.size != n]


def _own_names(found: Mapping[str, tf.TensorSpec]) -> list[str]:
  """The variables of a checkpoint, without what each run has."""
  return sorted(n for n in found if n != GLOBAL_STEP and not n.startswith((EXTRA, *OF_A_RUN)))


def _sources(converted: Mapping[str, Conversion]) -> set[str]:
  return {s for conversion in converted.values() for s in conversion.sources}


def _read(
  path: str,
  found: Mapping[str, tf.TensorSpec],
  converted: Mapping[str, Conversion],
  comparison: _Comparison,
  wanted: Mapping[str, tuple[str, StoredVariable]],
) -> Restored:
  """Reads what matches."""
  requests = []
  # Checkpoints of this library have no large slices; in others a part may cost reading the whole.
  in_parts = tf.io.gfile.exists(path + MANIFEST)
  for name, there in comparison.matched.items():
    stored = wanted[name][1]
    if there in converted:
      continue
    # The replicas of a slice share one read.
    by_begin: dict[tuple[int, ...], list[tf.Variable]] = {}
    for begin, v in stored.placed_slices:
      if stored.has_values(begin):
        by_begin.setdefault(begin, []).append(v)
    for begin, variables in by_begin.items():
      requests += reader.requests_for(there, found[there].dtype, stored, begin, variables, in_parts)
  reader.read_slices(path, requests)
  whole = reader.Values(path)
  for name, there in comparison.matched.items():
    if there in converted:
      wanted[name][1].assign(converted[there].value(whole))
  used = set(comparison.matched.values()) | _sources(converted)
  return Restored(
    path,
    int(whole[GLOBAL_STEP]) if GLOBAL_STEP in found else None,
    {n[len(EXTRA) :]: whole[n] for n in found if n.startswith(EXTRA)},
    comparison.matched,
    tuple(comparison.missing),
    tuple(f"{n}: {what}" for n, what in comparison.mismatched.items()),
    tuple(n for n in _own_names(found) if n not in used),
  )
