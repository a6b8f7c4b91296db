"""Joins inputs and targets into one sequence, for language models of "inputs EOS targets EOS"."""

from __future__ import annotations

import tensorflow as tf

import mesh_tensorflow as mtf


def dynamic_text2self(features: dict[str, mtf.Tensor]) -> dict[str, mtf.Tensor]:
  """Puts the targets of each packed example behind its inputs.

  Args:
    features: int32 tensors [<batch dims>, length]: `inputs` and `targets`, and, if examples are
      packed, `inputs_segmentation`, `inputs_position`, `targets_segmentation`,
      `targets_position`. The lengths of inputs and targets may differ. Examples are numbered
      from 1, below the length of the targets.

  Returns:
    `targets` of length (inputs + targets); for packed examples also `targets_segmentation` and
    `targets_position`.
  """
  packed = "inputs_segmentation" in features
  inputs, targets = features["inputs"], features["targets"]
  in_length, out_length = inputs.shape.dims[-1], targets.shape.dims[-1]
  new_length = mtf.Dimension("new_length", in_length.size + out_length.size)
  # Numbers of examples run from 1, beside 0 for padding; a row may have as many as it has places.
  segments = mtf.Dimension("segment", out_length.size + 1)
  in_segment, in_position = _place(features, "inputs", packed)
  out_segment, out_position = _place(features, "targets", packed)

  in_count = _count(in_segment, segments)
  out_count = _count(out_segment, segments)
  start = mtf.cumsum(in_count + out_count, segments, exclusive=True)
  in_to = _destination(start, in_segment, in_position, segments, new_length)
  # Targets begin where the inputs of the same example end.
  out_start = mtf.gather(in_count, out_segment, segments) + out_position
  out_to = _destination(start, out_segment, out_start, segments, new_length)

  def joined(x: mtf.Tensor, y: mtf.Tensor) -> mtf.Tensor:
    both = _moved(x, in_to, new_length) + _moved(y, out_to, new_length)
    return mtf.rename_dimension(mtf.to_int32(both), new_length.name, in_length.name)

  result = {"targets": joined(inputs, targets)}
  if packed:
    result["targets_segmentation"] = joined(in_segment, out_segment)
    result["targets_position"] = joined(in_position, out_start)
  return result


def _place(
  features: dict[str, mtf.Tensor], name: str, packed: bool
) -> tuple[mtf.Tensor, mtf.Tensor]:
  """Number of the example (0: padding) and position within it, of each id."""
  if packed:
    return features[f"{name}_segmentation"], features[f"{name}_position"]
  ids = features[name]
  segment = mtf.to_int32(mtf.not_equal(ids, 0))
  return segment, mtf.range(ids.mesh, ids.shape.dims[-1], tf.int32) * segment


def _count(segment: mtf.Tensor, segments: mtf.Dimension) -> mtf.Tensor:
  """Number of ids of each example, int32 [<batch dims>, segment]; 0 for padding."""
  one_hot = mtf.one_hot(segment, segments, dtype=tf.float32)
  count = mtf.reduce_sum(one_hot, reduced_dim=segment.shape.dims[-1])
  # Padding is segment 0, and takes no room.
  is_example = mtf.greater(mtf.range(segment.mesh, segments, tf.int32), 0)
  return mtf.to_int32(count) * mtf.to_int32(is_example)


def _destination(
  start: mtf.Tensor,
  segment: mtf.Tensor,
  position: mtf.Tensor,
  segments: mtf.Dimension,
  new_length: mtf.Dimension,
) -> mtf.Tensor:
  """Target position of each id in the new row; `new_length` (out of range) for padding."""
  to = mtf.gather(start, segment, segments) + position
  return mtf.where(mtf.equal(segment, 0), mtf.ones_like(to) * new_length.size, to)


def _moved(x: mtf.Tensor, to: mtf.Tensor, new_length: mtf.Dimension) -> mtf.Tensor:
  """Moves the elements along x's last dimension to new positions; float32, exact below 2**24."""
  permutation = mtf.one_hot(to, new_length, dtype=tf.float32)
  dims = x.shape.dims[:-1] + [new_length]
  return mtf.einsum([mtf.to_float(x), permutation], output_shape=dims)
