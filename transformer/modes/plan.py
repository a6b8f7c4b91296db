"""The mode "plan": what a model needs on each processor of a mesh, before anything is allocated."""

from __future__ import annotations

from typing import Any

import gin

import mesh_tensorflow as mtf
from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.errors import OutOfMemoryError
from mesh_tensorflow.planning.auto_layout import LayoutChoice
from mesh_tensorflow.planning.machine import Machine
from mesh_tensorflow.planning.program import read_once
from mesh_tensorflow.planning.text import format_bytes, format_seconds
from mesh_tensorflow.transformer.model import stages
from mesh_tensorflow.transformer.model.model_steps import ModelSteps
from mesh_tensorflow.transformer.modes import automatic_layout, layout_rounds, variants
from mesh_tensorflow.transformer.modes.job import Job, mode
from mesh_tensorflow.transformer.modes.planned_machine import machine_without_search
from mesh_tensorflow.transformer.modes.planned_steps import StepMaker, count_parameters


def print_plan(steps: ModelSteps, step: mtf.Function, machine: Machine | None = None) -> mtf.Report:
  """Prints what a training step needs on each processor, from shapes alone.

  Args:
    steps: the programs of the model.
    step: the training step.
    machine: a machine that it is timed for, or None.

  Returns:
    The `mtf.Report`.
  """
  print(f"{count_parameters(steps):,} parameters", flush=True)
  report = mtf.describe(step, machine=machine)
  print(report, flush=True)
  if again := variants.recomputed(steps.model):
    print(f"\n{again}", flush=True)
  if cut := stages.described(steps.model, len(steps.mesh_impl.stages)):
    print(f"\n{cut}", flush=True)
  return report


@gin.configurable(module="mesh_tensorflow.transformer.plan", allowlist=["search"])
@affects("report")
def print_best_layouts(
  job: Job, bound: mtf.Report | None, make: StepMaker, search: bool = True
) -> Any:
  """Prints a table of the best layouts, and how the bound one compares with the first.

  Args:
    job: what is asked for.
    bound: of the bound layout; None if it is "auto".
    make: makes the training steps.
    search: whether to do it; for models of billions of parameters it takes a minute.

  Returns:
    The `LayoutChoice`; None if nothing was searched.

  Raises:
    OutOfMemoryError: no layout fits, and none is bound.
  """
  if not search and bound is not None:
    return None
  try:
    choice = automatic_layout.search(job.settings, make, bool(job.tpu))
  except OutOfMemoryError as e:
    if bound is None:
      raise
    print(f"\n{e}", flush=True)
    return None
  print(f"\n{choice}", flush=True)
  if bound is not None:
    print(_compared(bound, choice), flush=True)
  return choice


def _compared(bound: mtf.Report, choice: LayoutChoice) -> str:
  """A sentence that compares time and memory of the bound layout with the best one."""
  rules, mesh = (
    layout_rounds.rules_text(bound.layout),
    layout_rounds.mesh_text(bound.mesh_shape),
  )
  name = f"The bound layout, {rules or '(no rules)'} on {mesh or 'one device'},"
  same = bound.mesh_shape == choice.mesh_shape and bound.layout == choice.layout
  if same and not choice.settings and list(choice.shard_state) == bound.shard_state:
    return f"{name} is the best one"
  timed = bound.timed(choice.machine)
  memory = int(bound.memory.total)
  fits = "" if memory <= choice.memory_limit else ", which do not fit"
  return (
    f"{name} takes {format_seconds(timed.seconds)} a step "
    f"({timed.seconds / choice.seconds:.2f} times the best) and {format_bytes(memory)} a "
    f"device{fits}"
  )


@mode("plan", on_devices=False)
def run_plan(job: Job) -> mtf.Report:
  """Prints what training needs, without doing it, and the best layouts."""
  make = StepMaker(job.settings, job.sequence_length, job.batch_size, needs_data=False)
  with read_once():
    return _planned(job, make)


def _planned(job: Job, make: StepMaker) -> mtf.Report:
  asked = automatic_layout.is_asked(job.settings)
  choice = print_best_layouts(job, None, make) if asked else None
  how = (
    (choice.mesh_shape, choice.layout, variants.of_choice(choice))
    if choice
    else (job.mesh_shape, job.layout_rules)
  )
  steps, step = make.steps(*how), make(*how)
  machine, _ = machine_without_search(steps.mesh_impl, job.mesh_implementation)
  if steps.mesh_impl.stages:
    return print_plan(steps, step, machine)
  # Of devices that are not equally fast the report proposes shares.
  report = print_plan(steps, step, machine if machine.speeds else None)
  if not asked:
    print_best_layouts(job, report, make)
  return report
