"""The trainer with `run.shard_state`: losses, norms and checkpoints are those without."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mesh_tensorflow import checkpoint
from mesh_tensorflow.errors import LayoutError
from tests.kinds import in_turns, kept
from tests.transformer import small_lm
from tests.transformer import worker_processes as program

MESH = ("run.mesh_shape = 'batch:2,model:2'", "run.layout_rules = 'batch:batch,d_ff:model'")
SETTINGS = [
  "dropout_rate = 0.1",
  "run.max_grad_norm = 0.5",
  "run.ema_decay = 0.9",
  "run.gradient_accumulation_steps = 2",
  "run.report_every = 1",
  "run.train_steps = 4",
]
SHARDINGS = {
  "state": ("run.shard_state = 'batch'", "run.reshard_after_forward = False"),
  "all": ("run.shard_state = 'batch'",),
  "all over both": ("run.shard_state = ['batch', 'model']",),
}

CASES = list(itertools.product(SHARDINGS, ("placement", "simd")))


def names(folder):
  return sorted(checkpoint.describe(str(folder / "model" / "model.ckpt-4")))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """The folder of a training on one device; the losses of its steps."""
  folder = tmp_path_factory.mktemp("whole")
  small_lm.run(folder, *SETTINGS, text=small_lm.TEXT)
  return folder, program.losses(folder / "model")


# All over both: test_a_training_goes_on_otherwise.
@pytest.mark.parametrize(("sharding", "kind"), kept(CASES, in_turns(CASES)[:2]))
def test_a_training_is_the_same(kind, sharding, whole, tmp_path):
  bindings = (*SETTINGS, *MESH, f"run.mesh_implementation = '{kind}'", *SHARDINGS[sharding])
  small_lm.run(tmp_path, *bindings, text=small_lm.TEXT)
  folder, losses = whole
  found = program.losses(tmp_path / "model")
  np.testing.assert_allclose(list(found.values()), list(losses.values()), rtol=1e-4)
  assert names(tmp_path) == names(folder)


@pytest.mark.parametrize("sharding", kept(list(SHARDINGS), ["all over both"]))
def test_a_training_goes_on_otherwise(sharding, whole, tmp_path):
  """Two steps without shards, then with; two with, then without."""
  _, losses = whole
  for first, second in (((), SHARDINGS[sharding]), (SHARDINGS[sharding], ())):
    folder = tmp_path / ("before" if first else "after")
    folder.mkdir()
    small_lm.run(folder, *SETTINGS, *MESH, *first, "run.train_steps = 2", text=small_lm.TEXT)
    small_lm.run(folder, *SETTINGS, *MESH, *second, text=small_lm.TEXT)
    found = program.losses(folder / "model")
    np.testing.assert_allclose(list(found.values()), list(losses.values()), rtol=1e-4)


def test_texts_are_continued_with_shards(whole):
  """Decoding gathers the weights; it says what it says without."""
  folder, _ = whole
  plain = small_lm.infer(folder, ["To be"], "run.train_steps = 4", step=4)
  assert plain == small_lm.infer(folder, ["To be"], *MESH, *SHARDINGS["all"], step=4)


@pytest.mark.parametrize("mode", ["train", "plan", "dry_run"])
def test_a_dimension_that_the_mesh_has_not(mode, tmp_path):
  with pytest.raises(LayoutError, match="sharded over 'data'.*it has batch, model"):
    small_lm.run(
      tmp_path, *MESH, "run.shard_state = 'data'", f"run.mode = '{mode}'", text=small_lm.TEXT
    )


@pytest.mark.subprocess
def test_two_workers_train_as_one_device(tmp_path):
  losses = []
  for n, bindings in (
    (1, ()),
    (2, (*program.on_mesh("all:4", "batch:all"), "run.shard_state = 'all'")),
  ):
    folder = tmp_path / str(n)
    folder.mkdir()
    program.run(n, program.trainer_arguments(folder / "model", *bindings))
    losses.append(list(program.losses(folder / "model").values()))
  np.testing.assert_allclose(losses[1], losses[0], rtol=2e-4)
