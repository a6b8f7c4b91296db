"""A model on a mesh: from a batch to logits and a loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.transformer.model import sequence_utils
from mesh_tensorflow.transformer.model.model_building import PAIRED, Model, dtype_of_precision
from mesh_tensorflow.transformer.model.model_features import ModelFeatures

_Self = TypeVar("_Self", bound="Forward")


class Forward(ModelFeatures):
  """A model on a mesh, as its programs use it.

  Args:
    model: a `Unitransformer`, `Bitransformer` or `StudentTeacher`.
    mesh_impl: see `ModelFeatures`, as the others.
    precision: see `dtype_of_precision`.
  """

  def __init__(
    self,
    model: Model,
    mesh_impl: mtf.MeshImpl,
    model_type: str,
    batch_size: int,
    sequence_length: dict[str, int],
    outer_batch_size: int = 1,
    ensemble_inputs: int | None = None,
    precision: str | None = None,
  ):
    super().__init__(
      mesh_impl, model_type, batch_size, sequence_length, outer_batch_size, ensemble_inputs
    )
    self.model: Any = model  # Which of them it is, the model type says.
    self.variable_dtype = dtype_of_precision(precision)

  def logits_and_loss(
    self,
    features: dict[str, mtf.Tensor],
    mode: str,
    num_microbatches: int,
    compute_loss: bool = True,
  ) -> tuple[mtf.Tensor, Any]:
    """Applies the model to a batch.

    Args:
      features: as `joined` returns them; in the mode "train" as the data has them.
      mode: "train", "eval" or "score".
      num_microbatches: number of such batches in a training step.
      compute_loss: whether to compute it.

    Returns:
      (logits, loss), or (logits, None) without `compute_loss`.
    """
    if mode == "train":
      # Evaluation and scoring have joined them already: they need the joined targets, too.
      features = self.joined(features)
    targets = features["targets"]
    if self.model_type in PAIRED:
      inputs = features["inputs"]
      places = dict(
        encoder_sequence_id=features.get("inputs_segmentation"),
        decoder_sequence_id=features.get("targets_segmentation"),
        decoder_subsequence_id=features.get("targets_subsegmentation"),
        encoder_position=features.get("inputs_position"),
        decoder_position=features.get("targets_position"),
      )
    else:
      segmentation = features.get("targets_segmentation")
      places = dict(sequence_id=segmentation, position=features.get("targets_position"))
      if self.model_type == "aligned":
        inputs = features["inputs"]
      else:
        inputs = sequence_utils.autoregressive_inputs(targets, sequence_id=segmentation)
    result = self.model.call_simple(
      inputs=inputs,
      targets=targets,
      compute_loss=compute_loss,
      mode=mode,
      variable_dtype=self.variable_dtype,
      num_microbatches=num_microbatches,
      **places,
    )
    # A StudentTeacher without loss returns the logits alone.
    return result if isinstance(result, tuple) else (result, None)

  def scored(self, targets: mtf.Tensor) -> mtf.Tensor:
    """1.0 for each target that counts, else 0.0: not padding, nor the inputs of a delimited_lm."""
    weights = mtf.to_float(mtf.greater(targets, 0))
    if self.model_type == "delimited_lm":
      weights *= mtf.to_float(mtf.logical_not(sequence_utils.delimited_lm_inputs_mask(targets)))
    return weights

  def generator(self) -> Callable[..., mtf.Tensor]:
    """The method of the model that makes tokens: `decode` or `sample_autoregressive`.

    Raises:
      ConfigError: the model does not generate text.
    """
    generate: Callable[..., mtf.Tensor]
    if self.model_type in PAIRED:
      generate = self.model.decode
      return generate
    if getattr(self.model, "autoregressive", False):
      generate = self.model.sample_autoregressive
      return generate
    raise ConfigError(f"model_type {self.model_type!r} does not generate text")

  def decoding_function(
    self, input_signature: Sequence[mtf.TensorSpec]
  ) -> Callable[[Callable[..., Any]], mtf.Function]:
    """`mtf.function` for a program that generates tokens."""
    return mtf.function(self.mesh_impl, input_signature)

  def sample_step(self, length: int, rows: int, **options: Any) -> mtf.Function:
    """Continues given tokens; an encoder-decoder makes the targets of given inputs.

    Args:
      length: tokens of a row, the given ones included.
      rows: rows at a time.
      **options: of `Unitransformer.sample_autoregressive` or `Bitransformer.decode`.

    Returns:
      An `mtf.function` of (int32 [rows, length]) that returns the same shape (for an
      encoder-decoder with `max_decode_length`, that length).
    """
    generate = self.generator()
    dims = [mtf.Dimension("batch", rows), mtf.Dimension("length", length)]

    @self.decoding_function([mtf.TensorSpec(dims, tf.int32, "inputs")])
    def sample_step(inputs: mtf.Tensor) -> mtf.Tensor:
      return generate(inputs, variable_dtype=self.variable_dtype, **options)

    return sample_step

  def on_mesh(self: _Self, mesh_impl: mtf.MeshImpl) -> _Self:
    """The programs of the same model on another mesh, with variables of its own."""
    result = copy.copy(self)
    result.mesh_impl = mesh_impl
    return result
