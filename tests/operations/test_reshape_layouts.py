"""Reshape moves mesh axes between positions of a tensor; no transition may permute the data."""

from __future__ import annotations

import collections
import functools
import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.operations.redistribute import plan_reshape
from tests.conformance import framework
from tests.conformance.framework import Layout
from tests.kinds import in_turns, kept

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


# Sizes of the mesh axes, and of the tensor axes.
RENAMINGS = {
  "2x2x2": ((2, 2, 2), (4, 4, 4)),
  "2x1x3": ((2, 1, 3), (6, 6, 6)),
  "2x4": ((2, 4), (8, 8)),
  "2x3": ((2, 3), (6, 6)),
}


# In `make test` each mesh, each kind of exchange, and the cube on most of them.
USUAL_RENAMINGS = [
  ("2x2x2", "placement"), ("2x2x2", "queues"), ("2x1x3", "threads"),
  ("2x4", "placement"), ("2x3", "queues"), ("2x3", "runtime"),
]  # fmt: skip


@pytest.mark.parametrize(
  ("case", "kind"),
  kept(
    list(itertools.product(RENAMINGS, ["placement", "threads", "queues", "runtime"])),
    USUAL_RENAMINGS,
  ),
)
@pytest.mark.slow
def test_renaming_from_any_layout_to_any_other(case, kind, cpu_devices, record_property):
  """Many transitions in one program: on 2x2x2 some of the 34 x 34 of [a, b, c] to [p, q, s]."""
  # Tracing, and TensorFlow's collectives above all, take their time.
  if len(RENAMINGS[case][0]) == 3:
    part = {"placement": 5 if case == "2x2x2" else 19, "threads": 19, "queues": 73, "runtime": 193}
  else:
    part = {"placement": 1, "threads": 1, "queues": 3, "runtime": 8}
  record_property("conformance_cases", _check_renamings(case, kind, part[kind], cpu_devices))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["placement", "threads"])
def test_all_renamings_on_a_cube(kind, cpu_devices):
  assert _check_renamings("2x2x2", kind, 1, cpu_devices) == 34 * 34 + 2


def _check_renamings(case, kind, part, devices):
  """Every layout has names of its own, and a reshape leads from any of them to any other.

  Of all transitions, one in `part`. Returns how many these are.
  """
  mesh_sizes, sizes = RENAMINGS[case]
  axes = ("r", "t", "u")[: len(mesh_sizes)]
  chosen = _legal_layouts("abc"[: len(sizes)], axes)
  assert len(chosen) == {2: 7, 3: 34}[len(axes)]
  shapes, rules = [], []
  for i, layout in enumerate(chosen):
    names = [f"{n}{i}" for n in "abc"]
    rules += _rules(names, layout)
    shapes.append(mtf.Shape([mtf.Dimension(n, size) for n, size in zip(names, sizes)]))
  transitions = list(itertools.product(shapes, repeat=2))
  if len(axes) == 3:
    i, j = chosen.index(("r", "t", "u")), chosen.index(("t", "u", "r"))
    transitions = transitions[::part] + [(shapes[i], shapes[j]), (shapes[j], shapes[i])]
  else:
    transitions = transitions[::part]
  mesh_shape = ",".join(f"{a}:{n}" for a, n in zip(axes, mesh_sizes))
  if kind == "placement":
    impl = framework.make_impl(kind, Layout(mesh_shape, ",".join(rules)), devices)
  else:
    impl = mtf.simd_mesh_impl.SimdMeshImpl(
      mesh_shape,
      ",".join(rules),
      devices[: math.prod(mesh_sizes)],
      collectives="auto" if kind == "threads" else kind,
      timeout_seconds=60,
    )
  value = np.arange(math.prod(sizes), dtype=np.float32).reshape(sizes)

  def program():
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "reshape")
    laid_out = {s: mtf.import_tf_tensor(mesh, value, s) for s in shapes}
    results = [mtf.reshape(laid_out[old], new) for old, new in transitions]
    lowering = mtf.Lowering(graph, {mesh: impl})
    return [lowering.export_to_tf_tensor(y) for y in results]

  run = functools.partial(impl.run, program)
  if kind in ("queues", "runtime"):
    run = tf.function(run, autograph=False)
  for y, (old, new) in zip(run(), transitions):
    np.testing.assert_array_equal(y, value, f"{rules}: {old} -> {new}")
  return len(transitions)


def _planned_counters(impl, old, new):
  """What the plan of a reshape makes the lowering count, by key."""
  counters = collections.Counter()
  size = impl.slice_size(old)
  for step in plan_reshape(impl, old, new).steps:
    axes = step.mesh_axes[0] if len(step.mesh_axes) == 1 else list(step.mesh_axes)
    n = math.prod(impl.shape[m].size for m in step.mesh_axes)
    if step.kind == "permute":
      unit = size // math.prod(step.view[i] for i in step.unit_axes)
      for moved in step.rounds:
        counters[f"permute/{axes}/reshape_op"] += len(moved.pick[0]) * unit * impl.size
      size = unit * math.prod(step.new_view[i] for i in step.unit_axes)
    elif step.kind == "allsplit":
      size //= n
    else:
      size *= n if step.kind == "allconcat" else 1
      counters[f"{step.kind}/{axes}/reshape_op"] += size * impl.size
  assert size == impl.slice_size(new)
  return counters


PLANNED = list(itertools.product(["r:2,s:2", "r:2,s:4", "r:2,s:3", "r:1,s:4"], KINDS))


@pytest.mark.parametrize(("mesh", "kind"), kept(PLANNED, in_turns(PLANNED)))
def test_what_runs_is_what_was_planned(mesh, kind, cpu_devices, record_property):
  """The counters of the 49 transitions; and a description of the program has the same bytes."""
  before, after = _legal_layouts("ab", "rs"), _legal_layouts("pq", "rs")
  shapes = mtf.convert_to_shape("a:12 b:24"), mtf.convert_to_shape("p:12 q:24")
  pairs = list(itertools.product(before, after))
  for old, new in pairs if kind == "placement" else pairs[::5]:
    rules = ",".join(_rules("ab", old) + _rules("pq", new))
    impl = framework.make_impl(kind, Layout(mesh, rules), cpu_devices)
    seen = {}

    def program(impl=impl, seen=seen):
      graph = mtf.Graph()
      x = mtf.import_tf_tensor(mtf.Mesh(graph, "reshape"), tf.zeros([12, 24]), shapes[0])
      y = mtf.reshape(x, shapes[1])
      lowering = mtf.Lowering(graph, {y.mesh: impl})
      seen["graph"] = graph
      seen["counters"] = collections.Counter()
      for key, value in lowering.counters:
        seen["counters"][key] += value if key.endswith("/reshape_op") else 0
      return lowering.export_to_tf_tensor(y)

    impl.run(program)
    assert +seen["counters"] == _planned_counters(impl, *shapes), rules
    if kind == "placement":
      received = plan_reshape(impl, *shapes).received
      moved = mtf.describe(seen["graph"], rules, mesh).bytes_moved()
      assert sum(moved.values()) == 4 * received, rules
  record_property("conformance_cases", len(pairs))


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


REGROUPINGS = [(kind, *case) for case in REGROUPED for kind in KINDS]


# In `make test` each on one of the two kinds of mesh, which take turns.
@pytest.mark.parametrize(("kind", "old", "new"), kept(REGROUPINGS, in_turns(REGROUPINGS)))
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


# Mesh, layout of x:[a, b, c] and of the result [p, q] of x summed over a; the exchanges.
SUMS = [
  ("r:4", "a:r,p:r", ["reduce_scatter"]),
  ("r:4", "a:r,q:r", ["reduce_scatter"]),
  ("r:4", "a:r", ["allreduce"]),
  ("r:2,s:4", "a:r,p:r,b:s,q:s", ["receive", "receive", "reduce_scatter"]),
  ("r:2,s:4", "a:r,b:s,q:r,p:s", ["reduce_scatter"]),
  ("r:2,s:4", "a:r,p:s", ["allreduce"]),
  ("r:2,s:4", "a:r,c:s,p:r,q:s", ["reduce_scatter"]),
]


@pytest.mark.parametrize("kind", ["placement", "threads", "queues", "runtime"])
@pytest.mark.parametrize(("mesh_shape", "rules", "exchanges"), SUMS)
def test_only_the_needed_part_of_a_pending_sum(mesh_shape, rules, exchanges, kind, cpu_devices):
  """A sum over a mesh axis along which it is then split is a reduce-scatter."""
  if kind == "placement":
    impl = framework.make_impl(kind, Layout(mesh_shape, rules), cpu_devices)
  else:
    impl = mtf.simd_mesh_impl.SimdMeshImpl(
      mesh_shape,
      rules,
      cpu_devices[: mtf.convert_to_shape(mesh_shape).size],
      collectives="auto" if kind == "threads" else kind,
      timeout_seconds=60,
    )
  value = np.random.default_rng(0).integers(0, 50, [4, 8, 8]).astype(np.float32)
  seen = {}

  def program():
    graph = mtf.Graph()
    x = mtf.import_tf_tensor(mtf.Mesh(graph, "sum"), value, "a:4 b:8 c:8")
    total = mtf.reduce_sum(x, reduced_dim=("a", 4))
    y = mtf.reshape(total + total, [("p", 8), ("q", 8)])
    lowering = mtf.Lowering(graph, {x.mesh: impl})
    seen.update(graph=graph, counters=lowering.counters, y=y)
    return lowering.export_to_tf_tensor(y)

  run = functools.partial(impl.run, program)
  if kind in ("queues", "runtime"):
    run = tf.function(run, autograph=False)
  np.testing.assert_array_equal(run(), 2 * value.sum(0))
  counted = [key for key, _ in seen["counters"] if key == "allreduce/[0]/reduce_op"]
  assert len(counted) == 1
  report = mtf.describe(seen["graph"], rules, mesh_shape, results=[seen["y"]])
  planned = [c.kind for op in report.operations for c in op.collectives]
  assert sorted(planned) == exchanges


def test_a_sum_over_two_mesh_axes_stays_pending_over_the_other(cpu_devices):
  rules, value = "a:r,b:s,q:s", np.arange(4 * 4 * 8, dtype=np.float32).reshape(4, 4, 8)
  impl = framework.make_impl("placement", Layout("r:2,s:4", rules), cpu_devices)
  graph = mtf.Graph()
  x = mtf.import_tf_tensor(mtf.Mesh(graph, "sum"), value, "a:4 b:4 c:8")
  y = mtf.rename_dimension(mtf.reduce_sum(x, output_shape=[("c", 8)]), "c", "q")
  lowering = mtf.Lowering(graph, {x.mesh: impl})
  assert isinstance(lowering.tensors[y], mtf.LazyAllreduceSum)
  assert lowering.tensors[y].mesh_axes == [0]
  np.testing.assert_array_equal(lowering.export_to_tf_tensor(y), value.sum((0, 1)))
  report = mtf.describe(graph, rules, "r:2,s:4", results=[y])
  # A slice is 8 floats before, 2 afterwards.
  assert report.bytes_moved() == {"r": 2 * 2 * 4 // 2, "s": 3 * 8 * 4 // 4}


def test_a_sum_that_is_needed_whole_is_made_once(cpu_devices):
  rules, value = "a:r,q:r", np.ones([8, 4], np.float32)
  graph = mtf.Graph()
  x = mtf.import_tf_tensor(mtf.Mesh(graph, "sum"), value, "a:8 b:4")
  total = mtf.reduce_sum(x, reduced_dim=("a", 8))
  part, whole = mtf.rename_dimension(total, "b", "q"), mtf.relu(total)
  report = mtf.describe(graph, rules, "r:2", results=[part, whole])
  assert [c.kind for op in report.operations for c in op.collectives] == ["allreduce"]
  impl = framework.make_impl("placement", Layout("r:2", rules), cpu_devices)
  lowering = mtf.Lowering(graph, {x.mesh: impl})
  for y in (part, whole):
    np.testing.assert_array_equal(lowering.export_to_tf_tensor(y), np.full([4], 8.0))


def test_renaming_to_an_unsplit_name_is_one_allconcat(cpu_devices):
  impl = framework.make_impl("placement", Layout("r:2", "a:r"), cpu_devices)
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "reshape")
  x = mtf.import_tf_tensor(mesh, np.ones([8, 4], np.float32), "a:8 b:4")
  mtf.rename_dimension(x, "a", "q")
  lowering = mtf.Lowering(graph, {mesh: impl})
  moved = [(k, v) for k, v in lowering.counters if k.split("/")[0] in ("allconcat", "alltoall")]
  assert moved == [("allconcat/0/reshape_op", 64)]
