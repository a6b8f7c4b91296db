"""Learning rate, clipping and optimizer of a BERT model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl import logging

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.optimize.clipping import global_norm

# Regular expressions that are looked for in names.
_NO_DECAY = ["LayerNorm", "layer_norm", "bias"]


def clip_by_global_norm(
  grads: Sequence[mtf.Tensor | None], clip_norm: mtf.Tensor
) -> tuple[list[mtf.Tensor | None], mtf.Tensor]:
  """Scales gradients together so that their norm is `clip_norm` at most.

  g * clip_norm / max(norm, clip_norm), norm = sqrt(sum of all squares): Pascanu et al., 2013
  (arXiv:1211.5063).

  Args:
    grads: `Tensor`s; None stay None.
    clip_norm: a scalar `Tensor`.

  Returns:
    The gradients, and the norm that they had.
  """
  norm = global_norm(grads)
  multiplier = clip_norm / mtf.maximum(norm, clip_norm)
  return [None if g is None else g * mtf.cast(multiplier, g.dtype) for g in grads], norm


@dataclasses.dataclass(frozen=True)
class Optimization:
  """The optimization of a BERT model.

  The learning rate at step s of N, with W steps of warm-up, is init_lr * s / W if s < W, else
  init_lr * (1 - min(s, N) / N): the decay counts from step 0. "adam" is
  `AdamWeightDecayOptimizer` with a weight decay of 0.01, but for norms and whatever has "bias" in
  its name; "adafactor" factors matrices from 32 x 32 on.

  Attributes:
    init_lr: the peak that the decay starts from. None or 0, with "adafactor": its own schedule.
    num_train_steps: N.
    num_warmup_steps: W; None or 0: no warm-up.
    max_optimized_variable_size: variables with more elements are left as they are, which is logged.
      None or 0: none.
    optimizer: "adam" or "adafactor".
    clip_gradients: whether gradients are clipped to a global norm of 1.
  """

  init_lr: float | None
  num_train_steps: int
  num_warmup_steps: int | None = None
  max_optimized_variable_size: float | None = None
  optimizer: str = "adam"
  clip_gradients: bool = True

  def check(self) -> None:
    """Raises `ConfigError` for an unknown optimizer; adam without a learning rate; no steps."""
    if self.optimizer not in ("adam", "adafactor"):
      raise ConfigError(f"optimizer {self.optimizer!r} is unknown; use adam or adafactor")
    if not self.init_lr and self.optimizer == "adam":
      raise ConfigError("optimizer adam needs a learning_rate above 0; adafactor has its own")
    if self.init_lr and self.num_train_steps < 1:
      raise ConfigError(f"num_train_steps (={self.num_train_steps}) must be at least 1")

  def learning_rate(self, step: tf.Tensor) -> tf.Tensor:
    """The learning rate of a step, a float32 scalar."""
    rate, steps, warmup = self.init_lr or 0.0, self.num_train_steps, self.num_warmup_steps
    s = tf.cast(step, tf.float32)
    decayed = rate * (1.0 - tf.minimum(s, float(steps)) / steps)
    return tf.where(s < warmup, rate * s / warmup, decayed) if warmup else decayed

  def make_optimizer(self, learning_rate: mtf.Tensor | None) -> mtf.optimize.Optimizer:
    """The optimizer; adafactor takes no notice of the learning rate if it has its own."""
    if self.optimizer == "adam":
      return mtf.optimize.AdamWeightDecayOptimizer(
        learning_rate=learning_rate,
        weight_decay_rate=0.01,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-6,
        exclude_from_weight_decay=_NO_DECAY,
      )
    rate = learning_rate if self.init_lr else None
    return mtf.optimize.AdafactorOptimizer(learning_rate=rate, min_dim_size_to_factor=32)

  def is_trained(self, variable: mtf.Variable) -> bool:
    """True if a trainable variable is small enough."""
    most = self.max_optimized_variable_size
    if not most or variable.size <= most:
      return True
    _warn_once(
      f"{variable.full_name} {variable.shape.to_integer_list} is not trained: it has more elements "
      f"than --max_optimized_variable_size={most:g}; 0 trains all variables"
    )
    return False

  def check_trained(self, graph: mtf.Graph) -> None:
    """Raises `ConfigError` if no variable of a graph is small enough."""
    if not any(self.is_trained(v) for v in graph.trainable_variables):
      raise ConfigError(
        f"max_optimized_variable_size (={self.max_optimized_variable_size}) leaves none of the "
        f"{len(graph.trainable_variables)} variables to train"
      )


def create_optimizer(
  loss: mtf.Tensor,
  init_lr: float | None,
  num_train_steps: int,
  num_warmup_steps: int | None,
  max_optimized_variable_size: float | None = None,
  optimizer: str = "adam",
  clip_gradients: bool = True,
) -> tuple[mtf.Tensor | None, list[Any]]:
  """The updates of a training step, in a loop of one's own; see `Optimization`.

  The step is `mtf.optimize.get_global_step(mesh)`. It is read here, and not counted: add
  `mtf.optimize.count_global_step(graph)`.

  Args:
    loss: a scalar `Tensor`; all of the graph's trainable variables are optimized.
    init_lr: see `Optimization`.
    num_train_steps: likewise.
    num_warmup_steps: likewise.
    max_optimized_variable_size: likewise.
    optimizer: likewise.
    clip_gradients: likewise.

  Returns:
    The learning rate, a scalar `Tensor` (None for adafactor's own), and the update operations.

  Raises:
    ConfigError: an unknown optimizer; adam without a learning rate; no steps; or no variable that
      is small enough.
  """
  how = Optimization(
    init_lr,
    num_train_steps,
    num_warmup_steps,
    max_optimized_variable_size,
    optimizer,
    clip_gradients,
  )
  how.check()
  rate = None
  if init_lr:
    step = mtf.optimize.get_global_step(loss.mesh)
    rate = mtf.cwise(
      how.learning_rate, [step], output_dtype=tf.float32, grad_function=0, name="learning_rate"
    )
  how.check_trained(loss.graph)
  variables = [v for v in loss.graph.trainable_variables if how.is_trained(v)]
  grads = mtf.gradients([loss], [v.outputs[0] for v in variables])
  # Not every task uses every part of the model: questions about texts do without the pooler.
  used = [(g, v) for g, v in zip(grads, variables) if g is not None]
  grads, variables = [g for g, _ in used], [v for _, v in used]
  if clip_gradients:
    grads, _ = clip_by_global_norm(grads, mtf.constant(loss.mesh, 1.0, dtype=tf.float32))
  return rate, how.make_optimizer(rate).apply_grads(grads, variables)


@functools.cache
def _warn_once(line: str) -> None:
  """Logs a line, once in a process: a model is traced several times."""
  logging.warning("%s", line)
