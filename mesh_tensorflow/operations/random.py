"""Random tensors, dropout, and sampling.

A random value is a function of the seed of the run, the name of the operation, and
the global index of the element: it does not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow.errors import (
  ArgumentError,
  DTypeError,
  GraphError,
  ShapeError,
  UnsupportedError,
)
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.slices import align
from mesh_tensorflow.numerics import bodies, kernels, random_bits
from mesh_tensorflow.operations.elementwise import cast
from mesh_tensorflow.operations.slicewise import cwise
from mesh_tensorflow.operations.top_k import argmax
from mesh_tensorflow.program import scope
from mesh_tensorflow.program.argument_kinds import CastableTensor, NumberTensor
from mesh_tensorflow.program.dimensions import DimensionLike, Shape, ShapeLike, convert_to_shape
from mesh_tensorflow.program.graph import Mesh, Operation, Tensor

__all__ = [
  "RandomOperation",
  "dropout",
  "random_normal",
  "random_uniform",
  "sample_with_temperature",
]


class RandomOperation(Operation):
  """A random tensor; see `random_uniform`.

  Args:
    mesh: a `Mesh`.
    shape: a `Shape`.
    tf_fn: `tf.random.uniform`, `tf.random.normal` or `tf.random.truncated_normal`.
    **kwargs: its keyword arguments; `name` also names the operation, `seed` (an
      integer) is one more thing that the values depend on.
  """

  lowers_uneven_slices = True

  # A recomputation sees the same numbers.
  is_cloneable = False
  # The lowering reads the seed of the run before the first of these.
  draws_random_numbers = True

  def __init__(self, mesh: Mesh, shape: Shape, tf_fn: Callable[..., tf.Tensor], **kwargs: Any):
    super().__init__([], mesh=mesh, name=kwargs.pop("name", None) or "random")
    if getattr(tf_fn, "__name__", None) not in random_bits.DISTRIBUTIONS:
      raise UnsupportedError(
        f"{self.name}: {tf_fn!r} cannot be drawn slice by slice; use tf.random.uniform, "
        "tf.random.normal or tf.random.truncated_normal"
      )
    dtype = tf.as_dtype(kwargs.get("dtype", tf.float32))
    if dtype.is_integer and kwargs.get("maxval") is None:
      raise DTypeError(f"{self.name}: random integers ({dtype.name}) need maxval")
    self._seed = kwargs.pop("seed", None)
    known = random_bits.arguments_of(tf_fn.__name__)
    for key in kwargs:
      if key not in known:
        raise ArgumentError(
          f"{self.name} of {shape}: tf.random.{tf_fn.__name__} takes {known}, not {key!r}"
        )
    self._tf_fn = tf_fn
    self._kwargs = kwargs
    self._outputs = [Tensor(self, shape, dtype)]
    self._initialize_all_dimensions_as_splittable()

  def _key(self, lowering: LoweringInProgress) -> Any:
    """The key of this operation in this run."""
    key = lowering.random_key(self)
    if self._seed is None:
      return key
    if isinstance(key, int):
      return random_bits.fold(key, self._seed)
    return lowering.mesh_impl(self).slicewise(
      lambda k: bodies.shared(random_bits.fold, k, self._seed), key
    )

  def lower(self, lowering: LoweringInProgress) -> None:
    out = self._outputs[0]
    lowering.set_tensor_lowering(
      out,
      lowering.mesh_impl(self).random(
        out.shape, self._tf_fn, self._kwargs, key=self._key(lowering)
      ),
    )


def random_uniform(mesh: Mesh, shape: ShapeLike, **kwargs: Any) -> Tensor:
  """Uniform random numbers, the same ones on every layout and mesh.

  Args:
    mesh: a `Mesh`.
    shape: a shape.
    **kwargs: `minval`, `maxval`, `dtype`, `name` as `tf.random.uniform`; `seed`, an integer
      that the values depend on besides the seed of the run and the name of the operation.

  Raises:
    DTypeError: an integer dtype without `maxval`.
  """
  return RandomOperation(mesh, convert_to_shape(shape), tf.random.uniform, **kwargs).outputs[0]


def random_normal(mesh: Mesh, shape: ShapeLike, **kwargs: Any) -> Tensor:
  """Normal random numbers, the same ones on every layout and mesh.

  Args:
    mesh: a `Mesh`.
    shape: a shape.
    **kwargs: `mean`, `stddev`, `dtype`, `name` as `tf.random.normal`; `seed` as in
      `random_uniform`.
  """
  return RandomOperation(mesh, convert_to_shape(shape), tf.random.normal, **kwargs).outputs[0]


class DropoutNoiseOperation(RandomOperation):
  """1 / keep_prob (1 for integers) with probability keep_prob, else 0."""

  def __init__(
    self, mesh: Mesh, shape: Shape, keep_prob: float, dtype: tf.DType, name: str | None = None
  ):
    super().__init__(mesh, shape, tf.random.uniform, name=name)
    self._keep_prob = keep_prob
    self._outputs = [Tensor(self, shape, dtype)]

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    out = self._outputs[0]
    full, part = out.shape.to_integer_list, impl.slice_shape(out.shape)
    # Random words are compared as they are: no floats between 0 and 1 are made of them. Half
    # a word is enough, unless it is about rare events.
    rare = min(self._keep_prob, 1.0 - self._keep_prob) < 0.01
    # A half word has steps of 1.5e-5: a rate of 0.01 is off by less than 0.1 %.
    words = random_bits.bits if rare or not full else random_bits.half_words
    dtype = tf.uint16 if words is random_bits.half_words else tf.uint32
    # Next to 1 the product is rounded to dtype.max + 1, which the dtype does not have.
    threshold = min(round(self._keep_prob * (dtype.max + 1)), dtype.max)

    def draw(key: int | tf.Tensor, *begin: int | tf.Tensor) -> tf.Tensor:
      how = (words, tuple(full), tuple(part), threshold, dtype, self._keep_prob, out.dtype)
      return bodies.shared(_noise, *how, key, *begin)

    laid_out = impl.slicewise(draw, self._key(lowering), *impl.laid_out_slice_begin(out.shape))
    lowering.set_tensor_lowering(out, laid_out)


def _noise(
  words: Callable[..., tf.Tensor],
  full: Sequence[int],
  part: Sequence[int],
  threshold: int,
  dtype: tf.DType,
  keep_prob: float,
  out_dtype: tf.DType,
  key: int | tf.Tensor,
  *begin: int | tf.Tensor,
) -> tf.Tensor:
  """A slice of dropout noise: where random words are below a threshold."""
  keep = tf.cast(words(key, full, begin, part) < tf.constant(threshold, dtype), out_dtype)
  return keep * (1.0 / keep_prob) if out_dtype.is_floating else keep


class DropoutOperation(Operation):
  """x times noise, through which no gradient flows to the noise."""

  lowers_uneven_slices = True

  def __init__(self, x: Tensor, noise: Tensor, name: str | None = None):
    super().__init__([x, noise], name=name or "dropout")
    self._outputs = [Tensor(self, x.shape, x.dtype)]

  def gradient(self, grad_ys: list[Tensor]) -> Sequence[Tensor | None]:
    return [DropoutOperation(grad_ys[0], self._inputs[1]).outputs[0], None]

  def lower(self, lowering: LoweringInProgress) -> None:
    x, noise = self._inputs
    laid_out = lowering.mesh_impl(self).slicewise(
      lambda t, n: kernels.elementwise(tf.multiply, t, align(n, noise.shape.dims, x.shape.dims)),
      lowering.tensors[x],
      lowering.tensors[noise],
    )
    lowering.set_tensor_lowering(self._outputs[0], laid_out)


def dropout(
  x: NumberTensor,
  is_training: object = None,
  keep_prob: float | None = None,
  rate: float | None = None,
  noise_shape: ShapeLike | None = None,
  name: str | None = None,
) -> Tensor:
  """Sets random elements to zero and divides the others by `keep_prob`.

  Srivastava et al., "Dropout", 2014. Integers are not divided.

  Args:
    x: a `Tensor`.
    is_training: True or False (or 1 or 0); x is returned if it is false. It has to be given.
    keep_prob: probability to keep an element; 1.0 returns x.
    rate: probability to drop an element; exactly one of the two must be given.
    noise_shape: some of x's dimensions: elements that differ in others only are
      kept or dropped together. All of them by default.
    name: of the variable scope around the operations.

  Raises:
    ArgumentError: is_training is not given, or is no truth value, as in a call for release 0.1.18,
      where `keep_prob` was the second argument.
    GraphError: not exactly one of keep_prob and rate is given, or it is not in (0, 1].
    ShapeError: the noise shape has a dimension that x has not.
  """
  if not isinstance(is_training, (bool, np.bool_)) and (
    not isinstance(is_training, (int, np.integer)) or is_training not in (0, 1)
  ):
    given = "is not given" if is_training is None else f"must be True or False, got {is_training!r}"
    raise ArgumentError(
      f"dropout of {x}: is_training {given}; write dropout(x, is_training, keep_prob=0.9) or "
      "dropout(x, is_training, rate=0.1), is_training True or False. Programs for release 0.1.18, "
      "which had no is_training, mean is_training=True"
    )
  if keep_prob is None and rate is not None:
    keep_prob = 1.0 - rate
  elif keep_prob is None or rate is not None:
    raise GraphError(
      f"dropout of {x}: give exactly one of keep_prob (={keep_prob}) and rate (={rate})"
    )
  if not is_training or keep_prob == 1.0:
    return x
  if not 0.0 < keep_prob < 1.0:
    raise GraphError(
      f"dropout of {x}: keep_prob must be above 0 and at most 1, got {keep_prob} (rate={rate})"
    )
  noise_shape = convert_to_shape(noise_shape)
  noise_shape = x.shape if noise_shape is None else noise_shape
  for d in noise_shape:
    if d not in x.shape:
      raise ShapeError(
        f"dropout: dimension {d.name}={d.size} of the noise shape {noise_shape} is not in {x}"
      )
  with scope.variable_scope(name, default_name="dropout", graph=x.graph):
    noise = DropoutNoiseOperation(x.mesh, noise_shape, float(keep_prob), x.dtype, name="random")
    return DropoutOperation(x, noise.outputs[0]).outputs[0]


def sample_with_temperature(
  logits: CastableTensor, dim: DimensionLike, temperature: float = 1.0, name: str | None = None
) -> Tensor:
  """Samples positions along a dimension; the Gumbel-max method (Gumbel, 1954).

  argmax(logits + temperature * g) with g = -log(-log(u)), u uniform: for temperature 1 a
  position has the probability softmax(logits).

  Args:
    logits: a `Tensor`.
    dim: a dimension of it, which the result does not have.
    temperature: 0.0 takes the largest logit.
    name: of the operations.

  Returns:
    An int32 `Tensor`.
  """
  if temperature == 0.0:
    return argmax(logits, dim, name=name)
  # In bfloat16 noisy logits would often tie, and argmax takes the first of equal ones.
  logits = cast(logits, tf.float32)
  # Not from 0, whose noise -log(-log(0)) is not finite; 1 itself is never drawn.
  u = random_uniform(logits.mesh, logits.shape, minval=1e-9, maxval=1.0, dtype=tf.float32)
  noisy = cwise(
    lambda x, v: x - temperature * tf.math.log(-tf.math.log(v)),
    [logits, u],
    name="gumbel",
  )
  return argmax(noisy, dim, name=name)
