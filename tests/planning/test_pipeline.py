"""What is predicted of a pipeline: bubble, memory of stages, bytes between them, seconds."""

from __future__ import annotations

import functools

import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow.meshes import schedules

BATCH, WIDTH, OUT = mtf.Dimension("batch", 32), mtf.Dimension("d", 64), mtf.Dimension("out", 64)


def step(stages, schedule="1f1b", microbatches=8, mesh="data:2", layers=8):
  """A training step of equal layers, on meshes without devices."""
  first, *others = [mtf.MeshImpl(mesh, "batch:data") for _ in range(stages)]
  impl = first.with_stages(others, schedule) if others else first

  @mtf.function(impl, [mtf.TensorSpec([BATCH, WIDTH])])
  def train_step(x):
    def model(features):
      y = features["x"]
      for i in range(layers):
        with mtf.stage(f"stage{i * stages // layers}" if others else x.mesh):
          w = mtf.get_variable(y.mesh, f"w{i}", [WIDTH, OUT])
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
  # The inputs of the first stage's layers, of 4 rows over two devices.
  assert one.stages[0].kept >= 2 * 2 * 64 * 4


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
