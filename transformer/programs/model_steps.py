"""The programs of the trainer: one training step, one evaluation step, one round of sampling."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.transformer.meshes import batching, mesh_setup
from mesh_tensorflow.transformer.models import sequence_utils
from mesh_tensorflow.transformer.programs import nonfinite
from mesh_tensorflow.transformer.programs.model_building import PAIRED, get_variable_dtype
from mesh_tensorflow.transformer.programs.model_features import ModelFeatures


class ModelSteps(ModelFeatures):
  """The programs of one model on one mesh, built from the same Python code.

  Args:
    model: a `Unitransformer`, `Bitransformer` or `StudentTeacher`.
    mesh_impl: the mesh.
    model_type: see `build_model`.
    batch_size: sequences in a batch.
    sequence_length: dict from feature to number of tokens.
    outer_batch_size: size of an additional dimension `outer_batch`, which divides the batch.
    variable_filter: which variables are trained: None for all, a regular expression, or a
      function of the `mtf.Variable`.
    ensemble_inputs: the members of an ensemble that see data of their own while they train;
      None: all see the same.
  """

  def __init__(
    self,
    model: Any,
    mesh_impl: mtf.MeshImpl,
    model_type: str,
    batch_size: int,
    sequence_length: dict[str, int],
    outer_batch_size: int = 1,
    variable_filter: Any = None,
    *,
    ensemble_inputs: int | None = None,
  ):
    super().__init__(
      mesh_impl, model_type, batch_size, sequence_length, outer_batch_size, ensemble_inputs
    )
    self.model = model
    self._variable_filter = variable_filter
    self.variable_dtype = get_variable_dtype()

  # --------------------------------------------------------------- training

  def train_step(
    self,
    feature_names: Sequence[str],
    optimizer: Callable[..., Any],
    *,
    skip_nonfinite: bool = False,
    look: Callable[[mtf.Graph], None] | None = None,
  ) -> mtf.Function:
    """One step: loss, gradients, updates; microbatches included.

    Args:
      feature_names: the features of the data, in the order of the step's arguments.
      optimizer: called as `optimizer(learning_rate=...)`.
      skip_nonfinite: updates nothing if the loss or a gradient is NaN or infinite.
      look: called with the graph when it is complete, before it is lowered.

    Returns:
      An `mtf.function` of (*features, learning rate, step) that returns the loss, float32; with
      `skip_nonfinite` a list of it and the number of elements that are not finite.
    """

    @mtf.function(self.mesh_impl, self._train_signature(feature_names))
    def train_step(*args):
      *values, learning_rate, step = args
      graph, loss, grads = self._loss_and_gradients(feature_names, values, step)
      trained = [(g, v) for g, v in zip(grads, graph.trainable_variables) if self._is_trained(v)]
      optimizer(learning_rate=learning_rate).apply_grads(
        [g for g, _ in trained], [v for _, v in trained]
      )
      mesh_setup.check_tensor_names(self.mesh_impl, graph)
      if look is not None:
        look(graph)
      loss = mtf.cast(loss, tf.float32)
      if not skip_nonfinite:
        return loss
      return [loss, nonfinite.skip_updates(graph, [loss, *[g for g, _ in trained]])]

    return train_step

  def watch_step(self, feature_names: Sequence[str]) -> tuple[list[str], mtf.Function]:
    """A training step that updates nothing and looks for NaN and infinity.

    Args:
      feature_names: as of `train_step`.

    Returns:
      A list, which the first call of the function fills with what the tensors are; and an
      `mtf.function` of (*features, learning rate, step) that returns for each tensor, in the order
      in which they are computed, the number of elements that are not finite.
    """
    titles: list[str] = []

    @mtf.function(self.mesh_impl, self._train_signature(feature_names))
    def watch_step(*args):
      *values, _, step = args
      graph, _, grads = self._loss_and_gradients(feature_names, values, step)
      titles[:], counts = nonfinite.watched(graph, grads, graph.trainable_variables)
      return counts

    return titles, watch_step

  def _train_signature(self, feature_names: Sequence[str]) -> list[mtf.TensorSpec]:
    self.check_features(feature_names)
    return [
      # A process of a mesh that spans several gives its own part of the batch.
      *[self.feature_spec(n, training=True, local=True) for n in feature_names],
      mtf.TensorSpec([], tf.float32, "learning_rate"),
      mtf.TensorSpec([], tf.int64, "step"),
    ]

  def _loss_and_gradients(
    self, feature_names: Sequence[str], values: Sequence[mtf.Tensor], step: mtf.Tensor
  ) -> tuple[mtf.Graph, mtf.Tensor, list[mtf.Tensor]]:
    """The graph of a step, its loss, and the gradients of all trainable variables."""
    num_microbatches = batching.serialize_num_microbatches(
      self.batch_dim,
      self.sequence_length,
      self.mesh_impl.shape,
      self.mesh_impl.layout_rules,
    )
    graph = step.graph
    graph.random_seed = step
    graph.global_step = step
    features = dict(zip(feature_names, values))

    def losses(features):
      return {"loss": self.logits_and_loss(features, "train", num_microbatches)[1]}

    if num_microbatches > 1:
      grads, outputs = mtf.serialize_training_step(
        features, losses, self.batch_dim, num_microbatches
      )
      return graph, outputs["loss"], grads
    loss = losses(features)["loss"]
    return graph, loss, mtf.gradients([loss], [v.outputs[0] for v in graph.trainable_variables])

  # -------------------------------------------------------------- evaluation

  def eval_step(self, feature_names: Sequence[str]) -> mtf.Function:
    """Sums over one batch, teacher-forced.

    Args:
      feature_names: the features of the data, in the order of the step's arguments.

    Returns:
      An `mtf.function` of the features that returns a dict of float32 scalars: `loss` (sum of
      nats), `tokens` (scored ones), `correct`, `sequences`, `correct_sequences`, `labels` (sum of
      target ids), and `longest`, the scored tokens of the row that has most.
    """
    self.check_features(feature_names)

    @mtf.function(self.mesh_impl, [self.feature_spec(n) for n in feature_names])
    def eval_step(*args):
      features = self.joined(dict(zip(feature_names, args)))
      targets = features["targets"]
      logits = mtf.to_float(self.logits_and_loss(features, "eval", 1, compute_loss=False)[0])
      vocab_dim = self.model.output_vocab_dim
      weights = self.scored(targets)
      nats = mtf.layers.softmax_cross_entropy_with_logits(
        logits, mtf.maximum(targets, 0), vocab_dim
      )
      right = mtf.to_float(mtf.equal(mtf.argmax(logits, vocab_dim), targets)) * weights
      length_dim = targets.shape.dims[-1]
      tokens = mtf.reduce_sum(weights, reduced_dim=length_dim)
      wrong = tokens - mtf.reduce_sum(right, reduced_dim=length_dim)
      used = mtf.to_float(mtf.greater(tokens, 0.0))
      return {
        "loss": mtf.reduce_sum(nats * weights),
        "tokens": mtf.reduce_sum(tokens),
        "correct": mtf.reduce_sum(right),
        "sequences": mtf.reduce_sum(used),
        "correct_sequences": mtf.reduce_sum(used * mtf.to_float(mtf.less(wrong, 0.5))),
        "labels": mtf.reduce_sum(mtf.to_float(targets) * weights),
        "longest": mtf.reduce_max(tokens),
      }

    return eval_step

  def scored(self, targets: mtf.Tensor) -> mtf.Tensor:
    """1.0 for each target that counts, else 0.0: not padding, nor the inputs of a delimited_lm."""
    weights = mtf.to_float(mtf.greater(targets, 0))
    if self.model_type == "delimited_lm":
      weights *= mtf.to_float(mtf.logical_not(sequence_utils.delimited_lm_inputs_mask(targets)))
    return weights

  # ---------------------------------------------------------------- sampling

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

    @mtf.function(self.mesh_impl, [mtf.TensorSpec(dims, tf.int32, "inputs")])
    def sample_step(inputs):
      return generate(inputs, variable_dtype=self.variable_dtype, **options)

    return sample_step

  def generator(self) -> Callable[..., mtf.Tensor]:
    """The method of the model that makes tokens: `decode` or `sample_autoregressive`.

    Raises:
      ConfigError: the model does not generate text.
    """
    if self.model_type in PAIRED:
      return self.model.decode
    if getattr(self.model, "autoregressive", False):
      return self.model.sample_autoregressive
    raise ConfigError(f"model_type {self.model_type!r} does not generate text")

  def on_mesh(self, mesh_impl: mtf.MeshImpl) -> ModelSteps:
    """The programs of the same model on another mesh, with variables of its own."""
    result = copy.copy(self)
    result.mesh_impl = mesh_impl
    return result

  # ----------------------------------------------------------------- forward

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

  def _is_trained(self, variable: Any) -> bool:
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
