"""Features that the programs of a model take, and their shapes."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import ConfigError, DataError
from mesh_tensorflow.transformer.data.text2self import dynamic_text2self

MODEL_FEATURES = (
  "inputs",
  "inputs_position",
  "inputs_segmentation",
  "targets",
  "targets_position",
  "targets_segmentation",
  "targets_subsegmentation",
)


class ModelFeatures:
  """The features of the batches of a model on a mesh.

  Args:
    mesh_impl: the mesh.
    model_type: see `build_model`.
    batch_size: sequences in a batch.
    sequence_length: dict from feature to number of tokens.
    outer_batch_size: size of an additional dimension `outer_batch`, which divides the batch.
    ensemble_inputs: the members of an ensemble that see data of their own while they train;
      None: all see the same.

  Raises:
    ConfigError: outer_batch_size does not divide batch_size.
  """

  def __init__(
    self,
    mesh_impl: mtf.MeshImpl,
    model_type: str,
    batch_size: int,
    sequence_length: dict[str, int],
    outer_batch_size: int = 1,
    ensemble_inputs: int | None = None,
  ):
    self.mesh_impl = mesh_impl
    self.model_type = model_type
    self.batch_size = batch_size
    self.sequence_length = sequence_length
    if outer_batch_size and batch_size % outer_batch_size:
      raise ConfigError(
        f"outer_batch_size (={outer_batch_size}) does not divide the batch size (={batch_size})"
      )
    self._outer = outer_batch_size or 1
    self.batch_dim = mtf.Dimension("batch", batch_size // self._outer)
    self._ensemble = ensemble_inputs or 1

  @property
  def required_features(self) -> tuple[str, ...]:
    """The features that the data must have."""
    return ("targets",) if self.model_type == "lm" else ("inputs", "targets")

  def check_features(self, names: Sequence[str]) -> None:
    """Raises `DataError` unless the data has the features that the model needs."""
    wants_inputs = "inputs" in self.required_features
    if "targets" not in names:
      raise DataError(f"the data has features {sorted(names)}, but the model needs 'targets'")
    if wants_inputs and "inputs" not in names:
      raise DataError(
        f"the data has features {sorted(names)}, but model_type {self.model_type!r} needs "
        "'inputs' too; for targets alone use model_type 'lm'"
      )
    if not wants_inputs and "inputs" in names:
      raise DataError(
        f"the data has features {sorted(names)}, but model_type 'lm' takes 'targets' only; "
        "to join inputs and targets use model_type 'delimited_lm'"
      )

  def feature_names(self, dataset: tf.data.Dataset) -> list[str]:
    """The features of a data set of single examples that the model takes.

    Raises:
      DataError: it has not those that the model needs, or one has another length.
    """
    spec = dataset.element_spec
    if not isinstance(spec, dict):
      raise DataError(f"the data set must yield dicts of features, and it yields {spec}")
    names = [n for n in MODEL_FEATURES if n in spec]
    self.check_features(names)
    for name in names:
      expected = self.feature_shape(name)[-1]
      shape = spec[name].shape
      if shape.rank != 1 or shape[0] not in (None, expected):
        raise DataError(
          f"feature {name!r} of the data has shape {shape}, expected [{expected}] "
          "(run.sequence_length); pad or cut it with dataset.pack_or_pad"
        )
    return names

  @property
  def examples(self) -> mtf.Shape:
    """The dimensions of the examples of a training batch."""
    return mtf.Shape(self.feature_spec("targets", training=True).shape.dims[:-1])

  @property
  def examples_per_step(self) -> int:
    """Number of examples that one training step takes."""
    return self.batch_size * self._ensemble

  @property
  def speed(self) -> tuple[str, int]:
    """The unit of the speed of training, and the number of positions of a step."""
    return "tokens", self.examples_per_step * max(self.sequence_length.values())

  def prediction_spec(self, name: str, batch_size: int) -> mtf.TensorSpec:
    """Spec of a feature for prediction programs: `[batch, length]`."""
    length = self.feature_spec(name).shape.dims[-1]
    return mtf.TensorSpec([mtf.Dimension("batch", batch_size), length], tf.int32, name)

  def feature_spec(self, name: str, training: bool = False, local: bool = False) -> mtf.TensorSpec:
    """Spec of a feature as the programs take it.

    Args:
      name: such as "targets" or "targets_position".
      training: whether it is of a training step: members of an ensemble may see their own data.
      local: whether each process of a mesh that spans several gives its own part of it.

    Raises:
      ConfigError: there is no such entry in `sequence_length`.
    """
    # Positions and segments of a feature are as long as it is.
    key = name.split("_")[0]
    if key not in self.sequence_length:
      raise ConfigError(
        f"run.sequence_length {self.sequence_length} has no entry {key!r} for feature {name!r}"
      )
    dims = [self.batch_dim, mtf.Dimension("length", self.sequence_length[key])]
    if self._outer > 1:
      dims = [mtf.Dimension("outer_batch", self._outer), *dims]
    if training and self._ensemble > 1:
      dims = [mtf.Dimension("ensemble", self._ensemble), *dims]
    return mtf.TensorSpec(dims, tf.int32, name, local=local)

  def feature_shape(self, name: str, training: bool = False) -> list[int]:
    """Sizes of a batch of the feature."""
    return self.feature_spec(name, training).shape.to_integer_list

  def joined(self, features: dict[str, mtf.Tensor]) -> dict[str, mtf.Tensor]:
    """Joins the features to one sequence for a delimited_lm; returns others unchanged."""
    if self.model_type != "delimited_lm":
      return features
    return dynamic_text2self(features)
