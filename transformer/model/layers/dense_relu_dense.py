"""The feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gin

import mesh_tensorflow as mtf
from mesh_tensorflow.arguments.declared import BELOW_ONE, COUNT, affects, takes
from mesh_tensorflow.transformer.model.context import Context, TransformerLayer
from mesh_tensorflow.transformer.model.deepnorm import XavierNormal
from mesh_tensorflow.transformer.model.dropout import dropout


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
@affects(training="dropout_rate initial_gain")
@takes(hidden_size=COUNT, dropout_rate=BELOW_ONE)
class DenseReluDense(TransformerLayer):
  """A dense layer to `d_ff`, an activation, and a dense layer back.

  Args:
    hidden_size: size of `d_ff`.
    dropout_rate: rate at which hidden values become 0 in training.
    activation: a name ("relu", "gelu", "linear", ...), a function, or a list of several: then the
      hidden layer is the product of as many dense layers, each with its activation (Shazeer,
      2020: "GLU variants improve Transformer", arXiv:2002.05202): ["swish", "linear"] is SwiGLU,
      ["gelu", "linear"] GEGLU, ["relu", "linear"] ReGLU.
    use_bias: whether the dense layers have biases.
    initial_gain: kernels start as Xavier's, times this: `@deepnorm_initial_gain()`, say. None: as
      `mtf.layers.dense` has it.
  """

  def __init__(
    self,
    hidden_size: int = 4096,
    dropout_rate: float = 0.0,
    activation: str
    | Callable[..., mtf.Tensor]
    | Sequence[str | Callable[..., mtf.Tensor]] = "relu",
    use_bias: bool = False,
    *,
    initial_gain: float | None = None,
  ):
    self.hidden_size = hidden_size
    self.dropout_rate = dropout_rate
    self.activation = activation
    self.use_bias = use_bias
    self.initial_gain = initial_gain

  def call(
    self, context: Context, x: mtf.Tensor, losses: list[mtf.Tensor] | None = None
  ) -> mtf.Tensor:
    """Applies the layer; see `TransformerLayer.call`."""
    del losses
    io_dim = x.shape.dims[-1]
    # Members of an ensemble are to the dense layers what experts are: each has its own kernel.
    options: dict[str, Any] = dict(
      use_bias=self.use_bias,
      variable_dtype=context.variable_dtype,
      expert_dims=context.model.ensemble_dims,
    )
    h = mtf.layers.dense_product(
      x,
      reduced_dims=[io_dim],
      new_dims=[mtf.Dimension("d_ff", self.hidden_size)],
      activation_functions=self.activation,
      name="wi",
      kernel_initializer=self._inner_initializer(),
      **options,
    )
    h = dropout(h, self.dropout_rate, context)
    return mtf.layers.dense(
      self._shifted(h),
      reduced_dims=h.shape.dims[-1:],
      new_dims=io_dim,
      kernel_initializer=self._outer_initializer(),
      name="wo",
      **options,
    )

  # ------------------------------------------------------- hooks of subclasses

  def _inner_initializer(self) -> Any:
    """Initializer of the kernels of `wi`; None: the default of `mtf.layers.dense`."""
    return None if self.initial_gain is None else XavierNormal(self.initial_gain)

  def _outer_initializer(self) -> Any:
    """Initializer of the kernel of `wo`; None: the default of `mtf.layers.dense`."""
    return None if self.initial_gain is None else XavierNormal(self.initial_gain)

  def _shifted(self, h: mtf.Tensor) -> mtf.Tensor:
    """Input of `wo`: the hidden values unchanged; for subclasses to override."""
    return h
