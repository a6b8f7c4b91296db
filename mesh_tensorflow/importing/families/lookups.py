"""Look-ups in tables that do not change: a few sorted constants on each device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from mesh_tensorflow.errors import UnsupportedError
from mesh_tensorflow.importing.nodes import Node
from mesh_tensorflow.importing.rules import Labels, Slicewise, rule


@dataclasses.dataclass(frozen=True)
class _Table:
  """Contents of a table, sorted by key; by the hash of the key for strings."""

  sorted_by: npt.NDArray[np.generic]
  keys: npt.NDArray[np.generic]
  values: npt.NDArray[np.generic]


def _hashed(keys: tf.Tensor) -> tf.Tensor:
  """Integer hashes of string keys; integer keys themselves."""
  return tf.strings.to_hash_bucket_fast(keys, 2**63 - 1) if keys.dtype == tf.string else keys


def _contents(node: Node) -> _Table:
  """Reads the keys and values of the table that a node looks up in.

  Raises:
    UnsupportedError: the table may change, or is made in the function, or its keys are neither
      integers nor strings.
  """
  handle, keys, values = node.inputs[0].resource, node.inputs[1].dtype, node.outputs[0].dtype
  outside = "; look up outside of the function, and pass what is found as an argument"
  if handle is None:
    raise UnsupportedError(
      f"from_tensorflow: {node}: the table must be there before the function is traced{outside}"
    )
  if not (keys.is_integer or keys == tf.string):
    raise UnsupportedError(f"from_tensorflow: {node}: keys must be integers or strings{outside}")
  with tf.init_scope():
    try:
      none: Any = [tf.zeros([0], keys), tf.zeros([0], values)]
      tf.raw_ops.LookupTableInsertV2(table_handle=handle, keys=none[0], values=none[1])
    except tf.errors.UnimplementedError:
      pass  # So it stays as it is.
    else:
      raise UnsupportedError(
        f"from_tensorflow: {node}: the table may be written to: it is a state outside of the "
        f"function; make it a tf.lookup.StaticHashTable, or{outside[1:]}"
      )
    try:
      found = tf.raw_ops.LookupTableExportV2(table_handle=handle, Tkeys=keys, Tvalues=values)
    except tf.errors.OpError as e:
      raise UnsupportedError(
        f"from_tensorflow: {node}: the table must be initialized before the function is traced"
        f"{outside}"
      ) from e
    hashes = _hashed(found.keys).numpy()
    order = np.argsort(hashes)
    table = _Table(hashes[order], found.keys.numpy()[order], found.values.numpy()[order])
  if len(np.unique(hashes)) < len(hashes):
    raise UnsupportedError(f"from_tensorflow: {node}: two strings have the same hash{outside}")
  return table


@rule("LookupTableFind", "LookupTableFindV2")
class LookUp(Slicewise):
  """Values of keys, or the default."""

  def labels(self, node: Node) -> Labels:
    _, keys, default = node.inputs
    if default.rank or keys.shape != node.outputs[0].shape:
      raise UnsupportedError(f"from_tensorflow: {node}: values of a table must be scalars")
    _contents(node)
    axes = range(keys.rank)
    return Labels([None, axes, []], [axes])

  def run(self, node: Node) -> Callable[..., Any]:
    table = _contents(node)

    def find(keys: tf.Tensor, default: tf.Tensor) -> tf.Tensor:
      hashes = tf.reshape(_hashed(keys), [-1])
      places = tf.searchsorted(tf.constant(table.sorted_by, hashes.dtype), hashes)
      places = tf.reshape(tf.minimum(places, table.keys.size - 1), keys.shape)
      is_there = tf.gather(tf.constant(table.keys, keys.dtype), places) == keys
      values = tf.gather(tf.constant(table.values, node.outputs[0].dtype), places)
      return tf.where(is_there, values, default)

    return find
