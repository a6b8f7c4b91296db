"""Structure in a universe of particles: a particle-mesh simulation, split over a mesh of devices.

Dark matter is particles in a periodic box of n^3 cells, which move by the gravity of their density
contrast, on a grid: paint the particles, solve Poisson's equation by Fourier transforms, read the
force where the particles are, kick and drift (Hockney and Eastwood, Computer Simulation Using
Particles, 1988). The universe is Einstein and de Sitter's: fluctuations grow as the scale factor a,
as long as they are small. All of it is differentiable, down to the initial noise.

  python -m mesh_tensorflow.examples.nbody
  python -m mesh_tensorflow.examples.nbody --cells 64 --mesh_shape "rows:2,cols:4" --picture n.svg

docs/nbody.md goes through it.
"""

from __future__ import annotations

import argparse
import time

import mesh_tensorflow as mtf  # isort: skip - before TensorFlow, whose start-up notices it mutes

import numpy as np
import tensorflow as tf
import tqdm

from mesh_tensorflow.examples import mesh_flags
from mesh_tensorflow.examples.particle_mesh import Box


class Simulation:
  """A box on a mesh, compiled.

  Args:
    box: a `Box`.
    mesh_impl: the mesh, with `box.layout` as its layout.
    steps: steps of a call of `evolve`.
    a_range: the scale factors between which `total_steps` steps lead.
    total_steps: steps in all.
  """

  def __init__(
    self,
    box: Box,
    mesh_impl: mtf.MeshImpl,
    steps: int,
    total_steps: int,
    a_range: tuple[float, float] = (0.1, 1.0),
  ):
    self.box = box
    first, last = a_range
    da = (last - first) / total_steps
    field = mtf.TensorSpec(box.field, tf.float32)
    state = mtf.TensorSpec(box.particles, tf.float32)
    scalar = mtf.TensorSpec([], tf.float32)

    @mtf.function(mesh_impl, input_signature=[field])
    def begin(noise):
      return box.begin(noise, first)

    @mtf.function(mesh_impl, input_signature=[state, state, scalar])
    def evolve(positions, momenta, a):
      return box.evolve(positions, momenta, a, da, steps)

    @mtf.function(mesh_impl, input_signature=[state])
    def observe(positions):
      density = box.density(positions)
      return density, *box.power(density)

    @mtf.function(mesh_impl, input_signature=[field, field])
    def distance(noise, target):
      a = mtf.constant(noise.mesh, first, [])
      positions, _, _, lost = box.evolve(*box.begin(noise, first), a, da, total_steps)
      loss = mtf.reduce_sum(mtf.square(box.density(positions) - target)) * 0.5
      (gradient,) = mtf.gradients([loss], [noise])
      return loss, gradient, lost

    self.begin, self.evolve, self.observe, self.distance = begin, evolve, observe, distance
    self.first = first
    self.calls = total_steps // steps

  def run(self, noise: np.ndarray, progress: bool = False) -> tf.Tensor:
    """From noise to positions at the end.

    Args:
      noise: a field of standard normal numbers.
      progress: whether a bar shows it.

    Raises:
      ShapeError: particles got beyond the halos of their blocks.
    """
    positions, momenta = self.begin(noise)
    a = tf.constant(self.first)
    for _ in tqdm.tqdm(range(self.calls), disable=not progress, desc="steps"):
      positions, momenta, a, lost = self.evolve(positions, momenta, a)
      self.check(lost)
    return positions

  def check(self, lost: tf.Tensor) -> None:
    """Raises `ShapeError` if particles got beyond their halos."""
    if int(lost):
      raise mtf.ShapeError(
        f"nbody: particles were farther than the halo of {self.box.halo} cells from their blocks "
        f"{int(lost)} times; give them a wider one, --halo {2 * self.box.halo}"
      )


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
  """The command line."""
  parser = argparse.ArgumentParser(
    description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
  )
  parser.add_argument("--cells", type=int, default=32, help="n: the box has n^3 cells")
  parser.add_argument("--halo", type=int, default=6, help="cells a particle may leave its block by")
  parser.add_argument("--steps", type=int, default=20, help="steps of leapfrog")
  parser.add_argument("--steps_per_call", type=int, default=5, help="steps of one loop")
  parser.add_argument("--seed", type=int, default=0, help="of the initial noise")
  parser.add_argument(
    "--gradient_steps", type=int, default=3, help="steps differentiated (0: none)"
  )
  parser.add_argument("--picture", default="", help="a file for density and power spectrum")
  mesh_flags.add_mesh_flags(parser, "rows:2,cols:2")
  args = parser.parse_args(argv)
  if args.steps_per_call < 1 or args.steps < 1 or args.steps % args.steps_per_call:
    parser.error(
      f"--steps {args.steps} must be a multiple of --steps_per_call {args.steps_per_call}"
    )
  return args


def main(argv: list[str] | None = None) -> dict[str, float]:
  """Simulates on the mesh and on one device, and compares; returns what it prints."""
  args = parse_args(argv)
  rows, cols = mesh_flags.axes_of(args.mesh_shape, 2, "nbody")
  box = Box(args.cells, rows.size, cols.size, args.halo)
  impl = mesh_flags.make_mesh_impl(
    args.mesh_shape, box.layout(args.mesh_shape), args.implementation
  )
  noise = np.random.default_rng(args.seed).normal(size=[args.cells] * 3).astype(np.float32)
  split = Simulation(box, impl, args.steps_per_call, args.steps)
  start = time.perf_counter()
  positions = split.run(noise, progress=True)
  seconds = time.perf_counter() - start
  density, power, modes = (t.numpy() for t in split.observe(positions))
  initial = split.observe(split.begin(noise)[0])[1].numpy()
  # The same blocks and halos on one device: only where they lie differs.
  single = Simulation(box, mesh_flags.one_device(), args.steps_per_call, args.steps)
  other = single.observe(single.run(noise))[0].numpy()
  largest = slice(1, 3)  # Modes of the longest waves, which grow linearly.
  growth = np.sum((power * modes)[largest]) / np.sum((initial * modes)[largest])
  found = {
    "difference of densities": float(np.max(np.abs(density - other)) / np.max(1 + other)),
    "growth of the longest waves": float(np.sqrt(growth)),
    "mass": float(np.mean(density)),
    "largest density": float(np.max(density) + 1),
  }
  print(mtf.describe(split.evolve))
  print(f"{args.cells}^3 particles, {args.steps} steps on {args.mesh_shape}: {seconds:.1f} s")
  if args.gradient_steps:
    found |= compare_gradients(box, impl, noise, args.gradient_steps)
  for name, value in found.items():
    print(f"{name}: {value:.3g}")
  if args.picture:
    draw(args.picture, density, initial, power, modes)
    print(f"written: {args.picture}")
  return found


def compare_gradients(
  box: Box, impl: mtf.MeshImpl, noise: np.ndarray, steps: int
) -> dict[str, float]:
  """The gradient to the initial noise, of half the sum of squares of the density contrast."""
  target = np.zeros_like(noise)
  results = []
  for mesh_impl in (impl, mesh_flags.one_device()):
    simulation = Simulation(box, mesh_impl, steps, steps)
    loss, gradient, lost = simulation.distance(noise, target)
    simulation.check(lost)
    results.append((float(loss), gradient.numpy()))
  (loss, gradient), (loss_1, gradient_1) = results
  scale = float(np.max(np.abs(gradient_1)))
  return {
    "loss": loss,
    "difference of losses": abs(loss - loss_1) / abs(loss_1),
    "difference of gradients": float(np.max(np.abs(gradient - gradient_1))) / scale,
  }


def draw(
  path: str, density: np.ndarray, initial: np.ndarray, power: np.ndarray, modes: np.ndarray
) -> None:
  """Draws the density, summed over a quarter of the box, and the power spectra."""
  import matplotlib.figure

  figure = matplotlib.figure.Figure(figsize=(9, 4), layout="constrained")
  left, right = figure.subplots(1, 2)
  n = density.shape[0]
  left.imshow(np.log1p(np.sum(density[: n // 4] + 1.0, axis=0)), cmap="magma", origin="lower")
  left.set(title="log density, a quarter of the box", xlabel="z (cells)", ylabel="y (cells)")
  k = 2 * np.pi / n * np.arange(len(power))
  shown = slice(1, None)
  right.loglog(k[shown], power[shown], label="a = 1")
  right.loglog(k[shown], initial[shown], label="a = 0.1")
  right.loglog(k[shown], 100 * initial[shown], "--", label="a = 0.1, grown linearly")
  right.set(title="power spectrum", xlabel="k (1 / cell)", ylabel="P(k)")
  right.set_ylim(bottom=1e-4)
  right.legend()
  figure.savefig(path)


if __name__ == "__main__":
  mesh_flags.run(main)
