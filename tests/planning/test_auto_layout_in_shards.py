"""`mtf.auto_layout(..., shard_state=True)`: variables in shards where memory is short."""

import itertools

import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import LayoutError, OutOfMemoryError
from tests.kinds import kept
from tests.planning.test_auto_layout import MACHINE, NAMES, random_program
from tests.planning.test_auto_layout_choices import training_step

WAYS = [None, False, True]  # Whole, gathered once, gathered for each use.


def described(program, mesh, rules, again, results=None):
  """A layout as a mesh without devices describes it."""
  impl = mtf.MeshImpl(mesh, rules)
  if again is not None:
    impl = impl.with_sharded_state([m.name for m in impl.shape], again)
  return mtf.describe(program, mesh_impl=impl, machine=MACHINE, results=results)


def every_layout(program, mesh, names, results=None):
  """(seconds, memory, rules, way) of all layouts of a mesh, whole and in shards."""
  axes = [None, *mtf.convert_to_shape(mesh).dimension_names]
  for places in itertools.product(axes, repeat=len(names)):
    rules = ",".join(f"{d}:{m}" for d, m in zip(names, places) if m is not None)
    for again in WAYS:
      try:
        report = described(program, mesh, rules, again, results)
      except LayoutError:
        break
      yield report.seconds, report.memory.total, rules, again


SEARCHES = [(1, "r:2"), (2, "r:4"), (5, "r:2,s:2"), (6, "r:2,s:2")]


@pytest.mark.parametrize("seed,mesh", kept(SEARCHES, SEARCHES[1:3]))
def test_the_search_finds_what_trying_all_finds(seed, mesh):
  graph, results = random_program(seed)
  every = list(every_layout(graph, mesh, NAMES, results))
  whole = sorted(m for _, m, _, again in every if again is None)
  # What fits unsharded, what hardly any layout does, and what none does.
  for limit in (1e9, whole[len(whole) // 4], whole[0] - 1):
    fitting = [e for e in every if e[1] <= limit]
    given = dict(mesh_shape=mesh, machine=MACHINE, memory_limit=limit, results=results)
    if not fitting:
      with pytest.raises(OutOfMemoryError):
        mtf.auto_layout(graph, **given, shard_state=True)
      continue
    found = mtf.auto_layout(graph, **given, shard_state=True)
    assert found.proven
    assert found.seconds == pytest.approx(min(fitting, key=lambda e: e[0])[0], rel=1e-9)
    for c in (found, *found.alternatives):
      again = c.reshard_after_forward if c.shard_state else None
      report = described(graph, mesh, c.layout, again, results)
      told = (pytest.approx(report.seconds, rel=1e-9), report.memory.total)
      assert (c.seconds, c.memory) == told and c.memory <= limit


def test_what_fits_in_shards_only():
  step = training_step(batch=8, layers=3)
  given = dict(mesh_shape="r:4", machine=MACHINE, fixed="batch:r", time_limit=1e9)
  free = mtf.auto_layout(step, **given, memory_limit=1e9, shard_state=True)
  assert not free.shard_state and "built with" not in str(free)
  with pytest.raises(OutOfMemoryError, match="recomputation or state in shards need less"):
    mtf.auto_layout(step, **given, memory_limit=free.memory // 2)
  found = mtf.auto_layout(step, **given, memory_limit=free.memory // 2, shard_state=True)
  assert found.shard_state == ("r",) and found.memory <= free.memory // 2
  assert found.seconds >= free.seconds * (1 - 1e-9) and "state in shards" in str(found)
  report = described(step, "r:4", found.layout, found.reshard_after_forward)
  assert (found.seconds, found.memory) == (pytest.approx(report.seconds), report.memory.total)
  with pytest.raises(OutOfMemoryError, match="Nearest is state in shards, batch:r on the mesh"):
    mtf.auto_layout(step, **given, memory_limit=found.memory // 8, shard_state=True)


def test_a_mesh_that_is_free():
  step = training_step(batch=8, layers=1)
  whole = mtf.auto_layout(step, devices=4, machine=MACHINE, memory_limit=1e9, fixed="batch:b")
  found = mtf.auto_layout(
    step, devices=4, machine=MACHINE, memory_limit=whole.memory * 0.6, shard_state=True
  )
  assert found.memory <= whole.memory * 0.6
  assert set(found.shard_state) <= set(found.mesh_shape.dimension_names)


def test_a_function_whose_mesh_has_shards_is_searched_with_them():
  io = mtf.Dimension("io", 64)
  impl = mtf.PlacementMeshImpl("r:2", "", ["", ""]).with_sharded_state("r")

  @mtf.function(impl, [mtf.TensorSpec([mtf.Dimension("batch", 4), io])])
  def step(x):
    y = mtf.layers.dense(x, mtf.Dimension("hidden", 256), reduced_dims=[io])
    loss = mtf.reduce_mean(mtf.square(y))
    variables = x.graph.trainable_variables
    gradients = mtf.gradients([loss], [v.value for v in variables])
    mtf.optimize.AdamWOptimizer(0.1).apply_grads(gradients, variables)
    return loss

  found = mtf.auto_layout(step, mesh_shape="r:2", machine=MACHINE, fixed="batch:r")
  report = mtf.describe(step, layout=found.layout, machine=MACHINE)
  assert found.shard_state == ("r",) and report.shard_state == ["r"]
  assert (found.seconds, found.memory) == (pytest.approx(report.seconds), report.memory.total)
