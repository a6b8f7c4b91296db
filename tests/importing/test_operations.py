"""Each family of operations, beside TensorFlow, on layouts that split it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.importing import comparing

RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
  return RNG.normal(size=shape).astype(np.float32)


X, Y = floats(4, 6, 8), floats(4, 6, 8)
W, V = tf.Variable(floats(8, 4), name="w"), tf.Variable(floats(2, 4, 8), name="v")
DIMS = {"x": ["batch", "length", "d"]}
LAYOUTS = ("batch:r,d:c", "length:r,batch:c", "d:r,length:c")

# name -> a function of x (and y), each [batch 4, length 6, d 8].
ONE: dict[str, Callable[[Any], Any]] = {
  "unary": lambda x: tf.math.erf(x) + tf.nn.relu6(x) * tf.nn.elu(tf.math.log1p(tf.abs(x))),
  "of_mtf": lambda x: tf.exp(-x) * tf.sigmoid(x) + tf.math.rsqrt(tf.square(x) + 1.0) - tf.tanh(x),
  "softplus_pow": lambda x: tf.math.softplus(x) ** 3.0 / (1.0 + tf.nn.leaky_relu(x) ** 2),
  "clip_select": lambda x: tf.where(x > 0.3, tf.clip_by_value(x, -1.0, 0.5), tf.zeros_like(x)),
  "compare_cast": lambda x: tf.cast(tf.logical_and(x > 0, x < 1), tf.float32) * x,
  "integers": lambda x: tf.cast(x * 10, tf.int32) // 3 + tf.cast(x * 10, tf.int32) % 4,
  "broadcast": lambda x: x * x[0, 0] + tf.reduce_mean(x, [0, 2], keepdims=True),
  "bias": lambda x: tf.nn.bias_add(x, V[0, 0] * 2.0),
  "matmul": lambda x: tf.matmul(x, W),
  "matmul_transposed": lambda x: tf.matmul(tf.reshape(x, [-1, 8]), W, transpose_b=False),
  "self_scores": lambda x: tf.matmul(tf.nn.softmax(tf.matmul(x, x, transpose_b=True)), x),
  "matmul_of_int8": lambda x: tf.matmul(
    *(tf.cast(tf.round(9.0 * v), tf.int8) for v in (x, W)), output_type=tf.int32
  ),
  "einsum": lambda x: tf.einsum("btd,hkd->bthk", x, V),
  "einsum_ellipsis": lambda x: tf.einsum("...d,dk->...k", x, W),
  "sums": lambda x: (tf.reduce_sum(x, 1), tf.reduce_mean(x), tf.reduce_sum(x, [0, 2], True)),
  "extremes": lambda x: (tf.reduce_max(tf.round(x), 2), tf.reduce_min(x, [0, 1])),
  "norms": lambda x: tf.norm(x, axis=-1) + tf.reduce_prod(x[:, :, :3], -1),
  "logical": lambda x: (tf.reduce_any(x > 1, 1), tf.reduce_all(x > -1, [0, 2])),
  "integer_mean": lambda x: tf.reduce_mean(tf.cast(x * 9, tf.int32), 1),
  "softmax": lambda x: (tf.nn.softmax(x), tf.nn.log_softmax(x, 1), tf.reduce_logsumexp(x, 2)),
  "dense_entropy": lambda x: tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(x * 2), x),
  "sparse_entropy": lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(
    tf.argmax(x[:, :, ::-1], -1), x
  ),
  "flatten": lambda x: tf.reshape(x, [4, 48]) * 2.0,
  "heads": lambda x: tf.transpose(tf.reshape(x, [4, 6, 2, 4]), [0, 2, 1, 3]),
  "other_split": lambda x: tf.reshape(tf.reshape(x, [4, 3, 2, 8]), [12, 16]) + 1.0,
  "squeeze": lambda x: tf.squeeze(tf.expand_dims(x, 2), [2]) + tf.transpose(x)[0, 0, 0],
  "pack": lambda x: tf.stack([x, x * 2.0, tf.ones_like(x)], 1),
  "unpack": lambda x: tf.unstack(x, axis=1)[::2],
  "repeat": lambda x: tf.tile(x, [1, 2, 1]) + tf.broadcast_to(x[:1, :1], [4, 12, 8]),
  "fill": lambda x: tf.fill([4, 6], tf.reduce_sum(x)) + tf.ones([4, 6]),
  "constants": lambda x: x + np.arange(8, dtype=np.float32) * np.tri(6, 8, dtype=np.float32),
  "add_n": lambda x: tf.add_n([x, x * x, tf.stop_gradient(x)]),
  "diagonal": lambda x: (tf.einsum("iik->ik", x[:, :4]), tf.einsum("iik->k", x[:, :4])),
  "fourier": lambda x: (
    tf.abs(tf.signal.fft2d(tf.complex(x, x * x))) + tf.signal.irfft(tf.signal.rfft(x))
  ),
  "complex": lambda x: tf.math.real(tf.exp(tf.complex(x, x * 2.0)) * tf.complex(x, -x)),
  "nothing": lambda x: (tf.concat([x[:, :0], x], 1) * 2.0, x[:, :0] * 2.0, tf.shape(x)),
  "short_floats": lambda x: (
    tf.cast(tf.cast(x, tf.float64) ** 2, tf.float32)
    + tf.cast(tf.round(tf.cast(x, tf.bfloat16)), tf.float32)
  ),
  "of_joined_axes": lambda x: (
    tf.nn.softmax(tf.reshape(x, [4, 48])),
    tf.reduce_max(tf.reshape(x, [4, 48]), 1),
    tf.argmax(tf.reshape(x, [24, 8]), 0),
    tf.nn.sparse_softmax_cross_entropy_with_logits(
      tf.constant([1, 47, 9, 0]), tf.reshape(x, [4, 48])
    ),
  ),
  "as_it_is": lambda x: (x, x, tf.constant(3.0), x + tf.transpose(x[:, :4], [1, 0, 2])[:, :1]),
  "constant_operand": lambda x: tf.einsum("btd,de->bte", x, np.eye(8, 3, dtype=np.float32)),
}


CASES = [(name, LAYOUTS[i % len(LAYOUTS)]) for i, name in enumerate(ONE)]
OTHERS = [(name, layout) for name in ONE for layout in LAYOUTS if (name, layout) not in CASES]


@pytest.mark.parametrize(
  ("name", "layout"), [*CASES, *(pytest.param(*c, marks=pytest.mark.long) for c in OTHERS)]
)
def test_operations_on_layouts(name: str, layout: str, cpu_devices: list[str]) -> None:
  fn = ONE[name]
  both = comparing.compare(lambda x: fn(x), [X], layout, cpu_devices[:4], dims=DIMS)
  assert both.difference < 5e-6
  assert not both.imported.fallbacks


def tape_inside(x: Any) -> Any:
  with tf.GradientTape() as tape:
    tape.watch(x)
    y = tf.reduce_sum(
      tf.nn.relu(tf.matmul(x, W)) ** 2 + tf.tanh(tf.nn.bias_add(x, V[0, 0]))[..., :4]
    )
  return tape.gradient(y, [x, W])


def test_gradients_that_the_function_takes(cpu_devices: list[str]) -> None:
  both = comparing.compare(tape_inside, [X], "batch:r,d:c", cpu_devices[:4], dims=DIMS)
  assert both.difference < 5e-6
  # Traced while an mtf.function is traced, a tape records all the same.
  imported = mtf.from_tensorflow(tape_inside)
  impl = mtf.SimdMeshImpl("r:2", "batch:r", cpu_devices[:2])
  spec = mtf.TensorSpec("batch:4,length:6,d:8")
  dx, _ = mtf.function(impl, input_signature=[spec])(lambda x: imported(x))(X)
  np.testing.assert_allclose(dx, both.expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("simd", [True, pytest.param(False, marks=pytest.mark.long)])
def test_some_of_each_kind_traced(simd: bool, cpu_devices: list[str]) -> None:
  def fn(x: Any) -> Any:
    names = ("of_mtf", "self_scores", "extremes", "softmax", "other_split", "unpack")
    return [ONE[name](x) for name in names]

  imported = comparing.imported_of(fn, [X], DIMS)
  both = comparing.compare(
    fn, [X], "batch:r,length:c", cpu_devices[:4], imported=imported, simd=simd, traced=True
  )
  assert both.difference < 5e-6


def test_one_tensor_for_two_arguments_and_two_for_one_name(cpu_devices: list[str]) -> None:
  fn = lambda x, y: (tf.matmul(x, y, transpose_b=True), x - y)  # noqa: E731
  both = comparing.compare(fn, [X, Y], "x.0:r,x.2:c", cpu_devices[:4])
  assert both.difference < 5e-6
  imported = comparing.imported_of(fn, [X, X])
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "mesh")
  x = mtf.import_tf_tensor(mesh, X, mtf.Shape([("a", 4), ("b", 6), ("c", 8)]))
  product, zero = imported(x, x)
  lowering = mtf.Lowering(graph, {mesh: mtf.PlacementMeshImpl("r:2", "y.1:r", cpu_devices[:2])})
  np.testing.assert_allclose(
    lowering.export_to_tf_tensor(product), X @ X.transpose(0, 2, 1), rtol=1e-5, atol=1e-5
  )
  assert not np.any(lowering.export_to_tf_tensor(zero))
