"""The error for a shape that only running tells, with what has a static shape in its place."""

from __future__ import annotations

from mesh_tensorflow.errors import ShapeError
from mesh_tensorflow.importing.nodes import Node, Program, Wire

_BINS = "tf.reduce_sum(tf.one_hot(x, size), axis) in place of tf.math.bincount"
_SEGMENTS = "tf.math.unsorted_segment_sum and its kin, which are given the number of segments"
_UNIQUE = "counts of all values that there may be, of tf.one_hot, in place of tf.unique"
_INSTEAD = {
  "Bincount": _BINS,
  "DenseBincount": _BINS,
  "DynamicPartition": "a mask for each part, and a product with it, in place of parts",
  "Range": "tf.range of a number that is known",
  "SegmentMax": _SEGMENTS,
  "SegmentMean": _SEGMENTS,
  "SegmentMin": _SEGMENTS,
  "SegmentProd": _SEGMENTS,
  "SegmentSum": _SEGMENTS,
  "Unique": _UNIQUE,
  "UniqueV2": _UNIQUE,
  "UniqueWithCounts": _UNIQUE,
  "UniqueWithCountsV2": _UNIQUE,
  "Where": "tf.where(condition, x, y), or a product with a mask, in place of tf.where(condition) "
  "or tf.boolean_mask",
}


def dynamic_shape(wire: Wire, node: Node, inside: Node | None = None) -> ShapeError:
  """Builds the error for an output whose shape is not known while tracing.

  Args:
    wire: the output.
    node: what makes it.
    inside: the loop or the condition in whose body that stands.
  """
  shape = ", ".join("?" if n is None else str(n) for n in wire.shape)
  place = f"{node} in {inside}" if inside else f"{node}"
  instead = _INSTEAD.get(node.type)
  return ShapeError(
    f"from_tensorflow: the shape [{shape}] of {wire.name}, made by {place}, is known only when the "
    "function runs; on a mesh all shapes are static: give an input_signature without None, and "
    + (instead or "a fixed size (padding, a mask) in place of what depends on values")
    + ", or tf.ensure_shape where you know it"
  )


def check_shapes(program: Program, inside: Node | None = None) -> None:
  """Raises `ShapeError` for the first node with an output of dynamic shape.

  Args:
    program: a program; unused outputs of unknown shape are set to scalars.
    inside: the loop or the condition whose body it is.
  """
  used = {*program.outputs, *(w for node in program.nodes for w in node.inputs)}
  for node in program.nodes:
    for w in node.outputs:
      if None in w.shape and (w not in used or node.type == "FusedBatchNormV3"):
        w.shape = ()  # As FusedBatchNorm's last output: nobody but GPUs asks what it is.
      if None in w.shape:
        raise dynamic_shape(w, node, inside)
