"""KV caches that the beams of a sequence share, so that none is copied when beams are reordered.

The keys and values of a position stay where the beam that computed them wrote them: a cache
`[..., memory_length, memory_beam, d_kv]` has no dimension of beams that `mtf.beam_search` would
reorder. Each beam attends to the entries of all, under a mask of those of its ancestors. Of these
there is a table, which beam wrote what each sees of a position; it is reordered as other states.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.decoding.beam_search_state import memory_beam
from mesh_tensorflow.transformer.model.decoding_states import write_at

# Each beam computes logits of the entries of all: with more beams that takes longer than the copy.
MOST_BEAMS = 8


def entries(length: mtf.Dimension, beam: mtf.Dimension) -> mtf.Dimension:
  """The dimension `memory_length` of all entries: those of a position lie side by side."""
  return mtf.Dimension("memory_length", length.size * beam.size)


def empty(x: mtf.Tensor, beam: mtf.Dimension) -> mtf.Tensor:
  """A cache of zeros.

  Args:
    x: keys or values `[<batch_dims>, memory_length, ...]`; the last of its batch dims is `beam`.
    beam: the dimension of beams.
  """
  dims: list[mtf.Dimension] = []
  for d in x.shape - beam:
    dims += [d, memory_beam(beam)] if d.name == "memory_length" else [d]
  return mtf.zeros(x.mesh, mtf.Shape(dims), x.dtype)


def written(
  old: mtf.Tensor, new: mtf.Tensor, position: mtf.Tensor, beam: mtf.Dimension
) -> mtf.Tensor:
  """The cache with the keys or values of all beams at a position.

  Args:
    old: the cache.
    new: `[<batch_dims>, ...]`.
    position: int32 scalar.
    beam: the dimension of beams.
  """
  new = mtf.rename_dimension(new, beam.name, memory_beam(beam).name)
  return write_at(old, new, position, old.shape.get_dim_by_name("memory_length"))


def joined(cache: mtf.Tensor, beam: mtf.Dimension) -> mtf.Tensor:
  """The cache with its entries along one dimension, see `entries`."""
  length = cache.shape.get_dim_by_name("memory_length")
  return mtf.replace_dimensions(cache, [length, memory_beam(beam)], entries(length, beam))


def no_ancestors(
  mesh: mtf.Mesh, batch_dims: Sequence[mtf.Dimension], length: mtf.Dimension
) -> mtf.Tensor:
  """The table of ancestors at the beginning: int32 `[<batch_dims>, memory_length]`, all -1.

  Args:
    mesh: an `mtf.Mesh`.
    batch_dims: the last of them is the dimension of beams.
    length: the dimension of positions.
  """
  shape = mtf.Shape([*batch_dims, mtf.Dimension("memory_length", length.size)])
  return mtf.constant(mesh, -1, shape, tf.int32)


def with_own(ancestors: mtf.Tensor, position: mtf.Tensor) -> mtf.Tensor:
  """The table in which each beam has written the entry at a position itself.

  Args:
    ancestors: int32 `[<batch_dims>, memory_length]`, the beam that has written what each sees.
    position: int32 scalar.
  """
  *_, beam, length = ancestors.shape.dims
  here = mtf.equal(mtf.range(ancestors.mesh, length, tf.int32), position)
  own = mtf.range(ancestors.mesh, beam, tf.int32)
  return mtf.where(here, own, ancestors, output_shape=ancestors.shape)


def seen(ancestors: mtf.Tensor) -> mtf.Tensor:
  """The entries that each beam sees: bool `[<batch_dims>, <entries>]`."""
  *_, beam, length = ancestors.shape.dims
  writer = mtf.range(ancestors.mesh, memory_beam(beam), tf.int32)
  mask = mtf.equal(ancestors, writer, output_shape=ancestors.shape + writer.shape)
  return joined(mask, beam)


def positions(mesh: mtf.Mesh, length: mtf.Dimension, beam: mtf.Dimension) -> mtf.Tensor:
  """The position of each entry: int32 `[<entries>]`."""
  return mtf.floordiv(mtf.range(mesh, entries(length, beam), tf.int32), beam.size)
