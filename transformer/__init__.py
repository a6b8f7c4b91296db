"""The gin-configured Transformer of Mesh TensorFlow."""

from mesh_tensorflow.transformer import (
  attention,
  dataset,
  learning_rate_schedules,
  moe,
  transformer,
  transformer_layers,
  utils,
  vocabulary,
)

__all__ = [
  "attention",
  "dataset",
  "learning_rate_schedules",
  "moe",
  "transformer",
  "transformer_layers",
  "utils",
  "vocabulary",
]
