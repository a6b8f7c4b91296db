"""Common functions of TensorFlow and Keras: each is computed by a rule, or whole on each device.

`python -m tests.importing.common_functions` prints which are which, as `docs/importing.md` has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf

_RNG = np.random.default_rng(7)
X = _RNG.normal(size=(4, 6, 8)).astype(np.float32)
Z = _RNG.normal(size=(4, 6, 8)).astype(np.float32)
POSITIVE = np.abs(X) + np.float32(0.1)
MATRICES = (X[:, :, :6] / 4 + 2 * np.eye(6)).astype(np.float32)
SYMMETRIC = (
  MATRICES @ MATRICES.swapaxes(1, 2) / 4 + np.diag(np.arange(6)) + 0.5 * np.eye(6)
).astype(np.float32)
IMAGES = _RNG.uniform(size=(4, 6, 8, 3)).astype(np.float32)
IDS = np.array([[0, 2, 1], [3, 3, 5], [1, 0, 0], [4, 2, 5]], np.int32)
BITS = np.array([[12, 7, 3], [1, 0, 5], [9, 8, 255], [4, 2, 6]], np.int32)
BOXES = np.array([[0.1, 0.2, 0.8, 0.9], [0, 0, 1, 1], [0.3, 0.1, 0.6, 0.7]], np.float32)
_TABLE = tf.Variable(_RNG.normal(size=(6, 8)).astype(np.float32), name="table")


@dataclasses.dataclass(frozen=True)
class Function:
  """A function with arguments to try it with.

  Attributes:
    fn: the function.
    args: the arguments.
    tolerance: the largest difference, in units of the largest value of a tensor.
  """

  fn: Callable[..., Any]
  args: tuple[np.ndarray, ...]
  tolerance: float = 2e-5


FUNCTIONS: dict[str, Function] = {}


def _add(args: Sequence[np.ndarray], tolerance: float = 2e-5, **fns: Callable[..., Any]) -> None:
  for name, fn in fns.items():
    FUNCTIONS[name.replace("__", ".")] = Function(fn, tuple(args), tolerance)


def _named(*names: str) -> dict[str, Callable[..., Any]]:
  """Functions of TensorFlow that take the arguments as they are."""
  found: dict[str, Callable[..., Any]] = {}
  for name in names:
    fn: Any = tf
    for part in name.split("."):
      fn = getattr(fn, part)
    found[f"tf__{name.replace('.', '__')}"] = fn
  return found


_add([X], **_named(
  "abs", "exp", "tanh", "sigmoid", "square", "sign", "round", "floor", "sin", "math.erf",
  "math.softplus", "nn.relu", "nn.gelu", "nn.elu", "nn.selu", "nn.silu", "nn.leaky_relu",
  "nn.softmax", "nn.log_softmax", "nn.l2_loss", "reduce_sum", "reduce_mean", "reduce_max",
  "reduce_prod", "reduce_logsumexp", "math.reduce_std", "math.reduce_variance", "math.cumsum",
  "math.cumprod", "argmax", "sort", "argsort", "transpose", "zeros_like", "ones_like",
  "shape", "size", "math.is_nan", "nn.crelu", "nn.relu6", "math.l2_normalize",
  "math.reduce_euclidean_norm", "linalg.norm", "linalg.normalize",
))  # fmt: skip
_add([POSITIVE], **_named("sqrt", "math.rsqrt", "math.log", "math.lgamma", "math.digamma"))
_add([X, Z], **_named(
  "add", "subtract", "multiply", "maximum", "minimum", "math.squared_difference", "greater",
  "math.divide_no_nan", "atan2", "math.floormod",
))  # fmt: skip
_add(
  [X],
  tf__reshape=lambda x: tf.reshape(x, [4, 2, 3, 8]),
  tf__expand_dims=lambda x: tf.expand_dims(x, 1),
  tf__concat=lambda x: tf.concat([x, 2 * x], -1),
  tf__stack=lambda x: tf.stack([x, tf.sin(x)], 1),
  tf__unstack=lambda x: tf.unstack(x, axis=1)[2],
  tf__split=lambda x: tf.split(x, 2, axis=-1)[1],
  tf__tile=lambda x: tf.tile(x, [1, 2, 1]),
  tf__repeat=lambda x: tf.repeat(x, 2, axis=1),
  tf__pad=lambda x: tf.pad(x, [(0, 0), (1, 2), (0, 0)]),
  tf__reverse=lambda x: tf.reverse(x, [1]),
  tf__roll=lambda x: tf.roll(x, 2, 1),
  tf__slice=lambda x: tf.slice(x, [0, 1, 0], [4, 3, 8]),
  tf__strided_slice=lambda x: x[:, ::2, 1:],
  tf__broadcast_to=lambda x: tf.broadcast_to(x[:, :1], [4, 6, 8]),
  tf__ensure_shape=lambda x: tf.ensure_shape(x * 2, [4, 6, 8]),
  tf__clip_by_value=lambda x: tf.clip_by_value(x, -0.5, 1.0),
  tf__clip_by_norm=lambda x: tf.clip_by_norm(x, 1.0),
  tf__clip_by_global_norm=lambda x: tf.clip_by_global_norm([x, 2 * x[:, 0]], 1.0)[0],
  tf__where=lambda x: tf.where(x > 0, x, 0.1 * x),
  tf__boolean_mask=lambda x: tf.reduce_sum(tf.boolean_mask(x, x[..., 0] > 0), 0),
  tf__unique=lambda x: tf.cast(tf.unique(tf.cast(2 * x[0, 0], tf.int32))[1], tf.float32) * x,
  tf__math__top_k=lambda x: tf.math.top_k(x, 3).values,
  tf__math__bincount=lambda x: tf.ensure_shape(
    tf.math.bincount(tf.cast(tf.abs(x[:, 0]), tf.int32), minlength=6, maxlength=6), [6]),
  tf__histogram_fixed_width=lambda x: tf.histogram_fixed_width(x, [-2.0, 2.0], 5),
  tf__searchsorted=lambda x: tf.searchsorted(tf.sort(x), x + 0.1),
  tf__raw_ops__Bucketize=lambda x: tf.raw_ops.Bucketize(input=x, boundaries=[-1.0, 0.0, 0.5]),
  tf__bitwise__invert=lambda x: tf.bitwise.invert(tf.cast(4 * x, tf.int32)),
  tf__linalg__diag=lambda x: tf.linalg.diag(x[:, 0]),
  tf__linalg__diag_part=lambda x: tf.linalg.diag_part(x),
  tf__linalg__set_diag=lambda x: tf.linalg.set_diag(x, tf.sin(x[:, :, 0])),
  tf__linalg__band_part=lambda x: tf.linalg.band_part(x, 1, 2),
  tf__linalg__trace=lambda x: tf.linalg.trace(x),
  tf__linalg__cross=lambda x: tf.linalg.cross(x[..., :3], x[..., 3:6]),
  tf__linalg__tensor_diag=lambda x: tf.linalg.tensor_diag(x[0, 0]),
  tf__linalg__qr=lambda x: tf.linalg.qr(tf.transpose(x, [0, 2, 1])),
  tf__reverse_sequence=lambda x: tf.reverse_sequence(x, tf.constant([1, 4, 6, 3]), 1, 0),
  tf__math__segment_max=lambda x: tf.math.segment_max(x, tf.constant([0, 0, 1, 2])),
  tf__math__segment_mean=lambda x: tf.math.segment_mean(x, tf.constant([0, 0, 1, 2])),
  tf__math__segment_sum=lambda x: tf.math.segment_sum(x, tf.constant([0, 0, 1, 2])),
  tf__math__unsorted_segment_max=lambda x: tf.math.unsorted_segment_max(
    x, tf.constant([2, 0, 0, 1]), 3),
  tf__math__unsorted_segment_min=lambda x: tf.math.unsorted_segment_min(
    x, tf.constant([2, 0, 0, 1]), 3),
  tf__math__unsorted_segment_prod=lambda x: tf.math.unsorted_segment_prod(
    x, tf.constant([2, 0, 0, 1]), 3),
  tf__math__unsorted_segment_sum=lambda x: tf.math.unsorted_segment_sum(
    x, tf.constant([2, 0, 0, 1]), 3),
  tf__sparse__segment_sum=lambda x: tf.sparse.segment_sum(
    x, tf.constant([0, 3, 1]), tf.constant([0, 0, 1]), num_segments=2),
  tf__sparse__from_dense=lambda x: tf.sparse.to_dense(tf.sparse.from_dense(x[0])) * x,
  tf__quantization__fake_quant_with_min_max_args=lambda x:
    tf.quantization.fake_quant_with_min_max_args(x, -1, 1),
  tf__quantization__fake_quant_with_min_max_vars=lambda x:
    tf.quantization.fake_quant_with_min_max_vars(x, -1.0 + 0 * x[0, 0, 0], 1.0),
  tf__quantization__fake_quant_with_min_max_vars_per_channel=lambda x:
    tf.quantization.fake_quant_with_min_max_vars_per_channel(
      x, -tf.abs(x[0, 0]) - 0.5, tf.ones([8])),
  tf__quantization__quantize_and_dequantize_v2=lambda x:
    tf.quantization.quantize_and_dequantize_v2(x, -1.0, 1.0, range_given=True),
  tf__while_loop=lambda x: tf.while_loop(
    lambda i, y: i < 3, lambda i, y: (i + 1, tf.tanh(y) + x), (0, x))[1],
  tf__cond=lambda x: tf.cond(x[0, 0, 0] > 0, lambda: 2 * x, lambda: tf.sin(x)),
  tf__map_fn=lambda x: tf.map_fn(tf.tanh, x),
  tf__scan=lambda x: tf.scan(lambda a, b: a * 0.5 + b, x),
  tf__stop_gradient=lambda x: x * tf.stop_gradient(x),
  tf__signal__rfft=lambda x: tf.abs(tf.signal.rfft(x)),
  tf__signal__dct=lambda x: tf.signal.dct(x),
  tf__signal__frame=lambda x: tf.signal.frame(x, 4, 2),
  tf__einsum=lambda x: tf.einsum("abc,dc->abd", x, _TABLE),
  tf__matmul=lambda x: tf.matmul(x, _TABLE, transpose_b=True),
  tf__tensordot=lambda x: tf.tensordot(x, x[0], [[1, 2], [0, 1]]),
  tf__nn__moments=lambda x: tf.nn.moments(x, [0, 1])[1],
  tf__nn__conv1d=lambda x: tf.nn.conv1d(x, 0.1 * tf.reshape(x[:3, :, :2], [3, 6, 2])[:, :1] *
    tf.ones([3, 8, 2]), 1, "SAME"),
  keras__ops__slice_update=lambda x: keras.ops.slice_update(
    tf.stop_gradient(x), [0, 2, 1], tf.stop_gradient(x[:, :2, :3] * 2)),
  keras__ops__slice=lambda x: keras.ops.slice(x, [0, 2, 0], [4, 3, 8]),
)  # fmt: skip
_add(
  [X, IDS],
  tf__gather=lambda x, ids: tf.gather(x, ids, axis=1),
  tf__gather_nd=lambda x, ids: tf.gather_nd(x, tf.stack([ids % 4, ids], -1)),
  tf__nn__embedding_lookup=lambda x, ids: tf.nn.embedding_lookup(_TABLE, ids),
  tf__one_hot=lambda x, ids: tf.one_hot(ids, 6) @ x[:, :, :2],
  tf__scatter_nd=lambda x, ids: tf.scatter_nd(ids[..., None], x[:, :3], [6, 8]),
  tf__tensor_scatter_nd_add=lambda x, ids: tf.tensor_scatter_nd_add(
    x[0], ids[:, :1], x[:, 1]),
  tf__sequence_mask=lambda x, ids: tf.sequence_mask(ids, 6, tf.float32),
  tf__math__segment_prod=lambda x, ids: tf.ensure_shape(
    tf.math.segment_prod(x, tf.minimum(tf.range(4), ids[0, 1])), [3, 6, 8]),
  tf__nn__sparse_softmax_cross_entropy_with_logits=lambda x, ids:
    tf.nn.sparse_softmax_cross_entropy_with_logits(ids, x[:, :3]),
  tf__nn__ctc_loss=lambda x, ids: tf.nn.ctc_loss(
    ids + 1, tf.transpose(x, [1, 0, 2]), tf.constant([3, 2, 3, 1]), tf.constant([6, 6, 5, 6]),
    blank_index=0),
  tf__dynamic_stitch=lambda x, ids: tf.dynamic_stitch([[2, 0], [3, 1]], [x[:2], x[2:]]),
  tf__math__in_top_k=lambda x, ids: tf.math.in_top_k(ids[:, 0], x[:, 0], 3),
)  # fmt: skip
_add(
  [BITS],
  tf__raw_ops__PopulationCount=lambda x: tf.raw_ops.PopulationCount(x=x),
  tf__bitwise__bitwise_xor=lambda x: tf.bitwise.bitwise_xor(x, 5),
  tf__strings__to_hash_bucket_fast=lambda x: tf.strings.to_hash_bucket_fast(
    tf.strings.as_string(x), 10),
  keras__layers__Hashing=lambda x: keras.layers.Hashing(8)(x),
  keras__layers__IntegerLookup=lambda x: _integers(x),
  keras__layers__CategoryEncoding=lambda x: keras.layers.CategoryEncoding(256)(x),
)  # fmt: skip
_integers = keras.layers.IntegerLookup(vocabulary=[1, 4, 7, 8, 255])
_strings = keras.layers.StringLookup(vocabulary=["1", "4", "7", "8", "255"])
_add([BITS], keras__layers__StringLookup=lambda x: _strings(tf.strings.as_string(x)))
_add([X], keras__layers__Discretization=lambda x: keras.layers.Discretization([-1.0, 0.0, 1.0])(x))
_add(
  [MATRICES, X],
  1e-4,
  tf__linalg__solve=lambda m, x: tf.linalg.solve(m, x),
  tf__linalg__triangular_solve=lambda m, x: tf.linalg.triangular_solve(m, x),
  tf__linalg__lstsq=lambda m, x: tf.linalg.lstsq(m, x),
  tf__linalg__inv=lambda m, x: tf.linalg.inv(m) @ x,
  tf__linalg__det=lambda m, x: tf.linalg.det(m / 2),
  tf__linalg__slogdet=lambda m, x: tf.linalg.slogdet(m)[1],
  tf__linalg__expm=lambda m, x: tf.linalg.expm(m / 8),
  tf__linalg__tridiagonal_solve=lambda m, x: tf.linalg.tridiagonal_solve(
    tf.stack([m[:, 0] / 9, m[:, 0] * 0 + 2, m[:, 1] / 9], 1), x),
)  # fmt: skip
_add(
  [SYMMETRIC, X],
  2e-3,
  tf__linalg__cholesky=lambda m, x: tf.linalg.cholesky(m),
  tf__linalg__cholesky_solve=lambda m, x: tf.linalg.cholesky_solve(tf.linalg.cholesky(m), x),
  tf__linalg__logdet=lambda m, x: tf.linalg.logdet(m),
  tf__linalg__eigh=lambda m, x: tf.linalg.eigh((m + tf.linalg.matrix_transpose(m)) / 2)[0],
  tf__linalg__eigvalsh=lambda m, x: tf.linalg.eigvalsh((m + tf.linalg.matrix_transpose(m)) / 2),
  tf__linalg__svd=lambda m, x: tf.linalg.svd(m)[0],
  tf__linalg__sqrtm=lambda m, x: tf.linalg.sqrtm(m),
  tf__linalg__pinv=lambda m, x: tf.linalg.pinv(m),
)  # fmt: skip
_add(
  [IMAGES],
  1e-4,
  tf__image__resize=lambda x: tf.image.resize(x, [3, 4]),
  tf__image__crop_and_resize=lambda x: tf.image.crop_and_resize(x, BOXES, [0, 3, 1], [3, 4]),
  tf__image__flip_left_right=lambda x: tf.image.flip_left_right(x),
  tf__image__rgb_to_grayscale=lambda x: tf.image.rgb_to_grayscale(x),
  tf__image__rgb_to_hsv=lambda x: tf.stop_gradient(tf.image.rgb_to_hsv(x)),
  tf__image__adjust_brightness=lambda x: tf.image.adjust_brightness(x, 0.2),
  tf__image__adjust_contrast=lambda x: tf.stop_gradient(tf.image.adjust_contrast(x, 0.5)),
  tf__image__central_crop=lambda x: tf.image.central_crop(x, 0.5),
  tf__image__extract_patches=lambda x: tf.image.extract_patches(
    x, [1, 2, 2, 1], [1, 2, 2, 1], [1, 1, 1, 1], "VALID"),
  tf__image__ssim=lambda x: tf.image.ssim(x, x * 0.9, 1.0, filter_size=3),
  tf__image__total_variation=lambda x: tf.image.total_variation(x),
  tf__image__sobel_edges=lambda x: tf.image.sobel_edges(x),
  tf__nn__conv2d=lambda x: tf.nn.conv2d(x, x[0, :3, :3, :, None] * tf.ones([2]), 1, "SAME"),
  tf__nn__depthwise_conv2d=lambda x: tf.nn.depthwise_conv2d(
    x, x[0, :3, :3, :, None], [1, 1, 1, 1], "SAME"),
  tf__nn__max_pool2d=lambda x: tf.nn.max_pool2d(x, 2, 2, "SAME"),
  tf__nn__avg_pool2d=lambda x: tf.nn.avg_pool2d(x, 2, 2, "SAME"),
  tf__nn__max_pool_with_argmax=lambda x: tf.nn.max_pool_with_argmax(x, 2, 2, "SAME"),
  tf__nn__local_response_normalization=lambda x: tf.nn.local_response_normalization(x),
  tf__nn__depth_to_space=lambda x: tf.nn.depth_to_space(tf.tile(x, [1, 1, 1, 4]), 2),
  tf__nn__batch_normalization=lambda x: tf.nn.batch_normalization(
    x, *tf.nn.moments(x, [0, 1, 2]), 0.1, 2.0, 1e-3),
  tf__image__non_max_suppression=lambda x: tf.image.non_max_suppression_padded(
    tf.constant(BOXES), x[0, 0, :3, 0], 3, pad_to_max_output_size=True)[0],
)  # fmt: skip
_add(
  [X],
  tf__random__stateless_gamma=lambda x: tf.random.stateless_gamma(
    [3, 8], [1, 2], tf.abs(x[0, 0]) + 1),
  tf__random__stateless_categorical=lambda x: tf.random.stateless_categorical(x[0], 5, [1, 2]),
  tf__random__stateless_poisson=lambda x: tf.random.stateless_poisson(
    [3, 8], [1, 2], tf.abs(x[0, 0]), tf.float32),
)  # fmt: skip


def imported_of(name: str) -> mtf.Imported:
  """One of the functions, imported."""
  function = FUNCTIONS[name]
  return mtf.from_tensorflow(
    lambda *xs: function.fn(*xs), [tf.TensorSpec(a.shape, a.dtype) for a in function.args]
  )


def kinds() -> dict[str, list[str]]:
  """For each function the types of operations that are computed whole; empty if all have rules."""
  return {name: sorted({op.type for op in imported_of(name).fallbacks}) for name in FUNCTIONS}


def table() -> str:
  """What `docs/importing.md` has."""
  found = kinds()
  ruled = sorted(name for name, types in found.items() if not types)
  whole = sorted(name for name, types in found.items() if types)
  lines = [f"By rules, {len(ruled)}: " + ", ".join(f"`{n}`" for n in ruled) + ".", ""]
  lines += ["| computed whole on each device | operations |", "|---|---|"]
  lines += [f"| `{n}` | {', '.join(found[n])} |" for n in whole]
  return "\n".join(lines)


if __name__ == "__main__":
  print(table())
