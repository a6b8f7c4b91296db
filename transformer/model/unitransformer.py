"""A Transformer of one layer stack: a language model, an encoder, or a decoder."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import BELOW_ONE, COUNT, affects, takes
from mesh_tensorflow.meshes.layout import LayoutLike
from mesh_tensorflow.operations.variables import convert_to_variable_dtype
from mesh_tensorflow.program.dimensions import ShapeLike
from mesh_tensorflow.transformer.model import stages, step_sums
from mesh_tensorflow.transformer.model.context import Context, TransformerLayer
from mesh_tensorflow.transformer.model.generation import Generation
from mesh_tensorflow.transformer.model.sequence_utils import (
  delimited_lm_inputs_mask,
  round_up_to_multiple,
  sinusoid_positional_embedding_weights,
)
from mesh_tensorflow.transformer.model.token_loss import (
  MultiTokenPrediction,
  TokenLoss,
  exact_dtype,
)
from mesh_tensorflow.transformer.model.vocab_embedding import (
  get_vocab_embedding_cls,
  reduce_ensemble_logits,
  without_padding,
)

_LOG = logging.getLogger("mesh_tensorflow")

_FLOAT32 = mtf.VariableDType(tf.float32)


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
@affects(
  training=(
    "label_smoothing z_loss loss_fn loss_on_targets_only loss_denominator "
    "token_dropout_rate multi_token logits_init_scale"
  ),
  report="layout mesh_shape",
)
@takes(
  d_model=COUNT, max_length=COUNT, label_smoothing=BELOW_ONE, vocab_divisor=COUNT, ensemble=COUNT
)
class Unitransformer(TokenLoss, Generation):
  """Token embedding, positions, a layer stack, and logits.

  Args:
    layer_stack: a `LayerStack`.
    d_model: size of the residual stream.
    input_vocab_size: number of input ids.
    output_vocab_size: number of output ids; None for a model that returns hidden states.
    autoregressive: whether a position sees only those before it.
    max_length: number of learned positions.
    shared_embedding_and_softmax_weights: whether the logits use the embedding's weights.
    label_smoothing: probability taken from the target and spread evenly over the vocabulary.
    z_loss: coefficient of the square of the logits' partition function, in training.
    name: variable scope.
    layout: layout rules that layers may take into account.
    mesh_shape: the mesh's shape, likewise.
    vocab_divisor: vocabulary sizes are rounded up to a multiple of this, to be splittable. Output
      ids beyond the vocabulary have no probability: their logits are -1e9.
    ensemble: number of models trained side by side, or None.
    loss_fn: a function `(self, context, logits, targets, output_vocab_dim) -> scalar`, in place
      of softmax cross entropy.
    positional_embedding: whether positions have vectors.
    sinusoid_positional_embedding: whether those are fixed sinusoids.
    input_full_attention: whether, in a language model of "inputs EOS targets EOS", inputs see all
      inputs.
    loss_on_targets_only: whether, in such a model, only targets count in the loss.
    loss_denominator: what the summed loss is divided by; by default the number of positions of
      the batch, padding included.
    token_dropout_rate: rate at which input ids become 0 in training.
    final_logit_soft_cap: logits become cap * tanh(logits / cap), less than this (Gemma Team, 2024;
      arXiv:2408.00118); None: they stay.
    multi_token: a `MultiTokenPrediction`, which trains the model to predict further tokens; None:
      the next one only.
    logits_init_scale: factor of the initial standard deviation of what makes the logits: the output
      weights, or the shared embedding, and then that of learned positions, too. With 0.3 a model
      starts with nearly equal probabilities, and a loss of about the logarithm of the vocabulary's
      size; with 1 and a shared embedding it starts with predicting the token that it has just seen.
      Of embedding classes `VocabEmbedding` has it.

  Raises:
    ConfigError: autoregressive without an output vocabulary, input_full_attention or multi_token
      without autoregressive, or final_logit_soft_cap or logits_init_scale is not positive.
  """

  def __init__(
    self,
    layer_stack: TransformerLayer,
    d_model: int = 1024,
    input_vocab_size: int = gin.REQUIRED,
    output_vocab_size: int | None = gin.REQUIRED,
    autoregressive: bool = gin.REQUIRED,
    max_length: int = gin.REQUIRED,
    shared_embedding_and_softmax_weights: bool = False,
    label_smoothing: float = 0.0,
    z_loss: float = 1e-4,
    name: str = "transformer",
    layout: LayoutLike | None = None,
    mesh_shape: ShapeLike | None = None,
    vocab_divisor: int = 128,
    ensemble: int | None = None,
    loss_fn: Callable[..., mtf.Tensor] | None = None,
    positional_embedding: bool = True,
    sinusoid_positional_embedding: bool = False,
    input_full_attention: bool = False,
    loss_on_targets_only: bool = False,
    loss_denominator: float | None = None,
    token_dropout_rate: float = 0.0,
    *,
    final_logit_soft_cap: float | None = None,
    multi_token: MultiTokenPrediction | None = None,
    logits_init_scale: float = 1.0,
  ):
    self.layer_stack = layer_stack
    self.model_dim = mtf.Dimension("d_model", d_model)
    self.input_vocab_size_unpadded = input_vocab_size
    self.input_vocab_dim = mtf.Dimension(
      "vocab", round_up_to_multiple(input_vocab_size, vocab_divisor)
    )
    self.output_vocab_size_unpadded = output_vocab_size
    self.output_vocab_dim = None
    if output_vocab_size:
      self.output_vocab_dim = mtf.Dimension(
        "vocab", round_up_to_multiple(output_vocab_size, vocab_divisor)
      )
    elif autoregressive:
      raise errors.ConfigError(
        f"Unitransformer {name}: an autoregressive model needs an output_vocab_size, got "
        f"{output_vocab_size}"
      )
    self.autoregressive = autoregressive
    if sinusoid_positional_embedding:
      positional_embedding = True
    self.positional_embedding = positional_embedding
    self.sinusoid_positional_embedding = sinusoid_positional_embedding
    self.max_length_dim = mtf.Dimension("max_length", max_length) if positional_embedding else None
    self.shared_embedding_and_softmax_weights = shared_embedding_and_softmax_weights
    self.label_smoothing = label_smoothing
    self.z_loss = z_loss
    self.name = name
    self.layout = layout
    self.mesh_shape = mesh_shape
    self.ensemble_dim = mtf.Dimension("ensemble", ensemble) if ensemble else None
    self._loss_fn = loss_fn
    self.input_full_attention = input_full_attention
    if input_full_attention and not autoregressive:
      raise errors.ConfigError(
        f"Unitransformer {name}: input_full_attention needs autoregressive=True"
      )
    self.loss_on_targets_only = loss_on_targets_only
    self._loss_denominator = loss_denominator
    self.token_dropout_rate = token_dropout_rate
    if final_logit_soft_cap is not None and final_logit_soft_cap <= 0:
      raise errors.ConfigError(
        f"Unitransformer {name}: final_logit_soft_cap must be positive or None, got "
        f"{final_logit_soft_cap}"
      )
    if multi_token is not None and not autoregressive:
      raise errors.ConfigError(f"Unitransformer {name}: multi_token needs autoregressive=True")
    if logits_init_scale <= 0:
      raise errors.ConfigError(
        f"Unitransformer {name}: logits_init_scale must be positive, got {logits_init_scale}"
      )
    # Of an encoder or decoder: how many layers are before its own, and in both; see `stages`.
    self.layers_of_pipeline: tuple[int, int] | None = None
    # Number of layers of each stage, and where it comes from; None: equal numbers.
    self.pipeline_cut: tuple[int, ...] | None = None
    self.pipeline_cut_from = "of equal numbers"
    self.final_logit_soft_cap = final_logit_soft_cap
    self.logits_init_scale = logits_init_scale
    self.multi_token = multi_token

  @property
  def fully_autoregressive(self) -> bool:
    """True if no position attends to a later one."""
    return self.autoregressive and not self.input_full_attention

  @property
  def ensemble_dims(self) -> list[mtf.Dimension]:
    return [self.ensemble_dim] if self.ensemble_dim else []

  # ---------------------------------------------------------------- forward

  def token_embedding(self, mesh: mtf.Mesh, variable_dtype: mtf.VariableDType | tf.DType) -> Any:
    """The embedding of input ids, whose variables are created or found in the open scope."""
    cls = get_vocab_embedding_cls()
    # Classes of others have the arguments of the library of TensorFlow 1.
    has_scale = "init_scale" in inspect.signature(cls).parameters
    more = {"init_scale": self._embedding_init_scale} if has_scale else {}
    return cls(
      mesh,
      self.input_vocab_dim,
      self.model_dim,
      variable_dtype,
      name="embedding",
      ensemble_dim=self.ensemble_dim,
      **more,
    )

  @property
  def _embedding_init_scale(self) -> float:
    return self.logits_init_scale if self.shared_embedding_and_softmax_weights else 1.0

  def positional_table(
    self, mesh: mtf.Mesh, variable_dtype: mtf.VariableDType | tf.DType
  ) -> mtf.Tensor:
    """Vectors of positions, `[<ensemble_dim>, max_length, d_model]`: a variable, or sinusoids.

    Raises:
      ConfigError: the model has no positional embedding.
    """
    max_length = self._max_length()
    if self.sinusoid_positional_embedding:
      return sinusoid_positional_embedding_weights(
        mesh, max_length, self.model_dim, convert_to_variable_dtype(variable_dtype).activation_dtype
      )
    return mtf.layers.embedding_weights(
      mesh,
      max_length,
      self.model_dim,
      variable_dtype,
      "positional_embedding",
      ensemble_dim=self.ensemble_dim,
      # Of the size of the tokens' vectors, to which these are added.
      initializer=tf.random_normal_initializer(stddev=self._embedding_init_scale),
    )

  def _max_length(self) -> mtf.Dimension:
    """The dimension of positions that have vectors."""
    if self.max_length_dim is None:
      raise errors.ConfigError(
        f"model {self.name} has no vectors of positions; set Unitransformer.positional_embedding = "
        "True"
      )
    return self.max_length_dim

  def _call_internal(
    self, context: Context, inputs: mtf.Tensor, targets: mtf.Tensor | None = None
  ) -> mtf.Tensor:
    """Logits (or hidden states); appends the loss to `context.losses`.

    Args:
      context: a `Context`.
      inputs: int32 `[<batch_dims>, length]`, without length in incremental decoding.
      targets: int32 of the same dims, or None.

    Returns:
      `[<dims of inputs>, vocab]`, or `[<dims of inputs>, d_model]` without an output vocabulary.
    """
    # Its members see the same ids, unless the data has other ones for each.
    if self.ensemble_dim and self.ensemble_dim not in inputs.shape.dims:
      inputs = mtf.broadcast(inputs, [self.ensemble_dim] + inputs.shape.dims)
      if targets is not None:
        targets = mtf.broadcast(targets, [self.ensemble_dim] + targets.shape.dims)
    embedding = context.shared_params.get("embedding")
    if embedding is None:
      embedding = self.token_embedding(context.mesh, context.variable_dtype)
    if self.token_dropout_rate and context.train:
      # Integers are not divided by the rate of what is kept: ids become 0 or stay.
      inputs = mtf.dropout(
        inputs, is_training=True, rate=self.token_dropout_rate, noise_shape=inputs.shape
      )
    x = embedding.ids_to_embedding(inputs, context)
    context.input_embeddings = x
    if self.positional_embedding:
      x += self._positions(context, x)
    x = self.layer_stack.call(context, x)
    if self.output_vocab_dim is None:
      return x
    with stages.of_end(context):
      logits = self._logits(context, embedding, x, self.output_vocab_dim)
      if targets is not None and context.losses is not None:
        context.losses.append(self._compute_loss(context, logits, targets, self.output_vocab_dim))
        if self.multi_token is not None and context.train:
          context.losses.append(self.multi_token.loss(self, context, embedding, x, inputs, targets))
      if self.ensemble_dim:
        logits = reduce_ensemble_logits(logits, self.ensemble_dim, self.output_vocab_dim)
    # Where the ids are that come next, or are compared with them.
    return mtf.reshard(logits, context.mesh)

  def _logits(
    self, context: Context, embedding: Any, x: mtf.Tensor, output_vocab_dim: mtf.Dimension
  ) -> mtf.Tensor:
    """Logits of hidden states."""
    logits: mtf.Tensor
    if self.shared_embedding_and_softmax_weights:
      logits = embedding.hidden_to_logits(x, context)
    else:
      logits = mtf.layers.dense(
        x,
        output_vocab_dim,
        use_bias=False,
        variable_dtype=context.variable_dtype,
        reduced_dims=x.shape.dims[-1:],
        name="logits",
        kernel_initializer=(
          None
          if self.logits_init_scale == 1.0
          else mtf.layers.VarianceScalingInitializer(self.logits_init_scale**2)
        ),
      )
    cap = self.final_logit_soft_cap
    if cap is not None:
      logits = mtf.tanh(logits * (1.0 / cap)) * cap
    # In training an adaptive softmax has hidden states here.
    if output_vocab_dim in logits.shape.dims:
      logits = without_padding(logits, output_vocab_dim, context)
    return logits

  def _positions(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
    """The vectors of the positions, of dims that broadcast to x."""
    table = context.shared_params.get("positional_embedding")
    if table is None or self.sinusoid_positional_embedding:
      table = self.positional_table(context.mesh, context.variable_dtype)
    length, max_length = context.length_dim, self._max_length()
    if length.size > max_length.size:
      message = (
        f"model {self.name}: dimension {length.name}={length.size} is longer than the positional "
        f"embedding, {max_length.name}={max_length.size}; shorten the sequences "
        "(run.sequence_length), or, before training (it is a size of the weights), bind "
        f"Unitransformer.max_length = {length.size}"
      )
      if context.position_is_default:
        raise errors.ShapeError(message)
      # The given positions may all be small; those beyond the table have zero vectors.
      _LOG.warning(message)
    if context.position_is_default:
      if length.size != max_length.size:
        table = mtf.slice(table, 0, length.size, max_length.name)
      return mtf.rename_dimension(table, max_length.name, length.name)
    return mtf.gather(table, context.position, max_length, output_shape=x.shape)

  def _priority(self, targets: mtf.Tensor | None, positions: mtf.Tensor) -> mtf.Tensor | None:
    """A position sees those of at most its priority; None: it sees all."""
    if self.input_full_attention:
      if targets is None:
        raise errors.GraphError(
          f"model {self.name}: input_full_attention needs the targets, whose delimiters say what "
          "are inputs; give targets to call_simple"
        )
      # The inputs, and the first target, whose input is the last EOS of the inputs.
      region = mtf.to_int32(delimited_lm_inputs_mask(targets))
      region = mtf.maximum(region, mtf.shift(region, 1, positions.shape.dims[0], wrap=False))
      return positions * (1 - region)
    return positions if self.autoregressive else None

  def call_simple(
    self,
    inputs: mtf.Tensor,
    targets: mtf.Tensor | None,
    compute_loss: bool,
    mode: str = "train",
    variable_dtype: mtf.VariableDType | tf.DType = _FLOAT32,
    sequence_id: mtf.Tensor | None = None,
    subsequence_id: mtf.Tensor | None = None,
    position: mtf.Tensor | None = None,
    encoder_output: mtf.Tensor | None = None,
    encoder_sequence_id: mtf.Tensor | None = None,
    encoder_inputs: mtf.Tensor | None = None,
    shared_params: dict[str, Any] | None = None,
    layer_outputs: list[mtf.Tensor] | None = None,
    encoder_layer_outputs: list[mtf.Tensor] | None = None,
    num_microbatches: int = 1,
  ) -> tuple[mtf.Tensor, Any]:
    """Applies the model to whole sequences.

    Args:
      inputs: int32 `[<batch_dims>, length]`; for a language model, see `autoregressive_inputs`.
      targets: int32 of the same dims, or None. Only positive targets count in the loss.
      compute_loss: whether to compute it.
      mode: "train", "eval" or "infer".
      variable_dtype: an `mtf.VariableDType`, or one dtype for all three.
      sequence_id: int32 of the same dims: 0 for padding, else the number of the packed sequence.
      subsequence_id: int32, a finer division for self-attention.
      position: int32; 0, 1, ... by default.
      encoder_output: `[<batch_dims>, memory_length, d_model]`.
      encoder_sequence_id: int32 `[<batch_dims>, memory_length]`.
      encoder_inputs: int32 `[<batch_dims>, memory_length]`.
      shared_params: dict from a parameter's name to a tensor or embedding.
      layer_outputs: list to which the layer stack appends.
      encoder_layer_outputs: list of tensors.
      num_microbatches: number of such batches in a training step.

    Returns:
      (logits, loss): logits `[<batch_dims>, length, vocab]`; loss a scalar tensor, the int 0 if
      there is nothing to lose, or None without `compute_loss`.
    """
    batch_dims, length_dim = inputs.shape.dims[:-1], inputs.shape.dims[-1]
    default_range = mtf.range(inputs.mesh, length_dim, dtype=tf.int32)
    packed_position = position
    if not self.positional_embedding:
      # Relative attention is about the order of the tokens in the tensor.
      position = None
    priority = self._priority(targets, default_range)
    context = Context(
      model=self,
      mesh=inputs.mesh,
      batch_dims=batch_dims,
      length_dim=length_dim,
      variable_dtype=variable_dtype,
      mode=mode,
      position=default_range if position is None else position,
      position_is_default=position is None,
      sequence_id=sequence_id,
      subsequence_id=subsequence_id,
      losses=[] if compute_loss else None,
      layer_outputs=layer_outputs,
      encoder_output=encoder_output,
      encoder_sequence_id=encoder_sequence_id,
      shared_params=shared_params,
      encoder_layer_outputs=encoder_layer_outputs,
      write_priority=priority,
      read_priority=priority,
      inputs=inputs,
      encoder_inputs=encoder_inputs,
      num_microbatches=num_microbatches,
    )
    context.packed_position = packed_position
    with mtf.variable_scope(self.name):
      logits = self._call_internal(context, inputs, targets)
    step_sums.record(inputs.graph, context.step_sums or [])
    with stages.of_end(context):
      # Layers' own losses are of their activations' dtype.
      losses = [mtf.cast(x, exact_dtype(x.dtype)) for x in context.losses or []]
      return logits, mtf.add_n(losses) if compute_loss else None
