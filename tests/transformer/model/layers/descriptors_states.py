"""What decoding does to the states of layers: one position is written."""

from __future__ import annotations

import numpy as np

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer.model import decoding_states
from tests.conformance.framework import T, op

MEMORY = mtf.Dimension("memory_length", 4)
KEYS, NEW = "batch:4 memory_length:4 heads:2 d_kv:2", "batch:4 heads:2 d_kv:2"
MATRICES = "batch:4 heads:2 memory_length:4 d_kv:2"


def _write(axis, position_axes):
  """Writes in NumPy: `old[..., position, ...] = new` in each row that has a position."""

  def write(old, new, position):
    result = np.moveaxis(old, axis, -1).copy()
    at = np.reshape(position, [*np.shape(position), *([1] * (new.ndim - np.ndim(position)))])
    at = np.broadcast_to(np.moveaxis(at, range(np.ndim(position)), position_axes), new.shape)
    for i in np.ndindex(new.shape):
      if 0 <= at[i] < result.shape[-1]:
        result[i][at[i]] = new[i]
    return np.moveaxis(result, -1, axis)

  return write


def _op(name, state, position, position_axes, new=NEW):
  axis = state.split().index("memory_length:4")
  return op(
    name,
    lambda old, new, at: decoding_states.write_at(old, new, at, MEMORY),
    _write(axis, position_axes),
    state,
    new,
    position,
    differentiable=False,
  )


DESCRIPTORS = [
  _op("write_at", KEYS, T("", values=2, dtype="int32"), ()),
  _op("write_at_the_first", MATRICES, T("", values=0, dtype="int32"), ()),
  _op("write_at_the_end_is_nowhere", MATRICES, T("", values=4, dtype="int32"), ()),
  _op("write_at_positions_of_rows", KEYS, T("batch:4", -2, 6, "int32"), (0,)),
  _op("write_at_positions_of_later_rows", KEYS, T("heads:2", -1, 5, "int32"), (1,)),
  _op("write_at_with_positions_of_all", MATRICES, T("batch:4 heads:2", -1, 5, "int32"), (0, 1)),
]
