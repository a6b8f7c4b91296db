"""`mtf.Trainer`: a model function of one's own on the common loop."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import checkpoint, errors
from mesh_tensorflow.training.best_checkpoint import best_checkpoint

BATCH, PLACE, HIDDEN = mtf.Dimension("batch", 8), mtf.Dimension("place", 4), ("hidden", 8)
ARM = mtf.Dimension("arm", 2)
FEATURES = {"x": mtf.TensorSpec([BATCH, PLACE]), "label": mtf.TensorSpec([BATCH], tf.int32)}


def model_fn(features, mode):
  hidden = mtf.layers.dense(
    features["x"], mtf.Dimension(*HIDDEN), reduced_dims=[PLACE], activation=mtf.tanh, name="first"
  )
  hidden = mtf.dropout(hidden, mode == "train", keep_prob=0.9)
  logits = mtf.layers.dense(hidden, ARM, reduced_dims=[mtf.Dimension(*HIDDEN)], name="logits")
  losses = mtf.layers.softmax_cross_entropy_with_logits(logits, features["label"], ARM)
  right = mtf.to_float(mtf.equal(mtf.argmax(logits, ARM), features["label"]))
  return mtf.reduce_mean(losses), {"right": mtf.reduce_mean(right)}


def points(number: int = 60, seed: int = 0) -> tf.data.Dataset:
  """Points that a plane tells apart; no whole number of batches."""
  x = np.random.default_rng(seed).normal(size=[number, PLACE.size]).astype("f")
  examples = {"x": x, "label": (x.sum(1) > 0).astype("int32")}
  return tf.data.Dataset.from_tensor_slices(examples).shuffle(number)


def make_trainer(cpu_devices, model_dir=None, *, mesh="rows:1", model_fn=model_fn, **fields):
  shape = mtf.convert_to_shape(mesh)
  impl = mtf.PlacementMeshImpl(shape, "batch:rows", cpu_devices[: shape.size])
  options = {
    "optimizer": mtf.optimize.AdamWOptimizer, "learning_rate": 0.03, "iterations_per_loop": 4,
    "quiet": True, "peak_flops": 0, **fields,
  }  # fmt: skip
  return mtf.Trainer(
    model_fn, impl, FEATURES, model_dir=str(model_dir) if model_dir else None, **options
  )


def weights(trainer):
  return {v.name: v.numpy() for v in trainer.state.store}


def test_goes_on_as_if_it_had_not_been_interrupted(tmp_path, cpu_devices):
  """Bit for bit, in the middle of an epoch, with dropout, averages and accumulation."""
  how = dict(ema_decay=0.9, gradient_accumulation_steps=2, max_grad_norm=0.5)
  whole = make_trainer(cpu_devices, **how)
  losses = whole.train(points, 12)
  begun = make_trainer(cpu_devices, tmp_path, **how).train(points, 5)
  second = make_trainer(cpu_devices, tmp_path, **how)
  assert begun + second.train(points, 12) == losses
  assert second.step == 12 and second.latest_checkpoint().endswith("model.ckpt-12")
  expected, found = weights(whole), weights(second)
  assert set(expected) == set(found) and any(name.endswith("/ema") for name in found)
  for name, value in expected.items():
    np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_the_position_in_the_data_is_saved(tmp_path, cpu_devices):
  whole = make_trainer(cpu_devices, tmp_path / "a").train(points, 9, checkpoint_input_pipeline=True)
  first = make_trainer(cpu_devices, tmp_path / "b").train(points, 4, checkpoint_input_pipeline=True)
  again = make_trainer(cpu_devices, tmp_path / "b")
  assert first + again.train(points, 9, checkpoint_input_pipeline=True) == whole


def test_reports_and_evaluations(tmp_path, cpu_devices, capsys):
  held_out = lambda: points(32, seed=1)  # noqa: E731
  trainer = make_trainer(
    cpu_devices, tmp_path, quiet=False, report_every=4, eval_every_steps=10,
    eval_dataset_fn=held_out, keep_checkpoint_max=1,
  )  # fmt: skip
  trainer.train(points, 20)
  reports = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
  by_step = {r["step"]: r for r in reports if "loss" in r}
  assert set(by_step) == {1, 4, 8, 12, 16, 20}
  assert {"right", "gradient_norm", "learning_rate"} <= set(by_step[8])
  assert "examples_per_second" in by_step[8]
  evaluated = [r for r in reports if "eval/loss" in r]
  assert [r["step"] for r in evaluated] == [10, 20] and evaluated[1]["eval/right"] > 0.5
  found = trainer.evaluate(held_out)
  assert found["loss"] == pytest.approx(evaluated[1]["eval/loss"], rel=1e-5)
  said = capsys.readouterr().out
  assert "step      20/20  loss" in said and "examples/s" in said and "eval loss" in said
  # Who evaluates without training gets the newest checkpoint.
  reader = make_trainer(cpu_devices, tmp_path)
  assert reader.evaluate(held_out) == pytest.approx(found, rel=1e-5) and reader.step == 20


def test_a_metric_of_its_own_chooses_the_best(tmp_path, cpu_devices, capsys):
  how = {"eval_every_steps": 3, "eval_dataset_fn": lambda: points(32, seed=1)}
  trainer = make_trainer(cpu_devices, tmp_path, best_metric="right", quiet=False, **how)
  expected = make_trainer(cpu_devices).train(points, 9)
  assert trainer.train(points, 9) == expected  # The evaluation is traced first, for its names.
  reports = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
  right = {r["step"]: r["eval/right"] for r in reports if "eval/right" in r}
  assert sorted(right) == [3, 6, 9] and len(set(right.values())) > 1
  best = max(right, key=lambda step: (right[step], -step))
  assert best_checkpoint(str(tmp_path)).endswith(f"model.ckpt-{best}")
  with pytest.raises(errors.ConfigError, match="best_metric = 'rihgt'.* loss, right; did you mean"):
    make_trainer(cpu_devices, best_metric="rihgt", **how).train(points, 9)


def test_the_mesh_changes_nothing(cpu_devices):
  alone = make_trainer(cpu_devices).train(points, 6)
  split = make_trainer(cpu_devices, mesh="rows:2").train(points, 6)
  np.testing.assert_allclose(split, alone, rtol=1e-5)
  assert make_trainer(cpu_devices, seed=7).train(points, 6) != alone


def test_starts_from_a_checkpoint(tmp_path, cpu_devices):
  first = make_trainer(cpu_devices, tmp_path / "a")
  first.train(points, 3)
  other = make_trainer(cpu_devices, tmp_path / "b", init_checkpoint=str(tmp_path / "a"))
  assert len(other.train(points, 5)) == 2  # The step goes on.
  only = make_trainer(cpu_devices, is_trained=lambda v: "logits" in v.full_name)
  only.train(points, 2)
  assert {n for n in weights(only) if n.startswith("first/")} == {"first/kernel", "first/bias"}


def test_a_loss_that_is_not_finite_names_its_tensor(tmp_path, cpu_devices):
  def diverges(features, mode):
    loss, metrics = model_fn(features, mode)
    return loss + mtf.log(mtf.reduce_sum(features["x"]) * 0.0), metrics

  with pytest.raises(errors.NonFiniteError, match=r"loss became -inf at step 1 \(log.* was not"):
    make_trainer(cpu_devices, tmp_path, model_fn=diverges).train(points, 3)
  assert not checkpoint.all_checkpoints(str(tmp_path))


def test_wrong_use_is_told(tmp_path, cpu_devices):
  with pytest.raises(errors.ConfigError, match="no setting 'stpes'"):
    make_trainer(cpu_devices, stpes=3)
  with pytest.raises(errors.ConfigError, match="report_every = 0: it must be"):
    make_trainer(cpu_devices, report_every=0)
  impl = mtf.PlacementMeshImpl("rows:1", "", cpu_devices[:1])
  features = {"x": FEATURES["x"], "y": mtf.TensorSpec([PLACE])}
  with pytest.raises(errors.ShapeError, match="first dimension of all features must be the batch"):
    mtf.Trainer(model_fn, impl, features, optimizer=mtf.optimize.SgdOptimizer)
  with pytest.raises(errors.ShapeError, match="must return scalar Tensors; loss is Shape"):
    make_trainer(cpu_devices, model_fn=lambda f, _: f["x"]).train(points, 1)
  trainer = make_trainer(cpu_devices)
  with pytest.raises(errors.ConfigError, match="dataset_fn must be a function"):
    trainer.train(points(), 1)
  with pytest.raises(errors.DataError, match="must yield dicts with x, label"):
    trainer.train(lambda: points().map(lambda ex: {"x": ex["x"]}), 1)
  with pytest.raises(errors.DataError, match=r"feature 'x' of an example has shape .*\[4\]"):
    trainer.train(lambda: points().map(lambda ex: {**ex, "x": ex["x"][:3]}), 1)
  with pytest.raises(errors.DataError, match="no complete batch of 8"):
    trainer.train(lambda: points(5), 1)
  with pytest.raises(errors.DataError, match="no complete batch of 8 examples"):
    trainer.evaluate(lambda: points(5))
  with pytest.raises(errors.ConfigError, match="no held-out data sets"):
    make_trainer(cpu_devices, eval_every_steps=2).train(points, 4)


def test_where_a_training_stops_and_its_data_began(tmp_path, cpu_devices):
  make_trainer(cpu_devices, tmp_path).train(points, 3)
  loop = make_trainer(cpu_devices, tmp_path).loop
  assert len(loop.train(points, steps=2)) == 2 and loop.state.step == 5
  with pytest.raises(errors.ConfigError, match=r"seen_data_init_step \(=6\) is after the step 5"):
    loop.train(points, 9, seen_data_init_step=6)
  assert loop.train(points, 5) == []
