"""Mesh arguments of `parallelize`: a mesh implementation, a shape, devices, or Keras' own.

Keras' `DeviceMesh`, `DataParallel`, `ModelParallel` and `LayoutMap` can be constructed under
TensorFlow, where nothing in Keras serves them; here they mean what they mean under JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from mesh_tensorflow.errors import ArgumentError, LayoutError, MeshShapeError
from mesh_tensorflow.meshes.layout import LayoutLike, convert_to_layout_rules
from mesh_tensorflow.meshes.mesh_impl import MeshImpl
from mesh_tensorflow.meshes.simd.mesh_impl import SimdMeshImpl
from mesh_tensorflow.program.dimensions import Shape, convert_to_shape

_LEGAL = (
  "a mesh implementation, a mesh shape such as 'rows:2,cols:2' or {'rows': 2, 'cols': 2}, a "
  "number of devices, a list of device names, a keras.distribution.DeviceMesh, ModelParallel or "
  "DataParallel"
)
_DEVICE_TYPES = ("CPU", "GPU", "TPU", "XLA_CPU", "XLA_GPU")


@dataclasses.dataclass(frozen=True)
class MeshChoice:
  """Mesh of `parallelize`, as far as it is known before the layout is decided.

  Attributes:
    shape: the mesh shape, or None: then an automatic layout chooses it.
    size: the number of devices.
    devices: their names, or None for the first ones of this process.
    given: the mesh implementation of the user, or None.
    announces: whether what an automatic layout chose is printed.
  """

  shape: Shape | None
  size: int
  devices: tuple[str, ...] | None = None
  given: MeshImpl | None = None
  announces: bool = False

  def make(self, shape: Shape, layout: LayoutLike) -> MeshImpl:
    """Creates the mesh implementation with its layout.

    Args:
      shape: the mesh shape: `self.shape`, or the one that was chosen.
      layout: layout rules.
    """
    if self.given is not None:
      if self.given.layout_rules == convert_to_layout_rules(layout):
        return self.given
      return self.given.with_layout(layout)
    return SimdMeshImpl(shape, layout, None if self.devices is None else list(self.devices))


class AutoParallel(keras.distribution.DataParallel):  # type: ignore[misc]  # Of Keras: no types.
  """A distribution that chooses mesh shape and layout itself: the least predicted time in memory.

  It is chosen at the first batch, and again at the first one of training if others came before; two
  lines say what was chosen, and what a step is predicted to take.

  Args:
    devices: names of devices, as of `keras.distribution.list_devices()`, the default; or their
      number.
    mesh_shape: the mesh shape, as "rows:2,cols:2"; None: it is chosen, too.

  Raises:
    MeshShapeError: it is one of another number of devices.
  """

  def __init__(self, devices: Sequence[str] | int | None = None, mesh_shape: Any = None):
    known: list[str] = [str(d) for d in keras.distribution.list_devices()]
    if isinstance(devices, int):
      if not 1 <= devices <= len(known):
        raise MeshShapeError(f"AutoParallel: there are {len(known)} devices, not {devices}")
      chosen = known[:devices]
    else:
      chosen = known if devices is None else [str(d) for d in devices]
    super().__init__(devices=chosen)
    shape = None if mesh_shape is None else _shape(mesh_shape)
    if shape is not None and shape.size != len(chosen):
      raise MeshShapeError(f"AutoParallel: the mesh {shape} is not of {len(chosen)} devices")
    self.choice = MeshChoice(shape, len(chosen), tuple(chosen), announces=True)

  def __repr__(self) -> str:
    return f"<AutoParallel devices={self.choice.size}, mesh_shape={self.choice.shape}>"


def convert_to_mesh(mesh: Any) -> MeshChoice:
  """Converts the mesh argument of `parallelize`.

  Args:
    mesh: see `parallelize`.

  Raises:
    ArgumentError: it is nothing that stands for a mesh.
    MeshShapeError: it is one of no devices, or has a name twice.
  """
  if isinstance(mesh, MeshImpl):
    return MeshChoice(mesh.shape, mesh.size, None, mesh)
  if isinstance(mesh, AutoParallel):
    return mesh.choice
  if is_distribution(mesh):
    if mesh.device_mesh is None:
      raise ArgumentError(
        f"mtf.keras: the {type(mesh).__name__} has no device_mesh; give one to it, or give "
        "parallelize a mesh and this as its layout"
      )
    mesh = mesh.device_mesh
  if isinstance(mesh, keras.distribution.DeviceMesh):
    pairs = [(str(n), int(s)) for n, s in zip(mesh.axis_names, mesh.shape)]
    devices = tuple(str(d) for d in mesh.devices.flatten())
    return MeshChoice(_shape(pairs), len(devices), devices)
  if isinstance(mesh, bool) or mesh is None:
    raise ArgumentError(f"parallelize takes as mesh {_LEGAL}; got {mesh!r}")
  if isinstance(mesh, int):
    if mesh < 1:
      raise MeshShapeError(f"mtf.keras: a mesh has at least 1 device, got {mesh}")
    return MeshChoice(None, mesh)
  if isinstance(mesh, Mapping):
    mesh = list(mesh.items())
  if isinstance(mesh, Sequence) and not isinstance(mesh, (str, Shape)):
    if not mesh:
      raise MeshShapeError(f"mtf.keras: a mesh of no devices; give {_LEGAL}")
    if all(isinstance(d, str) and _is_device(d) for d in mesh):
      return MeshChoice(None, len(mesh), tuple(mesh))
  try:
    shape = _shape(mesh)
  except (TypeError, ValueError) as e:
    raise ArgumentError(f"parallelize takes as mesh {_LEGAL}; got {mesh!r} ({e})") from e
  return MeshChoice(shape, int(shape.size))


def is_distribution(x: Any) -> bool:
  """True for what Keras has for a layout: a distribution, or a `LayoutMap`."""
  return not isinstance(x, AutoParallel) and isinstance(
    x,
    (
      keras.distribution.LayoutMap,
      keras.distribution.ModelParallel,
      keras.distribution.DataParallel,
    ),
  )


def check_same_mesh(choice: MeshChoice, distribution: Any) -> None:
  """Checks that a distribution is of the mesh that was given beside it.

  Args:
    choice: the mesh.
    distribution: what `is_distribution`.

  Raises:
    LayoutError: they have axes of other names or sizes.
  """
  device_mesh = distribution.device_mesh
  if choice.shape is None:
    raise LayoutError(
      f"mtf.keras: a {type(distribution).__name__} names axes of a mesh, so the mesh must have "
      "a shape; give it, or leave the mesh to the device_mesh of the distribution"
    )
  if device_mesh is None:
    return
  theirs = {str(n): int(s) for n, s in zip(device_mesh.axis_names, device_mesh.shape)}
  ours = {m.name: int(m.size) for m in choice.shape}
  if theirs != ours:
    raise LayoutError(
      f"mtf.keras: the mesh is {choice.shape}, and the {type(distribution).__name__} is for "
      f"{', '.join(f'{n}:{s}' for n, s in theirs.items())}; give the same axes to both"
    )


def _shape(pairs: Any) -> Shape:
  shape: Shape = convert_to_shape(pairs)
  if len(set(shape.dimension_names)) < len(shape) or shape.size < 1:
    raise MeshShapeError(
      f"a mesh has dimensions of different names and positive sizes, got {pairs}"
    )
  return shape


def _is_device(name: str) -> bool:
  """True for a device name, such as "cpu:0" (Keras) or "/device:CPU:0" (TensorFlow)."""
  return name.startswith("/") or name.split(":")[0].upper() in _DEVICE_TYPES
