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

__all__ = [
  "constant",
  "constant_learning_rate",
  "learning_rate_schedule_noam",
  "linear_decay",
  "linear_decay_learning_rate",
  "linear_warmup",
  "product_learning_rate",
  "slanted_triangular",
  "truncated_rsqrt",
]
