"""Drawn poolings on drawn meshes, against TensorFlow's on one device."""

from __future__ import annotations

import collections
import math

import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.errors import LayoutError, ShapeError
from tests.operations.comparing import run, simd
from tests.operations.convolution_geometries import BATCH, CAUSES, MESHES, SPACE


def draw(rng):
  rank = int(rng.integers(1, 4))
  mesh = mtf.convert_to_shape(str(rng.choice(MESHES)))
  names = SPACE[-rank:]
  first, *rest = rng.permutation(mesh.dimension_names)
  split = {str(rng.choice(names)): str(first)}
  for axis in rest:
    split.setdefault(str(rng.choice([*names, *names, "b", "i"])), str(axis))
  ksize = [int(k) for k in rng.integers(1, 5 if rank < 3 else 4, rank)]
  # TensorFlow takes no strides beyond the window.
  strides = [int(rng.integers(1, k + 1)) for k in ksize]
  padding = str(rng.choice(["SAME", "VALID"]))
  image = []
  for name, k, s in zip(names, ksize, strides):
    p = mesh.get_dim_by_name(split[name]).size if name in split else 1
    for _ in range(12):
      n = p * int(rng.integers(1, 6))
      made = -(-n // s) if padding == "SAME" else (n - k) // s + 1
      if made > 0 and made % p == 0:
        break
    image.append(n)
  kind = str(rng.choice(["MAX", "AVG"]))
  layout = ",".join(f"{d}:{m}" for d, m in split.items())
  text = ",".join(f"{d.name}:{d.size}" for d in mesh)
  return names, image, ksize, strides, padding, kind, text, layout


def _expected(x, ksize, strides, padding, kind, dy):
  x, dy = tf.constant(x), tf.constant(dy)
  with tf.GradientTape() as tape:
    tape.watch(x)
    y = tf.nn.pool(x, ksize, kind, strides, padding)
  return [y, tape.gradient(y, x, dy)]


def made_sizes(image, ksize, strides, padding):
  """The spatial sizes of the output; below 1 where nothing is left."""
  return [
    -(-n // s) if padding == "SAME" else (n - k) // s + 1 for n, k, s in zip(image, ksize, strides)
  ]


def check(seed, *, with_simd=False):
  """Compares values and the gradient; what cannot be must be refused by a typed error.

  Returns:
    None if they are equal, or a key of `convolution_geometries.CAUSES`.
  """
  rng = np.random.default_rng(seed)
  names, image, ksize, strides, padding, kind, mesh, layout = draw(rng)
  sizes = made_sizes(image, ksize, strides, padding)
  pairs = mtf.convert_to_layout_rules(layout).pairs
  parts = {n: mtf.convert_to_shape(mesh).get_dim_by_name(axis).size for n, axis in pairs}
  divisible = not any(n % parts.get(name, 1) for name, n in zip(names, sizes))
  why = "nothing left" if min(sizes) < 1 else None if divisible else "not divisible"
  # All different: of equal ones in a window TensorFlow gives the gradient to one alone.
  count = BATCH * math.prod(image) * 6
  x = np.linspace(-2, 2, count, dtype="f")[rng.permutation(count)].reshape([BATCH, *image, 6])
  shape = mtf.Shape([mtf.Dimension(n, s) for n, s in zip(["b", *names, "i"], x.shape)])
  dy = rng.normal(size=[BATCH, *(max(n, 0) for n in sizes), 6]).astype("f")

  def build(m):
    X = mtf.import_tf_tensor(m, x, shape)
    y = mtf.pool(X, ksize, strides, padding, kind)
    return [y, *mtf.gradients([y], [X], [mtf.import_tf_tensor(m, dy, y.shape)])]

  try:
    got = run(build, layout, mesh)
    if with_simd:
      got += run(build, impl=simd(layout, mesh), in_function=True)
  except (LayoutError, ShapeError) as e:
    assert why == ("nothing left" if isinstance(e, ShapeError) else "not divisible"), e
    return why
  assert why is None, f"taken, though {CAUSES[why]}"
  for a, b in zip(got, _expected(x, ksize, strides, padding, kind, dy) * 2):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
  return None


def check_drawn(first, last, simd_every=0):
  """Checks the drawn geometries of these seeds; returns a counter of what `check` returned."""
  counts = collections.Counter()
  for seed in range(first, last):
    with_simd = bool(simd_every) and seed % simd_every == 0
    try:
      counts[check(seed, with_simd=with_simd)] += 1
    except Exception as e:
      raise AssertionError(f"seed {seed}: {draw(np.random.default_rng(seed))}") from e
  return counts
