"""The example of an operation made outside the package, against tf.signal.fft3d."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from examples.distributed_fft import FFT3D, SquaredMagnitude, fft3d, ifft3d
from tests.conformance.framework import MODE_PAIRS, Layout, make_impl
from tests.kinds import kept

SPACE = [mtf.Dimension("x", 4), mtf.Dimension("y", 8), mtf.Dimension("z", 12)]
FREQUENCIES = [mtf.Dimension("kx", 4), mtf.Dimension("ky", 8), mtf.Dimension("kz", 12)]
PENCILS = "x:rows,y:cols,ky:rows,kz:cols"
ONE = Layout("rows:1", "")
LAYOUTS = [
  ONE,
  Layout("rows:2,cols:2", PENCILS),
  Layout("rows:2,cols:4", PENCILS),
  Layout("rows:4,cols:2", PENCILS),
  Layout("cols:4,rows:2", PENCILS),
  Layout("rows:4,cols:2", "x:rows,ky:rows"),
  Layout("rows:2,cols:4", "y:cols,kz:cols"),
  Layout("rows:2,other:2,cols:2", PENCILS),
]


def _complex(seed, dtype=np.complex64):
  rng = np.random.default_rng(seed)
  return (rng.normal(size=[4, 8, 12]) + 1j * rng.normal(size=[4, 8, 12])).astype(dtype)


def _run(build, layout, mode, inputs):
  """Runs build(*mtf tensors) -> mtf tensors on [x, y, z] inputs; returns arrays."""
  kind, execution = mode.split("_")
  impl = make_impl(kind, layout, [d.name for d in tf.config.list_logical_devices("CPU")])

  def program(inputs):
    mesh = mtf.Mesh(mtf.Graph(), "m")
    outputs = build(*[mtf.import_tf_tensor(mesh, x, shape) for x, shape in zip(inputs, shapes)])
    lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    return [lowering.export_to_tf_tensor(y) for y in outputs]

  shapes = [shape for _, shape in inputs]
  run = functools.partial(impl.run_per_device, program)
  if execution == "function":
    run = tf.function(run, autograph=False)
  first, *others = [[np.asarray(y) for y in p] for p in run([[tf.constant(x) for x, _ in inputs]])]
  for other in others:
    assert [y.tobytes() for y in first] == [y.tobytes() for y in other]
  return first


def _reference(fn, x, dy):
  x = tf.constant(x)
  with tf.GradientTape() as tape:
    tape.watch(x)
    y = fn(x)
  return y, tape.gradient(y, x, dy)


def _assert_near(got, want):
  scale = np.max(np.abs(want))
  np.testing.assert_allclose(got / scale, np.asarray(want) / scale, atol=1e-6)


RUNS = [(l, mode) for i, l in enumerate(LAYOUTS) for mode in MODE_PAIRS[i % 2]]


# In `make test` three layouts, and among them each mode.
@pytest.mark.parametrize(("layout", "mode"), kept(RUNS, [*RUNS[2:6], RUNS[10]]))
def test_equals_tensorflow(layout, mode):
  """Both transforms and the gradients of both."""
  x, dy, k, dx = (_complex(i) for i in range(4))

  def build(x, dy, k, dx):
    y, back = fft3d(x, FREQUENCIES), ifft3d(k, SPACE)
    return [y, *mtf.gradients([y], [x], [dy]), back, *mtf.gradients([back], [k], [dx])]

  inputs = [(x, SPACE), (dy, FREQUENCIES), (k, FREQUENCIES), (dx, SPACE)]
  got = _run(build, layout, mode, inputs)
  want = [*_reference(tf.signal.fft3d, x, dy), *_reference(tf.signal.ifft3d, k, dx)]
  for a, b in zip(got, want):
    _assert_near(a, b)


def test_double_precision():
  x = _complex(0, np.complex128)
  (got,) = _run(lambda x: [fft3d(x, FREQUENCIES)], LAYOUTS[1], "simd_function", [(x, SPACE)])
  np.testing.assert_allclose(got, np.fft.fftn(x), rtol=1e-12, atol=1e-12)


def test_scalars_with_complex_tensors():
  x = _complex(7)
  got = _run(
    lambda x: [x * 2.5, x * (2 - 1j), x + 1.5, x - 1j, x / 2], ONE, "placement_eager", [(x, SPACE)]
  )
  for a, b in zip(got, [x * 2.5, x * (2 - 1j), x + 1.5, x - 1j, x / 2]):
    np.testing.assert_allclose(a, b, rtol=1e-6)


def test_gradient_of_the_spectrum():
  """The gradient of a real loss, and the gradient of that gradient."""
  x, weights = _complex(5), np.random.default_rng(6).random([4, 8, 12]).astype(np.float32)

  def build(x, weights):
    power = SquaredMagnitude(fft3d(x, FREQUENCIES)).outputs[0]
    (dx,) = mtf.gradients([mtf.reduce_sum(power * weights)], [x])
    size = mtf.reduce_sum(SquaredMagnitude(dx).outputs[0])
    return [power, dx, size, *mtf.gradients([size], [dx])]

  got = _run(build, LAYOUTS[2], "simd_function", [(x, SPACE), (weights, FREQUENCIES)])
  v = tf.constant(x)
  with tf.GradientTape() as tape:
    tape.watch(v)
    power = tf.square(tf.abs(tf.signal.fft3d(v)))
    loss = tf.reduce_sum(power * weights)
  dx = tape.gradient(loss, v)
  for a, b in zip(got, [power, dx, tf.reduce_sum(tf.square(tf.abs(dx))), 2.0 * dx]):
    _assert_near(a, b)


@pytest.mark.parametrize(
  "layout,text",
  [
    ("z:rows", "z=12 is split over rows=2, but z and kx must be whole"),
    ("kx:cols", "kx=4 is split over cols=4, but z and kx must be whole"),
    ("x:rows", "x=4 is split over rows=2, ky=8 is whole"),
    ("x:rows,y:cols,ky:cols,kz:rows", "x=4 is split over rows=2, ky=8 is split over cols=4"),
    ("y:cols,kz:rows", "y=8 is split over cols=4, kz=12 is split over rows=2"),
  ],
)
def test_layouts_that_are_refused(layout, text):
  graph = mtf.Graph()
  x = mtf.zeros(mtf.Mesh(graph, "m"), SPACE, tf.complex64)
  fft3d(x, FREQUENCIES)
  with pytest.raises(mtf.LayoutError, match=f"^fft3d: {text}"):
    mtf.describe(graph, layout, "rows:2,cols:4")


def test_wrong_arguments():
  mesh = mtf.Mesh(mtf.Graph(), "m")
  with pytest.raises(mtf.DTypeError, match="fft3d: the input must be complex"):
    FFT3D(mtf.zeros(mesh, SPACE), FREQUENCIES)
  with pytest.raises(mtf.ShapeError, match="must have three dimensions"):
    FFT3D(mtf.zeros(mesh, SPACE, tf.complex64), FREQUENCIES[::-1])
  with pytest.raises(mtf.ShapeError, match="must have three dimensions"):
    FFT3D(mtf.zeros(mesh, SPACE[:2], tf.complex64), FREQUENCIES[:2])


def test_bytes_moved():
  """Of a slice, the part that stays at home does not move."""
  graph = mtf.Graph()
  fft3d(mtf.zeros(mtf.Mesh(graph, "m"), SPACE, tf.complex64), FREQUENCIES)
  operations = mtf.describe(graph, PENCILS, "rows:2,cols:4").to_dict()["operations"]
  (cost,) = [op for op in operations if op["type"] == "FFT3D"]
  part = 4 * 8 * 12 * 8 // 8
  assert cost["bytes_moved"] == {"rows": part // 2, "cols": part * 3 // 4}
  assert [c["kind"] for c in cost["collectives"]] == ["alltoall", "alltoall"]


@pytest.mark.parametrize("implementation", kept(["placement", "simd"], ["simd"]))
def test_program(implementation, run_forked):
  result = run_forked(
    ["examples/distributed_fft.py", "--size", "8", "--implementation", implementation]
  )
  assert "2 alltoall" in result.stdout
  assert float(result.stdout.split("error of the gradient: ")[1]) < 1e-5
