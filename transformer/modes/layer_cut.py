"""The cut of a model's layers into the stages of a pipeline: `run.pipeline_cut`.

With "auto" the time of each layer is predicted, that of the embeddings with the first and that of
logits and losses with the last, on the mesh of a stage: the training step is built with a mesh for
each layer, on shapes alone. The cut is that whose longest stage is the shortest. It follows from
the settings alone, so that all programs of a run have the same one, and so has a resume.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import ConfigError, LayoutError, UnsupportedError
from mesh_tensorflow.planning.machine import Machine
from mesh_tensorflow.planning.pipeline import Blocks, equal_cut, longest
from mesh_tensorflow.planning.program import Program
from mesh_tensorflow.planning.text import format_seconds
from mesh_tensorflow.training.program import num_microbatches
from mesh_tensorflow.transformer.model import stages
from mesh_tensorflow.transformer.model.model_steps import ModelSteps
from mesh_tensorflow.transformer.modes.planned_machine import machine_without_search


def layered(steps: ModelSteps, schedule: str, microbatches: int | None = None) -> ModelSteps:
  """The programs of a model with a mesh for each layer, to be predicted and not to be run.

  Args:
    steps: the programs on one mesh, or on the stages of a pipeline.
    schedule: of the pipeline.
    microbatches: number of microbatches of a training step; None: as the settings say.
  """
  of = steps.mesh_impl
  impl = mtf.MeshImpl(of.shape, of.layout_rules)
  impl = impl.with_sharded_state(of.state_dims, of.reshards_after_forward)
  count = stages.count_layers(steps.model)
  if count > 1:
    others = [impl.with_layout(impl.layout_rules) for _ in range(count - 1)]
    impl = impl.with_stages(others, schedule)
  # What skips updates costs nothing that a plan would count.
  settings = dataclasses.replace(steps.settings, nonfinite="stop", loss_scale=None)
  if microbatches is not None:
    settings = dataclasses.replace(settings, gradient_accumulation_steps=microbatches)
  return steps.on_mesh(impl).with_settings(settings)


def set_cut(
  steps: ModelSteps,
  optimizer: Callable[..., mtf.optimize.Optimizer] | None,
  cut: str | Sequence[int],
  implementation: str = "auto",
  chunks: int = 1,
) -> None:
  """Cuts the layers of a model into the stages of its mesh.

  Args:
    steps: the programs of the model; on one mesh nothing is cut.
    optimizer: an optimizer class, whose slots take memory; None: there are none.
    cut: see `run.pipeline_cut`.
    implementation: see `planned_machine.machine_without_search`.
    chunks: number of runs of layers on each stage.

  Raises:
    ConfigError: there are more runs than layers, or the cut is for other numbers of them; or there
      are several runs on one mesh.
  """
  count, layers = len(steps.mesh_impl.stages), stages.count_layers(steps.model)
  given = None if isinstance(cut, str) else [int(n) for n in cut]
  if count < 2:
    if given is not None and len(given) > 1:
      raise ConfigError(
        f"run.pipeline_cut is {tuple(given)}, for {len(given)} stages, but run.pipeline_stages is "
        "1; bind both, or leave it out"
      )
    if chunks > 1:
      raise ConfigError(
        f"run.pipeline_chunks is {chunks}, but run.pipeline_stages is 1, whose layers are one run; "
        "bind both, or leave it out"
      )
    return
  stages.check_count(count, layers, chunks)
  runs = count * chunks
  if given is not None:
    if len(given) != runs or sum(given) != layers:
      raise ConfigError(
        f"run.pipeline_cut is {tuple(given)}: {len(given)} {'runs' if chunks > 1 else 'stages'} "
        f"with {sum(given)} layers in all, but run.pipeline_stages is {count}"
        + (f", run.pipeline_chunks {chunks}" if chunks > 1 else "")
        + f" and the model has {layers} layers (attention and "
        f"feed-forward layers count one each), such as {tuple(equal_cut(layers, runs))}"
      )
    stages.set_cut(steps.model, given, "as run.pipeline_cut says")
  elif cut == "equal" or runs == layers:
    stages.set_cut(steps.model, equal_cut(layers, runs), "of equal numbers")
  else:
    machine, limit = machine_without_search(steps.mesh_impl, implementation)
    # Each run of a stage may take its part of the memory.
    stages.set_cut(steps.model, *_balanced(steps, optimizer, runs, machine, limit / chunks))


def _balanced(
  steps: ModelSteps,
  optimizer: Callable[..., mtf.optimize.Optimizer] | None,
  count: int,
  machine: Machine,
  limit: float,
) -> tuple[list[int], str]:
  """The cut into `count` runs whose longest is the shortest, and why it is that one, in words."""
  equal = equal_cut(stages.count_layers(steps.model), count)
  microbatches = num_microbatches(steps, steps.settings)
  if microbatches == 1:
    return equal, "of equal numbers: with one microbatch stages wait for each other"
  try:
    predicted = layered(steps, steps.mesh_impl.schedule, microbatches)
    features = predicted.required_features
    step = predicted.train_step(features, optimizer or mtf.optimize.SgdOptimizer)
    evaluator = Program("run.pipeline_cut", step).evaluator()
    blocks = Blocks.of(evaluator.graph)
    impl = predicted.mesh_impl
    if blocks is None or len(blocks) != sum(equal):
      return equal, "of equal numbers: the layers are no stages of their own"
    evaluation = evaluator.evaluate(
      impl.shape, impl.layout_rules, impl.state_dims, impl.reshards_after_forward
    )
  except (LayoutError, UnsupportedError) as e:
    # What is wrong with the layout the program itself tells; a prediction ends no run.
    return equal, f"of equal numbers: their time cannot be predicted ({e})"
  costs = blocks.measured(evaluation.mesh_impl, evaluation.costs_on(machine), machine)
  seconds = [b.seconds for b in costs]
  cut = blocks.cut(costs, count, limit)
  time, of_equal = (format_seconds(longest(seconds, c)) for c in (cut, equal))
  if cut == equal:
    return equal, f"of equal numbers: no other cut is predicted to be faster on {machine.name}"
  return cut, (
    f"balanced: the longest stage takes {time} a microbatch, and {of_equal} with equal numbers, "
    f"predicted for {machine.name}"
  )
