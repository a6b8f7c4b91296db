"""Workspace of TensorFlow's convolution kernels, in the memory of a plan."""

from __future__ import annotations

import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.operations import convolution
from tests.operations.comparing import placement


def operations(x, w, layout="", mesh="r:1"):
  """By role of what is computed, the convolution and its gradients, and their mesh."""
  graph = mtf.Graph()
  m = mtf.Mesh(graph, "m")
  image, kernel = mtf.zeros(m, x), mtf.zeros(m, w)
  y = mtf.convolution(image, kernel)
  mtf.gradients([y], [image, kernel])
  found = {op.roles[2]: op for op in graph.operations if isinstance(op, convolution.Convolution)}
  return found, placement(layout, mesh)


def workspace(x, w, role, layout="", mesh="r:1"):
  found, impl = operations(x, w, layout, mesh)
  return found[role].workspace_of_slice(impl)


VOLUME = "b:1 d:48 h:48 w:48 i:8", "fd:3 fh:3 fw:3 i:8 o:4"


def test_forward_takes_none():
  assert workspace(*VOLUME, "features") == 0


def test_the_gradient_of_an_image_by_a_reversed_filter_takes_none():
  assert workspace(*VOLUME, "image") == 0


def test_the_gradient_of_a_filter_copies_what_windows_of_some_planes_see():
  """The 28.5 MiB that a process was seen to grow by, for 45 of 48 planes; and the operands."""
  voxels = 48**3
  cut = going_on = voxels * (8 + 4) * 4
  assert workspace(*VOLUME, "filter") == 45 * 48 * 48 * (9 * 8) * 4 + cut + going_on
  assert 45 * 48 * 48 * (9 * 8) * 4 / 2**20 == pytest.approx(28.5, abs=0.05)


def test_frames_of_split_space_are_counted():
  frame = 18 * 16 * 8 * 8 * 4  # Of 16 of 32 rows, with one before and one behind.
  x, w = "b:1 d:32 h:16 w:8 i:8", "fd:3 fh:1 fw:1 i:8 o:4"
  assert workspace(x, w, "features", "d:r", "r:2") == frame


def test_a_plan_has_the_workspace_at_its_peak():
  x, w = VOLUME
  found, impl = operations(x, w)
  op = found["filter"]
  plan = mtf.describe(
    op.graph, impl.layout_rules, impl.shape, results=[op.outputs[0], found["image"].outputs[0]]
  )
  needed = op.workspace_of_slice(impl)
  assert plan.memory.peak_operation == op.name
  assert needed < plan.memory.activations < needed + 48**3 * 4 * (8 + 8 + 4 + 4) + 2**16
