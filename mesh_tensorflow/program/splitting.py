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

  def is_uneven(self, dim: Dimension) -> bool: ...


class Splittable:
  """Base class of `Operation`: the part that is about layouts."""

  _name: str
  _inputs: Sequence[_Tensor]
  _outputs: Sequence[_Tensor]
  _splittable_dims: frozenset[str]
  _unsplittable_dims: frozenset[str]

  # Whether `lower` is right where dimensions are split unevenly: slices then have padding, whose
  # content is arbitrary. Of others the inputs are gathered first, and the outputs cut.
  lowers_uneven_slices = False

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

  # Any: as that of `verify_layout`.
  def suits_uneven_slices(self, mesh_impl: Any) -> bool:
    """True if `lower` is right on this mesh, whose layout splits some dimensions unevenly.

    Args:
      mesh_impl: the `MeshImpl` that the operation would be lowered on.
    """
    del mesh_impl
    return self.lowers_uneven_slices

  def layout_to_lower_on(self, mesh_impl: Any) -> Any:
    """The mesh with the layout that `lower` is called with.

    Args:
      mesh_impl: the `MeshImpl` of the program.

    Returns:
      `mesh_impl`; or, where it splits dimensions unevenly and `lower` is not right with that, the
      mesh with a layout that leaves these dimensions whole.

    Raises:
      LayoutError: it would have to, and the operation changes slices of variables.
    """
    names = mesh_impl.uneven_names
    if not names or self.suits_uneven_slices(mesh_impl):
      return mesh_impl
    tensors = [*self._inputs, *getattr(self, "implicit_inputs", ()), *self._outputs]
    dims = {d for t in tensors for d in t.shape if d.name in names}
    uneven = sorted(d for d in dims if mesh_impl.is_uneven(d))
    if not uneven and not (dims and self._is_uneven_inside(mesh_impl)):
      return mesh_impl
    if getattr(self, "variables", None):
      d = (uneven or sorted(dims))[0]
      m = mesh_impl.shape[mesh_impl.tensor_dimension_to_mesh_axis(d)]
      raise LayoutError(
        f"{type(self).__name__} {self._name}: dimension {d.name}:{d.size} is split unevenly over "
        f"mesh axis {m.name}:{m.size}, and slices of variables are changed here that cannot be; "
        f"write the rule without ~, with a size that {m.size} divides, or drop it"
      )
    return mesh_impl.unsplit({d.name for d in dims})

  def _is_uneven_inside(self, mesh_impl: Any) -> bool:
    """True if the layout suits the operation only because its rules may split unevenly."""
    try:
      self.verify_layout(mesh_impl.even_only)
    except LayoutError:
      try:
        self.verify_layout(mesh_impl)
      except LayoutError:
        return False  # That is told.
      return True
    return False

  def check_layout(self, mesh_impl: Any) -> None:
    """Checks that the operation can be lowered on a mesh, on gathered inputs if need be.

    Args:
      mesh_impl: the `MeshImpl` of the program.

    Raises:
      LayoutError: it cannot; see `verify_layout`.
    """
    layout = self.layout_to_lower_on(mesh_impl)
    if layout is not mesh_impl:
      Splittable.verify_layout(self, mesh_impl)
    self.verify_layout(layout)

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
