"""The product by panels and conjugate gradients, on several meshes, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import mesh_tensorflow as mtf
from examples import matrix, mesh_flags

SIZE = 24


def _matrices(mesh_shape, implementation, **kwargs):
  impl = mesh_flags.make_mesh_impl(mesh_shape, matrix.layout_of(mesh_shape), implementation)
  return matrix.Matrices(impl, SIZE, **kwargs)


@pytest.mark.parametrize(
  "mesh_shape, implementation, panels",
  [
    ("rows:2,cols:2", "simd", 4),
    pytest.param("rows:4,cols:2", "placement", 4, marks=pytest.mark.long),
    pytest.param("rows:2,cols:4", "simd", 24, marks=pytest.mark.long),
    pytest.param("rows:3,cols:2", "simd", 6, marks=pytest.mark.long),
    ("rows:8", "placement", 8),
  ],
)
def test_product(mesh_shape, implementation, panels):
  rng = np.random.default_rng(0)
  a, b = (rng.normal(size=[SIZE, SIZE]).astype(np.float32) for _ in range(2))
  found = _matrices(mesh_shape, implementation, panels=panels).product(a, b)
  np.testing.assert_allclose(found, np.float64(a) @ b, atol=1e-5)


@pytest.mark.parametrize(
  "mesh_shape, implementation",
  [
    ("rows:2,cols:2", "simd"),
    pytest.param("rows:4,cols:2", "placement", marks=pytest.mark.long),
  ],
)
def test_system(mesh_shape, implementation):
  rng = np.random.default_rng(1)
  times = rng.uniform(0, 10, SIZE).astype(np.float32)
  values = rng.normal(size=SIZE).astype(np.float32)
  matrices = _matrices(mesh_shape, implementation, panels=SIZE, most=40)
  x, residuals, steps = (t.numpy() for t in matrices.fit(times, values))
  kernel = np.exp(-0.5 * (np.float64(times)[:, None] - times) ** 2 / 0.3**2) + 0.09 * np.eye(SIZE)
  np.testing.assert_allclose(x, np.linalg.solve(kernel, values), atol=3e-4)
  # It ends by itself, at the first residual below the tolerance.
  assert 0 < steps < 40
  assert residuals[steps - 1] < 1e-5 <= np.min(residuals[: steps - 1])
  assert not np.any(residuals[steps:])


@pytest.mark.parametrize(
  "mesh_shape, implementation, panels",
  [
    ("rows:2,cols:2", "simd", 4),
    pytest.param("rows:3,cols:2", "placement", 6, marks=pytest.mark.long),
    pytest.param("rows:8", "simd", 8, marks=pytest.mark.long),
  ],
)
def test_factor(mesh_shape, implementation, panels):
  times = np.random.default_rng(1).uniform(0, 10, SIZE).astype(np.float32)
  factor = _matrices(mesh_shape, implementation, panels=panels).factor(times)
  kernel = np.exp(-0.5 * (np.float64(times)[:, None] - times) ** 2 / 0.3**2) + 0.09 * np.eye(SIZE)
  assert not np.any(np.triu(factor, 1))
  np.testing.assert_allclose(factor @ factor.T, kernel, atol=1e-5)
  np.testing.assert_allclose(factor, np.linalg.cholesky(kernel), atol=1e-4)


def test_a_product_holds_a_panel_at_a_time():
  matrices = matrix.Matrices(
    mesh_flags.make_mesh_impl("rows:2,cols:2", matrix.layout_of("rows:2,cols:2")), 64, 16
  )
  # Each panel of a block's 32 rows and 4 columns is summed over two processors, 16 times; of B
  # likewise.
  report = mtf.describe(matrices._product)
  sent = 32 * 4 * 4 * 16
  assert report.bytes_moved() == {"rows": sent, "cols": sent}


def test_what_cannot_be_is_told():
  with pytest.raises(mtf.ShapeError, match="5 panels do not divide"):
    _matrices("rows:2", "simd", panels=5)
  with pytest.raises(SystemExit):
    matrix.parse_args(["--panels", "3", "--size", "24"])


@pytest.mark.slow
def test_the_program_compares_and_draws(capsys, tmp_path):
  picture = tmp_path / "matrix.svg"
  found = matrix.main(["--size=32", "--panels=4", f"--picture={picture}"])
  assert found["product, difference to float64"] < 1e-5
  assert found["solution, difference to float64"] < 1e-4
  assert found["factor times its transpose, difference to the matrix"] < 1e-5
  assert picture.stat().st_size > 5000
  assert "32 x 32 on rows:2,cols:2" in capsys.readouterr().out
