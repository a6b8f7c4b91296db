"""Logits that are a mixture of several softmaxes."""

from __future__ import annotations

import gin
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.arguments.declared import affects
from mesh_tensorflow.transformer.models.context import Context
from mesh_tensorflow.transformer.models.vocab_embedding import TokenVectors, without_padding


@gin.configurable(module="mesh_tensorflow.transformer.vocab_embeddings")
@affects(report="mesh")
class MixtureOfSoftmaxes(TokenVectors):
  """A mixture of several softmaxes, whose logits are not of the rank of the model's size.

  Yang et al., 2017 (arXiv:1711.03953). Variables, with a leading ensemble_dim if there is one:
  `<name>_embedding_weights` [vocab_dim, output_dim], `<name>_mixture_weights` [softmax_components,
  output_dim] and `<name>_context_weights` [softmax_components, _<output_dim>_copy, output_dim].

  Args:
    mesh: an `mtf.Mesh`.
    vocab_dim: dimension of tokens.
    output_dim: dimension of vectors.
    variable_dtype: an `mtf.VariableDType`, or one dtype for all three.
    name: of the variables, with what they are behind it.
    ensemble_dim: a dimension, or None.
    num_softmaxes: how many.
  """

  def __init__(
    self,
    mesh: mtf.Mesh,
    vocab_dim: mtf.Dimension,
    output_dim: mtf.Dimension,
    variable_dtype: mtf.VariableDType | tf.DType,
    name: str,
    ensemble_dim: mtf.Dimension | None,
    num_softmaxes: int = gin.REQUIRED,
  ):
    super().__init__(mesh, vocab_dim, output_dim, variable_dtype, name, ensemble_dim)
    self._copy_dim = mtf.Dimension(f"_{output_dim.name}_copy", output_dim.size)
    self._components_dim = mtf.Dimension("softmax_components", num_softmaxes)
    components = self._components_dim
    self._embedding_weights = self._variable("_embedding_weights", vocab_dim, output_dim)
    self._mixture_weights = self._variable("_mixture_weights", components, output_dim)
    self._context_weights = self._variable(
      "_context_weights", components, self._copy_dim, output_dim
    )

  def hidden_to_logits(self, hidden: mtf.Tensor, context: Context) -> mtf.Tensor:
    """Log probabilities: the dims of `hidden`, vocab_dim for output_dim."""
    output_dim, components_dim = self._output_dim, self._components_dim
    hidden *= output_dim.size**-0.5
    batch = hidden.shape - output_dim
    prior = mtf.log_softmax(
      mtf.einsum([hidden, self._mixture_weights], output_shape=batch + components_dim),
      components_dim,
    )
    # A matrix has no two dimensions of one name: its input has another one.
    renamed = mtf.rename_dimension(hidden, output_dim.name, self._copy_dim.name)
    hidden_of_component = mtf.tanh(
      mtf.einsum([renamed, self._context_weights], output_shape=batch + components_dim + output_dim)
    )
    logits = mtf.einsum(
      [hidden_of_component, self._embedding_weights],
      output_shape=batch + components_dim + self._vocab_dim,
    )
    logits = without_padding(logits, self._vocab_dim, context)
    log_probs = mtf.log_softmax(logits, self._vocab_dim)
    # log of sum(prior * probability): the probabilities themselves could be too small for floats.
    return mtf.reduce_logsumexp(log_probs + prior, components_dim)
