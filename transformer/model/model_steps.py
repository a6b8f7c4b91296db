"""The programs of the trainer, under one name: what each is, is in the file of that name."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.training import program
from mesh_tensorflow.training.reported import ReportedValues
from mesh_tensorflow.transformer.data.files import records
from mesh_tensorflow.transformer.model import batching, evaluation, mesh_setup, step_sums
from mesh_tensorflow.transformer.model.forward import Forward
from mesh_tensorflow.transformer.model.model_building import Model

# Which variables are trained: all, those of a regular expression, or of a function.
VariableFilter: TypeAlias = str | Callable[[mtf.Variable], object] | None

_Element = TypeVar("_Element")


class ModelSteps(Forward):
  """The programs of one model on one mesh, built from the same Python code.

  It is the `Program` of a training loop, and has those of evaluation and generation, too.

  Args:
    model: a `Unitransformer`, `Bitransformer` or `StudentTeacher`.
    mesh_impl: see `ModelFeatures`; likewise up to outer_batch_size.
    variable_filter: which variables are trained: None for all, a regular expression, or a
      function of the `mtf.Variable`.
    ensemble_inputs: see `ModelFeatures`.
    precision: see `dtype_of_precision`.
    settings: how weights are updated, whatever the optimizer: `max_grad_norm`, `ema_decay`,
      `gradient_accumulation_steps`, `nonfinite`; and whether XLA compiles, `jit_compile`; None: as
      `TrainerSettings()` says. A `Trainer` has its own copy of the programs, with its settings.
  """

  def __init__(
    self,
    model: Model,
    mesh_impl: mtf.MeshImpl,
    model_type: str,
    batch_size: int,
    sequence_length: dict[str, int],
    outer_batch_size: int = 1,
    variable_filter: VariableFilter = None,
    *,
    ensemble_inputs: int | None = None,
    precision: str | None = None,
    settings: TrainerSettings | None = None,
  ):
    super().__init__(
      model,
      mesh_impl,
      model_type,
      batch_size,
      sequence_length,
      outer_batch_size,
      ensemble_inputs,
      precision,
    )
    self._variable_filter = variable_filter
    self.settings = settings or TrainerSettings()

  def with_settings(self, settings: TrainerSettings) -> ModelSteps:
    """The programs of the same model and variables with other settings.

    Args:
      settings: in place of all of its own.
    """
    result = copy.copy(self)
    result.settings = settings
    return result

  # ------------------------------------------------------- as a training loop sees it

  @property
  def num_classes(self) -> int | None:
    """Number of ids that the model tells apart; None if unknown."""
    size: int | None = getattr(getattr(self.model, "output_vocab_dim", None), "size", None)
    return size

  @property
  def activation_dtype(self) -> tf.DType:
    """The dtype of activations."""
    return self.variable_dtype.activation_dtype

  def reading(self, batches: Iterable[_Element]) -> Iterator[_Element]:
    """Yields the elements of a data set; see `records.reading`."""
    return records.reading(batches)

  def losses(self, features: dict[str, mtf.Tensor], num_microbatches: int) -> dict[str, mtf.Tensor]:
    """The loss of a microbatch, and what layers count for the step."""
    loss = self.logits_and_loss(features, "train", num_microbatches)[1]
    return {"loss": loss, **step_sums.take(loss.graph)}

  def finish(self, graph: mtf.Graph, outputs: Mapping[str, mtf.Tensor]) -> None:
    """Makes the updates that layers ask for, and checks the names in the layout."""
    step_sums.update(graph, outputs)
    mesh_setup.check_tensor_names(self.mesh_impl, graph)

  def is_trained(self, variable: mtf.Variable) -> bool:
    """True if the optimizer updates a trainable variable, as `variable_filter` says."""
    chosen = self._variable_filter
    if chosen is None:
      return True
    if isinstance(chosen, str):
      return re.search(chosen, variable.full_name) is not None
    if callable(chosen):
      return bool(chosen(variable))
    raise ConfigError(
      f"variable_filter must be None, a regular expression or a function, got {chosen!r}"
    )

  def num_microbatches(self) -> int:
    """Number of microbatches that `serialize_num_microbatches` says."""
    impl = self.mesh_impl
    return batching.serialize_num_microbatches(
      self.batch_dim, self.sequence_length, impl.shape, impl.layout_rules
    )

  def random_seed(self, step: mtf.Tensor) -> mtf.Tensor:
    """The step itself."""
    return step

  def initialize(self) -> None:
    """Restores a part of the model that comes from a checkpoint of its own: a teacher."""
    if hasattr(self.model, "initialize"):
      self.model.initialize()

  # -------------------------------------------------------------------- the programs

  def train_step(
    self,
    feature_names: Sequence[str],
    optimizer: Callable[..., mtf.optimize.Optimizer],
    *,
    look: Callable[[mtf.Graph], None] | None = None,
    reported: ReportedValues | None = None,
  ) -> mtf.Function:
    """One step of training; see `program.train_step`."""
    self.check_features(feature_names)
    return program.train_step(
      self, self.settings, feature_names, optimizer, look=look, reported=reported
    )

  def decoding_function(
    self, input_signature: Sequence[mtf.TensorSpec]
  ) -> Callable[[Callable[..., Any]], mtf.Function]:
    """`mtf.function` for a program that generates tokens, as `settings.jit_compile` says.

    Args:
      input_signature: of the program.

    Raises:
      ConfigError: XLA is to compile it for a mesh of several devices.
    """
    jit_compile = program.is_compiled_by_xla(self.settings, self.mesh_impl)
    return mtf.function(self.mesh_impl, input_signature, jit_compile=jit_compile)

  def eval_step(self, feature_names: Sequence[str]) -> mtf.Function:
    """Sums over one batch, teacher-forced; see `evaluation.eval_step`."""
    return evaluation.eval_step(self, feature_names)
