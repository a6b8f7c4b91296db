"""Starting from the checkpoint of another model: which variable is taken from where."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gin

from mesh_tensorflow import checkpoint as checkpoint_lib
from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.checkpoint.by_chief import by_chief
from mesh_tensorflow.errors import CheckpointError, ConfigError
from mesh_tensorflow.meshes.store import VariableStore
from mesh_tensorflow.running.lowering import RUN_COUNTER
from mesh_tensorflow.transformer.gin_config import model_config

_LOG = logging.getLogger("mesh_tensorflow")
_MODULE = "mesh_tensorflow.transformer.utils"
_NAMES_SHOWN = 8  # Of each list in a report.

# A layer in the name of a variable: "encoder/block_000/layer_001/...", or without the block.
_LAYER = re.compile(r"(?:block_(\d{3})/)?layer_(\d{3})")

_names_of_model: contextvars.ContextVar[tuple[str, ...] | None] = contextvars.ContextVar(
  "names_of_model", default=None
)


class UnmappedVariableError(CheckpointError, KeyError):
  """A variable of the model stands for none of the checkpoint."""

  # KeyError shows the quoted form of its message.
  __str__ = CheckpointError.__str__


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
def variable_filter_max_size(v: Any, max_size: float = 1e7) -> bool:
  """True if an `mtf.Variable` has at most `max_size` elements; for `run.variable_filter`."""
  return bool(v.size <= max_size)


@contextlib.contextmanager
def names_of_model(names: Sequence[str]) -> Iterator[None]:
  """Inside it, `flexible_ckpt_init_mapping` takes these for the names of the model's variables."""
  token = _names_of_model.set(tuple(names))
  try:
    yield
  finally:
    _names_of_model.reset(token)


@gin.configurable(module=_MODULE)
@affects("report")
def flexible_ckpt_init_mapping(
  ckpt_path: str = "",
  new_layers: Sequence[Any] | None = None,
  return_mapping_fn: bool = True,
  *,
  variable_names: Sequence[str] | None = None,
) -> Callable[[str], Any]:
  """Matches the layers of a model with those of a checkpoint that numbers them differently.

  The layers of both (of encoder and decoder by themselves, if there is an encoder) are put in
  order, block by block, and the first stands for the first, and so on; the checkpoint may have
  blocks where the model has none, and the other way round. Variables outside layers stand for
  those of the same name. For `init_checkpoint_variable_mapping.mapping_fn` and, in a scope and with
  `return_mapping_fn = False`, `should_load_variable.filter_fn`.

  Args:
    ckpt_path: the checkpoint.
    new_layers: numbers of layers (in each block) that only the model has: a pair of lists, of
      encoder and decoder; or, for a model of one stack, a list whose only element is the list.
    return_mapping_fn: whether to return names; else whether there is one.
    variable_names: the model's; by default those that are being restored.

  Returns:
    A function from a name in the model to the name in the checkpoint, which raises
    `UnmappedVariableError` (a KeyError) if there is none; or to a bool. It raises `ConfigError` if
    the checkpoint has another number of layers.

  Raises:
    CheckpointError: there is no such checkpoint.
    ConfigError: `ckpt_path` is not given.
  """
  if not ckpt_path:
    raise ConfigError("flexible_ckpt_init_mapping.ckpt_path is not bound")
  path = checkpoint_lib.resolve(ckpt_path)
  found = _names_in(path)
  new = tuple(tuple(part) for part in new_layers or ())

  def find(name: str) -> str | None:
    if not _LAYER.search(name):
      return name if name in found else None
    names = variable_names or _names_of_model.get()
    if names is None:
      raise ConfigError(
        "flexible_ckpt_init_mapping: there is no model; give variable_names, or use it in "
        "init_checkpoint_variable_mapping.mapping_fn"
      )
    return _mapping(path, tuple(names), new).get(name)

  def map_name(name: str) -> str:
    there = find(name)
    if there is None:
      raise UnmappedVariableError(
        f"variable {name} of the model stands for none of the {len(found)} of {path}; leave it out "
        "by should_load_variable.filter_fn"
      )
    return there

  return map_name if return_mapping_fn else lambda name: find(name) is not None


@functools.lru_cache(maxsize=8)
def _names_in(path: str) -> frozenset[str]:
  return frozenset(checkpoint_lib.describe(path))


# Gin calls `flexible_ckpt_init_mapping` anew for each variable.
@functools.lru_cache(maxsize=8)
def _mapping(
  path: str, names: tuple[str, ...], new_layers: tuple[tuple[int, ...], ...]
) -> dict[str, str]:
  """From the names of layers' variables in the model to names in the checkpoint."""
  found = _names_in(path)
  stacks = ("encoder/", "decoder/") if any(n.startswith("encoder/") for n in names) else ("",)
  if new_layers and len(new_layers) != len(stacks):
    raise ConfigError(
      f"flexible_ckpt_init_mapping.new_layers has {len(new_layers)} lists; the model has "
      f"{len(stacks)} stack(s): give one list for each"
    )
  mapping = {}
  for i, stack in enumerate(stacks):
    mine = [n for n in names if n.startswith(stack)]
    new = new_layers[i] if new_layers else ()
    ours = [layer for layer in _layers(mine) if layer[1] not in new]
    theirs = _layers([n for n in found if n.startswith(stack)])
    if len(ours) != len(theirs):
      raise ConfigError(
        f"flexible_ckpt_init_mapping: {stack or 'the model '}has {len(ours)} layers that are not "
        f"new, and the checkpoint {path} has {len(theirs)}"
      )
    there = dict(zip(ours, theirs))
    for name in mine:
      match = _LAYER.search(name)
      layer = there.get(_layer(match)) if match else None
      if match and layer is not None:
        renamed = name[: match.start()] + _text(layer) + name[match.end() :]
        if renamed in found:
          mapping[name] = renamed
  return mapping


def _layer(match: re.Match[str]) -> tuple[int | None, int]:
  block, layer = match.groups()
  return None if block is None else int(block), int(layer)


def _layers(names: Sequence[str]) -> list[tuple[int | None, int]]:
  """All (block, layer) up to the highest numbers in names, in order; block None: no blocks."""
  found = [_layer(m) for m in map(_LAYER.search, names) if m]
  if not found:
    return []
  layers = range(1 + max(layer for _, layer in found))
  blocks = [block for block, _ in found if block is not None]
  numbers = range(1 + max(blocks)) if blocks else [None]
  return [(block, layer) for block in numbers for layer in layers]


def _text(layer: tuple[int | None, int]) -> str:
  block, number = layer
  return f"layer_{number:03}" if block is None else f"block_{block:03}/layer_{number:03}"


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
  names = [n for n in store.names if not n.startswith(RUN_COUNTER)]
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

  def restore(self, store: VariableStore, config: model_config.ModelConfig) -> list[str]:
    """See `restore`; also compares the models. Returns lines that tell what was done."""
    done = restore(self.path, store, self._filter)
    compared = by_chief(lambda: model_config.compare_with_initial(self.path, config))
    return [done, *compared]


def has_variables(path: str, store: VariableStore) -> bool:
  """True if a checkpoint has all variables of a store, with the same shapes.

  Args:
    path: a checkpoint.
    store: the variables.
  """
  found = checkpoint_lib.describe(path)
  return all(
    stored.name in found and found[stored.name].shape == stored.shape.to_integer_list
    for stored in store
    if not stored.name.startswith(RUN_COUNTER)
  )


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
