"""An encoder and a decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import COUNT, NOT_BELOW_ZERO, affects, takes
from mesh_tensorflow.meshes.layout import LayoutLike
from mesh_tensorflow.program.dimensions import ShapeLike
from mesh_tensorflow.transformer.model import stages
from mesh_tensorflow.transformer.model.layer_stack import make_layer_stack
from mesh_tensorflow.transformer.model.sequence_utils import autoregressive_inputs
from mesh_tensorflow.transformer.model.unitransformer import Unitransformer

_MODULE = "mesh_tensorflow.transformer.transformer"

_FLOAT32 = mtf.VariableDType(tf.float32)


@gin.configurable(module=_MODULE)
class Bitransformer:
  """A sequence-to-sequence model: the decoder attends to the output of the encoder.

  Args:
    encoder: a `Unitransformer` that is not autoregressive, without output vocabulary.
    decoder: an autoregressive `Unitransformer`, some of whose layers are `EncDecAttention`.
    shared_embedding: whether both have the same embedding of tokens and, if both have learned
      positions or both sinusoids of the same number, of positions.
  """

  def __init__(
    self, encoder: Unitransformer, decoder: Unitransformer, shared_embedding: bool = True
  ):
    self.encoder = encoder
    self.decoder = decoder
    self.shared_embedding = shared_embedding
    count = stages.layers_of(encoder)
    both = count + stages.layers_of(decoder)
    encoder.layers_of_pipeline, decoder.layers_of_pipeline = (0, both), (count, both)

  @property
  def output_vocab_dim(self) -> mtf.Dimension | None:
    """The decoder's."""
    return self.decoder.output_vocab_dim

  @property
  def z_loss(self) -> float:
    """The decoder's."""
    return self.decoder.z_loss

  def loss_denominator(self, targets: mtf.Tensor, num_microbatches: int) -> float:
    """The decoder's; see `Unitransformer.loss_denominator`."""
    return self.decoder.loss_denominator(targets, num_microbatches)

  def _shared_params(
    self, mesh: mtf.Mesh, variable_dtype: mtf.VariableDType | tf.DType
  ) -> dict[str, Any]:
    """Embeddings of tokens and positions that encoder and decoder share, by name."""
    if not self.shared_embedding:
      return {}
    encoder, decoder = self.encoder, self.decoder
    for what in ("model_dim", "input_vocab_dim"):
      a, b = getattr(encoder, what), getattr(decoder, what)
      if a != b:
        raise errors.ConfigError(
          f"Bitransformer: a shared embedding needs equal dimensions, but {what} of encoder "
          f"{encoder.name} is {a.name}={a.size} and of decoder {decoder.name} {b.name}={b.size}; "
          "make them equal, or set Bitransformer.shared_embedding = False"
        )
    shared: dict[str, Any] = {}
    # "shared/embedding" in checkpoints, those of T5 among them.
    with mtf.variable_scope("shared"):
      shared["embedding"] = encoder.token_embedding(mesh, variable_dtype)
      if (
        encoder.positional_embedding
        and decoder.positional_embedding
        and encoder.max_length_dim == decoder.max_length_dim
        and encoder.sinusoid_positional_embedding == decoder.sinusoid_positional_embedding
      ):
        shared["positional_embedding"] = encoder.positional_table(mesh, variable_dtype)
    return shared

  def call_simple(
    self,
    inputs: mtf.Tensor,
    targets: mtf.Tensor,
    compute_loss: bool,
    mode: str = "train",
    variable_dtype: mtf.VariableDType | tf.DType = _FLOAT32,
    encoder_sequence_id: mtf.Tensor | None = None,
    decoder_sequence_id: mtf.Tensor | None = None,
    decoder_subsequence_id: mtf.Tensor | None = None,
    encoder_position: mtf.Tensor | None = None,
    decoder_position: mtf.Tensor | None = None,
    num_microbatches: int = 1,
  ) -> tuple[mtf.Tensor, Any]:
    """Applies the model to pairs of sequences.

    Args:
      inputs: int32 `[<batch_dims>, length]`.
      targets: int32 of the same `<batch_dims>`; its length may have another size. Only positive
        targets count in the loss. With negative ones give `decoder_sequence_id` too.
      compute_loss: whether to compute it.
      mode: "train", "eval" or "infer".
      variable_dtype: an `mtf.VariableDType`, or one dtype for all three.
      encoder_sequence_id: int32 of the dims of inputs: 0 for padding, else the number of the
        packed sequence; by default `minimum(inputs, 1)`.
      decoder_sequence_id: int32 of the dims of targets, likewise. A sequence of the decoder sees
        the one of the same number of the encoder.
      decoder_subsequence_id: int32, a finer division for the decoder's self-attention.
      encoder_position: int32; 0, 1, ... by default.
      decoder_position: int32; 0, 1, ... by default.
      num_microbatches: number of such batches in a training step.

    Returns:
      (logits, loss): logits `[<dims of targets>, vocab]`; loss a scalar, or None without
      `compute_loss`.
    """
    if encoder_sequence_id is None:
      # Nothing is packed: 1 at tokens, 0 at padding.
      encoder_sequence_id = mtf.minimum(inputs, 1)
    if decoder_sequence_id is None:
      decoder_sequence_id = mtf.minimum(targets, 1)
    shared_params = self._shared_params(inputs.mesh, variable_dtype)
    encoded, encoder_loss = self._encode(
      inputs,
      encoder_sequence_id,
      compute_loss,
      mode=mode,
      variable_dtype=variable_dtype,
      position=encoder_position,
      shared_params=shared_params,
      num_microbatches=num_microbatches,
    )
    logits, loss = self.decoder.call_simple(
      autoregressive_inputs(targets, sequence_id=decoder_sequence_id),
      targets,
      compute_loss,
      mode=mode,
      variable_dtype=variable_dtype,
      sequence_id=decoder_sequence_id,
      subsequence_id=decoder_subsequence_id,
      position=decoder_position,
      shared_params=shared_params,
      num_microbatches=num_microbatches,
      **encoded,
    )
    # Without auxiliary losses the encoder's is the int 0.
    if loss is not None and isinstance(encoder_loss, mtf.Tensor):
      loss += mtf.reshard(encoder_loss, loss.mesh)
    return logits, loss

  def _encode(
    self,
    inputs: mtf.Tensor,
    sequence_id: mtf.Tensor,
    compute_loss: bool,
    **arguments: Any,
  ) -> tuple[dict[str, Any], Any]:
    """Runs the encoder; returns the decoder's arguments about it, by name, and its loss."""
    # The encoder's layer stack fills it: decoders with transparent attention mix all layers.
    layer_outputs: list[mtf.Tensor] = []
    output, loss = self.encoder.call_simple(
      inputs,
      None,
      compute_loss,
      sequence_id=sequence_id,
      layer_outputs=layer_outputs,
      **arguments,
    )

    def as_memory(x: mtf.Tensor) -> mtf.Tensor:
      # Scores have both lengths: a tensor cannot have two dimensions of one name.
      return mtf.rename_dimension(x, inputs.shape.dims[-1].name, "memory_length")

    encoded = dict(
      encoder_output=as_memory(output),
      encoder_sequence_id=as_memory(sequence_id),
      encoder_inputs=as_memory(inputs),
      encoder_layer_outputs=layer_outputs,
    )
    return encoded, loss

  @gin.configurable(module="Bitransformer")
  @affects("report")
  @takes(beam_size=COUNT, alpha=NOT_BELOW_ZERO, temperature=NOT_BELOW_ZERO)
  def decode(
    self,
    inputs: mtf.Tensor,
    variable_dtype: mtf.VariableDType | tf.DType = _FLOAT32,
    beam_size: int = 1,
    alpha: float = 0.6,
    temperature: float = 0.0,
    sampling_keep_top_k: int = -1,
    decode_length_multiplier: float = 1.5,
    decode_length_constant: float = 10,
    max_decode_length: int | None = None,
  ) -> mtf.Tensor:
    """Output sequences for input sequences.

    The encoder, and the decoder's keys and values of its output, are computed once. The loop
    ends when all rows have ended: cut each at its first end of sequence.

    Args:
      inputs: int32 `[<batch_dims>, length]`, 0 for padding.
      variable_dtype: an `mtf.VariableDType`, or one dtype for all three.
      beam_size: 1: token by token; more: beam search.
      alpha: exponent of the length penalty of beam search.
      temperature: for a beam size of 1: 0 takes the likeliest token; 1 draws from the model's
        distribution.
      sampling_keep_top_k: for a beam size of 1: choose among so many likeliest tokens; -1: among
        all.
      decode_length_multiplier: beam search makes at most as many tokens as the longest of the
        inputs times this, plus `decode_length_constant`.
      decode_length_constant: see `decode_length_multiplier`.
      max_decode_length: length of the results; by default that of inputs.

    Returns:
      int32 `[<batch_dims>, length]`.

    Raises:
      ConfigError: beam search with a temperature or sampling_keep_top_k; or a decoder that is not
        autoregressive.
    """
    if beam_size > 1 and (temperature != 0 or sampling_keep_top_k != -1):
      raise errors.ConfigError(
        f"Bitransformer.decode: beam search (beam_size={beam_size}) does not sample: temperature "
        f"(={temperature}) must be 0 and sampling_keep_top_k (={sampling_keep_top_k}) -1; or set "
        "beam_size = 1"
      )
    shared_params = self._shared_params(inputs.mesh, variable_dtype)
    encoded, _ = self._encode(
      inputs,
      mtf.minimum(inputs, 1),
      False,
      mode="infer",
      variable_dtype=variable_dtype,
      shared_params=shared_params,
    )
    *batch_dims, input_length = inputs.shape.dims
    length = input_length
    if max_decode_length is not None:
      length = mtf.Dimension("length", max_decode_length)
    common = dict(variable_dtype=variable_dtype, shared_params=shared_params, **encoded)
    if beam_size == 1:
      return self.decoder.sample_autoregressive(
        mtf.zeros(inputs.mesh, mtf.Shape([*batch_dims, length]), tf.int32),
        temperature=temperature,
        sampling_keep_top_k=sampling_keep_top_k,
        has_partial_sequences=False,
        **common,
      )
    # Of the batch, not of each row: a beam search has one number of steps.
    count = mtf.reduce_sum(mtf.to_int32(mtf.not_equal(inputs, 0)), reduced_dim=input_length)
    longest = mtf.to_float(mtf.reduce_max(count))
    return self.decoder.beam_search(
      mtf.zeros(
        inputs.mesh, mtf.Shape([*batch_dims, mtf.Dimension("beam", beam_size), length]), tf.int32
      ),
      mtf.to_int32(longest * decode_length_multiplier + decode_length_constant),
      alpha=alpha,
      **common,
    )


@gin.configurable(module=_MODULE)
@affects(report="layout mesh_shape")
def make_bitransformer(
  input_vocab_size: int = gin.REQUIRED,
  output_vocab_size: int = gin.REQUIRED,
  layout: LayoutLike | None = None,
  mesh_shape: ShapeLike | None = None,
  encoder_name: str = "encoder",
  decoder_name: str = "decoder",
  bitransformer_cls: Callable[..., Bitransformer] = Bitransformer,
) -> Bitransformer:
  """Makes an encoder and a decoder, in the gin scopes "encoder" and "decoder".

  Args:
    input_vocab_size: number of input ids.
    output_vocab_size: number of output ids.
    layout: layout rules that layers may take into account.
    mesh_shape: the mesh's shape, likewise.
    encoder_name: variable scope of the encoder.
    decoder_name: variable scope of the decoder.
    bitransformer_cls: called with encoder and decoder.
  """
  with gin.config_scope("encoder"):
    encoder = Unitransformer(
      layer_stack=make_layer_stack(),
      input_vocab_size=input_vocab_size,
      output_vocab_size=None,
      autoregressive=False,
      name=encoder_name,
      layout=layout,
      mesh_shape=mesh_shape,
    )
  with gin.config_scope("decoder"):
    decoder = Unitransformer(
      layer_stack=make_layer_stack(),
      # A decoder reads what it has written.
      input_vocab_size=output_vocab_size,
      output_vocab_size=output_vocab_size,
      autoregressive=True,
      name=decoder_name,
      layout=layout,
      mesh_shape=mesh_shape,
    )
  return bitransformer_cls(encoder, decoder)
