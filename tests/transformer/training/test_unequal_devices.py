"""The trainer with `run.device_shares`: losses, checkpoints and texts are those without."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import mesh_tensorflow as mtf
from mesh_tensorflow import checkpoint, errors
from mesh_tensorflow.transformer.modes.make_estimator import tpu_estimator_model_fn
from tests.kinds import kept
from tests.transformer import small_lm
from tests.transformer import worker_processes as program

SETTINGS = [
  small_lm.WITHOUT_ATTENTION,
  "num_layers = 2",
  "dropout_rate = 0.1",
  "run.max_grad_norm = 0.5",
  "run.ema_decay = 0.9",
  "run.gradient_accumulation_steps = 2",
  "run.report_every = 1",
  "run.train_steps = 4",
  "run.batch_size = ('sequences_per_batch', 8)",
]
FOUR = ("run.mesh_shape = 'batch:4'", "run.layout_rules = 'batch:batch'")
SHARES = (*FOUR, "run.device_shares = {'batch': [3, 1]}")
MESHES = {
  "3:1": SHARES,
  "3:1, shards": (*SHARES, "run.shard_state = 'batch'"),
  "3:1, simd": (*SHARES, "run.mesh_implementation = 'simd'"),
  "3:1, named": (*SHARES, "run.mesh_devices = ['CPU:2', 'CPU:1']"),
  "2:1:1": (*FOUR, "run.device_shares = {'batch': [2, 1, 1]}"),
  "3:1 by 2": (
    "run.mesh_shape = 'batch:4,model:2'",
    "run.layout_rules = 'batch:batch,d_ff:model,vocab:model'",
    "run.device_shares = {'batch': [3, 1]}",
  ),
  "two stages": (*SHARES, "run.pipeline_stages = 2"),
}
# Of shards of unequal parts: tests/meshes/test_shares.py.
KEPT = ["3:1 by 2", "two stages"]


def names(folder):
  return sorted(checkpoint.describe(str(folder / "model" / "model.ckpt-4")))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """The folder of a training on one device; the losses of its steps."""
  folder = tmp_path_factory.mktemp("whole")
  small_lm.run(folder, *SETTINGS, text=small_lm.TEXT)
  return folder, program.losses(folder / "model")


@pytest.mark.parametrize("mesh", kept(list(MESHES), KEPT))
def test_a_training_is_the_same(mesh, whole, tmp_path):
  small_lm.run(tmp_path, *SETTINGS, *MESHES[mesh], text=small_lm.TEXT)
  folder, losses = whole
  found = program.losses(tmp_path / "model")
  np.testing.assert_allclose(list(found.values()), list(losses.values()), rtol=1e-5)
  assert names(tmp_path) == names(folder)


@pytest.mark.long
def test_a_training_goes_on_with_other_shares_and_makes_the_same_texts(whole, tmp_path):
  folder, losses = whole
  for step, mesh in ((1, SHARES), (2, ()), (4, MESHES["2:1:1"])):
    small_lm.run(tmp_path, *SETTINGS, *mesh, f"run.train_steps = {step}", text=small_lm.TEXT)
  found = program.losses(tmp_path / "model")
  np.testing.assert_allclose(list(found.values()), list(losses.values()), rtol=1e-4)
  plain = small_lm.infer(folder, ["To be", "or"], *SETTINGS, step=4)
  assert plain == small_lm.infer(folder, ["To be", "or"], *SETTINGS, *SHARES, step=4)


def test_a_plan_proposes_shares(tmp_path, capsys):
  machine = dataclasses.replace(mtf.planning.Machine.load("a100"), speeds=(1.0, 0.2))
  machine.save(str(tmp_path / "slow.json"))
  plan = (
    "run.mode = 'plan'",
    f"choose_layout.machine = '{tmp_path / 'slow.json'}'",
    "print_best_layouts.search = False",
    "run.gradient_accumulation_steps = 1",
  )
  even = ("run.mesh_shape = 'batch:2'", "run.layout_rules = 'batch:batch'")
  report = small_lm.run(tmp_path, *SETTINGS, *plan, *even, text=small_lm.TEXT)
  assert report.shares.dimension == "batch" and report.seconds == report.shares.equal.seconds
  assert "Devices along batch have the speeds 1, 0.2:" in capsys.readouterr().out
  (shared,) = [d for d in [report.shares.proposed, *report.shares.others] if d.parts == (7, 1)]
  with_shares = (
    "run.mesh_shape = 'batch:8'",
    "run.layout_rules = 'batch:batch'",
    "run.device_shares = {'batch': [7, 1]}",
  )
  again = small_lm.run(tmp_path, *SETTINGS, *plan, *with_shares, text=small_lm.TEXT)
  assert again.seconds == pytest.approx(shared.seconds)


@pytest.mark.parametrize(
  ("bindings", "error", "message"),
  [
    (
      ["run.device_shares = {'batch': [3, 2]}"],
      errors.MeshShapeError,
      r"^run.device_shares: shares .* add up to 5: make it batc.* \(run.mesh_shape, .* 'batch:4'\)",
    ),
    (
      ["run.device_shares = {'rows': [3, 1]}"],
      errors.MeshShapeError,
      "^run.device_shares: .*no dimension 'rows'; it has batch",
    ),
    (
      ["run.shard_state = 'rows'"],
      errors.LayoutError,
      "^run.shard_state: .* over 'rows': .*no such dimension; it has batch .*is 'batch:4'",
    ),
    (["run.device_shares = {'batch': [4, 0]}"], errors.ConfigError, "whole numbers of at least 1"),
    (["run.device_shares = [3, 1]"], errors.ConfigError, "a dict from mesh dimensions to lists"),
    (["run.device_shares = '3:1'"], errors.ConfigError, "a dict from mesh dimensions to lists"),
    (
      ["run.device_shares = {'batch': [3, 1]}", "run.mesh_devices = ['CPU:0']"],
      errors.MeshShapeError,
      "names 1 devices, .* has 4 processors, for 2 devices with run.device_shares",
    ),
    (
      ["run.device_shares = {'batch': [3, 1]}", "run.mesh_devices = ['CPU:0', 'CPU:0']"],
      errors.MeshShapeError,
      "'CPU:0' is named twice",
    ),
    (
      ["run.device_shares = {'batch': [3, 1]}", "run.mesh_shape = 'auto'", "run.num_devices = 4"],
      errors.ConfigError,
      "run.mesh_shape is 'auto': shares are of a dimension of a mesh that is given",
    ),
  ],
)
def test_wrong_settings(bindings, error, message, tmp_path):
  with pytest.raises(error, match=message):
    small_lm.run(tmp_path, *SETTINGS, *FOUR, *bindings, text=small_lm.TEXT)


def test_a_tpu():
  with pytest.raises(errors.ConfigError, match="but all cores of a TPU are alike: leave it out"):
    tpu_estimator_model_fn(
      *("lm", None, None, None, True, "batch:4", "", 4, {"targets": 8}, True, 1, 0),
      device_shares={"batch": [3, 1]},
    )


def test_several_workers(tmp_path, monkeypatch):
  cluster = {"worker": ["localhost:1", "localhost:2"]}
  config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
  monkeypatch.setenv("TF_CONFIG", json.dumps(config))
  with pytest.raises(errors.ConfigError, match="names 2 workers: devices of unequal shares are of"):
    small_lm.run(tmp_path, *SETTINGS, *SHARES, text=small_lm.TEXT)
