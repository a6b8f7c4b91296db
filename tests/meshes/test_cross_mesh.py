"""Which blocks go from mesh to mesh: the slices that come of it, and how much is sent."""

from __future__ import annotations

import math

import numpy as np
import pytest

import mesh_tensorflow as mtf
from docs.tools.resharding import APART, SHAPE, SOURCES, TARGETS, UNEVEN, blocks, least, mesh, pairs
from mesh_tensorflow.meshes import cross_mesh
from tests.kinds import kept


def received(plan, slices, target, shape):
  """What the transfers of a plan put together on each processor, by NumPy."""
  result = [None] * target.size
  for assembly in plan:
    filled = [n - k for n, k in zip(target.slice_shape(shape), assembly.padding)]
    whole = np.zeros(filled, int)
    if assembly.transfers:
      parts = np.empty(math.prod(assembly.grid), object)
      for i, t in enumerate(assembly.transfers):
        parts[i] = slices[t.source][tuple(slice(b, b + n) for b, n in zip(t.begin, t.size))]
      whole = np.block(parts.reshape(assembly.grid).tolist())
    for p in assembly.replicas:
      result[p] = whole
  return result


@pytest.mark.parametrize("shape", [SHAPE, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("first", [0, 1, APART], ids=["same devices", "one apart", "apart"])
@pytest.mark.parametrize("target_shape", kept(TARGETS, ["u:2", "u:2,v:2"]))
@pytest.mark.parametrize("source_shape", kept(SOURCES, ["s:4", "s:2,t:2"]))
def test_each_element_is_sent_once_and_comes_to_its_place(source_shape, target_shape, first, shape):
  whole = np.arange(shape.size).reshape(shape.to_integer_list)
  for source, target in pairs(source_shape, target_shape, first):
    slices = blocks(source, whole, shape)
    plan = cross_mesh.plan_transfers(source, target, shape)
    expected = blocks(target, whole, shape)
    for found, wanted in zip(received(plan, slices, target, shape), expected, strict=True):
      np.testing.assert_array_equal(found.ravel(), wanted.ravel())
    sent = cross_mesh.elements_sent(source, target, shape)
    assert sent == least(source, target, shape)
    if first == APART:
      assert sent == shape.size  # No device of the target has anything of it.


def test_replicas_of_the_source_share_the_sending():
  source, target = mesh("s:4", "", 0), mesh("u:4", "b:u", 8)
  plan = cross_mesh.plan_transfers(source, target, SHAPE)
  assert sorted(t.source for assembly in plan for t in assembly.transfers) == [0, 1, 2, 3]


def test_devices_are_one_however_they_are_written():
  source = mtf.PlacementMeshImpl("s:1", "", ["/job:localhost/replica:0/task:0/device:CPU:1"])
  target = mtf.PlacementMeshImpl("u:1", "", ["cpu:1"])
  assert cross_mesh.elements_sent(source, target, SHAPE) == 0


class InWorkers(mtf.MeshImpl):
  """A mesh whose processors are in workers, by their numbers."""

  def __init__(self, shape, layout, worker_of):
    super().__init__(shape, layout)
    self._worker_of = worker_of

  def processor_device(self, pnum):
    return f"/job:worker/task:{self._worker_of[pnum]}/device:CPU:{pnum}"

  @property
  def processors_of_workers(self):
    of = [[p for p, w in enumerate(self._worker_of) if w == worker] for worker in range(2)]
    return [*of, []]


def test_each_worker_gets_each_element_once():
  source = InWorkers("s:2,t:2", "a:s", [0, 0, 1, 1])  # The first half in worker 0, twice.
  target = InWorkers("u:2,v:2", "b:u", [0, 1, 0, 1])  # Each half of "b" in both workers.
  plan = cross_mesh.plan_transfers(source, target, SHAPE)
  assert [(p.at, p.replicas) for p in plan] == [(0, (0,)), (1, (1,)), (2, (2,)), (3, (3,))]
  worker_of = [0, 0, 1, 1]
  crossing = [0, 0]
  for assembly in plan:
    worker = target._worker_of[assembly.at]
    assert sum(t.elements for t in assembly.transfers) == SHAPE.size // 2
    for t in assembly.transfers:
      crossing[worker] += t.elements * (worker_of[t.source] != worker)
  # Each has half of the tensor already, and gets the other half.
  assert crossing == [SHAPE.size // 2] * 2


def test_of_a_workers_replicas_one_gets_the_elements():
  source, target = InWorkers("s:2", "a:s", [0, 0]), InWorkers("u:2,v:2", "a:u", [1, 1, 1, 1])
  plan = cross_mesh.plan_transfers(source, target, SHAPE)
  assert [p.replicas for p in plan] == [(0, 1), (2, 3)]
  assert sum(t.elements for p in plan for t in p.transfers) == SHAPE.size
