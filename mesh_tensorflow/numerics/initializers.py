"""Initial values of variables, computed slice by slice.

An `Initializer` computes any slice of a variable without the rest of it, and the
values do not depend on how the variable is split. TensorFlow's own initializers
(`tf.random_normal_initializer` ...) are turned into these; any other callable
`fn(shape, dtype)` works too, but computes the whole variable for each slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from mesh_tensorflow.arguments.checking import checked
from mesh_tensorflow.arguments.kinds import DTypeLike
from mesh_tensorflow.errors import VariableError
from mesh_tensorflow.numerics import kernels, random_bits
from mesh_tensorflow.program.dimensions import list_product

Sizes = Sequence[int]


class Initializer:
  """Computes slices of a variable's initial value."""

  def slice_values(
    self, key: int, full_shape: Sizes, begin: Sizes, slice_shape: Sizes, dtype: tf.DType
  ) -> tf.Tensor:
    """The values of a slice.

    Args:
      key: 32-bit number, a function of the store's seed and the variable's name.
      full_shape: sizes of the variable.
      begin: offset of the slice.
      slice_shape: sizes of the slice.
      dtype: dtype of the result.
    """
    raise NotImplementedError

  def __call__(self, shape: Sizes, dtype: DTypeLike = tf.float32, **kwargs: Any) -> tf.Tensor:
    """The whole variable's values, as TensorFlow's initializers are called."""
    del kwargs
    shape = [int(s) for s in shape]
    return self.slice_values(0, shape, [0] * len(shape), shape, tf.as_dtype(dtype))


# What `convert_to_initializer` takes.
InitializerLike: TypeAlias = Initializer | Callable[..., tf.Tensor] | npt.ArrayLike | None


class Constant(Initializer):
  """Fills with a scalar, or takes the values of an array of the variable's shape.

  Args:
    value: a number, or an array.
  """

  def __init__(self, value: Any = 0.0):
    self.value = value

  def slice_values(
    self, key: int, full_shape: Sizes, begin: Sizes, slice_shape: Sizes, dtype: tf.DType
  ) -> tf.Tensor:
    del key
    if np.ndim(self.value) == 0:
      return tf.fill(list(slice_shape), tf.cast(self.value, dtype))
    value = np.asarray(self.value).reshape(full_shape)
    part = value[tuple(slice(b, b + n) for b, n in zip(begin, slice_shape))]
    return tf.cast(tf.constant(part), dtype)


class Zeros(Constant):
  """Fills a variable with zeros."""

  def __init__(self) -> None:
    super().__init__(0.0)


class Ones(Constant):
  """Fills a variable with ones."""

  def __init__(self) -> None:
    super().__init__(1.0)


class _Random(Initializer):
  """Draws from a distribution of `random_bits`; statistics in float32, then cast."""

  _draw: Callable[..., tf.Tensor]

  def __init__(self, seed: float | None = None, **kwargs: Any):
    self._seed = seed
    self._kwargs = kwargs

  def arguments(self, full_shape: Sizes) -> dict[str, Any]:
    del full_shape
    return self._kwargs

  def slice_values(
    self, key: int, full_shape: Sizes, begin: Sizes, slice_shape: Sizes, dtype: tf.DType
  ) -> tf.Tensor:
    if self._seed is not None:
      key = random_bits.fold(key, int(self._seed))
    draw = type(self)._draw
    return draw(key, full_shape, begin, slice_shape, dtype=dtype, **self.arguments(full_shape))


class RandomNormal(_Random):
  """Normally distributed numbers.

  Args:
    mean: their mean.
    stddev: their standard deviation.
    seed: makes the numbers others than those of another seed; None: as the variable store's seed
      and the variable's name say.
  """

  _draw = staticmethod(random_bits.normal)

  @checked
  def __init__(self, mean: float = 0.0, stddev: float = 1.0, seed: float | None = None):
    super().__init__(seed, mean=mean, stddev=stddev)


class TruncatedNormal(_Random):
  """Normal numbers cut at two standard deviations, which is not compensated; see `RandomNormal`."""

  _draw = staticmethod(random_bits.truncated_normal)

  @checked
  def __init__(self, mean: float = 0.0, stddev: float = 1.0, seed: float | None = None):
    super().__init__(seed, mean=mean, stddev=stddev)


class RandomUniform(_Random):
  """Uniform numbers in [minval, maxval).

  Args:
    minval: the lower bound.
    maxval: the upper bound.
    seed: see `RandomNormal`.
  """

  _draw = staticmethod(random_bits.uniform)

  @checked
  def __init__(self, minval: float = -0.05, maxval: float = 0.05, seed: float | None = None):
    super().__init__(seed, minval=minval, maxval=maxval)


class GlorotUniform(_Random):
  """Uniform in +-sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio, 2010).

  Fans are those of TensorFlow: of rank 1 both are the size; of a higher rank the
  last two axes times the product of the axes before them.
  """

  _draw = staticmethod(random_bits.uniform)

  def arguments(self, full_shape: Sizes) -> dict[str, Any]:
    """The bounds for a variable of this shape."""
    if len(full_shape) < 1:
      fan_in = fan_out = 1
    elif len(full_shape) == 1:
      fan_in = fan_out = full_shape[0]
    else:
      receptive = list_product(full_shape[:-2])
      fan_in, fan_out = full_shape[-2] * receptive, full_shape[-1] * receptive
    limit = math.sqrt(6.0 / max(1.0, fan_in + fan_out))
    return {"minval": -limit, "maxval": limit}


class FromFunction(Initializer):
  """Cuts slices out of what `fn(shape, dtype)` returns; computes the whole each time."""

  @checked
  def __init__(self, fn: Callable[..., object]):
    self._fn = fn

  def slice_values(
    self, key: int, full_shape: Sizes, begin: Sizes, slice_shape: Sizes, dtype: tf.DType
  ) -> tf.Tensor:
    del key
    values = self._fn(list(full_shape), dtype)
    values = tf.cast(tf.convert_to_tensor(values), dtype)
    return kernels.cut(tf.reshape(values, full_shape), begin, slice_shape)


@checked
def default_initializer(dtype: tf.DType) -> Initializer:
  """Default initializer of variables: Glorot-uniform, or zeros for a dtype that is not floating.

  Args:
    dtype: dtype of the variable.
  """
  return GlorotUniform() if tf.as_dtype(dtype).is_floating else Zeros()


# TensorFlow's and Keras's, by the name of the class: each from its `get_config()`.
_BY_CLASS_NAME: dict[str, Callable[[dict[str, Any]], Initializer]] = {
  "Zeros": lambda c: Zeros(),
  "zeros_initializer": lambda c: Zeros(),
  "Ones": lambda c: Ones(),
  "ones_initializer": lambda c: Ones(),
  "Constant": lambda c: Constant(c["value"]),
  "constant_initializer": lambda c: Constant(c["value"]),
  "RandomNormal": lambda c: RandomNormal(c["mean"], c["stddev"], c["seed"]),
  "random_normal_initializer": lambda c: RandomNormal(c["mean"], c["stddev"], c["seed"]),
  "TruncatedNormal": lambda c: TruncatedNormal(c["mean"], c["stddev"], c["seed"]),
  "RandomUniform": lambda c: RandomUniform(c["minval"], c["maxval"], c["seed"]),
  "random_uniform_initializer": lambda c: RandomUniform(c["minval"], c["maxval"], c["seed"]),
  "GlorotUniform": lambda c: GlorotUniform(c.get("seed")),
}


# Besides tf.Tensors: constants.
_VALUES = (int, float, bool, list, tuple, np.ndarray, np.generic)


@checked
def convert_to_initializer(x: Any, dtype: tf.DType) -> Initializer:
  """An `Initializer` for: None, a number or array, one of TensorFlow's, or a callable.

  Args:
    x: any of these.
    dtype: dtype of the variable.

  Raises:
    VariableError: `x` is none of these.
  """
  if x is None:
    return default_initializer(dtype)
  if isinstance(x, Initializer):
    return x
  if isinstance(x, type):
    x = x()
    return convert_to_initializer(x, dtype)
  if callable(x):
    known = _BY_CLASS_NAME.get(type(x).__name__)
    if known is not None and type(x).__module__.split(".")[0] in ("tensorflow", "keras"):
      config = x.get_config()
      # Keras may have a generator of seeds there: then only the initializer itself can draw.
      if isinstance(config.get("seed", None), (int, type(None))):
        return known(config)
    return FromFunction(x)
  if isinstance(x, _VALUES) or tf.is_tensor(x):
    return Constant(x.numpy() if tf.is_tensor(x) else x)
  raise _no_initializer("an initial value", x)


def check_initializer(x: Any, what: str, size: int) -> None:
  """Checks what `convert_to_initializer` is to be given, when the variable is made.

  Args:
    x: the initializer.
    what: the variable, for messages.
    size: number of elements of the variable.

  Raises:
    VariableError: `x` is no initializer, or an array of another size.
  """
  if x is None or callable(x) or isinstance(x, Initializer):
    return
  if not (isinstance(x, _VALUES) or tf.is_tensor(x)):
    raise _no_initializer(what, x)
  shape = tuple(x.shape) if hasattr(x, "shape") else np.shape(x)
  if shape and math.prod(n or 0 for n in shape) != size:
    raise VariableError(
      f"{what}: the initial value has the shape {shape}, the variable {size} elements"
    )


def _no_initializer(what: str, x: object) -> VariableError:
  return VariableError(
    f"{what}: {x!r} is no initializer: give a callable fn(shape, dtype), a number, an array of the "
    "variable's shape, or None for the default"
  )
