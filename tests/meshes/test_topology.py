"""Orders of TPU cores: values of the original library, and properties of any order."""

import math
import types

import pytest
from absl import flags
from absl.testing import flagsaver

from mesh_tensorflow import simd_mesh_impl
from mesh_tensorflow.errors import MeshShapeError
from mesh_tensorflow.meshes import topology
from mesh_tensorflow.program.dimensions import convert_to_shape


def test_folding_of_a_topology():
  assert topology.physical_shape_3d_from_topology_proto_4d([4, 2, 3, 2]) == [6, 4, 2]
  with flagsaver.flagsaver(fold_xy=True):
    assert topology.physical_shape_3d_from_topology_proto_4d([4, 2, 3, 2]) == [8, 3, 2]
  with pytest.raises(ValueError, match=r"\[x, y, z, core\], got \[4, 2, 3\]"):
    topology.physical_shape_3d_from_topology_proto_4d([4, 2, 3])


def test_flags_have_their_defaults():
  assert flags.FLAGS["logical_cores_per_chip"].default == 2
  assert flags.FLAGS["fold_xy"].default is False


def test_ring():
  assert topology._ring_2d(4, 4) == [
    (0, 0), (0, 1), (0, 2), (0, 3), (1, 3), (1, 2), (1, 1), (2, 1), (2, 2), (2, 3), (3, 3), (3, 2),
    (3, 1), (3, 0), (2, 0), (1, 0),
  ]  # fmt: skip
  assert topology._ring_2d(1, 3) == [(0, 0), (0, 1), (0, 2)]
  assert topology._ring_2d(3, 1) == [(0, 0), (1, 0), (2, 0)]
  assert topology._ring_2d(3, 2) == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]


@pytest.mark.parametrize(("m", "n"), [(2, 2), (2, 5), (4, 2), (4, 3), (6, 8)])
def test_members_of_a_ring_touch(m, n):
  ring = topology._ring_2d(m, n)
  assert sorted(ring) == [(i, j) for i in range(m) for j in range(n)]
  for (a, b), (c, d) in zip(ring, ring[1:] + ring[:1]):
    assert abs(a - c) + abs(b - d) == 1


def test_one_logical_axis():
  order = topology._logical_1d_to_physical_subspace_auto
  assert order([(2, 2), (2, 2), (1, 2)], [4, 4, 2]) == [[0, 0, 0], [0, 2, 0], [2, 2, 0], [2, 0, 0]]
  assert order([(1, 1), (2, 1), (2, 3)], [1, 2, 6]) == [[0, 0, 0], [0, 0, 3], [0, 1, 0], [0, 1, 3]]
  assert order([(3, 2)], [6]) == [[0], [2], [4]]


def test_logical_axes_must_cover_the_physical_shape():
  combine = topology._logical_to_physical_v1
  assert combine([[(1, 1), (2, 1)], [(2, 1), (1, 1)]], [2, 2]) == [[0, 0], [1, 0], [0, 1], [1, 1]]
  with pytest.raises(ValueError, match=r"sizes \[2, 4\] do not cover"):
    combine([[(1, 1), (2, 1)], [(2, 1), (2, 1)]], [2, 2])
  with pytest.raises(ValueError, match="once"):
    combine([[(1, 1), (2, 1)], [(1, 1), (2, 1)]], [2, 2])


def test_hierarchical_tiling():
  tiling = simd_mesh_impl.HierarchicalTiling([("dp", None), ("mp", [2, 2, 1])], [4, 4, 1])
  assert tiling.mesh_shape == convert_to_shape("dp:4,mp:4")
  assert tiling.logical_to_physical == [0, 1, 5, 4, 2, 3, 7, 6, 10, 11, 15, 14, 8, 9, 13, 12]
  tiling = simd_mesh_impl.HierarchicalTiling([("dp", None), ("mp", [1, 1, 2])], [2, 2, 2])
  assert tiling.logical_to_physical == [0, 1, 2, 3, 6, 7, 4, 5]


@pytest.mark.parametrize(
  ("physical_shape", "spec"),
  [
    ([4, 4, 4], [("replica", [2, 2, 2]), ("model", [2, 2, 2])]),
    ([2, 4, 4], [("replica", None), ("model", [1, 2, 2])]),
    ([8, 8, 2], [("a", None), ("b", [2, 2, 1]), ("c", [1, 2, 2])]),
    ([8, 8, 2], [("a", [8, 8, 2])]),
    ([1, 1, 1], [("a", None)]),
    ([2, 6, 2], [("a", [1, 3, 1]), ("b", [2, 2, 2])]),
    ([16, 16, 2], [("a", None), ("b", [4, 4, 2])]),
  ],
)
def test_every_tiling_is_a_permutation_of_the_shape_it_says(physical_shape, spec):
  tiling = topology.HierarchicalTiling(spec, physical_shape)
  size = math.prod(physical_shape)
  assert tiling.mesh_shape == topology.HierarchicalTiling.spec_to_mesh_shape(spec, size)
  assert sorted(tiling.logical_to_physical) == list(range(size))


def test_wrong_tilings():
  tiling = topology.HierarchicalTiling
  with pytest.raises(ValueError, match=r"cover \[4, 4, 1\], not the physical shape \[4, 4, 2\]"):
    tiling([("a", [2, 2, 1]), ("b", [2, 2, 1])], [4, 4, 2])
  with pytest.raises(ValueError, match="must be a list"):
    tiling([("a", None)], (4, 4, 2))
  with pytest.raises(ValueError, match="sizes .4, 4., which do not give 15 processors"):
    tiling.spec_to_mesh_shape([("a", [2, 2, 1]), ("b", [2, 2, 1])], 15)
  with pytest.raises(MeshShapeError):
    tiling.spec_to_mesh_shape([("a", None), ("b", [2, 2, 1])], 15)
  open_inside = [("a", [2, 2, 1]), ("b", None)]
  with pytest.raises(MeshShapeError, match="sizes of 'b' open; only .* 'a', may be None"):
    tiling(open_inside, [4, 4, 1])
  with pytest.raises(MeshShapeError, match="leaves the sizes of 'b' open"):
    tiling.spec_to_mesh_shape(open_inside, 16)
  assert tiling.spec_to_mesh_shape([("a", None), ("b", [2, 2, 1])], 16) == convert_to_shape(
    "a:4,b:4"
  )


def test_auto_order():
  auto = simd_mesh_impl.auto_logical_to_physical_tpu
  assert auto([8], [2, 2, 2]) == [0, 1, 2, 3, 6, 7, 4, 5]
  assert auto([2, 4], [2, 2, 2]) == [0, 1, 4, 5, 2, 3, 6, 7]
  assert auto([3, 4], [3, 2, 2]) == list(range(12))
  order = auto([16, 8], [8, 8, 1, 2])
  assert order[:16] == [0, 1, 2, 3, 18, 19, 16, 17, 4, 5, 6, 7, 22, 23, 20, 21]
  assert order[-16:] == [64, 65, 66, 67, 82, 83, 80, 81, 32, 33, 34, 35, 50, 51, 48, 49]


@pytest.mark.parametrize(
  ("logical", "physical"),
  [
    ([16, 16, 2], [16, 16, 2]), ([8, 8], [4, 8, 2]), ([4, 4, 4], [8, 4, 1, 2]), ([128], [8, 8, 2]),
    ([2, 2, 2], [2, 2, 2]), ([4, 2], [2, 2, 2]), ([1, 8, 1], [2, 2, 2]), ([8, 1], [4, 1, 2]),
    ([32, 4], [8, 8, 2]), ([3, 2, 2], [3, 2, 2]), ([8], [8]), ([2, 4], [2, 1, 4]), ([1], [1]),
    ([2, 32, 4], [256]),
  ],
)  # fmt: skip
def test_every_auto_order_is_a_permutation(logical, physical):
  size = math.prod(logical)
  order = topology.auto_logical_to_physical_tpu(logical, physical)
  assert sorted(order) == list(range(size))
  coordinates = topology.auto_logical_to_physical_tpu(logical, physical, return_coordinates=True)
  assert len({tuple(c) for c in coordinates}) == size
  # A mesh takes it as it is.
  assert (
    simd_mesh_impl.SimdMeshImpl(
      [("a", size)], "", ["/device:CPU:0"] * size, logical_to_physical=order
    ).l2p(size - 1)
    == order[-1]
  )


def test_wrong_sizes():
  with pytest.raises(ValueError, match="16 processors, .* 8 cores"):
    topology.auto_logical_to_physical_tpu([4, 4], [2, 2, 2])


def test_chips_of_one_core_need_a_device_assignment():
  with flagsaver.flagsaver(logical_cores_per_chip=1):
    with pytest.raises(ValueError, match="device_assignment"):
      topology.auto_logical_to_physical_tpu([4], [2, 2, 1])
    assignment = types.SimpleNamespace(
      topology=types.SimpleNamespace(mesh_shape=[2, 2, 1, 1]),
      num_replicas=4,
      # Replica i sits at x = i % 2, y = i // 2.
      coordinates=lambda replica, _: [replica % 2, replica // 2, 0, 0],
    )
    order = topology.auto_logical_to_physical_tpu([4], [2, 2, 1], device_assignment=assignment)
    assert sorted(order) == [0, 1, 2, 3]


def test_the_old_place_of_the_helpers():
  for name in (
    "HierarchicalTiling", "auto_logical_to_physical_tpu", "_ring_2d", "_logical_to_physical_v1",
    "_logical_1d_to_physical_subspace_auto", "physical_shape_3d_from_topology_proto_4d",
  ):  # fmt: skip
    assert getattr(simd_mesh_impl, name) is getattr(topology, name)
