"""Finding a TPU, and a mesh on its cores: the one function `make_mesh_impl` does it all.

A mesh is laid over the cores so that processors that exchange data are neighbours
(`topology.auto_logical_to_physical_tpu`, or a hierarchical tiling that the caller gives). The
order goes into the device assignment: replica i of the strategy is processor i of the mesh.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from absl import flags

from mesh_tensorflow.errors import ConfigError, MeshShapeError
from mesh_tensorflow.meshes.layout import LayoutLike, pnum_to_processor_coordinates
from mesh_tensorflow.meshes.store import VariableStore
from mesh_tensorflow.meshes.topology import (
  HierarchicalTiling,
  auto_logical_to_physical_tpu,
  physical_shape_3d_from_topology_proto_4d,
)
from mesh_tensorflow.meshes.tpu.mesh_impl import StrategyMeshImpl
from mesh_tensorflow.program.dimensions import ShapeLike, convert_to_shape

_LOG = logging.getLogger("mesh_tensorflow")

# (mesh dimension, repetitions along each physical axis), from the outermost tile to the innermost.
TilingSpec = Sequence[tuple[str, Sequence[int] | None]]


@dataclasses.dataclass(frozen=True)
class Tpu:
  """A TPU system that has been initialized.

  Attributes:
    resolver: the cluster resolver that found it.
    topology: the `tf.tpu.experimental.Topology`.
  """

  resolver: Any
  topology: Any

  @property
  def mesh_shape(self) -> list[int]:
    """Chips along x, y and z, and cores of a chip."""
    return [int(s) for s in self.topology.mesh_shape]


# A TPU, the name of one, or whether there is one.
TpuLike: TypeAlias = Tpu | str | bool | None


def connect(
  tpu: str = "local",
  *,
  zone: str | None = None,
  project: str | None = None,
  job_name: str | None = None,
) -> Tpu:
  """Finds a TPU and initializes it, which clears its memory.

  Args:
    tpu: "local" for the TPU of this machine (a TPU VM); else a name or an address "grpc://...".
    zone: zone of a TPU that is given by name.
    project: its project.
    job_name: name of the job of the TPU workers; "worker" by default.

  Raises:
    ConfigError: there is none.
  """
  if tpu == "local" and not tf.config.list_physical_devices("TPU"):
    kinds = sorted({d.device_type for d in tf.config.list_physical_devices()})
    raise ConfigError(
      "no TPU was found on this machine: TensorFlow sees "
      f"{', '.join(kinds)}. On a TPU VM, install the TensorFlow build for TPUs and its libtpu; "
      "elsewhere leave the TPU out, to run on GPU or CPU"
    )
  try:
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(
      tpu=tpu, zone=zone, project=project, **({"job_name": job_name} if job_name else {})
    )
    if tpu != "local":
      tf.config.experimental_connect_to_cluster(resolver)
    return Tpu(resolver, tf.tpu.experimental.initialize_tpu_system(resolver))
  except Exception as e:  # The clients of the cloud raise classes of their own.
    raise ConfigError(
      f"TPU {tpu!r} cannot be used: {type(e).__name__}: {e}. Check its name, zone and project "
      "(gcloud compute tpus tpu-vm list), or leave the TPU out, to run on GPU or CPU"
    ) from e


def physical_coordinates(
  mesh_shape: ShapeLike,
  topology_shape: Sequence[int],
  hierarchical_tiling_spec: TilingSpec | None = None,
) -> list[list[int]]:
  """Assigns a core of a TPU to each processor of a mesh.

  Args:
    mesh_shape: mesh shape, of as many processors as there are cores.
    topology_shape: chips along x, y and z, and cores of a chip.
    hierarchical_tiling_spec: see `topology.HierarchicalTiling`; its physical shape is
      `topology.physical_shape_3d_from_topology_proto_4d`. As in the TF1 library it has no effect
      on a TPU of several layers (z > 1). None: `topology.auto_logical_to_physical_tpu`.

  Returns:
    For each processor [x, y, z, core].

  Raises:
    MeshShapeError: the sizes differ, or the tiling gives another mesh.
  """
  mesh_shape = convert_to_shape(mesh_shape)
  chips = [int(s) for s in topology_shape]
  physical = physical_shape_3d_from_topology_proto_4d(chips)
  if hierarchical_tiling_spec is not None and chips[2] == 1:
    tiling = HierarchicalTiling(hierarchical_tiling_spec, physical)
    if tiling.mesh_shape != mesh_shape:
      raise MeshShapeError(
        f"hierarchical_tiling_spec {list(hierarchical_tiling_spec)} gives the mesh "
        f"{tiling.mesh_shape} on a TPU of shape {physical}, not {mesh_shape}"
      )
    folded = [pnum_to_processor_coordinates(physical, p) for p in tiling.logical_to_physical]
  else:
    _warn_of_cores(physical)
    folded = auto_logical_to_physical_tpu(
      mesh_shape.to_integer_list, physical, return_coordinates=True
    )
  return [_unfolded(c, chips) for c in folded]


def _warn_of_cores(physical: Sequence[int]) -> None:
  cores = flags.FLAGS["logical_cores_per_chip"].value
  if physical[2] != cores:
    _LOG.warning(
      "the TPU has %d core(s) on each chip, and the flag logical_cores_per_chip is %d: processors "
      "are in the order of the cores, so that neighbours on the mesh may be far apart; set the "
      "flag to %d",
      *(physical[2], cores, physical[2]),
    )


def _unfolded(c: Sequence[int], chips: Sequence[int]) -> list[int]:
  """Converts coordinates in the folded `physical_shape_3d_...` to [x, y, z, core]."""
  # In the folded axis the one that is named first there runs fastest.
  first, second, core = c
  x, y, _, _ = chips
  if flags.FLAGS["fold_xy"].value:  # [x * y, z, core]
    return [first % x, first // x, second, core]
  return [second, first % y, first // y, core]  # [y * z, x, core]


def device_assignment(
  topology: Any,
  mesh_shape: ShapeLike,
  hierarchical_tiling_spec: TilingSpec | None = None,
) -> tf.tpu.experimental.DeviceAssignment:
  """The device assignment under which replica i is processor i of a mesh.

  Args:
    topology: a `tf.tpu.experimental.Topology`.
    mesh_shape: mesh shape.
    hierarchical_tiling_spec: see `physical_coordinates`.

  Raises:
    MeshShapeError: the sizes differ.
  """
  coordinates = physical_coordinates(mesh_shape, topology.mesh_shape, hierarchical_tiling_spec)
  # One core for each replica.
  return tf.tpu.experimental.DeviceAssignment(
    topology, np.array(coordinates, np.int32)[:, np.newaxis, :]
  )


def make_mesh_impl(
  mesh_shape: ShapeLike,
  layout_rules: LayoutLike,
  tpu: str | bool | Tpu = "local",
  *,
  zone: str | None = None,
  project: str | None = None,
  job_name: str | None = None,
  hierarchical_tiling_spec: TilingSpec | None = None,
  variable_store: VariableStore | None = None,
) -> StrategyMeshImpl:
  """A mesh on the cores of a TPU.

  Args:
    mesh_shape: mesh shape, of as many processors as the TPU has cores.
    layout_rules: layout rules.
    tpu: a TPU that is connected already, or what `connect` takes; True: "local".
    zone: see `connect`.
    project: see `connect`.
    job_name: see `connect`.
    hierarchical_tiling_spec: see `physical_coordinates`.
    variable_store: where variables live; a new one by default.

  Raises:
    ConfigError: there is no TPU.
    MeshShapeError: the mesh does not fit it.
  """
  if tpu is False:
    raise ConfigError(
      "make_mesh_impl: tpu=False leaves no TPU to make a mesh on; give mtf.SimdMeshImpl the mesh "
      "shape and layout, for GPUs or CPUs"
    )
  mesh_shape = convert_to_shape(mesh_shape)
  if not isinstance(tpu, Tpu):
    tpu = connect("local" if tpu is True else tpu, zone=zone, project=project, job_name=job_name)
  assignment = device_assignment(tpu.topology, mesh_shape, hierarchical_tiling_spec)
  strategy = tf.distribute.TPUStrategy(tpu.resolver, experimental_device_assignment=assignment)
  return StrategyMeshImpl(
    mesh_shape, layout_rules, strategy, assignment, variable_store=variable_store
  )
