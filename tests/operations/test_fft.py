"""Fourier transforms: bytes that they move, values against tf.signal, and what they refuse."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.meshes.redistribution import Task, _AlongSearch, plan_along
from tests.conformance.framework import Layout, make_impl

N = 8
SPACE = [mtf.Dimension(name, N) for name in ("x", "y", "z")]
FREQUENCIES = [mtf.Dimension(f"k{d.name}", N) for d in SPACE]
PENCILS = "x:rows,y:cols,ky:rows,kz:cols"


def _program(layout, mesh, fn, dtype=tf.complex64, dims=SPACE, kind="simd"):
  devices = [d.name for d in tf.config.list_logical_devices("CPU")]
  impl = make_impl(kind, Layout(mesh, layout), devices)
  return mtf.function(impl, input_signature=[mtf.TensorSpec(dims, dtype)])(fn)


def _forward(x):
  return mtf.fft3d(x, SPACE, FREQUENCIES)


def test_pencils_move_two_transposes_and_no_more():
  program = _program(PENCILS, "rows:2,cols:2", _forward)
  field = np.random.default_rng(0).normal(size=[N] * 3) + 1j
  want = tf.signal.fft3d(tf.constant(field, tf.complex64)).numpy()
  np.testing.assert_allclose(program(field), want, atol=1e-5 * np.max(np.abs(want)))
  # A slice is N^3 / 4 numbers of 8 bytes, of which half goes to the one other processor, each time.
  half = N**3 // 4 * 8 // 2
  assert mtf.describe(program).bytes_moved() == {"rows": half, "cols": half}


@pytest.mark.parametrize(
  "layout, mesh, transposes",
  [
    ("x:rows,kz:rows", "rows:4", 1),  # Slabs.
    ("x:rows,kx:rows", "rows:4", 2),
    ("x:rows,y:cols,kx:rows,ky:cols", "rows:2,cols:2", 4),
    ("z:rows,kx:rows", "rows:4", 1),
    ("", "rows:4", 0),
  ],
)
def test_other_layouts_move_their_minimum(layout, mesh, transposes):
  program = _program(layout, mesh, _forward)
  n = mtf.convert_to_shape(mesh)[0].size
  processors = mtf.convert_to_shape(mesh).size if layout else 1
  each = N**3 // processors * 8 // n * (n - 1)
  assert sum(mtf.describe(program).bytes_moved().values()) == transposes * each


LONG, OTHER = mtf.Dimension("x", 96), mtf.Dimension("b", 3)


@pytest.mark.parametrize("kind, dims", [("placement", [LONG]), ("simd", [OTHER, LONG, ("c", 1)])])
def test_a_dimension_that_alone_can_be_split_is_not_gathered(kind, dims):
  dims = [mtf.Dimension(*d) for d in dims]

  def there_and_back(z):
    y = mtf.fft(z, LONG)
    energy = mtf.reduce_sum(
      mtf.square(mtf.abs(y)) * mtf.to_float(mtf.range(z.mesh, LONG, tf.int32))
    )
    return y, mtf.ifft(y, LONG), mtf.gradients([energy], [z])[0]

  program = _program("x:rows", "rows:4", there_and_back, dims=dims, kind=kind)
  rng, sizes = np.random.default_rng(0), [d.size for d in dims]
  z = rng.normal(size=sizes) + 1j * rng.normal(size=sizes)
  axis = dims.index(LONG)
  want = np.fft.fft(z, axis=axis)
  spectrum, back, gradient = program(z)
  np.testing.assert_allclose(spectrum, want, atol=1e-5 * np.max(np.abs(want)))
  np.testing.assert_allclose(back, z, atol=1e-5)
  weights = np.arange(96.0).reshape([-1 if d == LONG else 1 for d in dims])
  slope = 2 * 96 * np.fft.ifft(weights * want, axis=axis)
  np.testing.assert_allclose(gradient, slope, atol=1e-5 * np.max(np.abs(slope)))
  # Three exchanges of 3/4 of a slice for each of the transforms; a gather is of three slices.
  transforms = [o for o in mtf.describe(program).operations if "fft" in o.name]
  exchanged = 3 * mtf.Shape(dims).size // 4 // 4 * 3 * 8
  assert [o.bytes_over() for o in transforms if o.bytes_over()] == [{0: exchanged}] * 3


def test_a_real_transform_moves_half():
  halved = mtf.Dimension("kz", N // 2 + 1)
  program = _program(
    "x:rows,kx:rows", "rows:4", lambda x: mtf.rfft3d(x, SPACE, [*FREQUENCIES[:2], halved]),
    tf.float32,
  )  # fmt: skip
  # One transpose of N^3 real numbers, which here is less than one of the frequencies that they
  # become (5 complex numbers of 8 real ones); and one of these.
  slices = N**3 // 4 * 4 + N * N * 5 // 4 * 8
  assert mtf.describe(program).bytes_moved() == {"rows": slices // 4 * 3}


def test_a_spectrum_is_padded_where_that_saves_bytes():
  space = [*SPACE[:2], mtf.Dimension("z", 32)]
  frequencies = [*FREQUENCIES[:2], mtf.Dimension("kz", 17)]
  layout = "x:rows,y:cols,kx:cols,ky:rows"
  field = np.random.default_rng(0).normal(size=[N, N, 32]).astype(np.float32)
  program = _program(
    layout, "rows:2,cols:2", lambda x: mtf.rfft3d(x, space, frequencies), tf.float32, space
  )
  want = np.fft.rfftn(field)
  np.testing.assert_allclose(program(field), want, atol=1e-5 * np.max(np.abs(want)))
  # With 18 frequencies in place of 17, which the mesh can split, three transposes of half a slice.
  assert sum(mtf.describe(program).bytes_moved().values()) == 3 * (N * N * 18 // 4 * 8 // 2)


def _least(task):
  """The fewest bytes of any order, by going through all ways of up to so many steps."""
  best = {(task.source, frozenset()): 0}
  search = _AlongSearch(task)
  for _ in range(12):
    for state, cost in list(best.items()):
      for after, _, added in search._successors(state):
        best[after] = min(best.get(after, cost + added[0]), cost + added[0])
  return best[(task.target, frozenset(task.along))]


@pytest.mark.parametrize("seed", range(6))
def test_the_search_finds_the_least(seed):
  rng = np.random.default_rng(seed)
  mesh = tuple(int(n) for n in rng.choice([2, 3, 4], 2))
  sizes = tuple(int(n) for n in rng.choice([12, 24], 3))
  places = list(itertools.permutations(range(3), 2))
  source, target = (
    tuple(tuple(m for m in range(2) if p[m] == a) for a in range(3))
    for p in (places[i] for i in rng.integers(0, len(places), 2))
  )
  along = tuple(int(a) for a in rng.permutation(3)[: rng.integers(1, 4)])
  task = Task(sizes, sizes, mesh, source, target, along)
  assert plan_along(task).received == _least(task)


def test_what_is_refused():
  mesh = mtf.Mesh(mtf.Graph(), "m")
  z = mtf.zeros(mesh, SPACE, tf.complex64)
  x = mtf.zeros(mesh, SPACE)
  x_dim, y_dim, z_dim = SPACE
  for error, text, call in [
    (mtf.DTypeError, r"fft: the input must be complex, got .* mtf.rfft", lambda: mtf.fft(x)),
    (mtf.DTypeError, "must be float32 or float64", lambda: mtf.rfft(z)),
    (mtf.DTypeError, "irfft: the input must be complex", lambda: mtf.irfft(x)),
    (mtf.DimensionError, "no dimension w=8", lambda: mtf.fft(z, ("w", 8))),
    (mtf.DimensionError, "transformed twice", lambda: mtf.fft2d(z, [x_dim, x_dim])),
    (mtf.ShapeError, "over 2 dimensions, got 3", lambda: mtf.fft2d(z, SPACE)),
    (mtf.ShapeError, "must have the sizes 8", lambda: mtf.fft(z, z_dim, ("kz", 4))),
    (mtf.ShapeError, "must have the sizes 5", lambda: mtf.rfft(x, z_dim, ("kz", 8))),
    (mtf.ShapeError, "sizes 14 or 15", lambda: mtf.irfft(z, z_dim, ("w", 8))),
    (mtf.ShapeError, "has not 3 dimensions", lambda: mtf.fft3d(mtf.fft(
      mtf.zeros(mesh, [y_dim], tf.complex64)))),
  ]:  # fmt: skip
    with pytest.raises(error, match=text):
      call()
