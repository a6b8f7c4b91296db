"""The program of a training loop, and its training step as an `mtf.function`.

A `Program` is a model on a mesh as the loop sees it. The Transformer's is `ModelSteps`, BERT's and
the U-Net's are in their rooms, that of any model function is `ModelProgram` (trainer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import tensorflow as tf

from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow import ops, optimize
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.operations.elementwise import cast_before_sum
from mesh_tensorflow.operations.microbatches import serialize_training_step
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.program.graph import Graph, Tensor
from mesh_tensorflow.running.function import Function, TensorSpec, function
from mesh_tensorflow.training import loss_scale, nonfinite
from mesh_tensorflow.training.reported import ReportedValues

_Self = TypeVar("_Self")

_Element = TypeVar("_Element")


class ModelRecord(Protocol):
  """Settings that decide a model beyond the shapes of its variables; a part of its checkpoints."""

  def attachments(self) -> dict[str, Callable[[str], None]]:
    """Writers by name, as `attachments` of `Checkpointer.save`."""

  def manifest(self) -> dict[str, Any]:
    """Entries of `manifest.json`."""

  def compare(self, path: str, fits: Callable[[], bool]) -> list[str]:
    """Lines about how a checkpoint's record differs from this one.

    Args:
      path: the checkpoint.
      fits: tells whether the model has the checkpoint's variables, for the advice of an error.

    Raises:
      ConfigError: the checkpoint is of another model.
    """

  def compare_with_initial(self, path: str) -> list[str]:
    """Likewise, of a checkpoint that a training starts from; other models are only told."""


class Program(Protocol):
  """A model on a mesh, as a training loop runs it."""

  @property
  def mesh_impl(self) -> MeshImpl:
    """The mesh."""

  @property
  def examples(self) -> Shape:
    """The leading dimensions of each feature of a training batch, the last of them the batch."""

  @property
  def speed(self) -> tuple[str, int]:
    """The unit of the reported speed, and how many of it a step has: ("tokens", 4096)."""

  @property
  def num_classes(self) -> int | None:
    """Number of classes that the loss tells apart, for warnings of divergence; None: unknown."""

  @property
  def activation_dtype(self) -> tf.DType:
    """The dtype that most is computed in, for the utilization."""

  def feature_names(self, dataset: tf.data.Dataset) -> list[str]:
    """The features of a data set of single examples that the model takes; raises `DataError`."""

  def feature_spec(self, name: str, training: bool = False, local: bool = False) -> TensorSpec:
    """Spec of a feature of a batch.

    Args:
      name: the feature.
      training: whether it is of a training step.
      local: whether each process of a mesh that spans several gives its own part of it.
    """

  def reading(self, batches: Iterable[_Element]) -> Iterator[_Element]:
    """Yields the elements of a data set; errors of reading it are `DataError`s."""

  def losses(self, features: dict[str, Tensor], num_microbatches: int) -> dict[str, Tensor]:
    """Applies the model to a microbatch; its loss and other outputs are summed over microbatches.

    Args:
      features: the microbatch.
      num_microbatches: number of microbatches in a step; the loss of the step is their sum.

    Returns:
      A dict with the scalar "loss", which is minimized, and "reported", if that is another one.
    """

  def finish(self, graph: Graph, outputs: Mapping[str, Tensor]) -> None:
    """Adds what a step does behind the optimizer's updates, and checks the complete graph.

    Args:
      graph: of the step.
      outputs: those of `losses`, summed over the microbatches.
    """

  def is_trained(self, variable: Variable) -> bool:
    """True if the optimizer updates a trainable variable."""

  def num_microbatches(self) -> int:
    """Number of microbatches in a step where the settings name none."""

  def random_seed(self, step: Tensor) -> Tensor:
    """Seed of a step's random operations: a function of the step, so that a resume repeats it."""

  def initialize(self) -> None:
    """Sets variables that have other values than those of their initializers."""

  def on_mesh(self: _Self, mesh_impl: MeshImpl) -> _Self:
    """The program of the same model on another mesh, with variables of its own."""


def local_part(program: Program, name: str) -> tuple[list[int], list[int]]:
  """(begins, sizes) of the part of a training batch of a feature that this process needs."""
  return program.mesh_impl.local_part(program.feature_spec(name, training=True).shape)


def is_compiled_by_xla(settings: TrainerSettings, mesh: MeshImpl) -> bool:
  """`settings.jit_compile`, where the mesh allows it.

  Args:
    settings: of the programs.
    mesh: where they run.

  Raises:
    ConfigError: XLA is to compile programs of several devices.
  """
  if settings.jit_compile and mesh.size > 1:
    raise ConfigError(
      f"{settings.named('jit_compile')} = True is for a mesh of one device; {mesh.shape} has "
      f"{mesh.size}, between which there are exchanges that XLA does not compile"
    )
  return settings.jit_compile


def train_step(
  program: Program,
  settings: TrainerSettings,
  feature_names: Sequence[str],
  optimizer: Callable[..., optimize.Optimizer],
  *,
  look: Callable[[Graph], None] | None = None,
  reported: ReportedValues | None = None,
) -> Function:
  """One step: loss, gradients, updates; microbatches included.

  Args:
    program: the model on its mesh.
    settings: clipping, averages of weights, microbatches, the reaction to NaN.
    feature_names: the features of the data, in the order of the step's arguments.
    optimizer: called as `optimizer(learning_rate=...)`.
    look: called with the graph when it is complete, before it is lowered.
    reported: what it returns besides.

  Returns:
    An `mtf.function` of (*features, learning rate, step) that returns the loss, float32; if steps
    that are not finite are skipped a list of it and the number of elements that are not finite.
    With `reported` that list ends with the vector of its values, if there are any; if they have
    norms, the last argument, a bool, asks for them.

  Raises:
    ConfigError: XLA is to compile it for a mesh of several devices.
  """
  signature = _signature(program, feature_names)
  if reported is not None and reported.norms:
    signature.append(TensorSpec([], tf.bool, "norms_wanted"))

  @function(
    program.mesh_impl, signature, jit_compile=is_compiled_by_xla(settings, program.mesh_impl)
  )
  def train_step(*args: Tensor) -> Any:
    *values, learning_rate, step = args[: len(feature_names) + 2]
    graph = step.graph
    scale = None
    if loss_scale.is_scaled(settings, program.activation_dtype):
      scale = loss_scale.LossScale(settings, step.mesh)
    grads, outputs = _gradients(
      program, settings, feature_names, values, step, program.is_trained, scale
    )
    trained = [(g, v) for g, v in zip(grads, graph.trainable_variables) if program.is_trained(v)]
    if reported is not None and reported.norms:
      reported.before_updates(args[-1], trained)
    made = optimizer(learning_rate=learning_rate)
    if settings.state_dtype != "float32":
      made = made.with_state_dtype(settings.state_dtype)
    if settings.stochastic_rounding:
      made = made.with_stochastic_rounding()
    _update(settings, made, trained)
    program.finish(graph, outputs)
    if look is not None:
      look(graph)
    results = [ops.cast(outputs.get("reported", outputs["loss"]), tf.float32)]
    if loss_scale.skips(settings, program.activation_dtype):
      gradients = [g for g, _ in trained if g is not None]
      results.append(nonfinite.skip_updates(graph, [*results, *gradients]))
      if scale is not None:
        scale.update(results[-1])
    if reported is not None:
      results += reported.after_updates(graph)
    return results if len(results) > 1 else results[0]

  return train_step


def watch_step(
  program: Program, settings: TrainerSettings, feature_names: Sequence[str]
) -> tuple[list[str], Function]:
  """A training step that updates nothing and looks for NaN and infinity.

  Args:
    program: the model on its mesh.
    settings: as of `train_step`.
    feature_names: likewise.

  Returns:
    A list, which the first call of the function fills with what the tensors are; and an
    `mtf.function` of (*features, learning rate, step) that returns for each tensor, in the order
    in which they are computed, the number of elements that are not finite.
  """
  titles: list[str] = []

  @function(program.mesh_impl, _signature(program, feature_names))
  def watch_step(*args: Tensor) -> Any:
    *values, _, step = args
    graph = step.graph
    grads, _ = _gradients(program, settings, feature_names, values, step, lambda _: True)
    titles[:], counts = nonfinite.watched(graph, grads, graph.trainable_variables)
    return counts

  return titles, watch_step


def _signature(program: Program, feature_names: Sequence[str]) -> list[TensorSpec]:
  return [
    # A process of a mesh that spans several gives its own part of the batch.
    *[program.feature_spec(n, training=True, local=True) for n in feature_names],
    TensorSpec([], tf.float32, "learning_rate"),
    TensorSpec([], tf.int64, "step"),
  ]


def _gradients(
  program: Program,
  settings: TrainerSettings,
  feature_names: Sequence[str],
  values: Sequence[Tensor],
  step: Tensor,
  wanted: Callable[[Variable], bool],
  scale: loss_scale.LossScale | None = None,
) -> tuple[list[Tensor | None], Mapping[str, Tensor]]:
  """The gradients of all trainable variables that are wanted (others: None), and the outputs."""
  count = num_microbatches(program, settings)
  graph = step.graph
  # Noise is a function of the step: a training that goes on draws what it would have drawn.
  graph.random_seed = program.random_seed(step)
  graph.global_step = step
  features = dict(zip(feature_names, values))
  losses = program.losses if scale is None else scale.scaled(program.losses)
  if count > 1:
    summed, outputs = serialize_training_step(
      features,
      lambda part: losses(part, count),
      program.examples.dims[-1],
      count,
    )
    grads = _exchanged_as(settings.gradient_dtype, list(summed))
    return (grads if scale is None else scale.unscaled(grads)), outputs
  outputs = losses(features, 1)
  variables = [v for v in graph.trainable_variables if wanted(v)]
  # Other than above, None for what the loss does not depend on.
  found = dict(zip(variables, ops.gradients([outputs["loss"]], [v.outputs[0] for v in variables])))
  grads = _exchanged_as(settings.gradient_dtype, [found.get(v) for v in graph.trainable_variables])
  return (grads if scale is None else scale.unscaled(grads)), outputs


def _exchanged_as(dtype: str | None, gradients: list[Tensor | None]) -> list[Tensor | None]:
  """The gradients, which are sums over processors still to be exchanged, in a dtype; or as is."""
  if dtype is None:
    return gradients
  return [
    cast_before_sum(g, tf.as_dtype(dtype)) if g is not None and g.dtype.is_floating else g
    for g in gradients
  ]


def num_microbatches(program: Program, settings: TrainerSettings) -> int:
  """Number of microbatches that a training step cuts its batch into.

  Where nothing says how many, it is one; of a pipeline up to four a stage, so that the stages have
  something to do.

  Args:
    program: the program, which says how many where the settings do not.
    settings: whose `gradient_accumulation_steps` count.

  Raises:
    ConfigError: they do not divide what a replica has of a batch.
  """
  count = settings.gradient_accumulation_steps
  batch, impl = program.examples.dims[-1], program.mesh_impl
  size = ops.tensor_dim_to_size_per_split(impl.layout_rules, impl.shape, batch)
  if count is None:
    count = program.num_microbatches()
    if count > 1 or not impl.stages:
      return count
    return max(n for n in range(1, 4 * len(impl.stages) + 1) if size % n == 0)
  if (batch.size if impl.is_uneven(batch) else size) % count:
    raise ConfigError(
      f"{settings.named('gradient_accumulation_steps')} (={count}) does not divide the {size} "
      f"examples that each replica has of a batch of {batch.size}, which is that of one update"
    )
  return count


def _update(
  settings: TrainerSettings,
  optimizer: optimize.Optimizer,
  trained: Sequence[tuple[Tensor | None, Variable]],
) -> None:
  """Updates the variables that are trained: clipping before the optimizer, averages after it."""
  gradients, variables = [g for g, _ in trained], [v for _, v in trained]
  if settings.max_grad_norm is not None:
    gradients, _ = optimize.clip_by_global_norm(gradients, settings.max_grad_norm)
  optimizer.apply_grads(gradients, variables)
  if settings.ema_decay is not None:
    # Variables without a gradient do not change, so they need no average.
    moved = [v for g, v in trained if g is not None]
    optimize.average_weights(moved, settings.ema_decay)
