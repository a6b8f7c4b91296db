"""Splittable dimensions of an operation's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from mesh_tensorflow.errors import GraphError, LayoutError
from mesh_tensorflow.program.dimensions import Dimension, Shape


class _Tensor(Protocol):
  @property
  def shape(self) -> Shape: ...

  @property
  def name(self) -> str: ...


class MeshWithLayout(Protocol):
  """Structural type: the part of `MeshImpl` that tells how tensors are split."""

  @property
  def shape(self) -> Shape: ...

  def tensor_dimension_to_mesh_axis(self, tensor_dimension: Dimension) -> int | None: ...


class Splittable:
  """Base class of `Operation`: the part that is about layouts."""

  _name: str
  _inputs: Sequence[_Tensor]
  _outputs: Sequence[_Tensor]
  _splittable_dims: frozenset[str]
  _unsplittable_dims: frozenset[str]

  @property
  def splittable_dims(self) -> frozenset[str]:
    """Names of the dimensions that a layout may split."""
    return self._splittable_dims

  @property
  def unsplittable_dims(self) -> frozenset[str]:
    """Names of the dimensions that no layout may split."""
    return self._unsplittable_dims

  # Any: operations of rooms above say MeshImpl in its place.
  def verify_layout(self, mesh_impl: Any) -> None:
    """Checks, before anything is lowered, that the layout suits the operation.

    Args:
      mesh_impl: the `MeshImpl` that the operation would be lowered on.

    Raises:
      LayoutError: it does not; the message says why and what would.
    """
    for t in self._outputs:
      mesh_impl.verify_layout(t.shape, f"{type(self).__name__} {self._name}: output {t.name}")

  def _require_unsplit(self, mesh_impl: MeshWithLayout, dim: Dimension, why: str) -> None:
    """Raises `LayoutError` if the layout splits `dim`."""
    axis = mesh_impl.tensor_dimension_to_mesh_axis(dim)
    if axis is None or mesh_impl.shape[axis].size == 1:
      return
    m = mesh_impl.shape[axis]
    raise LayoutError(
      f"{type(self).__name__} {self._name}: dimension {dim.name}:{dim.size} of "
      f"{self._inputs[0] if self._inputs else self._outputs[0]} is split over mesh axis "
      f"{m.name}:{m.size}, but {why}; rename it first (mtf.rename_dimension to a name without "
      f"a rule), or drop the rule {dim.name}:{m.name}"
    )

  def _initialize_splittable_and_unsplittable_dims(
    self, default_splittability: str, exception_dims_iterable: Iterable[str] | None = None
  ) -> tuple[frozenset[str], frozenset[str]]:
    """Sorts the dimension names of inputs and outputs into splittable and not.

    Args:
      default_splittability: "splittable" or "unsplittable".
      exception_dims_iterable: names for which the opposite holds.

    Returns:
      (splittable names, unsplittable names).
    """
    exceptions = frozenset(exception_dims_iterable or ())
    names = frozenset(n for t in [*self._inputs, *self._outputs] for n in t.shape.dimension_names)
    if default_splittability == "splittable":
      return names - exceptions, exceptions
    if default_splittability == "unsplittable":
      return exceptions, names - exceptions
    raise GraphError(
      f"operation {self._name!r}: default_splittability must be 'splittable' or 'unsplittable', "
      f"got {default_splittability!r}"
    )

  def _initialize_all_dimensions_as_splittable(self) -> tuple[frozenset[str], frozenset[str]]:
    """Lets a layout split every dimension; call it when the outputs are made.

    Returns:
      (splittable names, no names), which operations written for the TF1 library assign to
      `_splittable_dims` and `_unsplittable_dims` themselves.
    """
    dims = self._initialize_splittable_and_unsplittable_dims("splittable")
    self._splittable_dims, self._unsplittable_dims = dims
    return dims
