"""Starting from the checkpoint of another model: which variable is taken from where."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import gin

from mesh_tensorflow import checkpoint as checkpoint_lib
from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.checkpoint.by_chief import by_chief
from mesh_tensorflow.errors import CheckpointError
from mesh_tensorflow.meshes.store import VariableStore
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.running.lowering import OF_A_RUN
from mesh_tensorflow.training.program import ModelRecord

_LOG = logging.getLogger("mesh_tensorflow")
_MODULE = "mesh_tensorflow.transformer.utils"
_NAMES_SHOWN = 8  # Of each list in a report.

_names_of_model: contextvars.ContextVar[tuple[str, ...] | None] = contextvars.ContextVar(
  "names_of_model", default=None
)


@gin.configurable(module=_MODULE)
@affects("report")
def init_checkpoint_variable_mapping(
  name: str, mapping_fn: Callable[[str], str] | None = None
) -> str:
  """The name, in `run.init_checkpoint`, of a variable of the model: the same, or `mapping_fn`'s."""
  return mapping_fn(name) if mapping_fn else name


@gin.configurable(module=_MODULE)
@affects("report")
def should_load_variable(name: str, filter_fn: Callable[[str], bool] | None = None) -> bool:
  """True if a variable is to be read from `run.init_checkpoint` (by default all are)."""
  return bool(filter_fn(name)) if filter_fn else True


@gin.configurable(module=_MODULE)
@affects("report")
def variable_filter_max_size(v: Variable, max_size: float = 1e7) -> bool:
  """True if an `mtf.Variable` has at most `max_size` elements; for `run.variable_filter`."""
  return bool(v.size <= max_size)


@contextlib.contextmanager
def names_of_model(names: Sequence[str]) -> Iterator[None]:
  """Context manager in which functions that map names of variables can ask for all of them."""
  token = _names_of_model.set(tuple(names))
  try:
    yield
  finally:
    _names_of_model.reset(token)


def current_names() -> tuple[str, ...] | None:
  """The names of the model's variables that are being restored; None outside."""
  return _names_of_model.get()


def step_of(path: str, name_filter: str = "") -> int:
  """The step at which a training that starts from a checkpoint begins: its `global_step`, or 0.

  Args:
    path: a checkpoint.
    name_filter: see `restore`.

  Raises:
    CheckpointError: there is no such checkpoint.
  """
  path = checkpoint_lib.resolve(path)
  found = checkpoint_lib.describe(path)
  name = checkpoint_lib.GLOBAL_STEP
  if name not in found or not re.search(name_filter, name):
    return 0
  if not should_load_variable(name):
    return 0
  return int(checkpoint_lib.Values(path)[name])


def restore(path: str, store: VariableStore, name_filter: str = "") -> str:
  """Sets variables from the checkpoint of another model, which may have others.

  A variable is set if `should_load_variable` says so and the checkpoint has one of the name that
  `init_checkpoint_variable_mapping` gives.

  Args:
    path: a checkpoint.
    store: the variables, which must exist: run or trace the program first.
    name_filter: regular expression; only variables of the checkpoint in whose names it is found
      are taken.

  Returns:
    Lines that tell what matched and what did not. (The log, at level info, has all names.)

  Raises:
    CheckpointError: there is no such checkpoint; or nothing in it is of this model; or a variable
      has another shape.
  """
  path = checkpoint_lib.resolve(path)
  # The counter of runs belongs to the programs that draw random numbers, not to the model.
  names = [n for n in store.names if not n.startswith(OF_A_RUN)]
  with names_of_model([*names, checkpoint_lib.GLOBAL_STEP]):
    mapped = {n: init_checkpoint_variable_mapping(n) for n in names if should_load_variable(n)}
  wanted = {n: there for n, there in mapped.items() if re.search(name_filter, there)}
  found = checkpoint_lib.describe(path)
  if not any(there in found for there in wanted.values()):
    raise CheckpointError(_nothing_matches(path, names, mapped, wanted, sorted(found)))
  restored = checkpoint_lib.Checkpointer(os.path.dirname(path), store).restore(
    path,
    name_in_checkpoint=lambda name: wanted.get(name, name),
    should_restore=wanted.__contains__,
    ignore_missing=True,
    ignore_unexpected=True,
  )
  left_out = [n for n in names if n not in wanted]
  title = "  left out by should_load_variable or init_variable_filter, unchanged"
  lines = [f"started from {restored.report()}"]
  if left_out:
    lines += [f"{title} ({len(left_out)}):", *(f"    {n}" for n in left_out)]
  whole = "\n".join(lines)
  _LOG.info("%s", whole)
  return _shortened(whole)


class InitialCheckpoint:
  """The checkpoint that a training starts from, if its folder has none.

  Args:
    given: `run.init_checkpoint`: a checkpoint, or a folder.
    name_filter: see `restore`.
  """

  def __init__(self, given: str, name_filter: str):
    self._given = given
    self._filter = name_filter

  @functools.cached_property
  def path(self) -> str:
    """The checkpoint; of a folder its newest."""
    return str(by_chief(lambda: checkpoint_lib.resolve(self._given)))

  def step(self) -> int:
    """See `step_of`."""
    return step_of(self.path, self._filter)

  def restore(self, store: VariableStore, record: ModelRecord | None) -> list[str]:
    """See `restore`; also compares the models. Returns lines that tell what was done."""
    done = restore(self.path, store, self._filter)
    if record is None:
      return [done]
    return [done, *by_chief(lambda: record.compare_with_initial(self.path))]


def _shortened(report: str) -> str:
  """A report with the first names of each list: large models have thousands."""
  lines: list[str] = []
  count = 0
  for line in [*report.split("\n"), ""]:
    if line.startswith("    "):
      count += 1
      if count <= _NAMES_SHOWN:
        lines.append(line)
      continue
    if count > _NAMES_SHOWN:
      lines.append(f"    and {count - _NAMES_SHOWN} more")
    lines.append(line)
    count = 0
  return "\n".join(lines[:-1])


def _nothing_matches(
  path: str,
  names: Sequence[str],
  mapped: Mapping[str, str],
  wanted: Mapping[str, str],
  found: Sequence[str],
) -> str:
  """The error for a checkpoint of which nothing is of the model."""

  def some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")

  text = (
    f"run.init_checkpoint {path}: none of the model's {len(names)} variables is taken from it: "
  )
  if not mapped:
    return text + "should_load_variable.filter_fn leaves all of them out"
  if not wanted:
    return text + (
      "tpu_estimator_model_fn.init_variable_filter is found in none of the names that they have "
      f"there: {some(sorted(mapped.values()))}"
    )
  return text + (
    f"looked for were {some(sorted(wanted.values()))}; it has {some(found)}. If it is of a model "
    "with other names, bind init_checkpoint_variable_mapping.mapping_fn, a function from the "
    "model's names to its (@flexible_ckpt_init_mapping() if layers are numbered differently); "
    "else give the checkpoint of a model of this run.model_type"
  )
