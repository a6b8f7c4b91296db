"""Norms and scalar summaries of a training step: NumPy's numbers on every layout, if asked for."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_settings.trainer import TrainerSettings
from mesh_tensorflow.training import reported, several_steps
from mesh_tensorflow.transformer import transformer
from tests.kinds import kept
from tests.transformer import training_program as program

RATE = 0.125


@pytest.fixture(autouse=True)
def smaller(monkeypatch):
  small = program.BINDINGS.replace("hidden_size = 64", "hidden_size = 16")
  monkeypatch.setattr(program, "BINDINGS", small)


def rows(trainer, steps: int, values=None, *, optimizer=mtf.optimize.SgdOptimizer, **kwargs):
  """What so many steps return, [values, steps], and the weights before and after the last."""
  trainer.steps.settings = TrainerSettings(**kwargs)
  step_fn = trainer.steps.train_step(["targets"], optimizer, reported=values)
  shapes = [tf.TensorSpec([program.BATCH, program.LENGTH], tf.int32)]
  reports = reported.ReportSteps(0, steps, 2) if values and values.norms else None
  compiled = several_steps.compile_steps(
    step_fn, shapes, lambda _: tf.constant(RATE), bool(kwargs), reports=reports
  )
  data = next(iter(program.dataset({"targets": program.LENGTH}).batch(program.BATCH).batch(steps)))
  batches = tf.cast(data["targets"], tf.int32)
  compiled.get_concrete_function()
  results = []
  for part, first in ((batches[:-1], 0), (batches[-1:], steps - 1)):
    before = program.weights(trainer)
    results.append(compiled((part,), tf.constant(first, tf.int64)).numpy())
  return np.concatenate(results, 1), before, program.weights(trainer)


def norm(arrays) -> float:
  return float(np.sqrt(sum(np.sum(np.square(a.astype(np.float64))) for a in arrays)))


LAYOUTS = [
  ("", "placement", {}),
  ("batch:2,model:2", "placement", {}),
  ("batch:2,model:2", "simd", {}),
  ("batch:2", "placement", {"microbatch_tokens": program.LENGTH * 2}),
  ("all:3", "placement", {"layout": "experts:all"}),
]


@pytest.mark.parametrize(("mesh", "implementation", "options"), kept(LAYOUTS, LAYOUTS[2:]))
@pytest.mark.slow
def test_norms_are_those_of_numpy_on_every_layout(mesh, implementation, options, cpu_devices):
  """SGD's updates are the gradients times the rate: so NumPy knows them, too."""
  trainer = program.make_trainer(mesh, implementation, **options)
  values = reported.ReportedValues()
  table, before, after = rows(trainer, 2, values)
  assert values.names == ["gradient_norm", "parameter_norm", "update_norm"]
  moved = norm(after[n] - before[n] for n in after)
  assert moved > 1e-3
  np.testing.assert_allclose(table[2:, -1], [moved / RATE, norm(after.values()), moved], rtol=2e-5)


@pytest.mark.slow
def test_steps_are_the_same_with_norms_and_without():
  plain, _, weights = rows(program.make_trainer(), 4)
  values = reported.ReportedValues()
  asked, _, same = rows(program.make_trainer(), 4, values)
  np.testing.assert_array_equal(plain, asked[:2])
  for name, value in weights.items():
    np.testing.assert_array_equal(value, same[name], err_msg=name)
  # Asked for are the first, the multiples of 2, and the last.
  assert ((asked[2:] > 0) == [True, True, False, True]).all()


def test_a_step_with_norms_can_be_planned():
  """One exchange more, of three numbers."""
  reports = []
  for values in (None, reported.ReportedValues()):
    trainer = program.make_trainer("batch:2,model:2", "simd")
    step = trainer.steps.train_step(["targets"], mtf.optimize.SgdOptimizer, reported=values)
    reports.append(mtf.describe(step))
  plain, asked = [[c.kind for op in r.operations for c in op.collectives] for r in reports]
  assert asked == [*plain, "allreduce"]


def test_layers_report_scalars(monkeypatch):
  """Also in microbatches, and once where recomputation makes the operations again."""
  from_layer = transformer.sublayer_rms_norm

  def reporting(x, layer_stack, context, **kwargs):
    mtf.scalar_summary("largest", mtf.reduce_max(mtf.abs(x)))
    return from_layer(x, layer_stack, context, **kwargs)

  tables = []
  for options in ({}, {"microbatch_tokens": 2 * program.LENGTH}):
    trainer = program.make_trainer(dropout=False, **options)
    stack = trainer.steps.model.layer_stack
    monkeypatch.setattr(stack, "_sublayers_final", [reporting], raising=True)
    values = reported.ReportedValues(norms=False)
    tables.append(rows(trainer, 2, values)[0])
    assert values.names == ["transformer/largest"]
    assert tables[-1].shape == (3, 2) and (tables[-1][2] > 0).all()
  # In microbatches it is that of the last.
  assert tables[1][2, 0] <= tables[0][2, 0]
