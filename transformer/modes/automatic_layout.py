"""Layouts and mesh shapes that are "auto": searched for before the model is built.

    run.layout_rules = "auto"   the layout with the least predicted time of a training step
    run.mesh_shape = "auto"     the mesh, too, of all that `run.num_devices` devices make
    choose_layout.choices       microbatches, recomputation, state in shards and stages, too

What is found is as if it had been bound: the program, operative_config.gin and the record of each
checkpoint have the rules in place of "auto". A run that goes on from such a checkpoint keeps its
layout, so that a resume neither searches nor changes its speed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_settings.run import RunSettings
from mesh_tensorflow import checkpoint, workers
from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.checkpoint.by_chief import by_chief
from mesh_tensorflow.errors import ConfigError, LayoutError, OutOfMemoryError
from mesh_tensorflow.planning.auto_layout import LayoutChoice
from mesh_tensorflow.planning.machine import Machine, convert_to_machine
from mesh_tensorflow.planning.program import machine_of, read_once
from mesh_tensorflow.planning.text import format_bytes, format_seconds
from mesh_tensorflow.program.dimensions import ShapeLike
from mesh_tensorflow.transformer.gin_config import model_config, operative
from mesh_tensorflow.transformer.gin_config.checks import RUN
from mesh_tensorflow.transformer.model.batching import compute_batch_size
from mesh_tensorflow.transformer.model.mesh_setup import is_auto
from mesh_tensorflow.transformer.modes import variants
from mesh_tensorflow.transformer.modes.layout_rounds import Rounds, Start, mesh_text, rules_text
from mesh_tensorflow.transformer.modes.planned_machine import usual_machine as usual_machine
from mesh_tensorflow.transformer.modes.planned_steps import StepMaker
from mesh_tensorflow.transformer.modes.variants import AS_BOUND, Variant


@dataclasses.dataclass(frozen=True)
class Found:
  """The values found for "auto" in a run.

  Attributes:
    mesh_shape: the mesh shape.
    layout_rules: the layout rules.
    why: a text that says where the values come from.
    variant: how the training step is built.
  """

  mesh_shape: mtf.Shape
  layout_rules: mtf.LayoutRules
  why: str
  variant: Variant = AS_BOUND


def is_asked(settings: RunSettings) -> bool:
  """True if the layout or the mesh shape of `run` is "auto"."""
  return is_auto(settings.mesh_shape) or is_auto(settings.layout_rules)


def mesh_to_join(
  mesh_shape: ShapeLike, num_devices: int | None, mesh_devices: list[str] | None
) -> mtf.Shape:
  """A mesh shape of the right size, for workers that must join before anything can be searched.

  Args:
    mesh_shape: of `run`: a mesh shape, or "auto".
    num_devices: of `run`.
    mesh_devices: of `run`.

  Raises:
    ConfigError: it is "auto", and nobody says how many devices there are.
  """
  if not is_auto(mesh_shape):
    shape: mtf.Shape = mtf.convert_to_shape(mesh_shape)
    if num_devices is not None and num_devices != shape.size:
      raise ConfigError(
        f"run.num_devices is {num_devices}, but run.mesh_shape {mesh_text(shape)!r} has "
        f"{shape.size} processors; leave out one of them, or bind run.mesh_shape = 'auto'"
      )
    return shape
  if num_devices is not None and num_devices < 1:
    raise ConfigError(f"run.num_devices is {num_devices}; it must be at least 1")
  if num_devices is None:
    gpus = len(tf.config.list_physical_devices("GPU")) * workers.cluster_from_environment().size
    num_devices = len(mesh_devices) if mesh_devices else gpus
  if not num_devices:
    raise ConfigError(
      "run.mesh_shape is 'auto': say for how many devices, such as run.num_devices = 8"
    )
  return mtf.Shape([mtf.Dimension("all", num_devices)])


def all_devices(settings: RunSettings, shape: mtf.Shape) -> int:
  """Number of devices of all stages.

  Args:
    settings: of the run.
    shape: as `mesh_to_join` returns it: of all devices if the mesh is "auto", else of a stage.
  """
  return int(shape.size) * (1 if is_auto(settings.mesh_shape) else settings.pipeline_stages)


def find(
  settings: RunSettings,
  sequence_length: Mapping[str, int] | None,
  on_tpu: bool = False,
) -> Found:
  """Finds what "auto" stands for: in the newest checkpoint, or by a search.

  Several workers call it together; the chief searches.

  Args:
    settings: of the run.
    sequence_length: dict from feature to number of tokens.
    on_tpu: whether it is for a TPU, of a kind that is not known.

  Raises:
    ConfigError: the batch depends on the layout; or nothing to search is bound.
    LayoutError: no layout suits the model.
    OutOfMemoryError: no layout fits.
  """
  shape = mesh_to_join(settings.mesh_shape, settings.num_devices, settings.mesh_devices)

  def look() -> list[str]:
    kept = _kept(settings, shape)
    if kept is not None:
      return [
        mesh_text(kept.mesh_shape),
        rules_text(kept.layout_rules),
        kept.why,
        kept.variant.name,
      ]
    if sequence_length is None:
      raise ConfigError("run.layout_rules or run.mesh_shape is 'auto': bind run.sequence_length")
    batch_size = whole_batch(settings.batch_size, sequence_length)
    make = StepMaker(settings, sequence_length, batch_size)
    choice = search(settings, make, on_tpu)
    why = (
      f"{format_seconds(choice.seconds)} a step and {format_bytes(choice.memory)} a device "
      f"predicted for {choice.machine.name}, "
      + ("no layout is faster" if choice.proven else "the best found in time")
    )
    built = variants.of_choice(choice)
    if settings.shard_state:  # It is bound, not found.
      built = dataclasses.replace(built, shard_state=())
    return [mesh_text(choice.mesh_shape), rules_text(choice.layout), why, built.name]

  mesh, rules, why, built = by_chief(look)
  variant = variants.named(built)
  found = Found(mtf.convert_to_shape(mesh), mtf.convert_to_layout_rules(rules), why, variant)
  for name, text in (("mesh_shape", mesh), ("layout_rules", rules)):
    # Bound values are recorded, too: found rules hold for one mesh, a found mesh for some rules.
    operative.say_found(
      ("", RUN, name), text, f"found: {why}" if is_auto(getattr(settings, name)) else None
    )
  for key, value in variant.settings.items():
    operative.say_found(key, value, f"found: {why}")
  variant.bind()
  return found


def whole_batch(batch_size: int | tuple[str, int], sequence_length: Mapping[str, int]) -> int:
  """Number of sequences in a batch whose layout is not known yet.

  Args:
    batch_size: of `run`.
    sequence_length: dict from feature to number of tokens.

  Raises:
    ConfigError: it depends on the layout.
  """
  if isinstance(batch_size, int):
    return batch_size
  method, number = batch_size
  if str(method).endswith("_per_replica"):
    raise ConfigError(
      f"run.batch_size is {tuple(batch_size)}: how many replicas there are depends on the layout, "
      "which is 'auto'; give the whole batch, such as run.batch_size = ('tokens_per_batch', "
      f"{8 * number})"
    )
  return compute_batch_size(dict(sequence_length), "", "", (method, number))


@gin.configurable(module="mesh_tensorflow.transformer.plan", allowlist=[
  "machine", "memory_limit", "fixed", "time_limit", "alternatives", "choices"
])  # fmt: skip
@affects("report")
def choose_layout(
  make: StepMaker,
  mesh_shape: mtf.Shape | None,
  devices: int,
  layout_rules: mtf.LayoutRules | None,
  default_machine: str,
  implementation: str = "auto",
  *,
  machine: str | None = None,
  memory_limit: float | None = None,
  fixed: str = "",
  time_limit: float = 60.0,
  alternatives: int = 9,
  choices: Sequence[str] = (),
  stages: int = 1,
  bound: Start | None = None,
) -> LayoutChoice:
  """Searches for layouts and mesh shapes of a model's training step; see `mtf.auto_layout`.

  Args:
    make: makes the training step for a mesh and a layout.
    mesh_shape: the mesh shape; None: it is searched for, too.
    devices: how many there are.
    layout_rules: the layout, if only the mesh is searched for; else None.
    default_machine: the machine where none is given.
    implementation: "placement" or "simd", of which a machine that was measured knows more.
    machine: a machine by its name, or a file; see `mtf.planning.Machine`.
    memory_limit: bytes that a device may hold; the memory of the machine's by default.
    fixed: layout rules that the layout must have.
    time_limit: seconds of a search, after which the best so far is taken.
    alternatives: how many of the next best are told.
    choices: what is chosen, too: "microbatches" (`run.gradient_accumulation_steps`), "recompute"
      (`LayerStack.recompute_grads`: no layers, those of one class, or all), "shard_state"
      (`run.shard_state`: the whole mesh, or nothing), "stages" (`run.pipeline_stages` and, unless
      bound, microbatches).
    stages: number of stages that is bound; `mesh_shape` is then that of each.
    bound: a layout that is bound, which is timed as well, and which a second search begins with.

  Raises:
    ConfigError: there is no such machine, or a choice is unknown, or bound.
    LayoutError: no layout suits the model.
    OutOfMemoryError: no layout fits.
  """
  chosen = convert_to_machine(machine or default_machine)
  assert chosen is not None
  # The programs built here do not show that they will run on several workers.
  chosen = machine_of(chosen.variant(implementation), None, devices)
  by_name, in_shards = {v.name: v for v in make.variants(choices)}, variants.SHARD_STATE in choices
  searched = variants.STAGES in choices
  if searched and (mesh_shape is not None or layout_rules is not None):
    raise ConfigError(
      f"choose_layout.choices has {variants.STAGES!r}, but of another number of stages the mesh is "
      "another one: bind run.mesh_shape = 'auto' and run.layout_rules = 'auto'; rules that all "
      "layouts must have are choose_layout.fixed"
    )
  if mesh_shape is None and devices % stages:
    raise ConfigError(
      f"run.pipeline_stages is {stages}, which does not divide the {devices} devices "
      "(run.num_devices)"
    )
  if mesh_shape is None and bound is None:
    rules = mtf.convert_to_layout_rules(fixed) if layout_rules is None else layout_rules
    make.check_shards({name for _, name in rules.pairs})
  if layout_rules is not None:
    return _best_mesh(
      make, layout_rules, devices // stages, chosen, memory_limit, alternatives, by_name, in_shards
    )
  options: dict[str, Any] = {
    "devices": devices if mesh_shape is None else None,
    "mesh_shape": mesh_shape,
    "machine": chosen,
    "memory_limit": memory_limit,
    "fixed": fixed,
    "alternatives": alternatives,
    "time_limit": time_limit,
    "shard_state": in_shards,
  }
  if searched:
    options["stages"] = [n for n in range(1, devices + 1) if devices % n == 0]
  rounds = Rounds(make, by_name, options)
  shape = mesh_shape or mtf.Shape([mtf.Dimension("all", devices // stages)])
  rounds.search(Start(shape, mtf.LayoutRules([])))
  # Microbatches for an unsplit batch may hide what splitting the batch would save.
  widest = max(shape, key=lambda m: m.size, default=None)
  if widest is not None and widest.size > 1 and not make.batch_size % widest.size:
    rounds.search(Start(shape, mtf.LayoutRules([("batch", widest.name)])))
  if bound is not None:
    rounds.search(bound)
    rounds.add(bound)
  return rounds.best()


def search(settings: RunSettings, make: StepMaker, on_tpu: bool = False) -> LayoutChoice:
  """Searches for what is "auto" among the arguments of `run`, or, if nothing is, for both.

  Args:
    settings: of the run.
    make: makes the training step for a mesh and a layout.
    on_tpu: whether it is for a TPU, of a kind that is not known.
  """
  mesh, rules = settings.mesh_shape, settings.layout_rules
  shape = mesh_to_join(mesh, settings.num_devices, settings.mesh_devices)
  free = is_auto(mesh) or not is_auto(rules)
  only_mesh = is_auto(mesh) and not is_auto(rules)
  devices = all_devices(settings, shape)
  with read_once():
    return choose_layout(
      make,
      None if free else shape,
      devices,
      mtf.convert_to_layout_rules(rules) if only_mesh else None,
      usual_machine(devices, on_tpu),
      settings.mesh_implementation,
      stages=settings.pipeline_stages,
      bound=None if is_asked(settings) else Start(shape, mtf.convert_to_layout_rules(rules)),
    )


def _kept(settings: RunSettings, shape: mtf.Shape) -> Found | None:
  """The layout that the newest checkpoint's run has found, if it is for what is bound now."""
  model_dir = settings.model_dir
  path = checkpoint.latest_checkpoint(model_dir) if model_dir else None
  record = model_config.found_in(path) if path else {}
  mesh, rules = record.get("mesh_shape"), record.get("layout_rules")
  if mesh is None or rules is None:
    return None
  kept = Found(
    mtf.convert_to_shape(mesh),
    mtf.convert_to_layout_rules(rules),
    f"kept from {path}",
    variants.kept(record, settings),
  )
  if is_auto(settings.mesh_shape):
    stages = kept.variant.stages or settings.pipeline_stages
    if kept.mesh_shape.size * stages != shape.size:
      return None
  elif kept.mesh_shape != shape:
    return None
  bound = settings.layout_rules
  if not is_auto(bound) and kept.layout_rules != mtf.convert_to_layout_rules(bound):
    return None
  return kept


def _best_mesh(
  make: StepMaker,
  rules: mtf.LayoutRules,
  devices: int,
  machine: Machine,
  memory_limit: float | None,
  alternatives: int,
  by_name: Mapping[str, Variant],
  in_shards: bool,
) -> LayoutChoice:
  """The sizes of the mesh dimensions that given rules name, and whether state is in shards."""
  names = list(dict.fromkeys(mesh_name for _, mesh_name in rules.pairs))
  limit = machine.memory_of_each(devices) if memory_limit is None else memory_limit
  choices: list[LayoutChoice] = []
  error: Exception | None = None
  gathered = (None, False, True) if in_shards else (None,)
  for sizes, name, again in itertools.product(_sizes(devices, len(names)), by_name, gathered):
    shape = mtf.Shape([mtf.Dimension(n, s) for n, s in zip(names, sizes)])
    variant = by_name[name]
    if again is not None:
      over = tuple(m.name for m in shape if m.size > 1)
      variant = dataclasses.replace(variant, shard_state=over, reshard_after_forward=again)
    try:
      report = mtf.describe(make(shape, rules, variant), machine=machine)
      pipeline = report.pipeline
    except (ConfigError, LayoutError) as e:
      # Of the batch a device may have less than there are microbatches.
      error = error or e
      continue
    assert report.seconds is not None
    memory = int(report.memory.total if pipeline is None else pipeline.memory)
    choices.append(
      LayoutChoice(
        shape,
        rules,
        report.seconds,
        memory,
        True,
        (),
        machine,
        limit,
        0.0,
        settings=name,
        shard_state=tuple(report.shard_state),
        reshard_after_forward=report.reshard_after_forward,
        stages=1 if pipeline is None else len(pipeline.stages),
      )
    )
  if not choices:
    raise LayoutError(
      f"run.mesh_shape is 'auto', but no mesh of {devices} devices suits the rules "
      f"{rules_text(rules) or '(none)'}: {error or 'they name no mesh dimension'}"
    )
  fitting = [c for c in choices if c.memory <= limit]
  if not fitting:
    nearest = min(choices, key=lambda c: c.memory)
    raise OutOfMemoryError(
      f"no mesh of {devices} devices fits into {format_bytes(int(limit))} a device with the rules "
      f"{rules_text(rules)}; nearest is {mesh_text(nearest.mesh_shape)}, with "
      f"{format_bytes(nearest.memory)}. run.layout_rules = 'auto' searches for other rules"
    )
  first, *others = sorted(fitting, key=lambda c: (c.seconds, len(c.shard_state)))
  return dataclasses.replace(first, alternatives=tuple(others[:alternatives]))


def _sizes(devices: int, count: int) -> Iterator[tuple[int, ...]]:
  """Sizes of so many mesh dimensions, of so many devices in all."""
  divisors: Sequence[int] = [n for n in range(1, devices + 1) if devices % n == 0]
  for sizes in itertools.product(divisors, repeat=count):
    if math.prod(sizes) == devices:
      yield sizes
