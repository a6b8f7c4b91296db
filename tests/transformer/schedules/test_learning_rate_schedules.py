"""Learning-rate schedules."""

import gin
import numpy as np
import pytest
import tensorflow as tf

from mesh_tensorflow.errors import ConfigError
from mesh_tensorflow.transformer import learning_rate_schedules as schedules

MODULE = "mesh_tensorflow.transformer.learning_rate_schedules"

# A line for each: its name, arguments, and values at some of 100 steps.
VALUES = [
  ("truncated_rsqrt", dict(warmup_steps=16), {0: 0.25, 16: 0.25, 64: 0.125}),
  ("linear_warmup", dict(steps_or_fraction=20), {0: 0.0, 5: 0.25, 20: 1.0, 90: 1.0}),
  ("linear_warmup", dict(steps_or_fraction=0.1), {5: 0.5}),
  ("constant", dict(value=0.5), {0: 0.5, 99: 0.5}),
  # The rise ends with the last step of the warm-up; half of the way down is behind it.
  (
    "cosine_decay",
    dict(warmup=20, final_factor=0.1, peak=2.0),
    {
      0: 0.1,
      9: 1.0,
      19: 2.0,
      20: 2.0,
      60: 1.1,
      80: 2 * (0.1 + 0.9 * 0.1464466),
      100: 0.2,
      120: 0.2,
    },
  ),
  ("cosine_decay", dict(warmup=0, final_factor=0.0), {0: 1.0, 50: 0.5, 100: 0.0}),
  (
    "linear_warmup_decay",
    dict(warmup=0.2, final_factor=0.5, peak=4.0),
    {0: 0.2, 19: 4.0, 20: 4.0, 60: 3.0, 100: 2.0, 150: 2.0},
  ),
  (
    "inverse_square_root",
    dict(warmup=16, final_factor=0.25, peak=2.0),
    {0: 0.125, 7: 1.0, 15: 2.0, 63: 1.0, 255: 0.5, 1000: 0.5},
  ),
  (
    "warmup_stable_decay",
    dict(warmup=10, decay=0.4, final_factor=0.2, peak=2.0, decay_shape="linear"),
    {4: 1.0, 9: 2.0, 60: 2.0, 80: 1.2, 100: 0.4, 110: 0.4},
  ),
  (
    "warmup_stable_decay",
    dict(warmup=10, decay=40),
    {59: 1.0, 60: 1.0, 70: 0.5, 96: 1 - 0.9**0.5, 100: 0.0},
  ),
  ("warmup_stable_decay", dict(decay=40, decay_shape="cosine"), {70: 0.8535534, 80: 0.5}),
  ("warmup_stable_decay", dict(warmup=10, decay=0), {5: 0.6, 99: 1.0}),
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


@pytest.mark.parametrize(
  "arguments, words",
  [
    (dict(decay_shape="stairs"), "'stairs' is not one of linear, sqrt, cosine"),
    (dict(warmup=60, decay=0.5), "60 steps of warm-up and 50 of decay are more than the 100 steps"),
  ],
)
def test_wrong_arguments_of_warmup_stable_decay(arguments, words):
  with pytest.raises(ConfigError, match=words):
    schedules.warmup_stable_decay(0, 100, **arguments)


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
