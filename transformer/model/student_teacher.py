"""Distillation: a student model that learns from a teacher model."""

from __future__ import annotations

import logging
import os
import weakref
from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import checkpoint, errors
from mesh_tensorflow.arguments.declared import (
  COUNT_OR_ZERO,
  FRACTION,
  NOT_BELOW_ZERO,
  affects,
  takes,
)
from mesh_tensorflow.meshes.layout import LayoutLike
from mesh_tensorflow.operations.global_step import get_global_step
from mesh_tensorflow.program.dimensions import ShapeLike
from mesh_tensorflow.transformer.model.bitransformer import Bitransformer, make_bitransformer
from mesh_tensorflow.transformer.model.token_loss import exact_dtype
from mesh_tensorflow.transformer.model.unitransformer import Unitransformer

_MODULE = "mesh_tensorflow.transformer.transformer"

_FLOAT32 = mtf.VariableDType(tf.float32)

_LOG = logging.getLogger("mesh_tensorflow")


@gin.configurable(module=_MODULE)
@affects("training")
@takes(temperature=NOT_BELOW_ZERO, fraction_soft=FRACTION, distill_start_step=COUNT_OR_ZERO)
class StudentTeacher:
  """A student that is trained to give the probabilities of a teacher (Hinton et al., 2015).

  The variables are in the scopes `student` and `teacher`; those of the teacher are not trained.

  Args:
    student: a `Unitransformer` or `Bitransformer`.
    teacher: a model of the same kind, output vocabulary and z_loss.
    temperature: divides the logits of both, for the soft loss.
    fraction_soft: the share of the soft loss in the loss; with 0.0 there is no teacher.
    distill_start_step: up to and including this training step the loss is the hard one.
    teacher_checkpoint: path of a checkpoint of the teacher; see `initialize`.
    initialize_student_weights: whether the student starts from it, too.
  """

  def __init__(
    self,
    student: Unitransformer | Bitransformer,
    teacher: Unitransformer | Bitransformer,
    temperature: float | None = None,
    fraction_soft: float | None = None,
    distill_start_step: int = 0,
    teacher_checkpoint: str | None = None,
    initialize_student_weights: bool = False,
  ):
    self.student: Any = student
    self.teacher: Any = teacher
    self.temperature = temperature
    self.fraction_soft = fraction_soft
    self.distill_start_step = distill_start_step
    self.teacher_checkpoint = teacher_checkpoint
    self.initialize_student_weights = initialize_student_weights
    # Called as the weak reference is that `call_simple` puts here.
    self._graph: Any = lambda: None

  @property
  def output_vocab_dim(self) -> mtf.Dimension | None:
    """The student's."""
    vocab_dim: mtf.Dimension | None = self.student.output_vocab_dim
    return vocab_dim

  def call_simple(
    self,
    inputs: mtf.Tensor,
    targets: mtf.Tensor,
    compute_loss: bool,
    variable_dtype: mtf.VariableDType | tf.DType = _FLOAT32,
    num_microbatches: int = 1,
    **kargs: Any,
  ) -> Any:
    """Applies the student, and for the loss the teacher, without its dropout.

    Args:
      inputs: see the student's `call_simple`.
      targets: likewise.
      compute_loss: whether to compute it.
      variable_dtype: an `mtf.VariableDType`, or one dtype for all three.
      num_microbatches: number of such batches in a training step.
      **kargs: further arguments of `call_simple` of both models.

    Returns:
      (logits of the student, loss); the logits alone without `compute_loss`. The loss is
      (1 - f) * hard + temperature ** 2 * f * soft: hard is the student's loss, soft the
      cross entropy of its logits and the teacher's probabilities, f the fraction_soft.

    Raises:
      ConfigError: temperature or fraction_soft is missing, or the models do not fit together.
    """
    common = dict(variable_dtype=variable_dtype, num_microbatches=num_microbatches)
    with mtf.variable_scope("student"):
      logits, hard_loss = self.student.call_simple(inputs, targets, compute_loss, **common, **kargs)
    if not compute_loss:
      return logits
    if self.fraction_soft == 0.0:
      return logits, hard_loss
    temperature, fraction_soft, vocab_dim = self._checked()
    if kargs.get("mode", "train") == "train":
      # Targets with the teacher's dropout would be noise to the student.
      kargs["mode"] = "eval"
    with mtf.variable_scope("teacher"):
      teacher_logits, _ = self.teacher.call_simple(inputs, targets, False, **common, **kargs)
    graph = inputs.graph
    graph.make_variables_untrainable(
      [v for v in graph.trainable_variables if v.full_name.startswith("teacher/")]
    )
    self._graph = weakref.ref(graph)

    # temperature ** 2 below makes up for gradients of softened logits, smaller by its inverse.
    soft_targets = mtf.stop_gradient(
      mtf.softmax(teacher_logits * (1.0 / temperature), reduced_dim=vocab_dim)
    )
    soft_loss = mtf.layers.softmax_cross_entropy_with_logits(
      logits * (1.0 / temperature),
      soft_targets,
      vocab_dim,
      z_loss=self.student.z_loss,
      loss_dtype=exact_dtype(logits.dtype),
    )
    weights = mtf.cast(mtf.greater(targets, 0), soft_loss.dtype)
    soft_loss = mtf.einsum([soft_loss, weights], output_shape=[])
    # As the hard loss is divided, so that `fraction_soft` is a fraction.
    soft_loss *= 1.0 / self.student.loss_denominator(targets, num_microbatches)

    # A factor, not a condition: before its start, too, the soft loss is computed, with weight 0.
    started = mtf.greater(get_global_step(inputs.mesh), self.distill_start_step)
    fraction = mtf.cast(started, soft_loss.dtype) * fraction_soft
    return logits, (1.0 - fraction) * hard_loss + temperature**2 * fraction * soft_loss

  def _checked(self) -> tuple[float, float, mtf.Dimension]:
    """Checks that student and teacher match; returns (temperature, fraction_soft, vocabulary)."""
    if self.temperature is None or self.fraction_soft is None:
      raise errors.ConfigError(
        f"StudentTeacher: bind temperature (={self.temperature}) and fraction_soft "
        f"(={self.fraction_soft})"
      )
    for what in ("output_vocab_dim", "z_loss"):
      a, b = getattr(self.student, what), getattr(self.teacher, what)
      if a != b:
        raise errors.ConfigError(
          f"StudentTeacher: {what} of student ({a}) and teacher ({b}) must be equal"
        )
    if self.output_vocab_dim is None:
      raise errors.ConfigError(
        "StudentTeacher: student and teacher have no output vocabulary, so there are no "
        "probabilities to learn; give both an output_vocab_size"
      )
    return self.temperature, self.fraction_soft, self.output_vocab_dim

  def decode(self, *args: Any, **kargs: Any) -> mtf.Tensor:
    """The student's `decode`, or `sample_autoregressive` of a `Unitransformer`."""
    with mtf.variable_scope("student"):
      if isinstance(self.student, Unitransformer):
        return self.student.sample_autoregressive(*args, **kargs)
      if isinstance(self.student, Bitransformer):
        return self.student.decode(*args, **kargs)
    raise errors.ConfigError(
      f"StudentTeacher.decode: the student must be a Unitransformer or Bitransformer, got "
      f"{type(self.student).__name__}"
    )

  def initialize(self) -> None:
    """Sets the variables of the teacher from `teacher_checkpoint`.

    The checkpoint is one of the teacher alone: it has no prefix `teacher/`. With
    `initialize_student_weights` the student gets those of its variables that the checkpoint has,
    too. The variables must exist: call this once `call_simple` has been lowered, before training.
    With a `fraction_soft` of 0.0 there is nothing to do.

    Raises:
      ConfigError: there is no teacher_checkpoint.
      GraphError: `call_simple` has not been called.
      CheckpointError: the checkpoint is not one of the teacher.
    """
    if self.fraction_soft == 0.0:
      return
    if not self.teacher_checkpoint:
      raise errors.ConfigError(
        "StudentTeacher.initialize: StudentTeacher.teacher_checkpoint is not bound"
      )
    graph = self._graph()
    if graph is None:
      raise errors.GraphError(
        "StudentTeacher.initialize: there is no teacher yet; call call_simple with compute_loss, "
        "and lower its graph, first"
      )
    path = checkpoint.resolve(self.teacher_checkpoint)

    def restore(prefix: str, ignore_missing: bool) -> None:
      # To a checkpointer, any list of variables is a store.
      stored: Any = [v.get_master() for v in graph.all_variables if v.full_name.startswith(prefix)]
      checkpoint.Checkpointer(os.path.dirname(path), [stored]).restore(
        path,
        name_in_checkpoint=lambda name: name.removeprefix(prefix),
        should_restore=lambda name: True,
        ignore_missing=ignore_missing,
        ignore_unexpected=True,
      )

    restore("teacher/", False)
    _LOG.info("the teacher's variables were set from %s", path)
    if self.initialize_student_weights:
      restore("student/", True)


@gin.configurable(module=_MODULE)
@affects("training")
def make_bi_student_teacher(
  input_vocab_size: int = gin.REQUIRED,
  output_vocab_size: int = gin.REQUIRED,
  layout: LayoutLike | None = None,
  mesh_shape: ShapeLike | None = None,
) -> StudentTeacher:
  """Makes two `Bitransformer`s, in the gin scopes "student" and "teacher".

  Their stacks are made in the scopes "student/encoder" and so on, in which gin does not look at
  bindings of "encoder" and "decoder": bind `student/decoder/make_layer_stack.layers` (a decoder
  with `EncDecAttention`) and `teacher/decoder/make_layer_stack.layers`.

  Args:
    input_vocab_size: number of input ids.
    output_vocab_size: number of output ids.
    layout: layout rules that layers may take into account.
    mesh_shape: the mesh's shape, likewise.
  """
  models = {}
  for which in ("student", "teacher"):
    with gin.config_scope(which):
      models[which] = make_bitransformer(
        input_vocab_size=input_vocab_size,
        output_vocab_size=output_vocab_size,
        layout=layout,
        mesh_shape=mesh_shape,
      )
  return StudentTeacher(student=models["student"], teacher=models["teacher"])
