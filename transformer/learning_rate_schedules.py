"""Schedules, under their old name: `mesh_tensorflow.transformer.learning_rate_schedules`."""

from mesh_tensorflow.transformer.schedules.constant import constant, constant_learning_rate
from mesh_tensorflow.transformer.schedules.linear import (
  linear_decay,
  linear_decay_learning_rate,
  linear_warmup,
)
from mesh_tensorflow.transformer.schedules.noam import learning_rate_schedule_noam
from mesh_tensorflow.transformer.schedules.product import product_learning_rate
from mesh_tensorflow.transformer.schedules.rsqrt import truncated_rsqrt
from mesh_tensorflow.transformer.schedules.slanted_triangular import slanted_triangular
from mesh_tensorflow.transformer.schedules.warmup import (
  cosine_decay,
  inverse_square_root,
  linear_warmup_decay,
  warmup_stable_decay,
)

__all__ = [
  "constant",
  "constant_learning_rate",
  "cosine_decay",
  "inverse_square_root",
  "learning_rate_schedule_noam",
  "linear_decay",
  "linear_decay_learning_rate",
  "linear_warmup",
  "linear_warmup_decay",
  "product_learning_rate",
  "slanted_triangular",
  "truncated_rsqrt",
  "warmup_stable_decay",
]
