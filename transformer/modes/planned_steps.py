"""Programs of a model for a mesh that need not be there, and reports of their costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import gin

import mesh_tensorflow as mtf
from mesh_settings.run import RunSettings
from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow.arguments.declared import COUNT, affects, takes
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.meshes.layout import names_of_dimensions
from mesh_tensorflow.running.function import Function
from mesh_tensorflow.transformer.data.text_io import inputs_vocabulary, targets_vocabulary
from mesh_tensorflow.transformer.data.vocabularies.base import Vocabularies
from mesh_tensorflow.transformer.model.model_building import build_model
from mesh_tensorflow.transformer.model.model_steps import ModelSteps, VariableFilter
from mesh_tensorflow.transformer.modes.layer_cut import layered, set_cut
from mesh_tensorflow.transformer.modes.make_estimator import tpu_estimator_model_fn
from mesh_tensorflow.transformer.modes.variants import (
  AS_BOUND,
  RECOMPUTE,
  Variant,
  kinds_of_layers,
  variants,
)
from mesh_tensorflow.transformer.training.trainer import open_data


@gin.configurable(
  module="mesh_tensorflow.transformer.plan",
  denylist=["outer_batch_size", "variable_filter", "ensemble_inputs"],
)
@affects("report")
@takes(batch_size=COUNT)
def make_steps(
  model_type: str,
  mesh_shape: mtf.Shape,
  layout_rules: mtf.LayoutRules,
  batch_size: int,
  sequence_length: dict[str, int],
  vocab_size: int | tuple[int, int] | None = None,
  precision: str | None = None,
  *,
  outer_batch_size: int = 1,
  variable_filter: VariableFilter = None,
  ensemble_inputs: int | None = None,
) -> ModelSteps:
  """The programs of the model that gin describes, for a mesh that need not be there.

  Args:
    model_type: see `build_model`.
    mesh_shape: mesh shape.
    layout_rules: layout rules.
    batch_size: sequences in a batch.
    sequence_length: dict from feature to number of tokens.
    vocab_size: number of ids, or a pair for inputs and targets.
    precision: see `dtype_of_precision`.
    outer_batch_size: see `ModelSteps`.
    variable_filter: likewise.
    ensemble_inputs: likewise.

  Raises:
    ConfigError: `vocab_size` is not given.
  """
  if vocab_size is None:
    raise ConfigError("no vocabulary is bound: bind make_steps.vocab_size, or run.vocabulary")
  inputs, targets = (vocab_size, vocab_size) if isinstance(vocab_size, int) else vocab_size
  model = build_model(
    model_type=model_type,
    input_vocab_size=inputs,
    output_vocab_size=targets,
    layout_rules=layout_rules,
    mesh_shape=mesh_shape,
  )
  # Of the base class: it knows the sizes of slices, and has no devices.
  mesh_impl = mtf.MeshImpl(mesh_shape, layout_rules)
  return ModelSteps(
    model,
    mesh_impl,
    model_type,
    batch_size,
    sequence_length,
    outer_batch_size,
    variable_filter,
    ensemble_inputs=ensemble_inputs,
    precision=precision,
    # What skips updates costs nothing that a plan would count.
    settings=TrainerSettings(loss_scale=None),
  )


def count_parameters(steps: ModelSteps) -> int:
  """Number of the elements of a model's trained variables, from its graph alone.

  Args:
    steps: the programs of the model.
  """
  graph, _, _ = steps.eval_step(steps.required_features).build_graph()
  return sum(v.size for v in graph.trainable_variables)


def vocabulary_sizes(vocabulary: Vocabularies) -> dict[str, tuple[int, int]]:
  """`make_steps`'s `vocab_size` argument, (inputs, targets), as a dict; {} without a vocabulary."""
  if vocabulary is None:
    return {}
  return {
    "vocab_size": (
      inputs_vocabulary(vocabulary).vocab_size,
      targets_vocabulary(vocabulary).vocab_size,
    )
  }


class StepMaker:
  """Makes training steps of the model that gin describes, for meshes that need not be there.

  They are the programs that are trained: their features are those of the training data, which is
  opened for them. Without `run.train_dataset_fn` or a vocabulary they are those the model needs.

  Args:
    settings: of the run.
    sequence_length: dict from feature to number of tokens.
    batch_size: number of sequences.
    needs_data: False: data that cannot be opened here is taken for packed.

  Raises:
    ConfigError: no optimizer is bound.
  """

  def __init__(
    self,
    settings: RunSettings,
    sequence_length: Mapping[str, int],
    batch_size: int,
    *,
    needs_data: bool = True,
  ):
    if settings.optimizer is None:
      raise ConfigError("run.optimizer is not bound; bind @optimize.AdafactorOptimizer, say")
    self._settings, self._lengths = settings, dict(sequence_length)
    self._steps: dict[tuple[mtf.Shape, mtf.LayoutRules, Variant, bool], ModelSteps] = {}
    self._functions: dict[ModelSteps, Function] = {}
    self.batch_size = batch_size
    self._sizes = vocabulary_sizes(settings.vocabulary)
    self._needs_data = needs_data
    self._features: Sequence[str] | None = None

  def steps(
    self,
    mesh_shape: mtf.Shape,
    layout_rules: mtf.LayoutRules,
    variant: Variant = AS_BOUND,
    per_layer: bool = False,
  ) -> ModelSteps:
    """The programs of the model, each made once.

    Args:
      mesh_shape: the mesh shape.
      layout_rules: the layout rules.
      variant: how the training step is built.
      per_layer: whether each layer has a mesh of its own; see `layer_cut.layered`.
    """
    shape, rules = mtf.convert_to_shape(mesh_shape), mtf.convert_to_layout_rules(layout_rules)
    key = shape, rules, variant, per_layer
    if key not in self._steps:
      self._steps[key] = self._made(*key)
    return self._steps[key]

  def _made(
    self,
    mesh_shape: mtf.Shape,
    layout_rules: mtf.LayoutRules,
    variant: Variant,
    per_layer: bool,
  ) -> ModelSteps:
    steps = self._on_mesh(mesh_shape, layout_rules)
    settings = variant.applied(self._settings)
    shares = settings.device_shares
    if shares is not None and mesh_shape == mtf.convert_to_shape(settings.mesh_shape):
      steps.mesh_impl = mtf.MeshImpl(mesh_shape, layout_rules, shares=shares)
    # A search goes over meshes that need not have these dimensions.
    names = names_of_dimensions(settings.shard_state)
    steps.mesh_impl = steps.mesh_impl.with_sharded_state(
      [n for n in names if n in mesh_shape.dimension_names], settings.reshard_after_forward
    )
    steps.settings = dataclasses.replace(settings, nonfinite="stop", loss_scale=None)
    schedule = settings.pipeline_schedule
    if (count := settings.pipeline_stages) > 1:
      others = [steps.mesh_impl.with_layout(steps.mesh_impl.layout_rules) for _ in range(count - 1)]
      steps.mesh_impl = steps.mesh_impl.with_stages(others, schedule)
    variant.set_on(steps.model)
    if per_layer:
      return layered(steps, schedule)
    set_cut(
      *(steps, settings.optimizer, settings.pipeline_cut, settings.mesh_implementation),
      settings.pipeline_chunks,
    )
    return steps

  def _on_mesh(self, mesh_shape: mtf.Shape, layout_rules: mtf.LayoutRules) -> ModelSteps:
    return make_steps(
      self._settings.model_type,
      mesh_shape,
      layout_rules,
      self.batch_size,
      dict(self._lengths),
      precision=self._settings.precision,
      **self._sizes,
      outer_batch_size=gin.get_bindings(tpu_estimator_model_fn).get("outer_batch_size", 1),
      variable_filter=self._settings.variable_filter,
      ensemble_inputs=self._settings.ensemble_inputs,
    )

  def _features_of_data(self, steps: ModelSteps) -> Sequence[str]:
    settings, needed = self._settings, steps.required_features
    if settings.train_dataset_fn is None or settings.vocabulary is None:
      return needed
    given = settings.train_dataset_fn, settings.vocabulary, settings.dataset_split
    try:
      return open_data(steps, *given).names
    except Exception as e:  # noqa: BLE001 - a data set function is anybody's.
      if self._needs_data:
        raise
      told = str(e).partition("\n")[0]
      print(
        f"the training data cannot be opened here, and is taken for packed ({told})", flush=True
      )
      return [f"{n}{kind}" for n in needed for kind in ("", "_position", "_segmentation")]

  def __call__(
    self,
    mesh_shape: mtf.Shape,
    layout_rules: mtf.LayoutRules,
    variant: Variant = AS_BOUND,
    per_layer: bool = False,
  ) -> Function:
    """A training step, made once; arguments as of `steps`."""
    steps = self.steps(mesh_shape, layout_rules, variant, per_layer)
    if steps not in self._functions:
      if self._features is None:
        self._features = self._features_of_data(steps)
      self._functions[steps] = steps.train_step(self._features, self._settings.optimizer)
    return self._functions[steps]

  def check_shards(self, mesh_dims: Collection[str]) -> None:
    """Checks that what state is to be sharded over can be on a mesh that is searched for.

    Args:
      mesh_dims: the mesh dimensions that have names: those of rules.

    Raises:
      ConfigError: it names another one.
    """
    for name in names_of_dimensions(self._settings.shard_state):
      if name not in mesh_dims:
        raise ConfigError(
          f"run.shard_state names {name!r}, but run.mesh_shape is 'auto', and only the names of "
          f"rules ({', '.join(sorted(mesh_dims)) or 'there are none'}) are those of the mesh that "
          "is found; choose_layout.choices = ('shard_state',) shards over all of it where memory "
          "is short"
        )

  def variants(self, choices: Sequence[str]) -> list[Variant]:
    """Lists the ways to build a training step; see `variants.variants`.

    Args:
      choices: names of the settings that may vary.
    """
    kinds = []
    if RECOMPUTE in choices:
      kinds = kinds_of_layers(self._on_mesh(mtf.Shape([]), mtf.LayoutRules([])).model)
    return variants(choices, self._settings, self.batch_size, self._lengths, kinds)
