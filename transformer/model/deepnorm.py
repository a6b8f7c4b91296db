"""DeepNorm's two numbers (Wang et al., 2022; arXiv:2203.00555): of the residual, and of weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import gin

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.arguments.declared import COUNT, affects, takes
from mesh_tensorflow.layers import DenseInitializer, unit_scaling_convention

_MODULE = "mesh_tensorflow.transformer.transformer"


@gin.configurable(module=_MODULE)
@takes(num_layers=COUNT)
def deepnorm_input_scale(
  num_layers: int = gin.REQUIRED, stack: str = "alone", num_decoder_layers: int | None = None
) -> float:
  """DeepNorm's alpha: `input_scale` of `sublayer_scaled_residual`, in post-norm.

  With N layers of an encoder and M of a decoder (a layer is attention and feed-forward; figure 2):
  (2 N) ** (1 / 4) of a stack alone, 0.81 (N ** 4 M) ** (1 / 16) of an encoder that has a decoder,
  (3 M) ** (1 / 4) of a decoder that has an encoder.

  Args:
    num_layers: of the stack: `make_layer_stack.num_layers`, if a block is a layer.
    stack: "alone", "encoder" or "decoder"; in gin files of an encoder-decoder under its scope.
    num_decoder_layers: M, of an encoder.

  Raises:
    ConfigError: stack is not known, or a number of layers is missing or not positive.
  """
  n, m = _numbers(num_layers, stack, num_decoder_layers)
  scales: dict[str, float] = {
    "alone": (2 * n) ** 0.25,
    "decoder": (3 * n) ** 0.25,
    "encoder": 0.81 * (n**4 * m) ** (1 / 16),
  }
  return scales[stack]


@gin.configurable(module=_MODULE)
@affects("training")
@takes(num_layers=COUNT)
def deepnorm_initial_gain(
  num_layers: int = gin.REQUIRED, stack: str = "alone", num_decoder_layers: int | None = None
) -> float:
  """DeepNorm's beta: `initial_gain` of `SelfAttention` and `DenseReluDense`.

  (8 N) ** (-1 / 4) of a stack alone, 0.87 (N ** 4 M) ** (-1 / 16) of an encoder that has a decoder,
  (12 M) ** (-1 / 4) of a decoder that has an encoder. For the rest see `deepnorm_input_scale`.

  Args:
    num_layers: number of layers of the stack: `make_layer_stack.num_layers`, if a block is a layer.
    stack: "alone", "encoder" or "decoder".
    num_decoder_layers: number of layers of the decoder (M), for "encoder".
  """
  n, m = _numbers(num_layers, stack, num_decoder_layers)
  gains: dict[str, float] = {
    "alone": (8 * n) ** -0.25,
    "decoder": (12 * n) ** -0.25,
    "encoder": 0.87 * (n**4 * m) ** (-1 / 16),
  }
  return gains[stack]


def _numbers(num_layers: int, stack: str, num_decoder_layers: int | None) -> tuple[int, int]:
  """(layers of the stack, layers of the decoder of an encoder)."""
  if stack not in ("alone", "encoder", "decoder"):
    raise errors.ConfigError(
      f'deepnorm: stack must be "alone", "encoder" or "decoder", got {stack!r}'
    )
  m = num_decoder_layers if stack == "encoder" else 1
  if m is None or num_layers < 1 or m < 1:
    raise errors.ConfigError(
      f"deepnorm: num_layers (={num_layers}) must be positive, and for an encoder also "
      f"num_decoder_layers (={num_decoder_layers})"
    )
  return num_layers, m


class XavierNormal(DenseInitializer):
  """Normal numbers of variance gain ** 2 * 2 / (fan in + fan out) (Glorot and Bengio, 2010).

  Args:
    gain: see above.

  Raises:
    UnsupportedError: under the unit-scaling convention, where all weights start with variance 1.
  """

  def __init__(self, gain: float):
    if unit_scaling_convention():
      raise errors.UnsupportedError(
        f"initial_gain (={gain}): under the unit-scaling convention weights start with variance 1; "
        "set unit_scaling_convention.value = False, or initial_gain = None"
      )
    self.gain = gain

  def stddev(self, fan_in: int, fan_out: int) -> float:
    """The standard deviation of a matrix with these sides."""
    return self.gain * math.sqrt(2.0 / max(1, fan_in + fan_out))

  def __call__(
    self, reduced_dims: Sequence[mtf.Dimension], new_dims: Sequence[mtf.Dimension]
  ) -> mtf.initializers.Initializer:
    """See `DenseInitializer`."""
    fan_in, fan_out = mtf.Shape(list(reduced_dims)).size, mtf.Shape(list(new_dims)).size
    return mtf.initializers.RandomNormal(stddev=self.stddev(fan_in, fan_out))
