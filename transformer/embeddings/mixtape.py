"""Mixtape: a mixture of softmaxes at nearly the cost of one (Yang et al., 2019)."""

from __future__ import annotations

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import BELOW_ONE, COUNT_OR_ZERO, affects, takes
from mesh_tensorflow.transformer.models.context import Context
from mesh_tensorflow.transformer.models.vocab_embedding import TokenVectors


@gin.configurable(module="mesh_tensorflow.transformer.vocab_embeddings")
@affects(report="mesh", training="dropout_rate noise_std_dev")
@takes(extra_ids=COUNT_OR_ZERO, dropout_rate=BELOW_ONE)
class Mixtape(TokenVectors):
  """Logits that are mixed, with weights for each token, from four sets of logits.

  Yang, Luong, Salakhutdinov and Le, 2019: "Mixtape: Breaking the Softmax Bottleneck Efficiently".
  The weights of infrequent tokens do not depend on the token. Variables, with a leading
  ensemble_dim if there is one; f is the number of frequent tokens:

      <name>_embedding_weights [vocab_dim, output_dim]
      <name>_context_weights [gates=4, _<output_dim>_copy, output_dim], _bias [gates=4, output_dim]
      <name>_prior_weights [gates=3, gate_embedding, output_dim], _bias [gates=3, gate_embedding]
      <name>_prior_vocab_vector [vocab=f, gate_embedding]
      <name>_prior_gates_vector [gates=3, output_dim]
      <name>_prior_bias [vocab=f, gates=3]

  Args:
    mesh: an `mtf.Mesh`.
    vocab_dim: dimension of tokens. Split over the mesh, the number of frequent tokens must be
      splittable too.
    output_dim: dimension of vectors.
    variable_dtype: an `mtf.VariableDType`, or one dtype for all three.
    name: of the variables; see above.
    ensemble_dim: a dimension, or None.
    extra_ids: how many ids at the end of the vocabulary (sentinels) are to count as the most
      frequent; ids from 0 follow.
    dropout_rate: rate at which logits, and vectors of gates, become 0 in training; all positions
      of a sequence have one mask.
    gate_embedding_size: size of the vectors from which gates of frequent tokens are computed.
    frequent_token_fraction: which part of the vocabulary counts as frequent.
    noise_std_dev: standard deviation of noise that is added to the gates in training.

  Raises:
    ConfigError: extra_ids or frequent_token_fraction does not fit the vocabulary.
  """

  def __init__(
    self,
    mesh: mtf.Mesh,
    vocab_dim: mtf.Dimension,
    output_dim: mtf.Dimension,
    variable_dtype: mtf.VariableDType | tf.DType,
    name: str,
    ensemble_dim: mtf.Dimension | None,
    extra_ids: int = 0,
    dropout_rate: float = 0.0,
    gate_embedding_size: int = gin.REQUIRED,
    frequent_token_fraction: float = 0.1,
    noise_std_dev: float = 0.0,
  ):
    # Ids are ordered by frequency: the first ones are the frequent ones.
    frequent = int(frequent_token_fraction * vocab_dim.size)
    if not 0 < frequent <= vocab_dim.size:
      raise errors.ConfigError(
        f"Mixtape: frequent_token_fraction={frequent_token_fraction} of the dimension "
        f"{vocab_dim.name}={vocab_dim.size} is {frequent} tokens; it must be 1 to {vocab_dim.size}"
      )
    if not 0 <= extra_ids <= vocab_dim.size:
      raise errors.ConfigError(
        f"Mixtape: extra_ids={extra_ids} must be 0 to {vocab_dim.name}={vocab_dim.size}"
      )
    super().__init__(mesh, vocab_dim, output_dim, variable_dtype, name, ensemble_dim)
    self._extra_ids = extra_ids
    self._dropout_rate = dropout_rate
    self._noise_std_dev = noise_std_dev
    self._copy_dim = mtf.Dimension(f"_{output_dim.name}_copy", output_dim.size)
    self._gates_dim, self._logits_dim = mtf.Dimension("gates", 3), mtf.Dimension("gates", 4)
    self._gate_embedding_dim = mtf.Dimension("gate_embedding", gate_embedding_size)
    self._rare_size = vocab_dim.size - frequent
    frequent_dim = mtf.Dimension(vocab_dim.name, frequent)
    variable = self._variable
    self._embedding_weights = variable("_embedding_weights", vocab_dim, output_dim)
    self._context_weights = variable(
      "_context_weights", self._logits_dim, self._copy_dim, output_dim
    )
    self._context_bias = variable("_context_weights_bias", self._logits_dim, output_dim, stddev=0.0)
    gates, gate_embedding = self._gates_dim, self._gate_embedding_dim
    self._prior_weights = variable("_prior_weights", gates, gate_embedding, output_dim)
    self._prior_weights_bias = variable("_prior_weights_bias", gates, gate_embedding, stddev=0.0)
    self._prior_vocab_vector = variable("_prior_vocab_vector", frequent_dim, gate_embedding)
    self._prior_gates_vector = variable("_prior_gates_vector", gates, output_dim)
    self._prior_bias = variable("_prior_bias", frequent_dim, gates)

  def hidden_to_logits(self, hidden: mtf.Tensor, context: Context) -> mtf.Tensor:
    """Mixed logits: the dims of `hidden`, vocab_dim for output_dim."""
    # The table has variance 1: see `VocabEmbedding.hidden_to_logits`.
    hidden *= self._output_dim.size**-0.5
    gate0, gate1, gate2 = self._gates(hidden, context)
    logits0, logits1, logits2, logits3 = mtf.unstack(
      self._component_logits(hidden, context), self._logits_dim
    )
    # gate * a + (1 - gate) * b, three times.
    # The paper's tree of sigmoids: four weights that add up to 1, of three gates without a softmax.
    left = logits1 + gate1 * (logits0 - logits1)
    right = logits3 + gate2 * (logits2 - logits3)
    logits = right + gate0 * (left - right)
    if self._extra_ids:
      # The last ids were computed as the first ones.
      logits = mtf.shift(logits, -self._extra_ids, self._vocab_dim, wrap=True)
    return logits

  def _component_logits(self, hidden: mtf.Tensor, context: Context) -> mtf.Tensor:
    """Four sets of logits: `[..., gates=4, vocab_dim]`."""
    dims = hidden.shape - self._output_dim + self._logits_dim
    renamed = mtf.rename_dimension(hidden, self._output_dim.name, self._copy_dim.name)
    vectors = mtf.einsum([renamed, self._context_weights], output_shape=dims + self._output_dim)
    logits = mtf.einsum(
      [mtf.tanh(vectors + self._context_bias), self._embedding_weights],
      output_shape=dims + self._vocab_dim,
    )
    return self._dropout(logits, context)

  def _gates(self, hidden: mtf.Tensor, context: Context) -> list[mtf.Tensor]:
    """Three gates, between 0 and 1, for each token: tensors `[..., vocab_dim]`."""
    batch = hidden.shape - self._output_dim
    dims = batch + self._gates_dim
    vectors = mtf.einsum(
      [hidden, self._prior_weights], output_shape=dims + self._gate_embedding_dim
    )
    vectors = self._dropout(mtf.tanh(vectors + self._prior_weights_bias), context)
    shared = mtf.einsum([hidden, self._prior_gates_vector], output_shape=dims)
    # Under another name the frequent tokens are not split over the mesh: their gates are padded.
    name = self._vocab_dim.name
    vocab_vector, bias = (
      mtf.rename_dimension(x, name, f"_{name}")
      for x in (self._prior_vocab_vector, self._prior_bias)
    )
    frequent_dim = mtf.Dimension(f"_{name}", self._vocab_dim.size - self._rare_size)
    prior = mtf.einsum([vocab_vector, vectors], output_shape=dims + frequent_dim) + bias
    if self._rare_size:
      # Zeros for rare tokens: their gates are the part that all tokens share.
      prior = mtf.pad(prior, [0, self._rare_size], f"_{name}")
    prior = mtf.rename_dimension(prior, f"_{name}", name) + shared
    if context.mode == "train" and self._noise_std_dev:
      prior += mtf.random_normal(
        prior.mesh, prior.shape, stddev=self._noise_std_dev, dtype=prior.dtype
      )
    gates: list[mtf.Tensor] = mtf.unstack(mtf.sigmoid(prior), self._gates_dim)
    return gates

  def _dropout(self, x: mtf.Tensor, context: Context) -> mtf.Tensor:
    if context.mode != "train" or not self._dropout_rate:
      return x
    return mtf.dropout(
      x, is_training=True, rate=self._dropout_rate, noise_shape=x.shape - context.length_dim
    )
