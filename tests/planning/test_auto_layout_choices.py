"""`mtf.auto_layout` of programs with loops, and of several programs that do the same."""

import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import ArgumentError, LayoutError, OutOfMemoryError
from mesh_tensorflow.planning.program import read_once
from tests.planning.test_auto_layout import MACHINE, check_against_whole

MESH = "r:4"


def training_step(microbatches=1, batch=256, *, recompute=False, layers=2):
  """Dense layers with a sum that is pending, a norm and an optimizer with slots."""
  batch, io, hidden = [mtf.Dimension(*d) for d in [("batch", batch), ("io", 64), ("hidden", 256)]]
  impl = mtf.PlacementMeshImpl("all:1", "", [""])

  @mtf.function(impl, [mtf.TensorSpec([batch, io])])
  def step(x):
    def layer(h, i):
      inside = mtf.layers.dense(h, hidden, reduced_dims=[io], activation=mtf.relu, name=f"in{i}")
      return mtf.softmax(mtf.layers.dense(inside, io, reduced_dims=[hidden], name=f"out{i}"), io)

    def model(features):
      h = features["x"]
      for i in range(layers):
        if recompute:
          h = mtf.recompute_grad(lambda h, i=i: layer(h, i), [h])
        else:
          h = layer(h, i)
      return {"loss": mtf.reduce_mean(mtf.square(h - features["x"]))}

    if microbatches > 1:
      grads, out = mtf.serialize_training_step({"x": x}, model, batch, microbatches)
      loss = out["loss"]
    else:
      loss = model({"x": x})["loss"]
      grads = mtf.gradients([loss], [v.value for v in x.graph.trainable_variables])
    variables = x.graph.trainable_variables
    mtf.optimize.AdamWOptimizer(learning_rate=0.05).apply_grads(grads, variables)
    return loss

  return step


def find(programs, limit, **others):
  given, *_ = programs.values()
  return mtf.auto_layout(
    given,
    mesh_shape=MESH,
    machine=MACHINE,
    memory_limit=limit,
    time_limit=1e9,
    choices={name: program for name, program in programs.items() if name},
    **others,
  )


@pytest.mark.slow
def test_what_does_not_fit_as_it_is_may_fit_in_microbatches_or_with_recomputation():
  programs = {
    "": training_step(),
    "recompute": training_step(recompute=True),
    "microbatches=8": training_step(8),
  }
  free = find(programs, 1e9, alternatives=0)
  assert (free.settings, free.proven) == ("", True)
  # Both need less; which one is the faster of those that fit depends on how much there is.
  least = {
    name: mtf.auto_layout(
      program,
      mesh_shape=MESH,
      machine=MACHINE,
      memory_limit=1e9,
      alternatives=99,
      time_limit=1e9,
    )
    for name, program in programs.items()
  }
  needed = {n: min(c.memory for c in (f, *f.alternatives)) for n, f in least.items()}
  assert needed["microbatches=8"] < needed["recompute"] < needed[""]
  tight = find(programs, needed[""] - 1, alternatives=3)
  assert tight.settings and tight.proven and tight.memory < needed[""]
  fitting = [
    (c.seconds, name)
    for name, f in least.items()
    for c in (f, *f.alternatives)
    if c.memory < needed[""]
  ]
  assert (tight.seconds, tight.settings) == (pytest.approx(min(fitting)[0]), min(fitting)[1])
  for choice in (tight, *tight.alternatives):
    check_against_whole(choice, programs[choice.settings], MACHINE)
  tightest = find(programs, needed["recompute"] - 1, alternatives=0)
  assert tightest.settings == "microbatches=8"
  text = str(tight)
  assert "built with" in text and tight.settings in text and "built with" not in str(free)
  assert max(map(len, text.split("\n"))) <= 100

  with pytest.raises(OutOfMemoryError) as e:
    find(programs, needed["microbatches=8"] - 1)
  message = str(e.value)
  assert "of 4, of 3 ways to build the program. Nearest is microbatches=8, " in message
  assert "More devices, a smaller batch or state in shards need less" in message


def test_a_program_that_is_only_made_when_it_is_looked_at_and_wrong_names():
  made = []

  def make():
    made.append(training_step(2, layers=1))
    return made[0]

  found = find({"": training_step(layers=1), "microbatches=2": make}, 1e9, fixed="batch:r")
  assert len(made) == 1 and ("batch", "r") in found.layout.pairs
  assert {c.settings for c in (found, *found.alternatives)} == {"", "microbatches=2"}
  with pytest.raises(ArgumentError, match="when_short names 'recompute', which is none of choices"):
    find({"": training_step(layers=1)}, 1e9, when_short=["recompute"])
  with pytest.raises(ArgumentError, match="a name of choices is empty"):
    mtf.auto_layout(training_step(layers=1), devices=2, choices={"": training_step(layers=1)})


def test_what_only_saves_memory_is_read_where_memory_is_short():
  made = []

  def recomputed():
    made.append(training_step(batch=4096, recompute=True))
    return made[-1]

  def found(limit):
    programs = {"": training_step(batch=4096), "recompute": recomputed}
    return find(programs, limit, fixed="batch:r", when_short=["recompute"])

  free = found(1e9)
  assert (free.settings, made) == ("", [])
  short = found(free.memory - 1)
  assert (short.settings, len(made)) == ("recompute", 1)
  assert short.proven and short.seconds > free.seconds and short.memory < free.memory


def test_programs_that_are_planned_several_times_are_read_once():
  made = []
  impl = mtf.PlacementMeshImpl("all:1", "", [""])

  @mtf.function(impl, [mtf.TensorSpec([("batch", 8), ("io", 16)])])
  def step(x):
    made.append(x)
    w = mtf.get_variable(x.mesh, "w", [x.shape[1], mtf.Dimension("out", 16)])
    return mtf.reduce_sum(mtf.einsum([x, w], output_shape=[x.shape[0], w.shape[1]]))

  def planned():
    reports = [mtf.describe(step, rules, "r:4", machine=MACHINE) for rules in ("batch:r", "io:r")]
    choice = mtf.auto_layout(step, mesh_shape="r:4", machine=MACHINE)
    costs = [(r.seconds, r.memory.total, r.bytes_moved()) for r in reports]
    return costs, [(c.seconds, c.layout) for c in (choice, *choice.alternatives)]

  expected = planned()
  assert len(made) == 3
  with read_once(), read_once():
    assert planned() == expected
  assert len(made) == 4


def test_a_program_that_no_mesh_suits_is_left_out():
  # 2 examples in a microbatch: 4 devices do not divide them.
  programs = {"": training_step(layers=1, batch=8), "microbatches=4": training_step(4, 8, layers=1)}
  given = {"mesh_shape": "r:4", "machine": MACHINE, "memory_limit": 1e9, "fixed": "batch:r"}
  found = mtf.auto_layout(
    programs[""], choices={"microbatches=4": programs["microbatches=4"]}, **given
  )
  assert {c.settings for c in (found, *found.alternatives)} == {""}
  with pytest.raises(LayoutError, match="batch has size 2, 8, which r:4 does not divide"):
    mtf.auto_layout(programs["microbatches=4"], **given)


@pytest.mark.parametrize("bounded", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_loop_in_a_loop(bounded):
  """Sums of the inner loop are pending in both, and a tensor that both use is summed once."""
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "m")
  a, b, c = [mtf.Dimension(n, 64) for n in "abc"]
  x = mtf.import_tf_tensor(mesh, tf.zeros([64, 64]), [a, b])
  y = mtf.einsum([x, mtf.get_variable(mesh, "v", [b, c])], [a, c])
  w = mtf.get_variable(mesh, "w", [c, b])
  zero = mtf.constant(mesh, 0, dtype=tf.int32)
  most = {"maximum_iterations": 3} if bounded else {}

  def outer(i, s):
    def inner(j):
      return [j + 1, mtf.einsum([y, mtf.relu(w)], [a, b])]

    _, added = mtf.while_loop(
      lambda j: mtf.less(j, 2), inner, [zero], has_accumulators=True, **most
    )
    return [i + 1, s + mtf.relu(added), mtf.reduce_sum(s, reduced_dim=a)]

  results = mtf.while_loop(
    lambda i, s: mtf.less(i, 3), outer, [zero, x], has_accumulators=True, **most
  )
  told = {"mesh_shape": "r:2,s:2", "machine": MACHINE, "results": results}
  found = mtf.auto_layout(graph, memory_limit=1e9, alternatives=30, time_limit=1e9, **told)
  assert len(found.alternatives) > 5
  for choice in (found, *found.alternatives[::10]):
    check_against_whole(choice, graph, MACHINE, results)


def test_additions_of_a_loop_are_counted():
  """Cost of microbatches: each adds its gradients to those before."""

  def traffic(program):
    return sum(op.work.traffic * op.times for op in mtf.describe(program, "", "r:1").operations)

  weights = 2 * 64 * 256 + 64 + 256
  more = traffic(training_step(8, layers=1)) - traffic(training_step(4, layers=1))
  assert more >= 4 * 3 * 4 * weights
