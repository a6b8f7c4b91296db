"""BERT: Bidirectional Encoder Representations from Transformers, in named dimensions."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.bert.checkpoint_names import get_assignment_map_from_checkpoint
from mesh_tensorflow.bert.config import (
  POSITION_SIGNALS,
  RESIDUAL_STRUCTURES,
  BertConfig,
  check_choice,
)
from mesh_tensorflow.bert.model_parts import Dimensions, get_activation, layer_norm
from mesh_tensorflow.errors import ArgumentError, ConfigError, ShapeError, SizeError
from mesh_tensorflow.layers.attention import attend
from mesh_tensorflow.meshes.layout import LayoutLike
from mesh_tensorflow.numerics import initializers
from mesh_tensorflow.program.dimensions import ShapeLike
from mesh_tensorflow.transformer import moe
from mesh_tensorflow.transformer.model.attention.bias import (
  relative_position_bucket as _relative_position_bucket,
)

__all__ = [
  "BertConfig",
  "BertModel",
  "_relative_position_bucket",
  "get_activation",
  "get_assignment_map_from_checkpoint",
  "layer_norm",
]

_NUM_BUCKETS = 32
_Z_LOSS = 1e-4
_MASKED = -10000.0  # Added to the logits of positions that are not to be looked at.


class BertModel(Dimensions):
  """The operations and variables of a BERT model (Devlin et al., 2018, arXiv:1810.04805).

  Embeddings of WordPieces, token types and positions are added up and normalized; the layers of
  `config.block_layers` follow, `config.num_blocks` times, each with dropout, residual and norm.
  Variables are float32, in the scope `bert` (`bert_1`, ... for further models of one graph).

  Args:
    config: a `BertConfig`; copied.
    is_training: whether there is dropout, and experts route as in training.
    input_ids: int `Tensor` [batch, seq]. An id outside the vocabulary has the embedding 0.
    input_mask: `Tensor` of the same shape, 1 for tokens and 0 for padding; None: no padding.
    token_type_ids: int `Tensor` of the same shape; None: all 0.
    scope: scope of the variables.
    mesh_shape: mesh shape that the program will have, for the experts' exchange.
    layout: layout rules that it will have, likewise.

  Raises:
    ArgumentError: an input is no `Tensor`.
    SizeError: `input_ids` has not two dimensions, or there are fewer position vectors than
      positions.
    ShapeError: mask or token types have another shape.
    ConfigError: the configuration is wrong; it says where.
  """

  def __init__(
    self,
    config: BertConfig,
    is_training: bool,
    input_ids: mtf.Tensor,
    input_mask: mtf.Tensor | None = None,
    token_type_ids: mtf.Tensor | None = None,
    scope: str | None = None,
    mesh_shape: ShapeLike | None = "",
    layout: LayoutLike | None = "",
  ):
    _check_inputs(input_ids, input_mask=input_mask, token_type_ids=token_type_ids)
    if input_ids.shape.ndims != 2:
      raise SizeError(f"BertModel: input_ids must have two dimensions, batch and seq: {input_ids}")
    self.config = copy.deepcopy(config)
    # `from_dict` takes what it is given.
    check_choice("position_signal", config.position_signal, POSITION_SIGNALS)
    check_choice("residual_structure", config.residual_structure, RESIDUAL_STRUCTURES)
    if not is_training:
      self.config.layer_output_dropout_prob = 0.0
      self.config.attention_probs_dropout_prob = 0.0
      self.config.feedforward_intermediate_dropout_prob = 0.0
    self._is_training = is_training
    self.input_ids = input_ids
    self._extra_losses: list[mtf.Tensor] = []
    if token_type_ids is None:
      token_type_ids = mtf.zeros(input_ids.mesh, input_ids.shape, dtype=tf.int32)
    with mtf.variable_scope(scope, default_name="bert", graph=input_ids.graph):
      with mtf.variable_scope("embeddings"):
        self._embedding_output = self._embed(token_type_ids)
      with mtf.variable_scope("encoder"):
        bias = self._attention_bias(input_mask)
        layers: dict[str, Callable[[mtf.Tensor], mtf.Tensor]] = {
          "attention": lambda x: self.self_attention(x, bias),
          "feedforward": self.feedforward,
          "moe": lambda x: self.moe(x, layout, mesh_shape, input_mask, is_training),
        }
        self._all_encoder_layers = self._encode(layers)
      self._sequence_output = (
        self._all_encoder_layers[-1] if self._all_encoder_layers else self._embedding_output
      )
      if self.config.residual_structure == "direct":
        self._sequence_output = self.normalize(self._sequence_output)
      with mtf.variable_scope("pooler"):
        self._pooled_output = self._pool()

  def _embed(self, token_type_ids: mtf.Tensor) -> mtf.Tensor:
    mesh, hidden = self.input_ids.mesh, self.model_dim

    def table(name: str, dim: mtf.Dimension) -> mtf.Tensor:
      return mtf.get_variable(
        mesh, name, mtf.Shape([dim, hidden]), initializer=self.embedding_initializer
      )

    self._embedding_table = table("word_embeddings", self.vocab_dim)
    self._word_embedding_output = mtf.gather(self._embedding_table, self.input_ids, self.vocab_dim)
    types = self.token_type_vocab_dim
    x = self._word_embedding_output
    x += mtf.gather(table("token_type_embeddings", types), token_type_ids, types)
    if self.config.position_signal == "embedding":
      positions, seq = self.max_position_embeddings_dim, self.seq_dim
      if seq.size > positions.size:
        raise SizeError(
          f"BertModel: sequences of length {seq.size} ({seq.name}) need as many position vectors; "
          f"BertConfig.max_position_embeddings is {positions.size}"
        )
      vectors = mtf.slice(table("position_embeddings", positions), 0, seq.size, positions.name)
      x += mtf.rename_dimension(vectors, positions.name, seq.name)
    return self._dropout(self.normalize(x))

  def _dropout(self, x: mtf.Tensor) -> mtf.Tensor:
    keep = 1.0 - self.config.layer_output_dropout_prob
    return mtf.dropout(x, self._is_training, keep_prob=keep)

  def _attention_bias(self, input_mask: mtf.Tensor | None) -> mtf.Tensor | None:
    """Bias added to the attention logits of every layer: mask and relative positions; or None."""
    seq, memory = self.seq_dim, self.memory_seq_dim
    biases = []
    if input_mask is not None:
      mask = mtf.rename_dimension(mtf.to_float(input_mask), seq.name, memory.name)
      biases.append((1.0 - mask) * _MASKED)
    if self.config.position_signal == "relative_attention_bias":
      mesh, buckets = self.input_ids.mesh, mtf.Dimension("buckets", _NUM_BUCKETS)
      of_bucket = mtf.get_variable(
        mesh,
        "relative_attention_bias",
        mtf.Shape([self.num_heads_dim, buckets]),
        initializer=initializers.Zeros(),
      )
      distance = mtf.range(mesh, memory, tf.int32) - mtf.range(mesh, seq, tf.int32)
      bucket = _relative_position_bucket(distance, num_buckets=_NUM_BUCKETS)
      biases.append(mtf.gather(of_bucket, bucket, buckets))
    return mtf.add_n(biases) if biases else None

  def _encode(self, layers: dict[str, Callable[[mtf.Tensor], mtf.Tensor]]) -> list[mtf.Tensor]:
    """The output of each block."""
    direct = self.config.residual_structure == "direct"
    outputs = []
    x = self._embedding_output
    for block in range(self.config.num_blocks):
      counts: collections.Counter[str] = collections.Counter()
      with mtf.variable_scope(f"block_{block}"):
        for kind in self.config.block_layers:
          if kind not in layers:
            raise ConfigError(
              f"BertConfig.block_layers has {kind!r}; use {', '.join(layers)}, as a list"
            )
          with mtf.variable_scope(f"{kind}_{counts[kind]}" if counts[kind] else kind):
            counts[kind] += 1
            y = layers[kind](self.normalize(x) if direct else x)
            x += self._dropout(y)
            if not direct:
              x = self.normalize(x)
      outputs.append(x)
    return outputs

  def _dense(self, x: mtf.Tensor, reduced: list[Any], new: list[Any], **kwargs: Any) -> mtf.Tensor:
    return mtf.layers.dense(
      x,
      reduced_dims=reduced,
      new_dims=new,
      kernel_initializer=self.dense_initializer,
      use_bias=self.config.use_bias,
      **kwargs,
    )

  def _pool(self) -> mtf.Tensor:
    """The first position of each sequence, through a dense layer."""
    mesh = self.input_ids.mesh
    first = mtf.gather(
      self._sequence_output, mtf.constant(mesh, 0, mtf.Shape([]), tf.int32), self.seq_dim
    )
    return self._dense(first, [self.model_dim], [self.model_dim], activation=mtf.tanh)

  def self_attention(self, x: mtf.Tensor, attention_bias: mtf.Tensor | None) -> mtf.Tensor:
    """Attention of each position over all (Vaswani et al., 2017, arXiv:1706.03762).

    There is no dropout of the weights, whatever `attention_probs_dropout_prob` says: the archived
    library did not apply it, and existing models are trained so.

    Args:
      x: [batch, seq, hidden].
      attention_bias: added to the logits [batch, num_heads, seq, memory_seq]; of some of these
        dimensions, or None.

    Returns:
      A `Tensor` of x's shape.
    """
    heads_dim, head = self.num_heads_dim, self.size_per_head_dim
    memory = mtf.rename_dimension(x, self.seq_dim.name, self.memory_seq_dim.name)
    q, k, v = (
      self._dense(of, [self.model_dim], [heads_dim, head], name=name)
      for name, of in (("query", x), ("key", memory), ("value", memory))
    )
    logits = mtf.einsum([q, k], reduced_dims=[head]) * head.size**-0.5
    if attention_bias is not None:
      logits += attention_bias
    y = attend(
      logits, v, q.shape, normalize=lambda logits: mtf.softmax(logits, self.memory_seq_dim)
    )
    y = self._dense(y, [heads_dim, head], [self.model_dim], name="output")
    return mtf.transpose(y, x.shape)

  def feedforward(self, x: mtf.Tensor) -> mtf.Tensor:
    """Two dense layers, an activation between them; [batch, seq, hidden] to the same."""
    h = self._dense(
      x,
      [self.model_dim],
      [self.feedforward_intermediate_dim],
      activation=get_activation(self.config.feedforward_intermediate_act),
      name="dense_1",
    )
    return self._dense(h, [self.feedforward_intermediate_dim], [self.model_dim], name="dense_2")

  def moe(
    self,
    x: mtf.Tensor,
    layout: LayoutLike | None,
    mesh_shape: ShapeLike | None,
    input_mask: mtf.Tensor | None,
    is_training: bool,
  ) -> mtf.Tensor:
    """A mixture of experts, two for each token (Shazeer et al., 2017, arXiv:1701.06538).

    Its balance loss is added to `get_extra_loss()`.

    Args:
      x: [batch, seq, hidden].
      layout: layout rules.
      mesh_shape: mesh shape.
      input_mask: 1 for tokens, 0 for padding, which goes to no expert; or None.
      is_training: which capacity and policy of second choices counts.

    Returns:
      A `Tensor` of x's shape.
    """
    hparams = moe.HParams(
      moe_gating="top_2",
      moe_num_experts=self.config.moe_num_experts,
      moe_loss_coef=1e-3,
      moe_hidden_size=self.config.moe_intermediate_size,
      moe_group_size=2048,
      moe_min_expert_capacity=4,
      moe_capacity_factor_train=1.25,
      moe_capacity_factor_eval=8.0,
      moe_use_second_place_loss=False,
      moe_second_policy_train="random",
      moe_second_policy_eval="random",
      moe_second_threshold_train=0.2,
      moe_second_threshold_eval=0.2,
    )
    y, loss = moe.transformer_moe_layer_v1(
      x,
      self.model_dim,
      hparams,
      is_training,
      variable_dtype=mtf.VariableDType(tf.float32, tf.float32, x.dtype),
      layout=layout,
      mesh_shape=mesh_shape,
      nonpadding=None if input_mask is None else mtf.to_float(input_mask),
      activation=get_activation(self.config.feedforward_intermediate_act),
    )
    self._extra_losses.append(loss)
    output: mtf.Tensor = y  # Several only where experts are for attention.
    return output

  def normalize(self, x: mtf.Tensor) -> mtf.Tensor:
    """Layer norm over the model's dimension; RMS norm with a scale if there are no biases."""
    return layer_norm(
      x,
      self.model_dim,
      epsilon=self.config.layer_norm_epsilon,
      subtract_mean=self.config.use_bias,
      use_bias=self.config.use_bias,
    )

  def get_masked_lm_output(
    self, positions: mtf.Tensor, label_ids: mtf.Tensor, label_weights: mtf.Tensor
  ) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
    """Masked language model loss and logits, at the masked positions.

    Args:
      positions: int `Tensor` [batch, max_predictions], positions along seq.
      label_ids: the WordPieces there, of the same shape.
      label_weights: 1 for predictions, 0 for what fills up; of the same shape.

    Returns:
      (loss, per_example_loss, logits): the weighted mean, the cross-entropy with z-loss
      [batch, max_predictions], and [batch, max_predictions, vocab]. Logits include the WordPieces
      by which the vocabulary was rounded up.
    """
    hidden = mtf.gather(self.get_sequence_output(), positions, self.seq_dim)
    with mtf.variable_scope("cls/predictions"):
      with mtf.variable_scope("transform"):
        hidden = mtf.layers.dense(
          hidden,
          reduced_dims=[self.model_dim],
          new_dims=[self.model_dim],
          activation=get_activation(self.config.feedforward_intermediate_act),
          kernel_initializer=self.dense_initializer,
          use_bias=self.config.use_bias,
        )
        hidden = self.normalize(hidden)
      bias = mtf.get_variable(
        hidden.mesh, "output_bias", mtf.Shape([self.vocab_dim]), initializer=initializers.Zeros()
      )
    # The weights are those of the embedding: Press and Wolf, 2017 (arXiv:1608.05859).
    logits = mtf.einsum([hidden, self.get_embedding_table()], reduced_dims=[self.model_dim]) + bias
    per_example_loss = mtf.layers.softmax_cross_entropy_with_logits(
      logits, label_ids, self.vocab_dim, z_loss=_Z_LOSS
    )
    weights = mtf.cast(label_weights, per_example_loss.dtype)
    # The small number is for a batch that has no masked position.
    loss = mtf.reduce_sum(weights * per_example_loss) / (mtf.reduce_sum(weights) + 1e-5)
    return loss, per_example_loss, logits

  def get_next_sentence_output(
    self, labels: mtf.Tensor
  ) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
    """Next sentence prediction loss and logits: does the second segment follow the first?

    Args:
      labels: int `Tensor` [batch], 0 if it follows, 1 if it is a random one.

    Returns:
      (loss, per_example_loss, logits): the mean, the cross-entropy with z-loss [batch], and
      [batch, class].
    """
    class_dim = mtf.Dimension("class", 2)
    with mtf.variable_scope("cls"):
      logits = mtf.layers.dense(
        self.get_pooled_output(),
        reduced_dims=[self.model_dim],
        new_dims=[class_dim],
        kernel_initializer=self.dense_initializer,
        use_bias=self.config.use_bias,
        name="seq_relationship",
      )
    per_example_loss = mtf.layers.softmax_cross_entropy_with_logits(
      logits, labels, class_dim, z_loss=_Z_LOSS
    )
    return mtf.reduce_mean(per_example_loss), per_example_loss, logits

  def get_extra_loss(self) -> mtf.Tensor | int:
    """The sum of the experts' losses; the number 0 if there are none."""
    return mtf.add_n(self._extra_losses) if self._extra_losses else 0

  def get_pooled_output(self) -> mtf.Tensor:
    """The first position, through the pooler: [batch, hidden]."""
    return self._pooled_output

  def get_sequence_output(self) -> mtf.Tensor:
    """The last layer: [batch, seq, hidden]."""
    return self._sequence_output

  def get_all_encoder_layers(self) -> list[mtf.Tensor]:
    """The output of each block, without the last norm of "direct": [batch, seq, hidden]."""
    return self._all_encoder_layers

  def get_word_embedding_output(self) -> mtf.Tensor:
    """WordPiece embeddings before anything is added: [batch, seq, hidden]."""
    return self._word_embedding_output

  def get_embedding_output(self) -> mtf.Tensor:
    """Output of the embedding layer, the input of the first block: [batch, seq, hidden]."""
    return self._embedding_output

  def get_embedding_table(self) -> mtf.Tensor:
    """The WordPiece embeddings: [vocab, hidden]."""
    return self._embedding_table


def _check_inputs(input_ids: mtf.Tensor, **others: mtf.Tensor | None) -> None:
  for name, x in {"input_ids": input_ids, **others}.items():
    if x is None and name != "input_ids":
      continue
    if not isinstance(x, mtf.Tensor):
      raise ArgumentError(f"BertModel: {name} must be an mtf.Tensor [batch, seq], got {x!r}")
    if x.shape != input_ids.shape:
      raise ShapeError(f"BertModel: {name} must have the shape of input_ids {input_ids}, got {x}")
