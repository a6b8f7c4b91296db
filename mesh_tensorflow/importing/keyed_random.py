"""Random numbers as a function of a seed that is a tensor.

TensorFlow's stateless random operations draw from a generator whose numbers stand in one row: a
slice of a tensor could be had only by drawing all of it. Here each number is a function of the seed
and of its place in the whole tensor (`numerics/random_bits.py`), as everywhere in this package: the
same seed gives the same numbers on each layout, with the distribution of the original.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mesh_tensorflow.errors import DTypeError
from mesh_tensorflow.meshes.for_operations import LoweringInProgress
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.numerics import random_bits
from mesh_tensorflow.program.dimensions import Shape
from mesh_tensorflow.program.graph import Operation, Tensor


def key_of(*seeds: tf.Tensor) -> tf.Tensor:
  """A uint32 key of the words of integer tensors."""
  key: Any = 0
  for seed in seeds:
    words = seed if seed.dtype.size == 4 else tf.cast(seed, tf.int64)
    for word in tf.unstack(tf.reshape(tf.bitcast(words, tf.uint32), [-1])):
      key = random_bits.fold(key, word)
  return tf.convert_to_tensor(key, tf.uint32)


class KeyedRandomOperation(Operation):
  """A random tensor whose numbers depend on seeds that are tensors.

  Args:
    seeds: integer `Tensor`s, no dimension of which may be split.
    shape: a `Shape`.
    distribution: "uniform", "normal", "truncated_normal"; "bits" for integers of all values.
    dtype: of the result.
    bounds: for integers two scalar `Tensor`s, or numbers: the least, and the first above.
    name: of the operation.
  """

  def __init__(
    self,
    seeds: Sequence[Tensor],
    shape: Shape,
    distribution: str,
    dtype: tf.DType,
    bounds: Sequence[Any] = (),
    name: str | None = None,
  ):
    tensors = [b for b in bounds if isinstance(b, Tensor)]
    super().__init__([*seeds, *tensors], name=name or "keyed_random")
    for seed in seeds:
      if not seed.dtype.is_integer:
        raise DTypeError(f"{self.name}: a seed must be integers, got {seed}")
    self._n, self._distribution, self._bounds = len(seeds), distribution, list(bounds)
    self._outputs = [Tensor(self, shape, dtype)]
    whole = [d.name for seed in seeds for d in seed.shape]
    self._splittable_dims, self._unsplittable_dims = (
      self._initialize_splittable_and_unsplittable_dims("splittable", whole)
    )

  @property
  def has_gradient(self) -> bool:
    return False

  def verify_layout(self, mesh_impl: MeshImpl) -> None:
    for seed in self._inputs[: self._n]:
      for d in seed.shape:
        self._require_unsplit(mesh_impl, d, "each number depends on the whole seed")
    super().verify_layout(mesh_impl)

  def lower(self, lowering: LoweringInProgress) -> None:
    impl = lowering.mesh_impl(self)
    out = self._outputs[0]
    full, part = out.shape.to_integer_list, impl.slice_shape(out.shape)
    begins = impl.laid_out_slice_begin(out.shape)

    def draw(*args: Any) -> tf.Tensor:
      begin, slices = args[: len(begins)], args[len(begins) :]
      key, given = key_of(*slices[: self._n]), iter(slices[self._n :])
      if self._distribution == "bits":
        return _all_values(key, full, begin, part, out.dtype)
      kwargs: dict[str, Any] = {"dtype": out.dtype}
      if self._bounds:
        low, high = (next(given) if isinstance(b, Tensor) else b for b in self._bounds)
        kwargs.update(minval=low, maxval=high)
      return random_bits.DISTRIBUTIONS[self._distribution](key, full, begin, part, **kwargs)

    laid_out = impl.slicewise(draw, *begins, *[lowering.tensors[x] for x in self._inputs])
    lowering.set_tensor_lowering(out, laid_out)


def _all_values(
  key: tf.Tensor,
  full: Sequence[int],
  begin: Sequence[int | tf.Tensor],
  part: Sequence[int],
  dtype: tf.DType,
) -> tf.Tensor:
  """Integers, each value of the dtype as likely as the others."""
  words = random_bits.bits(key, full, begin, part)
  if dtype.size <= 4:
    return tf.bitcast(words, dtype) if dtype.size == 4 else tf.cast(words, dtype)
  more = random_bits.bits(random_bits.fold(key, 1), full, begin, part)
  return tf.bitcast(tf.stack([words, more], -1), dtype)
