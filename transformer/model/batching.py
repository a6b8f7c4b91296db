"""Arithmetic of meshes, batches, microbatches and steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gin
from absl import flags

import mesh_tensorflow as mtf
from mesh_settings.run import BATCH_METHODS
from mesh_tensorflow.arguments.declared import COUNT, COUNT_OR_ZERO, affects, takes
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.meshes.layout import LayoutLike
from mesh_tensorflow.program.dimensions import ShapeLike

_MODULE = "mesh_tensorflow.transformer.utils"


@gin.configurable(module=_MODULE)
@affects("report")
def tpu_mesh_shape(
  tpu_topology: str = gin.REQUIRED,
  model_parallelism: Any = gin.REQUIRED,
  ensemble_parallelism: int | None = None,
) -> mtf.Shape:
  """The mesh of a TPU slice: dimensions `ensemble`, `batch`, `model`, those of size 1 left out.

  Args:
    tpu_topology: "4x4" (chips, times `--logical_cores_per_chip` cores) or "v3-8" (cores).
    model_parallelism: size of the dimension `model`; or a hierarchical tiling, a list of
      (name, sizes).
    ensemble_parallelism: size of the dimension `ensemble`, or None.

  Raises:
    ConfigError: the sizes do not divide the number of cores.
  """
  if tpu_topology.startswith("v"):
    num_cores = int(tpu_topology.split("-")[-1])
  else:
    chips = 1
    for part in tpu_topology.split("_")[0].split("x"):
      chips *= int(part)
    num_cores = chips * flags.FLAGS.logical_cores_per_chip
  if isinstance(model_parallelism, list):
    return mtf.simd_mesh_impl.HierarchicalTiling.spec_to_mesh_shape(model_parallelism, num_cores)
  ensemble = ensemble_parallelism or 1
  if num_cores % (model_parallelism * ensemble):
    raise ConfigError(
      f"tpu_mesh_shape: model_parallelism (={model_parallelism}) x ensemble_parallelism "
      f"(={ensemble}) does not divide the {num_cores} cores of topology {tpu_topology!r}"
    )
  sizes = [
    ("ensemble", ensemble),
    ("batch", num_cores // (model_parallelism * ensemble)),
    ("model", model_parallelism),
  ]
  return mtf.Shape([(name, size) for name, size in sizes if size > 1])


def compute_batch_size(
  sequence_length: dict[str, int],
  mesh_shape: ShapeLike,
  layout_rules: LayoutLike,
  method_and_value: tuple[str, int],
) -> int:
  """Number of sequences in a batch.

  Args:
    sequence_length: dict from feature to number of tokens.
    mesh_shape: mesh shape.
    layout_rules: layout rules; "replica" counts the parts of dimensions `batch` and `outer_batch`.
    method_and_value: ("sequences_per_batch" | "tokens_per_batch" | "sequences_per_replica" |
      "tokens_per_replica", number).

  Raises:
    ConfigError: an unknown method, or tokens that are no multiple of the sequence length.
  """
  method, value = method_and_value
  if method not in BATCH_METHODS:
    raise ConfigError(f"batch_size: unknown method {method!r}; use {', '.join(BATCH_METHODS)}")
  if method == "sequences_per_batch":
    return value
  replicas = mtf.tensor_dim_to_mesh_dim_size(
    layout_rules, mesh_shape, mtf.Dimension("batch", 0)
  ) * mtf.tensor_dim_to_mesh_dim_size(layout_rules, mesh_shape, mtf.Dimension("outer_batch", 0))
  if method == "sequences_per_replica":
    return value * replicas
  length = max(sequence_length.values())
  if value % length:
    raise ConfigError(
      f"batch_size: {value} tokens are no multiple of the sequence length {length}; use "
      f"{max(1, value // length) * length}"
    )
  return value // length * (replicas if method == "tokens_per_replica" else 1)


@gin.configurable(module=_MODULE)
@affects("report")
@takes(tokens_per_microbatch_per_replica=COUNT_OR_ZERO)
def serialize_num_microbatches(
  batch_dim: mtf.Dimension,
  sequence_length: dict[str, int],
  mesh_shape: ShapeLike,
  layout_rules: LayoutLike,
  tokens_per_microbatch_per_replica: int | None = None,
) -> int:
  """Number of microbatches into which a batch is cut to save memory.

  Args:
    batch_dim: the batch dimension.
    sequence_length: dict from feature to number of tokens.
    mesh_shape: mesh shape.
    layout_rules: layout rules.
    tokens_per_microbatch_per_replica: about how many tokens a processor takes at once;
      None or 0: all.

  Raises:
    LayoutError: the mesh does not divide the batch.
  """
  if not tokens_per_microbatch_per_replica:
    return 1
  per_replica = mtf.tensor_dim_to_size_per_split(layout_rules, mesh_shape, batch_dim)
  length = max(sequence_length.values())
  sequences = max(1, tokens_per_microbatch_per_replica // length)
  # Microbatches are equally large: the next smaller number of sequences that divides the batch.
  # (One that is split unevenly is cut as a whole.)
  while per_replica % sequences or batch_dim.size % (per_replica // sequences):
    sequences -= 1
    if not sequences:
      return batch_dim.size
  return per_replica // sequences


@gin.configurable(module=_MODULE)
@affects("report")
@takes(batch_size=COUNT, train_tokens=COUNT)
def auto_train_steps(
  batch_size: int, sequence_length: dict[str, int], train_tokens: int = 2**36
) -> int:
  """Number of steps in which the model sees so many tokens."""
  return train_tokens // (batch_size * max(sequence_length.values()))


def resolve_steps(
  train_steps: int | Callable[..., int], batch_size: int, sequence_length: dict[str, int]
) -> int:
  """`train_steps` as an int; a function of batch size and sequence length is called."""
  if callable(train_steps):
    return int(train_steps(batch_size, sequence_length))
  return int(train_steps)
