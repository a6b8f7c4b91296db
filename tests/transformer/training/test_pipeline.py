"""The trainer with `run.pipeline_stages`: losses, checkpoints and texts are those without."""

from __future__ import annotations

import numpy as np
import pytest

from mesh_tensorflow import checkpoint, errors
from tests.kinds import kept
from tests.transformer import small_lm
from tests.transformer import worker_processes as program

SETTINGS = [
  "num_layers = 2",
  "dropout_rate = 0.1",
  "run.max_grad_norm = 0.5",
  "run.ema_decay = 0.9",
  "run.gradient_accumulation_steps = 4",
  "run.report_every = 1",
  "run.train_steps = 4",
  "run.batch_size = ('sequences_per_batch', 8)",
]
FOUR_LAYERS = "num_layers = 4"
TWO, FOUR = "run.pipeline_stages = 2", "run.pipeline_stages = 4"
PIPELINES = {
  "two": (TWO,),
  "four, zero bubble": (FOUR, "run.pipeline_schedule = 'zero_bubble'"),
  "two, gpipe, simd": (
    TWO,
    "run.pipeline_schedule = 'gpipe'",
    "run.mesh_implementation = 'simd'",
    "run.mesh_shape = 'model:2'",
    "run.layout_rules = 'd_ff:model,heads:model,vocab:model'",
  ),
  "two, batch, shards": (
    TWO,
    "run.mesh_shape = 'batch:2'",
    "run.layout_rules = 'batch:batch'",
    "run.shard_state = 'batch'",
  ),
  "two, chunks": (TWO, "run.pipeline_chunks = 2"),
  "two, four chunks, simd, zero bubble": (
    TWO,
    FOUR_LAYERS,
    "run.pipeline_chunks = 4",
    "run.mesh_implementation = 'simd'",
    "run.pipeline_schedule = 'zero_bubble'",
  ),
  "two, skipping": (TWO, "run.nonfinite = 'skip'"),
  "two, scaled": (TWO, "run.loss_scale = 'dynamic'"),
  "two, recomputed": (TWO, "transformer.LayerStack.recompute_grads = True"),
}
# Chunks, too: test_a_training_goes_on_with_other_stages.
KEPT = ["four, zero bubble", "two, gpipe, simd"]


def names(folder):
  return sorted(checkpoint.describe(str(folder / "model" / "model.ckpt-4")))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """The folder of a training on one device; the losses of its steps."""
  folder = tmp_path_factory.mktemp("whole")
  small_lm.run(folder, *SETTINGS, text=small_lm.TEXT)
  return folder, program.losses(folder / "model")


@pytest.fixture(scope="module")
def whole_of_four_layers(tmp_path_factory):
  """Likewise, of a larger model."""
  folder = tmp_path_factory.mktemp("four_layers")
  small_lm.run(folder, *SETTINGS, FOUR_LAYERS, text=small_lm.TEXT)
  return folder, program.losses(folder / "model")


@pytest.mark.parametrize("pipeline", kept(list(PIPELINES), KEPT))
def test_a_training_is_the_same(pipeline, request, tmp_path):
  small_lm.run(tmp_path, *SETTINGS, *PIPELINES[pipeline], text=small_lm.TEXT)
  large = FOUR_LAYERS in PIPELINES[pipeline]
  folder, losses = request.getfixturevalue("whole_of_four_layers" if large else "whole")
  found = program.losses(tmp_path / "model")
  np.testing.assert_allclose(list(found.values()), list(losses.values()), rtol=2e-5)
  extra = {n for n in names(tmp_path) if n.startswith("_loss_scale")}
  assert set(names(tmp_path)) - extra == set(names(folder))


@pytest.mark.parametrize("last", [(), pytest.param((FOUR,), marks=pytest.mark.long)])
def test_a_training_goes_on_with_other_stages(last, whole, tmp_path):
  """Two steps in two stages of two runs, two in one stage or four."""
  _, losses = whole
  chunks = (TWO, "run.pipeline_chunks = 2")
  for step, stages in ((2, chunks), (4, last)):
    small_lm.run(tmp_path, *SETTINGS, *stages, f"run.train_steps = {step}", text=small_lm.TEXT)
  found = program.losses(tmp_path / "model")
  np.testing.assert_allclose(list(found.values()), list(losses.values()), rtol=1e-4)


def test_texts_are_continued_through_the_stages(whole):
  folder, _ = whole
  plain = small_lm.infer(folder, ["To be", "or"], *SETTINGS, step=4)
  chunks = (TWO, "run.pipeline_chunks = 2")
  assert plain == small_lm.infer(folder, ["To be", "or"], *SETTINGS, *chunks, step=4)


def test_where_a_loss_became_nan_is_found(tmp_path):
  """The replay has variables of its own on all stages."""
  settings = [*SETTINGS, TWO, "run.learning_rate_schedule = 1e35", "run.max_grad_norm = None"]
  with pytest.raises(errors.NonFiniteError, match="was not finite first, in step [23]"):
    small_lm.run(tmp_path, *settings, text=small_lm.TEXT)


def test_microbatches_by_default(tmp_path):
  """A user who says nothing of them gets some, so that the stages work side by side."""
  from mesh_tensorflow.training import program as training

  seen = []
  original = training.serialize_training_step

  def counted(*args, **kwargs):
    seen.append(args[3])
    return original(*args, **kwargs)

  training.serialize_training_step = counted
  try:
    settings = [s for s in SETTINGS if "accumulation" not in s]
    small_lm.run(tmp_path, *settings, TWO, "run.train_steps = 1", text=small_lm.TEXT)
  finally:
    training.serialize_training_step = original
  assert seen and min(seen) > 1


@pytest.mark.parametrize(
  "bindings,error,message",
  [
    (["run.pipeline_stages = 0"], errors.ConfigError, "pipeline_stages"),
    (["run.pipeline_schedule = '2f2b'"], errors.ConfigError, "gpipe"),
    ([FOUR, "num_layers = 1"], errors.ConfigError, "is 4, and the model has 2 layers"),
    (
      [TWO, FOUR_LAYERS, "run.pipeline_chunks = 8"],
      errors.ConfigError,
      "8 runs on each of 2 .* need 16; .* 4 at",
    ),
    (["run.pipeline_chunks = 2"], errors.ConfigError, "run.pipeline_stages is 1, whose layers are"),
    ([TWO, "run.mesh_devices = ['CPU:0']"], errors.MeshShapeError, "times 2 run.pipeline_stages"),
  ],
)
def test_wrong_settings(bindings, error, message, tmp_path):
  with pytest.raises(error, match=message):
    small_lm.run(tmp_path, *SETTINGS, *bindings, text=small_lm.TEXT)
