"""TensorFlow code on one slice: alignment by dimension name. No mesh here."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from mesh_tensorflow.errors import ShapeError
from mesh_tensorflow.numerics import constants
from mesh_tensorflow.program.dimensions import Dimension


def transpose_to(x: tf.Tensor, old: Sequence[Dimension], new: Sequence[Dimension]) -> tf.Tensor:
  """Transposes a slice from the order `old` of dimensions to the order `new`."""
  old, new = list(old), list(new)
  if old == new:
    return x
  return tf.transpose(x, constants.sizes([old.index(d) for d in new]))


def align(x: tf.Tensor, old: Sequence[Dimension], new: Sequence[Dimension]) -> tf.Tensor:
  """Transposes and reshapes a slice so that it broadcasts to the dimensions `new`.

  Missing dimensions become axes of size 1; those on the left are left out, since
  TensorFlow adds them itself.

  Raises:
    ShapeError: a dimension of `old` is not in `new`.
  """
  old, new = list(old), list(new)
  if old == new:
    return x
  for d in old:
    if d not in new:
      raise ShapeError(f"dimension {d.name}={d.size} is not among the output's {new}")
  kept = [d for d in new if d in old]
  x = transpose_to(x, old, kept)
  first = next((i for i, d in enumerate(new) if d in old), len(new))
  if new[first:] == kept:
    return x
  sizes = iter(x.shape.as_list())
  return tf.reshape(x, constants.sizes([next(sizes) if d in old else 1 for d in new[first:]]))
