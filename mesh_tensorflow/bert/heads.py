"""The two tasks of pretraining, on top of a BERT model."""

from __future__ import annotations

from typing import Any

import mesh_tensorflow as mtf
from mesh_tensorflow.bert.model_parts import get_activation
from mesh_tensorflow.numerics import initializers

Z_LOSS = 1e-4


def masked_lm_output(
  model: Any, positions: mtf.Tensor, label_ids: mtf.Tensor, label_weights: mtf.Tensor
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
  """The WordPieces at masked positions; see `BertModel.get_masked_lm_output`."""
  hidden = mtf.gather(model.get_sequence_output(), positions, model.seq_dim)
  with mtf.variable_scope("cls/predictions"):
    with mtf.variable_scope("transform"):
      hidden = mtf.layers.dense(
        hidden,
        reduced_dims=[model.model_dim],
        new_dims=[model.model_dim],
        activation=get_activation(model.config.feedforward_intermediate_act),
        kernel_initializer=model.dense_initializer,
        use_bias=model.config.use_bias,
      )
      hidden = model.normalize(hidden)
    bias = mtf.get_variable(
      hidden.mesh, "output_bias", mtf.Shape([model.vocab_dim]), initializer=initializers.Zeros()
    )
  # The weights are those of the embedding: Press and Wolf, 2017 (arXiv:1608.05859).
  logits = mtf.einsum([hidden, model.get_embedding_table()], reduced_dims=[model.model_dim]) + bias
  per_example_loss = mtf.layers.softmax_cross_entropy_with_logits(
    logits, label_ids, model.vocab_dim, z_loss=Z_LOSS
  )
  weights = mtf.cast(label_weights, per_example_loss.dtype)
  # The small number is for a batch that has no masked position.
  loss = mtf.reduce_sum(weights * per_example_loss) / (mtf.reduce_sum(weights) + 1e-5)
  return loss, per_example_loss, logits


def next_sentence_output(
  model: Any, labels: mtf.Tensor
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor]:
  """Next sentence prediction loss and logits; see `BertModel.get_next_sentence_output`."""
  class_dim = mtf.Dimension("class", 2)
  with mtf.variable_scope("cls"):
    logits = mtf.layers.dense(
      model.get_pooled_output(),
      reduced_dims=[model.model_dim],
      new_dims=[class_dim],
      kernel_initializer=model.dense_initializer,
      use_bias=model.config.use_bias,
      name="seq_relationship",
    )
  per_example_loss = mtf.layers.softmax_cross_entropy_with_logits(
    logits, labels, class_dim, z_loss=Z_LOSS
  )
  return mtf.reduce_mean(per_example_loss), per_example_loss, logits
