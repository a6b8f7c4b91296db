import dataclasses
import itertools
import random

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import ArgumentError, ConfigError, LayoutError, OutOfMemoryError
from mesh_tensorflow.planning import Machine
from mesh_tensorflow.planning.search import Search, _factorizations
from mesh_tensorflow.planning.text import format_seconds
from tests.planning import whole_lowering
from tests.planning.test_machine import fields

# Exchanges cost about as much as computing here, so that layouts differ.
MACHINE = Machine.from_dict(fields(links__1__bandwidth=2e9, links__1__latency=1e-7))
NAMES = "abcd"


def random_program(seed):
  """A graph of some of the operations, with a loss, gradients and updates; and its results."""
  draw = random.Random(seed)
  dims = [mtf.Dimension(n, draw.choice([4, 8, 12, 64])) for n in NAMES]
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  x = mtf.import_tf_tensor(mesh, np.ones([d.size for d in dims[:2]], np.float32), dims[:2])
  for i in range(draw.randint(2, 4)):
    kind = draw.choice(["dense", "dense", "relu", "rename", "sum", "softmax"])
    new = draw.choice([d for d in dims if d not in x.shape.dims])
    last = x.shape.dims[-1]
    if kind == "dense":
      w = mtf.get_variable(mesh, f"w{i}", [last, new])
      x = mtf.einsum([x, w], output_shape=[*x.shape.dims[:-1], new])
    elif kind == "relu":
      x = mtf.relu(x) + x
    elif kind == "rename" and len(x.shape) > 1:
      x = mtf.reshape(x, [*x.shape.dims[:-1], mtf.Dimension(new.name, last.size)])
      x = mtf.reshape(x, [*x.shape.dims[:-1], last])
    elif kind == "sum" and len(x.shape) > 1:
      w = mtf.get_variable(mesh, f"v{i}", [x.shape.dims[0], new])
      x = x + mtf.broadcast(mtf.reduce_sum(x, reduced_dim=last), x.shape)
      x = mtf.einsum([x, w], output_shape=[new, last])
    else:
      x = mtf.softmax(x, last)
  loss = mtf.reduce_mean(mtf.square(x))
  variables = graph.trainable_variables
  if variables:
    gradients = mtf.gradients([loss], [v.value for v in variables])
    mtf.optimize.SgdOptimizer(learning_rate=0.1).apply_grads(gradients, variables)
  return graph, [loss]


def exhaustive(graph, results, mesh):
  """(seconds, memory, rules) of every legal layout, by lowerings of the whole program."""
  found = []
  shape = mtf.convert_to_shape(mesh)
  choices = [None, *shape.dimension_names]
  for axes in itertools.product(choices, repeat=len(NAMES)):
    rules = ",".join(f"{d}:{m}" for d, m in zip(NAMES, axes) if m is not None)
    try:
      costs = whole_lowering.costs(graph, rules, shape, MACHINE, results)
    except LayoutError:
      with pytest.raises(LayoutError):
        mtf.describe(graph, rules, shape, results=results)
      continue
    found.append((costs.seconds, costs.memory, rules))
  return sorted(found)


def check_against_all(seed, mesh):
  graph, results = random_program(seed)
  every = exhaustive(graph, results, mesh)
  assert len(every) > 3
  for limit in (1e9, sorted(m for _, m, _ in every)[len(every) // 3]):
    best = min(s for s, m, _ in every if m <= limit)
    found = mtf.auto_layout(
      graph, mesh_shape=mesh, machine=MACHINE, memory_limit=limit, results=results
    )
    assert found.proven
    assert found.seconds == pytest.approx(best, rel=1e-9)
    assert found.memory <= limit
    # The alternatives follow it, and each costs what a whole lowering says.
    told = [found, *found.alternatives]
    assert [c.seconds for c in told] == sorted(c.seconds for c in told)
    for choice in (told[0], told[-1]):
      check_against_whole(choice, graph, MACHINE, results)


def check_against_whole(choice, program, machine, results=None):
  """A found layout, searched and described, costs what a lowering of the whole program says."""
  given = {"layout": choice.layout, "mesh_shape": choice.mesh_shape, "results": results}
  whole = whole_lowering.costs(program, machine=machine, **given)
  report = mtf.describe(program, machine=machine, **given)
  told = [
    (op.times, (c.kind, c.mesh_axes, sorted(c.bytes_over.items())))
    for op in report.operations
    for c in op.collectives
  ]
  assert sorted((*c, times) for times, c in told) == whole.collectives
  assert choice.seconds == pytest.approx(whole.seconds, rel=1e-9)
  assert report.seconds == pytest.approx(whole.seconds, rel=1e-9)
  assert choice.memory == report.memory.total == whole.memory
  assert report.memory.activations == whole.activations


@pytest.mark.parametrize(
  ("seed", "mesh"), [(0, "r:2"), (1, "r:4"), (2, "r:2,s:2"), (13, "r:4,s:2")]
)
def test_the_search_finds_what_trying_all_finds(seed, mesh):
  check_against_all(seed, mesh)


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["r:4", "r:2,s:2", "r:4,s:2"])
@pytest.mark.parametrize("seed", range(10, 18))
def test_the_search_finds_what_trying_all_finds_in_more_programs(seed, mesh):
  check_against_all(seed, mesh)


def training_step(batch=64, hidden=4096, mesh_impl=None):
  dims = [mtf.Dimension(*d) for d in [("batch", batch), ("io", 64), ("hidden", hidden)]]
  batch, io, hidden = dims
  impl = mesh_impl or mtf.PlacementMeshImpl("all:1", "", [""])

  @mtf.function(impl, [mtf.TensorSpec([batch, io])])
  def step(x):
    h = mtf.layers.dense(x, hidden, reduced_dims=[io], activation=mtf.relu, name="in")
    out = mtf.layers.dense(h, io, reduced_dims=[hidden], name="out")
    loss = mtf.reduce_mean(mtf.square(out - x))
    mtf.optimize.AdafactorOptimizer(learning_rate=0.05).minimize(loss)
    return loss

  return step


def rules(choice):
  return {d: choice.mesh_shape.dimension_names.index(m) for d, m in choice.layout.pairs}


def test_a_wide_layer_is_split_by_its_width_and_many_examples_by_the_batch():
  wide = mtf.auto_layout(training_step(512, 2**16), mesh_shape="all:4", machine="tpu-v4")
  assert rules(wide) == {"hidden": 0}
  many = mtf.auto_layout(training_step(2**18, 64), mesh_shape="all:4", machine="tpu-v4")
  assert rules(many) == {"batch": 0}


def test_a_free_mesh_is_chosen_too():
  step = training_step(512, 2**14)
  best = mtf.auto_layout(step, devices=8, machine=MACHINE, memory_limit=1e9)
  assert best.mesh_shape.size == 8 and best.proven
  for mesh in ("a:8", "a:4,b:2", "a:2,b:4", "a:2,b:2,c:2"):
    given = mtf.auto_layout(step, mesh_shape=mesh, machine=MACHINE, memory_limit=1e9)
    assert best.seconds <= given.seconds * (1 + 1e-9)
  text = str(best)
  assert "no layout is faster" in text and "a device" in text
  assert max(len(line) for line in text.split("\n")) <= 100
  assert text.count("\n") >= 2 + len(best.alternatives)


def test_a_memory_limit_changes_the_choice_and_no_layout_may_fit():
  step = training_step(8, 2**14)
  free = mtf.auto_layout(step, mesh_shape="all:4", machine=MACHINE, memory_limit=1e9)
  needed = sorted({free.memory, *(c.memory for c in free.alternatives)})
  tight = mtf.auto_layout(step, mesh_shape="all:4", machine=MACHINE, memory_limit=needed[0])
  assert tight.memory == needed[0] <= free.memory
  with pytest.raises(OutOfMemoryError) as e:
    mtf.auto_layout(step, mesh_shape="all:4", machine=MACHINE, memory_limit=10_000)
  message = str(e.value)
  assert "no layout fits into the 9.77 KiB of a device, of 4" in message
  assert "Nearest is " in message and "hidden:all" in message
  assert "in/kernel" in message and "activations" in message


def test_one_device_is_a_mesh_too():
  found = mtf.auto_layout(training_step(), devices=1, machine=MACHINE, fixed="hidden:model")
  assert (found.mesh_shape.size, found.proven) == (1, True)
  assert mtf.auto_layout(training_step(), devices=1, machine=MACHINE).layout.pairs == []


def test_fixed_rules_are_kept():
  step = training_step()
  kept = mtf.auto_layout(step, mesh_shape="r:2,s:2", machine=MACHINE, fixed="hidden:r")
  assert ("hidden", "r") in kept.layout.pairs
  free = mtf.auto_layout(step, devices=4, machine=MACHINE, fixed="hidden:model", alternatives=2)
  assert ("hidden", "model") in free.layout.pairs
  assert len(free.alternatives) == 2


@pytest.mark.parametrize(
  ("changes", "error", "message"),
  [
    ({}, ArgumentError, "takes either devices=8 or mesh_shape"),
    ({"devices": 4, "mesh_shape": "a:4"}, ArgumentError, "takes either"),
    ({"devices": 0}, ArgumentError, "at least 1, got 0"),
    ({"devices": 4, "alternatives": -1}, ArgumentError, "alternatives must not be negative"),
    ({"devices": 4, "memory_limit": 0.0}, ArgumentError, r"memory_limit \(bytes\) positive"),
    (
      {"devices": 4, "fixed": "io:a,hidden:b,batch:c"},
      LayoutError,
      r"no mesh of 4 devices has a dimension of size 2 or more for each .* names \(a, b, c\)",
    ),
    ({"devices": 4, "machine": "tpu-v9"}, ConfigError, "there is no machine 'tpu-v9'"),
    ({"mesh_shape": "a:7"}, LayoutError, "a:7 divides no dimension .*batch:64.*hidden:4096"),
    ({"devices": 7}, LayoutError, "no mesh of 7 devices suits the program: mesh dimension"),
    ({"mesh_shape": "a:2", "fixed": "hiden:a"}, LayoutError, "did you mean 'hidden'"),
    ({"mesh_shape": "a:2", "fixed": "io:b"}, LayoutError, "fixed rule io:b: the mesh .* has no"),
    ({"mesh_shape": "a:3", "fixed": "io:a"}, LayoutError, "io has size 64, which a:3 does not"),
    (
      {"mesh_shape": "a:2", "fixed": "io:a,hidden:a"},
      LayoutError,
      "fixed contradicts the program: hidden:a and io:a split Tensor.* over mesh dimension a twice",
    ),
  ],
)
def test_wrong_arguments(changes, error, message):
  with pytest.raises(error, match=message):
    mtf.auto_layout(training_step(), **changes)


def test_dimensions_that_operations_forbid_are_not_split():
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  x = mtf.import_tf_tensor(mesh, np.ones([64, 64], np.float32), [("a", 64), ("b", 64)])
  own = mtf.slicewise(lambda t: tf.cumsum(t, 1) * 2, [x], splittable_dims=[x.shape.dims[0]])
  found = mtf.auto_layout(graph, mesh_shape="r:2", machine=MACHINE, results=[mtf.reduce_sum(own)])
  assert rules(found) in ({}, {"a": 0})
  with pytest.raises(LayoutError, match="fixed rule b:r: .*b"):
    mtf.auto_layout(graph, mesh_shape="r:2", machine=MACHINE, fixed="b:r")


def test_a_search_that_is_stopped_is_not_proven():
  step = training_step()
  found = mtf.auto_layout(step, mesh_shape="r:2,s:2", machine=MACHINE, time_limit=1e9)
  assert found.proven
  stopped = mtf.auto_layout(step, mesh_shape="r:2,s:2", machine=MACHINE, time_limit=0.0)
  assert not stopped.proven and stopped.seconds >= found.seconds
  assert "search was not complete" in str(stopped)


def test_a_search_that_is_stopped_finds_a_layout_where_one_fits():
  step = training_step()
  unsplit = mtf.describe(step, "", "r:2,s:2", machine=MACHINE).memory.total
  limits = {"memory_limit": unsplit - 1, "machine": MACHINE}
  found = mtf.auto_layout(step, mesh_shape="r:2,s:2", time_limit=1e9, **limits)
  least = min(c.memory for c in [found, *found.alternatives])
  stopped = mtf.auto_layout(step, mesh_shape="r:2,s:2", time_limit=1e-9, **limits)
  assert stopped.memory < unsplit
  with pytest.raises(OutOfMemoryError, match="no layout was found that fits"):
    mtf.auto_layout(
      step, mesh_shape="r:2,s:2", time_limit=1e-9, machine=MACHINE, memory_limit=least // 8
    )


def test_layouts_that_differ_by_a_rule_without_weight_are_one_row():
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  x = mtf.import_tf_tensor(mesh, np.ones([512, 512], np.float32), [("a", 512), ("b", 512)])
  w = mtf.get_variable(mesh, "w", [("b", 512), ("c", 512)])
  y = mtf.reduce_sum(mtf.einsum([x, w], output_shape=[("a", 512), ("c", 512)]))
  small = mtf.ones(mesh, [("tiny", 2)])
  found = mtf.auto_layout(
    graph, mesh_shape="r:2,s:2", machine=Machine.load("cpu"), results=[y, small], alternatives=30
  )
  rows = [rules(c) for c in [found, *found.alternatives]]
  without = [{d: a for d, a in r.items() if d != "tiny"} for r in rows]
  assert all(without.count(r) == 1 for r in without)


def test_loops_are_timed_as_a_whole():
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  x = mtf.import_tf_tensor(mesh, np.ones([64, 64], np.float32), [("a", 64), ("b", 64)])
  w = mtf.get_variable(mesh, "w", [("b", 64), ("c", 64)])

  def body(i, y):
    h = mtf.einsum([y, w], output_shape=[("a", 64), ("c", 64)])
    return [i + 1, mtf.einsum([h, w], output_shape=y.shape)]

  results = mtf.while_loop(
    lambda i, y: mtf.less(i, 3),
    body,
    [mtf.constant(mesh, 0, dtype=tf.int32), x],
    maximum_iterations=3,
  )
  found = mtf.auto_layout(graph, mesh_shape="r:2", machine=MACHINE, results=results)
  check_against_whole(found, graph, MACHINE, results)


def test_what_is_not_used_counts_as_in_a_whole_lowering():
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  x = mtf.import_tf_tensor(mesh, np.ones([64, 64], np.float32), [("a", 64), ("b", 64)])
  unused = mtf.import_tf_tensor(mesh, np.ones([8], np.float32), [("c", 8)])
  mtf.slicewise(lambda t: t * 2, [unused], splittable_dims=[])
  results = [mtf.reduce_sum(mtf.square(x))]
  found = mtf.auto_layout(graph, mesh_shape="r:2", machine=MACHINE, results=results)
  check_against_whole(found, graph, MACHINE, results)
  with pytest.raises(LayoutError, match="fixed rule c:r: "):
    mtf.auto_layout(graph, mesh_shape="r:2", machine=MACHINE, results=results, fixed="c:r")


def test_factorizations():
  assert list(_factorizations(8, 1)) == [(8,)]
  assert list(_factorizations(12, 2)) == [(6, 2), (4, 3), (3, 4), (2, 6)]
  assert list(_factorizations(8, 3)) == [(2, 2, 2)]
  assert list(_factorizations(1, 1)) == []


def test_why_nothing_is_split():
  """Exchanges of a small program take more time than is saved; both figures are told."""
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  x = mtf.import_tf_tensor(mesh, np.ones([4, 4], np.float32), mtf.Shape([("a", 4), ("b", 4)]))
  w = mtf.get_variable(mesh, "w", mtf.Shape([("b", 4), ("c", 4)]))
  result = mtf.reduce_sum(mtf.einsum([x, w], output_shape=mtf.Shape([("a", 4), ("c", 4)])))
  machine = Machine.from_dict(fields(links__1__latency=1.0))
  found = mtf.auto_layout(graph, mesh_shape="r:2", machine=machine, results=[result])
  assert not found.layout.pairs
  best = next(c for c in found.alternatives if c.layout.pairs)
  seconds = [format_seconds(c.seconds) for c in (found, best)]
  why = found.why_unsplit()
  assert f"take {seconds[0]}, and {seconds[1]} by the best layout that splits something" in why
  assert ",".join(f"{t}:{m}" for t, m in best.layout.pairs) in why
  assert why[:30] in str(found)
  assert (
    best.why_unsplit() == "" == dataclasses.replace(found, mesh_shape=mtf.Shape([])).why_unsplit()
  )
  alone = dataclasses.replace(found, alternatives=(), proven=False, search_seconds=2.0)
  assert alone.why_unsplit().endswith("splits anything; the search ended after 2.0 s")


def test_seeds_are_not_split():
  """A state of random numbers is two integers; to split it saves nothing, and is no alternative."""
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  a, seeds = mtf.Dimension("a", 64), mtf.Dimension("seeds", 2)
  x = mtf.import_tf_tensor(mesh, np.ones([64], np.float32), mtf.Shape([a]))
  seed = mtf.import_tf_tensor(mesh, np.ones([2], np.int32), mtf.Shape([seeds]))
  results = [mtf.square(x), seed + 1]
  found = mtf.auto_layout(graph, mesh_shape="r:2", machine=MACHINE, results=results)
  rules = sorted(c.layout.pairs for c in (found, *found.alternatives))
  assert rules == [[], [("a", "r")]]
  # A rule by hand may.
  fixed = mtf.auto_layout(
    graph, mesh_shape="r:2", machine=MACHINE, results=results, fixed="seeds:r"
  )
  assert ("seeds", "r") in fixed.layout.pairs


def test_a_search_has_a_good_layout_from_the_start(monkeypatch):
  """One that splits several dimensions, before the first branch."""
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  a, b, c, d = (mtf.Dimension(n, 512) for n in NAMES)
  x = mtf.import_tf_tensor(mesh, np.ones([512, 512], np.float32), mtf.Shape([a, b]))
  x = mtf.einsum([x, mtf.get_variable(mesh, "v", [b, c])], output_shape=[a, c])
  results = [mtf.einsum([x, mtf.get_variable(mesh, "w", [c, d])], output_shape=[a, d])]
  arguments = dict(mesh_shape="r:2,c:2", machine=MACHINE, results=results)
  best = mtf.auto_layout(graph, **arguments)
  monkeypatch.setattr(Search, "descend", lambda *args: None)
  found = mtf.auto_layout(graph, **arguments)
  assert len(found.layout.pairs) > 1
  assert found.seconds == best.seconds
