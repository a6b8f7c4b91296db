"""Slots in 8 bits from a checkpoint that has them in float32, and the other way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tensorflow.checkpoint.reader import Values
from mesh_tensorflow.meshes.store import StoredVariable
from mesh_tensorflow.numerics import compact


@dataclasses.dataclass(frozen=True)
class Conversion:
  """A tensor that a checkpoint does not have, but that can be computed of some that it has.

  Attributes:
    spec: its shape and dtype.
    sources: the names of what it is computed of.
    value: computes it.
  """

  spec: tf.TensorSpec
  sources: tuple[str, ...]
  value: Callable[[Values], Any]


def conversions(
  found: Mapping[str, tf.TensorSpec], wanted: Mapping[str, tuple[str, StoredVariable]]
) -> dict[str, Conversion]:
  """By their names in a checkpoint, tensors that are wanted and can be computed of others.

  Args:
    found: the tensors of the checkpoint.
    wanted: by the name of each variable to restore its name in the checkpoint, and itself.
  """
  result: dict[str, Conversion] = {}
  for there, stored in wanted.values():
    if there in found:
      continue
    names = stored.shape.dimension_names
    base = compact.base_of_codes(there)
    if base is None:
      codes, scales = compact.name_of_codes(there), compact.names_of_scales(there, names)
      if all(n in found for n in (codes, *scales)):
        result[there] = _decoded(found[codes].shape, codes, scales)
    elif base in found and found[base].dtype.is_floating:
      shape = found[base].shape
      result[there] = _codes(shape, base, stored.slice_dtype)
      for axis, name in enumerate(compact.names_of_scales(base, names)):
        size = shape[axis : axis + 1] if 1 < len(names) == shape.ndims else []
        result[name] = _scale(size, base, axis)
  return result


def _decoded(shape: tf.TensorShape, codes: str, scales: list[str]) -> Conversion:
  return Conversion(
    tf.TensorSpec(shape, tf.float32),
    (codes, *scales),
    lambda values: compact.decode(tf.constant(values[codes]), [values[s] for s in scales]),
  )


def _codes(shape: tf.TensorShape, base: str, dtype: tf.DType) -> Conversion:
  def value(values: Values) -> tf.Tensor:
    x = tf.constant(values[base], tf.float32)
    # Rounded to the nearest: what was in 8 bits before is in the same again.
    middle = tf.constant(np.full(x.shape, 2**15, np.uint16))
    return compact.encode(x, compact.scales(x), middle, dtype)

  return Conversion(tf.TensorSpec(shape, dtype), (base,), value)


def _scale(size: Any, base: str, axis: int) -> Conversion:
  return Conversion(
    tf.TensorSpec(size, tf.float32),
    (base,),
    lambda values: compact.scales(tf.constant(values[base], tf.float32))[axis],
  )
