"""Random operations: values depend on seed, operation and global index, never on the layout."""

from __future__ import annotations

import tensorflow as tf

import mesh_tensorflow as mtf
from tests.conformance.framework import ONE_DEVICE, T, op

B = mtf.Dimension("b", 8)
AB, ABC = "a:4 b:8", "a:4 b:8 c:12"

DESCRIPTORS = [
  op(
    "random_uniform", lambda mesh: mtf.random_uniform(mesh, mtf.convert_to_shape(ABC)), ONE_DEVICE
  ),
  op(
    "random_uniform_range",
    lambda mesh: mtf.random_uniform(mesh, mtf.convert_to_shape(AB), minval=-3.0, maxval=5.0),
    ONE_DEVICE,
  ),
  op(
    "random_uniform_int",
    lambda mesh: mtf.random_uniform(
      mesh, mtf.convert_to_shape(AB), minval=-3, maxval=9, dtype=tf.int32
    ),
    ONE_DEVICE,
  ),
  op(
    "random_normal",
    lambda mesh: mtf.random_normal(mesh, mtf.convert_to_shape(ABC), mean=1.0, stddev=2.0),
    ONE_DEVICE,
  ),
  op(
    "two_draws",
    lambda mesh: [mtf.random_uniform(mesh, mtf.convert_to_shape(AB)) for _ in range(2)],
    ONE_DEVICE,
  ),
  op("dropout", lambda x: mtf.dropout(x, True, keep_prob=0.6), ONE_DEVICE, ABC),
  op("dropout_rate", lambda x: mtf.dropout(x, True, rate=0.3), ONE_DEVICE, AB),
  op(
    "dropout_noise_shape",
    lambda x: mtf.dropout(x, True, rate=0.5, noise_shape=mtf.Shape([B])),
    ONE_DEVICE,
    ABC,
  ),
  op("dropout_off", lambda x: mtf.dropout(x, False, rate=0.5), lambda x: x, AB),
  op("dropout_keep_all", lambda x: mtf.dropout(x, True, keep_prob=1.0), lambda x: x, AB),
  op(
    "sample_with_temperature",
    lambda x: mtf.sample_with_temperature(x, B, 0.8),
    ONE_DEVICE,
    ABC,
    differentiable=False,
  ),
  op(
    "sample_certain",
    lambda x: mtf.sample_with_temperature(x, B, 1.0),
    lambda x: x.argmax(1),
    T(AB, values=[100.0 * ((3 * i + i // 8) % 8) for i in range(32)]),
    differentiable=False,
  ),
]
