"""Batches as Keras' loops hand them over, as tensors with static shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from mesh_tensorflow.errors import UnsupportedError
from mesh_tensorflow.keras.steps import ARGUMENTS


@dataclasses.dataclass(frozen=True)
class Batch:
  """The arguments of a step.

  Attributes:
    names: which of `ARGUMENTS` there are.
    values: for each a structure of tensors.
  """

  names: tuple[str, ...]
  values: tuple[Any, ...]

  @property
  def leaves(self) -> list[tf.Tensor]:
    """All tensors."""
    return [t for t in tf.nest.flatten(self.values) if t is not None]

  @property
  def signature(self) -> tuple[Any, ...]:
    """The values with a `tf.TensorSpec` in place of each tensor."""
    specs: tuple[Any, ...] = tf.nest.map_structure(
      lambda t: None if t is None else tf.TensorSpec(t.shape, t.dtype), self.values
    )
    return specs

  @property
  def key(self) -> tuple[Any, ...]:
    """Cache key of the batch's program: names, structure, shapes and dtypes."""
    kinds = tuple((tuple(t.shape.as_list()), t.dtype) for t in self.leaves)
    structure = tf.nest.map_structure(lambda t: t is not None, self.values)
    return self.names, repr(structure), kinds


def batch_of(data: Any, inputs_only: bool = False) -> Batch:
  """The arguments of a step.

  Args:
    data: x, or a tuple (x,), (x, y) or (x, y, sample_weight); each a structure of tensors, arrays
      or numbers.
    inputs_only: whether only x counts.

  Raises:
    UnsupportedError: a tensor is ragged or sparse, or of texts.
  """
  data = keras.tree.map_structure(_absent, data)
  parts = keras.utils.unpack_x_y_sample_weight(data)
  given = [(n, v) for n, v in zip(ARGUMENTS, parts) if not _is_nothing(v)]
  if inputs_only:
    given = [(n, v) for n, v in given if n == ARGUMENTS[0]]
  values = tuple(tf.nest.map_structure(_tensor, v) for _, v in given)
  return Batch(tuple(n for n, _ in given), values)


def batches(iterator: Iterable[Any], count: int) -> Iterator[Any]:
  """Iterates over at most `count` of the next batches.

  Args:
    iterator: the iterator of a data set, or a generator.
    count: maximum number of batches.

  Raises:
    StopIteration: there is no batch left.
  """
  source = iter(iterator)
  first = next(source)

  def rest() -> Iterator[Any]:
    yield first
    # The count comes first: nothing is taken that is not used.
    for _, data in zip(range(count - 1), source):
      yield data

  return rest()


def _absent(x: Any) -> Any:
  return None if isinstance(x, tf.experimental.Optional) else x


def _is_nothing(value: Any) -> bool:
  return all(x is None for x in tf.nest.flatten(value))


def _tensor(x: Any) -> tf.Tensor | None:
  if x is None:
    return None
  if isinstance(x, (tf.RaggedTensor, tf.SparseTensor)):
    raise UnsupportedError(
      f"mtf.keras: a batch has a {type(x).__name__}; on a mesh all shapes are static: pad it, "
      "or make it dense"
    )
  t = x if isinstance(x, tf.Tensor) else tf.convert_to_tensor(x)
  if t.dtype == tf.string:
    raise UnsupportedError(
      f"mtf.keras: a batch has texts (shape {t.shape}), which meshes do not compute with; encode "
      "them in the data set"
    )
  return t
