"""Packing: several short sequences share one row of fixed length.

Greedy, without look-ahead: an example goes to the open row if all of its features fit there, and
otherwise closes that row and opens the next.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf


def pack_group(
  examples: Mapping[str, tf.Tensor], lengths: Mapping[str, int]
) -> dict[str, tf.Tensor]:
  """Packs a group of examples in order, as graph operations.

  Only the step from one row to the next is sequential; the tokens are moved by one scatter for
  each feature.

  Args:
    examples: for each key int32 [n, any], zero-padded. An example's sequence is its first k
      elements, where k, which must not exceed the length, counts its non-zero elements.
    lengths: the row length of each key.

  Returns:
    For each key int32 [rows, length] tensors `key`, `key_segmentation` and `key_position`.
  """
  keys = list(lengths)
  sizes = tf.stack(
    [tf.math.count_nonzero(examples[k], axis=1, dtype=tf.int32) for k in keys], axis=1
  )  # [n, keys]
  rows, starts = _choose_rows(sizes, tf.constant([lengths[k] for k in keys], tf.int32))
  num_rows = rows[-1] + 1
  packed = {}
  for i, key in enumerate(keys):
    tokens = examples[key]
    column = tf.range(tf.shape(tokens)[1])
    index = tf.where(column < sizes[:, i, tf.newaxis])  # [tokens, 2]: example, column
    example, column = index[:, 0], tf.cast(index[:, 1], tf.int32)
    target = tf.stack(
      [tf.gather(rows, example), tf.gather(starts[:, i], example) + column], axis=1
    )
    both = tf.stack([tf.gather_nd(tokens, index), column], axis=1)
    both = tf.scatter_nd(target, both, tf.stack([num_rows, lengths[key], 2]))
    both = tf.ensure_shape(both, [None, lengths[key], 2])
    packed[key], packed[key + "_position"] = both[..., 0], both[..., 1]
    packed[key + "_segmentation"] = segmentation(packed[key], packed[key + "_position"])
  return packed


def segmentation(tokens: tf.Tensor, position: tf.Tensor) -> tf.Tensor:
  """Numbers the sequences of each row from 1; 0 where the token is 0.

  Args:
    tokens: int32 [rows, length].
    position: int32 [rows, length], which starts at 0 in each sequence.
  """
  starts = tf.cast(tf.equal(position, 0), tf.int32)
  return tf.cumsum(starts, axis=1) * tf.cast(tf.not_equal(tokens, 0), tf.int32)


def _choose_rows(sizes: tf.Tensor, lengths: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """The row (int32 [n]) and the offsets in it (int32 [n, keys]) of examples of given sizes."""
  n = tf.shape(sizes)[0]
  total = tf.pad(tf.cumsum(sizes), [[1, 0], [0, 0]])  # [n + 1, keys]: tokens before an example
  # If a row began with example i, the first example that does not fit would be end[i].
  limit = tf.transpose(total[:-1] + lengths)
  end = tf.searchsorted(tf.transpose(total), limit, side="right") - 1
  end = tf.reduce_min(end, axis=0)
  _, num_rows, first = tf.while_loop(
    lambda i, *_: i < n,
    lambda i, row, first: (tf.gather(end, i), row + 1, first.write(row, i)),
    (0, 0, tf.TensorArray(tf.int32, n, element_shape=[])),
    parallel_iterations=1,
  )
  first = first.stack()[:num_rows]
  rows = tf.searchsorted(first, tf.range(n), side="right") - 1
  return rows, total[:-1] - tf.gather(total, tf.gather(first, rows))


def choose_row_ends(sizes: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
  """Packs sequences of one feature that lie one after another in memory.

  Rows are those of `pack_dataset`, which begins a new row after each `length` sequences.

  Args:
    sizes: the number of tokens of each sequence, at most `length`.
    length: tokens in a row.

  Returns:
    int64 [rows]: how many sequences lie in this row and the ones before.
  """
  # bisect on a list: for single numbers several times faster than np.searchsorted.
  total = [0, *np.cumsum(np.asarray(sizes, np.int64)).tolist()]
  ends = []
  first = 0
  while first < len(sizes):
    # The last sequence whose end is within the row.
    end = bisect.bisect_right(total, total[first] + length, first) - 1
    first = min(end, (first // length + 1) * length)
    ends.append(first)
  return np.array(ends, np.int64)
