"""Operations on six to eight dimensions, of which operands have every other one.

TensorFlow's kernels take five to eight axes; see `mesh_tensorflow/numerics/kernels.py`.
"""

from __future__ import annotations

import numpy as np

import mesh_tensorflow as mtf
from tests.conformance.framework import ONE_DEVICE, T, op
from tests.operations.descriptors_pooling import cuts
from tests.operations.numpy_convolution import avg_pool, max_pool

# In this order; two of size 1, so that neighbours on their two sides meet.
SIZES = {"a": 2, "b": 2, "c": 3, "d": 2, "e": 1, "f": 2, "g": 2, "h": 2, "i": 2, "j": 2}
NAMES = "abcdefgh"
EIGHT = "a:2 b:2 c:3 d:2 e:1 f:2 g:2 h:2"
ODD, EVEN = "aceg", "bdfh"  # Every other one, from the first and from the second on.


def dim(name):
  return mtf.Dimension(name, SIZES[name])


def shape(names):
  return mtf.Shape([dim(name) for name in names])


def text(names):
  return " ".join(f"{name}:{SIZES[name]}" for name in names)


def at(x, names, wanted):
  """An array of the dimensions `names`, transposed to `wanted`; axes of size 1 for the rest."""
  kept = [name for name in wanted if name in names]
  x = np.transpose(x, [names.index(name) for name in kept])
  return np.reshape(x, [SIZES[name] if name in names else 1 for name in wanted])


def _binary(name, fn, np_fn, first, second, wanted, draw=T, **kwargs):
  """A function of two tensors of the dimensions `first` and `second`."""
  return op(
    name,
    lambda x, y: fn(x, y, output_shape=shape(wanted)),
    lambda x, y: np_fn(at(x, first, wanted), at(y, second, wanted)),
    draw(text(first)),
    draw(text(second)),
    **kwargs,
  )


def _einsum(name, inputs, wanted, **kwargs):
  equation = f"{','.join(inputs)}->{wanted}"
  return op(
    name,
    lambda *xs: mtf.einsum(list(xs), output_shape=shape(wanted)),
    lambda *xs: np.einsum(equation, *xs),
    *[text(names) for names in inputs],
    together=text(dict.fromkeys("".join(inputs))),
    **kwargs,
  )


def _one(name, fn, np_fn, names=NAMES, draw=T, **kwargs):
  return op(name, fn, np_fn, draw(text(names)), **kwargs)


def _reduced(names):
  return tuple(NAMES.index(name) for name in names)


def _integers(dims):
  return T(dims, 1, 9, "int32")


def _where(name, names):
  def reference(condition, x, y):
    return np.where(at(condition, ODD, names), at(x, EVEN, names), at(y, "ah", names))

  return op(
    name,
    lambda c, x, y: mtf.where(c, x, y, output_shape=shape(names)),
    lambda c, x, y: np.broadcast_to(reference(c, x, y), [SIZES[n] for n in names]),
    T(text(ODD), dtype="bool"),
    text(EVEN),
    text("ah"),
  )


def _softmax(x, axis=2, extra=None):
  e = np.exp(x)
  total = e.sum(axis, keepdims=True)
  return e / (total if extra is None else total + np.exp(extra))


def _softmax_gradient(xs, dys):
  y = _softmax(xs[0], extra=at(xs[1], EVEN, NAMES))
  return [y * (dys[0] - (dys[0] * y).sum(2, keepdims=True)), 0 * xs[1]]


def _standardized(x):
  centered = x - x.mean(2, keepdims=True)
  return centered / np.sqrt((centered**2).mean(2, keepdims=True) + 1e-6)


def _gathered(weights, indices):
  """Along c, with indices of b, d, f and h; zeros for those outside."""
  index = at(indices, EVEN, NAMES.replace("c", ""))[:, :, None]
  index = np.broadcast_to(index, [1 if n == "c" else SIZES[n] for n in NAMES])
  inside = (index >= 0) & (index < 3)
  return np.where(inside, np.take_along_axis(weights, np.where(inside, index, 0), 2), 0).squeeze(2)


def _shifted(x, offsets):
  """Along c, by offsets of b, d, f and h; zeros enter."""
  index = np.arange(3)[:, None, None, None, None, None] - at(offsets, EVEN, NAMES)
  index = np.broadcast_to(index, x.shape)
  inside = (index >= 0) & (index < 3)
  return np.where(inside, np.take_along_axis(x, np.where(inside, index, 0), 2), 0)


def _top_2(x):
  order = np.argsort(-np.moveaxis(x, 2, -1), -1, kind="stable")[..., :2]
  return [np.take_along_axis(np.moveaxis(x, 2, -1), order, -1), order]


def _padded(x):
  return np.pad(x, [(0, 0)] * 4 + [(1, 2)] + [(0, 0)] * 3)


def _filled_shift(x):
  y = np.zeros_like(x)
  y[:, :, 1:] = x[:, :, :-1]
  return y


def _pool(kind, x, ksize, name):
  whole = f"{kind}_{len(ksize)}D"
  fn = max_pool if kind == "MAX" else avg_pool
  return op(
    name,
    lambda x: mtf.PoolOperation(x, ksize, ksize, whole).outputs[0],
    lambda x: fn(x, ksize),
    x,
    illegal=cuts(x, ksize),
  )


def _conv2d(x, w):
  """Of an image whose axes 4 and 5 are one element each; the filter is as large."""
  return np.einsum("abcdhwi,hwio->abcdo", x, w)[:, :, :, :, None, None]


def _cross_entropy(logits, targets):
  log_p = np.log(_softmax(logits))
  return -np.take_along_axis(log_p, targets[:, :, None], 2).squeeze(2)


def _custom_gradient(x, y):
  """The gradient of x alone is its own: it broadcasts in turn."""
  both = shape(NAMES)

  def gradient(explicit_inputs, output_grads, **_):
    x, y = explicit_inputs
    product = mtf.multiply(y, output_grads[0], output_shape=both)
    return [mtf.reduce_sum(product, output_shape=x.shape), mtf.zeros_like(y)]

  return mtf.custom_gradient(lambda x, y: mtf.multiply(x, y, output_shape=both), gradient, [x, y])


C = dim("c")
DESCRIPTORS = [
  _binary("add_6", mtf.add, np.add, "ace", "bdf", "abcdef"),
  _binary("add_7", mtf.add, np.add, "aceg", "bdf", "abcdefg"),
  _binary("add_8", mtf.add, np.add, ODD, EVEN, NAMES),
  _binary("add_8_other_order", mtf.add, np.add, "gaec", "hbfd", "hagbfced"),
  _binary("add_8_to_all", mtf.add, np.add, NAMES, EVEN, NAMES),
  _binary("sub_7", mtf.sub, np.subtract, "bdf", "aceg", "abcdefg"),
  _binary("multiply_6", mtf.multiply, np.multiply, "bdf", "ace", "abcdef"),
  _binary("multiply_8", mtf.multiply, np.multiply, ODD, EVEN, NAMES),
  _binary("divide_8", mtf.divide, np.divide, EVEN, ODD, NAMES, lambda d: T(d, 0.5, 2.0)),
  _binary("maximum_8", mtf.maximum, np.maximum, ODD, EVEN, NAMES),
  _binary("minimum_int_7", mtf.minimum, np.minimum, "aceg", "bdf", "abcdefg", _integers),
  _binary("floordiv_8", mtf.floordiv, np.floor_divide, ODD, EVEN, NAMES, _integers),
  _binary("mod_6", mtf.mod, np.mod, "ace", "bdf", "abcdef", _integers),
  _binary("less_8", mtf.less, np.less, ODD, EVEN, NAMES, differentiable=False),
  _binary("equal_int_8", mtf.equal, np.equal, ODD, EVEN, NAMES, _integers),
  _binary("logical_or_8", mtf.logical_or, np.logical_or, ODD, EVEN, NAMES,
          lambda d: T(d, dtype="bool")),
  _einsum("einsum_three_8", ["ag", "bdfh", "ce"], NAMES),
  _einsum("einsum_transpose_8", [NAMES], NAMES[::-1]),
  _einsum("einsum_vector_8", [NAMES, EVEN], ODD),
  _einsum("einsum_matrix_8", ["acegi", "bdfhi"], NAMES),
  _einsum("einsum_sums_8", [NAMES, "aceghi"], "hfdi"),
  _where("where_8", "abcdefgh"),
  _where("where_8_other_order", "hgfedcba"),
  _one("broadcast_7", lambda x: mtf.broadcast(x, shape("abcdefg")),
       lambda x: np.broadcast_to(at(x, "bdf", "abcdefg"), [2, 2, 3, 2, 1, 2, 2]), "bdf"),
  _one("broadcast_8", lambda x: mtf.broadcast(x, shape(NAMES)),
       lambda x: np.broadcast_to(at(x, ODD, NAMES), [SIZES[n] for n in NAMES]), ODD),
  _one("reduce_sum_8", lambda x: mtf.reduce_sum(x, output_shape=shape(EVEN)),
       lambda x: x.sum(_reduced(ODD))),
  _one("reduce_max_8", lambda x: mtf.reduce_max(x, output_shape=shape(ODD)),
       lambda x: x.max(_reduced(EVEN))),
  _one("reduce_min_7", lambda x: mtf.reduce_min(x, output_shape=shape("ceg")),
       lambda x: x.min((0, 1, 3, 5)), "abcdefg"),
  _one("relu_8", mtf.relu, lambda x: np.maximum(x, 0)),
  _one("gelu_softplus_8", lambda x: mtf.softplus(mtf.square(x)), lambda x: np.log1p(np.exp(x * x))),
  _one("softmax_8", lambda x: mtf.softmax(x, C), _softmax),
  _one("log_softmax_8", lambda x: mtf.log_softmax(x, C), lambda x: np.log(_softmax(x))),
  _one("reduce_logsumexp_8", lambda x: mtf.reduce_logsumexp(x, C),
       lambda x: np.log(np.exp(x).sum(2))),
  op("softmax_extra_8", lambda x, e: mtf.softmax(x, C, extra_logit=e),
     lambda x, e: _softmax(x, extra=at(e, EVEN, NAMES)), EIGHT, text(EVEN),
     gradient=_softmax_gradient),
  _one("standardize_8", lambda x: mtf.layers.standardize(x, C), _standardized, tolerance=1e-4),
  _one("rms_normalize_8", lambda x: mtf.layers.rms_normalize(x, C),
       lambda x: x / np.sqrt((x**2).mean(2, keepdims=True) + 1e-6)),
  _one("one_hot_8", lambda x: mtf.one_hot(x, C), lambda x: (x[..., None] == np.arange(3)) * 1.0,
       "abdefgh", lambda d: T(d, -1, 4, "int32")),
  op("gather_8", lambda w, i: mtf.gather(w, i, C, output_shape=shape("abdefgh")), _gathered, EIGHT,
     T(text(EVEN), -1, 4, "int32"), together=EIGHT),
  _one("top_2_of_8", lambda x: list(mtf.top_k(x, C, mtf.Dimension("k", 2))), _top_2, unsplit="k",
       gradient_together=f"{EIGHT} k:2"),
  _one("top_1_of_8", lambda x: list(mtf.top_1(x, C)), lambda x: [x.max(2), x.argmax(2)]),
  _one("argmax_of_8", lambda x: mtf.argmax(x, dim("h")), lambda x: x.argmax(7),
       differentiable=False),
  _one("cumsum_8", lambda x: mtf.cumsum(x, C), lambda x: x.cumsum(2)),
  _one("shift_8", lambda x: mtf.shift(x, 1, C, False), _filled_shift),
  _one("shift_wrapped_8", lambda x: mtf.shift(x, -1, C, True), lambda x: np.roll(x, -1, 2)),
  op("dynamic_shift_8", lambda x, o: mtf.dynamic_shift(x, o, C, False), _shifted, EIGHT,
     T(text(EVEN), -2, 3, "int32"), together=EIGHT),
  _one("slice_8", lambda x: mtf.slice(x, 1, 2, "c"), lambda x: x[:, :, 1:], unsplit="c"),
  _one("pad_8", lambda x: mtf.pad(x, [1, 2], "e"), _padded, unsplit="e"),
  op("concat_8", lambda x, y: mtf.concat([x, y], "c"), lambda x, y: np.concatenate([x, y], 2),
     EIGHT, EIGHT, unsplit="c"),
  _one("split_8", lambda x: mtf.split(x, C, [1, 2]), lambda x: np.split(x, [1], 2), unsplit="c"),
  op("stack_8", lambda x, y: mtf.stack([x, y], "i", axis=3), lambda x, y: np.stack([x, y], 3),
     text("abcdefg"), text("abcdefg"), unsplit="i"),
  _one("unstack_8", lambda x: mtf.unstack(x, C), lambda x: list(np.moveaxis(x, 2, 0)),
       unsplit="c"),
  _one("reshape_8", lambda x: mtf.reshape(x, "h:4 d:6 g:4 a:2"), lambda x: x.reshape(4, 6, 4, 2)),
  _one("reshape_to_8", lambda x: mtf.reshape(x, text("hgfedcba")),
       lambda x: x.reshape(2, 2, 2, 1, 2, 3, 2, 2), NAMES),
  op("random_8", lambda mesh: mtf.random_uniform(mesh, shape(NAMES)), ONE_DEVICE),
  op("dropout_8", lambda x: mtf.dropout(x, True, rate=0.3, noise_shape=shape(EVEN)), ONE_DEVICE,
     EIGHT),
  op("cross_entropy_8", lambda x, t: mtf.layers.softmax_cross_entropy_with_logits(x, t, C),
     _cross_entropy, EIGHT, T(text("abdefgh"), 0, 3, "int32"), tolerance=1e-4),
  op("custom_gradient_8", _custom_gradient,
     lambda x, y: at(x, ODD, NAMES) * at(y, EVEN, NAMES), text(ODD), text(EVEN),
     gradient=lambda xs, dys: [
       (dys[0] * at(xs[1], EVEN, NAMES)).sum(_reduced(EVEN)), 0 * xs[1]
     ]),
  op("recompute_grad_8",
     lambda x, y: mtf.recompute_grad(lambda x, y: mtf.exp(mtf.add(x, y, output_shape=shape(NAMES))),
                                     [x, y]),
     lambda x, y: np.exp(at(x, ODD, NAMES) + at(y, EVEN, NAMES)), text(ODD), text(EVEN)),
  _pool("MAX", "b:2 w:4 x:2 y:2 c:3", [2, 2, 2], "max_pool3d_all"),
  _pool("MAX", "a:2 b:2 c:3 d:2 w:2 x:4 y:2 g:2", [2, 2, 2], "max_pool3d_8"),
  _pool("AVG", "f:1 w:3 x:4 y:4 a:2", [2, 2, 2], "avg_pool3d_one"),
  _pool("AVG", "a:2 b:2 c:3 d:2 w:2 x:4 y:2 g:2", [2, 2, 2], "avg_pool3d_8"),
  _pool("AVG", T("a:2 b:2 c:3 d:2 w:2 x:4 y:2 g:2", dtype="float64"), [2, 2, 2],
        "avg_pool3d_float64_8"),
  op("conv2d_8", lambda x, w: mtf.Conv2dOperation(x, w, None, "VALID").outputs[0], _conv2d,
     "a:2 b:2 c:3 d:2 w:2 x:2 i:2", "w:2 x:2 i:2 j:2", unsplit=("w", "x"),
     together="a:2 b:2 c:3 d:2 w:2 x:2 i:2 j:2"),
]  # fmt: skip
