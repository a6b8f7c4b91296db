"""Learning-rate schedules."""

import gin
import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow.transformer import learning_rate_schedules as schedules

MODULE = "mesh_tensorflow.transformer.learning_rate_schedules"

# A line for each: its name, arguments, and values at some of 100 steps.
VALUES = [
  ("truncated_rsqrt", dict(warmup_steps=16), {0: 0.25, 16: 0.25, 64: 0.125}),
  ("linear_warmup", dict(steps_or_fraction=20), {0: 0.0, 5: 0.25, 20: 1.0, 90: 1.0}),
  ("linear_warmup", dict(steps_or_fraction=0.1), {5: 0.5}),
  ("constant", dict(value=0.5), {0: 0.5, 99: 0.5}),
]


@pytest.mark.parametrize("name,arguments,values", VALUES)
@pytest.mark.parametrize("convert", [int, tf.constant])
def test_values(name, arguments, values, convert):
  schedule = gin.get_configurable(f"{MODULE}.{name}")
  found = [float(schedule(convert(step), 100, **arguments)) for step in values]
  assert found == pytest.approx(list(values.values()))


@pytest.mark.parametrize("convert", [int, float, tf.constant, np.float32])
def test_noam(convert):
  values = [
    schedules.learning_rate_schedule_noam(convert(s), 100, warmup_steps=16)
    for s in (0, 50, 95, 100)
  ]
  np.testing.assert_allclose(values, [0.25, 0.141421, 0.051299, 0], atol=1e-6)


def test_noam_with_offset_and_without_decay():
  value = schedules.learning_rate_schedule_noam(
    150, 200, warmup_steps=16, linear_decay_fraction=0, multiplier=3.0, offset=50
  )
  np.testing.assert_allclose(value, 3.0 * 100**-0.5, rtol=1e-6)


@pytest.mark.parametrize("convert", [int, tf.constant])
def test_slanted_triangular(convert):
  values = [schedules.slanted_triangular(convert(s), 100) for s in (0, 10, 50)]
  np.testing.assert_allclose(values, [0.0003125, 0.01, 0.00569444], rtol=1e-5)
  np.testing.assert_allclose(
    schedules.slanted_triangular(convert(20), 100, start_step=10), 0.01, rtol=1e-6
  )
  # Of five steps a tenth is none: it begins to rise, and is at its peak at step 1.
  short = [schedules.slanted_triangular(convert(s), 5) for s in (0, 1)]
  np.testing.assert_allclose(short, [0.0003125, 0.01], rtol=1e-5)


def test_linear_decay():
  at = lambda s, **kw: float(schedules.linear_decay(s, 100, **kw))  # noqa: E731
  assert [at(s) for s in (0, 90, 95, 100)] == pytest.approx([1, 1, 0.5, 0])
  assert at(75, steps_or_fraction=50) == pytest.approx(0.5)
  assert at(110) == pytest.approx(-1)
  # Exactly 1 is a fraction.
  assert at(50, steps_or_fraction=1) == pytest.approx(0.5)


def test_constants():
  assert schedules.constant(3, 100, value=0.5) == 0.5
  assert schedules.constant_learning_rate(3, 100, learning_rate=0.5).dtype == tf.float32


def test_linear_decay_learning_rate():
  at = lambda s: float(  # noqa: E731
    schedules.linear_decay_learning_rate(s, 1000, initial_lr=0.2, offset=200)
  )
  assert [at(s) for s in (0, 200, 600, 1000)] == pytest.approx([0.2, 0.2, 0.1, 0])


def test_product():
  factors = [2.0, schedules.truncated_rsqrt, schedules.linear_warmup]
  gin.parse_config("""
    truncated_rsqrt.warmup_steps = 16
    linear_warmup.steps_or_fraction = 100
  """)
  value = schedules.product_learning_rate(74, 200, factors=factors, offset=10)
  np.testing.assert_allclose(value, 2.0 * 64**-0.5 * 0.64, rtol=1e-6)
  assert schedules.product_learning_rate(1, 2, factors=[2, 0.5, 3]) == 3.0


def test_selectors():
  gin.parse_config("""
    import mesh_tensorflow.transformer.learning_rate_schedules
    mesh_tensorflow.transformer.learning_rate_schedules.constant_learning_rate.learning_rate = 0.25
  """)
  assert float(schedules.constant_learning_rate(0, 1)) == 0.25


def test_inside_a_tf_function():
  @tf.function
  def rates(step):
    return (
      schedules.slanted_triangular(step=step, total_train_steps=100),
      schedules.learning_rate_schedule_noam(step=step, total_train_steps=100),
    )

  assert [r.shape for r in rates(tf.constant(3, tf.int64))] == [[], []]
