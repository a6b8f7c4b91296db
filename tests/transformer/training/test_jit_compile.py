"""The trainer with `run.jit_compile`: losses as without it, whatever else a step does."""

from __future__ import annotations

import numpy as np
import pytest

from mesh_tensorflow.errors import ConfigError
from tests.transformer import small_lm
from tests.transformer import worker_processes as program

SETTINGS = ["run.learning_rate_schedule = 0.01", "run.report_every = 1", "run.train_steps = 3"]
CASES = {
  "Adafactor": [],
  "all that AdamW can have": [
    "run.optimizer = @optimize.AdamWOptimizer",
    "run.norms_every = 1",
    "run.max_grad_norm = 0.5",
    "run.ema_decay = 0.9",
    "run.nonfinite = 'skip'",
    "run.state_dtype = 'int8'",
    "run.gradient_accumulation_steps = 2",
  ],
}


def trained(folder, *bindings):
  folder.mkdir(exist_ok=True)
  small_lm.run(folder, *SETTINGS, *bindings, text=small_lm.TEXT)
  return list(program.losses(folder / "model").values())


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_without(case, tmp_path):
  compiled = trained(tmp_path / "xla", *CASES[case], "run.jit_compile = True")
  np.testing.assert_allclose(compiled, trained(tmp_path / "plain", *CASES[case]), rtol=1e-4)


def test_a_mesh_of_several_devices(tmp_path):
  with pytest.raises(ConfigError, match="run.jit_compile = True is for a mesh of one device.* 2,"):
    trained(tmp_path, "run.jit_compile = True", "run.mesh_shape = 'all:2'")
