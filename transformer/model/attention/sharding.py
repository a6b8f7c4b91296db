"""Attention over mesh axes that its inputs do not use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer.model.context import Context
from mesh_tensorflow.transformer.model.mesh_setup import STANDARD_TENSOR_NAMES

# A dimension, and the two that replace it.
Replacement = tuple[mtf.Dimension, list[mtf.Dimension]]


def split_for_unused_axis(
  context: Context,
  q: mtf.Tensor,
  k: mtf.Tensor,
  v: mtf.Tensor,
  bias: mtf.Tensor | None,
  unsplittable_dims: Sequence[mtf.Dimension],
) -> Replacement | None:
  """Selects a dimension to divide; see `maybe_reshape_attention_input_for_2d_sharding`.

  Returns:
    A dimension that q, k and v have, and the two dimensions to replace it by: of its name and of a
    name that the layout splits over the free axis. None if there is no such axis or dimension.
  """
  model = getattr(context, "model", None)
  layout, mesh_shape = (getattr(model, name, None) for name in ("layout", "mesh_shape"))
  if layout is None or mesh_shape is None:
    return None
  layout, mesh_shape = mtf.convert_to_layout_rules(layout), mtf.convert_to_shape(mesh_shape)
  tensors = [t for t in (q, k, v, bias) if t is not None]
  # An axis that one operand uses is not free: no tensor can be split over it twice.
  used = {layout.tensor_dimension_to_mesh_axis(d, mesh_shape) for t in tensors for d in t.shape}
  free = next((a for i, a in enumerate(mesh_shape) if i not in used and a.size > 1), None)
  if free is None:
    return None
  # Only a usual name: the dimension would make a misspelled rule look as if it matched something.
  names = [n for n, axis in layout.pairs if axis == free.name and n in STANDARD_TENSOR_NAMES]
  if not names:
    return None
  for d in q.shape:
    if d in unsplittable_dims or d not in k.shape or d not in v.shape:
      continue
    splits = mtf.tensor_dim_to_mesh_dim_size(layout, mesh_shape, d)
    if d.size % (splits * free.size) == 0:
      name = sorted(names)[0]
      return d, [mtf.Dimension(d.name, splits), mtf.Dimension(name, d.size // splits)]
  return None


@overload
def replace_in(x: mtf.Tensor, replacement: Replacement | None) -> mtf.Tensor: ...


@overload
def replace_in(x: None, replacement: Replacement | None) -> None: ...


def replace_in(x: mtf.Tensor | None, replacement: Replacement | None) -> mtf.Tensor | None:
  """x with the replacement made, if it has the dimension."""
  if x is None or replacement is None or replacement[0] not in x.shape:
    return x
  return mtf.replace_dimensions(x, *replacement)


def maybe_reshape_attention_input_for_2d_sharding(
  context: Context,
  q: mtf.Tensor,
  k: mtf.Tensor,
  v: mtf.Tensor,
  bias: mtf.Tensor | None,
  unsplittable_dims: Sequence[mtf.Dimension],
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor, mtf.Tensor | None]:
  """Divides a dimension of attention over a mesh axis that would have nothing to do.

  Processors along an axis that no dimension of the inputs is split over would all do the same
  work. If the model knows its layout, the first dimension of q that k and v have too, and that can
  be divided further, becomes two: one as it was split before, and one split over the free axis.

  Args:
    context: a `Context`; its model's `layout` and `mesh_shape` say which axes are in use.
    q: queries.
    k: keys.
    v: values.
    bias: a tensor, or None.
    unsplittable_dims: dimensions to leave alone.

  Returns:
    (q, k, v, bias), as they were or with that dimension replaced.
  """
  found = split_for_unused_axis(context, q, k, v, bias, unsplittable_dims)
  q, k, v = (replace_in(t, found) for t in (q, k, v))
  return q, k, v, None if bias is None else replace_in(bias, found)
