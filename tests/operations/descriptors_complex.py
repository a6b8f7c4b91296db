"""Complex tensors: made of two real inputs, and taken apart, so that values are real."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from tests.conformance.framework import T, op

A, B, C = mtf.Dimension("a", 4), mtf.Dimension("b", 8), mtf.Dimension("c", 12)
AB = "a:4 b:8"
POSITIVE = T(AB, 0.3, 2.0)


def of_parts(build):
  """A function of complex tensors as one of their parts: x, y, ... -> [real, imag]."""

  def built(*parts):
    zs = [mtf.complex(a, b) for a, b in zip(parts[::2], parts[1::2])]
    y = build(*zs)
    return [mtf.real(y), mtf.imag(y)] if y.dtype.is_complex else y

  return built


def in_numpy(fn):
  """The same of arrays."""

  def computed(*parts):
    y = np.asarray(fn(*[a + 1j * b for a, b in zip(parts[::2], parts[1::2])]))
    return [y.real, y.imag] if y.dtype.kind == "c" else y

  return computed


def _one(name, build, reference, x=AB, **kwargs):
  return op(f"complex_{name}", of_parts(build), in_numpy(reference), x, x, **kwargs)


def _two(name, build, reference, x=AB, y=AB, **kwargs):
  return op(f"complex_{name}", of_parts(build), in_numpy(reference), x, x, y, y, **kwargs)


DESCRIPTORS = [
  op("complex_parts", lambda a, b: mtf.imag(mtf.mtf_complex(a, b) * (2 + 1j)),
     lambda a, b: a + 2 * b, AB, AB),
  op("real_of_real", mtf.real, lambda x: x, AB),
  op("imag_of_real", mtf.imag, np.zeros_like, AB, differentiable=False),
  op("conj_of_real", mtf.conj, lambda x: x, AB),
  op("angle_of_real", mtf.angle, lambda x: np.pi * (x < 0), AB, differentiable=False),
  _one("conj", mtf.conj, np.conj),
  _one("abs", mtf.abs, np.abs, POSITIVE),
  _one("angle", mtf.angle, np.angle, POSITIVE),
  op("complex_cast_of_real",
     lambda x: mtf.real(mtf.cast(x, tf.complex64) * (1 + 1j)), lambda x: x, AB),
  _one("square", mtf.square, np.square),
  _one("sqrt", mtf.sqrt, np.sqrt, POSITIVE),
  _one("log", mtf.log, np.log, POSITIVE),
  _one("exp", mtf.exp, np.exp),
  _one("sin", mtf.sin, np.sin),
  _one("tanh", mtf.tanh, np.tanh, POSITIVE),
  _one("swish", lambda z: mtf.swish(z), lambda z: z / (1 + np.exp(-z)), POSITIVE),
  _one("divided", lambda z: 2j / (z / (1 + 1j)), lambda z: 2j / (z / (1 + 1j)), POSITIVE),
  _one("shift", lambda z: mtf.shift(z, 3, B, wrap=True), lambda z: np.roll(z, 3, 1)),
  _one("reshape", lambda z: mtf.reshape(z, "d:2 e:16"), lambda z: z.reshape(2, 16)),
  _one("slicewise",
       lambda z: mtf.slicewise(lambda t: t * t * tf.math.conj(t), [z], splittable_dims=[A, B]),
       lambda z: z * z * np.conj(z)),
  _two("add", lambda x, y: x + y, np.add),
  _two("multiply", lambda x, y: x * y, np.multiply),
  _two("divide", lambda x, y: x / y, lambda x, y: x / y[:, None], y=T("a:4", 0.3, 2.0)),
  _two("einsum", lambda x, y: mtf.einsum([x, y], output_shape=[A, C]), np.matmul,
       T(AB), T("b:8 c:12"), together="a:4 b:8 c:12"),
  _one("einsum_twice", lambda x: mtf.einsum([x, x, x], output_shape=[A]),
       lambda x: (x**3).sum(1)),
  op("complex_gather",
     lambda i, a, b: of_parts(lambda z: mtf.gather(z, i, C))(a, b),
     lambda i, a, b: in_numpy(lambda z: z[i])(a, b),
     T("a:4", 0, 12, "int32"), "c:12 d:4", "c:12 d:4", together="a:4 c:12 d:4"),
  op("complex_where",
     lambda m, a, b: of_parts(lambda z: mtf.where(m, z, z * 2j))(a, b),
     lambda m, a, b: in_numpy(lambda z: np.where(m, z, z * 2j))(a, b),
     T(AB, dtype="bool"), AB, AB),
]  # fmt: skip
