"""Ways to build the training step of one model, among which a layout's search chooses.

They compute the same, with other memory and time: the batch in one piece or in microbatches, with
activations that are kept or computed again, variables whole or in shards, the layers on one mesh or
in the stages of a pipeline. What is chosen is bound
like any other setting, so that training, its record and a resume see it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gin

import mesh_tensorflow as mtf
from mesh_settings.run import RunSettings
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.meshes.layout import names_of_dimensions
from mesh_tensorflow.planning.auto_layout import LayoutChoice
from mesh_tensorflow.transformer.gin_config.checks import RUN
from mesh_tensorflow.transformer.model.batching import serialize_num_microbatches
from mesh_tensorflow.transformer.model.layer_stack import LayerStack, ReversibleLayerStack, as_names
from mesh_tensorflow.transformer.model.model_building import Model

MICROBATCHES, RECOMPUTE, SHARD_STATE = "microbatches", "recompute", "shard_state"
STAGES = "stages"
CHOICES = (MICROBATCHES, RECOMPUTE, STAGES, SHARD_STATE)

_ONCE = "gathered once"
# More microbatches than this rarely save anything: what they all need is there each time.
_MOST_MICROBATCHES = 16
# Stages are idle while the first and the last microbatches pass: many make that a small part. Each
# number is a graph to read; between these the time differs little.
_IN_STAGES = (1, 8, 32, 128, 512)
# What gin binds for a variant: (scope, selector, argument).
_ACCUMULATION = ("", RUN, "gradient_accumulation_steps")
_RECOMPUTATION = ("", "mesh_tensorflow.transformer.transformer.LayerStack", "recompute_grads")
_SHARDS = ("", RUN, "shard_state")
_RESHARDS = ("", RUN, "reshard_after_forward")
_STAGES = ("", RUN, "pipeline_stages")


@dataclasses.dataclass(frozen=True)
class Variant:
  """One way to build a training step.

  Attributes:
    microbatches: into how many a batch is cut; None: as gin says.
    recompute: whether activations are computed again, or the classes of layers whose are; False:
      as gin says.
    shard_state: mesh dimensions over which variables are in shards; none: as gin says.
    reshard_after_forward: of these, whether they are gathered anew before each use.
    stages: number of stages of a pipeline; None: as gin says.
  """

  microbatches: int | None = None
  recompute: bool | tuple[str, ...] = False
  shard_state: tuple[str, ...] = ()
  reshard_after_forward: bool = True
  stages: int | None = None

  @property
  def name(self) -> str:
    """Its name among the choices; "" if all is as gin says."""
    words = [] if self.stages is None else [f"{STAGES}={self.stages}"]
    words += [] if self.microbatches is None else [f"{MICROBATCHES}={self.microbatches}"]
    if isinstance(self.recompute, tuple):
      words.append(f"{RECOMPUTE}={'+'.join(self.recompute)}")
    elif self.recompute:
      words.append(RECOMPUTE)
    if self.shard_state:
      words.append(f"{SHARD_STATE}={'+'.join(self.shard_state)}")
      words += [] if self.reshard_after_forward else [_ONCE]
    return ", ".join(words)

  @property
  def settings(self) -> dict[tuple[str, str, str], Any]:
    """The gin bindings of this variant."""
    found: dict[tuple[str, str, str], Any] = {}
    if self.microbatches is not None:
      found[_ACCUMULATION] = self.microbatches
    if self.recompute:
      found[_RECOMPUTATION] = self.recompute
    if self.shard_state:
      found[_SHARDS] = ",".join(self.shard_state)
      found[_RESHARDS] = self.reshard_after_forward
    if self.stages is not None:
      found[_STAGES] = self.stages
    return found

  def applied(self, settings: RunSettings) -> RunSettings:
    """The settings of a run with those of this variant.

    Args:
      settings: of the run.
    """
    own = {k[2]: v for k, v in self.settings.items() if k[1] == RUN}
    return dataclasses.replace(settings, **own) if own else settings

  def bind(self) -> None:
    """Binds what models read from gin when they are built."""
    if self.recompute:
      with gin.unlock_config():
        gin.bind_parameter("{1}.{2}".format(*_RECOMPUTATION), self.recompute)

  def set_on(self, model: Model) -> None:
    """Makes a model compute its activations again.

    Args:
      model: a model that was built as gin says, and not called yet.
    """
    if self.recompute:
      for stack in _stacks(model):
        stack.recompute_grads = self.recompute


AS_BOUND = Variant()


def named(name: str) -> Variant:
  """The variant of a name.

  Args:
    name: as `Variant.name` has it.
  """
  count = re.search(rf"{MICROBATCHES}=(\d+)", name)
  kinds = re.search(rf"{RECOMPUTE}=([^,]+)", name)
  shards = re.search(rf"{SHARD_STATE}=([^,]+)", name)
  stages = re.search(rf"{STAGES}=(\d+)", name)
  return Variant(
    None if count is None else int(count[1]),
    RECOMPUTE in name.split(", ") if kinds is None else tuple(kinds[1].split("+")),
    () if shards is None else tuple(shards[1].split("+")),
    _ONCE not in name.split(", "),
    None if stages is None else int(stages[1]),
  )


def of_choice(choice: LayoutChoice) -> Variant:
  """The variant of a layout that a search has chosen.

  Args:
    choice: the layout.
  """
  return dataclasses.replace(
    named(choice.settings),
    shard_state=choice.shard_state,
    reshard_after_forward=choice.reshard_after_forward,
    stages=choice.stages if choice.stages > 1 else None,
  )


def kept(found: Mapping[str, Any], settings: RunSettings) -> Variant:
  """The variant that an earlier run has found, as far as nothing else is bound now.

  Args:
    found: as `model_config.found_in` returns it.
    settings: of the run.
  """
  bound = settings.gradient_accumulation_steps is not None
  count = None if bound else found.get(_ACCUMULATION[2])
  recompute = found.get(_RECOMPUTATION[2], False)
  shards = () if settings.shard_state else names_of_dimensions(found.get(_SHARDS[2], ""))
  return Variant(
    count,
    recompute if isinstance(recompute, bool) else as_names(recompute),
    tuple(shards),
    bool(found.get(_RESHARDS[2], True)),
    None if settings.pipeline_stages > 1 else found.get(_STAGES[2]),
  )


def gin_lines(variant: Variant) -> list[str]:
  """Bindings of a variant, as lines of a gin file.

  Args:
    variant: the variant.
  """
  return [
    f"{'.'.join(selector.split('.')[-2:])}.{argument} = {value!r}"
    for (_, selector, argument), value in variant.settings.items()
  ]


def variants(
  choices: Sequence[str],
  settings: RunSettings,
  batch_size: int,
  sequence_length: Mapping[str, int],
  kinds: Sequence[str] = (),
) -> list[Variant]:
  """All that are to choose from, the one that is bound first; shards apart, which need a mesh.

  Args:
    choices: what is free: names of `CHOICES`.
    settings: of the run.
    batch_size: number of sequences.
    sequence_length: dict from feature to number of tokens.
    kinds: classes of the model's layers, of which each may be computed again by itself.

  Raises:
    ConfigError: a name is unknown, or what is to be chosen is bound.
  """
  for name in choices:
    if name not in CHOICES:
      raise ConfigError(
        f"choose_layout.choices: {name!r} is none of {', '.join(map(repr, CHOICES))}"
        + (f"; {SHARD_STATE!r} splits an optimizer's slots" if "optim" in name else "")
      )
  if SHARD_STATE in choices and settings.shard_state:
    raise ConfigError(
      f"run.shard_state is {settings.shard_state!r}, but choose_layout.choices has "
      f"{SHARD_STATE!r}: leave out one of them"
    )
  if STAGES in choices and settings.pipeline_stages > 1:
    raise ConfigError(
      f"run.pipeline_stages is {settings.pipeline_stages}, but choose_layout.choices has "
      f"{STAGES!r}: leave out one of them"
    )
  if STAGES in choices and settings.pipeline_chunks > 1:
    raise ConfigError(
      f"run.pipeline_chunks is {settings.pipeline_chunks}, but choose_layout.choices has "
      f"{STAGES!r}, of which each has one run of layers: leave out one of them"
    )
  if STAGES in choices and not isinstance(settings.pipeline_cut, str):
    raise ConfigError(
      f"run.pipeline_cut is {tuple(settings.pipeline_cut)}, but choose_layout.choices has "
      f"{STAGES!r}, whose number it cannot be for: leave out one of them"
    )
  counts: list[int | None] = [None]
  bound = settings.gradient_accumulation_steps
  if MICROBATCHES in choices:
    if bound is not None:
      raise ConfigError(
        f"run.gradient_accumulation_steps is {bound}, but choose_layout.choices has "
        f"{MICROBATCHES!r}: leave out one of them"
      )
    batch = mtf.Dimension("batch", batch_size)
    as_bound = serialize_num_microbatches(batch, dict(sequence_length), "", "")
    counts += [n for n in _powers_of_two() if batch_size % n == 0 and n != as_bound]
  if STAGES in choices and bound is None:
    # Their number by default follows from that of the stages: all that are looked at are told.
    divisors = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
    nearest = [max(n for n in divisors if n <= most) for most in _IN_STAGES]
    counts = list(dict.fromkeys(nearest))
  again: list[bool | tuple[str, ...]] = [False]
  if RECOMPUTE in choices:
    again += [(kind,) for kind in kinds if len(kinds) > 1] + [True]
  return [Variant(n, r) for n in counts for r in again]


def kinds_of_layers(model: Model) -> list[str]:
  """Names of the classes of a model's layers whose recomputation is free.

  There is none if gin binds what is computed again, or a stack does so with all layers or none.

  Args:
    model: the model.
  """
  stacks = list(_stacks(model))
  if any(s.recompute_grads or isinstance(s, ReversibleLayerStack) for s in stacks):
    return []
  return list(dict.fromkeys(type(layer).__name__ for stack in stacks for layer in stack.layers))


def recomputed(model: Model) -> str:
  """A sentence that says which layers of a model training computes again; "" if none.

  Args:
    model: the model.
  """
  layers = [(stack, layer) for stack in _stacks(model) for layer in stack.layers]
  again = [type(layer).__name__ for stack, layer in layers if stack.recomputes(layer)]
  if not again:
    return ""
  told = ", ".join(f"{again.count(kind)} {kind}" for kind in dict.fromkeys(again))
  return f"Computed again in the backward pass: {len(again)} of {len(layers)} layers ({told})"


def _powers_of_two() -> Iterator[int]:
  n = 1
  while n <= _MOST_MICROBATCHES:
    yield n
    n *= 2


def _stacks(model: object) -> Iterator[LayerStack]:
  """The stacks of a model, and of those that it is made of."""
  stack = getattr(model, "layer_stack", None)
  if isinstance(stack, LayerStack):
    yield stack
  for part in ("encoder", "decoder", "student"):
    if hasattr(model, part):
      yield from _stacks(getattr(model, part))
