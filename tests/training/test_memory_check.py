"""Trainings that do not fit are refused before anything is allocated; what the machine has."""

from __future__ import annotations

import resource

import gin
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import errors
from mesh_tensorflow.meshes import memory
from mesh_tensorflow.training import memory_check
from tests.transformer import training_program as program

MEGABYTE = 10**6


def needed(trainer) -> int:
  """Bytes that the plan of the trainer's step says one processor holds."""
  step = trainer.steps.train_step(["targets"], mtf.optimize.AdamWeightDecayOptimizer)
  return mtf.describe(step).memory


@pytest.fixture(scope="module")
def plan():
  return needed(program.make_trainer("batch:2"))


def train(monkeypatch, available, mesh="batch:2", **bindings):
  monkeypatch.setattr(memory, "available_bytes", lambda: int(available))
  trainer = program.make_trainer(mesh)
  for name, value in bindings.items():
    gin.bind_parameter(name.replace("__", "."), value)
  return trainer, lambda: trainer.train(program.dataset, 1)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.05, pytest.param(0.3, marks=pytest.mark.long), 0.45])
def test_what_does_not_fit_is_refused_before_it_is_allocated(part, plan, monkeypatch):
  """Both processors are on this machine: they need four times what one does."""
  trainer, run = train(monkeypatch, part * 2 * plan.total)
  with pytest.raises(errors.OutOfMemoryError) as e:
    run()
  assert f"needs about {memory.text(2 * plan.total)} on this machine" in str(e.value)
  assert "2 processor(s)" in str(e.value) and "free. Use a smaller model or batch" in str(e.value)
  assert f"{memory.text(plan.variables)} of variables" in str(e.value)
  assert "\n" not in str(e.value)
  assert not list(trainer.mesh_impl.variable_store)


@pytest.mark.slow
def test_what_may_not_fit_is_warned_of(plan, monkeypatch, caplog):
  assert len(train(monkeypatch, 1.1 * 2 * plan.total)[1]()) == 1
  assert "needs about" in caplog.text and "exit code 137" in caplog.text


@pytest.mark.slow
def test_what_fits_is_not_planned_and_not_counted_twice(plan, monkeypatch, caplog):
  monkeypatch.setattr(mtf, "describe", None)
  trainer, run = train(monkeypatch, 100 * 2 * plan.total)
  assert len(run()) == 1
  assert "needs about" not in caplog.text
  # What is there is not free any more, and needed no second time.
  check = memory_check.MemoryCheck(trainer.mesh_impl)
  assert check._available() == memory.available_bytes() + 2 * plan.variables


@pytest.mark.long
def test_a_refusal_may_be_turned_off(plan, monkeypatch, caplog):
  assert len(train(monkeypatch, 0.3 * 2 * plan.total, MemoryCheck__refuse=False)[1]()) == 1
  assert "needs about" in caplog.text


@pytest.mark.parametrize(("kind", "copies"), [(mtf.PlacementMeshImpl, 2), (mtf.SimdMeshImpl, 4)])
def test_what_processors_of_a_device_share_counts_once(kind, copies, cpu_devices, monkeypatch):
  monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
  impl = kind("x:4", "b:x", cpu_devices[:2], shares={"x": [3, 1]})

  @mtf.function(impl, [mtf.TensorSpec([("b", 8), ("d", 4)])])
  def step(x):
    w = mtf.get_variable(x.mesh, "w", [x.shape.dims[1]])
    return x * w + mtf.get_variable(x.mesh, "split", x.shape)

  check = memory_check.MemoryCheck(impl)
  graph, _, _ = step.build_graph()
  assert [check._bytes_of(v) for v in graph.all_variables] == [copies * 4 * 4, 8 * 4 * 4]
  step.create_variables()
  assert check._available() == 1000 + copies * 4 * 4 + 8 * 4 * 4


def test_programs_of_ones_own(cpu_devices):
  """TensorFlow waits ten seconds for memory before it gives up."""
  impl = mtf.PlacementMeshImpl("", "", devices=cpu_devices[:1])

  @mtf.function(impl, [mtf.TensorSpec([], tf.float32)])
  def huge(x):
    shape = mtf.Shape([("a", 1 << 20), ("b", 1 << 20), ("c", 1 << 10)])
    return mtf.reduce_sum(mtf.random_uniform(x.mesh, shape)) + x

  with pytest.raises(errors.OutOfMemoryError, match=r"huge is out of memory.*for a tensor \["):
    huge(1.0)


def test_every_mesh_has_this_error(cpu_devices):
  for kind in (mtf.PlacementMeshImpl, mtf.SimdMeshImpl):
    impl = kind("x:2", "a:x", devices=cpu_devices[:2])
    with pytest.raises(errors.OutOfMemoryError, match="step is out of memory: there is none"):
      with impl.errors_of_runs("step"):
        raise tf.errors.ResourceExhaustedError(None, None, "failed to allocate memory")


def test_an_error_of_another_resource_stays():
  with pytest.raises(tf.errors.ResourceExhaustedError):
    with memory.errors():
      raise tf.errors.ResourceExhaustedError(None, None, "Received message larger than max")


# ----------------------------------------------------------------- what the machine has


def test_the_least_of_all_limits(tmp_path, monkeypatch):
  monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
  whole = memory.available_bytes()
  assert whole > 0
  (tmp_path / "memory.max").write_text("max\n")
  (tmp_path / "memory.current").write_text("100\n")
  assert abs(memory.available_bytes() - whole) < 2000 * MEGABYTE
  (tmp_path / "memory.max").write_text(f"{80 * MEGABYTE}\n")
  (tmp_path / "memory.current").write_text(f"{50 * MEGABYTE}\n")
  (tmp_path / "memory.stat").write_text(f"anon 7\ninactive_file {10 * MEGABYTE}\n")
  assert memory.available_bytes() == 40 * MEGABYTE
  (tmp_path / "memory.current").write_text(f"{200 * MEGABYTE}\n")
  assert memory.available_bytes() == 0


def test_a_container_of_the_older_kind(tmp_path, monkeypatch):
  monkeypatch.setattr(memory, "_CGROUPS", tmp_path)
  (tmp_path / "memory").mkdir()
  (tmp_path / "memory" / "memory.limit_in_bytes").write_text("70000000")
  (tmp_path / "memory" / "memory.usage_in_bytes").write_text("30000000")
  assert memory.available_bytes() == 40 * MEGABYTE


def test_a_limit_of_the_process(monkeypatch):
  used = memory._numbers("/proc/self/status")["VmSize"] * 1024
  limit = used + 500 * MEGABYTE
  monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
  assert 0 < memory.available_bytes() <= 600 * MEGABYTE


def test_sizes_in_words():
  sizes = (12, 999, 1000, 2_345_678, 21.3e9, 5e15)
  assert [memory.text(n) for n in sizes] == [
    "12 bytes", "999 bytes", "1.0 KB", "2.3 MB", "21.3 GB", "5,000.0 TB",
  ]  # fmt: skip
