"""Which blocks go from mesh to mesh: the slices that come of it, and how much is sent."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.meshes import cross_mesh
from tests.kinds import kept

SOURCES = ["s:2", "s:4", "s:2,t:2"]
TARGETS = ["u:2", "u:4", "u:2,v:2", "u:2,v:4"]
SHAPE = mtf.Shape([mtf.Dimension("a", 8), mtf.Dimension("b", 16), mtf.Dimension("c", 24)])
# No size can be divided; of "c" some devices of four have nothing.
UNEVEN = mtf.Shape([mtf.Dimension("a", 7), mtf.Dimension("b", 9), mtf.Dimension("c", 5)])
LAYOUTS = 12


def layouts(mesh: str, seed: str) -> list[str]:
  """Drawn layouts: each mesh dimension splits some tensor dimension, or none."""
  names = mtf.convert_to_shape(mesh).dimension_names
  draw, found = random.Random(f"{mesh} {seed}"), []
  for _ in range(LAYOUTS):
    order = draw.sample(["a", "b", "c", "", ""], len(names))
    found.append(",".join(f"{d}:{m}~" for d, m in zip(order, names) if d))
  return found


def mesh(shape: str, layout: str, first: int) -> mtf.PlacementMeshImpl:
  size = mtf.convert_to_shape(shape).size
  return mtf.PlacementMeshImpl(shape, layout, [f"CPU:{first + i}" for i in range(size)])


def blocks(impl, whole, shape):
  """The slice of each processor, without its padding, as NumPy cuts it."""
  n = impl.slice_shape(shape)
  begins = [impl.slice_begin(shape, p) for p in range(impl.size)]
  return [whole[tuple(slice(b, b + k) for b, k in zip(begin, n))] for begin in begins]


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
@pytest.mark.parametrize("overlap", [0, 1, 8], ids=["same devices", "one apart", "apart"])
@pytest.mark.parametrize("target_shape", kept(TARGETS, ["u:2", "u:2,v:2"]))
@pytest.mark.parametrize("source_shape", kept(SOURCES, ["s:4", "s:2,t:2"]))
def test_each_element_is_sent_once_and_comes_to_its_place(
  source_shape, target_shape, overlap, shape
):
  whole = np.arange(shape.size).reshape(shape.to_integer_list)
  pairs = itertools.product(layouts(source_shape, "from"), layouts(target_shape, "to"))
  for source_layout, target_layout in pairs:
    source = mesh(source_shape, source_layout, 0)
    target = mesh(target_shape, target_layout, overlap)
    slices = blocks(source, whole, shape)
    plan = cross_mesh.plan_transfers(source, target, shape)
    expected = blocks(target, whole, shape)
    for found, wanted in zip(received(plan, slices, target, shape), expected, strict=True):
      np.testing.assert_array_equal(found.ravel(), wanted.ravel())
    sent = cross_mesh.elements_sent(source, target, shape)
    if overlap == 8:
      assert sent == shape.size  # The least: no device of the target has anything of it.
      continue
    # Of each distinct slice of the target some processor must get what its device has not.
    held = {source.devices[p]: s for p, s in enumerate(slices)}
    least = {}
    for p, wanted in enumerate(expected):
      has = np.intersect1d(wanted, held.get(target.devices[p], [])).size
      key = tuple(target.slice_begin(shape, p))
      least[key] = min(least.get(key, wanted.size), wanted.size - has)
    assert sent == sum(least.values())


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
