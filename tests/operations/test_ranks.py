"""Drawn operations on up to ten dimensions, of which each operand has a drawn part.

TensorFlow's kernels take five to eight axes; see `mesh_tensorflow/numerics/kernels.py`.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

import mesh_tensorflow as mtf
from tests.conformance import framework
from tests.conformance.framework import T, op

NAMES = "abcdefghij"


class _Draw:
  """Random numbers, and dimensions of small sizes, one in eight of them 1."""

  def __init__(self, seed: int, ndims: int):
    self.random = random.Random(seed)
    names = list(NAMES[:ndims])
    self.random.shuffle(names)
    self.names = "".join(names)
    self.first = self.random.randrange(2)
    self.sizes = {name: 2 if self.random.randrange(8) else 1 for name in names}

  def some(self, names: str, least: int = 0) -> str:
    """Some of the dimensions, mostly in their order; often every other one, in turn from both."""
    if self.random.random() < 0.7:
      self.first = 1 - self.first
      chosen = list(names[self.first :: 2])
    else:
      chosen = [name for name in names if self.random.random() < 0.6]
    if len(chosen) < least:
      chosen = list(names[:least])
    if self.random.random() < 0.15:
      self.random.shuffle(chosen)
    return "".join(chosen)

  def shape(self, names: str) -> mtf.Shape:
    return mtf.Shape([mtf.Dimension(name, self.sizes[name]) for name in names])

  def text(self, names: str) -> str:
    return " ".join(f"{name}:{self.sizes[name]}" for name in names)

  def at(self, x: np.ndarray, names: str, wanted: str) -> np.ndarray:
    """An array of the dimensions `names`, repeated to `wanted`."""
    x = np.einsum(f"{names}->{''.join(n for n in wanted if n in names)}", x)
    x = np.reshape(x, [self.sizes[n] if n in names else 1 for n in wanted])
    return np.broadcast_to(x, [self.sizes[n] for n in wanted])


def _binary(name, draw, kind):
  fn, np_fn = kind
  first, second = draw.some(draw.names), draw.some(draw.names)
  both = "".join(n for n in draw.names if n in first + second)
  return op(
    name,
    lambda x, y: fn(x, y, output_shape=draw.shape(both)),
    lambda x, y: np_fn(draw.at(x, first, both), draw.at(y, second, both)),
    T(draw.text(first), 0.5, 2.0),
    T(draw.text(second), 2.5, 4.0),
    differentiable=fn is not mtf.less,
  )


def _where(name, draw):
  parts = [draw.some(draw.names) for _ in range(3)]
  return op(
    name,
    lambda *xs: mtf.where(*xs, output_shape=draw.shape(draw.names)),
    lambda *xs: np.where(*[draw.at(x, p, draw.names) for x, p in zip(xs, parts)]),
    T(draw.text(parts[0]), dtype="bool"),
    draw.text(parts[1]),
    draw.text(parts[2]),
  )


def _einsum(name, draw):
  parts = [draw.some(draw.names, least=1) for _ in range(draw.random.choice((1, 2, 2, 3)))]
  union = "".join(dict.fromkeys("".join(parts)))
  wanted = draw.some(union)
  return op(
    name,
    lambda *xs: mtf.einsum(list(xs), output_shape=draw.shape(wanted)),
    lambda *xs: np.einsum(f"{','.join(parts)}->{wanted}", *xs),
    *[draw.text(p) for p in parts],
    together=draw.text(union),
  )


def _reduction(name, draw, kind):
  fn, np_fn = kind
  kept = draw.some(draw.names)
  axes = tuple(i for i, n in enumerate(draw.names) if n not in kept)
  left = "".join(n for n in draw.names if n in kept)
  return op(
    name,
    lambda x: fn(x, output_shape=draw.shape(kept)),
    lambda x: draw.at(np_fn(x, axes), left, kept),
    draw.text(draw.names),
  )


def _broadcast(name, draw):
  given = draw.some(draw.names)
  return op(
    name,
    lambda x: mtf.broadcast(x, draw.shape(draw.names)),
    lambda x: draw.at(x, given, draw.names),
    draw.text(given),
  )


def _softmax(name, draw):
  axis = draw.random.randrange(len(draw.names))
  dim = draw.shape(draw.names)[axis]
  return op(
    name,
    lambda x: mtf.softmax(x, dim),
    lambda x: np.exp(x) / np.exp(x).sum(axis, keepdims=True),
    draw.text(draw.names),
  )


def _gather(name, draw):
  """Along the first dimension, of size 3, with indices that have some of the others."""
  others = draw.names[1:]
  indexed = draw.some(others)
  dim = mtf.Dimension(draw.names[0], 3)
  sizes = [draw.sizes[n] for n in others]

  def reference(weights, indices):
    index = draw.at(indices, indexed, others)
    inside = (index >= 0) & (index < 3)
    found = np.take_along_axis(weights, np.where(inside, index, 0)[None], 0)
    return np.where(inside, found.reshape(sizes), 0)

  weights = " ".join([f"{dim.name}:3", draw.text(others)])
  return op(
    name,
    lambda w, i: mtf.gather(w, i, dim, output_shape=draw.shape(others)),
    reference,
    weights,
    T(draw.text(indexed), -1, 4, "int32"),
    together=weights,
  )


def _reshape(name, draw):
  """To other names, that is another layout; some neighbours become one dimension."""
  names = list(draw.names)
  draw.random.shuffle(names)
  sizes = []
  for n in draw.names:
    if sizes and draw.random.random() < 0.3:
      sizes[-1] *= draw.sizes[n]
    else:
      sizes.append(draw.sizes[n])
  shape = mtf.Shape([mtf.Dimension(n, size) for n, size in zip(names, sizes)])
  return op(
    name, lambda x: mtf.reshape(x, shape), lambda x: x.reshape(sizes), draw.text(draw.names)
  )


_KINDS = {
  "add": lambda name, draw: _binary(name, draw, (mtf.add, np.add)),
  "sub": lambda name, draw: _binary(name, draw, (mtf.sub, np.subtract)),
  "multiply": lambda name, draw: _binary(name, draw, (mtf.multiply, np.multiply)),
  "divide": lambda name, draw: _binary(name, draw, (mtf.divide, np.divide)),
  "maximum": lambda name, draw: _binary(name, draw, (mtf.maximum, np.maximum)),
  "less": lambda name, draw: _binary(name, draw, (mtf.less, np.less)),
  "where": _where,
  "einsum": _einsum,
  "reduce_sum": lambda name, draw: _reduction(name, draw, (mtf.reduce_sum, np.sum)),
  "reduce_max": lambda name, draw: _reduction(name, draw, (mtf.reduce_max, np.max)),
  "broadcast": _broadcast,
  "softmax": _softmax,
  "gather": _gather,
  "reshape": _reshape,
}


def drawn(seed: int, count: int, most_dims: int) -> list[framework.Descriptor]:
  """So many operations of six or more dimensions, of all kinds in turn."""
  result = []
  for i in range(count):
    draw = _Draw(1000 * seed + i, random.Random(f"{seed} {i}").randint(6, most_dims))
    kind = list(_KINDS)[i % len(_KINDS)]
    result.append(_KINDS[kind](f"{kind}_{seed}_{i}", draw))
  return result


# What is split has slices of size 1, which are no alternating axes any more.
_FEW_SPLIT = [framework.Layout("r:1", ""), framework.Layout("r:2", "c:r")]


def _check(descriptors, layouts, modes, cpu_devices):
  problems = []
  for i, layout in enumerate(layouts):
    for mode in modes[i % len(modes)]:
      tally, found = framework.check_family(mode, layout, descriptors, cpu_devices)
      assert tally.values > 0
      problems += [f"{layout}, {mode}: {p}" for p in found]
  assert not problems, "\n  ".join(problems)


@pytest.mark.slow
def test_drawn_operations(cpu_devices):
  descriptors = drawn(0, 2 * len(_KINDS), 8)
  _check(descriptors, _FEW_SPLIT, framework.MODE_PAIRS, cpu_devices)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 9))
def test_many_drawn_operations(seed, cpu_devices):
  descriptors = drawn(seed, 4 * len(_KINDS), 10)
  layouts = [*_FEW_SPLIT, *framework.draw_layouts("ranks", descriptors, 2)]
  _check(descriptors, layouts, framework.MODE_PAIRS, cpu_devices)
