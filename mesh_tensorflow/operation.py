"""Operation: the base class of what makes tensors from tensors."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mesh_tensorflow import arguments
from mesh_tensorflow.dimensions import Dimension
from mesh_tensorflow.errors import (
  ArgumentError,
  GraphError,
  LayoutError,
  MeshError,
  UnsupportedError,
)
from mesh_tensorflow.tensor import Tensor, check_tensors

if TYPE_CHECKING:  # It imports this module.
  from mesh_tensorflow.graph import Graph, Mesh


class _OperationMeta(type):
  """Enters an operation into its graph once its constructor has succeeded."""

  @property
  def __signature__(cls) -> inspect.Signature:
    """That of the constructor, for `inspect.signature`, `help` and editors."""
    constructor = inspect.signature(cls.__init__)
    return constructor.replace(
      parameters=list(constructor.parameters.values())[1:],
      return_annotation=inspect.Signature.empty,
    )

  def __call__(cls, *args, **kwargs):
    signature = arguments.signature_to_check_first(cls)
    if signature is not None:
      signature.check_object(cls, args, kwargs)
    try:
      op = super().__call__(*args, **kwargs)
    except MeshError:
      raise
    except Exception:
      # Checked only now, since most operations are made by functions that checked it all.
      signature = arguments.signature_of_class(cls)
      if signature is not None:
        signature.check((cls, *args), kwargs)
      raise
    op.graph._operations.append(op)
    return op


class Operation(metaclass=_OperationMeta):
  """An operation on the tensors of a graph.

  Subclasses set `self._outputs` (a list of `Tensor`s) in their constructor and
  define `lower` and, unless they have no gradient, `gradient`.

  Args:
    inputs: a list of `Tensor`s.
    mesh: the `Mesh`; the first input's by default.
    name: made unique within the graph.

  Raises:
    GraphError: there is neither an input nor a mesh, or an input may not be used.
  """

  # Whether recomputation (`Graph.clone_operations`) may copy the operation.
  is_cloneable = True
  # Whether a recomputation takes the outputs, with gradients, from outside: those of variables.
  is_external = False
  # Whether inputs may be on other meshes than the operation is.
  may_mix_meshes = False

  def __init__(self, inputs: list[Tensor], mesh: Mesh | None = None, name: str | None = None):
    if mesh is None:
      if not inputs:
        raise GraphError(
          f"{type(self).__name__} {name!r} has no inputs to take the mesh from; give it mesh=..."
        )
      if not isinstance(inputs[0], Tensor):
        check_tensors(repr(name), inputs[:1])
      mesh = inputs[0].mesh
    elif isinstance(mesh, Tensor):
      raise ArgumentError(f"operation {name!r}: mesh must be an mtf.Mesh, got {mesh}; write x.mesh")
    if name is None:
      raise ArgumentError(f"{type(self).__name__} of {list(inputs)} needs a name")
    for x in inputs:
      if not isinstance(x, Tensor):
        check_tensors(f"operation {name!r}", inputs)
      if not x.usable:
        raise GraphError(
          f"operation {name!r} uses {x}, which is inside a loop, or a custom_gradient or "
          "recompute_grad function; return it from that function to use it"
        )
      if x.mesh is not mesh and x.mesh.graph is not mesh.graph:
        raise GraphError(
          f"operation {name!r} on {mesh!r}: {x} on {x.mesh!r} belongs to another graph"
        )
      if x.mesh is not mesh and not self.may_mix_meshes:
        raise GraphError(
          f"operation {name!r} is on {mesh!r}, but its input {x} on {x.mesh!r}; make both on one "
          "mesh, or export the tensor and import it there"
        )
    self._inputs = list(inputs)
    self._outputs: list[Tensor] = []
    self._mesh = mesh
    self._name = mesh.graph.unique_name(name)
    self._splittable_dims, self._unsplittable_dims = (
      self._initialize_splittable_and_unsplittable_dims("splittable")
    )

  @property
  def graph(self) -> Graph:
    """The `Graph` to which it belongs."""
    return self._mesh.graph

  @property
  def mesh(self) -> Mesh:
    """The `Mesh` on which it runs."""
    return self._mesh

  @property
  def name(self) -> str:
    """Its name, unique within the graph."""
    return self._name

  @property
  def inputs(self) -> list[Tensor]:
    """A copy of the list of input `Tensor`s."""
    return list(self._inputs)

  @property
  def outputs(self) -> list[Tensor]:
    """A copy of the list of output `Tensor`s."""
    return list(self._outputs)

  @property
  def splittable_dims(self) -> frozenset[str]:
    """Names of the dimensions that a layout may split."""
    return self._splittable_dims

  @property
  def unsplittable_dims(self) -> frozenset[str]:
    """Names of the dimensions that no layout may split."""
    return self._unsplittable_dims

  @property
  def to_string(self) -> str:
    """Its class, inputs and outputs as text."""
    ins = ", ".join(t.to_string for t in self._inputs)
    outs = ", ".join(t.to_string for t in self._outputs)
    return f"{type(self).__name__}[Inputs=({ins}) Outputs=({outs})]"

  def __repr__(self) -> str:
    return self.to_string

  @property
  def has_gradient(self) -> bool:
    """Whether a gradient can flow: some input and some output is floating."""
    return any(t.dtype.is_floating for t in self._inputs) and any(
      t.dtype.is_floating for t in self._outputs
    )

  def gradient(self, grad_ys: list[Tensor | None]) -> list[Tensor | None]:
    """Gradients of the inputs.

    Args:
      grad_ys: one gradient (or None) for each output.

    Returns:
      One gradient (or None) for each input, of the input's shape.
    """
    raise UnsupportedError(
      f"{type(self).__name__} {self.name} of {self._inputs} has no gradient: its class defines no "
      "method gradient(grad_ys); stop the gradient before it with mtf.stop_gradient"
    )

  def lower(self, lowering: Any) -> None:
    """Computes the outputs: calls `lowering.set_tensor_lowering` for each."""
    raise UnsupportedError(
      f"{type(self).__name__} {self.name} of {self._inputs} cannot be lowered: its class defines "
      "no method lower(lowering)"
    )

  def verify_layout(self, mesh_impl: Any) -> None:
    """Checks, before anything is lowered, that the layout suits the operation.

    Raises:
      LayoutError: it does not; the message says why and what would.
    """
    for t in self._outputs:
      mesh_impl.verify_layout(t.shape, f"{type(self).__name__} {self.name}: output {t.name}")

  def _require_unsplit(self, mesh_impl: Any, dim: Dimension, why: str) -> None:
    """Raises `LayoutError` if the layout splits `dim`."""
    axis = mesh_impl.tensor_dimension_to_mesh_axis(dim)
    if axis is None or mesh_impl.shape[axis].size == 1:
      return
    m = mesh_impl.shape[axis]
    raise LayoutError(
      f"{type(self).__name__} {self.name}: dimension {dim.name}:{dim.size} of "
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
    names = frozenset(n for t in self._inputs + self._outputs for n in t.shape.dimension_names)
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
