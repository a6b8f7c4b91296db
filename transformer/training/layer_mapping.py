"""Initial checkpoints of a model that numbers its layers differently."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import gin

from mesh_tensorflow import checkpoint as checkpoint_lib
from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.errors import CheckpointError, ConfigError
from mesh_tensorflow.training.init_checkpoint import current_names

_MODULE = "mesh_tensorflow.transformer.utils"

# A layer in the name of a variable: "encoder/block_000/layer_001/...", or without the block.
_LAYER = re.compile(r"(?:block_(\d{3})/)?layer_(\d{3})")


class UnmappedVariableError(CheckpointError, KeyError):
  """A variable of the model stands for none of the checkpoint."""

  # KeyError shows the quoted form of its message.
  __str__ = CheckpointError.__str__


@gin.configurable(module=_MODULE)
@affects("report")
def flexible_ckpt_init_mapping(
  ckpt_path: str = "",
  new_layers: Sequence[Sequence[int]] | None = None,
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
    names = variable_names or current_names()
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
