"""Means of the weights of several checkpoints, which modes that do not train may take."""

from __future__ import annotations

import pathlib
import types
from typing import Any

import numpy as np
import pytest

from mesh_tensorflow import errors
from mesh_tensorflow.checkpoint import Checkpointer
from mesh_tensorflow.training.state import ModelState
from tests.checkpoint import checkpoint_stores as stores
from tests.transformer import small_lm


def saved(folder: pathlib.Path, devices: Any, steps: list[int]) -> dict[int, dict[str, np.ndarray]]:
  """Checkpoints of these steps; returns their values."""
  store = stores.make_store(devices, "2x2")
  writer = Checkpointer(str(folder), store, max_to_keep=None)
  found = {}
  for step in steps:
    found[step] = stores.fill(store, step)
    writer.save(step, asynchronous=False)
  return found


@pytest.mark.parametrize("mesh", ["1", "2x2 other", "2x4"])
def test_restores_means(mesh: str, cpu_devices: Any, tmp_path: pathlib.Path) -> None:
  values = saved(tmp_path, cpu_devices, [3, 6, 9, 12])
  store = stores.make_store(cpu_devices, mesh)
  impl: Any = types.SimpleNamespace(variable_store=store)
  state = ModelState(impl, str(tmp_path), average_checkpoints=3, quiet=True)
  for path, steps in ((None, [6, 9, 12]), (str(tmp_path / "model.ckpt-9"), [3, 6, 9])):
    state.restore(path)
    assert state.step == steps[-1]
    for v in store:
      of_v = [values[s][v.name] for s in steps]
      # Numbers that count are those of the last one.
      want = np.mean(of_v, 0) if v.slice_dtype.is_floating else of_v[-1]
      np.testing.assert_allclose(v.numpy(), want, rtol=1e-6, atol=1e-5, err_msg=v.name)
  state.restore(for_training=True)
  stores.assert_holds(store, values[12])
  with pytest.raises(errors.CheckpointError, match="is 3, .* step 6 there are 2"):
    state.restore(str(tmp_path / "model.ckpt-6"))


def test_evaluates_decodes_and_exports_means(tmp_path: pathlib.Path, capsys: Any) -> None:
  every = ("run.train_steps = 6", "run.save_checkpoints_steps = 2")
  small_lm.run(tmp_path, *every, text=small_lm.TEXT)
  losses = [
    small_lm.run(tmp_path, *small_lm.EVAL, f"run.average_checkpoints = {n}")["validation"]["loss"]
    for n in (1, 2, 3)
  ]
  assert len(set(losses)) == 3
  assert "averaged the weights of 3 checkpoints" in capsys.readouterr().out
  texts = small_lm.infer(tmp_path, ["To be"], "run.average_checkpoints = 2", step=6)
  assert len(texts) == 1
  with pytest.raises(errors.CheckpointError, match="there are 3 checkpoints .*keep_checkpoint_max"):
    small_lm.run(tmp_path, *small_lm.EVAL, "run.average_checkpoints = 4")
  with pytest.raises(errors.ConfigError, match="average_checkpoints = 0: it must be"):
    small_lm.run(tmp_path, *small_lm.EVAL, "run.average_checkpoints = 0")
