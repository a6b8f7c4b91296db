"""Reshape moves mesh axes between positions of a tensor; no transition may permute the data."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.conformance import framework
from tests.conformance.framework import Layout

KINDS = ("placement", "simd")


def _legal_layouts(names, mesh_axes, sizes=None, mesh_sizes=None):
  """Every assignment of an axis (or none) to each name that uses no axis twice."""
  layouts = []
  for axes in itertools.product([None, *mesh_axes], repeat=len(names)):
    used = [a for a in axes if a is not None]
    if len(set(used)) < len(used):
      continue
    if sizes and any(a and n % mesh_sizes[a] for n, a in zip(sizes, axes)):
      continue
    layouts.append(axes)
  return layouts


def _rules(names, axes):
  return [f"{name}:{axis}" for name, axis in zip(names, axes) if axis is not None]


def _exports(impl, transitions):
  """Reshapes `old` to `new` and back; returns both for each transition."""

  def program():
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "reshape")
    tensors = []
    for old, new in transitions:
      old, new = mtf.convert_to_shape(old), mtf.convert_to_shape(new)
      value = tf.reshape(tf.range(old.size, dtype=tf.float32), old.to_integer_list)
      y = mtf.reshape(mtf.import_tf_tensor(mesh, value, old), new)
      tensors += [y, mtf.reshape(y, old)]
    lowering = mtf.Lowering(graph, {mesh: impl})
    return [lowering.export_to_tf_tensor(t) for t in tensors]

  return impl.run(program)


def _check(kind, layout, transitions, devices):
  exports = iter(_exports(framework.make_impl(kind, layout, devices), transitions))
  for old, new in transitions:
    for shape in (new, old):
      sizes = mtf.convert_to_shape(shape).to_integer_list
      np.testing.assert_array_equal(
        next(exports), np.arange(math.prod(sizes)).reshape(sizes), f"{layout}: {old} -> {new}"
      )


@pytest.mark.parametrize("kind", KINDS)
def test_all_two_axis_transitions(kind, cpu_devices, record_property):
  """[a, b] to [p, q] on a 2x2 mesh: 7 legal layouts before times 7 after."""
  before = _legal_layouts("ab", "rs")
  after = _legal_layouts("pq", "rs")
  assert len(before) * len(after) == 49
  for old, new in itertools.product(before, after):
    rules = _rules("ab", old) + _rules("pq", new)
    _check(kind, Layout("r:2,s:2", ",".join(rules)), [("a:8 b:8", "p:8 q:8")], cpu_devices)
  record_property("conformance_cases", 49)


@pytest.mark.parametrize("kind", KINDS)
def test_two_axis_transitions_on_an_uneven_mesh(kind, cpu_devices, record_property):
  before, after = _legal_layouts("ab", "rs"), _legal_layouts("pq", "rs")
  for old, new in itertools.product(before, after):
    rules = _rules("ab", old) + _rules("pq", new)
    _check(kind, Layout("r:2,s:4", ",".join(rules)), [("a:8 b:8", "p:8 q:8")], cpu_devices)
  record_property("conformance_cases", 49)


def _renamings(mesh_axes):
  """Layouts of [a, b, c] and of [p, q, s] on a mesh of three axes."""
  return list(itertools.product(_legal_layouts("abc", mesh_axes), _legal_layouts("pqs", mesh_axes)))


@pytest.mark.parametrize("kind", KINDS)
def test_renaming_on_a_cube(kind, cpu_devices, record_property):
  """[a, b, c] to [p, q, s] on 2x2x2, every 9th of the 34 x 34 transitions: rotations included."""
  transitions = _renamings("rtu")
  rotation = (("r", "t", "u"), ("t", "u", "r"))
  assert rotation in transitions
  chosen = [
    rotation,
    (("r", "t", "u"), ("u", "r", "t")),
    *transitions[:: 9 if kind == "placement" else 60],
  ]
  for old, new in chosen:
    rules = _rules("abc", old) + _rules("pqs", new)
    layout = Layout("r:2,t:2,u:2", ",".join(rules))
    _check(kind, layout, [("a:2 b:4 c:2", "p:2 q:4 s:2")], cpu_devices)
  record_property("conformance_cases", len(chosen))


REGROUPED = [
  ("a:4 b:8", "p:32"),
  ("a:4 b:8", "p:8 q:4"),
  ("a:4 b:8", "p:2 q:2 s:8"),
  ("a:4 b:8", "p:4 q:2 s:4"),
  ("a:4 b:6", "p:8 q:3"),
  ("a:6 b:4", "p:4 q:6"),
  ("a:12 b:4", "p:4 q:12"),
  ("a:3 b:2", "p:6"),
  ("a:2 b:3 c:4", "p:6 q:4"),
  ("a:2 b:3 c:4", "p:4 q:6"),
  ("a:2 b:4 c:4", "p:8 q:4"),
  ("a:2 b:4 c:4", "p:32"),
  ("a:8 b:1 c:4", "p:8 q:4"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("old,new", REGROUPED)
def test_regrouping(kind, old, new, cpu_devices, record_property):
  """Splits and merges of dimensions, in every pair of layouts of a 2x4 mesh that divides."""
  mesh_sizes = {"r": 2, "s": 4}
  names = [mtf.convert_to_shape(s).dimension_names for s in (old, new)]
  sizes = [mtf.convert_to_shape(s).to_integer_list for s in (old, new)]
  pairs = list(
    itertools.product(*[_legal_layouts(n, "rs", s, mesh_sizes) for n, s in zip(names, sizes)])
  )
  if kind == "simd":
    pairs = pairs[:: max(1, len(pairs) // 12)]
  for before, after in pairs:
    rules = _rules(names[0], before) + _rules(names[1], after)
    # `s` is also a dimension: rules name the mesh axis on the right.
    _check(kind, Layout("r:2,s:4", ",".join(rules)), [(old, new)], cpu_devices)
  record_property("conformance_cases", len(pairs))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rules", ["x:r,x2:s", "x:s,x2:r", "x:r", "x2:s", "x2:r,y:s"])
def test_rename_between_axes(kind, rules, cpu_devices):
  """The simplest case that the TF1 library got wrong."""
  _check(kind, Layout("r:2,s:4", rules), [("x:8 y:4", "x2:8 y:4")], cpu_devices)


def test_pending_sum_stays_pending_through_a_local_reshape(cpu_devices):
  impl = framework.make_impl("placement", Layout("r:2", "a:r"), cpu_devices)
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "reshape")
  x = mtf.import_tf_tensor(mesh, np.ones([8, 4], np.float32), "a:8 b:4")
  y = mtf.reduce_sum(x, reduced_dim=("a", 8))
  renamed = mtf.rename_dimension(y, "b", "bb") + mtf.rename_dimension(y, "b", "bb")
  lowering = mtf.Lowering(graph, {mesh: impl})
  np.testing.assert_array_equal(lowering.export_to_tf_tensor(renamed), np.full([4], 16.0))
  allreduces = [value for key, value in lowering.counters if key.startswith("allreduce")]
  assert allreduces == [8]


def test_renaming_to_an_unsplit_name_is_one_allconcat(cpu_devices):
  impl = framework.make_impl("placement", Layout("r:2", "a:r"), cpu_devices)
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "reshape")
  x = mtf.import_tf_tensor(mesh, np.ones([8, 4], np.float32), "a:8 b:4")
  mtf.rename_dimension(x, "a", "q")
  lowering = mtf.Lowering(graph, {mesh: impl})
  moved = [(k, v) for k, v in lowering.counters if k.split("/")[0] in ("allconcat", "alltoall")]
  assert moved == [("allconcat/0/reshape_op", 64)]
