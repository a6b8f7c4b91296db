"""Some 340 operations of TensorFlow, each with what draws its operands and settings.

A function of `OPERATIONS` takes a `Draw` and returns the numbers of the operands, and a function of
these tensors that returns one, or a tuple of them. It raises `Unfit` where nothing that is there
can be an operand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

Operation = Callable[["Draw"], "tuple[list[int], Callable[..., Any]]"]
OPERATIONS: dict[str, Operation] = {}


class Unfit(Exception):
  """No tensor that is there can be an operand."""


class Draw:
  """Draws operands among values, and settings.

  Args:
    rng: the generator.
    values: the tensors that are there, eager.
    variables: a list, to which weights are added.
  """

  def __init__(self, rng: np.random.Generator, values: Sequence[Any], variables: list[Any]):
    self.rng = rng
    self.values = values
    self.variables = variables

  def number(self, low: int, high: int) -> int:
    """One from low to high."""
    return int(self.rng.integers(low, high + 1))

  def coin(self, probability: float = 0.5) -> bool:
    return bool(self.rng.random() < probability)

  def one(self, options: Sequence[Any]) -> Any:
    return options[self.number(0, len(options) - 1)]

  def pick(self, fits: Callable[[Any], bool]) -> int:
    """The number of a value; the last ones are the likeliest."""
    found = [i for i, v in enumerate(self.values) if fits(v)]
    if not found:
      raise Unfit
    return found[-1] if self.coin(0.4) else self.one(found)

  def floats(self, least: int = 0, most: int = 5, fits: Callable[[Any], bool] | None = None) -> int:
    """A float32 tensor with so many axes."""
    return self.pick(
      lambda v: (
        v.dtype == tf.float32 and least <= len(v.shape) <= most and (fits is None or fits(v))
      )
    )

  def ints(self, least: int = 0, most: int = 5) -> int:
    return self.pick(lambda v: v.dtype == tf.int32 and least <= len(v.shape) <= most)

  def bools(self, least: int = 0) -> int:
    return self.pick(lambda v: v.dtype == tf.bool and least <= len(v.shape))

  def shape(self, i: int) -> list[int]:
    return list(self.values[i].shape)

  def axis(self, i: int) -> int:
    n = len(self.values[i].shape)
    if not n:
      raise Unfit
    return self.number(-n, n - 1)

  def axes(self, i: int) -> list[int]:
    """Some axes, in order."""
    n = len(self.values[i].shape)
    return [k for k in range(n) if self.coin()] or ([self.number(0, n - 1)] if n else [])

  def array(self, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (scale * self.rng.normal(size=shape)).astype(np.float32)

  def weight(self, *shape: int, scale: float | None = None) -> Any:
    """A variable, or now and then a constant."""
    fan_in = math.prod(shape[:-1]) if len(shape) > 1 else 1
    value = self.array(*shape, scale=1 / math.sqrt(max(fan_in, 1)) if scale is None else scale)
    if self.coin(0.3):
      return tf.constant(value)
    self.variables.append(tf.Variable(value, name=f"w{len(self.variables)}"))
    return self.variables[-1]

  def ids(self, n: int, shape: Sequence[int]) -> np.ndarray:
    """Constant numbers below n."""
    return self.rng.integers(0, n, shape).astype(np.int32)

  def like(self, i: int) -> tuple[list[int], Callable[..., Any]]:
    """Operands of a function of two tensors that broadcast, and what makes the second of them."""
    sizes = self.shape(i)
    kind = self.number(0, 4)
    if kind == 0:
      small = [n if self.coin() else 1 for n in sizes][self.number(0, len(sizes)) :]
      value = self.weight(*small, scale=0.7)
      return [i], lambda x: tf.convert_to_tensor(value)
    if kind == 1 and sizes:
      axis = self.number(0, len(sizes) - 1)
      return [i], lambda x: tf.reduce_mean(tf.sin(x), axis, keepdims=True)
    if kind == 2:
      constant = float(self.rng.normal())
      return [i], lambda x: tf.constant(constant)
    other = self.floats(fits=lambda v: _broadcasts(list(v.shape), sizes))
    return [i, other], lambda x, y: y


def _broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
  return all(m == n or 1 in (m, n) for m, n in zip(a[::-1], b[::-1]))


def operation(name: str) -> Callable[[Operation], Operation]:
  """Decorator: the function draws the operation of this name."""

  def add(draw: Operation) -> Operation:
    assert name not in OPERATIONS, name
    OPERATIONS[name] = draw
    return draw

  return add


# ------------------------------------------------------------------------------- of each element

DOMAINS: dict[str, Callable[[Any], Any]] = {
  "any": lambda x: x,
  "small": tf.tanh,
  "unit": lambda x: tf.tanh(x) * 0.9,
  "positive": lambda x: tf.square(x) + 0.3,
  "above one": lambda x: tf.square(x) + 1.2,
}
UNARY: dict[str, dict[str, Callable[[Any], Any]]] = {
  "any": {
    "abs": tf.abs, "asinh": tf.asinh, "atan": tf.atan, "cos": tf.cos, "elu": tf.nn.elu,
    "erf": tf.math.erf, "erfc": tf.math.erfc, "gelu": lambda x: tf.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: tf.nn.gelu(x, approximate=True), "identity": tf.identity,
    "leaky_relu": lambda x: tf.nn.leaky_relu(x, 0.3), "log_sigmoid": tf.math.log_sigmoid,
    "negative": tf.negative, "relu": tf.nn.relu, "relu6": lambda x: tf.nn.relu6(x * 4),
    "selu": tf.nn.selu, "sigmoid": tf.sigmoid, "silu": tf.nn.silu, "sin": tf.sin,
    "softplus": tf.nn.softplus, "softsign": tf.nn.softsign, "square": tf.square, "tanh": tf.tanh,
    "stop_gradient": tf.stop_gradient, "bessel_i0e": tf.math.bessel_i0e,
    "bessel_i1e": tf.math.bessel_i1e, "crelu": tf.nn.crelu, "floor": tf.floor, "ceil": tf.math.ceil,
    "round": tf.round, "rint": tf.math.rint, "sign": tf.sign, "dawsn": tf.math.special.dawsn,
    "bfloat16": lambda x: tf.cast(tf.cast(x, tf.bfloat16) * 0.5, tf.float32),
    "float64": lambda x: tf.cast(tf.sin(tf.cast(x, tf.float64)), tf.float32),
    "to_int": lambda x: tf.cast(tf.round(x * 2), tf.int32),
    "is_finite": tf.math.is_finite, "is_nan": tf.math.is_nan,
    "l2_loss": tf.nn.l2_loss, "zero_fraction": lambda x: tf.nn.zero_fraction(tf.nn.relu(x)),
    "clip_by_value": lambda x: tf.clip_by_value(x, -0.6, 0.8),
    "clip_by_norm": lambda x: tf.clip_by_norm(x, 1.5),
    "clip_by_global_norm": lambda x: tf.clip_by_global_norm([x, tf.sin(x)], 2.0)[0],
    "hard_sigmoid": keras.ops.hard_sigmoid, "mish": keras.activations.mish,
    "zeros_like": tf.zeros_like, "ones_like": tf.ones_like, "std_of_all": tf.math.reduce_std,
    "fake_quant_args": lambda x: tf.quantization.fake_quant_with_min_max_args(x, -3.0, 3.0, 8),
    "check_numerics": lambda x: tf.debugging.check_numerics(x, "x"),
    "ensure_shape": lambda x: tf.ensure_shape(x, x.shape), "size": lambda x: x * tf.cast(
      tf.size(x), tf.float32) / 100.0,
  },
  "small": {
    "exp": tf.exp, "expm1": tf.math.expm1, "cosh": tf.cosh, "sinh": tf.sinh, "tan": tf.tan,
    "bessel_i0": tf.math.bessel_i0, "bessel_i1": tf.math.bessel_i1,
    "fresnel_cos": tf.math.special.fresnel_cos, "fresnel_sin": tf.math.special.fresnel_sin,
  },
  "unit": {
    "acos": tf.acos, "asin": tf.asin, "atanh": tf.atanh, "erfinv": tf.math.erfinv,
    "log1p": tf.math.log1p, "ndtri": lambda x: tf.math.ndtri(x / 2 + 0.5),
  },
  "positive": {
    "log": tf.math.log, "rsqrt": tf.math.rsqrt, "sqrt": tf.sqrt, "reciprocal": tf.math.reciprocal,
    "digamma": tf.math.digamma, "lgamma": tf.math.lgamma,
    "reciprocal_no_nan": tf.math.reciprocal_no_nan, "spence": tf.math.special.spence,
    "expint": tf.math.special.expint, "bessel_k0e": tf.math.special.bessel_k0e,
    "bessel_j0": tf.math.special.bessel_j0,
    "polygamma": lambda x: tf.math.polygamma(tf.ones_like(x), x),
    "zeta": lambda x: tf.math.zeta(tf.stop_gradient(x) + 1.5, x + 0.5),
    "igamma": lambda x: tf.math.igamma(tf.constant(1.5), x),
    "igammac": lambda x: tf.math.igammac(tf.constant(1.5), x),
    "betainc": lambda x: tf.math.betainc(
      tf.ones_like(x) * 1.5, tf.ones_like(x), tf.sigmoid(tf.math.log(x))),
  },
  "above one": {"acosh": tf.acosh},
}  # fmt: skip


def _unary(fn: Callable[[Any], Any], domain: Callable[[Any], Any]) -> Operation:
  return lambda d: ([d.floats()], lambda x: fn(domain(x)))


for _domain, _functions in UNARY.items():
  for _name, _fn in _functions.items():
    OPERATIONS[_name] = _unary(_fn, DOMAINS[_domain])

BINARY: dict[str, Callable[[Any, Any], Any]] = {
  "add": tf.add, "subtract": tf.subtract, "multiply": tf.multiply,
  "divide": lambda x, y: x / (tf.square(y) + 0.5), "div_no_nan": lambda x, y: tf.math.divide_no_nan(
    x, tf.nn.relu(y) * 2.0 + tf.cast(y > 0, tf.float32)),
  "multiply_no_nan": lambda x, y: tf.math.multiply_no_nan(x, tf.nn.relu(y)),
  "maximum": tf.maximum, "minimum": tf.minimum,
  "pow": lambda x, y: tf.pow(tf.square(x) + 0.3, tf.tanh(y)),
  "squared_difference": tf.math.squared_difference, "atan2": tf.atan2,
  "floordiv": lambda x, y: tf.math.floordiv(x, tf.square(y) + 0.4),
  "floormod": lambda x, y: tf.math.floormod(x, tf.square(y) + 0.4),
  "truncatemod": lambda x, y: tf.truncatemod(x, tf.square(y) + 0.4),
  "xdivy": lambda x, y: tf.math.xdivy(x, tf.square(y) + 0.4),
  "xlogy": lambda x, y: tf.math.xlogy(x, tf.square(y) + 0.4),
  "xlog1py": lambda x, y: tf.math.xlog1py(x, tf.tanh(y) * 0.8),
  "less": tf.less, "less_equal": tf.less_equal, "greater": tf.greater,
  "greater_equal": tf.greater_equal, "equal": lambda x, y: tf.equal(tf.round(x), tf.round(y)),
  "not_equal": lambda x, y: tf.not_equal(tf.round(x), tf.round(y)),
  "sigmoid_cross_entropy": lambda x, y: tf.nn.sigmoid_cross_entropy_with_logits(
    labels=tf.sigmoid(y) + tf.zeros_like(x), logits=x + tf.zeros_like(tf.sigmoid(y))),
  "weighted_cross_entropy": lambda x, y: tf.nn.weighted_cross_entropy_with_logits(
    tf.sigmoid(y) + tf.zeros_like(x), x + tf.zeros_like(tf.sigmoid(y)), 1.7),
  "log_poisson_loss": lambda x, y: tf.nn.log_poisson_loss(
    tf.square(y) + tf.zeros_like(x), tf.tanh(x) + tf.zeros_like(y), True),
  "huber": lambda x, y: keras.ops.mean(keras.losses.huber(x, y + tf.zeros_like(x)))
  if x.shape.rank else x * y,
  "complex_product": lambda x, y: tf.math.real(
    tf.complex(x, x * 0.5) * tf.math.conj(tf.complex(y, tf.sin(y)))),
  "complex_abs": lambda x, y: tf.abs(tf.complex(x + tf.zeros_like(y), y + tf.zeros_like(x) + 0.3)),
  "angle": lambda x, y: tf.math.angle(tf.complex(tf.square(x) + 0.3 + y * 0, y + x * 0)),
  "where": lambda x, y: tf.where(x > y, tf.sin(x), y),
  "add_n": lambda x, y: tf.add_n([x, x * 0.5, y + tf.zeros_like(x)])
  if (y + x).shape == x.shape else x + y,
}  # fmt: skip


def _binary(fn: Callable[[Any, Any], Any]) -> Operation:
  def draw(d: Draw) -> tuple[list[int], Callable[..., Any]]:
    operands, second = d.like(d.floats())
    turned = d.coin(0.3)

    def run(*xs: Any) -> Any:
      y = second(*xs)
      return fn(y, xs[0]) if turned else fn(xs[0], y)

    return operands, run

  return draw


for _name, _two in BINARY.items():
  OPERATIONS[_name] = _binary(_two)


@operation("select")
def _select(d: Draw) -> Any:
  c = d.bools()
  x = d.floats(fits=lambda v: _broadcasts(list(v.shape), d.shape(c)))
  return [c, x], lambda c, x: tf.where(c, x * 2.0, tf.zeros_like(x) - 0.5)


@operation("logical")
def _logical(d: Draw) -> Any:
  c = d.bools()
  kind = d.one([tf.logical_and, tf.logical_or, tf.math.logical_xor])
  return [c], lambda c: kind(tf.logical_not(c), tf.reverse(c, [0]) if c.shape.rank else c)


@operation("bool_to_float")
def _bool_to_float(d: Draw) -> Any:
  return [d.bools()], lambda c: tf.cast(c, tf.float32)


@operation("int_to_float")
def _int_to_float(d: Draw) -> Any:
  return [d.ints()], lambda i: tf.cast(i, tf.float32) * 0.25


@operation("int_arithmetic")
def _int_arithmetic(d: Draw) -> Any:
  kind = d.one([
    lambda i: i * 3 - 1, lambda i: i // 2, lambda i: i % 3, lambda i: tf.bitwise.bitwise_and(i, 3),
    lambda i: tf.bitwise.invert(i), lambda i: tf.bitwise.left_shift(tf.abs(i) % 5, 1),
    lambda i: tf.bitwise.bitwise_xor(i, 5), lambda i: tf.maximum(i, 1), lambda i: -i,
    lambda i: tf.cast(tf.cast(i, tf.int64) * 2, tf.int32), lambda i: tf.truncatediv(i, 2),
    lambda i: tf.cast(i > 1, tf.int32), lambda i: tf.raw_ops.PopulationCount(x=i),
  ])  # fmt: skip
  return [d.ints()], lambda i: tf.cast(kind(i), tf.int32)


@operation("int_reductions")
def _int_reductions(d: Draw) -> Any:
  i = d.ints(1)
  kind = d.one([tf.reduce_sum, tf.reduce_max, tf.reduce_min, tf.reduce_mean, tf.reduce_prod])
  axis = d.axis(i)
  return [i], lambda i: kind(tf.clip_by_value(i, -3, 3), axis)


# ----------------------------------------------------------------------------------- reductions

REDUCTIONS: dict[str, Callable[..., Any]] = {
  "reduce_sum": tf.reduce_sum, "reduce_mean": tf.reduce_mean, "reduce_max": tf.reduce_max,
  "reduce_min": tf.reduce_min, "reduce_logsumexp": tf.reduce_logsumexp,
  "reduce_prod": lambda x, *a: tf.reduce_prod(tf.tanh(x) + 1.2, *a),
  "euclidean_norm": tf.math.reduce_euclidean_norm, "reduce_variance": tf.math.reduce_variance,
  "reduce_std": lambda x, *a: tf.math.reduce_std(x, *a), "norm": lambda x, a, k: tf.norm(
    x, axis=a[0] if a else None, keepdims=k),
  "norm_1": lambda x, a, k: tf.norm(x, 1, axis=a[0] if a else None, keepdims=k),
  "count_nonzero": lambda x, *a: tf.math.count_nonzero(tf.nn.relu(x), *a, dtype=tf.int32),
  "reduce_any": lambda x, *a: tf.reduce_any(x > 1, *a),
  "reduce_all": lambda x, *a: tf.reduce_all(x > -1, *a),
  "moments": lambda x, *a: tuple(tf.nn.moments(x, a[0], keepdims=a[1])),
  "l2_normalize": lambda x, a, k: tf.nn.l2_normalize(x + 0.1, a),
  "normalize": lambda x, a, k: tf.linalg.normalize(x + 0.1, axis=a[0] if a else None)[0],
  "softmax_over": lambda x, a, k: tf.nn.softmax(x, a[0]) if a else x,
}  # fmt: skip


def _reduction(fn: Callable[..., Any]) -> Operation:
  def draw(d: Draw) -> Any:
    i = d.floats(1)
    axes, keep = d.axes(i), d.coin(0.4)
    return [i], lambda x: fn(x, axes, keep)

  return draw


for _name, _fn in REDUCTIONS.items():
  OPERATIONS[_name] = _reduction(_fn)


def _along(fn: Callable[[Any, int], Any]) -> Operation:
  """An operation along one axis."""

  def draw(d: Draw) -> Any:
    i = d.floats(1)
    axis = d.axis(i)
    return [i], lambda x: fn(x, axis)

  return draw


ALONG: dict[str, Callable[[Any, int], Any]] = {
  "argmax": lambda x, a: tf.argmax(x, a, output_type=tf.int32),
  "argmin": lambda x, a: tf.cast(tf.argmin(x, a), tf.int32),
  "cumsum": tf.cumsum, "cumsum_exclusive": lambda x, a: tf.cumsum(x, a, True),
  "cumsum_reverse": lambda x, a: tf.cumsum(x, a, False, True),
  "cumprod": lambda x, a: tf.math.cumprod(tf.tanh(x) + 1.1, a),
  "cumulative_logsumexp": lambda x, a: tf.math.cumulative_logsumexp(x, a),
  "log_softmax": tf.nn.log_softmax, "softmax": tf.nn.softmax,
  "sort": lambda x, a: tf.sort(x, a), "sort_descending": lambda x, a: tf.sort(
    x, a, direction="DESCENDING"),
  "argsort": lambda x, a: tf.argsort(x, a, stable=True),
  "reverse": lambda x, a: tf.reverse(x, [a]), "expand_dims": lambda x, a: tf.expand_dims(x, a),
  "stack": lambda x, a: tf.stack([x, tf.sin(x)], a),
  "concat": lambda x, a: tf.concat([x, x * 0.5, tf.cos(x)], a),
  "diff": lambda x, a: keras.ops.diff(x, axis=a) if x.shape[a] > 1 else x,
  "one_axis_norm": lambda x, a: tf.norm(x, axis=a, keepdims=True) + x,
  "layer_norm": lambda x, a: keras.ops.layer_normalization(x, axis=a)
  if hasattr(keras.ops, "layer_normalization") else x,
  "logcumsum_shifted": lambda x, a: tf.roll(x, 1, a) - x,
}  # fmt: skip
for _name, _fn in ALONG.items():
  OPERATIONS[_name] = _along(_fn)


@operation("top_k")
def _top_k(d: Draw) -> Any:
  i = d.floats(1)
  k = d.number(1, d.shape(i)[-1])
  return [i], lambda x: tuple(tf.math.top_k(x, k))


@operation("in_top_k")
def _in_top_k(d: Draw) -> Any:
  i = d.floats(2, 2)
  n, m = d.shape(i)
  ids, k = d.ids(m, [n]), d.number(1, m)
  return [i], lambda x: tf.math.in_top_k(ids, x, k)


# ----------------------------------------------------------------------------- products of tensors


@operation("matmul_weight")
def _matmul_weight(d: Draw) -> Any:
  i = d.floats(2)
  w = d.weight(d.shape(i)[-1], d.number(1, 4) * 2)
  return [i], lambda x: tf.matmul(x, w)


@operation("dense")
def _dense(d: Draw) -> Any:
  i = d.floats(1)
  w, b = d.weight(d.shape(i)[-1], 4), d.weight(4)
  return [i], lambda x: tf.nn.relu(
    tf.nn.bias_add(tf.tensordot(x, w, 1), tf.convert_to_tensor(b))
    if len(x.shape) > 1
    else tf.tensordot(x, w, 1) + b
  )


@operation("matmul_self")
def _matmul_self(d: Draw) -> Any:
  i = d.floats(2)
  a = d.coin()
  return [i], lambda x: tf.matmul(x, x, transpose_a=a, transpose_b=not a) * 0.3


@operation("matmul_two")
def _matmul_two(d: Draw) -> Any:
  i = d.floats(2)
  *batch, _, n = d.shape(i)
  j = d.floats(2, fits=lambda v: v.shape[-2] == n and _broadcasts(list(v.shape[:-2]), batch))
  return [i, j], lambda x, y: tf.matmul(x, y) * 0.5


@operation("matvec")
def _matvec(d: Draw) -> Any:
  i = d.floats(2)
  v = d.weight(d.shape(i)[-1])
  return [i], lambda x: tf.linalg.matvec(x, v)


@operation("tensordot")
def _tensordot(d: Draw) -> Any:
  i = d.floats(1, 3)
  axis = d.number(0, len(d.shape(i)) - 1)
  w = d.weight(3, d.shape(i)[axis])
  return [i], lambda x: tf.tensordot(x, w, [[axis], [1]])


EINSUMS = [
  ("ab,ab->", 2), ("ab->ba", 2), ("ab,cb->ac", 2), ("ab,ab->a", 2), ("abc,abd->acd", 3),
  ("abc,dbc->ad", 3), ("abc->b", 3), ("abc,abc->bac", 3), ("abcd,abed->abce", 4),
  ("...a,...a->...", 1), ("a,b->ab", 1), ("aab->ab", 3), ("ab,cd->acbd", 2), ("...ab->...ba", 2),
  ("abc,bd->dac", 3), ("aa->a", 2), ("aa->", 2), ("abcd,bd->ac", 4),
]  # fmt: skip


@operation("einsum")
def _einsum(d: Draw) -> Any:
  equation, rank = d.one(EINSUMS)
  i = d.floats(rank, 4 if "..." in equation else rank)
  left, _ = equation.split("->")
  first, *others = left.split(",")
  labels = first.replace("...", "")
  sizes: dict[str, int] = {}
  for name, n in zip(labels, d.shape(i)[-len(labels) :] if labels else []):
    if sizes.setdefault(name, n) != n:
      raise Unfit
  if not others:
    return [i], lambda x: tf.einsum(equation, x)
  (second,) = others
  names = second.replace("...", "")
  shape = [sizes.setdefault(n, d.one([2, 4])) for n in names]
  w = d.weight(*shape, scale=0.6)
  return [i], lambda x: tf.einsum(equation, x, w)


@operation("attention")
def _attention(d: Draw) -> Any:
  i = d.floats(2, 4)

  def run(x: Any) -> Any:
    scores = tf.matmul(x, tf.sin(x), transpose_b=True)
    n = x.shape[-2]
    mask = tf.linalg.band_part(tf.ones([n, n]), -1, 0)
    return tf.nn.softmax(scores - 1e9 * (1.0 - mask)) @ x

  return [i], run


# ---------------------------------------------------------------------------------- linear algebra


def _square(x: Any) -> Any:
  """A matrix far from singular, of the last two axes' smaller part."""
  n = min(x.shape[-1], x.shape[-2], 4)
  x = tf.tanh(x[..., :n, :n])
  return x * 0.4 + tf.eye(n) * 1.5


def _symmetric(x: Any) -> Any:
  y = _square(x)
  n = y.shape[-1]
  # Different eigenvalues.
  return (y + tf.linalg.matrix_transpose(y)) / 2 + tf.linalg.diag(tf.range(n, dtype=tf.float32))


LINALG: dict[str, Callable[[Any], Any]] = {
  "det": lambda x: tf.linalg.det(_square(x)), "inv": lambda x: tf.linalg.inv(_square(x)),
  "logdet": lambda x: tf.linalg.logdet(_symmetric(x)), "slogdet": lambda x: tf.linalg.slogdet(
    _square(x))[1],
  "solve": lambda x: tf.linalg.solve(_square(x), x[..., : min(x.shape[-1], x.shape[-2], 4), :]),
  "triangular_solve": lambda x: tf.linalg.triangular_solve(
    _square(x), x[..., : min(x.shape[-1], x.shape[-2], 4), :]),
  "cholesky": lambda x: tf.linalg.cholesky(_symmetric(x)),
  "cholesky_solve": lambda x: tf.linalg.cholesky_solve(
    tf.linalg.cholesky(_symmetric(x)), x[..., : min(x.shape[-1], x.shape[-2], 4), :]),
  "qr": lambda x: tf.linalg.qr(_square(x))[1], "eigvalsh": lambda x: tf.linalg.eigvalsh(
    _symmetric(x)),
  "eigh": lambda x: tf.abs(tf.linalg.eigh(_symmetric(x))[1]),
  "svd_values": lambda x: tf.linalg.svd(_symmetric(x), compute_uv=False),
  "trace": tf.linalg.trace, "matrix_transpose": tf.linalg.matrix_transpose,
  "diag_part": tf.linalg.diag_part, "diag": tf.linalg.diag,
  "set_diag": lambda x: tf.linalg.set_diag(x, tf.reduce_mean(x, -1)[..., : min(x.shape[-2:])]),
  "band_part": lambda x: tf.linalg.band_part(x, 1, 0), "expm": lambda x: tf.linalg.expm(
    _square(x) * 0.3),
  "pinv": lambda x: tf.linalg.pinv(_square(x)), "lstsq": lambda x: tf.linalg.lstsq(
    _square(x), x[..., : min(x.shape[-1], x.shape[-2], 4), :], fast=False),
  "lu": lambda x: tf.linalg.lu(_square(x))[0], "adjoint": lambda x: tf.linalg.adjoint(x),
  "sqrtm": lambda x: tf.linalg.sqrtm(_symmetric(x)),
  "tensor_diag_part": lambda x: tf.linalg.tensor_diag_part(
    x[..., : min(x.shape[-2:]), : min(x.shape[-2:])]) if x.shape.rank == 2 else x,
  "matrix_power": lambda x: _square(x) @ _square(x),
  "banded": lambda x: tf.linalg.tridiagonal_matmul(
    tf.linalg.diag_part(_symmetric(x), k=(-1, 1)), x[..., : min(x.shape[-1], x.shape[-2], 4), :],
    "compact") if min(x.shape[-2:]) > 1 else x,
}  # fmt: skip


def _linalg(fn: Callable[[Any], Any]) -> Operation:
  return lambda d: ([d.floats(2, 4)], fn)


for _name, _fn in LINALG.items():
  OPERATIONS[_name] = _linalg(_fn)


@operation("cross")
def _cross(d: Draw) -> Any:
  i = d.floats(1, fits=lambda v: v.shape[-1] == 3)
  return [i], lambda x: tf.linalg.cross(x, tf.sin(x))


# ------------------------------------------------------------------------------ shapes and cutting


def _factors(n: int) -> list[int]:
  return [k for k in range(2, n) if n % k == 0]


@operation("reshape")
def _reshape(d: Draw) -> Any:
  i = d.floats(1)
  sizes = d.shape(i)
  for _ in range(d.number(1, 3)):
    k = d.number(0, len(sizes) - 1)
    kind = d.number(0, 3)
    if kind == 0 and k + 1 < len(sizes):
      sizes[k : k + 2] = [sizes[k] * sizes[k + 1]]
    elif kind == 1 and _factors(sizes[k]) and len(sizes) < 5:
      f = d.one(_factors(sizes[k]))
      sizes[k : k + 1] = [f, sizes[k] // f]
    elif kind == 2 and len(sizes) < 5:
      sizes.insert(k, 1)
    elif kind == 3:
      sizes = [math.prod(sizes)] if d.coin() else sizes
  if d.coin(0.3):
    sizes[d.number(0, len(sizes) - 1)] = -1
  return [i], lambda x: tf.reshape(x, sizes)


@operation("transpose")
def _transpose(d: Draw) -> Any:
  i = d.floats(1)
  order = d.rng.permutation(len(d.shape(i))).tolist()
  return [i], lambda x: tf.transpose(x, order)


@operation("squeeze")
def _squeeze(d: Draw) -> Any:
  return [d.floats(1)], tf.squeeze


@operation("tile")
def _tile(d: Draw) -> Any:
  i = d.floats(1, 4)
  times = [d.one([1, 1, 2, 3]) for _ in d.shape(i)]
  return [i], lambda x: tf.tile(x, times)


@operation("repeat")
def _repeat(d: Draw) -> Any:
  i = d.floats(1, 4)
  axis = d.axis(i)
  times = d.one([2, [d.number(0, 2) for _ in range(d.shape(i)[axis] - 1)] + [1]])
  return [i], lambda x: tf.repeat(x, times, axis)


@operation("broadcast_to")
def _broadcast_to(d: Draw) -> Any:
  i = d.floats(0, 3)
  sizes = [2, *[n if n != 1 else d.one([1, 4]) for n in d.shape(i)]]
  return [i], lambda x: tf.broadcast_to(x, sizes)


@operation("pad")
def _pad(d: Draw) -> Any:
  i = d.floats(1, 4)
  mode = d.one(["CONSTANT", "CONSTANT", "REFLECT", "SYMMETRIC"])
  pads = []
  for n in d.shape(i):
    most = 2 if mode == "CONSTANT" else min(n - 1, 2)
    pads.append([d.number(0, most), d.number(0, most)] if d.coin() else [0, 0])
  value = 0.0 if d.coin() else 1.5
  if mode != "CONSTANT":
    return [i], lambda x: tf.pad(x, pads, mode)
  return [i], lambda x: tf.pad(x, pads, constant_values=value)


@operation("roll")
def _roll(d: Draw) -> Any:
  i = d.floats(1)
  axes = d.axes(i)
  shifts = [d.number(-3, 3) for _ in axes]
  return [i], lambda x: tf.roll(x, shifts, axes)


@operation("slice")
def _slice(d: Draw) -> Any:
  i = d.floats(1)
  begin = [d.number(0, n - 1) for n in d.shape(i)]
  sizes = [d.number(1, n - b) for n, b in zip(d.shape(i), begin)]
  return [i], lambda x: tf.slice(x, begin, sizes)


@operation("brackets")
def _brackets(d: Draw) -> Any:
  i = d.floats(1)
  entries: list[Any] = []
  for n in d.shape(i):
    kind = d.number(0, 5)
    if kind == 0:
      entries.append(d.number(-n, n - 1))
    elif kind == 1:
      entries.append(slice(None, None, -1))
    elif kind == 2:
      entries.append(slice(d.number(0, n - 1), None, d.number(1, 2)))
    elif kind == 3 and n > 1:
      entries.append(slice(None, d.number(1, n - 1)))
    else:
      entries.append(slice(None))
  if d.coin(0.3):
    entries = [*entries[: d.number(0, len(entries))], ...]
  if d.coin(0.3):
    entries.insert(d.number(0, len(entries)), None)
  if d.coin(0.2) and ... not in entries:
    entries.insert(0, ...)
  return [i], lambda x: x[tuple(entries)]


@operation("dynamic_slice")
def _dynamic_slice(d: Draw) -> Any:
  i, j = d.floats(1), d.ints()
  axis = d.number(0, len(d.shape(i)) - 1)
  n = d.shape(i)[axis]
  size = d.number(1, n)

  def run(x: Any, k: Any) -> Any:
    begin = [0] * x.shape.rank
    sizes = x.shape.as_list()
    begin[axis] = tf.math.floormod(tf.reduce_sum(k), n - size + 1)
    sizes[axis] = size
    return tf.slice(x, tf.stack(begin), sizes)

  return [i, j], run


@operation("index_by_value")
def _index_by_value(d: Draw) -> Any:
  i, j = d.floats(1), d.ints()
  n = d.shape(i)[0]
  return [i, j], lambda x, k: x[tf.math.floormod(tf.reduce_sum(k), n)]


@operation("split")
def _split(d: Draw) -> Any:
  i = d.floats(1)
  axis = d.axis(i)
  n = d.shape(i)[axis]
  if n < 2:
    raise Unfit
  if d.coin() and n % 2 == 0:
    return [i], lambda x: tuple(tf.split(x, 2, axis))
  k = d.number(1, n - 1)
  return [i], lambda x: tuple(tf.split(x, [k, n - k], axis))


@operation("unstack")
def _unstack(d: Draw) -> Any:
  i = d.floats(1)
  axis = d.axis(i)
  if d.shape(i)[axis] > 4:
    raise Unfit
  return [i], lambda x: (tf.unstack(x, axis=axis)[-1], tf.unstack(x, axis=axis)[0])


@operation("concat_two")
def _concat_two(d: Draw) -> Any:
  i = d.floats(1)
  axis = d.number(0, len(d.shape(i)) - 1)

  def fits(v: Any) -> bool:
    a, b = list(v.shape), d.shape(i)
    return len(a) == len(b) and a[:axis] + a[axis + 1 :] == b[:axis] + b[axis + 1 :]

  j = d.floats(fits=fits)
  return [i, j], lambda x, y: tf.concat([x, y], axis)


@operation("stack_two")
def _stack_two(d: Draw) -> Any:
  i = d.floats(0, 4)
  j = d.floats(fits=lambda v: list(v.shape) == d.shape(i))
  axis = d.number(0, len(d.shape(i)))
  return [i, j], lambda x, y: tf.stack([x, y], axis)


@operation("meshgrid")
def _meshgrid(d: Draw) -> Any:
  i = d.floats(1, 1)
  return [i], lambda x: tuple(tf.meshgrid(x, tf.constant([1.0, 2.0])))


@operation("fill")
def _fill(d: Draw) -> Any:
  return [d.floats()], lambda x: tf.fill([2, 4], tf.reduce_mean(x))


@operation("linspace")
def _linspace(d: Draw) -> Any:
  return [d.floats()], lambda x: tf.linspace(tf.reduce_min(x), tf.reduce_mean(x) + 1.0, 4)


@operation("range")
def _range(d: Draw) -> Any:
  i = d.floats(1)
  n = d.shape(i)[-1]
  return [i], lambda x: x * tf.range(n, dtype=tf.float32)


@operation("swap_halves")
def _swap_halves(d: Draw) -> Any:
  i = d.floats(1, fits=lambda v: v.shape[-1] % 2 == 0)

  def run(x: Any) -> Any:
    a, b = tf.split(x, 2, -1)
    return tf.concat([-b, a], -1)

  return [i], run


# ------------------------------------------------------------------------------ gathers, scatters


def _places(d: Draw, n: int) -> tuple[list[int], Callable[..., Any]]:
  """Numbers below n: constants, or computed ones."""
  if d.coin():
    ids = d.ids(n, [d.number(1, 4) for _ in range(d.number(0, 2))])
    return [], lambda: tf.constant(ids)
  return [d.ints(0, 2)], lambda k: tf.math.floormod(k, n)


@operation("gather")
def _gather(d: Draw) -> Any:
  i = d.floats(1, 3)
  axis = d.axis(i)
  others, ids = _places(d, d.shape(i)[axis])
  return [i, *others], lambda x, *k: tf.gather(x, ids(*k), axis=axis)


@operation("gather_batch")
def _gather_batch(d: Draw) -> Any:
  i = d.floats(2, 4)
  b, n = d.shape(i)[:2]
  ids = d.ids(n, [b, d.number(1, 4)])
  return [i], lambda x: tf.gather(x, ids, axis=1, batch_dims=1)


@operation("embedding")
def _embedding(d: Draw) -> Any:
  table = d.weight(6, 4, scale=1.0)
  return [d.ints(0, 3)], lambda k: tf.nn.embedding_lookup(table, tf.math.floormod(k, 6))


@operation("gather_nd")
def _gather_nd(d: Draw) -> Any:
  i = d.floats(1, 4)
  sizes = d.shape(i)
  depth = d.number(1, min(len(sizes), 2))
  places = np.stack([d.ids(n, [3]) for n in sizes[:depth]], -1)
  return [i], lambda x: tf.gather_nd(x, places)


@operation("take_along_axis")
def _take_along_axis(d: Draw) -> Any:
  i = d.floats(1, 4)
  axis = d.axis(i)
  return [i], lambda x: keras.ops.take_along_axis(x, tf.argsort(x, axis, stable=True), axis)


@operation("scatter_nd")
def _scatter_nd(d: Draw) -> Any:
  i = d.floats(1, 4)
  n, *rest = d.shape(i)
  places = d.ids(5, [n, 1])
  return [i], lambda x: tf.scatter_nd(places, x, [5, *rest])


def _scatters(fn: Callable[..., Any]) -> Operation:
  def draw(d: Draw) -> Any:
    i = d.floats(1, 4)
    n, *rest = d.shape(i)
    places = d.rng.permutation(n)[: d.number(1, n)].astype(np.int32)[:, None]
    updates = d.array(len(places), *rest)
    if d.coin():
      return [i], lambda x: fn(x, places, updates)
    return [i], lambda x: fn(x, places, tf.sin(x[: len(places)]))

  return draw


for _name, _fn in {
  "tensor_scatter_update": tf.tensor_scatter_nd_update,
  "tensor_scatter_add": tf.tensor_scatter_nd_add,
  "tensor_scatter_sub": tf.tensor_scatter_nd_sub,
  "tensor_scatter_max": tf.tensor_scatter_nd_max,
  "tensor_scatter_min": tf.tensor_scatter_nd_min,
}.items():
  OPERATIONS[_name] = _scatters(_fn)


@operation("slice_update")
def _slice_update(d: Draw) -> Any:
  i = d.floats(1, 4)
  begin = [d.number(0, n - 1) for n in d.shape(i)]
  sizes = [d.number(1, n - b) for n, b in zip(d.shape(i), begin)]
  update = d.array(*sizes)
  return [i], lambda x: keras.ops.slice_update(x, begin, tf.constant(update))


def _segments(fn: Callable[..., Any], is_sorted: bool) -> Operation:
  def draw(d: Draw) -> Any:
    i = d.floats(1, 4)
    n = d.shape(i)[0]
    ids = d.ids(3, [n])
    if is_sorted:
      ids = np.sort(ids)
      return [i], lambda x: fn(x, tf.constant(ids))
    if d.coin():
      return [i], lambda x: fn(x, ids, 3)

    def run(x: Any) -> Any:
      key = tf.cast(tf.reduce_mean(tf.reshape(x, [n, -1]), 1) > 0, tf.int32)
      return fn(x, key, 3)

    return [i], run

  return draw


for _name, _fn in {
  "segment_sum": tf.math.segment_sum, "segment_mean": tf.math.segment_mean,
  "segment_max": tf.math.segment_max, "segment_min": tf.math.segment_min,
  "segment_prod": tf.math.segment_prod,
}.items():  # fmt: skip
  OPERATIONS[_name] = _segments(_fn, True)
for _name, _fn in {
  "unsorted_segment_sum": tf.math.unsorted_segment_sum,
  "unsorted_segment_mean": tf.math.unsorted_segment_mean,
  "unsorted_segment_max": lambda x, *a: tf.maximum(tf.math.unsorted_segment_max(x, *a), -9.0),
  "unsorted_segment_min": lambda x, *a: tf.minimum(tf.math.unsorted_segment_min(x, *a), 9.0),
  "unsorted_segment_prod": lambda x, *a: tf.math.unsorted_segment_prod(tf.tanh(x) + 1.2, *a),
  "unsorted_segment_sqrt_n": tf.math.unsorted_segment_sqrt_n,
}.items():
  OPERATIONS[_name] = _segments(_fn, False)


@operation("one_hot")
def _one_hot(d: Draw) -> Any:
  i = d.ints(0, 3)
  axis = d.number(-1, len(d.shape(i)))
  return [i], lambda k: tf.one_hot(k, 4, axis=axis) * 0.7


@operation("bincount")
def _bincount(d: Draw) -> Any:
  return [d.ints(1, 2)], lambda k: tf.raw_ops.DenseBincount(
    input=tf.math.floormod(k, 5), size=5, weights=tf.zeros([0]), binary_output=False
  )


@operation("histogram")
def _histogram(d: Draw) -> Any:
  return [d.floats(1)], lambda x: tf.histogram_fixed_width(x, [-2.0, 2.0], 4)


@operation("searchsorted")
def _searchsorted(d: Draw) -> Any:
  return [d.floats(1, 1)], lambda x: tf.searchsorted(tf.constant([-1.0, 0.0, 0.5, 1.0]), x)


@operation("bucketize")
def _bucketize(d: Draw) -> Any:
  return [d.floats()], lambda x: tf.raw_ops.Bucketize(input=x, boundaries=[-1.0, 0.1, 0.9])


@operation("sequence_mask")
def _sequence_mask(d: Draw) -> Any:
  return [d.ints(0, 2)], lambda k: tf.sequence_mask(tf.math.floormod(k, 4), 4)


@operation("reverse_sequence")
def _reverse_sequence(d: Draw) -> Any:
  i = d.floats(2, 4)
  b, n = d.shape(i)[:2]
  lengths = d.ids(n, [b]) + 1
  return [i], lambda x: tf.reverse_sequence(x, lengths, seq_axis=1, batch_axis=0)


@operation("boolean_mask")
def _boolean_mask(d: Draw) -> Any:
  i = d.floats(1, 4)
  n = d.shape(i)[0]
  mask = d.rng.random(n) < 0.6
  mask[0] = True
  return [i], lambda x: tf.boolean_mask(x, mask)


@operation("masked_sum")
def _masked_sum(d: Draw) -> Any:
  return [d.floats(1, 3)], lambda x: tf.reduce_sum(tf.boolean_mask(x, x > 0.1)) * 0.2


@operation("dynamic_stitch")
def _dynamic_stitch(d: Draw) -> Any:
  i = d.floats(1, 3, lambda v: v.shape[0] >= 2)
  n = d.shape(i)[0]
  order = d.rng.permutation(n).astype(np.int32)
  return [i], lambda x: tf.dynamic_stitch([order[:1], order[1:]], [x[:1], tf.sin(x[1:])])


@operation("partition")
def _partition(d: Draw) -> Any:
  i = d.floats(1, 3)
  n = d.shape(i)[0]
  parts = d.ids(2, [n])

  def run(x: Any) -> Any:
    places = tf.dynamic_partition(tf.range(n), parts, 2)
    return tf.ensure_shape(
      tf.dynamic_stitch(places, [y * (k + 1) for k, y in enumerate(
        tf.dynamic_partition(x, parts, 2))]), x.shape)  # fmt: skip

  return [i], run


@operation("unique")
def _unique(d: Draw) -> Any:
  i = d.ints(1, 1)
  return [i], lambda k: tf.unique(k)[1]


@operation("invert_permutation")
def _invert_permutation(d: Draw) -> Any:
  return [d.floats(1, 1)], lambda x: tf.math.invert_permutation(tf.argsort(x, stable=True))


@operation("sparse_round_trip")
def _sparse(d: Draw) -> Any:
  return [d.floats(2, 2)], lambda x: tf.sparse.to_dense(tf.sparse.from_dense(tf.nn.relu(x)))


@operation("sparse_matmul")
def _sparse_matmul(d: Draw) -> Any:
  i = d.floats(2, 2)
  n = d.shape(i)[0]
  matrix = (d.array(3, n) * (d.rng.random((3, n)) < 0.5)).astype(np.float32)
  return [i], lambda x: tf.sparse.sparse_dense_matmul(tf.sparse.from_dense(matrix), x)


@operation("ragged_mean")
def _ragged(d: Draw) -> Any:
  i = d.floats(1, 3, lambda v: v.shape[0] >= 2)
  n = d.shape(i)[0]
  return [i], lambda x: tf.reduce_mean(tf.RaggedTensor.from_row_splits(x, [0, 1, n]), 1)


# ---------------------------------------------------------------------------- images, convolutions


def _image(d: Draw, least: int = 1) -> tuple[int, Callable[[Any], Any]]:
  """A tensor, and what makes it an image: [batch, height, width, channels]."""
  i = d.floats(2, 5)
  shape = d.shape(i)
  if len(shape) == 5:
    shape = [shape[0] * shape[1], *shape[2:]]
  if len(shape) == 3:
    shape = [*shape, 1] if d.coin() else [1, *shape]
  if len(shape) == 2:
    shape = [1, *shape, 1]
  if shape[1] < least or shape[2] < least or math.prod(shape) > 2000:
    raise Unfit
  return i, lambda x: tf.reshape(x, shape)


def _shape_of(d: Draw, i: int, image: Callable[[Any], Any]) -> list[int]:
  return list(image(d.values[i]).shape)


@operation("conv2d")
def _conv2d(d: Draw) -> Any:
  i, image = _image(d, 2)
  _, h, w, c = _shape_of(d, i, image)
  k = d.weight(min(h, d.number(1, 3)), min(w, d.number(1, 3)), c, d.one([1, 2, 4]))
  stride, padding = d.number(1, 2), d.one(["SAME", "VALID"])
  if d.coin(0.2):
    rate = 1 if padding == "VALID" else 2
    return [i], lambda x: tf.nn.convolution(image(x), k, padding=padding, dilations=[rate, rate])
  return [i], lambda x: tf.nn.conv2d(image(x), k, stride, padding)


@operation("depthwise_conv2d")
def _depthwise(d: Draw) -> Any:
  i, image = _image(d, 2)
  c = _shape_of(d, i, image)[-1]
  k = d.weight(2, 2, c, d.one([1, 2]), scale=0.5)
  stride = d.number(1, 2)
  return [i], lambda x: tf.nn.depthwise_conv2d(image(x), k, [1, stride, stride, 1], "SAME")


@operation("separable_conv2d")
def _separable(d: Draw) -> Any:
  i, image = _image(d, 2)
  c = _shape_of(d, i, image)[-1]
  k, point = d.weight(2, 2, c, 2, scale=0.5), d.weight(1, 1, 2 * c, 4)
  return [i], lambda x: tf.nn.separable_conv2d(image(x), k, point, [1, 1, 1, 1], "SAME")


@operation("conv2d_transpose")
def _transposed(d: Draw) -> Any:
  i, image = _image(d)
  b, h, w, c = _shape_of(d, i, image)
  if h * w > 36:
    raise Unfit
  k = d.weight(3, 2, 2, c, scale=0.5)
  return [i], lambda x: tf.nn.conv2d_transpose(image(x), k, [b, 2 * h, 2 * w, 2], 2, "SAME")


@operation("conv1d")
def _conv1d(d: Draw) -> Any:
  i = d.floats(3, 3, lambda v: v.shape[1] >= 2)
  k = d.weight(2, d.shape(i)[-1], 4)
  stride, padding = d.number(1, 2), d.one(["SAME", "VALID"])
  return [i], lambda x: tf.nn.conv1d(x, k, stride, padding)


@operation("conv3d")
def _conv3d(d: Draw) -> Any:
  i = d.floats(5, 5, lambda v: min(v.shape[1:4]) >= 1)
  k = d.weight(1, 2, 2, d.shape(i)[-1], 2, scale=0.5)
  return [i], lambda x: tf.nn.conv3d(x, k, [1] * 5, "SAME")


@operation("dilation2d")
def _dilation2d(d: Draw) -> Any:
  i, image = _image(d, 2)
  k = d.weight(2, 2, _shape_of(d, i, image)[-1], scale=0.5)
  return [i], lambda x: tf.nn.dilation2d(image(x), k, [1] * 4, "SAME", "NHWC", [1] * 4)


IMAGES: dict[str, tuple[int, Callable[[Any], Any]]] = {
  "max_pool2d": (2, lambda x: tf.nn.max_pool2d(x, 2, 2, "SAME")),
  "max_pool_overlapping": (3, lambda x: tf.nn.max_pool2d(x, 3, 1, "VALID")),
  "avg_pool2d": (2, lambda x: tf.nn.avg_pool2d(x, 2, 1, "SAME")),
  "avg_pool_strides": (2, lambda x: tf.nn.avg_pool2d(x, 2, 2, "VALID")),
  "pool_1d": (2, lambda x: tf.nn.max_pool1d(x[:, 0], 2, 1, "VALID")),
  "max_pool_with_argmax": (2, lambda x: tf.nn.max_pool_with_argmax(x, 2, 2, "SAME")[0]),
  "resize_bilinear": (2, lambda x: tf.image.resize(x, [3, 5])),
  "resize_nearest": (2, lambda x: tf.image.resize(x, [4, 6], "nearest")),
  "resize_bicubic": (2, lambda x: tf.image.resize(x, [5, 4], "bicubic")),
  "resize_area": (2, lambda x: tf.image.resize(x, [2, 2], "area")),
  "resize_antialias": (4, lambda x: tf.image.resize(x, [2, 3], antialias=True)),
  "resize_lanczos": (3, lambda x: tf.image.resize(x, [4, 5], "lanczos3")),
  "crop_and_resize": (2, lambda x: tf.image.crop_and_resize(
    x, [[0.0, 0.1, 0.8, 0.9], [0.2, 0.0, 1.0, 0.6]], [0, 0], [3, 3])),
  "flip_left_right": (1, tf.image.flip_left_right), "flip_up_down": (1, tf.image.flip_up_down),
  "rot90": (1, tf.image.rot90), "image_transpose": (1, tf.image.transpose),
  "adjust_brightness": (1, lambda x: tf.image.adjust_brightness(x, 0.2)),
  "adjust_contrast": (1, lambda x: tf.image.adjust_contrast(x, 1.4)),
  "per_image_standardization": (2, tf.image.per_image_standardization),
  "image_gradients": (2, lambda x: tf.image.image_gradients(x)),
  "sobel_edges": (2, tf.image.sobel_edges), "total_variation": (2, tf.image.total_variation),
  "extract_patches": (3, lambda x: tf.image.extract_patches(
    x, [1, 2, 2, 1], [1, 1, 1, 1], [1, 1, 1, 1], "VALID")),
  "central_crop": (4, lambda x: tf.image.central_crop(x, 0.5)),
  "crop_to_box": (2, lambda x: tf.image.crop_to_bounding_box(x, 0, 1, 2, 1)),
  "pad_to_box": (1, lambda x: tf.image.pad_to_bounding_box(
    x, 1, 0, x.shape[1] + 2, x.shape[2] + 1)),
  "space_to_batch": (2, lambda x: tf.space_to_batch(
    x, [2, 2], [[0, x.shape[1] % 2], [0, x.shape[2] % 2]])),
  "space_to_depth": (2, lambda x: tf.nn.space_to_depth(
    x[:, : x.shape[1] // 2 * 2, : x.shape[2] // 2 * 2], 2)),
  "depth_to_space": (1, lambda x: tf.nn.depth_to_space(tf.tile(x, [1, 1, 1, 4]), 2)),
  "batch_to_space": (1, lambda x: tf.batch_to_space(
    tf.tile(x, [4, 1, 1, 1]), [2, 2], [[0, 1], [0, 0]])),
  "local_response_normalization": (1, lambda x: tf.nn.local_response_normalization(x, 2)),
  "fused_batch_norm": (2, lambda x: tf.raw_ops.FusedBatchNormV3(
    x=x, scale=tf.ones([x.shape[-1]]), offset=tf.zeros([x.shape[-1]]), mean=tf.zeros([0]),
    variance=tf.zeros([0]), epsilon=0.1)[0]),
  "batch_normalization": (2, lambda x: tf.nn.batch_normalization(
    x, tf.reduce_mean(x, [0, 1, 2]), tf.math.reduce_variance(x, [0, 1, 2]), 0.3, 1.2, 0.1)),
  "grayscale": (1, lambda x: tf.image.rgb_to_grayscale(tf.tile(x[..., :1], [1, 1, 1, 3]))),
  "yiq": (1, lambda x: tf.image.rgb_to_yiq(tf.concat([x[..., :1], tf.sin(x[..., :1]),
    tf.cos(x[..., :1])], -1))),
  "hsv": (1, lambda x: tf.image.hsv_to_rgb(tf.sigmoid(tf.concat([x[..., :1], tf.sin(x[..., :1]),
    tf.cos(x[..., :1])], -1)))),
  "psnr": (1, lambda x: tf.image.psnr(tf.sigmoid(x), tf.sigmoid(x * 0.8 + 0.3), 1.0)),
  "erosion2d": (2, lambda x: tf.nn.erosion2d(
    x, tf.zeros([2, 2, x.shape[-1]]), [1] * 4, "VALID", "NHWC", [1] * 4)),
}  # fmt: skip


def _of_image(least: int, fn: Callable[[Any], Any]) -> Operation:
  def draw(d: Draw) -> Any:
    i, image = _image(d, least)
    return [i], lambda x: fn(image(x))

  return draw


for _name, (_least, _fn) in IMAGES.items():
  OPERATIONS[_name] = _of_image(_least, _fn)


# ------------------------------------------------------------------------------ losses and signals


@operation("softmax_cross_entropy")
def _softmax_cross_entropy(d: Draw) -> Any:
  i = d.floats(1, 4)
  labels = tf.constant(d.array(*d.shape(i)))
  if d.coin():
    return [i], lambda x: tf.nn.softmax_cross_entropy_with_logits(labels, x)
  return [i], lambda x: tf.nn.softmax_cross_entropy_with_logits(tf.sin(x), x)


@operation("sparse_softmax_cross_entropy")
def _sparse_softmax_cross_entropy(d: Draw) -> Any:
  i = d.floats(1, 4)
  *rows, n = d.shape(i)
  ids = d.ids(n, rows)
  return [i], lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(ids, x)


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
  "mean_squared_error": keras.losses.MeanSquaredError(),
  "mean_absolute_error": keras.losses.MeanAbsoluteError(),
  "cosine_similarity": keras.losses.CosineSimilarity(), "log_cosh": keras.losses.LogCosh(),
  "kl_divergence": lambda x, y: keras.losses.KLDivergence()(tf.nn.softmax(x), tf.nn.softmax(y)),
  "categorical": keras.losses.CategoricalCrossentropy(from_logits=True),
  "binary": lambda x, y: keras.losses.BinaryCrossentropy(from_logits=True)(tf.sigmoid(x), y),
  "focal": lambda x, y: keras.losses.BinaryFocalCrossentropy(from_logits=True)(tf.sigmoid(x), y),
  "hinge": keras.losses.Hinge(), "poisson": lambda x, y: keras.losses.Poisson()(
    tf.square(x), tf.square(y) + 0.2),
}  # fmt: skip


def _loss(fn: Callable[[Any, Any], Any]) -> Operation:
  def draw(d: Draw) -> Any:
    i = d.floats(2, 4)
    labels = tf.constant(d.array(*d.shape(i)))
    return [i], lambda x: fn(labels, x)

  return draw


for _name, _fn in LOSSES.items():
  OPERATIONS[_name] = _loss(_fn)


@operation("ctc_loss")
def _ctc_loss(d: Draw) -> Any:
  i = d.floats(3, 3, lambda v: v.shape[0] >= 4 and v.shape[2] >= 3)
  t, b, n = d.shape(i)
  labels = d.ids(n - 1, [b, 2]) + 1
  return [i], lambda x: tf.nn.ctc_loss(
    labels, x, [2] * b, [t] * b, logits_time_major=True, blank_index=0
  )


SIGNALS: dict[str, Callable[[Any], Any]] = {
  "fft": lambda x: tf.abs(tf.signal.fft(tf.complex(x, tf.sin(x) + 0.2)) + (3.0 + 2.0j)),
  "rfft": lambda x: tf.math.real(tf.signal.rfft(x)),
  "irfft": lambda x: tf.signal.irfft(tf.complex(x, tf.sin(x))) if x.shape[-1] > 1 else x,
  "dct": tf.signal.dct, "fftshift": tf.signal.fftshift,
  "frame": lambda x: tf.signal.frame(x, 2, 1) if x.shape[-1] > 2 else x,
  "overlap_and_add": lambda x: tf.signal.overlap_and_add(x, 1) if x.shape.rank > 1 else x,
  "window": lambda x: x * tf.signal.hann_window(x.shape[-1]),
}  # fmt: skip
for _name, _fn in SIGNALS.items():
  OPERATIONS[_name] = (lambda fn: lambda d: ([d.floats(1, 4)], fn))(_fn)


@operation("fake_quant_vars")
def _fake_quant_vars(d: Draw) -> Any:
  low, high = tf.Variable(-2.0, name="low"), tf.Variable(2.5, name="high")
  d.variables += [low, high]
  return [d.floats()], lambda x: tf.quantization.fake_quant_with_min_max_vars(x, low, high)


@operation("quantize_and_dequantize")
def _quantize(d: Draw) -> Any:
  return [d.floats(1)], lambda x: tf.quantization.quantize_and_dequantize_v2(
    x, -3.0, 3.0, range_given=True
  )


# ----------------------------------------------------------------------------- control flow


_INNER: list[Callable[[Any], Any]] = [
  tf.tanh, lambda x: x * 0.5 + 0.1, tf.sin, lambda x: x - tf.reduce_mean(x), tf.nn.softplus,
  lambda x: tf.where(x > 0, x, x * 0.3),
]  # fmt: skip


@operation("while_loop")
def _while_loop(d: Draw) -> Any:
  i = d.floats()
  inner, times = d.one(_INNER), d.number(1, 3)
  w = d.weight(scale=0.7)

  def run(x: Any) -> Any:
    return tf.while_loop(
      lambda k, y: k < times, lambda k, y: (k + 1, inner(y) * w + x * 0.1), (0, x)
    )[1]

  return [i], run


@operation("dynamic_while")
def _dynamic_while(d: Draw) -> Any:
  i = d.floats()
  inner = d.one(_INNER)

  def run(x: Any) -> Any:
    return tf.while_loop(
      lambda k, y: tf.logical_and(k < 3, tf.reduce_sum(y * y) > 0.5),
      lambda k, y: (k + 1, inner(y)),
      (0, x),
    )[1]

  return [i], run


@operation("cond")
def _cond(d: Draw) -> Any:
  i = d.floats()
  a, b = d.one(_INNER), d.one(_INNER)
  return [i], lambda x: tf.cond(tf.reduce_mean(x) > 0, lambda: a(x), lambda: b(x) + x)


@operation("switch_case")
def _switch_case(d: Draw) -> Any:
  i, j = d.floats(), d.ints()
  return [i, j], lambda x, k: tf.switch_case(
    tf.math.floormod(tf.reduce_sum(k), 3), [lambda: tf.sin(x), lambda: x * 2.0, lambda: -x]
  )


@operation("map_fn")
def _map_fn(d: Draw) -> Any:
  i = d.floats(1, 4)
  inner = d.one(_INNER)
  return [i], lambda x: tf.map_fn(lambda y: inner(y) * 0.5, x)


@operation("scan")
def _scan(d: Draw) -> Any:
  i = d.floats(1, 4)
  return [i], lambda x: tf.scan(lambda a, y: tf.tanh(a) * 0.6 + y, x)


@operation("foldl")
def _foldl(d: Draw) -> Any:
  i = d.floats(1, 4)
  return [i], lambda x: tf.foldl(lambda a, y: tf.sin(a) + y * 0.5, x)


@operation("vectorized_map")
def _vectorized_map(d: Draw) -> Any:
  i = d.floats(1, 4)
  return [i], lambda x: tf.vectorized_map(lambda y: tf.reduce_sum(tf.sin(y)), x)


@operation("tensor_array")
def _tensor_array(d: Draw) -> Any:
  i = d.floats(1, 4)
  n = d.shape(i)[0]

  def run(x: Any) -> Any:
    array = tf.TensorArray(tf.float32, n)
    for k in range(n):
      array = array.write(k, tf.sin(x[n - 1 - k]))
    return array.stack()

  return [i], run


@operation("rnn")
def _rnn(d: Draw) -> Any:
  i = d.floats(3, 3)
  w, u = d.weight(d.shape(i)[-1], 4), d.weight(4, 4)
  b, t, _ = d.shape(i)

  def run(x: Any) -> Any:
    def body(k: Any, h: Any) -> Any:
      return k + 1, tf.tanh(tf.matmul(x[:, k], w) + tf.matmul(h, u))

    return tf.while_loop(lambda k, h: k < t, body, (0, tf.zeros([b, 4])))[1]

  return [i], run


@operation("custom_gradient")
def _custom_gradient(d: Draw) -> Any:
  @tf.custom_gradient
  def clipped(x: Any) -> Any:
    y = tf.sin(x)
    return y, lambda dy: tf.clip_by_value(dy, -0.5, 0.5) * y

  return [d.floats()], clipped


@operation("custom_gradient_of_two")
def _custom_gradient_of_two(d: Draw) -> Any:
  @tf.custom_gradient
  def pair(x: Any) -> Any:
    def grad(du: Any, dv: Any) -> Any:
      return du * 2.0 + dv * x

    return (tf.round(x), tf.tanh(x)), grad

  return [d.floats()], lambda x: tuple(pair(x))


@operation("recompute_grad")
def _recompute_grad(d: Draw) -> Any:
  return [d.floats()], tf.recompute_grad(lambda x: tf.sin(x) * tf.tanh(x))


@operation("called_function")
def _called_function(d: Draw) -> Any:
  inner = d.one(_INNER)
  return [d.floats()], tf.function(lambda x: inner(x) + 0.2, autograph=False)


@operation("gradient_inside")
def _gradient_inside(d: Draw) -> Any:
  inner = d.one([tf.tanh, tf.sin, tf.nn.softplus, tf.nn.softmax, lambda x: tf.cumsum(x * x)])

  def run(x: Any) -> Any:
    with tf.GradientTape() as tape:
      tape.watch(x)
      y = tf.reduce_sum(tf.square(inner(x)))
    return tape.gradient(y, x)

  return [d.floats(1)], run
