"""Waves on split grids: against NumPy, and the adjoint against gradients through the loop."""

from __future__ import annotations

import numpy as np
import pytest

import mesh_tensorflow as mtf
from examples import mesh_flags, wave

STEPS = 12


def _laplacian(u):
  """Of fourth order, zero outside."""
  padded = np.pad(u, 2)
  total = wave.CENTRE * u.ndim * u
  for axis in range(u.ndim):
    for offset, weight in ((-2, wave.FAR), (-1, wave.NEAR), (1, wave.NEAR), (2, wave.FAR)):
      inner = [slice(2, -2)] * u.ndim
      inner[axis] = slice(2 + offset, 2 + offset + u.shape[axis])
      total = total + weight * padded[tuple(inner)]
  return total


def _forward(start, speed):
  now, before = start, start
  for _ in range(STEPS):
    now, before = 2 * now - before + speed * _laplacian(now), now
  return now, before


def _fields(grid, seed=0):
  rng = np.random.default_rng(seed)
  size = [grid.cells] * len(grid.blocks)
  return rng.normal(size=size), rng.uniform(0.05, 0.2, size)


@pytest.mark.parametrize(
  "mesh_shape, implementation, dimensions, cells",
  [
    # In `make test` there is another test of this mesh.
    pytest.param("x:2,y:2", "simd", 2, 12, marks=pytest.mark.long),
    # Blocks two cells wide: no wider than a halo.
    pytest.param("x:4,y:2", "placement", 2, 8, marks=pytest.mark.long),
    ("x:8", "simd", 2, 8),  # And of one cell: halos reach beyond the neighbour.
    ("x:2,y:2,z:2", "simd", 3, 6),
  ],
)
def test_waves_and_their_adjoint(mesh_shape, implementation, dimensions, cells):
  axes = mesh_flags.axes_of(mesh_shape, dimensions, "wave")
  grid = wave.Grid(cells, tuple(axis.size for axis in axes))
  impl = mesh_flags.make_mesh_impl(mesh_shape, grid.layout(mesh_shape), implementation)
  experiment = wave.Experiment(grid, impl, STEPS)
  start, speed = _fields(grid)
  now, before = (t.numpy() for t in experiment.run(*[grid.field(v) for v in (start, start, speed)]))
  want, want_before = _forward(start, speed)
  scale = np.max(np.abs(want))
  np.testing.assert_allclose(now.reshape(want.shape), want, atol=1e-5 * scale)
  np.testing.assert_allclose(before.reshape(want.shape), want_before, atol=1e-5 * scale)
  target = _fields(grid, 1)[0]
  to_start, to_speed, first = (
    t.numpy() for t in experiment.back(now, before, grid.field(speed), now - grid.field(target))
  )
  np.testing.assert_allclose(first, grid.field(start), atol=1e-5 * scale)
  # The slopes of the misfit along two directions, in float64.
  for direction, gradient, change in (
    (_fields(grid, 2)[0], to_start, lambda d: (start + d, speed)),
    (_fields(grid, 3)[0], to_speed, lambda d: (start, speed + d)),
  ):
    misfits = [
      0.5 * np.sum((_forward(*change(s * 1e-6 * direction))[0] - target) ** 2) for s in (1, -1)
    ]
    slope = (misfits[0] - misfits[1]) / 2e-6
    found = np.sum(gradient.reshape(want.shape) * direction)
    norm = np.linalg.norm(gradient) * np.linalg.norm(direction)
    assert abs(found - slope) < 1e-5 * norm


def test_the_adjoint_is_the_gradient_through_the_loop():
  grid = wave.Grid(12, (2, 2))
  impl = mesh_flags.make_mesh_impl("x:2,y:2", grid.layout("x:2,y:2"))
  experiment = wave.Experiment(grid, impl, STEPS)
  start, speed, target = (grid.field(v) for v in (*_fields(grid), _fields(grid, 1)[0]))
  now, before = experiment.run(start, start, speed)
  by_hand = experiment.back(now, before, speed, now - target)
  misfit, *by_loop = experiment.kept(start, speed, target)
  np.testing.assert_allclose(misfit, 0.5 * np.sum((now - target) ** 2), rtol=1e-5)
  for a, b in zip(by_hand, by_loop):
    np.testing.assert_allclose(a, b, atol=1e-5 * np.max(np.abs(b)))


def test_what_cannot_be_is_told():
  with pytest.raises(mtf.ShapeError, match="10 cells along y cannot be cut into 4 blocks"):
    wave.Grid(10, (2, 4))
  with pytest.raises(mtf.MeshShapeError, match="has 3 axes"):
    wave.Grid(8, (2, 2)).layout("x:2,y:2,z:2")
  with pytest.raises(SystemExit):  # Beyond the limit of stability.
    wave.parse_args(["--courant", "0.9"])


@pytest.mark.long
def test_the_program_compares_and_draws(capsys, tmp_path):
  picture = tmp_path / "wave.svg"
  found = wave.main(["--cells=16", "--steps=40", "--kept_steps=10", f"--picture={picture}"])
  assert max(found.values()) < 1e-4
  assert picture.stat().st_size > 5000
  assert "mesh, 40 steps back" in capsys.readouterr().out
