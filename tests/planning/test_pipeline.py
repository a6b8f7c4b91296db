"""What is predicted of a pipeline: bubble, memory of stages, bytes between them, seconds."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random

import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import ArgumentError, LayoutError, UnsupportedError
from mesh_tensorflow.meshes import schedules
from mesh_tensorflow.planning.evaluation import Evaluator
from mesh_tensorflow.planning.machine import convert_to_machine
from mesh_tensorflow.planning.pipeline import Blocks, balanced_cut, equal_cut, longest

BATCH, WIDTH, OUT = mtf.Dimension("batch", 32), mtf.Dimension("d", 64), mtf.Dimension("out", 64)


def step(
  stages, schedule="1f1b", microbatches=8, mesh="data:2", layers=8, wide=(), dtype=tf.float32
):
  """A training step of layers, those of `wide` of ten products, on meshes without devices."""
  first, *others = [mtf.MeshImpl(mesh, "batch:data") for _ in range(stages)]
  impl = first.with_stages(others, schedule) if others else first

  @mtf.function(impl, [mtf.TensorSpec([BATCH, WIDTH])])
  def train_step(x):
    def model(features):
      y = mtf.cast(features["x"], dtype)
      for i in range(layers):
        with mtf.stage(f"stage{i * stages // layers}" if others else x.mesh):
          for j in range(10 if i in wide else 1):
            w = mtf.get_variable(y.mesh, f"w{i}_{j}", [WIDTH, OUT], activation_dtype=dtype)
            y = mtf.rename_dimension(mtf.einsum([y, w], reduced_dims=[WIDTH]), "out", "d")
            y = mtf.relu(y)
      return {"loss": mtf.reduce_sum(mtf.square(y))}

    grads, outputs = mtf.serialize_training_step(
      {"x": x}, model, BATCH, microbatches, schedule=schedule
    )
    mtf.optimize.AdamWOptimizer(0.01).apply_grads(grads, x.graph.trainable_variables)
    return outputs["loss"]

  return train_step


@functools.cache
def plan(stages, schedule="1f1b", machine=None):
  return mtf.describe(step(stages, schedule), machine=machine).pipeline


def test_one_mesh_is_no_pipeline():
  report = mtf.describe(step(1), machine="a100")
  assert report.pipeline is None
  assert report.to_dict()["pipeline"] is None


@pytest.mark.parametrize("schedule", schedules.SCHEDULES)
def test_gradients_in_bfloat16_have_the_tasks_of_others(schedule):
  """They are cast before they are added up, which is of the backward pass, too."""
  found = mtf.describe(step(4, schedule, dtype=tf.bfloat16)).pipeline
  tasks = [(t.mesh, t.kind, t.after) for t in found.table.tasks]
  assert tasks == [(t.mesh, t.kind, t.after) for t in plan(4, schedule).table.tasks]


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("schedule", schedules.SCHEDULES)
def test_tasks_and_bubble(schedule, stages):
  found = plan(stages, schedule)
  assert [s.name for s in found.stages] == [f"stage{i}" for i in range(stages)]
  kinds = [t.kind for t in found.table.tasks]
  assert kinds.count("F") == stages - 1
  assert kinds.count("FB") == 1
  assert ("W" in kinds) == (schedule == "zero_bubble")
  if schedule != "zero_bubble":
    assert found.bubble == pytest.approx((stages - 1) / (8 + stages - 1))
  else:
    assert found.bubble < (stages - 1) / (8 + stages - 1)
  assert not found.is_timed and found.seconds is None


@pytest.mark.parametrize("schedule", schedules.SCHEDULES)
def test_masks_and_auxiliary_losses_are_no_tasks_of_their_own(schedule):
  """Masks are ready before the activations, gradients of auxiliary losses on the way forward."""
  first, *others = [mtf.MeshImpl("data:2", "batch:data") for _ in range(4)]

  @mtf.function(first.with_stages(others, schedule), [mtf.TensorSpec([BATCH, WIDTH])])
  def train_step(x):
    def model(features):
      y, losses = features["x"], []
      for i in range(4):
        with mtf.stage(f"stage{i}"):
          y = y * 1.0
          w = mtf.get_variable(y.mesh, f"w{i}", [WIDTH, OUT])
          y = mtf.tanh(mtf.rename_dimension(mtf.einsum([y, w], reduced_dims=[WIDTH]), "out", "d"))
          y = y * mtf.cast(mtf.greater(features["x"], 0.0), y.dtype)
          rows, v = y.shape.dims[0], mtf.get_variable(y.mesh, f"v{i}", [WIDTH])
          gate = mtf.softmax(mtf.einsum([y, v], [rows]), rows)
          losses.append(mtf.reduce_sum(gate * gate))
      with mtf.stage("stage3"):
        return {"loss": mtf.add_n([mtf.reduce_sum(mtf.square(y)), *losses])}

    grads, outputs = mtf.serialize_training_step({"x": x}, model, BATCH, 8, schedule=schedule)
    mtf.optimize.AdamWOptimizer(0.01).apply_grads(grads, x.graph.trainable_variables)
    return outputs["loss"]

  found = mtf.describe(train_step).pipeline
  of = [[t.kind for t in found.table.tasks if t.mesh == i] for i in range(4)]
  split = ["W"] if schedule == "zero_bubble" else []
  assert of == [["F", "B"], ["F", "B", *split], ["F", "B", *split], ["FB", *split]]
  expected = [8, 8, 8, 1] if schedule == "gpipe" else [4, 3, 2, 1]
  assert [s.under_way for s in found.stages] == expected
  assert found.bubble == pytest.approx(plan(4, schedule).bubble, abs=0.02)


def test_memory_and_bytes():
  one, many = plan(4, "1f1b"), plan(4, "gpipe")
  assert [s.under_way for s in one.stages] == [4, 3, 2, 1]
  assert [s.under_way for s in many.stages] == [8, 8, 8, 1]
  assert one.memory < many.memory
  for s in one.stages:
    # Two layers, and both slots of Adam; the first stage counts its steps, too.
    assert 0 <= s.variables - 2 * 64 * 64 * 4 * 3 <= 16
  boundary = 32 * 64 * 4 // 2  # A batch of float32, of which each of two devices sends a half.
  assert [s.sent for s in one.stages] == [boundary, 2 * boundary, 2 * boundary, boundary]
  # Sums of gradients, and those of one microbatch, of two layers.
  assert all(2 * 64 * 64 * 4 <= s.gradients <= 2 * 64 * 64 * 4 + 4 for s in one.stages)
  assert all(s.activations > s.kept * s.under_way for s in one.stages)
  # The inputs of the first stage's layers, of 4 rows over two devices.
  assert one.stages[0].kept >= 2 * 2 * 64 * 4


def test_what_comes_waits_for_its_task():
  """Of GPipe's 8 the third stage ends its forward tasks when the last one has taken three."""
  size = 4 * 64 * 4 // 2  # Of a microbatch of 4 rows, of which each of two devices has a half.
  third = plan(4, "gpipe").stages[2]
  assert third.activations >= 8 * third.kept + 2 * size
  last = plan(4, "gpipe").stages[3].activations - plan(4, "1f1b").stages[3].activations
  assert last == 4 * size  # 5 wait there, and 1.


@pytest.mark.parametrize("others", [("data:4", "batch:data"), ("data:2", "")])
def test_stages_that_differ_are_refused(others):
  """And predicted on one mesh if one is given."""
  pipeline = mtf.MeshImpl("data:2", "batch:data").with_stages([mtf.MeshImpl(*others)])
  program = step(2)
  program = mtf.function(pipeline, program.input_signature)(program.__wrapped__)
  with pytest.raises(UnsupportedError, match="stage0 has mesh data:2, .*, stage1 mesh"):
    program.plan()
  found = mtf.describe(program, "batch:data", "data:2").pipeline
  assert found.stages == plan(2).stages


def test_seconds():
  timed = plan(4, "1f1b", "a100")
  assert timed.seconds == pytest.approx(timed.table.seconds + max(s.outside for s in timed.stages))
  assert all(s.backward > s.forward > 0 for s in timed.stages[:-1])
  assert 0 < timed.bubble < 0.5
  report = mtf.describe(step(4), machine="a100")
  assert report.seconds == pytest.approx(timed.seconds)
  text = str(report)
  assert "Pipeline of 4 stages, 8 microbatches, schedule 1f1b" in text
  assert "stage3 |" in text
  assert max(map(len, text.splitlines())) <= 100
  assert report.to_dict()["pipeline"]["stages"][1]["memory"] == timed.stages[1].memory


# ------------------------------------------------------------------------------- cuts


def cuts_of(count, stages):
  """All cuts of so many layers into so many runs."""
  for ends in itertools.combinations(range(1, count), stages - 1):
    ends = [0, *ends, count]
    yield [b - a for a, b in zip(ends, ends[1:])]


def away(cut):
  """How far a cut is from equal numbers."""
  equal = itertools.accumulate(equal_cut(sum(cut), len(cut)))
  return sum((a - b) ** 2 for a, b in zip(itertools.accumulate(cut), equal))


@pytest.mark.parametrize("seed", range(30))
def test_the_cut_is_the_best_of_all(seed):
  draw = random.Random(seed)
  count = draw.randint(1, 9)
  stages = draw.randint(1, count)
  seconds = [draw.choice([1, 1, 1, 2, 5, 0]) * draw.choice([1, 0.1]) for _ in range(count)]
  found = balanced_cut(seconds, stages)
  every = list(cuts_of(count, stages))
  least = min(longest(seconds, c) for c in every)
  assert longest(seconds, found) == pytest.approx(least)
  as_good = [c for c in every if longest(seconds, c) <= least * (1 + 1e-9)]
  assert away(found) == min(map(away, as_good))


@pytest.mark.parametrize("seed", range(15))
def test_the_cut_fits(seed):
  draw = random.Random(seed)
  count = draw.randint(3, 9)
  stages = draw.randint(2, min(4, count))
  seconds = [draw.uniform(0.5, 2) for _ in range(count)]
  room = [draw.uniform(0.5, 2) for _ in range(count)]
  limit = 1.4 * sum(room) / stages

  def fits(s, begin, end):
    return sum(room[begin:end]) * (1 + 0.1 * (stages - s)) <= limit

  def all_fit(cut):
    ends = list(itertools.accumulate(cut))
    return all(fits(s, b, e) for s, (b, e) in enumerate(zip([0, *ends], ends)))

  fitting = [c for c in cuts_of(count, stages) if all_fit(c)]
  found = balanced_cut(seconds, stages, fits)
  if fitting:
    assert all_fit(found)
    assert longest(seconds, found) == pytest.approx(min(longest(seconds, c) for c in fitting))
  else:
    assert found == equal_cut(count, stages)


def test_equal_layers_are_cut_into_equal_numbers():
  for count in range(1, 12):
    for stages in range(1, count + 1):
      cut = equal_cut(count, stages)
      assert sum(cut) == count and max(cut) - min(cut) <= 1
      assert balanced_cut([0.3] * count, stages) == cut
      # As each layer says of itself.
      of = [i * stages // count for i in range(count)]
      assert cut == [of.count(s) for s in range(stages)]


def measured(layers=8, **others):
  """The blocks of a program with a mesh for each layer, evaluated, and the machine."""
  graph, _, returned = step(layers, layers=layers, **others).build_graph()
  evaluation = Evaluator(graph, [returned]).evaluate("data:2", "batch:data")
  return Blocks.of(graph), evaluation, convert_to_machine("a100")


def test_layers_taken_for_stages_cost_what_such_stages_do():
  blocks, evaluation, machine = measured()
  of = (evaluation.mesh_impl, evaluation.costs, machine)
  for stages in (2, 4):
    real, found = plan(stages, machine="a100"), blocks.plan(*of, stages)
    assert found.cut == (8 // stages,) * stages
    assert found.seconds == pytest.approx(real.seconds, rel=0.02)
    assert found.memory == pytest.approx(real.memory, rel=0.05)
    for a, b in zip(found.stages, real.stages):
      assert (a.name, a.sent, a.under_way, a.gradients) == (
        b.name,
        b.sent,
        b.under_way,
        b.gradients,
      )
      # The counter of the optimizer is on the first.
      assert abs(a.variables - b.variables) <= 16
  assert blocks.plan(*of, 8).seconds == pytest.approx(blocks.as_built(*of).seconds)


@pytest.mark.parametrize("schedule", schedules.SCHEDULES)
def test_wide_layers_have_stages_with_few_others(schedule):
  blocks, evaluation, machine = measured(wide=(6, 7), schedule=schedule)
  of = (evaluation.mesh_impl, evaluation.costs, machine)
  found = blocks.plan(*of, 3)
  assert found.cut == (6, 1, 1)
  assert found.seconds < blocks.plan(*of, 3, cut=equal_cut(8, 3)).seconds


def test_what_does_not_fit_is_cut_otherwise():
  blocks, evaluation, machine = measured(wide=(6, 7))
  of = (evaluation.mesh_impl, evaluation.costs, machine)
  free = blocks.plan(*of, 2)
  assert free.cut == (7, 1)
  limit = blocks.plan(*of, 2, cut=(6, 2)).stages[0].memory
  # Neither 7 layers on the first stage nor both wide ones on the last fit.
  assert blocks.plan(*of, 2, limit).cut == (4, 4)


# ----------------------------------------------------------------------------- search


def large_step(stages=8, rows=64):
  """A training step of layers that are large beside their inputs, or not."""
  batch, width = mtf.Dimension("batch", rows), mtf.Dimension("d", 16384)
  out = mtf.Dimension("out", 16384)
  first, *others = [mtf.MeshImpl("all:1", "") for _ in range(stages)]

  @mtf.function(first.with_stages(others), [mtf.TensorSpec([batch, width])])
  def train_step(x):
    def model(features):
      y = features["x"]
      for i in range(stages):
        with mtf.stage(f"stage{i}"):
          w = mtf.get_variable(y.mesh, f"w{i}", [width, out])
          y = mtf.rename_dimension(mtf.einsum([y, w], reduced_dims=[width]), "out", "d")
      return {"loss": mtf.reduce_sum(mtf.square(y))}

    grads, outputs = mtf.serialize_training_step({"x": x}, model, batch, 8)
    mtf.optimize.AdamWOptimizer(0.01).apply_grads(grads, x.graph.trainable_variables)
    return outputs["loss"]

  return train_step


def test_a_pipeline_is_found_where_links_are_slow():
  machine = convert_to_machine("a100")
  slow = dataclasses.replace(
    machine, links=(dataclasses.replace(machine.links[-1], bandwidth=1e8),)
  )
  limit = 14e9
  search = functools.partial(mtf.auto_layout, devices=8, memory_limit=limit, stages=[1, 2, 4, 8])
  choice = search(large_step(), machine=slow)
  assert choice.stages > 1 and sum(choice.cut) == 8
  assert choice.mesh_shape.size == 8 // choice.stages
  assert f"{choice.stages} stages" in str(choice)
  assert choice.memory <= limit
  # Each other number of stages is slower.
  for other in {1, 2, 4, 8} - {choice.stages}:
    try:
      seconds = mtf.auto_layout(
        large_step(), devices=8, memory_limit=limit, stages=[other], machine=slow
      ).seconds
    except mtf.errors.OutOfMemoryError:
      continue
    assert seconds >= choice.seconds
  # What is predicted is what the report of such a program predicts.
  if choice.stages == 8:
    told = mtf.describe(large_step(), machine=slow)
    assert told.seconds == pytest.approx(choice.seconds)
    assert told.pipeline.memory == choice.memory


def test_no_pipeline_is_found_where_a_mesh_is_faster():
  search = functools.partial(mtf.auto_layout, large_step(rows=65536), devices=8, machine="a100")
  choice = search(stages=[1, 2, 4, 8])
  assert choice.stages == 1 and choice.cut == ()
  assert choice.seconds < search(stages=[2, 4, 8]).seconds


def test_a_pipeline_is_searched_as_it_is():
  """Without `stages` a program has as many as it has meshes, and the devices are those of all."""
  choice = mtf.auto_layout(step(4), devices=8, machine="a100")
  assert choice.stages == 4 and choice.mesh_shape.size == 2
  assert mtf.auto_layout(step(4), mesh_shape="a:2", machine="a100").stages == 4


def test_devices_of_one_host_gain_nothing_by_stages():
  choice = mtf.auto_layout(
    large_step(rows=65536), devices=4, machine="cpu", memory_limit=1e12, stages=[1, 2, 4]
  )
  assert choice.stages == 1


@pytest.mark.parametrize(
  "arguments,error,message",
  [
    ({"mesh_shape": "a:2", "stages": [1, 2]}, ArgumentError, "stages takes numbers"),
    ({"devices": 4, "stages": []}, ArgumentError, "stages takes numbers"),
    ({"devices": 4, "stages": [0, 2]}, ArgumentError, "stages takes numbers"),
    ({"devices": 4, "stages": [3, 16]}, LayoutError, "no number of stages"),
    ({"devices": 6}, LayoutError, "4 meshes of the program's pipeline do not divide the 6"),
  ],
)
def test_wrong_stages(arguments, error, message):
  with pytest.raises(error, match=message):
    mtf.auto_layout(step(4), machine="a100", **arguments)
