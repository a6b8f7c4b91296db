"""The trainer with `run.state_dtype`: on each mesh, from each form, with steps that are skipped."""

from __future__ import annotations

import numpy as np
import pytest

from mesh_tensorflow import checkpoint
from mesh_tensorflow.errors import ConfigError
from tests.kinds import kept
from tests.transformer import small_lm
from tests.transformer import worker_processes as program

SETTINGS = [
  "d_ff = 256",  # A matrix of 4,096 elements.
  "run.optimizer = @optimize.AdamWOptimizer",
  "run.learning_rate_schedule = 0.01",
  "run.report_every = 1",
  "run.train_steps = 4",
]
MESH = ("run.mesh_shape = 'batch:2,model:2'", "run.layout_rules = 'batch:batch,d_ff:model'")
SHARDED = (*MESH, "run.shard_state = 'batch'", "run.mesh_implementation = 'simd'")


def trained(folder, *bindings):
  folder.mkdir(exist_ok=True)
  small_lm.run(folder, *SETTINGS, *bindings, text=small_lm.TEXT)
  return list(program.losses(folder / "model").values())


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
  """The losses in float32."""
  return trained(tmp_path_factory.mktemp("exact") / "run")


@pytest.mark.parametrize("dtype", kept(["bfloat16", "int8"], ["int8"]))
def test_losses_on_every_mesh(dtype, exact, tmp_path):
  setting = f"run.state_dtype = '{dtype}'"
  losses = trained(tmp_path / "one", setting)
  np.testing.assert_allclose(losses, exact, rtol=0.01)
  np.testing.assert_allclose(trained(tmp_path / "mesh", setting, *SHARDED), losses, rtol=1e-3)
  names = checkpoint.describe(str(tmp_path / "one/model/model.ckpt-4"))
  assert any(n.endswith("adam_v/codes") for n in names) == (dtype == "int8")


def test_an_interrupted_training_draws_the_same(tmp_path):
  """The numbers by which it rounds are functions of the step."""
  setting = "run.state_dtype = 'int8'"
  losses = trained(tmp_path / "at once", setting)
  trained(tmp_path / "twice", setting, "run.train_steps = 2")
  assert trained(tmp_path / "twice", setting) == losses


def test_the_form_changes_in_between(exact, tmp_path):
  for i, dtype in enumerate(["int8", "float32", "bfloat16", "int8"]):
    losses = trained(tmp_path / "run", f"run.state_dtype = '{dtype}'", f"run.train_steps = {i + 1}")
  np.testing.assert_allclose(losses, exact, rtol=0.01)


def test_steps_that_are_not_finite_are_skipped(exact, tmp_path):
  """Slots in 8 bits are written inside of the condition."""
  losses = trained(tmp_path / "run", "run.state_dtype = 'int8'", "run.nonfinite = 'skip'", *MESH)
  np.testing.assert_allclose(losses, exact, rtol=0.01)


def test_a_dtype_that_is_none(tmp_path):
  with pytest.raises(ConfigError, match="state_dtype.*float32.*bfloat16.*int8"):
    trained(tmp_path / "run", "run.state_dtype = 'float16'")
