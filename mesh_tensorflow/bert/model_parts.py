"""Parts of a BERT model: activations, its layer norm, its dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.bert.config import BertConfig
from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.numerics import initializers
from mesh_tensorflow.operations.norms import rms_normalize, standardize


def _gelu_erf(x: mtf.Tensor) -> mtf.Tensor:
  """x times the normal distribution's probability to be below x, without approximation."""
  return mtf.cwise(lambda t: tf.nn.gelu(t, approximate=False), [x], name="gelu_erf")


# `gelu` is the approximation with tanh, of which Google's checkpoints are. Hugging Face calls that
# one gelu_new, and what is gelu there is `gelu_erf` here.
_ACTIVATIONS: dict[str, Callable[[mtf.Tensor], mtf.Tensor] | None] = {
  "": None,
  "linear": None,
  "gelu": mtf.gelu,
  "gelu_erf": _gelu_erf,
  "relu": mtf.relu,
  "tanh": mtf.tanh,
}


def get_activation(activation_string: str | Callable[..., mtf.Tensor] | None) -> Any:
  """The function that the name of an activation stands for.

  Args:
    activation_string: "gelu" (approximated with tanh), "gelu_erf" (exact), "relu", "tanh", in any
      case; "linear" or "" for none; what is no string is returned as it is.

  Returns:
    A function of a `Tensor`, or None.

  Raises:
    ConfigError: another name.
  """
  if not isinstance(activation_string, str):
    return activation_string
  name = activation_string.lower()
  if name not in _ACTIVATIONS:
    known = ", ".join(n for n in _ACTIVATIONS if n)
    raise ConfigError(f"unsupported activation {activation_string!r}; use one of {known}")
  return _ACTIVATIONS[name]


def layer_norm(
  x: mtf.Tensor,
  dim: mtf.Dimension,
  epsilon: float = 1e-6,
  subtract_mean: bool = True,
  use_scale: bool = True,
  use_bias: bool = True,
  name: str | None = None,
) -> mtf.Tensor:
  """(x - mean) / sqrt(variance + epsilon) * scale + bias, over one dimension.

  Ba, Kiros and Hinton, 2016 (arXiv:1607.06450); without the mean, RMS norm (Zhang and Sennrich,
  2019, arXiv:1910.07467). Variables [dim]: `{name}/scale` (ones) and `{name}/bias` (zeros).

  Args:
    x: a floating `Tensor`.
    dim: the dimension to normalize over.
    epsilon: added to the mean of squares.
    subtract_mean: whether the mean is subtracted first.
    use_scale: whether there is a scale.
    use_bias: whether there is a bias.
    name: name of the scope; `layer_norm` by default.

  Returns:
    A `Tensor` of x's shape.
  """
  y = standardize(x, dim, epsilon) if subtract_mean else rms_normalize(x, dim, epsilon)
  with mtf.variable_scope(name or "layer_norm"):
    if use_scale:
      scale = mtf.get_variable(
        x.mesh, "scale", mtf.Shape([dim]), initializer=initializers.Ones(), activation_dtype=x.dtype
      )
      y = mtf.einsum([y, scale], output_shape=x.shape)
    if use_bias:
      y += mtf.get_variable(
        x.mesh, "bias", mtf.Shape([dim]), initializer=initializers.Zeros(), activation_dtype=x.dtype
      )
  return y


class Dimensions:
  """The dimensions and initializers of a BERT model.

  Attributes:
    config: the `BertConfig`.
    input_ids: `Tensor` [batch, seq]; its dimensions may have any names.
  """

  config: BertConfig
  input_ids: mtf.Tensor

  def _given(self, attribute: str) -> int:
    value = getattr(self.config, attribute)
    if not value:
      raise ConfigError(f"BertConfig.{attribute} is not set")
    return int(value)

  @property
  def vocab_dim(self) -> mtf.Dimension:
    """WordPieces, rounded up to a multiple of 128, which meshes divide."""
    size = self._given("vocab_size")
    return mtf.Dimension("vocab", size + -size % 128)

  @property
  def model_dim(self) -> mtf.Dimension:
    """The vectors that layers pass on."""
    return mtf.Dimension("hidden", self._given("d_model"))

  @property
  def token_type_vocab_dim(self) -> mtf.Dimension:
    """Token types."""
    return mtf.Dimension("token_type_vocab", self._given("type_vocab_size"))

  @property
  def feedforward_intermediate_dim(self) -> mtf.Dimension:
    """The hidden layer of "feedforward"."""
    return mtf.Dimension("intermediate", self._given("feedforward_intermediate_size"))

  @property
  def num_heads_dim(self) -> mtf.Dimension:
    """Attention heads."""
    return mtf.Dimension("num_heads", self._given("attention_num_heads"))

  @property
  def softmax_heads_dims(self) -> mtf.Dimension:
    """The heads that have a softmax: all."""
    return self.num_heads_dim

  @property
  def max_position_embeddings_dim(self) -> mtf.Dimension:
    """Position vectors."""
    return mtf.Dimension("max_position_embeddings", self._given("max_position_embeddings"))

  @property
  def seq_dim(self) -> mtf.Dimension:
    """Positions of the input."""
    return self.input_ids.shape.dims[1]

  @property
  def memory_seq_dim(self) -> mtf.Dimension:
    """Positions that are attended to."""
    return mtf.Dimension("memory_seq", self.seq_dim.size)

  @property
  def size_per_head_dim(self) -> mtf.Dimension:
    """A head.

    Raises:
      ConfigError: no size is configured, and the heads do not divide the model's.
    """
    size, heads = self.model_dim.size, self.num_heads_dim.size
    if not self.config.attention_head_size and size % heads:
      raise ConfigError(
        f"BertConfig: d_model (={size}) is no multiple of attention_num_heads (={heads}); change "
        "one of them, or set attention_head_size"
      )
    return mtf.Dimension("attention_head", self.config.attention_head_size or size // heads)

  @property
  def key_dim(self) -> mtf.Dimension:
    """`attention_key_head_size`; the model does not use it."""
    return mtf.Dimension("d_k", self._given("attention_key_head_size"))

  @property
  def key_heads_dims(self) -> mtf.Dimension:
    """`attention_num_key_heads`; the model does not use it."""
    return mtf.Dimension("key_heads", self._given("attention_num_key_heads"))

  @property
  def value_dim(self) -> mtf.Dimension:
    """`attention_value_head_size`; the model does not use it."""
    return mtf.Dimension("d_v", self._given("attention_value_head_size"))

  @property
  def value_heads_dims(self) -> mtf.Dimension:
    """`attention_num_value_heads`; the model does not use it."""
    return mtf.Dimension("value_heads", self._given("attention_num_value_heads"))

  @property
  def dense_initializer(self) -> Any:
    """Initializer of kernels: a truncated normal distribution, or variance scaling by fan-in."""
    if self.config.initializer_range:
      return initializers.TruncatedNormal(stddev=self.config.initializer_range)
    return mtf.layers.VarianceScalingInitializer(scale=0.4)

  @property
  def embedding_initializer(self) -> Any:
    """Initializer of embedding tables: that of a kernel from the model dimension to WordPieces."""
    initializer = self.dense_initializer
    if isinstance(initializer, mtf.layers.DenseInitializer):
      return initializer([self.model_dim], [self.vocab_dim])
    return initializer
