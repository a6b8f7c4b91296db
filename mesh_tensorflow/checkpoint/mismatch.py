"""Words for a checkpoint that is of another model: how many variables differ, and by what."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from mesh_tensorflow.errors import CheckpointError

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
