"""Convolutions, pooling, batch norm and resizing of imported functions, beside TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.importing import comparing

RNG = np.random.default_rng(1)


def floats(*shape: int) -> np.ndarray:
  return (0.5 * RNG.normal(size=shape)).astype(np.float32)


def variable(*shape: int) -> tf.Variable:
  return tf.Variable(floats(*shape), name="k" + "x".join(map(str, shape)))


IMAGE, VOLUME = floats(4, 8, 8, 4), floats(2, 4, 4, 8, 4)
DIMS = {"x": ["batch", "height", "width", "channels"]}
K, K1, KG = variable(3, 3, 4, 6), variable(1, 1, 4, 6), variable(3, 3, 2, 6)
KD, KM, KX = variable(3, 3, 4, 1), variable(3, 3, 4, 2), variable(3, 3, 1, 4)
KT, K_ROW, KP = variable(3, 3, 6, 4), variable(3, 4, 8), variable(1, 1, 2, 4)
SCALE, OFFSET = variable(4), variable(4)
V, VT = variable(3, 3, 3, 4, 2), variable(2, 2, 2, 6, 4)


# Given statistics that are variables have no gradient.
MEAN = tf.Variable([0.1, 0.2, 0.3, 0.4], name="mean")
VARIANCE = tf.Variable([1.0, 2.0, 3.0, 4.0], name="variance")


NO_STATISTICS = np.zeros(0, np.float32)


def batch_norm(
  x: Any, training: bool, mean: Any = NO_STATISTICS, variance: Any = NO_STATISTICS, **kwargs: Any
) -> Any:
  """y and the new statistics; TensorFlow's gradient knows of y only."""
  y, *statistics = tf.raw_ops.FusedBatchNormV3(
    x=x, scale=SCALE, offset=OFFSET, mean=mean, variance=variance, is_training=training, **kwargs
  )[:3]
  return y, [tf.stop_gradient(s) for s in statistics]


# A grouped convolution has a gradient on CPUs in XLA only, as Keras calls it.
@tf.function(jit_compile=True)
def grouped(x: Any, kernel: Any) -> Any:
  return tf.nn.conv2d(x, kernel, 1, "SAME")


@tf.function(jit_compile=True)
def grouped_back(y: Any, kernel: Any) -> Any:
  return tf.nn.conv2d_transpose(y, kernel, [4, 16, 8, 4], [2, 1], "SAME")


CASES: dict[str, Callable[[Any], Any]] = {
  "conv": lambda x: tf.nn.conv2d(x, K, 1, "SAME"),
  "conv_strides": lambda x: tf.nn.conv2d(x, K, [1, 2, 1, 1], "VALID"),
  "conv_one_pixel": lambda x: tf.nn.conv2d(x, K1, 2, "VALID"),
  "conv_explicit": lambda x: tf.nn.conv2d(x, K, 2, [(0, 0), (2, 1), (0, 1), (0, 0)]),
  "conv_dilated": lambda x: tf.nn.convolution(x, K, padding="SAME", dilations=[2, 2]),
  "conv_groups": lambda x: grouped(x, KG),
  "conv_channelwise": lambda x: grouped(x, KX),
  "conv_1d": lambda x: tf.nn.conv1d(x[:, 0], K_ROW, 2, "SAME"),
  "conv_of_one_image": lambda x: tf.nn.conv2d(x[:1, :, :1], K, 1, "SAME"),
  "depthwise": lambda x: tf.nn.depthwise_conv2d(x, KD, [1, 1, 1, 1], "SAME"),
  "depthwise_multiplier": lambda x: tf.nn.depthwise_conv2d(x, KM, [1, 2, 2, 1], "VALID"),
  "depthwise_dilated": lambda x: tf.nn.depthwise_conv2d(
    x, KM, [1, 1, 1, 1], "SAME", dilations=[2, 2]
  ),
  "depthwise_of_one_channel": lambda x: tf.nn.depthwise_conv2d(
    x[..., :1], KM[:, :, :1], [1, 1, 1, 1], "SAME"
  ),
  "separable_of_one_channel": lambda x: tf.nn.separable_conv2d(
    x[..., 1:2], KM[:, :, :1], KP, [1, 1, 1, 1], "SAME"
  ),
  "transposed": lambda x: tf.nn.conv2d_transpose(x, KT, [4, 16, 16, 6], 2, "SAME"),
  "transposed_odd": lambda x: tf.nn.conv2d_transpose(x, KT, [4, 18, 10, 6], [2, 1], "VALID"),
  "transposed_groups": lambda x: grouped_back(tf.concat([x, x[..., :2]], -1), KG),
  "transposed_channelwise": lambda x: grouped_back(x, KX),
  "max_pool": lambda x: tf.nn.max_pool2d(x, 3, 2, "SAME"),
  "max_pool_explicit": lambda x: tf.nn.max_pool2d(x, 3, 2, [(0, 0), (1, 0), (1, 1), (0, 0)]),
  "avg_pool": lambda x: tf.nn.avg_pool2d(x, [2, 1], [2, 1], "VALID"),
  "pool_1d": lambda x: (
    tf.nn.max_pool1d(x[:, 1], 2, 2, "VALID") * tf.nn.avg_pool1d(x[:, 0], 2, 2, "SAME")
  ),
  "norm_training": lambda x: batch_norm(x, True),
  "norm_average": lambda x: batch_norm(x, True, MEAN, VARIANCE, exponential_avg_factor=0.25),
  "norm_inference": lambda x: batch_norm(x, False, MEAN, VARIANCE),
  "resize": lambda x: (tf.image.resize(x, [5, 12]), tf.image.resize(x, [16, 8], "nearest")),
  "blocks": lambda x: (tf.nn.space_to_depth(x, 2) * 2.0, tf.nn.depth_to_space(x[:, :4, :4], 2)),
  "phases": lambda x: tf.batch_to_space(
    tf.square(tf.space_to_batch(x, [2, 4], [[1, 1], [0, 0]])), [2, 4], [[0, 2], [1, 0]]
  ),
}  # fmt: skip
LAYOUTS = (
  "batch:r,channels:c",
  "height:r,width:c",
  [("channels", "r"), ("height", "c")],
)
FIRST = [(name, LAYOUTS[i % len(LAYOUTS)]) for i, name in enumerate(CASES)]
OTHERS = [(n, layout) for n in CASES for layout in LAYOUTS if (n, layout) not in FIRST]


@pytest.mark.parametrize(
  ("name", "layout"), [*FIRST, *(pytest.param(*c, marks=pytest.mark.long) for c in OTHERS)]
)
def test_images_on_layouts(name: str, layout: Any, cpu_devices: list[str]) -> None:
  both = comparing.compare(lambda x: CASES[name](x), [IMAGE], layout, cpu_devices[:4], dims=DIMS)
  assert both.difference < 2e-5
  assert not both.imported.fallbacks


def test_volumes_on_both_implementations_with_weights_split(cpu_devices: list[str]) -> None:
  def fn(x: Any) -> Any:
    y = tf.nn.conv3d(x, V, [1, 1, 2, 1, 1], "SAME")
    z = tf.nn.conv3d_transpose(x, VT, [2, 8, 8, 16, 6], 2, "SAME")
    pooled = tf.nn.max_pool3d(x, 2, 2, "VALID"), tf.nn.avg_pool3d(z, 2, [1, 2, 2], "SAME")
    return y, z, pooled

  dims = {"x": ["batch", "d", "h", "w", "channels"]}
  imported = comparing.imported_of(fn, [VOLUME], dims)
  for simd, layout in ((False, "batch:r,w:c"), (True, "channels:r,d:c")):
    both = comparing.compare(
      fn, [VOLUME], layout, cpu_devices[:4], imported=imported, simd=simd, traced=True
    )
    assert both.difference < 2e-5


@tf.function
def small_net(x: Any) -> Any:
  y = tf.nn.relu(
    batch_norm(tf.nn.conv2d(x, KX[..., :1] * tf.ones([1, 1, 4, 4]), 1, "SAME"), True)[0]
  )
  y = tf.nn.max_pool2d(tf.nn.conv2d(y, K, 2, "SAME"), 2, 2, "VALID")
  return tf.reduce_mean(y, [1, 2])


def test_drawn_layouts_of_all_dimensions_of_a_network(cpu_devices: list[str]) -> None:
  """Also of channels, windows, and of what strides make of the space."""
  imported = comparing.imported_of(small_net, [IMAGE], DIMS)
  names = [n for n, d in imported.dimensions.items() if d.size % 2 == 0]
  assert len(names) > 4
  expected = comparing.original(small_net, [IMAGE], [v.variable for v in imported.variables])
  tried = 0
  rng = np.random.default_rng(3)
  for _ in range(4):
    rules = [(n, m) for n, m in zip(rng.permutation(names), ("r", "c"))]
    impl = mtf.PlacementMeshImpl("r:2,c:2", rules, cpu_devices[:4])
    given = comparing.on_mesh(imported, [IMAGE], impl, traced=False)
    assert comparing.Both(imported, expected, given).difference < 2e-5, rules
    tried += 1
  assert tried == 4


def over_channels(x: Any) -> Any:
  sizes = [1, 1, 1, 2]
  y = tf.raw_ops.MaxPool(input=x, ksize=sizes, strides=sizes, padding="VALID")
  return tf.stop_gradient(y)  # TensorFlow has none on CPUs.


def test_what_images_cannot_be_is_computed_whole_or_refused(cpu_devices: list[str]) -> None:
  with pytest.raises(mtf.UnsupportedError, match="windows over batch or channels"):
    comparing.imported_of(over_channels, [IMAGE], fallback="error")
  both = comparing.compare(over_channels, [IMAGE], "batch:r,channels:c", cpu_devices[:4], dims=DIMS)
  assert both.difference < 1e-6 and [op.type for op in both.imported.fallbacks] == ["MaxPool"]
