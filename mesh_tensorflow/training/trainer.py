"""`mtf.Trainer`: the training of a model function of one's own, with all that the loop has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow import ops, workers
from mesh_tensorflow.environment.tensorflow_mode import not_converted
from mesh_tensorflow.errors import ConfigError, DataError, ShapeError
from mesh_tensorflow.meshes import layout_names
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.operations.variables import Variable
from mesh_tensorflow.optimize.base import Optimizer
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.program.graph import Graph, Tensor
from mesh_tensorflow.running.function import TensorSpec, function
from mesh_tensorflow.training.data import reading
from mesh_tensorflow.training.init_checkpoint import InitialCheckpoint
from mesh_tensorflow.training.loop import LearningRateLike, TrainingLoop
from mesh_tensorflow.training.settings import SEEDS, checked_settings
from mesh_tensorflow.training.state import ModelState
from mesh_tensorflow.training.validation import Evaluator

# Of the features of a batch and "train" or "eval"; returns the loss, or loss and metrics by name.
ModelFn = Callable[[dict[str, Tensor], str], "Tensor | tuple[Tensor, Mapping[str, Tensor]]"]

_METRIC = "metric/"

_Element = TypeVar("_Element")


class ModelProgram:
  """A model function on a mesh, as the `Program` of a training loop.

  Args:
    model_fn: the model function; see `Trainer`.
    mesh_impl: the mesh.
    features: specs of the features of a batch; all have the batch as their first dimension.
    is_trained: tells which trainable variables the optimizer updates; None: all.

  Raises:
    ShapeError: features differ in their first dimension.
  """

  def __init__(
    self,
    model_fn: ModelFn,
    mesh_impl: MeshImpl,
    features: Mapping[str, TensorSpec],
    is_trained: Callable[[Variable], bool] | None = None,
  ):
    self._model_fn = model_fn
    self._features = dict(features)
    self._is_trained = is_trained
    self.mesh_impl = mesh_impl
    first = {spec.shape.dims[0] if len(spec.shape) else None for spec in self._features.values()}
    if len(first) != 1 or None in first:
      shapes = ", ".join(f"{name} {spec.shape}" for name, spec in self._features.items())
      raise ShapeError(
        f"Trainer: the first dimension of all features must be the batch; they are {shapes}"
      )
    self.examples = Shape(list(first))  # type: ignore[arg-type]
    self.speed = ("examples", self.examples.size)
    self.num_classes = None
    self.activation_dtype = tf.float32

  def feature_names(self, dataset: tf.data.Dataset) -> list[str]:
    """The features, which a data set of single examples must have, of their shapes."""
    spec = dataset.element_spec
    if not isinstance(spec, dict) or set(self._features) - set(spec):
      raise DataError(
        f"the data set must yield dicts with {', '.join(self._features)}, and it yields {spec}"
      )
    for name, wanted in self._features.items():
      sizes = wanted.shape.to_integer_list[1:]
      if not spec[name].shape.is_compatible_with(sizes):
        raise DataError(
          f"feature {name!r} of an example has shape {spec[name].shape}, expected {sizes}: "
          f"{wanted.shape} without the batch"
        )
    return list(self._features)

  def feature_spec(self, name: str, training: bool = False, local: bool = False) -> TensorSpec:
    """See `Program.feature_spec`."""
    spec = self._features[name]
    return TensorSpec(spec.shape, spec.dtype, name, local=local)

  def reading(self, batches: Iterable[_Element]) -> Iterator[_Element]:
    """See `data.reading`."""
    return reading(batches)

  def apply(self, features: dict[str, Tensor], mode: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and metrics of a batch.

    Args:
      features: the batch.
      mode: "train" or "eval".
    """
    found = self._model_fn(features, mode)
    loss, metrics = found if isinstance(found, tuple) else (found, {})
    for name, x in {"loss": loss, **metrics}.items():
      if not isinstance(x, Tensor) or len(x.shape):
        what = x.shape if isinstance(x, Tensor) else type(x).__name__
        raise ShapeError(f"Trainer: model_fn must return scalar Tensors; {name} is {what}")
    return loss, dict(metrics)

  def losses(self, features: dict[str, Tensor], num_microbatches: int) -> dict[str, Tensor]:
    """See `Program.losses`; the metrics are outputs, too."""
    loss, metrics = self.apply(features, "train")
    found = {"loss": loss, **{_METRIC + name: ops.to_float(x) for name, x in metrics.items()}}
    if num_microbatches == 1:
      return found
    return {name: x * (1.0 / num_microbatches) for name, x in found.items()}

  def finish(self, graph: Graph, outputs: Mapping[str, Tensor]) -> None:
    """Reports the metrics, and checks the names of the layout."""
    for name, x in outputs.items():
      if name.startswith(_METRIC):
        ops.scalar_summary(name.removeprefix(_METRIC), x)
    layout_names.check_names(self.mesh_impl, graph)

  def is_trained(self, variable: Variable) -> bool:
    """As was given."""
    return self._is_trained is None or self._is_trained(variable)

  def num_microbatches(self) -> int:
    """One."""
    return 1

  def random_seed(self, step: Tensor) -> Tensor:
    """The step."""
    return step

  def initialize(self) -> None:
    """Does nothing."""

  def on_mesh(self, mesh_impl: MeshImpl) -> ModelProgram:
    """See `Program.on_mesh`."""
    return ModelProgram(self._model_fn, mesh_impl, self._features, self._is_trained)


class _Evaluator(Evaluator):
  """Means of loss and metrics over the whole batches of a data set."""

  def __init__(self, program: ModelProgram):
    self._program = program
    self._call: Any = None
    self._names: list[str] = []

  def check(self, dataset: tf.data.Dataset) -> Sequence[str]:
    return self._program.feature_names(dataset)

  def trace(self) -> Any:
    """The compiled evaluation of a batch; makes the variables."""
    if self._call is None:
      program = self._program
      names = list(program._features)
      specs = [program.feature_spec(name) for name in names]

      @function(program.mesh_impl, specs)
      def eval_step(*args: Tensor) -> dict[str, Tensor]:
        loss, metrics = program.apply(dict(zip(names, args)), "eval")
        layout_names.check_names(program.mesh_impl, args[0].graph)
        return {"loss": ops.to_float(loss), **{n: ops.to_float(x) for n, x in metrics.items()}}

      self._call = tf.function(eval_step, autograph=False)
      traced = self._call.get_concrete_function(
        *[tf.TensorSpec(s.shape.to_integer_list, s.dtype) for s in specs]
      )
      self._names = list(traced.structured_outputs)
    return self._call

  def metric_names(self) -> Sequence[str]:
    """Those that the model function returns; traces it."""
    self.trace()
    return self._names

  def metrics(
    self, dataset: tf.data.Dataset, max_batches: int | None, goes_on: Callable[[], bool]
  ) -> dict[str, float] | None:
    names, program = self.check(dataset), self._program
    dtypes = [program.feature_spec(n).dtype for n in names]
    batches = dataset.map(
      not_converted(lambda ex: tuple(tf.cast(ex[n], t) for n, t in zip(names, dtypes)))
    )
    batches = batches.batch(program.examples.size, drop_remainder=True)
    batches = batches if max_batches is None else batches.take(max_batches)
    call, count = self.trace(), 0
    sums: dict[str, float] = {}
    for batch in reading(batches.prefetch(1)):
      if not goes_on():
        return None
      count += 1
      for name, x in call(*batch).items():
        sums[name] = sums.get(name, 0.0) + float(x)
    self.shown = list(sums) or self.shown
    return {name: total / count for name, total in sums.items()}

  def text(self, metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())


class Trainer:
  """Trains a model function on a mesh, from the newest checkpoint of a folder on.

  The loop is that of the package's own programs: checkpoints in the background, SIGTERM that saves
  and ends with exit code 74, a lock on the folder, NaN that names its tensor, a report with
  speed, utilization and memory in metrics.jsonl and for TensorBoard, evaluations with early
  stopping and the best checkpoint kept, moving averages, accumulation of gradients, several
  workers. A run that goes on has the numbers of one that was not interrupted.

      def model_fn(features, mode):
        logits = mtf.layers.dense(features["x"], [arm], reduced_dims=[place], name="logits")
        loss = mtf.layers.softmax_cross_entropy_with_logits(logits, features["label"], arm)
        return mtf.reduce_mean(loss)

      features = {"x": mtf.TensorSpec([batch, place]), "label": mtf.TensorSpec([batch], "int32")}
      trainer = mtf.Trainer(
        model_fn, mesh, features, model_dir="model",
        optimizer=mtf.optimize.AdamWOptimizer, learning_rate=1e-3,
      )
      trainer.train(dataset_fn, 1000)

  Args:
    model_fn: called with a dict of the features of a batch, `Tensor`s by name, and "train" or
      "eval"; returns the loss, a scalar `Tensor`, or (loss, dict of scalar `Tensor`s), whose other
      values are told in reports: means over the batch.
    mesh_impl: the mesh.
    features: specs of the features of a batch; all have the batch as their first dimension.
    model_dir: folder for checkpoints and reports; None keeps nothing.
    optimizer: an optimizer class or factory, called with `learning_rate`.
    learning_rate: a number, or a function of `step`, a float32 scalar tf.Tensor.
    eval_dataset_fn: makes the held-out data set of evaluations every `eval_every_steps`.
    is_trained: tells which trainable variables the optimizer updates; None: all.
    settings: the settings; None: the defaults of `TrainerSettings`.
    quiet: writes no lines.
    **fields: other values of single settings, by name, such as `save_checkpoints_steps`,
      `report_every`, `eval_every_steps`, `max_grad_norm`, `ema_decay`, `seed`; see
      `mesh_settings.trainer.TrainerSettings`. Without settings and `seed`, that of the mesh's
      variable store.

  Attributes:
    program: the `ModelProgram`.
    state: the variables, their step and their folder, a `ModelState`.
    loop: the `TrainingLoop`.

  Raises:
    ConfigError: a setting cannot have such a value.
    ShapeError: features differ in their first dimension.
  """

  def __init__(
    self,
    model_fn: ModelFn,
    mesh_impl: MeshImpl,
    features: Mapping[str, TensorSpec],
    *,
    model_dir: str | None = None,
    optimizer: Callable[..., Optimizer],
    learning_rate: LearningRateLike = None,
    eval_dataset_fn: Callable[[], tf.data.Dataset] | None = None,
    is_trained: Callable[[Variable], bool] | None = None,
    settings: TrainerSettings | None = None,
    quiet: bool = False,
    **fields: Any,
  ):
    has_seeds = settings is not None or not fields.keys().isdisjoint(SEEDS)
    if settings is None:
      settings = TrainerSettings(owner="Trainer", seed=mesh_impl.variable_store.seed)
    settings = checked_settings(settings, **fields)
    self.program = ModelProgram(model_fn, mesh_impl, features, is_trained)
    self.state = ModelState(
      mesh_impl,
      model_dir,
      keep_checkpoint_max=settings.keep_checkpoint_max,
      use_ema=settings.use_ema,
      average_checkpoints=settings.average_checkpoints,
      quiet=quiet or not workers.current().is_chief,
    )
    if has_seeds:
      self.state.use_seeds_of(settings)
    self._evaluator = _Evaluator(self.program)
    init = settings.init_checkpoint
    self.loop = TrainingLoop(
      self.program,
      self.state,
      settings,
      optimizer=optimizer,
      learning_rate=learning_rate,
      initial=InitialCheckpoint(init, "") if init else None,
      held_out=None if eval_dataset_fn is None else lambda: {"eval": eval_dataset_fn},
      evaluator=self._evaluator,
      quiet=quiet,
    )

  @property
  def step(self) -> int:
    """The step of the variables."""
    return self.state.step

  def latest_checkpoint(self) -> str | None:
    """The newest good checkpoint of `model_dir`; None if there is none."""
    return self.state.latest_checkpoint()

  def train(
    self,
    dataset_fn: Callable[..., tf.data.Dataset],
    train_steps: int,
    *,
    on_ready: Callable[[Graph], None] | None = None,
    checkpoint_input_pipeline: bool = False,
  ) -> list[float]:
    """Trains until the global step is `train_steps`.

    Args:
      dataset_fn: makes the data set of single examples, dicts of features. Data that ends is
        repeated, and what it shuffles is shuffled anew each time. A run that goes on leaves out
        what was seen: it is read, unless the function takes `skip`, the number of examples to leave
        out.
      train_steps: the step at which to stop, counted from the model's beginning.
      on_ready: called with the graph when the program is built, before the first step.
      checkpoint_input_pipeline: saves the position in the data with each checkpoint, so that
        nothing is read twice.

    Returns:
      The losses of the steps done.

    Raises:
      DataError: the data set has no whole batch, or other features.
      NonFiniteError: the loss is NaN or infinite. Nothing is saved after that.
      LockedError: another process trains in `model_dir`.
      StoppedError: SIGTERM or SIGINT came. The steps done are saved.
      StorageError: a checkpoint cannot be written.
    """
    if not callable(dataset_fn):
      raise ConfigError("Trainer.train: dataset_fn must be a function that returns a data set")
    return self.loop.train(
      dataset_fn,
      train_steps,
      on_ready=on_ready,
      checkpoint_input_pipeline=checkpoint_input_pipeline,
    )

  def evaluate(
    self, dataset_fn: Callable[[], tf.data.Dataset], max_batches: int | None = None
  ) -> dict[str, float]:
    """Means of "loss" and the metrics over the whole batches of a data set.

    The variables are those that were trained here; else those of the newest checkpoint.

    Args:
      dataset_fn: makes the data set of single examples.
      max_batches: number of batches; None: all.

    Raises:
      DataError: there is no whole batch.
    """
    self._evaluator.trace()
    if not self.loop.losses and self.state.restored is None:
      self.state.restore()
    found = self._evaluator.metrics(dataset_fn(), max_batches, lambda: True)
    if not found:
      size = self.program.examples.size
      raise DataError(f"Trainer.evaluate: the data set has no complete batch of {size} examples")
    return found
