"""Weight updates: clipping before the optimizer, moving averages of weights after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import mesh_tensorflow as mtf
from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.transformer.meshes import batching


@dataclasses.dataclass(frozen=True)
class Updates:
  """Settings of the weight update that do not depend on the optimizer.

  Attributes:
    max_grad_norm: the gradients of all trained variables are scaled together so that their norm is
      this at most; None: they are not. See `mtf.optimize.clip_by_global_norm`.
    ema_decay: of a moving average of each trained variable; None: there is none. See
      `mtf.optimize.average_weights`.
    gradient_accumulation_steps: the number of microbatches of a batch, whose gradients are added up
      for one update; None: as many as `serialize_num_microbatches` says.
  """

  max_grad_norm: float | None = None
  ema_decay: float | None = None
  gradient_accumulation_steps: int | None = None

  @classmethod
  def of(cls, settings: TrainerSettings) -> Updates:
    """Those of a trainer's settings."""
    return cls(settings.max_grad_norm, settings.ema_decay, settings.gradient_accumulation_steps)

  def apply(
    self, optimizer: Any, trained: Sequence[tuple[mtf.Tensor | None, mtf.Variable]]
  ) -> None:
    """Updates variables, in the graph.

    Args:
      optimizer: an `mtf.optimize.Optimizer`.
      trained: the gradient, or None, and the variable, of each that is trained.
    """
    gradients, variables = [g for g, _ in trained], [v for _, v in trained]
    if self.max_grad_norm is not None:
      gradients, _ = mtf.optimize.clip_by_global_norm(gradients, self.max_grad_norm)
    optimizer.apply_grads(gradients, variables)
    if self.ema_decay is not None:
      # Variables without a gradient do not change, so they need no average.
      moved = [v for g, v in trained if g is not None]
      mtf.optimize.average_weights(moved, self.ema_decay)

  def num_microbatches(
    self, batch_dim: mtf.Dimension, sequence_length: dict[str, int], mesh_impl: mtf.MeshImpl
  ) -> int:
    """Number of microbatches that a batch is cut into.

    Args:
      batch_dim: the batch dimension.
      sequence_length: dict from feature to number of tokens.
      mesh_impl: the mesh.

    Raises:
      ConfigError: `gradient_accumulation_steps` does not divide what a replica has of a batch.
    """
    count = self.gradient_accumulation_steps
    if count is None:
      return batching.serialize_num_microbatches(
        batch_dim, sequence_length, mesh_impl.shape, mesh_impl.layout_rules
      )
    size = mtf.tensor_dim_to_size_per_split(mesh_impl.layout_rules, mesh_impl.shape, batch_dim)
    if size % count:
      raise ConfigError(
        f"run.gradient_accumulation_steps (={count}) does not divide the {size} sequences that "
        f"each replica has of a batch of {batch_dim.size}; run.batch_size is that of one update"
      )
    return count
