"""The particle-mesh simulation: against NumPy, against one device, and its gradient."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf
from examples import mesh_flags, nbody
from examples.particle_mesh import Box

CELLS = 8
NOISE = np.random.default_rng(0).normal(size=[CELLS] * 3).astype(np.float32)
# In `make test` the gradient, which runs the simulation, too, is compared on the first.
MESHES = [
  pytest.param("rows:2,cols:2", "simd", marks=pytest.mark.long),
  pytest.param("rows:4", "placement", marks=pytest.mark.long),
  pytest.param("rows:2,cols:4", "simd", marks=pytest.mark.long),
]


def _box_and_mesh(mesh_shape, implementation, halo=4):
  rows, cols = mesh_flags.axes_of(mesh_shape, 2, "nbody")
  box = Box(CELLS, rows.size, cols.size, halo)
  return box, mesh_flags.make_mesh_impl(mesh_shape, box.layout(mesh_shape), implementation)


def _simulation(mesh_shape, implementation, steps=2):
  return nbody.Simulation(*_box_and_mesh(mesh_shape, implementation), steps, steps)


@pytest.fixture(scope="module")
def whole():
  """The box as one block on one device."""
  return nbody.Simulation(Box(CELLS, 1, 1, 4), mesh_flags.one_device(), 2, 2)


@pytest.fixture(scope="module")
def density(whole):
  return whole.observe(whole.run(NOISE))[0].numpy()


def _cloud_in_cell(places):
  """Particles [3, number], each shared among eight cells of the whole box."""
  total = np.zeros([CELLS] * 3)
  low = np.floor(places).astype(int)
  for corner in np.ndindex(2, 2, 2):
    at = low + np.reshape(corner, (3, 1))
    weight = np.prod(1 - np.abs(places - at), axis=0)
    np.add.at(total, tuple(at % CELLS), weight)
  return total - 1


@pytest.mark.parametrize(
  "mesh_shape, implementation", [("rows:2,cols:2", "simd"), ("rows:4", "placement")]
)
def test_painting_and_reading_are_those_of_the_whole_box(mesh_shape, implementation):
  # With rows:4 a block is two cells wide, and its halo four: it reaches beyond the next block.
  box, impl = _box_and_mesh(mesh_shape, implementation)
  rng = np.random.default_rng(1)
  moved = rng.uniform(-2.5, 2.5, box.particles.to_integer_list).astype(np.float32)
  field = rng.normal(size=[3, *[CELLS] * 3]).astype(np.float32)
  fields = mtf.Shape([box.particles[0], *box.field])

  @mtf.function(
    impl, [mtf.TensorSpec(box.particles, tf.float32), mtf.TensorSpec(fields, tf.float32)]
  )
  def paint(moved, field):
    positions = box.lattice(moved.mesh) + moved
    index, weight, lost = box.cloud(positions)
    return positions, box.paint(index, weight), box.read(field, index, weight), lost

  positions, painted, read, lost = (t.numpy() for t in paint(moved, field))
  corners = np.stack(np.meshgrid(*[np.arange(d.size) * (CELLS // d.size) for d in box.blocks],
                                 indexing="ij"))  # fmt: skip
  positions[:2] += corners[..., None]
  places = positions.reshape(3, -1).astype(np.float64)
  np.testing.assert_allclose(painted, _cloud_in_cell(places), atol=2e-5)
  low = np.floor(places).astype(int)
  want = np.zeros([3, places.shape[1]])
  for corner in np.ndindex(2, 2, 2):
    at = low + np.reshape(corner, (3, 1))
    want += np.prod(1 - np.abs(places - at), axis=0) * field[(slice(None), *(at % CELLS))]
  np.testing.assert_allclose(read.reshape(3, -1), want, atol=2e-5)
  assert lost == 0


@pytest.mark.parametrize("mesh_shape, implementation", MESHES)
def test_densities_are_those_of_one_block(mesh_shape, implementation, density):
  simulation = _simulation(mesh_shape, implementation)
  found = simulation.observe(simulation.run(NOISE))[0].numpy()
  assert np.max(np.abs(density)) > 0.5  # It is not uniform any more.
  np.testing.assert_allclose(found, density, atol=1e-5 * np.max(1 + density))
  assert abs(np.mean(found)) < 1e-5  # No particle is lost.


@pytest.mark.slow
def test_the_gradient_is_that_of_one_block_and_of_finite_differences(whole):
  target = np.zeros_like(NOISE)
  loss, gradient, lost = _simulation("rows:2,cols:2", "simd").distance(NOISE, target)
  loss_1, gradient_1, _ = whole.distance(NOISE, target)
  assert lost == 0
  np.testing.assert_allclose(loss, loss_1, rtol=1e-5)
  np.testing.assert_allclose(gradient, gradient_1, atol=1e-5 * np.max(np.abs(gradient_1)))
  direction = np.sign(gradient_1.numpy())
  above, below = (whole.distance(NOISE + s * 2e-3 * direction, target)[0] for s in (1, -1))
  # The loss has kinks where a particle crosses an edge of a cell, so they agree in the mean only.
  slope = np.sum(direction * gradient_1.numpy())
  np.testing.assert_allclose((above - below) / 4e-3, slope, rtol=2e-2)


def test_the_spectrum_is_that_of_numpy(whole):
  box = whole.box

  @mtf.function(mesh_flags.one_device(), [mtf.TensorSpec(box.field, tf.float32)])
  def power(field):
    return box.power(field)

  spectrum = np.abs(np.fft.fftn(NOISE)) ** 2 / NOISE.size
  m = np.fft.fftfreq(CELLS, 1 / CELLS)
  bins = (np.sqrt(sum(k**2 for k in np.meshgrid(m, m, m))) + 0.5).astype(int)
  found, modes = power(NOISE)
  np.testing.assert_array_equal(modes, [np.sum(bins == b) for b in range(CELLS // 2)])
  np.testing.assert_allclose(
    found, [np.mean(spectrum[bins == b]) for b in range(CELLS // 2)], rtol=1e-4
  )


def test_particles_beyond_their_halo_are_told():
  box, impl = _box_and_mesh("rows:2,cols:2", "simd", halo=1)
  simulation = nbody.Simulation(box, impl, 2, 2)
  with pytest.raises(mtf.ShapeError, match="halo of 1 cells .* --halo 2"):
    simulation.run(20 * NOISE)


def test_what_cannot_be_cut_is_told():
  with pytest.raises(mtf.ShapeError, match="8 cells along y cannot be cut into 3 blocks"):
    Box(8, 2, 3)
  with pytest.raises(mtf.ShapeError, match="must be even"):
    Box(9, 1, 1)
  with pytest.raises(mtf.MeshShapeError, match="has 3 axes"):
    Box(8).layout("a:2,b:2,c:2")
  with pytest.raises(SystemExit):
    nbody.parse_args(["--steps", "7", "--steps_per_call", "5"])


@pytest.mark.long
def test_the_program_compares_and_draws(capsys, tmp_path):
  picture = tmp_path / "nbody.svg"
  found = nbody.main(
    ["--cells=8", "--steps=2", "--steps_per_call=1", "--gradient_steps=1", f"--picture={picture}"]
  )
  assert found["difference of densities"] < 1e-5
  assert found["difference of gradients"] < 1e-5
  assert "power spectrum" in picture.read_text() or picture.stat().st_size > 5000
  assert "8^3 particles, 2 steps on rows:2,cols:2" in capsys.readouterr().out
